"""How fast rollout, score, credit and update are, for every credit method, side by side.

    python tests/bench.py                                   # the tiny policy, on a CPU too
    python tests/bench.py grpo_oar --repeats 9              # one script, more repeats
    python tests/bench.py --shape 1.7B grpo_arca --credit uniform arca --trl
    python tests/bench.py --shape 8B --lengths lognormal -- --rollout_weights quantized
    git worktree add ../before ac8a25c && python tests/bench.py grpo_arca --credit uniform arca \
        --against ../before
    python tests/bench.py --shape 1.7B grpo_arca --credit arca --idle 0.5 --against ../before

Flags after `--` go to the scripts. Each repeat runs one step of every method, in turn, on the same
prompts, policy and adapter; `--trl` adds to each a step of TRL's GRPOTrainer with the same
checkpoint, NF4, LoRA, prompts, batch and rewards. A machine whose speed drifts so slows all alike,
and ratios are taken within a repeat. Printed are medians, with quartiles in brackets.

`--against FOLDER` runs each step here and in another checkout, by its own tests/bench.py, each in a
process of its own, and prints the ratios. Defaults may differ between the two: give such flags.

`--idle SHARE` makes rewards random, but all 0 in that share of the groups, as where a problem is
too hard or too easy; the embedded policy, or another by flags, is graded without it.

`--shape` is random weights in a published shape: a policy that neither stops nor answers. For it
- rewards are random, and never the same for a whole group but the idle ones: every row is trained;
- lengths are forced: `equal`, or `lognormal` with a mean of a third of the maximum, the same
  lengths in every repeat. Sampling is by inverse CDF and the stop token is id 0, so that a uniform
  of 0 stops a row for certain and one of 0.001 never does. The scripts do not change for it. TRL's
  `generate` gets a logits processor to the same end;
- each completion's end becomes \\boxed{7} after the rollout: OAR works on answers alone.

A rollout is all of `collect`: dense weights, sampling, decoding, grading. For TRL it is
`_generate_single_turn`, which is less. A rollout's tokens are the completions', an update's all.
"""

import argparse
import contextlib
import gc
import importlib
import inspect
import json
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple, get_args, get_type_hints

import torch
import transformers
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3Config, TrainerCallback

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from common.data import Problem, correctness, problem_at

VOCABULARY, STOP, GIB = 151_936, 0, 2**30
SHAPES = {  # hidden, intermediate, layers, heads, tied
    "0.6B": (1024, 3072, 28, 16, True),
    "1.7B": (2048, 6144, 28, 16, True),
    "4B": (2560, 9728, 36, 32, True),
    "8B": (4096, 12288, 36, 32, False),
}
# The policy stays what it is, so that every repeat measures the same; flags after `--` override.
STATIONARY = "--learning_rate 1e-5 --lr_scheduler_type constant --warmup_steps 0"
SAME_IN_TRL = (
    "per_device_train_batch_size gradient_accumulation_steps num_generations temperature top_p "
    "top_k max_completion_length loss_type scale_rewards epsilon beta learning_rate weight_decay "
    "max_grad_norm gradient_checkpointing seed"
)
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
WORKER = """
import json, os, sys
out = os.fdopen(os.dup(1), "w", buffering=1)
os.dup2(2, 1)  # nothing else shall print where answers are read
folder, name, credits, argv, idle = json.loads(sys.argv[1])
sys.path.insert(0, folder + "/tests")
import bench
options = bench.parse_options(argv)
sys.modules[name].use_every_core()
prepared = bench.prepare(sys.modules[name], credits, options)
if idle:  # an older bench lacks it, so the class of the one that compares is at the top of this
    prepared.run.grader = RandomRewards(idle, prepared.run.args.num_generations)
    problems = [problem._replace(steps=()) for problem in prepared.data[0]]
    prepared = prepared._replace(data=(problems, prepared.data[1]))
print("ready", file=out)
for line in sys.stdin:
    print(json.dumps(bench.step(prepared, *json.loads(line), 0.0), default=float), file=out)
"""


