"""Measures how fast rollout, score, credit and update are, side by side.

    python tools/bench.py                                   # the methods, on the embedded policy
    python tools/bench.py grpo_arca.py "grpo_oar.py --credit oar_p"
    python tools/bench.py grpo_arca.py --trl                # TRL's GRPOTrainer beside it
    git worktree add ../before 362cd04 && python tools/bench.py grpo_arca.py --against ../before
    python tools/bench.py grpo_arca.py --trl --shape 1.7B -- --max_completion_length 256
    python tools/bench.py --operations --shape narrow       # what a step asks a GPU for

A method is a script and its flags, in quotes. The flags after `--` go to all methods. A repeat is a
short run of each method. Every second repeat goes through them backwards, so that a machine that
becomes slower affects all of them alike. The first updates of a run are its warm-up and do not
count. The table shows medians over the repeats and, in brackets, quartiles. Ratios are taken within
a repeat: to the first method or, with --against, to the same one in the other checkout. All runs
have the same prompts, and a learning rate so low that the policy stays what it is.

TRL trains the same policy (NF4 and LoRA) on the same prompts, batches and rewards. Its rollout is
the time in `generate` alone, and the rest of its step counts as update.

--shape takes random weights in a published shape of Qwen3. They neither stop nor answer, so
completions have the greatest length and are paid for different characters. OAR works on answers, so
measure it on a real model. On a CPU a run has one thread, unless OMP_NUM_THREADS says otherwise.

--operations measures no steps. It counts on a CPU what grpo_arca.py would ask a GPU for. A GPU
takes microseconds to begin an operation, and much of its time goes there. Views are free. A product
with NF4 weights is four operations, as three make the weights dense, and a sum of a tensor and a
product is two, unless it is in place. Counts depend on a model's layers, not on its widths: the
shape "narrow" has those of 1.7B.
"""

import argparse
import itertools
import json
import logging
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # as in the scripts

import pandas
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3Config, TrainerCallback

from common.metrics import peak_memory
from common.run_log import environment

METHODS = [
    "grpo_arca.py --credit uniform",
    "grpo_arca.py",
    "grpo_oar.py",
    "grpo_oar.py --credit oar_p",
    "grpo_strace.py",
]
SHAPES = {  # hidden and intermediate size, layers, heads, and whether the embeddings are shared
    "0.6B": (1024, 3072, 28, 16, True),
    "1.7B": (2048, 6144, 28, 16, True),
    "4B": (2560, 9728, 36, 32, True),
    "8B": (4096, 12288, 36, 32, False),
    "narrow": (128, 384, 28, 16, True),  # for --operations
}
VOCABULARY = 151_936
CACHE = Path(tempfile.gettempdir(), "qwen3-shapes")
STATIONARY = "--learning_rate 1e-5 --lr_scheduler_type constant"
SHORT = "--max_eval_samples 2 --num_generations_eval 1 --eval_steps 0 --save_steps 0"
PHASES = ("rollout", "score", "credit", "update")  # of a step; metrics have their seconds
COLUMNS = ("step", *PHASES, "tokens/s", "peak GiB")
RATIOS = ("step", "rollout", "update")
FREE = ("empty", "new_empty", "_unsafe_view", "_local_scalar_dense")  # beginnings of names
COSTS = {"gemm_4bit": 4, "addmm": 2}  # operations on a GPU, where these are more than one


class Contender(NamedTuple):
    """What is measured."""

    name: str
    checkout: Path
    command: list[str]
    reference: str  # the contender that it is compared with


# ---- Random weights ------------------------------------------------------------------------------
def make_checkpoint(name: str) -> Path:
    """Returns the folder of a shape's bf16 checkpoint, which is made once.

    Its tokenizer is the embedded policy's, and token 0 ends a completion.
    """
    folder = CACHE / f"qwen3-{name}"
    if folder.exists():
        return folder
    hidden, intermediate, layers, heads, is_tied = SHAPES[name]
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=40_960,
        tie_word_embeddings=is_tied,
        eos_token_id=0,
        pad_token_id=0,
    )
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "common/tiny_policy")
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(0)
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    partial = folder.with_suffix(".partial")  # so that an interruption leaves no half checkpoint
    tokenizer.save_pretrained(partial)
    model.save_pretrained(partial)
    return partial.rename(folder)


def variety(completions: list, **_: Any) -> list[float]:
    """Pays for each different character: a reward that random weights get, too."""
    return [len(set(str(completion))) / 100 for completion in completions]


# ---- TRL -----------------------------------------------------------------------------------------
def clock() -> float:
    """Returns seconds, once a GPU's work is done."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


class Steps(TrainerCallback):
    """Writes TRL's steps as rows of a metrics.jsonl like ours."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.row: dict[str, float] = {}

    def on_step_begin(self, *_: Any, **state: Any) -> None:
        self.row = {"seconds_rollout": 0.0, "seconds_score": 0.0, "seconds_credit": 0.0}
        self.began = clock()

    def on_step_end(self, *_: Any, **state: Any) -> None:
        self.row["seconds_update"] = clock() - self.began - self.row["seconds_rollout"]
        self.row["peak_memory_gb"] = peak_memory(state["model"].device)
        with open(self.path, "a") as file:
            file.write(json.dumps(self.row) + "\n")


