"""Advantages and the loss: by hand, against TRL's own code, and however a batch is split."""

import math

import pytest
import torch
from support import ByLength, prompts_of, random_batch, trl_loss

import grpo_arca as trainer
from common.data import Problem


def flags(**values):
    argv = [part for name, value in values.items() for part in (f"--{name}", str(value))]
    return trainer.parse_args(argv)


def loss_and_gradient(args, batch, logp, old_logp, completions=None, tokens=None):
    leaf = logp.clone().requires_grad_()
    counts = (completions or len(batch.rows), tokens or float(batch.loss_mask.sum()))
    scale = trainer.token_scale(args, batch.loss_mask, *counts)
    loss, clipped = trainer.policy_loss(args, batch, leaf, old_logp, scale)
    loss.backward()
    return loss.item(), leaf.grad, clipped


def test_group_advantages_by_hand():
    rewards = torch.tensor([[1.0, 0, 0, 0], [1, 1, 1, 1], [0.1, 0.1, 0.1, 0.1], [1, 1, 0, 0]])
    group = trainer.group_advantages(rewards, "group")
    std = math.sqrt((0.75**2 + 3 * 0.25**2) / 3)
    assert torch.allclose(group[0], torch.tensor([0.75, -0.25, -0.25, -0.25]) / (std + 1e-4))
    assert (group[1:3] == 0).all()  # exactly 0, although the mean of 0.1 is rounded
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
    nanstd = pytest.importorskip("trl.trainer.utils").nanstd
    means = torch.nanmean(rewards, dim=1, keepdim=True)
    std = nanstd(rewards) if scale == "batch" else nanstd(rewards, dim=1, keepdim=True)
    theirs = rewards - means if scale == "none" else (rewards - means) / (std + 1e-4)
    torch.testing.assert_close(got, torch.nan_to_num(theirs, nan=0.0), rtol=1e-5, atol=1e-3)


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
        batch.credit = trainer.normalize(batch.scores, batch.mask, 1.0)
    advantages = batch.advantages[:, None] * batch.credit if weighted else None
    ours = loss_and_gradient(args, batch, logp, batch.old_logp)
    theirs = trl_loss(args, batch, logp, batch.old_logp, advantages=advantages)
    assert ours[0] == pytest.approx(theirs[0].item(), abs=1e-6)
    assert torch.allclose(ours[1], theirs[1], atol=1e-7)
    assert 0 < ours[2].sum() < batch.mask.sum()  # some tokens are clipped


def test_dapo_divides_by_the_mean_tokens_of_the_rollouts_updates(make_run):
    """As TRL does: two updates of unequal lengths, each over half of the generation's tokens."""
    run = make_run(loss_type="dapo", steps_per_generation=2, max_completion_length=80, adapter=0.0)
    run.grader = ByLength()
    data = ([Problem("x", "1")] * 4, prompts_of(run, 4))
    batch = trainer.collect(run, data, {})
    parts = trainer.micro_batches(run.args, batch)
    tokens = [int(batch.mask[part].sum()) for part in (slice(0, 8), slice(8, 16))]
    assert tokens[0] != tokens[1] and batch.update_tokens == sum(tokens) / 2
    for (micro,) in parts:
        micro.credit, noise = micro.mask.float(), 0.1 * torch.randn(micro.mask.shape)
        logp = micro.sampled_logp + noise
        counts = (8, micro.update_tokens)
        ours = loss_and_gradient(run.args, micro, logp, micro.sampled_logp, *counts)
        theirs = trl_loss(run.args, micro, logp, micro.sampled_logp, generation=(2, sum(tokens)))
        assert ours[0] == pytest.approx(theirs[0].item(), abs=1e-6)
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
        batch = trainer.collect(run, data, {})
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
    theirs = trl_loss(run.args, batch, logp, logp)[1]
    assert torch.allclose(gradients[0.0], theirs, atol=1e-7)


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
    trainer.assign_credit(run, batch, [batch], {})
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
    """The loss is divided by the lengths and counts of the whole update, not of a micro-batch."""
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
    """They are left out of the loss when the flag asks for it. A batch of nothing else has a finite
    loss, which is 0."""
    run = make_run(mask_truncated_completions=True)
    batch = trainer.collect(run, ([Problem("x", "1")] * 4, prompts_of(run)), {})
    assert (batch.loss_mask.any(1) == ~batch.truncated).all() and batch.truncated.any()
    batch.truncated[:], batch.loss_mask = True, torch.zeros_like(batch.mask)
    for run.args.loss_type in ("grpo", "dapo", "dr_grpo"):
        batch.credit, logp = batch.mask.float(), batch.sampled_logp
        loss, gradient, _ = loss_and_gradient(run.args, batch, logp, logp, 8, 0.0)
        assert loss == 0 and (gradient == 0).all()
    ((micro,),) = trainer.micro_batches(run.args, batch)
    assert len(micro.rows) == 1 and micro.advantages.tolist() == [0.0]  # shown as untrained


def test_the_stop_token_is_trained(make_run):
    """A completion's stop token has a gradient, although it is the pad token, too."""
    run = make_run()
    run.tokenizer.pad_token = run.tokenizer.eos_token
    batch = random_batch()
    batch.ids = torch.where(batch.attention, batch.ids, run.tokenizer.pad_token_id)
    ends = batch.mask.sum(1) - 1
    batch.ids[torch.arange(8), batch.prompt_width + ends] = run.tokenizer.pad_token_id
    _, gradient, _ = loss_and_gradient(run.args, batch, batch.old_logp, batch.old_logp)
    assert (gradient[torch.arange(8), ends] != 0).all()
    assert (gradient[~batch.mask] == 0).all()


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
