"""Do better estimates of the gradient make better learning curves? Paired runs of every method.

    python results/learning_curves.py               # hours; resumes
    python results/learning_curves.py --stage control           # uniform and the value oracle first
    python results/learning_curves.py --list        # the runs, and which are done
    python results/learning_curves.py --draw        # table and figure of what is there
    python results/learning_curves.py --once runs/once   # half an hour: one run of each kind again
    python results/learning_curves.py --smollm2 smollm2  # on the language model of that folder

Worth (gradient_quality.py) can only show where noise is what limits learning. So rollouts are
small: 16 completions of 2 problems, on chains of 8 operations (where exact credit is worth most),
for 80 rollouts, with one update a rollout or with four; and, for the controls and only if asked
for (--regimes "one update, constant rate"), with a learning rate that does not fall. Stages:

    control   uniform credit, the value oracle (value_oracle.py) and uniform credit with twice the
              completions, whose worth is 2: what these two do not show, no method will
    sweep     each method at each learning rate on seeds 101 and 102, for 40 rollouts; the best
              mean reward in training decides, so no held-out problem is looked at
    curves    each method at its learning rate on seeds 1 to 8 (uniform credit and right
              completions alone to 16), evaluated on 100 held-out problems, 4 samples each, every
              20 rollouts

With `--smollm2` it is SmolLM2-135M on sums (smollm2.py): 20 rollouts of 32 completions of 4
problems, one update each, 36 held-out problems, 8 samples each, and no oracle; a sweep of 10
rollouts on seed 101, then four seeds. Flags after `--` go to the scripts: `-- --dtype bfloat16`
where the CPU has it. `--go_on` takes the runs of the tables at --output for done, so that methods
and seeds can be added to a published study; costs of a method stay those of its first runs.

Data order and uniforms of a seed are the same for every method, so runs are paired by seed. Figures
are the area under the held-out curve (its mean) and its end, as differences to uniform with 95%
t-intervals over seeds. Runs are folders of runs/learning_curves/. In results/data/,
learning_curves.csv has a line a method, learning_curves_runs.csv a line a run.
"""

import argparse
import csv
import json
import os
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import NamedTuple

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "runs/learning_curves"
ROLLOUTS, COMPLETIONS, EVERY, HELD_OUT = 80, 16, 20, 100
SWEEP_ROLLOUTS, SWEEP_SEEDS = 40, (101, 102)
SEEDS, FEWER, MANY = tuple(range(1, 9)), tuple(range(1, 4)), tuple(range(1, 17))
CONSTANT = "one update, constant rate"  # else the learning rate falls to 0 by a cosine
REGIMES = {"one update": 1, CONSTANT: 1, "four updates": 4}  # a rollout, of COMPLETIONS / updates
RATES = {
    "one update": ("0.001", "0.002", "0.004"),
    CONSTANT: ("0.001", "0.002"),
    "four updates": ("0.0005", "0.001", "0.002"),
}
TASK = [
    "--model_name_or_path", str(ROOT / "common/long_policy"), "--dataset_config", "8",
    "--max_completion_length", "160",
]  # fmt: skip


SHOWN = -0.15, 0.15  # of differences in the figure
MORE: list[str] = []  # flags of the command line, for every run


class Method(NamedTuple):
    script: str
    flags: str
    seeds: tuple[int, ...] = SEEDS
    regimes: tuple[str, ...] = ("one update", "four updates")
    rate_of: str = ""  # the method whose learning rate it takes, if not its own


