"""GRPO that opens a gate for rare successes and closes it for rare failures: delight.

    A_t = A_i * sigmoid(A_i * s_t / eta)               s_t = -log pi(y_t), eta = 1

The product A_i * s_t is called delight. A surprising token of a right completion keeps nearly all
of its credit, one of a wrong completion loses nearly all of its blame, and a token that was certain
keeps half of either. The source is "Delightful Policy Gradient" (arXiv 2603.14608); the paper that
follows it, "Does This Gradient Spark Joy?" (2603.20526), leaves samples of little delight out of
the backward pass, which is not done here. No code by their author was found. It is our choice that
A_i is GRPO's, divided by the group's deviation. Formula and eta are those of a re-implementation,
github.com/teilomillet/retrain. That also bounds s_t, and can divide it by its deviation in a
completion, because a nearly certain language model would leave most gates half open. pi is the
policy that sampled; the paper's is the present one, which is the same for a rollout's first update.

It is half of GRPO with an infinite --delight_eta, and where every token was certain. Adam hardly
notices such a factor. --credit shuffled gives the gates of each completion to its tokens in random
order.
"""

from typing import Annotated, Literal

import torch

from grpo_arca import Batch, Run, flag
from methods.grpo import set_credit


class Flags:
    # === CREDIT ===
    credit: Literal["delight", "shuffled"] = flag("delight", "what weighs tokens; or a control")
    delight_eta: Annotated[float, 1e-9, 1e18] = flag(
        1.0, "the larger, the nearer all gates are to 1/2"
    )
    # === END CREDIT ===


# === CREDIT ===
def token_scores(run: Run, micro: Batch, metrics: dict) -> torch.Tensor:
    """Returns the surprisal of each token [B, T]."""
    return -micro.sampled_logp


def assign_credit(run: Run, batch: Batch, micros: list[Batch], metrics: dict) -> None:
    """Multiplies advantages by the gates, without normalizing them."""
    for micro in micros:
        delight = micro.advantages[:, None] * micro.scores
        set_credit(run, micro, torch.sigmoid(delight / run.args.delight_eta) * micro.mask)


# === END CREDIT ===
