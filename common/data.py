"""Data: problems of the embedded task, the Hub or a file; their prompts; the rewards of a batch."""

from __future__ import annotations

import csv
import datetime
import functools
import json
import math
import os
import random
import re
import sys
from collections.abc import Sequence
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common.printable import printable
from common.problems import Problem, chain_problems, has_right_steps
from common.reward import Grader, RewardError, call_reward_func, last_boxed, takes_argument

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase

    # Each script has its own classes of these names, alike in what is read here.
    Args = Any
    Batch = Any
    Run = Any

EMBEDDED = "chain_arithmetic"
TRAINING_CHAINS = 4096
PROMPT_COLUMNS = ("problem", "question", "prompt")
ANSWER_COLUMNS = ("answer", "solution")
KNOWN_CONFIGS = {"openai/gsm8k": "main"}
ONLY_SPLITS = {"HuggingFaceH4/MATH-500": "test"}  # sets that have no other
FILE_KINDS = (".jsonl", ".json", ".parquet", ".csv")
MAX_PROMPT_CHARS = 1_000_000  # to tokenize a prompt of 50 MB takes minutes
# The date that a chat template writes, if it writes one. It is fixed, so that a run has the same
# prompts when it is resumed on another day. Llama's template falls back to the same one.
TEMPLATE_DATE = datetime.datetime(2024, 7, 26)
# A call with its format: strftime_now("%d %b %Y"). One with a variable writes today's date.
DATE_CALL = re.compile(r"""strftime_now\(\s*(["'])(.*?)\1\s*\)""")

LARGEST_REWARD = 1e18  # float32 holds its square, so that no advantage is NaN

ProblemSet = tuple[list[Problem], list[list[int]]]  # problems, and their prompts as token ids


class DataError(Exception):
    """A data set that cannot be used; the message is one sentence that says what to change."""

    def __init__(self, message: str) -> None:
        super().__init__(printable(message))


# ---- Rows of a data set --------------------------------------------------------------------------
def read_split(name: str, config: str | None, split: str) -> list[dict]:
    """Returns the rows of a split of a Hub data set, or of a .jsonl, .json, .parquet or .csv file.

    Of a file the config and the split are ignored.
    """
    is_file = Path(name).suffix in FILE_KINDS
    if is_file and not (Path(name).is_file() and Path(name).stat().st_size > 0):
        raise DataError(f"{name} is missing or empty: check the path, give a file with problems")

    try:
        if is_file:
            return read_file(name)
        return read_hub(name, config or KNOWN_CONFIGS.get(name), split)
    except Exception as error:  # the libraries raise a dozen kinds, the network a dozen more
        reason = " ".join(str(error.__cause__ or error).split())[:200]
        what = f"split {split!r} of {name}"
        check = "the name, --dataset_config and the --dataset_*_split flags"
        if is_file:
            what = name
            check = "the file"
        raise DataError(f"cannot read {what}, check {check}: {reason}") from error


def read_hub(name: str, config: str | None, split: str) -> list[dict]:
    """Returns the rows of a split of a Hub data set."""
    import datasets  # costs a second, and the embedded task does without

    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # the DataError says it all
    table = datasets.load_dataset(name, config, split=split)
    small_floats = []
    for column, feature in table.features.items():
        if getattr(feature, "dtype", None) in ("float16", "float32"):
            small_floats.append(column)
    return with_short_floats(table.to_list(), small_floats)


def read_file(name: str) -> list[dict]:
    """Returns the rows of a file, as they are in it now.

    `datasets` would also read it, but takes old rows from its cache if the time of the file is old.
    """
    kind = Path(name).suffix
    if kind == ".csv":
        return read_csv(name)
    if kind == ".parquet":
        return read_parquet(name)
    return read_json(name)


def read_parquet(name: str) -> list[dict]:
    """Returns the rows of a .parquet file."""
    from pyarrow import parquet  # costs half a second

    table = parquet.ParquetFile(name).read()
    small_types = ("halffloat", "float")  # 16 and 32 bits
    small_floats = [field.name for field in table.schema if str(field.type) in small_types]
    return with_short_floats(table.to_pylist(), small_floats)


