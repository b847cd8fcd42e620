"""The README's commands have flags that exist, and its examples do what it says."""

import dataclasses
import importlib
import importlib.util
import json
import math
import re
import shlex
import subprocess
import sys

import pytest
import torch
from accelerate.state import AcceleratorState
from support import ROOT, TINY_RUN, command_line

import grpo_arca as trainer
from common.data import encode_prompt, parse_rows
from common.problems import Problem

README = (ROOT / "README.md").read_text(encoding="utf-8")
COMMANDS = "\n".join(re.findall(r"```bash\n(.*?)```", README, re.DOTALL))
HEADROOM = (ROOT / "results/HEADROOM.md").read_text(encoding="utf-8")
REWARD, METHOD, RLSD, NOTEBOOK = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def launches() -> list[list[str]]:
    """Returns the arguments of each `accelerate launch` in the README, from the script on."""
    found = []
    for line in COMMANDS.replace("\\\n", " ").splitlines():
        if "accelerate launch" in line:
            words = shlex.split(line, comments=True)
            begin = next(i for i, word in enumerate(words) if word.startswith("grpo_"))
            found.append(words[begin:])
    return found


# ---- Defaults ------------------------------------------------------------------------------------
def defaults_of(*classes: type) -> dict[str, str]:
    named = {}
    for one in classes:
        for declared in dataclasses.fields(one):
            named[declared.name] = str(declared.default)
    return named


def test_the_table_of_other_defaults_is_right() -> None:
    pytest.importorskip("trl")
    from trl import GRPOConfig, ModelConfig

    part = README.partition("### Coming from TRL")[2].partition("###")[0]
    rows = re.findall(r"\| `(\w+)` \| `(\S+)` \| `(\S+)` \|", part)
    ours = defaults_of(trainer.Args)
    theirs = defaults_of(GRPOConfig, ModelConfig)
    assert len(rows) == 14
    for name, here, there in rows:
        assert (ours[name], theirs[name]) == (here, there), name


# ---- Commands ------------------------------------------------------------------------------------
def test_the_launch_commands_have_flags_that_exist_and_folders_of_their_own(monkeypatch) -> None:
    folders = []
    for script, *flags in launches():
        module = importlib.import_module(script.removesuffix(".py"))
        monkeypatch.setattr(module, "find_adapter", no_adapter)  # it would ask the Hub
        folders.append(module.parse_args(flags).output_dir)
    assert len(folders) >= 6
    assert len(set(folders)) == len(folders)


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="no checkout")
def test_git_ignores_what_the_readmes_commands_leave(monkeypatch) -> None:
    left = [ROOT / "compare.png"]  # of tools/compare.py
    left += [ROOT / name for name in re.findall(r"tools/smollm2\.py (\w+)", COMMANDS)]
    left += [ROOT / name for name in re.findall(r"> (\S+)", COMMANDS)]
    for script, *flags in launches():
        module = importlib.import_module(script.removesuffix(".py"))
        monkeypatch.setattr(module, "find_adapter", no_adapter)
        left.append(ROOT / module.parse_args(flags).output_dir)
    assert len(left) >= 9
    for path in left:
        command = ["git", "-C", str(ROOT), "check-ignore", f"{path}/x"]
        assert subprocess.run(command, capture_output=True).returncode == 0, path


def no_adapter(name: str, revision: str) -> tuple[None, dict]:
    """Stands for `find_adapter` where a name is a model's."""
    return None, {}


def test_the_programs_that_the_readme_names_exist() -> None:
    named = set(re.findall(r"\b(?:tools|results|tests|common)/[\w/]+\.(?:py|md|csv)", README))
    assert "tools/worth.py" in named
    assert [name for name in sorted(named) if not (ROOT / name).is_file()] == []


def test_the_readmes_data_file_can_be_trained_on(tmp_path, run_main, rows_of, monkeypatch) -> None:
    code = re.search(r'python -c "\n(.*?)" > my.jsonl', COMMANDS, re.DOTALL)[1]
    made = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    data = tmp_path / "my.jsonl"
    data.write_text(made.stdout)
    columns = {"prompt_column": "question", "answer_column": "result"}
    flags = {"max_completion_length": 80, "max_steps": 1, "per_device_train_batch_size": 8}
    ended, _, err = run_main(dataset_name=str(data), **columns, **flags)
    assert ended == 0, err
    assert len(rows_of()) == 1


def test_a_run_in_a_notebook_is_that_of_the_command_line(run_main, rows_of, tmp_path) -> None:
    """Each has its folder. `run_main` has made this process ready for a run."""
    assert run_main()[0] == 0
    expected = rows_of()
    AcceleratorState._reset_state()
    words = json.dumps([*command_line(TINY_RUN), "--output_dir", str(tmp_path / "notebook")])
    code, count = re.subn(r"parse_args\(.*\)", f"parse_args({words})", NOTEBOOK)
    assert count == 1
    exec(code, {})
    lines = (tmp_path / "notebook/metrics.jsonl").read_text().splitlines()
    rows = [row for row in map(json.loads, lines) if "reward" in row]
    assert [row["loss"] for row in rows] == [row["loss"] for row in expected]


