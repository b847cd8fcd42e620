"""GRPO with ARCA token credit on a QLoRA policy, in one file.

    accelerate launch grpo_arca.py                        # embedded tiny policy and task, on a CPU
    accelerate launch grpo_arca.py --model_name_or_path Qwen/Qwen3-1.7B --dataset_name openai/gsm8k

ARCA (arXiv 2606.00257, authors' code github.com/rodlaf/tokenweighting) asks of every token how far
the adapter has moved the policy there. Tokens share a completion's advantage in proportion:

    alpha_t = || h_adapted_t - h_base_t ||_2   h: after the final norm, predicting y_t, in fp32
    w_t     = (alpha_t + 1e-8)^p / sum_k (alpha_k + 1e-8)^p
    A_t     = A_i * T_i * w_t                           so the mean over tokens is A_i

p (--sharpening) is 1 in the paper's equation, 2 in its table. The other signals are its baselines;
ours are probability, two controls and the clipped ratio: at 1 the loss is its -mean_i A_i sum_t w_t
log pi(y_t). Outside the CREDIT marks all scripts are the same.
Shapes: B completions, P prompt and T own tokens (padded left, right), V words, H hidden, G a group.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import hashlib
import importlib.util
import logging
import math
import os
import shlex
import shutil
import signal
import sys
import warnings
import zipfile
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Literal

logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # `load_policy` needs no AVX512 kernel

import torch
import torch.nn.functional as F
import transformers
from accelerate import Accelerator
from accelerate.utils import gather_object
from peft import LoraConfig, PeftModel, get_peft_model
from peft.utils.integrations import dequantize_bnb_weight
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint
from tqdm import tqdm
from transformers.cache_utils import DynamicCache, StaticCache, StaticLayer
from transformers.generation import TopKLogitsWarper, TopPLogitsWarper

SCRIPT, CUDA = Path(__file__).resolve(), torch.cuda.is_available()
DTYPE = "bfloat16" if CUDA else "float32"
LAUNCHER = os.getppid() if "ACCELERATE_MIXED_PRECISION" in os.environ else os.getpid()
(SCRIPT.parent / "common").is_dir() or sys.exit(f"copy common/ to {SCRIPT.parent}, too")

from common.data import DataError, Problem, grade_batch, load_data, problem_at, reward_batch
from common.metrics import RunLog, credit_metrics, eval_metrics, hints, log_completions, stock_gap
from common.metrics import credit_group, introduction, report_run, rollout_metrics, start_log, timed
from common.reward import Grader, RewardError, load_reward_funcs

TINY_POLICY = str(SCRIPT.parent / "common/tiny_policy")
SCHEDULES = Literal["cosine", "linear", "constant", "constant_with_warmup"]
ENGINES = ("FSDP", "DEEPSPEED", "MEGATRON_LM", "PARALLELISM_CONFIG")  # that this cannot run on


def flag(default, help: str, interval: str | None = None):
    """A field of `Args`. Of two defaults, one is the embedded policy's, one any other model's."""
    if type(default[0] if isinstance(default, tuple) else default) in (int, float):
        interval = interval or "(0, inf)"
    metadata = {"help": help} | ({"metavar": interval} if interval else {})  # argparse's names
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata=metadata)
    return field(default=default, metadata=metadata)


# ---- Flags: TRL's names and meanings where TRL has the thing -------------------------------------
@dataclass
class Args:
    # model
    model_name_or_path: str = flag(TINY_POLICY, "Hub id or folder; the embedded policy by default")
    model_revision: str = flag("main", "branch, tag or commit of a Hub model")
    load_in_4bit: bool = flag(True, "quantise the base to NF4 with double quantisation")
    dtype: Literal["bfloat16", "float32"] = flag(DTYPE, "of all but NF4; bfloat16 on a GPU")
    lora_r: int = flag((8, 32), "rank of the adapter")
    lora_alpha: int = flag((16, 32), "the adapter is scaled by lora_alpha / lora_r")
    lora_dropout: float = flag(0.0, "dropout before the adapter, in training only", "[0, 1)")
    lora_target_modules: list[str] = flag(["all-linear"], "linear layers that get an adapter")
    # data and reward
    dataset_name: str = flag("chain_arithmetic", "embedded, Hub id, or .jsonl/.json/.csv/.parquet")
    dataset_config: str | None = flag(None, "of a Hub data set; embedded: operations, 2 to 8")
    dataset_train_split: str = flag("train", "split to train on")
    dataset_test_split: str = flag("test", "split to evaluate on")
    eval_dataset_name: str | None = flag(None, "evaluate on this set instead of the test split")
    prompt_column: str | None = flag(None, "column of the problem, if not problem|question|prompt")
    answer_column: str | None = flag(None, "column of the gold answer, if not answer|solution")
    system_prompt: str | None = flag(None, "system message before every problem")
    chat_template_kwargs: str = flag("{}", 'JSON for the template: {"enable_thinking": false}')
    reward_funcs: list[str] = flag(["accuracy_reward"], "that, or module.function of your own")
    reward_weights: list[float] | None = flag(None, "weight of each reward function; default 1")
    # rollout
    num_generations: int = flag(8, "completions per prompt: the group G", "[2, inf)")
    max_completion_length: int = flag((80, 512), "longest completion in tokens")
    temperature: float = flag(1.0, "sampling temperature, also of the trained log-probs")
    top_p: float = flag(1.0, "sample from the smallest set with this mass; 1 is off", "(0, 1]")
    top_k: int = flag(0, "sample from this many likeliest tokens; 0 is off", "[0, inf)")
    rollout_weights: Literal["dense", "quantized"] = flag("dense", "copy of the base | its NF4")
    # batch: prompts a step = batch size * accumulation * processes / num_generations
    per_device_train_batch_size: int = flag((32, 8), "completions of a micro-batch")
    gradient_accumulation_steps: int = flag(4, "micro-batches per update")
    steps_per_generation: int | None = flag(None, "per rollout; default one update", "(0, inf)")
    num_iterations: int = flag(1, "times each rollout is trained on (mu)")
    gradient_checkpointing: bool = flag((False, True), "recompute: less memory, no shared prompts")
    torch_compile: bool = flag(False, "compile decoder layers: minutes of warm-up, faster training")
    # objective
    loss_type: Literal["grpo", "dapo", "dr_grpo"] = flag("grpo", "per completion | batch | max len")
    scale_rewards: Literal["group", "batch", "none"] = flag("group", "std the advantage is over")
    negative_weight: float = flag(1.0, "of advantages below 0; 0: learn from the rest", "[0, inf)")
    epsilon: float = flag(0.2, "the ratio is clipped below 1 - epsilon")
    epsilon_high: float | None = flag(None, "and above 1 + this; default epsilon", "[0, inf)")
    beta: float = flag(0.0, "weight of the k3 KL to the base (adapter disabled)", "[0, inf)")
    mask_truncated_completions: bool = flag(False, "leave unfinished completions out of the loss")
    # === CREDIT ===
    credit: Literal[
        "arca", "uniform", "surprisal", "probability", "entropy_reduction", "divergence",
        "random", "shuffled",
    ] = flag("arca", "what shares the advantage; uniform is GRPO, the last 2 controls")  # fmt: skip
    sharpening: float = flag(1.0, "power p on the scores before they are normalised", "[0, inf)")
    score_in_fp32: bool = flag(True, "else in --dtype: faster, but bf16 rounds a young adapter off")
    # === END CREDIT ===
    # optimiser
    learning_rate: float = flag((4e-3, 4e-5), "AdamW's peak; see README for where it is from")
    weight_decay: float = flag(0.0, "AdamW's weight decay", "[0, inf)")
    warmup_steps: int = flag((3, 10), "updates of linear warm-up to the peak", "[0, inf)")
    lr_scheduler_type: SCHEDULES = flag("cosine", "after the warm-up (which constant has not)")
    max_grad_norm: float = flag(1.0, "gradients are clipped to this norm; 0 is off", "[0, inf)")
    max_steps: int = flag((45, 200), "updates; 0 evaluates and stops", "[0, inf)")
    seed: int = flag(1, "of the adapter, the data order and every sample", "[0, 4294967296)")
    # evaluation and output
    eval_steps: int = flag(25, "evaluate every so many updates; 0: first and last", "[0, inf)")
    max_eval_samples: int = flag(200, "held-out problems")
    num_generations_eval: int = flag(4, "samples per held-out problem")
    per_device_eval_batch_size: int = flag((200, 32), "completions generated at once")
    output_dir: str | None = flag(None, "default runs/<script>-<credit>-<seed>")
    save_steps: int = flag((25, 50), "checkpoint every so many updates; 0 is off", "[0, inf)")
    save_total_limit: int | None = flag(None, "checkpoints to keep, the latest", "(0, inf)")
    resume_from_checkpoint: str | None = flag(None, "a checkpoint, or latest: output_dir's, if any")
    report_to: Literal["none", "tensorboard", "wandb", "trackio"] = flag("none", "a tracker")
    run_name: str | None = flag(None, "of the tracker's run and in titles; default output_dir's")

    @property
    def updates_per_rollout(self) -> int:
        return self.num_iterations * self.steps_per_generation // self.gradient_accumulation_steps


# === CREDIT ===
from common.metrics import control_weights


@contextlib.contextmanager
def in_fp32(run: Run):
    """The policy as a module that, while inside, computes in fp32 with the weights that it has."""
    layers = [m for m in run.model.modules() if hasattr(m, "compute_dtype")]
    rounded = [p for p in run.model.parameters() if p.dtype == torch.bfloat16]
    for inside, dtype in (True, torch.float32), (False, getattr(torch, run.args.dtype)):
        for layer in layers:
            layer.compute_dtype = dtype
        for parameter in rounded:  # bf16 to fp32 and back loses nothing
            parameter.data = parameter.data.to(dtype)
        if inside:
            yield Policy(run.model, run.args.temperature)  # not Accelerate's, with its autocast


def token_scores(run: Run, micro: Batch, metrics: dict) -> Tensor:
    """How much each token matters [B, T], without gradient (METHODS of arXiv 2606.00257)."""
    credit = run.args.credit
    if credit == "uniform":
        return torch.ones_like(micro.entropy)
    if credit in ("surprisal", "probability"):
        return -micro.sampled_logp if credit == "surprisal" else micro.sampled_logp.exp()
    if credit == "entropy_reduction":  # H_t - H_{t+1} where that is positive; the last has none
        return F.pad(-micro.entropy.diff().clamp(max=0) * micro.mask[:, 1:], (0, 1))
    with (in_fp32(run) if run.args.score_in_fp32 else contextlib.nullcontext(run.policy)) as policy:
        logp, hidden = policy(micro)
        with run.model.disable_adapter():
            base_logp, base_hidden = policy(micro)
    micro.base_logp = base_logp if micro.base_logp is None else micro.base_logp
    residual = torch.linalg.vector_norm(hidden - base_hidden, dim=-1)
    return (logp - base_logp).abs() if credit == "divergence" else residual


def normalise(scores: Tensor, mask: Tensor, power: float) -> Tensor:
    """Scores [B, T] >= 0 to weights of mean 1 over each completion, 0 outside it: T * w_t."""
    # Dividing by the largest keeps p > 1 exact where scores are tiny, as before the first update.
    raised = torch.where(mask, scores.float() + 1e-8, 0.0)
    raised = (raised / raised.amax(1, keepdim=True).clamp(min=1e-30)).pow(power) * mask
    return raised * mask.sum(1, keepdim=True) / raised.sum(1, keepdim=True).clamp(min=1e-30)


def assign_credit(run: Run, micros: list[Batch], metrics: dict) -> None:
    """Turns the scores of a rollout into weights."""
    for micro in micros:
        mask, weights = micro.mask, normalise(micro.scores, micro.mask, run.args.sharpening)
        if run.args.credit in ("random", "shuffled"):
            u = row_uniforms(run.args, "credit", run.rollout, micro.rows, mask.shape[1])
            weights = control_weights(run.args.credit, weights, mask, u.to(mask.device))
        micro.credit = micro.weights = weights


def surrogate_terms(args: Args, micro: Batch, log_ratio: Tensor) -> tuple[Tensor, Tensor]:
    """Log importance weight and advantage of every token, both [B, T]: here credit scales A."""
    return log_ratio, micro.advantages[:, None] * micro.credit


# === END CREDIT ===


# ---- What the steps of the loop pass on ----------------------------------------------------------
@dataclass
class Batch:
    """Completions with what is known of them."""

    rows: Tensor  # [B] place of each completion in the whole rollout: prompt * G + sample
    prompt_width: int  # P
    ids: Tensor  # [B, P + T]
    attention: Tensor  # [B, P + T] bool
    truncated: Tensor  # [B] bool: ended by the length limit, not by a stop token
    sampled_logp: Tensor  # [B, T] of the policy that sampled, as the decode loop saw them
    entropy: Tensor  # [B, T] nats, of the distributions that the tokens were drawn from
    rewards: Tensor | None = None  # [B] weighted sum of the reward functions, NaN of none
    advantages: Tensor | None = None  # [B]
    loss_mask: Tensor | None = None  # [B, T] bool: the tokens that are trained on
    update_tokens: float = 0.0  # of the loss: mean over the rollout's updates, all processes
    old_logp: Tensor | None = None  # [B, T] of that policy in training mode, if updates need it
    base_logp: Tensor | None = None  # [B, T] with the adapter disabled, if beta or the credit does
    scores: Tensor | None = None  # [B, T] the credit signal
    credit: Tensor | None = None  # [B, T] what the method's surrogate needs
    weights: Tensor | None = None  # [B, T] share of each token in the gradient, mean 1 a completion

    @property
    def mask(self) -> Tensor:
        """[B, T] bool: the completions, stop tokens included."""
        return self.attention[:, self.prompt_width :]

    def select(self, index: Tensor) -> Batch:
        """Rows `index`, without the padding that none of them needs."""
        used = self.attention[index].any(0).nonzero()
        first, end, width = int(used[0]), int(used[-1]) + 1, self.prompt_width
        columns = {self.ids.shape[1]: slice(first, end), self.mask.shape[1]: slice(end - width)}
        tensors = {name: x[index] for name, x in vars(self).items() if isinstance(x, Tensor)}
        cut = {name: x[:, columns[x.shape[1]]] for name, x in tensors.items() if x.dim() == 2}
        return replace(self, prompt_width=width - first, **tensors | cut)


@dataclass
class Run:
    """What training stands on, and how far it is: data order and samples follow from that."""

    args: Args
    accelerator: Accelerator
    policy: nn.Module  # `Policy` as Accelerate wrapped it: training forwards go through it
    model: PeftModel  # inside it; its adapter can be switched off
    optimizer: torch.optim.Optimizer
    scheduler: torch.optim.lr_scheduler.LRScheduler
    tokenizer: transformers.PreTrainedTokenizerBase
    eos_ids: Tensor
    reward_funcs: dict  # name -> (function, weight)
    grader: Grader = field(default_factory=Grader)
    step: int = 0  # updates so far
    rollout: int = 0  # rollouts so far
    groups: list = field(default_factory=list)  # of credit.html
    skipped: int = 0  # updates in a row that were not finite
    signals: list[int] = field(default_factory=list)  # SIGINT or SIGTERM, once received


# ---- The loop and its steps ----------------------------------------------------------------------
def train(run: Run, train_set: tuple, held_out: tuple, log: RunLog, bar: tqdm) -> bool:
    """GRPO: collect a rollout, score its tokens, update on it. False if a signal ended it."""
    args = run.args
    due = lambda n: n > 0 and run.step > 0 and run.step % n < args.updates_per_rollout  # noqa: E731
    while True:
        interrupted = sum(gather_object([len(run.signals)])) > 0  # on any process
        last = args.save_steps > 0 and run.step == args.max_steps > 0
        if interrupted or run.skipped >= 10 or due(args.save_steps) or last:
            save_checkpoint(run)
        if run.skipped >= 10:
            fail("loss or gradient was not finite in 10 updates in a row: lower --learning_rate")
        if interrupted:
            return False
        evaluates = due(args.eval_steps) or run.step in (0, args.max_steps)
        if evaluates:
            log.write({"step": run.step, "eval": evaluate(run, *held_out)})
            bar.unpause()  # the time of a step is without it
        if run.step >= args.max_steps:
            return True
        metrics: dict[str, float] = {}
        with timed(metrics, "seconds_rollout"):
            batch, problems = collect(run, train_set, metrics)
        metrics |= rollout_metrics(run, batch, metrics["seconds_rollout"])
        log_completions(run, "train", batch, list(problems.values()), batch.rewards.tolist())
        parts = micro_batches(args, batch)
        micros = [micro for part in parts for micro in part]
        score(run, micros, metrics)
        if evaluates or run.step + args.updates_per_rollout >= args.max_steps:
            run.groups += credit_group(run, micros, problems)
        for hint in hints(run, metrics, batch):
            say(f"step {run.step + 1}: {hint}")
        bar.set_postfix(reward=f"{metrics['reward']:.2f}")
        for part in (parts * args.num_iterations)[: args.max_steps - run.step]:
            with timed(metrics, "seconds_update"):
                metrics |= update(run, part)
            run.step += 1
            log.write({"step": run.step} | metrics)
            metrics |= {name: 0.0 for name in metrics if name.startswith("seconds")}  # count once
            bar.update()
        run.rollout += 1


def collect(run: Run, data: tuple, metrics: dict) -> tuple[Batch, dict[int, Problem]]:
    """This process's share of a rollout, sampled and graded, and the problem of each row."""
    args, accelerator, (problems, prompts) = run.args, run.accelerator, data
    total = args.per_device_train_batch_size * args.steps_per_generation * accelerator.num_processes
    # Every update has the same completions on any number of processes.
    updates, world = args.updates_per_rollout // args.num_iterations, accelerator.num_processes
    rows = torch.arange(total).view(updates, world, -1)[:, accelerator.process_index].flatten()
    places = [(run.rollout * total + row) // args.num_generations for row in rows.tolist()]
    chosen = [problem_at(place, len(problems), args.seed) for place in places]
    u = row_uniforms(args, "rollout", run.rollout, rows, args.max_completion_length)
    batch = sample(run, rows, [prompts[i] for i in chosen], u)
    problem_of = {row: problems[i] for row, i in zip(rows.tolist(), chosen, strict=True)}
    batch.rewards = reward_batch(run, batch, list(problem_of.values()), metrics)
    rewards = accelerator.gather(batch.rewards)[accelerator.gather(batch.rows).argsort()]
    advantages = group_advantages(rewards.view(-1, args.num_generations), args.scale_rewards)
    advantages[advantages < 0] *= args.negative_weight
    batch.advantages = advantages.flatten()[batch.rows]
    batch.loss_mask = batch.mask & ~(batch.truncated & args.mask_truncated_completions)[:, None]
    batch.update_tokens = accelerator.reduce(batch.loss_mask.sum(), "sum").item() / updates
    return batch, problem_of


def micro_batches(args: Args, batch: Batch) -> list[list[Batch]]:
    """Those of each update of a rollout: rows that have a gradient, like lengths together."""
    batch.loss_mask = batch.loss_mask & ((batch.advantages != 0) | (args.beta > 0))[:, None]
    useful = batch.loss_mask.any(1)
    updates, parts = args.steps_per_generation // args.gradient_accumulation_steps, []
    for part in torch.arange(len(useful), device=useful.device).chunk(updates):
        part = part[useful[part]] if useful[part].any() else part[:1]  # DDP waits for all processes
        part = part[batch.attention[part].sum(1).argsort(stable=True)]
        parts.append([batch.select(x) for x in part.split(args.per_device_train_batch_size)])
    return parts


def group_advantages(rewards: Tensor, scale_rewards: str) -> Tensor:
    """Rewards [prompts, G] minus their group's mean, over a std (plus 1e-4), as TRL's; 0 of NaN."""
    known = ~rewards.isnan()  # NaN: no reward function has judged it, so it counts nowhere
    wider = ((known.shape[1] - 1) / (known.sum(1, keepdim=True) - 1)).sqrt()
    rewards = rewards.where(known, rewards.nanmean(1, keepdim=True))
    std = rewards[known].std() if scale_rewards == "batch" else rewards.std(1, keepdim=True) * wider
    centred = rewards - rewards.mean(1, keepdim=True)
    centred = centred if scale_rewards == "none" else centred / (std + 1e-4)
    return centred.masked_fill((rewards == rewards[:, :1]).all(1, keepdim=True) | ~known, 0.0)


@torch.no_grad()
def score(run: Run, micros: list[Batch], metrics: dict) -> None:
    """What updates need beside the rollout: log-probs before the first, the base's, the credit."""
    args = run.args
    for micro in micros:
        with timed(metrics, "seconds_score"):
            if args.updates_per_rollout > 1:
                micro.old_logp = training_forward(run, micro)
            run.policy.eval()
            if args.beta > 0:
                with run.model.disable_adapter():
                    micro.base_logp, _ = run.policy(micro)
        with timed(metrics, "seconds_credit"):
            micro.scores = token_scores(run, micro, metrics) * micro.mask
    with timed(metrics, "seconds_credit"):
        assign_credit(run, micros, metrics)
    metrics |= credit_metrics(run, micros)


def update(run: Run, micros: list[Batch]) -> dict[str, float]:
    """One optimiser step. Returns its metrics."""
    args, accelerator, totals = run.args, run.accelerator, 0.0
    completions = args.per_device_train_batch_size * args.gradient_accumulation_steps
    completions *= accelerator.num_processes  # those that `micro_batches` left out, too
    for i, micro in enumerate(micros):
        scale = token_scale(args, micro.loss_mask, completions, micro.update_tokens)
        last = i == len(micros) - 1
        with contextlib.nullcontext() if last else accelerator.no_sync(run.policy):
            logp = training_forward(run, micro)
            old_logp = logp.detach() if micro.old_logp is None else micro.old_logp
            loss, clipped = policy_loss(args, micro, logp, old_logp, scale)
            accelerator.backward(loss * accelerator.num_processes)  # DDP takes the mean
        gap = (old_logp - micro.sampled_logp).abs() * micro.loss_mask
        counts = [x.sum() for m in (clipped, micro.loss_mask) for x in (m, m.any(1))]
        totals += torch.stack([loss.detach(), gap.sum(), *counts])
    norm = accelerator.clip_grad_norm_(run.policy.parameters(), args.max_grad_norm or math.inf)
    loss, gap, clipped, cut, tokens, rows = accelerator.reduce(totals, "sum").tolist()
    learning_rate, finite = run.scheduler.get_last_lr()[0], math.isfinite(loss + float(norm))
    if finite:  # else one bad batch would end in NaN weights
        run.optimizer.step(), run.scheduler.step()
    run.optimizer.zero_grad()
    run.skipped = 0 if finite else run.skipped + 1
    metrics = {"loss": loss, "grad_norm": float(norm), "learning_rate": learning_rate}
    metrics |= {"clip_fraction_sequence": cut / max(rows, 1), "skipped_update": float(not finite)}
    gap, clipped = gap / max(tokens, 1), clipped / max(tokens, 1)
    return metrics | {"clip_fraction": clipped, "sampling_gap": gap}


def training_forward(run: Run, micro: Batch) -> Tensor:
    """Log-probs [B, T] in training mode, where LoRA's dropout is a function of the rows."""
    stream = random_stream(run.args.seed, "dropout", run.rollout, int(micro.rows[0]))
    torch.manual_seed(stream.initial_seed())
    run.policy.train()
    return run.policy(micro)[0]


def policy_loss(args: Args, micro: Batch, logp: Tensor, old_logp: Tensor, scale: Tensor) -> tuple:
    """The clipped surrogate (PPO, arXiv 1707.06347) of GRPO (2402.03300), summed with `scale`, and
    which tokens are clipped. All tensors are [B, T]; only logp carries gradients."""
    log_ratio = torch.where(micro.mask, logp - old_logp, 0.0)  # padding must not overflow in exp
    log_weight, advantages = surrogate_terms(args, micro, log_ratio)
    ratio, low, high = log_weight.exp(), 1 - args.epsilon, 1 + args.epsilon_high
    loss = -torch.min(ratio * advantages, ratio.clamp(low, high) * advantages)
    if args.beta > 0:
        to_base = torch.where(micro.mask, micro.base_logp - logp, 0.0)
        loss = loss + args.beta * (to_base.exp() - to_base - 1)  # k3, joschu.net/blog/kl-approx
    clipped = torch.where(advantages > 0, ratio > high, ratio < low)
    return (loss * scale).sum(), clipped & (advantages != 0) & micro.loss_mask


def token_scale(args: Args, mask: Tensor, completions: float, tokens: float) -> Tensor:
    """What each token [B, T] counts for. The counts are an update's, so that no split matters."""
    if args.loss_type == "grpo":
        return mask / mask.sum(1, keepdim=True).clamp(min=1) / completions
    if args.loss_type == "dapo":
        return mask / max(tokens, 1.0)
    return mask / (completions * args.max_completion_length)


def evaluate(run: Run, problems: list[Problem], prompts: list[list[int]]) -> dict[str, float]:
    """Accuracies and unbiased pass@k, all processes. Each evaluation draws the same uniforms."""
    args, verdicts = run.args, []
    mine = range(run.accelerator.process_index, len(problems), run.accelerator.num_processes)
    for kind, samples in {"greedy": 1, "sampled": args.num_generations_eval}.items():
        jobs = [(i, s) for i in mine for s in range(samples)]
        firsts = range(0, len(jobs), args.per_device_eval_batch_size)
        for first in tqdm(firsts, kind, leave=False, disable=not run.accelerator.is_main_process):
            part = jobs[first : first + args.per_device_eval_batch_size]
            rows = torch.tensor([i * args.num_generations + s for i, s in part])
            u = row_uniforms(args, "eval", 0, rows, args.max_completion_length)
            batch = sample(run, rows, [prompts[i] for i, _ in part], u, greedy=kind == "greedy")
            right = grade_batch(run, batch, asked := [problems[i] for i, _ in part])
            log_completions(run, kind, batch, asked, right)
            verdicts += [(kind, i, r) for (i, _), r in zip(part, right, strict=True)]
    return eval_metrics(gather_object(verdicts))


# ---- Rollout: our own decode loop over a static KV cache -----------------------------------------
def random_stream(*key: object) -> torch.Generator:
    """A generator that depends on `key` alone: no state to save, the same on every machine."""
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "big") >> 1)


