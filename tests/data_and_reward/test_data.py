"""Data sets of every kind, the embedded task, the order of problems, and their prompts."""

import gzip
import json
import random
import re
import shutil
from collections import Counter
from decimal import Decimal
from unittest import mock

import datasets
import pyarrow
import pytest
from pyarrow import parquet
from support import TINY, changed_copy, command_line, refusal
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast

import grpo_arca
from common import data
from common.data import parse_rows, read_splits, whole_prompt
from common.reward import GRADER, is_right
from common.task import Problem, chain_problems, has_right_steps, token_roles

ROWS = [{"problem": f"What is {i} + {i}?", "answer": str(2 * i)} for i in range(40)]


def write(path, rows: list[dict]) -> str:
    """Writes rows as the file that the path's ending names, and returns its name."""
    path.parent.mkdir(exist_ok=True)
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows))
    elif path.suffix == ".csv":
        datasets.Dataset.from_list(rows).to_csv(str(path))
    else:
        datasets.Dataset.from_list(rows).to_parquet(str(path))
    return str(path)


def load(name, needs_answers=True, **flags) -> tuple[list[Problem], list[Problem]]:
    """Returns the training problems and the held-out ones, as a run with these flags has them."""
    args = grpo_arca.parse_args(command_line({"dataset_name": name} | flags))
    return data.load_data(args, needs_answers)[1:]


def read(path) -> list[Problem]:
    """Returns the problems in a file."""
    return parse_rows(read_splits(str(path), None)["train"], "x")


def encode(tokenizer, problems: list[Problem], system_prompt=None, room=999, **kwargs):
    """Returns the problems with their prompts as ids."""
    return data.encode_problems(
        tokenizer, problems, "x", system_prompt, kwargs, room, vocabulary=999
    )


def plain(problems: list[Problem]) -> list[tuple]:
    """Returns prompts and answers in an order of their own."""
    return sorted(((problem.prompt, problem.answer) for problem in problems), key=str)


# ---- Kinds of data sets --------------------------------------------------------------------------
@pytest.mark.parametrize("kind", ["jsonl", "json", "parquet", "csv"])
@pytest.mark.parametrize(("prompt", "answer"), [("problem", "answer"), ("question", "solution")])
def test_files_of_every_kind(tmp_path, kind, prompt, answer):
    rows = [{prompt: r["problem"], answer: f"\\boxed{{{r['answer']}}}", "n": 1} for r in ROWS]
    path = tmp_path / f"set.{kind}"
    train, held_out = load(write(path, rows))
    assert len(held_out) == 8 and len(train) == 32
    assert plain(train + held_out) == sorted((r["problem"], r["answer"]) for r in ROWS)
    row = rows[train[3].row - 1]
    assert train[3].columns == {
        answer: row[answer], "gold": row[answer], "n": "1" if kind == "csv" else 1
    }  # fmt: skip
    write(path, rows[:10])  # another file of the same name and size is read anew
    assert len(load(path)[0]) == 8


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path):
    """Data sets in a folder are read as those of the Hub are, with a cache of their own."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def test_a_data_set_with_splits_and_one_with_a_train_split_alone(tmp_path):
    folder = tmp_path / "set"
    write(folder / "train.jsonl", ROWS[:30])
    assert [len(part) for part in load(folder)] == [24, 6]  # as a file
    write(folder / "test.jsonl", ROWS[25:])
    train, held_out = load(folder)
    assert plain(train) == plain(parse_rows(ROWS[:25], "x"))  # the others are held out
    assert plain(held_out) == plain(parse_rows(ROWS[25:], "x"))
    train, held_out = load(folder, dataset_train_split="test", dataset_test_split="train")
    assert plain(train) == plain(parse_rows(ROWS[30:], "x"))
    assert plain(held_out) == plain(parse_rows(ROWS[:30], "x"))


def test_flags_of_splits_that_are_not_there_are_refused(tmp_path):
    """So are those of a file, which has none: they would be ignored."""
    folder = tmp_path / "set"
    for split in ("train", "validation"):
        write(folder / f"{split}.jsonl", ROWS)
    name = write(tmp_path / "file.jsonl", ROWS)
    train = {"dataset_train_split": "tain", "dataset_test_split": "validation"}
    for of, flags, says in (
        (folder, train, "--dataset_train_split: there is no tain, but ['train', 'validation']"),
        (folder, {}, "--dataset_test_split: there is no test, but ['train', 'validation']"),
        (name, {"eval_dataset_name": folder}, "--dataset_test_split: there is no test"),
        (name, {"dataset_train_split": "part"}, "--dataset_train_split: there is no part, but ["),
        (name, {"dataset_test_split": "part"}, "--dataset_test_split: there is no part"),
        (name, {"dataset_config": "main"}, "is a file, which has no configs"),
    ):
        assert says in refusal(load, of, **flags)


def test_an_evaluation_set_of_its_own(tmp_path):
    """Its one split will do, whatever the name."""
    name = write(tmp_path / "train.jsonl", ROWS)
    other = write(tmp_path / "part:2.jsonl", [{"problem": "New?", "answer": "7"}])
    train, held_out = load(name, eval_dataset_name=other)
    assert len(train) == 40 and plain(held_out) == [("New?", "7")]
    assert all(problem.steps for problem in load(name, eval_dataset_name="chain_arithmetic")[1])
    write(tmp_path / "set/validation.jsonl", ROWS[:4])
    assert len(load(name, eval_dataset_name=tmp_path / "set")[0]) == 36


def test_columns_by_flags_and_nested_ones_by_dotted_names(tmp_path):
    """The latter as in verl's format, from every kind of file that can hold them."""
    verl = [
        {"prompt": [{"role": "user", "content": r["problem"]}], "answer": "no",
         "reward_model": {"style": "rule", "ground_truth": r["answer"]}} for r in ROWS
    ]  # fmt: skip
    for kind in ("jsonl", "json", "parquet"):
        name = write(tmp_path / f"verl.{kind}", verl)
        train, held_out = load(name, answer_column="reward_model.ground_truth")
        found = [Problem(r["prompt"], str(2 * i)) for i, r in enumerate(verl)]
        assert plain(train + held_out) == plain(found)
        row = verl[train[0].row - 1]
        assert train[0].columns == {
            "answer": "no", "reward_model": row["reward_model"],
            "gold": row["reward_model"]["ground_truth"],
        }  # fmt: skip
    rows = [{"a.b": r["answer"], "q": {"text": r["problem"]}, "problem": "no"} for r in ROWS]
    name = write(tmp_path / "dots.jsonl", rows)
    train, held_out = load(name, prompt_column="q.text", answer_column="a.b")
    assert plain(train + held_out) == plain(parse_rows(ROWS, "x"))
    says = "there is no lev, but ['a.b', 'q', 'problem']. Write a.b for b within a"
    for flag in ("prompt_column", "answer_column"):
        flags = {"answer_column": "a.b"} | {flag: "lev"}
        assert f"--{flag}: {says}" in refusal(load, name, needs_answers=False, **flags)


