"""What a run leaves behind: numbers (pass@k, weight statistics, metrics.jsonl), curves.png,
credit.html (every token tinted by its credit weight) and the model card of the adapter. Only torch
is heavy here: matplotlib and huggingface_hub are imported where they write."""

import contextlib
import errno
import importlib.metadata
import json
import math
import os
import re
import resource
import subprocess
import sys
import time
import unicodedata
from pathlib import Path
from typing import Any, Callable

import jinja2
import psutil
import torch
from torch import Tensor
from tqdm import tqdm

from common.data import Problem, token_roles

PAGE_TEMPLATE = Path(__file__).with_name("credit_page.html")
CARD_TEMPLATE = Path(__file__).with_name("adapter_card.md")
ACCURACY = "accuracy_reward"  # the reward function that judges the final answer
TRAINED = f"rewards/{ACCURACY}/mean"
UNIFORM = "All weights are 1: the adapter has not moved yet, or the method is uniform."
COLOURS = ("#0072B2", "#D55E00", "#8A8F98", "#CC79A7")  # of a panel's lines (Okabe-Ito)


# ---------------------------------------------------------------------------------- numbers
def pass_at_k(n: int, c: int, k: int) -> float:
    """Unbiased chance that k of n samples, c of them correct, hold a correct one: 1 - C(n-c, k) /
    C(n, k) in product form, which cannot overflow (Chen et al. 2021, arXiv 2107.03374, eq. 1)."""
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
    w = torch.where(mask.bool(), weights.double(), 0.0)  # [B, T]; where, not *: NaN * 0 is NaN
    n = mask.bool().sum(1, keepdim=True)  # [B, 1]
    total = w.sum(1, keepdim=True)  # [B, 1]
    ranked = w.sort(dim=1).values  # [B, T], the padding's zeros first, and zeros add nothing
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


def control_weights(kind: str, weights: Tensor, mask: Tensor, u: Tensor) -> Tensor:
    """Weights [B, T] that know nothing of the tokens, inside the mask, by uniforms u [B, T]:
    "shuffled" permutes each row's; "random" is log-normal, each row with that row's sum and
    concentration (EffN/T of exp(sigma * z) falls as sigma grows, so bisection finds sigma)."""
    if kind == "shuffled":
        order = torch.where(mask, u, 2.0).argsort(dim=1, stable=True)  # the rest stays put
        return weights.gather(1, order)
    target, z = weight_stats(weights, mask)["effn"], torch.special.ndtri(u.clamp(1e-6, 1 - 1e-6))
    low, high = torch.zeros_like(target), torch.full_like(target, 50.0)
    for _ in range(40):
        sigma = (low + high) / 2
        drawn = torch.where(mask, (sigma[:, None] * z).exp().clamp(max=1e30), 0.0)
        flatter = weight_stats(drawn, mask)["effn"] > target  # NaN (one token) counts as no
        low, high = torch.where(flatter, sigma, low), torch.where(flatter, high, sigma)
    drawn = drawn / drawn.sum(1, keepdim=True) * (weights * mask).sum(1, keepdim=True)
    return torch.where(mask & (target[:, None] < 1 - 1e-6), drawn, weights)


@torch.no_grad()
def gap_to_stock(run: Any, batch: Any) -> float:
    """Nats between the log-probs of a batch whose rows end together, sampled or recomputed, and
    those of the model as transformers has it: one row at a time, eager attention, no cache."""
    base, length = run.model.get_base_model(), batch.mask.shape[1]
    attention = base.config._attn_implementation
    base.set_attn_implementation("eager")
    with run.accelerator.autocast():
        rows = [base(ids[real][None]).logits for ids, real in zip(batch.ids, batch.attention)]
    base.set_attn_implementation(attention)
    logits = torch.cat([row[:, -length - 1 : -1] for row in rows]).float() / run.args.temperature
    stock = logits.log_softmax(-1).gather(2, batch.ids[:, -length:, None]).squeeze(2)  # [B, T]
    gaps = torch.stack([batch.sampled_logp - stock, batch.logp - stock])
    return gaps.abs().mean((1, 2)).max().item()


