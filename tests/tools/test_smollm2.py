"""tools/smollm2.py: the sums of the real model's task are right, different and as many as said."""

import json

import smollm2

from common.data import parse_rows
from common.task import has_right_steps


def test_sums_are_right_different_and_as_many_as_said(tmp_path):
    path = tmp_path / "sums.jsonl"
    smollm2.save_sums(path)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    examples = [message["content"] for message in rows[0]["prompt"][1:-1:2]]
    asked = [row["prompt"][-1]["content"] for row in rows]
    assert len({*asked, *examples}) == 180 + 3
    for text, row in zip(asked, rows, strict=True):
        words = text.split()
        partial_sums = [eval(" ".join(words[:end])) for end in (3, 5)]
        assert (row["steps"], row["answer"]) == (partial_sums, str(partial_sums[-1]))
        assert 1 <= min(partial_sums) <= max(partial_sums) <= 9
        assert len(words) == 5 and max(map(int, words[2::2])) <= 3


def test_the_first_worked_example_is_as_documented_and_would_be_rewarded(tmp_path):
    path = tmp_path / "sums.jsonl"
    smollm2.save_sums(path)
    row = json.loads(path.read_text().splitlines()[0])
    asked, solution = [message["content"] for message in row["prompt"][1:3]]
    assert (asked, solution) == ("7 + 4 - 4", "7 + 4 = 11. 11 - 4 = 7. \\boxed{7}")
    (problem,) = parse_rows([row | {"steps": [11, 7]}], "sums")
    assert has_right_steps(solution, problem)