def test_a_run_says_what_it_reads(tmp_path, capfd, monkeypatch):
    """Once, though there are several processes."""
    rows = [{"q": f"What is {i}?", "answer": f"It is \\boxed{{{i}}}", "level": 1} for i in range(5)]
    name = write(tmp_path / "set.jsonl", rows)
    load(name, prompt_column="q")
    assert capfd.readouterr().err == (
        f"{name}: problems come from the column q, answers from answer; all columns are q, answer, "
        "level\nproblems to train on: 1 of 5 rows are left out (such as 3), because they are held "
        "out\nthe first prompt ends with '<|im_start|>user\\nWhat is 0?<|im_end|>\\n<|im_start|>"
        "assistant\\n'\nits answer is '0'\n"
    )
    monkeypatch.setenv("RANK", "1")
    load(name, prompt_column="q")
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    "row", [{"q": "New?", "gold": "7", "answer": "8"}, {"question": "New?", "answer": "7"}], ids=str
)
def test_columns_that_a_flag_names_need_not_be_in_the_evaluation_set(tmp_path, row):
    """There, the known names will also do."""
    name = write(tmp_path / "set.jsonl", [{"q": r["problem"], "gold": "7"} for r in ROWS])
    other = write(tmp_path / "eval.jsonl", [row] * 3)
    train, held_out = load(name, prompt_column="q", answer_column="gold", eval_dataset_name=other)
    assert len(train) == 40 and plain(held_out)[0] == ("New?", "7")


def test_prompts_alone_are_enough_where_no_reward_needs_an_answer(tmp_path):
    name = write(tmp_path / "set.jsonl", [{"prompt": r["problem"]} for r in ROWS])
    train, held_out = load(name, needs_answers=False)
    assert len(train) == 32 and len(held_out) == 8
    assert {problem.answer for problem in train} == {""}
    assert "--answer_column: there is no answer or solution or" in refusal(load, name)
    # The numbers that pandas writes before the first column are no answers.
    assert plain(parse_rows([{"": "0", "prompt": "a"}], "x", needs_answers=False)) == [("a", "")]


SYSTEM = {"role": "system", "content": "Be brief."}
PARTS = [{"type": "text", "text": "2 + "}, {"type": "text", "text": "2?"}]


@pytest.mark.parametrize(
    ("kind", "before", "content"),
    [
        ("jsonl", [SYSTEM], "2 + 2?"),
        ("jsonl", [SYSTEM], PARTS),
        ("parquet", [SYSTEM], "2 + 2?"),
        ("parquet", [], PARTS),  # a column has one type
    ],
)
def test_chats_and_contents_in_parts(tmp_path, kind, before, content):
    """The column that a `prompt` was made of may still be there, as in TRL's own recipes."""
    rows = [
        {"problem": "2", "prompt": [*before, {"role": "user", "content": content}], "answer": "4"}
    ]
    (problem,) = read(write(tmp_path / f"s.{kind}", rows))
    assert problem.prompt == [*before, {"role": "user", "content": "2 + 2?"}]


USER = {"role": "user", "content": "Start. "}
TEXT = {"type": "text", "text": "x"}
PICTURES = [[TEXT, {"type": "image"}], [TEXT, {"text": None, "image": "b"}], {"text": "x"}]
CHATS_AS_TEXTS = ["[{'role': 'user', 'content': 'x'}]", '[{"content": "x", "role": "user"}]']
NO_PROMPTS = [
    *CHATS_AS_TEXTS, ["text"], [{"from": "human", "value": "x"}], 5, USER, [[]], None, "", " \n",
    [], [USER | {"content": ""}], [{"content": "x"}], [USER | {"role": None}],
]  # fmt: skip
NO_PROMPTS += [[USER | {"content": content}] for content in (None, *PICTURES)]
NO_GOLDS = [
    "the answer is 5", "So it is 5", "Answer: 5", "x is 5", "He has 16 apples", "", None, "#### ",
    "\\boxed{}", "He adds 4.\nThen 5", "First he adds all of them", float("inf"), float("nan"),
    json.loads("-Infinity"), 1e400, "   ", "3 + 4 = 7\n#### The answer is 7",
    "proof", "notfound", "<answer>5</answer>", '{"answer": "5"}', "{'a': 5}", '["5"]', "TBD",
    "unknown", "?", "-", "...", "5<|im_end|>", "\\boxed{5", "\x0crac{5}{2}", "\text{Friday}",
    "5\ufffd", "x &lt; 5", "90\xc2\xb0", "So 2\times 3 is 6.\n#### 6", "\boxed{5}",
    "None", "nan", "NaN", " NA", "N/A", "<NA>", "null", "#### nan", Decimal("NaN"),
    ["84", "85"], [[84, 85]], {"value": "84"}, b"1", "2/2=1 bolt of white. 2+1=3 bolts.",
    "x &ge; 1", "\xe2\u201a\xac60", "See solution.", "N.A.", "missing", "TBA", "12" * 500,
    "[/INST] 5",
]  # fmt: skip
# In JSON or Python with one backslash, or from a wrong encoding; and as a template has written it.
UNCLEAN = [
    "\frac{1}{2}?", "\beta?", "2 \times 3?", "Is it \text{odd}?", "2\x80?", "\ud83d 1?",
    "2 \neq 1?", "caf\ufffd?", "<|im_start|>user\n2?<|im_end|>\n", "Well.<|im_end|>",
    "[INST] 2? [/INST]", "2 \tilde 1?", "3 \xe2\u20ac\u201c 1?",
]  # fmt: skip
SOLVED = ["It is \\boxed{7}.", "So 3-2=1 #### 1", "The answer is 1."]
LEFT_OUT = [
    *((cell, "1", "prompt has no text, and no chat of texts alone") for cell in NO_PROMPTS),
    ("What is 3 + 4? Answer: 7", "7", "prompt ends with the answer"),
    *(("x", cell, "answer has no final answer") for cell in NO_GOLDS),
    *((cell, "1", "it or --system_prompt has .*, a special token or damage") for cell in UNCLEAN),
    *(([USER, {"role": "assistant", "content": cell}], "1", "prompt ends with the answer")
      for cell in SOLVED),
    ([USER, {"role": "gpt", "content": "1"}], "1", "prompt has messages of other roles than "),
    ([USER, {"role": "assistant", "content": "We \ud83d"}], "1", "it or --system_prompt has "),
    ("Long. " * 999, "1", "the prompt has more than 999 tokens"),
]  # fmt: skip


@pytest.mark.parametrize(("prompt", "answer", "reason"), LEFT_OUT, ids=ascii)
def test_rows_that_cannot_be_used_are_left_out(tokenizer, prompt, answer, reason, capfd):
    """A chat template would write an empty message for some, say, and no policy could be right."""
    cells = [("a", "1"), (prompt, answer), ("c", "1")]
    rows = [{"prompt": own_prompt, "answer": own_answer} for own_prompt, own_answer in cells]
    found = encode(tokenizer, parse_rows(rows, "x"))
    assert [problem.prompt for problem in found] == ["a", "c"]
    says = rf"x: 1 of 3 rows are left out \(such as 2\), because {reason}"
    assert re.search(says, capfd.readouterr().err)
    with pytest.raises(SystemExit, match="1 of 1 rows are left out"):
        encode(tokenizer, parse_rows(rows[1:2], "x"))


