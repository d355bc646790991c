# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import itertools
from collections.abc import Generator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from marin_rl.distributed.weight_manifest import (
    ArrayPiece,
    Chunk,
    Manifest,
    MismatchedWeightsError,
    Snapshot,
)
from marin_rl.distributed.weight_receiver import ALIGNMENT, PieceKey, assemble, choose_pieces
from marin_rl.types import WeightVersion
from marin_rl.utils.devices.arrays import numeric_arrays
from marin_rl.utils.devices.boxes import Bounds, slices_within, whole
from tests.distributed.weight_endpoints import assert_same, receiver_of, snapshot_of

FULL = np.arange(24, dtype=np.float32).reshape(6, 4)
LIKE = {"w": jax.ShapeDtypeStruct((6, 4), jnp.float32)}
NAME = "['w']"


def box(*edges: tuple[int, int]) -> Bounds:
    return edges


class Hosts:
    """Return snapshots of training hosts that each have some boxes of one array."""

    def __init__(self, *boxes: list[Bounds]) -> None:
        self.parts = [[FULL[tuple(slice(*edge) for edge in bounds)].copy() for bounds in held] for held in boxes]
        self.boxes = boxes

    @property
    def manifests(self) -> list[Manifest]:
        return [
            Manifest(
                1,
                2**20,
                tuple(ArrayPiece(NAME, (6, 4), "float32", bounds) for bounds in held),
            )
            for held in self.boxes
        ]

    def plan(self) -> list[PieceKey]:
        return choose_pieces(numeric_arrays(LIKE), self.manifests, cast=False)[NAME]

    def assembled(self) -> jax.Array | np.ndarray:
        """Return the array that is assembled from the chosen pieces."""
        manifests = self.manifests
        held = [
            (manifests[host].pieces[piece], self.parts[host][piece].reshape(-1).view(np.uint8))
            for host, piece in self.plan()
        ]
        return assemble(LIKE["w"], held)


# Choice of pieces.


def test_error_names_array_and_indices_of_a_gap():
    with pytest.raises(MismatchedWeightsError, match=r"no training host holds \['2:4', '0:4'\] of \['w'\]"):
        Hosts([box((0, 2), (0, 4))], [box((4, 6), (0, 4))]).plan()


def test_replicated_piece_is_fetched_once():
    rows = [box((row, row + 1), (0, 4)) for row in range(6)]
    keys = Hosts(rows, rows, rows).plan()
    assert sorted(key.piece for key in keys) == list(range(6))


def test_only_overlapping_pieces_are_fetched():
    wanted = {NAME: jax.ShapeDtypeStruct((6, 4), jnp.float32, sharding=_TopHalf())}
    manifests = Hosts([box((0, 3), (0, 4))], [box((3, 6), (0, 4))]).manifests
    assert choose_pieces(wanted, manifests, cast=False)[NAME] == [PieceKey(0, 0)]
    # A host without any required piece may be absent.
    assert choose_pieces(wanted, [manifests[0]], cast=False)[NAME] == [PieceKey(0, 0)]


class _TopHalf(jax.sharding.Sharding):
    """Target of a process with devices for the first three rows."""

    def check_compatible_aval(self, aval_shape):
        pass

    def addressable_devices_indices_map(self, global_shape):
        return {jax.devices()[0]: (slice(0, 3), slice(None))}


# Assembly of one array.


@st.composite
def cut_arrays(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Bounds]]:
    """Draw a shape and the boxes of a grid over it."""
    shape = tuple(draw(st.lists(st.integers(1, 5), max_size=3)))
    inner = [sorted(draw(st.sets(st.integers(1, size - 1)))) if size > 1 else [] for size in shape]
    edges = [itertools.pairwise([0, *cuts, size]) for cuts, size in zip(inner, shape, strict=True)]
    return shape, list(itertools.product(*edges))


@given(cut=cut_arrays(), dtype=st.sampled_from(["int8", "float32"]))
def test_array_is_assembled_from_any_grid(cut: tuple[tuple[int, ...], list[Bounds]], dtype: str):
    shape, boxes = cut
    full = np.arange(np.prod(shape, dtype=int)).reshape(shape).astype(dtype)
    parts = [np.ascontiguousarray(full[slices_within(bounds, whole(shape))]) for bounds in boxes]
    pieces = [ArrayPiece(NAME, shape, dtype, bounds) for bounds in boxes]
    held = [(piece, part.reshape(-1).view(np.uint8)) for piece, part in zip(pieces, parts, strict=True)]
    target = np.zeros(shape, dtype)
    np.testing.assert_array_equal(assemble(target, held), full)


@pytest.mark.parametrize(
    "boxes",
    [
        [[box((0, 6), (0, 4))]],
        [[box((0, 3), (0, 4))], [box((3, 6), (0, 4))]],
        [[box((0, 3), (0, 2)), box((3, 6), (2, 4))], [box((0, 3), (2, 4)), box((3, 6), (0, 2))]],
        [[box((0, 6), (0, 4))], [box((0, 6), (0, 4))]],
    ],
)
def test_array_is_assembled_from_any_partition(boxes: list[list[Bounds]]):
    np.testing.assert_array_equal(Hosts(*boxes).assembled(), FULL)


def test_single_piece_is_not_copied():
    data = aligned(FULL.nbytes)
    data[:] = FULL.reshape(-1).view(np.uint8)
    piece = ArrayPiece(NAME, (6, 4), "float32", whole((6, 4)))
    array = assemble(LIKE["w"], [(piece, data)])
    assert isinstance(array, jax.Array)
    assert array.unsafe_buffer_pointer() == data.ctypes.data


def aligned(num_bytes: int) -> np.ndarray:
    """Return memory that the CPU backend uses without a copy."""
    memory = np.empty(num_bytes + ALIGNMENT, np.uint8)
    return memory[-memory.ctypes.data % ALIGNMENT :][:num_bytes]


# The receiver.


class HeldSource:
    """In-memory source of one version that records the chunks of each stream."""

    def __init__(self, snapshot: Snapshot, streams: int = 1) -> None:
        self.snapshot = snapshot
        self.streams = streams
        self.read: list[list[Chunk]] = []

    def versions(self) -> list[WeightVersion]:
        return [self.snapshot.manifest.version]

    def manifest(self, version: WeightVersion) -> Manifest:
        return self.snapshot.manifest

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
