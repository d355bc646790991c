# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from marin_rl.weights.publish import TrainingHost, take_snapshot
from tests.weights.ends import snapshot_of


@given(length=st.integers(0, 100), chunk_bytes=st.integers(1, 500), dtype=st.sampled_from(["float32", "int8", "bool"]))
def test_chunks_concatenate_to_the_piece(length: int, chunk_bytes: int, dtype: str):
    array = (np.arange(length) % 3).astype(dtype)
    snapshot = snapshot_of({"w": array}, 4, chunk_bytes)
    chunks = snapshot.manifest.chunks(0)
    parts = [snapshot.chunk(chunk) for chunk in chunks]
    assert b"".join(part.tobytes() for part in parts) == array.tobytes()
    assert all(len(part) == chunk_bytes for part in parts[:-1])
    for chunk, part in zip(chunks, parts, strict=True):
        snapshot.manifest.check(chunk, part, "the test")


def test_chunk_is_a_view():
    snapshot = snapshot_of({"w": np.arange(1000)}, 1)
    for chunk in snapshot.manifest.chunks(0):
        assert np.shares_memory(snapshot.chunk(chunk), snapshot.data[0])


def test_device_memory_is_released_during_snapshot():
    arrays = {"w": jnp.zeros(3), "b": jnp.zeros(2)}
    assert len(take_snapshot(arrays, 1, TrainingHost.current(), 1024).data) == 2
    assert arrays == {}


def test_non_contiguous_arrays_are_sent_in_row_major_order():
    array = np.arange(12, dtype=np.float32).reshape(3, 4).T
    assert snapshot_of({"w": array}, 1).data[0].tobytes() == array.tobytes()


@pytest.mark.parametrize(("index", "count"), [(-1, 1), (1, 1), (0, 0)])
def test_host_index_out_of_range_is_rejected(index: int, count: int):
    with pytest.raises(ValueError, match=f"training host {index} of {count}"):
        TrainingHost(index, count, frozenset())
