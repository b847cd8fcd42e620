"""Computes exact credit on the embedded task, and trains with it.

    python results/step_values.py --seed 1 --output_dir runs/oracle    # and grpo_arca.py's flags
    python results/step_values.py --oracle least_variance --together

A chain's reward is 1 if every claim is right: the result of each step, and then the boxed answer.
So a solution with a wrong claim is worth 0 from there on. One whose first j of C claims are right
is worth

    V_j = h_{j+1} * h_{j+2} * ... * h_C      h_c: chance that claim c is right if all before are

The chances h are counted for each problem over continuations by the present policy. They begin
after every claim that one of its samples reached, spread over the samples that reached it, since
their wording differs. A continuation counts for all the claims that it tries.

Run as a program this is grpo_arca.py with the advantages of an oracle, which knows what each step
is worth. --oracle says which one:

    step_values      the change of the value, V_{j+1} - V_j, on the digits of a right claim, and
                     -V_j on the first wrong token. This is the default
    whole_steps      the same on all tokens of the claim's step
    least_variance   V_j on the digits of a right claim, and -(V_{j+1} - V_j) on the first wrong
                     token. It is the same gradient on average: only the baseline differs (see
                     step_advantages)
    right_only       step_values, but nothing for completions that are wrong in the end

All are scaled by what GRPO's standard deviation would do on average. The values are sampled in one
of two ways, which draw other random numbers:

    by default       one claim after the other: 16 continuations of each claim, of which those that
                     began earlier and got there are a part
    --together       all at once: 8 continuations begin after each claim, and those that began
                     earlier and got there come on top. This takes a third of the time

This shows what a credit method could reach if it knew everything. The continuations are not counted
in the run's tokens: this is a measuring stick, not a method. worth_study.py measures the gradients
of the same credit. learning_curves.py trains with the first two oracles. headroom.py trains with
the first and the last two, and samples their values together.
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
from common.data import completions_of
from common.problems import Problem, first_error, stated_results

ORACLES = ("step_values", "whole_steps", "least_variance", "right_only")
MOST_AT_ONCE = 512  # continuations in one batch
CONTINUATIONS = 16  # of a training run, of each claim
CONTINUATIONS_TOGETHER = 8  # with --together, that begin after each claim


class Solution(NamedTuple):
    """A completion, cut into claims. Claims are spans of tokens."""

    right: int  # number of claims before the first wrong one
    results: list[range]  # that state each right claim; then the first wrong token, if any
    steps: list[range]  # the same with all tokens since the claim before
    prefixes: list[list[int]]  # token ids to the end of the sentence of 0, 1, ... right claims


# ---- Solutions -----------------------------------------------------------------------------------
@cache
def piece_of(tokenizer: Any, token: int) -> str:
    """Returns the text of a token."""
    return tokenizer.decode([token], skip_special_tokens=True)


def read_solution(tokenizer: Any, ids: list[int], problem: Problem) -> Solution:
    """Cuts a completion, with its stop token, into claims."""
    pieces = [piece_of(tokenizer, token) for token in ids]
    text = "".join(pieces)
    ends = torch.tensor([len(piece) for piece in pieces]).cumsum(0)  # of each token, in characters

    def token_at(character: int) -> int:
        """Returns the token that holds a character, or the last one."""
        return min(int((ends <= character).sum()), len(ids) - 1)

    # Compare each claim with what is right.
    expected = [*map(str, problem.steps), problem.answer]
    box = boxed_span(text) or (len(text), len(text))
    spans = [*stated_results(text, len(problem.steps)), box]  # of characters
    is_right = [
        text[begin:end] == result for (begin, end), result in zip(spans, expected, strict=True)
    ]
    right = is_right.index(False) if False in is_right else len(spans)

    # Find the tokens of the right claims, and the first wrong one.
    results = [range(token_at(begin), token_at(end - 1) + 1) for begin, end in spans[:right]]
    error = first_error(text, problem)
    if error is not None:
        wrong = token_at(error)
        results.append(range(wrong, wrong + 1))

    # A step begins where the result before it ends.
    steps = []
    begin = 0
    for tokens in results:
        steps.append(range(min(begin, tokens.start), tokens.stop))
        begin = tokens.stop

    # A continuation begins after the sentence of a right claim.
    stated = spans[: min(right, len(problem.steps))]
    cuts = [0, *(token_at(end) + 1 for _, end in stated)]
    prefixes = [ids[:cut] for cut in cuts if tokenizer.eos_token_id not in ids[:cut]]
    return Solution(right, results, steps, prefixes)


def read_rollout(run: trainer.Run, rollout: trainer.Batch) -> dict[int, Solution]:
    """Returns the solution of each row of a rollout."""
    completions, _ = completions_of(run, rollout)
    solutions = {}
    for row, ids, problem in zip(rollout.rows.tolist(), completions, rollout.problems, strict=True):
        solutions[row] = read_solution(run.tokenizer, ids, problem)
    return solutions


# ---- Values --------------------------------------------------------------------------------------
class Group(NamedTuple):
    """What is known about the problem of a group of samples."""

    problem: Problem
    prompt: list[int]  # token ids
    solutions: list[Solution]
    held: Tensor  # [C] how often claim c was right after right claims
    tried: Tensor  # [C] and how often it was made


def groups_of(
    train_set: trainer.ProblemSet,
    rollout: trainer.Batch,
    solutions: dict[int, Solution],
    size: int,
) -> dict[int, Group]:
    """Returns the groups of a rollout by their number, row // size, with nothing counted yet."""
    prompt_of = {problem.prompt: ids for problem, ids in zip(*train_set, strict=True)}
    groups = {}
    for row, problem in zip(rollout.rows.tolist(), rollout.problems, strict=True):
        number = row // size
        if number in groups:
            continue
        claims = len(problem.steps) + 1
        own = [solutions[other] for other in range(number * size, (number + 1) * size)]
        prompt = prompt_of[problem.prompt]
        groups[number] = Group(problem, prompt, own, torch.zeros(claims), torch.zeros(claims))
    return groups


