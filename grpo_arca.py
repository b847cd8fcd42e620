"""GRPO with ARCA token credit on a QLoRA policy, in one file.

    accelerate launch grpo_arca.py                        # embedded tiny policy and task, on a CPU
    accelerate launch grpo_arca.py --credit uniform       # plain GRPO, the baseline
    accelerate launch grpo_arca.py --model_name_or_path Qwen/Qwen3-1.7B ...   # as in README.md

GRPO (arXiv 2402.03300) samples a group of completions for each prompt. The advantage A_i of a
completion is its reward minus the group's mean, over the group's standard deviation, and each of
its T_i tokens receives the same advantage. ARCA (arXiv 2606.00257, authors' code
github.com/rodlaf/tokenweighting) measures how far the adapter has moved the policy at each token,
and splits the advantage in proportion to that:

    alpha_t = || h_adapted_t - h_base_t ||_2      h_t: after the final norm, in fp32; predicts y_t
    w_t     = (alpha_t + 1e-8)^p / sum_k (alpha_k + 1e-8)^p
    A_t     = A_i * T_i * w_t                     so the mean of A_t over a completion is A_i

The base is the model without an adapter. In a run that starts from an adapter, alpha therefore also
counts how far that adapter has moved. The power p (--sharpening) is 1 in the paper's equation and 2
in its table. The paper's loss is -mean_i A_i sum_t w_t log pi(y_t); the clipped ratio is ours, and
changes nothing where it is 1. --credit also offers the paper's baselines (surprisal,
entropy_reduction and divergence) and three signals of ours: probability, and the two controls
random and shuffled.

How to read this file: begin with the flags and with the method, which stands between the CREDIT
marks. Then comes the training loop, `train`, and its steps: `collect`, `score` and `update`. The
rest is machinery: sampling, the policy, set-up, checkpoints and the command line. Everything
outside the CREDIT marks is the same in every grpo_*.py script, but for this text.

Shapes in comments: B completions; P prompt tokens, padded on the left; T completion tokens, padded
on the right; V words in the vocabulary; H hidden units; G completions of one prompt, a group.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import fcntl
import hashlib
import importlib.util
import itertools
import json
import logging
import math
import os
import shutil
import signal
import sys
import traceback
import warnings
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn

LAUNCHER_HAS_ENDED = signal.SIGUSR1
PR_SET_PDEATHSIG = 1  # in Linux's prctl.h: ask for a signal at the parent's end
if __name__ == "__main__":  # before the imports below, which take seconds
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C while it loads ends it without a stack
    # When `accelerate launch` is killed, it does not tell this process. So ask the kernel for a
    # signal then: it ends this process while it loads, and later the run after its rollout. It is
    # not SIGINT, because the launcher also ends after one Ctrl-C, which is no second Ctrl-C.
    if "ACCELERATE_MIXED_PRECISION" in os.environ:  # which the launcher has set
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, LAUNCHER_HAS_ENDED)

SCRIPT = Path(__file__).resolve()
if not (SCRIPT.parent / "common").is_dir():
    sys.exit(f"copy common/ to {SCRIPT.parent}, too")

# On import bitsandbytes warns about an AVX512 kernel, which `load_policy` turns off anyway.
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)

import torch
import torch.nn.functional as F
import transformers
from accelerate import Accelerator
from accelerate.utils import GradientAccumulationPlugin, gather_object
from huggingface_hub import snapshot_download
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint
from tqdm import tqdm
from transformers.cache_utils import DynamicCache, StaticCache, StaticLayer
from transformers.generation import TopKLogitsWarper, TopPLogitsWarper
from transformers.utils import find_adapter_config_file

if TYPE_CHECKING:  # functions import PEFT where they use it: --help need not wait for it
    from peft import PeftModel

from common.credit_page import credit_group
from common.data import (
    DataError,
    Problem,
    ProblemSet,
    grade_batch,
    load_data,
    problem_at,
    reward_batch,
)
from common.messages import hints, introduction
from common.metrics import (
    credit_metrics,
    eval_metrics,
    peak_memory,
    rollout_metrics,
    stock_gap,
    timed,
)
from common.printable import printable
from common.report import report_run
from common.reward import Grader, RewardError, load_reward_funcs
from common.run_log import RunLog, best_step, is_evaluated, log_completions, start_log

CUDA = torch.cuda.is_available()
# A GPU below compute capability 8, such as a T4, says that it has bf16, and emulates it slowly.
HAS_BF16 = CUDA and torch.cuda.is_bf16_supported(including_emulation=False)

MAX_SKIPPED_UPDATES = 10  # in a row, before the run ends
STOP_CHECK_INTERVAL = 8  # tokens between checks for ended completions; a check waits for the GPU
SHRINK_AT = 0.75  # share of unfinished rows at which dropping the others is worth the copying
LOGITS_PER_CHUNK = 2**26  # 256 MiB in fp32
TINY_POLICY = str(SCRIPT.parent / "common/tiny_policy")


# ---- Flags: the names and meanings are TRL's, where TRL has the flag -----------------------------
@dataclass(frozen=True)
class NumberRange:
    """The numbers that a flag accepts. NaN and infinity are in no range."""

    above: float = -math.inf
    at_least: float = -math.inf
    below: float = 2.0**53  # beyond it not every integer is a float
    at_most: float = math.inf

    def __contains__(self, number: float) -> bool:
        return self.above < number < self.below and self.at_least <= number <= self.at_most

    def __str__(self) -> str:
        limits = {name: limit for name, limit in asdict(self).items() if abs(limit) < 2.0**53}
        words = [f"{name.replace('_', ' ')} {limit}" for name, limit in limits.items()]
        return f"({', '.join(words)})"


def flag(default: Any, help: str, **limits: float) -> Any:
    """Declares a flag: its default, its help text and, for a number, the limits of its range."""
    metadata: dict[str, Any] = {"help": help}  # arguments of argparse's add_argument
    if limits:
        metadata["metavar"] = NumberRange(**limits)  # which --help prints
    if isinstance(default, list):
        return field(default_factory=default.copy, metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass
class Args:
    """The flags. Their defaults suit an ordinary model; see also EMBEDDED_DEFAULTS below."""

    # model
    model_name_or_path: str = flag(
        TINY_POLICY, "Hub id or folder of a model, or of a LoRA adapter to start from"
    )
    model_revision: str = flag("main", "branch, tag or commit of a Hub model or adapter")
    load_in_4bit: bool = flag(True, "quantize the base to NF4 with double quantization")
    dtype: Literal["bfloat16", "float32"] | None = flag(
        None, "precision of all but NF4 weights; default: bfloat16 on a GPU that has it, or float32"
    )
    lora_r: int = flag(32, "rank of the adapter", at_least=1)
    lora_alpha: int = flag(32, "the adapter is scaled by lora_alpha / lora_r", at_least=1)
    lora_dropout: float = flag(0.0, "dropout before the adapter in training", at_least=0, below=1)
    lora_target_modules: list[str] = flag(["all-linear"], "linear layers that get an adapter")
    # data and reward
    dataset_name: str = flag("chain_arithmetic", "embedded, Hub id, or .jsonl/.json/.csv/.parquet")
    dataset_config: str | None = flag(None, "of a Hub data set; embedded: 2 to 8 operations")
    dataset_train_split: str = flag("train", "split to train on")
    dataset_test_split: str = flag("test", "split to evaluate on")
    eval_dataset_name: str | None = flag(None, "evaluate on this data set, not on the test split")
    prompt_column: str | None = flag(None, "column of the problem, if not problem|question|prompt")
    answer_column: str | None = flag(None, "column of the gold answer, if not answer|solution")
    system_prompt: str | None = flag(None, "system message before every problem")
    chat_template_kwargs: str = flag("{}", 'JSON for the template: {"enable_thinking": false}')
    reward_funcs: list[str] = flag(["accuracy_reward"], "this, or module.function of your own")
    reward_weights: list[float] | None = flag(None, "weight of each reward function; default 1")
    # rollout
    num_generations: int = flag(8, "completions per prompt: the group size G", at_least=2)
    max_completion_length: int = flag(512, "longest completion in tokens", at_least=1)
    temperature: float = flag(1.0, "sampling temperature, also of trained log-probs", above=0)
    top_p: float = flag(
        1.0, "sample from the smallest set of this mass; 1: off", above=0, at_most=1
    )
    top_k: int = flag(0, "sample from this many likeliest tokens; 0 is off", at_least=0)
    rollout_weights: Literal["dense", "quantized"] = flag("dense", "weights: a dense copy | NF4")
    per_device_rollout_batch_size: int = flag(
        0, "completions sampled at once, as the key-value cache must hold them; 0: all", at_least=0
    )
    # batch: prompts per rollout = batch size * steps_per_generation * processes / num_generations
    per_device_train_batch_size: int = flag(8, "completions in a micro-batch", at_least=1)
    gradient_accumulation_steps: int = flag(4, "micro-batches per update", at_least=1)
    steps_per_generation: int = flag(
        0, "micro-batches per rollout; 0: those of one update", at_least=0
    )
    num_iterations: int = flag(1, "times that each rollout is trained on (mu)", at_least=1)
    gradient_checkpointing: bool = flag(True, "recompute: less memory, but slower")
    torch_compile: bool = flag(False, "compile decoder layers: minutes of warm-up, then faster")
    # objective
    loss_type: Literal["grpo", "dapo", "dr_grpo"] = flag(
        "grpo", "divide by each completion's length | by the batch's tokens | by the longest length"
    )
    scale_rewards: Literal["group", "batch", "none"] = flag(
        "group", "divide advantages by the standard deviation of rewards in the group | batch"
    )
    negative_weight: float = flag(1.0, "scales advantages below 0; 0 ignores them", at_least=0)
    epsilon: float = flag(0.2, "the ratio is clipped below 1 - epsilon", above=0)
    epsilon_high: float | None = flag(None, "and above 1 + this; default: epsilon", at_least=0)
    beta: float = flag(0.0, "weight of the k3 KL to the policy before training", at_least=0)
    mask_truncated_completions: bool = flag(False, "leave unfinished completions out of the loss")
    # === CREDIT ===
    credit: Literal[
        "arca", "uniform", "surprisal", "probability", "entropy_reduction", "divergence",
        "random", "shuffled",
    ] = flag("arca", "what splits the advantage; uniform is GRPO, the last 2 controls")  # fmt: skip
    sharpening: float = flag(1.0, "power p of the scores before they are normalized", at_least=0)
    score_in_fp32: bool = flag(True, "else in --dtype: faster, but bf16 rounds a young adapter off")
    # === END CREDIT ===
    # optimizer
    learning_rate: float = flag(4e-5, "AdamW's peak rate; the README has its source", above=0)
    weight_decay: float = flag(0.0, "AdamW's weight decay", at_least=0)
    warmup_steps: int = flag(10, "updates of linear warm-up to the peak rate", at_least=0)
    lr_scheduler_type: Literal["cosine", "linear", "constant", "constant_with_warmup"] = flag(
        "cosine", "schedule after the warm-up (constant has no warm-up)"
    )
    max_grad_norm: float = flag(1.0, "clip gradients to this norm; 0 is off", at_least=0)
    skip_zero_gradient: bool = flag(
        False, "take no step where all groups have equal rewards; Adam's momentum would take one"
    )
    max_steps: int = flag(200, "updates; 0 only evaluates", at_least=0)
    seed: int = flag(1, "seed of adapter, data order and samples", at_least=0, below=2**32)
    # evaluation and output
    eval_steps: int = flag(25, "updates between evaluations; 0: first and last", at_least=0)
    max_eval_samples: int = flag(200, "held-out problems", at_least=1)
    num_generations_eval: int = flag(4, "samples per held-out problem", at_least=1)
    per_device_eval_batch_size: int = flag(
        32, "completions sampled at once, unless those of a rollout are fewer", at_least=1
    )
    output_dir: str = flag("", "default: runs/<script>-<credit>-<seed>")
    save_steps: int = flag(50, "updates between checkpoints; 0 is off", at_least=0)
    save_total_limit: int | None = flag(
        None, "keep this many checkpoints, and the best", at_least=1
    )
    resume_from_checkpoint: str | None = flag(None, "a checkpoint, or latest: the newest, if any")
    report_to: Literal["none", "tensorboard", "wandb", "trackio"] = flag("none", "tracker")
    run_name: str = flag("", "name in the tracker and in titles; default: output_dir's")
    # no flag: `parse_args` fills it in
    start_adapter: str | None = field(default=None, init=False)  # folder; None: a new adapter

    @property
    def updates_per_iteration(self) -> int:
        """The number of updates in one pass over a rollout."""
        return self.steps_per_generation // self.gradient_accumulation_steps

    @property
    def updates_per_rollout(self) -> int:
        """The number of updates in all passes over a rollout."""
        return self.num_iterations * self.updates_per_iteration


EMBEDDED_DEFAULTS = {  # used instead for the tiny policies in common/
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


# === CREDIT ===
import functools

from common.metrics import control_weights


def token_scores(run: Run, micro: Batch, metrics: dict) -> Tensor:
    """Returns how much each token matters [B, T], without gradients (arXiv 2606.00257, Methods).

    Sets `micro.base_logp` where the base is computed anyway.
    """
    credit = run.args.credit
    if credit == "uniform":
        return torch.ones_like(micro.entropy)
    if credit == "surprisal":
        return -micro.sampled_logp
    if credit == "probability":
        return micro.sampled_logp.exp()
    if credit == "entropy_reduction":
        # H_t - H_{t+1} where that is positive. The last token has no successor and scores 0.
        reduction = -micro.entropy.diff().clamp(max=0) * micro.mask[:, 1:]  # [B, T - 1]
        return F.pad(reduction, (0, 1))

    # arca, divergence and the controls compare the policy with its base: the same model, its
    # adapter disabled. The controls then rearrange ARCA's weights.
    context = in_fp32(run) if run.args.score_in_fp32 else contextlib.nullcontext(run.policy)
    with context as policy:
        logp, hidden = policy(micro, needs_logp=credit == "divergence")
        with run.model.disable_adapter():
            base_logp, base_hidden = policy(micro)  # the log-probs also give the metric `kl`
    if micro.base_logp is NOT_SET:
        micro.base_logp = base_logp
    if credit == "divergence":
        return (logp - base_logp).abs()
    return torch.linalg.vector_norm(hidden - base_hidden, dim=-1)


def normalize(scores: Tensor, mask: Tensor, power: float) -> Tensor:
    """Turns scores [B, T] >= 0 into weights T * w_t: mean 1 over a completion, 0 on padding."""
    raised = torch.where(mask, scores.float() + 1e-8, 0.0)
    # Divide by the largest score first, because powers p > 1 of tiny scores would underflow.
    largest = raised.amax(1, keepdim=True).clamp(min=1e-30)
    raised = (raised / largest).pow(power) * mask
    total = raised.sum(1, keepdim=True).clamp(min=1e-30)
    return raised * mask.sum(1, keepdim=True) / total


def assign_credit(run: Run, batch: Batch, micros: list[Batch], metrics: dict) -> None:
    """Turns the scores of a rollout into weights."""
    args = run.args
    for micro in micros:
        weights = normalize(micro.scores, micro.mask, args.sharpening)
        if args.credit in ("random", "shuffled"):
            length = micro.mask.shape[1]
            uniforms = row_uniforms(args, "credit", run.rollout, micro.rows, length)
            uniforms = uniforms.to(weights.device)
            weights = control_weights(args.credit, weights, micro.mask, uniforms)
        micro.credit = weights
        micro.weights = weights


def surrogate_terms(args: Args, micro: Batch, log_ratio: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the log importance weight and the advantage of each token, both [B, T]."""
    return log_ratio, micro.advantages[:, None] * micro.credit


