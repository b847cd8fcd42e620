"""ARCA and the signals beside it, against the paper's formulas written token by token."""

import contextlib
import math

import pytest
import torch
from support import random_batch, unscored

import grpo_arca as trainer
from common.metrics import weight_stats


def paper_weights(alpha: list[float], p: float) -> list[float]:
    """w_t = (alpha_t + 1e-8)^p / sum_k (alpha_k + 1e-8)^p, as written."""
    raised = [(a + 1e-8) ** p for a in alpha]
    return [r / sum(raised) for r in raised]


def fresh_batch(**kw):
    return unscored(random_batch(**kw))


def scored(run, *batches):
    """Fresh batches (or those given) that the trainer has scored as one rollout."""
    batches = batches or (fresh_batch(),)
    trainer.score(run, batches[0], list(batches), {})
    return batches[0]


SIGNALS = ["arca", "surprisal", "probability", "entropy_reduction", "divergence"]


@pytest.mark.parametrize(("credit", "p"), [("arca", 1.0), *((name, 2.0) for name in SIGNALS)])
def test_signals_against_a_token_by_token_reference(make_run, credit, p):
    """One completion at a time, unpadded, through the model's own logits and hidden states."""
    run = make_run(credit=credit, sharpening=p)
    u = torch.rand(8, 24, generator=torch.Generator().manual_seed(0))
    batch = trainer.sample(run, torch.arange(8), [[5, 6, 7]] * 4 + [[8, 9]] * 4, u)
    batch.advantages, batch.loss_mask = torch.ones(8), batch.mask
    scored(run, batch)
    base = run.model.get_base_model()
    run.policy.eval()
    for row in range(len(batch.rows)):
        ids, length = batch.ids[row][batch.attention[row]], int(batch.mask[row].sum())
        with torch.no_grad():
            on = base(input_ids=ids[None], output_hidden_states=True)
            with run.model.disable_adapter():
                off = base(input_ids=ids[None], output_hidden_states=True)
        alpha = []
        for t in range(len(ids) - length, len(ids)):  # the position t - 1 predicts token t
            logp = on.logits[0, t - 1].log_softmax(-1)
            if credit == "arca":
                difference = on.hidden_states[-1][0, t - 1] - off.hidden_states[-1][0, t - 1]
                alpha.append(math.sqrt(sum(x * x for x in difference.tolist())))
            elif credit == "surprisal":
                alpha.append(-logp[ids[t]].item())
            elif credit == "probability":
                alpha.append(math.exp(logp[ids[t]].item()))
            elif credit == "divergence":
                alpha.append(abs((logp - off.logits[0, t - 1].log_softmax(-1))[ids[t]].item()))
            else:
                entropy = -(logp.exp() * logp).sum().item()
                after = on.logits[0, t].log_softmax(-1)
                last = t == len(ids) - 1
                alpha.append(0 if last else max(0, entropy + (after.exp() * after).sum().item()))
        expected = length * torch.tensor(paper_weights(alpha, p))
        assert torch.allclose(batch.weights[row, :length], expected, atol=2e-3, rtol=2e-3)
        assert (batch.weights[row, length:] == 0).all()
        assert batch.weights[row].sum().item() == pytest.approx(length, rel=1e-5)
    assert not batch.weights.requires_grad


def test_weights_by_hand():
    scores = torch.tensor([[1.0, 3.0, 0.0, 9.0], [2.0, 2.0, 2.0, 7.0]])
    mask = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1]]).bool()
    one = trainer.normalize(scores, mask, 1.0)
    assert torch.allclose(
        one, torch.tensor([[0.75, 2.25, 0, 0], [8 / 13] * 3 + [28 / 13]]), atol=1e-6
    )
    two = trainer.normalize(scores, mask, 2.0)
    assert torch.allclose(two[0], torch.tensor([0.3, 2.7, 0, 0]), atol=1e-6)


@pytest.mark.parametrize("p", [1.0, 2.0, 4.0])
def test_a_fresh_adapter_gives_uniform_weights(make_run, p):
    """B = 0: every residual is exactly 0; with p = 2 the sum is about T * 1e-16."""
    run = make_run(adapter=0.0, sharpening=p)
    batch = scored(run)
    assert (batch.scores == 0).all()
    assert torch.allclose(batch.weights, batch.mask.float(), atol=1e-6)


@pytest.mark.parametrize("scale", [0.0, 1e-20, 1e-3, 1e15])
def test_edge_cases_stay_finite(scale):
    """Length 1, all-equal scores, tiny and huge scores; NaN-free and of mean 1."""
    mask = torch.ones(3, 6).bool()
    mask[1, 1:] = False
    scores = scale * torch.rand(3, 6)
    scores[2] = scale
    for p in (1.0, 2.0, 3.0):
        weights = trainer.normalize(scores, mask, p)
        assert weights.isfinite().all() and torch.allclose(weights.sum(1), mask.sum(1).float())
        assert torch.allclose(weights[2], torch.ones(6)) and weights[1, 0] == 1


