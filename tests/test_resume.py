"""A run that was killed or interrupted and resumed ends as if nothing had happened, to the bit."""

import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT

SCRIPTS = ("grpo_arca", "grpo_oar", "grpo_strace")
# Two updates a rollout and two passes over it, dropout, KL: all that a checkpoint might forget.
FLAGS = {
    "max_steps": 8, "per_device_train_batch_size": 8, "gradient_accumulation_steps": 1,
    "steps_per_generation": 2, "num_iterations": 2, "num_generations": 4, "lora_dropout": 0.1,
    "beta": 0.05, "max_eval_samples": 4, "num_generations_eval": 1, "eval_steps": 4,
    "save_steps": 4, "warmup_steps": 1, "output_dir": "out",
}  # fmt: skip
TIMES = ("seconds", "tokens_per_second", "peak_memory")  # beginnings of names


def case(folder: Path, script: str = "grpo_arca", stop: dict | None = None, **flags) -> dict:
    """One command for fork_server.py, in a folder of its own."""
    folder.mkdir(parents=True, exist_ok=True)
    argv = [f"--{name}={value}" for name, value in (FLAGS | flags).items()]
    return {"folder": str(folder), "script": script, "argv": argv} | (stop or {})


def run(tmp_path: Path, cases: list[dict], jobs: int = 2) -> list[str]:
    """The exit codes."""
    (tmp_path / "cases.json").write_text(json.dumps(cases))
    command = [sys.executable, ROOT / "tests/fork_server.py", tmp_path / "cases.json", str(jobs)]
    subprocess.run(command, check=True)
    return [(Path(case["folder"]) / "code.txt").read_text() for case in cases]


def outcome(folder: Path) -> dict[str, object]:
    """All that a run leaves, without times and memory."""
    out = folder / "out"
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    summary = json.loads((out / "summary.json").read_text())
    result = {
        "metrics": [{k: v for k, v in row.items() if not k.startswith(TIMES)} for row in rows],
        "summary": {k: v for k, v in summary.items() if not k.startswith(TIMES)},
        "completions": (out / "completions.jsonl").read_bytes(),
        "adapter": (out / "adapter/adapter_model.safetensors").read_bytes(),
    }
    for path in out.glob("checkpoint-*/training_state.safetensors"):
        result[f"state of {path.parent.name}"] = path.read_bytes()
    return result


def stderr(folder: Path) -> str:
    return (folder / "stderr.txt").read_text()


SIGNALS = (signal.SIGINT, signal.SIGTERM)
KEPT = {"save_steps": 2, "num_iterations": 1, "save_total_limit": 2}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Of every script: whole, killed in the second rollout, and that resumed. The first: also
    interrupted and resumed, interrupted twice, with few checkpoints, and with what is refused."""
    at = tmp_path_factory.mktemp("resume")
    kill = {"signal": signal.SIGKILL, "when": "out/checkpoint-4", "after": 0.3}
    cases = [case(at / script / "whole", script) for script in SCRIPTS]
    cases += [case(at / script / "killed", script, kill) for script in SCRIPTS]
    for number in SIGNALS:  # in the middle of a rollout's updates
        stop = {"signal": number, "when": "out/metrics.jsonl", "lines": 3}
        cases.append(case(at / str(number), stop=stop, save_steps=0))
    stop = {"signal": signal.SIGINT, "when": "out/metrics.jsonl", "times": 2}
    cases += [case(at / "twice", stop=stop), case(at / "kept", **KEPT)]
    codes = run(at, cases)
    killed, twice = str(-signal.SIGKILL), str(128 + signal.SIGINT)
    assert codes == ["0"] * 3 + [killed] * 3 + ["0"] * 2 + [twice, "0"], codes
    said = {number: (at / f"{number}/stdout.txt").read_text() for number in SIGNALS}
    again = {"resume_from_checkpoint": "latest"}
    cases = [case(at / script / "killed", script, **again) for script in SCRIPTS]
    cases += [case(at / str(number), save_steps=0, **again) for number in SIGNALS]
    assert run(at, cases) == ["0"] * 5, [stderr(Path(c["folder"])) for c in cases]
    return at, said


@pytest.mark.parametrize("script", SCRIPTS)
def test_killed_and_resumed_is_the_same_run(runs, script):
    whole, killed = (outcome(runs[0] / script / name) for name in ("whole", "killed"))
    steps = [row["step"] for row in whole["metrics"] if "reward" in row]
    assert steps == list(range(1, 9)) and len(whole["metrics"]) == 8 + 3
    assert any(row.get("grad_norm", 0) > 0 for row in whole["metrics"])
    assert {"state of checkpoint-4", "state of checkpoint-8"} <= whole.keys() == killed.keys()
    for name in whole:
        assert whole[name] == killed[name], name


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_saves_and_says_how_to_go_on(runs, number):
    """A rollout's first updates are undone, and done again later."""
    at, said = runs
    assert "interrupted, saved out/checkpoint-" in said[number]
    assert "grpo_arca.py" in said[number]
    assert "--resume_from_checkpoint latest" in said[number]
    assert "Traceback" not in stderr(at / str(number))
    whole, resumed = outcome(at / "grpo_arca/whole"), outcome(at / str(number))
    for name in ("metrics", "summary", "completions", "adapter"):
        assert whole[name] == resumed[name], name


