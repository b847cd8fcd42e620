"""Parts of a rollout, and what goes with each row: samples, problems, streams, advantages."""

import itertools
import math
from dataclasses import replace

import pytest
import torch
import transformers
from accelerate.state import AcceleratorState
from support import TINY, fixed_uniforms, prompts_of, random_batch, unscored

import grpo_arca as trainer
import grpo_oar
import grpo_strace

TOKENIZER = transformers.AutoTokenizer.from_pretrained(TINY)


@pytest.fixture(scope="module")
def run(make_run):
    return make_run()


# ---- A rollout in parts --------------------------------------------------------------------------
@pytest.mark.parametrize("part_size", [1, 3, 4, 8, 9])
def test_a_rollout_in_parts_has_the_same_samples(run, part_size):
    """Prompts and completions have different lengths, so parts are padded to different widths."""
    prompts = prompts_of(run, 8)
    uniforms = fixed_uniforms(8, 24)
    rows = torch.arange(8) + 40
    whole = trainer.sample(run, rows, prompts, uniforms)
    args = replace(run.args, per_device_rollout_batch_size=part_size)
    parts = trainer.sample(replace(run, args=args), rows, prompts, uniforms)
    assert whole.mask.sum(1).unique().numel() > 1
    for name in ("rows", "prompt_width", "ids", "attention", "truncated"):
        ours = torch.as_tensor(getattr(parts, name))
        theirs = torch.as_tensor(getattr(whole, name))
        assert torch.equal(ours, theirs), name
    for name in ("sampled_logp", "entropy"):
        torch.testing.assert_close(getattr(parts, name), getattr(whole, name), atol=1e-4, rtol=0)


def test_no_more_than_the_given_number_is_sampled_at_once(run, monkeypatch):
    """Neither in a rollout nor in an evaluation."""
    sizes = []
    inner = trainer.decode

    def decode(run, prompts, uniforms, is_greedy):
        sizes.append((len(prompts), len(uniforms)))
        return inner(run, prompts, uniforms, is_greedy)

    monkeypatch.setattr(trainer, "decode", decode)
    args = replace(run.args, per_device_rollout_batch_size=3)
    for is_greedy in (False, True):
        sizes.clear()
        part_run = replace(run, args=args)
        trainer.sample(
            part_run, torch.arange(8), prompts_of(run, 8), fixed_uniforms(8, 4), is_greedy
        )
        assert sizes == [(3, 3), (3, 3), (2, 2)]


# ---- Streams of an evaluation --------------------------------------------------------------------
def evaluation_uniforms(run, problem_count: int) -> dict[str, list[torch.Tensor]]:
    """Returns the uniforms of each sampled completion of an evaluation, in order."""
    used: dict[bool, list[torch.Tensor]] = {True: [], False: []}
    inner = trainer.sample

    def sample(run, rows, prompts, uniforms, is_greedy=False):
        used[is_greedy] += list(uniforms)
        return inner(run, rows, prompts, uniforms, is_greedy)

    problems = [trainer.Problem("Start with 5, add 7.", "12")] * problem_count
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer, "sample", sample)
        trainer.evaluate(run, problems, prompts_of(run, problem_count))
    return {"greedy": used[True], "sampled": used[False]}


@pytest.mark.parametrize("generations, samples", [(2, 5), (4, 4), (4, 1)])
def test_every_sample_of_every_problem_has_a_stream_of_its_own(
    make_run, tmp_path, generations, samples
):
    """Also where an evaluation takes more samples of a problem than a rollout."""
    flags = {"num_generations": generations, "num_generations_eval": samples}
    run = make_run(output_dir=tmp_path, max_completion_length=4, **flags)
    used = evaluation_uniforms(run, 3)
    assert len(used["sampled"]) == 3 * samples and len(used["greedy"]) == 3
    assert len({tuple(row.tolist()) for row in used["sampled"]}) == 3 * samples
    again = evaluation_uniforms(run, 3)
    for first, second in zip(used["sampled"], again["sampled"], strict=True):
        assert torch.equal(first, second)

    expected = itertools.product(range(3), range(samples))
    for (problem, draw), row in zip(expected, used["sampled"], strict=True):
        stream = trainer.random_stream(run.args.seed, "eval", 0, problem, draw)
        assert torch.equal(row, torch.rand(4, generator=stream))


# ---- Advantages ----------------------------------------------------------------------------------
@pytest.mark.parametrize("scale", ["group", "batch", "none"])
@pytest.mark.parametrize("reward", [0.1, 0.3, 0.7, 0.9, 1 / 3, 1e-3, 123.456])
def test_equal_known_rewards_have_no_advantage(scale, reward):
    """Rounding of their mean must not leave one: a fresh Adam would make a whole step of it."""
    for unknown in range(7):
        group = [reward] * (8 - unknown) + [math.nan] * unknown
        rewards = torch.tensor([group, [0.0, 1.0] * 4])
        advantages = trainer.group_advantages(rewards, scale)
        assert advantages[0].tolist() == [0.0] * 8
        assert (advantages[1] != 0).all()


