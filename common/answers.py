r"""Final answers as text: where the last \boxed{...} stands, and what in it does not count.

Both the answer of a completion and the gold answer are made `tidy` before they are compared. That
rewrites what math-verify would misread. units.py then compares their units and takes them off.
`quick_verdict` settles the pairs that need no evaluation; grading_worker.py evaluates the others.

Every regular expression has a comment that says by an example what it is for.
"""

# ruff: noqa: RUF001  (characters that look like others are what `CHARACTERS` is about)
from __future__ import annotations

import calendar
import functools
import re
from collections.abc import Callable

from common.units import stem, values_to_compare

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


# ---- What `tidy` rewrites ------------------------------------------------------------------------
# Space in LaTeX: 12~cm, 12\,cm.
GAP = r"(?:[\s~]|\\[,;:! ])"
# Characters that LaTeX has commands for.
CHARACTERS = str.maketrans(
    {
        "−": "-", "–": "-", "×": r"\times ", "÷": r"\div ", "⋅": r"\cdot ", "π": r"\pi ",
        "∞": r"\infty ", "≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ", "±": r"\pm ", "∪": r"\cup ",
        "∩": r"\cap ", "∈": r"\in ", "∅": r"\emptyset ", "°": r"^\circ ", "⁄": "/", "∶": ":",
        "·": r"\cdot ", "⩽": r"\le ", "⩾": r"\ge ",
        "％": r"\%", "½": r"\frac{1}{2}", "⅓": r"\frac{1}{3}", "⅔": r"\frac{2}{3}",
        "¼": r"\frac{1}{4}", "¾": r"\frac{3}{4}", "⅕": r"\frac{1}{5}", "⅖": r"\frac{2}{5}",
        "⅗": r"\frac{3}{5}", "⅘": r"\frac{4}{5}", "⅙": r"\frac{1}{6}", "⅚": r"\frac{5}{6}",
        "⅛": r"\frac{1}{8}", "⅜": r"\frac{3}{8}", "⅝": r"\frac{5}{8}", "⅞": r"\frac{7}{8}",
    }
    | {chr(0x2080 + digit): f"_{digit}" for digit in range(10)}  # lowered ones: x₁
)  # fmt: skip
# Raised digits: x², 10⁻⁴.
RAISED = "⁰¹²³⁴⁵⁶⁷⁸⁹⁻"
LOWERED = str.maketrans(RAISED, "0123456789-")
# What follows the sign of a root: √2, 3√15, √(x+1).
RADICAND = r" ?(\d+(?:\.\d+)?|[a-z]|\([^()]*\)|\{[^{}]*\})"
# Spaces that have names: 10\thinspace000.
NAMED_SPACE = r"\\(?:thin|med|thick|en)space(?![a-zA-Z])"
# Scientific notation: 3e8, 3E-4, but not the number 1E3_{16} in another base.
EXPONENT = r"(?<=\d)[eE]([+-]?\d{1,3})(?![\w.])"
# A letter x for a sign: 3 x 10^8, 3\text{ x }10^8.
LETTER_FOR_TIMES = r"(?<=\d) ?(?:[xX]|\\text ?\{ ?x ?\}) ?(?=10\s?\^)"
# A ratio or a time: 3{:}2, 3 : 2, 10\!:\!30, 3\text{ to }2.
COLON = (
    rf"{GAP}*(?:\{{:\}}|(?<!\\):|\\colon(?![a-zA-Z])){GAP}*"
    r"|(?<=[0-9)}]) ?(?:to|\\text ?\{ ?(?:to|:) ?\}) ?(?=[0-9(\\])"
)
# Half of a day: 7\text{ p.m.}, 7 PM.
HALF_OF_DAY = r"(?<=[0-9]) ?(?:\\text ?\{ ?)?([apAP])\.? ?[mM]\b\.?(?: ?\})?"
# What makes a number an ordinal: 5th, 5^{th}, 5\text{th}, 5^{\text{th}}.
ORDINAL = r"(?:st|nd|rd|th)"
ORDINAL_TEXT = rf"\\(?:text|math|mbox)[a-z]* ?\{{ ?{ORDINAL} ?\}}"
ORDINAL_END = (
    rf"(?<=[0-9])(?:{ORDINAL}(?![a-zA-Z])"
    rf"| ?\^? ?(?:\{{ ?{ORDINAL} ?\}}|{ORDINAL_TEXT}|\{{ ?{ORDINAL_TEXT} ?\}}))"
)
# What only says that something was added up: 72\text{ in total}, 72 altogether.
IN_TOTAL = r"(?<=[0-9]) ?(?:\\text ?\{)? ?(?:in total|in all|total|altogether) ?\}?$"
# The name of a point before its coordinates: P(2,-1).
NAME_OF_POINT = r"^[A-Z] ?(?=(?:\\left ?)?\([^()]*,[^()]*\)$)"
# An empty set in words: \text{no solution}, \text{No real solutions}.
NO_SOLUTION = r"^(?:\\text ?\{)? ?[nN]o (?:real )?solutions? ?\}?$"
# Currencies whose signs have names: \pounds 12.
POUNDS = r"\\(?:pounds|textsterling)(?![a-zA-Z])"
EUROS = r"\\(?:text)?euro(?![a-zA-Z])"
YEN = r"\\(?:text)?yen(?![a-zA-Z])"
# A fraction of units: \frac{\text{km}}{\text{h}}.
UNIT_IN_FRACTION = r" ?\{\\(?:text|math)[a-z]* ?\{([^{}]*)\}\}"
FRACTION_OF_UNITS = rf"\\[dt]?frac{UNIT_IN_FRACTION}{UNIT_IN_FRACTION}"
# A text around all of an answer that holds a digit: \text{12 cm}, \mathbf{12}.
TEXT_AROUND_ALL = r"^\\(?:text|mbox|math|boldsymbol)[a-z]* ?\{([^{}]*[0-9][^{}]*)\}$"
# A letter in a font of its own: 2\mathrm{i}, 2\mathrm i, \mathbf{x}.
LETTER_IN_FONT = re.compile(
    r"\\(?:math[a-z]+|boldsymbol|bm)(?: ?\{ ?([A-Za-z]) ?\}| ([A-Za-z])(?![A-Za-z]))"
)
# An imaginary part that math-verify does not take for the one of 2i: 2 i, 2\,i, 2\cdot i.
SPACE_BEFORE_I = re.compile(rf"(?<=[0-9])(?:{GAP}|\\cdot(?![a-zA-Z]))+i(?![a-zA-Z])")
# The name of one of several solutions: the x_1 of x_1=3, x_2=-5.
NUMBERED_NAME = re.compile(r"\b([a-z])_(?:[0-9]|\{[0-9]\})")
# A function in a font of its own: \mathrm{cos}, \operatorname{ln}.
FUNCTION_IN_FONT = (
    r"\\(?:mathrm|text|operatorname) ?\{ ?((?:arc)?(?:sin|cos|tan)h?|cot|sec|csc|log|ln|exp) ?\}"
)
# What may surround an answer without being part of it: "$ 7 $", "\approx 7", "7.". Math-verify
# fails on a full stop in the box.
EDGES = (
    rf"^(?:{GAP}|[$≈]|\\(?:approx|displaystyle)(?![a-zA-Z]))+"  # at the beginning
    rf"|(?:{GAP}|(?<!\\)[$.])+$"  # at the end; \$ is a dollar sign and stays
    r"|\.(?= ?\}$)"  # at the end of a text: \text{C.}
)
# What is a space to a reader: "40  2", "40~2", "40\text{ }2", "40$2", "5'10". Math-verify fails on
# two spaces and drops the others, so that 5'10 would be 510.
SPACES = r"[\s~]+|\\text\s*\{\s*\}|(?<=[0-9])(?:\\?\$|['\"]+)(?=[0-9])"
# The name of a set before it: x \in (0,1), x \in \{1, 2\}, x \in \mathbb{R}.
NAME_OF_SET = r"^[a-zA-Z] ?\\in ?(?=(?:\\left ?)?(?:[(\[]|\\\{)|\\mathbb)"
# All real numbers: \mathbb{R}, \mathbb R \setminus \{3\}, \text{all real numbers}.
REALS = r"\\mathbb ?(?:\{ ?R ?\}|R)"
ALL_REALS = (
    rf"^(?:{REALS}(?=$| ?\\(?:setminus|backslash))"
    r"|(?:\\text ?\{ ?)?[aA]ll real(?:s| numbers| values of [a-z]) ?\}?$)"
)
# A set by its condition: \{x : x<3\}, \{x \in \mathbb{R} \mid x<3\}.
SET_BUILDER = (
    rf"^(?:\\left ?)?\\\{{ ?[a-z](?: ?\\in ?{REALS})? ?(?::|\\mid(?![a-zA-Z])|\|) ?"
    r"([^{}]*(?:[<>]|\\[lgn]e)[^{}]*?) ?(?:\\right ?)?\\\}$"
)
# The gap between two rows of a matrix: 1 \\\\[4pt] 2.
ROW_GAP = r"\\\\ ?\[ ?-?[0-9.]+ ?[a-z]{2} ?\]"
# What joins two answers: 4 \lor 7, 4 \text{ or } 7, 4 \text{ and } 7.
JOINING_WORD = r",? ?\\(?:(?:lor|vee)(?![a-zA-Z])|text ?\{ ?(?:and|or) ?\})"
# What joins two inequalities that must both hold: x>-2 \text{ and } x<5.
AND_OF_INEQUALITIES = r",? ?\\text ?\{ ?and ?\}(?=.*(?:[<>]|\\[lg]e))"
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


