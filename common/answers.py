r"""Is a final answer right? Rules on its text.

`settle` decides most answers by their text: equal texts, numbers, words and units. The rest become
pairs for math-verify, which answer_worker.py asks.
"""

# ruff: noqa: RUF001, RUF002  (characters that look like others are what `CHARACTERS` is about)

from __future__ import annotations

import functools
import math
import re
import unicodedata
from fractions import Fraction
from operator import itemgetter
from typing import NamedTuple

MAX_CHARS = 500  # a longer answer is compared as a text only; MATH-500's longest has 53


# ---- Boxes ---------------------------------------------------------------------------------------
BOX_OR_BRACE = re.compile(r"(?P<box>\\\\?boxed\s*\{)|\\.|(?P<open>\{)|(?P<close>\})", re.DOTALL)
# Where thinking begins and ends, by the marks of several families of models
THINKING = re.compile(
    r"(?P<end>\[/think\]|[<◁]\|?(?:/|end_of_)(?:seed:)?(?:think(?:ing)?|thought|reasoning)\|?[>▷]"
    r"|<\|end\|>|<\|channel\|>final|<channel\|>)"
    r"|\[think\]|[<◁]\|?(?:begin_of_|seed:)?(?:think(?:ing)?|thought|reasoning)\|?[>▷]"
    r"|<\|channel\|?>(?:analysis|thought)",
    re.IGNORECASE,
)
# What may stand between two boxes of one list: `}$ or $x = \\boxed`. `(?<! )` keeps a long run of
# blanks from being split in every way.
JOINT = re.compile(
    r"(?=[^=]*(?:[,;]|and|or|\\lor))(?:[\s$,;~*]|\\[,;:! ()\[\]]|\\q?quad|\\lor\b|\band\b|\bor\b"
    r"|\\(?:text|mbox)[a-z]* ?\{[ ,]*(?:and|or) *\})*"
    r"(?:(?:\\[a-z]+ ?)?[a-zA-Z]{0,2}'?(?:_\{?\w+\}?)?(?:\([^()]*\))?(?<! ) *= *)?"
)


def box_spans(text: str) -> list[tuple[int, int, int]]:
    r"""Returns where each complete \boxed{...} starts, and where its content begins and ends.

    They are in the order in which their contents begin. Thinking that never ends has no box.
    """
    marks = list(THINKING.finditer(text))
    last_end = max([mark.start() for mark in marks if mark["end"]], default=-1)
    cut = min([mark.start() for mark in marks if mark.start() > last_end], default=None)
    spans = []
    opened: list[tuple[int, int]] = []  # the groups that are open; -1 for one that is no box
    for token in BOX_OR_BRACE.finditer(text[:cut]):
        if token["box"] or token["open"]:
            opened.append((token.start() if token["box"] else -1, token.end()))
        elif token["close"] and opened:
            start, begin = opened.pop()
            if start >= 0:
                spans.append((start, begin, token.start()))
    return sorted(spans, key=itemgetter(1))


def boxed_span(text: str) -> tuple[int, int] | None:
    r"""Returns where the content of the last complete \boxed{...} begins and ends, or None."""
    return next((span[1:] for span in reversed(box_spans(text))), None)


def last_boxed(text: str) -> str | None:
    r"""Returns the content of the last complete \boxed{...}, or None.

    Boxes that a comma, "and" or "or" joins to it form one list with it. A number that is written in
    two ways counts once.
    """
    spans = box_spans(text)
    first = len(spans) - 1  # of the list
    while first > 0 and JOINT.fullmatch(text, spans[first - 1][2] + 1, spans[first][0]):
        first -= 1
    contents = [text[begin:end] for _, begin, end in spans[first:]]
    distinct = {number(tidy(content[:MAX_CHARS])) or content: content for content in contents}
    return ", ".join(distinct.values()) if spans else None


