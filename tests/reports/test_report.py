"""What a run says on the terminal and leaves in its folder, but for credit.html and its metrics."""

import json
import re
import warnings
from unittest import mock

import pytest
import torch
import tqdm.std
from matplotlib.figure import Figure
from support import TINY, few_chains, metrics_of, read_jsonl

import grpo_arca
from common import report
from common.reward import GRADER

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
    assert "boxed" not in out
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
        "steps_with_gradient": sum(row.get("grad_norm", 0) > 0 for row in metrics_of(folder)),
    }
    before, after = (100 * accuracies[i] for i in (0, 2))
    assert f"sampled accuracy{before:11.1f}%{after:7.1f}%{after - before:+8.1f}\n" in out
    assert out.count(f"{summary['steps_with_gradient']} of 2 updates had a gradient\n") == 1

    # The completions: a group of each rollout, and as many of each part of an evaluation.
    rows = read_jsonl(folder / "completions.jsonl")
    kinds = ["greedy"] * 4 + ["sampled"] * 4
    assert [row["kind"] for row in rows] == kinds + (["train"] * 4 + kinds) * 2
    assert [row["step"] for row in rows] == [0] * 8 + [1] * 12 + [2] * 12
    chains = {p.prompt: p for p in few_chains(40, False, seed=1) + few_chains(4, True)}
    for row in rows:
        (grade,) = GRADER.grade([row["completion"]], [chains[row["prompt"]]])
        found = (row["reward"], row["rewards"], row["advantage"] is None)
        assert found == (grade, {"accuracy_reward": grade}, row["eval"])
    group = torch.tensor([row["reward"] for row in rows[8:12]])
    advantages = ((group - group.mean()) / (group.std() + 1e-4)).tolist()
    assert [row["advantage"] for row in rows[8:12]] == pytest.approx(advantages, rel=1e-4)
    assert "base_model:" not in (folder / "adapter/README.md").read_text()  # the Hub wants an id


def test_a_run_without_a_signal_says_so(run_main, caplog, tmp_path):
    """No answer is long enough for a box, and a parameter's name is misspelt."""
    (tmp_path / "flat.py").write_text("def pay(prompts, answr='7', log_metric=None, **_):\n"
                                      "    return [int(answr)] * len(prompts)\n")  # fmt: skip
    _, out, _ = run_main(reward_funcs=["accuracy_reward", "flat.pay"], eval_steps=1)
    assert out.count("no sampled answer has a \\boxed{} that accuracy_reward could read\n") == 1
    assert "0 of 3 updates had a gradient\n" in out
    (said,) = re.findall("no column of the data is called (.*)", caplog.text)
    assert said == "answr, so the reward function pay gets its default, '7'"
    lines = (tmp_path / "out/completions.jsonl").read_text().splitlines()
    assert {row["kind"]: row["rewards"] for row in map(json.loads, lines)} == {
        "greedy": {"accuracy_reward": 0.0},
        "sampled": {"accuracy_reward": 0.0, "pay": 7.0},
        "train": {"accuracy_reward": 0.0, "pay": 7.0},
    }


def test_curves_are_those_of_the_log(tmp_path, monkeypatch):
    """Evaluations as they are, and updates pale, with their mean over a tenth of the run bold."""
    rows = [{"step": 0, "eval": {"sampled_accuracy": 0.25, "pass@2": 0.5, "rewards/pay": -3.0}}]
    others = {
        "rewards/pay/mean": -4.0, "rewards/pay/$": 9.0, "kl": None, "grad_norm": 0.0,
        "seconds_update": 2.0, "seconds_credit": 1.0, "own $\\frac": 1.0, "text": "a",
    }  # fmt: skip
    rows += [{"step": step, "reward": float(step == 15)} | others for step in range(1, 41)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        report.write_curves(tmp_path / "curves.png", rows, "a $title_ \\frac")
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")

    save = mock.create_autospec(Figure.savefig)
    monkeypatch.setattr(Figure, "savefig", save)
    report.write_curves(tmp_path / "curves.png", rows[:1], "")
    report.write_curves(tmp_path / "curves.png", rows, "")
    panels = {axes.get_ylabel(): axes for axes in save.call_args.args[0].axes}
    assert {axes.get_xlabel() for axes in panels.values()} == {"step"}
    legends = {name: axes.get_legend().get_texts() for name, axes in panels.items()}
    assert {name: [text.get_text() for text in texts] for name, texts in legends.items()} == {
        "share of problems solved": ["eval/sampled_accuracy", "eval/pass@2"],
        "rewards/pay": ["eval/rewards/pay", "rewards/pay/mean"],
        "reward": ["reward"],
        "rewards/pay/$": ["rewards/pay/$"],
        "seconds": ["seconds_update", "seconds_credit"],
        "own $\\frac": ["own $\\frac"],
    }
    first, *_ = panels["share of problems solved"].get_lines()
    assert first.get_xydata().tolist() == [[0, 0.25]]
    pale, bold = panels["reward"].get_lines()
    assert pale.get_ydata().tolist() == [float(step == 15) for step in range(1, 41)]
    smooth = [0.2 * (13 <= step <= 17) for step in range(1, 41)]
    assert bold.get_ydata().tolist() == pytest.approx(smooth)
