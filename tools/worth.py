"""Measures before you train how good a gradient a credit method gives.

    python tools/worth.py methods/oppo.py "grpo_arca.py --credit surprisal"   # ten minutes, 2 cores
    python tools/worth.py my.py --batches 24 -- --model_name_or_path Qwen/Qwen3-1.7B \\
        --dataset_name openai/gsm8k --dataset_config main --max_completion_length 256
    python tools/worth.py my.py -- --start_adapter runs/x/adapter    # in the middle of a run
    python tools/worth.py methods/ctpo.py --updates 3     # where ratios are no longer 1

A method is a file as tools/fork.py describes it, or a script with CREDIT regions; with flags, put
it in quotes. The flags after `--` go to all methods and to plain GRPO, with which they are
compared. Every method gets the same batches, each a rollout with those flags by the same policy,
and turns each batch into a gradient of the adapter. The table shows, with 95%
bootstrap intervals over batches:

    worth      the signal-to-noise ratio |mean|^2 / variance of the batch gradients, divided by
               that of plain GRPO
    adam       the same, with each coordinate divided by its root mean square, as the optimizer does
    direction  the cosine of the mean gradient with that of plain GRPO, which is the policy
               gradient: 1 is the same direction, 0 a right angle

Each row ends with a verdict. A method is better than GRPO where the whole interval of `adam` is
above 1, and worse where it is below, unless all of it is within 2% of 1. Four times the batches
make an interval about half as wide. If the whole interval of `direction` is below .9, the gradient
is said to have another direction, whatever its worth: it is good at something else.

`half of the groups` is the control: plain GRPO that leaves out every other group, and so is worth
exactly 1/2. If the interval of its `worth` misses 1/2 or includes 1, which may happen, the other
rows need more batches, too. Its `adam` is often above 1/2, because division by the root mean square
hides how clean a coordinate of strong signal is.

|mean|^2 and <mean, mean'> are means over pairs of different batches, and therefore unbiased.
`direction` divides one such mean by the roots of two others, which correct it for noise, so the
estimate may exceed 1. The table then shows 1, and the .csv file the estimate. Intervals are
percentile bootstraps over batches, with the same draws for a method and for GRPO.

With --updates K the gradient is that of update K + 1 on a rollout. The methods score the rollout,
the policy takes K steps of plain GRPO on it, the same for all methods, and then the gradients are
measured. After each batch, the policy is restored. What a method changes in the course of a run, as
--rlsd_lambda_decay_steps does, changes from batch to batch.

A method may be worth more at one policy than at another, so measure at two. --coordinates says how
many coordinates of each gradient are kept, the same random ones in every batch (all, if there are
no more). The command resumes, and measures again whatever a change of methods, code, model, adapter
or data has made outdated. Its files are in runs/worth/ and take 4 bytes for each coordinate, method
and batch.
"""

import argparse
import copy
import hashlib
import itertools
import logging
import math
import multiprocessing
import shlex
import sys
import types
import warnings
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "results")]
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # as in the scripts

import numpy as np
import pandas
import torch
import transformers
from fork import fork
from studies import cores
from torch import Tensor
from tqdm import tqdm

import grpo_arca as trainer
from common import fail

UNIFORM = "uniform (GRPO)"
HALF = "half of the groups"
PLAIN_FLAGS = ["--credit", "uniform"]
FIRST_FLAGS = ["--seed", "99"]  # no training run has this seed
# Flags of all scripts that a method may set for itself. Any others would change the batches.
OWN_FLAGS = {
    "credit", "sharpening", "negative_weight", "loss_type", "epsilon", "epsilon_high", "output_dir"
}  # fmt: skip
PRINTED_FIGURES = ("worth", "adam", "direction")
OTHER_DIRECTION = 0.9  # a cosine below this is more than 25 degrees off
NEGLIGIBLE = 0.02  # a worth that is nearer to 1 counts as GRPO's
BOOTSTRAP_DRAWS = 2000


# ---- Gradients: what a process computes ----------------------------------------------------------
def source_of(path: Path) -> str:
    """Returns the text of a script, or of the one that a method's file becomes."""
    text = path.read_text()
    return text if "class Args" in text else fork(path)


