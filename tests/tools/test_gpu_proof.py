"""gpu_proof.py: what it reads, says and writes, with stand-ins for parts; slow: all in small."""

import argparse
import importlib
import json
import math
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import bench
import gpu_proof
import memory
import pytest
import torch
from gpu_proof import BEGIN, END, Part
from support import ROOT

MACHINE = {"card": "H200, 139 GiB", "versions": {"torch": "2.11", "trl": "1.16"}, "commit": "abc"}


# ---- What a part measured ------------------------------------------------------------------------
def bench_lines(**speeds: list[float]) -> str:
    """As of bench.py --json: a step of 10 s, and GiB as the first speed."""
    lines = []
    for credit, values in speeds.items():
        names = ("rollout_tokens_per_second", "update_tokens_per_second")
        rows = [
            dict.fromkeys(names, x) | {"step": 10.0, "peaks": [x, x / 2, x / 4]} for x in values
        ]
        lines.append(json.dumps({"script": "grpo_arca", "credit": credit, "rows": rows}))
    return "\n".join(lines)


def test_figures_of_a_bench_are_medians_and_ratios_within_a_repeat():
    lines = bench_lines(uniform=[4.0, 8.0, 20.0], TRL=[1.0, 4.0, 2.0]).splitlines()
    found = gpu_proof.bench_figures(lines)
    assert found["uniform, rollout tokens/s"] == found["uniform, training tokens/s"] == 8
    assert found["uniform, rollout tokens/s over TRL's"] == 4  # of 4, 2 and 10
    assert found["TRL, step over uniform's"] == 1
    assert (found["uniform, peak GiB"], found["uniform, training peak GiB"]) == (20, 5)


def run_lines(steps: list[int]) -> list[str]:
    rows = [{"step": 0, "eval": {"sampled_accuracy": 0.25}}]
    rows += [{"step": s, "loss": 0, "sampling_gap": s / 100, "peak_memory_gb": s} for s in steps]
    return [json.dumps(row) for row in [*rows, {"step": 9, "eval": {"sampled_accuracy": 0.5}}]]


def test_figures_of_a_run():
    found = gpu_proof.run_figures(run_lines([1, 2, 3, 4, 5, 6]))
    assert (found["updates"], found["growth of its memory"]) == (6, 2)
    assert found[gpu_proof.GAP] == 0.06 and found["accuracy before, after"] == "25.0%, 50.0%"
    for steps in ([1, 2, 2, 3], [1, 2, 4], [2, 3]):
        assert "updates" not in gpu_proof.run_figures(run_lines(steps))


PRINTED = """
dense, compiled False: mean |sampled - recomputed| 0.0012
.dense, compiled True: mean |sampled - recomputed| 0.0031
.quantized, compiled False: mean |sampled - recomputed| 0.0004
=== 2 failed, 9 passed, 1 error in 100.00s ===
all in bf16, dense: of the training forward's change  size 1  slope 1.02  correlation 1  change 2
all in bf16, dense: of the training forward's change  size 0.3  slope 0.97  correlation 1  change 2
all in bf16, merged: of the training forward's change  size 0.3  slope 0.1  correlation 1  change 2
arca in fp32  rank 1  worst 1  seconds 2
arca in bf16  rank 0.52  worst 0.2  seconds 1
oar_g in bf16  rank 0.59  worst 0.14  seconds 1
| 1.7B | dense | 1.5 | 6.9 | 2.2 | 3.1 | 12 GB |
[4/4] batch 3; 41 s each, 0 min left
| 8B | quantized | 6.1 | 9.7 | 7.0 | 9.8 | 12 GB |
"""


def test_figures_that_were_printed(tmp_path):
    """Counts of memory are held against what another part measured: here 6.9, 3.45 and 1.725."""
    for name in ("memory", "trl"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "output.txt").write_text(PRINTED if name == "memory" else "")
    (tmp_path / "trl/bench.jsonl").write_text(bench_lines(arca=[6.9]))
    found = gpu_proof.figures(tmp_path / "memory")
    assert found["tests that pass"] == 9 and found["tests that fail"] == 3
    gaps = [found[f"{gpu_proof.GAP}, {weights}"] for weights in ("dense", "quantized")]
    assert gaps == [0.0031, 0.0004]
    slopes = found["least slope of the sampled policy's change"], found["largest"]
    assert slopes == (0.97, 1.02)
    assert found["ARCA in bf16, rank correlation with fp32"] == 0.52
    assert found["seconds a batch of worth.py"] == 41
    assert found["counted peaks are off by, trl"] == pytest.approx(3.1 / 1.725 - 1)
    assert math.isnan(found["counted peaks are off by, 8b"])
    assert gpu_proof.figures(tmp_path / "none") == {}


