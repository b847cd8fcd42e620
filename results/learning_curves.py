"""Do better estimates of the gradient make better learning curves? Paired runs of every method.

    python results/learning_curves.py               # hours; resumes
    python results/learning_curves.py --stage control           # uniform and the value oracle first
    python results/learning_curves.py --list        # the runs, and which are done
    python results/learning_curves.py --draw        # table and figure of what is there
    python results/learning_curves.py --smollm2 smollm2  # on the language model of that folder
    python results/learning_curves.py --smollm2 smollm2 --divergence   # a minute for each run
    python results/learning_curves.py --default_run grpo_arca.py --write -- --credit uniform

Worth (tools/worth.py) can only show where noise is what limits learning. So rollouts are small: 16
completions of 2 problems, on chains of 8 operations (where exact credit is worth most), for 80
rollouts, with one update a rollout or with four. For the controls, and only if asked for (--regimes
"one update, constant rate"), there is a learning rate that does not fall. The stages are

    control   uniform credit, the value oracle (step_values.py) and uniform credit with twice the
              completions, whose worth is 2: what these two do not show, no method will
    sweep     each method at each learning rate on seeds 101 and 102, for 40 rollouts; the best
              mean reward in training decides, so no held-out problem is looked at
    curves    each method at its learning rate on seeds 1 to 8 (uniform credit and right
              completions alone to 16), evaluated on 100 held-out problems, 4 samples each, every
              20 rollouts

With `--smollm2` it is SmolLM2-135M on sums (tools/smollm2.py): 20 rollouts of 32 completions of 4
problems, one update each, 36 held-out problems, 8 samples each, and no oracle; a sweep of 10
rollouts on seed 101, then four seeds, or twelve of the methods in the first table of the page.
Flags after `--` go to the scripts: `-- --dtype bfloat16` where the CPU has it. `--go_on` takes the
runs of the tables at --output for done, so that methods and seeds can be added to a published
study; costs of a method stay those of its first runs.

`--divergence` measures how far each run has moved the policy in the end, for the table of runs.

Data order and uniforms of a seed are the same for every method, so runs are paired by seed. Figures
are the area under the held-out curve (its mean) and its end, as differences to uniform with 95%
t-intervals over seeds. Runs are folders of runs/learning_curves/. In results/data/learning_curves/,
chains.csv has a line for each method, and chains_runs.csv a line for each run.

With `--default_run SCRIPT` it is the README's command instead: the script's defaults with the flags
after `--`, from a shell, one seed after the other (--seeds, default 1 2 3), into
runs/<name>-<seed>, the name from script and flags. Printed are the held-out sampled accuracy before
and after, the wall clock from the shell prompt to the end, and the largest resident memory of any
process so far. --write puts the figures into results/data/default_runs/<name>.json, which
tools/compare.py draws, and --write FOLDER into another folder of results/data/.
"""

import argparse
import csv
import json
import os
import re
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from statistics import mean, stdev
from typing import Any, NamedTuple

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
DATA = ROOT / "results/data"

# The study. `use_smollm2` replaces what stands here.
FOLDER = ROOT / "runs/learning_curves"
ROLLOUTS = 80
COMPLETIONS = 16  # of a rollout
EVERY = 20  # rollouts between evaluations
HELD_OUT = 100  # problems
SWEEP_ROLLOUTS = 40
SWEEP_SEEDS: tuple[int, ...] = (101, 102)
SEEDS = tuple(range(1, 9))
FEWER_SEEDS = tuple(range(1, 4))
TWELVE_SEEDS = tuple(range(1, 13))
MORE_SEEDS = tuple(range(1, 17))
CONSTANT = "one update, constant rate"  # else the learning rate falls to 0 by a cosine
REGIMES = {"one update": 1, CONSTANT: 1, "four updates": 4}  # updates of a rollout
RATES: dict[str, tuple[str, ...]] = {
    "one update": ("0.001", "0.002", "0.004"),
    CONSTANT: ("0.001", "0.002"),
    "four updates": ("0.0005", "0.001", "0.002"),
}
TASK = [
    f"--model_name_or_path={ROOT / 'common/long_policy'}",
    "--dataset_config=8",
    "--max_completion_length=160",
]
SHOWN = (-0.2, 0.15)  # of differences in the figure
MORE_FLAGS: list[str] = []  # of the command line, for every run


class Method(NamedTuple):
    """A script with its flags, and in which runs it takes part."""

    script: str
    flags: str
    seeds: tuple[int, ...] = SEEDS
    regimes: tuple[str, ...] = ("one update", "four updates")
    rate_of: str = ""  # the method whose learning rate it takes, if not its own
    rate: str = ""  # its learning rate, if none is searched for


