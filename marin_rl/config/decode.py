# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Decode plain YAML values to config dataclasses, and encode them again.

Supports the types of draccus: dataclasses, choice registries and types with a registered decoder
(`jmp.Policy`, `timedelta`, …). Differences from `draccus.decode`:

- Errors report all invalid keys at once, with their full dotted names and the nearest valid keys.
- In a union, the member with the value's exact type is preferred. Draccus uses the first member that accepts the
  value: it decodes `true` as `"True"` for `str | bool`, which changes levanter's `jax_config`.
- Keys missing in a section are taken from the default of the section's field, not from the defaults of its class.
"""

import contextlib
import dataclasses
import enum
import functools
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import draccus
from draccus.choice_types import CHOICE_TYPE_KEY
from draccus.utils import is_choice_type

from marin_rl.errors import nearest

SHOWN_CHARACTERS = 200
"""Maximum characters of an invalid value in an error message."""


class ConfigError(ValueError):
    """Invalid configuration. Each problem names the key, the value and the remedy."""

    def __init__(self, *problems: str):
        self.problems = problems
        ValueError.__init__(self, "\n".join(problems))


# Types of fields.


def plain_type(annotation: Any) -> Any:
    """Strip the arguments of a generic type."""
    return typing.get_origin(annotation) or annotation


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


@functools.cache
def field_types(section: Any) -> dict[str, Any]:
    """Type of each constructor argument of a section's dataclass, with type variables resolved."""
    origin = plain_type(section)
    known = dict(zip(getattr(origin, "__parameters__", ()), typing.get_args(section), strict=False))
    hints = typing.get_type_hints(origin)
    return {
        field.name: known.get(hints[field.name], hints[field.name])
        for field in dataclasses.fields(origin)
        if field.init
    }


def default_of(section: Any, name: str, base: Any = None) -> Any:
    """Default value of a field: that of `base` if given, else the declared default, else `MISSING`."""
    if base is not None:
        return getattr(base, name)
    field = plain_type(section).__dataclass_fields__[name]
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


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
    name = raw.get(CHOICE_TYPE_KEY)
    if name is None and isinstance(base, registry):
        return type(base)
    name = registry.default_choice_name() if name is None else name
    options = list(registry.get_known_choices())
    if name is None:
        raise ConfigError(f"{_dotted(path)} needs a type: {CHOICE_TYPE_KEY} is one of {', '.join(options)}")
    if name not in options:
        raise ConfigError(
            f"{_dotted((*path, CHOICE_TYPE_KEY))} is {name!r}, which is not one of its types; "
            + nearest(str(name), options)
        )
    return registry.get_choice_class(name)


_WORDS = {int: "an integer", float: "a number", str: "text", bool: "true or false", Any: "anything", Path: "a path"}


def describe(annotation: Any) -> str:
    """Description of a type, for error messages and help.

    >>> describe(int | None)
    'an integer or null'
    >>> describe(list[str] | str)
    'a list (each item: text) or text'
    """
    options = members(annotation)
    if len(options) > 1 or options[0] is not annotation:
        words = [describe(option) for option in options]
        return " or ".join([*dict.fromkeys(words), *(["null"] if _allows_none(annotation) else [])])
    plain, arguments = plain_type(annotation), typing.get_args(annotation)
    if plain in _WORDS:
        return _WORDS[plain]
    if plain is typing.Literal:
        return f"one of {', '.join(map(str, arguments))}"
    if not isinstance(plain, type):
        return str(annotation)
    if is_choice_type(plain):
        return f"a section with a {CHOICE_TYPE_KEY} (one of {', '.join(cast(Any, plain).get_known_choices())})"
    if is_section(plain):
        return f"a section with {', '.join(field_types(annotation))}"
    if issubclass(plain, enum.Enum):
        return f"one of {', '.join(str(member.value) for member in plain)}"
    if issubclass(plain, Mapping):
        return f"a mapping (each value: {describe(arguments[1] if arguments else Any)})"
    if _is_fixed_tuple(annotation):
        return f"a list of {len(arguments)} ({', '.join(map(describe, arguments))})"
    if issubclass(plain, Sequence | set | frozenset):
        return f"a list (each item: {describe(arguments[0] if arguments else Any)})"
    return f"a {plain.__name__}"


def _allows_none(annotation: Any) -> bool:
    return annotation in (Any, None, type(None)) or type(None) in typing.get_args(annotation)


def _is_fixed_tuple(annotation: Any) -> bool:
    arguments = typing.get_args(annotation)
    return plain_type(annotation) is tuple and len(arguments) > 1 and arguments[1] is not Ellipsis


