"""Measures the worth of every credit method and of exact credit, at several policies.

    python results/worth_study.py              # an hour on two cores; resumes
    python results/worth_study.py --settings 8 --batches 4   # a part, or fewer batches
    python results/worth_study.py --draw       # table and figure of what is there
    python results/worth_study.py --folder runs/quick --batches 4 --settings 4-start -- \\
        --per_device_train_batch_size 8        # in small; flags of grpo_arca.py

The instrument is tools/worth.py: it says what worth, adam, direction and aligned are. Every method
gets the same batches of 128 completions by the same policy. Two more columns stand here: `cosine`,
of one batch's gradient with the policy gradient of the other batches, and `nearest`, the method
whose gradients are most alike.

The policies are from moments of one run with uniform credit on chains of 3 or 4 operations, and
from the long policy on 6 and 8; all are made here if they are missing. The misconceived policy is
wrong on 8 operations even greedily. Beside the methods of the scripts stand

    wrong only       weights for completions with a negative advantage, and 1 for the others
    optimal token baseline   a group's mean weighed by how long gradients are (arXiv 2602.07078)
    other samples    uniform credit on other problems and samples: the null test, whose worth is 1
    oracles          five, which know the task (step_values.py). Two give each step's advantage to
                     the digits that state it, or to all tokens of the step. One gives GRPO's
                     advantage to the first wrong token, or, if there is none, to the digits of all
                     results. One always gives it to those digits. The last uses the baseline of
                     least variance

Gradients are kept in runs/worth_study/, 7 MB a batch. The table is <--output>.csv and the figure
<--output>.png.
"""

import argparse
import os
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

os.environ["OMP_NUM_THREADS"] = "1"  # a process a core
ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tools"), str(ROOT / "results")]

import numpy as np
import torch
import worth
from learning_curves import LABELS
from step_values import piece_of, read_rollout, step_advantages, step_values
from torch import Tensor

import grpo_arca as trainer
from common.problems import token_roles

MISCONCEIVED = [
    "--model_name_or_path", str(ROOT / "common/misconceived_policy"), "--dataset_config", "8",
    "--max_completion_length", "170",
]  # fmt: skip
LONG = ["--model_name_or_path", str(ROOT / "common/long_policy"), "--max_completion_length", "160"]
POLICIES = {  # runs that trained policies are from
    "uniform-default": ["--save_steps", "15"],
    "uniform-8": [  # as in learning_curves.py
        *LONG, "--dataset_config", "8", "--per_device_train_batch_size", "16", "--max_steps", "40",
        "--learning_rate", "0.002", "--warmup_steps", "3", "--save_steps", "40",
        "--steps_per_generation", "1", "--gradient_accumulation_steps", "1",
    ],
}  # fmt: skip


class Setting(NamedTuple):
    """A policy and a task."""

    title: str
    flags: list[str]
    policy: tuple[str, int] | None  # a run with uniform credit and its step; None is no adapter
    batches: int


