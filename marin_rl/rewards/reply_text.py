# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Parts of a reply: thoughts, answer and tool calls, and the matches of regular expressions.

The grammar of a reply, which is read in linear time whatever the text:

- `<think>` opens thoughts, and the next `</think>` closes them. The answer is the text after the last `</think>`. A
  `</think>` without `<think>` closes thoughts that the prompt opened.
- `<tool_call>` after all thoughts begins a call. If a JSON value follows, the call ends with it and the closing tag,
  which may be missing before another tag, and missing or incomplete at the end of the reply. Tags in strings of the
  JSON are text, in thoughts too.
- A malformed call, without JSON or with other text after it, extends to the next `</tool_call>`, or to the end of the
  reply. Of the tags in it, only `</think>` counts.
- An answer that is a JSON object with exactly the keys of a call (Llama) is a call.
- A tag directly between two equal quotes or backticks is text, except for the first `</think>` after thoughts began.

A regular expression from a config may need exponential time for a reply, and Python cannot interrupt it. So replies are
searched in a [grading process][marin_rl.rewards.grading_process]: `search_reply`.
"""

import json
import re
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from marin_rl.rewards.grading_process import ask

SEARCH_SECONDS = 1.0
"""CPU time after which the search of a reply is given up."""
_FOLLOWING = 100
"""Characters after a match that `Found.following` holds."""


def check_pattern(field: str, pattern: str, groups: int = 0) -> None:
    """Validate a regular expression with at least `groups` groups, from the config field `field`.

    Raises:
        ValueError: if it does not compile or has too few groups; the message names field and pattern.
    """
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        raise ValueError(f"{field}: {pattern!r} is not a regular expression: {error}") from error
    if compiled.groups < groups:
        raise ValueError(
            f"{field}: {pattern!r} has {compiled.groups} groups but needs {groups}; "
            "put parentheses around the part to extract"
        )


CALL_START, CALL_END = "<tool_call>", "</tool_call>"
_THOUGHTS_START, _THOUGHTS_END = "<think>", "</think>"
_TAG = re.compile(f"{_THOUGHTS_START}|{_THOUGHTS_END}|{CALL_START}")
_QUOTES = ("'", '"', "`")
_SPACES = re.compile(r"\s*")
_JSON_TEXT = re.compile(r'(?:[^"<\\]++|"(?:[^"\\]++|\\.)*+")*+', re.DOTALL)
"""Text that may be JSON: `<` and backslashes occur only in strings. A tag in such a text is in a string, so the text
that begins after that tag ends before the next one. Therefore reading the texts after all tags takes linear time."""
_SYNTAX = json.JSONDecoder(parse_int=str, parse_float=str, strict=False)
"""Finds the end of a JSON value, whatever its numbers, and also if its strings contain line breaks."""


class CallText(NamedTuple):
    """A tool call in a reply."""

    start: int
    """Index of its first character in the reply."""
    text: str
    """The text between its tags, without surrounding white space: JSON, if the call is well formed."""


class ReplyParser:
    """Finds the thoughts, the answer and the calls of a reply that may arrive in parts.

    >>> parser = ReplyParser()
    >>> parser.add('<think>Which?</think> So <tool_call>{"name": "</tool_call>"}</tool_call>', is_last=True)
    >>> parser.answer, [call.text for call in parser.calls]
    (' So <tool_call>{"name": "</tool_call>"}</tool_call>', ['{"name": "</tool_call>"}'])
    """

    def __init__(self, opens_thoughts: bool = False) -> None:
        """Start an empty reply.

        With `opens_thoughts`, the prompt ends with `<think>`, so the reply begins in its thoughts.
        """
        self.text = ""
        """The reply so far."""
        self.answer_start = 0
        """Index of the answer."""
        self.in_thoughts = opens_thoughts
        """Whether thoughts are not closed."""
        self.calls: list[CallText] = []
        """The calls in the answer, in order; only complete after the last part."""
        self.undecided: int | None = None
        """Index of a tag or of JSON that is read with a later part; None if all has been read."""
        self._position = 0
        self._begins_answer = not opens_thoughts
        """Whether only white space of the answer has been read, so that all of it may be a call."""
        self._has_closed = False
        """Whether thoughts have been closed."""
        self._malformed_end = 0
        """End of the last malformed call."""
        self._next_closing = -1
        """Index of the first closing tag after the last malformed call's text, or the end of the reply."""

    @property
    def answer(self) -> str:
        """The text after the thoughts."""
        return self.text[self.answer_start :]

    def add(self, text: str, *, is_last: bool) -> None:
        """Read the next part of a reply. Calls are read only when it is complete (`is_last`)."""
        self.text += text
        self.undecided = None
        while (not self._begins_answer or self._read_beginning(is_last)) and self._read_tag(is_last):
            pass

    def _read_beginning(self, is_last: bool) -> bool:
        """Read an answer that is a call; return whether there is text of another kind."""
        start = _end(_SPACES, self.text, self.answer_start)
        if self.text[start : start + 1] == "{":
            if not is_last:
                self.undecided = start
                return False
            if _is_call(self.text, start):
                self.calls = [CallText(start, self.text[start:].rstrip())]
                return False
        self._begins_answer = start == len(self.text)
        return not self._begins_answer

    def _read_tag(self, is_last: bool) -> bool:
        """Read the next tag; return whether there was one that needs no further part."""
        tag = _TAG.search(self.text, self._position)
        if tag is None:
            self._position = max(self._position, len(self.text) - len(CALL_START) + 1)
            return False
        start, self._position = tag.span()
        quote = self.text[start - 1 : start] if start else ""
        is_quoted = quote in _QUOTES and self.text.startswith(quote, self._position)
        may_be_quoted = quote in _QUOTES and self._position == len(self.text)
        if not is_last and (may_be_quoted or (tag[0] == CALL_START and not is_quoted)):
            self.undecided = self._position = start
            return False
        if tag[0] == _THOUGHTS_END:
            if self.in_thoughts or not (self._has_closed and is_quoted):
                self._close_thoughts()
        elif start >= self._malformed_end and not is_quoted:
            if tag[0] == _THOUGHTS_START:
                self.in_thoughts = True
                self.calls.clear()
            else:
                self._read_call(start)
        return True

    def _close_thoughts(self) -> None:
        self.calls.clear()
        self.answer_start = self._malformed_end = self._position
        self.in_thoughts, self._has_closed, self._begins_answer = False, True, True

    def _read_call(self, start: int) -> None:
        """Read a call whose opening tag has been read."""
        opened = self._position
        json_end = _end_of_json(self.text, opened)
        if json_end is not None:
            self._position = json_end
        if self.in_thoughts:
            return
        end = self._position
        if json_end is None or not self._ends_call(json_end):
            end = self._malformed_end = self._closing_after(end)
        self.calls.append(CallText(start, self.text[opened:end].strip()))

    def _closing_after(self, start: int) -> int:
        # Many malformed calls may have the same end. To search for it each time would take quadratic time.
        if self._next_closing < start:
            closing = self.text.find(CALL_END, start)
            self._next_closing = closing if closing >= 0 else len(self.text)
        return self._next_closing

    def _ends_call(self, json_end: int) -> bool:
        """Return whether a call ends after its JSON."""
        end = _end(_SPACES, self.text, json_end)
        rest = self.text[end : end + len(CALL_END)]
        return CALL_END.startswith(rest) or _TAG.match(rest) is not None


