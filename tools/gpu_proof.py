"""Measures all that only a GPU can prove or refute, by one command of about forty minutes.

    python tools/gpu_proof.py                       # what is not done yet, into runs/gpu_proof
    python tools/gpu_proof.py kill profile          # these parts alone, again
    python tools/gpu_proof.py --seconds 570         # in jobs of ten minutes: call it again
    python tools/gpu_proof.py --small               # in small on a CPU: does the command work?

Each part has processes of its own and a time limit: the seconds below, 2,135 in all, plus what
earlier parts did not use, and at most ten minutes. If a part fails or takes too long, the others
still run. The next call repeats it, and skips what is done. <folder>/<part>/output.txt has all
that it printed. After each part results/data/gpu_proof/gpu.json and the last section of
results/COSTS.md are written anew: measured, goal, whether it holds, and the card and the versions
that it was measured with. Without a GPU nothing holds: it is "skipped: no GPU", and both files are
in <folder>.

Only `memory` needs other parts: it compares its counts with the peaks of `trl` and `8b`.
"""

import argparse
import contextlib
import ctypes
import importlib.metadata
import itertools
import json
import math
import os
import re
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import psutil

ROOT = Path(__file__).resolve().parents[1]
BEGIN = "<!-- gpu_proof.py: begin -->"
END = "<!-- gpu_proof.py: end -->"
PACKAGES = ("torch", "transformers", "peft", "accelerate", "bitsandbytes", "trl")
MOST_SECONDS = 600  # of a part
SMALL_FACTOR = 4  # a CPU may be slow
CARD = """import torch
if torch.cuda.is_available():
    card = torch.cuda.get_device_properties(0)
    print(f"{card.name}, {card.total_memory / 2**30:.0f} GiB")"""


def fail(message: object) -> NoReturn:
    """Ends the program with a sentence about the user's mistake."""
    print(f"gpu_proof.py: error: {message}", file=sys.stderr)
    sys.exit(2)


# ---- The parts, in the order in which they are worth their time ----------------------------------
class Part(NamedTuple):
    """Commands, and what they are to show."""

    name: str
    seconds: int
    command: str  # {words} are filled in; && separates commands
    goals: list[str]  # "figure >= 15", "figure <= 0.1", or "figure": it is only to be known


def bench(script: str, options: str, flags: str = "") -> str:
    """Returns a command that measures steps of the 1.7B shape."""
    return (
        f"python tools/bench.py {script} --shape 1.7B --warmup 1 --repeats 2 {options} {{bench}} "
        f"--json {{out}}/bench.jsonl -- --lora_r 16 --gradient_checkpointing True {flags} {{flags}}"
    )


def launch(flags: str = "", kill_at: int = 0) -> str:
    """Returns a command that trains, and if `kill_at` is a step, kills it there and resumes."""
    train = f"accelerate launch grpo_arca.py {flags} {{run}} --output_dir {{out}}/run"
    if kill_at == 0:
        return train
    checkpoint = f"{{out}}/run/checkpoint-{kill_at}"
    return f"python tools/gpu_proof.py --inside kill {checkpoint} {train} --save_steps {kill_at}"


