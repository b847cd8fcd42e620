"""Random combinations of flags: each takes two tiny steps, or ends with exit code 2 and a sentence.

What must come of a combination is known from tables of good and bad values, not from the scripts:
one bad value, or good ones that do not fit together (`misfit`), is a mistake of the user. The runs
are forks of fork_server.py.
"""

import dataclasses
import importlib
import json
import os
import random
import re
from pathlib import Path
from typing import NamedTuple

import pytest
from support import SCRIPTS, TINY, run_forks

from common.data import chain_problems

BASE = {
    "dataset_name": "{data}/good.jsonl", "max_steps": "2", "max_completion_length": "8",
    "per_device_train_batch_size": "4", "gradient_accumulation_steps": "1",
    "num_generations": "2", "max_eval_samples": "2", "num_generations_eval": "1",
    "eval_steps": "0", "output_dir": "out",
}  # fmt: skip

# flag: (good values, bad values), each a string split at blanks; " " alone is one empty argument.
# {data} is the folder of `write_data`. Infinity is bad where it would make weights NaN.
BOOL = ("true false True 0 yes", "maybe 2")
COUNT = ("1 2 3", "0 -1 1.5 two")
SHARE = ("0 0.25 0.8 1", "-0.1 1.1 nan inf x")
SHARED = {
    "model_name_or_path": (TINY, "/no/such/model {data} {data}/good.jsonl nobody/nothing"),
    "model_revision": ("main v2", ""),
    "load_in_4bit": BOOL,
    "dtype": ("float32 bfloat16", "float16 bf16 auto"),
    "lora_r": ("1 8 300", "0 -1 1.5 nan"),
    "lora_alpha": ("1 16", "1.5 x 0 -16"),
    "lora_dropout": ("0 0.1 0.9", "1 -0.1 nan inf x"),
    "lora_target_modules": ("all-linear q_proj lm_head down_proj", "nope"),
    "dataset_name": (
        "chain_arithmetic {data}/good.jsonl {data}/good.json {data}/messages.jsonl "
        "{data}/table.csv",
        "{data}/missing.jsonl {data}/empty.jsonl {data}/torn.jsonl {data}/columns.jsonl {data} "
        "{data}/noanswer.jsonl {data}/same.jsonl {data}/bytes.jsonl {data}/torn.csv no_such_set "
        "{data}/numbers.jsonl {data}/lists.jsonl {data}/folder.jsonl {data}/long.jsonl",
    ),
    "dataset_config": ("main", ""),  # a local file has neither configurations nor splits
    "dataset_train_split": ("train other", ""),
    "dataset_test_split": ("test other", ""),
    "eval_dataset_name": (
        "chain_arithmetic {data}/good.jsonl",
        "{data}/missing.jsonl {data}/torn.jsonl no_such_set",
    ),
    "prompt_column": ("problem", "nothing answer2"),
    "answer_column": ("answer", "nothing problem2"),
    "system_prompt": ("Be_brief. ünïcode☃ {{}}", ""),
    "chat_template_kwargs": ('{{}} {{"enable_thinking":false}}', "[1] { null 5 no"),
    "reward_funcs": ("accuracy_reward", "nope no.such os.path"),
    "reward_weights": ("1 0.5 -2", "x nan inf"),
    "num_generations": ("2 4", "1 0 -2 1.5 x"),
    "max_completion_length": ("1 8 64", "0 -1 1.5 100000"),
    "temperature": ("0.1 0.7 1 5", "0 -1 nan inf x"),
    "top_p": ("0.01 0.5 1", "0 -0.1 1.5 nan inf"),
    "top_k": ("0 1 5 100000", "-1 1.5 x"),
    "rollout_weights": ("dense quantized", "auto merged DENSE"),
    "per_device_rollout_batch_size": ("0 1 3 100", "-1 1.5 x"),
    "per_device_train_batch_size": ("1 2 4 6", "0 -4 1.5"),
    "gradient_accumulation_steps": ("1 2", "0 -1 x"),
    "steps_per_generation": ("0 1 2 4", "-1 1.5"),
    "num_iterations": ("1 2 3", "0 -1 1.5"),
    "gradient_checkpointing": BOOL,
    "torch_compile": ("false", "maybe"),  # compiling takes minutes on a CPU
    "loss_type": ("grpo dapo dr_grpo", "ppo GRPO bnpo"),
    "scale_rewards": ("group batch none", "std true"),
    "negative_weight": ("0 0.25 1 3", "-0.1 nan inf x"),
    "epsilon": ("0.0001 0.2 0.9", "0 -0.2 nan x"),
    "epsilon_high": ("0 0.28 5", "-0.5 -1 nan x"),
    "beta": ("0 0.04 1", "-0.1 nan inf x"),
    "mask_truncated_completions": BOOL,
    "skip_zero_gradient": BOOL,
    "learning_rate": ("1e-6 4e-3 0.1", "0 -1 nan inf fast"),
    "weight_decay": ("0 0.1", "-0.1 nan inf x"),
    "warmup_steps": ("0 1 100", "-1 1.5"),
    "lr_scheduler_type": ("cosine linear constant constant_with_warmup", "cosin polynomial"),
    "max_grad_norm": ("0 0.5 100", "-1 nan x"),
    "max_steps": ("0 1 2", "-1 1.5 x"),
    "seed": ("0 1 4294967295", "-1 4294967296 18446744073709551616 1.5 x"),
    "eval_steps": ("0 1 2", "-1 x"),
    "max_eval_samples": COUNT,
    "num_generations_eval": COUNT,
    "per_device_eval_batch_size": COUNT,
    "output_dir": ("out2 a/b/c ünï a.b", "{data}/good.jsonl {data}/good.jsonl/run /proc/nope"),
    "save_steps": ("0 1 500", "-1 1.5"),
    "save_total_limit": ("1 3", "0 -1 x"),
    "resume_from_checkpoint": ("latest", "{data}/no_such_checkpoint {data} {data}/good.jsonl"),
    "report_to": ("none", "mlflow all"),
    "run_name": ("mine ünï☃", ""),
    "no_such_flag": ("", "1"),
}
OWN = {
    "grpo_arca": {
        "credit": (
            "arca uniform surprisal probability entropy_reduction divergence random shuffled",
            "oar_g s_trace nothing",
        ),
        "sharpening": ("0 0.5 1 3 100", "-1 nan inf x"),
        "score_in_fp32": BOOL,
    },
    "grpo_oar": {
        "credit": ("oar_g oar_p uniform random shuffled", "arca gspo nothing"),
        "score_in_fp32": BOOL,
        "oar_quantile": SHARE,
        "oar_beta": ("0 1 5", "-1 nan inf x"),
        "oar_floor": SHARE,
        "oar_keep_mass": BOOL,
        "oar_answer_mode": ("auto last answer_mean answer_joint", "first"),
        "oar_noise_std": ("1e-6 1e-3 0.1", "0 -1 nan inf x"),
        "oar_conclude": ("So_\\boxed{{ ☃", ""),
        "oar_max_tokens_per_micro_batch": ("1 64 16384", "0 -1 1.5"),
    },
    "grpo_strace": {
        "credit": ("s_trace p_trace gspo grpo_lambda uniform", "arca oar_g nothing"),
        "trace_lambda": SHARE,
        "trace_normalize": BOOL,
        "trace_entropy_quantile": SHARE,
        "trace_mask_scope": ("completion batch", "group"),
        "trace_keep_own": BOOL,
        "trace_kernel": ("recent both", "first"),
    },
}
DATA_FLAGS = {"dataset_name", "eval_dataset_name", "prompt_column", "answer_column"}


