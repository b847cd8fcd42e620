"""tools/compare.py: which runs are one group, what the groups are called, and what is drawn."""

import itertools
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import compare
import numpy as np
import pytest
from support import ROOT

PNG = b"\x89PNG\r\n\x1a\n"
STEPS = 20  # of a whole run
Runs = list[Path]


def fake_run(
    folder: Path, script: str, credit: str, seed: int, steps: int = STEPS, **flags: object
) -> Path:
    """Writes what a run leaves after `steps` steps: reward 0.01 a step, and more by the seed."""
    suffix = "".join(f"-{value}" for value in flags.values())
    out = folder / f"{script}-{credit}-{seed}{suffix}"
    out.mkdir(parents=True)
    config: dict = {"credit": credit, "seed": seed, "output_dir": str(out), "run_name": out.name}
    config |= {"max_steps": STEPS, "learning_rate": 0.004} | flags
    config["environment"] = {"command": [f"/x/{script}.py", str(seed)], "commit": "a1"}
    rows: list[dict] = [{"step": 0, "eval": {"sampled_accuracy": 0.3}}]
    steps_done = range(1, steps + 1)
    rows += [{"step": step, "reward": 0.01 * step + 0.1 * seed} for step in steps_done]
    if steps == STEPS:
        rows.append({"step": STEPS, "eval": {"sampled_accuracy": 0.5 + 0.1 * seed}})
    (out / "config.json").write_text(json.dumps(config))
    (out / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return out


def change_config(run: Path, **changes: object) -> None:
    path = run / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def draw(folder: Path, *arguments: object) -> subprocess.CompletedProcess:
    """Runs the tool as a user does, in `folder`."""
    command = [sys.executable, ROOT / "tools/compare.py", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True)


def test_a_step_without_a_reward_keeps_its_place() -> None:
    """No reward function applied there, so metrics.jsonl has null."""
    rewards = [None if step % 4 == 0 else float(step) for step in range(41)]
    assert compare.smooth(rewards[:19])[1:4].tolist() == [1, 2, 3]
    assert np.isnan(compare.smooth([None, None, 1.0])[:2]).all()
    found = compare.smooth(rewards)
    assert len(found) == 37 and found[0] == (1 + 2 + 3) / 3 and found[1] == (1 + 2 + 3 + 5) / 4


def test_a_runs_rewards_have_a_place_for_every_step(tmp_path) -> None:
    run = fake_run(tmp_path, "grpo_arca", "arca", 1)
    path = run / "metrics.jsonl"
    path.write_text(re.sub('(?<="step": 2, "reward": )[0-9.]+', "null", path.read_text()))
    _, found = compare.read_run(run)
    assert found.rewards[1] is None and found.rewards[2] == pytest.approx(0.13)


# ---- Groups --------------------------------------------------------------------------------------
def test_runs_that_differ_only_in_the_seed_are_one_group(tmp_path) -> None:
    runs = []
    for credit in ("arca", "uniform"):
        runs += [fake_run(tmp_path, "grpo_arca", credit, seed) for seed in (1, 2, 3)]
    groups = compare.groups_of(runs)
    arca = "grpo_arca-arca-1 and 2 more: credit arca"
    assert list(groups) == [arca, "grpo_arca-uniform-1 and 2 more: credit uniform"]
    for members in groups.values():
        assert [run.accuracy for run in members] == pytest.approx([0.6, 0.7, 0.8])
        assert [len(run.rewards) for run in members] == [STEPS] * 3
    assert groups[arca][1].rewards[:2] == pytest.approx([0.21, 0.22])


def test_runs_of_other_code_are_one_group_with_a_warning(tmp_path, capsys) -> None:
    """Every folder counts once, under whichever name."""
    one = fake_run(tmp_path / "one", "grpo_arca", "arca", 1)
    other = fake_run(tmp_path / "other", "grpo_arca", "arca", 2)
    same = [one, tmp_path / "other/../one/grpo_arca-arca-1"]
    assert [len(runs) for runs in compare.groups_of(same).values()] == [1]
    assert capsys.readouterr().err == ""
    change_config(other, environment={"command": ["/x/grpo_arca.py"], "commit": "b2"})
    assert [len(runs) for runs in compare.groups_of([one, other]).values()] == [2]
    said = capsys.readouterr().err
    assert "drawn as one method, but their code differs: /x/grpo_arca.py of commit a1, " in said


def test_a_label_is_the_folder_and_what_differs_and_nothing_else(tmp_path) -> None:
    runs = [
        fake_run(tmp_path, "grpo_arca", "arca", 1, sharpening=1.0),
        fake_run(tmp_path, "grpo_arca", "arca", 1, sharpening=2.0),
        fake_run(tmp_path, "grpo_oar", "oar_g", 1),
        fake_run(tmp_path, "grpo_oar", "uniform", 1, learning_rate=0.001),
    ]
    assert list(compare.groups_of(runs)) == [
        "grpo_arca-arca-1-1.0: credit arca, learning_rate 0.004, script grpo_arca, sharpening 1.0",
        "grpo_arca-arca-1-2.0: credit arca, learning_rate 0.004, script grpo_arca, sharpening 2.0",
        "grpo_oar-oar_g-1: credit oar_g, learning_rate 0.004, script grpo_oar",
        "grpo_oar-uniform-1-0.001: credit uniform, learning_rate 0.001, script grpo_oar",
    ]
    assert list(compare.groups_of(runs[2:3])) == ["grpo_oar-oar_g-1"]
    assert list(compare.groups_of(runs[:2])) == [
        "grpo_arca-arca-1-1.0: sharpening 1.0",
        "grpo_arca-arca-1-2.0: sharpening 2.0",
    ]
    change_config(runs[0], reward_funcs=["accuracy_reward", "my.short"])
    change_config(runs[1], reward_funcs=["accuracy_reward"])
    assert list(compare.groups_of(runs[:2])) == [
        "grpo_arca-arca-1-1.0: reward_funcs accuracy_reward my.short, sharpening 1.0",
        "grpo_arca-arca-1-2.0: reward_funcs accuracy_reward, sharpening 2.0",
    ]


def test_folders_of_one_name_are_told_apart_by_their_paths(tmp_path, monkeypatch) -> None:
    runs = [fake_run(tmp_path / place, "x", "a", 1, 20, rate=0.1) for place in ("b", "c")]
    change_config(runs[1], rate=0.2)
    name = runs[0].name
    assert list(compare.groups_of(runs)) == [f"{runs[0]}: rate 0.1", f"{runs[1]}: rate 0.2"]
    monkeypatch.chdir(runs[0])
    assert list(compare.groups_of([Path(".")])) == [name]


def test_a_flag_that_another_script_lacks_is_no_difference(tmp_path) -> None:
    arca = fake_run(tmp_path, "grpo_arca", "arca", 1, sharpening=1.0)
    oar = fake_run(tmp_path, "grpo_oar", "oar_g", 1)
    assert list(compare.groups_of([arca, oar])) == [
        "grpo_arca-arca-1-1.0: credit arca, script grpo_arca",
        "grpo_oar-oar_g-1: credit oar_g, script grpo_oar",
    ]


def test_a_run_of_an_older_version_is_a_group_of_its_own(tmp_path) -> None:
    """Its config lacks a flag that this version of the script has."""
    run = fake_run(tmp_path, "grpo_arca", "arca", 1, sharpening=1.0)
    older = tmp_path / "grpo_arca-older"
    shutil.copytree(run, older)
    config = json.loads((older / "config.json").read_text())
    del config["environment"], config["sharpening"]
    (older / "config.json").write_text(json.dumps(config))
    assert list(compare.groups_of([run, older])) == [run.name, older.name]


def batch_run(
    folder: Path, seed: int, sizes: tuple[int, int, int], processes: int = 1, **flags: object
) -> Path:
    """Writes a run with these sizes: of a micro-batch, of an update and of a rollout."""
    names = ("per_device_train_batch_size", "gradient_accumulation_steps", "steps_per_generation")
    flags = dict(zip(names, sizes, strict=True)) | flags
    run = fake_run(folder / str(seed), "x", "a", seed, **flags)
    command = ["/x/x.py", str(seed)]
    change_config(run, environment={"command": command, "hardware": {"processes": processes}})
    return run


def test_where_a_run_writes_and_on_what_it_runs_is_no_difference(tmp_path) -> None:
    """Two processes of half the batch make the same updates."""
    runs = [
        batch_run(tmp_path, 1, (32, 4, 4)),
        batch_run(tmp_path, 2, (16, 4, 4), processes=2),
        batch_run(tmp_path, 3, (16, 8, 8), save_steps=7),
        batch_run(tmp_path, 4, (32, 4, 4), report_to="?"),
        batch_run(tmp_path, 5, (32, 4, 4), run_name="?"),
        batch_run(tmp_path, 6, (32, 4, 4), gradient_checkpointing="?"),
        batch_run(tmp_path, 7, (32, 4, 4), num_processes="?"),
        batch_run(tmp_path, 8, (32, 4, 4), per_device_eval_batch_size="?"),
        batch_run(tmp_path, 9, (32, 4, 4), per_device_rollout_batch_size="?"),
    ]
    assert [len(members) for members in compare.groups_of(runs).values()] == [len(runs)]
    others = [batch_run(tmp_path, 98, (32, 4, 8)), batch_run(tmp_path, 99, (16, 4, 4))]
    assert list(compare.groups_of([*runs, *others])) == [
        f"{runs[0].name} and 8 more: completions_per_update 128, updates_per_rollout 1.0",
        f"{others[0].name}: completions_per_update 128, updates_per_rollout 2.0",
        f"{others[1].name}: completions_per_update 64, updates_per_rollout 1.0",
    ]


# ---- The picture ---------------------------------------------------------------------------------
@pytest.fixture
def drawn(tmp_path, monkeypatch):
    """Returns a function that draws runs, and returns the figure and its two panels."""
    made = []
    subplots = compare.plt.subplots

    def recorded_subplots(*arguments, **keywords):
        made.append(subplots(*arguments, **keywords))
        return made[-1]

    monkeypatch.setattr(compare.plt, "subplots", recorded_subplots)

    def draw_runs(runs: Runs) -> tuple:
        compare.draw(compare.groups_of(runs), str(tmp_path / "c.png"))
        figure, panels = made[-1]
        return figure, *panels

    return draw_runs


def test_each_group_has_its_line_band_and_dots(tmp_path, drawn) -> None:
    runs = []
    for credit in ("a", "b"):
        runs += [fake_run(tmp_path, "x", credit, seed) for seed in (1, 2, 3)]
    figure, left, right = drawn(runs)
    assert [text.get_text() for text in figure.legends[0].get_texts()] == [
        "1  x-a-1 and 2 more: credit a",
        "2  x-b-1 and 2 more: credit b",
    ]
    steps, rewards = left.lines[0].get_data()
    assert list(steps) == list(range(2, 20))  # a window of 3 steps
    assert rewards == pytest.approx(0.01 * steps + 0.2)
    band = left.collections[0].get_paths()[0].vertices[:, 1]
    assert (band.min(), band.max()) == pytest.approx((0.12, 0.49))
    dots = right.lines[0]
    mean = right.lines[1]
    assert list(dots.get_xdata()) == pytest.approx([0.6, 0.7, 0.8])
    assert list(mean.get_xdata()) == pytest.approx([0.7, 0.7])


def test_a_lone_run_is_a_dot_and_the_axes_speak_of_no_others(tmp_path, drawn) -> None:
    _, left, right = drawn([fake_run(tmp_path, "x", credit, 1) for credit in ("a", "b")])
    assert [list(line.get_xdata()) for line in right.lines] == [[0.6], [0.6]]
    assert (left.get_xlabel(), right.get_xlabel()) == ("step", "sampled accuracy")


def test_long_names_stand_below_the_panels_and_within_the_picture(tmp_path, drawn) -> None:
    runs = [fake_run(tmp_path / str(i), "x", "a", 1) for i in range(5)]
    for i, run in enumerate(runs):
        for flag in range(12):
            name = f"a_flag_of_some_length_{flag}"
            change_config(run, **{name: f"org/a-name-of-some-length{i}"})
        change_config(run, p="word " * 300 * i)
    figure, left, right = drawn(runs)
    figure.draw_without_rendering()
    texts = [text.get_window_extent() for text in figure.legends[0].get_texts()]
    panels = [panel.get_tightbbox() for panel in (left, right)]
    for box in (*texts, *panels):
        assert figure.bbox.padded(1).contains(*box.min), box
        assert figure.bbox.padded(1).contains(*box.max), box
    assert min(panel.ymin for panel in panels) >= max(text.ymax for text in texts)
    assert min(panel.height for panel in panels) > 300  # of 440 dots or more

    inside = [text.get_window_extent() for text in right.texts]
    assert len(inside) == 5
    assert all(right.bbox.padded(1).contains(*box.max) for box in inside)
    for boxes in (texts, inside):  # the first is the highest, and none touches the next
        for upper, lower in itertools.pairwise(boxes):
            assert upper.ymin >= lower.ymax


# ---- The command line ----------------------------------------------------------------------------
def test_a_picture_of_any_runs_goes_to_the_current_folder(tmp_path) -> None:
    runs = []
    for credit in ("a", "$^{_{\n$"):
        runs += [fake_run(tmp_path / "runs", "x", credit, seed) for seed in (1, 2, 3)]
    done = draw(tmp_path, *runs)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == (
        "compare.png\n1  x-a-1 and 2 more: credit a\n2  x-$^{_{ $-1 and 2 more: credit $^{_{ $\n"
    )
    assert (tmp_path / "compare.png").read_bytes().startswith(PNG)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["compare.png", "runs"]


def test_what_is_not_a_finished_run_is_left_out_with_a_line_each(tmp_path) -> None:
    good = fake_run(tmp_path, "x", "a", 1)
    unfinished = fake_run(tmp_path, "x", "a", 2, steps=7)
    torn = fake_run(tmp_path, "x", "a", 3)
    (torn / "metrics.jsonl").write_text('{"step": 1, "rew')
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_text('{"max_steps": 3}')
    (other / "metrics.jsonl").write_text('{"step": 3, "eval": {"sampled_accuracy": 1}}\n[]')
    file = tmp_path / "file"
    file.write_text("")
    bad = [unfinished, torn, other, file, tmp_path / "none"]

    done = draw(tmp_path, good, *bad)
    assert done.returncode == 0
    lines = done.stderr.splitlines()
    for path, line in zip(bad, lines, strict=True):
        assert line.startswith(f"compare.py: {path} is left out: ")
    assert "has not come to the end of step 20" in lines[0]
    assert "has no config.json" in lines[4]

    done = draw(tmp_path, *bad)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("compare.py: error: ")


def test_a_picture_that_cannot_be_written_is_one_sentence(tmp_path) -> None:
    run = fake_run(tmp_path, "x", "a", 1)
    for output in ("none/a.png", "a.none"):
        done = draw(tmp_path, run, "--output", output)
        assert done.returncode == 2
        assert done.stderr.count("\n") == 1, done.stderr
        assert done.stderr.startswith(f"compare.py: error: cannot write {output}: ")


def test_without_folders_it_draws_the_measured_runs_and_never_over_the_committed_picture(
    tmp_path,
) -> None:
    data = ROOT / "results/data/default_runs"
    before = (data / "compare.png").read_bytes()
    done = draw(tmp_path, "--output", tmp_path / "here.png")
    assert done.returncode == 0, done.stderr
    assert "1  uniform (GRPO)\n2  arca\n" in done.stdout
    assert (tmp_path / "here.png").read_bytes().startswith(PNG)
    done = draw(data)
    assert done.returncode == 2
    assert "--output" in done.stderr
    assert (data / "compare.png").read_bytes() == before
