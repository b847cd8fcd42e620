"""What only a GPU can show: captured and compiled steps compute what eager ones do, in bf16 too.

pytest tests/test_gpu.py -s     # prints the figures; `tests/bench.py --shape` measures speed
"""

import argparse

import bench
import memory
import pytest
import torch
from conftest import TINY, random_batch, randomise_adapter
from test_trainer import FULL, prompts_of
from transformers import AutoModelForCausalLM

import grpo_arca as trainer
from common.metrics import rollout_metrics

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
pytestmark = pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a GPU")


def on_device(batch: trainer.Batch) -> trainer.Batch:
    moved = {k: v.to(DEVICE) if isinstance(v, torch.Tensor) else v for k, v in vars(batch).items()}
    return trainer.Batch(**moved)


def test_captured_steps_sample_what_eager_ones_do_in_fp32(make_run):
    """Token for token, with the same uniforms, while the number of lines falls."""
    run = make_run(max_completion_length=80)
    how = {"dtype": torch.float32, "attn_implementation": "grouped", "device_map": {"": DEVICE}}
    model = AutoModelForCausalLM.from_pretrained(TINY, **how).eval()
    prompts = prompts_of(run, 64)
    shape = (64, max(map(len, prompts)), 80)
    captured, eager = (trainer.Decoder(model, run.eos_ids, 0, shape, FULL) for _ in range(2))
    eager.capture = False
    for rollout in range(3):
        u = trainer.row_uniforms(run.args, "rollout", rollout, torch.arange(64), 80).to(DEVICE)
        ours, plain = captured.run(prompts, u), eager.run(prompts, u)
        assert torch.equal(ours.ids, plain.ids) and torch.equal(ours.logp, plain.logp)
    assert len(captured.graphs) > 1 and not eager.graphs


@pytest.mark.parametrize("weights", ["merged", "adapter"])
@pytest.mark.parametrize("compiled", [False, True])
def test_graphs_follow_the_adapter(make_run, weights, compiled):
    """Those kept from earlier rollouts sample what new ones do, after the adapter has changed."""
    run = make_run(rollout_weights=weights, torch_compile=compiled)
    prompts, samples = prompts_of(run, 8), []
    for scale in (0.05, 0.5):
        randomise_adapter(run.model, scale)
        u = torch.rand(8, 24, generator=torch.Generator().manual_seed(0))
        kept, new = (r.sample(prompts, u, **FULL) for r in (run, run._replace(decoders={})))
        assert torch.equal(kept.ids, new.ids)
        samples.append(kept.texts(run.tokenizer))
    assert samples[0] != samples[1]


@pytest.mark.parametrize(("weights", "most"), [("merged", 0.02), ("adapter", 0.01)])
@pytest.mark.parametrize("compiled", [False, True])
def test_recomputed_log_probs_are_near_the_sampled_ones(make_run, weights, most, compiled):
    """PITFALLS 12, on the tiny policy, whose distributions are sharp; the mean gap in bf16."""
    run = make_run(
        rollout_weights=weights, torch_compile=compiled, max_completion_length=80,
        per_device_train_batch_size=64,
    )  # fmt: skip
    _, train_set, held_out = trainer.load_data(run.args)
    batch, _, _ = trainer.collect(run, 0, *train_set)
    trainer.score(run, batch, one_update=False)  # the log-probs of the importance ratio
    kept = list(run.decoders)
    trainer.evaluate(run, *held_out)
    assert list(run.decoders) == kept  # an evaluation's caches do not stay
    gap = rollout_metrics(run.accelerator, batch, run.args.num_generations)["sampling_gap_mean"]
    print(f"{weights}, compiled {compiled}: mean |sampled - recomputed| {gap:.4f}")
    assert gap <= most


def test_compiled_gradients_are_as_near_the_exact_ones_as_eager_ones(make_run):
    """In bf16 both are off; compiled at most twice as far as eager from those in fp32."""
    gradients = []
    for compiled, exact in ((False, True), (False, False), (True, False)):
        run, batch = make_run(torch_compile=compiled), on_device(random_batch())
        with torch.autocast(DEVICE.type, torch.bfloat16, enabled=not exact):
            policy = run.accelerator.unwrap_model(run.policy)
            for module in policy.float().modules() if exact else ():
                if hasattr(module, "compute_dtype"):
                    module.compute_dtype = torch.float32
            logp = policy(batch.ids, batch.attention, batch.prompt_width).logp
        logp[batch.mask].sum().backward()
        trained = [p for p in run.model.parameters() if p.requires_grad]
        gradients.append(torch.cat([p.grad.float().flatten() for p in trained]))
    exact, eager, compiled = gradients
    errors = [float((g - exact).norm() / exact.norm()) for g in (eager, compiled)]
    print(f"gradients off by {errors[0]:.4f} of their norm eager, {errors[1]:.4f} compiled")
    assert errors[1] <= 2 * errors[0] < 0.2


@pytest.mark.parametrize("weights", ["adapter", "merged"])
def test_memory_is_as_counted_and_found_again(weights, tmp_path, monkeypatch):
    """The peaks of `memory.py`, which needs no GPU, against those here; and the cache, given back
    after each rollout, is where it was, so that graphs stay and nothing is reserved twice."""
    flags = ["--rollout_weights", weights, "--gradient_checkpointing", "True", "--lora_r", "16"]
    step = {"completions": 32, "micro_batch": 4, "prompt_tokens": 256, "completion_tokens": 1024}
    shape = [f"--{name}={value}" for name, value in step.items()]
    shape += ["grpo_arca", "--shape", "0.6B", "--cache", str(tmp_path)]
    options = bench.parse_options([*shape, "--", *flags, "--output_dir", str(tmp_path)])
    monkeypatch.setattr(trainer, "row_uniforms", trainer.row_uniforms)  # restored afterwards
    prepared = bench.prepare(trainer, ["arca"], options)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: (0, 0))  # as if there were no plenty
    found = []
    for repeat in range(4):
        peaks = bench.step(prepared, "arca", repeat, 0.0)["peaks"]
        (decoder,) = prepared.run.decoders.values()
        found.append((decoder.address, {key: id(graph) for key, graph in decoder.graphs.items()}))
    assert found[1] == found[2] == found[3]
    asked = argparse.Namespace(**step, rollout_weights=weights, flags=["--lora_r", "16"])
    counted, reserved = (
        memory.count(bench.shape_config("0.6B"), asked),
        torch.cuda.max_memory_reserved(),
    )
    print(f"{weights}: counted {counted}, allocated {peaks}, reserved {reserved / memory.GIB:.2f}")
    for phase, peak in zip(("rollout", "score", "update"), peaks, strict=True):
        assert counted[phase] == pytest.approx(peak, rel=0.1)
    assert reserved / memory.GIB < memory.SLACK * counted["step"] + 0.3
