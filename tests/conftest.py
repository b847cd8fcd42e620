"""What the trainer's tests share: a policy on the tiny checkpoint, and batches of random rows."""

import os
import sys
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing here may wait for a network
os.environ.setdefault("OMP_NUM_THREADS", "1")  # tiny tensors: threads would only wait
ROOT = Path(__file__).resolve().parents[1]
TINY = str(ROOT / "common/tiny_policy")
sys.path.insert(0, str(ROOT))

import pytest
import torch
from transformers import AutoTokenizer

import grpo_arca as trainer


def randomise_adapter(model, scale: float = 0.05) -> None:
    """B is 0 at the start; most things worth testing need it not to be."""
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data = scale * torch.randn(parameter.shape, generator=generator)


@pytest.fixture
def make_run():
    """make_run(num_generations=4, ...) -> a Run on the tiny policy, with an adapter that acts."""

    def make(module=trainer, model: str = TINY, adapter: float = 0.05, **flags):
        argv = ["--model_name_or_path", model, "--per_device_train_batch_size", "8"]
        argv += ["--num_generations", "4", "--max_completion_length", "24"]
        argv += ["--gradient_accumulation_steps", "1"]
        for name, value in flags.items():
            argv += [f"--{name}", str(value)]
        args = module.parse_args(argv)
        tokenizer = AutoTokenizer.from_pretrained(model)
        run = module.build_run(args, tokenizer, module.Grader())
        randomise_adapter(run.model, adapter)
        if run.dense is not None:
            module.merge(run.model, run.dense)  # as a rollout does
        return run

    return make


def random_batch(
    module=trainer, rows: int = 8, prompt: int = 6, length: int = 12, seed: int = 0, vocabulary=400
):
    """Ragged rows of random tokens: left-padded prompts, right-padded completions."""
    generator = torch.Generator().manual_seed(seed)

    def integers(low, high, *shape):
        return torch.randint(low, high, shape, generator=generator)

    ids = integers(3, vocabulary, rows, prompt + length)
    prompts, lengths = integers(2, prompt + 1, rows), integers(1, length + 1, rows)
    prompts[0], lengths[0] = prompt, length
    place = torch.arange(prompt + length)
    attention = (place >= prompt - prompts[:, None]) & (place < prompt + lengths[:, None])
    noise = torch.randn(rows, length, generator=generator)
    mask = attention[:, prompt:]
    return module.Batch(
        rollout=0,
        prompt_width=prompt,
        rows=torch.arange(rows),
        ids=torch.where(attention, ids, 0),
        attention=attention,
        truncated=torch.zeros(rows, dtype=torch.bool),
        loss_mask=mask,
        sampled_logp=torch.zeros(rows, length),
        rewards=(noise[:, 0] > 0).float(),
        advantages=torch.randn(rows, generator=generator),
        logp=torch.where(mask, -noise.abs(), 0.0),
        base_logp=torch.where(mask, -noise.abs() - 0.1 * noise, 0.0),
        entropy=torch.where(mask, noise.abs(), 0.0),
        scores=torch.where(mask, noise.abs(), 0.0),
        credit=mask.float(),
        weights=mask.float(),
    )
