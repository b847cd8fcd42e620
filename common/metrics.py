"""The numbers of a run; METRICS.md explains them to users.

What a run leaves behind is written by the modules next to this one: run_log.py (metrics.jsonl,
config.json, completions.jsonl), curves.py, credit_page.py and report.py. messages.py makes
sentences of the numbers.
"""

from __future__ import annotations

import contextlib
import math
import resource
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from common.reward import shared_grader

if TYPE_CHECKING:
    # Each script has its own classes of these names, alike in what is read here.
    Batch = Any
    Run = Any

# Values, and how much each of them counts in a mean. The two have the same shape.
Weighted = tuple[Tensor, Tensor]


# ---- How concentrated the credit is --------------------------------------------------------------
@torch.no_grad()
def weight_stats(weights: Tensor, mask: Tensor) -> dict[str, Tensor]:
    """Returns how concentrated the credit is in each completion, as two float32 tensors [B].

    weights [B, T] >= 0 may have any scale. Outside mask [B, T] nothing is read, not even NaN. As in
    ARCA (arXiv 2606.00257):

        gini   0 for uniform weights, (n - 1) / n for all weight on one of n tokens
        effn   the effective number of tokens over their number ("EffN/T"): 1 for uniform weights,
               1 / n for all weight on one token

    Both are NaN where a completion has no or one token, or a total weight of 0: use nanmean.
    """
    mask = mask.bool()
    weights = torch.where(mask, weights.double(), 0.0)  # [B, T]; not *, because NaN * 0 is NaN
    lengths = mask.sum(1)  # [B]
    totals = weights.sum(1)  # [B]
    shares = weights.sort(dim=1).values / totals[:, None]  # [B, T] ascending, the padding first

    # The Gini index is sum_k (2 * k - n - 1) * share_k / n, where k is 1 for the smallest share and
    # n for the largest, which stands last.
    width = weights.shape[1]
    from_the_end = torch.arange(width, device=weights.device) - width  # [T], -1 for the last
    factors = 2 * from_the_end + lengths[:, None] + 1  # [B, T], as k = n + 1 + from_the_end
    gini = (factors * shares).sum(1).clamp(min=0) / lengths  # rounding may leave -1e-18
    effn = 1.0 / (lengths * shares.square().sum(1))

    is_defined = (lengths > 1) & (totals > 0) & totals.isfinite()
    return {
        "gini": torch.where(is_defined, gini, math.nan).float(),
        "effn": torch.where(is_defined, effn, math.nan).float(),
    }


def control_weights(kind: str, weights: Tensor, mask: Tensor, uniforms: Tensor) -> Tensor:
    """Returns weights [B, T] that know nothing of the tokens, made from uniforms [B, T].

    "shuffled" permutes the weights of each completion. "random" draws log-normal ones, which have
    the completion's sum and its concentration (EffN/T).
    """
    if kind == "shuffled":
        order = torch.where(mask, uniforms, 2.0).argsort(dim=1, stable=True)  # padding stays put
        return weights.gather(1, order)

    # EffN/T of exp(sigma * z) falls as sigma grows, so bisection finds each completion's sigma.
    target = weight_stats(weights, mask)["effn"]  # [B]
    z = torch.special.ndtri(uniforms.clamp(1e-6, 1 - 1e-6))  # [B, T] normal
    low = torch.zeros_like(target)
    high = torch.full_like(target, 50.0)
    for _ in range(40):
        sigma = (low + high) / 2
        drawn = torch.where(mask, (sigma[:, None] * z).exp().clamp(max=1e30), 0.0)
        is_too_flat = weight_stats(drawn, mask)["effn"] > target  # False for NaN (one token)
        low = torch.where(is_too_flat, sigma, low)
        high = torch.where(is_too_flat, high, sigma)
    drawn = drawn / drawn.sum(1, keepdim=True) * (weights * mask).sum(1, keepdim=True)
    is_concentrated = target[:, None] < 1 - 1e-6
    return torch.where(mask & is_concentrated, drawn, weights)


# ---- What is logged ------------------------------------------------------------------------------
def rollout_metrics(run: Run, batch: Batch, seconds: float) -> dict[str, float]:
    """Returns the metrics of a rollout, over all processes; `batch` is this one's share of it.

    reward_timeouts counts since the processes were started.
    """
    gather = run.accelerator.gather
    rows = torch.ones_like(batch.rewards)  # [B]
    averages = {
        "reward": (batch.rewards.nan_to_num(), batch.rewards.isfinite()),
        "completion_length": (batch.mask.sum(1), rows),
        "truncated_share": (batch.truncated, rows),
        "entropy": (batch.entropy, batch.mask),
    }
    result = {"reward": math.nan} | means(run, [averages])  # NaN if no completion is judged

    order = gather(batch.rows).argsort()
    advantages = gather(batch.advantages)[order]
    groups = advantages.view(-1, run.args.num_generations)
    timeouts = rows.new_tensor([run.grader.timeouts + shared_grader().timeouts])
    result["reward_timeouts"] = gather(timeouts).sum().item()
    result["zero_std_share"] = (groups == 0).all(1).float().mean().item()
    result["rollout_tokens"] = round(result["completion_length"] * len(advantages))
    result["tokens_per_second"] = result["rollout_tokens"] / seconds
    return result


