"""ARCA and the signals beside it, against the paper's formulas written token by token."""

import itertools
from unittest import mock

import grpo_on_one_page
import pytest
import torch
from support import (
    fixed_draws,
    problems_of,
    sample,
    scored,
    stock,
)

import grpo_arca

SIGNALS = ("arca", "surprisal", "probability", "divergence", "entropy_reduction")


@pytest.mark.parametrize(
    ("credit", "power"), [("arca", 1.0), *((name, 2.0) for name in SIGNALS[1:])]
)
@torch.no_grad()
def test_weights_are_those_of_the_papers_formula(make_run, credit, power):
    """w_t = T (alpha_t + 1e-8)^p / sum_k (alpha_k + 1e-8)^p, one completion at a time."""
    run = make_run(credit=credit, sharpening=power)
    batch = sample(run, problems_of(run, 4), fixed_draws(4, 24))
    batch.advantages = torch.ones(4)
    batch.loss_mask = batch.mask
    scored(run, batch)
    inputs = (run.model, batch.ids, batch.attention, batch.prompt_width)
    logp, hidden = grpo_on_one_page.forward(*inputs)
    with run.model.disable_adapter():
        base_logp, base_hidden = grpo_on_one_page.forward(*inputs)
    signals = {
        "arca": (hidden - base_hidden).norm(dim=2),
        "surprisal": -logp,
        "probability": logp.exp(),
        "divergence": (logp - base_logp).abs(),
        "entropy_reduction": stock(run, batch)[1],
    }
    for row in range(4):
        length = int(batch.mask[row].sum())
        signal = signals[credit][row, :length].tolist()
        if credit == "entropy_reduction":
            falls = [now - later for now, later in itertools.pairwise(signal)]
            signal = [max(0.0, fall) for fall in [*falls, 0.0]]
        raised = [(alpha + 1e-8) ** power for alpha in signal]
        expected = torch.tensor([length * x / sum(raised) for x in raised])
        torch.testing.assert_close(batch.weights[row, :length], expected, atol=2e-3, rtol=2e-3)
        assert (batch.weights[row, length:] == 0).all()
        assert batch.weights[row].sum().item() == pytest.approx(length, rel=1e-5)


@pytest.mark.parametrize("power", [1.0, 2.0, 4.0])
def test_scores_of_any_size_give_finite_weights_of_mean_one(power):
    """Also those of a new adapter, which are all 0: the paper's 1e-8 makes them uniform."""
    mask = torch.ones(3, 6).bool()
    mask[1, 1:] = False
    for scale in (0.0, 1e-20, 1e-3, 1e15):
        scores = scale * torch.rand(3, 6)
        scores[2] = scale
        weights = grpo_arca.normalize(scores, mask, power)
        torch.testing.assert_close(weights.sum(1), mask.sum(1).float())
        torch.testing.assert_close(weights[2], torch.ones(6))
    below = torch.tensor([[-0.5, 0.5, 1.5]])  # such a token must not be trained the wrong way
    weights = grpo_arca.normalize(below, torch.ones(1, 3).bool(), power)
    assert torch.equal(weights, grpo_arca.normalize(below.clamp(min=0), weights >= 0, power))


def test_arca_computes_the_head_of_the_base_alone_and_changes_no_gradient(make_run, monkeypatch):
    """The base's log-probs, which the metric `kl` needs, are all that it needs of the head."""
    run = make_run()
    heads = mock.Mock(wraps=grpo_arca.head_logits)
    monkeypatch.setattr(grpo_arca, "head_logits", heads)
    batch = scored(run)
    assert sum(len(call.args[1]) for call in heads.call_args_list) == batch.mask.numel()
    with torch.no_grad(), run.model.disable_adapter():
        assert torch.equal(batch.base_logp, run.policy(batch)[0])
    assert all(parameter.grad is None for parameter in run.model.parameters())


@pytest.mark.parametrize("credit", ["arca", "divergence"])
def test_scores_in_bf16_are_those_of_fp32(make_run, credit):
    """The adapter is as small as after a few updates at a small rate: bf16 would round it off."""
    exact = scored(make_run(credit=credit, dtype="float32", adapter=1e-4)).scores
    batch = scored(make_run(credit=credit, dtype="bfloat16", adapter=1e-4))
    both = torch.stack([exact, batch.scores])[:, batch.mask]
    assert torch.corrcoef(both)[0, 1] > 0.995