SMALL = {  # the last value of a flag counts, so that these make any command small
    "bench": "--shape tiny --completions 8 --micro_batch 4 --completion_tokens 24 --warmup 0 "
    "--repeats 1 --lengths equal",
    "flags": "--lora_r 4 --torch_compile False",  # compiled for a CPU, it would take minutes
    "run": "--max_steps 6 --per_device_train_batch_size 8 --gradient_accumulation_steps 1 "
    "--num_generations 4 --max_completion_length 8 --max_eval_samples 2 --eval_steps 0",
    "count": "--shape 0.6B",
    "help": "--help",  # a second count takes a minute and shows no more
}
BOTH = "--credit uniform arca {trl}"
CONTINUOUS = "--credit uniform {trl_continuous}"
MANY = "--credit uniform --completions 256"
LONG = "--completions 8 --micro_batch 8 --prompt_tokens 512 --completion_tokens 1024"
QUANTIZED = "--rollout_weights quantized"
COMPILED = "--torch_compile True"
BRIEF = "--max_eval_samples 8 --eval_steps 0"
COUNT = "python tools/memory.py"
CHECKPOINT = "python tools/gpu_proof.py --inside checkpoint"
PAID = "--reward_funcs gpu_proof.variety {gsm8k}"  # random weights get no other reward
RANDOM = f"--model_name_or_path {{random}} {PAID} --max_steps 2 --max_completion_length 128 {BRIEF}"
WORTH = (
    "python tools/worth.py 'grpo_arca.py --credit uniform --negative_weight 0' --batches 4 "
    f"--folder {{out}} -- {PAID} --model_name_or_path {{larger}} --lora_r 16 "
    "--max_completion_length 256 {run}"
)
SMOLLM2 = (
    "--model_name_or_path {smollm2} --dataset_name {smollm2}/sums.jsonl --max_completion_length 32"
)
ONE_MICRO_BATCH = (
    "--learning_rate 1e-5 --gradient_checkpointing False --per_device_train_batch_size 32 "
    "--gradient_accumulation_steps 1"
)
PROFILE = bench("grpo_arca", "--credit uniform").replace(
    "bench.py", "gpu_proof.py --inside profile {out}"
)
# Figures
SPEED = "uniform, rollout tokens/s"
GAP = "sampled - recomputed log-prob"
OVER_TRL = f"{SPEED} over TRL's"
STEP = "TRL, step over uniform's"
ARCA = "arca, step over uniform's"
WAY = "captured step over a merged weight's"
BF16 = [
    "least slope of the sampled policy's change >= 0.99",
    "largest <= 1.01",
    "ARCA in bf16, rank correlation with fp32",
    "OAR-G in bf16, rank correlation with fp32",
]
# 18,000 and 35,000 tokens/s are those of vLLM in bf16 on an H200, 42,540 twice those of its QLoRA.
PARTS = [
    Part(
        "tests",
        260,
        "pytest tests/trainer/test_gpu.py -s",
        [
            "tests that pass >= 1",
            "tests that fail <= 0",
            f"{GAP}, dense <= 0.02",
            f"{GAP}, quantized <= 0.01",
        ],
    ),
    Part(
        "trl",
        140,
        bench("grpo_arca", BOTH),
        [SPEED, f"{OVER_TRL} >= 15", f"{STEP} >= 8", f"{ARCA} <= 1.2", "arca, peak GiB <= 9"],
    ),
    # TRL with transformers' continuous batching and a manager that is kept between rollouts
    Part("trl-continuous", 120, bench("grpo_arca", CONTINUOUS), [SPEED, OVER_TRL, STEP]),
    Part(
        "trl-quantized",
        140,
        bench("grpo_arca", BOTH, QUANTIZED),
        [SPEED, f"{OVER_TRL} >= 8", f"{STEP} >= 8", f"{ARCA} <= 1.2", "arca, peak GiB <= 5"],
    ),
    Part(
        "trl-compiled",
        185,
        bench("grpo_arca", BOTH, COMPILED),
        [f"{SPEED} >= 18000", f"{OVER_TRL} >= 30", f"{STEP} >= 10", f"{ARCA} <= 1.2"],
    ),
    Part(
        "256",
        90,
        bench("grpo_arca", MANY, COMPILED),
        [f"{SPEED} >= 35000", f"{SPEED} >= 42540"],
    ),
    Part(
        "256-lognormal",
        70,
        bench("grpo_arca", f"{MANY} --lengths lognormal", COMPILED),
        [SPEED],
    ),
    Part(
        "oar",
        100,
        bench("grpo_oar", "--credit uniform oar_g"),
        ["oar_g, step over uniform's <= 1.5"],
    ),
    Part(
        "strace",
        50,
        bench("grpo_strace", "--credit uniform s_trace"),
        ["s_trace, step over uniform's <= 1.03"],
    ),
    Part(
        "8b",
        170,
        bench("grpo_arca", f"--credit arca --shape 8B {LONG}", QUANTIZED),
        ["arca, rollout tokens/s", "arca, peak GiB <= 20"],
    ),
    Part(
        "16x640",
        100,
        bench("grpo_arca", "--credit uniform --completion_tokens 512", COMPILED),
        ["uniform, training tokens/s >= 38000", "uniform, training peak GiB <= 10"],
    ),
    Part(
        "memory",
        100,
        f"{COUNT} --shape 1.7B --rollout_weights dense {{count}} -- --lora_r 16 && "
        f"{COUNT} --shape 8B {QUANTIZED} {LONG} {{help}} -- --lora_r 16",
        ["counted peaks are off by, trl <= 0.1", "counted peaks are off by, 8b <= 0.1"],
    ),
    Part(
        "default",
        80,
        launch(),
        [
            "updates >= 45",
            "accuracy before, after",
            f"{GAP} <= 0.02",
            "growth of its memory <= 1.05",
        ],
    ),
    Part("kill", 60, launch(f"--max_steps 10 {BRIEF}", kill_at=4), ["updates >= 10"]),
    Part(
        "random-0.6B",
        80,
        f"{CHECKPOINT} {{random_shape}} && {launch(RANDOM, kill_at=1)}",
        ["updates >= 2"],
    ),
    Part(
        "profile",
        110,
        PROFILE,
        ["costs of a decode step", "costs of a training step", f"{WAY}, dense", f"{WAY}, PEFT"],
    ),
    Part(
        "precision",
        40,
        "python tools/precision.py -- {run} --max_completion_length 80",
        BF16,
    ),
    Part(
        "precision-smollm2",
        60,
        f"python tools/precision.py -- {SMOLLM2} {ONE_MICRO_BATCH}",
        BF16,
    ),
    Part(
        "worth",
        140,
        f"{CHECKPOINT} {{larger_shape}} && {WORTH}",
        ["seconds a batch of worth.py <= 150"],  # 24 of them within an hour
    ),
    Part(
        "smollm2",
        40,
        launch(f"{SMOLLM2} --learning_rate 4e-4 --max_steps 30 --eval_steps 0"),
        ["updates >= 30", "accuracy before, after", f"{GAP} <= 0.02"],
    ),
]


