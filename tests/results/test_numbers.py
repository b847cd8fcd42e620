"""Every number of README.md and of the pages in results/ comes from a file of results/data/.

Each table's rows, and each sentence with a decimal number, are written here from the files. They
must stand on the page word for word, so two swapped digits fail a test. What is then left of a page
must not hold a decimal number or a percentage.
"""

import csv
import functools
import json
import math
import re
from collections.abc import Callable
from pathlib import Path

import answer
import numpy as np
import pytest
from test_headroom import seeds

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT / "results/data"
LEARNED_ABOVE = 0.5  # held-out sampled accuracy at the end of a run that learned

Row = dict[str, str]

LABELS = {  # a method's name in the files -> on the pages
    "uniform (GRPO)": "GRPO",
    "uniform at twice the rate": "GRPO at twice the rate",
    "uniform, no step without a gradient": "GRPO, no step without a gradient",
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
    "s_trace, normalized": "S-trace at GRPO's rate, normalized",
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


def direction(row: Row) -> str:
    """Returns the cosine with the policy gradient; an estimate above 1 is written as 1."""
    shown = {}
    for end in ("", "_low", "_high"):
        shown["cosine" + end] = str(min(float(row["direction" + end]), 1.0))
    return interval(shown, "cosine")


def line(*cells: str) -> str:
    """Returns a row of a Markdown table."""
    return f"| {' | '.join(cells)} |"


def exact_interval(successes: int, runs: int) -> tuple[float, float]:
    """Returns Clopper and Pearson's 95% interval of a share, by bisection."""

    def at_least(count: int, share: float) -> float:  # chance of `count` successes or more
        terms = range(count, runs + 1)
        return sum(math.comb(runs, k) * share**k * (1 - share) ** (runs - k) for k in terms)

    def solve(count: int, chance: float) -> float:
        low = 0.0
        high = 1.0
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
NO_STEP = "uniform, no step without a gradient"


def answer_cells(method: str) -> list[str]:
    """Returns a method's cells of the first table, without the verdict."""
    ratio_of = {row["credit"]: row["ratio"] for row in table("step_times/table")}
    credits = {"GRPO": "uniform", "ARCA": "arca", "OAR-G": "oar_g", "S-trace": "s_trace"}
    on_smollm2 = {"GRPO": "uniform (GRPO)", "ARCA": "arca", "OAR-G": "oar_g"}
    on_smollm2 |= {"S-trace": "s_trace at GRPO's rate", "right answers only": "right alone"}
    one = find("headroom/table", method=method, rate="0.002")
    name = f"{method}, four updates"
    four = [row for row in table("headroom/table") if row["method"] == name]
    if method == "GRPO":
        cells = [method, plain(one["end"]), plain(four[0]["end"])]
    else:
        cells = [method, difference(one, "end")]
        cells.append(difference(four[0], "end") if four else "not run")
    cells.append(plain(one["greedy_end"], 2))
    if method == "least variance":
        return ["oracle", *cells[1:], "not run", "not counted"]
    cells.append(learned(f"{SMOLLM2}_runs", "SmolLM2", on_smollm2[method]))
    cells.append(ratio_of[credits[method]] if method in credits else "1 or less")
    return cells


def answer_rows() -> list[str]:
    shown = ["GRPO", "ARCA", "OAR-G", "S-trace", "right answers only", "least variance"]
    return [line(*answer_cells(method)).removesuffix(" |") for method in shown]


def difference_of(study: str, method: str, figure: str = "end") -> Row:
    """Returns a method's line of the file that puts the studies side by side."""
    return find("answer/differences", study=study, method=method, figure=figure)


def holm_sentence() -> str:
    """Returns the sentence that says how many tests were made."""
    tested = [row for row in table("answer/differences") if row["p_holm"]]
    kept = [row for row in tested if float(row["p_holm"]) < 0.05]
    return f"make {len(tested)} tests against GRPO, and {len(kept)} of them remain"


def holm_rows() -> list[str]:
    """Returns the rows of the table of what remains after Holm's correction."""
    rows = []
    for row in table("answer/differences"):
        if row["p_holm"] and float(row["p_holm"]) < 0.05:
            cells = [row["study"], row["method"], row["figure"], row["seeds"]]
            numbers = [float(row[name]) for name in ("more", "low", "high")]
            cells.append("{:+.3f} ({:+.3f} to {:+.3f})".format(*numbers))
            rows.append(line(*cells, f"{float(row['p']):.2g}", f"{float(row['p_holm']):.2g}"))
    return rows


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
    names = LABELS | answer.AT_GRPOS_RATE
    for row in table(SMOLLM2):
        method = row["method"]
        accuracies = ends(f"{SMOLLM2}_runs", "SmolLM2", method)
        succeeded = [accuracy for accuracy in accuracies if accuracy > LEARNED_ABOVE]
        low, high = exact_interval(*counts(method))
        cells = [names[method], row["rate"], of_smollm2(method), f"{low:.2f} to {high:.2f}"]
        cells += [span(accuracies), f"{sum(succeeded) / len(succeeded):.3f}"]
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


RATE_OF_SIZE = {"16": "0.002", "128": "0.004"}  # completions a rollout -> the learning rate


def rollout_size_rows() -> list[str]:
    """Returns the rows of right answers only against GRPO, on small and on large rollouts."""
    rows = []
    for (completions, rate), flags in zip(
        RATE_OF_SIZE.items(), answer.ROLLOUT_SIZES.values(), strict=True
    ):
        cells = [completions, rate]
        for method in ("grpo_arca-uniform", "grpo_arca-uniform-negative_weight-0"):
            runs = json.loads((DATA / f"batch_size/{method}{flags}.json").read_text())["runs"]
            cells.append(f"{np.mean([run['after']['sampled_accuracy'] for run in runs]):.3f}")
        rows.append(line(*cells, size_difference(completions)))
    return rows


def size_difference(completions: str) -> str:
    """Returns what right answers only have over GRPO in rollouts of so many completions."""
    row = difference_of(f"default command, {completions} completions", "right answers only")
    numbers = [float(row[name]) for name in ("more", "low", "high")]
    return "{:+.3f} ({:+.3f} to {:+.3f})".format(*numbers)


def worth_rows() -> list[str]:
    shown = """surprisal|entropy reduction|probability|oar_g|oar_p|s_trace|optimal token baseline
    right alone|negative_weight 0.25|oar_g, right alone|s_trace, right alone
    right alone, by probability|oracle: step values|oracle: least variance|other samples"""
    rows = []
    for method in re.split(r"\||\n *", shown):
        row = find("worth/study_8_operations", method=method)
        cells = [interval(row, key) for key in ("adam", "worth")]
        rows.append(line(LABELS.get(method, method), *cells, direction(row)))
    return rows


RIGHT_ONLY = "grpo_arca.py --credit uniform --negative_weight 0"
POLICIES = {
    "3_to_4_operations_start": "chains of 3 to 4 operations, untrained",
    "3_to_4_operations_end": "the same, trained for 45 updates",
    "8_operations_start": "chains of 8 operations, nearly right, untrained",
    "smollm2_start": "SmolLM2, untrained",
    "smollm2_middle": "SmolLM2, trained for 8 updates",
}


def right_only_rows() -> list[str]:
    rows = []
    for name, policy in POLICIES.items():
        row = find(f"worth/{name}", method=RIGHT_ONLY)
        rows.append(line(policy, plain(row["reward"], 2), interval(row, "adam")))
    return rows


def completions_power() -> float:
    """Returns the power of Adam's worth at which half of the groups is worth 1/2."""
    half = find("worth/8_operations_start", method="half of the groups")
    return math.log(0.5) / math.log(float(half["adam"]))


def share(text: str) -> str:
    """Returns a share of rollouts with two digits. It is infinite where a run never gets there."""
    return "never" if math.isinf(float(text)) else f"{float(text):.2f}"


def completions_rows() -> list[str]:
    """Returns the rows of the table of predicted and measured shares of rollouts."""
    rows = []
    for row in table("answer/prediction"):
        cells = [row["task"], row["method"], interval(row, "adam"), plain(row["completions"], 2)]
        limits = f"{share(row['share_low'])} to {share(row['share_high'])}"
        predicted = f"{share(row['predicted_low'])} to {share(row['predicted_high'])}"
        cells += [f"{share(row['predicted'])} ({predicted})", f"{share(row['share'])} ({limits})"]
        rows.append(line(*cells))
    return rows


def weight_rows() -> list[str]:
    credits = ["arca", "surprisal", "entropy_reduction", "divergence", "oar_p", "oar_g", "s_trace"]
    rows = []
    for credit in credits:
        found = [row for row in table("decisive_tokens/table") if row["credit"] == credit]
        before, after = found
        keys = ("decisive", "first_wrong", "auroc", "effn")
        cells = [f"{plain(before[key], 2)} / {plain(after[key], 2)}" for key in keys]
        rows.append(line(LABELS.get(credit, credit.replace("_", " ")), *cells))
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
        holm_rows,
        untrained_rows,
        functools.partial(chain_rows, "one update"),
        functools.partial(chain_rows, "four updates"),
        default_run_rows,
        rollout_size_rows,
        smollm2_rows,
        worth_rows,
        right_only_rows,
        completions_rows,
        weight_rows,
    ],
    "results/COSTS.md": [step_rows, trl_rows, memory_rows],
    "results/BF16.md": [precision_rows],
}


