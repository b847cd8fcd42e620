r"""What stands around the value of an answer: units, nouns and number words.

A word after a value is a unit if it is a known unit of measurement, as the cm of 12 cm, or a noun
of the problem, as the apples of 12 apples. Every other word is a part of the answer. Number words
count as numbers: 3 dozen is 36, and 10\% is 0.1, unless the problem asks for dozens or percent.
"""

from __future__ import annotations

import functools
import itertools
import re
from typing import NamedTuple

# ---- Words ---------------------------------------------------------------------------------------
# The known units by what they measure. Each entry is a unit's own name and other spellings of it.
KNOWN_UNITS = {
    "length": [
        "mm millimeter millimetre", "cm centimeter centimetre", "dm decimeter decimetre",
        "m meter metre", "km kilometer kilometre", "in inch inches", "ft foot feet", "yd yard",
        "mi mile", "nm nanometer", "unit",
    ],
    "area": ["ha hectare", "acre"],
    "volume": [
        "ml milliliter millilitre cc", "l L liter litre", "gal gallon", "qt quart", "pt pint",
        "cup", "tsp teaspoon", "tbsp tablespoon",
    ],
    "mass": [
        "mg milligram", "g gram", "kg kilo kilogram", "ton tonne", "pound lb £ gbp", "oz ounce",
    ],
    "time": [
        "ms millisecond", "s sec second", "min minute", "h hr hour", "day", "week wk", "month",
        "yr year", "decade", "century centuries",
    ],
    "angle": ["degree deg", "radian rad", "revolution rev"],
    "temperature": ["celsius", "fahrenheit", "kelvin"],
    "money": [
        "dollar $ usd buck", "cent ¢", "euro € eur", "yen ¥ jpy", "rupee ₹ inr rs", "peso",
    ],
    "electricity and force": [
        "J joule", "kJ kilojoule", "cal calorie", "kcal", "W watt", "kW kilowatt", "kWh",
        "N newton", "Pa pascal", "V volt", "A amp ampere", "Hz hertz", "mol mole",
    ],
    "data": ["bit", "byte", "kb KB kilobyte", "mb MB megabyte", "gb GB gigabyte"],
}  # fmt: skip
QUOTIENTS = {
    "mph": "mi/h", "kph": "km/h", "kmh": "km/h", "fps": "ft/s", "rpm": "revolution/min",
}  # fmt: skip


UNIT_SPELLINGS = dict(QUOTIENTS)  # the unit's own name by each of its spellings
KIND_OF_UNIT: dict[str, str] = {}  # what it measures, by its own name
for kind, entries in KNOWN_UNITS.items():
    for entry in entries:
        own_name = entry.split()[0]
        KIND_OF_UNIT[own_name] = kind
        for spelling in entry.split():
            UNIT_SPELLINGS[spelling] = own_name

# Number words after a value, and what they multiply it by: 3 dozen, 3 tenths, 3\%.
SCALES = {
    "percent": r"\frac{1}{100}", "percentage": r"\frac{1}{100}", "%": r"\frac{1}{100}",
    "pair": "2", "dozen": "12", "score": "20", "gross": "144", "hundred": "100",
    "thousand": "1000", "lakh": "100000", "million": "1000000", "crore": "10000000",
    "billion": "1000000000", "trillion": "1000000000000",
    "half": r"\frac{1}{2}", "halve": r"\frac{1}{2}", "third": r"\frac{1}{3}",
    "quarter": r"\frac{1}{4}", "fourth": r"\frac{1}{4}", "fifth": r"\frac{1}{5}",
    "sixth": r"\frac{1}{6}", "seventh": r"\frac{1}{7}", "eighth": r"\frac{1}{8}",
    "ninth": r"\frac{1}{9}", "tenth": r"\frac{1}{10}", "twelfth": r"\frac{1}{12}",
    "hundredth": r"\frac{1}{100}", "thousandth": r"\frac{1}{1000}",
    "millionth": r"\frac{1}{1000000}",
}  # fmt: skip
ONES = [
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten",
    "eleven", "twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen",
    "nineteen",
]  # fmt: skip
TENS = [
    "twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety",
]  # fmt: skip
POWERS_OF_1000 = {"thousand": 10**3, "million": 10**6, "billion": 10**9}

