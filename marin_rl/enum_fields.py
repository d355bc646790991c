# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Enum fields of config classes that are built in code, where no decoder has checked the values."""

import dataclasses
import enum
import functools
import typing
from typing import Any


def convert_enum_fields(config: Any) -> None:
    """Replace the plain values of enum fields by enum members. Every config class calls this in `__post_init__`.

    Without it `GigpoConfig(normalize="std")` would hold a string, and comparisons with `is` would choose another
    branch without an error.

    Args:
        config: an instance of a frozen dataclass; fields of type `E` or `E | None` with an enum `E` are converted.

    Raises:
        ValueError: if a value is no member's value; the message names class, field, value and choices.
    """
    for name, kind in _enum_fields(type(config)).items():
        value = getattr(config, name)
        if value is None or isinstance(value, kind):
            continue
        try:
            member = kind(value)
        except ValueError as error:
            choices = ", ".join(str(member.value) for member in kind)
            raise ValueError(f"{type(config).__name__}.{name} is {value!r}; it takes one of {choices}") from error
        object.__setattr__(config, name, member)


@functools.cache
def _enum_fields(cls: Any) -> dict[str, type[enum.Enum]]:
    """The enum type of each field that has one."""
    hints = typing.get_type_hints(cls)
    return {
        field.name: kind
        for field in dataclasses.fields(cls)
        for kind in (hints[field.name], *typing.get_args(hints[field.name]))
        if isinstance(kind, type) and issubclass(kind, enum.Enum)
    }
