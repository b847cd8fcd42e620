"""results/learning_curves.py: its statistics by hand, and the study in small."""

import csv
import importlib
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import learning_curves as study
import numpy as np
import pytest
from support import ROOT

DATA = ROOT / "results/data/learning_curves"


@pytest.fixture
def small(monkeypatch, tmp_path):
    """Two methods and the oracle, two learning rates, two rollouts."""
    methods = {name: study.METHODS[name] for name in (study.UNIFORM, study.ORACLE, "oar_g")}
    methods = {name: x._replace(seeds=(1, 2)) for name, x in methods.items()}
    monkeypatch.setattr(study, "METHODS", methods)
    monkeypatch.setattr(study, "CONTROL", (study.UNIFORM, study.ORACLE))
    monkeypatch.setattr(study, "HELD_OUT", 4)
    monkeypatch.setattr(study, "RATES", dict.fromkeys(study.REGIMES, ("0.002", "0.004")))
    monkeypatch.setattr(study, "ROLLOUTS", 2)
    monkeypatch.setattr(study, "SWEEP_ROLLOUTS", 2)
    monkeypatch.setattr(study, "EVERY", 1)
    monkeypatch.setattr(study, "FOLDER", tmp_path)


def write_run(run: study.Run, rewards: list[float], curve: list[float]) -> None:
    run.folder.mkdir(parents=True)
    row = {"rollout_tokens": 100, "seconds_rollout": 1, "grad_norm": 2.0}
    rows = [row | {"reward": reward} for reward in rewards]
    rows += [{"eval": {"sampled_accuracy": value}} for value in curve]
    (run.folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (run.folder / "summary.json").write_text('{"seconds": 36}')


def test_the_share_of_rollouts_by_hand():
    curve = np.array([0.2, 0.4, 0.6, 0.8, 1.0])
    assert study.share_needed(curve, np.array([0.6])) == pytest.approx(0.5)
    assert study.share_needed(curve, np.array([0.7])) == pytest.approx(0.625)
    assert study.share_needed(curve, np.array([1.1])) == float("inf")
    assert study.share_needed(curve, np.array([0.1])) == 0


@pytest.mark.parametrize("size", [3, 8, 20])
def test_an_interval_holds_the_mean_as_often_as_it_says(size):
    draws = np.random.default_rng(size).normal(size=(4000, size))
    ends = [study.interval(values) for values in draws]
    assert 0.935 < np.mean([low < 0 < high for low, high in ends]) < 0.965
    assert study.interval(np.array([0.3])) == (-np.inf, np.inf)


@pytest.mark.parametrize(
    "name", [path.stem.removesuffix("_runs") for path in sorted(DATA.glob("*_runs.csv"))]
)
def test_a_published_table_is_the_one_of_its_published_curves(name):
    """Areas and ends again, by hand, of the curves in the file beside the table."""
    found = {}
    for row in csv.DictReader((DATA / f"{name}_runs.csv").open()):
        curve = np.array(row["accuracies"].split(), dtype=float)
        found.setdefault((row["regime"], row["method"]), {})[row["seed"]] = curve
    for row in csv.DictReader((DATA / f"{name}.csv").open()):
        own, uniform = found[row["regime"], row["method"]], found[row["regime"], study.UNIFORM]
        seeds = sorted(own.keys() & uniform.keys())
        assert len(seeds) == int(row["seeds"]) > 0
        more = np.array([own[seed] - uniform[seed] for seed in seeds])  # [seeds, points]
        for key, of in (("area", np.trapezoid(more) / (more.shape[1] - 1)), ("end", more[:, -1])):
            written = [float(row[f"{key}_{end}"]) for end in ("more", "low", "high")]
            assert written == pytest.approx([of.mean(), *study.interval(of)], rel=1e-3, abs=1e-6)


def test_the_study_of_the_language_model_has_its_own_task_and_flags(monkeypatch, tmp_path, capsys):
    for name in ("METHODS", "CONTROL", "REGIMES", "FOLDER", "RATES", "ROLLOUTS"):
        monkeypatch.setattr(study, name, getattr(study, name))  # so that they come back
    names = ("EVERY", "COMPLETIONS", "HELD_OUT", "SHOWN", "TASK", "MORE_FLAGS")
    for name in (*names, "SWEEP_ROLLOUTS", "SWEEP_SEEDS", "STORED"):
        monkeypatch.setattr(study, name, type(getattr(study, name))(getattr(study, name)))
    words = ["--smollm2", str(tmp_path), "--list", "--stage", "sweep", "--", "--dtype", "bfloat16"]
    monkeypatch.setattr(sys, "argv", ["learning_curves.py", *words])
    study.main()
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 8 * 3 and "SmolLM2-arca-2e-4-101" in lines[3]  # oar_p takes oar_g's
    command = study.Run("SmolLM2", "right alone", "4e-4", 101, False).command()
    assert "--max_steps=10" in command
    command = study.Run("SmolLM2", "right alone", "4e-4", 1, True).command()
    assert f"--dataset_name={tmp_path}/sums.jsonl" in command and command[-1] == "bfloat16"
    args = importlib.import_module("grpo_arca").parse_args(command[2:])
    assert (args.negative_weight, args.max_steps, args.per_device_train_batch_size) == (0, 20, 32)

    # The published runs need not be run again, and give the published table again.
    monkeypatch.setattr(sys, "argv", ["learning_curves.py", "--go_on", *words])
    study.main()
    table = list(csv.DictReader((DATA / "smollm2.csv").open()))
    assert study.plan("sweep", ["SmolLM2"], [row["method"] for row in table]) == []
    rows = {row["method"]: row for row in study.tabulate(["SmolLM2"])[0]}
    assert len(rows) == len(table) >= 5
    for row in table:
        for key, shown in row.items():
            value = rows[row["method"]][key]
            assert shown == (f"{value:.4g}" if isinstance(value, float) else str(value)), key


def test_the_sweep_chooses_by_training_reward_and_the_table_is_paired(small):
    for regime in study.REGIMES:
        for name in study.METHODS:
            assert study.curves(regime, name) == []  # before the sweep nothing is known
    for run in study.plan("sweep", ["one update"], list(study.METHODS)):
        write_run(run, [0.5, 0.7 if run.rate == "0.004" else 0.6], [0.9, 0.9])
    better = {study.UNIFORM: 0.0, study.ORACLE: 0.2, "oar_g": -0.1}
    for run in study.plan("curves", ["one update"], list(study.METHODS)):
        assert run.rate == "0.004"
        start = 0.3 + 0.1 * run.seed  # seeds differ more than methods do
        write_run(run, [0.5], [0.2, start + better[run.method]])
    rows = {row["method"]: row for row in study.tabulate(["one update"])[0]}
    for name, more in better.items():
        row = rows[name]
        assert row["seeds"] == 2 and row["end_more"] == pytest.approx(more)
        assert row["area_more"] == pytest.approx(more / 2)  # of one trapezium
        assert row["end_low"] == pytest.approx(more) == pytest.approx(row["end_high"])
    assert rows[study.UNIFORM]["grad_norm"] == 2 and rows[study.UNIFORM]["clipped"] == 1
    assert rows[study.UNIFORM]["share_of_rollouts"] == 1
    assert rows[study.ORACLE]["share_of_rollouts"] == pytest.approx(0.25 / 0.45)
    low, high = rows[study.ORACLE]["share_low"], rows[study.ORACLE]["share_high"]
    assert (low, high) == pytest.approx((0.2 / 0.4, 0.3 / 0.5))  # of either seed alone
    assert rows["oar_g"]["share_of_rollouts"] == float("inf")


def test_a_method_may_take_the_learning_rate_of_another():
    for regime in ("one update", "four updates"):
        borrowed = study.sweep(regime, "s_trace at GRPO's rate")
        assert borrowed == study.sweep(regime, study.UNIFORM) != study.sweep(regime, "s_trace")


def test_the_falling_rates_run_by_default_and_the_constant_one_if_asked_for(
    small, monkeypatch, capsys
):
    for flags, regimes in (([], {"one", "four"}), (["--regimes", study.CONSTANT], {"constant"})):
        monkeypatch.setattr(sys, "argv", ["learning_curves.py", "--list", *flags])
        study.main()
        lines = filter(str.strip, capsys.readouterr().out.split("\n"))
        kinds = {"constant" if "constant" in line else line.split("_")[0].strip() for line in lines}
        assert kinds == regimes


@pytest.mark.slow
def test_the_study_end_to_end(small, monkeypatch, tmp_path, capfd):
    monkeypatch.setattr(study, "RATES", {"one update": ("0.004",)})
    monkeypatch.setattr(study, "SWEEP_SEEDS", (101,))
    methods = {name: study.METHODS[name]._replace(seeds=(1,)) for name in study.CONTROL}
    monkeypatch.setattr(study, "METHODS", methods)
    monkeypatch.setattr(study, "TASK", [])  # chains of 3 or 4, whose completions are shorter
    command = ["learning_curves.py", "--regimes", "one update", "--output", str(tmp_path / "c")]
    monkeypatch.setattr(sys, "argv", command)
    study.main()
    rows = list(csv.DictReader((tmp_path / "c.csv").open()))
    assert [row["method"] for row in rows] == [study.UNIFORM, study.ORACLE]
    assert {row["seeds"] for row in rows} == {"1"} and float(rows[0]["end_more"]) == 0
    assert float(rows[0]["tokens_passed"]) == 4 * float(rows[0]["tokens_sampled"]) > 2000
    assert len((tmp_path / "c_runs.csv").read_text().splitlines()) == 3
    assert (tmp_path / "c.png").stat().st_size > 20_000
    capfd.readouterr()
    study.main()  # everything is there
    assert "2 runs, 2 done" in capfd.readouterr().out
    monkeypatch.setattr(sys, "argv", [*command, "--seeds", "9", "--list"])
    study.main()
    assert "uniform__GRPO_-0.004-9-curve" in capfd.readouterr().out


# ---- The default command -------------------------------------------------------------------------
@pytest.fixture
def project(tmp_path, monkeypatch) -> Path:
    """A root with an empty results/data/, where a run notes its command line and is made up."""
    (tmp_path / "results/data/default_runs").mkdir(parents=True)
    (tmp_path / "runs").mkdir()

    def run(command: list[str], **_: object) -> SimpleNamespace:
        folder = Path(command[-1])
        folder.mkdir()
        phases = ["seconds_rollout", "seconds_score", "seconds_credit", "seconds_update"]
        row = dict.fromkeys([*phases, "weight_gini", "weight_effn"], 0.5)
        rows = [{"step": 0, "eval": {"sampled_accuracy": 0.3}}]
        rows += [row | {"step": step, "reward": 0.01 * step} for step in range(1, 21)]
        (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)))
        accuracy = 0.5 + 0.1 * int(command[-3])  # by the seed
        figures = {"sampled_accuracy": accuracy, "greedy_accuracy": 0.5}
        (folder / "summary.json").write_text(json.dumps({"before": figures, "after": figures}))
        with (tmp_path / "commands.txt").open("a") as file:
            file.write(" ".join(command[3:]) + "\n")
        return SimpleNamespace(returncode=int("--fails" in command))

    monkeypatch.setattr(study, "ROOT", tmp_path)
    monkeypatch.setattr(study, "DATA", tmp_path / "results/data")
    monkeypatch.setattr(study, "MORE_FLAGS", [])
    monkeypatch.setattr(study.subprocess, "run", run)
    return tmp_path


