# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Types of config sections and their fields, and the errors of `decode`."""

import contextlib
import contextvars
import dataclasses
import enum
import functools
import math
import numbers
import operator
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, cast

import draccus
from annotated_types import Ge, GroupedMetadata, Gt, Le, Lt
from draccus.choice_types import CHOICE_TYPE_KEY
from draccus.utils import is_choice_type

from marin_rl.utils.errors import nearest
from marin_rl.utils.levanter_line import field_of_key, key_of_field, line_problem


class ConfigError(ValueError):
    """Invalid configuration. Each problem names the key, the value and the remedy."""

    def __init__(self, *problems: str):
        self.problems = tuple(dict.fromkeys(problems))
        ValueError.__init__(self, "\n".join(self.problems))


@dataclasses.dataclass(frozen=True)
class Written:
    """A scalar of a command line. Keys that take text have it as it was written: `1_000` and `yes` are text there."""

    text: str
    value: int | float | bool
    """The value that YAML reads."""


def plain_type(annotation: Any) -> Any:
    """Strip the bounds and the arguments of a type."""
    annotation = annotation.__origin__ if is_annotated(annotation) else annotation
    return typing.get_origin(annotation) or annotation


def is_annotated(annotation: Any) -> bool:
    """Return whether a type has metadata, such as the bounds of `Annotated[int, Ge(1)]`."""
    return typing.get_origin(annotation) is Annotated


def is_section(annotation: Any) -> bool:
    """Return whether values of this type are written as a mapping with fixed keys."""
    plain = plain_type(annotation)
    return is_choice_type(plain) or (
        isinstance(plain, type)
        and dataclasses.is_dataclass(plain)
        and cast(Any, draccus.decode).dispatch(plain) is None
    )


def members(annotation: Any) -> tuple[Any, ...]:
    """Members of a union without None; `(annotation,)` if it is not a union.

    >>> members(int | None)
    (<class 'int'>,)
    """
    if typing.get_origin(annotation) not in (typing.Union, types.UnionType):
        return (annotation,)
    return tuple(member for member in typing.get_args(annotation) if member is not type(None))


def section_of(annotation: Any) -> Any:
    """First section type among a union's members, or None."""
    return next((member for member in members(annotation) if is_section(member)), None)


@dataclasses.dataclass(frozen=True)
class Deferred:
    """Metadata of a field whose type takes seconds to import: `Annotated[Any, Deferred(load)]`."""

    load: Callable[[], Any]
    """Imports the type, and returns it."""


class NotRead(enum.Enum):
    """Value of a field whose type is not imported yet."""

    NOT_READ = enum.auto()

    def __repr__(self) -> str:
        return "not read yet"


NOT_READ = NotRead.NOT_READ
_deferring = contextvars.ContextVar("deferring", default=False)


@contextlib.contextmanager
def deferring() -> Iterator[None]:
    """Leave fields with a `Deferred` type for later: `decode` sets them to `NOT_READ`, `decode_rest` decodes them."""
    token = _deferring.set(True)
    try:
        yield
    finally:
        _deferring.reset(token)


def is_deferred(annotation: Any) -> bool:
    """Return whether a type is imported later."""
    return is_annotated(annotation) and any(isinstance(part, Deferred) for part in annotation.__metadata__)


def field_types(section: Any) -> dict[str, Any]:
    """Type of each constructor argument of a section's dataclass by its key, with type variables resolved.

    A type that is `Deferred` is imported, but not within `deferring`.
    """
    return _field_types(section, _deferring.get())


def _imported(annotation: Any) -> Any:
    deferred = [part for part in annotation.__metadata__ if isinstance(part, Deferred)]
    return deferred[0].load() if deferred else annotation


@functools.cache
def _field_types(section: Any, defers: bool) -> dict[str, Any]:
    origin = plain_type(section)
    known = dict(zip(getattr(origin, "__parameters__", ()), typing.get_args(section), strict=False))
    hints = typing.get_type_hints(origin, include_extras=True)
    if hints.get("sliding_window") is int:
        # Levanter declares an integer, but its mistral without a window, such as version 0.3 of the 7B model, has None.
        hints["sliding_window"] = int | None
    if not defers:
        hints = {name: _imported(hint) if is_annotated(hint) else hint for name, hint in hints.items()}
    return {
        key_of_field(origin, field.name): known.get(hints[field.name], hints[field.name])
        for field in dataclasses.fields(origin)
        if field.init
    }


def choice_name(section: Any) -> str:
    """Name of the `type` of a value of a choice."""
    return section.get_choice_name(type(section))


def default_of(section: Any, name: str, base: Any = None) -> Any:
    """Default value of a key: that of `base` if given, else the declared default, else `MISSING`.

    Within `deferring` it is `NOT_READ` if it is made by a function of a `Deferred` type.
    """
    field_name = field_of_key(plain_type(section), name)
    if base is not None:
        return getattr(base, field_name)
    field = plain_type(section).__dataclass_fields__[field_name]
    if field.default_factory is dataclasses.MISSING:
        return field.default
    return NOT_READ if is_deferred(field_types(section).get(name)) else field.default_factory()