def _end_of_json(text: str, start: int) -> int | None:
    """Return the end of the JSON value after white space; None if there is none."""
    start = _end(_SPACES, text, start)
    # Not the whole text, because the decoder's errors count its lines.
    candidate = text[start : _end(_JSON_TEXT, text, start)]
    try:
        return start + _SYNTAX.raw_decode(candidate)[1]
    except (ValueError, RecursionError):
        return None


def _is_call(text: str, start: int) -> bool:
    """Return whether the rest of a text is JSON with exactly the keys of a call. Other JSON is an answer."""
    if _end(_JSON_TEXT, text, start) < len(text):
        return False
    try:
        value = _SYNTAX.decode(text[start:])
    except (ValueError, RecursionError):
        return False
    return isinstance(value, dict) and value.keys() - {"type"} in ({"name", "parameters"}, {"name", "arguments"})


def _end(pattern: re.Pattern[str], text: str, start: int) -> int:
    """Return the end of the match of a pattern that matches everywhere."""
    match = pattern.match(text, start)
    assert match is not None
    return match.end()


def parse_reply(reply: str, opens_thoughts: bool = False) -> ReplyParser:
    """Return the parts of a complete reply; `opens_thoughts` as for `ReplyParser`."""
    parser = ReplyParser(opens_thoughts)
    parser.add(reply, is_last=True)
    return parser


def graded_text(reply: str) -> str | None:
    """Return the part of a reply after its thoughts, or None if a `<think>` is not closed, as in a truncated reply.

    Line breaks between the thoughts and the text are left out: templates without thoughts write them into the prompt.

    >>> graded_text("<think>Is it 41? No.</think> 42"), graded_text("<think>Is it 42?")
    (' 42', None)
    """
    parser = parse_reply(reply)
    if parser.in_thoughts:
        return None
    return parser.answer.lstrip("\n") if parser.answer_start else parser.answer


def extract_last(pattern: str, text: str) -> str | None:
    r"""Return group 1 of the last match of `pattern` in `text`, or None if there is no match.

    The last match counts, because a reply that corrects itself ends with the final answer. For texts of a data set, and
    for patterns that need linear time; `search_reply` has a time limit.

    >>> extract_last(r"#### (-?\d+)", "first #### 41, no: #### 42")
    '42'
    """
    found = _last_match(pattern, text)
    return None if found is None else found[1]


def _last_match(pattern: str, text: str) -> re.Match[str] | None:
    matches = deque(re.finditer(pattern, text), 1)
    return matches[0] if matches else None


class Found(NamedTuple):
    """A match in a reply."""

    group: str | None
    """Group 1; None if the pattern has none, or it took no part in the match."""
    following: str
    """Start of the text after the group."""


def search_reply(pattern: str, text: str, *, whole: bool = False) -> Found | None:
    r"""Return the last match in a reply, or None; searches in another process with a time limit.

    Blocks; may be called in any thread. With `whole`, only a match of the whole text counts.

    Raises:
        NoAnswerError: if the search exceeds a limit on time or memory.

    >>> search_reply(r"is (\d+)", "it is 41, no, it is 42.")
    Found(group='42', following='.')
    """
    request = {"pattern": pattern, "text": text, "whole": whole}
    found = ask("marin_rl.rewards.reply_text:open_search", request, SEARCH_SECONDS)
    return None if found is None else Found(*found)


def open_search() -> Callable[[Mapping[str, Any]], Found | None]:
    """Return the function that searches, for the grading process."""
    return lambda request: _search(**request)


def _search(pattern: str, text: str, whole: bool) -> Found | None:
    match = re.fullmatch(pattern, text) if whole else _last_match(pattern, text)
    if match is None:
        return None
    if match.re.groups == 0 or match[1] is None:
        return Found(None, "")
    return Found(match[1], text[match.end(1) : match.end(1) + _FOLLOWING])
