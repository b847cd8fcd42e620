"""The log of a run: metrics.jsonl, config.json, completions.jsonl and a tracker."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from tqdm import tqdm

from common.data import completions_of
from common.printable import printable

if TYPE_CHECKING:
    from accelerate import Accelerator

    # Each script has its own classes of these names, alike in what is read here.
    Batch = Any
    Run = Any

PACKAGES = ("torch", "transformers", "peft", "accelerate", "bitsandbytes")


# ---- Numbers as they are written and read --------------------------------------------------------
def plain(value: Any) -> Any:
    """Returns a value as strict JSON can hold it.

    Tensors and numpy values become numbers or lists, and numbers are rounded to 6 significant
    digits. Those that are not finite become None.
    """
    if hasattr(value, "tolist"):
        value = value.tolist()  # of a scalar, this is a number
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    return value


def finite_or_nan(value: Any) -> float:
    """Returns a finite number as it is, and NaN for anything else: None, infinities, a text."""
    if isinstance(value, int | float) and math.isfinite(value):
        return value
    return math.nan


def format_number(value: Any, form: str) -> str:
    """Returns a number as text in a format such as ".3f", or "n/a" if it is none."""
    number = finite_or_nan(value)
    return "n/a" if math.isnan(number) else format(number, form)


def flat_row(row: dict[str, Any]) -> dict[str, Any]:
    """Returns a row of the log with each metric of its evaluation under a name "eval/..."."""
    flat = {name: value for name, value in row.items() if name != "eval"}
    for name, value in (row.get("eval") or {}).items():
        flat[f"eval/{name}"] = value
    return flat


# ---- metrics.jsonl and config.json ---------------------------------------------------------------
class RunLog:
    """The log of a run, as rows in memory and in `output_dir`.

    metrics.jsonl gets an object for each update and each evaluation. config.json holds the flags
    and the `environment`. If resume_step is above 0, the rows from before that checkpoint are kept,
    here and in completions.jsonl. track(figures, step) is called with each row after it is in the
    file. On all processes but the main one output_dir is None, and nothing is written.
    """

    def __init__(
        self,
        output_dir: str | None,
        config: dict[str, Any],
        resume_step: int,
        track: Callable[[dict[str, Any], int], object],
    ) -> None:
        self.rows: list[dict[str, Any]] = []
        self.path: Path | None = None
        self._track = track
        if output_dir is None:
            return
        folder = Path(output_dir)
        text = json.dumps(config | {"environment": environment()}, indent=2, default=str)
        (folder / "config.json").write_text(text + "\n", encoding="utf-8")
        keep_rows_before(folder / "completions.jsonl", resume_step)
        self.path = folder / "metrics.jsonl"
        self.rows = keep_rows_before(self.path, resume_step)

    def write(self, row: dict[str, Any]) -> None:
        """Appends a row. It is on its way to the disk when this returns."""
        row = plain(row)
        self.rows.append(row)
        if self.path is not None:
            with open(self.path, "a", encoding="utf-8") as file:  # closed, so flushed, at each row
                file.write(json.dumps(row, allow_nan=False) + "\n")
            if row.get("eval"):
                shown = [f"{name} {format_number(x, '.3f')}" for name, x in row["eval"].items()]
                tqdm.write(f"step {row['step']:4d}, held out: {'  '.join(shown)}")
        figures = flat_row(row)
        step = figures.pop("step")
        self._track(figures, step)


def keep_rows_before(path: Path, checkpoint: int) -> list[dict[str, Any]]:
    """Cuts a .jsonl file to the rows from before a checkpoint, and returns them; 0 keeps none."""
    rows = rows_before(path, checkpoint) if checkpoint > 0 else []
    fresh = path.with_suffix(".tmp")  # replaced as a whole: a crash here loses no row
    fresh.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    os.replace(fresh, path)
    return rows


def rows_before(path: Path, checkpoint: int) -> list[dict[str, Any]]:
    """Returns the rows of a .jsonl file that a run keeps when it goes on from a checkpoint.

    At the checkpoint's own step the update came before it and the evaluation after it. So that
    evaluation is left out, and made again. Lines that are no rows are left out, too: they are torn,
    or somebody else's.
    """
    rows: list[dict[str, Any]] = []
    if not path.exists():
        return rows
    for line in path.read_bytes().splitlines():
        with contextlib.suppress(ValueError, TypeError, KeyError):
            row = json.loads(line)
            step = row["step"]
            evaluation = row.get("eval")  # of metrics.jsonl a dict, of completions.jsonl a bool
            is_row = isinstance(step, int) and isinstance(evaluation, dict | bool | None)
            last_step = checkpoint - 1 if evaluation else checkpoint
            if is_row and step <= last_step:
                rows.append(row)
    return rows


def is_evaluated(path: Path, step: int) -> bool:
    """Returns whether a metrics.jsonl has an evaluation at a step."""
    return any(row["step"] == step and row.get("eval") for row in rows_before(path, step + 1))


def best_step(rows: list[dict[str, Any]]) -> int | None:
    """Returns the step of the evaluation with the highest sampled accuracy, the first of equals."""
    best = None
    highest = -math.inf
    for row in rows:
        if not isinstance(row.get("eval"), dict):
            continue
        accuracy = finite_or_nan(row["eval"].get("sampled_accuracy"))
        if best is None or accuracy > highest:
            best = row["step"]
            highest = -math.inf if math.isnan(accuracy) else accuracy
    return best


def environment() -> dict[str, Any]:
    """Returns what the figures of a run depend on besides its flags."""
    versions = {name: importlib.metadata.version(name) for name in PACKAGES}
    versions["python"] = sys.version.split()[0]
    cpuinfo = Path("/proc/cpuinfo").read_text()
    cpu = cpuinfo.partition("model name\t: ")[2].split("\n")[0]
    hardware = {
        "cpu": cpu or os.uname().machine,
        "cores": len(os.sched_getaffinity(0)),
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "processes": int(os.environ.get("WORLD_SIZE", "1")),
    }
    return {
        "commit": code_commit(),
        "versions": versions,
        "hardware": hardware,
        "command": sys.argv,
    }


def code_commit() -> str | None:
    """Returns the commit of this code, with "-dirty" if files differ from it, or None."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    command += ["--abbrev=40", "--exclude=*"]  # the whole hash, and no tag's name
    try:
        output = subprocess.check_output(command, stderr=subprocess.DEVNULL, text=True, timeout=10)
    except (OSError, subprocess.SubprocessError):  # no git, or no checkout
        return None
    return output.strip()


