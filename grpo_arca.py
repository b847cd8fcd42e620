"""GRPO with ARCA token credit on a QLoRA policy, in one file.

    accelerate launch grpo_arca.py                        # embedded tiny policy and task, on a CPU
    accelerate launch grpo_arca.py --credit uniform       # plain GRPO, the baseline
    accelerate launch grpo_arca.py --model_name_or_path Qwen/Qwen3-1.7B ...   # as in README.md

GRPO (arXiv 2402.03300) samples a group of completions for each prompt. The advantage A_i of a
completion is its reward minus the group's mean, divided by the group's standard deviation, and each
of its T_i tokens receives the same advantage. ARCA (arXiv 2606.00257, authors' code
github.com/rodlaf/tokenweighting) measures how far the adapter has moved h_t, the hidden state that
predicts token y_t, and splits the advantage in proportion to that:

    alpha_t  = || h_adapted_t - h_base_t ||_2 + 1e-8      h_t: after the final norm, in fp32
    weight_t = alpha_t^p / (mean of alpha^p over the completion)
    A_t      = A_i * weight_t

The base is the model without any adapter. If a run starts from an adapter, alpha includes what that
adapter had learned before. The power p (--sharpening) is 1 in the paper's equation, and 2 in the
configuration behind its table. The authors tested ARCA on LoRA in bf16, and measured alpha with
dropout on. Here the base is in 4 bits, and alpha is measured with dropout off. The paper's loss is
-mean_i A_i / T_i sum_t weight_t log pi(y_t). Ours is PPO's, which clips the ratio of new to old
probability. With --loss_type grpo its gradient is the paper's wherever the ratio is 1.

--credit also offers the paper's baselines (surprisal, entropy_reduction and divergence), another
signal of ours (probability), and two controls (random and shuffled).

How to read this file: first come the flags, and the Batch of completions that each step of training
hands to the next. The method stands between the CREDIT marks. Then comes the training loop,
`train`, and its steps: `collect`, `score` and `update`. They are followed by the policy's
log-probabilities. The rest is machinery, which a first reading may skip: sampling, set-up,
checkpoints and the command line. Except for this text, everything outside the CREDIT marks is the
same in every grpo_*.py script, so a few parameters of functions are unused in this one.

Sizes are attributes of the Run, over all processes:
    run.rollout_size          completions in a rollout
    run.update_size           completions in an update
    run.updates_per_pass      rollout_size / update_size
    run.updates_per_rollout   updates_per_pass * --num_iterations

Shapes in comments: B completions; P prompt tokens, padded on the left; T completion tokens, padded
on the right; V words in the vocabulary; H hidden units; G completions of one prompt, a group.
`rows` are indices into the whole rollout, `places` into one Batch.
"""

from __future__ import annotations

import contextlib
import copy
import ctypes
import fcntl
import functools
import hashlib
import json
import logging
import math
import os
import shutil
import signal
import sys
import warnings
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

# On import bitsandbytes warns about a kernel that is not used here.
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)

import torch
import torch.nn.functional as F
import transformers
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs, gather_object, parse_flag_from_env
from peft import LoraConfig, PeftModel, get_peft_model
from peft.utils.integrations import dequantize_bnb_weight
from torch import Tensor, nn
from transformers.cache_utils import StaticLayer

from common import fail
from common.data import closing_token, load_data, problem_at, reply_text
from common.metrics import (
    credit_averages,
    eval_metrics,
    means,
    peak_memory,
    rollout_metrics,
    timed,
)
from common.policy import adapter_flags, check_adapter, check_base, describe_adapter
from common.report import credit_example, report_run
from common.reward import (
    ACCURACY,
    code_digests,
    load_reward_funcs,
    places_without_signal,
    reward_values,
    weighted_sum,
)
from common.run_log import RunLog
from common.task import Problem

SCRIPT = Path(__file__).resolve()
CUDA = torch.cuda.is_available() and not parse_flag_from_env("ACCELERATE_USE_CPU")
SEGMENT = 256 if CUDA else 16  # decoded tokens after which ended completions are dropped
CHECK = 32  # decoded tokens between looks whether all have ended
FEWEST_CACHED_TOKENS = 2**15  # with fewer in a micro-batch's prompts, a GPU does not cache them
LOGITS_PER_CHUNK = 2**26  # 256 MiB in fp32


# ---- Flags: the names and meanings are TRL's, where TRL has the flag -----------------------------
# Annotated[type, low, high] has the bounds that Args checks. Without any, they are 0 and 1e18.
Positive = Annotated[int, 1, 1e18]


def flag(default: Any, help: str) -> Any:
    """Declares a flag by its default and its help text."""
    if isinstance(default, list):
        return field(default_factory=default.copy, metadata={"help": help})
    return field(default=default, metadata={"help": help})


@dataclass
class Args:
    """The flags. Their defaults suit an ordinary model; see also EMBEDDED_DEFAULTS below."""

    # model
    model_name_or_path: str = flag(
        str(SCRIPT.parent / "common/tiny_policy"), "Hub id or folder of the base model"
    )
    model_revision: str = flag("main", "branch, tag or commit of a Hub model")
    start_adapter: str | None = flag(None, "folder of a LoRA adapter of the base to start from")
    load_in_4bit: bool = flag(True, "quantize the base to NF4 with double quantization")
    dtype: Literal["bfloat16", "float32"] | None = flag(
        None, "precision of all but NF4 weights; default: bfloat16 on a GPU that has it, or float32"
    )
    lora_r: int = flag(32, "rank of a new adapter")
    lora_alpha: Positive = flag(32, "a new adapter is scaled by lora_alpha / lora_r")
    lora_dropout: Annotated[float, 0, 0.99] = flag(0.0, "dropout before the adapter in training")
    lora_target_modules: list[str] = flag(["all-linear"], "linear layers that get a new adapter")
    # data and reward
    dataset_name: str = flag(
        "chain_arithmetic", "embedded, Hub id, or .jsonl/.json/.csv/.tsv/.parquet"
    )
    dataset_config: str | None = flag(None, "config of a Hub data set; of chains: length")
    dataset_train_split: str = flag("train", "split to train on")
    dataset_test_split: str = flag("test", "split to evaluate on")
    shuffle_dataset: bool = flag(True, "shuffle the problems in every epoch")
    eval_dataset_name: str | None = flag(None, "replaces the test split, as openai/gsm8k:main")
    prompt_column: str | None = flag(None, "column of problems, if not prompt|problem|question")
    answer_column: str | None = flag(None, "column of answers, if not answer|solution|ground_truth")
    system_prompt: str | None = flag(None, "system message before every problem")
    chat_template_kwargs: str = flag("{}", 'JSON for the template: {"enable_thinking": false}')
    reward_funcs: list[str] = flag(["accuracy_reward"], "or your own, as module.function")
    reward_weights: list[float] | None = flag(None, "weight of each reward function; default 1")
    # rollout
    num_generations: Annotated[int, 2, 1e18] = flag(8, "completions per prompt: the group size G")
    max_completion_length: Positive = flag(512, "longest completion in tokens")
    temperature: Annotated[float, 1e-4, 1e18] = flag(1.0, "of samples, and of trained log-probs")
    top_p: Annotated[float, 1e-4, 1] = flag(1.0, "sample from the fewest tokens of this mass")
    max_resample_times: int = flag(0, "replace a group with equal rewards, at most so often")
    rollout_weights: Literal["dense", "quantized"] = flag("dense", "sample dequantized | from NF4")
    per_device_rollout_batch_size: int = flag(0, "sampled at once, to limit the KV cache; 0: all")
    cuda_graphs: bool = flag(True, "record sampling on a GPU; False: for a model that refuses it")
    # batch: prompts per rollout = batch size * steps_per_generation * processes / num_generations
    per_device_train_batch_size: Positive = flag(8, "completions in a micro-batch")
    gradient_accumulation_steps: Positive = flag(4, "micro-batches per update")
    steps_per_generation: int = flag(0, "micro-batches per rollout; 0: those of one update")
    num_iterations: Positive = flag(1, "times that each rollout is trained on (mu)")
    gradient_checkpointing: bool = flag(True, "recompute: less memory, but slower")
    # objective
    loss_type: Literal["grpo", "dapo", "dr_grpo"] = flag(
        "grpo", "divide the loss by a completion's tokens | an update's | max_completion_length"
    )
    scale_rewards: Literal["group", "batch", "none"] = flag(
        "group", "divide advantages by the deviation of rewards in the group | rollout | not at all"
    )
    multi_objective_aggregation: Literal["sum_then_normalize", "normalize_then_sum"] = flag(
        "sum_then_normalize", "of several rewards; normalize_then_sum is GDPO (arXiv 2601.05242)"
    )
    negative_weight: float = flag(1.0, "scales advantages below 0; 0 ignores them")
    epsilon: float = flag(0.2, "the ratio is clipped below 1 - epsilon")
    epsilon_high: float | None = flag(None, "and above 1 + this; default: epsilon")
    beta: float = flag(0.0, "weight of the k3 KL to the policy before training")
    use_bias_correction_kl: bool = flag(True, "weigh the KL by the ratio; both get gradients")
    mask_truncated_completions: bool = flag(False, "leave unfinished completions out of the loss")
    # === CREDIT ===
    credit: Literal[
        "arca", "uniform", "surprisal", "probability", "entropy_reduction", "divergence",
        "random", "shuffled",
    ] = flag("arca", "splits the advantage; uniform is GRPO, the last 2 are controls")  # fmt: skip
    sharpening: float = flag(1.0, "power p of the scores before they are normalized")
    # === END CREDIT ===
    # optimizer
    learning_rate: float = flag(4e-5, "AdamW's peak rate; docs/models.md has its source")
    warmup_steps: int = flag(10, "updates of linear warm-up to the peak rate")
    lr_scheduler_type: Literal["cosine", "linear", "constant", "constant_with_warmup"] = flag(
        "cosine", "schedule after the warm-up (constant has no warm-up)"
    )
    max_grad_norm: float = flag(1.0, "clip gradients to this norm; 0 is off")
    skip_zero_gradient: bool = flag(False, "take no step on a zero gradient, where Adam takes one")
    max_steps: int = flag(200, "updates; 0 only evaluates")
    seed: int = flag(1, "seed of adapter, data order and samples")
    # evaluation and output
    eval_steps: int = flag(25, "updates between evaluations; 0: only before and after")
    max_eval_samples: Positive = flag(200, "held-out problems")
    num_generations_eval: Positive = flag(4, "samples per held-out problem")
    per_device_eval_batch_size: int = flag(32, "completions sampled at once")
    metric_for_best_model: str | None = flag(
        None, "figure that ranks evaluations; default: sampled_accuracy, or the first reward's"
    )
    output_dir: str = flag("", "default: runs/<script>-<credit>-<seed>")
    save_steps: int = flag(50, "updates between checkpoints; 0 is off")
    save_total_limit: Annotated[int | None, 1, 1e18] = flag(None, "keep so many, and the best")
    resume_from_checkpoint: Literal["latest"] | None = flag(None, "go on from the newest, if any")
    report_to: Literal["none", "tensorboard", "wandb", "trackio"] = flag("none", "tracker")

    def __post_init__(self) -> None:
        """Ends the run if a number is out of its bounds."""
        for name, hint in get_type_hints(type(self), include_extras=True).items():
            low, high = getattr(hint, "__metadata__", (0, 1e18))
            value = getattr(self, name)
            if isinstance(value, int | float) and not low <= value <= high:
                fail(f"--{name} {value} must be between {low} and {high}")


