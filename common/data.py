"""What a run reads: problems, and their prompts as token ids."""

import contextlib
import csv
import functools
import json
import os
import random
import re
import sys
from collections import Counter
from decimal import Decimal
from operator import attrgetter
from typing import Any

import fsspec
import pyarrow
from pyarrow import parquet
from transformers import (
    AutoConfig,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedTokenizerBase,
)

from common import fail
from common.answers import THINKING, last_boxed
from common.reward import is_right
from common.task import Problem, chain_problems

EMBEDDED = "chain_arithmetic"
PROMPT_COLUMNS = ["prompt", "problem", "question"]
ANSWER_COLUMNS = ["answer", "solution", "ground_truth", "reward_model.ground_truth"]
ROLES = ("system", "developer", "user", "assistant", "tool")
FILE_NAME = re.compile(r"\.(jsonl|json|parquet|csv|tsv)(?:\.gz)?$", re.IGNORECASE)
# Control characters, such as JSON makes of \frac or \text with one backslash; what a wrong encoding
# leaves of a character; and marks of chat templates.
DAMAGE = re.compile(
    r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufffd]"
    r"|\t(?:ext|imes|heta|frac|riangle|ilde|au\b)|\r(?:ight|angle|floor|ho\b)|\n(?:eq|abla|ot)\b"
    r"|[\xc2\xc3\xce\xcf\xe2][\x80-\xbf\u02c6\u02dc\u2013-\u2122]"
    r"|<\|\w+\|>|\[/?INST\]|<(?:start|end)_of_turn>"
)
# What people mean by values, as JSON, that many chat templates do not take for true or false.
MEANING = {"0": False, "null": False, '"false"': False, '"true"': True}
# Some chat templates write today's date. It is fixed, so that a run can resume on another day.
FIXED_DATE = "{% macro strftime_now(format) %}26 Jul 2024{% endmacro %}"


# ---- Rows of a data set --------------------------------------------------------------------------
def read_splits(name: str, config: str | None) -> dict[str, list[dict[str, Any]]]:
    """Returns the rows of each split of a Hub data set. A file has one split, "train".

    `datasets` could read files, too, but it guesses types: a column of 1 and "1/2" becomes JSON
    texts, 007 in a .csv file becomes 7, and a row with one cell too many loses its first cell.
    """
    kind = "".join(FILE_NAME.findall(name)).lower()
    if kind == "":
        import datasets  # takes half a second, so only those who need it import it

        return {
            split: table_rows(rows.with_format("arrow")[:])
            for split, rows in datasets.load_dataset(name, config).items()
        }
    if config:
        fail(f"{name} is a file, which has no configs: leave out --dataset_config")
    if kind == "parquet":
        return {"train": table_rows(parquet.ParquetFile(name).read())}
    # What is no UTF-8 becomes U+FFFD, which is damage.
    with fsspec.open(
        name, "rt", newline="", encoding="utf-8-sig", errors="replace", compression="infer"
    ) as file:
        if kind in ("csv", "tsv"):
            csv.field_size_limit(sys.maxsize)
            # All cells are texts.
            header, *rows = filter(
                None, csv.reader(file, delimiter="," if kind == "csv" else "\t", strict=True)
            )
            return {"train": [as_row(list(zip(header, row, strict=True))) for row in rows]}
        text = file.read()
    if not re.match(r"\s*(?:\[|\{\s*\n)", text):  # JSON lines, whatever the file's name
        # Each line is a list, so that no row goes on in the next line, and an error names its line.
        text = "[" + text.replace("\n", "],\n[") + "]"
    return {
        "train": [row for rows in json.loads(f"[{text}]", object_pairs_hook=as_row) for row in rows]
    }


def as_row(cells: list[tuple[str, Any]]) -> dict[str, Any]:
    """Returns a row from its cells, whose names must differ."""
    if len(dict(cells)) < len(cells):
        fail(f"two columns have one name: {[name for name, _ in cells]}")
    return dict(cells)