def run_trl(argv: list[str]) -> None:
    """Trains with TRL's GRPOTrainer, which gets the policy, data and flags of grpo_arca.py."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    import grpo_arca
    from common.data import problem_at, whole_prompt
    from common.reward import reward_values, weighted_sum

    args = grpo_arca.parse_args(argv)
    run = grpo_arca.Run(args)
    prompts = range(args.max_steps * run.rollout_size // args.num_generations)
    problems = [run.train_set[problem_at(i, len(run.train_set), str(args.seed))] for i in prompts]
    messages = [whole_prompt(problem.prompt, args.system_prompt) for problem in problems]
    steps = Steps(Path(args.output_dir, "metrics.jsonl"))
    generate = run.model.generate

    def timed_generate(*inputs: Any, **flags: Any) -> Any:
        began = clock()
        completions = generate(*inputs, **flags)
        steps.row["seconds_rollout"] += clock() - began
        return completions

    def reward(completions: list, completion_ids: list, place: list[int], **_: Any) -> list[float]:
        steps.row["rollout_tokens"] = sum(map(len, completion_ids))
        chosen = [problems[i] for i in place]
        texts = [messages[0]["content"] for messages in completions]
        values = reward_values(run.reward_funcs, chosen, texts, completion_ids, {})
        return weighted_sum(values, run.reward_weights).tolist()

    run.model.generate = timed_generate
    for layer in run.model.modules():
        vars(layer).pop("forward", None)  # TRL computes with the layers' own functions
    config = GRPOConfig(
        output_dir=args.output_dir,
        max_steps=args.max_steps,
        learning_rate=args.learning_rate,
        per_device_train_batch_size=args.per_device_train_batch_size,
        gradient_accumulation_steps=args.gradient_accumulation_steps,
        num_generations=args.num_generations,
        max_completion_length=args.max_completion_length,
        temperature=args.temperature,
        top_p=args.top_p,
        loss_type=args.loss_type,
        beta=args.beta,
        gradient_checkpointing=args.gradient_checkpointing,
        chat_template_kwargs=json.loads(args.chat_template_kwargs),
        bf16=args.dtype == "bfloat16",
        use_cpu=not grpo_arca.CUDA,
        shuffle_dataset=False,
        save_strategy="no",
        report_to="none",
    )
    data = Dataset.from_dict({"prompt": messages, "place": prompts})
    Path(args.output_dir).mkdir(exist_ok=True)
    GRPOTrainer(
        run.model,
        reward,
        config,
        train_dataset=data,
        processing_class=run.tokenizer,
        callbacks=[steps],
    ).train()


# ---- Operations ----------------------------------------------------------------------------------
class Operations(TorchDispatchMode):
    """Counts the operations in a `with` block."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if not (func.is_view or name.startswith(FREE)):
            self.count += COSTS.get(name, 1)
        return func(*args, **(kwargs or {}))


def count_of(part: Callable, *inputs: Any) -> int:
    """Returns how many operations a part of a step takes."""
    with Operations() as operations:
        part(*inputs)
    return operations.count


def count_operations(argv: list[str]) -> dict[str, int]:
    """Returns how many operations a GPU is asked for, in parts of a step."""
    import grpo_arca

    argv = [*argv, "--max_completion_length", "3", "--cuda_graphs", "False"]
    run = grpo_arca.Run(grpo_arca.parse_args(argv))
    batch = grpo_arca.collect(run, {})
    micros = grpo_arca.micro_batches(run, batch)[0][:1]
    grpo_arca.score(run, batch, micros, {})
    grpo_arca.update(run, micros)  # the first one makes the optimizer's state, too
    with (
        # It is several operations on a CPU, but one on a GPU, as `layer_norm` is.
        mock.patch.object(F, "rms_norm", lambda x, shape, *_: F.layer_norm(x, shape)),
        mock.patch.object(grpo_arca, "CUDA", True),
    ):
        longer = count_of(grpo_arca.collect, run, {})
        run.args.max_completion_length = 2
        found = {"a decode step": longer - count_of(grpo_arca.collect, run, {})}
        found["ARCA's scores of a micro-batch"] = count_of(
            torch.no_grad()(grpo_arca.token_scores), run, micros[0], {}
        )
        for kind in ("with", "without"):
            found[f"an update's micro-batch, {kind} checkpointing"] = count_of(
                grpo_arca.update, run, micros * 2
            ) - count_of(grpo_arca.update, run, micros)
            run.model.gradient_checkpointing_disable()
    return found


