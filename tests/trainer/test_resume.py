"""A run that ended in the middle and is resumed ends as an undisturbed one, to the bit."""

import os
import random
import shutil
import signal
from pathlib import Path
from pickle import UnpicklingError
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file, save_file
from support import (
    SCRIPTS,
    TINY,
    VARIETY,
    fork_case,
    make_adapter,
    outcome,
    random_batch,
    refusal,
    run_forks,
    save_model,
    stderr_of,
)
from transformers import Qwen3Config

import grpo_arca

GO_ON = {"resume_from_checkpoint": "latest"}
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


# ---- Runs that really end ------------------------------------------------------------------------
@pytest.fixture(scope="module")
def forks(tmp_path_factory) -> Path:
    """Runs of each script: undisturbed, and ended four times at random places before they end.

    A run ends by a signal in its first rollout, by a kill inside its last save, and by kills in its
    last rollout. Each time it is resumed. The variable KILL_COUNT says how many kills there are.
    """
    at = tmp_path_factory.mktemp("resume")
    places = random.Random(0)
    cases = []
    for script, number in zip(SCRIPTS, SIGNALS, strict=True):
        cases.append(fork_case(at / script / "whole", script))
        log = {"when": "../out/metrics.jsonl", "after": places.uniform(0, 0.2)}
        stops = [log | {"signal": number, "lines": places.randrange(1, 5)}]
        stops.append({"signal": signal.SIGKILL, "when": "../out/unfinished-checkpoint"})
        for _ in range(int(os.environ.get("KILL_COUNT", "1"))):
            # Of eleven lines, so that a fast machine has not ended the run before.
            stop = {"signal": signal.SIGKILL, "lines": places.randrange(6, 8)}
            stops.append(log | stop | {"after": places.uniform(0, 0.2)})
        former = {}
        for i, stop in enumerate([*stops, {}]):
            folder = at / script / str(i)
            flags = GO_ON if former else {}
            cases.append(fork_case(folder, script, stop | former, output_dir="../out", **flags))
            former = {"needs": str(folder)}
    codes = run_forks(at, cases)
    for case, code in zip(cases, codes, strict=True):
        expected = {signal.SIGKILL: "-9", None: "0"}.get(case.get("signal"), "1")
        assert code == expected, stderr_of(Path(case["folder"]))
    return at


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS)
def test_ended_anywhere_and_resumed_is_the_undisturbed_run(forks, script):
    whole = outcome(forks / script / "whole")
    updates = [row for row in whole["metrics"] if "reward" in row]
    assert [row["step"] for row in updates] == list(range(1, 9))
    assert all(row["grad_norm"] > 0 for row in updates)
    assert max(row["sampled_completions"] for row in updates) > 16  # some were drawn again
    assert {"state of checkpoint-4", "state of checkpoint-8"} <= whole.keys()
    assert outcome(forks / script) == whole


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS)
def test_a_signal_ends_with_a_sentence(forks, script):
    sentence = "interrupted: to go on, repeat the command with --resume_from_checkpoint latest\n"
    said = stderr_of(forks / script / "0")
    assert said.endswith(sentence)
    assert "Traceback" not in said


# ---- Runs in this process ------------------------------------------------------------------------
def test_a_run_resumed_after_its_first_update_is_the_same_run(run_main, tmp_path):
    """The KL's reference is the start adapter then, too. A torn last line is left out."""
    (tmp_path / "variety.py").write_text(VARIETY)
    flags = {
        "max_steps": 2, "eval_steps": 1, "save_steps": 1, "beta": 0.05, "lora_dropout": 0.1,
        "reward_funcs": "variety.pay", "start_adapter": make_adapter(tmp_path / "start"),
    }  # fmt: skip
    assert run_main(**flags)[0] == 0
    whole = outcome(tmp_path)
    out = tmp_path / "out"
    assert [row["step"] for row in whole["metrics"]] == [0, 1, 1, 2, 2]
    assert whole["metrics"][3]["grad_norm"] > 0
    lines = (out / "metrics.jsonl").read_text().splitlines(keepends=True)
    (out / "metrics.jsonl").write_text("".join(lines[:3]) + lines[3][:20])
    shutil.rmtree(out / "checkpoint-2")
    assert run_main(**flags, **GO_ON)[0] == 1  # it has ended, and would be made again
    (out / "summary.json").unlink()
    shutil.rmtree(out / "adapter")
    assert run_main(**flags, **GO_ON)[0] == 0
    assert outcome(tmp_path) == whole


def test_a_run_that_ended_inside_a_rollout_is_not_made_longer(run_main):
    """The rest of the rollout's updates would be on samples of another policy."""
    assert run_main(steps_per_generation=2, max_steps=1)[0] == 0
    code, _, said = run_main(steps_per_generation=2, max_steps=3, **GO_ON)
    assert code == 1 and "between two updates on a rollout" in said
    assert run_main(steps_per_generation=2, max_steps=1, **GO_ON)[0] == 0


