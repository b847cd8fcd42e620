"""tools/worth.py: its gradients are those that training makes, its statistics are those of loops by
hand, and a mistake ends in a sentence."""

import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import worth
from support import ROOT

import grpo_arca as trainer

SMALL = (
    "--per_device_train_batch_size=8", "--gradient_accumulation_steps=2", "--num_generations=4",
    "--max_completion_length=60",
)  # fmt: skip
METHODS = {
    "uniform": "grpo_arca.py --credit uniform",
    "surprisal": "grpo_arca.py --credit surprisal --loss_type dapo",
    "right alone": "grpo_arca.py --credit uniform --negative_weight 0",
    "oar_g": "grpo_oar.py --credit oar_g",
    "s_trace": "grpo_strace.py --credit s_trace",
}
FEW = ("right alone", "s_trace")


def trained_gradient(method: str, adapter: Path) -> torch.Tensor:
    """What a run of the script has in .grad when its optimizer steps on the same rollout."""
    module, flags = worth.load_method(method)
    args = module.parse_args([*worth.SEED, *SMALL, *flags, "--max_grad_norm", "0"])
    tokenizer, data, _ = worth.load_data(args)
    run = module.build_run(args, tokenizer)
    state = worth.load_file(adapter / "adapter_model.safetensors")
    worth.set_peft_model_state_dict(run.model, state)
    run.rollout = 3
    batch = module.collect(run, data, {})
    (micros,) = module.micro_batches(args, batch)
    module.score(run, batch, micros, {})
    seen = []

    def step() -> None:
        trained = [p for p in run.model.parameters() if p.requires_grad]
        seen.append(torch.cat([p.grad.flatten() for p in trained]).clone())

    run.optimizer.step = step
    module.update(run, micros)
    return seen[0]


@pytest.fixture
def adapter(make_run, tmp_path) -> Path:
    """Of a policy that has learned something, or is at least another one than the base."""
    run = make_run(adapter=0.02)
    run.model.save_pretrained(tmp_path / "adapter")
    return tmp_path / "adapter"


@pytest.mark.parametrize("names", [FEW, pytest.param((*METHODS,), marks=pytest.mark.slow)])
def test_a_batch_gradient_is_the_one_that_training_would_make(adapter, tmp_path, names):
    chosen = {name: METHODS[name] for name in names}
    methods = chosen | {"uniform": METHODS["uniform"], worth.UNIFORM: worth.UNIFORM}
    worth.measure(worth.Job(tmp_path / "3.pt", 3, methods, SMALL, str(adapter), 2**30))
    found = worth.load(tmp_path / "3.pt")
    assert torch.equal(found["uniform"], found[worth.UNIFORM])
    for name, method in chosen.items():
        exact = trained_gradient(method, adapter)
        assert exact.norm() > 0 and torch.allclose(found[name], exact, rtol=1e-4, atol=1e-7), name
    assert not torch.allclose(found["uniform"], found["right alone"])
    again = tmp_path / "4.pt"  # some coordinates alone, the same ones of every batch and method
    few = {name: METHODS[name] for name in FEW}
    worth.measure(worth.Job(again, 3, few, SMALL, str(adapter), 1000))
    places = torch.randperm(len(exact), generator=torch.Generator().manual_seed(0))[:1000]
    for name in FEW:
        assert torch.equal(worth.load(again)[name], found[name][places.sort().values])


@pytest.mark.slow
def test_the_null_is_the_sum_over_every_other_group(adapter, tmp_path):
    worth.measure(worth.Job(tmp_path / "a", 5, {"half": worth.HALF}, SMALL, str(adapter), 2**30))
    run, data = worth.prepare(SMALL, str(adapter))
    run.rollout = 5
    batch = trainer.collect(run, data, {})
    batch.advantages[(batch.rows >= 4) & (batch.rows < 8) | (batch.rows >= 12)] = 0.0
    (micros,) = trainer.micro_batches(run.args, batch)
    trainer.score(run, batch, micros, {})
    expected = worth.gradient(run, trainer, micros, 16)
    assert torch.allclose(worth.load(tmp_path / "a")["half"], expected, atol=1e-7)


# ---- The statistics ------------------------------------------------------------------------------
def test_pair_means_are_those_of_two_loops():
    rng = np.random.default_rng(0)
    own, other = rng.normal(size=(2, 5, 3))
    weights = np.array([[1, 1, 1, 1, 1], [2, 0, 3, 0, 0]])
    for row, found in zip(weights, worth.pair_mean(own @ other.T, weights), strict=True):
        drawn = np.repeat(np.arange(5), row)
        pairs = [(i, j) for i in drawn for j in drawn if i != j]
        assert found == pytest.approx(np.mean([own[i] @ other[j] for i, j in pairs]))


