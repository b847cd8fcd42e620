"""The trainer: sampling, log-probs, masks, normalisers, the loss. Docstrings name the pitfalls."""

import contextlib
import json
import math
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, TINY, random_batch, randomise_adapter
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    GPT2Config,
    GPT2LMHeadModel,
    MistralConfig,
    MistralForCausalLM,
)
from transformers.generation import TopKLogitsWarper, TopPLogitsWarper
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

import grpo_arca as trainer
from common.metrics import rollout_metrics

FULL = {"temperature": 1.0, "top_k": 0, "top_p": 1.0}


def prompts_of(run, count=4):
    texts = ["Start with 5, add 7, double it, subtract 3.", "Start with 40, subtract 12.", "Hello"]
    return [run.tokenizer(texts[i % 3] + " " * (i % 2)).input_ids for i in range(count)]


# ------------------------------------------------------------------------------------ sampling
def test_sample_tokens_follows_the_distribution():
    logits = torch.tensor([[1.0, 0.0, -1.0, 2.0]])
    grid = (torch.arange(20000) + 0.5) / 20000
    token, logp = trainer.sample_tokens(logits.expand(20000, 4), grid, temperature=0.7)
    expected = (logits[0] / 0.7).softmax(0)
    assert torch.allclose(token.bincount(minlength=4) / 20000, expected, atol=1e-3)
    assert torch.allclose(logp, expected.log()[token], atol=1e-6)


@pytest.mark.parametrize("size", [400, 4000, 5000, 30_000])
def test_sample_tokens_never_picks_the_impossible(size):
    """Rounding in the cumulative sum must not let u near 0 or 1 pick a token of probability 0."""
    logits = torch.randn(500, size, generator=torch.Generator().manual_seed(0))
    logits[:, 0] = logits[:, -200:] = -torch.inf
    for u in (0.0, 1 - 2**-24):
        token, logp = trainer.sample_tokens(logits, torch.full((500,), u))
        assert (token > 0).all() and (token < size - 200).all() and logp.isfinite().all()
    mass = logits.softmax(-1)
    ends = torch.cat([torch.zeros(1, 500), torch.ones(1, 500), torch.rand(50, 500)])
    for u in ends:  # 1: what rounding makes of the share within a block
        place, share = trainer.draw(mass, u[:, None])
        assert (mass.gather(1, place) > 0).all() and ((share >= 0) & (share <= 1)).all()


@pytest.mark.parametrize("size", [448, 128_256, 151_937])
@pytest.mark.parametrize(("top_k", "top_p"), [(0, 1.0), (50, 1.0), (0, 0.9)])
def test_tokens_of_large_vocabularies_lie_where_the_exact_distribution_says(size, top_k, top_p):
    """Against the inverse CDF in float64 over all tokens in the order of their ids."""
    generator = torch.Generator().manual_seed(size)
    logits, u = 3 * torch.randn(16, size, generator=generator), torch.rand(16, generator=generator)
    token, logp = trainer.sample_tokens(logits, u, 0.7, top_k, top_p)
    exact = (logits.double() / 0.7).log_softmax(-1)
    ordered, index = exact.exp().sort(-1, descending=True)
    keep = torch.arange(size) < (top_k or size)
    ordered = ordered * keep / (ordered * keep).sum(-1, keepdim=True)
    ordered = ordered * (ordered.cumsum(-1) - ordered < top_p)
    mass = torch.zeros_like(exact).scatter(1, index, ordered)
    cdf = (mass / mass.sum(-1, keepdim=True)).cumsum(-1).gather(1, token[:, None]).squeeze(1)
    below = cdf - (mass / mass.sum(-1, keepdim=True)).gather(1, token[:, None]).squeeze(1)
    assert (below <= u + 1e-5).all() and (u <= cdf + 1e-5).all()
    assert (mass.gather(1, token[:, None]) > 0).all()
    assert torch.allclose(logp.double(), exact.gather(1, token[:, None]).squeeze(1), atol=1e-4)


@pytest.mark.parametrize(("top_k", "top_p"), [(5, 1.0), (0, 0.8), (7, 0.6), (1, 1.0), (0, 1e-6)])
def test_top_k_and_top_p_keep_what_transformers_keeps(top_k, top_p):
    logits = 2 * torch.randn(3, 50, generator=torch.Generator().manual_seed(1))
    warped = logits / 0.9
    warped = TopKLogitsWarper(top_k)(None, warped) if top_k else warped
    warped = TopPLogitsWarper(top_p)(None, warped) if top_p < 1 else warped
    grid = (torch.arange(8000) + 0.5) / 8000
    for row in range(3):
        rows = logits[row].expand(8000, 50)
        token, logp = trainer.sample_tokens(rows, grid, 0.9, top_k, top_p)
        frequency = token.bincount(minlength=50) / 8000
        assert torch.allclose(frequency, warped[row].softmax(0), atol=2e-3)
        assert torch.allclose(logp, (logits[row] / 0.9).log_softmax(0)[token], atol=1e-5)


def test_moments_made_before_the_first_update_are_adamws_own(make_run):
    run = make_run(learning_rate=0.01, weight_decay=0.1)
    trained = [p for p in run.model.parameters() if p.requires_grad]
    twins = [p.detach().clone().requires_grad_() for p in trained]
    plain = torch.optim.AdamW(twins, lr=run.scheduler.get_last_lr()[0], weight_decay=0.1)
    assert len(run.optimizer.state) == len(trained) and all(p.grad is None for p in trained)
    for _ in range(2):
        for p, twin in zip(trained, twins, strict=True):
            p.grad = torch.randn_like(p)
            twin.grad = p.grad.clone()
        run.optimizer.step()
        plain.step()
    for p, twin in zip(trained, twins, strict=True):
        ours, theirs = run.optimizer.state[p], plain.state[twin]
        assert torch.equal(p, twin) and ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize("rollout_weights", ["merged", "adapter"])
