"""The trainer: sampling, log-probs, masks, normalisers, the loss. Docstrings name the pitfalls."""

import contextlib
import json
import math
import os
import subprocess
import sys
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, TINY, random_batch, randomise_adapter
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, GenerationConfig, GPT2Config, GPT2LMHeadModel
from transformers.generation import TopKLogitsWarper, TopPLogitsWarper
from trl.trainer.utils import nanstd

import grpo_arca as trainer
from common.data import Problem, completions_of
from common.metrics import rollout_metrics


def prompts_of(run, count=4):
    texts = ["Start with 5, add 7, double it, subtract 3.", "Start with 40, subtract 12.", "Hello"]
    return [run.tokenizer(texts[i % 3] + " " * (i % 2)).input_ids for i in range(count)]


def sample(run, prompts, u, greedy=False):
    return trainer.sample(run, torch.arange(len(prompts)), prompts, u, greedy)


def texts_of(run, batch) -> list[str]:
    return completions_of(run, batch)[1]


def fixed(*shape) -> torch.Tensor:
    """Uniforms that are the same in every run."""
    return torch.rand(shape, generator=torch.Generator().manual_seed(0))


def packed(module: torch.nn.Module) -> bool:
    return hasattr(getattr(module, "weight", None), "quant_state")


# ------------------------------------------------------------------------------------ sampling
def test_sample_tokens_follows_the_distribution():
    logits = torch.tensor([[1.0, 0.0, -1.0, 2.0]])
    grid = (torch.arange(20000) + 0.5) / 20000
    token, logp, _ = trainer.sample_tokens(logits.expand(20000, 4), grid, temperature=0.7)
    expected = (logits[0] / 0.7).softmax(0)
    assert torch.allclose(token.bincount(minlength=4) / 20000, expected, atol=1e-3)
    assert torch.allclose(logp, expected.log()[token], atol=1e-6)


def test_entropies_are_those_before_top_k_and_finite():
    """Of the distribution that is trained; a logit of -inf is a probability of 0, not a NaN."""
    logits = torch.tensor([[1.0, 0.0, -1.0, -torch.inf]])
    exact = torch.distributions.Categorical(logits=logits[:, :3] / 0.7).entropy()
    for how in ((0.7, 0, 1.0), (0.7, 1, 0.5)):
        assert torch.allclose(trainer.sample_tokens(logits, torch.tensor([0.5]), *how)[2], exact)


@pytest.mark.parametrize("size", [400, 5000, 30_000])
def test_sample_tokens_never_picks_the_impossible(size):
    """Rounding in the cumulative sum must not let u near 0 or 1 pick a token of probability 0."""
    logits = torch.randn(500, size, generator=torch.Generator().manual_seed(0))
    logits[:, 0] = logits[:, -200:] = -torch.inf
    for u in (0.0, 1 - 2**-24):
        token, logp, _ = trainer.sample_tokens(logits, torch.full((500,), u))
        assert (token > 0).all() and (token < size - 200).all() and logp.isfinite().all()


@pytest.mark.parametrize("size", [448, 151_937])
@pytest.mark.parametrize(("top_k", "top_p"), [(0, 1.0), (50, 1.0), (0, 0.9)])
def test_tokens_of_large_vocabularies_lie_where_the_exact_distribution_says(size, top_k, top_p):
    """Against the inverse CDF in float64 over all tokens in the order of their ids."""
    generator = torch.Generator().manual_seed(size)
    logits, u = 3 * torch.randn(16, size, generator=generator), torch.rand(16, generator=generator)
    token, logp, _ = trainer.sample_tokens(logits, u, 0.7, top_k, top_p)
    exact = (logits.double() / 0.7).log_softmax(-1)
    ordered, index = exact.exp().sort(-1, descending=True)
    ordered = ordered * (torch.arange(size) < (top_k or size))
    ordered = ordered / ordered.sum(-1, keepdim=True)
    ordered = ordered * (ordered.cumsum(-1) - ordered < top_p)
    mass = torch.zeros_like(exact).scatter(1, index, ordered / ordered.sum(-1, keepdim=True))
    at = token[:, None]
    above, own = mass.cumsum(-1).gather(1, at)[:, 0], mass.gather(1, at)[:, 0]
    assert (above - own <= u + 2e-5).all() and (u <= above + 2e-5).all() and (own > 0).all()
    assert torch.allclose(logp.double(), exact.gather(1, at)[:, 0], atol=1e-4)


@pytest.mark.parametrize(("top_k", "top_p"), [(5, 1.0), (0, 0.8), (7, 0.6), (1, 1.0), (0, 1e-6)])
def test_top_k_and_top_p_keep_what_transformers_keeps(top_k, top_p):
    logits = 2 * torch.randn(3, 50, generator=torch.Generator().manual_seed(1))
    warped = logits / 0.9
    warped = TopKLogitsWarper(top_k)(None, warped) if top_k else warped
    warped = TopPLogitsWarper(top_p)(None, warped) if top_p < 1 else warped
    grid = (torch.arange(8000) + 0.5) / 8000
    for row in range(3):
        rows = logits[row].expand(8000, 50)
        token, logp, _ = trainer.sample_tokens(rows, grid, 0.9, top_k, top_p)
        frequency = token.bincount(minlength=50) / 8000
        assert torch.allclose(frequency, warped[row].softmax(0), atol=2e-3)
        assert torch.allclose(logp, (logits[row] / 0.9).log_softmax(0)[token], atol=1e-5)


@pytest.mark.parametrize("rollout_weights", ["dense", "quantized"])
def test_greedy_generation_equals_transformers(make_run, rollout_weights):
    """The decode loop over the static cache against `generate`, prompts of different lengths."""
    run = make_run(rollout_weights=rollout_weights)
    prompts = prompts_of(run)
    out = sample(run, prompts, torch.zeros(4, 24), greedy=True)
    for row, prompt in enumerate(prompts):
        expected = run.model.generate(
            input_ids=torch.tensor([prompt]), max_new_tokens=24, do_sample=False, eos_token_id=2
        )[0, len(prompt) :]
        ours = out.ids[row, out.prompt_width :][out.mask[row]]
        assert torch.equal(ours, expected)
        assert out.truncated[row] == (ours[-1] != 2)


def test_the_head_is_asked_for_rows_of_a_matrix(make_run):
    """Of a slice of [B, T, H], a CPU in bf16 would copy the head's weight for each row."""
    run, shapes = make_run(), []
    head = run.model.get_base_model().get_output_embeddings()
    head.register_forward_pre_hook(lambda _, inputs: shapes.append(tuple(inputs[0].shape)))
    sample(run, prompts_of(run), torch.zeros(4, 24))
    assert len(shapes) > 1 and all(len(shape) == 2 for shape in shapes)