def made_gradients(count=400, size=300) -> dict[str, np.ndarray]:
    """Uniform: mean of length 1 and total variance 4. Others by name."""
    rng = np.random.default_rng(1)
    mean = np.zeros(size)
    mean[0] = 1.0

    def noise() -> np.ndarray:
        return rng.normal(size=(count, size)) * (4 / size) ** 0.5

    turned = np.zeros(size)
    turned[:2] = 0.6, 0.8
    return {
        worth.UNIFORM: mean + noise(),
        "same": mean + noise(),
        "half the noise": mean + noise() / 2**0.5,
        "scaled": 7 * (mean + noise()),
        "turned": turned + noise(),
    }


def test_worth_direction_and_cosine_of_gradients_made_to_measure():
    rows = {row["method"]: row for row in worth.figures(made_gradients())}
    expected = {"same": (1, 1), "half the noise": (2, 1), "scaled": (1, 1), "turned": (1, 0.6)}
    assert rows[worth.UNIFORM]["snr"] == pytest.approx(0.25, rel=0.1)
    assert rows[worth.UNIFORM]["worth"] == 1
    for name, (size, direction) in expected.items():
        row = rows[name]
        assert row["worth"] == pytest.approx(size, rel=0.15), name
        assert row["direction"] == pytest.approx(direction, abs=0.05), name
        assert row["aligned"] == pytest.approx(size * direction**2, rel=0.15), name
        assert row["worth_low"] <= size <= row["worth_high"], name
        assert row["worth_low"] < row["worth"] < row["worth_high"], name
    # One batch has length sqrt(1 + 4), of which 1 points along the mean.
    assert rows["same"]["cosine"] == pytest.approx(5**-0.5, abs=0.03)


def test_adams_worth_is_that_of_coordinates_of_one_size():
    """All noise in one coordinate, which has no mean: raw it drowns the rest, scaled it is one of
    many. And the unit of a coordinate is nothing to Adam."""
    gradients = made_gradients()
    loud = gradients["same"].copy()
    loud[:, 1] *= 200
    some = {name: gradients[name] for name in (worth.UNIFORM, "same", "scaled")}
    rows = {row["method"]: row for row in worth.figures(some | {"loud": loud})}
    assert rows["loud"]["worth"] < 0.05
    assert rows["loud"]["adam"] == pytest.approx(rows["same"]["adam"], rel=1e-6)
    assert rows["scaled"]["adam"] == pytest.approx(1, rel=0.15)
    assert rows[worth.UNIFORM]["adam"] == 1


# ---- Command line --------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "words, sentence",
    [
        (["nothing.py"], "there is no script nothing.py"),
        (["tools/compare.py"], "has no token_scores"),
        (["grpo_arca.py", "--batches", "3"], "four are the least"),
        (["grpo_arca.py", "--", "--num_generations", "128"], "make the number of groups even"),
        (["grpo_arca.py --credit none"], "invalid choice"),
        (
            ["grpo_arca.py --temperature 0.7"],
            "--temperature of grpo_arca.py --temperature 0.7 makes",
        ),
        (["grpo_arca.py", "--", "--beta", "0.1"], "--beta: the penalty has a gradient of its own"),
        (["grpo_arca.py", "--", "--dataset_name", "none.jsonl"], "none.jsonl"),
        (["grpo_arca.py", "--", "--lora_target_modules", "nope"], "LoRA on nope"),
    ],
)
def test_a_mistake_ends_in_a_sentence(monkeypatch, capsys, tmp_path, words, sentence):
    flags = ["--folder", str(tmp_path), "--processes", "1"]
    monkeypatch.setattr(sys, "argv", ["worth.py", *flags, *words])
    with pytest.raises(SystemExit) as ended:
        worth.main()
    said = f"{ended.value.code} {capsys.readouterr().err}"
    assert sentence in said and ended.value.code not in (0, None), said


