"""The numbers of a run, which docs/metrics.md explains to users."""

import contextlib
import math
import resource
import sys
import time
from collections.abc import Iterator
from typing import Any

import pandas
import torch
from accelerate.utils import gather_object
from torch import Tensor

from common import fail
from common.credit import weight_stats
from common.reward import GRADER, log_means

Averages = dict[str, tuple[Tensor, Tensor]]  # values, and how much each counts, of the same shape


def credit_averages(micro: Any) -> Averages:
    """Returns how concentrated the weights are in a Batch's completions with an advantage.

    Where they are known, the result also has the k3 estimate of how far the policy that sampled
    diverges from the policy before training or, without --beta, from the base (KL).
    """
    has_gradient = (micro.advantages != 0) & micro.loss_mask.any(1)
    averages = {}
    for name, values in weight_stats(micro.weights, micro.mask).items():
        averages[f"weight_{name}"] = (values.nan_to_num(0.0), values.isfinite() & has_gradient)
    reference_logp = micro.base_logp if micro.reference_logp is None else micro.reference_logp
    if reference_logp is not None:
        log_ratio = torch.where(micro.loss_mask, reference_logp - micro.sampled_logp, 0.0)
        averages["kl"] = (log_ratio.exp() - log_ratio - 1, micro.loss_mask)
    return averages


def rollout_metrics(
    accelerator: Any,
    batch: Any,
    advantages: Tensor,
    logged: dict[str, list[float]],
    seconds: float,
) -> dict[str, float]:
    """Returns the metrics of a rollout, over all processes.

    The Batch is this process's, as is what its reward functions have `logged`. The advantages
    [prompts, G] are those of all processes. reward_timeouts counts since the processes were
    started.
    """
    every_row = torch.ones_like(batch.rewards)
    averages = {
        "reward": (batch.rewards.nan_to_num(), batch.rewards.isfinite()),
        "completion_length": (batch.mask.sum(1), every_row),
        "truncated_share": (batch.truncated, every_row),
        "entropy": (batch.entropy, batch.mask),
    }
    result = (
        log_means(logged)
        | {"reward": math.nan}  # if nothing is judged
        | means(accelerator, [averages])
    )
    result["reward_timeouts"] = sum(gather_object([GRADER.timeouts]))
    result["zero_std_share"] = (advantages == 0).all(1).float().mean().item()
    result["rollout_tokens"] = round(result["completion_length"] * advantages.numel())
    result["tokens_per_second"] = result["rollout_tokens"] / seconds
    return result


def means(accelerator: Any, batches: list[Averages]) -> dict[str, float]:
    """Returns weighted means over all batches and processes, except where nothing counts."""
    sums = torch.zeros(len(batches[0]), 2, dtype=torch.float64)  # of values, and of counts
    for averages in batches:
        pairs = [[(values * counts).sum(), counts.sum()] for values, counts in averages.values()]
        sums += torch.tensor(pairs).double()
    sums = accelerator.reduce(sums.to(accelerator.device), "sum")
    return {
        name: total / count
        for name, (total, count) in zip(batches[0], sums.tolist(), strict=True)
        if count > 0
    }


def peak_memory(device: torch.device) -> float:
    """Returns the most memory in use so far, in GiB: of a GPU's tensors, or of this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated() / 2**30
    unit = 2**30 if sys.platform == "darwin" else 2**20  # macOS counts bytes, Linux KiB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit


def eval_metrics(
    names: list[str], verdicts: list[tuple[str, int, bool, list[float]]]
) -> dict[str, float]:
    """Returns the accuracies, pass@k, mean rewards and the truncated share of an evaluation.

    A verdict has "greedy" or "sampled", the number of the problem, whether the completion is
    truncated, and what the named reward functions gave, the accuracy first. k is 2, 4, ... and the
    number of samples of a problem. pass@k is the unbiased 1 - C(n - c, k) / C(n, k), where c of n
    samples are right (Chen et al. 2021, arXiv 2107.03374, eq. 1). The mean rewards are those of
    samples.
    """
    # No function has a name with a space. Own functions do not judge greedy answers.
    table = pandas.DataFrame(
        dict(zip(["the kind", "the problem", "is cut", *names], [*facts, *values], strict=False))
        for *facts, values in verdicts
    )
    averages = table.groupby("the kind")[names].mean()  # without NaN
    result: dict[str, float] = {}
    if table[names[0]].notna().all():  # all problems have answers
        result |= averages[names[0]].add_suffix("_accuracy").to_dict()
        of_problems = table[table["the kind"] == "sampled"].groupby("the problem")[names[0]]
        samples = int(of_problems.size().max())  # of each problem
        for k in sorted({2**i for i in range(1, samples.bit_length())} | {samples} - {1}):
            misses = sum(math.comb(samples - int(count), k) for count in of_problems.sum())
            result[f"pass@{k}"] = 1 - misses / (math.comb(samples, k) * len(of_problems))
    result |= averages.loc["sampled", names[1:]].dropna().add_prefix("rewards/").to_dict()
    if not result:
        fail("held-out problems have no answers, and no reward function judges them")
    result["truncated_share"] = table["is cut"].mean()
    return result


@contextlib.contextmanager
def timed(metrics: dict[str, float], name: str) -> Iterator[None]:
    """Adds to a metric the seconds that its block takes, until a GPU's work is done."""
    start = time.perf_counter()
    yield
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    metrics[name] = metrics.get(name, 0.0) + time.perf_counter() - start
