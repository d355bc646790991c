# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Decode plain YAML values to config dataclasses, and encode them again.

Supports the types of draccus: dataclasses, choice registries and types with a registered decoder
(`jmp.Policy`, `timedelta`, …). Differences from `draccus.decode`:

- Errors report all invalid keys at once, with their full dotted names and the nearest valid keys.
- In a union, the member with the value's exact type is preferred. Draccus uses the first member that accepts the
  value: it decodes `true` as `"True"` for `str | bool`, which changes levanter's `jax_config`.
- A section may name `keys_without_effect`, each with its remedy; null is accepted for them.
- Keys missing in a section are taken from the default of the section's field, not from the defaults of its class.
- A key that only the other line of levanter has is accepted if its value is the default there.
"""

import contextlib
import dataclasses
import difflib
import enum
import math
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import draccus
from draccus.choice_types import CHOICE_TYPE_KEY
from draccus.utils import is_choice_type

from marin_rl.utils.errors import nearest
from marin_rl.utils.levanter_line import OTHER, field_of_key, is_default_of_other_line, is_key_of_other_line
from marin_rl.utils.settings.section_types import (
    NOT_READ,
    ConfigError,
    Written,
    allows_none,
    default_of,
    describe,
    dotted,
    field_types,
    is_annotated,
    is_deferred,
    is_fixed_tuple,
    is_section,
    members,
    plain_type,
    range_problem,
    resolve_section,
    section_of,
    without_texts,
    wrong_type,
)

LISTED_KEYS = 4
"""Maximum keys of other types that an error message lists."""


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
        ConfigError: if keys are unknown or missing, or values have the wrong type or are out of range; the message
            names all of them.
    """
    options = members(annotation)
    if isinstance(raw, Written):
        raw = raw.text if options == (str,) else raw.value
    if raw is None and allows_none(annotation):
        return None
    if len(options) > 1:
        return _decode_union(annotation, raw, path, base)
    target = options[0]
    if is_annotated(target):
        value = decode(target.__origin__, raw, path, base)
        if problem := range_problem(annotation, value, dotted(path)):
            raise ConfigError(problem)
        return value
    plain = plain_type(target)
    if is_section(target):
        return _decode_section(target, raw, path, base)
    if isinstance(plain, type) and issubclass(plain, Mapping):
        return _decode_mapping(target, raw, path)
    if isinstance(plain, type) and issubclass(plain, Sequence | set | frozenset) and not issubclass(plain, str | bytes):
        return _decode_items(target, raw, path)
    return _decode_scalar(target, raw, path)


def _wrong(annotation: Any, raw: Any, path: Sequence[str], reason: str = "") -> ConfigError:
    return ConfigError(wrong_type(annotation, without_texts(raw), dotted(path), reason))


def _decode_section(section: Any, raw: Any, path: Sequence[str], base: Any) -> Any:
    if not isinstance(raw, Mapping):
        raise _wrong(section, raw, path, _as_type(section, raw))
    concrete = resolve_section(section, raw, path, base)
    base = base if type(base) is plain_type(concrete) else None
    known = field_types(concrete)
    valid = [CHOICE_TYPE_KEY, *known] if is_choice_type(plain_type(section)) else list(known)
    ignored: Mapping[str, str] = getattr(plain_type(concrete), "keys_without_effect", {})
    unknown = [
        str(key)
        for key, value in raw.items()
        if key not in valid
        and key not in ignored
        and not is_default_of_other_line(plain_type(concrete), key, without_texts(value))
    ]
    problems = [
        f"{dotted((*path, key))} is {without_texts(raw[key])!r}, but this setting has no effect: {remedy}"
        for key, remedy in ignored.items()
        if raw.get(key) is not None
    ]
    problems += [_unknown_key(section, concrete, key, valid, path) for key in unknown]
    misspelt = {name for key in unknown for name in difflib.get_close_matches(key, known)}
    values: dict[str, Any] = {}
    for name, annotation in known.items():
        default = default_of(concrete, name, base)
        if is_deferred(annotation):
            if default is NOT_READ or raw.get(name, default) != default:
                values[name] = NOT_READ
            continue
        if name in raw:
            try:
                values[name] = decode(annotation, raw[name], (*path, name), default)
            except ConfigError as error:
                problems += error.problems
        elif default is dataclasses.MISSING and name not in misspelt:
            problems.append(f"{dotted((*path, name))} is missing; it takes {describe(annotation)} and has no default")
        elif base is not None:
            values[name] = default
    if problems:
        raise ConfigError(*problems)
    return _construct(concrete, values, path)


