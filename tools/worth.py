"""Measures before you train: what is one completion worth under a credit method?

    python tools/worth.py my_method.py "grpo_arca.py --credit surprisal"    # ten minutes, 2 cores
    python tools/worth.py my_method.py --batches 24 -- --model_name_or_path Qwen/Qwen3-1.7B \\
        --dataset_name openai/gsm8k --max_completion_length 256
    python tools/worth.py my_method.py --adapter runs/x/adapter -- ...   # in the middle of a run

A method is a script with a CREDIT region, and its flags, in quotes. The flags after `--` go to all
methods and to plain GRPO, with which they are compared. Every method gets the same batches, each a
rollout of those flags by the same policy, and turns each of them into a gradient of the adapter.
The table shows, with 95% intervals over batches:

    worth        the signal-to-noise ratio |mean|^2 / variance of the batch gradients, divided by
                 that of plain GRPO
    adam         the same, with each coordinate divided by its root mean square, as the optimizer
                 does
    completions  so many completions under plain GRPO are as good as one under the method, to Adam
    direction    the cosine of the mean gradient with that of plain GRPO, which is the policy
                 gradient: 1 is the same direction, 0 a right angle

Each row ends with a verdict. A method is better than GRPO where the whole interval of `adam` is
above 1, and worse where it is below, unless all of it is within 2% of 1. If it holds 1, the verdict
says how many batches would tell: an interval becomes narrower as 1 / sqrt(batches), and `adam` is
taken to stay where it is.

`half of the groups` is the control: plain GRPO that leaves out every other group, and so is worth
exactly 1/2. If the interval of its `worth` misses 1/2, which may happen, the other rows need more
batches, too. Its `adam` is often above 1/2, because division by the root mean square hides how
clean a coordinate of strong signal is. That shows how to read `adam` as completions: `completions`
is `adam`, raised to the power that makes the control 1/2.

|mean|^2 and <mean, mean'> are means over pairs of different batches, and therefore unbiased.
`direction` divides one such mean by the roots of two others, which correct it for noise, so the
estimate may exceed 1. The table then shows 1, and the .csv file the estimate. Intervals are
percentile bootstraps over batches, with the same draws for a method and for GRPO.

Above the table stand the share of the reward that the policy earns, the entropy of its tokens, and
the ratio of two squared gradients: of a completion below its group's mean, over one above it. The
baseline of least variance weighs rewards by these squares. So the longer the gradients of wrong
completions are, the more is gained by leaving them out (--negative_weight 0).

A method may be worth more at one policy than at another, so measure at two. The .csv file has two
more figures: `aligned`, which is worth * direction^2, and `cosine`, of the gradient of one batch
with the mean gradient of the others under plain GRPO.

Of each gradient, --coordinates are kept, the same random ones in every batch (all, if there are no
more). The command resumes. With another script, reward function, adapter, model or data it measures
again. Its files are in runs/worth/ and take 4 bytes for each coordinate, method and batch.
"""

import argparse
import contextlib
import csv
import hashlib
import importlib.util
import inspect
import logging
import math
import multiprocessing
import os
import shlex
import sys
import time
import warnings
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, NoReturn

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # as in the scripts

import numpy as np
import torch
import transformers
from peft import set_peft_model_state_dict
from safetensors.torch import load_file
from torch import Tensor

import grpo_arca as trainer
from common.data import DataError, load_data
from common.reward import RewardError, load_reward_funcs

