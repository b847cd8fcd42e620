"""Tests of common/reward.py, answers.py and grading_worker.py.

`python tests/data_and_reward/test_reward.py --bench` measures completions a second.
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
if __name__ == "__main__":  # --bench; under pytest the configuration does this
    sys.path.insert(0, str(ROOT))

import ast
import functools
import itertools
import json
import math
import os
import signal
import subprocess
import threading
import time
from types import SimpleNamespace

import pytest

from common import answers, grading_worker, reward
from common.answers import FORMULA, last_boxed, quick_verdict
from common.reward import Grader, RewardError, call_reward_func, load_reward_funcs

DATA = ROOT.parent / "shared" / "data"
LINUX = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def box(text: str) -> str:
    return f"\\boxed{{{text}}}"


def read(name: str) -> list[dict]:
    path = DATA / name
    if not path.exists():
        pytest.skip(f"{path} is absent (it is not part of the project)")
    return [json.loads(line) for line in path.read_text().splitlines()]


def math500() -> tuple[list[str], list[str]]:
    rows = read("math500.jsonl")
    return [row["solution"] for row in rows], [row["answer"] for row in rows]


def problems_of(name: str) -> list[str]:
    if name == "math500":
        return [row["problem"] for row in read("math500.jsonl")]
    return [row["question"] for row in read(f"gsm8k_{name}.jsonl")]


def gsm8k(split: str) -> tuple[list[str], list[str]]:
    parts = [row["answer"].split("####") for row in read(f"gsm8k_{split}.jsonl")]
    return [a + box(b.strip()) for a, b in parts], [b.strip() for _, b in parts]


def pids(grader: Grader) -> list[int]:
    return [worker.process.pid for worker in grader._workers]


@pytest.fixture(scope="module")
def grader():
    # A generous deadline: other jobs on a busy machine must not turn a right answer into a 0.
    with Grader(timeout=30.0) as shared:
        yield shared


# ---------------------------------------------------------------------------------- last_boxed


@pytest.mark.parametrize(
    ("text", "content"),
    [
        (r"so \boxed{7}.", "7"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{1} or rather \boxed{2}", "2"),
        (r"\boxed{\boxed{3}}", "3"),
        (r"\boxed {4}", "4"),
        (r"\boxed{}", ""),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{\left\{ x \right.}", r"\left\{ x \right."),  # \{ is not a grouping brace
        (r"a \\ \boxed{5}", "5"),
        (r"a \\\boxed{5}", "5"),
        (r"\\boxed{5}", "5"),
        ("\\boxed{a\nb}", "a\nb"),
        (r"} } \boxed{6} {", "6"),
        (r"\boxed{5} then \boxed{6", "5"),  # half-open: no box
        (r"\boxed{5 then {6}", None),
        (r"\boxed", None),
        (r"\boxed 7", None),
        (r"\fbox{7}", None),
        (r"{7}", None),
        ("", None),
    ],
)
def test_last_boxed(text, content):
    assert last_boxed(text) == content


@pytest.mark.parametrize("unit", ["\\boxed{", "\\boxed", "\\boxed{}", "\\", "{", "}", "\\boxed "])
def test_last_boxed_is_linear(unit):
    # Half a million characters: quadratic work would take hours, linear a fraction of a second.
    start = time.monotonic()
    text = box("7") + unit * (500_000 // len(unit))
    assert last_boxed(text) == ("" if unit == "\\boxed{}" else "7")
    last_boxed("\\boxed{" + " " * 250_000 + unit * (250_000 // len(unit)))
    assert time.monotonic() - start < 30


# ---------------------------------------------------------------------------------- quick path


@pytest.mark.parametrize(
    ("answer", "gold", "verdict"),
    [
        ("7", "7", 1), ("7", "8", 0), (" 7 ", "7", 1), ("7.", "7", 1), ("$7$", "7", 1),
        ("1,000", "1000", 1), ("+7", "7", 1), ("007", "7", 1), ("-0", "0", 1), ("-7", "7", 0),
        ("12345678901234567890123456789", "12345678901234567890123456788", 0),
        ("\\frac{1}{2}", "\\frac{1}{2}", 1), ("\\text{Evelyn}\\,", "\\text{Evelyn}", 1),
        ("", "7", 0), ("", "", 0), ("9" * 1_000_000, "7", 0), ("x" * 501, "7", 0),
        ("x" * 501, "x" * 501, 1), ("7", "x" * 501, 0),
    ],
)  # fmt: skip
def test_quick_path_starts_no_worker(answer, gold, verdict):
    with Grader() as grader:
        assert grader.grade([box(answer), "no box: " + gold], [gold, gold]) == [verdict, 0.0]
        assert grader._workers == []


@pytest.mark.parametrize(
    "text", ["\u0667", "⁷", "\uff17", "1,00", "0,123", "7.0", "1e3", "9" * 31, "0x7"]
)
def test_only_plain_ascii_integers_are_compared_in_the_parent(text):
    assert quick_verdict(text, "7") is None


def test_lengths_must_agree():
    with pytest.raises(ValueError):
        Grader().grade([box("1")], ["1", "2"])


# --------------------------------------------------------------------------------- equivalence

EQUAL = [
    (r"\frac12", "0.5"), ("1/2", "0.5"), (r"\frac12", "1/2"), (r"\dfrac{3}{4}", r"\frac{3}{4}"),
    (r"\tfrac34", "0.75"), ("5", "x=5"), ("x = 5", "5"), (r"\sqrt{8}", r"2\sqrt{2}"),
    (r"(3, \pi/2)", r"\left( 3, \frac{\pi}{2} \right)"), ("5, 3, 7", "3, 5, 7"),
    ("[-2, 7]", r"x \in [-2,7]"), (r"(-\infty,0]", r"(-\infty, 0]"), ("2(k+1)", "2k+2"),
    ("-q + p", "p - q"), ("Evelyn", r"\text{Evelyn}"), (r"\text{C}", r"\text{(C)}"),
    ("11111111100", r"11,\! 111,\! 111,\! 100"), ("90", r"90^\circ"),
    (r"\$18", "18"), ("18.00", "18"), ("18", r"18\text{ apples}"), ("5.4", r"5.4 \text{ cents}"),
    (r"\begin{bmatrix} 1 \\ 2 \end{bmatrix}", r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}"),
    ("1+2i", "2i + 1"), (r"1 + \sqrt{19}, 1 - \sqrt{19}", r"1 \pm \sqrt{19}"),
    ("6.72 \\times 10^{-5}", ".0000672"), (r"(x+1)^2", "x^2+2x+1"), ("0.333333", r"\frac13"),
    ("52_{8}", "52_8"), ("52", "52_8"), ("52_{10}", "52"), ("x_{1}", "x_1"),
    ("{1" + 400 * "0" + "}", "1" + 400 * "0"),
    # units and other words
    ("12 dollars", "12"), ("12 cm^2", "12"), ("12cm", "12"), (r"12\,\mathrm{m}/\mathrm{s}^2", "12"),
    (r"12^\circ", "12"), ("12°", "12"), (r"12^{\circ}\text{C}", "12"), ("12 years old", "12"),
    ("12 km/h", "12"), (r"\frac{1}{2} cup", "0.5"), (r"2\pi cm", r"2\pi"), ("12", "12 dollars"),
    (r"1\text{ and }2\text{ units}", "1, 2"), ("A,D", r"\text{A,D}"), ("D, A", r"\text{A,D}"),
    (r"\displaystyle \text{Evelyn}", r"\text{Evelyn}"), (r"\varnothing", r"\emptyset"),
    # thousands
    (r"1,000\pi", r"1000\pi"), (r"\frac{1,000}{3}", r"\frac{1000}{3}"), ("1,200.50", "1200.5"),
    (r"x = 15,\!600", "15600"), ("x = 15,600", "15600"), ("(1, 200)", "(1,200)"),
    ("2, 100", "100, 2"),
    # equations
    ("12=x", "12"), ("12 = x = y", "12"), (r"6 \times 2 = 12", "12"), ("AB = 12", "12"),
    (r"\angle A = 12^\circ", "12"), (r"A=\pi r^2=9\pi", r"9\pi"), ("f(-2) = 12", "12"),
    ("f^{-1}(2) = 12", "12"),
    (r"\sin 30^\circ = \frac12", "0.5"), ("P(X=2) = 1/4", "0.25"), (r"\sum_{n=1}^3 n", "6"),
    (r"A = 3 · 4 = 12", "12"), ("S = s^2", "s^2"), (r"x = \pi", r"\pi"), ("-2x = y", "y = -2x"),
    (r"x=4\lor x=7", "4, 7"), (r"x = 4 \text{ or } x = 7", "4, 7"), (r"\{4, 7\}", "7, 4"),
    # sets
    ("1<x<2", "(1,2)"), (r"x\ge0", r"[0,\infty)"), (r"-1 < x \leq 3", "(-1, 3]"),
    ("x > 3", r"(3,\infty)"),
    # fractions
    (r"0.\overline{3}", r"\frac13"), (r"\frac23", r"0.\overline{6}"), (r"2.1\bar{6}", "13/6"),
    ("(6)(4/5)", r"\frac{24}{5}"), (r"\left(b+2\right)\left(a+5\right)", "(a+5)(b+2)"),
    (r"\frac{1}{2004!}", r"\frac{2}{2 \cdot 2004!}"), ("1.00000010", "1.0000001"),
]  # fmt: skip
DIFFERENT = [
    (r"\frac13", "0.5"), ("2/1", "0.5"), ("x=6", "5"), (r"\sqrt{7}", r"2\sqrt{2}"),
    (r"(\frac{\pi}{2}, 3)", r"\left( 3, \frac{\pi}{2} \right)"), ("3, 5", "3, 5, 7"),
    ("(2, 1, 3)", "(1, 2, 3)"), ("[-2, 7)", r"x \in [-2,7]"), (r"(-\infty,0)", r"(-\infty, 0]"),
    ("2k+3", "2k+2"), ("q - p", "p - q"), ("Angela", r"\text{Evelyn}"), ("(D)", r"\text{(C)}"),
    ("11111111101", r"11,\! 111,\! 111,\! 100"), ("91", r"90^\circ"), ("18.01", "18"),
    (r"\begin{bmatrix} 2 \\ 1 \end{bmatrix}", r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}"),
    ("1-2i", "2i + 1"), ("x^2+2x+2", "(x+1)^2"), ("7, 8", "7"), (r"\{7, 8\}", "7"), ("y=7x", "7"),
    (r"\text{it is } \frac{1}{2} \text{ or } (((", r"\frac{1}{2}"),
    (".0000674", ".0000672"), ("0.000067", ".0000672"), ("0", "0.0000001"), ("0.33", r"\frac13"),
    ("101_2", "101_3"), ("101_{12}", "101_3"), ("10_8", "10"), ("52_7", "52_{8}"),
    ("11_{(2)}", "11"), (r"11_{\text{two}}", "11"),
    # hedges
    (r"x=4\lor x=7", "4"), (r"x=4\lor x=7", "7"), (r"x=4 \implies x=7", "7"), ("x=4 x=7", "7"),
    (r"x=4\quad x=7", "7"), ("42, 42", "42"), ("1;1", "1"), ("x = 42, 42", "42"),
    (r"42, \frac{84}{2}", "42"), (r"42\text{ and }42", "42"),
    # words that are no unit; without the problem a noun is none either
    (r"12\text{ apples}", "12"), ("12 percent", "12"), (r"10\%", "10"),
    (r"12\text{ million}", "12"), (r"12\text{ or more}", "12"), (r"12\text{ is wrong}", "12"),
    ("12 million", "12"), ("12 Dozens", "12"), (r"12\text{ Million}", "12"), (r"12\text{k}", "12"),
    ("12 squared", "12"), (r"12\text{ and a half}", "12"),
    (r"12\text{ hours and 30 minutes}", "12"), (r"12\text{.5}", "12"), ("12ab", "12"), ("2d", "2"),
    (r"12\text{ cm}, 13\text{ cm}", "12"), (r"12\text{ apples or }\frac{26}{2}", "12"),
    (r"\text{Monday} \text{ or } \text{Tuesday}", r"\text{Monday}"),
    # not that number, equation, set or pair
    (r"4\mod 5", "4"), (r"4\text{ mod }5", "4"), ("13=12", "12"), ("2x=12", "12"), ("x+y=12", "12"),
    ("x^2 = 12", "12"), (r"\frac{a}{b} = 12", "12"), ("12=13", "12"), ("(13=12)", "12"),
    (r"\{1,2\}", "(1,2)"), ("1<x<3", "(1,2)"), ("x>0", r"[0,\infty)"), ("(1,200)", "1200"),
    (r"\frac{1}{2005!}", r"\frac{1}{2004!}"), (r"\frac{1}{\pi^{51}}", r"\frac{1}{\pi^{50}}"),
    ("1.0000002", "1.0000001"), ("5''10", "510"), ("5'10''", "510"), ("(6)(4/5)", r"\frac{34}{5}"),
    ("A,C", r"\text{A,D}"), (r"0.\overline{3}", "0.33"), (r"0.\overline{30}", r"\frac13"),
]  # fmt: skip


def test_equivalence(grader):
    for pairs, verdict in ((EQUAL, 1.0), (DIFFERENT, 0.0)):
        got = grader.grade([box(a) for a, _ in pairs], [b for _, b in pairs])
        assert [p for p, v in zip(pairs, got, strict=True) if v != verdict] == []


def test_no_box_is_slow_to_rewrite():
    """500 characters take milliseconds; a pattern that tries every way to split them, for ever."""
    for unit in (
        "1 ", "1,", "a", " ab", "1 cm", "\\text{", "\\text{a}", "1,000,", "{", "}", "\\,", "(1)",
        "x=", "=", "1.\\overline{3}", "_{1}", "^", "or ", "\\text{ a }/", "~$", "1'", "12,\\! ",
        "aillion ", "cm 1 and ", "twenty ", "\\text{cm} ", "1 h 1,", "thousand ", "per ", "$", ":",
        "√(", "\\circ ", "^2", "in ", "{:}", "\\frac{\\text{", "how many ", "p.m",
    ):  # fmt: skip
        for start, end in (("", "!"), ("12 ", "\\"), ("x = 1", " 0")):
            text = start + unit * (490 // len(unit)) + end
            begun = time.monotonic()
            tidy_text = answers.tidy(text)
            quick_verdict(tidy_text, "7")
            answers.pairs_to_compare(text, "7", "How many apples and cm?")
            answers.pairs_to_compare("7", text, text)
            grading_worker.sides_to_check(tidy_text)
            assert time.monotonic() - begun < 2.0, (start, unit, end)


# ------------------------------------------------------------------------- numbers side by side

# math-verify adds them: without the worker's refusal most of these are 42, 84, 6 or 3/2 to it.
ADDENDS = [
    ("40 2", "42"), ("12 30", "42"), ("1 2 3", "6"), ("40\n2", "42"), ("40\t2", "42"),
    ("40\u00a02", "42"), ("40~2", "42"), (r"40\ 2", "42"), (r"40\,2", "42"), (r"40 \, 2", "42"),
    (r"40\;2", "42"), (r"40\:2", "42"), (r"40\!2", "42"), (r"40\quad 2", "42"),
    (r"40\qquad2", "42"), (r"40\thinspace 2", "42"), (r"40\negthickspace 2", "42"),
    (r"40\text{ }2", "42"), (r"40\mbox{ }2", "42"), ("40{2}", "42"), ("{40}{2}", "42"),
    ("{40} {2}", "42"), ("40{}2", "42"), (r"40\phantom{1}2", "42"), (r"40\hspace{1em}2", "42"),
    (r"40\ldots 2", "42"), (r"40\displaystyle 2", "42"), (r"40\left.\right.2", "42"),
    ("(40) 2", "42"), ("40 (2)", "42"), ("(40)(2)", "42"), (r"\left(40\right)2", "42"),
    ("[40]2", "42"), (r"40^\circ 2", "42"), ("40_{9} 2", "42"), (r"40\$ 2", "42"), ("40' 2", "42"),
    ("-40 82", "42"), ("-40 82", "-122"), ("-40 2", "-42"), ("40 02", "42"), ("40 2.", "42"),
    ("40 2.0", "42"), ("40 2.0", "80"), ("1.5 28", "42"), ("20 20 2", "42"), ("4 000 0", "4000"),
    (r"40 \frac{4}{2}", "42"), (r"40\frac{84}{42}", "42"), (r"\frac{80}{2} 2", "42"),
    (r"3 \frac{3}{2}", r"\frac{9}{2}"), (r"\frac{1}{2} 3", r"\frac{7}{2}"),
    (r"2(\frac{1}{2})", r"\frac52"), ("2 1/2", r"\frac32"), ("2 3/3", "3"),
    ("2 {1}/{2}", r"\frac32"),
    ("x = 40 2", "42"), (r"\sqrt{40 2}", r"\sqrt{42}"), (r"\frac{40 2}{5}", r"\frac{42}{5}"),
    ("(40 2, 1)", "(42, 1)"), ("40 2, 1", "42, 1"), (r"\{40 2\}", r"\{42\}"), ("40 2 x", "42x"),
    (r"\begin{pmatrix} 40 2 \\ 1 \end{pmatrix}", r"\begin{pmatrix} 42 \\ 1 \end{pmatrix}"),
    (r"40 2\text{ apples}", "42"), (r"42 \, 42", "84"), ("4 2", "42"), (r"4\text{ }2", "42"),
    ("5'10", "510"), ("1 000", "1"), (r"1\,000", "1"), ("1 000", "0"), ("40 200", "240"),
    ("1 00", "1"), ("0 042", "42"), ("1 0000", "10000"), ("1.5 000", "1.5"),
]  # fmt: skip
ONE_NUMBER = [
    (r"2\frac{1}{2}", r"\frac{5}{2}"), (r"2 \frac12", "2.5"), (r"2\,\frac{1}{2}", "5/2"),
    (r"2~\dfrac{1}{2}", r"\frac{5}{2}"), (r"-2\tfrac12", "-2.5"), ("2 1/2", r"\frac{5}{2}"),
    (r"2\ 1/2", "2.5"), ("-2 1/2", "-5/2"), ("2 1/2", r"2\frac{1}{2}"), ("2{1/2}", "5/2"),
    (r"3\frac{1}{4}\text{ cups}", "3.25"), ("(2 1/2, 3)", r"(\frac52, 3)"),
    (r"1\,000", "1000"), (r"12\,345\,678", "12345678"), ("1{,}000", "1000"), ("1 000", "1000"),
    ("1~000", "1000"), (r"1\;000", "1,000"), (r"1\!000", "1000"), ("12 345 678.5", "12345678.5"),
    ("1\u202f000", "1000"), ("1 000, 2 000", "1000, 2000"), ("1000", r"1\,000"),
    (r"\frac{1\,000}{3}", "1000/3"), ("40+2", "42"), ("40 + 2", "42"), ("44 -2", "42"),
    (r"21 \cdot 2", "42"), (r"21 \times 2", "42"), ("3(-2)", "-6"), (r"\frac12 3", r"\frac32"),
    (r"\frac12\frac34", r"\frac38"), (r"2\pi", r"2 \pi"), ("2 x", "2x"), ("x~=~5", "5"),
    (r"18~\text{cm}", "18"), (r"\approx 3.14", "3.14"), (r"x \approx 3.14", "3.14"),
    (r"\approx 7", "7"), ("≈ 7", "7"), (r"\approx -\frac12", "-0.5"),
]  # fmt: skip


@pytest.mark.parametrize(("answer", "gold"), ADDENDS)
def test_numbers_side_by_side_are_not_added(answer, gold, grader):
    assert grader.grade([box(answer)], [gold]) == [0.0]


@pytest.mark.parametrize(("answer", "gold"), ONE_NUMBER)
def test_what_only_looks_like_numbers_side_by_side(answer, gold, grader):
    assert grader.grade([box(answer)], [gold]) == [1.0]


def test_a_product_nested_deep_is_read_once(grader):
    """Each number is looked at beside its neighbour; twice at every depth would take years."""
    before = grader.timeouts
    assert grader.grade([box("2(" * 40 + "x" + ")" * 40)], ["7"]) == [0.0]
    assert grader.timeouts == before


def test_a_repeated_pair_is_judged_once(grader, monkeypatch):
    sent = []
    judge_all = grader._judge_all

    def record(pairs):
        sent.extend(pairs)
        return judge_all(pairs)

    monkeypatch.setattr(grader, "_judge_all", record)
    for _ in range(2):
        texts = [box("3/6"), box("3/7"), box("3/6"), "no box"]
        assert grader.grade(texts, [r"\frac12"] * 4) == [1.0, 0.0, 1.0, 0.0]
    assert sent == [("3/6", r"\frac12"), ("3/7", r"\frac12")]


def test_the_cache_is_bounded(grader, monkeypatch):
    monkeypatch.setattr(reward, "CACHE_PAIRS", 3)
    for i in (1, 2, 3, 1, 4):  # 1 is used again, so 2 is the oldest when 4 comes
        grader.grade([box(f"{i}/9")], [r"\frac49"])
    assert [pair[0] for pair in grader._cache] == ["3/9", "1/9", "4/9"]


# ----------------------------------------------------------------------------------- real data

SETS = {
    "math500": math500,
    "train": functools.partial(gsm8k, "train"),
    "test": functools.partial(gsm8k, "test"),
}
GOLD_SCORES_ZERO: dict[str, set[str]] = {"math500": set(), "train": set(), "test": set()}
# (boxed, the next problem's answer): written differently, and equal.
NEXT_SCORES_ONE = {"math500": {("5", "x=5")}, "train": set(), "test": set()}


@pytest.mark.parametrize("name", SETS)
def test_gold_solutions(name, grader):
    texts, golds = SETS[name]()
    assert grader.grade(texts, golds) == grader.grade(texts, golds, problems_of(name))
    verdicts = grader.grade(texts, golds, problems_of(name))
    zero = {gold for gold, verdict in zip(golds, verdicts, strict=True) if verdict == 0.0}
    assert zero == GOLD_SCORES_ZERO[name]
    assert sum(verdicts) >= 0.998 * len(golds)


LONG = pytest.param("math500", marks=pytest.mark.slow)  # nearly every pair takes the worker


@pytest.mark.parametrize("name", [LONG, "train", "test"])
def test_gold_solutions_against_the_next_answer(name, grader):
    texts, golds = SETS[name]()
    after = golds[1:] + golds[:1]
    verdicts = grader.grade(texts, after, problems_of(name))
    rows = list(zip(golds, after, verdicts, strict=True))
    differ = [row for row in rows if row[0].replace(",", "") != row[1].replace(",", "")]
    assert len(differ) > 0.9 * len(rows)
    assert {(a, b) for a, b, verdict in differ if verdict == 1.0} == NEXT_SCORES_ONE[name]


@pytest.mark.slow
def test_no_formula_of_a_problem_is_paid_unless_it_is_the_answer(grader):
    texts, golds, problems = [], [], []
    for row in read("math500.jsonl"):
        formulas: set[str] = set()
        for formula in itertools.chain.from_iterable(FORMULA.findall(row["problem"])):
            formulas.update((formula, *formula.split("=")))
        for formula in formulas:
            texts.append(box(formula))
            golds.append(row["answer"])
            problems.append(row["problem"])
    verdicts = grader.grade(texts, golds, problems)
    rows = list(zip(texts, golds, verdicts, strict=True))
    paid = {(text, gold) for text, gold, verdict in rows if verdict == 1.0}
    assert len(rows) > 1900
    # Numbers, a choice, and a root that is the answer. Before, 35 problems paid some formula.
    assert {gold for _, gold in paid} == {"0", "1", "6", "12", r"\sqrt{53}", r"\text{(C)}"}


def answers_as_the_authors_write_them() -> list[tuple[str, str, str]]:
    """Returns problems of GSM8K, their answers, and these as the end of the solution has them.

    That is with a dollar sign, as in $18, or with the word after it, if the problem has it as well.
    """
    rows = []
    for row in read("gsm8k_test.jsonl"):
        problem = row["question"]
        solution, answer = (part.strip() for part in row["answer"].split("####"))
        end = re.sub(r"<<.*?>>", "", solution.splitlines()[-1])
        number = re.escape(answer)
        if re.search(rf"\$ ?{number}(?![\d.,])", end):
            rows.append((problem, answer, f"\\${answer}"))
        noun = re.search(rf"(?<![\d$.,]){number} ([a-z]+s)\b", end)
        if noun is not None and f"many {noun[1]}" in problem:
            rows.append((problem, answer, f"{answer}\\text{{ {noun[1]}}}"))
    return rows


def test_answers_as_the_authors_write_them_are_right(grader):
    rows = answers_as_the_authors_write_them()
    texts = [box(answer) for _, _, answer in rows]
    verdicts = grader.grade(texts, [gold for _, gold, _ in rows], [row[0] for row in rows])
    missed = [row for row, verdict in zip(rows, verdicts, strict=True) if verdict == 0.0]
    assert len(rows) > 500
    # Of hours, where the solution ends with dollars an hour; and a miss: the problem names cents.
    assert [answer for _, _, answer in missed] == [r"\$5", r"\$245"]


def as_it_is(answer: str) -> str:
    return answer


def with_other_commands(answer: str) -> str:
    return answer.replace("\\frac", "\\dfrac").replace("\\left", "")


def in_display_style(answer: str) -> str:
    return "\\displaystyle " + answer.replace("\\right", "").replace("\\left", "")


REWRITTEN = {
    "as it is": as_it_is,
    "other commands": with_other_commands,
    "display style": in_display_style,
}
SLOW_FORMS = [pytest.param(form, marks=pytest.mark.slow) for form in list(REWRITTEN)[:2]]


@pytest.mark.parametrize("form", [*SLOW_FORMS, "display style"])
def test_gold_answers_through_the_workers(form, grader):
    """The quick path answers gold against itself, so here it is left out: all 100% must pass."""
    rewrite = REWRITTEN[form]
    golds = set(math500()[1]) | set(gsm8k("test")[1][:200])
    pairs = sorted({(rewrite(gold), gold) for gold in golds})
    verdicts = grader._judge_all(pairs)
    assert len(verdicts) == len(pairs) > 300
    assert {gold for (_, gold), verdict in verdicts.items() if verdict == 0.0} == set()


EDGES = ["$ {} $", "{}.", "\\,{}", "{}\\, ", "\n${}$.\n"]


@pytest.mark.parametrize("form", EDGES)
def test_what_surrounds_an_answer_does_not_count(form, grader):
    golds = math500()[1]
    verdicts = grader.grade([box(form.replace("{}", gold)) for gold in golds], golds)
    assert {gold for gold, verdict in zip(golds, verdicts, strict=True) if not verdict} == set()


# --------------------------------------------------------------------------------- hostile text


def spell(text: str) -> str:
    return "+".join(f"chr({ord(char)})" for char in text)


# sympy's evalf prints this name into Python source and runs it, unless lambdify is refused.
OPEN = f"open({spell('pwned')},chr(119))"
LAMBDIFY = rf"\sum_{{n=0}}^{{\infty}} \frac{{\vec{{dot([1],[{OPEN}])}}^n}}{{n!}}"

ENDLESS = [  # these hold a worker until it is killed
    "5^{5^{5^{5}}}", "10^{10^{10}}", "(10^8)!", "((9!)!)!", r"\sum_{n=1}^{10^{10}} \frac{1}{n}",
    "9^{9^{9^{9^{9}}}}",
]  # fmt: skip
ENDLESS_TOO = [
    "2^{2^{2^{2^{2^2}}}}", "9!!!!", "100000000!", r"\prod_{n=1}^{10^9} n", "{" * 200 + "}" * 200,
    r"\binom{1000000000}{500000000}", "(" * 200 + "7" + ")" * 200, "(x+1)^{100000}",
    r"\sin(10^{10^{8}})", r"\gcd(2^{10^9},3)", r"\lfloor 10^{10^{9}} \rfloor",
]  # fmt: skip
HOSTILE = [
    "5^(5^(5^5))", r"\int e^{e^{x}} dx", r"\int_0^1 e^{e^{x}} dx", r"\sum_{n=1}^{10^{10}} 1/n!",
    r"\lim_{x \to 0} \frac{\sin(\sin x)}{x^7}", "1e1000000000", "0.0000001^{99999999}",
    r"\operatorname{zeros}(100000,100000)", r"\begin{matrix}1&2\\3&4\end{matrix}^{10^9}",
    "{" * 10_000 + "7" + "}" * 10_000, "(" * 10_000 + "7" + ")" * 10_000,
    r"\frac{" * 10_000 + "7" + "}{1}" * 10_000, r"\sqrt{" * 10_000 + "7" + "}" * 10_000,
    r"\sqrt{" * 40 + "7" + "}" * 40, "((((((((7", "8" * 1_000_000, "8" * 400, "x" * 2_000_000,
    "7\0", "\0", "a\0b", "\u0667", "⁷", "\uff17", "\uff17.0", "\ud800", "7\ud800",
    "\U0001f600" * 400,
    "__import__('os').system('touch pwned')", "__import__(\"os\").system(\"touch pwned\")",
    "().__class__.__base__.__subclasses__()", "(lambda: open('pwned', 'w'))()", LAMBDIFY,
    "exec('open(\"pwned\",\"w\")')", OPEN, rf"\text{{{OPEN}}}", "7\n7", '7"]\n["7", "7"]', "1\n",
    "ready\n", "1\n1\n1\n", '["8", "7"]', "\x1b[31m7\x1b[0m", "\r8", "7 or 1", "nan", "zoo", "-7",
    r"\infty", r"\pm 7", r"7 \neq 7", "7, 7, 8", r"\emptyset", r"\boxed", r"\frac", "^", "_", "\\",
    r"\text{", "%", "&", "#", r"\begin{matrix}", "7=8", "x<7", "0/0", r"\frac{7}{0}", "=", "7=",
]  # fmt: skip


def ready_grader(num_workers: int, timeout: float) -> Grader:
    grader = Grader(num_workers, timeout)
    golds = [f"{i}/{num_workers + 1}" for i in range(1, num_workers + 1)]
    grader._timeout = 30.0
    assert all(grader.grade([box("{" + gold + "}") for gold in golds], golds))
    grader._timeout = timeout
    return grader


def judge_one_by_one(texts: list[str]) -> int:
    """Each must get its 0 in time, and the pool stay right; the number that were killed."""
    with ready_grader(1, 1.0) as grader:
        for i, text in enumerate(texts):
            if not grader._workers:  # start-up is not part of an answer's deadline
                grader.grade([box(f"{i}/7")], [r"\frac{1000}{7}"])
            start = time.monotonic()
            assert grader.grade([box(text)], ["7"]) == [0.0], ascii(text[:60])
            assert time.monotonic() - start < 3.0, ascii(text[:60])
        killed = grader.timeouts
        grader._timeout = 30.0
        rows = [r"\frac{21}{3}", "7.0", "14/2", "15/2"]
        assert grader.grade([box(row) for row in rows], ["7"] * 4) == [1.0, 1.0, 1.0, 0.0]
        return killed


def test_hostile_answers(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # the workers inherit it, so `pwned` would be made here
    judge_one_by_one(HOSTILE)
    assert list(tmp_path.iterdir()) == []


def test_endless_answers_are_killed_at_their_deadline():
    assert judge_one_by_one(ENDLESS[::4]) == 2  # a power, and a sum that only looks harmless


@pytest.mark.slow
def test_more_endless_answers_are_killed_at_their_deadline():
    assert judge_one_by_one(ENDLESS) == len(ENDLESS)
    assert judge_one_by_one(ENDLESS_TOO) >= len(ENDLESS_TOO) // 2


def test_model_text_is_never_run_as_python(tmp_path, monkeypatch, grader):
    """The gold is not a number, so math-verify calls evalf on the sum (it ran the file opener)."""
    assert len(LAMBDIFY) <= answers.MAX_CHARS
    monkeypatch.chdir(tmp_path)
    with Grader(timeout=30.0) as fresh:
        assert fresh.grade([box(LAMBDIFY)] * 2, [r"\pi", r"\sqrt{2}"]) == [0.0, 0.0]
    assert list(tmp_path.iterdir()) == []
    # and refusing lambdify does not cost a right answer
    assert grader.grade([box(r"\sum_{n=0}^{\infty} \frac{1}{n!}")], ["e"]) == [1.0]


def test_an_endless_answer_does_not_hold_up_the_others():
    with ready_grader(2, 1.0) as grader:
        texts = [ENDLESS[0], "14/2", ENDLESS[0], r"\frac{21}{3}", "15/2"]
        assert grader.grade([box(t) for t in texts], ["7"] * 5) == [0.0, 1.0, 0.0, 1.0, 0.0]
        assert grader.timeouts == 1  # the repeat was not judged again


def test_a_call_ends_when_its_budget_is_spent():
    """Six endless answers would hold the only worker for a minute; the three right ones wait."""
    slow = [f"5^{{5^{{5^{{{i}}}}}}}" for i in range(5, 11)]
    texts = [box(text) for text in [*slow, "14/2", "21/3", "28/4"]] + [box("7")]
    with ready_grader(1, 10.0) as grader:
        grader._budget = 0.7
        cached = len(grader._cache)
        start = time.monotonic()
        assert grader.grade(texts, ["7"] * 10) == [0.0] * 9 + [1.0]
        assert time.monotonic() - start < 5.0
        assert grader.timeouts == 9 and len(grader._cache) == cached  # none of them was judged
        grader._budget = grader._timeout = 30.0
        assert grader.grade([*texts[6:], box("15/2")], ["7"] * 5) == [1.0] * 4 + [0.0]
        assert grader.timeouts == 9


@pytest.mark.slow
def test_a_budget_too_small_for_one_verdict_and_one_large_enough():
    with Grader(2, timeout=30.0, budget=1e-9) as grader:
        assert grader.grade([box("14/2")] * 2, ["7"] * 2) == [0.0, 0.0]
        assert grader.timeouts == 1 and not grader._cache
        grader._budget = 30.0
        assert grader.grade([box("14/2")], ["7"]) == [1.0]


def test_the_start_of_a_worker_is_not_counted(monkeypatch):
    """By a clock on which it takes 20 s; the budget is half of that."""
    late = [0.0]

    def late_clock():
        return time.monotonic() + late[0]

    clock = SimpleNamespace(monotonic=late_clock)
    monkeypatch.setattr(reward, "time", clock)
    with Grader(1, timeout=10.0, budget=10.0) as grader:
        start = grader._start
        starts = []

        def slow_start():
            starts.append(start())
            late[0] += 20.0
            return starts[-1]

        monkeypatch.setattr(grader, "_start", slow_start)
        assert grader.grade([box("14/2")], ["7"]) == [1.0]
    assert len(starts) == 1


# -------------------------------------------------------------------------- workers that go away


def test_a_worker_killed_while_idle_costs_nothing():
    with ready_grader(1, 30.0) as grader:
        for pid in pids(grader):
            os.kill(pid, signal.SIGKILL)
        time.sleep(0.5)
        assert grader.grade([box("14/2"), box("15/2")], ["7", "7"]) == [1.0, 0.0]
        assert grader.timeouts == 0


def kill_in_the_middle(grader: Grader, times: int) -> threading.Thread:
    """Stops the only worker, so that it is certainly at work, and kills it; `times` workers."""

    ready = list(grader._workers)
    start = grader._start

    def record_start():
        ready.append(start())
        return ready[-1]

    grader._start = record_start

    def kill() -> None:
        for place in range(times):
            while len(ready) <= place or ready[place] in grader._idle:
                time.sleep(0.01)
            time.sleep(0.2)
            ready[place].process.kill()

    os.kill(pids(grader)[0], signal.SIGSTOP)  # it takes the pair and never answers
    thread = threading.Thread(target=kill, daemon=True)
    thread.start()
    return thread


def test_a_worker_killed_while_busy_costs_no_verdict_and_is_told_once(capfd):
    with ready_grader(1, 30.0) as grader:
        for gold in ("7", "9"):  # two deaths, one sentence
            before = pids(grader)
            killer = kill_in_the_middle(grader, times=1)
            texts = [box(f"{2 * int(gold)}/2"), box("15/2")]
            assert grader.grade(texts, [gold] * 2) == [1.0, 0.0]
            killer.join()
            assert not set(before) & set(pids(grader))
        assert grader.timeouts == 0
    said = capfd.readouterr().err.splitlines()
    assert len(said) == 1 and said[0].startswith("reward: a grading worker was killed by signal 9")
    assert "run goes on" in said[0] and len(said[0]) < 250


def test_an_answer_that_kills_its_worker_twice_gets_0_and_the_rest_goes_on(capfd, monkeypatch):
    with ready_grader(1, 30.0) as grader:
        sent = []
        start = grader._start

        def record_start():
            sent.append(1)
            return start()

        monkeypatch.setattr(grader, "_start", record_start)
        killer = kill_in_the_middle(grader, times=2)
        # 5^(5^(5^5)) holds the second worker until it is killed too: no clock decides this test
        texts = [box(ENDLESS[0]), box("14/2"), box("15/2"), "no box"]
        assert grader.grade([texts[0]], ["7"]) == [0.0]
        killer.join()
        assert grader.timeouts == 1 and len(sent) == 1
        assert grader.grade(texts, ["7"] * 4) == [0.0, 1.0, 0.0, 0.0]
        assert grader.timeouts == 1 and len(sent) == 2  # the 0 was cached
    assert len(capfd.readouterr().err.splitlines()) == 1


LIMITED = """
import resource, sys
sys.path.insert(0, sys.argv[1])
resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
from common.reward import Grader
with Grader(1, 60.0) as grader:
    texts = [r"\\operatorname{zeros}(13000,13000)", "14/2", "15/2"]
    print(grader.grade([f"\\\\boxed{{{text}}}" for text in texts], ["7"] * 3))