SIX = [*LONG, "--dataset_config", "6"]
EIGHT = [*LONG, "--dataset_config", "8"]
SETTINGS = {
    "4-start": Setting("3-4 operations, untrained", [], None, 24),
    "4-middle": Setting("3-4 operations, step 15", [], ("uniform-default", 15), 12),
    "4-end": Setting("3-4 operations, step 45", [], ("uniform-default", 45), 32),
    "6": Setting("6 operations, untrained", SIX, None, 12),
    "8": Setting("8 operations, untrained", EIGHT, None, 24),
    "8-end": Setting("8 operations, step 40", EIGHT, ("uniform-8", 40), 16),
    "misconceived": Setting("8 operations, misconceived, untrained", MISCONCEIVED, None, 24),
}
METHODS = {
    worth.UNIFORM: worth.UNIFORM,
    worth.HALF: worth.HALF,
    "arca": "grpo_arca.py --credit arca",
    "arca, p = 2": "grpo_arca.py --credit arca --sharpening 2",
    "arca's weights shuffled": "grpo_arca.py --credit shuffled",
    "random weights": "grpo_arca.py --credit random",
    "surprisal": "grpo_arca.py --credit surprisal",
    "entropy reduction": "grpo_arca.py --credit entropy_reduction",
    "divergence": "grpo_arca.py --credit divergence",
    "oar_g": "grpo_oar.py --credit oar_g",
    "oar_p": "grpo_oar.py --credit oar_p",
    "s_trace": "grpo_strace.py --credit s_trace",
    "p_trace": "grpo_strace.py --credit p_trace",
    "gspo": "grpo_strace.py --credit gspo",
    "grpo_lambda, both ends": "grpo_strace.py --credit grpo_lambda --trace_kernel both",
    "arca, wrong only": "grpo_arca.py --credit arca",
    "surprisal, wrong only": "grpo_arca.py --credit surprisal",
    "probability": "grpo_arca.py --credit probability",
    "negative_weight 0.25": "grpo_arca.py --credit uniform --negative_weight 0.25",
    "right alone": "grpo_arca.py --credit uniform --negative_weight 0",
    "right alone, by probability": "grpo_arca.py --credit probability --negative_weight 0",
    "arca, right alone": "grpo_arca.py --credit arca --negative_weight 0",
    "oar_g, right alone": "grpo_oar.py --credit oar_g --negative_weight 0",
    "s_trace, right alone": "grpo_strace.py --credit s_trace --negative_weight 0",
}
BASELINE = "optimal token baseline"
STEP_VALUES = "oracle: step values"
WHOLE_STEPS = "oracle: on whole steps"
FIRST_WRONG = "oracle: first wrong token"
DIGITS = "oracle: digits"
LEAST_VARIANCE = "oracle: least variance"
ORACLES = (STEP_VALUES, WHOLE_STEPS, FIRST_WRONG, DIGITS, LEAST_VARIANCE)
NULL = "other samples"
ROWS = (*METHODS, BASELINE, *ORACLES, NULL)
OF_A_BATCH = {*ROWS, "reward"}  # the keys of its file
FIGURES = ("worth", "aligned", "adam", "direction", "cosine")  # that are printed
OTHER_ROLLOUT = 1_000_000  # added to a batch's number, for the null test


# ---- Credit that no script has -------------------------------------------------------------------
def all_rows(args: trainer.Args, rollout: trainer.Batch) -> list[trainer.Batch]:
    """Returns micro-batches of similar lengths with all completions of a rollout.

    The trainer leaves out those without an advantage, but oracles and baselines need them.
    """
    order = rollout.attention.sum(1).argsort(stable=True)
    return [rollout.select(rows) for rows in order.split(args.per_device_train_batch_size)]


def for_wrong_only(micros: list[trainer.Batch]) -> None:
    """Gives every completion with an advantage above 0 the weights of plain GRPO."""
    for micro in micros:
        is_wrong = micro.advantages[:, None] < 0
        micro.credit = torch.where(is_wrong, micro.credit, micro.mask.float())


@torch.no_grad()
def token_baseline(run: trainer.Run, micros: list[trainer.Batch]) -> list[trainer.Batch]:
    """Returns copies of the micro-batches with the optimal token baseline (arXiv 2602.07078).

    It replaces the group's mean. At token t it is the mean of the rewards of the completions that
    still run, each weighed by its squared gradient so far, for which the sum of 1 - 2 pi + sum pi^2
    stands.
    """
    size = run.args.num_generations
    base = run.model.get_base_model()
    rows = torch.cat([micro.rows for micro in micros])
    longest = max(micro.mask.shape[1] for micro in micros)

    # Add up the squared gradients of each completion.
    energy = torch.zeros(int(rows.max()) + 1, longest)  # [rows, T]
    rewards = torch.zeros(len(energy))
    for micro in micros:
        logp, hidden = run.policy.eval()(micro)
        chances = (trainer.head_logits(base, hidden) / run.args.temperature).softmax(2)  # [B, T, V]
        squared = (1 - 2 * logp.exp() + chances.square().sum(2)) * micro.mask
        energy[micro.rows, : micro.mask.shape[1]] = squared.cumsum(1) * micro.mask
        rewards[micro.rows] = micro.rewards

    # Subtract the weighed mean, and divide by the standard deviation as GRPO does.
    grouped = energy.view(-1, size, longest)  # [groups, G, T]
    weighed = (rewards.view(-1, size, 1) * grouped).sum(1)
    baselines = weighed / grouped.sum(1).clamp(min=1e-9)  # [groups, T]
    deviations = rewards.view(-1, size).std(1) + 1e-4
    copies = [replace(micro) for micro in micros]
    for micro in copies:
        group = micro.rows // size
        over_baseline = micro.rewards[:, None] - baselines[group, : micro.mask.shape[1]]
        has_advantage = (micro.advantages != 0)[:, None]
        micro.credit = over_baseline / deviations[group, None] * has_advantage * micro.mask
        micro.advantages = torch.ones_like(micro.advantages)  # the credit has the sign
    return copies


