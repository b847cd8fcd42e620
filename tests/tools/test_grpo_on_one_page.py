"""tools/grpo_on_one_page.py makes the updates of grpo_arca.py, written a second time."""

from unittest import mock

import grpo_on_one_page as page
import pytest
import torch
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.optim.optimizer import register_optimizer_step_post_hook

import grpo_arca


@pytest.mark.parametrize("credit", ["arca", "uniform"])
def test_the_first_updates_are_those_of_grpo_arca(make_run, monkeypatch, credit):
    """Loss and gradient of two updates on each of two rollouts, from the same draws.

    grpo_arca splits them into micro-batches, and leaves rows without a gradient out. After each
    update it gets the page's weights, because Adam makes whole steps of rounding.
    """
    gradients = []
    weights = []

    def keep(optimizer, *_):
        parameters = optimizer.param_groups[0]["params"]
        gradients.append(parameters_to_vector([parameter.grad for parameter in parameters]))
        if len(gradients) <= 4:
            weights.append(parameters_to_vector(parameters).detach())
        else:
            vector_to_parameters(weights.pop(0), parameters)

    hook = register_optimizer_step_post_hook(keep)
    sizes = {"CREDIT": credit, "ROLLOUTS": 2, "PROMPTS": 4, "GROUP": 4, "PASSES": 2, "HELD_OUT": 1}
    for name, value in sizes.items():
        monkeypatch.setattr(page, name, value)
    sample = mock.Mock(wraps=page.sample)
    monkeypatch.setattr(page, "sample", sample)
    with mock.patch.object(
        torch.Tensor, "backward", autospec=True, side_effect=torch.Tensor.backward
    ) as backward:
        page.train()

    draws = [call.args[3] for call in sample.call_args_list if len(call.args) == 4]
    monkeypatch.setattr(grpo_arca, "row_draws", lambda *_: draws.pop(0))
    monkeypatch.setattr(grpo_arca, "evaluate", mock.Mock())
    monkeypatch.setattr(grpo_arca, "save_checkpoint", mock.Mock())
    run = make_run(
        credit=credit, num_generations=4, per_device_train_batch_size=4, num_iterations=2,
        gradient_accumulation_steps=4, max_completion_length=80, shuffle_dataset=False,
        max_steps=4, adapter=None,
    )  # fmt: skip
    run.log = mock.Mock(rows=[{}], has_diverged=mock.Mock(return_value=False))
    grpo_arca.train(run)
    hook.remove()

    rows = [call.args[0] for call in run.log.write.call_args_list]
    losses = [call.args[0].item() for call in backward.call_args_list]
    assert [row["loss"] for row in rows] == pytest.approx(losses, abs=1e-6)
    assert rows[1]["clip_fraction"] > 0
    for theirs, ours in zip(gradients[:4], gradients[4:], strict=True):
        assert (ours - theirs).norm() < 1e-5 * theirs.norm()
