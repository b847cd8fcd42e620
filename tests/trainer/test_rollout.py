"""The rollout: how tokens are drawn, and what each completion depends on."""

from unittest import mock

import pytest
import torch
from support import TOKENIZER, changed_copy, fixed_draws, greedy_tokens, problems_of, sample, stock

import grpo_arca


# ---- Tokens --------------------------------------------------------------------------------------
@pytest.mark.parametrize("size", [5, 448, 5000])
@pytest.mark.parametrize("top_p", [1.0, 0.8])
def test_a_token_is_where_its_uniform_falls_in_the_exact_distribution(size, top_p):
    """In float64, over the tokens that top_p leaves, renormalized, in the order of their ids. What
    has no probability is never drawn. Log-probs and entropies are those before top_p."""
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(200, size, generator=generator)
    logits[:, 0] = logits[:, -1] = -torch.inf
    draws = torch.rand(200, generator=generator)
    draws[:50] = 0.0  # rounding must not make of these a first or last token
    draws[50:100] = 1 - 2**-24
    token, logp, entropy = grpo_arca.sample_tokens(logits, draws, 0.7, top_p)

    exact = (logits.double() / 0.7).log_softmax(-1)
    ordered, index = exact.exp().sort(-1, descending=True)
    is_kept = ordered.cumsum(-1) - ordered < top_p
    mass = torch.zeros_like(exact).scatter(1, index, ordered * is_kept)
    mass = mass / mass.sum(-1, keepdim=True)
    own = mass.gather(1, token[:, None])[:, 0]
    above = mass.cumsum(-1).gather(1, token[:, None])[:, 0]
    assert (own > 0).all()
    assert (above - own <= draws + 2e-5).all() and (draws <= above + 2e-5).all()
    own_logp = exact.gather(1, token[:, None])[:, 0]
    torch.testing.assert_close(logp.double(), own_logp, atol=1e-4, rtol=0)
    expected = -(exact.exp() * exact.clamp(min=-1e9)).sum(-1)
    torch.testing.assert_close(entropy.double(), expected, atol=1e-4, rtol=0)


def test_draws_depend_on_the_seed_and_the_row_alone():
    """Not on the other rows, the samples that a prompt has, or what was drawn before."""
    whole = grpo_arca.row_draws(1, "rollout", 3, torch.arange(12), 7, 4)
    assert len(whole.unique()) == 12 * 7
    torch.rand(1)
    part = grpo_arca.row_draws(1, "rollout", 3, torch.tensor([9, 2]), 7, 4)
    assert torch.equal(part, whole[[9, 2]])
    wider = grpo_arca.row_draws(1, "rollout", 3, torch.tensor([6 * 2 + 1]), 7, 6)
    assert torch.equal(wider[0], whole[4 * 2 + 1])  # prompt 2, sample 1
    for seed, kind, step in ((2, "rollout", 3), (1, "eval", 3), (1, "rollout", 4)):
        other = grpo_arca.row_draws(seed, kind, step, torch.arange(12), 7, 4)
        assert not (other == whole).any()


# ---- Completions ---------------------------------------------------------------------------------
@pytest.mark.parametrize("weights", ["dense", "quantized"])
def test_greedy_decoding_equals_transformers(make_run, weights):
    run = make_run(rollout_weights=weights)
    problems = problems_of(run)
    batch = sample(run, problems, torch.zeros(4, 24), is_greedy=True)
    expected = greedy_tokens(run, problems, 24)
    assert batch.completion_ids == expected
    assert batch.truncated.tolist() == [ids[-1] != 2 for ids in expected]