# --------------------------------------------------------------------------------------------------
# Random-weight shapes: checkpoint, rewards, lengths, answers
# --------------------------------------------------------------------------------------------------
def shape_config(shape: str, layers: int | None = None) -> Qwen3Config:
    hidden, intermediate, published, heads, tied = SHAPES[shape]
    return Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers or published,
        num_attention_heads=heads,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=40_960,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        tie_word_embeddings=tied,
        eos_token_id=STOP,
        pad_token_id=STOP,
    )


def make_checkpoint(options: argparse.Namespace) -> Path:
    """Folder of the shape's bf16 checkpoint with the tiny policy's tokenizer; made once."""
    config = shape_config(options.shape, options.layers)
    folder = Path(options.cache) / f"qwen3-{options.shape}-{config.num_hidden_layers}-layers"
    if folder.exists():
        return folder
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "common/tiny_policy")
    tokenizer.eos_token = tokenizer.pad_token = tokenizer.convert_ids_to_tokens(STOP)
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    folder.parent.mkdir(parents=True, exist_ok=True)
    part = Path(tempfile.mkdtemp(dir=folder.parent))  # if interrupted, no half checkpoint is found
    model.save_pretrained(part)
    tokenizer.save_pretrained(part)
    return part.rename(folder)


class RandomRewards:
    """In the place of a Grader. Texts are a rollout's, group by group; the share `idle` of the
    groups has equal rewards. (Its source alone is run in workers, where other benches may be.)"""

    def __init__(self, idle=0.0, size=1):
        self.rng, self.idle, self.size = random.Random(0), idle, size

    def grade(self, texts, answers):
        groups = range(len(texts) // self.size)
        idle = self.rng.sample(groups, round(self.idle * len(groups)))
        return [self.rng.random() * (i // self.size not in idle) for i in range(len(texts))]


def forced_lengths(kind: str, count: int, longest: int) -> Tensor:
    """Lengths [count]: all the longest, or the quantiles of a log-normal in random order."""
    if kind == "equal":
        return torch.full((count,), longest)
    z, sigma = torch.special.ndtri((torch.arange(count) + 0.5) / count), 0.6
    lengths = (longest / 3 * (sigma * z - sigma**2 / 2).exp()).round().long().clamp(1, longest)
    return lengths[torch.randperm(count, generator=torch.Generator().manual_seed(0))]


def force_uniforms(row_uniforms, lengths: Tensor):
    """A script's `row_uniforms`, with which every rollout has these lengths."""

    def forced(args, kind: str, step: int, rows: Tensor, length: int) -> Tensor:
        u = row_uniforms(args, kind, step, rows, length)
        if kind == "rollout":
            u = u.clamp(min=1e-3).scatter(1, lengths[rows, None] - 1, 0.0)
        return u

    return forced


def force_generate(generate, lengths: Tensor, prompt_length: int):
    """Transformers' `generate`, whose rows have these lengths."""

    def process(input_ids: Tensor, scores: Tensor) -> Tensor:
        stops = lengths.to(scores.device) == input_ids.shape[1] - prompt_length + 1
        scores[:, STOP] = torch.where(stops, 1e9, -math.inf)
        return scores

    return lambda **inputs: generate(logits_processor=[process], **inputs)


def check_lengths(found: list[int], forced: Tensor | None) -> None:
    if forced is not None and found != forced.tolist():
        sys.exit("bench.py: error: forced lengths were not kept: is top_k, top_p or a sampler new?")


def plant_answers(batch, tokenizer) -> None:
    """Writes a boxed answer before the stop token of every completion that has room for it."""
    box = tokenizer.encode("\\boxed{7}", add_special_tokens=False)
    ends = batch.prompt_width + batch.mask.sum(1) - 1  # [N]
    for row, end in enumerate(ends.tolist()):
        if end - batch.prompt_width > len(box):
            batch.ids[row, end - len(box) : end] = torch.tensor(box, device=batch.ids.device)


# --------------------------------------------------------------------------------------------------
# Ours
# --------------------------------------------------------------------------------------------------
class Bench(NamedTuple):
    """One script: a run that all its methods share, and what it runs on."""

    module: object
    run: object
    data: tuple[list[Problem], list[list[int]]]  # problems and their prompts
    methods: dict[str, object]  # credit -> its Args
    lengths: Tensor | None  # None: rows stop where the policy stops


def prepare(module, credits: list[str], options: argparse.Namespace) -> Bench:
    flags, count, lengths = STATIONARY.split(), options.completions, None
    if options.completion_tokens:
        flags += ["--max_completion_length", str(options.completion_tokens)]
    if count:
        size = min(count, options.micro_batch)
        flags += ["--per_device_train_batch_size", str(size)]
        flags += ["--gradient_accumulation_steps", str(count // size)]
    if options.shape != "tiny":
        flags += ["--model_name_or_path", str(make_checkpoint(options))]
    flags += options.flags
    methods = {credit: module.parse_args([*flags, "--credit", credit]) for credit in credits}
    args = methods[credits[0]]
    if options.shape == "tiny":
        tokenizer, data, _ = module.load_data(args)
        run = module.build_run(args, tokenizer)
        if options.idle:  # random rewards hang on no step
            data = ([problem._replace(steps=()) for problem in data[0]], data[1])
            run.grader = RandomRewards(options.idle, args.num_generations)
        return Bench(module, run, data, methods, None)
    run = module.build_run(args, AutoTokenizer.from_pretrained(args.model_name_or_path))
    run.grader = RandomRewards(options.idle, args.num_generations)
    shape, generator = (256, options.prompt_tokens), torch.Generator().manual_seed(0)
    prompts = torch.randint(3, VOCABULARY, shape, generator=generator).tolist()
    count = args.per_device_train_batch_size * args.steps_per_generation
    lengths = forced_lengths(options.lengths, count, args.max_completion_length)
    module.row_uniforms = force_uniforms(module.row_uniforms, lengths)
    return Bench(module, run, ([Problem("", "7")] * len(prompts), prompts), methods, lengths)


def clock(device: torch.device) -> float:
    """Seconds, with a GPU's work done."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def resident_gib(name: str) -> float:
    """Of this process: VmRSS, now, or VmHWM, the most."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition(f"{name}:")[2].split()[0]) / 2**20  # KiB


def allocated_gib(device: torch.device) -> float:
    on_gpu = device.type == "cuda"
    return torch.cuda.memory_allocated(device) / GIB if on_gpu else resident_gib("VmRSS")


def peak_gib(device: torch.device, others: float = 0.0) -> float:
    """The most memory since the last call, less the others'; on a CPU all of the process's."""
    if device.type != "cuda":
        peak = resident_gib("VmHWM")
        Path("/proc/self/clear_refs").write_text("5")  # the most is what there is now
        return peak - others
    peak = torch.cuda.max_memory_allocated(device) / GIB
    torch.cuda.reset_peak_memory_stats(device)
    return peak - others


def weights_gib(model: torch.nn.Module) -> float:
    return sum({p.data_ptr(): p.nbytes for p in model.parameters()}.values()) / GIB  # shared once


def step(bench: Bench, credit: str, repeat: int, others: float) -> dict:
    """One step, of the rollout `repeat`: its seconds and its phases', tokens/s, peaks of memory."""
    module, run = bench.module, replace(bench.run, args=bench.methods[credit], rollout=repeat)
    args, device = run.args, run.accelerator.device
    peak_gib(device)
    began = clock(device)
    batch = module.collect(run, bench.data, {})
    row = {"seconds_rollout": clock(device) - began, "peaks": [peak_gib(device, others)]}
    if bench.lengths is not None:
        check_lengths(batch.mask.sum(1).tolist(), bench.lengths[batch.rows.cpu()])
        plant_answers(batch, run.tokenizer)
    parts = module.micro_batches(args, batch)
    micros = [micro for part in parts for micro in part]
    module.score(run, batch, micros, row)  # writes its seconds into the row
    row["peaks"].append(peak_gib(device, others))
    scored = clock(device)
    for part in parts * args.num_iterations:
        module.update(run, part)
    row["seconds_update"] = clock(device) - scored
    row["peaks"].append(peak_gib(device, others))
    row["step"] = sum(seconds for name, seconds in row.items() if name.startswith("seconds_"))
    tokens = {"rollout": int(batch.mask.sum()), "update": 0}
    tokens["update"] = args.num_iterations * sum(int(micro.attention.sum()) for micro in micros)
    tokens["credit"] = row.get("credit_forward_tokens", 0)  # 0 without a forward of its own
    return row | {f"{x}_tokens_per_second": n / row[f"seconds_{x}"] for x, n in tokens.items()}


# --------------------------------------------------------------------------------------------------
# TRL
# --------------------------------------------------------------------------------------------------
class Trl(TrainerCallback):
    """TRL's GRPOTrainer on a bench's policy and prompts. It runs the loop, and calls us back."""

    def __init__(self, bench: Bench, rollouts: int):
        from datasets import Dataset
        from trl import GRPOConfig, GRPOTrainer

        args, run, (problems, prompts) = bench.run.args, bench.run, bench.data
        self.device, self.rows = run.accelerator.device, []
        self.lengths, on_gpu = bench.lengths, self.device.type == "cuda"
        before = allocated_gib(self.device)
        model = bench.module.load_policy(args, self.device)
        self.weights, self.own = weights_gib(model), allocated_gib(self.device) - before
        if bench.lengths is not None:
            model.generate = force_generate(model.generate, bench.lengths, len(prompts[0]))
        count = args.per_device_train_batch_size * args.gradient_accumulation_steps
        places = range(rollouts * (count // args.num_generations))
        chosen = [str(problem_at(place, len(problems), args.seed)) for place in places]
        config = GRPOConfig(
            **{name: getattr(args, name) for name in SAME_IN_TRL.split()},
            output_dir=tempfile.gettempdir(),
            max_steps=rollouts,
            lr_scheduler_type="constant",
            bf16=args.dtype == "bfloat16",
            use_cpu=not on_gpu,
            shuffle_dataset=False,
            logging_strategy="no",
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )

        def reward(prompts: list[str], completions: list[str], **_) -> list[float]:
            return correctness(run.grader, completions, [problems[int(place)] for place in prompts])

        data = Dataset.from_dict({"prompt": chosen})  # those of `collect`, each by its place
        how = {"train_dataset": data, "processing_class": run.tokenizer, "callbacks": [self]}
        self.trainer = GRPOTrainer(model, reward, config, **how)
        self.trainer.remove_callback(transformers.PrinterCallback)
        # It gets the same tokens as we do, not a text to cut anew.
        self.trainer._tokenize_prompts = lambda ps: ([prompts[int(p)] for p in ps], None, {})
        self.generate = self.trainer._generate_single_turn
        self.trainer._generate_single_turn = self.timed_generate

    def run(self, after_step) -> None:
        """Trains; after every step k calls after_step(k)."""
        self.after_step = after_step
        self.trainer.train()

    def timed_generate(self, prompts: list[list[int]], *inputs):
        began = clock(self.device)
        completions, logprobs = self.generate(prompts, *inputs)
        seconds, lengths = clock(self.device) - began, [len(ids) for ids in completions]
        check_lengths(lengths, self.lengths)
        self.tokens = sum(lengths) + sum(map(len, prompts))
        self.rows[-1] |= {
            "seconds_rollout": seconds,
            "rollout_tokens_per_second": sum(lengths) / seconds,
            "peaks": [peak_gib(self.device, self.others), math.nan],
        }
        return completions, logprobs

    def on_step_begin(self, args, state, control, **_):
        torch.backends.cuda.enable_cudnn_sdp(True)  # its default; ours turn it off
        self.others = allocated_gib(self.device) - self.own
        peak_gib(self.device)
        self.rows.append({"seconds_score": 0.0, "seconds_credit": 0.0})
        self.began = clock(self.device)

    def on_step_end(self, args, state, control, **_):
        row = self.rows[-1]
        row["step"] = clock(self.device) - self.began
        row["seconds_update"] = row["step"] - row["seconds_rollout"]
        row["update_tokens_per_second"] = self.tokens / row["seconds_update"]
        row["peaks"].append(peak_gib(self.device, self.others))
        torch.backends.cuda.enable_cudnn_sdp(False)
        self.after_step(state.global_step - 1)


# --------------------------------------------------------------------------------------------------
# The table
# --------------------------------------------------------------------------------------------------
def spread(values: list[float], digits: int = 2) -> str:
    """Median (quartiles)."""
    values = values * 2 if len(values) == 1 else values  # as many as quantiles() wants
    quartiles = statistics.quantiles(values, n=4, method="inclusive")
    low, middle, high = (f"{x:.{digits}f}" for x in quartiles)
    return f"{middle} ({low} - {high})"


def ratio(rows: list[dict], to: list[dict], names: list[str], digits: int = 2) -> str:
    pairs = [[sum(row[x] for x in names) for row in pair] for pair in zip(rows, to, strict=True)]
    return spread([a / b for a, b in pairs], digits)


def table_row(script: str, credit: str, rows: list[dict], uniform: list[dict], gib: float) -> str:
    def median(name: str, digits: int = 2) -> str:
        return f"{statistics.median(row[name] for row in rows):.{digits}f}"

    peaks = [max(values) for values in zip(*(row["peaks"] for row in rows), strict=True)]
    cells = [script, credit, spread([row["step"] for row in rows])]
    cells += [median("seconds_rollout"), median("rollout_tokens_per_second", 0)]
    cells += [median(f"seconds_{phase}") for phase in ("score", "credit", "update")]
    cells += [median("update_tokens_per_second", 0)]
    cells += [ratio(rows, uniform, ["step"]) if uniform else "-", f"{gib:.3g}"]
    cells += [", ".join("n/a" if math.isnan(peak) else f"{peak:.1f}" for peak in peaks)]
    return f"| {' | '.join(cells)} |"


def forward_lines(timings: dict[str, list[dict]]) -> list[str]:
    """How fast OAR-P, which is forwards alone, computes them, beside an update."""
    pair, rows = ("credit_tokens_per_second", "update_tokens_per_second"), timings.get("oar_p", [])
    share = spread([row[pair[0]] / row[pair[1]] for row in rows]) if rows else ""
    return ["", f"oar_p: {share} times the tokens/s of the update"] if rows else []


def header(bench: Bench, options: argparse.Namespace) -> str:
    """What is measured, in a line."""
    args, device, shape = bench.run.args, bench.run.accelerator.device, "tiny policy"
    on_gpu = device.type == "cuda"
    name = torch.cuda.get_device_name() if on_gpu else f"CPU ({torch.get_num_threads()} threads)"
    if options.shape != "tiny":
        layers = f" cut to {options.layers} layers" if options.layers else ""
        shape = f"random Qwen3-{options.shape}{layers}, prompts of {options.prompt_tokens} tokens"
    lengths = "the policy's own" if bench.lengths is None else options.lengths
    return (
        f"{name}, torch {torch.__version__}; {shape}; {'NF4' if args.load_in_4bit else 'dense'} + "
        f"LoRA {args.lora_r} in {args.dtype}, rollouts: {args.rollout_weights}; "
        f"{args.per_device_train_batch_size * args.steps_per_generation} completions of at most "
        f"{args.max_completion_length} tokens ({lengths} lengths), groups of "
        f"{args.num_generations}, micro-batches of {args.per_device_train_batch_size}; median "
        f"(quartiles) of {options.repeats}; {options.idle:.0%} of the groups idle; "
        f"flags: {' '.join(options.flags) or 'none'}"
    )


def progress(name: str, options: argparse.Namespace, repeat: int, began: float) -> None:
    """Says on standard error which repeat is done and how long the rest takes."""
    total, gone = options.warmup + options.repeats, time.perf_counter() - began
    eta = f"{gone:.0f} s gone, about {gone / (repeat + 1) * (total - repeat - 1):.0f} s left"
    kind = "warm-up" if repeat < options.warmup else "repeat"
    print(f"{name}: {kind} {repeat + 1} of {total}, {eta}", file=sys.stderr, flush=True)


def save(path: str, name: str, timings: dict[str, list[dict]]) -> None:
    """Appends a line of JSON for each method: its rows, which the table is the medians of."""
    with open(path, "a") as file:
        for credit, rows in timings.items():
            line = {"script": name, "credit": credit, "rows": rows}
            file.write(json.dumps(line, default=float) + "\n")


def measure(name: str, credits: list[str], options: argparse.Namespace) -> list[str]:
    """The lines of one script: head, table, ratios to TRL."""
    bench = prepare(sys.modules[name], credits, options)
    total, began = options.warmup + options.repeats, time.perf_counter()
    trl = Trl(bench, total) if options.trl else None
    timings: dict[str, list[dict]] = {credit: [] for credit in credits}

    def ours(repeat: int) -> None:
        for credit, rows in timings.items():
            rows.append(step(bench, credit, repeat, trl.own if trl else 0.0))
        progress(name, options, repeat, began)

    if trl:
        trl.run(ours)
    else:
        for repeat in range(total):
            ours(repeat)
    timings = {credit: rows[options.warmup :] for credit, rows in timings.items()}
    if options.json:
        save(options.json, name, timings | ({"TRL": trl.rows[options.warmup :]} if trl else {}))
    gib, uniform = weights_gib(bench.run.model), timings.get("uniform", [])
    lines = [f"{name}: {header(bench, options)}", "", f"| {COLUMNS} |", "|" + "---|" * 12]
    lines += [table_row(name, credit, rows, uniform, gib) for credit, rows in timings.items()]
    if trl:
        theirs, speed = trl.rows[options.warmup :], ["rollout_tokens_per_second"]
        lines += [table_row("TRL", "GRPO", theirs, uniform, trl.weights), ""]
        lines += [
            f"{credit} against TRL: {ratio(own, theirs, speed)} times the rollout's tokens/s, "
            f"{ratio(theirs, own, ['step'])} times as fast a step"
            for credit, own in timings.items()
        ]
    return lines + forward_lines(timings)


# --------------------------------------------------------------------------------------------------
# Another checkout
# --------------------------------------------------------------------------------------------------
@contextlib.contextmanager
def worker(folder: Path, *job: object):
    """A process with that checkout's bench, common/ and scripts; yields ask(credit, repeat), which
    runs a step in it."""
    code = f"import random\n{inspect.getsource(RandomRewards)}{WORKER}"
    command = [sys.executable, "-W", "ignore", "-c", code, json.dumps([str(folder), *job])]
    quiet = os.environ | {"TRANSFORMERS_VERBOSITY": "error", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "bufsize": 1}
    with subprocess.Popen(command, env=quiet, **pipes) as process:

        def answer() -> str:
            said = f"bench.py: error: {folder} failed, see above"
            return process.stdout.readline() or sys.exit(said)

        def ask(credit: str, repeat: int) -> dict:
            process.stdin.write(json.dumps([credit, repeat]) + "\n")
            return json.loads(answer())

        answer()  # it is ready
        yield ask


def compare(name: str, credits: list[str], options: argparse.Namespace) -> list[str]:
    """The lines of one script, here and in another checkout: seconds here over seconds there. A
    repeat is a step in each; the first of a repeat is the second of the next."""
    there, began, found = options.against.resolve(), time.perf_counter(), []
    with contextlib.ExitStack() as stack:
        job = (name, credits, options.shared, options.idle)
        asks = [stack.enter_context(worker(folder, *job)) for folder in (ROOT, there)]
        for repeat in range(options.warmup + options.repeats):
            found.append({})
            for credit in credits:
                order = (0, 1) if repeat % 2 == 0 else (1, 0)
                found[-1][credit] = {side: asks[side](credit, repeat) for side in order}
            progress(name, options, repeat, began)
    lines = [f"{name}: seconds in {ROOT} over those in {there}, median (quartiles) of "]
    lines[0] += f"{options.repeats}; arguments: {' '.join(options.shared)}"
    lines[0] += f"; {options.idle:.0%} of the groups idle" if options.idle else ""
    lines += ["", f"| credit | {' | '.join(PHASES)} | step, s | there |", "|" + "---|" * 7]
    for credit in credits:
        here, old = ([pair[credit][side] for pair in found[options.warmup :]] for side in (0, 1))
        cells = [ratio(here, old, names, 3) for names in PHASES.values()]
        cells += [spread([row["step"] for row in rows]) for rows in (here, old)]
        lines.append(f"| {credit} | {' | '.join(cells)} |")
    return lines


# --------------------------------------------------------------------------------------------------
# Command line
# --------------------------------------------------------------------------------------------------
def parse_options(argv: list[str]) -> argparse.Namespace:
    cut = argv.index("--") if "--" in argv else len(argv)
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add, scripts = parser.add_argument, sorted(path.stem for path in ROOT.glob("grpo_*.py"))
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
    beside.add_argument("--against", type=Path, help="folder of another checkout, beside this one")
    add("--repeats", type=int, default=5)
    add("--warmup", type=int, default=2, help="repeats before those, not counted")
    add("--json", help="file that gets every repeat's figures too, a line for each method")
    add("--cache", default=f"{tempfile.gettempdir()}/qwen3-shapes", help="folder of checkpoints")
    options = parser.parse_args(argv[:cut])
    options.flags, mine = argv[cut + 1 :], argparse.ArgumentParser(add_help=False)
    mine.add_argument("--against"), mine.add_argument("--idle")
    options.shared = mine.parse_known_args(argv[:cut])[1] + argv[cut:]  # an older bench lacks it
    if options.json and options.against:
        parser.error("--json keeps one checkout's figures: leave out --against")
    for name in set(options.scripts) - set(scripts):
        parser.error(f"no script {name}: there are {', '.join(scripts)}")
    if options.against and not (options.against / "tests/bench.py").is_file():
        parser.error(f"--against {options.against}: there is no tests/bench.py in it")
    if not 0 <= options.idle <= 1:
        parser.error("--idle is a share of the groups, from 0 to 1")
    if options.shape != "tiny":
        options.completions = options.completions or 64
        options.completion_tokens = options.completion_tokens or 256
        if not (options.layers or torch.cuda.is_available()):
            parser.error(f"--shape {options.shape} needs a GPU; --layers 2 tests it on a CPU")
    if options.completions and options.completions % min(options.completions, options.micro_batch):
        parser.error("--micro_batch must divide --completions")
    hints = {name: get_type_hints(importlib.import_module(name).Args) for name in options.scripts}
    options.methods = {name: get_args(hint["credit"]) for name, hint in hints.items()}
    for credit in set(options.credit) - {c for known in options.methods.values() for c in known}:
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
            sys.modules[name].use_every_core()
            how = compare if options.against else measure
            print(*how(name, credits, options), "", sep="\n", flush=True)
        gc.collect()  # the script's models, before the next one's
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