def test_finished_rows_are_dropped_and_nothing_else_changes(make_run, monkeypatch):
    """Each completion as if it were alone, where no row can be dropped."""
    run = make_run(max_completion_length=80, adapter=0.0)
    prompts, sizes, inner = prompts_of(run, 10), [], trainer.Decoder.keep
    u = trainer.row_uniforms(run.args, "rollout", 0, torch.arange(10), 80)

    def keep(decoder, rows):
        sizes.append((len(decoder.active_rows), len(rows)))
        inner(decoder, rows)

    monkeypatch.setattr(trainer.Decoder, "keep", keep)
    whole = sample(run, prompts, u)
    assert len(sizes) >= 2 and all(0 < to <= 0.75 * n for n, to in sizes)
    sizes.clear()
    for i, text in enumerate(texts_of(run, whole)):
        alone = sample(run, prompts[i : i + 1], u[i : i + 1])
        assert texts_of(run, alone) == [text]
        length = alone.sampled_logp.shape[1]
        assert torch.allclose(alone.sampled_logp[0], whole.sampled_logp[i, :length], atol=1e-4)
        assert (whole.sampled_logp[i, length:] == 0).all()
        assert alone.truncated[0] == whole.truncated[i]
    assert not sizes


def test_different_prompts_are_read_once_and_then_one_token_a_step(make_run, monkeypatch):
    """What a rollout computes: a prefill of each different prompt, for all its samples, and one
    token of each row a step (PITFALLS 10), with gradient checkpointing too."""
    run = make_run(gradient_checkpointing=True, rollout_weights="quantized")
    prompts, read = prompts_of(run, 24), []
    run.model.get_base_model().model.embed_tokens.register_forward_hook(
        lambda module, inputs, output: read.append(tuple(inputs[0].shape))
    )
    out = sample(run, prompts, fixed(24, 24))
    assert read[0] == (len({tuple(p) for p in prompts}), out.prompt_width) == (6, out.prompt_width)
    assert len(read) > 15 and {tokens for _, tokens in read[1:]} == {1}


class FakeGraph:
    """A CUDA graph without CUDA: what is recorded has no effect until it is replayed, and then
    acts on the memory that it was recorded on."""

    recorded: list["FakeGraph"] = []
    recording = None
    step = trainer.Decoder.step

    @staticmethod
    def memory(decoder) -> list[int]:
        tensors = [x for x in vars(decoder).values() if isinstance(x, torch.Tensor)]
        tensors += [x for layer in decoder.cache.layers for x in (layer.keys, layer.values)]
        return [x.data_ptr() for x in tensors]

    @classmethod
    @contextlib.contextmanager
    def record(cls, graph):
        cls.recording = graph
        yield
        cls.recording = None
        cls.recorded.append(graph)

    def step_or_note(decoder):
        if graph := FakeGraph.recording:
            graph.decoder, graph.noted = decoder, FakeGraph.memory(decoder)
        else:
            FakeGraph.step(decoder)

    def replay(self):
        assert FakeGraph.memory(self.decoder) == self.noted
        FakeGraph.step(self.decoder)


def test_captured_steps_are_recorded_once_and_replayed(make_run, monkeypatch):
    """What a CPU can test of the captured decode loop: a graph for each number of rows, recorded
    after a warm-up, replayed on the same memory, and the same samples."""
    run = make_run(max_completion_length=80, adapter=0.0)
    prompts, u = prompts_of(run, 16), fixed(16, 80)
    plain, sizes, inner = sample(run, prompts, u), [], trainer.Decoder.keep
    monkeypatch.setattr(FakeGraph, "recorded", [])
    monkeypatch.setattr(torch.cuda, "CUDAGraph", FakeGraph)
    monkeypatch.setattr(torch.cuda, "graph", FakeGraph.record)
    monkeypatch.setattr(trainer, "CUDA", True)
    monkeypatch.setattr(trainer.Decoder, "step", FakeGraph.step_or_note)
    monkeypatch.setattr(trainer.Decoder, "keep", lambda d, r: (sizes.append(len(r)), inner(d, r)))
    ours = sample(run, prompts, u)
    assert torch.equal(ours.ids, plain.ids) and torch.equal(ours.sampled_logp, plain.sampled_logp)
    assert len(sizes) >= 2 and len(FakeGraph.recorded) == 1 + len(sizes)


@pytest.mark.parametrize("rollout_weights", ["dense", "quantized"])
def test_samples_are_a_function_of_the_row_and_logps_are_recomputed(make_run, rollout_weights):
    """Rows sampled together, alone, or in another order are the same; PITFALLS 12: and the
    log-probs that the decode loop saw are those of the training forward."""
    run = make_run(temperature=0.8, rollout_weights=rollout_weights)
    prompts, rows = prompts_of(run, 8), torch.arange(8)
    u = trainer.row_uniforms(run.args, "rollout", 3, rows, 24)
    whole = sample(run, prompts, u)
    texts = texts_of(run, whole)
    assert len(set(texts)) > 4
    for i in (0, 5):
        assert texts_of(run, sample(run, [prompts[i]], u[i : i + 1])) == [texts[i]]
    assert texts_of(run, sample(run, prompts[::-1], u.flip(0))) == texts[::-1]
    with torch.no_grad():
        logp, _ = run.policy(whole)
    assert (logp - whole.sampled_logp)[whole.mask].abs().max() < 1e-4
    assert torch.equal(u[2:4], trainer.row_uniforms(run.args, "rollout", 3, rows[2:4], 24))
    assert not torch.equal(u, trainer.row_uniforms(run.args, "rollout", 4, rows, 24))
    assert len({tuple(row.tolist()) for row in u}) == 8  # a stream of its own for each row


def test_sampling_flags_come_from_the_command_line(make_run):
    """Where one token is left, all samples of a prompt are the same."""
    for flags, distinct in (({"top_k": 1}, 1), ({"top_p": 1e-6}, 1), ({"temperature": 1.5}, 8)):
        run = make_run(**flags)
        batch = sample(run, prompts_of(run)[:1] * 8, fixed(8, 24))
        assert len(set(texts_of(run, batch))) == distinct


