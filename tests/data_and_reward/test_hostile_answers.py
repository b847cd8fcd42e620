r"""Answers that would hang, crash, take over or deceive the grader: 0 for each, in bounded time.

What math-verify must read goes to a worker process. These tests also end workers, and starve them.
"""

import os
import resource
import signal
import subprocess
import sys
import threading
import time
from multiprocessing import get_context
from pathlib import Path

import pytest
from support import ROOT, refusal

from common import answer_worker, answers, reward
from common.answers import last_boxed
from common.reward import Grader
from common.task import Problem

ROOT_OF_7 = r"\sqrt{7}"  # no number, so that the worker has to read it


def box(text: str) -> str:
    return f"\\boxed{{{text}}}"


def grade(grader: Grader, texts: list[str], gold: str) -> list[float]:
    """Returns the grades of boxes with these texts."""
    return grader.grade([box(text) for text in texts], [Problem("", gold)] * len(texts))


PWNED = "+".join(f"chr({ord(char)})" for char in "pwned")
OPEN = f"open({PWNED},chr(119))"
# sympy's evalf writes this name into Python source and runs it, unless lambdify is refused.
LAMBDIFY = rf"\sum_{{n=0}}^{{\infty}} \frac{{\vec{{dot([1],[{OPEN}])}}^n}}{{n!}}"
HOSTILE = [
    r"\int e^{e^{x}} dx", r"\int_0^1 e^{e^{x}} dx", "1e1000000000", "0.0000001^{99999999}",
    r"\operatorname{zeros}(30000,30000)", r"\begin{matrix}1&2\\3&4\end{matrix}^{10^9}",
    "{" * 10_000 + "7" + "}" * 10_000, "(" * 10_000 + "7" + ")" * 10_000, "8" * 400, "((((((7",
    r"\frac{" * 10_000 + "7" + "}{1}" * 10_000, r"\sqrt{" * 10_000 + "7" + "}" * 10_000,
    r"\sqrt{" * 40 + "7" + "}" * 40, "2(" * 40 + "x" + ")" * 40, "7\0", "\0", "a\0b", "⁷",
    "\ud800", "7\ud800", "\U0001f600" * 400, '7"]\n["7", "7"]', "1\n", "7\n7", "\x1b[31m7\x1b[0m",
    "ready\n", "1\n1\n1\n", '["8", "7"]', "\r8", "7 or 1", "nan", "zoo", "-7", r"\infty", "0/0",
    "__import__('os').system('touch pwned')", "__import__(\"os\").system(\"touch pwned\")",
    "().__class__.__base__.__subclasses__()", "(lambda: open('pwned', 'w'))()", LAMBDIFY, OPEN,
    "exec('open(\"pwned\",\"w\")')", rf"\text{{{OPEN}}}", r"\pm 7", r"7 \neq 7", "7, 7, 8", "%",
    r"\emptyset", r"\boxed", r"\frac", "^", "_", "\\", r"\text{", "&", "#", r"\begin{matrix}",
    "7=8", "x<7", r"\frac{7}{0}", "=", "7=", r"\sqrt{7}\sqrt{7}", r"\sqrt{7} \sqrt{7}", r"7\sqrt7",
]  # fmt: skip
ENDLESS = [
    "5^{5^{5^{5}}}", "(10^8)!", "9!!!!", r"\prod_{n=1}^{10^9} n",
    r"\sum_{n=1}^{10^{10}} \frac{1}{n}", r"\binom{1000000000}{500000000}", "(x+1)^{100000}",
    r"\sin(10^{10^{8}})", "2^{10^{10}}", r"\frac{1}{2^{10^{10}}}",
]  # fmt: skip


@pytest.fixture(scope="module")
def grader():
    """A grader whose worker has begun."""
    ready = Grader()
    assert grade(ready, [r"\frac{14}{\sqrt{28}}"], ROOT_OF_7) == [1.0]
    return ready


@pytest.fixture
def fresh(grader):
    """The grader, without remembered verdicts and timeouts."""
    grader._is_equal.cache_clear()
    grader.timeouts, grader.limit = 0, float("inf")
    yield grader
    assert grade(grader, [r"\frac{21}{\sqrt{63}}", r"\frac{22}{\sqrt{63}}"], ROOT_OF_7) == [1, 0]


