"""GRPO that reinforces implausible tokens less: TACO, tail-aware credit calibration.

    r_t = -log pi(y_t) - H_t + log(alpha)          H_t: entropy of the policy where y_t was drawn
    w_t = 1 where r_t <= 0, else 1 - lambda * (1 - exp(-r_t))
    A_t = A_i * w_t where A_i > 0, else A_i

A token is in the tail if its surprisal is more than log(1/alpha) above what the policy expected.
In a right completion it gets less credit, in a wrong one all of the blame. The source is arXiv
2607.07976. Formula and values, alpha .01 and lambda .9, are those of the authors' code
(github.com/xiuyilou/TACO). In their code, log pi and H are those of the present policy at each
update; here, of the policy that sampled. For the first update of a rollout, both are the same.

It is GRPO where no token is in the tail, and with --tail_suppression 0. --credit shuffled gives the
weights of each completion to its tokens in random order.
"""

import math
from typing import Annotated, Literal

import torch

from grpo_arca import Batch, Run, flag
from methods.grpo import set_credit


class Flags:
    # === CREDIT ===
    credit: Literal["taco", "shuffled"] = flag("taco", "what weighs tokens; shuffled: a control")
    tail_alpha: Annotated[float, 1e-9, 1e18] = flag(
        0.01, "the smaller, the fewer tokens are in the tail"
    )
    tail_suppression: Annotated[float, 0, 1] = flag(
        0.9, "share of its credit that the worst token loses"
    )
    # === END CREDIT ===


# === CREDIT ===
def token_scores(run: Run, micro: Batch, metrics: dict) -> torch.Tensor:
    """Returns the weight of each token [B, T], as TACO's equation gives it."""
    risk = -micro.sampled_logp - micro.entropy + math.log(run.args.tail_alpha)
    loss = run.args.tail_suppression * (1 - torch.exp(-risk.clamp(min=0)))
    return torch.where(micro.advantages[:, None] > 0, 1 - loss, 1.0)


def assign_credit(run: Run, batch: Batch, micros: list[Batch], metrics: dict) -> None:
    """Multiplies advantages by the weights, whose mean over a completion may be below 1."""
    for micro in micros:
        set_credit(run, micro, micro.scores)


# === END CREDIT ===
