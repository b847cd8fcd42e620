"""The command line: flags, their defaults, what is refused, and random combinations of flags.

A table says which values of a flag train and which must end a run; the scripts are not asked.
"""

import dataclasses
import importlib
import json
import os
import random
import re
import shutil
import sys
import traceback
import typing
from pathlib import Path

import conftest
import pytest
from accelerate.utils import DynamoBackend
from support import ROOT, SCRIPTS, TINY, few_chains, read_jsonl, refusal

import grpo_arca
from common.reward import load_reward_funcs

BASE = {
    "dataset_name": "good.jsonl", "max_steps": "2", "max_completion_length": "8",
    "per_device_train_batch_size": "4", "gradient_accumulation_steps": "1", "num_generations": "2",
    "max_eval_samples": "2", "num_generations_eval": "1", "eval_steps": "0", "output_dir": "out",
}  # fmt: skip
BOOL = ("true yes True 0 false", "maybe 2")
COUNT = ("1 2 3", "0 -1 1.5 two")
SHARE = ("0 0.25 0.8 1", "-0.1 nan inf x")
WEIGHT = ("0 0.25 1 3", "-0.1 nan inf x")
# Of each flag the values that train and those that end a run, separated by blanks. The files are
# those of `data_files`.
SHARED = {
    "model_name_or_path": (TINY, "/no/such/model nobody/nothing good.jsonl"),
    "model_revision": ("main v2", ""),
    "start_adapter": ("", "nothing"),
    "load_in_4bit": BOOL,
    "dtype": ("float32 bfloat16", "float16 bf16 auto"),
    "lora_r": ("1 8 300", "0 -1 1.5 nan"),
    "lora_alpha": ("1 16", "1.5 x 0 -16"),
    "lora_dropout": ("0 0.1 0.9", "1 1.1 -0.1 nan inf x"),
    "lora_target_modules": ("all-linear q_proj down_proj", "nope lm_head"),
    "dataset_name": (
        "chain_arithmetic good.jsonl good.json chats.jsonl table.csv",
        "missing.jsonl empty.jsonl torn.jsonl columns.jsonl same.jsonl no_such_set",
    ),
    "dataset_config": ("2 8", ""),
    "dataset_train_split": ("train other", ""),
    "dataset_test_split": ("test other", ""),
    "shuffle_dataset": BOOL,
    "eval_dataset_name": ("chain_arithmetic good.jsonl", "missing.jsonl torn.jsonl no_such_set"),
    "prompt_column": ("problem", ""),
    "answer_column": ("answer", ""),
    "system_prompt": ("Be_brief. ünïcode☃ {}", ""),
    "chat_template_kwargs": (
        '{} {"chat_template":"{{messages}}"}',
        '{ no [] {"enable_thinking":false} {"padding":true}',
    ),
    "reward_funcs": ("accuracy_reward", "nope no.such os.path"),
    "reward_weights": ("1 0.5 -2", "x nan inf"),
    "num_generations": ("2 4", "1 0 -2 1.5 x"),
    "max_completion_length": ("1 8 64", "0 -1 1.5 100000"),
    "temperature": ("0.1 0.7 1 5", "0 -1 nan inf x"),
    "top_p": ("0.01 0.5 1", "0 -0.1 1.5 nan inf"),
    "max_resample_times": ("0 1 2", "-1 1.5 x"),
    "rollout_weights": ("dense quantized", "auto DENSE"),
    "per_device_rollout_batch_size": ("0 1 3 100", "-1 1.5 x"),
    "cuda_graphs": BOOL,
    "per_device_train_batch_size": ("1 2 4 6", "0 -4 1.5"),
    "gradient_accumulation_steps": ("1 2", "0 -1 x"),
    "steps_per_generation": ("4 0 1 2", "-1 1.5"),
    "num_iterations": ("1 2 3", "0 -1 1.5"),
    "gradient_checkpointing": BOOL,
    "loss_type": ("grpo dapo dr_grpo", "ppo GRPO bnpo"),
    "scale_rewards": ("group batch none", "std true"),
    "multi_objective_aggregation": ("sum_then_normalize normalize_then_sum", "sum"),
    "negative_weight": WEIGHT,
    "epsilon": ("0 0.0001 0.2 0.9", "-0.2 nan x"),
    "epsilon_high": ("0 0.28 5", "-0.5 -1 nan x"),
    "beta": ("0 0.04 1", "-0.1 nan inf x"),
    "use_bias_correction_kl": BOOL,
    "mask_truncated_completions": BOOL,
    "skip_zero_gradient": BOOL,
    "learning_rate": ("0 1e-6 4e-3 0.1", "-1 nan inf fast"),
    "warmup_steps": ("0 1 100", "-1 1.5"),
    "lr_scheduler_type": ("cosine linear constant constant_with_warmup", "cosin polynomial"),
    "max_grad_norm": ("0 0.5 100", "-1 nan x"),
    "max_steps": ("0 1 2", "-1 1.5 x"),
    "seed": ("0 1 4294967295", "-1 1.5 x"),
    "eval_steps": ("0 1 2", "-1 x"),
    "max_eval_samples": COUNT,
    "num_generations_eval": COUNT,
    "per_device_eval_batch_size": ("0 1 3", "-1 1.5"),
    "metric_for_best_model": ("greedy_accuracy sampled_accuracy", "nothing"),
    "output_dir": ("out2 a/b/c ünï a.b", "good.jsonl good.jsonl/run /proc/nope"),
    "save_steps": ("0 1 500", "-1 1.5"),
    "save_total_limit": ("1 3", "0 -1 x"),
    "resume_from_checkpoint": ("latest", "newest out"),
    "report_to": ("none", "mlflow all"),
}
OWN = {
    "grpo_arca": {
        "credit": (
            "arca uniform surprisal probability entropy_reduction divergence random shuffled",
            "oar_g s_trace nothing",
        ),
        "sharpening": ("0 0.5 1 3 100", "-1 nan inf x"),
    },
    "grpo_oar": {
        "credit": ("oar_g oar_p uniform random shuffled", "arca gspo nothing"),
        "oar_quantile": SHARE,
        "oar_beta": ("0 1 5", "-1 nan inf x"),
        "oar_noise_std": ("1e-6 1e-3 0.1", "0 -1 nan inf x"),
        "oar_conclude": ("So_\\boxed{ ☃", ""),
        "oar_max_tokens_per_micro_batch": ("1 64 16384", "-1 1.5"),
    },
    "grpo_strace": {
        "credit": ("s_trace p_trace gspo grpo_lambda uniform", "arca oar_g nothing"),
        "trace_lambda": ("0 0.9 1", "9 1.05 -0.1 nan inf x"),
        "trace_normalize": BOOL,
        "trace_entropy_quantile": SHARE,
        "trace_mask_scope": ("completion batch", "group"),
        "trace_keep_own": BOOL,
        "trace_kernel": ("recent both", "first"),
    },
}
TESTED = OWN | {"grpo_arca": SHARED | OWN["grpo_arca"]}  # what is shared is the same code
TABLES = {script: SHARED | own for script, own in OWN.items()}
# Flags outside the table of docs/trl.md whose default only looks different from TRL's.
SAME_MEANING = {
    "chat_template_kwargs": "no keywords",
    "steps_per_generation": "the micro-batches of one update",
    "output_dir": "a folder named after the run",
    "model_name_or_path": "TRL has no default",
    "dataset_name": "TRL has no default",
    "reward_funcs": "TRL has no default",
}


