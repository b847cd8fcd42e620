"""OAR against a reference that follows the paper row by row: whole forwards, no cache, no batch."""

import functools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from peft.utils.integrations import dequantize_bnb_weight
from support import TINY, random_batch, unscored
from transformers import AutoTokenizer
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

import grpo_oar as trainer

TOKENIZER = AutoTokenizer.from_pretrained(TINY)
MODES = ("last", "answer_mean", "answer_joint")
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
    ("So \\boxed{", None, "}."),  # empty
    ("So \\boxed{", None, "  }."),  # blank
    ("So \\boxed{19", None, ""),  # not closed
    ("gives \\boxed{ab \\boxed{", "9", "} c}."),  # nested: the inner one begins last
    ("Let us start with 7. plus 2 makes 9. \\boxed {", " 9 ", "}."),
    ("\u00e9\u20ac \\boxed{", "\u00e9\u20ac", "} \u00e9"),  # two and three tokens a character
    ("<|im_start|>So<|im_end|> \\boxed{", "42", "}<|im_end|>"),  # special tokens have no text
    ("9 + 9 is 18, 18 + 1 is 19: \\\\boxed{", "19", "}."),
    ("a" * 30 + " \\boxed{", "1", "}"),
    ("", None, "."),  # one token
    ("Then minus 3 makes 20. The final result is \\boxed{", "20", "}.<|im_end|>"),
    ("19 19 19 19 \\boxed{", "19", "}. 19 19"),
    ("We begin at 5. Now we double it and get 11. So the answer is \\boxed{", "1", "}"),
]


def encode(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False)


def tokens(parts) -> list[int]:
    """Each part is tokenized alone, so that the span of the answer is known."""
    return [i for part in parts for i in encode(part or "")]


def make_batch(completions: list[list[int]], prompts=None, advantages=None, rows=None):
    """A rollout of these completions, before it is scored."""
    prompts = prompts or [encode(PROMPTS[i % len(PROMPTS)]) for i in range(len(completions))]
    width, length = max(map(len, prompts)), max(map(len, completions))
    ids = torch.zeros(len(completions), width + length, dtype=torch.long)
    attention = torch.zeros_like(ids, dtype=torch.bool)
    for i, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        columns = slice(width - len(prompt), width + len(completion))
        ids[i, columns], attention[i, columns] = torch.tensor(prompt + completion), True
    batch = random_batch(trainer, rows=len(completions), prompt=width, length=length)
    rows = batch.rows if rows is None else rows
    advantages = batch.advantages if advantages is None else torch.tensor(advantages)
    given = {"ids": ids, "attention": attention, "loss_mask": attention[:, width:]}
    return unscored(replace(batch, rows=rows, advantages=advantages, **given), trainer)


def known_span(parts) -> tuple[int, int] | None:
    before, answer, _ = parts
    return answer and (len(encode(before)), len(encode(before)) + len(encode(answer)))


# --------------------------------------------------------------------------------------------------
# The reference
# --------------------------------------------------------------------------------------------------
@torch.no_grad()
def reference_answer(run, rows, answer, mode):
    """Log-probs of the answer [R, V] (answer_joint: [R, 1]) from whole forwards of `rows`, each of
    them prompt + reasoning + conclude string + answer."""
    logits = run.model(input_ids=rows, attention_mask=torch.ones_like(rows)).logits.double()
    logits = logits[:, -len(answer) - 1 : -1]  # [R, A, V]: what predicts the answer's tokens
    logp = (logits / run.args.temperature).log_softmax(-1)
    if mode == "last":
        return logp[:, 0]
    if mode == "answer_mean":
        return (logits.mean(1) / run.args.temperature).log_softmax(-1)
    return torch.stack([logp[:, j, a] for j, a in enumerate(answer)]).mean(0)[:, None]


def as_fp32(run):
    """Returns the run, to compute in fp32 from now on with the weights that it trains with.

    In bf16, those of NF4 layers are rounded to bf16.
    """
    is_bf16 = run.args.dtype == "bfloat16"
    for layer in run.model.float().modules():
        if not hasattr(layer, "compute_dtype"):
            continue
        layer.compute_dtype = torch.float32
        if is_bf16:
            weight = dequantize_bnb_weight(layer.weight).bfloat16().float()
            layer.forward = functools.partial(F.linear, weight=weight, bias=layer.bias)
    return run


