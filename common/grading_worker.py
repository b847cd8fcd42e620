r"""The process that compares answers with math-verify; reward.py starts it by this file's path.

It reads a line of JSON, [box, gold answer], and writes a line 1 (equal) or 0, until its standard
input ends. It is a process of its own because a short answer can make sympy compute forever, and
only killing a process stops a power that CPython computes in C: 5^(5^(5^5)), math-verify's issue
65. It is not started by multiprocessing: `spawn` would import torch again, and `fork` is unsafe
with threads. So this file imports nothing of the repository, and nothing heavy but math-verify.

What math-verify 0.9 and latex2sympy2_extended 1.11 do with a model's text, and what is done here:

- ExprExtractionConfig ends in Python's eval (in sympy's parse_expr). It is not used. The grammar of
  LatexExtractionConfig passes only number tokens to eval (in sympify): digits, commas, dots and
  e-notation.
- Symbols get names of the model's choosing, as in \vec{dot([1],[open(...)])}. To evaluate an
  infinite sum, sympy printed such a name into Python source and ran it (lambdify).
  `forbid_generated_code` makes lambdify fail.
- Numbers side by side are added: 40 2 would be 42. `forbid_sums` makes the parser fail on them.
- The last side of any equation is the answer. `sides_to_check` chooses the sides itself.
- 42, 42 is the set of 42. `compare` refuses a list where the gold answer is one value.

The worker's time and memory are limited, but it is no sandbox against a bug that is yet unknown.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import json
import math
import os
import re
import resource
import signal
import sys
from typing import Any, NoReturn

MEMORY_BYTES = 2 << 30  # of address space
PR_SET_PDEATHSIG = 1  # the option of Linux's prctl for a signal at the death of the parent


# ---- math-verify and its libraries, made safe ----------------------------------------------------
def prepare_libraries() -> None:
    """Imports math-verify, and changes what its libraries must not do with a model's text."""
    import math_verify
    import sympy  # noqa: F401  (it loads the modules that are changed)

    forbid_generated_code()
    forbid_sums(sys.modules["latex2sympy2_extended.latex2sympy2"]._Latex2Sympy)
    math_verify.parser.get_last_eq = keep_all_sides


def forbid_generated_code() -> None:
    """Replaces sympy's lambdify, which writes Python source and runs it, wherever it is used."""

    def refuse(*_: object, **__: object) -> NoReturn:
        raise NotImplementedError("no code is made from a model's text")  # evalf does without

    original = sys.modules["sympy.utilities.lambdify"].lambdify
    for module in list(sys.modules.values()):
        if getattr(module, "lambdify", None) is original:
            module.lambdify = refuse  # type: ignore[attr-defined]


def keep_all_sides(latex: str) -> str:
    """Returns the LaTeX as it is.

    It stands in for a function of math-verify that keeps only the last side of an equation which
    fails to parse. Of x = 40 2 = 42 the 42 would be left.
    """
    return latex


def forbid_sums(parser: Any) -> None:
    r"""Changes latex2sympy's parser, a class, to fail on numbers that stand side by side.

    The text cannot show them: a gap can be written in too many ways. A mixed fraction stays what it
    is, and so does what the parser multiplies, as \frac{1}{2} 3 and 3(-2).
    """
    convert = parser.convert_postfix
    combine = parser.convert_postfix_list

    def convert_once(self: Any, node: Any) -> Any:
        # Without this, a number at depth d of 2(2(2(... would be converted 2^d times.
        if not hasattr(node, "converted"):
            node.converted = convert(self, node)
        return node.converted

    def combine_if_no_sum(self: Any, nodes: list, i: int = 0) -> Any:
        values = [convert_once(self, node) for node in nodes[i : i + 2]]
        if len(values) == 2 and would_be_added(values[0], values[1], nodes[i + 1]):
            raise ValueError("two numbers without a sign between them")
        return combine(self, nodes, i)

    parser.convert_postfix = convert_once
    parser.convert_postfix_list = combine_if_no_sum


def would_be_added(left: Any, right: Any, right_node: Any) -> bool:
    """Returns whether the parser would add two sympy values, as 40 and 2, but not 2 and 1/2."""
    for value in (left, right):
        if not getattr(value, "is_Number", False):
            return False
    left_is_fraction = left.is_Rational and not left.is_Integer
    right_is_fraction = right.is_Rational and not right.is_Integer
    if right < 0 or left_is_fraction:
        return False
    if right_is_fraction and right < 1:
        # This is a mixed fraction where it is written as one, 2\frac{1}{2} or 2{1/2}.
        return re.match(r"\\frac|\{", right_node.getText()) is None
    return True