def test_generation_config_gives_eos_ids_and_nothing_else(make_run, tmp_path):
    """PITFALLS 2: a model's top_k=1 and repetition penalty must not shape the samples."""
    AutoModelForCausalLM.from_pretrained(TINY).save_pretrained(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (tmp_path / name).write_bytes((Path(TINY) / name).read_bytes())
    poison = GenerationConfig(top_k=1, repetition_penalty=1.3, do_sample=True, eos_token_id=[2, 1])
    poison.save_pretrained(tmp_path)
    runs = [make_run(model=model, lora_r=8, lora_alpha=16) for model in (TINY, str(tmp_path))]
    clean, poisoned = [sample(run, prompts_of(run)[:1] * 6, fixed(6, 24)) for run in runs]
    assert torch.equal(clean.ids, poisoned.ids)
    assert len(set(texts_of(runs[1], poisoned))) == 6
    assert runs[1].eos_ids.tolist() == [1, 2]


@pytest.mark.parametrize("targets", ["all-linear", "q_proj", "lm_head", "embed_tokens"])
def test_dense_weights_leave_the_adapter_beside_them(make_run, targets):
    """Whichever layers have an adapter: a tied head, too, whose twin has one. The adapter acts."""
    run, samples = make_run(lora_target_modules=targets), []
    for scale in (0.05, 0.5):
        randomise_adapter(run.model, scale)
        for name, parameter in run.model.named_parameters():
            if "lora_embedding_A" in name:  # of an embedding it is A that begins with zeros
                parameter.data.fill_(scale)
        for run.args.rollout_weights in ("dense", "quantized"):
            samples.append(sample(run, prompts_of(run), fixed(4, 24)))
        dense, quantized = samples[-2:]
        assert torch.equal(dense.ids, quantized.ids)
        assert (dense.sampled_logp - quantized.sampled_logp).abs().max() < 1e-4
    small, large = (x.sampled_logp[:, :4] for x in samples[::2])
    assert not torch.allclose(small, large, atol=1e-3)


def test_every_nf4_layer_is_dense_in_a_rollout_and_none_after_it(make_run):
    run = make_run()
    with trainer.dense(run.model):
        assert len([m for m in run.model.modules() if "forward" in vars(m)]) == 28
    assert not [m for m in run.model.modules() if "forward" in vars(m)]


class Scripted(torch.nn.Module):
    """A model whose logits make row r say script[r], one token after the other."""

    def __init__(self, script: torch.Tensor, real):
        super().__init__()
        self.script, self.calls, self.config, self.dtype = script, 0, real.config, torch.float32

    def base_model(self, **_):
        hidden = torch.full((len(self.script), 1, 448), -1e4)
        hidden.scatter_(2, self.script[:, self.calls, None, None], 0.0)
        self.calls += 1
        return SimpleNamespace(last_hidden_state=hidden)

    def get_output_embeddings(self):
        return lambda hidden: hidden


def test_masks_come_from_lengths_and_every_eos_ends(make_run):
    """PITFALLS 3 and 4: pad = eos, several EOS ids, a row that never ends."""
    run = make_run()
    run.tokenizer.pad_token_id = 2
    script = torch.tensor([[5, 2, 9, 9], [7, 7, 0, 9], [2, 9, 9, 9], [5, 6, 7, 8]])
    scripted = torch.nn.Module()
    scripted.inner = Scripted(script, run.model.get_base_model())
    scripted.get_base_model = lambda: scripted.inner
    run = replace(run, model=scripted, eos_ids=torch.tensor([0, 2]))
    out = sample(run, [[4, 4], [4, 5], [4, 6], [4, 7]], fixed(4, 4))
    assert out.mask.int().tolist() == [[1, 1, 0, 0], [1, 1, 1, 0], [1, 0, 0, 0], [1, 1, 1, 1]]
    assert out.truncated.tolist() == [False, False, False, True]
    assert out.ids[0, 2:].tolist() == [5, 2, 2, 2]  # padding is the pad id, here an EOS id
    assert (out.sampled_logp[~out.mask] == 0).all()


def test_the_stop_token_is_trained(make_run):
    """PITFALLS 3: the first stop token has mask 1 and a gradient, though it is the pad token."""
    run = make_run()
    run.tokenizer.pad_token = run.tokenizer.eos_token
    batch = random_batch()
    batch.ids = torch.where(batch.attention, batch.ids, run.tokenizer.pad_token_id)
    ends = batch.mask.sum(1) - 1
    batch.ids[torch.arange(8), batch.prompt_width + ends] = run.tokenizer.pad_token_id
    _, gradient, _ = loss_and_gradient(run.args, batch, batch.old_logp, batch.old_logp)
    assert (gradient[torch.arange(8), ends] != 0).all()
    assert (gradient[~batch.mask] == 0).all()


def test_gradient_checkpointing_gives_the_same_gradients(make_run):
    gradients = []
    for checkpointing in (False, True):
        run, batch = make_run(gradient_checkpointing=checkpointing), random_batch()
        trainer.training_forward(run, batch)[batch.mask].sum().backward()
        gradients.append([p.grad.clone() for p in run.model.parameters() if p.grad is not None])
    assert len(gradients[0]) == len(gradients[1]) > 10
    for plain, recomputed in zip(*gradients, strict=True):
        assert (plain - recomputed).norm() < 1e-5 * plain.norm()


def test_each_prompt_is_read_once_for_all_its_samples(make_run):
    """8 completions of 4 prompts: their prompts but for the last token, then the rest. Not where
    layers are checkpointed, which take no cache; nor has a prompt of one token such a part."""
    for checkpointing, training, cut, expected in (
        (False, True, 0, [(4, 5), (8, 12)]),
        (True, True, 0, [(8, 17)]),
        (True, False, 0, [(4, 5), (8, 12)]),
        (False, True, 5, [(8, 12)]),
    ):
        run, batch, shapes = make_run(gradient_checkpointing=checkpointing), random_batch(), []
        batch.ids, batch.attention = batch.ids[:, cut:], batch.attention[:, cut:]
        batch.prompt_width -= cut
        base = run.model.get_base_model().base_model
        watch = lambda _, args, inputs: shapes.append(tuple(inputs["input_ids"].shape))
        base.register_forward_pre_hook(watch, with_kwargs=True)
        run.policy.train(training)(batch)
        assert shapes == expected


# ---------------------------------------------------------------------------------- log-probs
@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_log_probs_and_hidden_states(make_run, temperature):
    """PITFALLS 1: trained log-probs are log_softmax(logits / T); and hidden state t is the one
    whose logits predict token t."""
    run, batch = make_run(temperature=temperature), random_batch()
    base = run.model.get_base_model()
    run.policy.eval()
    with torch.no_grad():
        stats = run.policy(batch)
        for row in range(len(batch.rows)):
            ids = batch.ids[row][batch.attention[row]][None]  # unpadded
            length = int(batch.mask[row].sum())
            out = base(input_ids=ids, output_hidden_states=True)
            logp = (out.logits[0, -length - 1 : -1] / temperature).log_softmax(-1)
            expected = (
                logp.gather(1, ids[0, -length:, None])[:, 0],
                out.hidden_states[-1][0, -length - 1 : -1],
            )
            for ours, theirs in zip(stats, expected, strict=True):
                assert torch.allclose(ours[row, :length], theirs, atol=1e-4)
    assert (stats[0][~batch.mask] == 0).all()


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_a_rollouts_log_probs_and_entropies(make_run, temperature):
    """As the stock model has them, one row at a time, without padding or a cache."""
    run = make_run(temperature=temperature)
    batch, base = sample(run, prompts_of(run, 8), fixed(8, 24)), run.model.get_base_model()
    for row, (ids, real) in enumerate(zip(batch.ids, batch.attention, strict=True)):
        length = int(batch.mask[row].sum())
        with torch.no_grad():
            logits = base(input_ids=ids[real][None]).logits[0, -length - 1 : -1]
        every = torch.distributions.Categorical(logits=logits / temperature)
        exact = every.log_prob(ids[real][-length:]), every.entropy()
        for ours, theirs in zip((batch.sampled_logp, batch.entropy), exact, strict=True):
            assert torch.allclose(ours[row, :length], theirs, atol=1e-4)
            assert (ours[row, length:] == 0).all()


def test_padding_with_learned_positions(make_run):
    """PITFALLS 5: RoPE hides wrong position ids, GPT-2's learned positions do not: neither in the
    training forward nor in the decode loop."""
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=448, n_positions=64, n_embd=32, n_layer=2, n_head=2)
    model = get_peft_model(GPT2LMHeadModel(config), LoraConfig(task_type="CAUSAL_LM"))
    randomise_adapter(model)
    run, batch = make_run(), random_batch()
    run = replace(run, model=model, policy=trainer.Policy(model, 1.0), eos_ids=run.eos_ids[:0])
    run.policy.eval()
    with torch.no_grad():
        padded, _ = run.policy(batch)
        for row in range(len(batch.rows)):
            alone = batch.select(torch.tensor([row]))
            length = alone.mask.shape[1]
            assert alone.attention.all()
            assert torch.allclose(padded[row, :length], run.policy(alone)[0][0], atol=1e-5)
    prompts, u = [[5, 6, 7, 8, 9], [5, 6], [11]], fixed(3, 20)
    together = sample(run, prompts, u)
    for row, prompt in enumerate(prompts):
        alone = sample(run, [prompt], u[row : row + 1])
        assert torch.equal(together.ids[row, together.prompt_width :], alone.ids[0, len(prompt) :])


