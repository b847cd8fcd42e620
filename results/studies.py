"""Trains the runs of the studies, each on one core, and collects their figures.

    python results/studies.py                           # all that is missing; a killed run resumes
    python results/studies.py wrong_policy --methods ARCA "methods/oppo.py --credit shuffled"
    python results/studies.py nearly_right_policy --methods ARCA --updates 1 4 --rate 0.002
    python results/studies.py smollm2_float32 --list    # the runs, and which are done
    python results/studies.py --collect                 # finished runs -> results/data/studies/

A method is a name of METHODS, or a script with its flags. A file of methods/ is forked first, by
tools/fork.py. A seed has the same data order and random numbers for all methods, so runs are paired
by seed. Without --rate, every method has GRPO's learning rate. The studies are

    wrong_policy     chains of 8 operations, by a policy that is mostly wrong before training, even
                     when it decodes greedily: 50 rollouts of 16 completions. wrong_policy_2 and
                     wrong_policy_3 are the same with policies that get other things wrong
    nearly_right_policy
                     chains of 8 operations, by a policy that is right greedily: 80 rollouts of 16
    smollm2          SmolLM2-135M-Instruct in bfloat16 on the sums of tools/smollm2.py: 20 rollouts
                     of 32. A CPU without bfloat16 instructions takes smollm2_float32, whose
                     runs are evaluated at their two ends only, to save time
    default_command  the default flags: 45 rollouts of 128
    small_rollouts   the same with rollouts of 16, at half the rate

Runs are folders of runs/studies/. results/data/studies/ has a file for each study, with a line for
each evaluation. A run whose last line is there is done: remove its lines and its folder to repeat
it, as after a change of a method. Figures of updates are means since the evaluation before.
`clipped` is the share of updates whose gradient was cut to --max_grad_norm, `completions` is how
many a rollout sampled, and `commit` is the code's.
"""

import argparse
import csv
import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import cache
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
RUNS = ROOT / "runs/studies"
DATA = ROOT / "results/data/studies"
GRPO = "GRPO"
METHODS = {
    GRPO: "grpo_arca.py --credit uniform",
    "GRPO, no step without a gradient": "grpo_arca.py --credit uniform --skip_zero_gradient True",
    "GRPO, groups drawn again": "grpo_arca.py --credit uniform --max_resample_times 4",
    "GRPO, 8 completions": "grpo_arca.py --credit uniform --per_device_train_batch_size 8",
    "GRPO, 72 completions": "grpo_arca.py --credit uniform --per_device_train_batch_size 72",
    "right answers only": "grpo_arca.py --credit uniform --negative_weight 0",
    "wrong answers at a quarter": "grpo_arca.py --credit uniform --negative_weight 0.25",
    "right answers only, by probability": "grpo_arca.py --credit probability --negative_weight 0",
    "ARCA": "grpo_arca.py --credit arca",
    "ARCA, p = 2": "grpo_arca.py --credit arca --sharpening 2",
    "ARCA, right answers only": "grpo_arca.py --credit arca --negative_weight 0",
    "ARCA's weights, shuffled": "grpo_arca.py --credit shuffled",
    "OAR-G": "grpo_oar.py --credit oar_g",
    "OAR-G, right answers only": "grpo_oar.py --credit oar_g --negative_weight 0",
    "OAR-P": "grpo_oar.py --credit oar_p",
    "S-trace": "grpo_strace.py --credit s_trace --trace_normalize False",
    "S-trace, normalized": "grpo_strace.py --credit s_trace --trace_normalize True",
    "S-trace, lambda 0.5": "grpo_strace.py --credit s_trace --trace_lambda 0.5",
    "P-trace": "grpo_strace.py --credit p_trace",
    "least variance": "results/oracles.py --oracle least_variance",
    "step values": "results/oracles.py --oracle step_values",
    "step values, right answers only": "results/oracles.py --oracle right_only",
}
DRAWN_AGAIN = {
    f"{name}, groups drawn again": f"{METHODS[name]} --max_resample_times 4"
    for name in (
        "right answers only", "ARCA", "ARCA's weights, shuffled", "OAR-G", "S-trace",
        "S-trace, normalized",
    )
}  # fmt: skip
METHODS |= DRAWN_AGAIN
MAIN = [GRPO, "right answers only", "ARCA", "OAR-G", "S-trace"]
ORACLES = ["least variance", "step values", "step values, right answers only"]