# ---- Comparing -----------------------------------------------------------------------------------
# An equals sign between two sides: not that of <=, >=, != or \sum_{n=1}^5.
EQUALS = re.compile(r"(?<![<>!])=(?![^{}]*\}\s*\^)")
# What a name is a name of: the (-2) of f(-2), the ^{-1}(2) of f^{-1}(2), the _{10} of S_{10}, the
# degrees of \sin 30^\circ.
ARGUMENT = re.compile(r"(?:\^ ?\{-1\} ?)?\([^()]*\)|_?\{[^{}]*\}|\^ ?\{? ?\\circ ?\}?")
# The name of what is asked for, its arguments left out: x, AB, \angle A, |v|, P. It begins with a
# letter, a backslash or a bracket, and nothing is computed in it: neither 2x, x+y nor \frac{a}{b}.
NAME = re.compile(r" ?(?!.*(?:[-+*/^]|\\(?:[dt]?frac|sqrt|cdot|times|div|pm)))[a-zA-Z\\|[].*")

# Letters whose names have more than two characters, with lambda as the parser spells it.
GREEK = {
    "alpha", "beta", "gamma", "delta", "epsilon", "varepsilon", "zeta", "eta", "theta", "vartheta",
    "iota", "kappa", "lambda", "lamda", "rho", "sigma", "tau", "upsilon", "phi", "varphi", "chi",
    "psi", "omega",
}  # fmt: skip


def is_name(side: str) -> bool:
    """Returns whether a side of an equation only names what is asked for, as x or f(-2)."""
    return NAME.fullmatch(ARGUMENT.sub("", side)) is not None


def sides_to_check(box: str) -> list[str]:
    """Returns the sides of an equation that must be the answer.

    Of x = 3 * 4 = 12 and of 12 = x that is the 12, and of 6 * 2 = 12 it is every side. Of
    x = 4 x = 7, which names two answers, it is the empty text, which is never right.
    """
    sides = EQUALS.split(box)
    if is_name(sides[0]):
        name = sides[0].strip()
        if any(side.strip().endswith(name) for side in sides[1:-1]):
            return [""]
        return sides[-1:]
    if is_name(sides[-1]):
        return sides[:1]
    return sides


@functools.lru_cache(maxsize=512)  # one gold answer meets a whole group of boxes
def parse(text: str) -> list:
    r"""Returns what math-verify reads in an answer: sympy values, the best first, or none.

    It does not read the \land between two inequalities that must both hold.
    """
    import math_verify
    import sympy

    if "\\land" in text:
        parts = [parse(part)[0] for part in text.split("\\land")]
        return [sympy.And(*parts)]
    normalization = math_verify.parser.NormalizationConfig(
        malformed_operators=True, nits=True, units=False
    )
    extraction = math_verify.LatexExtractionConfig(
        boxed_match_priority=0, normalization_config=normalization
    )
    # first_match: the box or nothing, and not a fraction found somewhere in a box of prose
    found = math_verify.parse(
        f"\\boxed{{{text}}}",
        [extraction],
        extraction_mode="first_match",
        parsing_timeout=None,
    )
    # In texts that look complex the parser's letters are not real, so the i of \sqrt{3}i would not
    # be that of i\sqrt{3}.
    letters = getattr(found[0], "free_symbols", ()) if found else ()
    other_letters = [letter for letter in letters if not letter.is_real]
    if other_letters:
        real = {letter: sympy.Symbol(letter.name, real=True) for letter in other_letters}
        found[0] = found[0].xreplace(real)
    return found


def is_equal(box: str, gold: str) -> bool:
    """Returns whether a box equals the gold answer. Whatever cannot be computed is wrong."""
    try:
        return compare(box, gold)
    except Exception:  # deep nesting is a RecursionError, a huge number a MemoryError
        return False


def compare(box: str, gold: str) -> bool:
    """Returns math-verify's verdict on a box. It may raise anything."""
    import math_verify
    import sympy

    right = parse(gold)
    is_compared_whole = "=" in gold or re.search("[,;]", box) is not None
    sides = [box] if is_compared_whole else sides_to_check(box)
    values = [as_matrix(parse(side), right) for side in sides]
    if isinstance(right[0], sympy.Expr) and any(is_list(value[0]) for value in values):
        return False  # 42, 42 is not one answer
    are_numbers = is_list(right[0]) and not inequalities_in(right[0])
    if are_numbers and any(inequalities_in(value[0]) for value in values):
        return False  # 1<x<2 is not 1, 2
    if any(has_other_letters(value[0], right[0]) for value in values):
        return False  # 0\text{ wrong} is not 0
    if is_solved(right[0]) and not all(is_solved(value[0]) for value in values):
        return False  # x^2<4 may be the problem itself, to which -2<x<2 is the answer

    zeros = leading_zeros(right[0])
    decimals = re.findall(r"\.([0-9]{1,12})", gold)  # those of each number: 0672 of .0672
    # Round to 6 decimals, so that 0.333333 is 1/3, or to as many as the gold answer has. Zeros
    # after the decimal point do not count, or .0000672 would be next to nothing.
    places = max([6 + zeros] + [len(digits) for digits in decimals])
    return all(
        math_verify.verify(
            solution_set(right),
            solution_set(value),
            float_rounding=places,
            numeric_precision=15 + zeros,
            timeout_seconds=None,
            allow_set_relation_comp=True,  # 1<x<2 is (1,2)
        )
        for value in values
    )


