"""What a run says while it goes well, and what it advises where it learns nothing."""

import pytest


def test_the_first_lines_say_what_is_trained_on_what(run_main):
    """And that most completions are cut off, once."""
    code, _, err = run_main()
    first = next(line for line in err.splitlines() if line.startswith("grpo_arca.py: "))
    for words in (
        "arca credit for ", "tiny_policy (NF4, LoRA of rank 8)", "chain_arithmetic (4096 problems",
        "2 held out", "2 prompts x 4 completions of at most 8 tokens", "3 updates", "0.004", "out",
    ):  # fmt: skip
        assert words in first, first
    assert code == 0 and err.count("100% of completions are cut off before their end") == 1
    assert err.count("raise --max_completion_length") == 1


def test_evaluations_show_how_far_they_are(run_main):
    _, _, err = run_main(max_steps=0)
    assert "greedy: " in err and "sampled: " in err


@pytest.mark.slow
def test_a_reward_that_always_pays_nothing_is_shown_with_a_completion(run_main, tmp_path):
    function = "def pays(completions, **_):\n    return [0.0] * len(completions)\n"
    (tmp_path / "nothing.py").write_text(function)
    code, _, err = run_main(reward_funcs="nothing.pays", max_completion_length=60)
    assert code == 0 and "no completion earns anything. The first one (" in err
    lines = (tmp_path / "out/completions.jsonl").read_text().splitlines()
    assert any('"kind": "train"' in line for line in lines)