def row_uniforms(args: Args, kind: str, step: int, rows: Tensor, length: int) -> Tensor:
    """Uniforms [B, length]; row r is a function of (seed, kind, step, prompt, sample) alone."""
    keys = [divmod(row, args.num_generations) for row in rows.tolist()]
    streams = [random_stream(args.seed, kind, step, *key) for key in keys]
    return torch.stack([torch.rand(length, generator=stream) for stream in streams])


def sample_tokens(logits: Tensor, u: Tensor, temperature=1.0, top_k=0, top_p=1.0) -> list[Tensor]:
    """Tokens [B] by inverse CDF from logits [B, V] and a uniform in [0, 1) a row [B]; their
    log-probs and the entropies [B], before top_k and top_p, as trained. Temperature 0 is greedy."""
    logp = logits.float() / (temperature or 1.0)
    logp = logp.clamp_(min=-1e6).log_softmax(-1)  # [B, V], finite: 0 * inf is no entropy
    probs = logp.exp()
    entropy = -(probs * logp).sum(-1)
    if temperature == 0:
        return [logp.argmax(-1), logp.amax(-1), entropy]
    kept = TopKLogitsWarper(top_k)(None, logp) if top_k > 0 else logp
    kept = TopPLogitsWarper(top_p)(None, kept) if top_p < 1 else kept
    cdf = (probs if kept is logp else kept.softmax(-1)).cumsum(-1)
    total, size = cdf[:, -1:], logits.shape[1]
    # Strictly below the total, or rounding would let u near 1 pick an impossible last token.
    threshold = torch.minimum(u[:, None] * total, torch.nextafter(total, torch.zeros_like(total)))
    token = torch.searchsorted(cdf, threshold, right=True).clamp(max=size - 1)  # clamp: for NaN
    return [token.squeeze(1), logp.gather(1, token).squeeze(1), entropy]


