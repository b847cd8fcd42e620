"""A run that was killed or interrupted and resumed ends as if nothing had happened, to the bit."""

import json
import os
import random
import shutil
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support import (
    LONG_RUN,
    SCRIPTS,
    TINY,
    TINY_RUN,
    error_line,
    fork_case,
    outcome,
    random_batch,
    refusal,
    run_forks,
    stderr_of,
)

import grpo_arca as trainer

HOW_TO_GO_ON = "to go on, run the same command again with --resume_from_checkpoint latest"

# In this process; forks that are really killed, of every script, are the slow tests'.
SHORT = (
    TINY_RUN | LONG_RUN | {"max_steps": 3, "eval_steps": 2, "save_steps": 1, "max_eval_samples": 2}
)
SHORT |= {"num_iterations": 1, "steps_per_generation": 1, "max_completion_length": 80}


def test_a_run_resumed_in_the_middle_is_the_same_run(run_main, step_on_trial, tmp_path):
    """As after a kill in step 3: the checkpoint of step 2, and what was logged until then."""
    assert run_main(**SHORT)[0] == 0
    whole, out = outcome(tmp_path), tmp_path / "out"
    assert [row["step"] for row in whole["metrics"]] == [0, 1, 2, 2, 3, 3]
    assert any(row.get("grad_norm", 0) > 0 for row in whole["metrics"])
    lines = (out / "metrics.jsonl").read_text().splitlines(keepends=True)
    (out / "metrics.jsonl").write_text("".join(lines[:4]) + lines[4][:20])
    for path in (out / "checkpoint-3", out / "adapter"):
        shutil.rmtree(path)
    assert run_main(**SHORT, resume_from_checkpoint="latest")[0] == 0
    again = outcome(tmp_path)
    assert again.keys() == whole.keys()
    for name in whole:
        assert again[name] == whole[name], name
    code, _, err = run_main(**SHORT)
    assert code == 2 and "checkpoint-3 exists: add" in error_line(err)


def test_an_evaluation_is_kept_where_the_flags_no_longer_ask_for_it(run_main, tmp_path):
    """It is made again at the checkpoint's step, whatever --eval_steps."""
    flags = SHORT | {"max_steps": 2, "save_steps": 1, "eval_steps": 1}
    assert run_main(**flags)[0] == 0
    for name in ("checkpoint-2", "adapter"):
        shutil.rmtree(tmp_path / "out" / name)
    assert run_main(**flags | {"eval_steps": 2}, resume_from_checkpoint="latest")[0] == 0
    rows = outcome(tmp_path)["metrics"]
    assert [row["step"] for row in rows if row.get("eval")] == [0, 1, 2]


@pytest.mark.slow
def test_a_finished_run_goes_on_from_its_last_checkpoint(run_main, rows_of, tmp_path):
    """Which is written at the end, whatever --save_steps; before it there is none to go on from."""
    flags = SHORT | {"max_steps": 2, "save_steps": 500}
    code, _, err = run_main(**flags, resume_from_checkpoint="latest")
    assert code == 0 and "grpo_arca.py: no checkpoint in out: starting at step 0\n" in err
    assert [path.name for path in trainer.checkpoints(tmp_path / "out")] == ["checkpoint-2"]
    code, _, err = run_main(**flags | {"max_steps": 3}, resume_from_checkpoint="latest")
    assert code == 0 and "--max_steps was 2 before, now it is 3" in err
    assert [row["step"] for row in rows_of()] == [1, 2, 3]
    assert len(trainer.checkpoints(tmp_path / "out")) == 2
    code, _, err = run_main(**flags | {"max_steps": 1, "save_steps": 0, "output_dir": "none"})
    assert code == 0 and trainer.checkpoints(tmp_path / "none") == []


