"""The commands of docs/papers.md: each is one of its script, and trains."""

import importlib
import re
import shlex

import pytest
from support import ROOT, TINY, command_line, fork_case, run_forks

COMMANDS = re.findall(
    r"^accelerate launch (grpo_\w+)\.py (.*)",
    (ROOT / "docs/papers.md").read_text().replace("\\\n", " "),
    re.M,
)
HERE = {  # the embedded model and data in place of the Hub's, and a run of seconds
    "model_name_or_path": TINY, "dataset_name": "chain_arithmetic", "dtype": "float32",
    "max_completion_length": 8, "gradient_accumulation_steps": 1, "steps_per_generation": 1,
    "per_device_train_batch_size": 8, "max_eval_samples": 2, "num_generations_eval": 2,
    "max_steps": 1, "output_dir": "out",
}  # fmt: skip


def test_each_paper_has_a_command_whose_flags_its_script_has():
    parsed = [importlib.import_module(s).parse_args(shlex.split(flags)) for s, flags in COMMANDS]
    assert [args.credit for args in parsed] == ["arca", "oar_g", "s_trace"]


@pytest.mark.slow
def test_each_command_trains_with_the_embedded_model_and_data(tmp_path):
    cases = [fork_case(tmp_path / script, script) for script, _ in COMMANDS]
    for case, (_, flags) in zip(cases, COMMANDS, strict=True):
        case["argv"] = [*shlex.split(flags), *command_line(HERE)]
    assert run_forks(tmp_path, cases) == ["0"] * 3
