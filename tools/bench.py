"""Measures how fast rollout, score, credit and update are, for every credit method, side by side.

    python tools/bench.py                                   # the tiny policy, on a CPU too
    python tools/bench.py grpo_oar --repeats 9              # one script, more repeats
    python tools/bench.py --shape 1.7B grpo_arca --credit uniform arca --trl
    python tools/bench.py --shape 8B --lengths lognormal -- --rollout_weights quantized
    git worktree add ../before ac8a25c && python tools/bench.py grpo_arca --credit uniform arca \\
        --against ../before
    python tools/bench.py --shape 1.7B grpo_arca --credit arca --idle 0.5 --against ../before

Flags after `--` go to the scripts. Each repeat runs one step of every method, in turn, on the same
prompts, policy and adapter. If the speed of the machine drifts, all methods slow down alike. Ratios
are taken within a repeat. The table shows medians, with quartiles in brackets.

`--trl` adds to each repeat a step of TRL's GRPOTrainer with the same checkpoint, NF4, LoRA,
prompts, batch and rewards. With `--trl_continuous` TRL samples by transformers' continuous
batching, with a manager that is kept from one rollout to the next, as TRL itself does not.

`--against FOLDER` runs each step here and in another checkout, by its own bench.py, each in a
process of its own, and prints the ratios. Defaults may differ between the two: give such flags.

`--idle SHARE` makes rewards random, but all 0 in that share of the groups, as where a problem is
too hard or too easy. Without it the embedded policy, or another by flags, is graded.

`--shape` is random weights in a published shape: a policy that neither stops nor answers. For it

- rewards are random, and never the same for a whole group but the idle ones: every row is trained;
- lengths are forced: `equal`, or `lognormal` with a mean of a third of the maximum, the same
  lengths in every repeat. Sampling is by inverse CDF and the stop token is id 0, so a uniform of 0
  stops a row for certain and one of 0.001 never does. The scripts do not change for it. TRL's
  `generate` gets a logits processor to the same end;
- each completion's end becomes \\boxed{7} after the rollout, as OAR works on answers alone.

A rollout is all of `collect`: dense weights, sampling, decoding, grading. For TRL it is
`_generate_single_turn`, which is less. A rollout's tokens are the completions', an update's all.
"""

import argparse
import contextlib
import functools
import gc
import importlib
import inspect
import json
import logging
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, get_args, get_type_hints

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # as in the scripts

import torch
import transformers
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3Config, TrainerCallback

from common.data import correctness, problem_at
from common.problems import Problem

VOCABULARY = 151_936
STOP = 0  # id of the stop token of a shape
GIB = 2**30


class Shape(NamedTuple):
    """A published shape of Qwen3."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    tied: bool  # whether embeddings and head are shared


SHAPES = {
    "0.6B": Shape(1024, 3072, 28, 16, True),
    "1.7B": Shape(2048, 6144, 28, 16, True),
    "4B": Shape(2560, 9728, 36, 32, True),
    "8B": Shape(4096, 12288, 36, 32, False),
}
# The policy stays what it is, so that every repeat measures the same. Flags after `--` override.
STATIONARY = ["--learning_rate", "1e-5", "--lr_scheduler_type", "constant", "--warmup_steps", "0"]
SAME_IN_TRL = [
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "num_generations",
    "temperature",
    "top_p",
    "top_k",
    "max_completion_length",
    "loss_type",
    "scale_rewards",
    "epsilon",
    "beta",
    "learning_rate",
    "weight_decay",
    "max_grad_norm",
    "gradient_checkpointing",
    "seed",
]
COLUMNS = (
    "script | credit | step, s | rollout, s | rollout, tokens/s | score, s | credit, s | update, s "
    "| update, tokens/s | step / uniform | weights, GiB | peak of rollout, score, update, GiB"
)
PHASES = {  # of a step: the seconds that --against compares
    "step": ["step"],
    "rollout": ["seconds_rollout"],
    "score + credit": ["seconds_score", "seconds_credit"],
    "update": ["seconds_update"],
}
# What runs in another checkout. An older bench.py lacks --idle, so the class RandomRewards of this
# one is put before this text.
WORKER = """
import json, os, sys
out = os.fdopen(os.dup(1), "w", buffering=1)
os.dup2(2, 1)  # nothing else shall print where answers are read
folder, name, credits, argv, idle = json.loads(sys.argv[1])
sys.path.insert(0, folder)
import bench
options = bench.parse_options(argv)
if hasattr(sys.modules[name], "use_every_core"):  # of an older checkout
    sys.modules[name].use_every_core()
