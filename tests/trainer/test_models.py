"""Model families: what samples, what trains and what transformers computes are the same.

Every model here is a random one of 64 hidden units, whose weights are large enough for errors to
show. Those with experts are in fp32: experts are no linear layers, so 4 bits leave them out.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from support import TOKENIZER, fixed_draws, gradient_of, greedy_tokens, refusal, sample, stock
from transformers import AutoConfig, AutoModelForCausalLM

import grpo_arca
from common.task import Problem

LENGTH = 12
WINDOW = 16  # so it moves: one prompt is longer, one grows longer
SMALL = {
    "vocab_size": 448, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
WINDOWS = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
HEAD = {"head_dim": 16}
GPT = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 512}
CAPPED = {
    "query_pre_attn_scalar": 16,
    "final_logit_softcapping": 2.0,
    "attn_logit_softcapping": 5.0,
}
EXPERTS = {
    "num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "cohere": {"logit_scale": 0.25},
    "gemma": HEAD,
    "gemma2": HEAD | WINDOWS | CAPPED,
    "gpt2": GPT,  # learned positions, and layers that keep their weights the other way round
    "granite": {"logits_scaling": 8.0, "embedding_multiplier": 6.0, "residual_multiplier": 0.5},
    "llama": {},
    "mistral": {"sliding_window": WINDOW},
    "mixtral": EXPERTS,
    "opt": {"ffn_dim": 128, "word_embed_proj_dim": 64, "dropout": 0.1},
    "phi": {},
    "qwen2": WINDOWS | {"use_sliding_window": True},
    "qwen3": HEAD,
    "qwen3_moe": HEAD | EXPERTS,
}
QUICK = ("gemma2", "gpt2", "mixtral")  # windows and caps; learned positions; experts
PROMPTS = ["What is 3 + 4 * 2? Go step by step.", "12 - 5 =", "What is 3 + 4 * 2? Go step by step."]
PROBLEMS = [Problem(text, "1", prompt_ids=tuple(TOKENIZER.encode(text))) for text in PROMPTS]


def save_family(folder: Path, family: str, **settings) -> str:
    """Saves a random model of a family."""
    config = AutoConfig.for_model(family, **(SMALL | FAMILIES[family] | settings))
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):  # else 0
            parameter.data += 0.05 * torch.randn(parameter.shape)
        elif "norm" not in name:
            parameter.data *= 4
    model.save_pretrained(folder)
    TOKENIZER.save_pretrained(folder)
    return str(folder)


@pytest.fixture
def start(make_run, tmp_path):
    """start(family, ...) -> a Run on a random model, whose adapter acts, after its first check."""

    def build(family: str, **settings):
        run = make_run(
            model=save_family(tmp_path, family, **settings), max_completion_length=LENGTH,
            gradient_checkpointing=False, lora_r=8,
            load_in_4bit="num_experts" not in FAMILIES[family],
        )  # fmt: skip
        grpo_arca.check_model(run)
        return run

    return build


@pytest.mark.parametrize(
    "family", [pytest.param(x, marks=[pytest.mark.slow] * (x not in QUICK)) for x in FAMILIES]
)
def test_a_family_is_computed_as_transformers_does(start, family):
    """Greedy tokens, prompt by prompt, without padding, of which none ends; then log-probs and
    gradients of completions that end early: as sampled, as trained, and by transformers' own code.
    """
    run = start(family)
    run.eos_ids = torch.tensor([SMALL["vocab_size"]])
    batch = sample(run, PROBLEMS, torch.zeros(3, LENGTH), is_greedy=True)
    assert batch.mask.all()
    assert batch.completion_ids == greedy_tokens(run, PROBLEMS, LENGTH)

    run.eos_ids = torch.arange(3, 70)
    batch = sample(run, PROBLEMS, fixed_draws(3, LENGTH))
    assert batch.mask.sum(1).unique().numel() > 1
    logp = grpo_arca.training_forward(run, batch)
    run.policy.eval()
    expected, entropy = stock(run, batch)
    for ours, truth in ((logp, expected), (batch.sampled_logp, expected), (batch.entropy, entropy)):
        torch.testing.assert_close(ours, truth, atol=2e-4, rtol=0)
    found = [gradient_of(run, value.sum()) for value in (logp, expected)]
    assert found[1].norm() > 1e-2
    assert (found[0] - found[1]).norm() < 1e-3 * found[1].norm()


def test_a_head_without_its_scaling_is_found(start, monkeypatch):
    def unscaled_logits(base, hidden):
        return base.get_output_embeddings()(hidden).float()

    monkeypatch.setattr(grpo_arca, "head_logits", unscaled_logits)
    assert "is not supported: log-probs here are" in refusal(start, "granite")