def test_another_adapter_in_the_same_folder_makes_other_batches(
    adapter, monkeypatch, tmp_path, capsys
):
    monkeypatch.setattr(worth, "run_all", lambda _, jobs, __: print("todo", len(jobs)))
    monkeypatch.setattr(worth, "load", lambda path: asked.append(path) or {})
    words = ["worth.py", "--adapter", str(adapter), "--batches", "4", "--folder", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", [*words, "--", *SMALL])
    folders = []
    for change in (None, None, "retrained"):
        asked = []
        if change:
            (adapter / "adapter_model.safetensors").touch()
        with pytest.raises(KeyError):  # there are no figures
            worth.main()
        assert capsys.readouterr().out == "todo 4\n"
        folders.append({path.parent for path in asked})
    first, again, retrained = folders
    assert first == again and len(first | retrained) == 2


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--lora_alpha", "64"], "has --lora_alpha 16: give that after --"),
        (["--lora_target_modules", "q_proj"], "it has "),
    ],
)
def test_an_adapter_of_another_shape_is_refused(adapter, flags, sentence):
    with pytest.raises(ValueError, match=sentence):
        worth.prepare((*SMALL, *flags), str(adapter))


def test_an_adapter_of_fewer_layers_is_refused(make_run, tmp_path):
    make_run(lora_target_modules="q_proj").model.save_pretrained(tmp_path / "few")
    with pytest.raises(ValueError, match="give its --lora_target_modules after --"):
        worth.prepare(SMALL, str(tmp_path / "few"))


def test_an_edited_reward_function_makes_other_batches(monkeypatch, tmp_path):
    source = tmp_path / "my_rewards.py"
    source.write_text("def length(completions, **kwargs): return [len(c) for c in completions]")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(worth, "run_all", lambda *_: None)
    monkeypatch.setattr(worth, "load", lambda path: asked.append(path.parent) or {})
    words = ["--batches", "4", "--folder", str(tmp_path), "--", *SMALL]
    options, flags = worth.parse_options([*words, "--reward_funcs", "my_rewards.length"])
    folders = []
    for _ in range(2):
        asked = []
        worth.measure_all(options, {}, flags)
        folders += asked[:1]
        source.write_text(source.read_text() + "  # longer is better\n")
    assert folders[0] != folders[1]


def test_a_clip_range_of_its_own_is_no_other_batch():
    command = "grpo_strace.py --credit gspo --epsilon 3e-4 --epsilon_high 4e-4"
    worth.check({"gspo": command}, SMALL)


@pytest.mark.slow
def test_a_method_of_ones_own_is_measured_once_and_again_when_it_changes(
    monkeypatch, capfd, tmp_path
):
    """A copy of a script with another CREDIT region, from the table to the file."""
    own = tmp_path / "my_method.py"
    shutil.copytree(ROOT / "common", tmp_path / "common")
    text = (ROOT / "grpo_arca.py").read_text()
    line = "return -micro.sampled_logp\n"
    assert line in text
    own.write_text(text.replace(line, "return micro.sampled_logp.exp()\n"))
    command = ["worth.py", f"{own} --credit surprisal", "--batches", "4", "--processes", "2"]
    command += ["--folder", str(tmp_path / "w"), "--output", str(tmp_path / "table.csv")]
    monkeypatch.setattr(sys, "argv", [*command, "--", *SMALL])
    worth.main()
    out, err = capfd.readouterr()
    assert "[4/4] batch " in err and out.startswith("4 batches, ")
    assert f"{own} --credit surprisal  " in out
    assert (tmp_path / "table.csv").read_text().count("\n") == 4
    worth.main()
    assert "min left" not in capfd.readouterr().err  # all is there
    own.write_text(text)
    worth.main()
    changed, err = capfd.readouterr()
    assert "[4/4] batch " in err and changed != out
    monkeypatch.setattr(sys, "argv", [*command, "--", *SMALL, "--lora_target_modules", "nope"])
    with pytest.raises(SystemExit, match="the sentence above"):
        worth.main()
    assert "LoRA on nope" in capfd.readouterr().err


@pytest.mark.slow
def test_squared_gradients_are_those_of_each_completion_alone(adapter):
    run, data = worth.prepare(SMALL, str(adapter))
    run.rollout = 5
    batch = trainer.collect(run, data, {})
    trained = worth.trained_parameters(run)
    expected = torch.zeros(2, 2)
    for row, advantage in enumerate(batch.advantages.tolist()):
        if advantage != 0:
            ids = batch.ids[row][batch.attention[row].bool()]
            said = int(batch.mask[row].sum())
            logp = run.model(input_ids=ids[None]).logits[0].log_softmax(-1)
            logp = logp[:-1].gather(1, ids[1:, None])[-said:].mean()
            length = sum(part.square().sum() for part in torch.autograd.grad(logp, trained))
            expected[int(advantage > 0)] += torch.tensor([1.0, length])
    assert expected[:, 0].min() >= 2
    assert torch.allclose(worth.squares(run, batch), expected, rtol=1e-3)


