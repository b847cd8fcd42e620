"""Measures what only a GPU can prove or refute, in one command of at most an hour.

    python tools/gpu_proof.py                  # what is not done yet, into runs/gpu_proof
    python tools/gpu_proof.py bench 8B         # these parts alone, again
    python tools/gpu_proof.py --repeats 1      # sooner, and without a spread
    python tools/gpu_proof.py count            # the part that needs no GPU
    python tools/gpu_proof.py --small          # tries the command on a CPU, on a small scale

It calls the other tools. Its parts are the number of operations that a step asks a GPU for, which
is counted on a CPU (count), the tests that need a GPU (tests), what a step of Qwen3-1.7B's shape
costs with several sizes of rollouts and micro-batches (sizes), the default run (default), SmolLM2
(smollm2), steps of that shape under GRPO, ARCA and TRL (bench), the same with rollouts in NF4
(quantized), and a step of the 8B shape (8B).

Each part is a process with a time limit. If one fails or takes too long, the others still run, and
the next call repeats it. <folder>/<part>/output.txt has all that it printed. After each part,
results/data/gpu_proof/gpu.json and results/gpu.md are rewritten. They say what was measured, the
goal, whether it holds, the card and the versions. What gpu.json has of another machine stays. With
--small, both files are in <folder>, and no goal of a GPU is said to hold.
"""

import argparse
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import pandas

from common.run_log import environment

GRPO = "grpo_arca.py --credit uniform"
NO_GPU = "no GPU"
SIZES = [  # micro-batches and their number, and whether backward passes recompute
    f"{GRPO} --per_device_train_batch_size {size} --gradient_accumulation_steps {count} "
    f"--gradient_checkpointing {recomputes}"
    for size, count, recomputes in (
        (8, 4, True),
        (8, 8, True),
        (16, 2, True),
        (32, 1, True),
        (8, 4, False),
        (16, 2, False),
        (32, 1, False),
    )
]
ANY = (0.0, math.inf)  # no goal: the figure is only reported


class Part(NamedTuple):
    """A command, and what it should show."""

    name: str
    seconds: int  # the time limit
    command: str  # {words} are filled in
    goals: dict[str, tuple[float, float]]  # lowest and highest value of each figure


def bench(methods: str, shape: str, flags: str = "") -> str:
    """Returns a command that measures steps."""
    return (
        f"python tools/bench.py {methods} {{{shape}}} --repeats {{repeats}} "
        f"--output {{out}}/bench.json -- {{batch}} {flags}"
    )