def as_matrix(found: list, right: list) -> list:
    """Returns what math-verify read, with a point as a vector, if the gold answer is a vector."""
    import sympy

    value = found[0]
    gold = right[0]
    if not isinstance(gold, sympy.MatrixBase) or 1 not in gold.shape:
        return found
    entries: tuple = ()
    if isinstance(value, sympy.Tuple):
        entries = value.args
    elif isinstance(value, sympy.Interval) and value.left_open and value.right_open:
        entries = value.args[:2]  # (1,2)
    if len(entries) != len(gold):
        return found
    return [sympy.Matrix(*gold.shape, entries), *found[1:]]


def inequalities_in(value: Any) -> tuple:
    """Returns the inequalities that a value is made of, as those of x<-2, x>5, or none."""
    import sympy
    from sympy.core.relational import Relational

    parts = value.args if isinstance(value, sympy.FiniteSet) else (value,)
    for part in parts:
        is_inequality = isinstance(part, (Relational, sympy.And))
        if not is_inequality or isinstance(part, sympy.Equality):
            return ()
    return parts


def is_solved(value: Any) -> bool:
    """Returns whether an equation or inequalities say what a letter is: x=3, x=3,-3, or -2<x<5.

    Whatever is neither is solved, too, as the interval (-2,5).
    """
    import sympy
    from sympy.core.relational import Relational

    parts = (value,) if isinstance(value, sympy.Equality) else inequalities_in(value)
    for part in parts:
        for relation in part.atoms(Relational):
            name, known = sorted(relation.args, key=lambda side: not side.free_symbols)
            names = list(name.args) if isinstance(name, sympy.Tuple) else [name]
            are_names = all(part.is_Symbol for part in names)
            # (x,y)=(1,2) names a point, and (y,x)=(1,2) another one.
            if known.free_symbols or not are_names or names != sorted(names, key=str):
                return False
    return True


def solution_set(found: list) -> list:
    """Returns what math-verify read, with inequalities in one letter as the numbers they allow.

    So x<-2, x>5 is a union of two intervals, and 5>x>-2 is the same as -2<x<5. A difference of two
    sets is computed.
    """
    import sympy

    if isinstance(found[0], sympy.Basic) and found[0].has(sympy.Complement):
        return [found[0].doit(), *found[1:]]
    parts = inequalities_in(found[0])
    if not parts or len(symbol_names(found[0])) != 1:
        return found
    return [sympy.Union(*[part.as_set() for part in parts]), *found[1:]]


def is_list(value: Any) -> bool:
    """Returns whether a value that math-verify read, or the right side of it, is several ones."""
    value = getattr(value, "rhs", value)
    return len(getattr(value, "_unsorted_args", ())) > 1


def has_other_letters(value: Any, right: Any) -> bool:
    r"""Returns whether a value has words that the gold answer has not, or letters if that is none.

    math-verify takes words for factors, so 0\text{ wrong} would be 0.
    """
    others = symbol_names(value) - symbol_names(right)
    if inequalities_in(value) and inequalities_in(right):
        return bool(others)  # y<3 is not x<3
    if getattr(right, "is_number", False):
        return bool(symbol_names(getattr(value, "rhs", value)))
    return any(len(name) > 2 and name not in GREEK for name in others)


def symbol_names(value: Any) -> set[str]:
    """Returns the names of the symbols in what math-verify read."""
    return {str(symbol) for symbol in getattr(value, "free_symbols", ())}


def leading_zeros(value: Any) -> int:
    """Returns the number of zeros after the decimal point of a value, as 4 for .0000672."""
    import sympy

    if not getattr(value, "is_number", False):
        return 0
    size = abs(value.evalf())
    if size == 0:
        return 0
    return max(0, -math.floor(sympy.log(size, 10)) - 1)


# ---- The process ---------------------------------------------------------------------------------
def limit_this_process() -> None:
    """Limits the memory of this process, and makes it end before and with its parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the trainer to handle
    _, hard_limit = resource.getrlimit(resource.RLIMIT_AS)
    limit = MEMORY_BYTES
    if hard_limit != resource.RLIM_INFINITY:
        limit = min(limit, hard_limit)  # that of the trainer's own `ulimit -v` cannot be raised
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    # Where memory runs out, the kernel shall take this process first.
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")
    # Die with the parent: C code does not see that standard input ends.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def main() -> None:
    """Says "ready", or in one line why not, and then judges a pair for each line of input."""
    limit_this_process()
    verdicts = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # a library's print must not be a verdict
    try:
        prepare_libraries()
    except Exception as error:
        reason = f"{type(error).__name__}: {error}\n"
        os.write(verdicts, reason.encode(errors="replace")[:500])
        return
    os.write(verdicts, b"ready\n")
    for line in sys.stdin.buffer:
        box, gold = json.loads(line)
        os.write(verdicts, b"1\n" if is_equal(box, gold) else b"0\n")


if __name__ == "__main__":
    main()