EMBEDDED_DEFAULTS = {  # used instead for a policy whose config.json says "embedded_policy"
    "lora_r": 8,
    "lora_alpha": 16,
    "max_completion_length": 80,
    "per_device_train_batch_size": 32,
    "gradient_checkpointing": False,
    "learning_rate": 4e-3,
    "warmup_steps": 3,
    "max_steps": 45,
    "per_device_eval_batch_size": 200,
    "save_steps": 25,
}


# ---- The Batch of completions --------------------------------------------------------------------
@dataclass
class Batch:
    """Completions, and what is known about them so far. What is not known yet is None."""

    rows: Tensor  # [B] index of each completion in the whole rollout: prompt * G + sample
    prompt_width: int  # P
    ids: Tensor  # [B, P + T]
    attention: Tensor  # [B, P + T] bool: False on padding
    truncated: Tensor  # [B] bool: ended by the length limit, not by a stop token
    sampled_logp: Tensor  # [B, T] from the decode loop, at --temperature, before top_p
    entropy: Tensor  # [B, T] nats, at --temperature, before top_p
    problems: list[Problem]  # [B] with gold answers and columns
    texts: list[str]  # [B] the reply: its start in the prompt, as <think>, and the completion
    completion_ids: list[list[int]]  # [B] tokens of the completion alone, stop tokens included
    function_rewards: Tensor  # [B, F] what each reward function gave; NaN where it does not apply
    # set by `collect`
    rewards: Any = None  # [B] their weighted sum; NaN if none applies
    advantages: Any = None  # [B]
    loss_mask: Any = None  # [B, T] bool: the tokens that are trained on
    tokens_per_update: float = 0.0  # tokens trained on in an average update, over all processes
    # set by `score`
    old_logp: Any = None  # [B, T] before the rollout's first update; None if it has only one
    reference_logp: Any = None  # [B, T] of the policy before training, if beta > 0
    base_logp: Any = None  # [B, T] without the adapter; only methods set it, for the metric `kl`
    scores: Any = None  # [B, T] from `token_scores`
    weights: Any = None  # [B, T] for reports: each token's share of the credit, mean 1
    credit: Any = None  # [B, T] for the loss: the factor in `surrogate_terms`; ARCA: `weights`
    bounds: tuple | None = None  # low and high limit of the ratio, if the method sets its own

    @property
    def mask(self) -> Tensor:
        """[B, T] bool: the tokens of the completions, stop tokens included."""
        return self.attention[:, self.prompt_width :]

    def per_completion(self) -> dict[str, Any]:
        """Returns the tensors and lists that have an entry for each completion, by name."""
        return {
            name: value for name, value in vars(self).items() if isinstance(value, Tensor | list)
        }

    def select(self, index: Tensor) -> Batch:
        """Returns a batch of the completions `index`."""
        part = copy.copy(self)  # with what a method may have added
        for name, value in self.per_completion().items():
            is_list = isinstance(value, list)
            setattr(part, name, [value[i] for i in index.tolist()] if is_list else value[index])
        return part

    def put(self, index: Tensor, part: Batch) -> None:
        """Replaces the completions `index` by those of `part`, which is as wide as this."""
        for name, value in self.per_completion().items():
            for i, item in zip(index.tolist(), getattr(part, name), strict=True):
                value[i] = item

    def trimmed(self) -> Batch:
        """Returns the batch without columns that are only padding; for use before `score`."""
        is_used = self.attention.any(0)  # [P + T]
        is_token = is_used[self.prompt_width :]  # [T]
        return replace(
            self,
            prompt_width=int(is_used[: self.prompt_width].sum()),
            ids=self.ids[:, is_used],
            attention=self.attention[:, is_used],
            sampled_logp=self.sampled_logp[:, is_token],
            entropy=self.entropy[:, is_token],
            loss_mask=self.loss_mask[:, is_token],
        )


# All functions below share the Run: `run.model` is the model with its adapter, and `run.policy` the
# module around it that returns log-probs and hidden states.
# === CREDIT ===
from common.credit import control_weights


def token_scores(run: Run, micro: Batch, metrics: dict) -> Tensor:
    """Returns how much each token matters [B, T], without gradients (arXiv 2606.00257, Methods).

    It also sets `micro.base_logp`, for the metric `kl`. A method may add figures of its own to
    `metrics`.
    """
    credit = run.args.credit
    # How far the entropy falls to the next token, 0 if that is padding; `pad` adds the last column.
    falls = (micro.entropy[:, :-1] - micro.entropy[:, 1:]).clamp(min=0) * micro.mask[:, 1:]
    rollout_scores = {  # what the rollout knows: these need no forward pass
        "uniform": torch.ones_like(micro.entropy),
        "surprisal": -micro.sampled_logp,
        "probability": micro.sampled_logp.exp(),
        "entropy_reduction": F.pad(falls, (0, 1)),
    }
    if credit in rollout_scores:
        return rollout_scores[credit]

    # Compare hidden states after the final norm, or log-probs, with those of the same model without
    # its adapter. Do it in fp32, as bf16 would round a new adapter's small changes away. The metric
    # `kl` always needs the base's log-probs.
    with in_fp32(run) as policy:
        logp, hidden = policy(micro, needs_logp=(credit == "divergence"))
        with run.model.disable_adapter():
            micro.base_logp, base_hidden = policy(micro)
    if credit == "divergence":
        return (logp - micro.base_logp).abs()
    return torch.linalg.vector_norm(hidden - base_hidden, dim=-1)  # arca, and its controls


def normalize(scores: Tensor, mask: Tensor, power: float) -> Tensor:
    """Returns weights [B, T] in proportion to scores^power: mean 1 over a completion, 0 on padding.

    A score below 0 counts as 0.
    """
    positive = torch.where(mask, scores.float().clamp(min=0) + 1e-8, 0.0)
    # Divide by the largest score first, because powers p > 1 of tiny scores would underflow.
    largest = positive.amax(1, keepdim=True)
    raised = (positive / largest).pow(power) * mask  # masked, as padding may be 0**0 = 1
    return raised * mask.sum(1, keepdim=True) / raised.sum(1, keepdim=True)


def assign_credit(run: Run, batch: Batch, micros: list[Batch], metrics: dict) -> None:
    """Turns the scores of a rollout into `weights`, which in ARCA are the `credit`, too.

    The control `shuffled` puts ARCA's weights in another order, and `random` takes random ones that
    are as concentrated.
    """
    for micro in micros:
        micro.weights = normalize(micro.scores, micro.mask, run.args.sharpening)
        if run.args.credit in ("random", "shuffled"):
            draws = credit_draws(run, micro)
            micro.weights = control_weights(run.args.credit, micro.weights, micro.mask, draws)
        micro.credit = micro.weights


