"""What a GPU computes in, here on a CPU: `--dtype bfloat16`. What is sampled is what is trained."""

import contextlib
import json
from dataclasses import replace

import pytest
import torch
from support import fixed_uniforms, load_data_once, prompts_of, random_batch, randomize_adapter

import grpo_arca
import grpo_oar
import grpo_strace

trainer = grpo_arca
SIZES = (1, 0.1, 0.01, 0.003)


@pytest.mark.parametrize("weights", ["dense", "quantized"])
def test_the_policy_that_samples_is_the_one_that_is_trained(make_run, weights):
    """An adapter that is merged into bf16 weights is rounded away while it is small, as it is in
    the first updates. So it is not merged. The change of log-probs that it makes in a rollout has
    slope and correlation 1 with the change in the training forward, and the decode loop rounds no
    more than that."""
    run = make_run(dtype="bfloat16", rollout_weights=weights)
    blocks = {"dense": trainer.dense, "quantized": lambda _: contextlib.nullcontext()}
    for size in SIZES:
        randomize_adapter(run.model, 0.01 * size)
        batch = trainer.sample(run, torch.arange(16), prompts_of(run, 16), fixed_uniforms(16, 24))
        with torch.no_grad():
            trained = run.policy(batch)[0]
            with blocks[weights](run.model):
                sampled = run.policy(batch)[0]
            with run.model.disable_adapter():
                base = run.policy(batch)[0]
            with trainer.in_fp32(run) as policy:
                truth = policy(batch)[0]
        exact, change = ((x - base)[batch.mask].double() for x in (trained, sampled))
        assert (exact * change).sum() / exact.square().sum() == pytest.approx(1, abs=0.01)
        assert torch.corrcoef(torch.stack([exact, change]))[0, 1] > 0.99
        rounding = ((x - truth)[batch.mask].abs().mean() for x in (trained, batch.sampled_logp))
        assert next(rounding) * 1.2 > next(rounding) and exact.abs().max() > 1e-3


@pytest.mark.parametrize("module", [grpo_arca, grpo_oar])
def test_scores_in_fp32_see_the_weights_that_are_trained(make_run, module):
    """A forward pass on the unit vectors gives the weights themselves, exactly. Gradients see the
    same ones, and the layers are as before afterwards."""
    run = make_run(module, dtype="bfloat16")
    layers = [x for x in run.model.modules() if hasattr(x, "compute_dtype")]
    for layer in layers:
        layer.weight.quant_state.dtype = torch.float32  # as a folder that holds NF4 may have it

    def weights(dtype):
        found = []
        for layer in layers:
            units = torch.eye(layer.in_features, dtype=dtype, requires_grad=True)
            output = layer(units)
            (gradient,) = torch.autograd.grad(output.diagonal().sum(), units)
            found += [output.detach().float(), gradient.float()]
        return found

    trained = weights(torch.bfloat16)
    with module.in_fp32(run):
        scored = weights(torch.float32)
    assert len(trained) == 56 and all(map(torch.equal, trained, scored))
    assert not any("forward" in vars(layer) for layer in layers)


@pytest.mark.slow
@pytest.mark.parametrize("module", [grpo_arca, grpo_oar])
def test_compiled_layers_are_scored_in_fp32_too(make_run, monkeypatch, module):
    """A compiled layer reads an NF4 weight through functions that would be compiled in turn."""
    compile_layer = torch.nn.Module.compile
    monkeypatch.setattr(
        torch.nn.Module,
        "compile",
        lambda self, **options: compile_layer(self, backend="aot_eager", **options),
    )
    scores = []
    for torch_compile in (False, True):
        run = make_run(module, dtype="bfloat16", torch_compile=torch_compile)
        batch = random_batch(module=module)
        with torch.no_grad():
            run.policy(batch)  # compiles, where that is asked for
            with module.in_fp32(run) as policy:
                scores.append(policy(batch)[0][batch.mask])
    torch.testing.assert_close(*scores, rtol=0, atol=1e-5)


def test_a_rollouts_log_probs_are_near_the_recomputed_ones(make_run):
    """Rounding in bf16 depends on the shape of the batch, so the two differ. `sampling_gap` says by
    how much (in fp32 it is 1e-7)."""
    run = make_run(dtype="bfloat16", max_completion_length=80, per_device_train_batch_size=40)
    batch = trainer.collect(run, load_data_once(run.args)[1], {})
    ((micro,),) = trainer.micro_batches(run.args, batch)
    trainer.score(run, micro, [micro], {})
    gap = trainer.update(run, [micro])["sampling_gap"]
    assert 1e-6 < gap < 5e-3


