"""tools/compare.py: which runs are one group, what the groups are called, and what is drawn."""

import json
from pathlib import Path

import compare
import numpy as np
import pytest

STEPS = 20


def fake_run(
    folder: Path, name: str, seed: int, commit: str = "a1", processes: int = 1, **flags: object
) -> Path:
    """Writes what a run leaves: a thousandth of the squared step, and 0.1 more for each seed."""
    out = folder / f"{name}-{seed}"
    out.mkdir(parents=True)
    environment = {"command": [f"/x/{name}.py", str(seed)], "commit": commit}
    environment["hardware"] = {"processes": processes}
    config = {
        "credit": name, "seed": seed, "output_dir": str(out), "environment": environment,
        "max_steps": STEPS, "gradient_accumulation_steps": 4, "steps_per_generation": 4,
        "code of the script": f"c{seed}",
    }  # fmt: skip
    (out / "config.json").write_text(json.dumps(config | flags))
    steps = range(1, STEPS + 1)
    rows = [{"step": step, "reward": 0.001 * step**2 + 0.1 * seed, "loss": 0.0} for step in steps]
    rows[4]["reward"] = None  # no reward function applied
    rows.insert(0, {"step": 0, "eval": {"sampled_accuracy": 0.3}})
    (out / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    summary = {
        "before": {"greedy_accuracy": 0.1, "sampled_accuracy": 0.3},
        "after": {"greedy_accuracy": 0.9, "sampled_accuracy": 0.5 + 0.1 * seed},
        "best": {"step": 9, "sampled_accuracy": 0.99, "weights": None},
        "steps": STEPS,
    }
    (out / "summary.json").write_text(json.dumps(summary))
    return out


def groups(*folders: Path) -> compare.Groups:
    return compare.groups_of([compare.read_run(folder) for folder in folders])


def test_runs_that_differ_in_the_seed_and_in_where_they_ran_are_one_group(tmp_path):
    runs = [fake_run(tmp_path, "arca", seed, save_steps=seed, trains="?") for seed in (1, 2)]
    quarter = {"gradient_accumulation_steps": 1, "steps_per_generation": 1}
    runs += [fake_run(tmp_path, "arca", 3, processes=4, trains="?", **quarter)]
    found = groups(*runs)
    assert list(found) == ["1  arca-1 and 2 more"]
    (members,) = found.values()
    assert [run.after for run in members] == pytest.approx([0.6, 0.7, 0.8])
    assert members[1].rewards[2] == pytest.approx(0.204)
    assert np.isnan(members[1].rewards[5])


def test_a_label_is_the_folder_and_what_differs_from_others_that_have_the_flag(tmp_path):
    found = groups(
        fake_run(tmp_path, "arca", 1, sharpening=1, power=3, rate=0.1),
        fake_run(tmp_path, "arca", 2, sharpening=2, power=3, rate=0.1),
        fake_run(tmp_path, "oar", 1, rate=0.1),
    )
    assert list(found) == [
        "1  arca-1: credit arca, script arca, sharpening 1",
        "2  arca-2: credit arca, script arca, sharpening 2",
        "3  oar-1: credit oar, script oar",
    ]


def test_the_table_has_means_and_deviations_and_warns_of_other_code(tmp_path):
    runs = [fake_run(tmp_path, "arca", 1), fake_run(tmp_path, "arca", 2, commit="b2")]
    head, line, warning = compare.table(groups(*runs)).splitlines()
    assert head.split() == ["runs", "before", "after", "figure", "group"]
    assert line.split()[:6] == ["2", "0.300", "(0.000)", "0.650", "(0.071)", "sampled_accuracy"]
    assert warning == "Warning: the code of group 1  arca-1 and 1 more differs: a1 c1, b2 c2"


def test_each_group_has_its_line_and_dots(tmp_path):
    runs = [fake_run(tmp_path, "arca", seed, text="$\\boxed{$" * 40) for seed in (1, 2, 3)]
    compare.draw(groups(*runs, fake_run(tmp_path, "oar", 1, text="")), tmp_path / "c.png")
    figure = compare.plt.gcf()
    left, right = figure.axes
    texts = [text.get_text() for text in figure.legends[0].get_texts()]
    assert [text[:8] for text in texts] == ["1  arca-", "2  oar-1"]
    steps, rewards = left.lines[0].get_data()
    assert rewards[8:-1] == pytest.approx(
        0.001 * (steps[8:-1] ** 2 + 2 / 3) + 0.2
    )  # means of three
    assert list(right.lines[0].get_xdata()) == pytest.approx([0.6, 0.7, 0.8])


def test_the_command_leaves_out_what_is_not_a_finished_run(run_tool, tmp_path, monkeypatch):
    run = fake_run(tmp_path, "arca", 1)
    goes_on = fake_run(tmp_path, "arca", 2, max_steps=600)
    monkeypatch.chdir(tmp_path)
    out, err = run_tool(compare, run, tmp_path, goes_on)
    assert out.endswith("1  arca-1\ncompare.png\n")
    assert err == "".join(
        f"{folder} is left out: no run has ended there\n" for folder in (tmp_path, goes_on)
    )
