"""Flags of other programs, numbers beyond all ranges, a nonsensical environment, escape codes."""

import importlib
import json
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import fields

import pytest
from accelerate.state import AcceleratorState
from support import SCRIPTS

import grpo_arca as trainer

VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch) -> Iterator[None]:
    """Unsets a launcher's variables, and lets Accelerate read the environment anew each time."""
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    os.environ.pop("RANK", None)  # which a run that refuses it sets to 0
    AcceleratorState._reset_state(reset_partial_state=True)


def refused(argv: list[str], capsys, module=trainer) -> str:
    """Returns the one sentence with which the flags are refused."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        module.parse_args(argv)
    out, err = capsys.readouterr()
    assert stop.value.code == 2 and not out and len(err.splitlines()) == 1, err
    assert err.startswith(f"{module.__name__}.py: error: ") and "Traceback" not in err
    return err.strip()


# ---- Flags of TRL, and words ---------------------------------------------------------------------
TRL_COMMAND = (
    "--learning_rate 1e-5 --num_train_epochs 3 --bf16 True --logging_steps 1 --use_peft "
    "--use_vllm=True --max_prompt_length 512 --max_steps 10 --config recipe.yaml --push_to_hub "
    "--optim adamw_8bit --learning_rat 1"
)
UNKNOWN = (
    "num_train_epochs", "bf16", "logging_steps", "use_peft", "use_vllm", "max_prompt_length",
    "config", "push_to_hub", "optim",
)  # fmt: skip


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_unknown_flag_is_in_one_message_with_its_advice(script, capsys):
    sentence = refused(TRL_COMMAND.split(), capsys, importlib.import_module(script))
    found = re.findall(r"--(\w+) \(", sentence)
    assert found == [*UNKNOWN, "learning_rat"]
    for name in UNKNOWN:
        assert f"--{name} ({trainer.TRL_FLAGS[name]})" in sentence
    assert "--learning_rat (see --help)" in sentence


def test_many_unknown_flags_are_all_named_once(capsys):
    """Nor does one of 100,000 characters, or one that is given twice, hide those after it."""
    names = [*trainer.TRL_FLAGS, *(f"typo_{number}" for number in range(30))]
    endless = "x" * 100_000
    argv = [f"--{name}=1" for name in (endless, names[0], *names)]
    sentence = refused(argv, capsys)
    assert re.findall(r"--(\w+) \(", sentence)[1:] == names
    for name, advice in trainer.TRL_FLAGS.items():
        assert f"--{name} ({advice})" in sentence
    assert len(sentence) < sum(map(len, names + list(trainer.TRL_FLAGS.values()))) + 2_000


def test_a_stray_word_of_many_characters_is_cut(capsys):
    sentence = refused(["x" * 100_000], capsys)
    assert sentence.endswith("x: a flag begins with --") and len(sentence) < 200


@pytest.mark.parametrize("argv", ["stray", "--max_steps 3 stray", "stray --beta 0.1", "-x", "- 3"])
def test_a_stray_word_is_told_from_a_flag(argv, capsys):
    sentence = refused(argv.split(), capsys)
    word = "stray" if "stray" in argv else argv.split()[0]
    assert sentence.endswith(f"unknown argument {word}: a flag begins with --")


# ---- Numbers -------------------------------------------------------------------------------------
def number_flags() -> list[str]:
    """Returns the names of all flags with a range."""
    return [declared.name for declared in fields(trainer.Args) if "metavar" in declared.metadata]


@pytest.mark.parametrize("number", ["1e999", "-1e999", "nan", str(10**400), "9" * 5000])
def test_numbers_beyond_all_ranges_are_refused(number, capsys):
    """Python takes the first for infinity and the fourth for an integer of a flag."""
    assert len(number_flags()) > 25
    for name in number_flags():
        assert f"--{name}" in refused([f"--{name}={number}"], capsys), name


@pytest.mark.parametrize("number", ["1e999", "nan", str(10**400)])
def test_a_weight_of_a_reward_that_is_not_finite_is_refused(run_main, number):
    code, out, err = run_main(reward_weights=number)
    assert code == 2 and not out and "Traceback" not in err
    assert "--reward_weights needs one finite number" in err


# ---- The environment -----------------------------------------------------------------------------
@pytest.mark.parametrize(
    "variables",
    [
        {"RANK": "x"},
        {"RANK": ""},
        {"RANK": "-1", "WORLD_SIZE": "2"},
        {"RANK": "2", "WORLD_SIZE": "2"},
        {"RANK": "1"},
        {"WORLD_SIZE": "0"},
        {"WORLD_SIZE": ""},
        {"WORLD_SIZE": "2.5"},
        {"WORLD_SIZE": "1e999"},
    ],
)
def test_ranks_that_make_no_sense_end_in_a_sentence(run_main, monkeypatch, variables):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    code, out, err = run_main()
    assert code == 2 and not out and len(err.splitlines()) == 1, err
    assert err.startswith("grpo_arca.py: error: ") and "unset both" in err
    for name, value in variables.items():
        assert f"{name}={value}" in err


@pytest.mark.parametrize(
    "variables",
    [
        {"LOCAL_RANK": "x"},
        {"ACCELERATE_USE_CPU": "maybe"},
        {"ACCELERATE_MIXED_PRECISION": "nonsense"},
        {"ACCELERATE_MIXED_PRECISION": "fp16"},
        {"ACCELERATE_DYNAMO_BACKEND": "nonsense"},
        {"ACCELERATE_DEBUG_MODE": "nonsense"},
        {"RANK": "0", "WORLD_SIZE": "2"},
        {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "port"},
    ],
)
def test_a_launchers_nonsense_ends_in_a_sentence(run_main, monkeypatch, variables):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    code, out, err = run_main(max_steps=0)
    sentences = [line for line in err.splitlines() if "error: " in line]
    assert code == 2 and not out and "Traceback" not in err, err
    assert len(sentences) == 1 and sentences[0].startswith("grpo_arca.py: error: ")


def test_accelerate_accumulates_no_gradients(make_run, monkeypatch):
    """The variable would divide every gradient once more."""
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4")
    assert make_run().accelerator.gradient_accumulation_steps == 1


# ---- Escape codes --------------------------------------------------------------------------------
RED = "\x1b[31m"


@pytest.mark.parametrize(
    "message", [RED + "name", "a\x07b", "a\x9b31mb", "a\r\nb\tc", "a\u202eb", "\x00", "a\ud800b"]
)
def test_what_is_said_has_no_control_characters(message, capsys):
    trainer.say(message)
    (line,) = capsys.readouterr().err.split("\n")[:-1]
    assert line.startswith("grpo_arca.py: ") and line.isprintable()


def test_a_long_message_is_cut(capsys):
    trainer.say("word " * 10_000)
    said = capsys.readouterr().err
    assert len(said) <= trainer.MAX_MESSAGE_LENGTH + 1


def test_names_in_data_files_send_no_escape_codes(run_main, tmp_path):
    """Not where the file is refused, and not where it is used."""
    row = {"problem": "What is 3 + 4?", "answer": "7", RED + "other": "x"}
    rows = [row | {"problem": f"What is {i} + 4?"} for i in range(20)]
    path = tmp_path / f"{RED}data.jsonl"

    def said(rows: list[dict], **flags) -> tuple[int, str]:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        code, out, err = run_main(dataset_name=path.name, **flags)
        assert "Traceback" not in err and RED not in out + err, repr(err)
        return code, err

    code, err = said(rows, prompt_column="nothing")
    assert code == 2 and r"\x1b[31mother" in err
    code, err = said([*rows, row | {"answer": None}], max_steps=0)
    assert code == 0 and "left out" in err
    code, err = said([row | {"problem": [{"role": RED}]} for row in rows])
    assert code == 2


def test_an_unknown_flag_sends_no_escape_codes(capsys):
    assert r"\x1b[31mname" in refused([f"--{RED}name", "3"], capsys)


def test_hostile_words_in_argv_reach_no_stack(run_main, monkeypatch):
    monkeypatch.setattr(sys, "argv", [RED, *sys.argv[1:]])
    code, _, err = run_main(credit=RED)
    assert code == 2 and RED not in err and "Traceback" not in err