"""


@LINUX
def test_a_run_under_a_lower_memory_limit_than_the_workers_own():
    """Its 1 GiB is a hard limit that a worker may not raise to 2; the zeros would take 1.3 GiB."""
    command = [sys.executable, "-c", LIMITED, str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "[0.0, 1.0, 0.0]\n", "")


def test_memory_is_limited():
    """30000 x 30000 zeros are a list of 7.2 GB, above the worker's 2 GiB: a MemoryError, which is
    a 0. Nothing of it stays, so the worker lives on and its next verdict is right."""
    with ready_grader(1, 60.0) as grader:
        before = pids(grader)
        texts = [box(r"\operatorname{zeros}(30000,30000)"), box("14/2")]
        assert grader.grade(texts, ["7", "7"]) == [0.0, 1.0]
        assert grader.timeouts == 0 and pids(grader) == before
        if sys.platform == "linux":
            limits = Path(f"/proc/{pids(grader)[0]}/limits").read_text()
            line = next(row for row in limits.splitlines() if row.startswith("Max address"))
            assert line.split()[3] == str(grading_worker.MEMORY_BYTES)


@pytest.fixture
def interruptible():
    """Ctrl-C interrupts, which it does not in what a shell started in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_an_interrupted_call_leaves_no_verdict_behind(interruptible, capfd):
    with ready_grader(1, 30.0) as grader:
        worker = grader._workers[0].process
        worker.send_signal(signal.SIGSTOP)  # it takes the pair and never answers
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            grader.grade([box("14/2"), box("21/3"), box("28/4")], ["7"] * 3)
        assert worker.returncode == -signal.SIGKILL and not grader._workers
        assert grader.timeouts == 0 and len(grader._cache) == 1  # ready_grader's own pair
        assert grader.grade([box("15/2")], ["7"]) == [0.0]  # not the 1 of the pair before
    assert capfd.readouterr().err == ""  # nobody is told of a death that this process caused