class Decoder:
    """Completions of B prompts in progress, sampled with uniforms u [B, T]. Every token runs the
    same `step` on the same tensors, without a word from the host, as a CUDA graph needs it."""

    def __init__(self, model, prompts: list[list[int]], u: Tensor, sampling: tuple):
        self.model, self.sampling, device, room = model, sampling, u.device, u.shape[1]
        texts = [torch.tensor(prompt, device=device) for prompt in prompts]
        ids = pad_sequence(texts, batch_first=True, padding_value=-1, padding_side="left")  # [B, P]
        self.ids = F.pad(ids, (0, room), value=-1)  # [B, P + T], -1 where no token is
        self.logp, self.entropy = torch.zeros(2, *self.ids.shape, device=device)
        self.u = F.pad(u, (ids.shape[1], 0))
        ids, copies = ids.unique(dim=0, return_inverse=True)  # [U, P], [B]: each is read once
        self.cache = StaticCache(config=model.config, max_cache_len=self.ids.shape[1])
        for i in [i for i, sliding in enumerate(self.cache.is_sliding) if sliding]:
            self.cache.layers[i] = StaticLayer(self.ids.shape[1])  # a graph would see no roll
        hidden = hidden_states(model, ids.clamp(min=0), (ids >= 0).long(), self.cache)
        self.cache.reorder_cache(copies)
        self.place = torch.arange(len(u), device=device)  # [n] in progress: `keep` makes n less
        self.mask = (self.ids >= 0).long()  # [n, P + T]
        self.column = torch.tensor(ids.shape[1:], device=device)  # [1] of the next token
        self.age, self.graph = 0, None
        self.emit(hidden[copies, -1])

    def emit(self, hidden: Tensor) -> None:
        """Samples the token of the present column for each row, whose last state is in [n, H]."""
        at, logits = (self.place, self.column), head_logits(self.model, hidden)
        drawn = sample_tokens(logits, self.u[at], *self.sampling)
        self.ids[at], self.logp[at], self.entropy[at] = drawn
        self.mask.index_fill_(1, self.column, 1)

    def step(self) -> None:
        """Reads that token, and samples the next column's."""
        tokens = self.ids[self.place, self.column, None]  # [n, 1]
        hidden = hidden_states(self.model, tokens, self.mask, self.cache)
        self.column.add_(1)
        self.emit(hidden[:, -1])

    def advance(self) -> None:
        """One step. On a GPU the first on new tensors warms up, the second is captured."""
        if self.age == 1 and CUDA:
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):  # records, runs nothing
                self.step()
        self.graph.replay() if self.graph else self.step()
        self.age += 1

    def keep(self, rows: Tensor) -> None:
        """Goes on with these rows alone, in smaller tensors."""
        self.place, self.mask = self.place[rows], self.mask[rows]
        self.cache.reorder_cache(rows)
        self.age, self.graph = 0, None