def test_a_folder_has_one_run_at_a_time(run_main, monkeypatch):
    """A second one is refused, also one that would go on, until the first has failed."""
    said = []

    def train_beside_another(run):
        with monkeypatch.context() as patch:
            patch.setattr(grpo_arca, "train", train)
            said.append(run_main(max_steps=0, **GO_ON))
        raise OSError("the first has failed")

    train = grpo_arca.train
    with monkeypatch.context() as patch, pytest.raises(OSError, match="the first has failed"):
        patch.setattr(grpo_arca, "train", train_beside_another)
        run_main(max_steps=0)
    ((code, _, sentence),) = said
    assert code == 1 and "another run is writing into out" in sentence
    assert run_main(max_steps=0, **GO_ON)[0] == 0


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


# ---- Checkpoints ---------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def first(make_run, tmp_path_factory):
    """A run with a checkpoint-1 in its folder. It starts from an adapter."""
    folder = tmp_path_factory.mktemp("first")
    adapter = make_adapter(folder / "adapter")
    run = make_run(output_dir=folder / "out", start_adapter=adapter, adapter=None)
    (folder / "out").mkdir()
    grpo_arca.update(run, [random_batch()])  # so that the optimizer has a state
    run.step = 1
    grpo_arca.save_checkpoint(run)
    return run


@pytest.fixture
def again(first, make_run):
    """again(flag=value, ...) -> a run with the first one's flags but for these, not yet resumed."""

    def make(**changes):
        flags = {"output_dir": first.args.output_dir, "start_adapter": first.args.start_adapter}
        return make_run(adapter=None, **flags | GO_ON | changes)

    return make


def test_a_run_is_neither_overwritten_nor_continued_unasked(again, first, tmp_path, monkeypatch):
    """With a checkpoint, before its first one, and where it has ended without one.

    An adapter that is left of a run is not replaced, either.
    """
    run = again()
    monkeypatch.setattr(run.args, "resume_from_checkpoint", None)
    sentence = "holds a run: change --output_dir, or go on from its newest checkpoint"
    assert sentence in refusal(grpo_arca.resume, run)
    monkeypatch.setattr(run.args, "output_dir", str(tmp_path))
    grpo_arca.resume(run)  # a new folder
    (tmp_path / "adapter").mkdir()
    assert sentence in refusal(grpo_arca.resume, run)
    (tmp_path / "adapter").rmdir()
    (tmp_path / "metrics.jsonl").touch()
    assert sentence in refusal(grpo_arca.resume, run)
    monkeypatch.setattr(run.args, "resume_from_checkpoint", "latest")
    grpo_arca.resume(run)  # from the start: it had crashed
    (tmp_path / "summary.json").write_text('{"steps": 0}')
    assert sentence in refusal(grpo_arca.resume, run)
    assert run.step == 0


def scaled(folder: str, copy: Path, name: str) -> str:
    """Copies a folder of weights, and makes one matrix slightly larger."""
    shutil.copytree(folder, copy)
    (path,) = copy.glob("*.safetensors")
    weights = load_file(path)
    weights[name] *= 1.01
    save_file(weights, path, metadata={"format": "pt"})
    return str(copy)


UP_PROJ = "model.layers.0.mlp.up_proj.weight"
LORA = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
CHANGES = {
    "dtype": "bfloat16",
    "load_in_4bit": False,
    "num_generations": 8,  # the same number of completions
    "gradient_accumulation_steps": 2,
    "num_iterations": 2,
    "max_eval_samples": 7,
    "system_prompt": "Be brief.",
    "seed": 2,  # other problems of the embedded task
    "max_steps": 0,  # the checkpoint is past it
}


@pytest.mark.parametrize("name", [*CHANGES, "base", "start_adapter", "lora_alpha"])
def test_what_defines_policy_and_data_must_stay(again, first, tmp_path, name):
    """A run that went on with another scale or base would be ruined, without an error."""
    changes = {name: CHANGES.get(name)}
    if name == "base":
        changes = {"model": scaled(TINY, tmp_path / "base", UP_PROJ)}
    elif name == "start_adapter":
        changes[name] = scaled(first.args.start_adapter, tmp_path / "start", LORA)
    elif name == "lora_alpha":
        changes = {"start_adapter": make_adapter(tmp_path / "start", lora_alpha=13)}
    run = again(**changes)
    assert "checkpoint-1 has another model, start adapter" in refusal(grpo_arca.resume, run)
    assert run.step == 0