def test_greedy_generation_equals_transformers(make_run, rollout_weights):
    """The decode loop over the static cache against `generate`, prompts of different lengths."""
    run = make_run(rollout_weights=rollout_weights)
    prompts = prompts_of(run)
    u = torch.zeros(len(prompts), 24)
    run.policy.eval()
    out = run.sample(prompts, u, temperature=0)
    for row, prompt in enumerate(prompts):
        expected = run.model.generate(
            input_ids=torch.tensor([prompt]), max_new_tokens=24, do_sample=False, eos_token_id=2
        )[0, len(prompt) :]
        ours = out.ids[row, out.prompt_width :][out.attention[row, out.prompt_width :]]
        assert torch.equal(ours, expected)
        assert out.stopped[row] == (ours[-1] == 2)


def test_finished_lines_are_dropped_and_nothing_else_changes(make_run, monkeypatch):
    """Each completion as if it were alone, where no line can be dropped."""
    run = make_run(max_completion_length=80, adapter=0.0)
    prompts = prompts_of(run, 16)
    u = trainer.row_uniforms(run.args, "rollout", 0, torch.arange(16), 80)
    sizes, inner = [], trainer.Decoder.shrink

    def shrink(decoder, n, to, end):
        sizes.append((n, to))
        inner(decoder, n, to, end)

    monkeypatch.setattr(trainer.Decoder, "shrink", shrink)
    whole = run.sample(prompts, u, **FULL)
    texts = whole.texts(run.tokenizer)
    assert len(sizes) >= 2 and all(to <= 0.75 * n for n, to in sizes)
    sizes.clear()
    for i, prompt in enumerate(prompts):
        alone = run.sample([prompt], u[i : i + 1], **FULL)
        assert alone.texts(run.tokenizer) == [texts[i]]
        length = alone.logp.shape[1]
        assert torch.allclose(alone.logp[0], whole.logp[i, :length], atol=1e-4)
        assert (whole.logp[i, length:] == 0).all() and alone.stopped[0] == whole.stopped[i]
    assert not sizes


def test_a_decoder_can_be_used_again_with_shorter_prompts(make_run):
    """As on a GPU, where the captured graphs belong to a decoder's buffers."""
    run = make_run(adapter=0.0)
    model, prompts, u = run.dense, prompts_of(run), torch.rand(4, 24)
    trainer.merge(run.model, model)
    wide = max(map(len, prompts)) + 5
    decoder = trainer.Decoder(model, run.eos_ids, 0, (4, wide, 24), FULL)
    decoder.run([[7] * wide] * 4, 1 - u)  # leaves its traces in every buffer
    again, fresh = decoder.run(prompts, u), run.sample(prompts, u, **FULL)
    assert again.texts(run.tokenizer) == fresh.texts(run.tokenizer)
    assert torch.equal(again.attention.sum(1), fresh.attention.sum(1))


def test_prompts_are_read_once_and_unused_columns_never(make_run, monkeypatch):
    """What a rollout computes: a prefill of each different prompt, for all its samples, and steps
    that attend to the columns in use, in whole blocks."""
    run = make_run(max_completion_length=80, rollout_weights="adapter")
    prompts, u, read = prompts_of(run, 24), torch.rand(24, 80), []
    inner = run.model.get_base_model().forward

    def forward(input_ids, attention_mask, **inputs):
        read.append((*input_ids.shape, attention_mask.shape[-1]))
        return inner(input_ids=input_ids, attention_mask=attention_mask, **inputs)

    monkeypatch.setattr(run.model.get_base_model(), "forward", forward)
    out = run.sample(prompts, u, **FULL)
    (rows, width, columns), *steps = read
    assert rows == len({tuple(prompt) for prompt in prompts}) == 6
    assert width == columns == out.prompt_width and len(steps) > 40
    for t, (_, tokens, columns) in enumerate(steps, start=1):
        assert tokens == 1 and width + t <= columns < width + t + 16
    alone = run.sample(prompts[13:14], u[13:14], **FULL)
    assert alone.texts(run.tokenizer) == out.texts(run.tokenizer)[13:14]


def test_a_sliding_window_is_counted_anew_in_each_rollout(capsys):
    """Transformers counts its tokens outside the tensors; and one that is too short is refused."""
    torch.manual_seed(0)
    config = MistralConfig(
        vocab_size=448, hidden_size=32, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, head_dim=16, sliding_window=64,
    )  # fmt: skip
    model, u = MistralForCausalLM(config).eval(), torch.rand(3, 24)
    prompts, shape = [[5, 6, 7, 8, 9], [5, 6], [11]], (3, 8, 24)
    decoder = trainer.Decoder(model, torch.tensor([0]), 0, shape, FULL)
    first, *others = [decoder.run(prompts, u) for _ in range(10)]
    for other in others:
        assert torch.equal(other.ids, first.ids) and torch.equal(other.logp, first.logp)
    config.sliding_window = 16
    with pytest.raises(SystemExit):
        trainer.Decoder(model, torch.tensor([0]), 0, shape, FULL)
    assert "lower --max_completion_length" in capsys.readouterr().err


class FakeGraph:
    """A CUDA graph without CUDA: what is recorded has no effect until it is replayed."""

    recorded: list["FakeGraph"] = []

    def record(self, decoder, pool):
        assert pool in (None, "pool of the first") and (pool is None) == (not self.recorded)
        self.recorded.append(self)
        buffers = [v for v in vars(decoder).values() if isinstance(v, torch.Tensor)]
        for layer in decoder.cache.layers:
            buffers += [layer.keys, layer.values, layer.cumulative_length]
        before, steps, inner = [b.clone() for b in buffers], [], decoder.step
        decoder.step = lambda *key: (steps.append(key), inner(*key))
        yield
        del decoder.step
        for buffer, value in zip(buffers, before, strict=True):
            buffer.copy_(value)
        self.replay = lambda: [inner(*key) for key in steps]

    def pool(self) -> str:
        return "pool of the first"