UNIFORM = "uniform (GRPO)"
ORACLE = "value oracle"
WHOLE_STEPS = "value oracle, whole steps"
TWICE = "uniform, 32 completions"
CONTROL: tuple[str, ...] = (UNIFORM, ORACLE, WHOLE_STEPS, TWICE)
METHODS = {
    UNIFORM: Method("grpo_arca.py", "--credit uniform", MORE_SEEDS, tuple(REGIMES)),
    ORACLE: Method("results/step_values.py", "--oracle step_values", regimes=tuple(REGIMES)),
    WHOLE_STEPS: Method(
        "results/step_values.py",
        "--oracle whole_steps",
        regimes=("one update",),
        rate_of=ORACLE,
    ),
    TWICE: Method(
        "grpo_arca.py",
        "--credit uniform --steps_per_generation 2 --gradient_accumulation_steps 2",
        regimes=("one update",),
    ),
    "right alone": Method("grpo_arca.py", "--credit uniform --negative_weight 0", MORE_SEEDS),
    "right alone, by probability": Method(
        "grpo_arca.py", "--credit probability --negative_weight 0", MORE_SEEDS
    ),
    "arca": Method("grpo_arca.py", "--credit arca"),
    "arca, p = 2": Method("grpo_arca.py", "--credit arca --sharpening 2"),
    "arca's weights shuffled": Method("grpo_arca.py", "--credit shuffled"),
    "divergence": Method("grpo_arca.py", "--credit divergence", regimes=("one update",)),
    "oar_g": Method("grpo_oar.py", "--credit oar_g"),
    "oar_p": Method("grpo_oar.py", "--credit oar_p", FEWER_SEEDS),
    "s_trace": Method("grpo_strace.py", "--credit s_trace"),
    "s_trace at GRPO's rate": Method(
        "grpo_strace.py", "--credit s_trace", regimes=("one update",), rate_of=UNIFORM
    ),
    "p_trace": Method("grpo_strace.py", "--credit p_trace"),
    # With one update GSPO is uniform credit.
    "gspo": Method("grpo_strace.py", "--credit gspo", SEEDS, ("four updates",)),
    "gspo, its own clip range": Method(
        "grpo_strace.py",
        "--credit gspo --epsilon 3e-4 --epsilon_high 4e-4",  # section 5.1 of its paper
        regimes=("four updates",),
    ),
}
LABELS = {  # a method's name in commands and tables -> on pages and in figures
    UNIFORM: "GRPO",
    "uniform at twice the rate": "GRPO at twice the rate",
    "uniform, no step without a gradient": "GRPO, no step without a gradient",
    "right alone": "right answers only",
    "arca": "ARCA",
    "oar_g": "OAR-G",
    "s_trace": "S-trace",
    "right alone, by probability": "right answers only, by probability",
    "arca's weights shuffled": "ARCA's weights, shuffled",
    "arca, right alone": "ARCA, right answers only",
    "negative_weight 0.25": "wrong answers at a quarter",
    "oar_p": "OAR-P",
    "s_trace, normalized": "S-trace, normalized",
    "oracle: least variance": "least variance",
    "oracle: step values": "step values",
    "grpo_arca.py --credit uniform --negative_weight 0": "right answers only",
    "grpo_oar.py": "OAR-G",
    "grpo_strace.py": "S-trace",
    "grpo_arca.py --credit probability --negative_weight 0": "right answers only, by probability",
}
AT_GRPOS_RATE = {  # on SmolLM2 all methods are compared at GRPO's learning rate
    "s_trace": "S-trace at twice GRPO's rate",
    "s_trace at GRPO's rate": "S-trace",
}
COLORS = {
    "GRPO": "black",
    "right answers only": "#E69F00",
    "ARCA": "#0072B2",
    "OAR-G": "#D55E00",
    "S-trace": "#009E73",
    "right answers only, by probability": "#8B4513",
    "ARCA's weights, shuffled": "#56B4E9",
}
OTHER_COLOR = "#888888"
LEARNED_ABOVE = 0.5  # held-out sampled accuracy at the end of a run that learned
HEALTH = {  # a column of the table of runs -> the metric of each update
    "rewards": "reward",
    "entropies": "entropy",
    "zero_std_shares": "zero_std_share",
    "grad_norms": "grad_norm",
}
DIVERGENCE_COMPLETIONS = 64
# The 97.5th percentile of Student's t with 1, 2, ... degrees of freedom
STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179)