@contextlib.contextmanager
def in_fp32(run: Run) -> Iterator[nn.Module]:
    """Yields the policy as a module that computes in fp32, whatever --dtype is.

    Its weights are the training forward's, to the bit: with bf16, NF4 weights become bf16 numbers
    first, which fp32 holds exactly.
    """
    modules = list(run.model.modules())
    bf16_layers = [m for m in modules if getattr(m, "compute_dtype", None) == torch.bfloat16]
    bf16_parameters = [p for p in run.model.parameters() if p.dtype == torch.bfloat16]

    try:
        for layer in bf16_layers:
            layer.compute_dtype = torch.float32
            layer.forward = functools.partial(nf4_in_fp32, layer)
        for parameter in bf16_parameters:
            parameter.data = parameter.data.float()
        # Not run.policy, which would autocast to bf16. And eagerly, because torch.compile does not
        # end where a layer reads an NF4 weight.
        with torch.compiler.set_stance("force_eager"):
            yield Policy(run.model, run.args.temperature)
    finally:
        for layer in bf16_layers:
            layer.compute_dtype = torch.bfloat16
            vars(layer).pop("forward", None)
        for parameter in bf16_parameters:
            parameter.data = parameter.data.bfloat16()


def nf4_in_fp32(layer: Any, x: Tensor) -> Tensor:
    """Returns the product of x and an NF4 layer's weight, which is rounded to bf16 first."""
    from peft.utils.integrations import dequantize_bnb_weight

    weight = dequantize_bnb_weight(layer.weight).bfloat16()
    return F.linear(x, weight.float(), layer.bias)


# === END CREDIT ===


# ---- What the steps of the loop share ------------------------------------------------------------
NOT_SET = torch.empty(0)  # stands in a Batch for what a later step of the loop will know


@dataclass
class Batch:
    """Completions, and what is known about them so far."""

    rows: Tensor  # [B] number of each completion in the whole rollout: prompt * G + sample
    prompt_width: int  # P
    ids: Tensor  # [B, P + T]
    attention: Tensor  # [B, P + T] bool: False on padding
    truncated: Tensor  # [B] bool: ended by the length limit, not by a stop token
    sampled_logp: Tensor  # [B, T] under the policy that sampled, as the decode loop computed it
    entropy: Tensor  # [B, T] nats, at --temperature, before top_k and top_p
    # set by `collect`
    problems: list[Problem] = field(default_factory=list)  # [B] with gold answers and columns
    rewards: Tensor = NOT_SET  # [B] weighted sum of reward functions; NaN if none applies
    advantages: Tensor = NOT_SET  # [B]
    loss_mask: Tensor = NOT_SET  # [B, T] bool: the tokens that are trained on
    update_tokens: float = 0.0  # such tokens per update: mean over the rollout, all processes
    # set by `score`
    old_logp: Tensor = NOT_SET  # [B, T] before the first of several updates, in training mode
    base_logp: Tensor = NOT_SET  # [B, T] under the reference, if beta or the credit needs it
    scores: Tensor = NOT_SET  # [B, T] the credit signal
    credit: Tensor = NOT_SET  # [B, T] what `surrogate_terms` needs
    weights: Tensor = NOT_SET  # [B, T] each token's share of the gradient: 1 on average

    @property
    def mask(self) -> Tensor:
        """[B, T] bool: the tokens of the completions, stop tokens included."""
        return self.attention[:, self.prompt_width :]

    def select(self, index: Tensor) -> Batch:
        """Returns the rows `index`, without the columns that are padding in all of them."""
        used_columns = self.attention[index].any(0).nonzero()
        start = int(used_columns[0])
        end = int(used_columns[-1]) + 1

        changes: dict[str, Any] = {}
        for name, value in vars(self).items():
            if not isinstance(value, Tensor) or value is NOT_SET:
                continue
            selected = value[index]
            if name in ("ids", "attention"):  # [B, P + T]
                selected = selected[:, start:end]
            elif value.dim() == 2:  # [B, T]
                selected = selected[:, : end - self.prompt_width]
            changes[name] = selected
        if self.problems:
            changes["problems"] = [self.problems[i] for i in index.tolist()]
        return replace(self, prompt_width=self.prompt_width - start, **changes)


@dataclass
class Run:
    """The objects that training uses, and its progress, which determines the data and samples."""

    args: Args
    accelerator: Accelerator
    policy: nn.Module  # `Policy` as Accelerate wrapped it: training forwards go through this
    model: PeftModel  # inside the policy; its adapter can be disabled
    optimizer: torch.optim.Optimizer
    scheduler: torch.optim.lr_scheduler.LRScheduler
    tokenizer: transformers.PreTrainedTokenizerBase
    eos_ids: Tensor  # every token that ends a completion
    reward_funcs: dict  # name -> (function, weight)
    start_weights: dict[str, Tensor]  # of the adapter that the run started from; empty if new
    stop_request: StopRequest
    grader: Grader = field(default_factory=Grader)
    step: int = 0  # updates so far
    rollout: int = 0  # rollouts so far
    groups: list = field(default_factory=list)  # examples for credit.html
    skipped: int = 0  # updates in a row whose loss or gradient was not finite
    prompt_shift: int = 0  # not 0 if former rollouts had another number of prompts
    evaluated_step: int = -1  # the checkpoint's, if its evaluation was logged: it is made again
    task: str = ""  # a digest of all problems and prompts, by which `resume` recognizes them

    @property
    def prompts_per_rollout(self) -> int:
        """The number of groups in a rollout, on all processes."""
        rows = self.args.per_device_train_batch_size * self.args.steps_per_generation
        return rows * self.accelerator.num_processes // self.args.num_generations

    @property
    def next_prompt(self) -> int:
        """Where the next rollout begins in the data: the number of prompts before it."""
        return self.rollout * self.prompts_per_rollout + self.prompt_shift

    def is_due(self, interval: int) -> bool:
        """Returns whether the last rollout reached a multiple of `interval` updates; 0: never."""
        if interval == 0 or self.step == 0:
            return False
        return self.step % interval < self.args.updates_per_rollout


# ---- The loop and its steps ----------------------------------------------------------------------
def train(run: Run, train_set: ProblemSet, held_out: ProblemSet, log: RunLog, bar: tqdm) -> bool:
    """Runs GRPO: collects a rollout, scores its tokens, updates the policy on it, and repeats.

    Returns True after the last update, or False if a signal ended the run before it.
    """
    args = run.args
    while True:
        # Save a checkpoint when one is due, and before stopping early.
        is_finished = run.step >= args.max_steps
        is_interrupted = any(gather_object([run.stop_request.received]))  # on any process
        has_diverged = run.skipped >= MAX_SKIPPED_UPDATES
        saves_at_the_end = is_finished and run.step > 0 and args.save_steps > 0
        if is_interrupted or has_diverged or saves_at_the_end or run.is_due(args.save_steps):
            save_checkpoint(run, best_step(log.rows))
        if has_diverged:
            advice = "lower --learning_rate, or look for NaN in rewards and scores"
            fail(f"loss or gradient not finite in {MAX_SKIPPED_UPDATES} updates in a row: {advice}")
        if is_interrupted:
            return False

        # Evaluate.
        is_milestone = run.step in (0, run.evaluated_step) or is_finished
        evaluates = is_milestone or run.is_due(args.eval_steps)
        if evaluates:
            accuracies = evaluate(run, *held_out)
            if accuracies is None:
                continue  # to the checkpoint and the end
            log.write({"step": run.step, "eval": accuracies})
            bar.unpause()  # keeps the evaluation out of the time per step
        if is_finished:
            return True

        # Collect a rollout and score its tokens.
        metrics: dict[str, float] = {}
        is_last_rollout = run.step + args.updates_per_rollout >= args.max_steps
        with saved_on_error(run, log):
            updates = scored_rollout(run, train_set, metrics, evaluates or is_last_rollout)
        bar.set_postfix(reward=f"{metrics['reward']:.2f}")

        # Update the policy.
        for micros in (updates * args.num_iterations)[: args.max_steps - run.step]:
            with timed(metrics, "seconds_update"):
                metrics |= update(run, micros)
            metrics["peak_memory_gb"] = peak_memory(run.accelerator.device)
            run.step += 1
            log.write({"step": run.step} | metrics)
            # The next update's row repeats the metrics of the rollout, but not its seconds.
            metrics |= {name: 0.0 for name in metrics if name.startswith("seconds")}
            bar.update()
        run.rollout += 1


