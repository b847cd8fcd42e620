"""What breaks in the middle of a run: an update, a tracker, the disk."""

import itertools
import resource
import shutil

import pytest
import torch
from support import VARIETY, outcome, state_file

import grpo_arca


def fail(run, *_):
    raise torch.OutOfMemoryError("memory is full")


@pytest.mark.parametrize("where", ["update", "means", pytest.param("log", marks=pytest.mark.slow)])
def test_an_error_saves_the_updates_so_far(run_main, monkeypatch, tmp_path, where):
    """Wherever it comes from. That they suffice to go on is in test_resume.py. The rollout of the
    error, which is sampled again then, is not on the page yet."""
    owner = grpo_arca.Accelerator if where == "log" else grpo_arca
    inner = getattr(owner, where)
    calls = itertools.count()  # of `means`: each update's is the second of two
    broken = {
        "log": lambda self, _, step: fail(None) if step == 1 else inner(self, _, step),
        "update": lambda run, micros: fail(run) if run.step == 1 else inner(run, micros),
        "means": lambda *given: fail(None) if next(calls) == 3 else inner(*given),
    }[where]
    with monkeypatch.context() as patch:
        patch.setattr(grpo_arca, "credit_example", lambda *given: [{"step": given[3]}])
        patch.setattr(owner, where, broken)
        with pytest.raises(torch.OutOfMemoryError, match="memory is full"):
            run_main(max_steps=2, save_steps=0, eval_steps=1)
    (folder,) = (tmp_path / "out").glob("checkpoint-*")
    state = torch.load(folder / "state.pt")
    assert (folder.name, state["optimizer"][0]["step"]) == ("checkpoint-1", 1)
    assert [group["step"] for group in state["page_examples"]] == [0] * (where != "log")


def test_a_full_disk_leaves_the_former_checkpoint(run_main, monkeypatch, tmp_path):
    """Files may not grow beyond 100 kB, an adapter has 360."""
    update = grpo_arca.update
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    def update_and_fill(run, micros):
        if run.step == 1:
            shutil.copytree(tmp_path / "out/checkpoint-1", tmp_path / "copy")
            resource.setrlimit(resource.RLIMIT_FSIZE, (10**5, before[1]))
        return update(run, micros)

    try:
        with monkeypatch.context() as patch, pytest.raises(Exception, match="File too large"):
            patch.setattr(grpo_arca, "update", update_and_fill)
            run_main(max_steps=2, save_steps=1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert [path.name for path in (tmp_path / "out").glob("checkpoint-*")] == ["checkpoint-1"]
    assert state_file(tmp_path / "out/checkpoint-1") == state_file(tmp_path / "copy")


def test_an_error_between_two_updates_of_a_rollout_leaves_what_can_be_followed(
    run_main, tmp_path, monkeypatch
):
    (tmp_path / "variety.py").write_text(VARIETY)
    flags = {
        "max_steps": 6, "num_iterations": 2, "reward_funcs": "variety.pay", "save_steps": 2,
        "eval_steps": 2,
    }  # fmt: skip
    assert run_main(**flags)[0] == 0
    whole = outcome(tmp_path)
    (tmp_path / "out").rename(tmp_path / "undisturbed")
    write = grpo_arca.RunLog.write

    def full_disk(self, row):
        if row["step"] == 3:
            raise OSError(28, "No space left on device")
        write(self, row)

    with monkeypatch.context() as patch, pytest.raises(OSError, match="No space"):
        patch.setattr(grpo_arca.RunLog, "write", full_disk)
        run_main(**flags)
    assert grpo_arca.checkpoints("out") == [2]
    assert run_main(**flags, resume_from_checkpoint="latest")[0] == 0
    assert outcome(tmp_path) == whole
