"""Draws runs side by side, and prints how they ended and what they have over each other.

    pip install -r results/requirements.txt
    python tools/compare.py runs/*                   # the picture is ./compare.png
    python tools/compare.py runs/* --output a.pdf

Runs that differ only in the seed, or in where they write, what they save or on what they run, are
one group. Its name has the first of its folders and what tells it from the other groups.

What is compared is the figure that chooses a run's best evaluation. The left panel has its learning
curves: a thin line for each run, and a thick one for the mean of a group. The table has means
before and after training, the standard deviation of the latter, how many runs failed, and how many
versions of the code (`codes`) made them. Of runs of a group with the same seed, only the last one
given is compared with other groups.

If groups share two seeds or more, the right panel has what one has over the other: a dot for each
seed, a diamond for the mean, and a bar for its 95% t-interval. There is a row for the end of
training, and one for the *area*, the mean height of the learning curve. A second table has these
numbers (`more`, from `low` to `high`), also for greedy answers and pass@k. Such seeds would have
shown a true difference of the size `could_show` with four chances in five: the whole interval
would be on one side of 0. `p_flips` is the share of all choices of signs that take the mean as far
from 0, or farther: with S seeds at least 2 / 2^S. Nothing is corrected for the number of rows.

A run *failed* if it ends below where it began, which a penalty should. A mean would describe no run
then, so in place of numbers the table names the runs that failed. A line reports each folder that
is left out because no run has finished there.
"""

import argparse
import itertools
import json
import math
import sys
import textwrap
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "results"))

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import pandas
from paired import area, comparison, smallest_difference

