"""What exact credit is on the embedded task: the values of a solution's steps, by Monte-Carlo.

A chain's reward is 1 if every claim (each step's result, then the boxed answer) is right. So a
solution with a wrong claim is worth 0 from there on, and one whose first j of C claims are right is
worth

    V_j = h_{j+1} * h_{j+2} * ... * h_C      h_c: chance that claim c is right if all before are

The rates h are counted for each problem over continuations by the present policy: so many from
every claim that one of its samples reached. Those that began earlier and got there count; the rest
begin there, spread over the samples that reached it, since their wording differs.
gradient_quality.py holds credit methods against these values, value_oracle.py trains on them.
"""

import math
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

import grpo_arca as trainer
from common.data import Problem, completions_of, first_error, stated_results
from common.reward import boxed_span

AT_ONCE = 512  # continuations sampled together at most


class Solution(NamedTuple):
    """A completion, cut into claims. Claims are spans of tokens."""

    right: int  # claims before the first wrong one
    results: list[range]  # that state each right claim; then the first wrong token, if any
    steps: list[range]  # the same with all tokens since the claim before
    prefixes: list[list[int]]  # token ids to the end of the sentence of 0, 1, ... right claims


@cache
def piece_of(tokenizer, token: int) -> str:
    return tokenizer.decode([token], skip_special_tokens=True)


def read_solution(tokenizer, ids: list[int], problem: Problem) -> Solution:
    """Cuts a completion (with its stop token)."""
    pieces = [piece_of(tokenizer, i) for i in ids]
    text, ends = "".join(pieces), torch.tensor([len(piece) for piece in pieces]).cumsum(0)

    def token_at(char: int) -> int:  # that holds a character, or the last one
        return min(int((ends <= char).sum()), len(ids) - 1)

    expected = [*map(str, problem.steps), problem.answer]
    spans = [*stated_results(text, len(problem.steps)), boxed_span(text) or (len(text), len(text))]
    good = [text[slice(*span)] == right for span, right in zip(spans, expected, strict=True)]
    right = [*good, False].index(False)
    results = [range(token_at(begin), token_at(end - 1) + 1) for begin, end in spans[:right]]
    if right < len(spans):
        wrong = token_at(first_error(text, problem))
        results.append(range(wrong, wrong + 1))
    begins = [0, *(tokens.stop for tokens in results)]
    steps = [range(min(b, tokens.start), tokens.stop) for b, tokens in zip(begins, results)]
    cuts = [0, *(token_at(end) + 1 for _, end in spans[: min(right, len(problem.steps))])]
    prefixes = [ids[:cut] for cut in cuts if tokenizer.eos_token_id not in ids[:cut]]
    return Solution(right, results, steps, prefixes)


def read_rollout(run, micros: list, problem_of: dict[int, Problem]) -> dict[int, Solution]:
    """The solution of each row of a rollout."""
    return {
        row: read_solution(run.tokenizer, ids, problem_of[row])
        for micro in micros
        for row, ids in zip(micro.rows.tolist(), completions_of(run, micro)[0], strict=True)
    }


def step_values(
    run, data: tuple, solutions: dict[int, Solution], problem_of: dict[int, Problem],
    continuations: int,
) -> dict[int, list[float]]:  # fmt: skip
    """V_0 ... V_C of each group of samples (row // G) of a rollout of `data`; V_C = 1."""
    size, counts = run.args.num_generations, {}
    prompt_of = {problem.prompt: ids for problem, ids in zip(*data, strict=True)}
    prompts = {row // size: prompt_of[problem.prompt] for row, problem in problem_of.items()}
    for group in prompts:  # [claims that held | were tried, claim]
        counts[group] = torch.zeros(2, len(problem_of[group * size].steps) + 1)
    for claims in range(max(count.shape[1] for count in counts.values())):
        jobs = []  # (group, token ids): what is missing after so many right claims
        for group, prompt in prompts.items():
            found = [solutions[row].prefixes for row in range(group * size, (group + 1) * size)]
            reached = [prefixes[claims] for prefixes in found if len(prefixes) > claims]
            for i in range(continuations - int(counts[group][1, claims]) if reached else 0):
                jobs.append((group, prompt + reached[i % len(reached)]))
        for first in range(0, len(jobs), AT_ONCE):
            part = jobs[first : first + AT_ONCE]
            rows = torch.arange(first, first + len(part)) + 1_000_000 * claims
            room = run.args.max_completion_length
            u = trainer.row_uniforms(run.args, "values", run.rollout, rows, room)
            batch = trainer.sample(run, rows, [ids for _, ids in part], u)
            for (group, ids), more in zip(part, completions_of(run, batch)[0], strict=True):
                completion = ids[len(prompts[group]) :] + more
                right = read_solution(run.tokenizer, completion, problem_of[group * size]).right
                counts[group][0, claims:right] += 1
                counts[group][1, claims : right + 1] += 1
    values = {}
    for group, (held, tried) in counts.items():
        rates = held / tried.clamp(min=1)  # a claim that nothing reached counts for nothing
        values[group] = [*rates.flip(0).cumprod(0).flip(0).tolist(), 1.0]
    return values


def group_scale(rate: float, size: int) -> float:
    """What GRPO's standard deviation of a group does to the gradient of a problem's success rate,
    on average over groups of that size: E[A | right] - E[A | wrong]."""
    total = 0.0
    for others in range(size):  # right ones among the other samples
        chance = math.comb(size - 1, others) * rate**others * (1 - rate) ** (size - 1 - others)
        for right, own in ((others + 1, 1), (others, 0)):
            std = (right * (size - right) / size / (size - 1)) ** 0.5
            total += chance * abs(own - right / size) / std if std > 0 else 0.0
    return total


def step_advantages(
    solutions: dict[int, Solution], values: dict[int, list[float]], micro, size: int, whole: bool,
    least_variance: bool = False,
) -> Tensor:  # fmt: skip
    """Signed advantages [B, T]: V_{c+1} - V_c for claim c, -V_c where it is wrong, on the tokens
    that state it or (`whole`) on all of its step, else 0; times what GRPO would scale them by.

    `least_variance` takes another baseline than V_c. If the claim is one choice, right with chance
    h, the softmax's gradient is as long as 1 - h where it is right and as h where it is wrong, and
    the baseline E[Q |g|^2] / E[|g|^2] is V_{c+1} (1 - h) = V_{c+1} - V_c.
    """
    advantages = torch.zeros(micro.mask.shape)
    for i, row in enumerate(micro.rows.tolist()):
        solution, value = solutions[row], values[row // size]
        scale = group_scale(value[0], size)
        spans = solution.steps if whole else solution.results
        for claim, tokens in enumerate(spans):
            after = value[claim + 1] if claim < solution.right else 0.0
            baseline = value[claim + 1] - value[claim] if least_variance else value[claim]
            advantages[i, tokens.start : tokens.stop] = scale * (after - baseline)
    return advantages * micro.mask
