"""What a run leaves behind: numbers (pass@k, weight statistics, metrics.jsonl), curves.png,
credit.html (every token tinted by its credit weight) and the model card of the adapter.
`write_report` writes all that a reader opens.

torch is the only heavy import here; matplotlib is imported in write_curves, so that a training
script does not pay for it at start-up.
"""

import errno
import html
import json
import math
import os
import resource
import string
import sys
import unicodedata
from pathlib import Path
from typing import Any, Callable

import torch
from torch import Tensor

from common.data import Problem, token_roles

PAGE_TEMPLATE = Path(__file__).with_name("credit_page.html")
FULL_TINT = 3.0  # a token of this weight (in units of the completion's mean) has the full tint
TINT_LEVELS = 12  # .k0 ... .k12 in credit_page.html
DISK_FULL = {errno.ENOSPC, errno.EDQUOT}
NEWLINE = "↵\n"  # a newline within a completion: the mark is what gets the tint
CORRECT_ABOVE = 0.5  # a completion with a larger reward stands in the "correct" column
BLUE, ORANGE, GREEN, SKY, GREY, PURPLE = (  # Okabe-Ito: distinct for colour-blind readers
    "#0072B2", "#D55E00", "#009E73", "#56B4E9", "#8A8F98", "#CC79A7"
)  # fmt: skip


# ---------------------------------------------------------------------------------- numbers


def pass_at_k(n: int, c: int, k: int) -> float:
    """Unbiased chance that k of n samples, c of them correct, hold a correct one.

    1 - C(n-c, k) / C(n, k) in product form, which cannot overflow (Chen et al. 2021,
    arXiv 2107.03374, eq. 1). Raises ValueError unless 1 <= k <= n and 0 <= c <= n.
    """
    if not (1 <= k <= n and 0 <= c <= n):
        raise ValueError(f"pass@k needs 1 <= k <= n and 0 <= c <= n, got n={n}, c={c}, k={k}")
    if n - c < k:  # fewer than k wrong samples: every draw of k holds a correct one
        return 1.0
    return 1.0 - math.prod(1.0 - k / i for i in range(n - c + 1, n + 1))


@torch.no_grad()
def weight_stats(weights: Tensor, mask: Tensor) -> dict[str, Tensor]:
    """How concentrated the credit is in each completion (ARCA, arXiv 2606.00257).

    weights [B, T] >= 0 in any scale, mask [B, T] bool or 0/1; what lies outside the mask is
    ignored, even NaN. Returns float32 [B] each, in [0, 1]:
      gini        0 for uniform weights, (n-1)/n for all weight on one token
      effn        effective number of tokens over their number ("EffN/T"): 1 uniform, 1/n one-hot
      top10_mass  share of the total in the ceil(n/10) largest weights
    NaN where a completion has n <= 1 tokens or zero total weight: use nanmean.
    """
    keep = mask.bool()
    w = torch.where(keep, weights.double(), 0.0)  # [B, T]; where, not *: NaN * 0 is NaN
    n = keep.sum(1, keepdim=True)  # [B, 1]
    total = w.sum(1, keepdim=True)  # [B, 1]
    # Ascending, so that the padding's zeros come first and the last n places are the
    # completion's; a zero of its own that trades places with padding adds nothing either way.
    ranked = w.sort(dim=1).values  # [B, T]
    place = torch.arange(w.shape[1], device=w.device)  # [T]
    rank = place - (w.shape[1] - n) + 1  # [B, T], 1 ... n on the completion
    p = ranked / total  # [B, T], NaN in rows without weight
    top = place >= w.shape[1] - (n + 9) // 10  # [B, T]
    stats = {
        "gini": ((2 * rank - n - 1) * p).sum(1) / n[:, 0],
        "effn": 1.0 / (n[:, 0] * p.square().sum(1)),
        "top10_mass": torch.where(top, p, 0.0).sum(1),
    }
    valid = (n[:, 0] > 1) & (total[:, 0] > 0) & total[:, 0].isfinite()  # [B]
    return {key: torch.where(valid, value, math.nan).float() for key, value in stats.items()}


