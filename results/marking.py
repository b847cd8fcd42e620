"""How often does a marker err? Pairs of a reader who had not seen the rules of accuracy_reward.

    python results/marking.py                       # in seconds
    PYTHONPATH=../before python results/marking.py  # with accuracy_reward of another checkout

The fourth author of tests/data_and_reward/held_out_pairs.jsonl wrote 100 right completions and 100
wrong ones. Each has a problem and a gold answer. A marker misses a right one or pays a wrong one.
Printed is a row of results/data/marking/table.csv for each marker:

    accuracy_reward         this repository's
    accuracy_reward of TRL  its default for a column of solutions
    math-verify             its defaults

TRL and math-verify look for formulas, so they get the gold answer between dollar signs: without
them they miss three times as many.
"""

import csv
import json
import logging
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAIRS = ROOT / "tests/data_and_reward/held_out_pairs.jsonl"
AUTHOR = 4


def read_pairs() -> list[dict]:
    """Returns the pairs of the author, with their problems."""
    lines = PAIRS.read_text(encoding="utf-8").splitlines()
    return [pair for pair in map(json.loads, lines) if pair["author"] == AUTHOR]


def by_this_repository(pairs: list[dict]) -> list[bool]:
    """Returns the verdicts of accuracy_reward, of the checkout that is first on sys.path."""
    from common.reward import Grader

    columns = [[pair[name] for pair in pairs] for name in ("completion", "gold", "problem")]
    with Grader() as grader:
        return [verdict == 1 for verdict in grader.grade(*columns)]


def by_trl(pairs: list[dict]) -> list[bool]:
    """Returns the verdicts of TRL's function. It gives None where it cannot read the gold."""
    from trl.rewards import accuracy_reward

    completions = [[{"role": "assistant", "content": pair["completion"]}] for pair in pairs]
    golds = [f"${pair['gold']}$" for pair in pairs]
    return [verdict == 1 for verdict in accuracy_reward(completions, golds)]


def by_math_verify(pairs: list[dict]) -> list[bool]:
    """Returns the verdicts of math-verify with its defaults."""
    import math_verify

    verdicts = []
    for pair in pairs:
        gold = math_verify.parse(f"${pair['gold']}$")
        verdicts.append(math_verify.verify(gold, math_verify.parse(pair["completion"])))
    return verdicts


MARKERS: dict[str, Callable[[list[dict]], list[bool]]] = {
    "accuracy_reward": by_this_repository,
    "accuracy_reward of TRL": by_trl,
    "math-verify": by_math_verify,
}


def count(marker: str) -> dict[str, str]:
    """Returns a row of the table: how many right pairs a marker misses, and wrong ones it pays."""
    pairs = read_pairs()
    counts = {"right": 0, "missed": 0, "wrong": 0, "paid": 0}
    for pair, is_paid in zip(pairs, MARKERS[marker](pairs), strict=True):
        counts["right" if pair["right"] else "wrong"] += 1
        counts["missed"] += pair["right"] and not is_paid
        counts["paid"] += is_paid and not pair["right"]
    return {"marker": marker} | {name: str(number) for name, number in counts.items()}


def main() -> None:
    logging.disable(logging.CRITICAL)  # math-verify warns about what it cannot read
    sys.path.append(str(ROOT))  # behind another checkout's, which PYTHONPATH may name
    rows = [count(marker) for marker in MARKERS]
    lines = csv.DictWriter(sys.stdout, list(rows[0]))
    lines.writeheader()
    lines.writerows(rows)


if __name__ == "__main__":
    main()