@pytest.mark.parametrize(
    ("weights", "targets"),
    [
        ("dense", "all-linear"),
        ("dense", "q_proj"),
        pytest.param("quantized", "all-linear", marks=pytest.mark.slow),
    ],
)
def test_sampled_log_probs_are_the_stock_models_whatever_is_sampled_together(
    make_run, monkeypatch, weights, targets
):
    """In parts, and the other way round. Prompts and completions have many lengths,
    and the stock model applies the adapter beside its NF4 weights, as training does."""
    run = make_run(temperature=0.8, top_p=0.9, rollout_weights=weights, lora_target_modules=targets)
    problems = problems_of(run, 8)
    draws = fixed_draws(8, 24)
    whole = sample(run, problems, draws)
    assert whole.mask.sum(1).unique().numel() > 1 and len(set(whole.texts)) > 4
    with torch.no_grad():
        logp, entropy = stock(run, whole)
        trained, _ = run.policy(whole)
    for ours, truth in ((whole.sampled_logp, logp), (trained, logp), (whole.entropy, entropy)):
        torch.testing.assert_close(ours, truth, atol=1e-4, rtol=0)
    decode = mock.Mock(wraps=grpo_arca.decode)
    monkeypatch.setattr(grpo_arca, "decode", decode)
    run.args.per_device_rollout_batch_size = 3
    backwards = sample(run, problems[::-1], draws.flip(0))
    assert [len(call.args[1]) for call in decode.call_args_list] == [3, 3, 2]
    assert backwards.prompt_width == whole.prompt_width
    for name in ("ids", "attention", "truncated"):
        assert torch.equal(getattr(backwards, name).flip(0), getattr(whole, name)), name
    torch.testing.assert_close(
        backwards.sampled_logp.flip(0), whole.sampled_logp, atol=1e-4, rtol=0
    )


def test_completions_that_end_are_dropped_and_nothing_else_changes(make_run, monkeypatch):
    """Each different prompt is read once, and then a token of each completion that goes on, also
    where training checkpoints its layers. The model has several stop tokens. Neither the length of
    a segment nor when decoding looks whether all have ended changes a number."""
    run = make_run(max_completion_length=80, adapter=0.0, gradient_checkpointing=True)
    run.eos_ids = torch.tensor([2, 300])
    shapes = []
    run.model.get_base_model().model.embed_tokens.register_forward_hook(
        lambda module, inputs, output: shapes.append(tuple(inputs[0].shape))
    )
    problems = problems_of(run, 24)
    draws = fixed_draws(24, 80)
    batch = sample(run, problems, draws)
    widest = max(len(problem.prompt_ids) for problem in problems)
    assert shapes[0] == (len({problem.prompt_ids for problem in problems}), widest) == (6, widest)
    assert {width for _, width in shapes[1:]} == {1}
    counts = sorted({count for count, _ in shapes[1:]}, reverse=True)
    assert counts[0] == 24 and len(counts) >= 3

    # Stop tokens with which all end early. As on a GPU, a segment may be longer than that.
    run.eos_ids = torch.cat((run.eos_ids, batch.ids[batch.truncated, batch.prompt_width + 40]))
    whole = sample(run, problems, draws)
    longest = int(whole.mask.sum(1).max())
    assert 32 < longest < 48
    for segment, check in ((256, 32), (256, 7), (7, 32), (20, 1), (80, 256)):
        shapes.clear()
        monkeypatch.setattr(grpo_arca, "SEGMENT", segment)
        monkeypatch.setattr(grpo_arca, "CHECK", check)
        other = sample(run, problems, draws)
        looks = {*range(0, 80, segment), *range(0, 80, check), 80}
        assert len(shapes) - 1 == min(look for look in looks if look >= longest)
        assert ({count for count, _ in shapes[1:]} == {24}) == (segment > longest)
        assert torch.equal(other.ids, whole.ids) and not other.truncated.any()
        numbers = [(part.sampled_logp, part.entropy) for part in (other, whole)]
        torch.testing.assert_close(*numbers, atol=1e-4, rtol=0)