class Study(NamedTuple):
    """A task, and how its runs are trained."""

    rates: dict[int, str]  # updates of a rollout -> GRPO's learning rate
    rollouts: int
    every: int  # rollouts between evaluations
    completions: int  # of a rollout
    flags: dict[str, Any]
    micro_batches: int = 1  # of an update


def policy_folder(name: str) -> Path:
    """Returns a folder with a policy of results/policies/, in the files of the embedded one."""
    folder = RUNS.parent / "policies" / name
    if not folder.exists():
        partial = folder.with_name(f"{name}-{os.getpid()}")  # another program may do the same
        shutil.copytree(ROOT / "common/tiny_policy", partial)
        shutil.copy(ROOT / f"results/policies/{name}.safetensors", partial / "model.safetensors")
        partial.rename(folder)
    return folder


CHAINS = {"dataset_config": 8, "dtype": "float32"}
WRONG_POLICY = Study({1: "0.002", 4: "0.001"}, 50, 10, 16, CHAINS | {
    "model_name_or_path": policy_folder("wrong_policy"),
    "max_completion_length": 170,
    "max_eval_samples": 60,
    "per_device_eval_batch_size": 240,
})  # fmt: skip
SMOLLM2 = Study({1: "4e-4"}, 20, 5, 32, {
    "model_name_or_path": ROOT / "smollm2",
    "dataset_name": ROOT / "smollm2/sums.jsonl",
    "max_completion_length": 32,
    "gradient_checkpointing": False,
    "max_eval_samples": 36,
    "num_generations_eval": 8,
    "per_device_eval_batch_size": 324,
})  # fmt: skip
STUDIES = {
    "wrong_policy": WRONG_POLICY,
    "nearly_right_policy": Study({1: "0.002", 4: "0.001"}, 80, 20, 16, CHAINS | {
        "model_name_or_path": policy_folder("nearly_right_policy"),
        "max_completion_length": 160,
        "max_eval_samples": 100,
    }),
    "smollm2": SMOLLM2._replace(flags=SMOLLM2.flags | {"dtype": "bfloat16"}),
    "smollm2_float32": SMOLLM2._replace(every=20, flags=SMOLLM2.flags | {"dtype": "float32"}),
    "default_command": Study({1: "0.004"}, 45, 25, 128, {"dtype": "float32"}, micro_batches=4),
    "small_rollouts": Study({1: "0.002"}, 45, 25, 16, {"dtype": "float32"}),
}  # fmt: skip
for number in (2, 3):
    policy = {"model_name_or_path": policy_folder(f"wrong_policy_{number}")}
    STUDIES[f"wrong_policy_{number}"] = WRONG_POLICY._replace(flags=WRONG_POLICY.flags | policy)
PLAN = [  # study, methods, updates, learning rate (None: GRPO's), seeds
    ("wrong_policy", [*MAIN, *ORACLES, "ARCA, p = 2", "S-trace, normalized"], 1, None, 8),
    ("wrong_policy", MAIN, 1, "0.001", 8),
    ("wrong_policy", MAIN, 1, "0.004", 8),
    ("wrong_policy", [GRPO, "right answers only", "ARCA", "S-trace"], 4, None, 16),
    ("wrong_policy", ["ARCA, p = 2", "S-trace, normalized"], 4, None, 8),
    ("wrong_policy", ["GRPO, 8 completions", "OAR-G, right answers only"], 1, None, 8),
    ("wrong_policy_2", MAIN, 1, None, 4),
    ("wrong_policy_2", MAIN, 1, "0.001", 4),
    ("wrong_policy_3", MAIN, 1, "0.001", 4),
    ("nearly_right_policy", [GRPO, "right answers only", "OAR-G, right answers only"], 1, None, 16),
    ("nearly_right_policy", ["GRPO, 8 completions"], 1, None, 8),
    ("nearly_right_policy", [*MAIN, "ARCA's weights, shuffled", "S-trace, normalized"], 1, None, 8),
    ("nearly_right_policy", [GRPO, "right answers only", "ARCA", "S-trace"], 4, None, 8),
    ("nearly_right_policy", ["S-trace, normalized"], 4, None, 8),
    ("smollm2", [*MAIN, "GRPO, groups drawn again"], 1, None, 12),
    ("smollm2", ["GRPO, 72 completions", *DRAWN_AGAIN], 1, None, 8),
    ("default_command", [*MAIN, "ARCA's weights, shuffled", "P-trace"], 1, None, 3),
    ("default_command", [GRPO, "right answers only"], 1, None, 8),
    ("small_rollouts", [GRPO, "right answers only"], 1, None, 8),
]
COLUMNS = {  # of the data -> the metric of each update
    "reward": "reward",
    "entropy": "entropy",
    "zero_std_share": "zero_std_share",
    "grad_norm": "grad_norm",
    "kl": "kl",
    "clipped": "clipped_gradient",
    "completions": "sampled_completions",
}


