"""tools/tour.ipynb: its cells run from top to bottom, and what is stored of them is current."""

import base64
import json
import os
import re
import subprocess
import sys

import pytest
import worth
from support import ROOT

PATH = ROOT / "tools/tour.ipynb"
CELLS = json.loads(PATH.read_text())["cells"]
CODE = [cell for cell in CELLS if cell["cell_type"] == "code"]
EXERCISES = "".join(CELLS[-1]["source"])  # with folded solutions
# Follows the cells in the slow test, and prints what they have computed.
REPORT = """
found = {
    "advantages": advantages,
    "collected": collected,
    "weights": weights.tolist(),
    "differences": differences,
    "steps": list(evaluations),
    "worth": measured.stdout,
    "errors": measured.stderr,
}
print(json.dumps(found))
"""


def test_the_stored_outputs_are_of_one_run_without_mistakes_and_warnings():
    assert [cell["execution_count"] for cell in CODE] == list(range(1, len(CODE) + 1))
    pictures = 0
    for cell in CODE:
        for output in cell["outputs"]:
            assert output["output_type"] != "error"
            assert output.get("name") != "stderr"  # progress bars
            encoded = output.get("data", {}).get("image/png", "")
            pictures += base64.b64decode(encoded).startswith(b"\x89PNG")
    assert pictures == 2
    assert str(ROOT) not in PATH.read_text()


def test_the_stored_figures_are_those_that_the_readme_and_worth_print():
    printed = json.dumps([cell["outputs"] for cell in CODE])
    readme = (ROOT / "README.md").read_text()
    for name in ("greedy accuracy", "sampled accuracy", "pass@2", "pass@4"):
        before, after = re.search(rf"^{name} +([\d.]+)% +([\d.]+)%", readme, re.M).groups()
        assert f"{name.replace(' ', '_')} {float(before) / 100:.3f}" in printed
        assert f"{name.replace(' ', '_')} {float(after) / 100:.3f}" in printed
    (cell,) = [cell for cell in CODE if "tools/worth.py" in "".join(cell["source"])]
    head, *rows = "".join(cell["outputs"][0]["text"]).splitlines()[1:]
    assert head.split() == [*worth.PRINTED_FIGURES, "verdict"]
    assert rows[1].endswith("  control: holds")


@pytest.mark.slow
def test_the_cells_run_from_top_to_bottom(tmp_path):
    """They run as they are stored, but for smaller numbers, and with a solution in the worth."""
    script = "\n\n".join("".join(cell["source"]) for cell in CODE)
    blocks = re.findall(r"```python\n(.*?)```", EXERCISES, re.S)
    (tmp_path / "oracle.py").write_text(blocks[1])
    changes = {
        'Path("runs/tour")': f"Path({str(tmp_path / 'tour')!r})",
        '"--output_dir", str(FOLDER)': '"--output_dir", str(FOLDER), "--max_eval_samples", "8", '
        '"--per_device_train_batch_size", "8"',
        "train_until(10)": "train_until(3)",
        "(15, 30, 45)": "(4, 5)",
        '"grpo_arca.py --credit surprisal"]': f"{str(tmp_path / 'oracle.py')!r}]",
        '"--batches", "32"': '"--batches", "4", "--processes", "1"',
        'f"{FOLDER}/worth"]': 'f"{FOLDER}/worth", "--", "--per_device_train_batch_size", "4"]',
    }
    for old, new in changes.items():
        assert script.count(old) == 1, old
        script = script.replace(old, new)
    path = tmp_path / "cells.py"
    path.write_text(f"import json\n{script}\n{blocks[0]}\n{REPORT}")
    done = subprocess.run(
        [sys.executable, path],
        cwd=ROOT,
        env=os.environ | {"MPLBACKEND": "Agg"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    *_, first, second, report = done.stdout.splitlines()
    found = json.loads(report)
    assert found["advantages"] == pytest.approx(found["collected"], abs=1e-5)
    assert max(found["differences"]) < 1e-6
    assert [sum(weights) for weights in found["weights"]] == pytest.approx(
        [len(found["weights"][0])] * 7, rel=1e-4
    )
    assert found["steps"] == [0, 4, 5]
    assert found["worth"].count(".py ") == 2, found["errors"]
    # The second exercise by hand
    assert (first, second) == (
        "tensor([[-0.4500, -0.4500, -0.4500, -2.2500]])",
        "tensor([[-0.1286, -0.1286, -0.1286, -3.2143]])",
    )
