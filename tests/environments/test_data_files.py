# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import bz2
import gzip
import lzma
import os
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from marin_rl.environments import data_files
from marin_rl.environments.data_files import DataFileError, check_data_files
from marin_rl.environments.dataset import HuggingFaceConfig
from marin_rl.environments.row_files import read_dataset, read_parquet


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_files, "UNCHECKED_BYTES", 2**20)


def dictionary(path: Path) -> None:
    column = pa.DictionaryArray.from_arrays(pa.array([0] * 10_000, pa.int32()), pa.array(["x" * 10_000]))
    pq.write_table(pa.table({"prompt": column}), path)


def runs(path: Path) -> None:
    pq.write_table(pa.table({"prompt": pa.array(["x" * 1000] * 100_000)}), path)


def compressed(path: Path) -> None:
    table = pa.table({"prompt": pa.array(["x" * 100_000_000])})
    pq.write_table(table, path, compression="zstd", use_dictionary=False)


def lists(path: Path) -> None:
    pq.write_table(pa.table({"prompt": pa.array([["x" * 100] * 1_000_000])}), path)


@pytest.mark.medium
@pytest.mark.parametrize("write", [dictionary, runs, compressed, lists])
def test_a_small_parquet_file_that_expands_is_refused(tmp_path: Path, write: Callable[[Path], None]) -> None:
    write(tmp_path / "train.parquet")
    assert (tmp_path / "train.parquet").stat().st_size < 100_000
    with pytest.raises(ValueError, match=r"train\.parquet' expands from [\d,]+ to more than [\d,]+ bytes"):
        HuggingFaceConfig(path=str(tmp_path)).build()


@pytest.mark.medium
@pytest.mark.parametrize(("suffix", "module"), [("gz", gzip), ("bz2", bz2), ("xz", lzma)])
def test_a_small_compressed_file_that_expands_is_refused(tmp_path: Path, suffix: str, module: Any) -> None:
    (tmp_path / f"train.jsonl.{suffix}").write_bytes(module.compress(b"0" * 2**26))
    with pytest.raises(DataFileError, match=rf"train\.jsonl\.{suffix}' expands from"):
        check_data_files(tmp_path)
    (tmp_path / f"train.jsonl.{suffix}").write_bytes(module.compress(b"0" * 2**26)[:-20])
    with pytest.raises(DataFileError, match=rf"train\.jsonl\.{suffix}"):
        check_data_files(tmp_path)


def test_too_many_columns_are_refused(tmp_path: Path) -> None:
    pq.write_table(pa.table({f"c{index}": [1] for index in range(2_001)}), tmp_path / "train.parquet")
    with pytest.raises(DataFileError, match=r"has 2,001 columns, more than 2,000; keep the used ones"):
        check_data_files(tmp_path)


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    column: Any = pa.array(["a"])
    for _ in range(200):
        column = pa.ListArray.from_arrays(pa.array([0, 1], pa.int32()), column)
    pq.write_table(pa.table({"prompt": column}), tmp_path / "nested.parquet")
    whole = (tmp_path / "nested.parquet").read_bytes()
    for content in (whole, b"", b"PAR1" + bytes(100) + b"PAR2", whole[:-8] + b"\xff\xff\xff\x7fPAR1"):
        (tmp_path / "nested.parquet").write_bytes(content)
        with pytest.raises(DataFileError, match=r"cannot read '.*nested\.parquet': "):
            check_data_files(tmp_path)


def test_usual_files_are_accepted(tmp_path: Path) -> None:
    rows = [f"{number}: {number**9}" for number in range(100_000)]
    pq.write_table(pa.table({"prompt": rows, "answer": ["1"] * len(rows)}), tmp_path / "a.parquet")
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress("\n".join(rows).encode()))
    check_data_files(tmp_path)


def raw(type: pa.DataType, value: bytes) -> pa.Array:
    return pa.Array.from_buffers(type, 1, [None, pa.py_buffer(value)])


