"""Rewards: is a completion's last ``\\boxed{...}`` equal to the gold answer? And custom functions.

Equal strings and plain integers are settled here. Every other pair goes to math-verify (sympy) in
worker processes: a short answer can make sympy compute for ever, and math-verify's own time-out
(SIGALRM) does not stop a power that CPython computes in C (5^(5^(5^5)), its issue 65). Only killing
a process does. The worker is this file run as a script, a JSON line in and a line out for each
pair; not multiprocessing, whose spawn imports torch again and whose fork is unsafe with threads.

What math-verify 0.9 and latex2sympy2_extended 1.11 do with model text:
- ExprExtractionConfig ends in Python's eval (sympy's parse_expr): not used here. The grammar of
  LatexExtractionConfig gives eval (sympify) number tokens only: digits, commas, dots, e-notation.
- Symbols get names of the model's choosing (\\vec{dot([1],[open(...)])}), which sympy's evalf of an
  infinite sum printed into Python source and ran (lambdify): the worker refuses lambdify.
- Numbers side by side are added, as if each were a mixed fraction: see _refuse_sums.
The worker is limited in time and memory, but it is not a sandbox against a bug yet unknown.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import json
import math
import os
import re
import resource
import select
import signal
import subprocess
import sys
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait

MAX_CHARS = 500  # a longer box or gold is compared as a string only; MATH-500's longest is 53
CACHE_PAIRS = 20_000  # at most 2 * MAX_CHARS characters each: tens of MB at worst
MEMORY_BYTES = 2 << 30  # address space of a worker
START_SECONDS = 60.0  # a start is about 1 s; a cold disk or a busy machine takes longer
MAX_STARTS = 3  # in a row; one alone may be the kernel's OOM killer


class RewardError(Exception):
    """A reward that cannot be computed; the message says what to change in one sentence."""


Pair = tuple[str, str]  # (boxed content, gold answer), both tidy

# `\\boxed{` (JSON-escaped by the model) counts as a box; `\{` and `\}` are not grouping braces.
_TOKEN = re.compile(r"\\\\?boxed\s*\{|\\.|[{}]", re.DOTALL)
_INTEGER = re.compile(r"([+-]?)([0-9]{1,30}|[1-9][0-9]{0,2}(?:,[0-9]{3}){1,9})")
_BASE = re.compile(r"\b[0-9][0-9A-Z]*\s*_\s*(?:\{\s*([0-9]+)\s*\}|([0-9]))$")  # 101_2, 4A_{16}

# What may surround an answer without being of it; math-verify fails on a full stop in the box.
_GAP = r"[\s~]|\\[,;:! ]"
_EDGES = re.compile(rf"^(?:{_GAP}|[$≈]|\\approx(?![a-zA-Z]))+|(?:{_GAP}|(?<!\\)[$.])+$")
# Spaces to a reader; math-verify fails on the first two, and drops the others: 5'10 would be 510.
_SPACE = re.compile(r"[\s~]+|\\text\s*\{\s*\}|(?<=[0-9])(?:\\?\$|['\"])(?=[0-9])")
_THOUSANDS = re.compile(r"(?<![0-9.^_])[1-9][0-9]{0,2}(?:(?: |\\[,;:! ]|\{,\})+[0-9]{3})+(?![0-9])")
_MIXED = re.compile(r"(?<![0-9.^_/])([0-9]+)(?: |\\[,;: ])+([0-9]+) ?/ ?([0-9]+)(?![0-9.])")


def boxed_span(text: str) -> tuple[int, int] | None:
    """Where the content of the last complete ``\\boxed{...}`` stands; one linear pass. "Last" is by
    where it begins: of nested boxes the inner one. One whose brace is never closed is no box."""
    best: tuple[int, int] | None = None
    opened: list[int] = []  # where the content of each open brace begins; -1: not a box
    begin = text.find("\\boxed")
    for token in _TOKEN.finditer(text, begin) if begin >= 0 else ():
        if token[0] == "}":
            start = opened.pop() if opened else -1
            if start >= 0 and (best is None or start > best[0]):
                best = (start, token.start())
        elif token[0][-1] == "{" and token[0] != "\\{":
            opened.append(token.end() if len(token[0]) > 1 else -1)
    return best


def last_boxed(text: str) -> str | None:
    span = boxed_span(text)
    return None if span is None else text[slice(*span)]


def _integer(text: str) -> int | None:
    """Value of a plain ASCII integer (sign, thousands commas), None if it is not one."""
    return int(text.replace(",", "")) if _INTEGER.fullmatch(text) else None


def _tidy(text: str) -> str:
    """Without what does not count; 1\\,000 as 1000 and 2 1/2 as 2\\frac{1}{2} (not (2 + 1)/2)."""
    if len(text) > MAX_CHARS:
        return text.strip()
    text = _SPACE.sub(" ", _EDGES.sub("", text))
    text = _THOUSANDS.sub(lambda match: re.sub("[^0-9]", "", match[0]), text)
    return _MIXED.sub(r"\1\\frac{\2}{\3}", text)


def _other_base(box: str, gold: str) -> bool:
    """The box names a number base that is not the gold's; math-verify compares the digits only. A
    box without a base may answer a gold with one: the problem often names it already."""
    left, right = _BASE.search(box), _BASE.search(gold)
    base = int(right[1] or right[2]) if right else 10
    return left is not None and int(left[1] or left[2]) != base


def quick_verdict(box: str, gold: str) -> float | None:
    """The verdict where it takes no evaluation, else None. Both arguments tidy."""
    if not box:
        return 0.0
    if box == gold:
        return 1.0
    if len(box) > MAX_CHARS or len(gold) > MAX_CHARS or _other_base(box, gold):
        return 0.0
    left, right = _integer(box), _integer(gold)
    return None if left is None or right is None else float(left == right)


def _reply(worker: subprocess.Popen[bytes], seconds: float) -> bytes | None:
    """What a worker writes (a line is one atomic pipe write); b"" if it is dead, None if late."""
    poll = select.poll()  # select.select takes no file descriptor above 1023
    poll.register(worker.stdout, select.POLLIN)
    came = poll.poll(1000 * max(0.0, seconds))
    return os.read(worker.stdout.fileno(), 4096) if came else None


class Grader(contextlib.AbstractContextManager):
    """Grades completions; starts its workers when a pair first needs one and keeps them.

    ``timeout`` is in seconds from handing a pair to a worker (its start-up is not counted). A
    worker with no verdict by then is killed and replaced. So is one that dies (the kernel's OOM
    killer), which standard error says once; its pair is tried once more: it need not be the cause.
    A pair without a verdict gets 0, is counted in ``timeouts``, and is cached like any other.
    ``budget`` is the seconds of one ``grade`` from its first worker's readiness on: slow answers
    must not stall a run. What is left then gets 0 and is counted, but not cached. Not thread-safe.
    """

    def __init__(self, num_workers: int = 2, timeout: float = 5.0, budget: float = 60.0) -> None:
        self.timeouts = 0
        self._timeout, self._budget, self._end = timeout, budget, math.inf  # time.monotonic()
        # A thread for each worker. They stay, for a worker dies with the thread that started it.
        self._threads = ThreadPoolExecutor(num_workers)
        self._workers: list[subprocess.Popen[bytes]] = []
        self._idle: list[subprocess.Popen[bytes]] = []  # of them
        self._told = False  # that a worker died
        self._cache: OrderedDict[Pair, float] = OrderedDict()

    def __exit__(self, *_: object) -> None:
        self.close()

    def grade(self, completions: Sequence[str], answers: Sequence[str]) -> list[float]:
        """1.0 (equal) or 0.0 for each completion against its gold answer, in order."""
        verdicts: list[float] = []
        pending: dict[Pair, list[int]] = {}  # the members of a group often give the same answer
        for i, (completion, answer) in enumerate(zip(completions, answers, strict=True)):
            box, gold = _tidy(last_boxed(completion) or ""), _tidy(answer)
            quick = quick_verdict(box, gold)
            verdicts.append(quick or 0.0)
            if quick is None:
                pending.setdefault((box, gold), []).append(i)
        known = {pair: self._cache[pair] for pair in pending if pair in self._cache}
        known |= self._run([pair for pair in pending if pair not in known])
        for pair, verdict in known.items():
            self._cache[pair] = verdict
            self._cache.move_to_end(pair)
            for i in pending[pair]:
                verdicts[i] = verdict
        while len(self._cache) > CACHE_PAIRS:
            self._cache.popitem(last=False)
        return verdicts

    def close(self) -> None:
        """Kill the workers. They hold no state: a later grade() starts new ones."""
        self._idle.clear()
        for worker in list(self._workers):
            self._kill(worker)

    def _run(self, pairs: list[Pair]) -> dict[Pair, float]:
        """Judge distinct pairs in the workers, one pair at a time to each (its own deadline)."""
        self._end = math.inf
        futures = [self._threads.submit(self._judge, pair) for pair in pairs]
        try:
            found = [future.result() for future in futures]
        except BaseException:  # Ctrl-C, or no worker can be started: nobody goes on judging
            self._end = -math.inf
            for worker in list(self._workers):
                worker.kill()  # its thread buries it
            wait(futures)
            self.close()
            raise
        self.timeouts += sum(verdict not in (0.0, 1.0) for verdict in found)
        pairs_found = zip(pairs, found, strict=True)
        return {pair: float(v == 1) for pair, v in pairs_found if v is not None}

    def _judge(self, pair: Pair) -> float | None:
        """A worker's verdict, NaN if it has none; None once the budget is spent. In a thread."""
        for _ in range(2):
            if time.monotonic() >= self._end:
                return None
            try:
                worker = self._idle.pop()
            except IndexError:
                worker = self._start()
            begun = time.monotonic()
            self._end = min(self._end, begun + self._budget)
            with contextlib.suppress(BrokenPipeError):  # it died while idle, as its reply will say
                # One line is below 64 KiB (MAX_CHARS), so the empty pipe takes it without waiting.
                worker.stdin.write(json.dumps(pair).encode() + b"\n")
            reply = _reply(worker, min(begun + self._timeout, self._end) - time.monotonic())
            if reply in (b"0\n", b"1\n"):
                self._idle.append(worker)
                return float(reply)
            self._kill(worker)
            if reply is None:
                return None if time.monotonic() >= self._end else math.nan
            self._tell(worker.returncode)
        return math.nan

    def _tell(self, code: int) -> None:
        """Say once in a run that workers die; a slow machine would say it at every answer."""
        how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        hint = " (the kernel does that when memory runs out)" if code == -signal.SIGKILL else ""
        what = "it is replaced, an answer it held is tried again, and the run goes on (said once)"
        if not self._told and self._end > 0:  # else it was this process that killed it
            self._told = True
            print(f"reward: a grading worker {how}{hint}; {what}.", file=sys.stderr, flush=True)

    def _start(self) -> subprocess.Popen[bytes]:
        """A worker that is ready."""
        threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
        # -P: the worker must not find this directory's files where it looks for libraries.
        command = [sys.executable, "-P", os.path.abspath(__file__)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        for _ in range(MAX_STARTS):
            worker = subprocess.Popen(command, bufsize=0, env=os.environ | threads, **pipes)
            self._workers.append(worker)
            reply = _reply(worker, START_SECONDS)
            if reply == b"ready\n":
                return worker
            self._kill(worker)
        said = "no reply in time" if reply is None else reply.decode(errors="replace").strip()
        raise RewardError(
            f"no grading worker can be started with {sys.executable}: "
            f"{said or 'it died without a word'} (is math-verify installed there?)"
        )

    def _kill(self, worker: subprocess.Popen[bytes]) -> None:
        self._workers.remove(worker)
        with worker:  # closes its pipes and waits for its end
            worker.kill()  # SIGKILL: anything milder waits for C code to return


def _refuse_sums(parser: type) -> None:
    """Make latex2sympy's parser fail on numbers side by side, which it adds: 40 2 would be 42. Not
    by the text: there are too many ways to write a gap. A mixed fraction stays what it is, and so
    does what the parser multiplies, such as \\frac{1}{2} 3 and 3(-2)."""
    convert, combine = parser.convert_postfix, parser.convert_postfix_list

    def convert_once(self, node: object) -> object:  # twice would be 2^depth times in 2(2(2(...
        if not hasattr(node, "converted"):
            node.converted = convert(self, node)
        return node.converted

    def checked(self, nodes: list, i: int = 0) -> object:
        pair = [convert_once(self, node) for node in nodes[i : i + 2]]
        if len(pair) == 2 and all(getattr(value, "is_Number", False) for value in pair):
            fractions = [value.is_Rational and not value.is_Integer for value in pair]
            mixed = pair[1] < 1 and re.match(r"\\frac|\{", nodes[i + 1].getText())
            if pair[1] >= 0 and not fractions[0] and not (fractions[1] and mixed):
                raise ValueError("two numbers without a sign between them")
        return combine(self, nodes, i)

    parser.convert_postfix, parser.convert_postfix_list = convert_once, checked


def _load_verifier() -> Callable[[str, str], bool]:
    """math-verify's verdict as a function of (box, gold); in the worker only."""
    import math_verify
    import sympy  # also loads the modules patched below

    def refuse(*_: object, **__: object) -> None:
        raise NotImplementedError("no code is made from model text")  # evalf then goes without

    original = sys.modules["sympy.utilities.lambdify"].lambdify
    for module in list(sys.modules.values()):
        if getattr(module, "lambdify", None) is original:
            module.lambdify = refuse
    _refuse_sums(sys.modules["latex2sympy2_extended.latex2sympy2"]._Latex2Sympy)

    config = [math_verify.LatexExtractionConfig(boxed_match_priority=0)]

    @functools.lru_cache(maxsize=512)  # one gold meets a whole group of boxes
    def parsed(text: str) -> list:
        # first_match: the box or nothing, not a fraction found somewhere inside a box of prose.
        return math_verify.parse(
            f"\\boxed{{{text}}}", config, extraction_mode="first_match", parsing_timeout=None
        )

    def decimals(gold: list) -> int:
        """Decimals that floats are compared to: math-verify's 6, so that 0.333333 is 1/3, and one
        more for each zero after the point, or .0000672 would equal .0000674."""
        small = gold and isinstance(gold[0], sympy.Number) and abs(gold[0]) < 1
        size = abs(float(gold[0])) if small else 1.0  # float() of a huge integer would raise
        return 6 + max(0, -math.floor(math.log10(size)) - 1) if size > 0 else 6

    def equal(box: str, gold: str) -> bool:
        try:  # deep nesting is a RecursionError, a huge number a MemoryError: wrong, all of them
            right = parsed(gold)
            how = {"float_rounding": decimals(right), "timeout_seconds": None}
            return bool(math_verify.verify(right, parsed(box), **how))
        except Exception:
            return False

    return equal


def load_reward_funcs(
    paths: list[str], weights: list[float] | None = None
) -> dict[str, tuple[Callable | None, float]]:
    """Reward functions by name and their weights (1 each by default), from dotted paths as in TRL;
    None is the Grader's own verdict."""
    weights = [1.0] * len(paths) if weights is None else weights
    if len(weights) != len(paths) or not all(map(math.isfinite, weights)):
        raise RewardError("--reward_weights needs one finite number for each of --reward_funcs")
    functions: dict[str, tuple[Callable | None, float]] = {}
    for path, weight in zip(paths, weights, strict=True):
        name = path.rpartition(".")[2]
        if name in functions:
            raise RewardError(f"--reward_funcs has two functions {name}: drop or rename one")
        functions[name] = (None if path == "accuracy_reward" else _import(path), weight)
    return functions


def _import(path: str) -> Callable:
    module, _, name = path.rpartition(".")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # last: no file there shall stand in for a library
    try:
        function = getattr(importlib.import_module(module), name)
        if not callable(function):
            raise TypeError(f"{name} is not a function")
    except (Exception, SystemExit) as error:  # a module may do anything
        need = "write accuracy_reward or module.function, of a module that can be imported"
        raise RewardError(f"--reward_funcs {path}: {need} ({error!r:.200})") from error
    return function


def call_reward_func(
    name: str, function: Callable, prompts: list, completions: list[str],
    completion_ids: list[list[int]], columns: dict[str, list],
) -> list[float]:  # fmt: skip
    """A number for each completion, by TRL's convention: of a chat it is a list of one message."""
    replies = [
        text if isinstance(prompt, str) else [{"role": "assistant", "content": text}]
        for prompt, text in zip(prompts, completions, strict=True)
    ]
    given = {"prompts": prompts, "completions": replies, "completion_ids": completion_ids}
    try:
        values = list(function(**(columns | given)))
        numbers = [math.nan if isinstance(v, str | bytes) else float(v) for v in values]
    except Exception as error:
        raise RewardError(f"correct the reward function {name}: {error!r:.200}") from error
    bad = [v for v, number in zip(values, numbers, strict=True) if not math.isfinite(number)]
    if bad or len(values) != len(replies):
        got = f"{bad[0]!r:.80}" if bad else f"{len(values)} values for {len(replies)} completions"
        raise RewardError(f"reward function {name} must return a number per completion, not {got}")
    return numbers


def _serve() -> None:
    """The worker: a JSON line [box, gold] in, a line 1 or 0 out, until standard input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the trainer to handle
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]  # a run's `ulimit -v` cannot be raised
    limit = MEMORY_BYTES if hard == resource.RLIM_INFINITY else min(hard, MEMORY_BYTES)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")  # where memory runs out, the kernel shall take this process first
    # PR_SET_PDEATHSIG: a worker stuck in C code would never see the end of its input.
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    out = os.dup(1)
    os.dup2(2, 1)  # a library that prints must not write a verdict
    try:
        equal = _load_verifier()
    except Exception as error:
        os.write(out, f"{type(error).__name__}: {error}\n".encode(errors="replace")[:500])
        return
    os.write(out, b"ready\n")
    for line in sys.stdin.buffer:
        os.write(out, b"1\n" if equal(*json.loads(line)) else b"0\n")


if __name__ == "__main__":
    _serve()
