# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Text of final answers: normal forms of Unicode, Markdown and LaTeX, and the split into mathematics and words."""

import functools
import re
import unicodedata

MAX_TEXT = 500
"""Characters of a final answer; a longer one is wrong."""

OPEN, CLOSE, CURRENCY = "\ue000", "\ue001", "\ue002"
"""Markers of the start and the end of mathematics, and of a currency sign `\\$`."""
_UNIT_MARK = "\ue003"


def word_set(text: str) -> frozenset[str]:
    """Return the words of a text."""
    return frozenset(text.split())


_FUNCTIONS = word_set("sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh log ln exp pi theta")
_SHORT_WORDS = word_set("or and is are be to of in at by as if no not but so it we the for on was has am pm")
_ALIASES = """
    dollar $ dollars usd; cent cents; euro € euros eur; pound £ pounds gbp lb lbs; yen ¥; rupee ₹ rupees rs; degree
    ° degrees deg; mm millimeter millimeters; cm centimeter centimeters; m meter meters metre metres; km kilometer
    kilometers; g gram grams; kg kilogram kilograms; mg; in inch inches; ft foot feet; yd yard yards; mi mile miles;
    s second seconds sec secs; min minute minutes mins; h hour hours hr hrs; ml milliliters mL; l liter liters; oz
    ounce ounces; mi/h mph; km/h kph; am; pm; sq square; cu cubic; rad radian radians; unit units
"""
"""Units and their other names."""
UNITS = {alias: unit for unit, *aliases in map(str.split, _ALIASES.split(";")) for alias in (unit, *aliases)}
_PLAIN = {
    **dict.fromkeys("−–—‒﹣－", "-"),
    **dict.fromkeys("“”„«»`", ""),
    **dict.fromkeys("\u00a0\u2009\u202f\t", " "),
    **dict.fromkeys("\u200b\u2060\ufeff", ""),
    "’": "'",
}
_COMMANDS = r"""
    × \times ; · \cdot ; ⋅ \cdot ; ÷ \div ; π \pi ; √ \sqrt ; ∞ \infty ; ≤ \leq ; ≥ \geq ; ≠ \neq ; ≈ \approx ; ± \pm ;
    ∪ \cup ; ∈ \in ; ∅ \emptyset ; θ \theta
"""
_CHARACTERS = str.maketrans(_PLAIN | {sign: f"{command} " for sign, command in map(str.split, _COMMANDS.split(";"))})
_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺ⁿ", "0123456789-+n")

