"""tools/worth.py: its gradients are those that training makes, its statistics those of loops."""

import importlib
import itertools
import warnings

import numpy as np
import pytest
import torch
import worth
from accelerate.state import AcceleratorState
from fork import fork
from support import ROOT, TINY, gradient_of_update, refusal

import grpo_arca
import grpo_oar

SMALL = (
    "--per_device_train_batch_size=8", "--gradient_accumulation_steps=2", "--num_generations=4",
    "--max_completion_length=60",
)  # fmt: skip
RIGHT_ALONE = f"{ROOT}/grpo_arca.py --credit uniform --negative_weight 0"
METHOD = str(ROOT / "methods/entropy_mask.py")


# ---- Gradients -----------------------------------------------------------------------------------
@pytest.fixture
def start_flags(tmp_path, make_run) -> tuple[str, ...]:
    """Flags that start from an adapter that acts."""
    make_run(adapter=0.02).model.save_pretrained(tmp_path / "adapter")
    AcceleratorState._reset_state()
    return (*SMALL, "--start_adapter", str(tmp_path / "adapter"))


def measured(folder, methods: list[str], flags: tuple[str, ...], updates=0):
    """Returns what worth.py measures of batch 3."""
    path = folder / "3.pt"
    worth.measure(path, {name: name for name in methods}, flags, updates, 2**30)
    return worth.load(path)


def trained_gradient(module, flags: list[str], updates: int = 0) -> torch.Tensor:
    """Returns what is in .grad when a run of the script steps on the same rollout.

    It is the one after so many others.
    """
    AcceleratorState._reset_state()
    own = ["--max_grad_norm=0", "--lr_scheduler_type=constant"]
    run = module.Run(module.parse_args([*worth.FIRST_FLAGS, *flags, *own]))
    run.updates_per_rollout = updates + 1
    run.step = 3 * run.updates_per_rollout
    batch = module.collect(run, {})
    micros = list(itertools.chain.from_iterable(module.micro_batches(run, batch)))
    module.score(run, batch, micros, {})
    for _ in range(updates):
        module.update(run, micros)
    return gradient_of_update(module, run, micros)


def test_a_batch_gradient_is_the_one_that_training_would_make(start_flags, tmp_path):
    found = measured(tmp_path, [worth.UNIFORM, RIGHT_ALONE], start_flags)
    flags = [*start_flags, "--credit", "uniform"]
    for name, own in {worth.UNIFORM: "1", RIGHT_ALONE: "0"}.items():
        expected = trained_gradient(grpo_arca, [*flags, "--negative_weight", own])
        assert torch.allclose(found[name], expected, rtol=1e-4, atol=1e-7), name


@pytest.mark.slow
def test_gradients_of_other_scripts_and_after_updates_are_those_of_training(
    start_flags, tmp_path, monkeypatch
):
    """A file of a method is measured as its fork, and the policy is afterwards what it was."""
    (tmp_path / "grpo_mask.py").write_text(fork(ROOT / "methods/entropy_mask.py"))
    monkeypatch.syspath_prepend(tmp_path)
    modules = {f"{ROOT}/grpo_oar.py": grpo_oar, METHOD: importlib.import_module("grpo_mask")}
    before = measured(tmp_path, list(modules), start_flags)
    for name, module in modules.items():
        expected = trained_gradient(module, [*start_flags, "--model_name_or_path", TINY])
        assert torch.allclose(before[name], expected, rtol=1e-4, atol=1e-7), name
    after = measured(  # at a constant rate, the same in every batch
        tmp_path / "after", [worth.UNIFORM], (*start_flags, "--lr_scheduler_type=cosine"), updates=2
    )
    expected = trained_gradient(grpo_arca, [*start_flags, "--credit", "uniform"], updates=2)
    assert torch.allclose(after[worth.UNIFORM], expected, rtol=1e-4, atol=1e-7)
    again = measured(tmp_path / "again", [METHOD], start_flags)
    assert torch.equal(again[METHOD], before[METHOD])


@pytest.mark.slow
def test_the_control_is_the_sum_over_every_other_group(start_flags, tmp_path):
    found = measured(tmp_path, [worth.HALF], start_flags)[worth.HALF]
    run = worth.prepare(start_flags)
    rollout = grpo_arca.collect(run, {})
    rollout.advantages[(rollout.rows >= 4) & (rollout.rows < 8) | (rollout.rows >= 12)] = 0.0
    (micros,) = grpo_arca.micro_batches(run, rollout)
    grpo_arca.score(run, rollout, micros, {})
    assert torch.allclose(found, worth.gradient(grpo_arca, run, micros), atol=1e-7)


# ---- The statistics ------------------------------------------------------------------------------
def test_pair_means_are_those_of_two_loops():
    rng = np.random.default_rng(0)
    own, other = rng.normal(size=(2, 5, 3))
    weights = np.array([[1, 1, 1, 1, 1], [2, 0, 3, 0, 0]])
    for row, found in zip(weights, worth.pair_mean(own @ other.T, weights), strict=True):
        drawn = np.repeat(np.arange(5), row)
        pairs = [own[i] @ other[j] for i, j in itertools.product(drawn, drawn) if i != j]
        assert found == pytest.approx(np.mean(pairs))


