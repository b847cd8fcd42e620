r"""Final answers as text: where the last \boxed{...} stands, and what in it does not count.

Both the answer of a completion and the gold answer are made `tidy` before they are compared. That
removes units and the like, and rewrites what math-verify would misread. `quick_verdict` settles
the pairs that need no evaluation; grading_worker.py evaluates the others.

Every regular expression has a comment that says by an example what it is for.
"""

from __future__ import annotations

import re
from collections.abc import Callable

MAX_CHARS = 500  # a longer box or gold is compared as a string only; MATH-500's longest is 53

# ---- Boxes ---------------------------------------------------------------------------------------
BOX_OR_BRACE = re.compile(
    r"(?P<box>\\\\?boxed\s*\{)"  # \boxed{ or, escaped by the model as in JSON, \\boxed{
    r"|\\."  # an escaped character: the braces of the set \{1, 2\} group nothing
    r"|(?P<open>\{)|(?P<close>\})",  # those of \frac{1}{2} do
    re.DOTALL,
)


def boxed_span(text: str) -> tuple[int, int] | None:
    r"""Returns where the content of the last complete \boxed{...} begins and ends, or None.

    The last box is the one that begins last, so of nested boxes it is the inner one. A box whose
    brace is never closed is no box. The text is read once, so the time is linear in its length.
    """
    first_box = text.find("\\boxed")
    if first_box < 0:
        return None

    last_span: tuple[int, int] | None = None
    open_groups: list[int | None] = []  # where the content of an open box begins; None: no box
    for token in BOX_OR_BRACE.finditer(text, first_box):
        if token.lastgroup == "box":
            open_groups.append(token.end())
        elif token.lastgroup == "open":
            open_groups.append(None)
        elif token.lastgroup == "close" and open_groups:
            begin = open_groups.pop()
            if begin is not None and (last_span is None or begin > last_span[0]):
                last_span = (begin, token.start())
    return last_span


def last_boxed(text: str) -> str | None:
    r"""Returns the content of the last complete \boxed{...}, or None."""
    span = boxed_span(text)
    if span is None:
        return None
    begin, end = span
    return text[begin:end]


# ---- Units: what may follow the value in 12 cm^2, or in 12\text{ apples} -------------------------
# Space between a value and what follows it: 12 cm, 12~cm, 12\,cm.
GAP = r"(?:[\s~]|\\[,;:! ])"
# The beginning of words in LaTeX: 12\text{ apples}, 12\mathrm{ cm}.
TEXT = r"\\(?:text|mbox|math)[a-z]* ?\{"
# The power of a unit: cm^2, cm^{2}.
POWER = r"(?:\^(?:[1-9]|\{[1-9]\}))?"
# A word that changes the value, so it is no unit: 12 million, 12 or more, 12\text{k}.
CHANGING_WORD = (
    r"\b(?:(?i:or|not|is|half|dozen|hundred|thousand|\w*illion|mod|squared|cubed)s?|[kM])\b"
)
# Another number, which belongs to the answer: 12 hours and 30 minutes. The 2 of cm^2 does not.
OTHER_NUMBER = r"(?<![a-zA-Z^])(?<!\^\{)[0-9]"
# Units of one or two letters, which may follow without a gap: 12cm, 12 km/h, 1st.
SHORT_UNIT = r"[ckm]?m|[km]?g|m?[lL]|ft|in|yd|mi|mph|lb|oz|hr|min|sec|s|h|st|nd|rd|th|°"
# One word of a unit: " dollars", "cm^2", "/h". Percent is left to math-verify, which knows it.
UNIT_WORD = rf"(?:{GAP}+(?!percent)[A-Za-z]{{3,}}|{GAP}*/?(?:{SHORT_UNIT})(?!\w)){POWER}"
# Such words after a value that ends in a digit, a bracket or pi: 12 years old, 2\pi cm.
UNIT_WORDS = rf"(?:(?<=[0-9)}}])|(?<=\\pi))(?:{UNIT_WORD})+"
# The same in LaTeX, after any value: x\text{ cm}^2.
UNIT_TEXT = rf"{GAP}*/?{TEXT}[^{{}}]*\}}{POWER}"
# The value, which ends before the first \text{ and neither in a comma nor in an operator: in
# 1, \text{A} the text is an answer, and no unit.
VALUE = rf"((?:(?!{TEXT}).)*?[^\s,;=+*/$-])"
VALUE_WITH_UNIT = rf"^{VALUE}(?!.*(?:{CHANGING_WORD}|{OTHER_NUMBER}))(?:{UNIT_WORDS}|{UNIT_TEXT})+$"

