"""`precision.py` measures what it says: products in TF32, forward and backward, by hand."""

import precision
import pytest
import torch
import torch.nn.functional as F
from accelerate.state import AcceleratorState


def test_tf32_keeps_ten_bits_after_the_point() -> None:
    below = 1 + 2.0**-12
    above = 1 + 2.0**-11 + 2.0**-12
    numbers = torch.tensor([1 + 2.0**-10, below, above, -below, 0.0])
    expected = [1 + 2.0**-10, 1.0, 1 + 2.0**-10, -1.0, 0.0]
    assert precision.tf32(numbers).tolist() == expected


def test_ranks_of_equal_numbers_are_shared() -> None:
    """By hand; ties count neither for nor against. SciPy gives the same -0.08."""
    assert precision.ranks(torch.tensor([3.0, 1.0, 3.0, 2.0])).tolist() == [2.5, 0.0, 2.5, 1.0]
    first, last = torch.zeros(40), torch.zeros(40)
    first[:3] = torch.tensor([1.0, 2.0, 3.0])
    last[-3:] = torch.tensor([1.0, 2.0, 3.0])
    assert precision.spearman(first, last) == pytest.approx(-0.081, abs=1e-3)
    assert precision.spearman(first, first) == pytest.approx(1)


def test_a_linear_layer_in_tf32_and_its_gradient_are_those_of_rounded_numbers() -> None:
    torch.manual_seed(0)
    x, weight, bias = torch.randn(2, 3, 40), torch.randn(5, 40), torch.randn(5)
    gradient = torch.randn(2, 3, 5)
    x.requires_grad_()
    with precision.products_in_tf32():
        y = F.linear(x, weight, bias)
        y.backward(gradient)
    x64, weight64, gradient64 = (precision.tf32(z.detach()).double() for z in (x, weight, gradient))
    assert torch.allclose(y.double(), x64 @ weight64.T + bias.double(), atol=1e-5)
    assert torch.allclose(x.grad.double(), gradient64 @ weight64, atol=1e-5)
    assert not torch.allclose(y, F.linear(x, weight, bias), atol=1e-5)  # exact again outside


@pytest.mark.parametrize("credit", ["arca", "oar_g"])
def test_scores_that_do_not_differ_are_a_sentence(monkeypatch, capsys, credit) -> None:
    """Those of a new adapter, and those of completions without an answer."""
    AcceleratorState._reset_state()
    chosen = [scored for scored in precision.SCORED if scored[1] == credit]
    monkeypatch.setattr(precision, "SCORED", chosen)
    flags = ["--per_device_train_batch_size", "4", "--gradient_accumulation_steps", "1"]
    flags += ["--num_generations", "4", "--max_completion_length", "4"]
    run, micros = precision.train(flags, updates=0)
    with pytest.raises(SystemExit) as stop:
        precision.credit_rows(run, micros[0], flags)
    sentence = f"error: no completion has {credit} scores that differ: raise --updates"
    assert stop.value.code == 2 and sentence in capsys.readouterr().err
    AcceleratorState._reset_state()


@pytest.mark.slow
def test_scores_in_tf32_and_bf16_differ_from_those_in_fp32(monkeypatch) -> None:
    AcceleratorState._reset_state()  # it would refuse another --dtype than the one before
    monkeypatch.setattr(precision, "REPEATS", 1)
    flags = ["--per_device_train_batch_size", "16", "--gradient_accumulation_steps", "1"]
    run, micros = precision.train(flags, updates=2)
    rank = {row["what"]: row["rank"] for row in precision.credit_rows(run, micros[0], flags)}
    for credit in ("arca", "oar_g", "oar_p"):
        assert rank[f"{credit} in fp32"] == pytest.approx(1)
        assert 0.9 < rank[f"{credit} in tf32"] < 1 - 1e-6
        assert rank[f"{credit} in bf16"] < rank[f"{credit} in tf32"]
    AcceleratorState._reset_state()