def test_how_much_longer_a_gradient_is_below_by_hand():
    one = {"reward": torch.tensor(0.5), "entropy": torch.tensor(0.2)}
    columns = worth.policy_figures([one | {"squares": torch.tensor([[2.0, 8.0], [4.0, 2.0]])}] * 3)
    assert columns["reward"] == 0.5 and columns["entropy"] == pytest.approx(0.2)
    for end in ("", "_low", "_high"):  # 8 / 2 over 2 / 4
        assert columns["below_over_above" + end] == pytest.approx(8)


def shown_row(**figures: float | str) -> dict:
    """Returns a row with all that is printed, 1 where nothing else is given."""
    row: dict = {}
    for key in worth.PRINTED_FIGURES:
        row |= worth.with_interval(key, np.ones(3))
    row |= {"method": "x", "verdict": "the same as GRPO", "batches": 4, "reward": 0.1}
    row |= {"entropy": 0.5, "below_over_above": 1}
    row |= {"below_over_above_low": 1, "below_over_above_high": 1}
    return row | figures


def test_a_figure_of_no_signal_is_a_question_mark():
    """Four batches of noise: a mean of no length has no direction."""
    row = shown_row(direction=-1.2e12, direction_low=-3.4e12)
    line = worth.report([row]).splitlines()[3]
    expected = "x 1.00 (1.00 - 1.00) 1.00 (1.00 - 1.00) 1.00 (1.00 - 1.00) ? (? - 1.00)"
    assert " ".join(line.split()) == f"{expected} the same as GRPO"


def test_no_cosine_above_1_is_shown():
    row = shown_row(direction=1.02, direction_low=0.98, direction_high=1.06, worth=1.02)
    assert worth.shown_figure(row, "direction") == "1.00 (0.98 - 1.00)"
    assert worth.shown_figure(row, "worth") == "1.02 (1.00 - 1.00)"
    no_signal = shown_row(direction_high=1301.0)
    assert worth.shown_figure(no_signal, "direction") == "1.00 (1.00 - ?)"


# ---- Completions and verdicts --------------------------------------------------------------------
def test_completions_put_the_control_at_one_half():
    half = np.array([0.25, 0.64, 0.9])
    assert worth.as_completions(half, half) == pytest.approx(0.5)
    assert worth.as_completions(half**2, half) == pytest.approx(0.25)  # as half of half
    assert worth.as_completions(1 / half, half) == pytest.approx(2)
    assert worth.as_completions(np.ones(3), half) == pytest.approx(1)
    halves = np.array([0.9, 1.2])  # the estimate, and one draw
    assert worth.as_completions(np.full(2, 1e12), halves)[1] == 1e6  # no overflow
    assert np.isnan(worth.as_completions(np.ones(2), halves[::-1])).all()  # it tells nothing
    unknown = worth.with_interval("completions", np.full(3, np.nan))
    assert worth.shown_figure(unknown, "completions") == "? (? - ?)"


def even_gradients(count: int, seed: int = 3) -> dict[str, np.ndarray]:
    """Gradients whose mean and variance are the same in each of 40 coordinates."""
    rng = np.random.default_rng(seed)
    mean = np.full(40, 0.5)
    return {
        worth.UNIFORM: mean + rng.normal(size=(count, 40)),
        worth.HALF: mean + rng.normal(size=(count, 40)) * 2**0.5,
        "better": mean + rng.normal(size=(count, 40)) / 1.2**0.5,
    }


def test_the_rows_have_completions_where_the_control_is_measured():
    gradients = even_gradients(200)
    rows = {row["method"]: row for row in worth.figures(gradients)}
    assert rows[worth.UNIFORM]["completions"] == pytest.approx(1)
    half = rows[worth.HALF]
    assert half["worth_low"] < 0.5 < half["worth_high"]
    for end in ("", "_low", "_high"):
        assert half["completions" + end] == pytest.approx(0.5)
    better = rows["better"]
    assert better["completions"] == pytest.approx(
        better["adam"] ** (np.log(0.5) / np.log(half["adam"]))
    )
    assert better["completions_low"] < better["completions"] < better["completions_high"]
    del gradients[worth.HALF]
    assert "completions" not in worth.figures(gradients)[1]


