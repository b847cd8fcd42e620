"""Draws runs side by side and prints their table: rewards in training, and how they ended.

    python tools/compare.py runs/*                   # the picture is ./compare.png
    python tools/compare.py runs/* --output a.pdf

Runs that differ in the seed alone (or in where they write, what they save and on what they run) are
one group. A group is called by the first of its folders and by what tells it from the other groups.
Left, the mean reward of a group's runs, smoothed over a tenth of the steps, and the range of single
runs. Right, the evaluation after the last step, by the figure that chooses the best one: a dot a
run, a bar at the mean. The table has that figure before and after training, as a mean over the runs
and, of several, their standard deviation.
"""

import argparse
import json
import sys
import textwrap
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import pandas

# Okabe and Ito's, which color-blind people can tell apart. Beyond these, other dashes.
COLORS = ("#000000", "#0072B2", "#56B4E9", "#D55E00", "#009E73", "#CC79A7", "#E69F00")
DASHES = ("-", "--", ":", "-.")
# Flags that say where a run writes, with which seed or on what it runs, and not what it does
SAME_ANYWAY = {
    "seed",
    "output_dir",
    "resume_from_checkpoint",
    "report_to",
    "save_steps",
    "save_total_limit",
    "eval_steps",
    "per_device_eval_batch_size",
    "per_device_rollout_batch_size",
    "gradient_checkpointing",
    "rollout_weights",
    "cuda_graphs",
    "trains",
    "environment",
}


class Run(NamedTuple):
    """What a run came to."""

    folder: Path
    config: dict[str, Any]  # what tells it from runs of other groups
    rewards: pandas.Series  # of every step; NaN where no reward function applied
    metric: str  # the figure of the next two
    before: float
    after: float


# ---- Reading runs --------------------------------------------------------------------------------
def read_run(folder: Path) -> Run:
    """Returns what a finished run left in its folder."""
    summary = json.loads((folder / "summary.json").read_text())
    config = json.loads((folder / "config.json").read_text())
    environment = config["environment"]
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    updates = [row for row in map(json.loads, lines) if "reward" in row]
    (metric,) = summary["best"].keys() - {"step", "weights"}
    return Run(
        folder,
        {name: value for name, value in config.items() if name not in SAME_ANYWAY}
        | {"script": Path(environment["command"][0]).stem, "commit": environment["commit"]},
        pandas.Series([row["reward"] for row in updates], dtype=float),
        metric,
        summary["before"].get(metric, float("nan")),
        summary["after"][metric],
    )


def differences(config: dict[str, Any], others: list[dict[str, Any]]) -> str:
    """Returns "flag value, ..." for each flag in which a group differs from any other one.

    A flag that the other one does not have, such as a method's own, tells nothing.
    """
    found = []
    for name, value in sorted(config.items()):
        if any(name in other and other[name] != value for other in others):
            found.append(f"{name} {value}")
    return ", ".join(found)


def groups_of(runs: list[Run]) -> dict[str, list[Run]]:
    """Returns the runs of each group by its label: its folders, and what differs."""
    members: dict[str, list[Run]] = {}
    for run in runs:
        members.setdefault(json.dumps(run.config, sort_keys=True), []).append(run)
    configs = [group[0].config for group in members.values()]
    groups = {}
    for group in members.values():
        label = group[0].folder.resolve().name
        if len(group) > 1:
            label += f" and {len(group) - 1} more"
        groups[f"{label}: {differences(group[0].config, configs)}"] = group
    return groups
