"""Measures what bf16 does to the sampled policy and to the credit, on any model.

    python tools/precision.py                     # the embedded policy in bf16, a minute
    python tools/precision.py --updates 10 --write smollm2 -- SMOL --max_completion_length 32 \\
        --learning_rate 1e-5 --per_device_train_batch_size 16 --gradient_accumulation_steps 2

SMOL stands for `--model_name_or_path smollm2 --dataset_name smollm2/sums.jsonl
--gradient_checkpointing False`, of the folder that tools/smollm2.py makes.

Flags after `--` are grpo_arca.py's. A policy in bf16 takes updates by plain GRPO. Then the
completions of one more rollout are looked at, and the same adapter on the same NF4 weights in fp32
is what everything is compared with:

    rollout   the change of the log-probs by the adapter, shrunk to several sizes: slope and
              correlation of one change on another. `dense` is what rollouts compute with (the
              adapter beside a dense base), `merged` what they would with the adapter merged into
              bf16 weights. One comparison has activations in fp32, so that only the rounding of the
              weights shows, against the exact change. The others have everything in bf16, against
              the training forward's change, which is to be the same
    credit    Spearman's rank correlation over a completion's tokens of ARCA's and OAR-G's scores
              with the same in fp32, its mean and its worst completion, and seconds. The scripts
              compute ARCA's and OAR-G's in fp32 and OAR-P's in --dtype. TF32, which a GPU could use
              for fp32 products and by default does not, is emulated

With --write NAME the table goes to results/data/precision/NAME.csv, too.
"""

import argparse
import contextlib
import functools
import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # as in the scripts

import torch
import torch.nn.functional as F
import transformers
from peft.utils.integrations import dequantize_bnb_weight
from torch import Tensor
from worth import write_table

import grpo_arca
import grpo_oar
from common.data import load_data

SIZES = (1.0, 0.3, 0.1, 0.03, 0.01, 0.003)  # of the adapter's effect
SCORED = ((grpo_arca, "arca"), (grpo_oar, "oar_g"), (grpo_oar, "oar_p"))
REPEATS = 3

Patch = Callable[[Any], AbstractContextManager]  # changes a model within a `with` block


def train(flags: list[str], updates: int) -> tuple[grpo_arca.Run, list[grpo_arca.Batch]]:
    """Returns a run after so many updates, and the micro-batches of its next rollout."""
    defaults = ["--dtype", "bfloat16", "--max_steps", "1000", "--credit", "uniform"]
    args = grpo_arca.parse_args([*defaults, *flags])
    tokenizer, train_set, _ = load_data(args)
    run = grpo_arca.build_run(args, tokenizer)
    for done in range(updates):
        run.rollout = done
        batch = grpo_arca.collect(run, train_set, {})
        (micros,) = grpo_arca.micro_batches(args, batch)
        grpo_arca.score(run, batch, micros, {})
        grpo_arca.update(run, micros)
        print(f"update {done + 1}/{updates}", file=sys.stderr, flush=True)

    run.rollout = updates
    batch = grpo_arca.collect(run, train_set, {})
    batch.advantages = torch.ones_like(batch.advantages)  # all completions, whatever they earned
    (micros,) = grpo_arca.micro_batches(args, batch)
    grpo_arca.score(run, batch, micros, {})
    return run, micros


# ---- The policy that samples ---------------------------------------------------------------------
@contextlib.contextmanager
def scaled(model: Any, size: float) -> Iterator[None]:
    """Makes the adapter's effect `size` times as large."""
    layers = [module for module in model.modules() if hasattr(module, "get_delta_weight")]
    scales: list[float] = [layer.scaling["default"] for layer in layers]
    try:
        for layer, scale in zip(layers, scales, strict=True):
            layer.scaling["default"] = size * scale
        yield
    finally:
        for layer, scale in zip(layers, scales, strict=True):
            layer.scaling["default"] = scale


@contextlib.contextmanager
def with_weights(weights: dict[Any, Tensor], biases: dict[Any, Tensor | None]) -> Iterator[None]:
    """Makes these layers compute with these weights."""
    try:
        for layer, weight in weights.items():
            layer.forward = functools.partial(F.linear, weight=weight, bias=biases[layer])
        yield
    finally:
        for layer in weights:
            del layer.forward