# Words that may stand in a unit without being one: 12 miles per hour, 12 years old.
LINKING_WORDS = {
    "a", "all", "altogether", "an", "and", "away", "cu", "cubic", "deep", "different", "distinct",
    "each", "every", "extra", "for", "full", "high", "in", "later", "left", "long", "more", "of",
    "old", "per", "possible", "remaining", "sq", "square", "tall", "the", "total", "wide",
}  # fmt: skip
# Words that change a value, so they are no unit though they stand in the problem.
CHANGING_WORDS = {
    "about", "above", "almost", "am", "approximately", "at", "base", "below", "between", "but",
    "cubed", "decreased", "double", "doubled", "except", "false", "from", "greater",
    "halved", "if", "incorrect", "increased", "is", "it", "larger", "least", "maximum", "minimum",
    "minus", "mod", "modulo", "more", "most", "nearly", "negative", "never", "no", "none", "not",
    "only", "or", "over", "plus", "pm", "positive", "quadrupled", "remainder", "smaller",
    "squared", "than", "times", "to", "triple", "tripled", "true", "twice", "under", "unless",
    "up", "was", "were", "with", "without", "wrong",
    *ONES, *TENS,
}  # fmt: skip
IRREGULAR_PLURALS = {"people": "person", "children": "child", "men": "man", "women": "woman"}

# ---- Patterns ------------------------------------------------------------------------------------
# Words in LaTeX: the \text{ apples} of 12\text{ apples}, \mathrm{cm}, \unit{cm^{2}}.
UPRIGHT = re.compile(
    r"\\(?:text|mbox|math|unit|si|operatorname)[a-z]* ?\{((?:[^{}]|\^ ?\{-?[1-9]\})*)\}"
)
# The C of 20^\circ C, and the F of 20^\circ\text{F}, whose text is opened already.
TEMPERATURE = re.compile(r"(\^ ?(?:\\circ|\{ ?\\circ ?\}))[\s~]*([CF])(?![A-Za-z])")
# The squared of 5 cm squared.
SQUARED = re.compile(r"(?<=[a-z]) (squared|cubed)\b")
# One piece of an answer. A gap that holds a ~ is where a \text{...} begins or ends.
PIECE = re.compile(
    r"(?P<gap>(?:[\s~]|\\[,;:! ]|\.(?=[\s~\\]|$)|(?<=[a-z])-(?=[a-z]))+)"  # 12\, cm, five-year
    r"|(?P<word>[A-Za-z]+)"
    r"|(?P<sign>\\?[$%]|[€£¥₹¢]|\^ ?(?:\\circ|\{ ?\\circ ?\}))"  # \$, 10\%, 30^\circ
    r"|(?P<power>\^ ?(?:[1-9]|\{-?[1-9]\}))"  # cm^2, s^{-1}
    r"|(?P<slash>/|\\cdot(?![a-z])|\\times(?![a-z]))"  # m/s, N\cdot m
    r"|(?P<other>\\[a-zA-Z]+|.)",
    re.DOTALL,
)
# A currency before a value: \$12, -\$12, x = €12, USD 12.
CURRENCY_BEFORE = re.compile(
    r"((?:^|=)[\s~]*[-+]?)[\s~]*"
    r"(?:US)?(\\?\$|[€£¥₹]|(?:USD|EUR|GBP|INR|JPY|Rs)(?![A-Za-z])\.?)[\s~]*"
)
# What a value ends in: 12, \frac{1}{2}, 5!, 2x, \pi; but neither a comma, a sign nor a word.
VALUE_END = re.compile(r"(?:[0-9)}\]!|]|(?<![A-Za-z])[A-Za-z]|\\pi|\\infty)$")
# A number that follows another quantity: the 30 of 2 hours and 30 minutes.
SECOND_NUMBER = re.compile(r"(.*[A-Za-z])[\s~,]+(?:and[\s~]+)?([0-9]+(?:\.[0-9]+)?)")
# Where a problem says what it asks for: how many more apples, the number of pairs, in square feet.
ASKED = re.compile(r"\b(?:how many|number of|(?P<in>in))[\s~]+(?P<the>the[\s~]+)?", re.IGNORECASE)
HOW_MANY = re.compile(r"\bhow many\b", re.IGNORECASE)
# Words that end what is asked for: the "of" of "how many of the apples".
AFTER_ASKED = {
    "are", "can", "could", "did", "do", "does", "has", "have", "in", "is", "of", "the", "was",
    "were", "will", "would",
}  # fmt: skip
# A percentage that is asked for, so it follows no number: what percent, as a percentage, (in \%).
PERCENT_ASKED = re.compile(r"(?<![0-9}$])(?<![0-9}$][ ~-])(?:percent|(?<!\\)\\?%)", re.IGNORECASE)


