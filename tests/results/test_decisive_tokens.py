"""results/decisive_tokens.py: the AUROC of the first wrong token, and means over completions."""

import decisive_tokens as decisive
import pytest
import torch
from support import TINY
from transformers import AutoTokenizer

import grpo_arca as trainer
from common.problems import Problem


@pytest.mark.parametrize(
    ("weights", "place", "auroc"),
    [
        ([1, 3, 2, 2], 2, 0.5),
        ([1, 9, 2], 1, 1),
        ([0, 1], 0, 0),
        ([1, 1, 1], 0, 0.5),
        ([1], 0, None),
    ],
)
def test_auroc_is_the_share_of_other_tokens_that_weigh_less(weights, place, auroc):
    """Ties count half; a lone token has no rank."""
    roles = ["decisive"] * len(weights)
    assert decisive.first_wrong_auroc(torch.tensor(weights), roles) is None
    roles[place] = "first_wrong"
    assert decisive.first_wrong_auroc(torch.tensor(weights), roles) == auroc


def test_auroc_of_random_weights_is_a_half():
    u = torch.rand(4000, 20, generator=torch.Generator().manual_seed(0))
    roles = ["", "first_wrong", *[""] * 18]
    mean = sum(decisive.first_wrong_auroc(row, roles) for row in u) / len(u)
    assert mean == pytest.approx(0.5, abs=0.02)


def test_figures_are_means_over_the_completions_that_have_them():
    """One is right, one goes wrong at its third number's last digit, which then weighs 4 of 1."""
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    texts = ["Start: 5. 5 + 7 = 12. \\boxed{12}", "Start: 5. 5 + 7 = 13. So it is \\boxed{13}"]
    ids = [torch.tensor(tokenizer.encode(text, add_special_tokens=False)) for text in texts]
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(x) for x in ids], True).bool()
    ids = torch.nn.utils.rnn.pad_sequence(ids, True)
    batch = trainer.Batch(torch.arange(2), 0, ids, mask, mask[:, 0], mask.float(), mask.float())
    batch.problems = [Problem("", "12", (12,))] * 2
    batch.weights = mask.float()
    run = type("Run", (), {"tokenizer": tokenizer})
    means = decisive.figures(run, batch)
    expected = {"decisive": 1, "first_wrong": 1, "auroc": 0.5, "effn": 1, "gini": 0}
    assert {name: means[name] for name in expected} == pytest.approx(expected, abs=1e-6)

    place = [tokenizer.decode([i]) for i in ids[1]].index("3")
    batch.weights[1, place] = 4
    count = int(mask[1].sum())
    mean = (count + 3) / count
    means = decisive.figures(run, batch)
    expected = {"decisive": (1 + 2.5 / mean) / 2, "first_wrong": 4 / mean, "auroc": 1}
    assert {name: means[name] for name in expected} == pytest.approx(expected)
