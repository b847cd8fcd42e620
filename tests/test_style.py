"""The scripts are one trainer, small and plain: same text, few statements, one thing on a line."""

import ast
import dataclasses
import importlib
import io
import itertools
import re
import tokenize

import pytest
from support import ROOT, SCRIPTS

BUDGET = {  # pattern of files: statements they may have in all, docstrings not counted
    "grpo_arca.py": 730,
    "grpo_strace.py": 760,
    "grpo_oar.py": 872,
    "common/**/*.py": 1030,
    "methods/**/*.py": 400,
    "tools/**/*.py": 1080,
    "results/**/*.py": 1030,
    "tests/**/*.py": 5500,
}
MAX_PACKED = 1.0  # packed constructs per 100 lines of code
PLAIN = sorted([*ROOT.glob("grpo_*.py"), *ROOT.glob("common/*.py")])
BEGIN = "# === CREDIT ==="
END = "# === END CREDIT ==="
# Flags outside the CREDIT regions that TRL lacks. Every other one has TRL's name, so that a TRL
# command line carries over; think twice before adding to this list.
OURS = {
    "answer_column", "cuda_graphs", "eval_dataset_name", "max_eval_samples", "max_resample_times",
    "negative_weight", "per_device_rollout_batch_size", "prompt_column", "rollout_weights",
    "skip_zero_gradient", "start_adapter", "system_prompt",
}  # fmt: skip


def source_of(script: str) -> str:
    return (ROOT / f"{script}.py").read_text()


# ---- Size and plainness --------------------------------------------------------------------------
def is_docstring(node: ast.AST) -> bool:
    is_constant = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    return is_constant and isinstance(node.value.value, str)


@pytest.mark.parametrize("pattern", BUDGET)
def test_there_are_no_more_statements_than_the_budget_has(pattern):
    nodes = [node for path in ROOT.glob(pattern) for node in ast.walk(ast.parse(path.read_text()))]
    count = sum(isinstance(node, ast.stmt) and not is_docstring(node) for node in nodes)
    assert count <= BUDGET[pattern]


def packed_kind(node: ast.AST) -> str | None:
    """Returns the construct that a node is, if it is one that packs code."""
    comprehensions = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
    if isinstance(node, ast.NamedExpr):
        return "walrus"
    if isinstance(node, ast.Lambda):
        return "lambda"
    if isinstance(node, comprehensions) and len(node.generators) > 1:
        return "comprehension with two loops"
    if isinstance(node, ast.keyword) and node.arg is None:
        return "splat in a call"
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Tuple | ast.BoolOp | ast.IfExp):
        return "expression as a statement"
    if isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple):
        target = node.targets[0]
        if isinstance(target, ast.Tuple):
            left = sorted(ast.unparse(element) for element in target.elts)
            right = sorted(ast.unparse(element) for element in node.value.elts)
            if left != right:  # else it swaps
                return "two assignments in one"
    return None


def packed_constructs(source: str) -> list[str]:
    """Returns what packs code, with its line."""
    kinds = [(node, packed_kind(node)) for node in ast.walk(ast.parse(source))]
    return [f"line {node.lineno}: {kind}" for node, kind in kinds if kind is not None]


def code_lines(source: str) -> int:
    """Returns the number of lines that hold more than comments and docstrings."""
    layout = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in layout:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in filter(is_docstring, ast.walk(ast.parse(source))):
        lines.difference_update(range(node.lineno, node.end_lineno + 1))
    return len(lines)


@pytest.mark.parametrize("path", PLAIN, ids=lambda path: path.name)
def test_code_is_not_packed(path):
    """A line that does three things is read three times. A few such lines may stay in a file."""
    found = packed_constructs(path.read_text())
    assert len(found) <= MAX_PACKED / 100 * code_lines(path.read_text()), "\n".join(found)


def test_packed_code_is_found_and_plain_code_is_not():
    packed = ("if (n := len(x)): pass", "f = lambda x: x", "a, b = c, d", "f(**flags)", "f(), g()")
    for line in (*packed, "[x for y in z for x in y]", "x or f()", "f() if x else g()"):
        assert len(packed_constructs(line)) == 1, line
    for line in ("a, b = b, a", "a, b = f()", "x = y or f()", "f(*values)", "[x for x in y if x]"):
        assert packed_constructs(line) == [], line


# ---- One trainer ---------------------------------------------------------------------------------
def shared_lines(source: str) -> list[tuple[int, str]]:
    """Returns number and text of the lines that must be the same in every script.

    The docstring's lines are dropped and each CREDIT region is cut down to its two marks, so a
    region that moves is a difference, too.
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
    """Returns where the shared parts of two scripts first differ; None where they are the same."""
    pairs = itertools.zip_longest(shared_lines(source), shared_lines(other), fillvalue=(0, ""))
    for (number, line), (other_number, other_line) in pairs:
        if line != other_line:
            return f"line {number}: {line!r}\nline {other_number}: {other_line!r}"
    return None


@pytest.mark.parametrize("script", SCRIPTS)
def test_scripts_are_identical_outside_docstring_and_credit_regions(script):
    """Each has two regions: flags inside Args, and the three functions of a method."""
    source = source_of(script)
    assert first_difference(source_of(SCRIPTS[0]), source) is None
    marks = re.findall(r"^ *(# ===.*?)\s*$", source, re.MULTILINE)
    assert marks == [BEGIN, END] * 2
    method = source.split(BEGIN)[2].split(END)[0]
    functions = [node.name for node in ast.parse(method).body if isinstance(node, ast.FunctionDef)]
    assert {"token_scores", "assign_credit", "surrogate_terms"} <= set(functions)


def test_the_comparison_sees_every_difference():
    source = source_of(SCRIPTS[0])
    assert first_difference(source, '"""Another."""' + source.split('"""', 2)[2]) is None
    assert first_difference(source, source.replace(BEGIN, f"{BEGIN}\n    x = 1", 1)) is None
    for old, new in (
        ("import torch\n", "import torch \n"),
        (f"{END}\n\n\n", f"{END}\n\n\n\n"),
        (f"    {END}\n    # optimizer\n", f"    # optimizer\n    {END}\n"),
    ):
        assert first_difference(source, source.replace(old, new, 1)) is not None, old


def test_flags_have_trls_names_or_are_on_the_list():
    trl = pytest.importorskip("trl", reason="pip install trl")
    arguments = importlib.import_module("trl.scripts.grpo").GRPOScriptArguments
    theirs = set()
    for part in (trl.GRPOConfig, trl.ModelConfig, arguments):
        theirs |= {flag.name for flag in dataclasses.fields(part)}
    ours = set()
    for script in SCRIPTS:
        flags = dataclasses.fields(importlib.import_module(script).Args)
        assert all(len(flag.metadata["help"]) > 5 for flag in flags)
        names = {flag.name for flag in flags}
        ours = names & ours or names  # what all scripts have
    assert ours - {"credit"} - theirs == OURS
