r"""Rewards: is a completion's last \boxed{...} equal to the gold answer? And custom functions."""

from __future__ import annotations

import contextlib
import copy
import functools
import hashlib
import importlib
import inspect
import json
import math
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from accelerate.logging import get_logger
from accelerate.utils import gather_object

from common import fail
from common.answers import last_boxed, settle
from common.task import Problem, has_right_steps

MAX_TIMEOUTS = 30  # of one batch, a minute in all; then it sends nothing more to the worker
SAMPLED = "sampled_completions"
ACCURACY = "accuracy_reward"  # the name that stands for the grader's own verdict
LOGGER = get_logger(__name__)  # of the main process


# ---- Grading -------------------------------------------------------------------------------------
class Grader:
    """Grades completions. It starts its worker when a pair first needs one."""

    def __init__(self) -> None:
        self.timeouts = 0  # pairs without a verdict, which get 0
        self.limit = math.inf  # of timeouts in a batch of `reward_values`
        self._worker: subprocess.Popen | None = None
        self._is_equal = functools.lru_cache(maxsize=20_000)(self._judge)

    def grade(self, completions: Sequence[str], problems: Sequence[Problem]) -> list[float]:
        """Returns 1.0 for each completion with the right final answer, and 0.0 for the others.

        If a problem has steps, every step must be right as well: slips that cancel out earn
        nothing. A completion gets NaN if its problem has no answer.
        """
        verdicts = []
        limit = min(self.limit, self.timeouts + MAX_TIMEOUTS)
        for completion, problem in zip(completions, problems, strict=True):
            question = (
                problem.prompt
                if isinstance(problem.prompt, str)
                else "\n".join(message["content"] for message in problem.prompt)
            )
            settled = settle(last_boxed(completion) or "", problem.answer, question)
            if isinstance(settled, list):
                self.timeouts += self.timeouts >= limit  # then it gets 0 without a verdict, too
                settled = self.timeouts < limit and all(self._is_equal(*pair) for pair in settled)
            verdicts.append(
                float(settled and has_right_steps(completion, problem))
                if problem.answer
                else math.nan
            )
        return verdicts

    def _judge(self, box: str, gold: str) -> bool:
        """Returns the worker's verdict on a pair. If it dies, the pair is tried once more."""
        for _ in range(2):
            worker = self._worker or start_worker()
            self._worker = None  # else, after a Ctrl-C here, its replies would be one pair late
            with contextlib.suppress(BrokenPipeError):  # it died while idle
                print(json.dumps([box, gold]), file=worker.stdin, flush=True)
            reply = worker.stdout.readline()  # type: ignore[union-attr]
            if reply:
                self._worker = worker
                return reply == "1\n"
            if worker.wait() == -signal.SIGPROF:  # its time was up
                break
        self.timeouts += 1
        return False