def reference_parts(run, prompt, parts):
    before, answer = encode(parts[0]), encode(parts[1])
    return prompt, before, encode(run.args.oar_conclude) + answer, answer


def reference_oar_p(run, prompt, parts, mode) -> torch.Tensor:
    prompt, before, after, answer = reference_parts(run, prompt, parts)
    rows = [prompt + before + after]
    for t in range(len(before)):
        changed = [*before]
        changed[t] = TOKENIZER.pad_token_id
        rows.append(prompt + changed + after)
    logp = reference_answer(run, torch.tensor(rows), answer, mode)
    clean, changed = logp[:1], logp[1:]
    if mode == "answer_joint":
        return (clean - changed).squeeze(1).clamp(min=0)
    return (clean.exp() * (clean - changed)).sum(1).clamp(min=0)


def reference_oar_g(run, row, prompt, parts) -> torch.Tensor:
    prompt, before, after, answer = reference_parts(run, prompt, parts)
    ids = torch.tensor([prompt + before + after])
    embeds = run.model.get_input_embeddings()(ids).detach()
    key = (run.args.seed, "oar_noise", 0, *divmod(row, run.args.num_generations))
    noise = torch.zeros_like(embeds)
    noise[0, len(prompt) : len(prompt) + len(before)] = run.args.oar_noise_std * torch.randn(
        len(before), embeds.shape[2], generator=trainer.random_stream(*key)
    )

    def says(inputs):
        logits = run.model(inputs_embeds=inputs).logits[0, -len(answer) - 1 : -1].double()
        return (logits.mean(0) / run.args.temperature).log_softmax(-1)

    with torch.no_grad():
        clean = says(embeds)
    noisy = (embeds + noise).requires_grad_()
    (gradient,) = torch.autograd.grad((clean.exp() * (clean - says(noisy))).sum(), noisy)
    saliency = (gradient * embeds).sum(-1).abs()[0]
    return saliency[len(prompt) : len(prompt) + len(before)]


def reference_gate(scores, q=0.25, beta=1.0, floor=0.1, keep_mass=True) -> np.ndarray:
    """One completion, with the 1e-8 of the authors' code."""
    logs = np.log1p(np.asarray(scores, dtype=np.float64))
    if logs.max() == logs.min():
        return np.ones_like(logs)
    n = (logs - logs.min()) / (logs.max() - logs.min())
    tau = np.quantile(n, q)
    weights = [
        max(v / (tau + 1e-8), floor) if v < tau else 1 + beta * (v - tau) / (1 - tau + 1e-8)
        for v in n
    ]
    return np.array(weights) * (len(n) / (sum(weights) + 1e-8) if keep_mass else 1)


def score(run, *micros) -> dict[str, float]:
    """Scores them as one rollout; returns its metrics."""
    metrics: dict[str, float] = {}
    trainer.score(run, micros[0], list(micros), metrics)
    return metrics


def all_prompts():
    return [encode(PROMPTS[i % len(PROMPTS)]) for i in range(len(COMPLETIONS))]


