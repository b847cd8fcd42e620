"""Credit methods as estimates of the policy gradient: how much one completion says under each.

    python results/gradient_quality.py              # 44 minutes on two cores; resumes
    python results/gradient_quality.py --settings 8 --batches 4   # a part, or fewer batches
    python results/gradient_quality.py --draw       # table and figure of what is there
    python results/gradient_quality.py --folder runs/quick --batches 4 --settings 4-start -- \
        --per_device_train_batch_size 8             # in small; flags of grpo_arca.py

A credit method turns a batch of 128 completions into a gradient of the adapter. Here every method
gets the same batches, at the same policy, so that their gradients can be compared:

    worth   signal-to-noise |mean|^2 / variance over batches, divided by uniform credit's: how many
            completions under uniform credit one completion under this method is worth. It says
            nothing about where the mean points, therefore also
    bias    the cosine of the mean gradient with uniform's, which is the policy gradient without
            bias; corrected for the noise of both, so 1 is no bias
    aligned worth * bias^2: the same number where only what points along the policy gradient counts;
            so many completions under uniform credit have, where noise is most of a gradient, the
            same expected cosine with the policy gradient
    cosine  of one batch's gradient with the policy gradient of the other batches
    adam    the worth where each coordinate is divided by its root mean square over the batches, as
            Adam does: what is left of it for a run of the scripts

|mean|^2 and <mean, mean'> are means over pairs of different batches, and so without bias. Intervals
are 95% percentile bootstraps over batches, the same draws for a method and for uniform.

Policies are from moments of one run with uniform credit on chains of 3 or 4 operations, and from
the long policy on 6 and 8 (all made here if missing). Oracles know the task (step_values.py): the
advantage of each step, on the digits that state it or on all its tokens; GRPO's advantage on the
first wrong token alone where there is one, else on all results' digits; on those digits always; and
a step's value over the baseline of least variance, in place of the mean.
The optimal token baseline, a group's mean weighed by how long gradients are, knows what all do.
`other samples` is uniform credit on other problems and samples, the null test: its worth must be 1.
Gradients are kept in runs/gradient_quality/, 7 MB a batch; the table is gradient_quality.csv and
the picture gradient_quality.png of results/data/.
"""

import argparse
import contextlib
import csv
import importlib
import multiprocessing
import os
import subprocess
import sys
import textwrap
import time
import warnings
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple

os.environ["OMP_NUM_THREADS"] = "1"  # a process a core
ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "results")]

import numpy as np
import torch
import transformers
from peft import set_peft_model_state_dict
from safetensors.torch import load_file
from step_values import piece_of, read_rollout, step_advantages, step_values
from torch import Tensor

import grpo_arca as trainer
from common.data import load_data, token_roles

LONG = ["--model_name_or_path", str(ROOT / "common/long_policy"), "--max_completion_length", "160"]
SEED = ["--seed", "99"]  # no training run of ours has it
POLICIES = {  # runs that trained policies are from
    "uniform-default": ["--save_steps", "15"],
    "uniform-8": [  # as in learning_curves.py
        *LONG, "--dataset_config", "8", "--per_device_train_batch_size", "16", "--max_steps", "40",
        "--learning_rate", "0.002", "--warmup_steps", "3", "--save_steps", "40",
        "--steps_per_generation", "1", "--gradient_accumulation_steps", "1",
    ],
}  # fmt: skip
DRAWS = 2000  # of the bootstrap


class Setting(NamedTuple):
    title: str
    flags: list[str]
    policy: tuple[str, int] | None  # a run with uniform credit and its step; None is no adapter
    batches: int


SETTINGS = {
    "4-start": Setting("3-4 operations, untrained", [], None, 24),
    "4-middle": Setting("3-4 operations, step 15", [], ("uniform-default", 15), 12),
    "4-end": Setting("3-4 operations, step 45", [], ("uniform-default", 45), 32),
    "6": Setting("6 operations, untrained", [*LONG, "--dataset_config", "6"], None, 12),
    "8": Setting("8 operations, untrained", [*LONG, "--dataset_config", "8"], None, 24),
    "8-end": Setting(
        "8 operations, step 40", [*LONG, "--dataset_config", "8"], ("uniform-8", 40), 16
    ),
}


