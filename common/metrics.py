"""What a run leaves behind: numbers (pass@k, weight statistics, metrics.jsonl: METRICS.md explains
it), curves.png, credit.html (every token tinted by its credit weight) and the adapter's model card.
Only torch is heavy here: matplotlib and huggingface_hub are imported where they write."""

import contextlib
import errno
import importlib.metadata
import json
import math
import os
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

from common.data import Problem, completions_of, token_roles
from common.reward import last_boxed

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
    return 1.0 - math.prod(1.0 - k / i for i in range(n - c + 1, n + 1))


@torch.no_grad()
def weight_stats(weights: Tensor, mask: Tensor) -> dict[str, Tensor]:
    """How concentrated the credit is in each completion (ARCA, arXiv 2606.00257), float32 [B] each.

    weights [B, T] >= 0 in any scale, mask [B, T] bool or 0/1; outside it nothing is read, even NaN.
      gini   0 for uniform weights, (n-1)/n for all weight on one of n tokens
      effn   effective number of tokens over their number ("EffN/T"): 1 uniform, 1/n one-hot
    NaN where a completion has n <= 1 tokens or zero total weight: use nanmean."""
    w = torch.where(mask.bool(), weights.double(), 0.0)  # [B, T]; where, not *: NaN * 0 is NaN
    n, total = mask.bool().sum(1), w.sum(1)  # [B]
    p = w.sort(dim=1).values / total[:, None]  # [B, T], the padding's zeros first
    place = torch.arange(w.shape[1], device=w.device) - w.shape[1]  # [T], -1 for the largest
    gini = ((2 * place + n[:, None] + 1) * p).sum(1) / n  # rank n + place + 1, from 1 to n
    stats = {"gini": gini, "effn": 1.0 / (n * p.square().sum(1))}
    valid = (n > 1) & (total > 0) & total.isfinite()
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
def stock_gap(run: Any, batch: Any, logp: Tensor) -> float:
    """Nats between the log-probs of a batch whose rows end together, sampled or recomputed [B, T],
    and those of the model as transformers has it: one row at a time, eager attention, no cache."""
    base, length = run.model.get_base_model(), batch.mask.shape[1]
    attention = base.config._attn_implementation
    base.set_attn_implementation("eager")
    with run.accelerator.autocast():
        rows = [base(ids[real][None]).logits for ids, real in zip(batch.ids, batch.attention)]
    base.set_attn_implementation(attention)
    logits = torch.cat([row[:, -length - 1 : -1] for row in rows]).float() / run.args.temperature
    stock = logits.log_softmax(-1).gather(2, batch.ids[:, -length:, None]).squeeze(2)  # [B, T]
    gaps = torch.stack([batch.sampled_logp - stock, logp - stock])
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


def _means(run: Any, batches: list[dict[str, tuple[Tensor, Tensor]]]) -> dict[str, float]:
    """Means over all processes of pairs (values, what each counts for); none over nothing."""
    sums = 0.0
    for pairs in batches:
        sums += torch.tensor([[(x * w).sum(), w.sum()] for x, w in pairs.values()]).double()
    sums = run.accelerator.reduce(sums.to(run.accelerator.device), "sum").tolist()
    return {name: total / n for name, (total, n) in zip(batches[0], sums, strict=True) if n}


def rollout_metrics(run: Any, batch: Any, seconds: float) -> dict[str, float]:
    """Means over a rollout, all processes, of which this is one's share (grpo_*.py's Batch).
    reward_timeouts: of all processes since they were started."""
    mask, rows = batch.mask, torch.ones_like(batch.rewards)
    averages = {
        "reward": (batch.rewards.nan_to_num(), batch.rewards.isfinite()),
        "completion_length": (mask.sum(1), rows),
        "truncated_share": (batch.truncated, rows),
        "entropy": (batch.entropy, mask),
    }
    result, gather = {"reward": math.nan} | _means(run, [averages]), run.accelerator.gather
    advantages = gather(batch.advantages)[gather(batch.rows).argsort()]
    groups = advantages.view(-1, run.args.num_generations)
    result["reward_timeouts"] = gather(rows.new_tensor([run.grader.timeouts])).sum().item()
    result["zero_std_share"] = (groups == 0).all(1).float().mean().item()
    result["rollout_tokens"] = round(result["completion_length"] * len(advantages))
    return result | {"tokens_per_second": result["rollout_tokens"] / seconds}