def scored_rollout(
    run: Run, train_set: ProblemSet, metrics: dict, for_report: bool
) -> list[list[Batch]]:
    """Collects and scores a rollout. Returns the micro-batches of each update."""
    with timed(metrics, "seconds_rollout"):
        batch = collect(run, train_set, metrics)
    metrics |= rollout_metrics(run, batch, metrics["seconds_rollout"])
    log_completions(run, "train", batch, batch.rewards.tolist())

    updates = micro_batches(run.args, batch)
    micros = list(itertools.chain.from_iterable(updates))
    score(run, batch, micros, metrics)

    if for_report:
        run.groups += credit_group(run, micros)
    for hint in hints(run, metrics, batch):
        say(f"step {run.step + 1}: {hint}")
    return updates


def collect(run: Run, train_set: ProblemSet, metrics: dict) -> Batch:
    """Samples and grades this process's share of a rollout, and computes the advantages."""
    args = run.args
    accelerator = run.accelerator
    problems, prompts = train_set

    # Deal out the rows. An update has the same ones on any number of processes.
    processes = accelerator.num_processes
    rollout_size = run.prompts_per_rollout * args.num_generations
    dealt_rows = torch.arange(rollout_size).view(args.updates_per_iteration, processes, -1)
    rows = dealt_rows[:, accelerator.process_index].flatten()

    # Find the problem of each row: G consecutive rows have the same one.
    group_numbers = [run.next_prompt + row // args.num_generations for row in rows.tolist()]
    problem_numbers = [problem_at(n, len(problems), args.seed) for n in group_numbers]
    row_problems = [problems[n] for n in problem_numbers]
    row_prompts = [prompts[n] for n in problem_numbers]

    # Sample and grade.
    uniforms = row_uniforms(args, "rollout", run.rollout, rows, args.max_completion_length)
    batch = sample(run, rows, row_prompts, uniforms)
    batch.problems = row_problems
    batch.rewards = reward_batch(run, batch, metrics)

    # Compute the advantages. A group may be spread over several processes.
    rewards = accelerator.gather(batch.rewards)
    order = accelerator.gather(batch.rows).argsort()
    grouped_rewards = rewards[order].view(-1, args.num_generations)
    advantages = group_advantages(grouped_rewards, args.scale_rewards)
    advantages[advantages < 0] *= args.negative_weight
    batch.advantages = advantages.flatten()[batch.rows]

    # Choose the tokens to train on.
    batch.loss_mask = batch.mask
    if args.mask_truncated_completions:
        batch.loss_mask = batch.mask & ~batch.truncated[:, None]
    loss_tokens = accelerator.reduce(batch.loss_mask.sum(), "sum").item()
    batch.update_tokens = loss_tokens / args.updates_per_iteration
    return batch


def micro_batches(args: Args, batch: Batch) -> list[list[Batch]]:
    """Returns each update's micro-batches: only rows with a gradient, sorted by length."""
    if args.beta == 0:  # then a row whose advantage is 0 has no gradient
        batch = replace(batch, loss_mask=batch.loss_mask & (batch.advantages != 0)[:, None])
    has_gradient = batch.loss_mask.any(1)  # [B]
    batch = replace(batch, advantages=batch.advantages * has_gradient)

    updates = []
    all_rows = torch.arange(len(has_gradient), device=has_gradient.device)
    for rows in all_rows.chunk(args.updates_per_iteration):
        kept = rows[has_gradient[rows]]
        if len(kept) == 0:
            kept = rows[:1]  # DDP needs a backward pass on every process
        lengths = batch.attention[kept].sum(1)
        by_length = kept[lengths.argsort(stable=True)]
        parts = by_length.split(args.per_device_train_batch_size)
        updates.append([batch.select(part) for part in parts])
    return updates


def group_advantages(rewards: Tensor, scale_rewards: str) -> Tensor:
    """Returns advantages [prompts, G]: rewards minus their group's mean, over a standard deviation.

    As in TRL, 1e-4 is added to the deviation. A reward is NaN if no reward function applied; it is
    left out of every mean and deviation, and its advantage is 0.
    """
    is_known = ~rewards.isnan()
    rewards = rewards.where(is_known, rewards.nanmean(1, keepdim=True))
    advantages = rewards - rewards.mean(1, keepdim=True)
    if scale_rewards == "batch":
        advantages = advantages / (rewards[is_known].std() + 1e-4)
    elif scale_rewards == "group":
        # `std` divides by G - 1, but where rewards are unknown there are fewer than G.
        known = is_known.sum(1, keepdim=True)
        correction = ((rewards.shape[1] - 1) / (known - 1)).sqrt()
        advantages = advantages / (rewards.std(1, keepdim=True) * correction + 1e-4)
    # Where all known rewards are equal, rounding of the mean must not leave a tiny advantage.
    lowest = rewards.where(is_known, torch.inf).amin(1, keepdim=True)
    highest = rewards.where(is_known, -torch.inf).amax(1, keepdim=True)
    return advantages.masked_fill((lowest >= highest) | ~is_known, 0.0)


@torch.no_grad()
def score(run: Run, batch: Batch, micros: list[Batch], metrics: dict) -> None:
    """Computes what the updates need besides the rollout: log-probs and token weights.

    `batch` is the whole rollout of this process; `micros` hold its rows that have a gradient.
    """
    args = run.args
    for micro in micros:
        with timed(metrics, "seconds_score"):
            if args.updates_per_rollout > 1:
                micro.old_logp = training_forward(run, micro)
            run.policy.eval()
            if args.beta > 0:
                with reference_weights(run):
                    micro.base_logp, _ = run.policy(micro)
        with timed(metrics, "seconds_credit"):
            micro.scores = token_scores(run, micro, metrics) * micro.mask
    with timed(metrics, "seconds_credit"):
        assign_credit(run, batch, micros, metrics)
    for micro in micros:
        check_credit(micro)
    metrics |= credit_metrics(run, micros)


def check_credit(micro: Batch) -> None:
    """Ends the run if the CREDIT region makes impossible weights of scores that are finite.

    Scores that are not finite are left to `update`, which takes no step then: the policy may have
    diverged.
    """
    are_finite = micro.scores[micro.mask].isfinite().all()
    has_weights = (micro.weights >= 0).all() and micro.credit.isfinite().all()  # NaN is not >= 0
    if are_finite and not has_weights:
        lowest = f"{micro.scores.min().item():.3g}"
        fail(f"assign_credit made weights below 0 or NaN, from scores of at least {lowest}")


@contextlib.contextmanager
def reference_weights(run: Run) -> Iterator[None]:
    """Gives the policy the weights from before training within the `with` block.

    Those are the base without an adapter, or with the adapter that the run has started from.
    """
    if not run.start_weights:
        with run.model.disable_adapter():
            yield
        return
    trained = {name: p for name, p in run.model.named_parameters() if p.requires_grad}
    present_weights = {name: parameter.data for name, parameter in trained.items()}
    try:
        for name, parameter in trained.items():
            parameter.data = run.start_weights[name]
        yield
    finally:
        for name, parameter in trained.items():
            parameter.data = present_weights[name]


def update(run: Run, micros: list[Batch]) -> dict[str, float]:
    """Takes one optimizer step on the micro-batches of an update, and returns its metrics."""
    args = run.args
    accelerator = run.accelerator

    # This count includes the completions that `micro_batches` left out.
    completions = args.per_device_train_batch_size * args.gradient_accumulation_steps
    completions *= accelerator.num_processes

    # Accumulate gradients. DDP synchronizes them only in the last backward pass.
    totals = torch.zeros(6, device=accelerator.device)
    for i, micro in enumerate(micros):
        is_last_micro_batch = i == len(micros) - 1
        sync = contextlib.nullcontext() if is_last_micro_batch else accelerator.no_sync(run.policy)
        with sync:
            logp = training_forward(run, micro)
            old_logp = logp.detach() if micro.old_logp is NOT_SET else micro.old_logp
            scale = token_scale(args, micro.loss_mask, completions, micro.update_tokens)
            loss, clipped = policy_loss(args, micro, logp, old_logp, scale)
            accelerator.backward(loss * accelerator.num_processes)  # DDP averages
        gap = (old_logp - micro.sampled_logp).abs() * micro.loss_mask
        masks = (clipped, clipped.any(1), micro.loss_mask, micro.loss_mask.any(1))
        totals += torch.stack([loss.detach(), gap.sum(), *(mask.sum() for mask in masks)])
    max_norm = args.max_grad_norm or math.inf
    grad_norm = float(accelerator.clip_grad_norm_(run.policy.parameters(), max_norm))
    sums = accelerator.reduce(totals, "sum").tolist()
    total_loss, total_gap, clipped_tokens, clipped_rows, trained_tokens, trained_rows = sums

    # Take the step, unless it would put NaN into the weights.
    learning_rate = run.scheduler.get_last_lr()[0]
    is_finite = math.isfinite(total_loss + grad_norm)
    if is_finite:
        if grad_norm > 0 or not args.skip_zero_gradient:
            run.optimizer.step()
        run.scheduler.step()
    run.optimizer.zero_grad()
    run.skipped = 0 if is_finite else run.skipped + 1
    return {
        "loss": total_loss,
        "grad_norm": grad_norm,
        "learning_rate": learning_rate,
        "clip_fraction_sequence": clipped_rows / max(trained_rows, 1),
        "skipped_update": float(not is_finite),
        "clip_fraction": clipped_tokens / max(trained_tokens, 1),
        "sampling_gap": total_gap / max(trained_tokens, 1),
    }


def training_forward(run: Run, micro: Batch) -> Tensor:
    """Returns log-probs [B, T] in training mode, with dropout that depends only on the rows."""
    stream = random_stream(run.args.seed, "dropout", run.rollout, int(micro.rows[0]))
    torch.manual_seed(stream.initial_seed())
    run.policy.train()
    logp, _ = run.policy(micro)
    return logp


def policy_loss(
    args: Args, micro: Batch, logp: Tensor, old_logp: Tensor, scale: Tensor
) -> tuple[Tensor, Tensor]:
    """Returns PPO's clipped loss (arXiv 1707.06347), and which tokens [B, T] were clipped.

    The loss is a sum over tokens, each multiplied by its `scale`. All tensors are [B, T], and only
    `logp` carries gradients.
    """
    log_ratio = torch.where(micro.mask, logp - old_logp, 0.0)  # padding must not overflow in exp
    log_weight, advantages = surrogate_terms(args, micro, log_ratio)
    ratio = log_weight.exp()
    low = 1 - args.epsilon
    high = 1 + (args.epsilon if args.epsilon_high is None else args.epsilon_high)
    loss = -torch.min(ratio * advantages, ratio.clamp(low, high) * advantages)
    if args.beta > 0:
        base_log_ratio = torch.where(micro.mask, micro.base_logp - logp, 0.0)
        kl = base_log_ratio.exp() - base_log_ratio - 1  # k3, joschu.net/blog/kl-approx
        loss = loss + args.beta * kl
    clipped = torch.where(advantages > 0, ratio > high, ratio < low)
    return (loss * scale).sum(), clipped & (advantages != 0) & micro.loss_mask


def token_scale(args: Args, mask: Tensor, completions: float, tokens: float) -> Tensor:
    """Returns the factor [B, T] of each token in the loss.

    `completions` is the number of an update's completions, and `tokens` that of its tokens, on
    average over the rollout. So splitting an update into micro-batches does not change the loss.
    """
    if args.loss_type == "grpo":
        lengths = mask.sum(1, keepdim=True).clamp(min=1)
        return mask / lengths / completions
    if args.loss_type == "dapo":
        return mask / max(tokens, 1.0)
    return mask / (completions * args.max_completion_length)


def evaluate(
    run: Run, problems: list[Problem], prompts: list[list[int]]
) -> dict[str, float] | None:
    """Returns accuracies and pass@k over all processes, or None if a signal asked for the end.

    All evaluations use the same uniforms.
    """
    args = run.args
    accelerator = run.accelerator
    own_problems = range(accelerator.process_index, len(problems), accelerator.num_processes)
    former_timeouts = run.grader.timeouts
    verdicts = []
    for kind, samples in (("greedy", 1), ("sampled", args.num_generations_eval)):
        jobs = list(itertools.product(own_problems, range(samples)))
        starts = range(0, len(jobs), args.per_device_eval_batch_size)
        for start in tqdm(starts, kind, leave=False, disable=not accelerator.is_main_process):
            if run.stop_request.received:
                break
            batch_jobs = jobs[start : start + args.per_device_eval_batch_size]
            batch_prompts = [prompts[n] for n, _ in batch_jobs]
            streams = [random_stream(args.seed, "eval", 0, n, draw) for n, draw in batch_jobs]
            length = args.max_completion_length
            uniforms = torch.stack([torch.rand(length, generator=stream) for stream in streams])
            rows = torch.arange(len(batch_jobs))  # nothing depends on them here
            batch = sample(run, rows, batch_prompts, uniforms, is_greedy=kind == "greedy")
            batch.problems = [problems[n] for n, _ in batch_jobs]
            grades = grade_batch(run, batch)
            log_completions(run, kind, batch, grades)
            for (n, _), grade in zip(batch_jobs, grades, strict=True):
                verdicts.append((kind, n, grade))
    all_verdicts = gather_object(verdicts)
    timeouts = sum(gather_object([run.grader.timeouts - former_timeouts]))
    if timeouts > 0:
        say(f"{timeouts} held-out answers count as wrong, because grading them took too long")
    if any(gather_object([run.stop_request.received])):  # on any process
        return None
    return eval_metrics(all_verdicts)


# ---- Rollout: our own decode loop over a static KV cache -----------------------------------------
def random_stream(*key: object, device: torch.device | str = "cpu") -> torch.Generator:
    """Returns a generator that depends only on `key`, so that a checkpoint need not save it."""
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
    seed = int.from_bytes(digest, "big") >> 1  # a positive int64
    return torch.Generator(device).manual_seed(seed)


def row_uniforms(args: Args, kind: str, step: int, rows: Tensor, length: int) -> Tensor:
    """Returns uniforms [B, length] that depend only on --seed, `kind`, `step` and the row.

    A row is prompt * G + sample.
    """
    uniforms = []
    for row in rows.tolist():
        prompt, draw = divmod(row, args.num_generations)
        stream = random_stream(args.seed, kind, step, prompt, draw)
        uniforms.append(torch.rand(length, generator=stream))
    return torch.stack(uniforms)


def sample_tokens(
    logits: Tensor, uniforms: Tensor, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0
) -> tuple[Tensor, Tensor, Tensor]:
    """Samples a token for each row of logits [B, V] by inverse CDF, from uniforms [B] in [0, 1).

    Returns tokens, log-probs and entropies, all [B]. The last two are of the distribution that is
    trained: the one before top_k and top_p. A temperature of 0 is greedy.
    """
    logp = logits.float() / (temperature or 1.0)
    logp = logp.clamp_(min=-1e6).log_softmax(-1)  # [B, V], finite: 0 * inf would be NaN below
    probs = logp.exp()
    entropy = -(probs * logp).sum(-1)
    if temperature == 0:
        return logp.argmax(-1), logp.amax(-1), entropy

    # Apply top_k and top_p.
    kept_logp = logp
    if top_k > 0:
        kept_logp = TopKLogitsWarper(top_k)(None, kept_logp)
    if top_p < 1:
        kept_logp = TopPLogitsWarper(top_p)(None, kept_logp)
    if kept_logp is not logp:
        probs = kept_logp.softmax(-1)

    # Find the first token whose cumulative probability exceeds the threshold. It must be below the
    # total, or rounding would let a uniform near 1 pick an impossible last token.
    cdf = probs.cumsum(-1)
    total = cdf[:, -1:]
    just_below_total = torch.nextafter(total, torch.zeros_like(total))
    threshold = torch.minimum(uniforms[:, None] * total, just_below_total)
    token = torch.searchsorted(cdf, threshold, right=True)  # [B, 1]
    token = token.clamp(max=logits.shape[1] - 1)  # for NaN logits
    return token.squeeze(1), logp.gather(1, token).squeeze(1), entropy


class Decoder:
    """Samples completions of B prompts, one column of tokens at a time.

    Every `step` runs the same operations on the same tensors, and the host never looks at their
    values, so a CUDA graph can replay it. This is our own loop because `generate` does not compile
    bitsandbytes' NF4 layers under a static cache, and returns no entropies.
    """

    can_capture = True  # until a step cannot be recorded

    def __init__(
        self, model: nn.Module, prompts: list[list[int]], uniforms: Tensor, sampling: tuple
    ):
        self.model = model
        self.sampling = sampling  # temperature, top_k, top_p
        device = uniforms.device

        # Pad the prompts on the left and make room for the completions.
        prompt_ids = pad_sequence(
            [torch.tensor(prompt, device=device) for prompt in prompts],
            batch_first=True,
            padding_value=-1,
            padding_side="left",
        )  # [B, P]
        self.prompt_width = prompt_ids.shape[1]
        self.ids = F.pad(prompt_ids, (0, uniforms.shape[1]), value=-1)  # [B, P + T], -1: no token
        self.logp = torch.zeros(self.ids.shape, device=device)
        self.entropy = torch.zeros(self.ids.shape, device=device)
        self.uniforms = F.pad(uniforms, (self.prompt_width, 0))  # [B, P + T]

        # What a step changes. `keep` reduces n, the number of active rows.
        self.active_rows = torch.arange(len(prompts), device=device)  # [n]
        self.mask = (self.ids >= 0).long()  # [n, P + T] attention
        self.column = torch.tensor([self.prompt_width], device=device)  # [1] of the next token
        self.graph: torch.cuda.CUDAGraph | None = None
        self.steps_on_these_tensors = 0

        # Read each distinct prompt once, and copy its keys and values to all rows that have it.
        self.cache = StaticCache(config=model.config, max_cache_len=self.ids.shape[1])
        for i, is_sliding in enumerate(self.cache.is_sliding):
            if is_sliding:  # such a layer tracks its position on the host, unseen by a graph
                self.cache.layers[i] = StaticLayer(self.ids.shape[1])
        unique_prompts, copy_of = prompt_ids.unique(dim=0, return_inverse=True)  # [U, P], [B]
        attention = (unique_prompts >= 0).long()
        hidden = hidden_states(model, unique_prompts.clamp(min=0), attention, self.cache)
        self.cache.reorder_cache(copy_of)
        self.emit(hidden[copy_of, -1])

    def emit(self, hidden: Tensor) -> None:
        """Samples the tokens of the current column from last hidden states [n, H]."""
        logits = head_logits(self.model, hidden)
        at = (self.active_rows, self.column)
        token, logp, entropy = sample_tokens(logits, self.uniforms[at], *self.sampling)
        self.ids[at] = token
        self.logp[at] = logp
        self.entropy[at] = entropy
        self.mask.index_fill_(1, self.column, 1)

    def step(self) -> None:
        """Reads the tokens of the current column and samples those of the next one."""
        tokens = self.ids[self.active_rows, self.column, None]  # [n, 1]
        hidden = hidden_states(self.model, tokens, self.mask, self.cache)
        self.column.add_(1)
        self.emit(hidden[:, -1])

    def advance(self) -> None:
        """Takes a step. On a GPU, the first on new tensors warms up and the second is captured."""
        if CUDA and Decoder.can_capture and self.steps_on_these_tensors == 1:
            self.capture()
        if self.graph is not None:
            self.graph.replay()
        else:
            self.step()
        self.steps_on_these_tensors += 1

    def capture(self) -> None:
        """Records a step as a CUDA graph, without running it.

        A model that lets the host read a value, such as a length, cannot be recorded. It decodes
        step by step.
        """
        graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.current_stream()
        try:
            # thread_local, because NCCL's own thread may use the GPU meanwhile
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                self.step()
            self.graph = graph
        except RuntimeError as error:
            Decoder.can_capture = False
            torch.cuda.set_stream(stream)  # a capture that fails stays on its own
            say(f"decoding goes on without a CUDA graph, which is slower: {error}")

    def keep(self, rows: Tensor) -> None:
        """Continues with only `rows` of the active rows, in smaller tensors."""
        self.active_rows = self.active_rows[rows]
        self.mask = self.mask[rows]
        self.cache.reorder_cache(rows)
        self.graph = None
        self.steps_on_these_tensors = 0


@torch.no_grad()
def sample(
    run: Run, rows: Tensor, prompts: list[list[int]], uniforms: Tensor, is_greedy: bool = False
) -> Batch:
    """Samples a completion of up to T tokens for each prompt, using uniforms [B, T].

    It takes --per_device_rollout_batch_size completions at a time. Each depends on its own row of
    the uniforms, so the parts change no sample. Masks come from lengths, never from token ids: the
    pad token may also be a stop token.
    """
    run.policy.eval()
    uniforms = uniforms.to(run.eos_ids.device)
    part_size = run.args.per_device_rollout_batch_size or len(rows)
    parts = []
    for start in range(0, len(rows), part_size):
        part = slice(start, start + part_size)
        parts.append(decode(run, prompts[part], uniforms[part], is_greedy))

    # Join the parts, whose prompts are padded on the left to different widths.
    width = max(ids.shape[1] for ids, _, _ in parts)
    padded = [F.pad(ids, (width - ids.shape[1], 0), value=-1) for ids, _, _ in parts]
    ids = torch.cat(padded)  # [B, P + T], -1: no token
    logp = torch.cat([logp for _, logp, _ in parts])  # [B, T]
    entropy = torch.cat([entropy for _, _, entropy in parts])  # [B, T]
    prompt_width = width - uniforms.shape[1]

    # A completion ends with its first stop token. Everything after that is padding.
    is_stop = torch.isin(ids[:, prompt_width:], run.eos_ids).int()  # [B, T]
    is_completion = is_stop.cumsum(1) - is_stop == 0  # no stop token before this one
    attention = torch.cat((ids[:, :prompt_width] >= 0, is_completion), 1)

    # Overwrite the padding, and drop the columns that contain nothing else.
    ids = torch.where(attention, ids, run.tokenizer.pad_token_id)
    length = int(is_completion.sum(1).max())
    return Batch(
        rows=rows.to(uniforms.device),
        prompt_width=prompt_width,
        ids=ids[:, : prompt_width + length],
        attention=attention[:, : prompt_width + length],
        truncated=~is_stop.any(1),
        sampled_logp=torch.where(is_completion, logp, 0.0)[:, :length],
        entropy=torch.where(is_completion, entropy, 0.0)[:, :length],
    )


def decode(
    run: Run, prompts: list[list[int]], uniforms: Tensor, is_greedy: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Runs a decoder until every completion has a stop token or T tokens.

    Returns ids [B, P + T], and log-probs and entropies [B, T].
    """
    args = run.args
    sampling = (0.0 if is_greedy else args.temperature, args.top_k, args.top_p)
    is_dense = args.rollout_weights == "dense"
    in_dense = dense(run.model) if is_dense else contextlib.nullcontext()
    with in_dense, run.accelerator.autocast(), torch.compiler.set_stance("force_eager"):
        decoder = Decoder(run.model.get_base_model(), prompts, uniforms, sampling)
        for t in range(1, uniforms.shape[1]):
            if t % STOP_CHECK_INTERVAL == 0:
                completions = decoder.ids[decoder.active_rows, decoder.prompt_width :]
                is_unfinished = ~torch.isin(completions, run.eos_ids).any(1)  # [n]
                if not is_unfinished.any():
                    break
                if is_unfinished.sum() <= SHRINK_AT * len(is_unfinished):
                    decoder.keep(is_unfinished.nonzero().squeeze(1))
            decoder.advance()
    begin = decoder.prompt_width
    return decoder.ids, decoder.logp[:, begin:], decoder.entropy[:, begin:]


@contextlib.contextmanager
def dense(model: PeftModel) -> Iterator[None]:
    """Makes every NF4 layer use a dense copy of its weight within the `with` block.

    The adapter is applied separately: merged into bf16 weights, a young one would be rounded away.
    """
    patched_layers = []
    try:
        for name, layer in model.named_modules():
            if name.endswith("base_layer"):
                continue  # the LoRA layer around it is patched instead
            base_layer = getattr(layer, "base_layer", layer)
            if hasattr(base_layer, "compute_dtype"):  # NF4
                layer.forward = dense_forward(layer, base_layer)
                patched_layers.append(layer)
        yield
    finally:
        for layer in patched_layers:
            del layer.forward


def dense_forward(layer: Any, base_layer: Any) -> Callable[[Tensor], Tensor]:
    """Returns a forward function with a dense weight, and with the adapter if the layer has one."""
    from peft.utils.integrations import dequantize_bnb_weight

    weight = dequantize_bnb_weight(base_layer.weight).to(base_layer.compute_dtype)
    bias = base_layer.bias

    def forward(x: Tensor) -> Tensor:
        return F.linear(x, weight, bias)

    if layer is base_layer:
        return forward

    lora_A = layer.lora_A["default"].weight.to(weight)
    lora_B = (layer.scaling["default"] * layer.lora_B["default"].weight).to(weight)

    def forward_with_adapter(x: Tensor) -> Tensor:  # what PEFT computes, in fewer steps
        return forward(x) + F.linear(F.linear(x, lora_A), lora_B)

    return forward_with_adapter


# ---- Policy: log-probabilities without ever building [B, T, V] -----------------------------------
class Policy(nn.Module):
    """The module that Accelerate wraps, so that DDP sees every training forward."""

    def __init__(self, model: PeftModel, temperature: float):
        super().__init__()
        self.model = model
        self.temperature = temperature

    def forward(self, micro: Batch, needs_logp: bool = True) -> tuple[Tensor, Tensor]:
        """Returns log-probs [B, T] at the sampling temperature, and hidden states [B, T, H].

        The hidden states are after the final norm, at the positions that predict the tokens. Where
        log-probs are not needed, they are NOT_SET: the head is a large part of a small model.
        """
        base = self.model.get_base_model()
        attention = micro.attention.long()
        targets = micro.ids[:, micro.prompt_width :]  # [B, T]

        # The last prompt token predicts the first completion token. Those before it can be cached.
        cached = micro.prompt_width - 1
        cache = prompt_cache(self.model, micro.ids[:, :cached], attention[:, :cached])
        start = 0 if cache is None else cached
        hidden = hidden_states(base, micro.ids[:, start:-1], attention[:, :-1], cache)
        hidden = hidden[:, cached - start :]  # [B, T, H]
        if not needs_logp:
            return NOT_SET, hidden

        # Compute logits in chunks, and recompute them in the backward pass instead of keeping them.
        vocabulary_size = base.get_output_embeddings().weight.shape[0]
        chunk_size = max(1, LOGITS_PER_CHUNK // vocabulary_size)
        hidden_chunks = hidden.flatten(0, 1).split(chunk_size)
        target_chunks = targets.flatten().split(chunk_size)
        losses = [
            checkpoint(self.cross_entropy, *chunk, use_reentrant=False)
            for chunk in zip(hidden_chunks, target_chunks, strict=True)
        ]
        logp = -torch.cat(losses).view(targets.shape) * micro.mask
        return logp, hidden

    def cross_entropy(self, hidden: Tensor, targets: Tensor) -> Tensor:  # [n, H], [n] -> [n]
        logits = head_logits(self.model.get_base_model(), hidden) / self.temperature  # [n, V]
        return F.cross_entropy(logits, targets, reduction="none")


def prompt_cache(model: PeftModel, ids: Tensor, attention: Tensor) -> DynamicCache | None:
    """Reads each distinct prompt once, and returns a cache with a copy for every row of [B, P].

    Returns None where a cache cannot be used: compiled or checkpointed layers do not accept one,
    and linear attention keeps a running state instead of keys and values.
    """
    if ids.shape[1] == 0:
        return None
    for module in model.modules():
        is_compiled = module._compiled_call_impl is not None
        is_checkpointed = module.training and getattr(module, "gradient_checkpointing", False)
        if is_compiled or is_checkpointed:
            return None
    if any(DynamicCache(config=model.config).is_linear):
        return None

    prompt_ids = torch.where(attention > 0, ids, -1)  # [B, P]
    unique_prompts, copy_of = prompt_ids.unique(dim=0, return_inverse=True)  # [U, P], [B]
    unique_attention = (unique_prompts >= 0).long()
    cache = DynamicCache()
    hidden_states(model.get_base_model(), unique_prompts.clamp(min=0), unique_attention, cache)
    cache.reorder_cache(copy_of)
    return cache


def hidden_states(
    base: transformers.PreTrainedModel, inputs: Tensor, attention: Tensor, cache: Any = None
) -> Tensor:
    """Returns hidden states [B, N, H] after the final norm, for ids [B, N] or embeddings [B, N, H].

    `attention` [B, P + N] includes cached tokens, and may end with columns that are still 0.
    """
    are_embeddings = inputs.is_floating_point()
    positions = (attention.cumsum(1) - 1).clamp(min=0)
    output = base.base_model(
        input_ids=None if are_embeddings else inputs,
        inputs_embeds=inputs if are_embeddings else None,
        attention_mask=attention,
        position_ids=positions[:, -inputs.shape[1] :],
        past_key_values=cache,
        use_cache=cache is not None,
    )
    return output.last_hidden_state


def head_logits(base: transformers.PreTrainedModel, hidden: Tensor) -> Tensor:
    """Returns logits [..., V] for last hidden states [..., H], scaled as each model family does."""
    logits = base.get_output_embeddings()(hidden).float()
    config = base.config.get_text_config()
    factor = getattr(config, "logit_scale", None)  # Cohere
    divisor = getattr(config, "logits_scaling", None)  # Granite
    cap = getattr(config, "final_logit_softcapping", None)  # Gemma
    if factor:
        logits = logits * factor
    if divisor:
        logits = logits / divisor
    if cap:
        logits = cap * torch.tanh(logits / cap)
    return logits


# ---- Set-up: NF4 + LoRA --------------------------------------------------------------------------
def load_policy(args: Args, device: torch.device) -> PeftModel:
    """Returns the base model with its adapter: a new one, or the one that the run starts from.

    The base is in NF4, unless --load_in_4bit is False, and computes in --dtype.
    """
    name = args.model_name_or_path
    quantization = transformers.BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=args.dtype,
    )
    options: dict[str, Any] = {"revision": args.model_revision, "trust_remote_code": False}
    try:
        options["config"] = without_dropout(
            transformers.AutoConfig.from_pretrained(name, **options)
        )
        if args.load_in_4bit:
            options["quantization_config"] = quantization
        base, loading = transformers.AutoModelForCausalLM.from_pretrained(
            name,
            **options,
            dtype=args.dtype,
            device_map={"": device},
            ignore_mismatched_sizes=True,  # `check_weights` names them
            output_loading_info=True,
        )
        check_weights(base, name, loading)
        check_quantization(args, base)
        torch.manual_seed(args.seed)  # so that every process has the same adapter
        model = add_adapter(args, base)
        check_adapter(args, model)
    except Exception as error:  # a damaged folder may raise anything
        if is_out_of_memory(error):
            raise
        adapter = args.start_adapter or f"LoRA on {' '.join(args.lora_target_modules)}"
        fail(f"cannot load {name} with {adapter}: {error}")

    for layer in model.modules():
        if hasattr(layer, "support_avx512bf16_for_cpu"):
            layer.support_avx512bf16_for_cpu = False  # it repacks weights, so gradients are wrong
    if args.load_in_4bit and any(p.dim() == 3 and min(p.shape) > 1 for p in model.parameters()):
        fail(f"{name} has weights (experts?) that 4 bits leave out: set --load_in_4bit False")
    return model


def without_dropout(config: transformers.PretrainedConfig) -> transformers.PretrainedConfig:
    """Returns a model's config with its dropout off, as in rollouts. --lora_dropout stays."""
    text_config = config.get_text_config()
    for name, value in vars(text_config).items():
        if "drop" in name and isinstance(value, float):
            setattr(text_config, name, 0.0)
    return config


def add_adapter(args: Args, base: transformers.PreTrainedModel) -> PeftModel:
    """Returns the model with a new LoRA adapter, or with the one that the run starts from."""
    from peft import LoraConfig, PeftModel, get_peft_model

    if args.start_adapter is not None:
        with warnings.catch_warnings():
            # PEFT would only warn, and leave layers without weights as they are when new.
            warnings.filterwarnings("error", "Found missing adapter keys")
            return PeftModel.from_pretrained(base, args.start_adapter, is_trainable=True)

    # Some checkpoints also read images. An adapter outside the language model gets no gradient.
    language_model = set(base.get_decoder().modules()) | {base.get_output_embeddings()}
    outside = [
        name
        for name, module in base.named_modules()
        if isinstance(module, nn.Linear) and module not in language_model
    ]
    names = args.lora_target_modules
    lora = LoraConfig(
        task_type="CAUSAL_LM",
        target_modules="all-linear" if names == ["all-linear"] else names,
        exclude_modules=outside or None,
        r=args.lora_r,
        lora_alpha=args.lora_alpha,
        lora_dropout=args.lora_dropout,
    )
    model = get_peft_model(base, lora, revision=args.model_revision)
    targeted = model.base_model.targeted_module_names
    for name in names:
        if names != ["all-linear"] and not any(f".{t}".endswith(f".{name}") for t in targeted):
            layers = f"linear layer of {args.model_name_or_path}, or stands beside others"
            fail(f"--lora_target_modules {name} is no {layers}")
    return model


def check_weights(base: transformers.PreTrainedModel, name: str, loading: dict[str, Any]) -> None:
    """Ends the run if the files of a model lack weights, or hold some that the model leaves out.

    The model class would fill in random numbers, or compute without them. Weights of whole modules
    that it does not have, such as a vision tower, may be left out, but no layer of its own.
    """
    missing = sorted([*loading["missing_keys"], *(key for key, *_ in loading["mismatched_keys"])])
    if missing:
        fail(f"{name} lacks weights, or has them in other shapes: {', '.join(missing[:5])}")
    modules = dict(base.named_modules())
    modules.update(base.base_model.named_modules())  # some files name weights without the `model.`
    left_out = []
    for key in sorted(loading["unexpected_keys"]):
        parent = ".".join(key.split(".")[:-2])  # of "layers.0.attn.q_norm.weight": layers.0.attn
        if key.endswith((".attn.bias", ".attn.masked_bias")):
            continue  # causal masks, which old files of GPT-2 and GPT-J hold
        if (parent and parent in modules) or is_extra_layer(base.config, modules, key):
            left_out.append(key)
    if left_out:
        fail(f"{name} has weights that {type(base).__name__} leaves out: {', '.join(left_out[:5])}")


def is_extra_layer(
    config: transformers.PretrainedConfig, modules: dict[str, nn.Module], key: str
) -> bool:
    """Returns whether a weight is of a layer beyond the last one of a stack that the model has.

    Layers that predict further tokens may follow the stack. Only their own loss would use them.
    """
    names = key.split(".")
    further_layers = getattr(config.get_text_config(), "num_nextn_predict_layers", None) or 0
    for depth in range(1, len(names)):
        stack = modules.get(".".join(names[:depth]))
        number = names[depth]
        if not isinstance(stack, nn.ModuleList) or not number.isdecimal():
            continue
        if int(number) >= len(stack) + further_layers:
            return True
    return False


def check_quantization(args: Args, base: transformers.PreTrainedModel) -> None:
    """Ends the run if the files of a model were quantized already, and otherwise than here."""
    found = getattr(base.config, "quantization_config", None)
    if not args.load_in_4bit:
        if getattr(base, "is_quantized", False):
            fail(f"{args.model_name_or_path} is quantized already: leave --load_in_4bit False out")
        return
    if found is None:
        return
    is_4bit = getattr(found, "load_in_4bit", False)
    kind = found.bnb_4bit_quant_type if is_4bit else "another format"
    if kind != "nf4":
        fail(f"{args.model_name_or_path} is quantized to {kind}: give a model that is not")
    dtype = found.bnb_4bit_compute_dtype
    if dtype != getattr(torch, str(args.dtype)):
        fail(f"{args.model_name_or_path} is in NF4 that computes in {dtype}: set --dtype to that")


def check_adapter(args: Args, model: PeftModel) -> None:
    """Ends the run if it cannot train the adapter that it starts from.

    Rollouts apply the two matrices of plain LoRA and nothing else, and bf16 rounds away what a step
    changes in whole modules.
    """
    variants = [layer for layer in model.modules() if getattr(layer, "lora_variant", None)]
    trained = [(name, p.dtype) for name, p in model.named_parameters() if p.requires_grad]
    names = [name for name, _ in trained if "modules_to_save" not in name]
    if variants or any(name.endswith("bias") for name in names):
        fail(f"{args.start_adapter} is a variant of LoRA (such as DoRA), or trains biases")
    rounded = [name for name, dtype in trained if dtype != torch.float32]
    if rounded:
        fail(f"{args.start_adapter} trains {rounded[0]} in {args.dtype}: set --dtype float32")


def make_accelerator(args: Args) -> Accelerator:
    """Returns Accelerate's handle on the devices and processes."""
    no_accumulation = GradientAccumulationPlugin(num_steps=1)  # `update` does it
    try:
        return Accelerator(
            gradient_accumulation_plugin=no_accumulation,
            project_dir=args.output_dir,
            mixed_precision="bf16" if args.dtype == "bfloat16" else "no",
            cpu=not CUDA,  # otherwise processes on CPUs do not find each other
            log_with=None if args.report_to == "none" else args.report_to,
        )
    except ValueError as error:  # what Accelerate reads from the environment
        fail(f"Accelerate refuses the launcher's settings (ACCELERATE_...): {error}")


def build_run(args: Args, tokenizer: transformers.PreTrainedTokenizerBase) -> Run:
    """Builds the policy, the optimizer and the schedule. Accelerate prepares the first two."""
    torch.backends.cuda.enable_cudnn_sdp(False)  # may give NaN gradients (pytorch#196678)
    reward_funcs = load_reward_funcs(args.reward_funcs, args.reward_weights)
    accelerator = make_accelerator(args)
    model = load_policy(args, accelerator.device)
    if args.torch_compile:
        torch._dynamo.config.recompile_limit = 4096  # one for each layer, mode and adapter state
        for layer in decoder_layers(model.get_base_model()):
            layer.compile(dynamic=True)  # lengths differ between micro-batches
    if args.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})

    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    start_weights = {}
    if args.start_adapter is not None:
        start_weights = {name: p.detach().clone() for name, p in trained.items()}
    optimizer = torch.optim.AdamW(
        trained.values(), lr=args.learning_rate, weight_decay=args.weight_decay
    )
    scheduler = transformers.get_scheduler(
        args.lr_scheduler_type,
        optimizer,
        num_warmup_steps=args.warmup_steps,
        num_training_steps=max(1, args.max_steps) + 1,
    )
    # The schedule starts at a rate of 0. Skip that with a step that has no gradients to apply.
    optimizer.step()
    scheduler.step()
    policy, optimizer = accelerator.prepare(Policy(model, args.temperature), optimizer)
    return Run(
        args=args,
        accelerator=accelerator,
        policy=policy,
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        tokenizer=tokenizer,
        eos_ids=torch.tensor(stop_token_ids(model, tokenizer), device=accelerator.device),
        reward_funcs=reward_funcs,
        start_weights=start_weights,
        stop_request=StopRequest(),
    )


