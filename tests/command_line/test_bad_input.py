"""What a user gets wrong ends in one sentence: no stack, exit code 2, and no model loaded first."""

import dataclasses
import importlib
import importlib.util
import inspect
import json
import math
import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import accelerate.utils.launch
import pytest
import transformers
from support import ROOT, SCRIPTS, TINY

import grpo_arca as trainer


@pytest.fixture(autouse=True)
def elsewhere(monkeypatch, tmp_path):
    """A run that gets too far must write no files here, and has no launcher's environment."""
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "PJRT_DEVICE", "ACCELERATE_MIXED_PRECISION"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def no_model(monkeypatch):
    """Loading a model, or taking the first step, is a failure of the test."""

    def refuse(*_, **__):
        raise AssertionError("a model was loaded before the mistake was found")

    monkeypatch.setattr(trainer, "load_policy", refuse)
    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", refuse)


def one_sentence(stderr: str, script: str) -> str:
    """The sentence on stderr, checked for its form."""
    lines = stderr.splitlines()
    assert len(lines) == 1, stderr
    assert lines[0].startswith(f"{script}.py: error: ") and "Traceback" not in stderr
    assert len(lines[0]) < 600 and "  " not in lines[0]
    return lines[0]


def refused(call, capfd, script: str = "grpo_arca") -> str:
    """The sentence with which `call` ends the run."""
    capfd.readouterr()
    with pytest.raises(SystemExit) as stopped:
        call()
    out, err = capfd.readouterr()
    assert stopped.value.code == 2 and out == ""
    return one_sentence(err, script)


@pytest.fixture
def run_main(monkeypatch, capfd):
    """run_main("--flag", "value", ...) -> the sentence that main ends with."""

    def run(*argv: str) -> str:
        monkeypatch.setattr(sys, "argv", ["grpo_arca.py", *argv])
        return refused(trainer.main, capfd)

    return run


# ------------------------------------------------------------------------- flags, in every script
FLAGS = [  # (command line, what the sentence must say)
    ("--num_generations 1", ["--num_generations 1 is out of range (at least 2)"]),
    ("--top_p 2", ["--top_p 2.0 is out of range (above 0, at most 1)"]),
    ("--num_generations 7", ["--num_generations must divide the rollout of 128 completions"]),
    ("--per_device_train_batch_size 4 --gradient_accumulation_steps 1", ["--num_generations", "4"]),
    ("--gradient_accumulation_steps 2 --steps_per_generation 3", ["--steps_per_generation"]),
    ("--no_such_flag 3", ["--no_such_flag", "--help"]),
    ("stray", ["stray", "--help"]),
    ("--credit nothing", ["--credit", "uniform"]),
    ("--loss_type ppo", ["--loss_type", "dapo"]),
    ("--scale_rewards std", ["--scale_rewards", "group"]),
    ("--rollout_weights auto", ["--rollout_weights", "quantized"]),
    ("--dtype float16", ["--dtype", "bfloat16"]),
    ("--report_to mlflow", ["--report_to", "tensorboard"]),
    ("--lr_scheduler_type cosin", ["--lr_scheduler_type", "cosine"]),
    ("--learning_rate fast", ["--learning_rate", "fast"]),
    ("--max_steps ten", ["--max_steps", "ten"]),
    ("--lora_r 1.5", ["--lora_r", "1.5"]),
    ("--load_in_4bit maybe", ["--load_in_4bit", "maybe"]),
    ("--seed", ["--seed", "expected"]),
    # what TRL's users type
    ("--num_train_epochs 3", ["unknown flag --num_train_epochs; use --max_steps"]),
    ("--learning_rat 1", ["unknown flag --learning_rat; see --help"]),  # no prefix is a flag
    ("--logging_steps 1", ["unknown flag --logging_steps; see --help"]),
    ("--bf16", ["unknown flag --bf16; use --dtype bfloat16"]),
    ("--bf16 True", ["unknown flag --bf16; use --dtype bfloat16"]),
    ("--use_peft", ["unknown flag --use_peft; see --help"]),
    ("--use_vllm True", ["unknown flag --use_vllm; see --help"]),
    ("--push_to_hub", ["unknown flag --push_to_hub; see --help"]),
]


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("line, words", FLAGS, ids=[line for line, _ in FLAGS])
def test_a_wrong_flag_is_one_sentence(script, line, words, capfd):
    module = importlib.import_module(script)
    sentence = refused(lambda: module.parse_args(line.split()), capfd, script)
    assert all(word in sentence for word in words), sentence


