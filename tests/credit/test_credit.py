"""How concentrated weights are, and the controls that a method is compared with."""

import math

import pytest
import torch
from support import fixed_draws, scored
from test_oar import COMPLETIONS, make_batch, tokens

import grpo_arca
import grpo_oar
from common.credit import control_weights, weight_stats

CONTROLS = ["shuffled", "random"]


def naive_stats(row: list[float]) -> list[float]:
    """Returns the Gini index, as half the mean difference over the mean, and EffN/T."""
    n = len(row)
    if n < 2 or sum(row) == 0:
        return [math.nan, math.nan]
    differences = sum(abs(a - b) for a in row for b in row)
    squares = sum(weight**2 for weight in row)
    return [differences / (2 * n * sum(row)), sum(row) ** 2 / (n * squares)]


@pytest.mark.parametrize("scale", [1.0, 1e-30, 1e30])
def test_concentration_of_credit_is_that_of_a_plain_loop(scale):
    """Of rows with 0, 1, ... tokens, whose masks have holes with NaN in them."""
    weights = fixed_draws(16, 37).pow(3) * scale
    weights[:, ::5] = 0.0
    mask = fixed_draws(16, 37, 2)[..., 1] < torch.linspace(0, 1, 16)[:, None]
    mask[1] = torch.arange(37) == 3
    stats = weight_stats(weights.masked_fill(~mask, math.nan), mask)
    for row, is_token in enumerate(mask):
        expected = naive_stats(weights[row][is_token].tolist())
        found = [stats["gini"][row].item(), stats["effn"][row].item()]
        assert found == pytest.approx(expected, rel=1e-4, abs=1e-6, nan_ok=True), row


@pytest.mark.parametrize("kind", CONTROLS)
def test_a_control_is_as_concentrated_as_the_weights_in_other_places(kind):
    """Shuffled weights are permuted; random ones have the same sum and EffN/T. What is outside the
    mask stays, and so do equal weights. Rows have 0, 1, ... tokens."""
    mask = torch.arange(40) < torch.arange(40)[:, None]
    weights = torch.where(mask, fixed_draws(40, 40) ** 3, 1.0)
    weights[20] = 0.5
    draws = torch.rand(40, 40, generator=torch.Generator().manual_seed(1))
    control = control_weights(kind, weights, mask, draws)
    assert torch.equal(control[~mask], weights[~mask])
    assert torch.equal(control[20], weights[20])
    assert not torch.equal(control_weights(kind, weights, mask, 1 - draws), control)
    torch.testing.assert_close(control.sum(1), weights.sum(1))
    effn = torch.stack([weight_stats(x, mask)["effn"] for x in (control, weights)])
    torch.testing.assert_close(*effn[:, 4:], atol=1e-3, rtol=0)  # fewer tokens may be too even
    both = torch.stack([control, weights])
    assert torch.corrcoef(both[:, mask])[0, 1].abs() < 0.2
    if kind == "shuffled":
        torch.testing.assert_close(*both.sort(2).values, rtol=0, atol=0)


def test_random_weights_can_be_as_concentrated_as_a_few_tokens_of_many():
    weights = (torch.arange(1024) < torch.arange(1, 9)[:, None]).float()  # on 1, 2, ... tokens
    control = control_weights("random", weights, torch.ones(8, 1024).bool(), fixed_draws(8, 1024))
    effective = control.sum(1).square() / control.square().sum(1)
    torch.testing.assert_close(effective, torch.arange(1.0, 9.0), atol=0.3, rtol=0)


@pytest.mark.parametrize("kind", CONTROLS)
@pytest.mark.parametrize(("module", "own"), [(grpo_arca, "arca"), (grpo_oar, "oar_g")])
def test_a_scripts_controls_are_made_of_its_own_weights(make_run, module, own, kind):
    """Of tokens with a score alone, which in OAR are those of the reasoning. The draws are by row,
    whatever micro-batch it is in."""
    weights = {}
    for credit in (own, kind):
        run = make_run(module, credit=credit)
        batch = scored(run, make_batch([tokens(parts) for parts in COMPLETIONS]), module=module)
        weights[credit] = batch.weights
    has_score = batch.mask & (batch.scores >= 0)
    expected = control_weights(kind, weights[own], has_score, module.credit_draws(run, batch))
    assert torch.equal(weights[kind], expected) and not torch.equal(expected, weights[own])
    part = make_batch([tokens(parts) for parts in COMPLETIONS]).select(torch.arange(10, 15))
    scored(run, part, module=module)
    expected = expected[10:, : part.mask.shape[1]]
    torch.testing.assert_close(part.weights, expected, atol=2e-2, rtol=0)
