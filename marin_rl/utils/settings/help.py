# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Help texts of a command: an overview on one screen, and every field with its type, default and description.

Descriptions are read from the source, see `field_docs`. Choices of this project are shown with all options. Levanter's
choices, which have hundreds of fields, are shown with the selected option; `--help model.gemma` shows another one.
"""

import dataclasses
import difflib
import functools
import json
import shutil
import textwrap
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from draccus.choice_types import CHOICE_TYPE_KEY
from draccus.utils import is_choice_type

from marin_rl.utils.settings.decode import encode
from marin_rl.utils.settings.field_docs import field_doc, section_doc
from marin_rl.utils.settings.section_types import (
    ConfigError,
    default_of,
    describe,
    field_types,
    plain_type,
    resolve_section,
    section_of,
)

MAX_WIDTH = 100
"""Maximum characters in a line, for readability on wide terminals."""


@dataclasses.dataclass(frozen=True)
class _Entry:
    """Entry of the help text: a field, or the heading of an option of a choice or of the command."""

    key: str
    doc: Callable[[], str]
    """Returns the description, which is read from source files and therefore only for entries that are shown."""
    depth: int = 0
    """Number of enclosing options of choices."""
    annotation: Any = None
    """Type of the field; None for a heading."""
    default: Any = None
    """Default as a plain value, or `MISSING`."""


def overview_text(config_class: Any, flags: Mapping[str, str], command: str, common_keys: Iterable[str]) -> str:
    """Usage, the most important keys with their defaults, and the names of all keys, on one screen.

    Args:
        config_class: class of a run's config, or its base class, whose types of levanter's sections are not imported.
        flags: flags of the command, with their descriptions.
        command: name of the command after `python -m marin_rl.`.
        common_keys: most important keys.
    """
    options = {
        "--config FILE": "YAML file with the config; of several files, later ones have precedence",
        "--KEY VALUE": "override a key of the file, such as --seed 1; VALUE is YAML",
        **{f"--{name}": doc[:1].lower() + doc[1:].rstrip(".") for name, doc in flags.items()},
        "--help SECTION": "describe a section, such as --help optimizer or --help model.qwen3",
        "--help all": "describe all keys",
    }
    entries = {entry.key: entry for entry in _walk(config_class, "", {}, every_option=False)}

    def row(key: str) -> list[str]:
        text = f"{key:26} {_short_default(entries[key]):10} {entries[key].doc()}"
        # The values of an expanded key are in its description alone.
        lines = 2 if key in _expanded_keys(config_class) else 1
        return textwrap.wrap(text, MAX_WIDTH - 2, max_lines=lines, placeholder=" ...", subsequent_indent=" " * 38)

    names = ", ".join(key for key in entries if "." not in key)
    return "\n".join(
        [
            f"usage: python -m marin_rl.{command} --config FILE [--KEY VALUE ...] [OPTIONS] [--help [SECTION]]",
            "",
            *(f"  {option:16} {doc}" for option, doc in options.items()),
            "",
            "Most important keys, with their defaults:",
            *(f"  {line}" for key in common_keys for line in row(key)),
            "",
            "All keys:",
            textwrap.fill(names, MAX_WIDTH, initial_indent="  ", subsequent_indent="  "),
            "",
        ]
    )


def help_text(
    config_class: Any, flags: Mapping[str, str] | None = None, section: str = "", width: int | None = None
) -> str:
    """Describe the fields of a config.

    Args:
        config_class: dataclass of the config.
        flags: flags of the command, with their descriptions.
        section: key of a section or field, or a key and an option (`model.qwen3`); `all` for all fields; empty for all
            without the options of choices that are not selected by default.
        width: characters per line; None for the terminal's width, at most `MAX_WIDTH`.

    Raises:
        ConfigError: if the section does not exist.
    """
    width = width or min(shutil.get_terminal_size((100, 24)).columns, MAX_WIDTH)
    entries = list(_walk(config_class, "", {}, every_option=section != ""))
    if section not in ("", "all"):
        return _render(_entries_of(section, entries), width)
    options = {
        "config FILE": "YAML file with the config; of several files, later ones have precedence.",
        "KEY VALUE": "Override a key of the file. VALUE is YAML: a scalar, a list or a mapping.",
        "help SECTION": "Describe one key, or a type of a section: --help KEY, --help KEY.TYPE; --help all: all keys.",
        **(flags or {}),
    }
    listed = [_Entry(f"--{name}", functools.partial(str, doc)) for name, doc in options.items()]
    return f"Options\n{_render(listed, width)}\nKeys\n{_render(entries, width)}"


def all_keys(config_class: Any, raw: Mapping[str, Any]) -> list[str]:
    """Dotted names of all keys of a config with the choices selected in `raw`."""
    return list(dict.fromkeys(entry.key for entry in _walk(config_class, "", raw) if entry.annotation is not None))


def _entries_of(section: str, entries: Sequence[_Entry]) -> list[_Entry]:
    """Entries of one section, or of one option of a choice."""
    selected = [entry for entry in entries if entry.key == section or entry.key.startswith(f"{section}.")]
    if selected:
        return selected
    options: dict[str, tuple[_Entry, Any, str]] = {}
    for entry in entries:
        registry, _ = _section_within(entry.annotation)
        if _is_choice(registry):
            options |= {f"{entry.key}.{name}": (entry, registry, name) for name in registry.get_known_choices()}
    if section in options:
        entry, registry, name = options[section]
        return list(_walk_option(registry, name, entry.key, {}))
    close = difflib.get_close_matches(section, [*(entry.key for entry in entries), *options], n=3, cutoff=0.6)
    hint = f"did you mean {' or '.join(close)}?" if close else "--help all lists all of them"
    raise ConfigError(f"--help {section}: this key or option does not exist; {hint}")


def _walk(
    section: Any,
    prefix: str,
    given: Mapping[str, Any],
    depth: int = 0,
    within: tuple[Any, ...] = (),
    *,
    every_option: bool = True,
) -> Iterator[_Entry]:
    """Entries of a section's fields and of nested sections; plain values in `given` replace the defaults.

    Args:
        section: type of the section.
        prefix: key of the section with a dot, or empty.
        given: plain values.
        depth: number of enclosing options of choices.
        within: enclosing sections, whose own fields are not repeated.
        every_option: whether to list the fields of all options of this project's choices, or of selected ones only.
    """
    for name, doc in _expanded_keys(section).items():
        yield _Entry(f"{prefix}{name}", functools.partial(str, doc), depth, str | None, None)
    for name, annotation in field_types(section).items():
        value = default_of(section, name)
        value = value if value is dataclasses.MISSING else encode(value, annotation)
        if name in given:
            both = isinstance(value, Mapping) and isinstance(given[name], Mapping)
            value = {**value, **given[name]} if both else given[name]
        yield _Entry(f"{prefix}{name}", functools.partial(field_doc, section, name), depth, annotation, value)
        inner, place = _section_within(annotation)
        if inner is None or inner in within:
            continue
        key, values = f"{prefix}{name}{place}", value if isinstance(value, Mapping) and not place else None
        if not _is_choice(inner):
            enclosing = (*within, inner)
            yield from _walk(inner, f"{key}.", values or {}, depth, enclosing, every_option=every_option)
            continue
        selected = _selected(inner, values)
        for option in inner.get_known_choices():
            if option == selected or (every_option and not inner.__module__.startswith("levanter.")):
                values_of_option = (values or {}) if option == selected else {}
                yield from _walk_option(inner, option, key, values_of_option, depth, (*within, inner))


def _expanded_keys(section: Any) -> Mapping[str, str]:
    """Keys of a section that are replaced by others before it is decoded, with their descriptions."""
    return getattr(plain_type(section), "expanded_keys", {})


def _walk_option(
    registry: Any, name: str, key: str, given: Mapping[str, Any], depth: int = 0, within: tuple[Any, ...] = ()
) -> Iterator[_Entry]:
    choice = registry.get_choice_class(name)
    yield _Entry(f"{key}.{CHOICE_TYPE_KEY} {name}", functools.partial(section_doc, choice), depth)
    yield from _walk(choice, f"{key}.", given, depth + 1, within or (registry,))


def _selected(registry: Any, given: Mapping[str, Any] | None) -> str | None:
    """Option selected by the plain value of a choice, or None."""
    if given is None:
        return None
    try:
        return registry.get_choice_name(resolve_section(registry, given))
    except ConfigError:
        return None


def _is_choice(section: Any) -> bool:
    return section is not None and is_choice_type(plain_type(section))


def _section_within(annotation: Any) -> tuple[Any, str]:
    """Section type in a field's annotation, or None, and `.N` if the field is a list or mapping of sections."""
    inner = section_of(annotation)
    if inner is not None:
        return inner, ""
    for argument in typing.get_args(annotation):
        inner, place = _section_within(argument)
        if inner is not None:
            is_container = typing.get_origin(annotation) in (list, tuple, set, dict, Sequence, Mapping)
            return inner, f".N{place}" if is_container else place
    return None, ""


