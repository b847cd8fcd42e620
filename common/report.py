"""What a finished run leaves behind: summary.json, curves.png, credit.html, the adapter's card."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
from tqdm import tqdm

from common.credit_page import write_credit_page
from common.curves import write_curves
from common.data import DATE_CALL, TEMPLATE_DATE, Problem, whole_prompt
from common.printable import printable
from common.run_log import RunLog, best_step, finite_or_nan, format_number, plain

if TYPE_CHECKING:
    # Each script has its own class of this name, alike in what is read here.
    Run = Any

CARD_TEMPLATE = Path(__file__).with_name("adapter_card.md")


def report_run(run: Run, log: RunLog, example: Problem) -> str:
    """Writes the files of a run that has ended, and returns what to print.

    The adapter's card shows how to solve the example, a held-out problem. A file that cannot be
    written is mentioned on standard error and left out. A full disk is an OSError, because every
    other file would fail as well.
    """
    config = vars(run.args)
    folder = Path(config["output_dir"])
    summary = summarize(log.rows, folder)

    failed: set[Path] = set()
    path = folder / "summary.json"
    with going_on(path, failed):
        path.write_text(json.dumps(plain(summary), indent=2) + "\n", encoding="utf-8")
    path = folder / "adapter/README.md"
    with going_on(path, failed):
        messages = whole_prompt(example.prompt, config["system_prompt"])
        template = run.tokenizer.chat_template
        ends = {"eos_token_id": run.eos_ids.tolist(), "pad_token_id": run.tokenizer.pad_token_id}
        write_model_card(path, config, summary, messages, template, ends)
    path = folder / "curves.png"
    with going_on(path, failed):
        write_curves(str(path), log.rows, config["run_name"])
    path = folder / "credit.html"
    with going_on(path, failed):
        write_credit_page(str(path), config["run_name"], run.groups)

    paths = [folder / name for name in sorted(os.listdir(folder))]
    written = [str(path) for path in paths if path not in failed]
    lines = ["", before_after_table(summary["before"], summary["after"])]
    lines += ["", about_best(summary["best"]), "", "Written:"]
    return "\n".join(lines + written)


@contextlib.contextmanager
def going_on(path: Path, failed: set[Path]) -> Iterator[None]:
    """Lets the run go on if the block cannot write a file: says so and adds it to `failed`.

    The error of a full disk is passed on.
    """
    try:
        yield
    except Exception as error:  # matplotlib alone raises a dozen kinds
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise
        failed.add(path)
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        tqdm.write(printable(f"{path} is not written, the run goes on: {reason}"), sys.stderr)


def summarize(rows: list[dict[str, Any]], folder: Path) -> dict[str, Any]:
    """Returns what summary.json holds, from the rows of a log and the run's folder."""
    evaluated = [row for row in rows if row.get("eval")]
    before = [row["eval"] for row in evaluated if row["step"] == 0]
    updates = [row for row in rows if "reward" in row]
    phases = []
    rollout_tokens = 0.0
    for row in updates:
        seconds = [finite_or_nan(x) for name, x in row.items() if name.startswith("seconds_")]
        phases += [x for x in seconds if x >= 0]  # NaN, of what is no number, is left out
        # Rows of one rollout repeat its figures. Its seconds stand in the first one alone.
        tokens = finite_or_nan(row.get("rollout_tokens"))
        if finite_or_nan(row.get("seconds_rollout")) > 0 and tokens > 0:
            rollout_tokens += tokens
    return {
        "before": before[0] if before else {},  # none if a checkpoint was moved without its log
        "after": evaluated[-1]["eval"],
        "best": best_evaluation(rows, folder),
        "steps": updates[-1]["step"] if updates else 0,
        "rollout_tokens": int(rollout_tokens),
        "seconds": round(time.time() - psutil.Process().create_time(), 1),  # of the process
        "seconds_per_step": sum(phases) / max(1, len(updates)),  # of training alone
    }


def best_evaluation(rows: list[dict[str, Any]], folder: Path) -> dict[str, Any]:
    """Returns the step and the accuracy of the best evaluation, and where its weights are.

    `weights` is None if they were not saved, as those from before training never are.
    """
    step = best_step(rows)
    evaluated = [row for row in rows if row.get("eval")]
    accuracies = [row["eval"].get("sampled_accuracy") for row in evaluated if row["step"] == step]
    weights = folder / f"checkpoint-{step}"
    if step == evaluated[-1]["step"]:
        weights = folder / "adapter"
    is_saved = weights.is_dir()
    return {
        "step": step,
        "sampled_accuracy": accuracies[0],
        "weights": str(weights) if is_saved else None,
    }


def about_best(best: dict[str, Any]) -> str:
    """Returns two sentences: which evaluation was the best, and where its weights are."""
    accuracy = format_number(100 * finite_or_nan(best["sampled_accuracy"]), ".1f")
    first = f"The best evaluation was at step {best['step']}: sampled accuracy {accuracy}%."
    if best["weights"] is not None:
        return f"{first} Its weights are in {best['weights']}."
    if best["step"] == 0:
        return f"{first} That was before training."
    return f"{first} A --save_steps that divides --eval_steps would have saved its weights."


def before_after_table(before: dict[str, float], after: dict[str, float]) -> str:
    """Returns the first and the last evaluation as a text table, in percent."""
    lines = [f"{'held-out':20}{'before':>8}{'after':>8}{'change':>8}"]
    for key in before | after:
        old = 100 * finite_or_nan(before.get(key))
        new = 100 * finite_or_nan(after.get(key))
        cells = [f"{old:.1f}%", f"{new:.1f}%", f"{new - old:+.1f}"]
        shown = ["\N{EN DASH}" if "nan" in cell else cell for cell in cells]
        lines.append(f"{key.replace('_', ' '):20}" + "".join(f"{cell:>8}" for cell in shown))
    return "\n".join(lines)


def write_model_card(
    path: Path,
    config: dict[str, Any],
    summary: dict[str, Any],
    messages: list[dict[str, str]],
    template: str | None,
    ends: dict[str, Any],
) -> None:
    """Writes the README.md of a PEFT adapter, over the one that save_pretrained writes.

    Its code answers the messages, by the tokenizer's chat template if that has one. As in the run,
    an answer ends at the tokens in `ends`, and nothing of the base's generation config is used.
    """
    from huggingface_hub import ModelCard, ModelCardData

    data = ModelCardData(
        base_model=config["model_name_or_path"],
        library_name="peft",
        tags=["grpo", "lora", config["credit"]],
    )
    given = {key: value for key, value in config.items() if key != "start_adapter"}
    if config.get("start_adapter") is not None:
        given["model_name_or_path"] = config["start_adapter"]
        for key in [*given]:
            if key.startswith("lora_") or key == "model_revision":
                del given[key]  # the adapter determines it
    # JSON holds no line break, which could end the block.
    flags = [f"--{key} {json.dumps(plain(value), default=str)}" for key, value in given.items()]
    card = ModelCard.from_template(
        data,
        str(CARD_TEMPLATE),
        table=before_after_table(summary["before"], summary["after"]),
        best=about_best(summary["best"]),
        flags=flags,
        config=config,
        folder=str(path.parent),
        messages=messages,
        has_template=bool(template),
        date=TEMPLATE_DATE if DATE_CALL.search(str(template)) else None,
        ends=ends,
        template_kwargs=json.loads(config["chat_template_kwargs"]),
    )
    path.write_text(f"{card}\n", encoding="utf-8", errors="replace", newline="\n")
