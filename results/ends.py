"""Judges the ends of finished runs again: at several temperatures, and with sixteen samples.

    python results/ends.py wrong_policy                        # its runs in runs/studies/
    python results/ends.py nearly_right_policy --runs FOLDER   # of another checkout, say

An evaluation in training samples each problem four times at temperature 1. Here the untrained
policy and each saved adapter answer the same problems sixteen times, at the temperatures 1 and 0.3,
all with the same random numbers, and greedily. results/data/ends.csv gets two lines for each, and
keeps those that it has.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any
from unittest import mock

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from peft import set_peft_model_state_dict
from safetensors.torch import load_file
from studies import RUNS, STUDIES, read_csv, write_csv
from tqdm import tqdm

import grpo_arca

DATA = ROOT / "results/data/ends.csv"
TEMPERATURES = (1.0, 0.3)
UNTRAINED = "untrained"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("study", choices=STUDIES)
    parser.add_argument("--runs", type=Path, help="folder of the study's runs")
    options = parser.parse_args()
    flags = STUDIES[options.study].command_line(1, "0")
    run: Any = grpo_arca.Run(grpo_arca.parse_args([*flags, "--num_generations_eval", "16"]))
    run.log = mock.Mock()  # it remembers what an evaluation writes
    folder = options.runs or RUNS / options.study
    rows = read_csv(DATA)
    done = {row["run"] for row in rows if row["study"] == options.study}
    names = [UNTRAINED, *sorted(path.parent.name for path in folder.glob("*/summary.json"))]
    for name in tqdm([name for name in names if name not in done]):
        facts = {"method": UNTRAINED}
        if name != UNTRAINED:
            facts = json.loads((folder / name / "run.json").read_text())
            set_peft_model_state_dict(
                run.model, load_file(folder / name / "adapter/adapter_model.safetensors")
            )
        facts |= {"study": options.study, "run": name}
        for temperature in TEMPERATURES:
            run.args.temperature = temperature
            grpo_arca.evaluate(run)
            (row,) = run.log.write.call_args.args
            rows.append(facts | {"temperature": temperature} | row["eval"])
        write_csv(rows, DATA)


if __name__ == "__main__":
    main()