def credit_metrics(run: Any, micros: list) -> dict[str, float]:
    """Means over scored micro-batches, all processes: how concentrated the credit is where there is
    an advantage, and the k3 KL of the policy that sampled to the base where its log-probs are.
    peak_memory_gb, so far: GiB of tensors on a GPU, of this process on a CPU."""
    batches = []
    for batch in micros:
        stats, used = weight_stats(batch.weights, batch.mask), batch.advantages != 0
        pairs = {f"weight_{k}": (x.nan_to_num(0.0), x.isfinite() & used) for k, x in stats.items()}
        if len(batch.base_logp) > 0:
            to_base = torch.where(batch.loss_mask, batch.base_logp - batch.sampled_logp, 0.0)
            pairs["kl"] = (to_base.exp() - to_base - 1, batch.loss_mask)
        batches.append(pairs)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # KiB on Linux
    if run.accelerator.device.type == "cuda":
        peak = torch.cuda.max_memory_allocated() / 2**30
    return _means(run, batches) | {"peak_memory_gb": peak}


@contextlib.contextmanager
def timed(metrics: dict, name: str):
    """Adds the seconds that its block takes to a metric, with a GPU's work done."""
    began = time.perf_counter()
    yield
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    metrics[name] = metrics.get(name, 0.0) + time.perf_counter() - began


# ------------------------------------------------------------------------------------ log
def environment() -> dict[str, Any]:
    """What a run's figures depend on besides its flags: the scripts' commit ("-dirty" where files
    differ from it), versions, machine, command line."""
    packages = ("torch", "transformers", "peft", "accelerate", "bitsandbytes")
    cpuinfo = Path("/proc/cpuinfo").read_text()
    hardware = {
        "cpu": cpuinfo.partition("model name\t: ")[2].split("\n")[0] or os.uname().machine,
        "cores": len(os.sched_getaffinity(0)),
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "processes": int(os.environ.get("WORLD_SIZE", "1")),
    }
    versions = {name: importlib.metadata.version(name) for name in packages}
    versions["python"], commit = sys.version.split()[0], None
    with contextlib.suppress(OSError, subprocess.SubprocessError):  # without git
        git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
        git += ["--abbrev=40", "--exclude=*"]  # no tag's name
        quiet = {"stderr": subprocess.DEVNULL, "text": True, "timeout": 10}
        commit = subprocess.check_output(git, **quiet).strip()
    return {"commit": commit, "versions": versions, "hardware": hardware, "command": sys.argv}


def _plain(value: Any) -> Any:
    """Strict JSON: tensors and numpy to numbers, 6 significant digits, non-finite to None."""
    value = value.tolist() if hasattr(value, "tolist") else value  # a scalar gives a number
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    return value


def _flat(row: dict) -> dict:
    """A row with each figure of its evaluation as a figure of its own, "eval/<name>"."""
    evals = {f"eval/{name}": value for name, value in (row.get("eval") or {}).items()}
    return {name: value for name, value in row.items() if name != "eval"} | evals


def _rows_before(path: Path, checkpoint: int) -> list[dict]:
    """Rows of a .jsonl file from before a checkpoint, which is saved before it is evaluated. Lines
    that are none (torn, or somebody's) are left out."""
    rows = []
    for line in path.read_bytes().splitlines() if path.exists() else ():
        with contextlib.suppress(ValueError, TypeError, KeyError):
            row = json.loads(line)
            rows += [row] if row["step"] <= checkpoint - bool(row.get("eval")) else []
    return rows