class Method(NamedTuple):
    script: str
    flags: str
    only_wrong: bool = False  # weights for completions with a negative advantage, 1 for the others


METHODS = {
    "uniform (GRPO)": Method("grpo_arca", "--credit uniform"),
    "arca": Method("grpo_arca", "--credit arca"),
    "arca, p = 2": Method("grpo_arca", "--credit arca --sharpening 2"),
    "arca's weights shuffled": Method("grpo_arca", "--credit shuffled"),
    "random weights": Method("grpo_arca", "--credit random"),
    "surprisal": Method("grpo_arca", "--credit surprisal"),
    "entropy reduction": Method("grpo_arca", "--credit entropy_reduction"),
    "divergence": Method("grpo_arca", "--credit divergence"),
    "oar_g": Method("grpo_oar", "--credit oar_g"),
    "oar_p": Method("grpo_oar", "--credit oar_p"),
    "s_trace": Method("grpo_strace", "--credit s_trace"),
    "p_trace": Method("grpo_strace", "--credit p_trace"),
    "gspo": Method("grpo_strace", "--credit gspo"),
    "grpo_lambda, both ends": Method("grpo_strace", "--credit grpo_lambda --trace_kernel both"),
    "arca, wrong only": Method("grpo_arca", "--credit arca", only_wrong=True),
    "surprisal, wrong only": Method("grpo_arca", "--credit surprisal", only_wrong=True),
    "probability": Method("grpo_arca", "--credit probability"),
    "negative_weight 0.25": Method("grpo_arca", "--credit uniform --negative_weight 0.25"),
    "right alone": Method("grpo_arca", "--credit uniform --negative_weight 0"),
    "right alone, by probability": Method("grpo_arca", "--credit probability --negative_weight 0"),
    "arca, right alone": Method("grpo_arca", "--credit arca --negative_weight 0"),
    "oar_g, right alone": Method("grpo_oar", "--credit oar_g --negative_weight 0"),
    "s_trace, right alone": Method("grpo_strace", "--credit s_trace --negative_weight 0"),
}
ORACLES = (
    "oracle: step values", "oracle: on whole steps", "oracle: first wrong token", "oracle: digits",
    "oracle: least variance",
)  # fmt: skip
UNIFORM, NULL, BASELINE = "uniform (GRPO)", "other samples", "optimal token baseline"
EVERYTHING = {*METHODS, *ORACLES, NULL, BASELINE, "reward"}  # of a batch
KEYS = ("worth", "aligned", "adam", "bias", "cosine")


# ---- Gradients: what the processes compute -------------------------------------------------------
@cache
def prepare(name: str, folder: Path, flags: tuple[str, ...]):
    """A run at a setting's policy, and the problems that it draws from."""
    setting = SETTINGS[name]
    args = trainer.parse_args([*SEED, *setting.flags, *flags])
    tokenizer, data, _ = load_data(args)
    run = trainer.build_run(args, tokenizer)
    if setting.policy:
        checkpoint = folder / setting.policy[0] / f"checkpoint-{setting.policy[1]}"
        set_peft_model_state_dict(run.model, load_file(checkpoint / "adapter_model.safetensors"))
    return run, data


def micro_batches(args, batch) -> list:
    """A rollout in micro-batches of like lengths: with all its rows, as oracles learn from those
    without an advantage, too."""
    order = batch.attention.sum(1).argsort(stable=True)
    return [batch.select(rows) for rows in order.split(args.per_device_train_batch_size)]


def credited(method: Method, module, run, micros: list) -> list:
    """Copies of a rollout's micro-batches with the method's advantages and credit."""
    copies = [replace(micro) for micro in micros]
    for micro in copies:
        weight = torch.where(micro.advantages < 0, run.args.negative_weight, 1.0)
        micro.advantages = micro.advantages * weight
    module.score(run, copies, {})
    for micro in copies if method.only_wrong else ():
        wrong = micro.advantages[:, None] < 0
        micro.credit = torch.where(wrong, micro.credit, micro.mask.float())
    return copies


