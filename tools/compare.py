"""Draws runs side by side: reward in training, and held-out accuracy at the end.

    python tools/compare.py runs/*                   # your runs, into ./compare.png
    python tools/compare.py runs/* --output a.pdf
    python tools/compare.py              # results/data/default_runs/*.json, of learning_curves.py

Runs that differ in the seed alone (or in where they write and on what they run) are one group.
Left, the mean reward of a group's runs, smoothed, and the range of single runs. Right, held-out
sampled accuracy after the last step: a dot a run, a bar at the mean. A group is called by its
folders and by what tells it from the other groups.
"""

import argparse
import json
import sys
import textwrap
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

FOLDER = Path(__file__).resolve().parents[1] / "results/data/default_runs"
MEASURED = {  # <file>.json in FOLDER -> its label, in this order
    "grpo_arca-uniform": "uniform (GRPO)",
    "grpo_arca-default": "arca",
    "grpo_arca-shuffled": "shuffled (arca's weights, permuted)",
    "grpo_oar-default": "oar_g",
    "grpo_strace-default": "s_trace",
    "grpo_strace-p_trace": "p_trace",
    "grpo_arca-uniform-negative_weight-0": "uniform, right answers only",
}
# Okabe and Ito's, which color-blind people can tell apart. Beyond these, other dashes.
COLORS = ("#000000", "#0072B2", "#56B4E9", "#D55E00", "#009E73", "#CC79A7", "#E69F00")
DASHES = ("-", "--", ":", "-.")
# Flags that say where a run writes, with which seed or on what it runs, and not what it does
SAME_ANYWAY = {
    "seed",
    "output_dir",
    "run_name",
    "resume_from_checkpoint",
    "report_to",
    "save_steps",
    "save_total_limit",
    "eval_steps",
    "per_device_eval_batch_size",
    "per_device_rollout_batch_size",
    "gradient_checkpointing",
    "torch_compile",
    "rollout_weights",
    "num_processes",
    "environment",
}


class Run(NamedTuple):
    """What a run came to."""

    rewards: list[float | None]  # of every step; None where no reward function applied
    accuracy: float  # held out, sampled, after the last step


def fail(message: str) -> NoReturn:
    """Ends the program with a sentence about the user's mistake."""
    print(f"compare.py: error: {message}", file=sys.stderr)
    sys.exit(2)


def note(path: Path, error: Exception) -> None:
    """Says why a path is left out."""
    reason = f"no {error} in its files" if isinstance(error, KeyError) else str(error)
    print(f"compare.py: {path} is left out: {' '.join(reason.split())[:200]}", file=sys.stderr)


# ---- Reading runs --------------------------------------------------------------------------------
def read_run(folder: Path) -> tuple[dict[str, Any], Run]:
    """Returns flags and results of an output folder. ValueError says what is missing."""
    for name in ("config.json", "metrics.jsonl"):
        if not (folder / name).is_file():
            raise ValueError(f"it has no {name}")
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    rewards = [row["reward"] for row in rows if "reward" in row]
    accuracies = {row["step"]: row["eval"]["sampled_accuracy"] for row in rows if row.get("eval")}
    if config["max_steps"] not in accuracies:
        raise ValueError(f"it has not come to the end of step {config['max_steps']}")
    if not rewards:
        raise ValueError("it has no step")
    if accuracies[config["max_steps"]] is None:
        raise ValueError("its last evaluation has no accuracy")

    environment = config.get("environment", {})
    command = environment.get("command") or [folder.name.split("-")[0]]
    config["script"] = Path(command[0]).stem
    # Of these flags only the product with the processes and the quotient say what a run does.
    processes = environment.get("hardware", {}).get("processes", 1)
    micro_batch = config.pop("per_device_train_batch_size", 1)
    accumulated = config.pop("gradient_accumulation_steps", 1)
    generated = config.pop("steps_per_generation", 1)
    config["completions_per_update"] = micro_batch * accumulated * processes
    config["updates_per_rollout"] = generated / accumulated
    return config, Run(rewards, accuracies[config["max_steps"]])


def code_of(config: dict[str, Any]) -> str:
    """Returns which script a run was of, and at which commit."""
    environment = config.get("environment", {})
    command = environment.get("command") or ["a script"]
    return f"{command[0]} of commit {environment.get('commit')}"


def differences(config: dict[str, Any], others: list[dict[str, Any]]) -> list[str]:
    """Returns "flag value" for each flag in which a group differs from any other one.

    A flag that the other one does not have, such as a method's own, tells nothing.
    """
    found = []
    for name, value in sorted(config.items()):
        if any(name in other and other[name] != value for other in others):
            shown = " ".join(map(str, value)) if isinstance(value, list) else value
            found.append(f"{name} {shown}")
    return found


def folder_names(folders: list[Path], all_folders: list[Path]) -> str:
    """Returns what a group's folders are called, the first and the number of others.

    A folder has its whole path where another one of the picture has its name.
    """
    first = folders[0]
    namesakes = [folder for folder in all_folders if folder.resolve().name == first.resolve().name]
    name = first.resolve().name if len(namesakes) == 1 else str(first)
    return name if len(folders) == 1 else f"{name} and {len(folders) - 1} more"