_RULES = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"</?(?:b|i|em|strong|u|code|span|p|answer|final_answer|br ?/?)>", " "),
        (r"\\(?:left|right|[bB]igg?[lr]?|displaystyle|boxed|fbox)(?![A-Za-z])\.?", ""),
        (r"\\[dtc]frac(?![A-Za-z])", r"\\frac"),
        (r"(?<![0-9A-Za-z])(['\"])([^'\"]{1,100})\1(?![0-9A-Za-z])", r"\2"),
        (r"\^ ?(-[0-9]{1,20})", r"^{\1}"),
        (r"\.{2,}", r"\\ldots "),
        (
            r"(?<=[0-9 {])([kcm]?m|mi|ft|k?g) ?/ ?([kcm]?m|h|s|hr|sec|min|m?l)(?![A-Za-z])",
            rf" {_UNIT_MARK}\1 per {_UNIT_MARK}\2",
        ),
        (r"(?<=[0-9A-Za-z]) ?/ ?(?=[a-z]{4})(?!sqrt|sinh|cosh|tanh|arc)", " per "),
        (r"(?<=[0-9]),?(?:\\[,!]|\{,\})(?=[0-9]{3})", ","),
        (r"(?<=[0-9]) ?: ?(?=[0-9])", ":"),
        (r"\\(?:emptyset|varnothing)(?![A-Za-z])", r"\\{\\}"),
        (r"(?<![A-Za-z\\])(?:I|i)nf(?:inity)?(?![A-Za-z])", r"\\infty "),
        (r"\\(begin|end) ?\{array\}(?: ?\{[clr| ]{0,20}\})?", r"\\\1{matrix}"),
        (r"(?<=[0-9A-Za-z}%] )\(([A-Za-z]{4,20}(?: [A-Za-z]{1,20}){0,9})\)", r"\1"),
        (r"(?<=[0-9A-Za-z)\]}])\*\*(?=[0-9A-Za-z({-])", "^"),
        (r"(?<=[0-9A-Za-z)\]}]) ?\* ?(?=[0-9A-Za-z(\\{$€£\ue002])", r"\\cdot "),
        # Scientific notation: in a sum or a product, and before another variable, x is a variable.
        (
            r"((?:^|[=(\[,:<>$€£\ue000\ue002]|\\\{|[A-Za-z]{2} ) ?[-+]? ?[0-9][0-9.,]{0,30}) ?"
            r"(?:[xXхХ⨯]|\\(?:text|mathrm) ?\{ ?x ?\}) ?(\ue000?)"
            r"(?=10 ?\^ ?(?:[0-9]{1,3}|\{ ?-?[0-9]{1,3} ?\})(?!\.?[0-9]| ?[-+*/^(]| ?[a-fijknopqrt-z](?![A-Za-z/^])))",
            r"\1\\times \2",
        ),
        (r"\*+", ""),
        (
            r"^\ue000?([0-9]{1,20})\ue001? \((?:(?:since|because) )?\ue000?"
            r"((?:[-0-9 +/^.]|\\(?:times|cdot|div) ?){1,60})= ?\1\ue001?\)[ .\ue001]*$",
            r"\2= \1",
        ),
        (r"(?<![0-9A-Za-z)\]}\\])(_{1,2})([^_]{1,200})\1(?![0-9A-Za-z{])", r"\2"),
        (r"~ ?=", r"\\approx "),
        (r"(?<![\\A-Za-z0-9])~ ?(?=[0-9.])", " about "),
        (r"(?<!\\)\\[,;:! ]|\\q?quad(?![A-Za-z])|~", " "),
        (r"\\%|(?i:(?<=[0-9 ])per ?cent(?:age)?(?![A-Za-z])|(?<=[0-9 ])pct(?![A-Za-z]))", "%"),
        (r" ?\^ ?(?:\{ ?)?\\circ(?![A-Za-z])(?: ?\})?|\\degree(?![A-Za-z])|º", "°"),
        (r"\\frac ?([0-9])([0-9])", r"\\frac{\1}{\2}"),
        (r"\\frac ?([0-9])\{", r"\\frac{\1}{"),
        (r"_ ?([0-9]{1,20})", r"_{\1}"),
        (r"(\\frac ?\{[^{}]{0,100}\}) ?([0-9])", r"\1{\2}"),
        (r"(?<![A-Za-z\\])sqrt(?![A-Za-z])", r"\\sqrt"),
        (r"\\sqrt ?\(([^()]{1,100})\)", r"\\sqrt{\1}"),
        (r"\\sqrt ?([0-9]{1,20}|[a-z](?![a-z]))", r"\\sqrt{\1}"),
        (r"<=|\\leqslant(?![A-Za-z])|\\le(?![A-Za-z])", r"\\leq "),
        (r">=|\\geqslant(?![A-Za-z])|\\ge(?![A-Za-z])", r"\\geq "),
        (r"!=|\\ne(?![A-Za-z])", r"\\neq "),
        (r"\\lt(?![A-Za-z])", "<"),
        (r"\\gt(?![A-Za-z])", ">"),
    )
)
_CHEERS = re.compile("(?<=[0-9A-Za-z)}%.*\ue001 ])[✅✓✔☑🎉🎊🥳👍🙌😊😀🙂🚀✨⭐🌟🏆💪🎯\ufe0f ]+$")
"""Signs after an answer that do not change it, unlike ❌, 🤔 or 💯."""
_REPEATING = re.compile(
    r"(?<![0-9.,])([0-9]{0,10})\.(?:([0-9]{0,10}?)([0-9]{1,6}?)\3{2,} ?\\l?dots(?![A-Za-z])"
    r"|([0-9]{0,10}) ?\\(?:overline|bar) ?\{([0-9]{1,10})\})"
)
_TEXT = re.compile(
    r"(?P<before>[0-9}] ?)?\\(?:text|textbf|textit|textrm|mathrm|mathbf|mathit|rm|operatorname|mbox)(?![A-Za-z]) ?"
    r"\{(?P<text>[^{}]{0,200})\}"
)


def _as_fraction(found: re.Match[str]) -> str:
    r"""Convert a repeating decimal number, `0.1\overline{6}` or `0.1666\ldots`, to a fraction."""
    fixed, repeated = f"{found[1]}{found[2] or found[4] or ''}", found[3] or found[5]
    places = len(fixed) - len(found[1])
    top = int(f"{fixed}{repeated}") - int(fixed or "0")
    return rf"\frac{{{top}}}{{{(10 ** len(repeated) - 1) * 10**places}}}"


def _plain_text(found: re.Match[str]) -> str:
    r"""Convert `\text{...}` to text outside of mathematics; a single letter is a variable, or a unit after a number."""
    before, text = found["before"] or "", found["text"]
    letter = text.strip()
    if len(letter) != 1:
        return f"{before}{CLOSE} {text} {OPEN}"
    return f"{before} {_UNIT_MARK}{letter} " if before and letter in "mgslhLNJWVAK" else before + letter


@functools.lru_cache(maxsize=256)
def normalize(text: str) -> str:
    """Return the text with LaTeX for Unicode signs, without emphasis, tags and spacing commands."""
    text = re.sub("[⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺ⁿ]{1,9}", lambda match: "^{" + match[0].translate(_SUPERSCRIPTS) + "}", text)
    text = re.sub("[₀₁₂₃₄₅₆₇₈₉]{1,9}", lambda match: "_{" + unicodedata.normalize("NFKC", match[0]) + "}", text)
    text = re.sub(
        "[½⅓⅔¼¾⅕⅖⅗⅘⅙⅚⅛⅜⅝⅞]", lambda match: " " + unicodedata.normalize("NFKC", match[0]).replace("⁄", "/"), text
    )
    text = _CHEERS.sub("", text)
    text = unicodedata.normalize("NFKC", text.translate(_CHARACTERS))
    for pattern, replacement in _RULES:
        text = pattern.sub(replacement, text)
    return _TEXT.sub(_plain_text, _REPEATING.sub(_as_fraction, text))