# ---- Runs ----------------------------------------------------------------------------------------
class Run(NamedTuple):
    """One training run."""

    study: str
    method: str
    updates: int  # of a rollout
    rate: str
    seed: int

    @property
    def folder(self) -> Path:
        """Where it writes."""
        words = [self.method, str(self.updates), self.rate, str(self.seed)]
        name = "".join(c if c.isalnum() or c in ".-" else "_" for c in "-".join(words))
        return RUNS / self.study / name

    def command(self, smollm2: Path) -> list[str]:
        """Returns the command that trains it, or goes on with it."""
        study = STUDIES[self.study]
        flags = study.flags | {
            "learning_rate": self.rate,
            "seed": self.seed,
            "output_dir": self.folder,
            "resume_from_checkpoint": "latest",
            "max_steps": study.rollouts * self.updates,
            "eval_steps": study.every * self.updates,
            "warmup_steps": 3 * self.updates,
            "gradient_accumulation_steps": study.micro_batches,
            "steps_per_generation": study.micro_batches * self.updates,
            "per_device_train_batch_size": study.completions // study.micro_batches // self.updates,
        }
        words = [f"--{name}={value}" for name, value in flags.items()]
        words = [word.replace(str(ROOT / "smollm2"), str(smollm2)) for word in words]
        script, *own = shlex.split(METHODS.get(self.method, self.method))
        if script.startswith("methods/"):
            script = f"grpo_{Path(script).name}"
        return [sys.executable, str(ROOT / script), *words, *own]

    def is_done(self) -> bool:
        """Returns whether its folder or the data has the complete run."""
        return self in runs_in_data(self.study) or (self.folder / "summary.json").exists()


@cache
def runs_in_data(study: str) -> set[Run]:
    """Returns the complete runs of a study's file."""
    lines = read_csv(DATA / f"{study}.csv")
    last = str(STUDIES[study].rollouts)
    return {Run(study, *key_of(line)) for line in lines if line["rollout"] == last}


def key_of(line: dict[str, Any]) -> tuple[str, int, str, int]:
    """Returns what distinguishes a line's run from the other runs of its study."""
    return line["method"], int(line["updates"]), line["rate"], int(line["seed"])


def read_csv(path: Path) -> list[dict[str, Any]]:
    """Returns the rows of a table, none if there is no such file."""
    if not path.exists():
        return []
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def write_csv(rows: list[dict[str, Any]], path: Path) -> None:
    """Writes a table, its floats with six digits. A row may lack some columns."""
    path.parent.mkdir(parents=True, exist_ok=True)
    names = dict.fromkeys(name for row in rows for name in row)
    with open(path, "w", newline="") as file:
        lines = csv.DictWriter(file, list(names), lineterminator="\n")
        lines.writeheader()
        for row in rows:
            lines.writerow({k: f"{x:.6g}" if isinstance(x, float) else x for k, x in row.items()})


def planned_runs() -> list[Run]:
    """Returns the runs of PLAN, by seed, so that an early stop leaves whole pairs."""
    runs: dict[Run, None] = {}  # an ordered set
    for study, methods, updates, rate, seeds in PLAN:
        for seed in range(1, seeds + 1):
            for method in methods:
                own_rate = rate or STUDIES[study].rates[updates]
                runs[Run(study, method, updates, own_rate, seed)] = None
    return list(runs)


def chosen_runs(options: argparse.Namespace) -> list[Run]:
    """Returns the chosen studies' planned runs or, with --methods, those that the options name."""
    studies = options.studies or list(STUDIES)
    if options.methods is None:
        return [run for run in planned_runs() if run.study in studies]
    runs = []
    for study in studies:
        for seed in options.seeds:
            for updates in options.updates:
                rate = options.rate or STUDIES[study].rates[updates]
                runs += [Run(study, method, updates, rate, seed) for method in options.methods]
    return runs


def fork_methods(runs: Iterable[Run]) -> None:
    """Makes the scripts of methods that are files of methods/."""
    commands = {METHODS.get(run.method, run.method) for run in runs}
    for script in sorted({shlex.split(command)[0] for command in commands}):
        if script.startswith("methods/"):
            subprocess.run([sys.executable, "tools/fork.py", script], cwd=ROOT, check=True)


