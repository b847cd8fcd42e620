"""OAR against a reference that follows the paper row by row: whole forwards, no cache, no batch."""

import contextlib
import functools
import math
import os
from dataclasses import replace

import numpy
import pandas
import pytest
import torch
import torch.nn.functional as F
from peft.utils.integrations import dequantize_bnb_weight
from support import TINY, TOKENIZER, random_batch, trained, unscored
from torch import Tensor
from transformers import Gemma2Config, Gemma2ForCausalLM

import grpo_oar

PROMPTS = ["Start with 23, add 19, double it.", "Start with 7, triple it.", "7 plus 2?"]
# (reasoning, answer, rest): what is boxed last is the answer; None: the completion has none
COMPLETIONS = [
    ("We begin at 23. Then adding 19 gives 42. So the answer is \\boxed{", "42", "}."),
    ("First we have 7. Next we triple it and get 21. Thus we end with \\boxed{", "2", "}."),
    ("We begin at 23. doubling it gives 46.", None, ""),  # never boxed
    ("\\boxed{", "7", "}."),  # one reasoning token
    ("\\boxed{12} no, \\boxed{", "123456", "} is it."),
    ("\\boxed{1}\\boxed{2}\\boxed{", "3", "}}}\\boxed{4"),  # the last one is never closed
    ("So \\boxed{", "x^{2}+{y}_{1}", "}"),
    ("So \\boxed{", None, "  }."),  # blank
    ("So \\boxed{19", None, ""),  # not closed
    ("gives \\boxed{ab \\boxed{", "9", "} c}."),  # nested: the inner one begins last
    ("\u00e9\u20ac \\boxed{", "\u00e9\u20ac", "} \u00e9"),  # two and three tokens a character
    ("<|im_start|>So<|im_end|> \\boxed{", "42", "}<|im_end|>"),  # special tokens have no text
    ("a" * 30 + " \\boxed{", "1", "}"),
    ("", None, "."),  # one token
    ("We begin at 5. Now we double it and get 11. So the answer is \\boxed{", "1", "}"),
]


def encode(text: str | None) -> list[int]:
    return TOKENIZER.encode(text or "", add_special_tokens=False)


def tokens(parts: tuple) -> list[int]:
    """Returns a completion; each part is encoded alone, so that the answer's place is known."""
    before, answer, after = parts
    return encode(before) + encode(answer) + encode(after)


def make_batch(completions: list[list[int]], prompts: list[list[int]] | None = None):
    """Returns a rollout of these completions, before it is scored."""
    count = len(completions)
    prompts = prompts or [encode(PROMPTS[i % 3]) for i in range(count)]
    width = max(map(len, prompts))
    length = max(map(len, completions))
    ids = torch.zeros(count, width + length, dtype=torch.long)
    attention = torch.zeros_like(ids, dtype=torch.bool)
    for i, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        columns = slice(width - len(prompt), width + len(completion))
        ids[i, columns] = torch.tensor(prompt + completion)
        attention[i, columns] = True
    batch = random_batch(grpo_oar, rows=count, prompt=width, length=length)
    return unscored(
        replace(
            batch,
            ids=ids,
            attention=attention,
            loss_mask=attention[:, width:],
            texts=TOKENIZER.batch_decode(completions),
        )
    )


def score(run, *micros) -> dict[str, float]:
    """Scores the micro-batches as one rollout, and returns its metrics."""
    metrics: dict[str, float] = {}
    grpo_oar.score(run, micros[0], list(micros), metrics)
    return metrics


# ---- The reference -------------------------------------------------------------------------------
def as_fp32(run) -> None:
    """Makes a run compute in fp32, with the weights that it trains with: in bf16, rounded ones."""
    rounded = getattr(torch, run.args.dtype)
    for layer in run.model.float().modules():
        if hasattr(layer, "compute_dtype"):
            weight = dequantize_bnb_weight(layer.weight).to(rounded).float()
            layer.forward = functools.partial(F.linear, weight=weight, bias=layer.bias)