def test_a_row_with_a_byte_of_another_encoding_is_left_out(tmp_path, capfd):
    path = tmp_path / "set.csv"
    path.write_bytes("problem,answer\na,1\nb,5 €\nc,3\n".encode("cp1252"))
    assert plain(read(path)) == [("a", "1"), ("c", "3")]
    assert "rows are left out (such as 2)" in capfd.readouterr().err


@pytest.mark.parametrize("column", ["image", "images", "tools"])
def test_rows_with_more_than_the_policy_would_see_are_left_out(column, capfd):
    cells = [None, [{"a": 1}], "", []]
    rows = [{"problem": str(i), "answer": "1", column: cell} for i, cell in enumerate(cells)]
    assert [problem.prompt for problem in parse_rows(rows, "x")] == ["0", "2", "3"]
    assert f"(such as 2), because the policy would not see {column}\n" in capfd.readouterr().err


@pytest.mark.parametrize("column", ["messages", "problem", "conversation.prompt"])
def test_only_a_column_of_prompts_may_begin_the_answer(column):
    """Chats for fine-tuning end with a whole reply, after which nothing could follow."""
    chat = [{"role": role, "content": role} for role in ("user", "assistant") * 2]
    outer, _, inner = column.partition(".")
    rows = [{outer: {inner: chat} if inner else chat, "answer": "1"}]
    (problem,) = parse_rows(rows, "x", [column], ["answer"], True)
    assert problem.prompt == (chat if inner else chat[:3])


def test_beginnings_without_the_answer_are_no_solutions():
    for beginning in ("", "<think>Let", "We begin at 12. Then 1.5 and -1, 3,1 and 1,000. 1st:"):
        chat = [{"role": "user", "content": "x"}, {"role": "assistant", "content": beginning}]
        rows = [{"prompt": chat, "answer": "1"}, {"prompt": [*chat, chat[0]], "answer": "x"}]
        assert len(parse_rows(rows, "x")) == 2
    assert data.has_answer("That makes 1,234.", "1234") and data.has_answer("3, 5", "3, 5")


# ---- Cells ---------------------------------------------------------------------------------------
def test_cells_of_a_csv_file_stay_as_written(tmp_path):
    """pandas makes 12.0 of 12 where another cell is empty, 7 of 007 and nothing of NA."""
    path = tmp_path / "set.csv"
    path.write_text('\ufeffproblem,answer,n\n"1,0 + ""2""?\nNow.",12,x\nb,,\nc,007,NA\n\nd,1.50,\n')
    found = read(path)
    assert plain(found) == [('1,0 + "2"?\nNow.', "12"), ("c", "007"), ("d", "1.50")]
    assert [problem.columns["n"] for problem in found] == ["x", "NA", ""]


ROW = ["x" * 150_000, "1"]
LINE = f'{{"problem": "{ROW[0]}", "answer": "1"}}\n'
TEXTS = {
    "set.JSONL": LINE, "set.jsonl.gz": LINE, "a:b.Json": f"[{LINE}]", "lines.json": LINE,
    "set.csv.gz": f"problem,answer\n{','.join(ROW)}\n",
    "set.tsv": f"problem\tanswer\n{chr(9).join(ROW)}\n",
}  # fmt: skip


@pytest.mark.parametrize("name", TEXTS)
def test_files_of_less_common_names(tmp_path, name):
    """And cells that are longer than Python's own limit, 131,072 characters."""
    content = TEXTS[name].encode()
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    assert plain(read(tmp_path / name)) == [tuple(ROW)]


def test_json_values_stay_as_written(tmp_path):
    values = [
        "0.00001", "1e-7", "14.1", "7", "12.0", "1e22", '"007"', '"1/2"', "-2.50", "true",
        "123456789012345678901", '"2024-01-01"',
    ]  # fmt: skip
    lines = [f'{{"problem": "p{i}", "answer": {value}}}' for i, value in enumerate(values)]
    path = tmp_path / "set.jsonl"
    path.write_text("\ufeff" + "\n\n".join(lines) + '\n{"problem": "no answer", "level": 1}')
    found = read(path)
    assert [problem.answer for problem in found] == [
        "0.00001", "0.0000001", "14.1", "7", "12", "10000000000000000000000", "007", "1/2",
        "-2.5", "True", "123456789012345678901", "2024-01-01",
    ]  # fmt: skip
    assert found[0].columns == {"answer": 0.00001, "gold": 0.00001, "level": None}


@pytest.mark.parametrize("kind", [pyarrow.float16(), pyarrow.float32(), pyarrow.float64()], ids=str)
def test_numbers_of_a_parquet_file_and_of_the_hub(tmp_path, kind):
    """14.1 in 16 or 32 bits is 14.1 to the grader and to reward functions, and not 14.100000381."""
    cells = pyarrow.array([14.1, 0.1, None, 1e-5], kind)
    table = pyarrow.table({"problem": list("abcd"), "answer": cells})
    parquet.write_table(table, tmp_path / "train-0.parquet")
    for name in (tmp_path / "train-0.parquet", tmp_path):
        (rows,) = read_splits(str(name), None).values()
        assert [p.answer for p in parse_rows(rows, "x")] == ["14.1", "0.1", "0.00001"]
        assert rows[0]["answer"] == 14.1


def test_values_of_mixed_types_on_the_hub(tmp_path):
    """`datasets` keeps them as JSON texts: a fraction would be "1\\/2" in quotes."""
    rows = [
        {"prompt": [{"role": "user", "content": content}], "answer": answer}
        for content, answer in (("3?", 3), ([{"type": "text", "text": "1/2?"}], "1/2"))
    ]
    write(tmp_path / "mixed/train.jsonl", rows)
    assert read_splits(str(tmp_path / "mixed"), None) == {"train": rows}


@pytest.mark.parametrize("kind", ["parquet", "folder"])
def test_numbers_of_a_class_label_are_its_names(tmp_path, kind):
    labels = datasets.ClassLabel(names=["no", "yes"])
    features = datasets.Features({"problem": datasets.Value("string"), "answer": labels})
    cells = {"problem": list("abcd"), "answer": [1, 0, None, -1]}
    path = tmp_path / "train.parquet"
    datasets.Dataset.from_dict(cells, features=features).to_parquet(path)
    rows = read_splits(str(path if kind == "parquet" else tmp_path), None)["train"]
    assert [row["answer"] for row in rows] == ["yes", "no", None, None]


def test_numbers_inside_other_values_and_columns_of_one_name(tmp_path):
    """The former as in verl's format, where the gold answer stands in a struct."""
    one = pyarrow.float32()
    kind = pyarrow.struct({"ground_truth": one, "all": pyarrow.list_(one), "n": pyarrow.int8()})
    cells = [{"ground_truth": 14.1, "all": [0.1, None], "n": 1}, None, {"ground_truth": 2**0.5}]
    table = pyarrow.table({"prompt": list("abc"), "reward_model": pyarrow.array(cells, kind)})
    parquet.write_table(table, tmp_path / "set.parquet")
    found = read(tmp_path / "set.parquet")
    assert [problem.answer for problem in found] == ["14.1", "1.4142135"]
    assert found[0].columns == {"reward_model": cells[0], "gold": 14.1}
    parquet.write_table(table.rename_columns(["answer"] * 2), tmp_path / "set.parquet")
    path = str(tmp_path / "set.parquet")
    assert "duplicate" in refusal(read_splits, path, None, error=ValueError)


