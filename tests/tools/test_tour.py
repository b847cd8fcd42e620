"""tools/tour.ipynb: its cells run from top to bottom, and its stored outputs are small."""

import base64
import json
import os
import subprocess
import sys

import pytest
import worth
from support import ROOT

PATH = ROOT / "tools/tour.ipynb"
# Follows the cells in the slow test, and prints what they have computed.
REPORT = """
found = {
    "advantages": advantages,
    "collected": collected,
    "weights": weights.tolist(),
    "differences": differences,
    "accuracies": evaluations,
    "updates": len(history),
    "worth": measured.stdout,
    "worth_errors": measured.stderr,
}
print(json.dumps(found))
"""


def code_cells() -> list[dict]:
    cells = json.loads(PATH.read_text())["cells"]
    return [cell for cell in cells if cell["cell_type"] == "code"]


def test_the_stored_outputs_are_of_one_run_without_mistakes():
    cells = code_cells()
    counts = [cell["execution_count"] for cell in cells]
    assert counts == list(range(1, len(cells) + 1))
    for cell in cells:
        for output in cell["outputs"]:
            assert output["output_type"] != "error"
            assert output.get("name") != "stderr"  # progress bars


def test_the_notebook_is_small_and_has_its_figures():
    assert PATH.stat().st_size < 400_000
    pictures = 0
    for cell in code_cells():
        for output in cell["outputs"]:
            encoded = output.get("data", {}).get("image/png", "")
            pictures += base64.b64decode(encoded).startswith(b"\x89PNG")
    assert pictures == 2


def test_the_stored_table_has_the_columns_that_worth_prints():
    (cell,) = [cell for cell in code_cells() if "tools/worth.py" in "".join(cell["source"])]
    (output,) = cell["outputs"]
    head, *rows = "".join(output["text"]).splitlines()[2:]
    assert head.split() == [*worth.PRINTED_FIGURES, "verdict"]
    assert len(rows) == 4
    assert "  control: holds" in rows[1]


def test_it_names_no_folder_of_the_machine_that_ran_it():
    text = PATH.read_text()
    assert str(ROOT) not in text and "site-packages" not in text


@pytest.mark.slow
def test_the_cells_run_from_top_to_bottom(tmp_path):
    """All of them, as they are stored, but with 4 batches for the worth, and another folder."""
    script = "\n\n".join("".join(cell["source"]) for cell in code_cells())
    changes = {
        'Path("runs/tour")': f"Path({str(tmp_path / 'tour')!r})",
        '"--batches", "32"': '"--batches", "4"',
    }
    for old, new in changes.items():
        assert script.count(old) == 1
        script = script.replace(old, new)
    path = tmp_path / "cells.py"
    path.write_text(f"import json\n{script}\n{REPORT}")
    environment = os.environ | {"MPLBACKEND": "Agg"}
    done = subprocess.run(
        [sys.executable, path], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])

    assert found["advantages"] == pytest.approx(found["collected"], abs=1e-5)
    assert max(found["differences"]) < 1e-6
    uniform, *others = found["weights"]
    assert set(uniform) == {1.0}
    for weights in others:
        assert sum(weights) / len(weights) == pytest.approx(1, abs=1e-4)
        assert max(weights) > 1.5
    assert found["updates"] == 45
    assert found["accuracies"]["0"]["greedy_accuracy"] < 0.6
    assert found["accuracies"]["45"]["greedy_accuracy"] > 0.9
    assert "digits.py" in found["worth"], found["worth_errors"]
