"""The process that asks math-verify whether two answers are equal.

reward.py starts it and sends it pairs. It is a process of its own because a short answer can keep
sympy busy forever, and only killing the process stops it.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import resource
import signal
import sys

import math_verify
import sympy
from latex2sympy2_extended import latex2sympy2 as grammar

MEMORY_BYTES = 2 << 30  # of its address space
CPU_SECONDS = 2.0  # for a pair; not by the clock, so that a busy machine changes no verdict


def prepare() -> None:
    """Limits this process, and forbids what sympy must not do with a model's text."""
    # If the trainer's own limit is lower, it holds anyway. Some systems have no limits.
    with contextlib.suppress(ValueError, OSError, AttributeError):
        hard_limit = resource.getrlimit(resource.RLIMIT_AS)[1]
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, hard_limit))
    # lambdify writes symbols, whose names are the model's, into Python source and runs it.
    lambdify = sympy.lambdify
    for module in list(sys.modules.values()):
        if getattr(module, "lambdify", None) is lambdify:
            module.lambdify = None  # type: ignore[attr-defined]
    math_verify.grader.sympy_numeric_eq = are_near  # it takes 2^{-99} and 2^{-98} for 0


def are_near(first: sympy.Basic, second: sympy.Basic, *_: int) -> bool:
    """Returns whether two numbers are equal, as far as a hundred digits of each can tell."""
    if not all(getattr(value, "is_number", False) for value in (first, second)):  # matrices lack it
        return False
    gap, *sizes = [sympy.Abs(term.doit()).evalf() for term in (first - second, first, second)]
    return (gap <= 1e-50 * min(1, max(sizes))) is sympy.true


@functools.lru_cache(maxsize=512)  # one gold answer meets a whole group of boxes
def parse(text: str) -> sympy.Basic:
    """Returns what math-verify's grammar of LaTeX reads in an answer. It evaluates no Python."""
    rules = grammar.NormalizationConfig(malformed_operators=True, nits=True, boxed="none")
    text = grammar.normalize_latex(text, rules)
    found = grammar.latex2sympy(
        text,
        is_real=not math_verify.parser.should_treat_as_complex(text),
        normalization_config=None,
        conversion_config=grammar.ConversionConfig(lowercase_symbols=False),  # R is not r
    )
    # Decimals would be rounded to six places.
    exact = {decimal: sympy.Rational(str(decimal)) for decimal in found.atoms(sympy.Float)}
    return solved(found.xreplace(exact))


def solved(found: sympy.Basic) -> sympy.Basic:
    """Returns the set that inequalities in one letter allow: for x < 1, x > 3 it is two rays."""
    parts = found.args if isinstance(found, sympy.FiniteSet) else [found]
    if not all(
        isinstance(part, (sympy.core.relational.Relational, sympy.And))
        and not isinstance(part, sympy.Eq)
        and len(part.free_symbols) == 1
        for part in parts
    ):
        return found
    join = sympy.Intersection if isinstance(parts[0], sympy.Ne) else sympy.Union
    return join(*[part.as_set() for part in parts])


def is_equal(box: str, gold: str) -> bool:
    """Returns math-verify's verdict. Whatever cannot be computed is wrong."""
    try:
        return math_verify.verify(
            parse(gold), parse(box), timeout_seconds=None, allow_set_relation_comp=True
        )
    except Exception:  # deep nesting is a RecursionError, a huge number a MemoryError
        return False


def main() -> None:
    """Says "ready", and then judges the pair in each line of input."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # a library's print must not be a verdict
    prepare()
    print("ready", file=out, flush=True)
    for line in sys.stdin:
        # When the time is up, the kernel ends the process, whatever C code it runs.
        signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
        verdict = is_equal(*json.loads(line))
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(int(verdict), file=out, flush=True)


if __name__ == "__main__":
    main()
