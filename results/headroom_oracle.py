"""grpo_arca.py with exact credit in three variants: the positive controls of headroom.py.

    python results/headroom_oracle.py --oracle step_values --seed 1    # and grpo_arca.py's flags

An oracle knows the task, so it knows what each step of a solution (a claim) is worth. V_c is the
chance that a solution whose first c claims are right becomes right in the end (step_values.py).

    step_values      V_{c+1} - V_c on the digits of a right claim, -V_c on the first wrong token
    least_variance   V_c on a right claim, -(V_{c+1} - V_c) on a wrong one. It is the same gradient
                     on average: only the baseline differs (see step_advantages)
    right_only       step_values, but nothing for completions that are wrong in the end

All are scaled by what GRPO's standard deviation would do on average. Values come from
continuations by the present policy, of which CONTINUATIONS begin after each claim that a sample
reached. A continuation counts for all the claims that it tries. step_values.py does the same, but
one claim after the other; here all continuations are sampled together, which takes a third of the
time. They are not counted in the run's tokens: this is a measuring stick, not a method.
"""

import functools
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch
from step_values import Solution, read_rollout, read_solution, step_advantages, train_with_credit
from torch import Tensor

import grpo_arca as trainer
from common.data import completions_of

ORACLES = ("step_values", "least_variance", "right_only")
CONTINUATIONS = 8  # that begin after each claim; a later claim has those of earlier ones as well


def sample_values(
    run: trainer.Run,
    train_set: trainer.ProblemSet,
    rollout: trainer.Batch,
    solutions: dict[int, Solution],
) -> dict[int, list[float]]:
    """Returns V_0, V_1, ..., 1 for each group of samples, keyed by row // G."""
    size = run.args.num_generations
    problem_of = dict(zip(rollout.rows.tolist(), rollout.problems, strict=True))
    prompt_of = {problem.prompt: ids for problem, ids in zip(*train_set, strict=True)}
    jobs = []  # the group, and the token ids of its prompt and of a right beginning
    for group in sorted({row // size for row in solutions}):
        prompt = prompt_of[problem_of[group * size].prompt]
        prefixes = [solutions[row].prefixes for row in range(group * size, (group + 1) * size)]
        for claims in range(max(map(len, prefixes))):
            reached = [found[claims] for found in prefixes if len(found) > claims]
            starts = [reached[i % len(reached)] for i in range(CONTINUATIONS)]
            jobs += [(group, prompt + start) for start in starts]
    rows = torch.arange(len(jobs))
    uniforms = trainer.row_uniforms(
        run.args, "values", run.rollout, rows, run.args.max_completion_length
    )
    batch = trainer.sample(run, rows, [ids for _, ids in jobs], uniforms)

    counts: dict[int, Tensor] = {}  # of each group: how often a claim held, and was tried [2, C]
    for (group, ids), more in zip(jobs, completions_of(run, batch)[0], strict=True):
        problem = problem_of[group * size]
        prompt_length = len(prompt_of[problem.prompt])
        begun = read_solution(run.tokenizer, ids[prompt_length:], problem).right
        right = read_solution(run.tokenizer, ids[prompt_length:] + more, problem).right
        if group not in counts:
            counts[group] = torch.zeros(2, len(problem.steps) + 1)
        counts[group][0, begun:right] += 1
        counts[group][1, begun : right + 1] += 1

    values = {}
    for group, (held, tried) in counts.items():
        rates = held / tried.clamp(min=1)  # a claim that nothing reached counts for nothing
        values[group] = [*rates.flip(0).cumprod(0).flip(0).tolist(), 1.0]
    return values


def oracle_credit(
    oracle: str, run: trainer.Run, train_set: trainer.ProblemSet, batch: trainer.Batch
) -> Tensor:
    """Returns the oracle's signed advantage [B, T] of each token of a rollout."""
    size = run.args.num_generations
    solutions = read_rollout(run, batch)
    values = sample_values(run, train_set, batch, solutions)
    least_variance = oracle == "least_variance"
    advantages = step_advantages(solutions, values, batch, size, False, least_variance)
    if oracle == "right_only":
        is_right = batch.rewards == 1
        advantages = advantages * is_right[:, None]
    return advantages


def main() -> None:
    words = sys.argv[1:]
    if "--oracle" not in words[:-1]:
        sys.exit(f"headroom_oracle.py: give --oracle and one of {', '.join(ORACLES)}")
    place = words.index("--oracle")
    oracle = words[place + 1]
    if oracle not in ORACLES:
        sys.exit(f"headroom_oracle.py: --oracle {oracle}: it must be one of {', '.join(ORACLES)}")
    del words[place : place + 2]
    train_with_credit(functools.partial(oracle_credit, oracle), words)


if __name__ == "__main__":
    main()