GOLDS = [
    ("He had 3 * 4 = <<3*4=12>>12.\n#### 12", "12"), ("#### 1,234 ", "1,234"), (5, "5"),
    ("#### 1\n#### 2", "2"), ("It is \\boxed{7}.\n\n#### Check\nAll is well", "7"),
    ("#### So \\boxed{7}", "7"), ("It is \\boxed{7}.\n#### Answer: 7", "7"),
    ("so \\boxed{\\frac{1}{2}}.", "\\frac{1}{2}"),
    ("16 apples", "16 apples"), ("\\boxed{1}. Then \\boxed{ 2 }", "2"), (" -1,234 ", "-1,234"),
    ("$12.50", "$12.50"), ("$x = \\boxed{3}$ or $x = \\boxed{5}$", "3, 5"), ("Paris",) * 2,
    ("x + 1",) * 2, ("13 hours 30 minutes",) * 2, ("BC = 5",) * 2, ("2 \\text{ or } 3",) * 2,
    ("\\begin{pmatrix} 1 \\\\\n2 \\end{pmatrix}",) * 2, ("not enough information",) * 2,
    ("none",) * 2, ("Na",) * 2, ("Nancy",) * 2, ("None of them",) * 2, ("{1, 2}",) * 2,
    ("[1, 2)",) * 2, ("\\{1, 2\\}",) * 2, ("x < 5",) * 2, ("\u221e",) * 2, ("+",) * 2,
    ("unknown to us",) * 2, ("-5",) * 2, (Decimal("0.00000010"), "0.00000010"),
    (Decimal("14.10"), "14.10"), (Decimal("3"), "3"), ([84], "84"), ("3 + 4 = 7",) * 2,
    ("p = 2/3 = 0.67",) * 2,
]  # fmt: skip


def test_own_reward_functions_get_answers_of_any_kind():
    rows = [{"prompt": "2?", "answer": a, "gold": "3"} for a in ("So it is 5", "#### 7")]
    golds = [(p.answer, p.columns["gold"]) for p in parse_rows(rows, "x", needs_answers=False)]
    assert golds == [("", "So it is 5"), ("7", "#### 7")]


def test_gold_answers(capfd):
    rows = [{"problem": "x", "answer": cell} for cell, _ in GOLDS]
    assert [problem.answer for problem in parse_rows(rows, "x")] == [gold for _, gold in GOLDS]
    assert "left out" not in capfd.readouterr().err


# ---- Files that are no table ---------------------------------------------------------------------
BROKEN = [
    ("jsonl", '{"problem": "a", "answer": 1}\n{"problem": "b", "answ', "line 2"),
    ("jsonl", '{"problem": "a", "answer": 1}\n\n{"problem": "b" "answer": 1}\n{}', "line 3"),
    ("json", '[{"problem": "a"},\n{"problem": ]', "line 2"),
    ("json", '{\n"problem": ["a", "b"],\n"answer": [1, 2]}', "no list of rows"),
    ("json", '{"problem": ["a", "b"], "answer": [1, 2]}', "problem has no text"),
    ("json", '["a", "b"]', "no list of rows"),
    ("json", '[{"problem": "a", "answer": 1, "answer": 2}]', "one name: .*'answer', 'answer'"),
    ("json", "[]", "has no rows"),
    # Half a row is no row, though the next line would complete it.
    ("jsonl", '{"problem": "a", "answer": "1"\n"steps": [1]}', "line 1"),
    ("jsonl", '{"problem": "a", "answer": "1", "n": {"m": 1}\n"steps": [1]}', "line 1"),
    ("jsonl", '{"n": [1\n2], "problem": "a", "answer": "1"}', "line 2"),
    ("jsonl", '{"problem": "a", "answer": 1, "answer": 2}', "one name: .*'answer', 'answer'"),
    ("jsonl", "\ufeff \n", "has no rows"),
    ("csv", "problem,answer\n", "has no rows"),
    ("csv", "problem,answer\na,1\n1,000 + 2?,1002\n", "is longer than"),
    ("csv", "problem,answer\na\n", "is shorter than"),
    ("csv", "problem,answer,answer\na,1,2\n", "one name: .*'answer', 'answer'"),
    ("csv", 'problem,answer\n"a,1\n', "unexpected end of data"),
]


@pytest.mark.parametrize(("kind", "text", "says"), BROKEN)
def test_a_file_that_is_no_table_is_refused(tmp_path, kind, text, says):
    (tmp_path / f"set.{kind}").write_text(text)
    assert re.search(says, refusal(load, tmp_path / f"set.{kind}", error=(SystemExit, Exception)))


# ---- Training problems and held-out ones ---------------------------------------------------------
def test_held_out_rows_are_the_same_for_every_seed_and_never_trained_on(tmp_path):
    name = write(tmp_path / "set.jsonl", ROWS)
    train, held_out = load(name)
    assert load(name, seed=2)[1] == held_out and load(name, max_eval_samples=3)[1] == held_out[:3]
    assert plain(train + held_out) == plain(parse_rows(ROWS, "x"))


def test_of_rows_that_repeat_a_fifth_of_the_problems_is_held_out(tmp_path):
    train, held_out = load(write(tmp_path / "set.jsonl", ROWS[:20] * 10))
    assert len(held_out) == len({problem.prompt for problem in held_out}) == 4
    assert set(Counter(problem.prompt for problem in train).values()) == {10} and len(train) == 160
    assert [problem.row for problem in train] == sorted(problem.row for problem in train)
    said = refusal(load, write(tmp_path / "set.jsonl", ROWS[:1] * 3))
    assert "3 of 3 rows are left out (such as 1, 2, 3), because they are held out" in said


def test_each_distinct_prompt_is_rendered_once(tmp_path, monkeypatch):
    """Of 1.8 million rows of DAPO-Math-17k, 17,000 are distinct. Another one checks the roles."""
    render = mock.Mock(wraps=data.render)
    monkeypatch.setattr(data, "render", render)
    load(write(tmp_path / "set.jsonl", ROWS * 10))
    assert render.call_count == len(ROWS) + 1


def test_rows_repeat_where_only_their_form_differs(tmp_path):
    """Text and chats, other keys of messages, white space: to the model it is one prompt."""
    rows = []
    for i in range(10):
        message = {"role": "user", "content": f"What is {i}?"}
        prompts = [f"What is {i}?", f"What  is {i}?\n", [message], [message | {"name": "a"}]]
        rows += [{"prompt": prompt, "answer": "1"} for prompt in prompts]
    train, held_out = load(write(tmp_path / "set.jsonl", rows))
    assert len(set(map(data.text_of, held_out))) == len(held_out) == 2
    assert len(train) == 32