def eval_metrics(verdicts: list[tuple[str, int, float]]) -> dict[str, float]:
    """Accuracies of an evaluation, from ("greedy" | "sampled", problem, 1.0 or 0.0) triples.

    sampled_accuracy is the mean over samples; pass@k is the unbiased estimate for k = 2, 4, ... and
    the number of samples a problem.
    """
    greedy = [right for kind, _, right in verdicts if kind == "greedy"]
    sampled: dict[int, list[float]] = {}
    for kind, problem, right in verdicts:
        if kind == "sampled":
            sampled.setdefault(problem, []).append(right)
    n = len(next(iter(sampled.values())))
    counts = [int(sum(rights)) for rights in sampled.values()]
    result = {
        "greedy_accuracy": sum(greedy) / len(greedy),
        "sampled_accuracy": sum(counts) / (n * len(counts)),
    }
    for k in sorted({2**i for i in range(1, n.bit_length())} | {n} - {1}):
        result[f"pass@{k}"] = sum(pass_at_k(n, c, k) for c in counts) / len(counts)
    return result


def rollout_metrics(accelerator: Any, batch: Any, num_generations: int) -> dict[str, float]:
    """Means over a whole rollout, all processes, of a scored batch (grpo_*.py's Batch)."""
    mask, rows = batch.mask, torch.ones_like(batch.rewards)
    gap = (batch.logp - batch.sampled_logp).abs() * mask
    means = {  # name: values, and what they are averaged over
        "reward": (batch.rewards, rows),
        "completion_length": (mask.sum(1), rows),
        "truncated_share": (batch.truncated, rows),
        "entropy": (batch.entropy, mask),
        "sampling_gap_mean": (gap, mask),
    }
    if batch.base_logp is not None:
        to_base = batch.base_logp - batch.logp
        means["kl"] = (to_base.exp() - to_base - 1, mask)  # k3, of the policy that sampled
    for name, value in weight_stats(batch.weights, mask).items():
        means[f"weight_{name}"] = (value.nan_to_num(0.0), value.isfinite())
    sums = torch.stack([torch.stack([(v * w).sum(), w.sum()]).float() for v, w in means.values()])
    sums = accelerator.reduce(sums, "sum").tolist()
    result = {name: s / n if n else 0.0 for name, (s, n) in zip(means, sums, strict=True)}
    order = accelerator.gather(batch.rows).argsort()
    advantages = accelerator.gather(batch.advantages)[order].view(-1, num_generations)
    result["zero_std_share"] = (advantages == 0).all(1).float().mean().item()
    result["sampling_gap_max"] = accelerator.gather(gap.max()[None]).max().item()
    result["rollout_tokens"] = accelerator.reduce(mask.sum(), "sum").item()
    result["accuracy"] = result["reward"]  # the reward is correctness itself
    return result


def peak_memory_gb(device: torch.device) -> float:
    """GiB: the most that tensors took on a GPU, or this process on a CPU, so far."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # KiB on Linux


# ------------------------------------------------------------------------------------ log


def _plain(value: Any) -> Any:
    """Strict JSON: tensors and numpy to numbers, 6 significant digits, non-finite to None."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if hasattr(value, "tolist"):  # torch and numpy; a scalar gives a Python number
        return _plain(value.tolist())
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    return value


