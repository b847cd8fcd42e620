"""GRPO itself: every token gets the advantage of its completion.

    A_t = A_i

Where the file of a method leaves out one of the three functions, tools/fork.py takes this one's.
So they also serve methods that score tokens and leave the rest to GRPO:

    A_t = A_i * T_i * s_t / sum_k s_k              s_t >= 0: the score of token t

The source is arXiv 2402.03300. The credit is that of grpo_arca.py --credit uniform.
"""

from torch import Tensor

from common.credit import control_weights
from grpo_arca import Args, Batch, Run, credit_draws, normalize


# === CREDIT ===
def token_scores(run: Run, micro: Batch, metrics: dict) -> Tensor:
    """Returns 1 for every token [B, T]."""
    return micro.mask.float()


def assign_credit(run: Run, batch: Batch, micros: list[Batch], metrics: dict) -> None:
    """Turns scores into `weights`, or into those of a control. They are also the `credit`."""
    for micro in micros:
        micro.weights = normalize(micro.scores, micro.mask, 1.0)
        if run.args.credit in ("random", "shuffled"):
            draws = credit_draws(run, micro)
            micro.weights = control_weights(run.args.credit, micro.weights, micro.mask, draws)
        micro.credit = micro.weights


def surrogate_terms(args: Args, micro: Batch, log_ratio: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the log-ratio of each token, and its advantage, both [B, T]."""
    return log_ratio, micro.advantages[:, None] * micro.credit


# === END CREDIT ===
