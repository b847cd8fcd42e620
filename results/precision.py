"""What bf16 does to the sampled policy and to the credit, measured on any model.

    python results/precision.py                     # the embedded policy in bf16, a minute
    python results/precision.py --updates 10 --write smollm2 -- --model_name_or_path ~/smollm2 \\
        --dataset_name sums.jsonl --max_completion_length 32 --learning_rate 1e-5

Flags after `--` are grpo_arca.py's. A policy in bf16 takes updates by plain GRPO; then, for the
completions of one more rollout, against the same adapter on the same NF4 weights in fp32:

    rollout   change of the log-probs by the adapter, shrunk to several sizes: slope and correlation
              of one change on another. `dense` is what rollouts compute with (the adapter beside a
              dense base), `merged` what they would with the adapter merged into bf16 weights: with
              activations in fp32, so that only the weights' rounding shows, against the exact
              change; and with all in bf16 against the training forward's, which is to be the same
    credit    rank correlation (Spearman) over a completion's tokens of ARCA's and OAR-G's scores
              with the same in fp32, mean and worst completion, and seconds. The scripts compute
              ARCA's and OAR-G's in fp32 and OAR-P's in --dtype. TF32, which a GPU could use for
              fp32 products and by default does not, is emulated
"""

import argparse
import contextlib
import csv
import functools
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch
import torch.nn.functional as F
import transformers
from peft.utils.integrations import dequantize_bnb_weight
from torch import Tensor

import grpo_arca
import grpo_oar
from common.data import load_data

SIZES = (1.0, 0.3, 0.1, 0.03, 0.01, 0.003)


def train(flags: list[str], updates: int) -> tuple:
    """A run after so many updates, and the micro-batches of its next rollout."""
    defaults = ["--dtype", "bfloat16", "--max_steps", "1000", "--credit", "uniform"]
    args = grpo_arca.parse_args([*defaults, *flags])
    tokenizer, data, _ = load_data(args)
    run = grpo_arca.build_run(args, tokenizer)
    for run.rollout in range(updates + 1):
        batch = grpo_arca.collect(run, data, {"seconds_rollout": 1.0})
        if run.rollout == updates:  # all of its completions, whatever they earned
            batch.advantages = torch.ones_like(batch.advantages)
        (micros,) = grpo_arca.micro_batches(args, batch)
        grpo_arca.score(run, batch, micros, {})
        if run.rollout < updates:
            grpo_arca.update(run, micros)
            print(f"update {run.rollout + 1}/{updates}", file=sys.stderr, flush=True)
    return run, micros


# ---- The policy that samples ---------------------------------------------------------------------
@contextlib.contextmanager
def scaled(model, size: float):
    """Inside it the adapter's effect is `size` times as large."""
    layers = [m for m in model.modules() if hasattr(m, "get_delta_weight")]
    before = [layer.scaling["default"] for layer in layers]
    for layer, scale in zip(layers, before, strict=True):
        layer.scaling["default"] = size * scale
    yield
    for layer, scale in zip(layers, before, strict=True):
        layer.scaling["default"] = scale


@contextlib.contextmanager
def merged(model):
    """The adapter merged into bf16 weights, as rollouts once had it."""
    layers = [m for m in model.modules() if hasattr(m, "get_delta_weight")]
    for layer in layers:
        base, delta = layer.base_layer, layer.get_delta_weight("default")
        weight = (dequantize_bnb_weight(base.weight).bfloat16() + delta).bfloat16()
        weight = weight.to(base.compute_dtype)
        layer.forward = functools.partial(F.linear, weight=weight, bias=base.bias)
    yield
    for layer in layers:
        del layer.forward


@contextlib.contextmanager
def rounded(model):
    """A dense base of bf16 weights with the adapter beside it, as rollouts have it."""
    layers = [m for m in model.modules() if hasattr(m, "compute_dtype")]
    for layer in layers:
        weight = dequantize_bnb_weight(layer.weight).bfloat16().to(layer.compute_dtype)
        layer.forward = functools.partial(F.linear, weight=weight, bias=layer.bias)
    yield
    for layer in layers:
        del layer.forward


