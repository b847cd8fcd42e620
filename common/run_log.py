"""The files that hold the figures of a run: metrics.jsonl, completions.jsonl, config.json."""

import importlib.metadata
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from common import fail
from common.answers import last_boxed
from common.reward import ACCURACY


def plain(value: Any) -> Any:
    """Returns a value for strict JSON: numbers with 6 digits, and None for NaN and infinities."""
    if isinstance(value, dict):
        return {name: plain(item) for name, item in value.items()}
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    return value


def rows_until(path: Path, step: int) -> list[dict[str, Any]]:
    """Returns the rows of a .jsonl file up to a checkpoint; none for step 0, a new run's.

    The evaluation at the checkpoint's own step came after it, so it is left out and made again.
    What follows the last line break is also left out, because a crash may have torn it.
    """
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    rows = [json.loads(line) for line in text.split("\n")[:-1]]
    last_steps = {True: step - 1, False: step}
    return [row for row in rows if row["step"] <= last_steps[bool(row.get("eval"))]]


class RunLog:
    """The log of a run: its rows in memory, in metrics.jsonl and in a tracker.

    There is a row for each update and each evaluation. A bar shows how many updates there were, and
    the last reward. config.json holds the flags and what else the figures depend on. When a run is
    resumed, the rows up to the checkpoint are kept, here and in completions.jsonl, and a tracker
    goes on from there. Only the main process writes.
    """

    def __init__(
        self, accelerator: Any, config: dict[str, Any], run_id: str, resume_step: int
    ) -> None:
        self.rows: list[dict[str, Any]] = []
        self.accelerator = accelerator
        self.config = config
        self.folder = Path(config["output_dir"])
        self.bar = tqdm(
            total=config["max_steps"],
            initial=resume_step,
            disable=not accelerator.is_main_process,
        )
        if accelerator.is_main_process:
            with open(self.folder / "config.json", "w", encoding="utf-8") as file:
                json.dump(config | {"environment": environment()}, file, indent=2)
            for name in ("completions.jsonl", "metrics.jsonl"):
                self.rows = rows_until(self.folder / name, resume_step)
                unfinished = self.folder / "unfinished.jsonl"  # a kill here must not lose the log
                unfinished.write_text(
                    "".join(json.dumps(row) + "\n" for row in self.rows), encoding="utf-8"
                )
                unfinished.rename(self.folder / name)
        accelerator.init_trackers(
            "grpo",
            {name: str(value) for name, value in config.items()},
            {
                "tensorboard": {"purge_step": resume_step + 1},  # hides what is made again
                "wandb": {"name": self.folder.name, "id": run_id, "resume": "allow"},
                "trackio": {"name": f"{self.folder.name}-{run_id}", "resume": "allow"},
            },
        )

    def write(self, row: dict[str, Any]) -> None:
        """Appends a row. It is in the system's hands when this returns."""
        row = plain(row)
        self.rows.append(row)
        accuracies = row.get("eval", {})
        if self.accelerator.is_main_process:
            with open(self.folder / "metrics.jsonl", "a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
            if accuracies:
                tqdm.write(
                    f"step {row['step']:4d}, held out: "
                    + "  ".join(f"{name} {accuracy:.3f}" for name, accuracy in accuracies.items())
                )
        if accuracies:
            self.choose_best()
            self.bar.unpause()  # keeps the evaluation out of the time per step
        else:
            self.bar.set_postfix(reward=row.get("reward"), refresh=False)
            self.bar.update()
        figures = {name: figure for name, figure in row.items() if name not in ("step", "eval")} | {
            f"eval/{name}": accuracy for name, accuracy in accuracies.items()
        }
        self.accelerator.log(figures, row["step"])

    def write_completions(
        self, step: int, kind: str, batch: Any, functions: dict[str, Callable | None]
    ) -> None:
        """Appends a group's worth of a Batch, of the kind "train", "greedy" or "sampled".

        The functions are those that judge samples, by name; greedy answers get the first one alone.
        At a new run's first evaluation, a line says so if no sample has a box.
        """
        if not self.accelerator.is_main_process:
            return
        if (
            kind == "sampled"
            and self.rows == []
            and ACCURACY in self.config["reward_funcs"]
            and not any(last_boxed(text) for text in batch.texts)
        ):
            tqdm.write("no sampled answer has a \\boxed{} that accuracy_reward could read")
        # Where an own function has its name, the grader's verdict keeps the name it has here.
        names = [
            ACCURACY if function is None and ACCURACY not in functions else name
            for name, function in functions.items()
        ]
        with open(self.folder / "completions.jsonl", "a", encoding="utf-8") as file:
            for i, problem in enumerate(batch.problems[: self.config["num_generations"]]):
                row = {
                    "step": step,
                    "eval": kind != "train",
                    "kind": kind,
                    "prompt": problem.prompt,
                    "answer": problem.answer,
                    "completion": batch.texts[i],
                    "reward": (
                        batch.rewards[i] if kind == "train" else batch.function_rewards[i, 0]
                    ).item(),
                    "rewards": dict(zip(names, batch.function_rewards[i].tolist(), strict=False)),
                    "advantage": batch.advantages[i].item() if kind == "train" else None,
                    "truncated": batch.truncated[i].item(),
                }
                file.write(json.dumps(plain(row), default=str) + "\n")

    def has_diverged(self) -> bool:
        """Returns whether the last ten updates were all skipped."""
        skipped = [row["skipped_update"] for row in self.rows if "skipped_update" in row]
        return skipped[-10:] == [1.0] * 10

    def choose_best(self) -> None:
        """Sets `metric`, and `best_step` to the first evaluation where the metric is highest.

        Of a reward whose weight is below 0, the lowest is the best. By default the metric is the
        sampled accuracy or, where there is none, the first reward. The figures of all evaluations,
        by their steps, are in `evaluations` then.
        """
        self.evaluations = {row["step"]: row["eval"] for row in self.rows if row.get("eval")}
        names = next(reversed(self.evaluations.values()))
        self.metric = self.config["metric_for_best_model"] or (
            "sampled_accuracy" if "sampled_accuracy" in names else next(iter(names))
        )
        figures = {
            step: row[self.metric] for step, row in self.evaluations.items() if self.metric in row
        }
        if not figures:
            fail(f"--metric_for_best_model {self.metric} is none of {list(names)}")
        is_penalty = any(
            self.metric == f"rewards/{path.rpartition('.')[2]}" and weight < 0
            for path, weight in zip(
                self.config["reward_funcs"], self.config["reward_weights"] or [], strict=False
            )
        )
        self.best_step = (min if is_penalty else max)(figures, key=figures.__getitem__)


def environment() -> dict[str, Any]:
    """Returns what the figures of a run depend on besides its flags."""
    # The whole hash, with "-dirty" if files differ from it; "" without git or a checkout.
    git = subprocess.run(
        [
            "sh",
            "-c",
            'git -C "$0" describe --always --dirty --abbrev=40 --exclude="*"',
            Path(__file__).parent,
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    cpuinfo = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""  # Linux
    return {
        "commit": git.stdout.strip() or None,
        "versions": {
            name: importlib.metadata.version(name)
            for name in ("torch", "transformers", "peft", "accelerate", "bitsandbytes")
        }
        | {"python": sys.version.split()[0]},
        "hardware": {
            "cpu": cpuinfo.partition("model name\t: ")[2].split("\n")[0],
            "cores": len(os.sched_getaffinity(0)) if cpuinfo else os.cpu_count(),
            "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
            "processes": int(os.environ.get("WORLD_SIZE", "1")),
        },
        "command": sys.argv,
    }
