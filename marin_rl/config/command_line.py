# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Parse command lines to validated configs, before any device is used.

```
python -m marin_rl.train --config experiments/rloo.yaml --rollouts.group_size 16 --model '{num_layers: 2}'
```

Overrides on the command line have precedence over files, later files over earlier ones, and files over the defaults of
the class.
"""

import contextlib
import dataclasses
import difflib
import functools
import gc
import re
import sys
import threading
import traceback
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

import yaml
from draccus.choice_types import CHOICE_TYPE_KEY
from draccus.utils import is_choice_type

from marin_rl.config.algorithms import ALGORITHM, with_sections
from marin_rl.utils.errors import LISTED_NAMES, USER_ERRORS, brief, explain, own_frames, require_threads
from marin_rl.utils.logs import warnings_to_stderr
from marin_rl.utils.output import OutputError, escape, guarded_output
from marin_rl.utils.settings.decode import decode
from marin_rl.utils.settings.fields import flatten
from marin_rl.utils.settings.help import all_keys, help_text
from marin_rl.utils.settings.imports import import_types
from marin_rl.utils.settings.option_parser import HelpShown
from marin_rl.utils.settings.section_types import (
    ConfigError,
    Written,
    field_types,
    plain_type,
    resolve_section,
    section_of,
)
from marin_rl.utils.settings.yaml_text import load_yaml, parse_value

ConfigT = TypeVar("ConfigT")

MIN_THREADS = 64
"""Threads that a command must be able to start; a tiny run starts about 50. XLA aborts the process without them."""


def run_command(
    command: Callable[[Sequence[str]], int | None], argv: Sequence[str] | None, interrupted: str = "interrupted"
) -> int:
    """Run a command, and print its errors as one line; see [`output`][marin_rl.utils.output] for its own output.

    Args:
        command: returns the exit status for the given arguments; None is 0.
        argv: arguments without the program's name; None for the arguments of the process.
        interrupted: message after an interrupt.

    Returns:
        Exit status: that of the command, 1 after an error, 130 after an interrupt.

    Raises:
        SystemExit: after `--help`, or if the command only prints and its output cannot be written.
    """
    _report_escaped()
    with guarded_output(), warnings_to_stderr():
        try:
            require_threads(MIN_THREADS)
            return command(sys.argv[1:] if argv is None else argv) or 0
        except KeyboardInterrupt:
            print(interrupted, file=sys.stderr)
            return 130
        except USER_ERRORS as error:
            # As Python does for an error that it reports itself.
            sys.last_exc = error  # type: ignore[attr-defined]
            print(f"error: {escape(explain(error, brief(str(error))))}", file=sys.stderr)
            return 1
        except (HelpShown, OutputError):
            raise
        except BaseException as error:
            if isinstance(error, Exception) and not own_frames(error):
                raise
            # SystemExit would end the process without a message, and even with status 0.
            print(f"error: code that the config names raised {escape(explain(error))}", file=sys.stderr)
            return 1


def _report_escaped() -> None:
    """Print errors that nothing handles with `_print_escaped`, unless another program has replaced Python's hooks."""
    sys.excepthook = _print_escaped
    if threading.excepthook is threading.__excepthook__:
        threading.excepthook = _print_unhandled
    if sys.unraisablehook is sys.__unraisablehook__:
        sys.unraisablehook = _print_unhandled


def _print_unhandled(unhandled: "threading.ExceptHookArgs | sys.UnraisableHookArgs") -> None:
    if unhandled.exc_type is not SystemExit:
        _print_escaped(unhandled.exc_type, unhandled.exc_value, unhandled.exc_traceback)


def _print_escaped(kind: type[BaseException], error: BaseException | None, trace: types.TracebackType | None) -> None:
    """Print a traceback, whose messages may quote replies of a policy, without control characters."""
    print(escape("".join(traceback.format_exception(kind, error, trace))), file=sys.stderr, end="")


@dataclasses.dataclass(frozen=True)
class ParsedConfig(Generic[ConfigT]):
    """Parsed command line."""

    config: ConfigT
    """The validated config."""
    arguments: "Arguments"
    """The arguments."""

    @property
    def flags(self) -> frozenset[str]:
        """The given flags, without dashes."""
        return self.arguments.flags

    @property
    def named(self) -> frozenset[str]:
        """Dotted keys that the command line gave, not a file."""
        return frozenset(key for key, value in flatten(self.arguments.overrides).items() if value != {})


