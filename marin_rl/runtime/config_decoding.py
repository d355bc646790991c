# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""From plain YAML values to config dataclasses and back, naming every key that does not fit.

The types are draccus's: dataclasses, choice registries and whatever has a decoder registered with it
(`jmp.Policy`, `timedelta`, …). Three things differ from `draccus.decode`, and are why this file exists:

- every wrong key is reported at once, under its full dotted name and with the nearest valid ones;
- in a union the member that has the value's own type wins, where draccus takes the first that can be
  built (`str | bool` reads `true` as `"True"`, so levanter's `jax_config` would not survive a file);
- a section that is given in part keeps its field's default for the rest, instead of its class's.
"""

import dataclasses
import difflib
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

SHOWN_CHARACTERS = 200
"""Most characters of a wrong value that a message shows."""


class ConfigError(ValueError):
    """A configuration that cannot be read; each problem names its key, the value and the remedy."""

    def __init__(self, *problems: str):
        self.problems = problems
        ValueError.__init__(self, "\n".join(problems))


def nearest(name: str, valid: Iterable[str]) -> str:
    """The end of an error message: what was probably meant, and what else there is.

    >>> nearest("sede", ["seed", "steps"])
    "did you mean 'seed'? Valid here: seed, steps"
    """
    names = [str(candidate) for candidate in valid]
    listing = f"Valid here: {', '.join(names)}" if names else "Nothing is valid here"
    close = difflib.get_close_matches(name, names, n=3, cutoff=0.6)
    close += [full for full in names if full not in close and name == "".join(word[:1] for word in full.split("_"))]
    return f"did you mean {' or '.join(map(repr, close))}? {listing}" if close else listing


def dotted(path: Sequence[str]) -> str:
    """The full name of a key."""
    return ".".join(path) or "the config"


def _plain_type(annotation: Any) -> Any:
    """A type without its arguments."""
    return typing.get_origin(annotation) or annotation


def is_section(annotation: Any) -> bool:
    """Whether values of this type are written as a mapping with fixed keys."""
    plain = _plain_type(annotation)
    return is_choice_type(plain) or (
        isinstance(plain, type)
        and dataclasses.is_dataclass(plain)
        and cast(Any, draccus.decode).dispatch(plain) is None
    )


def members(annotation: Any) -> tuple[Any, ...]:
    """The types that a union offers, None left out; a type that is no union is its own only member.

    >>> members(int | None)
    (<class 'int'>,)
    """
    if typing.get_origin(annotation) not in (typing.Union, types.UnionType):
        return (annotation,)
    return tuple(
        inner for member in typing.get_args(annotation) if member is not type(None) for inner in members(member)
    )


def section_of(annotation: Any) -> Any:
    """The one section type among a union's members, or None where there is none."""
    return next((member for member in members(annotation) if is_section(member)), None)


def _choice(registry: Any, raw: Mapping[str, Any], path: Sequence[str], base: Any = None) -> tuple[Any, dict[str, Any]]:
    """The class that a choice's mapping selects, and the mapping without its `type`."""
    fields = {key: value for key, value in raw.items() if key != CHOICE_TYPE_KEY}
    options = _option_names(registry)
    name = raw.get(CHOICE_TYPE_KEY)
    if name is None and isinstance(base, registry):
        return type(base), fields
    name = registry.default_choice_name() if name is None else name
    if name is None:
        raise ConfigError(f"{dotted(path)} needs a type: {CHOICE_TYPE_KEY} is one of {', '.join(options)}")
    if name not in options:
        raise ConfigError(
            f"{dotted((*path, CHOICE_TYPE_KEY))} is {name!r}, which is not one of its types; "
            + nearest(str(name), options)
        )
    return registry.get_choice_class(name), fields


def resolve_section(section: Any, raw: Mapping[str, Any], path: Sequence[str], base: Any = None) -> tuple[Any, dict]:
    """The concrete dataclass behind a section, and the values given for its fields.

    Raises:
        ConfigError: if it is a choice and its `type` is missing or unknown.
    """
    if is_choice_type(_plain_type(section)):
        return _choice(_plain_type(section), raw, path, base)
    return section, dict(raw)


@functools.cache
def field_types(section: Any) -> dict[str, Any]:
    """The type of each field that a section's dataclass takes, its type variables filled in."""
    origin = _plain_type(section)
    known = dict(zip(getattr(origin, "__parameters__", ()), typing.get_args(section), strict=False))
    hints = typing.get_type_hints(origin)
    return {
        field.name: known.get(hints[field.name], hints[field.name])
        for field in dataclasses.fields(origin)
        if field.init
    }


def default_of(section: Any, name: str, base: Any = None) -> Any:
    """A field's value where nothing is given: `base`'s, else its default; MISSING where it has none."""
    if isinstance(base, _plain_type(section)):
        return getattr(base, name)
    field = next(field for field in dataclasses.fields(_plain_type(section)) if field.name == name)
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def decode(annotation: Any, raw: Any, path: Sequence[str] = (), base: Any = None) -> Any:
    """Build a value of a type from what YAML gave.

    Args:
        annotation: the type: a dataclass, a choice registry, a container, a union or a scalar.
        raw: mappings, lists and scalars.
        path: the key's name, part by part, for messages.
        base: a value of the type, or None; a section takes from it whatever `raw` leaves out.

    Raises:
        ConfigError: naming every key that is unknown, missing or of the wrong type.
    """
    options = members(annotation)
    if raw is None and _allows_none(annotation):
        return None
    if len(options) > 1:
        return _decode_union(annotation, raw, path, base)
    target = options[0]
    if is_section(target):
        return _decode_section(target, raw, path, base)
    plain = _plain_type(target)
    if plain is typing.Literal:
        return _decode_literal(target, raw, path)
    if isinstance(plain, type) and issubclass(plain, Mapping):
        return _decode_mapping(target, raw, path)
    if isinstance(plain, type) and issubclass(plain, Sequence | set | frozenset) and not issubclass(plain, str | bytes):
        return _decode_items(target, raw, path)
    return _decode_scalar(plain, raw, path)


def _allows_none(annotation: Any) -> bool:
    return annotation in (Any, None, type(None)) or type(None) in typing.get_args(annotation)


def _wrong(annotation: Any, raw: Any, path: Sequence[str], reason: str = "") -> ConfigError:
    shown = repr(raw)
    shown = shown if len(shown) <= SHOWN_CHARACTERS else f"{shown[:SHOWN_CHARACTERS]}..."
    given = f"{shown} ({'null' if raw is None else type(raw).__name__})"
    return ConfigError(f"{dotted(path)} is {given}, but it takes {describe(annotation)}{reason and f': {reason}'}")


def _decode_section(section: Any, raw: Any, path: Sequence[str], base: Any) -> Any:
    if not isinstance(raw, Mapping):
        raise _wrong(section, raw, path)
    concrete, given = resolve_section(section, raw, path, base)
    base = base if type(base) is (_plain_type(concrete)) else None
    known = field_types(concrete)
    valid = [CHOICE_TYPE_KEY, *known] if is_choice_type(_plain_type(section)) else list(known)
    problems = [
        f"unknown key {dotted((*path, str(key)))}; " + nearest(str(key), valid) for key in given if key not in known
    ]
    values: dict[str, Any] = {}
    for name, annotation in known.items():
        default = default_of(concrete, name, base)
        if name in given:
            try:
                values[name] = decode(annotation, given[name], (*path, name), default)
            except ConfigError as error:
                problems.extend(error.problems)
        elif default is dataclasses.MISSING:
            problems.append(f"{dotted((*path, name))} is missing; it takes {describe(annotation)} and has no default")
        elif base is not None:
            values[name] = default
    if problems:
        raise ConfigError(*problems)
    try:
        return concrete(**values)
    except (ValueError, TypeError, AssertionError, ArithmeticError) as error:
        reason = str(error) or type(error).__name__
        raise ConfigError(f"{dotted(path)}: {reason}" if path else reason) from error


def _decode_union(annotation: Any, raw: Any, path: Sequence[str], base: Any) -> Any:
    options = members(annotation)
    candidates = [option for option in options if _has_form(option, raw)] or list(options)
    if len(candidates) == 1:
        return decode(candidates[0], raw, path, base)
    exact = sorted(candidates, key=lambda option: option is not type(raw))
    for option in exact:
        try:
            return decode(option, raw, path, base)
        except ConfigError:
            continue
    raise _wrong(annotation, raw, path)


def _has_form(annotation: Any, raw: Any) -> bool:
    """Whether a value is written the way values of a type are: as a mapping, a list or a scalar."""
    plain = _plain_type(annotation)
    is_class = isinstance(plain, type)
    if isinstance(raw, Mapping):
        return is_class and (issubclass(plain, Mapping) or dataclasses.is_dataclass(plain) or is_choice_type(plain))
    if isinstance(raw, list | tuple):
        return is_class and issubclass(plain, Sequence | set | frozenset) and not issubclass(plain, str)
    return plain is type(raw)


def _decode_literal(annotation: Any, raw: Any, path: Sequence[str]) -> Any:
    for value in typing.get_args(annotation):
        if value == raw and type(value) is type(raw):
            return value
    raise _wrong(annotation, raw, path)


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
    plain = _plain_type(annotation)
    arguments = typing.get_args(annotation) or (Any,)
    constructor: Callable[[Iterable[Any]], Any] = plain if plain in (tuple, set, frozenset) else list
    if plain is tuple and len(arguments) > 1 and arguments[1] is not Ellipsis:
        if len(arguments) != len(raw):
            raise _wrong(annotation, raw, path, f"{len(arguments)} items, not {len(raw)}")
        item_types = arguments
    else:
        item_types = (arguments[0],) * len(raw)
    return constructor(
        decode(item_type, item, (*path, str(index)))
        for index, (item_type, item) in enumerate(zip(item_types, raw, strict=True))
    )


def _decode_scalar(plain: Any, raw: Any, path: Sequence[str]) -> Any:
    if plain is Any:
        return raw
    if plain is str and type(raw) in (int, float):
        return str(raw)
    if plain is float and type(raw) is int:
        return float(raw)
    if plain in (str, int, float, bool):
        if type(raw) is not plain or raw != raw:
            raise _wrong(plain, raw, path, _scalar_hint(plain, raw))
        return raw
    if isinstance(plain, type) and issubclass(plain, enum.Enum):
        return _decode_enum(plain, raw, path)
    if plain is Path and not isinstance(raw, str):
        raise _wrong(plain, raw, path)
    try:
        return draccus.decode(plain, raw)
    except Exception as error:
        raise _wrong(plain, raw, path, str(error)) from error


def _scalar_hint(plain: type, raw: Any) -> str:
    if plain is str and isinstance(raw, bool):
        return "YAML reads yes, no, on, off, true and false as booleans; put quotes around a word"
    if raw != raw:
        return "NaN compares as false with everything"
    return ""


def _decode_enum(plain: type[enum.Enum], raw: Any, path: Sequence[str]) -> enum.Enum:
    for member in plain:
        if raw in (member.value, member.name):
            return member
    raise _wrong(plain, raw, path)


_WORDS = {int: "an integer", float: "a number", str: "text", bool: "true or false", Any: "anything", Path: "a path"}


def describe(annotation: Any) -> str:
    """A type in words, for messages and help.

    >>> describe(int | None)
    'an integer or null'
    >>> describe(list[str] | str)
    'a list (each item: text) or text'
    """
    options = members(annotation)
    if len(options) > 1 or options[0] is not annotation:
        words = [describe(option) for option in options]
        return " or ".join([*dict.fromkeys(words), *(["null"] if _allows_none(annotation) else [])])
    plain = _plain_type(annotation)
    if plain in _WORDS:
        return _WORDS[plain]
    if plain is typing.Literal:
        return f"one of {', '.join(map(str, typing.get_args(annotation)))}"
    if not isinstance(plain, type):
        return str(annotation)
    if is_choice_type(plain):
        return f"a section with a {CHOICE_TYPE_KEY} (one of {', '.join(_option_names(plain))})"
    if is_section(plain):
        return f"a section with {', '.join(field_types(annotation))}"
    if issubclass(plain, enum.Enum):
        return f"one of {', '.join(str(member.value) for member in plain)}"
    if issubclass(plain, Mapping):
        return f"a mapping (each value: {describe((typing.get_args(annotation) or (Any, Any))[1])})"
    if issubclass(plain, Sequence | set | frozenset):
        return _describe_items(plain, typing.get_args(annotation) or (Any,))
    return f"a {plain.__name__}"


def _option_names(registry: Any) -> list[str]:
    return list(registry.get_known_choices())


def _describe_items(plain: type, arguments: tuple[Any, ...]) -> str:
    if plain is tuple and len(arguments) > 1 and arguments[1] is not Ellipsis:
        return f"a list of {len(arguments)} ({', '.join(map(describe, arguments))})"
    return f"a list (each item: {describe(arguments[0])})"


def encode(value: Any, annotation: Any = Any) -> Any:
    """A config as mappings, lists and scalars that YAML can hold; the inverse of `decode`.

    Args:
        value: a config dataclass or one of its values.
        annotation: its declared type; where that is a choice, the mapping says which `type` it is.
    """
    plain = type(value)
    if plain is int and float in members(annotation) and int not in members(annotation):
        return float(value)
    if value is None or plain in (bool, int, float, str):
        return value
    if isinstance(value, enum.Enum):
        return encode(value.value)
    if dataclasses.is_dataclass(plain):
        # What levanter registers as encoder of a dataclass returns it unchanged, so fields come first.
        registered = cast(Any, draccus.encode).dispatch(plain)
        encoded = value if registered is None else draccus.encode(value)
        return encode(encoded) if encoded is not value else _encode_fields(value, annotation)
    if isinstance(value, Mapping):
        key_type, value_type = _arguments(annotation, Mapping) or (Any, Any)
        return {encode(key, key_type): encode(item, value_type) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        item_type = (_arguments(annotation, type(value)) or (Any,))[0]
        return [encode(item, item_type) for item in value]
    return encode(draccus.encode(value))


def _encode_fields(value: Any, annotation: Any) -> dict[str, Any]:
    registries = (option for option in map(_plain_type, members(annotation)) if is_choice_type(option))
    registry = next((option for option in registries if isinstance(value, option)), None)
    encoded = {} if registry is None else {CHOICE_TYPE_KEY: registry.get_choice_name(type(value))}
    return encoded | {name: encode(getattr(value, name), hint) for name, hint in field_types(type(value)).items()}


def _arguments(annotation: Any, container: type) -> tuple[Any, ...]:
    """The type arguments of the member of a union that is a container like the given one."""
    for option in members(annotation):
        plain = _plain_type(option)
        if isinstance(plain, type) and (issubclass(container, plain) or issubclass(plain, container)):
            return typing.get_args(option)
    return ()