# ---- Flags and their defaults --------------------------------------------------------------------
@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("place", [0, -1])
def test_every_flag_parses(script, place):
    """The first and the last good value of each, all on one command line."""
    module = importlib.import_module(script)
    table = TABLES[script]
    assert {flag.name for flag in dataclasses.fields(module.Args)} == set(table)
    chosen = {name: good.split()[place] for name, (good, _) in table.items() if good}
    args = module.parse_args([f"--{name}={text}" for name, text in chosen.items()])
    for name, text in chosen.items():
        value = getattr(args, name)
        if isinstance(value, list):
            (value,) = value
        expected = text in ("true", "yes") if isinstance(value, bool) else type(value)(text)
        assert value == expected, name


def defaults_of(*classes: type) -> dict[str, str]:
    fields = sum(map(dataclasses.fields, classes), ())
    lists = {f.name: f.default_factory for f in fields if f.default is dataclasses.MISSING}
    defaults = {f.name: str(f.default) for f in fields}
    return defaults | {name: str(make()) for name, make in lists.items()}


def test_defaults_are_trls_or_stand_in_the_table_of_those_that_differ():
    trl = pytest.importorskip("trl", reason="pip install trl")
    scripts = importlib.import_module("trl.scripts.grpo")
    theirs = defaults_of(trl.GRPOConfig, trl.ModelConfig, scripts.GRPOScriptArguments)
    ours = defaults_of(grpo_arca.Args)
    page = (ROOT / "docs/trl.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (`.*?) \| (.*?) \| (.*?) \|", page.split("Flags of this")[0], re.M)
    documented = set()
    for row in rows:
        names, here, there = [cell.replace("none", "`None`").split(", ") for cell in row]
        for name, *pair in zip(names, here, there, strict=False):
            documented.add(name.strip("`"))
            for cell, defaults in zip(pair, (ours, theirs), strict=True):
                if cell.startswith("`"):  # else it is described in words
                    assert cell == f"`{defaults[name.strip('`')]}`", name
    differing = {name for name in ours.keys() & theirs.keys() if ours[name] != theirs[name]}
    assert differing - SAME_MEANING.keys() == documented