def parse_config(
    config_class: type[ConfigT],
    argv: Sequence[str],
    flags: Mapping[str, str] | None = None,
    defaults: Mapping[str, Any] | None = None,
) -> ParsedConfig[ConfigT]:
    """Parse a command line to a config.

    Args:
        config_class: dataclass of the config.
        argv: arguments without the program's name: `--config FILE` once or several times, `--a.b value`,
            `--a.b=value`, flags, and `--help`, optionally followed by a section (`--help model.qwen3`) or `all`.
        flags: options without a value, with their descriptions.
        defaults: values with lower precedence than files and arguments, as in a file.

    Returns:
        The validated config with the command line's flags.

    Raises:
        ConfigError: if an argument, the file or a key is invalid; the message names all invalid keys.
        HelpShown: with status 0, after `--help` has printed its text.
    """
    flags = flags or {}
    return parse_arguments(config_class, read_arguments(argv, flags), flags, defaults or {})


def parse_arguments(
    config_class: type[ConfigT], arguments: "Arguments", flags: Mapping[str, str], defaults: Mapping[str, Any]
) -> ParsedConfig[ConfigT]:
    """Parse arguments to a config; see `parse_config`."""
    layers = [defaults, *arguments.layers()]
    if arguments.help_section is not None:
        import_types(config_class, layers)
        sys.stdout.write(help_text(config_class, flags, arguments.help_section))
        raise HelpShown(0)
    return ParsedConfig(decode_layers(config_class, layers, arguments), arguments)


def decode_layers(
    config_class: type[ConfigT], layers: Sequence[Mapping[str, Any]], arguments: "Arguments | None" = None
) -> ConfigT:
    """Decode layers of raw values of a config, in the order of increasing precedence.

    `arguments` are those of the command line, for error messages; None if the values are from elsewhere.

    Raises:
        ConfigError: if a key is invalid; the message names all invalid keys.
    """
    import_types(config_class, layers)
    raw = merge_layers(config_class, layers)
    with suggesting(config_class, raw, arguments):
        return decode(config_class, raw)


@contextlib.contextmanager
def suggesting(config_class: Any, raw: Mapping[str, Any], arguments: "Arguments | None") -> Iterator[None]:
    """Add the right section to keys in the wrong one, and the options of missing keys."""
    try:
        yield
    except ConfigError as error:
        known = all_keys(config_class, raw)
        problems = [_suggest_section(problem, known) for problem in error.problems]
        if arguments is not None and not arguments.config_paths:
            problems = [*map(_suggest_option, problems)]
        raise ConfigError(*problems) from error


@contextlib.contextmanager
def without_collections() -> Iterator[None]:
    """Pause garbage collection during imports.

    Almost all objects that imports create stay, and collections that visit them take a fifth of the imports' time.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def merge_layers(config_class: Any, layers: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Merge layers of raw values of a config, in the order of increasing precedence.

    In configs of RL the key `algorithm` is replaced by its sections.

    Raises:
        ConfigError: if the algorithm is unknown, or needs a section that only the user can give.
    """
    expanded = ALGORITHM in getattr(config_class, "expanded_keys", {})
    layers = with_sections(config_class, list(layers)) if expanded else layers
    return functools.reduce(functools.partial(merge, config_class), layers, {})


def merge(annotation: Any, lower: Any, upper: Any) -> Any:
    """Merge two layers of raw values, key by key.

    If the upper layer selects another `type` of a choice, the lower layer's keys of that choice are dropped.
    `annotation` is the type of both values, or Any; `upper` has precedence.

    Returns:
        The merged values.
    """
    if not isinstance(lower, Mapping) or not isinstance(upper, Mapping):
        return upper
    section = section_of(annotation)
    known: Mapping[str, Any] = {}
    if section is not None:
        lower_type = lower.get(CHOICE_TYPE_KEY)
        # Keys given without a type are kept; decoding reports those that the new type does not have.
        if is_choice_type(plain_type(section)) and lower_type not in (None, upper.get(CHOICE_TYPE_KEY, lower_type)):
            lower = {}
        with contextlib.suppress(ConfigError):  # Decoding reports an invalid type.
            known = field_types(resolve_section(section, {**lower, **upper}))
    merged = dict(lower)
    for key, value in upper.items():
        merged[key] = merge(known.get(key, Any), lower[key], value) if key in lower else value
    return merged


@dataclasses.dataclass(frozen=True)
class Arguments:
    """Arguments of a command line."""

    config_paths: tuple[Path, ...] = ()
    overrides: dict[str, Any] = dataclasses.field(default_factory=dict)
    flags: frozenset[str] = frozenset()
    help_section: str | None = None
    """Argument of `--help`, empty if it has none; None without `--help`."""

    @functools.cached_property
    def files(self) -> dict[Path, dict[str, Any]]:
        """Raw values of each config file, read once, because a file may be a pipe; `--help` ignores absent files."""
        paths = [path for path in self.config_paths if self.help_section is None or path.is_file()]
        return {path: load_yaml(path) for path in dict.fromkeys(paths)}

    def layers(self) -> list[dict[str, Any]]:
        """Raw values of the config files and the overrides, in the order of increasing precedence."""
        return [*(self.files[path] for path in self.config_paths if path in self.files), self.overrides]


