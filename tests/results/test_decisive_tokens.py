"""results/decisive_tokens.py: the AUROC of the first wrong token, and means over completions."""

from types import SimpleNamespace

import decisive_tokens
import pytest
import torch

from common.task import Problem


@pytest.mark.parametrize(
    ("weight", "others", "expected"),
    [(2, [1, 3, 2], 0.5), (9, [1, 2], 1), (0, [1], 0), (1, [1, 1], 0.5), (2, [1, 1, 3], 2 / 3)],
)
def test_auroc_is_the_share_of_other_weights_that_are_less(weight, others, expected):
    """Ties count half."""
    assert decisive_tokens.auroc(torch.tensor([weight]), torch.tensor(others)) == pytest.approx(
        expected
    )


def test_a_method_that_finds_result_digits_has_a_high_auroc_but_not_among_them():
    roles = ["", "result", "", "first_wrong", "", "result"]
    weights = torch.tensor([1.0, 4.0, 1.0, 3.0, 1.0, 2.0])
    assert decisive_tokens.figures(weights, roles) == pytest.approx(
        {"result": 1.5, "first_wrong": 1.5, "auroc": 0.8, "auroc_among_results": 0.5}
    )
    assert decisive_tokens.figures(weights, ["", "result", "", "", "", ""]) == {"result": 2}


def test_a_row_of_the_table_has_means_over_the_completions():
    """Both go wrong: one at the missing box, one at the digit 3, which weighs 4 and not 1."""
    texts = [["5", ".", " 12", ".", " [", "12"], ["5", ".", " 1", "3", ".", " x"]]
    weights = torch.tensor([[1.0] * 6, [1, 1, 1, 4, 1, 1]])
    problems = [Problem("", "12", (12,))] * 2
    batch = SimpleNamespace(pieces=texts, problems=problems, weights=weights, mask=weights > 0)
    row = decisive_tokens.table_row([batch])
    assert (row["wrong"], row["auroc"]) == (2, pytest.approx(0.75))
    assert row["first_wrong"] == pytest.approx((1 + 4 / 1.5) / 2)
    assert row["effn"] == pytest.approx((1 + 9**2 / 21 / 6) / 2, abs=1e-4)