def numbers(module):
    """Returns (name, type, range) of every flag that is a number."""
    found = []
    for field in dataclasses.fields(module.Args):
        accepted = field.metadata.get("metavar")
        if accepted is not None:
            found.append((field.name, float if "float" in str(field.type) else int, accepted))
        else:
            assert type(field.default) not in (int, float), f"{field.name} has no range"
    return found


def refused_numbers(kind: type, accepted) -> list:
    """Returns numbers just outside a range: at an open end, or a step beyond a closed one."""
    refused = [math.nan, math.inf, -math.inf] if kind is float else []
    refused += [accepted.above, accepted.at_least - 1, accepted.below, accepted.at_most + 1]
    return [
        kind(x) if math.isfinite(x) else x for x in refused if math.isfinite(x) or kind is float
    ]


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_number_has_a_range(script, capfd):
    """At an open end, beyond a closed one, and where it is not finite, a number is refused. At a
    closed end it is accepted."""
    module = importlib.import_module(script)
    flags = numbers(module)
    assert len(flags) > 25
    for name, kind, accepted in flags:
        refusals = refused_numbers(kind, accepted)
        assert refusals, name
        for value in refusals:
            argv = [f"--{name}={value}"]
            sentence = refused(lambda argv=argv: module.parse_args(argv), capfd, script)
            assert f"--{name} {value} is out of range {accepted}" in sentence
        for end in (accepted.at_least, accepted.at_most):
            if math.isfinite(end):
                argv = ["--num_generations=2", f"--{name}={kind(end)}"]  # 2 divides every rollout
                args = module.parse_args(argv)
                if name == "steps_per_generation":  # 0 stands for the micro-batches of one update
                    end = args.gradient_accumulation_steps
                assert getattr(args, name) == end


OF_THE_MODEL = {  # the embedded policy's default, any other model's
    "lora_r": (8, 32), "lora_alpha": (16, 32),
    "learning_rate": (4e-3, 4e-5), "max_completion_length": (80, 512),
    "per_device_train_batch_size": (32, 8), "per_device_eval_batch_size": (200, 32),
    "gradient_checkpointing": (False, True), "max_steps": (45, 200), "warmup_steps": (3, 10),
    "save_steps": (25, 50),
}  # fmt: skip


@pytest.mark.parametrize("script", SCRIPTS)
def test_defaults_that_depend_on_the_model(script):
    module, model = importlib.import_module(script), "--model_name_or_path"
    own, named = module.parse_args([]), module.parse_args([model, os.path.relpath(TINY)])
    other = module.parse_args([model, "Qwen/Qwen3-1.7B"])
    long = module.parse_args([model, str(Path(TINY).with_name("long_policy"))])
    assert set(module.EMBEDDED_DEFAULTS) == set(OF_THE_MODEL)
    for name, defaults in OF_THE_MODEL.items():
        found = tuple(getattr(args, name) for args in (own, named, long, other))
        assert found == (*defaults[:1] * 3, defaults[1]), name
        for argv in ([], [model, "Qwen/Qwen3-1.7B"]):  # and the user's word is the last
            asked = type(defaults[0])(defaults[0] * 2 or True)
            assert getattr(module.parse_args([*argv, f"--{name}={asked}"]), name) == asked


LAUNCHERS = {  # the environment that `accelerate launch` or torch_xla leaves: what is named
    "ACCELERATE_USE_FSDP=true": "FSDP",
    "ACCELERATE_USE_DEEPSPEED=true": "DEEPSPEED",
    "ACCELERATE_USE_MEGATRON_LM=true": "MEGATRON_LM",
    "ACCELERATE_USE_PARALLELISM_CONFIG=true": "PARALLELISM_CONFIG",
    "PJRT_DEVICE=TPU": "TPU",
    "ACCELERATE_MIXED_PRECISION=fp16": "fp16",
    "ACCELERATE_MIXED_PRECISION=fp8": "fp8",
}


