"""Problems: the embedded chain-arithmetic task, Hub and local data sets, and chat prompts."""

import csv
import functools
import hashlib
import itertools
import json
import math
import os
import random
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from common.reward import boxed_span, call_reward_func, last_boxed


class Problem(NamedTuple):
    prompt: str | list  # text, or chat messages
    answer: str
    steps: tuple[int, ...] = ()  # the right result of each step that a solution must state
    columns: dict = {}  # noqa: RUF012  the row without its prompt; never written to
    opening: int = 1  # sentences before the one that states the first: a chain's states the start


# The embedded task: "Start with 23, add 19, double it." -> worked steps -> \boxed{84} ------------
class Operation(NamedTuple):
    name: str  # "add" | "subtract" | "multiply"
    operand: int

    def apply(self, value: int) -> int:
        by = self.operand
        return {"add": value + by, "subtract": value - by, "multiply": value * by}[self.name]

    def phrase(self) -> str:
        words = {("multiply", 2): "double it", ("multiply", 3): "triple it"}
        return words.get(self, f"{self.name} {self.operand}")


class Chain(NamedTuple):
    start: int
    operations: tuple[Operation, ...]

    def results(self) -> tuple[int, ...]:
        """The right value after each operation."""
        values = itertools.accumulate(self.operations, lambda v, o: o.apply(v), initial=self.start)
        return tuple(values)[1:]

    def prompt(self) -> str:
        return f"Start with {self.start}, " + ", ".join(o.phrase() for o in self.operations) + "."

    def is_held_out(self) -> bool:
        """One chain in ten, by a hash of the chain itself: no list could make the sets overlap."""
        digest = hashlib.blake2b(self.prompt().encode(), digest_size=4).digest()
        return int.from_bytes(digest, "big") % 10 == 0


def random_chain(rng: random.Random, held_out: bool, length: int | None = None) -> Chain:
    """A chain of `length` (3 or 4) operations whose every value stays between 1 and 99."""
    while True:
        start, operations = rng.randint(5, 60), []
        for _ in range(length or rng.randint(3, 4)):
            name = rng.choice(["add", "add", "subtract", "subtract", "multiply"])
            operand = rng.choice([2, 2, 3]) if name == "multiply" else rng.randint(2, 19)
            operations.append(Operation(name, operand))
        chain = Chain(start, tuple(operations))
        if all(1 <= value <= 99 for value in chain.results()) and chain.is_held_out() == held_out:
            return chain


def chain_problems(
    count: int, held_out: bool, seed: int = 0, length: int | None = None
) -> list[Problem]:
    """`count` different problems, or all; no held-out one is among the others of any seed."""
    rng, chains, repeats = random.Random(f"{seed} {held_out}"), {}, 0
    while len(chains) < count and repeats < 50_000:  # after so many no other is left
        chain = random_chain(rng, held_out, length)
        repeats = repeats + 1 if chain in chains else 0
        chains[chain] = None  # a dict keeps the order and drops repeats
    pairs = [(chain, str(chain.results()[-1])) for chain in chains]
    return [Problem(c.prompt(), answer, c.results(), {"answer": answer}) for c, answer in pairs]


_NUMBER = re.compile(r"-?[0-9]+(?:\.[0-9]+)?")
_SENTENCE_END = re.compile(r"\.(?![0-9])")


def stated_results(text: str, num_steps: int, opening: int = 1) -> list[tuple[int, int]]:
    """Character span of the result that each step states: the last number of its sentence, after
    `opening` others. A sentence without a number has an empty span at its end, a step that
    is not there one at the end of the text."""
    spans, begin, count = [], 0, num_steps + opening
    stops = [m.start() for m in itertools.islice(_SENTENCE_END.finditer(text), count)]
    for stop in (stops + [len(text)] * count)[:count]:
        numbers = [m.span() for m in _NUMBER.finditer(text, begin, stop)]
        spans.append(numbers[-1] if numbers else (stop, stop))
        begin = min(stop + 1, len(text))
    return spans[opening:]


def first_error(text: str, problem: Problem) -> int | None:
    """The first character of a chain that differs from a right result or the boxed answer:
    `len(text)` if what is wrong is that the text ends, None if all are right."""
    stated = stated_results(text, len(problem.steps), problem.opening)
    claims = [*stated, boxed_span(text) or (len(text), len(text))]
    for (begin, end), right in zip(claims, [*map(str, problem.steps), problem.answer], strict=True):
        if text[begin:end] != right:
            return begin + len(os.path.commonprefix([text[begin:end], right]))
    return None


