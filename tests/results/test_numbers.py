"""Every number of README.md and of the pages in results/ comes from a file of results/data/.

Each table's rows, and each sentence with a decimal number, are written here from the files. They
must stand on the page word for word, so two swapped digits fail a test. What is then left of a page
must not hold a decimal number or a percentage.
"""

import csv
import json
import math
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import ROOT

DATA = ROOT / "results/data"
LEARNED_ABOVE = 0.5  # held-out sampled accuracy at the end of a run that learned

Row = dict[str, str]

LABELS = {  # a method's name in the files -> on the pages
    "uniform (GRPO)": "GRPO",
    "arca": "ARCA",
    "arca's weights shuffled": "ARCA's weights, shuffled",
    "oar_g": "OAR-G",
    "oar_p": "OAR-P",
    "s_trace": "S-trace",
    "s_trace at GRPO's rate": "S-trace at GRPO's rate",
    "right alone": "right answers only",
    "right alone, by probability": "right answers only, by probability",
    "negative_weight 0.25": "wrong answers at a quarter",
    "arca, right alone": "ARCA, right answers only",
    "oar_g, right alone": "OAR-G, right answers only",
    "s_trace, right alone": "S-trace, right answers only",
    "entropy reduction": "entropy reduction",
    "oracle: step values": "oracle: step values",
    "oracle: least variance": "oracle: least variance",
    "other samples": "null: other problems",
}


