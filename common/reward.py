r"""Rewards: is a completion's last \boxed{...} equal to the gold answer? And custom functions.

`Grader` answers the question. It settles equal strings and plain integers itself (answers.py), and
has other pairs compared by math-verify in worker processes (grading_worker.py says why those are
processes). `load_reward_funcs` and `call_reward_func` are for functions of the user's own, and
`is_right` and `verdicts` are for use in them.
"""

from __future__ import annotations

import atexit
import contextlib
import copy
import functools
import importlib.util
import inspect
import itertools
import json
import math
import os
import re
import select
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import IO, Any, cast

from common.answers import Pair, boxed_span, last_boxed, pairs_to_compare, quick_verdict
from common.printable import printable

__all__ = [
    "Grader", "RewardError", "boxed_span", "call_reward_func", "is_right", "last_boxed",
    "load_reward_funcs", "verdicts",
]  # fmt: skip

WORKER_PROGRAM = Path(__file__).resolve().with_name("grading_worker.py")
START_SECONDS = 60.0  # a start is about 1 s; a cold disk or a busy machine takes longer
START_ATTEMPTS = 3  # one death alone may be the kernel's OOM killer
CACHE_PAIRS = 20_000  # at most 2 * MAX_CHARS characters each: tens of MB at worst
ACCURACY = "accuracy_reward"  # the reward function that stands for the Grader's own verdict

RewardFunction = Callable[..., Any]  # by TRL's convention; see `call_reward_func`


class RewardError(Exception):
    """A reward that cannot be computed; the message says what to change in one sentence."""

    def __init__(self, message: str) -> None:
        super().__init__(printable(message))


# ---- Grading -------------------------------------------------------------------------------------
class Worker:
    """A process that runs grading_worker.py. It may not be ready yet, or have died."""

    def __init__(self) -> None:
        one_thread = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            # -P: no file in the user's working directory may stand in for a library
            [sys.executable, "-P", str(WORKER_PROGRAM)],
            bufsize=0,
            env=os.environ | one_thread,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        self.stdin = cast(IO[bytes], self.process.stdin)
        self.stdout = cast(IO[bytes], self.process.stdout)

    def send(self, pair: Pair) -> None:
        """Hands a pair over. Its line is below 64 KiB, so the empty pipe takes it at once."""
        with contextlib.suppress(BrokenPipeError):  # it died while idle, as its reply will say
            self.stdin.write(json.dumps(pair).encode() + b"\n")

    def reply(self, seconds: float) -> bytes | None:
        """Returns what the worker writes within some seconds; b"" if it is dead, None if late."""
        poll = select.poll()  # select.select takes no file descriptor above 1023
        poll.register(self.stdout, select.POLLIN)
        if not poll.poll(1000 * max(0.0, seconds)):
            return None
        return os.read(self.stdout.fileno(), 4096)  # a line is written at once, never in parts

    def kill(self) -> None:
        """Kills the process, closes its pipes and waits for its end."""
        with self.process:
            self.process.kill()  # SIGKILL: anything milder waits for C code to return

    def cause_of_death(self) -> str:
        """Returns how a killed process had ended, as a part of a sentence."""
        code = self.process.returncode
        if code >= 0:
            return f"gone with exit code {code}"
        text = f"killed by signal {-code}"
        if code == -signal.SIGKILL:
            text += " (the kernel does that when memory runs out)"
        return text


def problem_text(problem: str | list) -> str:
    """Returns the text of a problem: itself, or what the user says in a chat."""
    if isinstance(problem, str):
        return problem
    said = [message["content"] for message in problem if message["role"] == "user"]
    return "\n".join(text for text in said if isinstance(text, str))