UNIFORM = "uniform (GRPO)"
HALF = "half of the groups"
PLAIN_FLAGS = ["--credit", "uniform", "--negative_weight", "1"]
SEED = ["--seed", "99"]  # no training run of ours has it
# The flags of all scripts that a method may set. Any other would make other batches.
OWN_FLAGS = {"credit", "sharpening", "score_in_fp32", "negative_weight", "loss_type"}
OWN_FLAGS |= {"epsilon", "epsilon_high"}  # at a ratio of 1 nothing is clipped
OWN_FLAGS |= {"output_dir", "run_name"}
PRINTED_FIGURES = ("worth", "adam", "completions", "direction")
OTHER_DIRECTION = 0.9  # a cosine below this is more than 25 degrees off
NEGLIGIBLE = 0.02  # a worth that is nearer to 1 is that of GRPO
MOST_BATCHES = 10_000  # beyond that, a verdict names no number
BOOTSTRAP_DRAWS = 2000
LONGEST_MESSAGE = 600  # characters

Measured = dict[str, Tensor]  # what the file of a batch holds: gradients by the key of their method


def fail(message: object) -> NoReturn:
    """Ends the program with a sentence about the user's mistake."""
    sys.exit(f"worth.py: error: {message}")


# ---- Gradients: what a process computes ----------------------------------------------------------
class Job(NamedTuple):
    """One batch to measure."""

    path: Path  # of its file
    batch: int  # its number, which determines problems and samples
    methods: dict[str, str]  # key in the file -> method
    flags: tuple[str, ...]  # of all methods
    adapter: str | None  # a folder, or None for a new adapter
    coordinates: int  # to keep of a gradient


@cache
def load_script(path: Path) -> ModuleType:
    """Imports a script from anywhere, once."""
    spec = importlib.util.spec_from_file_location(f"method_{path.stem}", path)
    assert spec is not None and spec.loader is not None  # the path ends in .py
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def load_method(method: str) -> tuple[ModuleType, list[str]]:
    """Returns the script of "script.py --flag value" as a module, and its flags.

    Raises ValueError if there is no such script, or if it is not a trainer.
    """
    if method in (UNIFORM, HALF):
        return trainer, PLAIN_FLAGS
    script, *flags = shlex.split(method)
    found = [path for path in (Path(script), ROOT / script) if path.is_file()]
    if not found or found[0].suffix != ".py":
        raise ValueError(f"there is no script {script}: name a copy of grpo_arca.py")
    module = load_script(found[0].resolve())
    if not hasattr(module, "token_scores") or not hasattr(module, "policy_loss"):
        raise ValueError(f"{script} has no token_scores or no policy_loss: name a trainer")
    return module, flags


@cache
def prepare(flags: tuple[str, ...], adapter: str | None) -> tuple[trainer.Run, trainer.ProblemSet]:
    """Returns a run with the policy to measure, and the problems that it draws from."""
    args = trainer.parse_args([*SEED, *flags, *PLAIN_FLAGS])
    tokenizer, train_set, _ = load_data(args)
    run = trainer.build_run(args, tokenizer)
    if adapter is not None:
        load_adapter(run, adapter)
    return run, train_set


def load_adapter(run: trainer.Run, adapter: str) -> None:
    """Loads the weights of an adapter's folder into a run whose adapter has the same shape."""
    weights = load_file(Path(adapter) / "adapter_model.safetensors")
    unknown = set_peft_model_state_dict(run.model, weights).unexpected_keys
    if unknown:
        raise ValueError(f"{adapter} is not of this model: it has {unknown[0]}")
    if len(weights) != len(trained_parameters(run)):
        raise ValueError(f"{adapter} adapts other layers: give its --lora_target_modules after --")
    _, saved = trainer.find_adapter(adapter, "main")
    for name in ("lora_r", "lora_alpha"):
        if saved.get(name) != getattr(run.args, name):
            raise ValueError(f"{adapter} has --{name} {saved.get(name)}: give that after --")


def trained_parameters(run: trainer.Run) -> list[torch.nn.Parameter]:
    """Returns the parameters of the adapter."""
    return [parameter for parameter in run.model.parameters() if parameter.requires_grad]


