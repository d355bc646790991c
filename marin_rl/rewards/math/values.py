# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

r"""Values of final answers: from the text of an answer to a number, an expression, words or a group of values.

The grammar is that of `answers`. Everything here is linear in the length of the text and uses the standard library
only.
"""

import dataclasses
import itertools
import re
from collections.abc import Iterable, Iterator
from fractions import Fraction

from marin_rl.rewards.math.text import (
    CLOSE,
    CLOSERS,
    CURRENCY,
    MAX_TEXT,
    OPEN,
    OPENERS,
    UNITS,
    normalize,
    split_items,
    word_set,
)


@dataclasses.dataclass(frozen=True)
class Scalar:
    """A number or an expression."""

    text: str
    """LaTeX without delimiters and superfluous spaces."""
    name: str = ""
    """Left side of `x = 5`."""
    unit: str = ""
    """`%`, currency, degree or the words after it, as in `km/h`; compared only if both values have one."""
    equal_to: tuple[str, ...] = ()
    """Left sides of `9 * 2 = 18`, which must have the same value, or of the equation `2x + 3y = 5`."""
    is_rounded: bool = False
    """Whether only an approximation is given: `x \\approx 46`."""


@dataclasses.dataclass(frozen=True)
class Bracket:
    """Several values: a set or list (`kind` is `{}`), tuple `()`, interval `[)`, or rows of a matrix."""

    kind: str
    items: tuple["Value", ...]
    is_relation: bool = False
    """Whether it was an inequality."""


@dataclasses.dataclass(frozen=True)
class Words:
    """Text without mathematics, such as `no solution`."""

    text: str


@dataclasses.dataclass(frozen=True)
class AnyOf:
    """A label of a multiple choice question and its text, such as `(A) 12`."""

    label: Scalar
    value: "Value"


Value = Scalar | Bracket | Words | AnyOf


@dataclasses.dataclass(frozen=True)
class Answer:
    """The text of a final answer and its value; None if the grammar cannot read it."""

    text: str
    value: Value | None


_DOUBTS = word_set(
    """not never nor neither either or maybe perhaps possibly probably might could cannot can't isn't don't doesn't
    won't wouldn't aren't unless except if otherwise instead wrong incorrect false unknown unsure none likely
    presumably guess"""
)
"""Words that deny or restrict the value of a sentence."""
_NUMERALS = word_set(
    """two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen eighteen
    nineteen twenty thirty forty fifty sixty seventy eighty ninety hundred hundreds thousand thousands million
    millions billion billions trillion trillions dozen dozens half halves third thirds quarter quarters fourth
    fourths fifth fifths sixth sixths eighth eighths tenth tenths hundredth hundredths thousandth thousandths
    tens bn mn lakh lakhs crore crores gross"""
)
_CHANGES = word_set(
    """zero one no and but may between to through until versus vs about around approximately approx roughly nearly
    almost circa ca least most than over under below above exceeds beyond
    plus minus negative times multiplied divided mod modulo remainder squared cubed power root cube factorial twice
    double triple pair pairs couple score k choose base out near within like digit step question problem example case
    page line figure exercise part chapter jan feb mar apr jun jul aug sep sept oct nov dec january february march april
    june july august september october november december"""
)
"""Words that change the value next to them."""
_CHANGES_AFTER_THEM = _CHANGES | word_set("by square multiple factor any")
"""Words that change the value after them."""
_VERBS = word_set("is are was were be equals")
_COMPARATIVES = word_set("more less fewer additional extra")
_FILLERS = word_set("at of the a an be only exactly just")


def read(text: str) -> Answer | None:
    """Read the text of a final answer, with markers around mathematics; None if it is empty."""
    text = text.strip()
    if len(text) > MAX_TEXT:
        return Answer("", None)
    text = normalize(text)
    items = split_items(text)
    while items and items[0][0] == "p":
        items.pop(0)
    while items and items[-1][0] == "p":
        items.pop()
    if not items:
        return None
    return Answer(" ".join(_compact(value) for _, value in items), _choice(text) or _value(items) or _predicate(items))