class RunLog:
    """metrics.jsonl in output_dir: one JSON object per optimizer step; config.json beside it.

    output_dir None (any process but the main one) keeps the rows and writes nothing.

    rows: all rows as written, loaded ones too; evals: those of them with an "eval" dict.
    resume_step > 0 keeps the rows up to that step (the checkpoint's): the steps after it run
    again. resume_step = 0 starts a new file, over an old one. Raises ValueError when a line
    other than the last, which a crash may have torn, is not JSON.
    """

    def __init__(
        self, output_dir: str | None, config: dict | None = None, resume_step: int = 0
    ) -> None:
        self.rows, self.evals, self.path = [], [], None
        if output_dir is None:
            return
        self.path = Path(output_dir) / "metrics.jsonl"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if config is not None:
            config_text = json.dumps(config, indent=2) + "\n"
            (self.path.parent / "config.json").write_text(config_text, encoding="utf-8")
        self.rows: list[dict] = self._load(resume_step) if resume_step > 0 else []
        self.evals: list[dict] = [row for row in self.rows if row.get("eval")]
        fresh = self.path.with_suffix(".tmp")  # replaced whole: a crash here loses no row
        fresh.write_text("".join(json.dumps(row) + "\n" for row in self.rows), encoding="utf-8")
        os.replace(fresh, self.path)

    def _load(self, resume_step: int) -> list[dict]:
        if not self.path.exists():
            return []
        lines = self.path.read_bytes().splitlines()
        rows = []
        for number, line in enumerate(lines, start=1):
            try:
                row = json.loads(line)
            except ValueError as error:  # also bytes that are not UTF-8
                if number == len(lines):
                    break
                raise ValueError(f"{self.path}:{number} is not JSON: {error}") from error
            if row["step"] <= resume_step:
                rows.append(row)
        return rows

    def write(self, row: dict) -> None:
        """Append one row; it is on its way to the disk when this returns."""
        row = _plain(row)
        line = json.dumps(row, allow_nan=False)
        if self.path is not None:
            with open(self.path, "a", encoding="utf-8") as file:  # closed, so flushed, at each row
                file.write(line + "\n")
        self.rows.append(row)
        if row.get("eval"):
            self.evals.append(row)


# --------------------------------------------------------------------------------- curves


def _real(value: Any) -> float:
    """A finite number as it is; None, infinities and everything else as NaN."""
    return value if isinstance(value, (int, float)) and math.isfinite(value) else math.nan


def _series(rows: list[dict], key: str) -> tuple[list[float], list[float]]:
    """(steps, values) of the rows that hold a finite number under key."""
    points = [(row["step"], _real(row.get(key))) for row in rows]
    points = [(x, y) for x, y in points if not math.isnan(y)]
    return [x for x, _ in points], [y for _, y in points]


