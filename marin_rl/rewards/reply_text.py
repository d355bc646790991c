# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Parts of a reply: the text after its thoughts, and the matches of regular expressions.

A regular expression from a config may need exponential time for a reply, and Python cannot interrupt it. So replies are
searched in a [grading process][marin_rl.rewards.grading_process]: `search_reply`.
"""

import logging
import re
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from marin_rl.rewards.grading_process import NoAnswerError, ask

logger = logging.getLogger(__name__)

SEARCH_SECONDS = 1.0
"""CPU time after which the search of a reply is given up."""
_FOLLOWING = 100
"""Characters after a match that `Found.following` holds."""


def check_pattern(field: str, pattern: str, groups: int = 0) -> None:
    """Validate a regular expression from a config.

    Args:
        field: name of the config field, for the message.
        pattern: the regular expression, in Python's syntax.
        groups: minimum number of groups.

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


def without_thoughts(reply: str) -> str:
    """Return the part of a reply after its last `</think>`; the whole reply if it has none.

    >>> without_thoughts("<think>Which?</think> 42")
    ' 42'
    """
    return reply.rpartition("</think>")[2]


def graded_text(reply: str) -> str | None:
    """Return the part of a reply after its thoughts, or None if a `<think>` is not closed, as in a truncated reply.

    >>> graded_text("<think>Is it 41? No.</think> 42"), graded_text("<think>Is it 42?")
    (' 42', None)
    """
    text = without_thoughts(reply)
    return None if "<think>" in text else text


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
    r"""Search a reply in another process, with a time limit. Blocks; may be called in any thread.

    Args:
        pattern: the regular expression.
        text: the reply, or a part of it.
        whole: whether the whole text must match.

    Returns:
        The last match. None if there is none, or the search exceeds a limit, which is logged as a warning.

    >>> search_reply(r"is (\d+)", "it is 41, no, it is 42.")
    Found(group='42', following='.')
    """
    request = {"pattern": pattern, "text": text, "whole": whole}
    try:
        found = ask("marin_rl.rewards.reply_text:open_search", request, SEARCH_SECONDS)
    except NoAnswerError as error:
        logger.warning("the search for %r in a reply was given up, no match: %s: %.200r", pattern, error, text)
        return None
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
