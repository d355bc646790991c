# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Regular expressions in configs."""

import dataclasses
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


@dataclasses.dataclass(frozen=True)
class FormatConfig:
    """Reward for the format of a reply, independent of its correctness."""

    regex: str
    """Regular expression that the whole reply must match; start it with `(?s)` to let `.` cross lines."""
    weight: float = 1.0
    """Reward for a reply that matches; other replies get 0."""

    def __post_init__(self) -> None:
        check_pattern("format.regex", self.regex)

    def reward(self, reply: str) -> float:
        """Return the reward component `format` of a reply.

        >>> FormatConfig(regex=r"-?[0-9]+", weight=0.5).reward("46")
        0.5
        """
        return self.weight if re.fullmatch(self.regex, reply) else 0.0
