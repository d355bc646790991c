# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Command lines and YAML files into a checked config object, before any device is touched.

```
python -m marin_rl.train --config experiments/rloo.yaml --rollouts.group_size 16 --model '{num_layers: 2}'
```

Layers, later ones on top: the class's defaults, the caller's `defaults`, the file, the overrides.
"""

import ast
import dataclasses
import difflib
import importlib.util
import re
import sys
import typing
from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

import yaml
from draccus.choice_types import CHOICE_TYPE_KEY
from draccus.utils import is_choice_type

from marin_rl.runtime.config_decoding import (
    ConfigError,
    decode,
    encode,
    field_types,
    nearest,
    resolve_section,
    section_of,
)
from marin_rl.runtime.config_help import all_keys, help_text

ConfigT = TypeVar("ConfigT")

CONFIG_OPTIONS = ("config", "config_path")
"""Names of the option that takes the file; the second is levanter's."""


@dataclasses.dataclass(frozen=True)
class ParsedConfig(Generic[ConfigT]):
    """What a command line said."""

    config: ConfigT
    """The checked config."""
    raw: Mapping[str, Any]
    """Defaults, file and overrides merged, as plain values, before anything was filled in from the class."""
    flags: frozenset[str]
    """The flags that were given, without dashes."""
    config_path: Path | None
    """The file, where one was named."""


def parse_config(
    config_class: type[ConfigT],
    argv: Sequence[str],
    defaults: Mapping[str, Any],
    flags: Mapping[str, str] | None = None,
) -> ParsedConfig[ConfigT]:
    """Read a config from a command line.

    Args:
        config_class: the dataclass to build.
        argv: the arguments, without the program's name: `--config FILE`, `--a.b value`, `--a.b=value`,
            flags, and `--help`, alone or followed by a section (`--help model.qwen3`).
        defaults: nested plain values beneath the file's.
        flags: options without a value that the command knows, and what each does.

    Raises:
        ConfigError: naming every key that does not fit, the file or the argument.
        SystemExit: with status 0, after `--help` has printed its text.
    """
    flags = flags or {}
    arguments = _read_arguments(list(argv), frozenset(flags))
    if arguments.help_section is not None:
        sys.stdout.write(help_text(config_class, defaults, flags=flags, section=arguments.help_section))
        raise SystemExit(0)
    layers = [] if arguments.config_path is None else [load_yaml(arguments.config_path)]
    raw: Mapping[str, Any] = dict(defaults)
    for layer in [*layers, arguments.overrides]:
        raw = merge(config_class, raw, layer)
    return ParsedConfig(_decode_or_explain(config_class, raw), raw, arguments.flags, arguments.config_path)


def check_command_line(argv: Sequence[str], flags: Mapping[str, str], module: str, class_name: str) -> None:
    """Find mistakes in a command line without importing the config class, which takes seconds.

    Covers the arguments themselves, the config file (present, valid YAML, a mapping) and misspelt top-level keys.
    `parse_config` checks everything else. A top-level key that resembles no valid one is left to `parse_config`
    too, because it may belong to a section, which only the classes of the sections show.

    Args:
        argv: the arguments, as `parse_config` takes them.
        flags: the command's flags, as `parse_config` takes them.
        module: the module that defines the config class.
        class_name: the config class.

    Raises:
        ConfigError: naming every mistake found.
    """
    arguments = _read_arguments(list(argv), frozenset(flags))
    if arguments.help_section is not None:
        return
    file = {} if arguments.config_path is None else load_yaml(arguments.config_path)
    valid = _declared_fields(module, class_name)
    unknown = [str(key) for key in {**file, **arguments.overrides} if key not in valid]
    messages = {key: nearest(key, valid) for key in unknown}
    problems = [f"unknown key {key}; {text}" for key, text in messages.items() if text.startswith("did you mean")]
    if problems:
        raise ConfigError(*problems)


def _declared_fields(module: str, class_name: str) -> list[str]:
    """The annotated names in a class body, read from its source."""
    spec = importlib.util.find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    tree = ast.parse(Path(spec.origin).read_text(encoding="utf-8"))
    body = next(node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name == class_name)
    return [node.target.id for node in body if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)]


def to_yaml(config: Any) -> str:
    """The complete config as YAML, every default written out; reads back to an equal config.

    Args:
        config: a config dataclass.
    """
    return yaml.dump(encode(config), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100)


def from_yaml(config_class: type[ConfigT], text: str, source: str) -> ConfigT:
    """The config that `to_yaml` wrote.

    Args:
        config_class: the dataclass to build.
        text: the YAML.
        source: where it came from, for messages.

    Raises:
        ConfigError: if it is not YAML, or does not describe this class.
    """
    try:
        return decode(config_class, parse_yaml(text, source))
    except ConfigError as error:
        raise ConfigError(*(f"{source}: {problem}" for problem in error.problems)) from error


