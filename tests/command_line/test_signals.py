"""Signals: what each leaves, and where it ends a run. That it resumes is in test_resume.py."""

import contextlib
import itertools
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
from peft.tuners.lora.layer import LoraLayer
from safetensors.torch import load_file
from support import ROOT, TINY_RUN, command_line, read_jsonl, refusal, scored
from torch.nn.utils._named_member_accessor import NamedMemberAccessor

import grpo_arca

ENDLESS = TINY_RUN | {"max_steps": 100_000, "output_dir": "out", "save_steps": 0}
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


@pytest.fixture
def send(monkeypatch):
    """send(number, "update", 2) -> from now on, this function begins with the signal at step 2."""
    # The tests may run in the background, or by nohup.
    former = {number: signal.signal(number, signal.SIG_DFL) for number in SIGNALS}

    def arrange(number: int, name: str, step: int) -> None:
        function = getattr(grpo_arca, name)

        def interrupted(run, *rest):
            if run.step == step:
                os.kill(os.getpid(), number)
            return function(run, *rest)

        monkeypatch.setattr(grpo_arca, name, interrupted)

    yield arrange
    for number, handler in former.items():
        signal.signal(number, handler)


def steps_left(tmp_path: Path) -> tuple[int, list[str]]:
    """Returns the last step in the log of a run, and the names of its checkpoints."""
    rows = read_jsonl(tmp_path / "out/metrics.jsonl")
    last = rows[-1]["step"] if rows else -1
    return last, [f"checkpoint-{step}" for step in grpo_arca.checkpoints(str(tmp_path / "out"))]


@pytest.mark.parametrize(
    ("number", "name", "step", "left"),
    [
        (signal.SIGTERM, "collect", 2, (2, ["checkpoint-2"])),  # at once
        (signal.SIGHUP, "update", 2, (4, ["checkpoint-4"])),  # once this rollout's updates are made
        (signal.SIGINT, "evaluate", 0, (-1, [])),  # nothing to save yet
        (signal.SIGUSR1, "collect", 0, (0, [])),
        (signal.SIGUSR2, "collect", 2, (2, ["checkpoint-2"])),
    ],
)
def test_the_updates_so_far_are_saved(run_main, send, tmp_path, number, name, step, left):
    send(number, name, step)
    code, out, _ = run_main(steps_per_generation=2, max_steps=6, save_steps=0)
    assert code == 1
    assert steps_left(tmp_path) == left
    assert not (tmp_path / "out/summary.json").exists()
    assert "saved" not in out
    assert {signal.getsignal(number) for number in SIGNALS} == {signal.SIG_DFL}  # as before


def test_a_signal_after_the_last_update_loses_nothing(run_main, send, tmp_path, monkeypatch):
    def interrupted(*_):
        os.kill(os.getpid(), signal.SIGTERM)

    with monkeypatch.context() as patch:
        patch.setattr(grpo_arca, "report_run", interrupted)
        assert run_main(max_steps=2, save_steps=0)[0] == 1
    assert steps_left(tmp_path) == (2, ["checkpoint-2"])
    assert run_main(max_steps=2, save_steps=0, resume_from_checkpoint="latest")[0] == 0
    assert (tmp_path / "out/summary.json").exists()


@pytest.mark.slow
def test_under_nohup_a_closed_terminal_is_ignored(run_main, send, tmp_path):
    send(signal.SIGHUP, "collect", 1)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup starts a command
    assert run_main(max_steps=2)[0] == 0
    assert (tmp_path / "out/summary.json").exists()


HANGS = """
import os, signal, time

calls = []

def pay(completions, **_):
    calls.append(1)
    if len(calls) < 4:  # the trial, the evaluation and the first rollout
        return [1.0] * len(completions)
    try:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(600)
    except:  # as careless code around a request has it
        os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(600)
"""


SWALLOWS = """
import multiprocessing, os, signal, time

calls = []

def endless():  # as hostile code may be
    while True:
        try:
            time.sleep(600)
        except BaseException:
            pass

def pay(completions, **_):
    calls.append(1)
    if len(calls) == 2:
        child = multiprocessing.get_context("fork").Process(target=endless, daemon=True)
        child.start()
        time.sleep(0.5)
        child.terminate()
        child.join(5)
        code = child.exitcode
        child.kill()
        assert code == -signal.SIGTERM
    try:
        if len(calls) == 4:  # after the trial, the evaluation and the first rollout
            os.kill(os.getpid(), signal.SIGTERM)
        return [float(i % 2) for i, _ in enumerate(completions)]
    except:
        return [0.0] * len(completions)
"""