def test_adam_hides_how_clean_a_coordinate_of_strong_signal_is():
    """Half of the coordinates have mean 1 and variance 1, the others no mean. As Adam scales them,
    the ratio is (1/2) / (1/2 + 1), and (1/3) / (2/3 + 1) at twice the variance: 0.6 of it."""
    rng = np.random.default_rng(5)
    mean = np.arange(400) % 2
    gradients = {
        worth.UNIFORM: mean + rng.normal(size=(400, 400)),
        worth.HALF: mean + rng.normal(size=(400, 400)) * 2**0.5,
    }
    half = worth.figures(gradients)[1]
    assert half["worth"] == pytest.approx(0.5, abs=0.02)
    assert half["adam"] == pytest.approx(0.6, abs=0.02)


@pytest.mark.parametrize(
    "low, value, high, direction, words",
    [
        (1.01, 1.2, 1.4, 1.02, "better than GRPO"),
        (2.9, 3.3, 3.8, 0.8, "better than GRPO, but in another direction"),
        (0.45, 0.5, 0.6, 0.8, "worse than GRPO"),
        (1.0, 1.0, 1.0, 1.0, "the same as GRPO"),
        (0.992, 0.995, 0.998, 1.0, "within 2% of GRPO"),
        (0.979, 0.985, 0.99, 1.0, "worse than GRPO"),
        (0.81, 1.0, 1.21, 1.0, "cannot be told; more than 10,000 batches would tell"),
        (0.97, 0.9999, 1.03, 1.0, "cannot be told; more than 10,000 batches would tell"),
        # The interval is +-ln 1.21, twice the effect ln 1.1: four times the batches.
        (1.1 / 1.2099, 1.1, 1.1 * 1.2099, 1.0, "cannot be told; about 96 batches would tell"),
        # The interval is +-ln 1.9, ten times the effect: 2400 batches.
        (
            0.95 / 1.67,
            0.95,
            0.95 * 1.67,
            1.0,
            "cannot be told; about 2,400 batches would tell",
        ),
        # Its longer side does not hold 1, but more batches than there are must be asked for.
        (0.999, 1.2, 1.21, 1.0, "cannot be told; about 25 batches would tell"),
    ],
)
def test_a_verdict_is_what_the_interval_says(low, value, high, direction, words):
    row = shown_row(adam=value, adam_low=low, adam_high=high, direction_high=direction)
    assert worth.verdict(row, 24) == words


def test_as_many_batches_as_a_verdict_asks_for_do_tell():
    """For gradients whose worth is 1.2, few leave it open, and twice those asked for suffice."""

    def verdict_of(count: int) -> str:
        rows = worth.figures(even_gradients(count))
        return worth.verdict(rows[2], count)

    words = verdict_of(30)
    asked_for = int(words.split("about ")[1].split(" batches")[0].replace(",", ""))
    assert 60 < asked_for < 10_000
    assert verdict_of(2 * asked_for) == "better than GRPO"


@pytest.mark.parametrize(
    "low, high, words",
    [
        (0.4, 0.6, "control: holds"),
        (0.52, 0.9, "control: misses 0.5, take more --batches"),
        (0.1, 2.9, "control: too wide to tell, take more --batches"),
    ],
)
def test_the_control_holds_where_one_half_is_in_its_interval(low, high, words):
    row = shown_row(method=worth.HALF, worth=0.55, worth_low=low, worth_high=high)
    assert worth.verdict(row, 24) == words


def test_every_row_of_the_table_ends_with_its_verdict():
    rows = [shown_row(), shown_row(method="y", verdict="worse than GRPO")]
    head, *lines = worth.report(rows).splitlines()[2:]
    assert head.split() == [*worth.PRINTED_FIGURES, "verdict"]
    assert [line.split(")  ")[-1] for line in lines] == ["the same as GRPO", "worse than GRPO"]


def test_a_method_without_a_gradient_ends_in_a_sentence(monkeypatch, tmp_path):
    nothing = {key: torch.ones(3) for key in worth.keys_of([])}
    nothing |= {worth.HALF: torch.zeros(3)}

    def measured(*_: object) -> list:
        return [nothing] * 4

    monkeypatch.setattr(worth, "measure_all", measured)
    monkeypatch.setattr(sys, "argv", ["worth.py", "--batches", "4", "--folder", str(tmp_path)])
    with pytest.raises(SystemExit, match="gradient of half of the groups is 0 in every batch"):
        worth.main()