@torch.no_grad()
def token_baseline(run, micros: list) -> list:
    """Copies of the micro-batches with the optimal token baseline (arXiv 2602.07078) in place of
    the group's mean: at token t the mean of the rewards of its completions that still run, each
    weighed by its squared gradient so far, for which the sum of 1 - 2 pi + sum pi^2 stands."""
    size, base = run.args.num_generations, run.model.get_base_model()
    rows = torch.cat([micro.rows for micro in micros])
    energy = torch.zeros(int(rows.max()) + 1, max(micro.mask.shape[1] for micro in micros))
    rewards = torch.zeros(len(energy))
    for micro in micros:
        logp, hidden = run.policy.eval()(micro)
        chances = (trainer.head_logits(base, hidden) / run.args.temperature).softmax(2)  # [B, T, V]
        squared = (1 - 2 * logp.exp() + chances.square().sum(2)) * micro.mask
        energy[micro.rows, : micro.mask.shape[1]] = squared.cumsum(1) * micro.mask
        rewards[micro.rows] = micro.rewards
    grouped = energy.view(-1, size, energy.shape[1])  # [groups, G, T]
    baselines = (rewards.view(-1, size, 1) * grouped).sum(1) / grouped.sum(1).clamp(min=1e-9)
    deviations, copies = rewards.view(-1, size).std(1) + 1e-4, [replace(m) for m in micros]
    for micro in copies:
        group, length = micro.rows // size, micro.mask.shape[1]
        over = micro.rewards[:, None] - baselines[group, :length]
        varied = (micro.advantages != 0)[:, None]
        micro.credit = over / deviations[group, None] * varied * micro.mask
        micro.advantages = torch.ones_like(micro.advantages)  # the credit has the sign
    return copies


def oracle_credits(
    run, data: tuple, micros: list, problem_of: dict, continuations: int
) -> dict[str, list]:
    """Copies of the micro-batches with each oracle's credit."""
    size = run.args.num_generations
    solutions = read_rollout(run, micros, problem_of)
    values = step_values(run, data, solutions, problem_of, continuations)
    made = {name: [replace(micro) for micro in micros] for name in ORACLES}
    for place, micro in enumerate(micros):
        for k, how in ((0, (False,)), (1, (True,)), (4, (False, True))):
            copy = made[ORACLES[k]][place]
            copy.credit = step_advantages(solutions, values, micro, size, *how)
            copy.advantages = torch.ones_like(micro.advantages)  # the credit has the sign
        first, digits = torch.zeros(2, *micro.mask.shape)
        for i, row in enumerate(micro.rows.tolist()):
            ids = micro.ids[i, micro.prompt_width :][micro.mask[i]].tolist()
            pieces = [piece_of(run.tokenizer, token) for token in ids]
            roles = token_roles(pieces, problem_of[row])
            digits[i, : len(roles)] = torch.tensor([float(role != "") for role in roles])
            wrong = torch.tensor([float(role == "first_wrong") for role in roles])
            first[i, : len(roles)] = wrong if wrong.any() else digits[i, : len(roles)]
        made[ORACLES[2]][place].credit = trainer.normalise(first, micro.mask, 1.0)
        made[ORACLES[3]][place].credit = trainer.normalise(digits, micro.mask, 1.0)
    return made


def token_coefficients(module, args, micros: list) -> list[Tensor]:
    """The loss's derivative by every log-prob [B, T] at ratio 1: all that a method is here."""
    completions = sum(len(micro.rows) for micro in micros)
    tokens, found = sum(int(micro.loss_mask.sum()) for micro in micros), []
    for micro in micros:
        logp = torch.zeros(micro.mask.shape, requires_grad=True)
        scale = module.token_scale(args, micro.loss_mask, completions, tokens)
        loss, _ = module.policy_loss(args, micro, logp, logp.detach(), scale)
        found += torch.autograd.grad(loss, logp)
    return found


def gradients(run, micros: list, methods: dict[str, list[Tensor]]) -> dict[str, Tensor]:
    """The adapter's gradient [parameters] under each method's coefficients; forwards are shared,
    and so are equal coefficients (GSPO's and uniform's, ARCA's before the first update)."""
    trained = [p for p in run.model.parameters() if p.requires_grad]
    sums = {name: torch.zeros(sum(p.numel() for p in trained)) for name in methods}
    for place, micro in enumerate(micros):
        constant = micro.advantages == 0  # rows that only oracles learn from
        for rows in (constant.nonzero().squeeze(1), (~constant).nonzero().squeeze(1)):
            if not len(rows):
                continue
            logp, made = trainer.training_forward(run, micro.select(rows)), {}  # [b, t]
            for name, coefficients in methods.items():
                own = coefficients[place][rows, : logp.shape[1]]
                key = own.numpy().tobytes()
                if own.any() and key not in made:
                    parts = torch.autograd.grad(logp, trained, own, retain_graph=True)
                    made[key] = torch.cat([part.flatten() for part in parts])
                sums[name] += made.get(key, 0.0)
    return sums