# ---- Tracker -------------------------------------------------------------------------------------
def start_log(accelerator: Accelerator, config: dict[str, Any], resume_step: int) -> RunLog:
    """Returns a run's log, with its tracker. The run goes on if that fails, and says so once."""
    tracker = config["report_to"]

    def give_up(error: Exception) -> None:
        accelerator.trackers = []
        tqdm.write(printable(f"going on without {tracker}: {error}"), file=sys.stderr)

    def track(figures: dict[str, Any], step: int) -> None:
        try:
            accelerator.log(figures, step)
        except Exception as error:  # whatever a tracker's client raises
            give_up(error)

    options = {} if tracker == "tensorboard" else {"name": config["run_name"]}
    flags = {name: str(value) for name, value in config.items()}
    try:
        accelerator.init_trackers("grpo", flags, {tracker: options})
    except Exception as error:
        give_up(error)
    output_dir = config["output_dir"] if accelerator.is_main_process else None
    return RunLog(output_dir, config, resume_step, track)


# ---- completions.jsonl ---------------------------------------------------------------------------
def log_completions(run: Run, kind: str, batch: Batch, rewards: list[float]) -> None:
    """Appends the first completions of a batch, as many as a group has, to completions.jsonl.

    `kind` is "train", "greedy" or "sampled".
    """
    if not run.accelerator.is_main_process:
        return
    is_training = kind == "train"
    step = run.step + 1 if is_training else run.step
    _, texts = completions_of(run, batch)
    truncated = batch.truncated.tolist()
    path = Path(run.args.output_dir) / "completions.jsonl"
    with open(path, "a", encoding="utf-8") as file:
        for i in range(min(run.args.num_generations, len(texts))):
            row = {
                "step": step,
                "eval": not is_training,
                "kind": kind,
                "prompt": batch.problems[i].prompt,
                "answer": batch.problems[i].answer,
                "completion": texts[i],
                "reward": rewards[i],
                "truncated": truncated[i],
            }
            file.write(json.dumps(plain(row), default=str) + "\n")