def test_ctrl_c_is_left_to_the_trainer():
    with ready_grader(1, 30.0) as grader:
        before = pids(grader)
        os.kill(before[0], signal.SIGINT)
        assert grader.grade([box("14/2")], ["7"]) == [1.0]
        assert pids(grader) == before


def gone(pid: int, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z":
                return True  # in a container nobody may be there to reap it
        except FileNotFoundError:
            return True
        time.sleep(0.05)
    return False


PARENT = """
import sys, threading, time
sys.path.insert(0, sys.argv[1])
from common.reward import Grader
grader = Grader(1, 600.0)
assert grader.grade([r"\\boxed{14/2}"], ["7"]) == [1.0]
print(grader._workers[0].process.pid, flush=True)
if sys.argv[2] == "killed":
    grader.grade([r"\\boxed{5^{5^{5^{5}}}}"], ["7"])
"""


@LINUX
@pytest.mark.parametrize("end", ["killed", pytest.param("exit", marks=pytest.mark.slow)])
def test_no_worker_outlives_its_parent(end, tmp_path):
    command = [sys.executable, "-c", PARENT, str(ROOT), end]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=tmp_path) as parent:
        worker = int(parent.stdout.readline())
        if end == "killed":
            time.sleep(1.0)  # the worker is inside one C call by now
            assert not gone(worker, 0.1)
            parent.kill()
    assert parent.returncode == (-signal.SIGKILL if end == "killed" else 0)
    assert gone(worker, 5.0)