def test_captured_steps_are_recorded_once_and_replayed(make_run, monkeypatch):
    """What a CPU can test of the captured decode loop: a graph for each number of lines and of
    columns in use, kept as long as the cache finds its place again, and the same samples."""
    run = make_run(max_completion_length=80, adapter=0.0)
    model, prompts = run.dense, prompts_of(run, 16)
    trainer.merge(run.model, model)
    monkeypatch.setattr(FakeGraph, "recorded", [])
    shape = (16, max(map(len, prompts)), 80)
    decoder = trainer.Decoder(model, run.eos_ids, 0, shape, FULL)
    graph = contextlib.contextmanager(lambda g, pool: g.record(decoder, pool))
    monkeypatch.setattr(torch.cuda, "CUDAGraph", FakeGraph)
    monkeypatch.setattr(torch.cuda, "graph", graph)
    decoder.capture = True
    empty, memories = torch.empty, [torch.zeros(2**20) for _ in range(2)]

    def allocate(*shape, **how):
        large = isinstance(shape[0], int) and shape[0] > 2**16
        return memories[0][: shape[0]].fill_(torch.nan) if large else empty(*shape, **how)

    monkeypatch.setattr(torch, "empty", allocate)
    for rollout in range(5):
        plenty = rollout == 0
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _, free=plenty: (free * 2**40, 0))
        if rollout == 4:  # the cache is elsewhere
            memories.pop(0)
            FakeGraph.recorded.clear()
        keys = [layer.keys is None for layer in decoder.cache.layers]  # between rollouts
        assert keys == [rollout != 1] * 4
        u = trainer.row_uniforms(run.args, "rollout", rollout, torch.arange(16), 80)
        ours, plain = decoder.run(prompts, u), run.sample(prompts, u, **FULL)
        assert torch.equal(ours.ids, plain.ids) and torch.equal(ours.logp, plain.logp)
        lines, columns = map(set, zip(*decoder.graphs, strict=True))
        assert max(lines) == 16 and len(lines) > 1 and len(columns) > 3  # lines were dropped
        assert len(FakeGraph.recorded) == len(decoder.graphs)


@pytest.mark.parametrize("queries", [1, 5])
def test_grouped_attention_is_attention_with_repeated_keys(queries):
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(3, 6, queries, 8, generator=generator)
    key, value = torch.randn(2, 3, 2, 7, 8, generator=generator)
    mask = torch.where(torch.rand(3, 1, queries, 7, generator=generator) < 0.3, -1e30, 0.0)
    expected = ((query @ key.repeat_interleave(3, 1).mT) * 0.3 + mask).softmax(-1)
    expected = (expected @ value.repeat_interleave(3, 1)).transpose(1, 2)
    module = SimpleNamespace(num_key_value_groups=3, is_causal=True)
    got, _ = trainer.grouped_attention(module, query, key, value, mask, scaling=0.3)
    assert torch.allclose(got, expected, atol=1e-5)


@pytest.mark.parametrize("rollout_weights", ["merged", "adapter"])
def test_samples_are_a_function_of_the_row_and_logps_are_recomputed(make_run, rollout_weights):
    """Rows sampled together, alone, or in another order are the same; PITFALLS 12: and the
    log-probs that the decode loop saw are those of the training forward."""
    run = make_run(temperature=0.8, rollout_weights=rollout_weights)
    prompts, rows = prompts_of(run, 8), torch.arange(8)
    u = trainer.row_uniforms(run.args, "rollout", 3, rows, 24)
    run.policy.eval()
    sampling = FULL | {"temperature": 0.8}
    whole = run.sample(prompts, u, **sampling)
    texts = whole.texts(run.tokenizer)
    assert len(set(texts)) > 4
    for i in (0, 5):
        assert run.sample([prompts[i]], u[i : i + 1], **sampling).texts(run.tokenizer) == [texts[i]]
    back = run.sample(prompts[::-1], u.flip(0), **sampling).texts(run.tokenizer)
    assert back == texts[::-1]
    with torch.no_grad():
        stats = run.policy(whole.ids, whole.attention, whole.prompt_width)
    mask = whole.attention[:, whole.prompt_width :]
    assert (stats.logp - whole.logp)[mask].abs().max() < 1e-4
    assert torch.equal(u[2:4], trainer.row_uniforms(run.args, "rollout", 3, rows[2:4], 24))
    assert not torch.equal(u, trainer.row_uniforms(run.args, "rollout", 4, rows, 24))
    assert len({tuple(row.tolist()) for row in u}) == 8  # a stream of its own for each row


@pytest.mark.parametrize(("weights", "most"), [("merged", 0.02), ("adapter", 0.01)])
def test_recomputed_log_probs_are_near_the_sampled_ones_in_bf16(make_run, weights, most):
    """PITFALLS 12 in a GPU's number format: the mean gap on the tiny policy, whose distributions
    are sharp. (`test_gpu.py` measures it where the products are a GPU's, too.)"""
    run = make_run(
        rollout_weights=weights, max_completion_length=80, per_device_train_batch_size=64
    )
    for model in (run.model.get_base_model(), run.dense):
        for name, layer in model.named_modules() if model else ():
            if packed(layer):
                layer.compute_dtype = layer.weight.quant_state.dtype = torch.bfloat16
            for key, parameter in layer._parameters.items():
                if parameter is not None and parameter.is_floating_point() and "lora" not in name:
                    parameter.data = parameter.data.bfloat16()
    _, train_set, _ = trainer.load_data(run.args)
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        batch, _, _ = trainer.collect(run, 0, *train_set)
        trainer.score(run, batch, one_update=False)  # the log-probs of the importance ratio
    gap = rollout_metrics(run.accelerator, batch, run.args.num_generations)["sampling_gap_mean"]
    print(f"{weights}: mean |sampled - recomputed| {gap:.4f}")
    assert 1e-4 < gap <= most  # in fp32 it is below the first