METHODS = {
    "uniform (GRPO)": Method("grpo_arca.py", "--credit uniform", MANY, tuple(REGIMES)),
    "value oracle": Method("results/value_oracle.py", "", regimes=tuple(REGIMES)),
    "value oracle, whole steps": Method(
        "results/value_oracle.py",
        "--whole_steps",
        regimes=("one update",),
        rate_of="value oracle",
    ),
    "uniform, 32 completions": Method(
        "grpo_arca.py",
        "--credit uniform --steps_per_generation 2 --gradient_accumulation_steps 2",
        regimes=("one update",),
    ),
    "right alone": Method("grpo_arca.py", "--credit uniform --negative_weight 0", MANY),
    "right alone, by probability": Method(
        "grpo_arca.py", "--credit probability --negative_weight 0", MANY
    ),
    "arca": Method("grpo_arca.py", "--credit arca"),
    "arca, p = 2": Method("grpo_arca.py", "--credit arca --sharpening 2"),
    "arca's weights shuffled": Method("grpo_arca.py", "--credit shuffled"),
    "divergence": Method("grpo_arca.py", "--credit divergence", regimes=("one update",)),
    "oar_g": Method("grpo_oar.py", "--credit oar_g"),
    "oar_p": Method("grpo_oar.py", "--credit oar_p", FEWER),
    "s_trace": Method("grpo_strace.py", "--credit s_trace"),
    "s_trace at GRPO's rate": Method(
        "grpo_strace.py", "--credit s_trace", regimes=("one update",), rate_of="uniform (GRPO)"
    ),
    "p_trace": Method("grpo_strace.py", "--credit p_trace"),
    "gspo": Method("grpo_strace.py", "--credit gspo", SEEDS, ("four updates",)),  # else uniform
    "gspo, its own clip range": Method(
        "grpo_strace.py",
        "--credit gspo --epsilon 3e-4 --epsilon_high 4e-4",  # section 5.1 of its paper
        regimes=("four updates",),
    ),
}
CONTROL = UNIFORM, ORACLE, *_ = list(METHODS)[:4]
# The 97.5th percentile of Student's t with 1, 2, ... degrees of freedom
STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179)


def on_smollm2(folder: Path) -> None:
    """The study's settings, with the language model and the task of smollm2.py in their place."""
    names = [UNIFORM, "arca", "oar_g", "s_trace", "right alone", "right alone, by probability"]
    names += ["s_trace at GRPO's rate", "oar_p"]
    methods = {name: METHODS[name]._replace(seeds=(1, 2, 3, 4)) for name in names}
    methods["oar_p"] = methods["oar_p"]._replace(seeds=(1,), rate_of="oar_g")  # ten minutes a run
    for name, flags in {
        "negative_weight 0.25": "--credit uniform --negative_weight 0.25",
        "arca, right alone": "--credit arca --negative_weight 0",
    }.items():
        methods[name] = Method("grpo_arca.py", flags, (1, 2, 3, 4))
    methods = {name: x._replace(regimes=("SmolLM2",)) for name, x in methods.items()}
    task = {
        "model_name_or_path": folder, "dataset_name": folder / "sums.jsonl",
        "max_completion_length": 32, "gradient_checkpointing": False, "num_generations_eval": 8,
        "per_device_eval_batch_size": 144,
    }  # fmt: skip
    settings = {"METHODS": methods, "CONTROL": (UNIFORM,), "REGIMES": {"SmolLM2": 1}}
    settings |= {"FOLDER": ROOT / "runs/learning_curves_smollm2"}
    settings |= {"RATES": {"SmolLM2": ("2e-4", "4e-4", "8e-4")}, "ROLLOUTS": 20, "EVERY": 5}
    settings |= {"SWEEP_ROLLOUTS": 10, "SWEEP_SEEDS": (101,)}
    settings |= {"COMPLETIONS": 32, "HELD_OUT": 36, "SHOWN": (-0.45, 0.3)}
    globals().update(settings, TASK=[f"--{name}={value}" for name, value in task.items()])


