"""Puts the studies side by side, from their published tables: the figures of results/README.md.

    python results/answer.py

It trains nothing, and writes to results/data/answer/:

    differences.csv  what each method has over GRPO in each study, with the p-value of a paired
                     t-test, and with Holm's correction for all tests of the file
    differences.png  the same as a forest plot, a dot for a seed
    prediction.csv   the share of GRPO's rollouts that a method's worth before training predicts,
                     and the share that training showed
    prediction.png   the same as a figure

A method has no interval and no test in a study where some of its runs did not learn.
"""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import headroom
import numpy as np
from headroom import read_csv, stored_curves
from learning_curves import AT_GRPOS_RATE, LABELS, LEARNED_ABOVE, interval, write_table

ROOT = Path(__file__).resolve().parents[1]
DATA = ROOT / "results/data"
OUTPUT = DATA / "answer"
GRPO = headroom.GRPO
SHOWN = ("least variance", "right answers only", "ARCA", "OAR-G", "S-trace")  # top to bottom
ROLLOUT_SIZES = {  # completions a rollout -> the flags in the file's name
    16: "-per_device_train_batch_size-16-gradient_accumulation_steps-1-learning_rate-0.002",
    128: "",
}
NEVER = 1.2  # where the figure puts a share that was not reached

Curves = dict[str, dict[int, np.ndarray]]  # method -> seed -> held-out sampled accuracies


class Study(NamedTuple):
    """One comparison of methods with GRPO, on the same seeds."""

    title: str
    curves: Curves


# ---- Reading -------------------------------------------------------------------------------------
def headroom_curves(methods: dict[str, str], rate: str) -> Curves:
    """Returns the curves of headroom.py's whole runs at a rate. `methods` has their names here."""
    runs = read_csv(DATA / "headroom/runs.csv")
    points = 1 + headroom.ROLLOUTS // headroom.EVERY
    curves: Curves = {}
    for name, shown in methods.items():
        found = stored_curves(runs, name, rate)
        whole = {seed: curve for seed, curve in found.items() if len(curve) == points}
        if whole:
            curves[shown] = whole
    return curves


def learning_curves_of(table: str, regime: str, labels: dict[str, str]) -> Curves:
    """Returns the curves of the runs that learning_curves.py has made."""
    curves: Curves = {}
    for row in read_csv(DATA / f"learning_curves/{table}_runs.csv"):
        if row["regime"] == regime:
            accuracies = np.array([float(number) for number in row["accuracies"].split()])
            curves.setdefault(labels[row["method"]], {})[int(row["seed"])] = accuracies
    return curves


def wrong_policy_curves() -> Curves:
    """Returns the curves of all methods and variants at all rates, with one update a rollout."""
    curves = headroom_curves({name: name for name in headroom.COMMANDS}, headroom.RATE)
    curves.pop(headroom.GRPO_WITH_KL, None)  # the same run as GRPO
    for rate in headroom.OTHER_RATES:
        labels = {name: f"{name}, rate {rate}" for name in headroom.METHODS}
        curves |= headroom_curves(labels, rate)
    return curves


def studies() -> list[Study]:
    """Returns all studies, the one with the most to learn first."""
    four = {name: name.removesuffix(", four updates") for name in headroom.FOUR_UPDATES}
    found = [
        Study("wrong policy, one update", wrong_policy_curves()),
        Study("wrong policy, four updates", headroom_curves(four, headroom.RATE_FOUR_UPDATES)),
        Study("sharpening, one update", learning_curves_of("chains", "one update", LABELS)),
        Study("sharpening, four updates", learning_curves_of("chains", "four updates", LABELS)),
        Study("SmolLM2", learning_curves_of("smollm2", "SmolLM2", LABELS | AT_GRPOS_RATE)),
    ]
    return [study for study in found if len(study.curves) > 1]


def rollout_size_studies() -> list[Study]:
    """Returns two studies of which only the ends are kept: small and large rollouts."""
    found = []
    for completions, flags in ROLLOUT_SIZES.items():
        curves: Curves = {}
        for method, own_flags in ((GRPO, ""), ("right answers only", "-negative_weight-0")):
            path = DATA / f"batch_size/grpo_arca-uniform{own_flags}{flags}.json"
            runs = json.loads(path.read_text())["runs"]
            ends = {run["seed"]: np.array([run["after"]["sampled_accuracy"]]) for run in runs}
            curves[method] = ends
        found.append(Study(f"default command, {completions} completions", curves))
    return found


