"""tools/bench.py: what it measures, in which order, and against what."""

import json
import re
import sys
from pathlib import Path

import bench
import gpu_proof
import pytest
from accelerate.state import AcceleratorState
from support import TINY_RUN, command_line, refusal

# Stands in for a script: a run whose warm-up is slow, in a checkout that has its own speed.
SCRIPT = """
import json, pathlib, sys
seconds = float(pathlib.Path("speed.txt").read_text())
out = pathlib.Path(sys.argv[sys.argv.index("--output_dir") + 1])
out.mkdir()
with open(out / "metrics.jsonl", "w") as file:
    print(json.dumps({"step": 0, "eval": {"sampled_accuracy": 0.5}}), file=file)
    for factor in (100, 1, 3):
        row = {"seconds_rollout": 4, "seconds_score": 0, "seconds_credit": 1, "seconds_update": 5}
        row = {name: seconds * factor * value for name, value in row.items()}
        print(json.dumps(row | {"rollout_tokens": 80, "peak_memory_gb": factor}), file=file)
print(pathlib.Path.cwd().name, *sys.argv[1:], file=open("../calls.txt", "a"))
"""


@pytest.fixture
def checkouts(tmp_path, monkeypatch) -> tuple[Path, Path]:
    """Two checkouts with a script, the second one twice as fast; the bench belongs to the first."""
    for name, seconds in {"here": "2", "there": "1"}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "script.py").write_text(SCRIPT)
        (tmp_path / name / "speed.txt").write_text(seconds)
    monkeypatch.setattr(bench, "ROOT", tmp_path / "here")
    return tmp_path / "here", tmp_path / "there"


def test_figures_are_means_of_the_updates_after_the_warm_up(checkouts):
    here, _ = checkouts
    contender = bench.Contender("x", here, [sys.executable, "script.py", "--a"], "x")
    found = bench.measure(contender, ["--b"], warmup=1)
    assert found == {
        "rollout": 16, "score": 0, "credit": 4, "update": 20, "step": 40, "tokens/s": 80 / 16,
        "peak GiB": 3,
    }  # fmt: skip
    assert (here / "../calls.txt").read_text().startswith("here --a --b --output_dir ")
    (here / "speed.txt").write_text("0")  # as of a rollout's later updates
    assert "one update each" in refusal(bench.measure, contender, ["--b"], warmup=1)


def test_another_checkout_runs_in_turn_and_ratios_are_to_it(checkouts, run_tool):
    here, there = checkouts
    words = [
        "script.py --a", "script.py", "--against", there, "--repeats", 2, "--output",
        here / "f.json", "--", "--seed=2",
    ]  # fmt: skip
    lines = run_tool(bench, *words).out.splitlines()[1:]
    names = ["script.py --a, there", "script.py --a", "script.py, there", "script.py"]
    ratios = ["1.000 (1.000 - 1.000)", "2.000 (2.000 - 2.000)"] * 2
    for line, name, ratio, step in zip(lines, names, ratios, [20, 40] * 2, strict=True):
        assert re.match(f"{name} ({re.escape(ratio)} +){{3}}{step}.00", line.strip())
    calls = (there / "../calls.txt").read_text().splitlines()
    first_words = [call.split(" --learning_rate")[0] for call in calls]
    assert first_words == [
        "there --a",
        "here --a",
        "there",
        "here",
        "here",
        "there",
        "here --a",
        "there --a",
    ]
    assert all(" --max_steps 4 --seed=2 --output_dir " in call for call in calls)
    assert len(json.loads((here / "f.json").read_text())["repeats"][names[0]]) == 2


def test_a_run_that_fails_loses_none_before_it(checkouts, run_tool):
    here, _ = checkouts
    assert "missing.py failed" in refusal(
        run_tool, bench, "script.py", "missing.py", "--repeats", 1, "--output", here / "f.json"
    )
    assert gpu_proof.bench_figures(here / "f.json")["script.py: step"] == 40


def test_a_step_asks_a_gpu_for_no_more_operations_than_the_goals_allow(tmp_path, monkeypatch):
    """Counted for one and for two layers. Each further one of the 28 takes as many."""
    counts = []
    monkeypatch.setattr(bench, "CACHE", tmp_path)
    monkeypatch.setattr(bench, "VOCABULARY", 2048)
    for layers in (1, 2):
        monkeypatch.setitem(bench.SHAPES, f"{layers}", (64, 64, layers, 8, True))
        flags = {
            "model_name_or_path": bench.make_checkpoint(f"{layers}"),
            "reward_funcs": "bench.variety",
            "dtype": "bfloat16",
        }
        AcceleratorState._reset_state()
        counts.append(bench.count_operations(command_line(flags)))
    (part,) = (part for part in gpu_proof.PARTS if part.name == "count")
    assert counts[0].keys() == part.goals.keys()
    for name, (_, goal) in part.goals.items():
        assert goal * 0.9 < counts[0][name] + 27 * (counts[1][name] - counts[0][name]) <= goal, name


@pytest.mark.slow
def test_a_method_and_trl_are_measured_on_random_weights_of_a_shape(
    run_tool, tmp_path, monkeypatch
):
    """TRL samples as many tokens as the method: neither stops before the greatest length."""
    pytest.importorskip("trl", reason="pip install trl")
    monkeypatch.setattr(bench, "CACHE", tmp_path)
    monkeypatch.setitem(bench.SHAPES, "0.6B", (64, 64, 1, 8, True))
    monkeypatch.setattr(bench, "VOCABULARY", 8192)
    words = [
        "grpo_arca.py", "--trl", "--shape", "0.6B", "--repeats", 1, "--updates", 1, "--output",
        tmp_path / "f.json", "--",
    ]  # fmt: skip
    flags = {name: value for name, value in TINY_RUN.items() if name != "max_steps"}
    assert " TRL " in run_tool(bench, *words, *command_line(flags)).out
    repeats = json.loads((tmp_path / "f.json").read_text())["repeats"]
    for name in ("grpo_arca.py", "TRL"):
        (row,) = repeats[name]
        assert row["tokens/s"] * row["rollout"] == pytest.approx(8 * 8), name