def do(monkeypatch, line: str) -> None:
    monkeypatch.setattr(sys, "argv", ["learning_curves.py", *line.split()])
    study.main()


def test_default_runs_print_and_write_only_when_told_to(project, monkeypatch, capsys):
    flags = "--credit b --seed 9 --lora_target_modules q v"
    do(monkeypatch, f"--default_run grpo_x.py --seeds 1 2 3 -- {flags}")
    out = capsys.readouterr().out
    assert "seed 3: sampled 0.800" in out and "after: 0.700 +- 0.100" in out
    name = "grpo_x-b-seed-9-lora_target_modules-q-v"
    assert (project / "commands.txt").read_text().splitlines() == [
        f"grpo_x.py {flags} --seed {s} --output_dir {project}/runs/{name}-{s}" for s in (1, 2, 3)
    ]
    assert list((project / "results/data/default_runs").iterdir()) == []

    do(monkeypatch, f"--default_run grpo_x.py --seeds 1 2 3 4 -- {flags}")  # goes on with one more
    assert "seed 3: sampled 0.800" in capsys.readouterr().out
    assert len((project / "commands.txt").read_text().splitlines()) == 4
    with pytest.raises(SystemExit, match="the run of seed 1 failed, see above"):
        do(monkeypatch, "--default_run grpo_x.py --seeds 1 -- --fails")


def test_what_is_written_of_default_runs_is_what_compare_draws(project, monkeypatch):
    do(monkeypatch, "--default_run grpo_arca.py --write --seeds 2 -- --credit uniform")
    folder = project / "results/data/default_runs"
    assert [path.name for path in folder.iterdir()] == ["grpo_arca-uniform.json"]
    compare = importlib.import_module("compare")
    monkeypatch.setattr(compare, "FOLDER", folder)
    (run,) = compare.measured()["uniform (GRPO)"]
    assert run.accuracy == pytest.approx(0.7) and len(run.rewards) == 20
    assert study.name_of("grpo_arca.py", []) == "grpo_arca-default"
