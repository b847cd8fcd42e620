"""What a run reads: problems, their prompts as token ids, and whether a model is whole."""

import csv
import functools
import json
import math
import random
import re
import sys
from pathlib import Path
from typing import Any

import numpy
import pyarrow
import torch
from peft import PeftModel
from pyarrow import parquet
from transformers import (
    AutoConfig,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from common.answers import last_boxed
from common.task import Problem, chain_problems

EMBEDDED = "chain_arithmetic"
PROMPT_COLUMNS = ["problem", "question", "prompt"]
ANSWER_COLUMNS = ["answer", "solution"]
FILE_KINDS = (".jsonl", ".json", ".parquet", ".csv")
# Some chat templates write today's date. It is fixed, so that a run can go on on another day.
FIXED_DATE = "{% macro strftime_now(format) %}26 Jul 2024{% endmacro %}"


# ---- Rows of a data set --------------------------------------------------------------------------
def read_splits(name: str, config: str | None) -> dict[str, list[dict[str, Any]]]:
    """Returns the rows of each split of a Hub data set. A file is one split, of no name.

    `datasets` would read files as well. But it guesses types: a column of 1 and "1/2" becomes JSON
    texts, 007 in a .csv file becomes 7, and of a row with a cell too many the first is dropped.
    """
    kind = Path(name).suffix
    if kind not in FILE_KINDS:
        import datasets  # a run on anything else starts half a second earlier without it

        splits = datasets.load_dataset(name, config)
        return {split: table_rows(rows.with_format("arrow")[:]) for split, rows in splits.items()}
    if kind == ".parquet":
        return {"": table_rows(parquet.ParquetFile(name).read())}
    with open(name, newline="", encoding="utf-8-sig") as file:
        if kind == ".csv":
            rows = list(csv.DictReader(file, strict=True))  # all cells are texts
            if any(None in (*row, *row.values()) for row in rows):
                raise ValueError(f"a row of {name} has more or fewer cells than the header")
            return {"": rows}
        text = file.read()
    if kind == ".jsonl":  # as one list of as many lines, so that an error names the right one
        text = "[" + re.sub(r"(?<=\S)(\s*\n\s*)(?=\S)", r",\1", text) + "]"
    return {"": json.loads(text)}


def table_rows(table: pyarrow.Table) -> list[dict[str, Any]]:
    """Returns the rows of a table. A 14.1 in 16 or 32 bits stays 14.1, and not 14.100000381."""
    for i, column in enumerate(table.schema):
        if pyarrow.types.is_floating(column.type):
            number = column.type.to_pandas_dtype()
            cells = table[i].to_pylist()
            rounded = [None if cell is None else float(str(number(cell))) for cell in cells]
            table = table.set_column(i, column.name, pyarrow.array(rounded, pyarrow.float64()))
    return table.to_pylist()


def parse_rows(
    rows: list[dict[str, Any]],
    name: str,
    prompt_column: str | None,
    answer_column: str | None,
    needs_answers: bool,
) -> list[Problem]:
    """Returns the problems in a table. Rows without a prompt or a needed answer are left out.

    How many are left out is said on standard error.
    """
    if not rows:
        raise ValueError(f"{name} has no rows")
    columns = dict.fromkeys(key for row in rows for key in row)
    prompt_key = pick_column(list(columns), prompt_column, PROMPT_COLUMNS)
    if needs_answers or answer_column or not columns.keys().isdisjoint(ANSWER_COLUMNS):
        answer_key = pick_column(list(columns), answer_column, ANSWER_COLUMNS)
    else:
        answer_key = ""
    problems = []
    for number, row in enumerate(rows, 1):
        others = columns | row
        prompt = as_prompt(cell_of(others, prompt_key))
        others.pop(prompt_key, None)
        cell = cell_of(others, answer_key) if answer_key else None
        steps = others.get("steps") or []
        has_steps = isinstance(steps, list) and all(type(step) is int for step in steps)
        if prompt is None or isinstance(cell, list | dict | bytes) or not has_steps:
            raise ValueError(
                f"row {number} of {name}: {prompt_key} must be a text or chat messages, not ending "
                "with a boxed answer, the answer one value, and steps, if any, integers"
            )
        answer = gold_answer(cell)
        if prompt and (answer or not needs_answers):
            problems.append(Problem(prompt, answer, tuple(steps), others, opening=0))

    lacking = f"without a problem in {prompt_key} or a final answer in {answer_key}"
    if not problems:
        raise ValueError(f"{name} has only rows {lacking}")
    if len(problems) < len(rows):
        print(
            f"{name}: {len(rows) - len(problems)} of {len(rows)} rows are left out, {lacking}",
            file=sys.stderr,
        )
    return problems


def pick_column(present: list[str], named: str | None, known: list[str]) -> str:
    """Returns the column that a flag names, or else the first known one that is there.

    A name with dots leads into nested columns: reward_model.ground_truth.
    """
    for column in [named] if named else known:
        if column in present or column.partition(".")[0] in present:
            return column
    raise ValueError(f"no column {named or known} among {present}: see --prompt_column and "
                     "--answer_column")  # fmt: skip


def cell_of(row: dict[str, Any], column: str) -> Any:
    """Returns a cell of a row, or None if it is missing. A dotted name leads into dicts."""
    if column in row:
        return row[column]
    first, _, rest = column.partition(".")
    return cell_of(row[first], rest) if isinstance(row.get(first), dict) else None


def as_prompt(cell: Any) -> str | list[dict[str, str]] | None:
    """Returns a text or chat messages whose contents are texts, or None if the cell is neither.

    Messages that end with a boxed answer of the assistant are a solution, and leave nothing to do.
    """
    if cell is None or isinstance(cell, str):
        return cell or ""
    messages = []
    for message in cell if isinstance(cell, list) else [None]:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            return None
        content = message.get("content")
        if isinstance(content, list):  # of parts
            content = "".join(part["text"] for part in content)
        if not isinstance(content, str):
            return None
        messages.append(message | {"content": content})
    is_begun = messages != [] and messages[-1]["role"] == "assistant"
    return None if is_begun and last_boxed(messages[-1]["content"]) else messages


# Text without a mark that is no answer: a number after some words or a verb ("the answer is 16"),
# five words in a row, or several lines that are not one LaTeX environment.
PROSE = re.compile(
    r"^\W*[A-Za-z]{2,}(?::|\s+[A-Za-z]{2,}\b).*[0-9]"
    r"|(?<!\\)\b(?:is|are|was|were|equals)\b.*[0-9]"
    r"|(?:[A-Za-z]+[ ,]+){5}"
    r"|^(?!.*\\begin\{).*\n",
    re.DOTALL,
)


def gold_answer(cell: Any) -> str:
    r"""Returns the final answer in a cell: what follows `####`, the last \boxed{}, or all of it.

    A box after `####` comes first, and what follows it is no answer if it is prose: it may be a
    heading. Returns "" if there is none: the cell is empty, no finite number, or prose.
    """
    text = as_written(cell).strip()
    tail = text.rpartition("####")[2]  # all of it without that mark
    answer = last_boxed(tail)
    if answer is None:
        answer = last_boxed(text) or "" if PROSE.search(tail) else tail
    return answer.strip()


def as_written(cell: Any) -> str:
    """Returns a cell as text: "" if it is missing or not finite, 12 of 12.0, never 1e-05."""
    if cell is None or (isinstance(cell, float) and not math.isfinite(cell)):
        return ""
    if isinstance(cell, float):
        return numpy.format_float_positional(cell, trim="-")
    return f"{cell:f}" if type(cell).__name__ == "Decimal" else str(cell)


# ---- Training problems and held-out ones ---------------------------------------------------------
def load_problems(
    name: str,
    config: str | None,
    train_split: str,
    test_split: str,
    eval_name: str | None,
    columns: tuple[str | None, str | None, bool],
    count: int,
    seed: int,
) -> tuple[list[Problem], list[Problem]]:
    """Returns the problems to train on, and the held-out ones, which may be among them.

    `columns` are those of prompts and answers, and whether answers are needed. The held-out
    problems, `count` at most, come from `eval_name` if that is given, else from the test split. Of
    a single split they are a fifth of the distinct problems at most, the same for every seed.
    """
    if name == EMBEDDED:
        if config not in [None, *"2345678"]:
            raise ValueError(f"--dataset_config of {EMBEDDED} is a number of operations, 2 to 8")
        length = int(config or 0)  # of chains; 0: 3 or 4 operations
        splits = {}
        train = chain_problems(4096, held_out=False, seed=seed, length=length)
    else:
        splits = read_splits(name, config)
        train = parse_rows(splits["" if "" in splits else train_split], name, *columns)

    if (eval_name or name) == EMBEDDED:
        held_out = chain_problems(count, held_out=True, length=int(config or 0))
    elif eval_name:
        eval_splits = read_splits(eval_name, None)
        held_out = parse_rows(
            eval_splits["" if "" in eval_splits else test_split], eval_name, *columns
        )
    elif len(splits) > 1 and test_split != train_split:
        held_out = parse_rows(splits[test_split], name, *columns)
    else:
        held_out = list({text_of(problem): problem for problem in train}.values())
        count = max(1, min(count, len(held_out) // 5))
    random.Random(0).shuffle(held_out)
    return train, held_out[:count]


def problem_at(position: int, count: int, seed: str | None) -> int:
    """Returns which of `count` problems stands at a position in an endless row of epochs.

    They are shuffled, unless the seed is None. It depends on nothing else, so a resumed run or
    another process finds the same problem there.
    """
    if seed is None:
        return position % count
    epoch, place = divmod(position, count)
    return epoch_order(epoch, count, seed)[place]


@functools.lru_cache(maxsize=2)
def epoch_order(epoch: int, count: int, seed: str | None) -> list[int]:
    """Returns the numbers of the problems in the order of an epoch."""
    order = list(range(count))
    random.Random(f"{seed} {epoch}").shuffle(order)
    return order


# ---- Prompts -------------------------------------------------------------------------------------
def load_tokenizer(
    model: str, revision: str, adapter: str | None
) -> tuple[PreTrainedTokenizerBase, int]:
    """Returns the base model's tokenizer, and how many tokens its context has."""
    # trust_remote_code is given because transformers would else ask on standard input.
    config = AutoConfig.from_pretrained(model, revision=revision, trust_remote_code=False)
    tokenizer = AutoTokenizer.from_pretrained(model, revision=revision, trust_remote_code=False)
    # OAR-P writes it over other tokens. Masks come from lengths, so the end token will do, too.
    if tokenizer.pad_token_id not in range(config.get_text_config().vocab_size):
        tokenizer.pad_token = tokenizer.eos_token

    # A folder of an adapter may hold another chat template.
    if adapter is not None and Path(adapter, "tokenizer_config.json").exists():
        own = AutoTokenizer.from_pretrained(adapter, trust_remote_code=False)
        if own.eos_token != tokenizer.eos_token or own.chat_template not in (
            None,
            tokenizer.chat_template,
        ):
            raise ValueError(f"{adapter} has another chat template or end token than its base")
    return tokenizer, context_length(config)


def context_length(config: PreTrainedConfig) -> int:
    """Returns how many tokens a model's context has.

    With longrope it ends where positions begin to depend on the longest row of a batch.
    """
    text_config = config.get_text_config()
    context = getattr(text_config, "max_position_embeddings", None) or sys.maxsize
    rope = getattr(text_config, "rope_parameters", None) or {}
    for parameters in (rope, *rope.values()):  # for all layers, or for each kind of them
        if isinstance(parameters, dict) and parameters.get("rope_type") == "longrope":
            context = min(context, parameters["original_max_position_embeddings"])
    return context


def whole_prompt(prompt: str | list, system_prompt: str | None = None) -> list[dict[str, str]]:
    """Returns all messages of a prompt, the system message first if there is one."""
    system = [{"role": "system", "content": system_prompt}] if system_prompt else []
    return system + ([{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt)


def text_of(problem: Problem) -> str:
    """Returns the words of a problem, by which two are the same whatever their white space."""
    text = " ".join(message["content"] for message in whole_prompt(problem.prompt))
    return " ".join(text.split())


def reply_text(
    tokenizer: PreTrainedTokenizerBase, prompt: str | list, ids: list[int], stop_ids: list[int]
) -> str:
    """Returns the text of a completion, without the tokens that end or pad it.

    It begins with what the prompt gave of the answer: a message of the assistant at its end.
    """
    is_begun = not isinstance(prompt, str) and prompt[-1]["role"] == "assistant"
    beginning = str(prompt[-1]["content"]) if is_begun else ""  # type: ignore[index]
    hidden = {*stop_ids, tokenizer.pad_token_id}
    return beginning + tokenizer.decode([token for token in ids if token not in hidden])


def encode_prompt(
    tokenizer: PreTrainedTokenizerBase,
    prompt: str | list,
    system_prompt: str | None = None,
    template_kwargs: dict[str, Any] | None = None,
) -> list[int]:
    """Returns the token ids of a prompt, by the chat template, which writes its own BOS token.

    A tokenizer without a template needs one in the keywords, as "chat_template". A message of the
    assistant at the end is left open.
    """
    messages = whole_prompt(prompt, system_prompt)
    is_begun = messages[-1]["role"] == "assistant"
    own = template_kwargs or {}
    template = FIXED_DATE + tokenizer.get_chat_template(own.get("chat_template"))
    text = tokenizer.apply_chat_template(
        messages,
        tokenize=False,
        add_generation_prompt=not is_begun,
        continue_final_message=is_begun,
        **own | {"chat_template": template},
    )
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def encode_problems(
    tokenizer: PreTrainedTokenizerBase,
    train: list[Problem],
    held_out: list[Problem],
    system_prompt: str | None,
    template_kwargs: dict[str, Any],
    room: int,
) -> tuple[list[Problem], list[Problem]]:
    """Returns the problems with their prompts as token ids, of which none has more than `room`.

    Training problems whose prompts are held out are left out.
    """
    messages = whole_prompt(train[0].prompt, system_prompt)
    told = encode_prompt(tokenizer, messages, None, template_kwargs)
    for i, message in enumerate(messages):
        others = messages[:i] + messages[i + 1 :]
        if (
            message["role"] == "system"
            and others
            and told == encode_prompt(tokenizer, others, None, template_kwargs)
        ):  # as with Phi-3
            raise ValueError("the chat template drops a system message: write it into the problems")
    encoded = []
    for problem in train + held_out:
        ids = encode_prompt(tokenizer, problem.prompt, system_prompt, template_kwargs)
        encoded.append(problem._replace(prompt_ids=tuple(ids)))
    longest = max(len(problem.prompt_ids) for problem in encoded)
    if longest > room:
        raise ValueError(f"the longest prompt has {longest} tokens. The model's context has room "
                         f"for {room} beside --max_completion_length")  # fmt: skip
    held_out = encoded[len(train) :]
    seen = {text_of(problem) for problem in held_out}
    train = [problem for problem in encoded[: len(train)] if text_of(problem) not in seen]
    if not train:
        raise ValueError("all training problems are held out: add rows")
    return train, held_out


def load_data(
    args: Any, needs_answers: bool
) -> tuple[PreTrainedTokenizerBase, list[Problem], list[Problem]]:
    """Returns the tokenizer, the problems to train on and the held-out ones, as the flags say."""
    tokenizer, context = load_tokenizer(
        args.model_name_or_path, args.model_revision, args.start_adapter
    )
    train, held_out = load_problems(
        args.dataset_name,
        args.dataset_config,
        args.dataset_train_split,
        args.dataset_test_split,
        args.eval_dataset_name,
        (args.prompt_column, args.answer_column, needs_answers),
        args.max_eval_samples,
        args.seed,
    )
    train, held_out = encode_problems(
        tokenizer,
        train,
        held_out,
        args.system_prompt,
        json.loads(args.chat_template_kwargs),
        context - args.max_completion_length,
    )
    return tokenizer, train, held_out


# ---- The files of the base model and of its adapter ---------------------------------------------
def check_base(base: PreTrainedModel, loading: dict[str, Any], nf4_dtype: str | None) -> None:
    """Raises ValueError if a model would train that is not the one in its files.

    `nf4_dtype` is the precision in which NF4 layers compute; None: no layer is quantized.
    """
    name = base.name_or_path
    if loading["missing_keys"]:  # the model class fills in random numbers
        raise ValueError(f"{name} lacks weights: {', '.join(sorted(loading['missing_keys'])[:5])}")
    # Weights of a whole part that the class does not have, such as a vision tower, may be left out.
    names = [*dict(base.named_modules()), *dict(base.base_model.named_modules())]
    parents = tuple(f"{parent}." for parent in {*names} - {"", base.base_model_prefix})
    # So may causal masks, in old files of GPT-2 and GPT-J.
    left_out = [
        key
        for key in sorted(loading["unexpected_keys"])
        if key.startswith(parents) and not key.endswith((".attn.bias", ".attn.masked_bias"))
    ]
    if left_out:
        raise ValueError(
            f"{name} has weights that {type(base).__name__} leaves out: {', '.join(left_out[:5])}"
        )
    layers = [layer for layer in base.modules() if hasattr(layer, "compute_dtype")]
    kinds = {(layer.weight.quant_type, layer.compute_dtype) for layer in layers}
    wanted = {("nf4", getattr(torch, nf4_dtype))} if nf4_dtype else set()
    if kinds != wanted or getattr(base, "is_quantized", False) != bool(nf4_dtype):
        raise ValueError(f"{name} is quantized already, and not as --load_in_4bit and --dtype say")
    if nf4_dtype and any(p.dim() == 3 and min(p.shape) > 1 for p in base.parameters()):
        raise ValueError(
            f"{name} has weights (experts?) that 4 bits leave out: set --load_in_4bit False"
        )


def check_adapter(model: PeftModel, targets: list[str], folder: str | None) -> None:
    """Raises ValueError if an adapter would not train as its flags or its files say.

    `targets` are the layers that a new adapter is for; `folder` is the one of a start adapter.
    """
    if folder is None:
        # PEFT leaves out names that it does not find.
        layers = "".join(f".{layer} " for layer in model.base_model.targeted_module_names)
        if targets != ["all-linear"] and not all(f".{name} " in layers for name in targets):
            raise ValueError(f"not all of --lora_target_modules {targets} are layers of the model")
    else:
        # PEFT loads what fits. It says what does not where the same weights are loaded again.
        loaded = model.load_adapter(folder, "default", is_trainable=True)
        if loaded.missing_keys or loaded.unexpected_keys:
            raise ValueError(f"{folder} has weights that the model lacks, or lacks some: {loaded}")
    config = model.peft_config["default"]
    is_variant = any(getattr(layer, "lora_variant", None) for layer in model.modules())
    if config.bias != "none" or config.lora_bias or is_variant:
        raise ValueError(f"{folder} trains biases, or is a variant of LoRA such as DoRA")
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    if model.config.get_text_config().tie_word_embeddings and any(
        hasattr(layer, "base_layer") for layer in ends
    ):
        raise ValueError("the model has one matrix for input and output: leave both out of the "
                         "adapter's layers")  # fmt: skip
    if any(p.dtype != torch.float32 for p in model.parameters() if p.requires_grad):
        raise ValueError("this adapter trains whole modules, which --dtype rounds: set --dtype "
                         "float32")  # fmt: skip
