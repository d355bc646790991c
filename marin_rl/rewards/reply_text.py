# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Parts of a reply: the text after its thoughts, and the matches of regular expressions."""

import re


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

    The last match counts, because a reply that corrects itself ends with the final answer.

    >>> extract_last(r"#### (-?\d+)", "first #### 41, no: #### 42")
    '42'
    """
    result = None
    for match in re.finditer(pattern, text):
        result = match.group(1)
    return result
