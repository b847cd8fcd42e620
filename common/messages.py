"""What a run says about itself: what it trains on what, and what its first numbers mean."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from common.data import Problem, completions_of
from common.printable import printable
from common.reward import ACCURACY, last_boxed

if TYPE_CHECKING:
    # Each script has its own classes of these names, alike in what is read here.
    Batch = Any
    Run = Any

MANY = 0.3  # the share of completions from which on a fault is mentioned


def introduction(
    config: dict[str, Any], problems: list[Problem], held_out: list[Problem], processes: int
) -> str:
    """Returns a sentence that says what will be trained on what."""
    precision = "NF4" if config["load_in_4bit"] else "unquantized"
    rollout_size = config["per_device_train_batch_size"] * config["steps_per_generation"]
    rollout_size *= processes
    prompts = rollout_size // config["num_generations"]
    sentence = (
        f"{config['credit']} credit for {config['model_name_or_path']} ({precision}, LoRA of rank "
        f"{config['lora_r']}) on {config['dataset_name']} ({len(problems)} problems, "
        f"{len(held_out)} held out): {prompts} prompts x {config['num_generations']} completions "
        f"of at most {config['max_completion_length']} tokens a rollout, {config['max_steps']} "
        f"updates at a learning rate of {config['learning_rate']:g}, into {config['output_dir']}"
    )
    if config["dtype"] == "bfloat16" and is_slow_in_bfloat16():
        sentence += ". This CPU has no fast bfloat16: --dtype float32 will do better"
    return printable(sentence)


def is_slow_in_bfloat16() -> bool:
    """Returns whether this machine trains on a CPU for which torch has no bfloat16 kernels."""
    if torch.cuda.is_available():
        return False
    return torch.backends.cpu.get_cpu_capability() == "AVX2"


def hints(run: Run, metrics: dict[str, float], batch: Batch) -> list[str]:
    """Returns what a beginner would not find in the numbers of a rollout."""
    found = []
    if metrics["zero_std_share"] == 1:
        equal = f"every group has equal rewards (mean {metrics['reward']:.2f})"
        advice = "take easier or harder problems, or a larger --num_generations"
        found.append(f"{equal}, so the gradient is 0: {advice}")
    if run.rollout > 0:  # the rest is said once
        return found

    if metrics["truncated_share"] > MANY:
        cut_off = f"{metrics['truncated_share']:.0%} of completions are cut off before their end"
        advice = "raise --max_completion_length, or does it never write a stop token?"
        found.append(f"{cut_off}: {advice}")

    _, texts = completions_of(run, batch)
    truncated = batch.truncated.tolist()
    ended = [text for text, is_cut in zip(texts, truncated, strict=True) if not is_cut]
    without_box = [text for text in ended if last_boxed(text) is None]
    if ACCURACY in run.reward_funcs and len(without_box) > MANY * len(ended):
        advice = "ask for one in --system_prompt, or with a worked example"
        form = "(prompts may be messages)"
        no_box = f"{len(without_box)} of {len(ended)} that end have no \\boxed{{}}"
        found.append(f"{no_box}: {advice} {form}")

    if metrics["reward"] == 0:
        advice = "if its form is right, take easier problems or a larger model"
        first = repr(texts[0][:300])
        found.append(f"no completion earns anything. The first one ({advice}): {first}")
    return found
