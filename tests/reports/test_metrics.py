"""The metrics of docs/metrics.md, against values worked out by hand or by plain loops."""

import importlib
import itertools
import json
import math
import re
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from accelerate import Accelerator
from support import ROOT, SCRIPTS, fixed_draws, metrics_of, pays, random_batch, refusal

import grpo_arca
from common.metrics import (
    credit_averages,
    eval_metrics,
    means,
    rollout_metrics,
    timed,
)
from common.run_log import RunLog

PAGE = (ROOT / "docs/metrics.md").read_text(encoding="utf-8")


# ---- Evaluations and credit ----------------------------------------------------------------------
@pytest.mark.parametrize("name", ["length", "problem", "is_truncated"])
def test_accuracies_and_pass_at_k_are_counted_over_every_subset_of_samples(name):
    """Of 5 samples a problem, c are right. Another reward function judges some of them.

    Of 4 greedy answers and 20 samples, 3 and 2 are truncated.
    """
    right = {0: [0, 0, 0, 0, 0], 1: [0, 0, 1, 0, 0], 2: [1, 0, 1, 1, 0], 3: [1, 1, 1, 1, 1]}
    verdicts = [("greedy", p, p > 0, [float(p > 2), 9.0]) for p in right]
    for problem, marks in right.items():
        verdicts += [
            ("sampled", problem, problem + i == 1, [float(mark), 0.5 if mark else math.nan])
            for i, mark in enumerate(marks)
        ]
    figures = eval_metrics(["accuracy_reward", name], verdicts)

    expected = {
        "greedy_accuracy": 1 / 4, "sampled_accuracy": 9 / 20, f"rewards/{name}": 0.5,
        "truncated_share": 5 / 24,
    }  # fmt: skip
    for k in (2, 4, 5):
        subsets = [any(s) for m in right.values() for s in itertools.combinations(m, k)]
        expected[f"pass@{k}"] = sum(subsets) / len(subsets)
    assert figures == pytest.approx(expected)
    unanswered = [(*verdict[:3], [math.nan, 1.0]) for verdict in verdicts]
    assert eval_metrics(["accuracy_reward", name], unanswered) == {
        f"rewards/{name}": 1.0, "truncated_share": 5 / 24,
    }  # fmt: skip
    said = refusal(eval_metrics, ["accuracy_reward"], unanswered)
    assert "no answers, and no reward function judges them" in said


def test_figures_of_credit_are_of_completions_that_learn():
    """The second completion has no advantage and the third no token in the loss."""
    weights = torch.tensor([[3.0, 1.0, 0.0], [1.0, 1.0, 0.0], [1.0, 1.0, 0.0]])
    micro = SimpleNamespace(
        weights=weights,
        mask=weights > 0,
        advantages=torch.tensor([1.0, 0.0, 1.0]),
        loss_mask=(weights > 0) & torch.tensor([[True], [True], [False]]),
        sampled_logp=torch.full((3, 3), -1.0),
        reference_logp=torch.tensor([[0.5], [0.0], [9.0]]) - 1,
    )
    expected = {"weight_gini": 0.25, "weight_effn": 0.8, "kl": (math.exp(0.5) - 1.5) / 2}
    assert means(Accelerator(cpu=True), [credit_averages(micro)]) == pytest.approx(expected)


# ---- A rollout and an update ---------------------------------------------------------------------
def test_figures_of_a_rollout_are_those_counted_by_hand():
    """Two groups of two; the last completion is judged by no function."""
    mask = torch.tensor([[1, 1, 1], [1, 0, 0], [1, 1, 0], [1, 1, 0]]).bool()
    batch = SimpleNamespace(
        rewards=torch.tensor([1.0, 0.0, 0.5, math.nan]),
        mask=mask,
        truncated=torch.tensor([True, False, False, False]),
        entropy=torch.where(mask, torch.tensor([[0.8], [0.0], [0.4], [0.2]]), 9.0),
    )
    advantages = torch.tensor([[0.7, -0.7], [0.0, 0.0]])
    logged = {"sampled_completions": [3, 1], "rewards/length/mean": [4.0, 2.0]}
    figures = rollout_metrics(Accelerator(cpu=True), batch, advantages, logged, seconds=2.0)
    del figures["reward_timeouts"]  # it counts since the process began
    assert figures == pytest.approx(
        {
            "sampled_completions": 4,
            "rewards/length/mean": 3.0,
            "reward": 0.5,
            "completion_length": 2.0,
            "truncated_share": 0.25,
            "entropy": (3 * 0.8 + 2 * 0.4 + 2 * 0.2) / 8,
            "zero_std_share": 0.5,
            "rollout_tokens": 8,
            "tokens_per_second": 4.0,
        }
    )