def test_what_was_cut_short_has_no_figures(tmp_path):
    (tmp_path / "output.txt").write_text("")
    (tmp_path / "bench.jsonl").write_text(bench_lines(arca=[6.9])[:50])
    assert "arca, peak GiB" not in gpu_proof.figures(tmp_path)


# ---- The table -----------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("value", "goal", "status", "card", "expected"),
    [
        (15, ">= 15", "done", "H200", "holds"),
        (14.9, ">= 15", "done", "H200", "misses"),
        (0.1, "<= 0.1", "done", "H200", "holds"),
        (0.11, "<= 0.1", "done", "H200", "misses"),
        ("mm: 40%", "", "done", "H200", "measured"),
        (None, ">= 15", "done", "H200", "not measured"),
        (None, ">= 15", "timed out after 3 s", "H200", "timed out after 3 s"),
        (16, ">= 15", "failed: exit code 1", "H200", "holds; failed: exit code 1"),
        (16, ">= 15", "skipped: TRL is not installed", "H200", "skipped: TRL is not installed"),
        (16, ">= 15", "done", "", "skipped: no GPU"),
        (16, ">= 15", "failed: exit code 1", "", "failed: exit code 1"),
        (16, ">= 15", "not run yet", "", "not run yet"),
    ],
)
def test_verdicts(value, goal, status, card, expected):
    assert gpu_proof.verdict(value, goal, status, card) == expected


def test_without_trl_that_is_said_of_its_rows_alone(tmp_path):
    (tmp_path / "output.txt").write_text("")
    (tmp_path / "bench.jsonl").write_text(bench_lines(uniform=[4.0]))
    part = next(part for part in gpu_proof.PARTS if part.name == "trl")
    machine = MACHINE | {"versions": {"torch": "2.11"}}
    rows = gpu_proof.table_rows(part, tmp_path, "done", machine)
    said = {row["figure"]: row["verdict"] for row in rows}
    assert said.pop("uniform, rollout tokens/s") == "measured"
    trl = {figure for figure, verdict in said.items() if verdict == "skipped: TRL is not installed"}
    assert trl == {"uniform, rollout tokens/s over TRL's", "TRL, step over uniform's"}


def test_the_pages_section_is_replaced_and_nothing_else(capsys):
    text = f"# A\n\n{BEGIN}\nold\n{END}\n\n## B\n"
    once = gpu_proof.replace_section(text, "new | table")
    assert once == f"# A\n\n{BEGIN}\nnew | table\n{END}\n\n## B\n"
    assert gpu_proof.replace_section(once, "new | table") == once
    for broken in ("# A\n", f"{END}\n{BEGIN}\n"):
        with pytest.raises(SystemExit):
            gpu_proof.replace_section(broken, "new")
        assert capsys.readouterr().err.startswith("gpu_proof.py: error: results/COSTS.md lacks")
    page = (ROOT / "results/COSTS.md").read_text()
    assert page.count(BEGIN) == page.count(END) == 1


def test_the_parts_take_half_an_hour_and_their_goals_can_be_read():
    assert sum(part.seconds for part in gpu_proof.PARTS) == 2135
    assert len({part.name for part in gpu_proof.PARTS}) == len(gpu_proof.PARTS)
    for part in gpu_proof.PARTS:
        rows = gpu_proof.table_rows(part, Path("/nowhere"), "not run yet", MACHINE)
        for row in rows:
            assert ("<=" in row["goal"] or ">=" in row["goal"]) != (row["goal"] == "")
            assert "=" not in row["figure"] and row["verdict"] == "not run yet"


