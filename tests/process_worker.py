"""Is one process of test_processes.py: the same rollouts and gradients, however they are split.

One start does all scripts, credit methods of every kind, and loss types. The main process writes to
records.pt what each case leaves, by its flags. The steps are the trainer's own: `collect`, `score`
and `update`.
"""

import importlib
import os
from typing import Any

import torch
from support import randomize_adapter

LOSSES = ("grpo", "dapo", "dr_grpo")
SPLITS = {1: (8, 1), 2: (2, 2)}  # processes: batch size, accumulation; 8 completions an update
# Two updates a rollout. At a rate of 0 the policy stays, so that single gradients are compared.
FLAGS = (
    "--num_generations 4 --max_completion_length 56 --num_iterations 2 --max_steps 4 "
    "--learning_rate 0 --lr_scheduler_type constant --epsilon 0.02"
)
GDPO = "--multi_objective_aggregation normalize_then_sum"
CASES = {  # what the processes ask each other for, and a method of each kind
    "grpo_arca": (
        f"--beta 0.1 --max_resample_times 1 {GDPO}",
        "--credit shuffled --mask_truncated_completions True --scale_rewards batch",
    ),
    "grpo_oar": ("--oar_noise_std 0.1", "--credit oar_p"),  # smaller noise leaves two digits
    "grpo_strace": ("--trace_mask_scope batch", "--credit gspo"),
}


def variety(completion_ids, prompts, **_) -> list[int]:
    """Returns a reward that differs in some groups. A call must hold whole groups."""
    assert prompts == [prompt for prompt in prompts[::4] for _ in range(4)]
    return [len(set(ids)) // 8 for ids in completion_ids]


def length(completion_ids, **_) -> list[int]:
    return [len(ids) // 50 for ids in completion_ids]


def with_unused_weight(model):
    """Returns a policy with a weight that gets no gradient, as of a vision tower."""
    model.register_parameter("unused", torch.nn.Parameter(torch.zeros(1)))
    return model


def watch_gradients(run) -> list[torch.Tensor]:
    """Returns a list that will hold the gradients of all updates, of every process [n, numbers]."""
    gradients: list[torch.Tensor] = []
    clip = run.accelerator.clip_grad_norm_

    def watch(parameters, limit):
        parameters = list(parameters)
        own = [p.grad.flatten() for p in parameters if p.grad is not None]
        gradients.append(run.accelerator.gather(torch.cat(own)[None]))
        return clip(parameters, limit)

    run.accelerator.clip_grad_norm_ = watch
    return gradients


def run_case(module, run, gradients: list[torch.Tensor]) -> dict[str, Any]:
    """Samples a rollout, and makes the gradients of its updates with each loss type."""
    randomize_adapter(run.model)
    gradients.clear()
    metrics: dict[str, float] = {}
    batch = module.collect(run, metrics)
    updates = module.micro_batches(run, batch)
    micros = [micro for update in updates for micro in update]
    module.score(run, batch, micros, metrics)
    randomize_adapter(run.model, 0.06)  # so that ratios are not 1
    rows = [metrics]
    for run.args.loss_type in LOSSES:
        rows += [module.update(run, update) for update in updates]
    own = list(zip(batch.rows.tolist(), batch.completion_ids, batch.advantages, strict=True))
    order = sorted(module.gather_object(own))
    return {"samples": order, "gradients": list(gradients), "rows": rows}


def main() -> None:
    size, accumulation = SPLITS[int(os.environ.get("WORLD_SIZE", "1"))]
    split = f"--per_device_train_batch_size {size} --gradient_accumulation_steps {accumulation} "
    split += f"--steps_per_generation {2 * accumulation} "
    results = {}
    for script, cases in CASES.items():
        module = importlib.import_module(script)
        module.load_policy = lambda *args, load=module.load_policy: with_unused_weight(load(*args))
        run = module.Run(module.parse_args((split + FLAGS).split()))
        run.reward_funcs = {"variety": variety, "length": length}
        run.reward_weights = torch.tensor([1.0, 0.5], dtype=torch.float64)
        gradients = watch_gradients(run)
        for case in cases:
            run.args = module.parse_args(f"{split} {FLAGS} {case}".split())
            results[f"{script} {case}"] = run_case(module, run, gradients)
    if run.accelerator.is_main_process:
        torch.save(results, "records.pt")
    run.accelerator.wait_for_everyone()
    run.accelerator.end_training()


if __name__ == "__main__":
    main()
