"""How much GPU memory a step takes, counted from shapes on any machine: no GPU, no weights.

    python tests/memory.py                                     # which model fits which card
    python tests/memory.py --shape 8B --completions 8 --prompt_tokens 512 \\
        --completion_tokens 1024 --micro_batch 8 -- --lora_r 64    # flags after `--`: the script's

The script's own functions run on fake tensors, which have shapes but no data, and the bytes of all
tensors alive are added up at every operation: NF4 base, adapter, AdamW, KV cache, activations,
gradients. The peak is what `torch.cuda.max_memory_allocated` would report; `test_memory.py` holds
it against one that was measured on an H200. A card needs more: what CUDA and its libraries take
(OVERHEAD) and what the allocator loses to fragmentation (SLACK) are assumed, not counted. Steps are
eager ones with gradient checkpointing; `--torch_compile` is not counted.
"""

import argparse
import contextlib
import math
import sys
import time
import warnings
import weakref
from types import SimpleNamespace
from unittest import mock

import bitsandbytes as bnb
import torch
import transformers
from accelerate.utils import convert_outputs_to_fp32
from bench import SHAPES, shape_config  # which finds the scripts
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM, PretrainedConfig

import grpo_arca as trainer

GIB, OVERHEAD, SLACK = 2**30, 0.6, 1.05
CARDS = {8: 7.6, 12: 11.6, 16: 15.6, 24: 23.5, 80: 79.1}  # GB sold: GiB that CUDA sees
GROUP = 8  # completions of a prompt


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of all tensors made inside it that are still alive, and their peak."""

    def __init__(self):
        super().__init__()
        self.live = self.peak = 0
        self.storages: dict[int, weakref.ref] = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                self.add(tensor.untyped_storage())
        # The 4-bit product dequantises its weight [N, K] inside one operation.
        product = function.name() == "bitsandbytes::gemm_4bit"
        inside = math.prod(args[2]) * args[0].element_size() if product else 0
        self.peak = max(self.peak, self.live + inside)
        return out

    def add(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self.storages:
            return

        def gone(_) -> None:
            self.live -= size
            del self.storages[key]

        self.live += size
        self.storages[key] = weakref.ref(storage, gone)

    def phase(self) -> float:
        """The peak since the last call, GiB."""
        peak, self.peak = self.peak, self.live
        return peak / GIB


def empty_pretrained(config: PretrainedConfig):
    """What stands for `from_pretrained`: the model without data, its layers NF4 where asked."""

    def load(name: str, dtype: str, quantization_config=None, **_):
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
            for path, layer in list(model.named_modules()) if quantization_config else ():
                head = layer is model.get_output_embeddings()
                if isinstance(layer, torch.nn.Linear) and not head:
                    sides = (layer.in_features, layer.out_features)
                    how = {"compute_dtype": getattr(torch, dtype), "quant_type": "nf4"}
                    model.set_submodule(path, bnb.nn.Linear4bit(*sides, bias=False, **how))
        model.is_loaded_in_4bit = bool(quantization_config)
        return model

    return load


def allocate(model: torch.nn.Module) -> None:
    """Replaces its tensors without data by new ones, quantised where the layer is 4-bit; what is
    shared stays shared."""
    made: dict[torch.Tensor, torch.Tensor] = {}
    for module in model.modules():
        for name, buffer in module._buffers.items():
            module._buffers[name] = None if buffer is None else torch.ones(buffer.shape)
        for name, old in module._parameters.items():
            if old is not None:
                if old not in made:
                    made[old] = filled(module, old)
                module._parameters[name] = made[old]


def filled(module: torch.nn.Module, old: torch.nn.Parameter) -> torch.nn.Parameter:
    if not isinstance(module, bnb.nn.Linear4bit):
        data = torch.ones(old.shape, dtype=old.dtype)
        return torch.nn.Parameter(data, requires_grad=old.requires_grad)
    dense = torch.ones(module.out_features, module.in_features, dtype=torch.bfloat16)
    how = {"blocksize": 64, "compress_statistics": True, "quant_type": "nf4"}
    data, state = bnb.functional.quantize_4bit(dense, **how)
    weight = torch.nn.Parameter(data, requires_grad=False)
    weight.quant_state = state
    return weight


def count(config: PretrainedConfig, options: argparse.Namespace, fake: bool = True) -> dict:
    """Peaks of a step's phases in GiB, as allocated; `step` is what must be there."""
    flags = ["--model_name_or_path", "none", "--gradient_checkpointing", "True"]
    flags += ["--dtype", "bfloat16", "--credit", "arca"]  # which computes its scores in fp32
    args = trainer.parse_args([*flags, *options.flags])
    bnb.functional.quantize_4bit(torch.ones(64, 64), compress_statistics=True)  # makes its tables
    stand_ins = {
        "credit_metrics": lambda *_: {},  # numbers, which fake tensors have not
        "dequantize_bnb_weight": lambda w: bnb.functional.dequantize_4bit(w.data, w.quant_state),
    }
    with (
        mock.patch.multiple(trainer, **stand_ins),
        mock.patch.object(AutoModelForCausalLM, "from_pretrained", empty_pretrained(config)),
        # How many prompts are different is not in their shapes.
        mock.patch.object(torch.Tensor, "unique", lambda ids, **_: (ids[::GROUP], groups(ids))),
    ):
        model = trainer.load_policy(args, torch.device("cpu"))
        if args.gradient_checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        mode = FakeTensorMode(allow_non_fake_inputs=True) if fake else contextlib.nullcontext()
        with mode, LiveBytes() as memory:
            return phases(args, model, memory, options)