def eval_metrics(verdicts: list[tuple[str, int, float]]) -> dict[str, float]:
    """Accuracies of an evaluation, from ("greedy" | "sampled", problem, 1.0 or 0.0) triples, and
    pass@k for k = 2, 4, ... and the number of samples a problem."""
    rights: dict[str, dict[int, list[float]]] = {"greedy": {}, "sampled": {}}
    for kind, problem, right in verdicts:
        rights[kind].setdefault(problem, []).append(right)
    greedy, counts = ([int(sum(x)) for x in rights[kind].values()] for kind in rights)
    n = len(next(iter(rights["sampled"].values())))
    result = {"greedy_accuracy": sum(greedy) / len(greedy)}
    result["sampled_accuracy"] = sum(counts) / (n * len(counts))
    for k in sorted({2**i for i in range(1, n.bit_length())} | {n} - {1}):
        result[f"pass@{k}"] = sum(pass_at_k(n, c, k) for c in counts) / len(counts)
    return result


def _averages(batch: Any) -> dict[str, tuple[Tensor, Tensor]]:
    """name: the values of a scored micro-batch, and what each counts for in their mean."""
    mask, rows = batch.mask, torch.ones_like(batch.rewards)
    averages = {
        "reward": (batch.rewards, rows),
        "completion_length": (mask.sum(1), rows),
        "truncated_share": (batch.truncated, rows),
        "entropy": (batch.entropy, mask),
        "sampling_gap_mean": ((batch.logp - batch.sampled_logp).abs() * mask, mask),
    }
    if batch.base_logp is not None:
        known = mask & batch.base_logp.isfinite()
        to_base = torch.where(known, batch.base_logp - batch.logp, 0.0)
        averages["kl"] = (to_base.exp() - to_base - 1, known)  # k3, of the policy that sampled
    for name, x in weight_stats(batch.weights, mask).items():
        averages[f"weight_{name}"] = (x.nan_to_num(0.0), x.isfinite() & (batch.advantages != 0))
    return averages


def rollout_metrics(run: Any, micros: list, seconds: float) -> dict[str, float]:
    """Means over a whole rollout, all processes, of scored micro-batches (grpo_*.py's Batch); a
    mean over nothing is left out. reward_timeouts: of all processes since they were started."""
    accelerator, sums, gap = run.accelerator, 0.0, 0.0
    for batch in micros:
        averages = _averages(batch)
        pairs = [torch.stack([(x * w).sum(), w.sum()]).double() for x, w in averages.values()]
        sums, gap = sums + torch.stack(pairs), max(gap, averages["sampling_gap_mean"][0].max())
    timeouts = sums.new_tensor([[run.grader.timeouts, 0.0]])
    *sums, timeouts = accelerator.reduce(torch.cat([sums, timeouts]), "sum").tolist()
    result = {name: total / n for name, (total, n) in zip(averages, sums, strict=True) if n}
    rows = accelerator.gather(torch.cat([batch.rows for batch in micros]))
    advantages = accelerator.gather(torch.cat([batch.advantages for batch in micros]))
    advantages = advantages[rows.argsort()].view(-1, run.args.num_generations)
    result["zero_std_share"] = (advantages == 0).all(1).float().mean().item()
    result["sampling_gap_max"] = accelerator.gather(gap[None]).max().item()
    result["rollout_tokens"] = dict(zip(averages, sums))["entropy"][1]
    result["tokens_per_second"] = result["rollout_tokens"] / seconds
    result["reward_timeouts"] = timeouts[0]
    result["peak_memory_gb"] = peak_memory_gb(accelerator.device)
    return result