def table_rows(table: pyarrow.Table) -> list[dict[str, Any]]:
    """Returns the rows of a table, whose columns must have different names.

    `datasets` stores a ClassLabel as a number. It becomes its name, or None for -1.
    """
    rows = as_stored(
        table.to_struct_array().to_pylist(), pyarrow.list_(pyarrow.struct(list(table.schema)))
    )
    described = json.loads((table.schema.metadata or {}).get(b"huggingface", '{"info": {}}'))
    names = {
        column: dict(enumerate(feature["names"]))
        for column, feature in described["info"].get("features", {}).items()
        if isinstance(feature, dict) and feature.get("_type") == "ClassLabel"
    }
    return [row | {key: own.get(row[key]) for key, own in names.items()} for row in rows]


def as_stored(value: Any, kind: pyarrow.DataType) -> Any:
    """Returns a value of a table: 14.1 for what is 14.1 in 32 bits, and not 14.100000381.

    `datasets` keeps a column of mixed types as JSON texts. Lists of other kinds stay as they are.
    """
    if isinstance(value, str) and isinstance(kind, pyarrow.JsonType):
        return json.loads(value)
    if isinstance(value, dict):
        return {field.name: as_stored(value[field.name], field.type) for field in kind}
    if isinstance(value, list) and re.search("^[^m].*(float|json)", str(kind)):  # but no map
        return [as_stored(item, kind.value_type) for item in value]
    return float(str(kind.to_pandas_dtype()(value))) if isinstance(value, float) else value


def parse_rows(
    rows: list[dict[str, Any]],
    name: str,
    prompt_columns: list[str] = PROMPT_COLUMNS,
    answer_columns: list[str] = ANSWER_COLUMNS,
    needs_answers: bool = True,
) -> list[Problem]:
    """Returns the problems in a table. Rows that cannot be used are left out.

    Prompts and answers are in the first of the given columns that is there.
    """
    if not rows or not all(isinstance(row, dict) for row in rows):
        fail(f"{name} has no rows, or is no list of rows with named columns")
    columns = list(dict.fromkeys(key for row in rows for key in row))
    prompt_key = pick(columns, prompt_columns, "--prompt_column")
    answer_key = pick(columns, answer_columns, "--answer_column", needs_answers)
    has_steps = all(
        isinstance(row.get("steps") or [], list) and {*map(type, row.get("steps") or [])} <= {int}
        for row in rows
    )
    # Only a prompt may begin the answer. In other columns, chats end with a whole reply.
    may_begin_answer = "prompt" in prompt_key.lower()
    say(
        f"{name}: problems come from the column {prompt_key}, answers from {answer_key or 'none'}; "
        f"all columns are {', '.join(columns)}"
        + ("" if has_steps else ". No steps are graded, because not all are lists of integers")
        + (". The steps are graded, too" if has_steps and "steps" in columns else "")
        + (
            ""
            if may_begin_answer or not isinstance(cell_of(rows[0], prompt_key), list)
            else ". Of each chat, the last reply is dropped"
        )
    )
    unseen = {"image", "images", "video", "videos", "audio", "tools"}.intersection(columns)
    found = []
    for number, row in enumerate(rows, 1):
        prompt = as_prompt(cell_of(row, prompt_key), may_begin_answer)
        answer = gold_answer(cell_of(row, answer_key) if answer_key else None)
        problem = Problem(
            prompt or "",
            answer,
            steps=tuple(row.get("steps") or []) if has_steps else (),
            # An answer of another kind than `gold_answer` reads is for own reward functions.
            columns={column: row.get(column) for column in columns if column != prompt_key}
            | ({"gold": cell_of(row, answer_key)} if answer_key else {}),
            opening=0,
            row=number,
        )
        faults = {
            f"{prompt_key} has no text, and no chat of texts alone (the text of a chat is none)": (
                text_of(problem) == ""
            ),
            f"{prompt_key} has messages of other roles than {', '.join(ROLES)}": any(
                message["role"] not in ROLES for message in whole_prompt(problem.prompt)
            ),
            f"the policy would not see {' and '.join(sorted(unseen))}": any(
                row.get(column) not in (None, "", [], "[]") for column in unseen
            ),
            f"{answer_key} has no final answer, or a damaged one, or several": (
                needs_answers and answer == ""
            ),
            f"{prompt_key} ends with the answer": (
                has_answer(begun_answer(problem.prompt), answer)
                or text_of(problem).endswith(f"nswer: {answer}")
            ),
        }
        found.append((problem, next(filter(faults.get, faults), "")))
    return without_faults(found, name)


