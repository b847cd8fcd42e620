"""What a run reads: problems, and their prompts as token ids."""

import contextlib
import csv
import functools
import json
import random
import re
import sys
from pathlib import Path
from typing import Any

import numpy
import pyarrow
from pyarrow import parquet
from transformers import (
    AutoConfig,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedTokenizerBase,
)

from common import fail
from common.answers import last_boxed
from common.reward import is_right
from common.task import Problem, chain_problems

EMBEDDED = "chain_arithmetic"
PROMPT_COLUMNS = ["problem", "question", "prompt"]
ANSWER_COLUMNS = ["answer", "solution"]
FILE_KINDS = (".jsonl", ".json", ".parquet", ".csv")
# Some chat templates write today's date. It is fixed, so that a run can resume on another day.
FIXED_DATE = "{% macro strftime_now(format) %}26 Jul 2024{% endmacro %}"


# ---- Rows of a data set --------------------------------------------------------------------------
def read_splits(name: str, config: str | None) -> dict[str, list[dict[str, Any]]]:
    """Returns the rows of each split of a Hub data set. A file is one split, without a name.

    `datasets` could read files, too, but it guesses types: a column of 1 and "1/2" becomes JSON
    texts, 007 in a .csv file becomes 7, and a row with one cell too many loses its first cell.
    """
    kind = Path(name).suffix
    if kind not in FILE_KINDS:
        import datasets  # takes half a second, so only those who need it import it

        splits = datasets.load_dataset(name, config)
        return {split: table_rows(rows.with_format("arrow")[:]) for split, rows in splits.items()}
    if kind == ".parquet":
        return {"": table_rows(parquet.ParquetFile(name).read())}
    with open(name, newline="", encoding="utf-8-sig") as file:
        if kind == ".csv":
            header, *rows = filter(None, csv.reader(file, strict=True))  # all cells are texts
            return {"": [as_row(list(zip(header, row, strict=True))) for row in rows]}
        text = file.read()
    if kind == ".json":
        return {"": json.loads(text, object_pairs_hook=as_row)}
    # Each line is a list, so that no row goes on in the next line, and an error names its line.
    lines = json.loads("[[" + text.replace("\n", "],\n[") + "]]", object_pairs_hook=as_row)
    return {"": [row for line in lines for row in line]}


def as_row(cells: list[tuple[str, Any]]) -> dict[str, Any]:
    """Returns a row from its cells, whose names must differ."""
    row = dict(cells)
    if len(row) < len(cells):
        fail(f"two columns have one name: {[name for name, _ in cells]}")
    return row


def table_rows(table: pyarrow.Table) -> list[dict[str, Any]]:
    """Returns the rows of a table, whose columns must have different names."""
    return as_stored(
        table.to_struct_array().to_pylist(), pyarrow.list_(pyarrow.struct(list(table.schema)))
    )


def as_stored(value: Any, kind: pyarrow.DataType) -> Any:
    """Returns a value of a table: 14.1 for what is 14.1 in 32 bits, and not 14.100000381.

    `datasets` keeps a column of mixed types as JSON texts.
    """
    if isinstance(value, str) and isinstance(kind, pyarrow.JsonType):
        return json.loads(value)
    if isinstance(value, dict):
        return {field.name: as_stored(value[field.name], field.type) for field in kind}
    if isinstance(value, list) and hasattr(kind, "value_type"):
        return [as_stored(item, kind.value_type) for item in value]
    return float(str(kind.to_pandas_dtype()(value))) if isinstance(value, float) else value


