"""The bench runs through, on a shape small enough for a CPU."""

import json

import bench
import pytest
import torch
from accelerate.state import AcceleratorState
from support import TINY, random_batch
from transformers import AutoTokenizer

import grpo_arca
import grpo_oar


@pytest.mark.slow
@pytest.mark.parametrize("module", [grpo_arca, grpo_oar], ids=lambda m: m.__name__)
def test_shape_with_forced_lengths(module, tmp_path, monkeypatch):
    AcceleratorState._reset_state()  # it would refuse another --dtype than the test's before
    monkeypatch.setitem(bench.SHAPES, "0.6B", bench.Shape(64, 64, 1, 8, True))
    monkeypatch.setattr(bench, "VOCABULARY", 8192)
    monkeypatch.setattr(module, "row_uniforms", module.row_uniforms)  # restored afterwards
    argv = "--shape 0.6B --layers 1 --completions 8 --micro_batch 4 --prompt_tokens 5 --warmup 0"
    argv += f" --completion_tokens 40 --lengths lognormal --repeats 1 --cache {tmp_path}"
    argv += " -- --num_generations 4 --dtype bfloat16"
    options = bench.parse_options([module.__name__, *argv.split()])
    credits = list(options.methods[module.__name__])
    lines = bench.measure(module.__name__, credits, options)  # ends itself if a length is not kept
    assert "8 completions of at most 40 tokens (lognormal lengths)" in lines[0]
    assert "LoRA 32 in bfloat16, rollouts: dense" in lines[0]
    rows = [line for line in lines[4:] if line.startswith("|")]
    assert [line.split(" | ")[1] for line in rows] == credits
    assert [line.split(":")[0] for line in lines[4 + len(rows) :] if line] == [
        credit for credit in credits if credit == "oar_p"
    ]
    cells = [cell.strip() for cell in lines[4].strip("|").split("|")]
    assert float(cells[4]) > 0 and float(cells[8]) > 0  # tokens/s of rollout and update


def test_planted_answers_are_found():
    batch, tokenizer = random_batch(length=20), AutoTokenizer.from_pretrained(TINY)
    stops = batch.ids.clone()
    bench.plant_answers(batch, tokenizer)
    for ids, mask, before in zip(batch.ids, batch.mask, stops, strict=True):
        completion, count = ids[batch.prompt_width :][mask].tolist(), int(mask.sum())
        assert completion[-1] == before[batch.prompt_width + count - 1]  # the stop token stays
        if count > 8:
            begin, end = grpo_oar.answer_span(tokenizer, completion)
            assert tokenizer.decode(completion[begin:end]) == "7"


def test_the_figures_are_kept_as_data(tmp_path, capsys):
    """Of every script and method a line, with all repeats."""
    path, rows = tmp_path / "new/figures.jsonl", [{"step": torch.tensor(2.5)}, {"step": 3.0}]
    bench.save(path, "grpo_arca", {"uniform": rows, "TRL": []})
    bench.save(path, "grpo_oar", {"oar_g": rows[1:]})
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(x["script"], x["credit"], [row["step"] for row in x["rows"]]) for x in lines] == [
        ("grpo_arca", "uniform", [2.5, 3.0]),
        ("grpo_arca", "TRL", []),
        ("grpo_oar", "oar_g", [3.0]),
    ]
    with pytest.raises(SystemExit):
        bench.parse_options(["--json", str(path), "--against", str(bench.ROOT)])
    assert "leave out --against" in capsys.readouterr().err


OTHER_BENCH = """
import sys
from pathlib import Path
from types import SimpleNamespace
sys.path.insert(0, str(Path(__file__).parents[1]))
import grpo_arca
from common import SECONDS
def parse_options(argv):
    return argv
def prepare(module, credits, options):
    print("noise")  # must not be taken for an answer
    return module, credits, options
def step(bench, credit, repeat, others):
    assert bench == (grpo_arca, ["uniform", "arca"], FLAGS) and others == 0
    seconds = (SECONDS + repeat) * (2 if credit == "arca" else 1)
    names = "step seconds_rollout seconds_score seconds_credit seconds_update".split()
    return dict.fromkeys(names, seconds)
"""


