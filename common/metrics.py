"""The numbers of a run, which METRICS.md explains to users, and the files that hold them."""

import contextlib
import importlib.metadata
import json
import math
import os
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object
from torch import Tensor
from tqdm import tqdm

from common import fail
from common.credit import weight_stats
from common.reward import GRADER, log_means

# ---- What is logged ------------------------------------------------------------------------------
Averages = dict[str, tuple[Tensor, Tensor]]  # values, and how much each counts, of the same shape


def credit_averages(micro: Any) -> Averages:
    """Returns how concentrated the weights are in a Batch's completions with an advantage.

    Where they are known, the result also has the k3 estimate of how far the policy that sampled
    diverges from the policy before training or, without --beta, from the base (KL).
    """
    has_gradient = (micro.advantages != 0) & micro.loss_mask.any(1)
    averages = {}
    for name, values in weight_stats(micro.weights, micro.mask).items():
        averages[f"weight_{name}"] = (values.nan_to_num(0.0), values.isfinite() & has_gradient)
    reference_logp = micro.base_logp if micro.reference_logp is None else micro.reference_logp
    if reference_logp is not None:
        log_ratio = torch.where(micro.loss_mask, reference_logp - micro.sampled_logp, 0.0)
        averages["kl"] = (log_ratio.exp() - log_ratio - 1, micro.loss_mask)
    return averages


def rollout_metrics(
    accelerator: Any,
    batch: Any,
    advantages: Tensor,
    logged: dict[str, list[float]],
    seconds: float,
) -> dict[str, float]:
    """Returns the metrics of a rollout, over all processes.

    The Batch is this process's, as is what its reward functions have `logged`. The advantages
    [prompts, G] are those of all processes. reward_timeouts counts since the processes were
    started.
    """
    every_row = torch.ones_like(batch.rewards)
    averages = {
        "reward": (batch.rewards.nan_to_num(), batch.rewards.isfinite()),
        "completion_length": (batch.mask.sum(1), every_row),
        "truncated_share": (batch.truncated, every_row),
        "entropy": (batch.entropy, batch.mask),
    }
    result = log_means(logged)
    result |= {"reward": math.nan} | means(accelerator, [averages])  # NaN if nothing is judged
    result["reward_timeouts"] = sum(gather_object([GRADER.timeouts]))
    result["zero_std_share"] = (advantages == 0).all(1).float().mean().item()
    result["rollout_tokens"] = round(result["completion_length"] * advantages.numel())
    result["tokens_per_second"] = result["rollout_tokens"] / seconds
    return result


def means(accelerator: Any, batches: list[Averages]) -> dict[str, float]:
    """Returns weighted means over all batches and processes, except where nothing counts."""
    sums = torch.zeros(len(batches[0]), 2, dtype=torch.float64)  # of values, and of counts
    for averages in batches:
        pairs = [[(values * counts).sum(), counts.sum()] for values, counts in averages.values()]
        sums += torch.tensor(pairs).double()
    sums = accelerator.reduce(sums.to(accelerator.device), "sum")
    named = zip(batches[0], sums.tolist(), strict=True)
    return {name: total / count for name, (total, count) in named if count > 0}