def test_rewards_that_differ_keep_their_advantages():
    rewards = torch.tensor([[0.9, 0.9, 0.9, 0.8, math.nan, math.nan]])
    advantages = trainer.group_advantages(rewards, "group")
    known = rewards[0, :4]
    expected = (known - known.mean()) / (known.std() + 1e-4)
    torch.testing.assert_close(advantages[0, :4], expected, atol=1e-4, rtol=0)
    assert advantages[0, 4:].tolist() == [0.0, 0.0]


# ---- Problems ------------------------------------------------------------------------------------
def numbered(batch: trainer.Batch) -> trainer.Batch:
    batch.problems = [
        trainer.Problem(f"prompt {row}", f"answer {row}", columns={"level": row})
        for row in batch.rows.tolist()
    ]
    return batch


def problem_rows(batch: trainer.Batch) -> list[int]:
    return [problem.columns["level"] for problem in batch.problems]


def test_problems_follow_their_rows():
    batch = numbered(random_batch())
    for index in ([3], [5, 0, 5], list(range(8))[::-1]):
        selected = batch.select(torch.tensor(index))
        assert problem_rows(selected) == selected.rows.tolist() == index
    assert random_batch().select(torch.tensor([1])).problems == []


def test_problems_follow_their_rows_into_micro_batches(make_run):
    run = make_run(per_device_train_batch_size=4, gradient_accumulation_steps=2)
    batch = numbered(random_batch())
    batch.advantages[2] = 0.0  # this row is left out
    (micros,) = trainer.micro_batches(run.args, batch)
    found = []
    for micro in micros:
        assert problem_rows(micro) == micro.rows.tolist()
        found += problem_rows(micro)
    assert sorted(found) == [0, 1, 3, 4, 5, 6, 7] and found != sorted(found)


def test_credit_sees_the_problem_of_each_row_of_a_rollout(run_main, monkeypatch):
    """In `token_scores` and in `assign_credit`: gold answers, columns and prompts."""
    seen = []
    inner_scores = trainer.token_scores
    inner_assign = trainer.assign_credit

    def token_scores(run, micro, metrics):
        prompts = run.tokenizer.batch_decode(micro.ids[:, : micro.prompt_width])
        for problem, prompt in zip(micro.problems, prompts, strict=True):
            seen.append(problem.prompt in prompt and problem.columns["answer"] == problem.answer)
        return inner_scores(run, micro, metrics)

    def assign_credit(run, batch, micros, metrics):
        assert len(batch.problems) == len(batch.rows)
        by_row = dict(zip(batch.rows.tolist(), batch.problems, strict=True))
        for micro in micros:
            assert micro.problems == [by_row[row] for row in micro.rows.tolist()]
        return inner_assign(run, batch, micros, metrics)

    monkeypatch.setattr(trainer, "token_scores", token_scores)
    monkeypatch.setattr(trainer, "assign_credit", assign_credit)
    monkeypatch.setattr(trainer, "check_model", lambda *_: None)
    code, _, err = run_main(max_steps=2, beta=0.1)
    assert code == 0, err
    assert len(seen) >= 16 and all(seen)


# ---- Scores --------------------------------------------------------------------------------------
def test_arca_computes_no_log_probs_that_it_does_not_need(run, monkeypatch):
    """And its scores are those of both whole forward passes, to the bit."""
    batch = unscored(random_batch())
    run.policy.eval()
    with torch.no_grad():
        _, hidden = run.policy(batch)
        with run.model.disable_adapter():
            base_logp, base_hidden = run.policy(batch)
    heads = []
    inner = trainer.head_logits

    def head_logits(base, hidden):
        heads.append(len(hidden))
        return inner(base, hidden)

    monkeypatch.setattr(trainer, "head_logits", head_logits)
    with torch.no_grad():
        scores = trainer.token_scores(run, batch, {})
        assert sum(heads) == batch.mask.numel()  # of the base alone
        nothing, same_hidden = run.policy(batch, needs_logp=False)
    assert nothing is trainer.NOT_SET and torch.equal(same_hidden, hidden)
    expected = torch.linalg.vector_norm(hidden - base_hidden, dim=-1)
    assert torch.equal(scores, expected) and scores.max() > 0
    assert torch.equal(batch.base_logp, base_logp)