_LABEL = re.compile(r"(?:(?:option|choice) )?(?:\(([A-H])\)|([A-H])(?:[.):](?= |$)))[ .:]*(?P<text>.*)", re.DOTALL)
_OTHER_LABEL = re.compile(r"(?<![A-Za-z])[A-H](?![A-Za-z])")


def _choice(text: str) -> Value | None:
    """Read the label of a multiple choice question and its text, as in `(A) 12`, from normalized text."""
    text = re.sub(rf"[{OPEN}{CLOSE} ]+", " ", text).strip()
    found = _LABEL.fullmatch(text)
    if found is None or _OTHER_LABEL.search(found["text"]):
        return None
    label = Scalar(found[1] or found[2])
    if not found["text"]:
        return label
    items = split_items(found["text"])
    words = [word.casefold() for kind, word in items if kind == "w"]
    # "None of the above" and "cannot be determined" are texts of choices.
    doubts = words[1:] if words[:1] in (["none"], ["cannot"]) else words
    value = _value(items) if _DOUBTS.isdisjoint(doubts) and not re.match(r"[-+*/^_=<>,;&|]", items[0][1]) else None
    return None if value is None else AnyOf(label, value)


def _predicate(items: list[tuple[str, str]]) -> Value | None:
    """Read the value after the only verb or the last `=`, as in `The value of x is 5`."""
    verbs = [index for index, (kind, word) in enumerate(items) if kind == "w" and word.casefold() in _VERBS]
    equations = [index for index, (kind, text) in enumerate(items) if kind == "m" and "=" in text]
    if len(verbs) + bool(equations) != 1:
        return None
    index = (verbs or equations)[-1]
    subject = [value.casefold() for _, value in items[:index]]
    is_list = bool(equations) and not {",", ";", "and"}.isdisjoint(subject[equations[0] :])
    if is_list or not _DOUBTS.isdisjoint(subject):
        return None
    right = [("m", items[index][1].rpartition("=")[2])] if equations else []
    return _value([*right, *items[index + 1 :]])


def _value(items: list[tuple[str, str]]) -> Value | None:
    """Read `[words] value [unit] [words] ["because" anything]`."""
    reasons = (
        index for index, (kind, word) in enumerate(items) if kind == "w" and word.lower() in ("because", "since")
    )
    items = items[: next(reasons, len(items)) or len(items)]
    if any(kind == "?" for kind, _ in items):
        return None
    runs = [index for index, (kind, _) in enumerate(items) if kind == "m"]
    if not runs:
        return Words(" ".join(word.casefold() for kind, word in items if kind == "w"))
    lead, tail = (
        [word.casefold() for kind, word in part if kind == "w"] for part in (items[: runs[0]], items[runs[-1] + 1 :])
    )
    if _changes(lead[::-1], _CHANGES_AFTER_THEM) or _changes(tail, _CHANGES) or not _NUMERALS.isdisjoint(tail):
        return None
    for first, second in itertools.pairwise(runs):
        between = {value.casefold() for _, value in items[first + 1 : second]}
        if not between or not between <= {",", ";", "and", "or"}:
            return None
    values = _parse_all([items[index][1] for index in runs])
    if values is None or len(values) > 1:
        return _list(values)
    return _with_unit(values[0], tail)


def _changes(words: list[str], changes: frozenset[str]) -> bool:
    """Whether the words before or after a value, the nearest first, change it or leave it open."""
    # The words before "equal to" may change it, as in "roughly equal to".
    words = words[2:] if words[:2] in (["to", "equal"], ["to", "equals"]) else words
    near = [word for word in words[:3] if word not in _FILLERS][:1]
    return not (_DOUBTS.isdisjoint(words) and (changes | _NUMERALS).isdisjoint(near))