@torch.no_grad()
def rollout_rows(run, micro) -> list[dict]:
    """Slope and correlation of the change of log-probs by the adapter, for each way and size."""
    model, found = run.model, []

    def changes(policy, way) -> list[Tensor]:
        logps = []
        for size in (0.0, *SIZES):
            with scaled(model, size), way(model):
                logps.append(policy(micro)[0][micro.mask].double())
        return [logp - logps[0] for logp in logps[1:]]

    with grpo_arca.in_fp32(run) as policy:
        exact, weights = changes(policy, rounded), changes(policy, merged)
    trained = changes(run.policy, lambda _: contextlib.nullcontext())
    ways = {"weights in bf16, merged: of the exact change": (exact, weights)}
    ways["all in bf16, the training forward: of the exact change"] = (exact, trained)
    for name, way in {"dense": grpo_arca.dense, "merged": merged}.items():
        pair = (trained, changes(run.policy, way))
        ways[f"all in bf16, {name}: of the training forward's change"] = pair
    for name, pairs in ways.items():
        for size, true, change in zip(SIZES, *pairs, strict=True):
            slope = (true * change).sum() / (true * true).sum()
            alike = torch.corrcoef(torch.stack([true, change]))[0, 1]
            found.append({"what": name, "size": size, "slope": slope.item()})
            found[-1] |= {"correlation": alike.item(), "change": true.abs().mean().item()}
    return found


# ---- The credit ----------------------------------------------------------------------------------
def spearman(a: Tensor, b: Tensor) -> float:
    """Rank correlation of two [n]."""
    ranks = [x.argsort().argsort().double() - (len(x) - 1) / 2 for x in (a, b)]
    return ((ranks[0] * ranks[1]).sum() / ranks[0].square().sum()).item()


def tf32(x: Tensor) -> Tensor:
    """fp32 rounded to the 10 bits after the point that a GPU's tensor cores read."""
    return ((x.view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)


@contextlib.contextmanager
def products_in_tf32():
    """Linear layers read their inputs as tensor cores would; NF4 layers' weights are exact."""
    from bitsandbytes.nn import Linear4bit

    before = Linear4bit.forward
    Linear4bit.forward = lambda layer, x: before(layer, tf32(x))
    yield
    Linear4bit.forward = before


@contextlib.contextmanager
def scored_in(module, run, way: str):
    """A run whose module scores in fp32, in fp32 with products in TF32, or in bf16."""
    in_fp32, dense = module.in_fp32, module.dense
    plain = SimpleNamespace(autocast=contextlib.nullcontext, device=run.accelerator.device)
    with contextlib.ExitStack() as inside:
        if way == "bf16":
            module.in_fp32 = lambda run: contextlib.nullcontext(run.policy)
            inside.enter_context(run.accelerator.autocast())
        else:
            policy = inside.enter_context(in_fp32(run))
            module.in_fp32 = lambda run: contextlib.nullcontext(policy)
            module.dense, run = lambda _: contextlib.nullcontext(), replace(run, accelerator=plain)
        if way == "tf32":
            inside.enter_context(products_in_tf32())
        yield run
    module.in_fp32, module.dense = in_fp32, dense


@torch.no_grad()
def credit_rows(run, micro, flags: list[str]) -> list[dict]:
    """Ranks against fp32, and seconds, in turn; of the fastest of three."""
    found = []
    for module, credit in ((grpo_arca, "arca"), (grpo_oar, "oar_g"), (grpo_oar, "oar_p")):
        args = module.parse_args(["--dtype", "bfloat16", *flags, "--credit", credit])
        scores, seconds = {}, {}
        for name in ("fp32", "tf32", "bf16") * 3:
            with scored_in(module, replace(run, args=args), name) as here:
                began = time.perf_counter()
                scores[name] = module.token_scores(here, replace(micro), {}).float()
                scores[name].sum().item()  # a GPU's work is done
                took = time.perf_counter() - began
            seconds[name] = min(took, seconds.get(name, took))
        for name, made in scores.items():
            used = micro.mask & (scores["fp32"] >= 0)
            pairs = zip(scores["fp32"], made, used, strict=True)
            ranks = [spearman(a[x], b[x]) for a, b, x in pairs if x.sum() > 3]
            row = {"what": f"{credit} in {name}", "rank": sum(ranks) / len(ranks)}
            found.append(row | {"worst": min(ranks), "seconds": seconds[name]})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--updates", type=int, default=10)
    parser.add_argument("--write", help="results/data/precision_<this>.csv")
    split = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    options, flags = parser.parse_args(sys.argv[1:split]), sys.argv[split + 1 :]
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    run, micros = train(flags, options.updates)
    rows = rollout_rows(run, micros[0]) + credit_rows(run, micros[0], flags)
    for row in rows:
        print("  ".join(f"{k} {v:.3g}" if isinstance(v, float) else v for k, v in row.items()))
    if options.write:
        with open(ROOT / f"results/data/precision_{options.write}.csv", "w", newline="") as file:
            keys = {key: None for row in rows for key in row}
            writer = csv.DictWriter(file, list(keys))
            writer.writeheader()
            for row in rows:
                row = {k: f"{x:.4g}" if isinstance(x, float) else x for k, x in row.items()}
                writer.writerow(row)


if __name__ == "__main__":
    main()
