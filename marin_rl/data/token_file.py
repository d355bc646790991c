# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Tokenized data, and the file in which a run keeps it for its next start.

The file is a checksum and an Arrow stream. The checksum includes the digest of the rows, the tokenizer and the
settings, so that a damaged file is not read, nor one of other data.
"""

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from marin_rl.data.rows import Example
from marin_rl.environments.row_columns import Row
from marin_rl.tokenization.chat import ChatTokenizer
from marin_rl.utils.storage import StoragePath, write_bytes

TOKENS = "tokens.arrow"
"""Name of the file in the run directory."""
_FORMAT = 1
"""Raise it if a row gets other tokens or masks, or the file another form."""
_CHECKSUM = hashlib.sha256().digest_size


class Encoded(NamedTuple):
    """Tokenized rows."""

    examples: list[Example]
    """The rows that fit."""
    skipped: int
    """Number of rows that were left out because they are too long."""
    truncated: int
    """Number of rows with a sequence that was cut."""
    unused: tuple[str, ...] = ()
    """Columns that are not used."""


class Data(NamedTuple):
    """Tokenized rows of a source."""

    train: Encoded
    """Rows to train on."""
    held_out: Encoded
    """Rows on which the loss is measured."""
    digest: str | None
    """Digest of the rows, the tokenizer and the settings; None if the tokens were read from a file."""


def digest_rows(parts: Sequence[Sequence[Row]], tokenizer: ChatTokenizer, *settings: object) -> str:
    """Return the SHA-256 digest of rows, and of what determines their tokens."""
    digest = hashlib.sha256(
        json.dumps([_FORMAT, tokenizer.digest, settings, [*map(len, parts)]], default=repr).encode()
    )
    for part in parts:
        for row in part:
            digest.update(json.dumps([row.where, row.values], default=repr).encode())
    return digest.hexdigest()


def write_tokens(path: StoragePath, data: Data, digest: str) -> None:
    """Write tokenized rows atomically.

    Raises:
        OSError: if the file cannot be written.
    """
    parts = data.train, data.held_out
    examples = [example for part in parts for example in part.examples]
    columns = {field.name: [getattr(example, field.name) for example in examples] for field in _FIELDS}
    counts = json.dumps([[len(part.examples), part.skipped, part.truncated, part.unused] for part in parts])
    table = pa.table({name: _to_arrow(values) for name, values in columns.items()}, metadata={"counts": counts})
    stream = pa.BufferOutputStream()
    with pa.ipc.new_stream(stream, table.schema) as writer:
        writer.write_table(table)
    content = stream.getvalue().to_pybytes()
    write_bytes(path, _checksum(digest, content) + content)


def read_tokens(path: StoragePath, digest: str) -> Data | None:
    """Read tokenized rows; None if there is no file, or it is damaged or has another digest."""
    try:
        content = memoryview(path.read_bytes())
    except OSError:
        return None
    checksum, content = content[:_CHECKSUM], content[_CHECKSUM:]
    if checksum != _checksum(digest, content):
        return None
    table = pa.ipc.open_stream(content).read_all()
    columns = [_from_arrow(table.column(field.name)) for field in _FIELDS]
    examples = [Example(*values) for values in zip(*columns, strict=True)]
    found, start = list[Encoded](), 0
    for size, skipped, truncated, unused in json.loads(table.schema.metadata[b"counts"]):
        found.append(Encoded(examples[start : start + size], skipped, truncated, tuple(unused)))
        start += size
    return Data(found[0], found[1], digest=None)


_FIELDS = dataclasses.fields(Example)


def _checksum(digest: str, content: bytes | memoryview) -> bytes:
    checksum = hashlib.sha256(digest.encode())
    checksum.update(content)
    return checksum.digest()


def _to_arrow(values: list[Any]) -> pa.Array:
    """Convert a field of examples; arrays become large lists without a Python object per item."""
    if not all(isinstance(value, np.ndarray) for value in values):
        return pa.array(values)
    ends = np.cumsum([0, *map(len, values)], dtype=np.int64)
    return pa.LargeListArray.from_arrays(ends, pa.array(np.concatenate(values)))


def _from_arrow(column: pa.ChunkedArray) -> Iterable[Any]:
    if not pa.types.is_large_list(column.type):
        values = column.to_pylist()
        return map(tuple, values) if pa.types.is_list(column.type) else values
    [array] = column.chunks
    return np.split(array.values.to_numpy(zero_copy_only=False), array.offsets.to_numpy()[1:-1])
