"""What the default command learns, how long it takes and how much memory, over seeds.

    python results/learning.py grpo_arca.py                           # seeds 1 2 3, the bar
    python results/learning.py grpo_arca.py --seeds 4 5 --credit uniform   # flags go to the script
    python results/learning.py grpo_arca.py --write                   # replaces a file in results/

Each run is the README's command from a shell, one after the other, into runs/<name>-<seed>, the
name from script and flags. Prints a table: held-out sampled accuracy before and after, wall clock
from the shell prompt to the end, and the largest resident memory of any of the processes so far.
--write also puts the figures into results/data/<name>.json, which compare.py draws.
"""

import argparse
import json
import re
import resource
import subprocess
import sys
import time
from pathlib import Path
from statistics import mean, stdev

ROOT = Path(__file__).resolve().parents[1]


def run(script: str, flags: list[str], folder: Path, seed: int) -> dict:
    """One run into that folder; returns its summary with wall clock and memory."""
    command = [sys.executable, "-m", "accelerate.commands.launch", script, *flags]
    command += ["--seed", str(seed), "--output_dir", str(folder)]
    began = time.time()
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    wall = time.time() - began
    summary = json.loads((folder / "summary.json").read_text())
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").open()]
    updates = [row for row in rows if "reward" in row]
    columns = ["seconds_rollout", "seconds_score", "seconds_credit", "seconds_update"]
    columns += ["reward", "weight_gini", "weight_effn"]
    means = {name: mean(row[name] for row in updates) for name in columns}
    means["rewards"] = [round(row["reward"], 4) for row in updates]  # of every step
    memory = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 2**20  # of any run so far
    return summary | means | {"seed": seed, "wall_seconds": wall, "largest_rss_gib": memory}


def name_of(script: str, flags: list[str]) -> str:
    """grpo_arca-default, grpo_arca-uniform (of --credit uniform), or with the flags' text."""
    if flags[:1] == ["--credit"]:
        flags = flags[1:]
    return re.sub(r"[^\w.]+", "-", " ".join([Path(script).stem, *(flags or ["default"])]))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,  # --seed is the script's
    )  # fmt: skip
    parser.add_argument("script")
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--write", action="store_true", help="replace results/data/<name>.json")
    args, flags = parser.parse_known_args()
    name, results = name_of(args.script, flags), []
    for seed in args.seeds:
        results.append(run(args.script, flags, ROOT / "runs" / f"{name}-{seed}", seed))
        r = results[-1]
        print(
            f"seed {seed}: sampled {r['before']['sampled_accuracy']:.3f} -> "
            f"{r['after']['sampled_accuracy']:.3f}, greedy {r['before']['greedy_accuracy']:.3f} -> "
            f"{r['after']['greedy_accuracy']:.3f}, {r['wall_seconds']:.0f} s, "
            f"{r['largest_rss_gib']:.2f} GiB",
            flush=True,
        )
    after = [r["after"]["sampled_accuracy"] for r in results]
    spread = f" +- {stdev(after):.3f}" if len(after) > 1 else ""
    print(f"after: {mean(after):.3f}{spread} (mean and std over seeds)")
    if args.write:
        text = json.dumps({"flags": flags, "runs": results}, indent=2)
        (ROOT / "results/data" / f"{name}.json").write_text(text)


if __name__ == "__main__":
    main()