def without_faults(found: list[tuple[Problem, str]], name: str) -> list[Problem]:
    """Returns the problems without a fault. Standard error says how many have which one.

    If none is left, the run ends.
    """
    kept = [problem for problem, fault in found if fault == ""]
    for fault, count in Counter(fault for _, fault in found if fault != "").most_common():
        rows = [problem.row for problem, own_fault in found if own_fault == fault]
        (say if kept else fail)(
            f"{name}: {count} of {len(found)} rows are left out (such as {str(rows[:3])[1:-1]}), "
            f"because {fault}"
        )
    return kept


def say(text: str) -> None:
    """Prints a text to standard error, in the first process alone if there are several."""
    if os.environ.get("RANK", "0") == "0":
        print(text, file=sys.stderr)


def pick(present: list[str], names: list[str], flag: str, is_needed: bool = True) -> str:
    """Returns the first name, of a column or split, that is there, or "" if none is needed.

    A single name is that of a flag, and needed. A name with dots leads into nested columns:
    reward_model.ground_truth. Splits have no dots.
    """
    found = [name for name in names if name in present or name.partition(".")[0] in present]
    if not found and (is_needed or len(names) == 1):
        fail(f"{flag}: there is no {' or '.join(names)}, but {present}. Write a.b for b within a")
    return found[0] if found else ""


def cell_of(row: dict[str, Any], column: str) -> Any:
    """Returns a cell of a row, or None if it is missing. A dotted name leads into dicts."""
    first, _, rest = column.partition(".")
    return (
        cell_of(row[first], rest)
        if column not in row and isinstance(row.get(first), dict)
        else row.get(column)
    )


def as_prompt(cell: Any, may_begin_answer: bool) -> str | list[dict[str, str]] | None:
    """Returns a text or chat messages whose contents are texts, or None if the cell is neither.

    Replies at the end of a chat are left out, unless they may begin an answer.
    """
    if isinstance(cell, str):
        # A .csv file holds the text of a chat, and not the chat.
        return None if re.match(r"\s*\[\s*\{(?s:.*)['\"]role['\"]:", cell) else cell
    try:
        messages = [
            message
            | {
                "role": message["role"] + "",  # an error unless it is a text
                "content": message["content"]
                if isinstance(message["content"], str)
                else "".join(part["text"] for part in message["content"]),
            }
            for message in cell
        ]
    except (KeyError, TypeError):
        return None
    while messages and messages[-1]["role"] == "assistant" and not may_begin_answer:
        messages.pop()
    return messages


def begun_answer(prompt: str | list) -> str:
    """Returns the answer that a prompt begins: the assistant's message at its end, or ""."""
    return "".join(m["content"] for m in whole_prompt(prompt)[-1:] if m["role"] == "assistant")


def has_answer(begun: str, answer: str) -> bool:
    """Returns whether the beginning of an answer already has a box, or the right answer itself.

    It must stand there as a whole word or number: 7 is not in 17, 7.5 or -7. Commas do not count.
    """
    return last_boxed(begun) is not None or (
        "" not in (begun, answer)
        and re.search(
            rf"(?<![\w.-]){re.escape(answer.replace(',', ''))}(?![\w-]|\.\d)",
            begun.replace(",", ""),
        )
        is not None
    )


