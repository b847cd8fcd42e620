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


def test_a_seed_whose_run_of_grpo_is_unfinished_is_left_out():
    runs = study.read_csv(DATA / "runs.csv")
    begun = [row for row in runs if (row["method"], row["rate"]) == (study.GRPO, study.RATE)]
    last = [row for row in begun if row["seed"] == "1" and row["rollout"] == str(study.ROLLOUTS)]
    assert len(last) == 1
    runs.remove(last[0])
    assert study.table_row(runs, "ARCA", study.RATE)["seeds"] == 7


def as_shown(row: dict[str, str]) -> list[str]:
    """Returns a line of the table as the page has it. Few seeds have no interval."""

    def number(name: str) -> str:
        value = float(row[name])
        return f"{value:.2f}" if np.isfinite(value) else "never"

    def signed(name: str) -> str:
        return f"{float(row[name]):+.3f}"

    cells = [row["method"], row["rate"], row["seeds"]]
    cells += [number("greedy_end"), number("end"), number("pass_at_4_end")]
    references = ((study.GRPO, study.RATE), (study.GRPO_FOUR, study.RATE_FOUR_UPDATES))
    if (row["method"], row["rate"]) in references:
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


def found(row: dict[str, str], figure: str) -> str:
    """Returns what a method has over GRPO: "+0.089 (+0.035 to +0.143)"."""
    numbers = [float(row[f"{figure}_{end}"]) for end in ("more", "low", "high")]
    return "{:+.3f} ({:+.3f} to {:+.3f})".format(*numbers)


def share(row: dict[str, str]) -> str:
    """Returns the share of GRPO's rollouts that a method needs: "0.54 (0.41 to 0.73)"."""
    numbers = [float(row[name]) for name in ("share", "share_low", "share_high")]
    return "{:.2f} ({:.2f} to {:.2f})".format(*numbers)


def mean_of_last_rollouts(method: str, figure: str) -> float:
    """Returns the mean of a figure in the last ten rollouts, over all seeds."""
    last = str(study.ROLLOUTS)
    rows = [row for row in study.read_csv(DATA / "runs.csv") if row["rollout"] == last]
    return float(np.mean([float(row[figure]) for row in rows if row["method"] == method]))


def seeds_where_arca_is_larger(figure: str) -> int:
    """Returns on how many seeds ARCA after GRPO has the larger figure in the last ten rollouts."""
    last = str(study.ROLLOUTS)
    found: dict[str, dict[str, float]] = {study.ARCA_LATER: {}, study.GRPO_WITH_KL: {}}
    for row in study.read_csv(DATA / "runs.csv"):
        if row["rollout"] == last and row["method"] in found:
            found[row["method"]][row["seed"]] = float(row[figure])
    arca, grpo = found.values()
    assert len(arca) == len(grpo) == 8
    return sum(arca[seed] > grpo[seed] for seed in grpo)


def rows_by_method() -> dict[str, dict[str, str]]:
    """Returns the lines of the table at the main rates."""
    table = study.read_csv(DATA / "table.csv")
    rows = {row["method"]: row for row in table if is_at_rate(row)}
    return rows | {row["method"]: row for row in table if row["method"] in study.FOUR_UPDATES}


def test_only_right_answers_only_and_the_oracle_can_be_told_from_grpo():
    rows = rows_by_method()
    assert float(rows["least variance"]["share_high"]) < study.BAR  # the control is found
    for method in ("right answers only", "ARCA", "OAR-G", "S-trace"):
        tells = float(rows[method]["area_low"]) > 0 or float(rows[method]["area_high"]) < 0
        assert tells == (method == "right answers only")


def seeds(methods: list[str]) -> str:
    """Returns how many seeds the methods have: "2", or "4 to 6"."""
    counts = sorted({int(rows_by_method()[method]["seeds"]) for method in methods})
    return " to ".join(str(count) for count in (counts[0], counts[-1])[: len(counts)])


def corrected_p(method: str, updates: str = "one update") -> float:
    """Returns the p-value of a method's area over GRPO's, corrected for all tests of the pages."""
    rows = study.read_csv(ROOT / "results/data/answer/differences.csv")
    found = [row for row in rows if (row["method"], row["figure"]) == (method, "area")]
    (row,) = [row for row in found if row["study"] == f"wrong policy, {updates}"]
    return float(row["p_holm"])