@pytest.mark.parametrize("answers", [["5", "6"], ["5", "5.5", "5"], ["x", "y"]])
def test_equal_problems_with_different_answers_are_left_out(tmp_path, answers, capfd):
    """All of them: nobody knows which is right. With one instruction for all rows, whose inputs
    stand in another column, the run ends."""
    rows = [{"problem": f"Solve  it.{i * ' '}", "answer": a} for i, a in enumerate(answers)]
    train, held_out = load(write(tmp_path / "set.jsonl", ROWS[:20] + rows))
    assert plain(train + held_out) == plain(parse_rows(ROWS[:20], "x"))
    says = f"{len(rows)} of {20 + len(rows)} rows are left out (such as 21, 22"
    assert says in capfd.readouterr().err
    said = refusal(load, write(tmp_path / "set.jsonl", rows))
    assert "the same prompt has another answer in another row" in said


def test_equal_problems_whose_answers_are_equal_stay(tmp_path):
    rows = [{"problem": "Solve it.", "answer": a} for a in ("1/2", "0.5", "\\frac{1}{2}", "1/2")]
    train, held_out = load(write(tmp_path / "set.jsonl", ROWS[:20] + rows))
    assert len(train + held_out) in (21, 24)  # if it is held out, once


# ---- The order of the problems -------------------------------------------------------------------
def test_every_epoch_has_every_problem_once_in_its_own_order():
    def order(epoch, seed):
        return tuple(data.problem_at(epoch * 37 + place, 37, seed) for place in range(37))

    orders = {order(epoch, seed) for epoch in range(4) for seed in ("1", "2")}
    assert len(orders) == 8 and tuple(range(37)) not in orders
    assert {tuple(sorted(order)) for order in orders} == {tuple(range(37))}
    assert order(0, None) == order(3, None) == tuple(range(37))  # --shuffle_dataset False


def test_the_order_has_no_state():
    """A resumed run, or another process, finds the same problem at a position."""
    straight = [data.problem_at(place, 23, "5") for place in range(200)]
    data.epoch_order.cache_clear()
    for place in random.Random(0).sample(range(200), 200):
        assert data.problem_at(place, 23, "5") == straight[place]


def test_a_run_that_does_not_shuffle_takes_the_rows_of_its_columns_in_their_order(
    make_run, tmp_path
):
    rows = [{"q": r["problem"], "a": "1", "problem": "no", "answer": "no"} for r in ROWS[:30]]
    name = write(tmp_path / "set.jsonl", rows)
    other = write(tmp_path / "eval.jsonl", [{"q": "Held out?", "a": "1"}])
    run = make_run(
        dataset_name=name, eval_dataset_name=other, prompt_column="q", answer_column="a",
        shuffle_dataset=False, max_completion_length=4,
    )  # fmt: skip
    prompts = []
    for run.step in (0, 1):
        prompts += [problem.prompt for problem in grpo_arca.collect(run, {}).problems[::4]]
    assert prompts == [row["problem"] for row in ROWS[:4]]  # two groups an update


# ---- The embedded task ---------------------------------------------------------------------------
def recompute(prompt: str) -> list[int]:
    """Returns the value after each operation, from the words of the prompt alone."""
    start, *phrases = re.fullmatch(r"Start with (.*)\.", prompt)[1].split(", ")
    values = [int(start)]
    for phrase in phrases:
        verb, word = phrase.split()
        by = 0 if word == "it" else int(word)
        new = {
            "add": values[-1] + by, "subtract": values[-1] - by, "double": values[-1] * 2,
            "triple": values[-1] * 3,
        }  # fmt: skip
        values.append(new[verb])
    return values[1:]


@pytest.mark.parametrize("length", [0, 2, 8])
def test_chains_have_the_right_steps_and_train_and_held_out_never_meet(length):
    held_out = chain_problems(300, held_out=True, length=length)
    train = chain_problems(1000, held_out=False, seed=3, length=length)
    assert len({problem.prompt for problem in train + held_out}) == 1300
    for problem in train + held_out:
        values = recompute(problem.prompt)
        assert list(problem.steps) == values and problem.answer == str(values[-1])
        assert min(values) >= 1 and max(values) <= 99
        assert len(values) == length or length == 0


def test_chains_are_the_same_on_every_machine():
    """The committed policies were trained on what the hash does not hold out. Python's own hash of
    a text differs between processes, so that what depended on it would fail here.
    """
    assert [problem.prompt for problem in chain_problems(2, held_out=True)] == [
        "Start with 55, add 14, add 17, add 4, subtract 13.",
        "Start with 52, subtract 12, subtract 13, subtract 12.",
    ]
    assert [chain_problems(1, held_out=False, seed=seed)[0].prompt for seed in (1, 2)] == [
        "Start with 44, add 19, subtract 14, add 4, add 13.",
        "Start with 24, add 2, double it, add 10.",
    ]


def test_the_embedded_sets():
    train, held_out = load("chain_arithmetic", max_eval_samples=100)
    assert len(train) == 4096 and len(held_out) == 100
    assert load("chain_arithmetic", max_eval_samples=100, seed=2)[1] == held_out
    said = refusal(load, "chain_arithmetic", dataset_config="many", error=ValueError)
    assert "invalid literal for int" in said


def test_the_config_of_an_evaluation_set_stands_after_its_name(tmp_path, monkeypatch):
    """That of the training set is not forced on it, as main of GSM8K would be on these chains."""
    name = write(tmp_path / "set.jsonl", ROWS)
    own = {"eval_dataset_name": "chain_arithmetic"}
    five = {"dataset_config": "5"}
    for flags, length in ((own, {3, 4}), (own | five, {5}), (five, {5})):
        held_out = load("chain_arithmetic", **flags)[1]
        assert {len(problem.steps) for problem in held_out} == length
    for of, flags in (("chain_arithmetic", five), (name, {})):
        held_out = load(of, eval_dataset_name="chain_arithmetic:2", **flags)[1]
        assert {len(problem.steps) for problem in held_out} == {2}
    asked = []

    rows = datasets.Dataset.from_list(ROWS)
    rows = {"train": rows.select(range(20)), "test": rows.select(range(20, 40))}
    monkeypatch.setattr(datasets, "load_dataset", lambda *given: asked.append(given) or rows)
    assert len(load(name, eval_dataset_name="openai/gsm8k:main")[1]) == 20
    for other in ("d/e", "a/b"):
        load("a/b", dataset_config="c", eval_dataset_name=other)
    load("a/b", dataset_config="c")
    train = ("a/b", "c")
    assert asked == [("openai/gsm8k", "main"), train, ("d/e", None), train, train, train]


def test_more_chains_than_there_are_end_with_those_that_there_are(monkeypatch):
    def one_of_three(rng, length):
        return Problem(rng.choice("abc"), "1", (1,))

    monkeypatch.setattr("common.task.random_chain", one_of_three)
    found = chain_problems(9, held_out=False) + chain_problems(9, held_out=True)
    assert sorted(problem.prompt for problem in found) == ["a", "b", "c"]


