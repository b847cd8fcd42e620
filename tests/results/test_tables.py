"""results/tables.py: statistics against hand values and naive loops, and pages that are current."""

import csv
import math
from pathlib import Path

import numpy as np
import paired
import pytest
import tables
from tables import GRPO, GRPO_AGAIN, Group

ROOT = Path(__file__).resolve().parents[2]
CURVES = np.array([[0.1, 0.3, 0.6, 0.7], [0.2, 0.2, 0.5, 0.8], [0.1, 0.4, 0.4, 0.9]])
GRPOS = np.array([[0.1, 0.2, 0.3, 0.5], [0.2, 0.2, 0.3, 0.4], [0.1, 0.2, 0.4, 0.6]])
T_2 = 4.30265273  # 97.5th percentile of Student's t with two degrees of freedom, from a table


# ---- Statistics ----------------------------------------------------------------------------------
def test_the_smallest_difference_is_shown_in_four_of_five_simulated_studies():
    """Seeds of deviation 1 are drawn around it. Those with intervals above 0 are counted."""
    seeds = np.array([-1.0, 1.0] * 4) * math.sqrt(7 / 8)  # whose deviation is 1
    drawn = np.random.default_rng(0).normal(paired.smallest_difference(seeds), size=(8, 40_000))
    _, low, _ = paired.mean_interval(drawn)
    assert (low > 0).mean() == pytest.approx(0.8, abs=0.01)


# ---- Comparisons ---------------------------------------------------------------------------------
@pytest.fixture
def runs(monkeypatch):
    """Returns the runs of a page without any, to be filled: group -> seed -> lines."""
    found = {}
    monkeypatch.setattr(tables, "whole_runs", lambda: found)
    for cached in (tables.differences, tables.compared):
        cached.cache_clear()
    yield found
    tables.differences.cache_clear()


def put(runs, method, curves, rate="0.002", study="nearly_right_policy", first_seed=1):
    """Adds runs, and returns their group."""
    group = Group(study, 1, rate, method)
    runs[group] = {}
    for seed, curve in enumerate(curves, first_seed):
        runs[group][seed] = [{"sampled": str(x), "greedy": "1"} for x in curve]
    return group


def test_a_method_is_tested_against_the_same_seeds_of_grpo_at_the_same_rate_alone(runs):
    put(runs, GRPO, GRPOS + 0.3)
    group = put(runs, "methods/oppo.py", CURVES[1:] - [[0], [0.35]], first_seed=2)
    assert group.above_grpo() == "1 of 2"
    put(runs, "methods/oppo.py", CURVES[1:] + 0.3, first_seed=2)
    put(runs, "ARCA", CURVES + 0.3, rate="0.001")
    put(runs, "S-trace", CURVES + 0.3)
    assert [(row["method"], row["figure"], row["seeds"]) for row in tables.differences()] == [
        ("methods/oppo.py", "area", 2),
        ("methods/oppo.py", "end", 2),
        ("S-trace", "area", 3),
        ("S-trace", "end", 3),
    ]
    _, oppo, _, end = tables.differences()
    assert oppo["more"] == pytest.approx((0.4 + 0.3) / 2)
    assert oppo["p"] == ""  # two seeds are too few
    assert end["more"] == pytest.approx((0.2 + 0.4 + 0.3) / 3)
    assert end["low"] == pytest.approx(0.3 - T_2 * 0.1 / math.sqrt(3), rel=1e-4)
    # 1.25% on each side, half of what one test would have. 6.20535 is from a table, too.
    assert end["could_pass"] == pytest.approx(6.20535 * 0.1 / math.sqrt(3), rel=1e-4)


def test_runs_that_draw_groups_again_are_compared_with_grpo_that_does(runs):
    put(runs, GRPO, GRPOS, study="smollm2")
    again = put(runs, GRPO_AGAIN, GRPOS + 0.3, study="smollm2")
    group = put(runs, "ARCA, groups drawn again", CURVES[1:], study="smollm2", first_seed=2)
    assert (again.end(), again.beside("ARCA"), group.control().method) == (
        "0.800",
        group,
        "ARCA's weights, shuffled, groups drawn again",
    )
    put(runs, "GRPO, 72 completions", CURVES + [[0.2]] * 3, study="smollm2")
    put(runs, "grpo_arca.py --max_resample_times 4", GRPOS + 0.3, study="smollm2")
    *_, end, _, equal = tables.differences()
    assert (end["method"], end["seeds"]) == ("GRPO, 72 completions", 3)
    assert (end["more"], equal["more"]) == pytest.approx(((0.1 + 0.3 + 0.2) / 3, 0))
    assert equal["method"] not in str(tables.tests())


