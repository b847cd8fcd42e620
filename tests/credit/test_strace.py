"""grpo_strace.py's traces against naive double loops, their exact limits and TRL. No GPU, ~20 s.

Everything runs through the trainer's own policy_loss, on ragged off-policy batches whose log-probs
are free leaves: what is compared is the loss and its gradient with respect to every token.
"""

import functools
import itertools
import math
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from support import trl_loss
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import grpo_strace as g

LENGTHS, WIDTH = (13, 1, 8, 21, 2, 16), 3  # tokens of each completion; of the longest prompt
SCOPES = ("completion", "batch")
ALL_TRACES = ("s_trace", "p_trace", "gspo", "grpo_lambda")


@functools.cache  # 30 ms each
def flags(**values) -> g.Args:
    """The script's own parser, so that flag names, choices and defaults are those of a run."""
    return g.parse_args(["--num_generations=2"] + [f"--{k}={v}" for k, v in values.items()])


def ragged(seed: int = 0, lengths: tuple[int, ...] = LENGTHS) -> g.Batch:
    """A collected and scored batch, with left-padded prompts and entropies that tie."""
    draw = torch.Generator().manual_seed(seed)
    rows, longest = len(lengths), max(lengths)
    attention = torch.ones(rows, WIDTH + longest, dtype=torch.bool)
    for row, length in enumerate(lengths):
        attention[row, : row % WIDTH] = False
        attention[row, WIDTH + length :] = False
    mask = attention[:, WIDTH:]
    entropy = torch.randint(0, 12, (rows, longest), generator=draw) / 8
    return g.Batch(
        rows=torch.arange(rows),
        prompt_width=WIDTH,
        ids=torch.randint(0, 99, (rows, WIDTH + longest), generator=draw),
        attention=attention,
        truncated=torch.zeros(rows, dtype=torch.bool),
        loss_mask=mask,
        sampled_logp=torch.zeros(rows, longest),
        rewards=torch.zeros(rows),
        advantages=torch.randn(rows, generator=draw),
        old_logp=-2 * torch.rand(rows, longest, generator=draw),
        base_logp=-2 * torch.rand(rows, longest, generator=draw),
        entropy=entropy,
        scores=entropy * mask,
    )


def ratios(batch: g.Batch, spread: float, seed: int = 1) -> Tensor:
    """log rho [N, T]: what the policy's log-probs moved by since the rollout."""
    draw = torch.Generator().manual_seed(seed)
    return spread * torch.randn(batch.mask.shape, generator=draw)


def assign(args: g.Args, *micros: g.Batch) -> dict[str, float]:
    """The metrics of a rollout that is these micro-batches."""
    metrics: dict[str, float] = {}
    run = SimpleNamespace(args=args, accelerator=Accelerator(cpu=True))
    with torch.no_grad():  # as in the trainer's score()
        entropy = torch.cat([micro.entropy[micro.mask] for micro in micros])
        rollout = SimpleNamespace(entropy=entropy, mask=torch.ones_like(entropy, dtype=torch.bool))
        g.assign_credit(run, rollout, list(micros), metrics)
    return metrics