def _with_unit(value: Value, words: list[str]) -> Value | None:
    words = list(itertools.dropwhile(_COMPARATIVES.__contains__, words))
    # "5 in total" are not inches.
    if not words or not isinstance(value, Scalar) or (words[0] == "in" and len(words) > 1):
        return value
    if not re.search(r"[0-9]", value.text) and words[0] not in UNITS:
        return value if words[-2:] in (["is", "correct"], ["is", "right"]) else None
    first = words[0]
    if first in ("square", "sq", "cubic", "cu") and len(words) > 1:
        power = 2 if first.startswith("s") else 3
        unit, is_known = f"{UNITS.get(words[1], words[1])}^{power}", True
    else:
        base, _, power = first.partition("^")
        is_known = base in UNITS
        unit = UNITS.get(base, base.removesuffix("s")) + (f"^{power}" if power else "")
    if value.unit and is_known and value.unit != unit:
        return None
    if words[1:2] == ["per"] and len(words) > 2:
        unit += "/" + UNITS.get(words[2], words[2])
    return dataclasses.replace(value, unit=value.unit or unit)


def _parse_all(texts: Iterable[str], is_inner: bool = False) -> list[Value] | None:
    values = [_parse(text, is_inner) for text in texts]
    return None if None in values else [value for value in values if value is not None]


def _list(values: list[Value] | None) -> Bracket | None:
    r"""Return a list of values, whose members may be lists: `x = 1, \pm 2`."""
    if values is None:
        return None
    nested = (value.items if isinstance(value, Bracket) and value.kind == "{}" else (value,) for value in values)
    return Bracket("{}", tuple(itertools.chain.from_iterable(nested)))


_THOUSANDS = re.compile(
    r"(?<![0-9.,])[0-9]{1,3}(?:,[0-9]{3})+(?!,?[0-9])|(?<![0-9.,])[0-9]{1,3}(?: [0-9]{3})+(?! ?[0-9])"
)
_RELATION = re.compile(r"=|<|>|\\leq|\\geq|\\neq|\\in|\\approx|\\equiv")
_NAME = re.compile(r"(?:[^0-9]|(?<=_)[0-9]|(?<=_\{)[0-9]{1,3})+")
_FUNCTION_VALUE = re.compile(r"[A-Za-z]{1,3}(?:'|\^\{-1\})?\((?:[^()]|\([^()]{1,30}\)){1,30}\)")
_MATRIX = re.compile(r"\\begin ?\{([pbBvV]?matrix)\}(.*)\\end ?\{\1\}", re.DOTALL)


def _parse(text: str, is_inner: bool = False) -> Value | None:
    """Parse one run of mathematics; inside of brackets, a comma does not separate thousands."""
    text = text.strip().rstrip(".,;:").removesuffix(r"\\").strip()
    if not text or not _is_balanced(text):
        return None
    if (matrix := _MATRIX.fullmatch(text)) is not None and r"\begin" not in matrix[2]:
        return _matrix(matrix[1], matrix[2])
    if not is_inner and not re.search(r"[(\[{]", text):
        text = _THOUSANDS.sub(lambda number: re.sub("[, ]", "", number[0]), text)
    for separator in (re.compile(r"[,;]"), re.compile(r"\\cup")):
        parts = _split(text, separator)
        if len(parts) > 1:
            values = _parse_all((part for part, _ in parts), is_inner)
            return _list(values)
    related = _split(text, _RELATION)
    if len(related) > 1:
        return _relation([part.strip() for part, _ in related], [sign for _, sign in related[:-1]], is_inner)
    return _group(text) or _plus_minus(text, is_inner) or _scalar(text)


_TOKEN = re.compile(r"\\[A-Za-z]+|\\.|.", re.DOTALL)


def _with_depths(text: str) -> Iterator[tuple[re.Match[str], int]]:
    """Yield the tokens of a text, each with the number of brackets that are open after it."""
    depth = 0
    for token in _TOKEN.finditer(text):
        depth += (token[0] in OPENERS) - (token[0] in CLOSERS)
        yield token, depth


def _is_balanced(text: str) -> bool:
    """Whether all brackets of a text are closed; an interval may mix their kinds."""
    depths = [0, *(depth for _, depth in _with_depths(text))]
    return min(depths) == depths[-1] == 0