class Run(NamedTuple):
    regime: str
    method: str
    rate: str
    seed: int
    held_out: bool  # whether it is evaluated on the way

    @property
    def folder(self) -> Path:
        words = [self.regime, self.method, self.rate, str(self.seed)]
        name = "-".join(words + ["curve"] * self.held_out)
        return FOLDER / "".join(c if c.isalnum() or c in ".-" else "_" for c in name)

    def command(self) -> list[str]:
        updates, method = REGIMES[self.regime], METHODS[self.method]
        flags = {
            "learning_rate": self.rate, "seed": self.seed, "output_dir": self.folder,
            "per_device_train_batch_size": COMPLETIONS // updates, "steps_per_generation": updates,
            "gradient_accumulation_steps": 1,
            "max_steps": (ROLLOUTS if self.held_out else SWEEP_ROLLOUTS) * updates,
            "eval_steps": EVERY * updates if self.held_out else 0,
            "max_eval_samples": HELD_OUT if self.held_out else 1, "warmup_steps": 3 * updates,
            "resume_from_checkpoint": "latest",
            "lr_scheduler_type": "constant_with_warmup" if self.regime == CONSTANT else "cosine",
        }  # fmt: skip
        words = [f"--{name}={value}" for name, value in flags.items()]
        words += method.flags.split() + MORE
        return [sys.executable, str(ROOT / method.script), *TASK, *words]

    def done(self) -> bool:
        return (self.folder / "summary.json").exists() or self in STORED

    def rows(self) -> list[dict]:
        """Of a run that only the tables know, its evaluations."""
        if self in STORED and not (self.folder / "summary.json").exists():
            row = STORED[self]
            last = {key: row[key] for key in ("greedy_accuracy", "pass@4")}
            curve = [{"sampled_accuracy": float(x)} for x in row["accuracies"].split()]
            return [{"eval": point | last} for point in curve]
        return [json.loads(line) for line in (self.folder / "metrics.jsonl").open()]

    def train(self) -> bool:
        """In a process of its own; what it prints goes to log.txt. Whether it came to the end."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with open(self.folder / "log.txt", "a") as log:
            one_core = os.environ | {"OMP_NUM_THREADS": "1"}
            output = {"stdout": log, "stderr": subprocess.STDOUT}
            subprocess.run(self.command(), cwd=ROOT, env=one_core, check=False, **output)
        return self.done()


STORED: dict[Run, dict] = {}  # with --go_on: the tables' columns of a run


def go_on(table: Path) -> None:
    """Takes the runs of a table and of the one beside it, a line a run, for done."""
    with open(table) as methods, open(table.with_name(f"{table.stem}_runs.csv")) as runs:
        rows = {(row["regime"], row["method"]): row for row in csv.DictReader(methods)}
        for row in csv.DictReader(runs):
            method = rows[row["regime"], row["method"]]
            run = Run(row["regime"], row["method"], method["rate"], int(row["seed"]), True)
            STORED[run] = method | row


# ---- Which runs ----------------------------------------------------------------------------------
def stored_rate(regime: str, method: str) -> str | None:
    name = METHODS[method].rate_of or method
    return next((run.rate for run in STORED if run[:2] == (regime, name)), None)


def sweep(regime: str, method: str) -> list[Run]:
    if len(RATES[regime]) == 1 or stored_rate(regime, method):
        return []  # nothing to choose
    name = METHODS[method].rate_of or method
    return [Run(regime, name, rate, seed, False) for rate in RATES[regime] for seed in SWEEP_SEEDS]


def best_rate(regime: str, method: str) -> str | None:
    """The learning rate with the highest mean reward in training; None before the sweep is done."""
    if len(RATES[regime]) == 1:
        return RATES[regime][0]
    if stored := stored_rate(regime, method):
        return stored
    runs = sweep(regime, method)
    if not all(run.done() for run in runs):
        return None
    rewards = {rate: [] for rate in RATES[regime]}
    for run in runs:
        rewards[run.rate] += [row["reward"] for row in run.rows() if "reward" in row]
    return max(rewards, key=lambda rate: np.mean(rewards[rate]))


def curves(regime: str, method: str) -> list[Run]:
    """Runs of the last stage, once their learning rate is known."""
    rate = best_rate(regime, method)
    return [Run(regime, method, rate, seed, True) for seed in METHODS[method].seeds if rate]


def plan(stage: str, regimes: list[str], names: list[str]) -> list[Run]:
    """Runs of a stage. Seeds are outermost: an early stop leaves whole tables."""
    names = [name for name in names if name in CONTROL or stage != "control"]
    pairs = [(r, n) for r in regimes for n in names if r in METHODS[n].regimes]
    stages = {"sweep": [sweep], "curves": [curves], "control": [sweep, curves]}[stage]
    runs = {run: None for make in stages for pair in pairs for run in make(*pair)}  # each once
    return sorted(runs, key=lambda run: (run.held_out, run.seed))


def train_all(runs: list[Run], processes: int) -> None:
    """What is missing, with progress and the time that is left."""
    todo, began, failed = [run for run in runs if not run.done()], time.time(), []
    print(f"{len(runs)} runs, {len(runs) - len(todo)} done", flush=True)
    with ThreadPoolExecutor(processes) as pool:
        futures = {pool.submit(run.train): run for run in todo}
        for done, future in enumerate(as_completed(futures), start=1):
            run, left = futures[future], (time.time() - began) / done * (len(todo) - done) / 60
            failed += [] if future.result() else [run.folder / "log.txt"]
            print(f"[{done}/{len(todo)}] {run.folder.name}; {left:.0f} min left", flush=True)
    if failed:
        sys.exit(f"learning_curves.py: {len(failed)} runs failed, see {failed[0]}")


def once(regimes: list[str], folder: Path, processes: int) -> None:
    """One run of each kind (method, updates a rollout, sweep or curve) again, into another folder:
    how many are the same, and by their times how long all runs would take."""
    global FOLDER
    every = {run for stage in ("sweep", "curves") for run in plan(stage, regimes, list(METHODS))}
    kinds = Counter((run.regime, run.method, run.held_out) for run in every)
    rates = {(regime, method): best_rate(regime, method) for regime, method, _ in kinds}
    if None in rates.values():
        sys.exit("learning_curves.py: --once repeats runs of the study: finish its sweeps first")
    seeds = {False: SWEEP_SEEDS[0], True: SEEDS[0]}
    runs = [Run(*kind[:2], rates[kind[:2]], seeds[kind[2]], kind[2]) for kind in kinds]
    before, FOLDER = [outcome(run) for run in runs if run.done()], folder.absolute()
    train_all(runs, processes)
    same = sum(outcome(run) in before for run in runs)
    seconds = [json.loads((run.folder / "summary.json").read_text())["seconds"] for run in runs]
    hours = sum(x * count for x, count in zip(seconds, kinds.values(), strict=True)) / 3600
    print(f"{same} of {len(runs)} the same; all {len(every)} take {hours:.1f} hours of one core")


def outcome(run: Run) -> list[tuple]:
    """What a run computed, without its times."""
    return [(run[:4], row.get("reward"), row.get("loss"), row.get("eval")) for row in run.rows()]


# ---- Figures from runs ---------------------------------------------------------------------------
def held_out_curve(run: Run) -> np.ndarray:
    """Sampled accuracy at the beginning and after every EVERY rollouts."""
    return np.array([row["eval"]["sampled_accuracy"] for row in run.rows() if row.get("eval")])


def passed_tokens(run: Run) -> tuple[float, float]:
    """Tokens sampled, and at most how many pass the model in all: sampled, scored (by the base too
    where the method needs it), OAR's probes, forward and backward in every update."""
    rows = [row for row in run.rows() if "reward" in row]
    sampled = sum(row["rollout_tokens"] for row in rows if row["seconds_rollout"] > 0)
    probes = sum(row.get("credit_forward_tokens", 0) for row in rows if row["seconds_rollout"] > 0)
    base = "arca" in run.method or run.method == "divergence"
    return sampled, (4 + base) * sampled + 1.5 * probes