# ---- One way of writing --------------------------------------------------------------------------
CHARACTERS = str.maketrans(
    {
        "×": r"\times ", "·": r"\cdot ", "⋅": r"\cdot ", "π": r"\pi ", "∞": r"\infty ",
        "≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ", "±": r"\pm ", "∪": r"\cup ", "∈": r"\in ",
        "∅": r"\emptyset ", "°": r"^\circ ", "~": " ", "。": ".", "⁄": "/", "÷": r"\div ", "`": "",
    }
    | {raised: f"^{digit}" for digit, raised in enumerate("⁰¹²³⁴⁵⁶⁷⁸⁹")}
    | {lowered: f"_{digit}" for digit, lowered in enumerate("₀₁₂₃₄₅₆₇₈₉")}
)  # fmt: skip


def plain_characters(text: str) -> str:
    """Returns a text with one character where Unicode has many: ７ and ٧ are 7, – and − are -."""
    text = re.sub(r"(?=[¼½¾⅐-⅞])", " ", text).translate(CHARACTERS)
    text = re.sub("[‐-―⸺⸻−]", "-", unicodedata.normalize("NFKC", text)).translate(CHARACTERS)
    return "".join(
        str(int(sign)) if sign.isdecimal() else sign
        for sign in text
        if unicodedata.category(sign) != "Cf"  # such as a space of no width
    )