@pytest.mark.parametrize("trl", [True, False])
def test_the_full_commands_are_understood(monkeypatch, trl):
    """By what they call, on a machine that has a GPU: --small hides a wrong flag's value."""
    for script in ("grpo_arca", "grpo_oar", "grpo_strace"):
        importlib.import_module(script)  # which looks for a GPU
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    paths = {"smollm2": Path("/a b/smollm2"), "gsm8k": Path("/a b/gsm8k.jsonl")}
    options = argparse.Namespace(folder=ROOT / "runs/x", small=False, **paths)
    for part in gpu_proof.PARTS:
        for command in gpu_proof.fill(part, options, trl).split(" && "):
            words, flags = shlex.split(command), []
            script = next((x for x in words if re.fullmatch(r"grpo_\w+", x)), "grpo_arca")
            if "--json" in words:
                asked = bench.parse_options(words[words.index(script) :])
                flags, done = (
                    asked.flags,
                    (asked.trl or asked.trl_continuous) == (trl and part.name.startswith("trl")),
                )
                assert done and asked.scripts == [script] and asked.json.startswith("runs/x/")
            elif "tools/memory.py" in words:
                flags = memory.parse_options(words[2:]).flags
            elif "grpo_arca.py" in words:
                flags = words[words.index("grpo_arca.py") + 1 :]
            else:
                assert (ROOT / words[1]).is_file()
                flags = words[words.index("--") + 1 :] if "--" in words else []
            importlib.import_module(script).parse_args(flags)


# ---- Processes -----------------------------------------------------------------------------------
def alive(pid: str) -> bool:
    return Path(f"/proc/{pid}/stat").exists() and " Z " not in Path(f"/proc/{pid}/stat").read_text()


def test_a_part_that_takes_too_long_ends_with_all_that_it_started(tmp_path):
    began, log = time.monotonic(), tmp_path / "log"
    command = "echo first && bash -c 'sleep 60 & echo $!; wait' && echo never"
    assert gpu_proof.do(command, 1, log, {"PATH": "/bin:/usr/bin"}) == "timed out after 1 s"
    assert time.monotonic() - began < 20
    lines = log.read_text().splitlines()
    assert lines[:2] == ["$ echo first", "first"] and "never" not in lines[-1]
    time.sleep(0.2)
    assert not alive(lines[-1])


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("echo a && echo b", "done"),
        ("bash -c 'sleep 60 & echo $!'", "done"),
        ("echo a && false && echo never", "failed: exit code 1"),
        ("bash -c 'kill -9 $$'", "failed: exit code -9"),
        ("no-such-program", "failed: [Errno 2] No such file or directory: 'no-such-program'"),
    ],
)
def test_how_a_part_ended(tmp_path, command, expected):
    assert gpu_proof.do(command, 20, tmp_path / "log", {"PATH": "/bin:/usr/bin"}) == expected
    printed = (tmp_path / "log").read_text()
    assert "\nnever" not in printed
    if "sleep" in command:  # what it left running would keep the card's memory
        time.sleep(0.2)
        assert not alive(printed.split()[-1])


LAUNCHER = """
case "$*" in *--resume_from_checkpoint\\ latest) echo resumed; exit 7;; esac
echo begun
[ "$1" = fails ] && exit 1
[ "$1" = ends ] && touch checkpoint-4 && exit 0
sleep 60 &
touch checkpoint-4
wait $!
"""


def test_a_run_is_killed_once_its_checkpoint_is_there_and_resumed(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "launcher.sh").write_text(LAUNCHER)
    with pytest.raises(SystemExit) as ended:
        gpu_proof.kill("checkpoint-4", "bash", "launcher.sh", "goes on")
    printed = capfd.readouterr().out
    assert ended.value.code == 7
    killed = re.search(r"begun\n(?:.*\n)*killed (\d+)\n(?:.*\n)*resumed\n", printed)
    assert killed is not None, printed
    assert not alive(killed[1])
    for how in ("fails", "ends"):
        (tmp_path / "checkpoint-4").unlink()
        with pytest.raises(SystemExit, match="it ended before it was killed"):
            gpu_proof.kill("checkpoint-4", "bash", "launcher.sh", how)
        assert "resumed" not in capfd.readouterr().out
        (tmp_path / "checkpoint-4").touch()


# ---- The command, with stand-ins for parts and card ----------------------------------------------
def test_a_part_does_not_outlive_a_killed_program(tmp_path):
    """Else it would go on using the card beside the next call."""
    log = tmp_path / "log"
    command = "bash -c 'echo $$; sleep 60'"
    path = {"PATH": "/bin:/usr/bin"}
    code = "import gpu_proof, pathlib\n"
    code += f"gpu_proof.do({command!r}, 60, pathlib.Path({str(log)!r}), {path})"
    program = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT / "tools")
    while not log.exists() or len(log.read_text().splitlines()) < 2:
        time.sleep(0.05)
    part = log.read_text().splitlines()[1]
    assert alive(part)
    program.kill()
    program.wait()
    deadline = time.monotonic() + 20
    while alive(part) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not alive(part)


