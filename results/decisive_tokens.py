"""Shows where each method puts its weight, on the same completions, before and after training.

    python results/decisive_tokens.py                            # the untrained policy
    python results/decisive_tokens.py runs/grpo_oar-oar_g-1      # and the one a run has trained
    python results/decisive_tokens.py runs/smollm2 --problems 16 # a language model on its task
    python results/decisive_tokens.py runs/smollm2 --problems 8 --picture    # methods.png

The generator of the embedded task knows which tokens decide the outcome: the digits of every
step's result. So does a data set that names its steps. The table has, for each method, means over
the completions of 32 held-out problems, 4 samples each (OAR scores those with a boxed answer):

    decisive      mean weight on decisive tokens, over the mean weight of the completion
    first_wrong   the same for the first wrong token
    auroc         of the first wrong token: the share of the other tokens of its completion that
                  weigh less; 0.5 if the weights knew nothing
    gini, effn    how concentrated the weights are
    rank          Spearman's rank correlation of OAR-G's scores with OAR-P's over the reasoning

It is written to --output. With a run's folder, results/data/decisive_tokens/heatmap.html shows one
group under every method. With --picture, nothing but methods.png is written, to the same folder:
the first wrong completion of the policy of the (last) run, under four methods.
"""

import argparse
import importlib
import json
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
import transformers
from learning_curves import write_table
from peft import set_peft_model_state_dict
from safetensors.torch import load_file
from torch import Tensor

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]

from precision import spearman

from common.credit_page import credit_group, write_credit_page
from common.data import encode_prompt, grade_batch, token_texts
from common.metrics import weight_stats
from common.problems import Problem, chain_problems, token_roles

DATA = ROOT / "results/data/decisive_tokens"
METHODS = [
    ("grpo_arca", "arca"),
    ("grpo_arca", "surprisal"),
    ("grpo_arca", "probability"),
    ("grpo_arca", "entropy_reduction"),
    ("grpo_arca", "divergence"),
    ("grpo_oar", "oar_p"),
    ("grpo_oar", "oar_g"),
    ("grpo_strace", "p_trace"),
    ("grpo_strace", "s_trace"),
]
TITLES = {  # of the methods on the page and in the picture
    "arca": "ARCA: how far has the adapter moved the policy here?",
    "oar_p": "OAR-P: how does the answer change if this token is replaced?",
    "oar_g": "OAR-G: how does the answer change with this token's embedding?",
    "s_trace": "S-trace: which later tokens does its ratio reach?",
}
SAMPLES = 4  # of a problem
KEPT_FLAGS = [  # of a run: those that its policy and its task depend on
    "model_name_or_path",
    "dataset_name",
    "dataset_config",
    "dtype",
    "lora_r",
    "lora_alpha",
    "max_completion_length",
    "gradient_checkpointing",
]
NARROWEST = 60  # characters in a line of the picture
WIDEST = 92
FULL_TINT = 3.0  # the weight that has it


class Study(NamedTuple):
    """What is measured of one policy."""

    rows: list[dict[str, Any]]  # of the table, one for each method
    groups: list[dict[str, Any]]  # for the page, one for each method in TITLES


# ---- Policies and completions --------------------------------------------------------------------
def flags_of(folder: str | None) -> list[str]:
    """Returns the flags of the run that left a folder, as far as another run must share them."""
    if folder is None:
        return []
    config = json.loads((Path(folder) / "config.json").read_text())
    return [f"--{name}={config[name]}" for name in KEPT_FLAGS if config.get(name) is not None]


def held_out(module: ModuleType, flags: list[str], count: int) -> list[Problem]:
    """Returns held-out problems, each as often as it is sampled."""
    args = module.parse_args([*flags, "--max_eval_samples", str(count)])
    if args.dataset_name == "chain_arithmetic":
        problems = chain_problems(count, held_out=True)  # in the order of the published figures
    else:
        _, _, (eval_problems, _) = module.load_data(args)
        problems = [problem for problem in eval_problems if problem.steps]
    repeated = []
    for problem in problems:
        repeated += [problem] * SAMPLES
    return repeated


