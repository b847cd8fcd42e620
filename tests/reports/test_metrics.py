"""The numbers, log, curves, credit page and report of a run (common/metrics.py and its neighbors).

They are compared with brute force and hand-computed vectors, and are given hostile text.
"""

import ast
import datetime
import errno
import importlib
import itertools
import json
import math
import os
import re
import shutil
import struct
import subprocess
import sys
import threading
import warnings
from dataclasses import asdict, dataclass
from functools import partial
from html.parser import HTMLParser
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import conftest
import pytest
import torch
from huggingface_hub import ModelCard
from tqdm import tqdm

import grpo_arca
from common import report, run_log
from common.credit_page import credit_group, write_credit_page
from common.curves import PANELS, smoothed, write_curves
from common.data import Problem, load_data
from common.messages import hints, introduction
from common.metrics import (
    credit_metrics,
    eval_metrics,
    pass_at_k,
    rollout_metrics,
    timed,
    weight_stats,
)
from common.report import about_best, before_after_table, report_run, write_model_card
from common.reward import shared_grader
from common.run_log import RunLog, environment, log_completions

ROOT = Path(__file__).resolve().parents[2]
EVAL = {"greedy_accuracy": 0.4, "sampled_accuracy": 0.35, "pass@4": 0.6}


# --------------------------------------------------------------------------------- pass@k


def test_pass_at_k_equals_enumeration_of_every_subset():
    for n in range(1, 8):
        for c in range(n + 1):
            for k in range(1, n + 1):
                draws = list(itertools.combinations([True] * c + [False] * (n - c), k))
                share = sum(any(draw) for draw in draws) / len(draws)
                assert pass_at_k(n, c, k) == pytest.approx(share, abs=1e-12), (n, c, k)


def test_pass_at_k_stays_finite_where_binomials_overflow():
    assert pass_at_k(5000, 1, 2500) == pytest.approx(0.5)


def test_eval_metrics_of_hand_counts():
    verdicts = [("greedy", 0, 1.0), ("greedy", 1, 0.0)]
    verdicts += [("sampled", 0, right) for right in (1.0, 1.0, 0.0)]
    verdicts += [("sampled", 1, right) for right in (0.0, 0.0, 1.0)]
    expected = {"greedy_accuracy": 0.5, "sampled_accuracy": 0.5, "pass@2": (1 + 2 / 3) / 2}
    assert eval_metrics(verdicts) == pytest.approx(expected | {"pass@3": 1.0})


# --------------------------------------------------------------------------- weight_stats


def stats_of(*weights: float) -> tuple[float, float]:
    row = torch.tensor([weights])
    stats = weight_stats(row, torch.ones_like(row))
    return tuple(stats[key].item() for key in ("gini", "effn"))


def test_weight_stats_of_hand_vectors():
    assert stats_of(0.7, 0.7, 0.7, 0.7) == pytest.approx((0.0, 1.0))
    assert stats_of(0.0, 5.0, 0.0, 0.0) == pytest.approx((0.75, 0.25))
    # [1, 2, 3, 4]: gini (-3*1 - 1*2 + 1*3 + 3*4) / (4 * 10); effn 100 / (4 * 30)
    assert stats_of(3.0, 1.0, 4.0, 2.0) == pytest.approx((0.25, 5 / 6))


def test_the_gini_index_of_equal_weights_is_never_below_0():
    """Of 11 equal weights it would be -2.5e-17 by rounding."""
    gini, _ = stats_of(*[1.0] * 11)
    assert gini == 0.0


def ragged(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """weights [16, 37] with zeros and a mask [16, 37] with holes, of 0, 1, ... tokens."""
    generator = torch.Generator().manual_seed(seed)
    weights = torch.rand(16, 37, generator=generator).pow(3)
    weights[:, ::5] = 0.0
    mask = torch.rand(16, 37, generator=generator) < torch.linspace(0.1, 1, 16)[:, None]
    mask[0] = False
    mask[1] = False
    mask[1, 3] = True
    return weights, mask


def naive_stats(row: list[float]) -> list[float]:
    n = len(row)
    total = sum(row)
    if n <= 1 or total == 0:
        return [math.nan] * 2
    ordered = sorted(row)
    gini = sum((2 * i - n - 1) * w for i, w in enumerate(ordered, start=1)) / (n * total)
    return [gini, 1 / (n * sum((w / total) ** 2 for w in row))]


def test_weight_stats_equal_a_loop_over_ragged_rows():
    weights, mask = ragged()
    stats = weight_stats(weights, mask)
    for b in range(len(weights)):
        expected = naive_stats(weights[b][mask[b]].tolist())
        got = [stats[key][b].item() for key in ("gini", "effn")]
        assert got == pytest.approx(expected, rel=1e-5, abs=1e-6, nan_ok=True), b


@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf, 1e30, -7.0])
def test_weight_stats_never_read_outside_the_mask(garbage):
    weights, mask = ragged()
    clean = weight_stats(weights, mask)
    dirty = weight_stats(weights.masked_fill(~mask, garbage), mask.long())
    for key in clean:
        torch.testing.assert_close(clean[key], dirty[key], rtol=0, atol=0, equal_nan=True)


def test_weight_stats_ignore_scale_even_an_extreme_one():
    weights, mask = ragged()
    for scale in (1e-30, 1e38):  # float32 sums would overflow
        for key, value in weight_stats(weights * scale, mask).items():
            expected = weight_stats(weights, mask)[key]
            torch.testing.assert_close(value, expected, rtol=1e-4, atol=1e-5, equal_nan=True)


def test_weight_stats_are_nan_without_two_tokens_or_any_weight():
    weights = torch.tensor([[1.0, 2.0], [1.0, 2.0], [0.0, 0.0], [1.0, 1.0]])
    mask = torch.tensor([[0, 0], [1, 0], [1, 1], [1, 1]])
    for value in weight_stats(weights, mask).values():
        assert value.isnan().tolist() == [True, True, True, False]
    assert weight_stats(torch.zeros(2, 0), torch.zeros(2, 0))["gini"].isnan().all()


# ------------------------------------------------------------------------ rollout metrics


@dataclass
class Micro:
    """What common/metrics.py reads of a grpo_*.py Batch."""

    rows: torch.Tensor
    ids: torch.Tensor
    attention: torch.Tensor
    truncated: torch.Tensor
    sampled_logp: torch.Tensor
    rewards: torch.Tensor
    advantages: torch.Tensor
    base_logp: torch.Tensor
    entropy: torch.Tensor
    weights: torch.Tensor
    loss_mask: torch.Tensor
    prompt_width: int = 2

    @property
    def mask(self) -> torch.Tensor:
        return self.attention[:, self.prompt_width :]


GROUP_SIZE = 8


def micro(rows: list[int], right: list[float], shape: list[float] | None = None, **more) -> Micro:
    """Completions of the given places; row r has r % 5 + 1 tokens, whose ids are r + 1."""
    places = torch.tensor(rows)
    width = 6
    lengths = places % 5 + 1
    mask = torch.arange(width) < lengths[:, None]
    noise = torch.stack([torch.rand(width, generator=seeded(row)) for row in rows])
    rewards = torch.tensor(right) + (torch.tensor(shape) if shape else 0.0)
    ids = torch.cat([torch.zeros(len(rows), 2), (places[:, None] + 1) * mask], 1).long()
    fields = {
        "ids": ids, "attention": torch.cat([torch.ones(len(rows), 2).bool(), mask], 1),
        "truncated": places % 2 == 0, "sampled_logp": -noise * mask,
        "base_logp": -noise.sqrt() * mask, "entropy": 2 * noise * mask,
        "weights": (1 + noise) * mask, "rewards": rewards,
        "advantages": rewards - rewards.mean(), "loss_mask": mask,
    }  # fmt: skip
    return Micro(rows=places, **(fields | more))


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