@pytest.mark.parametrize("weights", ["dense", "quantized"])
def test_gradients_are_the_same_before_and_after_a_rollout(make_run, weights):
    """PITFALLS 13: on a CPU with AVX512-BF16, bitsandbytes repacks 4-bit weights in a no-grad eval
    forward, and training goes on with wrong gradients. On another CPU only the flag is tested."""
    run, batch = make_run(rollout_weights=weights), random_batch()

    def gradients():
        run.optimizer.zero_grad()
        trainer.training_forward(run, batch)[batch.mask].sum().backward()
        return [p.grad.clone() for p in run.model.parameters() if p.grad is not None]

    before = gradients()
    sample(run, prompts_of(run), fixed(4, 24))
    trainer.score(run, [batch], {})
    for old, new in zip(before, gradients(), strict=True):
        assert torch.equal(old, new)
    flags = [getattr(m, "support_avx512bf16_for_cpu", None) for m in run.model.modules()]
    assert flags.count(False) == 28 and True not in flags


def test_the_base_is_nf4_and_only_the_adapter_trains(make_run):
    run = make_run()
    trained = [n for n, p in run.model.named_parameters() if p.requires_grad]
    assert trained and all("lora_" in name for name in trained)
    states = {id(m.weight): m.weight.quant_state for m in run.model.modules() if packed(m)}
    assert len(states) == 28 and all(s.quant_type == "nf4" and s.nested for s in states.values())


# ------------------------------------------------------------------------- advantages and loss
def test_group_advantages_by_hand():
    rewards = torch.tensor([[1.0, 0, 0, 0], [1, 1, 1, 1], [0.1, 0.1, 0.1, 0.1], [1, 1, 0, 0]])
    group = trainer.group_advantages(rewards, "group")
    std = math.sqrt((0.75**2 + 3 * 0.25**2) / 3)
    assert torch.allclose(group[0], torch.tensor([0.75, -0.25, -0.25, -0.25]) / (std + 1e-4))
    assert (group[1:3] == 0).all()  # PITFALLS 9: exactly, also where the mean is inexact
    assert torch.allclose(
        trainer.group_advantages(rewards, "none")[3], torch.tensor([0.5, 0.5, -0.5, -0.5])
    )
    batch = trainer.group_advantages(rewards, "batch")
    assert torch.allclose(
        batch[0], torch.tensor([0.75, -0.25, -0.25, -0.25]) / (rewards.std() + 1e-4)
    )


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_a_completion_that_nothing_judged_counts_nowhere(scale):
    """As TRL has it: the others of its group have the advantages they would have without it."""
    nan = float("nan")
    rewards = torch.tensor(
        [[1.0, nan, 0, 0.3], [nan] * 4, [nan, nan, 0.7, nan], [0.7, nan, 0.7, 0.7]]
    )
    got = trainer.group_advantages(rewards, scale)
    assert (got[1:] == 0).all() and got[0, 1] == 0
    judged = torch.tensor([1.0, 0, 0.3])
    centred = judged - judged.mean()
    over = {"group": judged.std(), "batch": rewards[~rewards.isnan()].std()}
    want = centred / (over[scale] + 1e-4) if scale in over else centred
    torch.testing.assert_close(got[0, [0, 2, 3]], want)
    # TRL 1.16's own lines
    means = torch.nanmean(rewards, dim=1, keepdim=True)
    std = nanstd(rewards) if scale == "batch" else nanstd(rewards, dim=1, keepdim=True)
    theirs = rewards - means if scale == "none" else (rewards - means) / (std + 1e-4)
    torch.testing.assert_close(got, torch.nan_to_num(theirs, nan=0.0), rtol=1e-5, atol=1e-3)


def loss_and_gradient(args, batch, logp, old_logp, completions=None, tokens=None):
    leaf = logp.clone().requires_grad_()
    counts = (completions or len(batch.rows), tokens or float(batch.loss_mask.sum()))
    scale = trainer.token_scale(args, batch.loss_mask, *counts)
    loss, clipped = trainer.policy_loss(args, batch, leaf, old_logp, scale)
    loss.backward()
    return loss.item(), leaf.grad, clipped


def flags(**values):
    argv = [part for name, value in values.items() for part in (f"--{name}", str(value))]
    return trainer.parse_args(argv)


