"""The policy's log-probs, hidden states and gradients, against the stock model's."""

import pytest
import torch
from support import fixed_draws, gradient_of, problems_of, random_batch, sample, stock, unscored

import grpo_arca


@pytest.mark.parametrize(
    ("checkpointing", "training", "cut", "fewest", "read"),
    [
        (False, True, 0, 0, [(4, 5), (8, 12)]),  # 4 prompts but for their last tokens; then 8 rows
        (True, False, 0, 0, [(4, 5), (8, 12)]),
        (True, True, 0, 0, [(8, 17)]),  # layers that are checkpointed take no cache
        (False, True, 5, 0, [(8, 12)]),  # prompts of one token
        (False, True, 0, 40, [(4, 5), (8, 12)]),  # a GPU caches 40 tokens if these are enough
        (False, True, 0, 41, [(8, 17)]),
    ],
)
def test_log_probs_and_gradients_are_the_stock_models(
    make_run, monkeypatch, checkpointing, training, cut, fewest, read
):
    """At the sampling temperature, in chunks of 5 tokens. Hidden state t predicts token t."""
    monkeypatch.setattr(grpo_arca, "LOGITS_PER_CHUNK", 448 * 5)
    run = make_run(temperature=0.7, gradient_checkpointing=checkpointing)
    monkeypatch.setattr(grpo_arca, "CUDA", fewest > 0)
    monkeypatch.setattr(grpo_arca, "FEWEST_CACHED_TOKENS", fewest)
    batch = random_batch()
    batch.ids = batch.ids[:, cut:]
    batch.attention = batch.attention[:, cut:]
    batch.prompt_width -= cut
    shapes = []

    def watch(_, args, inputs):
        shapes.append(tuple(inputs["input_ids"].shape))

    hook = run.model.get_base_model().base_model.register_forward_pre_hook(watch, with_kwargs=True)
    logp, hidden = run.policy.train(training)(batch)
    hook.remove()
    assert shapes == read
    assert (logp[~batch.mask] == 0).all()  # a method may add them up
    weights = torch.randn(logp.shape, generator=torch.Generator().manual_seed(0))
    gradient = gradient_of(run, (logp * weights).sum())
    run.policy.eval()
    expected, _ = stock(run, batch)
    torch.testing.assert_close(logp, expected, atol=1e-4, rtol=0)
    head = run.model.get_output_embeddings()
    own = (head(hidden) / 0.7).log_softmax(-1).gather(2, batch.ids[:, -12:, None]).squeeze(2)
    torch.testing.assert_close(own[batch.mask], expected[batch.mask], atol=1e-4, rtol=0)
    truth = gradient_of(run, (expected * weights).sum())
    assert (gradient - truth).norm() < 1e-4 * truth.norm() > 0


def test_a_rollout_changes_no_gradient(make_run):
    """On a CPU with AVX512-BF16, bitsandbytes would repack 4-bit weights in the first forward pass
    without gradients, and later gradients would be wrong. A flag prevents it in each layer, which
    is all that can be seen on another CPU."""
    run = make_run(rollout_weights="quantized")
    batch = unscored(random_batch())
    before = gradient_of(run, grpo_arca.training_forward(run, batch).sum())
    sample(run, problems_of(run), fixed_draws(4, 24))
    grpo_arca.score(run, batch, [batch], {})
    assert torch.equal(before, gradient_of(run, grpo_arca.training_forward(run, batch).sum()))
    flags = [getattr(m, "support_avx512bf16_for_cpu", None) for m in run.model.modules()]
    assert flags.count(False) == 28 and True not in flags


def test_the_base_is_nf4_and_only_the_adapter_trains(make_run):
    run = make_run()
    names = [name for name, p in run.model.named_parameters() if p.requires_grad]
    assert len(names) == 56 and all("lora_" in name for name in names)
    states = [m.weight.quant_state for m in run.model.modules() if hasattr(m, "compute_dtype")]
    assert len(states) == 28 and all(s.quant_type == "nf4" and s.nested for s in states)