def test_batched_scores_equal_one_by_one(make_run):
    """In whatever micro-batches a rollout is scored, its weights are the same."""
    run = make_run()
    batch = scored(run)
    singles = [fresh_batch().select(torch.tensor([row])) for row in range(8)]
    scored(run, *singles)
    for weights, single in zip(batch.weights, singles, strict=True):
        width = single.mask.shape[1]
        assert torch.allclose(single.weights[0], weights[:width], atol=1e-4)


def test_scoring_leaves_gradients_and_weights_alone(make_run):
    run = make_run(beta=0.1)
    before = {n: p.detach().clone() for n, p in run.model.named_parameters()}
    scored(run)
    for name, parameter in run.model.named_parameters():
        assert parameter.grad is None and torch.equal(parameter, before[name])


@pytest.mark.parametrize("credit", ["arca", "divergence"])
def test_scores_in_bf16_are_those_of_fp32(make_run, credit):
    """The adapter is as small as after a few updates at a small rate, so bf16 would round most of
    its effect away. Scoring computes in fp32, and the policy computes in bf16 again afterwards."""
    runs = [make_run(credit=credit, dtype=x, adapter=1e-4) for x in ("float32", "bfloat16")]
    exact, ours = (scored(run).scores for run in runs)
    batch, run, found = fresh_batch(), runs[1], []
    for adapter in (contextlib.nullcontext(), run.model.disable_adapter()):
        with torch.no_grad(), adapter:
            found.append(run.policy(batch))
    (logp, hidden), (base_logp, base_hidden) = found
    rounded = (hidden - base_hidden).norm(dim=-1) if credit == "arca" else (logp - base_logp).abs()
    assert torch.equal(hidden, hidden.bfloat16().float())  # it computes in bf16 again
    alike = [torch.corrcoef(torch.stack([exact, x])[:, batch.mask])[0, 1] for x in (ours, rounded)]
    assert alike[0] > 0.995 and alike[1] < 0.9, alike
    faster = make_run(credit=credit, dtype="bfloat16", adapter=1e-4, score_in_fp32=False)
    assert torch.equal(scored(faster).scores, rounded * batch.mask)  # asked for, and had


def test_an_exception_while_scoring_in_fp32_leaves_every_dtype_as_it_was(make_run):
    run = make_run(dtype="bfloat16")

    def dtypes():
        parameters = [parameter.dtype for parameter in run.model.parameters()]
        layers = [x.compute_dtype for x in run.model.modules() if hasattr(x, "compute_dtype")]
        return parameters, layers

    before = dtypes()
    assert before[1] == [torch.bfloat16] * 28
    with pytest.raises(KeyboardInterrupt), trainer.in_fp32(run):
        parameters, layers = dtypes()
        assert torch.bfloat16 not in parameters and set(layers) == {torch.float32}
        raise KeyboardInterrupt
    assert dtypes() == before


def test_shuffled_permutes_within_the_completion(make_run):
    weights = {}
    for credit in ("arca", "shuffled"):
        batch = scored(make_run(credit=credit))
        weights[credit] = batch.weights
    moved = 0
    for arca, shuffled, mask in zip(weights["arca"], weights["shuffled"], batch.mask, strict=True):
        assert torch.allclose(arca[mask].sort().values, shuffled[mask].sort().values)
        assert (shuffled[~mask] == 0).all()
        moved += int((arca != shuffled).sum())
    assert moved > batch.mask.sum() / 2


def test_random_has_arcas_concentration_and_nothing_else(make_run):
    weights = {}
    for credit in ("arca", "random"):
        run = make_run(credit=credit)
        batch = scored(run, fresh_batch(rows=64, length=40))
        weights[credit] = batch.weights
    arca, random = (weight_stats(w, batch.mask) for w in weights.values())
    keep = arca["effn"].isfinite() & (batch.mask.sum(1) > 3)
    assert torch.allclose(arca["effn"][keep], random["effn"][keep], atol=1e-3)
    assert torch.allclose(weights["random"].sum(1), batch.mask.sum(1).float(), rtol=1e-4)
    pairs = torch.stack([weights["arca"][batch.mask], weights["random"][batch.mask]])
    assert torch.corrcoef(pairs)[0, 1].abs() < 0.1
    again = fresh_batch(rows=64, length=40).select(torch.arange(10, 20))  # stateless, row by row
    scored(run, again)
    width = again.mask.shape[1]
    # the random draw is by row; its concentration follows ARCA's, which rounds differently
    assert torch.allclose(again.weights, weights["random"][10:20, :width], atol=2e-2)


def test_the_diff_of_weights_reaches_the_gradient(make_run):
    """At ratio 1 the loss is the paper's -mean_i A_i sum_t w_t log pi(y_t), with sum_t w_t = 1."""
    run = make_run()
    batch = scored(run)
    leaf = batch.sampled_logp.clone().requires_grad_()
    scale = trainer.token_scale(run.args, batch.loss_mask, 8, 1)
    trainer.policy_loss(run.args, batch, leaf, batch.sampled_logp, scale)[0].backward()
    w = batch.weights / batch.mask.sum(1, keepdim=True)
    assert torch.allclose(leaf.grad, -batch.advantages[:, None] * w / 8, atol=1e-7)
