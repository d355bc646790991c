# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""The local files that a config names: whether they exist, and checksums that show changes and differences of hosts.

These are data files, chat templates, tokenizer folders, Python files of users with the files that they import, and
files that the options of environments, tools and rewards name. Hub names and addresses are not read.
"""

import ast
import fnmatch
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from marin_rl.config.reference_config import CheckpointReferenceConfig
from marin_rl.config.run_config import AbstractRunConfig
from marin_rl.runs.run_directory import ROWS, own_rows
from marin_rl.tokenization.config import BYTES, PLAIN
from marin_rl.utils.errors import explain, nearest_file
from marin_rl.utils.hub import HubError, check_source
from marin_rl.utils.settings.fields import (
    changeable_keys,
    input_files,
    is_within,
    local_inputs,
    named_files,
    nested_sections,
)
from marin_rl.utils.storage import WEIGHTS, digest_of, user_path
from marin_rl.utils.user_code import imported_files

IGNORED = (
    *(".*", "__pycache__", "*.lock", "*.log", "wandb"),
    # Backups of editors.
    *("*~", "#*#", "*.bak", "*.orig", "*.tmp"),
    # Weights next to a tokenizer, and results that the package `datasets` stores next to its files.
    *(*WEIGHTS, "cache-*.arrow"),
)
"""Names in an input folder that are not compared."""

RUN_DIRECTORY = {"config.yaml", "checkpoints"}
"""Names of which a folder in an input folder has all if it is a run directory, which is not compared."""

NAMED = "options"
"""Section of the files that options name."""

Inputs = Mapping[str, Mapping[str, str]]
"""SHA-256 checksums by section and path. Sections are the top-level keys of the config, and `NAMED`."""


def digest_inputs(config: AbstractRunConfig, sections: Sequence[str] = ()) -> dict[str, dict[str, str]]:
    """Compute the checksums of the local files that a config names; each file is read once.

    Args:
        config: training config; relative paths start at the working directory.
        sections: sections to read; empty for all.

    Returns:
        Checksums by section and path, with all of the given `sections`. A path that does not exist is omitted: it may
        be a name on the hub.

    Raises:
        OSError: if a file cannot be read.
    """
    found: dict[str, dict[str, str]] = {section: {} for section in sections}
    known: dict[Path, str] = {}
    without_effect = changeable_keys(type(config))
    paths = [(key.partition(".")[0], text) for key, text in local_inputs(config) if not is_within(key, without_effect)]
    for section, text in [*paths, *((NAMED, text) for text in named_files(config))]:
        if sections and section not in sections:
            continue
        for file in _files_of(Path(text).expanduser(), weights=section == "reference"):
            real = file.resolve()
            if real not in known:
                known[real] = digest_of(file).sha256
            # The rows of a run move with its directory.
            shown = ROWS if text == own_rows(config.run_dir) else _shown(file, text)
            found.setdefault(section, {})[shown] = known[real]
    return found


def _shown(file: Path, text: str) -> str:
    """The path of a file as the config writes it: another user may resume a run that names files in `~`."""
    home = Path.home() if text.startswith("~/") else None
    return str(file) if home is None or not file.is_relative_to(home) else f"~/{file.relative_to(home)}"


def _files_of(path: Path, *, weights: bool) -> Iterator[Path]:
    """Yield the files of an input; of a run directory those of its exported weights."""
    if (path / "hf").is_dir() and all((path / name).exists() for name in RUN_DIRECTORY):
        path = path / "hf"
    if path.is_file():
        yield path
        if path.suffix == ".py":
            yield from imported_files(path)
        return
    visited: set[str] = set()
    for folder, folders, names in os.walk(path, followlinks=True):
        real = os.path.realpath(folder)
        if real in visited or (Path(folder) != path and {*folders, *names} >= RUN_DIRECTORY):
            folders.clear()
            continue
        visited.add(real)
        folders[:] = sorted(name for name in folders if not _is_ignored(name, weights))
        files = [Path(folder, name) for name in sorted(names) if not _is_ignored(name, weights)]
        yield from (file for file in files if file.is_file())


def _is_ignored(name: str, weights: bool) -> bool:
    if weights and any(fnmatch.fnmatchcase(name, pattern) for pattern in WEIGHTS):
        return False
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in IGNORED)


def input_changes(before: Inputs, now: Inputs) -> list[str]:
    """Return a line for each input that was changed, removed or added; added files of `NAMED` may be outputs."""
    lines = []
    for section in sorted({*before, *now}):
        old, new = before.get(section, {}), now.get(section, {})
        for path in sorted(old if section == NAMED else {*old, *new}):
            if old.get(path) != new.get(path):
                change = "is missing" if path not in new else "was added" if path not in old else "was changed"
                lines.append(f"{section}: {path} {change}")
    return lines


def file_problems(config: AbstractRunConfig) -> Iterator[str]:
    """Problems of the files and folders that a run reads: they must exist, and Python files must be parsed."""
    for key, text in input_files(config):
        if text != PLAIN and (problem := _file_problem(user_path(text, key))):
            yield f"{key} is {text!r}, {problem}"
    # A run that resumes does not read initialize_from again.
    is_new = "://" in config.run_dir or not user_path(config.run_dir, "run_dir").exists()
    folders = {"tokenizer.path": config.tokenizer.path, "initialize_from": config.initialize_from if is_new else None}
    for key, part in nested_sections(config):
        if isinstance(part, CheckpointReferenceConfig):
            folders[f"{key}.path"] = part.path
    for key, text in folders.items():
        if text is not None and text != BYTES and "://" not in text:
            try:
                check_source(text, key)
            except HubError as error:
                yield str(error)


def _file_problem(path: Path) -> str:
    """Description of the reason why a file cannot be read; empty if it can."""
    try:
        if path.is_dir():
            return "which is a folder; set it to a file in that folder"
        if not path.exists():
            return f"which does not exist; {nearest_file(path, {path.suffix})}"
    except OSError as error:
        return f"which is not a path ({error.strerror}); write it into a file, and set the path of that file"
    if not os.access(path, os.R_OK):
        return "which this user may not read; change its permissions"
    return _syntax_problem(path) if path.suffix == ".py" and path.is_file() else ""


def _syntax_problem(path: Path) -> str:
    try:
        with warnings.catch_warnings():
            # Repeated when the file is imported.
            warnings.simplefilter("ignore")
            ast.parse(path.read_bytes(), str(path))
    except (SyntaxError, ValueError) as error:
        return f"which Python cannot read: {explain(error)}"
    return ""