def prepare(module: ModuleType, credit: str, flags: list[str], folder: str | None) -> Any:
    """Returns a run of one method with the adapter of a folder, or a new one."""
    flags = [*flags, "--credit", credit, "--num_generations", str(SAMPLES)]
    flags += ["--rollout_weights", "quantized"]
    args = module.parse_args(flags)
    tokenizer, _, _ = module.load_data(args)
    run = module.build_run(args, tokenizer)
    if folder is not None:
        weights = load_file(Path(folder) / "adapter/adapter_model.safetensors")
        set_peft_model_state_dict(run.model, weights)
    return run


def sample(module: ModuleType, run: Any, problems: list[Problem]) -> Any:
    """Returns a graded batch of every problem's samples."""
    rows = torch.arange(len(problems))
    prompts = [encode_prompt(run.tokenizer, problem.prompt) for problem in problems]
    length = run.args.max_completion_length
    uniforms = module.row_uniforms(run.args, "probe", 0, rows, length)
    batch = module.sample(run, rows, prompts, uniforms)
    batch.problems = problems
    with run.grader:
        grades = grade_batch(run, batch)
    batch.rewards = torch.tensor(grades, device=batch.ids.device)
    batch.loss_mask = batch.mask
    return batch


# ---- Figures -------------------------------------------------------------------------------------
def first_wrong_auroc(weights: Tensor, roles: list[str]) -> float | None:
    """Returns the share of a completion's other tokens that weigh less than its first wrong one.

    Ties count half. Returns None where no token is wrong, or where there is no other.
    """
    if "first_wrong" not in roles or len(roles) == 1:
        return None
    place = roles.index("first_wrong")
    others = torch.cat([weights[:place], weights[place + 1 :]])
    is_less = (others < weights[place]).double()
    is_same = (others == weights[place]).double()
    return (is_less + 0.5 * is_same).mean().item()


def mean_rank(oar_p: Tensor, oar_g: Tensor) -> float:
    """Returns the mean rank correlation of two scores [B, T] over completions."""
    correlations = []
    for p, g in zip(oar_p, oar_g, strict=True):
        is_scored = p > 0
        if is_scored.sum() > 3:
            correlations.append(spearman(p[is_scored], g[is_scored]))
    return sum(correlations) / len(correlations)


def figures(run: Any, batch: Any) -> dict[str, float]:
    """Returns means over completions: weights on decisive and first wrong tokens, AUROC, and more.

    The others are those of `weight_stats`: the Gini coefficient and the effective number of tokens.
    """
    found: dict[str, list[float]] = {"decisive": [], "first_wrong": [], "auroc": []}
    for row, problem in enumerate(batch.problems):
        mask = batch.mask[row]
        ids = batch.ids[row, batch.prompt_width :][mask].tolist()
        roles = token_roles(token_texts(run.tokenizer, ids), problem)
        weights = batch.weights[row][mask]
        for name in ("decisive", "first_wrong"):
            # The first wrong token is one of the decisive ones.
            is_chosen = torch.tensor([role in (name, "first_wrong") for role in roles])
            if is_chosen.any():
                found[name].append((weights[is_chosen].mean() / weights.mean()).item())
        auroc = first_wrong_auroc(weights, roles)
        if auroc is not None:
            found["auroc"].append(auroc)
    means = {name: sum(values) / len(values) for name, values in found.items()}
    for name, values in weight_stats(batch.weights, batch.mask).items():
        means[name] = values.nanmean().item()
    return means


def measure(folder: str | None, task_of: str | None, count: int = 32) -> Study:
    """Measures the policy of a run, or a new one, on the task of another run. Prints its table."""
    flags = flags_of(task_of)
    problems = held_out(importlib.import_module("grpo_arca"), flags, count)
    print(f"\n{folder or 'untrained policy'}")
    print("| credit | decisive | first wrong | its AUROC | EffN/T | Gini | rank with OAR-P |")
    print("|---|---|---|---|---|---|---|")
    study = Study([], [])
    scores: dict[str, Tensor] = {}
    sampled = None
    for script, credit in METHODS:
        module = importlib.import_module(script)
        run = prepare(module, credit, flags, folder)
        if sampled is None:
            sampled = sample(module, run, problems)
        # With an advantage of 1 every row is scored.
        batch = replace(sampled, advantages=torch.ones_like(sampled.rewards))
        module.score(run, batch, [batch], {})
        scores[credit] = batch.scores

        means = figures(run, batch)
        rank = ""
        if credit == "oar_g":
            rank = f"{mean_rank(scores['oar_p'], scores['oar_g']):.2f}"
        names = ("decisive", "first_wrong", "auroc", "effn", "gini")
        cells = [credit, *(f"{means[name]:.2f}" for name in names), rank]
        print(f"| {' | '.join(cells)} |", flush=True)
        policy = folder or "untrained"
        study.rows.append({"policy": policy, "credit": credit} | means | {"rank": rank})

        if credit in TITLES:
            rewards = batch.rewards.view(-1, SAMPLES)
            batch.advantages = module.group_advantages(rewards, "group").flatten()
            groups = credit_group(run, [batch])
            study.groups.extend(group | {"heading": credit} for group in groups)
    return study


