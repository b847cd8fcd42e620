"""A run that starts from a LoRA adapter: it takes the adapter's weights and settings, and with
--beta the adapter, as it was at the start, is the reference."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from accelerate.state import AcceleratorState
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from support import (
    ROOT,
    TIMES,
    TINY,
    TINY_RUN,
    command_line,
    random_batch,
    randomize_adapter,
    unscored,
)
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen2Config

import grpo_arca as trainer
from common.data import DataError

RANK = 4
ALPHA = 12
TARGETS = {"q_proj", "up_proj"}
WEIGHTS = "adapter_model.safetensors"


def make_adapter(folder: Path, base_name: str = TINY, **more) -> str:
    """Writes an adapter that acts, made by PEFT alone, and returns its folder."""
    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_pretrained(base_name, dtype=torch.float32)
    lora = LoraConfig(
        task_type="CAUSAL_LM", r=RANK, lora_alpha=ALPHA, target_modules=sorted(TARGETS), **more
    )
    model = get_peft_model(base, lora)
    randomize_adapter(model, scale=0.1)
    model.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def adapter(tmp_path_factory) -> str:
    return make_adapter(tmp_path_factory.mktemp("adapter"))


@pytest.fixture
def copied(adapter, tmp_path) -> Path:
    """A copy of the adapter, to be damaged."""
    return Path(shutil.copytree(adapter, tmp_path / "copied"))


def start(folder: str, **flags) -> trainer.Run:
    """Returns the run that these flags build."""
    argv = ["--model_name_or_path", folder, "--per_device_train_batch_size", "8"]
    argv += ["--gradient_accumulation_steps", "1", "--num_generations", "4"]
    for name, value in flags.items():
        argv += [f"--{name}", str(value)]
    AcceleratorState._reset_state()
    return trainer.build_run(trainer.parse_args(argv), AutoTokenizer.from_pretrained(TINY))


def refused(argv: list[str], capsys) -> str:
    """Returns the sentence with which the flags or the set-up are refused."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        AcceleratorState._reset_state()
        trainer.build_run(trainer.parse_args(argv), AutoTokenizer.from_pretrained(TINY))
    out, err = capsys.readouterr()
    sentences = [line for line in err.splitlines() if line.startswith("grpo_arca.py: error: ")]
    assert stop.value.code == 2 and not out and len(sentences) == 1, err
    assert "Traceback" not in err and sentences == err.splitlines()
    return sentences[0]


def trained(run: trainer.Run) -> dict[str, torch.Tensor]:
    named = run.model.named_parameters()
    return {name: parameter for name, parameter in named if parameter.requires_grad}


# ---- What is taken from the adapter --------------------------------------------------------------
def test_weights_rank_alpha_and_targets_are_the_adapters(adapter):
    run = start(adapter)
    saved = load_file(Path(adapter, WEIGHTS))
    ours = {name.replace(".default", ""): tensor for name, tensor in trained(run).items()}
    assert ours.keys() == saved.keys()
    for name, tensor in saved.items():
        assert torch.equal(ours[name], tensor), name

    assert (run.args.lora_r, run.args.lora_alpha) == (RANK, ALPHA)
    assert set(run.args.lora_target_modules) == TARGETS
    layers = {
        name: module for name, module in run.model.named_modules() if hasattr(module, "lora_A")
    }
    assert {name.rpartition(".")[2] for name in layers} == TARGETS
    assert all(layer.scaling["default"] == ALPHA / RANK for layer in layers.values())
    assert hasattr(next(iter(layers.values())).base_layer, "compute_dtype")  # the base is in NF4


def test_the_base_is_the_one_that_the_adapter_names(adapter):
    args = trainer.parse_args(["--model_name_or_path", adapter])
    assert args.model_name_or_path == TINY and args.start_adapter == adapter
    assert args.model_revision == "main"
    assert trainer.parse_args([]).start_adapter is None