def role_weights(run: trainer.Run, micro: trainer.Batch) -> tuple[Tensor, Tensor]:
    """Returns two weights [B, T]: on the first wrong token, and on the digits of all results.

    Where no token is wrong, the first is as the second.
    """
    first_wrong = torch.zeros(micro.mask.shape)
    digits = torch.zeros(micro.mask.shape)
    for i, problem in enumerate(micro.problems):
        ids = micro.ids[i, micro.prompt_width :][micro.mask[i]].tolist()
        pieces = [piece_of(run.tokenizer, token) for token in ids]
        roles = token_roles(pieces, problem)
        is_digit = torch.tensor([float(role != "") for role in roles])
        is_wrong = torch.tensor([float(role == "first_wrong") for role in roles])
        digits[i, : len(roles)] = is_digit
        first_wrong[i, : len(roles)] = is_wrong if is_wrong.any() else is_digit
    return first_wrong, digits


def oracles(
    run: trainer.Run,
    train_set: trainer.ProblemSet,
    rollout: trainer.Batch,
    micros: list[trainer.Batch],
    continuations: int,
) -> dict[str, list[trainer.Batch]]:
    """Returns copies of the micro-batches of a rollout with each oracle's credit."""
    size = run.args.num_generations
    solutions = read_rollout(run, rollout)
    values = step_values(run, train_set, rollout, solutions, continuations)
    copies = {name: [replace(micro) for micro in micros] for name in ORACLES}
    for i, micro in enumerate(micros):
        exact = {
            STEP_VALUES: step_advantages(solutions, values, micro, size),
            WHOLE_STEPS: step_advantages(solutions, values, micro, size, whole=True),
            LEAST_VARIANCE: step_advantages(solutions, values, micro, size, least_variance=True),
        }
        for name, advantages in exact.items():
            copies[name][i].credit = advantages
            copies[name][i].advantages = torch.ones_like(
                micro.advantages
            )  # the credit has the sign
        first_wrong, digits = role_weights(run, micro)
        copies[FIRST_WRONG][i].credit = trainer.normalize(first_wrong, micro.mask, 1.0)
        copies[DIGITS][i].credit = trainer.normalize(digits, micro.mask, 1.0)
    return copies


# ---- Gradients: what a process computes ----------------------------------------------------------
class Job(NamedTuple):
    """One batch of a setting to measure."""

    name: str  # of the setting
    batch: int
    folder: Path
    continuations: int  # of oracles, from each step
    flags: tuple[str, ...]


def measure(job: Job) -> str:
    """Adds to the file of a batch the gradients that it lacks. Returns the setting's title."""
    setting = SETTINGS[job.name]
    flags = (*setting.flags, *job.flags)
    adapter = None
    if setting.policy:
        trained, step = setting.policy
        adapter = str(job.folder / trained / f"checkpoint-{step}")
    path = job.folder / job.name / f"{job.batch}.pt"
    found = worth.load(path)
    run, train_set = worth.prepare(flags, adapter)
    run.rollout = job.batch
    rollout = trainer.collect(run, train_set, {})
    found["reward"] = rollout.rewards.nanmean()
    count = len(rollout.rows)

    for name, method in METHODS.items():
        if name in found:
            continue
        own_run, module, micros = worth.scored(run, rollout, method, flags)
        if name.endswith("wrong only"):
            for_wrong_only(micros)
        found[name] = worth.gradient(own_run, module, micros, count)

    micros = all_rows(run.args, rollout)
    if BASELINE not in found:
        found[BASELINE] = worth.gradient(run, trainer, token_baseline(run, micros), count)
    if not found.keys() >= {*ORACLES}:
        credited = oracles(run, train_set, rollout, micros, job.continuations)
        for name, copies in credited.items():
            found[name] = worth.gradient(run, trainer, copies, count)
    if NULL not in found:
        run.rollout = OTHER_ROLLOUT + job.batch
        other_rollout = trainer.collect(run, train_set, {})
        found[NULL] = worth.method_gradient(run, other_rollout, worth.UNIFORM, flags)
    worth.save(found, path)
    return setting.title


