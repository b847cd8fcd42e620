"""The style of everything but the tests: short lines, short functions, one statement one thing."""

import ast
import io
import tokenize

import pytest
from support import ROOT

FOLDERS = ("common", "tools", "results")
FILES = sorted(ROOT.glob("grpo_*.py"))
FILES += sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))
MAX_COLUMNS = 100
MAX_FUNCTION = 50  # lines, from the `def` to the last one
MAX_PACKED = 1.5  # packed constructs per 100 lines of code


def ids(path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", FILES, ids=ids)
def test_lines_are_at_most_100_columns(path):
    lines = enumerate(path.read_text().split("\n"), 1)
    long = [f"line {number}: {len(line)}" for number, line in lines if len(line) > MAX_COLUMNS]
    assert not long


# ---- Functions -----------------------------------------------------------------------------------
def long_functions(source: str) -> list[str]:
    """Returns the functions that have too many lines."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            size = node.end_lineno - node.lineno + 1
            if size > MAX_FUNCTION:
                found.append(f"{node.name} (line {node.lineno}): {size} lines")
    return found


@pytest.mark.parametrize("path", FILES, ids=ids)
def test_functions_are_at_most_50_lines(path):
    assert not long_functions(path.read_text())


def test_long_functions_are_found():
    function = "def f():\n" + "    x = 1\n" * 49
    assert not long_functions(function)
    assert long_functions(function + "    x = 1\n") == ["f (line 1): 51 lines"]
    method = "class A:\n    def f(self):\n" + "        x = 1\n" * 50
    assert long_functions(method) == ["f (line 2): 51 lines"]


# ---- Packed constructs ---------------------------------------------------------------------------
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
    if isinstance(node, ast.Return) and isinstance(node.value, ast.BoolOp):
        first = node.value.values[0]
        last = node.value.values[-1]
        if isinstance(first, ast.Name) and isinstance(last, ast.Call):
            return "return of a condition and a call"
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
    found = []
    for node in ast.walk(ast.parse(source)):
        kind = packed_kind(node)
        if kind is not None:
            found.append((node.lineno, kind))
    return [f"line {line}: {kind}" for line, kind in sorted(found)]


def code_lines(source: str) -> int:
    """Returns the number of lines that hold more than comments and docstrings."""
    layout = (
        tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT,
        tokenize.ENDMARKER,
    )  # fmt: skip
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in layout:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        is_constant = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if is_constant and isinstance(node.value.value, str):  # a docstring
            lines.difference_update(range(node.lineno, node.end_lineno + 1))
    return len(lines)


@pytest.mark.parametrize("path", FILES, ids=ids)
def test_code_is_not_packed(path):
    """A line that does three things is read three times. A few such lines may stay in a file."""
    source = path.read_text()
    found = packed_constructs(source)
    allowed = max(1, int(MAX_PACKED * code_lines(source) / 100))
    assert len(found) <= allowed, "\n".join(found)


@pytest.mark.parametrize(
    "line",
    [
        "if (n := len(x)): pass",
        "f = lambda x: x",
        "a, b = c, d",
        "[x for y in z for x in y]",
        "f(**flags)",
        "f(), g()",
        "x or f()",
        "f() if x else g()",
        "def f(x):\n    return x and g()",
    ],
)
def test_packed_code_is_found(line):
    assert len(packed_constructs(line)) == 1


@pytest.mark.parametrize(
    "line",
    [
        "a, b = b, a",
        "a, b = f()",
        "x = y or f()",
        "f(*values)",
        "[x for x in y if x]",
        "def f(x):\n    return x.a and x.b",
    ],
)
def test_plain_code_is_not_taken_for_packed(line):
    assert packed_constructs(line) == []


def test_comments_and_docstrings_are_no_code():
    source = 'def f():\n    """Returns\n\n    1."""\n    # one\n\n    return (\n        1\n    )\n'
    assert code_lines(source) == 4
