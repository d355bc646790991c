# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Checks of config fields by their types: ranges of numbers, and members of enums.

A field declares its range with the bounds of `annotated_types`, as in `Annotated[int, Ge(1)]` or
`Annotated[float, Gt(0), Le(1)] | None`. A text after the bounds is added to the error message. All numbers must be
finite, also those without bounds. `decode` checks the values of config files, `ConfigSection` those of a config that is
built in Python.
"""

import dataclasses
import functools
import math
import numbers
import operator
import types
import typing
from typing import Annotated, Any

from annotated_types import Ge, GroupedMetadata, Gt, Le, Lt

from marin_rl.utils.settings.fields import convert_enum_fields

_BOUNDS: dict[type, tuple[Any, str]] = {
    Ge: (operator.ge, "at least"),
    Gt: (operator.gt, "above"),
    Le: (operator.le, "at most"),
    Lt: (operator.lt, "below"),
}


class ConfigSection:
    """Base of config dataclasses, which checks their fields at construction.

    A class with a `__post_init__` of its own calls `check_fields` in it.
    """

    def __post_init__(self) -> None:
        """Convert enums and check ranges; see `check_fields`."""
        check_fields(self)


def check_fields(config: Any) -> None:
    """Convert the enums of a config, and check that its numbers are finite and in the declared ranges.

    Raises:
        ValueError: if a value is invalid; the message has a line for each, with class, field, value and range.
    """
    convert_enum_fields(config)
    problems = [
        range_problem(annotation, getattr(config, name), f"{type(config).__name__}.{name}")
        for name, annotation in _annotations(type(config)).items()
    ]
    if any(problems):
        raise ValueError("\n".join(filter(None, problems)))


def range_problem(annotation: Any, value: object, key: str) -> str:
    """Describe why a number is not valid; empty if it is, or if the value is not a number.

    `annotation` is the type of the field, with its bounds; `key` names the field in the message.

    >>> range_problem(Annotated[int, Ge(1)] | None, 0, "rollouts.max_tokens")
    'rollouts.max_tokens is 0; it must be at least 1, or null'
    >>> range_problem(Annotated[int, Ge(2), "one to fall back to"], 1, "checkpoint.keep_last")
    'checkpoint.keep_last is 1; it must be at least 2, one to fall back to'
    """
    if not isinstance(value, numbers.Real):
        return ""
    options = typing.get_args(annotation) if typing.get_origin(annotation) in _UNIONS else (annotation,)
    ranged = next((option for option in options if typing.get_origin(option) is Annotated), annotation)
    is_finite = math.isfinite(value)
    if is_finite and all(_BOUNDS[kind][0](value, limit) for kind, limit in _bounds(ranged).items()):
        return ""
    words = " and ".join(filter(None, ["" if is_finite else "finite", describe_range(ranged)]))
    remedies = [text for text in getattr(ranged, "__metadata__", ()) if isinstance(text, str)]
    alternatives = ["or null"] if type(None) in options else []
    return f"{key} is {value}; it must be {', '.join([words, *alternatives, *remedies])}"


def describe_range(annotation: Any) -> str:
    """Words for the bounds of an annotated type; empty if it has none.

    >>> from annotated_types import Interval
    >>> describe_range(Annotated[float, Ge(0), Le(1)]), describe_range(Annotated[float, Interval(gt=0, lt=1)])
    ('from 0 to 1', 'above 0 and below 1')
    """
    bounds = _bounds(annotation)
    if bounds.keys() == {Ge, Le}:
        return f"from {bounds[Ge]} to {bounds[Le]}"
    return " and ".join(f"{_BOUNDS[kind][1]} {limit}" for kind, limit in bounds.items())


_UNIONS = (typing.Union, types.UnionType)


def _bounds(annotation: Any) -> dict[type, Any]:
    """Limits of an annotated type by the type of the bound."""
    metadata = getattr(annotation, "__metadata__", ())
    items = [part for item in metadata for part in (item if isinstance(item, GroupedMetadata) else (item,))]
    return {type(item): getattr(item, type(item).__name__.lower()) for item in items if type(item) in _BOUNDS}


@functools.cache
def _annotations(cls: type) -> dict[str, Any]:
    """Types of the fields of a dataclass, with their bounds."""
    hints = typing.get_type_hints(cls, include_extras=True)
    return {field.name: hints[field.name] for field in dataclasses.fields(cls)}  # pyrefly: ignore[bad-argument-type]