def loss_of(args: g.Args, batch: g.Batch, log_ratio: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Loss, its gradient [N, T] with respect to the log-probs, and the clipped tokens [N, T]."""
    assign(args, batch)
    logp = (batch.old_logp + log_ratio).requires_grad_()
    mask = batch.loss_mask
    scale = g.token_scale(args, mask, len(mask), mask.sum().item())
    loss, clipped = g.policy_loss(args, batch, logp, batch.old_logp, scale)
    return loss.detach(), torch.autograd.grad(loss, logp)[0], clipped


def assert_same_to_the_bit(one: g.Args, two: g.Args, spread: float = 0.5) -> None:
    for seed in range(3):
        batch = ragged(seed)
        log_ratio = ratios(batch, spread, seed + 10)
        a, b = loss_of(one, batch, log_ratio), loss_of(two, batch, log_ratio)
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
        assert a[1].abs().sum() > 0 and a[2].any() and not a[2][batch.mask].all()


# ---------------------------------------------------------------------------- naive reference


def naive_kept(args: g.Args, batch: g.Batch) -> list[list[int]]:
    """m, token by token: kept if the tokens at or above its entropy fit into the top share."""
    tokens = [batch.entropy[row][batch.mask[row]].tolist() for row in range(len(batch.rows))]
    everyone = [h for row in tokens for h in row]
    share, kept = 1 - args.trace_entropy_quantile, []
    for row in tokens:
        scope = everyone if args.trace_mask_scope == "batch" else row
        above = [sum(other >= h for other in scope) for h in row]
        kept.append([int(rank <= share * len(scope) + 1e-9) for rank in above])
    return kept


def naive_matrix(args: g.Args, kept: list[int]) -> Tensor:
    """W [n, n] in double precision of one completion with mask m, straight from the table."""
    n, decay = len(kept), args.trace_lambda
    w = torch.zeros(n, n, dtype=torch.float64)
    for t in range(n):
        for k in range(n):
            if args.credit == "gspo":
                w[t, k] = 1 / n
            elif args.credit == "uniform":
                w[t, k] = float(t == k)
            elif k <= t and args.credit == "grpo_lambda" and args.trace_kernel == "both":
                w[t, k] = max(decay**k, decay ** (t - k))
            elif k <= t and args.credit in ("p_trace", "grpo_lambda"):
                w[t, k] = decay ** (t - k)
            elif k < t:
                w[t, k] = kept[k] * decay ** (t - k)
            elif k == t:
                w[t, k] = 1 if args.trace_keep_own else kept[k]
        if args.trace_normalize and w[t].sum() > 0:
            w[t] /= w[t].sum().clone()
    return w


def naive_loss(args: g.Args, batch: g.Batch, matrices: list[Tensor], log_ratio: Tensor):
    """METHODS' objective, per-completion mean, one token at a time; loss and gradient [N, T]."""
    leaf = log_ratio.double().requires_grad_()
    total = torch.zeros((), dtype=torch.float64)
    for row, w in enumerate(matrices):
        advantage = batch.advantages[row].double()
        for t in range(len(w)):
            ratio = sum(w[t, k] * leaf[row, k] for k in range(len(w))).exp()
            low, high = 1 - args.epsilon, 1 + args.epsilon_high
            clipped = ratio.clamp(low, high)
            total = total - torch.min(ratio * advantage, clipped * advantage) / len(w)
    loss = total / len(matrices)
    return loss.detach(), torch.autograd.grad(loss, leaf)[0]


GRID = [
    dict(credit=credit, trace_normalize=normalize, trace_lambda=decay, **more)
    for normalize, decay in itertools.product((False, True), (0.0, 0.7, 1.0))
    for credit, more in [
        ("p_trace", {}),
        ("grpo_lambda", {"trace_kernel": "recent"}),
        ("grpo_lambda", {"trace_kernel": "both"}),
        *(
            (
                "s_trace",
                {"trace_entropy_quantile": q, "trace_keep_own": own, "trace_mask_scope": scope},
            )
            for q, own, scope in itertools.product((0.5, 0.8), (True, False), SCOPES)
        ),
    ]
] + [{"credit": "gspo"}, {"credit": "uniform"}]


def name_of(values: dict) -> str:
    return "-".join(map(str, values.values()))


@pytest.mark.parametrize("values", GRID, ids=name_of)
def test_every_member_of_the_family_equals_its_double_loop(values):
    args, batch = flags(epsilon=0.1, epsilon_high=0.15, **values), ragged(3)
    log_ratio = ratios(batch, 0.6)
    loss, grad, clipped = loss_of(args, batch, log_ratio)
    matrices = [naive_matrix(args, kept) for kept in naive_kept(args, batch)]
    expected, expected_grad = naive_loss(args, batch, matrices, log_ratio)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6, abs=1e-6)
    torch.testing.assert_close(grad.double(), expected_grad, rtol=1e-5, atol=1e-6)
    assert clipped.any() and not clipped[batch.mask].all()