def _short_default(entry: _Entry) -> str:
    if entry.default is dataclasses.MISSING:
        return "required"
    chosen = entry.default[CHOICE_TYPE_KEY] if isinstance(entry.default, Mapping) else entry.default
    return "null" if chosen is None else str(chosen)


def _note(entry: _Entry) -> str:
    """Type and default of a field; none for headings and sections, because their fields are listed below."""
    inner, _ = _section_within(entry.annotation)
    if entry.annotation is None or (inner is entry.annotation and not _is_choice(inner)):
        return ""
    kind = describe(entry.annotation)
    if inner is not None:
        options = f"type: {', '.join(inner.get_known_choices())}" if _is_choice(inner) else "a section"
        kind = kind.replace(describe(inner), options)
    if entry.default is dataclasses.MISSING:
        return f" ({kind}; required)"
    if isinstance(entry.default, Mapping) and CHOICE_TYPE_KEY in entry.default:
        return f" ({kind}; default type: {entry.default[CHOICE_TYPE_KEY]})"
    return f" ({kind}; default: {json.dumps(entry.default, ensure_ascii=False)})"


def _render(entries: Iterable[_Entry], width: int) -> str:
    """Format entries as text, in lines of at most `width` characters; long words are not broken."""
    lines: list[str] = []
    for entry in entries:
        if lines and entry.annotation is not None and "." not in entry.key:
            lines.append("")
        indent = "  " * (entry.depth + 1)
        lines += textwrap.wrap(
            f"{entry.key}{_note(entry)}",
            width,
            initial_indent=indent,
            subsequent_indent=f"{indent}    ",
            break_long_words=False,
            break_on_hyphens=False,
        )
        body = f"{indent}    "
        lines += textwrap.wrap(entry.doc(), width, initial_indent=body, subsequent_indent=body)
    return "".join(f"{line}\n" for line in lines)
