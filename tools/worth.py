"""Measure before you train: what is one completion worth under a credit method of yours?

    python results/worth.py my_method.py "grpo_arca.py --credit surprisal"    # ten minutes, 2 cores
    python results/worth.py my_method.py --batches 24 -- --model_name_or_path Qwen/Qwen3-1.7B \
        --dataset_name openai/gsm8k --max_completion_length 256
    python results/worth.py my_method.py --adapter runs/x/adapter -- ...   # in the middle of a run

A method is a script with a CREDIT region and its flags, in quotes; those after `--` go to all of
them and to plain GRPO, to which they are compared. Every method gets the same batches (each a
rollout of those flags) at the same policy, and turns each into a gradient of the adapter. Printed,
with 95% intervals over batches:

    worth   signal-to-noise |mean|^2 / variance of the batch gradients over plain GRPO's: so many of
            its completions are as good as one under the method
    adam    the same with each coordinate over its root mean square, as the optimiser divides it
    bias    cosine of the mean gradient with plain GRPO's, which is the policy gradient; 1 is none
    aligned worth * bias^2: of the worth, what points along the policy gradient

It also says what share of the reward the policy earns, the entropy of its tokens, and how much
longer, squared, the gradient of a completion below its group's mean is than that of one above. The
baseline of the least variance weighs rewards by those squares: the longer the gradients of wrong
completions are, the more is gained by leaving them out (--negative_weight 0).

`half of the groups` is plain GRPO that leaves out every other group, and is worth 1/2: where that
does not lie in its interval, as may happen, the others need more batches, too. A method may be
worth more at one policy than at another: measure at two.

Of the adapter's gradient --coordinates are kept, the same random ones of each batch (all, where it
has no more): what that does to the figures stands in results/README.md. It resumes; under another
script, adapter, model or data it measures again. Files are in runs/worth/, 4 bytes a coordinate,
method and batch.
"""

import argparse
import hashlib
import importlib.util
import os
import shlex
import sys
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "results")]

import torch
from gradient_quality import SEED, UNIFORM, figures, in_a_process, load, run_all, write_table
from peft import set_peft_model_state_dict
from safetensors.torch import load_file
from torch import Tensor

import grpo_arca as trainer
from common.data import DataError, load_data
from common.reward import RewardError

HALF, KEYS = "half of the groups", ("worth", "adam", "bias", "aligned")
PLAIN = ["--credit", "uniform", "--negative_weight", "1"]
# Of the flags that all scripts have, a method may set these: others make other batches
ITS_OWN = {"credit", "sharpening", "score_in_fp32", "negative_weight", "loss_type"}
ITS_OWN |= {"output_dir", "run_name"}


def fail(message: object) -> None:
    sys.exit(f"worth.py: error: {message}")