def answer_logp(run, inputs: dict, answer: list[int]) -> Tensor:
    """Returns log-probs [V] of the answer that a whole text predicts."""
    places = 1 if run.args.credit == "oar_p" else len(answer)
    logits = run.model(**inputs).logits[0, -len(answer) :][:places].double() / run.args.temperature
    return logits.mean(0).log_softmax(-1)


def shift(clean: Tensor, changed: Tensor) -> Tensor:
    """Returns KL(clean || changed)."""
    return (clean.exp() * (clean - changed)).sum()


@torch.no_grad()
def naive_oar_p(run, row: int, prompt: list[int], parts: tuple) -> list[float]:
    reasoning = encode(parts[0])
    answer = encode(parts[1])
    rest = encode(run.args.oar_conclude) + answer[:-1]
    clean = answer_logp(run, {"input_ids": torch.tensor([prompt + reasoning + rest])}, answer)
    scores = []
    for t in range(len(reasoning)):
        changed = [*reasoning]
        changed[t] = TOKENIZER.pad_token_id
        ids = torch.tensor([prompt + changed + rest])
        moved = shift(clean, answer_logp(run, {"input_ids": ids}, answer))
        scores.append(max(0.0, moved.item()))
    return scores


def naive_oar_g(run, row: int, prompt: list[int], parts: tuple) -> list[float]:
    reasoning = encode(parts[0])
    answer = encode(parts[1])
    ids = torch.tensor([prompt + reasoning + encode(run.args.oar_conclude) + answer[:-1]])
    embeddings = run.model.get_input_embeddings()(ids).detach()
    place = slice(len(prompt), len(prompt) + len(reasoning))
    seed = grpo_oar.key_seed(run.args.seed, "oar_noise", 0, *divmod(row, run.args.num_generations))
    stream = torch.Generator().manual_seed(seed)
    noisy = embeddings.clone()
    noise = torch.randn(len(reasoning), embeddings.shape[2], generator=stream)
    noisy[0, place] += run.args.oar_noise_std * noise
    noisy.requires_grad_()
    clean = answer_logp(run, {"inputs_embeds": embeddings}, answer).detach()
    moved = shift(clean, answer_logp(run, {"inputs_embeds": noisy}, answer))
    (gradient,) = torch.autograd.grad(moved, noisy)
    return (gradient * embeddings).sum(-1).abs()[0, place].tolist()


def naive_gate(scores: list[float], q=0.25, beta=1.0) -> list[float]:
    """Returns the weights of a completion's reasoning, with the 1e-8 of the authors' code."""
    logs = [math.log1p(score) for score in scores]
    low = min(logs)
    high = max(logs)
    if low == high:
        return [1.0] * len(logs)
    n = [(x - low) / (high - low) for x in logs]
    tau = float(numpy.quantile(n, q))
    weights = []
    for x in n:
        if x < tau:
            weights.append(max(x / (tau + 1e-8), 0.1))
        else:
            weights.append(1 + beta * (x - tau) / (1 - tau + 1e-8))
    total = sum(weights) + 1e-8
    return [w * len(n) / total for w in weights]


def compare(run, batch, naive, tolerance: float) -> None:
    """Compares scores to `tolerance` of the completion's largest one.

    The weights are compared with the gate of our own scores: where tau is near 0 it is steep.
    """
    for row, parts in enumerate(COMPLETIONS):
        length = len(encode(parts[0])) if parts[1] else 0
        scores = batch.scores[row, :length]
        if length:
            prompt = batch.ids[row, : batch.prompt_width][
                batch.attention[row, : batch.prompt_width]
            ]
            expected = torch.tensor(naive(run, row, prompt.tolist(), parts))
            assert (scores - expected).abs().max() <= tolerance * expected.max(), row
            gated = torch.tensor(naive_gate(scores.tolist()))
            torch.testing.assert_close(batch.weights[row, :length], gated, atol=1e-4, rtol=1e-4)
        outside = batch.mask[row, length:].float()
        assert torch.equal(batch.scores[row, length:], -outside)
        assert torch.equal(batch.weights[row, length:], outside)


