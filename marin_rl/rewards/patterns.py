# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Regular expressions that a config holds: checked early, and used in one way everywhere."""

import dataclasses
import re


def check_pattern(field: str, pattern: str, groups: int = 0) -> None:
    """Check a regular expression from a config.

    Args:
        field: the config field that holds it, for the message.
        pattern: the regular expression, in Python's syntax.
        groups: fewest groups that it must have.

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
            "put parentheses around the part to use"
        )


def extract_last(pattern: str, text: str) -> str | None:
    r"""Group 1 of the last place where `pattern` matches, or None where it matches nowhere.

    The last one, because a reply that corrects itself ends with what it means.

    >>> extract_last(r"#### (-?\d+)", "first #### 41, no: #### 42")
    '42'
    """
    found = None
    for match in re.finditer(pattern, text):
        found = match.group(1)
    return found


@dataclasses.dataclass(frozen=True)
class FormatConfig:
    """A reward for a reply's form, apart from whether it is right."""

    regex: str
    """Regular expression that the whole reply must match; start it with `(?s)` to let `.` cross lines."""
    weight: float = 1.0
    """Reward for a reply that matches; one that does not gets 0."""

    def __post_init__(self) -> None:
        check_pattern("format.regex", self.regex)

    def reward(self, reply: str) -> float:
        """The reward component `format` of a reply.

        >>> FormatConfig(regex=r"-?[0-9]+", weight=0.5).reward("46")
        0.5
        """
        return self.weight if re.fullmatch(self.regex, reply) else 0.0