# ---- What a process computes ---------------------------------------------------------------------
@cache
def load_script(path: Path):
    spec = importlib.util.spec_from_file_location(f"method_{path.stem}", path)
    sys.modules[spec.name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def load_method(method: str) -> tuple:
    """The script of "script.py --flag value" as a module, and its flags; ValueError if it is no
    trainer."""
    if method in (UNIFORM, HALF):
        return trainer, PLAIN
    script, *flags = shlex.split(method)
    path = next((p for p in (Path(script), ROOT / script) if p.is_file()), Path())
    if path.suffix != ".py":
        raise ValueError(f"there is no script {script}: name a copy of grpo_arca.py")
    module = load_script(path.resolve())
    if not hasattr(module, "token_scores") or not hasattr(module, "policy_loss"):
        raise ValueError(f"{script} has no token_scores or no policy_loss: name a trainer")
    return module, flags


@cache
def prepare(flags: tuple[str, ...], adapter: str | None):
    """A run at the policy that is asked for, and the problems that it draws from."""
    args = trainer.parse_args([*SEED, *flags, *PLAIN])
    tokenizer, data, _ = load_data(args)
    run = trainer.build_run(args, tokenizer)
    if adapter:
        state = load_file(Path(adapter) / "adapter_model.safetensors")
        unknown = set_peft_model_state_dict(run.model, state).unexpected_keys
        if unknown:
            raise ValueError(f"{adapter} is not of this model: it has {unknown[0]}")
    return run, data


def gradient(run, module, micros: list, completions: int) -> Tensor:
    """The adapter's [parameters], on the CPU, of an update on scored micro-batches at ratio 1."""
    trained = [p for p in run.model.parameters() if p.requires_grad]
    total = torch.zeros(sum(p.numel() for p in trained))
    for micro in micros:
        logp = module.training_forward(run, micro)
        scale = module.token_scale(run.args, micro.loss_mask, completions, micro.update_tokens)
        loss, _ = module.policy_loss(run.args, micro, logp, logp.detach(), scale)
        parts = torch.autograd.grad(loss, trained)
        total += torch.cat([part.flatten() for part in parts]).float().cpu()
    return total


def squares(run, rollout) -> Tensor:
    """[2, 2]: completions below their group's mean, and those above it; how many there are, and the
    sum of the squared lengths of their own gradients, whatever their advantage."""
    trained = [p for p in run.model.parameters() if p.requires_grad]
    found, one_row = torch.zeros(2, 2), replace(run.args, per_device_train_batch_size=1)
    for part in trainer.micro_batches(one_row, replace(rollout)):
        for row in part:
            if row.loss_mask.any():  # one without an advantage may stand for none at all
                scale = trainer.token_scale(run.args, row.loss_mask, 1, row.update_tokens)
                total = (trainer.training_forward(run, row) * scale).sum()
                parts = torch.autograd.grad(total, trained)
                length = sum(part.float().square().sum() for part in parts).item()
                found[int(row.advantages > 0)] += torch.tensor([1.0, length])
    return found


def measure(job: tuple) -> str:
    """The gradients of one batch under the methods that its file lacks."""
    path, batch, methods, flags, adapter, coordinates = job
    found, (run, data) = load(path), prepare(flags, adapter)
    run.rollout = batch
    rollout, _ = trainer.collect(run, data, {})
    if "squares" not in found:
        found["reward"] = rollout.rewards.nanmean().cpu()
        found["entropy"] = rollout.entropy[rollout.mask].mean().cpu()
        found["squares"] = squares(run, rollout)
    for key, method in methods.items():
        if key in found:
            continue
        module, own = load_method(method)
        args = module.parse_args([*SEED, *flags, *own])
        copy, advantages = replace(run, args=args), rollout.advantages.clone()
        advantages[advantages < 0] *= args.negative_weight  # as `collect` does
        if method == HALF:
            advantages[rollout.rows // args.num_generations % 2 == 1] = 0.0
        parts = trainer.micro_batches(run.args, replace(rollout, advantages=advantages))
        micros = [micro for part in parts for micro in part]
        module.score(copy, micros, {})
        whole = gradient(copy, module, micros, len(rollout.rows))
        places = torch.randperm(len(whole), generator=torch.Generator().manual_seed(0))
        found[key] = (
            whole[places[:coordinates].sort().values] if len(whole) > coordinates else whole
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(found, path.with_suffix(".partial"))
    path.with_suffix(".partial").rename(path)
    return f"batch {batch}"


# ---- The table -----------------------------------------------------------------------------------
def keys_of(methods: list[str]) -> dict[str, str]:
    """What a method's gradients are filed under: a changed script is another method."""
    keys = {UNIFORM: UNIFORM, HALF: HALF}
    for method in methods:
        module, flags = load_method(method)
        text = Path(module.__file__).read_bytes() + repr(flags).encode()
        keys[hashlib.blake2b(text, digest_size=8).hexdigest()] = method
    return keys


def stamps(*places: str | Path | None) -> list[tuple]:
    """Sizes and times of the files that are or lie there: another model makes other batches."""
    paths = [path for place in places if place for path in (Path(place), *Path(place).glob("*"))]
    return [(str(p), p.stat().st_size, p.stat().st_mtime_ns) for p in sorted(paths) if p.is_file()]


def check(methods: dict[str, str], flags: tuple[str, ...]) -> trainer.Args:
    """The flags, or the end where one is wrong or would not do what it says."""
    plain = trainer.parse_args([*SEED, *flags, *PLAIN])
    if plain.beta > 0:
        fail("--beta: the penalty has a gradient of its own, leave it out")
    for method in methods.values():
        module, own = load_method(method)
        without, its = (module.parse_args([*SEED, *flags, *more]) for more in ([], own))
        for name in vars(plain).keys() & vars(its).keys() - ITS_OWN:
            if getattr(its, name) != getattr(without, name):
                fail(f"--{name} of {method} makes other batches: give it to all, after --")
    groups = plain.per_device_train_batch_size * plain.steps_per_generation // plain.num_generations
    if groups % 2:
        fail(f"a batch of {groups} groups has no half: make the number of groups even")
    return plain


def of_the_policy(found: list[dict]) -> dict[str, float]:
    """Columns that no method changes: reward, entropy, and how much longer (squared) a gradient is
    below the mean of its group than above it, with a 95% bootstrap over batches."""
    counts = torch.stack([f["squares"] for f in found]).double()  # [N, below or above, 2]
    drawn = torch.randint(
        len(found), (2000, len(found)), generator=torch.Generator().manual_seed(0)
    )
    both = torch.cat([counts.sum(0)[None], counts[drawn].sum(1)])  # the first is the figure itself
    lengths = both[..., 1] / both[..., 0]
    ratios = lengths[:, 0] / lengths[:, 1]
    ends = ratios[1:].nanquantile(torch.tensor([0.025, 0.975]).double()).tolist()
    columns = {key: float(sum(f[key] for f in found)) / len(found) for key in ("reward", "entropy")}
    names = ("below_over_above", "below_over_above_low", "below_over_above_high")
    return columns | dict(zip(names, [ratios[0].item(), *ends]))


def report(rows: list[dict], batches: int) -> str:
    """What is asked for of the policy, a line a method, and how many batches would tell its worth
    to a fifth."""
    wide, here = max(len(row["method"]) for row in rows), rows[0]
    ratio = [f"{here['below_over_above' + end]:.1f}" for end in ("", "_low", "_high")]
    lines = [
        f"{batches} batches, {here['reward']:.1%} of the reward, {here['entropy']:.2f} nats a token"
    ]
    lines += ["squared gradient of a completion below its group's mean over that of one above: "]
    lines[-1] += f"{ratio[0]} ({ratio[1]} - {ratio[2]})"
    lines += [" " * wide + "".join(f"{key:>22s}" for key in KEYS)]
    for row in rows:
        shown = []
        for key in KEYS:
            cells = [f"{row[key + end]:.2f}" for end in ("", "_low", "_high")]
            value, *ends = (cell if len(cell) < 6 else "?" for cell in cells)  # from no signal
            shown.append(f"{value} ({' - '.join(ends)})")
        lines.append(f"{row['method']:{wide}s}" + "".join(f"{text:>22s}" for text in shown))
    for row in rows[2:]:
        width = (row["worth_high"] - row["worth_low"]) / 2 / max(row["worth"], 1e-9)
        if 0.2 < width < 2:  # beyond it nobody can say
            more = round(batches * (width / 0.2) ** 2)
            lines.append(f"{row['method']}: about {more} batches for a fifth more or less")
    null = rows[1]
    if not null["worth_low"] < 0.5 < null["worth_high"]:
        lines.append(f"{HALF} is worth 0.5, and its interval misses that: take more --batches")
    return "\n".join(lines)


def main() -> None:
    split = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    how = {"formatter_class": argparse.RawDescriptionHelpFormatter}
    parser = argparse.ArgumentParser(description=__doc__, **how)
    parser.add_argument("methods", nargs="*", help='"script.py --flag value"')
    parser.add_argument("--batches", type=int, default=24)
    parser.add_argument("--adapter", help="folder with an adapter of this model: the policy")
    parser.add_argument("--coordinates", type=int, default=2**20, help="of a gradient, kept")
    cores = 1 if trainer.CUDA else len(os.sched_getaffinity(0))
    parser.add_argument("--processes", type=int, default=cores)
    parser.add_argument("--folder", type=Path, default=ROOT / "runs/worth")
    parser.add_argument("--output", type=Path, help="the table as .csv")
    options = parser.parse_args(sys.argv[1:split])
    flags, batches = tuple(sys.argv[split + 1 :]), options.batches
    if batches < 4:
        fail("--batches: four are the least")
    try:
        methods = keys_of(options.methods)
    except ValueError as error:
        fail(error)
    args = check(methods, flags)
    made_of = trainer.__file__, options.adapter, args.model_name_or_path, args.dataset_name
    name = repr((flags, options.adapter, options.coordinates, stamps(*made_of))).encode()
    folder = options.folder / hashlib.blake2b(name, digest_size=8).hexdigest()
    paths = [folder / f"{batch}.pt" for batch in range(batches)]
    rest = (methods, flags, options.adapter, options.coordinates)
    needed = methods.keys() | {"squares"}
    jobs = [(p, i, *rest) for i, p in enumerate(paths) if not needed <= load(p).keys()]
    try:
        run_all(partial(in_a_process, measure), jobs, options.processes)
    except (DataError, RewardError, OSError, ValueError, RuntimeError) as error:
        fail(f"{error}"[:600])
    found = [load(path) for path in paths]
    stacked = {m: torch.stack([f[k] for f in found]).double().numpy() for k, m in methods.items()}
    if not stacked[UNIFORM].any():
        fail("every group of every batch has equal rewards: take easier or harder problems")
    rows = [row | of_the_policy(found) for row in figures(stacked)]
    print(report(rows, batches))
    if options.output:
        write_table(rows, options.output)


if __name__ == "__main__":
    main()