# ---- The sentences -------------------------------------------------------------------------------
def untrained(policy: str, temperature: str = "1.0") -> Row:
    return find("learning_curves/untrained", policy=policy, temperature=temperature)


def chains(method: str, regime: str = "one update") -> Row:
    return find(CHAINS, regime=regime, method=method)


def share_of_rollouts(regime: str) -> str:
    """Returns after what share of GRPO's rollouts "right answers only" reached GRPO's end."""
    row = chains("right alone", regime)
    value, low, high = (float(row[f"share_{key}"]) for key in ("of_rollouts", "low", "high"))
    return f"{value:.2f} ({low:.2f} to {high:.2f})"


def seconds_of_a_step(threads: str) -> str:
    """Returns the range of a step's seconds: "10 to 12"."""
    rows = table("step_times/threads")
    seconds = sorted({float(row["seconds"]) for row in rows if row["threads"] == threads})
    return " to ".join(f"{number:.0f}" for number in (seconds[0], seconds[-1]))


def thread_seconds() -> tuple[str, str]:
    two = seconds_of_a_step("2")
    return seconds_of_a_step("1"), two.partition(" to ")[0]


def percentages(accuracies: list[float]) -> str:
    """Returns the smallest and the largest share: "8.0% to 11.5%"."""
    return f"{100 * min(accuracies):.1f}% to {100 * max(accuracies):.1f}%"