# A problem in which the order of an answer's parts matters
IN_ORDER = (
    r"(?i)(?<!any )(?<!-)(?<!regardless of )\border(?!ed| to| does)"
    r"|\b(?:sort|arrange|rank|respectively)\b|est to (?:the )?\w+est\b"
    r"|(?:first|next) \w+ terms| as [a-z], ?[a-z]\b"
    r"|(?:find|values? of|are) \$?[a-z]\$?(?:,| and) \$?[a-z]\b"
)
# A problem whose answer is a point, and no interval
POINT = (
    r"(?s)^(?!.*(?:interval|[<>]|\\[lg]e))"
    r".*(?:pair|triple|coordinates|vertex|(?:what|which|the) point\b)"
)
LETTER = "[mgshlLWVJN]"  # that is a unit
UNIT = (
    rf"(?:[kcmμnMG]?(?:{LETTER}|[AB]|Hz|Pa|eV|mol|cal|bps|Wh)|min|hr|mph|kph|degree ?[CF]?)"
    r"(?:\^\{?[23]\}?)?"
)
# What is replaced by what; at some rows only if the problem has what the third pattern finds.
REWRITES = [(re.compile(text), by, list(map(re.compile, where))) for text, by, *where in [
    (r"(?<![\w)\]}*])(\*{1,3}|__)(?=\S)(.*?)\1", r"\2"),  # bold in Markdown
    (r"(?<=[\w)\]}]) ?\*\* ?(-?\w+|\([^()]*\))", r"^{\1}"),  # x**2
    (r"([\^_])(\d)\1(\d)(?:\1(\d))?", r"\1{\2\3\4}"),  # x¹⁰
    (r"-\^(\d|\{\d+\})", r"^{-\1}"),  # 10⁻³
    (r"(?<![\\a-zA-Z])(pi|sqrt|exp|ln|log|(?:arc)?(?:sin|cos|tan))(?![a-zA-Z])", r"\\\1 "),
    (r"(?:√|\\sqrt(?= ?\()) ?(?:\(([^()]*)\)|(\d+|[a-z]))", r"\\sqrt{\1\2}"),
    # 1,000 1{,}000 1\,000, but neither (1,000) nor 1, 000
    (r"(?<=\d)(?:,| |\{,\}|,?\\[!,;: ] ?|\\thinspace *)(?=\d{3}(?!\d))"
     r"(?![^(\[]*(?:[)\]]|\\\}))", ""),
    (r"(?<=\d)[eE]\+?(-?\d{1,3})(?![\w.^])", r" \\times 10^{\1}"),  # 1e5
    (r"\\\\ ?\[[^\]]*\]", r"\\\\"),  # the gap between two rows: \\[4pt]
    (r"(\\\$|[€£¢]|(?<!\\)\$(?=\d[^$]*$))(?:\\[,!])? ?((?:[.,]?\d)+|\\frac\{[^{}]*\}\{[^{}]*\})",
     r"\2\\text{ \\\1 }"),  # $5
    (r"\\(?:left|right|displaystyle|bf|large|q?quad)(?![a-zA-Z])"
     r"|(?<!\\)(?:\\[!,;: ()\[\]]|\$)|\s+", " "),
    (r"^ ?(?:\{((?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*)\}|\(([^(),]*)\) ?$)", r"\1\2"),  # {5} (5)
    (r"\\[cdt](frac|binom)", r"\\\1"),
    (r"\\frac *(\d) *(\d)", r"\\frac{\1}{\2}"),
    (r"(?<![\d.}^_√])(?<!\^-)(?<!\\sqrt)(?<!\\sqrt )(\d+) ?(?:/|\\div) ?(-?\d+)(?!\.?\d)",
     r"\\frac{\1}{\2}"),
    (r"(?<=[\da-z}])(?<!matrix\})\^ ?(?:T|\{T\})", "^{(T)}"),  # only a matrix is transposed
    (r"(?:\\(?:small)?setminus|\\backslash|-) ?(?=\\\{)", r"\\setminus "),
    (r"(?:\\mathbb ?\{? ?|^ ?)R ?\}? ?(?=\\setminus)|\\mathbb ?(?:\{R\}|R)$"
     r"|^(?:\\text ?\{)? ?[aA]ll reals?(?: numbers?)? ?\}?$", r"(-\\infty,\\infty)"),
    (r"\\(?:varnothing|\{ ?\\\})|(?:\\text ?\{)? ?[nN]o (?:real )?solutions? ?\}?$", r"\\emptyset"),
    (r" ?\^? ?(?:\\degree(?![a-z])|\{? ?\\circ ?\}?)(?: ?([CF])\b)?", r" degree \1"),
    (r"\\?%", " percent "),
    (r"\b([apAP])\.? ?[mM]\b\.?", r"\1m"),  # 4:30 p.m.
    (r"(\.\d*) ?\\overline ?\{(\d{1,6})\}", r"\1" + 60 * r"\2"),
    (r"\\text ?\{ ?and ?\}(?=.*(?:[<>]|\\[lg]e))", r"\\land "),  # math-verify does not read it
    (r",? ?(?:\\(?:lor|vee)(?![a-z])|\\(?:text|mbox) ?\{ ?(?:or|and) ?\}|\b(?:or|and)\b)", ","),
    (r"\{([,:])\}|\\\{ ?[a-z](?: ?\\in ?\\mathbb ?\{?R\}?)? ?(?::|\\mid|\|)([^{}]*)\\\}",
     r"\1\2"),  # 3{:}45, \{x : x > 2\}
    (r"(?<=\d)(?: ?\^)?(?: ?\{)?(?: ?\\(?:text|math)[a-z]* ?\{)? ?(?:st|nd|rd|th)\b(?: ?\}){0,2}"
     r"|^ ?[a-zA-Z] ?\\in ?(?=[(\[\\])|^[A-Z] ?(?=\([^()]*,[^()]*\)$)|(?<!\d)0(?=\d:\d)",
     ""),  # 5th, x \in (1,2), P(2,-1), 07:45
    (r"(?i)^ ?(\\text[a-z]* ?\{)? ?(?:(?:the |final |correct )*answer(?: is)?|option|choice)\b:?",
     r"\1"),  # \text{The answer is } 5
    (r"(?<![\d}])(?<![\d}] )\\(?:math|text|bold)[a-z]* ?\{ ?([^\WmghsLCF_]) ?\}"
     r"|\\(?:math|text|bold)[a-z]* ?\{ ?([a-fijknp-rt-zABER]) ?\}", r" \1\2 "),  # 2\mathrm{i}
    (r"(?<![\\a-zA-Z])([a-zA-Z]{3,}) ?:( ?\}?)", r"\1\2="),  # Total: 5
    (r"^([-\d.].*|\\(?:sqrt|frac)\{-?\d.*)=([^=\d]*[a-zA-Z][^=]*)$", r"\2=\1"),  # 5 = x
    (rf"^([-+\d.,]+) (?![a-zA-Z](?:\^|$))({UNIT}(?:/{UNIT})*)$", r"\1\\text{ \2}"),  # 5 m/s
    # 5 m, but not where the letter is a variable: not after a number, or in a formula
    (rf"^([-+\d.,]+) ({LETTER}(?:\^\{{?[23]\}}?)?)$", r"\1\\text{ \2}",
     rf"(?s)^(?!.*(?:(?<![\w\\'’/])(?<!\d )(?<!\d-)(?<!in ){LETTER}(?!\w)(?! ?/)"
     rf"|(?:[+*=^{{$]|(?<!\d)-) ?\d+ ?{LETTER}(?!\w)(?! ?/)|(?<![\\a-zA-Z]){LETTER} ?[-+*=]))"),
    (r"(\\(?:log|ln|sin|cos|tan)(?:_\w|_\{\w+\})?) ?(\w+|\{\w+\}) ?(?=\\(?:cdot|times))",
     r"\1(\2)"),  # \ln 2 \cdot x
    (r"(?<=[a-zA-Z])'(?![a-zA-Z])", "_{p}"),  # math-verify takes f'(x) for f(x)
    (r"(?:(\\sqrt ?\{[^{}]*\})|(?<=[\d}]))(?: |\\cdot)*i(?![a-z])", r"i\1"),
    (r"(\\(?:text|mbox|math)[a-z]* ?\{[^{}]*)\} ?\^ ?(?:([23])|\{([23])\})",
     r"\1^\2\3}"),  # \text{cm}^2
    (r"^(?:\\text ?\{)? ?\(?([a-e])\)? ?\}?$", r"\\choice \1",  # (c), among (A), (B), (C)
     r"(?s)\b[aA] ?\}?[).:].*\b[bB] ?\}?[).:]"),
    (r"\+ ?[cCkK]$", "+ C", r"\\int|∫|(?i:integra|antiderivative|differential eq)"),  # 2x+c
    (r"^([^:]+?) ?(?::|\\text ?\{ ?to ?\}|\bto\b) ?([^:]+)$", r"\\frac{\1}{\2}",
     r"(?i)\b(?:ratios?|odds|scale)\b"),  # 5:3
    ("[<>]", ",", IN_ORDER),  # 1 < 2 < 3
    (r"(?<=[\d}]) *\\approx.*|^[ =]*(?:\\approx)? *|[ .,]+$|\.(?= ?\}$)|\\text[a-z]* ?\{ ?\}", ""),
]]  # fmt: skip


