"""The embedded task and its marks, data sets of every shape, the order of problems, prompts."""

import itertools
import json
import math
import os
import random
import re
import shutil
import time
from pathlib import Path
from types import SimpleNamespace

import datasets
import make_policies as make
import pytest
import torch
import transformers
from conftest import ROOT, TINY
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from tokenizers.models import WordLevel
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoTokenizer, PreTrainedTokenizerFast

import grpo_arca as trainer
from common import data, problems
from common.data import DataError
from common.printable import printable
from common.problems import (
    Chain,
    Operation,
    Problem,
    chain_problems,
    first_error,
    random_chain,
    stated_results,
    token_roles,
)
from common.reward import Grader, RewardError, call_reward_func

SHARED = ROOT.parent / "shared/data"
ROLES = {"", "decisive", "first_wrong"}

# 23 + 19 = 42, doubled 84, - 5 = 79
CHAIN = Chain(23, (Operation("add", 19), Operation("multiply", 2), Operation("subtract", 5)))
PROBLEM = Problem(CHAIN.prompt(), "79", (42, 84, 79))
RIGHT = (
    "We begin at 23. Then adding 19 gives 42. We double it and get 84. "
    "Minus 5 makes 79. So the answer is \\boxed{79}."
)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    if (Path(TINY) / "tokenizer.json").exists():
        return AutoTokenizer.from_pretrained(TINY)
    folder = tmp_path_factory.mktemp("tokenizer")
    make.build_tokenizer().save_pretrained(folder)
    return AutoTokenizer.from_pretrained(folder)


def flags(**given):
    """The flags that load_problems reads, as the trainer parses them."""
    return trainer.parse_args([f"--{name}={value}" for name, value in given.items()])


# ---------------------------------------------------------------------------- the embedded task
def recompute(prompt: str) -> list[int]:
    """The value after each operation, from the words of the prompt alone."""
    start, *phrases = re.fullmatch(r"Start with (.*)\.", prompt)[1].split(", ")
    values = [int(start)]
    for phrase in phrases:
        verb, word = phrase.split()
        by = 0 if word == "it" else int(word)
        new = {"add": values[-1] + by, "subtract": values[-1] - by}
        new |= {"double": values[-1] * 2, "triple": values[-1] * 3}
        values.append(new[verb])
    return values[1:]


def test_a_prompt_reads_as_documented():
    assert CHAIN.prompt() == "Start with 23, add 19, double it, subtract 5."
    assert CHAIN.results() == (42, 84, 79)


def test_train_and_held_out_chains_never_meet():
    held_out = {p.prompt for p in chain_problems(2000, held_out=True)}
    for seed in range(4):
        train = {p.prompt for p in chain_problems(4096, held_out=False, seed=seed)}
        assert len(train) == 4096 and not train & held_out
        other = {p.prompt for p in chain_problems(500, held_out=True, seed=seed)}
        assert not train & other


def test_held_out_is_a_function_of_the_chain_and_one_in_ten():
    rng = random.Random(0)
    chains = []
    for _ in range(5000):
        ops = tuple(Operation("add", rng.randint(2, 19)) for _ in range(3))
        chains.append(Chain(rng.randint(5, 60), ops))
    flags_of = [c.is_held_out() for c in chains]
    assert flags_of == [Chain(c.start, tuple(c.operations)).is_held_out() for c in chains]
    assert 0.08 < sum(flags_of) / len(flags_of) < 0.12
    # Fixed for good: the committed policy was trained on what this hash does not hold out.
    assert [p.prompt for p in chain_problems(2, held_out=True)] == [
        "Start with 55, add 14, add 17, add 4, subtract 13.",
        "Start with 52, subtract 12, subtract 13, subtract 12.",
    ]


@pytest.mark.parametrize("held_out", [False, True])
def test_generated_answers_are_right_and_small(held_out):
    for problem in chain_problems(2000, held_out, seed=3):
        values = recompute(problem.prompt)
        assert list(problem.steps) == values and problem.answer == str(values[-1])
        assert len(values) in (3, 4) and all(1 <= value <= 99 for value in values)


def test_problems_depend_on_the_seed_alone():
    assert chain_problems(50, False, 1) == chain_problems(50, False, 1)
    assert chain_problems(50, False, 1) != chain_problems(50, False, 2)


# ------------------------------------------------------------------- which step goes wrong where
def stated(text, num_steps=3):
    return [text[begin:end] for begin, end in stated_results(text, num_steps)]


@pytest.mark.parametrize(
    "text, expected",
    [
        (RIGHT, ["42", "84", "79"]),
        ("We begin at 23. Adding 19 gives 42.", ["42", "", ""]),
        ("We begin at 23. Adding 19 gives 42", ["42", "", ""]),  # cut off before the full stop
        ("", ["", "", ""]),
        ("no numbers. at all. here. nor here. 5.", ["", "", ""]),
        ("1.2.3.4. 5. 6. 7.", ["5", "6", "7"]),  # a decimal point ends no sentence
        ("We begin at 23. Half is 11.5. Then 42. Then -7.", ["11.5", "42", "-7"]),
        ("23. 19 and 23 give 42. 84. 79. And 99.", ["42", "84", "79"]),
        ("...", ["", "", ""]),
    ],
)
def test_stated_results(text, expected):
    assert stated(text) == expected


@pytest.mark.parametrize(
    "text, marked",  # `marked`: what stands from the first error on; None: no error
    [
        (RIGHT, None),
        (RIGHT + " That was easy. 1. 2. 3.", None),
        (RIGHT.replace("So the", "It is late. So the"), None),
        (RIGHT.replace("42", "32"), "32. We double"),  # dropped carry
        (RIGHT.replace("42", "43"), "3. We double"),  # the 4 is right
        (RIGHT.replace("42", "420"), "0. We double"),
        (RIGHT.replace("42", "4"), ". We double"),  # a 2 was due there
        (RIGHT.replace("42", "42.5"), ".5. We double"),
        (RIGHT.replace("42", "-42"), "-42. We double"),
        (RIGHT.replace("84.", "94."), "94. Minus"),
        # Slips that cancel: 43, doubled "84", and so on to the right answer.
        (RIGHT.replace("42", "43").replace("We double", "We (nearly) double"), "3. We (nearly)"),
        (RIGHT.replace("84.", "85."), "5. Minus"),
        (RIGHT.replace("{79}", "{78}"), "8}."),  # the box alone is wrong
        (RIGHT.replace("{79}", "{790}"), "0}."),
        (RIGHT.replace("{79}", "{}"), "}."),
        (RIGHT + " No, \\boxed{80}.", "80}."),  # the last box counts
        (RIGHT + " No, \\boxed{\\frac{1}{2}}.", "\\frac{1}{2}}."),
        (RIGHT + " And {79}, or \\boxed{", None),  # an open brace is no box, nor is one without
        (RIGHT.replace("\\boxed{79}", "79"), ""),  # no box at all
        (RIGHT.replace("We double it and get 84. ", ""), "79. So"),  # a step left out
        (RIGHT.replace("We double", "Well. We double"), ". We double"),  # a sentence too many
        (RIGHT.replace(" 84.", " it."), ". Minus"),
        ("\\boxed{79}.", ""),  # guessed; its full stop is the start's
        ("\\boxed{79}. a. b. c.", ". b. c."),
        ("", ""),
        ("\x00\ufffd\u202e\ud800 \\x \\boxed", ""),
        ("٤٢. ٤٢. ٨٤. ٧٩. \\boxed{٧٩}", ". ٨٤. ٧٩. \\boxed{٧٩}"),  # other scripts' digits
    ],
)
def test_first_error(text, marked):
    error = first_error(text, PROBLEM)
    assert (None if error is None else text[error:][: len(marked or "x")]) == marked
    assert error is None or text[error:].startswith(marked)


def test_slips_that_cancel_are_an_error_though_the_answer_is_right():
    """23 + 19 = 43, doubled 84: the box is right, so the answer alone would earn the reward."""
    text = RIGHT.replace("42", "43")
    assert text.endswith("\\boxed{79}.") and first_error(text, PROBLEM) == text.index("43") + 1


def test_of_two_equal_boxes_the_last_is_marked():
    """That is the one that the grader reads."""
    text = RIGHT.replace("{79}", "{80}") + " Yes, \\boxed{80}, not {80}."
    assert first_error(text, PROBLEM) == text.rindex("\\boxed{") + len("\\boxed{")


def characters(text):
    return token_roles(list(text), PROBLEM)


def test_roles_of_a_right_completion():
    marked = "".join(c if r else " " for c, r in zip(RIGHT, characters(RIGHT), strict=True))
    assert marked.split() == ["42", "84", "79"] and set(characters(RIGHT)) == {"", "decisive"}
    assert marked.index("79") == RIGHT.index("79")  # the step's, not the box's