def test_a_completion_ends_at_its_first_stop_token_and_no_other_token_vanishes(
    make_run, monkeypatch
):
    """The pad token may be a stop token, there may be several, and a row may never end. Rewards see
    special tokens, such as those that end a thought; only those that end or pad are left out."""
    run = make_run()
    run.tokenizer.pad_token_id = 2
    run.eos_ids = torch.tensor([0, 2])
    script = torch.tensor([[301, 2, 9, 9], [302, 1, 0, 9], [2, 9, 9, 9], [301, 302, 303, 304]])
    ones = torch.ones(4, 4)

    def decode(run, prompts, *_):
        return script, ones, ones

    monkeypatch.setattr(grpo_arca, "decode", decode)
    batch = sample(run, problems_of(run, 1) * 4, ones)
    assert batch.completion_ids == [[301, 2], [302, 1, 0], [2], [301, 302, 303, 304]]
    assert batch.mask.int().tolist() == [[1, 1, 0, 0], [1, 1, 1, 0], [1, 0, 0, 0], [1, 1, 1, 1]]
    assert batch.truncated.tolist() == [False, False, False, True]
    assert batch.ids[0, batch.prompt_width :].tolist() == [301, 2, 2, 2]
    assert torch.equal(batch.sampled_logp, batch.mask.float())
    assert run.tokenizer.decode([302, 1], skip_special_tokens=True) == "as"
    assert batch.texts == ["\\b", "as<|im_start|>", "", "\\basd{em"]


@pytest.mark.parametrize(("ids", "all_ids"), [([7, 1], [1, 2, 7]), (0, [0, 2]), (None, [2])])
def test_the_stop_tokens_are_those_of_the_generation_config(make_run, tmp_path, ids, all_ids):
    folder = changed_copy(tmp_path / "model", {"generation_config.json": {"eos_token_id": ids}})
    assert make_run(model=folder).eos_ids.tolist() == all_ids  # and the tokenizer's


def test_the_token_that_closes_a_turn_ends_a_completion(make_run, tmp_path):
    """As with Qwen3-1.7B-Base, whose files name another one. Invented turns would follow."""
    of_model = {"eos_token_id": 0}
    changes = {"config.json": of_model, "generation_config.json": of_model}
    changes["tokenizer_config.json"] = {"eos_token": "<|endoftext|>"}
    folder = changed_copy(tmp_path / "base", changes)
    run = make_run(model=folder, adapter=None, max_completion_length=80)
    end = TOKENIZER.convert_tokens_to_ids("<|im_end|>")
    assert run.tokenizer.eos_token == "<|endoftext|>" and run.tokenizer.eos_token_id != end
    assert run.eos_ids.tolist() == sorted({run.tokenizer.eos_token_id, end})
    batch = sample(run, run.train_set[:4], fixed_draws(4, 80))
    assert not batch.truncated.any()
    assert all(ids[-1] == end for ids in batch.completion_ids)


def test_every_sample_of_an_evaluation_has_a_stream_of_its_own(make_run, monkeypatch):
    """Also where it takes more samples of a problem than a rollout; the next one has the same."""
    run = make_run(num_generations=2, num_generations_eval=5, max_completion_length=4)
    run.held_out = run.held_out[:3]
    run.log = mock.Mock()
    run.bar = mock.Mock()
    watched = mock.Mock(wraps=grpo_arca.sample)
    monkeypatch.setattr(grpo_arca, "sample", watched)
    grpo_arca.evaluate(run)
    grpo_arca.evaluate(run)
    greedy, sampled, *again = (call.args[3] for call in watched.call_args_list)
    assert len(greedy) == 3 and len(sampled.unique(dim=0)) == len(sampled) == 3 * 5
    assert torch.equal(sampled, again[1])


# ---- Dense weights -------------------------------------------------------------------------------
def test_no_layer_stays_dense_after_a_rollout_that_fails(make_run):
    """Each NF4 layer is dense in the block, with its adapter."""
    run = make_run()
    before = [layer.forward for layer in run.model.modules()]
    with pytest.raises(torch.OutOfMemoryError), grpo_arca.dense(run.model):
        pairs = zip(before, run.model.modules(), strict=True)
        assert sum(forward != layer.forward for forward, layer in pairs) == 28
        raise torch.OutOfMemoryError
    assert [layer.forward for layer in run.model.modules()] == before
