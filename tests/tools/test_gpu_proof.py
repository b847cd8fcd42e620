"""tools/gpu_proof.py: what it reads of its parts, when it calls a goal reached, what it writes."""

import json
import shutil

import gpu_proof
import pytest
from gpu_proof import Part
from support import ROOT

GOALS = {"a": (2.0, 3.0), "b": (0.0, 1.0)}


def test_figures_are_those_of_the_run_the_bench_and_the_count_of_a_part(tmp_path):
    (tmp_path / "run").mkdir()
    rows = [{"step": 0, "eval": {}}]
    rows += [
        {"loss": 0.0, "seconds_rollout": 1.0, "seconds_update": s, "sampling_gap": s / 100}
        for s in (9.0, 1.0, 2.0)
    ]
    (tmp_path / "run/metrics.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "run/summary.json").write_text('{"after": {"greedy_accuracy": 0.75}}')
    figures = ("step", "update", "tokens/s", "peak GiB")
    repeats = {"x": [dict.fromkeys(figures, value) for value in (1.0, 4.0, 10.0)]}
    repeats["y"] = [dict.fromkeys(figures, value) for value in (2.0, 12.0, 10.0)]
    (tmp_path / "bench.json").write_text(json.dumps({"repeats": repeats}))
    (tmp_path / "count.json").write_text('{"a decode step": 7}')
    found = gpu_proof.figures_of(tmp_path)
    expected = {
        "greedy_accuracy": 0.75, "sampling_gap": 0.09, "seconds of a step": 3.0,
        "x: step": 4.0, "y: step": 10.0, "y: step over the first's": 2.0, "y: peak GiB": 12.0,
        "y: update": 10.0, "repeats": 3.0,
        "a decode step": 7,
    }  # fmt: skip
    assert {name: found[name] for name in expected} == expected


@pytest.mark.parametrize(
    ("part", "status", "gpus", "verdicts"),
    [
        ("bench", "done", ["H200"], ["done", "holds", "misses"]),
        ("bench", "failed with 1", ["H200"], ["failed with 1", "", ""]),
        ("bench", "done", [], ["done", "", ""]),
        ("count", "done", [], ["done", "holds", "misses"]),
    ],
)
def test_a_goal_holds_only_where_a_part_has_ended_well_on_a_gpu(part, status, gpus, verdicts):
    """Unless it needs none."""
    state = {
        "status": status, "seconds": 3, "hardware": {"gpus": gpus},
        "figures": {"a": 2.5, "b": 1.5},
    }  # fmt: skip
    rows = gpu_proof.rows_of(Part(part, 9, "", GOALS), state)
    assert [row.split("|")[-2].strip() for row in rows] == verdicts
    assert rows[1].startswith("| | a | 2.5 | 2 to 3 |")


def test_the_part_of_tests_names_those_that_are_run_by_default():
    (part,) = (part for part in gpu_proof.PARTS if part.name == "tests")
    path = ROOT / part.command.split()[-1]
    assert path.is_file() and "slow" not in path.read_text()


def test_parts_are_done_once_and_their_end_is_in_the_table(run_tool, tmp_path, monkeypatch):
    parts = [
        Part("good", 20, "echo {repeats} {run} >> {out}/../count.txt", {}),
        Part("bad", 20, "exit 3", {"figure": (0.0, 1.0)}),
        Part("long", 1, "sleep 30 & sleep 30", {}),
    ]
    monkeypatch.setattr(gpu_proof, "PARTS", parts)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    folder = tmp_path / "proof"

    def start(*words: str) -> list[str]:
        return run_tool(gpu_proof, *words, "--small", "--folder", folder).out.splitlines()

    page = start("bad")
    assert page[0] == "bad: up to 20 s"
    assert page[3] == "Not measured yet: good, long."
    page = start()
    assert page[:3] == ["good: up to 20 s", "bad: up to 20 s", "long: up to 1 s"]
    assert (folder / "gpu.md").read_text() == "\n".join(page[3:])
    ends = [line.split("|")[-2].strip() for line in page if line.startswith("|")]
    assert ends == ["", "---", "done", "failed with 3", "", "took more than 1 s"]
    assert start()[:2] == ["bad: up to 20 s", "long: up to 1 s"]
    (count,) = (folder / "count.txt").read_text().splitlines()
    assert count.startswith("3 --per_device")

    report = json.loads((folder / "data/gpu_proof/gpu.json").read_text())
    assert report["bad"]["command"] == "exit 3"

    # What another machine has measured stays.
    monkeypatch.setattr(gpu_proof, "PARTS", [*parts, Part("new", 20, "exit 4", {})])
    shutil.rmtree(folder / "bad")
    assert "Not measured yet: nothing." in start("new")
    assert "failed with 3" in (folder / "gpu.md").read_text()