# ---- No answer is paid, run, or endless ----------------------------------------------------------
def test_hostile_answers_earn_nothing_and_run_nothing(tmp_path, monkeypatch):
    """By both ways: a number is compared here, and anything else by the worker."""
    monkeypatch.chdir(tmp_path)  # the worker starts here, so `pwned` would be made here
    own = Grader()
    for gold in ("7", ROOT_OF_7):
        grades = grade(own, HOSTILE, gold)
        assert [text for text, got in zip(HOSTILE, grades, strict=True) if got] == []
    assert not own._is_equal(LAMBDIFY, r"\sqrt{2}")  # whatever words a problem may have
    assert list(tmp_path.iterdir()) == []
    # To refuse lambdify costs no right answer.
    assert grade(own, [r"\sum_{n=0}^{\infty} \frac{1}{n!}"], "e") == [1.0]


@pytest.mark.slow
@pytest.mark.parametrize("text", ENDLESS)
def test_an_endless_answer_ends_its_worker(fresh, text):
    """By the processor's time and not by the clock, so that a busy machine changes no verdict."""
    worker = fresh._worker
    assert grade(fresh, [text], ROOT_OF_7) == [0.0]
    assert fresh.timeouts == 1 and worker.returncode == -signal.SIGPROF


@pytest.mark.slow
@pytest.mark.parametrize(
    "function",
    [None, lambda completions, gold, **_: list(map(reward.is_right, completions, gold))],
)
def test_a_batch_of_endless_answers_has_a_limit(fresh, monkeypatch, function):
    monkeypatch.setattr(reward, "MAX_TIMEOUTS", 1)
    monkeypatch.setattr(reward, "GRADER", fresh)
    boxes = [
        box(text)
        for text in (
            "5^{5^{5^{5}}}",
            "5^{5^{5^{6}}}",
            "5^{5^{5^{7}}}",
            r"\frac{35}{\sqrt{175}}",
            "7",
        )
    ]
    problems = [Problem("", ROOT_OF_7)] * 4 + [Problem("", "7")]
    assert [
        *reward.reward_values({"it": function}, problems, boxes, [[]] * 5, {}).flatten(),
        fresh.timeouts,
    ] == [0, 0, 0, 0, 1, 4]  # all that have no verdict
    # The next batch has a limit of its own, and only a verdict is remembered as one.
    assert reward.reward_values({"it": function}, problems[3:4], boxes[3:4], [[]], {}) == 1


LONG = [
    ".", ",", " ", "1", "1 ", "1,000", "°", "and ", "**", "$", "a", "x=", "\\{", "\\text{a}",
    "\\boxed{", "\\boxed{1},", "{", "}", "\\", "1^", "1.\\overline{3}", "\\frac{\\text{", "(",
    "how many ", "in ", "_{1}", "_000", "twenty ", "√(", "~$", "\\circ ", "cm 1 and ", "{1}", "m/",
    "kWh ", "\\ln 2\\cdot ", "1:", "to ", "(x", "(x)", "<1", "\\pm ", "<think>", "</think>",
]  # fmt: skip


@pytest.fixture
def at_most_20_seconds():
    """TimeoutError in the middle of what hangs, by this process's own processor time."""

    def stop(*_):
        raise TimeoutError("20 s of processor time: what should take a tenth of a second hangs")

    signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, 20)
    yield
    signal.setitimer(signal.ITIMER_VIRTUAL, 0)


