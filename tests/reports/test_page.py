"""credit.html shows the data as it is, and hostile texts as texts, in a browser as well."""

import math
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from support import TOKENIZER

from common import report
from common.task import Problem

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
BROWSER = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
    "--disable-background-networking", "--virtual-time-budget=3000", "--dump-dom",
]  # fmt: skip
RUN = "document.title='PWNED'"  # what each payload tries
HOSTILE = [
    f"<script>{RUN}</script>",
    f"</i></div></article></main><script>{RUN}</script>",
    f"</title></style></textarea></noscript><script>{RUN}</script><title>",
    f"--><script>{RUN}</script><!--",
    f'"><img src=x onerror="{RUN}">',
    f"'><svg onload={RUN}>",
    f'" autofocus onfocus="{RUN}" x="',
    f"' autofocus onfocus='{RUN}' x='",
    f'<details open ontoggle="{RUN}">',
    f'<a href="javascript:{RUN}" autofocus>here</a>',
    "&lt;script&gt; &#60;b&#62; {{ title }} {% for x in groups %} {# $title",
]
HIDDEN = {  # no control or bidirectional character reaches the page, nor a joiner outside of words
    "NUL \x00 ESC \x1b[31m": "NUL <U+0000> ESC <U+001B>[31m",
    "\u202etxt.exe \u200f\ufeff\ud800": "<U+202E>txt.exe <U+200F><U+FEFF><U+D800>",
    "می\u200cشد 👨\u200d👩": "می\u200cشد 👨\u200d👩",
    "\u200d": "\u200d",  # a token of such a word
    "a \u200d b\u200c\u200cc": "a <U+200D> b<U+200C><U+200C>c",
}


CHAIN = Problem("Start with 23, add 19, double it.", "84", (42, 84))
RIGHT = "We begin at 23. Then adding 19 gives 42. We double it and get 84. \\boxed{84}"
WRONG = "We begin at 23. Then adding 19 gives 42. We double it and get 82. \\boxed{82}"


class Page(HTMLParser):
    """The elements of a page, each with its tag, its attributes and the text that follows."""

    def __init__(self, text: str):
        super().__init__()
        self.elements: list[list] = [["", {}, ""]]
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.elements.append([tag, dict(attributes), ""])

    def handle_endtag(self, tag):
        self.elements.append([f"/{tag}", {}, ""])

    def handle_data(self, data):
        self.elements[-1][2] += data

    def texts(self, name: str) -> list[str]:
        return [text for tag, _, text in self.elements if tag == name]

    def tokens(self) -> list[tuple[dict, str]]:
        """Returns attributes and text of the tokens, but for the two of the legend."""
        return [(attrs, text) for tag, attrs, text in self.elements if tag == "i"][2:]


def completion_of(text: str, row: int, reward: float, problem: Problem = CHAIN) -> dict:
    """Returns a completion as `Batch.completion` does, with random figures."""
    ids = TOKENIZER(text, return_tensors="pt").input_ids[0]
    noise = torch.rand(3, len(ids), generator=torch.Generator().manual_seed(row))
    return {
        "row": row, "problem": problem, "truncated": row == 1, "reward": reward, "ids": ids,
        "advantage": reward - 0.5, "weights": noise[0] / noise[0].mean(), "logp": -2 * noise[1],
        "entropy": 3 * noise[2],
    }  # fmt: skip


def batch_of(completion: dict) -> SimpleNamespace:
    """Returns a completion as a micro-batch of its own, without its prompt."""
    completion = completion | {"reward": torch.tensor(completion["reward"], dtype=torch.float64)}
    numbers = {k: torch.as_tensor(v)[None] for k, v in completion.items() if k != "problem"}
    return SimpleNamespace(
        rows=numbers["row"], problems=[completion["problem"]], rewards=numbers["reward"],
        advantages=numbers["advantage"], truncated=numbers["truncated"], ids=numbers["ids"],
        weights=numbers["weights"], sampled_logp=numbers["logp"], entropy=numbers["entropy"],
        prompt_width=0, mask=torch.ones_like(numbers["ids"], dtype=torch.bool),
    )  # fmt: skip