def test_the_first_ratio_is_one_and_gradients_are_those_of_fp32(make_run):
    """With several updates the old log-probs are the training forward's own, to the bit; a rollout
    changes no gradient; and rounding turns the gradient by less than 5 degrees."""
    gradients, batch = [], random_batch()
    for dtype in ("float32", "bfloat16"):
        run = make_run(dtype=dtype, num_iterations=2)
        scored = replace(batch, old_logp=trainer.NOT_SET)
        trainer.score(run, scored, [scored], {})
        for _ in range(2):
            run.optimizer.zero_grad()
            logp = trainer.training_forward(run, scored)
            assert torch.equal(logp.detach(), scored.old_logp)
            scale = trainer.token_scale(run.args, scored.loss_mask, 8, scored.update_tokens)
            trainer.policy_loss(run.args, scored, logp, scored.old_logp, scale)[0].backward()
            trained = [p.grad.flatten() for p in run.model.parameters() if p.requires_grad]
            gradients.append(torch.cat(trained).clone())
            trainer.sample(run, torch.arange(4), prompts_of(run), fixed_uniforms(4, 24))
    assert torch.equal(gradients[0], gradients[1]) and torch.equal(gradients[2], gradients[3])
    assert torch.cosine_similarity(gradients[0], gradients[2], dim=0) > 0.996


@pytest.mark.slow
@pytest.mark.parametrize("loss_type", ["grpo", "dapo", "dr_grpo"])
def test_no_split_and_no_dropped_row_turns_the_gradient(make_run, loss_type):
    gradients, batch = [], random_batch()
    batch.advantages[2:4], batch.old_logp = 0.0, trainer.NOT_SET
    run = make_run(dtype="bfloat16", loss_type=loss_type, max_grad_norm=0)
    trained = [p for p in run.model.parameters() if p.requires_grad]

    def keep_gradient():
        gradients.append(torch.cat([p.grad.flatten() for p in trained]).clone())

    run.optimizer.step = keep_gradient
    ((kept,),) = trainer.micro_batches(run.args, batch)
    for micros in ([batch], [kept], [kept.select(x) for x in torch.arange(6).split(2)]):
        trainer.score(run, batch, micros, {})
        trainer.update(run, micros)
    assert len(kept.rows) == 6
    for other in gradients[1:]:
        assert torch.cosine_similarity(gradients[0], other, dim=0) > 0.999
        assert other.norm() == pytest.approx(gradients[0].norm().item(), rel=0.02)


CREDITS = [(grpo_arca, x) for x in ("arca", "divergence", "surprisal", "shuffled")]
CREDITS += [(grpo_oar, x) for x in ("oar_g", "oar_p")] + [(grpo_strace, "s_trace")]


@pytest.mark.slow
@pytest.mark.parametrize(("module", "credit"), CREDITS)
def test_weights_are_those_of_fp32(make_run, module, credit):
    """On the same completions, of an adapter as after a few updates. OAR-P's are nearly: its scores
    alone are computed in bf16."""
    weights, batch = [], None
    for dtype in ("float32", "bfloat16"):
        run = make_run(module, dtype=dtype, credit=credit, adapter=1e-3, max_completion_length=80)
        if batch is None:
            batch = module.collect(run, load_data_once(run.args)[1], {})
            batch.advantages = torch.ones(8)
        micro = replace(batch)
        module.score(run, micro, [micro], {})
        weights.append(micro.weights[micro.mask])
        assert micro.weights[micro.mask].mean() == pytest.approx(1, abs=1e-3)
    assert torch.corrcoef(torch.stack(weights))[0, 1] > (0.8 if credit == "oar_p" else 0.95)


@pytest.mark.slow
def test_the_default_run_learns_in_bf16(run_main, tmp_path):
    """And a run that is resumed from its checkpoint has the same losses, to the bit."""
    flags = {"dtype": "bfloat16", "save_steps": 20}
    flags |= {"max_eval_samples": 100, "num_generations_eval": 4}
    defaults = trainer.parse_args([])
    names = ("max_steps", "per_device_train_batch_size", "gradient_accumulation_steps")
    names += ("num_generations", "max_completion_length", "warmup_steps")
    flags |= {name: getattr(defaults, name) for name in names}

    def logged() -> list[dict]:
        lines = (tmp_path / "out/metrics.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]

    assert run_main(**flags)[0] == 0
    rows = logged()
    before, after = (rows[i]["eval"]["sampled_accuracy"] for i in (0, -1))
    assert before < 0.4 and after > 0.7
    assert max(row["sampling_gap"] for row in rows if "loss" in row) < 5e-3
    (tmp_path / "out").rename(tmp_path / "whole")
    flags["resume_from_checkpoint"] = tmp_path / "whole/checkpoint-40"
    assert run_main(**flags)[0] == 0
    losses = [row["loss"] for row in rows if "loss" in row]
    assert [row["loss"] for row in logged() if "loss" in row] == losses  # the log goes on, too