class Job(NamedTuple):
    """A continuation to sample."""

    group: Group
    claims: int  # right ones before the first that it tries
    ids: list[int]  # to go on from: the prompt, and a sample up to these claims


def jobs_after(group: Group, claims: int, count: int) -> list[Job]:
    """Returns so many continuations after so many right claims, none if no sample reached them."""
    starts = [solution.prefixes for solution in group.solutions]
    reached = [prefixes[claims] for prefixes in starts if len(prefixes) > claims]
    if not reached:
        return []
    return [Job(group, claims, group.prompt + reached[i % len(reached)]) for i in range(count)]


def count_claims(run: trainer.Run, jobs: list[Job], first_row: int) -> None:
    """Samples continuations, and counts in their groups which claims they try and get right.

    Their random numbers are those of the rows from `first_row` on.
    """
    for first in range(0, len(jobs), MOST_AT_ONCE):
        part = jobs[first : first + MOST_AT_ONCE]
        rows = torch.arange(first, first + len(part)) + first_row
        length = run.args.max_completion_length
        uniforms = trainer.row_uniforms(run.args, "values", run.rollout, rows, length)
        batch = trainer.sample(run, rows, [job.ids for job in part], uniforms)
        sampled, _ = completions_of(run, batch)
        for (group, claims, ids), more in zip(part, sampled, strict=True):
            completion = ids[len(group.prompt) :] + more
            right = read_solution(run.tokenizer, completion, group.problem).right
            group.held[claims:right] += 1
            group.tried[claims : right + 1] += 1


def step_values(
    run: trainer.Run,
    train_set: trainer.ProblemSet,
    rollout: trainer.Batch,
    solutions: dict[int, Solution],
    continuations: int,
    together: bool = False,
) -> dict[int, list[float]]:
    """Returns V_0 ... V_C of each group of samples (row // G) of a rollout. V_C is 1.

    `continuations` is how many count for each claim that a sample reached or, if they are sampled
    `together`, how many begin there.
    """
    groups = groups_of(train_set, rollout, solutions, run.args.num_generations)
    jobs = []
    if together:
        for group in groups.values():
            for claims in range(len(group.tried)):
                for job in jobs_after(group, claims, continuations):
                    # A sample may have boxed its answer in the last step: no claim is left to try.
                    begun = job.ids[len(group.prompt) :]
                    right = read_solution(run.tokenizer, begun, group.problem).right
                    jobs.append(job._replace(claims=right))
        count_claims(run, jobs, 0)
    else:
        most_claims = max(len(group.tried) for group in groups.values())
        for claims in range(most_claims):
            jobs = []
            for group in groups.values():
                if claims < len(group.tried):  # problems have different numbers of steps
                    missing = continuations - int(group.tried[claims])
                    jobs += jobs_after(group, claims, missing)
            count_claims(run, jobs, 1_000_000 * claims)

    values = {}
    for number, group in groups.items():
        chances = group.held / group.tried.clamp(min=1)  # 0 for a claim that nothing reached
        products = chances.flip(0).cumprod(0).flip(0)
        values[number] = [*products.tolist(), 1.0]
    return values