def parse_rows(
    rows: list[dict[str, Any]],
    name: str,
    prompt_column: str | None,
    answer_column: str | None,
    needs_answers: bool,
) -> list[Problem]:
    """Returns the problems in a table. Rows without a prompt or a needed answer are left out.

    Standard error says how many.
    """
    if not rows or not all(isinstance(row, dict) for row in rows):
        fail(f"{name} has no rows, or is no list of rows with named columns")
    columns = dict.fromkeys(key for row in rows for key in row)
    prompt_key = pick(list(columns), prompt_column, PROMPT_COLUMNS)
    if needs_answers or answer_column or not columns.keys().isdisjoint(ANSWER_COLUMNS):
        answer_key = pick(list(columns), answer_column, ANSWER_COLUMNS)
    else:
        answer_key = ""
    problems = []
    for number, row in enumerate(rows, 1):
        others = columns | row
        prompt = as_prompt(cell_of(others, prompt_key))
        others.pop(prompt_key, None)
        cell = cell_of(others, answer_key) if answer_key else None
        answer = gold_answer(cell)
        steps = others.get("steps") or []
        has_steps = isinstance(steps, list) and all(type(step) is int for step in steps)
        if (
            prompt is None
            or has_answer(begun_answer(prompt), answer)
            or isinstance(cell, list | dict | bytes)
            or not has_steps
        ):
            fail(
                f"row {number} of {name}: {prompt_key} must be a text or chat messages that do not "
                "end with the answer, the answer one value, and steps, if any, integers"
            )
        if prompt and (answer or not needs_answers):
            problems.append(Problem(prompt, answer, tuple(steps), others, opening=0, row=number))

    lacking = f"without a problem in {prompt_key} or a final answer in {answer_key}"
    if not problems:
        fail(f"{name} has only rows {lacking}")
    if len(problems) < len(rows):
        print(
            f"{name}: {len(rows) - len(problems)} of {len(rows)} rows are left out, {lacking}",
            file=sys.stderr,
        )
    return problems


def pick(present: list[str], named: str | None, known: list[str]) -> str:
    """Returns the column that a flag names, or else the first known one that is there.

    A name with dots leads into nested columns: reward_model.ground_truth. Splits have no dots.
    """
    names = [named] if named else known
    found = [name for name in names if name in present or name.partition(".")[0] in present]
    if not found:
        fail(f"no {named or known} among the columns or splits {present}: see --help")
    return found[0]


def cell_of(row: dict[str, Any], column: str) -> Any:
    """Returns a cell of a row, or None if it is missing. A dotted name leads into dicts."""
    if column in row:
        return row[column]
    first, _, rest = column.partition(".")
    return cell_of(row[first], rest) if isinstance(row.get(first), dict) else None


def as_prompt(cell: Any) -> str | list[dict[str, str]] | None:
    """Returns a text or chat messages whose contents are texts, or None if the cell is neither."""
    if cell is None or isinstance(cell, str):
        # A .csv file holds the text of a chat, and not the chat.
        return (
            None if re.match(r"\s*\[\s*\{.*['\"]role['\"]:", cell or "", re.DOTALL) else cell or ""
        )
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
    return messages


def begun_answer(prompt: str | list) -> str:
    """Returns the answer that a prompt begins: the assistant's message at its end, or ""."""
    return "".join(m["content"] for m in whole_prompt(prompt)[-1:] if m["role"] == "assistant")


def has_answer(begun: str, answer: str) -> bool:
    """Returns whether the beginning of an answer already has a box, or the right answer itself.

    It must stand there as a whole word or number: 7 is not in 17, 7.5 or -7. Commas do not count.
    """
    return last_boxed(begun) is not None or (
        answer != ""
        and re.search(
            rf"(?<![\w.-]){re.escape(answer.replace(',', ''))}(?![\w-]|\.\d)",
            begun.replace(",", ""),
        )
        is not None
    )


# Text without a mark is no answer if it has a number after some words or a verb ("the answer is
# 16"), five words in a row, or several lines that are not one LaTeX environment, or if it is what
# programs write for a number that is missing or not finite, or NuminaMath for no answer.
NO_ANSWER = re.compile(
    r"^\W*[A-Za-z]{2,}(?::|\s+[A-Za-z]{2,}\b).*[0-9]"
    r"|(?<!\\)\b(?:is|are|was|were|equals)\b.*[0-9]"
    r"|(?:[A-Za-z]+[ ,]+){5}"
    r"|^(?!.*\\begin\{).*\n"
    r"|^\s*(?:None|NA|NaT|proof|notfound)\s*$"
    r"|^\s*(?:[+-]?(?i:nan|inf|infinity)|#?(?i:n/a|null|<na>)|#[A-Z/0]+[!?])\s*$",
    re.DOTALL,
)


def gold_answer(cell: Any) -> str:
    r"""Returns the final answer in a cell: what follows `####`, the last \boxed{}, or all of it.

    A box after `####` comes first. Prose after that mark is no answer, because it may be a heading.
    Returns "" if there is no answer: the cell is empty, prose, or no finite number.
    """
    text = as_written(cell).strip()
    tail = text.rpartition("####")[2]  # all of it without that mark
    answer = last_boxed(tail)
    if answer is None:
        answer = last_boxed(text) or "" if NO_ANSWER.search(tail) else tail
    return answer.strip()


