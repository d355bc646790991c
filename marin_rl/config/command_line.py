# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Parse command lines and YAML files to validated configs, before any device is used.

```
python -m marin_rl.train --config experiments/rloo.yaml --rollouts.group_size 16 --model '{num_layers: 2}'
```

Precedence, lowest first: defaults of the class, `defaults` of the caller, the file, overrides on the command line.
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

from marin_rl.config.decode import ConfigError, decode, encode, field_types, nearest, resolve_section, section_of
from marin_rl.config.help import all_keys, help_text, overview_text

ConfigT = TypeVar("ConfigT")

CONFIG_OPTIONS = ("config", "config_path")
"""Names of the option for the config file; `config_path` is levanter's name."""


@dataclasses.dataclass(frozen=True)
class ParsedConfig(Generic[ConfigT]):
    """Parsed command line."""

    config: ConfigT
    """The validated config."""
    raw: Mapping[str, Any]
    """The caller's defaults, the file and the overrides, merged, as plain values."""
    flags: frozenset[str]
    """The given flags, without dashes."""
    config_path: Path | None
    """The config file, or None if `--config` was not given."""


def parse_config(
    config_class: type[ConfigT],
    argv: Sequence[str],
    defaults: Mapping[str, Any],
    flags: Mapping[str, str] | None = None,
) -> ParsedConfig[ConfigT]:
    """Parse a command line to a config.

    Args:
        config_class: dataclass of the config.
        argv: arguments without the program's name: `--config FILE`, `--a.b value`, `--a.b=value`, flags, and
            `--help`, optionally followed by a section (`--help model.qwen3`) or `all`.
        defaults: nested plain values that the file overrides.
        flags: options without a value, with their descriptions.

    Returns:
        The validated config with the command line's flags.

    Raises:
        ConfigError: if an argument, the file or a key is invalid; the message names all invalid keys.
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
    return ParsedConfig(_decode_with_suggestions(config_class, raw), raw, arguments.flags, arguments.config_path)


def check_command_line(argv: Sequence[str], flags: Mapping[str, str], module: str, class_name: str) -> None:
    """Validate a command line, or print the overview of `--help`, without importing the config class.

    Importing the class takes seconds. Checks the arguments, the config file (exists, is valid YAML and a mapping) and
    misspelt top-level keys. `parse_config` checks the rest, including top-level keys that are not similar to a valid
    one: they may be keys of a section, and finding it requires the classes.

    Args:
        argv: arguments of `parse_config`.
        flags: flags of `parse_config`.
        module: module that defines the config class.
        class_name: name of the config class.

    Raises:
        ConfigError: if the command line is invalid; the message names every problem.
        SystemExit: with status 0, after `--help` without a section has printed the overview.
    """
    arguments = _read_arguments(list(argv), frozenset(flags))
    if arguments.help_section:
        return
    valid = _declared_fields(module, class_name)
    if arguments.help_section == "":
        sys.stdout.write(overview_text(flags, [name for name, annotation in valid.items() if "Config" in annotation]))
        raise SystemExit(0)
    file = {} if arguments.config_path is None else load_yaml(arguments.config_path)
    unknown = [str(key) for key in {**file, **arguments.overrides} if key not in valid]
    messages = {key: nearest(key, valid) for key in unknown}
    problems = [f"unknown key {key}; {text}" for key, text in messages.items() if text.startswith("did you mean")]
    if problems:
        raise ConfigError(*problems)


def _declared_fields(module: str, class_name: str) -> dict[str, str]:
    """Fields in a class body with their annotations, read from the source."""
    spec = importlib.util.find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    tree = ast.parse(Path(spec.origin).read_text(encoding="utf-8"))
    body = next(node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name == class_name)
    fields = (node for node in body if isinstance(node, ast.AnnAssign))
    return {node.target.id: ast.unparse(node.annotation) for node in fields if isinstance(node.target, ast.Name)}


def to_yaml(config: Any) -> str:
    """Convert a config with all its defaults to YAML; `from_yaml` restores an equal config.

    Args:
        config: a config dataclass.

    Returns:
        YAML text.
    """
    return yaml.dump(encode(config), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100)


def from_yaml(config_class: type[ConfigT], text: str, source: str) -> ConfigT:
    """Restore a config from the YAML of `to_yaml`.

    Args:
        config_class: dataclass of the config.
        text: YAML text.
        source: name of the text's source, for error messages.

    Returns:
        The validated config.

    Raises:
        ConfigError: if the text is not valid YAML, or a key is invalid.
    """
    try:
        return decode(config_class, parse_yaml(text, source))
    except ConfigError as error:
        raise ConfigError(*(f"{source}: {problem}" for problem in error.problems)) from error


def load_yaml(path: Path) -> dict[str, Any]:
    """Load the mapping in a YAML file.

    Raises:
        ConfigError: if the file does not exist (the message names the nearest one), is not valid YAML (the message
            names the line), repeats a key, or does not contain a mapping.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise ConfigError(f"config file {str(path)!r} does not exist; {_nearest_file(path)}") from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"config file {str(path)!r} cannot be read: {error}") from error
    return parse_yaml(text, str(path))


