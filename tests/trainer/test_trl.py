"""Whole updates, in step with TRL's own trainer on the same completions."""

import copy
from unittest import mock

import pytest
import torch
from datasets import Dataset

import grpo_arca

UPDATES = {
    "grpo": {"epsilon_high": 0.3},
    "dapo": {"loss_type": "dapo", "beta": 0.1, "scale_rewards": "batch"},
    "dr_grpo": {
        "loss_type": "dr_grpo", "scale_rewards": "none", "temperature": 0.7,
        "mask_truncated_completions": True, "max_completion_length": 60,
    },
    "gdpo": {"multi_objective_aggregation": "normalize_then_sum", "max_grad_norm": 0.05},
}  # fmt: skip
SAME_NAMES = (
    "max_steps", "learning_rate", "lr_scheduler_type", "per_device_train_batch_size",
    "gradient_accumulation_steps", "steps_per_generation", "num_generations", "num_iterations",
    "max_completion_length", "temperature", "loss_type", "beta", "epsilon", "epsilon_high",
    "scale_rewards", "multi_objective_aggregation", "mask_truncated_completions",
    "use_bias_correction_kl", "max_grad_norm",
)  # fmt: skip


def remainder(completion_ids, **_):
    return [float(sum(ids) % 17) if sum(ids) % 6 else None for ids in completion_ids]


def length(completion_ids, **_):
    return [float(len(ids)) if sum(ids) % 3 else None for ids in completion_ids]


@pytest.mark.parametrize("flags", UPDATES.values(), ids=UPDATES)
def test_updates_are_those_of_trls_trainer(make_run, monkeypatch, tmp_path, flags):
    """In two passes over a rollout of two updates: advantages of two rewards, of which one or both
    may be None, loss, clipped gradients and AdamW. TRL gets our samples, and must not shuffle."""
    trl = pytest.importorskip("trl", reason="pip install trl")
    run = make_run(
        load_in_4bit=False, credit="uniform", learning_rate=1e-3, lr_scheduler_type="constant",
        max_steps=4, gradient_accumulation_steps=2, steps_per_generation=4, num_iterations=2,
        save_steps=0, **{"max_completion_length": 80} | flags,
    )  # fmt: skip
    run.reward_funcs = {"remainder": remainder, "length": length}
    run.reward_weights = torch.tensor([1.0, 0.5], dtype=torch.float64)
    run.start_weights = {name: p.clone() for name, p in run.policy.named_parameters()}
    run.log = mock.Mock(has_diverged=mock.Mock(return_value=False))
    model = copy.deepcopy(run.model)
    for layer in model.modules():
        vars(layer).pop("forward", None)  # TRL computes with the layers' own functions
    monkeypatch.setattr(grpo_arca, "evaluate", mock.Mock())
    grpo_arca.train(run)
    batch = run.log.write_completions.call_args.args[2]
    samples = {
        "prompt_ids": [problem.prompt_ids for problem in batch.problems],
        "completion_ids": batch.completion_ids,
        "logprobs": batch.sampled_logp.tolist(),  # for vLLM's alone
    }

    monkeypatch.setattr("trl.trainer.grpo_trainer.shuffle_sequence_dict", copy.copy)
    config = trl.GRPOConfig(
        output_dir=str(tmp_path), reward_weights=[1.0, 0.5], gradient_checkpointing=False,
        bf16=False, use_cpu=True, save_strategy="no", report_to="none", logging_steps=1,
        **{name: getattr(run.args, name) for name in SAME_NAMES},
    )  # fmt: skip
    trainer = trl.GRPOTrainer(
        model, [remainder, length], config, Dataset.from_dict({"prompt": ["x"] * 8}),
        processing_class=run.tokenizer, rollout_func=mock.Mock(return_value=samples),
    )  # fmt: skip
    trainer.train()
    ours = [call.args[0] for call in run.log.write.call_args_list]
    assert ours[-1]["clip_fraction"] > 0
    for row, other in zip(ours, trainer.state.log_history[:-1], strict=True):  # the last sums up
        assert row["loss"] == pytest.approx(other["loss"], abs=3e-5)
        assert row["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-3)
