# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""History of the config of a run: `config.yaml` begins with a comment for each change.

```
# after step 12: num_steps 12 -> 20
```

Readable without levanter, which takes seconds to import.
"""

import dataclasses
import json
import re
from collections.abc import Sequence
from typing import Any

from marin_rl.runs.run_directory import RunDirectory, comments_of, read_config_text, write_atomically
from marin_rl.utils.settings.yaml_text import parse_yaml

NOT_SET = "not set"


@dataclasses.dataclass(frozen=True)
class Change:
    """A changed key of the config."""

    step: int
    """Completed steps before the change."""
    key: str
    """Dotted key."""
    old: str
    """Value before the change, as JSON, or `not set`."""
    new: str
    """Value after the change, likewise."""

    def __str__(self) -> str:
        return f"{self.key} {self.old} -> {self.new}"


def read_history(text: str) -> list[Change]:
    """Return the changes that the comments of a `config.yaml` list, in their order."""
    parsed = [_parse(line) for line in comments_of(text).splitlines()]
    return [change for change in parsed if change is not None]


def _parse(line: str) -> Change | None:
    match = re.fullmatch(r"# after step (\d+): (\S+) (.+)", line)
    if match is None:
        return None
    values = match[3]
    try:
        end = len(NOT_SET) if values.startswith(NOT_SET) else json.JSONDecoder().raw_decode(values)[1]
        if values[end + 4 :] != NOT_SET:
            json.loads(values[end + 4 :])
    except ValueError:
        return None
    return Change(int(match[1]), match[2], values[:end], values[end + 4 :])


def record_changes(directory: RunDirectory, changes: Sequence[Change], config: str, step: int) -> list[Change]:
    """Write the config of a run that resumes, with the changes in its history.

    Args:
        directory: run directory.
        changes: new changes.
        config: the new config, as YAML.
        step: step of the checkpoint from which the run resumes. The run repeats later steps with the new config, so
            former changes after later steps are moved to this one.

    Returns:
        The history.

    Raises:
        RunDirectoryError: if the file cannot be written.
    """
    text = read_config_text(directory)
    lines = comments_of(text).splitlines()
    for index, former in enumerate(map(_parse, lines)):
        if former is not None and former.step > step:
            lines[index] = f"# after step {step}: {former}"
    lines += [f"# after step {step}: {change}" for change in changes]
    new = "".join(f"{line}\n" for line in lines) + (config if changes else text[len(comments_of(text)) :])
    if new != text:
        write_atomically(directory.config, new)
    return read_history(new)


def changed_values(history: Sequence[Change], step: int) -> dict[str, float]:
    """Return the numbers that were changed after a step, as metrics `config/<key>`."""
    values = {change.key: json.loads(change.new) for change in history if change.step == step and change.new != NOT_SET}
    return {f"config/{key}": float(value) for key, value in values.items() if type(value) in (int, float)}


def values_of_step(directory: RunDirectory, step: int) -> dict[str, Any]:
    """Return the config that a step of a run was trained with, as plain values: later changes are undone.

    Raises:
        RunDirectoryError: if the config cannot be read.
        ConfigError: if it is not valid YAML.
    """
    text = read_config_text(directory)
    values = parse_yaml(text, str(directory.config))
    former: dict[str, Change] = {}
    for change in read_history(text):
        if change.step >= step:
            former.setdefault(change.key, change)
    # A section that replaced a plain value, and keys of another type, are removed before values are set again.
    for change in sorted(former.values(), key=lambda change: change.old != NOT_SET):
        _undo(values, change)
    return values


def _undo(values: dict[str, Any], change: Change) -> None:
    *sections, leaf = change.key.split(".")
    for section in sections:
        inner = values.get(section)
        values[section] = values = inner if isinstance(inner, dict) else {}
    if change.old == NOT_SET:
        values.pop(leaf, None)
    else:
        values[leaf] = json.loads(change.old)