def groups(rows: torch.Tensor) -> torch.Tensor:
    """Which prompt each row has."""
    return torch.arange(len(rows)) // GROUP


def phases(args, model, memory: LiveBytes, options: argparse.Namespace) -> dict:
    """One step's operations, in the script's order, on tensors of the right shapes."""
    allocate(model)
    count, prompt, length = options.completions, options.prompt_tokens, options.completion_tokens
    policy = trainer.Policy(model, args.temperature)
    autocast = torch.autocast("cpu", torch.bfloat16, args.dtype == "bfloat16", False)
    policy.forward = convert_outputs_to_fp32(autocast(policy.forward))  # as Accelerate does
    run = SimpleNamespace(args=args, policy=policy, model=model)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, foreach=True)  # as on a GPU
    ids = torch.ones(options.micro_batch, prompt + length, dtype=torch.long)
    nothing = torch.zeros(options.micro_batch, length)
    rows = torch.arange(options.micro_batch)
    for _ in range(2):  # in the first, AdamW has no state yet
        memory.phase()
        found = {"weights": memory.live / GIB}
        dense = trainer.dense(model) if options.rollout_weights == "dense" else None
        with torch.no_grad(), autocast, dense or contextlib.nullcontext():
            base, u = policy.eval().model.get_base_model(), torch.rand(count, length)
            decoder = trainer.Decoder(base, [[0] * prompt] * count, u, (1.0, 0, 1.0))
            started, before = memory.phase(), memory.live / GIB
            decoder.step()
            found["rollout"] = max(started, stepped := memory.phase())
            del decoder, u
        memory.phase()
        micro = trainer.Batch(rows, prompt, ids, ids.bool(), rows > 0, nothing, nothing)
        trainer.score(run, micro, [micro], {})
        found["score"] = memory.phase()
        logp = policy.train()(micro)[0]
        logp.sum().backward()
        del logp, micro
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        found["update"] = memory.phase()
    # What a captured step uses is reserved for it alone.
    captured = stepped + stepped - before
    return found | {"step": max(captured, found["rollout"], found["score"], found["update"])}


def card_for(gib: float) -> str:
    """The smallest card that has room for a peak."""
    fitting = [size for size, seen in CARDS.items() if gib * SLACK + OVERHEAD <= seen]
    return f"{fitting[0]} GB" if fitting else "none"


def parse_options(argv: list[str]) -> argparse.Namespace:
    cut = argv.index("--") if "--" in argv else len(argv)
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("--shape", nargs="+", choices=SHAPES, default=list(SHAPES))
    weights = ["quantized", "dense"]
    add("--rollout_weights", nargs="+", choices=weights, default=weights)
    add("--completions", type=int, default=64, help="of a rollout, all sampled at once")
    add("--micro_batch", type=int, default=16, help="completions of a micro-batch")
    add("--prompt_tokens", type=int, default=128)
    add("--completion_tokens", type=int, default=256)
    options = parser.parse_args(argv[:cut])
    options.flags = argv[cut + 1 :]
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
    jobs = [(name, weights) for name in options.shape for weights in options.rollout_weights]
    began = time.perf_counter()
    for done, (name, weights) in enumerate(jobs, start=1):
        asked = argparse.Namespace(**vars(options) | {"rollout_weights": weights})
        found = count(shape_config(name), asked)
        figures = [f"{found[phase]:.1f}" for phase in ("weights", "rollout", "score", "update")]
        print(f"| {' | '.join([name, weights, *figures, card_for(found['step'])])} |", flush=True)
        left = (time.perf_counter() - began) / done * (len(jobs) - done)
        print(f"{done} of {len(jobs)}, about {left:.0f} s left", file=sys.stderr)


if __name__ == "__main__":
    main()