@pytest.mark.parametrize("values", GRID, ids=name_of)
def test_at_ratio_one_weights_are_what_reaches_each_tokens_gradient(values):
    args, batch = flags(**values), ragged(4)
    _, grad, clipped = loss_of(args, batch, torch.zeros(batch.mask.shape))
    gain = assign(args, batch)["trace_gain"]
    raw = torch.zeros_like(batch.weights)
    for row, kept in enumerate(naive_kept(args, batch)):
        w = naive_matrix(args, kept)
        raw[row, : len(w)] = torch.stack([w[:, k].sum() for k in range(len(w))])
    lengths = batch.mask.sum(1, keepdim=True)
    expected = -batch.advantages[:, None] * raw / lengths / len(raw)
    torch.testing.assert_close(grad, expected, rtol=1e-5, atol=1e-7)
    assert not clipped.any()
    mean = raw.sum(1, keepdim=True) / lengths  # [N, 1]
    torch.testing.assert_close(batch.weights * mean, raw, rtol=1e-5, atol=1e-6)
    has_any = (raw.sum(1) > 0).float()  # with own terms dropped, maybe no token reaches the loss
    torch.testing.assert_close(batch.weights.sum(1) / lengths[:, 0], has_any)
    assert gain == pytest.approx((raw.sum() / lengths.sum()).item(), rel=1e-5)


# ----------------------------------------------------------------------------- exact limits


@pytest.mark.parametrize("loss_type", ["grpo", "dapo", "dr_grpo"])
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("credit", ["s_trace", "p_trace", "grpo_lambda"])
def test_lambda_zero_is_grpo_to_the_bit(credit, normalize, loss_type):
    common = {"loss_type": loss_type, "beta": 0.04}
    trace = flags(credit=credit, trace_lambda=0, trace_normalize=normalize, **common)
    assert_same_to_the_bit(trace, flags(credit="uniform", **common))


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("scope", SCOPES)
def test_with_every_token_kept_s_trace_is_p_trace_to_the_bit(scope, own, normalize):
    common = {"trace_lambda": 0.8, "trace_normalize": normalize}
    sparse = {"trace_entropy_quantile": 0, "trace_mask_scope": scope, "trace_keep_own": own}
    dense = flags(credit="p_trace", **common)
    assert_same_to_the_bit(flags(credit="s_trace", **sparse, **common), dense)


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("scope", SCOPES)
def test_with_no_token_kept_but_its_own_term_s_trace_is_grpo_to_the_bit(scope, normalize):
    trace = flags(trace_entropy_quantile=1, trace_mask_scope=scope, trace_normalize=normalize)
    assert trace.credit == "s_trace" and trace.trace_keep_own
    assert_same_to_the_bit(trace, flags(credit="uniform"))


@pytest.mark.parametrize("normalize", [False, True])
def test_with_nothing_kept_at_all_there_is_no_gradient(normalize):
    args = flags(trace_entropy_quantile=1, trace_keep_own=False, trace_normalize=normalize)
    batch = ragged()
    loss, grad, clipped = loss_of(args, batch, ratios(batch, 0.3))
    assert loss.item() == pytest.approx(-batch.advantages.mean().item())  # every R is 1
    assert torch.equal(grad, torch.zeros_like(grad)) and not clipped.any()
    assert torch.equal(batch.weights, torch.zeros_like(batch.weights))


def test_lambda_zero_and_one_need_no_special_case():
    zero = g.kernel_matrix(flags(trace_lambda=0), 5, torch.device("cpu"))
    one = g.kernel_matrix(flags(trace_lambda=1), 5, torch.device("cpu"))
    assert torch.equal(zero, torch.eye(5)) and torch.equal(one, torch.ones(5, 5).tril())
    both = flags(credit="grpo_lambda", trace_kernel="both", trace_lambda=0)
    expected = torch.eye(5)
    expected[:, 0] = 1  # 0^0 again: the first token counts in every trace
    assert torch.equal(g.kernel_matrix(both, 5, torch.device("cpu")), expected)


# ---------------------------------------------------------------------------------------- TRL