def credit_metrics(run: Run, micros: list[Batch]) -> dict[str, float]:
    """Returns the metrics of scored micro-batches, over all processes.

    The concentration of the credit is that of completions with an advantage. The KL is the k3
    estimate of the policy that sampled to the base, where the base's log-probs are known.
    """
    batches = []
    for micro in micros:
        has_advantage = micro.advantages != 0  # [B]
        averages: dict[str, Weighted] = {}
        for name, values in weight_stats(micro.weights, micro.mask).items():
            counts = values.isfinite() & has_advantage
            averages[f"weight_{name}"] = (values.nan_to_num(0.0), counts)
        if len(micro.base_logp) > 0:
            log_ratio = micro.base_logp - micro.sampled_logp
            log_ratio = torch.where(micro.loss_mask, log_ratio, 0.0)
            averages["kl"] = (log_ratio.exp() - log_ratio - 1, micro.loss_mask)
        batches.append(averages)
    return means(run, batches)


def means(run: Run, batches: list[dict[str, Weighted]]) -> dict[str, float]:
    """Returns the weighted means over all batches and processes, but none where nothing counts."""
    names = list(batches[0])
    sums = torch.zeros(len(names), 2, dtype=torch.float64)
    for averages in batches:
        pairs = [[(values * counts).sum(), counts.sum()] for values, counts in averages.values()]
        sums += torch.tensor(pairs).double()
    sums = run.accelerator.reduce(sums.to(run.accelerator.device), "sum")
    result = {}
    for name, (total, count) in zip(names, sums.tolist(), strict=True):
        if count > 0:
            result[name] = total / count
    return result


def peak_memory(device: torch.device) -> float:
    """Returns the most memory in use so far, in GiB: of a GPU's tensors, or of this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated() / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # KiB on Linux


def eval_metrics(verdicts: list[tuple[str, int, float]]) -> dict[str, float]:
    """Returns accuracies, and pass@k for k = 2, 4, ... and the number of samples of a problem.

    The verdicts are triples ("greedy" | "sampled", problem, 1.0 or 0.0).
    """
    greedy: dict[int, list[float]] = {}
    sampled: dict[int, list[float]] = {}
    for kind, problem, right in verdicts:
        by_problem = greedy if kind == "greedy" else sampled
        by_problem.setdefault(problem, []).append(right)

    right_greedy = [int(sum(rights)) for rights in greedy.values()]
    right_samples = [int(sum(rights)) for rights in sampled.values()]
    samples = len(next(iter(sampled.values())))
    result = {
        "greedy_accuracy": sum(right_greedy) / len(right_greedy),
        "sampled_accuracy": sum(right_samples) / (samples * len(right_samples)),
    }
    powers = {2**exponent for exponent in range(1, samples.bit_length())}
    for k in sorted((powers | {samples}) - {1}):
        chances = [pass_at_k(samples, right, k) for right in right_samples]
        result[f"pass@{k}"] = sum(chances) / len(chances)
    return result


def pass_at_k(n: int, c: int, k: int) -> float:
    """Returns the unbiased chance that k of n samples, of which c are right, hold a right one.

    That is 1 - C(n - c, k) / C(n, k) (Chen et al. 2021, arXiv 2107.03374, eq. 1), in product form,
    which cannot overflow.
    """
    return 1.0 - math.prod(1.0 - k / i for i in range(n - c + 1, n + 1))


@contextlib.contextmanager
def timed(metrics: dict[str, float], name: str) -> Iterator[None]:
    """Adds the seconds that its block takes to a metric, with a GPU's work done."""
    start = time.perf_counter()
    try:
        yield
    finally:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        metrics[name] = metrics.get(name, 0.0) + time.perf_counter() - start


# ---- Is the model computed as its authors meant? -------------------------------------------------
@torch.no_grad()
def stock_gap(run: Run, batch: Batch, logp: Tensor) -> float:
    """Returns the mean distance, in nats, of log-probs to those of the model in transformers.

    Both the sampled log-probs of the batch and the recomputed ones, logp [B, T], are compared, and
    the larger distance is returned. The stock model reads one row at a time, with eager attention
    and without a cache. All rows of the batch must end in the same column.
    """
    base = run.model.get_base_model()
    length = batch.mask.shape[1]
    attention = base.config._attn_implementation
    base.set_attn_implementation("eager")
    try:
        with run.accelerator.autocast():
            rows = [
                base(ids[is_token][None]).logits[:, -length - 1 : -1]
                for ids, is_token in zip(batch.ids, batch.attention, strict=True)
            ]
    finally:
        base.set_attn_implementation(attention)
    logits = torch.cat(rows).float() / run.args.temperature  # [B, T, V]
    tokens = batch.ids[:, -length:, None]
    stock_logp = logits.log_softmax(-1).gather(2, tokens).squeeze(2)  # [B, T]
    gaps = torch.stack([batch.sampled_logp - stock_logp, logp - stock_logp])
    return gaps.abs().mean((1, 2)).max().item()