def with_short_floats(rows: list[dict], columns: list[str]) -> list[dict]:
    """Returns the rows with float32 cells as they were once written: 14.1, not 14.100000381."""
    import numpy

    for row in rows:
        for column in columns:
            if row[column] is not None:
                row[column] = float(str(numpy.float32(row[column])))
    return rows


def read_json(name: str) -> list[dict]:
    """Returns the rows of a .json or .jsonl file, which holds objects, or lists of objects.

    A row gets None for what only other rows have.
    """
    text = Path(name).read_text(encoding="utf-8-sig")
    decoder = json.JSONDecoder()
    rows: list[dict] = []
    position = skip_space(text, 0)
    while position < len(text):
        value, position = decoder.raw_decode(text, position)
        rows += value if isinstance(value, list) else [value]
        position = skip_space(text, position)

    columns: dict[str, None] = {}
    for number, row in enumerate(rows, 1):
        if not isinstance(row, dict):
            raise ValueError(f"row {number} is not an object with named values")
        columns |= dict.fromkeys(row)
    return [{column: row.get(column) for column in columns} for row in rows]


def skip_space(text: str, position: int) -> int:
    """Returns where the white space ends that begins at a position."""
    while position < len(text) and text[position].isspace():
        position += 1
    return position


def read_csv(name: str) -> list[dict]:
    """Returns the rows of a .csv file. All cells are texts: guessed types would make 12.0 of 12."""
    with open(name, newline="", encoding="utf-8-sig") as file:
        lines = [line for line in csv.reader(file, strict=True) if line]
    if not lines:
        return []
    header = lines[0]
    rows = []
    for cells in lines[1:]:
        if len(cells) != len(header):
            raise ValueError(f"{len(cells)} cells, not {len(header)}: {','.join(cells)}")
        rows.append(dict(zip(header, cells, strict=True)))
    return rows


def parse_rows(
    rows: list[dict], name: str, prompt_column: str | None, answer_column: str | None
) -> list[Problem]:
    """Returns the problems in a table. Rows without a prompt or a final answer are left out.

    How many are left out is said on standard error.
    """
    if not rows:
        raise DataError(f"{name} has no rows: give a set with problems in it")
    column_names = list(rows[0])
    prompt_key = pick_column(column_names, prompt_column, PROMPT_COLUMNS, "prompt_column")
    answer_key = pick_column(column_names, answer_column, ANSWER_COLUMNS, "answer_column")
    advice = "name others with --prompt_column and --answer_column"

    problems = []
    sentences = []  # gold answers that are one, with their rows
    without_steps = []  # the numbers of the rows whose steps cannot be read
    for number, row in enumerate(rows, 1):
        prompt = row[prompt_key] or ""
        gold = row[answer_key]
        if isinstance(gold, list) and len(gold) <= 1:
            gold = gold[0] if gold else None
        if not is_prompt(prompt) or isinstance(gold, list | dict | bytes):
            form = "text or messages with role and content, of which the last is not the"
            form += f" assistant's, and {answer_key} one answer"
            raise DataError(f"row {number} of {name}: {prompt_key} must hold {form}, or {advice}")
        check_prompt_size(prompt, f"row {number} of {name}")
        answer = gold_answer(gold, is_solution=answer_key == "solution")
        if prompt and answer:
            problems.append(make_problem(prompt, answer, row, prompt_key))
            if SENTENCE.search(answer):
                sentences.append(f"row {number} of {name} has the answer {answer[:80]!r}")
            if row.get("steps") not in (None, "", [], "[]") and not problems[-1].steps:
                without_steps.append(number)

    why = f"no prompt in {prompt_key} or no final answer in {answer_key}"
    left_out = f"{len(rows) - len(problems)} of {len(rows)} rows of {name} are left out: {why}"
    if not problems:
        raise DataError(f"{left_out}; {advice}")
    if os.environ.get("RANK", "0") == "0":
        if len(problems) < len(rows):
            print(printable(left_out), file=sys.stderr)
        if sentences:
            print(printable(about_sentences(sentences)), file=sys.stderr)
        if without_steps:
            where = f"{len(without_steps)} of {len(rows)} rows of {name}, first in row"
            said = f"steps is no list of integers in {where} {without_steps[0]}: not judged there"
            print(printable(said), file=sys.stderr)
    return problems