@functools.lru_cache(maxsize=4096)  # a group often gives the same answer
def tidy(text: str, problem: str = "") -> str:
    """Returns an answer in one of the many ways to write it: 1/2 as a fraction, 1,000 as 1000.

    A problem decides more: whether m is a unit, 5:3 a fraction, and the c of 2x + c a constant.
    """
    text = plain_characters(text)
    for pattern, replacement, problems in REWRITES:
        if not problems or (pattern.search(text) and problems[0].search(problem)):
            text = pattern.sub(replacement, text)
    return text.strip()


@functools.lru_cache(maxsize=4096)
def spelling(formula: str) -> str:
    """Returns the signs of a formula with a space around each: x^{2}+1 is x ^ 2 + 1."""
    formula = re.sub(r"\\text ?\{([^{}]*)\}|\{(\w)\}", r" \1\2 ", formula)
    return " ".join(["", *re.findall(r"\\[a-zA-Z]+|\d+|\S", formula), ""])


@functools.lru_cache(maxsize=512)  # one problem meets a whole group of boxes
def loose(formula: str) -> str:
    """Returns a formula's signs without those of products and fractions: copies differ in these."""
    return re.sub(r"(?:\\(?:frac|cdot|times|div)|[{}()/]) ", "", spelling(tidy(formula)))


