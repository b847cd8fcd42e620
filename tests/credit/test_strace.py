"""S-trace's family against naive double loops, and TRL.

Everything runs through the trainer's own policy_loss, on ragged off-policy batches whose log-probs
are free leaves: what is compared is the loss and its gradient with respect to every token.
"""

import functools
import itertools
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from support import command_line, loss_and_gradient, random_batch, trl_loss, unscored
from torch import Tensor

import grpo_strace

SCOPES = ("completion", "batch")


@functools.cache
def flags(**values) -> grpo_strace.Args:
    """Returns the script's own flags, so that names, choices and defaults are those of a run."""
    return grpo_strace.parse_args(command_line({"num_generations": 2} | values))


def ragged(seed: int = 0, **size) -> grpo_strace.Batch:
    """Returns a collected batch, off its policy, with entropies that tie."""
    batch = random_batch(grpo_strace, rows=6, seed=seed, **size)
    batch.entropy = (batch.entropy * 4).round() / 4
    batch.scores = batch.entropy * batch.mask
    return batch


def parts(batch: grpo_strace.Batch, size: int) -> list[grpo_strace.Batch]:
    """Returns micro-batches of so many rows, each without padding of others, with scores."""
    micros = [unscored(batch).select(index) for index in torch.arange(6).split(size)]
    for micro in micros:
        micro.scores = micro.entropy * micro.mask
    return micros