# Text without a mark is no answer if it has a number after some words or a verb ("the answer is
# 16"), five words in a row, or several lines that are not one LaTeX environment; if it computes
# something and goes on in words, or has a thousand characters; if it is a box that is not closed,
# has tags, or is a program's dict or list, or punctuation; if it has characters of HTML; or if it
# is what programs write for a number that is missing or not finite, and people for no answer.
NO_ANSWER = re.compile(
    r"^\W*[A-Za-z]{2,}(?::|\s+[A-Za-z]{2,}\b).*[0-9]"
    r"|(?<!\\)\b(?:is|are|was|were|equals)\b.*[0-9]"
    r"|(?:[A-Za-z]+[ ,]+){5}"
    r"|^(?!.*\\begin\{).*\n"
    r"|\d ?[-+*/] ?[\d.]+ ?= ?[-$\d.]+ [a-z]{3}|^.{1000}"
    r"|\\boxed|</\w+>|^\s*[{\[]\s*['\"]|^[\s?!.,;:_-]*$|&#?\w{2,8};"
    r"|^\s*(?:None|NA|NaT|proof|notfound|(?i:tb[acd]|todo|unknown|missing|pending|n\.a|see\b.*))\W*$"
    r"|^\s*(?:[+-]?(?i:nan|inf|infinity)|#?(?i:n/a|null|<na>)|#[A-Z/0]+[!?])\s*$",
    re.DOTALL,
)


def gold_answer(cell: Any) -> str:
    r"""Returns the final answer in a cell: what follows `####`, the last \boxed{}, or all of it.

    A box after `####` comes first. Prose after that mark is no answer, because it may be a heading.
    A list with a single value is that value. Returns "" if there is no answer: the cell is empty,
    prose, damaged, no finite number, or more than one value.
    """
    if isinstance(cell, list) and len(cell) == 1:
        return gold_answer(cell[0])
    text = "" if isinstance(cell, list | dict | bytes) else as_written(cell)
    tail = text.strip().rpartition("####")[2]  # all of it without that mark
    answer = last_boxed(tail) or ("" if NO_ANSWER.search(tail) else tail) or last_boxed(text) or ""
    return "" if DAMAGE.search(text) else answer.strip()


def as_written(cell: Any) -> str:
    """Returns a cell as text: 12 for 12.0, and never 1e-05."""
    return (
        f"{Decimal(str(cell)):f}".removesuffix(".0")
        if isinstance(cell, float | Decimal)
        else str(cell)
    )


# ---- Training problems and held-out ones ---------------------------------------------------------
def load_problems(
    name: str,
    config: str | None,
    train_split: str,
    test_split: str,
    eval_name: str | None,
    columns: tuple[list[str], list[str], bool],
    count: int,
    seed: int,
) -> tuple[list[Problem], list[Problem]]:
    """Returns the problems to train on, and those of the split or data set to evaluate on.

    Where there is only one split, the latter are none. `columns` has the names that the columns of
    prompts and of answers may have, and says whether answers are needed. To evaluate, known names
    will also do. Of the embedded task, there are `count` problems to evaluate on.
    """
    # The name of a data set to evaluate on may end with its config: openai/gsm8k:main.
    eval_id, _, eval_config = (
        f"{name}:{config or ''}" if eval_name in (None, name) else str(eval_name)
    ).partition("\0" if FILE_NAME.search(str(eval_name)) else ":")  # a URL has colons, too
    if name == EMBEDDED:
        train = chain_problems(4096, held_out=False, seed=seed, length=int(config or 0))
    else:
        splits = read_splits(name, config)
        train = parse_rows(
            splits[pick(list(splits), [train_split], "--dataset_train_split")], name, *columns
        )

    if eval_id == EMBEDDED:
        return train, chain_problems(count, held_out=True, length=int(eval_config or 0))
    if eval_name:
        splits = read_splits(
            eval_name if FILE_NAME.search(eval_name) else eval_id, eval_config or None
        )
    if len(splits) == 1 and test_split == "test":  # a single split may have any name
        (test_split,) = splits
    if not eval_name and test_split == train_split:
        return train, []
    return train, parse_rows(
        splits[pick(list(splits), [test_split], "--dataset_test_split")],
        eval_name or name,
        columns[0] + PROMPT_COLUMNS,
        columns[1] + ANSWER_COLUMNS,
        columns[2],
    )


