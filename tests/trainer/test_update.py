"""An update: which rows it trains on, how many forwards it takes, and what its metrics count."""

import itertools

import pytest
import torch
from support import ByLength, prompts_of, random_batch, texts_of

import grpo_arca as trainer
from common.data import Problem
from common.metrics import rollout_metrics


def test_the_clip_fraction_counts_trained_tokens_alone(make_run):
    """Of what is trained all is clipped, though all but one completion are left out as truncated;
    then half of the completions' tokens."""
    run, batch = make_run(num_iterations=2, epsilon=1e-6), random_batch()
    batch.truncated[1:] = True
    batch.loss_mask = batch.mask & ~batch.truncated[:, None]
    batch.old_logp = torch.where(batch.mask, -100.0, 0.0)  # all ratios are huge
    batch.advantages = torch.ones(8)
    row = trainer.update(run, [batch])
    assert row["clip_fraction"] == row["clip_fraction_sequence"] == 1
    batch.loss_mask, batch.advantages[:4] = batch.mask, -1.0  # a huge ratio is no clip there
    row = trainer.update(run, [batch])
    assert row["clip_fraction_sequence"] == 1 / 2
    assert row["clip_fraction"] == pytest.approx(float(batch.mask[4:].sum() / batch.mask.sum()))


def test_constant_groups_give_exactly_no_gradient(make_run):
    """Where every completion is wrong, the update moves nothing, and the metrics say so."""
    run = make_run()
    data = ([Problem("x", "nothing says this")] * 4, prompts_of(run))
    batch = trainer.collect(run, data, {})
    ((micro,),) = trainer.micro_batches(run.args, batch)
    assert len(micro.rows) == 1  # for DDP
    trainer.score(run, micro, [micro], {})
    before = [p.clone() for p in run.model.parameters() if p.requires_grad]
    row = trainer.update(run, [micro])
    assert row["grad_norm"] == 0 and row["loss"] == 0
    after = [p for p in run.model.parameters() if p.requires_grad]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert rollout_metrics(run, batch, 1.0)["zero_std_share"] == 1


@pytest.mark.parametrize("skip_zero_gradient", [True, False])
def test_an_update_without_a_gradient_moves_weights_by_momentum_alone(make_run, skip_zero_gradient):
    """The length of that step over the first one's is computed by hand from Adam's formula."""
    run = make_run(skip_zero_gradient=skip_zero_gradient, lr_scheduler_type="constant")
    trained = [p for p in run.model.parameters() if p.requires_grad]
    weights = [[p.detach().clone() for p in trained]]
    for advantage in (1.0, 0.0, 1.0):
        batch = random_batch()
        batch.old_logp = trainer.NOT_SET
        batch.advantages = torch.tensor([advantage, -advantage] * 4)
        row = trainer.update(run, [batch])
        assert (row["grad_norm"] > 0) == (advantage > 0) and row["skipped_update"] == 0
        weights.append([p.detach().clone() for p in trained])
    lengths = [
        sum((b - a).square().sum() for a, b in zip(before, after, strict=True)).sqrt().item()
        for before, after in itertools.pairwise(weights)
    ]
    momentum = (0.9 * 0.1 / (1 - 0.9**2)) / (0.999 * 0.001 / (1 - 0.999**2)) ** 0.5
    expected = 0.0 if skip_zero_gradient else momentum * lengths[0]
    assert lengths[1] == pytest.approx(expected, rel=1e-3)
    assert lengths[2] > 0.1 * lengths[0]
    assert run.scheduler.last_epoch == 4  # it goes on in either case; it starts at 1


@pytest.mark.parametrize("loss_type", ["grpo", "dapo", "dr_grpo"])
@pytest.mark.parametrize(("beta", "rows"), [(0.0, 3), (0.1, 8)])
def test_rows_without_gradient_are_dropped_and_nothing_changes(make_run, loss_type, beta, rows):
    """A row whose advantage is 0 has no gradient but the KL's, so it is left out of the work. It
    still counts in what the loss is divided by: the gradient is that of the whole batch."""
    run, batch = make_run(max_grad_norm=0, beta=beta, loss_type=loss_type), random_batch()
    batch.advantages[2:7], batch.old_logp = 0.0, trainer.NOT_SET
    ((micro,),) = trainer.micro_batches(run.args, batch)
    assert len(micro.rows) == rows
    for x in (micro, batch):
        trainer.score(run, x, [x], {})
    scale = trainer.token_scale(run.args, batch.loss_mask, 8, batch.update_tokens)
    logp = trainer.training_forward(run, batch)
    trainer.policy_loss(run.args, batch, logp, logp.detach(), scale)[0].backward()
    trained, found = [p for p in run.model.parameters() if p.requires_grad], []
    whole = [p.grad.clone() for p in trained]
    run.optimizer.zero_grad()
    run.optimizer.step = lambda: found.extend(p.grad for p in trained)
    trainer.update(run, [micro])
    assert max(float(g.abs().max()) for g in whole) > 1e-4
    for ours, theirs in zip(found, whole, strict=True):
        assert (ours - theirs).norm() < 1e-5 * theirs.norm()