def use_smollm2(folder: Path) -> None:
    """Replaces the study's settings by those of the language model in a folder, and its task."""
    global CONTROL, FOLDER, ROLLOUTS, COMPLETIONS, EVERY, HELD_OUT, SWEEP_ROLLOUTS, SWEEP_SEEDS
    global METHODS, REGIMES, RATES, TASK, SHOWN
    regime = "SmolLM2"
    seeds = (1, 2, 3, 4)
    names = [UNIFORM, "arca", "oar_g", "s_trace", "right alone", "right alone, by probability"]
    names += ["s_trace at GRPO's rate", "oar_p"]
    methods = {name: METHODS[name]._replace(seeds=seeds) for name in names}
    methods["oar_p"] = methods["oar_p"]._replace(seeds=(1,), rate_of="oar_g")  # ten minutes a run
    for name in (UNIFORM, "right alone", "arca", "oar_g", "s_trace at GRPO's rate"):
        methods[name] = methods[name]._replace(seeds=TWELVE_SEEDS)
    quarter = Method("grpo_arca.py", "--credit uniform --negative_weight 0.25", seeds)
    methods["negative_weight 0.25"] = quarter
    methods["arca, right alone"] = Method(
        "grpo_arca.py", "--credit arca --negative_weight 0", seeds
    )
    methods["s_trace, normalized"] = Method(
        "grpo_strace.py", "--credit s_trace --trace_normalize True", seeds, rate_of=UNIFORM
    )
    methods["uniform, no step without a gradient"] = Method(
        "grpo_arca.py",
        "--credit uniform --skip_zero_gradient True",
        TWELVE_SEEDS[4:],
        rate_of=UNIFORM,
    )
    methods["uniform at twice the rate"] = METHODS[UNIFORM]._replace(seeds=seeds, rate="8e-4")

    METHODS = {name: method._replace(regimes=(regime,)) for name, method in methods.items()}
    CONTROL = (UNIFORM,)
    REGIMES = {regime: 1}
    RATES = {regime: ("2e-4", "4e-4", "8e-4")}
    FOLDER = ROOT / "runs/learning_curves_smollm2"
    ROLLOUTS = 20
    COMPLETIONS = 32
    EVERY = 5
    HELD_OUT = 36
    SWEEP_ROLLOUTS = 10
    SWEEP_SEEDS = (101,)
    SHOWN = (-0.45, 0.3)
    TASK = [
        f"--model_name_or_path={folder}",
        f"--dataset_name={folder / 'sums.jsonl'}",
        "--max_completion_length=32",
        "--gradient_checkpointing=False",
        "--num_generations_eval=8",
        "--per_device_eval_batch_size=144",
    ]


class Run(NamedTuple):
    """One run of the study."""

    regime: str
    method: str
    rate: str
    seed: int
    held_out: bool  # whether it is evaluated on the way

    @property
    def folder(self) -> Path:
        """Its output folder."""
        words = [self.regime, self.method, self.rate, str(self.seed)]
        if self.held_out:
            words.append("curve")
        name = "-".join(words)
        return FOLDER / "".join(c if c.isalnum() or c in ".-" else "_" for c in name)

    @property
    def divergence_file(self) -> Path:
        """Where --divergence keeps what it measured."""
        return self.folder / "final_kl.txt"

    def command(self) -> list[str]:
        """Returns the words of its command."""
        updates = REGIMES[self.regime]
        method = METHODS[self.method]
        rollouts = ROLLOUTS if self.held_out else SWEEP_ROLLOUTS
        flags = {
            "learning_rate": self.rate,
            "seed": self.seed,
            "output_dir": self.folder,
            "per_device_train_batch_size": COMPLETIONS // updates,
            "steps_per_generation": updates,
            "gradient_accumulation_steps": 1,
            "max_steps": rollouts * updates,
            "eval_steps": EVERY * updates if self.held_out else 0,
            "max_eval_samples": HELD_OUT if self.held_out else 1,
            "warmup_steps": 3 * updates,
            "resume_from_checkpoint": "latest",
            "lr_scheduler_type": "constant_with_warmup" if self.regime == CONSTANT else "cosine",
        }
        words = [f"--{name}={value}" for name, value in flags.items()]
        words += method.flags.split() + MORE_FLAGS
        return [sys.executable, str(ROOT / method.script), *TASK, *words]

    def has_folder(self) -> bool:
        """Whether its folder holds a whole run."""
        return (self.folder / "summary.json").exists()

    def is_done(self) -> bool:
        """Whether it need not be run, since its folder or a table has it."""
        return self.has_folder() or self in STORED

    def rows(self) -> list[dict[str, Any]]:
        """Returns its metrics. Of a run that only the tables know, these are its evaluations."""
        if self in STORED and not self.has_folder():
            stored = STORED[self]
            evaluations = []
            for accuracy in stored["accuracies"].split():
                evaluation: dict[str, Any] = {"sampled_accuracy": float(accuracy)}
                evaluation |= {key: stored[key] for key in ("greedy_accuracy", "pass@4")}
                evaluations.append({"eval": evaluation})
            return evaluations
        with open(self.folder / "metrics.jsonl") as lines:
            return [json.loads(line) for line in lines]

    def updates(self) -> list[dict[str, Any]]:
        """Returns the metrics of its updates."""
        return [row for row in self.rows() if "reward" in row]

    def evaluations(self) -> list[dict[str, Any]]:
        """Returns what it was evaluated to."""
        return [row["eval"] for row in self.rows() if row.get("eval")]

    def train(self) -> bool:
        """Trains in a process of its own, and returns whether it came to the end.

        What the process prints goes to log.txt.
        """
        start(self.command(), self.folder)
        return self.is_done()


def start(command: list[str], folder: Path) -> None:
    """Runs a command on one core to its end. What it prints goes to the folder's log.txt."""
    folder.mkdir(parents=True, exist_ok=True)
    one_core = os.environ | {"OMP_NUM_THREADS": "1"}
    with open(folder / "log.txt", "a") as log:
        subprocess.run(command, cwd=ROOT, env=one_core, stdout=log, stderr=subprocess.STDOUT)