@pytest.mark.slow
def test_close_is_idempotent_and_not_the_end():
    grader = Grader(1, 30.0)
    grader.close()
    assert grader.grade([box("14/2")], ["7"]) == [1.0]
    processes = [worker.process for worker in grader._workers]
    grader.close()
    grader.close()
    assert [process.returncode for process in processes] == [-signal.SIGKILL]
    assert grader.grade([box("21/3")], ["7"]) == [1.0]
    grader.close()


@pytest.mark.parametrize("cause", ["no such program", "dies at once", "says why"])
def test_workers_that_cannot_start_are_one_clear_error(cause, tmp_path, monkeypatch):
    program = tmp_path / "python"
    if cause != "no such program":
        say = "echo 'ModuleNotFoundError: No module named math_verify'; sleep 60"
        program.write_text("#!/bin/sh\n" + (say if cause == "says why" else "exit 1"))
        program.chmod(0o755)
    monkeypatch.setattr(reward.sys, "executable", str(program))
    with Grader() as grader:
        for _ in range(2):
            said = "No such file" if cause == "no such program" else "no grading worker can be st"
            with pytest.raises((RewardError, OSError), match=said) as error:
                grader.grade([box("14/2")], ["7"])
            assert cause != "says why" or "No module named math_verify" in str(error.value)
            assert grader.grade([box("7")], ["7"]) == [1.0]
            assert grader._workers == []