@torch.no_grad()
def sample(run: Run, rows: Tensor, prompts: list[list[int]], u: Tensor, greedy=False) -> Batch:
    """A completion of up to T tokens for each prompt, by the present policy; uniforms u [B, T].
    Masks come from lengths, never from token ids: a pad token may be a stop token."""
    run.policy.eval()
    args, width, u = run.args, max(map(len, prompts)), u.to(run.eos_ids.device)
    how = (0.0 if greedy else args.temperature, args.top_k, args.top_p)
    copy = dense(run.model) if args.rollout_weights == "dense" else contextlib.nullcontext()
    with copy, run.accelerator.autocast(), torch.compiler.set_stance("force_eager"):
        decoder = Decoder(run.model.get_base_model(), prompts, u, how)
        for t in range(1, u.shape[1]):
            if t % 8 == 0:  # not every time: a look waits for the GPU
                going = ~torch.isin(decoder.ids[decoder.place, width:], run.eos_ids).any(1)
                if not going.any():
                    break
                if going.sum() <= 0.75 * len(going):  # else copying costs more than it saves
                    decoder.keep(going.nonzero().squeeze(1))
            decoder.advance()
    ends = torch.isin(decoder.ids[:, width:], run.eos_ids).int()
    real = ends.cumsum(1) - ends == 0  # to the first stop token: a later one may be padding
    attention = torch.cat((decoder.ids[:, :width] >= 0, real), 1)
    end = width + int(real.sum(1).max())
    ids = torch.where(attention, decoder.ids, run.tokenizer.pad_token_id)[:, :end]
    seen = [torch.where(attention, x, 0.0)[:, width:end] for x in (decoder.logp, decoder.entropy)]
    return Batch(rows.to(u.device), width, ids, attention[:, :end], ~ends.any(1), *seen)


