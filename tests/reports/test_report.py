"""What a run says on the terminal and leaves in its folder, but for credit.html and its metrics."""

import json
import re
import warnings
from unittest import mock

import pytest
import tqdm.std
from support import ROOT, TINY, few_chains, metrics_of, read_jsonl

import grpo_arca
from common import report
from common.reward import GRADER

METRICS = (ROOT / "docs/metrics.md").read_text(encoding="utf-8")
WEIGHTS = {2: "out/adapter"}  # of the last step; no other step's are saved


def test_a_run_says_what_it_does_and_leaves_what_it_found(run_main, tmp_path, monkeypatch):
    """By the clock of the bar an evaluation takes 1,000 seconds, and all else none."""
    evaluate = mock.Mock(wraps=grpo_arca.eval_metrics)
    monkeypatch.setattr(grpo_arca, "eval_metrics", evaluate)
    monkeypatch.setattr(tqdm.std, "time", lambda: 1000.0 * evaluate.call_count)
    code, out, err = run_main(
        max_steps=2, eval_steps=1, max_eval_samples=4, max_completion_length=64
    )
    assert code == 0
    folder = tmp_path / "out"

    # The terminal: what trains on what into which folder, a line an evaluation, and a bar.
    first, second, *lines = out.splitlines()
    assert first.startswith(f"arca on {TINY}: trains 28 of 29 linear layers, 90,112 of ")
    assert second == "40 problems, 4 held out, into out"
    assert [line.split(",")[0] for line in lines[:3]] == ["step    0", "step    1", "step    2"]
    assert re.findall(r" 2/2 \[(\d\d:\d\d)<", err)[-1] == "00:00"

    # The summary and its table.
    evaluations = [row["eval"] for row in metrics_of(folder) if "eval" in row]
    accuracies = [evaluation["sampled_accuracy"] for evaluation in evaluations]
    best = accuracies.index(max(accuracies))
    summary = json.loads((folder / "summary.json").read_text())
    assert summary == {
        "before": evaluations[0],
        "after": evaluations[2],
        "best": {"step": best, "sampled_accuracy": max(accuracies), "weights": WEIGHTS.get(best)},
        "steps": 2,
    }
    before, after = (100 * accuracies[i] for i in (0, 2))
    assert f"sampled accuracy{before:11.1f}%{after:7.1f}%{after - before:+8.1f}\n" in out

    # The completions: a group of each rollout, and as many of each part of an evaluation.
    rows = read_jsonl(folder / "completions.jsonl")
    kinds = ["greedy"] * 4 + ["sampled"] * 4
    assert [row["kind"] for row in rows] == kinds + (["train"] * 4 + kinds) * 2
    assert [row["step"] for row in rows] == [0] * 8 + [1] * 12 + [2] * 12
    chains = {p.prompt: p for p in few_chains(40, False, seed=1) + few_chains(4, True)}
    for row in rows:
        assert GRADER.grade([row["completion"]], [chains[row["prompt"]]]) == [row["reward"]]


def test_curves_are_those_of_the_log(tmp_path, monkeypatch):
    """Evaluations as they are, and updates pale, with their mean over a tenth of the run bold."""
    rows = [{"step": 0, "eval": {"sampled_accuracy": 0.25}}]
    rows += [{"step": step, "reward": float(step == 15), "kl": None} for step in range(1, 41)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        report.write_curves(tmp_path / "curves.png", rows, "a $title_ \\frac")
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")

    save = mock.create_autospec(report.Figure.savefig)
    monkeypatch.setattr(report.Figure, "savefig", save)
    report.write_curves(tmp_path / "curves.png", rows[:1], "")
    report.write_curves(tmp_path / "curves.png", rows, "")
    lines = {axes.get_title(): axes.get_lines() for axes in save.call_args.args[0].axes}
    accuracy = next(line for line in lines["Accuracy"] if line.get_label().startswith("eval/s"))
    assert accuracy.get_xydata().tolist() == [[0, 0.25]]
    pale, bold = lines["Reward of a completion"]
    assert pale.get_ydata().tolist() == [float(step == 15) for step in range(1, 41)]
    smooth = [0.2 * (13 <= step <= 17) for step in range(1, 41)]
    assert bold.get_ydata().tolist() == pytest.approx(smooth)
    for key in re.findall(r"'([a-z_/]+)'", str([*report.PANELS.values()])):
        assert f"| `{key.replace('accuracy_reward', '<function>')}` |" in METRICS
