"""Compares the numbers of this checkout with those of another one, bit by bit.

    git worktree add ../before 2ca65c3
    python tools/compare_checkouts.py ../before [case ...]

Both run the same cases from the same seed. All metrics but times and memory must be equal, and so
must the adapters. Exit code 1 if something differs. The results of the other checkout are kept in
its folder runs/, and a case that is done there is not run again.
"""

import filecmp
import itertools
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args, get_type_hints

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
VARYING = ("seconds", "tokens_per_second", "peak_memory_gb")  # beginnings of names
SHORT = (
    "--max_steps 3 --per_device_train_batch_size 16 --max_eval_samples 16 --num_generations_eval 2 "
    "--eval_steps 0 --save_steps 0 --warmup_steps 0"
)
# Two passes over a rollout of two updates, with KL and dropout: all that the loop can be asked for.
LONG = (
    f"{SHORT} --max_steps 5 --num_iterations 2 --steps_per_generation 4 --lora_dropout 0.05 "
    "--gradient_accumulation_steps 2 --beta 0.01"
)


def cases() -> dict[str, tuple[str, str]]:
    """Returns a script and its flags by the name of each case."""
    found = {}
    for script in ("grpo_arca", "grpo_oar", "grpo_strace"):
        credits = get_args(get_type_hints(__import__(script).Args)["credit"])
        for credit, dtype in itertools.product(credits, ("float32", "bfloat16")):
            flags = f"{LONG} --credit {credit} --dtype {dtype}"
            found[f"{script}-{credit}-{dtype}"] = (script, flags)
    arca = {
        "default_run": "",
        "dapo": f"{SHORT} --loss_type dapo --beta 0.05 --credit divergence",
        "dr_grpo": f"{SHORT} --loss_type dr_grpo --scale_rewards batch --lora_dropout 0.1 "
        "--mask_truncated_completions True --max_completion_length 40",
        "top_p": f"{SHORT} --top_p 0.9 --temperature 0.8",
        "right_only": f"{SHORT} --negative_weight 0 --skip_zero_gradient True",
        "two_processes": f"{LONG}",
        "resampled": f"{SHORT} --max_resample_times 2",
        "start_adapter": f"{SHORT} --beta 0.05",
        "checkpointed": f"{SHORT} --gradient_checkpointing True --rollout_weights quantized",
    }
    return found | {name: ("grpo_arca", flags) for name, flags in arca.items()}


def run(checkout: Path, name: str, script: str, flags: str) -> Path:
    """Runs a case in a checkout, unless that is done there, and returns the output folder."""
    folder = checkout / "runs/compare_checkouts" / name
    is_other = checkout != ROOT
    if (folder / "summary.json").exists() and is_other:
        return folder
    shutil.rmtree(folder, ignore_errors=True)
    command = [sys.executable, f"{script}.py", *flags.split(), "--output_dir", str(folder)]
    if name == "two_processes":
        launch = f"{sys.executable} -m accelerate.commands.launch --multi_gpu --num_processes 2"
        command[:1] = launch.split()
    if name == "start_adapter":
        first = run(checkout, "right_only", *cases()["right_only"])
        command += ["--start_adapter", str(first / "adapter")]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(checkout)}
    done = subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"{name} in {checkout} failed:\n{done.stderr[-2000:]}")
    return folder


def rows_of(folder: Path) -> list[dict[str, Any]]:
    """Returns the rows of metrics.jsonl, without what differs between two runs."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    rows = [row | row.pop("eval", {}) for row in rows]
    return [{key: row[key] for key in row if not key.startswith(VARYING)} for row in rows]


def main() -> None:
    other = Path(sys.argv[1]).resolve()
    differing = []
    for name, (script, flags) in cases().items():
        if sys.argv[2:] and name not in sys.argv[2:]:
            continue
        ours, theirs = [run(checkout, name, script, flags) for checkout in (ROOT, other)]
        differences = []
        for our_row, their_row in zip(rows_of(ours), rows_of(theirs), strict=True):
            for key, value in their_row.items():  # ours may have further ones
                if our_row.get(key) != value:
                    differences.append(f"step {our_row['step']} {key} {our_row.get(key)} {value}")
        weights = "adapter/adapter_model.safetensors"
        if not filecmp.cmp(ours / weights, theirs / weights, shallow=False):
            differences.append("adapter")
        print(f"{name}: {', '.join(differences[-5:]) or 'equal'}", flush=True)
        differing += [name] if differences else []
    print(f"{len(differing)} differ: {differing}")
    sys.exit(bool(differing))


if __name__ == "__main__":
    main()
