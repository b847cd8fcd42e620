"""Rewards: is a completion's last ``\\boxed{...}`` equal to the gold answer? And custom functions.

Equal strings and plain integers are settled here, other pairs by math-verify (sympy) in worker
processes: a short answer can make sympy compute for ever, and only killing a process stops a power
that CPython computes in C (5^(5^(5^5)), math-verify's issue 65). The worker is this file run as a
script; not multiprocessing, whose spawn imports torch again and whose fork is unsafe with threads.

What math-verify 0.9 and latex2sympy2_extended 1.11 do with model text:
- ExprExtractionConfig ends in Python's eval (sympy's parse_expr): not used here. The grammar of
  LatexExtractionConfig gives eval (sympify) number tokens only: digits, commas, dots, e-notation.
- Symbols get names of the model's choosing (\\vec{dot([1],[open(...)])}), which sympy's evalf of an
  infinite sum printed into Python source and ran (lambdify): the worker refuses lambdify.
- Numbers side by side are added (_refuse_sums), any last words are a unit (_UNIT), the last side
  of any equation is the answer (_sides), and 42, 42 is the set of 42 (_load_verifier).
The worker is limited in time and memory, but it is not a sandbox against a bug yet unknown.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib.util
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
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait

MAX_CHARS = 500  # a longer box or gold is compared as a string only; MATH-500's longest is 53
CACHE_PAIRS = 20_000  # at most 2 * MAX_CHARS characters each: tens of MB at worst
MEMORY_BYTES = 2 << 30  # address space of a worker
START_SECONDS = 60.0  # a start is about 1 s; a cold disk or a busy machine takes longer


class RewardError(Exception):
    """A reward that cannot be computed; the message says what to change in one sentence."""


Pair = tuple[str, str]  # (boxed content, gold answer), both tidy
# `\\boxed{` (JSON-escaped by the model) counts as a box; `\{` and `\}` are not grouping braces.
_TOKEN = re.compile(r"\\\\?boxed\s*\{|\\.|[{}]", re.DOTALL)
_INTEGER = re.compile(r"[+-]?[0-9]{1,30}")
_BASE = re.compile(r"\b[0-9][0-9A-Z]*\s*_([^_]*)$")  # 101_2, 4A_{16}, 11_{(2)}
_GAP = r"(?:[\s~]|\\[,;:! ])"
# A unit: \text{...} after a value, words of three letters or more after a gap, the short ones
# here. But not with a number in it or a word that changes the value: that stays, a wrong factor.
_CHANGE = r"\b(?:(?i:or|not|is|half|dozen|hundred|thousand|\w*illion|mod|squared|cubed)s?|[kM])\b"
_SHORT = r"[ckm]?m|[km]?g|m?[lL]|ft|in|yd|mi|mph|lb|oz|hr|min|sec|s|h|st|nd|rd|th|°"
_TEXT, _POWER = r"\\(?:text|mbox|math)[a-z]* ?\{", r"(?:\^(?:[1-9]|\{[1-9]\}))?"
_WORD = rf"(?:{_GAP}+(?!percent)[A-Za-z]{{3,}}|{_GAP}*/?(?:{_SHORT})(?!\w)){_POWER}"
_UNIT = (
    rf"^((?:(?!{_TEXT}).)*?[^\s,;=+*/$-])(?!.*(?:{_CHANGE}|(?<![a-zA-Z^])(?<!\^\{{)[0-9]))"
    rf"(?:(?:(?<=[0-9)}}])|(?<=\\pi))(?:{_WORD})+|{_GAP}*/?{_TEXT}[^{{}}]*\}}{_POWER})+$"
)
# A comma before three digits is of a number, but not where a bracket follows: (1,200) is a pair.
_BREAK = r"(?: |,?\\!|\\[,;: ])+|\{,\}|,(?!.*(?:[)\]]|\\\}))"
_REWRITES: list[tuple[str, str | Callable]] = [
    # What may surround an answer without being of it; math-verify fails on a full stop in the box.
    (rf"^(?:{_GAP}|[$≈]|\\(?:approx|displaystyle)(?![a-zA-Z]))+|(?:{_GAP}|(?<!\\)[$.])+$", ""),
    # Spaces to a reader; math-verify fails on two of them, and drops the others: 5'10 would be 510.
    (r"[\s~]+|\\text\s*\{\s*\}|(?<=[0-9])(?:\\?\$|['\"]+)(?=[0-9])", " "),
    (r",? ?\\(?:(?:lor|vee)(?![a-zA-Z])|text ?\{ ?(?:and|or) ?\})", ", "),
    (r"\\text ?\{((?:[A-Z], ?)+[A-Z])\}", r"\1"),
    (r"\\varnothing", r"\\emptyset"),
    (_UNIT, r"\1"),
    (rf"(?<![\d.^_])[1-9]\d?\d?(?:(?:{_BREAK})\d{{3}})+(?!\d)", lambda m: re.sub(r"\D", "", m[0])),
    (r"(?<![\d.^_/])(\d+)(?: |\\[,;: ])+(\d+) ?/ ?(\d+)(?![\d.])", r"\1\\frac{\2}{\3}"),
    (r"\) ?(\\left)? ?\(", r")\\cdot\1("),
    (r"(\.\d*) ?\\(?:overline|bar) ?\{(\d{1,9})\}", lambda m: m[1] + (15 * m[2])[:15]),
]
# The name of what is asked for; _OF is left out of it: f(-2), f^{-1}(2), S_{10}, \sin 30^\circ.
_OF = r"(?:\^ ?\{-1\} ?)?\([^()]*\)|_?\{[^{}]*\}|\^ ?\{? ?\\circ ?\}?"
_NAME = re.compile(r" ?(?!.*(?:[-+*/^]|\\(?:[dt]?frac|sqrt|cdot|times|div|pm)))[a-zA-Z\\|[].*")


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


def _tidy(text: str) -> str:
    """Without what does not count, and what math-verify misreads rewritten: 2 1/2 as 2\\frac12."""
    if len(text) > MAX_CHARS:
        return text.strip()
    for pattern, new in _REWRITES:
        text = re.sub(pattern, new, text)
    return text


def _sides(box: str) -> list[str]:
    """What of an equation must be the answer (math-verify takes the last side of any): of
    x = ... = 12 and 12 = x the 12, of 6 * 2 = 12 every side, of x = 4 x = 7 nothing will do."""
    sides = re.split(r"(?<![<>!])=(?![^{}]*\}\s*\^)", box)  # but that of \sum_{n=1}^5
    first, last = (_NAME.fullmatch(re.sub(_OF, "", sides[i])) for i in (0, -1))
    if first and any(side.strip().endswith(sides[0].strip()) for side in sides[1:-1]):
        return [""]
    return sides[-1:] if first else sides[:1] if last else sides


def quick_verdict(box: str, gold: str) -> float | None:
    """The verdict where it takes no evaluation, else None. Both arguments tidy."""
    if box in ("", gold) or max(len(box), len(gold)) > MAX_CHARS:
        return float(box == gold != "")
    # What math-verify drops: a modulus, a set's braces, a number base. That one the problem often
    # names already, so a box without it may answer a gold with it.
    more = "mod" in box and "mod" not in gold
    more |= gold.endswith(")") and "\\{" in box and "\\{" not in gold
    left, right = (re.sub("[^0-9]", "", "".join(_BASE.findall(text))) for text in (box, gold))
    more |= bool(_BASE.search(box)) and left != (right or "10")
    if more:
        return 0.0
    whole = _INTEGER.fullmatch(box) and _INTEGER.fullmatch(gold)
    return float(int(box) == int(gold)) if whole else None


def _reply(worker: subprocess.Popen[bytes], seconds: float) -> bytes | None:
    """What a worker writes (a line is one atomic pipe write); b"" if it is dead, None if late."""
    poll = select.poll()  # select.select takes no file descriptor above 1023
    poll.register(worker.stdout, select.POLLIN)
    return os.read(worker.stdout.fileno(), 4096) if poll.poll(1000 * max(0.0, seconds)) else None


class Grader(contextlib.AbstractContextManager):
    """Grades completions; starts its workers when a pair first needs one and keeps them.

    ``timeout`` is in seconds from handing a pair to a worker (its start-up is not counted). A
    worker with no verdict by then is killed and replaced; of one that dies the pair is tried once
    more: it need not be the cause. A pair without a verdict gets 0, is counted in ``timeouts``, and
    is cached. ``budget`` is the seconds of one ``grade`` from its first worker's readiness on: what
    is left then gets 0 and is counted, but not cached. Not thread-safe.
    """

    def __init__(self, num_workers: int = 2, timeout: float = 5.0, budget: float = 60.0) -> None:
        self._timeout, self._budget, self._end = timeout, budget, math.inf  # time.monotonic()
        self._threads = ThreadPoolExecutor(num_workers)  # they stay: a worker dies with its thread
        self._workers: list[subprocess.Popen[bytes]] = []
        self._idle: list[subprocess.Popen[bytes]] = []  # of them
        self.timeouts, self._told = 0, False  # that a worker died
        self._cache: dict[Pair, float] = {}  # the longest unused first

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
        known = {pair: self._cache.pop(pair) for pair in pending if pair in self._cache}
        known |= self._run([pair for pair in pending if pair not in known])
        self._cache = dict([*self._cache.items(), *known.items()][-CACHE_PAIRS:])
        for pair, verdict in known.items():
            for i in pending[pair]:
                verdicts[i] = verdict
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
        return {p: float(v == 1) for p, v in zip(pairs, found, strict=True) if v is not None}

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
            if not self._told and self._end > 0:  # else it was this process that killed it
                self._told = True
                code = worker.returncode
                how = f"killed by signal {-code}" if code < 0 else f"gone with exit code {code}"
                how += " (the kernel does that when memory runs out)" * (code == -signal.SIGKILL)
                how += "; it is replaced, its answer tried again, and the run goes on (said once)."
                print(f"reward: a grading worker was {how}", file=sys.stderr, flush=True)
        return math.nan

    def _start(self) -> subprocess.Popen[bytes]:
        """A worker that is ready."""
        threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
        command = [sys.executable, "-P", os.path.abspath(__file__)]  # -P: no file here is a library
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        for _ in range(3):  # one death alone may be the kernel's OOM killer
            worker = subprocess.Popen(command, bufsize=0, env=os.environ | threads, **pipes)
            self._workers.append(worker)
            reply = _reply(worker, START_SECONDS)
            if reply == b"ready\n":
                return worker
            self._kill(worker)
        said = b"no reply in time" if reply is None else reply or b"it died without a word"
        why = f"{said.decode(errors='replace').strip()} (is math-verify installed there?)"
        raise RewardError(f"no grading worker can be started with {sys.executable}: {why}")

    def _kill(self, worker: subprocess.Popen[bytes]) -> None:
        self._workers.remove(worker)
        with worker:  # closes its pipes and waits for its end
            worker.kill()  # SIGKILL: anything milder waits for C code to return


def _refuse_sums(parser: type) -> None:
    """Make latex2sympy's parser fail on numbers side by side, which it adds: 40 2 would be 42. Not
    by the text: a gap can be written in too many ways. A mixed fraction stays what it is, and so
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
    math_verify.parser.get_last_eq = lambda latex: latex  # of what fails to parse, the last side
    rules = math_verify.parser.NormalizationConfig(malformed_operators=True, nits=True)  # no units
    config = [math_verify.LatexExtractionConfig(boxed_match_priority=0, normalization_config=rules)]

    @functools.lru_cache(maxsize=512)  # one gold meets a whole group of boxes
    def parsed(text: str) -> list:
        # first_match: the box or nothing, not a fraction found somewhere inside a box of prose.
        box, how = f"\\boxed{{{text}}}", {"extraction_mode": "first_match", "parsing_timeout": None}
        return math_verify.parse(box, config, **how)

    def equal(box: str, gold: str) -> bool:
        try:  # deep nesting is a RecursionError, a huge number a MemoryError: wrong, all of them
            right, whole = parsed(gold), "=" in gold or re.search("[,;]", box)
            values = [parsed(side) for side in ([box] if whole else _sides(box))]
            # 6 decimals, so that 0.333333 is 1/3, or as many as the gold has, and more by the zeros
            # after its point, lest 1/2004! or .0000672 be next to nothing; and 1<x<2 is (1,2).
            size = abs(right[0].evalf()) if getattr(right[0], "is_number", False) else 1
            zeros = max(0, -math.floor(sympy.log(size, 10)) - 1) if size else 0
            places = max([6 + zeros, *map(len, re.findall(r"\.([0-9]{1,12})", gold))])
            how = {"float_rounding": places, "numeric_precision": 15 + zeros}
            how |= {"timeout_seconds": None, "allow_set_relation_comp": True}
            lists = [getattr(getattr(v[0], "rhs", v[0]), "_unsorted_args", "1") for v in values]
            if isinstance(right[0], sympy.Expr) and any(len(each) > 1 for each in lists):
                return False  # 42, 42 is not one answer
            return all(math_verify.verify(right, value, **how) for value in values)
        except Exception:
            return False

    return equal