def about_sentences(found: list[str]) -> str:
    """Returns what to say about gold answers that are sentences."""
    others = f" (and {len(found) - 1} more rows)" if len(found) > 1 else ""
    advice = "give the value alone, or mark it with #### or \\boxed{}"
    return f"{found[0]}{others}, a sentence that no boxed answer can match: {advice}"


def check_prompt_size(prompt: str | list[dict], row: str) -> None:
    """Raises DataError if a prompt is longer than any model's context."""
    messages = as_messages(prompt)
    size = sum(len(message["content"]) for message in messages)
    if size > MAX_PROMPT_CHARS:
        advice = f"leave it out, the limit is {MAX_PROMPT_CHARS:,}"
        raise DataError(f"{row} has a prompt of {size:,} characters: {advice}")


def as_messages(prompt: str | list[dict[str, str]]) -> list[dict[str, str]]:
    """Returns a prompt as chat messages: a text is one of the user."""
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)


def whole_prompt(prompt: str | list, system_prompt: str | None) -> list[dict[str, str]]:
    """Returns all messages of a prompt, the system message first if there is one."""
    messages = as_messages(prompt)
    if system_prompt:
        messages.insert(0, {"role": "system", "content": system_prompt})
    return messages


def pick_column(present: Sequence[str], named: str | None, known: Sequence[str], flag: str) -> str:
    """Returns the column that a flag names, or else the first known one that is there."""
    for column in [named] if named else known:
        if column in present:
            return column
    wanted = named or " | ".join(known)
    raise DataError(f"no {wanted} column among {', '.join(present)}: name it with --{flag}")


def is_prompt(value: Any) -> bool:
    """Returns whether a value is text, or a list of chat messages with a role and a content.

    The last message must not be the assistant's: a solution that follows the problem is no prompt.
    """
    if not isinstance(value, list):
        return isinstance(value, str)
    for message in value:
        if not isinstance(message, dict):
            return False
        if not isinstance(message.get("role"), str) or not isinstance(message.get("content"), str):
            return False
    return not value or value[-1]["role"] != "assistant"


# A gold answer that is a sentence with a number: the answer is 16; Answer: 16; x is 16.
SENTENCE = re.compile(
    r"^\W*[A-Za-z]{2,}(?::|\s+[A-Za-z]{2,}\b).*[0-9]"  # it begins with words
    r"|(?<!\\)\b(?:is|are|was|were|equals)\b.*[0-9]",  # or has a verb
    re.DOTALL,
)
# Prose in a solution that marks no answer: two words, or a second line. Words in \text{...} may be
# a part of an answer.
PROSE = re.compile(r"(?<![\\{A-Za-z])[A-Za-z]{2,}[,.:]?\s+[A-Za-z]+(?![A-Za-z}])|\n|:")


def gold_answer(gold: Any, is_solution: bool) -> str | None:
    """Returns the final answer in a cell. If it marks none, the whole cell is it.

    Returns None for a missing answer, and for a solution in prose that marks none.
    """
    text = as_written(gold)
    marked = final_answer(text)
    if marked is not None:
        return marked
    text = text.strip()
    if is_solution and (SENTENCE.search(text) or PROSE.search(text)):
        return None
    return text


def as_written(cell: Any) -> str:
    """Returns a cell as text: "" if it is missing or NaN, and 0.00001, never 1e-05."""
    if isinstance(cell, float | Decimal):
        return format(Decimal(str(cell)), "f") if math.isfinite(cell) else ""
    return "" if cell is None else str(cell)


def final_answer(text: str) -> str | None:
    r"""Returns the answer that a gold solution marks: after GSM8K's `####` or in the last \boxed{}.

    Returns None if it marks none.
    """
    answer = text.rsplit("####", 1)[1] if "####" in text else last_boxed(text)
    return None if answer is None else answer.strip()


def make_problem(prompt: str | list, answer: str, row: dict, prompt_key: str) -> Problem:
    """Returns the problem in a row, with the results in its column `steps`, if those are integers.

    Such a solution states its first result in the first sentence.
    """
    columns = {key: value for key, value in row.items() if key != prompt_key}
    steps = integers(row.get("steps"))
    if steps:
        return Problem(prompt, answer, steps, columns, opening=0)
    return Problem(prompt, answer, columns=columns)


