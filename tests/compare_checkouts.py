"""Compares the numbers of this checkout with those of another one, bit by bit.

    git worktree add ../before 4bbb234
    python tests/compare_checkouts.py ../before

Every script runs for a few updates with every `--credit`, in float32 and in bfloat16, from the same
seed in both checkouts. All metrics but times and memory must be equal, and so must the adapters.
Exit code 1 if something differs. The results of the other checkout are kept in its folder runs/.
"""

import argparse
import filecmp
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args, get_type_hints

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

SCRIPTS = ("grpo_arca", "grpo_oar", "grpo_strace")
# Two passes over a rollout of two updates, with a KL term: the most that the loop can be asked for.
FLAGS = [
    "--max_steps",
    "5",
    "--num_iterations",
    "2",
    "--steps_per_generation",
    "4",
    "--gradient_accumulation_steps",
    "2",
    "--per_device_train_batch_size",
    "16",
    "--beta",
    "0.01",
    "--lora_dropout",
    "0.05",
    "--eval_steps",
    "0",
    "--max_eval_samples",
    "16",
    "--num_generations_eval",
    "2",
    "--save_steps",
    "0",
    "--warmup_steps",
    "0",
]
VARYING = ("seconds", "tokens_per_second", "peak_memory_gb")  # beginnings of names


def credits_of(script: str) -> tuple[str, ...]:
    """Returns the choices of a script's --credit."""
    module = __import__(script)
    return get_args(get_type_hints(module.Args)["credit"])


def run(checkout: Path, script: str, credit: str, dtype: str) -> Path:
    """Runs a script in a checkout, unless it has been run there, and returns the output folder."""
    folder = checkout / "runs" / "compare_checkouts" / f"{script}-{credit}-{dtype}"
    if (folder / "summary.json").exists() and checkout != ROOT:
        return folder
    subprocess.run(["rm", "-rf", str(folder)], check=True)
    flags = [*FLAGS, "--credit", credit, "--dtype", dtype, "--output_dir", str(folder)]
    command = [sys.executable, f"{script}.py", *flags]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(checkout)}
    subprocess.run(command, cwd=checkout, env=environment, check=True, capture_output=True)
    return folder


def metrics_of(folder: Path) -> list[dict[str, Any]]:
    """Returns the rows of metrics.jsonl, without what differs between two runs."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{key: row[key] for key in row if not key.startswith(VARYING)} for row in rows]


def main() -> None:
    parser = argparse.ArgumentParser(description="Compares the numbers of two checkouts.")
    parser.add_argument("other", type=Path, help="folder of the other checkout")
    parser.add_argument("--scripts", nargs="+", default=SCRIPTS)
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    options = parser.parse_args()

    differing = 0
    for script in options.scripts:
        for credit in credits_of(script):
            for dtype in options.dtypes:
                folders = [run(path, script, credit, dtype) for path in (ROOT, options.other)]
                ours, theirs = map(metrics_of, folders)
                adapters = [folder / "adapter/adapter_model.safetensors" for folder in folders]
                same_metrics = ours == theirs
                same_adapter = filecmp.cmp(*adapters, shallow=False)
                differing += not (same_metrics and same_adapter)
                said = f"metrics {'equal' if same_metrics else 'DIFFER'}"
                said += f", adapter {'equal' if same_adapter else 'DIFFERS'}"
                print(f"{script} {credit} {dtype}: {said}", flush=True)
    print(f"{differing} differ")
    sys.exit(differing > 0)


if __name__ == "__main__":
    main()
