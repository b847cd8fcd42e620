"""Sweep of grpo_strace.py on the embedded task: decay, normalisation, quantile, on and off policy.

    python results/strace_sweep.py --list                  # the runs, and which are done
    python results/strace_sweep.py                         # what is missing, one after the other
    python results/strace_sweep.py --only off s_trace      # runs with all of these in their name
    python results/strace_sweep.py --seeds 1 -- --max_eval_samples 64    # flags for every run

Both regimes train on the same completions. "on" makes one update of 128 a rollout, so every ratio
is 1 and the traces only weight the gradient; "off" makes four of 32, and the past ratios and the
clip count too. A run is a folder of --output_dir; it is skipped where summary.json exists and
flags.json says the same flags, and goes on where it was interrupted. The tables are rewritten after
every run: data/strace_sweep.csv has a line a run, strace_sweep.md the mean and the standard
deviation over the seeds.
"""

import argparse
import csv
import itertools
import json
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RESUME = "--resume_from_checkpoint=latest"  # from the start if there is none
REGIMES = {"on": 1, "off": 4}  # updates a rollout of 4 micro-batches, 32 completions each
FIGURES = {  # of a run: heading and whether it is a share
    "sampled_accuracy": ("final sampled accuracy", True),  # held out
    "train_reward": ("mean training reward", True),  # over all rollouts: how fast it learned
    "clip_fraction": ("clipped tokens", True),  # mean over updates
    "clip_fraction_sequence": ("completions with one", True),
    "trace_gain": ("trace gain", False),  # mean raw gradient weight of a token: 1 in GRPO
}


def methods(lambdas: list[float], quantiles: list[float]) -> dict[str, dict]:
    """Name -> flags."""
    result: dict[str, dict] = {"uniform": {"credit": "uniform"}}
    for decay, normalise in itertools.product(lambdas, (False, True)):
        name = f"l{decay:g}{'-norm' if normalise else ''}"
        trace = {"trace_lambda": decay, "trace_normalize": normalise}
        result[f"p_trace-{name}"] = {"credit": "p_trace", **trace}
        for q in quantiles:
            sparse = {"credit": "s_trace", "trace_entropy_quantile": q}
            result[f"s_trace-{name}-q{q:g}"] = {**sparse, **trace}
    return result


def plan(options: argparse.Namespace) -> dict[str, list[str]]:
    """Name of each run -> its flags. Seeds are outermost: an early stop leaves whole tables."""
    runs = {}
    for seed, (regime, updates) in itertools.product(options.seeds, REGIMES.items()):
        common = {
            "seed": seed,
            "max_steps": options.rollouts * updates,
            "eval_steps": 0,
            "per_device_train_batch_size": 32,
            "steps_per_generation": 4,
            "gradient_accumulation_steps": 4 // updates,
        }
        for method, own in methods(options.lambdas, options.quantiles).items():
            name = f"{regime}-{method}-seed{seed}"
            if all(word in name for word in options.only):
                flags = [f"--{key}={value}" for key, value in {**own, **common}.items()]
                runs[name] = flags + options.flags
    return runs


def finished(folder: Path, flags: list[str]) -> bool:
    """Whether the folder holds a whole run, and it was of these flags."""
    return (folder / "summary.json").exists() and same_flags(folder, flags)


def same_flags(folder: Path, flags: list[str]) -> bool:
    path = folder / "flags.json"
    return path.exists() and json.loads(path.read_text()) == flags


def run(folder: Path, flags: list[str]) -> bool:
    """Trains in a process of its own; what it prints goes to log.txt. Whether it succeeded. A run
    that was interrupted goes on at its checkpoint; one with other flags makes room."""
    if not same_flags(folder, flags):
        shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "flags.json").write_text(json.dumps(flags))
    command = [sys.executable, ROOT / "grpo_strace.py", *flags, f"--output_dir={folder}"]
    with open(folder / "log.txt", "a") as log:
        subprocess.run([*command, RESUME], stdout=log, stderr=subprocess.STDOUT, check=False)
    return (folder / "summary.json").exists()