@pytest.mark.parametrize("beta", [0.0, 0.04])
@pytest.mark.parametrize("loss_type", ["grpo", "dapo", "dr_grpo"])
@pytest.mark.parametrize(
    "credit, level, epsilons",
    [("gspo", "sequence", (0.02, 0.03)), ("uniform", "token", (0.2, 0.3))],
)
def test_gspo_and_grpo_equal_trl(credit, level, epsilons, loss_type, beta):
    low, high = epsilons
    args = flags(credit=credit, loss_type=loss_type, beta=beta, epsilon=low, epsilon_high=high)
    clips = []
    for seed in range(3):
        batch = ragged(seed)
        log_ratio = ratios(batch, 0.3, seed)
        loss, grad, clipped = loss_of(args, batch, log_ratio)
        logp = batch.old_logp + log_ratio
        expected, expected_grad, clip = trl_loss(args, batch, logp, batch.old_logp, level)
        torch.testing.assert_close(loss, expected, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(grad, expected_grad, rtol=1e-5, atol=1e-6)
        sequences, tokens = clipped.any(1).float().mean(), clipped.sum() / batch.mask.sum()
        assert (sequences if credit == "gspo" else tokens).item() == pytest.approx(clip)
        clips.append(clip)
    assert 0 < max(clips) < 1


# ----------------------------------------------------------------------- masks and their scope


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("quantile", [0.0, 0.2, 0.5, 0.8, 0.9, 1.0])
def test_mask_equals_a_naive_quantile(quantile, scope):
    args = flags(trace_entropy_quantile=quantile, trace_mask_scope=scope)
    for seed in range(5):
        batch = ragged(seed)
        extra = assign(args, batch)
        kept = naive_kept(args, batch)
        padded = [row + [0] * (max(LENGTHS) - len(row)) for row in kept]
        assert torch.equal(batch.credit, torch.tensor(padded).float())
        assert extra["trace_kept"] == pytest.approx(sum(map(sum, kept)) / sum(LENGTHS))


def test_share_is_exact_without_ties_and_ties_at_the_cutoff_are_masked():
    five = torch.tensor([[0.5, 0.4, 0.3, 0.2, 0.1]])
    for kept, quantile in enumerate([1.0, 0.8, 0.6, 0.4, 0.2, 0.0]):  # (1 - 0.8) * 5 < 1 in floats
        assert (five > g.entropy_cutoff(five, quantile)).sum() == kept
    mostly_certain = torch.tensor([[0.0, 0.0, 0.7, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]])
    kept = mostly_certain > g.entropy_cutoff(mostly_certain, 0.5)
    assert kept.tolist() == [[i == 2 for i in range(10)]]
    tied = torch.tensor([[1.0, 1.0, 1.0, 1.0]])
    assert not (tied > g.entropy_cutoff(tied, 0.5)).any()
    assert (tied > g.entropy_cutoff(tied, 0.0)).all()


# ------------------------------------------------------------------------ padding and batching


@pytest.mark.parametrize("credit", ALL_TRACES)
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("scope", SCOPES)
def test_what_lies_outside_the_completions_changes_nothing(credit, normalize, scope):
    args = flags(credit=credit, trace_normalize=normalize, trace_mask_scope=scope, trace_lambda=1)
    clean, dirty = ragged(5), ragged(5)
    log_ratio = ratios(clean, 0.1)
    outside = ~clean.mask
    junk = ratios(clean, 1e4, 9)
    for name in ("old_logp", "entropy", "scores", "base_logp"):
        setattr(dirty, name, torch.where(outside, junk, getattr(clean, name)))
    dirty.ids = torch.where(clean.attention, clean.ids, 7)
    expected = loss_of(args, clean, log_ratio)
    got = loss_of(args, dirty, torch.where(outside, -3 * junk, log_ratio))
    assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))
    for batch, grad in ((clean, expected[1]), (dirty, got[1])):
        assert (grad[outside] == 0).all() and grad.isfinite().all()
        assert (batch.weights[outside] == 0).all() and (batch.credit[outside] == 0).all()
    assert torch.equal(clean.weights, dirty.weights)


