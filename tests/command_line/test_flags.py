"""The command line: flags that are refused, defaults, launchers, --help. No model is loaded."""

import dataclasses
import importlib
import importlib.util
import inspect
import math
import os
import runpy
import shutil
import sys
from pathlib import Path

import accelerate.utils.launch
import pytest
from support import ROOT, SCRIPTS, TINY, refusal

import grpo_arca as trainer


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch):
    """The variables that a launcher sets are not set."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "PJRT_DEVICE", "ACCELERATE_MIXED_PRECISION"):
        monkeypatch.delenv(name, raising=False)


# ---- Flags that are refused, in every script -----------------------------------------------------
FLAGS = [  # (command line, what the sentence must say)
    ("--num_generations 1", ["--num_generations 1 is out of range (at least 2)"]),
    ("--top_p 2", ["--top_p 2.0 is out of range (above 0, at most 1)"]),
    ("--num_generations 7", ["--num_generations 7 must divide", "processes = 128"]),
    ("--per_device_train_batch_size 4 --gradient_accumulation_steps 1", ["--num_generations", "4"]),
    ("--gradient_accumulation_steps 2 --steps_per_generation 3", ["--steps_per_generation"]),
    ("--no_such_flag 3", ["--no_such_flag", "--help"]),
    ("--no_seed", ["unknown flags: --no_seed (see --help)"]),
    ("--start_adapter x", ["unknown flags: --start_adapter (see --help)"]),
    ("stray", ["unknown argument stray: a flag begins with --"]),
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
    ("--num_train_epochs 3", ["unknown flags: --num_train_epochs (use --max_steps)"]),
    ("--learning_rat 1", ["unknown flags: --learning_rat (see --help)"]),  # no prefix is a flag
    ("--logging_steps 1", ["unknown flags: --logging_steps (every update is logged)"]),
    ("--bf16", ["unknown flags: --bf16 (use --dtype bfloat16)"]),
    ("--bf16 True", ["unknown flags: --bf16 (use --dtype bfloat16)"]),
    ("--use_peft", ["unknown flags: --use_peft (it is always on)"]),
    ("--use_vllm True", ["unknown flags: --use_vllm (rollouts use the trained weights"]),
    ("--num-train-epochs=3", ["unknown flags: --num_train_epochs (use --max_steps)"]),
    ("--push_to_hub", ["unknown flags: --push_to_hub (upload the folder adapter/"]),
]


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("line, words", FLAGS, ids=[line for line, _ in FLAGS])
def test_a_wrong_flag_is_one_sentence(script, line, words, capfd):
    module = importlib.import_module(script)
    sentence = refusal(lambda: module.parse_args(line.split()), capfd, script)
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
            sentence = refusal(lambda argv=argv: module.parse_args(argv), capfd, script)
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


# ---- Launchers and processes ---------------------------------------------------------------------
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
def test_launchers_that_this_cannot_run_on(monkeypatch, capfd, variable):
    name, value = variable.split("=")
    monkeypatch.setenv(name, value)
    sentence = refusal(lambda: trainer.parse_args([]), capfd)
    assert f"cannot run with {LAUNCHERS[variable]}: " in sentence
    if "_USE_" in name:  # and Accelerate still sets just that
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


def test_a_script_beside_a_link_to_common_has_the_defaults_of_the_embedded_policy(tmp_path):
    shutil.copy(ROOT / "grpo_arca.py", tmp_path / "my_fork.py")
    (tmp_path / "common").symlink_to(ROOT / "common")
    spec = importlib.util.spec_from_file_location("my_fork", tmp_path / "my_fork.py")
    fork = importlib.util.module_from_spec(spec)
    sys.modules["my_fork"] = fork
    spec.loader.exec_module(fork)
    assert fork.parse_args([]).lora_r == fork.EMBEDDED_DEFAULTS["lora_r"] == 8


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_tracker_that_is_not_installed(script, monkeypatch, capfd):
    module = importlib.import_module(script)
    find_spec = importlib.util.find_spec

    def find_all_but_trackio(name, *package):
        return None if name == "trackio" else find_spec(name, *package)

    monkeypatch.setattr(importlib.util, "find_spec", find_all_but_trackio)
    sentence = refusal(lambda: module.parse_args(["--report_to", "trackio"]), capfd, script)
    assert "--report_to trackio" in sentence and "pip install trackio" in sentence


@pytest.mark.parametrize("script", SCRIPTS)
def test_the_batch_counts_all_processes(script, monkeypatch, capfd):
    """12 completions are no two groups of 8, but two processes' 24 are three."""
    module = importlib.import_module(script)
    line = ["--per_device_train_batch_size", "12", "--gradient_accumulation_steps", "1"]
    assert "12" in refusal(lambda: module.parse_args(line), capfd, script)
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert module.parse_args(line).num_generations == 8


def test_only_the_first_process_speaks(monkeypatch, capfd):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SystemExit) as stopped:
        trainer.parse_args(["--num_generations", "1"])
    assert stopped.value.code == 2 and capfd.readouterr() == ("", "")


@pytest.mark.parametrize("script", SCRIPTS)
def test_right_flags_pass(script):
    """The mistakes above are mistakes: their neighbors are not."""
    module = importlib.import_module(script)
    line = "--num_generations 2 --top_p 1 --max_steps 0 --beta 0 --top_k 0 --lora_dropout 0.9 "
    line += "--gradient_accumulation_steps 2 --steps_per_generation 4 --temperature 0.1 --seed 0 "
    line += "--lr_scheduler_type linear --learning_rate 1e-5"
    kwargs = ["--chat_template_kwargs", '{"enable_thinking": false}']
    args = module.parse_args([*line.split(), *kwargs])
    assert (args.num_generations, args.max_steps, args.steps_per_generation) == (2, 0, 4)
    assert module.parse_args([]).steps_per_generation == module.Args().gradient_accumulation_steps
    assert module.parse_args(["--output_dir", "a/b"]).run_name == "b"
    weights = module.parse_args(["--reward_funcs", "a.b", "c.d", "--reward_weights", "1", "-0.5"])
    assert (weights.reward_funcs, weights.reward_weights) == (["a.b", "c.d"], [1.0, -0.5])


# ---- --help --------------------------------------------------------------------------------------
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
        if not field.init:  # `parse_args` sets it, not the user
            continue
        assert f"--{field.name}" in shown
        assert "".join(field.metadata["help"].split()) in shown, field.name
    title = module.__doc__.splitlines()[0]
    assert "".join(title.split()) in shown, "the docstring's title is missing"


def test_help_keeps_the_docstrings_lines_and_shows_both_defaults(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    with pytest.raises(SystemExit) as stopped:
        trainer.parse_args(["--help"])
    text = capsys.readouterr().out
    assert stopped.value.code == 0 and trainer.__doc__.strip() in text
    assert "(default: 4e-05, or 0.004 for the embedded policies)" in " ".join(text.split())
