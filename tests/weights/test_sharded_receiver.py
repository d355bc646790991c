# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import dataclasses
from collections.abc import Generator, Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from marin_rl.types import WeightVersion
from marin_rl.weights.fetch import ALIGNMENT
from marin_rl.weights.manifest import Chunk, Manifest
from marin_rl.weights.protocol import CorruptTransferError, MismatchedWeightsError
from marin_rl.weights.publish import Snapshot
from tests.weights.ends import assert_same, receiver_of, snapshot_of, split


class HeldSource:
    """In-memory source of one version that records the chunks of each stream."""

    def __init__(self, snapshot: Snapshot, streams: int = 1) -> None:
        self.snapshot = snapshot
        self.streams = streams
        self.read: list[list[Chunk]] = []

    def versions(self) -> list[WeightVersion]:
        return [self.snapshot.manifest.version]

    def manifests(self, version: WeightVersion) -> list[Manifest]:
        return [self.snapshot.manifest]

    def fetch(self, manifest: Manifest, chunks: Sequence[Chunk]) -> Generator[np.ndarray, None, None]:
        self.read.append(list(chunks))
        for chunk in chunks:
            yield self.snapshot.chunk(chunk)


@given(lengths=st.lists(st.integers(0, 400), min_size=1, max_size=6), streams=st.integers(1, 5))
def test_streams_share_the_bytes_evenly_and_read_each_chunk_once(lengths: list[int], streams: int):
    weights = {f"w{index}": np.arange(length, dtype=np.uint8) for index, length in enumerate(lengths)}
    source = HeldSource(snapshot_of(weights, 1, chunk_bytes=32), streams)
    received, _ = receiver_of(source).receive({name: np.zeros_like(array) for name, array in weights.items()})
    assert_same(received, weights)
    manifest = source.snapshot.manifest
    everything = [chunk for piece in range(len(manifest.pieces)) for chunk in manifest.chunks(piece)]
    read = [chunk for chunks in source.read for chunk in chunks]
    assert sorted(read, key=dataclasses.astuple) == sorted(everything, key=dataclasses.astuple)
    assert len(source.read) <= streams
    for chunks in source.read:
        # A stream ends with the chunk that completes its share.
        assert sum(len(source.snapshot.chunk(chunk)) for chunk in chunks) < sum(lengths) / streams + 32


def test_received_arrays_are_aligned():
    weights = {name: np.arange(7, dtype=np.float32) for name in "abcdefgh"}
    received, _ = receiver_of(HeldSource(snapshot_of(weights, 1))).receive(weights)
    assert [array.ctypes.data % ALIGNMENT for array in received.values()] == [0] * 8


def test_manifest_of_another_version_is_rejected():
    with pytest.raises(CorruptTransferError, match="requested version 2, got the manifest of version 1"):
        receiver_of(HeldSource(snapshot_of({"w": np.zeros(3)}, 1))).receive({"w": np.zeros(3)}, 2)


def test_each_training_host_is_required_once():
    weights = {name: np.full(600, 1, np.float32) for name in "abcd"}
    first, second = (HeldSource(part) for part in split(snapshot_of(weights, 1), 2))
    assert_same(receiver_of(second, first).receive(weights)[0], weights)
    with pytest.raises(
        MismatchedWeightsError, match=r"2 training hosts publish the weights, but the receiver reads from hosts .*\[1\]"
    ):
        receiver_of(second).receive(weights)
    with pytest.raises(MismatchedWeightsError, match=r"from hosts \[0, 0\]"):
        receiver_of(first, first).receive(weights)


def test_inconsistent_host_counts_are_rejected():
    weights = {name: np.full(6, 1, np.float32) for name in "abcd"}
    of_two, of_one = HeldSource(split(snapshot_of(weights, 1), 2)[1]), HeldSource(snapshot_of(weights, 1))
    with pytest.raises(MismatchedWeightsError, match=r"from hosts \[0, 1\]"):
        receiver_of(of_one, of_two).receive(weights)