@pytest.mark.parametrize("values", GRID, ids=name_of)
def test_batched_equals_one_by_one(values):
    """A rollout in micro-batches of one completion, without the others' padding: the same masks
    (of the whole rollout, where that is their scope), weights, metrics and gradients."""
    args, batch = flags(**values), ragged(6)
    log_ratio = ratios(batch, 0.3)
    _, grad, clipped = loss_of(args, batch, log_ratio)
    singles = [batch.select(torch.tensor([row])) for row in range(len(LENGTHS))]
    assert assign(args, *singles) == pytest.approx(assign(args, batch))
    for row, (single, length) in enumerate(zip(singles, LENGTHS, strict=True)):
        assert single.mask.shape == (1, length)
        assert torch.equal(single.credit[0], batch.credit[row, :length])
        torch.testing.assert_close(single.weights[0], batch.weights[row, :length])
        logp = (single.old_logp + log_ratio[row : row + 1, :length]).requires_grad_()
        scale = g.token_scale(args, single.loss_mask, len(LENGTHS), 0)
        loss, alone_clipped = g.policy_loss(args, single, logp, single.old_logp, scale)
        (alone,) = torch.autograd.grad(loss, logp)
        torch.testing.assert_close(alone[0], grad[row, :length], rtol=1e-5, atol=1e-7)
        assert torch.equal(alone_clipped[0], clipped[row, :length])


@pytest.mark.parametrize("credit", ALL_TRACES)
def test_completions_of_one_token_are_grpo(credit):
    batch = ragged(2, (1, 1, 1))
    log_ratio = torch.tensor([[0.5], [-0.5], [0.1]])
    got = loss_of(flags(credit=credit, trace_normalize=True), batch, log_ratio)
    expected = loss_of(flags(credit="uniform"), batch, log_ratio)
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    assert torch.equal(batch.weights, torch.ones(3, 1))


# ------------------------------------------------------------------------------ size and range


class Storages(TorchDispatchMode):
    """Keeps every tensor of at least `floor` bytes that an operation makes."""

    def __init__(self, floor: int):
        super().__init__()
        self.floor, self.made = floor, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(tensor, Tensor) and tensor.untyped_storage().nbytes() >= self.floor:
                self.made.append(tensor)
        return out

    def sizes(self) -> list[int]:
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in self.made}
        return [storage.nbytes() for storage in storages.values()]


@pytest.mark.parametrize(
    "values",
    [
        {"credit": "s_trace", "trace_normalize": True},
        {"credit": "grpo_lambda", "trace_kernel": "both"},
    ],
    ids=["s_trace", "both"],
)
def test_a_trace_of_4096_tokens_takes_one_square_matrix(values):
    args, length = flags(**values), 4096
    batch = ragged(1, (length, 3000))
    batch.scores = batch.entropy = torch.rand(batch.mask.shape) * batch.mask
    assign(args, batch)
    log_ratio = (ratios(batch, 0.01) * batch.mask).requires_grad_()
    with Storages(length * length) as storages:  # bytes: a quarter of one fp32 matrix
        log_weight, _ = g.surrogate_terms(args, batch, log_ratio)
        log_weight.sum().backward()
    assert storages.sizes() == [4 * length * length]
    assert log_ratio.grad.isfinite().all() and log_weight.isfinite().all()
    for row, t in ((0, 4095), (0, 1000), (1, 2999)):  # against the sum, token by token
        decay, keep = args.trace_lambda, batch.credit[row].tolist()
        terms = [1.0 if k == t else keep[k] * decay ** (t - k) for k in range(t + 1)]
        if args.trace_kernel == "both":
            terms = [max(decay**k, decay ** (t - k)) for k in range(t + 1)]
        total = sum(terms) if args.trace_normalize else 1.0
        values = log_ratio[row, : t + 1].tolist()
        expected = math.fsum(w * v for w, v in zip(terms, values, strict=True)) / total
        assert log_weight[row, t].item() == pytest.approx(expected, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_a_trace_that_would_overflow_leaves_finite_gradients(sign):
    args, batch = flags(credit="p_trace", trace_lambda=1), ragged(0, (400, 399))
    batch.advantages = torch.tensor([1.0, -1.0])
    loss, grad, clipped = loss_of(args, batch, torch.full(batch.mask.shape, sign))  # log R to 400
    assert loss.isfinite() and grad.isfinite().all() and clipped.any()


@pytest.mark.parametrize("name", ["trace_lambda", "trace_entropy_quantile"])
@pytest.mark.parametrize("value", ["-0.1", "1.1", "nan"])
def test_shares_and_decays_outside_0_to_1_are_refused(name, value, capsys):
    with pytest.raises(SystemExit) as stop:
        flags(**{name: value})
    sentence = f"--{name} {float(value)} is out of range (at least 0, at most 1)"
    assert stop.value.code == 2 and sentence in capsys.readouterr().err