def page_of(tmp_path, completions: list[dict]) -> tuple[list[dict], Page]:
    """Returns the groups of a page, each of six completions, and the page."""
    groups = report.credit_example(TOKENIZER, [batch_of(c) for c in completions], 6, 7, None)
    report.write_credit_page(tmp_path / "credit.html", "title", groups)
    return groups, Page((tmp_path / "credit.html").read_text(encoding="utf-8"))


def test_the_page_shows_tokens_weights_and_figures_of_the_batch(tmp_path):
    """Of a token: its text, its weight, that times the advantage, entropy, its fall, log-prob."""
    completions = [completion_of(RIGHT, 0, 1.0), completion_of(WRONG, 1, 0.0)]
    _, page = page_of(tmp_path, completions)
    tokens = page.tokens()
    assert "".join(text for _, text in tokens) == RIGHT + WRONG
    for completion in completions:
        weights, entropy, logp = (completion[k].tolist() for k in ("weights", "entropy", "logp"))
        falls = [max(a - b, 0) for a, b in zip(entropy, [*entropy[1:], entropy[-1]], strict=True)]
        tinted = {"k": weights, "u": [-value for value in logp], "h": falls}
        shown = {"data-w": weights, "data-h": entropy, "data-f": falls, "data-l": logp}
        for i, weight in enumerate(weights):
            attributes, text = tokens.pop(0)
            shares = {name: v[i] * len(v) / sum(v) for name, v in tinted.items()}
            tints = [f"{name}{min(round(4 * share), 12)}" for name, share in shares.items()]
            assert attributes["class"].split()[:3] == tints
            expected = {name: f"{values[i]:.2f}" for name, values in shown.items()}
            expected["data-a"] = f"{weight * completion['advantage']:+.2f}"
            assert attributes == attributes | expected | {"data-t": text}
    kinds = [attributes["class"] for tag, attributes, _ in page.elements if tag == "article"]
    assert kinds == ["pos", "neg"]
    assert page.texts("b").count("truncated") == 1


def test_digits_of_results_are_underlined_and_the_first_wrong_one_is_framed(tmp_path):
    _, page = page_of(tmp_path, [completion_of(RIGHT, 0, 1.0), completion_of(WRONG, 1, 0.0)])
    marked = [[*attributes["class"].split()[3:], text] for attributes, text in page.tokens()]
    assert [mark for mark in marked if len(mark) == 2] == [
        ["d", "4"], ["d", "2"], ["d", "8"], ["d", "4"],
        ["d", "4"], ["d", "2"], ["d", "8"], ["f", "2"],
    ]  # fmt: skip


@pytest.mark.parametrize(("power", "switch"), [(0, "surprisal"), (1, "weight")])
def test_a_page_of_equal_weights_begins_with_surprisal(tmp_path, power, switch):
    completions = [completion_of("42", 0, 1.0), completion_of("41", 1, 0.0)]
    for completion in completions:
        completion["weights"] = completion["weights"] ** power
    _, page = page_of(tmp_path, completions)
    inputs = [attributes for tag, attributes, _ in page.elements if tag == "input"]
    assert [a["id"] for a in inputs if "checked" in a] == [switch]