def test_generation_config_gives_eos_ids_and_nothing_else(make_run, tmp_path):
    """PITFALLS 2: a model's top_k=1 and repetition penalty must not shape the samples."""
    AutoModelForCausalLM.from_pretrained(TINY).save_pretrained(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (tmp_path / name).write_bytes((ROOT / "common/tiny_policy" / name).read_bytes())
    poison = GenerationConfig(top_k=1, repetition_penalty=1.3, do_sample=True, eos_token_id=[2, 1])
    poison.save_pretrained(tmp_path)
    runs = [make_run(model=model) for model in (TINY, str(tmp_path))]
    u = torch.rand(6, 24, generator=torch.Generator().manual_seed(0))
    clean, poisoned = [r.policy.eval() and r.sample(prompts_of(r)[:1] * 6, u, **FULL) for r in runs]
    assert torch.equal(clean.ids, poisoned.ids)
    assert len(set(poisoned.texts(runs[1].tokenizer))) == 6
    assert runs[1].eos_ids.tolist() == [1, 2]


def test_merged_weights_follow_the_adapter(make_run):
    """The dense copy is written anew for each rollout, into the same buffers; and where only some
    layers have an adapter, the others' copies are still the quantised base."""
    run = make_run(rollout_weights="merged", lora_target_modules="q_proj")
    u = torch.rand(4, 24, generator=torch.Generator().manual_seed(0))
    buffers = {name: p.data_ptr() for name, p in run.dense.named_parameters()}
    for scale in (0.05, 0.5):
        randomise_adapter(run.model, scale)
        merged = run.sample(prompts_of(run), u, **FULL)
        adapter = run._replace(dense=None).sample(prompts_of(run), u, **FULL)
        assert torch.equal(merged.ids, adapter.ids)
        assert (merged.logp - adapter.logp).abs().max() < 1e-4
    assert buffers == {name: p.data_ptr() for name, p in run.dense.named_parameters()}


@pytest.mark.parametrize(
    ("targets", "own"),
    [("all-linear", ""), ("lm_head", "lm_head"), ("embed_tokens", "embed_tokens")],
)
def test_the_dense_copy_has_its_own_of_quantised_and_adapted_weights_alone(make_run, targets, own):
    """Embedding, head and norms are the base's, in the same memory: a tied head, too, whose twin
    has an adapter."""
    run = make_run(rollout_weights="merged", lora_target_modules=targets)
    base = {p.data_ptr() for p in run.model.parameters()}
    shared = {name for name, p in run.dense.named_parameters(remove_duplicate=False)
              if p.data_ptr() in base}  # fmt: skip
    whole = {name for name, _ in run.dense.named_parameters(remove_duplicate=False)}
    assert whole - shared == {n for n in whole if "_proj." in n or own and own in n}
    u = torch.rand(4, 24, generator=torch.Generator().manual_seed(0))
    for _ in range(2):
        merged = run.sample(prompts_of(run), u, **FULL)
        adapter = run._replace(dense=None).sample(prompts_of(run), u, **FULL)
        assert torch.equal(merged.ids, adapter.ids)
        assert (merged.logp - adapter.logp).abs().max() < 1e-4


class Scripted(torch.nn.Module):
    """A model whose logits make row r say script[r], one token after the other."""

    def __init__(self, script: torch.Tensor, real):
        super().__init__()
        self.script, self.calls, self.config, self.dtype = script, 0, real.config, torch.float32

    def forward(self, input_ids, past_key_values, **_):
        for layer in range(self.config.num_hidden_layers):
            past_key_values.update(*torch.zeros(2, len(input_ids), 1, input_ids.shape[1], 1), layer)
        logits = torch.full((len(self.script), 1, 448), -1e4)
        logits.scatter_(2, self.script[:, self.calls, None, None], 0.0)
        self.calls += 1
        return SimpleNamespace(logits=logits)


def test_masks_come_from_lengths_and_every_eos_ends(make_run):
    """PITFALLS 3 and 4: pad = eos, several EOS ids, a row that never ends."""
    run = make_run()
    script = torch.tensor([[5, 2, 9, 9], [7, 7, 0, 9], [2, 9, 9, 9], [5, 6, 7, 8]])
    model = Scripted(script, run.model.get_base_model())
    prompts, eos_ids = [[4, 4], [4, 5], [4, 6], [4, 7]], torch.tensor([0, 2])
    out = trainer.generate(model, prompts, torch.rand(4, 4), eos_ids, 2, **FULL)
    assert out.attention[:, 2:].int().tolist() == [
        [1, 1, 0, 0],
        [1, 1, 1, 0],
        [1, 0, 0, 0],
        [1] * 4,
    ]
    assert out.stopped.tolist() == [True, True, True, False]
    assert out.ids[0, 2:].tolist() == [5, 2, 2, 2]  # padding is the pad id, here an EOS id


def test_the_stop_token_is_trained(make_run):
    """PITFALLS 3: the first stop token has mask 1 and a gradient, though it is the pad token."""
    run = make_run()
    run.tokenizer.pad_token = run.tokenizer.eos_token
    batch = random_batch()
    batch.ids = torch.where(batch.attention, batch.ids, run.tokenizer.pad_token_id)
    ends = batch.mask.sum(1) - 1
    batch.ids[torch.arange(8), batch.prompt_width + ends] = run.tokenizer.pad_token_id
    logp = batch.logp.clone().requires_grad_()
    scale = trainer.token_scale(run.args, batch.loss_mask, 8, 1)
    trainer.policy_loss(run.args, batch, logp, batch.logp, scale)[0].backward()
    assert (logp.grad[torch.arange(8), ends] != 0).all()
    assert (logp.grad[~batch.mask] == 0).all()


def test_rollouts_use_the_cache_with_gradient_checkpointing(make_run):
    """PITFALLS 10: one token a step also when training recomputes; and the same gradients."""
    gradients, widths = [], []
    for checkpointing in (False, True):
        run = make_run(gradient_checkpointing=checkpointing, rollout_weights="adapter")
        seen = []
        run.model.get_base_model().model.embed_tokens.register_forward_hook(
            lambda module, inputs, output, seen=seen: seen.append(inputs[0].shape[1])
        )
        run.policy.train()
        run.policy.eval()
        run.sample(prompts_of(run), torch.rand(4, 24), **FULL)
        widths.append(seen[1:])
        batch = random_batch()
        trainer.training_forward(run, batch)[batch.mask].sum().backward()
        gradients.append([p.grad.clone() for p in run.model.parameters() if p.grad is not None])
    assert set(widths[0] + widths[1]) == {1}
    assert len(gradients[0]) == len(gradients[1]) > 10
    for plain, recomputed in zip(*gradients, strict=True):
        assert torch.allclose(plain, recomputed, atol=1e-6)


# ---------------------------------------------------------------------------------- norms
def test_norms_are_the_ones_they_stand_for(make_run):
    """Values and gradients, in bf16 under autocast too; of all norms of both copies."""
    run = make_run(rollout_weights="merged")
    modules = [*run.model.modules(), *run.dense.modules()]
    norms = [m for m in modules if isinstance(m, trainer.RMSNorm)]
    assert len(norms) == 2 * (4 * 4 + 1) and not any(isinstance(m, Qwen3RMSNorm) for m in modules)
    for norm in norms:
        theirs = Qwen3RMSNorm(len(norm.weight), eps=1e-6)
        norm.weight.data = theirs.weight.data = torch.rand(norm.weight.shape) + 0.5
        x = torch.randn(3, 5, len(norm.weight), requires_grad=True)
        found, expected = norm(x), theirs(x)
        torch.testing.assert_close(found, expected)
        weights = torch.randn(expected.shape)
        gradients = [torch.autograd.grad((y * weights).sum(), x)[0] for y in (found, expected)]
        torch.testing.assert_close(*gradients)
        with torch.autocast("cpu", torch.bfloat16):
            found, expected = norm(x.bfloat16()), theirs.bfloat16()(x.bfloat16())
        assert found.dtype == torch.bfloat16
        torch.testing.assert_close(found, expected, rtol=2**-6, atol=2**-8)


def test_norms_of_another_kind_stay():
    """Gemma's scale is 1 + weight."""
    model = torch.nn.Sequential(GemmaRMSNorm(8), LlamaRMSNorm(8))
    trainer.fuse_norms(model)
    assert [type(norm) for norm in model] == [GemmaRMSNorm, trainer.RMSNorm]


# ---------------------------------------------------------------------------------- log-probs
@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_log_probs_entropies_and_hidden_states(make_run, temperature):
    """PITFALLS 1: trained log-probs are log_softmax(logits / T); and hidden state t is the one
    whose logits predict token t."""
    run = make_run(temperature=temperature)
    batch = random_batch()
    base, width = run.model.get_base_model(), batch.prompt_width
    run.policy.eval()
    with torch.no_grad():
        for row in range(len(batch.rows)):
            ids = batch.ids[row][batch.attention[row]][None]  # unpadded
            length = int(batch.mask[row].sum())
            out = base(input_ids=ids, output_hidden_states=True)
            logp = (out.logits[0, -length - 1 : -1] / temperature).log_softmax(-1)
            target = ids[0, -length:]
            stats = run.policy(batch.ids, batch.attention, width, with_entropy=True)
            assert torch.allclose(
                stats.logp[row, :length], logp.gather(1, target[:, None])[:, 0], atol=1e-4
            )
            assert torch.allclose(
                stats.entropy[row, :length], -(logp.exp() * logp).sum(1), atol=1e-4
            )
            hidden = out.hidden_states[-1][0, -length - 1 : -1]
            assert torch.allclose(stats.hidden[row, :length], hidden, atol=1e-4)


def test_prompts_read_once_give_the_same(make_run):
    """Log-probs, entropies and hidden states, with and without the adapter; and a prompt's tokens
    go through the policy once, a completion's as before."""
    run, tokens = make_run(num_generations=4, per_device_train_batch_size=12), []
    prompts = prompts_of(run, 3)
    u = torch.rand(12, 24, generator=torch.Generator().manual_seed(0))
    out = run.sample([prompts[i] for i in (0, 1, 2, 0, 1, 1, 0, 1, 1, 0, 0, 1)], u, **FULL)
    batch = random_batch()
    batch.ids, batch.attention, batch.prompt_width = out.ids, out.attention, out.prompt_width
    rows, lines = once = trainer.different_prompts(batch.padded_prompts(), "cpu")
    assert rows.tolist() == [0, 1, 2] and lines.tolist() == [0, 1, 2, 0, 1, 1, 0, 1, 1, 0, 0, 1]
    inputs, mask = (out.ids, out.attention, out.prompt_width), batch.mask
    layer = run.model.get_base_model().base_model.layers[0]
    layer.register_forward_pre_hook(lambda _, x: tokens.append(x[0][..., 0].numel()))
    run.policy.eval()
    for adapter in (contextlib.nullcontext(), run.model.disable_adapter()):
        with torch.no_grad(), adapter:
            plain = run.policy(*inputs, with_entropy=True)
            same = run.policy(*inputs, with_entropy=True, prompts=once)
        for a, b in zip(plain, same, strict=True):
            assert a.shape == b.shape and (a - b)[mask].abs().max() < 1e-4
    width, length = out.prompt_width, mask.shape[1]
    assert tokens == [12 * (width + length), 3 * width, 12 * (length - 1)] * 2
    with torch.no_grad():  # completions of one token
        short = (out.ids[:, : width + 1], out.attention[:, : width + 1], width)
        assert torch.equal(run.policy(*short, prompts=once).logp, run.policy(*short).logp)
    batch.ids[1] = batch.ids[0]  # the same ids but for padding are not the same prompt
    batch.attention[:2, 0] = torch.tensor([True, False])
    assert trainer.different_prompts(batch.padded_prompts(), "cpu")[1].tolist()[:2] == [0, 1]


def test_a_score_reads_prompts_once_where_no_ratio_needs_it(make_run):
    run, tokens = make_run(), []
    _, train_set, _ = trainer.load_data(run.args)
    batch, _, _ = trainer.collect(run, 0, *train_set)
    layer = run.model.get_base_model().base_model.layers[0]
    layer.register_forward_pre_hook(lambda _, x: tokens.append(x[0][..., 0].numel()))
    (rows, length), width = batch.mask.shape, batch.prompt_width
    trainer.score(run, batch, one_update=True)  # two prompts; ARCA has two passes
    assert tokens == [2 * width, rows * (length - 1)] * 2
    tokens.clear()
    trainer.score(run, batch, one_update=False)
    assert tokens == [rows * (width + length)] * 2


def test_padding_with_learned_positions():
    """PITFALLS 5: RoPE hides wrong position ids, GPT-2's learned positions do not."""
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=448, n_positions=64, n_embd=32, n_layer=2, n_head=2)
    model = GPT2LMHeadModel(config).eval()
    wrapped = torch.nn.Module()
    wrapped.get_base_model = lambda: model
    policy = trainer.Policy(wrapped, 1.0)
    batch = random_batch()
    with torch.no_grad():
        padded = policy(batch.ids, batch.attention, batch.prompt_width).logp
        for row in range(len(batch.rows)):
            ids, length = batch.ids[row][batch.attention[row]], int(batch.mask[row].sum())
            alone = policy(ids[None], torch.ones(1, len(ids), dtype=torch.bool), len(ids) - length)
            assert torch.allclose(padded[row, :length], alone.logp[0], atol=1e-5)
    prompts = [[5, 6, 7, 8, 9], [5, 6], [11]]
    u = torch.rand(3, 20, generator=torch.Generator().manual_seed(1))
    together = trainer.generate(model, prompts, u, torch.tensor([0]), 0, **FULL)
    for row, prompt in enumerate(prompts):
        alone = trainer.generate(model, [prompt], u[row : row + 1], torch.tensor([0]), 0, **FULL)
        real = together.attention[row, together.prompt_width :]
        assert torch.equal(
            together.ids[row, together.prompt_width :][real], alone.ids[0, len(prompt) :]
        )