class Grader:
    """Grades completions. It starts its workers when a pair first needs one, and keeps them.

    `timeout` is in seconds, from handing a pair to a worker that is ready. A worker that has no
    verdict by then is killed and replaced. If a worker dies, its pair is tried once more, because
    it need not be the cause. A pair without a verdict gets 0, and that is cached.

    `budget` is in seconds, for one call of `grade` from its first worker's readiness on. Pairs that
    are left then get 0, which is not cached. `timeouts` counts both kinds of 0.

    It is not thread-safe, and no worker outlives it: use it in a `with` block, or call `close`.
    """

    def __init__(self, num_workers: int = 2, timeout: float = 5.0, budget: float = 60.0) -> None:
        self.timeouts = 0
        self._timeout = timeout
        self._budget = budget
        self._deadline = math.inf  # of the present call of `grade`, by time.monotonic()
        self._is_canceled = False  # whether that call ends with an exception
        # One thread for each worker. They stay: a worker dies with the thread that started it.
        self._threads = ThreadPoolExecutor(num_workers)
        self._workers: list[Worker] = []
        self._idle: list[Worker] = []  # those of them that are ready for a pair
        self._has_told = False  # whether the death of a worker has been reported
        self._cache: dict[Pair, float] = {}  # the pair that has been unused for longest comes first

    def __enter__(self) -> Grader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Kills the workers. They hold no state, so a later `grade` starts new ones."""
        self._idle.clear()
        for worker in list(self._workers):
            self._kill(worker)

    def grade(
        self,
        completions: Sequence[str],
        answers: Sequence[str],
        problems: Sequence[str | list] | None = None,
    ) -> list[float]:
        """Returns 1.0 (equal) or 0.0 for each completion against its gold answer, in order.

        The problems are texts or lists of chat messages. Without them, 12 apples is not 12.
        """
        if problems is None:
            problems = [""] * len(completions)
        # Settle what takes no evaluation. The rest is collected by pair, because the members of a
        # group often give the same answer.
        verdicts = [0.0] * len(completions)
        rows_of_pair: dict[Pair, list[int]] = {}
        rows = zip(completions, answers, problems, strict=True)
        for row, (completion, answer, problem) in enumerate(rows):
            box = last_boxed(completion) or ""
            for pair in pairs_to_compare(box, answer, problem_text(problem)):
                given, right = pair
                quick = quick_verdict(given, right)
                if quick is None:
                    rows_of_pair.setdefault(pair, []).append(row)
                else:
                    verdicts[row] = max(verdicts[row], quick)

        # Take the others from the cache, or have them judged.
        known = {pair: self._cache.pop(pair) for pair in rows_of_pair if pair in self._cache}
        known |= self._judge_all([pair for pair in rows_of_pair if pair not in known])
        for pair, verdict in known.items():
            for row in rows_of_pair[pair]:
                verdicts[row] = max(verdicts[row], verdict)

        # Cache them as the ones that were used last, and drop the oldest.
        self._cache |= known
        excess = max(0, len(self._cache) - CACHE_PAIRS)
        for pair in list(self._cache)[:excess]:
            del self._cache[pair]
        return verdicts

    def _judge_all(self, pairs: list[Pair]) -> dict[Pair, float]:
        """Returns the verdicts of workers on distinct pairs, without those that nobody judged."""
        self._deadline = math.inf
        self._is_canceled = False
        futures = [self._threads.submit(self._judge, pair) for pair in pairs]
        try:
            found = [future.result() for future in futures]
        except BaseException:  # Ctrl-C, or no worker can be started: nobody goes on judging
            self._is_canceled = True
            self._deadline = -math.inf
            for worker in list(self._workers):
                worker.process.kill()  # its thread does the rest of `_kill`
            wait(futures)
            self.close()
            raise

        verdicts = {}
        for pair, verdict in zip(pairs, found, strict=True):
            if verdict is None:
                self.timeouts += 1
            elif math.isnan(verdict):
                self.timeouts += 1
                verdicts[pair] = 0.0
            else:
                verdicts[pair] = verdict
        return verdicts

    def _judge(self, pair: Pair) -> float | None:
        """Returns a worker's verdict on a pair, in a thread of the pool.

        Returns NaN if two workers died of it or one took too long, and None if the budget is spent.
        """
        for _ in range(2):
            if self._is_over():
                return None
            try:
                worker = self._idle.pop()
            except IndexError:
                worker = self._start()

            begin = time.monotonic()
            self._deadline = min(self._deadline, begin + self._budget)
            worker.send(pair)
            deadline = min(self._deadline, begin + self._timeout)
            reply = worker.reply(deadline - time.monotonic())
            if reply in (b"0\n", b"1\n"):
                self._idle.append(worker)
                return float(reply)

            self._kill(worker)
            if reply is None:  # it was late, not dead
                return None if self._is_over() else math.nan
            self._tell_once(worker)
        return math.nan

    def _is_over(self) -> bool:
        """Returns whether the present call of `grade` may judge no more pairs."""
        return self._is_canceled or time.monotonic() >= self._deadline

    def _tell_once(self, worker: Worker) -> None:
        """Reports the death of a worker on standard error, unless this process killed it."""
        if self._has_told or self._is_canceled:
            return
        self._has_told = True
        what = "it is replaced, its answer tried again, and the run goes on (said once)."
        sentence = f"reward: a grading worker was {worker.cause_of_death()}; {what}"
        print(printable(sentence), file=sys.stderr, flush=True)

    def _start(self) -> Worker:
        """Returns a new worker that is ready."""
        reply: bytes | None = None
        for _ in range(START_ATTEMPTS):
            worker = Worker()
            self._workers.append(worker)
            reply = worker.reply(START_SECONDS)
            if reply == b"ready\n":
                return worker
            self._kill(worker)

        if reply is None:
            reason = "no reply in time"
        elif reply == b"":
            reason = "it died without a word"
        else:
            reason = reply.decode(errors="replace").strip()
        advice = "(is math-verify installed there?)"
        raise RewardError(
            f"no grading worker can be started with {sys.executable}: {reason} {advice}"
        )

    def _kill(self, worker: Worker) -> None:
        self._workers.remove(worker)
        worker.kill()


# ---- The verdict, for use in reward functions ----------------------------------------------------
SHARED_GRADER_LOCK = threading.Lock()  # a Grader has one user at a time; others wait


@functools.cache
def shared_grader() -> Grader:
    """Returns the Grader of `verdicts`. Its workers end with this process."""
    grader = Grader()
    atexit.register(grader.close)
    return grader


def verdicts(
    completions: Sequence[str | list],
    golds: Sequence[str],
    problems: Sequence[str | list] | None = None,
) -> list[bool]:
    """Returns for each completion whether its final answer is right, as accuracy_reward judges it.

    A completion and a problem are texts or, of a chat, lists of messages. Without its problem, 12
    is not right as "12 apples". For a problem whose data set names steps, accuracy_reward asks for
    right steps as well.
    """
    texts = [text if isinstance(text, str) else text[-1]["content"] for text in completions]
    with SHARED_GRADER_LOCK:
        return [verdict == 1.0 for verdict in shared_grader().grade(texts, golds, problems)]


def is_right(completion: str | list, gold: str, problem: str | list = "") -> bool:
    """Returns whether a completion's final answer is right. Its steps are not judged."""
    return verdicts([completion], [gold], [problem])[0]