def peak_memory(device: torch.device) -> float:
    """Returns the most memory in use so far, in GiB: of a GPU's tensors, or of this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated() / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # KiB on Linux


def eval_metrics(
    names: list[str], verdicts: list[tuple[str, int, bool, list[float]]]
) -> dict[str, float]:
    """Returns the accuracies, pass@k, mean rewards and the truncated share of an evaluation.

    A verdict has "greedy" or "sampled", the number of the problem, whether the completion is
    truncated, and what the named reward functions gave, the accuracy first. k is 2, 4, ... and the
    number of samples of a problem. pass@k is the unbiased 1 - C(n - c, k) / C(n, k), where c of n
    samples are right (Chen et al. 2021, arXiv 2107.03374, eq. 1). The mean rewards are those of
    samples.
    """
    right: dict[str, dict[int, float]] = {"greedy": {}, "sampled": {}}  # kind -> problem -> count
    for kind, problem, _, values in verdicts:
        right[kind][problem] = right[kind].get(problem, 0) + values[0]
    result = {}
    problems = len(right["greedy"])
    samples = len(verdicts) // problems - 1  # of each problem, beside the greedy one
    if not math.isnan(sum(right["greedy"].values())):  # all problems have answers
        result["greedy_accuracy"] = sum(right["greedy"].values()) / problems
        result["sampled_accuracy"] = sum(right["sampled"].values()) / (samples * problems)
        for k in sorted({2**i for i in range(1, samples.bit_length())} | {samples} - {1}):
            misses = sum(math.comb(samples - int(count), k) for count in right["sampled"].values())
            result[f"pass@{k}"] = 1 - misses / (math.comb(samples, k) * problems)
    for column, name in enumerate(names[1:], 1):
        rewards = [values[column] for kind, *_, values in verdicts if kind == "sampled"]
        known = [reward for reward in rewards if not math.isnan(reward)]
        if known:
            result[f"rewards/{name}"] = sum(known) / len(known)
    if not result:
        fail("held-out problems have no answers, and no reward function judges them")
    result["truncated_share"] = sum(truncated for _, _, truncated, _ in verdicts) / len(verdicts)
    return result


@contextlib.contextmanager
def timed(metrics: dict[str, float], name: str) -> Iterator[None]:
    """Adds to a metric the seconds that its block takes, until a GPU's work is done."""
    start = time.perf_counter()
    yield
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    metrics[name] = metrics.get(name, 0.0) + time.perf_counter() - start


# ---- metrics.jsonl, completions.jsonl, config.json and a tracker ---------------------------------
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
                shown = [f"{name} {accuracy:.3f}" for name, accuracy in accuracies.items()]
                tqdm.write(f"step {row['step']:4d}, held out: {'  '.join(shown)}")
        if accuracies:
            self.choose_best()
            self.bar.unpause()  # keeps the evaluation out of the time per step
        else:
            self.bar.set_postfix(reward=row.get("reward"), refresh=False)
            self.bar.update()
        figures = {name: figure for name, figure in row.items() if name not in ("step", "eval")}
        figures |= {f"eval/{name}": accuracy for name, accuracy in accuracies.items()}
        self.accelerator.log(figures, row["step"])

    def write_completions(self, step: int, kind: str, batch: Any, rewards: Tensor) -> None:
        """Appends a group's worth of a Batch, of the kind "train", "greedy" or "sampled"."""
        if not self.accelerator.is_main_process:
            return
        with open(self.folder / "completions.jsonl", "a", encoding="utf-8") as file:
            for i, problem in enumerate(batch.problems[: self.config["num_generations"]]):
                row = {
                    "step": step,
                    "eval": kind != "train",
                    "kind": kind,
                    "prompt": problem.prompt,
                    "answer": problem.answer,
                    "completion": batch.texts[i],
                    "reward": rewards[i].item(),
                    "truncated": batch.truncated[i].item(),
                }
                file.write(json.dumps(plain(row), default=str) + "\n")

    def has_diverged(self) -> bool:
        """Returns whether the last ten updates were all skipped."""
        skipped = [row["skipped_update"] for row in self.rows if "skipped_update" in row]
        return skipped[-10:] == [1.0] * 10

    def choose_best(self) -> None:
        """Sets `metric`, and `best_step` to the first evaluation where the metric is highest.

        By default the metric is the sampled accuracy or, where there is none, the first reward.
        """
        evaluations = {row["step"]: row["eval"] for row in self.rows if row.get("eval")}
        names = next(reversed(evaluations.values()))
        self.metric = self.config["metric_for_best_model"] or (
            "sampled_accuracy" if "sampled_accuracy" in names else next(iter(names))
        )
        figures = {
            step: row[self.metric] for step, row in evaluations.items() if self.metric in row
        }
        if not figures:
            fail(f"--metric_for_best_model {self.metric} is none of {list(names)}")
        self.best_step = max(figures, key=figures.__getitem__)


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
