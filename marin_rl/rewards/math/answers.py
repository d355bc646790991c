# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

r"""The final answer of a reply: the grammar of `grader: {type: math}`.

```
reply     the last of \boxed{text}, <answer>text</answer>, `#### text`, "final answer is text"; else the last "answer is
          text" or "answer: text"; else the last sentence with mathematics. Text before "wait", "no," or another
          correction does not count.
text      [words] value [unit] [words] ["because" anything], without emphasis, quotes, code ticks and LaTeX delimiters;
          or words with values, a verb or `=`, and such a text
value     scalar | words | list | group | relation | choice
scalar    number | LaTeX or plain expression
list      values between commas, "and", "or", \cup; x = \pm 2 is the list 2, -2
group     (a, b), [a, b), {a, b} or a matrix
relation  name = value, an equation, an inequality, or numbers = their value
choice    (A) value
```

The whole text has to be a value: two values without a separator, a word that changes a value ("5 million", "not 5",
"about 5", "5 or six") or an unknown symbol make it unreadable, and the reply is wrong. Everything here is linear in the
length of the reply and uses the standard library only.
"""

import bisect
import dataclasses
import re
from collections.abc import Iterator

from marin_rl.rewards.math.text import CLOSE, CURRENCY, MAX_TEXT, OPEN, has_value, is_bare
from marin_rl.rewards.math.values import Answer, Words, read

MAX_REPLY = 100_000
"""Characters at the end of a reply that are read."""
_MAX_MARKS = 20

_DELIMITER = re.compile(r"\\\\|\$\$|\$|\\\[|\\\]|\\\(|\\\)|\n")
_CLOSES = {r"\[": r"\]", r"\(": r"\)", "$$": "$$", "$": "$"}

_LABEL_IN_MATHEMATICS = re.compile(
    rf"{OPEN} ?\\(?:text|textbf|mathrm|mathbf) ?\{{((?:the )?(?:final )?answer(?: is)? ?[:=]? ?)\}}", re.IGNORECASE
)


def _mark_mathematics(text: str) -> str:
    """Replace delimiters by markers, line breaks in mathematics by spaces, and `$` before an amount by a marker."""
    # GSM8K's notes for a calculator.
    text = re.sub(r"<<[^<>\n]{0,200}>>|[\ue000-\ue003\r]", "", text)
    text = re.sub(r"(?<!\\)\\\$", CURRENCY, text)
    changes: dict[int, tuple[int, str]] = {}
    opened: re.Match[str] | None = None
    breaks: list[int] = []
    for found in _DELIMITER.finditer(text):
        sign, before, after = found[0], text[found.start() - 1 : found.start()], text[found.end() : found.end() + 1]
        if sign == "\n":
            breaks.append(found.start())
            opened = None if opened is not None and opened[0] == "$" else opened
        elif (
            opened is not None
            and sign == _CLOSES[opened[0]]
            and (sign != "$" or not (before.isspace() or after.isdigit()))
        ):
            changes[opened.start()], changes[found.start()] = (opened.end(), OPEN), (found.end(), CLOSE)
            changes |= {position: (position + 1, " ") for position in breaks}
            opened = None
        elif sign in _CLOSES and (sign != "$" or not after.isspace()):
            opened, breaks = found, []
    parts, position = [], 0
    for start in sorted(changes):
        parts += [text[position:start], changes[start][1]]
        position = changes[start][0]
    marked = "".join([*parts, text[position:]])
    # `$\text{Answer: }46$` states its answer as `Answer: $46$` does.
    marked = _LABEL_IN_MATHEMATICS.sub(rf"{OPEN}{CLOSE}\1{OPEN}", marked)
    return re.sub(r"\$(?= ?[-.0-9])", CURRENCY, marked).replace("$", " ")


@dataclasses.dataclass(frozen=True)
class _Mark:
    start: int
    end: int
    text: str
    is_strong: bool
    kind: str