# ---- Words and units -----------------------------------------------------------------------------
UNITS = """
    mm millimeter, cm centimeter centimetre, m meter metre, km kilometer kilometre, inch in,
    foot feet ft, yard yd, mile mi, ml milliliter, liter litre l, gallon gal, cup, g gram,
    kg kilogram, pound lb £, ounce oz, second s sec, minute min, hour h hr, day, week, month,
    year yr, dollar $ usd, cent ¢, euro €, degree, radian rad, celsius c, fahrenheit f, unit,
    square ^2 sq, cubic ^3 cu, percent percentage, half halves, kilowatt kw, kilowatt_hour kwh,
    mile_hour mph, km_hour kph kmh
"""
SCALES = {
    "percent": Fraction(1, 100), "dozen": Fraction(12), "hundred": Fraction(100),
    "thousand": Fraction(1000), "million": Fraction(10**6), "billion": Fraction(10**9),
    "trillion": Fraction(10**12), "half": Fraction(1, 2), "third": Fraction(1, 3),
    "quarter": Fraction(1, 4), "fourth": Fraction(1, 4), "tenth": Fraction(1, 10),
    "hundredth": Fraction(1, 100), "pair": Fraction(2),
}  # fmt: skip
NO_NOUNS = {  # stems of words that change the value before them
    "squared", "cubed", "factorial", "not", "no", "doubled", "tripled", "twic", "plu", "minu",
    "negativ", "below",
}  # fmt: skip
# A word, written as ~, that stands before a value: half of 8, or 8 minus x; but not 8 cm + x.
BEFORE = re.compile(r"(?:^|[-+*/^(\[{<>=,;])[ ~]*~ *[^ =,;~)]|~ *[^-+*/^<>=,;~)\]}. ]")
TEXT = re.compile(r"\\(?:text|mbox|math|operatorname)[a-z]* ?\{([^{}]*)\}")
WORD_IN_TEXT = re.compile(r"['\"(]*[a-zA-Zμ]+['\").!?]*|\\*[$€£¢]|\^[23]")
WORD = re.compile(
    r"\\\$|[€£¢]|(?<![\\a-zA-Z_{])(?:(?<!\d)(?:[a-zA-Z][a-z]{2,}|[A-Z]{3,}(?! ?=)|[nN]o|NO)"
    r"|(?:[ckm]m|[aApP]m|in|ft|yd|mi|ml|kg|lb|oz|hr)(?:\^[23])?)(?![a-zA-Z])"
)
# What a problem asks for: how many square feet, in miles per hour, what percent. Not asked for are
# "in a year", "in 2" and "8 percent".
ASKED = re.compile(
    r"\b(?:how many|number of) ((?:(?!in\b)[a-z]+ ?){1,3})"
    r"|\bin ((?:square |cubic )?[a-z]+(?: per [a-z]+)?)"
    r"|(?:^|[^\d\s\\]|[^\d\s]\s)\\?(percent)",
    re.IGNORECASE,
)


def stem(word: str) -> str:
    """Returns what the singular and the plural of a word have in common.

    That is more than one letter, so that "his" is not an hour.
    """
    word = word.lower().strip("\\'\"().!?")
    return word.rstrip("s").rstrip("eiy") if len(word.rstrip("eisy")) > 1 else word


UNIT_NAMES = {  # by the stem of each spelling
    stem(spelling): entry.split()[0] for entry in UNITS.split(",") for spelling in entry.split()
}
ALL_UNITS = set(UNIT_NAMES.values()) - set(SCALES)
UNNAMED_UNITS = {"unit", "square", "cubic"}  # these need not stand in the problem


def names(words: list[str]) -> set[str]:
    """Returns the names of units and scales among words, and the stems of the others."""
    spoken = " ".join(words).lower().replace("^", " ^").split()
    stems = map(stem, set(spoken) - {"a", "an", "the", "of", "per", "each"})
    return set(" ".join(UNIT_NAMES.get(word, word) for word in stems).replace("_", " ").split())


@functools.lru_cache(maxsize=512)  # one problem meets a whole group of boxes
def words_of(problem: str) -> tuple[set[str], set[str]]:
    """Returns the names of the words in a problem, and of the units and scales that it asks for."""
    known = names(re.findall(r"(?<!['’a-zA-Z])(?!in\b)[a-zA-Z]+|\$", problem))
    asked = ASKED.findall(re.sub(r"%|\b(?:rate|odds|chance)", "percent", problem))
    return known - NO_NOUNS | UNNAMED_UNITS, names([" ".join(kinds) for kinds in asked])


def have_right_words(given: set[str], right: set[str], problem: str) -> bool:
    """Returns whether the words of an answer are those of the gold answer, or of the problem."""
    units = given & ALL_UNITS
    if right:
        return right & {"am", "pm"} <= given <= right and units in (set(), right & ALL_UNITS)
    known, asked = words_of(problem)
    if known & ALL_UNITS <= UNNAMED_UNITS:
        known = known | ALL_UNITS  # the problem names no unit
    # Many problems about money name hours alone. Where they name cents, $75 is not 75.
    return given <= known | ({"dollar"} if not known & {"cent", "euro"} else set()) and not (
        units and asked & ALL_UNITS and not units & asked
    )


