"""Models, data and folders that cannot be used: one sentence, before a step is taken."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import transformers
from support import ROOT, TINY, one_sentence, refusal

import grpo_arca as trainer


@pytest.fixture(autouse=True)
def elsewhere(monkeypatch, tmp_path):
    """A run that gets too far must write no files here."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def no_model(monkeypatch):
    """Loading a model is a failure of the test."""

    def refuse(*_, **__):
        raise AssertionError("a model was loaded before the mistake was found")

    monkeypatch.setattr(trainer, "load_policy", refuse)
    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", refuse)


@pytest.fixture
def refused_run(monkeypatch, capfd):
    """refused_run("--flag", "value", ...) -> the sentence that main ends with."""

    def run(*argv: str) -> str:
        monkeypatch.setattr(sys, "argv", ["grpo_arca.py", *argv])
        return refusal(trainer.main, capfd)

    return run


# ---- Data and names ------------------------------------------------------------------------------
ROWS = [{"problem": f"What is {i} + {i}?", "answer": str(2 * i)} for i in range(20)]


def jsonl(rows) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


@pytest.mark.parametrize(
    "name, content, flags, words",
    [
        ("none.jsonl", None, "", ["none.jsonl", "check"]),
        ("none.parquet", None, "", ["none.parquet", "check"]),
        ("empty.jsonl", "", "", ["empty.jsonl", "empty", "give"]),
        ("blank.jsonl", "\n\n", "", ["blank.jsonl", "no rows"]),
        ("list.json", "[]", "", ["list.json", "no rows"]),
        ("torn.jsonl", jsonl(ROWS) + '{"problem": "a", "ans', "", ["torn.jsonl", "check the file"]),
        ("torn.parquet", "PAR1", "", ["torn.parquet", "check"]),
        ("columns.jsonl", '{"text": "a", "label": 1}\n', "", ["text, label", "--prompt_column"]),
        ("columns.jsonl", '{"problem": "a", "label": 1}\n', "", ["label", "--answer_column"]),
        ("set.jsonl", jsonl(ROWS), "--prompt_column q", ["no q", "problem", "--prompt_column"]),
        ("set.jsonl", jsonl(ROWS), "--answer_column a", ["no a", "answer", "--answer_column"]),
        ("one.jsonl", jsonl(ROWS[:1]), "", ["one.jsonl", "add rows"]),
        ("shape.jsonl", '{"prompt": ["a"], "answer": "1"}\n', "", ["--prompt_column", "messages"]),
        ("set.jsonl", jsonl(ROWS), "--eval_dataset_name no.jsonl", ["no.jsonl", "check"]),
    ],
)
def test_data_that_cannot_be_used(refused_run, no_model, name, content, flags, words):
    if content is not None:
        Path(name).write_text(content)
    sentence = refused_run("--dataset_name", name, *flags.split())
    assert all(word in sentence for word in words), sentence


@pytest.mark.parametrize(
    "flags, words",
    [
        ("--dataset_name nobody/nothing", ["nobody/nothing", "check the name"]),
        ("--eval_dataset_name nobody/nothing", ["nobody/nothing", "check the name"]),
        ("--model_name_or_path nobody/nothing", ["--model_name_or_path nobody/nothing"]),
        ("--model_name_or_path /no/model", ["--model_name_or_path /no/model"]),
        ("--model_name_or_path .", ["--model_name_or_path ."]),  # a folder without a model
        ("--chat_template_kwargs enable_thinking", ["--chat_template_kwargs", "JSON"]),
        ("--chat_template_kwargs [1]", ["--chat_template_kwargs", "JSON"]),
        ("--chat_template_kwargs {", ["--chat_template_kwargs", "JSON"]),
        ("--max_completion_length 2040", ["--max_completion_length", "2048", "or less"]),
    ],
)
def test_names_and_lengths_that_lead_nowhere(refused_run, no_model, flags, words):
    """Without a network: support.py sets HF_HUB_OFFLINE."""
    assert os.environ["HF_HUB_OFFLINE"] == "1"
    sentence = refused_run(*flags.split())
    assert all(word in sentence for word in words), sentence


