"""GRPO with OAR token credit on a QLoRA policy, in one file.

    accelerate launch grpo_oar.py                         # embedded tiny policy and task, on a CPU
    accelerate launch grpo_oar.py --credit oar_p          # a forward for every token
    accelerate launch grpo_oar.py --credit uniform        # plain GRPO, the baseline
    accelerate launch grpo_oar.py --model_name_or_path Qwen/Qwen3-1.7B \\
        --dataset_name DigitalLearningGmbH/MATH-lighteval --max_completion_length 1024 ...
    python grpo_oar.py --help                             # every flag

OAR (Outcome-grounded Advantage Reshaping, arXiv 2601.07408) asks of every reasoning token how much
the final answer hangs on it. The policy reads prompt, reasoning and a conclude string that asks for
the answer again; p is its distribution of the answer there, at the sampling temperature.

    OAR-P   I_t = KL(p || p with token t replaced by the pad token)
    OAR-G   I_t = | <dJ / d embed_t, embed_t> |,  one backward for all t
            J   = KL(p || p with N(0, 1e-3^2) added to the reasoning's embeddings)
    n = minmax(log1p(I)),  tau = quantile(n, q)
    w_t = max(n_t / tau, floor) where n_t < tau, else 1 + beta * (n_t - tau) / (1 - tau)
    A_t = A_i * w_t * L / sum(w)                 so the mean over the L reasoning tokens is A_i

Scores and gating are those of the authors' code. What that leaves open is a reconstruction here:
the conclude string; the answer, which is the completion's own last non-empty \\boxed{}; and the
reasoning, every token before the box's content. Other tokens weigh 1, and so do all tokens of a
completion without an answer (no_answer_share) or with advantage 0, which is not scored.

Everything between the CREDIT marks is this method; everything else is the trainer, and is the same
to the byte in every grpo_*.py. Read `main` first, then upwards.
"""

import contextlib
import copy
import dataclasses
import errno
import hashlib
import importlib.util
import json
import logging
import math
import os
import shlex
import shutil
import signal
import sys
import time
import warnings
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple

# On a CPU with AVX512-BF16 its import would ask for a kernel that `load_policy` switches off.
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)

import psutil
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, gather_object, set_seed, tqdm
from peft import LoraConfig, get_peft_model
from peft.utils.integrations import dequantize_bnb_weight
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    DynamicCache,
    HfArgumentParser,
    StaticCache,
    get_scheduler,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask
from transformers.utils import logging as transformers_logging

from common.data import DataError, Problem, first_error, load_data, problem_at
from common.metrics import (
    RunLog,
    credit_group,
    eval_metrics,
    peak_memory_gb,
    rollout_metrics,
    write_report,
)
from common.reward import Grader

SCRIPT = Path(__file__).resolve()
OUT_OF_MEMORY = (
    "out of GPU memory: set --gradient_checkpointing True, then lower "
    "--per_device_train_batch_size (and raise --gradient_accumulation_steps as much), then set "
    "--rollout_weights adapter"
)


def flag(default, help: str):
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata={"help": help})
    return field(default=default, metadata={"help": help})


# --------------------------------------------------------------------------------------------------
# Flags: TRL's names and meanings where TRL has the thing
# --------------------------------------------------------------------------------------------------
@dataclass
class Args:
    # model
    model_name_or_path: str = flag(str(SCRIPT.parent / "common/tiny_policy"), "Hub id or folder")
    model_revision: str = flag("main", "branch, tag or commit of a Hub model")
    load_in_4bit: bool = flag(True, "quantise the base to NF4 with double quantisation")
    lora_r: int = flag(8, "rank of the adapter")
    lora_alpha: int = flag(16, "the adapter is scaled by lora_alpha / lora_r")
    lora_dropout: float = flag(0.0, "dropout before the adapter, in training forwards only")
    lora_target_modules: list[str] = flag(["all-linear"], "layers that get an adapter")
    # data
    dataset_name: str = flag("chain_arithmetic", "embedded task, Hub id, or .jsonl/.json/.parquet")
    dataset_config: str | None = flag(None, "configuration of a Hub data set")
    dataset_train_split: str = flag("train", "split to train on")
    dataset_test_split: str = flag("test", "split to evaluate on")
    eval_dataset_name: str | None = flag(None, "evaluate on this set instead of the test split")
    prompt_column: str | None = flag(None, "column of the problem, if not problem|question|prompt")
    answer_column: str | None = flag(None, "column of the gold answer, if not answer|solution")
    system_prompt: str | None = flag(None, "system message before every problem")
    chat_template_kwargs: str = flag("{}", 'JSON for the template: {"enable_thinking": false}')
    # rollout
    num_generations: int = flag(8, "completions per prompt: the group G")
    max_completion_length: int = flag(80, "longest completion in tokens")
    temperature: float = flag(1.0, "sampling temperature, also of the trained log-probs")
    top_p: float = flag(1.0, "sample from the smallest set of tokens with this mass; 1 is off")
    top_k: int = flag(0, "sample from this many likeliest tokens; 0 is off")
    rollout_weights: Literal["auto", "merged", "adapter"] = flag(
        "auto", "sample through a dense copy of NF4 + LoRA (faster) | the adapter (no extra memory)"
    )
    # batch: prompts a step = batch size * accumulation * processes / num_generations
    per_device_train_batch_size: int = flag(32, "completions per process and micro-batch")
    gradient_accumulation_steps: int = flag(4, "micro-batches per update")
    steps_per_generation: int | None = flag(
        None, "micro-batches per rollout; default gradient_accumulation_steps: one update"
    )
    num_iterations: int = flag(1, "times each rollout is trained on (mu)")
    max_tokens_per_micro_batch: int | None = flag(
        None, "rows x length of a micro-batch, instead of per_device_train_batch_size rows"
    )
    gradient_checkpointing: bool = flag(False, "recompute activations in backward: less memory")
    torch_compile: bool = flag(False, "compile decoder layers: minutes of warm-up, faster steps")
    # objective
    loss_type: Literal["grpo", "dapo", "dr_grpo"] = flag(
        "grpo", "token mean per completion | over the global batch | per max_completion_length"
    )
    scale_rewards: Literal["group", "batch", "none"] = flag("group", "std the advantage is over")
    epsilon: float = flag(0.2, "the ratio is clipped below 1 - epsilon")
    epsilon_high: float | None = flag(None, "and above 1 + epsilon_high; default epsilon")
    beta: float = flag(0.0, "weight of the k3 KL to the base (adapter disabled)")
    mask_truncated_completions: bool = flag(False, "leave unfinished completions out of the loss")
    # === CREDIT ===
    credit: Literal["oar_g", "oar_p", "uniform", "random", "shuffled"] = flag(
        "oar_g", "OAR by gradient | by perturbation | plain GRPO | controls with OAR-G's weights"
    )
    oar_quantile: float = flag(0.25, "q: scores below this quantile of a completion are damped")
    oar_beta: float = flag(1.0, "what the largest score adds to a weight of 1")
    oar_floor: float = flag(0.1, "the smallest weight, before the mass is kept")
    oar_keep_mass: bool = flag(True, "scale the weights to mean 1 over the reasoning")
    oar_answer_mode: Literal["auto", "last", "answer_mean", "answer_joint"] = flag(
        "auto",
        "compare the first answer token's distribution (auto of oar_p) | the softmax of the mean "
        "logits of the answer's tokens (auto of oar_g) | their mean log-prob",
    )
    oar_noise_std: float = flag(1e-3, "OAR-G: std of the noise on the reasoning's embeddings")
    oar_conclude: str = flag("\nThe final answer is \\boxed{", "asks for the answer again")
    oar_max_tokens_per_micro_batch: int = flag(16384, "OAR-P: rows x length of one forward")

    def __post_init__(self):
        if not (0 <= self.oar_quantile <= 1 and 0 <= self.oar_floor <= 1 and self.oar_beta >= 0):
            fail("--oar_quantile and --oar_floor must be between 0 and 1, --oar_beta at least 0")
        if min(self.oar_noise_std, self.oar_max_tokens_per_micro_batch) <= 0:
            fail("--oar_noise_std and --oar_max_tokens_per_micro_batch must be above 0")
        if self.oar_answer_mode == "auto":
            self.oar_answer_mode = "last" if self.credit == "oar_p" else "answer_mean"

    # === END CREDIT ===
    # optimiser
    learning_rate: float = flag(4e-3, "AdamW's peak (LoRA wants 10-100x full fine-tuning's)")
    weight_decay: float = flag(0.0, "AdamW's weight decay")
    warmup_steps: int = flag(3, "steps of linear warm-up")
    lr_scheduler_type: Literal["cosine", "linear", "constant", "constant_with_warmup"] = flag(
        "cosine", "after the warm-up (which constant has not)"
    )
    max_grad_norm: float = flag(1.0, "gradients are clipped to this norm; 0 is off")
    max_steps: int = flag(45, "updates; 0 evaluates and stops")
    seed: int = flag(1, "of the adapter, the data order and every sample")
    # evaluation and output
    eval_steps: int = flag(25, "evaluate every so many updates; 0: before and after only")
    max_eval_samples: int = flag(200, "held-out problems")
    num_generations_eval: int = flag(4, "samples per held-out problem")
    per_device_eval_batch_size: int = flag(200, "completions generated at once in evaluation")
    output_dir: str | None = flag(None, "default runs/<script>-<credit>-<seed>")
    save_steps: int = flag(500, "save a checkpoint every so many updates; 0: only when interrupted")
    save_total_limit: int | None = flag(None, "keep this many checkpoints, the latest")
    resume_from_checkpoint: str | None = flag(
        None, "folder of a checkpoint, or latest: that of output_dir, from the start if it has none"
    )
    report_to: Literal["none", "tensorboard", "wandb", "trackio"] = flag("none", "a tracker")


POSITIVE = (
    "max_completion_length per_device_train_batch_size gradient_accumulation_steps temperature "
    "top_p epsilon num_iterations max_eval_samples num_generations_eval lora_r learning_rate "
    "per_device_eval_batch_size steps_per_generation save_total_limit "
    "max_tokens_per_micro_batch lora_alpha"
).split()
NOT_NEGATIVE = (
    "max_steps seed top_k beta epsilon_high max_grad_norm weight_decay warmup_steps eval_steps "
    "save_steps"
).split()


def fail(message: str) -> None:
    """Ends the run for a user's mistake: one sentence, no stack, exit code 2."""
    if int(os.environ.get("RANK", 0)) == 0:
        print(f"{SCRIPT.name}: error:", *str(message).split(), file=sys.stderr, flush=True)
    sys.exit(2)