# ---- Parts ---------------------------------------------------------------------------------------
NUMBER = re.compile(
    r"(?P<sign>[-+]?) ?(?P<whole>\d+\.?\d*|\.\d+)?(?:\^ ?\{?(?P<power>-?\d{1,3})\}?)?"
    r"(?: ?\\frac ?\{ ?(?P<top>-?[\d.]+) ?\} ?\{ ?(?P<bottom>-?[\d.]+) ?\})?"
    r"(?: ?(?:\\times|\\cdot|\*|x) ?10\^ ?\{?(?P<exponent>-?\d{1,3})\}?)?",
    re.ASCII,
)
# With what it is a name of: the (-2) of f(-2), the ^{-1} of f^{-1}(2), the _{10} of S_{10}.
NAME = re.compile(
    r"(?:(?!\\(?:frac|sqrt|cdot|times|div|pm|ne))[a-zA-Z\\| {}~]|\([^()]*\)|_\w|_\{[^{}]*\}"
    r"|\^ ?\{-1\})*"
)
# What does not tell names apart: \angle ABC and ABC, x_1 and x.
FRILLS = re.compile(r"_\d|_\{\d+\}|m?\\(?:angle|over[a-z]+|vec|mathbf|text)(?![a-z])|[{}| \\]")
EQUALS = re.compile(r"(?<![<>!])=(?![^{}]*\}\s*\^)")  # not that of \sum_{n=1}^5
# A factor of a product, and its power
FACTOR = re.compile(r"(?:\([^()]*[a-zA-Z][^()]*\)|(?<![\\a-zA-Z])[a-zA-Z])(?:\^ ?\{?(\d+)\}?)?")
OPERATION = re.compile(r"(?<=.)[-+*/^<>]|%|\\(?:frac|sqrt|binom|log|ln|sin|cos|tan|times)")
# A choice: C, (C), \text{(C)}, or with its value \text{(C) } 20, C) 20, C: 20; but no second one.
GAP = r"(?:\W|\\(?:text|math)[a-z]*)*"
CHOICE = re.compile(
    r"(?:\\(?:text|math)[a-z]* ?\{)? ?"
    rf"(?![^A-Z]*[A-Z](?:{GAP}|.*(?:[,;/|\[(]|\b(?:or|and)\b){GAP}|.*\d *(?=[A-E]\b))[A-HJ-Z]\b)"
    r"(?![^A-Z]*[A-Z].*\b[A-Z][).:])"
    r"(?:\(([A-Z])\).*|([A-Z]) ?(?:\}?|[:).](?: .*)?)|\\choice ([a-e]))"
)
COMMA = re.compile(r"[,;](?![^(\[]*[)\]]|(?:(?!\\\{).)*\\\})")  # but not that of (1, 2), \{1, 2\}
# As in 1302_5. With \d++ the digits of a base cannot become those of the next number.
IN_A_BASE = re.compile(r"(?:\(?[0-9A-Z]+\)? ?_ ?\{?\(?\d++\)?\}?(?:, )?)+")


class Part(NamedTuple):
    """A part of an answer: x = 2 + 3 = 5 cm is the value 5 with the name x and the word cm."""

    label: str  # the name or, without one, ~ and the words
    value: str
    words: list[str]
    pairs: list[tuple[str, str]]  # each other side of an equation, and the value that it must equal


@functools.lru_cache(maxsize=4096)
def number(text: str) -> Fraction | None:
    r"""Returns a number: 12, -1.5, \frac{1}{2}, 2 \frac{1}{2}, 2^{10} or 3 \times 10^5."""
    match = NUMBER.fullmatch(text)
    if match is None or (match["whole"] is None and match["top"] is None):
        return None
    try:
        size = Fraction(match["whole"] or 0) ** int(match["power"] or 1)
        size += Fraction(match["top"] or 0) / Fraction(match["bottom"] or 1)
        size *= Fraction(10) ** int(match["exponent"] or 0)
    except (ValueError, ZeroDivisionError):
        return None
    return -size if match["sign"] == "-" else size