def test_a_prompt_longer_than_the_context(refused_run, no_model):
    Path("long.jsonl").write_text(jsonl([*ROWS, {"problem": "1" * 3000, "answer": "1"}]))
    sentence = refused_run("--dataset_name", "long.jsonl")
    assert "2048" in sentence and not re.search(r" -\d", sentence), sentence


# ---- Models and folders --------------------------------------------------------------------------
def copy_of_tiny(*names: str) -> Path:
    folder = Path("model").resolve()
    folder.mkdir()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", *names):
        shutil.copy(Path(TINY) / name, folder / name)
    return folder


def test_a_tokenizer_without_eos(refused_run, no_model):
    folder = copy_of_tiny("chat_template.jinja")
    config = json.loads((folder / "tokenizer_config.json").read_text())
    del config["eos_token"]
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    sentence = refused_run("--model_name_or_path", str(folder))
    assert "EOS" in sentence and "eos_token" in sentence, sentence


def test_a_folder_without_tokenizer(refused_run, no_model):
    folder = copy_of_tiny()
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer_config.json").unlink()
    assert str(folder) in refused_run("--model_name_or_path", str(folder))


def test_a_template_that_refuses_the_system_prompt(refused_run, no_model):
    folder = copy_of_tiny()
    (folder / "chat_template.jinja").write_text("{{ raise_exception('no system role here') }}")
    sentence = refused_run("--model_name_or_path", str(folder), "--system_prompt", "Be brief.")
    assert "--system_prompt" in sentence and "no system role here" in sentence, sentence


def test_a_folder_without_weights(refused_run):
    sentence = refused_run("--model_name_or_path", str(copy_of_tiny()))
    assert "cannot load" in sentence and "no file named model.safetensors" in sentence, sentence


QUANTIZED = {
    "fp4": {"load_in_4bit": True, "bnb_4bit_quant_type": "fp4"},
    "another format": {"load_in_8bit": True},
    "set --dtype": {
        "load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": "bfloat16",
    },
}  # fmt: skip


@pytest.mark.parametrize("words", QUANTIZED)
def test_a_model_that_was_quantized_otherwise(refused_run, tmp_path, words):
    """The flags, the introduction and the adapter's card would not say what it is."""
    config = transformers.BitsAndBytesConfig(**QUANTIZED[words])
    model = transformers.AutoModelForCausalLM.from_pretrained(
        TINY, quantization_config=config, dtype="float32", device_map={"": "cpu"}
    )
    model.save_pretrained(tmp_path / "quantized")
    transformers.AutoTokenizer.from_pretrained(TINY).save_pretrained(tmp_path / "quantized")
    sentence = refused_run(
        "--model_name_or_path", str(tmp_path / "quantized"), "--dtype", "float32"
    )
    assert words in sentence
    sentence = refused_run(
        "--model_name_or_path", str(tmp_path / "quantized"), "--load_in_4bit", "False"
    )
    assert "is quantized already: leave --load_in_4bit False out" in sentence


def test_lora_target_modules_that_do_not_exist(refused_run):
    sentence = refused_run("--lora_target_modules", "q_proj_of_another", "another")
    assert "with LoRA on q_proj_of_another another: Target modules" in sentence, sentence


def test_an_output_folder_that_is_a_file(refused_run):
    """Found before the first evaluation, not after the last step."""
    Path("taken").write_text("")
    sentence = refused_run("--output_dir", "taken/run")
    assert "taken/run" in sentence, sentence


def test_a_file_where_the_adapter_would_be_written(refused_run):
    """Found before the first step, too."""
    Path("out").mkdir()
    Path("out/adapter").write_text("mine")
    sentence = refused_run("--output_dir", "out")
    assert "out/adapter" in sentence, sentence
    assert [path.name for path in Path("out").iterdir()] == ["adapter"]


@pytest.mark.slow  # what an interpreter of its own may add to test_data_that_cannot_be_used
def test_the_command_itself():
    Path("torn.jsonl").write_text('{"problem": "a", "ans')
    done = subprocess.run(
        [sys.executable, str(ROOT / "grpo_arca.py"), "--dataset_name", "torn.jsonl"],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 2 and done.stdout == ""
    sentence = one_sentence(done.stderr)
    assert "torn.jsonl" in sentence and "check the file" in sentence