def stem(word: str) -> str:
    """Returns what the singular and the plural of a word have in common: cooki, box, libri."""
    word = IRREGULAR_PLURALS.get(word.lower(), word.lower())
    if word.endswith("s") and not word.endswith(("ss", "us", "is")):
        word = word[:-1]
    if len(word) > 3:
        word = word.removesuffix("e")
    endings = {"y": "i", "v": "f"}
    return word[:-1] + endings.get(word[-1:], word[-1:])


def known_unit(word: str) -> str | None:
    """Returns the own name of a known unit, as cm for Centimeters, or None."""
    spellings = [word]
    if len(word) > 1:  # but M is no meter
        spellings.append(word.lower())
    if len(word) > 2:
        spellings.append(word.lower().removesuffix("s"))
    for spelling in spellings:
        if spelling in UNIT_SPELLINGS:
            return UNIT_SPELLINGS[spelling]
    return None


def scale_word(word: str) -> str | None:
    """Returns the number word as SCALES has it, as tenth for tenths, or None."""
    word = word.lower().removeprefix("\\")
    for spelling in (word, word.removesuffix("s")):
        if spelling in SCALES:
            return "percent" if spelling in ("%", "percentage") else spelling
    return None


# ---- Problems ------------------------------------------------------------------------------------
Unit = tuple[tuple[str, int], ...]  # known units and their powers, in order: km/h is h -1, km 1


class Words(NamedTuple):
    """What a problem says about the units of its answer."""

    is_given: bool  # whether there is a problem
    stems: frozenset[str]  # of all its words
    asked_stems: frozenset[str]  # of the words after "how many" and the like
    asked_units: tuple[Unit, ...]
    named_units: frozenset[str]
    named_last: frozenset[str]  # those in its last sentence
    is_count: bool  # whether it asks how many
    asks_at_end: bool  # whether its last sentence asks how many, or names the unit it asks for


@functools.lru_cache(maxsize=1024)
def words_of(problem: str) -> Words:
    """Returns what a problem says about units; one group of completions shares it."""
    text = opened(problem)
    last_sentence = re.split(r"[.!?]\s", text.strip())[-1]
    asked_stems = set()
    asked_units = []
    asks_at_end = HOW_MANY.search(last_sentence) is not None
    for match in ASKED.finditer(text):
        pieces = asked_pieces(text, match.end())
        words = [piece[0] for piece in pieces if piece.lastgroup == "word"]
        if match["in"] is not None:
            # "in feet" and "in dozens", but neither "in the morning" nor "in week 3"
            if not words or not (is_unit_word(words[0]) or scale_word(words[0])):
                continue
            if text[pieces[-1].end() :][:1].isdigit():
                continue
            words = words[:1]
            is_at_end = match.start() >= len(text.rstrip()) - len(last_sentence)
            asks_at_end |= is_at_end and match["the"] is None  # but not "in the second hour"
        names = itertools.takewhile(is_no_preposition, words)  # "eggs" of "eggs in a dozen"
        asked_stems |= {stem(word) for word in names}
        unit = read_unit(pieces, {}).known
        if unit:
            asked_units.append(unit)
    if PERCENT_ASKED.search(text):
        asked_stems.add(stem("percent"))
    return Words(
        is_given=problem != "",
        stems=frozenset(stem(word) for word in re.findall(r"[A-Za-z]{3,}", text)),
        asked_stems=frozenset(asked_stems),
        asked_units=tuple(asked_units),
        named_units=frozenset(named_units(text)),
        named_last=frozenset(named_units(last_sentence)),
        is_count=HOW_MANY.search(text) is not None,
        asks_at_end=asks_at_end,
    )


def asked_pieces(text: str, begin: int) -> list[re.Match[str]]:
    """Returns the pieces of the next words that may name what is asked for, four at most."""
    pieces: list[re.Match[str]] = []
    num_words = 0
    for piece in PIECE.finditer(text, begin, begin + 80):
        num_words += piece.lastgroup == "word"
        is_part = piece.lastgroup in ("gap", "word", "power", "slash")
        if not is_part or num_words > 4 or piece[0].lower() in AFTER_ASKED:
            break
        pieces.append(piece)
    return pieces


