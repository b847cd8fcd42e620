"""Thousands of hostile completions through the reward: no crash, no hang, no undeserved credit.

Each completion is built so that its verdict is known without the grader: from whole numbers and
fractions that Python compares itself, from text that holds no digit or no complete box, or by
adding a number to a gold answer. A share of right answers must get credit, or a grader that always
says 0 would pass. `pytest -m slow` runs 10,000; the quick suite runs 250.
"""

import random
import re
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from fractions import Fraction
from functools import cache
from typing import NamedTuple

import pytest
from test_reward import DATA, ENDLESS, box, gsm8k, math500

from common.data import chain_problems
from common.reward import Grader


class Case(NamedTuple):
    kind: str
    completion: str
    gold: str
    credit: float | None  # None: any verdict will do, as long as there is one


Make = Callable[[random.Random], tuple[str, str, float | None]]  # completion, gold, credit

FORMS = [  # ways to write v, all equal to it
    "{v}", "+{v}", "{v}.0", "{v}.", "${v}$", "{{{v}}}", "{v}/1", r"\frac{{{v2}}}{{2}}", "{v3} - 3",
    r"{v} \cdot 1", r"\left({v}\right)", r"\displaystyle {v}", r"\sqrt{{{vv}}}", "x = {v}",
    r"{v}\text{{ apples}}", r"\$ {v}", "{v3}-2-1", r"\dfrac{{{v2}}}2", r"2^0 \cdot {v}",
    "{v} dollars", "{v} cm^2", "{v} = x", "{v3} - 3 = {v}", r"\text{{Cost}} = {v3} - 3 = {v}",
]  # fmt: skip
PROBLEM = "A box holds apples or dollars. It is 2 cm^2. Find their number."
HEDGES = [  # a strict marker gives nothing for these, though {v} stands in each
    "{v}, {v}", "{v}; {v}", "x = {v3} x = {v}", r"x = {v3} \lor x = {v}", "{v3} = {v}", "2x = {v}",
    "x + y = {v}", r"{v}\text{{ million}}", r"{v}\text{{ or more}}", r"{v}\text{{ is wrong}}",
    "{v}_{{(7)}}", r"{v} \mod {v3}", r"{v}\text{{ apples or }}\frac{{{v2}}}{{3}}",
]  # fmt: skip
OVERSIZED = ["10^{10^{4}}", "(10^{40})^{3}", "2^{10^{4}}", "30!"]
FRACTION = re.compile(r"(-?)(?:([0-9]+)(?:\.([0-9]+))?|\\d?frac\{([0-9]+)\}\{([0-9]+)\})")


# ----------------------------------------------------------------------------------- real answers


@cache
def integers() -> list[str]:
    """Answers of the embedded task and, where it is there, of GSM8K."""
    chains = [problem.answer for problem in chain_problems(200, False)]
    words = gsm8k("test")[1] if (DATA / "gsm8k_test.jsonl").exists() else []
    return chains + [answer for answer in words if answer.isdecimal() and int(answer) > 1]


