# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Read and write configs as YAML; errors name file, line and remedy."""

import itertools
import re
from collections.abc import Hashable
from pathlib import Path
from typing import Any, TypeVar

import yaml

from marin_rl.utils.errors import nearest_file
from marin_rl.utils.settings.decode import decode, encode
from marin_rl.utils.settings.imports import import_types
from marin_rl.utils.settings.section_types import ConfigError

ConfigT = TypeVar("ConfigT")

YAML_SUFFIXES = frozenset({".yaml", ".yml"})
"""Suffixes of YAML files."""

MAX_YAML_BYTES = 16 * 2**20
"""Maximum size of a YAML file."""
MAX_VALUES = 100_000
"""Maximum number of values of a YAML text; an alias counts as all values that it stands for."""


def to_yaml(config: Any) -> str:
    """Convert a config with all its defaults to YAML; `from_yaml` restores an equal config."""
    return yaml.dump(encode(config), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100)


def from_yaml(config_class: type[ConfigT], text: str, source: str) -> ConfigT:
    """Restore a config from the YAML of `to_yaml`.

    `source` names the text in error messages.

    Returns:
        The validated config.

    Raises:
        ConfigError: if the text is not valid YAML, a key is invalid, or a file in `imports` cannot be imported.
    """
    try:
        raw = parse_yaml(text, source)
        import_types(config_class, [raw])
        return decode(config_class, raw)
    except ConfigError as error:
        raise ConfigError(*(f"{source}: {problem}" for problem in error.problems)) from error


def load_yaml(path: Path) -> dict[str, Any]:
    """Load the mapping in a YAML file.

    Raises:
        ConfigError: if the file does not exist (the message names the nearest one), is empty, is not valid YAML (the
            message names the line), repeats a key, or does not contain a mapping.
    """
    name = f"config file {str(path)!r}"
    try:
        # Also from a pipe, and never all of a device without an end.
        with path.open("rb") as file:
            data = file.read(MAX_YAML_BYTES + 1)
        # -sig: editors on Windows may write a byte order mark.
        text = data.decode("utf-8-sig")
    except FileNotFoundError as error:
        raise ConfigError(f"{name} does not exist; {nearest_file(path, YAML_SUFFIXES)}") from error
    except IsADirectoryError as error:
        raise ConfigError(f"{name} is a folder; give --config a YAML file{_example_in(path)}") from error
    except OSError as error:
        raise ConfigError(f"{name} cannot be read: {error.strerror}; correct the path or its permissions") from error
    except UnicodeDecodeError as error:
        problem = f"byte {error.object[error.start]:#04x} at position {error.start}"
        raise ConfigError(f"{name} is not UTF-8 text: {problem}; save it as UTF-8") from error
    if len(data) > MAX_YAML_BYTES:
        raise ConfigError(f"{name} has more than {MAX_YAML_BYTES // 2**20} MiB; give a file of keys and values")
    value = parse_yaml(text, str(path))
    if not value:
        raise ConfigError(f"{name} is empty; write keys and values into it, or omit it")
    return value


def _example_in(folder: Path) -> str:
    """End of a sentence that names a YAML file in a folder; empty if there is none."""
    names = sorted(str(file) for pattern in ("config.yaml", "*.yaml", "*.yml") for file in folder.glob(pattern))
    return f" in it, such as {names[0]}" if names else ", which this folder does not contain"


def parse_yaml(text: str, source: str) -> dict[str, Any]:
    """Parse YAML text that contains a mapping; empty text is an empty mapping.

    `source` names the text in error messages.

    Raises:
        ConfigError: if the text is not valid YAML, repeats a key, or does not contain a mapping.
    """
    if conflict := _CONFLICT.search(text):
        line = text.count("\n", 0, conflict.start()) + 1
        raise ConfigError(f"{source}:{line}: {conflict[0]!r} marks a merge conflict; resolve it")
    try:
        value = parse_value(text)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        position = f"{source}:{mark.line + 1}:{mark.column + 1}" if mark else source
        problem = error.problem or error.context or ""
        remedy = next((remedy for part, remedy in _REMEDIES.items() if part in problem), "")
        raise ConfigError(f"{position}: not valid YAML: {problem}{remedy and f'; {remedy}'}") from error
    except yaml.reader.ReaderError as error:
        problem = f"the character {chr(int(error.character))!r} at position {error.position} is not allowed"
        raise ConfigError(f"{source}: not valid YAML: {problem}; remove it") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{source}: not valid YAML: {error}") from error
    if value is None:
        return {}
    if not isinstance(value, dict):
        hint = ", such as `seed: 1`, with a space after the colon" if isinstance(value, str) else ""
        raise ConfigError(
            f"{source} contains a {type(value).__name__}; a config must be a mapping of keys to values{hint}"
        )
    return value