def read_arguments(argv: Sequence[str], known_flags: Iterable[str]) -> Arguments:
    """Split a command line into config files, overrides and flags.

    Raises:
        ConfigError: if an argument is invalid.
    """
    config_paths: list[Path] = []
    overrides: dict[str, Any] = {}
    flags: set[str] = set()
    rest = list(argv)
    while rest:
        argument = rest.pop(0)
        if argument in ("-h", "--help") or argument.startswith("--help="):
            section = argument.partition("=")[2] or (rest.pop(0) if rest and not rest[0].startswith("-") else "")
            # Only `imports` matters of the other arguments, which may be incomplete.
            with contextlib.suppress(ConfigError):
                others = read_arguments(rest, known_flags)
                config_paths, overrides = [*config_paths, *others.config_paths], {**overrides, **others.overrides}
            return Arguments(tuple(config_paths), overrides, help_section=section)
        if not argument.startswith("--") or argument == "--":
            remedy = f"--config {argument}" if argument.endswith((".yaml", ".yml")) else "overrides as --key value"
            raise ConfigError(f"unexpected argument {argument!r}; write {remedy}, see --help")
        name, equals, value = argument[2:].partition("=")
        option = name.replace("-", "_")
        if option in known_flags:
            if equals:
                raise ConfigError(f"--{name} is a flag and takes no value, but {value!r} was given")
            flags.add(option)
            continue
        if not equals:
            if not rest or rest[0].startswith("--"):
                raise ConfigError(_missing_value(name, known_flags))
            value = rest.pop(0)
        if option == "config":
            config_paths.append(Path(value))
        elif difflib.get_close_matches(option, ("config", "config_path"), n=1, cutoff=0.75):
            raise ConfigError(f"unknown key {name}; did you mean 'config'?")
        else:
            _put(overrides, name, _override_value(name, value))
    return Arguments(tuple(config_paths), overrides, frozenset(flags))


def _missing_value(name: str, known_flags: Iterable[str]) -> str:
    options = ["config", *sorted(known_flags)]
    if name == "config":
        return f"--{name} needs a value; write --{name} FILE, or --{name}=FILE if the file's name starts with --"
    close = difflib.get_close_matches(name.replace("-", "_"), options, n=1, cutoff=0.75)
    hint = f"; did you mean --{close[0]}?" if close else f"; write --{name} VALUE (for a switch: --{name} true)"
    return f"--{name} needs a value{hint}"


_QUOTED = "'\"|>!"
"""First characters of text with quotes or a tag of YAML."""


def _override_value(name: str, text: str) -> Any:
    if text == "":
        return ""
    if not text.isascii() and any("\ud800" <= character <= "\udfff" for character in text):
        raise ConfigError(f"--{name}: {text!r} is not UTF-8 text; rename the file or folder")
    try:
        value = parse_value(text)
        # YAML drops comments, folds newlines and strips spaces, which may be part of a path.
        is_comment = value is None and text.lstrip().startswith("#")
        if is_comment or (isinstance(value, str) and text.lstrip()[0] not in _QUOTED):
            return text
        return Written(text, value) if isinstance(value, int | float) and text[0] not in _QUOTED else value
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


def _suggest_section(problem: str, known: Sequence[str]) -> str:
    """Add the right section to the problem of a key in the wrong one."""
    match = re.match(r"unknown key (\S+);", problem)
    if match is None or "did you mean" in problem or "belongs to" in problem:
        return problem
    leaf = match[1].rpartition(".")[2]
    leaves = {key: key.rpartition(".")[2] for key in known}
    # An equal name is the closest match.
    close = difflib.get_close_matches(leaf, set(leaves.values()), n=1, cutoff=0.75)
    elsewhere = [key for key in known if leaves[key] in close]
    if not elsewhere:
        return problem
    # The keys of the section itself follow, unless they are those of the whole config.
    listing = problem.partition("; ")[2]
    own = f" {listing}" if "." in match[1] and listing.count(",") < LISTED_NAMES else ""
    return f"unknown key {match[1]}; did you mean {' or '.join(elsewhere[:3])}?{own}"


def _suggest_option(problem: str) -> str:
    """Name the option of a missing key, for a command line without a config file."""
    match = re.match(r"(\w+) is missing;", problem)
    return problem if match is None else f"{problem}; give it with --{match[1]}"
