"""The pages: their commands run, and the files, lines, flags and links that they name are there."""

import dataclasses
import importlib
import json
import re
import shlex
from types import ModuleType

import conftest
import pytest
from support import ROOT, SCRIPTS, TINY, TINY_RUN, command_line, few_chains, random_batch

import grpo_arca

README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("[rm]e*/*.md"),
         ROOT / "tools/tour.ipynb"]  # fmt: skip
TEXTS = {str(page.relative_to(ROOT)): page.read_text(encoding="utf-8") for page in PAGES}
METHOD, REWARD = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
OTHER_FLAGS = {  # of accelerate, pip and ruff
    "cpu", "multi_gpu", "num_processes", "num_cpu_threads_per_process", "check", "help", "upgrade",
}  # fmt: skip


def launches() -> list[list[str]]:
    """Returns script and flags of each `accelerate launch` in the commands of the pages."""
    found = []
    for block in re.findall(r"```bash\n(.*?)```", "".join(TEXTS.values()), re.DOTALL):
        for line in block.replace("\\\n", " ").replace("$seed", "1").splitlines():
            if "accelerate launch" in line:
                command = shlex.split(line.partition("accelerate launch")[2], comments=True)
                begin = next(i for i, word in enumerate(command) if word.startswith("grpo_"))
                found.append([word for word in command[begin:] if word != "..."])
    return found


def script_of(command: list[str]) -> ModuleType:
    """Returns the script of a command; grpo_arca.py stands for the one that a reader makes."""
    return importlib.import_module(command[0].removesuffix(".py").replace("mine", "arca"))


SMALL = command_line(
    TINY_RUN
    | {"max_steps": 1, "model_name_or_path": TINY, "dataset_name": "rows.jsonl"}
    | {"output_dir": "out"}
)


def different(commands: list[list[str]]) -> list[list[str]]:
    """Returns the commands that make different runs where they are made small."""
    return list({repr(script_of(c).parse_args([*c[1:], *SMALL])): c for c in commands}.values())


# ---- Commands and code ---------------------------------------------------------------------------
def test_the_pages_have_launches_and_their_flags_parse():
    """Those of docs/papers.md are one a paper."""
    assert len(launches()) >= 8
    parsed = [script_of(command).parse_args(command[1:]) for command in launches()]
    papers = [args.credit for args in parsed if args.output_dir.startswith("runs/papers/")]
    assert papers == ["arca", "oar_g", "s_trace"]


@pytest.mark.slow
@pytest.mark.parametrize("command", different(launches()), ids=" ".join)
def test_a_launch_trains(command, run_main, rows_of, tmp_path, monkeypatch):
    """On the embedded model, in one small step, and on a small file."""
    (tmp_path / "my.py").write_text(REWARD)
    chains = few_chains(20, False)
    rows = [{"problem": p.prompt, "solution": p.answer, "answer": p.answer} for p in chains]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    flags = [word for word in command[1:] if word not in ("--dataset_config", "main")]  # a file
    flags = ["{}" if "enable_thinking" in word else word for word in flags]  # not in this template
    monkeypatch.setattr(conftest, "command_line", lambda _: [*flags, *SMALL])
    monkeypatch.setattr(conftest, "grpo_arca", script_of(command))
    assert run_main()[0] == 0
    assert len(rows_of()) == 1


def test_the_readmes_method_is_what_its_comment_says():
    names = {}
    exec(METHOD, names)
    assert names["token_scores"](None, random_batch(), {})[0].tolist() == list(range(1, 13))


def test_the_readmes_reward_pays_more_for_short_right_answers():
    names = {}
    exec(REWARD, names)
    texts = ["\\boxed{42}", "6 * 7 is \\boxed{42}", "\\boxed{41}"]
    ids = [[1] * 10, [1] * 100, [1]]
    paid = names["short_and_right"](["6 * 7?"] * 3, texts, ids, ["42"] * 3, other=[1] * 3)
    assert paid == [1 / 1.1, 1 / 2, 0]


def test_the_readmes_notebook_names_functions_that_exist():
    names = set(re.findall(r"grpo_arca\.(?!py)(\w+)", README))
    assert names == {"run_to_the_end", "parse_args"} <= vars(grpo_arca).keys()


def test_a_method_may_read_what_contributing_says(make_run, monkeypatch):
    """With several updates a rollout, which leave the most to read."""
    table = TEXTS["CONTRIBUTING.md"].split("### What a method may read")[1].split("##")[0]
    absent = set(re.findall(r"`(\w+)`", table.split("with the same fields but")[1].split("|")[0]))
    run = make_run(num_iterations=2, beta=0.1, max_completion_length=8)
    seen = []
    monkeypatch.setattr(grpo_arca, "assign_credit", lambda *given: seen.append(given))
    monkeypatch.setattr(grpo_arca, "credit_averages", lambda *_: {"x": (run.eos_ids, run.eos_ids)})
    batch = grpo_arca.collect(run, {"seconds_rollout": 1})
    batch.advantages += 1  # so that all have a gradient
    micros = grpo_arca.micro_batches(run, batch)[0]
    grpo_arca.score(run, batch, micros, {})
    names = set(re.findall(r"micro\.(\w+)", table)) - {"bounds"}
    assert absent == {"scores", "old_logp", "reference_logp"} < names
    (_, given, (micro, *_), _) = seen[0]
    for name in names:
        assert getattr(micro, name) is not None, name
        assert (getattr(given, name) is None) == (name in absent), name


# ---- What pages name -----------------------------------------------------------------------------
def test_the_readme_has_at_most_200_lines():
    assert README.count("\n") <= 200


@pytest.mark.parametrize("page", TEXTS)
def test_links_and_files_that_a_page_names_exist(page):
    folder = (ROOT / page).parent
    for link in re.findall(r"\]\((?!http)([^)\s]+)\)", TEXTS[page]):
        path, _, anchor = link.partition("#")
        target = folder / path if path else ROOT / page
        assert target.exists(), link
        assert anchor == "" or anchor in [
            re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")
            for heading in re.findall(r"^#+ (.*)", target.read_text(), re.M)
        ]
    folders = "tools|results|tests|common|methods|docs"
    for name in re.findall(rf"(?<![\w/.])((?:{folders})/[\w/.]+\.[a-z]+)\b", TEXTS[page]):
        assert (ROOT / name).exists() or name == "methods/mine.py", name


@pytest.mark.parametrize("page", TEXTS)
def test_flags_that_a_page_names_exist(page):
    known = set(OTHER_FLAGS)
    for script in SCRIPTS:
        known |= {flag.name for flag in dataclasses.fields(importlib.import_module(script).Args)}
    for program in [*ROOT.glob("tools/*.py"), *ROOT.glob("results/*.py")]:
        known |= set(re.findall(r'"--(\w+)"', program.read_text(encoding="utf-8")))
    for method in ROOT.glob("methods/*.py"):
        known |= set(re.findall(r"(\w+): .*= flag\(", method.read_text(encoding="utf-8")))
    named = set(re.findall(r"(?<![\w-])--([a-z]\w*)(?![\w-])", TEXTS[page]))
    assert named - known == set()


def test_trls_flags_that_the_page_calls_absent_are():
    rows = re.findall(r"^\| (`.*?) \|", TEXTS["docs/trl.md"].split("not here:")[1], re.MULTILINE)
    absent = set(re.findall(r"`(\w+)", " ".join(rows)))
    assert len(absent) > 25
    assert absent.isdisjoint(flag.name for flag in dataclasses.fields(grpo_arca.Args))