def is_no_preposition(word: str) -> bool:
    """Returns whether a word may belong to the name of a thing that is counted."""
    return word not in ("a", "an", "each", "every", "for", "in", "make", "per")


def is_unit_word(word: str) -> bool:
    """Returns whether a word may begin a known unit."""
    return known_unit(word) is not None or word in ("square", "cubic")


def named_units(text: str) -> set[str]:
    """Returns the known units that a problem names, as h and km of "60 km in 2 hours"."""
    names = set()
    before = ""  # the piece before
    last = ""  # the one before that is no gap
    for piece in PIECE.finditer(text):
        word = piece[0]
        name = known_unit(word) if piece.lastgroup == "word" else None
        if piece.lastgroup == "sign":
            names.add(sign_unit(word))
        elif name is not None:
            is_after_number = last.isdigit() and last != before
            is_named = len(word) > 1 and word not in ("in", "second")
            # A letter alone may be a variable: neither the m of "2m" nor of "m is even" is a meter.
            if is_named or is_after_number or "~" in before or last in ("in", "per", "/"):
                names.update(name.split("/"))
        if piece.lastgroup != "gap":
            last = word
        before = word
    return names


def sign_unit(sign: str) -> str:
    """Returns the unit that a sign stands for, as dollar for \\$."""
    if "circ" in sign:
        return "degree"
    return UNIT_SPELLINGS.get(sign.removeprefix("\\"), sign)


# ---- Quantities ----------------------------------------------------------------------------------
class Quantity(NamedTuple):
    value: str
    scales: tuple[str, ...] = ()  # number words: those of 3 hundred thousand
    known: Unit = ()
    nouns: frozenset[str] = frozenset()  # their stems


NO_UNIT = Quantity("")


def opened(text: str) -> str:
    r"""Returns a text with its words in LaTeX opened: 12~ cm^2~ for 12\text{ cm squared}."""
    text = UPRIGHT.sub(r"~\1~", text)
    text = TEMPERATURE.sub(temperature_word, text)
    return SQUARED.sub(squared_power, text)


def temperature_word(degrees: re.Match[str]) -> str:
    """Returns the sign for degrees with the word for the letter after it."""
    words = {"C": "celsius", "F": "fahrenheit"}
    return f"{degrees[1]}~{words[degrees[2]]}~"


def squared_power(match: re.Match[str]) -> str:
    """Returns ^2 for squared, and ^3 for cubed."""
    return "^2" if match[1] == "squared" else "^3"


def read_answer(text: str, problem: Words, gold_stems: frozenset[str] | None) -> Quantity:
    """Returns the quantity that an answer is, or the list 3, 4 in cm for the list 3 cm, 4 cm.

    `gold_stems` are stems of the words in the gold answer, which may be units as well. They are
    None for the gold answer itself: its words are units where they do not change its value.
    """
    parts = listed(text)
    quantities = [read_quantity(part, problem, gold_stems) for part in parts]
    if len(parts) == 1:
        return quantities[0]
    units = {part._replace(value="", scales=()) for part in quantities} - {NO_UNIT}
    if len(units) > 1:
        return Quantity(text)
    values = ", ".join(scaled(part) for part in quantities)
    return units.pop()._replace(value=values) if units else Quantity(values)


def listed(text: str) -> list[str]:
    """Returns the parts of a list: those between the commas that stand in no bracket."""
    parts = [""]
    depth = 0
    for char in text:
        if char == "," and depth == 0 and not parts[-1].endswith("\\"):
            parts.append("")
        else:
            depth += (char in "([{") - (char in ")]}")
            parts[-1] += char
    return parts