# ---- Scores --------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def gemma2(tmp_path_factory) -> str:
    """The folder of a random model with windows, whose logits are capped where they are large."""
    torch.manual_seed(0)
    config = Gemma2Config(
        vocab_size=448, hidden_size=32, intermediate_size=64, num_hidden_layers=2, head_dim=8,
        num_attention_heads=4, num_key_value_heads=2, query_pre_attn_scalar=8, sliding_window=16,
        layer_types=["sliding_attention", "full_attention"], final_logit_softcapping=2.0,
    )  # fmt: skip
    model = Gemma2ForCausalLM(config)
    model.get_input_embeddings().weight.data *= 30
    folder = str(tmp_path_factory.mktemp("gemma2"))
    model.save_pretrained(folder)
    TOKENIZER.save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("budget", "weights", "family"),
    [
        (500, "dense", "tiny"),
        pytest.param(16384, "quantized", "gemma2", marks=pytest.mark.slow),
        pytest.param(1, "dense", "tiny", marks=pytest.mark.slow),
    ],
)
def test_oar_p_equals_whole_forwards(make_run, gemma2, budget, weights, family):
    """Prefixes from the cache against a whole forward for each token; with few rows at a time."""
    run = make_run(
        grpo_oar, credit="oar_p", temperature=0.7, rollout_weights=weights,
        oar_max_tokens_per_micro_batch=budget, model=gemma2 if family == "gemma2" else TINY,
    )  # fmt: skip
    batch = make_batch([tokens(parts) for parts in COMPLETIONS])
    metrics = score(run, batch)
    as_fp32(run)
    compare(run, batch, naive_oar_p, 1e-4)
    assert metrics["no_answer_share"] == pytest.approx(4 / 15)


@pytest.mark.parametrize(
    ("noise", "tolerance", "dtype"), [(0.05, 2e-4, "float32"), (1e-3, 4e-3, "bfloat16")]
)
def test_oar_g_equals_one_backward_a_completion(make_run, noise, tolerance, dtype):
    """The gradient is the difference of two distributions: at the default noise fp32 leaves 3 to 5
    digits of it, and bf16 would leave none."""
    run = make_run(grpo_oar, temperature=0.7, oar_noise_std=noise, dtype=dtype)
    batch = make_batch([tokens(parts) for parts in COMPLETIONS])
    score(run, batch)
    as_fp32(run)
    compare(run, batch, naive_oar_g, tolerance)


@pytest.mark.parametrize("credit", ["oar_p", "oar_g"])
def test_a_rollout_scored_one_by_one_in_any_order_is_the_same(make_run, credit):
    whole = make_batch([tokens(parts) for parts in COMPLETIONS[:6]])
    run = make_run(grpo_oar, credit=credit, oar_noise_std=0.05)
    share = score(run, whole)["no_answer_share"]
    order = torch.tensor([3, 0, 5, 2, 4, 1])
    singles = [whole.select(row[None]) for row in order]  # without the others' padding
    assert score(run, *singles)["no_answer_share"] == share > 0
    for row, single in zip(order, singles, strict=True):
        expected = whole.scores[row, : single.mask.shape[1]]
        gap = (single.scores[0] - expected).abs().max()
        assert gap <= 3e-4 * expected.max().clamp(min=0)


@pytest.mark.parametrize("credit", ["oar_p", "oar_g"])
def test_scoring_has_no_dropout_and_touches_no_parameter(make_run, credit):
    """Also where layers are checkpointed, after the old log-probs, which are made with dropout."""
    results = []
    for iterations in (1, 2):
        run = make_run(
            grpo_oar, credit=credit, lora_dropout=0.5, num_iterations=iterations,
            gradient_checkpointing=iterations == 2, dtype="bfloat16", oar_noise_std=0.05,
        )  # fmt: skip
        before = [parameter.detach().clone() for parameter in run.model.parameters()]
        for parameter in trained(run):
            parameter.grad = torch.ones_like(parameter)
        batch = make_batch([tokens(parts) for parts in COMPLETIONS[:2]])
        score(run, batch)
        results.append(batch.scores)
        for parameter, old in zip(run.model.parameters(), before, strict=True):
            assert torch.equal(parameter, old) and parameter.dtype == old.dtype
        assert all((parameter.grad == 1).all() for parameter in trained(run))
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-4 * results[0].max().item())