_TOKEN = re.compile(
    rf"(?P<mode>[{OPEN}{CLOSE}])|(?P<command>\\(?:begin|end) ?\{{[a-z]+\}}|\\[A-Za-z]+|\\[^A-Za-z\s])"
    rf"|(?P<word>[0-9]+(?:st|nd|rd|th)(?![A-Za-z])|{_UNIT_MARK}?[^\W\d_]+(?:'[a-z](?![A-Za-z])|['-][^\W\d_]{{2,}})*)|(?P<number>[0-9]+)|(?P<space>\s+)|(?P<other>.)",
    re.DOTALL,
)
_SIGNS = frozenset("+-*/^_=<>()[]{}|!%°&$€£¥₹" + CURRENCY)
OPENERS = frozenset(("(", "[", "{", r"\{", r"\langle"))
CLOSERS = frozenset((")", "]", "}", r"\}", r"\rangle"))


def split_items(text: str) -> list[tuple[str, str]]:
    """Split normalized text into runs of mathematics `m`, words `w`, punctuation `p` and unknown signs `?`."""
    items: list[tuple[str, str]] = []
    in_math = CLOSE in text and not 0 <= text.find(OPEN) < text.find(CLOSE)
    depth, is_new = 0, True
    for token in _TOKEN.finditer(text):
        if token.lastgroup == "mode":
            in_math = token[0] == OPEN
            continue
        if token.lastgroup == "space":
            if not is_new:
                items[-1] = ("m", items[-1][1] + " ")
            continue
        kind = _kind(token, text, in_math, depth > 0)
        if token[0] == "(" and items and items[-1][0] == "w" and text[token.start() - 1].isalpha():
            # A function, as in `print(6)`.
            kind = "?"
        value = f"\\{token[0]} " if token[0] in _FUNCTIONS and kind == "m" else token[0].lstrip(_UNIT_MARK)
        if kind != "m":
            items.append((kind, value))
        else:
            depth += (value in OPENERS) - (value in CLOSERS)
            if is_new:
                items.append(("m", value))
            else:
                items[-1] = ("m", items[-1][1] + value)
        is_new = kind != "m"
    return _with_powers([(kind, value.strip()) for kind, value in items])


def _kind(token: re.Match[str], text: str, in_math: bool, in_brackets: bool) -> str:
    value, before, after = token[0], text[token.start() - 1 : token.start()], text[token.end() : token.end() + 1]
    if token.lastgroup == "word":
        return "w" if _is_word(value, before, text[token.end() : token.end() + 3], in_math) else "m"
    if token.lastgroup != "other" or value in _SIGNS:
        return "m"
    if value in ",;":
        return "m" if in_math or in_brackets or (before.isdigit() and after.isdigit()) else "p"
    if value == ".":
        return "m" if after.isdigit() and (before.isdigit() or not before.isalpha()) else "p"
    if value == ":":
        return "m" if in_math or (before.isdigit() and after.isdigit()) else "p"
    if value in "'\"":
        return "m" if in_math and value == "'" else "?" if before.isdigit() else "p"
    return "p" if value == "?" or (value == "#" and not after.isdigit()) else "?"


def _is_word(word: str, before: str, after: str, in_math: bool) -> bool:
    if word in _FUNCTIONS:
        return False
    if word[0] == _UNIT_MARK or word.casefold() in _SHORT_WORDS or (word in UNITS and len(word) > 1):
        return True
    if in_math:
        return len(word) > 3
    if len(word) == 1:
        return word in "aI" and not (before + after[:1]).strip(" .,")
    if len(word) < 4 and word.isupper() and after.lstrip(" ")[:1] in ("=", "<", ">"):
        return False
    signs = frozenset("0123456789+-*/^_=(){}\\")
    return len(word) > 3 or not (before in signs or after[:1] in signs)


def _with_powers(items: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """Join a unit and its power, as in `5 cm^2`."""
    joined: list[tuple[str, str]] = []
    for kind, value in items:
        power = re.fullmatch(r"\^ ?\{?([23])\}?", value) if kind == "m" else None
        if power is not None and joined and joined[-1][0] == "w" and joined[-1][1] in UNITS:
            joined[-1] = ("w", f"{joined[-1][1]}^{power[1]}")
        else:
            joined.append((kind, value))
    return joined


def has_value(text: str) -> bool:
    """Whether a text contains mathematics."""
    return any(kind == "m" for kind, _ in split_items(normalize(text[:MAX_TEXT])))


def is_bare(text: str) -> bool:
    """Whether a text contains mathematics and no words."""
    kinds = {kind for kind, _ in split_items(normalize(text[:MAX_TEXT]))}
    return "m" in kinds and "w" not in kinds