def read_quantity(text: str, problem: Words, gold_stems: frozenset[str] | None) -> Quantity:
    """Returns the value, the number words and the unit of an answer; see `read_answer`."""
    spoken = opened(text)
    powers: dict[str, int] = {}
    currency = CURRENCY_BEFORE.search(spoken)
    if currency is not None:
        powers[sign_unit(currency[2].lower().strip("."))] = 1
        spoken = spoken[: currency.end(1)] + spoken[currency.end() :]

    pieces = list(PIECE.finditer(spoken))
    begin = len(pieces)  # of the unit
    while begin > 0 and may_be_unit(pieces, begin - 1, problem, gold_stems):
        begin -= 1
    while begin < len(pieces) and pieces[begin].lastgroup in ("gap", "slash"):
        begin += 1
    if read_unit(pieces[begin:], {}) == NO_UNIT:
        begin = len(pieces)  # the "more" of "12 more" is no unit without a noun
    unit = read_unit(pieces[begin:], powers)

    scales: list[str] = []
    while begin > 0:
        piece = pieces[begin - 1]
        scale = scale_word(piece[0])
        if scale is not None:
            scales.append(scale)
        elif piece.lastgroup != "gap":
            break
        begin -= 1

    value = "".join(piece[0] for piece in pieces[:begin]).strip(" ~")
    number = spelled_number(value)
    if number is not None:
        value = str(number)
    elif VALUE_END.search(value) is None or (unit == NO_UNIT and not scales):
        return Quantity(text.strip())
    quantity = unit._replace(value=value, scales=tuple(scales))
    return with_first_part(quantity, problem, gold_stems)


def with_first_part(last: Quantity, problem: Words, gold_stems: frozenset[str] | None) -> Quantity:
    """Returns 2:30 in h and min for 2 hours 30 minutes, whose value so far is "2 hours 30"."""
    second_number = SECOND_NUMBER.fullmatch(last.value)
    if second_number is None:
        return last
    first = read_quantity(second_number[1], problem, gold_stems)
    if not first.known or first.nouns or first.scales:
        return last
    known = tuple(sorted({*first.known, *last.known}))
    return last._replace(value=f"{first.value}:{second_number[2]}", known=known)


def may_be_unit(
    pieces: list[re.Match[str]], place: int, problem: Words, gold_stems: frozenset[str] | None
) -> bool:
    """Returns whether a piece of an answer may belong to the unit at its end."""
    piece = pieces[place]
    word = piece[0]
    scale = scale_word(word)
    if scale is not None:
        return stem(scale) in problem.asked_stems  # 3 dozen, where it asks how many dozen
    if piece.lastgroup == "power":
        # cm^2 is a unit, but neither 5^2 nor apples^2
        bases = [before[0] for before in pieces[max(0, place - 2) : place]]
        return any(known_unit(base) is not None for base in bases)
    if piece.lastgroup != "word":
        return piece.lastgroup in ("gap", "slash", "sign")
    unit = known_unit(word)
    if word == "in" and any(after.lastgroup == "word" for after in pieces[place + 1 :]):
        unit = None  # 12 in total
    if unit is not None:
        before = pieces[place - 1] if place > 0 else None
        is_upright = before is not None and ("~" in before[0] or before.lastgroup == "slash")
        if len(word) > 2 or is_upright:
            return True
        # A letter or two may be variables, as in 5m.
        if problem.is_given:
            return unit in problem.named_units or unit in (gold_stems or ())
        return len(word) == 2 or (before is not None and before.lastgroup == "gap")
    if stem(word) in problem.asked_stems:
        return True
    if word.lower() in CHANGING_WORDS or len(word) < 2:
        return word.lower() in LINKING_WORDS
    if word.lower() in LINKING_WORDS or stem(word) in problem.stems:
        return True
    if gold_stems is None:
        return len(word) > 2 and place > 0 and pieces[place - 1].lastgroup == "gap"
    return stem(word) in gold_stems


def read_unit(pieces: list[re.Match[str]], powers: dict[str, int]) -> Quantity:
    """Returns a quantity without a value: the units and the nouns of some pieces, times `powers`.

    Nothing but linking words gives NO_UNIT.
    """
    powers = dict(powers)
    nouns = set()
    sign = 1  # -1 after a "per"
    power = 1  # 2 after a "square"
    last = ""  # the known unit that a power would belong to
    words = [piece for piece in pieces if piece.lastgroup != "gap"]
    for piece, after in itertools.zip_longest(words, words[1:]):
        word = piece[0].lower()
        scale = scale_word(word)
        unit = sign_unit(piece[0]) if piece.lastgroup == "sign" else known_unit(piece[0])
        if word == "in" and after is not None and after.lastgroup == "word":
            unit = None  # 12 in total
        if scale is not None:
            nouns.add(stem(scale))
        elif unit is not None:
            for n, part in enumerate(unit.split("/")):  # mph is mi/h
                last = part
                powers[part] = sign * power * (-1) ** n
            power = 1
        elif piece.lastgroup == "power" and last:
            powers[last] *= int(piece[0].strip("^{ }"))
        elif word in ("/", "per", "each", "every") or (word in ("a", "an") and (powers or nouns)):
            sign = -1
        elif word in ("square", "sq", "cubic", "cu"):
            power = 2 if word.startswith("s") else 3
        elif piece.lastgroup == "word" and word not in LINKING_WORDS:
            nouns.add(stem(word))
    return Quantity("", known=tuple(sorted(powers.items())), nouns=frozenset(nouns))