@contextlib.contextmanager
def dense(model: PeftModel):
    """Inside it each NF4 layer computes with one dense weight. The adapter stays beside it: merged
    into bf16 weights, a young one would be rounded away."""
    layers = [m for name, m in model.named_modules() if not name.endswith("base_layer")]
    pairs = [(x, b) for x in layers if hasattr(b := getattr(x, "base_layer", x), "compute_dtype")]
    for layer, base in pairs:
        weight = dequantize_bnb_weight(base.weight).to(base.compute_dtype)
        layer.forward = whole = functools.partial(F.linear, weight=weight, bias=base.bias)
        if layer is not base:  # what PEFT computes, in fewer steps
            b = layer.scaling["default"] * layer.lora_B["default"].weight
            a, b = layer.lora_A["default"].weight.to(weight), b.to(weight)
            layer.forward = lambda x, f=whole, a=a, b=b: f(x) + F.linear(F.linear(x, a), b)
    yield
    for layer, _ in pairs:
        del layer.forward


# ---- Policy: log-probabilities without ever building [B, T, V] -----------------------------------
class Policy(nn.Module):
    """The module that Accelerate wraps, so that DDP sees every training forward."""

    def __init__(self, model: PeftModel, temperature: float):
        super().__init__()
        self.model, self.temperature = model, temperature

    def forward(self, micro: Batch) -> tuple[Tensor, Tensor]:
        """Log-probs [B, T] of the completions, at the sampling temperature, and the hidden states
        [B, T, H] after the final norm, at the positions whose logits predict them."""
        base, ids, attention = self.model.get_base_model(), micro.ids, micro.attention.long()
        last = micro.prompt_width - 1  # the prompt's last token predicts the first of a completion
        cache = prompt_cache(self.model, ids[:, :last], attention[:, :last])
        start, targets = last if cache else 0, ids[:, last + 1 :]
        hidden = hidden_states(base, ids[:, start:-1], attention[:, :-1], cache)[:, last - start :]
        chunk = max(1, 2**26 // base.get_output_embeddings().weight.shape[0])  # 256 MiB of logits
        chunks = zip(hidden.flatten(0, 1).split(chunk), targets.flatten().split(chunk))
        loss = [checkpoint(self.cross_entropy, *x, use_reentrant=False) for x in chunks]
        return -torch.cat(loss).view(targets.shape) * micro.mask, hidden

    def cross_entropy(self, hidden: Tensor, targets: Tensor) -> Tensor:  # [n, H], [n] -> [n]
        logits = head_logits(self.model.get_base_model(), hidden) / self.temperature  # [n, V]
        return F.cross_entropy(logits, targets, reduction="none")


def prompt_cache(model: PeftModel, ids: Tensor, attention: Tensor) -> DynamicCache | None:
    """Of prompts [B, P], each different one read once for all its samples. None where that cannot
    be: layers that are checkpointed or compiled, and those that keep a state."""
    alone = any(m._compiled_call_impl for m in model.modules())
    alone |= any(m.training and getattr(m, "gradient_checkpointing", 0) for m in model.modules())
    if alone or not ids.shape[1] or any(DynamicCache(config=model.config).is_linear):
        return None
    prompts, copies = torch.where(attention > 0, ids, -1).unique(dim=0, return_inverse=True)
    cache = DynamicCache()
    hidden_states(model.get_base_model(), prompts.clamp(min=0), (prompts >= 0).long(), cache)
    cache.reorder_cache(copies)
    return cache


def hidden_states(base: nn.Module, ids: Tensor, attention: Tensor, cache=None) -> Tensor:
    """After the final norm [B, N, H], of ids [B, N] or their embeddings [B, N, H]. Attention
    [B, P + N] is also of what the cache holds, and may end in columns that are still 0."""
    name = "inputs_embeds" if ids.is_floating_point() else "input_ids"
    positions = (attention.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :]
    inputs = {"position_ids": positions, "past_key_values": cache, "use_cache": cache is not None}
    return base.base_model(attention_mask=attention, **inputs, **{name: ids}).last_hidden_state


def head_logits(base: nn.Module, hidden: Tensor) -> Tensor:
    """Logits [..., V] of last hidden states [..., H], with what some families do after the head."""
    config, logits = base.config.get_text_config(), base.get_output_embeddings()(hidden).float()
    names = ("logit_scale", "logits_scaling", "final_logit_softcapping")
    scale, divisor, cap = (getattr(config, name, None) for name in names)
    logits = logits * (scale or 1.0) / (divisor or 1.0) if scale or divisor else logits
    return cap * torch.tanh(logits / cap) if cap else logits


# ---- Set-up: NF4 + LoRA --------------------------------------------------------------------------
def load_policy(args: Args, device: torch.device) -> PeftModel:
    """The base in NF4, computing in args.dtype, with a fresh LoRA adapter on it."""
    name, targets, dtype = args.model_name_or_path, args.lora_target_modules, args.dtype
    nf4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
    nf4 = transformers.BitsAndBytesConfig(**nf4, bnb_4bit_compute_dtype=dtype)
    load = {"quantization_config": nf4 if args.load_in_4bit else None, "trust_remote_code": False}
    load |= {"revision": args.model_revision, "dtype": dtype, "device_map": {"": device}}
    lora = {"target_modules": targets[0] if targets == ["all-linear"] else targets}
    lora |= {"r": args.lora_r, "lora_alpha": args.lora_alpha, "lora_dropout": args.lora_dropout}
    try:
        base = transformers.AutoModelForCausalLM.from_pretrained(name, **load)
        torch.manual_seed(args.seed)  # the same adapter on every process
        model = get_peft_model(base, LoraConfig(task_type="CAUSAL_LM", **lora))
    except (OSError, ValueError) as error:
        fail(f"cannot load {name} with LoRA on {' '.join(targets)}: {error}")
    for layer in [m for m in model.modules() if hasattr(m, "support_avx512bf16_for_cpu")]:
        layer.support_avx512bf16_for_cpu = False  # it repacks weights: wrong gradients
    if args.load_in_4bit and any(p.dim() == 3 and min(p.shape) > 1 for p in model.parameters()):
        fail(f"{name} has weights (experts?) that 4 bits leave out: set --load_in_4bit False")
    return model


def build_run(args: Args, tokenizer) -> Run:
    """Policy, optimiser and schedule, as Accelerate prepares them."""
    torch.backends.cuda.enable_cudnn_sdp(False)  # may give NaN gradients (pytorch#196678)
    rewards = load_reward_funcs(args.reward_funcs, args.reward_weights)
    how = {"mixed_precision": "bf16" if args.dtype == "bfloat16" else "no", "cpu": not CUDA}
    how["log_with"] = None if args.report_to == "none" else args.report_to
    accelerator = Accelerator(project_dir=args.output_dir, **how)  # cpu: else those never meet
    model = load_policy(args, accelerator.device)
    if args.torch_compile:
        torch._dynamo.config.recompile_limit = 4096  # one for each layer, mode and adapter state
        for layer in model.get_base_model().base_model.layers:
            layer.compile(dynamic=True)  # lengths differ from one micro-batch to the next
    if args.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=args.learning_rate, weight_decay=args.weight_decay)
    steps = (args.warmup_steps, max(1, args.max_steps) + 1)
    scheduler = transformers.get_scheduler(args.lr_scheduler_type, optimizer, *steps)
    optimizer.step(), scheduler.step()  # nothing moves; but the first update is not at rate 0
    policy, optimizer = accelerator.prepare(Policy(model, args.temperature), optimizer)
    eos = model.generation_config.eos_token_id  # all else in the generation config is ignored
    eos = {tokenizer.eos_token_id, *(eos if isinstance(eos, list) else [eos])} - {None}
    eos_ids = torch.tensor(sorted(eos), device=accelerator.device)
    return Run(args, accelerator, policy, model, optimizer, scheduler, tokenizer, eos_ids, rewards)


