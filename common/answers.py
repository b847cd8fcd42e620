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

MAX_CHARS = 500  # a longer answer is compared as a text only; MATH-500's longest has 53


# ---- Boxes ---------------------------------------------------------------------------------------
BOX_OR_BRACE = re.compile(r"(?P<box>\\\\?boxed\s*\{)|\\.|(?P<open>\{)|(?P<close>\})", re.DOTALL)
# What may stand between two boxes of one list: `}$ or $x = \\boxed`
JOINT = re.compile(
    r"(?=[^=]*(?:[,;]|and|or|\\lor))(?:[\s$,;~*]|\\[,;:! ()\[\]]|\\q?quad|\\lor\b|\band\b|\bor\b"
    r"|\\(?:text|mbox)[a-z]* ?\{[ ,]*(?:and|or) *\})*"
    r"(?:(?:\\[a-z]+ ?)?[a-zA-Z]{0,2}'?(?:_\{?\w+\}?)?(?:\([^()]*\))? *= *)?"
)


def box_spans(text: str) -> list[tuple[int, int, int]]:
    r"""Returns where each complete \boxed{...} starts, and where its content begins and ends.

    They are in the order in which their contents begin. Thinking that never ends has no box.
    """
    thought, end, rest = text.rpartition("</think>")
    text = thought + end + rest.partition("<think>")[0]
    spans = []
    opened: list[tuple[int, int]] = []  # the groups that are open; -1 for one that is no box
    for token in BOX_OR_BRACE.finditer(text):
        if token["box"]:
            opened.append((token.start(), token.end()))
        elif token["open"]:
            opened.append((-1, -1))
        elif token["close"] and opened:
            start, begin = opened.pop()
            if begin >= 0:
                spans.append((start, begin, token.start()))
    return sorted(spans, key=itemgetter(1))


def boxed_span(text: str) -> tuple[int, int] | None:
    r"""Returns where the content of the last complete \boxed{...} begins and ends, or None."""
    spans = box_spans(text)
    return spans[-1][1:] if spans else None


def last_boxed(text: str) -> str | None:
    r"""Returns the content of the last complete \boxed{...}, or None.

    Boxes that a comma, "and" or "or" joins to it form one list with it. A number that is written in
    two ways counts once.
    """
    spans = box_spans(text)
    if not spans:
        return None
    last_start, begin, end = spans[-1]
    contents = [text[begin:end]]
    for start, begin, end in reversed(spans[:-1]):
        if JOINT.fullmatch(text, end + 1, last_start) is None:
            break
        last_start = start
        contents.insert(0, text[begin:end])
    distinct = {number(tidy(content[:MAX_CHARS])) or content: content for content in contents}
    return ", ".join(distinct.values())


# ---- One way of writing --------------------------------------------------------------------------
CHARACTERS = str.maketrans(
    {
        "×": r"\times ", "·": r"\cdot ", "⋅": r"\cdot ", "π": r"\pi ", "∞": r"\infty ",
        "≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ", "±": r"\pm ", "∪": r"\cup ", "∈": r"\in ",
        "∅": r"\emptyset ", "°": r"^\circ ", "~": " ", "。": ".", "⁄": "/", "`": "",
    }
    | {raised: f"^{digit}" for digit, raised in enumerate("⁰¹²³⁴⁵⁶⁷⁸⁹")}
    | {lowered: f"_{digit}" for digit, lowered in enumerate("₀₁₂₃₄₅₆₇₈₉")}
)  # fmt: skip


def plain_characters(text: str) -> str:
    """Returns a text with one character where Unicode has many: ７ and ٧ are 7, – and − are -."""
    text = re.sub(r"(?=[¼½¾⅐-⅞])", " ", text).translate(CHARACTERS)
    characters = []
    for character in unicodedata.normalize("NFKC", text):
        if character.isdecimal():
            character = str(int(character))
        elif unicodedata.category(character) == "Pd" or character == "−":
            character = "-"
        if unicodedata.category(character) != "Cf":  # such as a space of no width
            characters.append(character)
    return "".join(characters).translate(CHARACTERS)