@contextlib.contextmanager
def timed(metrics: dict, name: str):
    """Adds the seconds that its block takes to a metric, with a GPU's work done."""
    began = time.perf_counter()
    yield
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    metrics[name] = metrics.get(name, 0.0) + time.perf_counter() - began


def peak_memory_gb(device: torch.device) -> float:
    """GiB: the most that tensors took on a GPU, or this process on a CPU, so far."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # KiB on Linux


# ------------------------------------------------------------------------------------ log
def _commit() -> str | None:
    """The scripts' commit, with "-dirty" where files differ from it; None without git."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    quiet = {"stderr": subprocess.DEVNULL, "text": True, "timeout": 10}
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        return subprocess.check_output([*command, "--abbrev=40", "--exclude=*"], **quiet).strip()


def environment() -> dict[str, Any]:
    """What a run's figures depend on besides its flags: code, versions, machine, command line."""
    packages = ("torch", "transformers", "peft", "accelerate", "bitsandbytes")
    cpuinfo = Path("/proc/cpuinfo").read_text()
    hardware = {
        "cpu": cpuinfo.partition("model name\t: ")[2].split("\n")[0] or os.uname().machine,
        "cores": len(os.sched_getaffinity(0)),
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "processes": int(os.environ.get("WORLD_SIZE", "1")),
    }
    versions = {name: importlib.metadata.version(name) for name in packages}
    versions["python"] = sys.version.split()[0]
    return {"commit": _commit(), "versions": versions, "hardware": hardware, "command": sys.argv}


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


def _flat(row: dict) -> dict:
    """A row with each figure of its evaluation as a figure of its own, "eval/<name>"."""
    evals = {f"eval/{name}": value for name, value in (row.get("eval") or {}).items()}
    return {name: value for name, value in row.items() if name != "eval"} | evals


class RunLog:
    """metrics.jsonl in output_dir: one JSON object per optimizer step; config.json beside it has
    the flags and `environment`. track(figures, step) is called after each row is in the file.
    output_dir None, as of all processes but the main one: nothing is written.

    rows: all rows as written, loaded ones too; evals: those of them with an "eval" dict.
    resume_step > 0 keeps the rows up to the checkpoint of that step: later ones come again. So does
    a line that a crash has torn, which is the last and has no end.
    """

    def __init__(
        self, output_dir: str | None, config: dict | None = None, resume_step: int = 0,
        track: Callable[[dict, int], None] = lambda figures, step: None,
    ) -> None:  # fmt: skip
        self.rows, self.evals, self.path, self._track = [], [], None, track
        if output_dir is None:
            return
        self.path = Path(output_dir) / "metrics.jsonl"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if config is not None:
            text = json.dumps(config | {"environment": environment()}, indent=2, default=str)
            self.path.with_name("config.json").write_text(text + "\n", encoding="utf-8")
        self.rows = self._load(resume_step) if resume_step > 0 else []
        self.evals = [row for row in self.rows if row.get("eval")]
        fresh = self.path.with_suffix(".tmp")  # replaced whole: a crash here loses no row
        fresh.write_text("".join(json.dumps(row) + "\n" for row in self.rows), encoding="utf-8")
        os.replace(fresh, self.path)

    def _load(self, resume_step: int) -> list[dict]:
        whole = self.path.read_bytes().split(b"\n")[:-1] if self.path.exists() else []
        rows = map(json.loads, whole)
        return [row for row in rows if row["step"] <= resume_step - ("eval" in row)]  # saved before

    def write(self, row: dict) -> None:
        """Append one row; it is on its way to the disk when this returns."""
        row = _plain(row)
        if self.path is not None:
            with open(self.path, "a", encoding="utf-8") as file:  # closed, so flushed, at each row
                file.write(json.dumps(row, allow_nan=False) + "\n")
        self.rows.append(row)
        figures = _flat(row)
        step = figures.pop("step")
        if row.get("eval"):
            self.evals.append(row)
            shown = "  ".join(f"{name} {_number(x, '.3f')}" for name, x in row["eval"].items())
            if self.path is not None:
                tqdm.write(f"step {step:4d}, held out: {shown}")
        self._track(figures, step)


