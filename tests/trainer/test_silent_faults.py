"""What once went on silently wrong, or lost finished work, is refused or right."""

import ctypes
import itertools
import json
import os
import runpy
import shutil
import sys
from pathlib import Path

import pytest
import torch
from peft.tuners.lora.layer import LoraLayer
from safetensors.torch import load_file
from support import ROOT, TINY, VARIETY, outcome, random_batch, refusal, unscored
from torch.nn.utils._named_member_accessor import NamedMemberAccessor
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM, get_scheduler

import grpo_arca
from common.run_log import environment

GO_ON = {"resume_from_checkpoint": "latest"}
LAYERS = 28  # of the tiny policy's adapter


# ---- A signal while the adapter is not in its place ----------------------------------------------
@pytest.fixture(scope="module")
def switched(make_run, tmp_path_factory):
    """A run, and what its adapter's 56 matrices are."""
    run = make_run(output_dir=tmp_path_factory.mktemp("switched"), beta=0.1)
    weights = {name: p.clone() for name, p in run.model.named_parameters() if "lora_" in name}
    assert len(weights) == 2 * LAYERS
    return run, weights


def check_saved(run, weights: dict, step: int) -> None:
    """Saves a checkpoint as an ending run does, and checks that the whole adapter is in it."""
    run.step = step
    grpo_arca.save_checkpoint(run)
    folder = Path(run.args.output_dir, f"checkpoint-{step}")
    for_peft = load_file(folder / "adapter_model.safetensors")
    state = torch.load(folder / "state.pt", weights_only=True)["adapter"]
    assert state.keys() == weights.keys()
    for name, weight in weights.items():
        assert torch.equal(state[name], weight), name
        assert torch.equal(for_peft[name.replace(".default", "")], weight), name


def interrupted(function, number: int):
    """Returns the function, but its call of this number is interrupted."""
    calls = itertools.count(1)

    def call(*arguments, **keywords):
        if next(calls) == number:
            raise KeyboardInterrupt
        return function(*arguments, **keywords)

    return call


@pytest.mark.parametrize("layer", range(LAYERS))
def test_a_signal_at_any_layer_of_a_switch_saves_the_whole_adapter(switched, monkeypatch, layer):
    """While PEFT turns the adapter on again, after it has turned off every layer."""
    run, weights = switched
    enable = interrupted(LoraLayer.enable_adapters, LAYERS + layer + 1)
    monkeypatch.setattr(LoraLayer, "enable_adapters", enable)
    with pytest.raises(KeyboardInterrupt), run.model.disable_adapter():
        pass
    monkeypatch.undo()
    check_saved(run, weights, layer + 1)
    run.model.base_model.enable_adapter_layers()


@pytest.mark.parametrize("matrix", [1, 2, 30, 2 * LAYERS])
def test_a_signal_while_the_reference_is_put_in_saves_the_trained_adapter(
    switched, monkeypatch, matrix
):
    """torch.func.functional_call swaps weights, and after an interrupt it does not swap back."""
    run, weights = switched
    batch = unscored(random_batch())
    swap = interrupted(NamedMemberAccessor.swap_tensor, matrix)
    monkeypatch.setattr(NamedMemberAccessor, "swap_tensor", swap)
    with pytest.raises(KeyboardInterrupt):
        grpo_arca.score(run, batch, [batch], {})
    check_saved(run, weights, 100 + matrix)


def test_a_checkpoint_that_lacks_weights_is_refused(make_run, tmp_path):
    run = make_run(output_dir=tmp_path)
    run.step = 1
    grpo_arca.save_checkpoint(run)
    path = tmp_path / "checkpoint-1/state.pt"
    state = torch.load(path, weights_only=True)
    state["adapter"].popitem()
    torch.save(state, path)
    other = make_run(output_dir=tmp_path, **GO_ON)
    assert "layers of the adapter" in refusal(lambda: grpo_arca.resume(other))


# ---- Runs ----------------------------------------------------------------------------------------
@pytest.mark.parametrize("place", [0, 2])
def test_processes_with_other_problems_weights_or_flags_do_not_train_together(
    run_main, monkeypatch, place
):
    """The other process finds the same step here, but not the same data, or not the same flags."""

    def gather(own):
        if not isinstance(own[0], tuple):
            return own * 2
        other = list(own[0])
        other[place] = "another"
        return [own[0], tuple(other)]

    monkeypatch.setattr(grpo_arca, "gather_object", gather)
    code, _, said = run_main(max_steps=0)
    assert code == 1
    assert "processes have different weights, problems, flags or reward functions" in said


def test_an_adapter_that_is_left_of_a_run_is_not_replaced(run_main, tmp_path):
    (tmp_path / "out/adapter").mkdir(parents=True)
    code, _, said = run_main(max_steps=0)
    assert code == 1 and "out holds a run" in said


def test_an_error_between_two_updates_of_a_rollout_leaves_what_can_be_followed(
    run_main, tmp_path, monkeypatch
):
    (tmp_path / "variety.py").write_text(VARIETY)
    flags = {"max_steps": 6, "num_iterations": 2, "reward_funcs": "variety.pay"}
    flags |= {"save_steps": 2, "eval_steps": 2}
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
    assert run_main(**flags, **GO_ON)[0] == 0
    assert outcome(tmp_path) == whole