def train(run: Run, smollm2: Path) -> None:
    """Trains a run to its end on one core. What it prints goes to its log.txt."""
    run.folder.mkdir(parents=True, exist_ok=True)
    (run.folder / "run.json").write_text(json.dumps(run._asdict()))
    one_core = os.environ | {"OMP_NUM_THREADS": "1"}
    with open(run.folder / "log.txt", "a") as log:
        subprocess.run(run.command(smollm2), cwd=ROOT, env=one_core, stdout=log, stderr=log)


def train_all(runs: list[Run], processes: int, smollm2: Path) -> None:
    """Trains the runs that are missing, and says how much time is left."""
    missing = [run for run in runs if not run.is_done()]
    print(f"{len(runs)} runs, {len(missing)} to do", flush=True)
    fork_methods(missing)
    began = time.time()
    pool = ThreadPoolExecutor(processes)
    run_of = {pool.submit(train, run, smollm2): run for run in missing}
    try:
        for done, future in enumerate(as_completed(run_of), start=1):
            run = run_of[future]
            state = "done" if run.is_done() else f"FAILED, see {run.folder / 'log.txt'}"
            minutes = (time.time() - began) / done * (len(missing) - done) / 60
            clock = time.strftime("%H:%M")
            name = run.folder.relative_to(RUNS)
            print(
                f"{clock} [{done}/{len(missing)}] {name} {state}; {minutes:.0f} min left",
                flush=True,
            )
    finally:
        pool.shutdown(cancel_futures=True)  # after Ctrl-C, no further run begins


# ---- What runs leave -----------------------------------------------------------------------------
def lines_of(run: Run, folder: Path) -> list[dict[str, Any]]:
    """Returns a line for each evaluation of a finished run, without those that a resume added."""
    study = STUDIES[run.study]
    environment = json.loads((folder / "config.json").read_text())["environment"]
    lines = []
    since: list[dict[str, Any]] = []  # updates since the last evaluation
    for text in (folder / "metrics.jsonl").read_text().splitlines():
        row = json.loads(text)
        if "reward" in row:
            since.append(row)
            continue
        rollout = row["step"] / run.updates
        if rollout % study.every != 0 and rollout != study.rollouts:
            continue
        line = {name: value for name, value in run._asdict().items() if name != "study"}
        line["rollout"] = int(rollout)
        line["sampled"] = row["eval"]["sampled_accuracy"]
        line["greedy"] = row["eval"]["greedy_accuracy"]
        line["pass_at_4"] = row["eval"]["pass@4"]
        for name, metric in COLUMNS.items():
            values = [update[metric] for update in since if update.get(metric) is not None]
            line[name] = mean(values) if values else ""
        line["commit"] = environment["commit"]
        hardware = environment["hardware"]
        line["machine"] = ", ".join(hardware["gpus"]) or hardware["cpu"]
        lines.append(line)
        since = []
    return lines


def collect(folder: Path) -> None:
    """Puts the finished runs of a folder into the data, in place of any lines of theirs there."""
    for study in STUDIES:
        path = DATA / f"{study}.csv"
        lines = read_csv(path)
        for summary in sorted((folder / study).glob("*/summary.json")):
            run = Run(**json.loads((summary.parent / "run.json").read_text()))
            lines = [line for line in lines if key_of(line) != run[1:]]
            lines += lines_of(run, summary.parent)
        if lines:
            write_csv(lines, path)
        print(f"{study}: {len({key_of(line) for line in lines})} runs")


# ---- Command line --------------------------------------------------------------------------------
def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("studies", nargs="*", choices=[[], *STUDIES], help="default: all")
    parser.add_argument("--methods", nargs="+", help="default: the plan of the study")
    parser.add_argument("--updates", nargs="+", type=int, default=[1], help="of a rollout")
    parser.add_argument("--rate", help="learning rate; default: GRPO's")
    parser.add_argument("--seeds", nargs="+", type=int, default=list(range(1, 9)))
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--smollm2", type=Path, default=ROOT / "smollm2", help="its folder")
    parser.add_argument("--list", action="store_true", help="train nothing")
    parser.add_argument("--collect", nargs="?", type=Path, const=RUNS, metavar="FOLDER")
    options = parser.parse_args()
    if options.collect:
        collect(options.collect)
        return
    runs = chosen_runs(options)
    if not options.list:
        train_all(runs, options.processes, options.smollm2.absolute())
        return
    for run in runs:
        print("done   " if run.is_done() else "missing", run.folder.relative_to(RUNS))


if __name__ == "__main__":
    main()