def flags_of(script: str) -> set[str]:
    fields = dataclasses.fields(importlib.import_module(script).Args)
    return {field.name for field in fields if field.init}  # others are set by `parse_args`


def table(script: str) -> dict[str, tuple[str, str]]:
    known = flags_of(script) | {"no_such_flag"}
    return {name: pair for name, pair in (SHARED | OWN[script]).items() if name in known}


class Combination(NamedTuple):
    script: str
    flags: dict[str, str]  # drawn, over those of BASE
    bad: list[str]  # the flags that have a bad value

    def argv(self) -> list[str]:
        return [
            word for name, value in (BASE | self.flags).items() for word in (f"--{name}", value)
        ]

    def line(self) -> str:
        return self.script + " " + " ".join(f"--{n} {v!r}" for n, v in self.flags.items())


def values(text: str) -> list[str]:
    return text.split()


def draw(rng: random.Random) -> Combination:
    """3 to 8 flags, one value in eight a bad one."""
    script = rng.choice(SCRIPTS)
    choices, flags, bad = table(script), {}, []
    for name in rng.sample(sorted(choices), rng.randint(3, 8)):
        good_values, bad_values = map(values, choices[name])
        is_bad = not good_values or (bool(bad_values) and rng.random() < 1 / 8)
        flags[name] = rng.choice(bad_values if is_bad else good_values)
        bad += [name] * is_bad
    return Combination(script, flags, bad)