def surrogate_terms(args: Args, micro: Batch, log_ratio: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the log of the ratio to clip, and the advantage, of each token [B, T]."""
    return log_ratio, micro.advantages[:, None] * micro.credit


# === END CREDIT ===


# ---- The loop and its steps ----------------------------------------------------------------------
def train(run: Run) -> None:
    """Runs GRPO: collects a rollout, scores its tokens, updates the policy on it, and repeats."""
    args = run.args
    evaluation_is_due = True  # if so, credit.html shows the next rollout, too
    while run.step < args.max_steps:
        if evaluation_is_due:
            evaluate(run)
        former_step = run.step
        metrics: dict[str, float] = {}  # each step adds its own
        batch = collect(run, metrics)
        run.log.write_completions(run.step + 1, "train", batch, run.reward_funcs)
        updates = micro_batches(run, batch)  # [update][micro-batch]
        all_micros = [micro for micros in updates for micro in micros]  # `score` fills these
        score(run, batch, all_micros, metrics)

        with run.deferred_signals():  # a signal ends the run only after the rollout's last update
            for _ in range(args.num_iterations):
                for micros in updates[: args.max_steps - run.step]:  # none beyond --max_steps
                    with timed(metrics, "seconds_update"):
                        metrics |= update(run, micros)
                    run.step += 1
                    run.log.write({"step": run.step} | metrics)
                    # Later updates log the rollout's metrics again, but not the seconds it took.
                    metrics |= {name: 0.0 for name in metrics if name.startswith("seconds")}
            if evaluation_is_due or run.step >= args.max_steps:
                run.page_examples += credit_example(
                    run.tokenizer, all_micros, args.num_generations, former_step, args.system_prompt
                )
        if run.log.has_diverged():
            fail(
                "loss or gradient not finite in ten updates in a row: lower --learning_rate, "
                f"delete checkpoint-{max(0, run.step - 9 - run.updates_per_rollout)} and later, "
                "which may be ruined, and go on"
            )

        if run.is_due(args.save_steps, former_step):
            save_checkpoint(run)
        evaluation_is_due = run.is_due(args.eval_steps, former_step)
    evaluate(run)


def collect(run: Run, metrics: dict) -> Batch:
    """Returns this process's share of a rollout: completions, graded and with advantages.

    It does not change the run's progress, so an interrupted run can sample the rollout again.
    """
    args = run.args
    accelerator = run.accelerator

    # Deal out the rows by update, then by process: any number of processes makes the same updates.
    # Run has made sure that each process has whole groups.
    rows_by_update = torch.arange(run.rollout_size).view(  # [updates, processes, their rows]
        run.updates_per_pass, accelerator.num_processes, -1
    )
    rows = rows_by_update[:, accelerator.process_index].flatten()

    # A group with equal rewards teaches nothing, and may be replaced. A process has whole groups,
    # so it need not ask the others.
    logged: dict[str, list[float]] = {}  # by name: what reward functions give, and what they log
    with timed(metrics, "seconds_rollout"):
        batch = sample_attempt(run, rows, 0, logged)
        for attempt in range(1, args.max_resample_times + 1):
            group_rewards = batch.function_rewards.unflatten(0, (-1, args.num_generations))
            places = places_without_signal(
                aggregated_advantages(args, group_rewards, run.reward_weights)
            )
            if len(places) > 0:
                batch.put(places, sample_attempt(run, batch.rows[places], attempt, logged))

    batch.rewards = weighted_sum(batch.function_rewards, run.reward_weights).float()
    # With --scale_rewards batch, advantages depend on the rewards of all processes. So each process
    # computes the advantages of the whole rollout, and keeps those of its own rows.
    order = accelerator.gather(batch.rows).argsort()  # puts what is gathered in the order of rows
    all_rewards = accelerator.gather(batch.function_rewards)[order]  # [prompts * G, F]
    advantages = aggregated_advantages(  # [prompts, G]
        args, all_rewards.unflatten(0, (-1, args.num_generations)), run.reward_weights
    )
    advantages[advantages < 0] *= args.negative_weight
    batch.advantages = advantages.flatten()[batch.rows]

    batch.loss_mask = batch.mask & ~(batch.truncated & args.mask_truncated_completions)[:, None]
    batch.tokens_per_update = (
        accelerator.reduce(batch.loss_mask.sum(), "sum").item() / run.updates_per_pass
    )

    metrics |= rollout_metrics(accelerator, batch, advantages, logged, metrics["seconds_rollout"])
    return batch


def sample_attempt(run: Run, rows: Tensor, attempt: int, logged: dict) -> Batch:
    """Returns a batch of the given rows of the rollout, sampled and graded.

    A row's problem and random numbers follow from the seed, the rollout, the row and the attempt:
    0 at first, then 1, 2, ... for groups that are replaced, which get other problems.
    """
    args = run.args
    suffix = f" attempt {attempt}" if attempt > 0 else ""
    shuffle_seed = f"{args.seed}{suffix}" if args.shuffle_dataset or attempt > 0 else None
    # Problems are numbered through all rollouts and epochs.
    positions = (rows + run.rollout_number * run.rollout_size) // args.num_generations
    problems = [
        run.train_set[problem_at(position, len(run.train_set), shuffle_seed)]
        for position in positions.tolist()
    ]
    draws = row_draws(
        args.seed,
        f"rollout{suffix}",
        run.rollout_number,
        rows,
        args.max_completion_length,
        args.num_generations,
    )
    return sample(
        run, rows, problems, draws, args.per_device_rollout_batch_size, run.reward_funcs, logged
    )


def aggregated_advantages(args: Args, rewards: Tensor, reward_weights: Tensor) -> Tensor:
    """Returns advantages [prompts, G] from the rewards of F functions, [prompts, G, F]."""
    if args.multi_objective_aggregation == "sum_then_normalize":
        advantages = group_advantages(weighted_sum(rewards, reward_weights), args.scale_rewards)
    else:  # GDPO (arXiv 2601.05242): normalize each function by group, then the sum by batch
        # NaN again where a function does not apply, so that the sum leaves it out.
        normalized = group_advantages(rewards, "group").where(~rewards.isnan(), torch.nan)
        total = weighted_sum(normalized, reward_weights)
        # `view(1, -1)` makes one group of the whole rollout.
        advantages = group_advantages(total.view(1, -1), "group").view_as(total)
        # The mean of `total`, 0 but for rounding, must not move a 0: `micro_batches` drops those.
        advantages[total == 0] = 0.0
    return advantages.float()


def group_advantages(rewards: Tensor, scale_rewards: str) -> Tensor:
    """Returns advantages: rewards [prompts, G, ...] minus their group's mean, then divided.

    The divisor is the standard deviation that `scale_rewards` names, plus 1e-4, as in TRL. A reward
    is NaN if no reward function applied; it is left out of every mean and deviation, and its
    advantage is 0.
    """
    # Subtract the best reward first: equal rewards then give exactly 0. Minus a rounded mean, they
    # might not. Sums such as .1 + .2 and .3 differ by their own rounding alone, and count as equal.
    best = rewards.nan_to_num(nan=-torch.inf).amax(1, keepdim=True)
    from_best = (rewards - best).masked_fill(rewards.isclose(best, rtol=1e-12, atol=0.0), 0.0)
    centered = from_best - from_best.nanmean(1, keepdim=True)
    degrees_of_freedom = ((~rewards.isnan()).sum(1, keepdim=True) - 1).clamp(min=1)
    variance = centered.square().nansum(1, keepdim=True) / degrees_of_freedom
    divisors: dict[str, Any] = {
        "group": variance.sqrt() + 1e-4,  # [prompts, 1, ...]
        "batch": rewards[~rewards.isnan()].std() + 1e-4,
        "none": 1.0,
    }
    # The deviation of a batch with a single known reward is NaN.
    return (centered / divisors[scale_rewards]).nan_to_num(nan=0.0)


def micro_batches(run: Run, batch: Batch) -> list[list[Batch]]:
    """Returns each update's micro-batches of the completions that have a gradient.

    They are sorted by length, so that they need little padding. Without a KL term, a completion
    whose advantage is 0 has no gradient, so its loss mask is cleared in `batch` first.
    """
    if run.args.beta == 0:
        batch.loss_mask = batch.loss_mask & (batch.advantages != 0)[:, None]
    has_gradient = batch.loss_mask.any(1)
    lengths = batch.attention.sum(1)
    updates = []
    # `collect` has put the completions of an update side by side.
    for places in torch.arange(len(lengths), device=lengths.device).chunk(run.updates_per_pass):
        # DDP needs a backward pass on every process: if no completion has a gradient, keep one.
        kept = places[has_gradient[places]] if has_gradient[places].any() else places[:1]
        by_length = kept[lengths[kept].argsort(stable=True)]
        parts = by_length.split(run.args.per_device_train_batch_size)
        updates.append([batch.select(part).trimmed() for part in parts])
    return updates


@torch.no_grad()
def score(run: Run, batch: Batch, micros: list[Batch], metrics: dict) -> None:
    """Sets what the updates need besides the rollout: log-probs and token weights of `micros`.

    `batch` is the whole rollout of this process; `micros` hold its rows that have a gradient.
    """
    for micro in micros:
        with timed(metrics, "seconds_score"):
            if run.updates_per_rollout > 1:  # with one update, old and new log-probs are equal
                micro.old_logp = training_forward(run, micro)
            run.policy.eval()  # no dropout in the reference and in the credit signal
            if run.args.beta > 0:  # run.policy(micro), with the weights from before training
                micro.reference_logp, _ = torch.func.functional_call(
                    run.policy, run.start_weights, micro
                )
        with timed(metrics, "seconds_credit"):
            micro.scores = token_scores(run, micro, metrics) * micro.mask
        # Make the loss NaN where a score is not finite, so that `update` takes no step. Do it here,
        # as `assign_credit` may clamp scores.
        micro.advantages[~micro.scores.isfinite().all(1)] = torch.nan
    with timed(metrics, "seconds_credit"):
        assign_credit(run, batch, micros, metrics)
    metrics |= means(run.accelerator, [credit_averages(micro) for micro in micros])


def update(run: Run, micros: list[Batch]) -> dict[str, float]:
    """Takes one optimizer step on the micro-batches of an update, and returns its metrics."""
    accelerator = run.accelerator
    total_loss = torch.zeros((), device=accelerator.device)
    to_average = []
    for micro in micros:
        # Only in the last backward pass does DDP exchange gradients.
        with contextlib.nullcontext() if micro is micros[-1] else accelerator.no_sync(run.policy):
            logp = training_forward(run, micro)
            old_logp = logp.detach() if micro.old_logp is None else micro.old_logp
            loss, clipped = policy_loss(run, micro, logp, old_logp)
            # The loss is to be summed over processes, but DDP averages their gradients.
            (loss * accelerator.num_processes).backward()
        total_loss += loss.detach()
        log_ratio = (logp - old_logp).detach()
        to_average.append(  # name: (values, mask of those that count)
            {
                "approx_kl": (log_ratio.exp() - 1 - log_ratio, micro.loss_mask),
                "clip_fraction": (clipped, micro.loss_mask),
                "clip_fraction_sequence": (clipped.any(1), micro.loss_mask.any(1)),
                "sampling_gap": ((old_logp - micro.sampled_logp).abs(), micro.loss_mask),
            }
        )
    total_loss = accelerator.reduce(total_loss, "sum").item()
    grad_norm = accelerator.clip_grad_norm_(
        run.policy.parameters(), run.args.max_grad_norm or math.inf
    ).item()
    # `means` leaves out a metric without tokens, as when none is trained on. Log a 0 then.
    figures = dict.fromkeys(to_average[0], 0.0) | means(accelerator, to_average)

    # Step, unless that would put NaN into the weights. No exchange between processes may follow: if
    # it failed, the weights would be one step ahead of `run.step`.
    learning_rate = run.args.learning_rate * run.share_of_peak_rate(run.step + 1)
    run.optimizer.param_groups[0]["lr"] = learning_rate
    is_finite = math.isfinite(total_loss + grad_norm)
    if is_finite and (grad_norm > 0 or not run.args.skip_zero_gradient):
        run.optimizer.step()
    run.optimizer.zero_grad()
    return figures | {
        "loss": total_loss,
        "grad_norm": grad_norm,
        "clipped_gradient": float(0 < run.args.max_grad_norm < grad_norm),
        "learning_rate": learning_rate,
        "skipped_update": float(not is_finite),
        "peak_memory_gb": peak_memory(accelerator.device),
    }


def training_forward(run: Run, micro: Batch) -> Tensor:
    """Returns log-probs [B, T] in training mode.

    Dropout is seeded by the rollout and the first row, so that old and new log-probs drop the same
    units.
    """
    torch.manual_seed(key_seed(run.args.seed, "dropout", run.rollout_number, int(micro.rows[0])))
    run.policy.train()
    return run.policy(micro)[0]


def policy_loss(run: Run, micro: Batch, logp: Tensor, old_logp: Tensor) -> tuple[Tensor, Tensor]:
    """Returns PPO's clipped loss (arXiv 1707.06347), and which tokens [B, T] were clipped.

    The log-probs are [B, T], 0 on padding, and only `logp` carries gradients. Divisors count the
    whole update (dapo: the rollout's average update) on all processes, with completions that
    `micro_batches` left out. So the losses of micro-batches add up to the update's.
    """
    args = run.args
    log_ratio, token_advantages = surrogate_terms(args, micro, logp - old_logp)
    ratio = log_ratio.exp()
    epsilon_high = args.epsilon if args.epsilon_high is None else args.epsilon_high
    low, high = micro.bounds or (1 - args.epsilon, 1 + epsilon_high)
    loss = -torch.min(ratio * token_advantages, ratio.clamp(low, high) * token_advantages)
    if args.beta > 0:
        reference_log_ratio = micro.reference_logp - logp
        kl = reference_log_ratio.exp() - reference_log_ratio - 1  # k3, joschu.net/blog/kl-approx
        if args.use_bias_correction_kl:  # the gradient of the reverse KL, arXiv 2512.02556
            kl = kl * (logp - old_logp).exp()  # not `ratio`, which a method may have replaced
        loss = loss + args.beta * kl
    clipped = micro.loss_mask & (
        ((ratio > high) & (token_advantages > 0)) | ((ratio < low) & (token_advantages < 0))
    )

    divisors = {
        "grpo": run.update_size * micro.loss_mask.sum(1, keepdim=True).clamp(min=1),  # [B, 1]
        "dapo": max(micro.tokens_per_update, 1.0),
        "dr_grpo": run.update_size * args.max_completion_length,
    }
    scale = micro.loss_mask / divisors[args.loss_type]
    return (loss * scale).sum(), clipped


def evaluate(run: Run) -> None:
    """Answers the held-out problems, and logs how many answers are right and their rewards.

    All evaluations use the same random numbers.
    """
    # The grader always judges. As in run.reward_funcs, None stands for it. No function can have its
    # name, because of the space.
    grader: dict[str, Any] = {"the grader": None}
    judges = grader | {name: function for name, function in run.reward_funcs.items() if function}
    verdicts: list[Any] = []  # of each answer: kind, index of the problem, truncated, and rewards
    for kind, samples in {"greedy": 1, "sampled": run.args.num_generations_eval}.items():
        all_rows = torch.arange(len(run.held_out) * samples).view(-1, samples)
        rows = all_rows[run.accelerator.process_index :: run.accelerator.num_processes].flatten()
        if len(rows) == 0:  # there are more processes than problems
            continue
        numbers = (rows // samples).tolist()
        batch = sample(
            run,
            rows,
            [run.held_out[n] for n in numbers],
            row_draws(run.args.seed, "eval", 0, rows, run.args.max_completion_length, samples),
            batch_size=run.args.per_device_eval_batch_size,
            reward_funcs=grader if kind == "greedy" else judges,
            logged={},
            is_greedy=kind == "greedy",
        )
        run.log.write_completions(run.step, kind, batch, judges)
        verdicts += zip(
            [kind] * len(rows),
            numbers,
            batch.truncated.tolist(),
            batch.function_rewards.tolist(),
            strict=True,
        )
    with run.deferred_signals():  # not after a signal that a reward function has swallowed
        run.log.write(
            {"step": run.step, "eval": eval_metrics(list(judges), gather_object(verdicts))}
        )


# ---- Log-probabilities without ever building [B, T, V] -------------------------------------------
class LogProbs(nn.Module):
    """Computes the policy's log-probs. A module, because DDP must wrap the training forward."""

    def __init__(self, model: PeftModel, temperature: float):
        super().__init__()
        self.model = model
        self.temperature = temperature

    def forward(self, micro: Batch, needs_logp: bool = True) -> tuple[Any, Tensor]:
        """Returns log-probs [B, T] at the sampling temperature, and hidden states [B, T, H].

        Log-probs are 0 on padding. The hidden states are after the final norm, at the positions
        that predict the tokens. Where log-probs are not needed, they are None: the head is a
        large part of a small model.
        """
        causal_lm = self.model.get_base_model()  # with the adapter in its layers
        targets = micro.ids[:, micro.prompt_width :]  # [B, T]

        # The last prompt token predicts the first completion token. The P - 1 tokens before it
        # predict none. They may come from a cache, in which equal prompts are computed once. The
        # last token of a completion predicts nothing, and is not read.
        cached = micro.prompt_width - 1
        cache = prompt_cache(self.model, micro.ids[:, :cached], micro.attention[:, :cached])
        start = 0 if cache is None else cached
        hidden = hidden_states(  # [B, T, H]
            causal_lm, micro.ids[:, start:-1], micro.attention[:, :-1], cache
        )[:, -targets.shape[1] :]
        if not needs_logp:
            return None, hidden

        # Compute logits in chunks, and recompute them in the backward pass instead of keeping them.
        size = max(1, LOGITS_PER_CHUNK // len(causal_lm.get_output_embeddings().weight))
        chunks = zip(hidden.flatten(0, 1).split(size), targets.flatten().split(size), strict=True)
        losses = [
            torch.utils.checkpoint.checkpoint(self.cross_entropy, *chunk, use_reentrant=False)
            for chunk in chunks
        ]
        return torch.where(micro.mask, -torch.cat(losses).view(targets.shape), 0.0), hidden

    def cross_entropy(self, hidden: Tensor, targets: Tensor) -> Tensor:  # [n, H], [n] -> [n]
        logits = head_logits(self.model.get_base_model(), hidden)  # [n, V]
        return F.cross_entropy(logits / self.temperature, targets, reduction="none")


def prompt_cache(
    model: PeftModel, ids: Tensor, attention: Tensor
) -> transformers.DynamicCache | None:
    """Returns a cache that holds prompts [B, P], or None where a cache cannot be used.

    Gradients flow through the cache. Checkpointed layers accept no cache, and linear attention
    keeps a running state instead of keys and values.
    """
    if (
        ids.shape[1] == 0
        # A cache takes a forward pass of its own. Launching that costs a GPU more than it saves.
        or (CUDA and ids.numel() < FEWEST_CACHED_TOKENS)
        or any(transformers.DynamicCache(config=model.config).is_linear)
        or any(
            layer.training and getattr(layer, "gradient_checkpointing", False)
            for layer in model.modules()
        )
    ):
        return None
    cache = transformers.DynamicCache()  # without a config, every layer keeps all positions
    read_prompts(model.get_base_model(), torch.where(attention, ids, -1), cache)
    return cache


def read_prompts(causal_lm: transformers.PreTrainedModel, prompt_ids: Tensor, cache: Any) -> Tensor:
    """Puts prompts [B, P], in which -1 is no token, into a cache. Returns hidden states [B, P, H].

    Each distinct prompt is read once, and what it leaves in the cache is copied to all its rows.
    """
    unique_prompts, copy_of = prompt_ids.unique(dim=0, return_inverse=True)  # [U, P], [B]
    hidden = hidden_states(causal_lm, unique_prompts.clamp(min=0), unique_prompts >= 0, cache)
    cache.reorder_cache(copy_of)
    return hidden[copy_of]


def hidden_states(
    causal_lm: transformers.PreTrainedModel, inputs: Tensor, attention: Tensor, cache: Any = None
) -> Tensor:
    """Returns hidden states [B, N, H] after the final norm, for ids [B, N] or embeddings [B, N, H].

    `attention` [B, C + N] bool begins with C cached columns. In `decode` it ends with columns that
    are not sampled yet.
    """
    are_embeddings = inputs.is_floating_point()
    # Columns not sampled yet add nothing, so the last column has the newest token's position.
    positions = (attention.cumsum(1) - 1).clamp(min=0)
    return causal_lm.base_model(  # all but the head
        input_ids=None if are_embeddings else inputs,
        inputs_embeds=inputs if are_embeddings else None,
        attention_mask=attention.long(),
        position_ids=positions[:, -inputs.shape[1] :],
        past_key_values=cache,
        use_cache=cache is not None,
    ).last_hidden_state


def head_logits(causal_lm: transformers.PreTrainedModel, hidden: Tensor) -> Tensor:
    """Returns logits [..., V] for last hidden states [..., H], scaled as each model family does."""
    logits = causal_lm.get_output_embeddings()(hidden).float()
    config = causal_lm.config.get_text_config()
    factor = (getattr(config, "logit_scale", None) or 1.0) / (  # Cohere
        getattr(config, "logits_scaling", None) or 1.0  # Granite
    )
    cap = getattr(config, "final_logit_softcapping", None)  # Gemma
    if factor != 1:
        logits = logits * factor
    return cap * torch.tanh(logits / cap) if cap else logits


@contextlib.contextmanager
def in_fp32(run: Run) -> Iterator[nn.Module]:
    """Yields the policy as a module that computes in fp32, whatever --dtype is.

    Its weights are exactly those of the training forward: NF4 weights become numbers of --dtype
    first, and fp32 holds every bf16 number.
    """
    # Checkpointed, so that the backward pass of grpo_oar.py computes dense weights again and keeps
    # none of them.
    forwards: dict[nn.Module, Callable] = {
        layer: functools.partial(
            torch.utils.checkpoint.checkpoint, nf4_in_fp32, layer, use_reentrant=False
        )
        for layer in run.model.modules()
        if hasattr(layer, "compute_dtype")  # NF4
    }
    bf16_parameters = [p for p in run.model.parameters() if p.dtype == torch.bfloat16]
    try:
        run.model.float()  # NF4 weights are integers, and stay
        with replaced(forwards):
            yield LogProbs(run.model, run.args.temperature)  # run.policy would autocast to bf16
    finally:
        for parameter in bf16_parameters:
            parameter.data = parameter.data.bfloat16()


def nf4_in_fp32(layer: Any, x: Tensor) -> Tensor:
    """Returns what an NF4 layer computes from x, its weights rounded to --dtype first."""
    rounded = dequantize_bnb_weight(layer.weight).to(layer.compute_dtype)
    return F.linear(x, rounded.float(), layer.bias)


# ---- Rollout: our own decode loop over a static KV cache -----------------------------------------
def key_seed(*key: object) -> int:
    """Returns a seed that depends only on `key`, so that a checkpoint need not save generators."""
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1  # a positive int64


def row_draws(
    seed: int, purpose: str, rollout: int, rows: Tensor, length: int, group_size: int
) -> Tensor:
    """Returns random numbers [B, length] in [0, 1) from the seed, purpose, rollout and row alone.

    A row is prompt * group_size + sample. A larger group begins with the samples of a smaller one.
    """
    row_seeds = [
        key_seed(seed, purpose, rollout, *divmod(row, group_size)) for row in rows.tolist()
    ]
    streams = [torch.Generator().manual_seed(row_seed) for row_seed in row_seeds]
    return torch.stack([torch.rand(length, generator=stream) for stream in streams]).to(rows.device)


def credit_draws(run: Run, micro: Batch) -> Tensor:
    """Returns random numbers [B, T] in [0, 1) for a control. A resumed run draws the same."""
    return row_draws(
        run.args.seed,
        "credit",
        run.rollout_number,
        micro.rows,
        micro.mask.shape[1],
        run.args.num_generations,
    )


def sample_tokens(
    logits: Tensor, draws: Tensor, temperature: float = 1.0, top_p: float = 1.0
) -> tuple[Tensor, Tensor, Tensor]:
    """Samples a token for each row of logits [B, V] by inverse CDF, from its draw [B] in [0, 1).

    Returns tokens, log-probs and entropies, all [B]. The last two are of the distribution that is
    trained: the one before top_p. A temperature of 0 takes the likeliest token, with the log-prob
    and entropy at temperature 1.
    """
    # [B, V], finite: 0 * inf would be NaN below.
    logp = (logits.float() / (temperature or 1.0)).clamp_(min=-1e6).log_softmax(-1)
    entropy = -(logp.exp() * logp).sum(-1)
    if temperature == 0:
        return logp.argmax(-1), logp.amax(-1), entropy

    # What top_p leaves has a total mass below 1.
    kept_logp = logp if top_p == 1 else transformers.TopPLogitsWarper(top_p)(None, logp)

    # Pick the first token whose cumulative probability exceeds draw * total. As draw < 1, that is
    # never a token of probability 0. The sums are in fp64, because in fp32 the last of many tokens
    # would add nothing. With NaN logits, the clamp picks the last token.
    cdf = kept_logp.exp().cumsum(-1, dtype=torch.float64)
    token = torch.searchsorted(cdf, draws[:, None] * cdf[:, -1:], right=True).clamp(
        max=logits.shape[1] - 1
    )  # [B, 1]
    return token.squeeze(1), logp.gather(1, token).squeeze(1), entropy


def decode(run: Run, prompt_ids: Tensor, draws: Tensor, is_greedy: bool) -> tuple:
    """Samples until every completion has a stop token or T tokens, from prompts [B, P].

    Returns the tokens of completions, where -1 is none, their log-probs and entropies, all [B, T].
    This is our own loop because `generate` does not compile NF4 layers and returns no entropies.
    """
    causal_lm = run.model.get_base_model()
    prompt_ids = prompt_ids[:, (prompt_ids >= 0).any(0)]  # without columns that are only padding
    width = prompt_ids.shape[1]  # P
    # All of these have the same columns, [B, P + T]: those of the prompts, and then T more.
    ids = F.pad(prompt_ids, (0, draws.shape[1]), value=-1)
    draws = F.pad(draws, (width, 0))
    logp = torch.zeros_like(draws)
    entropy = torch.zeros_like(draws)
    column = torch.tensor([width], device=ids.device)  # [1] of the next token
    places = torch.arange(len(ids), device=ids.device)  # [n] of completions that have not ended
    cache = transformers.StaticCache(config=causal_lm.config, max_cache_len=width)
    # A sliding-window layer counts its position on the host, where a CUDA graph cannot update it.
    cache.layers = [
        StaticLayer(width) if is_sliding else layer
        for layer, is_sliding in zip(cache.layers, cache.is_sliding, strict=True)
    ]
    hidden = read_prompts(causal_lm, prompt_ids, cache)[:, -1].clone()  # [B, H] of newest tokens

    def step(places: Tensor, end: int) -> None:
        """Samples the next tokens of the completions `places`, and updates their hidden states.

        The cache has room for columns up to `end`. All tensors, even `column`, change in place, so
        that a recorded step can be replayed.
        """
        at = (places, column)
        ids[at], logp[at], entropy[at] = sample_tokens(
            head_logits(causal_lm, hidden[places]),
            draws[at],
            0.0 if is_greedy else run.args.temperature,
            run.args.top_p,
        )
        hidden[places] = hidden_states(
            causal_lm, ids[places, column, None], ids[places, :end] >= 0, cache
        )[:, -1]
        column.add_(1)

    for t in range(ids.shape[1] - width):  # tokens of each completion so far
        if t % SEGMENT == 0 or t % CHECK == 0:
            has_ended = torch.isin(ids[places, width:], run.eos_ids).any(1)  # [n]
            if has_ended.all():
                break
        if t % SEGMENT == 0:
            # Drop the completions that have ended, and make room for a segment of the others.
            places = places[~has_ended]
            cache.reorder_cache((~has_ended).nonzero().squeeze(1))
            end = min(width + t + SEGMENT, ids.shape[1])
            for layer in cache.layers:
                if isinstance(layer, StaticLayer):  # linear attention has a state of fixed size
                    layer.keys = F.pad(layer.keys, (0, 0, 0, end - layer.max_cache_len))
                    layer.values = F.pad(layer.values, (0, 0, 0, end - layer.max_cache_len))
                    layer.max_cache_len = end
            # All steps of a segment use the same tensors, and the host reads none of them. So a GPU
            # can replay one that was recorded. The first one of a segment only warms up.
            advance: Callable = functools.partial(step, places, end)
        elif t % SEGMENT == 1 and CUDA and run.args.cuda_graphs:
            graph = torch.cuda.CUDAGraph()
            # Recording computes nothing, only the replay does. thread_local, because NCCL's own
            # thread may use the GPU meanwhile.
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                advance()
            advance = graph.replay
        advance()
    return ids[:, width:], logp[:, width:], entropy[:, width:]


@torch.no_grad()
def sample(
    run: Run,
    rows: Tensor,
    problems: list[Problem],
    draws: Tensor,
    batch_size: int,
    reward_funcs: dict[str, Any],
    logged: dict[str, list[float]],
    is_greedy: bool = False,
) -> Batch:
    """Samples a completion of up to T tokens for each problem, and grades it.

    The samples follow from the draws [B, T], random numbers in [0, 1). What the reward functions
    give and log is appended to `logged`.

    `batch_size` completions are sampled at a time; 0: all. Each depends on its own row of the
    draws, so splitting changes no sample. Every batch has room for the run's longest prompt and T
    tokens, so that `put` can move completions between batches. A mask ends with the first stop
    token. It is never read from the pad token, which may be a stop token, too.
    """
    run.policy.eval()
    device = run.accelerator.device
    width = max(run.prompt_width, *(len(problem.prompt_ids) for problem in problems))  # P
    padded = [[-1] * (width - len(p.prompt_ids)) + [*p.prompt_ids] for p in problems]
    prompts = torch.tensor(padded, device=device)  # [B, P]
    size = batch_size or len(rows)
    parts = zip(prompts.split(size), draws.to(device).split(size), strict=True)
    in_dense = dense(run.model) if run.args.rollout_weights == "dense" else contextlib.nullcontext()
    with in_dense, run.accelerator.autocast():
        decoded = [decode(run, *part, is_greedy) for part in parts]
    tokens, logp, entropy = (torch.cat(tensors) for tensors in zip(*decoded, strict=True))

    # A completion ends with its first stop token. Everything after that is padding.
    is_stop = torch.isin(tokens, run.eos_ids).int()  # [B, T]
    mask = is_stop.cumsum(1) - is_stop == 0  # no stop token before this one
    attention = torch.cat((prompts >= 0, mask), 1)  # [B, P + T]
    completion_ids = [row[is_token].tolist() for row, is_token in zip(tokens, mask, strict=True)]
    texts = [
        reply_text(run.tokenizer, problem, own_ids, run.eos_ids.tolist())
        for problem, own_ids in zip(problems, completion_ids, strict=True)
    ]
    return Batch(
        rows=rows.to(device),
        prompt_width=width,
        ids=torch.where(attention, torch.cat((prompts, tokens), 1), run.tokenizer.pad_token_id),
        attention=attention,
        truncated=~is_stop.any(1),
        sampled_logp=torch.where(mask, logp, 0.0),
        entropy=torch.where(mask, entropy, 0.0),
        problems=problems,
        texts=texts,
        completion_ids=completion_ids,
        function_rewards=reward_values(reward_funcs, problems, texts, completion_ids, logged).to(
            device
        ),
    )


@contextlib.contextmanager
def dense(model: PeftModel) -> Iterator[None]:
    """Makes NF4 layers, with their adapters, use dense weights within the `with` block.

    The adapter is not merged: in bf16 weights, the small changes of a new adapter would be lost.
    """
    layers = [layer for layer in model.modules() if hasattr(layer, "compute_dtype")]  # NF4
    adapted = {  # PEFT's layers by those that they wrap
        layer.base_layer: layer for layer in model.modules() if hasattr(layer, "base_layer")
    }
    forwards: dict[nn.Module, Callable] = {}
    for layer in layers:
        weight = dequantize_bnb_weight(layer.weight).to(layer.compute_dtype)
        wrapper = adapted.get(layer)
        if wrapper is None:
            forwards[layer] = functools.partial(F.linear, weight=weight, bias=layer.bias)
        else:
            stacked = torch.cat((weight, wrapper.lora_A["default"].weight.to(weight)))
            scaled_B = wrapper.lora_B["default"].weight.T * wrapper.scaling["default"]
            bias = None if layer.bias is None else F.pad(layer.bias, (0, len(scaled_B)))
            forwards[wrapper] = functools.partial(
                stacked_forward, stacked, bias, scaled_B.to(weight)
            )
    with replaced(forwards):
        yield


def stacked_forward(stacked: Tensor, bias: Tensor | None, scaled_B: Tensor, x: Tensor) -> Tensor:
    """Returns what `adapted_forward` does, in two operations: decoding calls it for each token.

    The first product is of x with the base's weight and A, `stacked` [outputs + r, inputs]. The
    second, with B, is added in place.
    """
    both = F.linear(x, stacked, bias).flatten(0, -2)
    result = both[:, : -len(scaled_B)]
    result.addmm_(both[:, -len(scaled_B) :], scaled_B)
    return result.view(*x.shape[:-1], -1)


@contextlib.contextmanager
def replaced(forwards: dict[nn.Module, Callable]) -> Iterator[None]:
    """Lets layers compute by other functions within the `with` block."""
    former = {layer: layer.forward for layer in forwards}
    try:
        for layer, forward in forwards.items():
            layer.forward = forward
        yield
    finally:
        for layer, forward in former.items():
            layer.forward = forward


# ---- Set-up: NF4 + LoRA --------------------------------------------------------------------------
class Run:
    """The objects that training uses, and its progress, which determines the data and samples."""

    log: RunLog  # set once the folder is this run's

    def __init__(self, args: Args):
        self.args = args
        # The problems, and the reward functions.
        self.tokenizer, self.train_set, self.held_out = load_data(
            args, needs_answers=ACCURACY in args.reward_funcs
        )
        self.prompt_width = max(len(p.prompt_ids) for p in self.train_set + self.held_out)
        self.reward_funcs, self.reward_weights, modules = load_reward_funcs(
            args.reward_funcs, args.reward_weights
        )
        # For logs. The digests are taken now, because files may change while the model loads.
        self.config = asdict(args) | code_digests(modules | {"the script": sys.modules[__name__]})

        # The processes, and how many completions and updates they make.
        self.accelerator = Accelerator(
            project_dir=args.output_dir,
            mixed_precision="bf16" if args.dtype == "bfloat16" else "no",
            cpu=not CUDA,  # otherwise processes on CPUs do not find each other
            log_with=None if args.report_to == "none" else args.report_to,
            dynamo_backend="no",  # compiled layers would not compute what the sampling ones do
            # A start adapter may have layers that no text reaches, as of a vision tower. DDP would
            # wait for their gradients, and exchange none of the others.
            kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=True)],
        )
        if self.accelerator.distributed_type not in ("NO", "MULTI_GPU", "MULTI_CPU"):
            fail(f"launch it on one device or with DDP, not {self.accelerator.distributed_type}")
        self.updates_per_pass = args.steps_per_generation // args.gradient_accumulation_steps
        self.updates_per_rollout = args.num_iterations * self.updates_per_pass
        # In completions, over all processes:
        self.update_size = (
            args.per_device_train_batch_size
            * args.gradient_accumulation_steps
            * self.accelerator.num_processes
        )
        self.rollout_size = self.update_size * self.updates_per_pass
        # No group is split between processes. With several processes, each needs whole groups in
        # every update. One process needs them in the rollout, so two updates may share a group.
        grouped_size = (
            self.rollout_size
            if self.accelerator.num_processes == 1
            else self.update_size // self.accelerator.num_processes
        )
        if (
            args.steps_per_generation % args.gradient_accumulation_steps > 0
            or grouped_size % args.num_generations > 0
        ):
            fail(
                f"--num_generations must divide a process's {grouped_size} completions, and "
                "--gradient_accumulation_steps the --steps_per_generation"
            )

        # The policy, its optimizer and its schedule.
        self.model = load_policy(args, self.accelerator.device)  # disable its adapter for the base
        stops = (  # a model may name only one of these, and end its turn with another
            self.model.generation_config.eos_token_id,
            self.tokenizer.eos_token_id,
            closing_token(self.tokenizer, json.loads(args.chat_template_kwargs)),
        )
        self.eos_ids = (  # ascending
            torch.cat([torch.tensor(stop).flatten() for stop in stops if stop is not None])
            .unique()
            .to(self.accelerator.device)
        )
        optimizer = torch.optim.AdamW(
            [p for p in self.model.parameters() if p.requires_grad],
            lr=args.learning_rate,
            weight_decay=0.0,
        )
        # A function, which is all that is kept of the scheduler: it returns the share of the peak
        # rate for an update (1, 2, ...). By the + 1, the rate is not yet 0 in the last update.
        (self.share_of_peak_rate,) = transformers.get_scheduler(
            args.lr_scheduler_type, optimizer, args.warmup_steps, max(1, args.max_steps) + 1
        ).lr_lambdas
        self.policy, self.optimizer = self.accelerator.prepare(  # in DDP, if there are several
            LogProbs(self.model, args.temperature), optimizer
        )
        # The adapter's live tensors, for checkpoints. Collected after `prepare`, which may move
        # them (from cpu to cpu:0), and not when a checkpoint is saved: a signal may come while PEFT
        # has the adapter disabled, and requires_grad is False then.
        self.adapter = {
            name: p.data for name, p in self.model.named_parameters() if p.requires_grad
        }
        # The policy before training. --beta weighs the KL divergence to it.
        self.start_weights = {
            name: p.detach().clone()
            for name, p in self.policy.named_parameters()
            if p.requires_grad
        }

        # What identifies the run, and its progress.
        self.config["adapter_size"] = describe_adapter(self.model)
        self.run_id = os.urandom(4).hex()  # by which a tracker knows it again
        self.identity = identity_of(self)
        self.step = 0  # updates so far
        self.page_examples: list[dict] = []  # groups of completions that credit.html shows
        self.defers_signals = False  # while the policy is updated, or a checkpoint saved at the end
        self.is_interrupted = False  # a signal has come

    @property
    def rollout_number(self) -> int:
        """The number of the rollout that the next update is on."""
        return self.step // self.updates_per_rollout

    def is_due(self, interval: int, former_step: int) -> bool:
        """Returns whether a multiple of `interval` came after `former_step`, or training is over.

        With an interval of 0 nothing is ever due.
        """
        return interval > 0 and (
            self.step >= self.args.max_steps or self.step // interval > former_step // interval
        )

    def interrupt(self, number: int, frame: object) -> None:
        """Ends the run because of a signal, at once or after the block that defers it."""
        self.is_interrupted = True
        if not self.defers_signals:
            raise KeyboardInterrupt

    @contextlib.contextmanager
    def deferred_signals(self) -> Iterator[None]:
        """Lets a `with` block come to its end before a signal ends the run.

        An error ends the block at once, and signals stay deferred while the run is saved.
        """
        if self.is_interrupted:  # a reward function has swallowed the KeyboardInterrupt
            raise KeyboardInterrupt
        self.defers_signals = True
        yield
        self.defers_signals = False
        if self.is_interrupted:
            raise KeyboardInterrupt


def load_policy(args: Args, device: torch.device) -> PeftModel:
    """Returns the base model in NF4, with a new adapter or the one that the run starts from."""
    torch.backends.cuda.enable_cudnn_sdp(False)  # may give NaN gradients (pytorch#196678)
    torch.set_float32_matmul_precision("highest")  # NVIDIA's NGC images turn on TF32
    config = transformers.AutoConfig.from_pretrained(
        args.model_name_or_path, revision=args.model_revision
    )
    text_config = config.get_text_config()
    text_config.update(  # rollouts have no dropout; --lora_dropout stays
        {
            name: 0.0
            for name, value in vars(text_config).items()
            if "drop" in name and isinstance(value, float)
        }
    )
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # with more, the scales of NF4 blocks round otherwise
    base, loading = transformers.AutoModelForCausalLM.from_pretrained(
        args.model_name_or_path,
        config=config,
        revision=args.model_revision,
        quantization_config=transformers.BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=args.dtype,
        )
        if args.load_in_4bit
        else None,
        dtype=args.dtype,
        device_map={"": device},
        output_loading_info=True,
    )
    torch.set_num_threads(threads)
    check_base(base, loading, args.dtype if args.load_in_4bit else None)

    torch.manual_seed(args.seed)  # so that every process has the same adapter
    if args.start_adapter is None:
        adaptable = {*base.get_decoder().modules(), base.get_output_embeddings()}
        others = [  # a vision tower would get no gradient
            name
            for name, layer in base.named_modules()
            if isinstance(layer, nn.Linear) and layer not in adaptable
        ]
        model = get_peft_model(
            base,
            LoraConfig(
                task_type="CAUSAL_LM",
                target_modules=(  # PEFT knows "all-linear" only outside a list
                    "all-linear"
                    if args.lora_target_modules == ["all-linear"]
                    else args.lora_target_modules
                ),
                r=args.lora_r,
                lora_alpha=args.lora_alpha,
                lora_dropout=args.lora_dropout,
                exclude_modules=others or None,
            ),
            revision=args.model_revision,
        )
    else:
        model = PeftModel.from_pretrained(base, args.start_adapter, is_trainable=True)
    check_adapter(model, args.lora_target_modules, args.start_adapter)

    # A GPU spends more time on launching small operations than on computing them. So adapted layers
    # and RMSNorms get functions with fewer. Their classes stay, which other models may use.
    for layer in model.modules():
        if hasattr(layer, "support_avx512bf16_for_cpu"):
            layer.support_avx512bf16_for_cpu = False  # it repacks weights, so gradients are wrong
        if isinstance(getattr(layer, "base_layer", None), nn.Linear):
            layer.forward = functools.partial(adapted_forward, layer)
        if type(layer).__name__.endswith("RMSNorm") and hasattr(layer, "variance_epsilon"):
            # A family may scale by 1 + weight, say. Small inputs show where the epsilon is.
            exact = copy.deepcopy(layer).float()
            x = 0.001 * torch.randn(2, len(layer.weight), device=device)
            if torch.allclose(fused_norm(exact, x), exact(x)):
                layer.forward = functools.partial(fused_norm, layer)
    if args.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def adapted_forward(layer: Any, x: Tensor) -> Tensor:
    """Returns what PEFT's layer computes, in fewer operations.

    It rounds where `stacked_forward` does. Otherwise, in bf16, the policy that samples would not be
    the one that is trained.
    """
    result = layer.base_layer(x)
    if layer.disable_adapters:
        return result
    low_rank = layer.lora_A["default"](layer.lora_dropout["default"](x))
    return torch.addmm(
        result.flatten(0, -2),
        low_rank.flatten(0, -2),
        layer.lora_B["default"].weight.T,
        alpha=layer.scaling["default"],
    ).view_as(result)


