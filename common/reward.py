"""Verifiable correctness of a completion: is its last ``\\boxed{...}`` equal to the gold answer?

Equal strings and plain integers are settled here without evaluating anything. Every other pair
goes to math-verify (sympy) in worker processes: sympy can be made to compute for ever by a short
answer, and math-verify's own time-out (SIGALRM) does not stop a power that CPython computes in C,
such as 5^(5^(5^5)) (Math-Verify issue 65). Only killing a process does.

The worker is this file run as a script, with one JSON line in and one line out for each pair. Not
multiprocessing: spawn imports the trainer's __main__ (torch) again, fork is unsafe with torch's
threads; and nothing is ever unpickled. This module imports the standard library only; math-verify
and sympy are imported by the worker, torch by neither.

What the installed sources do with model text (math-verify 0.9, latex2sympy2_extended 1.11):
- ExprExtractionConfig ends in sympy's parse_expr, which is Python's eval: not used here.
- LatexExtractionConfig goes through regular expressions and an ANTLR LaTeX grammar. The strings
  that grammar hands to sympify (eval again) are number tokens: digits, commas, dots, e-notation.
- It makes symbols with names of the model's choosing (\\vec{dot([1],[open(...)])}), and sympy's
  evalf of an infinite sum prints them into Python source and runs it (lambdify). That did run
  code: the tests keep the answer. So the worker refuses lambdify (see _load_verifier).
The worker is limited in time and memory, but it is not a sandbox against a bug yet unknown.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import json
import math
import os
import re
import resource
import selectors
import signal
import subprocess
import sys
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

MAX_CHARS = 500  # a longer box or gold is compared as a string only; MATH-500's longest is 53
CACHE_PAIRS = 20_000  # at most 2 * MAX_CHARS characters each: tens of MB at worst
MEMORY_BYTES = 2 << 30  # address space of a worker
START_SECONDS = 60.0  # a start is about 1 s; a cold disk or a busy machine takes longer
MAX_FAILED_STARTS = 3  # in a row; one alone may be the kernel's OOM killer

Pair = tuple[str, str]  # (boxed content, gold answer), both tidy

# `\\boxed{` (JSON-escaped by the model) counts as a box; `\{` and `\}` are not grouping braces.
_TOKEN = re.compile(r"\\\\?boxed\s*\{|\\.|[{}]", re.DOTALL)
_INTEGER = re.compile(r"([+-]?)([0-9]{1,30}|[1-9][0-9]{0,2}(?:,[0-9]{3}){1,9})")
_BASE = re.compile(r"\b[0-9][0-9A-Z]*\s*_\s*(?:\{\s*([0-9]+)\s*\}|([0-9]))$")  # 101_2, 4A_{16}

# What may surround an answer without being of it; math-verify fails on a full stop in the box.
_EDGES = re.compile(r"^(?:[\s~$]|\\[,;:! ])+|(?:[\s~]|\\[,;:! ]|(?<!\\)[$.])+$")


def last_boxed(text: str) -> str | None:
    """Content of the last complete ``\\boxed{...}``, None if there is none; one linear pass.

    "Last" is by where the box begins, so of nested boxes the inner one; a box whose brace is
    never closed is no box.
    """
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
    return None if best is None else text[best[0] : best[1]]


def _integer(text: str) -> str | None:
    """Normal form of a plain ASCII integer (sign, thousands commas), None if it is not one."""
    match = _INTEGER.fullmatch(text)
    if match is None:
        return None
    digits = match[2].replace(",", "").lstrip("0") or "0"
    return "-" + digits if match[1] == "-" and digits != "0" else digits


def _tidy(text: str) -> str:
    return _EDGES.sub("", text) if len(text) <= MAX_CHARS else text.strip()


def _other_base(box: str, gold: str) -> bool:
    """The box names a number base that is not the gold's; math-verify compares the digits only.

    A box without a base may answer a gold with one: the problem often names it already.
    """
    left, right = _BASE.search(box), _BASE.search(gold)
    if left is None:
        return False
    return int(left[1] or left[2]) != (int(right[1] or right[2]) if right else 10)


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


@dataclass(eq=False)
class _Worker:
    proc: subprocess.Popen[bytes]
    deadline: float  # time.monotonic() seconds; infinite while idle
    ready: bool = False  # sympy is imported
    pair: Pair | None = None  # what it is judging


class Grader:
    """Grades completions; starts its workers when a pair first needs one and keeps them.

    ``timeout`` is in seconds from handing a pair to a worker (its start-up is not counted). A
    worker with no verdict by then is killed and replaced. So is one that dies (the kernel's OOM
    killer), which standard error says once; its pair is tried once more, because the pair need not
    be the cause. A pair without a verdict gets 0, is counted in ``timeouts``, and is cached like
    any other. Not thread-safe. RuntimeError when no worker can be started.
    """

    def __init__(self, num_workers: int = 2, timeout: float = 5.0) -> None:
        if num_workers < 1 or not timeout > 0:
            raise ValueError("num_workers must be at least 1 and timeout above 0 seconds")
        self.timeouts = 0
        self._num_workers, self._timeout = num_workers, timeout
        self._workers: list[_Worker] = []
        self._failed_starts = 0
        self._told = False  # that a worker died
        self._retried: set[Pair] = set()  # whose worker died; of the present _run
        self._cache: OrderedDict[Pair, float] = OrderedDict()
        self._selector = selectors.DefaultSelector()

    def __enter__(self) -> Grader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def grade(self, completions: Sequence[str], answers: Sequence[str]) -> list[float]:
        """1.0 (equal) or 0.0 for each completion against its gold answer, in order."""
        verdicts = [0.0] * len(completions)
        pending: dict[Pair, list[int]] = {}  # the members of a group often give the same answer
        for i, (completion, answer) in enumerate(zip(completions, answers, strict=True)):
            box, gold = _tidy(last_boxed(completion) or ""), _tidy(answer)
            quick = quick_verdict(box, gold)
            if quick is None:
                pending.setdefault((box, gold), []).append(i)
            else:
                verdicts[i] = quick
        for pair, verdict in self._verify(pending).items():
            for i in pending[pair]:
                verdicts[i] = verdict
        return verdicts

    def close(self) -> None:
        """Kill the workers. They hold no state: a later grade() starts new ones."""
        for worker in list(self._workers):
            self._kill(worker)
        atexit.unregister(self.close)

    def _verify(self, pairs: Iterable[Pair]) -> dict[Pair, float]:
        """math-verify's verdict on distinct pairs, from the cache or the workers."""
        known = {pair: self._cache[pair] for pair in pairs if pair in self._cache}
        new = self._run([pair for pair in pairs if pair not in known])
        for pair, verdict in (known | new).items():
            self._cache[pair] = verdict
            self._cache.move_to_end(pair)
        while len(self._cache) > CACHE_PAIRS:
            self._cache.popitem(last=False)
        return known | new

    def _run(self, pairs: list[Pair]) -> dict[Pair, float]:
        """Judge distinct pairs in the workers, one pair at a time to each (its own deadline)."""
        todo, verdicts = deque(pairs), {}
        self._retried.clear()
        try:
            while len(verdicts) < len(pairs):
                self._hand_out(todo)
                self._collect(todo, verdicts)
        finally:
            # Ctrl-C in the middle must not leave a verdict that the next call takes for its own.
            for worker in [w for w in self._workers if w.pair is not None]:
                self._kill(worker)
        return verdicts

    def _hand_out(self, todo: deque[Pair]) -> None:
        """Give each idle worker a pair, and start workers for what is left over."""
        for worker in [w for w in self._workers if w.ready and w.pair is None]:
            if not todo:
                return
            try:
                # One line is below 64 KiB (MAX_CHARS), so the empty pipe takes it without waiting.
                worker.proc.stdin.write(json.dumps(todo[0]).encode() + b"\n")
            except BrokenPipeError:  # it died while idle: nobody's verdict is lost
                self._kill(worker)
                self._tell(worker)
            else:
                worker.pair = todo.popleft()
                worker.deadline = time.monotonic() + self._timeout
        starting = sum(not w.ready for w in self._workers)
        for _ in range(min(len(todo) - starting, self._num_workers - len(self._workers))):
            self._start()

    def _collect(self, todo: deque[Pair], verdicts: dict[Pair, float]) -> None:
        """Wait for the next reply or deadline; note verdicts, drop workers that failed."""
        soonest = min(w.deadline for w in self._workers)
        for key, _ in self._selector.select(max(0.0, soonest - time.monotonic())):
            worker, reply = key.data, os.read(key.fd, 4096)  # a line is one atomic pipe write
            if reply == b"ready\n" and not worker.ready:
                worker.ready, worker.deadline, self._failed_starts = True, math.inf, 0
            elif reply in (b"0\n", b"1\n") and worker.pair is not None:
                verdicts[worker.pair] = float(reply == b"1\n")
                worker.pair, worker.deadline = None, math.inf
            else:  # end of file: it died; or it said why it cannot start
                self._drop(worker, todo, verdicts, reply.decode(errors="replace").strip())
        for worker in [w for w in self._workers if w.deadline <= time.monotonic()]:
            self._drop(worker, todo, verdicts, "no reply in time")

    def _drop(
        self, worker: _Worker, todo: deque[Pair], verdicts: dict[Pair, float], reason: str
    ) -> None:
        died = not reason
        self._kill(worker)
        if died and worker.ready:
            self._tell(worker)
        if died and worker.pair is not None and worker.pair not in self._retried:
            self._retried.add(worker.pair)
            todo.append(worker.pair)
        elif worker.pair is not None:
            verdicts[worker.pair] = 0.0
            self.timeouts += 1
        elif not worker.ready:
            self._failed_starts += 1
            if self._failed_starts >= MAX_FAILED_STARTS:
                self.close()
                raise RuntimeError(
                    f"no grading worker can be started with {sys.executable}: "
                    f"{reason or 'it died without a word'} (is math-verify installed there?)"
                )

    def _tell(self, worker: _Worker) -> None:
        """Say once in a run that workers die; a slow machine would say it at every answer."""
        if self._told:
            return
        self._told = True
        code = worker.proc.returncode
        how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        hint = " (the kernel does that when memory runs out)" if code == -signal.SIGKILL else ""
        print(
            f"reward: a grading worker {how}{hint}; it is replaced, an answer it held is tried "
            "once more, and the run goes on (said once).",
            file=sys.stderr,
            flush=True,
        )

    def _start(self) -> None:
        threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
        # -P: the worker must not find this directory's files where it looks for libraries.
        command = [sys.executable, "-P", os.path.abspath(__file__)]
        try:
            proc = subprocess.Popen(
                command, bufsize=0, env=os.environ | threads, stdin=subprocess.PIPE,
                stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            )  # fmt: skip
        except OSError as error:
            raise RuntimeError(f"no grading worker can be started: {error}") from error
        worker = _Worker(proc, time.monotonic() + START_SECONDS)
        self._workers.append(worker)
        self._selector.register(proc.stdout, selectors.EVENT_READ, worker)
        atexit.unregister(self.close)  # once, however many workers are started
        atexit.register(self.close)

    def _kill(self, worker: _Worker) -> None:
        self._workers.remove(worker)
        self._selector.unregister(worker.proc.stdout)
        worker.proc.kill()  # SIGKILL: anything milder waits for C code to return
        worker.proc.wait()
        worker.proc.stdin.close()
        worker.proc.stdout.close()


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
            return bool(
                math_verify.verify(
                    right, parsed(box), float_rounding=decimals(right), timeout_seconds=None
                )
            )
        except Exception:
            return False

    return equal


def _serve() -> None:
    """The worker: a JSON line [box, gold] in, a line 1 or 0 out, until standard input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the trainer to handle
    if sys.platform == "linux":
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