def of_smollm2(method: str) -> str:
    """Returns how many runs of a method on SmolLM2 learned: "6 of 8"."""
    return learned(f"{SMOLLM2}_runs", "SmolLM2", method)


def four_updates_share() -> str:
    """Returns the share of GRPO's rollouts of "right answers only" with four updates a rollout."""
    row = find("headroom/table", method="right answers only, four updates")
    return shown_share(row)


def end_over_grpo(method: str) -> str:
    """Returns a method's end over GRPO's where the policy is wrong."""
    return difference(find("headroom/table", method=method, rate="0.002"), "end")


def of_quarters(figure: str, quarter: int, seeds: list[str]) -> list[float]:
    """Returns a figure of GRPO's runs on SmolLM2 in a quarter of training, for each seed."""
    rows = [row for row in table(f"{SMOLLM2}_runs") if row["method"] == "uniform (GRPO)"]
    return [float(row[figure].split()[quarter]) for row in rows if row["seed"] in seeds]


def seeds_of_grpo(has_learned: bool) -> list[str]:
    """Returns the seeds of GRPO's runs on SmolLM2 that learned, or not, if entropies are kept."""
    rows = [row for row in table(f"{SMOLLM2}_runs") if row["method"] == "uniform (GRPO)"]
    found = []
    for row in rows:
        end = float(row["accuracies"].split()[-1])
        if row["entropies"] and (end > LEARNED_ABOVE) == has_learned:
            found.append(row["seed"])
    return found