def trl_loss(batch, logp, old_logp, loss_type, beta=0.0, advantages=None, generation=(1, 0)):
    """TRL's own GRPOTrainer._compute_loss on given log-probs. generation: its micro-batches and
    its tokens, if they are not the batch's."""
    grpo = pytest.importorskip("trl").GRPOTrainer
    leaf = logp.clone().requires_grad_()
    steps = {"steps_per_generation": generation[0]}
    config = SimpleNamespace(delta=None, use_bias_correction_kl=False, **steps)
    one = lambda x, **_: x
    accelerator = SimpleNamespace(num_processes=1, gather=one, reduce=one)
    metrics = {m: defaultdict(list) for m in ("train", "eval")}
    stub = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *a, **k: (leaf, torch.zeros_like(leaf), None),
        aux_loss_enabled=False, top_entropy_quantile=1.0, off_policy_mask_threshold=None,
        importance_sampling_level="token", beta=beta, args=config, loss_type=loss_type,
        epsilon_low=0.2, epsilon_high=0.2, use_vllm=False, accelerator=accelerator,
        model=SimpleNamespace(training=True), current_gradient_accumulation_steps=1,
        max_completion_length=80, _metrics=metrics, _entropy_bonus_enabled=False,
        loss_weight=None, use_liger_kernel=False,
    )  # fmt: skip
    width, mask = batch.prompt_width, batch.loss_mask.long()
    inputs = {
        "prompt_ids": batch.ids[:, :width], "prompt_mask": batch.attention[:, :width].long(),
        "completion_ids": batch.ids[:, width:], "completion_mask": mask,
        "advantages": batch.advantages if advantages is None else advantages,
        "old_per_token_logps": old_logp, "ref_per_token_logps": batch.base_logp,
        "num_items_in_batch": torch.tensor(generation[1]) if generation[1] else mask.sum(),
    }  # fmt: skip
    loss = grpo._compute_loss(stub, None, inputs)
    loss.backward()
    return loss.item(), leaf.grad


@pytest.mark.parametrize("loss_type", ["grpo", "dapo", "dr_grpo"])
@pytest.mark.parametrize("beta", [0.0, 0.1])
@pytest.mark.parametrize("weighted", [False, True])
def test_loss_and_gradient_equal_trl(loss_type, beta, weighted):
    """On the same tensors, off policy (ratios around and beyond the clip), ragged lengths. With
    credit: TRL takes advantages [B, T], so its loss checks the weighted one too."""
    batch, args = random_batch(rows=16), flags(loss_type=loss_type, beta=beta)
    noise = torch.randn(batch.old_logp.shape, generator=torch.Generator().manual_seed(5))
    logp = torch.where(batch.mask, batch.old_logp + 0.3 * noise, 0.0)
    if weighted:
        batch.credit = trainer.normalise(batch.scores, batch.mask, 1.0)
    advantages = batch.advantages[:, None] * batch.credit if weighted else None
    ours = loss_and_gradient(args, batch, logp, batch.old_logp)
    theirs = trl_loss(batch, logp, batch.old_logp, loss_type, beta, advantages)
    assert ours[0] == pytest.approx(theirs[0], abs=1e-6)
    assert torch.allclose(ours[1], theirs[1], atol=1e-7)
    assert 0 < ours[2].sum() < batch.mask.sum()  # some tokens are clipped


def test_dapo_divides_by_the_mean_tokens_of_the_rollouts_updates(make_run):
    """As TRL does: two updates of unequal lengths, each over half of the generation's tokens."""
    run = make_run(loss_type="dapo", steps_per_generation=2, max_completion_length=80, adapter=0.0)
    run.grader = ByLength()
    data = ([Problem("x", "1")] * 4, prompts_of(run, 4))
    batch, _ = trainer.collect(run, data, {})
    parts = trainer.micro_batches(run.args, batch)
    tokens = [int(batch.mask[part].sum()) for part in (slice(0, 8), slice(8, 16))]
    assert tokens[0] != tokens[1] and batch.update_tokens == sum(tokens) / 2
    for (micro,) in parts:
        micro.credit, noise = micro.mask.float(), 0.1 * torch.randn(micro.mask.shape)
        logp = micro.sampled_logp + noise
        counts = (8, micro.update_tokens)
        ours = loss_and_gradient(run.args, micro, logp, micro.sampled_logp, *counts)
        theirs = trl_loss(micro, logp, micro.sampled_logp, "dapo", generation=(2, sum(tokens)))
        assert ours[0] == pytest.approx(theirs[0], abs=1e-6)
        assert torch.allclose(ours[1], theirs[1], atol=1e-7)


@pytest.mark.parametrize("loss_type", ["grpo", "dapo"])
def test_negative_weight_scales_the_gradient_of_what_is_below_the_mean(make_run, loss_type):
    """The gradient is linear in it, and at 0 that of TRL's loss with those advantages at 0: rows
    are left out of the work, not of what the loss is divided by."""
    gradients, kept = {}, {}
    for weight in (0.0, 0.25, 1.0):
        run = make_run(negative_weight=weight, loss_type=loss_type, max_completion_length=80)
        run.grader = ByLength()
        data = ([Problem("x", "1")] * 2, prompts_of(run, 2))
        batch, _ = trainer.collect(run, data, {})
        mask, advantages = batch.loss_mask, batch.advantages
        ((micro,),) = trainer.micro_batches(run.args, batch)
        kept[weight], micro.credit, logp = len(micro.rows), micro.mask.float(), micro.sampled_logp
        counts = (len(batch.rows), batch.update_tokens)
        ours = loss_and_gradient(run.args, micro, logp, logp, *counts)[1]
        gradients[weight] = torch.zeros_like(batch.sampled_logp)
        for row, values in zip(micro.rows.tolist(), ours, strict=True):
            gradients[weight][batch.rows.tolist().index(row), : len(values)] = values
    assert kept[1.0] == kept[0.25] == len(mask) > kept[0.0] == int((advantages > 0).sum())
    assert (gradients[0.0] != 0).any() and not torch.allclose(gradients[0.0], gradients[1.0])
    quarter = 0.75 * gradients[0.0] + 0.25 * gradients[1.0]
    assert torch.allclose(gradients[0.25], quarter, atol=1e-8)
    logp, batch.advantages = batch.sampled_logp, advantages.clamp(min=0)
    batch.loss_mask = batch.mask
    theirs = trl_loss(batch, logp, logp, loss_type)[1]
    assert torch.allclose(gradients[0.0], theirs, atol=1e-7)


class ByLength:
    """A grader that pays for long texts: no group is constant."""

    timeouts = 0

    def grade(self, texts: list[str], answers: list[str]) -> list[float]:
        return [float(len(text)) for text in texts]


