"""GRPO whose tokens weigh more the more they belong to their side: DelTA.

    g_t = (1 - pi(y_t)) * h_t           h_t: last hidden state; g stands for the token's gradient
    c+, c- = means of g over tokens with A_i > 0 and with A_i < 0, weighed by |A_i|
    m_t = sign(A_i) * (|g_t - c-|^2 - |g_t - c+|^2)      s_t = sigmoid(m_t / deviation of the side)
    the means once more, weighed by |A_i| s_t, and s_t by them, divided by the former deviations
    w_t = .8 + .4 s_t, and .8 where A_i = 0; all divided by their mean over the rollout
    A_t = A_i * w_t

Tokens that right and wrong completions share weigh less. The source is arXiv 2605.21467. Formula
and values are those of the authors' code (github.com/RUCBM/DelTA, K = 1), whose loss divides by the
number of tokens (--loss_type dapo). A rollout means that of this process; its hidden states are
kept, which takes four bytes for each hidden unit and token. Because the mean is 1 over a rollout
and not over a completion, one side may get more weight than the other.

It is GRPO if --delta_low equals --delta_high. If there is one side alone, as with --negative_weight
0, there is nothing to compare, and we make the weights of that side equal. --credit shuffled gives
the weights of each completion to its tokens in random order.
"""

from typing import Literal

import torch

from grpo_arca import Batch, Run, flag
from methods.grpo import set_credit


class Flags:
    # === CREDIT ===
    credit: Literal["delta", "shuffled"] = flag("delta", "what weighs tokens; shuffled: a control")
    delta_low: float = flag(0.8, "the least weight, before the mean becomes 1")
    delta_high: float = flag(1.2, "the greatest weight, before the mean becomes 1")
    # === END CREDIT ===


# === CREDIT ===
def token_scores(run: Run, micro: Batch, metrics: dict) -> torch.Tensor:
    """Returns 1 for every token [B, T], and puts g [B, T, H] into `micro.credit` for later."""
    logp, hidden = run.policy(micro)
    micro.credit = (1 - logp.exp())[..., None] * hidden.float()
    return micro.mask.float()


def margins(g: torch.Tensor, praise: torch.Tensor, blame: torch.Tensor) -> torch.Tensor:
    """Returns |g - c-|^2 - |g - c+|^2 of tokens [N, H], c weighed by praise and blame [N]."""
    above = praise @ g / praise.sum().clamp(min=1e-8)
    below = blame @ g / blame.sum().clamp(min=1e-8)
    return (2 * g - above - below) @ (above - below)


def assign_credit(run: Run, batch: Batch, micros: list[Batch], metrics: dict) -> None:
    """Computes the weights of all tokens of the rollout."""
    args = run.args
    g = torch.cat([micro.credit[micro.mask] for micro in micros])  # [N, H]
    advantages = torch.cat(  # [N], 0 where a token is not trained on
        [(micro.advantages[:, None] * micro.loss_mask)[micro.mask] for micro in micros]
    )
    sign = advantages.sign()
    praise = advantages.clamp(min=0)
    blame = -advantages.clamp(max=0)
    first = margins(g, praise, blame)
    deviation = torch.ones_like(first)
    for side in (sign > 0, sign < 0):
        if side.any():
            deviation[side] = first[side].std(correction=0).clamp(min=1e-4)
    belonging = torch.sigmoid(sign * first / deviation)
    belonging = torch.sigmoid(sign * margins(g, praise * belonging, blame * belonging) / deviation)
    if praise.sum() == 0 or blame.sum() == 0:
        belonging = torch.full_like(belonging, 0.5)
    weights = args.delta_low + (args.delta_high - args.delta_low) * belonging * (sign != 0)
    # Completions without an advantage count in the mean, but micro-batches may lack them.
    other_tokens = batch.mask[batch.advantages == 0].sum()
    total = args.delta_low * other_tokens + weights[sign != 0].sum()
    weights *= (other_tokens + (sign != 0).sum()) / total.clamp(min=1e-30)  # all 0: none is trained
    parts = weights.split([int(micro.mask.sum()) for micro in micros])
    for micro, part in zip(micros, parts, strict=True):
        credit = torch.zeros_like(micro.entropy)
        credit[micro.mask] = part
        set_credit(run, micro, credit)


# === END CREDIT ===
