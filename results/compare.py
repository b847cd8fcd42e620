"""Draws results/compare.png from the results/*.json that learning.py has written.

    python results/compare.py

Left, the mean reward of every step's completions, smoothed over 5 steps: the mean over seeds and
the range of single seeds. Right, held-out sampled accuracy at the end: every seed, and the mean.
"""

import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

FOLDER = Path(__file__).resolve().parent
RUNS = {  # name -> file and colour (Okabe and Ito's, which the colour-blind tell apart)
    "uniform (GRPO)": ("grpo_arca-uniform", "#000000"),
    "arca": ("grpo_arca-default", "#0072B2"),
    "shuffled (arca's weights, permuted)": ("grpo_arca-shuffled", "#56B4E9"),
    "oar_g": ("grpo_oar-default", "#D55E00"),
    "s_trace": ("grpo_strace-default", "#009E73"),
    "p_trace": ("grpo_strace-p_trace", "#CC79A7"),
}


def main() -> None:
    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 4.6), width_ratios=(3, 2))
    for place, (name, (file, colour)) in enumerate(RUNS.items()):
        runs = json.loads((FOLDER / f"{file}.json").read_text())["runs"]
        smooth = [np.convolve(run["rewards"], np.ones(5) / 5, "valid") for run in runs]
        steps = np.arange(len(smooth[0])) + 3  # the middle of each window
        left.fill_between(steps, np.min(smooth, 0), np.max(smooth, 0), color=colour, alpha=0.08)
        left.plot(steps, np.mean(smooth, 0), color=colour, label=name)
        after = [run["after"]["sampled_accuracy"] for run in runs]
        right.plot(after, [place] * len(after), "o", color=colour, alpha=0.6)
        right.plot([np.mean(after)] * 2, [place - 0.3, place + 0.3], color=colour, linewidth=3)
    bold = {"loc": "left", "fontsize": 11, "fontweight": "bold"}
    left.set_title("Reward in training", **bold)
    left.set_xlabel("step")
    left.legend(frameon=False, fontsize=9)
    right.set_title("Held-out accuracy at the end, 3 seeds", **bold)
    right.set_yticks(range(len(RUNS)), [name.split(" (")[0] for name in RUNS])
    right.invert_yaxis()
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(FOLDER / "compare.png", dpi=110)


if __name__ == "__main__":
    main()
