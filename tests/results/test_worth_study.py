"""results/worth_study.py and step_values.py against what is known by hand."""

import csv
import subprocess
import sys
from types import SimpleNamespace

import headroom
import learning_curves
import numpy as np
import pytest
import step_values
import torch
import worth
import worth_study as study
from support import ROOT

import grpo_arca as trainer
from common.data import encode_prompt
from common.problems import Problem

PROBLEM = Problem("Start with 23, add 19, subtract 2, double it.", "80", (42, 40, 80))


def tokens_of(run, text: str) -> list[int]:
    return [*run.tokenizer(text).input_ids, run.tokenizer.eos_token_id]


def words(run, ids: list[int], spans: list[range]) -> list[str]:
    return [run.tokenizer.decode(ids[span.start : span.stop]) for span in spans]


# ---- Exact values --------------------------------------------------------------------------------
def test_a_right_solution_is_cut_at_its_claims(make_run):
    run = make_run()
    text = "We begin at 23. Adding 19 gives 42. Minus 2 makes 40. Doubling it gives 80. "
    ids = tokens_of(run, text + "So the answer is \\boxed{80}.")
    solution = step_values.read_solution(run.tokenizer, ids, PROBLEM)
    assert solution.right == 4
    assert words(run, ids, solution.results) == ["42", "40", "80", "80"]
    assert [len(span) for span in solution.results] == [2, 2, 2, 2]
    assert words(run, ids, solution.steps[:1]) == ["We begin at 23. Adding 19 gives 42"]
    ends = [run.tokenizer.decode(prefix).rstrip()[-4:] for prefix in solution.prefixes]
    assert ends == ["", " 42.", " 40.", " 80."]


def test_a_wrong_solution_ends_at_its_first_wrong_token(make_run):
    run = make_run()
    ids = tokens_of(run, "We begin at 23. Adding 19 gives 42. Minus 2 makes 41. Then 82.")
    solution = step_values.read_solution(run.tokenizer, ids, PROBLEM)
    assert solution.right == 1
    assert words(run, ids, solution.results) == ["42", "1"]
    assert words(run, ids, solution.steps[1:]) == [". Minus 2 makes 41"]
    assert len(solution.prefixes) == 2  # none after a wrong claim


@pytest.mark.parametrize(
    "text", ["", "80", "\\boxed{80}", "We begin at 23. Adding 19 gives 4", "..."]
)
def test_any_text_can_be_cut(make_run, text):
    run = make_run()
    ids = tokens_of(run, text)
    solution = step_values.read_solution(run.tokenizer, ids, PROBLEM)
    assert solution.right == 0 and len(solution.results) == 1
    assert 0 <= solution.results[0].start < len(ids)
    assert solution.prefixes == [[]]


@pytest.mark.parametrize("rate", [0.05, 0.34, 0.97])
def test_the_scale_is_grpos(rate):
    generator = torch.Generator().manual_seed(0)
    rewards = (torch.rand(100_000, 8, generator=generator) < rate).float()
    advantages = trainer.group_advantages(rewards, "group")
    difference = advantages[rewards == 1].mean() - advantages[rewards == 0].mean()
    assert step_values.group_scale(rate, 8) == pytest.approx(difference.item(), rel=0.02)


def test_advantages_by_hand(make_run):
    run = make_run()
    text = "We begin at 23. Adding 19 gives 42. Minus 2 makes 41."
    ids = tokens_of(run, text)
    solution = step_values.read_solution(run.tokenizer, ids, PROBLEM)
    mask = torch.ones(1, len(ids) + 2, dtype=torch.bool)
    micro = trainer.Batch(torch.tensor([3]), 0, None, mask, None, None, None)
    values, scale = {0: [0.5, 0.8, 0.9, 0.9, 1.0]}, step_values.group_scale(0.5, 4)
    for whole in (False, True):
        found = step_values.step_advantages({3: solution}, values, micro, 4, whole=whole)[0]
        assert found[solution.results[0].start] == pytest.approx(scale * (0.8 - 0.5))
        assert found[solution.results[1].start] == pytest.approx(scale * -0.8)
        assert (found != 0).sum() == (solution.steps[1].stop if whole else 3)
        assert found[solution.results[1].stop :].eq(0).all()  # nothing after the first error
    found = step_values.step_advantages({3: solution}, values, micro, 4, least_variance=True)[0]
    assert found[solution.results[0].start] == pytest.approx(scale * (0.8 - (0.8 - 0.5)))
    assert found[solution.results[1].start] == pytest.approx(scale * -(0.9 - 0.8))