def integers(cell: Any) -> tuple[int, ...]:
    """Returns the integers in a list such as [12, 8], ["12", "8"] or [12.0, 8.0], or in its text.

    Returns none of them if the cell holds anything else.
    """
    if isinstance(cell, str):  # as in a .csv file
        try:
            cell = json.loads(cell)
        except (ValueError, RecursionError):
            return ()
    numbers = [as_written(entry) for entry in cell] if isinstance(cell, list) else []
    if not all(re.fullmatch(r"-?[0-9]{1,30}(?:\.0*)?", number) for number in numbers):
        return ()
    return tuple(int(number.partition(".")[0]) for number in numbers)


# ---- Training problems and held-out ones ---------------------------------------------------------
def load_problems(args: Args) -> tuple[list[Problem], list[Problem]]:
    """Returns the problems to train on and the held-out ones, which never share a prompt.

    The held-out ones come from --eval_dataset_name if that is given, else from the test split, and
    of a set with one split they are a fifth of the rows at most, the same ones for every seed.
    """
    name = args.dataset_name
    length = chain_length(args)
    if name == EMBEDDED:
        train = chain_problems(TRAINING_CHAINS, held_out=False, seed=args.seed, length=length)
    else:
        train = read_problems(args, name, args.dataset_config, args.dataset_train_split)

    count = args.max_eval_samples
    eval_name = args.eval_dataset_name or name
    if eval_name == EMBEDDED:
        held_out = chain_problems(count, held_out=True, length=length)
    elif args.eval_dataset_name:
        held_out = read_problems(args, eval_name, None, args.dataset_test_split)
    elif name in ONLY_SPLITS or Path(name).suffix in FILE_KINDS:
        held_out = list(train)
        count = max(1, min(count, len(train) // 5))
    else:
        held_out = read_problems(args, name, args.dataset_config, args.dataset_test_split)
    random.Random(0).shuffle(held_out)
    held_out = held_out[:count]

    held_out_prompts = {same_prompt(problem) for problem in held_out}
    train = [problem for problem in train if same_prompt(problem) not in held_out_prompts]
    if not train:
        raise DataError(f"{name} has no problem left to train on beside those held out: add rows")
    return train, held_out


def same_prompt(problem: Problem) -> str:
    """Returns a text that is the same for the same prompt as text and as a chat."""
    messages = as_messages(problem.prompt)
    return str([(message["role"], message["content"]) for message in messages])


def chain_length(args: Args) -> int | None:
    """Returns the number of operations of the embedded chains; None: 3 or 4."""
    config = args.dataset_config
    if args.dataset_name != EMBEDDED or config is None:
        return None
    if config not in list("2345678"):
        operations = "has 2 to 8 operations, give a number"
        raise DataError(f"--dataset_config {config}: {EMBEDDED} {operations}")
    return int(config)


def read_problems(args: Args, name: str, config: str | None, split: str) -> list[Problem]:
    """Returns the problems in a split of a data set, or in its only one."""
    rows = read_split(name, config, ONLY_SPLITS.get(name, split))
    return parse_rows(rows, name, args.prompt_column, args.answer_column)


def problem_at(position: int, count: int, seed: int) -> int:
    """Returns which of `count` problems stands at a position in an endless row of shuffled epochs.

    It depends on nothing else, so a resumed run or another process finds the same problem there.
    """
    epoch, place = divmod(position, count)
    return epoch_order(epoch, count, seed)[place]


@functools.lru_cache(maxsize=2)
def epoch_order(epoch: int, count: int, seed: int) -> list[int]:
    """Returns the numbers of the problems in the order of an epoch."""
    order = list(range(count))
    random.Random(f"{seed} {epoch}").shuffle(order)
    return order


# ---- Prompts -------------------------------------------------------------------------------------
def load_data(args: Args) -> tuple[PreTrainedTokenizerBase, ProblemSet, ProblemSet]:
    """Returns the tokenizer, the problems and prompts to train on, and those that are held out.

    All of them fit into the model's context and vocabulary. That is checked before the model is
    loaded.
    """
    tokenizer, config = load_tokenizer(args.model_name_or_path, args.model_revision)
    check_own_tokenizer(args.start_adapter, tokenizer)
    try:
        template_kwargs = dict(json.loads(args.chat_template_kwargs))
    except (TypeError, ValueError) as error:
        example = '{"enable_thinking": false}'
        raise DataError(f"--chat_template_kwargs must be JSON such as {example}") from error

    def encode(problems: list[Problem]) -> list[list[int]]:
        return [
            encode_prompt(tokenizer, problem.prompt, args.system_prompt, template_kwargs)
            for problem in problems
        ]

    train, held_out = load_problems(args)
    check_system_message(tokenizer, train[0], args.system_prompt, template_kwargs)
    train_prompts = encode(train)
    held_out_prompts = encode(held_out)
    prompts = train_prompts + held_out_prompts
    check_lengths(args, prompts, context_length(config))
    check_vocabulary(tokenizer, prompts, vocabulary_size(config))
    return tokenizer, (train, train_prompts), (held_out, held_out_prompts)


def load_tokenizer(name: str, revision: str) -> tuple[PreTrainedTokenizerBase, PreTrainedConfig]:
    """Returns a model's tokenizer and its configuration."""
    from transformers import AutoConfig, AutoTokenizer

    # trust_remote_code is given because transformers would else ask on standard input.
    try:
        config = AutoConfig.from_pretrained(name, revision=revision, trust_remote_code=False)
        tokenizer = AutoTokenizer.from_pretrained(name, revision=revision, trust_remote_code=False)
    except Exception as error:  # a damaged folder may raise anything
        reason = str(error)[:300]
        if "trust_remote_code" in str(error):
            reason = "models that bring their own code are not run"
        raise DataError(f"cannot load --model_name_or_path {name}: {reason}") from error
    if tokenizer.eos_token_id is None:
        raise DataError(f"the tokenizer of {name} has no EOS token: set eos_token in its files")
    if tokenizer.pad_token_id is None or tokenizer.pad_token_id >= vocabulary_size(config):
        tokenizer.pad_token = tokenizer.eos_token  # the trainer's masks come from lengths
    return tokenizer, config


def vocabulary_size(config: PreTrainedConfig) -> int:
    """Returns how many tokens a model knows. Its tokenizer may have more."""
    return int(config.get_text_config().vocab_size)


def check_own_tokenizer(adapter: str | None, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raises DataError if an adapter to start from brings another template or end than its base."""
    from transformers import AutoTokenizer

    if adapter is None or not Path(adapter, "tokenizer_config.json").exists():
        return
    try:
        own = AutoTokenizer.from_pretrained(adapter, trust_remote_code=False)
    except Exception as error:  # a damaged folder may raise anything
        raise DataError(f"cannot load the tokenizer of {adapter}: {str(error)[:300]}") from error
    same_template = own.chat_template in (None, tokenizer.chat_template)
    if not same_template or own.eos_token != tokenizer.eos_token:
        raise DataError(
            f"{adapter} was trained with another chat template or end token than its base: "
            "remove its tokenizer's files to train with those of the base"
        )


def context_length(config: PreTrainedConfig) -> int:
    """Returns how many tokens a model's context has.

    Some models rotate positions otherwise once the longest row of a batch is beyond a length. Then
    a row would depend on those beside it, and a cache would mix both kinds, so the context ends
    there. Dynamic NTK does so beyond `max_position_embeddings`, which is the end of any context.
    """
    text_config = config.get_text_config()
    context = getattr(text_config, "max_position_embeddings", None) or sys.maxsize
    rope = getattr(text_config, "rope_parameters", None) or {}
    for parameters in (rope, *rope.values()):  # for all layers, or for each kind of them
        if isinstance(parameters, dict) and parameters.get("rope_type") == "longrope":
            context = min(context, parameters["original_max_position_embeddings"])
    return context


def encode_prompt(
    tokenizer: PreTrainedTokenizerBase,
    prompt: str | list,
    system_prompt: str | None = None,
    template_kwargs: dict[str, Any] | None = None,
) -> list[int]:
    """Returns the token ids of a prompt, by the chat template, which writes its own BOS token.

    Where a tokenizer has no template, they are those of the text as it is. Nothing is appended to
    it, because it may end in "Answer:" or in a newline, and because the completion continues it.
    """
    messages = whole_prompt(prompt, system_prompt)
    for message in messages:
        check_characters(message["content"])
    if not tokenizer.chat_template:
        text = "\n\n".join(message["content"] for message in messages)
        ids = tokenizer(text).input_ids
        if ids[-1:] == [tokenizer.eos_token_id] and not text.endswith(tokenizer.eos_token):
            ids.pop()  # some tokenizers end every text
        return ids

    kwargs = dict(template_kwargs or {})
    kwargs["add_generation_prompt"] = True
    kwargs["tokenize"] = False
    try:
        template = tokenizer.get_chat_template(kwargs.get("chat_template"), kwargs.get("tools"))
        kwargs["chat_template"] = DATE_CALL.sub(date_as_text, template)
        text = tokenizer.apply_chat_template(messages, **kwargs)
    except Exception as error:  # a template is a program: it raises what it likes
        advice = "check --system_prompt and --chat_template_kwargs"
        raise DataError(f"the chat template fails, {advice}: {error}") from error
    return tokenizer(text, add_special_tokens=False).input_ids


def check_characters(text: str) -> None:
    """Raises DataError if a text has half of a character, as one that was cut in an emoji has."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        place = repr(text[max(0, error.start - 40) : error.end])
        raise DataError(f"a prompt has half of a character, correct it: {place}") from error


def check_system_message(
    tokenizer: PreTrainedTokenizerBase,
    problem: Problem,
    system_prompt: str | None,
    template_kwargs: dict[str, Any],
) -> None:
    """Raises DataError if the chat template leaves a system message out, as that of Phi-3 does."""
    messages = whole_prompt(problem.prompt, system_prompt)
    ids = encode_prompt(tokenizer, messages, None, template_kwargs)
    text = tokenizer.decode(ids)
    for i, message in enumerate(messages):
        # A template may also turn the message into something else, such as a mode.
        others = messages[:i] + messages[i + 1 :]
        if message["role"] != "system" or message["content"].strip() in text or not others:
            continue
        if encode_prompt(tokenizer, others, None, template_kwargs) == ids:
            raise DataError(
                "the chat template leaves the system message out: write it into the problems"
            )


def date_as_text(call: re.Match[str]) -> str:
    """Returns the fixed date as a chat template writes a text, in the format of a call."""
    return repr(TEMPLATE_DATE.strftime(call[2]))


def check_lengths(args: Args, prompts: list[list[int]], context: int) -> None:
    """Raises DataError if a prompt has no tokens, or one and its completion exceed the context."""
    if not all(prompts):
        name = args.model_name_or_path
        raise DataError(f"the tokenizer of {name} turns a prompt into no tokens: use another model")
    longest = max(len(prompt) for prompt in prompts)
    left = context - longest
    if args.max_completion_length > left:
        advice = f"set it to {left} or less" if left > 0 else "leave the long prompts out"
        raise DataError(
            f"the longest prompt ({longest} tokens) and --max_completion_length exceed the model's "
            f"context of {context}: {advice}"
        )


def check_vocabulary(
    tokenizer: PreTrainedTokenizerBase, prompts: list[list[int]], size: int
) -> None:
    """Raises DataError if a prompt has a token that the model does not know."""
    largest = max(max(prompt) for prompt in prompts)
    if largest >= size:
        token = tokenizer.decode([largest])
        raise DataError(f"a prompt has the token {token!r}, which the model lacks: leave it out")


# ---- Rewards of a batch --------------------------------------------------------------------------
def completions_of(run: Run, batch: Batch) -> tuple[list[list[int]], list[str]]:
    """Returns the token ids and the text of each completion of a batch."""
    completions = batch.ids[:, batch.prompt_width :].cpu()  # [B, T]
    mask = batch.mask.cpu()
    ids = [row[kept].tolist() for row, kept in zip(completions, mask, strict=True)]
    return ids, run.tokenizer.batch_decode(ids, skip_special_tokens=True)


def token_texts(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> list[str]:
    """Returns what each token adds to the text.

    A token is decoded after the one before it, because some decoders drop a space at the beginning.
    One that ends within a character adds nothing, and the one that completes it adds the character.
    """
    texts = []
    begin = 0  # of the tokens that are decoded together
    shown = 0  # how many tokens have added their text
    for end in range(1, len(ids) + 1):
        text = tokenizer.decode(ids[begin:end])
        if text.endswith("\ufffd") and end - shown < 4:  # a character has four bytes at most
            texts.append("")
            continue
        texts.append(text[len(tokenizer.decode(ids[begin:shown])) :])
        begin = shown
        shown = end
    if shown < len(ids):  # the last one ends within a character
        texts[-1] = tokenizer.decode(ids[begin:])[len(tokenizer.decode(ids[begin:shown])) :]
    return texts


def correctness(grader: Grader, texts: Sequence[str], problems: Sequence[Problem]) -> list[float]:
    """Returns 1 for each text with the right final answer, else 0.

    For a problem with steps every step must be right as well: slips that cancel earn nothing.
    """
    golds = [problem.answer for problem in problems]
    prompts = [problem.prompt for problem in problems]
    verdicts = list(grader.grade(texts, golds, prompts))
    for row, (text, problem) in enumerate(zip(texts, problems, strict=True)):
        if not has_right_steps(text, problem):
            verdicts[row] = 0.0
    return verdicts


def grade_batch(run: Run, batch: Batch) -> list[float]:
    """Returns `correctness` of the completions of a batch."""
    _, texts = completions_of(run, batch)
    return correctness(run.grader, texts, batch.problems)


def reward_batch(run: Run, batch: Batch, metrics: dict[str, float]) -> Tensor:
    """Returns the weighted sum [B] of the reward functions, and writes their means to `metrics`.

    A function's NaN (None, by TRL's convention: it does not judge this completion) counts neither
    in the sum, which is NaN if no function judges, nor in its mean. The means have TRL's names and
    are over all processes. So are those of the numbers that a function logs.
    """
    ids, texts = completions_of(run, batch)
    prompts = [problem.prompt for problem in batch.problems]
    columns = shared_columns(batch.problems)
    sums = [math.nan] * len(texts)
    for name, (function, weight) in run.reward_funcs.items():
        logged: dict[str, list[float]] = {}
        if function is None:
            values = correctness(run.grader, texts, batch.problems)
        else:
            values = call_reward_func(name, function, prompts, texts, ids, columns, logged)
        for row, value in enumerate(values):
            if not math.isnan(value):
                others = 0.0 if math.isnan(sums[row]) else sums[row]
                sums[row] = weight * value + others

        logged["mean"] = [value for value in values if not math.isnan(value)]
        figures = ["mean"]
        if function is not None and takes_argument(function, "log_metric"):
            figures = names_on_all_processes(logged)
        for figure in figures:
            numbers = logged.get(figure, [])
            local = batch.sampled_logp.new_tensor([sum(numbers), len(numbers)])
            total, count = run.accelerator.reduce(local, "sum")
            if count > 0:
                metrics[f"rewards/{name}/{figure}"] = (total / count).item()

    for row, reward in enumerate(sums):
        if abs(reward) > LARGEST_REWARD:  # false for NaN
            advice = "return smaller numbers, or lower --reward_weights"
            raise RewardError(
                f"the rewards of completions[{row}] add up to {reward:g}, too large for float32: "
                f"{advice}"
            )
    return batch.sampled_logp.new_tensor(sums)


def names_on_all_processes(logged: dict[str, list[float]]) -> list[str]:
    """Returns the names that any process has logged under, in the same order everywhere."""
    from accelerate.utils import gather_object  # not at the top: it imports torch

    return sorted(set(gather_object(list(logged))))


def shared_columns(problems: Sequence[Problem]) -> dict[str, list]:
    """Returns the columns that every problem has, each as a list, for the reward functions.

    The final answers are among them as `gold`, unless the data set has a column of that name.
    """
    columns = {"gold": [problem.answer for problem in problems]}
    for name in problems[0].columns:
        if all(name in problem.columns for problem in problems):
            columns[name] = [problem.columns[name] for problem in problems]
    return columns
