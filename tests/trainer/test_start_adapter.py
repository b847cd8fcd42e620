"""A run that starts from a LoRA adapter takes its weights and settings.

With --beta the adapter, as it was at the start, is the reference. That it resumes is in
test_resume.py.
"""

import json
import shutil
from pathlib import Path

import grpo_on_one_page
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from support import (
    ADAPTER,
    TINY,
    make_adapter,
    random_batch,
    randomize_adapter,
    read_jsonl,
    refusal,
    save_model,
    unscored,
)
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen2Config

import grpo_arca

WEIGHTS = "adapter_model.safetensors"


@pytest.fixture(scope="module")
def adapter(tmp_path_factory) -> str:
    return make_adapter(tmp_path_factory.mktemp("adapter"))


@pytest.fixture
def start(make_run):
    """start(folder, flag=value) -> a run that starts from an adapter."""
    return lambda folder, **flags: make_run(start_adapter=folder, adapter=None, **flags)


@torch.no_grad()
def peft_logp(adapter: str, batch: grpo_arca.Batch) -> torch.Tensor:
    """Returns log-probs [B, T] of base and adapter, loaded by PEFT alone."""
    base = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32)
    model = PeftModel.from_pretrained(base, adapter).eval()
    logp, _ = grpo_on_one_page.forward(model, batch.ids, batch.attention, batch.prompt_width)
    return logp * batch.mask