# ---- The reward function -------------------------------------------------------------------------
def test_the_readmes_reward_trains(run_main, rows_of, tmp_path, monkeypatch) -> None:
    """It stands in a file of its own. Evaluation stays correctness."""
    name = re.search(r"def (\w+)", REWARD)[1]
    assert f"--reward_funcs accuracy_reward my.{name} --reward_weights 1 0.5" in README
    (tmp_path / "my.py").write_text(REWARD)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    flags = {"max_completion_length": 80, "max_steps": 2, "per_device_train_batch_size": 16}
    ended, _, err = run_main(reward_funcs=f"my.{name}", **flags)
    assert ended == 0, err
    rows = rows_of()
    assert len(rows) == 2
    assert all(0 < row["reward"] < 1 for row in rows)
    assert rows[0][f"rewards/{name}/mean"] == rows[0]["reward"]
    assert rows[0][f"rewards/{name}/characters"] > 0
    assert any(row["grad_norm"] > 0 for row in rows)


def test_the_readmes_reward_pays_where_the_column_is_a_whole_solution() -> None:
    """GSM8K's column is one. The function gets the final answer as `gold`."""
    row = {"question": "6 * 7?", "answer": "6 * 7 = 42\n#### 42"}
    (problem,) = parse_rows([row], "x", None, None)
    names: dict = {}
    exec(REWARD, names)
    function = names[re.search(r"def (\w+)", REWARD)[1]]
    texts = ["It is \\boxed{42}.", "It is \\boxed{41}.", "\\boxed{42 apples}", "#### 42"]
    columns = {"gold": [problem.answer] * 4, "answer": [problem.columns["answer"]] * 4}
    logged = {}
    prompts = ["How many apples are 6 * 7 apples?"] * 4
    paid = function(prompts, completions=texts, log_metric=logged.__setitem__, **columns)
    length = [len(text) for text in texts]
    assert paid == [1 - length[0] / 1000, 0, 1 - length[2] / 1000, 0]  # as accuracy_reward
    assert logged == {"characters": sum(length) / 4}


# ---- The credit method ---------------------------------------------------------------------------
END_OF_REGION = "\n# === END CREDIT ===\n"  # of the second region: flags are indented


@pytest.fixture
def fork(tmp_path, monkeypatch):
    """Returns a function that makes a module: grpo_arca.py with code at the end of its region."""
    (tmp_path / "common").symlink_to(ROOT / "common")

    def make(name: str, code: str):
        source = (ROOT / "grpo_arca.py").read_text(encoding="utf-8")
        assert source.count(END_OF_REGION) == 1
        path = tmp_path / f"{name}.py"
        path.write_text(source.replace(END_OF_REGION, f"\n\n{code}\n{END_OF_REGION}"))
        spec = importlib.util.spec_from_file_location(name, path)
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, name, module)
        spec.loader.exec_module(module)
        return module

    return make


def test_the_readmes_credit_method_is_one(make_run, fork) -> None:
    my_method = fork("my_method", METHOD)
    run = make_run(my_method)
    batch = my_method.sample(run, torch.arange(4), [[5, 6, 7]] * 4, torch.rand(4, 24))
    batch.advantages = torch.ones(4)
    batch.loss_mask = batch.mask
    my_method.score(run, batch, [batch], {})
    for weights, mask in zip(batch.weights, batch.mask, strict=True):
        length = int(mask.sum())
        expected = torch.arange(1, length + 1) * 2 / (length + 1)  # 1, 2, 3, ... over their mean
        assert torch.allclose(weights[:length], expected, rtol=1e-4)
        assert (weights[length:] == 0).all()


PROBLEMS = [
    Problem("Start with 4, add 3.", "7"),
    Problem([{"role": "user", "content": "Start with 11, add 19, double it."}], "60"),
    Problem("Start with 9, subtract 1, add 55.", "63"),
]


def rlsd_batch(rlsd, run):
    """Returns a batch of completions for the problems above: better, worse, and like the others."""
    system = run.args.system_prompt
    prompts = [encode_prompt(run.tokenizer, problem.prompt, system) for problem in PROBLEMS]
    batch = rlsd.sample(run, torch.arange(3), prompts, torch.rand(3, 24))
    batch.problems = PROBLEMS
    batch.advantages = torch.tensor([1.5, -0.5, 0.0])
    batch.loss_mask = batch.mask
    return batch


def completion_logp(run, prompt: list[int], completion: torch.Tensor) -> torch.Tensor:
    """Returns the log-probs of a completion after a prompt, from the stock model."""
    ids = torch.cat((torch.tensor(prompt), completion))
    with torch.no_grad():
        logp = run.model(input_ids=ids[None]).logits[0].log_softmax(-1)
    return logp[:-1].gather(1, ids[1:, None])[-len(completion) :, 0]