PARTS = [
    Part(
        "count",
        400,
        "ACCELERATE_USE_CPU=true python tools/bench.py --operations --shape narrow -- "
        "--dtype bfloat16 > {out}/count.json",
        {
            "a decode step": (0, 1_250),
            "ARCA's scores of a micro-batch": (0, 4_200),
            "an update's micro-batch, with checkpointing": (0, 8_500),
            "an update's micro-batch, without checkpointing": (0, 6_000),
        },
    ),
    Part("tests", 300, "pytest -q tests/trainer/test_gpu.py", {}),
    Part(
        "sizes",
        560,
        "python tools/bench.py '" + "' '".join(SIZES) + "' --repeats 1 --updates 2 "
        "{middle} --output {out}/bench.json -- {batch}",
        {f"{size}: {figure}": ANY for size in SIZES for figure in ("update", "peak GiB")}
        | {f"{SIZES[0]}: tokens/s": ANY, f"{SIZES[1]}: tokens/s": (10_000, math.inf)},
    ),
    Part(
        "default",
        200,
        "accelerate launch grpo_arca.py {run} --output_dir {out}/run",
        {
            "greedy_accuracy": (0.9, 1.0),
            "sampling_gap": (0.0, 0.02),
            "seconds of a step": ANY,
        },
    ),
    Part(
        "smollm2",
        200,
        "python tools/smollm2.py {out}/smollm2 && accelerate launch grpo_arca.py "
        "--model_name_or_path {out}/smollm2 --dataset_name {out}/smollm2/sums.jsonl "
        "--max_completion_length 32 --learning_rate 4e-4 --max_steps 20 {run} "
        "--output_dir {out}/run",
        {"sampled_accuracy": ANY, "sampling_gap": (0.0, 0.02), "seconds of a step": ANY},
    ),
    Part(
        "bench",
        900,
        bench(f"'{GRPO}' grpo_arca.py --trl", "middle"),
        {
            "repeats": (3, math.inf),
            f"{GRPO}: tokens/s": (18_000, math.inf),
            "grpo_arca.py: step over the first's": (0.0, 1.2),
            "grpo_arca.py: peak GiB": (0.0, 9.0),
            "TRL: tokens/s over the first's": (0.0, 1 / 15),
            "TRL: step over the first's": (8.0, math.inf),
        },
    ),
    Part(
        "quantized",
        400,
        bench(f"'{GRPO}'", "middle", "--rollout_weights quantized"),
        {f"{GRPO}: tokens/s": ANY, f"{GRPO}: peak GiB": (0.0, 5.0)},
    ),
    Part(
        "8B",
        600,
        bench("grpo_arca.py", "large", "--rollout_weights quantized"),
        {"grpo_arca.py: tokens/s": ANY, "grpo_arca.py: peak GiB": (0.0, 20.0)},
    ),
]
WORDS = {
    "run": "",
    "batch": "--max_completion_length 256 --lora_r 16",
    "middle": "--shape 1.7B",
    "large": "--shape 8B",
}
SMALL_BATCH = (
    "--per_device_train_batch_size 8 --gradient_accumulation_steps 1 --num_generations 4 "
    "--max_completion_length 12"
)
SMALL_WORDS = {
    "run": f"{SMALL_BATCH} --max_steps 2 --max_eval_samples 2 --eval_steps 0",
    "batch": SMALL_BATCH,
    "middle": "--updates 1",
    "large": "--updates 1",
}


# ---- What a part measured ------------------------------------------------------------------------
def run_figures(folder: Path) -> dict[str, float]:
    """Returns the figures of a finished run."""
    rows = pandas.read_json(folder / "metrics.jsonl", lines=True)
    seconds = rows.filter(like="seconds_").sum(axis=1)[rows["loss"].notna()]
    return json.loads((folder / "summary.json").read_text())["after"] | {
        "sampling_gap": rows["sampling_gap"].max(),
        "seconds of a step": seconds.median(),
    }


def bench_figures(path: Path) -> dict[str, float]:
    """Returns medians over repeats, ratios within a repeat, and the highest peaks."""
    rows = json.loads(path.read_text())["repeats"]
    repeats = {name: pandas.DataFrame(own) for name, own in rows.items()}
    first = next(iter(repeats.values()))
    found = {"repeats": float(len(first))}
    for name, own in repeats.items():
        found[f"{name}: peak GiB"] = own["peak GiB"].max()
        for figure in ("tokens/s", "step", "update"):
            found[f"{name}: {figure} over the first's"] = (own[figure] / first[figure]).median()
            found[f"{name}: {figure}"] = own[figure].median()
    return found


def figures_of(folder: Path) -> dict[str, float]:
    """Returns all figures in the files that a part left."""
    found: dict[str, float] = {}
    if (folder / "count.json").exists():
        found |= json.loads((folder / "count.json").read_text())
    if (folder / "run/summary.json").exists():
        found |= run_figures(folder / "run")
    if (folder / "bench.json").exists():
        found |= bench_figures(folder / "bench.json")
    return found


def rows_of(part: Part, state: dict[str, Any]) -> list[str]:
    """Returns the rows of a part in the table: how it ended, and each figure with its goal."""
    gpu = ", ".join(state["hardware"]["gpus"]) or NO_GPU
    rows = [f"| {part.name} | seconds, on {gpu} | {state['seconds']} | | {state['status']} |"]
    for figure, (low, high) in part.goals.items():
        value = state["figures"].get(figure, math.nan)
        verdict = "holds" if low <= value <= high else "misses"
        lacks_gpu = gpu == NO_GPU and part.name != "count"
        if state["status"] != "done" or lacks_gpu or (low, high) == ANY:
            verdict = ""
        rows.append(f"| | {figure} | {value:,.4g} | {low:,.5g} to {high:,.5g} | {verdict} |")
    return rows


