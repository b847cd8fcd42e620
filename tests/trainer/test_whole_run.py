"""A whole run learns, and leaves every promised file; the adapter's card answers as the run did."""

import contextlib
import io
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support import ROOT, TINY, VARIETY, read_jsonl


def answer_of_card(card: Path) -> str:
    """Returns what the code of an adapter's card prints."""
    code = card.read_text().partition("```python\n")[2].partition("```")[0]
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        exec(code, {})
    return said.getvalue().removesuffix("\n")


def last_greedy_answer(out: Path) -> str:
    """Returns the answer to the first held-out problem in a run's last evaluation."""
    greedy = [row for row in read_jsonl(out / "completions.jsonl") if row["kind"] == "greedy"]
    return next(row["completion"] for row in greedy if row["step"] == greedy[-1]["step"])


METRICS = (
    "reward rewards/accuracy_reward/mean completion_length truncated_share zero_std_share "
    "entropy kl approx_kl clip_fraction clip_fraction_sequence clipped_gradient grad_norm "
    "learning_rate weight_gini weight_effn sampling_gap seconds_rollout seconds_score "
    "seconds_credit seconds_update tokens_per_second peak_memory_gb loss skipped_update "
    "reward_timeouts rollout_tokens sampled_completions"
)
FIGURES = {"greedy_accuracy", "sampled_accuracy", "pass@2", "pass@4", "truncated_share"}


@pytest.mark.slow
def test_the_default_command(tmp_path):
    out = tmp_path / "out"
    done = subprocess.run(
        [sys.executable, "grpo_arca.py", "--output_dir", out],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    rows = read_jsonl(out / "metrics.jsonl")
    updates = [row for row in rows if "reward" in row]
    assert [row["step"] for row in updates] == list(range(1, 46))
    assert [row["step"] for row in rows if "eval" in row] == [0, 25, 45]
    for row in updates:
        assert set(METRICS.split()) <= row.keys()
        assert None not in row.values()
        assert row["sampling_gap"] < 1e-4

    summary = json.loads((out / "summary.json").read_text())
    assert summary["steps"] == 45
    assert summary["before"].keys() == summary["after"].keys() == FIGURES
    assert summary["after"]["greedy_accuracy"] > 0.95
    for name in ("before", "after"):
        assert f"{summary[name]['greedy_accuracy']:.1%}" in done.stdout  # in the table
    assert "trains 28 of 29 linear layers, 90,112 of 1,132,160 parameters\n" in done.stdout
    assert f"into {out}\n" in done.stdout
    said = [line for line in re.split("[\r\n]", done.stderr) if line.strip()]
    prompt, answer, *rest = [line for line in said if "/45 [" not in line]
    assert prompt.startswith("the first prompt ends with 'rt with 44, add 19, subtract 14")
    assert (answer, rest) == ("its answer is '66'", [])  # no library's bars and warnings
    for name in ("config.json", "curves.png", "credit.html", "completions.jsonl"):
        assert (out / name).stat().st_size > 1000
    assert answer_of_card(out / "adapter/README.md") == last_greedy_answer(out)


CHAT = [
    {"role": "user", "content": "Start with 5, add 7, double it, subtract 3."},
    {"role": "assistant", "content": "Start"},
]
DATED = "{{ strftime_now('%d %b %Y') }}" + Path(TINY, "chat_template.jinja").read_text()
CARDS = {
    "quantized, prefilled": {
        "rollout_weights": "quantized",
        "dataset_name": "chats.jsonl",
        "chat_template_kwargs": json.dumps({"chat_template": DATED}),
    },
    "without 4 bits, dated": {"load_in_4bit": False, "system_prompt": 'Don\'t say "no".'},
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", CARDS)
def test_the_adapters_card_answers_as_the_run_did(run_main, rows_of, tmp_path, kind):
    """At a rate at which the adapter counts. It loads from wherever it is."""
    rows = [{"prompt": CHAT, "answer": "21"}, {"prompt": CHAT[:1], "answer": "21"}]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = {
        "max_steps": 1, "learning_rate": 0.05, "warmup_steps": 0, "max_completion_length": 48,
        "reward_funcs": "variety.pay", "lora_target_modules": ["q_proj", "down_proj"],
    }  # fmt: skip
    (tmp_path / "variety.py").write_text(VARIETY.replace(" // 8", ""))  # differs in every group
    if kind.endswith("dated"):
        flags["model_name_or_path"] = shutil.copytree(TINY, tmp_path / "base")
        (tmp_path / "base/chat_template.jinja").write_text(DATED)
    code, said, errors = run_main(**flags | CARDS[kind])
    assert code == 0, errors
    trains = "8 of 29 linear layers, 28,672 of "
    assert f": trains {trains}" in said
    assert json.loads((tmp_path / "out/config.json").read_text())["adapter_size"].startswith(trains)
    assert rows_of()[0]["grad_norm"] > 0
    answer = last_greedy_answer(tmp_path / "out")
    if kind.startswith("quantized"):
        answer = answer.removeprefix("Start")  # which the prompt gave
    assert answer_of_card(tmp_path / "out/adapter/README.md") == answer != ""