def test_a_tracker_goes_on_with_its_run_from_the_step_of_the_checkpoint(
    run_main, tmp_path, monkeypatch
):
    seen = []
    monkeypatch.setattr(
        grpo_arca.Accelerator, "init_trackers", lambda *arguments: seen.append(arguments[3])
    )
    assert run_main(max_steps=2, save_steps=1)[0] == 0
    assert run_main(max_steps=3, save_steps=1, **GO_ON)[0] == 0
    monkeypatch.chdir(tmp_path)
    assert run_main(max_steps=0, output_dir="other")[0] == 0
    first, second, other = seen
    assert first["tensorboard"] == {"purge_step": 1}
    assert second["tensorboard"] == {"purge_step": 3}  # 1 and 2 stay
    assert first["wandb"] == second["wandb"] and first["trackio"] == second["trackio"]
    assert first["wandb"]["resume"] == first["trackio"]["resume"] == "allow"
    assert other["wandb"]["id"] != first["wandb"]["id"]


# ---- Numbers -------------------------------------------------------------------------------------
def test_large_rewards_keep_their_differences():
    """20000001 is no float32. The deviation of four ones and four zeros is (2 / 7) ** 0.5."""
    values = torch.tensor([20000002.0] * 4 + [20000001.0] * 4, dtype=torch.float64).view(1, 8, 1)
    weights = torch.ones(1, dtype=torch.float64)
    advantages = grpo_arca.aggregated_advantages(grpo_arca.parse_args([]), values, weights)
    expected = 0.5 / ((2 / 7) ** 0.5 + 1e-4)
    torch.testing.assert_close(advantages[0], torch.tensor([expected] * 4 + [-expected] * 4))


def test_the_schedule_is_one_update_ahead_of_trls(make_run):
    """Whose first update has a rate of 0 after a warm-up; docs/trl.md says so."""
    for kind in ("cosine", "linear"):
        run = make_run(lr_scheduler_type=kind, warmup_steps=10, max_steps=40)
        theirs = get_scheduler(kind, torch.optim.SGD([torch.zeros(1)], 1.0), 10, 41)
        for update in range(41):
            rate = theirs.get_last_lr()[0]
            assert rate == pytest.approx(run.share_of_peak_rate(update), abs=1e-9)
            theirs.optimizer.step()
            theirs.step()
    assert "one update ahead of TRL's" in " ".join((ROOT / "docs/trl.md").read_text().split())


def test_the_token_that_closes_a_turn_ends_a_completion(make_run, tmp_path):
    """As with Qwen3-1.7B-Base, whose files name another one. Invented turns would follow."""
    folder = shutil.copytree(TINY, tmp_path / "base")
    for name in ("config.json", "generation_config.json", "tokenizer_config.json"):
        settings = json.loads((folder / name).read_text())
        is_token = name == "tokenizer_config.json"
        settings |= {"eos_token": "<|endoftext|>"} if is_token else {"eos_token_id": 0}
        (folder / name).write_text(json.dumps(settings))
    run = make_run(model=str(folder), adapter=None, max_completion_length=80)
    end = run.tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert run.tokenizer.eos_token == "<|endoftext|>" and run.tokenizer.eos_token_id != end
    assert run.eos_ids.tolist() == sorted({run.tokenizer.eos_token_id, end})
    draws = torch.rand(4, 80, generator=torch.Generator().manual_seed(0))
    batch = grpo_arca.sample(run, torch.arange(4), run.train_set[:4], draws, 0, {"": None}, {})
    assert not batch.truncated.any()
    assert all(ids[-1] == end for ids in batch.completion_ids)


def test_arca_refuses_an_adapter_that_moves_no_hidden_state(make_run, tmp_path):
    config = Qwen3Config(
        vocab_size=448, hidden_size=64, intermediate_size=64, num_hidden_layers=1,
        num_attention_heads=1, num_key_value_heads=1, head_dim=64, tie_word_embeddings=False,
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(TINY).save_pretrained(tmp_path)
    flags = {"lora_target_modules": "lm_head", "load_in_4bit": False, "dtype": "float32"}
    run = make_run(model=str(tmp_path), **flags)
    batch = unscored(random_batch())
    for credit in ("arca", "random", "shuffled"):
        run.args.credit = credit
        sentence = refusal(lambda: grpo_arca.token_scores(run, batch, {}))
        assert "which an adapter of the head never moves" in sentence
    run.args.credit = "divergence"  # of log-probs, which it does move
    assert grpo_arca.token_scores(run, batch, {})[batch.mask].max() > 0


# ---- A system that is no Linux -------------------------------------------------------------------
def test_what_only_linux_has_ends_no_run(monkeypatch, capsys):
    """Nothing is promised there; this is simulated."""
    monkeypatch.delattr(os, "sched_getaffinity")
    exists = Path.exists
    monkeypatch.setattr(Path, "exists", lambda self: str(self) != "/proc/cpuinfo" and exists(self))
    assert environment()["hardware"]["cores"] == os.cpu_count()

    monkeypatch.setattr(ctypes, "CDLL", lambda _: object())
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    monkeypatch.setattr(sys, "argv", ["grpo_arca.py", "--help"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(ROOT / "grpo_arca.py"), run_name="__main__")
    assert ended.value.code == 0
    assert "--model_name_or_path" in capsys.readouterr().out