@pytest.fixture
def shapes(monkeypatch) -> list[tuple]:
    """Of each call of `answer_logp` its rows, its tokens a row, and those in the cache before."""
    found = []
    inner = grpo_oar.answer_logp

    def watched(run, probes, rows, inputs, cache):
        found.append((*inputs.shape[:2], cache.get_seq_length()))
        return inner(run, probes, rows, inputs, cache)

    monkeypatch.setattr(grpo_oar, "answer_logp", watched)
    return found


@pytest.mark.parametrize("credit", ["oar_p", "oar_g", "uniform"])
def test_only_rows_with_an_advantage_and_an_answer_are_asked(make_run, shapes, credit):
    """The second row is asked as if it was alone; plain GRPO asks for nothing.

    The first row's box is in a thought that the prompt has begun, and that never ends."""
    run = make_run(grpo_oar, credit=credit)
    batch = make_batch([tokens(parts) for parts in COMPLETIONS[:4]], [encode(PROMPTS[1])] * 4)
    batch.advantages = torch.tensor([1.0, 1.0, 1.0, 0.0])
    batch.texts[0] = f"<think>{batch.texts[0]}"
    metrics = score(run, batch)
    alone = batch.select(torch.tensor([1]))
    seen = [*shapes]
    shapes.clear()
    assert score(run, alone)["no_answer_share"] == (credit == "uniform") and seen == shapes
    assert metrics["no_answer_share"] == (1 if credit == "uniform" else pytest.approx(2 / 3))
    assert (seen == []) == (credit == "uniform")


def test_oar_p_begins_at_the_replaced_token_and_keeps_its_budget(make_run, shapes):
    """Every forward starts at most 3 tokens before the replaced ones; of 20 rows at a time."""
    reasoning = "We begin at 23. " * 8 + "\\boxed{"
    prompt = encode(PROMPTS[0])
    length = len(encode(reasoning))
    total = len(prompt) + length + len(encode(grpo_oar.Args().oar_conclude))
    run = make_run(grpo_oar, credit="oar_p", oar_max_tokens_per_micro_batch=20 * total)
    batch = make_batch([tokens((reasoning, "23", "}."))], [prompt])
    score(run, batch)
    assert shapes[0] == (1, total, 0) and sum(rows for rows, _, _ in shapes[1:]) == length
    assert all(rows <= 20 and new + past == total for rows, new, past in shapes[1:])
    least = sum(total - len(prompt) - t for t in range(length))  # every row from its own token
    assert least <= sum(rows * new for rows, new, _ in shapes[1:]) <= least + 1.5 * length


# ---- The answer's tokens -------------------------------------------------------------------------
def test_the_answer_is_found_in_the_tokens():
    """Also in those that the tokenizer would not make: letter by letter."""
    for parts in COMPLETIONS:
        begin = len(encode(parts[0]))
        expected = (begin, begin + len(encode(parts[1]))) if parts[1] else None
        assert grpo_oar.answer_span(TOKENIZER, tokens(parts)) == expected, parts
    letters = [encode(letter)[0] for letter in "So \\boxed{42}."]
    assert grpo_oar.answer_span(TOKENIZER, letters) == (10, 12)


class Pieces:
    """A tokenizer whose token ids are places in a list of pieces."""

    def __init__(self, pieces: list[str]):
        self.pieces = pieces

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        return "".join(self.pieces[i] for i in ids)


@pytest.mark.parametrize(
    "pieces, span",
    [
        (["\\", "boxed", "{\\", "frac", "{1", "}{", "2", "}}", "."], (2, 8)),  # as in Qwen's BPE
        (["a", "\\boxed{4}", "b"], (1, 2)),
        (["\\boxed{", "4", "} or {", "4", "}, \\boxed{", "4", "} {", "4", "}"], (5, 6)),
        (["\\boxed{", "", "4", "", "}"], (1, 3)),  # tokens without text go with what follows them
    ],
)
def test_a_token_that_holds_some_of_the_answer_is_of_the_answer(pieces, span):
    assert grpo_oar.answer_span(Pieces(pieces), list(range(len(pieces)))) == span


