# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Checksums of the local files that a config names, to find out whether they were changed or differ between hosts.

These are data files, chat templates, tokenizer folders, Python files of users with the files that they import, and
files that the options of environments, tools and rewards name. Hub names and addresses are not read.
"""

import fnmatch
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from marin_rl.config.train_config import TrainConfig
from marin_rl.utils.settings.fields import changeable_keys, is_within, local_inputs, named_files
from marin_rl.utils.storage import WEIGHTS, digest_of
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


def digest_inputs(config: TrainConfig, sections: Sequence[str] = ()) -> dict[str, dict[str, str]]:
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
    without_effect = changeable_keys(TrainConfig)
    paths = [(key.partition(".")[0], text) for key, text in local_inputs(config) if not is_within(key, without_effect)]
    for section, text in [*paths, *((NAMED, text) for text in named_files(config))]:
        if sections and section not in sections:
            continue
        for file in _files_of(Path(text).expanduser()):
            real = file.resolve()
            if real not in known:
                known[real] = digest_of(file).sha256
            found.setdefault(section, {})[_shown(file, text)] = known[real]
    return found


def _shown(file: Path, text: str) -> str:
    """The path of a file as the config writes it: another user may resume a run that names files in `~`."""
    home = Path.home() if text.startswith("~/") else None
    return str(file) if home is None or not file.is_relative_to(home) else f"~/{file.relative_to(home)}"


def _files_of(path: Path) -> Iterator[Path]:
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
        folders[:] = sorted(name for name in folders if not _is_ignored(name))
        files = [Path(folder, name) for name in sorted(names) if not _is_ignored(name)]
        yield from (file for file in files if file.is_file())


def _is_ignored(name: str) -> bool:
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