def as_power(raised: re.Match[str]) -> str:
    """Returns raised digits as a power: ^{-4} for ⁻⁴."""
    return "^{" + raised[0].translate(LOWERED) + "}"


def half_of_day(match: re.Match[str]) -> str:
    """Returns am or pm after a space."""
    return f" {match[1].lower()}m"


REWRITES: list[tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]]] = [
    (re.compile(f"[{RAISED}]+"), as_power),
    (re.compile(f"√{RADICAND}"), r"\\sqrt{\1}"),
    (re.compile(f"∛{RADICAND}"), r"\\sqrt[3]{\1}"),
    (re.compile(NAMED_SPACE), r"\\,"),
    (re.compile(r"\\degree(?![a-zA-Z])"), r"^\\circ "),
    (re.compile(EDGES), ""),
    (re.compile(SPACES), " "),
    (re.compile(TEXT_AROUND_ALL), r"\1"),
    (re.compile(ORDINAL_END), ""),
    (re.compile(IN_TOTAL), ""),
    (re.compile(NAME_OF_POINT), ""),
    (re.compile(NO_SOLUTION), r"\\emptyset"),
    (re.compile(ROW_GAP), r"\\\\ "),
    (re.compile(r"(?:\\left ?)?\\langle(?![a-zA-Z])"), "("),
    (re.compile(r"(?:\\right ?)?\\rangle(?![a-zA-Z])"), ")"),
    (re.compile(r"\\backslash(?= ?(?:\\left ?)?\\\{)"), r"\\setminus "),
    (re.compile(NAME_OF_SET), ""),
    (re.compile(ALL_REALS), r"(-\\infty,\\infty)"),
    (re.compile(SET_BUILDER), r"\1"),
    (re.compile(POUNDS), "£"),
    (re.compile(EUROS), "€"),
    (re.compile(YEN), "¥"),
    (re.compile(FUNCTION_IN_FONT), r"\\\1 "),
    (re.compile(FRACTION_OF_UNITS), r"\\text{ \1/\2}"),
    (re.compile(COLON), ":"),
    (re.compile(HALF_OF_DAY), half_of_day),
    (re.compile(LETTER_FOR_TIMES), r"\\times "),
    (re.compile(EXPONENT), r"\\cdot10^{\1}"),
    (re.compile(AND_OF_INEQUALITIES), r"\\land "),
    (re.compile(JOINING_WORD), ", "),
    (re.compile(LETTERS), r"\1"),
    (re.compile(r"\\varnothing"), r"\\emptyset"),
    (re.compile(THOUSANDS), digits_only),
    (re.compile(MIXED_FRACTION), r"\1\\frac{\2}{\3}"),
    (re.compile(BRACKETS_SIDE_BY_SIDE), r")\\cdot\1("),
    (re.compile(REPEATING_DECIMAL), many_decimals),
]