STORED: dict[Run, dict[str, str]] = {}  # with --go_on: the tables' columns of a run


def go_on(table: Path) -> None:
    """Takes the runs of a table, and of the one beside it with a line for each run, for done."""
    with open(table) as file:
        rows = {(row["regime"], row["method"]): row for row in csv.DictReader(file)}
    with open(table.with_name(f"{table.stem}_runs.csv")) as file:
        for row in csv.DictReader(file):
            method = rows[row["regime"], row["method"]]
            run = Run(row["regime"], row["method"], method["rate"], int(row["seed"]), True)
            STORED[run] = method | row


# ---- Which runs ----------------------------------------------------------------------------------
def stored_rate(regime: str, method: str) -> str | None:
    """Returns the learning rate that a method has in the tables of --go_on."""
    name = METHODS[method].rate_of or method
    for run in STORED:
        if (run.regime, run.method) == (regime, name):
            return run.rate
    return None


def sweep(regime: str, method: str) -> list[Run]:
    """Returns the runs that choose a method's learning rate."""
    is_known = METHODS[method].rate != "" or stored_rate(regime, method) is not None
    if is_known or len(RATES[regime]) == 1:
        return []  # nothing to choose
    name = METHODS[method].rate_of or method
    runs = []
    for rate in RATES[regime]:
        runs += [Run(regime, name, rate, seed, False) for seed in SWEEP_SEEDS]
    return runs


def best_rate(regime: str, method: str) -> str | None:
    """Returns the learning rate with the highest mean reward in training.

    Returns None before the sweep is done.
    """
    if METHODS[method].rate != "":
        return METHODS[method].rate
    if len(RATES[regime]) == 1:
        return RATES[regime][0]
    stored = stored_rate(regime, method)
    if stored is not None:
        return stored
    runs = sweep(regime, method)
    if not all(run.is_done() for run in runs):
        return None
    rewards: dict[str, list[float]] = {rate: [] for rate in RATES[regime]}
    for run in runs:
        rewards[run.rate] += [row["reward"] for row in run.updates()]
    means = {rate: float(np.mean(values)) for rate, values in rewards.items()}
    return max(means, key=means.__getitem__)


def curves(regime: str, method: str) -> list[Run]:
    """Returns the runs of the last stage, once their learning rate is known."""
    rate = best_rate(regime, method)
    if rate is None:
        return []
    return [Run(regime, method, rate, seed, True) for seed in METHODS[method].seeds]


def plan(stage: str, regimes: list[str], names: list[str]) -> list[Run]:
    """Returns the runs of a stage. Seeds are outermost, so an early stop leaves whole tables."""
    parts: dict[str, list[Callable[[str, str], list[Run]]]] = {
        "sweep": [sweep],
        "curves": [curves],
        "control": [sweep, curves],
    }
    runs: dict[Run, None] = {}  # an ordered set
    for part in parts[stage]:
        for regime in regimes:
            for name in names:
                is_asked_for = stage != "control" or name in CONTROL
                if is_asked_for and regime in METHODS[name].regimes:
                    runs |= dict.fromkeys(part(regime, name))
    return sorted(runs, key=stage_and_seed)


def stage_and_seed(run: Run) -> tuple[bool, int]:
    """Returns by what runs are sorted."""
    return run.held_out, run.seed


def train_all(runs: list[Run], processes: int) -> None:
    """Does the runs that are missing, with progress and the time that is left."""
    missing = [run for run in runs if not run.is_done()]
    print(f"{len(runs)} runs, {len(runs) - len(missing)} done", flush=True)
    began = time.time()
    failed = []
    with ThreadPoolExecutor(processes) as pool:
        run_of = {pool.submit(run.train): run for run in missing}
        for done, future in enumerate(as_completed(run_of), start=1):
            run = run_of[future]
            if not future.result():
                failed.append(run.folder / "log.txt")
            left = (time.time() - began) / done * (len(missing) - done) / 60
            print(f"[{done}/{len(missing)}] {run.folder.name}; {left:.0f} min left", flush=True)
    if failed:
        sys.exit(f"learning_curves.py: {len(failed)} runs failed, see {failed[0]}")


# ---- Figures from runs ---------------------------------------------------------------------------
def held_out_curve(run: Run) -> np.ndarray:
    """Returns the sampled accuracy at the beginning and after every EVERY rollouts."""
    return np.array([evaluation["sampled_accuracy"] for evaluation in run.evaluations()])


def area(curves: np.ndarray) -> np.ndarray:
    """Returns the area under each curve [..., E] over an axis from 0 to 1: its mean height."""
    return (curves[..., 1:] + curves[..., :-1]).mean(-1) / 2


