"""Counts how much GPU memory a step takes, from shapes, on any machine: no GPU, no weights.

    python tools/memory.py                                     # which model fits which card
    python tools/memory.py --shape 8B --completions 8 --prompt_tokens 512 \\
        --completion_tokens 1024 --micro_batch 8 -- --lora_r 64    # flags after `--`: the script's
    python tools/memory.py --shape 8B -- --per_device_rollout_batch_size 16   # sampled in parts

The script's own functions run on fake tensors, which have shapes but no data. The bytes of all
tensors alive are added up at every operation: NF4 base, adapter, AdamW, KV cache, activations,
gradients. The peak is what `torch.cuda.max_memory_allocated` would report; test_memory.py compares
it with one that an earlier version had on an H200. A card needs more: what CUDA and its libraries
take (OVERHEAD) and what the allocator loses to fragmentation (SLACK) are assumed, not counted.
Steps are eager ones with gradient checkpointing; `--torch_compile` is not counted.
"""

import argparse
import contextlib
import logging
import math
import sys
import time
import warnings
import weakref
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock

logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # as in the scripts

import bitsandbytes as bnb
import torch
import transformers
from accelerate.utils import convert_outputs_to_fp32
from bench import SHAPES, shape_config  # which finds the scripts
from peft.utils import integrations
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

import grpo_arca as trainer

GIB = 2**30
OVERHEAD = 0.6  # GiB of CUDA and its libraries
SLACK = 1.05  # of the allocator
CARDS = {8: 7.6, 12: 11.6, 16: 15.6, 24: 23.5, 80: 79.1}  # GB sold: GiB that CUDA sees
GROUP = 8  # completions of a prompt
SIZES_OF_A_RUN = (  # flags of the scripts that the options of this tool stand for
    "max_completion_length", "per_device_train_batch_size", "gradient_accumulation_steps",
    "steps_per_generation", "num_generations", "rollout_weights",
)  # fmt: skip


# ---- Counting ------------------------------------------------------------------------------------
class LiveBytes(TorchDispatchMode):
    """Counts the bytes of all tensors made inside it that are still alive, and their peak."""

    def __init__(self) -> None:
        super().__init__()
        self.live = 0
        self.peak = 0
        self.storages: dict[int, weakref.ref] = {}

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Sequence = (), kwargs: dict | None = None
    ) -> Any:
        out = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                self.add(tensor.untyped_storage())
        inside = 0
        if function.name() == "bitsandbytes::gemm_4bit":  # dequantizes its weight [N, K] inside
            inside = math.prod(args[2]) * args[0].element_size()
        self.peak = max(self.peak, self.live + inside)
        return out

    def add(self, storage: torch.UntypedStorage) -> None:
        """Counts a storage until it is gone."""
        key = storage._cdata
        size = storage.nbytes()
        if key in self.storages:
            return

        def gone(_: weakref.ref) -> None:
            self.live -= size
            del self.storages[key]

        self.live += size
        self.storages[key] = weakref.ref(storage, gone)

    def phase(self) -> float:
        """Returns the peak since the last call, in GiB."""
        peak = self.peak
        self.peak = self.live
        return peak / GIB


# ---- A model without data ------------------------------------------------------------------------
def empty_pretrained(config: PretrainedConfig) -> Callable[..., tuple]:
    """Returns what stands for `from_pretrained`: it makes the model without data.

    The model's layers are NF4 where that is asked for. No weight of it is missing.
    """

    def load(name: str, dtype: str, quantization_config: Any = None, **_: Any) -> tuple:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
            head = model.get_output_embeddings()
            layers = list(model.named_modules()) if quantization_config else []
            for path, layer in layers:
                if isinstance(layer, torch.nn.Linear) and layer is not head:
                    nf4 = bnb.nn.Linear4bit(
                        layer.in_features,
                        layer.out_features,
                        bias=False,
                        compute_dtype=getattr(torch, dtype),
                        quant_type="nf4",
                    )
                    model.set_submodule(path, nf4)
        model.is_loaded_in_4bit = bool(quantization_config)
        return model, {"missing_keys": [], "mismatched_keys": [], "unexpected_keys": []}

    return load


