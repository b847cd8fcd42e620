"""What a user meets on the second day: each ends in a sentence, and says what will happen."""

import os
import signal

import pytest
import torch

import grpo_arca as trainer


def refused(run_main, word: str, **flags) -> None:
    code, out, err = run_main(**flags)
    assert code == 2 and "Traceback" not in out + err, err
    assert [line for line in err.splitlines() if "error: " in line and word in line], err


def test_a_policy_that_becomes_nan(run_main, monkeypatch):
    """Ten updates are skipped, then the run ends with the sentence."""
    inner = trainer.check_model

    def poison(run, prompt):
        inner(run, prompt)
        for name, parameter in run.model.named_parameters():
            if "lora_B" in name:
                parameter.data.fill_(torch.nan)

    monkeypatch.setattr(trainer, "check_model", poison)
    refused(run_main, "not finite in 10 updates", max_steps=12)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: not enough memory"),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    ],
)
def test_too_little_memory_wherever_it_is(run_main, monkeypatch, error):
    def collect(*_):
        raise error

    monkeypatch.setattr(trainer, "collect", collect)
    refused(run_main, "out of memory: in this order, try --gradient_checkpointing True")


def test_another_runtime_error_is_not_taken_for_that(run_main, monkeypatch):
    def collect(*_):
        raise RuntimeError("shapes differ")

    monkeypatch.setattr(trainer, "collect", collect)
    with pytest.raises(RuntimeError, match="shapes differ"):
        run_main()


def test_a_file_where_the_adapter_would_be_written(run_main, tmp_path):
    """Said before the first step, not after the last."""
    (tmp_path / "out").mkdir()
    (tmp_path / "out/adapter").write_text("mine")
    refused(run_main, "adapter")
    assert not (tmp_path / "out/metrics.jsonl").exists()


def test_ctrl_c_is_heard_at_once_and_the_way_on_can_be_pasted(run_main, monkeypatch, tmp_path):
    inner = trainer.update

    def interrupted(run, micros):
        if run.step == 1:
            os.kill(os.getpid(), signal.SIGINT)
        return inner(run, micros)

    monkeypatch.setattr(trainer, "update", interrupted)
    code, out, err = run_main(max_steps=4)
    assert code == 0 and "saving after this rollout, then ending" in err
    assert out.endswith(" run the same command again with --resume_from_checkpoint latest\n")
    assert (tmp_path / "out/checkpoint-2").is_dir()


def test_evaluations_show_how_far_they_are(run_main):
    _, _, err = run_main(max_steps=0)
    assert "greedy: " in err and "sampled: " in err


def test_help_keeps_the_docstrings_lines_and_explains_pairs(capsys):
    with pytest.raises(SystemExit) as stop:
        trainer.parse_args(["--help"])
    text = capsys.readouterr().out
    assert stop.value.code == 0 and trainer.__doc__.strip() in text
    assert "(default: 4e-05, or 0.004 for the embedded policies)" in " ".join(text.split())


def test_a_reward_that_always_pays_nothing_is_shown_with_a_completion(run_main, tmp_path):
    code = "def pays(completions, **_):\n    return [0.0] * len(completions)\n"
    (tmp_path / "nothing.py").write_text(code)
    code, _, err = run_main(reward_funcs="nothing.pays", max_completion_length=60)
    assert code == 0 and "no completion earns anything. The first one (" in err
    lines = (tmp_path / "out/completions.jsonl").read_text().splitlines()
    assert any('"kind": "train"' in line for line in lines)