def marked(text: str) -> str:
    """Returns an answer with each word as ~word~: a unit's name or a stem, or ~~ if it links."""
    pieces = [
        (WORD_IN_TEXT if place % 2 == 1 else WORD).sub(
            lambda word: f"~{' '.join(names([word[0]]))}~", piece
        )
        for place, piece in enumerate(TEXT.split(text))  # every second piece was in \text{...}
    ]
    per_unit = r"\\frac ?\{ *(~[^{}]*~) *\} ?\{ *(~[^{}]*~) *\}|(?<=~)-(?=~)"  # km over h
    text = re.sub(per_unit, r"\1\2", "".join(pieces))
    return re.sub(r"(\d *(?:~[^~]*~ *)+)(?=\d)", r"\1, ", text)  # 3 feet 5 inches


@functools.lru_cache(maxsize=512)  # one gold answer meets a whole group of boxes
def read(text: str, problem: str) -> list[Part]:
    r"""Returns the parts of a list or set: those of 1, 2 and of \{1, 2\}, and two of 3 \pm 1."""
    parts = []
    pieces = COMMA.split(re.sub(r"^\\\{((?:(?!\\\}).)*)\\\}$", r"\1", marked(text)))
    pieces += [piece.replace("\\pm", "-") for piece in pieces if "\\pm" in piece]
    for piece in pieces:
        sides = [side.strip() for side in EQUALS.split(piece.replace("\\pm", "+"))]
        is_named = len(sides) > 1 and (
            NAME.fullmatch(sides[0])
            or spelling(sides[0].replace("~", " ")) in spelling(tidy(problem))
        )
        label = FRILLS.sub("", sides[0]) if is_named else ""
        if is_named:
            sides = [side for side in sides[1:-1] if number(side) is not None] + sides[-1:]
        words = " ".join(re.findall("~([^~]*)~", " ".join(sides))).split()
        sides = [re.sub("~[^~]*~", "~", side) for side in sides]
        words += ["~" for side in sides if BEFORE.search(side)]
        *others, value = [re.sub(r"\( *~ *\)|~", " ", side).strip().rstrip(" /.") for side in sides]
        text = " ".join(sorted(set(words)))
        parts.append(
            Part(
                label=label or (value and text and f"~{text}"),
                value=value or f"\\text{{{text}}}",
                words=words,
                pairs=[(side, value) for side in others],
            )
        )
    return parts


def are_labelled(parts: list[Part]) -> bool:
    """Returns whether each part of a list has a name, or words, of its own."""
    return len({part.label for part in parts} - {""}) == len(parts) > 1


def factors(formula: str) -> int:
    """Returns how many factors a product has, and 0 for a sum: 3 for 2x(x - 1)^2."""
    is_sum = re.search(".[-+]", FACTOR.sub("f", formula))
    return 0 if is_sum else sum(int(power or 1) for power in FACTOR.findall(formula))


def is_finished(value: str, gold: str, problem: str) -> bool:
    """Returns whether a value is no copy of the problem, and is factored or expanded if asked.

    A plain number is a copy only where the problem asks for another form of it.
    """
    is_formula = OPERATION.search(value) or (
        OPERATION.search(gold)
        and (
            number(gold) is None
            or re.search(
                "(?i)fraction|express|writ|convert|mixed|notation|power|form|simpl|reduc|lowest"
                "|factor|exponent|decimal|signif",
                problem,
            )
        )
    )
    is_copy = (
        is_formula
        and spelling(value) != spelling(gold)
        # A drawing of the problem is full of numbers.
        and loose(value) in loose(re.sub(r"(?s)\[asy\].*?\[/asy\]", "", problem))
    )
    return not (
        is_copy
        or re.search(r"(?<!_)\d +\d", value)
        or ("actor" in problem and factors(value) < factors(gold))
        or ("xpand" in problem and factors(value) > factors(gold))
    )