def tidy(text: str) -> str:
    """Returns an answer without what does not count, and with what math-verify misreads rewritten.

    So 7. becomes 7, and 2 1/2 becomes 2\\frac{1}{2}. The order of the rewrites matters.
    """
    if len(text) > MAX_CHARS or text.isdecimal():
        return text.strip()
    text = text.translate(CHARACTERS)
    for pattern, replacement in REWRITES:
        text = pattern.sub(replacement, text)
    return text


# ---- Pairs ---------------------------------------------------------------------------------------
Pair = tuple[str, str]  # (answer, gold answer), both tidy and without their units

# The formulas of a problem: $x^2$, \[x^2\], \(x^2\). Their length is limited, so that the time is
# linear.
FORMULA = re.compile(
    r"\$\$([^$]{1,500})\$\$|(?<!\\)\$([^$]{1,500})\$|\\\[(.{1,500}?)\\\]|\\\((.{1,500}?)\\\)"
    r"|\\begin\{align\*?\}(.{1,500}?)\\end\{",
    re.DOTALL,
)
# What is left to compute in an expression: + and ^, but not the sign of -3.
OPERATION = re.compile(
    r"(?<=.)[-+*/^]"
    r"|\\(?:frac|sqrt|binom|[lr]ceil|[lr]floor|log|ln|sec|csc|cot|(?:arc)?(?:sin|cos|tan))"
)
# What makes no difference between two ways of writing a formula: \left, \,, and a full stop.
INVISIBLE = re.compile(r"\\(?:left|right|displaystyle)(?![a-zA-Z])|\\[,;:! ]|[\s~]|[.,;?]$")
# The months, and how they are shortened: march, mar.
MONTHS = {name.lower() for name in (*calendar.month_name, *calendar.month_abbr) if name}
# An answer that cannot have a unit: 42, -1.5, (3,4), 1/2.
WITHOUT_WORDS = re.compile(r"[0-9 +\-*/.,:()\[\]]*")