@pytest.mark.parametrize("h, after", [(0.3, 0.5), (0.9, 1.0), (0.5, 0.2)])
def test_the_baseline_of_least_variance_is_that_of_a_choice_of_two(h, after):
    """Against the variance of the gradient by the two logits, over a grid of baselines."""
    chances, gains = torch.tensor([h, 1 - h]), torch.tensor([after, 0.0])
    gradients = torch.eye(2) - chances  # of log pi(a) by the logits, [action, logit]

    def variance(baseline: float) -> float:
        each = (gains - baseline)[:, None] * gradients
        mean = (chances[:, None] * each).sum(0)
        return float((chances[:, None] * (each - mean) ** 2).sum())

    grid = torch.linspace(-1, 1, 2001).tolist()
    assert min(grid, key=variance) == pytest.approx(after - h * after, abs=2e-3)  # V' - V


@pytest.mark.parametrize("oracle", step_values.ORACLES)
def test_the_oracles_by_hand(oracle, make_run, monkeypatch):
    """Of two samples, one right and one with its second step wrong."""
    run = make_run(num_generations=2)
    start = "We begin at 23. Adding 19 gives 42. "
    texts = [start + "Minus 2 makes 40. Twice gives 80. \\boxed{80}", start + "Minus 2 makes 41."]
    ids = [tokens_of(run, text) for text in texts]
    solutions = {i: step_values.read_solution(run.tokenizer, x, PROBLEM) for i, x in enumerate(ids)}
    values = {0: [0.5, 0.8, 0.9, 0.9, 1.0]}
    monkeypatch.setattr(step_values, "read_rollout", lambda *_: solutions)
    monkeypatch.setattr(step_values, "step_values", lambda *_: values)
    mask = torch.ones(2, max(map(len, ids)), dtype=torch.bool)
    batch = trainer.Batch(torch.arange(2), 0, None, mask, None, None, None)
    batch.rewards = torch.tensor([1.0, 0.0])
    found = step_values.oracle_credit(run, ([], []), batch, oracle, together=True)
    found = found / step_values.group_scale(0.5, 2)

    right, wrong = (found[i, solutions[i].results[1].start].item() for i in range(2))
    expected = (0.8, -0.1) if oracle == "least_variance" else (0.1, -0.8)
    assert right == pytest.approx(expected[0])
    assert wrong == pytest.approx(0 if oracle == "right_only" else expected[1])
    assert (found[0, 0] != 0) == (oracle == "whole_steps")


def test_the_oracles_of_the_studies_are_understood():
    methods = [x for x in learning_curves.METHODS.values() if "step_values" in x.script]
    commands = [*headroom.ORACLES.values(), *([x.script, *x.flags.split()] for x in methods)]
    others = ["--seed=1", "--dtype", "bfloat16", "--beta", "-1", "--trace_normalize", "True"]
    oracles = set()
    for script, *flags in commands:
        assert (ROOT / script).is_file()
        options, left = step_values.parse_options([*others[:3], *flags, *others[3:]])
        assert left == others
        oracles.add((options.oracle, options.together))
    assert len(oracles) == len(commands) == 5


@pytest.mark.parametrize("together", [False, True])
def test_problems_of_a_rollout_may_have_different_numbers_of_steps(together, make_run):
    run = make_run(num_generations=2, max_completion_length=4)
    short = Problem("Start with 23, add 19.", "42", (42,))
    problems = [PROBLEM, PROBLEM, short, short]
    right = "We begin at 23. Adding 19 gives 42. "
    ids = tokens_of(run, right + "Minus 2 makes 40. Doubling it gives 80. \\boxed{80}")
    short_ids = tokens_of(run, right + "\\boxed{42}")
    solutions = {}
    for row, own_ids in enumerate((ids, ids, short_ids, short_ids)):
        solutions[row] = step_values.read_solution(run.tokenizer, own_ids, problems[row])
        assert len(solutions[row].prefixes) == len(problems[row].steps) + 1
    rollout = SimpleNamespace(rows=torch.arange(4), problems=problems)
    prompts = [encode_prompt(run.tokenizer, problem.prompt) for problem in (PROBLEM, short)]
    values = step_values.step_values(
        run, ([PROBLEM, short], prompts), rollout, solutions, 2, together
    )
    assert [len(values[group]) for group in (0, 1)] == [5, 3]  # V_0 and one after each claim