def fill(part: Part, options: argparse.Namespace, trl: bool) -> str:
    """Returns a part's command, for these options."""
    shapes = Path(tempfile.gettempdir(), "qwen3-shapes")  # where bench.py puts its checkpoints
    out = options.folder / part.name
    if out.is_relative_to(ROOT):
        out = out.relative_to(ROOT)
    words = {name: text if options.small else "" for name, text in SMALL.items()}
    words["out"] = shlex.quote(str(out))
    words["smollm2"] = shlex.quote(str(options.smollm2))
    for name, size in (("random", "0.6B"), ("larger", "1.7B")):
        folder = "common/tiny_policy" if options.small else f"{shapes}/qwen3-{size}-28-layers"
        words[name] = shlex.quote(folder)
        words[f"{name}_shape"] = "tiny" if options.small else size
    words["gsm8k"] = ""
    if options.gsm8k is not None:
        words["gsm8k"] = f"--dataset_name {shlex.quote(str(options.gsm8k))}"
    words["trl"] = "--trl" if trl else ""
    words["trl_continuous"] = "--trl_continuous" if trl else ""
    return " ".join(part.command.format_map(words).split())


# ---- What a part measured ------------------------------------------------------------------------
class Pattern(NamedTuple):
    """Where a figure's numbers are in what a part printed, and what it is of them."""

    regex: str
    pick: Callable[[list[float]], float]


