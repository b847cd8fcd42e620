"""GRPO that reinforces surprising tokens more while entropy is low: STARE.

    L+ = the 10% of the tokens with A_i > 0 that have the highest surprisal -log pi(y_t)
    L- = the same among the tokens with A_i < 0
    A_t = W * A_i in L+, M * A_i in L-, else A_i        while the mean entropy is below its target

Variant O1 has W = 1.1 and leaves L- alone. C2 has M = .9 as well. Both keep a policy from losing
its entropy. The source is arXiv 2606.19236. Formula and values are those of the authors' code
(github.com/hp-luo/STARE), whose default is O1 with a target of .3 nats. They take each tenth over
one call of the loss, under the present policy; here it is over a rollout of this process, under the
policy that sampled it. Their script leaves groups of equal rewards out of the mean entropy; here,
all completions of all processes count. Their optional schedule of W and M is left out.

It is GRPO while the mean entropy of a rollout's tokens is at or above --target_entropy, and with
W = M = 1. --credit shuffled gives the weights of each completion to its tokens in random order.
"""

import math
from typing import Annotated, Literal

import torch

from grpo_arca import Batch, Run, flag
from methods.grpo import set_credit


class Flags:
    # === CREDIT ===
    credit: Literal["stare", "shuffled"] = flag("stare", "what weighs tokens; shuffled: a control")
    stare_variant: Literal["O1", "C2"] = flag("O1", "C2 also spares surprising wrong tokens")
    surprising_share: Annotated[float, 1e-9, 1] = flag(
        0.1, "share of the tokens of either sign that is weighed"
    )
    amplification: float = flag(1.1, "W: weight of surprising tokens with A > 0")
    attenuation: float = flag(0.9, "M: weight of surprising tokens with A < 0, in C2")
    target_entropy: float = flag(0.3, "plain GRPO from this mean entropy on, in nats")
    # === END CREDIT ===


# === CREDIT ===
def token_scores(run: Run, micro: Batch, metrics: dict) -> torch.Tensor:
    """Returns the surprisal of each token [B, T]."""
    return -micro.sampled_logp


def surprising(micros: list[Batch], sign: int, share: float) -> list[torch.Tensor]:
    """Returns which tokens [B, T] of each micro-batch are in L+ (sign 1) or L- (sign -1)."""
    sides = [micro.loss_mask & (sign * micro.advantages > 0)[:, None] for micro in micros]
    scores = torch.cat([micro.scores[side] for micro, side in zip(micros, sides, strict=True)])
    if len(scores) == 0:
        return sides
    lowest = scores.topk(math.ceil(share * len(scores))).values[-1]
    lowest = lowest.clamp(min=1e-8)  # a token that was certain is no surprise
    return [side & (micro.scores >= lowest) for micro, side in zip(micros, sides, strict=True)]


def assign_credit(run: Run, batch: Batch, micros: list[Batch], metrics: dict) -> None:
    """Gives every token the weight 1, W or M."""
    args = run.args
    sums = torch.stack([batch.entropy[batch.mask].sum(), batch.mask.sum().float()])
    entropy_sum, token_count = run.accelerator.reduce(sums, "sum")  # over all processes
    is_low = entropy_sum < args.target_entropy * token_count
    metrics["stare_is_on"] = float(is_low)
    praised = surprising(micros, 1, args.surprising_share)
    blamed = surprising(micros, -1, args.surprising_share)
    for micro, is_praised, is_blamed in zip(micros, praised, blamed, strict=True):
        credit = micro.mask.float()
        if is_low:
            credit[is_praised] = args.amplification
        if is_low and args.stare_variant == "C2":
            credit[is_blamed] = args.attenuation
        set_credit(run, micro, credit)


# === END CREDIT ===
