"""No operation mixes tensors of the host with those of the device, where a GPU would refuse it.

It takes no GPU: the device is `cpu:1`, which torch takes for the CPU, and a mode that sees every
call of torch notes what was put there. Backward runs inside torch, where the mode sees nothing.
"""

import importlib

import pytest
import torch
from accelerate import Accelerator
from support import refusal
from torch.overrides import TorchFunctionMode

import grpo_arca

DEVICE = torch.device("cpu:1")
MAY_MIX = {"__getitem__", "__setitem__", "index_put_", "copy_", "to", "__set__"}
TO_HOST = {"cpu", "tolist", "item", "numpy"}


def tensors_of(*values) -> list[torch.Tensor]:
    """Returns the tensors in values, lists, tuples and dicts.

    torch's own tree_leaves takes several times as long, and this is asked of every call.
    """
    found = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            found += tensors_of(*value)
        elif isinstance(value, dict):
            found += tensors_of(*value.values())
    return found


def is_there(x: torch.Tensor) -> bool:
    return getattr(x, "is_there", False)


class TwoDevices(TorchFunctionMode):
    """Marks what is made on DEVICE, put there or computed there; raises where both meet."""

    looks = True

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = getattr(func, "__name__", str(func))
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
    """Returns `load_policy`, with the tensors of the model marked."""

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


@pytest.fixture
def there(monkeypatch):
    """there(module) makes the runs of a script have DEVICE."""

    def same(self, model, **_):
        model.forward = self.autocast()(model.forward)
        return model

    def move(module):
        monkeypatch.setattr(Accelerator, "device", DEVICE)
        monkeypatch.setattr(Accelerator, "prepare_model", same)
        monkeypatch.setattr(module, "load_policy", loaded_there(module.load_policy))

    return move


CREDITS = {  # every other one with each of FLAGS; the first is the script's own
    "grpo_arca": "arca uniform surprisal probability entropy_reduction divergence random shuffled",
    "grpo_oar": "oar_g oar_g oar_p oar_p uniform random shuffled",
    "grpo_strace": "s_trace p_trace gspo grpo_lambda uniform",
}
FLAGS: list[dict] = [
    {"beta": 0.1, "lora_dropout": 0.1, "num_iterations": 2, "max_resample_times": 1},
    {"top_p": 0.9, "rollout_weights": "quantized", "dtype": "bfloat16"},
]


@pytest.mark.parametrize("number", [0, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "script", [pytest.param(x, marks=[pytest.mark.slow] * (x != "grpo_arca")) for x in CREDITS]
)
def test_a_rollout_and_an_update_with_every_credit(make_run, there, script, number):
    module = importlib.import_module(script)
    there(module)
    with TwoDevices():
        run = make_run(module, max_completion_length=60, **FLAGS[number])
        batch = module.collect(run, {})
        (micros,) = module.micro_batches(run, batch)
        for run.args.credit in CREDITS[script].split()[number::2]:
            metrics: dict[str, float] = {}
            module.score(run, batch, micros, metrics)
            module.update(run, micros)
            for micro in micros:
                assert all(map(is_there, tensors_of(list(vars(micro).values()))))
            assert metrics.get("no_answer_share", 0) < 1 or run.args.credit == "uniform"
    assert batch.rewards.std() > 0 and len(batch.advantages.unique()) > 1


@pytest.mark.slow
def test_a_run_that_is_resumed(run_main, rows_of, there, monkeypatch):
    """With evaluation, metrics, checkpoint and report."""
    there(grpo_arca)
    flags = {"save_steps": 1, "num_generations_eval": 2, "max_completion_length": 16}
    for steps in (1, 2):
        with TwoDevices():
            code, _, err = run_main(**flags, max_steps=steps, resume_from_checkpoint="latest")
        assert code == 0, err
        assert [row["step"] for row in rows_of()] == list(range(1, steps + 1))


def test_a_mixture_is_noticed():
    """A test of the test."""
    with TwoDevices():
        device = torch.ones(2, device=DEVICE)
        host = torch.ones(2)
        assert all(map(is_there, (device[:1], device * 2, device.new_zeros(3), host.to(DEVICE))))
        assert not any(map(is_there, (host + 1, device.cpu(), torch.zeros(2))))
        device[:2] = host  # copies
        for mix in (torch.add, torch.maximum, torch.Tensor.add_):
            assert "from the host" in refusal(mix, device, host, error=AssertionError)
        with pytest.raises(AssertionError, match="from the host"):
            device[torch.tensor([True, True])] = host