def decode_rest(value: Any, raw: Mapping[str, Any], path: Sequence[str] = (), base: Any = None) -> Any:
    """Decode the fields that `decode` left for later within `deferring`.

    Args:
        value: the config, or a section of it.
        raw: its plain values.
        path: parts of the section's name.
        base: default value of the section; None for the defaults of its class.

    Returns:
        The complete config, which its class has checked.

    Raises:
        ConfigError: as `decode`.
    """
    section, problems, values = type(value), [], {}
    for name, annotation in field_types(section).items():
        item, default = getattr(value, field_of_key(section, name)), default_of(section, name, base)
        try:
            if item is NOT_READ:
                given = name in raw
                values[name] = decode(annotation, raw[name], (*path, name), default) if given else default
            elif is_section(type(item)) and any(part is NOT_READ for part in vars(item).values()):
                values[name] = decode_rest(item, raw.get(name, {}), (*path, name), default)
            else:
                values[name] = item
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(*problems)
    return _construct(section, values, path)


def _as_type(section: Any, raw: Any) -> str:
    """Remedy for a section that is only the name of a type."""
    registry = plain_type(section)
    is_type = is_choice_type(registry) and raw in list(registry.get_known_choices())
    return f"write {{{CHOICE_TYPE_KEY}: {raw}}}" if is_type else ""


def _unknown_key(section: Any, concrete: Any, key: str, valid: Sequence[str], path: Sequence[str]) -> str:
    """Describe an unknown key; a key of other types of a choice is named with them."""
    name = dotted((*path, key))
    if ":" in key:
        return f"unknown key {name}; write a space after the colon, as in {key.replace(':', ': ', 1)}"
    if is_key_of_other_line(plain_type(concrete), key):
        return f"unknown key {name}; it exists only with {OTHER} in place of the installed line of levanter"
    if not is_choice_type(plain_type(section)):
        return f"unknown key {name}; {nearest(key, valid)}"
    kind = dotted((*path, CHOICE_TYPE_KEY))
    registry = plain_type(section)
    types_by_key: dict[str, list[str]] = {}
    for choice, option in sorted(registry.get_known_choices().items()):
        for other in field_types(option):
            types_by_key.setdefault(other, []).append(choice)
    selected, suggestion = registry.get_choice_name(concrete), nearest(key, valid)
    is_near = suggestion.startswith("did you mean")
    if key in types_by_key:
        owners = f"it belongs to {kind} {' or '.join(types_by_key[key])}, but {kind} is {selected}"
        return f"unknown key {name}; {f'{suggestion} Or ' if is_near else ''}{owners}"
    others = {other: choices for other, choices in types_by_key.items() if other not in valid}
    close = difflib.get_close_matches(key, others, n=1) or (list(others) if len(others) <= LISTED_KEYS else [])
    if is_near or not close:
        return f"unknown key {name}; {suggestion}"
    listed = ", ".join(f"{dotted((*path, other))} (of {' and '.join(others[other])})" for other in close)
    return f"unknown key {name}; {kind} is {selected}. {suggestion}; other types have {listed}"


def _construct(concrete: Any, values: Mapping[str, Any], path: Sequence[str]) -> Any:
    """Build a section from its decoded values."""
    try:
        return concrete(**{field_of_key(plain_type(concrete), name): item for name, item in values.items()})
    except (ValueError, TypeError, AssertionError, ArithmeticError) as error:
        reasons = error.problems if isinstance(error, ConfigError) else [str(error) or type(error).__name__]
        raise ConfigError(*(_with_key(reason, path) for reason in reasons)) from error