def hold_out(
    train: list[Problem], held_out: list[Problem], count: int
) -> tuple[list[Problem], list[Problem]]:
    """Returns the training problems that are not held out, and at most `count` held-out ones.

    If there are none to evaluate on, at most a fifth of the distinct training problems is held out,
    the same ones for every seed.
    """
    if not held_out:
        held_out = list({text_of(problem): problem for problem in train}.values())
        count = max(1, min(count, len(held_out) // 5))
    random.Random(0).shuffle(held_out)
    held_out = held_out[:count]
    seen = {text_of(problem) for problem in held_out} | {p.prompt_ids for p in held_out}
    return (
        without_faults(
            [(p, "they are held out" if {text_of(p), p.prompt_ids} & seen else "") for p in train],
            "problems to train on",
        ),
        held_out,
    )


def problem_at(position: int, count: int, seed: str | None) -> int:
    """Returns which of `count` problems stands at a position in an endless row of epochs.

    Each epoch is shuffled, unless the seed is None. The result depends on nothing else, so a
    resumed run or another process finds the same problem there.
    """
    epoch, place = divmod(position, count)
    return place if seed is None else epoch_order(epoch, count, seed)[place]


@functools.lru_cache(maxsize=2)
def epoch_order(epoch: int, count: int, seed: str | None) -> list[int]:
    """Returns the numbers of the problems in the order of an epoch."""
    order = list(range(count))
    random.Random(f"{seed} {epoch}").shuffle(order)
    return order


# ---- Prompts -------------------------------------------------------------------------------------
def load_tokenizer(
    model: str, revision: str, adapter: str | None, template_kwargs: dict[str, Any]
) -> tuple[PreTrainedTokenizerBase, int, int]:
    """Returns the base model's tokenizer, the length of its context, and its number of tokens."""
    # Without trust_remote_code transformers would wait for an answer on standard input.
    config = AutoConfig.from_pretrained(model, revision=revision, trust_remote_code=False)
    tokenizer = AutoTokenizer.from_pretrained(model, revision=revision, trust_remote_code=False)
    # OAR-P writes the pad token over others. Masks come from lengths, so the end token will do.
    if tokenizer.pad_token_id not in range(config.get_text_config().vocab_size):
        tokenizer.pad_token = tokenizer.eos_token

    # A folder of an adapter may hold another chat template.
    if adapter is not None and os.path.exists(f"{adapter}/tokenizer_config.json"):
        own = AutoTokenizer.from_pretrained(adapter, trust_remote_code=False)
        if own.eos_token != tokenizer.eos_token or own.chat_template not in (
            None,
            template_kwargs.get("chat_template", tokenizer.chat_template),
        ):
            fail(
                f"{adapter} has another chat template or end token than its base. A template may "
                'be given: --chat_template_kwargs {"chat_template": ...}'
            )
    return tokenizer, context_length(config), config.get_text_config().vocab_size


def context_length(config: PreTrainedConfig) -> int:
    """Returns how many tokens a model's context has.

    With longrope, the context ends where positions begin to depend on the longest row of a batch.
    """
    text_config = config.get_text_config()
    rope = getattr(text_config, "rope_parameters", None) or {}
    limits = [
        parameters["original_max_position_embeddings"]
        for parameters in (rope, *rope.values())  # for all layers, or for each kind of them
        if isinstance(parameters, dict) and parameters.get("rope_type") == "longrope"
    ]
    return min([getattr(text_config, "max_position_embeddings", None) or sys.maxsize, *limits])


def whole_prompt(prompt: str | list, system_prompt: str | None = None) -> list[dict[str, str]]:
    """Returns all messages of a prompt, the system message first if there is one."""
    system = [{"role": "system", "content": system_prompt}] if system_prompt else []
    return system + ([{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt)


def text_of(problem: Problem) -> str:
    """Returns the words of a problem. Two problems with the same words are the same problem."""
    return " ".join(" ".join(m["content"] for m in whole_prompt(problem.prompt)).split())


def reply_text(
    tokenizer: PreTrainedTokenizerBase, problem: Problem, ids: list[int], stop_ids: list[int]
) -> str:
    """Returns the text of an answer: what template and prompt begin of it, and the completion.

    The tokens that end or pad the completion are left out.
    """
    begun = begun_answer(problem.prompt)
    # Some decoders drop the blank before the first word, so they read the beginning, too.
    before = tokenizer(begun, add_special_tokens=False)["input_ids"]
    return (
        problem.open_thought
        + begun
        + tokenizer.decode(
            before + [i for i in ids if i not in (*stop_ids, tokenizer.pad_token_id)]
        )[len(tokenizer.decode(before)) :]
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
    return tokenizer.apply_chat_template(
        messages,
        tokenize=False,
        add_generation_prompt=is_open and not is_begun,
        continue_final_message=is_open and is_begun,
        **template_kwargs
        | {
            "chat_template": FIXED_DATE
            + tokenizer.get_chat_template(template_kwargs.get("chat_template"))
        },
    )


def encode_prompts(
    tokenizer: PreTrainedTokenizerBase,
    prompts: list[list[dict[str, str]]],
    template_kwargs: dict[str, Any],
) -> list[tuple[int, ...]]:
    """Returns the token ids of prompts. The chat template writes its own BOS token."""
    texts = [
        # Half a surrogate pair would be an error. It is left out later.
        render(tokenizer, messages, template_kwargs).encode(errors="replace").decode()
        for messages in prompts
    ]
    return [tuple(ids) for ids in tokenizer(texts, add_special_tokens=False)["input_ids"]]


def closing_token(
    tokenizer: PreTrainedTokenizerBase, template_kwargs: dict[str, Any]
) -> int | None:
    """Returns the special token that ends an answer in the chat template, or None.

    A base model may have learned to write this token, although its files name another end token.
    """
    turns = [
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "1029384756"},
        {"role": "user", "content": "Hello"},
    ]
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


def check_template(
    tokenizer: PreTrainedTokenizerBase,
    prompts: list[list[dict[str, str]]],
    template_kwargs: dict[str, Any],
) -> None:
    """Ends the run if the chat template does not heed a keyword, or a message of a prompt."""
    for name, value in template_kwargs.items():
        meant = MEANING.get(json.dumps(value).lower(), value)
        if name not in [
            "chat_template",
            *re.findall(r"\w+", tokenizer.get_chat_template(template_kwargs.get("chat_template"))),
        ] or (
            render(tokenizer, prompts[0], template_kwargs)
            != render(tokenizer, prompts[0], template_kwargs | {name: meant})
        ):
            fail(
                f"--chat_template_kwargs: the chat template never reads {name}"
                + (f" {json.dumps(value)} as {json.dumps(meant)}" if meant is not value else "")
            )
    # What a template drops depends on roles, say, but not on contents.
    for messages in {str([m | {"content": ""} for m in chat]): chat for chat in prompts}.values():
        marked = [m | {"content": f"{m['content']}~{i}~"} for i, m in enumerate(messages)]
        if any(  # as with Phi-3
            f"~{i}~" not in render(tokenizer, marked, template_kwargs) for i in range(len(marked))
        ):
            fail(
                "the chat template drops the words of a message in chats with the roles "
                f"{[m['role'] for m in messages]}"
            )


def encode_problems(
    tokenizer: PreTrainedTokenizerBase,
    problems: list[Problem],
    name: str,
    system_prompt: str | None,
    template_kwargs: dict[str, Any],
    room: int,
    vocabulary: int,
) -> list[Problem]:
    """Returns the problems with their prompts as at most `room` token ids below `vocabulary`.

    Those that the model would misread are left out.
    """
    unclean = re.compile(
        "|".join(
            [DAMAGE.pattern]
            + [re.escape(t.content) for t in tokenizer.added_tokens_decoder.values() if t.special]
        )
    )
    # Each distinct prompt is read once. Some data sets repeat their rows a hundred times.
    groups: dict[str, list[Problem]] = {}
    for problem in problems:
        groups.setdefault(repr(problem.prompt), []).append(problem)
    prompts = [whole_prompt(group[0].prompt, system_prompt) for group in groups.values()]
    check_template(tokenizer, prompts, template_kwargs)
    all_ids = encode_prompts(tokenizer, prompts, template_kwargs)
    golds: dict[Any, dict[str, None]] = {}  # of problems with the same ids, and with the same words
    for ids, group in zip(all_ids, groups.values(), strict=True):
        for key in (ids, text_of(group[0])):
            golds.setdefault(key, {}).update(dict.fromkeys(problem.answer for problem in group))

    found = []
    for messages, ids, group in zip(prompts, all_ids, groups.values(), strict=True):
        mark = unclean.search(
            "\n".join(m["content"] for m in messages if m["role"] != "assistant")
        ) or re.search("[\ud800-\udfff]", "".join(m["content"] for m in messages))
        first, *others = golds[ids] | golds[text_of(group[0])]
        faults = {
            f"it or --system_prompt has {mark and mark[0]!r}, a special token or damage": mark,
            f"the prompt has more than {room} tokens, or one that the model lacks": (
                len(ids) > room or max(ids) >= vocabulary
            ),
            "the same prompt has another answer in another row": not all(
                is_right(f"\\boxed{{{first}}}", other, group[0].prompt) for other in others
            ),
        }
        opened = re.search(  # a template may begin the reply with a thought
            rf"(?:{THINKING.pattern})\s*$",
            "" if messages[-1]["role"] == "assistant" else tokenizer.decode(ids[-24:]),
            re.IGNORECASE,
        )
        found += [
            (
                problem._replace(
                    prompt_ids=ids,
                    open_thought=opened[0].rstrip() if opened and not opened["end"] else "",
                ),
                next(filter(faults.get, faults), ""),
            )
            for problem in group
        ]
    return sorted(without_faults(found, name), key=attrgetter("row"))


def load_data(
    args: Any, needs_answers: bool
) -> tuple[PreTrainedTokenizerBase, list[Problem], list[Problem]]:
    """Returns the tokenizer, the problems to train on and the held-out ones, as the flags say.

    Standard error says what the model reads.
    """
    try:
        template_kwargs = json.loads(args.chat_template_kwargs) | {}
    except (ValueError, TypeError):
        fail(f"--chat_template_kwargs {args.chat_template_kwargs} is no JSON object")
    tokenizer, context, vocabulary = load_tokenizer(
        args.model_name_or_path, args.model_revision, args.start_adapter, template_kwargs
    )
    train, held_out = load_problems(
        args.dataset_name,
        args.dataset_config,
        args.dataset_train_split,
        args.dataset_test_split,
        args.eval_dataset_name,
        (
            [args.prompt_column] if args.prompt_column else PROMPT_COLUMNS,
            [args.answer_column] if args.answer_column else ANSWER_COLUMNS,
            needs_answers,
        ),
        args.max_eval_samples,
        args.seed,
    )
    rest = (args.system_prompt, template_kwargs, context - args.max_completion_length, vocabulary)
    train, held_out = hold_out(
        encode_problems(tokenizer, train, "problems to train on", *rest),
        held_out and encode_problems(tokenizer, held_out, "problems to evaluate on", *rest),
        args.max_eval_samples,
    )
    say(
        f"the first prompt ends with {tokenizer.decode(train[0].prompt_ids)[-80:]!r}\n"
        f"its answer is {train[0].answer!r}"
    )
    return tokenizer, train, held_out