def test_defaults_of_the_embedded_policies_apply_where_the_base_is_one(adapter, copied):
    args = trainer.parse_args(["--model_name_or_path", adapter])
    assert args.learning_rate == trainer.EMBEDDED_DEFAULTS["learning_rate"]
    assert args.max_steps == trainer.EMBEDDED_DEFAULTS["max_steps"]
    given = trainer.parse_args(["--model_name_or_path", adapter, "--learning_rate", "1e-3"])
    assert given.learning_rate == 1e-3

    change_config(copied, base_model_name_or_path="nobody/other")
    other = trainer.parse_args(["--model_name_or_path", str(copied)])
    assert other.learning_rate == trainer.Args.learning_rate
    assert other.model_name_or_path == "nobody/other"


@pytest.mark.parametrize(
    "given", [["--lora_r", "4"], ["--lora-alpha=12"], ["--lora_target_modules", "q_proj"]]
)
@pytest.mark.parametrize("from_shell", [True, False])
def test_a_lora_flag_beside_it_is_refused(adapter, capsys, monkeypatch, given, from_shell):
    """Even one that gives the adapter's own value: which of the two counts would be a guess."""
    argv = ["--model_name_or_path", adapter, *given]
    monkeypatch.setattr(sys, "argv", ["grpo_arca.py", *argv])
    with pytest.raises(SystemExit) as stop:
        trainer.parse_args(None if from_shell else argv)
    name = given[0].partition("=")[0]
    assert stop.value.code == 2
    assert f"error: {name} is given by {adapter}: drop it" in capsys.readouterr().err
    assert trainer.parse_args(given).start_adapter is None  # beside a model it is welcome


# ---- The reference -------------------------------------------------------------------------------
@torch.no_grad()
def peft_logp(adapter: str, batch: trainer.Batch) -> torch.Tensor:
    """Returns log-probs [B, T] of base and adapter, loaded by PEFT alone, row by row."""
    base = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32)
    model = PeftModel.from_pretrained(base, adapter).eval()
    result = torch.zeros(batch.mask.shape)
    for row, (ids, real, mask) in enumerate(
        zip(batch.ids, batch.attention, batch.mask, strict=True)
    ):
        tokens = ids[real]
        length = int(mask.sum())
        logp = model(tokens[None]).logits[0, -length - 1 : -1].log_softmax(-1)
        result[row, :length] = logp.gather(1, tokens[-length:, None]).squeeze(1)
    return result


@pytest.mark.parametrize("credit", ["arca", "surprisal"])
def test_the_reference_is_the_adapter_at_the_start(adapter, credit):
    """ARCA's own forward without an adapter, which comes after, does not replace it."""
    run = start(adapter, beta=0.1, credit=credit, load_in_4bit=False, dtype="float32")
    batch = unscored(random_batch())
    expected = peft_logp(adapter, batch)
    batch.sampled_logp = torch.where(batch.mask, expected + 0.3 * torch.randn(expected.shape), 0.0)
    randomize_adapter(run.model, scale=0.3)  # as if it had been trained since

    metrics: dict[str, float] = {}
    trainer.score(run, batch, [batch], metrics)
    torch.testing.assert_close(batch.base_logp, expected, atol=1e-4, rtol=0)
    log_ratio = (expected - batch.sampled_logp)[batch.loss_mask]
    kl = (log_ratio.exp() - log_ratio - 1).mean().item()
    assert kl > 0.01 and metrics["kl"] == pytest.approx(kl, rel=1e-3)
    with torch.no_grad():
        present, _ = run.policy(batch)
    assert (present - expected).abs().max() > 0.1  # which moved away from it


def test_the_first_update_has_no_kl_to_the_start(adapter):
    """Its loss with --beta is the loss without: the policy still is the reference."""
    losses = []
    for beta in (0.0, 0.5):
        run = start(adapter, beta=beta, credit="uniform")
        batch = unscored(random_batch())
        trainer.score(run, batch, [batch], {})
        losses.append(trainer.update(run, [batch])["loss"])
    assert losses[0] != 0 and losses[1] == pytest.approx(losses[0], abs=1e-6)


def test_the_present_weights_come_back_whatever_happens(adapter):
    run = start(adapter, beta=0.1)
    randomize_adapter(run.model, scale=0.3)
    parameters = trained(run)
    before = {name: parameter.data.clone() for name, parameter in parameters.items()}
    with pytest.raises(KeyError), trainer.reference_weights(run):
        for name, parameter in parameters.items():
            assert torch.equal(parameter, run.start_weights[name])
        raise KeyError("in the middle of a forward pass")
    for name, parameter in trained(run).items():
        assert parameter is parameters[name]  # the optimizer's own
        assert torch.equal(parameter, before[name]), name


