"""The README's commands have flags that exist, and its examples do what it says."""

import importlib
import importlib.util
import re
import shlex
import subprocess
import sys

import pytest
import torch
from support import ROOT

from common.data import parse_rows

README = (ROOT / "README.md").read_text(encoding="utf-8")
COMMANDS = "\n".join(re.findall(r"```bash\n(.*?)```", README, re.DOTALL))
REWARD, METHOD = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def launches() -> list[list[str]]:
    """Returns the arguments of each `accelerate launch` in the README, from the script on."""
    found = []
    for line in COMMANDS.replace("\\\n", " ").splitlines():
        if "accelerate launch" in line:
            words = shlex.split(line, comments=True)
            begin = next(i for i, word in enumerate(words) if word.startswith("grpo_"))
            found.append(words[begin:])
    return found


# ---- Commands ------------------------------------------------------------------------------------
def test_the_launch_commands_have_flags_that_exist_and_folders_of_their_own(monkeypatch) -> None:
    folders = []
    for script, *flags in launches():
        module = importlib.import_module(script.removesuffix(".py"))
        monkeypatch.setattr(module, "find_adapter", no_adapter)  # it would ask the Hub
        folders.append(module.parse_args(flags).output_dir)
    assert len(folders) >= 6
    assert len(set(folders)) == len(folders)


def no_adapter(name: str, revision: str) -> tuple[None, dict]:
    """Stands for `find_adapter` where a name is a model's."""
    return None, {}


def test_the_programs_that_the_readme_names_exist() -> None:
    named = set(re.findall(r"\b(?:tools|results|tests|common)/[\w/]+\.(?:py|md|csv)", README))
    assert "tools/worth.py" in named
    assert [name for name in sorted(named) if not (ROOT / name).is_file()] == []


def test_the_readmes_data_file_can_be_trained_on(tmp_path, run_main, rows_of, monkeypatch) -> None:
    code = re.search(r'python -c "\n(.*?)" > my.jsonl', COMMANDS, re.DOTALL)[1]
    made = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    data = tmp_path / "my.jsonl"
    data.write_text(made.stdout)
    columns = {"prompt_column": "question", "answer_column": "result"}
    flags = {"max_completion_length": 80, "max_steps": 1, "per_device_train_batch_size": 8}
    ended, _, err = run_main(dataset_name=str(data), **columns, **flags)
    assert ended == 0, err
    assert len(rows_of()) == 1


# ---- The reward function -------------------------------------------------------------------------
def test_the_readmes_reward_trains(run_main, rows_of, tmp_path, monkeypatch) -> None:
    """It stands in a file of its own. Evaluation stays correctness."""
    name = re.search(r"def (\w+)", REWARD)[1]
    assert f"--reward_funcs accuracy_reward my.{name} --reward_weights 1 0.5" in README
    (tmp_path / "my.py").write_text(REWARD)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    flags = {"max_completion_length": 80, "max_steps": 2, "per_device_train_batch_size": 16}
    ended, _, err = run_main(reward_funcs=f"my.{name}", **flags)
    assert ended == 0, err
    rows = rows_of()
    assert len(rows) == 2
    assert all(0 < row["reward"] < 1 for row in rows)
    assert rows[0][f"rewards/{name}/mean"] == rows[0]["reward"]
    assert rows[0][f"rewards/{name}/characters"] > 0
    assert any(row["grad_norm"] > 0 for row in rows)


def test_the_readmes_reward_pays_where_the_column_is_a_whole_solution() -> None:
    """GSM8K's column is one. The function gets the final answer as `gold`."""
    row = {"question": "6 * 7?", "answer": "6 * 7 = 42\n#### 42"}
    (problem,) = parse_rows([row], "x", None, None)
    names: dict = {}
    exec(REWARD, names)
    function = names[re.search(r"def (\w+)", REWARD)[1]]
    texts = ["It is \\boxed{42}.", "It is \\boxed{41}.", "\\boxed{42 apples}", "#### 42"]
    columns = {"gold": [problem.answer] * 4, "answer": [problem.columns["answer"]] * 4}
    logged = {}
    prompts = ["How many apples are 6 * 7 apples?"] * 4
    paid = function(prompts, completions=texts, log_metric=logged.__setitem__, **columns)
    length = [len(text) for text in texts]
    assert paid == [1 - length[0] / 1000, 0, 1 - length[2] / 1000, 0]  # as accuracy_reward
    assert logged == {"characters": sum(length) / 4}


# ---- The credit method ---------------------------------------------------------------------------
@pytest.fixture
def my_method(tmp_path, monkeypatch):
    """A copy of grpo_arca.py beside common/, with the README's function for its `token_scores`."""
    source = (ROOT / "grpo_arca.py").read_text(encoding="utf-8")
    pattern = r"def token_scores.*?(?=\n\n\ndef )"
    source, count = re.subn(pattern, METHOD.strip(), source, flags=re.DOTALL)
    assert count == 1
    (tmp_path / "common").symlink_to(ROOT / "common")
    path = tmp_path / "my_method.py"
    path.write_text(source)
    spec = importlib.util.spec_from_file_location("my_method", path)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "my_method", module)
    spec.loader.exec_module(module)
    return module


def test_the_readmes_credit_method_is_one(make_run, my_method) -> None:
    run = make_run(my_method)
    batch = my_method.sample(run, torch.arange(4), [[5, 6, 7]] * 4, torch.rand(4, 24))
    batch.advantages = torch.ones(4)
    batch.loss_mask = batch.mask
    my_method.score(run, batch, [batch], {})
    for weights, mask in zip(batch.weights, batch.mask, strict=True):
        length = int(mask.sum())
        expected = torch.arange(1, length + 1) * 2 / (length + 1)  # 1, 2, 3, ... over their mean
        assert torch.allclose(weights[:length], expected, rtol=1e-4)
        assert (weights[length:] == 0).all()