def test_roles_of_a_wrong_completion():
    text = RIGHT.replace("42", "43")
    roles = characters(text)
    at = text.index("43")
    assert roles[at : at + 3] == ["decisive", "first_wrong", ""]
    assert roles.count("first_wrong") == 1 and roles.count("decisive") == 5


def test_tokens_of_several_characters():
    pieces = ["We begin at ", "23. Then adding 19 gives", " 42. We double", " it and get ", "8"]
    pieces += ["4. Minus 5 makes ", "7", "", "9", ". ", "So it is \\boxed{", "79}.", "<end>"]
    expected = ["", "", "decisive", "", "decisive", "decisive", "decisive", "", "decisive"]
    assert token_roles(pieces, PROBLEM) == [*expected, "", "", "", ""]
    pieces[11] = "78}."
    assert token_roles(pieces, PROBLEM) == [*expected, "", "", "first_wrong", ""]


def test_a_completion_that_ends_too_early_is_marked_at_its_last_token():
    pieces = ["We begin at ", "23", ". ", "<end>"]
    assert token_roles(pieces, PROBLEM) == ["", "", "", "first_wrong"]
    assert token_roles([], PROBLEM) == [] and token_roles([""], PROBLEM) == [""]


def random_texts(count):
    rng = random.Random(5)
    parts = [RIGHT, "\\boxed{", "79", "}", ".", " 42", "\ufffd", "-", "{", "x"]
    return ["".join(rng.choices(parts, k=rng.randint(0, 9))) for _ in range(count)]


def test_roles_of_any_text():
    """One role a token, from the stated set; a first wrong one exactly where there is an error."""
    for text in random_texts(2000):
        rng = random.Random(text)
        pieces = []
        while sum(map(len, pieces)) < len(text):
            begin = sum(map(len, pieces))
            pieces.append(text[begin : begin + rng.randint(0, 5)])
        roles = token_roles(pieces, PROBLEM)
        error = first_error(text, PROBLEM)
        assert len(roles) == len(pieces) and set(roles) <= ROLES
        assert roles.count("first_wrong") == (error is not None and text != "")
        assert error is None or 0 <= error <= len(text)


def test_an_answer_is_right_to_first_error_only_if_it_is_to_the_grader():
    """Else a completion without reward would show no mistake."""
    from common.reward import last_boxed

    agreed = 0
    for text in random_texts(4000):
        if first_error(text, PROBLEM) is None:
            assert last_boxed(text) == "79"
            agreed += 1
    assert agreed > 100


@pytest.mark.parametrize(
    "unit",
    [
        "1", ".", "a", " ", "{", "-", "1.", ". 1", "\\boxed ", "\\boxed{", "\\boxed{79}",
        "\\boxed{1}{", "\\boxed{79", "\\boxed{{}",
    ],
)  # fmt: skip
def test_long_texts_take_linear_time(unit):
    text = unit * (100_000 // len(unit))
    first_error(text[:10_000], PROBLEM)
    began = time.process_time()
    for long in (text, RIGHT + text, "\\boxed{" + text + "}" + text):
        first_error(long, PROBLEM)
    # A guard against quadratic growth (minutes), in CPU time: other processes do not count.
    assert time.process_time() - began < 15


# ------------------------------------------------------------- demonstrations for the tiny policy
@pytest.fixture(scope="module")
def demonstrations():
    """(problem, text) pairs by whether slips were allowed."""

    def pairs(slips):
        rng = random.Random(11)
        chains = [random_chain(rng, held_out=False) for _ in range(2500)]
        problems = [Problem(c.prompt(), str(c.results()[-1]), c.results()) for c in chains]
        texts = [make.demonstrate(rng, chain, make.TINY, slips) for chain in chains]
        return list(zip(problems, texts, strict=True))

    return {slips: pairs(slips) for slips in (False, True)}


def test_clean_demonstrations_are_right(demonstrations):
    for problem, text in demonstrations[False]:
        assert first_error(text, problem) is None, text
        assert stated(text, len(problem.steps)) == [str(step) for step in problem.steps]


def test_slips_never_cancel(demonstrations):
    """No demonstration teaches a wrong step that leads to the right answer."""
    wrong = 0
    for problem, text in demonstrations[True]:
        boxed = re.search(r"\\boxed\{(\d+)\}", text)[1]
        assert (first_error(text, problem) is None) == (boxed == problem.answer), text
        wrong += boxed != problem.answer
        roles = token_roles(list(text), problem)
        assert roles.count("first_wrong") == (boxed != problem.answer) and set(roles) <= ROLES
    assert 0.4 < wrong / len(demonstrations[True]) < 0.95


def test_slips_are_as_frequent_as_stated():
    rng = random.Random(2)
    carries = []
    others = []
    for _ in range(20_000):
        operation = Operation("add", rng.randint(2, 19))
        value = rng.randint(1, 80)
        right = operation.apply(value)
        forgotten = make.without_carry(operation, value)
        made = make.slip(rng, operation, value, make.TINY, slips=True)
        assert make.slip(rng, operation, value, make.TINY, slips=False) == right
        if forgotten != right:
            assert value % 10 + operation.operand % 10 >= 10 and forgotten == right - 10
            carries.append(made == forgotten)
        else:
            others.append(made != right)
    # A step with a carry can also come to right - 10 by the other kind of slip, a sixth of them.
    expected = make.TINY.dropped_carry + (1 - make.TINY.dropped_carry) * make.TINY.other_slip / 6
    assert abs(sum(carries) / len(carries) - expected) < 0.02
    assert abs(sum(others) / len(others) - make.TINY.other_slip) < 0.01


@pytest.mark.parametrize(
    "name, operand, value, forgotten",
    [
        ("add", 19, 23, 32),
        ("add", 11, 23, 34),
        ("subtract", 7, 52, 55),
        ("subtract", 2, 52, 50),
        ("multiply", 2, 37, 64),
        ("multiply", 3, 27, 61),
        ("multiply", 2, 34, 68),
    ],
)
def test_without_carry(name, operand, value, forgotten):
    assert make.without_carry(Operation(name, operand), value) == forgotten


# ------------------------------------------------------------------------------- the tokenizer
def test_digits_are_tokens(tokenizer, demonstrations):
    for _, text in demonstrations[True][:300]:
        pieces = [tokenizer.decode([i]) for i in tokenizer(text).input_ids]
        assert "".join(pieces) == text
        for piece in pieces:
            assert not re.search("[0-9]", piece) or len(piece) == 1, piece
        assert pieces.count("\\boxed{") == 1


@pytest.mark.parametrize(
    "text",
    ["", " ", "  a\n\n\tb ", "naïve ∑ 数学 עברית", "🙂👩‍👩‍👧 e\u0301", "\x00\x01\x1b\x7f\r\n",
     "½²٣ Ⅷ 1234", "<|im_start|>x"],
)  # fmt: skip
def test_any_text_round_trips(tokenizer, text):
    assert tokenizer.decode(tokenizer(text).input_ids) == text


def test_random_text_round_trips(tokenizer):
    rng = random.Random(0)
    for _ in range(300):
        points = [rng.choice([rng.randrange(32, 127), rng.randrange(0xD7FF)]) for _ in range(20)]
        text = "".join(map(chr, points))
        assert tokenizer.decode(tokenizer(text).input_ids) == text


def test_the_saved_tokenizer_fits_the_model(tokenizer):
    assert len(tokenizer) <= make.VOCABULARY
    assert tokenizer.eos_token == "<|im_end|>" and tokenizer.pad_token != tokenizer.eos_token


# ---------------------------------------------------------------------------- local data sets
ROWS = [{"problem": f"What is {i} + {i}?", "answer": str(2 * i)} for i in range(40)]


def plain(problems: list[Problem]) -> list[Problem]:
    """Without their other columns."""
    return [problem._replace(columns={}) for problem in problems]


def write(path: Path, rows: list[dict]) -> str:
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows))
    elif path.suffix == ".csv":
        datasets.Dataset.from_list(rows).to_csv(str(path))
    else:
        datasets.Dataset.from_list(rows).to_parquet(str(path))
    return str(path)


def all_problems(name, **given):
    train, held_out = data.load_problems(flags(dataset_name=name, **given))
    return sorted(train + held_out, key=str)