def misfit(flags: dict[str, str]) -> bool:
    """Good values that do not fit together: the rollout is no whole number of groups or updates."""
    names = ("per_device_train_batch_size", "gradient_accumulation_steps", "num_generations")
    batch, accumulation, group = (int((BASE | flags)[name]) for name in names)
    steps = int(flags.get("steps_per_generation", 0)) or accumulation
    return bool(steps % accumulation or batch * steps % group)


def write_data(folder: Path) -> None:
    """The files that the tables name."""
    problems = chain_problems(12, held_out=False)
    rows = [{"problem": p.prompt, "answer": p.answer} for p in problems]
    chats = [{"prompt": [{"role": "user", "content": p.prompt}], "answer": "1"} for p in problems]
    lines = {
        "good": rows, "messages": chats, "columns": [{"text": "a", "label": 1}],
        "noanswer": [{"problem": "a", "answer": ""}], "same": rows[:1] * 9, "lists": [[1, 2]],
        "numbers": [{"problem": 5, "answer": 6}] * 9,
        "long": [{"problem": "1 " * 3000, "answer": "1"}, *rows],
    }  # fmt: skip
    for name, content in lines.items():
        text = "".join(json.dumps(row) + "\n" for row in content)
        (folder / f"{name}.jsonl").write_text(text)
    (folder / "good.json").write_text(json.dumps(rows))
    (folder / "torn.jsonl").write_text(json.dumps(rows[0]) + '\n{"problem": "a", "ans\n')
    (folder / "empty.jsonl").write_text("")
    (folder / "bytes.jsonl").write_bytes(bytes(range(256)) * 9)
    table = "problem,answer\n" + "".join(f'"{p.prompt}",{p.answer}\n' for p in problems)
    (folder / "table.csv").write_text(table)
    (folder / "torn.csv").write_text(table[:-5] + '\n"')
    (folder / "folder.jsonl").mkdir()


def run_all(folder: Path, combinations: list[Combination]) -> list[Path]:
    """Runs them; returns the folder of each."""
    data = folder / "data"
    data.mkdir()
    write_data(data)
    folders = [folder / f"{i:04d}" for i in range(len(combinations))]
    cases = []
    for path, combination in zip(folders, combinations, strict=True):
        path.mkdir()
        argv = [fill(word, data) for word in combination.argv()]
        cases.append({"folder": str(path), "script": combination.script, "argv": argv})
    run_forks(folder, cases, jobs=len(os.sched_getaffinity(0)))
    return folders


def fill(word: str, data: Path) -> str:
    """{data} filled in; doubled braces stand for one, as in str.format."""
    return word.replace("{data}", str(data)).replace("{{", "{").replace("}}", "}")


