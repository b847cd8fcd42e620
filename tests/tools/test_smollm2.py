"""tools/smollm2.py: the sums of the real model's task are right, different and as many as said."""

import json

import pytest
import smollm2

from common.data import parse_rows
from common.problems import Problem, first_error


def operations(text: str) -> tuple[int, list[int]]:
    """Returns the first number of "7 + 4 - 4" and the signed ones that follow: 7, [4, -4]."""
    first, *rest = text.split()
    return int(first), [int(sign + term) for sign, term in zip(rest[::2], rest[1::2], strict=True)]


@pytest.mark.parametrize(("number", "result"), [(9, 18), (3, 9)])
def test_sums_are_right_different_and_as_many_as_said(tmp_path, number, result) -> None:
    path = tmp_path / "sums.jsonl"
    smollm2.save_sums(path, {1: 20, 3: 9}, number, result)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    asked = [row["prompt"][-1]["content"] for row in rows]
    examples = [message["content"] for message in rows[0]["prompt"][1:-1]]
    assert len({*asked, *examples[::2]}) == 29 + 3
    assert [len(row["steps"]) for row in rows] == [1] * 20 + [3] * 9
    for row, text in zip(rows, asked, strict=True):
        value, terms = operations(text)
        steps = []
        for term in terms:
            value += term
            steps.append(value)
        assert row["steps"] == steps
        assert row["answer"] == str(value)
        assert min(steps) >= 1
        assert max(steps) <= result
        assert max(abs(term) for term in terms) <= number


def test_the_worked_examples_stand_in_every_prompt(tmp_path) -> None:
    path = tmp_path / "sums.jsonl"
    smollm2.save_sums(path, {1: 2})
    for line in path.read_text().splitlines():
        messages = [message["content"] for message in json.loads(line)["prompt"]]
        assert messages[1:3] == ["7 + 4 - 4", "7 + 4 = 11. 11 - 4 = 7. \\boxed{7}"]


def test_a_worked_solution_is_graded_as_right(tmp_path) -> None:
    path = tmp_path / "sums.jsonl"
    smollm2.save_sums(path, {1: 2})
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    opening = parse_rows(rows, "sums", None, None)[0].opening
    asked, solution, results = smollm2.worked(5, [("+", 3), ("-", 7), ("+", 1)])
    assert asked == "5 + 3 - 7 + 1"
    assert solution == "5 + 3 = 8. 8 - 7 = 1. 1 + 1 = 2. \\boxed{2}"
    assert results == [8, 1, 2]
    problem = Problem(asked, "2", tuple(results), opening=opening)
    assert first_error(solution, problem) is None
