"""GRPO on the fifth of the tokens at which the policy was least certain.

    A_t = A_i where H_t is one of the 20% highest entropies of a rollout's tokens, else 0

The source is "Beyond the 80/20 Rule" (arXiv 2506.01939). Its authors' code is public
(github.com/Shenzhi-Wang/Beyond-the-80-20-Rule-RLVR), and TRL has it as `top_entropy_quantile`.
Here, entropies are those of the policy that sampled, over this process's rollout; TRL takes those
of the present policy, over a micro-batch of all processes. As in TRL, the loss is still divided by
the number of all tokens, so the gradient becomes shorter. The authors divide by that of the chosen
ones.

--credit random trains on a random 20% of the tokens instead (arXiv 2605.07660). --credit shuffled
trains on as many tokens of each completion as the method, but on random ones.
"""

from typing import Annotated, Literal

from torch import Tensor

from grpo_arca import Batch, Run, credit_draws, flag
from methods.grpo import set_credit


class Flags:
    # === CREDIT ===
    credit: Literal["entropy_mask", "random", "shuffled"] = flag(
        "entropy_mask", "what chooses the tokens that are trained on; the last 2 are controls"
    )
    kept_share: Annotated[float, 0, 1] = flag(0.2, "share of the tokens that are trained on")
    # === END CREDIT ===


# === CREDIT ===
def token_scores(run: Run, micro: Batch, metrics: dict) -> Tensor:
    """Returns the entropy of each token [B, T]."""
    return micro.entropy


def assign_credit(run: Run, batch: Batch, micros: list[Batch], metrics: dict) -> None:
    """Gives a credit of 1 to the tokens that are trained on, and 0 to the others."""
    entropies = batch.entropy[batch.mask]
    kept = max(1, round(run.args.kept_share * len(entropies)))
    lowest = entropies.topk(kept).values[-1]
    for micro in micros:
        is_kept = micro.scores >= lowest
        if run.args.credit == "random":
            is_kept = credit_draws(run, micro) < run.args.kept_share
        set_credit(run, micro, (is_kept & micro.mask).float())


# === END CREDIT ===
