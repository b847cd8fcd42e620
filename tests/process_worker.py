"""One process of test_processes.py: the same updates, split over processes and micro-batches.

    accelerate launch --multi_gpu --num_processes 2 tests/process_worker.py all|small FILE [FIRST]

A start takes ten seconds, so one start does every script, credit method and loss type. The main
process writes to FILE what `Record` holds, for each split and case. The steps are the trainer's
own: `collect`, `score` and `update`. FIRST is the FILE of the first split. Every update starts from
the parameters from which it started there, so that single updates are compared, and rounding in
the updates before them does not count.
"""

import hashlib
import os
import sys
import warnings
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from support import ROOT, randomize_adapter
from transformers import AutoTokenizer

import grpo_arca
import grpo_oar
import grpo_strace
from common.data import Problem, chain_problems, encode_prompt
from common.metrics import rollout_metrics

LOSSES = ("grpo", "dapo", "dr_grpo")
PER_UPDATE = 8  # completions, two groups of four
SPLITS = {1: ((8, 1), (1, 8)), 2: ((4, 1),), 4: ((2, 1),)}  # (batch size, accumulation)
FEW_SPLITS = {1: ((8, 1),), 2: ((2, 2),)}
CONSTANT = "always wrong"  # the gold answer of the group whose advantages are 0


class Case(NamedTuple):
    script: str
    credit: str
    losses: tuple[str, ...]  # all on one scored rollout, which no loss type changes
    more: tuple[str, ...] = ()  # further flags

    def name(self, loss: str) -> str:
        return " ".join([self.script, self.credit, loss, *self.more])


MODULES = {module.__name__: module for module in (grpo_arca, grpo_oar, grpo_strace)}
CREDITS = {
    "grpo_arca": (
        "arca", "uniform", "surprisal", "probability", "entropy_reduction", "divergence",
        "random", "shuffled",
    ),
    "grpo_oar": ("oar_g", "oar_p", "uniform", "random", "shuffled"),
    "grpo_strace": ("s_trace", "p_trace", "gspo", "grpo_lambda", "uniform"),
}  # fmt: skip
TRUNCATED = ("--max_completion_length", "46", "--mask_truncated_completions", "true")
MORE = (  # paths of the trainer, and of a method, that ask the other processes for something
    Case("grpo_arca", "arca", ("dapo",), ("--beta", "0.1")),
    Case("grpo_arca", "arca", ("dapo",), TRUNCATED),
    Case("grpo_arca", "arca", ("grpo",), ("--scale_rewards", "batch")),
    Case("grpo_oar", "oar_g", ("grpo",)),
    Case("grpo_strace", "s_trace", ("grpo",), ("--trace_mask_scope", "batch")),
)
NOISE = {"grpo_oar": ("--oar_noise_std", "0.1")}  # test_processes.py says why
CASES = {
    "all": MORE + tuple(Case(s, c, LOSSES, NOISE.get(s, ())) for s in CREDITS for c in CREDITS[s]),
    "small": tuple(Case(s, c[0], ("dapo",), NOISE.get(s, ())) for s, c in CREDITS.items()),
}


@dataclass
class Record:
    """What a case leaves: whole-run tensors by place in the rollout, and one entry per update."""

    samples: list[list[int]]  # prompt and completion of each row of the rollout, without padding
    rewards: torch.Tensor  # [rows]
    advantages: torch.Tensor  # [rows]
    metrics: dict[str, float]  # of the rollout
    parameters: list[torch.Tensor] = field(default_factory=list)  # [parameters], before each update
    gradients: list[torch.Tensor] = field(default_factory=list)  # [parameters], before clipping
    updates: list[dict[str, float]] = field(default_factory=list)
    ranks_agree: list[bool] = field(default_factory=list)  # parameters, bit for bit


class HashGrader:
    """Rewards 0 or 1 that depend on the text alone, and differ within a group."""

    timeouts = 0

    def grade(self, texts: list[str], answers: list[str], problems: list) -> list[float]:
        odd = [hashlib.blake2b(text.encode()).digest()[1] % 2 for text in texts]
        return [float(o and a != CONSTANT) for o, a in zip(odd, answers, strict=True)]


def make_args(case: Case, loss: str, batch_size: int, accumulation: int):
    argv = ["--credit", case.credit, "--loss_type", loss]
    argv += ["--num_generations", "4", "--num_iterations", "2", "--max_completion_length", "80"]
    argv += ["--per_device_train_batch_size", str(batch_size)]
    argv += ["--gradient_accumulation_steps", str(accumulation)]
    argv += ["--steps_per_generation", str(2 * accumulation)]  # two updates, twice
    argv += ["--lr_scheduler_type", "constant", "--warmup_steps", "0", "--max_steps", "4"]
    argv += case.more
    return MODULES[case.script].parse_args(argv)


