"""Where each method puts its weight, on the same completions, before and after training.

    python results/decisive_tokens.py                            # the untrained policy
    python results/decisive_tokens.py runs/grpo_oar-oar_g-1      # and the one a run has trained
    python results/decisive_tokens.py runs/smollm2 --problems 16 # a language model on its task

The generator of the embedded task knows which tokens decide the outcome: the digits of every
step's result; and so does a data set that names its steps. Printed for each method, over the
completions of 32 held-out problems (4 samples each; OAR scores those with a boxed answer): the mean
weight on decisive tokens over the mean weight of the completion, the same for the first wrong
token, that token's AUROC (the chance that it weighs more than another token of its completion, 0.5
if the weights knew nothing), the concentration, and for OAR-G the rank correlation (Spearman) of
its scores with OAR-P's over the reasoning; all are means over completions. They are written to
--output, too, and with a run's folder results/data/heatmap.html: one group under every method.
"""

import argparse
import csv
import importlib
import json
import sys
from dataclasses import replace
from pathlib import Path

import torch
import transformers
from peft import set_peft_model_state_dict
from safetensors.torch import load_file

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from common.data import chain_problems, encode_prompt, grade_batch, token_roles
from common.metrics import credit_group, weight_stats, write_credit_page

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
ON_PAGE = ("arca", "oar_p", "oar_g", "s_trace")
SAMPLES = 4
KEPT = (
    "model_name_or_path dataset_name dataset_config dtype lora_r lora_alpha max_completion_length "
    "gradient_checkpointing"
).split()  # flags that a run's policy and task are of


def flags_of(folder: str | None) -> list[str]:
    """Those of the run that left a folder."""
    config = json.loads((Path(folder) / "config.json").read_text()) if folder else {}
    return [f"--{name}={config[name]}" for name in KEPT if config.get(name) is not None]


def held_out(module, flags: list[str], count: int) -> list:
    """Each problem as often as it is sampled."""
    args = module.parse_args([*flags, "--max_eval_samples", str(count)])
    if args.dataset_name == "chain_arithmetic":
        problems = chain_problems(count, held_out=True)  # in the order of the published figures
    else:
        problems = [problem for problem in module.load_data(args)[2][0] if problem.steps]
    return [problem for problem in problems for _ in range(SAMPLES)]


def prepare(module, credit: str, flags: list[str], folder: str | None):
    """A run of one method with the adapter of a folder, or a fresh one."""
    flags = [*flags, "--credit", credit, "--num_generations", str(SAMPLES)]
    flags += ["--rollout_weights", "quantized"]
    args = module.parse_args(flags)
    run = module.build_run(args, module.load_data(args)[0])
    if folder:
        state = load_file(Path(folder) / "adapter/adapter_model.safetensors")
        set_peft_model_state_dict(run.model, state)
    return run


def sample(module, run, problems):
    """A batch of every problem's samples, graded."""
    rows = torch.arange(len(problems))
    prompts = [encode_prompt(run.tokenizer, problem.prompt) for problem in problems]
    u = module.row_uniforms(run.args, "probe", 0, rows, run.args.max_completion_length)
    batch = module.sample(run, rows, prompts, u)
    with run.grader:
        batch.rewards = torch.tensor(grade_batch(run, batch, problems), device=batch.ids.device)
    batch.loss_mask = batch.mask
    return batch


def first_wrong_auroc(weights: torch.Tensor, roles: list[str]) -> float | None:
    """How a completion's weights rank its first wrong token: the share of its other tokens that
    weigh less, ties count half. None where no token is wrong, or there is no other."""
    if "first_wrong" not in roles or len(roles) == 1:
        return None
    place = roles.index("first_wrong")
    others = torch.cat([weights[:place], weights[place + 1 :]])
    less, same = others < weights[place], others == weights[place]
    return (less.double() + 0.5 * same.double()).mean().item()


def spearman(a: torch.Tensor, b: torch.Tensor) -> float:
    ranks = [x.argsort().argsort().double() for x in (a, b)]
    return torch.corrcoef(torch.stack(ranks))[0, 1].item()