@pytest.mark.parametrize("credit", ["oar_p", "oar_g"])
def test_hostile_completions_stay_finite(make_run, credit):
    """Every byte token, half a character in the box, unclosed and empty boxes, random tokens."""
    box = encode("\\boxed{")
    close = encode("}")
    half = encode("\u20ac")
    random = torch.randint(0, len(TOKENIZER), (60,), generator=torch.Generator().manual_seed(0))
    batch = make_batch([
        list(range(3, 260)),
        [*half[:1], *box, *half[1:], *half[:1], *close, *half],
        [*half[1:], *box, *box, *box, *close],
        encode("\\boxed" * 20 + "{" * 20),
        encode("{\\boxed{}}" * 8 + "\\\\\\boxed{\\}} \\boxed{\\"),
        [TOKENIZER.eos_token_id],
        [*box, TOKENIZER.pad_token_id, TOKENIZER.eos_token_id, *close],
        encode("\\boxed{" + "9" * 200 + "}"),
        random.tolist(),
    ])  # fmt: skip
    score(make_run(grpo_oar, credit=credit), batch)
    assert batch.scores.isfinite().all() and batch.scores.max() > 0
    assert (batch.weights >= 0).all()
    torch.testing.assert_close(batch.weights.sum(1), batch.mask.sum(1).float(), rtol=1e-5, atol=0)


# ---- Weights -------------------------------------------------------------------------------------
@pytest.mark.parametrize("q", [0.0, 0.25, 0.9, 1.0])
def test_the_gate_equals_the_naive_one(q):
    """Row by row, with ties, equal scores, tau next to the least n, and one or no token."""
    scores = torch.randn(40, 30, generator=torch.Generator().manual_seed(0)).exp() ** 3
    scores[5:10] = scores[5:10].round()
    scores[10] = 3.7
    scores[11, :5] = torch.tensor([math.expm1(n) for n in (0, 5e-9, 1e-8, 0.5, 1)])
    lengths = torch.arange(40) % 31
    lengths[11] = 5
    reasoning = torch.arange(30) < lengths[:, None]
    args = grpo_oar.Args(oar_quantile=q, oar_beta=1.5)
    weights = grpo_oar.gated_weights(args, scores, reasoning)
    assert (weights[~reasoning] == 1).all()
    for row, length in enumerate(lengths.tolist()):
        if length:
            naive = naive_gate(scores[row, :length].tolist(), q, 1.5)
            torch.testing.assert_close(
                weights[row, :length], torch.tensor(naive), atol=1e-6, rtol=0
            )


@pytest.mark.slow
def test_oar_p_in_bf16_ranks_tokens_as_well_as_its_docstring_says(make_run):
    """Spearman's correlation with scores in fp32, in completions of the default task. Run it with
    -s for the figures; OAR_RANKS=128 makes those of the docstring."""
    count = int(os.environ.get("OAR_RANKS", "16"))
    run = make_run(
        grpo_oar, credit="oar_p", dtype="bfloat16", adapter=None, max_completion_length=80,
        num_generations=8, per_device_train_batch_size=count,
    )  # fmt: skip
    batch = grpo_oar.collect(run, {})
    batch.advantages = torch.ones(count)  # all are scored
    with torch.no_grad():
        in_bf16 = grpo_oar.token_scores(run, batch, {})
        run.args.rollout_weights = "quantized"
        run.accelerator.autocast = contextlib.nullcontext
        as_fp32(run)
        in_fp32 = grpo_oar.token_scores(run, batch, {})
    found = []
    for row in range(count):
        is_scored = batch.mask[row] & (in_fp32[row] >= 0)
        if is_scored.sum() >= 5:
            pair = torch.stack([in_bf16[row, is_scored], in_fp32[row, is_scored]], 1)
            found.append(pandas.DataFrame(pair).corr("spearman").iloc[0, 1])
    correlations = numpy.array(found)
    print(
        f"{len(found)} completions: mean {correlations.mean():.3f}, worst {correlations.min():.3f}"
    )
    assert 0.85 < correlations.mean() < 0.99