REWRITES = [
    (r"(?<!\\)\\[()\[\]]", " "),  # formulas in a formula
    (r"(?<![\w)\]}*])(\*{1,3}|__)(?=\S)(.*?)\1", r"\2"),  # bold in Markdown
    (r"(?<=[\w)\]}]) ?\*\* ?(-?\w+|\([^()]*\))", r"^{\1}"),  # x**2
    (r"([\^_])(\d)\1(\d)(?:\1(\d))?", r"\1{\2\3\4}"),  # x¹⁰
    (r"-\^(\d|\{\d+\})", r"^{-\1}"),  # 10⁻³
    (r"(?<![\\a-zA-Z])(pi|sqrt|exp|ln|log|(?:arc)?(?:sin|cos|tan))(?![a-zA-Z])", r"\\\1 "),
    (r"\\sqrt ?\(([^()]*)\)", r"\\sqrt{\1}"),
    (r"\\exp ?\(([^()]*)\)", r"e^{\1}"),
    # 1,000 1{,}000 1\,000, but neither (1,000) nor 1, 000
    (r"(?<=\d)(?:,| |\{,\}|,?\\[!,;: ] ?|\\thinspace *)(?=\d{3}(?!\d))"
     r"(?![^(\[]*(?:[)\]]|\\\}))", ""),
    (r"(?<=\d)[eE]\+?(-?\d{1,3})(?![\w.^])", r" \\times 10^{\1}"),  # 1e5
    (r"\\\\ ?\[[^\]]*\]", r"\\\\"),  # the gap between two rows: \\[4pt]
    (r"\\(?:left|right|displaystyle|bf|large|q?quad)(?![a-zA-Z])|(?<!\\)(?:\\[!,;: ]|\$)|\s+", " "),
    (r"^ ?\(([^(),]*)\) ?$", r"\1"),  # (5)
    (r"\\[dt](frac|binom)", r"\\\1"),
    (r"\\frac *(\d) *(\d)", r"\\frac{\1}{\2}"),
    (r"(?<![\d.}^_√])(?<!\^-)(?<!\\sqrt)(?<!\\sqrt )(\d+) ?/ ?(-?\d+)(?!\.?\d)",
     r"\\frac{\1}{\2}"),
    (r"\{[bB]matrix\}", "{pmatrix}"),
    (r"(?<=[\da-z}])(?<!matrix\})\^ ?(?:T|\{T\})", "^{(T)}"),  # only a matrix is transposed
    (r"(?:\\(?:small)?setminus|\\backslash|-) ?(?=\\\{)", r"\\setminus "),
    (r"\\mathbb ?(?:\{R\}|R)$|^(?:\\text ?\{)? ?[aA]ll reals?(?: numbers?)? ?\}?$",
     r"(-\\infty,\\infty)"),
    (r"\\(?:varnothing|\{ ?\\\})|(?:\\text ?\{)? ?[nN]o (?:real )?solutions? ?\}?$", r"\\emptyset"),
    (r"\^? ?(?:\\degree(?![a-z])|\{? ?\\circ ?\}?)", r"\\text{ degree }"),
    (r"\\?%", r"\\text{ percent }"),
    (r"\{([,:])\}", r"\1"),  # 3{:}45
    (r"√ ?(\d+|\([^()]*\)|[a-z])", r"\\sqrt{\1}"),
    (r"\b([apAP])\.? ?[mM]\b\.?", r"\1m"),  # 4:30 p.m.
    (r"(?<=\d)(?: ?\^)?(?: ?\{)?(?: ?\\(?:text|math)[a-z]* ?\{)? ?(?:st|nd|rd|th)\b(?: ?\}){0,2}",
     ""),
    (r"(\.\d*) ?\\overline ?\{(\d{1,6})\}", r"\1" + 60 * r"\2"),
    (r"\\text ?\{ ?and ?\}(?=.*(?:[<>]|\\[lg]e))", r"\\land "),  # math-verify does not read it
    (r",? ?(?:\\(?:lor|vee)(?![a-z])|\\(?:text|mbox) ?\{ ?(?:or|and) ?\}|\b(?:or|and)\b)", ","),
    (r"\\\{ ?[a-z](?: ?\\in ?\\mathbb ?\{?R\}?)? ?(?::|\\mid|\|)([^{}]*)\\\}", r"\1"),
    (r"^ ?[a-zA-Z] ?\\in ?(?=[(\[\\])", ""),  # x \in (1,2)
    (r"^[A-Z] ?(?=\([^()]*,[^()]*\)$)", ""),  # P(2,-1)
    (r"\\(?:math|text|bold)[a-z]* ?\{ ?([^\WmghsLCF_]) ?\}", r" \1 "),  # 2\mathrm{i}
    (r"^ *(?:\\mathbb)? *R *(?=\\setminus)", r"(-\\infty,\\infty)"),
    (r"(?<![\\a-zA-Z])([a-zA-Z]{3,}) ?:( ?\}?)", r"\1\2="),  # Total: 5
    (r"(?<=[a-zA-Z])'(?![a-zA-Z])", "_{p}"),  # math-verify takes f'(x) for f(x)
    (r"(?<=[\d}])(?: |\\cdot)+i(?![a-z])", "i"),
    (r"(\\sqrt ?\{[^{}]*\})i(?![a-z])", r"i\1"),
    (r"(\\(?:text|mbox|math)[a-z]* ?\{[^{}]*)\} ?\^ ?\{?([23])\}?", r"\1^\2}"),  # \text{cm}^2
    (r"(?<=[\d}]) *\\approx.*", ""),  # \frac{1}{3} \approx 0.333
    (r"^[ =]*(?:\\approx)? *|[ .,]+$|\.(?= ?\}$)", ""),
]  # fmt: skip


