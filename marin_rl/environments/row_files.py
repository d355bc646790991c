# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Rows of JSONL files, of Parquet files, and of datasets in the format of Hugging Face."""

import codecs
import gzip
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import yaml

from marin_rl.environments.data_files import check_data_files, python_rows
from marin_rl.environments.row_columns import Row
from marin_rl.utils.errors import MAX_DESCRIPTION
from marin_rl.utils.hub import DATASET, LFS_PROBLEM, check_source

if TYPE_CHECKING:
    from datasets import Dataset

MAX_LINE_BYTES = 64 * 2**20
"""Maximum size of a line of a JSONL file."""

_OTHER_FORMATS = {
    b"\x1f\x8b": "decompress the file, which is gzip, or add .gz to its name",
    b"PK\x03\x04": "unpack the file, which is zip",
    b"version https://git-lfs": LFS_PROBLEM,
    b"PAR1": "read the file, which is Parquet, with an environment of type hf, whose path is its folder; as data of "
    "supervised training its name must end with .parquet",
}
"""Remedies by the first bytes of files that are given as JSONL by mistake."""
EXAMPLE = 'problem as one JSON object on a line of its own, {"prompt": "3+4=", "answer": "7"}'
"""A problem, for the remedy for CSV, arrays and objects over several lines."""


def read_jsonl(path: Path, name: str, example: str = EXAMPLE) -> Iterator[Row]:
    """Read a JSONL file, which may be compressed if its name ends with `.gz`.

    Args:
        path: an existing file.
        name: its name for messages.
        example: what a line is, for messages.

    Raises:
        ValueError: if a line is not a JSON object in UTF-8, with file and line number.
    """
    if path.suffix == ".gz":
        check_data_files(path)
    # Binary mode, so that errors can report invalid UTF-8 with its line.
    with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
        for number, raw in enumerate(iter(lambda: file.readline(MAX_LINE_BYTES + 1), b""), start=1):
            where = f"{name}:{number}"
            remedy = next((remedy for start, remedy in _OTHER_FORMATS.items() if raw.startswith(start)), None)
            if number == 1 and remedy is not None:
                raise ValueError(f"{name} is not text with a JSON object per line; {remedy}")
            if len(raw) > MAX_LINE_BYTES:
                raise ValueError(f"{where}: the line has more than {MAX_LINE_BYTES // 2**20} MiB; write each {example}")
            if raw.removeprefix(codecs.BOM_UTF8).strip():
                yield Row(_parse_object(raw, where, example), where)


def read_parquet(path: Path, name: str) -> Iterator[Row]:
    """Read a Parquet file.

    `path` exists; `name` is for messages.

    Raises:
        DataFileError: if it cannot be read.
    """
    # Imported here because it takes time, and most runs have no such files.
    import pyarrow.parquet as pq

    from marin_rl.environments.arrow_values import parse_json

    check_data_files(path)
    with pq.ParquetFile(path) as file:
        types = file.schema_arrow
        with_json = [column for column in types if "arrow.json" in str(column.type)]
        for index, values in enumerate(python_rows(file.iter_batches(batch_size=1024), name)):
            parsed = {column.name: parse_json(values[column.name], column.type) for column in with_json}
            yield Row({**values, **parsed}, f"{name}, row {index}", types)


def describe_dataset(path: str, split: str) -> str:
    """Return the description of a split of a dataset, for messages."""
    return f"dataset {path!r}, split {split!r}"


def read_dataset(path: str, key: str, subset: str | None, split: str, revision: str | None) -> Iterator[Row]:
    """Read a split of a dataset.

    Args:
        path: name on the hub, a folder of data files, or a folder written by `save_to_disk`.
        key: the setting with the path, for messages.
        subset: configuration of a dataset that has several.
        split: name of the split.
        revision: commit or tag on the hub.

    Raises:
        ValueError: if the dataset or its split does not exist or cannot be loaded.
    """
    dataset, name = _load(path, key, subset, split, revision), describe_dataset(path, split)
    types, rows = dataset.features.arrow_schema, iter(dataset)
    for index in range(len(dataset)):
        try:
            values = next(rows)
        except Exception:
            # Of many types. `datasets` decodes several rows at a time.
            list(python_rows([dataset.with_format("arrow")[index : index + 100]], name, index))
            raise
        yield Row(cast(Mapping[str, Any], values), f"{name}, row {index}", types)


def _load(path: str, key: str, subset: str | None, split: str, revision: str | None) -> "Dataset":
    import datasets

    folder = Path(path).expanduser()
    name_or_folder = str(folder) if folder.is_dir() else path
    is_saved = (folder / "dataset_dict.json").exists() or (folder / "state.json").exists()
    if is_saved:
        for name, value in (("subset", subset), ("revision", revision)):
            if value is not None:
                raise ValueError(
                    f"{name} is {value!r}, but the folder {path!r} was saved with save_to_disk and has none; leave it "
                    "out"
                )
    elif check_source(path, key, DATASET) is not None:
        check_data_files(folder)
    try:
        if not is_saved:
            return datasets.load_dataset(name_or_folder, subset, split=split, revision=revision)
        saved = datasets.load_from_disk(name_or_folder)
    except Exception as error:
        # `datasets` and the packages under it raise errors of many types.
        problem = " ".join(str(error.__cause__ or error or "out of memory").split())[:MAX_DESCRIPTION]
        file = "YAML of its README.md or .huggingface.yaml: " if isinstance(error, yaml.YAMLError) else ""
        raise ValueError(
            f"cannot load dataset {path!r} (subset {subset!r}, split {split!r}, revision {revision!r}): {file}{problem}"
        ) from error
    # A Dataset that was saved alone has no splits.
    splits = {"train": saved} if isinstance(saved, datasets.Dataset) else dict(saved)
    if split not in splits:
        choices = ", ".join(repr(name) for name in splits)
        raise ValueError(f"dataset {path!r} has no split {split!r}; it has {choices}")
    return splits[split]


def _parse_object(line: bytes, where: str, example: str) -> dict[str, Any]:
    """Parse a line of JSON; errors start with its location `where` and quote the start of the line."""
    shown = repr(line[:200])
    try:
        # -sig: editors on Windows may write a byte order mark.
        values = json.loads(line.decode("utf-8-sig").strip(), object_pairs_hook=_without_repeats)
        # Parquet, JSON responses and tokenizers require text that UTF-8 can encode.
        json.dumps(values, ensure_ascii=False).encode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{where}: not UTF-8 text at byte {error.start + 1}; save the file as UTF-8") from error
    except UnicodeEncodeError as error:
        code = ord(error.object[error.start])
        raise ValueError(
            f"{where}: \\u{code:04x} is an unpaired surrogate, which is not a character; write the whole pair, or "
            f"remove it: {shown}"
        ) from error
    except RecursionError as error:
        raise ValueError(f"{where}: nested too deeply to read; flatten the row: {shown}") from error
    except ValueError as error:
        # Also a repeated key, and integers of more than 4,300 digits, which Python does not convert.
        problem = f"{error.msg} at column {error.colno}" if isinstance(error, json.JSONDecodeError) else error
        raise ValueError(f"{where}: not JSON: {problem}; write each {example}: {shown}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{where}: not a JSON object; write each {example}: {shown}")
    return values


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Convert an object to a dictionary; its keys must differ."""
    values = dict(pairs)
    if len(values) < len(pairs):
        raise ValueError(f"a key is repeated, keep one of each: {', '.join(key for key, _ in pairs)}")
    return values