def _split(text: str, separator: re.Pattern[str]) -> list[tuple[str, str]]:
    """Split text at separators outside of brackets; each part comes with the separator after it."""
    parts, start = [], 0
    for token, depth in _with_depths(text):
        if depth == 0 and separator.fullmatch(token[0]):
            parts.append((text[start : token.start()], token[0]))
            start = token.end()
    return [*parts, (text[start:], "")]


def _matrix(kind: str, text: str) -> Bracket | None:
    rows = [_parse_all(row.split("&"), is_inner=True) for row in text.split(r"\\") if row.strip()]
    if None in rows:
        return None
    # Only a determinant differs from a matrix in other brackets.
    return Bracket(
        "determinant" if kind == "vmatrix" else "matrix",
        tuple(Bracket("row", tuple(row)) for row in rows if row is not None),
    )


def _relation(parts: list[str], signs: list[str], is_inner: bool) -> Value | None:
    if r"\approx" in signs:
        # The exact value counts: x = \sqrt{2} \approx 1.41.
        place = signs.index(r"\approx")
        if not parts[place] or (_is_name(parts[place]) and "\\" not in parts[place]):
            value = _relation(parts[place + 1 :], signs[place + 1 :], is_inner)
            return dataclasses.replace(value, is_rounded=True) if isinstance(value, Scalar) else value
        parts, signs = parts[: place + 1], signs[:place]
    if not signs:
        return _parse(parts[0], is_inner)
    is_name = _is_name(parts[0])
    if signs == [r"\in"] and is_name:
        return _parse(parts[1], is_inner)
    if set(signs) != {"="}:
        return _inequality(parts, signs)
    value = _parse(parts[-1], is_inner)
    computed = [part for part in parts[:-1] if part and not _is_name(part)]
    if not isinstance(value, Scalar):
        return None if computed else value
    return dataclasses.replace(
        value, name=_compact(parts[0]) if is_name else "", equal_to=tuple(map(_without_units, computed))
    )


_MONEY = f"{CURRENCY}€£¥₹"
"""Signs of currencies."""


def _without_units(text: str) -> str:
    text = re.sub(r"([0-9.]{1,20}) ?°", r"\\frac{\1\\pi}{180}", text)
    return _compact(re.sub(rf"[{_MONEY}]", "", text))


def _is_name(text: str) -> bool:
    r"""Whether the left side of an equation is a name: `x`, `a_5`, `m+n`, `f(2)`, `\\angle ABC`."""
    has_other = re.search(r"\\(?:not|neg|sim|infty)(?![A-Za-z])", text)
    return not has_other and bool(_NAME.fullmatch(text) or _FUNCTION_VALUE.fullmatch(text))


_FLIPPED = {"<": ">", ">": "<", r"\leq": r"\geq", r"\geq": r"\leq"}


def _inequality(parts: list[str], signs: list[str]) -> Value | None:
    r"""Convert `a < x \leq b`, `x > a` or `a > x` to an interval."""
    if not set(signs) <= set(_FLIPPED) or len(parts) > 3:
        return None
    if signs[-1] in (">", r"\geq"):
        parts, signs = parts[::-1], [_FLIPPED[sign] for sign in reversed(signs)]
    if not set(signs) <= {"<", r"\leq"}:
        return None
    if len(parts) == 2:
        is_below = _is_name(parts[0])
        parts = ["-\\infty", *parts] if is_below else [*parts, "\\infty"]
        signs = ["<", *signs] if is_below else [*signs, "<"]
    ends = [_scalar(parts[0]), _scalar(parts[2])]
    if None in ends or not _is_name(parts[1]):
        return None
    kind = ("(" if signs[0] == "<" else "[") + (")" if signs[1] == "<" else "]")
    return Bracket(kind, tuple(end for end in ends if end is not None), is_relation=True)