def test_another_checkout_runs_in_turn_by_its_own_bench(tmp_path, monkeypatch, capsys):
    """Each checkout sees its own bench, script and common/, and the flags without --against; the
    warm-up does not count. Here 5, 6, 7 s a step, there, where it is in tests/, 2, 3, 4 s."""
    folders = {"here": "tools", "there": "tests"}
    for name, seconds in {"here": 4, "there": 1}.items():
        (tmp_path / name / folders[name]).mkdir(parents=True)
        (tmp_path / name / "common.py").write_text(f"SECONDS = {seconds}")
        (tmp_path / name / "grpo_arca.py").write_text("")
    argv = ["grpo_arca", "--credit", "uniform", "arca", "--repeats=3", "--warmup", "1"]
    rest = ["--", "--seed", "2"]
    for name in ("here", "there"):
        text = OTHER_BENCH.replace("FLAGS", repr(argv + rest))
        (tmp_path / name / folders[name] / "bench.py").write_text(text)
    monkeypatch.setattr(bench, "ROOT", tmp_path / "here")
    options = bench.parse_options([*argv, f"--against={tmp_path / 'there'}", *rest])
    lines = bench.compare("grpo_arca", ["uniform", "arca"], options)
    assert "1 of 4" in capsys.readouterr().err
    for line, credit, scale in zip(lines[4:], ("uniform", "arca"), (1, 2), strict=True):
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        assert cells[:5] == [credit] + ["2.000 (1.875 - 2.250)"] * 4
        assert [float(cell.split()[0]) for cell in cells[5:]] == [6 * scale, 3 * scale]


def test_another_checkout_has_its_own_common_wherever_the_bench_is_started(tmp_path, monkeypatch):
    """Older ones have a common/ without an __init__.py. Python prefers one with it, and that of
    the present folder would be found."""
    here = tmp_path / "here"
    there = tmp_path / "there"
    for folder in (here, there):
        (folder / "common").mkdir(parents=True)
        (folder / "common/data.py").write_text(f"NAME = '{folder.name}'")
    (here / "common/__init__.py").touch()
    (there / "tests").mkdir()
    code = "import sys\nsys.path.insert(0, r'{there}')\nfrom common.data import NAME\n"
    code += "def parse_options(argv): sys.modules['grpo_arca'] = sys\n"
    code += "def prepare(*_): return None\ndef step(*_): return {'name': NAME}\n"
    (there / "tests/bench.py").write_text(code.replace("{there}", str(there)))
    monkeypatch.chdir(here)
    with bench.worker(there / "tests", "grpo_arca", [], [], 0.0) as ask:
        assert ask("arca", 0) == {"name": "there"}


GRADING_BENCH = """
from collections import namedtuple
from types import SimpleNamespace
Bench, Problem = namedtuple("Bench", "run data"), namedtuple("Problem", "steps")
class RandomRewards:
    def grade(self, texts, answers):
        return [1.0] * len(texts)
def parse_options(argv):
    assert argv == ["grpo_arca", "--shape", "8B", "--layers", "2", "--", "--seed", "2"]
import sys
sys.modules["grpo_arca"] = SimpleNamespace()
def prepare(module, credits, options):
    run = SimpleNamespace(args=SimpleNamespace(num_generations=4), grader=RandomRewards())
    return Bench(run, ([Problem((3, 6))], []))
def step(bench, credit, repeat, others):
    assert not bench.data[0][0].steps or {IDLE} == 0  # random rewards hang on no step
    rewards = bench.run.grader.grade([""] * 32, [""] * 32)
    groups = [rewards[i : i + 4] for i in range(0, 32, 4)]
    return {"idle": sum(len(set(group)) == 1 for group in groups), "rewards": rewards}
"""