VARIANTS = {
    "plain": {},
    "with ranks of its own": {"rank_pattern": {"up_proj": 2}, "alpha_pattern": {"q_proj": 20}},
    "scaled by the root": {"use_rslora": True},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_policy_and_its_reference_are_the_adapter(start, tmp_path, variant):
    folder = make_adapter(tmp_path / "start", **VARIANTS[variant])
    run = start(folder, load_in_4bit=False, dtype="float32", beta=0.1, credit="arca", lora_r=4)
    saved = load_file(Path(folder, WEIGHTS))
    assert {name.replace(".default", "") for name in run.adapter} == saved.keys()
    # Flags say what is trained: config.json and the adapter's card show them.
    flags = {f"lora_{name.removeprefix('lora_')}": value for name, value in ADAPTER.items()}
    assert flags.items() <= vars(run.args).items()
    grpo_arca.check_model(run)

    batch = unscored(random_batch())
    expected = peft_logp(folder, batch)
    batch.sampled_logp = torch.where(batch.mask, expected + 0.3 * torch.randn(expected.shape), 0.0)
    with torch.no_grad():
        torch.testing.assert_close(run.policy(batch)[0], expected, atol=1e-4, rtol=0)
    # It stays the reference where the policy moves, though ARCA also asks for the bare base.
    randomize_adapter(run.model, scale=0.3)
    metrics: dict[str, float] = {}
    grpo_arca.score(run, batch, [batch], metrics)
    torch.testing.assert_close(batch.reference_logp, expected, atol=1e-4, rtol=0)
    log_ratio = (expected - batch.sampled_logp)[batch.loss_mask]
    kl = (log_ratio.exp() - log_ratio - 1).mean().item()
    assert metrics["kl"] == pytest.approx(kl, rel=1e-3)
    assert kl > 0.01
    grpo_arca.update(run, [batch])
    for name, tensor in run.start_weights.items():
        saved_name = name.removeprefix("model.").replace(".default", "")
        assert torch.equal(tensor, saved[saved_name])


@pytest.mark.slow
def test_a_runs_own_adapter_is_a_start(run_main, tmp_path):
    """A curriculum is two commands: the second begins where the first ended."""
    flags = {
        "max_completion_length": 64, "max_eval_samples": 4, "learning_rate": 0.02,
        "credit": "uniform", "num_generations_eval": 2,
    }  # fmt: skip
    assert run_main(**flags, max_steps=2)[0] == 0
    second = {"start_adapter": "out/adapter", "output_dir": "second", "max_steps": 0}
    assert run_main(**flags, **second)[0] == 0
    evaluations = []
    texts = []
    for folder in ("out", "second"):
        rows = read_jsonl(tmp_path / folder / "metrics.jsonl")
        evaluations.append([row["eval"] for row in rows if "eval" in row])
        rows = read_jsonl(tmp_path / folder / "completions.jsonl")
        texts.append([row["completion"] for row in rows if row["eval"]])
    assert evaluations[1] == evaluations[0][-1:]
    count = len(texts[1])
    assert texts[0][-count:] == texts[1] != texts[0][:count]


# ---- What cannot be a start ----------------------------------------------------------------------
UNSUPPORTED = {
    "DoRA": {"use_dora": True},
    "activated LoRA": {"alora_invocation_tokens": [250, 251]},
    "a bias of LoRA": {"lora_bias": True},
    "OLoRA": {"init_lora_weights": "olora"},
}


@pytest.mark.parametrize("variant", UNSUPPORTED)
def test_a_variant_that_rollouts_do_not_apply_is_refused(start, tmp_path, variant):
    """Rollouts would come from another policy than the one that is trained."""
    folder = make_adapter(tmp_path / "variant", **UNSUPPORTED[variant])
    assert f"{folder} trains biases, or is a variant" in refusal(start, folder)


def test_trained_biases_are_refused(start, tmp_path):
    """They would stay when the adapter is disabled: KL and ARCA would compare with another base."""
    config = Qwen2Config(
        vocab_size=448, hidden_size=32, intermediate_size=64, num_hidden_layers=1,
        num_attention_heads=4, num_key_value_heads=2,
    )  # fmt: skip
    base = str(save_model(tmp_path / "base", config))
    folder = make_adapter(tmp_path / "biases", base, bias="lora_only")
    assert f"{folder} trains biases" in refusal(start, folder, model=base)


def test_whole_modules_are_trained_in_float32_alone(start, tmp_path):
    """In bf16 a step changes one entry in a hundred; the rest is rounded away."""
    folder = make_adapter(tmp_path / "head", modules_to_save=["lm_head"])
    assert any("lm_head" in name for name in start(folder).adapter)
    assert "set --dtype float32" in refusal(start, folder, dtype="bfloat16")


@pytest.mark.parametrize("place", [None, "layers.99"])
def test_weights_that_are_missing_or_of_no_layer_are_refused(start, adapter, tmp_path, place):
    """PEFT itself would leave layers without weights as they are when new, and the others out."""
    folder = shutil.copytree(adapter, tmp_path / "start")
    weights = load_file(folder / WEIGHTS)
    name = sorted(weights)[0]
    if place is None:
        weights.pop(name)
    else:
        weights[name.replace("layers.0", place)] = weights[name].clone()
    save_file(weights, folder / WEIGHTS)
    assert f"{folder} has weights that the model lacks, or lacks some" in refusal(start, folder)


@pytest.mark.parametrize(
    "flags", [{"lora_r": 8}, {"lora_alpha": 13}, {"lora_target_modules": ["q_proj"]}]
)
def test_flags_that_contradict_the_adapter_are_refused(start, adapter, flags):
    """Also where they name the default of a new adapter."""
    assert "leave these flags out" in refusal(start, adapter, **flags)


def test_another_end_than_the_bases_is_refused(start, adapter, tmp_path):
    folder = shutil.copytree(adapter, tmp_path / "start")
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    tokenizer.save_pretrained(folder)  # as the trainers of transformers and TRL do
    start(folder)
    tokenizer.eos_token = "<pad>"
    tokenizer.save_pretrained(folder)
    assert "another chat template or end token" in refusal(start, folder)


def test_an_adapters_own_template_is_refused_unless_it_is_given(start, adapter, tmp_path):
    folder = shutil.copytree(adapter, tmp_path / "start")
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %} Answer: "
    tokenizer.save_pretrained(folder)
    assert '--chat_template_kwargs {"chat_template": ...}' in refusal(start, folder)
    keywords = json.dumps({"chat_template": tokenizer.chat_template})
    run = start(folder, chat_template_kwargs=keywords)
    assert run.tokenizer.decode(run.train_set[0].prompt_ids).endswith(" Answer: ")


def test_an_adapter_of_another_type_is_named(start, adapter, tmp_path):
    folder = shutil.copytree(adapter, tmp_path / "start")
    (folder / "adapter_config.json").write_text(
        '{"peft_type": "IA3", "target_modules": ["k_proj"]}'
    )
    assert f"{folder} is an adapter of the type IA3" in refusal(start, folder)


def test_an_adapter_beside_the_base_is_refused(make_run, adapter, tmp_path):
    """transformers applies it, and a new one would replace it, without a word."""
    folder = shutil.copytree(TINY, tmp_path / "both")
    for name in ("adapter_config.json", WEIGHTS):
        shutil.copy(Path(adapter, name), folder)
    assert f"{folder} also holds an adapter" in refusal(make_run, model=folder)