@pytest.mark.slow
def test_a_longer_run_and_one_elsewhere_keep_the_evaluations(run_main, tmp_path):
    """The end of the first run is no multiple of --eval_steps, and yet it stays evaluated. Without
    the log of the first run, nothing is known of before."""
    flags = SHORT | {"max_steps": 1, "eval_steps": 3}
    assert run_main(**flags)[0] == 0
    shutil.copytree(tmp_path / "out/checkpoint-1", tmp_path / "alone/checkpoint-1")
    for folder, checkpoint in (("elsewhere", "out/checkpoint-1"), ("out", "latest")):
        more = {"max_steps": 2, "output_dir": folder, "resume_from_checkpoint": checkpoint}
        assert run_main(**flags | more)[0] == 0
        lines = (tmp_path / folder / "metrics.jsonl").read_text().splitlines()
        evaluated = [row["step"] for row in map(json.loads, lines) if row.get("eval")]
        assert evaluated == [0, 1, 2], folder
        summary = json.loads((tmp_path / folder / "summary.json").read_text())
        assert summary["before"] == json.loads(lines[0])["eval"]

    more = {"output_dir": "new", "resume_from_checkpoint": "alone/checkpoint-1", "max_steps": 2}
    code, out, _ = run_main(**flags | more)
    assert code == 0 and "\N{EN DASH}" in out
    assert json.loads((tmp_path / "new/summary.json").read_text())["before"] == {}


def test_what_is_due_where_a_rollout_has_three_updates(make_run):
    run = make_run(steps_per_generation=3)
    due = []
    for run.step in range(0, 31, 3):
        if run.is_due(10):
            due.append(run.step)
    assert due == [12, 21, 30] and not run.is_due(0)


@pytest.mark.parametrize(
    ("function", "number"), [("collect", signal.SIGTERM), ("update", signal.SIGINT)]
)
def test_a_signal_lets_the_rollout_end_and_saves(run_main, monkeypatch, tmp_path, function, number):
    interrupted = getattr(trainer, function)

    def interrupt(run, *inputs):
        if run.step == 0:  # once, because a second signal would end this process
            os.kill(os.getpid(), number)
        return interrupted(run, *inputs)

    with monkeypatch.context() as patch:
        patch.setattr(trainer, function, interrupt)
        code, out, err = run_main(
            **SHORT | {"steps_per_generation": 2, "save_steps": 0, "max_steps": 6}
        )
    assert code == 0 and "Traceback" not in err, err
    sentence = "ending after this rollout or batch; a second signal ends at once\n"
    assert err.count(sentence) == 1
    assert out.endswith(f"interrupted, saved out/checkpoint-2: {HOW_TO_GO_ON}\n")
    steps = [json.loads(line)["step"] for line in (tmp_path / "out/metrics.jsonl").open()]
    assert steps[-1] == 2 and not (tmp_path / "out/summary.json").exists()


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Of every script: whole, killed in the second rollout, and that resumed. The first: also
    interrupted and resumed, interrupted twice, and what is refused."""
    at = tmp_path_factory.mktemp("resume")
    whole, again = at / "grpo_arca/whole", {"resume_from_checkpoint": "latest"}
    first = {"resume_from_checkpoint": whole / "out/checkpoint-4"}
    kill = {"signal": signal.SIGKILL, "when": "out/checkpoint-4", "after": 0.3}
    once = {"signal": signal.SIGINT, "when": "out/metrics.jsonl", "lines": 3}  # amid a rollout's
    twice = {"signal": signal.SIGTERM, "when": "out/metrics.jsonl", "times": 2}

    def after(folder: Path, name: str, script: str = "grpo_arca", **flags) -> dict:
        """A command with another's output folder, once that one has ended."""
        flags = {"output_dir": folder / "out"} | flags
        return fork_case(at / name, script, {"needs": str(folder)}, **flags)

    cases = {"0": [fork_case(at / script / "whole", script) for script in SCRIPTS]}
    cases[str(-signal.SIGKILL)] = [
        fork_case(at / script / "killed", script, kill) for script in SCRIPTS
    ]
    cases[str(128 + signal.SIGTERM)] = [fork_case(at / "twice", stop=twice)]
    cases["0"] += [fork_case(at / "once", stop=once, save_steps=0)]
    cases["0"] += [after(at / name / "killed", f"{name}/again", name, **again) for name in SCRIPTS]
    cases["0"] += [after(at / "once", "once_again", save_steps=0, **again)]
    cases["0"] += [fork_case(at / "new", max_steps=0, **again)]
    cases["2"] = [after(whole, "exists"), after(whole, "exists_and_named", **first)]
    cases["2"] += [fork_case(at / "nowhere", resume_from_checkpoint="nowhere")]
    expected = [code for code, group in cases.items() for _ in group]
    flat = [one for group in cases.values() for one in group]
    codes = run_forks(at, flat)
    assert codes == expected, [(c["folder"], code) for c, code in zip(flat, codes, strict=True)]
    return at


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS)
def test_killed_and_resumed_is_the_same_run(runs, script):
    whole, killed = (outcome(runs / script / name) for name in ("whole", "killed"))
    steps = [row["step"] for row in whole["metrics"] if "reward" in row]
    assert steps == list(range(1, 9)) and len(whole["metrics"]) == 8 + 3
    assert any(row.get("grad_norm", 0) > 0 for row in whole["metrics"])
    assert {"state of checkpoint-4", "state of checkpoint-8"} <= whole.keys() == killed.keys()
    for name in whole:
        assert whole[name] == killed[name], name