# ---- Reading the files ---------------------------------------------------------------------------
def table(name: str) -> list[Row]:
    """Returns the rows of results/data/<name>.csv."""
    with (DATA / f"{name}.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def find(name: str, **wanted: str) -> Row:
    """Returns the one row of a table whose columns have the wanted values."""
    found = [row for row in table(name) if all(row[key] == wanted[key] for key in wanted)]
    assert len(found) == 1, (name, wanted)
    return found[0]


def ends(name: str, regime: str, method: str) -> list[float]:
    """Returns the held-out sampled accuracy at the end of each run of a method, by seed."""
    rows = [row for row in table(name) if (row["regime"], row["method"]) == (regime, method)]
    return [float(row["accuracies"].split()[-1]) for row in rows]


def learned(name: str, regime: str, method: str) -> str:
    """Returns how many runs learned, of how many: "3 of 4"."""
    accuracies = ends(name, regime, method)
    count = sum(accuracy > LEARNED_ABOVE for accuracy in accuracies)
    return f"{count} of {len(accuracies)}"


# ---- Writing numbers as the pages do -------------------------------------------------------------
def plain(text: str, places: int = 3) -> str:
    return f"{float(text):.{places}f}"


def difference(row: Row, key: str) -> str:
    """Returns a difference to GRPO with its interval: "+0.048 (+0.030 to +0.065)"."""
    value, low, high = (float(row[key + end]) for end in ("_more", "_low", "_high"))
    return f"{value:+.3f} ({low:+.3f} to {high:+.3f})"


def size(row: Row, key: str) -> str:
    """Returns the same without signs: "0.048 (0.030 to 0.065)"."""
    numbers = sorted(abs(float(row[key + end])) for end in ("_more", "_low", "_high"))
    low, value, high = numbers
    return f"{value:.3f} ({low:.3f} to {high:.3f})"


def interval(row: Row, key: str, places: int = 2) -> str:
    """Returns a value with its interval: "1.37 (1.22 to 1.53)"."""
    value, low, high = (float(row[key + end]) for end in ("", "_low", "_high"))
    return f"{value:.{places}f} ({low:.{places}f} to {high:.{places}f})"


def line(*cells: str) -> str:
    """Returns a row of a Markdown table."""
    return f"| {' | '.join(cells)} |"


def exact_interval(successes: int, runs: int) -> tuple[float, float]:
    """Returns Clopper and Pearson's 95% interval of a share, by bisection."""

    def at_least(count: int, share: float) -> float:  # chance of `count` successes or more
        terms = range(count, runs + 1)
        return sum(math.comb(runs, k) * share**k * (1 - share) ** (runs - k) for k in terms)

    def solve(count: int, chance: float) -> float:
        low, high = 0.0, 1.0
        for _ in range(60):
            middle = (low + high) / 2
            if at_least(count, middle) < chance:
                low = middle
            else:
                high = middle
        return low

    lowest = solve(successes, 0.025) if successes else 0.0
    highest = solve(successes + 1, 0.975) if successes < runs else 1.0
    return lowest, highest


# ---- The tables of results/README.md -------------------------------------------------------------
CHAINS = "learning_curves/chains"
SMOLLM2 = "learning_curves/smollm2"


def answer_cells(method: str) -> list[str]:
    """Returns a method's cells of the first table, without the verdict."""
    steps = {row["credit"]: row["ratio"] for row in table("step_times/table")}
    credits = {"uniform (GRPO)": "uniform", "arca": "arca", "oar_g": "oar_g", "s_trace": "s_trace"}
    cells = [LABELS[method]]
    for regime in ("one update", "four updates"):
        rows = [r for r in table(CHAINS) if (r["regime"], r["method"]) == (regime, method)]
        all_learned = min(ends(f"{CHAINS}_runs", regime, method), default=0) > LEARNED_ABOVE
        if not rows:
            cells.append("not run")
        elif method == "uniform (GRPO)":
            cells.append(plain(rows[0]["end"]))
        elif all_learned:
            cells.append(difference(rows[0], "end"))
        else:
            cells.append(f"{learned(f'{CHAINS}_runs', regime, method)} learned")
    cells.append(learned(f"{SMOLLM2}_runs", "SmolLM2", method))
    cells.append(steps[credits[method]] if method in credits else "below 1")
    return cells


def answer_rows() -> list[str]:
    methods = list(LABELS)
    shown = [methods[i] for i in (0, 1, 3, 5, 7, 8)]
    return [line(*answer_cells(method)).removesuffix(" |") for method in shown]


def untrained_rows() -> list[str]:
    rows = []
    for row in table("learning_curves/untrained"):
        accuracies = [plain(row[f"{kind}_accuracy"]) for kind in ("greedy", "sampled")]
        rows.append(line(row["policy"], row["temperature"], *accuracies, plain(row["pass@4"])))
    return rows


def chain_rows(regime: str) -> list[str]:
    rows = []
    for row in table(CHAINS):
        if row["regime"] != regime:
            continue
        own = [r for r in table(f"{CHAINS}_runs") if r["method"] == row["method"]]
        own = [r for r in own if r["regime"] == regime]
        greedy = [float(r["greedy_accuracy"]) for r in own]
        pass_at_4 = sum(float(r["pass@4"]) for r in own) / len(own)
        cells = [LABELS[row["method"]], row["rate"]]
        cells.append(learned(f"{CHAINS}_runs", regime, row["method"]))
        all_learned = min(ends(f"{CHAINS}_runs", regime, row["method"])) > LEARNED_ABOVE
        for key in ("area", "end"):
            if row["method"] == "uniform (GRPO)":
                cells.append(plain(row[key]))
            else:
                cells.append(difference(row, key) if all_learned else "none")
        cells.append(f"{min(greedy):.2f} to {max(greedy):.2f}")
        cells.append(f"{pass_at_4:.2f}")
        rows.append(line(*cells))
    return rows


def smollm2_rows() -> list[str]:
    rows = []
    for row in table(SMOLLM2):
        method = row["method"]
        accuracies = ends(f"{SMOLLM2}_runs", "SmolLM2", method)
        each = [f"{accuracy:.3f}" for accuracy in accuracies]
        succeeded = [accuracy for accuracy in accuracies if accuracy > LEARNED_ABOVE]
        cells = [LABELS[method], row["rate"], learned(f"{SMOLLM2}_runs", "SmolLM2", method)]
        cells += [", ".join(each), f"{sum(succeeded) / len(succeeded):.3f}"]
        if method == "uniform (GRPO)":
            cells.append("")
        elif len(accuracies) == len(succeeded) > 1:
            cells.append(difference(row, "end"))
        else:
            cells.append("none")
        rows.append(line(*cells, plain(row["seconds_a_step"], 1), plain(row["peak_gb"], 1)))
    return rows


DEFAULT_RUNS = {
    "grpo_arca-uniform": "GRPO",
    "grpo_arca-default": "ARCA",
    "grpo_arca-shuffled": "ARCA's weights, shuffled",
    "grpo_oar-default": "OAR-G",
    "grpo_strace-default": "S-trace",
    "grpo_strace-p_trace": "P-trace",
    "grpo_arca-uniform-negative_weight-0": "right answers only",
}


def default_run_rows() -> list[str]:
    rows = []
    for name, label in DEFAULT_RUNS.items():
        runs = json.loads((DATA / f"default_runs/{name}.json").read_text())["runs"]
        rows.append(line(label, *(plain(run["after"]["sampled_accuracy"]) for run in runs)))
    return rows


def worth_rows() -> list[str]:
    shown = """surprisal|entropy reduction|probability|oar_g|oar_p|s_trace|optimal token baseline
    right alone|negative_weight 0.25|oar_g, right alone|s_trace, right alone
    right alone, by probability|oracle: step values|oracle: least variance|other samples"""
    rows = []
    for method in re.split(r"\||\n *", shown):
        row = find("worth/study_8_operations", method=method)
        cells = [interval(row, key) for key in ("adam", "worth", "bias")]
        rows.append(line(LABELS.get(method, method), *cells))
    return rows


RIGHT_ONLY = "grpo_arca.py --credit uniform --negative_weight 0"
POLICIES = {
    "3_to_4_operations_start": "chains of 3 to 4 operations, untrained",
    "3_to_4_operations_end": "the same, trained for 45 updates",
    "8_operations_start": "chains of 8 operations, untrained",
    "smollm2_start": "SmolLM2, untrained",
    "smollm2_middle": "SmolLM2, trained for 8 updates",
}


def right_only_rows() -> list[str]:
    rows = []
    for name, policy in POLICIES.items():
        row = find(f"worth/{name}", method=RIGHT_ONLY)
        rows.append(line(policy, plain(row["reward"], 2), interval(row, "adam")))
    return rows


def weight_rows() -> list[str]:
    names = {"surprisal": "surprisal", "entropy_reduction": "entropy reduction"}
    names |= {"divergence": "divergence"}
    rows = []
    for credit in "arca surprisal entropy_reduction divergence oar_p oar_g s_trace".split():
        found = [row for row in table("decisive_tokens/table") if row["credit"] == credit]
        before, after = found
        cells = [LABELS.get(credit, names.get(credit, credit))]
        for key in ("decisive", "first_wrong", "auroc", "effn"):
            cells.append(f"{plain(before[key], 2)} / {plain(after[key], 2)}")
        rows.append(line(*cells))
    return rows


def step_rows() -> list[str]:
    rows = []
    for row in table("step_times/table"):
        ratio = "1" if row["credit"] == "uniform" else interval(row, "ratio")
        label = LABELS.get(row["credit"], "GRPO")
        rows.append(line(label, interval(row, "step"), plain(row["credit_alone"], 2), ratio))
    return rows


def trl_rows() -> list[str]:
    return [
        line(row["policy"], interval(row, "rollout"), interval(row, "step"))
        for row in table("step_times/trl")
    ]


def memory_rows() -> list[str]:
    rows = []
    for row in table("memory/counted"):
        peak = max(float(row[phase]) for phase in ("rollout", "score", "update"))
        rows.append(line(row["model"], row["rollout_weights"], f"{peak:.1f}", row["card"]))
    return rows


def precision_rows() -> list[str]:
    rows = []
    for credit, label in {"arca": "ARCA", "oar_g": "OAR-G", "oar_p": "OAR-P"}.items():
        found = {}
        for dtype in ("fp32", "tf32", "bf16"):
            found[dtype] = find("precision/smollm2", what=f"{credit} in {dtype}")
        cells = [
            f"{plain(found[dtype]['rank'], 2)}, {plain(found[dtype]['worst'], 2)}"
            for dtype in ("bf16", "tf32")
        ]
        seconds = [plain(found[dtype]["seconds"], 1) for dtype in ("bf16", "fp32")]
        rows.append(line(label, *cells, *seconds))
    return rows


TABLES: dict[str, list[Callable[[], list[str]]]] = {
    "README.md": [],
    "results/README.md": [
        answer_rows,
        untrained_rows,
        lambda: chain_rows("one update"),
        lambda: chain_rows("four updates"),
        default_run_rows,
        smollm2_rows,
        worth_rows,
        right_only_rows,
        weight_rows,
        step_rows,
        trl_rows,
        memory_rows,
    ],
    "results/BF16.md": [precision_rows],
}
