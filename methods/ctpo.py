"""GRPO with the importance ratio of the whole prefix: CTPO, cumulative token policy optimization.

    log r_t = sg(sum_{k<=t} log rho_k) + log pi(y_t) - sg(log pi(y_t))     rho_k = pi / pi_old
    the loss is PPO's, with r_t clipped to [exp(-.025 sqrt(t)), exp(.05 sqrt(t))], t = 1, 2, ...
    where A_i < 0, there is no gradient above the upper bound either

sg stops the gradient: the past says how likely this prefix has become, and only the token itself is
trained. Because the log-ratio of a prefix is a random walk, the bounds grow as the root of its
length. The source is arXiv 2605.07331. Formula and values are those of the authors' code
(github.com/horizon-llm/CTPO, `cum-token-cumprod-la`), which also bounds each log rho_k by 20 and
log r_t by 10. Without sg it would be the P-trace of grpo_strace.py with lambda 1. Their other
ratio, the geometric mean, is left out.

`clip_fraction` does not count the tokens above the upper bound where A_i < 0.

It is GRPO in the first update of a rollout, where every ratio is 1. --credit shuffled gives the
prefix ratios of each completion, with their bounds, to its tokens in random order, which tests
where the past counts. --credit own keeps CTPO's bounds but gives every token its own ratio, which
tests whether the past counts at all.
"""

from typing import Annotated, Literal

import torch

from common.credit import control_weights
from grpo_arca import Args, Batch, Run, credit_draws, flag


class Flags:
    # === CREDIT ===
    credit: Literal["ctpo", "shuffled", "own"] = flag(
        "ctpo", "whose ratio a token has: its prefix's, another one's, or its own; 2 controls"
    )
    log_clip_low: Annotated[float, 1e-9, 1e18] = flag(
        0.025, "log r is clipped below minus this times sqrt(t)"
    )
    log_clip_high: Annotated[float, 1e-9, 1e18] = flag(0.05, "and above this times sqrt(t)")
    # === END CREDIT ===


# === CREDIT ===
def token_scores(run: Run, micro: Batch, metrics: dict) -> torch.Tensor:
    """Returns 1 for every token [B, T]: CTPO weighs no tokens, it changes their ratios."""
    return micro.mask.float()


def assign_credit(run: Run, batch: Batch, micros: list[Batch], metrics: dict) -> None:
    """Sets the clip range of each token, and draws numbers for the shuffled control."""
    args = run.args
    for micro in micros:
        root = micro.mask.cumsum(1).sqrt()  # [B, T] of the position in the completion, from 1
        micro.credit = credit_draws(run, micro)  # the numbers by which `surrogate_terms` shuffles
        if args.credit == "shuffled":
            root = control_weights("shuffled", root, micro.mask, micro.credit)
        micro.bounds = ((-args.log_clip_low * root).exp(), (args.log_clip_high * root).exp())
        micro.weights = micro.scores


def surrogate_terms(
    args: Args, micro: Batch, log_ratio: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the log-ratio of each token's prefix, and the advantage, both [B, T]."""
    own = log_ratio.detach().clamp(-20, 20)
    prefix = own.cumsum(1)
    if args.credit == "shuffled":
        prefix = control_weights("shuffled", prefix, micro.mask, micro.credit)
    if args.credit == "own":
        prefix = own
    log_r = prefix + log_ratio - log_ratio.detach()
    advantages = micro.advantages[:, None].expand_as(log_ratio)
    # Where A < 0, PPO has no upper bound. CTPO has one: above `highest` there is no gradient. Where
    # A >= 0, only the bound of 10 on log r is left to `highest`.
    highest = torch.where(advantages < 0, micro.bounds[1].log(), 10.0)  # type: ignore[index]
    return torch.minimum(log_r, highest), advantages


# === END CREDIT ===