def final_kls(seeds: list[str]) -> list[float]:
    """Returns the divergence from the base at the end of GRPO's runs on SmolLM2, for each seed."""
    rows = [row for row in table(f"{SMOLLM2}_runs") if row["method"] == "uniform (GRPO)"]
    return [float(row["final_kl"]) for row in rows if row["seed"] in seeds]


def groups_with_gradient(seed: str) -> int:
    """Returns how many of the first 40 groups of GRPO's run had unequal rewards.

    All runs of methods with twelve seeds must have failed on that seed.
    """
    rows = [row for row in table(f"{SMOLLM2}_runs") if row["seed"] == seed]
    rows = [row for row in rows if row["method"] != NO_STEP]
    assert len(rows) == 5
    assert all(float(row["accuracies"].split()[-1]) < LEARNED_ABOVE for row in rows)
    first, second = (of_quarters("zero_std_shares", quarter, [seed])[0] for quarter in (0, 1))
    return round(20 * (1 - first) + 20 * (1 - second))


def end_on_smollm2(method: str, seed: str) -> float:
    """Returns where a method's run on SmolLM2 ended."""
    row = find(f"{SMOLLM2}_runs", method=method, seed=seed)
    return float(row["accuracies"].split()[-1])


def without_steps() -> list[str]:
    """Returns the sentences about runs that take no step without a gradient."""
    grpo = "uniform (GRPO)"
    seeds = [row["seed"] for row in table(f"{SMOLLM2}_runs") if row["method"] == NO_STEP]
    learned_runs = sum(end_on_smollm2(NO_STEP, seed) > LEARNED_ABOVE for seed in seeds)
    of_grpo = sum(end_on_smollm2(grpo, seed) > LEARNED_ABOVE for seed in seeds)
    return [
        f"the run on seed 9 ended at {end_on_smollm2(NO_STEP, '9'):.3f} and not at "
        f"{end_on_smollm2(grpo, '9'):.3f}.",
        f"On seeds {seeds[0]} to {seeds[-1]}, {learned_runs} of {len(seeds)} such runs learned, "
        f"and {of_grpo} of {len(seeds)} of GRPO.",
    ]


def counts(method: str) -> tuple[int, int]:
    """Returns how many runs of a method on SmolLM2 learned, and how many there are."""
    accuracies = ends(f"{SMOLLM2}_runs", "SmolLM2", method)
    return sum(accuracy > LEARNED_ABOVE for accuracy in accuracies), len(accuracies)


def fisher_p(method: str) -> float:
    """Returns Fisher's two-sided p of a method's learned runs against GRPO's, by counting."""
    own, runs = counts(method)
    grpo, other_runs = counts("uniform (GRPO)")
    learned_runs = own + grpo

    def ways(count: int) -> int:
        return math.comb(runs, count) * math.comb(other_runs, learned_runs - count)

    possible = range(max(0, learned_runs - other_runs), min(runs, learned_runs) + 1)
    as_rare = [ways(count) for count in possible if ways(count) <= ways(own)]
    return sum(as_rare) / math.comb(runs + other_runs, learned_runs)