def figures(run, batch, problems) -> dict[str, float]:
    """Means over completions: of weights on decisive and first wrong tokens, AUROC, EffN, Gini."""
    found = {"decisive": [], "first_wrong": [], "auroc": []}
    for row, problem in enumerate(problems):
        ids = batch.ids[row, batch.prompt_width :][batch.mask[row]].tolist()
        roles = token_roles([run.tokenizer.decode([i]) for i in ids], problem)
        weights = batch.weights[row][batch.mask[row]]
        for role in ("decisive", "first_wrong"):
            # The first wrong token is one of the decisive ones.
            chosen = torch.tensor([r in (role, "first_wrong") for r in roles])
            if chosen.any():
                found[role].append((weights[chosen].mean() / weights.mean()).item())
        if (auroc := first_wrong_auroc(weights, roles)) is not None:
            found["auroc"].append(auroc)
    means = {name: sum(values) / len(values) for name, values in found.items()}
    stats = weight_stats(batch.weights, batch.mask)
    return means | {name: values.nanmean().item() for name, values in stats.items()}


def measure(folder: str | None, like: str | None, count: int = 32) -> tuple[list[dict], list[dict]]:
    """Prints the table of one policy, on the task of the run that left the folder `like`; returns
    its rows and the page's groups."""
    flags = flags_of(like)
    problems = held_out(importlib.import_module("grpo_arca"), flags, count)
    print(f"\n{folder or 'untrained policy'}")
    print("| credit | decisive | first wrong | its AUROC | EffN/T | Gini | rank with OAR-P |")
    print("|---|---|---|---|---|---|---|")
    scores, rows, groups, sampled = {}, [], [], None
    for name, credit in METHODS:
        module = importlib.import_module(name)
        run = prepare(module, credit, flags, folder)
        sampled = sampled or sample(module, run, problems)
        # Advantage 1: every row is scored.
        batch = replace(sampled, advantages=torch.ones_like(sampled.rewards))
        module.score(run, batch, [batch], {})
        scores[credit], rank = batch.scores, ""
        if credit == "oar_g":
            pairs = zip(scores["oar_p"], scores["oar_g"], strict=True)
            pairs = [(p[p > 0], g[p > 0]) for p, g in pairs if (p > 0).sum() > 3]
            rank = f"{sum(spearman(p, g) for p, g in pairs) / len(pairs):.2f}"
        means = figures(run, batch, problems)
        shown = [f"{means[x]:.2f}" for x in ("decisive", "first_wrong", "auroc", "effn", "gini")]
        print(f"| {' | '.join([credit, *shown, rank])} |", flush=True)
        rows.append({"policy": folder or "untrained", "credit": credit} | means | {"rank": rank})
        if credit in ON_PAGE:
            rewards = batch.rewards.view(-1, SAMPLES)
            batch.advantages = module.group_advantages(rewards, "group").flatten()
            for group in credit_group(run, [batch], dict(enumerate(problems))):
                groups.append(group | {"heading": credit})
    return rows, groups


def main() -> None:
    transformers.logging.disable_progress_bar()
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folders", nargs="*", help="of runs")
    parser.add_argument("--problems", type=int, default=32)
    table = ROOT / "results/data/decisive_tokens.csv"
    parser.add_argument("--output", type=Path, default=table, help="the table")
    options = parser.parse_args()
    rows, _ = measure(None, (options.folders or [None])[0], options.problems)
    for folder in options.folders:
        step = {"step": json.loads((Path(folder) / "summary.json").read_text())["steps"]}
        more, groups = measure(folder, folder, options.problems)
        rows, groups = rows + more, [group | step for group in groups]
        flags = json.loads((Path(folder) / "config.json").read_text())
        title = f"One group under every method (policy trained with {flags['credit']})"
        write_credit_page(str(ROOT / "results/data/heatmap.html"), title, groups)
    with open(options.output, "w", newline="") as file:
        lines = csv.DictWriter(file, rows[0])
        lines.writeheader()
        for row in rows:
            lines.writerow({k: f"{x:.4g}" if isinstance(x, float) else x for k, x in row.items()})


if __name__ == "__main__":
    main()
