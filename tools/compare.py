"""Draws runs side by side: reward in training, and held-out accuracy at the end.

    python tools/compare.py runs/*                     # your runs, into ./compare.png
    python tools/compare.py runs/* --output a.pdf
    python tools/compare.py                            # results/data/default_runs/*.json

Runs that differ in the seed alone (or in where they write and on what they run) are one group.
Left, the mean reward of a group's runs, smoothed, and the range of single runs. Right, held-out
sampled accuracy after the last step: a dot a run, a bar at the mean. Below, what the groups are.
"""

import argparse
import json
import sys
import textwrap
from pathlib import Path
from typing import NamedTuple

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

FOLDER = Path(__file__).resolve().parents[1] / "results/data/default_runs"
MEASURED = {  # results/data/<file>.json -> its label, in this order
    "grpo_arca-uniform": "uniform (GRPO)",
    "grpo_arca-default": "arca",
    "grpo_arca-shuffled": "shuffled (arca's weights, permuted)",
    "grpo_oar-default": "oar_g",
    "grpo_strace-default": "s_trace",
    "grpo_strace-p_trace": "p_trace",
    "grpo_arca-uniform-negative_weight-0": "uniform, right completions alone",
}
# Okabe and Ito's, which the colour-blind tell apart; beyond these, other dashes
COLOURS = ("#000000", "#0072B2", "#56B4E9", "#D55E00", "#009E73", "#CC79A7", "#E69F00")
DASHES = ("-", "--", ":", "-.")
# Flags that say where a run writes, with which seed or on what it runs, and not what it does
SAME_ANYWAY = """seed output_dir run_name resume_from_checkpoint report_to save_steps
save_total_limit eval_steps per_device_eval_batch_size gradient_checkpointing torch_compile
rollout_weights num_processes environment""".split()
# These do, by their product with the processes and by their quotient.
BATCH = ("per_device_train_batch_size", "gradient_accumulation_steps", "steps_per_generation")


class Run(NamedTuple):
    rewards: list[float]  # of every step
    accuracy: float  # held out, sampled, after the last step


def read_run(folder: Path) -> tuple[dict, Run]:
    """Flags and results of an output folder. ValueError says what is missing."""
    for name in ("config.json", "metrics.jsonl"):
        if not (folder / name).is_file():
            raise ValueError(f"it has no {name}")
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    rewards = [row["reward"] for row in rows if row.get("reward") is not None]
    evaluations = {row["step"]: row["eval"]["sampled_accuracy"] for row in rows if row.get("eval")}
    if config["max_steps"] not in evaluations:
        raise ValueError(f"it has not come to the end of step {config['max_steps']}")
    if not rewards:
        raise ValueError("it has no step")
    environment = config.get("environment", {})
    command = environment.get("command") or [folder.name.split("-")[0]]
    config["script"] = Path(command[0]).stem
    processes = environment.get("hardware", {}).get("processes", 1)
    size, accumulated, generated = (config.pop(name, 1) for name in BATCH)
    config["completions_per_update"] = size * accumulated * processes
    config["updates_per_rollout"] = generated / accumulated
    return config, Run(rewards, evaluations[config["max_steps"]])


def fail(message: str) -> None:
    print(f"compare.py: error: {message}", file=sys.stderr)
    sys.exit(2)


def note(path: Path, error: Exception) -> None:
    reason = f"no {error} in its files" if isinstance(error, KeyError) else str(error)
    print(f"compare.py: {path} is left out: {' '.join(reason.split())[:200]}", file=sys.stderr)


def label(config: dict, others: list[dict]) -> str:
    """What tells a group from the others: script, credit and the flags in which any two differ."""
    parts = [str(config["credit"])]
    if any(other["script"] != config["script"] for other in others):
        parts.insert(0, config["script"])
    for name in sorted(config.keys() - {"credit", "script"}):
        for other in others:
            # A flag that another script has not, such as a method's own, does not differ from it.
            absent = None if other["script"] == config["script"] else config[name]
            if other.get(name, absent) != config[name]:
                parts.append(f"{name}={config[name]}")
                break
    return " ".join(parts)


def groups_of(folders: list[Path]) -> dict[str, list[Run]]:
    """Label: the runs of a group."""
    configs, runs = {}, {}
    for folder in folders:
        try:
            config, run = read_run(folder)
        except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
            note(folder, error)
            continue
        config = {name: x for name, x in config.items() if name not in SAME_ANYWAY}
        key = json.dumps(config, sort_keys=True)
        configs[key] = config
        runs.setdefault(key, []).append(run)
    groups: dict[str, list[Run]] = {}
    for key, config in configs.items():
        groups.setdefault(label(config, list(configs.values())), []).extend(runs[key])
    return groups