def merged(model: Any) -> AbstractContextManager:
    """Merges the adapter into bf16 weights, as rollouts once had it."""
    weights: dict[Any, Tensor] = {}
    biases = {}
    for layer in model.modules():
        if hasattr(layer, "get_delta_weight"):
            base = layer.base_layer
            delta = layer.get_delta_weight("default")
            weight = (dequantize_bnb_weight(base.weight).bfloat16() + delta).bfloat16()
            weights[layer] = weight.to(base.compute_dtype)
            biases[layer] = base.bias
    return with_weights(weights, biases)


def rounded(model: Any) -> AbstractContextManager:
    """Puts a dense base of bf16 weights beside the adapter, as rollouts have it."""
    weights: dict[Any, Tensor] = {}
    biases = {}
    for layer in model.modules():
        if hasattr(layer, "compute_dtype"):  # NF4
            weight = dequantize_bnb_weight(layer.weight).bfloat16()
            weights[layer] = weight.to(layer.compute_dtype)
            biases[layer] = layer.bias
    return with_weights(weights, biases)


def unchanged(model: Any) -> AbstractContextManager:
    """Leaves the model as it is."""
    return contextlib.nullcontext()


def changes(model: Any, policy: Any, micro: grpo_arca.Batch, patch: Patch) -> list[Tensor]:
    """Returns the adapter's change of the log-probs of all tokens [n], for each of SIZES."""
    logps = []
    for size in (0.0, *SIZES):
        with scaled(model, size), patch(model):
            logp, _ = policy(micro)
            logps.append(logp[micro.mask].double())
    return [logp - logps[0] for logp in logps[1:]]


@torch.no_grad()
def rollout_rows(run: grpo_arca.Run, micro: grpo_arca.Batch) -> list[dict[str, Any]]:
    """Returns slope and correlation of one change of log-probs on another, for each size."""
    model = run.model
    with grpo_arca.in_fp32(run) as policy:
        exact = changes(model, policy, micro, rounded)
        exact_merged = changes(model, policy, micro, merged)
    trained = changes(model, run.policy, micro, unchanged)
    dense = changes(model, run.policy, micro, grpo_arca.dense)
    all_merged = changes(model, run.policy, micro, merged)
    pairs = {
        "weights in bf16, merged: of the exact change": (exact, exact_merged),
        "all in bf16, the training forward: of the exact change": (exact, trained),
        "all in bf16, dense: of the training forward's change": (trained, dense),
        "all in bf16, merged: of the training forward's change": (trained, all_merged),
    }
    rows = []
    for what, (wanted, found) in pairs.items():
        for size, true, change in zip(SIZES, wanted, found, strict=True):
            slope = (true * change).sum() / (true * true).sum()
            correlation = torch.corrcoef(torch.stack([true, change]))[0, 1]
            row = {"what": what, "size": size, "slope": slope.item()}
            row |= {"correlation": correlation.item(), "change": true.abs().mean().item()}
            rows.append(row)
    return rows


# ---- The credit ----------------------------------------------------------------------------------
def spearman(a: Tensor, b: Tensor) -> float:
    """Returns the rank correlation of two tensors [n], neither of which is constant."""
    return torch.corrcoef(torch.stack([ranks(a), ranks(b)]))[0, 1].item()


def ranks(x: Tensor) -> Tensor:
    """Returns the rank [n] of each number. Equal numbers share the mean of their ranks."""
    smaller = (x[None] < x[:, None]).sum(1)
    equal = (x[None] == x[:, None]).sum(1)  # itself among them
    return smaller + (equal - 1).double() / 2