class Processes:
    """Accelerate's reduce and gather among threads, which like NCCL's want equal shapes."""

    def __init__(self, world: int) -> None:
        self.slots = [None] * world
        self.barrier = threading.Barrier(world, timeout=20)

    def accelerator(self, rank: int) -> SimpleNamespace:
        def collect(tensor: torch.Tensor) -> list[torch.Tensor]:
            self.slots[rank] = tensor
            self.barrier.wait()
            tensors = list(self.slots)
            self.barrier.wait()
            assert len({(x.shape, x.dtype) for x in tensors}) == 1 and tensor.dim() > 0
            return tensors

        def reduce(tensor: torch.Tensor, how: str) -> torch.Tensor:
            return sum(collect(tensor))

        def gather(tensor: torch.Tensor) -> torch.Tensor:
            return torch.cat(collect(tensor))

        return SimpleNamespace(reduce=reduce, gather=gather, device=torch.device("cpu"))


def metrics_of(shares: list[list[Micro]]) -> list[dict]:
    """What processes log of a rollout: the first of each one's batches is its share as it was
    sampled, the others are its micro-batches; process r has had r + 1 timeouts."""
    processes = Processes(len(shares))
    results = [None] * len(shares)

    def work(rank: int) -> None:
        args = SimpleNamespace(num_generations=GROUP_SIZE)
        run = SimpleNamespace(args=args, accelerator=processes.accelerator(rank))
        run.grader = SimpleNamespace(timeouts=rank + 1)
        whole, *micros = shares[rank]
        results[rank] = rollout_metrics(run, whole, 2.0) | credit_metrics(run, micros)

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(len(shares))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


RIGHT = [1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0, 0.0] + [1.0] * 8  # the second group is constant
SHAPE = [0.1 * i for i in range(8)] + [0.5] * 8


def share(rows: list[int], **more) -> Micro:
    advantages = torch.tensor([RIGHT[r] - 0.25 if r < 8 else 0.0 for r in rows])
    shape = [SHAPE[r] for r in rows]
    return micro(rows, [RIGHT[r] for r in rows], shape, advantages=advantages, **more)


def shares(*parts: list[int], **more) -> list[Micro]:
    """A process's share of a rollout, which has these rows, and its micro-batches."""
    return [share(list(itertools.chain(*parts)), **more), *(share(rows, **more) for rows in parts)]


def test_rollout_metrics_of_hand_counts():
    result = metrics_of([shares(list(range(16)))])[0]
    tokens = sum(r % 5 + 1 for r in range(16))
    noise = [torch.rand(6, generator=seeded(r))[: r % 5 + 1] for r in range(16)]
    expected = {
        "reward_timeouts": 1, "reward": (10 + 2.8 + 4) / 16,
        "completion_length": tokens / 16, "truncated_share": 0.5, "zero_std_share": 0.5,
        "rollout_tokens": tokens, "tokens_per_second": tokens / 2,
        "entropy": 2 * torch.cat(noise).mean().item(),
    }  # fmt: skip
    assert {name: result[name] for name in expected} == pytest.approx(expected)
    assert 0 < result["weight_gini"] < 1
    to_base = torch.cat(noise) - torch.cat(noise).sqrt()  # log-probs are -noise, and -its root
    assert result["kl"] == pytest.approx((to_base.exp() - to_base - 1).mean().item(), rel=1e-5)


def test_timeouts_of_a_reward_functions_own_verdicts_count(monkeypatch):
    monkeypatch.setattr(shared_grader(), "timeouts", 5)
    assert metrics_of([shares(list(range(16)))])[0]["reward_timeouts"] == 1 + 5


def test_rollout_metrics_are_the_same_on_one_process_and_on_two():
    rows = [[0, 9, 2, 11], [4, 13, 6, 15], [1, 8, 3, 10], [5, 12, 7, 14]]
    alone = metrics_of([shares(list(range(16)))])[0]
    two = metrics_of([shares(*rows[:2]), shares(*rows[2:])])
    assert [result.pop("reward_timeouts") for result in (alone, *two)] == [1, 3, 3]
    assert two[0] == two[1] == pytest.approx(alone)


def test_a_figure_that_nothing_has_is_left_out():
    rows = [[0, 5], [1, 2, 3, 4, 6, 7]]  # 0 and 5 have a token each: nothing to concentrate on
    result = metrics_of([shares(*rows, base_logp=torch.empty(0))])[0]
    assert "kl" not in result and "weight_gini" in result
    assert all(math.isfinite(value) for value in result.values())
    result = metrics_of([[share(list(range(8))), share([0, 5])]])[0]
    assert "weight_gini" not in result and "kl" in result


def test_figures_of_credit_are_of_rows_that_have_some():
    """A row without an advantage has weights of 1 whatever the method."""
    rows = list(range(8))
    idle = share(list(range(8)))
    idle.weights = idle.mask.float()
    idle.rows = idle.rows + 8
    idle.advantages = torch.zeros(8)
    alone = metrics_of([shares(rows)])[0]
    both = metrics_of([[*shares(rows), idle]])[0]
    for name in ("weight_gini", "weight_effn"):
        assert both[name] == pytest.approx(alone[name]), name


def test_timed_adds_up():
    figures = {"seconds_score": 1.0}
    for name in ("seconds_score", "seconds_update"):
        with timed(figures, name):
            sum(range(10_000))
    assert 1.0 < figures["seconds_score"] < 2.0 and 0 < figures["seconds_update"] < 1.0


# --------------------------------------------------------------- what the policy wrote, and hints


def run_of(folder: Path, *texts: str, main: bool = True, rollout: int = 0) -> SimpleNamespace:
    """A run in groups of 2 whose tokenizer reads these texts, whatever the ids."""

    def batch_decode(ids: list, **_: object) -> list[str]:
        return list(texts[: len(ids)])

    return SimpleNamespace(
        step=4,
        rollout=rollout,
        tokenizer=SimpleNamespace(batch_decode=batch_decode),
        args=SimpleNamespace(num_generations=2, output_dir=str(folder)),
        accelerator=SimpleNamespace(is_main_process=main),
        reward_funcs={"accuracy_reward": (None, 1.0)},
    )


CHAT = [{"role": "user", "content": "q\ud800"}]


def test_completions_are_appended_by_the_main_process_alone(tmp_path):
    batch = micro([0, 1, 2], [1, 0, 0.0])
    problems = [Problem(CHAT, "7"), Problem("p", "8")] * 2
    first = run_of(tmp_path, "a", "b", "c")
    other = run_of(tmp_path, "a", "b", "c", main=False)
    for run in (first, other):
        batch.problems = problems
        log_completions(run, "greedy", batch, [1.0, math.nan, 0.0])
        batch.problems = problems[1:]
        log_completions(run, "train", batch, [1.0, 0.0, 0.0])
    rows = strict(tmp_path / "completions.jsonl")
    assert [row["kind"] for row in rows] == ["greedy"] * 2 + ["train"] * 2
    assert rows[0] == {
        "step": 4, "eval": True, "kind": "greedy", "prompt": CHAT, "answer": "7",
        "completion": "a", "reward": 1.0, "truncated": True,
    }  # fmt: skip
    assert (rows[1]["reward"], rows[1]["truncated"]) == (None, False)
    assert rows[2] | {"reward": 0} == {
        "step": 5, "eval": False, "kind": "train", "prompt": "p", "answer": "8",
        "completion": "a", "reward": 0, "truncated": True,
    }  # fmt: skip


FINE = {"zero_std_share": 0.0, "truncated_share": 0.0, "reward": 0.5}
NOTHING = FINE | {"reward": 0.0}
EARNS = "no completion earns anything"
HINTS = {  # the figures, the first completion of two, whether it is cut off -> what is said
    "all is well": (FINE, "\\boxed{6}", False, []),
    "equal": (FINE | {"zero_std_share": 1.0}, "\\boxed{6}", False, ["equal rewards .mean 0.50"]),
    "cut off": (
        FINE | {"truncated_share": 0.4},
        "",
        True,
        ["40% .* cut off .*--max_completion_length"],
    ),
    "no stop token": (FINE | {"truncated_share": 1.0}, "", True, ["100% .*never write a stop"]),
    "no box": (FINE, "It is 7.", False, ["1 of 2 that end have no \\\\boxed{}: .*--system_prompt"]),
    "unended": (NOTHING, "So we", True, [f"{EARNS}.*: 'So we'"]),
    "wrong": (NOTHING, "\\boxed{6}", False, [f"{EARNS}.*easier problems.*boxed"]),
    "long": (NOTHING, "\\boxed{6}" + "x" * 999, False, ["x{291}'$"]),
}