def decoder_layers(base: transformers.PreTrainedModel) -> nn.ModuleList:
    """Returns the layers of a model, whatever its family calls the list of them."""
    count = base.config.get_text_config().num_hidden_layers
    lists = [module for module in base.modules() if isinstance(module, nn.ModuleList)]
    return next(layers for layers in lists if len(layers) == count)


def stop_token_ids(model: PeftModel, tokenizer: transformers.PreTrainedTokenizerBase) -> list[int]:
    """Returns all token ids that end a completion. Nothing else in a generation config is used."""
    configured = model.generation_config.eos_token_id  # an id, a list of ids or None
    stop_ids = {tokenizer.eos_token_id}
    stop_ids.update(configured if isinstance(configured, list) else [configured])
    stop_ids.discard(None)
    if not all(type(stop_id) is int for stop_id in stop_ids):
        fail(f"the generation config's eos_token_id is {configured!r}: it must be an id or a list")
    return sorted(stop_ids)


def check_model(run: Run, train_set: ProblemSet) -> None:
    """Ends the run if our log-probs differ from the stock model's, or if no step can be taken."""
    name = run.args.model_name_or_path
    try:
        gap = trial_step(run, train_set)
    except RewardError:
        raise
    except Exception as error:  # a model family's code may raise anything
        # The embedded policy is known to run. There, and where the error comes from the CREDIT
        # region, the mistake is in the code: show it.
        is_known = is_out_of_memory(error) or name == TINY_POLICY
        if is_known or is_raised_by_credit(error):
            raise
        fail(f"{name} does not run here: {type(error).__name__}: {error}")
    tolerance = 1e-3 if run.args.dtype == "float32" else 0.1
    if not gap < tolerance:  # true for NaN, too
        fail(f"{name} is not supported: its log-probs here are {gap:.2g} nats off its own")