@pytest.mark.parametrize("kind", ["jsonl", "json", "parquet", "csv"])
@pytest.mark.parametrize("prompt", ["problem", "question", "prompt"])
@pytest.mark.parametrize("answer", ["answer", "solution"])
def test_local_files_of_every_kind(tmp_path, kind, prompt, answer):
    gold = "It is \\boxed{%s}." if answer == "solution" else "%s"
    rows = [{prompt: r["problem"], answer: gold % r["answer"], "level": 1} for r in ROWS]
    found = all_problems(write(tmp_path / f"set.{kind}", rows))
    expected = [(r["problem"], r["answer"]) for r in ROWS]
    level = "1" if kind == "csv" else 1
    columns = [{answer: gold % right, "level": level} for _, right in expected]
    made = [Problem(*e, columns=c) for e, c in zip(expected, columns, strict=True)]
    assert found == sorted(made, key=str)


def test_cells_of_a_csv_file_stay_as_written(tmp_path):
    """pandas makes 12.0 of 12 where another cell is empty, 7 of 007 and nothing of NA."""
    name = tmp_path / "set.csv"
    name.write_text(
        '\ufeffproblem,answer,note\n"1,000 + ""2""?\nNow.",12,x\nb,,\nc,007,NA\n\nd,1.50,\n'
    )
    rows = data.read_split(str(name), None, "train")
    found = data.parse_rows(rows, "x", None, None)
    assert [(p.prompt, p.answer) for p in found] == [
        ('1,000 + "2"?\nNow.', "12"),
        ("c", "007"),
        ("d", "1.50"),
    ]
    assert [p.columns["note"] for p in found] == ["x", "NA", ""]


@pytest.mark.parametrize(
    "text, says",
    [
        ("problem,answer\na,1\n1,000 + 2?,1002\n", "3 cells, not 2: 1,000 \\+ 2\\?,1002"),
        ("problem,answer\na\n", "1 cells, not 2: a"),
        ('problem,answer\n"a,1\n', "unexpected end of data"),
        ("\n", "has no rows"),
        ("problem,answer\n", "has no rows"),
    ],
)
def test_a_csv_file_that_is_no_table(tmp_path, text, says):
    """A comma without quotes would shift the answers without a word."""
    (tmp_path / "set.csv").write_text(text)
    with pytest.raises(DataError, match=says):
        data.load_problems(flags(dataset_name=tmp_path / "set.csv"))


def test_columns_named_by_flags(tmp_path):
    rows = [{"q": r["problem"], "a": r["answer"], "problem": "no", "answer": "no"} for r in ROWS]
    name = write(tmp_path / "set.jsonl", rows)
    found = all_problems(name, prompt_column="q", answer_column="a")
    assert sorted(plain(found)) == sorted(Problem(r["problem"], r["answer"]) for r in ROWS)
    assert all(p.columns == {"a": p.answer, "problem": "no", "answer": "no"} for p in found)


def test_answer_wins_over_solution_and_problem_over_prompt(tmp_path):
    row = {"prompt": "P", "problem": "Q", "solution": "\\boxed{1}", "answer": "2"}
    columns = {"prompt": "P", "solution": "\\boxed{1}", "answer": "2"}
    assert data.parse_rows([row], "x", None, None) == [Problem("Q", "2", (), columns)]


SUM = [  # completions of 7 + 5 - 4: 12, 8; and the character that is wrong first
    ("7 + 5 = 12. 12 - 4 = 8. \\boxed{8}", None),
    ("7 + 5 = 12. 12 - 4 = 9. \\boxed{9}", 21),
    ("7 + 5 = 13. 13 - 4 = 8. \\boxed{8}", 9),  # slips that cancel
    ("7 + 5 - 4 = 8. \\boxed{8}", 12),  # no steps
    ("7 + 5 = 12. 12 - 4 = 8.", 23),
]


@pytest.mark.parametrize(("text", "wrong"), SUM)
def test_steps_that_a_data_set_names_must_be_stated(text, wrong):
    row = {"problem": "7 + 5 - 4", "answer": "8", "steps": [12, 8]}
    (problem,) = data.parse_rows([row], "x", None, None)
    assert problem.steps == (12, 8) and problem.columns["steps"] == [12, 8]
    assert first_error(text, problem) == wrong
    with Grader() as grader:
        assert data.correctness(grader, [text], [problem]) == [float(wrong is None)]
    marked = [i for i, role in enumerate(token_roles([*text], problem)) if role[:5] == "first"]
    assert marked == ([] if wrong is None else [min(wrong, len(text) - 1)])


def test_steps_may_be_written_with_commas_and_the_box_as_the_grader_has_it():
    problem = Problem("700 + 500", "1200", (1200,), opening=0)
    boxes = [" 1200 ", "1,200", "1200.", "\\$1200", "1200\\text{ in total}"]
    right = [f"700 + 500 = {step}. \\boxed{{{box}}}" for step in ("1200", "1,200") for box in boxes]
    wrong = [
        f"700 + 500 = {step}. \\boxed{{{box}}}"
        for step in ("1,200.0", "-1,200", "11,200", "1,2000", "200")
        for box in boxes
    ]
    wrong += ["700 + 500 = 1200. \\boxed{1201}"]
    texts = right + wrong
    assert first_error(right[0], problem) is None  # nor is a token marked as wrong
    assert first_error(right[6], problem) is None
    with Grader() as grader:
        verdicts = data.correctness(grader, texts, [problem] * len(texts))
    assert verdicts == [1.0] * len(right) + [0.0] * len(wrong)


@pytest.mark.parametrize("steps", [[12, 8], ["12", "8"], [12.0, 8.0], "[12, 8]", '["12", "8"]'])
def test_steps_are_read_as_every_kind_of_file_holds_them(steps, capsys):
    row = {"problem": "7 + 5 - 4", "answer": "8", "steps": steps}
    (problem,) = data.parse_rows([row], "x", None, None)
    assert problem.steps == (12, 8) and problem.columns["steps"] == steps
    assert capsys.readouterr().err == ""


NO_STEPS = [None, [], "[]", 2, "12, 8", "a", [12.5], [True], [{"a": 1}], "9" * 5000, "[" * 100_000]


@pytest.mark.parametrize("steps", NO_STEPS, ids=range(len(NO_STEPS)))
def test_what_else_a_column_of_that_name_holds_is_no_steps(steps, capsys):
    """Which is said, because without steps the final answer alone is judged."""
    row = {"problem": "7 + 5 - 4", "answer": "8", "steps": steps}
    (problem,) = data.parse_rows([row], "x", None, None)
    assert problem.steps == () and problem.columns["steps"] == steps
    said = "steps is no list of integers in 1 of 1 rows of x, first in row 1: not judged there\n"
    assert capsys.readouterr().err == (said if steps not in (None, [], "[]") else "")


@pytest.mark.parametrize(
    "gold, expected",
    [
        ("He had 3 * 4 = <<3*4=12>>12.\n#### 12", "12"),
        ("#### 1,234 ", "1,234"),
        ("#### 1\n#### 2", "2"),
        ("so \\boxed{\\frac{1}{2}}.", "\\frac{1}{2}"),
        ("\\boxed{1} then \\boxed{ 2 }", "2"),
        ("the answer is 5", None),
        ("\\boxed{5", None),
        ("", None),
    ],
)
def test_final_answer(gold, expected):
    assert data.final_answer(gold) == expected


def test_rows_without_an_answer_are_left_out():
    golds = ["\\boxed{1}", "no box 5", "", None, "\\boxed{}", "#### ", "\\boxed{2}"]
    rows = [{"problem": f"p{i}", "solution": gold} for i, gold in enumerate(golds)]
    rows += [{"problem": None, "solution": "\\boxed{3}"}, {"problem": "", "solution": "\\boxed{4}"}]
    found = data.parse_rows(rows, "x", None, None)
    assert plain(found) == [Problem("p0", "1"), Problem("p6", "2")]
    assert [p.columns["solution"] for p in found] == ["\\boxed{1}", "\\boxed{2}"]
    golds = ["4", "", None, "####", 5]
    rows = [{"problem": f"p{i}", "answer": gold} for i, gold in enumerate(golds)]
    found = data.parse_rows(rows, "x", None, None)
    assert plain(found) == [Problem("p0", "4"), Problem("p4", "5")]
    assert found[1].columns == {"answer": 5}  # as it stands in the row


def test_how_many_rows_are_left_out(capfd, monkeypatch):
    rows = [{"question": "a", "solution": gold} for gold in ("\\boxed{1}", "So it is 5", None)]
    data.parse_rows(rows[:1], "x", None, None)
    assert capfd.readouterr().err == ""
    data.parse_rows(rows, "x", None, None)
    why = "rows of x are left out: no prompt in question or no final answer in solution"
    assert capfd.readouterr() == ("", f"2 of 3 {why}\n")
    with pytest.raises(DataError, match=f"2 of 2 {why}; name others with --prompt_column and"):
        data.parse_rows(rows[1:], "x", None, None)
    monkeypatch.setenv("RANK", "1")  # one process says it
    data.parse_rows(rows, "x", None, None)
    assert capfd.readouterr() == ("", "")


