"""GRPO that gives a token more credit where knowing the answer makes it likelier: RLSD.

    d_t = log pi(y_t | x and the answer, y_<t) - log pi(y_t | x, y_<t)
    w_t = clip(exp(sign(A_i) * d_t), .8, 1.2)
    A_t = A_i * (1 - l + l * w_t)                       l = .5, or fading to 0

A token that the answer makes likelier gets more credit in a right completion, and less blame in a
wrong one. The source is "Self-Distilled RLVR" (arXiv 2604.03128). There is public code by its
authors (github.com/iie-ycx/RLSD) and in ms-swift (`--advantage_reweight rlsd`). As in ms-swift, the
policy itself is told the answer, and l does not fade unless --rlsd_lambda_decay_steps says so. d_t
is computed once for each rollout. In the authors' script, an older copy of the policy, renewed
every 20 steps, is told, l fades within 60, and each update computes d_t again. As in that script,
the policy is told the final answer. The words are ours: the user's message ends with "The answer is
...".

It is GRPO with --rlsd_lambda 0, and where the answer changes nothing. --credit shuffled gives the
weights of each completion to its tokens in random order. --told wrong tells the policy the answer
of another problem: if the weights stay the same, they were never about the answer.
"""

from typing import Literal

import torch

from grpo_arca import Batch, Run, flag, in_fp32
from methods.grpo import informed, set_credit


class Flags:
    # === CREDIT ===
    credit: Literal["rlsd", "shuffled"] = flag("rlsd", "what weighs tokens; shuffled: a control")
    told: Literal["right", "wrong"] = flag("right", "answer that the policy is told; a control")
    rlsd_lambda: float = flag(0.5, "share of the weights in the credit; 0 is GRPO")
    rlsd_lambda_decay_steps: int = flag(0, "updates in which that share fades to 0; 0: never")
    rlsd_reweight_clip_range: float = flag(0.2, "weights are clipped to 1 minus and plus this")
    # === END CREDIT ===


# === CREDIT ===
def token_scores(run: Run, micro: Batch, metrics: dict) -> torch.Tensor:
    """Returns d_t [B, T]: by how much the answer raises the log-prob of each token."""
    with in_fp32(run) as policy:  # the differences are small
        return policy(informed(run, micro))[0] - policy(micro)[0]


def assign_credit(run: Run, batch: Batch, micros: list[Batch], metrics: dict) -> None:
    """Multiplies advantages by 1 - l + l * w_t, without normalizing it."""
    args = run.args
    share = args.rlsd_lambda
    if args.rlsd_lambda_decay_steps > 0:
        # Updates up to this rollout, not those within it, so that a resumed run has the same.
        done = run.rollout_number * run.updates_per_rollout
        share *= max(0.0, 1 - done / args.rlsd_lambda_decay_steps)
    clip = args.rlsd_reweight_clip_range
    for micro in micros:
        weights = (micro.advantages.sign()[:, None] * micro.scores).exp().clamp(1 - clip, 1 + clip)
        set_credit(run, micro, (1 - share + share * weights) * micro.mask)


# === END CREDIT ===