def test_no_pass_that_nobody_needs(make_run):
    """Forwards of a step, by what asks for them: the update's own, the log-probs before the first
    of several updates, the base for beta or ARCA, which compares two more. Each reads the prompts,
    then the completions."""
    for credit, beta, iterations, passes in (
        ("uniform", 0, 1, 1), ("surprisal", 0, 1, 1), ("entropy_reduction", 0, 1, 1),
        ("probability", 0, 1, 1), ("arca", 0, 1, 3),
        ("uniform", 0.1, 1, 2), ("uniform", 0, 2, 2), ("arca", 0.1, 2, 5),
    ):  # fmt: skip
        run, calls = make_run(credit=credit, beta=beta, num_iterations=iterations), []
        batch = random_batch()
        batch.old_logp = trainer.NOT_SET
        run.model.get_base_model().model.register_forward_hook(lambda *_, c=calls: c.append(1))
        trainer.score(run, batch, [batch], {})
        trainer.update(run, [batch])
        assert len(calls) == 2 * passes, (credit, beta, iterations)


def test_the_first_update_is_at_a_share_of_the_peak_and_the_last_above_0(make_run):
    """A warm-up of 3 is 1/3, 2/3, 1 of the rate: no update is at rate 0."""
    run = make_run(warmup_steps=3, max_steps=6, learning_rate=0.3)
    batch = random_batch()
    batch.old_logp = trainer.NOT_SET
    trainer.score(run, batch, [batch], {})
    rates = [trainer.update(run, [batch])["learning_rate"] for _ in range(6)]
    assert rates[:3] == pytest.approx([0.1, 0.2, 0.3]) and rates[2] > rates[3] > rates[5] > 0


def test_duplicate_prompts_stay_separate_groups(make_run):
    """Groups are told apart by their places, not by their texts, and their samples differ."""
    run = make_run()
    batch = trainer.collect(run, ([Problem("x", "1")], prompts_of(run)[:1]), {})
    assert batch.rows.sort().values.tolist() == list(range(8))
    assert len(set(texts_of(run, batch))) > 4


def test_micro_batches_of_an_update_are_its_own_rows_by_length(make_run):
    """Two updates of two micro-batches each: all rows once, each update's completions its own
    however long, and like lengths together."""
    run = make_run(steps_per_generation=4, max_completion_length=80, adapter=0.0)
    run.args.gradient_accumulation_steps, run.grader = 2, ByLength()
    data = ([Problem("x", "1")] * 8, prompts_of(run, 8))
    batch = trainer.collect(run, data, {})
    batch.advantages[5], batch.advantages[20:] = 0.0, 0.0
    updates = trainer.micro_batches(run.args, batch)
    kept = [sorted(torch.cat([m.rows for m in micros]).tolist()) for micros in updates]
    assert kept == [[i for i in range(16) if i != 5], [*range(16, 20)]]
    assert [[len(m.rows) for m in micros] for micros in updates] == [[8, 7], [4]]
    assert len(batch.problems) == 32
    first, second = updates[0]
    assert first.attention.sum(1).max() <= second.attention.sum(1).min()


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_the_first_update_has_ratio_one(make_run, monkeypatch, dropout):
    """The pass for the old log-probs and that of the first update have the same mode and dropout,
    also for micro-batches of different lengths. So all ratios are exactly 1."""
    run, batch = make_run(lora_dropout=dropout, num_iterations=2), random_batch()
    micros = [batch.select(index) for index in torch.arange(8).split(4)]
    trainer.score(run, batch, micros, {})
    gaps, loss = [], trainer.policy_loss

    def spy(args, micro, logp, old_logp, scale):
        gaps.append((logp.detach() - old_logp)[micro.mask].abs().max().item())
        return loss(args, micro, logp, old_logp, scale)

    monkeypatch.setattr(trainer, "policy_loss", spy)
    trainer.update(run, micros)
    assert gaps == [0.0, 0.0]
    micro = micros[0]
    logp = trainer.training_forward(run, micro)
    run.policy.eval()
    with torch.no_grad():  # dropout acts in training, and never in rollouts and scores
        gap = (run.policy(micro)[0] - logp)[micro.mask]
    assert (gap.abs().max() > 1e-3) == (dropout > 0)


def test_a_second_iteration_is_clipped_against_the_first(make_run):
    """num_iterations: the old log-probs stay those of the policy that sampled."""
    run = make_run(num_iterations=2, learning_rate=0.1, warmup_steps=0, max_steps=4)
    batch = random_batch()
    trainer.score(run, batch, [batch], {})
    first, second = trainer.update(run, [batch]), trainer.update(run, [batch])
    assert first["clip_fraction"] == 0 < second["clip_fraction"] <= second["clip_fraction_sequence"]