# ---- What `tidy` rewrites ------------------------------------------------------------------------
# What may surround an answer without being part of it: "$ 7 $", "\approx 7", "7.". Math-verify
# fails on a full stop in the box.
EDGES = (
    rf"^(?:{GAP}|[$≈]|\\(?:approx|displaystyle)(?![a-zA-Z]))+"  # at the beginning
    rf"|(?:{GAP}|(?<!\\)[$.])+$"  # at the end; \$ is a dollar sign and stays
)
# What is a space to a reader: "40  2", "40~2", "40\text{ }2", "40$2", "5'10". Math-verify fails on
# two spaces and drops the others, so that 5'10 would be 510.
SPACES = r"[\s~]+|\\text\s*\{\s*\}|(?<=[0-9])(?:\\?\$|['\"]+)(?=[0-9])"
# What joins two answers: 4 \lor 7, 4 \text{ or } 7, 4 \text{ and } 7.
JOINING_WORD = r",? ?\\(?:(?:lor|vee)(?![a-zA-Z])|text ?\{ ?(?:and|or) ?\})"
# A list of letters, as the answer to a multiple choice: \text{A, D}.
LETTERS = r"\\text ?\{((?:[A-Z], ?)+[A-Z])\}"
# What separates thousands: 1 000, 1\,000, 11,\!111, 1{,}000, 1,000. A comma does so only where no
# bracket follows: (1,200) is a pair.
THOUSANDS_BREAK = r"(?: |,?\\!|\\[,;: ])+|\{,\}|,(?!.*(?:[)\]]|\\\}))"
# A number with them: 1,200.50, but not the 1 200 in 0.1 200.
THOUSANDS = rf"(?<![\d.^_])[1-9]\d?\d?(?:(?:{THOUSANDS_BREAK})\d{{3}})+(?!\d)"
# A mixed fraction: 2 1/2, 2\,1/2.
MIXED_FRACTION = r"(?<![\d.^_/])(\d+)(?: |\\[,;: ])+(\d+) ?/ ?(\d+)(?![\d.])"
# A product without a sign: (a+5)(b+2), \left(a\right)\left(b\right).
BRACKETS_SIDE_BY_SIDE = r"\) ?(\\left)? ?\("
# A decimal that repeats: 0.\overline{3}, 2.1\bar{6}.
REPEATING_DECIMAL = r"(\.\d*) ?\\(?:overline|bar) ?\{(\d{1,9})\}"


def digits_only(thousands: re.Match[str]) -> str:
    """Returns the number without what separates its thousands."""
    return re.sub(r"\D", "", thousands[0])


def many_decimals(repeating: re.Match[str]) -> str:
    """Returns the decimals with the repeating ones written out to 15 places."""
    decimals = repeating[1]
    repeated = repeating[2] * 15
    return decimals + repeated[:15]


REWRITES: list[tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]]] = [
    (re.compile(EDGES), ""),
    (re.compile(SPACES), " "),
    (re.compile(JOINING_WORD), ", "),
    (re.compile(LETTERS), r"\1"),
    (re.compile(r"\\varnothing"), r"\\emptyset"),
    (re.compile(VALUE_WITH_UNIT), r"\1"),
    (re.compile(THOUSANDS), digits_only),
    (re.compile(MIXED_FRACTION), r"\1\\frac{\2}{\3}"),
    (re.compile(BRACKETS_SIDE_BY_SIDE), r")\\cdot\1("),
    (re.compile(REPEATING_DECIMAL), many_decimals),
]


def tidy(text: str) -> str:
    """Returns an answer without what does not count, and with what math-verify misreads rewritten.

    So 12 cm becomes 12, and 2 1/2 becomes 2\\frac{1}{2}. The order of the rewrites matters.
    """
    if len(text) > MAX_CHARS:
        return text.strip()
    for pattern, replacement in REWRITES:
        text = pattern.sub(replacement, text)
    return text


# ---- Verdicts that take no evaluation ------------------------------------------------------------
INTEGER = re.compile(r"[+-]?[0-9]{1,30}")  # in ASCII digits: 42, -7, +7, 007
NUMBER_IN_A_BASE = re.compile(r"\b[0-9][0-9A-Z]*\s*_([^_]*)$")  # 101_2, 4A_{16}, 11_{(2)}


def quick_verdict(box: str, gold: str) -> float | None:
    """Returns 1.0 (equal) or 0.0 where that takes no evaluation, else None. Both must be tidy."""
    if box == "":
        return 0.0
    if box == gold:
        return 1.0
    if max(len(box), len(gold)) > MAX_CHARS or says_more(box, gold):
        return 0.0
    if INTEGER.fullmatch(box) and INTEGER.fullmatch(gold):
        return float(int(box) == int(gold))
    return None


def says_more(box: str, gold: str) -> bool:
    r"""Returns whether the box has something that changes its value, but that math-verify drops.

    That is the modulus of 4 \mod 5, the braces of the set \{1, 2\} where the gold answer is the
    pair (1, 2), or the number base of 101_2. The problem often names the base, so a gold answer
    with a base may be given without it, but a box must not name another one.
    """
    adds_modulus = "mod" in box and "mod" not in gold
    adds_braces = "\\{" in box and "\\{" not in gold and gold.endswith(")")
    box_base = number_base(box)
    adds_base = box_base is not None and box_base != (number_base(gold) or "10")
    return adds_modulus or adds_braces or adds_base


def number_base(text: str) -> str | None:
    """Returns the digits of the base that a number ends in, as "16" of 4A_{16}, or None."""
    number = NUMBER_IN_A_BASE.search(text)
    if number is None:
        return None
    return re.sub("[^0-9]", "", number[1])
