# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import logging
import math
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from marin_rl.runs.rollout_store import (
    RolloutStore,
    RolloutStoreConfig,
    RolloutStoreError,
    list_files,
    read_file,
    read_rollouts,
)
from marin_rl.runs.stored_rollout import StoredAdvantages
from marin_rl.types import RolloutGroup, RolloutStatus
from tests.rollouts.rollout_cases import group_of, piece, rich_rollout, rich_signal, rollout_of, rows, write


def ids(folder, **selection):
    return [row["id"] for row in rows(folder, **selection)]


def names(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("stale", [False, True])
def test_stale_groups_are_stored_if_configured(tmp_path, stale):
    store = RolloutStore(tmp_path, RolloutStoreConfig(stale=stale), piece)
    store.write(7, [group_of("g", 1.0)], {}, stale=[group_of("h", 1.0)])
    store.close()
    fates = {row["group_id"]: row["not_trained"] for row in rows(tmp_path)}
    assert fates == {"g": "filtered"} | ({"h": "stale"} if stale else {})


def test_why_a_rollout_was_not_trained_on(tmp_path):
    late = rollout_of("g-3", reward=None, status=RolloutStatus.TIMED_OUT)
    cut = rollout_of("g-4", status=RolloutStatus.TRUNCATED)
    rollouts = [rich_rollout(), rollout_of("g-1", reward=None), rollout_of("g-2"), late, cut]
    write(tmp_path, 1, [RolloutGroup("g", rollouts)], {"g-0": rich_signal(), "g-4": StoredAdvantages(None)})
    write(tmp_path, 1, [RolloutGroup("g", [rich_rollout()])], purpose="evaluation")
    stored = [(row["not_trained"], row["advantage"]) for row in rows(tmp_path)]
    assert stored == [
        (None, 0.2),
        *((why, None) for why in ("failed", "filtered", "timed_out", "masked", "evaluation")),
    ]
    [turn] = rows(tmp_path)[4]["turns"]
    assert (turn["loss_mask"], turn["advantages"]) == ([False, False], None)


def test_every_selects_steps_and_all_evaluations(tmp_path):
    for step in range(1, 7):
        write(tmp_path, step, [group_of("g", 1.0)], every=3)
        write(tmp_path, step, [group_of("g", 1.0)], every=0)
    write(tmp_path, 4, [group_of("g", 1.0)], purpose="evaluation", every=3)
    write(tmp_path, 5, [group_of("g", 1.0)], purpose="evaluation", every=0)
    assert names(tmp_path) == ["eval-00000004.parquet", "step-00000003.parquet", "step-00000006.parquet"]
    assert [file.step for file in list_files(tmp_path)] == [3, 4, 6]


def test_the_oldest_files_are_removed_first(tmp_path, caplog):
    write(tmp_path, 1, [group_of("g", 1.0, 0.0)])
    size = (tmp_path / "step-00000001.parquet").stat().st_size
    store = RolloutStore(tmp_path, RolloutStoreConfig(max_mb=3.5 * size / 1e6), piece)
    with caplog.at_level(logging.INFO, "marin_rl"):
        for step in (2, 3, 4, 5):
            store.write(step, [group_of("g", 1.0, 0.0)], {})
        store.close()
    assert names(tmp_path) == [f"step-0000000{step}.parquet" for step in (3, 4, 5)]
    assert "removed 1 files (steps 2 to 2) to stay within rollout_store.max_mb" in caplog.messages[-1]
    write(tmp_path, 6, [group_of("g", 1.0)], max_mb=1e-9)
    assert names(tmp_path) == ["step-00000006.parquet"]


def test_truncate_removes_steps_after_the_checkpoint(tmp_path):
    for step in (1, 2, 3, 4):
        write(tmp_path, step, [group_of("g", 1.0)])
        write(tmp_path, step, [group_of("g", 1.0)], purpose="evaluation")
    (tmp_path / ".step-00000005.parquet.partial").write_bytes(b"half")
    store = RolloutStore(tmp_path, RolloutStoreConfig(), piece)
    store.truncate(2)
    store.close()
    assert names(tmp_path) == [
        *("eval-00000001.parquet", "eval-00000002.parquet", "step-00000001.parquet", "step-00000002.parquet")
    ]


def test_the_next_call_raises_a_write_error_and_no_file_remains(tmp_path, monkeypatch):
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    store = RolloutStore(tmp_path, RolloutStoreConfig(), piece)
    with monkeypatch.context() as patched:
        patched.setattr("os.fsync", full)
        store.write(7, [group_of("g", 1.0)], {})
        with pytest.raises(OSError, match="No space left"):
            store.flush()
    assert list_files(tmp_path) == []
    store.write(7, [group_of("g", 1.0)], {})
    store.close()
    assert names(tmp_path) == ["step-00000007.parquet"]


def test_writing_runs_in_the_background_and_close_waits(tmp_path):
    proceed, begun = threading.Event(), threading.Event()

    def slow(token: int) -> bytes:
        begun.set()
        assert proceed.wait(600)
        return piece(token)

    store = RolloutStore(tmp_path, RolloutStoreConfig(), slow)
    store.write(1, [group_of("g", 1.0)], {})
    assert begun.wait(600)
    assert list_files(tmp_path) == []
    proceed.set()
    store.close()
    assert names(tmp_path) == ["step-00000001.parquet"]


def test_files_are_read_lazily_and_may_disappear(tmp_path):
    for step in (1, 2, 3):
        write(tmp_path, step, [group_of(f"g{step}", 1.0)])
    tables = read_rollouts(tmp_path, columns=["id"])
    assert next(tables).column_names == ["id"]
    (tmp_path / "step-00000002.parquet").unlink()
    assert [table.to_pylist() for table in tables] == [[{"id": "g3-0"}]]


def test_steps_and_columns_are_selected(tmp_path):
    for step in (1, 2, 3):
        write(tmp_path, step, [group_of(f"g{step}", 1.0)])
    result = rows(tmp_path, steps=range(2, 9), columns=["reward", "id"])
    assert result == [{"reward": 1.0, "id": "g2-0"}, {"reward": 1.0, "id": "g3-0"}]


def test_missing_files_are_empty(tmp_path):
    assert rows(tmp_path) == rows(tmp_path / "missing") == []
    assert read_file(tmp_path / "step-00000001.parquet") is None


@given(st.lists(st.tuples(st.text(), st.binary(max_size=4)), max_size=5))
@settings(deadline=None, max_examples=30)
def test_any_text_and_any_bytes_are_restored(tmp_path_factory, texts):
    folder = tmp_path_factory.mktemp("any")
    rollouts = [rollout_of(f"g-{index}", error=text) for index, (text, _) in enumerate(texts)]
    pieces = [data for _, data in texts]
    store = RolloutStore(folder, RolloutStoreConfig(), lambda token: pieces[token % len(pieces)])
    store.write(1, [RolloutGroup("g", rollouts)], {})
    store.close()
    assert [row["error"] for row in rows(folder)] == [text for text, _ in texts]
    for row in rows(folder):
        [turn] = row["turns"]
        assert turn["pieces"] == [pieces[token % len(pieces)] for token in turn["token_ids"]]


def test_lone_surrogates_are_escaped_and_nonfinite_scores_are_kept(tmp_path):
    scores = StoredAdvantages(np.ones(2), learner_logprobs=np.array([math.nan, -math.inf]))
    odd = rollout_of("g-0", error="\ud83d", metrics={"\ud83d": -math.inf})
    write(tmp_path, 7, [RolloutGroup("g", [odd])], {"g-0": scores})
    [row] = rows(tmp_path)
    assert (row["error"], row["metrics"]) == ("\\ud83d", [("\\ud83d", -math.inf)])
    first, second = row["turns"][0]["learner_logprobs"]
    assert math.isnan(first)
    assert second == -math.inf


def bytes_of(change: Callable[[bytes], bytes]) -> Callable[[Path], object]:
    return lambda path: path.write_bytes(change(path.read_bytes()))


def table_of(change: Callable[[pa.Table], pa.Table]) -> Callable[[Path], object]:
    return lambda path: pq.write_table(change(pq.read_table(path)), path)


def of_version(version: bytes | None) -> Callable[[Path], object]:
    return table_of(lambda table: table.replace_schema_metadata(version and {b"marin_rl.rollouts.version": version}))


DAMAGED = r"is not a readable rollout file \({}\); if it belongs to a run, delete it to continue without it"
OTHER = r"was written by another version of marin_rl: its schema version is 1, .* set another run_dir"


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (bytes_of(lambda data: data[: len(data) // 2]), DAMAGED.format(".*")),
        (bytes_of(lambda data: b"x" + data[1:-1] + b"x"), DAMAGED.format(".*")),
        (bytes_of(lambda data: b""), DAMAGED.format(".*")),
        (
            table_of(lambda table: table.drop_columns("status")),
            DAMAGED.format("column 'status' is absent, expected string"),
        ),
        (
            table_of(lambda table: table.set_column(0, "step", table["step"].cast(pa.string()))),
            DAMAGED.format("column 'step' is string, expected int64"),
        ),
        (of_version(None), DAMAGED.format("it has no schema version")),
        (of_version(b"1"), OTHER),
    ],
)
def test_a_file_that_cannot_be_used_is_named(tmp_path, change, problem):
    write(tmp_path, 1, [group_of("g", 1.0)])
    change(tmp_path / "step-00000001.parquet")
    with pytest.raises(RolloutStoreError, match=rf"step-00000001\.parquet {problem}"):
        rows(tmp_path)
    if "'status'" in problem:
        assert rows(tmp_path, columns=["id"]) == [{"id": "g-0"}]