_CONFLICT = re.compile(r"^(<{7}|={7}|>{7})( .*)?$", re.MULTILINE)
"""Lines that git writes around a merge conflict."""
_REMEDIES = {
    "'\\t'": "indent with spaces instead of tabs",
    "mapping values are not allowed": "check the indentation, and quote text that contains a colon",
    "could not find expected ':'": "write each key as `key: value`",
    "expected <block end>": "check the indentation, and that brackets and quotes are closed",
    "expected ',' or": "close the bracket, and separate its items by commas",
    "found unexpected end of stream": "close the quote",
    "found undefined alias": "quote text that begins with *",
    "could not determine a constructor": "remove the tag",
    "that aliases stand": "write fewer values, without aliases",
    "found another document": "put the second document after --- into a file of its own, with a --config of its own",
}
"""Remedies by a part of YAML's message."""


class _Loader(yaml.SafeLoader):
    """Safe YAML loader that rejects repeated keys, does not convert dates, and reads `1e-4` as a number.

    Forms of integers that YAML 1.2 dropped remain text: `0012` is not 10, `1:30` not 90, and `2026_01_07` no number.
    """


class _Dumper(yaml.SafeDumper):
    """YAML dumper that quotes text which `_Loader` or a plain YAML loader would read as another type."""


def parse_value(text: str) -> Any:
    """Parse YAML text to a plain value.

    Raises:
        yaml.YAMLError: if the text is not valid YAML.
    """
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        # Before aliases and merged keys are expanded, to 2^n values in n lines.
        if node is not None and _count(node, {}) > MAX_VALUES:
            problem = f"it has more than {MAX_VALUES:,} values, with those that aliases stand for"
            raise yaml.constructor.ConstructorError(problem=problem, problem_mark=node.start_mark)
        return None if node is None else loader.construct_document(node)
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        # Of a value that does not fit its tag, a number with thousands of digits, or deep nesting.
        raise yaml.YAMLError(f"{type(error).__name__}: {error}") from error
    finally:
        loader.dispose()


def _count(node: yaml.Node, counts: dict[int, int]) -> int:
    """Count the values of a node, with those of its aliases; more than `MAX_VALUES` if it contains itself."""
    if isinstance(node, yaml.ScalarNode):
        return 1
    if id(node) not in counts:
        counts[id(node)] = MAX_VALUES + 1
        parts = itertools.chain(*node.value) if isinstance(node, yaml.MappingNode) else node.value
        counts[id(node)] = 1 + sum(_count(part, counts) for part in parts)
    return counts[id(node)]


def _construct_mapping(loader: yaml.SafeLoader, node: yaml.Node) -> dict[Any, Any]:
    if not isinstance(node, yaml.MappingNode):
        problem = "the tag !!map needs keys and values"
        raise yaml.constructor.ConstructorError(problem=problem, problem_mark=node.start_mark)
    seen: dict[Hashable, int] = {}
    for key_node, _ in node.value:
        key = key_node.value if isinstance(key_node, yaml.ScalarNode) else None
        if key in seen:
            problem = f"key {key!r} is given twice, first in line {seen[key]}; keep one of them"
            raise yaml.constructor.ConstructorError(problem=problem, problem_mark=key_node.start_mark)
        if key is not None:
            seen[key] = key_node.start_mark.line + 1
    loader.flatten_mapping(node)
    return loader.construct_mapping(node, deep=True)


_INTEGER = re.compile(r"^[-+]?(?:0|[1-9][0-9]*|[1-9][0-9]{0,2}(?:_[0-9]{3})+|0x[0-9a-fA-F]+)$")
_NUMBER = re.compile(r"^[-+]?[0-9][0-9_]*(?:\.[0-9_]*)?[eE][-+]?[0-9]+$")

_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag.rpartition(":")[2] not in ("timestamp", "int")]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_constructor("tag:yaml.org,2002:map", _construct_mapping)
_Loader.add_constructor("tag:yaml.org,2002:timestamp", yaml.SafeLoader.construct_undefined)
_Loader.add_implicit_resolver("tag:yaml.org,2002:int", _INTEGER, list("-+0123456789"))
_Loader.add_implicit_resolver("tag:yaml.org,2002:float", _NUMBER, list("-+0123456789"))
_Dumper.add_implicit_resolver("tag:yaml.org,2002:float", _NUMBER, list("-+0123456789"))