# 23 + 19 = 42, doubled 84, - 5 = 79
CHAIN = Problem("Start with 23, add 19, double it, subtract 5.", "79", (42, 84, 79))
SOLUTION = (
    "We begin at 23. Then adding 19 gives 42. We double it and get 84. "
    "Minus 5 makes 79. So the answer is \\boxed{79}."
)
MISTAKES = [  # what stands from the first wrong token on, if each character is one; None: no error
    (SOLUTION, None),
    (SOLUTION + " That was easy. 1. 2. 3.", None),
    (SOLUTION.replace("42", "32"), "32. We double"),  # a carry dropped
    (SOLUTION.replace("42", "43"), "3. We double"),  # the 4 is right
    (SOLUTION.replace("42", "420"), "0. We double"),
    (SOLUTION.replace("42", "4"), ". We double"),  # a 2 was due there
    (SOLUTION.replace("42", "42.5"), ".5. We double"),
    (SOLUTION.replace("42", "-42"), "-42. We double"),
    (SOLUTION.replace("{79}", "{78}"), "8}."),  # the box alone is wrong
    (SOLUTION + " No, \\boxed{80}.", "80}."),  # the last box counts
    (SOLUTION.replace("We double it and get 84. ", ""), "79. So"),  # a step left out
    (SOLUTION.replace("We double", "Well. We double"), ". We double"),  # a sentence too many
    (SOLUTION.replace("\\boxed{79}", "79"), "."),  # no box: it ends too early
    ("We begin at 23", "3"),
    ("٤٢. ٤٢. ٨٤. ٧٩. \\boxed{٧٩}", ". ٨٤. ٧٩. \\boxed{٧٩}"),  # other scripts' digits
]


@pytest.mark.parametrize(("text", "marked"), MISTAKES)
def test_the_first_wrong_token_of_a_solution(text, marked):
    roles = token_roles(list(text), CHAIN)
    assert set(roles) <= {"", "result", "first_wrong"}
    assert GRADER.grade([text], [CHAIN]) == [float(marked is None)]
    if marked is None:
        assert "first_wrong" not in roles and has_right_steps(text, CHAIN)
    else:
        assert text[roles.index("first_wrong") :].startswith(marked)
        assert roles.count("first_wrong") == 1


def test_tokens_that_state_results():
    pieces = [
        "We begin at ", "23. Then adding 19 gives", " 42. We double", " it and get ", "8",
        "4. Minus 5 makes ", "7", "", "9", ". ", "So it is \\boxed{", "79}.", "<end>",
    ]  # fmt: skip
    expected = [""] * 2 + ["result", "", "result", "result", "result", "", "result"] + [""] * 4
    assert token_roles(pieces, CHAIN) == expected


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_steps_that_a_data_set_names_are_judged(tmp_path, kind):
    rows = [{"problem": f"{i} + 5 - 4", "answer": i + 1, "steps": [i + 5, i + 1]} for i in range(3)]
    found = read(write(tmp_path / f"s.{kind}", rows))
    assert [(p.steps, p.opening) for p in found] == [((i + 5, i + 1), 0) for i in range(3)]


@pytest.mark.parametrize("steps", [["First", "then"], "Add 1.", [1.5], [True], 5, {"a": 1}])
def test_steps_of_another_kind_are_not_graded(steps, capfd):
    rows = [{"problem": "a", "answer": "1", "steps": cell} for cell in ([1], steps, None)]
    assert [problem.steps for problem in parse_rows(rows[::2], "x")] == [(1,), ()]
    assert "The steps are graded, too" in capfd.readouterr().err
    assert [problem.steps for problem in parse_rows(rows, "x")] == [()] * 3
    assert "No steps are graded, because not all are lists of integers" in capfd.readouterr().err
    assert parse_rows(rows, "x")[0].columns["steps"] == [1]


# ---- Prompts -------------------------------------------------------------------------------------
@pytest.fixture
def tokenizer():
    return AutoTokenizer.from_pretrained(TINY)


def prompt_ids(tokenizer, prompt, system_prompt=None, kwargs=None) -> list[int]:
    (ids,) = data.encode_prompts(tokenizer, [whole_prompt(prompt, system_prompt)], kwargs or {})
    return list(ids)


def prompt_text(tokenizer, *args) -> str:
    return tokenizer.decode(prompt_ids(tokenizer, *args))


def test_a_prompt_by_the_template(tokenizer):
    golden = "<|im_start|>user\nStart with 23, add 19.<|im_end|>\n<|im_start|>assistant\n"
    assert prompt_text(tokenizer, "Start with 23, add 19.") == golden
    system = "<|im_start|>system\nBe brief.<|im_end|>\n"
    assert prompt_text(tokenizer, "Start with 23, add 19.", "Be brief.") == system + golden
    chat = [SYSTEM, {"role": "user", "content": "Start with 23, add 19."}]
    assert prompt_text(tokenizer, chat) == system + golden


def test_the_beginning_of_an_answer_stays_open(tokenizer):
    chat = [{"role": "user", "content": "2?"}, {"role": "assistant", "content": "<think>Let"}]
    assert prompt_text(tokenizer, chat).endswith("<|im_start|>assistant\n<think>Let")
    ids = tokenizer(" me. \\boxed{2}<|im_end|>").input_ids
    text = data.reply_text(tokenizer, Problem(chat, "2"), ids, [tokenizer.eos_token_id])
    assert text == "<think>Let me. \\boxed{2}"


def test_a_begun_answer_and_its_completion_are_decoded_together():
    """The decoder of SentencePiece drops the blank before its first word."""
    words = ["Let", "\u2581Let", "\u2581me", "\u2581solve", "<end>"]
    made = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<end>"))
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    made.decoder = decoders.Metaspace()
    fast = PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<end>", pad_token="<end>")
    assert fast.decode([3]) == "solve"
    chat = [{"role": "user", "content": "2?"}, {"role": "assistant", "content": "Let me"}]
    for prompt, text in ((chat, "Let me solve me"), ("2?", "solve me")):
        assert data.reply_text(fast, Problem(prompt, "2"), [3, 2, 4], [4]) == text


def test_rewards_see_the_whole_of_an_answer_that_the_prompt_begins(make_run, tmp_path):
    begun = {"role": "assistant", "content": "We begin"}
    rows = [
        {"prompt": [{"role": "user", "content": r["problem"]}, begun], "answer": "1"} for r in ROWS
    ]
    run = make_run(dataset_name=write(tmp_path / "set.jsonl", rows), max_completion_length=4)
    assert all(re.match("We begin.", text) for text in grpo_arca.collect(run, {}).texts)


def test_only_tokens_that_end_or_pad_a_completion_are_left_out_of_its_text(tokenizer):
    """As a special </think>, which rewards must see."""
    tokenizer.add_special_tokens({"additional_special_tokens": ["</think>"]})
    ids = tokenizer("a</think>b<|im_end|>").input_ids + [tokenizer.pad_token_id] * 2
    text = data.reply_text(tokenizer, Problem("2?", "2"), ids, [tokenizer.eos_token_id])
    assert text == "a</think>b"


THINKING = "{% if enable_thinking is false %}(off){% endif %}{{ messages[0].content }}"