def measure_divergence(run: Run) -> None:
    """Writes a run's final KL divergence from the base, in nats a token, into its folder.

    It is the mean of k3 over the tokens of new completions of training problems. The metric `kl`
    of a training run is the same estimate.
    """
    sys.path.insert(0, str(ROOT))
    import torch

    import grpo_arca

    grpo_arca.transformers.logging.set_verbosity_error()
    grpo_arca.transformers.logging.disable_progress_bar()
    flags = [f"--model_name_or_path={run.folder / 'adapter'}", f"--seed={run.seed}"]
    flags += [f"--per_device_train_batch_size={DIVERGENCE_COMPLETIONS}"]
    flags += ["--gradient_accumulation_steps=1", f"--output_dir={run.folder / 'divergence'}"]
    # The adapter's own config names the base.
    args = grpo_arca.parse_args(["--credit=uniform", *TASK[1:], *flags, *MORE_FLAGS])
    tokenizer, train_set, _ = grpo_arca.load_data(args)
    trained = grpo_arca.build_run(args, tokenizer)
    with torch.no_grad():
        batch = grpo_arca.collect(trained, train_set, {})
        logp = grpo_arca.training_forward(trained, batch)
        with trained.model.disable_adapter():
            base_logp = grpo_arca.training_forward(trained, batch)
    log_ratio = (base_logp - logp)[batch.mask]
    kl = (log_ratio.exp() - log_ratio - 1).mean().item()
    run.divergence_file.write_text(f"{kl:.3g}")


def measure_divergences(regimes: list[str], names: list[str]) -> None:
    """Measures the divergence of each run that has a folder and was not measured yet."""
    runs = [run for run in plan("curves", regimes, names) if run.has_folder()]
    missing = [run for run in runs if not run.divergence_file.exists()]
    for count, run in enumerate(missing, start=1):
        measure_divergence(run)
        text = run.divergence_file.read_text()
        print(f"[{count}/{len(missing)}] {run.folder.name}: {text} nats a token", flush=True)


def passed_tokens(run: Run) -> tuple[float, float]:
    """Returns the tokens that a run sampled, and at most how many passed the model in all.

    Those are sampled, scored (by the base, too, where the method needs it), in OAR's probes, and in
    the forward and backward passes of every update.
    """
    rollouts = [row for row in run.updates() if row["seconds_rollout"] > 0]
    sampled = sum(row["rollout_tokens"] for row in rollouts)
    probes = sum(row.get("credit_forward_tokens", 0) for row in rollouts)
    needs_base = "arca" in run.method or run.method == "divergence"
    return sampled, (4 + needs_base) * sampled + 1.5 * probes


def costs(runs: list[Run]) -> dict[str, float]:
    """Returns columns of the table: a run's tokens, and its steps' seconds, memory and gradient."""
    stored = [run for run in runs if not run.has_folder()]
    if stored:
        row = STORED[stored[0]]
        found: dict[str, float] = {}
        for name in ("tokens_sampled", "tokens_passed"):
            found[name] = int(row[name])
        for name in ("seconds_a_step", "peak_gb", "grad_norm", "clipped"):
            found[name] = float(row[name])
        return found

    sampled, passed = np.mean([passed_tokens(run) for run in runs], 0)
    steps: list[dict[str, Any]] = []
    for run in runs:
        steps += run.updates()
    seconds = [sum(x for key, x in row.items() if key.startswith("seconds")) for row in steps]
    norms = np.array([row["grad_norm"] for row in steps])
    return {
        "tokens_sampled": int(sampled),
        "tokens_passed": int(passed),
        "seconds_a_step": np.mean(seconds),
        "peak_gb": max(row.get("peak_memory_gb", 0) for row in steps),
        "grad_norm": np.median(norms),
        "clipped": np.mean(norms > 1),
    }


def interval(values: np.ndarray) -> tuple[float, float]:
    """Returns the 95% t-interval of a mean, which is infinite for one value."""
    if len(values) < 2:
        return -np.inf, np.inf
    degrees = len(values) - 1
    t = STUDENT[degrees - 1] if degrees <= len(STUDENT) else 1.96 + 2.6 / degrees
    half = t * values.std(ddof=1) / len(values) ** 0.5
    return values.mean() - half, values.mean() + half


def share_needed(curve: np.ndarray, other: np.ndarray) -> float:
    """Returns the share of the rollouts after which a curve first reaches the end of another.

    Infinite if it never does.
    """
    target = other[-1]
    for i in range(1, len(curve)):
        if curve[i] >= target:
            part = (target - curve[i - 1]) / (curve[i] - curve[i - 1])
            return (i - 1 + max(part, 0.0)) / (len(curve) - 1)
    return float("inf")


def over_uniform(
    own: dict[int, np.ndarray], uniform: dict[int, np.ndarray], seeds: list[int]
) -> dict[str, float]:
    """Returns columns of the table: a method's curves by seed, beside uniform's of these seeds."""
    columns: dict[str, float] = {}
    values_of = {
        "area": [np.array([area(curve[seed]) for seed in seeds]) for curve in (own, uniform)],
        "end": [np.array([curve[seed][-1] for seed in seeds]) for curve in (own, uniform)],
    }
    for key, (values, others) in values_of.items():
        low, high = interval(values - others)
        columns |= {key: values.mean(), f"{key}_more": (values - others).mean()}
        columns |= {f"{key}_low": low, f"{key}_high": high}

    pairs = np.array([[own[seed], uniform[seed]] for seed in seeds])  # [seeds, 2, points]
    draws = np.random.default_rng(0).integers(len(seeds), size=(2000, len(seeds)))
    shares = [share_needed(*pairs[draw].mean(0)) for draw in draws]
    low, high = np.percentile(shares, [2.5, 97.5], method="nearest")  # some are infinite
    columns["share_of_rollouts"] = share_needed(*pairs.mean(0))
    return columns | {"share_low": low, "share_high": high}