@pytest.mark.slow
@pytest.mark.parametrize("together", [False, True])
def test_values_are_success_rates(together, make_run):
    """Of the problem itself and of a right prefix, against 1,024 samples of each."""
    run = make_run(adapter=0.0, num_generations=4, max_completion_length=80)
    prompt = encode_prompt(run.tokenizer, PROBLEM.prompt)
    start = "We begin at 23. Adding 19 gives 42. "
    with run.grader:
        rates = []
        for ids in ([], tokens_of(run, start)[:-1]):
            rows = torch.arange(1024)
            u = trainer.row_uniforms(run.args, "test", 0, rows, 80)
            batch = trainer.sample(run, rows, [prompt + ids] * 1024, u)
            texts = step_values.completions_of(run, batch)[0]
            found = [step_values.read_solution(run.tokenizer, ids + x, PROBLEM) for x in texts]
            rates.append(sum(solution.right == 4 for solution in found) / 1024)
        whole = tokens_of(run, start + "Minus 2 makes 40. Then doubling it gives 80. ")
        solution = step_values.read_solution(run.tokenizer, whole, PROBLEM)
        solutions = dict.fromkeys(range(4), solution)
        rollout = SimpleNamespace(rows=torch.arange(4), problems=[PROBLEM] * 4)
        data = ([PROBLEM], [prompt])
        values = step_values.step_values(run, data, rollout, solutions, 512, together)[0]
    assert 0.1 < rates[0] < rates[1] < 0.9  # else it would show nothing
    assert values[0] == pytest.approx(rates[0], abs=0.08)
    assert values[1] == pytest.approx(rates[1], abs=0.08)
    assert values[4] == 1


# ---- Gradients -----------------------------------------------------------------------------------
def sampled(make_run) -> tuple[trainer.Run, trainer.Batch]:
    """A run, and its rollout with advantages of every kind."""
    run = make_run(credit="uniform", num_generations=4, max_completion_length=60)
    data = ([PROBLEM] * 2, [encode_prompt(run.tokenizer, PROBLEM.prompt)] * 2)
    with run.grader:
        batch = trainer.collect(run, data, {})
    batch.advantages = torch.tensor([1.0, -2.0, 0.0, 0.5, -0.5, 0.0, 1.5, 1.0])
    return run, batch


def test_rows_without_an_advantage_change_no_gradient(make_run):
    """Oracles get all rows of a rollout, methods of scripts only those with an advantage."""
    run, batch = sampled(make_run)
    micros = study.all_rows(run.args, batch)
    assert sum(len(micro.rows) for micro in micros) == 8
    for micro in micros:
        micro.credit = micro.mask.float()
    found = worth.gradient(run, trainer, micros, 8)
    flags = ("--num_generations=4", "--per_device_train_batch_size=8")
    expected = worth.method_gradient(run, batch, worth.UNIFORM, flags)
    assert expected.norm() > 0
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-7)


def test_only_wrong_leaves_right_completions_alone(make_run):
    run, batch = sampled(make_run)
    run.args.credit = "surprisal"
    (micro,) = study.all_rows(run.args, batch)
    trainer.score(run, batch, [micro], {})
    before = micro.credit.clone()
    study.for_wrong_only([micro])
    wrong = micro.advantages < 0
    assert torch.equal(micro.credit[wrong], before[wrong])
    assert torch.equal(micro.credit[~wrong], micro.mask[~wrong].float())
    assert not torch.equal(micro.credit, before)