def compare(batch, reference, tolerance: float = 1e-4, rounding: float = 0.0) -> None:
    """Scores to `tolerance` of the completion's largest, and `rounding`; the weights they give.

    From n to a weight the slope is at most 1 / tau (where tau is above the floor of n that any
    score has) or 1 / (1 - tau): where tau is near 0, the weights' tolerance is wider by as much.
    """
    scored = 0
    for row, parts in enumerate(COMPLETIONS):
        unscored = -batch.mask[row].float()
        if parts[1] is None:
            assert torch.equal(batch.scores[row], unscored)
            assert torch.equal(batch.weights[row], batch.mask[row].float())
            continue
        length = len(encode(parts[0]))
        expected, got = reference(row, parts), batch.scores[row, :length]
        scale = expected.max()  # 0 where no token's loss makes the answer less likely (joint)
        scored += bool(scale > 0)
        assert (got - expected).abs().max() <= tolerance * scale + rounding
        assert torch.equal(batch.scores[row, length:], unscored[length:])
        weights = reference_gate(expected.tolist())
        tau = 0.0
        if length > 1:
            logs = np.log1p(expected.double().numpy())
            tau = np.quantile((logs - logs.min()) / max(np.ptp(logs), 1e-300), 0.25)
        slope = max(1 / max(tau, 0.05), 1 / (1 - tau))
        error = np.abs(batch.weights[row, :length].numpy() - weights).max()
        assert error <= 3 * tolerance * slope, (row, tau)
        after = batch.mask[row, length:].float()
        assert torch.equal(batch.weights[row, length:], after)
    assert scored >= 14
    assert not batch.weights.requires_grad and not batch.scores.requires_grad


# --------------------------------------------------------------------------------------------------
# Scores
# --------------------------------------------------------------------------------------------------
DTYPES = ("float32", "bfloat16")
SLOW_MODES = [pytest.param(x, marks=pytest.mark.slow) for x in ("answer_mean", "answer_joint")]


@pytest.mark.parametrize("weights", ["dense", pytest.param("quantized", marks=pytest.mark.slow)])
@pytest.mark.parametrize("mode", ["last", *SLOW_MODES])
def test_oar_p_equals_whole_forwards(make_run, mode, weights):
    """Prefixes from the cache against one whole forward a row; a budget of few rows as well."""
    budget = {"last": 16384, "answer_mean": 500, "answer_joint": 1}[mode]
    run = make_run(
        trainer, credit="oar_p", oar_answer_mode=mode, temperature=0.7, rollout_weights=weights,
        oar_max_tokens_per_micro_batch=budget,
    )  # fmt: skip
    prompts, batch = all_prompts(), make_batch([tokens(p) for p in COMPLETIONS])
    metrics = score(run, batch)
    as_fp32(run)
    # A difference of log-probs, some below -20, which fp32 rounds wherever their difference is.
    rounding = 3e-5 if mode == "answer_joint" else 0.0

    def expected(row, parts):
        return reference_oar_p(run, prompts[row], parts, mode).float()

    compare(batch, expected, rounding=rounding)
    assert metrics["no_answer_share"] == pytest.approx(5 / 20)


@pytest.mark.parametrize(
    ("noise", "tolerance", "dtype"), [(0.05, 2e-4, "float32"), (1e-3, 4e-3, "bfloat16")]
)
def test_oar_g_equals_one_backward_a_completion(make_run, noise, tolerance, dtype):
    """The gradient is the difference of two distributions. At the default noise they agree in 3 to
    5 digits, and of those that fp32 has any two orders of summation share the rest only. In bf16
    they would share none: a policy in bf16 is scored in fp32, too."""
    run = make_run(trainer, temperature=0.7, oar_noise_std=noise, dtype=dtype)
    prompts, batch = all_prompts(), make_batch([tokens(p) for p in COMPLETIONS])
    score(run, batch)
    as_fp32(run)

    def reference(row, parts):
        return reference_oar_g(run, row, prompts[row], parts).float()

    compare(batch, reference, tolerance)


def test_oar_g_in_bf16_if_asked_for(make_run):
    """At a noise that bf16 does not drown: near fp32's scores, and not the same."""
    found = {}
    for fp32 in (True, False):
        how = {"oar_noise_std": 0.5, "dtype": "bfloat16", "score_in_fp32": fp32}
        batch = make_batch([tokens(p) for p in COMPLETIONS])
        score(make_run(trainer, **how), batch)
        found[fp32] = batch.scores[batch.scores > 0]
    assert not torch.allclose(found[True], found[False], rtol=1e-3)
    assert torch.corrcoef(torch.stack([found[True], found[False]]))[0, 1] > 0.95


