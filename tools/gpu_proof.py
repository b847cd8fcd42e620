"""All that only a GPU can prove or refute, by one command of half an hour.

    python tests/gpu_proof.py                       # what is not done yet, into runs/gpu_proof
    python tests/gpu_proof.py kill profile          # these parts, again
    python tests/gpu_proof.py --small               # in small on a CPU: does the command work?

Each part has processes of its own and a time limit: its seconds below, 1,800 in all, and what those
before it left of theirs. One that fails or takes too long ends alone, and the next call does it
again, but not one that is done. <folder>/<part>/output.txt has all that it printed. After each part
results/data/gpu.json and the section "On a GPU" of results/README.md are written anew: measured,
goal, and whether it holds. Without a GPU nothing does: it is "skipped: no GPU", and both are in
<folder>.
"""

import argparse
import contextlib
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
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
GSM8K = "../shared/data/gsm8k_train.jsonl"  # where it is not, the embedded task stands in
BEGIN, END = "<!-- gpu_proof.py: begin -->", "<!-- gpu_proof.py: end -->"
PACKAGES = ("torch", "transformers", "peft", "accelerate", "bitsandbytes", "trl")
CARD = """import torch
if torch.cuda.is_available():
    card = torch.cuda.get_device_properties(0)
    print(f"{card.name}, {card.total_memory / 2**30:.0f} GiB")"""


# ---- The parts, in the order in which they are worth their time ----------------------------------
class Part(NamedTuple):
    name: str
    seconds: int
    command: str  # {words} are filled in
    goals: list[str]  # "figure >= 15", "figure <= 0.1", or "figure": it is only to be known


def bench(script: str, options: str, flags: str = "") -> str:
    return (
        f"python tests/bench.py {script} --shape 1.7B --warmup 1 --repeats 2 {options} {{bench}} "
        f"--json {{out}}/bench.jsonl -- --lora_r 16 --gradient_checkpointing True {flags} {{flags}}"
    )


def launch(flags: str = "", kill_at: int = 0) -> str:
    run = f"accelerate launch grpo_arca.py {flags} {{run}} --output_dir {{out}}/run"
    kill = f"python tests/gpu_proof.py --inside kill {{out}}/run/checkpoint-{kill_at}"
    return f"{kill} {run} --save_steps {kill_at}" if kill_at else run