def test_a_solution_that_is_a_plain_answer():
    plain_answers = ["5", " -1,234 ", "\\frac{1}{2}", "16 apples", "x + 1", "$12.50", "Paris"]
    plain_answers += ["\\text{no solution}", "2 \\text{ or } 3", "\\sin x", "(1, 2)", 7, 0.5]
    prose = ["no box", "So it is 5", "the answer is 5", "He adds 4.\nThen 5", "Answer: 5"]
    prose += ["First, add them", "x is 5"]
    rows = [{"problem": f"p{i}", "solution": s} for i, s in enumerate(plain_answers + prose)]
    found = data.parse_rows(rows, "x", None, None)
    assert [p.answer for p in found] == [str(answer).strip() for answer in plain_answers]


def test_an_answer_that_no_box_will_equal_is_said_with_its_row(capfd, monkeypatch):
    fine = ["16", "\\text{Monday}", "13 hours 30 minutes", "BC = 5", "not enough information"]
    fine += ["\\cos 30", "room 16", "so 3 \\boxed{16}", "The total is 4\n#### 16", "\\isqrt{4}"]
    sentences = ["the answer is 16", "Answer: 16", "He has 16 apples", "x is 16"]
    for answers in (fine, [*fine, *sentences]):
        rows = [{"problem": f"p{i}", "answer": answer} for i, answer in enumerate(answers)]
        assert len(data.parse_rows(rows, "x", None, None)) == len(answers)
        said = capfd.readouterr().err
        if answers is fine:
            assert said == ""
    assert said.startswith("row 11 of x has the answer 'the answer is 16' (and 3 more rows), a ")
    assert said.endswith("give the value alone, or mark it with #### or \\boxed{}\n")
    for sentence in sentences:
        data.parse_rows([{"problem": "p", "answer": sentence}], "x", None, None)
        assert f"row 1 of x has the answer {sentence!r}, a" in capfd.readouterr().err
    monkeypatch.setenv("RANK", "1")  # one process says it
    data.parse_rows(rows, "x", None, None)
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("kind", ["jsonl", "json", "parquet", "csv"])
def test_a_file_that_changed_but_not_its_time_gives_the_new_rows(tmp_path, kind):
    path = tmp_path / f"set.{kind}"
    for answer in ("1", "2"):
        write(path, [{"problem": f"p{i}", "answer": answer} for i in range(9)])
        os.utime(path, (1e9, 1e9))
        assert {p.answer for p in all_problems(str(path))} == {answer}


def test_json_values_as_they_are_written(tmp_path):
    path = tmp_path / "set.jsonl"
    values = ["0.00001", "1e-7", "14.1", "7", "12.0", "1e22", "NaN", "Infinity", "null", '"007"']
    values += ["123456789012345678901", '"2024-01-01"', "-2.50"]
    lines = [f'{{"problem": "p{i}", "answer": {value}}}' for i, value in enumerate(values)]
    path.write_text("\ufeff" + "\n\n".join(lines) + '\n{"problem": "no answer", "level": 1}')
    found = data.parse_rows(data.read_split(str(path), None, ""), "x", None, None)
    assert [p.answer for p in found] == [
        "0.00001", "0.0000001", "14.1", "7", "12.0", "10000000000000000000000", "007",
        "123456789012345678901", "2024-01-01", "-2.5",
    ]  # fmt: skip
    assert found[0].columns == {"answer": 0.00001, "level": None}


@pytest.mark.parametrize(
    "text, says",
    [
        ('{"problem": "a", "answer": 1}\n{"problem": "b"', "line 2"),
        ('[{"problem": "a", "answer": 1}, 5]', "row 2 is not an object"),
        ("5", "row 1 is not an object"),
        ("[" * 100_000, "recursion"),
        ("[]", "has no rows"),
        ("\ufeff \n", "has no rows"),
    ],
)
def test_a_json_file_that_is_no_table(tmp_path, text, says):
    (tmp_path / "set.json").write_text(text)
    with pytest.raises(DataError, match=says):
        data.load_problems(flags(dataset_name=tmp_path / "set.json"))


def test_small_floats_of_a_parquet_file(tmp_path, monkeypatch):
    values = {"float32": [14.1, 0.1, None], "float64": [14.1, 1e-5, math.nan], "binary": [b"1"] * 3}
    for dtype, cells in values.items():
        features = datasets.Features(
            {"problem": datasets.Value("string"), "answer": datasets.Value(dtype)}
        )
        columns = {"problem": ["a", "b", "c"], "answer": cells}
        table = datasets.Dataset.from_dict(columns, features)
        table.to_parquet(str(tmp_path / "set.parquet"))
        monkeypatch.setattr(datasets, "load_dataset", lambda *_, split, table=table: table)
        for name in (str(tmp_path / "set.parquet"), "on/hub"):
            rows = data.read_split(name, None, "train")
            if dtype == "binary":
                with pytest.raises(DataError, match=r"row 1 of x: .* answer one answer"):
                    data.parse_rows(rows, "x", None, None)
            else:
                found = data.parse_rows(rows, "x", None, None)
                second = "0.1" if dtype == "float32" else "0.00001"
                assert [p.answer for p in found] == ["14.1", second]


def test_a_prompt_as_text_and_as_chat_is_never_in_both_sets(tmp_path):
    chats = [[{"role": "user", "content": f"p{i}", "name": "x"}] for i in range(30)]
    text = write(tmp_path / "text.jsonl", [{"prompt": f"p{i}", "answer": "1"} for i in range(40)])
    chat = write(tmp_path / "chat.jsonl", [{"prompt": p, "answer": "1"} for p in chats])
    train, held_out = data.load_problems(flags(dataset_name=text, eval_dataset_name=chat))
    assert len(held_out) == 30
    assert sorted(p.prompt for p in train) == [f"p{i}" for i in range(30, 40)]


ESCAPES = "\x1b[2J\x1b]0;title\x07\x9b2J\u202e\r\n\ud800"


def test_no_message_has_escape_codes(tmp_path, capfd, tokenizer, monkeypatch):
    """Of column names, cells, templates, and of what reward functions raise or return."""
    cell = f"the answer is {ESCAPES} 16"
    data.parse_rows(
        [{"problem": "a", "answer": cell}, {"problem": "b", "answer": ""}], "x", None, None
    )
    said = [capfd.readouterr().err]
    (tmp_path / "set.csv").write_text(f"problem,answer\n1,{ESCAPES[:-3]},2\n")
    monkeypatch.setattr(tokenizer, "chat_template", f"{{{{ raise_exception({ESCAPES[:-1]!r}) }}}}")

    def broken(**_):
        raise ValueError(ESCAPES)

    class Shown:
        def __repr__(self):
            return ESCAPES

    def returns(**_):
        return [Shown()]

    for call in (
        lambda: data.parse_rows([{ESCAPES: 1}], "x", None, None),
        lambda: data.read_split(str(tmp_path / "set.csv"), None, "train"),
        lambda: data.encode_prompt(tokenizer, "a"),
        lambda: call_reward_func("mine", broken, ["a"], ["b"], [[1]], {}, {}),
        lambda: call_reward_func("mine", returns, ["a"], ["b"], [[1]], {}, {}),
    ):
        with pytest.raises((DataError, RewardError)) as error:
            call()
        said.append(str(error.value) + "\n")
    for text in said:
        assert "\\x1b[2J" in text, text
        assert all(line.isprintable() for line in text.removesuffix("\n").split("\n")), text


def test_printable():
    assert printable(ESCAPES[:-1]) == "\\x1b[2J\\x1b]0;title\\x07\\x9b2J\\u202e  "
    assert printable("naïve ∑ 数学 🙂") == "naïve ∑ 数学 🙂" and printable("\ud800") == "\\ud800"
    assert printable(ValueError("two\nlines")) == "two lines"


def test_a_prompt_of_50_mb_is_refused_quickly():
    prompt = "five words of a prompt " * 2_200_000
    for long in (prompt, [{"role": "user", "content": prompt}]):
        rows = [{"prompt": "a", "answer": "1"}, {"prompt": long, "answer": "2"}]
        begin = time.monotonic()
        with pytest.raises(DataError, match="row 2 of x has a prompt of 50,600,000 characters"):
            data.parse_rows(rows, "x", None, None)
        assert time.monotonic() - begin < 1