def test_oar_g_in_float64_at_the_default_noise(make_run, monkeypatch):
    """What is left of the difference in fp32 is rounding: in float64, where transformers' norms and
    our logits are not in fp32 either, six more digits agree."""
    run = make_run(trainer, temperature=0.7, load_in_4bit=False)
    run.model.double()
    head = run.model.get_output_embeddings()
    monkeypatch.setattr(trainer, "head_logits", lambda base, hidden: head(hidden))
    monkeypatch.setattr(
        Qwen3RMSNorm, "forward", lambda norm, x: F.rms_norm(x, x.shape[-1:], norm.weight, 1e-6)
    )
    prompts, batch = all_prompts(), make_batch([tokens(p) for p in COMPLETIONS])
    probes = trainer.find_probes(run, batch, list(range(len(batch.rows))))
    found, _ = trainer.gradient_scores(run, batch, probes)
    for row, reasoning, scores in zip(probes.rows, probes.reasoning, found, strict=True):
        expected = reference_oar_g(run, row, prompts[row], COMPLETIONS[row])
        assert scores.dtype == torch.float64
        assert (scores[reasoning] - expected).abs().max() <= 1e-6 * expected.max()


@pytest.mark.parametrize("credit", ["oar_p", "oar_g"])
def test_batched_equals_one_by_one_in_any_order(make_run, credit):
    whole = make_batch([tokens(p) for p in COMPLETIONS])
    run = make_run(trainer, credit=credit, oar_noise_std=0.05)
    share = score(run, whole)["no_answer_share"]
    order = torch.randperm(len(COMPLETIONS), generator=torch.Generator().manual_seed(0))
    singles = [whole.select(row[None]) for row in order]  # without the others' padding
    assert score(run, *singles)["no_answer_share"] == share > 0
    for row, single in zip(order, singles, strict=True):
        length = single.mask.shape[1]
        # A shift of 1e-6 leaves few digits: other sums of its two distributions share 3 or 4.
        gap = (single.scores[0] - whole.scores[row, :length]).abs()
        assert (gap <= 3e-4 * whole.scores[row].max().clamp(min=0)).all()
        gap = (single.weights[0] - whole.weights[row, :length]).abs()
        assert gap.max() < 1e-2 and gap.mean() < 1e-3  # tau near 0 is steep


@pytest.mark.parametrize("credit", ["oar_p", "oar_g"])
@pytest.mark.parametrize("mode", MODES)
def test_every_method_has_every_answer_mode(make_run, credit, mode):
    run = make_run(trainer, credit=credit, oar_answer_mode=mode)
    batch = make_batch([tokens(p) for p in COMPLETIONS[:2]])
    score(run, batch)
    assert (batch.scores.amax(1) > 0).all()
    assert batch.weights.std(1).min() > 0.1


def test_the_default_modes_are_the_authors():
    assert trainer.parse_args(["--credit", "oar_p"]).oar_answer_mode == "last"
    assert trainer.parse_args(["--credit", "oar_g"]).oar_answer_mode == "answer_mean"
    assert trainer.parse_args(["--oar_answer_mode", "last"]).oar_answer_mode == "last"


def watch(monkeypatch, what) -> list:
    """What `what(tokens, cache)` says of each forward that asks for the answer, before it runs."""
    seen, inner = [], trainer.answer_logp

    def watched(run, probes, rows, tokens, cache=None):
        seen.append(what(tokens, cache))
        return inner(run, probes, rows, tokens, cache)

    monkeypatch.setattr(trainer, "answer_logp", watched)
    return seen


def test_only_the_reasoning_gets_noise(make_run, monkeypatch):
    """And the noise has the std of the flag; two rows of one prompt have different noise."""
    run = make_run(trainer, oar_noise_std=0.01)
    seen = watch(monkeypatch, lambda embeds, _: embeds.detach())
    parts, prompt = COMPLETIONS[0], encode(PROMPTS[0])
    score(run, make_batch([tokens(parts)] * 2, [prompt] * 2, [1.0, -1.0]))
    clean, noisy = seen
    noise, reasoning = noisy - clean, torch.zeros(clean.shape[1], dtype=torch.bool)
    reasoning[: len(encode(parts[0]))] = True  # prompts are read before
    assert noise[:, reasoning].std().item() == pytest.approx(0.01, rel=0.05)
    assert (noise[:, ~reasoning] == 0).all()
    assert (noise[0] - noise[1]).abs().max() > 1e-3


