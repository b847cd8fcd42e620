"""credit.html made from hostile text, opened in headless chromium: shows the text, runs nothing.

About 15 s. The page forbids scripts by its Content-Security-Policy, which would hide a mistake in
the escaping, so it is also opened without that policy. And with the escaping broken a payload must
run, or this test could not see one.
"""

import html
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest
from markupsafe import Markup

from common import credit_page

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), ""
)
FLAGS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-sync", "--disable-background-networking", "--disable-component-update",
    "--disable-dev-shm-usage", "--virtual-time-budget=3000", "--dump-dom",
]  # fmt: skip
pytestmark = pytest.mark.skipif(not CHROMIUM, reason="no chromium or google-chrome is installed")

RUN = "document.title='PWNED'"  # what each payload tries
PAYLOADS = [  # shown as they are
    f"<script>{RUN}</script>",
    f"</span></i></div></article></main><script>{RUN}</script>",
    f"</title></style></textarea></noscript><script>{RUN}</script><title>",
    f"--><script>{RUN}</script><!--",
    f"<![CDATA[<script>{RUN}</script>]]>",
    f'"><img src=x onerror="{RUN}">',
    f"'><svg onload={RUN}>",
    f'" autofocus onfocus="{RUN}" x="',
    f"' style='animation:a' onanimationstart='{RUN}' '",
    f'<iframe srcdoc="<script>parent.{RUN}</script>">',
    f'<details open ontoggle="{RUN}">',
    f'<meta http-equiv="refresh" content="0;url=javascript:{RUN}">',
    f'<a href="javascript:{RUN}" autofocus>here</a>',
    "&lt;script&gt; &#60;b&#62; &amp;quot; &quot;",
    "{{ title }} {% for x in groups %} {# $title",
    "\\\"' ` = / naïve 日本語 עברית 🙂",
]
MARKS = {  # text -> what is seen of it: no control, bidi or zero-width character reaches the page
    "NUL \x00 ESC \x1b[31m DEL \x7f": "NUL ␀ ESC ␛[31m DEL <U+007F>",
    "<scr\x00ipt>": "<scr␀ipt>",
    "\u202etxt.exe\u202c \u2066a\u2069": "<U+202E>txt.exe<U+202C> <U+2066>a<U+2069>",
    "\u200f": "<U+200F>",
    "lone \ud800 \ufeff \u2028": "lone <U+D800> <U+FEFF> <U+2028>",
}
SEEN = {text: text for text in PAYLOADS} | MARKS
VOID = {"meta", "img", "br", "link", "input", "base", "hr"}  # elements without an end tag


class Dom(HTMLParser):
    """textContent of every element of a dumped DOM, with its tag and attributes."""

    def __init__(self, dump: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[list] = []  # [tag, attributes, text]
        self.open: list[list] = []
        self.feed(dump)
        self.close()

    def handle_starttag(self, tag, attrs):
        element = [tag, dict(attrs), ""]
        self.elements.append(element)
        if tag not in VOID:
            self.open.append(element)

    def handle_endtag(self, tag):
        while self.open and self.open.pop()[0] != tag:
            pass

    def handle_data(self, data):
        for element in self.open:
            element[2] += data

    def texts(self, tag: str, attribute: tuple[str, str] | None = None) -> list[str]:
        """The text of each element with this tag and, if given, this attribute."""
        found = []
        for name, attrs, text in self.elements:
            if name == tag and (attribute is None or attribute in attrs.items()):
                found.append(text)
        return found

    def tags(self) -> list[str]:
        return [tag for tag, _, _ in self.elements]


def write(path: Path, texts: list[str], title: str) -> None:
    """Each text as message, prompt, answer, note and token; the title is hostile as well."""
    tokens = [{"text": t, "weight": 1.0, "entropy": 0.5, "logp": -0.5, "role": t} for t in texts]
    facts = {"reward": 1.0, "advantage": 0.7, "truncated": False, "tokens": tokens}
    groups = []
    for text in texts:
        earlier = [{"role": text, "content": text}]
        group = {"earlier": earlier, "prompt": text, "answer": text, "step": text, "note": text}
        groups.append(group | {"completions": []})
    groups[0]["completions"] = [facts]
    credit_page.write_credit_page(str(path), title, groups)


def dump(path: Path) -> str:
    """The DOM after loading and 3 s of the page's time."""
    profile = f"--user-data-dir={path.parent / 'profile'}"
    command = [CHROMIUM, *FLAGS, profile, path.resolve().as_uri()]
    done = subprocess.run(command, capture_output=True, timeout=120, check=True)
    return done.stdout.decode("utf-8")


def without_policy(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    lines = credit_page.TEMPLATE.read_text(encoding="utf-8").splitlines(keepends=True)
    kept = [line for line in lines if "Content-Security-Policy" not in line]
    assert len(kept) == len(lines) - 1
    template = folder / "template.html"
    template.write_text("".join(kept), encoding="utf-8")
    monkeypatch.setattr(credit_page, "TEMPLATE", template)


@pytest.mark.parametrize("policy", [True, False])
def test_hostile_text_is_shown_and_runs_nothing(tmp_path, monkeypatch, policy):
    if not policy:
        without_policy(monkeypatch, tmp_path)
    page = tmp_path / "credit.html"
    write(page, list(SEEN), title=PAYLOADS[2])
    dom = Dom(dump(page))
    assert dom.texts("title") == dom.texts("h1") == [PAYLOADS[2]]  # nothing has set it
    assert dom.texts("i", ("tabindex", "0")) == list(SEEN.values())
    shown = dom.texts("div", ("class", "text"))
    assert sorted(shown) == sorted([*SEEN.values()] * 3 + ["".join(SEEN.values())])
    heads = [t.split("Step ")[1] for t in dom.texts("summary") if "Step " in t]
    assert heads == [f"{seen} · {int(i == 0)} completions" for i, seen in enumerate(SEEN.values())]
    assert dom.texts("p", ("class", "note")) == list(SEEN.values())
    tips = [attrs["data-t"] for _, attrs, _ in dom.elements if "data-t" in attrs]
    assert [tip[:20] for tip in tips] == [seen[:20] for seen in SEEN.values()]
    harmless = tmp_path / "harmless.html"
    write(harmless, [f"word{i}" for i in range(len(SEEN))], title="t")
    assert dom.tags() == Dom(harmless.read_text(encoding="utf-8")).tags()  # no element came in


def unescaped(value: object) -> Markup:
    return Markup(str(value))


def escaped_without_quotes(value: object) -> Markup:
    return Markup(html.escape(str(value), quote=False))


@pytest.mark.slow
def test_each_of_two_broken_escapings_is_noticed(tmp_path, monkeypatch):
    """Markup that gets through is stopped by the policy; without it, a bare quote is enough."""
    page = tmp_path / "credit.html"
    with monkeypatch.context() as patch:
        patch.setattr(credit_page, "visible", unescaped)
        write(page, PAYLOADS[:1], title="t")
        dom = Dom(dump(page))
        assert dom.texts("title") == ["t"] and "script" in dom.tags()
    without_policy(monkeypatch, tmp_path)
    monkeypatch.setattr(credit_page, "visible", escaped_without_quotes)
    write(page, PAYLOADS[7:8], title="t")
    # Whether the element gets its focus before the page is dumped is a matter of luck.
    assert any(Dom(dump(page)).texts("title") == ["PWNED"] for _ in range(8))