def test_policy_gradient_on_a_model_of_two_tokens():
    """One token, two actions, logits (x, 0): grad of -A log pi(a) in x is -A (1[a=0] - p0)."""
    x = torch.tensor(0.3, requires_grad=True)
    logits = torch.stack([x, torch.zeros(())])
    actions, advantages = torch.tensor([0, 0, 1, 0]), torch.tensor([1.0, -0.5, 2.0, 0.0])
    logp = logits.log_softmax(0)[actions][:, None]  # [4, 1]
    batch = random_batch(rows=4, length=1)
    batch.advantages = advantages
    args = flags()
    scale = trainer.token_scale(args, batch.loss_mask, 4, 4)
    trainer.policy_loss(args, batch, logp, logp.detach(), scale)[0].backward()
    p0 = math.exp(0.3) / (math.exp(0.3) + 1)
    expected = -(1.0 * (1 - p0) - 0.5 * (1 - p0) + 2.0 * (0 - p0) + 0.0) / 4
    assert x.grad.item() == pytest.approx(expected, rel=1e-5)


def test_uniform_is_plain_grpo_bit_for_bit(make_run):
    batch = random_batch()
    run = make_run(credit="uniform")
    batch.scores = torch.ones_like(batch.old_logp)
    trainer.assign_credit(run, [batch], {})
    assert torch.equal(batch.weights, batch.mask.float())
    logp = batch.old_logp + 0.3 * torch.randn(
        batch.old_logp.shape, generator=torch.Generator().manual_seed(2)
    )
    loss, gradient, _ = loss_and_gradient(run.args, batch, logp, batch.old_logp)
    leaf = logp.clone().requires_grad_()
    ratio = torch.where(batch.mask, leaf - batch.old_logp, 0.0).exp()
    a = batch.advantages[:, None]
    plain = -torch.min(ratio * a, ratio.clamp(0.8, 1.2) * a)
    plain = (plain * (batch.mask / batch.mask.sum(1, keepdim=True) / 8)).sum()
    plain.backward()
    assert loss == plain.item() and torch.equal(gradient, leaf.grad)


def test_no_split_changes_the_loss():
    """PITFALLS 7: normalisers are those of the whole update, not of a micro-batch."""
    for loss_type in ("grpo", "dapo", "dr_grpo"):
        batch, args = random_batch(), flags(loss_type=loss_type)
        logp = batch.old_logp + 0.1
        tokens = float(batch.loss_mask.sum())
        whole, gradient, _ = loss_and_gradient(args, batch, logp, batch.old_logp)
        parts = torch.zeros_like(gradient)
        total = 0.0
        for index in torch.arange(8).split(3):
            micro = batch.select(index)
            width = micro.mask.shape[1]
            pair = logp[index, :width], micro.old_logp
            loss, g, _ = loss_and_gradient(args, micro, *pair, 8, tokens)
            parts[index, :width] += g
            total += loss
        assert total == pytest.approx(whole, abs=1e-6)
        assert torch.allclose(parts, gradient, atol=1e-7)


def test_truncated_completions_follow_the_flag(make_run):
    """PITFALLS 4: left out of the loss when asked; an all-truncated batch gives a finite loss."""
    run = make_run(mask_truncated_completions=True)
    batch, _ = trainer.collect(run, ([Problem("x", "1")] * 4, prompts_of(run)), {})
    assert (batch.loss_mask.any(1) == ~batch.truncated).all() and batch.truncated.any()
    batch.truncated[:], batch.loss_mask = True, torch.zeros_like(batch.mask)
    for run.args.loss_type in ("grpo", "dapo", "dr_grpo"):
        batch.credit, logp = batch.mask.float(), batch.sampled_logp
        loss, gradient, _ = loss_and_gradient(run.args, batch, logp, logp, 8, 0.0)
        assert loss == 0 and (gradient == 0).all()


def test_the_clip_fraction_counts_trained_tokens_alone(make_run):
    """Of what is trained all is clipped, though all but one completion are left out as truncated;
    then half of the completions' tokens."""
    run, batch = make_run(num_iterations=2, epsilon=1e-6), random_batch()
    batch.truncated[1:] = True
    batch.loss_mask = batch.mask & ~batch.truncated[:, None]
    batch.old_logp = torch.where(batch.mask, -100.0, 0.0)  # all ratios are huge
    batch.advantages = torch.ones(8)
    row = trainer.update(run, [batch])
    assert row["clip_fraction"] == row["clip_fraction_sequence"] == 1
    batch.loss_mask, batch.advantages[:4] = batch.mask, -1.0  # a huge ratio is no clip there
    row = trainer.update(run, [batch])
    assert row["clip_fraction_sequence"] == 1 / 2
    assert row["clip_fraction"] == pytest.approx(float(batch.mask[4:].sum() / batch.mask.sum()))


def test_constant_groups_give_exactly_no_gradient(make_run):
    """PITFALLS 9: every completion wrong: the update moves nothing; and a row says so."""
    run = make_run()
    data = ([Problem("x", "nothing says this")] * 4, prompts_of(run))
    batch, _ = trainer.collect(run, data, {})
    ((micro,),) = trainer.micro_batches(run.args, batch)
    assert len(micro.rows) == 1  # for DDP
    trainer.score(run, [micro], {})
    before = [p.clone() for p in run.model.parameters() if p.requires_grad]
    row = trainer.update(run, [micro])
    assert row["grad_norm"] == 0 and row["loss"] == 0
    after = [p for p in run.model.parameters() if p.requires_grad]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert rollout_metrics(run, batch, 1.0)["zero_std_share"] == 1


@pytest.mark.parametrize("loss_type", ["grpo", "dapo", "dr_grpo"])
@pytest.mark.parametrize(("beta", "rows"), [(0.0, 3), (0.1, 8)])
def test_rows_without_gradient_are_dropped_and_nothing_changes(make_run, loss_type, beta, rows):
    """PITFALLS 30: at advantage 0 there is none but the KL's; the rows count in the normalisers all
    the same. Against the whole batch, whose loss is written here."""
    run, batch = make_run(max_grad_norm=0, beta=beta, loss_type=loss_type), random_batch()
    batch.advantages[2:7], batch.old_logp = 0.0, trainer.NOT_SET
    ((micro,),) = trainer.micro_batches(run.args, batch)
    assert len(micro.rows) == rows
    for x in (micro, batch):
        trainer.score(run, [x], {})
    scale = trainer.token_scale(run.args, batch.loss_mask, 8, batch.update_tokens)
    logp = trainer.training_forward(run, batch)
    trainer.policy_loss(run.args, batch, logp, logp.detach(), scale)[0].backward()
    trained, found = [p for p in run.model.parameters() if p.requires_grad], []
    whole = [p.grad.clone() for p in trained]
    run.optimizer.zero_grad()
    run.optimizer.step = lambda: found.extend(p.grad for p in trained)
    trainer.update(run, [micro])
    assert max(float(g.abs().max()) for g in whole) > 1e-4
    for ours, theirs in zip(found, whole, strict=True):
        assert (ours - theirs).norm() < 1e-5 * theirs.norm()