def spelled_number(text: str) -> int | None:
    """Returns the number that words spell, as 21 for twenty-one, or None."""
    total = 0
    part = 0  # below a thousand
    words = re.findall(r"[a-z]+", text.lower())
    if not words or re.fullmatch(r"[\sA-Za-z~-]+", text) is None:
        return None
    for word in words:
        rest = part % 100
        if word in ONES and (rest == 0 or (rest >= 20 and rest % 10 == 0 and word in ONES[1:10])):
            part += ONES.index(word)
        elif word in TENS and part % 100 == 0:
            part += 10 * (2 + TENS.index(word))
        elif word == "hundred" and 0 < part < 10:
            part *= 100
        elif word in POWERS_OF_1000 and part > 0:
            total += part * POWERS_OF_1000[word]
            part = 0
        elif word != "and" or part == 0:
            return None
    return total + part


# ---- Comparing -----------------------------------------------------------------------------------
def values_to_compare(box: str, gold: str, problem: str) -> list[tuple[str, str]]:
    """Returns pairs of a box and a gold answer without their units; one must be equal.

    There is none if the units differ, or if that of the box is not what the problem asks for.
    """
    words = words_of(problem)
    right = read_answer(gold, words, None)
    gold_stems = right.nouns | {name for name, _ in right.known}
    given = read_answer(box, words, gold_stems)
    if not is_same_unit(given, right, words):
        return []

    if given.scales == right.scales:
        return [(given.value, right.value)]
    pairs = [(scaled(given), scaled(right))]
    if right.scales == ("percent",) and not given.scales:
        pairs.append((given.value, right.value))  # 10 for 10\%
    return pairs


def is_same_unit(given: Quantity, right: Quantity, problem: Words) -> bool:
    """Returns whether the unit of an answer is that of the gold answer, or may be left out."""
    if not given.known and not given.nouns:
        return True
    if right.known or right.nouns:
        are_related = given.nouns <= right.nouns or given.nouns >= right.nouns
        return given.known == right.known and are_related
    return not is_contradicted(given.known, problem)


def is_contradicted(unit: Unit, problem: Words) -> bool:
    """Returns whether a problem asks for another unit than this one, or names others only."""
    names = {name for name, _ in unit if name != "unit"}
    if not names or not problem.is_given:
        return False
    alternatives = [asked for asked in problem.asked_units if kinds_of(asked) == kinds_of(unit)]
    if alternatives:
        return not any(is_asked(unit, asked, problem) for asked in alternatives)
    if problem.asks_at_end and numerator(unit):
        return True  # how many apples are no dollars, and a length in meters is no angle
    kinds = {KIND_OF_UNIT.get(name, "") for name in names}
    others = {name for name in problem.named_units if KIND_OF_UNIT.get(name) in kinds}
    return not names <= problem.named_units and (problem.is_count or bool(others))


def is_asked(unit: Unit, asked: Unit, problem: Words) -> bool:
    """Returns whether a unit is what a problem asks for.

    12 hours will do for "how many hours a week", and so will 12 meters per week for "how many
    meters does he run each week".
    """
    if unit == asked or unit == numerator(asked):
        return True
    rest = {name for name, power in unit if power < 0}
    return numerator(unit) == asked and rest <= problem.named_last


def numerator(unit: Unit) -> Unit:
    """Returns a unit without what it is per, as km for km/h."""
    return tuple((name, power) for name, power in unit if power > 0)


def kinds_of(unit: Unit) -> set[str]:
    """Returns what the numerator of a unit measures, as length for km/h."""
    return {KIND_OF_UNIT.get(name, "") for name, _ in numerator(unit)}


def scaled(quantity: Quantity) -> str:
    """Returns a value times its number words, as 36 for 3 dozen."""
    value = quantity.value
    for scale in quantity.scales:
        factor = SCALES[scale]
        if value.isdecimal() and factor.isdecimal():
            value = str(int(value) * int(factor))
        else:
            value = f"({value})\\cdot{factor}"
    return value