def test_figures_of_an_update_are_those_of_a_plain_loop(make_run):
    run = make_run(epsilon=0.1, epsilon_high=0.3)
    micro = random_batch(rows=6)
    logp = grpo_arca.training_forward(run, micro).detach()
    micro.old_logp = torch.where(micro.mask, logp + 0.5 * fixed_draws(*logp.shape) - 0.25, 0.0)
    micro.sampled_logp = micro.old_logp - 0.25 * micro.mask
    ratio = (logp - micro.old_logp).exp()
    is_up = (micro.advantages > 0)[:, None]
    clipped = (is_up & (ratio > 1.3) | ~is_up & (ratio < 0.9)) & micro.mask
    kl = -torch.log(ratio) - 1 + ratio
    expected = {
        "approx_kl": (kl.double().sum() / micro.mask.sum()).item(),
        "clip_fraction": (clipped.sum() / micro.mask.sum()).item(),
        "clip_fraction_sequence": clipped.any(1).float().mean().item(),
        "sampling_gap": 0.25,
        "skipped_update": 0.0,
    }
    figures = grpo_arca.update(run, [micro])
    assert figures == pytest.approx(figures | expected)


def test_an_own_accuracy_reward_stands_beside_the_graders_verdict(make_run):
    run = make_run(max_eval_samples=1, num_generations_eval=2, max_completion_length=4)
    run.reward_funcs = {"accuracy_reward": pays(0.0, 1.0)}
    run.log = run.bar = mock.Mock()
    grpo_arca.evaluate(run)
    assert run.log.write.call_args.args[0]["eval"] == {
        "greedy_accuracy": 0.0,
        "sampled_accuracy": 0.0,
        "pass@2": 0.0,
        "rewards/accuracy_reward": 0.5,
        "truncated_share": 1.0,
    }


# ---- metrics.md ----------------------------------------------------------------------------------
def documented_keys(script: str) -> set[str]:
    """Returns the keys in the page's tables, but for sections that are only another script's."""
    keys = set()
    for section in re.split(r"^##+ ", PAGE, flags=re.MULTILINE):
        if not section.startswith("Only") or f"`{script}.py`" in section:
            keys.update(re.findall(r"^\| `(\S+?)` \|", section, re.MULTILINE))
    return keys


@pytest.mark.parametrize("script", SCRIPTS)
def test_what_a_run_writes_is_documented_and_what_is_documented_is_written(script, make_run):
    module = importlib.import_module(script)
    run = make_run(module, beta=0.1, max_eval_samples=2, num_generations_eval=2)
    run.reward_funcs |= {"pays": pays(0.0, 1.0)}
    run.reward_weights = torch.ones(2, dtype=torch.float64)
    run.log = run.bar = mock.Mock()
    figures = {}
    batch = module.collect(run, figures)
    (micros,) = module.micro_batches(run, batch)
    module.score(run, batch, micros, figures)
    with timed(figures, "seconds_update"):
        figures |= module.update(run, micros)
    module.evaluate(run)
    written = set(figures) | {f"eval/{name}" for name in run.log.write.call_args.args[0]["eval"]}
    generic = {
        "rewards/accuracy_reward/mean": "rewards/<function>/mean",
        "rewards/pays/mean": "rewards/<function>/mean",
        "eval/rewards/pays": "eval/rewards/<function>",
        "eval/pass@2": "eval/pass@<k>",
    }
    assert "rewards/pays/letters" in written and "`rewards/<function>/<name>`" in PAGE
    written -= {"rewards/pays/letters"}
    assert {generic.get(name, name) for name in written} == documented_keys(script)


