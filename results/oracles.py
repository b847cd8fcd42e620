"""Computes exact credit on the embedded task, and trains with it.

    python results/oracles.py --oracle least_variance --seed 1 --output_dir runs/oracle

All other flags are those of grpo_arca.py. A chain's reward is 1 if every claim is right: the result
of each step, and then the boxed answer. So a solution is worth 0 from its first wrong claim on. If
its first j of C claims are right, it is worth

    V_j = h_{j+1} * h_{j+2} * ... * h_C      h_c: chance that claim c is right if all before are

The chances h are counted for each problem over continuations by the present policy. Eight begin
after every claim that a sample of the problem reached, spread over those samples, because their
wording differs. A continuation counts for all the claims that it tries. The oracles are

    step_values      the change of the value, V_{j+1} - V_j, on the digits of a right claim, and
                     -V_j on the first wrong token
    least_variance   V_j on the digits of a right claim, and -(V_{j+1} - V_j) on the first wrong
                     token. It is the same gradient on average: only the baseline differs (see
                     step_advantages)
    right_only       step_values, but nothing for completions that are wrong in the end

All are scaled by the average effect of GRPO's standard deviation. The continuations do not count as
tokens of the run: this is a measuring stick, not a method.
"""

import argparse
import math
import sys
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch
from torch import Tensor

import grpo_arca as trainer
from common.answers import boxed_span
from common.task import Problem, stated_results, token_roles

ORACLES = ("step_values", "least_variance", "right_only")
MOST_AT_ONCE = 512  # continuations in one batch
CONTINUATIONS = 8  # that begin after each claim


# ---- Solutions -----------------------------------------------------------------------------------
class Solution(NamedTuple):
    """A completion, cut into claims. Claims are spans of tokens."""

    right: int  # number of claims before the first wrong one
    claims: list[range]  # of each right claim, and then of the first wrong token, if any
    prefixes: list[list[int]]  # token ids to the end of the sentence of 0, 1, ... right claims


@cache
def piece_of(tokenizer: Any, token: int) -> str:
    """Returns the text of a token."""
    return tokenizer.decode([token])


def read_solution(tokenizer: Any, ids: list[int], problem: Problem) -> Solution:
    """Cuts a completion, with its stop token, into claims."""
    pieces = [piece_of(tokenizer, token) for token in ids]
    text = "".join(pieces)
    ends = torch.tensor([len(piece) for piece in pieces]).cumsum(0)  # of each token, in characters

    def token_at(character: int) -> int:
        """Returns the token that holds a character, or the last one."""
        return min(int((ends <= character).sum()), len(ids) - 1)

    truths = [*map(str, problem.steps), problem.answer]
    nothing = (len(text), len(text))
    spans = stated_results(text, problem)
    spans += [nothing] * (len(problem.steps) - len(spans))
    spans.append(boxed_span(text) or nothing)
    claims = []
    cuts = [0]  # where continuations begin: after the sentence of a right claim
    right = 0
    for (begin, end), truth in zip(spans, truths, strict=True):
        if text[begin:end].replace(",", "") != truth:
            wrong = token_roles(pieces, problem).index("first_wrong")
            claims.append(range(wrong, wrong + 1))
            break
        claims.append(range(token_at(begin), token_at(end - 1) + 1))
        right += 1
        cuts.append(token_at(end) + 1)
    cuts = cuts[: len(truths)]  # nothing follows the answer
    prefixes = [ids[:cut] for cut in cuts if tokenizer.eos_token_id not in ids[:cut]]
    return Solution(right, claims, prefixes)


# ---- Values --------------------------------------------------------------------------------------
class Group(NamedTuple):
    """What is known about the problem of a group of samples."""

    problem: Problem
    solutions: list[Solution]
    held: Tensor  # [C] how often claim c was right after right claims
    tried: Tensor  # [C] how often it was made


class Job(NamedTuple):
    """A continuation to sample."""

    group: Group
    right: int  # claims before the first that it tries
    begun: list[int]  # the ids of a sample, up to there


def groups_of(run: trainer.Run, rollout: trainer.Batch) -> list[Group]:
    """Returns the groups of a rollout, with nothing counted yet."""
    size = run.args.num_generations
    groups = []
    for first in range(0, len(rollout.rows), size):
        problem = rollout.problems[first]
        own = rollout.completion_ids[first : first + size]
        solutions = [read_solution(run.tokenizer, ids, problem) for ids in own]
        claims = len(problem.steps) + 1
        groups.append(Group(problem, solutions, torch.zeros(claims), torch.zeros(claims)))
    return groups


def jobs_of(run: trainer.Run, group: Group) -> list[Job]:
    """Returns the continuations of a group, after each claim that a sample of it reached."""
    jobs = []
    for claims in range(len(group.tried)):
        starts = [solution.prefixes for solution in group.solutions]
        reached = [prefixes[claims] for prefixes in starts if len(prefixes) > claims]
        for i in range(CONTINUATIONS if reached else 0):
            begun = reached[i % len(reached)]
            # A sample may have boxed its answer in the last step: no claim is left to try.
            right = read_solution(run.tokenizer, begun, group.problem).right if begun else 0
            jobs.append(Job(group, right, begun))
    return jobs


