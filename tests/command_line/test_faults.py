"""What breaks in a run: numbers, memory, trackers, rewards, disks, and a terminal that closes."""

import contextlib
import json
import os
import resource
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
import torch
from support import (
    ROOT,
    TINY_RUN,
    error_line,
    fork_case,
    outcome,
    random_batch,
    run_forks,
    state_file,
    stderr_of,
)

import grpo_arca as trainer


# ---- Numbers -------------------------------------------------------------------------------------
def state_of(run) -> list[torch.Tensor]:
    """All that an update changes."""
    moments = [x for state in run.optimizer.state_dict()["state"].values() for x in state.values()]
    return [x.clone() for x in (*run.model.parameters(), *moments)]


@pytest.mark.parametrize("where", ["loss", "gradient"])
def test_an_update_that_is_not_finite_is_skipped(make_run, monkeypatch, where):
    run = make_run()
    batch = random_batch()
    policy_loss = trainer.policy_loss

    def broken_loss(*inputs):
        loss, clipped = policy_loss(*inputs)
        if where == "loss":
            return loss * torch.nan, clipped
        return loss + (loss - loss).sqrt(), clipped  # the derivative of sqrt at 0 is infinite

    trainer.update(run, [batch])  # so that there are moments to spoil
    before = state_of(run)
    updates = run.scheduler.last_epoch
    with monkeypatch.context() as patch:
        patch.setattr(trainer, "policy_loss", broken_loss)
        row = trainer.update(run, [batch])
    assert row["skipped_update"] == run.skipped == 1 and run.scheduler.last_epoch == updates
    assert all(p.grad is None for p in run.model.parameters())
    assert all(torch.equal(a, b) for a, b in zip(before, state_of(run), strict=True))
    row = trainer.update(run, [batch])
    assert row["skipped_update"] == run.skipped == 0 and row["grad_norm"] > 0
    assert any(not torch.equal(a, b) for a, b in zip(before, state_of(run), strict=True))


def test_a_policy_that_becomes_nan_ends_the_run_with_a_checkpoint(
    run_main, rows_of, monkeypatch, tmp_path
):
    """Ten updates in a row are skipped first."""
    check_model = trainer.check_model

    def check_and_poison(run, prompt):
        check_model(run, prompt)
        for name, parameter in run.model.named_parameters():
            if "lora_B" in name:
                parameter.data.fill_(torch.nan)

    monkeypatch.setattr(trainer, "check_model", check_and_poison)
    code, _, err = run_main(max_steps=20)
    sentence = error_line(err)
    assert code == 2 and "not finite in 10 updates in a row: lower --learning_rate" in sentence
    assert [row["skipped_update"] for row in rows_of()] == [1] * 10
    assert (tmp_path / "out/checkpoint-10/state.pt").is_file()


@pytest.mark.parametrize(
    "scores, error",
    [
        (lambda _, micro, __: micro.masks, (AttributeError, "masks")),
        (lambda _, micro, __: micro.entropy[:, 1:], (RuntimeError, "must match the size")),
    ],
)
def test_a_mistake_in_ones_own_credit_method_shows_its_stack(run_main, monkeypatch, scores, error):
    """Before the first rollout: the embedded policy runs, so it is not the model's."""
    monkeypatch.setattr(trainer, "token_scores", scores)
    with pytest.raises(error[0], match=error[1]):
        run_main(credit="arca")


@pytest.mark.parametrize(
    "scores, sentence",
    [
        (lambda _, micro, __: micro.entropy / 0 * 0, "a score that is not a finite number"),
        (lambda _, micro, __: -1 - micro.entropy, "assign_credit made weights below 0 or NaN"),
    ],
)
def test_impossible_credit_is_a_sentence(run_main, step_on_trial, monkeypatch, scores, sentence):
    monkeypatch.setattr(trainer, "token_scores", scores)
    code, _, err = run_main(credit="arca")
    assert code == 2 and sentence in error_line(err)