# ---- The log -------------------------------------------------------------------------------------
def open_log(folder, resume_step: int = 0, **config) -> RunLog:
    flags = {
        "output_dir": str(folder), "metric_for_best_model": None, "num_generations": 2,
        "max_steps": 9, "reward_funcs": ["variety.pay", "my.mine"], "reward_weights": None,
    }  # fmt: skip
    return RunLog(Accelerator(cpu=True), flags | config, "1234", resume_step)


def test_a_full_disk_at_a_resume_leaves_the_log(tmp_path, monkeypatch):
    """Rows after the checkpoint are cut off in a file beside it."""
    rows = '{"step": 1, "reward": 0.5}\n{"step": 2, "reward": 0.5}\n'
    (tmp_path / "completions.jsonl").write_text(rows)

    def full_disk(path, *_, **__):
        path.open("w").close()
        raise OSError

    monkeypatch.setattr(Path, "write_text", full_disk)
    refusal(open_log, tmp_path, resume_step=1, error=OSError)
    assert (tmp_path / "completions.jsonl").read_text() == rows


def test_the_log_is_strict_json_and_a_tracker_gets_the_same(tmp_path, monkeypatch):
    log = open_log(tmp_path, seed=3)
    tracker = mock.Mock()
    monkeypatch.setattr(log.accelerator, "log", tracker)
    log.write({"step": 0, "eval": {"sampled_accuracy": 1 / 3}})
    log.write({"step": 1, "loss": math.nan, "reward": math.inf, "skipped_update": 1.0})
    rows = [
        {"step": 0, "eval": {"sampled_accuracy": 0.333333}},
        {"step": 1, "loss": None, "reward": None, "skipped_update": 1.0},
    ]
    assert metrics_of(tmp_path) == log.rows == rows
    assert tracker.mock_calls == [
        mock.call({"eval/sampled_accuracy": 0.333333}, 0),
        mock.call({"loss": None, "reward": None, "skipped_update": 1.0}, 1),
    ]
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["seed"] == 3
    assert config["environment"]["versions"]["torch"] == torch.__version__


def test_a_resumed_log_keeps_what_came_before_the_checkpoint(tmp_path):
    """The evaluation of the checkpoint's own step is made again; a torn last line goes."""
    log = open_log(tmp_path)
    for step in range(4):
        log.write({"step": step, "eval": {"sampled_accuracy": step / 10}})
        log.write({"step": step + 1, "loss": 0.0})
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 4, "ev')
    resumed = open_log(tmp_path, resume_step=2)
    assert [(row["step"], "eval" in row) for row in resumed.rows] == [
        (0, True), (1, False), (1, True), (2, False),
    ]  # fmt: skip
    assert metrics_of(tmp_path) == resumed.rows
    assert open_log(tmp_path).rows == []


@pytest.mark.parametrize(
    ("metric", "weights", "expected"),
    [(None, [1, -1], 1), ("rewards/mine", [-1, 1], 0), ("rewards/mine", [1, -1], 3)],
)
def test_the_best_evaluation_is_the_first_with_the_highest_figure(
    tmp_path, metric, weights, expected
):
    """A penalty has the lowest, in the last evaluation."""
    log = open_log(tmp_path, metric_for_best_model=metric, reward_weights=weights)
    for step, (accuracy, reward) in enumerate([(0.1, 0.9), (0.3, 0.2), (0.3, 0.9), (0.2, 0.1)]):
        log.write({"step": step, "eval": {"sampled_accuracy": accuracy, "rewards/mine": reward}})
    assert log.best_step == expected


def test_a_run_without_answers_may_go_on_with_another_reward_function(tmp_path):
    """The best evaluation is then the best by the newest one's figure."""
    open_log(tmp_path).write({"step": 0, "eval": {"rewards/first": 0.9}})
    log = open_log(tmp_path, resume_step=1)
    for step, reward in ((1, 0.5), (2, 0.4)):
        log.write({"step": step, "eval": {"rewards/other": reward}})
    assert (log.metric, log.best_step) == ("rewards/other", 1)