def test_updates_do_not_move_the_reference(adapter):
    run = start(adapter, beta=0.1)
    saved = load_file(Path(adapter, WEIGHTS))
    batch = random_batch()
    trainer.update(run, [batch])
    moved = 0
    for name, parameter in trained(run).items():
        start_weight = run.start_weights[name]
        assert torch.equal(start_weight, saved[name.replace(".default", "")])
        moved += not torch.equal(parameter, start_weight)
    assert moved > 0


# ---- Whole runs ----------------------------------------------------------------------------------
RUN = {"beta": 0.05, "save_steps": 1, "max_steps": 2, "learning_rate": 0.02}
RUN |= {"reward_funcs": "variety.pay", "max_completion_length": 24}
VARIETY = (
    "def pay(completion_ids, **_):\n    return [len(set(ids)) / 10 for ids in completion_ids]\n"
)


@pytest.fixture
def variety(tmp_path, monkeypatch):
    """A reward that a policy without training earns as well, so that there are gradients."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "variety", raising=False)  # another test's
    (tmp_path / "variety.py").write_text(VARIETY)


def rows_without_times(out: Path) -> list[dict]:
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if not k.startswith(TIMES)} for row in rows]


def test_a_run_is_resumed_to_the_bit_and_names_its_base(run_main, tmp_path, adapter, variety):
    """The reference is the adapter at the start, not the one in the checkpoint."""
    code, _, err = run_main(model_name_or_path=adapter, **RUN)
    assert code == 0, err
    out = tmp_path / "out"
    rows = rows_without_times(out)
    weights = (out / "adapter" / WEIGHTS).read_bytes()
    assert next(row["kl"] for row in rows if "kl" in row) == pytest.approx(0, abs=1e-3)
    assert any(row.get("grad_norm", 0) > 0 for row in rows)
    config = json.loads((out / "adapter/adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == TINY
    assert (config["r"], config["lora_alpha"]) == (RANK, ALPHA)
    card = (out / "adapter/README.md").read_text()
    assert f"base_model: {TINY}\n" in card
    flags = [line for line in card.splitlines() if line.startswith("--")]
    assert f'--model_name_or_path "{adapter}"' in flags  # those that would run it again
    assert not [line for line in flags if line.startswith(("--lora_", "--start_"))]

    for name in ("checkpoint-2", "adapter"):
        shutil.rmtree(out / name)
    code, _, err = run_main(model_name_or_path=adapter, resume_from_checkpoint="latest", **RUN)
    assert code == 0, err
    assert rows_without_times(out) == rows
    assert (out / "adapter" / WEIGHTS).read_bytes() == weights


def test_a_runs_own_adapter_is_a_start(run_main, step_on_trial, tmp_path):
    """A curriculum is two commands: the second begins where the first ended."""
    flags = {"max_steps": 2, "learning_rate": 0.02, "max_completion_length": 80}
    flags |= {"max_eval_samples": 8, "num_generations_eval": 2}
    assert run_main(**flags)[0] == 0
    again = {"model_name_or_path": "out/adapter", "output_dir": "second", "max_steps": 0}
    code, _, err = run_main(**(flags | again))
    assert code == 0, err
    first = [row["eval"] for row in rows_without_times(tmp_path / "out") if "eval" in row]
    second = [row["eval"] for row in rows_without_times(tmp_path / "second") if "eval" in row]
    texts = [
        [json.loads(line)["completion"] for line in lines if json.loads(line)["eval"]]
        for lines in (
            (tmp_path / folder / "completions.jsonl").read_text().splitlines()
            for folder in ("out", "second")
        )
    ]
    assert second == [first[-1]]
    half = len(texts[0]) // 2  # of the evaluations before and after training
    assert texts[0][half:] == texts[1] != texts[0][:half]


@pytest.mark.slow
def test_resuming_from_another_start_is_refused(run_main, tmp_path, adapter, copied, variety):
    """The reference of --beta would be another one; and a new adapter has none."""
    weights = load_file(copied / WEIGHTS)
    save_file({name: 1.5 * tensor for name, tensor in weights.items()}, copied / WEIGHTS)
    flags = RUN | {"max_steps": 1}
    assert run_main(model_name_or_path=adapter, **flags)[0] == 0
    out = tmp_path / "out"
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    lora = {"lora_r": RANK, "lora_alpha": ALPHA, "lora_target_modules": "q_proj"}
    for start_flags in ({"model_name_or_path": copied}, lora):
        code, _, err = run_main(**(flags | start_flags), resume_from_checkpoint="latest")
        errors = [line for line in err.splitlines() if "error: " in line]
        assert code == 2 and len(errors) == 1 and "Traceback" not in err
        assert "it belongs to another model" in errors[0]
        after = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
        assert after == before


# ---- What is no adapter --------------------------------------------------------------------------
def change_config(folder: Path, **changes) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


CONFIGS = {
    "of another kind": {"peft_type": "IA3"},
    "of no kind": {"peft_type": None},
    "without its base": {"base_model_name_or_path": None},
    "whose base is a number": {"base_model_name_or_path": 3},
    "whose rank is a text": {"r": "four"},
    "whose rank is 0": {"r": 0},
    "whose rank is a list": {"r": [4]},
    "whose alpha is missing": {"lora_alpha": None},
    "whose dropout is a text": {"lora_dropout": "none"},
    "whose targets are a number": {"target_modules": 5},
    "whose targets are numbers": {"target_modules": [5, 6]},
    "whose targets are missing": {"target_modules": None},
    "whose revision is a number": {"revision": 5},
    "whose targets match nothing": {"target_modules": ["another"]},
}


@pytest.mark.parametrize("change", CONFIGS)
def test_an_adapter_that_cannot_be_used_is_one_sentence(copied, capsys, change):
    change_config(copied, **CONFIGS[change])
    assert str(copied) in refused(["--model_name_or_path", str(copied)], capsys)


VARIANTS = {
    "DoRA": {"use_dora": True},
    "activated LoRA": {"alora_invocation_tokens": [250, 251]},
    "a bias of LoRA": {"lora_bias": True},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_variant_that_rollouts_do_not_apply_is_refused(tmp_path, capsys, variant):
    """Rollouts would come from another policy than the one that is trained, or nothing learn."""
    folder = make_adapter(tmp_path / "variant", **VARIANTS[variant])
    sentence = refused(["--model_name_or_path", folder], capsys)
    assert f"{folder} is a variant of LoRA" in sentence


def test_a_variant_that_changes_only_how_matrices_begin_or_scale_is_none(tmp_path):
    start(make_adapter(tmp_path / "variant", use_rslora=True, rank_pattern={"up_proj": 2}))


def test_trained_biases_are_refused(tmp_path, capsys):
    base = AutoModelForCausalLM.from_config(
        Qwen2Config(
            vocab_size=448, hidden_size=32, intermediate_size=64, num_hidden_layers=1,
            num_attention_heads=4, num_key_value_heads=2,
        )
    )  # fmt: skip
    base.save_pretrained(tmp_path / "base")
    AutoTokenizer.from_pretrained(TINY).save_pretrained(tmp_path / "base")
    folder = make_adapter(tmp_path / "biases", str(tmp_path / "base"), bias="lora_only")
    assert "trains biases" in refused(["--model_name_or_path", folder], capsys)


def test_whole_modules_are_trained_in_float32_alone(tmp_path, capsys):
    """In bf16 a step changes one entry in a hundred; the rest is rounded away."""
    folder = make_adapter(tmp_path / "head", modules_to_save=["lm_head"])
    assert any("lm_head" in name for name in trained(start(folder)))
    sentence = refused(["--model_name_or_path", folder, "--dtype", "bfloat16"], capsys)
    assert "set --dtype float32" in sentence


def test_a_new_adapter_names_the_revision_of_its_base(tmp_path):
    """Else a run that starts from it would train on the base's newest revision."""
    run = start(TINY, model_revision="v1.0")  # of a folder, the revision is not looked for
    run.model.save_pretrained(tmp_path / "saved")
    args = trainer.parse_args(["--model_name_or_path", str(tmp_path / "saved")])
    assert args.model_revision == "v1.0"