@pytest.mark.parametrize("variable", LAUNCHERS)
def test_launchers_that_this_cannot_run_on(run_main, no_model, monkeypatch, variable):
    monkeypatch.setattr(trainer, "load_data", None)  # refused before that
    monkeypatch.setenv(*variable.split("="))
    assert f"cannot run with {LAUNCHERS[variable]}: " in run_main()
    if "_USE_" in variable:  # and Accelerate still sets just that
        name = variable.split("=")[0]
        assert f'current_env["{name}"] = "true"' in inspect.getsource(accelerate.utils.launch)


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_launchers_that_it_can_run_on(script, precision, monkeypatch):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", precision)
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "false")
    assert importlib.import_module(script).parse_args([]).num_generations == 8


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_copied_without_common(script, tmp_path):
    shutil.copy(ROOT / f"{script}.py", tmp_path)
    with pytest.raises(SystemExit) as stopped:
        runpy.run_path(str(tmp_path / f"{script}.py"))
    # Of a text: it is printed, and the exit code is 1.
    assert stopped.value.code == f"copy common/ to {tmp_path}, too"


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_tracker_that_is_not_installed(script, monkeypatch, capfd):
    module, find_spec = importlib.import_module(script), importlib.util.find_spec
    hide = lambda name, *a: None if name == "trackio" else find_spec(name, *a)
    monkeypatch.setattr(importlib.util, "find_spec", hide)
    sentence = refused(lambda: module.parse_args(["--report_to", "trackio"]), capfd, script)
    assert "--report_to trackio" in sentence and "pip install trackio" in sentence


@pytest.mark.parametrize("script", SCRIPTS)
def test_the_batch_counts_all_processes(script, monkeypatch, capfd):
    """12 completions are no two groups of 8, but two processes' 24 are three."""
    module = importlib.import_module(script)
    line = "--per_device_train_batch_size 12 --gradient_accumulation_steps 1".split()
    assert "12" in refused(lambda: module.parse_args(line), capfd, script)
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert module.parse_args(line).num_generations == 8


def test_only_the_first_process_speaks(monkeypatch, capfd):
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(SystemExit) as stopped:
        trainer.parse_args(["--num_generations", "1"])
    assert stopped.value.code == 2 and capfd.readouterr() == ("", "")


@pytest.mark.parametrize("script", SCRIPTS)
def test_right_flags_pass(script):
    """The mistakes above are mistakes: their neighbours are not."""
    module = importlib.import_module(script)
    line = "--num_generations 2 --top_p 1 --max_steps 0 --beta 0 --top_k 0 --lora_dropout 0.9 "
    line += "--gradient_accumulation_steps 2 --steps_per_generation 4 --temperature 0.1 --seed 0 "
    line += "--lr_scheduler_type linear --learning_rate 1e-5"
    kwargs = ["--chat_template_kwargs", '{"enable_thinking": false}']
    args = module.parse_args([*line.split(), *kwargs])
    assert (args.num_generations, args.max_steps, args.steps_per_generation) == (2, 0, 4)
    assert module.parse_args([]).steps_per_generation == module.Args().gradient_accumulation_steps
    assert module.parse_args(["--output_dir", "a/b"]).run_name == "b"
    weights = module.parse_args("--reward_funcs a.b c.d --reward_weights 1 -0.5".split())
    assert (weights.reward_funcs, weights.reward_weights) == (["a.b", "c.d"], [1.0, -0.5])


# --------------------------------------------------------------------------------- data, models
ROWS = [{"problem": f"What is {i} + {i}?", "answer": str(2 * i)} for i in range(20)]


def jsonl(rows) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


@pytest.mark.parametrize(
    "name, content, flags, words",
    [
        ("none.jsonl", None, "", ["none.jsonl", "check"]),
        ("none.parquet", None, "", ["none.parquet", "check"]),
        ("empty.jsonl", "", "", ["empty.jsonl", "empty", "give"]),
        ("blank.jsonl", "\n\n", "", ["blank.jsonl", "check"]),
        ("list.json", "[]", "", ["list.json", "check"]),
        ("torn.jsonl", jsonl(ROWS) + '{"problem": "a", "ans', "", ["torn.jsonl", "JSON"]),
        ("torn.parquet", "PAR1", "", ["torn.parquet", "check"]),
        ("columns.jsonl", '{"text": "a", "label": 1}\n', "", ["text, label", "--prompt_column"]),
        ("columns.jsonl", '{"problem": "a", "label": 1}\n', "", ["label", "--answer_column"]),
        ("set.jsonl", jsonl(ROWS), "--prompt_column q", ["no q", "problem", "--prompt_column"]),
        ("set.jsonl", jsonl(ROWS), "--answer_column a", ["no a", "answer", "--answer_column"]),
        ("nobox.jsonl", '{"problem": "a", "solution": "5"}\n', "", ["nobox.jsonl", "solution"]),
        ("one.jsonl", jsonl(ROWS[:1]), "", ["one.jsonl", "add rows"]),
        ("shape.jsonl", '{"prompt": ["a"], "answer": "1"}\n', "", ["--prompt_column", "messages"]),
        ("set.jsonl", jsonl(ROWS), "--eval_dataset_name no.jsonl", ["no.jsonl", "check"]),
    ],
)
def test_data_that_cannot_be_used(run_main, no_model, name, content, flags, words):
    if content is not None:
        Path(name).write_text(content)
    sentence = run_main("--dataset_name", name, *flags.split())
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
def test_names_and_lengths_that_lead_nowhere(run_main, no_model, flags, words):
    """With no network (conftest sets HF_HUB_OFFLINE)."""
    assert os.environ["HF_HUB_OFFLINE"] == "1"
    sentence = run_main(*flags.split())
    assert all(word in sentence for word in words), sentence


