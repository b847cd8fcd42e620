"""What only a GPU can show: captured and compiled steps compute what eager ones do, in bf16 too.

    pytest tests/trainer/test_gpu.py -s         # also prints the figures

Speed is what `tools/bench.py --shape` measures.
"""

import argparse
import contextlib
import gc
from types import SimpleNamespace

import bench
import memory
import pytest
import torch
from support import TINY, random_batch, randomize_adapter
from transformers import AutoModelForCausalLM

import grpo_arca as trainer

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TEXTS = ["Start with 5, add 7, double it, subtract 3.", "Start with 40, subtract 12.", "Hello"]
pytestmark = pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a GPU")


@pytest.fixture
def graphs(monkeypatch):
    """A list that grows by one at each capture."""
    captures, real = [], torch.cuda.CUDAGraph

    def counted(*how, **named):
        captures.append(len(captures))
        return real(*how, **named)

    monkeypatch.setattr(torch.cuda, "CUDAGraph", counted)
    return captures


def draw(run, count: int, rollout: int) -> trainer.Batch:
    """Completions of `count` prompts of different lengths."""
    prompts, rows = (
        [run.tokenizer(TEXTS[i % 3]).input_ids for i in range(count)],
        torch.arange(count),
    )
    u = trainer.row_uniforms(run.args, "rollout", rollout, rows, run.args.max_completion_length)
    return trainer.sample(run, rows, prompts, u)


def test_captured_steps_sample_what_eager_ones_do_in_fp32(make_run, graphs, monkeypatch):
    """Token for token, with the same uniforms, while rows end and the tensors become smaller."""
    run = make_run(max_completion_length=80, rollout_weights="quantized", dtype="float32")
    model = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32, device_map={"": DEVICE})
    plain = SimpleNamespace(autocast=contextlib.nullcontext)
    peft = SimpleNamespace(get_base_model=lambda: model)
    run = SimpleNamespace(**vars(run) | {"policy": model, "model": peft, "accelerator": plain})
    captured = [draw(run, 64, rollout) for rollout in range(3)]
    assert len(graphs) > 3  # more than one a rollout: it went on in smaller tensors
    monkeypatch.setattr(trainer, "CUDA", False)
    for rollout, ours in enumerate(captured):
        eager = draw(run, 64, rollout)
        assert torch.equal(ours.ids, eager.ids) and torch.equal(ours.attention, eager.attention)
        assert torch.equal(ours.sampled_logp, eager.sampled_logp)


@pytest.mark.parametrize("weights", ["dense", "quantized"])
@pytest.mark.parametrize("compiled", [False, True])
def test_graphs_follow_the_adapter(make_run, graphs, monkeypatch, weights, compiled):
    """Captured steps sample what eager ones do in bf16, before and after the adapter changes."""
    run, samples = make_run(rollout_weights=weights, torch_compile=compiled), []
    for scale in (0.05, 0.5):
        randomize_adapter(run.model, scale)
        for captures in (True, False):
            monkeypatch.setattr(trainer, "CUDA", captures)
            before, batch = len(graphs), draw(run, 8, rollout=0)
            assert (len(graphs) > before) == captures
            ids = zip(batch.ids[:, batch.prompt_width :], batch.mask, strict=True)
            samples.append([tokens[real].tolist() for tokens, real in ids])
    assert samples[0] == samples[1] and samples[2] == samples[3] and samples[0] != samples[2]


@pytest.mark.parametrize(("weights", "most"), [("dense", 0.01), ("quantized", 0.01)])
@pytest.mark.parametrize("compiled", [False, True])
def test_recomputed_log_probs_are_near_the_sampled_ones(make_run, weights, most, compiled):
    """The mean gap in bf16, on the tiny policy, whose distributions are sharp."""
    run = make_run(
        rollout_weights=weights, torch_compile=compiled, max_completion_length=80,
        per_device_train_batch_size=64,
    )  # fmt: skip
    batch = trainer.collect(run, trainer.load_data(run.args)[1], {})
    batch.advantages = torch.ones_like(batch.rewards)  # else a row may be left out
    (micros,) = trainer.micro_batches(run.args, batch)
    trainer.score(run, batch, micros, {})
    gap = trainer.update(run, micros)["sampling_gap"]
    print(f"{weights}, compiled {compiled}: mean |sampled - recomputed| {gap:.4f}")
    assert gap <= most and not torch.backends.cuda.cudnn_sdp_enabled()


def test_compiled_gradients_are_as_near_the_exact_ones_as_eager_ones(make_run):
    """In bf16 both are off; compiled at most twice as far as eager from those in fp32."""
    batch, gradients = random_batch(), []
    for name, value in vars(batch).items():
        setattr(batch, name, value.to(DEVICE) if isinstance(value, torch.Tensor) else value)
    for compiled, exact in ((False, True), (False, False), (True, False)):
        run = make_run(torch_compile=compiled, dtype="bfloat16")
        policy = trainer.Policy(run.model, 1.0)  # not wrapped in an autocast of its own
        for module in policy.float().modules() if exact else ():
            if hasattr(module, "compute_dtype"):
                module.compute_dtype = torch.float32
        with torch.autocast(DEVICE.type, torch.bfloat16, enabled=not exact):
            logp, _ = policy(batch)
        logp[batch.mask].sum().backward()
        trained = [p for p in run.model.parameters() if p.requires_grad]
        gradients.append(torch.cat([p.grad.float().flatten() for p in trained]))
    exact, eager, compiled = gradients
    errors = [float((g - exact).norm() / exact.norm()) for g in (eager, compiled)]
    print(f"gradients off by {errors[0]:.4f} of their norm eager, {errors[1]:.4f} compiled")
    assert errors[1] <= 2 * errors[0] < 0.2


@pytest.mark.parametrize("weights", ["quantized", "dense"])
def test_memory_is_as_counted(weights, tmp_path, monkeypatch):
    """The peaks of `memory.py`, which needs no GPU, against those here, where there is no more
    memory than a card needs by its count."""
    flags = ["--rollout_weights", weights, "--gradient_checkpointing", "True", "--lora_r", "16"]
    step = {"completions": 32, "micro_batch": 4, "prompt_tokens": 256, "completion_tokens": 256}
    asked = argparse.Namespace(**step, rollout_weights=weights, flags=["--lora_r", "16"])
    counted = memory.count(bench.shape_config("0.6B"), asked)
    shape = [f"--{name}={value}" for name, value in step.items()]
    shape += ["grpo_arca", "--shape", "0.6B", "--cache", str(tmp_path)]
    options = bench.parse_options([*shape, "--", *flags, "--output_dir", str(tmp_path)])
    monkeypatch.setattr(trainer, "row_uniforms", trainer.row_uniforms)  # restored afterwards
    prepared = bench.prepare(trainer, ["arca"], options)
    gc.collect()  # what other tests left
    torch.cuda.empty_cache()
    room = (memory.SLACK * counted["step"] + 0.3) * memory.GIB
    torch.cuda.set_per_process_memory_fraction(
        room / torch.cuda.get_device_properties(0).total_memory
    )
    try:
        for repeat in range(2):
            peaks = bench.step(prepared, "arca", repeat, 0.0)["peaks"]
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    print(f"{weights}: counted {counted}, allocated {peaks}, in {room / memory.GIB:.2f}")
    for phase, peak in zip(("rollout", "score", "update"), peaks, strict=True):
        assert counted[phase] == pytest.approx(peak, rel=0.1)
