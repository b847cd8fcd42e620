"""`memory.py` against real tensors, sums by hand, and a peak that was measured on a GPU."""

import argparse
from unittest import mock

import memory
import pytest
import torch
import torch.nn.functional as F
from bench import SHAPES, VOCABULARY, shape_config
from support import TINY
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig


def asked(**options) -> argparse.Namespace:
    step = {"completions": 64, "micro_batch": 16, "prompt_tokens": 128, "completion_tokens": 256}
    step |= {"rollout_weights": "quantized", "flags": ["--lora_r", "16", "--lora_alpha", "32"]}
    return argparse.Namespace(**step | options)


def four_bit(weights: int) -> float:
    """Bytes of NF4, double quantised: a byte for each 64 weights, 4 for each 256 of those."""
    return weights / 2 + weights / 64 + weights / 64 / 256 * 4


def parts(name: str, layers: int) -> tuple[int, int, int]:
    """Weights of a shape's linear layers, its embedding and head, and an adapter of rank 1."""
    hidden, intermediate, _, heads, tied = SHAPES[name]
    sides = [(hidden, 128 * heads), (hidden, 1024), (hidden, 1024), (128 * heads, hidden)]
    sides += [(hidden, intermediate)] * 2 + [(intermediate, hidden)]
    linear = layers * sum(a * b for a, b in sides)
    return linear, VOCABULARY * hidden * (2 - tied), layers * sum(a + b for a, b in sides)


SLOW = pytest.param("dense", marks=pytest.mark.slow)


@pytest.mark.parametrize("weights", ["quantized", SLOW])
def test_fake_tensors_count_what_real_ones_do(weights):
    """The tiny policy, whose data are really there."""
    config = AutoConfig.from_pretrained(TINY)
    step = {"completions": 8, "micro_batch": 4, "prompt_tokens": 20, "completion_tokens": 30}
    options = asked(**step, rollout_weights=weights)
    real, fake = (memory.count(config, options, fake=fake) for fake in (False, True))
    assert real == pytest.approx(fake, rel=0.02)
    assert 0 < real["weights"] < real["score"] < real["update"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["1.7B", "8B"])
def test_weights_and_cache_are_what_they_are_by_hand(name):
    """NF4 base, bf16 ends, adapter and AdamW in fp32; the dense copy is of linear layers alone; it
    and the cache are there in rollouts and gone afterwards."""
    config, (linear, ends, rank_one) = shape_config(name, 2), parts(name, 2)
    static = (four_bit(linear) + 2 * ends + 3 * 4 * 16 * rank_one) / memory.GIB
    cache = 2 * 2 * 64 * 384 * 8 * 128 * 2 / memory.GIB
    quantized = memory.count(config, asked())
    assert quantized["weights"] == pytest.approx(static, rel=0.01)
    assert static + cache < quantized["rollout"] < static + cache + 0.2
    dense = memory.count(config, asked(rollout_weights="dense", completions=128))
    more = 2 * linear / memory.GIB + cache
    assert dense["rollout"] - quantized["rollout"] == pytest.approx(more, rel=0.1, abs=0.2)
    for phase in ("weights", "score", "update"):
        assert dense[phase] == quantized[phase]


@pytest.mark.parametrize(("part_size", "size"), [(5, 5), (16, 16), (64, 16), (0, 16)])
def test_a_part_of_a_rollout_is_decoded_at_once(monkeypatch, part_size, size):
    """Of 16 completions. Without parts, or in parts that are larger, that is the whole rollout."""
    decoded = []

    class Decoder:
        def __init__(self, model, prompts, uniforms, sampling):
            decoded.append((len(prompts), *uniforms.shape))

        def step(self):
            pass

    monkeypatch.setattr(memory.trainer, "Decoder", Decoder)
    args = memory.trainer.parse_args(["--per_device_rollout_batch_size", str(part_size)])
    memory.rollout_peaks(args, mock.MagicMock(), memory.LiveBytes(), asked(completions=16))
    assert decoded == [(size, size, 256)]


@pytest.mark.slow
def test_a_rollout_in_parts_takes_what_its_first_part_takes():
    """And all that is not the rollout takes the same."""
    config = AutoConfig.from_pretrained(TINY)
    step = {"micro_batch": 2, "prompt_tokens": 20, "completion_tokens": 30}
    flags = ["--per_device_rollout_batch_size", "2"]
    in_parts = memory.count(config, asked(**step, completions=16, flags=flags), fake=False)
    part = memory.count(config, asked(**step, completions=2, flags=[]), fake=False)
    whole = memory.count(config, asked(**step, completions=16, flags=[]), fake=False)
    assert in_parts == pytest.approx(part, rel=1e-6)
    assert in_parts["rollout"] < 0.9 * whole["rollout"]


@pytest.mark.slow  # all layers: minutes where the machine is slow
def test_a_training_step_takes_what_was_measured_on_a_gpu(monkeypatch):
    """16 x 640 tokens of the 1.7B shape with r 16, checkpointing, bf16 autocast and a head in
    chunks of 2,048 tokens, in code of its own: 6.2 GiB by `max_memory_allocated` on an H200."""

    def step(args, model, counted, options):
        memory.allocate(model)
        base, ids = model.train().get_base_model(), torch.ones(16, 640, dtype=torch.long)

        def head(hidden, targets):
            logits = base.lm_head(hidden).float()
            return -F.cross_entropy(logits, targets, reduction="none")

        for p in model.parameters():
            if p.requires_grad:  # it kept the gradients of the step before
                p.grad = torch.ones_like(p)
        hidden = base.model(input_ids=ids, use_cache=False).last_hidden_state[:, :-1]
        chunks = zip(
            hidden.flatten(0, 1).split(2048), ids[:, 1:].flatten().split(2048), strict=True
        )
        logp = [checkpoint(head, h, y, use_reentrant=False) for h, y in chunks]
        torch.cat(logp).mean().backward()
        return {"update": counted.phase()}

    monkeypatch.setattr(memory, "phases", step)
    counted = memory.count(shape_config("1.7B"), asked())["update"]
    print(f"counted {counted:.2f} GiB, measured 6.2")
    assert counted == pytest.approx(6.2, rel=0.02)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--completions", "0"], "--completions must be at least 1"),
        (["--", "--num_generations", "64"], "--num_generations has no effect here: give"),
        (["--", "--max-completion-length=64"], "--max-completion-length=64 has no effect here"),
    ],
)
def test_sizes_are_those_of_the_options(argv, words, capsys):
    with pytest.raises(SystemExit):
        memory.parse_options(argv)
    assert words in capsys.readouterr().err


def test_a_tensor_counts_once_and_until_it_is_gone():
    with FakeTensorMode(), memory.LiveBytes() as live:
        a = torch.ones(2**20)
        b = a.view(2, -1)
        assert live.live == 2**22
        c = b + 1
        del a, b
        assert live.live == 2**22 and live.phase() == pytest.approx(2**23 / memory.GIB)
        del c
        assert live.live == 0 and live.phase() == pytest.approx(2**22 / memory.GIB)


@pytest.mark.parametrize(
    ("gib", "card"), [(6.6, "8 GB"), (6.7, "12 GB"), (21.8, "24 GB"), (80, "none")]
)
def test_a_card_must_hold_more_than_the_peak(gib, card):
    assert memory.card_for(gib) == card