class RunLog:
    """metrics.jsonl in output_dir, an object for each update and evaluation, and config.json: the
    flags and `environment`. resume_step > 0 keeps the rows from before that checkpoint, here and in
    completions.jsonl. track(figures, step) is called after each row is in the file. output_dir is
    None on all processes but the main one: nothing is written. rows: as written, or loaded."""

    def __init__(self, output_dir: str | None, config: dict, resume_step: int, track: Callable):
        self.rows, self.path, self._track = [], None, track
        if output_dir is None:
            return
        self.path = Path(output_dir) / "metrics.jsonl"
        text = json.dumps(config | {"environment": environment()}, indent=2, default=str)
        self.path.with_name("config.json").write_text(text + "\n", encoding="utf-8")
        for path in (self.path.with_name("completions.jsonl"), self.path):
            self.rows = _rows_before(path, resume_step) if resume_step > 0 else []
            fresh = path.with_suffix(".tmp")  # replaced whole: a crash here loses no row
            fresh.write_text("".join(json.dumps(x) + "\n" for x in self.rows), encoding="utf-8")
            os.replace(fresh, path)

    def write(self, row: dict) -> None:
        """Append one row; it is on its way to the disk when this returns."""
        row = _plain(row)
        self.rows.append(row)
        if self.path is not None:
            with open(self.path, "a", encoding="utf-8") as file:  # closed, so flushed, at each row
                file.write(json.dumps(row, allow_nan=False) + "\n")
            if row.get("eval"):
                shown = "  ".join(f"{name} {_number(x, '.3f')}" for name, x in row["eval"].items())
                tqdm.write(f"step {row['step']:4d}, held out: {shown}")
        figures = _flat(row)
        self._track(figures, figures.pop("step"))


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
    cpu = not torch.cuda.is_available() and torch.backends.cpu.get_cpu_capability()
    slow = cpu == "AVX2" and config["dtype"] == "bfloat16"
    note = ". This CPU has no fast bfloat16: --dtype float32 will do better" if slow else ""
    return (
        f"{config['credit']} credit for {config['model_name_or_path']} ({kind}) on "
        f"{config['dataset_name']} ({len(problems)} problems, {len(held_out)} held out): "
        f"{total // config['num_generations']} prompts x {config['num_generations']} completions "
        f"of at most {config['max_completion_length']} tokens a rollout, {config['max_steps']} "
        f"updates at a learning rate of {config['learning_rate']:g}, into {config['output_dir']}"
    ) + note


def log_completions(run: Any, kind: str, batch: Any, rewards: list) -> None:
    """Appends the first group of a batch to completions.jsonl; kind: train | greedy | sampled."""
    if not run.accelerator.is_main_process:
        return
    step = {"step": run.step + (kind == "train"), "eval": kind != "train", "kind": kind}
    columns = completions_of(run, batch)[1], rewards, batch.truncated.tolist()
    with open(Path(run.args.output_dir) / "completions.jsonl", "a", encoding="utf-8") as file:
        for problem, *facts in list(zip(batch.problems, *columns))[: run.args.num_generations]:
            row = step | {"prompt": problem.prompt, "answer": problem.answer}
            row |= zip(("completion", "reward", "truncated"), facts, strict=True)
            file.write(json.dumps(_plain(row)) + "\n")


def hints(run: Any, metrics: dict[str, float], batch: Any) -> list[str]:
    """What a beginner would not find in the numbers of a rollout."""
    found = []
    if metrics["zero_std_share"] == 1:
        same = f"every group has equal rewards (mean {metrics['reward']:.2f}), so the gradient is 0"
        found.append(f"{same}: take easier or harder problems, or a larger --num_generations")
    if run.rollout > 0:  # the rest is said once
        return found
    if metrics["truncated_share"] > 0.3:
        cut = f"{metrics['truncated_share']:.0%} of completions are cut off before their end"
        found.append(f"{cut}: raise --max_completion_length, or does it never write a stop token?")
    texts = completions_of(run, batch)[1]
    boxes = [last_boxed(text) for text, cut in zip(texts, batch.truncated) if not cut]
    if boxes.count(None) > 0.3 * len(boxes) and ACCURACY in run.reward_funcs:
        how = "ask for one in --system_prompt, or with a worked example (prompts may be messages)"
        found.append(f"{boxes.count(None)} of {len(boxes)} that end have no \\boxed{{}}: {how}")
    if metrics["reward"] == 0:
        cure = "if its form is right, take easier problems or a larger model"
        found.append(f"no completion earns anything. The first one ({cure}): {texts[0][:300]!r}")
    return found