# ---- Files ---------------------------------------------------------------------------------------
def write_page(folder: str, groups: list[dict[str, Any]]) -> None:
    """Writes heatmap.html: one group of a run's policy under every method."""
    steps = json.loads((Path(folder) / "summary.json").read_text())["steps"]
    credit = json.loads((Path(folder) / "config.json").read_text())["credit"]
    title = f"One group under every method (policy trained with {credit})"
    shown = [group | {"step": steps} for group in groups]
    write_credit_page(str(DATA / "heatmap.html"), title, shown)


def draw_completion(axis: Any, title: str, tokens: list[dict[str, Any]], columns: int) -> None:
    """Draws a completion as lines of monospaced text, each token on its tint."""
    import matplotlib.pyplot as plt

    axis.set_xlim(0, columns)
    axis.set_ylim(-1.3, 1.2)
    axis.axis("off")
    axis.text(0, 0.75, title, fontsize=12, fontweight="bold")
    x = 0
    y = 0.0
    for token in tokens:
        text = token["text"].replace("\n", " ")
        if x + len(text) > columns:
            x = 0
            y -= 0.8
        tint = min(token["weight"] / FULL_TINT, 1.0)
        box = plt.Rectangle(
            (x, y - 0.27), len(text), 0.68, color="#D55E00", alpha=tint, linewidth=0
        )
        axis.add_patch(box)
        for i, character in enumerate(text):
            axis.text(x + i + 0.5, y, character, family="monospace", fontsize=11, ha="center")
        if token["role"] == "first_wrong":
            axis.plot([x, x + len(text)], [y - 0.3, y - 0.3], color="black", linewidth=2)
        x += len(text)


def draw_picture(groups: list[dict[str, Any]], path: Path) -> None:
    """Draws the first wrong completion under the methods of TITLES."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    group_of = {group["heading"]: group for group in groups}
    tokens_of = {}
    for credit in TITLES:
        completions = group_of[credit]["completions"]
        wrong = next(completion for completion in completions if completion["reward"] == 0)
        tokens_of[credit] = [t for t in wrong["tokens"] if not t["text"].startswith("<|")]
    length = sum(len(token["text"]) for token in tokens_of["arca"])
    columns = max(NARROWEST, min(WIDEST, length))

    figure, axes = plt.subplots(len(TITLES), 1, figsize=(0.12 * columns, 4.4))
    for axis, (credit, title) in zip(axes, TITLES.items(), strict=True):
        draw_completion(axis, title, tokens_of[credit], columns)
    prompt = group_of["arca"]["prompt"]
    answer = group_of["arca"]["answer"]
    figure.suptitle(f"{prompt}  (right: {answer})", x=0.02, ha="left")
    figure.tight_layout(rect=(0, 0, 1, 0.98))
    figure.savefig(path, dpi=100)
    print(f"wrote {path.relative_to(ROOT)}")


def main() -> None:
    transformers.logging.disable_progress_bar()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folders", nargs="*", help="of runs")
    parser.add_argument("--problems", type=int, default=32)
    parser.add_argument("--output", type=Path, default=DATA / "table.csv", help="the table")
    parser.add_argument("--picture", action="store_true", help="draw methods.png, write no table")
    options = parser.parse_args()
    if options.picture:
        if not options.folders:
            sys.exit("decisive_tokens.py: --picture needs the folder of a run")
        folder = options.folders[-1]
        draw_picture(measure(folder, folder, options.problems).groups, DATA / "methods.png")
        return

    first = options.folders[0] if options.folders else None
    rows = measure(None, first, options.problems).rows
    for folder in options.folders:
        study = measure(folder, folder, options.problems)
        rows += study.rows
        write_page(folder, study.groups)
    write_table(rows, options.output)


if __name__ == "__main__":
    main()