def as_written(cell: Any) -> str:
    """Returns a cell as text: 12 for 12.0, and never 1e-05."""
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

    `columns` names the columns of prompts and answers, and says whether answers are needed. The
    held-out problems, at most `count`, come from `eval_name` if that is given, and otherwise from
    the test split. If there is only one split, at most a fifth of its distinct problems is held
    out, the same ones for every seed.
    """
    if name == EMBEDDED:
        if config not in [None, *"2345678"]:
            fail(f"--dataset_config of {EMBEDDED} is a number of operations, 2 to 8")
        splits = {}
        train = chain_problems(4096, held_out=False, seed=seed, length=int(config or 0))
    else:
        splits = read_splits(name, config)
        if "" in splits and (
            config or train_split != "train" or (test_split != "test" and not eval_name)
        ):
            fail(f"{name} is a file, without configs and splits: leave out their flags")
        train = parse_rows(splits[pick(list(splits), None, ["", train_split])], name, *columns)

    if (eval_name or name) == EMBEDDED:
        held_out = chain_problems(count, held_out=True, length=int(config or 0))
    elif eval_name:
        eval_splits = read_splits(eval_name, None)
        held_out = parse_rows(
            eval_splits[pick(list(eval_splits), None, ["", test_split])], eval_name, *columns
        )
    elif test_split != train_split and (len(splits) > 1 or test_split != "test"):
        held_out = parse_rows(splits[pick(list(splits), test_split, [])], name, *columns)
    else:
        held_out = list({text_of(problem): problem for problem in train}.values())
        count = max(1, min(count, len(held_out) // 5))
    random.Random(0).shuffle(held_out)
    return train, held_out[:count]


def problem_at(position: int, count: int, seed: str | None) -> int:
    """Returns which of `count` problems stands at a position in an endless row of epochs.

    Each epoch is shuffled, unless the seed is None. The result depends on nothing else, so a
    resumed run or another process finds the same problem there.
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
) -> tuple[PreTrainedTokenizerBase, int, int]:
    """Returns the base model's tokenizer, the length of its context, and its number of tokens."""
    # Without trust_remote_code transformers would wait for an answer on standard input.
    config = AutoConfig.from_pretrained(model, revision=revision, trust_remote_code=False)
    tokenizer = AutoTokenizer.from_pretrained(model, revision=revision, trust_remote_code=False)
    # OAR-P writes the pad token over others. Masks come from lengths, so the end token will do.
    if tokenizer.pad_token_id not in range(config.get_text_config().vocab_size):
        tokenizer.pad_token = tokenizer.eos_token

    # A folder of an adapter may hold another chat template.
    if adapter is not None and Path(adapter, "tokenizer_config.json").exists():
        own = AutoTokenizer.from_pretrained(adapter, trust_remote_code=False)
        if own.eos_token != tokenizer.eos_token or own.chat_template not in (
            None,
            tokenizer.chat_template,
        ):
            fail(f"{adapter} has another chat template or end token than its base")
    return tokenizer, context_length(config), config.get_text_config().vocab_size


