"""Models that are not what they seem are found before the first step."""

import ctypes
import os
import runpy
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import transformers
from accelerate.state import AcceleratorState
from safetensors.torch import load_file, save_file
from support import TOKENIZER, changed_copy, few_chains, refusal, save_model

import common.policy
import grpo_arca
from common.run_log import environment

SIZES: dict[str, Any] = {
    "vocab_size": 448, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "max_position_embeddings": 512, "pad_token_id": 0, "eos_token_id": 2, "bos_token_id": 1,
}  # fmt: skip
UP_PROJ = "model.layers.0.mlp.up_proj.weight"


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> Path:
    """A model that is not an embedded one."""
    return save_model(tmp_path_factory.mktemp("llama"), transformers.LlamaConfig(**SIZES))


@pytest.fixture
def copied(llama, tmp_path) -> Path:
    return Path(shutil.copytree(llama, tmp_path / "model"))


def check(folder: Path | str, *flags: str) -> grpo_arca.Run:
    """Does what a run does before its first step, and returns the run."""
    argv = ["--model_name_or_path", str(folder), "--max_completion_length", "16", *flags]
    AcceleratorState._reset_state()
    with mock.patch.object(common.data, "chain_problems", few_chains):
        run = grpo_arca.Run(grpo_arca.parse_args(argv))
    grpo_arca.check_model(run)
    return run


def refused(folder: Path | str, *flags: str) -> str:
    return refusal(check, folder, *flags)


# ---- Log-probs that are not the model's own ------------------------------------------------------
def test_hidden_states_of_another_kind_are_refused(llama, monkeypatch):
    """As where a family does something between its layers and its head that is unknown here."""
    check(llama)
    hidden_states = grpo_arca.hidden_states

    def scaled_states(*inputs):
        return hidden_states(*inputs) * 1.1

    monkeypatch.setattr(grpo_arca, "hidden_states", scaled_states)
    sentence = refused(llama)
    assert f"{llama} (start adapter: None) is not supported: log-probs here are " in sentence
    assert sentence.endswith("nats off transformers' own")


def test_a_padded_prompt_that_is_read_otherwise_is_refused(llama, monkeypatch):
    hidden_states = grpo_arca.hidden_states

    def states_that_see_padding(base, inputs, attention, cache=None):
        seen = attention.cummax(1).values.flip(1).cummax(1).values.flip(1)
        return hidden_states(base, inputs, seen, cache)

    monkeypatch.setattr(grpo_arca, "hidden_states", states_that_see_padding)
    assert "is not supported" in refused(llama)


def test_noise_that_only_training_mode_has_is_refused(tmp_path):
    """A router with jitter moved the gradient by a quarter."""
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
    plain = transformers.MixtralConfig(**SIZES, **experts)
    noisy = transformers.MixtralConfig(**SIZES, **experts, router_jitter_noise=0.5)
    flags = ("--load_in_4bit", "False", "--lora_target_modules", "q_proj")
    check(save_model(tmp_path / "plain", plain), *flags)
    assert "is not supported" in refused(save_model(tmp_path / "noisy", noisy), *flags)
    # In 4 bits the experts would stay as they are.
    assert "set --load_in_4bit False" in refused(tmp_path / "plain")


# ---- Weights -------------------------------------------------------------------------------------
def change_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    path = folder / "model.safetensors"
    weights = load_file(path)
    change(weights)
    save_file(weights, path, metadata={"format": "pt"})


@pytest.mark.parametrize("name", ["model.norm.weight", "lm_head.weight", UP_PROJ])
def test_missing_weights_are_refused_by_name(copied, name):
    """Transformers would fill in random numbers."""
    change_weights(copied, lambda weights: weights.pop(name))
    assert f"{copied} lacks weights: {name}" in refused(copied)


EXTRA = [
    "model.layers.2.mlp.up_proj.weight", "model.layers.0.self_attn.k_norm.weight",
    "model.layers.1.self_attn.q_proj.bias", "layers.11.input_layernorm.weight",
]  # fmt: skip


@pytest.mark.parametrize("name", EXTRA)
def test_weights_that_the_class_leaves_out_are_refused_by_name(copied, name):
    """A further layer, norms that Llama lacks, biases: another model would be trained."""
    change_weights(copied, lambda weights: weights.update({name: torch.zeros(4)}))
    assert f"LlamaForCausalLM leaves out: {name}" in refused(copied)


def test_parts_that_the_class_does_not_have_may_be_left_out(copied):
    names = ("vision_tower.blocks.0.q.weight", "projector.weight", "v_head.summary.weight")
    names += ("model.layers.0.attn.bias", "model.layers.0.attn.masked_bias")  # masks, as of GPT-J
    change_weights(copied, lambda weights: weights.update({n: torch.zeros(2, 2) for n in names}))
    check(copied)


def test_a_tied_head_is_not_missing(tmp_path):
    folder = save_model(tmp_path, transformers.LlamaConfig(**SIZES, tie_word_embeddings=True))
    assert "lm_head.weight" not in load_file(folder / "model.safetensors")
    check(folder)


# ---- Quantization --------------------------------------------------------------------------------
QUANTIZED = {
    "fp4": {"bnb_4bit_quant_type": "fp4"},
    "nf4 that computes in bf16": {
        "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": "bfloat16",
    },
    "nf4 that is stored in bf16": {  # whose bits a change to fp32 would ruin
        "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": "float32",
        "bnb_4bit_quant_storage": "bfloat16",
    },
    "nf4": {"bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": "float32"},
}  # fmt: skip


