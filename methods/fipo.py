"""GRPO whose tokens gain with what follows them: FIPO, future-KL influenced policy optimization.

    F_t = sum_{k>=t} g^(k-t) * (log pi(y_k) - log pi_old(y_k))       g = 2^(-1 / 32)
    w_t = clip(exp(F_t), 1, 1.2), but in [.8, 1] where A_i < 0 and pi(y_t) / pi_old(y_t) > 4
    A_t = A_i * w_t, without a gradient through w_t

If an update has made what follows a token likelier, the next update gives the token more of its
advantage. The source is arXiv 2603.19835. There is public code by its authors
(github.com/qwenpilot/FIPO) and in ms-swift (`--loss_type fipo`). The defaults are ms-swift's. Wrong
tokens above the threshold of 4 are not amplified. The paper's 32B runs have factors in [1, 1.2] and
a threshold of 10, and its 7B runs [.8, 1.2] and 3. Left out are their filter of ratios above 10,
and ms-swift's bound of 10 on the ratio (`delta`).

It is GRPO in the first update of a rollout, where pi is pi_old and every F_t is 0. --credit
shuffled gives the factors of each completion to its tokens in random order.
"""

from typing import Annotated, Literal

import torch

from common.credit import control_weights
from grpo_arca import Args, Batch, Run, credit_draws, flag


class Flags:
    # === CREDIT ===
    credit: Literal["fipo", "shuffled"] = flag("fipo", "what weighs tokens; shuffled: a control")
    fipo_decay_rate: Annotated[float, 1e-9, 1e18] = flag(
        32.0, "tokens after which the future counts half"
    )
    fipo_low: float = flag(1.0, "the smallest factor; 0.8 in the paper's runs of 7B")
    fipo_high: float = flag(1.2, "the largest factor")
    fipo_safety_threshold: float = flag(4.0, "a ratio above this is not amplified where A < 0")
    # === END CREDIT ===


# === CREDIT ===
def token_scores(run: Run, micro: Batch, metrics: dict) -> torch.Tensor:
    """Returns 1 for every token [B, T]: the factors are known only when an update begins."""
    return micro.mask.float()


def assign_credit(run: Run, batch: Batch, micros: list[Batch], metrics: dict) -> None:
    """Draws numbers for the shuffled control."""
    for micro in micros:
        micro.credit = credit_draws(run, micro)
        micro.weights = micro.scores


def surrogate_terms(
    args: Args, micro: Batch, log_ratio: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the log-ratio of each token, and its advantage times its factor, both [B, T]."""
    change = log_ratio.detach()
    position = torch.arange(change.shape[1], device=change.device)
    distance = (position[:, None] - position).clamp(min=0)  # [k, t]: how far k lies after t
    decay = torch.pow(2 ** (-1 / args.fipo_decay_rate), distance).tril()  # [T, T]
    factors = (change @ decay).exp().clamp(args.fipo_low, args.fipo_high)
    is_unsafe = (micro.advantages[:, None] < 0) & (change.exp() > args.fipo_safety_threshold)
    factors = torch.where(is_unsafe, factors.clamp(0.8, 1.0), factors)
    if args.credit == "shuffled":
        factors = control_weights("shuffled", factors, micro.mask, micro.credit)
    return log_ratio, micro.advantages[:, None] * factors


# === END CREDIT ===