def _group(text: str) -> Value | None:
    tokens = list(_with_depths(text))
    (first, _), (last, _) = tokens[0], tokens[-1]
    if first[0] not in OPENERS or last[0] not in CLOSERS or any(depth == 0 for _, depth in tokens[:-1]):
        return None
    inner = text[first.end() : last.start()].strip()
    kind = "".join(
        "(" if token == r"\langle" else ")" if token == r"\rangle" else token[-1] for token in (first[0], last[0])
    )
    if not inner:
        return Words("empty set") if kind == "{}" else None
    parts = [part for part, _ in _split(inner, re.compile("[,;]"))]
    if len(parts) == 1 and (kind in ("()", "{}") or r"\begin" in inner):
        return _parse(inner, is_inner=True)
    values = _parse_all(parts, is_inner=True)
    is_interval = kind in ("(]", "[)")
    return None if values is None or (is_interval and len(values) != 2) else Bracket(kind, tuple(values))


def _plus_minus(text: str, is_inner: bool) -> Value | None:
    sides = re.split(r"\\pm(?![A-Za-z])", text)
    if len(sides) != 2:
        return None
    left, right = sides
    values = _parse_all((f"{left}{sign}{right}" for sign in ("+" if left.strip() else "", "-")), is_inner)
    return _list(values)


def _scalar(text: str) -> Scalar | None:
    unit = ""
    if (money := re.match(rf"([-+]?) ?([{_MONEY}]) ?", text)) is not None:
        text, unit = money[1] + text[money.end() :], UNITS[money[2].replace(CURRENCY, "$")]
    elif (money := re.search(rf"[{_MONEY}]$", text)) is not None:
        text, unit = text[:-1], UNITS[money[0].replace(CURRENCY, "$")]
    elif text.endswith("%"):
        text, unit = text[:-1], "%"
    elif (degrees := re.search(r" ?°( ?[CF])?$", text)) is not None:
        text, unit = text[: degrees.start()], "degree" + (degrees[1] or "").strip()
    text = _compact(text)
    is_unknown = re.search(rf"[{_MONEY}°%&]|^[-+]{{2}}|^[_^*/]|[-+*/^]$", text) is not None
    if not text or is_unknown or (re.search(r"[0-9] [0-9]", text) and number(text) is None):
        return None
    return Scalar(text.removeprefix("+"), unit=unit)


def _compact(text: str) -> str:
    """Remove spaces except between two digits, and those that end a command."""
    text = re.sub(r"\s+", " ", text.strip())
    needed = r"(\\[A-Za-z]+) (?=[A-Za-z])|([0-9]) (?=[0-9])| "
    return re.sub(needed, lambda space: space[0] if space[1] or space[2] else "", text)


# --- numbers ---

_MAX_NUMBER = 120
"""Characters of a number."""
_DECIMAL = r"(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)"
_FRACTION = re.compile(rf"\\frac\{{(-?{_DECIMAL})\}}\{{({_DECIMAL})\}}")
_NUMBER = re.compile(
    rf"(?P<sign>[-+]?)(?: ?(?:(?P<whole>[0-9]+) )?(?P<top>{_DECIMAL})/(?P<bottom>{_DECIMAL})|(?P<decimal>{_DECIMAL})"
    r"(?:[eE](?P<e>[-+]?[0-9]{1,3})|(?:\\times|\\cdot)10\^(?:\{(?P<power>-?[0-9]{1,3})\}|(?P<digit>[0-9]{1,3})))?)"
)


def number(text: str) -> Fraction | None:
    r"""Return the exact value of a number; None if the text is another expression.

    Numbers are `5`, `-0.5`, `3/4`, `\frac{3}{4}`, mixed numbers `2 2/3` with a proper fraction, `1.5e3`,
    `1.5\times10^3`, `1.5\times10^23`.

    >>> number("2 2/3"), number("0.05"), number("2 4/3")
    (Fraction(8, 3), Fraction(1, 20), None)
    """
    if len(text) > _MAX_NUMBER or (found := _NUMBER.fullmatch(_FRACTION.sub(r" \1/\2 ", text).strip())) is None:
        return None
    part = found.groupdict()
    if part["decimal"]:
        value = Fraction(part["decimal"]) * Fraction(10) ** int(part["e"] or part["power"] or part["digit"] or 0)
    else:
        top, bottom = Fraction(part["top"]), Fraction(part["bottom"])
        if bottom == 0 or (part["whole"] and top >= bottom):
            return None
        value = int(part["whole"] or 0) + top / bottom
    return -value if part["sign"] == "-" else value