def test_weights_of_wrong_answers_are_compared_with_weight_1_and_not_with_older_runs(runs):
    put(runs, GRPO, GRPOS + 0.3)
    one = put(runs, f"{tables.WEIGHT} 1", GRPOS)
    half = put(runs, f"{tables.WEIGHT} 0.5", CURVES)
    put(runs, f"{tables.WEIGHT} 2", CURVES[:2])  # too few seeds
    assert half.end().startswith(f"{(0.2 + 0.4 + 0.3) / 3:+.3f} (")
    assert half.above_grpo() == "3 of 3"
    assert tables.weighted_groups("nearly_right_policy") == [half, one]


def test_adapters_that_are_judged_again_answer_greedily_as_they_did():
    """results/ends.py, with today's code, finds what the end of training had found."""
    for study in ("wrong_policy", "nearly_right_policy"):
        for group in tables.weighted_groups(study):
            if not group.failed_seeds() and not group.baseline().failed_seeds():
                again = tables.judged(group, "greedy").sort_index()
                lasts = [float(lines[-1]["greedy"]) for lines in group.lines().values()]
                assert again.to_numpy() == pytest.approx(lasts, abs=0.021), group


@pytest.mark.parametrize(
    ("study", "fall", "failed"),
    [("wrong_policy", 0.65, "1, 2"), ("wrong_policy", 0.3, ""), ("smollm2", 0.3, "1, 2")],
)
def test_where_a_run_failed_there_is_no_interval_and_no_test(runs, study, fall, failed):
    """Runs begin at 0.1, 0.2 and 0.1, and end at 0.7, 0.8 and 0.9 without the fall."""
    put(runs, GRPO, GRPOS + 0.3, study=study)
    group = put(runs, "ARCA", CURVES - [0, 0, 0, fall], study=study)
    assert group.failed_seeds() == failed
    assert (group.end() == "none: 2 of 3 failed") == bool(failed)
    assert all((row["p"] == "") == bool(failed) for row in tables.differences())


def test_policies_are_the_sample_of_a_mean_over_policies(runs):
    """Three differences of 0.1, 0.2 and 0.6, each the mean over its policy's seeds."""
    groups = []
    spread = np.array([[-0.05], [0], [0.05]]) * [0, 0, 0, 1]
    for study, more in (("wrong_policy", 0.1), ("wrong_policy_2", 0.2), ("wrong_policy_3", 0.6)):
        put(runs, GRPO, GRPOS, study=study)
        groups.append(put(runs, "ARCA", GRPOS + spread + [0, 0, 0, more], study=study))
    half = T_2 * math.sqrt(0.07 / 3)
    assert tables.over_policies(groups, "end") == f"+0.300 ({0.3 - half:+.3f} to {0.3 + half:+.3f})"


def test_cut_is_a_mean_over_first_runs_and_those_that_have_it_themselves(
    runs, tmp_path, monkeypatch
):
    """Two runs with three trained lines each: (3 * 0.5 + 0.1 + 0.2 + 0.3) / 6 = 0.35."""
    monkeypatch.setattr(tables, "STUDY_DATA", tmp_path)
    group = put(runs, GRPO, CURVES[:2])
    costs = tmp_path / "costs.csv"
    costs.write_text("study,updates,rate,method,clipped\n")
    assert group.cut() == "?"
    for line, share in zip(runs[group][2][1:], ("0.1", "0.2", "0.3"), strict=True):
        line["clipped"] = share
    assert group.cut() == "0.200"
    costs.write_text(costs.read_text() + "nearly_right_policy,1,0.002,GRPO,0.5\n")
    assert group.cut() == "0.350"


@pytest.mark.parametrize("name", tables.TABLES)
def test_every_row_of_a_table_has_the_headers_cells(name):
    table = tables.TABLES[name]()
    assert {len(row) for row in table} == {len(table[0])}


# ---- Pages ---------------------------------------------------------------------------------------
@pytest.mark.parametrize("page", tables.PAGES, ids=lambda page: page.parent.name)
def test_the_tables_of_the_page_are_current(page):
    text = page.read_text(encoding="utf-8")
    assert tables.MARKED.search(text)
    assert tables.rewritten(text) == text


def test_the_page_of_results_is_short_and_the_origin_of_all_data_is_known():
    assert (ROOT / "results/README.md").read_text(encoding="utf-8").count("\n") <= 250
    with open(tables.DATA / "provenance.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    known = tuple(row["data"].removeprefix("the other files of ") for row in rows)
    for path in tables.DATA.glob("*/*"):
        assert str(path.relative_to(tables.DATA)).startswith(known), path


@pytest.mark.slow
def test_answer_writes_pages_and_figures_from_the_data(tmp_path, monkeypatch):
    page = tmp_path / "page.md"
    page.write_text("Before.\n<!-- table: tests -->\nold\n<!-- end -->\nAfter.\n")
    monkeypatch.setattr(tables, "PAGES", [page])
    monkeypatch.setattr(tables, "OUTPUT", tmp_path)
    tables.main()
    assert page.read_text().startswith("Before.\n<!-- table: tests -->\n| ")
    assert {path.stem for path in tmp_path.glob("*.png")} == {"curves", "differences", "weights"}