# --------------------------------------------------------------------------------------------------
# What attribution must not touch, and what it may cost
# --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("credit", ["oar_p", "oar_g"])
def test_no_parameter_notices(make_run, credit, checkpointing, dtype):
    run = make_run(trainer, credit=credit, gradient_checkpointing=checkpointing, dtype=dtype)
    kept = {torch.float32, getattr(torch, dtype)}  # LoRA is in fp32
    assert {p.dtype for p in run.model.parameters() if p.is_floating_point()} == kept
    batch = make_batch([tokens(p) for p in COMPLETIONS[:8]])
    trained = [p for p in run.model.parameters() if p.requires_grad]
    for i, parameter in enumerate(trained[::2]):
        parameter.grad = torch.full_like(parameter, float(i))
    before = [(p.requires_grad, p.grad, p.detach().clone()) for p in run.model.parameters()]
    values = [None if grad is None else grad.clone() for _, grad, _ in before]
    score(run, batch)
    for parameter, (required, grad, data), value in zip(
        run.model.parameters(), before, values, strict=True
    ):
        assert parameter.requires_grad == required and parameter.grad is grad
        assert grad is None or torch.equal(grad, value)
        assert parameter.dtype == data.dtype and torch.equal(parameter, data)
    for module in run.model.modules():  # only whole layers, where these are to be checkpointed
        assert not module.training or getattr(module, "gradient_checkpointing", False)
        assert getattr(module, "compute_dtype", run.args.dtype) in (dtype, getattr(torch, dtype))
    assert torch.is_grad_enabled()


@pytest.mark.parametrize("credit", ["oar_p", "oar_g"])
def test_no_score_is_made_with_dropout(make_run, credit):
    """Also not after a second iteration's old log-probs, which are made with it."""
    results = []
    for iterations in (1, 2):
        how = {"lora_dropout": 0.5, "num_iterations": iterations}
        batch = make_batch([tokens(p) for p in COMPLETIONS[:2]])
        score(make_run(trainer, credit=credit, **how), batch)
        results.append(batch.scores)
    assert torch.equal(*results)


def test_gradient_checkpointing_recomputes_and_changes_nothing(make_run):
    results, calls = [], []
    for checkpointing in (False, True):
        run = make_run(
            trainer, gradient_checkpointing=checkpointing, lora_dropout=0.5, oar_noise_std=0.01
        )
        layer = run.model.get_base_model().base_model.layers[0]
        calls.append(0)
        layer.mlp.register_forward_pre_hook(lambda *_: calls.append(calls.pop() + 1))
        batch = make_batch([tokens(p) for p in COMPLETIONS[:2]])
        score(run, batch)
        results.append(batch.scores)
    assert calls == [3, 3]  # prompts, clean and noisy; clean, noisy and the latter once more
    assert torch.allclose(*results, rtol=1e-4, atol=1e-5 * float(results[0].max()))


@pytest.mark.parametrize("credit", ["oar_p", "oar_g"])
def test_no_work_where_there_is_no_advantage(make_run, monkeypatch, credit):
    """Only the second row has both an advantage and an answer: it is asked as if it was alone."""
    run, shapes = make_run(trainer, credit=credit), watch(monkeypatch, lambda x, _: x.shape[:2])
    texts, prompts = [tokens(p) for p in COMPLETIONS[:4]], [encode(PROMPTS[1])] * 4
    batch = make_batch(texts, prompts, [0.0] * 4)
    metrics = score(run, batch)
    assert not shapes and metrics["credit_forward_tokens"] == 0
    assert metrics.get("no_answer_share", 0) == 0  # nobody was asked
    assert torch.equal(batch.weights, batch.mask.float())

    metrics = score(run, make_batch(texts, prompts, [0.0, 1.0, 1.0, 0.0]))
    assert metrics["no_answer_share"] == 0.5
    among_others = [*shapes]
    shapes.clear()
    metrics = score(run, make_batch([texts[1]], prompts[:1], [1.0]))
    assert shapes == among_others and metrics["no_answer_share"] == 0
    assert metrics["credit_forward_tokens"] == sum(map(math.prod, shapes))