def costs(runs: list[Run]) -> dict[str, float]:
    """Columns of the table: tokens of a run, and of its steps seconds, peak memory and gradient."""
    here = [run for run in runs if (run.folder / "summary.json").exists()]
    if stored := [run for run in runs if run not in here]:
        row, tokens = STORED[stored[0]], ("tokens_sampled", "tokens_passed")
        floats = ("seconds_a_step", "peak_gb", "grad_norm", "clipped")
        return {k: int(row[k]) for k in tokens} | {k: float(row[k]) for k in floats}
    sampled, passed = np.mean([passed_tokens(run) for run in here], 0)
    steps = [row for run in here for row in run.rows() if "reward" in row]
    times = [sum(x for key, x in row.items() if key[:7] == "seconds") for row in steps]
    norms = np.array([row["grad_norm"] for row in steps])
    return {
        "tokens_sampled": int(sampled), "tokens_passed": int(passed),
        "seconds_a_step": np.mean(times),
        "peak_gb": max(row.get("peak_memory_gb", 0) for row in steps),
        "grad_norm": np.median(norms), "clipped": np.mean(norms > 1),
    }  # fmt: skip


def interval(values: np.ndarray) -> tuple[float, float]:
    """95% t-interval of a mean; infinite of one value."""
    if len(values) < 2:
        return -np.inf, np.inf
    degrees = len(values) - 1
    t = STUDENT[degrees - 1] if degrees <= len(STUDENT) else 1.96 + 2.6 / degrees
    half = t * values.std(ddof=1) / len(values) ** 0.5
    return values.mean() - half, values.mean() + half


