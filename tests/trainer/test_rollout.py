"""The rollout: how tokens are drawn, which rows the decode loop works on, where completions end."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from support import TINY, fixed_uniforms, prompts_of, randomize_adapter, sample, texts_of
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.generation import TopKLogitsWarper, TopPLogitsWarper

import grpo_arca as trainer


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
    out = sample(run, prompts, torch.zeros(4, 24), is_greedy=True)
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
    prompts = prompts_of(run, 10)
    sizes = []
    keep_rows = trainer.Decoder.keep
    u = trainer.row_uniforms(run.args, "rollout", 0, torch.arange(10), 80)

    def keep(decoder, rows):
        sizes.append((len(decoder.active_rows), len(rows)))
        keep_rows(decoder, rows)

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
    """A rollout reads each distinct prompt once, for all its samples, and then one token of each
    row a step. Gradient checkpointing must not turn the cache off."""
    run = make_run(gradient_checkpointing=True, rollout_weights="quantized")
    prompts, read = prompts_of(run, 24), []
    run.model.get_base_model().model.embed_tokens.register_forward_hook(
        lambda module, inputs, output: read.append(tuple(inputs[0].shape))
    )
    out = sample(run, prompts, fixed_uniforms(24, 24))
    assert read[0] == (len({tuple(p) for p in prompts}), out.prompt_width) == (6, out.prompt_width)
    assert len(read) > 15 and {tokens for _, tokens in read[1:]} == {1}


@pytest.mark.parametrize("rollout_weights", ["dense", "quantized"])
def test_samples_are_a_function_of_the_row_and_logps_are_recomputed(make_run, rollout_weights):
    """Rows that are sampled together, alone, or in another order are the same, and the log-probs
    that the decode loop saw are those of the training forward."""
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
        batch = sample(run, prompts_of(run)[:1] * 8, fixed_uniforms(8, 24))
        assert len(set(texts_of(run, batch))) == distinct


def test_generation_config_gives_eos_ids_and_nothing_else(make_run, tmp_path):
    """A model's own generation config, with its top_k and repetition penalty, must not shape the
    samples: only its stop tokens are used."""
    AutoModelForCausalLM.from_pretrained(TINY).save_pretrained(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (tmp_path / name).write_bytes((Path(TINY) / name).read_bytes())
    poison = GenerationConfig(top_k=1, repetition_penalty=1.3, do_sample=True, eos_token_id=[2, 1])
    poison.save_pretrained(tmp_path)
    runs = [make_run(model=model, lora_r=8, lora_alpha=16) for model in (TINY, str(tmp_path))]
    clean, poisoned = [sample(run, prompts_of(run)[:1] * 6, fixed_uniforms(6, 24)) for run in runs]
    assert torch.equal(clean.ids, poisoned.ids)
    assert len(set(texts_of(runs[1], poisoned))) == 6
    assert runs[1].eos_ids.tolist() == [1, 2]


@pytest.mark.parametrize("targets", ["all-linear", "q_proj", "lm_head", "embed_tokens"])
def test_dense_weights_leave_the_adapter_beside_them(make_run, targets):
    """Whichever layers have an adapter: a tied head, too, whose twin has one. The adapter acts."""
    run, samples = make_run(lora_target_modules=targets), []
    for scale in (0.05, 0.5):
        randomize_adapter(run.model, scale)
        for name, parameter in run.model.named_parameters():
            if "lora_embedding_A" in name:  # of an embedding it is A that begins with zeros
                parameter.data.fill_(scale)
        for run.args.rollout_weights in ("dense", "quantized"):
            samples.append(sample(run, prompts_of(run), fixed_uniforms(4, 24)))
        dense, quantized = samples[-2:]
        assert torch.equal(dense.ids, quantized.ids)
        assert (dense.sampled_logp - quantized.sampled_logp).abs().max() < 1e-4
    small, large = (x.sampled_logp[:, :4] for x in samples[::2])
    assert not torch.allclose(small, large, atol=1e-3)


def patched_layers(model) -> list[torch.nn.Module]:
    """Returns the layers whose forward function is replaced."""
    return [layer for layer in model.modules() if "forward" in vars(layer)]


def test_every_nf4_layer_is_dense_in_a_rollout_and_none_after_it(make_run):
    run = make_run()
    with trainer.dense(run.model):
        assert len(patched_layers(run.model)) == 28
    assert not patched_layers(run.model)


def test_an_exception_in_a_rollout_leaves_no_layer_dense(make_run):
    run = make_run()
    with pytest.raises(KeyboardInterrupt), trainer.dense(run.model):
        assert len(patched_layers(run.model)) == 28
        raise KeyboardInterrupt
    assert not patched_layers(run.model)


def test_too_little_memory_for_the_last_dense_weight_leaves_no_layer_dense(make_run, monkeypatch):
    """The exception may also come while the layers are being patched."""
    run = make_run()
    dense_forward = trainer.dense_forward
    patched = []

    def dense_forward_until_full(layer, base_layer):
        if len(patched) == 27:
            raise torch.OutOfMemoryError("CUDA out of memory")
        patched.append(layer)
        return dense_forward(layer, base_layer)

    monkeypatch.setattr(trainer, "dense_forward", dense_forward_until_full)
    with pytest.raises(torch.OutOfMemoryError), trainer.dense(run.model):
        raise AssertionError("not reached")
    assert len(patched) == 27 and not patched_layers(run.model)


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
    """The pad token may be a stop token, there may be several of those, and a row may never end."""
    run = make_run()
    run.tokenizer.pad_token_id = 2
    script = torch.tensor([[5, 2, 9, 9], [7, 7, 0, 9], [2, 9, 9, 9], [5, 6, 7, 8]])
    scripted = torch.nn.Module()
    scripted.inner = Scripted(script, run.model.get_base_model())
    scripted.get_base_model = lambda: scripted.inner
    run = replace(run, model=scripted, eos_ids=torch.tensor([0, 2]))
    out = sample(run, [[4, 4], [4, 5], [4, 6], [4, 7]], fixed_uniforms(4, 4))
    assert out.mask.int().tolist() == [[1, 1, 0, 0], [1, 1, 1, 0], [1, 0, 0, 0], [1, 1, 1, 1]]
    assert out.truncated.tolist() == [False, False, False, True]
    assert out.ids[0, 2:].tolist() == [5, 2, 2, 2]  # padding is the pad id, here an EOS id
    assert (out.sampled_logp[~out.mask] == 0).all()