def pairs_to_compare(box: str, gold: str, problem: str) -> list[Pair]:
    """Returns the pairs of which one must be equal for a box to be right, none if it is wrong.

    The problem may be "", where it is not known.
    """
    box = tidy(box)
    gold = tidy(gold)
    has_words = WITHOUT_WORDS.fullmatch(box) is None or WITHOUT_WORDS.fullmatch(gold) is None
    if box == gold or max(len(box), len(gold)) > MAX_CHARS:
        return [(box, gold)]
    box_date = date(box)
    gold_date = date(gold)
    if box_date and gold_date:
        return [(box_date, gold_date)]
    formulas = formulas_of(problem)
    if "=" not in gold:
        box = without_asked_side(box, formulas)
        if "," in box and not NUMBERED_NAME.search(problem):  # the problem's x_1 is not its x_2
            box = NUMBERED_NAME.sub(r"\1", box)
    pairs = [(box, gold)]
    if has_words:
        values = values_to_compare(box, gold, problem)
        pairs = [(in_one_font(given), in_one_font(right)) for given, right in values]
    return [pair for pair in pairs if not is_copied(*pair, formulas)]


@functools.lru_cache(maxsize=512)  # one problem meets a whole group of boxes
def formulas_of(problem: str) -> frozenset[str]:
    """Returns the formulas of a problem, each in one way of writing."""
    found = set()
    for groups in FORMULA.findall(problem):
        for formula in filter(None, groups):
            found.add(in_one_writing(tidy(formula)))
    return frozenset(found)


def in_one_writing(formula: str) -> str:
    """Returns a formula without spaces and sizes, and 1/2 and \\dfrac{1}{2} as \\frac12."""
    formula = INVISIBLE.sub("", formula)
    formula = re.sub(r"\\[dt](frac|binom)", r"\\\1", formula)
    formula = re.sub(r"(\d+)/(\d+)", r"\\frac{\1}{\2}", formula)
    return re.sub(r"\{(\w)\}", r"\1", formula)


def without_asked_side(box: str, formulas: frozenset[str]) -> str:
    """Returns the 17 of m+n = 17, where m+n is a formula of the problem, or the box as it is."""
    first_side, equals, rest = box.partition("=")
    is_asked = in_one_writing(first_side) in formulas
    return rest.strip() if equals and is_asked else box


def is_copied(box: str, gold: str, formulas: frozenset[str]) -> bool:
    """Returns whether a box only repeats a formula of the problem, which is left to compute.

    Its value may be right: 99^2+99+1 is 9901. A formula that is the gold answer is no copy.
    """
    formula = in_one_writing(box)
    if formula not in formulas or formula == in_one_writing(gold):
        return False
    return OPERATION.search(formula) is not None


def date(text: str) -> str:
    r"""Returns the parts of a date in one order, as "14 mar" for \text{March }14, or "" if none."""
    words = re.findall(r"[a-z0-9]+", re.sub(COMMAND, "", text).lower())
    words = [word for word in words if word not in ("the", "of")]
    months = [word for word in words if word in MONTHS]
    if len(months) != 1:
        return ""
    numbers = [word for word in words if word.isdecimal()]
    if not numbers or len(numbers) + 1 != len(words):
        return ""
    return " ".join([*sorted(numbers), months[0][:3]])


