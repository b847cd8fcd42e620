"""Advantages, loss and updates: against TRL's own code, and however a batch is split."""

import itertools
import math

import pytest
import torch
from support import (
    ROOT,
    gradient_of_update,
    loss_and_gradient,
    pays,
    problems_of,
    random_batch,
    scored,
    trained,
    trl_loss,
    unscored,
)
from transformers import get_scheduler

import grpo_arca
import grpo_oar
import grpo_strace

NAN = math.nan
LOSSES = ("grpo", "dapo", "dr_grpo")


def flags(**values):
    return grpo_arca.parse_args([f"--{name}={value}" for name, value in values.items()])


def moved(batch, spread: float) -> torch.Tensor:
    """Returns log-probs of a policy that is not the one that sampled."""
    noise = torch.randn(batch.old_logp.shape, generator=torch.Generator().manual_seed(5))
    return torch.where(batch.mask, batch.old_logp + spread * noise, 0.0)


def paid_by_sum(run) -> grpo_arca.Batch:
    """Returns a rollout that is paid by the sum of token ids, so rewards differ within a group."""

    def remainder(completion_ids, **_):
        return [float(sum(ids) % 17) for ids in completion_ids]

    run.reward_funcs = {"remainder": remainder}
    return grpo_arca.collect(run, {})


# ---- Advantages ----------------------------------------------------------------------------------
def test_equal_rewards_of_two_functions_have_no_advantage_in_gdpo():
    """Its sum is normalized by a mean and a deviation that are rounded."""
    rewards = torch.randn(50, 4, 2, generator=torch.Generator().manual_seed(0)).double()
    rewards[::2] = 0.3
    args = flags(multi_objective_aggregation="normalize_then_sum")
    advantages = grpo_arca.aggregated_advantages(args, rewards, torch.tensor([1.0, 0.5]).double())
    assert (advantages[::2] == 0).all() and (advantages[1::2] != 0).all()


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_equal_rewards_have_no_advantage(scale):
    """Rounding of a mean or a sum must leave none: a fresh Adam would make a whole step of it."""
    for reward, unknown in itertools.product([0.1, 0.3, 1 / 3, 123.456], range(7)):
        group = [reward * (1 + 2**-52)] + [reward] * (7 - unknown) + [NAN] * unknown
        rewards = torch.tensor([group, [0.0, 1.0] * 4], dtype=torch.float64)
        advantages = grpo_arca.group_advantages(rewards, scale)
        assert (advantages[0] == 0).all() and (advantages[1] != 0).all()


def test_large_rewards_keep_their_differences():
    """20000001 is no float32. The deviation of four ones and four zeros is (2 / 7) ** 0.5."""
    values = torch.tensor([20000002.0] * 4 + [20000001.0] * 4, dtype=torch.float64).view(1, 8, 1)
    advantages = grpo_arca.aggregated_advantages(flags(), values, torch.ones(1).double())
    expected = 0.5 / ((2 / 7) ** 0.5 + 1e-4)
    torch.testing.assert_close(advantages[0], torch.tensor([expected] * 4 + [-expected] * 4))


def test_negative_weight_scales_what_is_below_the_mean(make_run):
    plain, scaled = (
        paid_by_sum(make_run(negative_weight=weight)).advantages for weight in (1.0, 0.25)
    )
    expected = torch.where(plain < 0, 0.25 * plain, plain)
    assert torch.equal(scaled, expected) and (expected < 0).any()


@pytest.mark.parametrize(
    ("aggregation", "weights", "second", "count"),
    [
        ("sum_then_normalize", [1.0, 1.0], (1.0, 1.0), 8),
        ("sum_then_normalize", [0.0, 1.0], (1.0, 1.0), 16),
        ("sum_then_normalize", [1.0, 1.0], (0.0, 1.0), 16),
        ("normalize_then_sum", [1.0, 1.0], (1.0, 1.0), 8),
        ("normalize_then_sum", [0.0, 1.0], (1.0, 1.0), 16),
        ("normalize_then_sum", [1.0, 1.0], (0.0, 1.0), 16),
    ],
)
def test_a_group_is_drawn_again_if_its_advantages_are_equal(
    make_run, aggregation, weights, second, count
):
    """The first function gives 1 and 0 in turn. Sums count; GDPO normalizes first."""
    run = make_run(
        multi_objective_aggregation=aggregation, max_resample_times=1, max_completion_length=4
    )
    run.reward_funcs = {"first": pays(1.0, 0.0), "second": pays(*second)}
    run.reward_weights = torch.tensor(weights, dtype=torch.float64)
    figures = {}
    grpo_arca.collect(run, figures)
    assert figures["sampled_completions"] == count