@pytest.mark.parametrize("kind", QUANTIZED)
def test_a_base_that_was_quantized_otherwise_is_refused(llama, tmp_path, kind):
    """The flags and the adapter's card would not say what it is."""
    config = transformers.BitsAndBytesConfig(load_in_4bit=True, **QUANTIZED[kind])
    model = transformers.AutoModelForCausalLM.from_pretrained(
        llama, quantization_config=config, dtype=torch.float32, device_map={"": "cpu"}
    )
    model.save_pretrained(tmp_path)
    TOKENIZER.save_pretrained(tmp_path)
    sentence = "is quantized already, and not as --load_in_4bit and --dtype say"
    assert sentence in refused(tmp_path, "--load_in_4bit", "False", "--dtype", "float32")
    if kind == "nf4":
        check(tmp_path, "--dtype", "float32")
    else:
        assert sentence in refused(tmp_path, "--dtype", "float32")


def test_a_base_that_was_quantized_by_another_method_is_refused(llama):
    """Its layers have no `compute_dtype`, as those of 8 bits, but transformers marks the model."""
    model = transformers.AutoModelForCausalLM.from_pretrained(llama)
    loading: dict[str, list] = {"missing_keys": [], "unexpected_keys": []}
    common.policy.check_base(model, loading, None)
    model.is_quantized = True
    said = refusal(common.policy.check_base, model, loading, None)
    assert "is quantized already, and not as --load_in_4bit" in said


# ---- Layers that get an adapter ------------------------------------------------------------------
def test_targets_are_all_found_or_refused(llama):
    """PEFT would train those that it finds. A part of a name is not the name."""
    run = check(llama, "--lora_target_modules", "q_proj", "1.mlp.up_proj")
    names = [name for name, module in run.model.named_modules() if hasattr(module, "lora_A")]
    ends = {name.partition(".layers.")[2] for name in names}
    assert ends == {"0.self_attn.q_proj", "1.self_attn.q_proj", "1.mlp.up_proj"}
    for wrong in ("query", "proj", "all-linear"):
        said = refused(llama, "--lora_target_modules", "q_proj", wrong)
        assert "not all of --lora_target_modules" in said


@pytest.mark.parametrize("target", ["lm_head", "embed_tokens"])
def test_a_matrix_of_both_input_and_output_gets_no_adapter(llama, tmp_path, target):
    """Merging one moved log-probs by 2 to 16 nats."""
    if target == "lm_head":
        check(llama, "--lora_target_modules", "q_proj", target)  # one of two matrices
    tied = changed_copy(tmp_path / "tied", {"config.json": {"tie_word_embeddings": True}}, llama)
    change_weights(Path(tied), lambda weights: weights.pop("lm_head.weight"))
    said = refused(tied, "--lora_target_modules", "q_proj", target)
    assert "one matrix is input and output" in said


def test_a_vision_tower_gets_no_adapter(tmp_path):
    """It would get no gradient."""
    text = SIZES | {"head_dim": 16, "query_pre_attn_scalar": 16}
    vision = {
        "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1,
        "num_attention_heads": 2, "image_size": 28, "patch_size": 14,
    }  # fmt: skip
    config = transformers.Gemma3Config(text_config=text, vision_config=vision)
    run = check(save_model(tmp_path, config), "--load_in_4bit", "False")
    names = [name for name, module in run.model.named_modules() if hasattr(module, "lora_A")]
    assert len(names) == 14 and all("language_model" in name for name in names)


# ---- How it computes -----------------------------------------------------------------------------
@pytest.mark.parametrize(("has_bf16", "dtype"), [(True, "bfloat16"), (False, "float32")])
def test_a_card_that_only_emulates_bf16_computes_in_float32(monkeypatch, has_bf16, dtype):
    """A T4 says that it has bf16 unless it is asked about emulation."""

    def is_bf16_supported(including_emulation: bool = True) -> bool:
        return has_bf16 or including_emulation

    assert grpo_arca.CUDA or grpo_arca.parse_args([]).dtype == "float32"
    monkeypatch.setattr(grpo_arca, "CUDA", True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", is_bf16_supported)
    assert grpo_arca.parse_args([]).dtype == dtype


def test_a_launch_on_the_cpu_uses_no_gpu(monkeypatch):
    """`accelerate launch --cpu` sets this variable. Graphs of steps on a CPU would be empty."""
    monkeypatch.delenv("ACCELERATE_USE_CPU")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert runpy.run_path(grpo_arca.__file__)["CUDA"]
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    assert not runpy.run_path(grpo_arca.__file__)["CUDA"]


def test_products_are_in_full_precision_where_the_machine_asks_for_tf32():
    torch.set_float32_matmul_precision("high")
    grpo_arca.load_policy(grpo_arca.parse_args([]), torch.device("cpu"))
    assert torch.get_float32_matmul_precision() == "highest"


def test_what_only_linux_has_ends_no_run(monkeypatch, capsys):
    """Nothing is promised on another system; this is simulated."""
    monkeypatch.delattr(os, "sched_getaffinity")
    exists = Path.exists
    monkeypatch.setattr(Path, "exists", lambda self: str(self) != "/proc/cpuinfo" and exists(self))
    assert environment()["hardware"]["cores"] == os.cpu_count()

    monkeypatch.setattr(ctypes, "CDLL", lambda _: object())
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    monkeypatch.setattr(sys, "argv", ["grpo_arca.py", "--help"])
    assert refusal(runpy.run_path, grpo_arca.__file__, run_name="__main__") == "0"
    assert "--model_name_or_path" in capsys.readouterr().out