def share_needed(curve: np.ndarray, other: np.ndarray) -> float:
    """The share of the rollouts after which a curve first reaches the end of another; inf if
    never."""
    target = other[-1]
    for i in range(1, len(curve)):
        if curve[i] >= target:
            part = (target - curve[i - 1]) / (curve[i] - curve[i - 1])
            return (i - 1 + max(part, 0.0)) / (len(curve) - 1)
    return float("inf")


def tabulate(regimes: list[str]) -> tuple[list[dict], dict]:
    """A row a method, and (regime, method) -> curves by seed of the runs that are done."""
    found, rows = {}, []
    for regime in regimes:
        for name, method in METHODS.items():
            runs = [run for run in curves(regime, name) if run.done()]
            if regime in method.regimes and runs:
                found[regime, name] = {run.seed: held_out_curve(run) for run in runs}
                rows.append({"regime": regime, "method": name, "rate": runs[0].rate})
                rows[-1] |= costs(runs)
    for row in rows:
        own, uniform = (found.get((row["regime"], x), {}) for x in (row["method"], UNIFORM))
        seeds = sorted(own.keys() & uniform.keys())
        row["seeds"] = len(seeds)
        for key, value in (
            ("area", lambda c: (c[1:] + c[:-1]).mean() / 2),
            ("end", lambda c: c[-1]),
        ):
            a, b = (np.array([value(curve[seed]) for seed in seeds]) for curve in (own, uniform))
            if len(seeds):
                low, high = interval(a - b)
                row |= {key: a.mean(), f"{key}_more": (a - b).mean()}
                row |= {f"{key}_low": low, f"{key}_high": high}
        if len(seeds):
            pairs = np.array([[own[seed], uniform[seed]] for seed in seeds])  # [seeds, 2, points]
            drawn = np.random.default_rng(0).integers(len(seeds), size=(2000, len(seeds)))
            shares = [share_needed(*pairs[draw].mean(0)) for draw in drawn]
            row["share_of_rollouts"] = share_needed(*pairs.mean(0))
            ends = np.percentile(shares, [2.5, 97.5], method="nearest")  # some are infinite
            row |= {"share_low": ends[0], "share_high": ends[1]}
    return rows, found