# ---- Reward functions ----------------------------------------------------------------------------
def load_reward_funcs(
    paths: list[str], weights: list[float] | None = None
) -> dict[str, tuple[RewardFunction | None, float]]:
    """Returns reward functions and their weights by name, from dotted paths as in TRL.

    A function is None for accuracy_reward, which stands for the Grader's own verdict.
    """
    if weights is None:
        weights = [1.0] * len(paths)
    if len(weights) != len(paths) or not all(math.isfinite(weight) for weight in weights):
        raise RewardError("--reward_weights needs one finite number for each of --reward_funcs")

    functions: dict[str, tuple[RewardFunction | None, float]] = {}
    for path, weight in zip(paths, weights, strict=True):
        name = path.rpartition(".")[2]
        if name in functions:
            raise RewardError(f"--reward_funcs has two functions {name}: drop or rename one")
        function = None if path == ACCURACY else import_function(path)
        functions[name] = (function, weight)
    return functions


def import_function(path: str) -> RewardFunction:
    """Imports `module.function`. The module may be in the working directory."""
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # at the end: no file there shall stand in for a library
    module_name, _, name = path.rpartition(".")
    try:
        check_that_nothing_hides(module_name.partition(".")[0])
        with restored_state():
            function = getattr(importlib.import_module(module_name), name)
        if not callable(function):
            raise TypeError(f"{name} is not a function")
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a module may do anything
        need = "write accuracy_reward or module.function, of a module that can be imported"
        raise RewardError(f"--reward_funcs {path}: {need} ({short(error, 200)})") from error
    return function