SMALL = {  # the last value of a flag counts, so that these make any command small
    "bench": "--shape tiny --completions 8 --micro_batch 4 --completion_tokens 24 --warmup 0 "
    "--repeats 1 --lengths equal",
    "flags": "--lora_r 4 --torch_compile False",  # compiled for a CPU, it would take minutes
    "run": "--max_steps 6 --per_device_train_batch_size 8 --gradient_accumulation_steps 1 "
    "--num_generations 4 --max_completion_length 8 --max_eval_samples 2 --eval_steps 0",
    "count": "--shape 0.6B",
    "help": "--help",  # a second count takes a minute and shows no more
}
BOTH, MANY = "--credit uniform arca {trl}", "--credit uniform --completions 256"
LONG = "--completions 8 --micro_batch 8 --prompt_tokens 512 --completion_tokens 1024"
QUANTIZED, COMPILED = "--rollout_weights quantized", "--torch_compile True"
PROFILE = "bench.py", "gpu_proof.py --inside profile {out}"
BRIEF, COUNT = "--max_eval_samples 8 --eval_steps 0", "python tests/memory.py"
CHECKPOINT = "--credit uniform --shape 0.6B --repeats 1 --warmup 0"  # leaves it for the next
PAID = "--reward_funcs gpu_proof.variety {gsm8k}"  # random weights get no other reward
RANDOM = f"--model_name_or_path {{random}} {PAID} --max_steps 2 --max_completion_length 128 {BRIEF}"
WORTH = "python results/worth.py 'grpo_arca.py --credit uniform --negative_weight 0'"
SMOLLM2 = "--model_name_or_path {smollm2} --dataset_name {smollm2}/sums.jsonl"
SMOLLM2 += " --max_completion_length 32"
ONE_MICRO_BATCH = "--learning_rate 1e-5 --gradient_checkpointing False"
ONE_MICRO_BATCH += " --per_device_train_batch_size 32 --gradient_accumulation_steps 1"
# Figures
SPEED, GAP = "uniform, rollout tokens/s", "sampled - recomputed log-prob"
OVER_TRL, STEP = f"{SPEED} over TRL's", "TRL, step over uniform's"
ARCA, WAY = "arca, step over uniform's", "captured step over a merged weight's"
BF16 = ["least slope of the sampled policy's change >= 0.99", "largest <= 1.01"]
BF16 += ["ARCA in bf16, rank correlation with fp32", "OAR-G in bf16, rank correlation with fp32"]
# 18,000 and 35,000 tokens/s are those of vLLM in bf16 on an H200, 42,540 twice those of its QLoRA.
PARTS = [
    Part("tests", 190, "pytest tests/test_gpu.py -s",
         ["tests that pass >= 1", "tests that fail <= 0", f"{GAP}, dense <= 0.02",
          f"{GAP}, quantized <= 0.01"]),
    Part("trl", 140, bench("grpo_arca", BOTH),
         [SPEED, f"{OVER_TRL} >= 15", f"{STEP} >= 8", f"{ARCA} <= 1.2", "arca, peak GiB <= 9"]),
    Part("trl-quantized", 140, bench("grpo_arca", BOTH, QUANTIZED),
         [SPEED, f"{OVER_TRL} >= 8", f"{STEP} >= 8", f"{ARCA} <= 1.2", "arca, peak GiB <= 5"]),
    Part("trl-compiled", 185, bench("grpo_arca", BOTH, COMPILED),
         [f"{SPEED} >= 18000", f"{OVER_TRL} >= 30", f"{STEP} >= 10", f"{ARCA} <= 1.2"]),
    Part("256", 90, bench("grpo_arca", MANY, COMPILED),
         [f"{SPEED} >= 35000", f"{SPEED} >= 42540"]),
    Part("256-lognormal", 70, bench("grpo_arca", f"{MANY} --lengths lognormal", COMPILED), [SPEED]),
    Part("oar", 60, bench("grpo_oar", "--credit uniform oar_g"),
         ["oar_g, step over uniform's <= 1.5"]),
    Part("strace", 50, bench("grpo_strace", "--credit uniform s_trace"),
         ["s_trace, step over uniform's <= 1.03"]),
    Part("8b", 135, bench("grpo_arca", f"--credit arca --shape 8B {LONG}", QUANTIZED),
         ["arca, rollout tokens/s", "arca, peak GiB <= 20"]),
    Part("16x640", 70, bench("grpo_arca", "--credit uniform --completion_tokens 512", COMPILED),
         ["uniform, training tokens/s >= 38000", "uniform, training peak GiB <= 10"]),
    Part("memory", 100, f"{COUNT} --shape 1.7B --rollout_weights dense {{count}} -- --lora_r 16 && "
         f"{COUNT} --shape 8B {QUANTIZED} {LONG} {{help}} -- --lora_r 16",
         ["counted peaks are off by, trl <= 0.1", "counted peaks are off by, 8b <= 0.1"]),
    Part("default", 80, launch(),
         ["updates >= 45", "accuracy before, after", f"{GAP} <= 0.02",
          "growth of its memory <= 1.05"]),
    Part("kill", 60, launch(f"--max_steps 10 {BRIEF}", kill_at=4), ["updates >= 10"]),
    Part("random-0.6B", 80, f"{bench('grpo_arca', CHECKPOINT)} && {launch(RANDOM, kill_at=1)}",
         ["updates >= 2"]),
    Part("profile", 110, bench("grpo_arca", "--credit uniform").replace(*PROFILE),
         ["costs of a decode step", "costs of a training step", f"{WAY}, dense", f"{WAY}, PEFT"]),
    Part("precision", 40, "python results/precision.py -- {run} --max_completion_length 80", BF16),
    Part("precision-smollm2", 60, f"python results/precision.py -- {SMOLLM2} {ONE_MICRO_BATCH}",
         BF16),
    Part("worth", 100, f"{WORTH} --batches 4 --folder {{out}} -- {PAID} "
         "--model_name_or_path {larger} --lora_r 16 --max_completion_length 256 {run}",
         ["seconds a batch of worth.py <= 150"]),  # 24 of them within an hour
    Part("smollm2", 40, launch(f"{SMOLLM2} --learning_rate 4e-4 --max_steps 30 --eval_steps 0"),
         ["updates >= 30", "accuracy before, after", f"{GAP} <= 0.02"]),
]  # fmt: skip