def test_a_list_of_one_answer_is_that_answer():
    golds = [["84"], [84], ["so #### 84"], [], [None], "[84]"]
    rows = [{"problem": f"p{i}", "answer": gold} for i, gold in enumerate(golds)]
    found = data.parse_rows(rows, "x", None, None)
    assert [p.answer for p in found] == ["84", "84", "84", "[84]"]
    assert found[0].columns == {"answer": ["84"]}  # as it stands in the row


@pytest.mark.parametrize("gold", [["84", "85"], {"value": "84"}, [["84", "85"]], [{"value": "84"}]])
def test_several_answers_are_refused(gold):
    """They once became gold answers such as "['84', '85']", which no completion states."""
    rows = [{"problem": "a", "value": ["84"]}, {"problem": "b", "value": gold}]
    with pytest.raises(DataError, match=r"row 2 of x: .*value one answer.*--answer_column"):
        data.parse_rows(rows, "x", None, "value")


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_conversational_prompts(tmp_path, kind, tokenizer):
    def chat(i):
        system = {"role": "system", "content": "Be brief."}
        return [system, {"role": "user", "content": f"What is {i}?"}]

    name = write(tmp_path / f"s.{kind}", [{"prompt": chat(i), "answer": str(i)} for i in range(9)])
    found = all_problems(name)
    assert plain(found) == sorted([Problem(chat(i), str(i)) for i in range(9)], key=str)
    text = tokenizer.decode(data.encode_prompt(tokenizer, found[0].prompt))
    assert text.startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nWhat is 0?")


@pytest.mark.parametrize(
    "prompt", [["text"], [{"from": "human", "value": "x"}], 5, [{"role": "user", "content": None}]]
)
def test_prompts_that_are_neither_text_nor_messages_are_refused(prompt):
    """A chat template would write an empty message for most of them, and say nothing."""
    rows = [{"prompt": "a", "answer": "1"}, {"prompt": prompt, "answer": "1"}]
    with pytest.raises(DataError, match=r"row 2 of x: prompt must .*--prompt_column"):
        data.parse_rows(rows, "x", None, None)


def test_local_held_out_rows_are_the_same_for_every_seed_and_never_trained_on(tmp_path):
    rows = ROWS + ROWS[:15]  # repeats must not slip through either
    name = write(tmp_path / "set.jsonl", rows)
    seen = set()
    for seed in range(3):
        train, held_out = data.load_problems(flags(dataset_name=name, seed=seed))
        assert len(held_out) == len(rows) // 5
        assert not {p.prompt for p in train} & {p.prompt for p in held_out}
        assert {p.prompt for p in train + held_out} == {r["problem"] for r in ROWS}
        seen.add(tuple(p.prompt for p in held_out))
    assert len(seen) == 1
    few = data.load_problems(flags(dataset_name=name, max_eval_samples=3))[1]
    assert [p.prompt for p in few] == list(seen.pop())[:3]


def test_an_evaluation_set_of_its_own(tmp_path):
    name = write(tmp_path / "train.jsonl", ROWS)
    other = write(tmp_path / "eval.jsonl", [*ROWS[30:], {"problem": "New?", "answer": "7"}])
    train, held_out = data.load_problems(flags(dataset_name=name, eval_dataset_name=other))
    assert len(held_out) == 11 and Problem("New?", "7") in plain(held_out)
    assert sorted(plain(train)) == sorted(Problem(r["problem"], r["answer"]) for r in ROWS[:30])
    train, held_out = data.load_problems(flags(dataset_name=name, eval_dataset_name=data.EMBEDDED))
    assert len(train) == 40 and len(held_out) == flags().max_eval_samples
    assert all(p.steps for p in held_out)


def test_the_embedded_sets():
    train, held_out = data.load_problems(flags(max_eval_samples=100))
    assert len(train) == 4096 and len(held_out) == 100
    assert not {p.prompt for p in train} & {p.prompt for p in held_out}
    assert all(p.columns == {"answer": p.answer} for p in train + held_out)
    again = data.load_problems(flags(max_eval_samples=100, seed=2))
    assert again[1] == held_out and again[0] != train


@pytest.mark.parametrize("length", [2, 5, 8])
def test_chains_of_a_number_of_operations(length):
    train, held_out = data.load_problems(flags(dataset_config=length, max_eval_samples=100))
    assert len(train) == 4096 and len(held_out) == 100
    assert not {p.prompt for p in train} & {p.prompt for p in held_out}
    for problem in train[:200] + held_out:
        values = recompute(problem.prompt)
        assert list(problem.steps) == values and problem.answer == str(values[-1])
        assert len(values) == length and all(1 <= value <= 99 for value in values)


@pytest.mark.parametrize("config", ["1", "9", "many", ""])
def test_other_numbers_of_operations_are_refused(config):
    with pytest.raises(data.DataError, match="has 2 to 8 operations, give a number"):
        data.load_problems(flags(dataset_config=config))


def test_asking_for_more_chains_than_there_are(monkeypatch):
    """`--dataset_config 2 --max_eval_samples 20000` once drew for ever; now it is as with a file of
    fewer rows."""
    few = [CHAIN._replace(start=start) for start in (23, 24, 25)]
    draws = iter(few + few[:1] * 40_000 + [CHAIN._replace(start=26)] + few * 100_000)

    def random_chain(*_):
        return next(draws)

    monkeypatch.setattr(problems, "random_chain", random_chain)
    assert [p.answer for p in chain_problems(9, held_out=True)] == ["79", "81", "83", "85"]


@pytest.mark.slow  # all chains of two operations, one by one
def test_every_chain_of_two_operations_is_found():
    operations = [Operation("add", by) for by in range(2, 20)]
    operations += [Operation("subtract", by) for by in range(2, 20)]
    operations += [Operation("multiply", by) for by in (2, 3)]
    starts = range(5, 61)
    chains = [Chain(s, (a, b)) for s, a, b in itertools.product(starts, operations, operations)]
    chains = [c for c in chains if all(1 <= value <= 99 for value in c.results())]
    every = {c.prompt() for c in chains if c.is_held_out()}
    found = data.load_problems(flags(dataset_config=2, max_eval_samples=20_000))[1]
    assert len(found) == 6894 and {p.prompt for p in found} == every


@pytest.mark.slow
def test_the_long_policy_can_do_eight_operations(make_run, tokenizer):
    policy = str(Path(TINY).with_name("long_policy"))
    run = make_run(model=policy, adapter=0.0, max_completion_length=160)
    assert run.tokenizer.get_vocab() == tokenizer.get_vocab()
    problems = chain_problems(64, held_out=True, length=8)
    prompts = [data.encode_prompt(run.tokenizer, problem.prompt) for problem in problems]
    u = trainer.row_uniforms(run.args, "test", 0, torch.arange(64), 160)
    rates = []
    with run.grader:
        for greedy in (False, True):
            batch = trainer.sample(run, torch.arange(64), prompts, u, is_greedy=greedy)
            batch.problems = problems
            rates.append(sum(data.grade_batch(run, batch)) / 64)
    assert 0.15 < rates[0] < 0.55  # 0.3 over many
    assert rates[1] > 0.85  # it keeps its place where every step has the same words


# ------------------------------------------------------------------------------------- rewards
CHAT = [{"role": "user", "content": "2 + 2?"}]


@pytest.fixture(scope="module")
def grader():
    with Grader(timeout=30.0) as shared:
        yield shared


def test_correctness(grader):
    texts = [RIGHT, RIGHT.replace("42", "43"), RIGHT.replace("{79}", "{78}"), "", "so \\boxed{8/2}"]
    problems = [PROBLEM] * 4 + [Problem("2 + 2?", "4")]
    assert data.correctness(grader, texts, problems) == [1.0, 0.0, 0.0, 0.0, 1.0]
    assert data.correctness(grader, [], []) == []


def alone(value, how):
    """Accelerate's reduce in a run of one process."""
    return value


def rewards(
    grader, functions: dict, texts: list[str], ids: list[list[int]], problems,
    reduce=alone,
) -> tuple:  # fmt: skip
    """What `reward_batch` returns and writes, of functions of weight 1, 2, ..."""
    mask = pad_sequence([torch.ones(len(row), dtype=torch.bool) for row in ids], True)
    padded = pad_sequence([torch.tensor(row) for row in ids], True)
    batch = SimpleNamespace(ids=padded, mask=mask, prompt_width=0, sampled_logp=torch.zeros(1))
    batch.problems = problems
    weighted = {name: (f, weight) for weight, (name, f) in enumerate(functions.items(), 1)}
    run = SimpleNamespace(grader=grader, reward_funcs=weighted)

    def batch_decode(rows, **_):
        return texts

    run.tokenizer = SimpleNamespace(batch_decode=batch_decode)
    run.accelerator = SimpleNamespace(reduce=reduce)
    metrics = {}
    return data.reward_batch(run, batch, metrics).tolist(), metrics