# ---- Doing the parts -----------------------------------------------------------------------------
def do(part: Part, folder: Path, words: dict[str, Any]) -> None:
    """Runs a part, and writes how it ended into its state.json."""
    folder.mkdir(parents=True, exist_ok=True)
    command = part.command.format(out=folder, **words)
    variables = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    # It ends the children, too, which would keep the memory.
    limited = ["timeout", "--signal=KILL", str(part.seconds), "bash", "-c", command]
    began = time.time()
    with open(folder / "output.txt", "w") as output:
        process = subprocess.Popen(limited, cwd=ROOT, env=variables, stdout=output, stderr=output)
        try:
            code = process.wait()
        finally:
            process.terminate()  # at Ctrl-C
    known_ends = {0: "done", -signal.SIGKILL: f"took more than {part.seconds} s"}
    state = {
        "status": known_ends.get(code, f"failed with {code}"),
        "command": command,
        "seconds": round(time.time() - began),
        "figures": figures_of(folder),
    }
    (folder / "state.json").write_text(json.dumps(environment() | state, indent=1))


def state_of(folder: Path) -> dict[str, Any]:
    """Returns how a part ended, where and with which versions; nothing if it has not run."""
    path = folder / "state.json"
    return json.loads(path.read_text()) if path.exists() else {}


def write_report(folder: Path, results: Path) -> str:
    """Writes gpu.json and gpu.md, and returns the latter."""
    file = results / "data/gpu_proof/gpu.json"
    former = json.loads(file.read_text()) if file.exists() else {}
    states = {
        part.name: state_of(folder / part.name) or former.get(part.name, {}) for part in PARTS
    }
    missing = [name for name, state in states.items() if not state]
    lines = [
        f"# Measured on a GPU\n\nNot measured yet: {', '.join(missing) or 'nothing'}.\n",
        "| part | figure | measured | goal | |",
        "|---|---|---|---|---|",
    ]
    for part in PARTS:
        if part.name not in missing:
            lines += rows_of(part, states[part.name])
    page = "\n".join([*lines, "", "Written by `python tools/gpu_proof.py`, which explains it.", ""])
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(states, indent=1) + "\n")
    (results / "gpu.md").write_text(page)
    return page


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "parts",
        nargs="*",
        choices=[*(part.name for part in PARTS), []],  # argparse looks for the empty list, too
        help="to be done again",
    )
    parser.add_argument("--small", action="store_true", help="try the command on a CPU")
    parser.add_argument("--repeats", type=int, default=3, help="of the speeds' measurement")
    parser.add_argument("--folder", type=Path, help="default: runs/gpu_proof, or gpu_proof_small")
    options = parser.parse_args()
    default = ROOT / ("runs/gpu_proof_small" if options.small else "runs/gpu_proof")
    folder = (options.folder or default).absolute()
    results = folder if options.small else ROOT / "results"
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]
    os.environ["CUDA_VISIBLE_DEVICES"] = "" if options.small else first
    if not (options.small or options.parts == ["count"] or environment()["hardware"]["gpus"]):
        parser.error("there is no GPU: count needs none, and --small tries the command in small")
    for part in PARTS:
        is_done = state_of(folder / part.name).get("status") == "done"
        if part.name in options.parts or not (options.parts or is_done):
            print(f"{part.name}: up to {part.seconds} s", flush=True)
            shutil.rmtree(folder / part.name, ignore_errors=True)
            words = SMALL_WORDS if options.small else WORDS
            do(part, folder / part.name, words | {"repeats": options.repeats})
            write_report(folder, results)
    print(write_report(folder, results))


if __name__ == "__main__":
    main()