def tf32(x: Tensor) -> Tensor:
    """Rounds fp32 to the 10 bits after the point that a GPU's tensor cores read."""
    return ((x.view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)


exact_linear = F.linear


class LinearInTF32(torch.autograd.Function):
    """The product of a linear layer and its gradient for x, as a GPU's tensor cores compute them.

    Credit needs no gradient for the weights.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        rounded = tf32(weight)
        ctx.save_for_backward(rounded)
        return exact_linear(tf32(x), rounded, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (rounded,) = ctx.saved_tensors
        return tf32(gradients[0]) @ rounded, None, None


@contextlib.contextmanager
def products_in_tf32() -> Iterator[None]:
    """Makes all linear layers compute in TF32: those of the base, of the adapter, and the head."""

    def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return LinearInTF32.apply(x, weight, bias)

    with mock.patch.object(F, "linear", linear):
        yield


@contextlib.contextmanager
def scored_in(module: ModuleType, run: grpo_arca.Run, precision: str) -> Iterator[Any]:
    """Yields a run whose module scores in fp32, in fp32 with products in TF32, or in bf16."""
    originals = {"in_fp32": module.in_fp32, "dense": module.dense}
    substitutes: dict[str, Callable]
    scoring_run: Any

    def stay_in_bf16(run: grpo_arca.Run) -> AbstractContextManager:
        return contextlib.nullcontext(run.policy)

    with contextlib.ExitStack() as stack:
        if precision == "bf16":
            stack.enter_context(run.accelerator.autocast())
            substitutes = {"in_fp32": stay_in_bf16}
            scoring_run = run
        else:
            policy = stack.enter_context(originals["in_fp32"](run))

            def already_in_fp32(run: grpo_arca.Run) -> AbstractContextManager:
                return contextlib.nullcontext(policy)

            # Neither autocasting nor the dense copy in bf16 may bring bf16 back.
            substitutes = {"in_fp32": already_in_fp32, "dense": unchanged}
            accelerator: Any = SimpleNamespace(
                autocast=contextlib.nullcontext, device=run.accelerator.device
            )
            scoring_run = replace(run, accelerator=accelerator)
        if precision == "tf32":
            stack.enter_context(products_in_tf32())
        try:
            for name, substitute in substitutes.items():
                setattr(module, name, substitute)
            yield scoring_run
        finally:
            for name, original in originals.items():
                setattr(module, name, original)


@torch.no_grad()
def credit_rows(
    run: grpo_arca.Run, micro: grpo_arca.Batch, flags: list[str]
) -> list[dict[str, Any]]:
    """Returns ranks against fp32, and seconds: the fastest of three, taken in turn."""
    rows = []
    for module, credit in SCORED:
        args = module.parse_args(["--dtype", "bfloat16", *flags, "--credit", credit])
        scores: dict[str, Tensor] = {}
        seconds: dict[str, float] = {}
        for precision in ("fp32", "tf32", "bf16") * REPEATS:
            with scored_in(module, replace(run, args=args), precision) as scoring_run:
                began = time.perf_counter()
                made = module.token_scores(scoring_run, replace(micro), {}).float()
                made.sum().item()  # waits until a GPU is done
                took = time.perf_counter() - began
            scores[precision] = made
            seconds[precision] = min(took, seconds.get(precision, took))
        for precision, made in scores.items():
            exact = scores["fp32"]
            is_scored = micro.mask & (exact >= 0)
            correlations = [
                spearman(a[scored], b[scored])
                for a, b, scored in zip(exact, made, is_scored, strict=True)
                if scored.sum() > 3 and len(a[scored].unique()) > 1
            ]
            if not correlations:
                advice = "raise --updates, as a new adapter has moved nothing, or"
                advice += " --max_completion_length, as OAR scores finished answers"
                error = f"no completion has {credit} scores that differ: {advice}"
                print(f"precision.py: error: {error}", file=sys.stderr)
                sys.exit(2)
            mean = sum(correlations) / len(correlations)
            row: dict[str, Any] = {"what": f"{credit} in {precision}", "rank": mean}
            rows.append(row | {"worst": min(correlations), "seconds": seconds[precision]})
    return rows


# ---- Command line --------------------------------------------------------------------------------
def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--updates", type=int, default=10)
    parser.add_argument("--write", help="results/data/precision/<this>.csv")
    split = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    options = parser.parse_args(sys.argv[1:split])
    flags = sys.argv[split + 1 :]
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()

    run, micros = train(flags, options.updates)
    rows = rollout_rows(run, micros[0]) + credit_rows(run, micros[0], flags)
    for row in rows:
        cells = [f"{k} {x:.3g}" if isinstance(x, float) else str(x) for k, x in row.items()]
        print("  ".join(cells))
    if options.write:
        write_table(rows, ROOT / f"results/data/precision/{options.write}.csv")


if __name__ == "__main__":
    main()