def figures(folder: Path) -> dict[str, float]:
    """FIGURES and the seconds of a finished run."""
    summary = json.loads((folder / "summary.json").read_text())
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    updates = [row for row in rows if "reward" in row]
    # Rows of one rollout repeat its figures; its seconds stand in the first alone.
    rewards = [row["reward"] for row in updates if row["seconds_rollout"] > 0]
    names = ("clip_fraction", "clip_fraction_sequence", "trace_gain")
    means = {name: statistics.fmean(row[name] for row in updates) for name in names}
    accuracy = summary["after"]["sampled_accuracy"]
    result = {"sampled_accuracy": accuracy, "train_reward": statistics.fmean(rewards)}
    return result | means | {"seconds": summary["seconds"]}


def cell(values: list[float], share: bool) -> str:
    """Mean ± sample standard deviation; shares in percent."""
    scale, form = (100, ".2f" if max(values) < 0.1 else ".1f") if share else (1, ".2f")
    text = f"{scale * statistics.fmean(values):{form}}"
    return f"{text} ± {scale * statistics.stdev(values):{form}}" if len(values) > 1 else text


def write_tables(where: Path, done: dict[str, dict[str, float]]) -> None:
    """The .csv and .md of the runs that are done (name -> figures)."""
    with open(where.with_suffix(".csv"), "w", newline="") as file:
        lines = csv.writer(file)
        lines.writerow(["regime", "method", "seed", *FIGURES, "seconds"])
        for name, values in done.items():
            regime, rest = name.split("-", 1)
            lines.writerow([regime, *rest.rsplit("-seed", 1), *values.values()])
    groups: dict[str, list[dict]] = {}
    for name, values in done.items():
        groups.setdefault(name.rsplit("-seed", 1)[0], []).append(values)
    heads = [f"{head}{', %' if share else ''}" for head, share in FIGURES.values()]
    table = [f"| policy | method | seeds | {' | '.join(heads)} |", "|---|---|" + "---:|" * 6]
    for name, runs in sorted(groups.items(), key=lambda item: item[0].startswith("off")):
        cells = [cell([r[key] for r in runs], share) for key, (_, share) in FIGURES.items()]
        table.append(f"| {' | '.join([*name.split('-', 1), str(len(runs)), *cells])} |")
    where.with_suffix(".md").write_text("\n".join(table) + "\n", encoding="utf-8")


def parse_options() -> argparse.Namespace:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--only", nargs="*", default=[], help="words, all in the runs' names")
    parser.add_argument("--seeds", nargs="*", type=int, default=[1, 2, 3])
    parser.add_argument("--lambdas", nargs="*", type=float, default=[0.5, 0.9])
    parser.add_argument("--quantiles", nargs="*", type=float, default=[0.5, 0.8])
    parser.add_argument("--rollouts", type=int, default=50, help="of 128 completions, each run")
    parser.add_argument("--output_dir", type=Path, default=ROOT / "runs/strace_sweep")
    parser.add_argument("--tables", type=Path, default=ROOT / "results/data/strace_sweep")
    parser.add_argument("--list", action="store_true", help="say what there is to do, and stop")
    split = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    options = parser.parse_args(sys.argv[1:split])
    options.flags = sys.argv[split + 1 :]
    return options


def main() -> None:
    options = parse_options()
    runs = plan(options)
    folders = {name: options.output_dir.resolve() / name for name in runs}
    todo = [name for name, flags in runs.items() if not finished(folders[name], flags)]
    if options.list:
        print(*(f"{'     ' if name in todo else 'done '}{name}" for name in runs), sep="\n")
    print(f"{len(runs)} runs, {len(runs) - len(todo)} done", flush=True)
    if options.list:
        return
    done = {name: figures(folders[name]) for name in runs if name not in todo}
    began, failed = time.time(), []
    for i, name in enumerate(todo, start=1):
        if run(folders[name], runs[name]):
            done[name] = figures(folders[name])
            result = f"accuracy {done[name]['sampled_accuracy']:.3f}"
        else:
            failed.append(name)
            result = f"FAILED, see {folders[name] / 'log.txt'}"
        mean = (time.time() - began) / i
        left = time.strftime("%H:%M", time.localtime(time.time() + mean * (len(todo) - i)))
        print(f"[{i}/{len(todo)}] {name}: {result}; {mean:.0f} s a run, ends {left}", flush=True)
        write_tables(options.tables, {n: done[n] for n in runs if n in done})
    if not todo:
        write_tables(options.tables, done)
    sys.exit(f"{len(failed)} runs failed: {' '.join(failed)}" if failed else 0)


if __name__ == "__main__":
    main()