@functools.lru_cache(maxsize=4096)  # a group often gives the same answer
def tidy(text: str) -> str:
    """Returns an answer in one of the many ways to write it: 1/2 as a fraction, 1,000 as 1000."""
    text = plain_characters(text)
    for pattern, replacement in REWRITES:
        text = re.sub(pattern, replacement, text)
    return text.strip()


def compact(text: str) -> str:
    """Returns a formula without spaces and sizes."""
    text = re.sub(r"\\(?:left|right)(?![a-z])|\\[!,;: ]|\s+", "", text)
    return re.sub(r"\\[dt](frac|binom)", r"\\\1", text)


# ---- Words and units -----------------------------------------------------------------------------
UNITS = """
    mm millimeter, cm centimeter centimetre, m meter metre, km kilometer kilometre, inch in,
    foot feet ft, yard yd, mile mi, ml milliliter, liter litre l, gallon gal, cup, g gram,
    kg kilogram, pound lb £, ounce oz, second s sec, minute min, hour h hr, day, week, month,
    year yr, dollar $ usd, cent ¢, euro €, degree, radian rad, celsius c, fahrenheit f, unit,
    ^2 square sq, ^3 cubic cu, percent percentage, half halves
"""
SCALES = {
    "percent": Fraction(1, 100), "dozen": Fraction(12), "hundred": Fraction(100),
    "thousand": Fraction(1000), "million": Fraction(10**6), "billion": Fraction(10**9),
    "trillion": Fraction(10**12), "half": Fraction(1, 2), "third": Fraction(1, 3),
    "quarter": Fraction(1, 4), "fourth": Fraction(1, 4), "tenth": Fraction(1, 10),
    "hundredth": Fraction(1, 100), "pair": Fraction(2),
}  # fmt: skip
LINKING_WORDS = ("a", "an", "the", "of", "per", "each", "in")
NO_NOUNS = {  # stems of words that change the value before them
    "squared", "cubed", "factorial", "not", "no", "doubled", "tripled", "twic", "plu", "minu",
    "negativ", "below",
}  # fmt: skip
# A word, written as ~, that stands before a value: half of 8, or 8 minus x; but not 8 cm + x.
BEFORE = re.compile(r"(?:^|[-+*/^(\[{<>=,;])[ ~]*~ *[^ =,;~)]|~ *[^-+*/^<>=,;~)\]}. ]")
TEXT = re.compile(r"\\(?:text|mbox|math|operatorname)[a-z]* ?\{([^{}]*)\}")
WORD_IN_TEXT = re.compile(r"[a-zA-Z]+|\\?[$€£¢]|\^[23]")
WORD = re.compile(
    r"\\\$|[€£¢]|(?<![\\a-zA-Z_{])(?:(?<!\d)(?:[a-zA-Z][a-z]{2,}|[A-Z]{3,}|[nN]o|NO)"
    r"|(?:[ckm]m|in|ft|yd|mi|ml|kg|lb|oz|hr)(?:\^[23])?)(?![a-zA-Z])"
)
# What a problem asks for: how many square feet, in miles per hour, what percent. Not asked for are
# "in a year", "in 2" and "8 percent".
ASKED = re.compile(
    r"\b(?:how many|number of) ((?:[a-z]+ ?){1,3})"
    r"|\bin ((?:square |cubic )?[a-z]+(?: per [a-z]+)?)"
    r"|(?:^|[^\d\s\\]|[^\d\s]\s)\\?(percent)",
    re.IGNORECASE,
)