@pytest.mark.parametrize(("idle", "count"), [(0.75, 6), (0.0, 8)])
def test_idle_groups_are_the_same_in_a_checkout_that_knows_none(tmp_path, idle, count):
    """Whose bench is asked for none, too: then its own rewards are used."""
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests/bench.py").write_text(GRADING_BENCH.replace("{IDLE}", str(idle)))
    argv = ["grpo_arca", "--shape", "8B", "--layers", "2"]
    argv += ["--idle", str(idle), "--against", str(tmp_path), "--", "--seed", "2"]
    options = bench.parse_options(argv)
    assert options.idle == idle
    with bench.worker(tmp_path / "tests", "grpo_arca", [], options.shared, options.idle) as ask:
        rows = [ask("arca", repeat) for repeat in range(3)]
    assert [row["idle"] for row in rows] == [count] * 3
    if idle:
        own = bench.RandomRewards(idle, 4)
        assert [row["rewards"] for row in rows] == [own.grade([""] * 32, [""] * 32) for _ in rows]


@pytest.mark.parametrize("argv", [["--idle", "-0.5"], ["--idle", "2", "--shape", "8B"]])
def test_idle_is_a_share_of_the_groups(argv, capsys):
    with pytest.raises(SystemExit):
        bench.parse_options([*argv, "--layers", "1"])
    assert "--idle is a share" in capsys.readouterr().err


def test_continuous_batching_has_equal_lengths_alone(capsys):
    shape = ["--shape", "0.6B", "--layers", "1", "grpo_arca"]
    assert bench.parse_options([*shape, "--trl_continuous"]).trl_continuous
    with pytest.raises(SystemExit):
        bench.parse_options([*shape, "--trl_continuous", "--lengths", "lognormal"])
    assert "--trl_continuous cannot force --lengths lognormal" in capsys.readouterr().err


def test_a_checkout_that_fails_ends_the_comparison_with_a_sentence(tmp_path, capsys):
    with pytest.raises(SystemExit):
        bench.parse_options(["grpo_arca", "--against", str(tmp_path)])
    assert "there is no tools/bench.py in it" in capsys.readouterr().err
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests/bench.py").write_text("broken")
    bench.parse_options(["grpo_arca", "--against", str(tmp_path)])
    broken = bench.worker(tmp_path / "tests", "", [], [], 0)
    with pytest.raises(SystemExit, match="failed, see above"), broken:
        pass


def test_lengths():
    assert bench.forced_lengths("equal", 3, 7).tolist() == [7, 7, 7]
    lengths = bench.forced_lengths("lognormal", 64, 300).float()
    assert 0.9 < lengths.mean() / 100 < 1.05 and lengths.max() <= 300 and lengths.std() > 30
    torch.testing.assert_close(lengths, bench.forced_lengths("lognormal", 64, 300).float())


def test_a_shape_needs_a_gpu_or_fewer_layers(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        bench.parse_options(["--shape", "8B"])
    assert "needs a GPU" in capsys.readouterr().err


def test_the_peak_on_a_cpu_is_what_was_used_since_the_last_look():
    device = torch.device("cpu")
    before = bench.allocated_gib(device)
    bench.peak_gib(device)
    block = torch.ones(2**27)  # half a GiB
    del block
    assert 0.4 < bench.peak_gib(device, before) < 0.7
    assert abs(bench.peak_gib(device, before)) < 0.2


@pytest.mark.parametrize("flag", ["--repeats=0", "--warmup=-1", "--micro_batch=0"])
def test_nothing_to_measure_is_refused(flag, capsys):
    with pytest.raises(SystemExit):
        bench.parse_options(["grpo_arca", flag, "--completions=16"])
    name = "--micro_batch" if "micro" in flag else "--repeats"
    assert f"{name} must be at least 1" in capsys.readouterr().err


def test_methods_get_the_same_random_rewards_in_a_repeat(monkeypatch):
    """Whatever their order."""
    given = []
    grade = bench.RandomRewards.grade

    def grade_and_note(self, *inputs):
        given.append(grade(self, *inputs))
        return given[-1]

    monkeypatch.setattr(bench.RandomRewards, "grade", grade_and_note)
    argv = ["grpo_arca", "--idle", "0.5", "--completions", "32", "--micro_batch", "16"]
    options = bench.parse_options([*argv, "--completion_tokens", "8"])
    prepared = bench.prepare(grpo_arca, ["uniform", "surprisal"], options)
    for credit, repeat in (("uniform", 0), ("surprisal", 0), ("uniform", 1)):
        bench.step(prepared, credit, repeat, 0.0)
    first, second, third = given
    assert first == second != third
