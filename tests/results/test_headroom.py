"""results/headroom.py: its statistics by hand, and its published tables again from its runs."""

from pathlib import Path

import headroom as study
import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT / "results/data/headroom"


def test_the_share_of_rollouts_of_curves_that_differ_by_a_constant():
    """Without spread between the pairs the interval is the share itself."""
    others = np.array([[0.0, 0.2, 0.4], [0.1, 0.3, 0.5]])
    faster = others + 0.1
    assert study.share_of_rollouts(faster, others) == pytest.approx((0.75, 0.75, 0.75), abs=2e-3)
    assert study.share_of_rollouts(others, others) == pytest.approx((1, 1, 1))
    assert study.share_of_rollouts(faster[:, :1], others) == (np.inf, np.inf, np.inf)  # cut
    assert study.share_of_rollouts(others - 0.1, others) == (np.inf, np.inf, np.inf)


def test_the_interval_of_the_share_is_where_the_limits_of_the_lead_are_zero():
    others = np.array([[0.0, 0.5], [0.0, 0.6], [0.0, 0.7]])
    curves = np.array([[0.0, 1.0], [0.0, 1.1], [0.0, 1.3]])
    share, low, high = study.share_of_rollouts(curves, others)
    for place, limit in ((low, 1), (high, 0)):
        lead = curves[:, 1] * place - others[:, 1]
        assert study.interval(lead)[limit] == pytest.approx(0, abs=3e-3)
    assert (curves[:, 1] * share - others[:, 1]).mean() == pytest.approx(0, abs=2e-3)
    assert low < share < high


def test_the_published_table_is_that_of_the_published_runs():
    runs = study.read_csv(DATA / "runs.csv")
    for row in study.read_csv(DATA / "table.csv"):
        again = study.table_row(runs, row["method"], row["rate"])
        for name, value in again.items():
            if isinstance(value, float):
                assert float(row[name]) == pytest.approx(value, rel=1e-3, abs=1e-4), name
            else:
                assert row[name] == str(value)


def as_shown(row: dict[str, str]) -> list[str]:
    """Returns a line of the table as the page has it. Few seeds have no interval."""

    def number(name: str) -> str:
        value = float(row[name])
        return f"{value:.2f}" if np.isfinite(value) else "never"

    def signed(name: str) -> str:
        return f"{float(row[name]):+.3f}"

    cells = [row["method"], row["rate"], row["seeds"]]
    cells += [number("greedy_end"), number("end"), number("pass_at_4_end")]
    if row["method"] == study.GRPO and row["rate"] == study.RATE:
        return [*cells, "", "", ""]
    few = int(row["seeds"]) < study.FEWEST_SEEDS
    for name in ("area", "end"):
        limits = "" if few else f" ({signed(name + '_low')} to {signed(name + '_high')})"
        cells.append(signed(name + "_more") + limits)
    if int(row["share_seeds"]) >= study.FEWEST_SEEDS:
        limits = f" ({number('share_low')} to {number('share_high')})"
    else:
        limits = ""
    return [*cells, number("share") + limits]


def test_the_page_has_the_numbers_of_the_tables():
    page = (ROOT / "results/HEADROOM.md").read_text()
    rows = [line.strip("| ") for line in page.splitlines() if line.startswith("|")]
    table = [" | ".join(as_shown(row)) for row in study.read_csv(DATA / "table.csv")]
    assert table and [row.strip("| ") for row in table] == [
        row for row in rows if row.split(" | ")[0] in study.COMMANDS
    ]
    for row in study.read_csv(DATA / "untrained.csv"):
        assert " | ".join(f"{float(x):g}" for x in row.values()) in rows


def test_the_sentences_have_the_numbers_of_the_table():
    rows = {row["method"]: row for row in study.read_csv(DATA / "table.csv") if is_at_rate(row)}
    assert float(rows["least variance"]["share_high"]) < study.BAR  # the control is found
    shares = {}
    for method in ("least variance", "right answers only"):
        limits = [float(rows[method][name]) for name in ("share", "share_low", "share_high")]
        shares[method] = "{:.2f} ({:.2f} to {:.2f})".format(*limits)
    heights = {}
    for method in ("right answers only", "ARCA", "OAR-G", "S-trace"):
        limits = [float(rows[method][name]) for name in ("area_more", "area_low", "area_high")]
        assert (limits[1] > 0 or limits[2] < 0) == (method == "right answers only")
        heights[method] = "{:+.3f} ({:+.3f} to {:+.3f})".format(*limits)
    greedy = {method: f"{float(rows[method]['greedy_end']):.2f}" for method in rows}
    page = " ".join((ROOT / "results/HEADROOM.md").read_text().split())
    for sentence in (
        f"The oracle of least variance reaches GRPO's end after {shares['least variance']} of "
        "GRPO's rollouts.",
        f"It reaches GRPO's end after {shares['right answers only']} of the rollouts, and its "
        f"learning curve is higher by {heights['right answers only']} on average.",
        f"ARCA, at {heights['ARCA']}, OAR-G, at {heights['OAR-G']}, and S-trace, at "
        f"{heights['S-trace']}, cannot be told from GRPO.",
        f"to {greedy[study.GRPO]} under GRPO and {greedy['least variance']} under the oracle",
    ):
        assert sentence in page


def is_at_rate(row: dict[str, str]) -> bool:
    return row["rate"] == study.RATE


def test_the_sign_test_of_the_page():
    """Eight leads of eight have p = 2 / 2^8, and Holm multiplies the smallest of five p by five."""
    runs = study.read_csv(DATA / "runs.csv")
    for method in ("least variance", "right answers only"):
        leads = study.seed_differences(runs, method, study.RATE)["area"] > 0
        assert leads.all() and len(leads) == 8
    page = " ".join((ROOT / "results/HEADROOM.md").read_text().split())
    p = 2 / 2**8
    assert f"p is {p:.3f} for each, and {5 * p:.3f} after Holm's correction" in page