def parse_yaml(text: str, source: str) -> dict[str, Any]:
    """Parse YAML text that contains a mapping; empty text is an empty mapping.

    Args:
        text: YAML text.
        source: name of the text's source, for error messages.

    Raises:
        ConfigError: if the text is not valid YAML, repeats a key, or does not contain a mapping.
    """
    try:
        value = _load(text)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        position = f"{source}:{mark.line + 1}:{mark.column + 1}" if mark else source
        raise ConfigError(f"{position}: not valid YAML: {error.problem or error.context}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{source}: not valid YAML: {error}") from error
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ConfigError(f"{source} contains a {type(value).__name__}; a config must be a mapping of keys to values")
    return value


def merge(annotation: Any, lower: Any, upper: Any) -> Any:
    """Merge two layers of raw values, key by key.

    If the upper layer selects another `type` of a choice, the lower layer's keys of that choice are dropped.

    Args:
        annotation: type of both values, or Any.
        lower: values with lower precedence.
        upper: values with higher precedence.

    Returns:
        The merged values.
    """
    if not isinstance(lower, Mapping) or not isinstance(upper, Mapping):
        return upper
    section = section_of(annotation)
    known: Mapping[str, Any] = {}
    if section is not None:
        is_choice = is_choice_type(typing.get_origin(section) or section)
        if is_choice and lower.get(CHOICE_TYPE_KEY) != upper.get(CHOICE_TYPE_KEY, lower.get(CHOICE_TYPE_KEY)):
            # Keys given without a type are kept; decoding reports those that the new type does not have.
            lower = {} if CHOICE_TYPE_KEY in lower else lower
        known = _types_if_known(section, {**lower, **upper})
    merged = dict(lower)
    for key, value in upper.items():
        merged[key] = merge(known.get(key, Any), lower[key], value) if key in lower else value
    return merged


def _types_if_known(section: Any, raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Field types of a section; empty if its `type` is invalid, which decoding will report."""
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
            raise ConfigError(f"unexpected argument {argument!r}; write overrides as --key value, see --help")
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
        raise ConfigError(f"--{name}: {text!r} is not valid YAML: {problem}; quote it to pass it as text") from error


def _put(overrides: dict[str, Any], name: str, value: Any) -> None:
    """Store a dotted override in the nested mapping of all overrides; the last value of a key is used."""
    *sections, leaf = name.split(".")
    if not all([*sections, leaf]):
        raise ConfigError(f"--{name} is not a key: a name is missing before or after a dot")
    parent = overrides
    for section in sections:
        inner = parent.get(section)
        parent[section] = dict(inner) if isinstance(inner, dict) else {}
        parent = parent[section]
    parent[leaf] = merge(Any, parent[leaf], value) if leaf in parent else value


def _decode_with_suggestions(config_class: type[ConfigT], raw: Mapping[str, Any]) -> ConfigT:
    """Decode; errors suggest the right section for a key in the wrong one."""
    try:
        return decode(config_class, raw)
    except ConfigError as error:
        known = all_keys(config_class, raw)
        raise ConfigError(*(_suggest_section(problem, known) for problem in error.problems)) from error


def _suggest_section(problem: str, known: Sequence[str]) -> str:
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
    names = sorted(entry.name for entry in path.parent.iterdir() if entry.suffix in (".yaml", ".yml"))
    if not names:
        return f"there is no YAML file in {str(path.parent)!r}"
    return nearest(path.name, names).replace("Valid here", f"In {str(path.parent)!r}")


class _Loader(yaml.SafeLoader):
    """Safe YAML loader that rejects repeated keys, does not convert dates, and reads `1e-4` as a number."""

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        """Construct the value of a node; raise a `ConstructorError` with its position if its tag does not accept it."""
        try:
            value = yaml.SafeLoader.construct_object(self, node, deep)
            if isinstance(value, str):
                # Escapes can encode half of a surrogate pair, which cannot be written to a file.
                value.encode()
        except (ValueError, KeyError, IndexError, TypeError) as error:
            problem = f"the value does not fit its tag {node.tag!r}: {type(error).__name__}: {error}"
            raise yaml.constructor.ConstructorError(problem=problem, problem_mark=node.start_mark) from error
        return value


class _Dumper(yaml.SafeDumper):
    """YAML dumper that quotes text which `_Loader` or a plain YAML loader would read as another type."""


MAX_VALUES = 100_000
"""Maximum values in a config with expanded aliases; the largest config of levanter has a few hundred."""


def _load(text: str) -> Any:
    """Parse YAML text.

    Raises:
        yaml.YAMLError: if the text is not valid YAML, is nested too deeply, or has more than `MAX_VALUES` values with
            expanded aliases.
    """
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return None
        if _expanded_size(node, {}) > MAX_VALUES:
            raise yaml.YAMLError(
                f"its aliases expand to more than {MAX_VALUES:,} values; write out the values that you need"
            )
        return loader.construct_document(node)
    except RecursionError as error:
        raise yaml.YAMLError("it is nested too deeply") from error
    except ValueError as error:
        raise yaml.YAMLError(str(error)) from error
    finally:
        loader.dispose()


def _expanded_size(node: yaml.Node, sizes: dict[int, int]) -> int:
    """Number of values in a node. A node with several aliases counts each time, but is visited once."""
    if not isinstance(node, yaml.CollectionNode):
        return 1
    if id(node) not in sizes:
        # A node that contains itself would expand forever.
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
