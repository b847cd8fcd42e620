"""Layers that compute what the model's own layers do, in fewer operations."""

import copy
import functools
from types import SimpleNamespace

import pytest
import torch
from support import refusal
from torch._subclasses import FakeTensorMode
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

import grpo_arca

NORMS = 4 * 4 + 1  # two of a block, two of its attention, and the last
OWN = Qwen3RMSNorm.forward


def layers_with(function, model) -> list:
    """Returns the layers that compute with a function of the script."""
    return [m for m in model.modules() if getattr(m.forward, "func", None) is function]


def load_policy():
    """Returns a policy that is loaded now, and no copy of one that was loaded before."""
    return grpo_arca.load_policy(grpo_arca.parse_args([]), torch.device("cpu"))


# ---- RMSNorm -------------------------------------------------------------------------------------
def test_a_norm_stays_in_bf16_under_the_autocast_of_a_gpu():
    """Which makes fp32 of it, unlike a CPU's. Tensors without numbers need no GPU."""
    torch.set_autocast_enabled("cuda", True)
    with FakeTensorMode(allow_non_fake_inputs=True):
        x = torch.zeros(64, dtype=torch.bfloat16, device="cuda")
        alone = torch.nn.functional.rms_norm(x, x.shape, x)
        ours = grpo_arca.fused_norm(SimpleNamespace(weight=x, variance_epsilon=1e-6), x)
    torch.set_autocast_enabled("cuda", False)
    assert alone.dtype == torch.float32 and ours.dtype == torch.bfloat16


def test_the_norms_of_one_policy_are_fused_and_no_others():
    """Nor is their class changed: a user's other models compute as before."""
    policy = load_policy()
    assert Qwen3RMSNorm.forward is OWN
    for model in (policy, copy.deepcopy(policy)):
        norms = layers_with(grpo_arca.fused_norm, model)
        assert len(norms) == NORMS and all(norm.forward.args == (norm,) for norm in norms)


WRONG = {
    "centered": lambda layer, x: OWN(layer, x - x.mean(-1, keepdim=True)),
    "1 + weight, as in Gemma": lambda layer, x: OWN(layer, x) * (1 + 1 / layer.weight),
    "1 + weight, where weights are 1000": lambda layer, x: OWN(layer, x) * 1.001,
    "another epsilon": lambda layer, x: (
        x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 2e-6) * layer.weight
    ),
    "an epsilon outside the root": lambda layer, x: (
        x / (x.square().mean(-1, keepdim=True).sqrt() + 1e-6) * layer.weight
    ),
}


@pytest.mark.parametrize("kind", WRONG)
def test_a_norm_that_computes_something_else_is_not_fused(monkeypatch, kind):
    monkeypatch.setattr(Qwen3RMSNorm, "forward", WRONG[kind])
    assert layers_with(grpo_arca.fused_norm, load_policy()) == []


def test_a_fused_norm_that_is_wrong_for_the_models_numbers_is_refused(make_run):
    run = make_run()
    grpo_arca.check_model(run)
    for norm in layers_with(grpo_arca.fused_norm, run.model):
        norm.forward = functools.partial(WRONG["centered"], norm)
    assert "is not supported: log-probs here are" in refusal(grpo_arca.check_model, run)


# ---- Adapters ------------------------------------------------------------------------------------
@pytest.mark.parametrize("alpha", [16, 12])  # the product with A and B is scaled by 2, or by 1.5
@pytest.mark.parametrize("in_4bit", [True, False])
def test_an_adapted_layer_computes_what_pefts_does(make_run, in_4bit, alpha):
    """Also where it drops inputs. Its gradients are tested where log-probs are."""
    run = make_run(lora_dropout=0.3, load_in_4bit=in_4bit, lora_r=8, lora_alpha=alpha)
    run.policy.train()
    layers = layers_with(grpo_arca.adapted_forward, run.model)
    assert len(layers) == 28
    for layer in layers:
        x = torch.randn(2, 3, layer.in_features)
        outputs = []
        for forward in (layer.forward, functools.partial(type(layer).forward, layer)):
            torch.manual_seed(0)
            outputs.append(forward(x))
        torch.testing.assert_close(*outputs)
        with run.model.disable_adapter():
            assert torch.equal(layer(x), layer.base_layer(x))