def parse_args(argv: list[str] | None = None) -> Args:
    """The flags, checked as far as they can be without a model or data."""
    parser = HfArgumentParser(Args, description=__doc__)
    parser.error = fail  # argparse would print the whole usage first
    args, unknown = parser.parse_args_into_dataclasses(argv, return_remaining_strings=True)
    if unknown:
        fail(f"unknown flag {unknown[0]}: --help lists all")
    args.steps_per_generation = args.steps_per_generation or args.gradient_accumulation_steps
    args.epsilon_high = args.epsilon if args.epsilon_high is None else args.epsilon_high
    args.output_dir = args.output_dir or f"runs/{SCRIPT.stem}-{args.credit}-{args.seed}"
    world = int(os.environ.get("WORLD_SIZE", 1))
    total = args.per_device_train_batch_size * args.steps_per_generation * world
    try:
        template_is_object = isinstance(json.loads(args.chat_template_kwargs), dict)
    except ValueError:
        template_is_object = False
    given = {name: value for name, value in vars(args).items() if value is not None}
    wrong = {f"--{name} must be above 0": not given.get(name, 1) > 0 for name in POSITIVE}
    wrong |= {f"--{name} must be 0 or more": not getattr(args, name) >= 0 for name in NOT_NEGATIVE}
    wrong |= {
        "--top_p must be at most 1": args.top_p > 1,
        "--temperature must be at least 1e-6": 0 < args.temperature < 1e-6,
        "--seed must be below 2^32": args.seed >= 2**32,
        "--lora_dropout must be at least 0 and below 1": not 0 <= args.lora_dropout < 1,
        "--num_generations must be at least 2: a group of one has no advantage":
            args.num_generations < 2,
        "--steps_per_generation must be a multiple of --gradient_accumulation_steps":
            args.steps_per_generation % max(args.gradient_accumulation_steps, 1),
        f"--num_generations {args.num_generations} must divide the rollout of {total} completions "
        "(--per_device_train_batch_size x --steps_per_generation x processes)":
            total % max(args.num_generations, 1),
        f"--report_to {args.report_to} needs: pip install {args.report_to}":
            args.report_to != "none" and importlib.util.find_spec(args.report_to) is None,
        '--chat_template_kwargs must be JSON such as {"enable_thinking": false}':
            not template_is_object,
    }  # fmt: skip
    numbers = {name: value for name, value in vars(args).items() if isinstance(value, float)}
    wrong |= {f"--{name} must be finite": not math.isfinite(x) for name, x in numbers.items()}
    for message in (message for message, is_wrong in wrong.items() if is_wrong):
        fail(message)
    return args


# --------------------------------------------------------------------------------------------------
# Rollout: our own decode loop over a static KV cache
# --------------------------------------------------------------------------------------------------
def random_stream(*key: object) -> torch.Generator:
    """A generator that depends on `key` alone: no state to save, the same on every machine."""
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "big") >> 1)