@pytest.mark.slow
def test_a_worker_that_fails_to_start_once_is_started_again(tmp_path, monkeypatch):
    program = tmp_path / "python"
    failed = tmp_path / "failed"
    again = f'[ -e {failed} ] && exec {sys.executable} "$@"'
    program.write_text(f"#!/bin/sh\n{again}\ntouch {failed}; exit 1")
    program.chmod(0o755)
    monkeypatch.setattr(reward.sys, "executable", str(program))
    with Grader(1, 30.0) as grader:
        assert grader.grade([box("14/2")], ["7"]) == [1.0]
    assert failed.exists()


# ---------------------------------------------------------------------- custom reward functions

CHAT = [{"role": "user", "content": "2 + 2?"}]


def returns(values):
    """A reward function that returns these values."""

    def function(**_):
        return values

    return function


def called(function, prompts=("a", "b"), texts=("x", "yy"), **columns):
    ids = [[1] * len(text) for text in texts]
    return call_reward_func("mine", function, list(prompts), list(texts), ids, columns, {})


def test_reward_functions_from_dotted_paths(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "kit_of_test_reward").mkdir()
    (tmp_path / "kit_of_test_reward" / "inner.py").write_text("def length(**_):\n    return [1]\n")
    paths = ["accuracy_reward", "kit_of_test_reward.inner.length", "math.prod"]
    functions = load_reward_funcs(paths)
    assert list(functions) == ["accuracy_reward", "length", "prod"]
    assert functions["accuracy_reward"] == (None, 1.0) and functions["length"][0]() == [1]
    weighted = load_reward_funcs(paths, [0.5, -1.0, 2.0])
    assert [weight for _, weight in weighted.values()] == [0.5, -1.0, 2.0]
    assert load_reward_funcs([]) == {}
    for weights in ([], [1.0, 2.0]):
        with pytest.raises(RewardError, match="--reward_weights needs one finite number"):
            load_reward_funcs(paths, weights)