def scored(
    run: trainer.Run, rollout: trainer.Batch, method: str, flags: tuple[str, ...]
) -> tuple[trainer.Run, ModuleType, list[trainer.Batch]]:
    """Scores a rollout under a method. Returns its run, its script and its micro-batches."""
    module, own_flags = load_method(method)
    args = module.parse_args([*SEED, *flags, *own_flags])
    own_run = replace(run, args=args)

    advantages = rollout.advantages.clone()  # [B]
    advantages[advantages < 0] *= args.negative_weight  # as `collect` does
    if method == HALF:
        group = rollout.rows // args.num_generations
        advantages[group % 2 == 1] = 0.0

    own_rollout = replace(rollout, advantages=advantages)
    updates = trainer.micro_batches(run.args, own_rollout)
    micros = [micro for update in updates for micro in update]
    module.score(own_run, own_rollout, micros, {})
    return own_run, module, micros


def gradient(
    run: trainer.Run, module: ModuleType, micros: list[trainer.Batch], completions: int
) -> Tensor:
    """Returns the adapter's gradient [parameters] of an update on scored micro-batches, on the CPU.

    All ratios are 1, as in the first update on a rollout.
    """
    trained = trained_parameters(run)
    total = torch.zeros(sum(parameter.numel() for parameter in trained))
    for micro in micros:
        logp = module.training_forward(run, micro)
        scale = module.token_scale(run.args, micro.loss_mask, completions, micro.update_tokens)
        loss, _ = module.policy_loss(run.args, micro, logp, logp.detach(), scale)
        parts = torch.autograd.grad(loss, trained)
        total += torch.cat([part.flatten() for part in parts]).float().cpu()
    return total


def method_gradient(
    run: trainer.Run, rollout: trainer.Batch, method: str, flags: tuple[str, ...]
) -> Tensor:
    """Returns the gradient [parameters] of a rollout under a method."""
    own_run, module, micros = scored(run, rollout, method, flags)
    return gradient(own_run, module, micros, len(rollout.rows))


def squares(run: trainer.Run, rollout: trainer.Batch) -> Tensor:
    """Returns counts and sums of squared gradients [2, 2] of single completions.

    The first row is of the completions below their group's mean, the second of those above it. The
    first column is how many there are, the second the sum of the squared lengths of their
    gradients, each without its advantage.
    """
    trained = trained_parameters(run)
    one_by_one = replace(run.args, per_device_train_batch_size=1)
    found = torch.zeros(2, 2)
    for update in trainer.micro_batches(one_by_one, rollout):
        for row in update:
            if not row.loss_mask.any():  # stands for an update without a gradient
                continue
            scale = trainer.token_scale(run.args, row.loss_mask, 1, row.update_tokens)
            mean_logp = (trainer.training_forward(run, row) * scale).sum()
            parts = torch.autograd.grad(mean_logp, trained)
            squared_length = sum(float(part.float().square().sum()) for part in parts)
            is_above = int(row.advantages > 0)
            found[is_above] += torch.tensor([1.0, squared_length])
    return found


def measure(job: Job) -> str:
    """Adds to the file of a batch the gradients that it lacks. Returns what to call the batch."""
    found = load(job.path)
    run, train_set = prepare(job.flags, job.adapter)
    run.rollout = job.batch
    rollout = trainer.collect(run, train_set, {})
    if "squares" not in found:
        found["reward"] = rollout.rewards.nanmean().cpu()
        found["entropy"] = rollout.entropy[rollout.mask].mean().cpu()
        found["squares"] = squares(run, rollout)

    for key, method in job.methods.items():
        if key in found:
            continue
        whole = method_gradient(run, rollout, method, job.flags)
        found[key] = whole
        if len(whole) > job.coordinates:
            order = torch.randperm(len(whole), generator=torch.Generator().manual_seed(0))
            found[key] = whole[order[: job.coordinates].sort().values]
    save(found, job.path)
    return f"batch {job.batch}"