def test_a_prompt_longer_than_the_context(run_main, no_model):
    Path("long.jsonl").write_text(jsonl(ROWS + [{"problem": "1" * 3000, "answer": "1"}]))
    sentence = run_main("--dataset_name", "long.jsonl")
    assert "2048" in sentence and not re.search(r" -\d", sentence), sentence


def copy_of_tiny(*names: str) -> Path:
    folder = Path("model").resolve()
    folder.mkdir()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", *names):
        shutil.copy(Path(TINY) / name, folder / name)
    return folder


def test_a_tokenizer_without_eos(run_main, no_model):
    folder = copy_of_tiny("chat_template.jinja")
    config = json.loads((folder / "tokenizer_config.json").read_text())
    del config["eos_token"]
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    sentence = run_main("--model_name_or_path", str(folder))
    assert "EOS" in sentence and "eos_token" in sentence, sentence


def test_a_folder_without_tokenizer(run_main, no_model):
    folder = copy_of_tiny()
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer_config.json").unlink()
    assert str(folder) in run_main("--model_name_or_path", str(folder))


def test_a_template_that_refuses_the_system_prompt(run_main, no_model):
    folder = copy_of_tiny()
    (folder / "chat_template.jinja").write_text("{{ raise_exception('no system role here') }}")
    sentence = run_main("--model_name_or_path", str(folder), "--system_prompt", "Be brief.")
    assert "--system_prompt" in sentence and "no system role here" in sentence, sentence


def test_a_folder_without_weights(run_main):
    sentence = run_main("--model_name_or_path", str(copy_of_tiny()))
    assert "cannot load" in sentence and "no file named model.safetensors" in sentence, sentence


def test_lora_target_modules_that_do_not_exist(run_main):
    sentence = run_main("--lora_target_modules", "q_proj_of_another", "another")
    assert "with LoRA on q_proj_of_another another: Target modules" in sentence, sentence


def test_an_output_folder_that_is_a_file(run_main):
    """Found before the first evaluation, not after the last step."""
    Path("taken").write_text("")
    sentence = run_main("--output_dir", "taken/run")
    assert "taken/run" in sentence, sentence


# ------------------------------------------------------------------------------ as a real command
@pytest.mark.slow  # what an interpreter of its own may add to test_data_that_cannot_be_used
def test_the_command_itself():
    Path("torn.jsonl").write_text('{"problem": "a", "ans')
    done = subprocess.run(
        [sys.executable, str(ROOT / "grpo_arca.py"), "--dataset_name", "torn.jsonl"],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 2 and done.stdout == ""
    sentence = one_sentence(done.stderr, "grpo_arca")
    assert "torn.jsonl" in sentence and "JSON" in sentence


@pytest.mark.parametrize("script", SCRIPTS)
def test_help_shows_every_flag_and_its_text(script, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    module = importlib.import_module(script)
    with pytest.raises(SystemExit) as stopped:
        module.parse_args(["--help"])
    out, err = capsys.readouterr()
    assert stopped.value.code == 0 and err == ""
    shown = "".join(out.split())  # argparse wraps lines, also after hyphens
    for field in dataclasses.fields(module.Args):
        assert f"--{field.name}" in shown
        assert "".join(field.metadata["help"].split()) in shown, field.name
    title = module.__doc__.splitlines()[0]
    assert "".join(title.split()) in shown, "the docstring's title is missing"