def in_one_font(text: str) -> str:
    """Returns an answer with its single letters in the usual font, and 2 i as 2i."""
    text = LETTER_IN_FONT.sub(r" \1\2", text).strip()
    return SPACE_BEFORE_I.sub("i", text)


# ---- Verdicts that take no evaluation ------------------------------------------------------------
INTEGER = re.compile(r"[+-]?[0-9]{1,30}")  # in ASCII digits: 42, -7, +7, 007
# The command of words in LaTeX: \text{, \textbf{.
COMMAND = r"\\(?:text|mbox|mathrm|operatorname)[a-z]* ?\{"
# An answer of words: \text{no solution}, Even, \textbf{(C)}.
WORDS = re.compile(rf"(?:{COMMAND}|[A-Za-z .,'()}}-])+")
# A ratio or a time: 3:2, 10:30 am, and 5 pm, which is compared with 5:00 pm.
RATIO = re.compile(r"([0-9]+(?::[0-9]+)*)( [ap]m)?")
NUMBER_IN_A_BASE = re.compile(r"\b[0-9][0-9A-Z]*\s*_([^_]*)$")  # 101_2, 4A_{16}, 11_{(2)}


def quick_verdict(box: str, gold: str) -> float | None:
    """Returns 1.0 (equal) or 0.0 where that takes no evaluation, else None. Both must be tidy."""
    if box == "":
        return 0.0
    if box == gold:
        return 1.0
    if max(len(box), len(gold)) > MAX_CHARS or says_more(box, gold):
        return 0.0
    if is_words(box) and is_words(gold):
        return float(words_alone(box) == words_alone(gold))
    if ":" in box + gold and RATIO.fullmatch(box) and RATIO.fullmatch(gold):
        return float(is_same_ratio(box, gold))
    if INTEGER.fullmatch(box) and INTEGER.fullmatch(gold):
        return float(int(box) == int(gold))
    return None


def is_words(text: str) -> bool:
    r"""Returns whether an answer is words, as Even or \text{no solution}, and no formula, as p - q.

    A single letter may be a variable or a choice, except the article of "a circle".
    """
    if WORDS.fullmatch(text) is None or text.startswith("-"):
        return False
    words = words_alone(text)
    return words != [] and all(len(word) > 1 for word in words)


def words_alone(text: str) -> list[str]:
    """Returns the stems of the words of an answer that is no formula, without articles."""
    words = re.findall(r"[a-z0-9]+", re.sub(COMMAND, "", text).lower())
    return [stem(word) for word in words if word not in ("a", "an", "the")]


def is_same_ratio(box: str, gold: str) -> bool:
    """Returns whether two ratios or times have the same numbers, and the same am or pm, if any.

    A box may add am or pm to the gold answer, and zeros: 07:05, 5:00.
    """
    box_numbers, _, box_half = box.partition(" ")
    gold_numbers, _, gold_half = gold.partition(" ")
    box_parts = [int(part) for part in box_numbers.removesuffix(":00").split(":")]
    gold_parts = [int(part) for part in gold_numbers.removesuffix(":00").split(":")]
    return box_parts == gold_parts and gold_half in ("", box_half)


def says_more(box: str, gold: str) -> bool:
    r"""Returns whether the box has something that changes its value, but that math-verify drops.

    That is the modulus of 4 \mod 5, the prime of 30', the braces of the set \{1, 2\} where the gold
    answer is the pair (1, 2), or the number base of 101_2. The problem often names the base, so a
    gold answer with a base may be given without it, but a box must not name another one.
    """
    adds_modulus = "mod" in box and "mod" not in gold
    box_set = re.sub(r"\\setminus ?\\\{.*?\\\}", "", box)  # the braces of (0,4)\setminus\{2\} stay
    adds_braces = "\\{" in box_set and "\\{" not in gold and gold.endswith(")")
    box_base = number_base(box)
    adds_base = box_base is not None and box_base != (number_base(gold) or "10")
    adds_prime = re.search(r"[0-9]'", box) is not None and "'" not in gold
    return adds_modulus or adds_braces or adds_base or adds_prime


def number_base(text: str) -> str | None:
    """Returns the digits of the base that a number ends in, as "16" of 4A_{16}, or None."""
    number = NUMBER_IN_A_BASE.search(text)
    if number is None:
        return None
    return re.sub("[^0-9]", "", number[1])
