"""Where each method puts its weight, on the same completions, before and after training.

    python results/decisive_tokens.py                            # the untrained policy
    python results/decisive_tokens.py runs/grpo_oar-oar_g-1      # and the one a run has trained

The generator of the embedded task knows which tokens decide the outcome: the digits of every
step's result. Printed for each method, over the completions of 32 held-out problems (4 samples
each; OAR scores those with a boxed answer): the mean weight on decisive tokens over the mean weight
of the completion, the same for the first wrong token, the concentration, and for OAR-G the rank
correlation (Spearman) of its scores with OAR-P's over the reasoning, the mean over completions.
With a run's folder it also writes results/heatmap.html: one group under every method.
"""

import importlib
import json
import sys
from pathlib import Path

import torch
from peft import set_peft_model_state_dict
from safetensors.torch import load_file

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from common.data import chain_problems, encode_prompt, token_roles
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
    flags = ["--credit", credit, "--num_generations", str(SAMPLES), "--rollout_weights", "adapter"]
    args = module.parse_args(flags)
    tokenizer = module.load_data(args)[0]
    run = module.build_run(args, tokenizer, module.Grader())
    if folder:
        state = load_file(Path(folder) / "adapter/adapter_model.safetensors")
        set_peft_model_state_dict(run.model, state)
    return run


def sample(module, run, problems):
    """A batch of every problem's samples, graded; advantage 1 so that every row is scored."""
    rows = torch.arange(len(problems))
    prompts = [encode_prompt(run.tokenizer, problem.prompt) for problem in problems]
    u = module.row_uniforms(run.args, "probe", 0, rows, run.args.max_completion_length)
    out = run.sample(prompts, u, temperature=1.0, top_k=0, top_p=1.0)
    rewards = torch.tensor(run.grade(out.texts(run.tokenizer), problems))
    mask = out.attention[:, out.prompt_width :]
    tensors = {"ids": out.ids, "attention": out.attention, "loss_mask": mask, "rows": rows}
    tensors |= {"truncated": ~out.stopped, "sampled_logp": out.logp, "rewards": rewards}
    return {"rollout": 0, "prompt_width": out.prompt_width, **tensors}


def spearman(a: torch.Tensor, b: torch.Tensor) -> float:
    ranks = [x.argsort().argsort().double() for x in (a, b)]
    return torch.corrcoef(torch.stack(ranks))[0, 1].item()


def measure(folder: str | None) -> list[dict]:
    """Prints the table of one policy; returns the page's groups."""
    problems = [p for p in chain_problems(PROBLEMS, held_out=True) for _ in range(SAMPLES)]
    print(f"\n{folder or 'untrained policy'}")
    print("| credit | decisive | first wrong | EffN/T | Gini | rank correlation with OAR-P |")
    print("|---|---|---|---|---|---|")
    scores, groups, fields = {}, [], None
    for name, credit in METHODS:
        module = importlib.import_module(name)
        run = prepare(module, credit, folder)
        fields = fields or sample(module, run, problems)
        batch = module.Batch(**fields, advantages=torch.ones(len(problems)))
        module.score(run, batch, True)
        mask, shares = batch.mask, {"decisive": [], "first_wrong": []}
        for row in range(len(problems)):
            ids = batch.ids[row, batch.prompt_width :][mask[row]].tolist()
            pieces = [run.tokenizer.decode([i]) for i in ids]
            roles = token_roles(pieces, problems[row])
            weights = batch.weights[row][mask[row]]
            for role, values in shares.items():
                # The first wrong token is one of the decisive ones.
                chosen = torch.tensor([r in (role, "first_wrong") for r in roles])
                if chosen.any():
                    values.append((weights[chosen].mean() / weights.mean()).item())
        scores[credit], rank = batch.scores, ""
        if credit == "oar_g":
            pairs = zip(scores["oar_p"], scores["oar_g"], strict=True)
            pairs = [(p[p > 0], g[p > 0]) for p, g in pairs if (p > 0).sum() > 3]
            rank = f"{sum(spearman(p, g) for p, g in pairs) / len(pairs):.2f}"
        stats = {k: v.nanmean().item() for k, v in weight_stats(batch.weights, mask).items()}
        decisive, wrong = (sum(v) / len(v) for v in shares.values())
        print(
            f"| {credit} | {decisive:.2f} | {wrong:.2f} | {stats['effn']:.2f} | "
            f"{stats['gini']:.2f} | {rank} |",
            flush=True,
        )
        mean, std = (f(fields["rewards"].view(-1, SAMPLES), 1) for f in (torch.mean, torch.std))
        advantages = (fields["rewards"].view(-1, SAMPLES) - mean[:, None]) / (std[:, None] + 1e-4)
        batch.advantages = advantages.flatten()
        group = credit_group(run.tokenizer, batch, problems, SAMPLES, 0)
        for part in group if credit in ON_PAGE else []:
            groups.append(part | {"prompt": f"[{credit}] {part['prompt']}"})
        run.grader.close()
    return groups


def main() -> None:
    measure(None)
    for folder in sys.argv[1:]:
        groups = measure(folder)
        flags = json.loads((Path(folder) / "config.json").read_text())
        title = f"One group under every method (policy trained with {flags['credit']})"
        write_credit_page(str(ROOT / "results/heatmap.html"), title, groups)


if __name__ == "__main__":
    main()