@cache
def load_script(path: Path) -> Any:
    """Returns as a module a script, or the one that a method's file becomes."""
    module = types.ModuleType(f"method_{path.stem}")
    module.__file__ = str(ROOT / f"{path.stem}.py")
    sys.modules[module.__name__] = module  # where its data classes look for it
    exec(compile(source_of(path), path, "exec"), vars(module))
    return module


def load_method(method: str) -> tuple[Any, list[str]]:
    """Returns the script of "script.py --flag value" as a module, and its flags."""
    if method in (UNIFORM, HALF):
        return trainer, PLAIN_FLAGS
    script, *flags = shlex.split(method)
    return load_script(Path(script).resolve()), flags


@cache
def prepare(flags: tuple[str, ...]) -> trainer.Run:
    """Returns a run with the policy to measure and its problems."""
    warnings.filterwarnings("ignore")
    transformers.logging.disable_progress_bar()
    if not trainer.CUDA:
        torch.set_num_threads(1)
    # `scored` applies each method's own negative weight.
    return trainer.Run(
        trainer.parse_args(
            [
                *FIRST_FLAGS,
                *flags,
                *PLAIN_FLAGS,
                "--negative_weight=1",
                "--lr_scheduler_type=constant",
            ]
        )
    )


def scored(
    run: trainer.Run, rollout: trainer.Batch, method: str, flags: tuple[str, ...]
) -> tuple[Any, trainer.Run, list[trainer.Batch]]:
    """Scores a rollout under a method. Returns its script, its run and its micro-batches."""
    script, own_flags = load_method(method)
    own_run = copy.copy(run)
    own_run.args = script.parse_args([*FIRST_FLAGS, *flags, *own_flags])
    advantages = rollout.advantages.clone()  # [B]
    advantages[advantages < 0] *= own_run.args.negative_weight  # as `collect` does
    if method == HALF:
        advantages[rollout.rows // run.args.num_generations % 2 == 1] = 0.0
    own_rollout = replace(rollout, advantages=advantages)
    updates = trainer.micro_batches(own_run, own_rollout)
    micros = list(itertools.chain.from_iterable(updates))
    script.score(own_run, own_rollout, micros, {})
    return script, own_run, micros


def gradient(script: Any, run: trainer.Run, micros: list[trainer.Batch]) -> Tensor:
    """Returns the adapter's gradient [parameters] of scored micro-batches, on the CPU."""
    trained = [parameter for parameter in run.model.parameters() if parameter.requires_grad]
    total = torch.zeros(sum(parameter.numel() for parameter in trained))
    for micro in micros:
        logp = script.training_forward(run, micro)
        old_logp = logp.detach() if micro.old_logp is None else micro.old_logp
        loss, _ = script.policy_loss(run, micro, logp, old_logp)
        parts = torch.autograd.grad(loss, trained)
        total += torch.cat([part.flatten() for part in parts]).float().cpu()
    return total


def measure(
    path: Path, methods: dict[str, str], flags: tuple[str, ...], updates: int, coordinates: int
) -> None:
    """Adds to the file of a batch the gradients that it lacks.

    The name of the file is the number of the batch, which determines problems and samples. A method
    stands for its key in the file. There are so many `updates` before the gradients, of which so
    many `coordinates` are kept.
    """
    run = prepare(flags)
    run.updates_per_rollout = updates + 1  # more than one: `score` keeps the old log-probs
    run.step = int(path.stem) * run.updates_per_rollout
    rollout = trainer.collect(run, {})
    found = load(path) | {"reward": rollout.rewards.nanmean().cpu()}
    missing = {key: method for key, method in methods.items() if key not in found}
    scored_under = {key: scored(run, rollout, method, flags) for key, method in missing.items()}
    _, _, micros = scored(run, rollout, UNIFORM, flags)
    for _ in range(updates):
        trainer.update(run, micros)
    for key, of_method in scored_under.items():
        whole = gradient(*of_method)
        order = torch.randperm(len(whole), generator=torch.Generator().manual_seed(0))
        found[key] = whole[order[:coordinates].sort().values]
    run.policy.load_state_dict(run.start_weights, strict=False)
    run.optimizer.state.clear()

    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".unfinished")  # so that an interruption leaves no half file
    torch.save(found, unfinished)
    unfinished.rename(path)


def load(path: Path) -> dict[str, Tensor]:
    """Returns what has been measured of a batch: gradients by the key of their method."""
    return torch.load(path, mmap=True) if path.exists() else {}


