"""GRPO with a separate baseline for each token, the one of least variance: OTB.

    W_it = sum_{j<=t} (1 - 2 p_ij + sum_v p_ij(v)^2)   = sum_{j<=t} |d log p_ij / d logits|^2
    B_t  = sum_i A_i W_it / sum_i W_it                 over the group's completions that reach t
    A_it = A_i - B_t                                   p_ij: probability of the j-th token

The group's mean, GRPO's baseline, gives every completion the same vote. The baseline of least
variance gives it to those whose gradients are long. The source is "The Optimal Token Baseline"
(arXiv 2602.07078), and verl has it (`optimal_token_baseline`). W is verl's, but verl has the reward
in place of A_i, and divides nothing by a deviation. B_t is a mean of the A_i, so A_it is verl's
over the deviation (--scale_rewards none leaves that out), but for two cases. Where a single
completion is left, verl has a baseline of 0 for its reward, which praises what is right there and
blames nothing. Here B_t is 0, so the baseline of its reward is the group's mean, as in GRPO. And a
completion that GRPO would not train on, such as one whose reward is the group's mean, has no part
here. So with --mask_truncated_completions, if those of a group that are trained on have one reward,
B_t is equal to A_i, and nothing is learned until a single one of them is left.

It is GRPO where all completions of a group reach t with equal W, and beyond the end of all others.
The credit is signed. --credit shuffled gives the credits of each completion to its tokens in random
order. The probabilities of all words cost one more forward pass over the completions, half of what
ARCA costs; verl takes them from a pass that it makes anyway.
"""

import functools
from typing import Any, Literal

import torch

from common import fail
from grpo_arca import Args, Batch, Run, flag, head_logits, in_fp32
from methods.grpo import set_credit


class Flags:
    # === CREDIT ===
    credit: Literal["otb", "shuffled"] = flag("otb", "what credits tokens; shuffled: a control")
    # === END CREDIT ===


# === CREDIT ===
def minus_energy(policy: Any, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Returns -|d log p / d logits|^2 [n] of tokens [n], from hidden states [n, H]."""
    error = (head_logits(policy.model.get_base_model(), hidden) / policy.temperature).softmax(-1)
    error[torch.arange(len(targets)), targets] -= 1
    return -error.square().sum(-1)


def token_scores(run: Run, micro: Batch, metrics: dict) -> torch.Tensor:
    """Returns the squared length of the gradient of log p_t by the logits [B, T]."""
    with in_fp32(run) as policy:
        # The forward pass calls this on chunks in place of its own method, and negates the result.
        # Only this module is changed, which `in_fp32` has just made.
        policy.cross_entropy = functools.partial(minus_energy, policy)  # type: ignore[assignment]
        return policy(micro)[0]


def assign_credit(run: Run, batch: Batch, micros: list[Batch], metrics: dict) -> None:
    """Subtracts from the advantages of a group their baseline at each position."""
    if run.args.negative_weight != 1:
        fail("--negative_weight would move the baseline, too: leave it at 1")
    size = run.args.num_generations
    is_voter = (batch.advantages != 0) & batch.loss_mask.any(1)  # [B]
    votes = torch.zeros_like(batch.entropy)  # [B, T] W
    # [B] for each micro-batch, which is sorted by length: where its completions stand in `batch`
    places = [torch.searchsorted(batch.rows, micro.rows) for micro in micros]
    for micro, place in zip(micros, places, strict=True):
        votes[place, : micro.mask.shape[1]] = micro.scores.cumsum(1) * micro.mask
    votes = (votes * is_voter[:, None]).unflatten(0, (-1, size))  # [groups, G, T]
    voters = (batch.mask & is_voter[:, None]).unflatten(0, (-1, size)).sum(1)  # [groups, T]
    baselines = (votes * batch.advantages.view(-1, size, 1)).sum(1) / votes.sum(1).clamp(min=1e-8)
    baselines[voters < 2] = 0.0  # one completion is left: 0 is the group's mean, as in GRPO
    for micro, place in zip(micros, places, strict=True):
        length = micro.mask.shape[1]
        credit = micro.advantages[:, None] - baselines[place // size, :length]
        set_credit(run, micro, credit * (micro.mask & is_voter[place, None]))


def surrogate_terms(
    args: Args, micro: Batch, log_ratio: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the log-ratio of each token, and its credit in place of an advantage, both [B, T]."""
    return log_ratio, micro.credit


# === END CREDIT ===