def group_scale(chance: float, size: int) -> float:
    """Returns E[A | right] - E[A | wrong] of GRPO's advantages, over groups of `size` samples.

    This is by how much the standard deviation of a group scales the gradient of a problem's chance
    to be solved, on average.
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


def step_advantages(
    solutions: dict[int, Solution],
    values: dict[int, list[float]],
    micro: trainer.Batch,
    size: int,
    whole: bool = False,
    least_variance: bool = False,
) -> Tensor:
    """Returns signed advantages [B, T]: the change of the value by each claim, else 0.

    That is V_{c+1} - V_c for claim c, and -V_c where it is wrong, times what GRPO would scale it
    by. It stands on the tokens that state the claim or, if `whole`, on all tokens of its step.

    `least_variance` takes another baseline than V_c. If the claim is one choice, right with chance
    h, the softmax's gradient is as long as 1 - h where it is right and as h where it is wrong. Then
    the baseline E[Q |g|^2] / E[|g|^2] is V_{c+1} (1 - h) = V_{c+1} - V_c.
    """
    advantages = torch.zeros(micro.mask.shape)
    for i, row in enumerate(micro.rows.tolist()):
        solution = solutions[row]
        value = values[row // size]
        scale = group_scale(value[0], size)
        spans = solution.steps if whole else solution.results
        for claim, tokens in enumerate(spans):
            after = value[claim + 1] if claim < solution.right else 0.0
            baseline = value[claim]
            if least_variance:
                baseline = value[claim + 1] - value[claim]
            advantages[i, tokens.start : tokens.stop] = scale * (after - baseline)
    return advantages * micro.mask


# ---- Training ------------------------------------------------------------------------------------
def oracle_credit(
    run: trainer.Run,
    train_set: trainer.ProblemSet,
    batch: trainer.Batch,
    oracle: str,
    together: bool,
) -> Tensor:
    """Returns an oracle's signed advantages [B, T] of a rollout."""
    solutions = read_rollout(run, batch)
    continuations = CONTINUATIONS_TOGETHER if together else CONTINUATIONS
    values = step_values(run, train_set, batch, solutions, continuations, together)
    advantages = step_advantages(
        solutions,
        values,
        batch,
        run.args.num_generations,
        whole=oracle == "whole_steps",
        least_variance=oracle == "least_variance",
    )
    if oracle == "right_only":
        is_right = batch.rewards == 1
        advantages = advantages * is_right[:, None]
    return advantages


def train(oracle: str, together: bool) -> None:
    """Runs grpo_arca.py with an oracle's advantages. Its flags are in sys.argv."""
    sample_and_grade = trainer.collect

    def collect(run: trainer.Run, train_set: trainer.ProblemSet, metrics: dict) -> trainer.Batch:
        """Collects a rollout, and puts the signed advantages of its tokens into its credit."""
        batch = sample_and_grade(run, train_set, metrics)
        batch.credit = oracle_credit(run, train_set, batch, oracle, together)
        group_rewards = batch.rewards.view(-1, run.args.num_generations)
        is_constant = (group_rewards == group_rewards[:, :1]).all(1)
        metrics["constant_groups"] = is_constant.float().mean().item()  # GRPO's zero_std_share
        batch.advantages = torch.ones_like(batch.advantages)
        return batch

    def assign_credit(
        run: trainer.Run, batch: trainer.Batch, micros: list[trainer.Batch], metrics: dict
    ) -> None:
        """Keeps the credit of `collect`. On the pages each token has the same weight."""
        for micro in micros:
            micro.weights = micro.mask.float()
            if micro.credit is trainer.NOT_SET:  # in the check before the first rollout
                micro.credit = micro.weights

    trainer.collect = collect
    trainer.assign_credit = assign_credit
    trainer.main()


def parse_options(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Returns this program's options, and the words that are left for grpo_arca.py."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,  # a prefix of these may be a flag of grpo_arca.py
    )
    parser.add_argument("--oracle", choices=ORACLES, default="step_values")
    parser.add_argument("--together", action="store_true", help="sample all continuations at once")
    return parser.parse_known_args(argv)


def main() -> None:
    options, flags = parse_options(sys.argv[1:])
    sys.argv[1:] = [*flags, "--credit", "uniform"]  # its objective is A * credit, too
    train(options.oracle, options.together)


if __name__ == "__main__":
    main()
