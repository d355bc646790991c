# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Lossless encoding of tasks and groups, for checkpoints and rollout workers.

The records of [`types`][marin_rl.types] define the format. A task is a JSON object with its fields by name. A group is
a binary message:

```
rollout-group-3    format, with a line feed
u64 u64 u64 u64    bytes of JSON, number of token ids, number of log-probs, bytes of arrays
JSON               the group as an object; in the place of a list of token ids or log-probs, its length, and of an
                   array, its type and shape
i32 ...            the token ids of all lists
f64 ...            the log-probs of all lists
u8 or u16 ...      the experts of all arrays
```

Numbers are little-endian. The lists of a record come before those of the records inside it, in the order of fields. The
rollout store ([`store`][marin_rl.runs.rollout_store]) is for viewing and analysis; this format is for the run itself.
"""

import dataclasses
import enum
import functools
import itertools
import json
import math
import struct
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from marin_rl.types import (
    EXPERT_DTYPES,
    Generation,
    Observation,
    RewardResult,
    Rollout,
    RolloutGroup,
    Task,
    Turn,
    TurnReward,
)

_FORMAT = b"rollout-group-3\n"
_SIZES = struct.Struct("<QQQQ")
_TOKENS, _LOGPROBS = tuple[int, ...], tuple[float, ...]
"""The types of fields that are lists of token ids, or of log-probs."""
_ARRAY = "np.ndarray | None"
"""The type of fields that are arrays."""
_RECORDS = frozenset({RolloutGroup, Rollout, Task, Turn, Generation, Observation, RewardResult, TurnReward})


class OtherFormatError(ValueError):
    """An encoded group has another format."""


def encode_task(task: Task) -> dict[str, Any]:
    """Convert a task to JSON values.

    Raises:
        ValueError: if its anchor state is not a JSON value; the message names the task.
    """
    try:
        return json.loads(json.dumps(task, default=functools.partial(_json_fields, {}), allow_nan=False))
    except (TypeError, ValueError) as error:
        raise ValueError(f"task {task.id!r} cannot be saved: {error}") from error


def decode_task(values: Mapping[str, Any]) -> Task:
    """Invert `encode_task`."""
    return _decoder(Task)(values, {})


def encode_group(group: RolloutGroup) -> bytes:
    """Encode a group.

    Raises:
        ValueError: if the group contains a value that is not JSON, a token id that is not a 32-bit integer, or a
            log-prob that is not a number; the message names the group.
    """
    lists: dict[Any, list[Any]] = {_TOKENS: [], _LOGPROBS: [], _ARRAY: []}
    try:
        text = json.dumps(group, default=functools.partial(_json_fields, lists), separators=(",", ":")).encode()
        tokens, logprobs = lists[_TOKENS], lists[_LOGPROBS]
        arrays = struct.pack(f"<{len(tokens)}i", *tokens), struct.pack(f"<{len(logprobs)}d", *logprobs)
    except (TypeError, ValueError, struct.error) as error:
        raise ValueError(f"group {group.id!r} cannot be saved: {error}") from error
    experts = lists[_ARRAY]
    sizes = _SIZES.pack(len(text), len(tokens), len(logprobs), sum(map(len, experts)))
    return b"".join((_FORMAT, sizes, text, *arrays, *experts))


def decode_group(data: bytes) -> RolloutGroup:
    """Invert `encode_group`.

    Raises:
        OtherFormatError: if another version of marin_rl encoded the group.
        ValueError: if the data is damaged.
    """
    if not data.startswith(_FORMAT):
        raise OtherFormatError(f"a group is not in the format {_FORMAT.decode().strip()!r} of this version")
    try:
        at = len(_FORMAT) + _SIZES.size
        text_size, num_tokens, num_logprobs, array_size = _SIZES.unpack_from(data, len(_FORMAT))
        if len(data) != at + text_size + 4 * num_tokens + 8 * num_logprobs + array_size:
            raise ValueError(f"it has {len(data)} bytes")
        values = json.loads(data[at : at + text_size])
        at += text_size
        lists = {
            _TOKENS: _Reader(struct.unpack_from(f"<{num_tokens}i", data, at)),
            _LOGPROBS: _Reader(struct.unpack_from(f"<{num_logprobs}d", data, at + 4 * num_tokens)),
            _ARRAY: _Reader(memoryview(data)[len(data) - array_size :]),
        }
        group = _decoder(RolloutGroup)(values, lists)
        if not all(each.is_read for each in lists.values()):
            raise ValueError("the lengths of its lists differ from its arrays")
    except (AttributeError, LookupError, OverflowError, TypeError, ValueError, struct.error) as error:
        raise ValueError(f"an encoded group is damaged: {error}") from error
    return group


def join_parts(parts: Sequence[bytes]) -> bytes:
    """Join byte strings to one message: a line of JSON with their lengths, then the strings.

    >>> split_parts(join_parts([b"one", b"", b"three"]))
    [b'one', b'', b'three']
    """
    return b"".join((json.dumps(list(map(len, parts))).encode(), b"\n", *parts))


def split_parts(message: bytes) -> list[bytes]:
    """Invert `join_parts`."""
    header, _, joined = message.partition(b"\n")
    ends = list(itertools.accumulate(json.loads(header)))
    return [joined[start:end] for start, end in zip([0, *ends], ends, strict=False)]


class _Reader:
    """Splits an array into lists."""

    def __init__(self, values: Any) -> None:
        self._values, self._at = values, 0

    def take(self, count: int) -> Any:
        start, self._at = self._at, self._at + count
        return self._values[start : self._at]

    @property
    def is_read(self) -> bool:
        return self._at == len(self._values)


def _json_fields(lists: Mapping[Any, list[Any]], record: object) -> dict[str, Any]:
    """Return a record's fields for JSON; token ids, log-probs and arrays are moved to `lists`."""
    if type(record) not in _RECORDS:
        raise TypeError(f"{type(record).__name__} is not a JSON value")
    fields = dict(vars(record))
    for name, kind in _list_fields(type(record)):
        if kind != _ARRAY:
            lists[kind].extend(fields[name])
            fields[name] = len(fields[name])
        elif (array := fields[name]) is not None:
            lists[kind].append(array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes())
            fields[name] = [array.dtype.name, *array.shape]
    return fields