def test_figures_of_gradients_made_to_measure():
    """GRPO's have a mean of length 1 and a variance of 4. Units are nothing to Adam."""
    rng = np.random.default_rng(1)
    mean = np.zeros(300)
    mean[0] = 1.0
    turned = np.zeros(300)
    turned[:2] = 0.6, 0.8
    noise = rng.normal(size=(5, 400, 300)) * (4 / 300) ** 0.5
    made = {
        worth.UNIFORM: mean + noise[0],
        worth.HALF: mean + noise[1] * 2**0.5,
        "less noise": mean + noise[2] / 2**0.5,
        "scaled": 7e-9 * (mean + noise[3]),
        "turned": turned + noise[4],
        "none": np.zeros((400, 300)),
    }
    with warnings.catch_warnings(action="ignore"):
        rows = {row["method"]: row for row in worth.figures(made)}
    assert worth.verdict(rows["none"]) == "cannot be told"
    assert rows[worth.UNIFORM]["snr"] == pytest.approx(0.25, rel=0.1)
    expected = {worth.HALF: (0.5, 1), "less noise": (2, 1), "scaled": (1, 1), "turned": (1, 0.6)}
    for name, (size, direction) in expected.items():
        row = rows[name]
        assert row["worth"] == pytest.approx(size, rel=0.15), name
        assert row["direction"] == pytest.approx(direction, abs=0.05), name
    units = rng.uniform(0.01, 100, 300)
    in_other_units = worth.as_adam_sees(made["turned"] * units)
    assert in_other_units == pytest.approx(worth.as_adam_sees(made["turned"]))


# ---- Verdicts ------------------------------------------------------------------------------------
def shown_row(**figures: float | str) -> dict:
    """Returns a row of the table, whose figures are 1 where nothing else is given."""
    row: dict = {"method": "x"}
    for key in worth.PRINTED_FIGURES:
        row |= worth.with_interval(key, np.ones(3))
    return row | figures


@pytest.mark.parametrize(
    ("key", "low", "value", "high", "direction", "words"),
    [
        ("adam", 1.01, 1.2, 1.4, 1.02, "better than GRPO"),
        ("adam", 2.9, 3.3, 3.8, 0.8, "better than GRPO; in another direction"),
        ("adam", 0.45, 0.5, 0.6, 0.8, "worse than GRPO; in another direction"),
        ("adam", 1.0, 1.0, 1.0, 1.0, "the same as GRPO"),
        ("adam", 0.992, 0.995, 0.998, 0.5, "within 2% of GRPO; in another direction"),
        ("adam", 0.999, 1.2, 1.21, 1.0, "cannot be told"),
        ("worth", 0.4, 0.5, 0.6, 1.0, "control: holds"),
        ("worth", 0.52, 0.6, 0.9, 1.0, "control: does not hold, take more --batches"),
        ("worth", 0.1, 0.6, 2.9, 1.0, "control: does not hold, take more --batches"),
    ],
)
def test_a_verdict_is_what_the_intervals_say(key, low, value, high, direction, words):
    """Of a method that of `adam` counts, and of the control that of `worth`."""
    row = shown_row(method={"adam": "x", "worth": worth.HALF}[key], direction_high=direction)
    row |= {key: value, f"{key}_low": low, f"{key}_high": high}
    assert worth.verdict(row) == words


def test_the_table_shows_no_cosine_above_1_and_no_figure_without_signal():
    row = shown_row(direction=1.02, direction_low=-3.4e12, verdict="the same as GRPO")
    head, line = worth.report([row]).splitlines()
    assert head.split() == [*worth.PRINTED_FIGURES, "verdict"]
    ones = "1.00 (1.00 - 1.00) " * 2
    assert " ".join(line.split()) == f"x {ones}1.00 (? - 1.00) the same as GRPO"


# ---- The command ---------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--batches", "3"], "--batches must be at least 4"),
        (["--", "--num_generations", "128"], "make their number even"),
        (["grpo_arca.py --temperature 0.7"], "makes other batches: give it to all, after --"),
        (["tools/compare.py"], "one or two regions between CREDIT marks"),
    ],
)
def test_what_would_be_silently_wrong_is_refused(run_tool, monkeypatch, capsys, words, sentence):
    monkeypatch.chdir(ROOT)
    said = refusal(run_tool, worth, "--processes", 1, *words)
    assert sentence in said + capsys.readouterr().err


@pytest.mark.slow
def test_a_method_is_measured_once_and_again_when_it_changes(start_flags, run_tool, tmp_path):
    mine = tmp_path / "mine.py"
    body = "def token_scores(run, micro, metrics):\n    return micro.entropy"
    mine.write_text(f'"""Mine."""\n# === CREDIT ===\n{body}\n# === END CREDIT ===\n')
    command = [
        mine, "--batches", 4, "--processes", 1, "--folder", tmp_path / "worth", "--output",
        tmp_path / "table.csv", "--", *start_flags,
    ]  # fmt: skip
    out, err = run_tool(worth, *command)
    assert "4/4" in err
    assert run_tool(worth, *command) == (out, "")  # all is there

    mine.write_text(mine.read_text().replace("entropy", "entropy + 1"))
    assert "4/4" in run_tool(worth, *command).err
    assert "4/4" in run_tool(worth, *command, "--negative_weight", 0).err  # of GRPO, too