@pytest.mark.parametrize("weights", ["merged", "adapter"])
def test_gradients_are_the_same_before_and_after_a_rollout(make_run, weights):
    """PITFALLS 13: on a CPU with AVX512-BF16, bitsandbytes repacks 4-bit weights in a no-grad eval
    forward, and training goes on with wrong gradients. On another CPU only the flag is tested."""
    run = make_run(rollout_weights=weights)
    batch = random_batch()

    def gradients():
        run.optimizer.zero_grad()
        trainer.training_forward(run, batch)[batch.mask].sum().backward()
        return [p.grad.clone() for p in run.model.parameters() if p.grad is not None]

    before = gradients()
    run.policy.eval()
    run.sample(prompts_of(run), torch.rand(4, 24), **FULL)
    trainer.score(run, batch, one_update=True)
    for old, new in zip(before, gradients(), strict=True):
        assert torch.equal(old, new)
    flags = [getattr(m, "support_avx512bf16_for_cpu", None) for m in run.model.modules()]
    assert flags.count(False) == 28 and True not in flags


def test_the_base_is_nf4_and_only_the_adapter_trains(make_run):
    run = make_run()
    trained = [n for n, p in run.model.named_parameters() if p.requires_grad]
    assert trained and all("lora_" in name for name in trained)
    weights = {
        id(w): w for m in run.model.modules() if (w := getattr(m, "weight", None)) is not None
    }
    states = [w.quant_state for w in weights.values() if hasattr(w, "quant_state")]
    assert len(states) == 28 and all(s.quant_type == "nf4" and s.nested for s in states)


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