@pytest.mark.parametrize(
    ("name", "text", "steps"),
    [("hangs", HANGS, 3), ("swallows", SWALLOWS, 3), ("swallows_at_the_end", SWALLOWS, 1)],
)
def test_a_reward_function_loses_no_update_and_logs_nothing_that_a_signal_spoiled(
    run_main, send, tmp_path, name, text, steps
):
    """Its fourth call is for the second rollout or, after a single update, the last evaluation."""
    (tmp_path / f"{name}.py").write_text(text)
    assert run_main(reward_funcs=f"{name}.pay", save_steps=0, eval_steps=0, max_steps=steps)[0] == 1
    assert steps_left(tmp_path) == (1, ["checkpoint-1"])
    assert "eval" not in read_jsonl(tmp_path / "out/metrics.jsonl")[-1]


# ---- While the adapter is not in its place -------------------------------------------------------
LAYERS = 28  # of the tiny policy's adapter
PLACES = [
    *((LoraLayer, "enable_adapters", LAYERS + layer + 1) for layer in range(LAYERS)),
    *((NamedMemberAccessor, "swap_tensor", number) for number in (1, 2, 30, 2 * LAYERS)),
]


@pytest.fixture(scope="module")
def switched(make_run, tmp_path_factory):
    """A run, and what its adapter's 56 matrices are."""
    run = make_run(output_dir=tmp_path_factory.mktemp("switched"), beta=0.1)
    weights = {name: p.clone() for name, p in run.model.named_parameters() if "lora_" in name}
    assert len(weights) == 2 * LAYERS
    return run, weights


@pytest.mark.parametrize(("owner", "name", "number"), PLACES)
def test_a_signal_while_the_adapter_is_not_in_its_place_saves_the_whole_adapter(
    switched, monkeypatch, owner, name, number
):
    """In the given call of a function. PEFT turns each layer on again, after it has turned off all;
    torch.func.functional_call puts the reference in, and after an interrupt it stays there."""
    run, weights = switched
    inner = getattr(owner, name)
    calls = itertools.count(1)

    def interrupted(*arguments, **keywords):
        if next(calls) == number:
            raise KeyboardInterrupt
        return inner(*arguments, **keywords)

    monkeypatch.setattr(owner, name, interrupted)
    refusal(scored, run, error=KeyboardInterrupt)
    run.step += 1
    grpo_arca.save_checkpoint(run)  # as a run does that ends
    folder = Path(run.args.output_dir, f"checkpoint-{run.step}")
    for_peft = load_file(folder / "adapter_model.safetensors")
    state = torch.load(folder / "state.pt", weights_only=True)["adapter"]
    assert state.keys() == weights.keys()
    for name, weight in weights.items():
        assert torch.equal(state[name], weight), name
        assert torch.equal(for_peft[name.replace(".default", "")], weight), name
    run.model.base_model.enable_adapter_layers()


# ---- A launcher that ends ------------------------------------------------------------------------
def updates(tmp_path: Path) -> int:
    path = tmp_path / "out/metrics.jsonl"
    return path.read_text().count('"reward"') if path.exists() else 0


@pytest.mark.slow
def test_a_run_ends_with_a_checkpoint_when_its_launcher_is_killed(tmp_path):
    """`accelerate launch` passes no signal on; a worker left behind would train for ever."""
    command = [
        sys.executable, "-m", "accelerate.commands.launch", "--main_process_port", "0",
        "--num_processes", "2", "--multi_gpu", str(ROOT / "grpo_arca.py"), *command_line(ENDLESS),
    ]  # fmt: skip
    launcher = subprocess.Popen(command, cwd=tmp_path, env=os.environ | {"OMP_NUM_THREADS": "1"})
    workers: list[psutil.Process] = []
    try:
        deadline = time.monotonic() + 240
        while updates(tmp_path) < 2:
            assert time.monotonic() < deadline
            time.sleep(0.1)
        workers = psutil.Process(launcher.pid).children()
        assert len(workers) == 2
        launcher.kill()
        launcher.wait(60)
        _, alive = psutil.wait_procs(workers, timeout=120)
    finally:
        for worker in workers:
            with contextlib.suppress(psutil.NoSuchProcess):
                worker.kill()
        launcher.kill()
    assert not alive
    last, (checkpoint,) = steps_left(tmp_path)
    assert checkpoint == f"checkpoint-{last}"
    assert (tmp_path / "out" / checkpoint / "state.pt").is_file()