def test_template_kwargs_reach_the_template_and_nothing_else(tokenizer):
    """Padding or truncation would reach the tokenizer's call, and cut prompts."""
    tokenizer.chat_template = THINKING
    text = "Start with 23, add 19."
    ids = prompt_ids(tokenizer, text)
    assert tokenizer.decode(ids) == text
    assert prompt_text(tokenizer, text, None, {"enable_thinking": False}) == "(off)" + text
    other = {"chat_template": "(own){{ messages[0].content }}"}
    assert prompt_text(tokenizer, text, None, other) == "(own)" + text
    cut = [
        {"padding": "max_length", "max_length": 40}, {"truncation": True, "max_length": 3},
        {"padding": True, "pad_to_multiple_of": 64}, {"return_tensors": "pt"},
    ]  # fmt: skip
    for kwargs in cut:
        assert prompt_ids(tokenizer, text, None, kwargs) == ids


HEEDED = [
    "{}", '{"enable_thinking": false}', '{"enable_thinking": true}', '{"budget": 0}',
    '{"budget": 5}', '{"chat_template": "{{ messages[0].content }}"}',
]  # fmt: skip
UNHEEDED = [
    '{"enable_thinkng": false}', '{"enable_thinking": "false"}', '{"enable_thinking": 0}',
    '{"enable_thinking": "False"}', '{"enable_thinking": null}', '{"padding": true}',
]  # fmt: skip
NO_KEYWORDS = ["{ no", "[]", "[1]", "null", "5", "enable_thinking=False", "{'a': 1}", ""]


@pytest.mark.parametrize("keywords", [*HEEDED, *UNHEEDED, *NO_KEYWORDS])
def test_keywords_of_the_template_that_it_would_not_heed_end_the_run(tmp_path, keywords):
    """A misspelt name would change nothing, and "false" is not false to Qwen 3."""
    folder = shutil.copytree(TINY, tmp_path / "model")
    template = THINKING + "{% if budget == 0 %}(none){% elif budget %}({{ budget }}){% endif %}"
    (folder / "chat_template.jinja").write_text(template)
    name = write(tmp_path / "set.jsonl", ROWS)
    flags = {"model_name_or_path": folder, "chat_template_kwargs": keywords}
    if keywords in HEEDED:
        assert len(load(name, **flags)[0]) == 32
    else:
        says = "is no JSON object" if keywords in NO_KEYWORDS else "the chat template never reads"
        assert re.search(f"--chat_template_kwargs.* {says}", refusal(load, name, **flags))


DATED = [
    '{% set format = "%d %b %Y" %}{% if strftime_now is defined %}'  # as Llama 3
    "{% set date = strftime_now(format) %}{% endif %}{{ date }}: {{ messages[0].content }}",
    "{% macro system() %}{{ strftime_now('%d %b %Y') }}: {% endmacro %}"  # as gpt-oss
    "{{ system() }}{{ messages[0].content }}",
]


@pytest.mark.parametrize("template", DATED)
def test_the_date_in_a_prompt_is_fixed(tokenizer, template):
    """A run could not go on on another day."""
    tokenizer.chat_template = template
    assert prompt_text(tokenizer, "Start.") == "26 Jul 2024: Start."
    tokenizer.chat_template = None
    assert prompt_text(tokenizer, "Start.", None, {"chat_template": template}) == (
        "26 Jul 2024: Start."
    )


BEGUN = {"role": "assistant", "content": "<think>Hm.</think>We"}
USERS = "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}"
ANYONE = "{% for m in messages %}<|im_start|>{{ m.role }} {{ m.content | trim }}{% endfor %}"
LAST = (  # of several system messages, it writes the last one
    "{% set ns = namespace(s='') %}{% for m in messages %}{% if m.role == 'system' %}"
    "{% set ns.s = m.content %}{% endif %}{% endfor %}{{ ns.s }}" + USERS
)
DROPPED = [  # template, messages
    (USERS, [SYSTEM, USER]),  # as that of Phi-3-medium
    (USERS, [USER, {"role": "tool", "content": "4"}, USER]),
    (ANYONE.replace("%}<", "if m.role in ('user', 'assistant') %}<"), [USER | {"role": "human"}]),
    ("{{ messages[-1].content }}", [USER, BEGUN, USER]),
    (LAST, [SYSTEM, SYSTEM | {"content": "Smile."}, USER]),
    ("{% if messages[0].role == 'system' %}(short){% endif %}" + USERS, [SYSTEM, USER]),
]
KEPT = [
    (ANYONE, [SYSTEM, USER, BEGUN, USER]),
    ("A default.{% if 1 %}" + ANYONE + "{% endif %}", [USER]),
    (LAST, [SYSTEM, USER]),
    ("{{ messages[0].content }}: {{ messages[1].content }}", [SYSTEM, USER]),
    (ANYONE.replace("m.content", "m.content.split('</think>')[-1]"), [USER, BEGUN, USER]),
    (ANYONE.replace("m.content", "m.content.replace('Be brief.', '')"), [SYSTEM, USER]),
    (ANYONE.replace("trim", "tojson"), [SYSTEM, USER | {"content": '"Say\n it"'}]),
]


@pytest.mark.parametrize("text", UNCLEAN, ids=ascii)
def test_a_damaged_system_prompt_ends_the_run(tokenizer, text):
    said = refusal(encode, tokenizer, [Problem("2?", "1")], system_prompt=text)
    assert re.search("it or --system_prompt has .*, a special token", said)


def test_a_begun_answer_may_have_special_tokens(tokenizer):
    """As a <think> is to some tokenizers."""
    tokenizer.add_special_tokens({"additional_special_tokens": ["<think>"]})
    chat = [{"role": "user", "content": "2?"}, {"role": "assistant", "content": "<think>"}]
    (problem,) = encode(tokenizer, [Problem(chat, "2")])
    assert problem.open_thought == "" and data.begun_answer(problem.prompt) == "<think>"


@pytest.mark.parametrize("mark", ["<think>", "[THINK]", "◁think▷", "<|begin_of_thought|>"])
def test_a_template_may_begin_a_thought_by_any_mark(tokenizer, mark):
    """A box in a thought that never ends is no answer."""
    tokenizer.chat_template = USERS + mark + "\n"
    (problem,) = encode(tokenizer, [Problem("2?", "2")])
    assert data.reply_text(tokenizer, problem, tokenizer("So").input_ids, []) == mark + "So"
    tokenizer.chat_template += "</think>\n"  # as where thinking is switched off
    assert encode(tokenizer, [Problem("2?", "2")])[0].open_thought == ""


@pytest.mark.parametrize(("template", "messages"), DROPPED, ids=str)
def test_a_template_that_drops_a_message_of_any_row_is_refused(tokenizer, template, messages):
    tokenizer.chat_template = template
    problems = [Problem("Start.", "1", row=1), Problem(messages, "2", row=2)]
    encode(tokenizer, problems[:1])
    said = "drops the words of a message in chats with the roles"
    assert said in refusal(encode, tokenizer, problems)
    if messages[0] == SYSTEM:
        assert said in refusal(encode, tokenizer, [Problem(messages[1:], "2")], "Be brief.")


@pytest.mark.parametrize(("template", "messages"), KEPT, ids=str)
def test_a_template_may_write_contents_in_its_own_way(tokenizer, template, messages):
    tokenizer.chat_template = template
    assert len(encode(tokenizer, [Problem(messages, "2")])) == 1