def test_credit_that_becomes_impossible_in_training_is_a_sentence(
    run_main, step_on_trial, monkeypatch
):
    """A new adapter is the base, so these scores are 0 before the first update."""

    def log_ratio(run, micro, _):
        logp, _ = run.policy(micro)
        with run.model.disable_adapter():
            return (logp - run.policy(micro)[0]) / micro.mask  # NaN on padding

    monkeypatch.setattr(trainer, "token_scores", log_ratio)
    code, _, err = run_main(credit="surprisal", max_steps=9, max_completion_length=80)
    assert code == 2 and "assign_credit made weights below 0 or NaN" in error_line(err)


def test_tokens_of_nan_logits_are_of_the_vocabulary():
    token, *_ = trainer.sample_tokens(torch.full((2, 5), torch.nan), torch.tensor([0.0, 0.99]))
    assert ((token >= 0) & (token < 5)).all()


# ---- Memory, tracker, rewards --------------------------------------------------------------------
OUT_OF_MEMORY = {
    "GPU": torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB"),
    "CPU": RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9"),
    "CPU by mmap": RuntimeError("[enforce fail at alloc_cpu.cpp:127] not enough memory"),
    "cuBLAS": RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate(h)"),
}


SLOW_CASES = [pytest.param(name, marks=pytest.mark.slow) for name in list(OUT_OF_MEMORY)[1:]]


@pytest.mark.parametrize("where", ["GPU", *SLOW_CASES])
def test_out_of_memory_is_a_sentence_with_three_flags(
    run_main, rows_of, monkeypatch, tmp_path, where
):
    """And the updates so far are in a checkpoint, whatever --save_steps."""
    collect = trainer.collect

    def collect_once(run, *inputs):
        if run.rollout == 1:
            raise OUT_OF_MEMORY[where]
        return collect(run, *inputs)

    with monkeypatch.context() as patch:
        patch.setattr(trainer, "collect", collect_once)
        code, _, err = run_main(save_steps=0)
    sentence = error_line(err)
    flags = ("--gradient_checkpointing", "--per_device_train_batch_size", "--rollout_weights")
    places = [sentence.index(name) for name in flags]
    assert code == 2 and "out of memory: in this order, try" in sentence
    assert places == sorted(places), sentence
    assert (tmp_path / "out/checkpoint-1/state.pt").is_file()
    code, _, err = run_main(resume_from_checkpoint="latest")
    assert code == 0 and [row["step"] for row in rows_of()] == [1, 2, 3], err


@pytest.mark.parametrize(
    "words", ["shapes do not match", "more than one element refers to a single memory location"]
)
def test_another_runtime_error_is_not_taken_for_that(run_main, monkeypatch, words):
    def collect(*_):
        raise RuntimeError(words)

    monkeypatch.setattr(trainer, "collect", collect)
    with pytest.raises(RuntimeError, match=words):
        run_main()


@pytest.mark.parametrize("have_met", [True, False])
def test_an_error_of_one_process_among_many_is_said(monkeypatch, capsys, have_met):
    """Before the processes meet, all have the same error, and the main process says it."""

    def run_to_the_end(_):
        raise trainer.RewardError("my.f failed")

    monkeypatch.setattr(trainer, "run_to_the_end", run_to_the_end)
    monkeypatch.setattr(sys, "argv", ["grpo_arca.py"])
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: have_met)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SystemExit) as stopped:
        trainer.main()
    said = "grpo_arca.py: process 1: error: my.f failed\n"
    assert stopped.value.code == 2 and capsys.readouterr().err == (said if have_met else "")


def test_processes_that_find_different_checkpoints_do_not_go_on(run_main, monkeypatch):
    """As on two machines that share no disk."""
    monkeypatch.setattr(trainer, "gather_object", lambda steps: [*steps, steps[0] + 1])
    code, _, err = run_main()
    assert code == 2 and "put --output_dir where all can read it" in error_line(err)