def load_reward_funcs(
    paths: list[str], weights: list[float] | None = None
) -> dict[str, tuple[Callable | None, float]]:
    """By name, from dotted paths as in TRL, with weights; None is the Grader's own verdict."""
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
        spec = importlib.util.find_spec(module.partition(".")[0])
        here = os.path.realpath(module.partition(".")[0] + ".py")
        if spec and os.path.isfile(here) and os.path.realpath(str(spec.origin)) != here:
            raise ImportError(f"rename {here}: Python has another module of that name")
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
    """A number for each completion, NaN for None, which is not counted. By TRL's convention; of a
    chat a completion is a list of one message."""
    import torch  # not above, for the worker

    pairs = zip(prompts, completions, strict=True)
    replies = [t if isinstance(p, str) else [{"role": "assistant", "content": t}] for p, t in pairs]
    given = {"prompts": prompts, "completions": replies, "completion_ids": completion_ids}
    try:
        with torch.set_grad_enabled(torch.is_grad_enabled()):  # the function may leave it off
            values = list(function(**(columns | given)))
        numbers = [math.nan if isinstance(v, str | bytes | None) else float(v) for v in values]
    except (Exception, SystemExit) as error:
        library = rf"^<|/lib(64)?/python3|^{re.escape(__file__)}$"
        frames = traceback.extract_tb(error.__traceback__)
        own = [f" at {f.filename}:{f.lineno}" for f in frames if not re.search(library, f.filename)]
        what = f"{error!r:.200}{own[-1] if own else ''}"
        raise RewardError(f"correct the reward function {name}: {what}") from error
    bad = [v for v, n in zip(values, numbers, strict=True) if not (v is None or math.isfinite(n))]
    if bad or len(values) != len(replies):
        got = f"{bad[0]!r:.80}" if bad else f"{len(values)} values for {len(replies)} completions"
        raise RewardError(f"reward function {name} must return a number per completion, not {got}")
    return numbers


def _serve() -> None:
    """The worker: a JSON line [box, gold] in, a line 1 or 0 out, until standard input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the trainer to handle
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]  # a run's `ulimit -v` cannot be raised
    limit = min({hard, MEMORY_BYTES} - {resource.RLIM_INFINITY})
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")  # where memory runs out, the kernel shall take this process first
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: C code sees no end of input
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