@pytest.mark.parametrize("name", HINTS)
def test_hints_say_why_a_first_rollout_teaches_nothing(tmp_path, name):
    figures, text, cut, expected = HINTS[name]
    batch = micro([0, 1], [0.0, 0.0], truncated=torch.tensor([cut, False]))
    said = hints(run_of(tmp_path, text, "\\boxed{1}"), figures, batch)
    assert len(said) == len(expected), said
    assert all(map(re.search, expected, said)), said
    run = run_of(tmp_path, rollout=1)
    run.tokenizer = None  # nothing is decoded again
    later = hints(run, figures, batch)
    assert later == [hint for hint in said if "equal rewards" in hint]


def test_a_missing_box_matters_to_the_accuracy_reward_alone(tmp_path):
    run = run_of(tmp_path, "It is 7.", "It is 8.")
    assert len(hints(run, FINE, micro([0, 1], [0.0, 0.0]))) == 1
    run.reward_funcs = {"other": (len, 1.0)}
    assert not hints(run, FINE, micro([0, 1], [0.0, 0.0]))


def test_a_run_that_earns_nothing_leaves_what_it_wrote_and_why(run_main, tmp_path):
    code, _, err = run_main(max_steps=1, max_completion_length=4)
    assert code == 0
    rows = strict(tmp_path / "out/completions.jsonl")
    steps = {(row["step"], row["kind"]) for row in rows}
    assert steps == {(0, "greedy"), (0, "sampled"), (1, "train"), (1, "greedy"), (1, "sampled")}
    assert all(row["reward"] == 0 and row["truncated"] and row["completion"] for row in rows)
    page = " ".join((tmp_path / "out/credit.html").read_text().split())
    assert "the completions of a group had equal rewards" in page and "completions.jsonl" in page
    err = " ".join(err.split())
    assert "every group has equal rewards (mean 0.00)" in err and "never write a stop token" in err
    assert "no completion earns anything. The first one (if its form is right" in err


def test_a_run_of_no_steps_leaves_what_it_wrote_in_the_evaluation(run_main, tmp_path):
    assert run_main(max_steps=0)[0] == 0
    kinds = [row["kind"] for row in strict(tmp_path / "out/completions.jsonl")]
    assert kinds == ["greedy"] * 2 + ["sampled"] * 2


# ----------------------------------------------------------------------------- credit group


PROBLEM = Problem("p", "7")


def group_of(
    *micros: Micro,
    size: int = GROUP_SIZE,
    problem: Problem = PROBLEM,
    rewards: tuple = ("accuracy_reward",),
    system_prompt: str | None = None,
) -> dict:
    def decode(ids: list[int]) -> str:
        return "".join(f"<{i}>" for i in ids)

    tokenizer = SimpleNamespace(decode=decode)
    args = SimpleNamespace(num_generations=size, system_prompt=system_prompt)
    functions = dict.fromkeys(rewards, (None, 1.0))
    run = SimpleNamespace(args=args, tokenizer=tokenizer, step=3, reward_funcs=functions)
    for batch in micros:
        batch.problems = [problem] * len(batch.rows)
    groups = credit_group(run, list(micros))
    assert len(groups) < 2
    return groups[0] if groups else {}


def summary_of(tmp_path: Path, group: dict) -> tuple[str, list[str]]:
    """The summary line, and the columns' heads with their counts."""
    write_credit_page(str(tmp_path / "credit.html"), "t", [group])
    raw = (tmp_path / "credit.html").read_text(encoding="utf-8")
    heads = re.findall(r"<h3>([^<]*) <b>(\d+)</b></h3>", raw)
    return re.search("<summary>(Step .*)</summary>", raw)[1], [f"{n} {count}" for n, count in heads]


def test_credit_group_counts_the_whole_group_and_shows_four(tmp_path):
    right = RIGHT[:8]
    group = group_of(micro(list(range(4, 8)), right[4:]), micro([3, 0, 1, 2], [0, 1, 0, 0.0]))
    assert (group["size"], group["correct"], group["step"], group["note"]) == (8, 2, 3, "")
    assert [c["reward"] for c in group["completions"]] == [1, 1, 0, 0]
    shown = [c["tokens"][0]["text"] for c in group["completions"]]
    assert shown == ["<1>", "<7>", "<6>", "<8>"] and group["prompt"] == "p"
    assert [len(c["tokens"]) for c in group["completions"]] == [1, 2, 1, 3]
    summary, heads = summary_of(tmp_path, group)
    assert summary == "Step 3 · 2 of 8 correct, 4 shown" and heads == ["Correct 2", "Wrong 2"]
    small = group_of(micro([0, 1, 2], [0, 1, 0.0]), size=3, problem=Problem(CHAT, ""))
    assert small["prompt"] == "q\ud800" and [c["reward"] for c in small["completions"]] == [1, 0, 0]
    assert summary_of(tmp_path, small)[0] == "Step 3 · 1 of 3 correct"