@pytest.mark.parametrize("unit", LONG)
def test_a_long_answer_takes_no_quadratic_time(unit, at_most_20_seconds):
    """A policy that repeats itself in a box must not hold the trainer, which no limit ends."""
    last_boxed(box(unit * (100_000 // len(unit)) + "!"))
    last_boxed(box("1") + "," + unit * (1_000_000 // len(unit)) + "so " + box("2"))
    for longest in ("12 " + unit * (480 // len(unit)) + "!", unit * (480 // len(unit))):
        for problem in (
            "Sort, factor, expand! How many cm? Ratio, pair, integral (A), (B)?",
            unit * 200,
        ):
            answers.settle(longest, "7", problem)
            answers.settle("7", longest, problem)


# ---- Workers that go away ------------------------------------------------------------------------
def test_a_worker_that_died_while_idle_costs_nothing(fresh):
    fresh._worker.kill()
    fresh._worker.wait()
    assert grade(fresh, [r"\frac{42}{\sqrt{252}}"], ROOT_OF_7) == [1.0]
    assert fresh.timeouts == 0


@pytest.mark.slow
def test_an_answer_whose_worker_dies_twice_earns_0(fresh, monkeypatch):
    """As when the machine's memory is full."""
    started = []

    def start_stopped():
        started.append(start())
        os.kill(started[-1].pid, signal.SIGSTOP)  # it takes the pair and never answers
        threading.Timer(0.2, started[-1].kill).start()
        return started[-1]

    start = reward.start_worker
    monkeypatch.setattr(reward, "start_worker", start_stopped)
    fresh._worker.kill()
    fresh._worker = None
    assert grade(fresh, [r"\frac{49}{\sqrt{343}}"], ROOT_OF_7) == [0.0]
    assert len(started) == 2 and fresh.timeouts == 1


def forked_verdict(number: int) -> bool:
    """Returns whether a formula is judged as it should be; every second one is right."""
    is_right = number % 2 == 0
    text = f"x + \\sqrt{{{number + 2 + (not is_right)}}}"
    return reward.is_right(box(text), f"\\sqrt{{{number + 2}}} + x") == is_right


def test_forked_processes_have_workers_of_their_own():
    """They would read each other's replies: wrong answers were paid, right ones were not."""
    assert forked_verdict(0)  # this process has a worker
    with get_context("fork").Pool(3) as pool:
        assert all(pool.map(forked_verdict, range(1, 61), chunksize=1))


def test_memory_of_a_worker_is_limited(fresh):
    worker = fresh._worker
    limit, _ = resource.prlimit(worker.pid, resource.RLIMIT_AS)
    assert limit == answer_worker.MEMORY_BYTES
    texts = [r"\operatorname{zeros}(30000,30000)", r"\frac{56}{\sqrt{448}}"]
    assert grade(fresh, texts, ROOT_OF_7) == [0.0, 1.0]
    assert fresh._worker is worker


WITHOUT_LIMITS = """\
import resource, runpy, sys
del resource.RLIMIT_AS
runpy.run_path(sys.argv[2], run_name="__main__")
"""


def test_a_system_that_limits_no_memory_grades_as_well(tmp_path, monkeypatch):
    path = tmp_path / "python"
    path.write_text(f"#!{sys.executable}\n{WITHOUT_LIMITS}")
    path.chmod(0o755)
    monkeypatch.setattr(reward.sys, "executable", str(path))
    assert grade(Grader(), [r"\frac{14}{\sqrt{28}}"], ROOT_OF_7) == [1.0]


@pytest.mark.slow
def test_an_interrupted_grade_leaves_no_reply_behind(fresh):
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    os.kill(fresh._worker.pid, signal.SIGSTOP)  # it takes the pair and never answers
    stopped = fresh._worker
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
    refusal(grade, fresh, [r"\frac{63}{\sqrt{567}}"], ROOT_OF_7, error=KeyboardInterrupt)
    signal.signal(signal.SIGINT, before)
    stopped.kill()
    # Not the 1 of the pair before.
    assert grade(fresh, [r"\frac{64}{\sqrt{567}}"], ROOT_OF_7) == [0.0]


def test_ctrl_c_is_left_to_the_trainer(fresh):
    assert os.getsid(fresh._worker.pid) != os.getsid(0)  # a terminal sends it to its own session


PARENT = """
import sys
sys.path.insert(0, sys.argv[1])
from common.reward import Grader
from common.task import Problem
grader = Grader()
grader.grade([r"\\boxed{\\sqrt{28}}"], [Problem("", r"2\\sqrt{7}")])
print(grader._worker.pid, flush=True)
grader.grade([r"\\boxed{5^{5^{5^{5}}}}"], [Problem("", r"\\sqrt{7}")])
"""


@pytest.mark.slow
def test_no_worker_outlives_its_parent(tmp_path):
    command = [sys.executable, "-c", PARENT, str(ROOT)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=tmp_path) as parent:
        worker = int(parent.stdout.readline())
        parent.kill()
    assert has_ended(worker)


def has_ended(pid: int) -> bool:
    """Returns whether a process ends within a minute. Nobody may be there to reap it."""
    for _ in range(600):
        stat = Path(f"/proc/{pid}/stat")
        if not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z":
            return True
        time.sleep(0.1)
    return False


@pytest.mark.parametrize("program", ["exit 1", "echo 'No module named math_verify'"])
def test_a_worker_that_cannot_start_is_an_error(tmp_path, monkeypatch, program):
    path = tmp_path / "python"
    path.write_text(f"#!/bin/sh\n{program}\n")
    path.chmod(0o755)
    monkeypatch.setattr(reward.sys, "executable", str(path))
    said = refusal(grade, Grader(), [r"\frac{14}{\sqrt{28}}"], ROOT_OF_7, error=OSError)
    assert "no grading worker: is math-verify installed" in said
