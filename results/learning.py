"""What the default command learns, how long it takes and how much memory, over seeds.

    python results/learning.py grpo_arca.py                          # seeds 1 2 3, the bar
    python results/learning.py grpo_arca.py --credit uniform         # flags go to the script

Each run is the README's command from a shell, one after the other. Writes
results/<script>-<credit>.json and prints a table: held-out sampled accuracy before and after, wall
clock from the shell prompt to the end, and the largest resident memory of any of its processes.
"""

import json
import resource
import subprocess
import sys
import time
from pathlib import Path
from statistics import mean, stdev

ROOT = Path(__file__).resolve().parents[1]


def run(script: str, flags: list[str], seed: int) -> dict:
    """One run, in its default folder; returns its summary with wall clock and memory."""
    command = ["accelerate", "launch", script, *flags, "--seed", str(seed)]
    began = time.time()
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    wall = time.time() - began
    newest = max(ROOT.glob(f"runs/*-{seed}/summary.json"), key=lambda path: path.stat().st_mtime)
    summary = json.loads(newest.read_text())
    rows = [json.loads(line) for line in open(newest.with_name("metrics.jsonl"))]
    updates = [row for row in rows if "reward" in row]
    columns = ["seconds_rollout", "seconds_score", "seconds_credit", "seconds_update"]
    columns += ["reward", "weight_gini", "weight_effn"]
    means = {name: mean(row[name] for row in updates) for name in columns}
    means["rewards"] = [round(row["reward"], 4) for row in updates]  # of every step
    memory = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 2**20  # of any run so far
    return summary | means | {"seed": seed, "wall_seconds": wall, "largest_rss_gib": memory}


def main() -> None:
    script, *flags = sys.argv[1:]
    credit = flags[flags.index("--credit") + 1] if "--credit" in flags else "default"
    results = []
    for seed in (1, 2, 3):
        results.append(run(script, flags, seed))
        r = results[-1]
        print(
            f"seed {seed}: sampled {r['before']['sampled_accuracy']:.3f} -> "
            f"{r['after']['sampled_accuracy']:.3f}, greedy {r['before']['greedy_accuracy']:.3f} -> "
            f"{r['after']['greedy_accuracy']:.3f}, {r['wall_seconds']:.0f} s, "
            f"{r['largest_rss_gib']:.2f} GiB",
            flush=True,
        )
    after = [r["after"]["sampled_accuracy"] for r in results]
    print(f"after: {mean(after):.3f} +- {stdev(after):.3f} (mean and std over seeds)")
    name = f"{Path(script).stem}-{credit}.json"
    (ROOT / "results" / name).write_text(json.dumps({"flags": flags, "runs": results}, indent=2))


if __name__ == "__main__":
    main()
