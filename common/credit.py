"""Weights that a method gives: how concentrated they are, and controls to compare it with."""

import math

import torch
from torch import Tensor


@torch.no_grad()
def weight_stats(weights: Tensor, mask: Tensor) -> dict[str, Tensor]:
    """Returns how concentrated the credit is in each completion, as two float32 tensors [B].

    weights [B, T] >= 0 may have any scale. Outside mask [B, T] nothing is read, not even NaN. As in
    ARCA (arXiv 2606.00257):

        gini   0 for uniform weights, (n - 1) / n for all weight on one of n tokens
        effn   the effective number of tokens over their number ("EffN/T"): 1 for uniform weights,
               1 / n for all weight on one token

    Both are NaN for a completion of at most one token, or with a total weight of 0: use nanmean.
    """
    weights = torch.where(mask, weights.double(), 0.0)  # [B, T]; not *, because NaN * 0 is NaN
    lengths = mask.sum(1)  # [B]
    totals = weights.sum(1)  # [B]
    shares = weights.sort(dim=1).values / totals[:, None]  # [B, T] ascending, the padding first

    # The Gini index is sum_k (2 * k - n - 1) * share_k / n, where k is 1 for the smallest share and
    # n for the largest, which stands last. So k is n + 1 plus a column's negative index.
    negative_index = torch.arange(-weights.shape[1], 0, device=weights.device)  # [T], to -1
    gini = ((2 * negative_index + lengths[:, None] + 1) * shares).sum(1).clamp(min=0) / lengths
    # The clamp is for rounding, which may leave -1e-18.
    effn = 1.0 / (lengths * shares.square().sum(1))

    is_defined = (lengths > 1) & (totals > 0) & totals.isfinite()
    return {
        "gini": torch.where(is_defined, gini, math.nan).float(),
        "effn": torch.where(is_defined, effn, math.nan).float(),
    }


def control_weights(kind: str, weights: Tensor, mask: Tensor, draws: Tensor) -> Tensor:
    """Returns random weights [B, T] to compare a method with, from `credit_draws` [B, T].

    They show what a method's own choice of tokens is worth. "shuffled" permutes the weights of each
    completion. "random" draws log-normal weights with the same sum that are as concentrated
    (EffN/T, see `weight_stats`).
    """
    if kind == "shuffled":
        # Padding stays where it is.
        return weights.gather(1, torch.where(mask, draws, 2.0).argsort(dim=1, stable=True))

    # EffN/T of exp(sigma * z) falls as sigma grows, so bisection finds each completion's sigma.
    target = weight_stats(weights, mask)["effn"]  # [B]
    z = torch.special.ndtri(draws.clamp(1e-6, 1 - 1e-6))  # [B, T] normal
    low = torch.zeros_like(target)
    high = torch.full_like(target, 50.0)
    for _ in range(40):
        sigma = (low + high) / 2
        drawn = torch.where(mask, sigma[:, None] * z, -torch.inf).softmax(1)
        is_too_flat = weight_stats(drawn, mask)["effn"] > target  # False for NaN (one token)
        low = torch.where(is_too_flat, sigma, low)
        high = torch.where(is_too_flat, high, sigma)
    drawn = drawn / drawn.sum(1, keepdim=True) * (weights * mask).sum(1, keepdim=True)
    return torch.where(mask & (target[:, None] < 1 - 1e-6), drawn, weights)  # uniform ones stay
