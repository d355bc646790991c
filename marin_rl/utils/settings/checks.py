# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Checks of config fields by their types: classes of values, ranges of numbers, and members of enums.

A field declares its range with the bounds of `annotated_types`, as in `Annotated[int, Ge(1)]` or
`Annotated[float, Gt(0), Le(1)] | None`. A text after the bounds is added to the error message. All numbers must be
finite, also those without bounds. `decode` checks the values of config files, `ConfigSection` those of a config that is
built in Python, with the same sentences.
"""

import dataclasses
import enum
import functools
import numbers
import os
import typing
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, ClassVar

from marin_rl.utils.settings.decode import decode
from marin_rl.utils.settings.section_types import (
    NOT_READ,
    ConfigError,
    allows_none,
    is_annotated,
    is_deferred,
    is_fixed_tuple,
    members,
    plain_type,
    range_problem,
    wrong_type,
)


class ConfigSection:
    """Base of config dataclasses, which checks their fields at construction.

    A class with a `__post_init__` of its own calls `check_fields` in it.
    """

    is_whole_config: ClassVar[bool] = False
    """Whether its fields are the first parts of the keys of a config file."""

    def __post_init__(self) -> None:
        """Convert enums, and check types and ranges; see `check_fields`."""
        check_fields(self)


def check_fields(config: Any) -> None:
    """Convert the enums and paths of a config, and check that its values have the declared types and ranges.

    Raises:
        ConfigError: if a value is invalid; the message has a line for each, with class, field, value and range.
    """
    prefix = "" if getattr(config, "is_whole_config", False) else f"{type(config).__name__}."
    problems = []
    for name, annotation in _annotations(type(config)).items():
        value = getattr(config, name)
        if accepts(annotation, value):
            problems.append(range_problem(annotation, value, f"{prefix}{name}"))
        elif (converted := _converted(annotation, value)) is not None:
            object.__setattr__(config, name, converted)
        else:
            problems += type_problems(annotation, value, f"{prefix}{name}")
    if any(problems):
        raise ConfigError(*filter(None, problems))


def type_problems(annotation: Any, value: object, key: str) -> Sequence[str]:
    """Describe a value that is not accepted, as `decode` does."""
    try:
        decode(annotation, value, (key,))
    except ConfigError as error:
        return error.problems
    # Such as a mapping in place of a section.
    return [wrong_type(annotation, value, key)]


def _converted(annotation: Any, value: object) -> Any:
    """Return a path as text, or the value of an enum as its member, if the type takes that; otherwise None."""
    if isinstance(value, os.PathLike):
        return os.fspath(value) if accepts(annotation, "") else None
    kinds = [plain_type(option) for option in members(annotation)]
    enums = [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, enum.Enum)]
    return next((member for kind in enums for member in kind if value == member.value), None)


_SCALARS: dict[Any, Any] = {bool: bool, int: numbers.Integral, float: numbers.Real}
"""The class of the values of a scalar type; numpy's numbers are of these classes."""


def accepts(annotation: Any, value: object) -> bool:
    """Return whether a value may be that of a field of a type, as far as the type is known here."""
    options = members(annotation)
    if len(options) > 1 or options[0] is not annotation:
        return (value is None and allows_none(annotation)) or any(accepts(option, value) for option in options)
    if is_deferred(annotation) or value is NOT_READ:
        return True
    if is_annotated(annotation):
        return accepts(annotation.__origin__, value)
    plain, arguments = plain_type(annotation), typing.get_args(annotation)
    if plain is typing.Literal:
        return value in arguments
    if plain in (None, type(None)):
        return value is None
    if plain is Any or not isinstance(plain, type) or getattr(plain, "_is_protocol", False):
        return True
    if plain in _SCALARS:
        return isinstance(value, _SCALARS[plain]) and (plain is bool or not isinstance(value, bool))
    if issubclass(plain, Mapping):
        return isinstance(value, Mapping) and all(accepts(arguments[1], item) for item in value.values() if arguments)
    if issubclass(plain, Sequence | AbstractSet) and not issubclass(plain, str | bytes):
        items = value if isinstance(value, list | tuple | set | frozenset) else None
        if items is None or (is_fixed_tuple(annotation) and len(items) != len(arguments)):
            return False
        kinds = arguments if is_fixed_tuple(annotation) else (*arguments[:1], Any)[:1] * len(items)
        return all(map(accepts, kinds, items))
    return isinstance(value, plain)


@functools.cache
def _annotations(cls: type) -> dict[str, Any]:
    """Types of the fields of a dataclass, with their bounds."""
    hints = typing.get_type_hints(cls, include_extras=True)
    return {field.name: hints[field.name] for field in dataclasses.fields(cls)}  # pyrefly: ignore[bad-argument-type]