def ratios(batch: grpo_strace.Batch, spread: float, seed: int = 1) -> Tensor:
    """Returns log rho [B, T]: what the policy's log-probs moved by since the rollout."""
    return spread * torch.randn(batch.mask.shape, generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def assign(args: grpo_strace.Args, *micros: grpo_strace.Batch) -> dict[str, float]:
    """Assigns the credit of a rollout that is these micro-batches, and returns its metrics."""
    metrics: dict[str, float] = {}
    run = SimpleNamespace(args=args, accelerator=Accelerator(cpu=True))
    entropy = torch.cat([micro.entropy[micro.mask] for micro in micros])
    rollout = SimpleNamespace(entropy=entropy, mask=torch.ones_like(entropy, dtype=torch.bool))
    grpo_strace.assign_credit(run, rollout, list(micros), metrics)
    return metrics


def loss_of(args: grpo_strace.Args, batch: grpo_strace.Batch, log_ratio: Tensor):
    """Returns what `loss_and_gradient` does, of an update on six completions."""
    return loss_and_gradient(args, batch, batch.old_logp + log_ratio, 6, grpo_strace)


# ---- The reference -------------------------------------------------------------------------------
def naive_kept(args: grpo_strace.Args, batch: grpo_strace.Batch) -> list[list[int]]:
    """Returns m: a token is kept if the tokens at or above its entropy fit into the top share."""
    tokens = [batch.entropy[row][batch.mask[row]].tolist() for row in range(len(batch.rows))]
    everyone = [entropy for row in tokens for entropy in row]
    kept = []
    for row in tokens:
        scope = everyone if args.trace_mask_scope == "batch" else row
        most = (1 - args.trace_entropy_quantile) * len(scope) + 1e-9
        kept.append([int(sum(other >= own for other in scope) <= most) for own in row])
    return kept


def naive_matrix(args: grpo_strace.Args, kept: list[int]) -> Tensor:
    """Returns W [n, n] in float64 of a completion with mask m, straight from the docstring."""
    n = len(kept)
    decay = args.trace_lambda
    w = torch.zeros(n, n, dtype=torch.float64)
    for t, k in itertools.product(range(n), range(n)):
        if args.credit == "gspo":
            w[t, k] = 1 / n
        elif args.credit == "uniform":
            w[t, k] = float(t == k)
        elif k > t:
            w[t, k] = 0.0
        elif args.credit == "s_trace" and k == t:
            w[t, k] = 1 if args.trace_keep_own else kept[k]
        elif args.credit == "s_trace":
            w[t, k] = kept[k] * decay ** (t - k)
        elif args.trace_kernel == "both":
            w[t, k] = max(decay**k, decay ** (t - k))
        else:
            w[t, k] = decay ** (t - k)
    if args.trace_normalize:
        w /= w.sum(1, keepdim=True).clamp(min=1e-300)
    return w


def naive_loss(args: grpo_strace.Args, batch: grpo_strace.Batch, matrices: list, log_ratio: Tensor):
    """Returns the objective, one token at a time, and its gradient [B, T]."""
    leaf = log_ratio.double().requires_grad_()
    below = (batch.reference_logp - batch.old_logp).double() - leaf  # log of reference over policy
    total = torch.zeros((), dtype=torch.float64)
    for row, w in enumerate(matrices):
        advantage = batch.advantages[row].double()
        for t in range(len(w)):
            ratio = sum(w[t, k] * leaf[row, k] for k in range(len(w))).exp()
            clipped = ratio.clamp(1 - args.epsilon, 1 + args.epsilon_high)
            total = total - torch.min(ratio * advantage, clipped * advantage) / len(w)
            kl = below[row, t].exp() - below[row, t] - 1
            total = total + args.beta * kl * leaf[row, t].exp() / len(w)
    loss = total / len(matrices)
    return loss.detach(), torch.autograd.grad(loss, leaf)[0]


FAMILY = [
    {"credit": "p_trace"},
    {"credit": "grpo_lambda", "trace_kernel": "both"},
    {"trace_entropy_quantile": 1},  # no token is kept, which is GRPO
    *(
        {"trace_entropy_quantile": q, "trace_keep_own": own, "trace_mask_scope": scope}
        for q, own, scope in itertools.product((0, 0.8), (True, False), SCOPES)
    ),
]
GRID = [
    *(
        values | {"trace_normalize": normalize, "trace_lambda": decay}
        for values, normalize, decay in itertools.product(FAMILY, (False, True), (0.0, 0.7, 1.0))
    ),
    {"credit": "gspo"},
    {"credit": "uniform"},
]


@pytest.mark.parametrize("values", GRID, ids=str)
def test_every_member_of_the_family_equals_its_double_loop(values):
    """Off policy; and at ratio 1 the weights are what reaches each token's gradient."""
    args = flags(epsilon=0.1, epsilon_high=0.15, beta=0.1, **values)
    batch = ragged(3)
    metrics = assign(args, batch)
    kept = naive_kept(args, batch)
    matrices = [naive_matrix(args, row) for row in kept]
    for spread in (0.0, 0.6):
        log_ratio = ratios(batch, spread)
        loss, gradient, clipped = loss_of(args, batch, log_ratio)
        expected, expected_gradient = naive_loss(args, batch, matrices, log_ratio)
        assert loss.item() == pytest.approx(expected.item(), rel=1e-6, abs=1e-6)
        torch.testing.assert_close(gradient.double(), expected_gradient, rtol=1e-5, atol=1e-6)
        assert clipped.any() == (spread > 0)

    sums = torch.zeros_like(batch.weights)
    for row, w in enumerate(matrices):
        sums[row, : len(w)] = w.sum(0)
    lengths = batch.mask.sum(1, keepdim=True)
    torch.testing.assert_close(batch.weights * sums.sum(1, keepdim=True) / lengths, sums)
    assert metrics["trace_gain"] == pytest.approx((sums.sum() / lengths.sum()).item(), rel=1e-5)
    if args.credit == "s_trace":
        assert metrics["trace_kept"] * lengths.sum() == pytest.approx(sum(map(sum, kept)))


@pytest.mark.parametrize("values", GRID[2::5], ids=str)
def test_a_rollout_one_by_one_is_the_same(values):
    """Without the others' padding: the same masks, also of the whole rollout, and gradients."""
    args = flags(**values)
    batch = ragged(6)
    log_ratio = ratios(batch, 0.3)
    metrics = assign(args, batch)
    _, gradient, _ = loss_of(args, batch, log_ratio)
    singles = parts(batch, 1)
    assert assign(args, *singles) == pytest.approx(metrics)
    for row, single in enumerate(singles):
        length = single.mask.shape[1]
        assert torch.equal(single.credit[0], batch.credit[row, :length])
        single.old_logp = batch.old_logp[row : row + 1, :length]
        _, alone, _ = loss_of(args, single, log_ratio[row : row + 1, :length])
        torch.testing.assert_close(alone[0], gradient[row, :length], rtol=1e-5, atol=1e-7)


# ---- TRL -----------------------------------------------------------------------------------------
@pytest.mark.parametrize("loss_type", ["grpo", "dapo", "dr_grpo"])
def test_gspo_equals_trl(loss_type):
    """TRL's importance_sampling_level sequence, without its other correction of the KL.

    That GRPO equals TRL's level token is in tests/trainer/test_loss.py.
    """
    args = flags(
        credit="gspo",
        loss_type=loss_type,
        beta=0.04,
        use_bias_correction_kl=False,
        epsilon=0.02,
        epsilon_high=0.03,
    )
    batch = ragged(2)
    assign(args, batch)
    log_ratio = torch.where(batch.mask, ratios(batch, 0.3), 0.0)
    loss, gradient, clipped = loss_of(args, batch, log_ratio)
    logp = batch.old_logp + log_ratio
    expected, expected_gradient, clip = trl_loss(args, batch, logp, level="sequence")
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-5, atol=1e-6)
    assert 0 < clipped.any(1).float().mean().item() == pytest.approx(clip)


