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
from support import fixed_uniforms, prompts_of, sample
from test_models import EXPERTS, RIGHT, SMALL
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig, AutoModelForCausalLM

import grpo_arca

# One of each kind: rotary positions, sliding windows, learned positions.
QUICK_FAMILIES = ["qwen3", "gemma3_text", "gpt2"]
# Their code reads a value on the host, which no graph can record: they decode step by step.
NOT_CAPTURED = {
    "falcon": RIGHT["falcon"],
    "llama with dynamic NTK": {
        "max_position_embeddings": 16,
        "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0},
    },
}
SAMPLING = {  # temperature, top_k, top_p
    "greedy": (0.0, 0, 1.0),
    "sampled": (1.0, 0, 1.0),
    "top_k": (0.7, 9, 1.0),
    "top_p": (0.7, 0, 0.9),
}
PROMPTS = [[5, 6, 7, 8, 9], [5, 6, 3], [9] * 20] * 2  # the last one is longer than the windows
LENGTH = 24  # tokens of a completion
KEPT_ROWS = {9: [0, 1, 3, 5], 17: [1, 2]}  # column -> rows that `keep` goes on with


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
    """Whether an operation makes the host wait for a value, or copies one from the host."""
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
    """Makes decoders capture their steps as on a GPU. Returns a list of the graphs to come."""
    made: list[RecordedGraph] = []

    def new_graph() -> RecordedGraph:
        made.append(RecordedGraph())
        return made[-1]

    monkeypatch.setattr(grpo_arca, "CUDA", True)
    monkeypatch.setattr(grpo_arca.Decoder, "can_capture", True)  # and afterwards as before
    monkeypatch.setattr(torch.cuda, "CUDAGraph", new_graph)
    monkeypatch.setattr(torch.cuda, "graph", record)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: "the default stream")
    monkeypatch.setattr(torch.cuda, "set_stream", lambda _: None)
    return made


# ---- Decoding in both ways -----------------------------------------------------------------------
def random_model(family: str) -> transformers.PreTrainedModel:
    """Returns a small model of a family, with weights that are large enough for errors to show."""
    settings = (RIGHT | EXPERTS | NOT_CAPTURED)[family]
    config = AutoConfig.for_model(family.split()[0], **(SMALL | settings))
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    for name, parameter in model.named_parameters():
        if "norm" not in name and not name.endswith(("A_log", ".D", "dt_bias")):
            parameter.data *= 4
    return model


@torch.no_grad()
def decoded(model: Any, sampling: tuple, decoder_class: Any = None) -> grpo_arca.Decoder:
    """Returns a decoder after all columns; on the way it goes on with fewer rows, twice."""
    uniforms = torch.rand(len(PROMPTS), LENGTH, generator=torch.Generator().manual_seed(3))
    decoder_class = decoder_class or grpo_arca.Decoder
    decoder = decoder_class(model, PROMPTS, uniforms, sampling)
    for column in range(1, LENGTH):
        if column in KEPT_ROWS:
            decoder.keep(torch.tensor(KEPT_ROWS[column]))
        decoder.advance()
    return decoder


def is_same(one: grpo_arca.Decoder, other: grpo_arca.Decoder) -> bool:
    """Whether two decoders hold the same ids, log-probs and entropies, to the bit."""
    names = ("ids", "logp", "entropy")
    return all(torch.equal(getattr(one, name), getattr(other, name)) for name in names)


def replayed_and_eager(monkeypatch, family: str, sampling: tuple, decoder_class=None) -> tuple:
    """Returns two decoders that sample the same completions, the first one by replaying graphs.

    Each has a model of its own, because some keep what they have computed for longer texts.
    """
    replayed = decoded(random_model(family), sampling, decoder_class)
    with monkeypatch.context() as patch:
        patch.setattr(grpo_arca, "CUDA", False)
        eager = decoded(random_model(family), sampling, decoder_class)
    return replayed, eager


# ---- The tests -----------------------------------------------------------------------------------
def check_family(graphs, monkeypatch, family: str, sampling: str) -> None:
    replayed, eager = replayed_and_eager(monkeypatch, family, SAMPLING[sampling])
    # One graph for all rows and one after each `keep`, where the first step is not yet captured.
    assert [graph.replays for graph in graphs] == [7, 7, 6]
    assert is_same(replayed, eager)
    assert eager.logp.unique().numel() > LENGTH  # columns can be told apart