@pytest.mark.parametrize("most", [20, 10_000])
def test_oar_p_reuses_the_prefix_and_keeps_its_budget(make_run, monkeypatch, most):
    """Every token's forward starts at most 3 tokens before it; of `most` rows at a time."""
    reasoning, prompt = "We begin at 23. " * 20 + "\\boxed{", encode(PROMPTS[0])
    length, conclude = len(encode(reasoning)), len(encode(trainer.Args().oar_conclude))
    total = len(prompt) + length + conclude
    shapes = watch(monkeypatch, lambda tokens, cache: (*tokens.shape, cache.get_seq_length()))
    run = make_run(trainer, credit="oar_p", oar_max_tokens_per_micro_batch=most * total)
    metrics = score(run, make_batch([tokens((reasoning, "23", "}."))], [prompt], [1.0]))
    clean, *blocks = shapes
    assert clean == (1, total, 0)
    assert sum(rows for rows, _, _ in blocks) == length
    assert all(rows <= most and new + past == total for rows, new, past in blocks)
    least = sum(total - len(prompt) - t for t in range(length))  # every row from its own token
    assert least <= metrics["credit_forward_tokens"] - total <= least + 1.5 * length


# --------------------------------------------------------------------------------------------------
# The answer's tokens
# --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("parts", COMPLETIONS)
def test_the_answer_is_found_in_the_tokens(parts):
    assert trainer.answer_span(TOKENIZER, tokens(parts)) == known_span(parts)


def test_the_answer_is_found_in_tokens_the_tokenizer_would_not_make():
    text = "So \\boxed{42}."
    letters = [i for letter in text for i in encode(letter)]
    assert letters != encode(text)
    assert trainer.answer_span(TOKENIZER, letters) == (10, 12)


class Pieces:
    """A tokenizer whose token ids are places in a list of pieces."""

    def __init__(self, *pieces):
        self.pieces = pieces

    def decode(self, ids, skip_special_tokens):
        assert skip_special_tokens  # as the graded text
        return "".join(self.pieces[i] for i in ids)


@pytest.mark.parametrize(
    "pieces, span",
    [
        (["\\", "boxed", "{\\", "frac", "{1", "}{", "2", "}}", "."], (2, 8)),  # as in Qwen's BPE
        (["a", "\\boxed{4}", "b"], (1, 2)),
        (["\\boxed{4}"], (0, 1)),
        (["\\boxed{", "4", "} or {", "4", "}, \\boxed{", "4", "} {", "4", "}"], (5, 6)),
        (["\\boxed{", "", "4", "", "}"], (1, 3)),  # tokens without text go with what follows them
    ],
)
def test_a_token_that_holds_some_of_the_answer_is_of_the_answer(pieces, span):
    assert trainer.answer_span(Pieces(*pieces), list(range(len(pieces)))) == span


def test_hostile_completions_stay_finite(make_run):
    """Every byte token, half a character in the box, unclosed and empty boxes, random tokens."""
    generator = torch.Generator().manual_seed(0)
    box, close = encode("\\boxed{"), encode("}")
    half = encode("\u20ac")
    assert len(half) > 1
    hostile = [
        list(range(3, 260)),
        [*box, *half[:1], *close],
        [*half[:1], *box, *half[1:], *half[:1], *close, *half],
        [*half[1:], *box, *box, *box, *close],
        [*box, *close, *box, *close],
        encode("\\boxed" * 20 + "{" * 20),
        encode("{\\boxed{}}" * 8 + "\\\\\\boxed{\\}} \\boxed{\\"),
        [TOKENIZER.eos_token_id],
        [*box, TOKENIZER.pad_token_id, TOKENIZER.eos_token_id, *close],
        encode("\\boxed{" + "9" * 200 + "}"),
        *(torch.randint(0, len(TOKENIZER), (60,), generator=generator).tolist() for _ in range(2)),
    ]
    for credit in ("oar_p", "oar_g"):
        batch = make_batch(hostile)
        score(make_run(trainer, credit=credit), batch)
        assert batch.scores.isfinite().all() and batch.scores.max() > 0
        assert ((batch.scores >= 0) | (batch.scores == -1)).all()
        assert batch.weights.isfinite().all() and (batch.weights >= 0).all()
        assert torch.allclose(batch.weights.sum(1), batch.mask.sum(1).float(), rtol=1e-5)