# ---- Runs ----------------------------------------------------------------------------------------
def contenders_of(options: argparse.Namespace) -> list[Contender]:
    """Returns what is measured."""
    found = []
    for method in dict.fromkeys(options.methods):  # equal ones would be one row
        command = [sys.executable, *shlex.split(method)]
        reference = options.methods[0]
        if options.against:
            reference = f"{method}, there"
            found.append(Contender(reference, options.against, command, reference))
        found.append(Contender(method, ROOT, command, reference))
    if options.trl:
        code = [sys.executable, "-c", "import sys, bench; bench.run_trl(sys.argv[1:])"]
        found.append(Contender("TRL", ROOT, code, options.methods[0]))
    return found


def measure(contender: Contender, flags: list[str], warmup: int) -> dict[str, float]:
    """Returns the figures of a run: means over its updates after the warm-up."""
    paths = f"{ROOT}/tools:{os.environ.get('PYTHONPATH', '')}"  # for `variety` and `run_trl`
    threads = os.environ.get("OMP_NUM_THREADS", "1")
    variables = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": threads}
    with tempfile.TemporaryDirectory() as folder:
        command = [*contender.command, *flags, "--output_dir", f"{folder}/run"]
        done = subprocess.run(
            command, cwd=contender.checkout, env=variables, capture_output=True, text=True
        )
        if done.returncode != 0:
            sys.exit(f"bench.py: error: {contender.name} failed:\n{done.stderr[-2000:]}")
        rows = pandas.read_json(f"{folder}/run/metrics.jsonl", lines=True)
    updates = rows[rows["seconds_update"].notna()][warmup:]
    if not updates["seconds_rollout"].all():
        sys.exit("bench.py: error: it measures rollouts that serve one update each")
    figures = {phase: updates[f"seconds_{phase}"].mean() for phase in PHASES}
    figures["step"] = sum(figures.values())
    figures["tokens/s"] = updates["rollout_tokens"].mean() / figures["rollout"]
    figures["peak GiB"] = updates["peak_memory_gb"].iloc[-1]
    return figures


def measure_all(
    contenders: list[Contender], flags: list[str], options: argparse.Namespace
) -> dict[str, list[dict[str, float]]]:
    """Returns the figures of all contenders in every repeat, and writes them to --output."""
    found: dict[str, list[dict[str, float]]] = {contender.name: [] for contender in contenders}
    there_and_back = [*contenders, *reversed(contenders)]
    order = itertools.islice(itertools.cycle(there_and_back), options.repeats * len(contenders))
    for contender in tqdm(list(order), unit="run"):
        found[contender.name].append(measure(contender, flags, options.warmup))
        if options.output:  # at once, so that a run that fails or takes too long loses no other
            repeats = {name: own for name, own in found.items() if own}
            figures = environment() | {"flags": flags, "repeats": repeats}
            options.output.write_text(json.dumps(figures, indent=1) + "\n")
    return found


# ---- The table -----------------------------------------------------------------------------------
def spread(values: pandas.Series) -> str:
    """Returns "median (quartile - quartile)"."""
    low, middle, high = values.quantile([0.25, 0.5, 0.75])
    return f"{middle:.3f} ({low:.3f} - {high:.3f})"


def table(contenders: list[Contender], found: dict[str, list[dict[str, float]]]) -> str:
    """Returns the figures, and their ratios to those of the reference, as text."""
    rows = []
    for contender in contenders:
        own = pandas.DataFrame(found[contender.name])
        ratios = own / pandas.DataFrame(found[contender.reference])
        relative = {f"{name} / reference's": spread(ratios[name]) for name in RATIOS}
        absolute = {name: f"{own[name].median():,.2f}" for name in COLUMNS}
        rows.append({"method": contender.name} | relative | absolute)
    return pandas.DataFrame(rows).to_string(index=False)


def parse_options(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Returns this program's options, and the flags after `--`."""
    split = argv.index("--") if "--" in argv else len(argv)
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("methods", nargs="*", default=METHODS, help='"script.py --flag value"')
    add("--trl", action="store_true", help="TRL's GRPOTrainer beside them")
    add("--operations", action="store_true", help="print what a step asks a GPU for, as JSON")
    add("--against", type=Path, help="folder of another checkout, beside this one")
    add("--shape", choices=SHAPES, help="random weights; default: the embedded policy")
    add("--repeats", type=int, default=5, help="runs of each")
    add("--warmup", type=int, default=1, help="updates of a run that do not count")
    add("--updates", type=int, default=3, help="updates of a run that count")
    add("--output", type=Path, help="file for the figures of every repeat, as JSON")
    return parser.parse_args(argv[:split]), argv[split + 1 :]


def main() -> None:
    options, own_flags = parse_options(sys.argv[1:])
    flags = f"{STATIONARY} {SHORT} --max_steps {options.warmup + options.updates}".split()
    if options.shape:
        flags += [
            "--model_name_or_path", str(make_checkpoint(options.shape)),
            "--reward_funcs", "bench.variety",
        ]  # fmt: skip
    flags += own_flags
    if options.operations:
        print(json.dumps(count_operations(flags), indent=1))
        return
    contenders = contenders_of(options)
    found = measure_all(contenders, flags, options)
    print(table(contenders, found))


if __name__ == "__main__":
    main()