@pytest.mark.parametrize(
    ("paths", "says"),
    [
        (["lengths"], "lengths.*module.function"),
        (["no_such_module_here.f"], "no_such_module_here.f.*No module named"),
        (["math.no_such_name"], "math.no_such_name.*no_such_name"),
        (["math.pi"], "math.pi.*not a function"),
        (["raises_on_import.f"], "raises_on_import.f.*one  *two"),
        (["exits_on_import.f"], "exits_on_import.f.*SystemExit"),
        ([".f"], "module.function"), (["math."], "module.function"), ([""], "module.function"),
        (["math.prod", "math.prod"], "two functions prod"),
        (["accuracy_reward", "trl.rewards.accuracy_reward"], "two functions accuracy_reward"),
    ],
)  # fmt: skip
def test_paths_that_name_no_reward_function(paths, says, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "raises_on_import.py").write_text("raise ValueError('one  two')\n")
    (tmp_path / "exits_on_import.py").write_text("import sys\nsys.exit(3)\n")
    with pytest.raises(RewardError, match=f"--reward_funcs.*{says}") as error:
        load_reward_funcs(paths)
    assert "\n" not in str(error.value)


def test_a_reward_function_gets_what_trl_gives_it():
    seen = {}

    def function(prompts, completions, completion_ids, **columns):
        assert callable(columns.pop("log_metric"))
        seen.update(columns, prompts=prompts, completions=completions, ids=completion_ids)
        return [0, True]

    assert called(function, answer=["3", "4"], prompts_of=[1, 2]) == [0.0, 1.0]
    assert seen == {
        "prompts": ["a", "b"], "completions": ["x", "yy"], "ids": [[1], [1, 1]],
        "answer": ["3", "4"], "prompts_of": [1, 2],
    }  # fmt: skip
    called(function, prompts=[CHAT, CHAT], completions=["a column of", "this name"])
    assert seen["completions"] == [[{"role": "assistant", "content": t}] for t in ("x", "yy")]