# --------------------------------------------------------------------------------------------------
# Gating
# --------------------------------------------------------------------------------------------------
def gate(scores, length=None, **flags) -> torch.Tensor:
    scores = torch.tensor([scores], dtype=torch.double)
    reasoning = torch.arange(scores.shape[1])[None] < (length or scores.shape[1])
    return trainer.reshape_scores(trainer.Args(**flags), scores, reasoning)[0]


def test_gating_by_hand():
    """n = 0, 1/4, 1/2, 3/4, 1 and tau = n_(q * 4)."""
    scores = [math.expm1(x) for x in (0.0, 0.5, 1.0, 1.5, 2.0)]
    free = {"oar_keep_mass": False}
    expected = {
        0: [1, 1.25, 1.5, 1.75, 2],
        0.25: [0.1, 1, 4 / 3, 5 / 3, 2],
        0.375: [0.1, 2 / 3, 1.2, 1.6, 2],  # tau between two scores
        0.5: [0.1, 0.5, 1, 1.5, 2],
        1: [0.1, 0.25, 0.5, 0.75, 1],
    }
    for q, weights in expected.items():
        assert gate(scores, oar_quantile=q, **free).tolist() == pytest.approx(weights, abs=1e-6)
        kept = [w * 5 / sum(weights) for w in weights]
        assert gate(scores, oar_quantile=q).tolist() == pytest.approx(kept, abs=1e-6)
    assert gate(scores, oar_beta=0.0, **free).tolist() == pytest.approx([0.1, 1, 1, 1, 1])
    assert gate(scores, oar_beta=3.0, **free)[4].item() == pytest.approx(4)
    floored = gate(scores, oar_floor=0.4, oar_quantile=0.5, **free)
    assert floored[:2].tolist() == pytest.approx([0.4, 0.5])


def test_gating_has_the_authors_1e_8():
    """It counts where the quantile is next to the smallest or the largest n."""
    how = {"oar_keep_mass": False, "oar_quantile": 0.5}
    small = gate([math.expm1(n) for n in (0, 5e-9, 1e-8, 0.5, 1)], **how)
    large = gate([math.expm1(n) for n in (0, 1 - 1e-8, 1)], **how)
    assert small[1].item() == pytest.approx(0.25, rel=1e-5)  # without it 0.5
    assert large[2].item() == pytest.approx(1.5, rel=1e-5)  # without it 2


def test_the_rest_of_a_completion_weighs_one():
    """What is outside the reasoning has no say in the quantile, the range or the mass."""
    alone, padded = gate([1.0, 2.0, 5.0]), gate([1.0, 2.0, 5.0, 99.0, 0.0], length=3)
    assert torch.equal(padded[:3], alone) and padded[3:].tolist() == [1, 1]


@pytest.mark.parametrize("q", [0.0, 0.25, 1.0])
@pytest.mark.parametrize("keep_mass", [True, False])
def test_equal_scores_give_one(q, keep_mass):
    for scores in ([0.0] * 5, [3.7] * 5, [2.0], [0.0], [1e-30] * 2, [1e30] * 3):
        assert gate(scores, oar_quantile=q, oar_keep_mass=keep_mass).tolist() == [1] * len(scores)