def _smooth(values: list[float]) -> list[float]:
    """Centred moving mean over about a tenth of the run; narrower at both ends."""
    half = max(1, len(values) // 20)
    windows = [values[max(0, i - half) : i + half + 1] for i in range(len(values))]
    return [sum(window) / len(window) for window in windows]


def _line(ax: Any, rows: list[dict], key: str, label: str, color: str, smooth: bool = True) -> None:
    """The raw series thin and pale, its smoothed line over it; a few points also get dots."""
    x, y = _series(rows, key)
    if not x:
        return
    dots = "o" if len(x) < 12 or not smooth else None
    if smooth:
        ax.plot(x, y, color=color, alpha=0.3, linewidth=1)
        y = _smooth(y)
    ax.plot(x, y, color=color, linewidth=2, label=label, marker=dots, markersize=5)


def _accuracy_panel(ax: Any, rows: list[dict]) -> None:
    evals = [{**row["eval"], "step": row["step"]} for row in rows if row.get("eval")]
    _line(ax, rows, "reward", "reward", GREY)
    _line(ax, evals, "sampled_accuracy", "sampled", BLUE, smooth=False)
    _line(ax, evals, "greedy_accuracy", "greedy", ORANGE, smooth=False)
    names = list(dict.fromkeys(key for row in evals for key in row if key.startswith("pass@")))
    for name in names[-1:]:  # the largest k; all stand in metrics.jsonl
        _line(ax, evals, name, name, GREEN, smooth=False)


def _two_scales(ax: Any, rows: list[dict], left: tuple, right: tuple, percent: bool) -> None:
    """left and right: (key, label, color); the right one has its own axis, in its own colour."""
    _line(ax, rows, *left)
    values = _series(rows, right[0])[1]
    if not values:
        return
    twin = ax.twinx()
    _line(twin, rows, *right)
    twin.spines[["top", "left", "bottom"]].set_visible(False)
    twin.tick_params(axis="y", colors=right[2], length=0)
    if min(values) >= 0:  # an estimated KL can be negative
        twin.set_ylim(0, max(0.05 if percent else 0.0, twin.get_ylim()[1]))
    if percent:
        twin.yaxis.set_major_formatter(lambda share, _: f"{100 * share:.3g}%")
    ax.plot([], [], color=right[2], linewidth=2, label=f"{right[1]} (right)")  # for the legend


def _seconds_panel(ax: Any, rows: list[dict]) -> None:
    phases = {"rollout": SKY, "score": GREEN, "credit": PURPLE, "update": ORANGE}
    rows = [row for row in rows if any(_series([row], f"seconds_{name}")[0] for name in phases)]
    if not rows:
        return
    steps = [row["step"] for row in rows]
    edges = [step - 0.5 for step in steps] + [steps[-1] + 0.5]  # stairs shows a lone row too
    base = [0.0] * len(rows)
    for name, color in phases.items():
        seconds = [sum(_series([row], f"seconds_{name}")[1]) for row in rows]  # null counts as 0
        top = [low + more for low, more in zip(base, seconds)]
        ax.stairs(top, edges, baseline=base, fill=True, color=color, linewidth=0, label=name)
        base = top


def write_curves(path: str, rows: list[dict], title: str) -> None:
    """curves.png, 1500 x 850 px, from RunLog.rows. Rows may lack keys or hold None."""
    import matplotlib
    from matplotlib.figure import Figure  # not pyplot: no global figures, no backend switch

    second = ("kl", "KL") if any(_series(rows, "kl")[1]) else ("clip_fraction", "clip fraction")
    length = ("completion_length", "tokens", BLUE)
    panels: dict[str, Callable[[Any], None]] = {
        "Held-out accuracy": lambda ax: _accuracy_panel(ax, rows),
        "Policy entropy (nats per token)": lambda ax: _line(ax, rows, "entropy", "", BLUE),
        "Concentration of credit": lambda ax: (
            _line(ax, rows, "weight_gini", "Gini", BLUE),
            _line(ax, rows, "weight_effn", "EffN/T", ORANGE),
        ),
        "Completion length": lambda ax: _two_scales(
            ax, rows, length, ("truncated_share", "truncated", ORANGE), percent=True
        ),
        "Update size": lambda ax: _two_scales(
            ax, rows, ("grad_norm", "gradient norm", BLUE), (*second, ORANGE), percent=False
        ),
        "Seconds per step": lambda ax: _seconds_panel(ax, rows),
    }
    style = {"font.size": 13, "axes.titlesize": 15, "axes.edgecolor": "#9aa0a6"}
    with matplotlib.rc_context(style):
        figure = Figure(figsize=(15, 8.5), dpi=100, layout="constrained", facecolor="white")
        figure.get_layout_engine().set(w_pad=0.12, h_pad=0.12, wspace=0.03, hspace=0.04)
        figure.suptitle(title, fontsize=18, fontweight="bold", parse_math=False)
        for ax, (name, draw) in zip(figure.subplots(2, 3).flat, panels.items()):
            draw(ax)
            _finish_panel(ax, name, rows)
        figure.savefig(path, format="png")


def _finish_panel(ax: Any, name: str, rows: list[dict]) -> None:
    """Title, legend above the data (so that it hides none), light grid, common x axis."""
    handles, labels = ax.get_legend_handles_labels()
    ax.set_title(name, loc="left", fontweight="bold", pad=32)
    ax.spines[["top", "right"]].set_visible(False)
    if not (ax.lines or ax.patches):
        ax.set_axis_off()
        ax.text(0.5, 0.5, "not logged", ha="center", color=GREY, transform=ax.transAxes)
        return
    if any(labels):
        legend = ax.legend(
            handles, labels, loc="lower left", bbox_to_anchor=(-0.02, 0.99), ncols=len(labels),
            frameon=False, handlelength=1.1, handletextpad=0.4, columnspacing=1.0, fontsize=12,
        )  # fmt: skip
        legend.set_in_layout(False)  # a wide one must not narrow its panel
    ax.grid(axis="y", color="#e3e6ea", linewidth=0.8)
    ax.set_axisbelow(True)
    ax.tick_params(length=0)
    ax.locator_params(axis="x", integer=True, nbins=6)
    last = max(row["step"] for row in rows)
    ax.set_xlim(-0.01 * last - 0.5, last * 1.02 + 0.5)
    ax.set_xlabel("step", color="#5f6368")


# ---------------------------------------------------------------------------- credit page


def _visible(text: str, newline: str) -> str:
    """Hostile text made visible: control, bidi and zero-width marks, lone surrogates -> <U+....>.

    A newline becomes `newline`; other ASCII control characters become their picture (U+2400).
    """
    if text.isprintable():
        return text
    out = []
    for char in text:
        code = ord(char)
        if char == "\n":
            out.append(newline)
        elif char.isprintable() or unicodedata.category(char) == "Zs":
            out.append(char)
        elif code < 32:
            out.append(chr(0x2400 + code))
        else:
            out.append("␡" if code == 127 else f"<U+{code:04X}>")
    return "".join(out)


def _escape(text: Any, newline: str = "\n") -> str:
    """Text -> HTML for an element or a quoted attribute. All text on the page goes through it."""
    return html.escape(_visible(str(text), newline), quote=True)


def _number(value: Any, form: str) -> str:
    """A number for the page, "n/a" where there is none."""
    value = _real(value)
    return "n/a" if math.isnan(value) else format(value, form)


def _token(token: dict, advantage: float) -> str:
    """One <i>, about 110 bytes: a big page has 64,000 of them, so labels live in the CSS."""
    weight = _real(token.get("weight"))
    share = 0.0 if math.isnan(weight) else min(max(weight / FULL_TINT, 0.0), 1.0)
    role = {"decisive": " d", "first_wrong": " f"}.get(str(token.get("role")), "")
    return (
        f'<i class="k{round(TINT_LEVELS * share)}{role}" tabindex="0"'
        f' data-t="{_escape(token["text"][:60], "↵")}" data-w="{_number(weight, ".2f")}"'
        f' data-a="{_number(weight * advantage, "+.2f")}"'
        f' data-h="{_number(token.get("entropy"), ".2f")}"'
        f' data-l="{_number(token.get("logp"), ".2f")}">{_escape(token["text"], NEWLINE)}</i>'
    )


def _completion(completion: dict) -> str:
    advantage = _real(completion["advantage"])
    sign = "pos" if advantage > 0 else "neg" if advantage < 0 else "zero"
    cut = ' · <b class="cut">truncated</b>' if completion.get("truncated") else ""
    tokens = completion["tokens"]
    return (
        f'<article class="{sign}"><p class="meta">reward <b>{_number(completion["reward"], ".3g")}'
        f"</b> · advantage <b>{_number(advantage, '+.2f')}</b> · {len(tokens)} tokens{cut}</p>"
        f'<div class="text">{"".join(_token(token, advantage) for token in tokens)}</div>'
        "</article>\n"
    )


def _group(group: dict) -> str:
    correct = [c for c in group["completions"] if _real(c["reward"]) > CORRECT_ABOVE]
    wrong = [c for c in group["completions"] if not _real(c["reward"]) > CORRECT_ABOVE]
    columns = ""
    for name, side in (("Correct", correct), ("Wrong", wrong)):
        body = "".join(map(_completion, side)) or '<p class="none">none in this group</p>'
        columns += f'<section class="column"><h3>{name} <b>{len(side)}</b></h3>\n{body}</section>\n'
    return (
        f"<details open><summary>Step {_escape(group['step'])} · {len(correct)} of "
        f"{len(group['completions'])} correct</summary>\n"
        f'<div class="prompt"><h3>Prompt</h3><div class="text">{_escape(group["prompt"])}</div>'
        f'<h3>Reference answer</h3><div class="text">{_escape(group["answer"])}</div></div>\n'
        f'<div class="columns">\n{columns}</div></details>\n'
    )


def write_credit_page(path: str, title: str, samples: list[dict]) -> None:
    """credit.html: groups of completions, every token tinted by its weight. One file, no script.

    samples: [{"prompt", "answer", "step", "completions": [{"reward", "advantage", "truncated",
    "tokens": [{"text", "weight" (1 = the completion's mean), "entropy" (nats), "logp",
    optional "role": "decisive" | "first_wrong"}]}]}]. Text may be hostile: see _escape. Numbers
    may be NaN or None. Template, colours and Content-Security-Policy are in credit_page.html.
    """
    page = string.Template(PAGE_TEMPLATE.read_text(encoding="utf-8")).substitute(
        title=_escape(title),
        tints="".join(f".k{k}{{--k:{k / TINT_LEVELS:.3f}}}" for k in range(TINT_LEVELS + 1)),
        full=f"{FULL_TINT:g}",
        groups="".join(map(_group, samples)) or '<p class="none">No samples.</p>',
    )  # one pass: a "$title" inside the text stays as it is
    Path(path).write_text(page, encoding="utf-8", errors="replace", newline="\n")


def credit_group(
    tokenizer: Any, batch: Any, problems: list[Problem], num_generations: int, step: int
) -> list[dict]:
    """The first whole group of a scored batch with right and wrong completions, two of each at
    most, as write_credit_page wants it; [] if there is none."""
    places, size = batch.rows.tolist(), num_generations
    for first in range(0, len(places) - size + 1):
        whole = places[first] % size == 0 and places[first + size - 1] == places[first] + size - 1
        if whole and batch.advantages[first] != 0:
            break
    else:
        return []
    order = batch.rewards[first : first + size].argsort(descending=True, stable=True).tolist()
    problem, completions = problems[first], []
    for row in dict.fromkeys(first + i for i in order[:2] + order[-2:]):  # without repeats
        ids = batch.ids[row, batch.prompt_width :][batch.mask[row]].tolist()
        pieces = [tokenizer.decode([i]) for i in ids]
        roles = token_roles(pieces, problem) if problem.steps else [""] * len(ids)
        columns = (c[row, : len(ids)].tolist() for c in (batch.weights, batch.entropy, batch.logp))
        names = ("text", "role", "weight", "entropy", "logp")
        values = zip(pieces, roles, *columns, strict=True)
        tokens = [dict(zip(names, value, strict=True)) for value in values]
        facts = {k: getattr(batch, k + "s")[row].item() for k in ("reward", "advantage")}
        completions.append(facts | {"truncated": batch.truncated[row].item(), "tokens": tokens})
    prompt = problem.prompt if isinstance(problem.prompt, str) else problem.prompt[-1]["content"]
    return [{"prompt": prompt, "answer": problem.answer, "step": step, "completions": completions}]


# ----------------------------------------------------------------------- before and after


def _comparison(before: dict, after: dict) -> list[tuple[str, str, str, str]]:
    """(name, before, after, change) per metric; accuracies and pass@k in percent (points)."""
    table = []
    for key in {**before, **after}:
        old, new = (_real(_plain(side.get(key))) for side in (before, after))
        share = "accuracy" in key or key.startswith("pass@") or key.endswith("_share")
        scale, form, unit = (100, ".1f", "%") if share else (1, ".4g", "")
        texts = (f"{scale * old:{form}}{unit}", f"{scale * new:{form}}{unit}")
        cells = [*texts, f"{scale * (new - old):+{form}}"]
        table.append((key.replace("_", " "), *("–" if "nan" in cell else cell for cell in cells)))
    return table


def before_after_table(before: dict, after: dict) -> str:
    """The eval dicts of the first and the last evaluation as an aligned text table."""
    table = [("held-out", "before", "after", "change"), *_comparison(before, after)]
    width = [max(len(row[i]) for row in table) for i in range(4)]
    return "\n".join(
        "  ".join([row[0].ljust(width[0]), *(row[i].rjust(width[i]) for i in (1, 2, 3))])
        for row in table
    )


def write_model_card(
    path: str, base_model: str, method: str, args: dict, before: dict, after: dict
) -> None:
    """README.md (path names the file) of a PEFT adapter; write it after save_pretrained.

    before and after: eval dicts of held-out metrics, may be empty. args: the run's flags.
    """
    rows = [f"| {' | '.join(row)} |" for row in _comparison(before, after)]
    results = ["| held-out | before | after | change |", "|---|---:|---:|---:|", *rows]
    # JSON strings are YAML and Python strings too, and hold no line break that could end a block.
    base, tag = json.dumps(base_model), json.dumps(method)
    flags = [f"--{key} {json.dumps(_plain(value), default=str)}" for key, value in args.items()]
    card = f"""---
library_name: peft
base_model: {base}
tags: ["lora", "grpo", "reinforcement-learning", {tag}]
---

# {method} adapter for {base_model}

A LoRA adapter trained with GRPO; `{method}` weights every token's advantage.

```python
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

base = AutoModelForCausalLM.from_pretrained({base})
tokenizer = AutoTokenizer.from_pretrained({base})
model = PeftModel.from_pretrained(base, "path/to/this/folder")
```

## Before and after

{chr(10).join(results) if rows else "No evaluation was run."}

## Flags

```
{chr(10).join(flags)}
```
"""
    Path(path).write_text(card, encoding="utf-8", errors="replace", newline="\n")


def _attempt(path: Path, write: Callable[[str], None]) -> bool:
    """write(path); what fails is one sentence on standard error, because the run is worth more.

    A full disk is the caller's to report: every other file would fail as well.
    """
    try:
        write(str(path))
    except Exception as error:  # matplotlib alone raises a dozen kinds
        if isinstance(error, OSError) and error.errno in DISK_FULL:
            raise
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        print(f"{path} is not written, the run goes on: {reason}", file=sys.stderr, flush=True)
        return False
    return True


def _write_summary(path: str, summary: dict) -> None:
    Path(path).write_text(json.dumps(_plain(summary), indent=2) + "\n", encoding="utf-8")


def _write_completions(path: str, groups: list[dict]) -> None:
    with open(path, "w", encoding="utf-8", errors="replace") as file:
        for group in groups:
            for completion in group["completions"]:
                text = "".join(token["text"] for token in completion["tokens"])
                row = group | completion | {"completion": text}
                del row["completions"], row["tokens"]
                file.write(json.dumps(row) + "\n")


def write_report(
    output_dir: str, title: str, config: dict, rows: list[dict], groups: list[dict], summary: dict
) -> str:
    """summary.json, completions.jsonl, curves.png, credit.html and the adapter's card, as files of
    output_dir; returns what to print. summary: {"before", "after", "seconds"}.

    A file that cannot be written is said on standard error and left out; OSError on a full disk.
    """
    folder, before, after = Path(output_dir), summary["before"], summary["after"]
    updates = [row for row in rows if "reward" in row]
    summary["steps"] = updates[-1]["step"] if updates else 0
    # Rows of one rollout repeat its figures; its seconds stand in the first alone.
    fresh = [row for row in updates if row["seconds_rollout"] > 0]
    summary["rollout_tokens"] = sum(row["rollout_tokens"] for row in fresh)
    method, base = f"GRPO with {config['credit']} credit", config["model_name_or_path"]
    files: dict[str, Callable[[str], None]] = {
        "summary.json": lambda path: _write_summary(path, summary),
        "completions.jsonl": lambda path: _write_completions(path, groups),
        "adapter/README.md": lambda path: write_model_card(
            path, base, method, config, before, after
        ),
        "curves.png": lambda path: write_curves(path, rows, title),
        "credit.html": lambda path: write_credit_page(path, title, groups),
    }
    failed = {name for name, write in files.items() if not _attempt(folder / name, write)}
    written = [str(folder / name) for name in sorted(os.listdir(folder)) if name not in failed]
    return "\n".join(["", before_after_table(before, after), "", "Written:", *written])