def count_claims(run: trainer.Run, jobs: list[Job]) -> None:
    """Samples continuations, and counts in their groups which claims they try and get right."""
    args = run.args
    for first in range(0, len(jobs), MOST_AT_ONCE):
        part = jobs[first : first + MOST_AT_ONCE]
        rows = torch.arange(first, first + len(part))
        draws = trainer.row_draws(
            args.seed,
            "values",
            run.rollout_number,
            rows,
            args.max_completion_length,
            args.num_generations,
        )
        problems = []
        for group, _, begun in part:
            prompt_ids = (*group.problem.prompt_ids, *begun)
            problems.append(group.problem._replace(prompt_ids=prompt_ids))
        batch = trainer.sample(run, rows, problems, draws, 0, run.reward_funcs, {})
        for (group, claims, begun), more in zip(part, batch.completion_ids, strict=True):
            right = read_solution(run.tokenizer, begun + more, group.problem).right
            group.held[claims:right] += 1
            group.tried[claims : right + 1] += 1


def count_values(run: trainer.Run, rollout: trainer.Batch) -> list[Group]:
    """Returns the groups of a rollout, with their claims counted."""
    groups = groups_of(run, rollout)
    jobs = []
    for group in groups:
        jobs += jobs_of(run, group)
    count_claims(run, jobs)
    return groups


def values_of(group: Group) -> list[float]:
    """Returns V_0 ... V_C of a group, from its counts. V_C is 1."""
    chances = group.held / group.tried.clamp(min=1)  # 0 for a claim that nothing reached
    return [*chances.flip(0).cumprod(0).flip(0).tolist(), 1.0]


def group_scale(chance: float, size: int) -> float:
    """Returns E[A | right] - E[A | wrong] of GRPO's advantages, over groups of `size` samples.

    On average, a group's standard deviation scales the gradient of a problem's chance to be solved
    by this factor.
    """
    total = 0.0
    for right_others in range(size):  # among the other samples of the group
        wrong_others = size - 1 - right_others
        arrangements = math.comb(size - 1, right_others)
        weight = arrangements * chance**right_others * (1 - chance) ** wrong_others
        for own_reward in (0, 1):
            right = right_others + own_reward
            deviation = (right * (size - right) / size / (size - 1)) ** 0.5
            if deviation > 0:
                total += weight * abs(own_reward - right / size) / deviation
    return total


def step_advantages(solution: Solution, values: list[float], least_variance: bool) -> list[float]:
    """Returns the advantage of each claim: the value after it, less a baseline.

    The baseline of claim c is V_c, so that it gets V_{c+1} - V_c, and -V_c where it is wrong.
    `least_variance` takes another baseline. If a claim is one choice, right with chance h, the
    length of the softmax's gradient is 1 - h where it is right, and h where it is wrong. Then the
    baseline E[Q |g|^2] / E[|g|^2] is V_{c+1} (1 - h) = V_{c+1} - V_c.
    """
    advantages = []
    for claim in range(len(solution.claims)):
        after = values[claim + 1] if claim < solution.right else 0.0
        baseline = values[claim]
        if least_variance:
            baseline = values[claim + 1] - values[claim]
        advantages.append(after - baseline)
    return advantages


def oracle_credit(
    run: trainer.Run, rollout: trainer.Batch, groups: list[Group], oracle: str
) -> Tensor:
    """Returns an oracle's signed advantages [B, T] of a rollout, from counted groups."""
    size = run.args.num_generations
    credit = torch.zeros(rollout.mask.shape)
    for row in range(len(credit)):
        group = groups[row // size]
        solution = group.solutions[row % size]
        values = values_of(group)
        found = step_advantages(solution, values, oracle == "least_variance")
        if oracle == "right_only" and rollout.rewards[row] != 1:
            continue
        for tokens, advantage in zip(solution.claims, found, strict=True):
            credit[row, tokens.start : tokens.stop] = group_scale(values[0], size) * advantage
    return credit * rollout.mask


# ---- Training ------------------------------------------------------------------------------------
def train(args: trainer.Args, oracle: str) -> None:
    """Runs grpo_arca.py with an oracle's advantages."""
    sample_and_grade = trainer.collect

    def collect(run: Any, metrics: dict) -> trainer.Batch:
        """Collects a rollout in which every completion has a gradient."""
        rollout = sample_and_grade(run, metrics)
        run.oracle_credit = oracle_credit(run, rollout, count_values(run, rollout), oracle)
        rollout.advantages = torch.ones_like(rollout.advantages)
        return rollout

    def assign_credit(run: Any, batch: trainer.Batch, micros: list, metrics: dict) -> None:
        """Puts the signed advantages of tokens into the credit of the micro-batches."""
        for micro in micros:
            micro.weights = micro.mask.float()  # credit.html shows the same weight for all tokens
            micro.credit = run.oracle_credit[micro.rows, : micro.mask.shape[1]]

    trainer.collect = collect
    trainer.assign_credit = assign_credit
    trainer.run_to_the_end(args)


# ---- Command line --------------------------------------------------------------------------------
def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,  # a prefix of these may be a flag of grpo_arca.py
    )
    parser.add_argument("--oracle", choices=ORACLES, default="least_variance")
    options, flags = parser.parse_known_args()
    flags = [f"--output_dir=runs/oracle-{options.oracle}", *flags]  # the user's own comes last
    args = trainer.parse_args([*flags, "--credit", "uniform"])  # its objective is A * credit, too
    train(args, options.oracle)


if __name__ == "__main__":
    main()