def trl_loss(batch, logp, old_logp, loss_type, beta=0.0, advantages=None):
    """TRL's own GRPOTrainer._compute_loss on given log-probs."""
    grpo = pytest.importorskip("trl").GRPOTrainer
    leaf = logp.clone().requires_grad_()
    config = SimpleNamespace(delta=None, use_bias_correction_kl=False, steps_per_generation=1)
    one = lambda x, **_: x  # noqa: E731
    accelerator = SimpleNamespace(num_processes=1, gather=one, reduce=one)
    metrics = {m: __import__("collections").defaultdict(list) for m in ("train", "eval")}
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
        "num_items_in_batch": mask.sum(),
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
    noise = torch.randn(batch.logp.shape, generator=torch.Generator().manual_seed(5))
    logp = torch.where(batch.mask, batch.logp + 0.3 * noise, 0.0)
    if weighted:
        batch.credit = trainer.normalise(batch.scores, batch.mask, 1.0)
    advantages = batch.advantages[:, None] * batch.credit if weighted else None
    ours = loss_and_gradient(args, batch, logp, batch.logp)
    theirs = trl_loss(batch, logp, batch.logp, loss_type, beta, advantages)
    assert ours[0] == pytest.approx(theirs[0], abs=1e-6)
    assert torch.allclose(ours[1], theirs[1], atol=1e-7)
    assert 0 < ours[2].sum() < batch.mask.sum()  # some tokens are clipped


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
    batch.scores = torch.ones_like(batch.logp)
    trainer.assign_credit(run, batch)
    assert torch.equal(batch.weights, batch.mask.float())
    logp = batch.logp + 0.3 * torch.randn(
        batch.logp.shape, generator=torch.Generator().manual_seed(2)
    )
    loss, gradient, _ = loss_and_gradient(run.args, batch, logp, batch.logp)
    leaf = logp.clone().requires_grad_()
    ratio = torch.where(batch.mask, leaf - batch.logp, 0.0).exp()
    a = batch.advantages[:, None]
    plain = -torch.min(ratio * a, ratio.clamp(0.8, 1.2) * a)
    plain = (plain * (batch.mask / batch.mask.sum(1, keepdim=True) / 8)).sum()
    plain.backward()
    assert loss == plain.item() and torch.equal(gradient, leaf.grad)


