# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Conversion of enum fields in config classes that are built in Python code, without the config decoder."""

import dataclasses
import enum
import functools
import typing
from typing import Any


def convert_enum_fields(config: Any) -> None:
    """Replace the values of enum fields by enum members. Every config class with enum fields calls this on creation.

    Without it, `GigpoConfig(normalize="std")` would contain a string, and a comparison with `is` would silently take
    the wrong branch.

    Args:
        config: an instance of a frozen dataclass; fields of type `E` or `E | None` with an enum `E` are converted.

    Raises:
        ValueError: if a value is not the value of a member; the message names class, field, value and choices.
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
    """Enum type by field name, for the fields that have one."""
    hints = typing.get_type_hints(cls)
    return {
        field.name: kind
        for field in dataclasses.fields(cls)
        for kind in (hints[field.name], *typing.get_args(hints[field.name]))
        if isinstance(kind, type) and issubclass(kind, enum.Enum)
    }
