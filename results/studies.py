"""Trains the runs of the studies, each on one core, and collects their figures.

    python results/studies.py                           # all that is missing; a killed run resumes
    python results/studies.py wrong_policy --methods ARCA "methods/oppo.py --credit shuffled"
    python results/studies.py wrong_policy --methods ARCA --updates 1 4 --rate 0.001
    python results/studies.py --collect                 # finished runs -> results/data/studies/

A method is a name of METHODS, or a script with its flags. A file of methods/ is forked first, by
tools/fork.py. A seed has the same data order and random numbers for all methods, so runs are paired
by seed. Without --rate, every method has GRPO's learning rate. The studies are

    wrong_policy     chains of 8 operations, by a policy that is mostly wrong before training, even
                     when it decodes greedily: 50 rollouts of 16 completions. wrong_policy_2 and
                     wrong_policy_3 are the same with policies that get other things wrong
    nearly_right_policy
                     chains of 8 operations, by a policy that is right greedily: 80 rollouts of 16
    smollm2          SmolLM2-135M-Instruct in bfloat16 on its sums, both made by `python
                     tools/smollm2.py smollm2`: 20 rollouts of 32. A CPU without bfloat16
                     instructions takes smollm2_float32, whose runs are evaluated at their two ends
                     only, to save time
    default_command  the default flags: 45 rollouts of 128
    small_rollouts   the same with rollouts of 16, at half the rate

Runs are folders of runs/studies/. results/data/studies/ has a file for each study, with a line for
each evaluation. A run whose last line is there is done: remove its lines and its folder to repeat
it, as after a change of a method. Figures of updates are means since the evaluation before.
`clipped` is the share of updates whose gradient was cut to --max_grad_norm, `completions` is how
many a rollout sampled, and `commit` is the code's.
"""

import argparse
import fcntl
import itertools
import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor, wait
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pandas
from tqdm import tqdm

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
WEIGHTS_AGAIN = {
    f"wrong answers {name}, groups drawn again": (
        f"{METHODS[GRPO]} --max_resample_times 4 --negative_weight {weight}"
    )
    for name, weight in (("at a quarter", 0.25), ("tenfold", 10))
}
METHODS |= DRAWN_AGAIN | WEIGHTS_AGAIN
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

    def command_line(self, updates: int, rate: str) -> list[str]:
        """Returns the flags of its runs with so many updates of a rollout, and a learning rate."""
        flags = self.flags | {
            "learning_rate": rate,
            "max_steps": self.rollouts * updates,
            "eval_steps": self.every * updates,
            "warmup_steps": 3 * updates,
            "gradient_accumulation_steps": self.micro_batches,
            "steps_per_generation": self.micro_batches * updates,
            "per_device_train_batch_size": self.completions // self.micro_batches // updates,
        }
        return [f"--{name}={value}" for name, value in flags.items()]


def policy_folder(name: str) -> Path:
    """Returns a folder with a policy of results/policies/, in the files of the embedded one."""
    folder = RUNS.parent / "policies" / name
    if not folder.exists():
        partial = folder.with_name(f"{name}-{os.getpid()}")  # another program may do the same
        shutil.copytree(ROOT / "common/tiny_policy", partial)
        shutil.copy(ROOT / f"results/policies/{name}.safetensors", partial / "model.safetensors")
        try:
            partial.rename(folder)
        except OSError:  # the other program was faster
            shutil.rmtree(partial)
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
    STUDIES[f"wrong_policy_{number}"] = WRONG_POLICY._replace(
        flags=WRONG_POLICY.flags | {"model_name_or_path": policy_folder(f"wrong_policy_{number}")}
    )