def page_sentences() -> list[str]:
    """Returns the sentences of the page that hold numbers of the tables."""
    rows = rows_by_method()
    table = study.read_csv(DATA / "table.csv")
    twice = {row["method"]: row for row in table if row["rate"] == "0.004"}
    greedy = {method: f"{float(rows[method]['greedy_end']):.2f}" for method in rows}
    later = (study.ARCA_LATER, study.GRPO_WITH_KL)
    divergences = [mean_of_last_rollouts(method, "kl") for method in later]
    gradients = [mean_of_last_rollouts(method, "grad_norm") for method in later]
    rivals = [name for name in study.FOUR_UPDATES if name.startswith("FIPO")]
    four = {name.removesuffix(", four updates"): rows[name] for name in study.FOUR_UPDATES}
    return [
        f"The oracle of least variance reaches GRPO's end after {share(rows['least variance'])} of "
        "GRPO's rollouts.",
        f"It reaches GRPO's end after {share(rows['right answers only'])} of the rollouts, and its "
        f"learning curve is higher by {found(rows['right answers only'], 'area')} on average.",
        f"ARCA is at {found(rows['ARCA'], 'area')}, OAR-G at {found(rows['OAR-G'], 'area')}, and "
        f"S-trace at {found(rows['S-trace'], 'area')}.",
        f"to {greedy[study.GRPO]} under GRPO and {greedy['least variance']} under the oracle",
        f"GRPO ends at {float(twice[study.GRPO]['end']):.2f}, ARCA at "
        f"{float(twice['ARCA']['end']):.2f}, and right answers only at "
        f"{float(twice['right answers only']['end']):.2f}",
        f"lambda 0.5 has {found(rows['S-trace, lambda 0.5'], 'area')} over GRPO in area, and "
        f"normalized rows have {found(rows['S-trace, normalized'], 'area')}",
        f"Its end differs from GRPO's by {found(rows[study.ARCA_LATER], 'end')}, which",
        f"This changes the area by {found(rows[study.NO_EMPTY_STEP], 'area')}, so",
        "its divergence from the base is {:.3f} nats a token, and GRPO's {:.3f},".format(
            *divergences
        ),
        f"{8 - seeds_where_arca_is_larger('kl')} seeds of 8, its divergence is the smaller one.",
        f"On {seeds_where_arca_is_larger('grad_norm')} of 8 seeds its gradient is longer",
        "its gradient is {:.2f} long, and GRPO's {:.2f}.".format(*gradients),
        f"right answers only has {found(four['right answers only'], 'area')} over GRPO in area.",
        f"ARCA has {found(four['ARCA'], 'area')}, and S-trace {found(four['S-trace'], 'area')}.",
        f"FIPO has {found(four['FIPO'], 'area')} over GRPO in area, and its control "
        f"{found(four['FIPO, shuffled'], 'area')}.",
        f"the oracle's lead remains (p = {corrected_p('least variance'):.3f}), and that of right "
        f"answers only does not (p = {corrected_p('right answers only'):.3f}).",
        f"its lead does remain (p = {corrected_p('right answers only', 'four updates'):.3f}).",
        f"The oracle of step values has {found(rows['step values'], 'area')} over GRPO in area, "
        "about as much as right answers only. Within right answers it has "
        f"{found(rows['step values, right answers only'], 'area')}:",
        f"FIPO and its control have {seeds(rivals)} seeds, and the other methods with four updates "
        f"{seeds([name for name in study.FOUR_UPDATES if name not in rivals])}.",
    ]


def test_the_sentences_have_the_numbers_of_the_table():
    page = " ".join((ROOT / "results/HEADROOM.md").read_text().split())
    missing = [sentence for sentence in page_sentences() if sentence not in page]
    assert missing == []


def is_at_rate(row: dict[str, str]) -> bool:
    return row["rate"] == study.RATE


def test_what_remains_after_the_correction():
    runs = study.read_csv(DATA / "runs.csv")
    for method in ("least variance", "right answers only"):
        leads = study.seed_differences(runs, method, study.RATE)["area"] > 0
        assert leads.all() and len(leads) == 8
    assert corrected_p("least variance") < 0.05 < corrected_p("right answers only")
    assert corrected_p("right answers only", "four updates") < 0.05