def compare(
    found: list[str], wanted: list[str], scale: Fraction, is_in_order: bool
) -> list[tuple[str, str]] | None:
    """Returns the pairs that must be equal if values are right, or None if they are wrong."""
    in_turn = list if is_in_order else sorted
    if scale == 1 and in_turn(map(spelling, found)) == in_turn(map(spelling, wanted)):
        return []
    value, right_value = [", ".join(values) for values in (found, wanted)]
    if IN_A_BASE.fullmatch(value) or IN_A_BASE.fullmatch(right_value):
        digits, right_digits = [re.sub("[{}() ]", "", text) for text in (value, right_value)]
        forms = {right_digits, re.sub(r"_\d+", "", right_digits), right_digits + "_10"}
        return [] if digits in forms else None
    is_whole = len(found) == len(wanted)
    sizes, right_sizes = [
        [size for size in map(number, values) if size is not None] for values in (found, wanted)
    ]
    if len(right_sizes) == len(wanted) and (
        len(sizes) == len(found) or not re.match(r"-?\d+ ?\^", wanted[0])
    ):
        # Each is computed. Nearly equal is enough, because a repeating decimal ends somewhere.
        is_right = len(sizes) == len(found) == len(wanted) and all(
            10**12 * abs(size * scale - right_size) <= min(Fraction(1), abs(right_size))
            for size, right_size in zip(in_turn(sizes), in_turn(right_sizes), strict=True)
        )
        return [] if is_right else None
    both = value + right_value
    if scale != 1 or ":" in both or not (is_whole or re.search(r"[<>]|\\[lgn]eq?(?![a-z])", both)):
        return None
    return (
        list(zip(found, wanted, strict=True))
        if is_in_order and is_whole
        else [(value, right_value)]
    )


def settle(box: str, gold: str, problem: str) -> bool | list[tuple[str, str]]:
    """Returns whether an answer is right, or the pairs that must all be equal if it is."""
    if box == gold or max(len(box), len(gold)) > MAX_CHARS:
        return box == gold != ""
    box, gold = [tidy(text, problem) for text in (box, gold)]
    if spelling(box) == spelling(gold):
        return True
    choices = [CHOICE.fullmatch(text) for text in (box, gold)]
    if all(choices):
        return len({(match[1] or match[2] or match[3]).upper() for match in choices if match}) == 1

    given = read(box, problem)
    right = read(gold, "")
    if "=" in gold and any(
        part.pairs or re.search(r"(?<![\\a-zA-Z])[a-zA-Z]", part.value) for part in right
    ):
        return is_finished(box, gold, problem) and [(box, gold)]  # y = 2x + 1

    words, right_words = [set().union(*[part.words for part in side]) for side in (given, right)]
    own, other = [  # x,y for x = 1, y = 2 and for (x, y) = (1, 2)
        ",".join(sorted({part.label for part in side if "~" not in part.label} - {""})).strip("()")
        for side in (given, right)
    ]
    is_other_name = own and other and own not in (other, other[::-1])
    if is_other_name or not have_right_words(
        words - SCALES.keys(), right_words - SCALES.keys(), problem
    ):
        return False  # y = 3 for x = 3, but BA = 3 for AB = 3

    is_in_order = "," in gold and re.search(IN_ORDER, problem) is not None
    have_units = are_labelled(given) and are_labelled(right) and not is_in_order
    # By letter: x = 1 before y = 2, but m before b if the problem has (m, b)
    given, right = [
        sorted(side, reverse=f",{min(side).label})" in problem.replace(" ", ""))
        if are_labelled(side) and (have_units or "~" not in side[0].label)
        else side
        for side in (given, right)
    ]
    # x = 1, y = 2 is the point (1, 2), and 1, 2 is where a point is asked for.
    found, wanted = [[part.value for part in side] for side in (given, right)]
    for side, labels, one in ((found, own, wanted), (wanted, other, found)):
        if len(side) > len(one) == 1 and one[0].startswith("(") and "\\{" not in box + gold:
            is_point = labels.count(",") + 1 == len(side) if labels else re.search(POINT, problem)
            if is_point:
                side[:] = [f"({', '.join(side)})"]

    scaling = words & SCALES.keys() - right_words - words_of(problem)[1]
    scale = math.prod([SCALES[word] for word in scaling], start=Fraction(1))
    pairs = compare(found, wanted, scale, is_in_order or are_labelled(right))
    shown = ", ".join(found) + "%" * ("percent" in scaling)
    if pairs is None or not is_finished(shown, ", ".join(wanted), problem):
        return False
    return sum([part.pairs for part in given], pairs) or True
