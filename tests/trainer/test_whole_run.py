"""A whole run: the embedded default, and a data set of one's own, leave every promised file."""

import json
import subprocess
import sys

from peft import PeftModel
from support import ROOT, TINY, command_line
from transformers import AutoModelForCausalLM

import grpo_arca as trainer


def test_the_script_end_to_end(tmp_path):
    """Two updates of the embedded default, as a command: every file that is promised, readable by
    what reads it."""
    flags = {"max_steps": 2, "max_eval_samples": 4, "num_generations_eval": 2, "eval_steps": 1}
    flags |= {"gradient_accumulation_steps": 1, "per_device_train_batch_size": 8}
    flags |= {"output_dir": tmp_path / "out"}
    command = [sys.executable, "grpo_arca.py", *command_line(flags)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    out = tmp_path / "out"
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "reward" in row] == [1, 2]
    assert [row["step"] for row in rows if "eval" in row] == [0, 1, 2]
    wanted = (
        "reward rewards/accuracy_reward/mean completion_length truncated_share zero_std_share "
        "entropy kl clip_fraction clip_fraction_sequence grad_norm learning_rate weight_gini "
        "weight_effn sampling_gap seconds_rollout "
        "seconds_score seconds_credit seconds_update tokens_per_second peak_memory_gb loss "
        "skipped_update reward_timeouts rollout_tokens"
    )
    for row in rows:
        if "reward" in row:
            assert set(wanted.split()) <= set(row) and None not in row.values()
            assert row["sampling_gap"] < 1e-4
    summary = json.loads((out / "summary.json").read_text())
    assert set(summary["before"]) == {"greedy_accuracy", "sampled_accuracy", "pass@2"}
    assert summary["steps"] == 2
    for name in ("config.json", "curves.png", "credit.html", "completions.jsonl"):
        assert (out / name).stat().st_size > 100 and name in done.stdout
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(TINY), out / "adapter")
    assert any(p.abs().sum() > 0 for n, p in model.named_parameters() if "lora_B" in n)
    assert "Warning" not in done.stderr + done.stdout and "cut off" not in done.stderr
    assert done.stderr.startswith("grpo_arca.py: arca credit for "), done.stderr[:600]


def test_a_rows_peak_memory_is_that_after_its_update(run_main, rows_of, monkeypatch):
    updates = []
    update = trainer.update
    monkeypatch.setattr(trainer, "update", lambda *inputs: updates.append(1) or update(*inputs))
    monkeypatch.setattr(trainer, "peak_memory", lambda _: len(updates))
    assert run_main(max_steps=2)[0] == 0
    assert [row["peak_memory_gb"] for row in rows_of()] == [1, 2]


def test_what_an_evaluation_did_not_grade_in_time_is_said(run_main, monkeypatch):
    grade_batch = trainer.grade_batch

    def late(run, batch):
        run.grader.timeouts += 3
        return grade_batch(run, batch)

    monkeypatch.setattr(trainer, "grade_batch", late)
    code, _, err = run_main(max_steps=0)
    assert code == 0
    assert "held-out answers count as wrong, because grading them took too long" in err


def test_a_local_file_in_the_format_of_gsm8k(run_main, rows_of, tmp_path):
    rows = []
    for n in range(60):
        solution = f"She has {n} + 2 = <<{n}+2={n + 2}>>{n + 2} apples.\n#### {n + 2}"
        rows.append({"question": f"Ann has {n} apples and buys 2. How many?", "answer": solution})
    path = tmp_path / "gsm8k.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    code, out, err = run_main(
        dataset_name=path, credit="divergence", max_completion_length=32,
        gradient_accumulation_steps=2, num_iterations=2, beta=0.01, max_steps=2,
    )  # fmt: skip
    assert code == 0 and "summary.json" in out, err
    assert "gsm8k.jsonl (5" in err and len(rows_of()) == 2