# ---- Files and processes -------------------------------------------------------------------------
def load(path: Path) -> Measured:
    """Returns what has been measured of a batch."""
    return torch.load(path, mmap=True) if path.exists() else {}


def save(found: Measured, path: Path) -> None:
    """Writes the file of a batch, so that an interruption cannot leave half of one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial_path = path.with_suffix(".partial")
    torch.save(found, partial_path)
    partial_path.rename(path)


def run_quietly(function: Callable[[Any], str], job: Any) -> str:
    """Returns function(job), computed in silence and, without a GPU, on one core."""
    if not trainer.CUDA:
        torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    warnings.filterwarnings("ignore")
    try:
        return function(job)
    except SystemExit as error:  # after a wrong flag; a pool would wait for ever
        raise RuntimeError("a run with these flags ends with the sentence above") from error


def run_all(function: Callable[[Any], str], jobs: list, processes: int) -> None:
    """Does every job, and prints its progress and how much time is left."""
    began = time.time()
    quiet_function = partial(run_quietly, function)
    with contextlib.ExitStack() as stack:
        names: Iterable[str] = map(quiet_function, jobs)
        if processes > 1:
            pool = stack.enter_context(multiprocessing.get_context("spawn").Pool(processes))
            names = pool.imap_unordered(quiet_function, jobs)
        for done, name in enumerate(names, start=1):
            seconds = (time.time() - began) / done
            minutes_left = seconds * (len(jobs) - done) / 60
            progress = f"[{done}/{len(jobs)}] {name}"
            times = f"{seconds:.0f} s each, {minutes_left:.0f} min left"
            print(f"{progress}; {times}", file=sys.stderr, flush=True)


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
    return signal.clip(1e-12) / (power - signal)


def as_adam_sees(gradients: np.ndarray) -> np.ndarray:
    """Returns inner products [N, N] of gradients whose coordinates have root mean square 1, or 0.

    Adam divides a coordinate by its root mean square, too.
    """
    size = np.sqrt((gradients**2).mean(0))
    divisor = np.where(size > 1e-9 * size.max(), size, np.inf)
    scaled = gradients / divisor
    return scaled @ scaled.T


def as_completions(adam: np.ndarray, half_adam: np.ndarray) -> np.ndarray:
    """Returns Adam's worths [D] on the scale on which half of the groups is worth 1/2.

    `half_adam` [D] is what it is worth to Adam. In a draw where that is 1 or more, nothing can be
    told apart, and the result lies near 0 or is huge. If it is 1 or more in the first, which is the
    estimate, all results are NaN.
    """
    if half_adam[0] >= 0.99:
        return np.full_like(adam, np.nan)
    power = math.log(0.5) / np.log(half_adam.clip(1e-12, 0.99))
    with np.errstate(over="ignore"):
        return (adam**power).clip(max=1e6)


def with_interval(key: str, values: np.ndarray) -> dict[str, float]:
    """Returns a figure and the ends of its 95% interval, from the figure and its draws [1 + D]."""
    if np.isnan(values[0]):
        return {key: np.nan, f"{key}_low": np.nan, f"{key}_high": np.nan}
    low, high = np.nanpercentile(values[1:], [2.5, 97.5])
    return {key: values[0], f"{key}_low": low, f"{key}_high": high}


def figures(gradients: dict[str, np.ndarray], seed: int = 0) -> list[dict[str, Any]]:
    """Returns a row for each method from its batch gradients [N, parameters].

    A row has the figures and the ends of their intervals, `_low` and `_high`. There are no
    completions without the gradients of half of the groups.
    """
    uniform = gradients[UNIFORM]
    count = len(uniform)
    rng = np.random.default_rng(seed)
    draws = rng.multinomial(count, np.full(count, 1 / count), BOOTSTRAP_DRAWS)
    weights = np.concatenate([np.ones((1, count)), draws])  # the first gives the figure itself

    uniform_products = uniform @ uniform.T  # [N, N]
    uniform_snr = signal_to_noise(uniform_products, weights)
    uniform_square = pair_mean(uniform_products, weights).clip(1e-12)
    other_batches = uniform.sum(0) - uniform  # [N, parameters]
    adam_snr = {
        name: signal_to_noise(as_adam_sees(own), weights) for name, own in gradients.items()
    }

    rows = []
    for name, own in gradients.items():
        products = own @ own.T
        snr = signal_to_noise(products, weights)
        worth = snr / uniform_snr
        square = pair_mean(products, weights).clip(1e-12)
        direction = pair_mean(own @ uniform.T, weights) / (square * uniform_square) ** 0.5
        lengths = np.linalg.norm(own, axis=1) * np.linalg.norm(other_batches, axis=1)
        cosines = (own * other_batches).sum(1) / lengths
        values = {
            "worth": worth,
            "aligned": worth * direction.clip(0) ** 2,
            "adam": adam_snr[name] / adam_snr[UNIFORM],
            "direction": direction,
            "cosine": weights @ cosines / count,
        }
        if HALF in gradients:
            half_adam = adam_snr[HALF] / adam_snr[UNIFORM]
            values["completions"] = as_completions(values["adam"], half_adam)
        row: dict[str, Any] = {"method": name, "snr": snr[0]}
        for key, draws_of_figure in values.items():
            row |= with_interval(key, draws_of_figure)
        rows.append(row)
    return rows


def policy_figures(found: list[Measured]) -> dict[str, float]:
    """Returns the columns that no method changes.

    They are the reward, the entropy, and by how much the squared gradient of a completion below its
    group's mean is longer than that of one above it, with a 95% bootstrap over batches.
    """
    counts = torch.stack([batch["squares"] for batch in found]).double()  # [N, below or above, 2]
    generator = torch.Generator().manual_seed(0)
    draws = torch.randint(len(found), (BOOTSTRAP_DRAWS, len(found)), generator=generator)
    totals = torch.cat([counts.sum(0)[None], counts[draws].sum(1)])  # the first is of all batches
    mean_squares = totals[..., 1] / totals[..., 0]  # [1 + draws, below or above]
    ratios = mean_squares[:, 0] / mean_squares[:, 1]
    low, high = ratios[1:].nanquantile(torch.tensor([0.025, 0.975]).double()).tolist()
    return {
        "reward": float(sum(batch["reward"] for batch in found)) / len(found),
        "entropy": float(sum(batch["entropy"] for batch in found)) / len(found),
        "below_over_above": ratios[0].item(),
        "below_over_above_low": low,
        "below_over_above_high": high,
    }


# ---- The table -----------------------------------------------------------------------------------
def shown_figure(row: dict[str, Any], key: str) -> str:
    """Returns "1.23 (1.01 - 1.45)", with a question mark for what has no signal.

    A direction is a cosine: an estimate above 1 is shown as 1.
    """
    cells = []
    for end in ("", "_low", "_high"):
        number = row[key + end]
        has_signal = math.isfinite(number) and len(f"{number:.2f}") < 6
        if key == "direction":
            number = min(number, 1.0)
        cells.append(f"{number:.2f}" if has_signal else "?")
    value, low, high = cells
    return f"{value} ({low} - {high})"


def batches_to_tell(value: float, low: float, high: float, batches: int) -> str:
    """Returns how many batches would show that a ratio differs from 1, as words: "about 150".

    Its interval is taken to narrow as 1 / sqrt(batches), on a logarithmic scale, around the same
    value. The number is rounded up to two digits.
    """
    half_width = math.log(high / max(low, 1e-9)) / 2
    effect = abs(math.log(value))
    if half_width**2 * batches > effect**2 * MOST_BATCHES:
        return f"more than {MOST_BATCHES:,}"
    needed = max(batches * (half_width / effect) ** 2, batches + 1)
    unit = 10 ** max(math.floor(math.log10(needed)) - 1, 0)
    return f"about {math.ceil(needed / unit) * unit:,}"


def verdict(row: dict[str, Any], batches: int) -> str:
    """Returns in words what the intervals say about the method of a row."""
    if row["method"] == HALF:
        if row["worth_low"] < 0.5 < row["worth_high"]:
            if row["worth_high"] > 1:  # it could as well be all of the groups
                return "control: too wide to tell, take more --batches"
            return "control: holds"
        return "control: misses 0.5, take more --batches"
    value, low, high = (row[f"adam{end}"] for end in ("", "_low", "_high"))
    difference = max(abs(low - 1), abs(high - 1))
    if difference < 1e-6:
        return "the same as GRPO"
    if difference < NEGLIGIBLE:
        return f"within {NEGLIGIBLE:.0%} of GRPO"
    if low > 1 and row["direction_high"] < OTHER_DIRECTION:
        return "better than GRPO, but in another direction"
    if low > 1:
        return "better than GRPO"
    if high < 1:
        return "worse than GRPO"
    return f"cannot be told; {batches_to_tell(value, low, high, batches)} batches would tell"


def report(rows: list[dict[str, Any]]) -> str:
    """Returns what to print: the policy, and a line with a verdict for each method."""
    policy = rows[0]
    ratio, low, high = (policy[f"below_over_above{end}"] for end in ("", "_low", "_high"))
    width = max(len(row["method"]) for row in rows)
    lines = [
        f"{policy['batches']} batches, {policy['reward']:.1%} of the reward, "
        f"{policy['entropy']:.2f} nats a token",
        "squared gradient of a completion below its group's mean over that of one above: "
        f"{ratio:.1f} ({low:.1f} - {high:.1f})",
        " " * width + "".join(f"{key:>20s}" for key in PRINTED_FIGURES) + "  verdict",
    ]
    for row in rows:
        cells = [f"{shown_figure(row, key):>20s}" for key in PRINTED_FIGURES]
        lines.append(f"{row['method']:{width}s}{''.join(cells)}  {row['verdict']}")
    return "\n".join(lines)


def write_table(rows: list[dict[str, Any]], path: Path) -> None:
    """Writes rows as .csv, their floats with four digits. A row may lack some columns."""
    columns: dict[str, None] = {}  # an ordered set
    for row in rows:
        columns |= dict.fromkeys(row)
    with open(path, "w", newline="") as file:
        lines = csv.DictWriter(file, list(columns))
        lines.writeheader()
        for row in rows:
            shown = {k: f"{x:.4g}" if isinstance(x, float) else x for k, x in row.items()}
            lines.writerow(shown)


# ---- Command line --------------------------------------------------------------------------------
def digest(content: bytes) -> str:
    """Returns a short name for a content."""
    return hashlib.blake2b(content, digest_size=8).hexdigest()


def keys_of(methods: list[str]) -> dict[str, str]:
    """Returns the methods by the keys of their gradients. A changed script is another method."""
    keys = {UNIFORM: UNIFORM, HALF: HALF}
    for method in methods:
        module, flags = load_method(method)
        source = Path(str(module.__file__)).read_bytes()
        keys[digest(source + repr(flags).encode())] = method
    return keys


def stamps(*places: str | None) -> list[tuple[str, int, int]]:
    """Returns sizes and times of these files and of the files in these folders.

    They tell whether a model, an adapter or data have changed.
    """
    paths: list[Path] = []
    for place in places:
        if place:
            paths += [Path(place), *Path(place).glob("*")]
    files = [path for path in sorted(paths) if path.is_file()]
    return [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in files]


def check(methods: dict[str, str], flags: tuple[str, ...]) -> trainer.Args:
    """Returns the flags, or ends the program where one is wrong or would not do what it says."""
    plain = trainer.parse_args([*SEED, *flags, *PLAIN_FLAGS])
    if plain.beta > 0:
        fail("--beta: the penalty has a gradient of its own, leave it out")
    for method in methods.values():
        module, own_flags = load_method(method)
        without = module.parse_args([*SEED, *flags])
        with_own = module.parse_args([*SEED, *flags, *own_flags])
        for name in vars(plain).keys() & vars(with_own).keys() - OWN_FLAGS:
            if getattr(with_own, name) != getattr(without, name):
                fail(f"--{name} of {method} makes other batches: give it to all, after --")
    rollout_size = plain.per_device_train_batch_size * plain.steps_per_generation
    groups = rollout_size // plain.num_generations
    if groups % 2 == 1:
        fail(f"a batch of {groups} groups has no half: make the number of groups even")
    return plain


def parse_options(argv: list[str]) -> tuple[argparse.Namespace, tuple[str, ...]]:
    """Returns this program's options, and the flags after `--`."""
    split = argv.index("--") if "--" in argv else len(argv)
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("methods", nargs="*", help='"script.py --flag value"')
    parser.add_argument("--batches", type=int, default=24)
    parser.add_argument("--adapter", help="folder with an adapter of this model: the policy")
    parser.add_argument("--coordinates", type=int, default=2**20, help="of a gradient, kept")
    cores = 1 if trainer.CUDA else len(os.sched_getaffinity(0))
    parser.add_argument("--processes", type=int, default=cores)
    parser.add_argument("--folder", type=Path, default=ROOT / "runs/worth")
    parser.add_argument("--output", type=Path, help="the table as .csv")
    return parser.parse_args(argv[:split]), tuple(argv[split + 1 :])


