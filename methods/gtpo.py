"""GRPO whose uncertain tokens weigh more: GTPO, in the form of textpolicy.

    w_t = max(0, 1 + b * (H_t / mean H - 1))           b = .1; the mean is over a rollout's tokens
    A_t = A_i * w_t

The source is "GTPO and GRPO-S" (arXiv 2508.04349); no code by its authors was found. The formula is
not the paper's, but that of a re-implementation, `apply_entropy_weighting` of
github.com/teilomillet/textpolicy. The paper adds a bonus to the rewards of right completions: b
times H_t's share in the sum of the group's entropies at t. In wrong completions it uses 1 / H_t, so
that certain mistakes cost most. Then it normalizes the rewards of the two kinds separately. Here,
as in textpolicy, uncertain tokens weigh more in wrong completions, too. A second re-implementation
by the same author, in teilomillet/retrain, puts the surprisal -log p_t in place of H_t by default,
and takes the mean over each completion. As in the other files, a rollout means that of this
process.

It is GRPO with --entropy_weight 0, and where all entropies are equal. --credit shuffled gives the
weights of each completion to its tokens in random order.
"""

from typing import Literal

from torch import Tensor

from grpo_arca import Batch, Run, flag
from methods.grpo import set_credit


class Flags:
    # === CREDIT ===
    credit: Literal["gtpo", "shuffled"] = flag("gtpo", "what weighs tokens; shuffled: a control")
    entropy_weight: float = flag(0.1, "b: how much entropy changes the weights; 0 is GRPO")
    # === END CREDIT ===


# === CREDIT ===
def token_scores(run: Run, micro: Batch, metrics: dict) -> Tensor:
    """Returns the entropy of each token [B, T]."""
    return micro.entropy


def assign_credit(run: Run, batch: Batch, micros: list[Batch], metrics: dict) -> None:
    """Multiplies advantages by the weights, without normalizing them."""
    mean = batch.entropy[batch.mask].mean()
    for micro in micros:
        surplus = (micro.scores - mean) / mean.clamp(min=1e-7)  # 0 where no token is uncertain
        weights = (1 + run.args.entropy_weight * surplus).clamp(min=0)
        set_credit(run, micro, weights * micro.mask)


# === END CREDIT ===