@torch.autocast("cuda", enabled=False)  # it would make fp32 of the result
def fused_norm(layer: Any, x: Tensor) -> Tensor:
    """Returns what an RMSNorm layer computes: on a GPU one operation instead of eight."""
    return F.rms_norm(x, layer.weight.shape, layer.weight, layer.variance_epsilon)


def identity_of(run: Run) -> str:
    """Returns a digest of what must not change when a run is resumed.

    That is the base by the bytes of its weights, its config and its stop tokens, the adapter's
    layers and scales, the weights of a start adapter, the precision, the problems, and how rollouts
    are divided.
    """
    weights = {}
    for name, p in run.model.state_dict(keep_vars=True).items():  # with the scales of NF4 blocks
        is_new = p.requires_grad and run.args.start_adapter is None
        data = b"" if is_new else p.detach().flatten().view(torch.uint8).cpu().numpy()
        weights[name] = (p.shape, hashlib.blake2b(data).hexdigest())
    parts = (
        weights,
        run.model.config.to_diff_dict() | {"transformers_version": None},
        run.eos_ids.tolist(),
        [layer.scaling for layer in run.model.modules() if hasattr(layer, "scaling")],
        (run.args.dtype, run.args.load_in_4bit),
        (run.rollout_size, run.updates_per_rollout, run.args.num_generations),
        (run.train_set, run.held_out),
    )
    return hashlib.blake2b(repr(parts).encode(errors="replace")).hexdigest()