_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
_TAG = re.compile(r"<(/?)(?:answer|final_answer)>")
_HASHES = re.compile(r"(?<!#)####(?!#)[ \t]*([^\n]*)")
_STATED = re.compile(
    r"\b(?P<final>final[ \t]+)?(?:answers?|ans)\b(?P<words>[^.!?\n:=0-9\ue000]{0,80}?)"
    r"(?P<verb>[:=]|\b(?:is|are|was|be|equals)\b)[ \t]*[:*]*",
    re.IGNORECASE,
)
_HEADING = re.compile(r"^[^\w\n]*(?P<final>final[ \t]+)?answers?[^\w\n]*$", re.IGNORECASE | re.MULTILINE)
_DENIAL = re.compile(r"\b(?:not|never|no|cannot|may|might|could|unlikely)\b|n't\b", re.IGNORECASE)
_SENTENCE_END = re.compile(r"[.!?](?=[\s\ue001\"'*_)`<]|$)|\n")
_NEXT_LINE = re.compile(r"[^\w\n\\]*\n(?:[^\w\n]*\n){0,3}([^\n]*\w[^\n]*)")
_HEDGE = re.compile(
    r"\b(?:or|alternatively|maybe|perhaps|possibly|otherwise|not|if|could|suppose|assume|whether|wrong|incorrect|"
    r"false|doubt)\b|n't\b",
    re.IGNORECASE,
)
_CORRECTION = re.compile(
    r"(?:^|[.!?,;:\n\ue001(-])[ \t*_]*(?:wait|no(?=[,:;.! \n]+(?:[^a-z]|wait|it|that|the|this|i\b))|actually|"
    r"correction|scratch that|oops|sorry|hmm|on second thought)\b"
    r"|\b(?:that|this|it|which)(?:'s| is| was) (?:wrong|incorrect|not right|not correct|a mistake)\b(?! (?:that|to)\b)"
    r"|\bi made an? (?:mistake|error)\b",
    re.IGNORECASE,
)
_JOINS = frozenset(
    ("or", "and", "maybe", "perhaps", "possibly", "also", "alternatively", "either", "else", "if", "not")
)
_JOINED_BEFORE = re.compile(
    r"(?:\b(?:or|nor|not|either|maybe|perhaps|possibly|about|than|n't)|[~])[\s\ue000]*$", re.IGNORECASE
)
_JOINED_AFTER = re.compile(
    r"[\s\ue001.,]*\b(?:or|nor|times|percent|million|billion|thousand|hundred|dozen)\b", re.IGNORECASE
)
_ATTACHED_BEFORE = re.compile(
    r"(?:\\(?:approx|sim|pm|mp|times|cdot|div|neq?|leq?|geq?|lt|gt|sqrt|frac|notin)|[-+*/^_<>~±≈≤≥×÷≠({\[|0-9])\s*$"
)
_ATTACHED_AFTER = re.compile(r"\s*(?:[-+*/^_!%<>≤≥×÷±0-9({\[]|\\(?:%|times|cdot|div|pm|neq?|leq?|geq?))")


def find_answer(reply: str, is_truth: bool = False) -> Answer | None:
    """Return the final answer of a reply, or None if it has none.

    A ground truth is one value unless it marks its answer.
    """
    text = _mark_mathematics(reply[-MAX_REPLY:])
    if not is_truth:
        corrections = list(_CORRECTION.finditer(text))
        text = text[corrections[-1].end() :] if corrections else text
    marks = [*_boxes(text), *_tags(text), *_statements(text)]
    for is_strong in (True, False):
        found = sorted(
            (mark for mark in marks if mark.is_strong is is_strong), key=lambda mark: (mark.start, -mark.end)
        )
        if found:
            return read(_last(text, found))
    return read(text) if is_truth else _last_sentence(text)


def _boxes(text: str) -> Iterator[_Mark]:
    position = 0
    while (box := _BOX.search(text, position)) is not None:
        depth, position = 1, len(text)
        for brace in _BRACE.finditer(text, box.end()):
            depth += {"{": 1, "}": -1}.get(brace[0], 0)
            if depth == 0:
                position = brace.end()
                break
        # A box that is not closed has no answer.
        content = text[box.end() : position - 1] if depth == 0 else "?"
        if content.strip("{} \n." + OPEN + CLOSE):
            yield _Mark(box.start(), position, OPEN + content, True, "box")


def _tags(text: str) -> Iterator[_Mark]:
    opened: re.Match[str] | None = None
    for tag in _TAG.finditer(text):
        if tag[1] and opened is not None:
            content = text[opened.end() : tag.start()]
            if content.strip():
                yield _Mark(opened.start(), tag.end(), content, True, "tag")
            opened = None
        elif not tag[1]:
            opened = tag
    if opened is not None:
        yield _Mark(opened.start(), len(text), text[opened.end() :], True, "tag")