def correctness(grader, texts: Sequence[str], problems: Sequence[Problem]) -> list[float]:
    """1 for a right final answer, else 0. A problem with steps must have every step right as well:
    slips that cancel earn nothing."""
    verdicts = grader.grade(texts, [problem.answer for problem in problems])
    return [
        verdict * (not problem.steps or first_error(text, problem) is None)
        for verdict, text, problem in zip(verdicts, texts, problems, strict=True)
    ]


def token_roles(pieces: Sequence[str], problem: Problem) -> list[str]:
    """What each token (by its text) of a completion of an embedded problem decides: "decisive" (a
    digit of a step's stated result), "first_wrong" (the one token at which the solution first goes
    wrong, the last one if it ends too early) or ""."""
    text = "".join(pieces)
    spans = stated_results(text, len(problem.steps), problem.opening)
    error = first_error(text, problem)
    error = -1 if error is None else min(error, len(text) - 1)
    roles = []
    for begin, end in itertools.pairwise(itertools.accumulate(map(len, pieces), initial=0)):
        decisive = any(max(begin, first) < min(end, last) for first, last in spans)
        wrong = begin <= error < end
        roles.append("first_wrong" if wrong else "decisive" if decisive else "")
    return roles


# Data sets ----------------------------------------------------------------------------------------
EMBEDDED = "chain_arithmetic"
PROMPT_COLUMNS, ANSWER_COLUMNS = ("problem", "question", "prompt"), ("answer", "solution")
KNOWN_CONFIGS = {"openai/gsm8k": "main"}
ONLY_SPLITS = {"HuggingFaceH4/MATH-500": "test"}  # sets that have no other
FILE_KINDS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv"}


class DataError(Exception):
    """A data set that cannot be used; the message is one sentence that says what to change."""


def final_answer(text: str) -> str | None:
    """The answer in a gold solution: after GSM8K's `####`, in the last `\\boxed{}`, else None."""
    answer = text.rsplit("####", 1)[1] if "####" in text else last_boxed(text)
    return answer and answer.strip()


def pick_column(present: Sequence[str], named: str | None, known: Sequence[str], flag: str) -> str:
    """The column named by a flag, or the first known one that is there."""
    found = [column for column in ([named] if named else known) if column in present]
    if not found:
        wanted, there = named or " | ".join(known), ", ".join(present)
        raise DataError(f"no {wanted} column among {there}: name it with --{flag}")
    return found[0]


def read_split(name: str, config: str | None, split: str) -> list[dict]:
    """Rows of one split of a Hub data set or of a local .jsonl, .json, .parquet or .csv file."""
    path, kind = Path(name), FILE_KINDS.get(Path(name).suffix)
    if kind and not (path.is_file() and path.stat().st_size):
        raise DataError(f"{name} is missing or empty: check the path, give a file with problems")
    import datasets  # costs a second, and the embedded task does without

    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # the sentence below says it all
    try:
        if kind == "csv":  # all cells are texts: guessed types would make 12.0 of 12
            with open(name, newline="", encoding="utf-8-sig") as file:
                header, *rows = [row for row in csv.reader(file, strict=True) if row] or [[]]
            if odd := [row for row in rows if len(row) != len(header)]:
                raise ValueError(f"{len(odd[0])} cells, not {len(header)}: {','.join(odd[0])}")
            return [dict(zip(header, row, strict=True)) for row in rows]
        if kind:
            return datasets.load_dataset(kind, data_files=name, split="train").to_list()
        config = config or KNOWN_CONFIGS.get(name)
        return datasets.load_dataset(name, config, split=split).to_list()
    except Exception as error:  # the library raises a dozen kinds, the network a dozen more
        reason = " ".join(str(error.__cause__ or error).split())[:200]
        check = "the file" if kind else "the name, --dataset_config and the --dataset_*_split flags"
        what = name if kind else f"split {split!r} of {name}"
        raise DataError(f"cannot read {what}, check {check}: {reason}") from error