NOT_UTF8 = pa.Array.from_buffers(
    pa.string(), 1, [None, pa.py_buffer(bytes([0, 0, 0, 0, 2, 0, 0, 0])), pa.py_buffer(b"\xff\xfe")]
)
LATE = (2**62).to_bytes(8, "little")
NO_VALUES = {
    "date": raw(pa.date32(), (2**30).to_bytes(4, "little")),
    "date before the year 1": raw(pa.date32(), (-(2**30)).to_bytes(4, "little", signed=True)),
    "time": raw(pa.timestamp("us"), LATE),
    "time in an unknown zone": raw(pa.timestamp("us", "No/Where"), bytes(8)),
    "duration": raw(pa.duration("s"), LATE),
    "date in a list": pa.ListArray.from_arrays(pa.array([0, 1], pa.int32()), raw(pa.timestamp("us"), LATE)),
    "text": NOT_UTF8,
    "text in a list": pa.ListArray.from_arrays(pa.array([0, 1], pa.int32()), NOT_UTF8),
    "text in a struct": pa.StructArray.from_arrays([NOT_UTF8], ["text"]),
    "text in a dictionary": pa.DictionaryArray.from_arrays(pa.array([0], pa.int32()), NOT_UTF8),
    "repeated key": pa.StructArray.from_arrays([pa.array(["a"]), pa.array(["b"])], ["x", "x"]),
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("case", NO_VALUES)
def test_a_value_that_python_cannot_hold_names_row_and_column(case: str, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    column = NO_VALUES[case]
    good = pa.concat_arrays([pa.nulls(1, column.type)] * 1500) if case != "text in a dictionary" else column
    rows = len(good) if case != "text in a dictionary" else 0
    values = pa.chunked_array([good, column] if rows else [column])
    names = {"prompt": pa.array([f"p{row}" for row in range(rows + 1)]), "odd " * 100: values}
    file = tmp_path / "data" / "train.parquet"
    file.parent.mkdir()
    pq.write_table(pa.table(names), file)
    readers = [read_parquet(file, "data.parquet")]
    # `datasets` itself refuses a repeated key, when it loads the file.
    if case != "repeated key":
        readers.append(read_dataset(str(file.parent), "environment.path", None, "train", None))
    for reader in readers:
        with pytest.raises(DataFileError, match=rf"row {rows}: column '{'odd ' * 50}' has a value of type ") as caught:
            list(reader)
        assert len(str(caught.value)) < 1000


def test_values_that_python_holds_are_read(tmp_path: Path) -> None:
    values = {"n": [None, 1.5, float("inf")], "d": [Decimal("1.5")] * 3, "s": [{"a": b"\xff"}] * 3, "t": ["\u00e9"] * 3}
    pq.write_table(pa.table(values), tmp_path / "a.parquet", row_group_size=1)
    rows = list(read_parquet(tmp_path / "a.parquet", "F"))
    assert [row.values for row in rows] == pa.table(values).to_pylist()
    assert [row.where for row in rows] == ["F, row 0", "F, row 1", "F, row 2"]


def readme(yaml: str) -> Callable[[Path], object]:
    return lambda folder: (folder / "README.md").write_bytes(f"---\n{yaml}\n---\n".encode("latin-1"))


def large(folder: Path) -> None:
    with (folder / "README.md").open("wb") as file:
        file.truncate(2**40)


BAD_FOLDERS: dict[str, tuple[Callable[[Path], object], str]] = {
    "tag": (readme("a: !!python/name:os.system"), r"README\.md .*: could not determine a constructor for the tag"),
    "local tag": (readme("configs: !x [a]"), r"README\.md .*'!x'"),
    "not YAML": (readme("a: ["), r"README\.md .*line 1"),
    "other file": (lambda folder: (folder / ".huggingface.yaml").write_text("a: !x 1"), r"\.huggingface\.yaml: .*'!x'"),
    "not a mapping": (readme("- a"), r"metadata block should be a dict"),
    "no features": (readme("dataset_info:\n  features: 5"), r"Expected a dict or a list"),
    "not UTF-8": (readme("a: \xff"), r"'utf-8' codec"),
    "endless": (lambda folder: (folder / "README.md").symlink_to("/dev/zero"), r"README\.md' is a device"),
    "pipe": (lambda folder: os.mkfifo(folder / "README.md"), r"README\.md' is a device, a pipe or a socket"),
    "large": (large, r"README\.md' has 1,048,576 MiB"),
    "script": (lambda folder: (folder / f"{folder.name}.py").write_text("0/0"), r"no longer supported, .*found .*\.py"),
    "broken state": (lambda folder: (folder / "state.json").write_text("{"), r"cannot load dataset"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_FOLDERS)
def test_a_folder_that_datasets_cannot_load_is_one_sentence(case: str, tmp_path: Path) -> None:
    write, message = BAD_FOLDERS[case]
    (tmp_path / "train.jsonl").write_text('{"prompt": "1+1", "answer": "2"}\n')
    write(tmp_path)
    with pytest.raises((ValueError, OSError), match=message) as caught:
        HuggingFaceConfig(path=str(tmp_path)).build()
    assert str(tmp_path) in str(caught.value)
    assert "\n" not in str(caught.value)