def start_log(accelerator: Any, config: dict, resume_step: int) -> RunLog:
    """A run's log, with its tracker: one that fails is said once, and the run goes on."""

    def attempt(function: Callable, *given: Any) -> None:
        try:
            function(*given)
        except Exception as error:  # whatever a tracker's client raises
            accelerator.trackers = []
            tqdm.write(f"going on without {config['report_to']}: {error}", file=sys.stderr)

    named = {} if config["report_to"] == "tensorboard" else {"name": config["run_name"]}
    flags = {name: str(value) for name, value in config.items()}
    attempt(accelerator.init_trackers, "grpo", flags, {config["report_to"]: named})
    folder = config["output_dir"] if accelerator.is_main_process else None
    return RunLog(folder, config, resume_step, lambda *row: attempt(accelerator.log, *row))


def introduction(config: dict, problems: list, held_out: list, processes: int) -> str:
    """What will be trained on what."""
    total = config["per_device_train_batch_size"] * config["steps_per_generation"] * processes
    kind = f"{'NF4' if config['load_in_4bit'] else 'unquantised'}, LoRA of rank {config['lora_r']}"
    return (
        f"{config['credit']} credit for {config['model_name_or_path']} ({kind}) on "
        f"{config['dataset_name']} ({len(problems)} problems, {len(held_out)} held out): "
        f"{total // config['num_generations']} prompts x {config['num_generations']} completions "
        f"of at most {config['max_completion_length']} tokens a rollout, {config['max_steps']} "
        f"updates at a learning rate of {config['learning_rate']:g}, into {config['output_dir']}"
    )


def hints(metrics: dict[str, float], first: bool) -> list[str]:
    """What a beginner would not find in a rollout's numbers; `first`: of the run."""
    found = []
    if metrics["zero_std_share"] == 1:
        same = f"every group has equal rewards (all {metrics['reward']:.2f})"
        found.append(f"{same}, so the gradient is 0: the problems are too easy or too hard")
    if metrics["truncated_share"] > 0.3 and first:
        share = f"{metrics['truncated_share']:.0%} of completions are cut off before their end"
        found.append(f"{share}: raise --max_completion_length")
    return found


# --------------------------------------------------------------------------------- curves
def _real(value: Any) -> float:
    """A finite number as it is; None, infinities and everything else as NaN."""
    return value if isinstance(value, (int, float)) and math.isfinite(value) else math.nan


def _series(rows: list[dict], key: str) -> tuple[list[float], list[float]]:
    """(steps, values) of the rows that hold a finite number under key."""
    points = [(row["step"], y) for row in rows if not math.isnan(y := _real(row.get(key)))]
    return [x for x, _ in points], [y for _, y in points]


