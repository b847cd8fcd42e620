"""The scripts are one trainer: they are the same but for the docstring and the CREDIT regions."""

import ast
import dataclasses
import importlib
import importlib.util
import itertools
import re
from pathlib import Path

import pytest
from support import ROOT

SCRIPTS = sorted(ROOT.glob("grpo_*.py"))
BEGIN = "# === CREDIT ==="
END = "# === END CREDIT ==="
REGION = re.compile(rf"^ *{BEGIN}\n.*?^ *{END}\n", re.DOTALL | re.MULTILINE)

# Flags that TRL lacks, in the shared part of the scripts. Every other one has TRL's name, so that
# a TRL command line carries over; think twice before adding to this list.
OURS = {
    "eval_dataset_name": "evaluates on another set than the test split",
    "prompt_column": "TRL wants the columns renamed beforehand",
    "answer_column": "TRL leaves it to the reward function",
    "system_prompt": "TRL wants it in the data",
    "negative_weight": "TRL treats what is below the mean as what is above it",
    "per_device_rollout_batch_size": "TRL's rollouts have no memory limit of their own",
    "rollout_weights": "how our own decode loop runs; TRL samples through vLLM or generate()",
    "skip_zero_gradient": "TRL's optimizer steps on by its momentum",
    "max_eval_samples": "held-out problems to evaluate on",
}


def ids(path: Path) -> str:
    return str(path.relative_to(ROOT))


def shared_lines(source: str) -> list[tuple[int, str]]:
    """Line number and line of what must be the same in every script.

    The docstring's lines are dropped and each CREDIT region is cut down to its two marks, so a
    region that moves is a difference too.
    """
    docstring = ast.parse(source).body[0]
    lines = []
    inside = False
    for number, line in enumerate(source.split("\n"), 1):
        inside = inside and line.strip() != END
        if not inside and not docstring.lineno <= number <= docstring.end_lineno:
            lines.append((number, line))
        inside = inside or line.strip() == BEGIN
    return lines


def first_difference(source: str, other: str) -> str | None:
    """Where the shared parts of two scripts first differ; None where they are the same."""
    nothing = (0, "nothing")
    pairs = itertools.zip_longest(shared_lines(source), shared_lines(other), fillvalue=nothing)
    for (number, line), (other_number, other_line) in pairs:
        if line != other_line:
            return f"line {number}: {line!r}\nline {other_number}: {other_line!r}"
    return None


# ---- One trainer ---------------------------------------------------------------------------------
@pytest.mark.parametrize("script", SCRIPTS, ids=ids)
def test_scripts_are_identical_outside_docstring_and_credit_regions(script):
    difference = first_difference(SCRIPTS[0].read_text(), script.read_text())
    assert difference is None, f"{SCRIPTS[0].name} and {script.name} differ:\n{difference}"
    for path in (SCRIPTS[0], script):  # bytes that reading as text would hide
        assert b"\r" not in path.read_bytes() and path.read_bytes().startswith(b'"""'), path.name


@pytest.mark.parametrize("script", SCRIPTS, ids=ids)
def test_credit_regions_are_well_formed(script):
    """Two: flags inside Args, functions right after it."""
    source = script.read_text()
    marks = re.findall(r"^ *(# ===.*?)\s*$", source, re.MULTILINE)
    assert marks == [BEGIN, END] * 2, marks
    tree, lines = ast.parse(source), source.split("\n")
    places = [n for n, line in enumerate(lines, 1) if line.strip() in (BEGIN, END)]
    args = next(n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == "Args")
    assert args.lineno < places[0] < places[1] <= args.end_lineno
    for node in tree.body:  # the second region holds whole definitions
        inside = [places[2] < n < places[3] for n in (node.lineno, node.end_lineno)]
        assert inside[0] == inside[1], f"line {node.lineno} straddles a mark"
    functions = {n.name: n.lineno for n in tree.body if isinstance(n, ast.FunctionDef)}
    for name in ("token_scores", "assign_credit", "surrogate_terms"):
        assert places[2] < functions[name] < places[3], name
    assert ast.get_docstring(tree), "no module docstring"


# What is read first stands first; `main` is last.
ORDER = [
    "Args",
    "token_scores",
    "assign_credit",
    "Batch",
    "Run",
    "train",
    "collect",
    "score",
    "update",
    "evaluate",
    "sample_tokens",
    "Decoder",
    "sample",
    "Policy",
    "load_policy",
    "build_run",
    "save_checkpoint",
    "resume",
    "parse_args",
    "run_to_the_end",
    "main",
]


