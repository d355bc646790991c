# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""The two formats of rollout files, Parquet and JSON lines, and the checks of files that a user may have edited."""

import json
import math
from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from marin_rl.runs.stored_rollout import SCHEMA, SCHEMA_VERSION, TOKEN_COLUMNS, VERSION_KEY
from marin_rl.utils.remote_path import RemotePath
from marin_rl.utils.storage import StoragePath

_NULLABLE = frozenset(
    [
        *("answer", "error", "not_trained", "reward", "advantage", "info", "last_observation"),
        *("score", "reason", "failure", "base_reward", "content", "more", "action"),
        *(*TOKEN_COLUMNS, "episode_advantage", "step_return", "step_advantage"),
    ]
)
"""Columns and fields that may be null."""

_PER_TOKEN = {
    "token_ids": ("pieces", "loss_mask", "logprobs", *TOKEN_COLUMNS),
    "observation_tokens": ("observation_pieces",),
}
"""Lists with one item per token, by the name of the token list."""


class OtherVersionError(ValueError):
    """A file has another schema version."""


def as_parquet(table: pa.Table) -> pa.Buffer:
    """Convert a table to the content of a Parquet file."""
    content = pa.BufferOutputStream()
    pq.write_table(table, content, compression="zstd", write_statistics=False)
    return content.getvalue()


def as_jsonl(table: pa.Table) -> bytes:
    """Convert a table to JSON lines, with a token's bytes as text, or as `{"hex": …}` if they are not valid UTF-8."""
    stored = table.to_pylist(maps_as_pydicts="strict")
    lines = [json.dumps(_jsonable({"version": SCHEMA_VERSION, **row}), ensure_ascii=False) for row in stored]
    return "".join(f"{line}\n" for line in lines).encode()


def from_parquet(path: StoragePath, columns: Sequence[str]) -> pa.Table:
    """Read and check columns of a Parquet file, which a user may have edited; see `from_jsonl`."""
    # Neither a Python object nor threads: a thread of Arrow that releases a Python object while the interpreter exits
    # aborts the process.
    source = pa.BufferReader(path.read_bytes()) if isinstance(path, RemotePath) else str(path)
    with pq.ParquetFile(source) as parquet:
        version = (parquet.schema_arrow.metadata or {}).get(VERSION_KEY)
        _check_version(None if version is None else version.decode())
        table = parquet.read(columns=list(columns), use_threads=False)
    _check_columns(table, columns)
    return table


def from_jsonl(path: StoragePath, columns: Sequence[str]) -> pa.Table:
    """Read and check columns of a file of JSON lines, which a user may have edited.

    Args:
        path: the file.
        columns: names of `SCHEMA`.

    Returns:
        The rollouts.

    Raises:
        OtherVersionError: if the file has another schema version.
        ValueError: if a column is missing, has another type or a forbidden null, or if lists over the same tokens
            differ in length; names the column. Arrow and JSON raise further errors for files that they cannot read.
    """
    rows = []
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        row = json.loads(line)
        if not isinstance(row, dict):
            raise ValueError(f"line {number} is not a JSON object")
        _check_version(row.pop("version", None))
        if absent := [name for name in SCHEMA.names if name not in row]:
            raise ValueError(f"line {number} has no column {absent[0]!r}")
        rows.append({field.name: _from_jsonable(row[field.name], field) for field in SCHEMA})
    table = pa.Table.from_pylist(rows, schema=SCHEMA)
    _check_columns(table, SCHEMA.names)
    return table.select(list(columns))


def _jsonable(value: Any) -> Any:
    if isinstance(value, bytes):
        try:
            return value.decode("utf-8")
        except UnicodeDecodeError:
            return {"hex": value.hex()}
    if isinstance(value, float) and not math.isfinite(value):
        # JSON has no such numbers; metrics.jsonl uses the same strings.
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, dict):
        return {name: _jsonable(inner) for name, inner in value.items()}
    return [_jsonable(inner) for inner in value] if isinstance(value, list) else value


def _from_jsonable(value: Any, field: pa.Field) -> Any:
    """Invert `_jsonable` for a value of a column or of a field in it."""
    kind = field.type
    if isinstance(value, dict) and pa.types.is_struct(kind):
        return {inner.name: _from_jsonable(value.get(inner.name), inner) for inner in kind}
    if isinstance(value, dict) and pa.types.is_map(kind):
        return [(name, float(number)) for name, number in value.items()]
    if isinstance(value, list) and pa.types.is_map(kind):
        # Arrow aborts the process on a map with items that are not pairs.
        raise ValueError(f"{field.name!r} is a list, expected an object of numbers")
    if isinstance(value, list) and pa.types.is_list(kind):
        # Most lists are numbers of tokens, which need no conversion.
        is_plain = all(type(item) in (int, float, bool) for item in value)
        return value if is_plain else [_from_jsonable(item, kind.value_field) for item in value]
    if pa.types.is_binary(kind):
        return value.encode("utf-8") if isinstance(value, str) else bytes.fromhex(value["hex"])
    return float(value) if isinstance(value, str) and pa.types.is_floating(kind) else value


def _check_version(version: object) -> None:
    if version is None:
        raise ValueError("it has no schema version")
    if str(version) != str(SCHEMA_VERSION):
        raise OtherVersionError(f"its schema version is {version}, this program reads version {SCHEMA_VERSION}")


def _check_columns(table: pa.Table, columns: Sequence[str]) -> None:
    for name in columns:
        if name not in table.column_names:
            raise ValueError(f"it has no column {name!r}")
        actual, expected = table.schema.field(name).type, SCHEMA.field(name).type
        if actual != expected:
            raise ValueError(f"column {name!r} has the type {actual}, expected {expected}")
        for chunk in table[name].chunks:
            _check_array(name, name, chunk)


def _check_array(path: str, name: str, array: pa.Array) -> None:
    if array.null_count and name not in _NULLABLE:
        raise ValueError(f"{path!r} contains null")
    if isinstance(array, pa.MapArray):
        _check_array(path, "value", array.items)
    elif isinstance(array, pa.ListArray):
        _check_array(path, "item", array.flatten())
    elif isinstance(array, pa.StructArray):
        present = array.drop_null()
        fields = {field.name: present.field(index) for index, field in enumerate(present.type)}
        for inner, values in fields.items():
            _check_array(f"{path}.{inner}", inner, values)
        for tokens, names in _PER_TOKEN.items():
            for inner in (inner for inner in names if inner in fields):
                expected, lengths = (fields[each].value_lengths().to_pylist() for each in (tokens, inner))
                if any(length not in (None, other) for length, other in zip(lengths, expected, strict=True)):
                    raise ValueError(f"'{path}.{inner}' differs in length from '{path}.{tokens}'")
