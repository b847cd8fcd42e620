"""grpo_arca.py with exact credit: GRPO where each step's advantage is the change of its value.

    python results/value_oracle.py --seed 1 --output_dir runs/oracle      # grpo_arca.py's flags
    python results/value_oracle.py --whole_steps ...    # not on the digits that state a step alone

What a credit method could reach on the embedded task if it knew everything. Every rollout's steps
are valued by 16 continuations from each claim that a sample reached (step_values.py), which are not
counted in its tokens: this is a measuring stick, not a method.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "results")]

import torch
from step_values import read_rollout, step_advantages, step_values

import grpo_arca as trainer

CONTINUATIONS, WHOLE = 16, "--whole_steps" in sys.argv
sample_and_grade = trainer.collect


def collect(run, data: tuple, metrics: dict) -> tuple:
    """A rollout with signed advantages of tokens as its credit."""
    batch, problem_of = sample_and_grade(run, data, metrics)
    solutions = read_rollout(run, [batch], problem_of)
    values = step_values(run, data, solutions, problem_of, CONTINUATIONS)
    batch.credit = step_advantages(solutions, values, batch, run.args.num_generations, WHOLE)
    batch.advantages = torch.ones_like(batch.advantages)
    return batch, problem_of


def assign_credit(run, micros: list, metrics: dict) -> None:
    """`collect` has done it; for the pages each token weighs the same."""
    for micro in micros:
        micro.weights = micro.mask.float()
        if micro.credit is None:  # the check before the first rollout
            micro.credit = micro.weights


if __name__ == "__main__":
    trainer.collect, trainer.assign_credit = collect, assign_credit
    words = [word for word in sys.argv if word != "--whole_steps"]
    sys.argv = [*words, "--credit", "uniform"]  # whose objective is A * credit, too
    trainer.main()
