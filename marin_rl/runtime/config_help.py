# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""The `--help` text: every field of a config with its type, default and meaning.

Meanings come from where they are written: the docstring beneath a field, the comment beside or above it,
or the `Args` of the class. Choices made here are shown with all their options; levanter's, which has
hundreds of fields between them, with the selected option, and any other on request (`--help model.gemma`).
"""

import dataclasses
import difflib
import json
import shutil
import textwrap
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from draccus.choice_types import CHOICE_TYPE_KEY
from draccus.utils import is_choice_type

from marin_rl.runtime.config_decoding import (
    ConfigError,
    default_of,
    describe,
    encode,
    field_types,
    resolve_section,
    section_of,
)
from marin_rl.runtime.field_docs import field_doc, section_doc

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
    registry: Any = None
    """Where its value is a choice, what it chooses from."""


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
    width = width or min(shutil.get_terminal_size((100, 24)).columns, MAX_WIDTH)
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
    options = {
        f"{entry.key}.{name}": (entry, name)
        for entry in entries
        if entry.registry is not None
        for name in entry.registry.get_known_choices()
    }
    if section in options:
        entry, name = options[section]
        return list(_walk_option(entry.registry, name, entry.key, None, None, 0, (entry.registry,)))
    close = difflib.get_close_matches(section, [*(entry.key for entry in entries), *options], n=3, cutoff=0.6)
    hint = f"did you mean {' or '.join(close)}?" if close else "--help alone lists them all"
    raise ConfigError(f"--help {section}: there is no such key or option; {hint}")


def _walk(
    section: Any, prefix: str, raw: Mapping[str, Any], base: Any, depth: int = 0, within: tuple[Any, ...] = ()
) -> Iterator[_Entry]:
    """The entries of a section's fields and of the sections within it."""
    for name, annotation in field_types(section).items():
        default = default_of(section, name, base)
        given = raw.get(name, default)
        key, meaning = f"{prefix}{name}", field_doc(section, name)
        inner, place = _section_within(annotation)
        registry = inner if _is_choice(inner) else None
        note = (
            ""
            if inner is annotation and registry is None
            else f"{_kind(annotation)}{_default(given if name in raw else _encoded(default, annotation))}"
        )
        yield _Entry(key, note, meaning, depth, registry=registry)
        if inner is None or inner in within:
            continue
        value, value_default = (None, None) if place else (given, default)
        if registry is not None:
            yield from _walk_choice(inner, f"{key}{place}", value, value_default, depth, (*within, inner))
        else:
            yield from _walk_section(inner, f"{key}{place}", value, value_default, depth, (*within, inner))


def _walk_section(
    section: Any, key: str, given: Any, default: Any, depth: int, within: tuple[Any, ...]
) -> Iterator[_Entry]:
    plain = typing.get_origin(section) or section
    base = next((value for value in (given, default) if isinstance(value, plain)), None)
    yield from _walk(section, f"{key}.", given if isinstance(given, Mapping) else {}, base, depth, within)


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
    yield _Entry(f"{key}.{CHOICE_TYPE_KEY} {name}", "", section_doc(choice), depth, is_key=False)
    yield from _walk(choice, f"{key}.", raw, base, depth + 1, within)


def _is_choice(section: Any) -> bool:
    return section is not None and is_choice_type(typing.get_origin(section) or section)


def _section_within(annotation: Any) -> tuple[Any, str]:
    """The section that a field holds, and `.N` where it holds a list or mapping of them."""
    inner = section_of(annotation)
    if inner is not None:
        return inner, ""
    for argument in typing.get_args(annotation):
        inner, place = _section_within(argument)
        if inner is not None:
            is_container = typing.get_origin(annotation) in (list, tuple, set, dict, Sequence, Mapping)
            return inner, f".N{place}" if is_container else place
    return None, ""


def _selected(registry: Any, given: Any, default: Any) -> str | None:
    """The option that a choice's value selects, or None where nothing does."""
    if isinstance(given, registry):
        return registry.get_choice_name(type(given))
    if not isinstance(given, Mapping):
        return None
    try:
        return registry.get_choice_name(resolve_section(registry, given, (), default)[0])
    except ConfigError:
        return None


def _kind(annotation: Any) -> str:
    """A type in words, short where its fields follow anyway."""
    inner, _ = _section_within(annotation)
    if inner is None:
        return describe(annotation)
    options = f"type: {', '.join(inner.get_known_choices())}" if _is_choice(inner) else "a section"
    return describe(annotation).replace(describe(inner), options)


def _encoded(default: Any, annotation: Any) -> Any:
    return default if default is dataclasses.MISSING else encode(default, annotation)


def _default(value: Any) -> str:
    if value is dataclasses.MISSING:
        return "; required"
    if isinstance(value, Mapping) and CHOICE_TYPE_KEY in value:
        return f"; default type: {value[CHOICE_TYPE_KEY]}"
    return f"; default: {json.dumps(value, ensure_ascii=False)}"


def _render(entries: Iterable[_Entry], width: int) -> str:
    """The entries as text, each line at most `width` characters where its words allow."""
    lines: list[str] = []
    for entry in entries:
        if lines and entry.is_key and "." not in entry.key:
            lines.append("")
        indent = "  " * (entry.depth + 1)
        note = f" ({entry.note})" if entry.note else ""
        lines += textwrap.wrap(
            f"{entry.key}{note}",
            width,
            initial_indent=indent,
            subsequent_indent=f"{indent}    ",
            break_long_words=False,
            break_on_hyphens=False,
        )
        body = f"{indent}    "
        lines += textwrap.wrap(entry.meaning, width, initial_indent=body, subsequent_indent=body)
    return "".join(f"{line}\n" for line in lines)