def test_no_split_changes_the_loss():
    """PITFALLS 7: normalisers are those of the whole update, not of a micro-batch."""
    for loss_type in ("grpo", "dapo", "dr_grpo"):
        batch, args = random_batch(), flags(loss_type=loss_type)
        logp = batch.logp + 0.1
        tokens = float(batch.loss_mask.sum())
        whole, gradient, _ = loss_and_gradient(args, batch, logp, batch.logp)
        parts = torch.zeros_like(gradient)
        total = 0.0
        for index in torch.arange(8).split(3):
            micro = batch.select(index)
            width = micro.mask.shape[1]
            loss, g, _ = loss_and_gradient(args, micro, logp[index, :width], micro.logp, 8, tokens)
            parts[index, :width] += g
            total += loss
        assert total == pytest.approx(whole, abs=1e-6)
        assert torch.allclose(parts, gradient, atol=1e-7)


def test_truncated_completions_follow_the_flag(make_run):
    """PITFALLS 4: left out of the loss when asked; an all-truncated batch gives a finite loss."""
    run = make_run(mask_truncated_completions=True, num_generations=4)
    prompts = prompts_of(run)
    problems = [trainer.Problem("x", "1")] * 4
    batch, _, _ = trainer.collect(run, 0, problems, [p for p in prompts])
    assert (batch.loss_mask.any(1) == ~batch.truncated).all()
    batch.truncated[:], batch.loss_mask = True, torch.zeros_like(batch.mask)
    for loss_type in ("grpo", "dapo", "dr_grpo"):
        run.args.loss_type = loss_type
        batch.credit, logp = batch.mask.float(), batch.sampled_logp
        loss, gradient, _ = loss_and_gradient(run.args, batch, logp, logp, 8, 0.0)
        assert loss == 0 and (gradient == 0).all()


def test_constant_groups_give_exactly_no_gradient(make_run):
    """PITFALLS 9: every completion wrong: the update moves nothing; and a row says so."""
    run = make_run()
    problems = [trainer.Problem("x", "nothing says this")] * 4
    batch, _, _ = trainer.collect(run, 0, problems, prompts_of(run))
    trainer.score(run, batch, one_update=True)
    before = [p.clone() for p in run.model.parameters() if p.requires_grad]
    row = trainer.update(run, batch, torch.arange(8), one_update=True)
    assert row["grad_norm"] == 0 and row["loss"] == 0
    after = [p for p in run.model.parameters() if p.requires_grad]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_duplicate_prompts_stay_separate_groups(make_run):
    """PITFALLS 9: groups are by place, not by text, and their samples differ."""
    run = make_run()
    prompt = prompts_of(run)[:1]
    batch, texts, _ = trainer.collect(run, 0, [trainer.Problem("x", "1")], prompt)
    assert batch.rows.tolist() == list(range(8)) and len(set(texts)) > 4


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_the_first_update_has_ratio_one(make_run, monkeypatch, dropout):
    """PITFALLS 6: dropout or train / eval mode must not differ between the two passes, for
    micro-batches of different lengths too."""
    run = make_run(lora_dropout=dropout, num_iterations=2, per_device_train_batch_size=4)
    run.args.gradient_accumulation_steps, run.args.steps_per_generation = 2, 2
    batch = random_batch()
    batch.logp = batch.base_logp = batch.entropy = batch.scores = None
    trainer.score(run, batch, one_update=False)
    gaps, loss = [], trainer.policy_loss

    def spy(args, micro, logp, old_logp, scale):
        gaps.append((logp.detach() - old_logp)[micro.mask].abs().max().item())
        return loss(args, micro, logp, old_logp, scale)

    monkeypatch.setattr(trainer, "policy_loss", spy)
    trainer.update(run, batch, torch.arange(8), one_update=False)
    assert gaps == [0.0, 0.0]
    logp = trainer.training_forward(run, batch)
    run.policy.eval()
    with torch.no_grad():  # dropout acts in training, and never in rollouts and scores
        gap = (run.policy(batch.ids, batch.attention, batch.prompt_width).logp - logp)[batch.mask]
    assert (gap.abs().max() > 1e-3) == (dropout > 0)


def test_a_second_iteration_is_clipped_against_the_first(make_run):
    """num_iterations: the old log-probs stay those of the policy that sampled."""
    run = make_run(num_iterations=2, learning_rate=0.1, warmup_steps=0, max_steps=4)
    batch = random_batch()
    for name in ("logp", "base_logp", "entropy", "scores"):
        setattr(batch, name, None)
    trainer.score(run, batch, one_update=False)
    first = trainer.update(run, batch, torch.arange(8), one_update=False)
    second = trainer.update(run, batch, torch.arange(8), one_update=False)
    assert first["clip_fraction"] == 0 < second["clip_fraction"] <= second["clip_fraction_sequence"]


def test_kl_pulls_towards_the_base(make_run):
    """beta > 0: at advantage 0 the gradient is the k3 KL's alone, as autograd has it."""
    batch, args = random_batch(), flags(beta=0.5)
    batch.advantages = torch.zeros(8)
    loss, gradient, _ = loss_and_gradient(args, batch, batch.logp, batch.logp)
    leaf = batch.logp.clone().requires_grad_()
    d = batch.base_logp - leaf
    k3 = (d.exp() - d - 1) * batch.mask / batch.mask.sum(1, keepdim=True)
    (0.5 * k3.sum() / 8).backward()
    assert loss > 0 and torch.allclose(gradient, leaf.grad, atol=1e-7)


# ------------------------------------------------------------------------------ whole programs
def launch(tmp_path, *flags, processes=0, env=None):
    command = [sys.executable, "grpo_arca.py"]
    if processes:
        command = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu"]
        command += ["--num_processes", str(processes), "--main_process_port", "0", "grpo_arca.py"]
    command += ["--output_dir", str(tmp_path / "out"), *map(str, flags)]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=280, env=os.environ | (env or {})
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done


SMALL = ("--max_steps", 2, "--max_eval_samples", 4, "--num_generations_eval", 2, "--eval_steps", 1)