def start_worker() -> subprocess.Popen:
    """Returns a worker that is ready. It ends when this process closes its standard input."""
    worker = subprocess.Popen(
        # -P: no file of the user's hides a library
        [sys.executable, "-P", str(Path(__file__).with_name("answer_worker.py"))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,  # Ctrl-C is for the trainer to handle
    )
    if worker.stdout.readline() != "ready\n":  # type: ignore[union-attr]
        raise OSError(f"{sys.executable} starts no grading worker: is math-verify installed?")
    return worker


GRADER = Grader()  # of this process; its worker starts when it is first needed
# Two processes would read one worker's replies.
os.register_at_fork(after_in_child=GRADER.__init__)  # type: ignore[misc]


def is_right(completion: str | list, gold: str, problem: str | list = "") -> bool:
    """Returns whether a completion's final answer is right, for use in reward functions."""
    text = completion if isinstance(completion, str) else completion[-1]["content"]
    return GRADER.grade([text], [Problem(problem, gold)]) == [1.0]


# ---- Reward functions ----------------------------------------------------------------------------
def load_reward_funcs(
    paths: list[str], weights: list[float] | None
) -> tuple[dict[str, Callable | None], torch.Tensor, dict[str, ModuleType]]:
    """Returns F reward functions by name, from dotted paths as in TRL, and their weights [F].

    A function is None for accuracy_reward, which stands for the grader's own verdict. Last come the
    modules, by name: those of the paths, and what they import from the working directory. What lies
    there is read anew, because a notebook may have loaded it before it was changed.
    """
    functions: dict[str, Callable | None] = {}
    modules: dict[str, ModuleType] = {}
    weights = weights or [1.0] * len(paths)
    former = modules_here()
    for name in former:
        del sys.modules[name]
    try:
        for path in paths:
            module_name, _, name = path.rpartition(".")
            functions[name] = None
            if path != ACCURACY:
                sys.path.append(os.getcwd())  # at the end, so that no file there replaces a library
                with contained(path):
                    modules[module_name] = importlib.import_module(module_name)
                    functions[name] = getattr(modules[module_name], name)
        modules |= modules_here()
    finally:
        sys.modules.update(former | modules_here())  # what they do not import stays as it was
    if not len(functions) == len(paths) == len(weights) or not all(abs(w) < 1e18 for w in weights):
        fail(f"--reward_funcs {paths} must have different names, and a weight each, "
                         f"not {weights}")  # fmt: skip
    return functions, torch.tensor(weights, dtype=torch.float64), modules


def modules_here() -> dict[str, ModuleType]:
    """Returns the modules that the working directory holds by their names, but for our common/."""
    return {
        name: module
        for name, module in sys.modules.copy().items()
        if name.split(".")[0] != "common"
        and str(getattr(module, "__file__", "")).removesuffix(".py").removesuffix("/__init__")
        == os.path.join(os.getcwd(), *name.split("."))
    }


def code_digests(modules: dict[str, ModuleType]) -> dict[str, str]:
    """Returns a digest of the file of each module, if it has one."""
    files = {
        name: Path(getattr(module, "__file__", None) or "") for name, module in modules.items()
    }
    return {
        f"code of {name}": hashlib.blake2b(file.read_bytes(), digest_size=4).hexdigest()
        for name, file in files.items()
        if file.is_file()
    }


@contextlib.contextmanager
def contained(name: str) -> Iterator[None]:
    """Restores the folder after a user's code, and names that code in its errors and exits.

    A bare sys.exit(0) would end the program as if it had succeeded.
    """
    try:
        with contextlib.chdir(os.getcwd()):
            yield
    except (SystemExit, Exception) as end:
        raise RuntimeError(f"the reward function {name} has ended the program: {end!r}") from end


def reward_values(
    functions: dict[str, Callable | None],
    problems: list[Problem],
    texts: list[str],
    ids: list[list[int]],
    logged: dict[str, list[float]],
) -> torch.Tensor:
    """Returns what F reward functions give to each of B completions, float64 [B, F].

    NaN stands where a function returns None, which by TRL's convention means that it does not judge
    the completion. The numbers to log, these and those that the functions log themselves, are
    appended to `logged`.
    """
    logged.setdefault(SAMPLED, []).append(len(texts))
    GRADER.limit = GRADER.timeouts + MAX_TIMEOUTS  # also if functions call `is_right`
    columns = []
    for name, function in functions.items():
        numbers = (
            GRADER.grade(texts, problems)
            if function is None
            else call_reward_func(name, function, problems, texts, ids, logged)
        )
        logged.setdefault(f"rewards/{name}/mean", []).extend(
            number for number in numbers if not math.isnan(number)
        )
        columns.append(torch.tensor(numbers, dtype=torch.float64))
    GRADER.limit = math.inf
    return torch.stack(columns, 1)


def weighted_sum(values: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Returns the weighted sum of F rewards [..., F]; NaN where all of them are."""
    sums = values.nan_to_num() @ weights.to(values.device)
    return sums.masked_fill(values.isnan().all(-1), torch.nan)


def places_without_signal(advantages: torch.Tensor) -> torch.Tensor:
    """Returns the places of the completions whose group has equal advantages [prompts, G]."""
    is_flat = (advantages == advantages[:, :1]).all(1, keepdim=True)  # [prompts, 1]
    return is_flat.expand_as(advantages).flatten().nonzero().squeeze(1)


def log_means(logged: dict[str, list[float]]) -> dict[str, float]:
    """Returns the mean over all processes of each figure that was logged, by TRL's names.

    For SAMPLED it is the sum, which is how many completions were judged.
    """
    everywhere: dict[str, list[float]] = {}
    for own in gather_object([logged]):
        for name, numbers in own.items():
            everywhere.setdefault(name, []).extend(numbers)
    return {
        name: sum(numbers) / len(numbers) for name, numbers in everywhere.items() if numbers
    } | {SAMPLED: sum(everywhere[SAMPLED])}


def call_reward_func(
    name: str,
    function: Callable,
    problems: list[Problem],
    texts: list[str],
    ids: list[list[int]],
    logged: dict[str, list[float]],
) -> list[float]:
    """Returns a reward function's number for each completion, NaN where it returns None.

    The function is called by TRL's convention: with the columns of the data set, and with a list of
    one message for the completion of a chat. The numbers that it logs are appended to `logged`.
    """

    def log_metric(metric: str, value: float) -> None:
        other = "logged_" if metric == "mean" else ""  # the mean of the rewards has this name
        logged.setdefault(f"rewards/{name}/{other}{metric}", []).append(float(value))

    problems = [copy.deepcopy(problem) for problem in problems]  # the function may change its own
    replies = [
        text if isinstance(problem.prompt, str) else [{"role": "assistant", "content": text}]
        for problem, text in zip(problems, texts, strict=True)
    ]
    inputs: dict[str, Any] = {  # all problems have the same columns
        column: [problem.columns[column] for problem in problems] for column in problems[0].columns
    } | {  # these replace columns of the same names
        "gold": [problem.answer or problem.columns.get("gold", "") for problem in problems],
        "prompts": [problem.prompt for problem in problems],
        "completions": replies,
        "completion_ids": copy.deepcopy(ids),
        "log_metric": log_metric,
    }
    for parameter in inspect.signature(function).parameters.values():
        if parameter.default is not parameter.empty and parameter.name not in {
            *inputs,
            *getattr(function, "keywords", ()),  # of functools.partial
        }:
            LOGGER.warning_once(  # it may be misspelt
                f"no column of the data is called {parameter.name}, so the reward function {name} "
                f"gets its default, {parameter.default!r}"
            )
    with contained(name):
        values = function(**inputs)
        numbers = [None if value is None else float(value) for value in values]
    are_right = all(number is None or abs(number) <= 1e18 for number in numbers)  # not NaN
    if len(numbers) != len(texts) or not are_right or isinstance(values, dict):
        fail(f"the reward function {name} must return a list of {len(texts)} numbers "
                         f"up to 1e18, or None, and not {str(values)[:80]}")  # fmt: skip
    return [math.nan if number is None else number for number in numbers]
