"""What only a GPU can show: captured steps compute what eager ones do, in bf16 too."""

import pytest
import torch
from support import fixed_uniforms, problems_of, randomize_adapter, sample

import grpo_arca

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("weights", ["dense", "quantized"])
def test_captured_steps_sample_what_eager_ones_do(make_run, monkeypatch, weights, dtype):
    """Also after the adapter has changed, and while completions end and tensors become smaller."""
    run = make_run(dtype=dtype, rollout_weights=weights)
    captures = []
    graph = torch.cuda.CUDAGraph

    def counted():
        captures.append(1)
        return graph()

    monkeypatch.setattr(torch.cuda, "CUDAGraph", counted)
    for scale in (0.0, 0.05):
        randomize_adapter(run.model, scale)
        samples = []
        for run.args.cuda_graphs in (True, False):
            samples.append(sample(run, problems_of(run, 64), fixed_uniforms(64, 80)))
        assert samples[0].completion_ids == samples[1].completion_ids
        torch.testing.assert_close(samples[0].sampled_logp, samples[1].sampled_logp)
    assert len(captures) > 2  # more than one a rollout: it went on in smaller tensors


@pytest.mark.parametrize("weights", ["dense", "quantized"])
def test_recomputed_log_probs_are_near_the_sampled_ones(make_run, weights):
    """The mean gap in bf16, on the tiny policy, whose distributions are sharp."""
    run = make_run(
        rollout_weights=weights, max_completion_length=80, per_device_train_batch_size=64
    )
    batch = grpo_arca.collect(run, {})
    batch.advantages = torch.ones_like(batch.rewards)  # else a row may be left out
    (micros,) = grpo_arca.micro_batches(run, batch)
    grpo_arca.score(run, batch, micros, {})
    assert grpo_arca.update(run, micros)["sampling_gap"] < 0.01
    assert not torch.backends.cuda.cudnn_sdp_enabled()