def test_a_thought_that_the_prompt_opens_holds_no_answer_until_it_ends(tokenizer):
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}<think>\n"
    (problem,) = encode(tokenizer, [Problem("What is 3 + 4?", "7")])
    texts = [
        data.reply_text(tokenizer, problem, tokenizer(text).input_ids, [])
        for text in (r"maybe \boxed{7}? let me check", r"maybe \boxed{8}</think> \boxed{7}")
    ]
    assert GRADER.grade(texts, [problem] * 2) == [0.0, 1.0]
    assert [is_right(text, "7") for text in texts] == [False, True]  # in a function of one's own


CLOSINGS = [  # what a template writes after an answer, and the token that closes it
    ("<|im_end|>", "<|im_end|>"),
    ("<|im_end|>\n", "<|im_end|>"),
    (" \n<|end|> <|im_end|>", "<|end|>"),
    ("<plain><|im_end|>", None),
    ("</s>", None),
    ("", "<|im_start|>"),  # a turn that nothing closes ends where the next one begins
    # in gpt-oss <|end|> also ends what the model thinks before its answer
    ("{{ '<|return|>' if loop.last else '<|end|>' }}", "<|return|>"),
]


@pytest.mark.parametrize(("closing", "token"), CLOSINGS)
@pytest.mark.parametrize(
    "content", ["m.content", "m.content | trim", "'<|im_start|>' + m.content | upper"]
)
def test_the_token_that_closes_an_answer(tokenizer, closing, token, content):
    """A base model whose files name another end token would go on after it, into new turns."""
    tokenizer.add_tokens(["<plain>"])
    tokenizer.add_tokens(["<|end|>", "<|return|>"], special_tokens=True)
    number = None if token is None else tokenizer.convert_tokens_to_ids(token)
    turn = "{{ m.role }}\n{{ " + content + " }}" + closing
    template = "{% for m in messages %}<|im_start|>" + turn + "{% endfor %}"
    tokenizer.chat_template = template + "{% if add_generation_prompt %}A{% endif %}"
    assert data.closing_token(tokenizer, {}) == number
    tokenizer.chat_template = None
    assert data.closing_token(tokenizer, {"chat_template": template}) == number


@pytest.mark.parametrize(
    "template", [USERS, "{{ raise_exception('no') }}", "{{ messages[1].content.no.no }}"]
)
def test_templates_that_write_no_answer_close_none(tokenizer, template):
    assert data.closing_token(tokenizer, {"chat_template": template}) is None


def test_the_template_writes_the_only_begin_and_end_tokens():
    """Some tokenizers add them to every text. What follows an end token would be a new text."""
    vocabulary = {"<s>": 0, "</s>": 1, "[UNK]": 2, "hi": 3, "user": 4, ":": 5}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A $B", special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    made = PreTrainedTokenizerFast(
        tokenizer_object=words, bos_token="<s>", eos_token="</s>", unk_token="[UNK]"
    )
    assert made("hi").input_ids == [0, 3, 1]
    made.chat_template = "{{ bos_token }}{% for m in messages %}user : {{ m.content }}{% endfor %}"
    assert prompt_ids(made, "hi") == [0, 4, 5, 3]
    # To this tokenizer all other words are one.
    problems = [Problem(text, text, row=row) for row, text in enumerate(["hi", "one", "two"], 1)]
    assert len(encode(made, problems[:2])) == 2
    says = "2 of 2 rows are left out (such as 2, 3), because the same prompt has another answer"
    assert says in refusal(encode, made, problems[1:])
    found = data.hold_out(encode(made, problems[:2]), encode(made, problems[2:]), 9)
    assert [len(part) for part in found] == [1, 1]


def test_a_prompt_as_long_as_the_context_leaves_room_is_used(tokenizer):
    problems = [Problem("Start with 23.", "23"), Problem("Start with 23, add 19.", "42", row=2)]
    longest = max(len(prompt_ids(tokenizer, problem.prompt)) for problem in problems)
    assert [len(encode(tokenizer, problems, room=longest - less)) for less in (0, 1)] == [2, 1]


def copy_with_tokens(folder, count: int, **special):
    """Returns a copy of the embedded policy whose tokenizer has tokens that the model lacks."""
    shutil.copytree(TINY, folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens([f"<{i}>" for i in range(count)])
    tokenizer.add_special_tokens(special)
    tokenizer.save_pretrained(folder)
    return folder


def test_a_pad_token_that_the_model_lacks_is_not_used(tmp_path):
    """As in some files of Llama 2. To read it would be an IndexError in the middle of a run."""
    folder = copy_with_tokens(tmp_path / "model", 100, pad_token="<a new one>")
    tokenizer, *_ = data.load_tokenizer(str(folder), "main", None, {})
    assert tokenizer.pad_token == tokenizer.eos_token


def test_a_prompt_with_a_token_that_the_model_lacks_ends_the_run(tmp_path, run_main):
    folder = copy_with_tokens(tmp_path / "model", 100)
    name = write(tmp_path / "set.jsonl", [{"problem": f"{n} <99>", "answer": 3} for n in range(9)])
    code, _, said = run_main(model_name_or_path=str(folder), dataset_name=name)
    assert code == 1 and "9 of 9 rows are left out" in said and "that the model lacks" in said


FACTORS = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8, "factor": 4.0}
LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 32}
PLAIN = {"rope_type": "default", "rope_theta": 1e4}
CONTEXTS = [  # model type, settings of its config.json, context
    ("llama", {"rope_parameters": PLAIN}, 128),
    ("llama", {"rope_parameters": LONGROPE | FACTORS}, 32),
    ("llama", {"rope_scaling": {"type": "yarn", "factor": 4.0}}, 128),
    ("phi3", {"rope_scaling": FACTORS | {"type": "longrope"},
              "original_max_position_embeddings": 32}, 32),
    ("gemma3_text", {"rope_parameters": {"full_attention": LONGROPE | FACTORS,
                                         "sliding_attention": PLAIN}}, 32),
]  # fmt: skip


@pytest.mark.parametrize(("model_type", "settings", "context"), CONTEXTS)
def test_the_context_ends_where_positions_would_depend_on_the_longest_row(
    tmp_path, model_type, settings, context
):
    shutil.copytree(TINY, tmp_path / "model")
    small = {
        "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "head_dim": 16,
        "model_type": model_type, "max_position_embeddings": 128, "vocab_size": 448,
        "num_key_value_heads": 4, "pad_token_id": 0, "eos_token_id": 2, "bos_token_id": 1,
    }  # fmt: skip
    (tmp_path / "model/config.json").write_text(json.dumps(small | settings))
    assert data.load_tokenizer(str(tmp_path / "model"), "main", None, {})[1] == context


def test_a_model_that_brings_its_own_code_is_refused(tmp_path, monkeypatch):
    """transformers would ask on standard input whether to run it, and wait for 15 seconds."""
    monkeypatch.setattr("builtins.input", lambda question: pytest.fail(question))
    own = {"model_type": "own", "tokenizer_class": "Own"}
    own["auto_map"] = {"AutoConfig": "own.C", "AutoTokenizer": ["own.T", None]}
    files = {"config.json": own, "tokenizer_config.json": own}
    folder = changed_copy(tmp_path / "model", files)
    said = refusal(data.load_tokenizer, folder, "main", None, {}, error=ValueError)
    assert "trust_remote_code" in said