def is_out_of_memory(error: Exception) -> bool:
    """Returns whether an error says that the memory of a GPU or of this machine is used up."""
    phrases = ("out of memory", "not enough memory", "allocate memory", "ALLOC_FAILED")
    return any(phrase in str(error) for phrase in phrases)


def is_raised_by_credit(error: Exception) -> bool:
    """Returns whether an error comes from the method.

    Then the last function of this file that it went through stands in the CREDIT region, or
    computes with what those return.
    """
    lines = SCRIPT.read_text(encoding="utf-8").splitlines()
    region = range(lines.index("# === CREDIT ==="), lines.index("# === END CREDIT ==="))
    frames = traceback.extract_tb(error.__traceback__)
    last = [frame for frame in frames if Path(frame.filename).resolve() == SCRIPT][-1]
    return last.lineno in region or last.name in ("score", "policy_loss")


def trial_step(run: Run, train_set: ProblemSet) -> float:
    """Runs a step without its update. Returns the gap to the stock model's log-probs in nats.

    The batch holds two completions of 8 tokens, for prompts of different lengths.
    """
    problems, prompts = train_set
    long_prompt = prompts[0][-24:]
    short_prompt = long_prompt[len(long_prompt) // 3 :]
    uniforms = torch.full((2, 8), 0.5)
    endless_run = replace(run, eos_ids=run.eos_ids[:0])  # nothing ends a completion early
    batch = sample(endless_run, torch.arange(2), [long_prompt, short_prompt], uniforms)
    batch.problems = [problems[0], problems[0]]
    reward_batch(run, batch, {})  # a mistake in a reward function shows now, not in minutes
    gap = stock_gap(run, batch, run.policy(batch)[0])

    # Write an answer at the end of both completions, for OAR.
    answer = run.tokenizer.encode("\\boxed{7}", add_special_tokens=False)[-7:]
    batch.ids[:, -len(answer) :] = torch.tensor(answer)
    batch.loss_mask = batch.mask
    batch.advantages = batch.rows + 1.0
    score(run, batch, [batch], {})
    if not batch.scores.isfinite().all():
        fail("token_scores returned a score that is not a finite number")

    logp = training_forward(run, batch)
    loss, _ = policy_loss(run.args, batch, logp, logp.detach(), batch.mask)
    if not loss.isfinite():
        raise FloatingPointError("the loss is not finite")
    loss.backward()
    run.optimizer.zero_grad()
    return gap


# ---- Signals -------------------------------------------------------------------------------------
class StopRequest:
    """Records that the run should end: a signal has come, or `accelerate launch` has ended."""

    def __init__(self) -> None:
        self.received = False

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Records signals within the `with` block. In a notebook, other cells want them later."""
        numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, LAUNCHER_HAS_ENDED)
        former_handlers = {number: signal.getsignal(number) for number in numbers}
        try:
            signal.signal(signal.SIGINT, self.handle)
            signal.signal(signal.SIGTERM, self.handle)
            if former_handlers[signal.SIGHUP] != signal.SIG_IGN:  # nohup ignores it
                signal.signal(signal.SIGHUP, self.handle)
            signal.signal(LAUNCHER_HAS_ENDED, self.record)
            yield
        finally:
            for number, handler in former_handlers.items():
                signal.signal(number, handler)

    def handle(self, number: int, frame: object) -> None:
        """Records the first signal, and ends the process at the second one."""
        if self.received:
            os._exit(128 + number)
        self.record(number, frame)

    def record(self, number: int, frame: object) -> None:
        if not self.received:
            # os.write, because the signal may have interrupted a print
            os.write(2, b"\nending after this rollout or batch; a second signal ends at once\n")
        self.received = True


# ---- Checkpoints: everything that training changes -----------------------------------------------
def checkpoints(output_dir: str) -> list[Path]:
    """Returns the complete checkpoints, oldest first."""
    folders = Path(output_dir).glob("checkpoint-*")
    by_step = {folder.name.removeprefix("checkpoint-"): folder for folder in folders}
    return [by_step[step] for step in sorted(filter(str.isdigit, by_step), key=int)]


def save_checkpoint(run: Run, best: int | None) -> None:
    """Has the main process save a checkpoint, and waits for it. See `save_on_this_process`."""
    if run.accelerator.is_main_process:
        save_on_this_process(run, best)
    run.accelerator.wait_for_everyone()


def save_on_this_process(run: Run, best: int | None) -> None:
    """Saves <output_dir>/checkpoint-<step>, and deletes the oldest beyond --save_total_limit.

    The one whose evaluation was the best, at the step `best`, is kept and not counted.
    """
    args = run.args
    folder = Path(args.output_dir) / f"checkpoint-{run.step}"
    if folder.exists():
        return
    partial = folder.with_name("partial-checkpoint")
    write_checkpoint(run, folder, partial)
    if args.save_total_limit is not None:
        others = [f for f in checkpoints(args.output_dir) if f.name != f"checkpoint-{best}"]
        for old in others[: -args.save_total_limit]:
            shutil.rmtree(old.rename(partial))  # half a folder must not look like a whole one


@contextlib.contextmanager
def saved_on_error(run: Run, log: RunLog) -> Iterator[None]:
    """Saves a checkpoint if the `with` block fails, as where a reward function raises.

    So no update is lost. The block must not change what a checkpoint holds. Nobody waits for the
    other processes, because the error may be one process's own.
    """
    try:
        yield
    except BaseException:
        if run.step > 0 and run.accelerator.is_main_process:
            with contextlib.suppress(OSError):
                save_on_this_process(run, best_step(log.rows))
        raise


def write_checkpoint(run: Run, folder: Path, partial: Path) -> None:
    """Writes a checkpoint to `partial` and renames it, so that `folder` is never incomplete."""
    parameters = run.model.named_parameters()
    state = {
        "step": run.step,
        "rollout": run.rollout,
        "next_prompt": run.next_prompt,
        "groups": run.groups,
        "adapter": {name: p.data for name, p in parameters if p.requires_grad},
        "optimizer": run.optimizer.state_dict()["state"],
        "schedule": run.scheduler.last_epoch,
        "base": base_fingerprint(run),
        "task": run.task,
        "flags": flags_and_processes(run),
    }
    if partial.is_symlink():
        partial.unlink()  # nothing is written to where it leads
    shutil.rmtree(partial, ignore_errors=True)
    try:
        run.model.save_pretrained(partial)  # for users of PEFT
        Path(partial, "README.md").unlink(missing_ok=True)  # an empty form
        torch.save(state, partial / "state.pt")
        os.sync()  # everything must be on the disk before the rename
        partial.rename(folder)
    except Exception as error:  # on a full disk, torch and safetensors raise their own kinds
        shutil.rmtree(partial, ignore_errors=True)
        existing = checkpoints(run.args.output_dir)
        newest = existing[-1] if existing else "none"
        message = f"cannot save {folder} ({error}); the last complete checkpoint is {newest}"
        raise OSError(message) from error


def base_fingerprint(run: Run) -> str:
    """Returns a digest of some weights, by which `resume` recognizes the base model.

    The weights of an adapter to start from belong to it. NF4 weights are left out: a GPU and a CPU
    may round one of them differently.
    """
    frozen = {name: p for name, p in run.model.named_parameters() if not p.requires_grad}
    digest = hashlib.blake2b(digest_size=16)
    for name, tensor in (frozen | run.start_weights).items():
        if tensor.is_floating_point():
            weights = tensor.flatten()[:64].float().tolist()
            digest.update(f"{name} {weights}".encode())
    return digest.hexdigest()


def task_fingerprint(problem_sets: list[ProblemSet]) -> str:
    """Returns a digest of all gold answers and prompts, by which `resume` recognizes the task."""
    digest = hashlib.blake2b(digest_size=16)
    for problems, prompts in problem_sets:
        for problem, prompt in zip(problems, prompts, strict=True):
            digest.update(f"{problem.answer} {prompt}\n".encode(errors="replace"))
    return digest.hexdigest()


def flags_and_processes(run: Run) -> dict[str, Any]:
    """Returns the settings with which a resumed run is compared."""
    return asdict(run.args) | {"num_processes": run.accelerator.num_processes}


def resume(run: Run) -> None:
    """Restores the run from --resume_from_checkpoint, if that is given."""
    output_dir = run.args.output_dir
    requested = run.args.resume_from_checkpoint
    existing = checkpoints(output_dir)

    # Never overwrite a run, and never continue it from any but its newest checkpoint.
    folder = None if requested is None else Path(requested)
    if requested == "latest":
        folder = existing[-1] if existing else None
    if existing and (folder is None or folder.resolve() != existing[-1].resolve()):
        advice = "add --resume_from_checkpoint latest, or change --output_dir"
        fail(f"{existing[-1]} exists: {advice}")
    if not existing and Path(output_dir, "summary.json").exists():
        fail(f"{output_dir} holds a finished run: remove it, or change --output_dir")
    if folder is None:
        if requested == "latest":
            say(f"no checkpoint in {output_dir}: starting at step 0")
        return
    if not (folder / "state.pt").is_file():
        fail(f"cannot resume from {folder}: a checkpoint is a folder checkpoint-<step> of a run")
    try:
        saved_flags = load_checkpoint(run, folder)
    except ValueError as error:
        fail(f"cannot resume from {folder}: {error}")
    except Exception as error:  # a damaged file may raise anything
        fail(f"cannot resume from {folder}: {error!r} (if it is damaged, delete it)")

    if is_evaluated(folder.parent / "metrics.jsonl", run.step):
        run.evaluated_step = run.step
    if folder.resolve().parent != Path(output_dir).resolve() and run.accelerator.is_main_process:
        for name in ("metrics.jsonl", "completions.jsonl"):  # the new log begins with the old one
            if (folder.parent / name).exists():
                shutil.copyfile(folder.parent / name, Path(output_dir, name))

    # Report the flags that have changed, unless they cannot affect results.
    harmless = {"output_dir", "resume_from_checkpoint", "save_steps", "save_total_limit"}
    harmless |= {"report_to", "run_name"}
    flags = flags_and_processes(run)
    for name in sorted(saved_flags.keys() - harmless):
        if saved_flags[name] != flags.get(name):
            say(f"--{name} was {saved_flags[name]} before, now it is {flags.get(name)}")


def load_checkpoint(run: Run, folder: Path) -> dict[str, Any]:
    """Loads a checkpoint into the run, and returns the flags of the run that saved it."""
    damaged = zipfile.ZipFile(folder / "state.pt").testzip()  # torch.load does not check
    if damaged is not None:
        raise ValueError(f"{damaged} is damaged")
    state = torch.load(folder / "state.pt", map_location="cpu", weights_only=True)
    trained_names = [name for name, p in run.model.named_parameters() if p.requires_grad]
    if sorted(state["adapter"]) != sorted(trained_names) or state["base"] != base_fingerprint(run):
        others = "model, start adapter or --dtype"
        raise ValueError(f"it belongs to another {others}, or to other layers")
    if state["task"] != run.task:
        advice = f"for those, train its adapter: --model_name_or_path {folder}, and another"
        reason = "its problems, prompts or --max_eval_samples were not those of these flags"
        raise ValueError(f"{reason} ({advice} --output_dir)")
    check_state(run, folder, state)

    run.model.load_state_dict(state["adapter"], strict=False)
    # Restore the optimizer's moments, but keep the learning rate and weight decay of the flags.
    run.optimizer.load_state_dict(run.optimizer.state_dict() | {"state": state["optimizer"]})
    for _ in range(state["schedule"] - run.scheduler.last_epoch):
        run.scheduler.step()
    run.step = state["step"]
    run.rollout = state["rollout"]
    run.prompt_shift = state.get("next_prompt", run.next_prompt) - run.next_prompt
    run.groups = list(state["groups"])
    return dict(state["flags"])


def check_state(run: Run, folder: Path, state: dict[str, Any]) -> None:
    """Raises ValueError unless all of a checkpoint's state can belong to this run."""
    counts = (state["step"], state["rollout"], state["schedule"])
    if not all(type(n) is int and n >= 0 for n in (*counts, state.get("next_prompt", 0))):
        raise ValueError("its counts are damaged")
    if state["step"] > run.args.max_steps:
        raise ValueError("it is past --max_steps: raise that flag")
    if max(counts) > run.args.max_steps + 1:  # the schedule counts one update more
        raise ValueError("its counts are damaged")
    named_step = folder.name.removeprefix("checkpoint-")
    if named_step.isdigit() and int(named_step) != state["step"]:
        raise ValueError(f"it is of step {state['step']}: rename it to checkpoint-{state['step']}")

    shapes = {name: p.shape for name, p in run.model.named_parameters() if p.requires_grad}
    tensors = list(state["adapter"].values())
    if [tensor.shape for tensor in tensors] != [shapes[name] for name in state["adapter"]]:
        raise ValueError("its adapter has other shapes: give the --lora_r that it was trained with")
    for number, moments in state["optimizer"].items():
        own_shape = list(shapes.values())[number]
        if moments["exp_avg"].shape != own_shape or moments["exp_avg_sq"].shape != own_shape:
            raise ValueError("its optimizer's state has other shapes")
        tensors += [moments["exp_avg"], moments["exp_avg_sq"]]
    if not all(tensor.isfinite().all() for tensor in tensors):
        raise ValueError("it holds numbers that are not finite")


# ---- Messages ------------------------------------------------------------------------------------
MAX_MESSAGE_LENGTH = 600  # characters; a message may quote a file or another library
MAX_ARGUMENT_LENGTH = 60  # characters, of an unknown one in the message about it


def say(
    message: object, from_any_process: bool = False, limit: int | None = MAX_MESSAGE_LENGTH
) -> None:
    """Prints a line to standard error, above the progress bar.

    Only the main process speaks, unless the message may be one process's own. `limit` is a number
    of characters, because a message may quote a file or another library. None is for our own words.
    """
    rank = os.environ.get("RANK", "0")
    is_main = not rank.isdecimal() or int(rank) == 0  # `check_ranks` refuses what is no number
    if not is_main and not from_any_process:
        return
    speaker = SCRIPT.name if is_main else f"{SCRIPT.name}: process {rank}"
    text = f"{speaker}: {message}"[:limit]
    with contextlib.suppress(OSError):  # nobody may be listening
        tqdm.write(printable(text), file=sys.stderr)


def fail(message: object, limit: int | None = MAX_MESSAGE_LENGTH) -> NoReturn:
    """Ends the run with a sentence about the user's mistake: no stack trace, exit code 2."""
    words = str(message).split()  # another library's message may span lines
    # Before processes meet, each has the same error. After that it may be one process's own, so all
    # of them speak.
    say("error: " + " ".join(words), torch.distributed.is_initialized(), limit)
    sys.exit(2)


# ---- Command line --------------------------------------------------------------------------------
TRL_FLAGS = {  # what to do about flags of TRL that are not here
    "adam_beta1": "AdamW's betas are .9 and .999",
    "adam_beta2": "AdamW's betas are .9 and .999",
    "attn_implementation": "the model's own default is used",
    "bf16": "use --dtype bfloat16",
    "bnb_4bit_quant_type": "it is always nf4",
    "config": "give the flags themselves",
    "deepspeed": "launch it on one device, or with DDP",
    "delta": "there is no two-sided clipping",
    "disable_dropout": "only --lora_dropout is ever on",
    "do_eval": "evaluation is always on, see --eval_steps",
    "do_train": "use --max_steps 0 to only evaluate",
    "eval_strategy": "use --eval_steps",
    "fp16": "use --dtype bfloat16 or float32",
    "generation_batch_size": "use --steps_per_generation",
    "gradient_checkpointing_kwargs": "use --gradient_checkpointing",
    "importance_sampling_level": "sequence is grpo_strace.py --credit gspo",
    "load_best_model_at_end": "summary.json names the best checkpoint",
    "load_in_8bit": "use --load_in_4bit",
    "log_completions": "completions.jsonl always has them",
    "logging_dir": "use --output_dir",
    "logging_steps": "every update is logged",
    "lora_task_type": "it is always CAUSAL_LM",
    "max_prompt_length": "no prompt is cut; one that does not fit the context is an error",
    "min_p": "use --top_p or --top_k",
    "num_train_epochs": "use --max_steps",
    "optim": "the optimizer is always AdamW",
    "overwrite_output_dir": "remove the folder, or change --output_dir",
    "push_to_hub": "upload the folder adapter/ with the command hf upload",
    "repetition_penalty": "sampling has no penalties",
    "reward_model_name_or_path": "use --reward_funcs",
    "save_strategy": "use --save_steps",
    "top_entropy_quantile": "grpo_strace.py masks tokens by their entropy",
    "torch_dtype": "use --dtype",
    "trust_remote_code": "no code of a model is ever run",
    "use_bnb_nested_quant": "it is always on",
    "use_dora": "it is always plain LoRA",
    "use_liger_kernel": "log-probs are computed in chunks without it",
    "use_peft": "it is always on",
    "use_vllm": "rollouts use the trained weights themselves",
    "vllm_mode": "rollouts use the trained weights themselves",
    "warmup_ratio": "use --warmup_steps",
}


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Keeps the docstring's layout, and shows both defaults where embedded policies differ."""

    def _get_help_string(self, action: argparse.Action) -> str:
        if action.option_strings[0] == f"--no_{action.dest}":
            return f"the same as --{action.dest} False"
        if action.default in (None, ""):
            return action.help or ""  # which says what the default is
        text = super()._get_help_string(action) or ""
        embedded_default = EMBEDDED_DEFAULTS.get(action.dest, action.default)
        if embedded_default != action.default:
            text = f"{text[:-1]}, or {embedded_default} for the embedded policies)"
        return text


def parse_args(argv: list[str] | None = None) -> Args:
    """Parses the flags, and checks what can be checked without a model or data.

    An adapter to start from is fetched here, because it determines some of the flags.
    """
    check_ranks()
    parser = transformers.HfArgumentParser(
        Args,
        description=__doc__,
        usage="%(prog)s [flags]",
        formatter_class=HelpFormatter,
        allow_abbrev=False,
    )
    parser.error = fail  # argparse would print the whole usage first

    # Parse once to learn the model, and again if the defaults depend on it.
    args, unknown = parser.parse_args_into_dataclasses(argv, return_remaining_strings=True)
    if unknown:
        refuse_arguments(unknown)
    start_adapter, adapter_flags = find_adapter(args.model_name_or_path, args.model_revision)
    name = adapter_flags.get("model_name_or_path", args.model_name_or_path)
    if Path(name).resolve().parent == Path(TINY_POLICY).resolve().parent:
        parser.set_defaults(**EMBEDDED_DEFAULTS)
        args, _ = parser.parse_args_into_dataclasses(argv, return_remaining_strings=True)
    for declared in fields(args):
        accepted = declared.metadata.get("metavar")  # a range, where it has one
        value = getattr(args, declared.name)
        if accepted is not None and value is not None and value not in accepted:
            fail(f"--{declared.name} {value} is out of range {accepted}")
    if start_adapter is not None:
        tokens = sys.argv[1:] if argv is None else argv
        for token in tokens:
            name = token.partition("=")[0]
            if name.replace("-", "_").startswith("__lora_"):
                fail(f"{name} is given by {args.model_name_or_path}: drop it")
        args.start_adapter = start_adapter
        for flag_name, value in adapter_flags.items():
            setattr(args, flag_name, value)

    # Fill in the defaults that depend on the machine or on other flags.
    args.dtype = args.dtype or ("bfloat16" if HAS_BF16 else "float32")
    args.steps_per_generation = args.steps_per_generation or args.gradient_accumulation_steps
    args.output_dir = args.output_dir or f"runs/{SCRIPT.stem}-{args.credit}-{args.seed}"
    args.run_name = args.run_name or Path(args.output_dir).name

    check_batch_sizes(args)
    if args.report_to != "none" and importlib.util.find_spec(args.report_to) is None:
        fail(f"--report_to {args.report_to} needs: pip install {args.report_to}")
    check_launcher()
    return args


def refuse_arguments(unknown: list[str]) -> None:
    """Ends the run because of arguments that no flag takes, with advice about flags of TRL.

    It names every flag, once. Each argument is cut, so that a long one does not hide the others.
    """
    advice = {}
    for argument in unknown:
        if argument.startswith("--"):
            name = argument[2:MAX_ARGUMENT_LENGTH].partition("=")[0].replace("-", "_")
            advice[name] = TRL_FLAGS.get(name, "see --help")
    if not advice:
        fail(f"unknown argument {unknown[0][:MAX_ARGUMENT_LENGTH]}: a flag begins with --")
    described = [f"--{name} ({what_to_do})" for name, what_to_do in advice.items()]
    fail(f"unknown flags: {', '.join(described)}", limit=None)


def find_adapter(name: str, revision: str) -> tuple[str | None, dict[str, Any]]:
    """Returns the folder of the LoRA adapter that a name stands for, and the flags it determines.

    Returns None and no flags if the name is a model's. Hub adapters are downloaded here.
    """
    try:
        path = find_adapter_config_file(name, revision=revision)
    except OSError:  # no such name: `load_data` says so
        path = None
    if path is None and Path(name, "adapter/adapter_config.json").is_file():
        fail(f"{name} is the folder of a run: name {name}/adapter")
    if path is None:
        return None, {}
    try:
        if not Path(name).is_dir():
            files = ["adapter_*", "*token*", "chat_template*", "vocab*", "merges*"]
            path = snapshot_download(name, revision=revision, allow_patterns=files)
            path = f"{path}/adapter_config.json"
        config = json.loads(Path(path).read_text(encoding="utf-8"))
        flags = {
            "model_name_or_path": config["base_model_name_or_path"],
            "model_revision": config.get("revision") or "main",
            "lora_r": config["r"],
            "lora_alpha": config["lora_alpha"],
            "lora_dropout": config.get("lora_dropout", 0.0),
            "lora_target_modules": config["target_modules"],
        }
    except (OSError, ValueError, KeyError, TypeError) as error:
        fail(f"{name} is no LoRA adapter of a language model: {error!r}")
    names = (flags["model_name_or_path"], flags["model_revision"])
    if config.get("peft_type") != "LORA" or not all(isinstance(n, str) for n in names):
        fail(f"{name} is no LoRA adapter that names its base model")
    return str(Path(path).parent), flags


def check_batch_sizes(args: Args) -> None:
    """Ends the run unless a rollout is a whole number of updates and of groups."""
    if args.steps_per_generation % args.gradient_accumulation_steps != 0:
        fail("--steps_per_generation must be a multiple of --gradient_accumulation_steps")
    rollout_size = args.per_device_train_batch_size * args.steps_per_generation * world_size()
    if rollout_size % args.num_generations != 0:
        factors = "--per_device_train_batch_size x --steps_per_generation (or else"
        factors += " --gradient_accumulation_steps) x processes"
        fail(f"--num_generations {args.num_generations} must divide {factors} = {rollout_size}")


def check_launcher() -> None:
    """Ends the run if it was launched with an engine or a precision that is not supported."""
    engines = ("FSDP", "DEEPSPEED", "MEGATRON_LM", "PARALLELISM_CONFIG")
    unsupported = [e for e in engines if os.environ.get(f"ACCELERATE_USE_{e}") == "true"]
    if os.environ.get("PJRT_DEVICE"):  # torch_xla, as on a TPU
        unsupported.append(os.environ["PJRT_DEVICE"])
    precision = os.environ.get("ACCELERATE_MIXED_PRECISION")
    if precision not in (None, "", "no", "bf16"):
        unsupported.append(precision)
    if unsupported:
        advice = "launch it on one device, or with DDP (--multi_gpu)"
        fail(f"cannot run with {unsupported[0]}: {advice}")


def world_size() -> int:
    """Returns the number of processes, as the launcher set it."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def check_ranks() -> None:
    """Ends the run if the launcher's variables make no sense."""
    try:
        rank = int(os.environ.get("RANK", "0"))
        is_possible = 0 <= rank < world_size()
    except ValueError:
        is_possible = False
    if not is_possible:
        found = f"RANK={os.environ.get('RANK')}, WORLD_SIZE={os.environ.get('WORLD_SIZE')}"
        sentence = f"{found} is no process of a launcher: unset both"
        print(f"{SCRIPT.name}: error: {sentence}", file=sys.stderr)  # `fail` needs a rank
        sys.exit(2)


@contextlib.contextmanager
def locked(output_dir: str) -> Iterator[None]:
    """Makes the folder, and ends the run if another one is using it.

    The kernel releases the lock when the main process ends, however it ends.
    """
    folder = Path(output_dir)
    if (folder / "adapter").is_file():
        fail(f"{folder / 'adapter'} is a file, where the adapter would be saved: remove it")
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        if int(os.environ.get("RANK", "0")) == 0:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        fail(f"another run is writing to {output_dir}: wait for its end, or change --output_dir")
    except OSError:
        pass  # a file system without locks
    try:
        yield
    finally:
        os.close(descriptor)


def run_to_the_end(args: Args) -> None:
    """Loads the data and the policy, and does the whole run."""
    tokenizer, train_set, held_out = load_data(args)
    with locked(args.output_dir):
        run = build_run(args, tokenizer)
        train_and_report(run, train_set, held_out)


def train_and_report(run: Run, train_set: ProblemSet, held_out: ProblemSet) -> None:
    """Trains, and saves the adapter and a report; after a signal, only a checkpoint."""
    args = run.args
    run.task = task_fingerprint([train_set, held_out])
    accelerator = run.accelerator
    train_problems, _ = train_set
    held_out_problems, _ = held_out
    processes = accelerator.num_processes
    say(introduction(asdict(args), train_problems, held_out_problems, processes))
    check_model(run, train_set)

    with run.stop_request.listening():
        resume(run)
        if len(set(gather_object([run.step]))) > 1:
            fail("processes resume at different steps: put --output_dir where all can read it")
        log = start_log(accelerator, asdict(args), run.step)
        is_main = accelerator.is_main_process
        with run.grader, tqdm(total=args.max_steps, initial=run.step, disable=not is_main) as bar:
            is_finished = train(run, train_set, held_out, log, bar)

        if is_main and is_finished:
            run.model.save_pretrained(f"{args.output_dir}/adapter")
            print(report_run(run, log, held_out_problems[0]))
        elif is_main:
            advice = "to go on, run the same command again with --resume_from_checkpoint latest"
            print(f"interrupted, saved {checkpoints(args.output_dir)[-1]}: {advice}")
        accelerator.wait_for_everyone()  # nobody may leave while another process writes
        accelerator.end_training()


def main() -> None:
    args = parse_args()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    warnings.filterwarnings("ignore", ".*gradient_checkpointing")  # PEFT causes it in transformers
    try:
        run_to_the_end(args)
    except (DataError, RewardError, SafetensorError, OSError) as error:
        fail(error)
    except KeyboardInterrupt:  # before the run listens to signals, so nothing needs saving
        sys.exit(128 + signal.SIGINT)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        smaller = "a smaller --per_device_train_batch_size, --rollout_weights quantized"
        advice = f"in this order, try --gradient_checkpointing True, {smaller}"
        fail(f"out of memory: {advice}")
    if world_size() > 1:
        sys.stdout.flush()
        os._exit(0)  # the destructors of gloo's threads may hang


if __name__ == "__main__":
    main()
