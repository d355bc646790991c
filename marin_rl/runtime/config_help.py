# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""The `--help` text: every field of a config with its type, default and meaning.

Meanings come from where they are written: the docstring beneath a field, the comment beside or above it,
or the `Args` of the class. Choices made here are shown with all their options; levanter's, which has
hundreds of fields between them, with the selected option, and any other on request (`--help model.gemma`).
"""

import ast
import dataclasses
import functools
import inspect
import io
import json
import re
import shutil
import textwrap
import tokenize
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from draccus.choice_types import CHOICE_TYPE_KEY
from draccus.utils import is_choice_type

from marin_rl.runtime.config_decoding import (
    ConfigError,
    default_of,
    describe,
    encode,
    field_types,
    members,
    nearest,
    resolve_section,
    section_of,
)

MAX_WIDTH = 110
"""Lines longer than this are hard to read, however wide the terminal."""


@dataclasses.dataclass(frozen=True)
class _Entry:
    """One entry of the text: a field, a section's heading, or an option's."""

    key: str
    note: str
    """Type and default of a field; empty for a heading."""
    meaning: str
    depth: int = 0
    """Options of choices that it lies within."""
    is_key: bool = True
    """Whether it can be set; False for an option's heading."""


def help_text(
    config_class: Any,
    defaults: Mapping[str, Any],
    flags: Mapping[str, str] | None = None,
    section: str = "",
    width: int | None = None,
) -> str:
    """Describe every field of a config.

    Args:
        config_class: the config's dataclass.
        defaults: nested plain values that replace the class's own defaults.
        flags: the command's flags, and what each does.
        section: a key, or a key and an option (`model.qwen3`), to describe that alone; empty for everything.
        width: characters in a line; None takes the terminal's.

    Raises:
        ConfigError: if there is no such section.
    """
    width = min(width or shutil.get_terminal_size((100, 24)).columns, MAX_WIDTH)
    if section:
        return _render(_entries_of(section, config_class, defaults), width)
    options = {
        "config FILE": "YAML file with the config; --config_path is accepted too.",
        "KEY VALUE": "Sets a key of those below, over the file. VALUE is YAML: lists and mappings work too.",
        "help [SECTION]": "This text, or a section of it: --help trainer, --help model.qwen3.",
        **(flags or {}),
    }
    listed = [_Entry(f"--{name}", "", meaning, is_key=False) for name, meaning in options.items()]
    return f"Options\n{_render(listed, width)}\nKeys\n{_render(_walk(config_class, '', defaults, None), width)}"


def all_keys(config_class: Any, raw: Mapping[str, Any]) -> list[str]:
    """The dotted name of every key that a config knows, under the choices that `raw` makes."""
    return list(dict.fromkeys(entry.key for entry in _walk(config_class, "", raw, None) if entry.is_key))


def _entries_of(section: str, config_class: Any, defaults: Mapping[str, Any]) -> list[_Entry]:
    """What the whole text says about one section, or about one option of a choice."""
    entries = list(_walk(config_class, "", defaults, None))
    wanted = [entry for entry in entries if entry.key == section or entry.key.startswith(f"{section}.")]
    if wanted:
        return wanted
    key, _, option = section.rpartition(".")
    registry = _choices(config_class).get(key)
    if registry is not None and option in registry.get_known_choices():
        return list(_walk_option(registry, option, key, {}, None, 0, ()))
    names = [entry.key for entry in entries] + [f"{key}.{name}" for name in (registry or _NO_CHOICE).get_known_choices()]
    close = difflib.get_close_matches(section, names, n=3, cutoff=0.6)
    hint = f"did you mean {' or '.join(close)}?" if close else "--help lists them all"
    raise ConfigError(f"--help {section}: there is no such key or option; {hint}")


def _walk(
    section: Any, prefix: str, raw: Mapping[str, Any], base: Any, depth: int = 0, within: tuple[Any, ...] = ()
) -> Iterator[_Entry]:
    """The entries of a section's fields and of the sections within it."""
    for name, annotation in field_types(section).items():
        default = default_of(section, name, base)
        given = raw.get(name, default)
        key, meaning = f"{prefix}{name}", meaning_of(section, name)
        inner, place = section_within(annotation)
        is_only_section = inner is annotation and not _is_choice(inner)
        yield _Entry(key, "" if is_only_section else f"{describe_kind(annotation)}{_default(given)}", meaning, depth)
        if inner is None or inner in within:
            continue
        values, value_base = (given, default) if not place else (None, None)
        if _is_choice(inner):
            yield from _walk_choice(inner, f"{key}{place}", values, value_base, depth, (*within, inner))
        else:
            inner_raw = values if isinstance(values, Mapping) else {}
            inner_base = next((value for value in (values, value_base) if _is_instance(value, inner)), None)
            yield from _walk(inner, f"{key}{place}.", inner_raw, inner_base, depth, (*within, inner))


def _walk_choice(
    registry: Any, key: str, given: Any, default: Any, depth: int, within: tuple[Any, ...]
) -> Iterator[_Entry]:
    """Every option of a choice of this project's or a user's, and the selected one of levanter's."""
    selected = _selected(registry, given, default)
    for name in registry.get_known_choices():
        if name == selected:
            yield from _walk_option(registry, name, key, given, default, depth, within)
        elif not registry.__module__.startswith("levanter."):
            yield from _walk_option(registry, name, key, None, None, depth, within)


def _walk_option(
    registry: Any, name: str, key: str, given: Any, default: Any, depth: int, within: tuple[Any, ...]
) -> Iterator[_Entry]:
    choice = registry.get_choice_class(name)
    raw = {k: v for k, v in given.items() if k != CHOICE_TYPE_KEY} if isinstance(given, Mapping) else {}
    base = next((value for value in (given, default) if type(value) is choice), None)
    yield _Entry(f"{key}.{CHOICE_TYPE_KEY} {name}", "", _summary(choice), depth, is_key=False)
    yield from _walk(choice, f"{key}.", raw, base, depth + 1, within)
