"""What breaks in the middle of a run: numbers, an update, a tracker, the disk."""

import resource
import shutil

import pytest
import torch
from support import random_batch, state_file

import grpo_arca


@pytest.mark.parametrize("where", ["loss", "gradient"])
def test_an_update_that_is_not_finite_is_skipped(make_run, monkeypatch, where):
    run = make_run()
    policy_loss = grpo_arca.policy_loss

    def broken_loss(*inputs):
        loss, clipped = policy_loss(*inputs)
        if where == "loss":
            return loss + torch.inf, clipped  # the gradient is finite
        return loss + (loss - loss).sqrt(), clipped  # the derivative of sqrt at 0 is infinite

    grpo_arca.update(run, [random_batch()])  # so that the optimizer has a state
    moments = run.optimizer.state_dict()["state"][0]
    before = [p.detach().clone() for p in (*run.model.parameters(), *moments.values())]
    with monkeypatch.context() as patch:
        patch.setattr(grpo_arca, "policy_loss", broken_loss)
        assert grpo_arca.update(run, [random_batch()])["skipped_update"] == 1
    for old, new in zip(before, (*run.model.parameters(), *moments.values()), strict=True):
        assert torch.equal(old, new)
    assert all(p.grad is None for p in run.model.parameters())
    assert grpo_arca.update(run, [random_batch()])["skipped_update"] == 0


@pytest.mark.slow
def test_ten_skipped_updates_in_a_row_end_the_run(run_main, rows_of, monkeypatch, tmp_path):
    """Else a table would come at the end, as if it had learned."""
    check_model = grpo_arca.check_model

    def check_and_poison(run):
        check_model(run)
        next(run.adapter[name] for name in run.adapter if "lora_B" in name).fill_(torch.nan)

    monkeypatch.setattr(grpo_arca, "check_model", check_and_poison)
    code, _, said = run_main(max_steps=20, per_device_train_batch_size=4, beta=0.1)
    assert code == 1
    assert "not finite in ten updates in a row: delete checkpoints from step 0 on" in said
    assert [row["skipped_update"] for row in rows_of()] == [1] * 10


def fail(run, *_):
    raise torch.OutOfMemoryError("memory is full")


@pytest.mark.parametrize("where", ["update", pytest.param("tracker", marks=pytest.mark.slow)])
def test_an_error_saves_the_updates_so_far(run_main, monkeypatch, tmp_path, where):
    """Wherever it comes from. That they suffice to go on is in test_resume.py."""
    log = grpo_arca.Accelerator.log
    update = grpo_arca.update

    def broken_log(accelerator, figures, step):
        return fail(None) if step == 1 else log(accelerator, figures, step)

    def broken_update(run, micros):
        return fail(run) if run.step == 1 else update(run, micros)

    with monkeypatch.context() as patch:
        if where == "tracker":
            patch.setattr(grpo_arca.Accelerator, "log", broken_log)
        else:
            patch.setattr(grpo_arca, "update", broken_update)
        with pytest.raises(torch.OutOfMemoryError, match="memory is full"):
            run_main(max_steps=2, save_steps=0)
    assert [path.name for path in (tmp_path / "out").glob("checkpoint-*")] == ["checkpoint-1"]


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