def load_yaml(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file.

    Raises:
        ConfigError: if there is no such file (naming the nearest one), it is not YAML (naming the line), it
            repeats a key, or it holds no mapping.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise ConfigError(f"config file {str(path)!r} does not exist; {_nearest_file(path)}") from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"config file {str(path)!r} cannot be read: {error}") from error
    return parse_yaml(text, str(path))


def parse_yaml(text: str, source: str) -> dict[str, Any]:
    """The mapping that YAML text holds; empty text is an empty mapping.

    Args:
        text: the YAML.
        source: where it came from, for messages.
    """
    try:
        value = _load(text)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{source}:{mark.line + 1}:{mark.column + 1}" if mark else source
        raise ConfigError(f"{where}: not valid YAML: {error.problem or error.context}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{source}: not valid YAML: {error}") from error
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ConfigError(f"{source} holds a {type(value).__name__}; a config is a mapping of keys to values")
    return value


def merge(annotation: Any, lower: Any, upper: Any) -> Any:
    """Lay one layer of raw values over another, key by key.

    Where the upper layer selects another `type` of a choice, the lower layer's keys for the old one go.

    Args:
        annotation: the type that both describe, or Any.
        lower: the values beneath.
        upper: the values on top; they win.
    """
    if not isinstance(lower, Mapping) or not isinstance(upper, Mapping):
        return upper
    section = section_of(annotation)
    known: Mapping[str, Any] = {}
    if section is not None:
        is_choice = is_choice_type(typing.get_origin(section) or section)
        if is_choice and lower.get(CHOICE_TYPE_KEY) != upper.get(CHOICE_TYPE_KEY, lower.get(CHOICE_TYPE_KEY)):
            # Keys given without any type stay: where they do not fit the new one, decoding says so.
            lower = {} if CHOICE_TYPE_KEY in lower else lower
        known = _types_if_known(section, {**lower, **upper})
    merged = dict(lower)
    for key, value in upper.items():
        merged[key] = merge(known.get(key, Any), lower[key], value) if key in lower else value
    return merged


