"""What a GPU computes in, here on a CPU: `--dtype bfloat16`, and scores in fp32 beside it."""

import contextlib

import pytest
import torch
from support import (
    fixed_draws,
    gradient_of,
    problems_of,
    randomize_adapter,
    sample,
    scored,
)

import grpo_arca
import grpo_oar


@pytest.mark.parametrize("weights", ["dense", pytest.param("quantized", marks=pytest.mark.slow)])
def test_the_policy_that_samples_is_the_one_that_is_trained(make_run, weights):
    """An adapter that is merged into bf16 weights would be rounded away while it is small, as in
    the first updates. The change of log-probs that it makes in a rollout has slope and correlation
    1 with the change in training, and the decode loop rounds no more than that."""
    run = make_run(dtype="bfloat16", rollout_weights=weights)
    for scale in (0.01, 0.0001):
        randomize_adapter(run.model, scale)
        batch = sample(run, problems_of(run, 16), fixed_draws(16, 24))
        block = grpo_arca.dense(run.model) if weights == "dense" else contextlib.nullcontext()
        with torch.no_grad():
            training, _ = run.policy(batch)
            with block:
                sampling, _ = run.policy(batch)
            with run.model.disable_adapter():
                base, _ = run.policy(batch)
            with grpo_arca.in_fp32(run) as policy:
                truth, _ = policy(batch)
        both = torch.stack([training - base, sampling - base])[:, batch.mask].double()
        assert (both[0] * both[1]).sum() / both[0].square().sum() == pytest.approx(1, abs=0.01)
        assert torch.corrcoef(both)[0, 1] > 0.99 and both.abs().max() > 1e-3
        logps = torch.stack([training, batch.sampled_logp]) - truth
        rounding = logps[:, batch.mask].abs().mean(1)
        assert 1e-6 < rounding[1] < 1.2 * rounding[0] < 0.02


@pytest.mark.parametrize("module", [grpo_arca, grpo_oar])
def test_scores_in_fp32_see_the_weights_that_are_trained(make_run, module):
    """A forward pass on the unit vectors gives the dequantized weights, exactly. Gradients see the
    same ones, and the layers are as before afterwards."""
    run = make_run(module, dtype="bfloat16")
    layers = [layer for layer in run.model.modules() if hasattr(layer, "compute_dtype")]
    for layer in layers:
        layer.weight.quant_state.dtype = torch.float32  # as a folder that holds NF4 may have it

    def weights(dtype):
        found = []
        for layer in layers:
            units = torch.eye(layer.in_features, dtype=dtype, requires_grad=True)
            output = layer(units)
            (gradient,) = torch.autograd.grad(output.diagonal().sum(), units)
            found += [output.detach().float(), gradient.float()]
        return found

    forwards = [layer.forward for layer in layers]
    in_training = weights(torch.bfloat16)
    with module.in_fp32(run) as policy:
        in_scores = weights(torch.float32)
        assert {p.dtype for p in policy.parameters()} == {torch.float32, torch.uint8}
    assert len(in_training) == 56 and all(map(torch.equal, in_training, in_scores))
    assert [layer.forward for layer in layers] == forwards


def test_gradients_in_bf16_are_near_those_of_fp32(make_run):
    """Rounding turns them by less than 5 degrees. The first of several updates has ratio 1 to the
    bit."""
    gradients = []
    for dtype in ("float32", "bfloat16"):
        run = make_run(dtype=dtype, num_iterations=2)
        batch = scored(run)
        logp = grpo_arca.training_forward(run, batch)
        assert torch.equal(logp.detach(), batch.old_logp)
        loss, _ = grpo_arca.policy_loss(run, batch, logp, batch.old_logp)
        gradients.append(gradient_of(run, loss))
    assert torch.cosine_similarity(*gradients, dim=0) > 0.996
