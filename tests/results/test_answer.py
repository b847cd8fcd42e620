"""results/answer.py: its statistics by hand, and its published files again from the studies'."""

import math
from pathlib import Path

import answer
import numpy as np
import pytest
from headroom import read_csv
from learning_curves import STUDENT

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT / "results/data/answer"


@pytest.mark.parametrize("degrees", [1, 2, 7, 12])
def test_a_statistic_at_the_97_5th_percentile_has_a_p_of_5_percent(degrees):
    count = degrees + 1
    unit = np.arange(count) - degrees / 2
    unit /= unit.std(ddof=1)
    differences = unit + STUDENT[degrees - 1] / count**0.5
    assert answer.two_sided_p(differences) == pytest.approx(0.05, abs=1e-4)
    assert answer.two_sided_p(-differences) == pytest.approx(0.05, abs=1e-4)


def test_with_one_degree_of_freedom_the_p_value_is_that_of_cauchy():
    differences = np.array([1.0, 3.0])  # mean 2, standard error 1
    assert answer.two_sided_p(differences) == pytest.approx(1 - 2 / math.pi * math.atan(2))


def test_holms_correction_by_hand():
    """The smallest of four is multiplied by 4, the next by 3, and none falls below the one before.

    0.02 * 2 = 0.04 stays above 0.01 * 3 = 0.03, and 0.03 * 1 is raised to 0.04.
    """
    assert answer.holm([0.02, 0.001, 0.03, 0.01]) == pytest.approx([0.04, 0.004, 0.04, 0.03])
    assert answer.holm([0.9, 0.8]) == [1.0, 1.0]


def test_a_difference_is_tested_only_where_all_runs_learned():
    grpo = {seed: np.array([0.1, 0.8]) for seed in (1, 2, 3)}
    failed = {1: np.array([0.1, 0.9]), 2: np.array([0.1, 0.7]), 3: np.array([0.1, 0.0])}
    study = answer.Study("SmolLM2", {answer.GRPO: grpo, "ARCA": failed})
    for row in answer.difference_rows([study]):
        assert row["low"] == row["p"] == row["p_holm"] == ""
    learned = {1: np.array([0.1, 0.71]), 2: np.array([0.1, 0.7]), 3: np.array([0.1, 0.6])}
    study = answer.Study("SmolLM2", {answer.GRPO: grpo, "ARCA": learned})
    area, end = answer.difference_rows([study])
    assert end["more"] == pytest.approx(-0.13)
    assert area["more"] == pytest.approx(-0.065)
    assert end["p_holm"] == pytest.approx(2 * end["p"])


def same(published: str, value: object) -> bool:
    if isinstance(value, float):
        return float(published) == pytest.approx(value, rel=1e-3, abs=1e-4)
    return published == str(value)


@pytest.mark.parametrize("name", ["differences", "prediction"])
def test_the_published_file_is_that_of_the_studies(name):
    rows = answer.prediction_rows()
    if name == "differences":
        rows = answer.difference_rows([*answer.studies(), *answer.rollout_size_studies()])
    published = read_csv(DATA / f"{name}.csv")
    assert len(rows) == len(published) > 5
    for row, stored in zip(rows, published, strict=True):
        assert [key for key, value in row.items() if not same(stored[key], value)] == []
