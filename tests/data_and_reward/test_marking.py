"""How often does `accuracy_reward` err? Pairs of five authors, and what docs/grading.md says.

The authors had not seen the rules. Each wrote right and wrong completions of problems with a gold
answer. `known_error` marks the pairs of which `accuracy_reward` misses a right one or pays a wrong
one.
"""

import logging
from collections import Counter
from pathlib import Path

import pytest
from support import ROOT, read_jsonl

from common.reward import GRADER
from common.task import Problem

PAIRS = Path(__file__).with_name("held_out_pairs.jsonl")


@pytest.fixture(scope="module")
def pairs() -> list[dict]:
    return read_jsonl(PAIRS)


def by_math_verify(pairs: list[dict]) -> list[bool]:
    """Returns the verdicts of its defaults. It looks for formulas, so the gold answers get $."""
    math_verify = pytest.importorskip("math_verify")
    parse = math_verify.parse
    return [
        math_verify.verify(parse(f"${pair['gold']}$"), parse(pair["completion"])) for pair in pairs
    ]


def by_trl(pairs: list[dict]) -> list[bool]:
    """Returns the verdicts of TRL's `accuracy_reward`, which reads golds as math-verify does."""
    rewards = pytest.importorskip("trl.rewards", reason="pip install trl")
    completions = [[{"role": "assistant", "content": pair["completion"]}] for pair in pairs]
    golds = [f"${pair['gold']}$" for pair in pairs]
    return [verdict == 1 for verdict in rewards.accuracy_reward(completions, golds)]


def errors(pairs: list[dict], verdicts: list[bool]) -> Counter:
    """Returns how many right pairs (True) are missed and wrong ones (False) are paid, by author."""
    counts: Counter = Counter()
    for pair, is_paid in zip(pairs, verdicts, strict=True):
        counts[pair["author"], pair["right"]] += is_paid != pair["right"]
    return counts


def published(column: int) -> list[str]:
    """Returns a column of the table in docs/grading.md, from author 1 to 5."""
    lines = (ROOT / "docs/grading.md").read_text(encoding="utf-8").splitlines()
    rows = [line.split("|") for line in lines if line.startswith("| ") and line[2].isdigit()]
    return [row[column].strip() for row in rows]


def figures(counts: Counter) -> list[str]:
    return [f"{counts[author, True]}, {counts[author, False]}" for author in (1, 2, 3, 4, 5)]


def test_the_page_has_the_known_errors_and_the_number_of_pairs(pairs):
    counts = figures(errors(pairs, [p["right"] != p.get("known_error", False) for p in pairs]))
    assert published(2) == counts == ["3, 0", "2, 0", "11, 0", "6, 0", "0, 2"]
    sizes = Counter((pair["author"], pair["right"]) for pair in pairs)
    expected = [f"{a} ({sizes[a, True]}, {sizes[a, False]})" for a in (1, 2, 3, 4, 5)]
    assert published(1) == expected


@pytest.mark.slow
def test_no_verdict_differs_from_the_authors_but_the_known_ones(pairs):
    problems = [Problem(pair["problem"], pair["gold"]) for pair in pairs]
    grades = GRADER.grade([pair["completion"] for pair in pairs], problems)
    wrong = [pair for pair, grade in zip(pairs, grades, strict=True) if grade != pair["right"]]
    assert wrong == [pair for pair in pairs if pair.get("known_error")]


@pytest.mark.slow
@pytest.mark.parametrize(("column", "marker"), [(3, by_math_verify), (4, by_trl)])
def test_the_page_has_the_errors_of_other_markers(pairs, column, marker, monkeypatch):
    monkeypatch.setattr(logging.root.manager, "disable", logging.CRITICAL)  # they warn of formulas
    assert published(column) == figures(errors(pairs, marker(pairs)))