@pytest.mark.parametrize("weight", [0.25, 0.0])
def test_negative_weight_leaves_right_completions_alone(make_run, weight):
    run, batch = sampled(make_run)
    before = batch.advantages.clone()
    method = f"grpo_arca.py --credit uniform --negative_weight {weight}"
    _, _, micros = worth.scored(run, batch, method, ("--num_generations=4",))
    for micro in micros:
        for row, advantage in zip(micro.rows.tolist(), micro.advantages.tolist(), strict=True):
            own = before[row].item()
            assert advantage == (own * weight if own < 0 else own) != 0
    assert sum(len(micro.rows) for micro in micros) == (6 if weight else 4)
    assert torch.equal(batch.advantages, before)  # the next method's


def test_the_optimal_token_baseline_is_that_of_three_loops(make_run):
    """Against whole forwards, completion by completion and token by token."""
    run, batch = sampled(make_run)
    size = 4
    micros = study.all_rows(run.args, batch)
    (micro,) = micros
    micro.rewards = torch.tensor([1.0, 0, 0, 1, 0, 0, 1, 1])[micro.rows]
    micro.advantages = trainer.group_advantages(
        micro.rewards[micro.rows.argsort()].view(-1, size), "group"
    ).flatten()[micro.rows]
    weights = torch.zeros(8, micro.mask.shape[1])  # by row of the rollout
    for i, row in enumerate(micro.rows.tolist()):
        ids = micro.ids[i][micro.attention[i]]
        length = int(micro.mask[i].sum())
        with torch.no_grad():
            logits = run.model(input_ids=ids[None]).logits[0, -length - 1 : -1]
        for t, (at, token) in enumerate(zip(logits.softmax(1), ids[-length:], strict=True)):
            squared = sum((float(j == token) - p) ** 2 for j, p in enumerate(at.tolist()))
            weights[row, t] = weights[row, t - 1] * (t > 0) + squared
    found = study.token_baseline(run, micros)[0]
    assert found.advantages.eq(1).all()
    pairs = zip(micro.rewards.tolist(), found.credit, strict=True)
    by_row = dict(zip(micro.rows.tolist(), pairs, strict=True))
    for row, (reward, credit) in by_row.items():
        group = [r for r in by_row if r // size == row // size]
        rewards = torch.tensor([by_row[r][0] for r in group])
        for t in range(micro.mask.shape[1]):
            if weights[row, t] == 0:
                assert credit[t] == 0
                continue
            weighed = sum(by_row[r][0] * weights[r, t] for r in group)
            baseline = weighed / sum(weights[r, t] for r in group)
            expected = (reward - baseline) / (rewards.std() + 1e-4)
            assert credit[t].item() == pytest.approx(float(expected), rel=1e-3, abs=1e-4)


# ---- The table -----------------------------------------------------------------------------------
def test_the_nearest_is_the_method_with_the_same_gradients():
    turned, same = np.random.default_rng(1).normal(size=(2, 20, 300))
    gradients = {"turned": turned, "same": same, "twin": 3 * turned + 0.01 * same}
    found = study.nearest(gradients)
    assert found["turned"]["nearest"] == "twin" and found["twin"]["nearest"] == "turned"
    pairs = zip(turned, gradients["twin"], strict=True)
    cosines = [a @ b / (a @ a * (b @ b)) ** 0.5 for a, b in pairs]
    assert found["twin"]["nearest_cosine"] == pytest.approx(np.mean(cosines))


@pytest.mark.slow
def test_the_study_end_to_end(tmp_path):
    """Four batches: what must be equal is, the null test holds, and files are there."""
    command = [sys.executable, ROOT / "results/worth_study.py", "--settings", "4-start"]
    command += ["--batches", "4", "--folder", tmp_path, "--output", tmp_path / "quality"]
    command += ["--", "--per_device_train_batch_size", "8"]  # 32 completions a batch
    subprocess.run(command, check=True, capture_output=True)
    rows = {row["method"]: row for row in csv.DictReader((tmp_path / "quality.csv").open())}
    assert set(rows) == set(study.ROWS)
    for name in ("gspo", "arca", "divergence"):  # before the first update
        assert (
            float(rows[name]["worth"]) == pytest.approx(1) and float(rows[name]["direction"]) == 1
        )
    null = rows[study.NULL]
    assert float(null["worth_low"]) < 1 < float(null["worth_high"])
    assert (tmp_path / "quality.png").stat().st_size > 20_000
