r"""Problems, the embedded task, and the steps that a solution must get right.

The embedded task is chain arithmetic: "Start with 23, add 19, double it." A solution works it out
in sentences, "We begin at 23. Then adding 19 gives 42. We double it and get 84.", and ends with
\boxed{84}.
"""

from __future__ import annotations

import hashlib
import itertools
import random
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from common.answers import boxed_span, tidy

SMALLEST_VALUE = 1  # of every value in a chain
LARGEST_VALUE = 99
MAX_REPEATS = 50_000  # repeated draws in a row after which no chain is left to find


class Problem(NamedTuple):
    prompt: str | list[dict[str, str]]  # text, or chat messages
    answer: str
    steps: tuple[int, ...] = ()  # the right result of each step that a solution must state
    columns: dict[str, Any] = {}  # noqa: RUF012  the row without its prompt; never written to
    # Sentences before the one that states the first result. A chain's states where it starts.
    opening: int = 1


# ---- The embedded task ---------------------------------------------------------------------------
class Operation(NamedTuple):
    name: str  # "add" | "subtract" | "multiply"
    operand: int

    def apply(self, value: int) -> int:
        if self.name == "add":
            return value + self.operand
        if self.name == "subtract":
            return value - self.operand
        return value * self.operand

    def phrase(self) -> str:
        if self == ("multiply", 2):
            return "double it"
        if self == ("multiply", 3):
            return "triple it"
        return f"{self.name} {self.operand}"


class Chain(NamedTuple):
    start: int
    operations: tuple[Operation, ...]

    def results(self) -> tuple[int, ...]:
        """Returns the right value after each operation."""
        values = []
        value = self.start
        for operation in self.operations:
            value = operation.apply(value)
            values.append(value)
        return tuple(values)

    def prompt(self) -> str:
        phrases = ", ".join(operation.phrase() for operation in self.operations)
        return f"Start with {self.start}, {phrases}."

    def is_held_out(self) -> bool:
        """Returns whether this is one of the chains that are never trained on, one in ten.

        That is decided by a hash of the chain itself, so no seed can make the sets overlap.
        """
        digest = hashlib.blake2b(self.prompt().encode(), digest_size=4).digest()
        return int.from_bytes(digest, "big") % 10 == 0

    def problem(self) -> Problem:
        results = self.results()
        answer = str(results[-1])
        return Problem(self.prompt(), answer, results, {"answer": answer})


def random_chain(rng: random.Random, held_out: bool, length: int | None = None) -> Chain:
    """Returns a random chain of `length` operations, or of 3 or 4, whose values are 1 to 99."""
    while True:
        start = rng.randint(5, 60)
        operations = []
        for _ in range(length or rng.randint(3, 4)):
            name = rng.choice(["add", "add", "subtract", "subtract", "multiply"])
            operand = rng.choice([2, 2, 3]) if name == "multiply" else rng.randint(2, 19)
            operations.append(Operation(name, operand))
        chain = Chain(start, tuple(operations))
        is_small = all(SMALLEST_VALUE <= value <= LARGEST_VALUE for value in chain.results())
        if is_small and chain.is_held_out() == held_out:
            return chain


def chain_problems(
    count: int, held_out: bool, seed: int = 0, length: int | None = None
) -> list[Problem]:
    """Returns `count` different problems, or all there are if there are fewer.

    No held-out one is among the others, whatever the seeds.
    """
    rng = random.Random(f"{seed} {held_out}")
    chains: dict[Chain, None] = {}  # a dict keeps the order and drops repeats
    repeats = 0
    while len(chains) < count and repeats < MAX_REPEATS:
        chain = random_chain(rng, held_out, length)
        repeats = repeats + 1 if chain in chains else 0
        chains[chain] = None
    return [chain.problem() for chain in chains]


# ---- The steps of a solution ---------------------------------------------------------------------
# 42, -7, 11.5, 1,200
NUMBER = re.compile(r"-?(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?")
SENTENCE_END = re.compile(r"\.(?![0-9])")  # a full stop, but not the decimal point of 11.5


def stated_results(text: str, num_steps: int, opening: int = 1) -> list[tuple[int, int]]:
    """Returns where the result that each step states begins and ends in a solution.

    A step is a sentence, after `opening` others, and its result is the last number in it. A
    sentence without a number has an empty span at its end, and a step that is not there has one at
    the end of the text.
    """
    num_sentences = opening + num_steps
    first_ends = itertools.islice(SENTENCE_END.finditer(text), num_sentences)
    ends = [match.start() for match in first_ends]
    ends += [len(text)] * (num_sentences - len(ends))

    spans = []
    begin = 0
    for end in ends:
        numbers = [match.span() for match in NUMBER.finditer(text, begin, end)]
        spans.append(numbers[-1] if numbers else (end, end))
        begin = min(end + 1, len(text))
    return spans[opening:]


def has_right_steps(text: str, problem: Problem) -> bool:
    """Returns whether a solution states the right result of every step; its box is not read."""
    spans = stated_results(text, len(problem.steps), problem.opening)
    stated = [text[begin:end].replace(",", "") for begin, end in spans]
    return stated == [str(step) for step in problem.steps]


def first_error(text: str, problem: Problem) -> int | None:
    """Returns the place of the first character that differs from a right result or answer.

    That is a step's result, or the answer in the box. If the text ends where something was due, the
    place is `len(text)`. Returns None if everything is right.
    """
    end_of_text = (len(text), len(text))
    stated = stated_results(text, len(problem.steps), problem.opening)
    claims = [*stated, boxed_span(text) or end_of_text]
    truths = [*map(str, problem.steps), problem.answer]
    for (begin, end), truth in zip(claims, truths, strict=True):
        claim = text[begin:end]
        if tidy(claim) != tidy(truth):
            return begin + common_start(claim, truth)
    return None


def common_start(a: str, b: str) -> int:
    """Returns how many characters two texts have in common before they first differ."""
    length = min(len(a), len(b))
    for i in range(length):
        if a[i] != b[i]:
            return i
    return length


def token_roles(pieces: Sequence[str], problem: Problem) -> list[str]:
    """Returns what each token of a completion decides, from the texts of its tokens.

    A role is "decisive" for a digit of the result that a step states, "first_wrong" for the one
    token at which the solution first goes wrong (the last one, if it ends too early), or "".
    """
    text = "".join(pieces)
    results = stated_results(text, len(problem.steps), problem.opening)
    error = first_error(text, problem)
    if error is not None:
        error = min(error, len(text) - 1)

    roles = []
    begin = 0
    for piece in pieces:
        end = begin + len(piece)
        if error is not None and begin <= error < end:
            roles.append("first_wrong")
        elif any(max(begin, first) < min(end, last) for first, last in results):
            roles.append("decisive")
        else:
            roles.append("")
        begin = end
    return roles
