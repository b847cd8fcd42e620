"""Where each method puts its weight, on the same completions, before and after training.

    python results/decisive_tokens.py                            # the untrained policy
    python results/decisive_tokens.py runs/grpo_oar-oar_g-1      # and the one a run has trained

The generator of the embedded task knows which tokens decide the outcome: the digits of every
step's result. Printed for each method, over the completions of 32 held-out problems (4 samples
each; OAR scores those with a boxed answer): the mean weight on decisive tokens over the mean weight
of the completion, the same for the first wrong token, that token's AUROC (the chance that it weighs
more than another token of its completion, 0.5 if the weights knew nothing), the concentration, and
for OAR-G the rank correlation (Spearman) of its scores with OAR-P's over the reasoning; all are
means over completions. With a run's folder it also writes results/heatmap.html: one group under
every method.
"""

import importlib
import json
import sys
from dataclasses import replace
from pathlib import Path

import torch
from peft import set_peft_model_state_dict
from safetensors.torch import load_file

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from common.data import chain_problems, encode_prompt, grade_batch, token_roles
from common.metrics import credit_group, weight_stats, write_credit_page

METHODS = [
    ("grpo_arca", "arca"),
    ("grpo_arca", "surprisal"),
    ("grpo_arca", "entropy_reduction"),
    ("grpo_arca", "divergence"),
    ("grpo_oar", "oar_p"),
    ("grpo_oar", "oar_g"),
    ("grpo_strace", "p_trace"),
    ("grpo_strace", "s_trace"),
]
ON_PAGE = ("arca", "oar_p", "oar_g", "s_trace")
SAMPLES, PROBLEMS = 4, 32


def prepare(module, credit: str, folder: str | None):
    """A run of one method with the adapter of a folder, or a fresh one."""
    flags = ["--credit", credit, "--num_generations", str(SAMPLES)]
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


def measure(folder: str | None) -> list[dict]:
    """Prints the table of one policy; returns the page's groups."""
    problems = [p for p in chain_problems(PROBLEMS, held_out=True) for _ in range(SAMPLES)]
    print(f"\n{folder or 'untrained policy'}")
    print("| credit | decisive | first wrong | its AUROC | EffN/T | Gini | rank with OAR-P |")
    print("|---|---|---|---|---|---|---|")
    scores, groups, sampled = {}, [], None
    for name, credit in METHODS:
        module = importlib.import_module(name)
        run = prepare(module, credit, folder)
        sampled = sampled or sample(module, run, problems)
        # Advantage 1: every row is scored.
        batch = replace(sampled, advantages=torch.ones_like(sampled.rewards))
        module.score(run, [batch], {})
        scores[credit], rank = batch.scores, ""
        if credit == "oar_g":
            pairs = zip(scores["oar_p"], scores["oar_g"], strict=True)
            pairs = [(p[p > 0], g[p > 0]) for p, g in pairs if (p > 0).sum() > 3]
            rank = f"{sum(spearman(p, g) for p, g in pairs) / len(pairs):.2f}"
        means = figures(run, batch, problems)
        shown = [f"{means[x]:.2f}" for x in ("decisive", "first_wrong", "auroc", "effn", "gini")]
        print(f"| {' | '.join([credit, *shown, rank])} |", flush=True)
        if credit in ON_PAGE:
            rewards = batch.rewards.view(-1, SAMPLES)
            batch.advantages = module.group_advantages(rewards, "group").flatten()
            for group in credit_group(run, [batch], dict(enumerate(problems))):
                groups.append(group | {"heading": credit})
    return groups


def main() -> None:
    measure(None)
    for folder in sys.argv[1:]:
        step = {"step": json.loads((Path(folder) / "summary.json").read_text())["steps"]}
        groups = [group | step for group in measure(folder)]
        flags = json.loads((Path(folder) / "config.json").read_text())
        title = f"One group under every method (policy trained with {flags['credit']})"
        write_credit_page(str(ROOT / "results/heatmap.html"), title, groups)


if __name__ == "__main__":
    main()
