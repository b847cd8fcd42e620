"""Runs command lines of the grpo_*.py scripts in forks of one process that imported all they need.

    python tests/fork_server.py CASES.json JOBS

CASES.json is a list of {"folder", "script", "argv"}. Each case runs as the command would, in its
folder, where it leaves stdout.txt, stderr.txt and code.txt: the exit code, or "timeout". Cases may
have further keys:

    "signal"   the number of a signal that is sent to the case, once ...
    "when"     ... this path in the folder has been written ...
    "lines"    ... and has so many lines ...
    "after"    ... and so many seconds have passed since then
    "needs"    the folder of another case, after whose end this one starts
    "env"      variables of its environment

Imports take six seconds and a run of two tiny steps about two, so a process for each case would
spend most of its time on imports.
"""

import atexit
import gc
import json
import os
import runpy
import signal
import sys
import time
import traceback
from pathlib import Path

os.environ["HF_DEACTIVATE_ASYNC_LOAD"] = "1"  # transformers' loader has threads

import matplotlib.backends.backend_agg  # noqa: F401  (a run imports it late)
import torch
import transformers
from support import ROOT, few_chains

import common.data
import common.report
import grpo_arca

LIMIT = 600  # seconds a case; on a core that is shared by many a good one takes a hundred


def run_here(case: dict) -> int:
    """Runs a command in this fork, and returns its exit code, as the interpreter would give it."""
    os.setsid()  # so that its grading workers can be stopped with it
    os.chdir(case["folder"])
    os.environ.update(case.get("env", {}))
    for fd, name in ((0, os.devnull), (1, "stdout.txt"), (2, "stderr.txt")):
        os.dup2(os.open(name, os.O_RDWR | os.O_CREAT | os.O_TRUNC), fd)
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)  # the tests may run in the background, or by nohup
    common.report.write_curves = lambda *_: None  # a second each, and tested elsewhere
    common.data.chain_problems = few_chains  # all 4,096 take a second to read
    script = f"{case['script']}.py"
    sys.argv = [script, *case["argv"]]
    code: object = 0
    try:
        runpy.run_path(str(ROOT / script), run_name="__main__")
    except SystemExit as end:
        code = end.code or 0
    except BaseException:
        traceback.print_exc()
        code = 1
    if isinstance(code, str):
        print(code, file=sys.stderr)
        code = 1
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    return int(code)


def fork(case: dict) -> int:
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            code = run_here(case)
        finally:
            os._exit(code)
    return pid


def send_if_due(pid: int, case: dict) -> None:
    """Sends the case's signal if it is time."""
    path = Path(case["folder"]) / case["when"]
    if not path.exists() or path.stat().st_mtime < case["start"]:
        return
    if "lines" in case and path.read_text().count("\n") < case["lines"]:
        return
    due = case.setdefault("due", time.monotonic() + case.get("after", 0))
    if time.monotonic() >= due:
        os.kill(pid, case.pop("signal"))


def settle(running: dict[int, tuple[dict, float]]) -> None:
    """Waits a moment; notes which cases have ended, and ends those that took too long."""
    time.sleep(0.005)  # a save takes a few times as long
    for pid, (case, deadline) in list(running.items()):
        if "signal" in case:
            send_if_due(pid, case)
        done, status = os.waitpid(pid, os.WNOHANG)
        code = str(os.waitstatus_to_exitcode(status))
        if not done and time.monotonic() < deadline:
            continue
        if not done:
            os.killpg(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            code = "timeout"
        Path(case["folder"], "code.txt").write_text(code)
        del running[pid]


def warm_up() -> None:
    """Does what libraries compile and look up for the first policy before the forks."""
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
    warm_up()
    # A fork has none of its parent's threads and would wait for them forever. Only the thread of
    # Arrow's allocator is started again in a fork.
    names = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
    threads = [name for name in names if name != "jemalloc_bg_thd"]
    assert len(threads) == 1, f"threads before the first fork: {threads}"
    running: dict[int, tuple[dict, float]] = {}
    while cases or running:
        ready = [c for c in cases if "needs" not in c or Path(c["needs"], "code.txt").exists()]
        for case in ready[: jobs - len(running)]:
            cases.remove(case)
            case["start"] = time.time()
            running[fork(case)] = (case, time.monotonic() + LIMIT)
        settle(running)


if __name__ == "__main__":
    main()