def fill(part: Part, options: argparse.Namespace, trl: bool) -> str:
    """A part's command, for these options."""
    shapes = Path(tempfile.gettempdir(), "qwen3-shapes")  # as bench.py leaves them
    inside = options.folder.is_relative_to(ROOT)
    out = (options.folder.relative_to(ROOT) if inside else options.folder) / part.name
    paths = {"out": out, "smollm2": options.smollm2}
    for name, size in (("random", "0.6B"), ("larger", "1.7B")):
        large = shapes / f"qwen3-{size}-28-layers"
        paths[name] = "common/tiny_policy" if options.small else large
    words = SMALL if options.small else dict.fromkeys(SMALL, "")
    words = words | {name: shlex.quote(str(path)) for name, path in paths.items()}
    words["gsm8k"] = f"--dataset_name {GSM8K}" if (ROOT / GSM8K).exists() else ""
    return " ".join(part.command.format(**words, trl="--trl" if trl else "").split())


# ---- What a part measured ------------------------------------------------------------------------
MEAN, SLOPE = r", compiled \w+: mean .sampled - recomputed. ([\d.]+)", r"bf16, dense: .*slope (\S+)"
PRINTED = {  # figure: where its numbers are in what a part printed, and what it is of them
    "tests that pass": (r"(\d+) passed", sum),
    "tests that fail": (r"(\d+) (?:failed|error)", sum),
    f"{GAP}, dense": (f"dense{MEAN}", max),
    f"{GAP}, quantized": (f"quantized{MEAN}", max),
    "least slope of the sampled policy's change": (SLOPE, min),
    "largest": (SLOPE, max),
    "ARCA in bf16, rank correlation with fp32": (r"arca in bf16  rank (\S+)", max),
    "OAR-G in bf16, rank correlation with fp32": (r"oar_g in bf16  rank (\S+)", max),
    "seconds a batch of worth.py": (r"\[4/4\] batch \d; (\d+) s each", max),
}


def bench_figures(lines: list[str]) -> dict[str, float]:
    """Of what `bench.py --json` writes: medians, ratios within a repeat, and highest peaks."""
    found, rows = {}, {row["credit"]: row["rows"] for row in map(json.loads, lines)}
    names = {"rollout tokens/s": "rollout_tokens_per_second", "step": "step"}
    names["training tokens/s"] = "update_tokens_per_second"
    for credit, own in rows.items():
        found[f"{credit}, peaks"] = peaks = [max(x) for x in zip(*(row["peaks"] for row in own))]
        found[f"{credit}, peak GiB"], found[f"{credit}, training peak GiB"] = max(peaks), peaks[-1]
        for what, name in names.items():
            found[f"{credit}, {what}"] = statistics.median(row[name] for row in own)
            for other, theirs in rows.items():
                ratios = [a[name] / b[name] for a, b in zip(own, theirs, strict=True)]
                found[f"{credit}, {what} over {other}'s"] = statistics.median(ratios)
    return found


