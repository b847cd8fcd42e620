"""What the trainer's tests share: a policy on the tiny checkpoint, and batches of random rows."""

import functools
import json
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing here may wait for a network
os.environ.setdefault("OMP_NUM_THREADS", "1")  # tiny tensors: threads would only wait
ROOT = Path(__file__).resolve().parents[1]
TINY = str(ROOT / "common/tiny_policy")
sys.path.insert(0, str(ROOT))

import pytest
import torch
from accelerate.state import AcceleratorState
from transformers import AutoTokenizer

import common.metrics
import grpo_arca as trainer


def randomise_adapter(model, scale: float = 0.05) -> None:
    """B is 0 at the start; most things worth testing need it not to be."""
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.copy_(scale * torch.randn(parameter.shape, generator=generator))


@pytest.fixture(scope="session")
def make_run():
    """make_run(num_generations=4, ...) -> a Run on the tiny policy, with an adapter that acts."""

    def make(module=trainer, model: str = TINY, adapter: float = 0.05, **flags):
        argv = ["--model_name_or_path", model, "--per_device_train_batch_size", "8"]
        argv += ["--num_generations", "4", "--max_completion_length", "24"]
        argv += ["--gradient_accumulation_steps", "1"]
        for name, value in flags.items():
            argv += [f"--{name}", str(value)]
        args = module.parse_args(argv)
        AcceleratorState._reset_state()  # it would refuse another --dtype than the one before
        run = module.build_run(args, AutoTokenizer.from_pretrained(model))
        randomise_adapter(run.model, adapter)
        return run

    return make


def unscored(batch, module=trainer):
    """The batch as it is before `score`."""
    names = ("old_logp", "base_logp", "scores", "credit", "weights")
    return replace(batch, **dict.fromkeys(names, module.NOT_SET))


TINY_RUN = {
    "max_steps": 3, "per_device_train_batch_size": 8, "gradient_accumulation_steps": 1,
    "num_generations": 4, "max_completion_length": 8, "max_eval_samples": 2, "warmup_steps": 1,
    "num_generations_eval": 1, "eval_steps": 0,
}  # fmt: skip


@functools.cache
def embedded_data(*flags: tuple[str, object], load=trainer.load_data):
    """`load_data` of the embedded task: 4,096 problems and prompts, which no test writes to."""
    return load(trainer.Args(**dict(flags)))


def load_data_once(args: trainer.Args, load=trainer.load_data):
    """`load_data`, of the embedded task from memory."""
    if args.dataset_name != trainer.Args.dataset_name or args.eval_dataset_name:
        return load(args)
    names = "model_name_or_path model_revision seed max_eval_samples max_completion_length "
    names += "dataset_config system_prompt chat_template_kwargs"
    return embedded_data(*((name, getattr(args, name)) for name in names.split()))


@pytest.fixture
def run_main(monkeypatch, tmp_path, capfd):
    """run_main(max_steps=4, ...) -> (exit code, stdout, stderr) of grpo_arca.py, in this process;
    its files are in tmp_path/out. The curves, which take a second and are tested elsewhere, are not
    drawn, and the embedded task is read once."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(common.metrics, "write_curves", lambda *_: None)
    monkeypatch.setattr(trainer, "load_data", load_data_once)

    def start(**flags) -> tuple[int, str, str]:
        flags = TINY_RUN | {"output_dir": "out"} | flags
        argv = [f"--{name}={value}" for name, value in flags.items()]
        monkeypatch.setattr(sys, "argv", ["grpo_arca.py", *argv])
        AcceleratorState._reset_state()  # as in a process of its own
        code = 0
        try:
            trainer.main()
        except SystemExit as stop:
            code = stop.code
        return code, *capfd.readouterr()

    yield start
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.fixture
def rows_of(tmp_path):
    """rows_of() -> the rows of updates in the metrics.jsonl of `run_main`."""

    def read() -> list[dict]:
        lines = (tmp_path / "out/metrics.jsonl").read_text().splitlines()
        return [row for row in map(json.loads, lines) if "reward" in row]

    return read


def random_batch(
    module=trainer, rows: int = 8, prompt: int = 6, length: int = 12, seed: int = 0, vocabulary=400
):
    """Ragged rows of random tokens: left-padded prompts, of which two rows each have the same, and
    right-padded completions."""
    generator = torch.Generator().manual_seed(seed)

    def integers(low, high, *shape):
        return torch.randint(low, high, shape, generator=generator)

    ids = integers(3, vocabulary, rows, prompt + length)
    prompts, lengths = integers(2, prompt + 1, rows), integers(1, length + 1, rows)
    prompts[0], lengths[0] = prompt, length
    pairs = slice(0, rows // 2 * 2, 2)
    ids[1::2, :prompt], prompts[1::2] = ids[pairs, :prompt], prompts[pairs]
    place = torch.arange(prompt + length)
    attention = (place >= prompt - prompts[:, None]) & (place < prompt + lengths[:, None])
    noise = torch.randn(rows, length, generator=generator)
    mask = attention[:, prompt:]
    return module.Batch(
        rows=torch.arange(rows),
        prompt_width=prompt,
        ids=torch.where(attention, ids, 0),
        attention=attention,
        truncated=torch.zeros(rows, dtype=torch.bool),
        loss_mask=mask,
        sampled_logp=torch.zeros(rows, length),
        entropy=torch.where(mask, noise.abs(), 0.0),
        rewards=(noise[:, 0] > 0).float(),
        advantages=torch.randn(rows, generator=generator),
        update_tokens=float(mask.sum()),
        old_logp=torch.where(mask, -noise.abs(), 0.0),
        base_logp=torch.where(mask, -noise.abs() - 0.1 * noise, 0.0),
        scores=torch.where(mask, noise.abs(), 0.0),
        credit=mask.float(),
        weights=mask.float(),
    )