@cache
def latex() -> list[tuple[str, str]]:
    """(solution, answer) of MATH-500; without it some of each kind, in a made-up solution."""
    if (DATA / "math500.jsonl").exists():
        return list(zip(*math500(), strict=True))
    golds = [r"\frac{3}{4}", "0.25", r"2\sqrt{2}", r"\left( 3, \frac{\pi}{2} \right)", "x^2+2x+1"]
    golds += [r"\text{Evelyn}", r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", "[-2,7]", "3, 5, 7"]
    return [(f"Let $x$ be it. Then {box(gold)}", gold) for gold in golds]


def value(text: str) -> Fraction | None:
    """A plain number or \\frac{a}{b} as Python reads it."""
    match = FRACTION.fullmatch(text)
    if match is None or (match[5] and int(match[5]) == 0):
        return None
    whole = f"{match[2]}.{match[3] or 0}" if match[2] else None
    size = Fraction(whole) if whole else Fraction(int(match[4]), int(match[5]))
    return -size if match[1] else size


# -------------------------------------------------------------------------------------- the kinds


def write(v: int, rng: random.Random) -> str:
    return rng.choice(FORMS).format(v=v, v2=2 * v, v3=v + 3, vv=v * v)


def noise(rng: random.Random, longest: int = 300) -> str:
    """Random bytes as text, without digits and boxes."""
    raw = rng.randbytes(rng.randint(0, longest))
    if rng.random() < 0.5:  # what LaTeX is made of, in any order
        raw = bytes(rng.choices(b"\\{}^_$%&#~()[]+-*/=<>,.:! \n\tabxy", k=len(raw)))
    text = raw.decode(rng.choice(["utf-8", "latin-1"]), errors="replace")
    text = "".join(char for char in text if not char.isnumeric())
    return text.replace("boxed", "")


def no_box(rng: random.Random) -> tuple[str, str, float]:
    gold = rng.choice(integers())
    end = rng.choice(["", gold, "\\boxed", "\\fbox{" + gold + "}", "boxed{" + gold + "}"])
    return noise(rng).rstrip("\\") + " " + end, gold, 0.0


def noise_in_box(rng: random.Random) -> tuple[str, str, float]:
    return "so " + box(noise(rng, 60)), rng.choice(integers()), 0.0


def other_number(rng: random.Random) -> tuple[str, str, float]:
    gold = rng.choice(integers())
    near = int(gold) + rng.choice([-2, -1, 1, 2, 10, 100])
    far = int("".join(rng.choices("123456789", k=rng.randint(1, 12))))
    other = rng.choice([near, far, 10 * int(gold)])
    if other in (int(gold), 0) or other < 0:
        other = int(gold) + 1
    return noise(rng) + " " + box(write(other, rng)), gold, 0.0


def extra_digit(rng: random.Random) -> tuple[str, str, float]:
    gold = rng.choice(integers())
    place = rng.randint(1, len(gold))
    digit = rng.choice("0123456789")
    longer = gold[:place] + rng.choice(["", "", "."]) * (place == len(gold)) + digit
    longer += gold[place:]
    if Fraction(longer) == int(gold):  # "7.0"
        longer = gold + "1"
    return "The answer: " + box(longer), gold, 0.0


def power(rng: random.Random) -> tuple[str, str, float]:
    """A power that Python finds unequal, or one beyond every gold, which have a few digits."""
    gold = rng.choice(integers())
    base = rng.choice([2, 3, 10, int(gold)])
    exponent = rng.randint(2, 40)
    texts = [f"{base}^{{{exponent}}}", f"({base})^{exponent // 10 + 2}"]
    powers = [base**exponent, base ** (exponent // 10 + 2)]
    right = [text for text, size in zip(texts, powers, strict=True) if size == int(gold)]
    text = rng.choice([*texts, rng.choice(OVERSIZED), f"{gold}^{{-{exponent}}}"])
    return box(text), gold, float(text in right)


def digit_of_a_fraction(rng: random.Random) -> tuple[str, str, float]:
    golds = [gold for _, gold in latex() if value(gold) is not None]
    gold = rng.choice(golds)
    place = rng.choice([i for i, char in enumerate(gold) if char.isdecimal()])
    changed = gold[:place] + rng.choice("123456789") + gold[place + 1 :]
    return "Thus " + box(changed), gold, float(value(changed) == value(gold))


def something_added(rng: random.Random) -> tuple[str, str, float]:
    solution, gold = rng.choice(latex())
    return solution + " Or: " + box(f"{gold} + {rng.randint(1, 9)}"), gold, 0.0


def cut_off(rng: random.Random) -> tuple[str, str, float]:
    """Ends inside the box that holds the answer."""
    solution, gold = rng.choice(latex())
    text = solution.replace("boxed", "underline") + "\\boxed{" + "{" * rng.randint(0, 3) + gold
    return text[: len(text) - rng.randint(0, len(gold))], gold, 0.0


def hedged(rng: random.Random) -> tuple[str, str, float]:
    gold = rng.choice(integers())
    v = int(gold)
    return noise(rng) + box(rng.choice(HEDGES).format(v=v, v2=2 * v, v3=v + 3)), gold, 0.0


def changed_mind(rng: random.Random) -> tuple[str, str, float]:
    gold = rng.choice(integers())
    return f"{box(gold)} no, {box(write(int(gold) + 1, rng))}" + noise(rng), gold, 0.0


def right_number(rng: random.Random) -> tuple[str, str, float]:
    gold = rng.choice(integers())
    first = rng.choice(["", box("0"), noise(rng)])
    return f"{first} {box(write(int(gold), rng))}{noise(rng)}", gold, 1.0


def right_solution(rng: random.Random) -> tuple[str, str, float]:
    solution, gold = rng.choice(latex())
    again = rng.choice(["", box(gold), box("\\displaystyle " + gold), box(f" ${gold}$.")])
    return solution + again + noise(rng), gold, 1.0


def mutated(rng: random.Random) -> tuple[str, str, None]:
    """A gold answer with characters dropped, doubled, swapped or replaced: whatever that means."""
    gold = rng.choice(latex())[1]
    chars = list(gold)
    for _ in range(rng.randint(1, 4)):
        place = rng.randrange(len(chars))
        chars[place] = rng.choice(["", 2 * chars[place], *"\\{}^_1x(&\0", "\\frac", "\\sqrt{"])
    if rng.random() < 0.2:
        chars.insert(0, rng.choice("({") * rng.randint(1, 60))
    return box("".join(chars)) + "}" * 5, gold, None


KINDS: dict[Make, int] = {  # and how many of a hundred
    no_box: 10, noise_in_box: 8, other_number: 14, extra_digit: 8, power: 6,
    digit_of_a_fraction: 6, something_added: 8, cut_off: 6, changed_mind: 6, right_number: 10,
    right_solution: 6, mutated: 6, hedged: 6,
}  # fmt: skip


def cases(count: int, endless: int, seed: int) -> list[Case]:
    """`count` completions in random order, `endless` of them hold their worker until it is killed:
    each costs a time-out, so they are few."""
    rng = random.Random(seed)
    makers = rng.choices(list(KINDS), list(KINDS.values()), k=count - endless)
    found = [Case(make.__name__, *make(rng)) for make in makers]
    found += [Case("endless", box(text), "7", 0.0) for text in ENDLESS[:endless]]
    rng.shuffle(found)
    return found


# --------------------------------------------------------------------------------------- the tests


@contextmanager
def at_most(seconds: int) -> Iterator[None]:
    """TimeoutError in the middle of what hangs."""

    def stop(*_: object) -> None:
        raise TimeoutError(f"not done after {seconds} s: the pool hangs")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def fuzz(count: int, endless: int, seed: int, seconds: int) -> None:
    made = cases(count, endless, seed)
    wrong = []
    start = time.monotonic()
    assert len(made) == count
    with at_most(seconds), Grader(2, timeout=5.0) as grader:
        for first in range(0, count, 64):  # a rollout's worth at a time
            some = made[first : first + 64]
            texts = [c.completion for c in some]
            verdicts = grader.grade(texts, [c.gold for c in some], [PROBLEM] * len(some))
            assert len(verdicts) == len(some) and set(verdicts) <= {0.0, 1.0}
            pairs = zip(some, verdicts, strict=True)
            wrong += [c for c, got in pairs if c.credit is not None and got != c.credit]
        rows = [box(text) for text in (r"\frac{21}{3}", "7.0", "15/2", "14/2")]
        assert grader.grade(rows, ["7"] * 4) == [1.0, 1.0, 0.0, 1.0]  # the pool is still right
        print(f"{count} in {time.monotonic() - start:.0f} s, {grader.timeouts} timeouts")
    # On a busy machine 5 seconds can be too few for a right answer.
    with Grader(timeout=60.0) as patient:
        again = patient.grade(
            [c.completion for c in wrong], [c.gold for c in wrong], [PROBLEM] * len(wrong)
        )
    wrong = [c for c, got in zip(wrong, again, strict=True) if c.credit == 0.0 or got == 0.0]
    assert [ascii((c.kind, c.credit, c.gold, c.completion[-80:])) for c in wrong] == []
    credit = Counter(c.credit for c in made)
    assert credit[1.0] > 0.1 * count and credit[0.0] > 0.5 * count


@pytest.mark.slow
def test_ten_thousand_completions():
    fuzz(10_000, endless=len(ENDLESS), seed=1, seconds=3000)
