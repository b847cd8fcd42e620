"""results/studies.py and make_policies.py: commands, data of finished runs, demonstrations."""

import json
import random
from argparse import Namespace

import make_policies
import pytest
import studies

import grpo_arca
from common.task import chain_problems, has_right_steps

RUN = studies.Run("wrong_policy", "right answers only", 4, "0.001", 3)


def test_a_command_trains_the_study_with_the_flags_of_the_method():
    _, script, *argv = RUN.command()
    assert script.endswith("grpo_arca.py")
    args = grpo_arca.parse_args(argv)
    assert (args.negative_weight, args.seed, args.learning_rate) == (0, 3, 0.001)
    sizes = (args.max_steps, args.per_device_train_batch_size, args.steps_per_generation)
    assert sizes == (200, 4, 4)


def test_cores_are_counted_where_no_affinity_is_known(monkeypatch):
    monkeypatch.delattr(studies.os, "sched_getaffinity")
    monkeypatch.setattr(studies.os, "cpu_count", lambda: 8)
    assert studies.cores() == 8


def test_every_planned_run_has_a_folder_of_its_own():
    runs = studies.chosen_runs(Namespace(studies=[], methods=None))
    assert len({run.folder for run in runs}) == len(runs) == len(set(runs)) > 300


def finish(folder, rewards):
    """Leaves what a run of two updates does, evaluated before and after them, and at a resume."""
    folder.mkdir(parents=True)
    environment = {"commit": "abc", "hardware": {"cpu": "Xeon", "gpus": []}}
    (folder / "run.json").write_text(json.dumps(RUN._asdict()))
    (folder / "config.json").write_text(json.dumps({"environment": environment}))
    (folder / "summary.json").write_text("{}")
    rows = [{"step": i, "reward": x, "clipped_gradient": i} for i, x in enumerate(rewards)]
    accuracy = {"sampled_accuracy": 0.25, "greedy_accuracy": 0.5, "pass@4": 1.0}
    rows.insert(1, {"step": 30, "eval": accuracy | {"sampled_accuracy": 0.9}})
    rows = [{"step": 0, "eval": accuracy}, *rows, {"step": 200, "eval": accuracy}]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_collected_runs_replace_the_lines_that_the_data_had_of_them(tmp_path, monkeypatch):
    monkeypatch.setattr(studies, "DATA", tmp_path / "data")
    old = {"method": RUN.method, "updates": 4, "rate": "0.001", "rollout": 50, "extra": "1"}
    lines = [old | {"seed": seed, "sampled": 0.1} for seed in (3, 4)]
    studies.write_csv(lines, tmp_path / "data/wrong_policy.csv")
    finish(tmp_path / "wrong_policy/run", rewards=[0.5, 1.0])
    (tmp_path / "wrong_policy/unfinished").mkdir()
    studies.collect(tmp_path)
    kept, before, after = studies.read_csv(tmp_path / "data/wrong_policy.csv")
    assert (kept["seed"], kept["sampled"], kept["extra"]) == ("4", "0.1", "1")
    assert (before["rollout"], before["reward"]) == ("0", "")
    assert (after["rollout"], after["sampled"], after["pass_at_4"]) == ("50", "0.25", "1")
    assert (after["reward"], after["clipped"], after["commit"]) == ("0.75", "0.5", "abc")


# ---- Policies ------------------------------------------------------------------------------------
def test_policies_train_on_no_held_out_chain():
    rng = random.Random(0)
    trained = {make_policies.training_chain(rng, 1).prompt for _ in range(3000)}
    for held_out in (True, False):
        ours = {problem.prompt for problem in chain_problems(100, held_out, length=1)}
        assert (not trained & ours) == held_out


@pytest.mark.parametrize("name", make_policies.RECIPES)
def test_demonstrations_state_every_step_and_slip_where_they_shall(name):
    rng = random.Random(0)
    recipe = make_policies.RECIPES[name]
    slips = 0
    for _ in range(200):
        chain = make_policies.training_chain(rng, 8 if recipe.is_long else 0)
        assert has_right_steps(make_policies.demonstrate(rng, chain, recipe, False), chain)
        slips += not has_right_steps(make_policies.demonstrate(rng, chain, recipe, True), chain)
    assert 60 < slips < 190