def stem(word: str) -> str:
    """Returns what the singular and the plural of a word have in common.

    That is more than one letter, so that "his" is not an hour.
    """
    word = word.lower().removeprefix("\\")
    return word.rstrip("s").rstrip("eiy") if len(word.rstrip("eisy")) > 1 else word


UNIT_NAMES = {}  # by the stem of each spelling
for entry in UNITS.split(","):
    for spelling in entry.split():
        UNIT_NAMES[stem(spelling)] = entry.split()[0]
ALL_UNITS = set(UNIT_NAMES.values()) - set(SCALES)
UNNAMED_UNITS = {"unit", "^2", "^3"}  # these need not stand in the problem


def names(words: list[str]) -> set[str]:
    """Returns the names of units and scales among words, and the stems of the others."""
    spoken = " ".join(words).lower().replace("^", " ^").replace("mph", "mile hour")
    stems = [stem(word) for word in spoken.split() if word not in LINKING_WORDS]
    return {UNIT_NAMES.get(word, word) for word in stems}


@functools.lru_cache(maxsize=512)  # one problem meets a whole group of boxes
def words_of(problem: str) -> tuple[set[str], set[str]]:
    """Returns the names of the words in a problem, and of the units and scales that it asks for."""
    known = names(re.findall(r"(?<!['’a-zA-Z])[a-zA-Z]+|\$", problem)) - NO_NOUNS | UNNAMED_UNITS
    asked = ASKED.findall(re.sub(r"%|\b(?:rate|odds|chance)", "percent", problem))
    return known, names([" ".join(kinds) for kinds in asked])


def have_right_words(given: set[str], right: set[str], problem: str) -> bool:
    """Returns whether the words of an answer are those of the gold answer, or of the problem."""
    given = given - set(SCALES)
    units = given & ALL_UNITS
    if right - set(SCALES):
        return given <= right and units in (set(), right & ALL_UNITS)
    if problem == "":
        return given == units
    known, asked = words_of(problem)
    if units and asked & ALL_UNITS and not units & asked:
        return False
    if known & ALL_UNITS <= UNNAMED_UNITS:
        known = known | ALL_UNITS  # the problem names no unit
    return given <= known