def parse_rows(
    rows: list[dict], name: str, prompt_column: str | None, answer_column: str | None
) -> list[Problem]:
    """Problems of a table. Rows without a prompt or a final answer are left out, and counted."""
    if not rows:
        raise DataError(f"{name} has no rows: give a set with problems in it")
    prompt_key = pick_column(list(rows[0]), prompt_column, PROMPT_COLUMNS, "prompt_column")
    answer_key = pick_column(list(rows[0]), answer_column, ANSWER_COLUMNS, "answer_column")
    problems, advice = [], "name others with --prompt_column and --answer_column"
    for number, row in enumerate(rows, 1):
        prompt, gold = row[prompt_key] or "", row[answer_key]
        gold, *others = (gold or [None]) if isinstance(gold, list) else [gold]
        messages = prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt}]
        parts = [isinstance(m, dict) and m.get(k) for m in messages for k in ("role", "content")]
        if others or isinstance(gold, list | dict) or not all(isinstance(p, str) for p in parts):
            form = f"text or messages with role and content, and {answer_key} one answer"
            raise DataError(f"row {number} of {name}: {prompt_key} must hold {form}, or {advice}")
        text = "" if gold is None else str(gold)
        stated = final_answer(text)
        answer = text.strip() if stated is None and answer_key != "solution" else stated
        if prompt and answer:
            columns = {key: row[key] for key in row if key != prompt_key}
            whole = isinstance(steps := row.get("steps"), list) and {*map(type, steps)} == {int}
            named = {"steps": tuple(steps), "opening": 0} if whole else {}
            problems.append(Problem(prompt, answer, columns=columns, **named))
    why = f"no prompt in {prompt_key} or no final answer in {answer_key}"
    left_out = f"{len(rows) - len(problems)} of {len(rows)} rows of {name} are left out: {why}"
    if not problems:
        raise DataError(f"{left_out}; {advice}")
    if len(problems) < len(rows) and os.environ.get("RANK", "0") == "0":
        print(left_out, file=sys.stderr)
    return problems