def test_no_pass_that_nobody_needs(make_run):
    """Forwards of a step, by what asks for them: the update's own, the log-probs before the first
    of several updates, the base for beta or ARCA, which compares two more. Each reads the prompts,
    then the completions."""
    for credit, beta, iterations, passes in (
        ("uniform", 0, 1, 1), ("surprisal", 0, 1, 1), ("entropy_reduction", 0, 1, 1),
        ("probability", 0, 1, 1), ("arca", 0, 1, 3),
        ("uniform", 0.1, 1, 2), ("uniform", 0, 2, 2), ("arca", 0.1, 2, 5),
    ):  # fmt: skip
        run, calls = make_run(credit=credit, beta=beta, num_iterations=iterations), []
        batch = random_batch()
        batch.old_logp = trainer.NOT_SET
        run.model.get_base_model().model.register_forward_hook(lambda *_, c=calls: c.append(1))
        trainer.score(run, [batch], {})
        trainer.update(run, [batch])
        assert len(calls) == 2 * passes, (credit, beta, iterations)


def test_the_first_update_is_at_a_share_of_the_peak_and_the_last_above_0(make_run):
    """A warm-up of 3 is 1/3, 2/3, 1 of the rate: no update is at rate 0."""
    run, batch, rates = make_run(warmup_steps=3, max_steps=6, learning_rate=0.3), random_batch(), []
    batch.old_logp = trainer.NOT_SET
    trainer.score(run, [batch], {})
    for _ in range(6):
        rates.append(trainer.update(run, [batch])["learning_rate"])
    assert rates[:3] == pytest.approx([0.1, 0.2, 0.3]) and rates[2] > rates[3] > rates[5] > 0


def test_duplicate_prompts_stay_separate_groups(make_run):
    """PITFALLS 9: groups are by place, not by text, and their samples differ."""
    run = make_run()
    batch, _ = trainer.collect(run, ([Problem("x", "1")], prompts_of(run)[:1]), {})
    assert batch.rows.sort().values.tolist() == list(range(8))
    assert len(set(texts_of(run, batch))) > 4


def test_micro_batches_of_an_update_are_its_own_rows_by_length(make_run):
    """Two updates of two micro-batches each: all rows once, each update's completions its own
    however long, and like lengths together."""
    run = make_run(steps_per_generation=4, max_completion_length=80, adapter=0.0)
    run.args.gradient_accumulation_steps, run.grader = 2, ByLength()
    data = ([Problem("x", "1")] * 8, prompts_of(run, 8))
    batch, problem_of_row = trainer.collect(run, data, {})
    batch.advantages[5], batch.advantages[20:] = 0.0, 0.0
    updates = trainer.micro_batches(run.args, batch)
    kept = [sorted(torch.cat([m.rows for m in micros]).tolist()) for micros in updates]
    assert kept == [[i for i in range(16) if i != 5], [*range(16, 20)]]
    assert [[len(m.rows) for m in micros] for micros in updates] == [[8, 7], [4]]
    assert sorted(problem_of_row) == [*range(32)]
    first, second = updates[0]
    assert first.attention.sum(1).max() <= second.attention.sum(1).min()


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_the_first_update_has_ratio_one(make_run, monkeypatch, dropout):
    """PITFALLS 6: dropout or train / eval mode must not differ between the two passes, for
    micro-batches of different lengths too."""
    run, batch = make_run(lora_dropout=dropout, num_iterations=2), random_batch()
    micros = [batch.select(index) for index in torch.arange(8).split(4)]
    trainer.score(run, micros, {})
    gaps, loss = [], trainer.policy_loss

    def spy(args, micro, logp, old_logp, scale):
        gaps.append((logp.detach() - old_logp)[micro.mask].abs().max().item())
        return loss(args, micro, logp, old_logp, scale)

    monkeypatch.setattr(trainer, "policy_loss", spy)
    trainer.update(run, micros)
    assert gaps == [0.0, 0.0]
    micro = micros[0]
    logp = trainer.training_forward(run, micro)
    run.policy.eval()
    with torch.no_grad():  # dropout acts in training, and never in rollouts and scores
        gap = (run.policy(micro)[0] - logp)[micro.mask]
    assert (gap.abs().max() > 1e-3) == (dropout > 0)


def test_a_second_iteration_is_clipped_against_the_first(make_run):
    """num_iterations: the old log-probs stay those of the policy that sampled."""
    run = make_run(num_iterations=2, learning_rate=0.1, warmup_steps=0, max_steps=4)
    batch = random_batch()
    trainer.score(run, [batch], {})
    first, second = trainer.update(run, [batch]), trainer.update(run, [batch])
    assert first["clip_fraction"] == 0 < second["clip_fraction"] <= second["clip_fraction_sequence"]


def test_kl_pulls_towards_the_base(make_run):
    """beta > 0: at advantage 0 the gradient is the k3 KL's alone, as autograd has it."""
    batch, args = random_batch(), flags(beta=0.5)
    batch.advantages = torch.zeros(8)
    loss, gradient, _ = loss_and_gradient(args, batch, batch.old_logp, batch.old_logp)
    leaf = batch.old_logp.clone().requires_grad_()
    d = batch.base_logp - leaf
    k3 = (d.exp() - d - 1) * batch.mask / batch.mask.sum(1, keepdim=True)
    (0.5 * k3.sum() / 8).backward()
    assert loss > 0 and torch.allclose(gradient, leaf.grad, atol=1e-7)


# ------------------------------------------------------------------------------ whole programs
def launch(tmp_path, *flags, processes=0):
    command = [sys.executable, "grpo_arca.py"]
    if processes:
        command = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu"]
        command += ["--num_processes", str(processes), "--main_process_port", "0", "grpo_arca.py"]
    command += ["--output_dir", str(tmp_path / "out"), *map(str, flags)]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=280, env=os.environ
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done


SMALL = ("--max_steps", 2, "--max_eval_samples", 4, "--num_generations_eval", 2, "--eval_steps", 1)