# ---- Masks, size and range -----------------------------------------------------------------------
def test_tokens_that_tie_at_the_cutoff_are_all_masked():
    five = torch.tensor([[0.5, 0.4, 0.3, 0.2, 0.1]])
    for kept, quantile in enumerate([1.0, 0.8, 0.6, 0.4, 0.2, 0.0]):  # (1 - 0.8) * 5 < 1 in floats
        assert (five > grpo_strace.entropy_cutoff(five, quantile)).sum() == kept
    assert grpo_strace.entropy_cutoff(torch.ones(1, 4), 0.5) == 1  # none of four is above it


def test_what_lies_outside_the_completions_changes_nothing():
    args = flags(trace_lambda=1, trace_mask_scope="batch", beta=0.1)
    results = []
    for junk in (0.0, 1e4):
        batch = ragged(5)
        batch.entropy = torch.where(batch.mask, batch.entropy, junk)
        assign(args, batch)
        log_ratio = torch.where(batch.mask, ratios(batch, 0.1), 0.0)  # as log-probs are
        results.append((*loss_of(args, batch, log_ratio), batch.weights, batch.credit))
        assert all((x[~batch.mask] == 0).all() for x in results[-1][1:])
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_a_trace_that_would_overflow_leaves_finite_gradients(sign):
    args = flags(credit="p_trace", trace_lambda=1)
    batch = ragged(0, length=400)
    assign(args, batch)
    loss, gradient, clipped = loss_of(args, batch, torch.full(batch.mask.shape, sign))
    assert loss.isfinite() and gradient.isfinite().all() and clipped.any()


# ---- Several processes ---------------------------------------------------------------------------
def test_the_batch_scope_of_s_trace_counts_the_tokens_of_other_processes():
    """Of a rollout this process has rows 0 to 2. What it gathers of the other's is padded, too.

    That two processes make the updates of one is in tests/trainer/test_processes.py.
    """
    whole = ragged(2)
    own, other = parts(whole, 3)
    others = torch.cat([other.entropy[other.mask], torch.full((40,), -torch.inf)])
    args = flags(trace_mask_scope="batch", trace_entropy_quantile=0.6)
    accelerator = SimpleNamespace(
        pad_across_processes=lambda tokens, pad_index: tokens,
        gather=lambda tokens: torch.cat([tokens, others]),
    )
    run = SimpleNamespace(args=args, accelerator=accelerator)
    (mask,) = grpo_strace.trace_masks(run, own, [own])
    kept = naive_kept(args, whole)[:3]
    assert [row[is_token].tolist() for row, is_token in zip(mask, own.mask, strict=True)] == kept
    assert naive_kept(args, own) != kept  # alone it would keep others