# Decoding.


def decode(annotation: Any, raw: Any, path: Sequence[str] = (), base: Any = None) -> Any:
    """Build a value of a type from plain YAML values.

    Args:
        annotation: target type: a dataclass, choice registry, container, union or scalar type.
        raw: nested mappings, lists and scalars.
        path: parts of the key's name, for error messages.
        base: value of the type with the defaults for keys that a section in `raw` does not contain; None for the
            defaults of the class.

    Returns:
        A value of type `annotation`.

    Raises:
        ConfigError: if keys are unknown, missing or of the wrong type; the message names all of them.
    """
    options = members(annotation)
    if raw is None and _allows_none(annotation):
        return None
    if len(options) > 1:
        return _decode_union(annotation, raw, path, base)
    target = options[0]
    plain = plain_type(target)
    if is_section(target):
        return _decode_section(target, raw, path, base)
    if isinstance(plain, type) and issubclass(plain, Mapping):
        return _decode_mapping(target, raw, path)
    if isinstance(plain, type) and issubclass(plain, Sequence | set | frozenset) and not issubclass(plain, str | bytes):
        return _decode_items(target, raw, path)
    return _decode_scalar(target, raw, path)


def _dotted(path: Sequence[str]) -> str:
    return ".".join(path) or "the config"


def _wrong(annotation: Any, raw: Any, path: Sequence[str], reason: str = "") -> ConfigError:
    shown = repr(raw)
    shown = shown if len(shown) <= SHOWN_CHARACTERS else f"{shown[:SHOWN_CHARACTERS]}..."
    given = f"{shown} ({'null' if raw is None else type(raw).__name__})"
    return ConfigError(f"{_dotted(path)} is {given}, but it takes {describe(annotation)}{reason and f': {reason}'}")


def _decode_section(section: Any, raw: Any, path: Sequence[str], base: Any) -> Any:
    if not isinstance(raw, Mapping):
        is_type = is_choice_type(plain_type(section)) and raw in list(plain_type(section).get_known_choices())
        raise _wrong(section, raw, path, f"write {{{CHOICE_TYPE_KEY}: {raw}}}" if is_type else "")
    concrete = resolve_section(section, raw, path, base)
    base = base if type(base) is plain_type(concrete) else None
    known = field_types(concrete)
    valid = [CHOICE_TYPE_KEY, *known] if is_choice_type(plain_type(section)) else list(known)
    problems = [
        f"unknown key {_dotted((*path, str(key)))}; {nearest(str(key), valid)}" for key in raw if key not in valid
    ]
    values: dict[str, Any] = {}
    for name, annotation in known.items():
        default = default_of(concrete, name, base)
        if name in raw:
            try:
                values[name] = decode(annotation, raw[name], (*path, name), default)
            except ConfigError as error:
                problems.extend(error.problems)
        elif default is dataclasses.MISSING:
            problems.append(f"{_dotted((*path, name))} is missing; it takes {describe(annotation)} and has no default")
        elif base is not None:
            values[name] = default
    if problems:
        raise ConfigError(*problems)
    try:
        return concrete(**values)
    except (ValueError, TypeError, AssertionError, ArithmeticError) as error:
        reason = str(error) or type(error).__name__
        is_named = not path or reason.startswith(f"{_dotted(path)}.")
        raise ConfigError(reason if is_named else f"{_dotted(path)}: {reason}") from error


def _decode_union(annotation: Any, raw: Any, path: Sequence[str], base: Any) -> Any:
    options = members(annotation)
    candidates = [option for option in options if _has_form(option, raw)] or list(options)
    if len(candidates) == 1:
        return decode(candidates[0], raw, path, base)
    for option in sorted(candidates, key=lambda option: option is not type(raw)):
        with contextlib.suppress(ConfigError):
            return decode(option, raw, path, base)
    raise _wrong(annotation, raw, path)


def _has_form(annotation: Any, raw: Any) -> bool:
    """Return whether a raw value has the same form (mapping, list or scalar) as values of a type."""
    plain = plain_type(annotation)
    is_class = isinstance(plain, type)
    if isinstance(raw, Mapping):
        return is_class and (issubclass(plain, Mapping) or dataclasses.is_dataclass(plain) or is_choice_type(plain))
    if isinstance(raw, list | tuple):
        return is_class and issubclass(plain, Sequence | set | frozenset) and not issubclass(plain, str)
    return plain is type(raw)


