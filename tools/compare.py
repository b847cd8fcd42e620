"""Draws runs side by side and prints their table: rewards in training, and how they ended.

    python tools/compare.py runs/*                   # the picture is ./compare.png
    python tools/compare.py runs/* --output a.pdf

Runs that differ only in the seed, or in where they write, what they save or on what they run, are
one group. Its name has the first of its folders and what tells it from the other groups. If its
runs were made by different code, a warning follows the table.

The left panel has the mean reward of a group's runs, smoothed over a tenth of the steps, and the
range of single runs. The right one has the evaluation after the last step, in the figure that
chooses the best one: a dot for each run, and a bar at the mean. The table has that figure before
and after training: the mean over the runs and, if there are several, their standard deviation. A
line reports each folder that is left out because no run has finished there.
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
# Flags for where a run writes, its seed and what it runs on, which do not change what it does
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
    "adapter_size",
    "environment",
    "code of the script",
}


class Run(NamedTuple):
    """What is shown of a run."""

    folder: Path
    config: dict[str, Any]  # what tells it from runs of other groups
    commit: str  # of its code, and a digest of its script, which git may ignore
    rewards: pandas.Series  # by step; NaN where no reward function applied
    metric: str  # the figure of the next two
    before: float
    after: float


Groups = dict[str, list[Run]]  # the runs of a group by its label


# ---- Reading runs --------------------------------------------------------------------------------
def has_ended(folder: Path) -> bool:
    """Returns whether the last run in a folder has ended. While it goes on, a summary is old."""
    summary = folder / "summary.json"
    return summary.exists() and (
        json.loads(summary.read_text())["steps"]
        == json.loads((folder / "config.json").read_text())["max_steps"]
    )


def read_run(folder: Path) -> Run:
    """Returns what a finished run left in its folder."""
    summary = json.loads((folder / "summary.json").read_text())
    config = json.loads((folder / "config.json").read_text())
    environment = config["environment"]
    told = {name: value for name, value in config.items() if name not in SAME_ANYWAY}
    for name in ("gradient_accumulation_steps", "steps_per_generation"):
        told[name] *= environment["hardware"]["processes"]
    rows = pandas.read_json(folder / "metrics.jsonl", lines=True)
    updates = rows[rows["loss"].notna()].set_index("step") if "loss" in rows else rows[:0]
    (metric,) = summary["best"].keys() - {"step", "weights"}
    return Run(
        folder.resolve(),
        told | {"script": Path(environment["command"][0]).stem},
        f"{environment['commit']} {config.get('code of the script')}",
        updates.get("reward", pandas.Series(dtype=float)).astype(float),
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


def groups_of(runs: list[Run]) -> Groups:
    """Returns the runs of each group by its label: its folders, and what differs."""
    members: dict[str, list[Run]] = {}
    for run in runs:
        members.setdefault(json.dumps(run.config, sort_keys=True), []).append(run)
    configs = [group[0].config for group in members.values()]
    groups = {}
    for number, group in enumerate(members.values(), 1):
        label = f"{number}  {group[0].folder.name}"
        if len(group) > 1:
            label += f" and {len(group) - 1} more"
        telling = differences(group[0].config, configs)
        groups[f"{label}: {telling}" if telling else label] = group
    return groups


# ---- The table and the picture -------------------------------------------------------------------
def with_spread(values: list[float]) -> str:
    """Returns "mean", or "mean (standard deviation)" of several values."""
    series = pandas.Series(values)
    deviation = f" ({series.std():.3f})" if len(values) > 1 else ""
    return f"{series.mean():.3f}{deviation}"


def table(groups: Groups) -> str:
    """Returns a line for each group, and a warning for each whose runs differ in their code."""
    lines = [f"{'runs':6}{'before':15}{'after':15}{'figure':18}group"]
    warnings = []
    for label, runs in groups.items():
        before = with_spread([run.before for run in runs])
        after = with_spread([run.after for run in runs])
        lines.append(f"{len(runs):<6}{before:15}{after:15}{runs[0].metric:18}{label}")
        commits = sorted({run.commit for run in runs})
        if len(commits) > 1:
            warnings.append(f"Warning: the code of group {label} differs: {', '.join(commits)}")
    return "\n".join(lines + warnings)


def draw(groups: Groups, output: Path) -> None:
    """Draws both panels. Labels, which may be long, stand in full below them."""
    height = 4.2 + 0.5 * len(groups)
    figure, (left, right) = plt.subplots(
        1, 2, figsize=(12, height), width_ratios=(3, 2), layout="constrained"
    )
    for place, (label, runs) in enumerate(groups.items()):
        color = COLORS[place % len(COLORS)]
        dashes = DASHES[place // len(COLORS) % len(DASHES)]
        rewards = pandas.concat([run.rewards for run in runs], axis=1)  # a column for each run
        window = len(rewards) // 10 + 1
        smooth = rewards.rolling(window, center=True, min_periods=1).mean()
        lowest = smooth.min(axis=1)
        left.fill_between(smooth.index, lowest, smooth.max(axis=1), color=color, alpha=0.12)
        left.plot(smooth.mean(axis=1), color=color, linestyle=dashes, label=label)
        after = pandas.Series([run.after for run in runs])
        right.plot(after, [place + 1] * len(runs), "o", color=color, alpha=0.6)
        right.plot(after.mean(), place + 1, "|", color=color, markersize=24, markeredgewidth=3)
    left.set_title("Reward in training")
    left.set_xlabel("step")
    right.set_title("Held-out problems after the last step")
    right.set_xlabel(", ".join(sorted({runs[0].metric for runs in groups.values()})))
    right.set_ylabel("group")
    right.set_yticks(range(1, len(groups) + 1))
    right.set_ylim(len(groups) + 0.5, 0.5)
    for text in figure.legend(loc="outside lower left", frameon=False).get_texts():
        text.set_parse_math(False)
        text.set_text(textwrap.fill(text.get_text(), 150))
    figure.savefig(output, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folders", nargs="+", type=Path, help="output folders of runs")
    parser.add_argument("--output", type=Path, default=Path("compare.png"), help="the picture")
    options = parser.parse_args()
    runs = []
    for folder in options.folders:
        if has_ended(folder):
            runs.append(read_run(folder))
        else:
            print(f"{folder} is left out: no run has ended there", file=sys.stderr)
    if not runs:
        parser.error("there is nothing to draw")
    groups = groups_of(runs)
    draw(groups, options.output)
    print(f"{table(groups)}\n{options.output}")


if __name__ == "__main__":
    main()