# ---- Figures from gradients ----------------------------------------------------------------------
def pair_mean(products: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Returns, for each of D draws, the mean inner product over pairs of different batches [D].

    `products` [N, N] holds the inner products, and `weights` [D, N] how often a draw has a batch.
    A batch is never paired with itself.
    """
    off_diagonal = products - np.diag(np.diag(products))
    pairs = weights.sum(1) ** 2 - (weights**2).sum(1)  # 0 if a draw has only one batch
    with np.errstate(invalid="ignore"):
        return (weights @ off_diagonal * weights).sum(1) / pairs


def signal_to_noise(products: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Returns |mean|^2 / variance [D] of batch gradients with these inner products [N, N]."""
    signal = pair_mean(products, weights)
    power = weights @ np.diag(products) / weights.sum(1)
    return signal.clip(1e-12 * power) / (power - signal)


def as_adam_sees(gradients: np.ndarray) -> np.ndarray:
    """Returns inner products [N, N] of gradients whose coordinates have root mean square 1, or 0.

    Adam divides a coordinate by its root mean square, too.
    """
    size = np.sqrt((gradients**2).mean(0))
    divisor = np.where(size > 1e-9 * size.max(), size, np.inf)
    scaled = gradients / divisor
    return scaled @ scaled.T


def with_interval(key: str, values: np.ndarray) -> dict[str, float]:
    """Returns a figure and the ends of its 95% interval, from the figure and its draws [1 + D]."""
    low, high = np.nanpercentile(values[1:], [2.5, 97.5])
    return {key: values[0], f"{key}_low": low, f"{key}_high": high}


def figures(gradients: dict[str, np.ndarray]) -> list[dict[str, Any]]:
    """Returns a row for each method from its batch gradients [N, parameters].

    A row has the figures and the ends of their intervals, `_low` and `_high`.
    """
    uniform = gradients[UNIFORM]
    count = len(uniform)
    rng = np.random.default_rng(0)
    draws = rng.multinomial(count, np.full(count, 1 / count), BOOTSTRAP_DRAWS)
    weights = np.concatenate([np.ones((1, count)), draws])  # the first gives the figure itself

    uniform_products = uniform @ uniform.T  # [N, N]
    uniform_snr = signal_to_noise(uniform_products, weights)
    uniform_square = pair_mean(uniform_products, weights).clip(1e-12 * np.trace(uniform_products))
    adam_snr = {
        name: signal_to_noise(as_adam_sees(own), weights) for name, own in gradients.items()
    }

    rows = []
    for name, own in gradients.items():
        products = own @ own.T
        snr = signal_to_noise(products, weights)
        square = pair_mean(products, weights).clip(1e-12 * np.trace(products))
        direction = pair_mean(own @ uniform.T, weights) / (square * uniform_square) ** 0.5
        values = {
            "worth": snr / uniform_snr,
            "adam": adam_snr[name] / adam_snr[UNIFORM],
            "direction": direction,
        }
        row: dict[str, Any] = {"method": name, "snr": snr[0]}
        for key, draws_of_figure in values.items():
            row |= with_interval(key, draws_of_figure)
        rows.append(row)
    return rows


# ---- The table -----------------------------------------------------------------------------------
def shown_figure(row: dict[str, Any], key: str) -> str:
    """Returns "1.23 (1.01 - 1.45)", with a question mark where there is no signal.

    A direction is a cosine: an estimate above 1 is shown as 1.
    """
    cells = []
    for end in ("", "_low", "_high"):
        number = min(row[key + end], 1.0 if key == "direction" else math.inf)
        has_signal = math.isfinite(number) and len(f"{number:.2f}") < 6
        cells.append(f"{number:.2f}" if has_signal else "?")
    return "{} ({} - {})".format(*cells)


def verdict(row: dict[str, Any]) -> str:
    """Returns in words what the intervals say about the method of a row."""
    if row["method"] == HALF:
        # Beyond 1, half could not be told from all of the groups.
        holds = row["worth_low"] < 0.5 < row["worth_high"] <= 1
        return "control: holds" if holds else "control: does not hold, take more --batches"
    low = row["adam_low"]
    high = row["adam_high"]
    difference = max(abs(low - 1), abs(high - 1))
    if difference < 1e-6:
        words = "the same as GRPO"
    elif difference < NEGLIGIBLE:
        words = f"within {NEGLIGIBLE:.0%} of GRPO"
    elif low > 1:
        words = "better than GRPO"
    elif high < 1:
        words = "worse than GRPO"
    else:
        words = "cannot be told"
    if row["direction_high"] < OTHER_DIRECTION:
        words += "; in another direction"
    return words


def report(rows: list[dict[str, Any]]) -> str:
    """Returns the table: a line with a verdict for each method."""
    table = pandas.DataFrame(rows)[["method", *PRINTED_FIGURES, "verdict"]]
    for key in PRINTED_FIGURES:
        table[key] = [shown_figure(row, key) for row in rows]
    table = table.set_index("method").rename_axis(None)
    return table.to_string(formatters={"verdict": "  {:43}".format})


# ---- Command line --------------------------------------------------------------------------------
def digest(*parts: object) -> str:
    """Returns a short name for something."""
    return hashlib.blake2b(repr(parts).encode(), digest_size=8).hexdigest()


def keys_of(methods: list[str], flags: tuple[str, ...]) -> dict[str, str]:
    """Returns the methods by the keys of their gradients. A changed script gets another key."""
    keys = {UNIFORM: UNIFORM, HALF: HALF}
    plain = vars(trainer.parse_args([*FIRST_FLAGS, *flags]))
    for method in methods:
        script, own_flags = load_method(method)
        args = vars(script.parse_args([*FIRST_FLAGS, *flags, *own_flags]))
        for name in plain.keys() - OWN_FLAGS:
            if name in args and args[name] != plain[name]:
                fail(f"--{name} of {method} makes other batches: give it to all, after --")
        keys[digest(source_of(Path(shlex.split(method)[0])), own_flags)] = method
    return keys


def folder_name(flags: tuple[str, ...], *others: object) -> str:
    """Returns a name that changes with all that the batches depend on."""
    run = prepare(flags)
    config = {name: value for name, value in run.config.items() if name != "output_dir"}
    texts = [source.read_text() for source in sorted(ROOT.glob("common/*.py"))]
    return digest(run.identity, config, texts, flags, others)


def parse_options(argv: list[str]) -> tuple[argparse.Namespace, tuple[str, ...]]:
    """Returns this program's options, and the flags after `--`."""
    split = argv.index("--") if "--" in argv else len(argv)
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("methods", nargs="*", help='"file.py --flag value"')
    parser.add_argument("--batches", type=int, default=24)
    parser.add_argument("--updates", type=int, default=0, help="on a batch before its gradients")
    parser.add_argument("--coordinates", type=int, default=2**20, help="of a gradient, kept")
    parser.add_argument("--processes", type=int, default=1 if trainer.CUDA else cores())
    parser.add_argument("--folder", type=Path, default=ROOT / "runs/worth")
    parser.add_argument("--output", type=Path, help="the table as .csv")
    options = parser.parse_args(argv[:split])
    if options.batches < 4:
        parser.error("--batches must be at least 4")
    return options, tuple(argv[split + 1 :])


def main() -> None:
    options, flags = parse_options(sys.argv[1:])
    methods = keys_of(options.methods, flags)
    run = prepare(flags)
    if run.rollout_size // run.args.num_generations % 2 == 1:
        fail("the control takes half of the groups of a rollout: make their number even")
    name = folder_name(flags, options.updates, options.coordinates)
    paths = [options.folder / name / f"{batch}.pt" for batch in range(options.batches)]
    todo = [path for path in paths if set(methods) - load(path).keys()]
    fill = partial(
        measure,
        methods=methods,
        flags=flags,
        updates=options.updates,
        coordinates=options.coordinates,
    )
    with ProcessPoolExecutor(options.processes, multiprocessing.get_context("spawn")) as pool:
        done = map(fill, todo) if options.processes == 1 else pool.map(fill, todo)
        list(tqdm(done, total=len(todo), unit="batch", disable=not todo))

    found = [load(path) for path in paths]
    gradients = {
        method: torch.stack([batch[key] for batch in found]).double().numpy()
        for key, method in methods.items()
    }
    rows = figures(gradients)
    for row in rows:
        row["verdict"] = verdict(row)
    rewards = [batch["reward"].item() for batch in found]
    print(f"{options.batches} batches, mean reward {np.mean(rewards):.3f}\n{report(rows)}")
    if options.output:
        pandas.DataFrame(rows).to_csv(options.output, index=False, float_format="%.4g")


if __name__ == "__main__":
    main()