def measured() -> dict[str, list[Run]]:
    """The groups of results/data/default_runs/*.json."""
    found = {path.stem: path for path in sorted(FOLDER.glob("*.json"))}
    groups = {}
    for stem in sorted(found, key=lambda stem: [*MEASURED, stem].index(stem)):
        try:
            runs = json.loads(found[stem].read_text(encoding="utf-8"))["runs"]
            runs = [Run(run["rewards"], run["after"]["sampled_accuracy"]) for run in runs]
            groups[MEASURED.get(stem, stem)] = runs
        except (ValueError, KeyError, TypeError, OSError) as error:
            note(found[stem], error)
    return groups


def smooth(rewards: list[float]) -> np.ndarray:
    """Mean over windows of about a tenth of the steps, an odd number of them."""
    window = len(rewards) // 20 * 2 + 1
    return np.convolve(rewards, np.ones(window) / window, "valid")


def draw_rewards(axes: plt.Axes, runs: list[Run], **line: str) -> None:
    steps = min(len(run.rewards) for run in runs)
    curves = [smooth(run.rewards[:steps]) for run in runs]
    middle = np.arange(len(curves[0])) + 1 + (steps - len(curves[0])) / 2  # of each window
    axes.fill_between(
        middle, np.min(curves, 0), np.max(curves, 0), color=line["color"], alpha=0.12, linewidth=0
    )
    marker = "o" if len(middle) == 1 else None
    axes.plot(middle, np.mean(curves, 0), marker=marker, **line)


def draw(groups: dict[str, list[Run]], output: str) -> None:
    """Names, which may be long, stand in full below the panels, and begin at the dots."""
    numbered = [f"{place}  {name}" for place, name in enumerate(groups, 1)]
    names = [textwrap.fill(name, 140, max_lines=6) for name in numbered]
    height = max(4.2, 1.2 + 0.55 * len(names)) + 0.2 * len("\n".join(names).split("\n"))
    figure, (left, right) = plt.subplots(1, 2, figsize=(12, height), width_ratios=(3, 2))
    figure.set_layout_engine("constrained", w_pad=0.1, h_pad=0.1)
    for place, runs in enumerate(groups.values()):
        colour, dashes = COLOURS[place % len(COLOURS)], DASHES[place // len(COLOURS) % len(DASHES)]
        draw_rewards(left, runs, color=colour, linestyle=dashes, label=names[place])
        accuracies = [run.accuracy for run in runs]
        right.plot(accuracies, [place] * len(runs), "o", color=colour, alpha=0.6)
        mean = [np.mean(accuracies)] * 2
        right.plot(mean, [place - 0.2, place + 0.2], color=colour, linewidth=3)
        name = textwrap.shorten(numbered[place], 50, placeholder=" ...")
        side = right.get_yaxis_transform()  # x from 0 to 1 across the panel
        where = {"x": 0.01, "y": place - 0.25, "va": "bottom", "transform": side}
        right.text(s=name, fontsize=9, parse_math=False, **where)
    for axes, title in ((left, "Reward in training"), (right, "Held-out accuracy at the end")):
        axes.set_title(title, loc="left", fontsize=11, fontweight="bold")
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    left.locator_params(axis="x", integer=True)
    left.set_xlabel("step (band: from the lowest to the highest run)")
    right.set_xlabel("a dot for each run, a bar at their mean")
    right.set_yticks(range(len(names)), [""] * len(names))
    right.tick_params(axis="y", length=0)
    right.set_ylim(len(names) - 0.5, -0.8)
    legend = figure.legend(frameon=False, fontsize=9, loc="outside lower left")
    for text in legend.get_texts():
        text.set_parse_math(False)
    figure.savefig(output, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folders", nargs="*", type=Path, help="output folders of runs")
    parser.add_argument("--output", help="the picture (.png, .pdf, .svg); default ./compare.png")
    args = parser.parse_args()
    if args.output is None and Path.cwd() == FOLDER:
        fail("this would replace the picture in results/data/: say where with --output")
    groups = groups_of(args.folders) if args.folders else measured()
    if not groups:
        fail("no finished run to draw")
    output = args.output or "compare.png"
    try:
        draw(groups, output)
    except (OSError, ValueError) as error:  # of a folder that is not there, or an unknown format
        fail(f"cannot write {output}: {error}")
    print(output)
    for place, name in enumerate(groups, 1):
        print(place, "", *name.split())


if __name__ == "__main__":
    main()
