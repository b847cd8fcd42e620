"""How much of ARCA's score is rounding when the policy computes in bf16, as it does on a GPU.

    python results/arca_precision.py            # on a CPU, minutes; writes arca_precision.csv

A Qwen3-shaped policy of random weights (NF4 + LoRA of rank 16) takes updates with random advantages
at a learning rate with ten steps of warm-up. After some of them ARCA's residual of the same tokens
is computed in fp32 and under bf16 autocast. Printed: the rank correlation (Spearman) of the two
over a completion's tokens, mean and standard deviation over completions, beside what a run logs,
`residual_in_roundings`: the median residual in units of what rounding h to bf16 may change,
eps * || h ||.
"""

import csv
import sys
import tempfile
from pathlib import Path

import torch
import transformers
from transformers import AutoTokenizer, Qwen3Config

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import grpo_arca as trainer
from common.metrics import weight_stats

STEPS = (2, 11, 25)
RATES = (5e-6, 1e-5, 1e-4)
ROWS, PROMPT, LENGTH = 8, 16, 48


def make_policy(folder: str) -> None:
    """A checkpoint of random weights, 2,048 wide, as Qwen3-1.7B is, and 2 layers deep."""
    config = Qwen3Config(
        vocab_size=448, hidden_size=2048, intermediate_size=6144, num_hidden_layers=2,
        num_attention_heads=16, num_key_value_heads=8, head_dim=128, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(
        folder
    )
    AutoTokenizer.from_pretrained(trainer.TINY_POLICY).save_pretrained(folder)


def random_micro(seed: int) -> trainer.Batch:
    """Completions of random tokens with random advantages."""
    stream = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 448, (ROWS, PROMPT + LENGTH), generator=stream)
    mask = torch.ones(ROWS, LENGTH, dtype=torch.bool)
    return trainer.Batch(
        rows=torch.arange(ROWS), prompt_width=PROMPT, ids=ids, loss_mask=mask, credit=mask.float(),
        attention=torch.ones_like(ids, dtype=torch.bool), truncated=torch.zeros(ROWS).bool(),
        sampled_logp=torch.zeros(ROWS, LENGTH), advantages=torch.randn(ROWS, generator=stream),
    )  # fmt: skip


@torch.no_grad()
def residual(run: trainer.Run, micro: trainer.Batch, bf16: bool) -> tuple[torch.Tensor, float]:
    """ARCA's scores [B, T], and the median of the residual over what rounding may change."""
    for module in run.model.modules():
        if hasattr(module, "compute_dtype"):  # of bitsandbytes' layers
            module.compute_dtype = torch.bfloat16 if bf16 else torch.float32
    run.policy.eval()
    with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        adapted = run.policy(micro).hidden.float()
        with run.model.disable_adapter():
            base = run.policy(micro).hidden.float()
    scores = torch.linalg.vector_norm(adapted - base, dim=-1)
    unit = torch.finfo(torch.bfloat16).eps * torch.linalg.vector_norm(base, dim=-1)
    return scores, (scores / unit).median().item()


def spearman(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Rank correlation [B] of two [B, T]."""
    ranks = [x.argsort(1).argsort(1).double() - (x.shape[1] - 1) / 2 for x in (a, b)]
    return (ranks[0] * ranks[1]).sum(1) / ranks[0].square().sum(1)


def measure(folder: str, rate: float) -> list[dict]:
    flags = ["--model_name_or_path", folder, "--learning_rate", str(rate), "--warmup_steps", "10"]
    flags += ["--max_steps", "1000", "--lora_r", "16", "--lora_alpha", "32"]
    args = trainer.parse_args([*flags, "--gradient_accumulation_steps", "1"])
    run, found = trainer.build_run(args, AutoTokenizer.from_pretrained(folder)), []
    for step in range(1, max(STEPS) + 1):
        trainer.update(run, [random_micro(step)])
        if step in STEPS:
            micro = random_micro(0)
            (exact, _), (rounded, units) = (residual(run, micro, bf16) for bf16 in (False, True))
            ranks, mask = spearman(exact, rounded), torch.ones_like(exact)
            effn = [weight_stats(x, mask)["effn"].mean().item() for x in (exact, rounded)]
            found.append(
                {"learning_rate": rate, "step": step, "rank_correlation": ranks.mean().item()}
            )
            found[-1] |= {"std": ranks.std().item(), "residual_in_roundings": units}
            found[-1] |= {"effn_fp32": effn[0], "effn_bf16": effn[1]}
            print(" ".join(f"{name} {value:.3g}" for name, value in found[-1].items()), flush=True)
    return found


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        make_policy(folder)
        rows = [row for rate in RATES for row in measure(folder, rate)]
    with open(ROOT / "results/arca_precision.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    main()