def test_rewards_by_name(grader):
    seen = []

    def length(prompts, completions, completion_ids, log_metric, **columns):
        log_metric("tokens", 3.0)
        log_metric("tokens", 4.0)
        seen.append((prompts, completions, columns))
        return [len(ids) for ids in completion_ids]

    def level(level, **_):
        return level

    problems = [
        Problem("2 + 2?", "4", columns={"answer": "4", "level": 1, "rare": 0}),
        Problem("3 + 3?", "6", columns={"answer": "6", "level": 2}),
    ]
    texts = ["\\boxed{4}", "\\boxed{5}"]
    ids = [[1, 2, 3], [4]]
    functions = {"length": length, "accuracy_reward": None, "level": level}
    got, metrics = rewards(grader, functions, texts, ids, problems)
    assert got == [1 * 3.0 + 2 * 1.0 + 3 * 1.0, 1 * 1.0 + 2 * 0.0 + 3 * 2.0]
    assert metrics == {
        "rewards/length/mean": 2.0, "rewards/length/tokens": 3.5,
        "rewards/accuracy_reward/mean": 0.5, "rewards/level/mean": 1.5,
    }  # fmt: skip
    # Not `rare`: one of them lacks it.
    columns = {"answer": ["4", "6"], "level": [1, 2], "gold": ["4", "6"]}
    assert seen == [(["2 + 2?", "3 + 3?"], texts, columns)]

    def short(**_):
        return [1.0]

    with pytest.raises(RewardError, match="short"):
        rewards(grader, {"short": short}, texts, ids, problems)


def test_a_reward_function_gets_the_final_answers(grader):
    """README's, on GSM8K, whose `answer` is the whole solution."""

    def right(completions, gold, **_):
        return [
            data.final_answer(text) == want for text, want in zip(completions, gold, strict=True)
        ]

    rows = [{"question": "2 + 2?", "answer": "2 + 2 = <<2+2=4>>4\n#### 4"}]
    problems = data.parse_rows(rows, "gsm8k", None, None) * 2
    texts = ["\\boxed{4}", "\\boxed{5}"]
    assert rewards(grader, {"right": right}, texts, [[1], [1]], problems)[0] == [1.0, 0.0]
    problems = data.parse_rows([rows[0] | {"gold": "5"}], "own", None, None) * 2  # their own column
    assert rewards(grader, {"right": right}, texts, [[1], [1]], problems)[0] == [0.0, 1.0]


def test_a_function_that_is_not_for_every_completion(grader, monkeypatch):
    """TRL's None, which `call_reward_func` returns as NaN: in no sum, and in no mean."""
    nan = float("nan")
    values = {"some": [3.0, nan, 0.0], "none": [nan] * 3, "all": [1.0, 2.0, 3.0]}

    def call_reward_func(name, *_):
        return values[name]

    monkeypatch.setattr(data, "call_reward_func", call_reward_func)
    problems = [Problem("2 + 2?", "4")] * 3
    ids = [[1]] * 3
    got, metrics = rewards(grader, dict.fromkeys(values, len), [""] * 3, ids, problems)
    assert got == [1 * 3.0 + 3 * 1.0, 3 * 2.0, 3 * 3.0]
    assert metrics == {"rewards/some/mean": 1.5, "rewards/all/mean": 2.0}
    got, _ = rewards(grader, {"some": len, "none": len}, [""] * 3, ids, problems)
    assert math.isnan(got[1]) and got[::2] == [3.0, 0.0]  # a 0 is a judgement
    got, metrics = rewards(grader, {"none": len}, [""] * 3, ids, problems)
    assert all(map(math.isnan, got)) and metrics == {}

    def reduce(value, how):  # the other process has 0.5 of one completion
        assert how == "sum"
        return value + torch.tensor([0.5, 1.0])

    got, metrics = rewards(grader, {"some": len}, [""] * 3, ids, problems, reduce)
    assert metrics == {"rewards/some/mean": pytest.approx(3.5 / 3)}


def test_numbers_that_only_another_process_logs(grader, monkeypatch):
    """They are averaged over all that were logged, in the same order on every process."""
    reduced = []

    def mine(log_metric, **_):
        log_metric("b", 1.0)
        return [0.0]

    def reduce(value, how):  # the other process has logged a = 5 and b = 3, and a reward of 0
        reduced.append(value.tolist())
        return value + torch.tensor([[5.0, 1.0], [3.0, 1.0], [0.0, 1.0]][len(reduced) - 1])

    monkeypatch.setattr("accelerate.utils.gather_object", lambda names: [*names, "b", "mean", "a"])
    problems = [Problem("2 + 2?", "4")]
    _, metrics = rewards(grader, {"mine": mine}, ["x"], [[1]], problems, reduce)
    assert reduced == [[0.0, 0.0], [1.0, 1.0], [0.0, 1.0]]
    assert metrics == {"rewards/mine/a": 5.0, "rewards/mine/b": 2.0, "rewards/mine/mean": 0.0}


def test_weighted_sums_beyond_float32_are_refused(grader):
    problems, ids, texts = [Problem("2 + 2?", "4")] * 2, [[1], [1]], ["a", "b"]
    for values in ([1.0, 1e39], [-1e300, 1.0], [1.0, 1e30]):
        row = 0 if values[0] < 0 else 1
        said = rf"completions\[{row}\] add up to .*--reward_weights"
        with pytest.raises(RewardError, match=said):
            rewards(grader, {"large": lambda values=values, **_: values}, texts, ids, problems)
    assert rewards(grader, {"f": lambda **_: [1e9, None]}, texts, ids, problems)[0][0] == 1e9


def test_edits_of_a_reward_function_do_not_reach_the_next(grader):
    def edit(prompts, levels, **_):
        prompts[0] = levels[0][0] = "edited"
        return [0.0, 0.0]

    def level(prompts, levels, **_):
        assert prompts == ["2 + 2?"] * 2
        return [level[0] for level in levels]

    problems = [Problem("2 + 2?", "4", columns={"levels": [3.0]})] * 2
    got, _ = rewards(grader, {"edit": edit, "level": level}, ["a", "b"], [[1], [1]], problems)
    assert got == [6.0, 6.0] and problems[0].columns == {"levels": [3.0]}


def test_a_chat_gets_messages(grader):
    def content(completions, **_):
        return [float(completion[0]["content"]) for completion in completions]

    problems = [Problem(CHAT, "4", columns={"answer": "4"})] * 2
    got, _ = rewards(grader, {"content": content}, ["7", "8"], [[1], [1]], problems)
    assert got == [7.0, 8.0]


# ---------------------------------------------------------------------------- Hub and real data
@pytest.mark.parametrize(
    "given, calls",
    [
        (
            {"dataset_name": "openai/gsm8k"},
            [("openai/gsm8k", "main", "train"), ("openai/gsm8k", "main", "test")],
        ),
        (
            {"dataset_name": "DigitalLearningGmbH/MATH-lighteval"},
            [("DigitalLearningGmbH/MATH-lighteval", None, s) for s in ("train", "test")],
        ),
        ({"dataset_name": "HuggingFaceH4/MATH-500"}, [("HuggingFaceH4/MATH-500", None, "test")]),
        (
            {"dataset_name": "openai/gsm8k", "eval_dataset_name": "HuggingFaceH4/MATH-500"},
            [("openai/gsm8k", "main", "train"), ("HuggingFaceH4/MATH-500", None, "test")],
        ),
        (
            {"dataset_name": "a/b", "dataset_config": "c", "dataset_train_split": "train[:9]",
             "dataset_test_split": "validation"},
            [("a/b", "c", "train[:9]"), ("a/b", "c", "validation")],
        ),
        ({"dataset_name": "openai/gsm8k", "dataset_config": "socratic"},
         [("openai/gsm8k", "socratic", s) for s in ("train", "test")]),
    ],
)  # fmt: skip
def test_hub_names(monkeypatch, given, calls):
    made = []

    def load_dataset(name, config=None, *, split):
        made.append((name, config, split))
        rows = [{"question": f"{name} {split} {i}", "answer": f"#### {i}"} for i in range(20)]
        return datasets.Dataset.from_list(rows)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    train, held_out = data.load_problems(flags(**given))
    assert made == calls
    assert train and held_out and not {p.prompt for p in train} & {p.prompt for p in held_out}


def need(name: str) -> str:
    if not (SHARED / name).exists():
        pytest.skip(f"{SHARED / name} is not there: real problems are not part of the project")
    return str(SHARED / name)