EXAMPLE = [{"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "2."}]
SYSTEM = [{"role": "system", "content": "Be brief."}]
EARLIER = {  # the messages before a prompt -> what opens them
    "System message": SYSTEM,
    "2 messages before this one": EXAMPLE,
    "System message and 2 more messages before this one": SYSTEM + EXAMPLE,
}


@pytest.mark.parametrize("opener", EARLIER)
def test_the_messages_before_a_prompt_can_be_opened(tmp_path, opener):
    messages = EARLIER[opener]
    given = [message for message in messages if message not in SYSTEM]
    problem = Problem([*given, {"role": "user", "content": "q"}], "7")
    system_prompt = SYSTEM[0]["content"] if SYSTEM[0] in messages else None
    batch = micro([0, 1, 2], [0, 1, 0.0])
    group = group_of(batch, size=3, problem=problem, system_prompt=system_prompt)
    assert group["prompt"] == "q" and group["earlier"] == messages
    write_credit_page(str(tmp_path / "credit.html"), "t", [group])
    page = Page(tmp_path / "credit.html")
    pairs = list(zip(page.opened, page.blocks, strict=True))
    start = pairs.index((("details", [("class", "earlier")]), ""))
    assert pairs[start + 1] == (("summary", []), opener)
    shown = [text for (tag, _), text in pairs[start:] if tag in ("h3", "div")]
    expected = itertools.chain.from_iterable((m["role"], m["content"]) for m in messages)
    assert shown[: 2 * len(messages) + 2] == [*expected, "Prompt", "q"]


def test_a_text_alone_has_no_messages_to_open(tmp_path):
    group = group_of(micro([0, 1, 2], [0, 1, 0.0]), size=3)
    assert group["earlier"] == []
    write_credit_page(str(tmp_path / "credit.html"), "t", [group])
    opened = Page(tmp_path / "credit.html").opened
    assert ("details", [("class", "earlier")]) not in opened


def test_credit_group_holds_texts_alone():
    """What else a message has, such as a date, could not be loaded from a checkpoint."""
    message = {"role": "user", "content": "Hi.", "at": datetime.date(2026, 1, 1)}
    group = group_of(micro([0, 1, 2, 3], [1, 0, 0, 0.0]), problem=Problem([message] * 2, "1"))
    assert group["earlier"] == [{"role": "user", "content": "Hi."}]


def test_credit_group_may_be_in_part_elsewhere(tmp_path):
    """Its other rows are another process's, or had no advantage."""
    group = group_of(micro([6, 12, 5, 13], [0, 1, 1, 0.0]))
    assert (group["size"], group["correct"]) == (8, None)
    assert [c["tokens"][0]["text"] for c in group["completions"]] == ["<6>", "<7>"]
    assert summary_of(tmp_path, group)[0] == "Step 3 · 8 completions, 2 shown"


def test_credit_group_of_shaped_rewards_sorts_by_advantage(tmp_path):
    batch = micro(list(range(8)), [0.0] * 8, SHAPE[:8])
    batch.advantages[0] = 0.0  # a member at the mean must not hide its group
    group = group_of(batch, rewards=("accuracy_reward", "length_reward"))
    assert group["correct"] is None
    summary, heads = summary_of(tmp_path, group)
    assert summary == "Step 3 · 8 completions, 4 shown"
    assert heads == ["Above the group\u2019s mean 2", "Below 2"]
    assert group_of(micro(list(range(8)), RIGHT[:8]), rewards=("mine",))["correct"] is None
    assert group_of(micro(list(range(8)), [1.0] * 8)) == {}


def test_uniform_weights_are_said_on_the_page(tmp_path):
    rows = list(range(8))
    right = RIGHT[:8]
    mask = micro(rows, right).mask
    group = group_of(micro(rows, right, weights=mask + 5e-7 * mask))
    assert group["note"].startswith("All weights are 1: ")
    summary_of(tmp_path, group)
    assert f'<p class="note">{group["note"]}</p>' in (tmp_path / "credit.html").read_text()
    weights = mask.float()
    weights[0, 0] += 1e-5
    group = group_of(micro(rows, right, weights=weights))
    assert group["note"] == ""
    summary_of(tmp_path, group)
    assert '<p class="note">' not in (tmp_path / "credit.html").read_text()


# --------------------------------------------------------------------------------- RunLog


def strict(path: Path) -> list[dict]:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    text = path.read_text(encoding="utf-8")
    assert text == "" or text.endswith("\n")
    return [json.loads(line, parse_constant=refuse) for line in text.splitlines()]


def no_tracker(figures: dict, step: int) -> None:
    pass


def open_log(folder: Path | None, resume_step: int = 0, track=no_tracker, **flags) -> RunLog:
    return RunLog(folder and str(folder), flags, resume_step, track)


@pytest.mark.parametrize("cpu", ["AVX2", "AVX512"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("cuda", [False, True])
def test_the_introduction_says_where_bfloat16_is_slow(monkeypatch, cpu, dtype, cuda):
    """Where torch has no kernel for it, SmolLM2 in bf16 takes days of what is half an hour."""

    def get_cpu_capability() -> str:
        return cpu

    def is_available() -> bool:
        return cuda

    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", get_cpu_capability)
    monkeypatch.setattr(torch.cuda, "is_available", is_available)
    text = introduction(vars(grpo_arca.parse_args(["--dtype", dtype])), [1, 2], [3], processes=2)
    assert ("--dtype float32" in text) == (cpu == "AVX2" and dtype == "bfloat16" and not cuda)
    assert "arca credit for" in text and "(2 problems, 1 held out): 32 prompts x 8" in text


def test_run_log_writes_strict_json(tmp_path):
    log = open_log(tmp_path)
    log.write({"step": 0, "eval": EVAL})
    log.write(
        {
            "step": torch.tensor(1), "loss": torch.tensor(0.123456789), "kl": math.nan,
            "entropy": torch.tensor(math.inf).numpy(), "note": 'a "b"\n\ud800', "flag": True,
            "learning_rate": 1.23456789e-7, "nested": {"list": [-math.inf, 1]},
        }
    )  # fmt: skip
    rows = strict(tmp_path / "metrics.jsonl")
    assert rows == log.rows and rows[0] == {"step": 0, "eval": EVAL}
    assert rows[1] == {
        "step": 1, "loss": 0.123457, "kl": None, "entropy": None, "note": 'a "b"\n\ud800',
        "flag": True, "learning_rate": 1.23457e-7, "nested": {"list": [None, 1]},
    }  # fmt: skip


def test_run_log_resume_drops_later_rows_of_both_files_and_a_torn_last_line(tmp_path):
    log = open_log(tmp_path)
    texts = tmp_path / "completions.jsonl"
    for step in range(6):
        if step % 2 == 0:
            log.write({"step": step, "eval": EVAL})  # after the checkpoint of that step
        log.write({"step": step + 1, "reward": step / 10})
    kinds = list(itertools.product(range(6), ("greedy", "train")))
    rows = [{"step": s + (k == "train"), "eval": k != "train", "kind": k} for s, k in kinds]
    path = tmp_path / "metrics.jsonl"
    path.write_text(path.read_text() + '{"step": 6, "rew')
    texts.write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"step": 0')
    resumed = open_log(tmp_path, 4)
    assert [row["step"] for row in strict(path) if "reward" in row] == [1, 2, 3, 4]
    assert [row["step"] for row in strict(path) if "eval" in row] == [0, 2]  # 4 is evaluated again
    assert strict(texts) == rows[:8]
    resumed.write({"step": 5, "reward": 1.0})
    assert resumed.rows == strict(path) and resumed.rows[-1]["reward"] == 1.0
    again = open_log(tmp_path, 99)
    assert again.rows == resumed.rows and strict(path) == resumed.rows


JUNK = ["", " ", '{"st', "5", "null", "[]", "{}", '{"step": "a"}', '{"step": null}', "\xff"]


@pytest.mark.parametrize("line", JUNK)
def test_run_log_leaves_out_what_is_no_row_and_starts_anew_without_resume(tmp_path, line):
    path = tmp_path / "metrics.jsonl"
    texts = tmp_path / "completions.jsonl"
    for file in (path, texts):
        file.write_bytes(b'{"step": 1}\n' + line.encode("latin-1") + b'\n{"step": 3}\n')
    assert open_log(tmp_path, 3).rows == strict(path) == strict(texts) == [{"step": 1}, {"step": 3}]
    path.write_bytes(b'{"step": 1}\n' + line.encode("latin-1"))  # the last one may be torn
    assert open_log(tmp_path, 3).rows == [{"step": 1}]
    assert open_log(tmp_path).rows == [] and path.read_text() == texts.read_text() == ""
    path.unlink()
    assert open_log(tmp_path, 3).rows == []  # nothing to resume from


def test_a_run_log_whose_rows_were_edited_still_ends_in_a_report_in(tmp_path, quick_curves):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "reward": 0.5}\n')
    log = open_log(tmp_path, 1)
    log.write({"step": 1, "eval": EVAL})
    run = ended_run(tmp_path, [])
    assert "summary.json" in report_run(run, log, PROBLEM)


def test_run_log_tracks_every_row_after_it_is_written(tmp_path):
    seen = []

    def track(figures: dict, step: int) -> None:
        seen.append((figures, step))
        assert len(strict(tmp_path / "metrics.jsonl")) == len(seen)
        if step == 2:
            raise ConnectionError("a tracker's")

    log = open_log(tmp_path, track=track)
    log.write({"step": 1, "eval": {"pass@2": 0.5}})
    with pytest.raises(ConnectionError):
        log.write({"step": 2, "reward": torch.tensor(0.5)})
    assert seen == [({"eval/pass@2": 0.5}, 1), ({"reward": 0.5}, 2)]
    assert [row["step"] for row in log.rows] == [1, 2]

    def note_step(figures: dict, step: int) -> None:
        seen.append(step)

    silent = open_log(None, 5, note_step)  # another process's
    silent.write({"step": 6, "eval": EVAL})
    assert seen[-1] == 6 and len(silent.rows) == 1


@pytest.mark.parametrize("what", ["an evaluation", "a file that cannot be written"])
@pytest.mark.usefixtures("quick_curves")
def test_lines_begin_on_a_line_of_their_own_beside_a_bar(tmp_path, capfd, what):
    with tqdm(total=3, file=sys.stderr, mininterval=0) as bar:
        bar.update()
        before = capfd.readouterr().err
        if what == "an evaluation":
            open_log(tmp_path).write({"step": 1, "eval": {"pass@2": None, "pass@4": 0.5}})
        else:
            (tmp_path / "summary.json").mkdir()
            report_in(tmp_path)
        out, err = capfd.readouterr()
    assert "1/3" in before and not before.endswith("\n")
    assert err.startswith("\r")  # the bar is wiped first
    if what == "an evaluation":
        assert out == "step    1, held out: pass@2 n/a  pass@4 0.500\n"
    else:
        assert re.search(r"\r *\r[^\r]*/summary.json is not written, [^\n]*\n", err)


# ---------------------------------------------------------------------------- environment


def test_config_holds_the_flags_and_what_else_figures_depend_on(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["grpo_x.py", "--learning_rate", "1.23456789e-7"])
    flags = {"learning_rate": 1.23456789e-7, "name": 'a "b"\n\ud800', "none": None}
    open_log(tmp_path, **flags)
    config = json.loads((tmp_path / "config.json").read_text())
    facts = config.pop("environment")
    assert config == flags
    assert facts["command"] == sys.argv and facts["hardware"]["processes"] == 1
    assert facts["hardware"]["cpu"] and facts["hardware"]["cores"] >= 1
    assert facts["hardware"]["gpus"] == [] or torch.cuda.is_available()
    assert facts["versions"]["torch"] == version("torch")
    assert set(facts["versions"]) >= {"python", "transformers", "peft", "accelerate"}


def git(folder: Path, *command: str) -> str:
    who = ["-c", "user.name=a", "-c", "user.email=a@b"]
    done = subprocess.run(["git", "-C", folder, *who, *command], capture_output=True, check=True)
    return done.stdout.decode().strip()


def test_environment_names_the_commit_and_whether_the_code_is_its(tmp_path, monkeypatch):
    (tmp_path / "common").mkdir()
    monkeypatch.setattr(run_log, "__file__", str(tmp_path / "common/run_log.py"))
    assert environment()["commit"] is None  # no checkout
    (tmp_path / "grpo_x.py").write_text("1")
    git(tmp_path, "init")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-m", "m")
    (tmp_path / "data.jsonl").write_text("a user's own")
    commit = git(tmp_path, "rev-parse", "HEAD")
    git(tmp_path, "tag", "v1")
    assert environment()["commit"] == commit
    (tmp_path / "grpo_x.py").write_text("2")
    assert environment()["commit"] == f"{commit}-dirty"
    monkeypatch.setenv("PATH", "/none")  # no git
    assert environment()["commit"] is None


# --------------------------------------------------------------------------------- curves


def full_row(step: int) -> dict:
    keys = [
        "reward", "accuracy", "completion_length", "truncated_share", "entropy", "kl",
        "clip_fraction", "grad_norm", "weight_gini", "weight_effn", "seconds_rollout",
        "seconds_score", "seconds_credit", "seconds_update",
    ]  # fmt: skip
    return {"step": step} | {key: 0.1 * i + 0.01 * (step % 3) for i, key in enumerate(keys)}


def patchy(step: int) -> dict:
    row = full_row(step)
    for i, key in enumerate(list(row)[1:]):
        if (step + i) % 3 == 0:
            del row[key]
        elif (step + i) % 3 == 1:
            row[key] = None
    return row | ({"eval": EVAL | {"pass@4": None}} if step % 4 == 0 else {})


CURVES = {
    "no rows": [],
    "only the evaluation of step 0": [{"step": 0, "eval": EVAL}],
    "one row": [full_row(1)],
    "every value null": [dict.fromkeys(full_row(1)) | {"step": 1}],
    "every value zero": [dict.fromkeys(full_row(1), 0) | {"step": step} for step in (1, 2)],
    "negative rewards": [full_row(step) | {"reward": -0.1} for step in (1, 2, 3)],
    "raw rows with NaN and inf": [full_row(1) | {"kl": math.nan, "reward": math.inf}, full_row(2)],
    "patchy": [patchy(step) for step in range(30)],
    "many": [full_row(step) | {"eval": EVAL} for step in range(1, 400)],
}


SLOW_CURVES = ("every value zero", "negative rewards", "one row", "many")  # half a second each
CASES = [pytest.param(x, marks=[pytest.mark.slow] * (x in SLOW_CURVES)) for x in CURVES]


@pytest.mark.parametrize("name", CASES)
def test_write_curves_is_silent_and_writes_a_png(tmp_path, name):
    path = tmp_path / "curves.png"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        write_curves(str(path), CURVES[name], "ARCA, seed 1, $x^{$ is not math")
    head = path.read_bytes()[:24]
    assert head[:8] == b"\x89PNG\r\n\x1a\n" and struct.unpack(">II", head[16:]) == (1500, 850)


@pytest.mark.slow  # half a second
def test_every_legend_fits_between_its_title_and_its_panel(tmp_path, monkeypatch):
    import matplotlib.figure

    figures = []

    def keep(figure, *_, **__):
        figure.draw_without_rendering()
        figures.append(figure)

    monkeypatch.setattr(matplotlib.figure.Figure, "savefig", keep)
    write_curves(str(tmp_path / "c.png"), CURVES["many"], "t")
    (figure,) = figures
    for name in PANELS:
        titles = figure.findobj(match=partial(has_text, name))
        (title,) = [text.get_window_extent() for text in titles]
        (legend,) = [ax.get_legend() for ax in figure.axes if ax.get_title("left") == name]
        box = legend.get_window_extent()
        assert figure.bbox.contains(*box.min) and figure.bbox.contains(*box.max), name
        assert box.ymax <= title.ymin, name


def has_text(name: str, artist: object) -> bool:
    return hasattr(artist, "get_text") and artist.get_text() == name


@pytest.mark.slow  # a process of its own, which imports torch
def test_a_smoothed_line_spreads_a_spike_over_a_tenth_of_the_run():
    values = [0.0] * 40
    values[20] = 1.0
    assert smoothed(values) == [0.0] * 18 + [0.2] * 5 + [0.0] * 17


def test_matplotlib_is_loaded_late_and_pyplot_never(tmp_path):
    code = (
        "import sys, common.metrics, common.curves as m; assert 'matplotlib' not in sys.modules;"
        f"m.write_curves({str(tmp_path / 'c.png')!r}, [], 't');"
        "assert 'matplotlib.pyplot' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


# ------------------------------------------------------------------------------------ page

HOSTILE = {  # text -> what the reader must see
    "<script>alert(1)</script>": "<script>alert(1)</script>",
    "</i></div></article><img src=x onerror=alert(1)>": None,
    '" onfocus="alert(1)" x=\'': None,
    "' style='x": None,
    "--> ]]> </title></style></textarea><!-- &lt; &amp;#60; {{ title }} {% endfor %} {#": None,
    "a\x00b\x1b[0m\x7f\x85": "a␀b␛[0m<U+007F><U+0085>",
    "\u202eabc\u2066d\u2069\u200f\u061c": "<U+202E>abc<U+2066>d<U+2069><U+200F><U+061C>",
    "zero\u200bwidth\ufeff\U000e0041": "zero<U+200B>width<U+FEFF><U+E0041>",
    "\ud800 lone \udfff": "<U+D800> lone <U+DFFF>",
    "  two\tspaces\r\u2028": "  two␉spaces␍<U+2028>",
    "naïve 日本語 عربى 🙂\u00a0\u3000∑": None,
}
TOKEN_ATTRIBUTES = ["class", "tabindex", *(f"data-{name}" for name in "twahfl")]


class Page(HTMLParser):
    """Collects tags, attributes, all text, and the text from each start tag to the next tag."""

    def __init__(self, path: Path) -> None:
        super().__init__(convert_charrefs=True)
        self.opened = []
        self.closed = []
        self.blocks = []
        self.text = ""
        self.fresh = False  # no tag since the last start tag
        self.feed(path.read_bytes().decode("utf-8"))  # strict
        self.close()

    def handle_starttag(self, tag, attrs):
        self.opened.append((tag, attrs))
        self.blocks.append("")
        self.fresh = True

    def handle_endtag(self, tag):
        self.closed.append(tag)
        self.fresh = False

    def handle_data(self, data):
        self.text += data
        if self.fresh:
            self.blocks[-1] += data

    def tokens(self) -> list[tuple[dict, str]]:
        pairs = zip(self.opened, self.blocks, strict=True)
        return [(dict(a), text) for (tag, a), text in pairs if tag == "i" and len(a) > 1]


def page_of(tmp_path: Path, texts: list[str], title: str = "t", **token: object) -> Page:
    tokens = [{"text": t, "weight": 1.0, "entropy": 0.5, "logp": -0.5} | token for t in texts]
    groups = [
        {
            "earlier": [{"role": text, "content": text}], "prompt": text, "answer": text, "step": 3,
            "completions": [
                {"reward": 1.0, "advantage": 0.7, "truncated": False, "tokens": tokens},
                {"reward": 0.0, "advantage": -0.7, "truncated": True, "tokens": tokens},
            ],
        }
        for text in texts
    ]  # fmt: skip
    write_credit_page(str(tmp_path / "credit.html"), title, groups)
    return Page(tmp_path / "credit.html")


def test_page_takes_no_markup_from_text_and_shows_all_of_it(tmp_path):
    hostile = list(HOSTILE)
    plain = [f"word{i}" for i in range(len(HOSTILE))]
    page = page_of(tmp_path, hostile, title=hostile[0] + hostile[4])
    harmless = page_of(tmp_path, plain)
    assert [tag for tag, _ in page.opened] == [tag for tag, _ in harmless.opened]
    assert page.closed == harmless.closed
    for (tag, attrs), (_, expected) in zip(page.opened, harmless.opened, strict=True):
        if "data-t" in dict(attrs):
            assert [name for name, _ in attrs] == TOKEN_ATTRIBUTES
            attrs, expected = ([a for a in side if a[0] != "data-t"] for side in (attrs, expected))
        assert attrs == expected, tag
    # An earlier message and its role, prompt, answer, and a token in 2 completions a group
    for text, seen in HOSTILE.items():
        count = page.blocks.count(seen or text)
        assert count == 4 + 2 * len(HOSTILE), text
        assert (seen or text)[:20] in {token["data-t"][:20] for token, _ in page.tokens()}
    raw = (tmp_path / "credit.html").read_text(encoding="utf-8")
    assert not re.search("[\x00-\x09\x0b-\x1f\x7f\u200b-\u200f\u2028-\u202e\u2066-\u2069]", raw)


def test_page_needs_no_script_and_no_network(tmp_path):
    page = page_of(tmp_path, ["a"])
    raw = (tmp_path / "credit.html").read_text(encoding="utf-8")
    policy = next(dict(a) for tag, a in page.opened if "http-equiv" in dict(a))
    assert policy["content"] == "default-src 'none'; style-src 'unsafe-inline'"
    attributes = itertools.chain.from_iterable(attrs for _, attrs in page.opened)
    names = {name for name, _ in attributes}
    assert not names & {"src", "href", "style"} and not any(n.startswith("on") for n in names)
    assert not {"script", "link", "img", "iframe"} & {tag for tag, _ in page.opened}
    assert not re.search(r"https?:|url\(|@import", raw)


def test_page_tints_by_weight_and_signs_by_advantage(tmp_path):
    def token(weight: float) -> tuple[dict, str]:
        return page_of(tmp_path, [" a\n"], weight=weight).tokens()[0]

    expected = {0.0: "k0", 1.0: "k4", 2.0: "k8", 3.0: "k12", 50.0: "k12", -1.0: "k0"}
    rest = "u4 h4"  # a lone token is as surprising as the mean
    classes = {weight: token(weight)[0]["class"] for weight in expected}
    assert classes == {weight: f"{tint} {rest}" for weight, tint in expected.items()}
    attributes, text = token(2.0)
    assert text == " a↵\n" and attributes["data-t"] == " a↵" and attributes["tabindex"] == "0"
    shown = [attributes[f"data-{name}"] for name in "wahfl"]
    assert shown == ["2.00", "+1.40", "0.50", "0.00", "-0.50"]
    page = page_of(tmp_path, ["a"], role="decisive")
    assert [t["class"] for t, _ in page.tokens()] == [f"k4 {rest} d"] * 2
    page = page_of(tmp_path, ["a"], role="first_wrong")
    assert page.tokens()[0][0]["class"] == f"k4 {rest} f"
    page = page_of(tmp_path, ["a"], role='"><script>')
    assert page.tokens()[0][0]["class"] == f"k4 {rest}" and "<script>" not in page.text
    articles = [dict(attrs)["class"] for tag, attrs in page.opened if tag == "article"]
    assert articles == ["pos", "neg"]


def checked_switch(page: Page) -> str:
    inputs = [dict(attrs) for tag, attrs in page.opened if tag == "input"]
    assert [switch["id"] for switch in inputs] == ["weight", "surprisal", "fall"]
    assert {switch["name"] for switch in inputs} == {"tint"}
    (checked,) = [switch["id"] for switch in inputs if "checked" in switch]
    return checked


def test_page_can_tint_by_surprisal_and_fall_of_entropy(tmp_path):
    """They are what two methods of grpo_arca.py make of the same completion."""
    logps = [-1.0, -0.5, -2.5, 0.0]
    entropies = [0.5, 0.9, 0.1, 0.1]
    tokens = []
    for logp, entropy in zip(logps, entropies, strict=True):
        tokens.append({"text": "a", "weight": 2.0, "entropy": entropy, "logp": logp})
    completion = {"reward": 1.0, "advantage": 0.7, "truncated": False, "tokens": tokens}
    group = {"prompt": "p", "answer": "a", "step": 0, "completions": [completion]}
    write_credit_page(str(tmp_path / "credit.html"), "t", [group])
    shown = [token for token, _ in Page(tmp_path / "credit.html").tokens()]
    assert [token["data-f"] for token in shown] == ["0.00", "0.80", "0.00", "0.00"]

    mask = torch.ones(1, 4).bool()
    batch = SimpleNamespace(
        sampled_logp=torch.tensor([logps]), entropy=torch.tensor([entropies]), mask=mask
    )
    weights = {}
    for credit in ("surprisal", "entropy_reduction"):
        run = SimpleNamespace(args=SimpleNamespace(credit=credit))
        scores = grpo_arca.token_scores(run, batch, {})
        weights[credit] = grpo_arca.normalize(scores, mask, 1.0)[0].tolist()
    pairs = zip(weights["surprisal"], weights["entropy_reduction"], strict=True)
    levels = [(min(round(4 * a), 12), min(round(4 * b), 12)) for a, b in pairs]
    assert [token["class"] for token in shown] == [f"k8 u{a} h{b}" for a, b in levels]
    assert len(set(levels)) == 4


@pytest.mark.parametrize("weight", [1.0, 2.0])
def test_page_without_credit_begins_with_surprisal(tmp_path, weight):
    page = page_of(tmp_path, ["a"], weight=weight)
    assert checked_switch(page) == ("surprisal" if weight == 1 else "weight")
    assert ("train with grpo_arca.py --credit arca" in page.text) == (weight == 1)
    write_credit_page(str(tmp_path / "credit.html"), "t", [])
    assert checked_switch(Page(tmp_path / "credit.html")) == "weight"


def test_page_explains_its_words(tmp_path):
    page = page_of(tmp_path, ["a"])
    pairs = zip(page.opened, page.blocks, strict=True)
    words = [text for (tag, _), text in pairs if tag == "dt"]
    assert {"decisive", "first wrong", "advantage", "weight", "entropy"} <= set(words)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, None])
def test_page_survives_numbers_that_are_not(tmp_path, value):
    page = page_of(tmp_path, ["a"], weight=value, entropy=value, logp=value)
    token = page.tokens()[0][0]
    assert token["class"].startswith("k0 u0 ")
    assert {token[f"data-{name}"] for name in "wahl"} == {"n/a"}
    completion = {"reward": value, "advantage": value, "truncated": False, "tokens": []}
    group = {"prompt": "p", "answer": "a", "step": 0, "completions": [completion]}
    write_credit_page(str(tmp_path / "credit.html"), "t", [group])
    assert ("article", [("class", "zero")]) in Page(tmp_path / "credit.html").opened


def test_page_without_samples_and_the_size_of_a_big_one(tmp_path):
    write_credit_page(str(tmp_path / "credit.html"), "t", [])
    text = " ".join(Page(tmp_path / "credit.html").text.split())
    assert "the completions of a group had equal rewards" in text and "completions.jsonl" in text
    token = {"text": " word&", "weight": 1.23, "entropy": 0.12, "logp": -0.12}
    completion = {"reward": 1.0, "advantage": 1.0, "truncated": False, "tokens": [token] * 500}
    group = {"prompt": "p", "answer": "a", "step": 0, "completions": [completion] * 8}
    write_credit_page(str(tmp_path / "credit.html"), "t", [group] * 4)
    assert (tmp_path / "credit.html").stat().st_size < 10e6 / 4


# ----------------------------------------------------------------------- before and after


def test_before_after_table_is_aligned_and_in_points():
    after = {"greedy_accuracy": 0.525, "sampled_accuracy": math.nan, "pass@8": 0.75}
    lines = before_after_table(EVAL, after).splitlines()
    assert [line.split() for line in lines] == [
        ["held-out", "before", "after", "change"],
        ["greedy", "accuracy", "40.0%", "52.5%", "+12.5"],
        ["sampled", "accuracy", "35.0%", "\N{EN DASH}", "\N{EN DASH}"],
        ["pass@4", "60.0%", "\N{EN DASH}", "\N{EN DASH}"],
        ["pass@8", "\N{EN DASH}", "75.0%", "\N{EN DASH}"],
    ]
    assert len({len(line) for line in lines}) == 1
    assert before_after_table({}, {})


BASE = {  # the flags that a card is made of
    "model_name_or_path": "org/base", "model_revision": "main", "credit": "arca",
    "load_in_4bit": True, "dtype": "bfloat16", "system_prompt": None, "chat_template_kwargs": "{}",
    "max_completion_length": 8,
}  # fmt: skip
SUMMARY = {"before": EVAL, "after": EVAL | {"pass@4": 0.75}}
SUMMARY["best"] = {"step": 3, "sampled_accuracy": 0.35, "weights": "out/checkpoint-3"}


def card_of(
    tmp_path: Path, messages: list, template: str | None = "{{ messages }}", **flags: object
) -> ModelCard:
    config = BASE | flags
    ends = {"eos_token_id": [1, 2], "pad_token_id": 0}
    write_model_card(tmp_path / "README.md", config, SUMMARY, messages, template, ends)
    return ModelCard.load(tmp_path / "README.md")


def test_model_card_says_which_date_the_prompts_had(tmp_path):
    for template, is_said in (("{{ strftime_now('%Y') }}", True), ("{{ strftime_now(x) }}", False)):
        assert ("26 July 2024" in card_of(tmp_path, EXAMPLE, template).text) == is_said


def test_model_card_says_what_the_adapter_is(tmp_path):
    card = card_of(tmp_path, EXAMPLE, lr=1e-5)
    assert card.data.to_dict() == {
        "base_model": "org/base", "library_name": "peft", "tags": ["grpo", "lora", "arca"],
    }  # fmt: skip
    assert card.text.startswith("\n# LoRA adapter for org/base: GRPO with `arca` token credit\n")
    assert re.search(r"pass@4 +60.0% +75.0% +\+15.0\n", card.text) and "\n--lr 1e-05\n" in card.text
    assert f"\n{about_best(SUMMARY['best'])}\n" in card.text
    assert "A merged copy may answer differently, because merging rounds" in card.text
    assert f"adapter = '{tmp_path}'" in card.text


HOSTILE_BASES = ['org/na"me: x\n---\n# no', "a: [b", "\ud800'\n```\n", "naïve 🙂"]


@pytest.mark.parametrize("has_template", [True, False])
@pytest.mark.parametrize("base", HOSTILE_BASES)
def test_model_card_of_hostile_names_has_valid_front_matter_and_whole_blocks(
    tmp_path, base, has_template
):
    messages = [{"role": base, "content": base}]
    hostile = {"model_name_or_path": base, "note": "```\n# no", "dir": Path("a")}
    hostile["chat_template_kwargs"] = json.dumps({base: base})
    card = card_of(tmp_path, messages, "x" if has_template else None, **hostile)
    seen = card.data.base_model.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    assert seen == base.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    assert card.text.count("\n```") == 8 and "\n# no" not in card.text
    for block in python_blocks(tmp_path / "README.md"):
        ast.parse(block)


def python_blocks(path: Path) -> list[str]:
    text = path.read_text(encoding="utf-8")
    return re.findall("^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


@pytest.fixture
def plain_nf4(monkeypatch):
    """A CPU with AVX512-BF16 would round to bf16 in a base that the card's code has loaded."""

    def has_no_kernel(*_: object) -> bool:
        return False

    monkeypatch.setattr("bitsandbytes.nn.modules.has_avx512bf16", has_no_kernel)


@pytest.mark.usefixtures("plain_nf4")
@pytest.mark.parametrize("in_4_bits", [True, False])
def test_the_cards_code_loads_what_was_trained(tmp_path, make_run, in_4_bits):
    run = make_run(load_in_4bit=in_4_bits)
    ids = torch.arange(3, 27).view(2, 12)
    run.model.save_pretrained(tmp_path)
    card_of(tmp_path, EXAMPLE, **asdict(run.args))
    code = python_blocks(tmp_path / "README.md")
    assert len(code) == 1 + in_4_bits
    expected = run.model.eval()(ids).logits
    names = {}
    for block in code:
        exec(block, names)
        torch.testing.assert_close(names["model"](ids).logits, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("plain_nf4")
@pytest.mark.parametrize("has_template", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_the_cards_code_answers_as_the_runs_last_evaluation(
    run_main, tmp_path, capfd, monkeypatch, has_template
):
    """The base has settings that the run does not use."""
    model = tmp_path / "model"
    shutil.copytree(ROOT / "common/tiny_policy", model)
    settings = {"eos_token_id": 0, "repetition_penalty": 1.5}
    (model / "generation_config.json").write_text(json.dumps(settings))
    if not has_template:
        (model / "chat_template.jinja").unlink()
    monkeypatch.setattr(grpo_arca, "load_data", load_data)  # this model's prompts
    flags = {"max_completion_length": 40, "system_prompt": "Be brief.", "lora_r": 8}
    code, _, err = run_main(model_name_or_path=model, learning_rate=4e-3, **flags)
    assert code == 0, err
    rows = strict(tmp_path / "out/completions.jsonl")
    answers = [row for row in rows if row["kind"] == "greedy" and row["step"] == 3]
    (block, _) = python_blocks(tmp_path / "out/adapter/README.md")
    assert ("apply_chat_template" in block) == has_template
    capfd.readouterr()
    exec(block, {})  # in the folder in which the run was started
    assert capfd.readouterr().out == answers[0]["completion"] + "\n"


# ----------------------------------------------------------------------------- METRICS.md
def keys_on_the_page(script: str) -> set[str]:
    """First cells of the tables, without those under another script's heading."""
    page = (ROOT / "common/METRICS.md").read_text(encoding="utf-8")
    sections = re.split(r"^##+ ", page, flags=re.MULTILINE)
    its = [x for x in sections if not x.startswith("Only") or x.startswith(f"Only `{script}.py`")]
    keys = re.findall(r"^\| `(.*?)` \|", "\n".join(its), re.MULTILINE)
    assert len(keys) == len(set(keys)) > 20
    return set(keys)


OTHER_SCRIPTS = ("grpo_oar", "grpo_strace")


@pytest.mark.parametrize(
    "script", ["grpo_arca", *(pytest.param(x, marks=pytest.mark.slow) for x in OTHER_SCRIPTS)]
)
def test_metrics_md_names_what_a_script_logs_and_nothing_else(
    run_main, monkeypatch, tmp_path, script
):
    module = importlib.import_module(script)
    monkeypatch.setattr(conftest, "trainer", module)  # whose `main` run_main starts
    monkeypatch.setattr(module, "load_data", conftest.load_data_once)
    flags = {"max_steps": 2, "num_iterations": 2, "num_generations_eval": 2}
    flags |= {"per_device_train_batch_size": 16, "max_completion_length": 80}
    flags |= {"beta": 0.0 if script == "grpo_arca" else 0.01}  # ARCA has the KL without it
    code, _, err = run_main(**flags)
    assert code == 0, err
    updates = [row for row in strict(tmp_path / "out/metrics.jsonl") if "reward" in row]
    evals = [row["eval"] for row in strict(tmp_path / "out/metrics.jsonl") if "eval" in row]
    assert len(updates) == 2 and updates[0].keys() == updates[1].keys()
    logged = updates[0].keys() - {"step"} | {f"eval/{key}" for key in evals[0]}
    logged = {re.sub("accuracy_reward", "<function>", key) for key in logged}
    assert {re.sub("@2", "@<k>", key) for key in logged} == keys_on_the_page(script)


# ------------------------------------------------------------------------------ the report

FILES = ("summary.json", "adapter/README.md", "curves.png", "credit.html")
TOKEN = {"text": "7", "weight": 1.0, "entropy": 0.5, "logp": -0.5}
COMPLETION = {"reward": 1.0, "advantage": 0.7, "truncated": False, "tokens": [TOKEN]}
GROUP = {"prompt": "p", "answer": "7", "step": 1, "completions": [COMPLETION]}


def report_in(folder: Path, groups: list[dict] = [GROUP]) -> str:  # noqa: B006
    (folder / "adapter").mkdir(parents=True, exist_ok=True)
    rows = [full_row(step) | {"rollout_tokens": 5} for step in (1, 2)]
    log = SimpleNamespace(rows=[*rows, {"step": 2, "eval": EVAL}])
    return report_run(ended_run(folder, groups), log, PROBLEM)


def ended_run(folder: Path, groups: list[dict]) -> SimpleNamespace:
    """What report_run reads of a run."""
    args = SimpleNamespace(**BASE, output_dir=str(folder), run_name="t")
    tokenizer = SimpleNamespace(chat_template="x", pad_token_id=0)
    ends = torch.tensor([1])
    return SimpleNamespace(args=args, groups=groups, tokenizer=tokenizer, eos_ids=ends)


def is_whole(path: Path) -> bool:
    """By the last bytes of each kind of file."""
    ends = {".json": b"}\n", ".jsonl": b"}\n", ".md": b"```\n", ".html": b"</html>\n"}
    return path.read_bytes().rstrip().endswith(ends.get(path.suffix, PNG_END).rstrip())


PNG_END = b"IEND\xaeB`\x82"


@pytest.fixture
def quick_curves(monkeypatch):
    """The drawing takes seconds, and most of these tests are about the other files."""

    def write_end(path: str, *_: object) -> None:
        Path(path).write_bytes(PNG_END)

    monkeypatch.setattr(report, "write_curves", write_end)


def test_report_writes_every_file_and_says_nothing(tmp_path, capfd):
    text = report_in(tmp_path)
    assert all(is_whole(tmp_path / name) for name in FILES)
    assert all(str(tmp_path / name) in text for name in FILES if "/" not in name)
    assert capfd.readouterr() == ("", "")


@pytest.mark.usefixtures("quick_curves")
def test_report_of_a_run_sums_up_its_log(tmp_path):
    (tmp_path / "adapter").mkdir()
    log = open_log(tmp_path)
    seconds = {"seconds_score": 1.0, "seconds_update": 0.5}
    log.write({"step": 0, "eval": EVAL})
    for step in (1, 2, 3, 4):  # two updates a rollout
        rollout = {"seconds_rollout": 2.0 * (step % 2), "rollout_tokens": 7, "reward": 0.5}
        log.write({"step": step} | seconds | rollout)
    log.write({"step": 4, "eval": EVAL | {"pass@4": 0.75}})
    text = report_run(ended_run(tmp_path, [GROUP]), log, PROBLEM)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary.pop("seconds") > 0.1
    assert summary == {
        "before": EVAL, "after": EVAL | {"pass@4": 0.75}, "steps": 4, "rollout_tokens": 14,
        "seconds_per_step": 2.5,
        "best": {"step": 0, "sampled_accuracy": 0.35, "weights": None},
    }  # fmt: skip
    assert "+15.0" in text and str(tmp_path / "summary.json") in text
    assert (tmp_path / "completions.jsonl").read_text() == ""  # that is written along the way


BEST = {  # the best step -> what the report says after its accuracy; checkpoints are at 2 and 4
    0: "That was before training.",
    1: "A --save_steps that divides --eval_steps would have saved its weights.",
    2: "Its weights are in {folder}/checkpoint-2.",
    4: "Its weights are in {folder}/adapter.",
}


@pytest.mark.parametrize("step", BEST)
@pytest.mark.usefixtures("quick_curves")
def test_report_names_the_best_evaluation_and_its_weights(tmp_path, step):
    for name in ("adapter", "checkpoint-2", "checkpoint-4"):
        (tmp_path / name).mkdir()
    log = open_log(tmp_path)
    for evaluated in (0, 1, 2, 4):
        accuracy = 0.5 if evaluated == step else 0.25
        log.write({"step": evaluated, "eval": EVAL | {"sampled_accuracy": accuracy}})
    text = report_run(ended_run(tmp_path, [GROUP]), log, PROBLEM)
    expected = BEST[step].format(folder=tmp_path)
    sentence = f"\nThe best evaluation was at step {step}: sampled accuracy 50.0%. {expected}\n"
    assert sentence in text
    assert sentence in (tmp_path / "adapter/README.md").read_text()


@pytest.mark.parametrize("name", FILES)
@pytest.mark.usefixtures("quick_curves")
def test_a_file_that_cannot_be_written_is_one_sentence_and_the_rest_is_there(tmp_path, capfd, name):
    (tmp_path / name).mkdir(parents=True)  # a directory in its place: IsADirectoryError
    text = report_in(tmp_path)
    assert all(is_whole(tmp_path / other) for other in FILES if other != name)
    out, err = capfd.readouterr()
    assert out == "" and len(err.splitlines()) == 1
    assert err.startswith(f"{tmp_path / name} is not written, the run goes on: IsADirectoryError")
    assert str(tmp_path / name) not in text and "Written:" in text


BREAKS = {  # how the drawing fails -> what the sentence gives as the reason
    "raises": "RuntimeError: line one line two",
    "no matplotlib": "ModuleNotFoundError: ",
}


@pytest.mark.parametrize("way", BREAKS)
def test_a_figure_that_cannot_be_drawn_costs_the_figure(tmp_path, capfd, monkeypatch, way):
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("line one\nline two")

    if way == "raises":
        monkeypatch.setattr("matplotlib.figure.Figure.savefig", broken)
    else:
        monkeypatch.setitem(sys.modules, "matplotlib", None)  # its import now fails
    text = report_in(tmp_path)
    assert all(is_whole(tmp_path / name) for name in FILES if name != "curves.png")
    err = capfd.readouterr().err
    start = f"{tmp_path / 'curves.png'} is not written, the run goes on: {BREAKS[way]}"
    assert err.startswith(start) and err.count("\n") == 1
    assert "curves.png" not in text


@pytest.mark.parametrize("name", FILES)
def test_a_full_disk_is_left_to_the_trainer(tmp_path, capfd, name, request):
    if name != "curves.png":
        request.getfixturevalue("quick_curves")
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).symlink_to("/dev/full")  # every write there is ENOSPC
    with pytest.raises(OSError) as error:
        report_in(tmp_path, [GROUP] * 400)
    assert error.value.errno == errno.ENOSPC
    assert capfd.readouterr().err == ""


@pytest.mark.slow  # it builds a font cache
def test_a_font_cache_that_cannot_be_written_does_not_cost_the_figure(tmp_path):
    code = f"import common.curves as m; m.write_curves({str(tmp_path / 'c.png')!r}, [], 't')"
    environ = os.environ | {"MPLCONFIGDIR": "/dev/null/none", "HOME": "/dev/null"}
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environ, check=True)
    assert is_whole(tmp_path / "c.png")
