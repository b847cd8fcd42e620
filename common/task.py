r"""The embedded task, chain arithmetic, and the steps that a solution must state.

"Start with 23, add 19, double it." A solution works it out in sentences, "We begin at 23. Then
adding 19 gives 42. We double it and get 84.", and ends with \boxed{84}.
"""

import hashlib
import math
import os
import random
import re
from typing import Any, NamedTuple

from common.answers import boxed_span


class Problem(NamedTuple):
    prompt: str | list[dict[str, str]]  # text, or chat messages
    answer: str  # "" where the data has none
    steps: tuple[int, ...] = ()  # the right result of each step that a solution must state
    columns: dict[str, Any] = {}  # noqa: RUF012  the row without its prompt; never written to
    # Sentences before the one that states the first result. A chain's names its start.
    opening: int = 1
    prompt_ids: tuple[int, ...] = ()  # the prompt by the chat template
    row: int = 0  # in its file or split, from 1
    open_thought: str = ""  # "<think>", say, if the chat template begins answers so


# ---- Chains --------------------------------------------------------------------------------------
def random_chain(rng: random.Random, length: int) -> Problem:
    """Returns a random chain of `length` operations; 0: of 3 or 4."""
    value = rng.randint(5, 60)
    sentence = f"Start with {value}"
    results = []
    for _ in range(length or rng.randint(3, 4)):
        name = rng.choice(["add", "add", "subtract", "subtract", "multiply"])
        operand = rng.choice([2, 2, 3]) if name == "multiply" else rng.randint(2, 19)
        sentence += f", {name} {operand}"
        value = {"add": value + operand, "subtract": value - operand}.get(name, value * operand)
        results.append(value)
    prompt = f"{sentence}.".replace("multiply 2", "double it").replace("multiply 3", "triple it")
    return Problem(prompt, str(value), tuple(results), {"answer": str(value)})


def chain_problems(count: int, held_out: bool, seed: int = 0, length: int = 0) -> list[Problem]:
    """Returns `count` different chains with values of 1 to 99, or fewer where there are not many.

    One chain in ten is held out, and never trained on. A hash of the chain itself decides that, so
    no seed can make the sets overlap.
    """
    rng = random.Random(f"{seed} {held_out}")
    found: dict[Any, Problem] = {}  # by prompt
    for _ in range(1000 * count):
        problem = random_chain(rng, length)
        digest = hashlib.blake2b(str(problem.prompt).encode(), digest_size=4).digest()
        is_held_out = int.from_bytes(digest, "big") % 10 == 0
        if min(problem.steps) >= 1 and max(problem.steps) <= 99 and is_held_out == held_out:
            found[problem.prompt] = problem
        if len(found) == count:
            break
    return list(found.values())


# ---- The steps of a solution ---------------------------------------------------------------------
NUMBER = re.compile(r"-?(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?")  # -7, 1,200
SENTENCE_END = re.compile(r"\.(?![0-9])")  # a full stop, but not the decimal point of 11.5


def stated_results(text: str, problem: Problem) -> list[tuple[int, int]]:
    """Returns where the result of each step begins and ends in a solution.

    A step is a sentence, after `problem.opening` others, and its result is the last number in it.
    For a sentence without a number it is the empty span at the sentence's end.
    """
    spans = []
    begin = 0
    for sentence in SENTENCE_END.split(text)[: problem.opening + len(problem.steps)]:
        end = begin + len(sentence)
        numbers = [match.span() for match in NUMBER.finditer(text, begin, end)]
        spans.append(numbers[-1] if numbers else (end, end))
        begin = end + 1
    return spans[problem.opening :]


def has_right_steps(text: str, problem: Problem) -> bool:
    """Returns whether a solution states the right result of every step; its box is not read."""
    return [str(step) for step in problem.steps] == [
        text[begin:end].replace(",", "") for begin, end in stated_results(text, problem)
    ]


def token_roles(pieces: list[str], problem: Problem) -> list[str]:
    """Returns what each token of a solution decides, from the texts of its tokens.

    A role is "result" for a digit of the result that a step states, "first_wrong" for the one token
    at which the solution first goes wrong (the last one, if it ends too early), or "".
    """
    text = "".join(pieces)
    results = stated_results(text, problem)
    end_of_text = (len(text), len(text))
    claims = [
        *results,
        *[end_of_text] * (len(problem.steps) - len(results)),  # for steps that it does not state
        boxed_span(text) or end_of_text,
    ]
    first_error = math.inf
    for (begin, end), truth in zip(claims, [*problem.steps, problem.answer], strict=True):
        claim = text[begin:end]
        if claim.replace(",", "") != str(truth):
            common = os.path.commonprefix([claim, str(truth)])  # noqa: RUF071  of texts, not of paths
            first_error = min(begin + len(common), len(text) - 1)
            break

    roles = []
    begin = 0
    for piece in pieces:
        end = begin + len(piece)
        states_result = any(max(begin, first) < min(end, last) for first, last in results)
        role = "result" if states_result else ""
        roles.append("first_wrong" if begin <= first_error < end else role)
        begin = end
    return roles