def check_model(run: Run, prompt: list[int]) -> None:
    """Ends the run where our path is not the stock model's eager one, or no step can be made."""
    name, prompt, u = run.args.model_name_or_path, prompt[-24:], torch.full((2, 8), 0.5)
    endless = replace(run, eos_ids=run.eos_ids[:0])  # so that there are 8 tokens
    try:
        batch = sample(endless, torch.arange(2), [prompt, prompt[len(prompt) // 3 :]], u)
        gap = stock_gap(run, batch, run.policy(batch)[0])
        box = run.tokenizer.encode("\\boxed{7}", add_special_tokens=False)[-7:]  # for OAR
        batch.ids[:, -len(box) :], batch.loss_mask = torch.tensor(box), batch.mask
        batch.advantages = batch.rows + 1.0
        score(run, [batch], {})
        logps = (logp := training_forward(run, batch)), logp.detach()
        loss, _ = policy_loss(run.args, batch, *logps, batch.mask)
        assert loss.isfinite(), "the loss is not finite"
        loss.backward(), run.optimizer.zero_grad()
    except Exception as error:  # whatever a family's code raises
        if "memory" in str(error) or name == TINY_POLICY:  # which runs: see your CREDIT region
            raise
        fail(f"{name} does not run here: {type(error).__name__}: {error}")
    if not gap < (1e-3 if run.args.dtype == "float32" else 0.1):  # NaN is not
        fail(f"{name} is not supported: its log-probs here are {gap:.2g} nats off its own")


# ---- Checkpoints: all that training changes ------------------------------------------------------
def checkpoints(output_dir: str) -> list[Path]:
    """The whole ones, oldest first."""
    found = [p for p in Path(output_dir).glob("checkpoint-*") if p.name[11:].isdigit()]
    return sorted(found, key=lambda path: int(path.name[11:]))


def save_checkpoint(run: Run) -> None:
    """Writes <output_dir>/checkpoint-<step>; a folder of that name appears whole or not at all."""
    folder = Path(run.args.output_dir) / f"checkpoint-{run.step}"
    if run.accelerator.is_main_process and not folder.exists():
        partial = folder.with_name("partial-checkpoint")
        shutil.rmtree(partial, ignore_errors=True)
        adapter = {name: p.data for name, p in run.model.named_parameters() if p.requires_grad}
        state = {name: getattr(run, name) for name in ("step", "rollout", "groups")}
        state |= {"adapter": adapter, "optimizer": run.optimizer.state_dict()["state"]}
        base = run.model.get_input_embeddings().weight[:64, 0].tolist()
        state |= {"schedule": run.scheduler.last_epoch, "base": base}
        state["flags"] = asdict(run.args) | {"num_processes": run.accelerator.num_processes}
        try:
            run.model.save_pretrained(partial)  # for PEFT users
            torch.save(state, partial / "state.pt")
            os.sync()  # on the disk before it has its name
            partial.rename(folder)
        except Exception as error:  # a full disk, which torch and safetensors call what they like
            shutil.rmtree(partial, ignore_errors=True)
            last = checkpoints(run.args.output_dir)[-1:] or ["none before it"]
            raise OSError(f"cannot save {folder} ({error}); whole is {last[0]}") from error
        for old in checkpoints(run.args.output_dir)[: -(run.args.save_total_limit or sys.maxsize)]:
            shutil.rmtree(old.rename(partial))  # half a folder must not have the name of a whole
    run.accelerator.wait_for_everyone()


def resume(run: Run) -> None:
    """Makes the run what it was when --resume_from_checkpoint was written, if that is given."""
    asked, existing = run.args.resume_from_checkpoint, checkpoints(run.args.output_dir)
    if existing and asked != "latest" and Path(asked or "").resolve() != existing[-1].resolve():
        fail(f"{existing[-1]} exists: add --resume_from_checkpoint latest, or change --output_dir")
    if not existing and Path(run.args.output_dir, "summary.json").exists():
        fail(f"{run.args.output_dir} holds a finished run: remove it, or change --output_dir")
    if asked is None or (asked == "latest" and not existing):
        return asked and say(f"no checkpoint in {run.args.output_dir}: begins at step 0")
    folder = existing[-1] if asked == "latest" else asked
    trained = sorted(name for name, p in run.model.named_parameters() if p.requires_grad)
    try:
        if damaged := zipfile.ZipFile(f"{folder}/state.pt").testzip():  # torch does not look
            raise ValueError(f"{damaged} is damaged")
        state = torch.load(f"{folder}/state.pt", map_location="cpu", weights_only=True)
        base = run.model.get_input_embeddings().weight[:64, 0].tolist()
        if sorted(state["adapter"]) != trained or state["base"] != base:
            raise ValueError("it is of another model, or of other layers")
        run.model.load_state_dict(state["adapter"], strict=False)
        # Learning rate and weight decay are those of the flags.
        run.optimizer.load_state_dict(run.optimizer.state_dict() | {"state": state["optimizer"]})
        for _ in range(state["schedule"] - run.scheduler.last_epoch):
            run.scheduler.step()
        run.step, run.rollout = int(state["step"]), int(state["rollout"])
        run.groups, flags = list(state["groups"]), dict(state["flags"])
        if run.step > run.args.max_steps:
            raise ValueError("it is past --max_steps, raise that")
    except Exception as error:  # a broken file raises what it likes
        fail(f"cannot resume from {folder}: {error!r} (if it is damaged, delete it)")
    now = asdict(run.args) | {"num_processes": run.accelerator.num_processes}
    may_differ = "output_dir resume_from_checkpoint save_steps save_total_limit report_to run_name"
    for name in flags.keys() - may_differ.split():
        if flags[name] != now.get(name):
            say(f"--{name} was {flags[name]} before, now it is {now.get(name)}")


# ---- Command line --------------------------------------------------------------------------------
def say(message: object) -> None:
    """Prints on standard error, above the progress bar, on the main process."""
    if int(os.environ.get("RANK", "0")) == 0:
        with contextlib.suppress(OSError):  # nobody may be listening
            tqdm.write(" ".join(f"{SCRIPT.name}: {message}"[:600].split()), file=sys.stderr)


def fail(message: object) -> None:
    """Ends the run for a user's mistake: one sentence, no stack, exit code 2."""
    say(f"error: {message}")
    sys.exit(2)


def parse_args(argv: list[str] | None = None) -> Args:
    """The flags, checked as far as they can be without a model or data."""
    show = argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter
    how = {"formatter_class": type("Help", show, {}), "usage": "%(prog)s [flags]"}
    pairs = "Of a pair of defaults the first is the embedded policies', the second any other's."
    parser = transformers.HfArgumentParser(Args, description=__doc__, epilog=pairs, **how)
    parser.error, parser.allow_abbrev = fail, False  # argparse would print the whole usage first
    args, unknown = parser.parse_args_into_dataclasses(argv, return_remaining_strings=True)
    if unknown:
        fail(f"unknown flag {unknown[0]}: see --help (num_train_epochs: max_steps; bf16: dtype)")
    embedded = Path(args.model_name_or_path).resolve().parent == Path(TINY_POLICY).parent
    for name, place in ((f.name, f.metadata.get("metavar", "(-inf, inf)")) for f in fields(args)):
        if isinstance(value := getattr(args, name), tuple):
            setattr(args, name, value := value[0 if embedded else 1])
        low, high = map(float, place[1:-1].split(","))
        if type(value) in (int, float) and not low < value < high:  # NaN is nowhere
            if (value, place[0]) != (low, "[") and (value, place[-1]) != (high, "]"):
                fail(f"--{name} {value} is out of range: it must lie in {place}")
    args.steps_per_generation = args.steps_per_generation or args.gradient_accumulation_steps
    args.epsilon_high = args.epsilon if args.epsilon_high is None else args.epsilon_high
    args.output_dir = args.output_dir or f"runs/{SCRIPT.stem}-{args.credit}-{args.seed}"
    args.run_name = args.run_name or Path(args.output_dir).name
    total = args.per_device_train_batch_size * args.steps_per_generation
    total *= int(os.environ.get("WORLD_SIZE", "1"))
    if args.steps_per_generation % args.gradient_accumulation_steps:
        fail("--steps_per_generation must be a multiple of --gradient_accumulation_steps")
    if total % args.num_generations:
        rollout = "(--per_device_train_batch_size x --steps_per_generation x processes)"
        fail(f"--num_generations must divide the rollout of {total} completions {rollout}")
    if args.report_to != "none" and importlib.util.find_spec(args.report_to) is None:
        fail(f"--report_to {args.report_to} needs: pip install {args.report_to}")
    engines = [name for name in ENGINES if os.environ.get(f"ACCELERATE_USE_{name}") == "true"]
    engines += [os.environ.get("PJRT_DEVICE"), os.environ.get("ACCELERATE_MIXED_PRECISION")]
    if wrong := [name for name in engines if name not in (None, "", "no", "bf16")]:
        fail(f"cannot run with {wrong[0]}: launch it on one device, or with DDP (--multi_gpu)")
    return args


def use_every_core() -> None:
    """`accelerate launch` sets OMP_NUM_THREADS=1 on a CPU machine where the user had not set it."""
    given = Path(f"/proc/{LAUNCHER}/environ").read_text(errors="replace")  # when it was started
    if "OMP_NUM_THREADS" not in given:  # each local process takes its share of the cores
        cores = len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        torch.set_num_threads(max(1, cores))


def run_to_the_end(args: Args) -> None:
    tokenizer, train_set, held_out = load_data(args)
    (Path(args.output_dir) / "adapter").mkdir(parents=True, exist_ok=True)
    run = build_run(args, tokenizer)
    say(introduction(asdict(args), train_set[0], held_out[0], run.accelerator.num_processes))
    check_model(run, train_set[1][0])
    seen, say_so = run.signals, b"\nsaving after this rollout, then ending; again: ending at once\n"
    first = lambda n: (seen.append(n), os.write(2, say_so))  # noqa: E731  it may cut a print
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda n, _: os._exit(128 + n) if seen else first(n))
    resume(run)
    log = start_log(run.accelerator, asdict(args), run.step)
    quiet = not run.accelerator.is_main_process
    with run.grader, tqdm(total=args.max_steps, initial=run.step, disable=quiet) as bar:
        finished = train(run, train_set, held_out, log, bar)
    if finished and not quiet:
        run.model.save_pretrained(Path(args.output_dir) / "adapter")
        print(report_run(asdict(args), log, run.groups))
    elif not quiet:
        command = Path(f"/proc/{LAUNCHER}/cmdline").read_text().split("\0")[:-1]
        again = shlex.join([*command, "--resume_from_checkpoint", "latest"])  # the last counts
        print(f"interrupted, saved {checkpoints(args.output_dir)[-1]}; go on with\n{again}")
    run.accelerator.wait_for_everyone()  # nobody closes the group while another still writes
    run.accelerator.end_training()


def main() -> None:
    args = parse_args()
    transformers.logging.set_verbosity_error(), transformers.logging.disable_progress_bar()
    warnings.filterwarnings("ignore", ".*gradient_checkpointing")  # peft's to transformers
    use_every_core()
    try:
        run_to_the_end(args)
    except (DataError, RewardError, SafetensorError, OSError) as error:
        fail(error)
    except RuntimeError as error:
        if "memory" not in str(error):  # a GPU's or this machine's
            raise
        smaller = "a smaller --per_device_train_batch_size, --rollout_weights quantized"
        fail(f"out of memory: in this order, try --gradient_checkpointing True, {smaller}")
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        sys.stdout.flush(), os._exit(0)  # gloo's threads may hang in their destructors


if __name__ == "__main__":
    main()