def test_numbers_of_every_kind():
    import numpy
    import torch

    for values in (
        [1, 0.5], (True, 0.5), iter([1, 0.5]), numpy.array([1, 0.5]), torch.tensor([1, 0.5]),
        [numpy.float32(1), numpy.float64(0.5)], [numpy.bool_(True), torch.tensor(0.5)],
        torch.tensor([1, 0.5], dtype=torch.bfloat16, requires_grad=True).detach(),
    ):  # fmt: skip
        got = called(returns(values))
        assert got == [1.0, 0.5] and all(type(value) is float for value in got)


class Unprintable:
    def __repr__(self):
        raise ValueError("no text")

    __float__ = __repr__


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ([1.0], "1 for 2"), ([], "0 for 2"), ([1, 2, 3], "more than 2 for 2"), (None, "not None"),
        (itertools.repeat(1.0), "more than 2"), (1.0, "not 1.0"),
        ([1.0, []], r"not \[\] for completions\[1\] \(prompt 'b'\)"),
        ([None, float("nan")], r"not nan for completions\[1\]"),
        ([1.0, float("inf")], "not inf"), (["1", "2"], "not '1'"), ([1j, 1], "not 1j for"),
        ("12", "not '12'"), (b"12", "not b'12'"), ([[1], [2]], r"not \[1\]"),
        ([10**400, 1], "not 10000"), ({"a": 1, "b": 2}, "not a dict"), ({0: 1, 1: 2}, "not a dict"),
        ({1, 2}, "not a set"), (frozenset([1, 2]), "not a frozenset"),
        ([{"x": 1}, 2], "not a dict for"), (len, "not <built-in"), (Unprintable(), "Unprintable"),
        ([1.0, Unprintable()], r"Unprintable for completions\[1\]"),
    ],
)  # fmt: skip
def test_values_that_are_no_rewards(values, says):
    with pytest.raises(RewardError, match=rf"reward function mine.*{says}") as error:
        called(returns(values))
    assert "\n" not in str(error.value)


def test_an_exception_in_a_reward_function_is_one_sentence():
    def broken(**_):
        raise KeyError("two\nlines")

    def takes_no_columns(completions):
        return [1, 2]

    def needs_a_column(needed, **_):
        return [1, 2]

    for function in (broken, takes_no_columns, needs_a_column):
        with pytest.raises(RewardError, match=r"reward function mine: (Key|Type)Error") as error:
            called(function)
        assert "\n" not in str(error.value) and error.value.__cause__ is not None


def test_none_is_not_counted_as_in_trl():
    for values in ([1, None], iter([1.0, None])):
        got = called(returns(values))
        assert got[0] == 1.0 and math.isnan(got[1])
    assert all(map(math.isnan, called(returns([None, None]))))


def test_what_a_reward_function_leaves_behind_is_restored(tmp_path):
    """Gradients, autocast, the default type of numbers and their device, and the directory."""
    import torch

    left = []

    def careless(**_):
        os.chdir(tmp_path)
        torch.set_default_dtype(torch.float64)
        torch.set_default_device("meta")
        left[:] = [torch.autocast("cpu", dtype=torch.float16)]
        for mode in left:
            mode.__enter__()
        torch.set_grad_enabled(False)
        return [1, 2]

    def careless_and_out(**_):
        careless()
        raise ValueError("then an error")

    def state():
        autocast = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")
        modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        depth = torch.autocast_increment_nesting()
        torch.autocast_decrement_nesting()
        defaults = torch.get_default_dtype(), torch.get_default_device()
        return os.getcwd(), *defaults, *autocast, *modes, depth

    for mode in (torch.no_grad(), torch.enable_grad(), torch.inference_mode()):
        with mode:
            before = state()
            assert called(careless) == [1.0, 2.0] and state() == before
            with pytest.raises(RewardError):
                called(careless_and_out)
            assert state() == before
    assert (torch.ones(1, requires_grad=True) * 2).requires_grad


def test_a_reward_function_gets_copies():
    """Its edits reach neither what it was given nor the other rows of a group."""
    message = {"role": "user", "content": "2 + 2?"}
    chat, level = [message], ["easy"]
    ids = [[1], [1]]

    def edit(prompts, completions, completion_ids, levels, **_):
        prompts[0][0]["content"] = "3 + 3?"
        assert prompts[1] == [{"role": "user", "content": "2 + 2?"}]
        completions[0][0]["content"] = "edited"
        completion_ids[0].append(7)
        levels[0].append("edited")
        assert levels[1] == ["easy"]
        del levels[1]
        return [1, 2]

    columns = {"levels": [level, level]}
    prompts = [chat, chat]
    assert call_reward_func("f", edit, prompts, ["x", "y"], ids, columns, {}) == [1.0, 2.0]
    assert prompts == [[{"role": "user", "content": "2 + 2?"}]] * 2
    assert (columns, ids) == ({"levels": [["easy"], ["easy"]]}, [[1], [1]])


class NotAnException(BaseException):
    def __repr__(self):
        raise ValueError("no text")


@pytest.mark.parametrize("error", [SystemExit(0), GeneratorExit(), NotAnException(), StopIteration])
def test_a_reward_function_cannot_end_the_run_but_ctrl_c_can(error):
    def leave(**_):
        raise error

    def leave_later(**_):
        yield 1.0
        raise error

    def interrupted(**_):
        raise KeyboardInterrupt

    for function in (leave, leave_later):
        name = getattr(error, "__name__", type(error).__name__)
        name = "RuntimeError" if function is leave_later and name == "StopIteration" else name
        with pytest.raises(RewardError, match=rf"correct the reward function mine: {name}") as told:
            called(function)
        assert "\n" not in str(told.value)
    with pytest.raises(KeyboardInterrupt):
        called(interrupted)


@pytest.fixture
def own_function(tmp_path, monkeypatch):
    """A reward function in a file of the user's own that calls another function there."""
    lines = ["import json", "def helper(text):", "    return json.loads(text)"]
    lines += ["def mine(completions, **_):", "    return [helper(t) for t in completions]"]
    (tmp_path / "own_of_test_reward.py").write_text("\n".join(lines))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "own_of_test_reward", raising=False)
    ((function, _),) = load_reward_funcs(["own_of_test_reward.mine"]).values()
    return function


def test_an_error_names_file_and_line(tmp_path, own_function):
    """The line of the function that it calls, not of the library in which the error is raised."""
    file = tmp_path / "own_of_test_reward.py"
    with pytest.raises(RewardError) as error:
        called(own_function, texts=("1", "{"))
    said = str(error.value)
    assert said.startswith("correct the reward function mine: JSONDecodeError('Expecting property")
    assert said.endswith(f") in line 3 of {file}")
    for values in ([1j, 1], None):  # no line is to blame
        with pytest.raises(RewardError) as error:
            called(returns(values))
        assert ".py" not in str(error.value)


def test_a_function_that_raises_is_not_called_again():
    """It may be a paid judge that refuses."""
    calls = []

    def mine(completions, **_):
        calls.append(completions)
        raise ConnectionError("too many requests")

    with pytest.raises(RewardError, match="too many requests"):
        called(mine)
    assert len(calls) == 1


def test_a_call_that_the_function_does_not_allow_names_the_function():
    def mine(completions, levels):
        return [1, 2]

    with pytest.raises(RewardError) as error:
        called(mine)
    line = mine.__code__.co_firstlineno
    assert str(error.value).endswith(f" in the function at line {line} of {__file__}")