def test_gsm8k():
    rows = data.read_split(need("gsm8k_train.jsonl"), None, "train")
    problems = data.parse_rows(rows, "gsm8k", None, None)
    assert len(problems) == len(rows) > 7000
    assert problems[0].prompt.startswith("Natalia sold clips to 48 of her friends in April")
    assert [p.answer for p in problems[:4]] == ["72", "10", "5", "42"]
    assert all(re.fullmatch(r"-?[\d,]+(\.\d+)?", p.answer) for p in problems)
    assert all(p.columns["answer"].endswith("#### " + p.answer) for p in problems)


def test_math500():
    """Its answer column, and the boxed answers of its solutions, are the same."""
    rows = data.read_split(need("math500.jsonl"), None, "train")
    problems = data.parse_rows(rows, "math", None, None)
    assert len(problems) == 500
    first = ["\\left( 3, \\frac{\\pi}{2} \\right)", "p - q", "\\frac{14}{3}"]
    assert [p.answer for p in problems[:3]] == first
    boxed = data.parse_rows(rows, "math", None, "solution")
    assert len(boxed) == 500
    assert sum(a.answer == b.answer for a, b in zip(problems, boxed, strict=True)) > 490


def test_real_files_split_without_overlap():
    train, held_out = data.load_problems(flags(dataset_name=need("math500.jsonl")))
    assert len(held_out) == 100 and len(train) == 400
    assert not {p.prompt for p in train} & {p.prompt for p in held_out}


# ------------------------------------------------------------------------- order of the problems
def test_every_epoch_visits_every_problem_once_in_its_own_order():
    def epoch(number, seed=1):
        return [data.problem_at(number * 37 + i, 37, seed) for i in range(37)]

    orders = [tuple(epoch(e, seed)) for e, seed in itertools.product(range(4), range(3))]
    assert all(sorted(order) == list(range(37)) for order in orders)
    assert len(set(orders)) == 12 and tuple(range(37)) not in orders


def test_the_order_has_no_state():
    """A resumed run, or another process, finds the same problem at a position."""
    places = list(range(200))
    straight = [data.problem_at(place, 23, 5) for place in places]
    mixed = random.Random(0).sample(places, 200)
    random.seed(9)
    state = random.getstate()
    data.epoch_order.cache_clear()
    assert {p: data.problem_at(p, 23, 5) for p in mixed} == dict(zip(places, straight, strict=True))
    assert random.getstate() == state
    data.problem_at(0, 23, 5)
    assert data.problem_at(0, 1, 5) == data.problem_at(12345, 1, 5) == 0


# ------------------------------------------------------------------------------------- prompts
def prompt_text(tokenizer, *args):
    return tokenizer.decode(data.encode_prompt(tokenizer, *args))


def test_golden_prompts_of_the_tiny_policy(tokenizer):
    golden = "<|im_start|>user\nStart with 23, add 19.<|im_end|>\n<|im_start|>assistant\n"
    assert prompt_text(tokenizer, "Start with 23, add 19.") == golden
    system = "<|im_start|>system\nBe brief.<|im_end|>\n"
    assert prompt_text(tokenizer, "Start with 23, add 19.", "Be brief.") == system + golden


def test_a_template_that_leaves_the_system_message_out_is_refused(tokenizer, monkeypatch):
    """As that of Phi-3-medium, which has no branch for it."""
    users = "{% for m in messages if m.role != 'system' %}{{ m.content }}{% endfor %}"
    mode = "{% if messages[0].role == 'system' %}(short){% endif %}" + users
    problem = Problem("Start with 23.", "23")
    for template, is_refused in ((users, True), (mode, False), (make.CHAT_TEMPLATE, False)):
        monkeypatch.setattr(tokenizer, "chat_template", template)
        data.check_system_message(tokenizer, problem, None, {})
        if is_refused:
            with pytest.raises(DataError, match="leaves the system message out"):
                data.check_system_message(tokenizer, problem, "Be brief.", {})
        else:
            data.check_system_message(tokenizer, problem, "Be brief.", {})