MEAN = r", compiled \w+: mean .sampled - recomputed. ([\d.]+)"
SLOPE = r"bf16, dense: .*slope (\S+)"
PRINTED = {
    "tests that pass": Pattern(r"(\d+) passed", sum),
    "tests that fail": Pattern(r"(\d+) (?:failed|error)", sum),
    f"{GAP}, dense": Pattern(f"dense{MEAN}", max),
    f"{GAP}, quantized": Pattern(f"quantized{MEAN}", max),
    "least slope of the sampled policy's change": Pattern(SLOPE, min),
    "largest": Pattern(SLOPE, max),
    "ARCA in bf16, rank correlation with fp32": Pattern(r"arca in bf16  rank (\S+)", max),
    "OAR-G in bf16, rank correlation with fp32": Pattern(r"oar_g in bf16  rank (\S+)", max),
    "seconds a batch of worth.py": Pattern(r"\[4/4\] batch \d; (\d+) s each", max),
}
# A row of memory.py: shape, weights, and GiB of weights, rollout, score and update
COUNTED = r"B \| \w+ \| \S+ \| (\S+) \| (\S+) \| (\S+) \|"


def bench_figures(lines: list[str]) -> dict[str, Any]:
    """Reads what `bench.py --json` writes: medians, ratios within a repeat, and highest peaks."""
    rows_of = {}
    for line in lines:
        method = json.loads(line)
        rows_of[method["credit"]] = method["rows"]
    columns = {
        "rollout tokens/s": "rollout_tokens_per_second",
        "step": "step",
        "training tokens/s": "update_tokens_per_second",
    }
    found: dict[str, Any] = {}
    for credit, own in rows_of.items():
        peaks = [max(phase) for phase in zip(*(row["peaks"] for row in own), strict=True)]
        found[f"{credit}, peaks"] = peaks
        found[f"{credit}, peak GiB"] = max(peaks)
        found[f"{credit}, training peak GiB"] = peaks[-1]
        for what, column in columns.items():
            found[f"{credit}, {what}"] = statistics.median(row[column] for row in own)
            for other, theirs in rows_of.items():
                ratios = [a[column] / b[column] for a, b in zip(own, theirs, strict=True)]
                found[f"{credit}, {what} over {other}'s"] = statistics.median(ratios)
    return found


