"""What only a GPU can show: captured steps compute what eager ones do, in bf16 too."""

from unittest import mock

import pytest
import torch
from accelerate.state import AcceleratorState
from support import fixed_draws, problems_of, randomize_adapter, sample

import grpo_arca

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.fixture(autouse=True)
def on_the_gpu(monkeypatch):
    """All other tests are on the CPU."""
    monkeypatch.delenv("ACCELERATE_USE_CPU")
    monkeypatch.setattr(grpo_arca, "CUDA", True)
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("weights", ["dense", "quantized"])
def test_captured_steps_sample_what_eager_ones_do(make_run, monkeypatch, weights, dtype):
    """Also after the adapter has changed, and while completions end and tensors become smaller."""
    run = make_run(dtype=dtype, rollout_weights=weights)
    assert run.eos_ids.is_cuda
    capture = mock.Mock(wraps=torch.cuda.CUDAGraph)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", capture)
    for scale in (0.0, 0.05):
        randomize_adapter(run.model, scale)
        samples = []
        for run.args.cuda_graphs in (True, False):
            samples.append(sample(run, problems_of(run, 64), fixed_draws(64, 80)))
        assert samples[0].completion_ids == samples[1].completion_ids
        torch.testing.assert_close(samples[0].sampled_logp, samples[1].sampled_logp)
    assert capture.call_count > 2  # more than one a rollout: it went on in smaller tensors
    assert not torch.backends.cuda.cudnn_sdp_enabled()  # it may give NaN gradients