def test_numbers_that_a_reward_function_logs():
    def by_name(completions, log_metric, **_):
        log_metric("length", 3)
        log_metric(name="length", value=5.0)
        return [1, 2]

    def by_columns(**columns):
        columns["log_metric"]("length", 4)
        return [1, 2]

    def neither(prompts, completions, completion_ids):
        return [1, 2]

    for function, expected in ((by_name, [3.0, 5.0]), (by_columns, [4.0]), (neither, None)):
        logged = {}
        call_reward_func("f", function, ["a", "b"], ["x", "y"], [[1], [1]], {}, logged)
        assert logged.get("length") == expected and set(logged) <= {"length"}

    for name, value in (("x", math.nan), ("x", "3"), (3, 3.0), ("mean", 1.0)):

        def wrong(log_metric, name=name, value=value, **_):
            log_metric(name, value)

        with pytest.raises(RewardError, match=rf"log_metric.* in line \d+ of {__file__}$"):
            called(wrong)


def test_the_graders_verdict_for_reward_functions():
    texts = [box("1,600"), box("16 apples"), "#### 16", box("32/2"), box("17")]
    golds = ["1600", "16", "16", "16", "16"]
    problems = ["How many apples?"] * 5
    for asked, expected in (
        (problems, [True, True, False, True, False]),
        (None, [True, False, False, True, False]),  # apples are no known unit
    ):
        assert reward.verdicts(texts, golds, asked) == expected
        grades = Grader(1, 30.0).grade(texts, golds, asked)
        assert [value == 1.0 for value in grades] == expected
        chats = [[{"role": "assistant", "content": text}] for text in texts]
        assert reward.verdicts(chats, golds, asked) == expected
    assert reward.is_right(chats[0], "1600") is True
    assert reward.is_right(texts[1], "16") is False
    assert reward.is_right(texts[1], "16", "How many apples?") is True
    system = {"role": "system", "content": "Count pears."}
    asked = [system, {"role": "user", "content": "How many apples?"}]
    assert reward.is_right(texts[1], "16", asked) is True
    assert reward.is_right(box("16 pears"), "16", asked) is False


@pytest.mark.parametrize("name", ["random", "math", "pytest"])  # builtin, and a library too
def test_a_file_that_hides_behind_another_module_is_named(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / f"{name}.py").write_text("def sqrt(**_):\n    return [1]\n")
    with pytest.raises(RewardError, match=f"--reward_funcs {name}.sqrt.*rename ") as error:
        load_reward_funcs([f"{name}.sqrt"])
    assert str(tmp_path / f"{name}.py") in str(error.value) and "\n" not in str(error.value)
    (tmp_path / f"{name}.py").rename(tmp_path / f"my_{name}_of_test_reward.py")
    assert list(load_reward_funcs([f"my_{name}_of_test_reward.sqrt"])) == ["sqrt"]


def test_ready_made_functions_of_trl_run_unchanged():
    paths = ["think_format_reward", "accuracy_reward", "reasoning_accuracy_reward"]
    loaded = load_reward_funcs([f"trl.rewards.{name}" for name in paths])
    functions = {name: function for name, (function, _) in loaded.items()}
    texts = ["<think>2 + 2</think> \\boxed{4}", "\\boxed{4}", "<think>x</think> \\boxed{5}"]
    columns = {"solution": ["$4$"] * 3, "level": [1, 2, 3]}
    expected = [[1.0, 0.0, 1.0], [1.0, 1.0, 0.0], [1.0, 0.0, 0.0]]
    for (name, function), values in zip(functions.items(), expected, strict=True):
        got = call_reward_func(name, function, [CHAT] * 3, texts, [[1]] * 3, columns, {})
        assert got == values, name
    with pytest.raises(RewardError, match=r"accuracy_reward.*solution"):
        call_reward_func(
            "accuracy_reward", functions["accuracy_reward"], [CHAT], ["x"], [[1]], {}, {}
        )


def test_ready_made_functions_that_trl_makes():
    from trl.rewards import get_repetition_penalty_reward, get_soft_overlong_punishment

    penalty = get_repetition_penalty_reward(ngram_size=2, max_penalty=-1.0)
    ids = [[1, 2, 3, 4], [5, 5, 5, 5, 5]]
    columns = {"answer": ["1", "2"]}
    got = call_reward_func("penalty", penalty, [CHAT] * 2, ["a", "b"], ids, columns, {})
    assert got == [0.0, -0.75]
    overlong = get_soft_overlong_punishment(max_completion_len=4, soft_punish_cache=2)
    assert called(overlong, texts=["xxxxx", "x"]) == [-1.0, 0.0]


# ------------------------------------------------------------------------- what is imported, run


def test_the_parent_imports_the_standard_library_only(tmp_path):
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); from common.reward import Grader\n"
        "assert Grader().grade([r'\\boxed{7}'], ['7']) == [1.0]\n"
        "print([m for m in ('torch', 'sympy', 'math_verify', 'numpy') if m in sys.modules])"
    )
    command = [sys.executable, "-c", code, str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=True)
    assert done.stdout.strip() == "[]"


def test_the_worker_imports_no_torch(grader):
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); from common import grading_worker as worker\n"
        "worker.prepare_libraries(); assert worker.is_equal('14/2', '7'), 'verdict'\n"
        "print('torch' in sys.modules, 'sympy' in sys.modules)"
    )
    command = [sys.executable, "-c", code, str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "True"]
    if sys.platform == "linux":
        grader.grade([box("22/11")], ["2"])
        for pid in pids(grader):
            assert "torch" not in Path(f"/proc/{pid}/maps").read_text()


def test_the_source_evaluates_nothing():
    bad = {"eval", "exec", "sympify", "parse_expr", "loads", "ExprExtractionConfig", "pickle"}
    for file in ("answers.py", "grading_worker.py", "reward.py"):
        names = set()
        modules = set()
        for node in ast.walk(ast.parse((ROOT / "common" / file).read_text())):
            if isinstance(node, ast.Name):
                names.add(node.id)
            elif isinstance(node, ast.Attribute):
                names.add(node.attr)
            elif isinstance(node, ast.ImportFrom):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.Import):
                modules |= {alias.name for alias in node.names}
        json_loads = {"loads"} if file == "grading_worker.py" else set()
        assert names & bad == json_loads, file
        assert not modules & {"pickle", "multiprocessing"}, file


# --------------------------------------------------------------------------------------- bench


def bench() -> None:
    """Completions per second: MATH-500 and the GSM8K test split, against right and wrong golds."""
    m_texts, m_golds = math500()
    g_texts, g_golds = gsm8k("test")
    texts = m_texts + g_texts
    golds = m_golds + g_golds
    rewritten = [box("\\displaystyle " + gold) for gold in golds]
    mixes = [
        ("gold solutions, own answers", texts, golds),
        ("gold solutions, the next problem's answers", texts, golds[1:] + golds[:1]),
        ("the same again (cached)", texts, golds[1:] + golds[:1]),
        ("gold solutions, the second next answers", texts, golds[2:] + golds[:2]),
        ("every answer rewritten (none is quick)", rewritten, golds),
    ]
    for started in (False, True):
        with ready_grader(2, 5.0) if started else Grader(2, 5.0) as grader:
            print("workers started before" if started else "worker start included")
            for name, completions, answers in mixes:
                before = len(grader._cache)
                start = time.perf_counter()
                right = sum(grader.grade(completions, answers))
                seconds = time.perf_counter() - start
                judged = len(grader._cache) - before
                print(
                    f"  {name}: {len(completions)} in {seconds:.2f} s = "
                    f"{len(completions) / seconds:.0f}/s; {judged} pairs ({judged / seconds:.0f}/s)"
                    f" went to workers; {right:.0f} right; {grader.timeouts} timeouts so far"
                )
    print("load average", *os.getloadavg(), "cpus", os.cpu_count())


if __name__ == "__main__":
    if sys.argv[1:] != ["--bench"]:
        sys.exit("usage: python tests/data_and_reward/test_reward.py --bench")
    bench()