def _types_if_known(section: Any, raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """The field types of a section; nothing where its type is wrong, which decoding will report."""
    try:
        return field_types(resolve_section(section, raw, ())[0])
    except ConfigError:
        return {}


@dataclasses.dataclass(frozen=True)
class _Arguments:
    config_path: Path | None
    overrides: dict[str, Any]
    flags: frozenset[str]
    help_section: str | None


def _read_arguments(argv: list[str], known_flags: frozenset[str]) -> _Arguments:
    config_path: Path | None = None
    overrides: dict[str, Any] = {}
    flags: set[str] = set()
    rest = list(argv)
    while rest:
        argument = rest.pop(0)
        if argument in ("-h", "--help"):
            section = rest[0] if rest and not rest[0].startswith("-") else ""
            return _Arguments(None, {}, frozenset(), section)
        if not argument.startswith("--") or argument == "--":
            raise ConfigError(f"unexpected argument {argument!r}; overrides are written --key value, see --help")
        name, equals, value = argument[2:].partition("=")
        if name.replace("-", "_") in known_flags:
            if equals:
                raise ConfigError(f"--{name} is a flag and takes no value, but {value!r} was given")
            flags.add(name.replace("-", "_"))
            continue
        if not equals:
            value = _following_value(name, rest, known_flags)
        if name.replace("-", "_") in CONFIG_OPTIONS:
            if config_path is not None:
                raise ConfigError(f"two config files were given, {str(config_path)!r} and {value!r}; give one")
            config_path = Path(value)
        else:
            _put(overrides, name, _override_value(name, value))
    return _Arguments(config_path, overrides, frozenset(flags), None)


def _following_value(name: str, rest: list[str], known_flags: frozenset[str]) -> str:
    if rest and not rest[0].startswith("--"):
        return rest.pop(0)
    options = [*CONFIG_OPTIONS, *sorted(known_flags)]
    close = difflib.get_close_matches(name.replace("-", "_"), options, n=1, cutoff=0.75)
    hint = f"; did you mean --{close[0]}?" if close else f"; write --{name} VALUE (for a switch: --{name} true)"
    raise ConfigError(f"--{name} needs a value{hint}")


def _override_value(name: str, text: str) -> Any:
    if text == "":
        return ""
    try:
        return _load(text)
    except yaml.YAMLError as error:
        problem = error.problem if isinstance(error, yaml.MarkedYAMLError) else error
        raise ConfigError(
            f"--{name}: {text!r} is not valid YAML: {problem}; quote it as text if it is meant so"
        ) from error


def _put(overrides: dict[str, Any], name: str, value: Any) -> None:
    """Store a dotted override in the nested mapping of all of them; the last one for a key wins."""
    *sections, leaf = name.split(".")
    if not all([*sections, leaf]):
        raise ConfigError(f"--{name} is not a key: between dots there must be a name")
    place = overrides
    for section in sections:
        inner = place.get(section)
        place[section] = dict(inner) if isinstance(inner, dict) else {}
        place = place[section]
    place[leaf] = merge(Any, place[leaf], value) if leaf in place else value


def _decode_or_explain(config_class: type[ConfigT], raw: Mapping[str, Any]) -> ConfigT:
    """Decode, and tell where in the config a misplaced key would have been right."""
    try:
        return decode(config_class, raw)
    except ConfigError as error:
        known = all_keys(config_class, raw)
        raise ConfigError(*(_with_place(problem, known) for problem in error.problems)) from error


def _with_place(problem: str, known: Sequence[str]) -> str:
    match = re.match(r"unknown key (\S+);", problem)
    if match is None or "did you mean" in problem:
        return problem
    section, _, leaf = match[1].rpartition(".")
    if match[1] in known:
        return problem.replace("; ", f"; it belongs to another {section}.{CHOICE_TYPE_KEY}. ", 1)
    elsewhere = [key for key in known if key.rsplit(".", 1)[-1] == leaf]
    if not elsewhere:
        close = difflib.get_close_matches(leaf, {key.rsplit(".", 1)[-1] for key in known}, n=1, cutoff=0.75)
        elsewhere = [key for key in known if key.rsplit(".", 1)[-1] in close]
    return problem.replace("; ", f"; did you mean {' or '.join(elsewhere[:3])}? ", 1) if elsewhere else problem


def _nearest_file(path: Path) -> str:
    if not path.parent.is_dir():
        return f"neither does its folder {str(path.parent)!r}"
    found = sorted(entry.name for entry in path.parent.iterdir() if entry.suffix in (".yaml", ".yml"))
    if not found:
        return f"there is no YAML file in {str(path.parent)!r}"
    return nearest(path.name, found).replace("Valid here", f"In {str(path.parent)!r}")


class _Loader(yaml.SafeLoader):
    """Safe YAML without repeated keys and dates, in which `1e-4` is a number."""

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        """The value of a node; one that its tag does not take is an error with a place."""
        try:
            value = yaml.SafeLoader.construct_object(self, node, deep)
            if isinstance(value, str):
                # An escape can name half of a surrogate pair, which no file can hold.
                value.encode()
        except (ValueError, KeyError, IndexError, TypeError) as error:
            problem = f"the value does not fit its tag {node.tag!r}: {type(error).__name__}: {error}"
            raise yaml.constructor.ConstructorError(problem=problem, problem_mark=node.start_mark) from error
        return value


class _Dumper(yaml.SafeDumper):
    """Writes text so that both `_Loader` and a plain YAML reader take it for text."""


MAX_VALUES = 100_000
"""Most values in a config once its aliases are written out; the largest of levanter's has a few hundred."""


def _load(text: str) -> Any:
    """The value that YAML text holds.

    Raises:
        yaml.YAMLError: if it is not valid, nested too deeply, or grows beyond `MAX_VALUES` through its aliases.
    """
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return None
        if _expanded_size(node, {}) > MAX_VALUES:
            raise yaml.YAMLError(f"its aliases expand to more than {MAX_VALUES:,} values; write out those you need")
        return loader.construct_document(node)
    except RecursionError as error:
        raise yaml.YAMLError("it is nested too deeply") from error
    except ValueError as error:
        raise yaml.YAMLError(str(error)) from error
    finally:
        loader.dispose()


def _expanded_size(node: yaml.Node, sizes: dict[int, int]) -> int:
    """Number of values below a node. A node that several aliases share counts each time, but is visited once."""
    if not isinstance(node, yaml.CollectionNode):
        return 1
    if id(node) not in sizes:
        # Found again below itself, the node would expand without end.
        sizes[id(node)] = MAX_VALUES + 1
        pairs = isinstance(node, yaml.MappingNode)
        inner = [item for pair in node.value for item in pair] if pairs else node.value
        sizes[id(node)] = 1 + sum(_expanded_size(item, sizes) for item in inner)
    return sizes[id(node)]


def _construct_int(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> int:
    try:
        number = loader.construct_yaml_int(node)
    except ValueError as error:
        problem = f"{node.value[:40]!r} is not an integer"
        raise yaml.constructor.ConstructorError(problem=problem, problem_mark=node.start_mark) from error
    if not -(2**63) <= number < 2**64:
        problem = f"the integer {node.value[:40]!r}{'...' if len(node.value) > 40 else ''} does not fit into 64 bits"
        raise yaml.constructor.ConstructorError(problem=problem, problem_mark=node.start_mark)
    return number


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


_NUMBER = re.compile(r"^[-+]?[0-9][0-9_]*(?:\.[0-9_]*)?[eE][-+]?[0-9]+$")

_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:timestamp"]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_constructor("tag:yaml.org,2002:map", _construct_mapping)
_Loader.add_constructor("tag:yaml.org,2002:int", _construct_int)
_Loader.add_constructor("tag:yaml.org,2002:timestamp", yaml.SafeLoader.construct_undefined)
_Loader.add_implicit_resolver("tag:yaml.org,2002:float", _NUMBER, list("-+0123456789"))
_Dumper.add_implicit_resolver("tag:yaml.org,2002:float", _NUMBER, list("-+0123456789"))