def test_ragged_gating_equals_the_reference_row_by_row():
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(40, 30, generator=generator).exp() ** 3
    scores[5:10] = scores[5:10].round()  # ties
    lengths = torch.randint(0, 31, (40,), generator=generator)
    reasoning = torch.arange(30) < lengths[:, None]
    for q in (0.0, 0.25, 0.9, 1.0):
        for keep in (True, False):
            args = trainer.Args(oar_quantile=q, oar_keep_mass=keep)
            weights = trainer.reshape_scores(args, scores, reasoning)
            assert (weights[~reasoning] == 1).all()
            for row, length in enumerate(lengths.tolist()):
                if length:
                    expected = reference_gate(scores[row, :length], q, keep_mass=keep)
                    assert np.allclose(weights[row, :length], expected, atol=1e-6)
                if keep:
                    total = weights[row, :length].double().sum().item()
                    assert total == pytest.approx(length, rel=1e-6)


@pytest.mark.parametrize(
    "name, value", [("oar_quantile", "1.5"), ("oar_noise_std", "0"), ("oar_beta", "-1")]
)
def test_flags_that_make_no_sense_are_refused(name, value, capsys):
    with pytest.raises(SystemExit) as stop:
        trainer.parse_args([f"--{name}={value}"])
    assert stop.value.code == 2 and f"--{name}" in capsys.readouterr().err


# --------------------------------------------------------------------------------------------------
# Weights: controls and plain GRPO
# --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("credit", ["oar_g", "oar_p", "random", "shuffled"])
def test_the_mass_is_kept(make_run, credit):
    run = make_run(trainer, credit=credit)
    batch = make_batch([tokens(p) for p in COMPLETIONS])
    score(run, batch)
    mean = batch.weights.double().sum(1) / batch.mask.sum(1)
    assert (mean - 1).abs().max() < 1e-6
    assert (batch.weights[~batch.mask] == 0).all() and batch.credit is batch.weights


def test_controls_keep_the_weights_and_lose_their_places(make_run):
    batches = {}
    for credit in ("oar_g", "random", "shuffled"):
        batches[credit] = make_batch([tokens(p) for p in COMPLETIONS])
        score(make_run(trainer, credit=credit), batches[credit])
    original = batches["oar_g"].weights
    for row, parts in enumerate(COMPLETIONS):
        length = len(encode(parts[0])) if parts[1] else 0
        before = original[row, :length]
        moved, drawn = (batches[c].weights[row] for c in ("shuffled", "random"))
        assert torch.equal(moved[:length].sort()[0], before.sort()[0])
        for weights in (moved, drawn):
            assert torch.equal(weights[length:], original[row, length:])
            if length > 8:
                assert (weights[:length] - before).abs().max() > 0.1
        if length > 1:  # as concentrated: the same sum of squares
            assert drawn.square().sum().item() == pytest.approx(
                original[row].square().sum().item(), rel=2e-2
            )


def test_uniform_is_plain_grpo_to_the_bit(make_run, monkeypatch):
    run = make_run(trainer, credit="uniform")
    monkeypatch.setattr(trainer, "answer_logp", None)  # would be an error
    batch = make_batch([tokens(p) for p in COMPLETIONS[:8]])
    assert score(run, batch).get("no_answer_share", 0) == 0  # nobody was asked
    assert torch.equal(batch.weights, batch.mask.float())
    old_logp, log_ratio = -torch.rand(batch.mask.shape), torch.randn(batch.mask.shape) * 0.3
    weight, advantages = trainer.surrogate_terms(run.args, batch, log_ratio)
    assert weight is log_ratio
    assert torch.equal(advantages, batch.advantages[:, None] * batch.mask)
    scale = trainer.token_scale(run.args, batch.loss_mask, len(batch.rows), 0)
    loss, _ = trainer.policy_loss(run.args, batch, old_logp + log_ratio, old_logp, scale)
    plain = replace(batch, credit=torch.ones_like(old_logp))  # no weights at all
    again, _ = trainer.policy_loss(run.args, plain, old_logp + log_ratio, old_logp, scale)
    assert torch.equal(loss, again)


def test_without_kept_mass_the_mean_is_what_it_is(make_run):
    batch = make_batch([tokens(COMPLETIONS[0])])
    run = make_run(trainer, oar_keep_mass=False, oar_quantile=0.0)
    score(run, batch)
    assert batch.weights[batch.mask].min() >= 1 and batch.weights.max() == 2
