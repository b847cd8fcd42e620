"""Resuming goes on with the same task and a sound checkpoint, and with nothing else.

What a resumed run must keep, bit by bit, is in test_resume.py.
"""

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support import TINY, random_batch

import common.data
import grpo_arca as trainer

FLAGS = {"max_steps": 1, "save_steps": 1}
LONG_POLICY = str(Path(TINY).with_name("long_policy"))


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# ---- The task ------------------------------------------------------------------------------------
@pytest.fixture
def few_problems(run_main, monkeypatch):
    """Makes the embedded task small, because the tests below read it anew each time."""
    make = common.data.chain_problems

    def make_few(count: int, **how) -> list[trainer.Problem]:
        return make(min(count, 40), **how)

    monkeypatch.setattr(common.data, "chain_problems", make_few)
    monkeypatch.setattr(trainer, "load_data", common.data.load_data)


def test_another_task_is_refused_and_the_folder_stays_as_it_is(run_main, few_problems, tmp_path):
    """Else `before` would be of one task and `after` of another."""
    assert run_main(**FLAGS)[0] == 0
    out = tmp_path / "out"
    before = contents(out)
    rows = [{"problem": f"What is {i} + {i}?", "answer": str(2 * i)} for i in range(20)]
    (tmp_path / "other.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    task = "its problems, prompts or --max_eval_samples were not those of these flags"
    changes = [
        ({"dataset_name": "other.jsonl"}, task),
        ({"eval_dataset_name": "other.jsonl"}, task),
        ({"dataset_config": "3"}, task),
        ({"system_prompt": "Be brief."}, task),
        ({"seed": 2}, task),
        ({"model_name_or_path": LONG_POLICY}, "it belongs to another model"),
    ]
    for change, words in changes:
        code, out_text, err = run_main(**FLAGS, **change, resume_from_checkpoint="latest")
        errors = [line for line in err.splitlines() if "error: " in line]
        assert code == 2 and not out_text and "Traceback" not in err
        assert len(errors) == 1 and words in errors[0], errors
        assert "cannot resume from out/checkpoint-1" in errors[0]
        if words == task:
            assert "--model_name_or_path out/checkpoint-1, and another --output_dir" in errors[0]
        assert contents(out) == before, change


@pytest.mark.slow
def test_the_same_task_goes_on_for_more_steps(run_main, rows_of, tmp_path):
    assert run_main(**FLAGS)[0] == 0
    first = rows_of()
    more = {"max_steps": 2, "learning_rate": 1e-3, "eval_steps": 1}
    code, _, err = run_main(**(FLAGS | more), resume_from_checkpoint="latest")
    assert code == 0, err
    assert rows_of()[:1] == first and [row["step"] for row in rows_of()] == [1, 2]
    assert "--max_steps was 1 before, now it is 2" in err
    summary = json.loads((tmp_path / "out/summary.json").read_text())
    assert summary["steps"] == 2


@pytest.mark.parametrize("change", ["answer", "prompt", "order", "number"])
def test_the_fingerprint_is_of_every_answer_and_prompt(change):
    problems = [trainer.Problem(f"Add {i}.", str(i)) for i in range(3)]
    prompts = [[3, 4, i] for i in range(3)]
    known = trainer.task_fingerprint([(problems, prompts)])
    assert trainer.task_fingerprint([(list(problems), [list(p) for p in prompts])]) == known
    if change == "answer":
        problems[2] = problems[2]._replace(answer="7")
    elif change == "prompt":
        prompts[2] = [3, 4, 9]
    elif change == "order":
        problems.reverse()
        prompts.reverse()
    else:
        problems.pop()
        prompts.pop()
    assert trainer.task_fingerprint([(problems, prompts)]) != known


# ---- The state -----------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def first(make_run, tmp_path_factory):
    """A run of one update with a checkpoint."""
    run = make_run(output_dir=tmp_path_factory.mktemp("first"))
    trainer.update(run, [random_batch()])
    run.step = run.rollout = 1
    trainer.save_checkpoint(run, None)
    return run


@pytest.fixture
def saved(first, tmp_path):
    """The run, whose checkpoint-1 is in tmp_path, asked to resume from it."""
    shutil.copytree(first.args.output_dir, tmp_path, dirs_exist_ok=True)
    args = replace(first.args, output_dir=str(tmp_path), resume_from_checkpoint="latest")
    return replace(first, args=args)


def an_adapter(state: dict) -> torch.Tensor:
    return next(iter(state["adapter"].values()))


def name_another_step(state):
    state["step"] = 2


def make_step_negative(state):
    state["step"] = -1


def make_rollout_negative(state):
    state["rollout"] = -3


def make_rollout_a_fraction(state):
    state["rollout"] = 0.5


def make_schedule_negative(state):
    state["schedule"] = -1


def make_schedule_endless(state):
    state["schedule"] = 10**15  # steps of the schedule that would be taken one by one


def put_nan_into_the_adapter(state):
    an_adapter(state)[0, 0] = math.nan


def put_infinity_into_a_moment(state):
    state["optimizer"][0]["exp_avg_sq"][0, 0] = math.inf


def change_the_adapters_shape(state):
    name = next(iter(state["adapter"]))
    state["adapter"][name] = state["adapter"][name][:2].clone()


def change_a_moments_shape(state):
    state["optimizer"][3]["exp_avg"] = torch.zeros(2, 2)


def add_a_parameter_to_the_optimizer(state):
    state["optimizer"][999] = state["optimizer"][0]


DAMAGE = {
    name_another_step: "it is of step 2: rename it to checkpoint-2",
    make_step_negative: "counts are damaged",
    make_rollout_negative: "counts are damaged",
    make_rollout_a_fraction: "counts are damaged",
    make_schedule_negative: "counts are damaged",
    make_schedule_endless: "counts are damaged",
    put_nan_into_the_adapter: "numbers that are not finite",
    put_infinity_into_a_moment: "numbers that are not finite",
    change_the_adapters_shape: "give the --lora_r that it was trained with",
    change_a_moments_shape: "its optimizer's state has other shapes",
    add_a_parameter_to_the_optimizer: "damaged",
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_nothing_of_a_damaged_state_is_used(saved, tmp_path, capsys, damage):
    path = tmp_path / "checkpoint-1/state.pt"
    state = torch.load(path)
    for tensor in state["adapter"].values():
        tensor += 1.0  # so that it would show in the run
    damage(state)
    torch.save(state, path)

    trained = [p for p in saved.model.parameters() if p.requires_grad]
    before = [p.detach().clone() for p in trained]
    schedule = saved.scheduler.last_epoch
    with pytest.raises(SystemExit) as stop:
        trainer.resume(saved)
    out, err = capsys.readouterr()
    assert stop.value.code == 2 and not out and len(err.splitlines()) == 1
    assert f"cannot resume from {tmp_path}/checkpoint-1: " in err and DAMAGE[damage] in err
    assert (saved.step, saved.rollout, saved.scheduler.last_epoch) == (1, 1, schedule)
    assert all(torch.equal(a, b) for a, b in zip(trained, before, strict=True))


def test_an_undamaged_state_is_used(saved, tmp_path):
    """The tests above change what is sound."""
    path = tmp_path / "checkpoint-1/state.pt"
    state = torch.load(path)
    expected = {name: tensor + 1.0 for name, tensor in state["adapter"].items()}
    torch.save(state | {"adapter": expected}, path)
    kept = {name: p.detach().clone() for name, p in saved.model.named_parameters()}
    saved.step = 0
    trainer.resume(saved)
    assert saved.step == 1
    for name, parameter in saved.model.named_parameters():
        assert torch.equal(parameter, expected.get(name, kept[name])), name
    saved.model.load_state_dict({n: kept[n] for n in expected}, strict=False)


JUNK = """
{"step": 0, "eval": 5}
{"step": 0, "eval": {"sampled_accuracy": "high"}}
{"step": 0, "eval": {}}
{"step": 0, "eval": [1]}
{"step": 1, "reward": "much", "seconds_update": "long"}
{"step": "a"}
{"step": null, "eval": null}
{"step": -1e400}
[1]
{
"""


def test_junk_among_the_metrics_does_not_stop_a_run(run_main, tmp_path):
    assert run_main(**FLAGS)[0] == 0
    path = tmp_path / "out/metrics.jsonl"
    path.write_text(JUNK + path.read_text() + JUNK)
    flags = FLAGS | {"max_steps": 2, "save_total_limit": 1}
    code, _, err = run_main(**flags, resume_from_checkpoint="latest")
    assert code == 0 and "Traceback" not in err, err
    assert (tmp_path / "out/checkpoint-2").is_dir()


# ---- The folders ---------------------------------------------------------------------------------
def test_a_link_in_place_of_the_partial_checkpoint_is_not_followed(first, tmp_path):
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "state.pt").write_text("mine")
    (victim / "README.md").write_text("mine")
    out = tmp_path / "out"
    out.mkdir()
    (out / "partial-checkpoint").symlink_to(victim)
    run = replace(first, args=replace(first.args, output_dir=str(out)))
    trainer.save_checkpoint(run, None)
    assert {path.name: path.read_text() for path in victim.iterdir()} == {
        "state.pt": "mine",
        "README.md": "mine",
    }
    assert not (out / "checkpoint-1").is_symlink()
    assert [path.name for path in out.iterdir()] == ["checkpoint-1"]
    assert (out / "checkpoint-1/state.pt").stat().st_size > 1000


def test_the_best_evaluations_checkpoint_is_kept(run_main, monkeypatch, tmp_path):
    """Beside --save_total_limit others, and over a resumption."""
    accuracies = {0: 0.1, 1: 0.2, 2: 0.9, 3: 0.9, 4: 0.4, 5: 0.5}

    def evaluate(run, *_):
        accuracy = accuracies[run.step]
        return {"greedy_accuracy": 1 - accuracy, "sampled_accuracy": accuracy}

    monkeypatch.setattr(trainer, "evaluate", evaluate)
    flags = {"save_steps": 1, "eval_steps": 1, "save_total_limit": 1}

    def kept() -> set[str]:
        return {path.name for path in (tmp_path / "out").glob("*checkpoint*")}

    assert run_main(**flags, max_steps=4)[0] == 0
    assert kept() == {"checkpoint-2", "checkpoint-4"}
    assert run_main(**flags, max_steps=5, resume_from_checkpoint="latest")[0] == 0
    assert kept() == {"checkpoint-2", "checkpoint-5"}


def test_the_best_step_is_the_first_of_the_highest():
    def row(step: int, accuracy: float | None) -> dict:
        return {"step": step, "eval": {"greedy_accuracy": 1.0, "sampled_accuracy": accuracy}}

    assert trainer.best_step([]) is None
    assert trainer.best_step([{"step": 1, "reward": 3.0}]) is None
    rows = [row(0, 0.5), {"step": 1, "reward": 3.0}, row(1, 0.75), row(2, 0.75), row(3, 0.25)]
    assert trainer.best_step(rows) == 1
    assert trainer.best_step([row(0, None), *rows]) == 1
