"""What a finished run leaves behind: summary.json, curves.png, credit.html, the adapter's card."""

import json
import math
import re
from operator import itemgetter
from pathlib import Path
from typing import Any

import jinja2
import matplotlib.figure  # not pyplot: no global figures, no backend switch
import pandas
import torch
from huggingface_hub import ModelCard, ModelCardData
from transformers import PreTrainedTokenizerBase

from common.data import FIXED_DATE, whole_prompt
from common.run_log import RunLog
from common.task import Problem, token_roles

FOLDER = Path(__file__).parent  # of the templates
STRONGEST_TINT = 12  # of credit.html, whose tints begin at 0; it stands for a weight of 3

# The panels of curves.png that several figures share, with patterns of their keys. Any other figure
# has a panel of its own.
PANELS = {
    "share of problems solved": r"eval/(.*_accuracy|pass@\d+)|rewards/accuracy_reward/mean",
    "share": r"(eval/)?\w+_share",
    "share clipped": r"clip_fraction.*|clipped_gradient",
    "concentration of credit": r"weight_\w+",
    "seconds": r"seconds_\w+",
}


def report_run(run: Any) -> str:
    """Writes the adapter and the files of a Run that has ended, and returns what to print."""
    log: RunLog = run.log
    folder = log.folder
    run.model.save_pretrained(folder / "adapter")
    last_step = max(log.evaluations)
    weights = folder / ("adapter" if log.best_step == last_step else f"checkpoint-{log.best_step}")
    summary = {
        "before": log.evaluations.get(0, {}),  # none if a checkpoint was moved without its log
        "after": log.evaluations[last_step],
        "best": {
            "step": log.best_step,
            log.metric: log.evaluations[log.best_step][log.metric],
            "weights": str(weights) if weights.is_dir() else None,  # None: they were not saved
        },
        "steps": last_step,
        "steps_with_gradient": sum((row.get("grad_norm") or 0) > 0 for row in log.rows),
    }
    (folder / "summary.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    table = summary_table(summary, log.metric)
    write_model_card(
        folder / "adapter/README.md",
        log.config,
        table,
        run.held_out[0],
        run.eos_ids.tolist(),
        run.tokenizer,
    )
    write_curves(folder / "curves.png", log.rows, folder.name)
    write_credit_page(folder / "credit.html", folder.name, run.page_examples)
    return f"\n{table}\n\nEverything is in {folder}."


def summary_table(summary: dict[str, Any], metric: str) -> str:
    """Returns a text table of the first and the last evaluation, and a line on the best one.

    Accuracies are in percent, and mean rewards as they are.
    """
    lines = [f"{'held-out':20}{'before':>8}{'after':>8}{'change':>8}"]
    for key, new in summary["after"].items():
        old = summary["before"].get(key, torch.nan)
        name = key.replace("_", " ")
        lines.append(
            f"{name:20}{old:8.3f}{new:8.3f}{new - old:+8.3f}"
            if key.startswith("rewards/")
            else f"{name:20}{old:8.1%}{new:8.1%}{100 * new - 100 * old:+8.1f}"
        )
    best = summary["best"]
    lines += ["", f"best: {metric.replace('_', ' ')} {best[metric]:.3f} at step {best['step']}, "
              f"weights: {best['weights']}",
              f"{summary['steps_with_gradient']} of {summary['steps']} updates had a gradient",
              ]  # fmt: skip
    return "\n".join(lines)


def write_model_card(
    path: Path,
    config: dict[str, Any],
    table: str,
    example: Problem,
    stop_ids: list[int],
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    """Writes the README.md of a PEFT adapter, over the one that save_pretrained writes.

    Its code answers the example, and ends the answer at the stop tokens, as the run does.
    """
    template_kwargs = json.loads(config["chat_template_kwargs"])
    card = ModelCard.from_template(
        ModelCardData(
            base_model=(  # the Hub refuses a folder
                None
                if Path(config["model_name_or_path"]).is_dir()
                else config["model_name_or_path"]
            ),
            library_name="peft",
            tags=["grpo", "lora", config["credit"]],
        ),
        str(FOLDER / "adapter_card.md"),
        table=table,
        # JSON writes no line breaks, which could end the code block.
        flags=[f"--{name} {json.dumps(value)}" for name, value in config.items()],
        config=config,
        is_dense=config["load_in_4bit"] and config["rollout_weights"] == "dense",
        folder=str(path.parent),
        messages=whole_prompt(example.prompt, config["system_prompt"]),
        stop_ids=stop_ids,
        pad_id=tokenizer.pad_token_id,
        fixed_date=(
            FIXED_DATE
            if "strftime_now" in tokenizer.get_chat_template(template_kwargs.get("chat_template"))
            else ""
        ),
        template_kwargs=template_kwargs,
    )
    path.write_text(f"{card}\n", encoding="utf-8", errors="replace")


# ---- curves.png ----------------------------------------------------------------------------------
@matplotlib.rc_context({"text.parse_math": False})  # in a name, $ is only a character
def write_curves(path: Path, rows: list[dict[str, Any]], title: str) -> None:
    """Draws evaluations as they are, and updates pale, under means over a tenth of the run.

    Of what is 0 from the first update to the last, only rewards are drawn.
    """
    table = (
        pandas.json_normalize(rows, sep="/")
        .set_index("step")
        .apply(pandas.to_numeric, errors="coerce")  # a method may log a text, too
    )
    is_drawn = table.any() | (
        table.columns.str.fullmatch("reward|(eval/)?rewards/.*") & table.notna().any()
    )
    panels = table.loc[:, is_drawn].T.groupby(panel_of, sort=False)
    height = math.ceil(len(panels) / 4)
    figure = matplotlib.figure.Figure(figsize=(20, 3 * height + 1), layout="constrained")
    figure.suptitle(title)
    for place, (name, figures) in enumerate(panels, 1):
        ax = figure.add_subplot(height, 4, place, xlabel="step", ylabel=name)
        for i, (key, points) in enumerate(figures.T.items()):
            points = points.dropna()
            window = 1 if key.startswith("eval/") else len(rows) // 20 * 2 + 1
            means = points.rolling(window, center=True, min_periods=1).mean()
            ax.plot(points, color=f"C{i}", alpha=0.3)
            ax.plot(means, color=f"C{i}", label=key, marker="." if len(points) < 12 else None)
        ax.legend(fontsize="small")
    figure.savefig(path)


def panel_of(key: str) -> str:
    """Returns the name of the panel that a figure is in, the same in training and evaluations."""
    return next(
        (name for name, pattern in PANELS.items() if re.fullmatch(pattern, key)),
        key.removeprefix("eval/").removesuffix("/mean"),
    )


# ---- credit.html ---------------------------------------------------------------------------------
def write_credit_page(path: Path, title: str, groups: list[dict[str, Any]]) -> None:
    """Writes credit.html, a page without scripts, from what `credit_example` returns.

    Texts may be hostile: the template escapes all of them.
    """
    environment = jinja2.Environment(
        autoescape=True, finalize=visible, trim_blocks=True, lstrip_blocks=True
    )
    template = environment.from_string((FOLDER / "credit_page.html").read_text(encoding="utf-8"))
    path.write_text(
        template.render(
            title=title,
            groups=groups,
            strongest=STRONGEST_TINT,
            all_uniform=groups != [] and all(group["is_uniform"] for group in groups),
        ),
        encoding="utf-8",
    )


def visible(value: object) -> str:
    """Returns a text with <U+....> for control, bidirectional and zero-width characters.

    Joiners are shown as they are, if all of them are inside words or emoji.
    """
    # At its edges a word may go on: the text may be one token.
    letters = re.sub("(?<![\\s\u200c\u200d])[\u200c\u200d](?![\\s\u200c\u200d])", "", str(value))
    return str(value).translate(
        {
            ord(letter): f"<U+{ord(letter):04X}>"
            for letter in letters
            if not letter.isprintable() and letter != "\n"
        }
    )


def credit_example(
    tokenizer: PreTrainedTokenizerBase,
    micros: list[Any],
    group_size: int,
    step: int,
    system_prompt: str | None,
) -> list[dict[str, Any]]:
    """Returns a group of a scored rollout as `write_credit_page` wants it, in a list.

    It is the first group with an advantage, with the two best and the two worst of its completions
    in the micro-batches. The list is empty if there is no such group.
    """
    groups: dict[int, list[dict[str, Any]]] = {}
    for micro in micros:
        for i, is_token in enumerate(micro.mask):
            groups.setdefault(int(micro.rows[i]) // group_size, []).append(
                {
                    "problem": micro.problems[i],
                    "reward": micro.rewards[i].item(),
                    "rank": micro.rewards[i].nan_to_num(nan=-math.inf).item(),  # last if not judged
                    "advantage": micro.advantages[i].item(),
                    "truncated": micro.truncated[i].item(),
                    "ids": micro.ids[i, micro.prompt_width :][is_token],
                    "weights": micro.weights[i][is_token],
                    "logp": micro.sampled_logp[i][is_token],
                    "entropy": micro.entropy[i][is_token],
                }
            )
    for _, members in sorted(groups.items()):
        if all(member["advantage"] == 0 for member in members):
            continue
        by_reward = sorted(members, key=itemgetter("rank"), reverse=True)
        return [
            {
                # Only texts: a message may hold a date, say, which no checkpoint could load.
                "messages": [
                    {"role": message["role"], "content": message["content"]}
                    for message in whole_prompt(members[0]["problem"].prompt, system_prompt)
                ],
                "answer": members[0]["problem"].answer,
                "step": step,
                "size": group_size,
                "is_uniform": all((m["weights"] - 1).abs().max() < 1e-6 for m in members),
                "completions": [
                    shown_completion(tokenizer, completion)
                    for completion in by_reward[:2] + by_reward[2:][-2:]
                ],
            }
        ]
    return []


def shown_completion(
    tokenizer: PreTrainedTokenizerBase, completion: dict[str, Any]
) -> dict[str, Any]:
    """Returns a completion as `write_credit_page` wants it.

    A token has three tints: its weights, from 0 to 3, under this run's method, `--credit surprisal`
    and `--credit entropy_reduction`.
    """
    entropy = completion["entropy"]
    falls = (entropy - torch.cat((entropy[1:], entropy[-1:]))).clamp(min=0)
    values = torch.stack((completion["weights"], -completion["logp"], falls, entropy))
    scores = values[:3] + 1e-8  # [3, n]
    shares = scores / scores.mean(1, keepdim=True) / 3
    tints = (shares * STRONGEST_TINT).nan_to_num(0).round().clamp(0, STRONGEST_TINT).int()
    # The piece of a token is what it adds to the text before it: "" within a character, because a
    # decoder writes U+FFFD for a part of one, and perhaps for the whole characters next to it.
    ids = completion["ids"].tolist()
    pieces = []
    start = end = 0  # of the tokens of the last piece, which the decoder needs to see again
    for i in range(len(ids)):
        before, after = (tokenizer.decode(ids[start:stop]) for stop in (end, i + 1))
        is_whole = not after.endswith("\ufffd") or i - end >= 64  # no character has so many parts
        pieces.append(after[len(before) :] if is_whole else "")
        if is_whole:
            start, end = end, i + 1
    roles = (
        token_roles(pieces, completion["problem"])
        if completion["problem"].steps
        else [""] * len(ids)
    )
    shown = (  # no token hides a joiner if the text has one outside of words, as beside a blank
        [visible(f" {piece} ")[1:-1] for piece in pieces]
        if "<U+200" in visible("".join(pieces))
        else pieces
    )
    return {
        "reward": completion["reward"],
        "advantage": completion["advantage"],
        "truncated": completion["truncated"],
        "tokens": [
            {"text": piece, "role": role, "numbers": numbers, "tints": token_tints}
            for piece, role, numbers, token_tints in zip(
                shown, roles, values.T.tolist(), tints.T.tolist(), strict=True
            )
        ],
    }
