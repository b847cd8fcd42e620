"""Signals, a launcher that ends, and two runs in one folder."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from support import ROOT, TINY_RUN, command_line

import grpo_arca as trainer

ENDLESS = TINY_RUN | {"max_steps": 100_000, "output_dir": "out", "save_steps": 0}
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, trainer.LAUNCHER_HAS_ENDED)


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """Puts back the handlers that a run in this process installs."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


# ---- What each signal asks for -------------------------------------------------------------------
@pytest.mark.parametrize("number", SIGNALS)
def test_the_first_signal_of_any_kind_asks_for_the_end(number, capfd):
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests themselves may run under nohup
    request = trainer.StopRequest()
    with request.listening():
        assert not request.received
        os.kill(os.getpid(), number)
        assert request.received
    assert "ending after this rollout or batch; a second signal ends" in capfd.readouterr().err


@pytest.mark.parametrize("second", SIGNALS)
def test_the_second_signal_ends_the_process_unless_it_is_the_launchers_end(second, monkeypatch):
    """After Ctrl-C the launcher ends as well, which is not the user's second Ctrl-C."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    codes: list[int] = []
    monkeypatch.setattr(os, "_exit", codes.append)
    request = trainer.StopRequest()
    with request.listening():
        os.kill(os.getpid(), signal.SIGINT)
        assert request.received and not codes
        os.kill(os.getpid(), second)
    assert codes == ([] if second == trainer.LAUNCHER_HAS_ENDED else [128 + second])


def test_under_nohup_a_closed_terminal_is_ignored():
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup starts a command
    request = trainer.StopRequest()
    with request.listening():
        os.kill(os.getpid(), signal.SIGHUP)
        assert not request.received and signal.getsignal(signal.SIGHUP) == signal.SIG_IGN


def test_after_a_run_signals_go_where_they_went_before(run_main):
    """Else no other cell of a notebook could be interrupted."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    assert run_main(max_steps=0)[0] == 0
    assert {number: signal.getsignal(number) for number in SIGNALS} == before


# ---- Where a run ends ----------------------------------------------------------------------------
def test_ctrl_c_in_an_evaluation_ends_at_its_next_batch(run_main, monkeypatch, tmp_path):
    """The evaluation is left out of the log, and a resumed run begins with it."""
    samples: list[str] = []
    inner_sample = trainer.sample
    inner_check = trainer.check_model

    def check_model(*arguments):
        inner_check(*arguments)
        samples.clear()

    def interrupted_sample(run, rows, prompts, uniforms, is_greedy=False):
        samples.append("greedy" if is_greedy else "sampled")
        if samples == ["greedy"] * 2:
            os.kill(os.getpid(), signal.SIGINT)
        return inner_sample(run, rows, prompts, uniforms, is_greedy)

    flags = {"max_eval_samples": 5, "per_device_eval_batch_size": 1, "max_steps": 1}
    with monkeypatch.context() as patch:
        patch.setattr(trainer, "check_model", check_model)
        patch.setattr(trainer, "sample", interrupted_sample)
        code, out, err = run_main(**flags)
    assert code == 0 and samples == ["greedy"] * 2, samples
    assert "interrupted, saved out/checkpoint-0: " in out and "Traceback" not in err
    assert (tmp_path / "out/metrics.jsonl").read_text() == ""
    assert not (tmp_path / "out/adapter").exists()

    code, _, err = run_main(**flags, resume_from_checkpoint="latest")
    assert code == 0, err
    rows = [json.loads(line) for line in (tmp_path / "out/metrics.jsonl").read_text().splitlines()]
    assert [(row["step"], "eval" in row) for row in rows] == [(0, True), (1, False), (1, True)]


@pytest.mark.parametrize("where", ["load_data", "load_policy", "check_model"])
def test_ctrl_c_while_a_run_loads_shows_no_stack(run_main, monkeypatch, tmp_path, where):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(trainer, where, interrupted)
    code, out, err = run_main()
    assert code == 128 + signal.SIGINT and not out
    assert "Traceback" not in err and "KeyboardInterrupt" not in err
    assert not list(tmp_path.glob("out/*checkpoint*"))