def sample_tokens(
    logits: Tensor, u: Tensor, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Inverse-CDF sampling: a pure function of logits [B, V] and one uniform in [0, 1) a row [B].

    Returns:
        token [B] and its log-prob [B] at this temperature, before top_k and top_p, as trained.
        Temperature 0 is greedy.
    """
    logits, size = logits.float(), logits.shape[1]
    if temperature == 0:
        return logits.argmax(-1), logits.log_softmax(-1).amax(-1)
    probs = (logits / temperature).softmax(-1)  # [B, V]
    u, kept, first = u[:, None], probs, 0
    if top_k > 0 or top_p < 1:
        ordered, index = probs.topk(min(top_k or size, size))
        ordered = ordered / ordered.sum(-1, keepdim=True)
        mass_before = ordered.cumsum(-1) - ordered
        kept = torch.zeros_like(probs).scatter(1, index, ordered * (mass_before < top_p))
    if size > 4096:  # first which 128 tokens: a scan over a whole vocabulary is slow on a GPU
        kept = (F.pad(kept, (0, -size % 128)) if size % 128 else kept).unflatten(1, (-1, 128))
        block, u = draw(kept.sum(-1), u)
        kept, first = torch.take_along_dim(kept, block[:, :, None], 1).squeeze(1), 128 * block
    token = (first + draw(kept, u)[0]).clamp(max=size - 1)  # the clamp is for NaN
    return token.squeeze(1), probs.gather(1, token).log().squeeze(1)


def draw(mass: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """The place [B, 1] where the cumulated mass [B, N] passes the share u [B, 1] of it all, and
    which share of the mass at that place lies below."""
    cdf = mass.cumsum(-1)
    total = cdf[:, -1:]
    # Strictly below the total, or rounding would let u near 1 pick an impossible last place.
    threshold = torch.minimum(u * total, torch.nextafter(total, torch.zeros_like(total)))
    place = torch.searchsorted(cdf, threshold, right=True).clamp(max=mass.shape[1] - 1)
    here = mass.gather(1, place)
    return place, ((threshold - cdf.gather(1, place) + here) / here).clamp(0, 1)


class Completions(NamedTuple):
    ids: Tensor  # [B, P + T]: prompts left-padded, completions right-padded
    attention: Tensor  # [B, P + T] bool: real tokens, each completion's stop token included
    prompt_width: int  # P
    stopped: Tensor  # [B] bool: ended by a stop token, not by the length limit
    logp: Tensor  # [B, T]: of each sampled token, 0 after the end

    def texts(self, tokenizer) -> list[str]:
        lengths = self.attention[:, self.prompt_width :].sum(1).tolist()
        rows = zip(self.ids[:, self.prompt_width :].tolist(), lengths, strict=True)
        return tokenizer.batch_decode([ids[:n] for ids, n in rows], skip_special_tokens=True)


def grouped_attention(module, query: Tensor, key: Tensor, value: Tensor, mask, **options):
    """Attention [B, heads, queries, D] for transformers. With one query a row, the heads that share
    a key and value head stand in for queries, so that no head needs a copy of the cache."""
    if (past := getattr(module, "past", None)) is not None:
        keys, values, lines = past
        key, value = torch.cat((keys[lines], key), 2), torch.cat((values[lines], value), 2)
    if query.shape[2] > 1:
        return sdpa_attention_forward(module, query, key, value, mask, **options)
    groups = query.view(len(query), key.shape[1], -1, query.shape[3])
    scale = options.get("scaling")
    out = F.scaled_dot_product_attention(groups, key, value, attn_mask=mask, scale=scale)
    return out.reshape(len(query), 1, query.shape[1], -1), None


AttentionInterface.register("grouped", grouped_attention)
AttentionMaskInterface.register("grouped", sdpa_mask)


@contextlib.contextmanager
def seeing(model: torch.nn.Module, cache: DynamicCache, lines: Tensor):
    """Inside it, row b of a forward also sees the keys and values of line lines[b] of the cache.

    They lie in the modules: transformers takes no cache where layers are computed again in
    backward, and compiled layers, each with its number in a cache, would share no graph.
    """
    layers = [module for module in model.modules() if hasattr(module, "layer_idx")]
    for module in layers:
        layer = cache.layers[module.layer_idx]
        module.past = (layer.keys, layer.values, lines)
    try:
        yield
    finally:
        for module in layers:
            module.past = None


class RMSNorm(torch.nn.Module):
    """torch's own norm, one kernel on a GPU where transformers takes eight. It sums in fp32, too;
    autocast would only make a copy of x for that."""

    def __init__(self, norm: torch.nn.Module):
        super().__init__()
        self.weight, self.eps = norm.weight, norm.variance_epsilon

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            return F.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), self.eps)


def fuse_norms(model: torch.nn.Module) -> None:
    """Norms as Llama's and Qwen's; those of other models, such as Gemma's, stay as they are."""
    for name, module in list(model.named_modules()):
        if type(module).__name__.endswith("RMSNorm") and hasattr(module, "variance_epsilon"):
            model.set_submodule(name, RMSNorm(module))


def different_prompts(prompts: list[list[int]], device) -> tuple[Tensor, Tensor]:
    """Places [U] of all the different ones among B prompts, and which of those each is [B]."""
    line_of: dict[tuple, int] = {}
    lines = [line_of.setdefault(tuple(prompt), len(line_of)) for prompt in prompts]
    places = [lines.index(line) for line in line_of.values()]
    return torch.tensor(places, device=device), torch.tensor(lines, device=device)


class Decoder:
    """Samples up to `length` tokens for each of `batch` prompts of up to `width`.

    Every token runs the same `step` on the same buffers, without a word from the host; on a GPU it
    is captured as a CUDA graph, once for each number of lines and of columns in use. Masks come
    from lengths, never from token ids: a pad token may be a stop token.
    """

    def __init__(self, model, eos_ids: Tensor, pad_id: int, shape: tuple[int, int, int], sampling):
        self.model, self.eos_ids, self.pad_id, self.sampling = model, eos_ids, pad_id, sampling
        batch, self.width, self.length = shape
        self.capture = eos_ids.device.type == "cuda"
        unit = 64 if self.capture else 8  # what the attention kernels like
        self.columns = -(-(self.width + self.length) // unit) * unit
        self.block = -(-self.columns // (8 * unit)) * unit  # attention is over whole blocks
        whole = self.columns + 8  # a view of all would be contiguous, so compiled once more

        def buffer(*shape: int, dtype=torch.long) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=eos_ids.device)

        # The results, a line for each completion
        self.ids, self.logp = buffer(batch, whole), buffer(batch, self.length, dtype=torch.float)
        self.lengths, self.stopped = buffer(batch), buffer(batch, dtype=torch.bool)
        # Those in progress: the first n lines, of which `done` ones only fill up the number
        self.place, self.done = buffer(batch), buffer(batch, dtype=torch.bool)
        self.token, self.position, self.t = buffer(batch, 1), buffer(batch, 1), buffer(1)
        self.u = buffer(batch, self.length, dtype=torch.float)
        self.mask = buffer(batch, 1, 1, whole, dtype=model.dtype)
        self.cache = StaticCache(config=model.config, max_cache_len=whole)
        if min(getattr(layer, "max_cache_len", whole) for layer in self.cache.layers) < whole:
            fail(f"the model attends to fewer than {whole} tokens: lower --max_completion_length")
        self.memory, self.size, self.address = None, 0, 0  # of keys and values
        self.graphs: dict[tuple[int, int], torch.cuda.CUDAGraph] = {}
        self.eager_steps: Counter = Counter()

    def part(self, n: int, end: int) -> StaticCache:
        """The first n lines and `end` columns of the cache, not a copy."""
        part = copy.copy(self.cache)
        part.layers = [copy.copy(layer) for layer in self.cache.layers]
        for layer in part.layers:
            layer.keys, layer.values = layer.keys[:n, :, :end], layer.values[:n, :, :end]
            for view in (layer.keys, layer.values):
                torch._dynamo.maybe_mark_dynamic(view, 2)  # not compiled for each `end`
        return part

    def emit(self, n: int, logits: Tensor) -> None:
        """Samples a token from the logits [n, V] and makes the buffers ready for the next one."""
        place, done, t = self.place[:n], self.done[:n], self.t
        u = self.u[:n].index_select(1, t).squeeze(1)
        new, logp = sample_tokens(logits, u, **self.sampling)
        new = torch.where(done, self.pad_id, new)
        self.ids.index_put_((place, t + self.width), new)
        self.logp.index_put_((place, t), torch.where(done, 0.0, logp))
        self.lengths.index_add_(0, place, (~done).long())
        done.logical_or_((new[:, None] == self.eos_ids).any(1))
        self.stopped.index_copy_(0, place, done)
        self.token[:n].copy_(new[:, None])
        self.position[:n].add_(1)
        self.mask[:n].index_fill_(3, t + self.width, 0)
        t.add_(1)

    def step(self, n: int, end: int) -> None:
        mask = self.mask[:n, ..., :end]
        torch._dynamo.maybe_mark_dynamic(mask, 3)
        inputs = {"attention_mask": mask, "position_ids": self.position[:n]}
        inputs |= {"past_key_values": self.part(n, end), "use_cache": True}
        self.emit(n, self.model(input_ids=self.token[:n], **inputs).logits[:, -1])

    def captured_step(self, *key: int) -> None:
        """`step` as a graph, after three eager ones that warm up what must not be captured."""
        if key not in self.graphs and self.eager_steps[key] < 3:
            self.eager_steps[key] += 1
            return self.step(*key)
        if key not in self.graphs:
            self.graphs[key] = torch.cuda.CUDAGraph()
            pool = next(iter(self.graphs.values())).pool() if len(self.graphs) > 1 else None
            with torch.cuda.graph(self.graphs[key], pool=pool):  # records, runs nothing
                self.step(*key)
        self.graphs[key].replay()

    def start(self, prompts: list[list[int]], u: Tensor) -> None:
        """Fills the buffers, reads each different prompt once and samples the first tokens."""
        device, width = u.device, self.width
        rows = [[self.pad_id] * (width - len(prompt)) + prompt for prompt in prompts]
        lengths = torch.tensor([[len(prompt)] for prompt in prompts], device=device)
        real = torch.arange(width, device=device) >= width - lengths  # [B, P]
        positions = (real.long().cumsum(1) - 1).clamp(min=0)
        low = torch.finfo(self.model.dtype).min  # not -inf: a row that sees nothing becomes no NaN
        for buffer in (self.logp, self.lengths, self.done, self.t):
            buffer.zero_()
        self.ids.fill_(self.pad_id)[:, :width] = torch.tensor(rows, device=device)
        self.u.copy_(u)
        self.place.copy_(torch.arange(len(prompts), device=device))
        self.position.copy_(positions[:, -1:])
        self.mask.fill_(low)[:, 0, 0, :width].masked_fill_(real, 0)
        lines, copies = different_prompts(prompts, device)
        causal = self.mask.new_full((width, width), low).triu(1)
        mask, read = torch.minimum(self.mask[lines, ..., :width], causal), DynamicCache()
        inputs = {"attention_mask": mask, "position_ids": positions[lines]}
        inputs |= {"past_key_values": read, "use_cache": True, "logits_to_keep": 1}
        if self.size > 0:  # before the forward, which might take a part of its place
            self.claim()
        with torch.compiler.set_stance("force_eager"):  # it runs once; only steps are compiled
            out = self.model(input_ids=self.ids[lines, :width], **inputs)
        found = [x for layer in read.layers for x in (layer.keys, layer.values)]
        shapes = [(len(prompts), x.shape[1], self.mask.shape[3], x.shape[3]) for x in found]
        sizes = [math.prod(shape) for shape in shapes]
        if self.size == 0:
            self.size, self.dtype = sum(sizes), found[0].dtype
            self.claim()
        parts = self.memory.split(sizes)
        parts = [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]
        for i, layer in enumerate(self.cache.layers):
            layer.keys, layer.values = parts[2 * i : 2 * i + 2]
            layer.device, layer.is_initialized = device, True
            layer.cumulative_length = layer.cumulative_length.to(device)
            layer.reset()
            self.cache.update(found[2 * i][copies], found[2 * i + 1][copies], i)
        self.emit(len(prompts), out.logits[copies, -1])

    def claim(self) -> None:
        """Takes the memory for keys and values. Graphs stay good as long as it is in one place."""
        if self.memory is None:
            self.memory = torch.empty(self.size, dtype=self.dtype, device=self.ids.device)
        if self.memory.data_ptr() != self.address:
            self.address = self.memory.data_ptr()
            self.graphs.clear()

    def release(self) -> None:
        """Gives it back between rollouts, for the training step, unless there is plenty."""
        if self.capture and 4 * self.memory.nbytes < torch.cuda.mem_get_info(self.ids.device)[0]:
            return
        self.memory = None
        for layer in self.cache.layers:
            layer.keys = layer.values = None

    def shrink(self, n: int, size: int, end: int) -> None:
        """Moves the lines in progress, among the first n, to the first `size`."""
        keep = self.done[:n].long().argsort(stable=True)[:size]
        buffers = [self.place, self.done, self.token, self.position, self.u, self.mask]
        for layer in self.part(n, end).layers:
            buffers += [layer.keys, layer.values]
        for buffer in buffers:
            buffer[:size] = buffer[keep]

    @torch.no_grad()
    def run(self, prompts: list[list[int]], u: Tensor) -> Completions:
        self.start(prompts, u)
        n, unit = len(prompts), -(-len(prompts) // 8)
        step = self.captured_step if self.capture else self.step
        for i in range(1, self.length):
            end = min(-(-(self.width + i) // self.block) * self.block, self.columns)
            if i % 8 == 0:  # a look every 8 tokens: each one waits for the device
                left = n - int(self.done[:n].sum())
                size = -(-left // unit) * unit
                if left == 0:
                    break
                if size <= 0.75 * n:  # else moving them costs more than it saves
                    self.shrink(n, size, end)
                    n = size
            step(n, end)
        self.release()
        longest = int(self.lengths.max())
        place = torch.arange(self.width + longest, device=u.device)
        padding = self.width - torch.tensor([[len(prompt)] for prompt in prompts], device=u.device)
        attention = (place >= padding) & (place < self.width + self.lengths[:, None])
        ids, logp = self.ids[:, : len(place)].clone(), self.logp[:, :longest].clone()
        return Completions(ids, attention, self.width, self.stopped.clone(), logp)


def generate(
    model,
    prompts: list[list[int]],
    u: Tensor,
    eos_ids: Tensor,
    pad_id: int,
    decoders=None,
    **sampling,
) -> Completions:
    """Samples a completion of up to T tokens for each prompt.

    Args:
        u: uniforms [B, T] on the model's device.
        decoders: those of earlier calls, for their captured graphs; None keeps none.
        sampling: temperature, top_k and top_p of `sample_tokens`.
    """
    cuda, width = u.device.type == "cuda", max(map(len, prompts))
    width = -(-width // 64) * 64 if cuda else width  # so that a new batch seldom needs a new graph
    key, kept = (*u.shape, *sampling.items()), decoders if cuda and decoders is not None else {}
    if key not in kept or kept[key].width < width:
        kept[key] = Decoder(model, eos_ids, pad_id, (len(u), width, u.shape[1]), sampling)
    return kept[key].run(prompts, u)


# --------------------------------------------------------------------------------------------------
# Policy: log-probabilities without ever building [B, T, vocabulary]
# --------------------------------------------------------------------------------------------------
class TokenStats(NamedTuple):
    logp: Tensor  # [B, T] of the completion's tokens, at the sampling temperature
    entropy: Tensor | None  # [B, T] nats, where it was asked for
    hidden: Tensor  # [B, T, H] after the final norm, at the position whose logits predict the token


class Policy(torch.nn.Module):
    """The module that Accelerate wraps, so that its engines see every training forward."""

    def __init__(self, model: torch.nn.Module, temperature: float):
        super().__init__()
        self.model, self.temperature = model, temperature

    def forward(
        self,
        ids: Tensor,
        attention: Tensor,
        prompt_width: int,
        with_entropy: bool = False,
        prompts: tuple[Tensor, Tensor] | None = None,
    ) -> TokenStats:
        """With `prompts`, from `different_prompts`, each is read only once, without gradient."""
        base, width = self.model.get_base_model(), prompt_width
        positions = (attention.long().cumsum(1) - 1).clamp(min=0)
        inputs = {"input_ids": ids, "attention_mask": attention.long(), "position_ids": positions}
        if prompts is None or ids.shape[1] < width + 2:
            hidden = base.base_model(**inputs, use_cache=False).last_hidden_state[:, width - 1 : -1]
        else:
            hidden = self.after_prompts(base.base_model, inputs, width, *prompts)
        targets, head = ids[:, width:], base.get_output_embeddings()
        chunk = max(1, 2**26 // head.weight.shape[0])  # tokens: 256 MiB of fp32 logits
        parts = zip(hidden.flatten(0, 1).split(chunk), targets.flatten().split(chunk))
        out = [checkpoint(self.stats, head, *x, with_entropy, use_reentrant=False) for x in parts]
        logp, *entropy = (torch.cat(values).view(targets.shape) for values in zip(*out))
        return TokenStats(logp, entropy[0] if with_entropy else None, hidden)

    def after_prompts(self, body, inputs: dict, width: int, rows: Tensor, lines: Tensor) -> Tensor:
        """Last hidden states [B, T, H] that predict the completions."""
        read, cache = {name: x[rows, :width] for name, x in inputs.items()}, DynamicCache()
        with torch.compiler.set_stance("force_eager"):  # with a cache each layer would be compiled
            start = body(**read, past_key_values=cache, use_cache=True).last_hidden_state
        rest = {name: x[:, width:-1] for name, x in inputs.items()}  # [B, T - 1]
        real = inputs["attention_mask"][:, None, :-1] > 0
        place = torch.arange(real.shape[2], device=real.device)
        rest["attention_mask"] = (real & (place <= place[width:, None]))[:, None]
        with seeing(body, cache, lines):
            after = body(**rest, use_cache=False).last_hidden_state
        return torch.cat((start[lines, -1:], after), 1)

    def stats(self, head, hidden: Tensor, targets: Tensor, with_entropy: bool) -> tuple:
        """Log-probs [N], and entropies [N] if asked for, of one chunk of hidden states [N, H]."""
        logits = head(hidden).float() / self.temperature  # [N, V]
        if not with_entropy:
            return (-F.cross_entropy(logits, targets, reduction="none"),)
        every = logits.log_softmax(-1)
        logp = every.gather(1, targets[:, None]).squeeze(1)
        return logp, -every.exp().mul_(every).sum(-1)


# --------------------------------------------------------------------------------------------------
# Batch: this process's rows of a rollout
# --------------------------------------------------------------------------------------------------
@dataclass
class Batch:
    rollout: int  # how many came before
    prompt_width: int  # P
    rows: Tensor  # [N] place of each completion in the whole rollout: prompt * G + sample
    ids: Tensor  # [N, P + T]
    attention: Tensor  # [N, P + T] bool
    truncated: Tensor  # [N] bool
    loss_mask: Tensor  # [N, T] bool: the tokens that are trained on
    sampled_logp: Tensor  # [N, T] as the decode loop saw them
    rewards: Tensor  # [N]
    advantages: Tensor | None = None  # [N]
    logp: Tensor | None = None  # [N, T] of the policy that sampled, recomputed
    base_logp: Tensor | None = None  # [N, T] with the adapter disabled
    entropy: Tensor | None = None  # [N, T] nats
    scores: Tensor | None = None  # [N, T] the credit signal, >= 0
    credit: Tensor | None = None  # [N, T] what the method's surrogate needs
    weights: Tensor | None = None  # [N, T] share of each token in the gradient, mean 1 a completion

    @property
    def mask(self) -> Tensor:
        """[N, T] bool: the completions, stop tokens included."""
        return self.attention[:, self.prompt_width :]

    def padded_prompts(self) -> list[list[int]]:
        """The prompts' tokens, -1 for padding."""
        return torch.where(self.attention, self.ids, -1)[:, : self.prompt_width].tolist()

    def select(self, index: Tensor) -> "Batch":
        """Rows `index`, without the padding that none of them needs."""
        used = self.attention[index].any(0).nonzero()
        first, end, part = int(used[0]), int(used[-1]) + 1, {}
        for name, value in vars(self).items():
            if isinstance(value, Tensor):
                value, whole = value[index], name in ("ids", "attention")
                columns = slice(first, end) if whole else slice(end - self.prompt_width)
                value = value[:, columns] if value.dim() == 2 else value
            part[name] = value
        return Batch(**part | {"prompt_width": self.prompt_width - first})

    def store(self, name: str, index: Tensor, value: Tensor) -> None:
        """Writes values [B, <= T] of rows `index`; outside the completions they are 0."""
        if getattr(self, name) is None:
            setattr(self, name, torch.zeros(self.mask.shape, device=value.device))
        mask = self.mask[index, : value.shape[1]]
        getattr(self, name)[index, : value.shape[1]] = torch.where(mask, value.float(), 0.0)


# === CREDIT ===
import bisect
import re

from torch.nn.utils.rnn import pad_sequence

from common.metrics import weight_stats
from common.reward import last_boxed


def needs_base(args: Args) -> bool:
    """OAR asks the policy alone."""
    return False


def answer_span(tokenizer, ids: list[int]) -> tuple[int, int] | None:
    """Tokens [begin, end) of a completion that hold its last boxed answer; None without one.

    Found in the sampled tokens, by bisection on decoded prefixes: the tokenizer might cut the text
    elsewhere, and a token of a byte-level one need not be whole characters.
    """

    def decode(count: int) -> str:
        return tokenizer.decode(ids[:count], skip_special_tokens=True)

    def tokens_for(chars: int, least: int) -> int:
        reached = lambda count: decode(count).startswith(text[:chars])  # noqa: E731
        return bisect.bisect_left(range(len(ids)), True, least, key=reached)

    text = decode(len(ids))
    box = last_boxed(text)
    if not (box and box.strip()):  # an empty box is no answer
        return None
    opening = r"\\boxed\s*\{(?=" + re.escape(box) + r"\})"
    start = [match.end() for match in re.finditer(opening, text)][-1]  # character
    begin = tokens_for(start, 0)
    begin -= len(decode(begin)) > start  # a token such as `{\` also begins the answer
    return begin, tokens_for(start + len(box), begin)


class Probe(NamedTuple):
    """What one completion's scores are computed on."""

    row: int  # in the micro-batch
    ids: Tensor  # [N] prompt, reasoning, conclude string, answer without its last token
    begin: int  # the reasoning is ids[begin:end]
    end: int
    answer: Tensor  # [A] what the last A positions predict; only the first token for `last`


def find_probes(run: "Run", micro: Batch) -> list[Probe]:
    """Probes of the rows that have an advantage to share and reasoning to share it among."""
    args, width, device = run.args, micro.prompt_width, micro.ids.device
    conclude = run.tokenizer.encode(args.oar_conclude, add_special_tokens=False)
    context = getattr(run.model.config, "max_position_embeddings", None) or sys.maxsize
    probes = []
    for row in micro.advantages.nonzero().flatten().tolist():
        prompt = micro.ids[row, :width][micro.attention[row, :width]].tolist()
        completion = micro.ids[row, width:][micro.mask[row]].tolist()
        begin, end = answer_span(run.tokenizer, completion) or (0, 0)
        answer = completion[begin : begin + 1 if args.oar_answer_mode == "last" else end]
        ids = prompt + completion[:begin] + conclude + answer[:-1]
        if 0 < begin and len(ids) <= context:
            ids, answer = torch.tensor(ids, device=device), torch.tensor(answer, device=device)
            probes.append(Probe(row, ids, len(prompt), len(prompt) + begin, answer))
    return probes


def policy_to_ask(run: "Run") -> torch.nn.Module:
    """The dense copy that rollouts use, where there is one, so that no weight is dequantised every
    time: since the rollout it is the same policy."""
    return run.dense or run.model.get_base_model()


def hidden_states(run: "Run", model: torch.nn.Module, **inputs) -> Tensor:
    """Last hidden states [B, N, H] of a causal language model, past Accelerate's wrapper."""
    with run.accelerator.autocast():
        return model.base_model(**inputs).last_hidden_state


def answer_logp(run: "Run", hidden: Tensor, answers: Tensor) -> Tensor:
    """Log-probs [R, V] of the answer from the hidden states [R, A, H] that predict its tokens
    [R, A] (-1: padding), or for answer_joint their mean [R, 1] over the answer's tokens.

    The mean logits are the logits of the mean state, as the head is linear. Float64, as OAR-G
    differentiates the small difference of two of these.
    """
    joint, head = run.args.oar_answer_mode == "answer_joint", run.model.get_output_embeddings()
    real = answers >= 0
    count = real.sum(1, keepdim=True)
    with run.accelerator.autocast():
        mean = (hidden * real[..., None]).sum(1) / count
        logits = head(hidden if joint else mean.to(hidden.dtype))
    logp = (logits.double() / run.args.temperature).log_softmax(-1)
    if not joint:
        return logp
    logp = logp.gather(2, answers.clamp(min=0)[..., None]).squeeze(2)  # [R, A]
    return (logp * real).sum(1, keepdim=True) / count


def right_aligned(probes: list[Probe]) -> Tensor:
    """The answers [B, A], -1 before the shorter ones."""
    longest = max(len(probe.answer) for probe in probes)
    return torch.stack([F.pad(p.answer, (longest - len(p.answer), 0), value=-1) for p in probes])


def outcome_shift(clean: Tensor, changed: Tensor) -> Tensor:
    """How far the answer moved [R]: KL of two `answer_logp`, or for answer_joint the drop."""
    shift = clean - changed
    return shift.squeeze(1) if clean.shape[1] == 1 else (clean.exp() * shift).sum(1)


def perturbation_scores(run: "Run", probes: list[Probe]) -> tuple[list[Tensor], int]:
    """OAR-P of several completions, [L] each, and the tokens computed.

    Padded on the left, all end in the same column. A forward replaces one column, in every
    completion that has a reasoning token there, and starts at it: the columns before it are in the
    clean cache. A few columns go together, at the cost of 1/32 more tokens at most.
    """
    model, device = policy_to_ask(run), probes[0].ids.device
    width = max(len(probe.ids) for probe in probes)
    starts = torch.tensor([width - len(probe.ids) for probe in probes], device=device)[:, None]
    bounds = torch.tensor([[probe.begin, probe.end] for probe in probes], device=device) + starts
    ids = torch.stack([F.pad(probe.ids, (width - len(probe.ids), 0)) for probe in probes])  # [B, N]
    columns = torch.arange(width, device=device)
    attention, positions = (columns >= starts).long(), (columns - starts).clamp(min=0)
    answers = right_aligned(probes)
    cache, last = DynamicCache(), answers.shape[1]

    def states(rows: Tensor, first: int, tokens: Tensor, cache: DynamicCache) -> Tensor:
        inputs = {"attention_mask": attention[rows], "position_ids": positions[rows, first:]}
        inputs |= {"input_ids": tokens, "past_key_values": cache, "use_cache": True}
        hidden = hidden_states(run, model, **inputs)[:, -last:]
        return F.pad(hidden, (0, 0, last - hidden.shape[1], 0))  # others' answers may be longer

    clean = answer_logp(run, states(torch.arange(len(ids)), 0, ids, cache), answers)
    scores, computed = torch.zeros(ids.shape, dtype=clean.dtype, device=device), ids.numel()
    most = max(1, run.args.oar_max_tokens_per_micro_batch // width)  # the cache counts as well
    column, end = bounds[:, 0].min(), bounds[:, 1].max()
    while column < end:
        span = max(1, min(int(width - column) // 16, most // len(ids)))
        block = columns[column : column + span]
        inside = (bounds[:, :1] <= block) & (block < bounds[:, 1:])  # [B, span]
        for rows, offsets in zip(*(x.split(most) for x in inside.nonzero(as_tuple=True))):
            tokens = ids[rows, column:]  # [R, N - column]
            tokens[torch.arange(len(rows)), offsets] = run.tokenizer.pad_token_id
            past = [[x[rows, :, :column] for x in (c.keys, c.values)] for c in cache.layers]
            hidden = states(rows, column, tokens, DynamicCache(past))
            changed = answer_logp(run, hidden, answers[rows])
            scores[rows, column + offsets] = outcome_shift(clean[rows], changed).clamp(min=0)
            computed += tokens.numel()
        column += span
    found = zip(scores, bounds.tolist(), strict=True)
    return [row[begin:end] for row, (begin, end) in found], computed


@contextlib.contextmanager
def checkpointing(model: torch.nn.Module, on: bool):
    """Gradient checkpointing: layers use it in training mode alone. Their children stay in
    evaluation mode, so nothing is dropped out."""
    if on:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    layers = [m for m in model.modules() if getattr(m, "gradient_checkpointing", False)]
    for layer in layers:
        layer.training = True
    try:
        yield
    finally:
        for layer in layers:
            layer.training = False


def embed(model: torch.nn.Module, rows: list[Tensor]) -> Tensor:
    """Embeddings [B, N, H] of token ids, padded on the right, where causal attention never looks;
    at least fp32, as bf16 would round the noise."""
    embeds = model.get_input_embeddings()(pad_sequence(rows, batch_first=True)).detach()
    return embeds.to(torch.promote_types(embeds.dtype, torch.float32))


def noise_like(run: "Run", micro: Batch, probes: list[Probe], embeds: Tensor) -> Tensor:
    """The reasoning's noise [B, N, H], a function of the row alone; 0 after it."""
    noise = torch.zeros_like(embeds)
    for i, (row, _, begin, end, _) in enumerate(probes):
        place = divmod(int(micro.rows[row]), run.args.num_generations)
        stream = random_stream(run.args.seed, "oar_noise", micro.rollout, *place)
        drawn = torch.randn(end - begin, embeds.shape[2], generator=stream)
        noise[i, : end - begin] = run.args.oar_noise_std * drawn.to(noise.device)
    return noise


@torch.no_grad()
def gradient_scores(run: "Run", micro: Batch, probes: list[Probe]) -> tuple[list[Tensor], int, int]:
    """OAR-G of several completions, [L] each, and the tokens computed forward and backward.

    A prompt is read once for its completions; what follows it is read clean and, as the gradient is
    0 without it, with noise. `autograd.grad` to the embeddings writes to no parameter's .grad and
    runs none of DDP's hooks.
    """
    model, device = policy_to_ask(run), micro.ids.device
    prompts, cache = [probe.ids[: probe.begin] for probe in probes], DynamicCache()
    places, lines = different_prompts([prompt.tolist() for prompt in prompts], device)
    read = embed(model, [prompts[place] for place in places.tolist()])  # [U, P, H]
    hidden_states(run, model, inputs_embeds=read, past_key_values=cache, use_cache=True)
    begins = torch.tensor([[probe.begin] for probe in probes], device=device)
    embeds, answers = embed(model, [p.ids[p.begin :] for p in probes]), right_aligned(probes)
    place = torch.arange(embeds.shape[1], device=device)  # [N]
    in_prompt = torch.arange(read.shape[1], device=device) < begins  # [B, P]
    causal = (place <= place[:, None]).expand(len(probes), -1, -1)  # [B, N, N]
    mask = torch.cat((in_prompt[:, None].expand(-1, len(place), -1), causal), 2)[:, None]
    lengths = torch.tensor([[len(probe.ids)] for probe in probes], device=device) - begins
    last = lengths + torch.arange(-answers.shape[1], 0, device=device)  # [B, A]

    def says(inputs: Tensor) -> Tensor:
        more = {"attention_mask": mask, "position_ids": begins + place}
        hidden = hidden_states(run, model, inputs_embeds=inputs, use_cache=False, **more)
        index = last.clamp(min=0)[..., None].expand(-1, -1, hidden.shape[2])
        return answer_logp(run, hidden.gather(1, index), answers)

    noisy = (embeds + noise_like(run, micro, probes, embeds)).requires_grad_()
    with seeing(model, cache, lines), checkpointing(model, run.args.gradient_checkpointing):
        clean = says(embeds)
        with torch.enable_grad():
            shift = outcome_shift(clean, says(noisy)).sum()
            (gradient,) = torch.autograd.grad(shift, noisy)
    saliency = (gradient * embeds).sum(-1).abs()  # [B, N]
    found = [row[: p.end - p.begin] for row, p in zip(saliency, probes, strict=True)]
    tokens = embeds[..., 0].numel()
    return found, read[..., 0].numel() + 2 * tokens, tokens


def token_scores(run: "Run", micro: Batch, adapted: TokenStats, base: TokenStats | None):
    """How much the answer hangs on each token [B, T], 0 where nothing is scored, and what that
    cost on all processes: completions scored, extra tokens forward and backward."""
    scores = torch.zeros_like(adapted.logp)
    if run.args.credit == "uniform":
        return scores + 1, {}
    probes, found, forward, backward = find_probes(run, micro), [], 0, 0
    if run.args.credit == "oar_p" and probes:
        found, forward = perturbation_scores(run, probes)
    elif probes:
        found, forward, backward = gradient_scores(run, micro, probes)
    for probe, values in zip(probes, found, strict=True):
        scores[probe.row, : len(values)] = values.to(scores.dtype)
    counts = torch.tensor([len(probes), forward, backward], device=scores.device).double()
    names = ("credit_completions", "credit_forward_tokens", "credit_backward_tokens")
    return scores, dict(zip(names, run.accelerator.reduce(counts, "sum").tolist(), strict=True))


def gate(args: Args, scores: Tensor, reasoning: Tensor) -> Tensor:
    """Scores >= 0 and the reasoning's mask, both [B, T], to weights [B, T]; 1 outside the mask.

    All-equal scores, as of a completion that was not scored, give 1.
    """
    logs = torch.log1p(scores.double())
    low = torch.where(reasoning, logs, torch.inf).amin(1, keepdim=True)
    span = torch.where(reasoning, logs, -torch.inf).amax(1, keepdim=True) - low
    n = (logs - low) / torch.where(span > 0, span, 1.0)
    tau = torch.where(reasoning, n, torch.nan).nanquantile(args.oar_quantile, 1, keepdim=True)
    damped = (n / tau).clamp(min=args.oar_floor)
    raised = 1 + args.oar_beta * (n - tau) / (1 - tau).clamp(min=1e-12)
    weights = torch.where(reasoning, torch.where(n < tau, damped, raised), 0.0)
    if args.oar_keep_mass:
        weights = weights * reasoning.sum(1, keepdim=True) / weights.sum(1, keepdim=True)
    return torch.where(reasoning, weights, 1.0).float()


def random_like(weights: Tensor, mask: Tensor, u: Tensor) -> Tensor:
    """Log-normal weights inside the mask, each row with the mean and the concentration (EffN/T) of
    that row of `weights`: bisection for sigma in exp(sigma * z), whose EffN/T falls with sigma."""
    target, z = weight_stats(weights, mask)["effn"], torch.special.ndtri(u.clamp(1e-6, 1 - 1e-6))
    low, high = torch.zeros_like(target), torch.full_like(target, 50.0)
    for _ in range(40):
        sigma = (low + high) / 2
        drawn = torch.where(mask, (sigma[:, None] * z).exp().clamp(max=1e30), 0.0)
        flatter = weight_stats(drawn, mask)["effn"] > target  # NaN (one token) counts as no
        low, high = torch.where(flatter, sigma, low), torch.where(flatter, high, sigma)
    drawn = drawn / drawn.sum(1, keepdim=True) * (weights * mask).sum(1, keepdim=True)
    return torch.where(mask & (target[:, None] < 1 - 1e-6), drawn, weights)


def assign_credit(run: "Run", batch: Batch) -> dict[str, float]:
    """Turns the scores of a rollout into its weights; returns the share without an answer."""
    args, mask = run.args, batch.mask
    batch.credit = batch.weights = mask.float()  # exactly 1: plain GRPO to the bit
    if args.credit == "uniform":
        return {}
    rows = zip(batch.ids[:, batch.prompt_width :], mask, strict=True)
    spans = [answer_span(run.tokenizer, ids[real].tolist()) for ids, real in rows]
    lengths = torch.tensor([span[0] if span else 0 for span in spans], device=mask.device)
    reasoning = torch.arange(mask.shape[1], device=mask.device) < lengths[:, None]
    weights = gate(args, batch.scores, reasoning)
    u = row_uniforms(args, "credit", batch.rollout, batch.rows, mask.shape[1]).to(mask.device)
    if args.credit == "random":
        weights = random_like(weights, reasoning, u)
    if args.credit == "shuffled":
        order = torch.where(reasoning, u, 2.0).argsort(dim=1, stable=True)  # the rest stays put
        weights = weights.gather(1, order)
    batch.credit = batch.weights = weights * mask
    counts = torch.tensor([spans.count(None), len(spans)], device=mask.device).double()
    missing, total = run.accelerator.reduce(counts, "sum").tolist()
    return {"no_answer_share": missing / total}


def surrogate_terms(args: Args, micro: Batch, log_ratio: Tensor) -> tuple[Tensor, Tensor]:
    """Log importance weight and advantage of every token, both [B, T]: here credit scales A."""
    return log_ratio, micro.advantages[:, None] * micro.credit


# === END CREDIT ===


# --------------------------------------------------------------------------------------------------
# Objective
# --------------------------------------------------------------------------------------------------
def group_advantages(rewards: Tensor, scale_rewards: str) -> Tensor:
    """Rewards [prompts, G] minus their group's mean, over the std of group | batch | nothing.

    The std is the unbiased one plus 1e-4, as in TRL. A constant group gets exactly 0.
    """
    centred = rewards - rewards.mean(1, keepdim=True)
    if scale_rewards == "group":
        centred = centred / (rewards.std(1, keepdim=True) + 1e-4)
    elif scale_rewards == "batch":
        centred = centred / (rewards.std() + 1e-4)
    constant = (rewards == rewards[:, :1]).all(1, keepdim=True)
    return centred.masked_fill(constant, 0.0)


def token_scale(args: Args, mask: Tensor, completions: float, tokens: float) -> Tensor:
    """What each token [B, T] counts for in the loss; `completions` and `tokens` are those of the
    whole update, over all micro-batches and processes, so that no split changes the gradient."""
    if args.loss_type == "grpo":
        return mask / mask.sum(1, keepdim=True).clamp(min=1) / completions
    if args.loss_type == "dapo":
        return mask / max(tokens, 1.0)
    return mask / (completions * args.max_completion_length)


def policy_loss(
    args: Args, micro: Batch, logp: Tensor, old_logp: Tensor, scale: Tensor
) -> tuple[Tensor, Tensor]:
    """The clipped surrogate (PPO, arXiv 1707.06347) of GRPO (2402.03300), summed with `scale`.

    Args:
        logp, old_logp, scale: [B, T]; only logp carries gradients.
    Returns:
        the loss, and which tokens are clipped [B, T].
    """
    log_ratio = torch.where(micro.mask, logp - old_logp, 0.0)  # padding must not overflow in exp
    log_weight, advantages = surrogate_terms(args, micro, log_ratio)
    ratio = log_weight.exp()
    clipped = ratio.clamp(1 - args.epsilon, 1 + args.epsilon_high)
    loss = -torch.min(ratio * advantages, clipped * advantages)
    if args.beta > 0:
        to_base = torch.where(micro.mask, micro.base_logp - logp, 0.0)
        loss = loss + args.beta * (to_base.exp() - to_base - 1)  # k3, joschu.net/blog/kl-approx
    clipped = torch.where(advantages > 0, ratio > 1 + args.epsilon_high, ratio < 1 - args.epsilon)
    return (loss * scale).sum(), clipped & (advantages != 0) & micro.mask


# --------------------------------------------------------------------------------------------------
# The steps of the loop
# --------------------------------------------------------------------------------------------------
class Interrupted(Exception):
    """Ends the loop, with a checkpoint; its text says why."""


class Run(NamedTuple):
    """What the steps of the loop share."""

    args: Args
    accelerator: Accelerator
    policy: torch.nn.Module  # as Accelerate wrapped it: training forwards go through it
    model: torch.nn.Module  # the PeftModel inside, for rollouts and the adapter switch
    optimizer: torch.optim.Optimizer
    scheduler: torch.optim.lr_scheduler.LRScheduler
    tokenizer: object
    eos_ids: Tensor
    grader: Grader
    dense: torch.nn.Module | None  # the copy that rollouts run on, if rollout_weights is merged
    decoders: dict  # with their captured graphs
    signals: list[int]  # SIGINT or SIGTERM, once received

    def check(self) -> None:
        """Raises Interrupted on all processes where one of them has received a signal."""
        received = torch.tensor(float(len(self.signals)), device=self.accelerator.device)
        if self.accelerator.reduce(received, "sum") > 0:
            raise Interrupted("interrupted")

    def sample(self, prompts: list[list[int]], u: Tensor, **sampling) -> Completions:
        model, eos, pad = self.dense, self.eos_ids, self.tokenizer.pad_token_id
        self.policy.eval()
        if model is None:
            model = self.model.get_base_model()
        else:
            merge(self.model, model)
        # A cache of cast adapter weights would be captured with the graph and never change again.
        cuda = {"device_type": "cuda", "dtype": torch.bfloat16, "cache_enabled": False}
        with torch.autocast(**cuda, enabled=eos.device.type == "cuda"):
            u = u.to(eos.device)
            return generate(model, prompts, u, eos, pad, self.decoders, **sampling)

    def grade(self, texts: list[str], problems: list[Problem]) -> list[float]:
        """1 for a right final answer, else 0. An embedded chain must get every step right as well:
        slips that cancel earn nothing."""
        verdicts = self.grader.grade(texts, [problem.answer for problem in problems])
        return [
            verdict * (not problem.steps or first_error(text, problem) is None)
            for verdict, text, problem in zip(verdicts, texts, problems, strict=True)
        ]


def clock(device: torch.device) -> float:
    """Seconds, with the device's work done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def row_uniforms(args: Args, kind: str, step: int, rows: Tensor, length: int) -> Tensor:
    """Uniforms [N, length]; row r is a function of (seed, kind, step, prompt, sample) alone."""
    keys = [divmod(row, args.num_generations) for row in rows.tolist()]
    streams = [random_stream(args.seed, kind, step, *key) for key in keys]
    return torch.stack([torch.rand(length, generator=stream) for stream in streams])


def collect(run: Run, rollout: int, problems: list[Problem], prompts: list[list[int]]):
    """Samples and grades this process's share of a rollout; the advantages see all of it.

    Returns:
        the batch, its texts and its problems.
    """
    args, accelerator = run.args, run.accelerator
    sampling = {k: getattr(args, k) for k in ("temperature", "top_k", "top_p")}
    updates = args.steps_per_generation // args.gradient_accumulation_steps
    world = accelerator.num_processes
    total = args.per_device_train_batch_size * args.steps_per_generation * world
    # Every update has the same completions on any number of processes.
    rows = torch.arange(total).view(updates, world, -1)[:, accelerator.process_index].flatten()
    first = rollout * (total // args.num_generations)
    groups = (rows // args.num_generations).tolist()
    chosen = [problem_at(first + group, len(problems), args.seed) for group in groups]
    u = row_uniforms(args, "rollout", rollout, rows, args.max_completion_length)
    out = run.sample([prompts[i] for i in chosen], u, **sampling)
    texts, problems = out.texts(run.tokenizer), [problems[i] for i in chosen]
    device, mask = out.ids.device, out.attention[:, out.prompt_width :]
    batch = Batch(
        rollout=rollout,
        prompt_width=out.prompt_width,
        rows=rows.to(device),
        ids=out.ids,
        attention=out.attention,
        truncated=~out.stopped,
        loss_mask=mask & out.stopped[:, None] if args.mask_truncated_completions else mask,
        sampled_logp=out.logp,
        rewards=torch.tensor(run.grade(texts, problems), device=device),
    )
    rewards = torch.empty(total, device=device)
    rewards[accelerator.gather(batch.rows)] = accelerator.gather(batch.rewards)
    advantages = group_advantages(rewards.view(-1, args.num_generations), args.scale_rewards)
    batch.advantages = advantages.flatten()[batch.rows]
    return batch, texts, problems


def update_rows(args: Args, batch: Batch) -> tuple[Tensor, ...]:
    """This process's rows of each update on a rollout."""
    size = args.per_device_train_batch_size * args.gradient_accumulation_steps
    return torch.arange(len(batch.rows), device=batch.rows.device).split(size)


def micro_batches(run: Run, batch: Batch, index: Tensor, count: int = 0) -> tuple[Tensor, ...]:
    """Rows `index`, like lengths together, in `count` parts (default: of the batch size), or where
    there is a token budget in as many as it takes on the process with the most: they go together.
    """
    args = run.args
    count = count or -(-len(index) // args.per_device_train_batch_size)
    real = batch.attention[index]
    index = index[real.sum(1).argsort(stable=True)]
    if args.max_tokens_per_micro_batch is None:
        return index.tensor_split(count)
    real = batch.attention[index]
    completions = real[:, batch.prompt_width :].sum(1)
    sides = torch.stack([real.sum(1) - completions, completions]).T.tolist()
    cuts, first = [], 0
    for end in range(2, len(sides) + 1):
        width = sum(max(lengths) for lengths in zip(*sides[first:end], strict=True))
        if (end - first) * width > args.max_tokens_per_micro_batch:
            first = end - 1
            cuts.append(first)
    parts = list(index.tensor_split(cuts))
    most = run.accelerator.gather(torch.tensor([len(parts)], device=index.device)).max()
    while len(parts) < most:
        i = max(range(len(parts)), key=lambda i: len(parts[i]))
        parts[i : i + 1] = parts[i].tensor_split(2)
    return tuple(parts)


def training_forward(run: Run, micro: Batch) -> Tensor:
    """Log-probs [B, T] in training mode. LoRA's dropout is seeded by the rows, so that a second
    pass over them, or a resumed run, drops the same."""
    stream = random_stream(run.args.seed, "dropout", micro.rollout, int(micro.rows[0]))
    torch.manual_seed(stream.initial_seed())
    run.policy.train()
    return run.policy(micro.ids, micro.attention, micro.prompt_width).logp


@torch.no_grad()
def score(run: Run, batch: Batch, one_update: bool) -> dict[str, float]:
    """Log-probs of the policy that sampled, of the base where needed, and the tokens' credit.

    One forward with the adapter and at most one without. Returns seconds and the method's metrics.
    """
    args, device, base = run.args, run.accelerator.device, None
    seconds, extra = {"seconds_score": 0.0, "seconds_credit": 0.0}, {}
    parts = [micro_batches(run, batch, rows) for rows in update_rows(args, batch)]
    for index in [index for part in parts for index in part]:
        run.check()
        micro, began = batch.select(index), clock(device)
        inputs = (micro.ids, micro.attention, micro.prompt_width)
        # With several updates the log-probs are an importance ratio's, and rounded as in training.
        prompts = different_prompts(micro.padded_prompts(), device) if one_update else None
        run.policy.eval()
        adapted = run.policy(*inputs, with_entropy=True, prompts=prompts)
        # With dropout on, the first update's ratio is 1 only if the old log-probs had it too.
        dropout = args.lora_dropout > 0 and not one_update
        batch.store("logp", index, training_forward(run, micro) if dropout else adapted.logp)
        batch.store("entropy", index, adapted.entropy)
        scored = clock(device)
        if args.beta > 0 or needs_base(args):
            run.policy.eval()
            with run.model.disable_adapter():
                base = run.policy(*inputs, prompts=prompts)
            batch.store("base_logp", index, base.logp)
        compared = clock(device) if not needs_base(args) else scored  # whose was the base pass?
        scores, more = token_scores(run, micro, adapted, base)
        batch.store("scores", index, scores)
        extra = {name: extra.get(name, 0.0) + value for name, value in more.items()}
        seconds["seconds_score"] += compared - began
        seconds["seconds_credit"] += clock(device) - compared
    began = clock(device)
    extra |= assign_credit(run, batch)
    seconds["seconds_credit"] += clock(device) - began
    return seconds | extra


def update(run: Run, batch: Batch, index: Tensor, one_update: bool) -> dict[str, float]:
    """One optimiser step on rows `index`, in micro-batches. Returns its metrics."""
    args, accelerator = run.args, run.accelerator
    began = clock(accelerator.device)
    counts = torch.stack([torch.ones_like(index).sum(), batch.loss_mask[index].sum()]).float()
    completions, tokens = accelerator.reduce(counts, "sum").tolist()
    totals = torch.zeros(3, device=index.device)
    parts = micro_batches(run, batch, index)
    if args.beta == 0 and (one_update or args.lora_dropout == 0):  # else dropout would differ
        # Rows of advantage 0 have no gradient; a few stay where a process has too few others.
        matters = batch.advantages[index] != 0
        useful = index[matters.argsort(descending=True, stable=True)]
        useful = useful[: max(len(parts), int(matters.sum()))]
        parts = micro_batches(run, batch, useful, len(parts))
    for i, part in enumerate(parts):
        run.check()
        micro = batch.select(part)
        scale = token_scale(args, micro.loss_mask, completions, tokens)
        waits = accelerator.no_sync(run.policy) if i + 1 < len(parts) else contextlib.nullcontext()
        with waits:
            logp = training_forward(run, micro)
            old_logp = logp.detach() if one_update else micro.logp
            loss, clipped = policy_loss(args, micro, logp, old_logp, scale)
            accelerator.backward(loss * accelerator.num_processes)  # DDP takes the mean
        totals += torch.stack([loss.detach(), clipped.sum(), clipped.any(1).sum()])
    limit = args.max_grad_norm or float("inf")
    grad_norm = float(accelerator.clip_grad_norm_(run.policy.parameters(), limit))
    loss, clipped_tokens, clipped_sequences = accelerator.reduce(totals, "sum").tolist()
    learning_rate, finite = run.scheduler.get_last_lr()[0], math.isfinite(loss + grad_norm)
    if finite:  # else one bad batch would end in NaN weights
        run.optimizer.step()
        run.scheduler.step()
    run.optimizer.zero_grad()
    return {
        "loss": loss,
        "clip_fraction": clipped_tokens / max(tokens, 1),
        "clip_fraction_sequence": clipped_sequences / completions,
        "grad_norm": grad_norm,
        "skipped_update": float(not finite),
        "learning_rate": learning_rate,
        "seconds_update": clock(accelerator.device) - began,
    }


def evaluate(run: Run, problems: list[Problem], prompts: list[list[int]]) -> dict[str, float]:
    """Greedy and sampled accuracy and unbiased pass@k on held-out problems, all processes.

    Every evaluation draws the same uniforms, so that two of them differ by the policy alone.
    """
    args, verdicts = run.args, []
    run.policy.eval()
    mine = range(run.accelerator.process_index, len(problems), run.accelerator.num_processes)
    sampling = {k: getattr(args, k) for k in ("temperature", "top_k", "top_p")}
    for kind, samples, how in (
        ("greedy", 1, {"temperature": 0}),
        ("sampled", args.num_generations_eval, sampling),
    ):
        sampler = run._replace(decoders={})  # not kept: their caches may be larger than a rollout's
        jobs = [(i, s) for i in mine for s in range(samples)]
        for start in range(0, len(jobs), args.per_device_eval_batch_size):
            run.check()
            part = jobs[start : start + args.per_device_eval_batch_size]
            rows = torch.tensor([i * args.num_generations + s for i, s in part])
            u = row_uniforms(args, "eval", 0, rows, args.max_completion_length)
            out = sampler.sample([prompts[i] for i, _ in part], u, **how)
            right = run.grade(out.texts(run.tokenizer), [problems[i] for i, _ in part])
            verdicts += [(kind, i, r) for (i, _), r in zip(part, right, strict=True)]
    return eval_metrics(gather_object(verdicts))


# --------------------------------------------------------------------------------------------------
# Checkpoints: all that training changes, as safetensors and JSON
# --------------------------------------------------------------------------------------------------
class Progress(NamedTuple):
    """Where a run is, between two rollouts. Data order and samples follow from it and the seed."""

    step: int = 0  # updates so far
    rollout: int = 0  # rollouts so far
    skipped: int = 0  # updates in a row that were not finite
    groups: tuple = ()  # of credit.html


def training_state(run: Run) -> tuple[dict[str, Tensor], dict]:
    """Copies of adapter and optimiser as named tensors, and the rest as JSON."""
    trained = [(name, p) for name, p in run.model.named_parameters() if p.requires_grad]
    tensors = {f"adapter.{name}": parameter.detach() for name, parameter in trained}
    optimizer, scheduler = run.optimizer.state_dict(), run.scheduler.state_dict()
    for index, values in optimizer["state"].items():
        tensors |= {f"optimizer.{index}.{name}": value for name, value in values.items()}
    del scheduler["lr_lambdas"]
    rest = {"param_groups": optimizer["param_groups"], "scheduler": scheduler}
    return {name: tensor.to("cpu", copy=True) for name, tensor in tensors.items()}, rest


@torch.no_grad()
def restore(run: Run, tensors: dict[str, Tensor], rest: dict) -> None:
    """Undoes what happened since `training_state`. KeyError where the adapters differ."""
    state: dict[int, dict[str, Tensor]] = {}
    parameters = dict(run.model.named_parameters())
    for key, tensor in tensors.items():
        kind, name = key.split(".", 1)
        if kind == "adapter":
            parameters[name].copy_(tensor)
        else:
            index, name = name.split(".")
            state.setdefault(int(index), {})[name] = tensor
    run.optimizer.load_state_dict({"state": state, "param_groups": rest["param_groups"]})
    run.scheduler.load_state_dict(rest["scheduler"] | {"lr_lambdas": [None]})


def checkpoints(output_dir: str) -> list[Path]:
    """The whole ones, oldest first."""
    found = [p for p in Path(output_dir).glob("checkpoint-*") if p.name[11:].isdigit()]
    return sorted(found, key=lambda path: int(path.name[11:]))


def save_checkpoint(run: Run, progress: Progress) -> None:
    """Writes <output_dir>/checkpoint-<step>; a folder of that name appears whole or not at all."""
    folder = Path(run.args.output_dir) / f"checkpoint-{progress.step}"
    run.accelerator.wait_for_everyone()
    if not run.accelerator.is_main_process or folder.exists():
        return
    partial = folder.with_name(f"partial-{folder.name}")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        run.model.save_pretrained(partial)  # for PEFT users; a resumed run reads the state below
        tensors, rest = training_state(run)
        save_file(tensors, partial / "training_state.safetensors")
        rest |= {"progress": progress._asdict(), "flags": dataclasses.asdict(run.args)}
        (partial / "training_state.json").write_text(json.dumps(rest), encoding="utf-8")
        for path in (*partial.iterdir(), partial):
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)  # on the disk before the folder has its name
            os.close(descriptor)
        partial.rename(folder)
    except BaseException:  # a full disk, or a second signal
        shutil.rmtree(partial, ignore_errors=True)
        raise
    for old in checkpoints(run.args.output_dir)[: -(run.args.save_total_limit or sys.maxsize)]:
        shutil.rmtree(old.rename(old.with_name(f"partial-{old.name}")))


def find_checkpoint(args: Args) -> Path | None:
    """The folder to resume from; None to start at step 0."""
    existing, asked = checkpoints(args.output_dir), args.resume_from_checkpoint
    if asked == "latest":
        return existing[-1] if existing else None
    if asked and not (Path(asked) / "training_state.json").is_file():
        fail(f"--resume_from_checkpoint {asked} is not a checkpoint: give its folder or latest")
    if existing and not (asked and existing[-1].samefile(asked)):
        fail(
            f"{existing[-1]} is of an earlier run: go on with --resume_from_checkpoint latest, or "
            "choose another --output_dir"
        )
    return Path(asked) if asked else None


def resume(run: Run, folder: Path | None) -> Progress:
    """Makes the run what it was when the checkpoint was written."""
    if folder is None:
        return Progress()
    try:
        rest = json.loads((folder / "training_state.json").read_text(encoding="utf-8"))
        restore(run, load_file(folder / "training_state.safetensors"), rest)
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        fail(f"cannot resume from {folder}: {type(error).__name__} {str(error)[:200]}")
    may_differ = "output_dir resume_from_checkpoint save_steps save_total_limit report_to".split()
    for name, value in rest["flags"].items():
        now = getattr(run.args, name, None)
        if now != value and name not in may_differ and run.accelerator.is_main_process:
            print(f"{SCRIPT.name}: --{name} was {value} before, now it is {now}", file=sys.stderr)
    return Progress(**rest["progress"] | {"groups": tuple(rest["progress"]["groups"])})


# --------------------------------------------------------------------------------------------------
# Set-up
# --------------------------------------------------------------------------------------------------
def use_every_core() -> None:
    """`accelerate launch` sets OMP_NUM_THREADS=1 on a CPU machine where the user had not set it;
    each local process then takes its share of the cores."""
    launched = "ACCELERATE_MIXED_PRECISION" in os.environ
    environment = psutil.Process().parent().environ() if launched else os.environ
    if "OMP_NUM_THREADS" not in environment:
        cores = len(psutil.Process().cpu_affinity())
        torch.set_num_threads(max(1, cores // int(os.environ.get("LOCAL_WORLD_SIZE", 1))))


def load_dense(args: Args, model: torch.nn.Module) -> torch.nn.Module | None:
    """A dense copy of the base for rollouts, None where they go through the adapter."""
    device, dtype = model.device, torch.bfloat16 if model.device.type == "cuda" else torch.float32
    if args.rollout_weights == "auto":
        free = psutil.virtual_memory().available
        free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else free
        size = model.get_base_model().num_parameters(exclude_embeddings=True) * dtype.itemsize
        args.rollout_weights = "merged" if 3 * size < free else "adapter"  # room for the KV cache
        if int(os.environ.get("RANK", 0)) == 0:
            sizes = f"{size / 2**30:.2f} GiB, {free / 2**30:.1f} GiB free"
            print(f"--rollout_weights {args.rollout_weights} (a dense copy takes {sizes})")
    if args.rollout_weights == "adapter":
        return None
    where = {"revision": args.model_revision, "dtype": dtype, "device_map": {"": device}}
    where["attn_implementation"] = "grouped"
    dense = AutoModelForCausalLM.from_pretrained(args.model_name_or_path, **where)
    fuse_norms(dense)
    dense.eval().requires_grad_(False)
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    if any(hasattr(layer, "get_delta_weight") for layer in ends):
        head = dense.get_output_embeddings()  # tied, it would take the other's delta too
        head.weight = torch.nn.Parameter(head.weight.clone(), requires_grad=False)
    for name, layer in dense.named_modules():
        theirs = model.get_base_model().get_submodule(name)
        weight = theirs._parameters.get("weight")  # None where there is an adapter around it
        if weight is not None and weight.shape == layer.weight.shape:
            layer.weight = weight  # neither packed nor trained, so there need not be two
    if args.torch_compile:
        dense.compile()
    return dense


@torch.no_grad()
def merge(model: torch.nn.Module, dense: torch.nn.Module) -> None:
    """Writes dequantised base + LoRA into the dense copy, in its own buffers: a CUDA graph or a
    compiled module made on them stays valid."""
    for name, layer in model.get_base_model().named_modules():
        adapted, weight = hasattr(layer, "get_delta_weight"), getattr(layer, "weight", None)
        if not adapted and (name.endswith(".base_layer") or not hasattr(weight, "quant_state")):
            continue
        merged = dequantize_bnb_weight(weight) if hasattr(weight, "quant_state") else weight
        if adapted:
            merged = merged + layer.get_delta_weight("default")
        dense.get_submodule(name).weight.copy_(merged)


def load_policy(args: Args, device: torch.device) -> torch.nn.Module:
    """The base in NF4 (bf16 compute on a GPU, fp32 on a CPU) with a fresh LoRA adapter on it."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    nf4 = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
    )
    targets = args.lora_target_modules
    lora = LoraConfig(
        r=args.lora_r,
        lora_alpha=args.lora_alpha,
        lora_dropout=args.lora_dropout,
        target_modules=targets[0] if targets == ["all-linear"] else targets,
        task_type="CAUSAL_LM",
    )
    try:
        model = AutoModelForCausalLM.from_pretrained(
            args.model_name_or_path,
            revision=args.model_revision,
            dtype=dtype,
            attn_implementation="grouped",
            quantization_config=nf4 if args.load_in_4bit else None,
            device_map={"": device},
        )
    except (OSError, ValueError) as error:
        fail(f"cannot load --model_name_or_path {args.model_name_or_path}: {str(error)[:300]}")
    fuse_norms(model)
    for module in model.modules():
        # On a CPU with AVX512-BF16, bitsandbytes would repack the weights in the first forward
        # without gradients and train on wrong ones from then on.
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False
    set_seed(args.seed)  # the same adapter on every process
    try:
        model = get_peft_model(model, lora)
    except ValueError as error:
        fail(f"--lora_target_modules {' '.join(targets)}: {str(error)[:300]}")
    if args.torch_compile:
        torch._dynamo.config.recompile_limit = 4096  # one for each layer, mode and adapter state
        for layer in model.get_base_model().base_model.layers:
            layer.compile(dynamic=True)  # lengths differ from one micro-batch to the next
    if args.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


# --------------------------------------------------------------------------------------------------
# The loop
# --------------------------------------------------------------------------------------------------
def say(bar, message: str) -> None:
    """Prints above the progress bar, on the main process."""
    if not bar.disable:
        bar.write(message)


def track(run: Run, figures: dict, step: int) -> None:
    """Sends figures to the tracker; a tracker that fails is said once and left alone."""
    try:
        run.accelerator.log(figures, step)
    except Exception as error:  # whatever a tracker's client raises
        run.accelerator.trackers.clear()
        print(f"{SCRIPT.name}: going on without {run.args.report_to}: {error}", file=sys.stderr)


def updates_per_rollout(args: Args) -> int:
    return args.num_iterations * args.steps_per_generation // args.gradient_accumulation_steps


def due(args: Args, every: int, step: int) -> bool:
    """Whether a multiple of `every` lies in the rollout that ended with `step`."""
    return every > 0 and step // every > max(0, step - updates_per_rollout(args)) // every


def evaluate_and_log(run: Run, step: int, held_out, log: RunLog, bar) -> None:
    began = time.perf_counter()
    result = evaluate(run, *held_out)
    figures = "  ".join(f"{name} {value:.3f}" for name, value in result.items())
    say(bar, f"step {step:4d}, held out: {figures}  ({time.perf_counter() - began:.0f} s)")
    log.write({"step": step, "eval": result})
    track(run, {f"eval/{name}": value for name, value in result.items()}, step)


def train_on_rollout(run: Run, at: Progress, train_set, log: RunLog, bar) -> Progress:
    """Collect, score, update, and the log of it."""
    args, device, step, groups = run.args, run.accelerator.device, at.step, at.groups
    one_update, timeouts = updates_per_rollout(args) == 1, run.grader.timeouts
    began, skipped = clock(device), at.skipped
    batch, _, problems = collect(run, at.rollout, *train_set)
    metrics = {"seconds_rollout": clock(device) - began}
    metrics |= score(run, batch, one_update)
    metrics |= rollout_metrics(run.accelerator, batch, args.num_generations)
    metrics["tokens_per_second"] = metrics["rollout_tokens"] / metrics["seconds_rollout"]
    metrics["reward_timeouts"] = run.grader.timeouts - timeouts  # of this process
    if metrics["zero_std_share"] == 1:
        say(
            bar,
            f"step {step + 1}: every group has equal rewards (all {metrics['reward']:.2f}): "
            "advantages, loss and gradient are 0; the problems are too easy or too hard",
        )
    rows = update_rows(args, batch) * args.num_iterations
    for index in rows[: args.max_steps - step]:
        step += 1
        row = {"step": step} | metrics | update(run, batch, index, one_update)
        log.write(row | {"peak_memory_gb": peak_memory_gb(device)})
        track(run, {k: v for k, v in row.items() if k != "step"}, step)
        metrics |= {k: 0.0 for k in metrics if k.startswith("seconds")}  # counted once
        skipped = skipped + 1 if row["skipped_update"] else 0
        bar.update()
    bar.set_postfix_str(f"reward {row['reward']:.2f}, {row['tokens_per_second']:.0f} tokens/s")
    if due(args, args.eval_steps, step) or at.rollout == 0 or step == args.max_steps:
        groups += (*credit_group(run.tokenizer, batch, problems, args.num_generations, step),)
    return Progress(step, at.rollout + 1, skipped, groups)


def train(run: Run, at: Progress, train_set, held_out, log: RunLog, bar) -> Progress:
    """The loop, with evaluations and checkpoints between rollouts."""
    args, several, start = run.args, updates_per_rollout(run.args) > 1, None
    evaluated = broadcast_object_list([[row["step"] for row in log.evals]])[0]
    try:
        while True:
            start, first_or_last = None, at.step in (0, args.max_steps)
            if (due(args, args.eval_steps, at.step) or first_or_last) and at.step not in evaluated:
                evaluate_and_log(run, at.step, held_out, log, bar)
            if due(args, args.save_steps, at.step):
                save_checkpoint(run, at)
            if at.step >= args.max_steps:
                return at
            if at.skipped >= 10:
                raise Interrupted(
                    f"loss or gradient was not finite in {at.skipped} updates in a row: "
                    "lower --learning_rate, or go back to an earlier checkpoint"
                )
            start = training_state(run) if several else None
            at = train_on_rollout(run, at, train_set, log, bar)
    except (Interrupted, torch.OutOfMemoryError) as error:
        reason = error if isinstance(error, Interrupted) else Interrupted(OUT_OF_MEMORY)
        if reason is not error and run.accelerator.num_processes > 1:
            fail(OUT_OF_MEMORY)  # the others do not know, and cannot save together
        if start:  # the rollout will be sampled again, from the policy that sampled it
            restore(run, *start)
        save_checkpoint(run, at)
        raise reason from None


def build_run(args: Args, tokenizer, grader: Grader) -> Run:
    """Policy, optimiser and schedule, as Accelerate prepares them."""
    accelerator = Accelerator(
        cpu=not torch.cuda.is_available(),  # else processes without a GPU do not find each other
        mixed_precision="bf16" if torch.cuda.is_available() else "no",
        log_with=None if args.report_to == "none" else args.report_to,
        project_dir=args.output_dir,
    )
    config = {name: str(value) for name, value in vars(args).items()}
    try:
        accelerator.init_trackers(SCRIPT.stem, config=config)
    except Exception as error:  # whatever a tracker's client raises
        accelerator.trackers = []
        print(f"{SCRIPT.name}: going on without {args.report_to}: {error}", file=sys.stderr)
    model = load_policy(args, accelerator.device)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=args.learning_rate, weight_decay=args.weight_decay)
    # What stays for good, moments and cuBLAS's workspace for backward, is made before the memory
    # that rollouts give back and take again, or it would come to lie in the middle of that.
    for p in trained:
        moments = {name: torch.zeros_like(p) for name in ("exp_avg", "exp_avg_sq")}
        optimizer.state[p] = {"step": torch.tensor(0.0)} | moments
    steps = (args.warmup_steps, max(1, args.max_steps))
    scheduler = get_scheduler(args.lr_scheduler_type, optimizer, *steps)
    policy, optimizer = accelerator.prepare(Policy(model, args.temperature), optimizer)
    ids = torch.ones(2, 3, dtype=torch.long, device=accelerator.device)
    accelerator.backward(policy.train()(ids, ids.bool(), 1).logp.sum())
    optimizer.zero_grad()
    eos = model.generation_config.eos_token_id  # all else in the generation config is ignored
    eos = {tokenizer.eos_token_id, *(eos if isinstance(eos, list) else [eos])} - {None}
    eos_ids = torch.tensor(sorted(eos), device=accelerator.device)
    dense = load_dense(args, model)
    state = (model, optimizer, scheduler, tokenizer, eos_ids, grader, dense, {}, [])
    return Run(args, accelerator, policy, *state)


def listen(signals: list[int]) -> None:
    """The first SIGINT or SIGTERM is for `Run.check` to see, the second ends the process."""

    def receive(number: int, frame) -> None:
        if signals:
            os._exit(128 + number)
        signals.append(number)

    signal.signal(signal.SIGINT, receive)
    signal.signal(signal.SIGTERM, receive)


def run_to_the_end(run: Run, at: Progress, train_set, held_out, log: RunLog) -> int:
    """Trains, writes the report, and returns the exit code."""
    args = run.args
    try:
        with (
            run.grader,
            tqdm(total=args.max_steps, initial=at.step, unit="step", dynamic_ncols=True) as bar,
        ):
            at = train(run, at, train_set, held_out, log, bar)
    except Interrupted as reason:
        saved = checkpoints(args.output_dir)[-1]
        if run.accelerator.is_main_process:
            again = shlex.join([*sys.argv, "--resume_from_checkpoint", "latest"])  # the last counts
            print(f"{reason}, saved {saved}; go on with\n{again}")
        return int(not run.signals)
    if run.accelerator.is_main_process:
        config, folder = dataclasses.asdict(args), Path(args.output_dir)
        evals = [row["eval"] for row in log.evals]
        summary = {"before": evals[0], "after": evals[-1]}
        summary["seconds"] = round(time.time() - psutil.Process().create_time(), 1)
        run.model.save_pretrained(folder / "adapter")
        title = f"{SCRIPT.stem} --credit {args.credit}, seed {args.seed}"
        print(write_report(args.output_dir, title, config, log.rows, at.groups, summary))
    return 0


def main() -> None:
    args = parse_args()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    warnings.filterwarnings("ignore", ".*gradient_checkpointing")  # peft's to transformers
    use_every_core()
    try:
        Path(args.output_dir).mkdir(parents=True, exist_ok=True)
        tokenizer, train_set, held_out = load_data(args)
    except DataError as error:
        fail(error)
    except OSError as error:
        fail(f"cannot write to --output_dir {args.output_dir}: {error.strerror}")
    folder = find_checkpoint(args)
    try:
        run = build_run(args, tokenizer, Grader())
        listen(run.signals)
        at = resume(run, folder)
        is_main = run.accelerator.is_main_process
        log = RunLog(args.output_dir if is_main else None, dataclasses.asdict(args), at.step)
        code = run_to_the_end(run, at, train_set, held_out, log)
    except torch.OutOfMemoryError:
        fail(OUT_OF_MEMORY)
    except (OSError, SafetensorError) as error:
        if "No space left" not in str(error) and getattr(error, "errno", 0) != errno.EDQUOT:
            raise
        whole = [str(path) for path in checkpoints(args.output_dir)[-1:]]
        fail(
            f"the disk of --output_dir {args.output_dir} is full; make room and go on with "
            f"--resume_from_checkpoint latest ({', '.join(whole) or 'no checkpoint so far'})"
        )
    run.accelerator.wait_for_everyone()  # nobody closes the group while another still writes
    run.accelerator.end_training()
    if run.accelerator.num_processes > 1:
        sys.stdout.flush()
        os._exit(code)  # gloo's threads have been seen to hang in their destructors
    if code:
        sys.exit(code)


if __name__ == "__main__":
    main()