def span(numbers: list[float], places: int = 3) -> str:
    """Returns the smallest and the largest number: "0.021 to 0.938"."""
    if len(numbers) == 1:
        return f"{numbers[0]:.{places}f}"
    return f"{min(numbers):.{places}f} to {max(numbers):.{places}f}"


def smollm2_accuracies() -> tuple[list[float], list[float]]:
    """Returns held-out sampled accuracy of GRPO's runs, before and after training."""
    rows = [row for row in table(f"{SMOLLM2}_runs") if row["method"] == "uniform (GRPO)"]
    curves = [[float(number) for number in row["accuracies"].split()] for row in rows]
    return [curve[0] for curve in curves], [curve[-1] for curve in curves]


def end_table() -> str:
    """Returns the table that the default command printed at its end."""
    run = json.loads((DATA / "default_runs/grpo_arca-default.json").read_text())["runs"][0]
    names = {"greedy_accuracy": "greedy accuracy", "sampled_accuracy": "sampled accuracy"}
    lines = []
    for key, before in run["before"].items():
        after = run["after"][key]
        name = names.get(key, key)
        change = 100 * (after - before)
        lines.append(f"{name:20}{before:7.1%}{after:8.1%}{change:+8.1f}")
    return "\n".join(lines)


def ratios() -> list[str]:
    """Returns the ends of the rows of the README's table of methods: the time of a step."""
    rows = {row["credit"]: row["ratio"] for row in table("step_times/table")}
    faithful = {
        "arca": "scores and weights exact; the clipped ratio is ours",
        "oar_g": "the prompt that asks for the answer is ours",
        "oar_p": "the same paper | as for OAR-G",
        "s_trace": "a reconstruction: only the abstract is public",
    }
    return [f"{words} | {rows[credit]} |" for credit, words in faithful.items()]


def headroom_share(method: str) -> str:
    """Returns the share of GRPO's rollouts that a method needs where the policy is wrong."""
    return shown_share(find("headroom/table", method=method, rate="0.002"))


def shown_share(row: Row) -> str:
    """Returns a share of rollouts with its interval: "0.54 (0.41 to 0.73)"."""
    share, low, high = (float(row[key]) for key in ("share", "share_low", "share_high"))
    return f"{share:.2f} ({low:.2f} to {high:.2f})"


def readme_sentences() -> list[str]:
    before, after = smollm2_accuracies()
    one, two = thread_seconds()
    mine = find("worth/my_method", method="my_method.py")
    surprisal = find("worth/my_method", method="grpo_arca.py --credit surprisal")
    verdict = surprisal["verdict"]
    assert mine["verdict"] == verdict
    rlsd = find("worth/my_method", method="rlsd.py")
    shuffled = find("worth/my_method", method="rlsd.py --credit shuffled")
    peak = plain(find(SMOLLM2, method="uniform (GRPO)")["peak_gb"], 1)
    right = size(chains("right alone"), "end")
    return [
        *ratios(),
        *end_table().splitlines(),
        f"differed from GRPO's by {end_over_grpo('ARCA')} with ARCA, by {end_over_grpo('OAR-G')} "
        f"with OAR-G, and by {end_over_grpo('S-trace')} with S-trace;",
        f"at the end by {size_difference('16')} with 16 completions a rollout, and by "
        f"{size_difference('128')} with 128.",
        f"reaches the final accuracy of GRPO after {headroom_share('least variance')} of GRPO's "
        f"rollouts",
        f"It reached the final accuracy of GRPO after {headroom_share('right answers only')} of "
        f"GRPO's rollouts, and on sixteen seeds with four updates a rollout after "
        f"{four_updates_share()}.",
        f"ARCA ended {size(chains('arca'), 'end')} below GRPO, at half of GRPO's learning rate.",
        f"it ends {right} above GRPO on sixteen seeds.",
        f"With SmolLM2, a real language model, {of_smollm2('right alone')} runs with this flag "
        f"learned, and {of_smollm2('uniform (GRPO)')} runs of GRPO.",
        f"Of runs with seeds 1 to {len(after)}, {of_smollm2('uniform (GRPO)')} learned: sampled "
        f"accuracy on 36 held-out problems was {percentages(before)} before training and "
        f"{percentages([end for end in after if end > LEARNED_ABOVE])} after it.",
        f"The others ended at {percentages([end for end in after if end <= LEARNED_ABOVE])}.",
        f"seven minutes of one core and {peak} GiB of memory",
        f"is {interval(mine, 'completions')} for `my_method.py` and "
        f'{interval(surprisal, "completions")} for surprisal. The verdict on both is "{verdict}"',
        f"RLSD is worth {interval(rlsd, 'completions')} and the control "
        f"{interval(shuffled, 'completions')}, so here it gains nothing that "
        f"{rlsd['batches']} batches can show.",
        f"a step took {one} seconds with one thread and {two} with two.",
        *marking_sentences(),
    ]


