"""The README's lines do what it says."""

import importlib.util
import re
import sys

import torch
from conftest import ROOT

from common.data import parse_rows

README = (ROOT / "README.md").read_text(encoding="utf-8")
REWARD, METHOD = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def test_the_readmes_reward_trains(run_main, rows_of, tmp_path, monkeypatch):
    """Its function, in a file of its own, on the embedded task; evaluation stays correctness."""
    code = REWARD
    name = re.search(r"def (\w+)", code)[1]
    assert f"--reward_funcs accuracy_reward my.{name} --reward_weights 1 0.5" in README
    (tmp_path / "my.py").write_text(code)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    flags = {"max_completion_length": 80, "max_steps": 2, "per_device_train_batch_size": 16}
    ended, _, err = run_main(reward_funcs=f"my.{name}", **flags)
    assert ended == 0, err
    rows = rows_of()
    assert len(rows) == 2 and all(0 < row["reward"] < 1 for row in rows)
    assert rows[0][f"rewards/my.{name}/mean".replace("my.", "")] == rows[0]["reward"]
    assert any(row["grad_norm"] > 0 for row in rows)


def test_the_readmes_reward_pays_where_the_column_is_a_whole_solution():
    """As GSM8K's is: functions are given the parsed answer."""
    code = REWARD
    row = {"question": "6 * 7?", "answer": "6 * 7 = 42\n#### 42"}
    (problem,) = parse_rows([row], "x", None, None)
    exec(code, names := {})
    function = names[re.search(r"def (\w+)", code)[1]]
    texts, given = ["It is \\boxed{42}.", "It is \\boxed{41}."], [problem.columns["answer"]] * 2
    paid = function(prompts=[""] * 2, completions=texts, gold=[problem.answer] * 2, answer=given)
    assert paid == [1 - len(texts[0]) / 1000, 0]


def test_the_readmes_credit_method_is_one(make_run, monkeypatch, tmp_path):
    """In a copy of grpo_arca.py, beside common/, in the place of its `token_scores`."""
    source = (ROOT / "grpo_arca.py").read_text()
    source, count = re.subn(
        r"def token_scores.*?(?=\n\n\ndef )", METHOD.strip(), source, flags=re.S
    )
    assert count == 1 and "run.model.disable_adapter" in source  # where beta asks for it
    (tmp_path / "common").symlink_to(ROOT / "common")
    (tmp_path / "my_method.py").write_text(source)
    spec = importlib.util.spec_from_file_location("my_method", tmp_path / "my_method.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "my_method", module)
    spec.loader.exec_module(module)
    run = make_run(module)
    batch = module.sample(run, torch.arange(4), [[5, 6, 7]] * 4, torch.rand(4, 24))
    batch.advantages, batch.loss_mask = torch.ones(4), batch.mask
    module.score(run, batch, [batch], {})
    for weights, mask in zip(batch.weights, batch.mask, strict=True):
        n = int(mask.sum())
        expected = torch.arange(1, n + 1) * 2 / (n + 1)  # mean 1
        assert torch.allclose(weights[:n], expected, rtol=1e-4) and (weights[n:] == 0).all()


def test_the_readme_is_short():
    assert len(README.splitlines()) <= 170