def resolve_section(section: Any, raw: Mapping[str, Any], path: Sequence[str] = (), base: Any = None) -> Any:
    """Concrete dataclass of a section.

    Args:
        section: type of the section; for a choice, `type` in `raw` selects the dataclass.
        raw: plain values of the section.
        path: parts of the key's name, for error messages.
        base: default value of the section, whose class is selected if `raw` has no `type`; or None.

    Raises:
        ConfigError: if the section is a choice and its `type` is missing or unknown.
    """
    registry = plain_type(section)
    if not is_choice_type(registry):
        return section
    name = without_texts(raw.get(CHOICE_TYPE_KEY))
    if name is None and isinstance(base, registry):
        return type(base)
    name = registry.default_choice_name() if name is None else name
    options = sorted(registry.get_known_choices())
    if name is None:
        raise ConfigError(f"{dotted(path)} needs a type: {CHOICE_TYPE_KEY} is one of {', '.join(options)}")
    if name not in options:
        if (now := getattr(registry, "former_names", {}).get(str(name))) is not None:
            raise ConfigError(f"{dotted((*path, CHOICE_TYPE_KEY))} is {name!r}, which is now named {now}; write {now}")
        if (problem := line_problem(name)) is not None:
            raise ConfigError(f"{dotted((*path, CHOICE_TYPE_KEY))}: {problem}")
        near = nearest(str(name), options)
        own = "" if near.startswith("did you mean") else ". A type of your own needs its file in `imports`"
        raise ConfigError(f"{dotted((*path, CHOICE_TYPE_KEY))} is {name!r}, which is not one of its types; {near}{own}")
    return registry.get_choice_class(name)


_WORDS = {int: "an integer", float: "a number", str: "text", bool: "true or false", Any: "anything", Path: "a path"}


def describe(annotation: Any) -> str:
    """Description of a type, for error messages and help.

    >>> describe(int | None)
    'an integer or null'
    >>> describe(list[str] | str)
    'a list (each item: text) or text'
    >>> from annotated_types import Ge, Gt
    >>> describe(Annotated[int, Ge(1)]), describe(Annotated[float, Gt(0)] | None)
    ('an integer of at least 1', 'a number above 0 or null')
    """
    options = members(annotation)
    if len(options) > 1 or options[0] is not annotation:
        words = [describe(option) for option in options]
        return " or ".join([*dict.fromkeys(words), *(["null"] if allows_none(annotation) else [])])
    if is_annotated(annotation):
        bounds = describe_range(annotation)
        return f"{describe(annotation.__origin__)} {'of ' if bounds.startswith('at ') else ''}{bounds}".rstrip()
    plain, arguments = plain_type(annotation), typing.get_args(annotation)
    if plain in _WORDS:
        return _WORDS[plain]
    if plain is typing.Literal:
        return f"one of {', '.join(map(str, arguments))}"
    if not isinstance(plain, type):
        return str(annotation)
    if is_choice_type(plain):
        return f"a section with a {CHOICE_TYPE_KEY} (one of {', '.join(sorted(cast(Any, plain).get_known_choices()))})"
    if is_section(plain):
        return f"a section with {', '.join(field_types(annotation))}"
    if issubclass(plain, enum.Enum):
        return f"one of {', '.join(str(member.value) for member in plain)}"
    if issubclass(plain, Mapping):
        return f"a mapping (each value: {describe(arguments[1] if arguments else Any)})"
    if is_fixed_tuple(annotation):
        return f"a list of {len(arguments)} ({', '.join(map(describe, arguments))})"
    if issubclass(plain, Sequence | set | frozenset):
        return f"a list (each item: {describe(arguments[0] if arguments else Any)})"
    return f"a {plain.__name__}"


SHOWN_CHARACTERS = 200
"""Maximum characters of an invalid value in an error message."""


def wrong_type(annotation: Any, value: object, key: str, reason: str = "") -> str:
    """Describe a value that a type does not take."""
    shown = repr(value)
    shown = shown if len(shown) <= SHOWN_CHARACTERS else f"{shown[:SHOWN_CHARACTERS]}..."
    given = f"{shown} ({'null' if value is None else type(value).__name__})"
    if isinstance(value, Mapping) and members(annotation) == (str,):
        reason = (
            "YAML reads text with a colon, or in braces, as a mapping; put it in quotes, also within those of a shell"
        )
    return f"{key} is {given}, but it takes {describe(annotation)}{reason and f': {reason}'}"


def allows_none(annotation: Any) -> bool:
    """Return whether values of this type may be null."""
    return annotation in (Any, None, type(None)) or type(None) in typing.get_args(annotation)


def is_fixed_tuple(annotation: Any) -> bool:
    """Return whether a type is a tuple with a type for each item."""
    arguments = typing.get_args(annotation)
    return plain_type(annotation) is tuple and len(arguments) > 1 and arguments[1] is not Ellipsis


def dotted(path: Sequence[str]) -> str:
    """Dotted name of a key."""
    return ".".join(path) or "the config"


def without_texts(raw: Any) -> Any:
    """Replace scalars of the command line by their values, also within mappings."""
    if isinstance(raw, Mapping):
        return {key: without_texts(value) for key, value in raw.items()}
    return raw.value if isinstance(raw, Written) else raw


# Ranges of numbers.

_BOUNDS: dict[type, tuple[Any, str]] = {
    Ge: (operator.ge, "at least"),
    Gt: (operator.gt, "above"),
    Le: (operator.le, "at most"),
    Lt: (operator.lt, "below"),
}


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