def load_problems(args) -> tuple[list[Problem], list[Problem]]:
    """Training problems and held-out ones, which never share a prompt. The latter come from
    `eval_dataset_name` if given, else from the test split, else (a local file) from a fifth of its
    rows at most, the same ones for every seed."""
    name, config, count = args.dataset_name, args.dataset_config, args.max_eval_samples
    if name == EMBEDDED and config not in (None, *"2345678"):
        raise DataError(f"--dataset_config {config}: {name} has 2 to 8 operations, give a number")
    length = int(config) if name == EMBEDDED and config else None

    def read(source: str, config: str | None, split: str) -> list[Problem]:
        if source == EMBEDDED:
            return chain_problems(count, held_out=True, length=length)
        rows = read_split(source, config, ONLY_SPLITS.get(source, split))
        return parse_rows(rows, source, args.prompt_column, args.answer_column)

    if name == EMBEDDED:
        train = chain_problems(4096, held_out=False, seed=args.seed, length=length)
    else:
        train = read(name, config, args.dataset_train_split)
    other = args.eval_dataset_name
    if not other and (name in ONLY_SPLITS or Path(name).suffix in FILE_KINDS):  # it has one split
        held_out, count = list(train), max(1, min(count, len(train) // 5))
    else:
        held_out = read(other or name, None if other else config, args.dataset_test_split)
    random.Random(0).shuffle(held_out)
    held_out = held_out[:count]
    unseen = {str(problem.prompt) for problem in held_out}
    train = [problem for problem in train if str(problem.prompt) not in unseen]
    if not train:
        raise DataError(f"{name} has no problem left to train on beside those held out: add rows")
    return train, held_out


def problem_at(position: int, count: int, seed: int) -> int:
    """Which of `count` problems stands at a position of the endless stream of shuffled epochs."""
    epoch, place = divmod(position, count)
    return _epoch_order(epoch, count, seed)[place]


@functools.lru_cache(maxsize=2)
def _epoch_order(epoch: int, count: int, seed: int) -> list[int]:
    order = list(range(count))
    random.Random(f"{seed} {epoch}").shuffle(order)
    return order


def encode_prompt(
    tokenizer, prompt: str | list, system_prompt: str | None = None,
    template_kwargs: dict | None = None,
) -> list[int]:  # fmt: skip
    """Token ids of a prompt: by the chat template, which writes its own BOS, or, where a tokenizer
    has none, the text as it is (nothing is appended: it may end in "Answer:" or a newline)."""
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    if system_prompt:
        messages = [{"role": "system", "content": system_prompt}, *messages]
    if not tokenizer.chat_template:
        return tokenizer("\n\n".join(m["content"] for m in messages)).input_ids
    how = (template_kwargs or {}) | {"add_generation_prompt": True, "tokenize": False}
    try:
        text = tokenizer.apply_chat_template(messages, **how)
    except Exception as error:  # a template is a program: it raises what it likes
        advice = "check --system_prompt and --chat_template_kwargs"
        raise DataError(f"the chat template fails, {advice}: {error}") from error
    return tokenizer(text, add_special_tokens=False).input_ids


def load_data(args):
    """Tokenizer, (problems, prompts) to train on and (problems, prompts) held out, all of which fit
    into the model's context: that is checked before the model is loaded."""
    from transformers import AutoConfig, AutoTokenizer

    name, how = args.model_name_or_path, {"revision": args.model_revision}
    how["trust_remote_code"] = False  # else transformers asks on standard input
    try:
        config = AutoConfig.from_pretrained(name, **how).get_text_config()
        tokenizer = AutoTokenizer.from_pretrained(name, **how)
    except (OSError, ValueError) as error:
        own = "trust_remote_code" in str(error) and "models that bring their own code are not run"
        why = own or str(error)[:300]
        raise DataError(f"cannot load --model_name_or_path {name}: {why}") from error
    if tokenizer.eos_token_id is None:
        raise DataError(f"the tokenizer of {name} has no EOS token: set eos_token in its files")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token  # the trainer's masks come from lengths
    try:
        style = (args.system_prompt, dict(json.loads(args.chat_template_kwargs)))
    except (TypeError, ValueError) as error:
        needs = '--chat_template_kwargs must be JSON such as {"enable_thinking": false}'
        raise DataError(needs) from error
    sets = load_problems(args)
    prompts = [[encode_prompt(tokenizer, p.prompt, *style) for p in problems] for problems in sets]
    if not all(prompts[0] + prompts[1]):
        raise DataError(f"the tokenizer of {name} turns a prompt into no tokens: use another model")
    context = getattr(config, "max_position_embeddings", None) or sys.maxsize
    left = context - (longest := max(map(len, prompts[0] + prompts[1])))
    if args.max_completion_length > left:
        advice = f"set it to {left} or less" if left > 0 else "leave the long prompts out"
        raise DataError(
            f"the longest prompt ({longest} tokens) and --max_completion_length exceed the model's "
            f"context of {context}: {advice}"
        )
    return tokenizer, (sets[0], prompts[0]), (sets[1], prompts[1])


# Rewards of a batch -------------------------------------------------------------------------------
def completions_of(run, batch) -> tuple[list[list[int]], list[str]]:
    """Token ids and text of each completion of a batch (grpo_*.py's Batch)."""
    pairs = zip(batch.ids[:, batch.prompt_width :].cpu(), batch.mask.cpu(), strict=True)
    ids = [tokens[real].tolist() for tokens, real in pairs]
    return ids, run.tokenizer.batch_decode(ids, skip_special_tokens=True)


def grade_batch(run, batch) -> list[float]:
    """`correctness` of a batch."""
    return correctness(run.grader, completions_of(run, batch)[1], batch.problems)


def reward_batch(run, batch, metrics: dict):
    """The weighted sum [B] of the reward functions. None is `correctness`; the others are given the
    columns that every problem has, and as `gold`, unless a column has that name, the final answers.
    A function's NaN (TRL's None: not for this completion) counts neither in the sum, which is NaN
    of nothing, nor in its mean over all processes, which is written under TRL's name."""
    ids, texts = completions_of(run, batch)
    shared = set.intersection(*(set(problem.columns) for problem in batch.problems))
    columns = {"gold": [problem.answer for problem in batch.problems]}
    columns |= {key: [problem.columns[key] for problem in batch.problems] for key in shared}
    prompts, sums = [problem.prompt for problem in batch.problems], [math.nan] * len(texts)
    for name, (function, weight) in run.reward_funcs.items():
        if function is None:
            values = correctness(run.grader, texts, batch.problems)
        else:
            values = call_reward_func(name, function, prompts, texts, ids, columns)
        given = [value for value in values if not math.isnan(value)]
        local = batch.sampled_logp.new_tensor([sum(given), len(given)])
        total, count = run.accelerator.reduce(local, "sum")
        metrics |= {f"rewards/{name}/mean": (total / count).item()} if count else {}
        pairs = zip(sums, values, strict=True)
        sums = [s if math.isnan(v) else weight * v + (0 if math.isnan(s) else s) for s, v in pairs]
    return batch.sampled_logp.new_tensor(sums)
