"""What a base model and its adapter must be, and what an adapter's files say of it."""

import json
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from common import fail


def adapter_flags(folder: str | None) -> dict[str, Any]:
    """Returns the flags that the adapter in a folder decides; none where there is no folder."""
    if folder is None:
        return {}
    config = json.loads(Path(folder, "adapter_config.json").read_text(encoding="utf-8"))
    if config["peft_type"] != "LORA":
        fail(f"{folder} is an adapter of the type {config['peft_type']}, and must be of LORA")
    return {
        "lora_r": config["r"],
        "lora_alpha": config["lora_alpha"],
        "lora_dropout": config["lora_dropout"],
        "lora_target_modules": (  # names, or a pattern
            sorted(config["target_modules"])
            if isinstance(config["target_modules"], list)
            else config["target_modules"]
        ),
    }


def check_base(base: PreTrainedModel, loading: dict[str, Any], nf4_dtype: str | None) -> None:
    """Ends the run if the model that would train is not the one in its files.

    `nf4_dtype` is the precision in which NF4 layers compute, or None if no layer is quantized.
    """
    name = base.name_or_path
    # transformers applies an adapter that lies beside a base, and a new one would replace it.
    if getattr(base, "_hf_peft_config_loaded", False):
        fail(f"{name} also holds an adapter: put it into a folder of its own, for --start_adapter")
    if loading["missing_keys"]:  # the model class fills these with random numbers
        fail(f"{name} lacks weights: {', '.join(sorted(loading['missing_keys'])[:5])}")
    # A whole part that the class does not have, such as a vision tower, may be left out.
    names = [*dict(base.named_modules()), *dict(base.base_model.named_modules())]
    parents = tuple(f"{parent}." for parent in {*names} - {"", base.base_model_prefix})
    # So may causal masks, in old files of GPT-2 and GPT-J.
    left_out = [
        key
        for key in sorted(loading["unexpected_keys"])
        if key.startswith(parents) and not key.endswith((".attn.bias", ".attn.masked_bias"))
    ]
    if left_out:
        fail(f"{name} has weights that {type(base).__name__} leaves out: {', '.join(left_out[:5])}")
    layers = [layer for layer in base.modules() if hasattr(layer, "compute_dtype")]
    kinds = {(layer.weight.quant_type, layer.weight.dtype, layer.compute_dtype) for layer in layers}
    wanted = {("nf4", torch.uint8, getattr(torch, nf4_dtype))} if nf4_dtype else set()
    if kinds != wanted or getattr(base, "is_quantized", False) != bool(nf4_dtype):
        fail(f"{name} is quantized already, and not as --load_in_4bit and --dtype say")
    if nf4_dtype and any(p.dim() == 3 and min(p.shape) > 1 for p in base.parameters()):
        fail(f"{name} has weights (experts?) that 4 bits leave out: set --load_in_4bit False")


def check_adapter(model: PeftModel, targets: list[str], folder: str | None) -> None:
    """Ends the run if an adapter would not train as its flags or its files say.

    `targets` are the layers that a new adapter is for; `folder` is that of a start adapter.
    """
    if folder is None:
        # PEFT leaves out names that it does not find.
        layers = "".join(f".{layer} " for layer in model.base_model.targeted_module_names)
        if targets != ["all-linear"] and not all(f".{name} " in layers for name in targets):
            fail(f"not all of --lora_target_modules {targets} are layers of the model")
    else:
        # PEFT loads what fits. Loading again returns the names of what does not.
        loaded = model.load_adapter(folder, "default", is_trainable=True)
        if loaded.missing_keys or loaded.unexpected_keys:
            fail(f"{folder} has weights that the model lacks, or lacks some: {loaded}")
    config = model.peft_config["default"]
    if (
        config.bias != "none"
        or config.lora_bias
        or any(getattr(layer, "lora_variant", None) for layer in model.modules())
        # PiSSA and others change the base: without the adapter, it is another model.
        or config.init_lora_weights not in (True, False, "gaussian", "eva", "orthogonal")
    ):
        fail(f"{folder} trains biases, or is a variant of LoRA such as DoRA or PiSSA")
    if model.config.get_text_config().tie_word_embeddings and any(
        hasattr(layer, "base_layer")
        for layer in (model.get_input_embeddings(), model.get_output_embeddings())
    ):
        fail("one matrix is input and output of the model: leave it out of the adapter's layers")
    if any(p.dtype != torch.float32 for p in model.parameters() if p.requires_grad):
        fail("this adapter trains whole modules, which --dtype rounds: set --dtype float32")


def describe_adapter(model: PeftModel) -> str:
    """Returns how many of a model's layers and parameters an adapter trains."""
    count = sum(
        isinstance(module, nn.Linear | Conv1D) and "lora_" not in name
        for name, module in model.named_modules()
    )
    trained, total = model.get_nb_trainable_parameters()
    return (
        f"{len(model.base_model.targeted_module_names)} of {count} linear layers, "
        f"{trained:,} of {total:,} parameters"
    )
