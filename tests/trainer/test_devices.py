"""No operation mixes tensors of the host with those of the device, where a GPU would refuse it.

It takes no GPU: the device is `cpu:1`, which torch takes for the CPU, and a mode that sees every
call of torch notes what was put there. Backward runs inside torch, where the mode sees nothing.
"""

import json

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from support import load_data_once
from torch.overrides import TorchFunctionMode

import common.report
import grpo_arca
import grpo_oar
import grpo_strace

DEVICE = torch.device("cpu:1")
MAY_MIX = {"__getitem__", "__setitem__", "index_put_", "copy_", "to", "__set__"}
TO_HOST = {"cpu", "tolist", "item", "numpy"}


def tensors_of(*values) -> list[torch.Tensor]:
    """In lists, tuples and dicts too. (torch's own tree_leaves takes several times as long, and
    this is asked of every call.)"""
    found = []
    for x in values:
        if isinstance(x, torch.Tensor):
            found.append(x)
        elif isinstance(x, list | tuple):
            found += tensors_of(*x)
        elif isinstance(x, dict):
            found += tensors_of(*x.values())
    return found


def is_there(x: torch.Tensor) -> bool:
    return getattr(x, "is_there", False)


class TwoDevices(TorchFunctionMode):
    """Marks what is made on DEVICE, put there or computed there; raises where both meet."""

    looks = True

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs, name = kwargs or {}, getattr(func, "__name__", str(func))
        if not self.looks:
            return func(*args, **kwargs)
        inputs = tensors_of(args, kwargs)
        there = any(map(is_there, inputs))
        if name == "__get__" and func.__self__.__name__ == "device":
            return DEVICE if there else func(*args)
        mixed = [] if name in MAY_MIX else inputs
        if name in ("__setitem__", "index_put_") and tensors_of(args[1]):
            mixed = tensors_of(args[0], args[2])  # where indices are tensors, values must be there
        here = [tuple(x.shape) for x in mixed if x.dim() > 0 and not is_there(x)]
        assert not (there and here), f"{name} takes {here} from the host"
        wanted = [kwargs.get("device"), *(args[1:] if name == "to" else ())]
        wanted = [x for x in wanted if isinstance(x, str | torch.device)]
        out = func(*args, **kwargs)
        if wanted:
            there = torch.device(wanted[0]) == DEVICE
        elif inputs and (name == "__getitem__" or name.endswith("_")):  # or in place
            there = is_there(inputs[0])
        elif name == "to":
            there = is_there(inputs[-1])
        elif name == "tensor":
            there = False  # torch.tensor copies numbers, also those of a list of tensors
        there = there and name not in TO_HOST
        if name in ("to", "cpu") and out is inputs[0] and is_there(out) != there:
            out = out.clone()  # torch saw no reason to copy
        for x in tensors_of(out):
            x.is_there = there
        return out


def loaded_there(load):
    """`load_policy`, with the tensors of the model marked."""

    def marked(args, _):
        TwoDevices.looks = False
        model = load(args, torch.device("cpu"))
        TwoDevices.looks = True
        for x in (*model.parameters(), *model.buffers()):
            x.is_there = True
            state = getattr(x, "quant_state", None)  # of a 4-bit weight, and of its own scales
            for part in (state, state.state2) if state else ():
                for value in tensors_of(list(vars(part).values())):
                    value.is_there = True
        return model

    return marked


CREDITS = {  # every other one with each of FLAGS; the first is the script's own
    grpo_arca: "arca uniform surprisal probability entropy_reduction divergence random shuffled",
    grpo_oar: "oar_g oar_g oar_p oar_p uniform random shuffled",
    grpo_strace: "s_trace p_trace gspo grpo_lambda uniform",
}
SIZE = "--per_device_train_batch_size 8 --gradient_accumulation_steps 2 --num_generations 4 "
SIZE += "--max_completion_length 60"
FLAGS = (
    "--beta 0.1 --top_k 5 --lora_dropout 0.1 --num_iterations 2",
    "--top_p 0.9 --rollout_weights quantized --dtype bfloat16",
)


def prepare(monkeypatch, module, flags: str):
    """The flags of a run on DEVICE."""
    AcceleratorState._reset_state()  # it would refuse another --dtype than the one before
    monkeypatch.setattr(Accelerator, "device", property(lambda self: DEVICE))
    monkeypatch.setattr(Accelerator, "prepare_model", lambda self, model, **_: model)
    monkeypatch.setattr(module, "load_policy", loaded_there(module.load_policy))
    monkeypatch.setattr(module, "load_data", load_data_once)  # it makes no tensors
    return module.parse_args(f"{SIZE} {flags}".split())


@pytest.mark.parametrize("flags", [FLAGS[0], pytest.param(FLAGS[1], marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "module",
    [pytest.param(x, marks=[pytest.mark.slow] * (x is not grpo_arca)) for x in CREDITS],
    ids=lambda module: module.__name__,
)
def test_a_step(monkeypatch, module, flags):
    """One rollout, and on it a score and an update with each of its credits."""
    tokenizer, train_set, _ = module.load_data(args := prepare(monkeypatch, module, flags))
    with TwoDevices():
        run = module.build_run(args, tokenizer)
        batch = module.collect(run, train_set, {})
        (micros,) = module.micro_batches(args, batch)
        for credit in CREDITS[module].split()[FLAGS.index(flags) :: 2]:
            metrics = {}
            run.args = module.parse_args(f"{SIZE} --credit {credit} {flags}".split())
            module.score(run, batch, micros, metrics)
            module.update(run, micros)
            for micro in micros:
                known = [x for x in vars(micro).values() if x is not module.NOT_SET]
                assert all(map(is_there, tensors_of(known)))
            assert metrics.get("credit_forward_tokens", 1) > 0 or credit == "uniform"
    assert batch.rewards.std() > 0 and len(batch.advantages.unique()) > 1


@pytest.mark.slow
def test_a_run(monkeypatch, tmp_path):
    """With evaluation, metrics, checkpoint, report, and a second run that resumes."""
    flags = f"--output_dir {tmp_path} --save_steps 1 --max_eval_samples 2 --num_generations_eval 2"
    flags += " --max_completion_length 16 --resume_from_checkpoint latest --max_steps"
    for steps in (1, 2):
        args = prepare(monkeypatch, grpo_arca, f"{flags} {steps}")
        monkeypatch.setattr(grpo_arca.signal, "signal", lambda *_: None)  # pytest has its own
        monkeypatch.setattr(common.report, "write_curves", lambda *_: None)
        with TwoDevices():
            grpo_arca.run_to_the_end(args)
        monkeypatch.undo()
        rows = [json.loads(row) for row in (tmp_path / "metrics.jsonl").read_text().splitlines()]
        assert [row["step"] for row in rows if "loss" in row] == list(range(1, steps + 1))


def test_a_mixture_is_noticed():
    with TwoDevices():
        there, here = torch.ones(2, device=DEVICE), torch.ones(2)
        made = (there[:1], there * 2, there.new_zeros(3), here.to(DEVICE), torch.zeros_like(there))
        assert all(map(is_there, made)) and made[0].device == DEVICE
        assert not any(map(is_there, (here, here + 1, there.cpu(), torch.zeros(2))))
        here.add_(1), there.add_(torch.tensor(1.0)), there[torch.tensor([0])]
        there[:2] = here  # copies
        for mixed in (
            lambda: there + here,
            lambda: torch.cat([there, here]),
            lambda: there.add_(here),
            lambda: there.__setitem__(torch.tensor([True, True]), here),
        ):
            with pytest.raises(AssertionError, match="from the host"):
                mixed()