@pytest.fixture
def prove(tmp_path, monkeypatch, capsys):
    """prove(*argv) -> (exit code, the parts it did, its last report)."""
    (tmp_path / "results").mkdir()
    (tmp_path / "results/COSTS.md").write_text(f"# A\n{BEGIN}\nNot run yet.\n{END}\n# B\n")
    parts = [
        Part("good", 30, r"echo 9\ passed", ["tests that pass >= 1"]),
        Part("bad", 5, r"bash -c 'echo 1\ failed; exit 1'", ["tests that fail <= 0"]),
        Part("long", -33, "sleep 30", ["updates >= 3"]),  # so that 2 s of all are left to it
        Part("last", 20, r"echo 1\ passed", ["tests that pass >= 3", "tests that fail <= 0"]),
    ]
    monkeypatch.setattr(gpu_proof, "PARTS", parts)
    monkeypatch.setattr(gpu_proof, "ROOT", tmp_path)
    machine = dict(MACHINE)
    monkeypatch.setattr(gpu_proof, "surroundings", lambda _: ({"PATH": "/bin:/usr/bin"}, machine))

    def start(*argv: str, **changes) -> tuple[int, list[str], dict]:
        machine.update(changes)
        monkeypatch.setattr(sys, "argv", ["gpu_proof.py", *argv])
        with pytest.raises(SystemExit) as ended:
            gpu_proof.main()
        lines = [line for line in capsys.readouterr().out.splitlines() if line[0] != " "]
        report = json.loads((tmp_path / "results/data/gpu_proof/gpu.json").read_text())
        return ended.value.code, [line.split()[1].strip(":") for line in lines], report

    handler = signal.getsignal(signal.SIGTERM)
    yield start
    signal.signal(signal.SIGTERM, handler)


@pytest.mark.slow
def test_what_fails_ends_alone_and_is_done_again_and_what_is_done_is_not(prove, tmp_path):
    code, did, report = prove()
    assert code == 1 and did == ["good", "bad", "long", "last"]
    verdicts = [(row["part"], row["verdict"]) for row in report["rows"]]
    (late,) = [verdict for part, verdict in verdicts if part == "long"]
    assert late in ("timed out after 1 s", "timed out after 2 s")  # what the others had left
    verdicts.remove(("long", late))
    assert verdicts == [
        ("good", "holds"),
        ("bad", "misses; failed: exit code 1"),
        ("last", "misses"),
        ("last", "holds"),
    ]
    assert report["card"] == "H200, 139 GiB" and report["versions"]["torch"] == "2.11"
    page = (tmp_path / "results/COSTS.md").read_text()
    assert page.startswith(f"# A\n{BEGIN}\nCard: H200") and page.endswith(f"{END}\n# B\n")
    assert "| good | tests that pass | 9 | >= 1 | holds |" in page
    assert "9 passed" in (tmp_path / "runs/gpu_proof/good/output.txt").read_text()
    assert prove()[1] == ["bad", "long"]
    assert prove("last", "bad")[1] == ["bad", "last"]
    assert prove()[2]["rows"][0]["verdict"] == "holds"  # what is not done again is in the table
    assert prove(card="A100")[1] == ["good", "bad", "long", "last"]  # nothing of another card


def test_no_part_begins_that_may_end_after_seconds(prove, tmp_path):
    for seconds, begins in (("29", False), ("35", True)):  # the part may take 30
        prove("good", "--seconds", seconds)
        assert (tmp_path / "runs/gpu_proof/good").exists() == begins