def _smooth(values: list[float]) -> list[float]:
    """Centred moving mean over about a tenth of the run; narrower at both ends."""
    half = max(1, len(values) // 20)
    windows = [values[max(0, i - half) : i + half + 1] for i in range(len(values))]
    return [sum(window) / len(window) for window in windows]


STYLE = {  # of matplotlib
    "font.size": 13, "axes.titlesize": 15, "axes.edgecolor": "#9aa0a6", "axes.axisbelow": True,
    "axes.spines.top": False, "axes.spines.right": False, "xtick.major.size": 0,
    "ytick.major.size": 0, "grid.color": "#e3e6ea", "legend.frameon": False, "legend.fontsize": 12,
    "legend.handlelength": 1.1, "legend.handletextpad": 0.4, "legend.columnspacing": 1.0,
}  # fmt: skip
PANELS = {  # title: key and label of each line; "(right)": on an axis of its own
    "Accuracy, held out and in training": [
        ("eval/sampled_accuracy", "sampled"), ("eval/greedy_accuracy", "greedy"),
        (TRAINED, "training"),
    ],
    "Entropy and KL (nats per token)": [("entropy", "entropy"), ("kl", "KL to the base (right)")],
    "Concentration of credit": [("weight_gini", "Gini"), ("weight_effn", "EffN/T")],
    "Completion length": [("completion_length", "tokens"), ("truncated_share", "cut off (right)")],
    "Update size": [("grad_norm", "gradient norm"), ("clip_fraction", "clip fraction (right)")],
    "Seconds per step": [
        (f"seconds_{phase}", phase) for phase in ("rollout", "score", "update", "credit")
    ],
}  # fmt: skip


def _line(ax: Any, rows: list[dict], key: str, label: str, color: str) -> None:
    """The raw series thin and pale, its smoothed line over it; evaluations as they are."""
    (x, y), right = _series(rows, key), "(right)" in label
    if not x:
        return
    dots = "o" if len(x) < 12 or "eval/" in key else None
    if right:
        ax.plot([], [], color=color, linewidth=2, label=label)  # for the legend
        ax = ax.twinx()
        ax.tick_params(axis="y", colors=color)
    if "eval/" not in key:
        ax.plot(x, y, color=color, alpha=0.3, linewidth=1)
        y = _smooth(y)
    ax.plot(x, y, color=color, linewidth=2, label=label, marker=dots, markersize=5)
    if right and min(y) >= 0:
        ax.set_ylim(bottom=0)


def write_curves(path: str, rows: list[dict], title: str) -> None:
    """curves.png, 1500 x 850 px, from RunLog.rows. Rows may lack keys or hold None."""
    import matplotlib
    from matplotlib.figure import Figure  # not pyplot: no global figures, no backend switch

    rows = list(map(_flat, rows))
    passes = [(key, key[5:]) for row in rows for key in row if key.startswith("eval/pass@")]
    more = passes[-1:]  # the largest k
    if _series(rows, "reward") != _series(rows, TRAINED):  # and there is no room for both
        more = [("reward", "reward (right)")]
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(15, 8.5), dpi=100, layout="constrained", facecolor="white")
        figure.get_layout_engine().set(w_pad=0.12, h_pad=0.12, wspace=0.03, hspace=0.04)
        figure.suptitle(title, fontsize=18, fontweight="bold", parse_math=False)
        for ax, (name, lines) in zip(figure.subplots(2, 3).flat, PANELS.items()):
            shown = lines + (more if "Accuracy" in name else [])
            for (key, label), color in zip(shown, COLOURS):
                _line(ax, rows, key, label, color)
            _finish_panel(ax, name, rows)
        figure.savefig(path, format="png")


def _finish_panel(ax: Any, name: str, rows: list[dict]) -> None:
    """Title, legend above the data (so that it hides none), light grid, common x axis."""
    ax.set_title(name, loc="left", fontweight="bold", pad=32)
    if not ax.lines:
        ax.set_axis_off()
        ax.text(0.5, 0.5, "not logged", ha="center", color="grey", transform=ax.transAxes)
        return
    legend = ax.legend(loc="lower left", bbox_to_anchor=(-0.02, 0.99), ncols=5)
    legend.set_in_layout(False)  # a wide one must not narrow its panel
    ax.grid(axis="y")
    ax.locator_params(axis="x", integer=True, nbins=6)
    last = max(row["step"] for row in rows)
    ax.set_xlim(-0.01 * last - 0.5, last * 1.02 + 0.5)
    ax.set_xlabel("step", color="#5f6368")


# ---------------------------------------------------------------------------- credit page
def _visible(value: Any) -> str:
    """Hostile text as the reader sees it: control, bidi and zero-width marks and lone surrogates
    become <U+....>, ASCII's control characters their pictures (U+2400)."""

    def mark(match: re.Match) -> str:
        char = match[0]
        if char.isprintable() or unicodedata.category(char) == "Zs":
            return char
        return chr(0x2400 + ord(char)) if char < " " else f"<U+{ord(char):04X}>"

    return re.sub(r"[^\n -~]", mark, str(value))