OTHER_TOKENIZERS = {
    "chat_template": "{{ messages[0]['content'] }}\nAnswer: ",
    "eos_token": "<pad>",
}


@pytest.mark.parametrize("name", OTHER_TOKENIZERS)
def test_an_adapter_with_another_template_or_end_is_refused(copied, name):
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    args = trainer.parse_args(["--model_name_or_path", str(copied)])
    tokenizer.save_pretrained(copied)  # as the trainers of transformers and TRL do
    trainer.load_data(args)
    assert getattr(tokenizer, name) != OTHER_TOKENIZERS[name]
    setattr(tokenizer, name, OTHER_TOKENIZERS[name])
    tokenizer.save_pretrained(copied)
    with pytest.raises(DataError, match="another chat template or end token"):
        trainer.load_data(args)


@pytest.mark.parametrize("text", ["", "{", "[]", "3", '{"peft_type": "LORA"}', "\x00"])
def test_a_damaged_config_is_one_sentence(copied, capsys, text):
    (copied / "adapter_config.json").write_text(text)
    assert str(copied) in refused(["--model_name_or_path", str(copied)], capsys)


def test_missing_and_damaged_weights_are_one_sentence(copied, capsys):
    """PEFT itself would leave the layers without weights as they are when new."""
    argv = ["--model_name_or_path", str(copied)]
    weights = load_file(copied / WEIGHTS)
    name = sorted(weights)[0]
    incomplete = {key: tensor for key, tensor in weights.items() if key != name}
    save_file(incomplete, copied / WEIGHTS)
    assert name.removesuffix(".weight") in refused(argv, capsys)
    save_file(weights | {name: weights[name][:2].clone()}, copied / WEIGHTS)
    refused(argv, capsys)
    (copied / WEIGHTS).write_bytes(b"torn")
    refused(argv, capsys)
    (copied / WEIGHTS).unlink()
    assert str(copied) in refused(argv, capsys)


