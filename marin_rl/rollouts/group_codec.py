# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Lossless JSON encoding of tasks and groups, for checkpoints and rollout workers.

The records of [`types`][marin_rl.types] define the format: an object per record, with its fields by name. The rollout
store ([`store`][marin_rl.rollouts.store]) is for viewing and analysis; this format is for the run itself.
"""

import dataclasses
import enum
import functools
import json
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from marin_rl.types import RolloutGroup, Task


def encode_task(task: Task) -> dict[str, Any]:
    """Convert a task to JSON values.

    Raises:
        ValueError: if its anchor state is not a JSON value; the message names the task.
    """
    return json.loads(_encode(task, f"task {task.id!r}", allow_nan=False))


def decode_task(values: Mapping[str, Any]) -> Task:
    """Invert `encode_task`."""
    return _decoder(Task)(values)


def encode_group(group: RolloutGroup) -> str:
    """Encode a group as one line of JSON, in which non-finite metrics are `NaN` or `Infinity`.

    Raises:
        ValueError: if the group contains a value that is not JSON; the message names the group.
    """
    return _encode(group, f"group {group.id!r}", allow_nan=True)


def decode_group(text: str) -> RolloutGroup:
    """Invert `encode_group`."""
    return _decoder(RolloutGroup)(json.loads(text))


def _encode(record: Task | RolloutGroup, name: str, *, allow_nan: bool) -> str:
    try:
        return json.dumps(dataclasses.asdict(record), allow_nan=allow_nan, separators=(",", ":"))
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name} cannot be saved: {error}") from error


@functools.cache
def _decoder(kind: Any) -> Callable[[Any], Any]:
    """Return a function that converts JSON values to an annotated type, such as `tuple[Turn, ...]`."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        fields = {field.name: _decoder(field.type) for field in dataclasses.fields(kind)}
        return lambda values: kind(**{name: fields[name](value) for name, value in values.items()})
    if origin is types.UnionType:
        # Every union is `X | None`.
        present = _decoder(arguments[0])
        return lambda value: None if value is None else present(value)
    if origin in (tuple, Sequence):
        item, build = _decoder(arguments[0]), tuple if origin is tuple else list
        return lambda values: build(values if item is _unchanged else map(item, values))
    if isinstance(kind, enum.EnumType):
        return kind
    return _unchanged


def _unchanged(value: Any) -> Any:
    return value