def measure_all(
    options: argparse.Namespace, methods: dict[str, str], flags: tuple[str, ...]
) -> list[Measured]:
    """Measures the batches that are not there yet, and returns them all."""
    args = check(methods, flags)
    functions = load_reward_funcs(args.reward_funcs).values()
    sources = [inspect.getsourcefile(function) for function, _ in functions if function is not None]
    made_of = (trainer.__file__, str(ROOT / "common"), *sources)
    made_of += (options.adapter, args.model_name_or_path, args.dataset_name)
    name = repr((flags, options.adapter, options.coordinates, stamps(*made_of)))
    folder = options.folder / digest(name.encode())
    paths = [folder / f"{batch}.pt" for batch in range(options.batches)]
    needed = methods.keys() | {"squares"}
    jobs = [
        Job(path, batch, methods, flags, options.adapter, options.coordinates)
        for batch, path in enumerate(paths)
        if not needed <= load(path).keys()
    ]
    run_all(measure, jobs, options.processes)
    return [load(path) for path in paths]


def main() -> None:
    options, flags = parse_options(sys.argv[1:])
    if options.batches < 4:
        fail("--batches: four are the least")
    try:
        methods = keys_of(options.methods)
    except ValueError as error:
        fail(error)
    try:
        found = measure_all(options, methods, flags)
    except (DataError, RewardError, OSError, ValueError, RuntimeError) as error:
        fail(str(error)[:LONGEST_MESSAGE])

    gradients = {}
    for key, method in methods.items():
        stacked = torch.stack([batch[key] for batch in found])  # [N, parameters]
        gradients[method] = stacked.double().numpy()
    if not gradients[UNIFORM].any():
        fail("every group of every batch has equal rewards: take easier or harder problems")
    for method, of_batches in gradients.items():
        if not of_batches.any():
            fail(
                f"the gradient of {method} is 0 in every batch: weigh some token, or add --batches"
            )
    columns = policy_figures(found) | {"batches": options.batches}
    rows = [row | columns for row in figures(gradients)]
    for row in rows:
        row["verdict"] = verdict(row, options.batches)
    print(report(rows))
    if options.output:
        write_table(rows, options.output)


if __name__ == "__main__":
    main()