# Okabe and Ito's, which color-blind people can tell apart. Beyond these, other dashes.
COLORS = ("#000000", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
DASHES = ("-", "--", ":", "-.")
AREA = "area of "  # before the name of a figure
NUMBERS = ["more", "low", "high", "could_show", "p_flips"]  # of a difference
SHOWN = ["group", "over", "figure", "seeds", *NUMBERS, "failed"]
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
    seed: int
    commit: str  # of its code, and a digest of its script, which git may ignore
    metric: str  # the figure that chooses the best evaluation
    curve: pandas.Series  # its values by step
    figures: dict[str, float]  # of the last evaluation, which are compared

    def has_failed(self) -> bool:
        """Returns whether it ends below where it began."""
        return self.curve.iloc[-1] < self.curve.iloc[0]


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
    rows = pandas.read_json(folder / "metrics.jsonl", lines=True).set_index("step")
    (metric,) = summary["best"].keys() - {"step", "weights"}
    names = [metric, *(k for k in summary["after"] if k.startswith(("greedy", "pass@")))]
    return Run(
        folder.resolve(),
        told | {"script": Path(environment["command"][0]).stem},
        config["seed"],
        f"{environment['commit']} {config.get('code of the script')}",
        metric,
        rows["eval"].dropna().str.get(metric).astype(float),
        {name: summary["after"][name] for name in names},
    )


def groups_of(runs: list[Run]) -> Groups:
    """Returns the runs of each group by its label: number, first folder, and what differs.

    A flag that no other group has, such as a method's own, tells nothing.
    """
    members: dict[str, list[Run]] = {}
    for run in runs:
        members.setdefault(json.dumps(run.config, sort_keys=True), []).append(run)
    configs = [pandas.Series(group[0].config, dtype=object) for group in members.values()]
    texts = pandas.DataFrame([config.map(str) for config in configs]).sort_index(axis=1)
    telling = texts.loc[:, texts.nunique() > 1]  # which does not count what is missing
    groups = {}
    for place, group in enumerate(members.values()):
        flags = [f"{name} {value}" for name, value in telling.iloc[place].dropna().items()]
        label = f"{place + 1}  {group[0].folder.name}: {', '.join(flags)}"
        groups[label.removesuffix(": ")] = group
    return groups


# ---- Tables --------------------------------------------------------------------------------------
def ends_of(groups: Groups) -> pandas.DataFrame:
    """Returns a row for each group: its figure before and after training, and what failed."""
    rows = []
    for label, runs in groups.items():
        rows += [
            {
                "group": label,
                "figure": run.metric,
                "before": run.curve.iloc[0],
                "after": run.curve.iloc[-1],
                "failed": run.has_failed(),
                "code": run.commit,
            }
            for run in runs
        ]
    by_group = pandas.DataFrame(rows).groupby(["group", "figure"], sort=False, as_index=False)
    return by_group.agg(
        runs=("after", "size"),
        before=("before", "mean"),
        after=("after", "mean"),
        deviation=("after", "std"),
        failed=("failed", "sum"),
        codes=("code", "nunique"),
    )


def differences(groups: Groups) -> pandas.DataFrame:
    """Returns what groups have over former ones on the seeds that both have: a row a figure."""
    rows = []
    for (former, others), (label, own) in itertools.combinations(groups.items(), 2):
        metric = own[0].metric
        runs = {("own", run.seed): run for run in own} | {
            ("other", run.seed): run for run in others
        }
        figures = pandas.DataFrame({key: run.figures for key, run in runs.items()})
        # A resume adds an evaluation, which other runs lack.
        curves = pandas.DataFrame({key: run.curve for key, run in runs.items()}).dropna()
        figures.loc[f"{AREA}{metric}"] = area(curves.T, curves.index)
        more = (figures["own"] - figures["other"]).dropna(axis=1, how="all")  # of shared seeds
        if len(more.columns) < 2 or others[0].metric != metric:
            continue
        failed = [run.folder.name for run in runs.values() if run.seed in more and run.has_failed()]
        for figure, values in more.dropna().iterrows():
            row = {
                "group": short(label),
                "over": short(former),
                "figure": figure,
                "is_main": figure.endswith(metric),
                "could_show": smallest_difference(values),
                "failed": ", ".join(failed),
                "values": values,
            }
            rows.append(row | comparison(values.to_numpy()))
    table = pandas.DataFrame(rows, columns=[*SHOWN, "is_main", "values"])
    table.loc[table["failed"] != "", NUMBERS] = math.nan  # a mean would describe no run
    return table


def as_text(table: pandas.DataFrame) -> str:
    """Returns a table to print."""
    return table.to_string(index=False, float_format="%.3f", na_rep="")


def short(label: str) -> str:
    """Returns the number at the beginning of a label, or all of a label without one."""
    return label.partition("  ")[0]


# ---- The picture ---------------------------------------------------------------------------------
def draw_dots(panel: Any, place: float, color: str, values: Any, interval: list[float]) -> None:
    """Draws a dot for each value, and a diamond and a bar for a mean and the ends of its interval.

    These three numbers may be missing, or NaN.
    """
    panel.plot(values, [place] * len(values), "o", color=color, markersize=5, alpha=0.45)
    panel.plot(interval[1:], [place] * len(interval[1:]), color=color, linewidth=3, alpha=0.6)
    panel.plot(interval[:1], [place] * len(interval[:1]), "D", color=color, markeredgecolor="white")


def draw(groups: Groups, table: pandas.DataFrame, output: Any) -> None:
    """Draws the panels. Labels of groups, which may be long, stand in full below them."""
    pairs = table[table["is_main"]].reset_index()
    names = ["left", "right"] if len(pairs) else ["left"]
    figure, panels = plt.subplot_mosaic(
        [names],
        figsize=(13, 4.2 + 0.5 * max(len(groups), len(pairs))),
        layout="constrained",
    )
    colors = dict(zip(map(short, groups), itertools.cycle(COLORS)))
    for place, (label, runs) in enumerate(groups.items()):
        color = colors[short(label)]
        dashes = DASHES[place // len(COLORS) % len(DASHES)]
        curves = pandas.DataFrame({run.folder: run.curve for run in runs}).dropna()
        panels["left"].plot(curves, color=color, linestyle=dashes, linewidth=1, alpha=0.3)
        panels["left"].plot(
            curves.mean(axis=1), color=color, linestyle=dashes, linewidth=3, label=label
        )
    metrics = sorted({runs[0].metric for runs in groups.values()})
    panels["left"].set(title=f"Held-out {', '.join(metrics)}", xlabel="step")
    if len(pairs):
        ticks = pairs["group"] + "\nover " + pairs["over"] + "\n" + pairs["figure"]
        panels["right"].set(title="Differences", yticks=pairs.index, yticklabels=ticks)
        panels["right"].axvline(0, color="black", linewidth=1)
        panels["right"].invert_yaxis()
    for place, row in pairs.iterrows():
        interval = [row["more"], row["low"], row["high"]]
        draw_dots(panels["right"], place, colors[row["group"]], row["values"], interval)
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
    groups = groups_of(runs)
    table = differences(groups)
    draw(groups, table, options.output)
    print(as_text(ends_of(groups)))
    if len(table):
        print(f"\n{as_text(table[SHOWN])}")
    print(options.output)


if __name__ == "__main__":
    main()
