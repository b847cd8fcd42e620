"""Runs many command lines of the grpo_*.py scripts in forks of one process that imported them once.

    python tests/fork_server.py CASES.json JOBS

CASES.json is a list of {"folder", "script", "argv"}. Each case runs as the command would, in its
folder, where it leaves stdout.txt, stderr.txt and code.txt: the exit code, or "timeout". Cases may
have further keys:

    "signal"   the number of a signal that is sent to the case, together with
    "when"     a path in the folder: the signal is sent once it exists ...
    "lines"    ... and has so many lines ...
    "after"    ... and so many seconds have passed since then
    "times"    how often it is sent; default 1
    "needs"    the folder of another case, after whose end this one starts

Imports take six seconds and a run of two tiny steps about three, so a process for each case would
spend most of its time on imports.
"""

import atexit
import gc
import json
import os
import signal
import sys
import time
import traceback
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ["HF_DEACTIVATE_ASYNC_LOAD"] = "1"  # transformers' loader has threads

import datasets  # noqa: F401  (runs import these late, so they are imported before the forks)
import matplotlib.backends.backend_agg
import matplotlib.figure  # noqa: F401
import peft.tuners.lora.bnb  # noqa: F401
import torch
import transformers

import common.report
import grpo_arca
import grpo_oar
import grpo_strace

LIMIT = 120  # seconds a case; on one busy core a good one takes about ten
MODULES = {module.__name__: module for module in (grpo_arca, grpo_oar, grpo_strace)}


def run_here(case: dict) -> int:
    """The command, in this fork: its exit code, as the interpreter would give it."""
    os.setsid()  # so that its grading workers can be stopped with it
    os.chdir(case["folder"])
    for fd, name in ((0, os.devnull), (1, "stdout.txt"), (2, "stderr.txt")):
        os.dup2(os.open(name, os.O_RDWR | os.O_CREAT | os.O_TRUNC), fd)
    common.report.write_curves = lambda *_: None  # a second each, and tested elsewhere
    sys.argv = [case["script"] + ".py", *case["argv"]]
    code: object = 0
    try:
        MODULES[case["script"]].main()
    except SystemExit as stop:
        code = stop.code or 0
    except BaseException:
        traceback.print_exc()
        code = 1
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    return code if isinstance(code, int) else 1


def fork(case: dict) -> int:
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            code = run_here(case)
        finally:
            os._exit(code)
    return pid


def stop(pid: int, case: dict) -> None:
    """Sends the case's signal if it is time."""
    path = Path(case["folder"]) / case["when"]
    if not path.exists():
        return
    if path.is_file() and path.read_text().count("\n") < case.get("lines", 0):
        return
    due = case.setdefault("due", time.monotonic() + case.get("after", 0))
    if time.monotonic() >= due:
        for _ in range(case.get("times", 1)):
            os.kill(pid, case["signal"])
            time.sleep(0.05)  # two of a kind at once would be one
        del case["signal"]


def settle(running: dict[int, tuple[dict, float]]) -> None:
    """Waits a moment; notes which cases have ended, and ends those that took too long."""
    time.sleep(0.02)
    for pid, (case, deadline) in list(running.items()):
        if "signal" in case:
            stop(pid, case)
        done, status = os.waitpid(pid, os.WNOHANG)
        code = str(os.waitstatus_to_exitcode(status))
        if not done and time.monotonic() < deadline:
            continue
        if not done:
            os.killpg(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            code = "timeout"
        (Path(case["folder"]) / "code.txt").write_text(code)
        del running[pid]


def ready(case: dict) -> bool:
    return "needs" not in case or (Path(case["needs"]) / "code.txt").exists()


def load_once() -> None:
    """What libraries compile and look up for the first policy, done before the forks."""
    args = grpo_arca.parse_args([])
    transformers.logging.disable_progress_bar()  # it has a thread
    transformers.AutoTokenizer.from_pretrained(args.model_name_or_path)
    grpo_arca.load_policy(args, torch.device("cpu"))
    gc.collect()
    gc.freeze()  # a collection in a fork would copy every page it looks at


def main() -> None:
    cases = json.loads(Path(sys.argv[1]).read_text())
    jobs = int(sys.argv[2])
    torch.set_num_threads(1)
    load_once()
    # A fork has none of its parent's threads and would wait for them forever. Only the thread of
    # Arrow's allocator is started again in a fork.
    names = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
    threads = [name for name in names if name != "jemalloc_bg_thd"]
    assert len(threads) == 1, f"threads before the first fork: {threads}"
    running: dict[int, tuple[dict, float]] = {}
    while cases or running:
        for case in [case for case in cases if ready(case)][: jobs - len(running)]:
            cases.remove(case)
            running[fork(case)] = (case, time.monotonic() + LIMIT)
        settle(running)


if __name__ == "__main__":
    main()
