"""Shows where each method puts its weight, on the same completions, before and after training.

    python results/decisive_tokens.py runs/default

If the steps of a solution are known, as in the embedded task, so are the tokens that decide: the
digits of every step's result. For each method, the table has means over 4 completions of each
held-out problem, by the untrained policy and by that of a run's folder:

    result               mean weight of a result digit, over the mean weight of the completion
    first_wrong          the same for the first wrong token
    auroc                of the first wrong token: the share of the other tokens of its completion
                         that weigh less; 0.5 if the weights know nothing
    auroc_among_results  the share of the other result digits that weigh less
    gini, effn           how concentrated the weights are
    wrong                how many completions have a wrong token

The table is results/data/decisive_tokens/table.csv.
"""

import argparse
import importlib
import json
import sys
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch
from studies import write_csv
from torch import Tensor

from common.credit import weight_stats
from common.task import token_roles

METHODS = {  # --credit -> its script
    "arca": "grpo_arca",
    "surprisal": "grpo_arca",
    "entropy_reduction": "grpo_arca",
    "divergence": "grpo_arca",
    "oar_p": "grpo_oar",
    "oar_g": "grpo_oar",
    "s_trace": "grpo_strace",
}
SAMPLES = 4  # of each of 200 problems
AT_ONCE = 128  # completions that are scored together
KEPT_FLAGS = (  # those of a run on which its policy and its task depend
    "model_name_or_path", "model_revision", "load_in_4bit", "dtype", "gradient_checkpointing",
    "dataset_name", "dataset_config", "dataset_train_split", "dataset_test_split",
    "eval_dataset_name", "prompt_column", "answer_column", "system_prompt", "chat_template_kwargs",
    "max_completion_length", "temperature", "top_p",
)  # fmt: skip


# ---- Policies and completions --------------------------------------------------------------------
def flags_of(folder: Path) -> list[str]:
    """Returns those flags of the run in a folder that another run must share."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    flags = [f"--{name}={config[name]}" for name in KEPT_FLAGS if config[name] is not None]
    return [*flags, f"--num_generations={SAMPLES}", "--max_eval_samples=200"]


def sample(run: Any, module: Any) -> Any:
    """Returns a graded batch of samples of the held-out problems, all of which count."""
    problems = []
    for problem in run.held_out:
        problems += [problem] * SAMPLES
    rows = torch.arange(len(problems))
    length = run.args.max_completion_length
    draws = module.row_draws(run.args.seed, "probe", 0, rows, length, SAMPLES)
    batch = module.sample(run, rows, problems, draws, 0, run.reward_funcs, {})
    return replace(batch, advantages=torch.ones(len(rows)), loss_mask=batch.mask)


def scored(flags: list[str]) -> dict[str, list[Any]]:
    """Returns, for each method, the same samples in parts that have its weights."""
    parts: dict[str, list[Any]] = {}
    batch = None
    for credit, script in METHODS.items():
        module = importlib.import_module(script)
        run = module.Run(module.parse_args([*flags, "--credit", credit]))
        batch = batch or sample(run, module)
        rows = torch.arange(len(batch.rows)).split(AT_ONCE)
        parts[credit] = [batch.select(some).trimmed() for some in rows]
        module.score(run, batch, parts[credit], {})
        for part in parts[credit]:
            part.pieces = [[run.tokenizer.decode([i]) for i in ids] for ids in part.completion_ids]
    return parts


# ---- Figures -------------------------------------------------------------------------------------
def auroc(weight: Tensor, others: Tensor) -> float:
    """Returns the share of other weights that are below a weight. Ties count half."""
    return ((others < weight).double() + 0.5 * (others == weight).double()).mean().item()


def figures(weights: Tensor, roles: list[str]) -> dict[str, float]:
    """Returns the figures of a completion, from the weights and roles of its tokens.

    Without a wrong token, the figures of the first one are missing.
    """
    is_first_wrong = torch.tensor([role == "first_wrong" for role in roles])
    is_result = torch.tensor([role == "result" for role in roles])
    is_decisive = is_result | is_first_wrong
    found = {}
    if is_decisive.any():
        found["result"] = (weights[is_decisive].mean() / weights.mean()).item()
    if is_first_wrong.any():
        weight = weights[is_first_wrong]
        found["first_wrong"] = (weight / weights.mean()).item()
        found["auroc"] = auroc(weight, weights[~is_first_wrong])
        if is_result.any():
            found["auroc_among_results"] = auroc(weight, weights[is_result])
    return found


def table_row(parts: list[Any]) -> dict[str, float]:
    """Returns the means over the completions of scored parts."""
    found: dict[str, list[float]] = {}
    for part in parts:
        for row, problem in enumerate(part.problems):
            roles = token_roles(part.pieces[row], problem)
            for name, value in figures(part.weights[row][part.mask[row]], roles).items():
                found.setdefault(name, []).append(value)
        for name, values in weight_stats(part.weights, part.mask).items():
            found.setdefault(name, []).extend(values.tolist())
    means = {name: mean(values) for name, values in found.items()}
    return means | {"wrong": len(found["first_wrong"])}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="of a run")
    options = parser.parse_args()
    flags = flags_of(options.folder)
    trained = [*flags, f"--start_adapter={options.folder / 'adapter'}"]
    rows: list[dict[str, Any]] = []
    for policy, own_flags in (("untrained", flags), ("trained", trained)):
        for credit, parts in scored(own_flags).items():
            rows.append({"policy": policy, "credit": credit} | table_row(parts))
            print(rows[-1], flush=True)
    write_csv(rows, ROOT / "results/data/decisive_tokens/table.csv")


if __name__ == "__main__":
    main()