def _number(value: Any, form: str) -> str:
    """A number for the page, "n/a" where there is none."""
    value = _real(value)
    return "n/a" if math.isnan(value) else format(value, form)


def write_credit_page(path: str, title: str, samples: list[dict]) -> None:
    """credit.html: groups of completions, every token tinted by its weight. One file, no script.

    samples: [{"prompt", "answer", "step", "completions": [{"reward", "advantage", "truncated",
    "tokens": [{"text", "weight" (1 = the completion's mean), "entropy" (nats), "logp", optional
    "role": "decisive" | "first_wrong"}]}], optional "size" of the group, "correct" (how many of it;
    None: no count), "note", "heading" (else the step)}]. Text may be hostile: the template escapes
    all of it. Numbers may be NaN or None.
    """
    layout = {"trim_blocks": True, "lstrip_blocks": True, "keep_trailing_newline": True}
    jinja = jinja2.Environment(autoescape=True, finalize=_visible, **layout)
    jinja.filters |= {"real": _real, "number": _number}
    jinja.tests["above"] = lambda completion: _real(completion["advantage"]) > 0
    template = jinja.from_string(PAGE_TEMPLATE.read_text(encoding="utf-8"))
    page = template.render(title=title, groups=samples)
    Path(path).write_text(page, encoding="utf-8", newline="\n")


def _facts(run: Any, batch: Any, row: int, problem: Problem) -> dict:
    """A completion as write_credit_page wants it."""
    ids = batch.ids[row, batch.prompt_width :][batch.mask[row]].tolist()
    pieces = [run.tokenizer.decode([i]) for i in ids]
    roles = token_roles(pieces, problem) if problem.steps else [""] * len(ids)
    columns = (c[row, : len(ids)].tolist() for c in (batch.weights, batch.entropy, batch.logp))
    names = ("text", "role", "weight", "entropy", "logp")
    values = zip(pieces, roles, *columns, strict=True)
    facts = {name: getattr(batch, name + "s")[row].item() for name in ("reward", "advantage")}
    facts["truncated"] = batch.truncated[row].item()
    return facts | {"tokens": [dict(zip(names, value, strict=True)) for value in values]}


def credit_group(run: Any, micros: list, problems: dict[int, Problem]) -> list[dict]:
    """The first whole group of a scored rollout whose rewards differ, its best two and its worst
    two, as write_credit_page wants it; [] if there is none. problems: of each row."""
    place = {row: (batch, i) for batch in micros for i, row in enumerate(batch.rows.tolist())}
    size = run.args.num_generations
    for first in range(0, max(place) + 1, size):
        group = [place[row] for row in range(first, first + size) if row in place]
        if len(group) == size and any(batch.advantages[i] != 0 for batch, i in group):
            break
    else:
        return []
    rights = None  # how many are right, where the reward is that and nothing else
    if list(run.reward_funcs) == [ACCURACY]:
        rights = sum(batch.rewards[i].item() > 0 for batch, i in group)
    group.sort(key=lambda member: -member[0].rewards[member[1]].item())
    problem, shown = problems[first], group[:2] + group[-2:] if size > 3 else group
    completions = [_facts(run, batch, row, problem) for batch, row in shown]
    weights = [token["weight"] for completion in completions for token in completion["tokens"]]
    prompt = problem.prompt if isinstance(problem.prompt, str) else problem.prompt[-1]["content"]
    found = {"prompt": prompt, "answer": problem.answer, "step": run.step, "size": size}
    found["note"] = UNIFORM if all(abs(weight - 1) <= 1e-6 for weight in weights) else ""
    return [found | {"correct": rights, "completions": completions}]