def test_an_interrupted_part_is_not_done(prove, monkeypatch, capsys):
    def interrupt(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as inside:
        inside.setattr(gpu_proof, "do", interrupt)
        code, did, report = prove()
    assert code == 2 and did == ["good"]
    assert {row["verdict"] for row in report["rows"]} == {"not run yet"}
    assert prove()[1] == ["good", "bad", "long", "last"]


def test_mistakes_are_a_sentence(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(gpu_proof, "CARD", "")  # finds none
    (tmp_path / "file").write_text("")
    for argv, sentence in (
        (["nowhere"], "no part nowhere: there are tests, trl,"),
        ([], "there is no GPU: --small tries"),
        (["--small", "--folder", str(tmp_path / "file")], "[Errno 17] File exists"),
        (["--none"], "unrecognized arguments"),
    ):
        monkeypatch.setattr(sys, "argv", ["gpu_proof.py", *argv])
        with pytest.raises(SystemExit) as ended:
            gpu_proof.main()
        out, err = capsys.readouterr()
        assert ended.value.code == 2 and out == "" and err.count("\n") == 1
        assert err.startswith(f"gpu_proof.py: error: {sentence}"), err


def test_the_parts_find_the_packages_that_the_user_has_put_on_the_path(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "/x/packages:/y")
    env = gpu_proof.environment(small=False)
    assert env["PYTHONPATH"] == f"{ROOT}/tools:/x/packages:/y"
    code = "import sys, gpu_proof; print(*sys.path)"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    assert {"/x/packages", "/y"} <= set(done.stdout.split())
    monkeypatch.delenv("PYTHONPATH")
    assert gpu_proof.environment(small=False)["PYTHONPATH"] == f"{ROOT}/tools"


def test_without_git_or_a_repository_the_commit_is_unknown(monkeypatch, tmp_path):
    env = gpu_proof.environment(small=True)
    assert gpu_proof.commit_of({"PATH": str(tmp_path)}) == "unknown"  # there is no git
    monkeypatch.setattr(gpu_proof, "ROOT", tmp_path)  # here is no .git
    assert gpu_proof.commit_of(env | {"GIT_CEILING_DIRECTORIES": str(tmp_path)}) == "unknown"
    for command in (
        "init",
        "add .",
        "-c user.name=x -c user.email=x@y.z commit --allow-empty -m a",
    ):
        git = ["git", *command.split()]
        subprocess.run(git, cwd=tmp_path, env=env, check=True, capture_output=True)
    assert re.fullmatch(r"[0-9a-f]{7,}", gpu_proof.commit_of(env))


def test_parts_that_are_named_are_judged_alone(prove):
    assert prove("good")[0] == 0
    assert prove("last")[0] == 1 and prove("bad")[0] == 1


def test_card_and_versions_stand_beside_each_figure(prove, tmp_path):
    _, _, report = prove("good", versions={"torch": "2.13", "transformers": "5.23"})
    row = report["rows"][0]
    assert [row[name] for name in ("card", "torch", "transformers")] == [
        "H200, 139 GiB",
        "2.13",
        "5.23",
    ]
    page = (tmp_path / "results/COSTS.md").read_text()
    assert "| good | tests that pass | 9 | >= 1 | holds | H200, 139 GiB | 2.13 | 5.23 |" in page


def test_no_part_takes_more_than_ten_minutes(prove, monkeypatch):
    limits = []

    def quick(command: str, seconds: float, log: Path, env: dict) -> str:
        limits.append(seconds)
        log.write_text("9 passed")
        return "done"

    parts = [Part(name, 400, "true", ["tests that pass >= 1"]) for name in ("a", "b", "c")]
    monkeypatch.setattr(gpu_proof, "PARTS", parts)
    monkeypatch.setattr(gpu_proof, "do", quick)
    assert prove()[0] == 0
    assert limits[0] == 400 and limits[1:] == [600, 600]  # of what the others left


@pytest.mark.slow
def test_a_part_of_each_kind_in_small_on_a_cpu(tmp_path):
    """A bench, a run that is killed, a profile, worth.py and one without its model: they end, the
    figures are found, nothing is called a pass and results/ is left alone. (All: ten minutes.)"""
    watched = [ROOT / "results/COSTS.md", ROOT / "results/data/gpu_proof/gpu.json"]
    before = [path.stat().st_mtime_ns if path.exists() else 0 for path in watched]
    folder, parts = tmp_path / "a b", ("strace", "kill", "profile", "worth", "smollm2")
    command = [sys.executable, ROOT / "tools/gpu_proof.py", "--small", "--folder", folder, *parts]
    subprocess.run(command, capture_output=True)
    report = json.loads((folder / "gpu.json").read_text())
    states = {name: report["parts"][name]["status"] for name in parts}
    assert [name for name, x in states.items() if x != "done"] == ["smollm2"], states
    rows = [row for row in report["rows"] if row["part"] in parts]
    assert {row["verdict"].partition(":")[0] for row in rows} == {"skipped"}, rows
    for row in rows:
        if row["part"] != "smollm2" and "GiB" not in row["figure"]:
            assert row["measured"] is not None, row
    assert before == [path.stat().st_mtime_ns if path.exists() else 0 for path in watched]
