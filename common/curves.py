"""curves.png: the learning curves of a run."""

from __future__ import annotations

import math
from typing import Any

from common.reward import ACCURACY
from common.run_log import finite_or_nan, flat_row

TRAINING_ACCURACY = f"rewards/{ACCURACY}/mean"
COLORS = ("#0072B2", "#D55E00", "#8A8F98", "#CC79A7")  # of a panel's lines (Okabe-Ito)
STYLE = {  # of matplotlib
    "font.size": 13, "axes.titlesize": 15, "axes.edgecolor": "#9aa0a6", "axes.axisbelow": True,
    "axes.spines.top": False, "axes.spines.right": False, "xtick.major.size": 0,
    "ytick.major.size": 0, "grid.color": "#e3e6ea", "legend.frameon": False, "legend.fontsize": 12,
    "legend.handlelength": 1.1, "legend.handletextpad": 0.4, "legend.columnspacing": 1.0,
}  # fmt: skip

ACCURACY_PANEL = "Accuracy"
# The title of each panel, with the key and the label of each line. A line whose label ends in
# "(right)" has an axis of its own, on the right.
PANELS = {
    ACCURACY_PANEL: [
        ("eval/sampled_accuracy", "held out, sampled"),
        ("eval/greedy_accuracy", "held out, greedy"),
        (TRAINING_ACCURACY, "training"),
    ],
    "Entropy and KL (nats per token)": [
        ("entropy", "entropy: how undecided the policy is"),
        ("kl", "KL: how far it is from the base (right)"),
    ],
    "How unevenly credit is spread": [
        ("weight_gini", "Gini: 0 even, 1 all on one token"),
        ("weight_effn", "EffN/T: share of tokens that count; 1 even"),
    ],
    "Completion length": [
        ("completion_length", "tokens"),
        ("truncated_share", "share cut off at the limit (right)"),
    ],
    "Update size": [
        ("grad_norm", "gradient norm"),
        ("clip_fraction", "share of tokens clipped (right)"),
    ],
    "Seconds per step": [
        ("seconds_rollout", "rollout"),
        ("seconds_score", "score"),
        ("seconds_update", "update"),
        ("seconds_credit", "credit"),
    ],
}


def write_curves(path: str, rows: list[dict[str, Any]], title: str) -> None:
    """Writes curves.png, 1500 x 850 pixels, from the rows of a RunLog.

    Rows may lack keys, or hold None.
    """
    import matplotlib
    from matplotlib.figure import Figure  # not pyplot: no global figures, no backend switch
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    rows = [flat_row(row) for row in rows]
    with matplotlib.rc_context(STYLE):
        layout = ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.12, wspace=0.03, hspace=0.04)
        figure = Figure(figsize=(15, 8.5), dpi=100, layout=layout, facecolor="white")
        figure.suptitle(title, fontsize=18, fontweight="bold", parse_math=False)
        panels = figure.subplots(2, 3).flat
        for ax, (name, lines) in zip(panels, PANELS.items(), strict=True):
            more = fourth_line(rows) if name == ACCURACY_PANEL else []
            draw_panel(ax, rows, name, lines + more)
        figure.savefig(path, format="png")


def fourth_line(rows: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """Returns the key and label of one more line for the accuracies, if there is one.

    That is the reward, where it is not the training accuracy, and otherwise pass@k for the largest
    k. There is no room for both.
    """
    if series(rows, "reward") != series(rows, TRAINING_ACCURACY):
        return [("reward", "reward (right)")]
    for row in reversed(rows):
        keys = [key for key in row if key.startswith("eval/pass@")]
        if keys:
            return [(keys[-1], "held out, " + keys[-1].removeprefix("eval/"))]
    return []


def series(rows: list[dict[str, Any]], key: str) -> tuple[list[float], list[float]]:
    """Returns the steps and the values of the rows that hold a finite number under a key."""
    steps = []
    values = []
    for row in rows:
        value = finite_or_nan(row.get(key))
        if not math.isnan(value):
            steps.append(row["step"])
            values.append(value)
    return steps, values


def draw_panel(
    ax: Any, rows: list[dict[str, Any]], title: str, lines: list[tuple[str, str]]
) -> None:
    """Draws a panel with all its lines, or says in it that none of them was logged."""
    ax.set_title(title, loc="left", fontweight="bold", pad=52)
    for (key, label), color in zip(lines, COLORS, strict=False):
        draw_line(ax, rows, key, label, color)
    if not ax.lines:
        ax.set_axis_off()
        ax.text(0.5, 0.5, "not logged", ha="center", color="grey", transform=ax.transAxes)
        return
    # The legend stands in two rows above the data, so that it hides none. A wide one must not
    # narrow its panel.
    columns = (len(lines) + 1) // 2
    legend = ax.legend(loc="lower left", bbox_to_anchor=(-0.02, 0.99), ncols=columns)
    legend.set_in_layout(False)
    ax.grid(axis="y")
    ax.locator_params(axis="x", integer=True, nbins=6)
    last_step = max(row["step"] for row in rows)
    ax.set_xlim(-0.01 * last_step - 0.5, last_step * 1.02 + 0.5)
    ax.set_xlabel("step", color="#5f6368")


def draw_line(ax: Any, rows: list[dict[str, Any]], key: str, label: str, color: str) -> None:
    """Draws a series as a pale line with a smoothed one over it; evaluations as they are."""
    steps, values = series(rows, key)
    if not steps:
        return
    is_evaluation = key.startswith("eval/")
    is_on_the_right = label.endswith("(right)")
    if is_on_the_right:
        ax.plot([], [], color=color, linewidth=2, label=label)  # for the legend
        ax = ax.twinx()
        ax.tick_params(axis="y", colors=color)
    if not is_evaluation:
        ax.plot(steps, values, color=color, alpha=0.3, linewidth=1)
        values = smoothed(values)
    marker = "o" if is_evaluation or len(steps) < 12 else None
    ax.plot(steps, values, color=color, linewidth=2, label=label, marker=marker, markersize=5)
    if is_on_the_right and min(values) >= 0:
        ax.set_ylim(bottom=0)


def smoothed(values: list[float]) -> list[float]:
    """Returns the centered mean over a tenth of the run, over fewer values at its ends."""
    half = max(1, len(values) // 20)
    means = []
    for i in range(len(values)):
        window = values[max(0, i - half) : i + half + 1]
        means.append(sum(window) / len(window))
    return means