def test_the_folder_of_a_run_is_no_model(adapter, tmp_path, capsys):
    shutil.copytree(adapter, tmp_path / "run/adapter")
    sentence = refused(["--model_name_or_path", str(tmp_path / "run")], capsys)
    assert sentence.endswith(f"name {tmp_path}/run/adapter")


@pytest.mark.parametrize("name", ["a b", "x/y/z", "/no/model", "nobody/nothing", ""])
def test_a_name_of_nothing_is_no_adapter(name, capsys):
    """It is the model's sentence that says so, later."""
    assert trainer.find_adapter(name, "main") == (None, {})


# ---- Two processes -------------------------------------------------------------------------------
@pytest.mark.slow
def test_two_processes_take_the_same_steps_as_one(adapter, tmp_path, variety):
    """With DDP, and --beta to the adapter at the start."""
    flags = TINY_RUN | RUN | {"model_name_or_path": adapter}
    results = []
    for processes in (1, 2):
        out = tmp_path / str(processes)
        flags |= {"output_dir": out, "per_device_train_batch_size": 16 // processes}
        command = [sys.executable, "-m", "accelerate.commands.launch"]
        if processes > 1:
            command += ["--multi_gpu", "--num_processes", "2", "--main_process_port", "0"]
        command += [str(ROOT / "grpo_arca.py"), *command_line(flags)]
        done = subprocess.run(
            command,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=600,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        assert done.returncode == 0, done.stderr[-3000:]
        rows = [row for row in rows_without_times(out) if "reward" in row]
        results.append((rows, load_file(out / "adapter" / WEIGHTS)))

    (rows, weights), (split_rows, split_weights) = results
    for whole, split in zip(rows, split_rows, strict=True):
        for name in ("reward", "kl", "grad_norm", "completion_length", "loss"):
            assert split[name] == pytest.approx(whole[name], rel=1e-3, abs=1e-6), name
    assert rows[1]["kl"] > 0 and rows[0]["grad_norm"] > 0
    start_weights = load_file(Path(adapter, WEIGHTS))
    for name, weight in weights.items():
        moved = (weight - start_weights[name]).abs().max()
        assert (split_weights[name] - weight).abs().max() <= 0.01 * moved, name