def test_a_pad_token_beyond_the_vocabulary_is_not_used(tmp_path):
    """As in some files of Llama 2. To read it would be an IndexError in the middle of a run."""
    folder = shutil.copytree(TINY, tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens([f"<{i}>" for i in range(100)])
    tokenizer.add_special_tokens({"pad_token": "<a new one>"})
    tokenizer.save_pretrained(folder)
    assert data.load_tokenizer(str(folder), "main")[0].pad_token == tokenizer.eos_token


def test_a_prompt_with_a_token_beyond_the_vocabulary_is_refused(tmp_path):
    """To read it would be an IndexError on a CPU, and on a GPU an assertion without a word."""
    folder = shutil.copytree(TINY, tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens([f"<{i}>" for i in range(100)])
    tokenizer.save_pretrained(folder)
    rows = [json.dumps({"problem": f"Add {n}. <99>", "answer": "3"}) for n in (1, 2)]
    (tmp_path / "my.jsonl").write_text("\n".join(rows))
    args = flags(model_name_or_path=str(folder), dataset_name=str(tmp_path / "my.jsonl"))
    with pytest.raises(DataError, match="the token '<99>', which the model lacks: leave it out"):
        data.load_data(args)


def test_half_of_a_character_is_a_sentence(tokenizer):
    """As of a text that was cut in an emoji, or of a byte on the command line that is no UTF-8."""
    for prompt, system_prompt in (("Add 5 \ud83d.", None), ("Add 5.", "Be \udcff.")):
        with pytest.raises(DataError, match="a prompt has half of a character, correct it: '"):
            data.encode_prompt(tokenizer, prompt, system_prompt)


def test_a_prompt_that_ends_with_the_answer_is_refused():
    """As the column `messages` of NuminaMath, which holds the whole solution."""
    chat = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]
    with pytest.raises(DataError, match="the last is not the assistant's"):
        data.parse_rows([{"prompt": chat, "answer": "4"}], "x", None, None)


def test_another_chat_template_may_be_given(tokenizer):
    other = {"chat_template": "X{{ messages[0].content }}"}
    assert prompt_text(tokenizer, "Start.", None, other) == prompt_text(
        tokenizer, "Start.", None, {"chat_template": "{{ 'X' + messages[0].content }}"}
    )
    assert prompt_text(tokenizer, "Start.", None, other) != prompt_text(tokenizer, "Start.")


@pytest.mark.parametrize("call", ['strftime_now("%d %b %Y")', "strftime_now( '%Y-%m-%d' )"])
def test_the_date_in_a_prompt_is_fixed(tokenizer, monkeypatch, call):
    """A run could not be resumed on another day."""
    dated = "{% if strftime_now is defined %}{{ " + call + " }}{% endif %}{{ messages[0].content }}"
    monkeypatch.setattr(tokenizer, "chat_template", dated)
    date = "26 Jul 2024" if "b" in call else "2024-07-26"
    assert prompt_text(tokenizer, "Start.") == prompt_text(tokenizer, f"{date}Start.")[len(date) :]


# As in Qwen3's: the flag *adds* an empty think block, so leaving it out is not the same as True.
THINKING = make.CHAT_TEMPLATE.replace(
    "<|im_start|>assistant\n",
    "<|im_start|>assistant\n{% if enable_thinking is defined and enable_thinking is false %}"
    "<think>\n\n</think>\n\n{% endif %}",
)


def test_template_kwargs_reach_the_template(tokenizer):
    thinking = AutoTokenizer.from_pretrained(TINY)
    thinking.chat_template = THINKING
    plain = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert prompt_text(thinking, "hi") == plain
    assert prompt_text(thinking, "hi", None, {"enable_thinking": True}) == plain
    off = prompt_text(thinking, "hi", None, {"enable_thinking": False})
    assert off == plain + "<think>\n\n</think>\n\n"
    assert prompt_text(thinking, "hi", None, {"tokenize": True, "unknown": 1}) == plain


def bos_tokenizer(template: str | None, shape: str = "<s> $A") -> PreTrainedTokenizerFast:
    """Adds <s> to every text, as Llama's tokenizer does, or what else the shape has."""
    vocabulary = {"<s>": 0, "</s>": 1, "[UNK]": 2, "hi": 3, "user": 4, ":": 5}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.post_processor = processors.TemplateProcessing(
        single=shape, pair="<s> $A $B", special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    made = PreTrainedTokenizerFast(
        tokenizer_object=words, bos_token="<s>", eos_token="</s>", unk_token="[UNK]"
    )
    made.chat_template = template
    return made


def test_exactly_one_bos():
    template = "{{ bos_token }}{% for m in messages %}{{ m.role }} : {{ m.content }}{% endfor %}"
    written = bos_tokenizer(template)
    assert written("hi").input_ids == [0, 3]  # it would add a second one to the template's text
    assert data.encode_prompt(written, "hi") == [0, 4, 5, 3]
    assert data.encode_prompt(bos_tokenizer(None), "hi") == [0, 3]  # the tokenizer's own


def test_no_prompt_ends_with_the_end_token_that_a_tokenizer_adds():
    """A completion after it would be a new text."""
    ending = bos_tokenizer(None, "<s> $A </s>")
    assert ending("hi").input_ids == [0, 3, 1]
    assert data.encode_prompt(ending, "hi") == [0, 3]


def test_a_tokenizer_without_a_template_gets_plain_text(tokenizer):
    plain = AutoTokenizer.from_pretrained(TINY)
    plain.chat_template = None
    for text in ("2 + 2?", "2 + 2?\nAnswer:", "2 + 2?\n", "2 + 2? "):  # as in TRL
        assert prompt_text(plain, text) == text
    assert prompt_text(plain, "2 + 2?", "Be brief.") == "Be brief.\n\n2 + 2?"
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    assert prompt_text(plain, messages) == "a\n\nb"


def test_a_template_that_refuses_is_one_sentence(tokenizer):
    strict = AutoTokenizer.from_pretrained(TINY)
    strict.chat_template = (
        "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
        "{{ messages[0]['content'] }}"
    )
    assert prompt_text(strict, "hi") == "hi"
    with pytest.raises(DataError, match=r"--system_prompt.*no system role"):
        data.encode_prompt(strict, "hi", "Be brief.")


def test_training_and_evaluation_prompts_come_from_the_same_function(monkeypatch, tmp_path):
    """load_data encodes both sets, with the same system prompt and template arguments."""
    calls = []
    encode_prompt = data.encode_prompt

    def encode(tokenizer, prompt, *style):
        calls.append((prompt, style))
        return encode_prompt(tokenizer, prompt, *style)

    monkeypatch.setattr(data, "encode_prompt", encode)
    monkeypatch.setattr(data, "check_system_message", lambda *_: None)
    name = write(tmp_path / "set.jsonl", ROWS)
    args = flags(dataset_name=name, system_prompt="Be brief.", chat_template_kwargs='{"x": 1}')
    tokenizer, (train, train_ids), (held_out, held_out_ids) = data.load_data(args)
    assert [prompt for prompt, _ in calls] == [p.prompt for p in train + held_out]
    assert {str(style) for _, style in calls} == {str(("Be brief.", {"x": 1}))}
    for problem, ids in zip(train + held_out, train_ids + held_out_ids, strict=True):
        assert tokenizer.decode(ids) == (
            f"<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n{problem.prompt}"
            "<|im_end|>\n<|im_start|>assistant\n"
        )


# ----------------------------------------------------------------- which models are read
@pytest.mark.parametrize("model_type", ["own", "bitnet"])  # for which there is no tokenizer's code
def test_a_model_that_brings_its_own_code(tmp_path, monkeypatch, model_type):
    """transformers would ask on standard input whether to run it, and wait for 15 seconds."""
    asked = []
    auto_map = {"AutoConfig": "own.C", "AutoTokenizer": ["own.T", None]}

    def answer_no(question):
        asked.append(question)
        return "n"

    monkeypatch.setattr("builtins.input", answer_no)
    for name in ("config.json", "tokenizer_config.json", "tokenizer.json"):
        own = json.loads((Path(TINY) / name).read_text())
        own |= {"model_type": model_type, "tokenizer_class": "Own", "auto_map": auto_map}
        (tmp_path / name).write_text(json.dumps(own))
    with pytest.raises(DataError) as error:
        data.load_data(flags(model_name_or_path=tmp_path))
    assert not asked and str(error.value) == (
        f"cannot load --model_name_or_path {tmp_path}: models that bring their own code are not run"
    )


# ----------------------------------------------------------------- what fits into the model
FACTORS = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8, "factor": 4.0}
LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 32}
PLAIN = {"rope_type": "default", "rope_theta": 1e4}
CONTEXTS = [  # model type, settings of its config.json, context
    ("llama", {"rope_parameters": PLAIN}, 128),
    ("llama", {"rope_parameters": LONGROPE | FACTORS}, 32),
    ("llama", {"rope_scaling": {"type": "yarn", "factor": 4.0}}, 128),
    ("llama", {"rope_scaling": {"type": "dynamic", "factor": 4.0}}, 128),
    ("phi3", {"rope_scaling": FACTORS | {"type": "longrope"},
              "original_max_position_embeddings": 32}, 32),
    ("gemma3_text", {"rope_parameters": {"full_attention": LONGROPE | FACTORS,
                                         "sliding_attention": PLAIN}}, 32),
]  # fmt: skip


@pytest.mark.parametrize("model_type, settings, context", CONTEXTS)
def test_the_context_ends_where_frequencies_would_depend_on_the_length(
    tmp_path, model_type, settings, context
):
    write_config(tmp_path, model_type, settings)
    _, config = data.load_tokenizer(str(tmp_path), "main")
    assert data.context_length(config) == context


def test_a_configuration_that_transformers_cannot_read_is_a_sentence(tmp_path):
    """It looks for `rope_type` where an old file of Phi-3 has `type`, and raises KeyError."""
    write_config(tmp_path, "phi3", {"rope_scaling": FACTORS | {"type": "su"}})
    with pytest.raises(DataError, match=f"cannot load --model_name_or_path {tmp_path}: "):
        data.load_tokenizer(str(tmp_path), "main")


def write_config(folder: Path, model_type: str, settings: dict) -> None:
    """Writes the configuration of a small model, with the embedded policy's tokenizer."""
    for file in Path(TINY).glob("*token*"):
        (folder / file.name).write_bytes(file.read_bytes())
    small = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "head_dim": 16}
    small |= {"model_type": model_type, "max_position_embeddings": 128, "vocab_size": 448}
    small |= {"num_key_value_heads": 4, "pad_token_id": 0, "eos_token_id": 2, "bos_token_id": 1}
    (folder / "config.json").write_text(json.dumps(small | settings))


@pytest.mark.parametrize(
    ("room", "says"),
    [
        (512, "exceed the model's context of 512: set it to "),
        (8, "exceed the model's context of 8: leave the long prompts out"),
    ],
)
def test_prompts_that_do_not_fit(tmp_path, room, says):
    """A sliding window is no limit: the decode loop keeps all columns."""
    for file in Path(TINY).glob("*token*"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1}
    small |= {"num_key_value_heads": 1, "intermediate_size": 16, "max_position_embeddings": room}
    transformers.MistralConfig(**small, sliding_window=4).save_pretrained(tmp_path)
    given = {"model_name_or_path": tmp_path, "max_completion_length": 500}
    with pytest.raises(DataError, match=says) as error:
        data.load_data(flags(**given))
    left = re.search(r"set it to (\d+) or less", str(error.value))
    longest = int(re.search(r"prompt \((\d+) tokens\)", str(error.value))[1])
    assert left is None if longest >= room else int(left[1]) == room - longest
    if left:
        data.load_data(flags(**given | {"max_completion_length": left[1]}))


# ------------------------------------------------------------------------------------- tokens
def test_what_each_token_adds_to_the_text(tokenizer):
    text = "We begin at 23. \N{GREEK SMALL LETTER PI} \N{SNOWMAN} \\boxed{79}."
    ids = tokenizer(text, add_special_tokens=False).input_ids
    texts = data.token_texts(tokenizer, ids)
    assert "".join(texts) == text and len(texts) == len(ids) and "\ufffd" not in "".join(texts)
    assert data.token_texts(tokenizer, []) == []

    cut = tokenizer("at \N{SNOWMAN}", add_special_tokens=False).input_ids[:-1]
    assert "".join(data.token_texts(tokenizer, cut)) == tokenizer.decode(cut) == "at \ufffd"
    bad = tokenizer("\N{SNOWMAN}", add_special_tokens=False).input_ids[:1] * 6
    assert "\ufffd" in "".join(data.token_texts(tokenizer, bad)[:5])


def test_a_decoder_that_drops_the_first_space_keeps_those_within():
    """As Llama 2's does."""
    words = ["\u2581We", "\u2581begin", "\u2581at", "\u2581", "2", "3", "."]
    model = WordLevel({word: i for i, word in enumerate(words)}, unk_token=".")
    inner = Tokenizer(model)
    inner.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner)
    assert tokenizer.decode([1]) == "begin"
    texts = data.token_texts(tokenizer, [0, 1, 2, 3, 4, 5, 6])
    assert texts == ["We", " begin", " at", " ", "2", "3", "."]