def check_that_nothing_hides(module_name: str) -> None:
    """Raises ImportError if another module would be imported than the user's file of that name."""
    users_file = os.path.realpath(f"{module_name}.py")
    found = importlib.util.find_spec(module_name)
    if found is None or not os.path.isfile(users_file):
        return
    if os.path.realpath(str(found.origin)) != users_file:
        raise ImportError(f"rename {users_file}: Python has another module of that name")


def call_reward_func(
    name: str,
    function: RewardFunction,
    prompts: list,
    completions: list[str],
    completion_ids: list[list[int]],
    columns: dict[str, list],
    logged: dict[str, list[float]],
) -> list[float]:
    """Returns a reward function's number for each completion, NaN where it returns None.

    The function is called by TRL's convention: with the columns of the data set, and with a list of
    one message for the completion of a chat. The numbers that it logs are appended to `logged`, by
    name. It gets copies, and what it leaves changed of this process is restored.
    """
    replies: list[Any] = []
    for prompt, completion in zip(prompts, completions, strict=True):
        is_text = isinstance(prompt, str)
        replies.append(completion if is_text else [{"role": "assistant", "content": completion}])
    inputs = {"prompts": prompts, "completions": replies, "completion_ids": completion_ids}
    inputs = columns | inputs

    try:
        values = call_on_copies(function, inputs, logged)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # SystemExit as well
        place = users_line(error, function)
        what = f"{short(error, 200)}{place}"
        raise RewardError(f"correct the reward function {name}: {what}") from error

    wrong = ""
    numbers = []
    if not isinstance(values, list):
        wrong = short(values, 80)
    elif len(values) > len(prompts):
        wrong = f"more than {len(prompts)} for {len(prompts)} completions"
    elif len(values) < len(prompts):
        wrong = f"{len(values)} for {len(prompts)} completions"
    else:
        numbers = [to_number(value) for value in values]
        for row, (value, number) in enumerate(zip(values, numbers, strict=True)):
            if value is not None and not math.isfinite(number):
                wrong = f"{short(value, 80)}{users_row(prompts, row)}"
                break
    if wrong:
        rule = "must return a list with a number (or None) for each completion"
        raise RewardError(f"reward function {name} {rule}, not {wrong}")
    return numbers


def call_on_copies(
    function: RewardFunction, inputs: dict[str, list], logged: dict[str, list[float]]
) -> Any:
    """Calls a reward function. Returns its values as a list, if they are values in some order.

    The list is at most one longer than it should be: what a function returns may be endless.
    """
    arguments: dict[str, Any] = {}
    for name, cells in inputs.items():
        # Copied one by one: the rows of a group share their cells, and their copies must not.
        arguments[name] = [copy.deepcopy(cell) for cell in cells]
    if takes_argument(function, "log_metric"):
        arguments["log_metric"] = functools.partial(log_metric, logged)
    with restored_state():
        values = function(**arguments)
        if isinstance(values, str | bytes | Mapping | Set) or not can_be_iterated(values):
            return values
        return list(itertools.islice(values, len(inputs["prompts"]) + 1))