# ---- One run in a folder -------------------------------------------------------------------------
@contextlib.contextmanager
def other_run(folder: Path) -> Iterator[int]:
    """Yields the id of another process that has the folder as a run has it."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        with contextlib.suppress(BaseException), trainer.locked(str(folder)):
            os.write(writing, b"1")
            time.sleep(60)
        os._exit(0)
    try:
        assert os.read(reading, 1) == b"1"
        yield pid
    finally:
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        os.close(reading)
        os.close(writing)


def test_a_second_run_in_a_folder_is_refused_until_the_first_has_ended(run_main, tmp_path):
    out = tmp_path / "out"
    with other_run(out) as pid:
        code, _, err = run_main(max_steps=1)
        errors = [line for line in err.splitlines() if "error: " in line]
        assert code == 2 and len(errors) == 1 and "Traceback" not in err
        assert "another run is writing to out: wait for its end, or change" in errors[0]
        assert list(out.iterdir()) == []
        assert run_main(max_steps=1, output_dir="another")[0] == 0

        os.kill(pid, signal.SIGKILL)  # a crash: nothing of its own releases the lock
        os.waitpid(pid, 0)
        code, _, err = run_main(max_steps=1)
        assert code == 0, err


def test_a_run_that_failed_leaves_its_folder_free(run_main, monkeypatch):
    """In one process, as in a notebook."""

    def fails(*_):
        raise ZeroDivisionError

    with monkeypatch.context() as patch:
        patch.setattr(trainer, "collect", fails)
        with pytest.raises(ZeroDivisionError):
            run_main(max_steps=1)
    code, _, err = run_main(max_steps=1)
    assert code == 0, err


# ---- Real processes ------------------------------------------------------------------------------
def wait_until(is_true: Callable[[], object], pause: float = 0.1) -> None:
    deadline = time.monotonic() + 240
    while not is_true():
        assert time.monotonic() < deadline
        time.sleep(pause)


def start(tmp_path: Path, *command: str, **variables: str) -> subprocess.Popen[str]:
    """Starts a command whose standard error goes to a file, with further variables."""
    with open(tmp_path / "stderr.txt", "w") as errors:
        return subprocess.Popen(
            [sys.executable, *command],
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"} | variables,
        )


def updates(tmp_path: Path) -> int:
    path = tmp_path / "out/metrics.jsonl"
    return path.read_text().count('"reward"') if path.exists() else 0


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_run_ends_with_a_checkpoint_when_its_launcher_ends(tmp_path, number):
    """`accelerate launch` passes no signal on; a worker left behind would train for ever."""
    script = [str(ROOT / "grpo_arca.py"), *command_line(ENDLESS)]
    launcher = start(tmp_path, "-m", "accelerate.commands.launch", *script)
    workers: list[psutil.Process] = []
    try:
        wait_until(lambda: updates(tmp_path) >= 2)
        workers = psutil.Process(launcher.pid).children()
        assert len(workers) == 1
        launcher.send_signal(number)
        launcher.wait(60)
        gone, alive = psutil.wait_procs(workers, timeout=120)
    finally:
        for worker in workers:
            with contextlib.suppress(psutil.NoSuchProcess):
                worker.kill()
        launcher.kill()
    assert gone and not alive
    said = (tmp_path / "stderr.txt").read_text()
    assert "ending after this rollout or batch" in said
    (checkpoint,) = (tmp_path / "out").glob("checkpoint-*")
    assert (checkpoint / "state.pt").is_file()
    assert updates(tmp_path) == int(checkpoint.name.removeprefix("checkpoint-"))


@pytest.mark.slow
def test_a_run_that_is_importing_ends_when_its_launcher_ends(tmp_path):
    """PyTorch is imported first. What stands in for the launcher only starts the run."""
    script = [str(ROOT / "grpo_arca.py"), *command_line(ENDLESS)]
    code = "import subprocess, sys; subprocess.run([sys.executable, *sys.argv[1:]])"
    launcher = start(tmp_path, "-c", code, *script, ACCELERATE_MIXED_PRECISION="no")
    workers: list[psutil.Process] = []
    try:
        wait_until(lambda: psutil.Process(launcher.pid).children())
        workers = psutil.Process(launcher.pid).children()
        maps = Path(f"/proc/{workers[0].pid}/maps")
        wait_until(lambda: "libtorch_cpu" in maps.read_text(), pause=0.01)
        launcher.kill()
        launcher.wait(60)
        gone, alive = psutil.wait_procs(workers, timeout=30)
    finally:
        for worker in workers:
            with contextlib.suppress(psutil.NoSuchProcess):
                worker.kill()
        launcher.kill()
    assert gone and not alive
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [0.3, 1.0, 2.0, 4.0, 7.0])
def test_ctrl_c_at_any_time_before_training_shows_no_stack(tmp_path, seconds):
    """Most of the first seconds go to imports."""
    process = start(tmp_path, str(ROOT / "grpo_arca.py"), *command_line(ENDLESS))
    try:
        time.sleep(seconds)
        process.send_signal(signal.SIGINT)
        process.wait(120)
    finally:
        process.kill()
    assert process.returncode in (-signal.SIGINT, 128 + signal.SIGINT, 0)
    said = (tmp_path / "stderr.txt").read_text()
    assert "Traceback" not in said and "KeyboardInterrupt" not in said, said