# --------------------------------------------------------------------------------- curves
def _real(value: Any) -> float:
    """A finite number as it is; None, infinities and everything else as NaN."""
    return value if isinstance(value, (int, float)) and math.isfinite(value) else math.nan


def _series(rows: list[dict], key: str) -> tuple[list[float], list[float]]:
    """(steps, values) of the rows that hold a finite number under key."""
    points = [(row["step"], y) for row in rows if not math.isnan(y := _real(row.get(key)))]
    return [x for x, _ in points], [y for _, y in points]


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
        half = max(1, len(y) // 20)  # a centred mean over a tenth of the run, narrower at its ends
        windows = [y[max(0, i - half) : i + half + 1] for i in range(len(y))]
        y = [sum(window) / len(window) for window in windows]
    ax.plot(x, y, color=color, linewidth=2, label=label, marker=dots, markersize=5)
    if right and min(y) >= 0:
        ax.set_ylim(bottom=0)


def write_curves(path: str, rows: list[dict], title: str) -> None:
    """curves.png, 1500 x 850 px, from RunLog.rows. Rows may lack keys or hold None."""
    import matplotlib
    from matplotlib.figure import Figure  # not pyplot: no global figures, no backend switch

    rows = list(map(_flat, rows))
    passes = [(key, key[5:]) for row in rows for key in row if key.startswith("eval/pass@")]
    shaped = _series(rows, "reward") != _series(rows, TRAINED)
    more = [("reward", "reward (right)")] if shaped else passes[-1:]  # there is no room for both
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(15, 8.5), dpi=100, layout="constrained", facecolor="white")
        figure.get_layout_engine().set(w_pad=0.12, h_pad=0.12, wspace=0.03, hspace=0.04)
        figure.suptitle(title, fontsize=18, fontweight="bold", parse_math=False)
        for ax, (name, lines) in zip(figure.subplots(2, 3).flat, PANELS.items()):
            ax.set_title(name, loc="left", fontweight="bold", pad=32)
            shown = lines + (more if "Accuracy" in name else [])
            for (key, label), color in zip(shown, COLOURS):
                _line(ax, rows, key, label, color)
            if not ax.lines:
                ax.set_axis_off()
                ax.text(0.5, 0.5, "not logged", ha="center", color="grey", transform=ax.transAxes)
                continue
            # Above the data, so that it hides none; and a wide one must not narrow its panel.
            legend = ax.legend(loc="lower left", bbox_to_anchor=(-0.02, 0.99), ncols=5)
            legend.set_in_layout(False)
            ax.grid(axis="y")
            ax.locator_params(axis="x", integer=True, nbins=6)
            last = max(row["step"] for row in rows)
            ax.set_xlim(-0.01 * last - 0.5, last * 1.02 + 0.5)
            ax.set_xlabel("step", color="#5f6368")
        figure.savefig(path, format="png")


# ---------------------------------------------------------------------------- credit page
def _visible(value: Any) -> str:
    """Hostile text as the reader sees it: control, bidi and zero-width marks and lone surrogates
    become <U+....>, ASCII's control characters their pictures (U+2400)."""
    hidden = {c for c in str(value) if not c.isprintable() and unicodedata.category(c) != "Zs"}
    marks = {c: chr(0x2400 + ord(c)) if c < " " else f"<U+{ord(c):04X}>" for c in hidden - {"\n"}}
    return str(value).translate(str.maketrans(marks))


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
    columns = (batch.weights, batch.entropy, batch.sampled_logp)
    columns = (column[row, : len(ids)].tolist() for column in columns)
    names = ("text", "role", "weight", "entropy", "logp")
    values = zip(pieces, roles, *columns, strict=True)
    facts = {name: getattr(batch, name + "s")[row].item() for name in ("reward", "advantage")}
    facts["truncated"] = batch.truncated[row].item()
    return facts | {"tokens": [dict(zip(names, value, strict=True)) for value in values]}


