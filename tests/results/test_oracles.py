"""results/oracles.py: values and advantages against brute force, and claims of real completions."""

import itertools
import math
import subprocess
import sys

import oracles
import pytest
import torch
from support import TINY, TINY_RUN, command_line
from transformers import AutoTokenizer

import grpo_arca
from common.task import Problem

PROBLEM = Problem("Start with 5, add 7, double it.", "24", (12, 24))
RIGHT = "We begin at 5. Adding 7 gives 12. Doubling it gives 24. So the answer is \\boxed{24}."
CHANCES = torch.tensor([0.9, 0.5, 0.8])  # of each claim, if those before it are right


def solution_of(text):
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    ids = [*tokenizer(text).input_ids, tokenizer.eos_token_id]
    found = oracles.read_solution(tokenizer, ids, PROBLEM)
    pieces = [oracles.piece_of(tokenizer, token) for token in ids]
    claims = ["".join(pieces[i] for i in tokens) for tokens in found.claims]
    prefixes = [tokenizer.decode(prefix) for prefix in found.prefixes]
    return found, claims, prefixes


# ---- Claims --------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("text", "right", "claims"),
    [
        (RIGHT, 3, ["12", "24", "24"]),
        (RIGHT.replace("gives 24", "gives 26"), 1, ["12", "6"]),
        (RIGHT.replace("12.", "13."), 0, ["3"]),
        ("We begin at 5. Adding 7 gives 12. And", 1, ["12", "<|im_end|>"]),
    ],
)
def test_a_solution_claims_each_step_and_its_answer_until_the_first_wrong_token(
    text, right, claims
):
    found, texts, prefixes = solution_of(text)
    assert found.right == right
    assert [claim.strip() for claim in texts] == claims
    before = ["", "We begin at 5. Adding 7 gives 12.", RIGHT.partition(" So")[0]]
    assert [prefix.strip() for prefix in prefixes] == before[: right + 1]


# ---- Values --------------------------------------------------------------------------------------
def outcomes():
    """Returns how many claims a solution gets right, with their chances, by going through all."""
    found = []
    for right in range(len(CHANCES) + 1):
        chance = math.prod(CHANCES[:right].tolist())
        found.append((right, chance * (1 - CHANCES[right].item() if right < len(CHANCES) else 1)))
    return found


def test_the_value_of_a_step_is_the_chance_that_all_later_ones_are_right():
    held = torch.tensor([90.0, 50.0, 80.0])
    values = oracles.values_of(oracles.Group(PROBLEM, [], held, torch.full((3,), 100.0)))
    for step, value in enumerate(values):
        reached = [(right, chance) for right, chance in outcomes() if right >= step]
        ends_right = sum(chance for right, chance in reached if right == 3)
        assert value == pytest.approx(ends_right / sum(chance for _, chance in reached))


@pytest.mark.parametrize("least_variance", [False, True])
def test_the_expected_gradient_is_that_of_the_chance_to_be_right(least_variance):
    """Brute force over all solutions, of claims that are right with the chance sigmoid(theta).

    d log p / d theta of a claim is 1 - h where it is right, and -h where it is wrong. The gradient
    of h_1 h_2 h_3 is (1 - h_c) h_1 h_2 h_3.
    """
    values = oracles.values_of(oracles.Group(PROBLEM, [], CHANCES, torch.ones(3)))
    gradient = torch.zeros(3)
    for right, chance in outcomes():
        claims = [range(c, c + 1) for c in range(min(right + 1, 3))]
        solution = oracles.Solution(right, claims, [])
        advantages = oracles.step_advantages(solution, values, least_variance)
        for claim, advantage in enumerate(advantages):
            score = 1 - CHANCES[claim] if claim < right else -CHANCES[claim]
            gradient[claim] += chance * advantage * score
    assert gradient.tolist() == pytest.approx(((1 - CHANCES) * CHANCES.prod()).tolist(), rel=1e-5)


def test_the_baseline_of_least_variance_by_hand():
    """A right claim gets the value before it; a wrong one loses what it would have added."""
    solution = oracles.Solution(1, [range(1)] * 2, [])
    found = oracles.step_advantages(solution, [0.36, 0.4, 0.8, 1], least_variance=True)
    assert found == pytest.approx([0.36, -0.4])


@pytest.mark.parametrize("size", [2, 4])
def test_the_scale_of_a_group_is_the_mean_over_all_its_rewards(size):
    chance = 0.3
    sums = {0.0: 0.0, 1.0: 0.0}  # of the first sample's advantage, by its reward
    for rewards in itertools.product([0.0, 1.0], repeat=size):
        weight = math.prod(chance if reward else 1 - chance for reward in rewards)
        deviation = torch.tensor(rewards).std().item()
        if deviation > 0:
            advantage = (rewards[0] - sum(rewards) / size) / deviation
            sums[rewards[0]] += weight * advantage
    expected = sums[1.0] / chance - sums[0.0] / (1 - chance)
    assert oracles.group_scale(chance, size) == pytest.approx(expected, rel=1e-6)


# ---- Training ------------------------------------------------------------------------------------
@pytest.mark.slow
def test_continuations_are_counted_in_the_group_that_began_them(make_run):
    run = make_run(max_completion_length=80)
    rollout = grpo_arca.collect(run, {})
    groups = oracles.count_values(run, rollout)
    assert [group.problem for group in groups] == [rollout.problems[0], rollout.problems[4]]
    assert [group.tried[0].item() for group in groups] == [8, 8]
    assert all((group.held <= group.tried).all() for group in groups)


@pytest.mark.slow
def test_an_oracle_trains(tmp_path):
    flags = TINY_RUN | {"output_dir": tmp_path, "max_steps": 2, "max_completion_length": 80}
    command = [sys.executable, oracles.__file__, "--oracle=step_values", *command_line(flags)]
    subprocess.run(command, check=True, capture_output=True)
    rows = (tmp_path / "metrics.jsonl").read_text()
    assert rows.count('"grad_norm"') == 2
    assert '"grad_norm": 0.0,' not in rows
