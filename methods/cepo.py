"""GRPO whose tokens weigh how the right answer, more than a wrong one, makes them likely: CEPO.

    d_t = log pi(y_t | x, right answer, y_<t) - log pi(y_t | x, wrong answer, y_<t)
    w_t = clip(exp(sign(A_i) * d_t), .8, 1.2)
    A_t = A_i * (1 - l + l * w_t)                      l = .5

It is RLSD with another comparison: with a policy that is told the answer of the group's worst
completion, instead of nothing. Whatever any answer in the prompt changes, right or wrong, cancels
out. The source is "Contrastive Evidence Policy Optimization" (arXiv 2605.19436). Its authors' code
is public (github.com/ahmedheakl/CEPO), and this does the same: the present policy is told, " 42"
stands between prompt and completion, and the worst completion is the first one of least reward. Its
answer is its last box or, if it has none, the beginning of its text. We differ in five ways: a box
is cut to 50 characters, as a text is; an empty text becomes "none", where they tell the right
answer; the worst completion may have a reward of 1/2 or more; PPO's dual clip is left out; and l
does not fade. In their script it fades from .5 to 0 within 25 of 50 rollouts.

It is GRPO with --cepo_lambda 0, and wherever it does not matter which answer is told. --credit
shuffled gives the weights of each completion to its tokens in random order. Each token costs two
forward passes, as many as RLSD.
"""

import math
from typing import Literal

import torch

from common import fail
from common.answers import last_boxed
from grpo_arca import Batch, Run, flag, in_fp32
from methods.grpo import after_prompts, set_credit


class Flags:
    # === CREDIT ===
    credit: Literal["cepo", "shuffled"] = flag("cepo", "what weighs tokens; shuffled: a control")
    cepo_lambda: float = flag(0.5, "share of the weights in the credit; 0 is GRPO")
    # === END CREDIT ===


# === CREDIT ===
def told_logp(run: Run, micro: Batch, answers: list[str]) -> torch.Tensor:
    """Returns the log-prob of each token [B, T] where an answer stands before each completion."""
    if "" in answers:
        fail("a problem has no answer that the policy could be told")
    prompts = [
        (*problem.prompt_ids, *run.tokenizer.encode(f" {answer}", add_special_tokens=False))
        for problem, answer in zip(micro.problems, answers, strict=True)
    ]
    with in_fp32(run) as policy:  # the differences are small
        return policy(after_prompts(micro, prompts))[0]


def token_scores(run: Run, micro: Batch, metrics: dict) -> torch.Tensor:
    """Returns the log-prob of each token [B, T] where the policy is told the right answer."""
    return told_logp(run, micro, [problem.answer for problem in micro.problems])


def assign_credit(run: Run, batch: Batch, micros: list[Batch], metrics: dict) -> None:
    """Multiplies advantages by 1 - l + l * w_t, without normalizing it."""
    size = run.args.num_generations
    worst = batch.rewards.nan_to_num(nan=math.inf).view(-1, size).argmin(1)  # of each group
    for micro in micros:
        group = torch.searchsorted(batch.rows, micro.rows) // size
        texts = [batch.texts[place] for place in (group * size + worst[group]).tolist()]
        answers = [(last_boxed(text) or text)[:50].strip() or "none" for text in texts]
        evidence = micro.scores - told_logp(run, micro, answers)
        weights = (micro.advantages.sign()[:, None] * evidence).exp().clamp(0.8, 1.2)
        set_credit(run, micro, (1 + run.args.cepo_lambda * (weights - 1)) * micro.mask)


# === END CREDIT ===