# ---- The loss ------------------------------------------------------------------------------------
@pytest.mark.parametrize("loss_type", LOSSES)
@pytest.mark.parametrize(("beta", "correction"), [(0.0, True), (0.1, True), (0.1, False)])
@pytest.mark.parametrize("weighted", [False, True])
def test_loss_and_gradient_equal_trls(loss_type, beta, correction, weighted):
    """On the same tensors, off policy, with ragged lengths. TRL's default corrects the KL's bias.

    TRL takes advantages [B, T], so its loss checks one with credit, too.
    """
    batch = random_batch(rows=16)
    args = flags(loss_type=loss_type, beta=beta, use_bias_correction_kl=correction)
    assert flags().use_bias_correction_kl  # as pytest.importorskip("trl").GRPOConfig has it
    if weighted:
        batch.credit = grpo_arca.normalize(batch.scores, batch.mask, 1.0)
    logp = moved(batch, 0.3)
    loss, gradient, clipped = loss_and_gradient(args, batch, logp)
    advantages = batch.advantages[:, None] * batch.credit
    theirs = trl_loss(args, batch, logp, advantages=advantages if weighted else None)
    torch.testing.assert_close(loss, theirs[0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(gradient, theirs[1], atol=1e-7, rtol=1e-5)
    assert 0 < clipped.sum() < batch.mask.sum()


@pytest.mark.parametrize("module", [grpo_arca, grpo_oar, grpo_strace])
def test_uniform_credit_is_plain_grpo_to_the_bit(make_run, module):
    """Its terms are the log-ratio itself, and the same advantage for each token."""
    run = make_run(module, credit="uniform")
    batch = scored(run, module=module)
    assert torch.equal(batch.weights, batch.mask.float())
    weight, advantages = module.surrogate_terms(run.args, batch, batch.entropy)
    assert weight is batch.entropy
    expected = batch.advantages[:, None].expand_as(advantages)
    assert torch.equal(advantages[batch.mask], expected[batch.mask])


def test_a_method_may_have_a_clip_range_for_each_token():
    args = flags()
    batch = random_batch()
    logp = moved(batch, 0.3)
    low = torch.full_like(logp, 0.9)
    high = torch.rand(logp.shape) + 1
    batch.bounds = (low, high)
    _, gradient, clipped = loss_and_gradient(args, batch, logp)
    ratio = (logp - batch.old_logp).exp()
    is_out = torch.where(batch.advantages[:, None] > 0, ratio > high, ratio < low) & batch.mask
    assert torch.equal(clipped, is_out)
    assert torch.equal(gradient == 0, is_out | ~batch.mask)


def test_truncated_completions_are_left_out_where_that_is_asked(make_run):
    """A batch of nothing else has a finite loss, which is 0, and shows one row, untrained."""
    run = make_run(mask_truncated_completions=True)
    batch = paid_by_sum(run)
    assert torch.equal(batch.loss_mask.any(1), ~batch.truncated) and batch.truncated.any()
    batch.loss_mask = torch.zeros_like(batch.mask)
    ((micro,),) = grpo_arca.micro_batches(run, batch)
    assert len(micro.rows) == 1
    grpo_arca.score(run, batch, [micro], {})
    row = grpo_arca.update(run, [micro])
    assert row["loss"] == row["grad_norm"] == row["skipped_update"] == 0


# ---- Updates -------------------------------------------------------------------------------------
def scored_gradient(run, micros) -> torch.Tensor:
    """Returns the gradient of an update on micro-batches that have not been scored."""
    grpo_arca.score(run, micros[0], micros, {})
    return gradient_of_update(grpo_arca, run, micros)


@pytest.mark.parametrize(("loss_type", "beta", "rows"), [("dapo", 0.1, 8), ("dr_grpo", 0.0, 3)])
def test_no_micro_batch_and_no_dropped_row_changes_the_gradient(make_run, loss_type, beta, rows):
    """A row whose advantage is 0 has no gradient but the KL's, so it is left out of the work."""
    run = make_run(max_grad_norm=0, beta=beta, loss_type=loss_type, credit="arca")
    batch = unscored(random_batch())
    batch.advantages[2:7] = 0.0
    whole = scored_gradient(run, [batch])
    ((micro,),) = grpo_arca.micro_batches(run, unscored(batch))
    parts = [unscored(batch).select(index) for index in torch.arange(8).split(3)]
    assert len(micro.rows) == rows and whole.abs().max() > 1e-4
    for micros in ([micro], parts):
        assert (scored_gradient(run, micros) - whole).norm() < 1e-5 * whole.norm()


def test_micro_batches_of_an_update_are_its_own_rows_by_length(make_run):
    """Two updates of two micro-batches each: like lengths together, problems with their rows."""
    run = make_run(
        steps_per_generation=4, gradient_accumulation_steps=2, max_completion_length=80, adapter=0.0
    )
    batch = paid_by_sum(run)
    batch.advantages = torch.ones(32)
    batch.advantages[5] = 0.0
    batch.advantages[20:] = 0.0
    updates = grpo_arca.micro_batches(run, batch)
    kept = [sorted(torch.cat([m.rows for m in micros]).tolist()) for micros in updates]
    assert kept == [[i for i in range(16) if i != 5], [*range(16, 20)]]
    assert [[len(m.rows) for m in micros] for micros in updates] == [[8, 7], [4]]
    lengths = [micro.attention.sum(1) for micro in updates[0]]
    assert lengths[0].max() <= lengths[1].min()
    for micro in itertools.chain.from_iterable(updates):
        for row, problem, text in zip(micro.rows, micro.problems, micro.texts, strict=True):
            assert problem is batch.problems[row] and text == batch.texts[row]


def test_metrics_count_what_is_trained_alone(make_run):
    """Tokens that are left out as truncated are in no clip fraction, and a huge ratio is a clip
    only where the advantage is above 0. The gradient is longer than a small limit."""
    run = make_run(num_iterations=2, max_grad_norm=1e-3)
    batch = random_batch()
    batch.old_logp = torch.where(batch.mask, -40.0, 0.0)  # all ratios are huge
    batch.loss_mask = batch.mask & (torch.arange(8) == 0)[:, None]
    batch.advantages = torch.ones(8)
    row = grpo_arca.update(run, [batch])
    assert row["clip_fraction"] == row["clip_fraction_sequence"] == 1
    assert row["clipped_gradient"] == 0 == row["grad_norm"]
    batch.loss_mask = batch.mask
    batch.advantages[:4] = -1.0
    row = grpo_arca.update(run, [batch])
    assert row["clip_fraction_sequence"] == 1 / 2
    assert row["clip_fraction"] == pytest.approx(float(batch.mask[4:].sum() / batch.mask.sum()))
    assert row["clipped_gradient"] == 1 and row["grad_norm"] > 1e-3


@pytest.mark.parametrize("skips", [True, False])
def test_an_update_without_a_gradient_moves_weights_by_momentum_alone(make_run, skips):
    """The length of that step over the first one's is computed by hand from Adam's formula."""
    run = make_run(skip_zero_gradient=skips, lr_scheduler_type="constant")
    weights = [torch.cat([p.detach().flatten() for p in trained(run)])]
    for advantage in (1.0, 0.0):
        batch = random_batch()
        batch.old_logp = None
        batch.advantages = torch.tensor([advantage, -advantage] * 4)
        row = grpo_arca.update(run, [batch])
        assert (row["grad_norm"] > 0) == (advantage > 0) and row["skipped_update"] == 0
        weights.append(torch.cat([p.detach().flatten() for p in trained(run)]))
    lengths = [(after - before).norm().item() for before, after in itertools.pairwise(weights)]
    momentum = (0.9 * 0.1 / (1 - 0.9**2)) / (0.999 * 0.001 / (1 - 0.999**2)) ** 0.5
    expected = 0.0 if skips else momentum * lengths[0]
    assert lengths[1] == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("kind", ["cosine", "linear"])
def test_the_schedule_is_one_update_ahead_of_trls(make_run, kind):
    """A warm-up of 3 is 1/3, 2/3, 1 of the rate: no update is at rate 0, as TRL's first one is.

    docs/trl.md says so.
    """
    run = make_run(lr_scheduler_type=kind, warmup_steps=3, max_steps=8, learning_rate=0.3)
    theirs = get_scheduler(kind, torch.optim.SGD([torch.zeros(1)], 0.3), 3, 9)
    rates = []
    for run.step in range(8):
        theirs.optimizer.step()
        theirs.step()
        rates.append(grpo_arca.update(run, [random_batch()])["learning_rate"])
        assert rates[-1] == pytest.approx(theirs.get_last_lr()[0], abs=1e-9)
    assert rates[:3] == pytest.approx([0.1, 0.2, 0.3]) and rates[2] > rates[3] > rates[7] > 0
    assert "one update ahead of TRL's" in " ".join((ROOT / "docs/trl.md").read_text().split())


def test_no_forward_pass_that_nobody_needs(make_run):
    """The update's own, the log-probs before the first of several updates, that of beta, and two
    of ARCA's. Each reads the prompts, and then the completions."""
    run = make_run()
    calls = []
    run.model.get_base_model().model.register_forward_hook(lambda *_: calls.append(1))
    for credit, beta, iterations, passes in (
        ("uniform", 0, 1, 1), ("surprisal", 0, 1, 1), ("arca", 0, 1, 3), ("uniform", 0.1, 1, 2),
        ("uniform", 0, 2, 2), ("arca", 0.1, 2, 5),
    ):  # fmt: skip
        run.args.credit = credit
        run.args.beta = beta
        run.updates_per_rollout = iterations
        calls.clear()
        grpo_arca.update(run, [scored(run)])
        assert len(calls) == 2 * passes, (credit, beta, iterations)


def test_the_first_of_several_updates_has_ratio_one_to_the_bit(make_run):
    """The pass for the old log-probs has the same mode and dropout. The second iteration, whose old
    log-probs stay, is clipped."""
    run = make_run(
        lora_dropout=0.3, num_iterations=2, learning_rate=0.1, warmup_steps=0, max_steps=4
    )
    batch = random_batch()
    micros = [unscored(batch).select(index) for index in torch.arange(8).split(4)]
    grpo_arca.score(run, batch, micros, {})
    for micro in micros:
        assert torch.equal(grpo_arca.training_forward(run, micro), micro.old_logp)
        run.policy.eval()
        with torch.no_grad():  # dropout acts in training, and never in rollouts and scores
            gap = (run.policy(micro)[0] - micro.old_logp).abs().max()
        assert gap > 1e-3
    first = grpo_arca.update(run, micros)
    second = grpo_arca.update(run, micros)
    assert first["clip_fraction"] == 0 < second["clip_fraction"]


# ---- Numbers that are not finite -----------------------------------------------------------------
def state_of(run) -> list[torch.Tensor]:
    """Returns all that an update changes."""
    moments = [x for state in run.optimizer.state.values() for x in state.values()]
    return [x.detach().clone() for x in (*trained(run), *moments)]


@pytest.mark.parametrize("where", ["loss", "gradient"])
def test_an_update_that_is_not_finite_changes_nothing(make_run, monkeypatch, where):
    run = make_run()
    batch = random_batch()
    policy_loss = grpo_arca.policy_loss

    def broken_loss(*inputs):
        loss, clipped = policy_loss(*inputs)
        if where == "loss":
            return loss + torch.inf, clipped  # the gradient is finite
        return loss + (loss - loss).sqrt(), clipped  # the derivative of sqrt at 0 is infinite

    grpo_arca.update(run, [batch])  # so that there are moments to spoil
    before = state_of(run)
    with monkeypatch.context() as patch:
        patch.setattr(grpo_arca, "policy_loss", broken_loss)
        assert grpo_arca.update(run, [batch])["skipped_update"] == 1
    assert all(map(torch.equal, before, state_of(run)))
    assert grpo_arca.update(run, [batch])["skipped_update"] == 0
    assert not all(map(torch.equal, before, state_of(run)))


METHODS = [
    (grpo_arca, "arca", NAN), (grpo_arca, "shuffled", NAN), (grpo_arca, "arca", math.inf),
    (grpo_oar, "oar_g", NAN), (grpo_oar, "random", math.inf), (grpo_strace, "s_trace", NAN),
    (grpo_strace, "gspo", NAN),
]  # fmt: skip


@pytest.mark.parametrize(("module", "credit", "value"), METHODS)
def test_a_score_that_is_not_finite_skips_the_update(make_run, monkeypatch, module, credit, value):
    """In every method: NaN >= 0 is False, which in OAR meant a token that is not scored."""
    run = make_run(module, credit=credit)
    inner = module.token_scores

    def token_scores(run, micro, metrics):
        scores = inner(run, micro, metrics)
        scores[0, 0] = value
        return scores

    monkeypatch.setattr(module, "token_scores", token_scores)
    batch = scored(run, module=module)
    before = state_of(run)
    assert module.update(run, [batch])["skipped_update"] == 1
    assert all(map(torch.equal, before, state_of(run)))


@pytest.mark.slow
@pytest.mark.parametrize(("updates", "last", "first_ruined"), [(1, 14, 4), (4, 16, 3)])
def test_ten_skipped_updates_end_the_run_with_a_checkpoint(
    run_main, rows_of, monkeypatch, tmp_path, updates, last, first_ruined
):
    """Update 4 has ruined the weights. That is noticed at the end of a rollout."""
    inner = grpo_arca.token_scores

    def token_scores(run, micro, metrics):
        return inner(run, micro, metrics) * (NAN if run.step >= 4 else 1)

    monkeypatch.setattr(grpo_arca, "token_scores", token_scores)
    code, _, err = run_main(max_steps=20, steps_per_generation=updates)
    assert code == 1 and f"delete checkpoint-{first_ruined} and later" in err
    assert [row["skipped_update"] for row in rows_of()] == [0] * 4 + [1] * (last - 4)
    assert (tmp_path / f"out/checkpoint-{last}/state.pt").is_file()


# ---- Dynamic sampling ----------------------------------------------------------------------------
def test_only_groups_with_equal_rewards_are_drawn_again(make_run):
    """By problems and draws of their own, which depend on the row and the attempt alone; until
    rewards differ, and at most so often as the flag says. The rest of the rollout stays."""
    batches = {}
    judged = {}
    for tries in (0, 1, 3):
        run = make_run(max_resample_times=tries, per_device_train_batch_size=32)
        run.reward_funcs = {"even": even_length}
        metrics: dict[str, float] = {}
        batches[tries] = grpo_arca.collect(run, metrics)
        judged[tries] = metrics["sampled_completions"]
    first = batches[0].rewards.view(8, 4)
    is_flat = (first == first[:, :1]).all(1)
    assert 2 <= is_flat.sum() <= 6 and judged[0] == 32
    assert judged[1] == 32 + 4 * is_flat.sum() <= judged[3]
    new = batches[1].rewards.view(8, 4)
    is_done = (new != new[:, :1]).any(1)
    for group in range(8):
        rows = slice(4 * group, 4 * group + 4)
        whole, once, thrice = (batches[tries].texts[rows] for tries in (0, 1, 3))
        assert (once != whole) == (thrice != whole) == is_flat[group]
        assert thrice == once or not is_done[group]
    assert (batches[3].advantages != 0).sum() >= (batches[1].advantages != 0).sum() > 0


@pytest.mark.parametrize("shuffles", [True, False])
def test_what_is_drawn_again_depends_on_the_row_and_the_attempt_alone(make_run, shuffles):
    """Not on the rows of a call, which are fewer where there are more processes. It has another
    problem, also without shuffling."""
    run = make_run(per_device_train_batch_size=16, shuffle_dataset=shuffles)
    rows = torch.arange(16)
    whole = grpo_arca.sample_attempt(run, rows, 1, {})
    torch.rand(1)
    part = grpo_arca.sample_attempt(run, rows[8:12], 1, {})
    assert part.problems == whole.problems[8:12] and part.texts == whole.texts[8:12]
    for run.step, attempt in ((0, 0), (0, 2), (1, 1)):
        other = grpo_arca.sample_attempt(run, rows[8:12], attempt, {})
        assert other.problems[0] != part.problems[0] and other.texts != part.texts


def even_length(completion_ids, **_):
    return [float(sum(ids) % 4 == 0) for ids in completion_ids]


def test_groups_are_told_apart_by_their_places(make_run):
    """Prompts that repeat are groups of their own, and samples of a prompt differ."""
    run = make_run()
    run.train_set = problems_of(run, 1)
    batch = grpo_arca.collect(run, {})
    assert batch.rows.tolist() == list(range(8)) and len(set(batch.texts)) > 4
