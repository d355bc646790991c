# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Keys, types, choices and defaults of levanter's config sections, readable without importing levanter.

Levanter takes seconds to import. Mistakes in its sections are found earlier with a description of the sections: a JSON
file in this package for each supported version. `described_sections` builds dataclasses from it, which `decode` treats
like levanter's own. After an upgrade of levanter, this command writes the file of the installed version:

```
python -m marin_rl.config.levanter_description
```
"""

import dataclasses
import enum
import functools
import json
import sys
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Union, cast

import draccus
import jmp
from draccus.utils import is_choice_type

from marin_rl.utils.levanter_line import installed
from marin_rl.utils.settings.decode import decode, encode
from marin_rl.utils.settings.section_types import InvalidFieldError, default_of, field_types, is_section, plain_type

TOP_SECTIONS = ("LmConfig", "OptimizerConfig", "TrackerConfig")
"""Sections of levanter that a training config contains."""


class Undescribed:
    """A section of a levanter without a description. It accepts all values, and checks that read them are left out."""

    def __getattr__(self, name: str) -> Any:
        """Raise an `InvalidFieldError`."""
        raise InvalidFieldError(name)


cast(Any, draccus.decode).register(Undescribed, lambda _: Undescribed())
cast(Any, draccus.encode).register(Undescribed, lambda _: {})

_TYPES: dict[str, Any] = {
    "any": Any,
    "null": type(None),
    **{kind.__name__: kind for kind in (bool, int, float, str, Path, jmp.Policy)},
}
"""Types of scalars, by their names in a description."""
_LIKE_LEVANTER = {"__module__": "levanter.described"}
"""Attributes of the built classes. Lists of keys contain all options of this project's choices, but not levanter's."""
_CONTAINERS: dict[str, Any] = {"list": list, "dict": dict, "tuple": tuple, "union": Union, "literal": typing.Literal}
"""Types with arguments, by their names in a description."""


def description_file() -> Path:
    """Path of the description of the installed levanter; it does not exist if that version has none."""
    return Path(__file__).with_name("-".join(filter(None, installed())) + ".json")


@functools.cache
def described_sections() -> Mapping[str, Any]:
    """Dataclasses and choice registries with the keys of levanter's sections, by the names in `TOP_SECTIONS`.

    All are `Undescribed` if the installed version of levanter has no description.
    """
    file = description_file()
    if not file.exists():
        return dict.fromkeys(TOP_SECTIONS, Undescribed)
    builder = _Builder(json.loads(file.read_text(encoding="utf-8")))
    return {name: builder.type_of(name) for name in TOP_SECTIONS}


class _Builder:
    """Builds types from a description."""

    def __init__(self, description: Mapping[str, Any]) -> None:
        self._description = description
        self._built: dict[str, Any] = {}

    def type_of(self, kind: Any) -> Any:
        """Type with a name in a description, or with a list of a container's name and its arguments."""
        if isinstance(kind, str):
            if kind not in _TYPES and kind not in self._built:
                self._build(kind)
            return _TYPES.get(kind) or self._built[kind]
        container, *arguments = kind
        if container == "literal":
            return _CONTAINERS[container][tuple(arguments)]
        return _CONTAINERS[container][tuple(... if item == "..." else self.type_of(item) for item in arguments)]

    def _build(self, name: str) -> None:
        entry = self._description[name]
        if "values" in entry:
            self._built[name] = enum.Enum(name, entry["values"])
        elif "choices" in entry:
            default = entry["default"]
            members = {**_LIKE_LEVANTER, "default_choice_name": classmethod(lambda cls: default)}
            registry: Any = type(name, (draccus.ChoiceRegistry,), members)
            self._built[name] = registry
            for choice, section in entry["choices"].items():
                registry.register_subclass(choice, self._section(section, registry))
        else:
            self._built[name] = self._section(name)

    def _section(self, name: str, *bases: type) -> Any:
        if name not in self._built:
            fields = [self._field(key, *entry) for key, entry in self._description[name]["fields"].items()]
            self._built[name] = dataclasses.make_dataclass(
                name, fields, bases=bases, frozen=True, kw_only=True, namespace=dict(_LIKE_LEVANTER)
            )
        return self._built[name]

    def _field(self, name: str, kind: Any, *default: Any) -> tuple[str, Any, Any]:
        annotation = self.type_of(kind)
        if not default:
            return name, annotation, dataclasses.field()
        return name, annotation, dataclasses.field(default_factory=lambda: decode(annotation, default[0]))


def describe_installed() -> str:
    """Describe the sections of the installed levanter that a training config contains.

    Returns:
        The text of a description file: JSON with a line for each key.
    """
    from levanter.models.lm_model import LmConfig
    from levanter.optim.config import OptimizerConfig
    from levanter.tracker import TrackerConfig

    # Registers the models and trackers.
    import marin_rl.config.train_config  # noqa: F401

    entries: dict[str, Any] = {}
    for section in (LmConfig, OptimizerConfig, TrackerConfig):
        _describe(section, entries)
    blocks = [f"{json.dumps(name)}: {_format_entry(entries[name])}" for name in sorted(entries)]
    return "{\n" + ",\n".join(blocks) + "\n}\n"


def _format_entry(entry: Mapping[str, Any]) -> str:
    if "fields" not in entry:
        return json.dumps(entry)
    lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(field)}" for name, field in entry["fields"].items())
    return '{"fields": {\n' + lines + "\n}}"


def _describe(annotation: Any, entries: dict[str, Any]) -> Any:
    """Name of a type, or list of a container's name and arguments; adds sections and enums to the entries."""
    if typing.get_origin(annotation) in (Union, types.UnionType):
        return ["union", *(_describe(member, entries) for member in typing.get_args(annotation))]
    plain, arguments = plain_type(annotation), typing.get_args(annotation)
    if plain is typing.Literal:
        return ["literal", *arguments]
    if is_section(annotation):
        return _describe_section(annotation, entries)
    if not isinstance(plain, type):
        return "any"
    if issubclass(plain, enum.Enum):
        entries[plain.__name__] = {"values": {member.name: member.value for member in plain}}
        return plain.__name__
    if plain in (list, dict, tuple) or issubclass(plain, Mapping):
        name = "dict" if issubclass(plain, Mapping) else plain.__name__
        described = [("..." if item is Ellipsis else _describe(item, entries)) for item in arguments]
        return [name, *(described or (["any", "any"] if name == "dict" else ["any"]))]
    return next((name for name, kind in _TYPES.items() if kind is plain), "any")


def _describe_section(section: Any, entries: dict[str, Any]) -> str:
    registry = plain_type(section)
    name = registry.__name__
    if name in entries:
        return name
    entries[name] = {}
    if is_choice_type(registry):
        # The order of registration depends on the order of imports.
        kinds = sorted(registry.get_known_choices().items())
        choices = {choice: _describe_section(kind, entries) for choice, kind in kinds}
        entries[name] = {"choices": choices, "default": registry.default_choice_name()}
    else:
        entries[name] = {"fields": {key: _describe_field(section, key, entries) for key in field_types(section)}}
    return name


def _describe_field(section: Any, name: str, entries: dict[str, Any]) -> list[Any]:
    """Type of a field and its default, if it has one."""
    annotation, default = field_types(section)[name], default_of(section, name)
    kind = _describe(annotation, entries)
    return [kind] if default is dataclasses.MISSING else [kind, encode(default, annotation)]


def main() -> int:
    """Write the description of the installed levanter."""
    description_file().write_text(describe_installed(), encoding="utf-8")
    print(f"wrote {description_file()}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