def build(script: str, load_in_4bit: bool):
    """A run with an adapter that acts and rewards that need no right answer."""
    module = MODULES[script]
    args = make_args(Case(script, "uniform", LOSSES), LOSSES[0], *SPLITS[1][0])
    args.load_in_4bit = load_in_4bit
    tokenizer = AutoTokenizer.from_pretrained(args.model_name_or_path)
    run = module.build_run(args, tokenizer)
    randomize_adapter(run.model)
    return replace(run, grader=HashGrader())


def task(tokenizer, seed: int) -> tuple[list[Problem], list[list[int]]]:
    """Four problems, one a group: the last that the stream of shuffled epochs draws is constant."""
    texts = [problem.prompt for problem in chain_problems(4, held_out=True)]
    last = grpo_arca.problem_at(3, 4, seed)
    answers = [CONSTANT if i == last else "1" for i in range(4)]
    problems = [Problem(*pair) for pair in zip(texts, answers, strict=True)]
    return problems, [encode_prompt(tokenizer, text) for text in texts]


def flat(tensors) -> torch.Tensor:
    return torch.cat([tensor.detach().flatten() for tensor in tensors])


def rollout_facts(run, batch, metrics: dict[str, float]) -> tuple:
    """The first fields of a `Record`, which no split may change."""
    gather = run.accelerator.gather
    own = [ids[real].tolist() for ids, real in zip(batch.ids, batch.attention, strict=True)]
    samples = grpo_arca.gather_object(own)  # process by process
    order = gather(batch.rows).argsort()
    rewards = gather(batch.rewards)[order]
    advantages = gather(batch.advantages)[order]
    metrics |= rollout_metrics(run, batch, seconds=1.0)
    return [samples[i] for i in order], rewards, advantages, metrics


def run_updates(run, module, parts, record: Record, first: dict | None) -> None:
    """One update on each of `parts`, watched, from where those of `first` began."""
    accelerator = run.accelerator
    clip = accelerator.clip_grad_norm_
    trained = [p for p in run.model.parameters() if p.requires_grad]

    def watch(parameters, limit):
        record.gradients.append(flat(p.grad for p in trained))
        return clip(parameters, limit)

    accelerator.clip_grad_norm_ = watch
    for i, micros in enumerate(parts):
        if first is not None:
            torch.nn.utils.vector_to_parameters(first["parameters"][i].clone(), trained)
        record.parameters.append(flat(trained))
        record.updates.append(module.update(run, micros))
        ranks = accelerator.gather(flat(trained)[None])  # [processes, parameters]
        record.ranks_agree.append(bool((ranks == ranks[:1]).all()))
    del accelerator.clip_grad_norm_  # the class's own again


def run_case(run, case: Case, start: torch.Tensor, split: tuple[int, int], first: dict):
    """Samples a rollout with the adapter `start`, and updates that on it with each loss type.

    Returns a record for each loss type, by its name. `first` holds those of the first split. With
    one loss type, the updates are two, on half of the rollout each, in two iterations; with several
    loss types, they are one, on the first half.
    """
    module = MODULES[case.script]
    trained = [p for p in run.model.parameters() if p.requires_grad]
    torch.nn.utils.vector_to_parameters(start.clone(), trained)
    run = replace(run, args=make_args(case, case.losses[0], *split))
    metrics: dict[str, float] = {}
    batch = module.collect(run, task(run.tokenizer, run.args.seed), metrics)
    parts = module.micro_batches(run.args, batch)
    module.score(run, batch, [micro for part in parts for micro in part], metrics)
    facts = rollout_facts(run, batch, metrics)
    if len(case.losses) > 1:
        parts = parts[:1]

    records = {}
    for loss in case.losses:
        torch.nn.utils.vector_to_parameters(start.clone(), trained)
        name = case.name(loss)
        records[name] = Record(*facts)
        run = replace(run, args=make_args(case, loss, *split))
        updates = parts * run.args.num_iterations
        run_updates(run, module, updates, records[name], first.get(name))
    return records


def main() -> None:
    which, path, *first = sys.argv[1:]
    os.chdir(ROOT)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    splits = SPLITS if which == "all" else FEW_SPLITS
    results: dict[str, dict[str, dict]] = {}
    known = torch.load(first[0]) if first else results
    for script in MODULES:
        run = build(script, load_in_4bit=which != "all")  # 4 bits take half as long again
        start = flat(p for p in run.model.parameters() if p.requires_grad)
        processes = run.accelerator.num_processes
        cases = [case for case in CASES[which] if case.script == script]
        for split in splits[processes]:
            name = "{} x {} x {}".format(processes, *split)
            for case in cases:
                records = run_case(run, case, start, split, next(iter(known.values()), {}))
                by_name = {key: vars(record) for key, record in records.items()}
                results.setdefault(name, {}).update(by_name)
    if run.accelerator.is_main_process:
        torch.save(results, path)
    run.accelerator.wait_for_everyone()
    os._exit(0)  # gloo's threads may hang in their destructors


if __name__ == "__main__":
    main()