def groups_of(folders: list[Path]) -> dict[str, list[Run]]:
    """Returns the runs of each group by its label: its folders, and what differs."""
    configs: dict[str, dict[str, Any]] = {}
    runs: dict[str, list[Run]] = {}
    folders_of: dict[str, list[Path]] = {}
    codes_of: dict[str, set[str]] = {}
    for folder in {folder.resolve(): folder for folder in folders}.values():
        try:
            config, run = read_run(folder)
        except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
            note(folder, error)
            continue
        code = code_of(config)
        config = {name: value for name, value in config.items() if name not in SAME_ANYWAY}
        key = json.dumps(config, sort_keys=True)
        configs[key] = config
        runs.setdefault(key, []).append(run)
        folders_of.setdefault(key, []).append(folder)
        codes_of.setdefault(key, set()).add(code)

    groups: dict[str, list[Run]] = {}
    drawn = [folder for members in folders_of.values() for folder in members]
    for key, config in configs.items():
        label = folder_names(folders_of[key], drawn)
        if len(codes_of[key]) > 1:
            codes = ", ".join(sorted(codes_of[key]))
            warning = f"{label} are drawn as one method, but their code differs: {codes}"
            print(f"compare.py: {warning}", file=sys.stderr)
        telling = differences(config, list(configs.values()))
        if telling:
            label = f"{label}: {', '.join(telling)}"
        groups[label] = runs[key]
    return groups


def measured() -> dict[str, list[Run]]:
    """Returns the groups of the .json files in FOLDER."""
    found = {path.stem: path for path in sorted(FOLDER.glob("*.json"))}
    known = [stem for stem in MEASURED if stem in found]
    others = [stem for stem in found if stem not in MEASURED]
    groups = {}
    for stem in known + others:
        try:
            runs = json.loads(found[stem].read_text(encoding="utf-8"))["runs"]
            pairs = [Run(run["rewards"], run["after"]["sampled_accuracy"]) for run in runs]
            groups[MEASURED.get(stem, stem)] = pairs
        except (ValueError, KeyError, TypeError, OSError) as error:
            note(found[stem], error)
    return groups


# ---- Drawing -------------------------------------------------------------------------------------
def smooth(rewards: list[float | None]) -> np.ndarray:
    """Returns means over windows of about a tenth of the steps, an odd number of them.

    A mean is NaN if its window has no reward.
    """
    window = np.ones(len(rewards) // 20 * 2 + 1)
    values = np.array(rewards, dtype=float)  # None is NaN
    is_known = np.isfinite(values)
    sums = np.convolve(np.where(is_known, values, 0.0), window, "valid")
    counts = np.convolve(is_known, window, "valid")
    return sums / np.where(counts > 0, counts, np.nan)


def draw_rewards(axes: Any, runs: list[Run], name: str, color: str, dashes: str) -> None:
    """Draws the mean reward of a group's runs, and the range of single ones."""
    steps = min(len(run.rewards) for run in runs)
    curves = [smooth(run.rewards[:steps]) for run in runs]
    middle = np.arange(len(curves[0])) + 1 + (steps - len(curves[0])) / 2  # of each window
    lowest = np.min(curves, 0)
    highest = np.max(curves, 0)
    axes.fill_between(middle, lowest, highest, color=color, alpha=0.12, linewidth=0)
    marker = "o" if len(middle) == 1 else None
    mean = np.mean(curves, 0)
    axes.plot(middle, mean, marker=marker, color=color, linestyle=dashes, label=name)


def draw_accuracies(axes: Any, place: int, runs: list[Run], name: str, color: str) -> None:
    """Draws a dot for each run of a group and a bar at the mean of several, below its name."""
    accuracies = [run.accuracy for run in runs]
    axes.plot(accuracies, [place] * len(runs), "o", color=color, alpha=0.6)
    if len(runs) > 1:
        mean = np.mean(accuracies)
        axes.plot([mean, mean], [place - 0.2, place + 0.2], color=color, linewidth=3)
    axes.text(
        0.01,
        place - 0.25,
        textwrap.shorten(name, 50, placeholder=" ..."),
        va="bottom",
        transform=axes.get_yaxis_transform(),  # x from 0 to 1 across the panel
        fontsize=9,
        parse_math=False,
    )


def draw(groups: dict[str, list[Run]], output: str) -> None:
    """Draws both panels. Names, which may be long, stand in full below them."""
    numbered = [f"{place}  {name}" for place, name in enumerate(groups, 1)]
    names = [textwrap.fill(name, 140, max_lines=6) for name in numbered]
    height = max(4.2, 1.2 + 0.55 * len(names)) + 0.2 * len("\n".join(names).split("\n"))
    figure, (left, right) = plt.subplots(1, 2, figsize=(12, height), width_ratios=(3, 2))
    figure.set_layout_engine("constrained", w_pad=0.1, h_pad=0.1)
    for place, runs in enumerate(groups.values()):
        color = COLORS[place % len(COLORS)]
        dashes = DASHES[place // len(COLORS) % len(DASHES)]
        draw_rewards(left, runs, names[place], color, dashes)
        draw_accuracies(right, place, runs, numbered[place], color)
    for axes, title in ((left, "Reward in training"), (right, "Held-out accuracy at the end")):
        axes.set_title(title, loc="left", fontsize=11, fontweight="bold")
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    left.locator_params(axis="x", integer=True)
    if any(len(runs) > 1 for runs in groups.values()):
        left.set_xlabel("step (band: from the lowest to the highest run)")
        right.set_xlabel("sampled accuracy: a dot for each run, a bar at their mean")
    else:
        left.set_xlabel("step")
        right.set_xlabel("sampled accuracy")
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
    options = parser.parse_args()
    if options.output is None and Path.cwd() == FOLDER:
        fail("this would replace the picture in results/data/: say where with --output")
    groups = groups_of(options.folders) if options.folders else measured()
    if not groups:
        fail("no finished run to draw")
    output = options.output or "compare.png"
    try:
        draw(groups, output)
    except (OSError, ValueError) as error:  # of a folder that is not there, or an unknown format
        fail(f"cannot write {output}: {error}")
    print(output)
    for place, name in enumerate(groups, 1):
        print(f"{place}  {' '.join(name.split())}")


if __name__ == "__main__":
    main()