# ---- Values --------------------------------------------------------------------------------------
NUMBER = re.compile(
    r"(?P<sign>[-+]?) ?(?P<whole>\d+\.?\d*|\.\d+)?(?:\^ ?\{?(?P<power>-?\d{1,3})\}?)?"
    r"(?: ?\\frac ?\{ ?(?P<top>-?[\d.]+) ?\} ?\{ ?(?P<bottom>-?[\d.]+) ?\})?"
    r"(?: ?(?:\\times|\\cdot|\*|x) ?10\^ ?\{?(?P<exponent>-?\d{1,3})\}?)?",
    re.ASCII,
)
# What a name is a name of: the (-2) of f(-2), the ^{-1} of f^{-1}(2), the _{10} of S_{10}.
ARGUMENT = re.compile(r"\([^()]*\)|_\w|_\{[^{}]*\}|\^ ?\{-1\}")
NAME = re.compile(r"(?!.*\\(?:frac|sqrt|cdot|times|div|pm|ne))[a-zA-Z\\| {}]*")
EQUALS = re.compile(r"(?<![<>!])=(?![^{}]*\}\s*\^)")  # not that of \sum_{n=1}^5
OPERATION = re.compile(r"(?<=.)[-+*/^<>]|\\(?:frac|sqrt|binom|log|ln|sin|cos|tan)")
INEQUALITY = re.compile(r"[<>]|\\[lgn]eq?(?![a-z])")
# A choice: C, (C), \text{(C)}, or with its value \text{(C) } 20, C) 20, C: 20; but no second one.
GAP = r"(?:\W|\\(?:text|math)[a-z]*)*"
CHOICE = re.compile(
    r"(?:\\(?:text|math)[a-z]* ?\{)? ?"
    rf"(?![^A-Z]*[A-Z](?:{GAP}|.*(?:[,;/|\[(]|\b(?:or|and)\b){GAP}|.*\d *(?=[A-E]\b))[A-HJ-Z]\b)"
    r"(?![^A-Z]*[A-Z].*\b[A-Z][).:])"
    r"(?:\(([A-Z])\).*|([A-Z]) ?(?:\}?|[:).](?: .*)?))"
)
COMMA = re.compile(r"[,;](?![^(\[]*[)\]]|(?:(?!\\\{).)*\\\})")  # but not that of (1, 2), \{1, 2\}
# As in 1302_5. With \d++ the digits of a base cannot become those of the next number.
IN_A_BASE = re.compile(r"(?:\(?[0-9A-Z]+\)? ?_ ?\{?\(?\d++\)?\}?(?:, )?)+")


def number(text: str) -> Fraction | None:
    r"""Returns a number: 12, -1.5, \frac{1}{2}, 2 \frac{1}{2}, 2^{10} or 3 \times 10^5."""
    match = NUMBER.fullmatch(text)
    if match is None or (match["whole"] is None and match["top"] is None):
        return None
    try:
        size = Fraction(match["whole"] or 0) ** int(match["power"] or 1)
        if match["top"] is not None:
            size += Fraction(match["top"]) / Fraction(match["bottom"])
        size *= Fraction(10) ** int(match["exponent"] or 0)
    except (ValueError, ZeroDivisionError):
        return None
    return -size if match["sign"] == "-" else size


def parts_of(text: str) -> list[str]:
    r"""Returns the parts of a list or set: those of 1, 2 and of \{1, 2\}, and two of 3 \pm 1."""
    parts = []
    for part in COMMA.split(re.sub(r"^\\\{((?:(?!\\\}).)*)\\\}$", r"\1", text)):
        signs = "+-" if "\\pm" in part else "+"
        parts += [part.replace("\\pm", sign).strip() for sign in signs]
    return parts


def sides_of(part: str, problem: str) -> list[str]:
    """Returns the sides of an equation that must equal the answer: the 12 of x = 3 * 4 = 12.

    Of x = 9 = 8 both numbers must.
    """
    sides = [side.strip() for side in EQUALS.split(part)]
    are_names = [NAME.fullmatch(ARGUMENT.sub("", side)) is not None for side in sides]
    if len(sides) > 1 and (are_names[0] or compact(sides[0]) in compact(problem)):
        return [side for side in sides[1:-1] if number(side) is not None] + sides[-1:]
    return sides[:-1] if sides[1:] and sides[-1] and are_names[-1] else sides


