"""tools/smollm2.py: the sums of the real model's task are right, different and as many as said."""

import smollm2
from support import read_jsonl

from common.data import parse_rows
from common.task import has_right_steps


def test_sums_are_right_different_and_as_many_as_said(tmp_path):
    path = tmp_path / "sums.jsonl"
    smollm2.save_sums(path)
    rows = read_jsonl(path)
    examples = [message["content"] for message in rows[0]["prompt"][1:-1:2]]
    asked = [row["prompt"][-1]["content"] for row in rows]
    assert len({*asked, *examples}) == 180 + 3
    for text, row in zip(asked, rows, strict=True):
        words = text.split()
        partial_sums = [eval(" ".join(words[:end])) for end in (3, 5)]
        assert (row["steps"], row["answer"]) == (partial_sums, str(partial_sums[-1]))
        assert 1 <= min(partial_sums) <= max(partial_sums) <= 9
        assert len(words) == 5 and max(map(int, words[2::2])) <= 3
    # The first worked example is as documented, and would be rewarded.
    example, solution = [message["content"] for message in rows[0]["prompt"][1:3]]
    assert (example, solution) == ("7 + 4 - 4", "7 + 4 = 11. 11 - 4 = 7. \\boxed{7}")
    (problem,) = parse_rows([rows[0] | {"steps": [11, 7]}], "sums")
    assert has_right_steps(solution, problem)