PLAN = [  # study, updates, methods, learning rate (None: GRPO's), seeds
    ("wrong_policy", 1, [*ORACLES, "ARCA, p = 2", "S-trace, normalized"], None, 8),
    ("wrong_policy", 1, MAIN, None, 16),
    ("wrong_policy", 1, MAIN, "0.001", 8),
    ("wrong_policy", 1, MAIN, "0.004", 8),
    ("wrong_policy", 4, [GRPO, "right answers only", "ARCA", "S-trace"], None, 16),
    ("wrong_policy", 4, ["ARCA, p = 2", "S-trace, normalized"], None, 8),
    ("wrong_policy", 1, ["GRPO, 8 completions", "OAR-G, right answers only"], None, 8),
    ("wrong_policy_2", 1, MAIN, None, 4),
    ("wrong_policy_2", 1, MAIN, "0.001", 4),
    ("wrong_policy_3", 1, MAIN, "0.001", 4),
    ("nearly_right_policy", 1, [*MAIN, "OAR-G, right answers only"], None, 16),
    ("nearly_right_policy", 1, ["GRPO, 8 completions"], None, 8),
    ("nearly_right_policy", 1, ["ARCA's weights, shuffled", "S-trace, normalized"], None, 8),
    ("nearly_right_policy", 4, [GRPO, "right answers only", "ARCA", "S-trace"], None, 8),
    ("nearly_right_policy", 4, ["S-trace, normalized"], None, 8),
    ("smollm2", 1, [*MAIN, "GRPO, groups drawn again"], None, 12),
    ("smollm2", 1, ["GRPO, 72 completions", *DRAWN_AGAIN], None, 8),
    ("smollm2_float32", 1, ["GRPO, groups drawn again", *WEIGHTS_AGAIN], None, 8),
    ("default_command", 1, [*MAIN, "ARCA's weights, shuffled", "P-trace"], None, 3),
    ("default_command", 1, [GRPO, "right answers only"], None, 8),
    ("small_rollouts", 1, [GRPO, "right answers only"], None, 8),
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

    def command(self) -> list[str]:
        """Returns the command that trains it, or goes on with it."""
        words = STUDIES[self.study].command_line(self.updates, self.rate)
        words += [f"--seed={self.seed}", f"--output_dir={self.folder}"]
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
    return pandas.read_csv(path, dtype=str, keep_default_na=False).to_dict("records")


def write_csv(rows: list[dict[str, Any]], path: Path) -> None:
    """Writes a table, its floats with six digits. A row may lack some columns."""
    path.parent.mkdir(parents=True, exist_ok=True)
    cells = pandas.DataFrame(rows).astype(object).fillna("")
    texts = cells.map(lambda cell: f"{cell:.6g}" if isinstance(cell, float) else cell)
    texts.to_csv(path, index=False)


def chosen_runs(options: argparse.Namespace) -> list[Run]:
    """Returns the chosen studies' planned runs or, with --methods, those that the options name.

    They are ordered by seed, so that an early stop leaves whole pairs.
    """
    studies = options.studies or list(STUDIES)
    entries: list[Any] = [
        (*entry, range(1, seeds + 1)) for *entry, seeds in PLAN if entry[0] in studies
    ]
    if options.methods:
        pairs = itertools.product(studies, options.updates)
        entries = [(*pair, options.methods, options.rate, options.seeds) for pair in pairs]
    runs: dict[Run, None] = {}  # an ordered set
    for study, updates, methods, rate, seeds in entries:
        own_rate = rate or STUDIES[study].rates[updates]
        for seed, method in itertools.product(seeds, methods):
            runs[Run(study, method, updates, own_rate, seed)] = None
    return list(runs)


def fork_methods(runs: Iterable[Run]) -> None:
    """Makes the scripts of methods that are files of methods/."""
    commands = {METHODS.get(run.method, run.method) for run in runs}
    for script in sorted({shlex.split(command)[0] for command in commands}):
        if script.startswith("methods/"):
            subprocess.run([sys.executable, "tools/fork.py", script], cwd=ROOT, check=True)


def cores() -> int:
    """Returns how many cores this program may use. macOS knows only how many there are."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def train(folder: Path, command: list[str]) -> None:
    """Trains a run to its end on one core, or goes on with it. What it prints goes to log.txt."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "log.txt", "a") as log:
        fcntl.flock(log, fcntl.LOCK_EX)  # waits for a run there that outlived a killed program
        if not (folder / "summary.json").exists():
            command = [*command, "--resume_from_checkpoint=latest"]
            one_core = os.environ | {"OMP_NUM_THREADS": "1"}
            subprocess.run(command, env=one_core, stdout=log, stderr=log)
    last_line = (folder / "log.txt").read_text().splitlines()[-1]
    tqdm.write(f"{time.strftime('%H:%M')} {folder}/log.txt: {last_line}")


def updates_in(folders: Iterable[Path]) -> int:
    """Returns how many updates the runs of some folders have made."""
    logs = [folder / "metrics.jsonl" for folder in folders]
    return sum(log.read_text().count('"loss"') for log in logs if log.exists())


def train_all(commands: dict[Path, list[str]], updates: int, processes: int) -> None:
    """Trains runs, each in its folder. A bar shows their updates, and how much time is left."""
    bar = tqdm(total=updates, initial=updates_in(commands), unit="update", smoothing=0)
    pool = ThreadPoolExecutor(processes)
    futures = [pool.submit(train, *item) for item in commands.items()]
    try:
        while wait(futures, timeout=10).not_done:
            bar.n = max(bar.n, updates_in(commands))  # a run that resumes makes some again
            bar.refresh()
    finally:
        pool.shutdown(cancel_futures=True)  # after Ctrl-C, no further run begins
        bar.close()


# ---- What runs leave -----------------------------------------------------------------------------
def lines_of(run: Run, folder: Path) -> list[dict[str, Any]]:
    """Returns a line for each evaluation of a finished run, without those that a resume added."""
    study = STUDIES[run.study]
    environment = json.loads((folder / "config.json").read_text())["environment"]
    hardware = environment["hardware"]
    rows = pandas.read_json(folder / "metrics.jsonl", lines=True)
    rollout = rows["step"] / run.updates
    is_due = rows["eval"].notna() & ((rollout % study.every == 0) | (rollout == study.rollouts))
    interval = is_due[::-1].cumsum()  # the same number for an evaluation and the updates before it
    means = (
        rows.reindex(columns=COLUMNS.values()).groupby(interval).mean().astype(object).fillna("")
    )
    lines = []
    for place, row in rows[is_due].iterrows():
        line = {name: value for name, value in run._asdict().items() if name != "study"}
        line |= {"rollout": int(rollout[place]), "sampled": row["eval"]["sampled_accuracy"]}
        line |= {"greedy": row["eval"]["greedy_accuracy"], "pass_at_4": row["eval"]["pass@4"]}
        line |= dict(zip(COLUMNS, means.loc[interval[place]], strict=True))
        line |= {"commit": environment["commit"]}
        lines.append(line | {"machine": ", ".join(hardware["gpus"]) or hardware["cpu"]})
    return lines


def collect(folder: Path) -> None:
    """Puts the finished runs of a folder into the data, in place of any lines of theirs there."""
    for study in STUDIES:
        path = DATA / f"{study}.csv"
        lines = read_csv(path)
        for summary in sorted(folder.resolve(strict=True).glob(f"{study}/*/summary.json")):
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
    parser.add_argument(
        "--methods", nargs="+", help="default: the study's plan, which ignores the next three"
    )
    parser.add_argument("--updates", nargs="+", type=int, default=[1], help="of a rollout")
    parser.add_argument("--rate", help="learning rate; default: GRPO's")
    parser.add_argument("--seeds", nargs="+", type=int, default=list(range(1, 9)))
    parser.add_argument("--processes", type=int, default=cores())
    parser.add_argument("--collect", nargs="?", type=Path, const=RUNS, metavar="FOLDER")
    options = parser.parse_args()
    if options.collect:
        collect(options.collect)
        return
    missing = [run for run in chosen_runs(options) if not run.is_done()]
    fork_methods(missing)
    for run in missing:
        run.folder.mkdir(parents=True, exist_ok=True)
        (run.folder / "run.json").write_text(json.dumps(run._asdict()))
    commands = {run.folder: run.command() for run in missing}
    updates = sum(STUDIES[run.study].rollouts * run.updates for run in missing)
    train_all(commands, updates, options.processes)
    sys.exit(not all(run.is_done() for run in missing))


if __name__ == "__main__":
    main()