@pytest.mark.slow
def test_a_signal_saves_and_says_how_to_go_on(runs):
    """At the end of the rollout that it came in; a second one ends the run at once."""
    said = (runs / "once/stdout.txt").read_text()
    assert said.endswith(f"interrupted, saved out/checkpoint-4: {HOW_TO_GO_ON}\n")
    assert "Traceback" not in stderr_of(runs / "once") + stderr_of(runs / "twice")
    assert not list((runs / "twice/out").glob("checkpoint-*"))
    whole, resumed = outcome(runs / "grpo_arca/whole"), outcome(runs / "once")
    for name in ("metrics", "summary", "completions", "adapter"):
        assert whole[name] == resumed[name], name


@pytest.mark.slow
def test_a_run_that_exists_is_neither_overwritten_nor_continued_unasked(runs):
    exists = "checkpoint-8 exists: add --resume_from_checkpoint latest, or change --output_dir"
    words = {"exists": exists, "exists_and_named": exists, "nowhere": "cannot resume from nowhere"}
    for name, sentence in words.items():
        assert sentence in error_line(stderr_of(runs / name))
    whole = runs / "grpo_arca/whole"
    ended = (whole / "code.txt").stat().st_mtime_ns
    assert all(path.stat().st_mtime_ns <= ended for path in (whole / "out").rglob("*"))
    assert (runs / "new/out/summary.json").is_file()  # `latest` of none: from the start


@pytest.fixture(scope="module")
def first(make_run, tmp_path_factory):
    """A run with a checkpoint-1. What is refused leaves it as good as it was."""
    run = make_run(output_dir=tmp_path_factory.mktemp("first"))
    trainer.update(run, [random_batch()])  # so that the optimizer has a state
    run.step = 1
    trainer.save_checkpoint(run, None)
    return run


@pytest.fixture
def saved(first, tmp_path):
    """A run whose checkpoint-1 is in tmp_path, and that is asked to resume from it."""
    shutil.copytree(first.args.output_dir, tmp_path, dirs_exist_ok=True)
    asked = str(tmp_path / "checkpoint-1") + "/"
    args = replace(first.args, output_dir=str(tmp_path), resume_from_checkpoint=asked)
    trainer.resume(run := replace(first, args=args))  # what was refused may be half loaded
    return run


def test_only_the_latest_are_kept(saved, tmp_path):
    saved.args.save_total_limit = 2
    for saved.step in (9, 10, 11):
        trainer.save_checkpoint(saved, None)
    assert {path.name for path in tmp_path.iterdir()} == {"checkpoint-10", "checkpoint-11"}
    names = {path.name for path in (tmp_path / "checkpoint-11").iterdir()}
    assert names == {"adapter_config.json", "adapter_model.safetensors", "state.pt"}