# ---- Differences to GRPO -------------------------------------------------------------------------
def paired_differences(study: Study, method: str) -> dict[str, np.ndarray]:
    """Returns what a method has over GRPO on each seed that both have: "area" and "end".

    A study that keeps no more than the ends has no area.
    """
    own = study.curves[method]
    other = study.curves[GRPO]
    seeds = sorted(own.keys() & other.keys())
    curves = np.array([own[seed] for seed in seeds])
    others = np.array([other[seed] for seed in seeds])
    found = {}
    if curves.shape[1] > 1:
        found["area"] = headroom.area(curves) - headroom.area(others)
    return found | {"end": curves[:, -1] - others[:, -1]}


def all_learned(study: Study, method: str) -> bool:
    """Returns whether every run of the method learned, and GRPO on the same seeds.

    On the wrong policy, and with small rollouts, no run is taken for failed: not all runs of GRPO
    itself end above a half.
    """
    if study.title.startswith(("wrong policy", "default command")):
        return True
    own = study.curves[method]
    other = study.curves[GRPO]
    runs = [*own.values(), *(other[seed] for seed in own.keys() & other.keys())]
    return all(curve[-1] > LEARNED_ABOVE for curve in runs)


def two_sided_p(differences: np.ndarray) -> float:
    """Returns the p-value of a paired t-test: the density of Student's t beyond the statistic."""
    count = len(differences)
    degrees = count - 1
    statistic = abs(differences.mean()) / (differences.std(ddof=1) / count**0.5)
    # With t = sqrt(degrees) tan(a) the density is proportional to cos(a)^(degrees - 1).
    angle = math.atan(statistic / degrees**0.5)
    inside = np.trapezoid(np.cos(np.linspace(0, angle, 100_001)) ** (degrees - 1), dx=angle / 1e5)
    log_scale = math.lgamma((degrees + 1) / 2) - math.lgamma(degrees / 2) - math.log(math.pi) / 2
    return max(0.0, 1 - 2 * math.exp(log_scale) * inside)


def holm(p_values: Sequence[float]) -> list[float]:
    """Returns p-values corrected for all of them together (Holm, 1979)."""
    order = np.argsort(p_values)
    corrected = [0.0] * len(p_values)
    largest = 0.0
    for rank, place in enumerate(order):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[place]))
        corrected[place] = largest
    return corrected


def difference_rows(found: list[Study]) -> list[dict[str, Any]]:
    """Returns a line for each study, method and figure, with its corrected p-value."""
    rows: list[dict[str, Any]] = []
    for study in found:
        for method in study.curves:
            if method == GRPO:
                continue
            for figure, values in paired_differences(study, method).items():
                row: dict[str, Any]
                row = {"study": study.title, "method": method, "figure": figure}
                row |= {"seeds": len(values), "more": values.mean()}
                row |= {"low": "", "high": "", "p": "", "p_holm": ""}
                if len(values) >= headroom.FEWEST_SEEDS and all_learned(study, method):
                    row["low"], row["high"] = interval(values)
                    row["p"] = two_sided_p(values)
                rows.append(row)
    tested = [row for row in rows if row["p"] != ""]
    for row, corrected in zip(tested, holm([row["p"] for row in tested]), strict=True):
        row["p_holm"] = corrected
    return rows