def test_the_embedded_policy_has_its_own_defaults_wherever_it_lies(tmp_path):
    """What the command line says comes before them, also where it names an ordinary default."""
    (tmp_path / "link").symlink_to(TINY)
    expected = grpo_arca.EMBEDDED_DEFAULTS | {"lora_r": 32, "model_name_or_path": TINY}
    for flags in ([], ["--model_name_or_path", str(tmp_path / "link")]):
        args = vars(grpo_arca.parse_args([*flags, "--lora_r", "32"]))
        assert args == args | expected
    assert grpo_arca.parse_args(["--model_name_or_path", "Qwen/Qwen3-1.7B"]).learning_rate == 4e-5


def test_a_base_whose_files_are_links_keeps_its_own_path(tmp_path):
    """As in the Hub's cache, where they lead to a folder that is no model."""
    (tmp_path / "config.json").symlink_to(Path(TINY, "config.json"))
    args = grpo_arca.parse_args(["--model_name_or_path", str(tmp_path)])
    assert args.model_name_or_path == str(tmp_path)


# ---- What is refused at once ---------------------------------------------------------------------
@pytest.mark.parametrize("argv", ["--learning_rat 1", "--use_vllm True", "stray", "--beta"])
def test_what_is_no_flag_is_named(argv, capsys):
    said = refusal(grpo_arca.parse_args, argv.split()) + capsys.readouterr().err
    assert argv.split()[0] in said and "docs/trl.md" in said and "Traceback" not in said


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("text", ["nan", "inf"])
def test_a_number_that_is_not_finite_is_refused(script, text):
    """Of every flag that is a number, or a list of them: weights, where functions are loaded."""
    module = importlib.import_module(script)
    hints = typing.get_type_hints(module.Args)
    names = [name for name, hint in hints.items() if re.search(r"\b(int|float)\b", str(hint))]
    assert len(names) >= 30
    assert refusal(load_reward_funcs, ["accuracy_reward"], [float(text)])
    for name in TESTED[script].keys() & set(names) - {"reward_weights"}:
        with pytest.raises(SystemExit):
            module.parse_args([f"--{name}={text}"])
            pytest.fail(f"--{name} {text} passes")


@pytest.mark.parametrize(
    "sizes",
    [
        {"num_generations": 3},
        {"gradient_accumulation_steps": 2, "steps_per_generation": 3},
        {"gradient_accumulation_steps": 4, "steps_per_generation": 2},
    ],
)
def test_sizes_that_do_not_fit_are_refused(make_run, sizes):
    said = refusal(make_run, **sizes)
    assert "--num_generations" in said and "--steps_per_generation" in said


def test_a_tracker_that_is_missing_is_refused_before_training(monkeypatch):
    """Accelerate itself would leave it out without a word."""
    monkeypatch.setitem(sys.modules, "wandb", None)
    assert "wandb" in refusal(grpo_arca.parse_args, ["--report_to", "wandb"], error=ImportError)


def test_the_launchers_dynamo_backend_changes_nothing(make_run, monkeypatch):
    """A compiled layer would compute otherwise than the same layer when it samples."""
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "INDUCTOR")
    run = make_run()
    assert run.accelerator.state.dynamo_plugin.backend == DynamoBackend.NO
    assert type(run.policy) is grpo_arca.LogProbs