@pytest.mark.parametrize("sampling", ["greedy", "top_p"])
@pytest.mark.parametrize("family", QUICK_FAMILIES)
def test_replayed_steps_are_eager_ones(graphs, monkeypatch, family, sampling):
    check_family(graphs, monkeypatch, family, sampling)


@pytest.mark.slow
@pytest.mark.parametrize("sampling", SAMPLING)
@pytest.mark.parametrize("family", sorted((RIGHT | EXPERTS).keys() - NOT_CAPTURED.keys()))
def test_replayed_steps_are_eager_ones_in_every_family(graphs, monkeypatch, family, sampling):
    check_family(graphs, monkeypatch, family, sampling)


@pytest.mark.parametrize("family", NOT_CAPTURED)
def test_a_model_that_reads_values_decodes_step_by_step(graphs, monkeypatch, capsys, family):
    """The failed capture leaves no trace, is reported once, and is not tried again."""
    sampling = SAMPLING["sampled"]
    replayed, eager = replayed_and_eager(monkeypatch, family, sampling)
    assert is_same(replayed, eager)
    assert [graph.replays for graph in graphs] == [0]
    assert capsys.readouterr().err.count("without a CUDA graph") == 1


@pytest.mark.parametrize("weights", ["dense", "quantized"])
def test_rollouts_of_a_qlora_policy_replay(graphs, monkeypatch, make_run, weights):
    """NF4 layers and an adapter, and completions that end: `decode` chooses when to `keep`."""
    run = make_run(max_completion_length=80, rollout_weights=weights, top_k=20)
    prompts = prompts_of(run, 16)
    uniforms = fixed_uniforms(16, 80)
    kept_sizes = []
    keep_rows = grpo_arca.Decoder.keep

    def keep(decoder: grpo_arca.Decoder, rows: Tensor) -> None:
        kept_sizes.append(len(rows))
        keep_rows(decoder, rows)

    monkeypatch.setattr(grpo_arca.Decoder, "keep", keep)
    replayed = sample(run, prompts, uniforms)
    assert len(kept_sizes) >= 2 and len(graphs) == 1 + len(kept_sizes)
    for graph in graphs:
        assert graph.replays >= 6  # of the 8 steps until `keep` may come again
    monkeypatch.setattr(grpo_arca, "CUDA", False)
    eager = sample(run, prompts, uniforms)
    for name in ("ids", "attention", "sampled_logp", "entropy"):
        assert torch.equal(getattr(replayed, name), getattr(eager, name)), name


# ---- Tests of the test: what it must see ---------------------------------------------------------
class DecoderWithAnInt(grpo_arca.Decoder):
    """Counts its columns in Python. Eagerly it samples what `Decoder` samples."""

    steps_so_far = 0

    def step(self) -> None:
        self.column.fill_(self.prompt_width + self.steps_so_far)
        self.steps_so_far += 1
        super().step()


def test_a_position_in_python_is_noticed(graphs, monkeypatch):
    sampling = SAMPLING["sampled"]
    replayed, eager = replayed_and_eager(monkeypatch, "qwen3", sampling, DecoderWithAnInt)
    monkeypatch.setattr(grpo_arca, "CUDA", False)
    assert is_same(eager, decoded(random_model("qwen3"), sampling))
    assert not is_same(replayed, eager)
    assert [graph.replays for graph in graphs] == [7, 7, 6]  # it did not fail in another way


def test_recording_changes_nothing_and_replaying_repeats_it():
    graph = RecordedGraph()
    total = torch.zeros(2)
    with record(graph, "thread_local"):
        doubled = total.add_(1) * 2
    assert total.tolist() == [0, 0]
    graph.replay()
    graph.replay()
    assert total.tolist() == [2, 2] and doubled.tolist() == [4, 4]


def boolean_index(x: Tensor) -> Tensor:
    return x[x > 0]


def new_tensor(x: Tensor) -> Tensor:
    return torch.tensor([1.0], device=x.device)


@pytest.mark.parametrize(
    "operation",
    [bool, Tensor.item, Tensor.nonzero, Tensor.unique, boolean_index, new_tensor],
    ids=["bool", "item", "nonzero", "unique", "boolean index", "new tensor"],
)
def test_what_cannot_be_captured_is_noticed(operation):
    x = torch.ones(1)
    with (
        pytest.raises(RuntimeError, match="not permitted"),
        record(RecordedGraph(), "thread_local"),
    ):
        operation(x)