def credit_group(run: Any, micros: list) -> list[dict]:
    """The first group of a scored rollout whose rewards differ, its best two and its worst two of
    those here, as write_credit_page wants it; [] if there is none."""
    place = {row: (batch, i) for batch in micros for i, row in enumerate(batch.rows.tolist())}
    useful = [row for row, (batch, i) in place.items() if batch.advantages[i] != 0]
    if not useful:
        return []
    size, (first_batch, i) = run.args.num_generations, place[min(useful)]
    problem = first_batch.problems[i]
    first = min(useful) // size * size
    group = [place[row] for row in range(first, first + size) if row in place]
    rights = None  # how many are right, where the reward is that and nothing else
    if list(run.reward_funcs) == [ACCURACY] and len(group) == size:
        rights = sum(batch.rewards[i].item() > 0 for batch, i in group)
    group.sort(key=lambda member: -member[0].rewards.nan_to_num(-math.inf)[member[1]].item())
    completions = [_facts(run, *member, problem) for member in group[:2] + group[2:][-2:]]
    alike = all(abs(token["weight"] - 1) <= 1e-6 for x in completions for token in x["tokens"])
    prompt = problem.prompt if isinstance(problem.prompt, str) else problem.prompt[-1]["content"]
    found = {"prompt": prompt, "answer": problem.answer, "step": run.step, "size": size}
    note = UNIFORM if alike else ""
    return [found | {"note": note, "correct": rights, "completions": completions}]


# ----------------------------------------------------------------------------- the report
def best_step(rows: list[dict]) -> int | None:
    """Returns the step of the evaluation with the highest sampled accuracy, the first of equals."""
    evaluations = [row for row in rows if row.get("eval")]
    if not evaluations:
        return None
    accuracies = [_real(row["eval"].get("sampled_accuracy")) for row in evaluations]
    return evaluations[accuracies.index(max(accuracies))]["step"]


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

    base, tags = config["model_name_or_path"], ["grpo", "lora", config["credit"]]
    data = ModelCardData(base_model=base, library_name="peft", tags=tags)
    # JSON holds no line break, which could end the block.
    flags = [f"--{key} {json.dumps(_plain(value), default=str)}" for key, value in config.items()]
    facts = {"table": before_after_table(before, after), "flags": flags, "config": config}
    card = ModelCard.from_template(data, str(CARD_TEMPLATE), **facts)
    Path(path).write_text(f"{card}\n", encoding="utf-8", errors="replace", newline="\n")


def report_run(config: dict, log: RunLog, groups: list[dict]) -> str:
    """summary.json, curves.png, credit.html and the adapter's card of a run that has ended; returns
    what to print. A file that cannot be written is said on standard error and left out; OSError on
    a full disk."""
    folder, title, rows = Path(config["output_dir"]), config["run_name"], log.rows
    evals = [row["eval"] for row in rows if row.get("eval")]
    before, after = evals[0], evals[-1]
    updates = [row for row in rows if "reward" in row]
    phases = [value for row in updates for key, value in row.items() if key.startswith("seconds_")]
    # Rows of one rollout repeat its figures; its seconds stand in the first alone.
    fresh = [row for row in updates if _real(row.get("seconds_rollout")) > 0]
    summary = {"before": before, "after": after, "steps": updates[-1]["step"] if updates else 0}
    summary["rollout_tokens"] = sum(row["rollout_tokens"] for row in fresh)
    summary["seconds"] = round(time.time() - psutil.Process().create_time(), 1)  # of the process,
    summary["seconds_per_step"] = sum(phases) / max(1, len(updates))  # and of training alone
    text = json.dumps(_plain(summary), indent=2) + "\n"
    files = {
        "summary.json": lambda path: Path(path).write_text(text, encoding="utf-8"),
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
            tqdm.write(f"{folder / name} is not written, the run goes on: {reason}", sys.stderr)
    written = [str(folder / name) for name in sorted(os.listdir(folder)) if name not in failed]
    return "\n".join(["", before_after_table(before, after), "", "Written:", *written])