# ----------------------------------------------------------------------------- the report
def before_after_table(before: dict, after: dict) -> str:
    """The shares of the first and the last evaluation as an aligned text table: in percent, their
    change in points."""
    lines = [f"{'held-out':20}{'before':>8}{'after':>8}{'change':>8}"]
    for key in before | after:
        old, new = (100 * _real(side.get(key)) for side in (before, after))
        cells = (f"{old:.1f}%", f"{new:.1f}%", f"{new - old:+.1f}")
        shown = ("–" if "nan" in cell else cell for cell in cells)
        lines.append(f"{key.replace('_', ' '):20}" + "".join(f"{cell:>8}" for cell in shown))
    return "\n".join(lines)


def write_model_card(path: str, config: dict, before: dict, after: dict) -> None:
    """README.md (path names the file) of a PEFT adapter; write it after save_pretrained."""
    from huggingface_hub import ModelCard, ModelCardData

    base, credit = config["model_name_or_path"], config["credit"]
    data = ModelCardData(base_model=base, library_name="peft", tags=["grpo", "lora", credit])
    # JSON holds no line break, which could end the block.
    flags = [f"--{key} {json.dumps(_plain(value), default=str)}" for key, value in config.items()]
    facts = {"credit": credit, "table": before_after_table(before, after), "flags": flags}
    card = ModelCard.from_template(data, str(CARD_TEMPLATE), **facts)
    Path(path).write_text(f"{card}\n", encoding="utf-8", errors="replace", newline="\n")


def _write_completions(path: str, groups: list[dict]) -> None:
    with open(path, "w", encoding="utf-8", errors="replace") as file:
        for group in groups:
            for completion in group["completions"]:
                row = {name: group[name] for name in ("step", "prompt", "answer")} | completion
                row["completion"] = "".join(token["text"] for token in row.pop("tokens"))
                file.write(json.dumps(_plain(row)) + "\n")


def report_run(config: dict, log: RunLog, groups: list[dict]) -> str:
    """summary.json, completions.jsonl, curves.png, credit.html and the adapter's card of a run that
    has ended; returns what to print. A file that cannot be written is said on standard error and
    left out; OSError on a full disk."""
    folder, title, rows = Path(config["output_dir"]), config["run_name"], log.rows
    before, after = log.evals[0]["eval"], log.evals[-1]["eval"]
    seconds = round(time.time() - psutil.Process().create_time(), 1)  # of the whole process
    summary = {"before": before, "after": after, "seconds": seconds}
    updates = [row for row in rows if "reward" in row]
    phases = [value for row in updates for key, value in row.items() if key.startswith("seconds_")]
    summary["steps"] = updates[-1]["step"] if updates else 0
    # Without evaluations, checkpoints and start-up, which `seconds` has as well.
    summary["seconds_per_step"] = sum(phases) / max(1, len(updates))
    # Rows of one rollout repeat its figures; its seconds stand in the first alone.
    fresh = [row for row in updates if row["seconds_rollout"] > 0]
    summary["rollout_tokens"] = sum(row["rollout_tokens"] for row in fresh)
    text = json.dumps(_plain(summary), indent=2) + "\n"
    files: dict[str, Callable[[str], None]] = {
        "summary.json": lambda path: Path(path).write_text(text, encoding="utf-8"),
        "completions.jsonl": lambda path: _write_completions(path, groups),
        "adapter/README.md": lambda path: write_model_card(path, config, before, after),
        "curves.png": lambda path: write_curves(path, rows, title),
        "credit.html": lambda path: write_credit_page(path, title, groups),
    }
    failed = set()
    for name, write in files.items():
        try:
            write(str(folder / name))
        except Exception as error:  # matplotlib alone raises a dozen kinds
            if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise  # every other file would fail as well
            failed.add(name)
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
            message = f"{folder / name} is not written, the run goes on: {reason}"
            tqdm.write(message, file=sys.stderr)
    written = [str(folder / name) for name in sorted(os.listdir(folder)) if name not in failed]
    return "\n".join(["", before_after_table(before, after), "", "Written:", *written])
