"""GRPO on tokens that were about as surprising as expected: selection by relative surprisal, RSI-S.

    r_t = -log pi(y_t) / H_t                       H_t: entropy of the policy where y_t was drawn
    A_t = A_i where low <= r_t <= high, else 0

A token of little surprisal teaches nothing new, and one far above the expected surprisal H_t makes
long and unsteady gradients: both are left out. The source is "Which Tokens Matter?" (arXiv
2606.31575). We have read its abstract, which names the ratio and the interval, and two
implementations by others, one of them for open-instruct. The bounds .1 and 3 are theirs: those of
the paper are not known to us. So this is a reconstruction. As in their code, the loss is still
divided by the number of all tokens, and a token without entropy has an index of 0.

It is GRPO with --rsi_low 0 and a --rsi_high that no token reaches. --credit shuffled trains on as
many tokens of each completion, but on random ones.
"""

from typing import Literal

from torch import Tensor

from grpo_arca import Batch, Run, flag
from methods.grpo import set_credit


class Flags:
    # === CREDIT ===
    credit: Literal["rsi", "shuffled"] = flag(
        "rsi", "what chooses the tokens that are trained on; shuffled: a control"
    )
    rsi_low: float = flag(0.1, "least surprisal, divided by the entropy, of a token to train on")
    rsi_high: float = flag(3.0, "largest surprisal, divided by the entropy, of such a token")
    # === END CREDIT ===


# === CREDIT ===
def token_scores(run: Run, micro: Batch, metrics: dict) -> Tensor:
    """Returns the relative surprisal index of each token [B, T]."""
    return -micro.sampled_logp / micro.entropy.clamp(min=1e-8)


def assign_credit(run: Run, batch: Batch, micros: list[Batch], metrics: dict) -> None:
    """Gives a credit of 1 to the tokens that are trained on, and 0 to the others."""
    args = run.args
    for micro in micros:
        is_kept = (micro.scores >= args.rsi_low) & (micro.scores <= args.rsi_high) & micro.mask
        set_credit(run, micro, is_kept.float())


# === END CREDIT ===