def _with_key(reason: str, path: Sequence[str]) -> str:
    """Add the key of a section to a message that does not begin with it."""
    is_named = not path or reason.startswith(f"{dotted(path)}.")
    return reason if is_named else f"{dotted(path)}: {reason}"


def _decode_union(annotation: Any, raw: Any, path: Sequence[str], base: Any) -> Any:
    options = members(annotation)
    candidates = [option for option in options if _has_form(option, raw)] or list(options)
    if len(candidates) == 1:
        return decode(candidates[0], raw, path, base)
    for option in candidates:
        with contextlib.suppress(ConfigError):
            return decode(option, raw, path, base)
    section = section_of(annotation)
    raise _wrong(annotation, raw, path, "" if section is None else _as_type(section, raw))


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
        raise _wrong(annotation, raw, path, f"write [{raw}]" if isinstance(raw, str) else "")
    plain = plain_type(annotation)
    arguments = typing.get_args(annotation) or (Any,)
    if is_fixed_tuple(annotation) and len(arguments) != len(raw):
        raise _wrong(annotation, raw, path, f"{len(arguments)} items, not {len(raw)}")
    item_types = arguments if is_fixed_tuple(annotation) else (arguments[0],) * len(raw)
    constructor: Callable[[Iterable[Any]], Any] = plain if plain in (tuple, set, frozenset) else list
    return constructor(
        decode(item_type, item, (*path, str(index)))
        for index, (item_type, item) in enumerate(zip(item_types, raw, strict=True))
    )


def _decode_scalar(annotation: Any, raw: Any, path: Sequence[str]) -> Any:
    plain = plain_type(annotation)
    if plain is Any:
        return without_texts(raw)
    if plain is str and type(raw) is int:
        return str(raw)
    if plain is float and type(raw) is int:
        return float(raw)
    if plain in (str, int, float, bool):
        is_finite = not isinstance(raw, float) or math.isfinite(raw)
        if type(raw) is plain and is_finite:
            return raw
        hint = "" if is_finite else "it must be finite"
        if plain is int and isinstance(raw, float) and raw.is_integer():
            hint = f"write {int(raw)}"
        if plain is str and isinstance(raw, bool):
            hint = "YAML reads yes, no, on, off, true and false as booleans; quote the word"
        if plain is str and isinstance(raw, float):
            hint = f"write it in quotes, as '\"{raw}\"' on a command line, because YAML reads 1.10 as 1.1"
        raise _wrong(plain, raw, path, hint)
    if plain is typing.Literal:
        matching = [value for value in typing.get_args(annotation) if value == raw and type(value) is type(raw)]
    elif isinstance(plain, type) and issubclass(plain, enum.Enum):
        matching = [member for member in plain if raw in (member.value, member.name)]
    elif raw is None or (plain is Path and not isinstance(raw, str)):
        # draccus returns null for types with a decoder of their own.
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
    """Convert a config to nested mappings, lists and scalars of plain YAML; the inverse of `decode`.

    `annotation` is the declared type; if it is a choice, the mapping contains the selected `type`.
    """
    plain = type(value)
    kinds = [plain_type(option) for option in members(annotation)]
    if plain is int and float in kinds and int not in kinds:
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
    kinds = field_types(type(value)).items()
    encoded |= {name: encode(getattr(value, field_of_key(type(value), name)), hint) for name, hint in kinds}
    return encoded


def _arguments(annotation: Any, container: type) -> tuple[Any, ...]:
    """Type arguments of the first union member that is a subtype or supertype of `container`."""
    for option in members(annotation):
        plain = plain_type(option)
        if isinstance(plain, type) and (issubclass(container, plain) or issubclass(plain, container)):
            return typing.get_args(option)
    return ()