def allocate(model: torch.nn.Module) -> None:
    """Replaces a model's tensors without data by new ones. What is shared stays shared."""
    made: dict[torch.nn.Parameter, torch.nn.Parameter] = {}
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = torch.ones(buffer.shape)
        for name, old in module._parameters.items():
            if old is None:
                continue
            if old not in made:
                made[old] = filled(module, old)
            module._parameters[name] = made[old]


def filled(module: torch.nn.Module, old: torch.nn.Parameter) -> torch.nn.Parameter:
    """Returns a parameter with data of the same shape, quantized where the layer is 4-bit."""
    if not isinstance(module, bnb.nn.Linear4bit):
        data = torch.ones(old.shape, dtype=old.dtype)
        return torch.nn.Parameter(data, requires_grad=old.requires_grad)
    dense = torch.ones(module.out_features, module.in_features, dtype=torch.bfloat16)
    data, state = bnb.functional.quantize_4bit(
        dense, blocksize=64, compress_statistics=True, quant_type="nf4"
    )
    weight: Any = torch.nn.Parameter(data, requires_grad=False)
    weight.quant_state = state
    return weight


def no_adapter(name: str, revision: str) -> tuple[None, dict]:
    """Stands for `find_adapter`: the model is not an adapter."""
    return None, {}