Curves = dict[tuple[str, str], dict[int, np.ndarray]]  # (regime, method) -> seed -> curve


def tabulate(regimes: list[str]) -> tuple[list[dict[str, Any]], Curves]:
    """Returns a row for each method, and the curves of the runs that are done."""
    found: Curves = {}
    rows: list[dict[str, Any]] = []
    for regime in regimes:
        for name, method in METHODS.items():
            runs = [run for run in curves(regime, name) if run.is_done()]
            if regime in method.regimes and runs:
                found[regime, name] = {run.seed: held_out_curve(run) for run in runs}
                names = {"regime": regime, "method": name, "rate": runs[0].rate}
                rows.append(names | costs(runs))
    for row in rows:
        own = found[row["regime"], row["method"]]
        uniform = found.get((row["regime"], UNIFORM), {})
        seeds = sorted(own.keys() & uniform.keys())
        row["seeds"] = len(seeds)
        if seeds:
            row |= over_uniform(own, uniform, seeds)
    return rows, found


def health(run: Run) -> dict[str, str]:
    """Returns columns that explain a collapse: means over the rollouts between two evaluations.

    They are the reward, the entropy, the share of groups whose rewards are all equal, and the
    gradient's norm; and, of --divergence, the KL divergence from the base in the end. Runs of
    tables that were published without these columns have none.
    """
    if not run.has_folder():
        stored = STORED[run]
        return {name: stored[name] for name in [*HEALTH, "final_kl"] if name in stored}
    columns: dict[str, str] = {}
    if run.divergence_file.exists():
        columns["final_kl"] = run.divergence_file.read_text()
    per_evaluation = EVERY * REGIMES[run.regime]
    for column, key in HEALTH.items():
        values = np.array([row[key] for row in run.updates()])
        means = values.reshape(-1, per_evaluation).mean(1)
        columns[column] = " ".join(f"{mean:.3g}" for mean in means)
    return columns


def rows_of_runs(found: Curves) -> list[dict[str, Any]]:
    """Returns a row for each run: its curve, and its last evaluation."""
    rows = []
    for (regime, name), curve_of_seed in found.items():
        for run in curves(regime, name):
            if run.seed not in curve_of_seed:
                continue
            last = run.evaluations()[-1]
            row: dict[str, Any] = {"regime": regime, "method": name, "seed": run.seed}
            row["accuracies"] = " ".join(map(str, curve_of_seed[run.seed]))
            row |= {key: last.get(key) for key in ("greedy_accuracy", "pass@4")}
            rows.append(row | health(run))
    return rows


def write_table(rows: list[dict[str, Any]], path: Path) -> None:
    """Writes rows as .csv, their floats with four digits. A row may lack some columns."""
    path.parent.mkdir(parents=True, exist_ok=True)
    names: dict[str, None] = {}  # an ordered set
    for row in rows:
        names |= dict.fromkeys(row)
    with open(path, "w", newline="") as file:
        lines = csv.DictWriter(file, list(names))
        lines.writeheader()
        for row in rows:
            shown = {k: f"{x:.4g}" if isinstance(x, float) else x for k, x in row.items()}
            lines.writerow(shown)


# ---- Figure --------------------------------------------------------------------------------------
def label_of(row: dict[str, Any]) -> str:
    """Returns a method's name as the page has it."""
    labels = LABELS | AT_GRPOS_RATE if row["regime"] == "SmolLM2" else LABELS
    return labels.get(row["method"], row["method"])


def draw_curves(axes: Any, rows: list[dict[str, Any]], found: Curves) -> None:
    """Draws the mean held-out curves of a regime."""
    for row in rows:
        name = row["method"]
        curve = np.mean(list(found[row["regime"], name].values()), 0)
        rollouts = np.arange(len(curve)) * EVERY
        plural = "s" if row["seeds"] > 1 else ""
        axes.plot(
            rollouts,
            curve,
            label=f"{label_of(row)} ({row['seeds']} seed{plural})",
            color=COLORS.get(label_of(row), OTHER_COLOR),
            linestyle=":" if name == ORACLE else "-",
            linewidth=2.5 if name in CONTROL[:2] else 1.2,
            zorder=3 if name == UNIFORM else 2,
        )
        axes.set_xticks(rollouts)
    axes.set_title(f"Held-out accuracy, {rows[0]['regime']}", loc="left", fontweight="bold")
    axes.set_xlabel(f"rollouts of {COMPLETIONS} completions")
    axes.legend(frameon=False, fontsize=8, loc="lower right")


