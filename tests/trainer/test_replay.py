"""A decode step that is replayed as a CUDA graph samples the same tokens as one computed anew.

This takes no GPU. A stand-in for CUDA graphs records each operation of the captured step with its
tensors and its Python numbers. A replay runs the same operations on the same tensors, and the
numbers are still those of the recording, as on a GPU. So if a step used a Python number that
changes from column to column, such as a position, its replay would sample other tokens.
"""

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import transformers
from support import fixed_draws, problems_of, refusal, sample
from test_models import FAMILIES, save_family
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import grpo_arca

QUICK = ("gemma2", "gpt2")  # windows; learned positions


# ---- The stand-in for a CUDA graph ---------------------------------------------------------------
ALLOCATIONS = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
HOST_READS = {"_local_scalar_dense", "masked_select", "nonzero", "_unique2", "unique_dim"}


def tensors_in(values: object) -> list[Tensor]:
    """Returns the tensors in nested lists, tuples and dicts."""
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


def written_tensors(function: Any, args: tuple, kwargs: dict) -> list[Tensor]:
    """Returns the arguments that an operation writes to, as its schema says."""
    found = []
    for position, argument in enumerate(function._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = args[position] if position < len(args) else kwargs.get(argument.name)
            found += tensors_in(given)
    return found


def waits_for_the_gpu(name: str, args: tuple) -> bool:
    """Returns whether an operation makes the host wait for a value, or copies one from it."""
    if name.startswith("index") and len(args) > 1:  # a boolean index is counted first
        return any(tensor.dtype == torch.bool for tensor in tensors_in(args[1]))
    if name == "lift_fresh":  # torch.tensor([1.0]); but x[...] = False lifts a bool, and is a fill
        return args[0].dtype != torch.bool or args[0].dim() > 0
    return name in HOST_READS


class RecordedGraph(TorchDispatchMode):
    """Records operations like a torch.cuda.CUDAGraph, and replays them on the same tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple] = []  # function, args, kwargs, result
        self.values_before: list[tuple[Tensor, Tensor]] = []  # a written tensor, and its copy
        self.replays = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = function._schema.name.split("::")[1]
        if waits_for_the_gpu(name, args):
            raise RuntimeError(f"{name}: operation not permitted when stream is capturing")
        for tensor in written_tensors(function, args, kwargs):
            self.values_before.append((tensor, tensor.clone()))
        result = function(*args, **kwargs)
        if name not in ALLOCATIONS:  # memory is allocated once
            self.calls.append((function, args, kwargs, result))
        return result

    def undo(self) -> None:
        """Puts back what the recording has written: a GPU does not run what it captures."""
        for tensor, value in reversed(self.values_before):
            tensor.copy_(value)
        self.values_before.clear()

    def replay(self) -> None:
        """Runs the recorded operations again, and writes their results where they were."""
        self.replays += 1
        for function, args, kwargs, result in self.calls:
            new_tensors = tensors_in(function(*args, **kwargs))
            for recorded, new in zip(tensors_in(result), new_tensors, strict=True):
                is_view = recorded.untyped_storage().data_ptr() == new.untyped_storage().data_ptr()
                if not is_view:
                    recorded.copy_(new)


@contextlib.contextmanager
def record(graph: RecordedGraph, capture_error_mode: str) -> Iterator[None]:
    """Stands for torch.cuda.graph. Model code that asks is told that a capture is under way."""
    assert capture_error_mode == "thread_local"  # else NCCL's own thread could end the capture
    asked = mock.patch.object(
        transformers.utils.import_utils, "is_cuda_stream_capturing", return_value=True
    )
    try:
        with asked, graph:
            yield
    finally:
        graph.undo()


@pytest.fixture
def graphs(monkeypatch) -> list[RecordedGraph]:
    """Makes rollouts capture their steps as on a GPU. Returns a list of the graphs to come."""
    made: list[RecordedGraph] = []

    def new_graph() -> RecordedGraph:
        made.append(RecordedGraph())
        return made[-1]

    monkeypatch.setattr(grpo_arca, "CUDA", True)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", new_graph)
    monkeypatch.setattr(torch.cuda, "graph", record)
    return made


# ---- The tests -----------------------------------------------------------------------------------
def check_replay(graphs, run) -> list[int]:
    """Samples with graphs and without. Returns how often each graph was replayed."""
    problems = problems_of(run, 12)
    draws = fixed_draws(12, 64)
    replayed = sample(run, problems, draws)
    replays = [graph.replays for graph in graphs]
    run.args.cuda_graphs = False
    eager = sample(run, problems, draws)
    assert len(graphs) == len(replays)
    for name in ("ids", "attention", "sampled_logp", "entropy"):
        assert torch.equal(getattr(replayed, name), getattr(eager, name)), name
    return replays


@pytest.mark.parametrize("weights", ["dense", pytest.param("quantized", marks=pytest.mark.slow)])
def test_rollouts_of_a_qlora_policy_replay(graphs, make_run, weights):
    """Where completions end, a graph of smaller tensors takes over."""
    run = make_run(rollout_weights=weights, adapter=0.0)
    replays = check_replay(graphs, run)
    assert len(replays) >= 2 and min(replays) >= 6  # of 8 steps at least, the first is not one


@pytest.mark.parametrize(
    "family", [pytest.param(x, marks=[pytest.mark.slow] * (x not in QUICK)) for x in FAMILIES]
)
def test_every_family_replays(graphs, make_run, tmp_path, family):
    """Sampling by top_p; half of the vocabulary ends a completion, from the 20th column on."""
    folder = save_family(tmp_path, family)
    run = make_run(model=folder, dtype="float32", load_in_4bit=False, top_p=0.9, temperature=0.7)
    run.eos_ids = torch.arange(3, 20)
    assert len(check_replay(graphs, run)) >= 2


def test_a_position_in_python_is_noticed(graphs, make_run, monkeypatch):
    """A test of the test: columns that no token sees, which the host counts."""
    run = make_run()
    inner = grpo_arca.hidden_states
    steps = []

    def hidden_states(base, inputs, attention, cache=None):
        steps.append(1)
        seen = attention.clone()
        seen[:, : len(steps)].zero_()
        return inner(base, inputs, seen, cache)

    monkeypatch.setattr(grpo_arca, "hidden_states", hidden_states)
    assert "ids" in refusal(check_replay, graphs, run, error=AssertionError)


@pytest.mark.parametrize("operation", [bool, Tensor.nonzero, Tensor.unique])
def test_what_cannot_be_captured_is_noticed(operation):
    """A test of the test: also, recording changes nothing and replaying repeats it."""
    total = torch.zeros(2)
    graph = RecordedGraph()
    with record(graph, "thread_local"):
        doubled = total.add_(1) * 2
    assert total.tolist() == [0, 0]
    graph.replay()
    graph.replay()
    assert total.tolist() == [2, 2] and doubled.tolist() == [4, 4]
    with pytest.raises(RuntimeError, match="not permitted"), record(graph, "thread_local"):
        operation(torch.ones(1))
