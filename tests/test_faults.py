"""What breaks in the middle of a run: numbers, memory, disk, tracker, reward workers."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
import torch
from conftest import ROOT, random_batch
from test_resume import case, outcome, run, stderr

import grpo_arca as trainer

TINY_RUN = {
    "max_steps": 3, "per_device_train_batch_size": 8, "gradient_accumulation_steps": 1,
    "num_generations": 4, "max_completion_length": 8, "max_eval_samples": 2, "warmup_steps": 1,
    "num_generations_eval": 1, "eval_steps": 0,
}  # fmt: skip


@pytest.fixture
def run_main(monkeypatch, tmp_path, capfd):
    """run_main(max_steps=4, ...) -> (exit code, stdout, stderr) of the script, in this process."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def start(**flags) -> tuple[int, str, str]:
        flags = TINY_RUN | {"output_dir": tmp_path / "out"} | flags
        argv = [f"--{name}={value}" for name, value in flags.items()]
        monkeypatch.setattr(sys, "argv", ["grpo_arca.py", *argv])
        code = 0
        try:
            trainer.main()
        except SystemExit as stop:
            code = stop.code
        return code, *capfd.readouterr()

    yield start
    for number, handler in handlers.items():
        signal.signal(number, handler)


def rows_of(tmp_path) -> list[dict]:
    lines = (tmp_path / "out/metrics.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if "reward" in row]


# --------------------------------------------------------------------------------------------------
# Numbers
# --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("where", ["loss", "gradient"])
def test_an_update_that_is_not_finite_is_skipped(make_run, monkeypatch, where):
    run, batch, inner = make_run(), random_batch(), trainer.policy_loss
    index = torch.arange(8)

    def broken(*inputs):
        loss, clipped = inner(*inputs)
        return (loss * torch.nan if where == "loss" else loss + (loss - loss).sqrt()), clipped

    trainer.update(run, batch, index, True)  # so that there is a state to spoil
    tensors, _ = trainer.training_state(run)
    with monkeypatch.context() as patch:
        patch.setattr(trainer, "policy_loss", broken)
        row = trainer.update(run, batch, index, True)
    assert row["skipped_update"] == 1 and run.scheduler.last_epoch == 1
    assert all(p.grad is None for p in run.model.parameters())
    after, _ = trainer.training_state(run)
    assert all(torch.equal(after[name], tensor) for name, tensor in tensors.items())
    row = trainer.update(run, batch, index, True)
    assert row["skipped_update"] == 0 and row["grad_norm"] > 0
    assert any(not torch.equal(trainer.training_state(run)[0][n], t) for n, t in tensors.items())


def test_ten_in_a_row_stop_the_run_with_a_checkpoint(run_main, monkeypatch, tmp_path):
    inner = trainer.policy_loss
    monkeypatch.setattr(trainer, "policy_loss", lambda *a: (inner(*a)[0] * torch.nan, inner(*a)[1]))
    code, out, err = run_main(max_steps=20)
    assert code == 1 and "Traceback" not in err
    assert "not finite in 10 updates in a row" in out and "--learning_rate" in out
    assert [row["skipped_update"] for row in rows_of(tmp_path)] == [1] * 10
    assert (tmp_path / "out/checkpoint-10/training_state.safetensors").is_file()


def test_tokens_of_nan_logits_are_of_the_vocabulary():
    token, _ = trainer.sample_tokens(torch.full((2, 5), torch.nan), torch.tensor([0.0, 0.99]))
    assert ((token >= 0) & (token < 5)).all()


# --------------------------------------------------------------------------------------------------
# Memory, tracker, workers
# --------------------------------------------------------------------------------------------------
def test_out_of_memory_is_a_sentence_with_three_flags_and_a_checkpoint(
    run_main, monkeypatch, tmp_path
):
    inner = trainer.collect

    def greedy(run, rollout, *data):
        if rollout == 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB")
        return inner(run, rollout, *data)

    with monkeypatch.context() as patch:
        patch.setattr(trainer, "collect", greedy)
        code, out, err = run_main()
    flags = ("--gradient_checkpointing", "--per_device_train_batch_size", "--rollout_weights")
    said = out[out.index("out of GPU memory") :]
    places = [said.index(name) for name in flags]
    assert code == 1 and "Traceback" not in err and places == sorted(places), out
    assert (tmp_path / "out/checkpoint-1").is_dir()
    code, out, err = run_main(resume_from_checkpoint="latest")
    assert code == 0 and [row["step"] for row in rows_of(tmp_path)] == [1, 2, 3]


def test_out_of_memory_while_loading(run_main, monkeypatch):
    def greedy(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(trainer, "load_policy", greedy)
    code, _, err = run_main()
    assert code == 2 and "--gradient_checkpointing" in err and "Traceback" not in err


def test_a_tracker_that_fails_is_said_once(run_main, monkeypatch, tmp_path):
    def unreachable(*_, **__):
        raise ConnectionError("no route to host")

    calls = []
    monkeypatch.setattr(trainer.Accelerator, "init_trackers", unreachable)
    code, _, err = run_main()
    assert code == 0 and err.count("going on without") == 1 and "no route to host" in err
    shutil.rmtree(tmp_path / "out")
    monkeypatch.undo()

    def late(self, *_):
        calls.append(1)
        if self.trackers:
            raise ConnectionError("gone")

    monkeypatch.setattr(trainer.Accelerator, "log", late)
    monkeypatch.setattr(
        trainer.Accelerator, "init_trackers", lambda self, *_, **__: self.trackers.append("one")
    )
    code, _, err = run_main(output_dir=tmp_path / "again")
    assert code == 0 and err.count("going on without") == 1 and len(calls) >= 4


def test_a_killed_reward_worker_is_said_once_and_replaced(run_main, tmp_path):
    """Answers that take a worker to compare; the first worker to appear is killed."""
    data = tmp_path / "data.jsonl"
    problems = [{"problem": f"Start with {i}, add 19.", "answer": "\\frac{1}{2}"} for i in range(9)]
    data.write_text("".join(json.dumps(problem) + "\n" for problem in problems))
    killed = []

    def kill() -> None:
        while not killed and threading.main_thread().is_alive():
            for child in psutil.Process().children():
                if child.status() != psutil.STATUS_ZOMBIE and "reward.py" in str(child.cmdline()):
                    time.sleep(0.5)  # it starts, or grades
                    child.kill()
                    killed.append(child.pid)
            time.sleep(0.02)

    threading.Thread(target=kill, daemon=True).start()
    code, _, err = run_main(
        dataset_name=data, eval_dataset_name=data, max_completion_length=80, max_steps=2
    )
    assert killed and code == 0 and "Traceback" not in err
    assert err.count("worker") <= 1  # a worker that dies before it was ready is just replaced
    assert len(rows_of(tmp_path)) == 2


@pytest.fixture
def memory_group():
    """A control group of the kernel's, without a limit yet: its folder."""
    roots = [Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")]  # version 1, version 2
    folder = (
        next((r for r in roots if (r / "cgroup.procs").exists()), roots[1]) / f"grpo-{os.getpid()}"
    )
    try:
        folder.mkdir()
    except OSError:
        pytest.skip("limiting memory needs root and a writable control group")
    yield folder
    for _ in range(100):  # it empties a moment after its processes have gone
        with contextlib.suppress(OSError):
            return folder.rmdir()
        time.sleep(0.1)


def run_in(group: Path, folder: Path, gold: str) -> subprocess.CompletedProcess:
    """One update, on two problems of which one has this answer."""
    folder.mkdir()
    prompts = [f"Start with {i}, add 19, double it." for i in (5, 8)]
    rows = zip(prompts, [gold, "\\frac{1}{2}"], strict=True)
    lines = [json.dumps({"problem": prompt, "answer": answer}) for prompt, answer in rows]
    (folder / "data.jsonl").write_text("\n".join(lines))
    flags = TINY_RUN | {"max_steps": 1, "max_completion_length": 80}
    flags |= {"dataset_name": "data.jsonl", "eval_dataset_name": "chain_arithmetic"}
    argv = [f"--{name}={value}" for name, value in flags.items()]
    return subprocess.run(
        [sys.executable, ROOT / "grpo_arca.py", *argv, "--output_dir=out"],
        cwd=folder, capture_output=True, text=True, timeout=600,
        preexec_fn=lambda: (group / "cgroup.procs").write_text(str(os.getpid())),
    )  # fmt: skip


@pytest.mark.slow
def test_where_memory_runs_out_the_kernel_kills_a_worker_and_the_run_goes_on(
    memory_group, tmp_path
):
    """To judge an answer against 9!!!! takes all the memory there is, and over five seconds."""
    done = run_in(memory_group, tmp_path / "free", "\\frac{1}{3}")
    assert done.returncode == 0, done.stderr
    files = {"memory.max_usage_in_bytes": "memory.limit_in_bytes", "memory.peak": "memory.max"}
    used, limit = next(
        (memory_group / name, memory_group / its_limit)
        for name, its_limit in files.items()
        if (memory_group / name).exists()
    )
    limit.write_text(str(int(used.read_text()) + (150 << 20)))
    done = run_in(memory_group, tmp_path / "limited", "9!!!!")
    assert done.returncode == 0, (done.returncode, done.stderr)
    assert done.stderr.count("killed by signal 9 (the kernel does that when memory runs out)") == 1
    assert done.stderr.count("a grading worker") == 1
    rows = (tmp_path / "limited/out/metrics.jsonl").read_text().splitlines()
    assert [row["step"] for row in map(json.loads, rows) if "reward" in row] == [1]


# --------------------------------------------------------------------------------------------------
# Disk
# --------------------------------------------------------------------------------------------------
@pytest.fixture
def small_disk(tmp_path):
    """A folder on a file system of 3 MiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=3M", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting a small file system needs root")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.slow
def test_a_full_disk_is_a_sentence_and_the_last_checkpoint_is_whole(small_disk, tmp_path):
    flags = {"save_steps": 1, "num_iterations": 1, "max_steps": 6}
    full = {**flags, "output_dir": small_disk / "out"}
    codes = run(tmp_path, [case(tmp_path / "whole", **flags), case(tmp_path / "full", **full)])
    assert codes == ["0", "2"], stderr(tmp_path / "full")
    said = stderr(tmp_path / "full")
    errors = [line for line in said.splitlines() if "error:" in line]
    left = sorted(path.name for path in (small_disk / "out").glob("*checkpoint-*"))
    assert len(errors) == 1 and "is full" in errors[0] and left[-1] in errors[0], said
    assert "Traceback" not in said and left and not any("partial" in name for name in left)
    for name in left:  # what is there is what an undisturbed run wrote
        path = f"{name}/training_state.safetensors"
        state = (small_disk / "out" / path).read_bytes()
        assert state == (tmp_path / "whole/out" / path).read_bytes()
    remount = ["mount", "-o", "remount,size=64M", str(small_disk)]
    subprocess.run(remount, check=True)
    again = case(tmp_path / "full", **full, resume_from_checkpoint="latest")
    assert run(tmp_path, [again]) == ["0"], stderr(tmp_path / "full")
    whole, resumed = outcome(tmp_path / "whole"), outcome(small_disk)
    assert all(resumed[name] == whole[name] for name in ("metrics", "adapter", "completions"))


# --------------------------------------------------------------------------------------------------
# Micro-batches of a number of tokens
# --------------------------------------------------------------------------------------------------
def test_a_token_budget_changes_the_micro_batches_and_nothing_else(make_run):
    run, batch, gradients = make_run(), random_batch(), []
    for budget in (None, 40, 1):
        run.args.max_tokens_per_micro_batch = budget
        parts = trainer.micro_batches(run, batch, torch.arange(8))
        assert torch.cat(parts).sort().values.tolist() == list(range(8))
        sizes = [batch.select(part).ids.numel() for part in parts]
        if budget:
            assert all(n <= budget or len(p) == 1 for n, p in zip(sizes, parts, strict=True))
            assert len(parts) == 8 if budget == 1 else 2 < len(parts) < 8
        run.policy.zero_grad()
        for part in parts:
            micro = batch.select(part)
            scale = trainer.token_scale(run.args, micro.loss_mask, 8, 1)
            logp = trainer.training_forward(run, micro)
            trainer.policy_loss(run.args, micro, logp, micro.logp, scale)[0].backward()
        trained = [p for p in run.model.parameters() if p.requires_grad]
        gradients.append(torch.cat([p.grad.flatten() for p in trained]))
    assert (gradients[0] - gradients[1]).abs().max() <= 1e-6
    assert (gradients[0] - gradients[2]).abs().max() <= 1e-6


def test_with_a_token_budget_processes_make_as_many_micro_batches(make_run, monkeypatch):
    """They meet after each one: with different numbers they would wait for ever."""
    run, batch = make_run(max_tokens_per_micro_batch=100), random_batch()
    ours = trainer.micro_batches(run, batch, torch.arange(8))
    assert 1 < len(ours) < 6
    monkeypatch.setattr(run.accelerator, "gather", lambda count: torch.cat([count, count + 2]))
    more = trainer.micro_batches(run, batch, torch.arange(8))
    assert len(more) == len(ours) + 2 and min(map(len, more)) > 0
    assert torch.equal(torch.cat(more), torch.cat(ours))