prepared = bench.prepare(sys.modules[name], credits, options)
if idle:
    prepared.run.grader = RandomRewards(idle, prepared.run.args.num_generations)
    problems = [problem._replace(steps=()) for problem in prepared.data[0]]
    prepared = prepared._replace(data=(problems, prepared.data[1]))
print("ready", file=out)
for line in sys.stdin:
    print(json.dumps(bench.step(prepared, *json.loads(line), 0.0), default=float), file=out)
"""

Row = dict[str, Any]  # what was measured of a step


# ---- Random-weight shapes: checkpoint, rewards, lengths, answers ---------------------------------
def shape_config(name: str, layers: int | None = None) -> Qwen3Config:
    """Returns the configuration of a shape, with fewer layers if that is asked for."""
    shape = SHAPES[name]
    return Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=layers or shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=40_960,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        tie_word_embeddings=shape.tied,
        eos_token_id=STOP,
        pad_token_id=STOP,
    )


def make_checkpoint(options: argparse.Namespace) -> Path:
    """Returns the folder of the shape's bf16 checkpoint, which is made once.

    Its tokenizer is the tiny policy's.
    """
    config = shape_config(options.shape, options.layers)
    folder = Path(options.cache) / f"qwen3-{options.shape}-{config.num_hidden_layers}-layers"
    if folder.exists():
        return folder
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "common/tiny_policy")
    stop = tokenizer.convert_ids_to_tokens(STOP)
    tokenizer.eos_token = stop
    tokenizer.pad_token = stop
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(dir=folder.parent))  # an interruption leaves no half checkpoint
    model.save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    return partial.rename(folder)


class RandomRewards:
    """Grades at random, in the place of a Grader.

    Texts are those of a rollout, group by group. The share `idle` of the groups has equal rewards.
    """

    def __init__(self, idle: float = 0.0, size: int = 1) -> None:
        self.rng = random.Random(0)
        self.idle = idle
        self.size = size

    def grade(
        self, texts: list[str], answers: list[str], problems: list | None = None
    ) -> list[float]:
        groups = range(len(texts) // self.size)
        idle_groups = self.rng.sample(groups, round(self.idle * len(groups)))
        return [self.rng.random() * (i // self.size not in idle_groups) for i in range(len(texts))]


def forced_lengths(kind: str, count: int, longest: int) -> Tensor:
    """Returns lengths [count]: all the longest, or a log-normal's quantiles in random order."""
    if kind == "equal":
        return torch.full((count,), longest)
    sigma = 0.6
    z = torch.special.ndtri((torch.arange(count) + 0.5) / count)
    lengths = (longest / 3 * (sigma * z - sigma**2 / 2).exp()).round().long().clamp(1, longest)
    return lengths[torch.randperm(count, generator=torch.Generator().manual_seed(0))]


def force_uniforms(row_uniforms: Callable, lengths: Tensor) -> Callable:
    """Returns a script's `row_uniforms`, changed so that every rollout has these lengths."""

    def forced(args: Any, kind: str, step: int, rows: Tensor, length: int) -> Tensor:
        uniforms = row_uniforms(args, kind, step, rows, length)
        if kind == "rollout":
            last = lengths[rows, None] - 1
            uniforms = uniforms.clamp(min=1e-3).scatter(1, last, 0.0)
        return uniforms

    return forced


def force_generate(generate: Callable, lengths: Tensor, prompt_length: int) -> Callable:
    """Returns transformers' `generate`, changed so that its rows have these lengths."""

    def process(input_ids: Tensor, scores: Tensor) -> Tensor:
        stops = lengths.to(scores.device) == input_ids.shape[1] - prompt_length + 1
        scores[:, STOP] = torch.where(stops, 1e9, -math.inf)
        return scores

    return functools.partial(generate, logits_processor=[process])