def train_policy(folder: Path) -> None:
    """Makes the run with uniform credit that a policy is from."""
    print(f"training {folder.name}, about two minutes", flush=True)
    command = [sys.executable, str(ROOT / "grpo_arca.py"), "--credit", "uniform"]
    command += [*POLICIES[folder.name], "--output_dir", str(folder)]
    command += ["--resume_from_checkpoint", "latest"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, cwd=ROOT)


def measure_all(options: argparse.Namespace) -> None:
    """Trains the policies and measures the batches that are missing."""
    policies = [SETTINGS[name].policy for name in options.settings]
    for name in sorted({policy[0] for policy in policies if policy is not None}):
        if not (options.folder / name / "summary.json").exists():
            train_policy(options.folder / name)
    jobs = []
    for name in options.settings:
        for batch in range(options.batches or SETTINGS[name].batches):
            there = worth.load(options.folder / name / f"{batch}.pt").keys()
            if not there >= OF_A_BATCH:
                rest = (options.folder, options.continuations, tuple(options.flags))
                jobs.append(Job(name, batch, *rest))
    worth.run_all(measure, jobs, options.processes)


# ---- Table and figure ----------------------------------------------------------------------------
def nearest(gradients: dict[str, np.ndarray]) -> dict[str, dict[str, Any]]:
    """Returns for each method the other one with the largest mean cosine on the same batches."""
    units = {m: g / np.linalg.norm(g, axis=1, keepdims=True) for m, g in gradients.items()}
    found: dict[str, dict[str, Any]] = {}
    for name, own in units.items():
        cosines = {m: (own * g).sum(1).mean() for m, g in units.items() if m != name}
        twin = max(cosines, key=cosines.__getitem__)
        found[name] = {"nearest": twin, "nearest_cosine": cosines[twin]}
    return found


def tabulate(name: str, folder: Path, batches: int | None = None) -> list[dict[str, Any]]:
    """Returns the rows of a setting, from the batches that are there, or from the first of them."""
    count = batches or SETTINGS[name].batches
    files = [worth.load(folder / name / f"{batch}.pt") for batch in range(count)]
    files = [file for file in files if file.keys() >= OF_A_BATCH]
    if len(files) < 4:
        return []
    gradients = {
        method: torch.stack([file[method] for file in files]).double().numpy() for method in ROWS
    }
    reward = float(sum(file["reward"] for file in files)) / len(files)
    columns = {"setting": SETTINGS[name].title, "batches": len(files), "reward": reward}
    twins = nearest(gradients)
    return [columns | row | twins[row["method"]] for row in worth.figures(gradients)]


def color_of(name: str) -> str:
    """Returns the color of a method in the figure."""
    if name in ORACLES:
        return "#D55E00"
    return "#888888" if name == NULL else "#0072B2"


def name_on_the_page(name: str) -> str:
    """Returns what results/README.md calls a row of the table."""
    if name == NULL:
        return "null: other problems"
    if name.startswith("oracle"):
        return name
    method, _, part = name.partition(", ")
    if part == "right alone":
        return f"{LABELS[method]}, right answers only"
    return LABELS.get(name, name)