def marking_sentences() -> list[str]:
    """Returns how often the markers err, of as many right answers as wrong ones."""
    ours, now, trl, library = table("marking/table")
    wrote = f"wrote {ours['right']} right and {ours['wrong']} wrong answers"
    return [
        wrote,
        f"the rules missed {ours['missed']} of the right ones and paid {ours['paid']} of the wrong "
        f"ones. Math-verify with its defaults misses {library['missed']} and pays "
        f"{library['paid']}, and TRL's `accuracy_reward` misses {trl['missed']} and pays "
        f"{trl['paid']}",
        f"and now {now['missed']} are missed.",
    ]


def costs_sentences() -> list[str]:
    one, two = thread_seconds()
    return [f"a step took {one} seconds with one thread and {two} with two."]


def sweep_sentences() -> list[str]:
    found = {}
    for updates in ("1", "4"):
        for method in ("uniform", "s_trace-l0.9-q0.5"):
            row = find("strace_sweep/table", updates_per_rollout=updates, method=method)
            found[updates, method] = (
                plain(row["sampled_accuracy"]),
                plain(row["sampled_accuracy_std"]),
            )
    trace, deviation = found["4", "s_trace-l0.9-q0.5"]
    grpo, grpo_deviation = found["4", "uniform"]
    one, one_deviation = found["1", "s_trace-l0.9-q0.5"]
    grpo_one, grpo_one_deviation = found["1", "uniform"]
    return [
        f"lambda 0.9 and q 0.5 ended at {trace} (standard deviation {deviation}) with four updates",
        f"and GRPO at {grpo} ({grpo_deviation}).",
        f"they ended at {one} ({one_deviation}) and {grpo_one} ({grpo_one_deviation}).",
    ]