def run_figures(lines: list[str]) -> dict[str, Any]:
    """Reads a run's metrics.jsonl.

    Updates count if each of them is there once: then a resumed run went on where it was.
    """
    rows = [json.loads(line) for line in lines]
    updates = [row for row in rows if "loss" in row]
    found: dict[str, Any] = {}
    if [row["step"] for row in updates] == list(range(1, len(updates) + 1)):
        found["updates"] = len(updates)
    found[GAP] = max(row["sampling_gap"] for row in updates)
    peaks = [row["peak_memory_gb"] for row in updates]
    found["growth of its memory"] = peaks[-1] / peaks[len(peaks) // 3]  # at first lengths differ
    right = [f"{row['eval']['sampled_accuracy']:.1%}" for row in rows if row.get("eval")]
    found["accuracy before, after"] = f"{right[0]}, {right[-1]}"
    return found


def first_object(lines: list[str]) -> dict[str, Any]:
    """Reads the figures of a part that wrote them itself."""
    return json.loads(lines[0])


READERS = {
    "bench.jsonl": bench_figures,
    "run/metrics.jsonl": run_figures,
    "figures.json": first_object,
}


def figures(folder: Path) -> dict[str, Any]:
    """Returns all that can be read of what a part left."""
    if not (folder / "output.txt").exists():
        return {}
    printed = (folder / "output.txt").read_text(errors="replace")
    found: dict[str, Any] = {}
    for figure, pattern in PRINTED.items():
        numbers = [float(number) for number in re.findall(pattern.regex, printed)]
        if numbers or pattern.pick is sum:
            found[figure] = pattern.pick(numbers)
    for name, read in READERS.items():
        with contextlib.suppress(OSError, ValueError, LookupError):  # of one that was cut short
            found |= read((folder / name).read_text().splitlines())
    counted = re.findall(COUNTED, printed)
    for part, counts in zip(("trl", "8b"), counted, strict=False):
        peaks = figures(folder.parent / part).get("arca, peaks", [math.nan] * 3)
        off = [abs(float(count) / peak - 1) for count, peak in zip(counts, peaks, strict=True)]
        found[f"counted peaks are off by, {part}"] = max(off)
    return found


# ---- The table -----------------------------------------------------------------------------------
def verdict(value: Any, goal: str, status: str, card: str) -> str:
    """Returns whether a goal holds.

    Of a part that did not end well, what it measured is said with how it ended.
    """
    if status.startswith("skipped") or (not card and status != "done"):
        return status
    if not card:
        return "skipped: no GPU"
    if value is None:
        return status if status != "done" else "not measured"
    if goal:
        sign, _, bar = goal.partition(" ")
        holds = value >= float(bar) if sign == ">=" else value <= float(bar)
        found = "holds" if holds else "misses"
    else:
        found = "measured"
    return found if status == "done" else f"{found}; {status}"


def split_goal(line: str) -> tuple[str, str]:
    """Returns the figure and the goal of "figure >= 15"; a figure alone has the goal ""."""
    for sign in (">=", "<="):
        figure, found, bar = line.partition(f" {sign} ")
        if found:
            return figure, f"{sign} {bar}"
    return line, ""


def table_rows(part: Part, folder: Path, status: str, machine: dict) -> list[dict[str, Any]]:
    """Returns a row for each goal of a part, with what it was measured on."""
    versions = machine["versions"]
    found = figures(folder)
    rows = []
    for line in part.goals:
        figure, goal = split_goal(line)
        value = found.get(figure)
        if isinstance(value, float) and not math.isfinite(value):  # a peak on a CPU
            value = None
        how = status
        if "TRL" in figure and "trl" not in versions and status == "done":
            how = "skipped: TRL is not installed"
        row = {"part": part.name, "figure": figure, "measured": value, "goal": goal}
        row["verdict"] = verdict(value, goal, how, machine["card"])
        row["card"] = machine["card"] or "none"
        row["torch"] = versions.get("torch", "")
        row["transformers"] = versions.get("transformers", "")
        rows.append(row)
    return rows


def cell(value: Any) -> str:
    """Returns what a cell of the table shows."""
    if value is None or isinstance(value, str):
        return (value or "-").replace("|", "/")
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def section(report: dict[str, Any]) -> str:
    """Returns the report in Markdown."""
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    columns = ["part", "figure", "measured", "goal", "verdict", "card", "torch", "transformers"]
    lines = [
        f"Card: {report['card'] or 'none'}; {versions}; commit {report['commit']}.",
        "",
        f"| {' | '.join(columns)} |",
        "|" + "---|" * len(columns),
    ]
    for row in report["rows"]:
        cells = [cell(row[column]) for column in columns]
        lines.append(f"| {' | '.join(cells)} |")
    lines += ["", "Seconds and commands:", ""]
    for name, part in report["parts"].items():
        lines.append(f"- {name}, {part['status']}, {part['seconds']:.0f} s: `{part['command']}`")
    return "\n".join(lines)


def replace_section(text: str, new: str) -> str:
    """Returns a page with what stands between its two marks replaced."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        fail(f"results/COSTS.md lacks the lines {BEGIN} and {END}, between which the table goes")
    return f"{before}{BEGIN}\n{new}\n{END}{after}"


def write_report(
    states: dict[str, dict], options: argparse.Namespace, machine: dict
) -> list[dict[str, Any]]:
    """Writes gpu.json and the page's table, and returns the table's rows."""
    rows = []
    for part in PARTS:
        status = states[part.name]["status"]
        rows += table_rows(part, options.folder / part.name, status, machine)
    brief = {}
    for name, state in states.items():
        brief[name] = {key: state[key] for key in ("status", "seconds", "commit", "command")}
    commits = ", ".join(sorted({state["commit"] for state in states.values()}))
    report = machine | {"commit": commits, "parts": brief, "rows": rows}

    page = (options.folder if options.small else ROOT / "results") / "COSTS.md"
    data = options.folder if options.small else ROOT / "results/data/gpu_proof"
    text = page.read_text() if page.exists() else f"{BEGIN}\n{END}\n"
    text = replace_section(text, section(report))
    data.mkdir(parents=True, exist_ok=True)
    (data / "gpu.json").write_text(json.dumps(report, indent=1) + "\n")
    page.write_text(text)
    return rows


# ---- What runs in a process of its own, by --inside ----------------------------------------------
def variety(completions: list[str], **_: Any) -> list[float]:
    """Returns a reward that random weights get, too."""
    return [len(set(text)) / 100 for text in completions]


def checkpoint(shape: str) -> None:
    """Makes the checkpoint of a shape for a part that does not use bench.py, if it is missing."""
    import bench

    if shape != "tiny":
        print(bench.make_checkpoint(bench.parse_options(["grpo_arca", "--shape", shape])))


def kill(folder: str, *command: str) -> None:
    """Ends a run's trainer by kill -9 once a checkpoint is there, and resumes the run."""
    launcher = subprocess.Popen(command)
    while launcher.poll() is None and not Path(folder).exists():
        time.sleep(0.05)
    with contextlib.suppress(psutil.NoSuchProcess):  # it has ended already
        for trainer in psutil.Process(launcher.pid).children():
            trainer.kill()
            print(f"killed {trainer.pid}", flush=True)
    if launcher.wait() == 0 or not Path(folder).exists():
        sys.exit("it ended before it was killed")
    sys.exit(subprocess.run([*command, "--resume_from_checkpoint", "latest"]).returncode)


@contextlib.contextmanager
def decoder(made: Any, way: Callable) -> Iterator[Any]:
    """Yields a rollout of a bench in progress, while the policy computes as `way` makes it."""
    import torch

    run = made.run
    args = run.args
    rows = torch.arange(args.per_device_train_batch_size * args.steps_per_generation)
    uniforms = made.module.row_uniforms(args, "rollout", 0, rows, args.max_completion_length)
    uniforms = uniforms.to(run.eos_ids.device)
    _, prompts = made.data
    row_prompts = [prompts[row // args.num_generations] for row in rows.tolist()]
    run.policy.eval()
    with torch.no_grad(), way(run.model), run.accelerator.autocast():
        base = run.model.get_base_model()
        yield made.module.Decoder(base, row_prompts, uniforms, (1.0, 0, 1.0))


def largest_costs(job: Callable[[], object]) -> str:
    """Returns the three operations that take most of a job's time, with their inputs' shapes."""
    import torch

    job()  # warms up
    with torch.profiler.profile(record_shapes=True) as profiled:
        job()
    name = "self_device_time_total" if torch.cuda.is_available() else "self_cpu_time_total"
    events = profiled.key_averages(group_by_input_shape=True)
    print(events.table(sort_by=name, row_limit=20, max_name_column_width=60))

    # Kernels are events, too, but do not say what for.
    costs = []
    for place, event in enumerate(events):
        if event.device_type.name == "CPU":
            costs.append((-getattr(event, name), place, event))
    costs.sort()
    total = sum(cost for cost, _, _ in costs) or 1
    found = []
    for cost, _, event in costs[:3]:
        shapes = " x ".join(str(shape) for shape in event.input_shapes if shape)
        found.append(f"{event.key} {shapes}: {cost / total:.0%}")
    return "; ".join(found)


def profile(folder: str, *argv: str) -> None:
    """Profiles a decode step and a micro-batch's update, and times a captured decode step.

    The profiled decode step is run eagerly, since a captured one has no names. The captured one is
    timed for each thing that it may compute with.
    """
    import bench
    import precision

    module = precision.grpo_arca
    made = bench.prepare(module, ["uniform"], bench.parse_options(list(argv)))
    run = made.run
    with decoder(made, module.dense) as rollout:
        found: dict[str, Any] = {"costs of a decode step": largest_costs(rollout.step)}

    batch = module.collect(run, made.data, {})
    micros = module.micro_batches(run.args, batch)[0][:1]
    module.score(run, batch, micros, {})

    def update() -> None:
        module.update(run, micros)

    found["costs of a training step"] = largest_costs(update)

    seconds = {}
    ways = {"dense": module.dense, "PEFT": precision.rounded, "merged": precision.merged}
    for name, way in ways.items():
        with decoder(made, way) as rollout:
            times = [bench.clock(run.accelerator.device)]
            for _ in range(run.args.max_completion_length - 2):
                rollout.advance()
                times.append(bench.clock(run.accelerator.device))
        seconds[name] = statistics.median(b - a for a, b in itertools.pairwise(times))
    print(seconds)
    for name in ("dense", "PEFT"):
        found[f"{WAY}, {name}"] = seconds[name] / seconds["merged"]
    Path(folder, "figures.json").write_text(json.dumps(found))


INSIDE: dict[str, Callable[..., None]] = {
    "checkpoint": checkpoint,
    "kill": kill,
    "profile": profile,
}


# ---- Doing the parts -----------------------------------------------------------------------------
def die_with_parent() -> None:
    """Asks the kernel to kill this process when its parent ends, however that ends."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def do(command: str, seconds: float, log: Path, env: dict[str, str]) -> str:
    """Runs commands one after another, and returns how they ended. Their output goes to the log."""
    ends = time.monotonic() + seconds
    with open(log, "w") as file:
        for one in command.split(" && "):
            print(f"$ {one}", file=file, flush=True)
            try:
                process = subprocess.Popen(
                    shlex.split(one),
                    cwd=ROOT,
                    env=env,
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    preexec_fn=die_with_parent,
                )
            except OSError as error:
                return f"failed: {error}"
            try:
                code = process.wait(max(0.0, ends - time.monotonic()))
            except subprocess.TimeoutExpired:
                return f"timed out after {seconds:.0f} s"
            finally:  # with all that it started, or that would keep the card's memory
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            if code:
                return f"failed: exit code {code}"
    return "done"


def environment(small: bool) -> dict[str, str]:
    """Returns the environment variables of the parts."""
    env = dict(os.environ)
    env["PATH"] = f"{Path(sys.executable).parent}:{env.get('PATH', '')}"
    # The reward `variety` is imported from here. What the user has set stays: it may hold packages.
    folders = [str(ROOT / "tools"), env.get("PYTHONPATH", "")]
    env["PYTHONPATH"] = ":".join(folder for folder in folders if folder)
    cards = env.get("CUDA_VISIBLE_DEVICES", "0").split(",")  # of several, one is measured
    env["CUDA_VISIBLE_DEVICES"] = "" if small else cards[0]
    return env


def commit_of(env: dict[str, str]) -> str:
    """Returns the commit, "-dirty" if files have changed since; "unknown" without git."""

    def git(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(["git", *words], env=env, cwd=ROOT, capture_output=True, text=True)

    try:
        described = git("describe", "--always", "--exclude=*")
        if described.returncode != 0:
            return "unknown"
        changed = git("diff", "--quiet", "HEAD", "--", ".", ":!results")  # where this writes
    except OSError:  # there is no git
        return "unknown"
    return described.stdout.strip() + ("-dirty" if changed.returncode != 0 else "")


def surroundings(small: bool) -> tuple[dict[str, str], dict[str, Any]]:
    """Returns the environment of the parts, and what their figures depend on."""
    env = environment(small)
    asked = subprocess.run(
        [sys.executable, "-c", CARD], env=env, cwd=ROOT, capture_output=True, text=True
    )
    if asked.returncode != 0:
        fail(f"torch does not work here: {asked.stderr.strip()[-200:]}")
    if not (small or asked.stdout):
        fail("there is no GPU: --small tries the command in small on a CPU")
    versions = {}
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    machine = {"card": asked.stdout.strip(), "versions": versions, "commit": commit_of(env)}
    return env, machine


def state_of(part: Part, options: argparse.Namespace, machine: dict) -> dict[str, Any]:
    """Returns how a part ended, if that was the same command, card and versions."""
    status = "not run yet"
    if "smollm2" in part.name:
        if options.small:
            status = "skipped: no GPU"
        elif not options.smollm2.is_dir():
            status = f"skipped: no {options.smollm2}, see smollm2.py"
    new = machine | {"status": status, "seconds": 0.0}
    new["command"] = fill(part, options, "trl" in machine["versions"])
    with contextlib.suppress(OSError, ValueError):
        old = json.loads((options.folder / part.name / "state.json").read_text())
        if all(old.get(name) == new[name] for name in ("command", "card", "versions")):
            return old
    return new


class Parser(argparse.ArgumentParser):
    """Says a mistake in one sentence, where argparse would print the usage first."""

    def error(self, message: str) -> NoReturn:
        fail(message)


def parse_options() -> argparse.Namespace:
    """Returns the options, or ends the program with a sentence about what is wrong."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("parts", nargs="*", help="to be done again; default: all that are not done")
    add("--small", action="store_true", help="try the command on a CPU")
    add("--folder", type=Path, help="default runs/gpu_proof, with --small runs/gpu_proof_small")
    add("--seconds", type=float, default=math.inf, help="end by then; the next call goes on")
    add("--smollm2", type=Path, default="~/.cache/smollm2", help="made by tools/smollm2.py")
    add("--gsm8k", type=Path, help="GSM8K as .jsonl; default: the embedded task stands in")
    options = parser.parse_args()
    names = [part.name for part in PARTS]
    unknown = sorted(set(options.parts) - set(names))
    if unknown:
        fail(f"no part {unknown[0]}: there are {', '.join(names)}")
    default_folder = "runs/gpu_proof_small" if options.small else "runs/gpu_proof"
    options.folder = (options.folder or ROOT / default_folder).resolve()
    options.smollm2 = options.smollm2.expanduser().resolve()
    if options.gsm8k is not None:
        options.gsm8k = options.gsm8k.expanduser().resolve()
    return options


def prove(options: argparse.Namespace) -> int:
    """Does the parts. Returns 1 if a figure of those asked for misses or is not there, else 0."""
    env, machine = surroundings(options.small)
    options.folder.mkdir(parents=True, exist_ok=True)
    states = {part.name: state_of(part, options, machine) for part in PARTS}
    not_done = [name for name, state in states.items() if state["status"] != "done"]
    again = options.parts or not_done
    skipped = [name for name, state in states.items() if "skipped" in state["status"]]
    due = [part for part in PARTS if part.name in again and part.name not in skipped]
    rows = write_report(states, options, machine)

    factor = SMALL_FACTOR if options.small else 1
    limits = [part.seconds * factor for part in due]
    saved = 0.0
    ends = time.monotonic() + options.seconds
    for i, part in enumerate(due):
        began = time.monotonic()
        if began + limits[i] > ends:
            print(f"{part.name} may take {limits[i]:.0f} s, and --seconds has less left")
            break
        limit = min(limits[i] + saved, MOST_SECONDS, ends - began)
        left = limit + sum(limits[i + 1 :])
        times = f"up to {limit:.0f} s; all that is left: up to {left:.0f} s"
        print(f"{i + 1}/{len(due)} {part.name}: {times}", flush=True)

        out = options.folder / part.name
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir()
        state = states[part.name] | machine
        state["status"] = do(state["command"], limit, out / "output.txt", env)
        state["seconds"] = time.monotonic() - began
        saved += limits[i] - state["seconds"]
        states[part.name] = state
        (out / "state.json").write_text(json.dumps(state, indent=1))
        rows = write_report(states, options, machine)
        for row in rows:
            if row["part"] == part.name:
                print(f"    {row['figure']}: {cell(row['measured'])}, {row['verdict']}", flush=True)

    asked_for = [row for row in rows if not options.parts or row["part"] in options.parts]
    good = re.compile("holds|measured|skipped: .*")
    return 0 if all(good.fullmatch(row["verdict"]) for row in asked_for) else 1


def main() -> None:
    if sys.argv[1:2] == ["--inside"]:
        INSIDE[sys.argv[2]](*sys.argv[3:])
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # ends its part, too
    try:
        sys.exit(prove(parse_options()))
    except OSError as error:
        fail(error)
    except KeyboardInterrupt:
        fail("interrupted; the same command goes on")


if __name__ == "__main__":
    main()