@pytest.mark.parametrize("function", ["load_policy", "sample"])
def test_out_of_memory_before_the_first_step(run_main, step_on_trial, monkeypatch, function):
    """`sample` runs in `check_model`, which must not take this for a fault of the model."""

    def fill_memory(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(trainer, function, fill_memory)
    code, _, err = run_main()
    assert code == 2 and "--gradient_checkpointing" in error_line(err)


@pytest.mark.parametrize("when", ["log", pytest.param("start", marks=pytest.mark.slow)])
def test_a_tracker_that_fails_is_said_once(run_main, monkeypatch, when):
    calls = []

    def start(self, *_, **__):
        if when == "start":
            raise ConnectionError("no route to host")
        self.trackers.append("one")

    def log(self, *_):
        calls.append(1)
        if self.trackers:
            raise ConnectionError("no route to host")

    monkeypatch.setattr(trainer.Accelerator, "init_trackers", start)
    monkeypatch.setattr(trainer.Accelerator, "log", log)
    code, _, err = run_main()
    assert code == 0 and err.count("going on without") == 1 and "no route to host" in err
    assert len(calls) == 5


SHAPED = """
def shaped(completions, completion_ids, answer, **_):
    assert all(answer), "the set's columns are given"
    return [100 + len(set(ids)) / 7 for ids in completion_ids]
"""


@pytest.mark.slow  # quick: README's own trains
def test_a_reward_function_of_the_users_own_is_trained_on(run_main, rows_of, tmp_path, monkeypatch):
    """From the working directory, weighted and summed; evaluation stays correctness."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "rewards_of_mine.py").write_text(SHAPED)
    flags = {"max_steps": 2, "max_eval_samples": 8, "max_completion_length": 60}
    code, _, err = run_main(reward_funcs="rewards_of_mine.shaped", reward_weights=2, **flags)
    assert code == 0, err
    for row in rows_of():
        assert row["reward"] == pytest.approx(2 * row["rewards/shaped/mean"], rel=1e-5)
        assert row["rewards/shaped/mean"] > 100 and row["grad_norm"] > 0
    summary = json.loads((tmp_path / "out/summary.json").read_text())
    for name in ("before", "after"):
        assert 0 < summary[name]["greedy_accuracy"] < 1


@pytest.mark.slow  # quick: tests/data_and_reward/test_reward.py
def test_a_killed_reward_worker_is_said_once_and_replaced(run_main, rows_of, tmp_path):
    """Answers that take a worker to compare; the first worker to appear is killed."""
    data = tmp_path / "data.jsonl"
    problems = [{"problem": f"Start with {i}, add 19.", "answer": "\\frac{1}{2}"} for i in range(9)]
    data.write_text("".join(json.dumps(problem) + "\n" for problem in problems))
    killed = []

    def kill() -> None:
        while not killed and threading.main_thread().is_alive():
            for child in psutil.Process().children():
                with contextlib.suppress(psutil.Error):  # a child that has just ended
                    if "grading_worker.py" in str(child.cmdline()):
                        time.sleep(0.2)  # it starts, or grades
                        child.kill()
                        killed.append(child.pid)
            time.sleep(0.02)

    threading.Thread(target=kill, daemon=True).start()
    code, _, err = run_main(
        dataset_name=data, eval_dataset_name=data, max_completion_length=80, max_steps=2
    )
    assert killed and code == 0 and "Traceback" not in err
    assert err.count("grading worker") <= 1  # one that dies before it was ready is just replaced
    assert len(rows_of()) == 2


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
    """To judge an answer against 2^(10^11) takes all the memory there is, and over five seconds."""
    done = run_in(memory_group, tmp_path / "free", "\\frac{1}{3}")
    assert done.returncode == 0, done.stderr
    files = {"memory.max_usage_in_bytes": "memory.limit_in_bytes", "memory.peak": "memory.max"}
    used, limit = next(
        (memory_group / name, memory_group / its_limit)
        for name, its_limit in files.items()
        if (memory_group / name).exists()
    )
    limit.write_text(str(int(used.read_text()) + (150 << 20)))
    done = run_in(memory_group, tmp_path / "limited", "2^{10^{11}}")
    assert done.returncode == 0, (done.returncode, done.stderr)
    assert done.stderr.count("killed by signal 9 (the kernel does that when memory runs out)") == 1
    assert done.stderr.count("a grading worker") == 1
    rows = (tmp_path / "limited/out/metrics.jsonl").read_text().splitlines()
    assert [row["step"] for row in map(json.loads, rows) if "reward" in row] == [1]


# ---- Disk ----------------------------------------------------------------------------------------
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


def test_a_checkpoint_that_cannot_be_written_leaves_nothing(make_run, monkeypatch, tmp_path):
    run = make_run(output_dir=tmp_path)
    trainer.save_checkpoint(run, None)

    def full(*_):
        raise RuntimeError("PytorchStreamWriter failed writing file")

    run.step = 1
    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(
        OSError,
        match=r"save .*-1 .*StreamWriter failed.*the last complete checkpoint is .*checkpoint-0$",
    ):
        trainer.save_checkpoint(run, None)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-0"]


@pytest.mark.slow
def test_a_full_disk_is_a_sentence_and_the_last_checkpoint_is_whole(small_disk, tmp_path):
    flags = {"save_steps": 1, "num_iterations": 1, "max_steps": 6}
    full = {**flags, "output_dir": small_disk / "out"}
    codes = run_forks(
        tmp_path, [fork_case(tmp_path / "whole", **flags), fork_case(tmp_path / "full", **full)]
    )
    assert codes == ["0", "2"], stderr_of(tmp_path / "full")
    sentence = error_line(stderr_of(tmp_path / "full"))
    left = sorted(path.name for path in (small_disk / "out").glob("*checkpoint-*"))
    assert "cannot save" in sentence and "the last complete checkpoint is " in sentence
    assert left and not any("partial" in name for name in left)
    for name in left:  # what is there is what an undisturbed run wrote
        assert state_file(small_disk / "out" / name) == state_file(tmp_path / "whole/out" / name)
    remount = ["mount", "-o", "remount,size=64M", str(small_disk)]
    subprocess.run(remount, check=True)
    again = fork_case(tmp_path / "full", **full, resume_from_checkpoint="latest")
    assert run_forks(tmp_path, [again]) == ["0"], stderr_of(tmp_path / "full")
    whole, resumed = outcome(tmp_path / "whole"), outcome(small_disk)
    assert all(resumed[name] == whole[name] for name in ("metrics", "adapter", "completions"))


def test_a_file_that_may_not_grow_is_a_sentence(run_main):
    """`ulimit -f`, of this process for as long as it takes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10**5, before[1]))
    try:
        code, _, err = run_main(max_steps=1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert code == 2 and "File too large" in error_line(err)


@pytest.mark.slow
def test_nobody_listens_and_files_that_may_not_grow(tmp_path):
    """`| head`, standard error on a full device, `ulimit -f`: a code, and no stack."""
    argv = [f"--{name}={value}" for name, value in (TINY_RUN | {"max_steps": 1}).items()]
    command = [sys.executable, str(ROOT / "grpo_arca.py"), *argv]
    started = {}

    def limit_files():
        resource.setrlimit(resource.RLIMIT_FSIZE, (10**5, 10**5))

    for name in ("head", "full", "ulimit"):
        folder = tmp_path / name
        folder.mkdir()
        read, write = os.pipe()
        os.close(read)  # as `head` does, once it has its lines
        with open(folder / "err", "w") as err, open("/dev/full", "w") as full:
            started[name] = subprocess.Popen(
                [*command, "--output_dir", str(folder / "out")],
                stdout=write if name == "head" else subprocess.DEVNULL,
                stderr=full if name == "full" else err,
                preexec_fn=limit_files if name == "ulimit" else None,
            )  # fmt: skip
        os.close(write)
    codes = {name: process.wait(timeout=120) for name, process in started.items()}
    said = {name: (tmp_path / name / "err").read_text() for name in started}
    assert set(codes.values()) == {2}, (codes, said)  # 1 is a stack's
    assert not any('File "' in text or "Traceback" in text for text in said.values()), said
    assert "Broken pipe" in said["head"] and "File too large" in said["ulimit"], said
