"""tools/fork.py: a method's file becomes a whole script, which has the method's name everywhere."""

import hashlib
import importlib
import json
import subprocess
import sys

import conftest
import fork
import pytest
from support import RATIO, ROOT, refusal
from test_readme import METHOD as README_METHOD
from test_style import first_difference

METHODS = sorted(ROOT.glob("methods/*.py"))
ARCA = (ROOT / "grpo_arca.py").read_text()


@pytest.mark.parametrize("path", METHODS, ids=lambda path: path.stem)
def test_a_fork_is_grpo_arca_but_for_its_docstring_and_credit_regions(path):
    text = fork.fork(path)
    assert first_difference(ARCA, text) is None
    assert text.startswith(path.read_text().split("\n", 1)[0].removesuffix('"""'))
    assert f"\n    accelerate launch grpo_{path.stem}.py\n" in text


def test_the_readmes_method_may_stay_among_the_methods(tmp_path):
    """CONTRIBUTING's first step puts it there: what is checked of methods/ holds for it, too."""
    path = tmp_path / "mine.py"
    path.write_text(README_METHOD)
    test_a_fork_is_grpo_arca_but_for_its_docstring_and_credit_regions(path)
    for check in (["check", "--config", ROOT / "pyproject.toml"], ["format", "--check"]):
        subprocess.run([sys.executable, "-m", "ruff", *check, path], check=True)


@pytest.mark.parametrize("script", ["grpo_oar", "grpo_strace"])
def test_a_change_of_the_trainer_is_taken_to_another_script_and_nothing_else(script):
    own = (ROOT / f"{script}.py").read_text()
    assert fork.with_arcas_trainer(own) == own
    changed = own.replace("def collect(", "def gather(").replace("import torch\n", "")
    assert changed != own
    assert fork.with_arcas_trainer(changed) == own


def made(folder, functions: str) -> dict[str, str]:
    """Returns the statements of both regions of the fork of a method with these functions."""
    path = folder / "mine.py"
    path.write_text(f'"""Mine."""\n\n# === CREDIT ===\n{functions}\n# === END CREDIT ===\n')
    parts = fork.MARK.split(fork.fork(path))
    return fork.statements(fork.textwrap.dedent(parts[2])) | fork.statements(parts[6])


def test_a_fork_has_what_the_method_uses_and_not_what_it_does_not(tmp_path):
    """The flag that chooses is made, with controls where the method's scores become the credit."""
    scores = "def token_scores(run, micro, metrics):\n    return micro.entropy\n\n\n"
    found = made(tmp_path, scores)
    assert found.keys() == {
        "credit", "control_weights", "token_scores", "normalize", "assign_credit",
        "surrogate_terms",
    }  # fmt: skip
    assert '"mine", "random", "shuffled"' in found["credit"]
    assert "return micro.entropy" in found["token_scores"]

    own = "def assign_credit(run, batch, micros, metrics):\n    return normalize(1, 2, 3)\n"
    found = made(tmp_path, own)
    assert "control_weights" not in found
    assert "random" not in found["credit"]

    terms = "def surrogate_terms(args, micro, log_ratio):\n    return log_ratio, 1\n"
    assert "random" not in made(tmp_path, scores + terms)["credit"]  # the loss ignores the scores


def test_gaps_are_filled_with_grpos_functions_and_imports_are_taken_along(tmp_path):
    others = "import numpy as np\nfrom common.data import (\n    load_data,\n    whole_prompt,\n)\n"
    imports = f"import math\nfrom torch import nn\n{others}from grpo_arca import Run\n"
    (tmp_path / "ratio.py").write_text(RATIO.replace("\n\n\n", f"\n\n{imports}\n\n", 1))
    _, _, flags, *_, credit, _, _ = fork.MARK.split(fork.fork(tmp_path / "ratio.py"))
    assert credit.startswith(f"{others}\n\ndef surrogate_terms(")
    grpo = fork.statements(fork.MARK.split((ROOT / "methods/grpo.py").read_text())[2])
    gaps = dict(grpo.items() - fork.statements(credit).items())
    assert gaps.keys() == {"surrogate_terms", "set_credit", "after_prompts", "informed"}
    assert 'Literal["ratio"]' in flags and "sharpening" not in flags


def test_no_method_replaces_a_script(run_tool, capsys):
    refusal(run_tool, fork, "x/strace.py")
    assert "grpo_strace.py is one of the three scripts" in capsys.readouterr().err


@pytest.mark.slow
def test_a_fork_trains_and_is_named_logged_and_carded_by_its_own_name(
    run_main, monkeypatch, tmp_path
):
    (tmp_path / "common").symlink_to(ROOT / "common")
    script = tmp_path / "grpo_entropy_mask.py"
    script.write_text(fork.fork(ROOT / "methods/entropy_mask.py"))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, script.stem, raising=False)  # another test's
    monkeypatch.setattr(conftest, "grpo_arca", importlib.import_module(script.stem))
    assert run_main(output_dir="", max_steps=1)[0] == 0
    out = tmp_path / "runs/grpo_entropy_mask-entropy_mask-1"
    config = json.loads((out / "config.json").read_text())
    assert config["credit"] == "entropy_mask"
    assert (
        config["code of the script"]
        == hashlib.blake2b(script.read_bytes(), digest_size=4).hexdigest()
    )
    assert "- entropy_mask\n" in (out / "adapter/README.md").read_text()