@pytest.mark.parametrize("quantile", [0.3, 0.8])
def test_a_mask_of_the_batch_pools_all_tokens_of_the_rollout(make_run, quantile):
    """Also those of rows that have no advantage and are in no micro-batch."""
    flags = {"trace_mask_scope": "batch", "trace_entropy_quantile": quantile}
    run = make_run(grpo_strace, credit="s_trace", per_device_train_batch_size=4, **flags)
    batch = unscored(random_batch(grpo_strace), grpo_strace)
    batch.advantages[:4] = 0.0
    batch.entropy[:4] += 2.0  # which moves the cutoff
    batch.entropy *= batch.mask
    (micros,) = grpo_strace.micro_batches(run.args, batch)
    grpo_strace.score(run, batch, micros, {})

    def cutoff(entropies: list[float]) -> float:
        """Returns the first entropy that is left out of the top 1 - quantile."""
        ranked = sorted(entropies, reverse=True)
        return ranked[int((1 - quantile) * len(ranked) + 1e-6)]

    of_all = cutoff(batch.entropy[batch.mask].tolist())
    of_some = cutoff(batch.entropy[4:][batch.mask[4:]].tolist())
    assert of_all != of_some
    differ = 0
    for micro in micros:
        assert (micro.rows >= 4).all()
        for row, column in micro.mask.nonzero().tolist():
            entropy = micro.entropy[row, column].item()
            assert micro.credit[row, column].item() == float(entropy > of_all)
            differ += (entropy > of_all) != (entropy > of_some)
    assert differ > 0


def gemma2_run(folder) -> grpo_oar.Run:
    """A random model of Gemma 2's kind, whose logits are capped where they are large."""
    config = transformers.Gemma2Config(
        vocab_size=448, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, max_position_embeddings=512,
        pad_token_id=0, eos_token_id=2, bos_token_id=1, final_logit_softcapping=2.0,
        query_pre_attn_scalar=8,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.get_input_embeddings().weight.data *= 30
    model.save_pretrained(folder)
    argv = ["--model_name_or_path", str(folder), "--max_completion_length", "16"]
    argv += ["--load_in_4bit", "False", "--dtype", "float32", "--oar_answer_mode", "answer_mean"]
    AcceleratorState._reset_state()
    return grpo_oar.build_run(grpo_oar.parse_args(argv), TOKENIZER)


def test_answer_mean_is_the_mean_of_capped_logits(tmp_path):
    """The mean of states, whose logits are capped afterwards, is something else."""
    run = gemma2_run(tmp_path)
    prompt = TOKENIZER.encode("What is 3 + 40?")
    completion = TOKENIZER.encode("it is \\boxed{-743}")
    ids = torch.tensor([prompt + completion])
    batch = grpo_oar.Batch(
        rows=torch.arange(1),
        prompt_width=len(prompt),
        ids=ids,
        attention=torch.ones_like(ids, dtype=torch.bool),
        truncated=torch.zeros(1, dtype=torch.bool),
        sampled_logp=torch.zeros(1, len(completion)),
        entropy=torch.zeros(1, len(completion)),
        advantages=torch.ones(1),
    )
    probes = grpo_oar.find_probes(run, batch, [0])
    length = probes.answers.shape[1]
    assert length >= 3 and (probes.answers >= 0).all()
    base = run.model.get_base_model()
    with torch.no_grad():
        ours = grpo_oar.answer_logp(run, probes, torch.arange(1), probes.ids)
        logits = base(probes.ids).logits[0, -length:]  # as transformers caps them
        states = base.base_model(probes.ids).last_hidden_state[0, -length:]
    assert logits.abs().max() > 1.9  # the cap of 2 matters
    expected = logits.double().mean(0).log_softmax(-1)
    torch.testing.assert_close(ours[0], expected, atol=1e-5, rtol=0)
    of_states = grpo_oar.head_logits(base, states.mean(0)).double().log_softmax(-1)
    assert (of_states - expected).abs().max() > 0.1


# ---- Decoding where a step cannot be captured ----------------------------------------------------
class GraphThatFails:
    """Stands for `torch.cuda.graph` with a model that reads a value on the host."""

    entered = 0

    def __init__(self, graph, capture_error_mode):
        assert capture_error_mode == "thread_local"

    def __enter__(self):
        GraphThatFails.entered += 1
        raise RuntimeError("operation not permitted when stream is capturing")

    def __exit__(self, *_):
        raise AssertionError("it was never entered")


def test_a_step_that_cannot_be_captured_is_decoded_eagerly_and_said_once(run, monkeypatch, capsys):
    prompts = prompts_of(run, 4)
    uniforms = fixed_uniforms(4, 24)
    eager = trainer.sample(run, torch.arange(4), prompts, uniforms)
    monkeypatch.setattr(trainer, "CUDA", True)
    monkeypatch.setattr(trainer.Decoder, "can_capture", True)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    monkeypatch.setattr(torch.cuda, "graph", GraphThatFails)
    monkeypatch.setattr(GraphThatFails, "entered", 0)
    streams = []
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: "the default stream")
    monkeypatch.setattr(torch.cuda, "set_stream", streams.append)
    capsys.readouterr()
    for _ in range(2):
        batch = trainer.sample(run, torch.arange(4), prompts, uniforms)
        assert torch.equal(batch.ids, eager.ids)
        assert torch.equal(batch.sampled_logp, eager.sampled_logp)
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1 and "goes on without a CUDA graph" in said[0]
    assert "not permitted when stream is capturing" in said[0]
    assert GraphThatFails.entered == 1 and not trainer.Decoder.can_capture
    assert streams == ["the default stream"]