def draw_setting(axes: Any, rows: list[dict[str, Any]], names: list[str]) -> None:
    """Draws the worth of every method at one policy, raw and Adam's."""
    row_of = {row["method"]: row for row in rows}
    axes.axvline(1, color="#888888", linewidth=1)
    for place, name in enumerate(names):
        row = row_of[name]
        color = color_of(name)
        face = (
            color if row["direction_low"] > worth.OTHER_DIRECTION else "white"
        )  # hollow: it may point elsewhere
        for key, marker, shift in (("worth", "o", 0.15), ("adam", "s", -0.15)):
            y = place + shift
            ends = np.clip([row[f"{key}_low"], row[f"{key}_high"]], 0.03, 30)
            axes.plot(ends, [y, y], color=color, linewidth=2, alpha=0.5)
            axes.plot(row[key], y, marker, color=color, markerfacecolor=face, markersize=5)
    axes.set_xscale("log")
    axes.set_xticks([0.25, 0.5, 1, 2, 4, 8], ["¼", "½", "1", "2", "4", "8"])
    axes.set_xlim(0.15, 9)
    axes.minorticks_off()
    title = f"{textwrap.fill(rows[0]['setting'], 28)}\n{rows[0]['reward']:.0%} right"
    axes.set_title(title, loc="left", fontsize=9, fontweight="bold")
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Draws a panel a setting: oracles on top, then the methods by their worth in the last one."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    titles = list(dict.fromkeys(row["setting"] for row in rows))
    of_last = {row["method"]: row["worth"] for row in rows if row["setting"] == titles[-1]}
    methods = sorted(of_last.keys() - {worth.UNIFORM, NULL, *ORACLES}, key=of_last.__getitem__)
    names = [NULL, *methods, *reversed(ORACLES)]

    columns = min(3, len(titles))
    lines = -(-len(titles) // 3)
    width = 2.3 + 2.6 * columns
    height = lines * (0.25 * len(names) + 0.8) + 0.6
    figure, panels = plt.subplots(
        lines, columns, figsize=(width, height), sharey=True, squeeze=False
    )
    for axes in panels.flat[len(titles) :]:
        axes.set_visible(False)
    for axes, title in zip(panels.flat[: len(titles)], titles, strict=True):
        draw_setting(axes, [row for row in rows if row["setting"] == title], names)
    for axes in panels[:, 0]:
        axes.set_yticks(range(len(names)), [name_on_the_page(name) for name in names], fontsize=9)
    meaning = (
        "dots: worth, the signal-to-noise ratio of gradients over GRPO's, with 95% interval; "
        "squares: Adam's worth; "
        "hollow: the mean gradient may be more than 25 degrees off the policy gradient"
    )
    figure.supxlabel(textwrap.fill(meaning, int(width * 14)), fontsize=9)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


# ---- Command line --------------------------------------------------------------------------------
def parse_options(argv: list[str]) -> argparse.Namespace:
    """Returns the options; `flags` are those after `--`."""
    split = argv.index("--") if "--" in argv else len(argv)
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    parser.add_argument("--batches", type=int, help="of each setting, if not its own number")
    parser.add_argument("--continuations", type=int, default=32, help="of oracles, from each step")
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--draw", action="store_true", help="measure nothing more")
    parser.add_argument("--folder", type=Path, default=ROOT / "runs/worth_study")
    parser.add_argument("--output", type=Path, default=ROOT / "results/data/worth/study")
    options = parser.parse_args(argv[:split])
    options.flags = argv[split + 1 :]
    return options


def main() -> None:
    options = parse_options(sys.argv[1:])
    if not options.draw:
        measure_all(options)
    rows = []
    for name in options.settings:
        rows += tabulate(name, options.folder, options.batches)
    if not rows:
        sys.exit("worth_study.py: nothing to draw: four batches of a setting are the least")
    worth.write_table(rows, options.output.with_suffix(".csv"))
    draw(rows, options.output.with_suffix(".png"))
    for row in rows:
        cells = [f"{key} {worth.shown_figure(row, key)}" for key in FIGURES]
        cells.append(f"nearest {row['nearest']} ({row['nearest_cosine']:.3f})")
        print(f"{row['setting']:26s} {row['method']:26s} {'  '.join(cells)}")


if __name__ == "__main__":
    main()