# What Python prints of a library's warning, as PEFT's about an adapter on a tied lm_head.
WARNING = re.compile(r"^\S+:\d+: \w*Warning: .*\n(?:.*\n)*?  warnings\.warn\(.*\n", re.MULTILINE)


def refusal_fault(folder: Path, script: str) -> str | None:
    """What is wrong with how a run was refused: one sentence, maybe after the introduction."""
    err, out = ((folder / f"std{kind}.txt").read_text() for kind in ("err", "out"))
    err = WARNING.sub("", err)
    lines = [line for line in err.splitlines() if f"{script}.py: " not in line or "error" in line]
    if len(lines) != 1 or not lines[0].startswith(f"{script}.py: error: "):
        return f"stderr is not one sentence: {err[-600:]}"
    return f"printed {out[-300:]}" if out else None


def run_fault(folder: Path, steps: int) -> str | None:
    """What is wrong with a run that ended well."""
    summaries = list(folder.rglob("summary.json"))
    if len(summaries) != 1:
        return f"{len(summaries)} summaries"
    lines = (summaries[0].parent / "metrics.jsonl").read_text().splitlines()
    rows = [row for row in map(json.loads, lines) if "reward" in row]
    if [row["step"] for row in rows] != list(range(1, steps + 1)):
        return f"steps {[row['step'] for row in rows]}, not {steps}"
    nulls = {name for row in rows for name, value in row.items() if value is None}
    return f"not finite: {sorted(nulls)}" if nulls else None


def fault(folder: Path, combination: Combination) -> str | None:
    """What is wrong with the outcome of a combination, None if nothing is."""
    script, flags, bad = combination
    code = (folder / "code.txt").read_text()
    wrong = refusal_fault(folder, script) if code == "2" else None
    if code == "0":
        wrong = run_fault(folder, int((BASE | flags)["max_steps"]))
    if code not in "02":
        wrong = (folder / "stderr.txt").read_text()[-1500:]
    if wrong is None and len(DATA_FLAGS & set(flags)) > 1:
        return None  # a column may be of one set and not of the other: either outcome is right
    expected = "2" if bad or misfit(flags) else "0"
    if wrong is None and code == expected:
        return None
    wrong = wrong or (folder / "stderr.txt").read_text()[-300:]
    return f"{folder.name}: {combination.line()}\n  bad {bad}, exit code {code}: {wrong}"


def check(folders: list[Path], combinations: list[Combination]) -> None:
    outcomes = map(fault, folders, combinations)
    faults = [outcome for outcome in outcomes if outcome]
    assert not faults, f"{len(faults)} of {len(combinations)}:\n" + "\n".join(faults)
    codes = [(path / "code.txt").read_text() for path in folders]
    assert min(codes.count("0"), codes.count("2")) > len(codes) / 5  # both kinds were tried


@pytest.mark.parametrize("script", SCRIPTS)
def test_the_tables_have_every_flag(script):
    assert flags_of(script) == set(table(script)) - {"no_such_flag"}


@pytest.mark.slow
def test_every_bad_value_alone(tmp_path):
    """So that no other mistake on the same line hides that it passes."""
    combinations = [
        Combination(script, {name: value}, [name])
        for script in SCRIPTS
        for name, (_, bad) in table(script).items()
        if name in OWN[script] or script == SCRIPTS[0]  # what is shared is the same code
        for value in values(bad)
    ]
    folders = run_all(tmp_path, combinations)
    faults = [outcome for outcome in map(fault, folders, combinations) if outcome]
    assert not faults, f"{len(faults)} of {len(combinations)}:\n" + "\n".join(faults)


@pytest.mark.slow
def test_a_thousand_combinations(tmp_path):
    rng = random.Random(int(os.environ.get("FUZZ_SEED", "1")))
    count = int(os.environ.get("FUZZ_COUNT", "1000"))
    combinations = [draw(rng) for _ in range(count)]
    check(run_all(tmp_path, combinations), combinations)