@torch.no_grad()
def check_model(run: Run) -> None:
    """Ends the run if our log-probs of a short completion differ from those of transformers' model.

    Mistakes in a reward function show here, too, before the first evaluation.
    """
    ids = run.train_set[0].prompt_ids
    problems = [run.train_set[0]] * run.args.num_generations  # a whole group, as in a rollout
    problems[0] = problems[0]._replace(prompt_ids=ids[len(ids) // 3 :])  # so that it is padded
    rows = torch.arange(len(problems))
    draws = row_draws(run.args.seed, "check", 0, rows, 8, len(rows))
    batch = sample(
        run, rows, problems, draws, batch_size=0, reward_funcs=run.reward_funcs, logged={}
    )

    # Recompute its log-probs in training mode, where some layers add noise. Dropout is off.
    run.policy.train()
    for module in run.model.modules():
        if isinstance(module, nn.Dropout):
            module.eval()
    ours = torch.stack((batch.sampled_logp[0], run.policy(batch)[0][0]))[:, batch.mask[0]]  # [2, n]
    run.policy.eval()
    tokens = batch.ids[0, batch.attention[0]]  # without padding
    # The layers' own functions, and not those that `load_policy` has given them.
    own_forwards: dict[nn.Module, Callable] = {
        layer: functools.partial(type(layer).forward, layer)
        for layer in run.model.modules()
        if "forward" in vars(layer)
    }
    with replaced(own_forwards), run.accelerator.autocast():
        logits = run.model.get_base_model()(tokens[None]).logits[0, -ours.shape[1] - 1 : -1]
    theirs = -F.cross_entropy(  # [n]
        logits.float() / run.args.temperature, tokens[-len(logits) :], reduction="none"
    )
    gap = (ours - theirs).abs().mean(1).max().item()
    if not gap < (1e-3 if run.args.dtype == "float32" else 0.1):  # true for NaN, too
        fail(
            f"{run.args.model_name_or_path} (start adapter: {run.args.start_adapter}) is not "
            f"supported: log-probs here are {gap:.2g} nats off transformers' own"
        )


# ---- Checkpoints: everything that training changes -----------------------------------------------
def checkpoints(output_dir: str) -> list[int]:
    """Returns the steps of a run's checkpoints, the newest last."""
    steps = [
        folder.name.removeprefix("checkpoint-") for folder in Path(output_dir).glob("checkpoint-*")
    ]
    return sorted(int(step) for step in steps if step.isdecimal())


def save_checkpoint(run: Run) -> None:
    """Saves <output_dir>/checkpoint-<step>, and deletes the oldest beyond --save_total_limit.

    The one with the best evaluation is kept and not counted. Only the main process saves, and no
    other waits for it. Unless training ends there, nothing is saved between two updates on a
    rollout: a resumed run would sample the rollout again, with a policy that has changed.
    """
    folder = Path(run.args.output_dir, f"checkpoint-{run.step}")
    is_midway = run.step % run.updates_per_rollout > 0 and run.step < run.args.max_steps
    if run.step == 0 or is_midway or folder.exists() or not run.accelerator.is_main_process:
        return
    unfinished = folder.with_name("unfinished-checkpoint")
    shutil.rmtree(unfinished, ignore_errors=True)
    run.model.save_pretrained(unfinished, state_dict=run.adapter)  # for users of PEFT
    torch.save(
        {
            "step": run.step,
            "run_id": run.run_id,
            "page_examples": run.page_examples,
            "adapter": run.adapter,
            "optimizer": run.optimizer.state_dict()["state"],
            "identity": run.identity,
            "config": run.config,
        },
        unfinished / "state.pt",
    )
    os.sync()  # everything must be on the disk before the rename
    unfinished.rename(folder)

    if run.args.save_total_limit is not None:
        others = [step for step in checkpoints(run.args.output_dir) if step != run.log.best_step]
        for step in others[: -run.args.save_total_limit]:
            old = folder.with_name(f"checkpoint-{step}")
            shutil.rmtree(old.rename(unfinished))  # half a folder must not look like a whole one


def resume(run: Run) -> None:
    """Restores the newest checkpoint in --output_dir, if --resume_from_checkpoint is given."""
    args = run.args
    folder = Path(args.output_dir)
    newest = max(checkpoints(args.output_dir), default=-1)
    # Two runs must not share a folder, and a finished run must not be trained again in part.
    has_begun = newest >= 0 or (folder / "metrics.jsonl").exists() or (folder / "adapter").exists()
    summary = folder / "summary.json"
    text = summary.read_text() if summary.exists() else ""  # "", too, if a disk was full
    last_step = json.loads(text)["steps"] if text else -1
    if newest < last_step or (has_begun and args.resume_from_checkpoint is None):
        fail(
            f"{args.output_dir} holds a run: change --output_dir, or go on from its newest "
            "checkpoint, if there is one, with --resume_from_checkpoint latest"
        )
    if newest < 0:
        return
    file = folder / f"checkpoint-{newest}/state.pt"
    # torch.load would not see a flipped bit.
    if not zipfile.is_zipfile(file) or zipfile.ZipFile(file).testzip() is not None:
        fail(
            f"{file.parent} is damaged: delete it"
            if file.exists()
            else f"{file.parent} has no state.pt, as if another program had made it: delete it, or "
            "change --output_dir"
        )
    state = torch.load(file, map_location="cpu", weights_only=True)
    if (
        state["identity"] != run.identity
        or state["adapter"].keys() != run.adapter.keys()
        or state["step"] > args.max_steps
        # A run to a smaller --max_steps may have ended within a rollout.
        or (state["step"] % run.updates_per_rollout > 0 and state["step"] < args.max_steps)
    ):
        fail(
            f"{file.parent} has another model, start adapter, --dtype, --load_in_4bit, scale or "
            "layers of the adapter, size of rollouts or groups, or problems, or is past "
            "--max_steps, or between two updates on a rollout: change --output_dir"
        )
    run.accelerator.print(
        f"step {state['step']}, going on with these flags changed:",
        {key: value for key, value in run.config.items() if state["config"].get(key) != value},
    )

    run.model.load_state_dict(state["adapter"], strict=False)
    # Restore the optimizer's moments, but keep the learning rate and weight decay of the flags.
    run.optimizer.load_state_dict(run.optimizer.state_dict() | {"state": state["optimizer"]})
    run.step = state["step"]
    run.run_id = state["run_id"]
    run.page_examples = state["page_examples"]


# ---- Command line --------------------------------------------------------------------------------
def parse_args(argv: list[str] | None = None) -> Args:
    """Parses the flags, and fills in those that depend on the model, the machine or others."""
    # Parse once to learn the model, and again with the defaults that suit it.
    parser = transformers.HfArgumentParser(
        Args, usage="%(prog)s [flags]; docs/trl.md has other flags of TRL", allow_abbrev=False
    )
    args = parser.parse_args(argv)
    file = Path(args.model_name_or_path, "config.json")
    is_embedded = file.exists() and "embedded_policy" in file.read_text(encoding="utf-8")
    adapter_values = adapter_flags(args.start_adapter)
    parser.set_defaults(**(EMBEDDED_DEFAULTS if is_embedded else {}) | adapter_values)
    args = Args(**vars(parser.parse_args(argv)))
    if not adapter_values.items() <= vars(args).items():
        fail(f"--start_adapter {args.start_adapter} has {adapter_values}: leave these flags out")
    if args.report_to != "none":
        __import__(args.report_to)  # Accelerate would leave out what it cannot import

    # A GPU such as a T4 says that it has bfloat16, and emulates it slowly.
    has_bf16 = CUDA and torch.cuda.is_bf16_supported(including_emulation=False)
    args.dtype = args.dtype or ("bfloat16" if has_bf16 else "float32")
    args.steps_per_generation = args.steps_per_generation or args.gradient_accumulation_steps
    if file.exists():  # the saved adapter names its base, and may be used from another folder
        # The folder, because config.json itself may be a link, as in the Hub's cache.
        args.model_name_or_path = str(file.parent.resolve())
    args.output_dir = args.output_dir or f"runs/{SCRIPT.stem}-{args.credit}-{args.seed}"
    return args


def run_to_the_end(args: Args) -> None:
    """Loads data and policy, trains, and leaves an adapter and a report, or a checkpoint."""
    run = Run(args)
    run.accelerator.print(
        f"{args.credit} on {args.model_name_or_path}: trains {run.config['adapter_size']}\n"
        f"{len(run.train_set)} problems, {len(run.held_out)} held out, into {args.output_dir}"
    )
    check_model(run)
    Path(args.output_dir).mkdir(parents=True, exist_ok=True)
    # The file is the lock. The mode "a" keeps what a former run wrote there.
    with (
        open(Path(args.output_dir, "config.json"), "a", encoding="utf-8") as lock,
        contextlib.ExitStack() as former_handlers,
    ):
        if run.accelerator.is_main_process:  # two runs must not write into one folder
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                fail(f"another run is writing into {args.output_dir}")
            except OSError:  # a file system without locks
                pass
        resume(run)
        # Folders may have other names on other machines.
        flags = str(run.config | {"output_dir": "", "model_name_or_path": ""})
        if len(set(gather_object([(run.identity, run.step, flags)]))) > 1:
            fail(
                "processes have different weights, problems, flags or reward functions, or resume "
                "at different steps: put --output_dir where all can read it"
            )
        run.log = RunLog(run.accelerator, run.config, run.run_id, run.step)
        # A process that a reward function forks has none of these: a SIGTERM must end it.
        os.register_at_fork(after_in_child=former_handlers.close)
        for number in (
            signal.SIGINT,
            signal.SIGTERM,
            signal.SIGHUP,
            signal.SIGUSR1,  # with the next, what Slurm sends before the time is up
            signal.SIGUSR2,
        ):
            # nohup ignores SIGHUP. None: the handler is not Python's.
            if signal.getsignal(number) not in (signal.SIG_IGN, None):
                # Only the main process heeds it. Once that has ended, the launcher ends the others.
                # They do not set SIG_IGN, because every program that they start would have it, too.
                former = signal.signal(
                    number,
                    run.interrupt if run.accelerator.is_main_process else lambda *_: None,
                )
                former_handlers.callback(signal.signal, number, former)
        try:
            train(run)
            if run.accelerator.is_main_process:
                print(report_run(run))
            run.accelerator.wait_for_everyone()  # nobody may leave while another process writes
            run.accelerator.end_training()
        except BaseException:  # a signal, or an error of a reward function, a tracker or the memory
            run.defers_signals = True  # so that no other signal ends this
            save_checkpoint(run)
            raise
        finally:
            run.log.bar.close()


if __name__ == "__main__":
    if "ACCELERATE_MIXED_PRECISION" in os.environ and hasattr(ctypes.CDLL(None), "prctl"):
        # The variable shows that `accelerate launch` began this process. It passes no SIGTERM on,
        # so Linux is asked to send one when it has ended: 1 is PR_SET_PDEATHSIG.
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)
    transformers.logging.disable_progress_bar()
    warnings.filterwarnings("ignore", ".*gradient_checkpointing")  # PEFT causes it in transformers
    try:
        run_to_the_end(parse_args())
    except KeyboardInterrupt:
        sys.exit("interrupted: to go on, repeat the command with --resume_from_checkpoint latest")