def test_the_group_is_the_first_with_an_advantage_with_its_best_and_worst(tmp_path):
    rewards = [1, 1, 1, 1, 1, 1, 0.5, math.nan, 0.75, 0.25, 0.1, 0.9, 0, 1, 0, 1, 0, 1]
    completions = [completion_of(str(row), row, reward) for row, reward in enumerate(rewards)]
    for completion in completions[:6]:
        completion["advantage"] = 0.0
    (group,), _ = page_of(tmp_path, completions[::-1])
    assert [str(c["reward"]) for c in group["completions"]] == ["0.9", "0.75", "0.1", "nan"]
    assert page_of(tmp_path, completions[:6])[0] == []
    (group,), _ = page_of(tmp_path, completions[13::2])  # as with --negative_weight 0
    assert [c["reward"] for c in group["completions"]] == [1.0] * 3


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("🤯é 木木 a  b\n" * 9, "🤯é 木木 a  b↵\n" * 9),
        ("می\u200cشد", "می\u200cشد"),
        ("a" + "\u200d" * 9 + "b", "a" + "<U+200D>" * 9 + "b"),
    ],
)
def test_a_text_of_parts_of_characters_is_whole(tmp_path, monkeypatch, text, shown):
    """A part of a character may hide the whole ones next to it, as Llama 2's decoder does. Joiners
    belong to words, and hide nowhere else."""
    whole = TOKENIZER.decode
    monkeypatch.setattr(
        TOKENIZER, "decode", lambda ids: re.sub("[^ -~\n]*\ufffd$", "\ufffd", whole(ids))
    )
    _, page = page_of(tmp_path, [completion_of(text, 0, 1.0)])
    pieces = [piece for _, piece in page.tokens()]
    assert "".join(pieces).replace("·", "") == shown and "·" in pieces


def test_a_long_run_of_parts_of_characters_takes_no_quadratic_time(tmp_path, monkeypatch):
    lengths = []
    monkeypatch.setattr(
        TOKENIZER,
        "decode",
        lambda ids, decode=TOKENIZER.decode: lengths.append(len(ids)) or decode(ids),
    )
    page_of(tmp_path, [completion_of("\ufffd" * 300, 0, 1.0)])
    assert 64 < max(lengths) < 200


# ---- Hostile texts -------------------------------------------------------------------------------
def hostile_page(path: Path, texts: list[str], title: str) -> str:
    """Writes a page with the texts at every place that takes one, and returns it."""
    facts = {"numbers": [1.0] * 4, "tints": [4] * 3, "role": ""}
    groups = []
    for text in texts:
        completion = {"reward": 1.0, "advantage": 0.5, "truncated": False}
        group = {
            "messages": [{"role": text, "content": text}] * 2, "answer": text, "step": text,
            "size": 1, "is_uniform": False,
            "completions": [completion | {"tokens": [facts | {"text": text}]}],
        }  # fmt: skip
        groups.append(group)
    report.write_credit_page(path, title, groups)
    return path.read_text(encoding="utf-8")


def test_hostile_texts_are_shown_and_bring_no_element(tmp_path):
    seen = {text: text for text in HOSTILE} | HIDDEN
    page = Page(hostile_page(tmp_path / "credit.html", list(seen), HOSTILE[2]))
    harmless = Page(hostile_page(tmp_path / "harmless.html", ["word"] * len(seen), "t"))
    assert [e[0] for e in page.elements] == [e[0] for e in harmless.elements]
    assert page.texts("title") == page.texts("h1") == [HOSTILE[2]]
    assert [text for _, text in page.tokens()] == list(seen.values())
    assert page.texts("summary").count("1 message before the prompt") == len(seen)
    directions = [a.get("dir") for _, a, _ in page.elements if a.get("class") == "text"]
    assert directions == ["auto"] * 4 * len(seen)
    for text in seen.values():  # two messages, the answer and the token
        assert sum(text in element[2] for element in page.elements) >= 5


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no chromium or google-chrome is installed")
@pytest.mark.parametrize("has_policy", [True, False])
def test_hostile_texts_run_nothing_in_a_browser(tmp_path, has_policy):
    """The page's Content-Security-Policy would hide a mistake, so it is opened without, too."""
    text = hostile_page(tmp_path / "credit.html", HOSTILE, HOSTILE[2])
    policy = next(line for line in text.splitlines() if "Content-Security-Policy" in line)
    if not has_policy:
        (tmp_path / "credit.html").write_text(text.replace(policy, ""), encoding="utf-8")
    address = (tmp_path / "credit.html").as_uri()
    command = [CHROMIUM, *BROWSER, f"--user-data-dir={tmp_path / 'profile'}", address]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    page = Page(done.stdout)
    assert page.texts("title") == [HOSTILE[2]]  # nothing has set it
    assert [text for _, text in page.tokens()] == HOSTILE