def _statements(text: str) -> Iterator[_Mark]:
    length = len(text.rstrip())
    for line in _HASHES.finditer(text):
        # A heading has words.
        if not re.search(r"(?<![\\\w])[^\W\d_]{4}", line[1]) or line.end() >= length:
            yield _Mark(line.start(), line.end(), line[1], True, "line")
    ends = [end.start() for end in _SENTENCE_END.finditer(text)]
    for stated in (*_STATED.finditer(text), *_HEADING.finditer(text)):
        index = bisect.bisect_left(ends, stated.end())
        stop = ends[index] if index < len(ends) else len(text)
        content = text[stated.end() : min(stop, stated.end() + MAX_TEXT + 1)]
        if not re.search(r"\w", content):
            following = _NEXT_LINE.match(text, stated.end())
            if following is None:
                continue
            stop, content = following.end(), following[1]
        if text[stop : stop + 1] == "?" or _DENIAL.search(stated.groupdict().get("words") or ""):
            content = f"not {content}"
        yield _Mark(stated.start(), stop, content, bool(stated["final"]), "statement")


def _last(text: str, marks: list[_Mark]) -> str:
    """Return the text of the last mark, or of the last ones if they are joined; a mark inside another is part of it."""
    outer: list[_Mark] = []
    for mark in marks:
        if not outer or mark.end > outer[-1].end:
            outer.append(mark)
    outer = outer[-_MAX_MARKS:]
    # "I hope the answer is clear" has no value.
    while len(outer) > 1 and outer[-1].kind == "statement" and not has_value(outer[-1].text):
        outer.pop()
    last = outer.pop()
    joined = [last]
    while outer and _is_joined(text, outer[-1], joined[0]):
        joined.insert(0, outer.pop())
    if len(joined) > 1:
        return f"{CLOSE} , ".join(mark.text for mark in joined)
    if (last.kind == "box" and _is_attached(text, last)) or (last.kind == "statement" and _is_hedged(text, last)):
        return f"not {last.text}"
    return last.text


def _is_joined(text: str, one: _Mark, other: _Mark) -> bool:
    r"""Whether two marks are one list: `\boxed{5} or \boxed{6}`."""
    between = text[one.end : other.start]
    words = {word.casefold() for word in re.findall(r"(?<!\\)\b[^\W\d_]+", between[:60])}
    is_row = one.kind == other.kind == "box" and "\n" not in between
    return len(between) < 60 and (words <= _JOINS if words else is_row)


def _is_hedged(text: str, statement: _Mark) -> bool:
    sentence = re.split(r"[.!?\n]", text[max(0, statement.start - 80) : statement.start])[-1]
    return _HEDGE.search(sentence) is not None


def _is_attached(text: str, box: _Mark) -> bool:
    """Whether a box is a part of an expression, denied, or one of several answers."""
    before, after = text[max(0, box.start - 40) : box.start], text[box.end : box.end + 40]
    before_here, after_here = re.split(f"[{OPEN}{CLOSE}]", before)[-1], re.split(f"[{OPEN}{CLOSE}]", after)[0]
    if text.rfind(OPEN, 0, box.start) <= text.rfind(CLOSE, 0, box.start):
        # In text, only signs without a space belong to the box.
        before_here, after_here = before_here.rpartition(" ")[2], after_here.partition(" ")[0]
    return bool(
        _JOINED_BEFORE.search(before)
        or _JOINED_AFTER.match(after)
        or _ATTACHED_BEFORE.search(before_here)
        or _ATTACHED_AFTER.match(after_here)
    )


def _last_sentence(text: str) -> Answer | None:
    """Read a reply without marks: the whole of it if it is one value, else its last sentence with mathematics."""
    whole = read(text)
    if whole is not None and (isinstance(whole.value, Words) or is_bare(text)):
        return None if text.rstrip().endswith("?") else whole
    sentences = _sentences(text)
    for index, sentence in enumerate(sentences):
        if not has_value(sentence):
            continue
        answer = read(sentence)
        before = sentences[index + 1] if index + 1 < len(sentences) else ""
        # Questions, and values alone in a row, are guesses.
        is_guess = sentence.endswith("?") or (is_bare(sentence) and is_bare(before) and read(before) != answer)
        return None if is_guess else answer
    return None


def _sentences(text: str) -> list[str]:
    """Return the last sentences, the last one first."""
    text = text[-20 * MAX_TEXT :]
    starts = [0, *(end.end() for end in _SENTENCE_END.finditer(text))]
    parts = [text[start:end].strip() for start, end in zip(starts, [*starts[1:], len(text)], strict=True)]
    return [part for part in reversed(parts) if re.search(r"\w", part)]
