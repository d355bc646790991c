# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Checks of local data files before they are loaded: small files that expand to more than memory and disk can hold."""

import bz2
import gzip
import lzma
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO, Any

from marin_rl.utils.errors import MAX_NAME, describe
from marin_rl.utils.storage import check_small

MAX_EXPANSION = 200
"""Maximum factor by which a file may expand; texts compress by less than 20."""
UNCHECKED_BYTES = 2**30
"""Expanded size up to which any factor is allowed."""
MAX_COLUMNS = 2_000
"""Maximum columns of a Parquet file; the time to load one grows with their square."""

_OPENERS: dict[str, Callable[..., Any]] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}


class DataFileError(ValueError):
    """A data file cannot be loaded; the message names the file and the remedy."""


def check_data_files(source: Path) -> None:
    """Check the Parquet and compressed files in a folder, or one such file; reads them once, in small pieces.

    The files that describe a dataset to the package `datasets`, which reads them as a whole, must be small. `source` is
    a file, or an existing folder, whose subfolders are included.

    Raises:
        DataFileError: if a file expands too much, has too many columns, or cannot be read.
    """
    # Imported here because it takes time, and most environments have no such files.
    import pyarrow as pa

    for path in (source / "README.md", source / ".huggingface.yaml"):
        if path.exists():
            check_small(path)
    for path in sorted(source.rglob("*")) if source.is_dir() else [source]:
        if path.is_file() and path.suffix in (".parquet", *_OPENERS):
            try:
                _check_expansion(path)
            except (OSError, EOFError, lzma.LZMAError, pa.ArrowException, MemoryError) as error:
                reason = str(error) or "out of memory"
                raise DataFileError(f"cannot read {str(path)!r}: {reason}; replace or remove the file") from error


def python_rows(tables: Iterable[Any], source: str, first: int = 0) -> Iterator[dict[str, Any]]:
    """Convert tables or batches of Arrow, whose first row has the number `first`, to Python values.

    Raises:
        DataFileError: if Python has no such value, such as a date after the year 9999 or text that is not UTF-8; the
            message names source, row and column.
    """
    for table in tables:
        try:
            yield from table.to_pylist()
        except Exception as error:
            # PyArrow, pandas and packages of time zones raise errors of many types.
            raise DataFileError(f"{source}, {_bad_value(table, first)}; correct it, or remove the column") from error
        first += len(table)


def _bad_value(table: Any, first: int) -> str:
    for name, column in zip(table.schema.names, table.columns, strict=True):
        for row, value in enumerate(column, start=first):
            try:
                value.as_py()
            except Exception as error:
                kind = f"{str(value.type)[:MAX_NAME]} that cannot be read ({describe(error)})"
                return f"row {row}: column {name[:MAX_NAME]!r} has a value of type {kind}"
    return f"rows from {first} on have a column that cannot be read"


def _check_expansion(path: Path) -> None:
    allowed = max(UNCHECKED_BYTES, MAX_EXPANSION * path.stat().st_size)
    total = 0
    for size in _parquet_sizes(path) if path.suffix == ".parquet" else _stream_sizes(_OPENERS[path.suffix](path)):
        total += size
        if total > allowed:
            raise DataFileError(
                f"{str(path)!r} expands from {path.stat().st_size:,} to more than {allowed:,} bytes, which real data "
                "does not; if it is right, store it uncompressed"
            )


def _parquet_sizes(path: Path) -> Iterator[int]:
    import pyarrow.parquet as pq

    with pq.ParquetFile(path) as file:
        if (columns := len(file.schema_arrow)) > MAX_COLUMNS:
            raise DataFileError(f"{str(path)!r} has {columns:,} columns, more than {MAX_COLUMNS:,}; keep the used ones")
        for batch in file.iter_batches(batch_size=256):
            yield sum(_decoded(column).nbytes for column in batch.columns)


def _decoded(column: Any) -> Any:
    """Return a column with a dictionary as the values that it stands for."""
    import pyarrow as pa

    return column.dictionary_decode() if pa.types.is_dictionary(column.type) else column


def _stream_sizes(stream: IO[bytes]) -> Iterator[int]:
    with stream:
        while piece := stream.read(2**20):
            yield len(piece)