def test_what_a_checkpoint_holds_is_restored(saved, make_run, tmp_path, capsys):
    other = make_run(output_dir=tmp_path, resume_from_checkpoint="latest", adapter=0.3, epsilon=0.1)
    other.step = other.rollout = 7
    trainer.resume(other)
    assert (other.step, other.rollout, other.groups) == (1, 0, [])
    for ours, theirs in zip(other.model.parameters(), saved.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    said = capsys.readouterr().err.splitlines()
    assert "grpo_arca.py: --epsilon was 0.2 before, now it is 0.1" in said
    assert not [line for line in said if "--resume_from" in line or "--output_dir" in line]
    trainer.resume(saved)  # by its name


def refused(run, capsys) -> str:
    """Returns the one sentence with which `resume` refuses."""
    sentence = refusal(lambda: trainer.resume(run), capsys)
    assert sentence.startswith("grpo_arca.py: error: cannot resume from ")
    return sentence


def test_one_flipped_bit_in_a_tensor_is_found(saved, tmp_path, capsys):
    """torch's reader would take it for a weight."""
    path = tmp_path / "checkpoint-1/state.pt"
    content = bytearray(path.read_bytes())
    tensor = next(p for name, p in saved.model.named_parameters() if "lora_A" in name)
    content[content.index(tensor.detach().numpy().tobytes()) + 10] ^= 1
    path.write_bytes(content)
    assert "is damaged" in refused(saved, capsys)


class Stranger:
    """What a pickle may hold and a checkpoint may not."""


CHANGES = {
    "no keys": lambda state: state.clear(),
    "no flags": lambda state: state.pop("flags"),
    "other layers": lambda state: state["adapter"].popitem(),
    "other shapes": lambda state: state.update(
        adapter={name: torch.zeros(2, 2) for name in state["adapter"]}
    ),
    "an optimizer that is a list": lambda state: state.update(optimizer=[1]),
    "an optimizer's state that is a number": lambda state: state["optimizer"].update({0: 3.0}),
    "a count that is a text": lambda state: state["optimizer"][0].update(step="one"),
    "a schedule that is no number": lambda state: state.update(schedule="four"),
    "no base": lambda state: state.pop("base"),
    "another base": lambda state: state.update(base=state["base"][::-1]),
    "a step that is no number": lambda state: state.update(step="four"),
    "groups that are no list": lambda state: state.update(groups=5),
    "flags that are no flags": lambda state: state.update(flags=[1]),
    "adapter of a wrong type": lambda state: state.update(adapter=3),
    "a pickle": lambda state: state.update(step=Stranger()),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_state_file_of_something_else(saved, tmp_path, capsys, change):
    path = tmp_path / "checkpoint-1/state.pt"
    state = torch.load(path)
    CHANGES[change](state)
    torch.save(state, path)
    refused(saved, capsys)


def test_what_is_damaged_is_to_be_deleted(saved, tmp_path, capsys):
    """And the one before is then the latest."""
    saved.step = 2
    trainer.save_checkpoint(saved, None)
    newest = replace(saved, args=replace(saved.args, resume_from_checkpoint="latest"))
    (tmp_path / "checkpoint-2/state.pt").write_bytes(b"torn")
    said = refused(newest, capsys)
    assert str(tmp_path / "checkpoint-2") in said
    assert said.endswith(" (if it is damaged, delete it)")
    shutil.rmtree(tmp_path / "checkpoint-2")
    trainer.resume(newest)
    assert newest.step == 1


def test_fewer_updates_than_there_were_are_refused(saved, tmp_path, capsys):
    saved.step = 5
    trainer.save_checkpoint(saved, None)
    for steps, wrong in ((4, True), (5, False)):
        args = replace(saved.args, resume_from_checkpoint="latest", max_steps=steps)
        run = replace(saved, args=args, step=0)
        if wrong:
            assert "past --max_steps" in refused(run, capsys)
        else:
            trainer.resume(run)
            assert run.step == 5


def test_rollouts_of_another_size_go_on_with_the_next_prompts(saved, make_run, tmp_path):
    """First two prompts a rollout, then one, then three: none twice, none left out."""
    problems = [trainer.Problem("x", str(i)) for i in range(11)]
    task = (problems, [[3, 4]] * len(problems))
    drawn = []
    folder = tmp_path / "other"
    for step, completions in ((2, 8), (3, 4), (4, 12)):
        flags = {"per_device_train_batch_size": completions, "max_completion_length": 2}
        run = make_run(output_dir=folder, resume_from_checkpoint="latest", **flags)
        trainer.resume(run)
        for _ in range(2):
            batch = trainer.collect(run, task, {})
            drawn += [problem.answer for problem in batch.problems[::4]]
            run.rollout += 1
        run.step = step
        trainer.save_checkpoint(run, None)
    order = [str(trainer.problem_at(i, len(problems), run.args.seed)) for i in range(12)]
    assert drawn == order


def test_another_model_of_the_same_shapes_is_refused(make_run, tmp_path, capsys):
    """The embedded ones: every tensor of the adapter would fit."""
    long = Path(TINY).with_name("long_policy")
    one = make_run(output_dir=tmp_path)
    trainer.save_checkpoint(one, None)
    other = make_run(model=str(long), output_dir=tmp_path, resume_from_checkpoint="latest")
    shapes = [[p.shape for p in run.model.parameters() if p.requires_grad] for run in (one, other)]
    assert shapes[0] == shapes[1]
    assert "it belongs to another model" in refused(other, capsys)


def test_the_flags_learning_rate_and_weight_decay_are_used(saved, make_run, tmp_path):
    """After a checkpoint of others: the update differs by what AdamW's decay takes, at the rate
    that the schedule gives of the new peak."""
    after, rates = [], []
    for decay in (0.0, 0.5):
        flags = {"learning_rate": 2e-3, "weight_decay": decay, "output_dir": tmp_path}
        run = make_run(resume_from_checkpoint="latest", warmup_steps=4, **flags)
        trainer.resume(run)
        before = [p.detach().clone() for p in run.model.parameters() if p.requires_grad]
        row = trainer.update(run, [random_batch()])
        after.append([p.detach().clone() for p in run.model.parameters() if p.requires_grad])
        rates.append(row["learning_rate"])
    # Of the schedule one update is gone, as `first` made one: it is the second of four.
    assert rates == pytest.approx([2e-3 * 2 / 4] * 2)
    for start, plain, decayed in zip(before, *after, strict=True):
        torch.testing.assert_close(plain - decayed, rates[0] * 0.5 * start, rtol=1e-3, atol=1e-7)


def test_another_number_of_processes_is_said(saved, tmp_path, capsys):
    path = tmp_path / "checkpoint-1/state.pt"
    state = torch.load(path)
    assert state["flags"]["num_processes"] == 1
    state["flags"]["num_processes"] = 2
    torch.save(state, path)
    trainer.resume(saved)
    said = capsys.readouterr().err.splitlines()
    assert said == ["grpo_arca.py: --num_processes was 2 before, now it is 1"]


@pytest.mark.parametrize("asked", [{}, {"resume_from_checkpoint": "latest"}])
def test_a_finished_run_without_checkpoints_is_not_overwritten(run_main, tmp_path, asked):
    flags = TINY_RUN | {"max_steps": 1, "save_steps": 0}
    assert run_main(**flags)[0] == 0
    files = {path: path.read_bytes() for path in (tmp_path / "out").rglob("*") if path.is_file()}
    code, out, err = run_main(**flags, **asked)
    assert code == 2 and not out
    assert "out holds a finished run: remove it, or change --output_dir" in error_line(err)
    assert files == {path: path.read_bytes() for path in files}


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 torn", b"\x80\x04N."])
def test_a_state_file_that_is_none(saved, tmp_path, capsys, content):
    """Empty, torn, a bare pickle; or not there."""
    path = tmp_path / "checkpoint-1/state.pt"
    path.write_bytes(content)
    refused(saved, capsys)
    path.unlink()
    refused(saved, capsys)


@pytest.mark.slow
def test_fifty_kills_at_random_moments(tmp_path):
    """Some fall inside a save. KILL_COUNT of them, where it is set."""
    count = int(os.environ.get("KILL_COUNT", "50"))
    flags = {"save_steps": 1, "num_iterations": 1, "max_steps": 4, "steps_per_generation": 1}
    assert run_forks(tmp_path, [fork_case(tmp_path / "whole", **flags)]) == ["0"]
    expected = outcome(tmp_path / "whole")
    out = tmp_path / "whole/out"
    first, last = ((out / name).stat().st_mtime for name in ("config.json", "summary.json"))
    moments, folders = random.Random(0), [tmp_path / str(i) for i in range(count)]
    stops = []  # each from a point that the run reaches, however slow the machine is by then
    for i in range(count):
        point = ["config.json", "checkpoint-1", "checkpoint-2", "checkpoint-3"][i % 4]
        stops.append({"signal": signal.SIGKILL, "after": moments.uniform(0, (last - first) / 3)})
        stops[-1]["when"] = f"out/{point}"
    cases = [fork_case(f, stop=stop, **flags) for f, stop in zip(folders, stops, strict=True)]
    codes = run_forks(tmp_path, cases)
    killed = [f for f, code in zip(folders, codes, strict=True) if code == str(-signal.SIGKILL)]
    assert len(killed) >= count // 2 and set(codes) <= {"0", str(-signal.SIGKILL)}, codes
    steps = [len(list(f.glob("out/checkpoint-*"))) for f in killed]
    assert len(set(steps)) >= 3, steps  # at various points of the run
    again = [fork_case(f, resume_from_checkpoint="latest", **flags) for f in killed]
    assert set(run_forks(tmp_path, again)) == {"0"}
    for folder in folders:
        result = outcome(folder)
        for name in expected:
            assert result[name] == expected[name], (folder, name)