def measure(
    name: str, batch: int, folder: Path, continuations: int, flags: tuple[str, ...]
) -> None:
    """All methods' gradients of one batch, into a file."""
    path = folder / name / f"{batch}.pt"
    found, run, data = load(path), *prepare(name, folder, flags)
    flags = (*SEED, *SETTINGS[name].flags, *flags)
    run.rollout = batch
    rollout, problem_of = trainer.collect(run, data, {})
    micros, methods = micro_batches(run.args, rollout), {}
    for method_name, method in METHODS.items():
        if method_name in found:
            continue
        module = importlib.import_module(method.script)
        args = module.parse_args([*flags, *method.flags.split()])
        copies = credited(method, module, replace(run, args=args), micros)
        methods[method_name] = token_coefficients(module, args, copies)
    args = trainer.parse_args([*flags, "--credit", "uniform"])
    if not {*ORACLES} <= found.keys():
        exact = oracle_credits(run, data, micros, problem_of, continuations)
        for oracle, copies in exact.items():
            methods[oracle] = token_coefficients(trainer, args, copies)
    if BASELINE not in found:
        methods[BASELINE] = token_coefficients(trainer, args, token_baseline(run, micros))
    found |= gradients(run, micros, methods)
    if NULL not in found:
        run.rollout = 1_000_000 + batch
        others = micro_batches(run.args, trainer.collect(run, data, {})[0])
        for micro in others:
            micro.credit = micro.mask.float()
        found |= gradients(run, others, {NULL: token_coefficients(trainer, args, others)})
    found["reward"] = rollout.rewards.nanmean()
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(found, path.with_suffix(".partial"))
    path.with_suffix(".partial").rename(path)


def load(path: Path) -> dict[str, Tensor]:
    """What has been measured of a batch: gradients by method, and the mean reward."""
    return torch.load(path, mmap=True) if path.exists() else {}


def train_policies(folder: Path) -> None:
    """A uniform run that policies are from."""
    print(f"training {folder.name}, about two minutes", flush=True)
    command = [sys.executable, str(ROOT / "grpo_arca.py"), "--credit", "uniform"]
    command += [*POLICIES[folder.name], "--output_dir", str(folder)]
    command += ["--resume_from_checkpoint", "latest"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, cwd=ROOT)


def in_a_process(function, job: tuple):
    """function(job), in silence and, but on a GPU, on one core."""
    if not trainer.CUDA:
        torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    warnings.filterwarnings("ignore")
    try:
        return function(job)
    except SystemExit as error:  # of a wrong flag: a pool would wait for ever
        raise RuntimeError("a run with these flags ends with the sentence above") from error


def run_all(function, jobs: list[tuple], processes: int) -> None:
    """Of every job, with progress and the time that is left. function returns what to name it."""
    began, done = time.time(), map(function, jobs)
    with contextlib.ExitStack() as stack:
        if processes > 1:
            pool = stack.enter_context(multiprocessing.get_context("spawn").Pool(processes))
            done = pool.imap_unordered(function, jobs)
        for count, name in enumerate(done, start=1):
            each = (time.time() - began) / count
            left = f"{each:.0f} s each, {each * (len(jobs) - count) / 60:.0f} min left"
            print(f"[{count}/{len(jobs)}] {name}; {left}", file=sys.stderr, flush=True)


def measure_job(job: tuple) -> str:
    measure(*job)
    return SETTINGS[job[0]].title