def _decode_mapping(annotation: Any, raw: Any, path: Sequence[str]) -> Any:
    if not isinstance(raw, Mapping):
        raise _wrong(annotation, raw, path)
    key_type, value_type = typing.get_args(annotation) or (Any, Any)
    return {
        decode(key_type, key, (*path, str(key))): decode(value_type, value, (*path, str(key)))
        for key, value in raw.items()
    }


def _decode_items(annotation: Any, raw: Any, path: Sequence[str]) -> Any:
    if not isinstance(raw, list | tuple):
        raise _wrong(annotation, raw, path)
    plain = plain_type(annotation)
    arguments = typing.get_args(annotation) or (Any,)
    if _is_fixed_tuple(annotation) and len(arguments) != len(raw):
        raise _wrong(annotation, raw, path, f"{len(arguments)} items, not {len(raw)}")
    item_types = arguments if _is_fixed_tuple(annotation) else (arguments[0],) * len(raw)
    constructor: Callable[[Iterable[Any]], Any] = plain if plain in (tuple, set, frozenset) else list
    return constructor(
        decode(item_type, item, (*path, str(index)))
        for index, (item_type, item) in enumerate(zip(item_types, raw, strict=True))
    )


def _decode_scalar(annotation: Any, raw: Any, path: Sequence[str]) -> Any:
    plain = plain_type(annotation)
    if plain is Any:
        return raw
    if plain is str and type(raw) is int:
        return str(raw)
    if plain is float and type(raw) is int:
        return float(raw)
    if plain in (str, int, float, bool):
        if type(raw) is plain and raw == raw:
            return raw
        hint = "NaN is not allowed" if raw != raw else ""
        if plain is str and isinstance(raw, bool):
            hint = "YAML reads yes, no, on, off, true and false as booleans; quote the word"
        if plain is str and isinstance(raw, float):
            hint = f"write it in quotes, as '\"{raw}\"' on a command line, because YAML reads 1.10 as 1.1"
        raise _wrong(plain, raw, path, hint)
    if plain is typing.Literal:
        matching = [value for value in typing.get_args(annotation) if value == raw and type(value) is type(raw)]
    elif isinstance(plain, type) and issubclass(plain, enum.Enum):
        matching = [member for member in plain if raw in (member.value, member.name)]
    elif plain is Path and not isinstance(raw, str):
        matching = []
    else:
        try:
            return draccus.decode(plain, raw)
        except Exception as error:
            raise _wrong(plain, raw, path, str(error)) from error
    if not matching:
        raise _wrong(annotation, raw, path)
    return matching[0]


# Encoding.


def encode(value: Any, annotation: Any = Any) -> Any:
    """Convert a config to plain YAML values; the inverse of `decode`. Keys `without_effect` are left out.

    Args:
        value: a config dataclass or one of its values.
        annotation: declared type; if it is a choice, the mapping contains the selected `type`.

    Returns:
        Nested mappings, lists and scalars.
    """
    plain = type(value)
    if plain is int and float in members(annotation) and int not in members(annotation):
        return float(value)
    if value is None or plain in (bool, int, float, str):
        return value
    if isinstance(value, enum.Enum):
        return encode(value.value)
    if dataclasses.is_dataclass(plain):
        # Levanter registers encoders that return a dataclass unchanged; its fields are encoded then.
        registered = cast(Any, draccus.encode).dispatch(plain)
        encoded = value if registered is None else draccus.encode(value)
        return encode(encoded) if encoded is not value else _encode_fields(value, annotation)
    if isinstance(value, Mapping):
        key_type, value_type = _arguments(annotation, Mapping) or (Any, Any)
        return {encode(key, key_type): encode(item, value_type) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        item_type = (_arguments(annotation, plain) or (Any,))[0]
        return [encode(item, item_type) for item in value]
    return encode(draccus.encode(value))


def _encode_fields(value: Any, annotation: Any) -> dict[str, Any]:
    registries = (option for option in map(plain_type, members(annotation)) if is_choice_type(option))
    registry = next((option for option in registries if isinstance(value, option)), None)
    encoded = {} if registry is None else {CHOICE_TYPE_KEY: registry.get_choice_name(type(value))}
    encoded |= {name: encode(getattr(value, name), hint) for name, hint in field_types(type(value)).items()}
    for field in dataclasses.fields(value):
        for name in field.metadata.get("without_effect", ()):
            del encoded[field.name][name]
    return encoded


def _arguments(annotation: Any, container: type) -> tuple[Any, ...]:
    """Type arguments of the first union member that is a subtype or supertype of `container`."""
    for option in members(annotation):
        plain = plain_type(option)
        if isinstance(plain, type) and (issubclass(container, plain) or issubclass(plain, container)):
            return typing.get_args(option)
    return ()