def _read_array(described: Sequence[Any] | None, reader: _Reader) -> np.ndarray | None:
    """Invert the conversion of an array to bytes, with its type and shape."""
    if described is None:
        return None
    name, *shape = described
    if name not in EXPERT_DTYPES or min(shape, default=0) < 0:
        raise ValueError(f"an array is {described!r:.100}")
    dtype = np.dtype(name)
    data = reader.take(math.prod(shape) * dtype.itemsize)
    # A copy in the order of this machine's bytes, which does not keep the message in memory.
    return np.frombuffer(data, dtype.newbyteorder("<")).reshape(shape).astype(dtype)


@functools.cache
def _list_fields(kind: Any) -> list[tuple[str, Any]]:
    """The fields of a record that are lists of token ids or log-probs, or arrays, with their types in `lists`."""
    kinds = (_TOKENS, _LOGPROBS, _ARRAY)
    return [(field.name, field.type) for field in dataclasses.fields(kind) if field.type in kinds]


Decode = Callable[[Any, Mapping[Any, _Reader]], Any]
"""Converts JSON values to a type; lists of token ids and log-probs, and arrays, are taken from readers."""


@functools.cache
def _decoder(kind: Any) -> Decode:
    """Return the conversion to an annotated type, such as `tuple[Turn, ...]`."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if kind in _RECORDS:
        return _record_decoder(kind)
    if isinstance(kind, enum.EnumType):
        members = {member.value: member for member in kind}
        return lambda value, lists: members[value]
    if origin not in (types.UnionType, tuple, Sequence):
        return _unchanged
    item = _decoder(arguments[0])
    if origin is types.UnionType:
        # Every union is `X | None`.
        return item if item is _unchanged else lambda value, lists: None if value is None else item(value, lists)
    build = tuple if origin is tuple else list
    if item is _unchanged:
        return lambda values, lists: build(values)
    return lambda values, lists: build([item(value, lists) for value in values])


def _record_decoder(kind: Any) -> Decode:
    list_fields = _list_fields(kind)
    names = {name for name, _ in list_fields}
    others = [(field.name, _decoder(field.type)) for field in dataclasses.fields(kind) if field.name not in names]
    converted = [(name, decode) for name, decode in others if decode is not _unchanged]

    def decode(values: Mapping[str, Any], lists: Mapping[Any, _Reader]) -> Any:
        fields = dict(values)
        for name, list_kind in list_fields:
            reader = lists[list_kind]
            fields[name] = _read_array(fields[name], reader) if list_kind == _ARRAY else reader.take(fields[name])
        for name, decode_field in converted:
            fields[name] = decode_field(fields[name], lists)
        return kind(**fields)

    return decode


def _unchanged(value: Any, lists: Mapping[Any, _Reader]) -> Any:
    return value