def context_length(config: PreTrainedConfig) -> int:
    """Returns how many tokens a model's context has.

    With longrope, the context ends where positions begin to depend on the longest row of a batch.
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
    """Returns the words of a problem. Two problems with the same words are the same problem."""
    text = " ".join(message["content"] for message in whole_prompt(problem.prompt))
    return " ".join(text.split())


def reply_text(
    tokenizer: PreTrainedTokenizerBase, problem: Problem, ids: list[int], stop_ids: list[int]
) -> str:
    """Returns the text of an answer: what template and prompt begin of it, and the completion.

    The tokens that end or pad the completion are left out.
    """
    hidden = {*stop_ids, tokenizer.pad_token_id}
    return (
        problem.open_thought
        + begun_answer(problem.prompt)
        + tokenizer.decode([i for i in ids if i not in hidden])
    )


def render(
    tokenizer: PreTrainedTokenizerBase,
    messages: list[dict[str, str]],
    template_kwargs: dict[str, Any],
    is_open: bool = True,
) -> str:
    """Returns messages as the chat template writes them.

    If `is_open`, an answer can follow, or the rest of the one that the last message begins. A
    tokenizer without a template needs one in the keywords, as "chat_template".
    """
    is_begun = messages[-1]["role"] == "assistant"
    template = tokenizer.get_chat_template(template_kwargs.get("chat_template"))
    return tokenizer.apply_chat_template(
        messages,
        tokenize=False,
        add_generation_prompt=is_open and not is_begun,
        continue_final_message=is_open and is_begun,
        **template_kwargs | {"chat_template": FIXED_DATE + template},
    )


def encode_prompt(
    tokenizer: PreTrainedTokenizerBase,
    prompt: str | list,
    system_prompt: str | None = None,
    template_kwargs: dict[str, Any] | None = None,
) -> list[int]:
    """Returns the token ids of a prompt. The chat template writes its own BOS token."""
    text = render(tokenizer, whole_prompt(prompt, system_prompt), template_kwargs or {})
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def closing_token(
    tokenizer: PreTrainedTokenizerBase, template_kwargs: dict[str, Any]
) -> int | None:
    """Returns the special token that ends an answer in the chat template, or None.

    A base model may have learned to write this token, although its files name another end token.
    """
    question = {"role": "user", "content": "Hello"}
    turns = [question, {"role": "assistant", "content": "1029384756"}, question]
    lengths: dict[int, int] = {}
    # gpt-oss ends only the last answer as a model should. Others let the next question end it.
    for count in (2, 3):
        with contextlib.suppress(Exception):  # some templates refuse an answer
            text = render(tokenizer, turns[:count], template_kwargs, is_open=False)
            lengths = lengths or {
                len(token.content): number
                for number, token in tokenizer.added_tokens_decoder.items()
                if token.special
                and text.partition("1029384756")[2].lstrip().startswith(token.content)
            }
    return lengths[max(lengths)] if lengths else None


def encode_problems(
    tokenizer: PreTrainedTokenizerBase,
    train: list[Problem],
    held_out: list[Problem],
    system_prompt: str | None,
    template_kwargs: dict[str, Any],
    room: int,
    vocabulary: int,
) -> tuple[list[Problem], list[Problem]]:
    """Returns the problems with their prompts as at most `room` token ids below `vocabulary`.

    Training problems whose prompts are held out are left out.
    """
    encoded = []
    first: dict[Any, Problem] = {}  # the first one with these token ids, or with these words
    for problem in train + held_out:
        messages = whole_prompt(problem.prompt, system_prompt)
        text = render(
            tokenizer,
            [m | {"content": f"{m['content']}~{i}~"} for i, m in enumerate(messages)],
            template_kwargs,
        )
        if any(f"~{i}~" not in text for i in range(len(messages))):  # as with Phi-3
            fail(
                f"row {problem.row}: the chat template drops the words of a message. Their roles "
                f"are {[m['role'] for m in messages]}"
            )
        ids = tuple(encode_prompt(tokenizer, messages, None, template_kwargs))
        if len(ids) > room or max(ids) >= vocabulary:
            fail(
                f"row {problem.row}: the prompt has {len(ids)} tokens, up to number {max(ids)} "
                f"({tokenizer.decode([max(ids)])}). The model has room for {room} beside "
                f"--max_completion_length, and tokens up to number {vocabulary - 1}"
            )
        for key in (ids, text_of(problem)):
            other = first.setdefault(key, problem)
            if text_of(other) != text_of(problem) or (
                other.answer != problem.answer
                and not is_right(f"\\boxed{{{other.answer}}}", problem.answer, problem.prompt)
            ):
                fail(
                    f"rows {other.row} and {problem.row} are the same prompt to the model, but "
                    f"other problems, or with other answers: {text_of(problem)[:80]!r} with "
                    f"{other.answer!r} and {problem.answer!r}"
                )
        encoded.append(
            problem._replace(
                prompt_ids=ids,
                open_thought="<think>"
                if text.rstrip().endswith("<think>") and begun_answer(problem.prompt) == ""
                else "",
            )
        )
    held_out = encoded[len(train) :]
    seen = {text_of(problem) for problem in held_out}
    train = [problem for problem in encoded[: len(train)] if text_of(problem) not in seen]
    if not train:
        fail("all training problems are held out: add rows")
    return train, held_out


def load_data(
    args: Any, needs_answers: bool
) -> tuple[PreTrainedTokenizerBase, list[Problem], list[Problem]]:
    """Returns the tokenizer, the problems to train on and the held-out ones, as the flags say."""
    tokenizer, context, vocabulary = load_tokenizer(
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
    return tokenizer, *encode_problems(
        tokenizer,
        train,
        held_out,
        args.system_prompt,
        json.loads(args.chat_template_kwargs),
        context - args.max_completion_length,
        vocabulary,
    )