def draw_differences(axes: Any, rows: list[dict[str, Any]], found: Curves) -> None:
    """Draws area and end over GRPO's, with intervals where all runs learned."""
    for place, row in enumerate(rows):
        color = COLORS.get(label_of(row), OTHER_COLOR)
        ends = [curve[-1] for curve in found[row["regime"], row["method"]].values()]
        if min(ends) < LEARNED_ABOVE:
            axes.text(0, place, "  some runs failed", va="center", color=OTHER_COLOR)
            continue
        for key, marker, shift in (("area", "o", -0.15), ("end", "s", 0.15)):
            y = place + shift
            ends = np.clip([row[f"{key}_low"], row[f"{key}_high"]], -1, 1)  # infinite for one seed
            axes.plot(ends, [y, y], color=color, linewidth=2, alpha=0.5)
            axes.plot(row[f"{key}_more"], y, marker, color=color, markersize=5)
    axes.axvline(0, color="#888888", linewidth=1)
    axes.set_yticks(range(len(rows)), [label_of(row) for row in rows], fontsize=8)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_xlim(*SHOWN)  # the table has what goes on beyond it
    axes.set_xlabel("difference in accuracy; 95% intervals over paired seeds")
    axes.set_title("Over GRPO: area (dot) and end (square)", loc="left", fontweight="bold")


def draw_ends(axes: Any, rows: list[dict[str, Any]], found: Curves) -> None:
    """Draws where each run ended."""
    for place, row in enumerate(rows):
        ends = [curve[-1] for curve in found[row["regime"], row["method"]].values()]
        color = COLORS.get(label_of(row), OTHER_COLOR)
        axes.plot(ends, [place] * len(ends), "o", color=color, markersize=7, alpha=0.5)
    axes.axvline(LEARNED_ABOVE, color="#888888", linewidth=1, linestyle="--")
    axes.set_yticks(range(len(rows)), [label_of(row) for row in rows], fontsize=8)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_xlim(-0.02, 1.02)
    axes.set_xlabel("held-out accuracy at the end")
    axes.set_title("Every run: those right of the line learned", loc="left", fontweight="bold")


def draw(rows: list[dict[str, Any]], found: Curves, path: Path) -> None:
    """Draws two panels a regime: mean curves, and area and end over uniform's.

    Where a run with uniform credit failed, a mean describes no run. There the second panel has the
    end of every run, and the first one only the methods with all of uniform's seeds.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = [row for row in rows if row["seeds"]]
    regimes = list(dict.fromkeys(row["regime"] for row in rows))
    heights = [max(6, 2 + sum(row["regime"] == regime for row in rows)) for regime in regimes]
    figure, panels = plt.subplots(
        len(regimes),
        2,
        figsize=(12, 0.45 * sum(heights)),
        squeeze=False,
        sharex="col",
        height_ratios=heights,
    )
    for (left, right), regime in zip(panels, regimes, strict=True):
        of_regime = [row for row in rows if row["regime"] == regime]
        of_uniform = found[regime, UNIFORM].values()
        if min(curve[-1] for curve in of_uniform) > LEARNED_ABOVE:
            draw_curves(left, of_regime, found)
            draw_differences(right, of_regime, found)
        else:
            complete = [row for row in of_regime if row["seeds"] == len(of_uniform)]
            draw_curves(left, complete, found)
            draw_ends(right, of_regime, found)
        for axes in (left, right):
            axes.tick_params(labelbottom=True)
            axes.grid(alpha=0.3)
            axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


# ---- The default command -------------------------------------------------------------------------
def default_run(script: str, flags: list[str], folder: Path, seed: int) -> dict[str, Any]:
    """Does one run into a folder. Returns its summary with wall clock and memory.

    A run that came to its end is not made again. Remove the folder of one that was killed: the
    wall clock is that of a whole run.
    """
    path = folder / "default_run.json"
    if path.exists():
        return dict(json.loads(path.read_text()))
    command = [sys.executable, "-m", "accelerate.commands.launch", script, *flags]
    command += ["--seed", str(seed), "--output_dir", str(folder)]
    began = time.time()
    if subprocess.run(command, cwd=ROOT, stdout=subprocess.DEVNULL).returncode != 0:
        sys.exit(f"learning_curves.py: the run of seed {seed} failed, see above")
    wall = time.time() - began

    result = json.loads((folder / "summary.json").read_text())
    with open(folder / "metrics.jsonl") as lines:
        rows = [json.loads(line) for line in lines]
    updates = [row for row in rows if "reward" in row]
    columns = ["seconds_rollout", "seconds_score", "seconds_credit", "seconds_update"]
    columns += ["reward", "weight_gini", "weight_effn"]
    for name in columns:  # a step whose groups are all equal has no credit, so no weights
        values = [row[name] for row in updates if name in row]
        result[name] = mean(values) if values else None
    result["rewards"] = [round(row["reward"], 4) for row in updates]  # of every step
    result["seed"] = seed
    result["wall_seconds"] = wall
    largest = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss  # KiB, of any run so far
    result["largest_rss_gib"] = largest / 2**20
    path.write_text(json.dumps(result))
    return result


def name_of(script: str, flags: list[str]) -> str:
    """Returns grpo_arca-default, grpo_arca-uniform (for --credit uniform), or the flags' text."""
    if flags[:1] == ["--credit"]:
        flags = flags[1:]
    words = [Path(script).stem, *(flags or ["default"])]
    return re.sub(r"[^\w.]+", "-", " ".join(words))