def draw_differences(found: list[Study], rows: list[dict[str, Any]], path: Path) -> None:
    """Saves the forest plot: a panel for each study, a dot for each seed."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    size = (2.6 + 2.5 * len(found), 3.6)
    figure, panels = plt.subplots(1, len(found), figsize=size, layout="constrained", sharey=True)
    for panel, study in zip(panels, found, strict=True):
        for place, method in enumerate(SHOWN):
            if method not in study.curves:
                box = {"facecolor": "white", "edgecolor": "none", "pad": 2}
                at = {"ha": "center", "va": "center"}
                panel.text(0, place, "not run", color="#888888", bbox=box, **at)
                continue
            color = headroom.COLORS[method]
            values = paired_differences(study, method)["end"]
            panel.plot(values, [place] * len(values), "o", color=color, markersize=5, alpha=0.45)
            key = (study.title, method, "end")
            row = next(row for row in rows if (row["study"], row["method"], row["figure"]) == key)
            if row["low"] != "":
                limits = [row["low"], row["high"]]
                panel.plot(limits, [place, place], color=color, linewidth=3, alpha=0.6)
                panel.plot(row["more"], place, "D", color=color, markeredgecolor="white")
        panel.axvline(0, color="black", linewidth=1)
        runs = len(study.curves[GRPO])
        panel.set_title(f"{study.title}\n({runs} seeds of GRPO)", loc="left", fontsize=10)
        panel.grid(axis="x", alpha=0.3)
        panel.spines[["top", "right"]].set_visible(False)
    labels = [f"{name} (oracle)" if name == "least variance" else name for name in SHOWN]
    panels[0].set_yticks(range(len(SHOWN)), labels)
    panels[0].set_ylim(len(SHOWN) - 0.5, -0.5)
    figure.supxlabel("difference from GRPO in held-out sampled accuracy at the end", fontsize=10)
    figure.savefig(path, dpi=110)
    plt.close(figure)


# ---- What worth predicts -------------------------------------------------------------------------
def prediction_row(task: str, worth: dict[str, str], share: Sequence[float]) -> dict[str, Any]:
    """Returns a line of prediction.csv. A share is a value and the ends of its interval.

    The interval of the predicted share holds the uncertainty of the control, by which worth becomes
    a number of completions.
    """
    ends = ("", "_low", "_high")
    completions, fewest, most = (float(worth[f"completions{end}"]) for end in ends)
    row: dict[str, Any] = {"task": task, "method": LABELS.get(worth["method"], worth["method"])}
    row |= {f"adam{end}": float(worth[f"adam{end}"]) for end in ("", "_low", "_high")}
    row |= {"completions": completions, "predicted": 1 / completions}
    row |= {"predicted_low": 1 / most, "predicted_high": 1 / fewest}
    return row | dict(zip(("share", "share_low", "share_high"), share, strict=True))


def prediction_rows() -> list[dict[str, Any]]:
    """Returns a line for each method whose worth was measured before training, and its share."""
    rows = []
    trained = {row["method"]: row for row in read_csv(DATA / "learning_curves/chains.csv")
               if row["regime"] == "one update"}  # fmt: skip
    measured = read_csv(DATA / "worth/8_operations_start.csv")
    for worth in measured:
        names = [name for name in trained if LABELS.get(name) == LABELS.get(worth["method"])]
        if worth["method"] not in LABELS or worth["method"] == "uniform (GRPO)" or not names:
            continue
        row = trained[names[0]]
        share = [float(row[f"share_{key}"]) for key in ("of_rollouts", "low", "high")]
        rows.append(prediction_row("sharpening", worth, share))

    at_rate = {row["method"]: row for row in read_csv(DATA / "headroom/table.csv")
               if row["rate"] == headroom.RATE}  # fmt: skip
    measured = read_csv(DATA / "worth/study_misconceived.csv")
    for worth in measured:
        name = LABELS.get(worth["method"])
        if name in at_rate and name != GRPO:
            row = at_rate[name]
            share = [float(row[key]) for key in ("share", "share_low", "share_high")]
            rows.append(prediction_row("wrong policy", worth, share))
    return rows


def draw_prediction(rows: list[dict[str, Any]], path: Path) -> None:
    """Saves the figure: predicted share against that of training. On the line they are equal."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(10, 5.5), layout="constrained")
    for row in rows:
        color = headroom.COLORS.get(row["method"], "#888888")
        is_wrong_policy = row["task"] == "wrong policy"
        x = row["predicted"]
        y = min(row["share"], NEVER)
        ends = np.minimum([row["share_low"], row["share_high"]], NEVER)
        axes.plot([x, x], ends, color=color, linewidth=2, alpha=0.4)
        ends = np.minimum([row["predicted_low"], row["predicted_high"]], NEVER)
        axes.plot(ends, [y, y], color=color, linewidth=2, alpha=0.4)
        label = f"{row['method']}, {row['task']}"
        marker = "D" if is_wrong_policy else "o"
        axes.plot(x, y, marker, color=color, markersize=8, label=label)
    axes.plot([0, NEVER], [0, NEVER], color="#888888", linewidth=1, linestyle="--")
    axes.axhline(NEVER, color="#888888", linewidth=1)
    axes.text(0.3, NEVER + 0.02, "not reached", fontsize=9, color="#666666")
    axes.set_xlim(0, NEVER + 0.1)
    axes.set_ylim(0, NEVER + 0.1)
    axes.set_xlabel("predicted from worth, before training")
    axes.set_ylabel("measured in training")
    axes.set_title("Share of GRPO's rollouts to reach GRPO's end", loc="left")
    figure.legend(frameon=False, fontsize=9, loc="outside right upper")
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main() -> None:
    found = studies()
    rows = difference_rows([*found, *rollout_size_studies()])
    write_table(rows, OUTPUT / "differences.csv")
    draw_differences(found, rows, OUTPUT / "differences.png")
    predictions = prediction_rows()
    write_table(predictions, OUTPUT / "prediction.csv")
    draw_prediction(predictions, OUTPUT / "prediction.png")
    for row in rows:
        print(*(f"{x:.4g}" if isinstance(x, float) else x for x in row.values()), sep="  ")
    for row in predictions:
        print(*(f"{x:.3g}" if isinstance(x, float) else x for x in row.values()), sep="  ")


if __name__ == "__main__":
    main()
