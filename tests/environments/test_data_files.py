# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import bz2
import gzip
import lzma
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from marin_rl.environments import data_files
from marin_rl.environments.data_files import DataFileError, check_data_files
from marin_rl.environments.dataset import HuggingFaceConfig


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


@pytest.mark.parametrize("write", [dictionary, runs, compressed, lists])
def test_a_small_parquet_file_that_expands_is_refused(tmp_path: Path, write: Callable[[Path], None]) -> None:
    write(tmp_path / "train.parquet")
    assert (tmp_path / "train.parquet").stat().st_size < 100_000
    with pytest.raises(ValueError, match=r"train\.parquet' expands from [\d,]+ to more than [\d,]+ bytes"):
        HuggingFaceConfig(path=str(tmp_path)).build()


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