def check_lengths(found: list[int], forced: Tensor | None) -> None:
    """Ends the program if a rollout does not have the lengths that were forced on it."""
    if forced is not None and found != forced.tolist():
        sys.exit("bench.py: error: forced lengths were not kept: is top_k, top_p or a sampler new?")


def plant_answers(batch: Any, tokenizer: Any) -> None:
    """Writes a boxed answer before the stop token of every completion that has room for it."""
    box = tokenizer.encode("\\boxed{7}", add_special_tokens=False)
    ends = batch.prompt_width + batch.mask.sum(1) - 1  # [N]
    for row, end in enumerate(ends.tolist()):
        if end - batch.prompt_width > len(box):
            batch.ids[row, end - len(box) : end] = torch.tensor(box, device=batch.ids.device)


# ---- Ours ----------------------------------------------------------------------------------------
class Bench(NamedTuple):
    """One script: a run that all its methods share, and what it runs on."""

    module: ModuleType
    run: Any
    data: tuple[list[Problem], list[list[int]]]  # problems and their prompts
    methods: dict[str, Any]  # credit -> its Args
    lengths: Tensor | None  # None: rows stop where the policy stops


def prepare(module: Any, credits: list[str], options: argparse.Namespace) -> Bench:
    """Builds the run of a script, and what it runs on."""
    flags = [*STATIONARY]
    if options.completion_tokens:
        flags += ["--max_completion_length", str(options.completion_tokens)]
    if options.completions:
        size = min(options.completions, options.micro_batch)
        flags += ["--per_device_train_batch_size", str(size)]
        flags += ["--gradient_accumulation_steps", str(options.completions // size)]
    if options.shape != "tiny":
        flags += ["--model_name_or_path", str(make_checkpoint(options))]
    flags += options.flags
    methods = {credit: module.parse_args([*flags, "--credit", credit]) for credit in credits}
    args = methods[credits[0]]

    if options.shape == "tiny":
        tokenizer, (problems, prompts), _ = module.load_data(args)
        run = module.build_run(args, tokenizer)
        if options.idle:  # random rewards depend on no step
            problems = [problem._replace(steps=()) for problem in problems]
            run.grader = RandomRewards(options.idle, args.num_generations)
        return Bench(module, run, (problems, prompts), methods, None)

    run = module.build_run(args, AutoTokenizer.from_pretrained(args.model_name_or_path))
    run.grader = RandomRewards(options.idle, args.num_generations)
    generator = torch.Generator().manual_seed(0)
    size = (256, options.prompt_tokens)
    prompts = torch.randint(3, VOCABULARY, size, generator=generator).tolist()
    problems = [Problem("", "7")] * len(prompts)
    count = args.per_device_train_batch_size * args.steps_per_generation
    lengths = forced_lengths(options.lengths, count, args.max_completion_length)
    module.row_uniforms = force_uniforms(module.row_uniforms, lengths)
    return Bench(module, run, (problems, prompts), methods, lengths)


def clock(device: torch.device) -> float:
    """Returns seconds, once a GPU's work is done."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def resident_gib(name: str) -> float:
    """Returns this process's memory: VmRSS is what it has now, VmHWM the most that it had."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition(f"{name}:")[2].split()[0]) / 2**20  # from KiB


def allocated_gib(device: torch.device) -> float:
    """Returns the memory that is in use; on a CPU that of the process."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device) / GIB
    return resident_gib("VmRSS")


def peak_gib(device: torch.device, others: float = 0.0) -> float:
    """Returns the most memory since the last call, less the others'; on a CPU the process's."""
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(device) / GIB
        torch.cuda.reset_peak_memory_stats(device)
    else:
        peak = resident_gib("VmHWM")
        Path("/proc/self/clear_refs").write_text("5")  # now the most is what there is
    return peak - others


def weights_gib(model: torch.nn.Module) -> float:
    """Returns the size of a model's weights. Shared ones count once."""
    return sum({p.data_ptr(): p.nbytes for p in model.parameters()}.values()) / GIB


def step(bench: Bench, credit: str, repeat: int, others: float) -> Row:
    """Runs one step, of the rollout `repeat`. Returns seconds, tokens/s and peaks of memory."""
    module = bench.module
    run = replace(bench.run, args=bench.methods[credit], rollout=repeat)
    if isinstance(run.grader, RandomRewards):  # all methods get the same rewards in a repeat
        run.grader.rng = random.Random(repeat)
    args = run.args
    device = run.accelerator.device

    peak_gib(device)
    began = clock(device)
    batch = module.collect(run, bench.data, {})
    row: Row = {"seconds_rollout": clock(device) - began, "peaks": [peak_gib(device, others)]}
    if bench.lengths is not None:
        check_lengths(batch.mask.sum(1).tolist(), bench.lengths[batch.rows.cpu()])
        plant_answers(batch, run.tokenizer)

    updates = module.micro_batches(args, batch)
    micros = [micro for update in updates for micro in update]
    module.score(run, batch, micros, row)  # writes its seconds into the row
    row["peaks"].append(peak_gib(device, others))

    began = clock(device)
    for update in updates * args.num_iterations:
        module.update(run, update)
    row["seconds_update"] = clock(device) - began
    row["peaks"].append(peak_gib(device, others))
    row["step"] = sum(seconds for name, seconds in row.items() if name.startswith("seconds_"))

    tokens = {
        "rollout": int(batch.mask.sum()),
        "update": args.num_iterations * sum(int(micro.attention.sum()) for micro in micros),
        "credit": row.get("credit_forward_tokens", 0),  # 0 without a forward of its own
    }
    for phase, count in tokens.items():
        row[f"{phase}_tokens_per_second"] = count / row[f"seconds_{phase}"]
    return row


# ---- TRL -----------------------------------------------------------------------------------------
class Trl(TrainerCallback):
    """TRL's GRPOTrainer on a bench's policy and prompts. It runs the loop, and calls us back."""

    def __init__(self, bench: Bench, rollouts: int, continuous: bool = False) -> None:
        from datasets import Dataset
        from trl import GRPOTrainer

        args = bench.run.args
        problems, prompts = bench.data
        self.device = bench.run.accelerator.device
        self.lengths = bench.lengths
        self.rows: list[Row] = []

        before = allocated_gib(self.device)
        model = bench.module.load_policy(args, self.device)
        self.weights = weights_gib(model)
        self.own = allocated_gib(self.device) - before
        if continuous:
            keep_manager = functools.partial(model.generate_batch, persistent_manager=True)
            model.generate_batch = keep_manager
        elif bench.lengths is not None:
            model.generate = force_generate(model.generate, bench.lengths, len(prompts[0]))

        # Its prompts are those of `collect`, each named by its place.
        count = args.per_device_train_batch_size * args.gradient_accumulation_steps
        places = range(rollouts * (count // args.num_generations))
        chosen = [str(problem_at(place, len(problems), args.seed)) for place in places]

        def reward(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
            asked = [problems[int(place)] for place in prompts]
            return correctness(bench.run.grader, completions, asked)

        def tokenize(places: list[str]) -> tuple:
            """Returns the same tokens as ours, where TRL would cut a text anew."""
            return [prompts[int(place)] for place in places], None, {}

        self.trainer = GRPOTrainer(
            model,
            reward,
            self.config(args, rollouts, continuous),
            train_dataset=Dataset.from_dict({"prompt": chosen}),
            processing_class=bench.run.tokenizer,
            callbacks=[self],
        )
        self.trainer.remove_callback(transformers.PrinterCallback)
        self.trainer._tokenize_prompts = tokenize
        if continuous and bench.lengths is not None:
            self.trainer.generation_config.eos_token_id = -1  # then all lengths are the longest
        self.generate = self.trainer._generate_single_turn
        self.trainer._generate_single_turn = self.timed_generate

    def config(self, args: Any, rollouts: int, continuous: bool) -> Any:
        """Returns TRL's flags: ours, where it has them."""
        from trl import GRPOConfig

        flags = {name: getattr(args, name) for name in SAME_IN_TRL}
        flags |= {
            "output_dir": tempfile.gettempdir(),
            "max_steps": rollouts,
            "lr_scheduler_type": "constant",
            "bf16": args.dtype == "bfloat16",
            "use_cpu": self.device.type != "cuda",
            "use_transformers_continuous_batching": continuous,
            "shuffle_dataset": False,
            "logging_strategy": "no",
            "save_strategy": "no",
            "report_to": "none",
            "disable_tqdm": True,
        }
        return GRPOConfig(**flags)

    def run(self, after_step: Callable[[int], None]) -> None:
        """Trains, and calls after_step(k) after every step k."""
        self.after_step = after_step
        self.trainer.train()

    def timed_generate(self, prompts: list[list[int]], *inputs: Any, **flags: Any) -> tuple:
        """Generates, and keeps what it took."""
        began = clock(self.device)
        completions, logprobs = self.generate(prompts, *inputs, **flags)
        seconds = clock(self.device) - began
        lengths = [len(ids) for ids in completions]
        check_lengths(lengths, self.lengths)
        self.tokens = sum(lengths) + sum(map(len, prompts))
        row = self.rows[-1]
        row["seconds_rollout"] = seconds
        row["rollout_tokens_per_second"] = sum(lengths) / seconds
        row["peaks"] = [peak_gib(self.device, self.others), math.nan]
        return completions, logprobs

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        torch.backends.cuda.enable_cudnn_sdp(True)  # its default; ours turns it off
        self.others = allocated_gib(self.device) - self.own
        peak_gib(self.device)
        self.rows.append({"seconds_score": 0.0, "seconds_credit": 0.0})
        self.began = clock(self.device)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        row = self.rows[-1]
        row["step"] = clock(self.device) - self.began
        row["seconds_update"] = row["step"] - row["seconds_rollout"]
        row["update_tokens_per_second"] = self.tokens / row["seconds_update"]
        row["peaks"].append(peak_gib(self.device, self.others))
        torch.backends.cuda.enable_cudnn_sdp(False)
        self.after_step(state.global_step - 1)


# ---- The table -----------------------------------------------------------------------------------
def spread(values: list[float], digits: int = 2) -> str:
    """Returns "median (quartile - quartile)"."""
    if len(values) == 1:
        values = values * 2  # as many as quantiles() wants
    quartiles = statistics.quantiles(values, n=4, method="inclusive")
    low, middle, high = (f"{x:.{digits}f}" for x in quartiles)
    return f"{middle} ({low} - {high})"


def ratio(rows: list[Row], others: list[Row], names: list[str], digits: int = 2) -> str:
    """Returns the spread of the ratios, within a repeat, of the sum of these columns."""
    ratios = []
    for row, other in zip(rows, others, strict=True):
        ratios.append(sum(row[name] for name in names) / sum(other[name] for name in names))
    return spread(ratios, digits)


def table_row(script: str, credit: str, rows: list[Row], uniform: list[Row], gib: float) -> str:
    """Returns a line of the table, with what COLUMNS names."""

    def median(name: str, digits: int = 2) -> str:
        return f"{statistics.median(row[name] for row in rows):.{digits}f}"

    peaks = [max(values) for values in zip(*(row["peaks"] for row in rows), strict=True)]
    cells = [
        script,
        credit,
        spread([row["step"] for row in rows]),
        median("seconds_rollout"),
        median("rollout_tokens_per_second", 0),
        median("seconds_score"),
        median("seconds_credit"),
        median("seconds_update"),
        median("update_tokens_per_second", 0),
        ratio(rows, uniform, ["step"]) if uniform else "-",
        f"{gib:.3g}",
        ", ".join("n/a" if math.isnan(peak) else f"{peak:.1f}" for peak in peaks),
    ]
    return f"| {' | '.join(cells)} |"


def forward_lines(timings: dict[str, list[Row]]) -> list[str]:
    """Returns how fast OAR-P, which is forward passes alone, computes them, beside an update."""
    rows = timings.get("oar_p", [])
    if not rows:
        return []
    shares = [row["credit_tokens_per_second"] / row["update_tokens_per_second"] for row in rows]
    return ["", f"oar_p: {spread(shares)} times the tokens/s of the update"]


def header(bench: Bench, options: argparse.Namespace) -> str:
    """Returns what is measured, in a line."""
    args = bench.run.args
    machine = f"CPU ({torch.get_num_threads()} threads)"
    if bench.run.accelerator.device.type == "cuda":
        machine = torch.cuda.get_device_name()
    shape = "tiny policy"
    if options.shape != "tiny":
        layers = f" cut to {options.layers} layers" if options.layers else ""
        shape = f"random Qwen3-{options.shape}{layers}, prompts of {options.prompt_tokens} tokens"
    lengths = "the policy's own" if bench.lengths is None else options.lengths
    return (
        f"{machine}, torch {torch.__version__}, transformers {transformers.__version__}; {shape}; "
        f"{'NF4' if args.load_in_4bit else 'dense'} + "
        f"LoRA {args.lora_r} in {args.dtype}, rollouts: {args.rollout_weights}; "
        f"{args.per_device_train_batch_size * args.steps_per_generation} completions of at most "
        f"{args.max_completion_length} tokens ({lengths} lengths), groups of "
        f"{args.num_generations}, micro-batches of {args.per_device_train_batch_size}; median "
        f"(quartiles) of {options.repeats}; {options.idle:.0%} of the groups idle; "
        f"flags: {' '.join(options.flags) or 'none'}"
    )


def progress(name: str, options: argparse.Namespace, repeat: int, began: float) -> None:
    """Says on standard error which repeat is done, and how long the rest takes."""
    total = options.warmup + options.repeats
    gone = time.perf_counter() - began
    left = gone / (repeat + 1) * (total - repeat - 1)
    kind = "warm-up" if repeat < options.warmup else "repeat"
    times = f"{gone:.0f} s gone, about {left:.0f} s left"
    print(f"{name}: {kind} {repeat + 1} of {total}, {times}", file=sys.stderr, flush=True)


def save(path: str | Path, name: str, timings: dict[str, list[Row]]) -> None:
    """Appends a line of JSON for each method: its rows, of which the table has the medians."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a") as file:
        for credit, rows in timings.items():
            line = {"script": name, "credit": credit, "rows": rows}
            file.write(json.dumps(line, default=float) + "\n")


def run_steps(
    name: str, bench: Bench, trl: Trl | None, options: argparse.Namespace
) -> dict[str, list[Row]]:
    """Runs all repeats of a script's methods. Returns their rows by credit; the warm-up is out."""
    timings: dict[str, list[Row]] = {credit: [] for credit in bench.methods}
    others = trl.own if trl else 0.0
    began = time.perf_counter()

    def ours(repeat: int) -> None:
        for credit, rows in timings.items():
            rows.append(step(bench, credit, repeat, others))
        progress(name, options, repeat, began)

    if trl:
        trl.run(ours)
    else:
        for repeat in range(options.warmup + options.repeats):
            ours(repeat)
    return {credit: rows[options.warmup :] for credit, rows in timings.items()}


def measure(name: str, credits: list[str], options: argparse.Namespace) -> list[str]:
    """Measures one script. Returns the lines to print: head, table, ratios to TRL."""
    bench = prepare(sys.modules[name], credits, options)
    trl = None
    if options.trl or options.trl_continuous:
        trl = Trl(bench, options.warmup + options.repeats, options.trl_continuous)
    timings = run_steps(name, bench, trl, options)
    theirs = trl.rows[options.warmup :] if trl else []
    if options.json:
        save(options.json, name, timings | ({"TRL": theirs} if trl else {}))

    gib = weights_gib(bench.run.model)
    uniform = timings.get("uniform", [])
    lines = [f"{name}: {header(bench, options)}", "", f"| {COLUMNS} |", "|" + "---|" * 12]
    lines += [table_row(name, credit, rows, uniform, gib) for credit, rows in timings.items()]
    if trl:
        sampling = "GRPO, continuous batching" if options.trl_continuous else "GRPO"
        lines += [table_row("TRL", sampling, theirs, uniform, trl.weights), ""]
        for credit, own in timings.items():
            tokens = ratio(own, theirs, ["rollout_tokens_per_second"])
            steps = ratio(theirs, own, ["step"])
            lines.append(
                f"{credit} against TRL: {tokens} times the rollout's tokens/s, "
                f"{steps} times as fast a step"
            )
    return lines + forward_lines(timings)


# ---- Another checkout ----------------------------------------------------------------------------
def bench_folder(checkout: Path) -> Path | None:
    """Returns the folder in which a checkout has its bench.py, or None."""
    for name in ("tools", "tests"):  # it was in tests/ before
        if (checkout / name / "bench.py").is_file():
            return checkout / name
    return None


@contextlib.contextmanager
def worker(folder: Path, *job: object) -> Iterator[Callable[[str, int], Row]]:
    """Starts a process with the bench.py of a folder, and the scripts and common/ of its checkout.

    Yields ask(credit, repeat), which runs a step in it.
    """
    code = f"import random\n{inspect.getsource(RandomRewards)}{WORKER}"
    # -P keeps the present folder, and with it this checkout's common/, off the other's path.
    command = [sys.executable, "-P", "-W", "ignore", "-c", code, json.dumps([str(folder), *job])]
    quiet = os.environ | {"TRANSFORMERS_VERBOSITY": "error", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    with subprocess.Popen(
        command,
        env=quiet,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        bufsize=1,
    ) as process:
        assert process.stdin is not None and process.stdout is not None  # they are pipes
        questions = process.stdin
        answers = process.stdout

        def answer() -> str:
            line = answers.readline()
            if not line:
                sys.exit(f"bench.py: error: {folder} failed, see above")
            return line

        def ask(credit: str, repeat: int) -> Row:
            questions.write(json.dumps([credit, repeat]) + "\n")
            return json.loads(answer())

        answer()  # it is ready
        yield ask


def compare(name: str, credits: list[str], options: argparse.Namespace) -> list[str]:
    """Measures one script here and in another checkout.

    Returns the lines to print: seconds here over seconds there. A repeat is a step in each, and the
    first of a repeat is the second of the next.
    """
    there = options.against.resolve()
    began = time.perf_counter()
    found: list[dict[str, dict[int, Row]]] = []  # by repeat, credit, and 0 for here or 1 for there
    with contextlib.ExitStack() as stack:
        asks = []
        for checkout in (ROOT, there):
            folder = bench_folder(checkout)
            assert folder is not None  # parse_options has looked
            process = worker(folder, name, credits, options.shared, options.idle)
            asks.append(stack.enter_context(process))
        for repeat in range(options.warmup + options.repeats):
            order = (0, 1) if repeat % 2 == 0 else (1, 0)
            rows: dict[str, dict[int, Row]] = {}
            for credit in credits:
                rows[credit] = {side: asks[side](credit, repeat) for side in order}
            found.append(rows)
            progress(name, options, repeat, began)

    head = f"{name}: seconds in {ROOT} over those in {there}, median (quartiles) of "
    head += f"{options.repeats}; arguments: {' '.join(options.shared)}"
    if options.idle:
        head += f"; {options.idle:.0%} of the groups idle"
    lines = [head, "", f"| credit | {' | '.join(PHASES)} | step, s | there |", "|" + "---|" * 7]
    counted = found[options.warmup :]
    for credit in credits:
        own = [rows[credit][0] for rows in counted]
        old = [rows[credit][1] for rows in counted]
        cells = [ratio(own, old, names, 3) for names in PHASES.values()]
        cells += [spread([row["step"] for row in rows]) for rows in (own, old)]
        lines.append(f"| {credit} | {' | '.join(cells)} |")
    return lines


# ---- Command line --------------------------------------------------------------------------------
def make_parser(scripts: list[str]) -> argparse.ArgumentParser:
    """Returns the parser of this program's own flags."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("scripts", nargs="*", default=scripts, help="default: all")
    add("--credit", nargs="+", default=[], help="methods; default: all of each script")
    add("--shape", choices=["tiny", *SHAPES], default="tiny")
    add("--layers", type=int, help="fewer than the shape has, to test without a GPU")
    add("--completions", type=int, help="of a rollout; default 64, tiny: the script's")
    add("--micro_batch", type=int, default=16, help="completions, where --completions counts")
    add("--prompt_tokens", type=int, default=128, help="of a shape's random prompts")
    add("--completion_tokens", type=int, help="at most; default 256, tiny: the script's")
    add("--lengths", choices=["equal", "lognormal"], default="equal", help="of a shape")
    add("--idle", type=float, default=0.0, help="share of the groups with equal rewards")
    beside = parser.add_mutually_exclusive_group()
    beside.add_argument("--trl", action="store_true", help="TRL's GRPOTrainer beside ours")
    beside.add_argument(
        "--trl_continuous", action="store_true", help="the same with continuous batching"
    )
    beside.add_argument("--against", type=Path, help="folder of another checkout, beside this one")
    add("--repeats", type=int, default=5)
    add("--warmup", type=int, default=2, help="repeats before those, not counted")
    add("--json", help="file that gets every repeat's figures too, a line for each method")
    add("--cache", default=f"{tempfile.gettempdir()}/qwen3-shapes", help="folder of checkpoints")
    return parser


def parse_options(argv: list[str]) -> argparse.Namespace:
    """Returns the options, or ends the program with a sentence about what is wrong.

    `flags` are those after `--`, `shared` what another checkout's bench gets, and `methods` the
    credit methods of each script.
    """
    split = argv.index("--") if "--" in argv else len(argv)
    known_scripts = sorted(path.stem for path in ROOT.glob("grpo_*.py"))
    parser = make_parser(known_scripts)
    options = parser.parse_args(argv[:split])
    options.flags = argv[split + 1 :]
    of_this_bench = argparse.ArgumentParser(add_help=False)  # which an older one lacks
    of_this_bench.add_argument("--against")
    of_this_bench.add_argument("--idle")
    _, others = of_this_bench.parse_known_args(argv[:split])
    options.shared = others + argv[split:]

    if options.json and options.against:
        parser.error("--json keeps one checkout's figures: leave out --against")
    for name in set(options.scripts) - set(known_scripts):
        parser.error(f"no script {name}: there are {', '.join(known_scripts)}")
    if options.against and bench_folder(options.against) is None:
        parser.error(f"--against {options.against}: there is no tools/bench.py in it")
    if options.micro_batch < 1:
        parser.error("--micro_batch must be at least 1")
    if options.repeats < 1 or options.warmup < 0:
        parser.error("--repeats must be at least 1, and --warmup at least 0")
    if not 0 <= options.idle <= 1:
        parser.error("--idle is a share of the groups, from 0 to 1")
    if options.trl_continuous and options.lengths != "equal":
        parser.error("--trl_continuous cannot force --lengths lognormal: leave one out")
    if options.shape != "tiny":
        options.completions = options.completions or 64
        options.completion_tokens = options.completion_tokens or 256
        if not (options.layers or torch.cuda.is_available()):
            parser.error(f"--shape {options.shape} needs a GPU; --layers 2 tests it on a CPU")
    if options.completions and options.completions % min(options.completions, options.micro_batch):
        parser.error("--micro_batch must divide --completions")

    options.methods = {}
    known: set[str] = set()
    for name in options.scripts:
        credits = get_args(get_type_hints(importlib.import_module(name).Args)["credit"])
        options.methods[name] = credits
        known.update(credits)
    for credit in set(options.credit) - known:
        parser.error(f"none of {', '.join(options.scripts)} has --credit {credit}")
    return options


def main() -> None:
    options = parse_options(sys.argv[1:])
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    warnings.filterwarnings("ignore")
    for name, known in options.methods.items():
        credits = [credit for credit in known if credit in (options.credit or known)]
        if credits:
            how = compare if options.against else measure
            print("\n".join([*how(name, credits, options), ""]), flush=True)
        gc.collect()  # the script's models, before the next one's
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