@pytest.mark.parametrize("system", [None, "Be exact."])
def test_the_readmes_rlsd_is_the_formula(make_run, fork, system) -> None:
    rlsd = fork("rlsd", RLSD)
    run = make_run(rlsd, adapter=0.02)
    run.args.system_prompt = system
    batch = rlsd_batch(rlsd, run)
    rlsd.score(run, batch, [batch], {})
    moved = 0
    for row, problem in enumerate(PROBLEMS):
        completion = batch.ids[row, batch.prompt_width :][batch.mask[row]]
        hint = f"The answer is {problem.answer}."
        if system is not None:
            hint = f"{system} {hint}"
        plain = encode_prompt(run.tokenizer, problem.prompt, system)
        told = encode_prompt(run.tokenizer, problem.prompt, hint)
        d = completion_logp(run, told, completion) - completion_logp(run, plain, completion)
        w = torch.exp(batch.advantages[row].sign() * d).clamp(0.8, 1.2)
        expected = 0.5 + 0.5 * w
        length = len(completion)
        assert torch.allclose(batch.credit[row, :length], expected, atol=1e-4)
        assert (batch.credit[row, length:] == 0).all()
        assert batch.weights[row, :length].mean() == pytest.approx(1, abs=1e-4)
        moved += int((expected - 1).abs().max() > 0.01)
    assert moved == 2  # the third advantage is 0, and so is its sign


def test_the_readmes_control_has_the_same_factors_in_another_order(make_run, fork) -> None:
    rlsd = fork("rlsd", RLSD)
    run = make_run(rlsd, adapter=0.02)
    batch = rlsd_batch(rlsd, run)
    rlsd.score(run, batch, [batch], {})
    in_order = batch.credit
    run.args.credit = "shuffled"
    rlsd.score(run, batch, [batch], {})
    for row, mask in enumerate(batch.mask):
        length = int(mask.sum())
        as_scored = in_order[row, :length]
        shuffled = batch.credit[row, :length]
        assert torch.equal(as_scored.sort().values, shuffled.sort().values)
    assert not torch.equal(in_order, batch.credit)


def test_the_readmes_rlsd_trains(fork, run_main, rows_of, monkeypatch) -> None:
    rlsd = fork("rlsd", RLSD)
    monkeypatch.setattr(trainer, "token_scores", rlsd.token_scores)
    monkeypatch.setattr(trainer, "assign_credit", rlsd.assign_credit)
    ended, _, err = run_main(max_completion_length=80, max_steps=2, per_device_train_batch_size=16)
    assert ended == 0, err
    assert all(row["grad_norm"] > 0 for row in rows_of())


def fipo_batch(fipo, run):
    """Returns completions of different lengths, scored, and by how much their log-probs changed."""
    batch = fipo.sample(run, torch.arange(3), [[5, 6, 7]] * 3, torch.rand(3, 24))
    batch.attention[1, -9:] = False
    batch.advantages = torch.tensor([1.0, -2.0, 0.5])
    batch.loss_mask = batch.mask
    fipo.score(run, batch, [batch], {})
    return batch, torch.randn(batch.mask.shape) * 0.2


def test_headrooms_fipo_is_the_formula(make_run, fork) -> None:
    fipo = fork("fipo", re.findall(r"```python\n(.*?)```", HEADROOM, re.DOTALL)[0])
    run = make_run(fipo)
    batch, change = fipo_batch(fipo, run)
    log_weight, advantages = fipo.surrogate_terms(run.args, batch, change)
    assert log_weight is change
    for row, length in enumerate(batch.mask.sum(1).tolist()):
        for t in range(length):
            later = range(t, length)
            future = sum(2 ** (-(k - t) / 32) * float(change[row, k]) for k in later)
            factor = min(max(math.exp(future), 0.8), 1.2)
            expected = float(batch.advantages[row]) * factor
            assert float(advantages[row, t]) == pytest.approx(expected, rel=1e-4)

    run.args.credit = "shuffled"
    _, shuffled = fipo.surrogate_terms(run.args, batch, change)
    assert not torch.equal(shuffled, advantages)
    for row, length in enumerate(batch.mask.sum(1).tolist()):
        in_order = advantages[row, :length].sort().values
        assert torch.equal(in_order, shuffled[row, :length].sort().values)


def test_headrooms_fipo_trains(fork, run_main, rows_of, monkeypatch) -> None:
    fipo = fork("fipo", re.findall(r"```python\n(.*?)```", HEADROOM, re.DOTALL)[0])
    for name in ("token_scores", "assign_credit", "surrogate_terms"):
        monkeypatch.setattr(trainer, name, getattr(fipo, name))
    sizes = {"per_device_train_batch_size": 16, "gradient_accumulation_steps": 1}
    ended, _, err = run_main(
        max_completion_length=80, max_steps=4, steps_per_generation=2, num_iterations=2, **sizes
    )
    assert ended == 0, err
    assert all(row["grad_norm"] > 0 for row in rows_of())