def results_sentences() -> list[str]:
    long_policy = untrained("chains of 8 operations, nearly right")
    cooler = untrained("chains of 8 operations, nearly right", "0.3")
    default = untrained("chains of 3 to 4 operations")
    before, _ = smollm2_accuracies()
    low, high = exact_interval(*counts("uniform (GRPO)"))
    learned_seeds, failed_seeds = seeds_of_grpo(True), seeds_of_grpo(False)
    equal = [
        span(of_quarters("zero_std_shares", quarter, which), 2)
        for which in (failed_seeds, learned_seeds)
        for quarter in (0, -1)
    ]
    entropies = [span(of_quarters("entropies", -1, s)) for s in (failed_seeds, learned_seeds)]
    distances = [span(final_kls(s), 2) for s in (failed_seeds, learned_seeds)]
    methods = ["GRPO", "right answers only", "ARCA", "S-trace"]
    one = seeds([*methods, "OAR-G"])
    four = seeds([f"{method}, four updates" for method in methods])
    null = find("worth/study_8_operations", method="other samples")
    probability = find("worth/study_8_operations", method="right alone, by probability")
    arca = find("worth/smollm2_middle", method="grpo_arca.py --credit arca")
    trace = find("worth/smollm2_middle", method="grpo_strace.py")
    mine = find("worth/8_operations_start", method="my_method.py")
    late_policy = "3-4 operations, step 45"
    late = find("worth/study_3_to_4_operations", setting=late_policy, method="arca")
    trained = "runs/grpo_oar-oar_g-1"
    auroc = plain(find("decisive_tokens/table", policy=trained, credit="arca")["auroc"], 2)
    ranks = [row["rank"] for row in table("decisive_tokens/table") if row["credit"] == "oar_g"]
    grpo = plain(find("headroom/table", method="GRPO", rate="0.002")["end"])
    half = find("worth/8_operations_start", method="half of the groups")
    return [
        f"{grpo} means that {100 * float(grpo):.1f}% of sampled answers are right.",
        f"A run *learned* if its sampled accuracy ended above {LEARNED_ABOVE}.",
        f"it solves {plain(long_policy['greedy_accuracy'])} of the problems greedily, "
        f"{plain(cooler['sampled_accuracy'])} when tokens are drawn at temperature 0.3, and "
        f"{plain(long_policy['sampled_accuracy'])} at temperature 1.",
        f"anything from {low:.0%} to {high:.0%}.",
        holm_sentence(),
        f"the share of such groups was {equal[0]} in the first five rollouts and {equal[1]} in the "
        f"last five; in the runs that learned it was {equal[2]} and {equal[3]}.",
        f"at the end it is {entropies[0]} nats where a run failed, and {entropies[1]} where it "
        "learned.",
        f"its KL divergence from the base is {distances[0]} nats a token, and {distances[1]} where "
        "a run learned.",
        f"by Fisher's exact test, p is {fisher_p('oar_g'):.2f}.",
        *without_steps(),
        f"On seed 9, where {groups_with_gradient('9')} of the first 40 groups gave one, all five "
        "methods with twelve seeds failed.",
        f"intervals over paired seeds: {one} with one update, and {four} with four.",
        f"reach GRPO's end after {share_of_rollouts('one update')} of its rollouts",
        f"with four updates after {share_of_rollouts('four updates')}.",
        f"solves {plain(default['greedy_accuracy'])} of the problems greedily before training.",
        *sweep_sentences(),
        f"sampled accuracy is {min(before):.3f} to {max(before):.3f}.",
        f"a direction of {plain(probability['direction'], 2)}: it points elsewhere",
        f"In Adam's worth it is: {interval(null, 'adam')}.",
        f"In plain worth it is not: {interval(null, 'worth')}.",
        f"its Adam's worth is {interval(half, 'adam')} and not a half, because Adam shrinks",
        f"The power {completions_power():.2f} turns {plain(half['adam'], 2)} into a half, so",
        f"ARCA is worth {interval(arca, 'adam')}, less than GRPO, and",
        f"S-trace {interval(trace, 'adam')}, which cannot be told from it.",
        f"with an AUROC of {auroc}. Its gradient",
        f"after 45 updates, it is worth {interval(late, 'adam')}.",
        f"OAR-G with OAR-P is {ranks[0]} before training and {ranks[1]} after.",
        f"It is worth {interval(mine, 'adam')} to Adam",
        f"reaches GRPO's end after {headroom_share('least variance')} of its rollouts",
        f"and right answers only after {headroom_share('right answers only')}.",
    ]