def run_defaults(script: str, flags: list[str], seeds: list[int], data_folder: str | None) -> None:
    """Does the default command on several seeds. Prints its figures, and writes them if asked."""
    name = name_of(script, flags)
    results = []
    for seed in seeds:
        result = default_run(script, flags, ROOT / "runs" / f"{name}-{seed}", seed)
        results.append(result)
        before = result["before"]
        after = result["after"]
        parts = [
            f"sampled {before['sampled_accuracy']:.3f} -> {after['sampled_accuracy']:.3f}",
            f"greedy {before['greedy_accuracy']:.3f} -> {after['greedy_accuracy']:.3f}",
            f"{result['wall_seconds']:.0f} s",
            f"{result['largest_rss_gib']:.2f} GiB",
        ]
        print(f"seed {seed}: {', '.join(parts)}", flush=True)
    accuracies = [result["after"]["sampled_accuracy"] for result in results]
    spread = f" +- {stdev(accuracies):.3f}" if len(accuracies) > 1 else ""
    print(f"after: {mean(accuracies):.3f}{spread} (mean and std over seeds)")
    if data_folder is not None:
        path = DATA / data_folder / f"{name}.json"
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps({"flags": flags, "runs": results}, indent=2))


# ---- Command line --------------------------------------------------------------------------------
def parse_options(argv: list[str]) -> argparse.Namespace:
    """Returns the options, after `use_smollm2` has changed their choices if --smollm2 is there."""
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    first.add_argument("--smollm2", type=Path, help="a folder that tools/smollm2.py made")
    model = first.parse_known_args(argv)[0].smollm2
    if model is not None:
        use_smollm2(model.absolute())

    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        parents=[first],
    )
    add = parser.add_argument
    add("--stage", choices=("control", "sweep", "curves"), help="default: all")
    add("--regimes", nargs="+", choices=REGIMES, help=f"default: all but {CONSTANT}")
    add("--methods", nargs="+", choices=METHODS, help="default: all")
    add("--seeds", nargs="+", type=int, help="of the curves, not a method's own")
    add("--rate", help="the learning rate of every method, in place of the sweep")
    add("--processes", type=int, default=len(os.sched_getaffinity(0)))
    add("--list", action="store_true", help="say what there is to do, and stop")
    add("--draw", action="store_true", help="train nothing more")
    add("--divergence", action="store_true", help="measure where each run has ended, before tables")
    study = "chains" if model is None else "smollm2"
    add("--output", type=Path, default=DATA / "learning_curves" / study, help="tables and figure")
    add("--go_on", action="store_true", help="runs of the tables there are done")
    add("--default_run", metavar="SCRIPT", help="the script's defaults on --seeds instead")
    add(
        "--write",
        nargs="?",
        const="default_runs",
        metavar="FOLDER",
        help="with --default_run: replace its file in results/data/FOLDER/",
    )
    return parser.parse_args(argv)


def do_stages(options: argparse.Namespace, regimes: list[str]) -> None:
    """Lists or does the runs of the stages that are asked for."""
    stages = [options.stage] if options.stage else ["control", "sweep", "curves"]
    names = options.methods or list(METHODS)
    for stage in stages:
        passes = 2 if stage == "control" else 1  # its curves need its sweep
        for _ in range(passes):
            runs = plan(stage, regimes, names)
            if options.list:
                for run in runs:
                    print("done" if run.is_done() else "    ", run.folder.name)
            elif not options.draw:
                train_all(runs, options.processes)


def main() -> None:
    split = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    options = parse_options(sys.argv[1:split])
    MORE_FLAGS[:] = sys.argv[split + 1 :]
    if options.default_run:
        seeds = options.seeds or [1, 2, 3]
        run_defaults(options.default_run, MORE_FLAGS, seeds, options.write)
        return

    if options.rate:
        RATES.update(dict.fromkeys(RATES, (options.rate,)))
    if options.seeds:
        for name, method in METHODS.items():
            METHODS[name] = method._replace(seeds=tuple(options.seeds))
    table = options.output.with_suffix(".csv")
    if options.go_on:
        go_on(table)
    regimes = options.regimes or [regime for regime in REGIMES if regime != CONSTANT]

    do_stages(options, regimes)
    if options.divergence:
        measure_divergences(regimes, options.methods or list(METHODS))
    rows, found = tabulate(options.regimes or list(REGIMES))
    if options.list or not found:
        return
    write_table(rows, table)
    runs_table = options.output.with_name(options.output.name + "_runs.csv")
    write_table(rows_of_runs(found), runs_table)
    draw(rows, found, options.output.with_suffix(".png"))
    for row in rows:
        print(*(f"{x:.3f}" if isinstance(x, float) else x for x in row.values()), sep="  ")


if __name__ == "__main__":
    main()