def test_the_identity_is_of_every_byte_of_the_base(make_run):
    """And of its config and stop tokens. Also where the sum of the bytes stays: weights of twice
    the size have the same codes, and rows that change places the same numbers. Of the adapter,
    which is new and acts, it is of the scale alone: with another one, greedy accuracy fell from 91%
    to 6%."""
    run = make_run()
    found = [run.identity, grpo_arca.identity_of(run), make_run(lora_alpha=32).identity]
    base = run.model.get_base_model().model
    scales = base.layers[0].mlp.up_proj.weight.quant_state
    scales.state2.absmax *= 2
    scales.offset *= 2
    found.append(grpo_arca.identity_of(run))
    norm = base.norm.weight.data
    norm.copy_(norm.flip(0))
    found.append(grpo_arca.identity_of(run))
    embedding = base.embed_tokens.weight.data
    embedding[:2] = embedding[:2].flip(0)
    found.append(grpo_arca.identity_of(run))
    run.model.config.rope_parameters["rope_theta"] *= 2
    found.append(grpo_arca.identity_of(run))
    run.eos_ids = run.eos_ids + 1
    found.append(grpo_arca.identity_of(run))
    assert found[0] == found[1] and len(set(found)) == 7


def test_the_identity_does_not_depend_on_the_number_of_threads(make_run, tmp_path):
    """The mean of 2^16 scales does, in its last bits."""
    config = Qwen3Config(
        vocab_size=448, hidden_size=64, intermediate_size=2**16, num_hidden_layers=2,
        num_attention_heads=1, num_key_value_heads=1, head_dim=64,
    )  # fmt: skip
    identities = set()
    for threads in (2, 1):
        torch.set_num_threads(threads)
        copy = save_model(tmp_path / f"{threads}", config)  # else it would not be loaded again
        identities.add(make_run(model=str(copy)).identity)
        assert torch.get_num_threads() == threads
    assert len(identities) == 1


def test_what_only_steers_training_may_change(again, first, tmp_path, capsys):
    """And the base's path may be another one, as its numbers are the same."""
    (tmp_path / "link").symlink_to(TINY)
    copy = shutil.copytree(first.args.start_adapter, tmp_path / "start")
    run = again(
        learning_rate=1e-3, beta=0.1, epsilon=0.1, model=str(tmp_path / "link"), start_adapter=copy
    )
    grpo_arca.resume(run)
    assert run.step == 1
    assert "'learning_rate': 0.001" in capsys.readouterr().out
    for ours, theirs in zip(run.model.parameters(), first.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    row = grpo_arca.update(run, [random_batch()])
    assert row["learning_rate"] == pytest.approx(1e-3 * 2 / 3)  # the second of three of warm-up


def test_another_programs_checkpoint_is_not_called_damaged(again, tmp_path):
    (tmp_path / "out/checkpoint-500").mkdir(parents=True)
    sentence = refusal(grpo_arca.resume, again(output_dir=tmp_path / "out"))
    assert "checkpoint-500 has no state.pt" in sentence and "damaged" not in sentence


@pytest.mark.parametrize(
    ("damage", "error", "says"),
    [
        ("a flipped bit", SystemExit, "checkpoint-1 is damaged: delete it"),
        ("torn", SystemExit, "checkpoint-1 is damaged: delete it"),
        ("a pickle of something else", UnpicklingError, ""),
        ("a weight less", SystemExit, "layers of the adapter"),
    ],
)
def test_a_damaged_checkpoint_is_not_used(again, first, tmp_path, damage, error, says):
    """PyTorch's reader would take a flipped bit for a weight."""
    out = shutil.copytree(first.args.output_dir, tmp_path / "out")
    path = out / "checkpoint-1/state.pt"
    state = torch.load(path, weights_only=True)
    state["adapter"].popitem()
    saved = {"a pickle of something else": {"step": Path("stranger")}, "a weight less": state}
    content = bytearray(path.read_bytes())
    weight = next(iter(first.adapter.values()))
    content[content.index(weight.numpy().tobytes()) + 10] ^= 1
    if damage == "torn":
        content = content[: len(content) // 2]
    path.write_bytes(content)
    if damage in saved:
        torch.save(saved[damage], path)
    run = again(output_dir=out)
    assert says in refusal(grpo_arca.resume, run, error=error)
    assert run.step == 0


def test_the_latest_and_the_best_checkpoint_are_kept(first, tmp_path, monkeypatch):
    """A folder that only looks like a checkpoint is left alone."""
    monkeypatch.setattr(first.args, "output_dir", str(tmp_path))
    monkeypatch.setattr(first.args, "save_total_limit", 2)
    monkeypatch.setattr(first, "log", mock.Mock(best_step=8), raising=False)
    (tmp_path / "checkpoint-2-good").mkdir()
    for step in (8, 9, 10, 11):
        monkeypatch.setattr(first, "step", step)
        grpo_arca.save_checkpoint(first)
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"checkpoint-2-good", "checkpoint-8", "checkpoint-10", "checkpoint-11"}
    assert grpo_arca.checkpoints(str(tmp_path))[-1] == 11
    files = {path.name for path in (tmp_path / "checkpoint-11").iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors", "state.pt"} <= files