# ---- Figures from gradients ----------------------------------------------------------------------
def pair_mean(products: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Means over pairs of different batches [D] of their inner products [N, N]; a batch counts as
    often as each of the D draws [D, N] has it, and never with itself."""
    apart = products - np.diag(np.diag(products))
    pairs = weights.sum(1) ** 2 - (weights**2).sum(1)  # 0 if a draw has one batch alone
    with np.errstate(invalid="ignore"):
        return (weights @ apart * weights).sum(1) / pairs


def snr(products: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """|mean|^2 / variance [D] of batch gradients with these inner products [N, N]."""
    signal = pair_mean(products, weights)
    power = weights @ np.diag(products) / weights.sum(1)
    return signal.clip(1e-12) / (power - signal)


def as_adam_sees(gradients: np.ndarray) -> np.ndarray:
    """Inner products [N, N] of gradients with each coordinate at root mean square 1, or 0."""
    size = np.sqrt((gradients**2).mean(0))
    scaled = gradients / np.where(size > 1e-9 * size.max(), size, np.inf)
    return scaled @ scaled.T


def figures(gradients: dict[str, np.ndarray], seed: int = 0) -> list[dict]:
    """Worth, bias and cosine of each method from its batch gradients [N, parameters]; low and high
    are the ends of their intervals."""
    uniform = gradients[UNIFORM]
    count = len(uniform)
    drawn = np.random.default_rng(seed).multinomial(count, np.full(count, 1 / count), DRAWS)
    weights = np.concatenate([np.ones((1, count)), drawn])  # the first is the figure itself
    reference, others = uniform @ uniform.T, uniform.sum(0) - uniform  # [N, N], [N, parameters]
    rows, adam_reference = [], snr(as_adam_sees(uniform), weights)
    for name, own in gradients.items():
        products, crossed = own @ own.T, own @ uniform.T
        worth = snr(products, weights) / snr(reference, weights)
        cross = pair_mean(crossed, weights)
        norms = pair_mean(products, weights).clip(1e-12) * pair_mean(reference, weights).clip(1e-12)
        lengths = np.linalg.norm(own, axis=1) * np.linalg.norm(others, axis=1)
        cosines = (own * others).sum(1) / lengths
        cosine = weights @ cosines / count
        adam = snr(as_adam_sees(own), weights) / adam_reference
        bias = cross / norms**0.5
        aligned = worth * bias.clip(0) ** 2
        row = {"method": name, "snr": snr(products, weights)[0]}
        for key, values in zip(KEYS, (worth, aligned, adam, bias, cosine), strict=True):
            low, high = np.nanpercentile(values[1:], [2.5, 97.5])
            row |= {key: values[0], f"{key}_low": low, f"{key}_high": high}
        rows.append(row)
    return rows


def nearest(gradients: dict[str, np.ndarray]) -> dict[str, dict]:
    """The other method whose gradients are most like a method's: mean cosine on the same batch."""
    units = {m: g / np.linalg.norm(g, axis=1, keepdims=True) for m, g in gradients.items()}
    found = {}
    for name, own in units.items():
        cosines = {m: (own * g).sum(1).mean() for m, g in units.items() if m != name}
        twin = max(cosines, key=cosines.get)
        found[name] = {"nearest": twin, "nearest_cosine": cosines[twin]}
    return found


def tabulate(name: str, folder: Path, batches: int | None = None) -> list[dict]:
    """The figures of a setting, from the batches that are there, or the first of them."""
    count = batches or SETTINGS[name].batches
    found = [load(folder / name / f"{batch}.pt") for batch in range(count)]
    found = [file for file in found if EVERYTHING <= file.keys()]
    if len(found) < 4:
        return []
    stacked = {
        method: torch.stack([file[method] for file in found]).double().numpy()
        for method in (*METHODS, BASELINE, *ORACLES, NULL)
    }
    reward = float(sum(file["reward"] for file in found)) / len(found)
    about = {"setting": SETTINGS[name].title, "batches": len(found), "reward": reward}
    twins = nearest(stacked)
    return [about | row | twins[row["method"]] for row in figures(stacked)]


def draw(rows: list[dict], path: Path) -> None:
    """Worth by method, raw and Adam's, a panel a setting: oracles on top, then by worth in the
    last."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    titles = list(dict.fromkeys(row["setting"] for row in rows))
    last = [row for row in rows if row["setting"] == titles[-1]]
    names = sorted(
        {*METHODS, BASELINE} - {UNIFORM},
        key=lambda n: [r["worth"] for r in last if r["method"] == n],
    )
    names = [NULL, *names, *reversed(ORACLES)]
    columns, lines = min(3, len(titles)), -(-len(titles) // 3)
    size = (2.3 + 2.6 * columns, lines * (0.25 * len(names) + 0.8) + 0.6)
    figure, panels = plt.subplots(lines, columns, figsize=size, sharey=True, squeeze=False)
    for axes in panels.flat[len(titles) :]:
        axes.set_visible(False)
    for axes, title in zip(panels.flat, titles):
        of = {row["method"]: row for row in rows if row["setting"] == title}
        axes.axvline(1, color="#888888", linewidth=1)
        for place, name in enumerate(names):
            row = of[name]
            colour = "#D55E00" if name in ORACLES else "#888888" if name == NULL else "#0072B2"
            filled = colour if row["bias_low"] > 0.9 else "white"  # hollow: it may point elsewhere
            for key, marker, shift in (("worth", "o", 0.15), ("adam", "s", -0.15)):
                ends, y = np.clip([row[f"{key}_low"], row[f"{key}_high"]], 0.03, 30), place + shift
                axes.plot(ends, [y] * 2, color=colour, linewidth=2, alpha=0.5)
                style = {"color": colour, "markerfacecolor": filled, "markersize": 5}
                axes.plot(row[key], y, marker, **style)
        axes.set_xscale("log")
        axes.set_xticks([0.25, 0.5, 1, 2, 4, 8], ["¼", "½", "1", "2", "4", "8"])
        axes.set_xlim(0.15, 9)
        axes.minorticks_off()
        reward = next(iter(of.values()))["reward"]
        axes.set_title(f"{title}\n{reward:.0%} right", loc="left", fontsize=9, fontweight="bold")
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    for axes in panels[:, 0]:
        axes.set_yticks(range(len(names)), names, fontsize=9)
    meaning = (
        "worth: how many completions under uniform credit (GRPO) one is worth, with 95% interval; "
        "squares: as Adam scales gradients; "
        "hollow: the mean gradient may be more than 25 degrees off the policy gradient"
    )
    figure.supxlabel(textwrap.fill(meaning, int(size[0] * 14)), fontsize=9)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def write_table(rows: list[dict], path: Path) -> None:
    with open(path, "w", newline="") as file:
        lines = csv.DictWriter(file, rows[0])
        lines.writeheader()
        for row in rows:
            shown = {k: f"{x:.4g}" if isinstance(x, float) else x for k, x in row.items()}
            lines.writerow(shown)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    parser.add_argument("--batches", type=int, help="of each setting, if not its own number")
    parser.add_argument("--continuations", type=int, default=32, help="of oracles, from each step")
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--draw", action="store_true", help="measure nothing more")
    parser.add_argument("--folder", type=Path, default=ROOT / "runs/gradient_quality")
    parser.add_argument("--output", type=Path, default=ROOT / "results/data/gradient_quality")
    split = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    args = parser.parse_args(sys.argv[1:split])
    args.flags = sys.argv[split + 1 :]
    if not args.draw:
        trained = {SETTINGS[name].policy[0] for name in args.settings if SETTINGS[name].policy}
        for name in sorted(trained):
            if not (args.folder / name / "summary.json").exists():
                train_policies(args.folder / name)
        jobs = [
            (name, batch, args.folder, args.continuations, tuple(args.flags))
            for name in args.settings
            for batch in range(args.batches or SETTINGS[name].batches)
            if not EVERYTHING <= load(args.folder / name / f"{batch}.pt").keys()
        ]
        run_all(partial(in_a_process, measure_job), jobs, args.processes)
    rows = [row for name in args.settings for row in tabulate(name, args.folder, args.batches)]
    if not rows:
        sys.exit("gradient_quality.py: nothing to draw: four batches of a setting are the least")
    write_table(rows, args.output.with_suffix(".csv"))
    draw(rows, args.output.with_suffix(".png"))
    for row in rows:
        parts = [f"{k} {row[k]:.2f} ({row[k + '_low']:.2f} - {row[k + '_high']:.2f})" for k in KEYS]
        parts.append(f"nearest {row['nearest']} ({row['nearest_cosine']:.3f})")
        print(f"{row['setting']:26s} {row['method']:26s} {'  '.join(parts)}")


if __name__ == "__main__":
    main()