def draw(rows: list[dict], found: dict, path: Path) -> None:
    """Left, mean held-out curves; right, area and end over uniform's with intervals."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = [row for row in rows if row["seeds"]]
    regimes = list(dict.fromkeys(row["regime"] for row in rows))
    heights = [max(6, 2 + sum(row["regime"] == regime for row in rows)) for regime in regimes]
    figure, panels = plt.subplots(
        len(regimes), 2, figsize=(12, 0.45 * sum(heights)), squeeze=False, sharex="col",
        height_ratios=heights,
    )  # fmt: skip
    palette = plt.get_cmap("tab20" if len(METHODS) > 10 else "tab10").colors
    colours = dict(zip(METHODS, palette)) | {UNIFORM: "black"}
    for (left, right), regime in zip(panels, regimes):
        here = [row for row in rows if row["regime"] == regime]
        for place, row in enumerate(here):
            name = row["method"]
            mean = np.mean(list(found[regime, name].values()), 0)
            rollouts, dashes = np.arange(len(mean)) * EVERY, ":" if name == ORACLE else "-"
            style = {"color": colours[name], "linestyle": dashes, "zorder": 2 + (name == UNIFORM)}
            style["linewidth"] = 2.5 if name in CONTROL[:2] else 1.2
            count = f"{row['seeds']} seed{'s' * (row['seeds'] > 1)}"
            left.plot(rollouts, mean, label=f"{name} ({count})", **style)
            for key, marker, shift in (("area", "o", -0.15), ("end", "s", 0.15)):
                ends, y = [row[f"{key}_low"], row[f"{key}_high"]], place + shift
                ends = np.clip(ends, -1, 1)  # infinite of one seed
                right.plot(ends, [y] * 2, color=colours[name], linewidth=2, alpha=0.5)
                right.plot(row[f"{key}_more"], y, marker, color=colours[name], markersize=5)
        left.set_title(f"Held-out accuracy, {regime}", loc="left", fontweight="bold")
        left.set_xticks(rollouts)
        left.set_xlabel(f"rollouts of {COMPLETIONS} completions")
        left.legend(frameon=False, fontsize=8)
        right.axvline(0, color="#888888", linewidth=1)
        right.set_yticks(range(len(here)), [row["method"] for row in here], fontsize=8)
        right.set_ylim(len(here) - 0.4, -0.6)
        right.set_xlim(*SHOWN)  # an interval that goes on beyond it is in the table
        right.set_title("Over uniform: area (dot) and end (square)", loc="left", fontweight="bold")
        for axes in (left, right):
            axes.tick_params(labelbottom=True)
            axes.grid(alpha=0.3)
            axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def write(path: Path, rows: list[dict]) -> None:
    names = list(dict.fromkeys(name for row in rows for name in row))
    with open(path, "w", newline="") as file:
        lines = csv.DictWriter(file, names)
        lines.writeheader()
        for row in rows:
            shown = {k: f"{x:.4g}" if isinstance(x, float) else x for k, x in row.items()}
            lines.writerow(shown)


def main() -> None:
    of_scripts = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    MORE[:], words = sys.argv[of_scripts + 1 :], sys.argv[1:of_scripts]
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    first.add_argument("--smollm2", type=Path, help="a folder that smollm2.py made")
    if model := first.parse_known_args(words)[0].smollm2:
        on_smollm2(model.absolute())
    how = {"formatter_class": argparse.RawDescriptionHelpFormatter, "parents": [first]}
    parser = argparse.ArgumentParser(description=__doc__, **how)
    parser.add_argument("--stage", choices=("control", "sweep", "curves"), help="default: all")
    parser.add_argument(
        "--regimes", nargs="+", choices=REGIMES, help=f"default: all but {CONSTANT}"
    )
    parser.add_argument("--methods", nargs="+", choices=METHODS, help="default: all")
    parser.add_argument("--seeds", nargs="+", type=int, help="of the curves, not a method's own")
    parser.add_argument("--rate", help="the learning rate of every method, in place of the sweep")
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--list", action="store_true", help="say what there is to do, and stop")
    parser.add_argument("--draw", action="store_true", help="train nothing more")
    name = "learning_curves" + "_smollm2" * bool(model)
    parser.add_argument("--output", type=Path, default=ROOT / "results/data" / name)
    parser.add_argument("--go_on", action="store_true", help="runs of the tables there are done")
    parser.add_argument("--once", type=Path, help="folder for one run of each kind again")
    args = parser.parse_args(words)
    if args.rate:
        RATES.update(dict.fromkeys(RATES, (args.rate,)))
    if args.seeds:
        METHODS.update({m: x._replace(seeds=tuple(args.seeds)) for m, x in METHODS.items()})
    if args.go_on:
        go_on(args.output.with_suffix(".csv"))
    regimes = args.regimes or [regime for regime in REGIMES if regime != CONSTANT]
    if args.once:
        return once(regimes, args.once, args.processes)
    for stage in [args.stage] if args.stage else ["control", "sweep", "curves"]:
        for _ in range(2 if stage == "control" else 1):  # its curves need its sweep
            runs = plan(stage, regimes, args.methods or list(METHODS))
            if args.list:
                print(
                    *(f"{'done' if r.done() else '    '} {r.folder.name}" for r in runs), sep="\n"
                )
            elif not args.draw:
                train_all(runs, args.processes)
    rows, found = tabulate(args.regimes or list(REGIMES))
    if args.list or not found:
        return
    write(args.output.with_suffix(".csv"), rows)
    points = []
    for (regime, name), by_seed in found.items():
        for run in curves(regime, name):
            if run.seed in by_seed:
                row = {"regime": regime, "method": name, "seed": run.seed}
                row["accuracies"] = " ".join(map(str, by_seed[run.seed]))
                last = [row["eval"] for row in run.rows() if row.get("eval")][-1]
                points.append(row | {key: last.get(key) for key in ("greedy_accuracy", "pass@4")})
    write(args.output.with_name(args.output.name + "_runs.csv"), points)
    draw(rows, found, args.output.with_suffix(".png"))
    for row in rows:
        print(*(f"{x:.3f}" if isinstance(x, float) else x for x in row.values()), sep="  ")


if __name__ == "__main__":
    main()
