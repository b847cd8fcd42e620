"""tools/compare.py: which runs are one group, what is compared, and what is drawn."""

import json
from pathlib import Path

import compare
import pytest

STEPS = 20
METRIC = "sampled_accuracy"
T_1 = 12.7062  # 97.5th percentile of Student's t with one degree of freedom, from a table


def fake_run(
    folder: Path,
    name: str,
    seed: int,
    commit: str = "a1",
    processes: int = 1,
    end: float | None = None,
    **flags: object,
) -> Path:
    """Writes what a run leaves that begins at an accuracy of 0.3 and has 0.4 after half its steps.

    The first seed's was resumed, which adds an evaluation.
    """
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
    end = 0.5 + 0.1 * seed if end is None else end
    curve = {0: 0.3, 10: 0.4, 20: end} if seed > 1 else {0: 0.3, 10: 0.4, 15: 99.0, 20: end}
    rows = [{"step": step, "eval": {METRIC: height}} for step, height in curve.items()]
    rows.insert(1, {"step": 1, "reward": 0.5, "loss": 0.0})
    (out / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    summary = {
        "before": {"greedy_accuracy": 0.1, METRIC: 0.3},
        "after": {"greedy_accuracy": 0.9, METRIC: end, "truncated_share": 0.0}
        | ({"pass@8": 0.9} if name == "oar" else {}),  # which others have not measured
        "best": {"step": 9, METRIC: 0.99, "weights": None},
        "steps": STEPS,
    }
    (out / "summary.json").write_text(json.dumps(summary))
    return out


def groups(*folders: Path) -> compare.Groups:
    return compare.groups_of([compare.read_run(folder) for folder in folders])


def test_runs_that_differ_in_the_seed_and_in_where_they_ran_are_one_group(tmp_path):
    """Their ends are 0.6, 0.7 and 0.2."""
    runs = [fake_run(tmp_path, "arca", seed, save_steps=seed, trains="?") for seed in (1, 2)]
    quarter = {"gradient_accumulation_steps": 1, "steps_per_generation": 1}
    runs += [fake_run(tmp_path, "arca", 3, "b2", 4, end=0.2, trains="?", **quarter)]
    (row,) = compare.ends_of(groups(*runs)).itertuples(index=False)
    assert (row.group, row.figure, row.runs, row.failed, row.codes) == (
        "1  arca-1",
        METRIC,
        3,
        1,
        3,
    )
    assert (row.before, row.after, row.deviation) == pytest.approx((0.3, 0.5, 0.07**0.5))


def test_a_label_is_the_folder_and_what_differs_from_others_that_have_the_flag(tmp_path):
    found = groups(
        fake_run(tmp_path, "arca", 1, sharpening=1, power=3, rate=0.1, start=None),
        fake_run(tmp_path, "arca", 2, sharpening=2, power=3, rate=0.1, start=None),
        fake_run(tmp_path, "oar", 1, rate=0.1, start=2),
    )
    assert list(found) == [
        "1  arca-1: credit arca, script arca, sharpening 1, start None",
        "2  arca-2: credit arca, script arca, sharpening 2, start None",
        "3  oar-1: credit oar, script oar, start 2",
    ]


def test_differences_are_those_on_shared_seeds_at_the_end_and_in_the_area(tmp_path):
    """The second method ends 0.1 and 0.3 above: 0.2 on average, with a standard error of 0.1.

    That counts for half of the last of the two intervals of a curve, and so for a quarter of all.
    """
    runs = [fake_run(tmp_path, "arca", seed) for seed in (1, 2, 3)]
    runs += [fake_run(tmp_path, "oar", seed, end=0.5 + 0.3 * (seed - 1)) for seed in (2, 3, 4)]
    end, greedy, area = compare.differences(groups(*runs)).to_dict("records")
    assert (end["group"], end["over"], end["figure"], end["failed"]) == ("2", "1", METRIC, "")
    assert (greedy["figure"], area["figure"]) == ("greedy_accuracy", f"area of {METRIC}")
    for row, share in ((end, 1), (greedy, 0), (area, 0.25)):
        expected = [share * more for more in (0.2, 0.2 - T_1 * 0.1, 0.2 + T_1 * 0.1)]
        assert [row["more"], row["low"], row["high"]] == pytest.approx(expected, rel=1e-4)
    assert end["p_flips"] == 2 / 2**2


def test_from_eight_seeds_on_signs_are_flipped_and_a_failed_run_leaves_its_name(tmp_path):
    runs = [
        fake_run(tmp_path / "failed, and repeated", "arca", 8, end=0.0),
        *(fake_run(tmp_path, "arca", seed) for seed in range(1, 9)),
    ]
    runs += [fake_run(tmp_path, "oar", seed, end=0.8 + 0.1 * seed) for seed in range(1, 9)]
    runs += [fake_run(tmp_path, "p", seed, end=0.1 * seed) for seed in range(1, 9)]
    table = compare.differences(groups(*runs)).query("figure == @METRIC")
    assert table["p_flips"].tolist()[0] == 2 / 2**8  # all signs as they are, and all flipped
    assert table["failed"].tolist() == ["", "p-1, p-2", "p-1, p-2"]
    assert table[1:][compare.NUMBERS].isna().all(axis=None)


def test_each_group_has_its_lines_and_each_pair_its_dots(tmp_path):
    runs = [fake_run(tmp_path, "arca", seed, text="$\\boxed{$" * 40) for seed in (1, 2, 3)]
    runs += [fake_run(tmp_path, "oar", seed, end=0.9, text="") for seed in (1, 2)]
    found = groups(*runs)
    compare.draw(found, compare.differences(found), tmp_path / "c.png")
    figure = compare.plt.gcf()
    left, right = figure.axes
    texts = [text.get_text() for text in figure.legends[0].get_texts()]
    assert [text[:8] for text in texts] == ["1  arca-", "2  oar-1"]
    assert left.lines[3].get_ydata() == pytest.approx([0.3, 0.4, 0.7])  # the mean of three
    assert right.lines[1].get_xdata() == pytest.approx([0.3, 0.2])  # after the line at 0


def test_the_command_leaves_out_what_is_not_a_finished_run(run_tool, tmp_path, monkeypatch):
    others = (tmp_path, fake_run(tmp_path, "arca", 2, max_steps=600))
    monkeypatch.chdir(tmp_path)
    out, err = run_tool(compare, fake_run(tmp_path, "arca", 1), *others)
    assert out.split()[-1] == "compare.png"
    assert err == "".join(f"{folder} is left out: no run has ended there\n" for folder in others)