def without_words(side: str) -> tuple[str, list[str]]:
    """Returns a value without the words around it, and the words, with ~ if one precedes it."""
    value = ""
    words = []
    for place, piece in enumerate(TEXT.split(side)):  # every second piece was in \text{...}
        pattern = WORD_IN_TEXT if place % 2 == 1 else WORD
        words += pattern.findall(piece)
        rest = pattern.sub("~", re.sub(r"\\?[$€£¢]", " ", piece))
        value += rest if place % 2 == 0 or re.search(r"\d", rest) else "~ " if "~" in rest else " "
    if BEFORE.search(value):
        words.append("~")
    return value.replace("~", " ").strip().rstrip(" /."), words


def read(text: str, problem: str) -> tuple[list[str], set[str], list[str]]:
    """Returns the values of an answer, the words around them, and other sides of equations.

    For x = 2 + 3 = 5 cm these are 5, cm and nothing. For 2 + 3 = 5 the other side is 2 + 3.
    """
    value, words = without_words(text)
    values = []
    others = []
    for part in parts_of(value):
        *other_sides, last = sides_of(part, problem)
        values.append(last)
        others += other_sides
    return values, names(words), others


def settle(box: str, gold: str, problem: str) -> bool | list[tuple[str, str]]:
    """Returns whether an answer is right, or the pairs that must all be equal if it is."""
    if box == gold or max(len(box), len(gold)) > MAX_CHARS:
        return box == gold != ""
    box = tidy(box)
    gold = tidy(gold)
    choices = [CHOICE.fullmatch(text) for text in (box, gold)]
    if box == gold:
        return True
    if all(choices):
        return len({choice[1] or choice[2] for choice in choices if choice}) == 1

    wanted, right_words, wanted_others = read(gold, "")
    found, words, others = read(box, problem)
    if "=" in gold and (len(wanted) > 1 or wanted_others or number(wanted[0]) is None):
        return [(box, gold)]  # y = 2x + 1
    if wanted in ([""], ["()"]):
        return found == wanted and words == right_words
    if not have_right_words(words, right_words, problem):
        return False
    if len(found) == len(set(re.findall(r"[^\s=,]+(?= *=)", box))) > 1 and len(wanted) == 1:
        found = ["(" + ", ".join(found) + ")"]  # x = 1, y = 2

    value = ", ".join(found)
    gold_value = ", ".join(wanted)
    formula = compact(value)
    is_computed = OPERATION.search(formula) is None or formula == compact(gold_value)
    if re.search(r"(?<!_)\d +\d", value) or (formula in compact(problem) and not is_computed):
        return False
    if IN_A_BASE.fullmatch(value) or IN_A_BASE.fullmatch(gold_value):
        digits, right_digits = [re.sub("[{}() ]", "", text) for text in (value, gold_value)]
        other_form = (
            re.sub(r"_\d+", "", right_digits) if "_" in right_digits else right_digits + "_10"
        )
        return digits in (right_digits, other_form)

    _, asked = words_of(problem)
    scale = math.prod(SCALES[word] for word in words & set(SCALES) - right_words - asked)
    pairs = [(side, found[-1]) for side in others]
    numbers = [size for size in map(number, found) if size is not None]
    right_numbers = [size for size in map(number, wanted) if size is not None]
    if len(right_numbers) == len(wanted):
        if len(numbers) < len(found):
            return False  # a part is left uncomputed
        # Nearly equal is enough, because a repeating decimal ends somewhere.
        both = zip(sorted(numbers), sorted(right_numbers), strict=False)
        are_near = all(10**12 * abs(a * scale - b) <= min(Fraction(1), abs(b)) for a, b in both)
        return len(found) == len(wanted) and are_near and (pairs or True)
    are_sets = INEQUALITY.search(value) or INEQUALITY.search(gold_value)
    is_whole = scale == 1 and (len(found) == len(wanted) or are_sets is not None)
    return is_whole and [*pairs, (value, gold_value)]