def test_only_the_latest_are_kept(runs):
    out = runs[0] / "kept/out"
    left = sorted(path.name for path in out.iterdir() if path.is_dir())
    assert left == ["adapter", "checkpoint-6", "checkpoint-8"]
    kinds = {path.suffix for path in (out / "checkpoint-8").iterdir()}
    assert kinds == {".safetensors", ".json", ".md"}  # nothing pickled


def test_what_cannot_be_resumed_is_said_in_a_sentence(runs, tmp_path):
    """And a finished run is neither overwritten nor taken for an unfinished one."""
    broken = tmp_path / "broken/checkpoint-4"
    broken.mkdir(parents=True)
    (broken / "training_state.json").write_text('{"progress": ')
    whole = runs[0] / "grpo_arca/whole/out"
    first = {"resume_from_checkpoint": whole / "checkpoint-4"}
    wanted = [
        ("is of an earlier run", {"output_dir": whole}),
        ("is not a checkpoint", {"resume_from_checkpoint": "nowhere"}),
        ("cannot resume", {"resume_from_checkpoint": broken}),
        ("is of an earlier run", {"output_dir": whole, **first}),
        ("cannot resume", {"lora_r": 4, **first}),
        (None, {"resume_from_checkpoint": "latest", "max_steps": 0}),  # from the start
    ]
    before = {path: path.stat().st_mtime_ns for path in whole.rglob("*")}
    cases = [case(tmp_path / str(i), **flags) for i, (_, flags) in enumerate(wanted)]
    codes = run(tmp_path, cases)
    said = [stderr(Path(c["folder"])) for c in cases]
    assert codes == ["2"] * 5 + ["0"], said
    for text, (words, _) in zip(said, wanted, strict=True):
        errors = [line for line in text.splitlines() if "error:" in line]
        assert [words in line for line in errors] == [True] * (words is not None), text
        assert "Traceback" not in text
    assert before == {path: path.stat().st_mtime_ns for path in whole.rglob("*")}


@pytest.mark.slow
def test_fifty_kills_at_random_moments(tmp_path):
    """Some fall inside a save. KILL_COUNT of them, where it is set."""
    count = int(os.environ.get("KILL_COUNT", "50"))
    flags = {"save_steps": 1, "num_iterations": 1, "max_steps": 4, "steps_per_generation": 1}
    assert run(tmp_path, [case(tmp_path / "whole", **flags)]) == ["0"]
    expected = outcome(tmp_path / "whole")
    out = tmp_path / "whole/out"
    first, last = ((out / name).stat().st_mtime for name in ("config.json", "summary.json"))
    moments, folders = random.Random(0), [tmp_path / str(i) for i in range(count)]
    stops = []  # each from a point that the run reaches, however slow the machine is by then
    for i in range(count):
        point = ["config.json", "checkpoint-1", "checkpoint-2", "checkpoint-3"][i % 4]
        stops.append({"signal": signal.SIGKILL, "after": moments.uniform(0, (last - first) / 3)})
        stops[-1]["when"] = f"out/{point}"
    cases = [case(f, stop=stop, **flags) for f, stop in zip(folders, stops, strict=True)]
    codes = run(tmp_path, cases)
    killed = [f for f, code in zip(folders, codes, strict=True) if code == str(-signal.SIGKILL)]
    assert len(killed) >= count // 2 and set(codes) <= {"0", str(-signal.SIGKILL)}, codes
    steps = [len(list(f.glob("out/checkpoint-*"))) for f in killed]
    assert len(set(steps)) >= 3, steps  # at various points of the run
    again = [case(f, resume_from_checkpoint="latest", **flags) for f in killed]
    assert set(run(tmp_path, again)) == {"0"}
    for folder in folders:
        result = outcome(folder)
        for name in expected:
            assert result[name] == expected[name], (folder, name)