def takes_argument(function: RewardFunction, name: str) -> bool:
    """Returns whether a function can be called with a keyword argument of this name."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # some functions that are not written in Python have none
        return False
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    return takes_any or name in parameters


def can_be_iterated(value: Any) -> bool:
    """Returns whether a value is a sequence of values, a generator or the like."""
    try:
        iter(value)
    except TypeError:
        return False
    return True


def log_metric(logged: dict[str, list[float]], name: str, value: float) -> None:
    """Appends a number to those that a reward function logs under a name."""
    number = to_number(value)
    if not isinstance(name, str) or not math.isfinite(number):
        raise ValueError(f"log_metric needs a name and a finite number, not {name!r}, {value!r}")
    if name == "mean":
        raise ValueError("log_metric: the mean of the rewards has the name 'mean', use another")
    logged.setdefault(name, []).append(number)


@contextlib.contextmanager
def restored_state() -> Iterator[None]:
    """Restores on exit what a user's code may have changed: the directory, and torch's settings."""
    import torch  # not at the top: what only grades does without

    directory = os.getcwd()
    dtype = torch.get_default_dtype()
    default_device = torch.get_default_device()
    gpu = torch.cuda.current_device() if torch.cuda.is_initialized() else None
    is_grad_enabled = torch.is_grad_enabled()
    devices = ("cpu", "cuda")
    autocast_dtypes = {device: torch.get_autocast_dtype(device) for device in devices}
    autocasts = {device: torch.is_autocast_enabled(device) for device in devices}
    autocast_depth = torch.autocast_increment_nesting()
    try:
        with (
            torch.inference_mode(torch.is_inference_mode_enabled()),
            torch.set_grad_enabled(is_grad_enabled),  # inference mode has changed it
        ):
            yield
    finally:
        os.chdir(directory)
        torch.set_default_dtype(dtype)
        if torch.get_default_device() != default_device:
            torch.set_default_device(default_device)
        if gpu is not None:
            torch.cuda.set_device(gpu)
        torch.set_grad_enabled(is_grad_enabled)
        for device in devices:
            torch.set_autocast_dtype(device, autocast_dtypes[device])
            torch.set_autocast_enabled(device, autocasts[device])
        # An autocast that is never left would keep its casts of weights for good.
        while torch.autocast_decrement_nesting() >= autocast_depth:
            pass
        torch.clear_autocast_cache()


def to_number(value: Any) -> float:
    """Returns a value as a number, and NaN for None and for all that is no number."""
    if isinstance(value, str | bytes | None):  # float() reads text
        return math.nan
    try:
        return float(value)
    except Exception:  # a value may be of any class
        return math.nan


def short(value: Any, max_chars: int) -> str:
    """Returns how Python writes a value, on one line and cut off after some characters."""
    if isinstance(value, Mapping | Set):
        return f"a {type(value).__name__}"
    try:
        text = repr(value)
    except Exception:  # a value may be of any class
        text = type(value).__name__
    return " ".join(text.split())[:max_chars]


def users_line(error: BaseException, function: RewardFunction) -> str:
    """Returns " in line ... of FILE": of the last call in the user's own code, or of the function.

    Returns "" if neither is known.
    """
    library = rf"^<|/lib(64)?/python3|^{re.escape(__file__)}$"
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not re.search(library, frame.filename):
            return f" in line {frame.lineno} of {frame.filename}"
    code = getattr(function, "__code__", None)  # it was not called, or the error is a library's
    if code is None:
        return ""
    return f" in the function at line {code.co_firstlineno} of {code.co_filename}"


def users_row(prompts: list, row: int) -> str:
    """Returns " for completions[...] (prompt ...)", which names a row of the batch."""
    prompt = prompts[row]
    text = prompt if isinstance(prompt, str) else prompt[-1]["content"]
    return f" for completions[{row}] (prompt {short(text, 80)})"