def run_figures(lines: list[str]) -> dict[str, float | str]:
    """Of a run's metrics.jsonl. Updates count if each is there once: it went on where it was."""
    rows = [json.loads(line) for line in lines]
    done, found = [row for row in rows if "loss" in row], {}
    if [row["step"] for row in done] == list(range(1, len(done) + 1)):
        found["updates"] = len(done)
    found[GAP] = max(row["sampling_gap"] for row in done)
    peaks = [row["peak_memory_gb"] for row in done]
    found["growth of its memory"] = peaks[-1] / peaks[len(peaks) // 3]  # at first lengths differ
    right = [f"{row['eval']['sampled_accuracy']:.1%}" for row in rows if row.get("eval")]
    return found | {"accuracy before, after": f"{right[0]}, {right[-1]}"}


def figures(folder: Path) -> dict[str, float | str]:
    """All that can be read of what a part left."""
    if not (folder / "output.txt").exists():
        return {}
    found, printed = {}, (folder / "output.txt").read_text(errors="replace")
    for figure, (pattern, pick) in PRINTED.items():
        numbers = [float(number) for number in re.findall(pattern, printed)]
        found |= {figure: pick(numbers)} if numbers or pick is sum else {}
    readers = {"bench.jsonl": bench_figures, "run/metrics.jsonl": run_figures}
    for name, read in (readers | {"figures.json": lambda lines: json.loads(lines[0])}).items():
        with contextlib.suppress(OSError, ValueError, LookupError):  # of one that was cut short
            found |= read((folder / name).read_text().splitlines())
    # memory.py's rows: shape, weights, and GiB of weights, rollout, score, update
    counted = re.findall(r"B \| \w+ \| \S+ \| (\S+) \| (\S+) \| (\S+) \|", printed)
    for part, counts in zip(("trl", "8b"), counted):
        peaks = figures(folder.parent / part).get("arca, peaks", [math.nan] * 3)
        off = [abs(float(count) / peak - 1) for count, peak in zip(counts, peaks, strict=True)]
        found[f"counted peaks are off by, {part}"] = max(off)
    return found


# ---- The table -----------------------------------------------------------------------------------
def verdict(value: float | str | None, goal: str, status: str, card: str) -> str:
    """Whether it holds. What a part measured that did not end well is said with how it ended."""
    if status.startswith("skipped") or (not card and status != "done"):
        return status
    if not card:
        return "skipped: no GPU"
    if value is None:
        return status if status != "done" else "not measured"
    sign, _, bar = goal.partition(" ")
    holds = not goal or (value >= float(bar) if sign == ">=" else value <= float(bar))
    found = ("holds" if goal else "measured") if holds else "misses"
    return found if status == "done" else f"{found}; {status}"


def table_rows(part: Part, folder: Path, status: str, machine: dict) -> list[dict]:
    rows, found = [], figures(folder)
    for line in part.goals:
        figure, goal = re.fullmatch(r"(.+?)(?: ([<>]= \S+))?", line).groups("")
        value, how = found.get(figure), status
        if isinstance(value, float) and not math.isfinite(value):  # a peak on a CPU
            value = None
        if "TRL" in figure and "trl" not in machine["versions"] and status == "done":
            how = "skipped: TRL is not installed"
        row = {"part": part.name, "figure": figure, "measured": value, "goal": goal}
        rows.append(row | {"verdict": verdict(value, goal, how, machine["card"])})
    return rows


def cell(value: float | str | None) -> str:
    if value is None or isinstance(value, str):
        return (value or "-").replace("|", "/")
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def section(report: dict) -> str:
    """The report in Markdown."""
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    lines = [f"Card: {report['card'] or 'none'}; {versions}; commit {report['commit']}."]
    lines += ["", "| part | figure | measured | goal | verdict |", "|---|---|---|---|---|"]
    lines += [f"| {' | '.join(map(cell, row.values()))} |" for row in report["rows"]]
    lines += ["", "Seconds and commands:", ""]
    for name, part in report["parts"].items():
        lines.append(f"- {name}, {part['status']}, {part['seconds']:.0f} s: `{part['command']}`")
    return "\n".join(lines)


def replace_section(text: str, new: str) -> str:
    """A README with what stands between its two marks replaced."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        fail(f"results/README.md lacks the lines {BEGIN} and {END}, between which the table goes")
    return f"{before}{BEGIN}\n{new}\n{END}{after}"


def write_report(states: dict[str, dict], options, machine: dict) -> list[dict]:
    """gpu.json and the README's table; returns its rows."""
    rows, folder = [], options.folder if options.small else ROOT / "results"
    for part in PARTS:
        rows += table_rows(part, options.folder / part.name, states[part.name]["status"], machine)
    commits = ", ".join(sorted({state["commit"] for state in states.values()}))
    names = ("status", "seconds", "commit", "command")
    brief = {name: {key: state[key] for key in names} for name, state in states.items()}
    report = machine | {"commit": commits, "parts": brief, "rows": rows}
    readme = folder / "README.md"
    text = readme.read_text() if readme.exists() else f"{BEGIN}\n{END}\n"
    text = replace_section(text, section(report))
    where = folder / "gpu.json" if options.small else folder / "data/gpu.json"
    where.parent.mkdir(exist_ok=True)
    where.write_text(json.dumps(report, indent=1) + "\n")
    readme.write_text(text)
    return rows


# ---- What runs in a process of its own, by --inside ----------------------------------------------
def variety(completions: list[str], **_) -> list[float]:
    """A reward that random weights get, too."""
    return [len(set(text)) / 100 for text in completions]


def kill(checkpoint: str, *command: str) -> None:
    """A run whose trainer is ended by kill -9 once that checkpoint is there, and that goes on."""
    launcher = subprocess.Popen(command)
    while launcher.poll() is None and not Path(checkpoint).exists():
        time.sleep(0.05)
    children = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children")
    for trainer in map(int, children.read_text().split() if children.exists() else ()):
        os.kill(trainer, signal.SIGKILL)
        print(f"killed {trainer}", flush=True)
    if launcher.wait() == 0 or not Path(checkpoint).exists():
        sys.exit("it ended before it was killed")
    sys.exit(subprocess.run([*command, "--resume_from_checkpoint", "latest"]).returncode)


@contextlib.contextmanager
def decoder(made, way: Callable):
    """A rollout of a bench in progress, while the policy computes as `way` has it."""
    import torch

    run, module, args = made.run, made.module, made.run.args
    rows = torch.arange(args.per_device_train_batch_size * args.steps_per_generation)
    u = module.row_uniforms(args, "rollout", 0, rows, args.max_completion_length)
    prompts = [made.data[1][row // args.num_generations] for row in rows.tolist()]
    run.policy.eval()
    with torch.no_grad(), way(run.model), run.accelerator.autocast():
        base = run.model.get_base_model()
        yield module.Decoder(base, prompts, u.to(run.eos_ids.device), (1.0, 0, 1.0))


def largest(job: Callable) -> str:
    """The three operations that take most of its time, with the shapes of their inputs."""
    import torch

    job()  # warms up
    with torch.profiler.profile(record_shapes=True) as profiled:
        job()
    name = "self_device_time_total" if torch.cuda.is_available() else "self_cpu_time_total"
    events = profiled.key_averages(group_by_input_shape=True)
    print(events.table(sort_by=name, row_limit=20, max_name_column_width=60))
    # Kernels are events, too, but do not say what for.
    costs = [(getattr(x, name), x) for x in events if x.device_type.name == "CPU"]
    costs.sort(key=lambda pair: -pair[0])
    total, found = sum(cost for cost, _ in costs) or 1, []
    for cost, event in costs[:3]:
        shapes = " x ".join(str(shape) for shape in event.input_shapes if shape)
        found.append(f"{event.key} {shapes}: {cost / total:.0%}")
    return "; ".join(found)


def profile(folder: str, *argv: str) -> None:
    """The largest costs of a decode step, run eagerly since a captured one has no names, and of a
    micro-batch's update; and what a captured step takes, by what it computes with."""
    sys.path.insert(0, str(ROOT / "results"))
    import bench
    import precision

    made = bench.prepare(precision.grpo_arca, ["uniform"], bench.parse_options(list(argv)))
    run, module, seconds = made.run, made.module, {}
    with decoder(made, module.dense) as rollout:
        found = {"costs of a decode step": largest(rollout.step)}
    batch = module.collect(run, made.data, {})
    micros = module.micro_batches(run.args, batch)[0][:1]
    module.score(run, batch, micros, {})
    found["costs of a training step"] = largest(lambda: module.update(run, micros))
    ways = {"dense": module.dense, "PEFT": precision.rounded, "merged": precision.merged}
    for name, way in ways.items():
        with decoder(made, way) as rollout:
            times = [bench.clock(run.accelerator.device)]
            for _ in range(run.args.max_completion_length - 2):
                rollout.advance()
                times.append(bench.clock(run.accelerator.device))
        seconds[name] = statistics.median(b - a for a, b in itertools.pairwise(times))
    print(seconds)
    found |= {f"{WAY}, {name}": seconds[name] / seconds["merged"] for name in ("dense", "PEFT")}
    Path(folder, "figures.json").write_text(json.dumps(found))


# ---- Command line --------------------------------------------------------------------------------
def fail(message: object) -> None:
    print(f"gpu_proof.py: error: {message}", file=sys.stderr)
    sys.exit(2)


def do(command: str, seconds: float, log: Path, env: dict[str, str]) -> str:
    """How its commands ended, one after another; what they print goes into the log."""
    ends = time.monotonic() + seconds
    how = {"cwd": ROOT, "env": env, "stdin": subprocess.DEVNULL, "stderr": subprocess.STDOUT}
    with open(log, "w") as file:
        for one in command.split(" && "):
            print(f"$ {one}", file=file, flush=True)
            try:
                words = shlex.split(one)
                process = subprocess.Popen(words, stdout=file, start_new_session=True, **how)
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


def surroundings(small: bool) -> tuple[dict[str, str], dict]:
    """The environment of the parts, and what their figures depend on."""
    env = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    cards = env.get("CUDA_VISIBLE_DEVICES", "0").split(",")  # of several, one is measured
    env["PYTHONPATH"] = str(ROOT / "tests")  # for the reward `variety`
    env["CUDA_VISIBLE_DEVICES"] = "" if small else cards[0]
    how = {"env": env, "cwd": ROOT, "capture_output": True, "text": True}
    asked, versions = subprocess.run([sys.executable, "-c", CARD], **how), {}
    if asked.returncode:
        fail(f"torch does not work here: {asked.stderr.strip()[-200:]}")
    if not (small or asked.stdout):
        fail("there is no GPU: --small tries the command in small on a CPU")
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    commit = subprocess.run(["git", "describe", "--always", "--exclude=*"], **how).stdout.strip()
    changed = ["git", "diff", "--quiet", "HEAD", "--", ".", ":!results"]  # where this writes
    commit += "-dirty" if subprocess.run(changed, **how).returncode else ""
    return env, {"card": asked.stdout.strip(), "versions": versions, "commit": commit}


def state_of(part: Part, options: argparse.Namespace, machine: dict) -> dict:
    """How a part ended, if it was the same command on the same card with the same versions."""
    why = "skipped: no GPU" if options.small else f"skipped: no {options.smollm2}, see smollm2.py"
    skip = "smollm2" in part.name and (options.small or not options.smollm2.is_dir())
    new = machine | {"status": why if skip else "not run yet", "seconds": 0.0}
    new["command"] = fill(part, options, "trl" in machine["versions"])
    with contextlib.suppress(OSError, ValueError):
        old = json.loads((options.folder / part.name / "state.json").read_text())
        if all(old.get(name) == new[name] for name in ("command", "card", "versions")):
            return old
    return new


def parse_options() -> argparse.Namespace:
    how = {"description": __doc__, "formatter_class": argparse.RawDescriptionHelpFormatter}
    parser = argparse.ArgumentParser(**how)
    add, parser.error = parser.add_argument, fail
    add("parts", nargs="*", help="to be done again; default: all that are not done")
    add("--small", action="store_true", help="try the command on a CPU")
    add("--folder", type=Path, help="default runs/gpu_proof, with --small runs/gpu_proof_small")
    add("--smollm2", type=Path, default="~/.cache/smollm2", help="made by results/smollm2.py")
    options = parser.parse_args()
    names = [part.name for part in PARTS]
    if wrong := set(options.parts) - set(names):
        fail(f"no part {wrong.pop()}: there are {', '.join(names)}")
    folder = options.folder or ROOT / f"runs/gpu_proof{'_small' if options.small else ''}"
    options.folder, options.smollm2 = folder.resolve(), options.smollm2.expanduser().resolve()
    return options


def prove(options: argparse.Namespace) -> int:
    """Does the parts; 1 if any of their figures misses or is not there."""
    env, machine = surroundings(options.small)
    options.folder.mkdir(parents=True, exist_ok=True)
    states = {part.name: state_of(part, options, machine) for part in PARTS}
    again = options.parts or [x for x, state in states.items() if state["status"] != "done"]
    due = [x for x in PARTS if x.name in again and "skipped" not in states[x.name]["status"]]
    rows, saved = write_report(states, options, machine), 0.0
    seconds = [part.seconds * (4 if options.small else 1) for part in due]  # a CPU may be slow
    for i, part in enumerate(due):
        began, limit, out = time.monotonic(), seconds[i] + saved, options.folder / part.name
        left = limit + sum(seconds[i + 1 :])
        left = f"up to {limit:.0f} s; all that is left: up to {left:.0f} s"
        print(f"{i + 1}/{len(due)} {part.name}: {left}", flush=True)
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir()
        state = states[part.name] | machine
        state["status"] = do(state["command"], limit, out / "output.txt", env)
        state["seconds"] = time.monotonic() - began
        saved, states[part.name] = limit - state["seconds"], state
        (out / "state.json").write_text(json.dumps(state, indent=1))
        rows = write_report(states, options, machine)
        for row in (row for row in rows if row["part"] == part.name):
            print(f"    {row['figure']}: {cell(row['measured'])}, {row['verdict']}", flush=True)
    good = re.compile("holds|measured|skipped: .*")
    return int(not all(good.fullmatch(row["verdict"]) for row in rows))


def main() -> None:
    if sys.argv[1:2] == ["--inside"]:
        return {"kill": kill, "profile": profile}[sys.argv[2]](*sys.argv[3:])
    try:
        sys.exit(prove(parse_options()))
    except OSError as error:
        fail(error)
    except KeyboardInterrupt:
        fail("interrupted; the same command goes on")


if __name__ == "__main__":
    main()
