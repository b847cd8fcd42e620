"""Compares the numbers of this checkout with those of another one, bit by bit.

    git worktree add ../before 2ca65c3
    python tools/compare_checkouts.py ../before [case ...]

Both run the same cases from the same seed. All metrics but times and memory must be equal, and so
must the adapters. Exit code 1 if something differs.
"""

import filecmp
import itertools
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import get_args, get_type_hints

import pandas

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
            name = f"{script}-{credit}-{dtype}"
            found[name] = (script, f"{LONG} --credit {credit} --dtype {dtype}")
    arca = {
        "default_run": "",
        "dapo": f"{SHORT} --loss_type dapo --beta 0.05 --credit divergence",
        "dr_grpo": f"{SHORT} --loss_type dr_grpo --scale_rewards batch --lora_dropout 0.1 "
        "--mask_truncated_completions True --max_completion_length 40",
        "top_p": f"{SHORT} --top_p 0.9 --temperature 0.8",
        "right_only": f"{SHORT} --negative_weight 0 --skip_zero_gradient True",
        "two_processes": LONG,
        "resampled": f"{SHORT} --max_resample_times 2",
        "start_adapter": f"{SHORT} --beta 0.05",
        "checkpointed": f"{SHORT} --gradient_checkpointing True --rollout_weights quantized",
    }
    return found | {name: ("grpo_arca", flags) for name, flags in arca.items()}


def run(checkout: Path, name: str, script: str, flags: str) -> Path:
    """Runs a case in a checkout, and returns the output folder."""
    folder = checkout / "runs/compare_checkouts" / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    command = [sys.executable, f"{script}.py", *flags.split(), "--output_dir", str(folder)]
    if name == "two_processes":
        launch = f"{sys.executable} -m accelerate.commands.launch --multi_gpu --num_processes 2"
        command[:1] = launch.split()
    if name == "start_adapter":
        first = run(checkout, "right_only", *cases()["right_only"])
        command += ["--start_adapter", str(first / "adapter")]
    with open(folder / "log.txt", "w") as log:
        subprocess.run(
            command,
            cwd=checkout,
            env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(checkout)},
            stdout=log,
            stderr=log,
            check=True,
        )
    return folder


def metrics_of(folder: Path) -> pandas.DataFrame:
    """Returns the rows of metrics.jsonl, without what differs between two runs."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    table = pandas.json_normalize([json.loads(line) for line in lines])
    return table[[name for name in table if not name.startswith(VARYING)]]


def main() -> None:
    other = Path(sys.argv[1]).resolve(strict=True)
    differing = []
    for name in sys.argv[2:] or cases():
        ours, theirs = [run(checkout, name, *cases()[name]) for checkout in (ROOT, other)]
        their_metrics = metrics_of(theirs)
        our_metrics = metrics_of(ours)[their_metrics.columns]  # ours may have further ones
        found = our_metrics.compare(their_metrics)
        weights = "adapter/adapter_model.safetensors"
        is_equal = found.empty and filecmp.cmp(ours / weights, theirs / weights, shallow=False)
        print(name, "equal" if is_equal else f"adapters or metrics differ:\n{found}", flush=True)
        differing += [] if is_equal else [name]
    print(f"{len(differing)} differ: {differing}")
    sys.exit(bool(differing))


if __name__ == "__main__":
    main()