def test_the_script_end_to_end(tmp_path):
    """A few steps of the embedded default: every promised file, readable by what reads it."""
    done = launch(tmp_path, *SMALL, "--per_device_train_batch_size", 32)
    out = tmp_path / "out"
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "reward" in row] == [1, 2]
    assert [row["step"] for row in rows if "eval" in row] == [0, 1, 2]
    wanted = (
        "reward accuracy completion_length truncated_share zero_std_share entropy kl clip_fraction "
        "grad_norm learning_rate weight_gini weight_effn weight_top10_mass sampling_gap_mean "
        "sampling_gap_max seconds_rollout seconds_score seconds_credit seconds_update "
        "tokens_per_second peak_memory_gb loss"
    )
    for row in rows:
        if "reward" in row:
            assert set(wanted.split()) <= set(row) and None not in row.values()
            assert row["sampling_gap_max"] < 1e-3
    summary = json.loads((out / "summary.json").read_text())
    assert set(summary) == {"before", "after", "seconds", "steps", "rollout_tokens"}
    assert set(summary["before"]) == {"greedy_accuracy", "sampled_accuracy", "pass@2"}
    assert summary["steps"] == 2
    for name in ("config.json", "curves.png", "credit.html", "completions.jsonl"):
        assert (out / name).stat().st_size > 100
    from peft import PeftModel

    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(TINY), out / "adapter")
    assert any(p.abs().sum() > 0 for n, p in model.named_parameters() if "lora_B" in n)
    assert "Warning" not in done.stderr + done.stdout


def test_local_gsm8k_file_end_to_end(tmp_path):
    source = ROOT.parent / "shared/data/gsm8k_test.jsonl"
    if not source.exists():
        pytest.skip("no GSM8K in ../shared/data")
    rows = source.read_text().splitlines()[:60]
    (tmp_path / "gsm8k.jsonl").write_text("\n".join(rows))
    launch(
        tmp_path, *SMALL, "--dataset_name", tmp_path / "gsm8k.jsonl", "--credit", "divergence",
        "--per_device_train_batch_size", 8, "--max_completion_length", 32,
        "--gradient_accumulation_steps", 2, "--num_iterations", 2, "--beta", 0.01,
    )  # fmt: skip
    assert (tmp_path / "out/summary.json").exists()


@pytest.mark.slow  # test_processes.py has the gradients
def test_two_processes_under_accelerate_launch(tmp_path):
    """PITFALLS 8: and one process with two micro-batches gives the same samples and adapter."""
    small = ("--max_steps", 2, "--max_eval_samples", 2, "--num_generations_eval", 2)
    common = (*small, "--num_generations", 8, "--max_completion_length", 64, "--warmup_steps", 0)
    env = {"OMP_NUM_THREADS": "1"}
    launch(
        tmp_path / "two", *common, "--per_device_train_batch_size", 8,
        "--gradient_accumulation_steps", 1, processes=2, env=env,
    )  # fmt: skip
    launch(
        tmp_path / "one", *common, "--per_device_train_batch_size", 4,
        "--gradient_accumulation_steps", 4, env=env,
    )  # fmt: skip
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


@pytest.mark.parametrize(
    ("launched", "user", "expected"), [(1, 0, 1), (1, 1, 0), (0, 0, 1), (0, 1, 0)]
)
def test_every_core_unless_the_user_set_threads(monkeypatch, launched, user, expected):
    """PITFALLS 16: `accelerate launch` sets OMP_NUM_THREADS=1 itself; a user's own value stays."""
    calls = []
    monkeypatch.setattr(torch, "set_num_threads", calls.append)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.delenv("ACCELERATE_MIXED_PRECISION", raising=False)
    parent = SimpleNamespace(environ=lambda: {"OMP_NUM_THREADS": "1"} if user else {})
    process = SimpleNamespace(parent=lambda: parent, cpu_affinity=lambda: [0, 1, 2, 3])
    monkeypatch.setattr(trainer.psutil, "Process", lambda: process)
    if launched:
        monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
        monkeypatch.setenv("OMP_NUM_THREADS", "1")
    elif user:
        monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    trainer.use_every_core()
    assert calls == [2] * expected


@pytest.mark.slow  # the C++ compiler takes a minute and more
def test_compiled_layers_compute_the_same_without_graph_breaks_or_recompiles(make_run):
    """Log-probs, entropies, those of the base, gradients and samples; batches of many lengths."""
    results, graphs = [], []
    for compiled in (False, True):
        run, found = make_run(torch_compile=compiled), []
        torch._dynamo.utils.counters.clear()
        for seed, (prompt, length) in enumerate([(6, 12), (9, 20), (4, 15), (8, 33)]):
            batch = random_batch(prompt=prompt, length=length, seed=seed)
            inputs = (batch.ids, batch.attention, batch.prompt_width)
            once = {"prompts": trainer.different_prompts(batch.padded_prompts(), "cpu")}
            run.policy.eval()
            with torch.no_grad():
                found += run.policy(*inputs, with_entropy=True, **once)[:2]
                with run.model.disable_adapter():
                    found.append(run.policy(*inputs, **once).logp)
            run.policy.zero_grad()
            logp = trainer.training_forward(run, batch)
            logp[batch.mask].sum().backward()
            found += [logp.detach()] + [p.grad for p in run.model.parameters() if p.requires_grad]
            graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
        randomise_adapter(run.model, 0.0)  # it stops in time, so that lines are dropped
        for sampler in (run, run._replace(dense=None)):
            for rollout in range(2):
                u = trainer.row_uniforms(run.args, "rollout", rollout, torch.arange(16), 80)
                found.append(sampler.sample(prompts_of(run, 16), u, **FULL).ids)
            graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
        results.append(found)
    # With the adapter, without it, in training the first layer (its inputs have no gradient) and
    # the others: all layers share their graphs.
    assert graphs[:10] == [0] * 6 + [4] * 4
    # The decode step: merged, of all lines, then of any number of them; each of four layers, whose
    # place is in its graph.
    assert [graphs[10] - graphs[9], graphs[11] - graphs[10]] == [2, 4]
    assert not torch._dynamo.utils.counters["graph_break"]
    for plain, same in zip(*results, strict=True):
        largest = max(1.0, float(plain.abs().max()))
        assert (plain - same).abs().max() <= 1e-4 * largest


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


def packed(module: torch.nn.Module) -> bool:
    return hasattr(getattr(module, "weight", None), "quant_state")