# ---- Whole runs ----------------------------------------------------------------------------------
def write_files(folder: Path) -> None:
    """Writes the data files that the table names."""
    problems = few_chains(12, held_out=False)
    rows = [{"problem": p.prompt, "answer": p.answer} for p in problems]
    chats = [row | {"problem": [{"role": "user", "content": row["problem"]}]} for row in rows]
    files = {"good": rows, "chats": chats, "columns": [{"text": "a"}], "empty": [],
             "same": rows[:1] * 9}  # fmt: skip
    for name, content in files.items():
        text = "".join(json.dumps(row) + "\n" for row in content)
        (folder / f"{name}.jsonl").write_text(text)
    (folder / "torn.jsonl").write_text(text[:-9])
    (folder / "good.json").write_text(json.dumps(rows))
    lines = [f'"{p.prompt}",{p.answer}\n' for p in problems]
    (folder / "table.csv").write_text("problem,answer\n" + "".join(lines))


@pytest.fixture
def fault_of(run_main, monkeypatch, tmp_path):
    """fault_of(script, flags, must_end) -> what is wrong with how such a run ends, or "".

    A run trains, or ends in one sentence. That may be a library's, but where our own code fails
    without having meant to, it is none.
    """

    def fault(script: str, flags: dict[str, str], must_end: bool) -> str:
        case = f"{script} {flags}: "
        shutil.rmtree(tmp_path)
        tmp_path.mkdir()
        write_files(tmp_path)
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(conftest, "grpo_arca", importlib.import_module(script))
        try:
            code, _, err = run_main(**BASE | flags)
        except Exception as error:
            frame = traceback.extract_tb(error.__traceback__)[-1]
            is_ours = Path(frame.filename).parent in (ROOT, ROOT / "common")
            is_meant = frame.line.startswith("raise") or isinstance(error, OSError | ImportError)
            is_good = must_end and str(error) != "" and (is_meant or not is_ours)
            return "" if is_good else f"{case}{error!r}"
        if code != 0:
            is_good = must_end and ".py: error: " in err and "Traceback" not in err
            return "" if is_good else case + err[-300:]
        (log,) = tmp_path.rglob("metrics.jsonl")
        rows = read_jsonl(log)
        updates = [row for row in rows if "loss" in row and None not in row.values()]
        is_good = not must_end and len(updates) == int((BASE | flags)["max_steps"])
        return "" if is_good else f"{case}{len(updates)} updates, rows {rows}"

    return fault


@pytest.mark.slow
def test_every_bad_value_ends_a_run(fault_of):
    """Each alone, so that no other mistake on the same line hides that it passes."""
    faults = []
    for script in SCRIPTS:
        for name, (_, bad) in TESTED[script].items():
            faults += [fault_of(script, {name: value}, True) for value in bad.split()]
    assert "".join(faults) == ""


def sizes_fit(flags: dict[str, str]) -> bool:
    """Returns whether a rollout has whole groups and whole updates."""
    sizes = {name: int(value) for name, value in (BASE | flags).items() if value.isdecimal()}
    accumulation = sizes["gradient_accumulation_steps"]
    steps = sizes.get("steps_per_generation", 0) or accumulation
    rollout = steps * sizes["per_device_train_batch_size"]
    return steps % accumulation == 0 and rollout % sizes["num_generations"] == 0


def splits_fit(flags: dict[str, str]) -> bool:
    """Returns whether no config or split is asked for of a file, which has none."""
    chosen = BASE | flags
    asked = set()
    if chosen["dataset_name"] != "chain_arithmetic":
        asked |= {flags.get("dataset_config", ""), flags.get("dataset_train_split", "train")}
    if chosen.get("eval_dataset_name", chosen["dataset_name"]) != "chain_arithmetic":
        asked.add(flags.get("dataset_test_split", "test"))
    return asked <= {"", "train", "test"}


@pytest.mark.slow
def test_random_combinations_of_flags_train_or_end_in_a_sentence(fault_of):
    """Of 3 to 8 flags, one value in eight is a bad one. FUZZ_COUNT says how many are tried."""
    rng = random.Random(int(os.environ.get("FUZZ_SEED", "1")))
    faults = []
    for _ in range(int(os.environ.get("FUZZ_COUNT", "25"))):
        script = rng.choice(SCRIPTS)
        table = TABLES[script]
        flags = {}
        must_end = False
        for name in rng.sample(sorted(table), rng.randint(3, 8)):
            good, bad = table[name]
            is_bad = good == "" or (bad != "" and rng.random() < 1 / 8)
            flags[name] = rng.choice((bad if is_bad else good).split())
            must_end = must_end or is_bad
        must_end = must_end or not sizes_fit(flags) or not splits_fit(flags)
        faults.append(fault_of(script, flags, must_end))
    assert "".join(faults) == ""