# ---- A step --------------------------------------------------------------------------------------
def count(
    config: PretrainedConfig, options: argparse.Namespace, fake: bool = True
) -> dict[str, float]:
    """Returns the peaks of a step's phases in GiB, as allocated; `step` is what must be there."""
    flags = ["--model_name_or_path", "none", "--gradient_checkpointing", "True"]
    flags += ["--dtype", "bfloat16", "--credit", "arca"]  # which computes its scores in fp32
    with mock.patch.object(trainer, "find_adapter", no_adapter):  # which would ask the Hub
        args = trainer.parse_args([*flags, *options.flags])
    bnb.functional.quantize_4bit(torch.ones(64, 64), compress_statistics=True)  # makes its tables

    def no_numbers(*_: Any) -> dict:  # fake tensors have none to look at
        return {}

    def dequantize(weight: Any) -> torch.Tensor:
        return bnb.functional.dequantize_4bit(weight.data, weight.quant_state)

    def unique(ids: torch.Tensor, **_: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns distinct prompts and which of them each row has: shapes do not say it."""
        return ids[::GROUP], torch.arange(len(ids)) // GROUP

    with (
        mock.patch.object(trainer, "check_credit", no_numbers),
        mock.patch.object(trainer, "credit_metrics", no_numbers),
        mock.patch.object(integrations, "dequantize_bnb_weight", dequantize),
        mock.patch.object(AutoModelForCausalLM, "from_pretrained", empty_pretrained(config)),
        mock.patch.object(AutoConfig, "from_pretrained", lambda *_, **__: config),
        mock.patch.object(torch.Tensor, "unique", unique),
    ):
        model = trainer.load_policy(args, torch.device("cpu"))
        if args.gradient_checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        mode = FakeTensorMode(allow_non_fake_inputs=True) if fake else contextlib.nullcontext()
        with mode, LiveBytes() as memory:
            return phases(args, model, memory, options)


def phases(
    args: trainer.Args, model: Any, memory: LiveBytes, options: argparse.Namespace
) -> dict[str, float]:
    """Runs a step's operations in the script's order, on tensors of the right shapes."""
    allocate(model)
    policy: Any = trainer.Policy(model, args.temperature)
    autocast = torch.autocast("cpu", torch.bfloat16, args.dtype == "bfloat16", False)
    policy.forward = convert_outputs_to_fp32(autocast(policy.forward))  # as Accelerate does
    run: Any = SimpleNamespace(args=args, policy=policy, model=model)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, foreach=True)  # as on a GPU
    found: dict[str, float] = {}
    for _ in range(2):  # in the first, AdamW has no state yet
        memory.phase()
        found["weights"] = memory.live / GIB
        with torch.no_grad(), autocast:
            found["rollout"], captured = rollout_peaks(args, policy, memory, options)
        memory.phase()

        micro = made_up_batch(options)
        trainer.score(run, micro, [micro], {})
        found["score"] = memory.phase()

        logp = policy.train()(micro)[0]
        logp.sum().backward()
        del logp, micro
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        found["update"] = memory.phase()
    found["step"] = max(captured, found["rollout"], found["score"], found["update"])
    return found


def rollout_peaks(
    args: trainer.Args, policy: trainer.Policy, memory: LiveBytes, options: argparse.Namespace
) -> tuple[float, float]:
    """Returns the peaks of a rollout whose steps are run eagerly, and of one that is captured.

    What a captured step uses is reserved for it alone. Of a rollout in parts, the first part is
    run: none is larger.
    """
    completions = options.completions
    if args.per_device_rollout_batch_size > 0:
        completions = min(completions, args.per_device_rollout_batch_size)
    is_dense = options.rollout_weights == "dense"
    weights = trainer.dense(policy.model) if is_dense else contextlib.nullcontext()
    with weights:
        base = policy.eval().model.get_base_model()
        uniforms = torch.rand(completions, options.completion_tokens)
        prompts = [[0] * options.prompt_tokens] * completions
        decoder = trainer.Decoder(base, prompts, uniforms, (1.0, 0, 1.0))
        started = memory.phase()
        before = memory.live / GIB
        decoder.step()
        stepped = memory.phase()
    return max(started, stepped), stepped + stepped - before


def made_up_batch(options: argparse.Namespace) -> trainer.Batch:
    """Returns a micro-batch of the right shape."""
    size = options.micro_batch
    width = options.prompt_tokens + options.completion_tokens
    ids = torch.ones(size, width, dtype=torch.long)
    rows = torch.arange(size)
    zeros = torch.zeros(size, options.completion_tokens)
    return trainer.Batch(rows, options.prompt_tokens, ids, ids.bool(), rows > 0, zeros, zeros)


# ---- Command line --------------------------------------------------------------------------------
def card_for(gib: float) -> str:
    """Returns the smallest card that has room for a peak."""
    fitting = [size for size, seen in CARDS.items() if gib * SLACK + OVERHEAD <= seen]
    return f"{fitting[0]} GB" if fitting else "none"


def parse_options(argv: list[str]) -> argparse.Namespace:
    """Returns the options; `flags` are those after `--`."""
    split = argv.index("--") if "--" in argv else len(argv)
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--shape", nargs="+", choices=SHAPES, default=list(SHAPES))
    kinds = ["quantized", "dense"]
    add("--rollout_weights", nargs="+", choices=kinds, default=kinds)
    add("--completions", type=int, default=64, help="of a rollout")
    add("--micro_batch", type=int, default=16, help="completions of a micro-batch")
    add("--prompt_tokens", type=int, default=128)
    add("--completion_tokens", type=int, default=256)
    options = parser.parse_args(argv[:split])
    options.flags = argv[split + 1 :]
    sizes = ("completions", "micro_batch", "prompt_tokens", "completion_tokens")
    for name in sizes:
        if getattr(options, name) < 1:
            parser.error(f"--{name} must be at least 1")
    for word in options.flags:
        if word.partition("=")[0].lstrip("-").replace("-", "_") in SIZES_OF_A_RUN:
            parser.error(f"{word} has no effect here: give --{', --'.join(sizes)}")
    return options


def main() -> None:
    options = parse_options(sys.argv[1:])
    transformers.logging.set_verbosity_error()
    warnings.filterwarnings("ignore")
    shape = f"{options.completions} completions of {options.prompt_tokens} + "
    shape += f"{options.completion_tokens} tokens, micro-batches of {options.micro_batch}"
    print(f"Counted, GiB: {shape}; flags: {' '.join(options.flags) or 'none'}\n")
    print("| shape | rollout_weights | weights, AdamW | rollout | score | update | smallest card |")
    print("|---|---|---|---|---|---|---|")
    jobs = []
    for name in options.shape:
        jobs += [(name, kind) for kind in options.rollout_weights]
    began = time.perf_counter()
    for done, (name, kind) in enumerate(jobs, start=1):
        asked = argparse.Namespace(**vars(options))
        asked.rollout_weights = kind
        found = count(shape_config(name), asked)
        figures = [f"{found[phase]:.1f}" for phase in ("weights", "rollout", "score", "update")]
        print(f"| {' | '.join([name, kind, *figures, card_for(found['step'])])} |", flush=True)
        left = (time.perf_counter() - began) / done * (len(jobs) - done)
        print(f"{done} of {len(jobs)}, about {left:.0f} s left", file=sys.stderr)


if __name__ == "__main__":
    main()