def precision_sentences() -> list[str]:
    merged = "weights in bf16, merged: of the exact change"
    beside = "all in bf16, dense: of the training forward's change"
    whole = plain(find("precision/smollm2", what=merged, size="1")["slope"], 2)
    tiny = plain(find("precision/smollm2", what=merged, size="0.003")["slope"], 2)
    sizes = ("1", "0.3", "0.1", "0.03", "0.01", "0.003")
    rows = [find("precision/smollm2", what=beside, size=size) for size in sizes]
    slopes = [plain(row["slope"], 2) for row in rows]
    listed = ", ".join(slopes[:-1])
    return [
        f"{whole} of its change of the log-probabilities is left ({tiny} for an adapter",
        f"rounded by about {plain(rows[0]['change'])} nats",
        f"The slopes are {listed} and {slopes[-1]} at 1, 0.3, 0.1, 0.03, 0.01 and 0.003 times",
    ]


SENTENCES: dict[str, Callable[[], list[str]]] = {
    "README.md": readme_sentences,
    "results/README.md": results_sentences,
    "results/COSTS.md": costs_sentences,
    "results/BF16.md": precision_sentences,
}
SETTINGS = {  # numbers that describe what was done, and were not measured
    "README.md": ["95% confidence intervals", "the 95% intervals of the means"],
    "results/README.md": [
        "95% confidence",
        "the 95% intervals of the means",
        "95% intervals",
        "significant at 5%",
        "torch 2.13.0",
    ],
    "results/COSTS.md": ["0.6 GiB for CUDA and 5% for fragmentation"],
    "results/BF16.md": ["0.003 times the size"],
}


def one_line(text: str) -> str:
    """Returns the text with every run of white space as one space."""
    return " ".join(text.split())


def page_text(name: str) -> str:
    return one_line((ROOT / name).read_text(encoding="utf-8"))


def test_the_readmes_methods_are_measured_until_the_control_holds() -> None:
    half = find("worth/my_method", method="half of the groups")
    assert half["verdict"] == "control: holds"
    rlsd = find("worth/my_method", method="rlsd.py")
    assert float(rlsd["adam_low"]) < 1 < float(rlsd["adam_high"])
    shuffled = find("worth/my_method", method="rlsd.py --credit shuffled")
    assert shuffled["verdict"] == "within 2% of GRPO"
    text = page_text("README.md")
    assert text.count(f"--batches {half['batches']}") == 2


def statements(name: str) -> list[str]:
    """Returns every table row and sentence that must stand on a page."""
    found = SENTENCES[name]()
    for rows_of_a_table in TABLES[name]:
        found += rows_of_a_table()
    return [one_line(statement) for statement in found]


@pytest.mark.parametrize("name", SENTENCES)
def test_a_pages_numbers_are_those_of_the_files(name: str) -> None:
    text = page_text(name)
    missing = [statement for statement in statements(name) if statement not in text]
    assert missing == []


@pytest.mark.parametrize("name", SENTENCES)
def test_a_page_has_no_number_of_its_own(name: str) -> None:
    """Beside those checked above: code, links, versions of programs and settings may have some."""
    text = (ROOT / name).read_text(encoding="utf-8")
    text = re.sub(r"```(?:bash|python)\n.*?```", "", text, flags=re.S)
    text = one_line(re.sub(r"\[\d{4}\.\d{5}\]|`[^`]*`|\(https?:[^)]*\)", "", text))
    text = re.sub(r"(?:TRL|Python|Ernie|Qwen 2 to|Exaone|Qwen|Phi-|Gemma) ?\d\.\d+", "", text)
    for statement in statements(name) + SETTINGS[name]:
        without_code = one_line(re.sub(r"`[^`]*`", "", statement))
        text = text.replace(without_code, "")
    assert re.findall(r".{0,40}\d*\.\d+.{0,20}|.{0,40}\d%.{0,20}", text) == []


@pytest.mark.parametrize("name", SENTENCES)
def test_a_pages_pictures_and_links_exist(name: str) -> None:
    page = ROOT / name
    targets = re.findall(r"\]\(([^)#]+)", page.read_text(encoding="utf-8"))
    local = [target for target in targets if not target.startswith("http")]
    assert len(local) > 0
    missing = [target for target in local if not (page.parent / target).exists()]
    assert missing == []
