"""results/compare.py on made-up runs, learning.py on a made-up script, the sums of smollm2.py."""

import csv
import importlib.util
import json
import re
import shutil
import subprocess
import sys
from decimal import Decimal
from pathlib import Path

import numpy as np
import pytest

from common.data import Problem, first_error, parse_rows

RESULTS = Path(__file__).resolve().parents[2] / "results"
PNG = b"\x89PNG\r\n\x1a\n"


def load(name: str):
    spec = importlib.util.spec_from_file_location(f"results_{name}", RESULTS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


compare, learning, smollm2 = load("compare"), load("learning"), load("smollm2")


def fake_run(folder: Path, script: str, credit: str, seed: int, steps: int = 20, **flags) -> Path:
    """What a run of 20 steps leaves after `steps` of them: reward 0.01 a step, more by the seed."""
    out = folder / f"{script}-{credit}-{seed}{''.join(f'-{x}' for x in flags.values())}"
    out.mkdir(parents=True)
    config = {"credit": credit, "seed": seed, "output_dir": str(out), "run_name": out.name}
    config |= {"max_steps": 20, "learning_rate": 0.004} | flags
    config["environment"] = {"command": [f"/x/{script}.py", str(seed)], "commit": str(seed)}
    rows = [{"step": 0, "eval": {"sampled_accuracy": 0.3}}]
    rows += [{"step": s, "reward": 0.01 * s + 0.1 * seed} for s in range(1, steps + 1)]
    if steps == 20:
        rows.append({"step": 20, "eval": {"sampled_accuracy": 0.5 + 0.1 * seed}})
    (out / "config.json").write_text(json.dumps(config))
    (out / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return out


def draw(cwd: Path, *arguments: object) -> subprocess.CompletedProcess:
    command = [sys.executable, RESULTS / "compare.py", *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True)


def test_runs_that_differ_in_the_seed_alone_are_one_group(tmp_path):
    runs = [fake_run(tmp_path, "grpo_arca", c, s) for c in ("arca", "uniform") for s in (1, 2, 3)]
    groups = compare.groups_of(runs)
    assert list(groups) == ["arca", "uniform"]
    for members in groups.values():
        assert [run.accuracy for run in members] == pytest.approx([0.6, 0.7, 0.8])
        assert [len(run.rewards) for run in members] == [20] * 3
    assert groups["arca"][1].rewards[:2] == pytest.approx([0.21, 0.22])


def test_labels_name_what_differs_and_nothing_else(tmp_path):
    runs = [
        fake_run(tmp_path, "grpo_arca", "arca", 1, sharpening=1.0),
        fake_run(tmp_path, "grpo_arca", "arca", 1, sharpening=2.0),
        fake_run(tmp_path, "grpo_oar", "oar_g", 1),
        fake_run(tmp_path, "grpo_oar", "uniform", 1, learning_rate=0.001),
    ]
    assert list(compare.groups_of(runs)) == [
        "grpo_arca arca learning_rate=0.004 sharpening=1.0",
        "grpo_arca arca learning_rate=0.004 sharpening=2.0",
        "grpo_oar oar_g learning_rate=0.004",
        "grpo_oar uniform learning_rate=0.001",
    ]
    assert list(compare.groups_of(runs[2:3])) == ["oar_g"]
    both = compare.groups_of([runs[0], runs[2]])  # a method's own flag tells nothing
    assert list(both) == ["grpo_arca arca", "grpo_oar oar_g"]
    config = json.loads((runs[0] / "config.json").read_text())
    del config["environment"], config["sharpening"]  # of an older version of the script
    older = tmp_path / "grpo_arca-older"
    shutil.copytree(runs[0], older)
    (older / "config.json").write_text(json.dumps(config))
    assert list(compare.groups_of([runs[0], older])) == ["arca sharpening=1.0", "arca"]


def test_a_picture_of_any_runs_goes_to_the_current_folder(tmp_path):
    runs = [fake_run(tmp_path / "runs", "x", c, s) for c in ("a", "$^{_{\n$") for s in (1, 2, 3)]
    done = draw(tmp_path, *runs)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "compare.png\n1  a\n2  $^{_{ $\n"
    assert (tmp_path / "compare.png").read_bytes().startswith(PNG)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["compare.png", "runs"]


def test_what_a_run_does_is_not_where_it_writes_nor_on_what_it_runs(tmp_path):
    """Two processes of half the batch make the same updates."""
    batch = "per_device_train_batch_size gradient_accumulation_steps steps_per_generation".split()

    def run(seed: int, sizes: tuple[int, int, int], processes: int = 1, **flags) -> Path:
        flags = dict(zip(batch, sizes, strict=True)) | flags
        out = fake_run(tmp_path / str(seed), "x", "a", seed, **flags)
        config = json.loads((out / "config.json").read_text())
        config["environment"]["hardware"] = {"processes": processes}
        (out / "config.json").write_text(json.dumps(config))
        return out

    same = [run(1, (32, 4, 4)), run(2, (16, 4, 4), 2), run(3, (16, 8, 8), save_steps=7)]
    more = "report_to run_name gradient_checkpointing num_processes per_device_eval_batch_size"
    same += [run(4 + i, (32, 4, 4), **{name: "?"}) for i, name in enumerate(more.split())]
    assert [len(members) for members in compare.groups_of(same).values()] == [len(same)]
    others = [run(98, (32, 4, 8)), run(99, (16, 4, 4))]
    assert list(compare.groups_of([*same, *others])) == [
        "a completions_per_update=128 updates_per_rollout=1.0",
        "a completions_per_update=128 updates_per_rollout=2.0",
        "a completions_per_update=64 updates_per_rollout=1.0",
    ]


@pytest.fixture
def drawn(tmp_path, monkeypatch):
    """drawn(runs) -> the figure, its left and its right panel."""
    figures, made = [], compare.plt.subplots
    monkeypatch.setattr(
        compare.plt, "subplots", lambda *a, **k: figures.append(made(*a, **k)) or figures[-1]
    )

    def draw_runs(runs: list[Path]) -> tuple:
        compare.draw(compare.groups_of(runs), str(tmp_path / "c.png"))
        figure, panels = figures[-1]
        return figure, *panels

    return draw_runs


def test_long_names_stand_below_the_panels_and_within_the_picture(tmp_path, drawn):
    runs = [fake_run(tmp_path / str(i), "x", "a", 1) for i in range(5)]
    for i, run in enumerate(runs):
        config = json.loads((run / "config.json").read_text())
        config |= {f"a_flag_of_some_length_{n}": f"org/a-name-of-some-length{i}" for n in range(12)}
        config["p"] = "word " * 300 * i
        (run / "config.json").write_text(json.dumps(config))
    figure, left, right = drawn(runs)
    figure.draw_without_rendering()
    texts = [text.get_window_extent() for text in figure.legends[0].get_texts()]
    panels = [panel.get_tightbbox() for panel in (left, right)]
    for box in (*texts, *panels):
        assert all(figure.bbox.padded(1).contains(*x) for x in (box.min, box.max)), box
    assert min(panel.ymin for panel in panels) >= max(text.ymax for text in texts)
    assert min(panel.height for panel in panels) > 300  # of 440 dots or more
    inside = [text.get_window_extent() for text in right.texts]
    assert len(inside) == 5 and all(right.bbox.padded(1).contains(*b.max) for b in inside)
    for boxes in (texts, inside):  # the first is the highest, and none touches the next
        assert all(upper.ymin >= lower.ymax for upper, lower in zip(boxes, boxes[1:]))


def test_each_group_has_its_line_band_and_dots(tmp_path, drawn):
    runs = [fake_run(tmp_path, "x", c, s) for c in ("a", "b") for s in (1, 2, 3)]
    figure, left, right = drawn(runs)
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["1  a", "2  b"]
    x, y = left.lines[0].get_data()
    assert list(x) == list(range(2, 20)) and y == pytest.approx(0.01 * x + 0.2)  # windows of 3
    band = left.collections[0].get_paths()[0].vertices[:, 1]
    assert (band.min(), band.max()) == pytest.approx((0.12, 0.49))
    dots, mean = right.lines[0], right.lines[1]
    assert list(dots.get_xdata()) == pytest.approx([0.6, 0.7, 0.8])
    assert list(mean.get_xdata()) == pytest.approx([0.7, 0.7])


def test_what_is_not_a_finished_run_is_left_out_with_a_line_each(tmp_path):
    good = fake_run(tmp_path, "x", "a", 1)
    unfinished = fake_run(tmp_path, "x", "a", 2, steps=7)
    torn = fake_run(tmp_path, "x", "a", 3)
    (torn / "metrics.jsonl").write_text('{"step": 1, "rew')
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_text('{"max_steps": 3}')
    (other / "metrics.jsonl").write_text('{"step": 3, "eval": {"sampled_accuracy": 1}}\n[]')
    file = tmp_path / "file"
    file.write_text("")
    bad = [unfinished, torn, other, file, tmp_path / "none"]
    done = draw(tmp_path, good, *bad)
    assert done.returncode == 0
    lines = done.stderr.splitlines()
    assert len(lines) == len(bad)
    for path, line in zip(bad, lines):
        assert line.startswith(f"compare.py: {path} is left out: ")
    assert "has not come to the end of step 20" in lines[0] and "has no config.json" in lines[4]
    done = draw(tmp_path, *bad)
    assert done.returncode == 2 and done.stderr.splitlines()[-1].startswith("compare.py: error: ")


@pytest.mark.slow
def test_without_arguments_it_draws_the_measured_runs_and_never_into_results(tmp_path):
    before = (RESULTS / "data/compare.png").stat()
    done = draw(tmp_path, "--output", tmp_path / "here.png")
    assert done.returncode == 0 and "1  uniform (GRPO)\n2  arca\n" in done.stdout
    assert (tmp_path / "here.png").read_bytes().startswith(PNG)
    done = draw(RESULTS / "data")  # where its default would be the committed picture
    assert done.returncode == 2 and "--output" in done.stderr
    assert (RESULTS / "data/compare.png").stat() == before
    for output in ("none/a.png", "a.none"):
        done = draw(tmp_path, "--output", output)
        assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
        assert done.stderr.startswith(f"compare.py: error: cannot write {output}: ")


# ------------------------------------------------------------------------------- learning.py


@pytest.fixture
def project(tmp_path, monkeypatch) -> Path:
    """A root with an empty results/data/, where a run only notes its command line."""
    (tmp_path / "results/data").mkdir(parents=True)
    commands = tmp_path / "commands.txt"

    def run(command, **_):
        seed, folder = int(command[-3]), Path(command[-1])
        fake_run(tmp_path / "fakes", "x", "a", seed).rename(folder)
        rows = [json.loads(line) for line in (folder / "metrics.jsonl").open()]
        phases = ("seconds_rollout", "seconds_score", "seconds_credit", "seconds_update")
        more = dict.fromkeys((*phases, "weight_gini", "weight_effn"), 0.5)
        text = "".join(json.dumps(more | row) + "\n" for row in rows)
        (folder / "metrics.jsonl").write_text(text)
        figures = {"sampled_accuracy": 0.5 + 0.1 * seed, "greedy_accuracy": 0.5}
        (folder / "summary.json").write_text(json.dumps({"before": figures, "after": figures}))
        with commands.open("a") as file:
            file.write(" ".join(command[3:]) + "\n")

    (tmp_path / "runs").mkdir()
    monkeypatch.setattr(learning, "ROOT", tmp_path)
    monkeypatch.setattr(learning.subprocess, "run", run)
    return tmp_path


def learn(monkeypatch, line: str) -> None:
    monkeypatch.setattr(sys, "argv", ["learning.py", *line.split()])
    learning.main()


def test_learning_prints_and_writes_only_when_told_to(project, monkeypatch, capsys):
    learn(monkeypatch, "grpo_x.py --seeds 1 2 3 --credit b --seed 9 --lora_target_modules q v")
    out = capsys.readouterr().out
    assert "seed 3: sampled 0.800" in out and "after: 0.700 +- 0.100" in out
    lines = (project / "commands.txt").read_text().splitlines()
    flags = "--credit b --seed 9 --lora_target_modules q v"
    name = "grpo_x-b-seed-9-lora_target_modules-q-v"
    assert lines == [
        f"grpo_x.py {flags} --seed {s} --output_dir {project}/runs/{name}-{s}" for s in (1, 2, 3)
    ]
    assert list((project / "results/data").iterdir()) == []


def test_what_learning_writes_is_what_compare_draws(project, monkeypatch):
    learn(monkeypatch, "grpo_arca.py --write --seeds 2 --credit uniform")
    folder = project / "results/data"
    assert [path.name for path in folder.iterdir()] == ["grpo_arca-uniform.json"]
    monkeypatch.setattr(compare, "FOLDER", folder)
    (run,) = compare.measured()["uniform (GRPO)"]
    assert run.accuracy == pytest.approx(0.7) and len(run.rewards) == 20
    assert learning.name_of("grpo_arca.py", []) == "grpo_arca-default"


# --------------------------------------------------------------------------------------------------
# The real model's task
# --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("number", "result"), [(9, 18), (3, 9)])
def test_sums_are_right_different_and_as_many_as_said(tmp_path, number, result):
    smollm2.save_sums(tmp_path / "sums.jsonl", {1: 20, 3: 9}, number, result)
    rows = [json.loads(line) for line in (tmp_path / "sums.jsonl").open()]
    asked = [row["prompt"][-1]["content"] for row in rows]
    examples = [message["content"] for message in rows[0]["prompt"][1:-1]]
    assert len({*asked, *examples[::2]}) == 29 + 3
    assert [len(row["steps"]) for row in rows] == [1] * 20 + [3] * 9
    for row, text in zip(rows, asked, strict=True):
        first, *rest = text.split()
        values = [int(first)]
        for sign, term in zip(rest[::2], rest[1::2], strict=True):
            values.append(values[-1] + int(sign + term))
        assert row["steps"] == values[1:] and row["answer"] == str(values[-1])
        assert min(values) >= 1 and max(values[1:]) <= result
        assert max(map(int, rest[1::2])) <= number
    assert examples[:2] == ["7 + 4 - 4", "7 + 4 = 11. 11 - 4 = 7. \\boxed{7}"]
    problems = parse_rows(rows, "sums", None, None)
    worked = smollm2.worked(5, [("+", 3), ("-", 7), ("+", 1)])
    assert worked == ("5 + 3 - 7 + 1", "5 + 3 = 8. 8 - 7 = 1. 1 + 1 = 2. \\boxed{2}", [8, 1, 2])
    solved = Problem(worked[0], "2", tuple(worked[2]), opening=problems[0].opening)
    assert first_error(worked[1], solved) is None


# --------------------------------------------------------------------------------------------------
# The READMEs
# --------------------------------------------------------------------------------------------------
NUMBER = r"([+-]?\d+\.\d+)"
INTERVAL = re.compile(rf"{NUMBER}\*{{0,2}} \({NUMBER} (?:-|to) {NUMBER}\)")


def measured_intervals() -> list[tuple[float, float, float]]:
    """Every figure of data/*.csv that has a low and a high end."""
    found = []
    for path in sorted((RESULTS / "data").glob("*.csv")):
        for row in csv.DictReader(path.open()):
            names = [name.removesuffix("_low") for name in row if name.endswith("_low")]
            for name in names:
                value = {"area": "area_more", "end": "end_more", "share": "share_of_rollouts"}
                cells = [row[value.get(name, name)], row[f"{name}_low"], row[f"{name}_high"]]
                found += [tuple(map(float, cells))] if all(cells) else []
    return found


@pytest.mark.parametrize("name", ["README.md", "results/README.md"])
def test_an_interval_in_a_readme_is_one_of_the_data(name):
    """Or one of tests/bench.py's times, which have no file but stand in one section, for both."""
    text, of_results = (RESULTS.parents[0] / name).read_text(), (RESULTS / "README.md").read_text()
    begin, end = of_results.index("## What a step costs"), of_results.index("## On a GPU")
    times = [x[0].replace("*", "") for x in INTERVAL.finditer(of_results[begin:end])]
    measured, checked = measured_intervals(), 0
    for match in INTERVAL.finditer(text):
        numbers, places = list(map(float, match.groups())), len(match[1].partition(".")[2])
        near = [abs(x) * 6e-4 + 0.51 * 10**-places for x in numbers]  # files have 4 digits
        pairs = [list(zip(row, numbers, near, strict=True)) for row in measured]
        in_a_file = any(all(abs(a - b) < c for a, b, c in triples) for triples in pairs)
        assert in_a_file or match[0].replace("*", "") in times, f"{match[0]} is in no file of data/"
        checked += 1
    assert checked > (5 if name == "README.md" else 60)


def numbers_in(text: str) -> list[tuple[float, float]]:
    """Each number, with the half of its last place and what the 4 digits of a file leave open."""
    found = re.findall(r"(?<![\w.])[+-]?(?:\d*\.\d+|\d+)(?:e-\d+)?(?![\w.]*\d)", text)
    places = [Decimal(x).as_tuple().exponent for x in found]
    return [(float(x), 0.51 * 10**n + 6e-4 * abs(float(x))) for x, n in zip(found, places)]


def tables(heading: str) -> list[dict[str, str]]:
    """The rows of all tables of a section of results/README.md that begin with a credit."""
    section = (RESULTS / "README.md").read_text().partition(f"\n## {heading}\n")[2]
    lines = [line for line in section.partition("\n## ")[0].splitlines() if line[:2] == "| "]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    header = next(row for row in cells if row[0] == "credit")
    return [dict(zip(header, row, strict=True)) for row in cells if row != header]


def in_the_files(name: str) -> dict[tuple[str, str], dict[str, list[float]]]:
    """(regime, method) -> what a README's column of that name must say."""
    with (RESULTS / f"data/{name}.csv").open() as methods:
        rows = list(csv.DictReader(methods))
    with (RESULTS / f"data/{name}_runs.csv").open() as runs:
        runs, found = list(csv.DictReader(runs)), {}
    for row in rows:
        pair = row["regime"], row["method"]
        own = [run for run in runs if (run["regime"], run["method"]) == pair]
        greedy = [float(run["greedy_accuracy"]) for run in own]
        found[pair] = {"rate": [float(row["rate"])], "seeds": [len(own)], "greedy": greedy}
        found[pair]["greedy at the end"] = [min(greedy), max(greedy)]
        found[pair]["pass@4"] = [sum(float(run["pass@4"]) for run in own) / len(own)]
        found[pair]["ends of seeds 1, 2, 3, 4"] = [
            float(run["accuracies"].split()[-1]) for run in own
        ]
        found[pair]["peak, GiB"] = [float(row["peak_gb"])]
        for key in ("area", "end"):
            more = [float(row[key + end]) for end in ("_more", "_low", "_high")]
            whole = row["method"] == "uniform (GRPO)"
            found[pair][key] = [float(row[key])] if whole else more[: 1 if more[1] < -9 else 3]
    return found


@pytest.mark.parametrize(
    "heading, name, count",
    [("Learning", "learning_curves", 30), ("A real language model", "learning_curves_smollm2", 50)],
)
def test_a_row_of_a_learning_table_is_its_methods_row_of_the_file(heading, name, count):
    found, checked = in_the_files(name), 0
    first = next(iter(found))[0]
    for row in tables(heading):
        method = row["credit"].partition(" (seed")[0]
        for header, cell in row.items():
            regime, _, column = header.rpartition(": ")
            expected = found.get((regime or first, method), {}).get(column)
            if cell and expected:
                said = numbers_in(cell)
                assert len(said) == len(expected), (method, header)
                assert all(abs(x - y) < near for (x, near), y in zip(said, expected)), (
                    method,
                    header,
                )
                checked += 1
    assert checked > count


def numbers_of_the_data() -> np.ndarray:
    """Of all tables and reports of data/, and shares of right completions and lengths put into the
    formula of "Where will they help?"."""
    texts = [path.read_text() for path in (RESULTS / "data").glob("*.*") if path.suffix != ".png"]
    found = [float(x) for text in texts for x in re.findall(r"-?\d+\.?\d*(?:e-\d+)?", text)]
    for path in (RESULTS / "data").glob("worth_*.csv"):
        row = next(csv.DictReader(path.open()))
        if "reward" in row:
            p, r = float(row["reward"]), float(row["below_over_above"])
            found.append((1 - p) * (1 - p + p * r))
    return np.array(found)


@pytest.mark.parametrize("name", ["README.md", "results/README.md"])
def test_a_decimal_number_of_a_readme_stands_in_a_file(name):
    """But for those of code and links, and of the section whose times no file has."""
    text, of_results = (RESULTS.parents[0] / name).read_text(), (RESULTS / "README.md").read_text()
    begin, end = of_results.index("## What a step costs"), of_results.index("## On a GPU")
    costs = [x for x, _ in numbers_in(of_results[begin:end])]
    text = text.replace(of_results[begin:end], "")
    text = re.sub(r"```.*?```|`[^`]*`|\]\(.*?\)|arXiv\s\S+|\[\d{4}\.\d+", "", text, flags=re.S)
    text = re.sub(r"(?:TRL|torch|Python|2 to|Ernie|Qwen) ?\d\.\d+(?:\.\d+)?", "", text)
    measured, checked = np.concatenate([numbers_of_the_data(), costs]), 0
    for value, near in numbers_in(text):
        if value % 1:
            said = [(value, near), (value / 100, near / 100)]  # of a percentage
            assert any((abs(abs(measured) - abs(x)) < y).any() for x, y in said), value
            checked += 1
    assert checked > (30 if name == "README.md" else 400)