def test_the_script_end_to_end(tmp_path):
    """A few steps of the embedded default: every promised file, readable by what reads it."""
    few = ("--gradient_accumulation_steps", 1, "--per_device_train_batch_size", 8)
    done = launch(tmp_path, *SMALL, *few)
    out = tmp_path / "out"
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "reward" in row] == [1, 2]
    assert [row["step"] for row in rows if "eval" in row] == [0, 1, 2]
    wanted = (
        "reward rewards/accuracy_reward/mean completion_length truncated_share zero_std_share "
        "entropy kl clip_fraction clip_fraction_sequence grad_norm learning_rate weight_gini "
        "weight_effn sampling_gap seconds_rollout "
        "seconds_score seconds_credit seconds_update tokens_per_second peak_memory_gb loss "
        "skipped_update reward_timeouts rollout_tokens"
    )
    for row in rows:
        if "reward" in row:
            assert set(wanted.split()) <= set(row) and None not in row.values()
            assert row["sampling_gap"] < 1e-4
    summary = json.loads((out / "summary.json").read_text())
    assert set(summary["before"]) == {"greedy_accuracy", "sampled_accuracy", "pass@2"}
    assert summary["steps"] == 2
    for name in ("config.json", "curves.png", "credit.html", "completions.jsonl"):
        assert (out / name).stat().st_size > 100 and name in done.stdout
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(TINY), out / "adapter")
    assert any(p.abs().sum() > 0 for n, p in model.named_parameters() if "lora_B" in n)
    assert "Warning" not in done.stderr + done.stdout and "cut off" not in done.stderr
    assert done.stderr.startswith("grpo_arca.py: arca credit for "), done.stderr[:600]


def test_local_gsm8k_file_end_to_end(run_main, rows_of, tmp_path):
    source = ROOT.parent / "shared/data/gsm8k_test.jsonl"
    if not source.exists():
        pytest.skip("no GSM8K in ../shared/data")
    (tmp_path / "gsm8k.jsonl").write_text("\n".join(source.read_text().splitlines()[:60]))
    code, out, err = run_main(
        dataset_name=tmp_path / "gsm8k.jsonl", credit="divergence", max_completion_length=32,
        gradient_accumulation_steps=2, num_iterations=2, beta=0.01, max_steps=2,
    )  # fmt: skip
    assert code == 0 and "summary.json" in out, err
    assert "gsm8k.jsonl (5" in err and len(rows_of()) == 2


@pytest.mark.slow  # test_processes.py has the gradients
def test_two_processes_under_accelerate_launch(tmp_path):
    """PITFALLS 8: and one process with two micro-batches gives the same samples and adapter."""
    small = ("--max_steps", 2, "--max_eval_samples", 2, "--num_generations_eval", 2)
    common = (*small, "--num_generations", 8, "--max_completion_length", 64, "--warmup_steps", 0)
    size, steps = "--per_device_train_batch_size", "--gradient_accumulation_steps"
    launch(tmp_path / "two", *common, size, 8, steps, 1, processes=2)
    launch(tmp_path / "one", *common, size, 4, steps, 4)
    from safetensors.torch import load_file

    logs, adapters = [], []
    for name in ("two", "one"):
        out = tmp_path / name / "out"
        rows = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
        logs.append([row for row in rows if "reward" in row])
        adapters.append(load_file(out / "adapter/adapter_model.safetensors"))
    for two, one in zip(*logs, strict=True):
        for key in ("reward", "completion_length", "zero_std_share", "rollout_tokens"):
            assert two[key] == one[key], key
        assert one["grad_norm"] > 0
        assert two["loss"] == pytest.approx(one["loss"], abs=1e-5)
        assert two["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-3)
    for name, value in adapters[0].items():
        assert torch.allclose(value, adapters[1][name], atol=2e-4), name


@pytest.mark.slow  # the C++ compiler takes a minute and more
def test_compiled_layers_compute_the_same_without_graph_breaks_or_recompiles(make_run):
    """Log-probs, entropies, those of the base, gradients and samples; batches of many lengths.
    With the adapter, without it, in training the first layer (its inputs have no gradient) and
    the others: all layers share their graphs, and rollouts use none."""
    results, graphs = [], []
    for compiled in (False, True):
        run, found = make_run(torch_compile=compiled), []
        torch._dynamo.utils.counters.clear()
        for seed, (prompt, length) in enumerate([(6, 12), (9, 20), (4, 15), (8, 33)]):
            batch = random_batch(prompt=prompt, length=length, seed=seed)
            run.policy.eval()
            with torch.no_grad():
                found += run.policy(batch)
                with run.model.disable_adapter():
                    found.append(run.policy(batch)[0])
            run.policy.zero_grad()
            logp = trainer.training_forward(run, batch)
            logp[batch.mask].sum().backward()
            found += [logp.detach()] + [p.grad for p in run.model.parameters() if p.requires_grad]
            graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
        randomise_adapter(run.model, 0.0)  # it stops in time, so that rows are dropped
        for run.args.rollout_weights in ("merged", "adapter"):
            found.append(sample(run, prompts_of(run, 16), fixed(16, 80)).ids)
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
        results.append(found)
    assert graphs == [0] * 5 + [4] * 5
    assert not torch._dynamo.utils.counters["graph_break"]
    for plain, same in zip(*results, strict=True):
        assert (plain - same).abs().max() <= 1e-4 * max(1.0, float(plain.abs().max()))


@pytest.mark.slow  # importing the compiler alone takes ten seconds
@pytest.mark.parametrize("checkpointing", [False, True])
def test_compiled_layers_keep_no_dequantised_weight(make_run, checkpointing):
    """For backward they keep activations and packed weights, with checkpointing little but the
    layer's input. The backend divides forward from backward as the default one does, and leaves
    out the minute of the C++ compiler."""
    run = make_run(gradient_checkpointing=checkpointing)
    base, kept = run.model.get_base_model().base_model, []
    layer = base.layers[0].train()
    layer.compile(dynamic=True, backend="aot_eager_decomp_partition")
    hidden = torch.randn(8, 33, base.config.hidden_size, requires_grad=True)
    positions = base.rotary_emb(hidden, torch.arange(33)[None])
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        layer(hidden, attention_mask=None, position_embeddings=positions)
    sizes = {m.weight.quant_state.shape.numel() for m in layer.modules() if packed(m)}
    assert len(sizes) > 2 and any(t.dtype == torch.uint8 for t in kept)
    own = {p.data_ptr() for p in layer.parameters()}
    floats = [t for t in kept if t.is_floating_point() and t.data_ptr() not in own]
    assert not [t.shape for t in floats if t.dim() == 2 and t.numel() in sizes]
    activations = sum(t.nbytes for t in floats)
    if checkpointing:
        assert hidden.nbytes <= activations < 1.5 * hidden.nbytes
    else:
        assert activations > 8 * hidden.nbytes
