"""Credits each token with the change of a belief in success: OPPO, oracle-prompted optimization.

    e_t = clip(log pi(y_t | x and the answer, y_<t) - log pi(y_t | x, y_<t), -1, 1)
    V_t = sigmoid(logit(mean reward of the group) + sum_{k<=t} e_k)         V_0: without the sum
    A_t = V_t - V_{t-1} where this has the sign of the outcome's advantage A_i, else 0

A token that knowing the answer makes likelier is evidence that the completion ends well. The credit
is signed, and takes the place of A_i. The changes sum to V_T - V_0, and A_t = V (1 - V) e_t to
first order. The source is arXiv 2605.21851; no code by its authors was found. The formula, the sign
rule and the self-oracle, a policy that judges itself, are public. The bound of 1 is ours, and so is
how the policy is told: the user's message ends with "The answer is ...". Rewards must lie within
[0, 1]. Only the sign of A_i is used, so --scale_rewards changes nothing, and neither does
--negative_weight, unless it is 0.

It is never GRPO: evidence alone decides how large a credit is. If the answer changes nothing, there
is no gradient. --credit shuffled gives the credits of each completion to its tokens in random
order. --told wrong tells the policy the answer of another problem: if the credit stays the same, it
was never about the answer.
"""

from typing import Literal

import torch
import torch.nn.functional as F

from common import fail
from grpo_arca import Args, Batch, Run, flag, in_fp32
from methods.grpo import informed, set_credit


class Flags:
    # === CREDIT ===
    credit: Literal["oppo", "shuffled"] = flag("oppo", "what credits tokens; shuffled: a control")
    told: Literal["right", "wrong"] = flag("right", "answer that the policy is told; a control")
    evidence_clip: float = flag(1.0, "the evidence of one token is within minus and plus this")
    # === END CREDIT ===


# === CREDIT ===
def token_scores(run: Run, micro: Batch, metrics: dict) -> torch.Tensor:
    """Returns the evidence of each token [B, T]."""
    with in_fp32(run) as policy:  # errors of many tokens would add up
        evidence = policy(informed(run, micro))[0] - policy(micro)[0]
    return evidence.clamp(-run.args.evidence_clip, run.args.evidence_clip)


def assign_credit(run: Run, batch: Batch, micros: list[Batch], metrics: dict) -> None:
    """Turns evidence into signed credit, the change of the belief."""
    if (batch.rewards < 0).any() or (batch.rewards > 1).any():
        fail("a belief needs rewards from 0 to 1: change --reward_weights")
    size = run.args.num_generations
    means = batch.rewards.view(-1, size).nanmean(1).nan_to_num()  # of groups; 0 if not judged
    priors = torch.logit(means, eps=1e-3).float()
    for micro in micros:
        group = torch.searchsorted(batch.rows, micro.rows) // size
        # The belief after 0, 1, ..., T tokens.
        value = torch.sigmoid(priors[group, None] + F.pad(micro.scores.cumsum(1), (1, 0)))
        change = value.diff(dim=1)
        sign = micro.advantages.sign()[:, None]
        set_credit(run, micro, sign * (sign * change).clamp(min=0))


def surrogate_terms(
    args: Args, micro: Batch, log_ratio: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the log-ratio of each token, and its credit in place of an advantage, both [B, T]."""
    return log_ratio, micro.credit


# === END CREDIT ===
