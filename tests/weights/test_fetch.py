# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import itertools
import random
from collections.abc import Generator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from marin_rl.types import WeightVersion
from marin_rl.weights.fetch import ALIGNMENT, ArrayBuffers
from marin_rl.weights.manifest import Bounds, Chunk, Manifest, Piece, slices_within, whole
from marin_rl.weights.plan import PieceKey, choose_pieces, target_arrays
from marin_rl.weights.protocol import CorruptTransferError, MismatchedWeightsError
from marin_rl.weights.publish import Snapshot
from tests.weights.endpoints import assert_same, receiver_of, snapshot_of, split
from tests.weights.partitioned_array import FULL, NAME, Hosts, box

# Buffers of one array.


def bytes_of(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def buffers_of(
    shape: tuple[int, ...], pieces: list[Bounds], dtype: str = "float32", like: object = None
) -> ArrayBuffers:
    """Return the buffers for the pieces of one array."""
    held = tuple(Piece(NAME, shape, dtype, bounds, ()) for bounds in pieces)
    targets = target_arrays(like or {"w": np.zeros(shape, dtype)})
    return ArrayBuffers(targets[NAME], choose_pieces(targets, [Manifest(1, 0, 1, 2**20, held)], cast=True)[NAME])


@st.composite
def cut_arrays(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Bounds]]:
    """Draw a shape and the boxes of a grid over it."""
    shape = tuple(draw(st.lists(st.integers(1, 5), max_size=3)))
    inner = [sorted(draw(st.sets(st.integers(1, size - 1)))) if size > 1 else [] for size in shape]
    edges = [itertools.pairwise([0, *cuts, size]) for cuts, size in zip(inner, shape, strict=True)]
    return shape, list(itertools.product(*edges))


@given(
    cut=cut_arrays(), chunk=st.integers(1, 40), seed=st.integers(0, 2**16), dtype=st.sampled_from(["int8", "float32"])
)
def test_chunks_of_any_partition_in_any_order_fill_the_array(
    cut: tuple[tuple[int, ...], list[Bounds]], chunk: int, seed: int, dtype: str
):
    shape, pieces = cut
    full = np.arange(np.prod(shape, dtype=int)).reshape(shape).astype(dtype)
    buffers = buffers_of(shape, pieces, dtype)
    writes = [
        (number, start, data[start : start + chunk])
        for number, bounds in enumerate(pieces)
        for data in [bytes_of(full[slices_within(bounds, whole(shape))])]
        for start in range(0, len(data), chunk)
    ]
    random.Random(seed).shuffle(writes)
    for number, start, data in writes:
        buffers.write(PieceKey(0, number), start, data)
    np.testing.assert_array_equal(buffers.assemble(), full)


@pytest.mark.parametrize("cut", [(), (0,), (1,), (2,), (0, 1)])
def test_pieces_with_one_stride_are_written_in_place(cut: tuple[int, ...]):
    shape = (3, 4, 6)
    edges = [[(0, 1), (1, size)] if dimension in cut else [(0, size)] for dimension, size in enumerate(shape)]
    pieces = list(itertools.product(*edges))
    buffers = buffers_of(shape, pieces)
    assert buffers.boxes[whole(shape)].ctypes.data % ALIGNMENT == 0
    assert not buffers.separate


TOP, LOWER, TOP_AND_MORE = ((0, 2), (0, 2)), ((2, 4), (0, 2)), ((0, 3), (0, 2))


@pytest.mark.parametrize(
    ("pieces", "like"),
    [
        # Two pieces contain the third row.
        ([TOP_AND_MORE, LOWER], None),
        # The piece is cast.
        ([TOP, LOWER], {"w": jax.ShapeDtypeStruct((4, 2), jnp.bfloat16)}),
    ],
)
def test_other_pieces_get_separate_memory(pieces: list[Bounds], like: object):
    buffers = buffers_of((4, 2), pieces, like=like)
    assert not buffers.boxes
    sizes = [len(buffers.separate[PieceKey(0, number)]) for number in range(len(pieces))]
    assert sizes == [8 * (stop - start) for (start, stop), _ in pieces]


@pytest.mark.parametrize(
    "boxes",
    [
        [[box((0, 6), (0, 4))]],
        [[box((0, 3), (0, 4))], [box((3, 6), (0, 4))]],
        [[box((0, 6), (0, 1)), box((0, 2), (1, 4))], [box((2, 6), (1, 4))]],
        [[box((0, 4), (0, 4))], [box((2, 6), (0, 4))]],
        [[box((0, 6), (0, 4))], [box((0, 6), (0, 4))]],
    ],
)
def test_array_is_assembled_from_any_partition(boxes: list[list[Bounds]]):
    np.testing.assert_array_equal(Hosts(*boxes).buffers().assemble(), FULL)


@pytest.mark.parametrize("boxes", [[[box((0, 6), (0, 4))]], [[box((0, 6), (0, 1))], [box((0, 6), (1, 4))]]])
def test_in_place_buffers_are_not_copied_to_the_device(boxes: list[list[Bounds]]):
    buffers = Hosts(*boxes).buffers()
    array = buffers.assemble()
    assert isinstance(array, jax.Array)
    assert array.unsafe_buffer_pointer() == buffers.boxes[box((0, 6), (0, 4))].ctypes.data


def test_inconsistent_pieces_are_rejected():
    hosts = Hosts([box((0, 4), (0, 4))], [box((2, 6), (0, 4))])
    hosts.parts[1][0][0, 1] += 1
    with pytest.raises(MismatchedWeightsError, match=r"two pieces of .* hold different values at \['2:4', '0:4'\]"):
        hosts.buffers().assemble()


def test_pieces_with_equal_nans_are_consistent():
    hosts = Hosts([box((0, 4), (0, 4))], [box((2, 6), (0, 4))])
    for part, row in ((hosts.parts[0][0], 3), (hosts.parts[1][0], 1)):
        part[row, 0] = np.nan
    assert np.isnan(hosts.buffers().assemble()[3, 0])


def test_only_floating_point_is_cast_on_receipt():
    narrow = {"w": jax.ShapeDtypeStruct((6, 4), jnp.bfloat16)}
    received = Hosts([box((0, 6), (0, 4))]).buffers(narrow, cast=True).assemble()
    assert received.dtype == jnp.bfloat16
    np.testing.assert_array_equal(received, jnp.asarray(FULL).astype(jnp.bfloat16))
    with pytest.raises(MismatchedWeightsError, match="the receiver needs int32"):
        Hosts([box((0, 6), (0, 4))]).plan(like={"w": jax.ShapeDtypeStruct((6, 4), jnp.int32)}, cast=True)


# The receiver.


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
    assert sorted(read) == sorted(everything)
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