def definitions(script: Path) -> list[str]:
    tree = ast.parse(script.read_text())
    return [n.name for n in tree.body if isinstance(n, ast.FunctionDef | ast.ClassDef)]


@pytest.mark.parametrize("script", SCRIPTS, ids=ids)
def test_a_script_reads_from_the_top(script):
    """Docstring, flags, method, what the steps pass on, the loop and its steps, engine room."""
    names = definitions(script)
    assert sorted(set(ORDER), key=names.index) == ORDER and names[-1] == "main"


@pytest.mark.parametrize("script", SCRIPTS, ids=ids)
def test_the_loop_and_its_steps_stand_in_the_first_half(script):
    """Of the lines that the scripts share: a method may be as long as it has to be."""
    source = script.read_text()
    shared = [number for number, _ in shared_lines(source)]
    middle = shared[len(shared) // 2]
    ends = {n.name: n.end_lineno for n in ast.parse(source).body if isinstance(n, ast.FunctionDef)}
    late = [name for name in ("train", "collect", "score", "update") if ends[name] > middle]
    assert not late, f"after line {middle}: {late}"


def test_the_comparison_sees_every_difference():
    """The helper itself: what it must ignore, and what it must not."""
    source = SCRIPTS[0].read_text()
    docstring = '"""Another."""' + source.split('"""', 2)[2]
    assert first_difference(source, docstring) is None
    replaced = REGION.sub(f"    {BEGIN}\n    x = 1\n    {END}\n", source, count=1)
    assert replaced != source and first_difference(source, replaced) is None
    for old, new in (
        ("import torch\n", "import torch \n"),
        ("learning_rate: float = flag(", "learning_rate: float = flag(1 + "),
        (f"{END}\n\n\n", f"{END}\n\n\n\n"),
        (f"    {END}\n    # optimizer\n", f"    # optimizer\n    {END}\n"),
        ('if __name__ == "__main__":\n    main()\n', ""),
    ):
        assert old in source, old
        assert first_difference(source, source.replace(old, new, 1)) is not None, (old, new)
    assert first_difference(source, source + "main()\n") is not None


# ---- Flags ---------------------------------------------------------------------------------------
def args_class(script: Path):
    return importlib.import_module(script.stem).Args


@pytest.mark.parametrize("script", SCRIPTS, ids=ids)
def test_every_flag_has_help(script):
    for field in dataclasses.fields(args_class(script)):
        if not field.init:  # `parse_args` sets it, not the user
            continue
        assert len(field.metadata.get("help", "")) > 5, f"--{field.name} has no help text"


def shared_flags(script: Path) -> set[str]:
    """Names of the flags outside the CREDIT region."""
    tree = ast.parse(REGION.sub("", script.read_text()))
    args = next(n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == "Args")
    declared = [n for n in args.body if isinstance(n, ast.AnnAssign)]
    return {n.target.id for n in declared if n.value.func.id == "flag"}


def trl_flags() -> set[str]:
    if importlib.util.find_spec("trl") is None:
        pytest.skip("trl is not installed: its names of flags cannot be looked up")
    from trl import GRPOConfig, ModelConfig
    from trl.scripts.grpo import GRPOScriptArguments

    parts = (GRPOConfig, ModelConfig, GRPOScriptArguments)
    return {field.name for part in parts for field in dataclasses.fields(part)}


@pytest.mark.parametrize("script", SCRIPTS, ids=ids)
def test_a_methods_flags_collide_with_no_shared_one(script):
    names = [field.name for field in dataclasses.fields(args_class(script))]
    assert "credit" in names and "credit" not in shared_flags(script)
    assert len(names) == len(set(names)) and shared_flags(script) < set(names)


def test_flags_have_trls_names_or_are_on_the_list():
    own = shared_flags(SCRIPTS[0]) - trl_flags()
    assert own == set(OURS), f"not in TRL: {sorted(own)}; on the list: {sorted(OURS)}"


def test_advice_about_flags_of_trl_names_flags_that_there_are():
    module = importlib.import_module(SCRIPTS[0].stem)
    flags = {field.name for field in dataclasses.fields(module.Args)}
    assert not module.TRL_FLAGS.keys() & flags
    advised = re.findall(r"--(\w+)", " ".join(module.TRL_FLAGS.values()))
    assert len(advised) > 5 and set(advised) <= flags
