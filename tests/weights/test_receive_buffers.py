# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import itertools
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from marin_rl.weights.fetch import ALIGNMENT, PieceKey, ReceiveBuffers, assemble, make_plan, target_arrays
from marin_rl.weights.manifest import Bounds, Manifest, Piece, slices_within, whole

NAME = "['w']"


def bytes_of(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def landing_of(
    shape: tuple[int, ...], pieces: list[Bounds], dtype: str = "float32", like: object = None
) -> ReceiveBuffers:
    """Return the buffers for the pieces of one array."""
    held = tuple(Piece(NAME, shape, dtype, bounds, ()) for bounds in pieces)
    like = like or {"w": np.zeros(shape, dtype)}
    return ReceiveBuffers(make_plan(target_arrays(like), [Manifest(1, 0, 1, 2**20, held)], cast=True))


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
    like = {"w": np.zeros(shape, dtype)}
    plan = make_plan(
        target_arrays(like),
        [Manifest(1, 0, 1, 2**20, tuple(Piece(NAME, shape, dtype, bounds, ()) for bounds in pieces))],
        cast=False,
    )
    buffers = ReceiveBuffers(plan)
    writes = [
        (number, start, data[start : start + chunk])
        for number, bounds in enumerate(pieces)
        for data in [bytes_of(full[slices_within(bounds, whole(shape))])]
        for start in range(0, len(data), chunk)
    ]
    random.Random(seed).shuffle(writes)
    for number, start, data in writes:
        buffers.write(PieceKey(0, number), start, data)
    np.testing.assert_array_equal(assemble(like, plan, buffers)["w"], full)


@pytest.mark.parametrize("cut", [(), (0,), (1,), (2,), (0, 1)])
def test_pieces_with_one_stride_are_written_in_place(cut: tuple[int, ...]):
    shape = (3, 4, 6)
    edges = [[(0, 1), (1, size)] if dimension in cut else [(0, size)] for dimension, size in enumerate(shape)]
    pieces = list(itertools.product(*edges))
    buffers = landing_of(shape, pieces)
    place = buffers.box(NAME, whole(shape))
    assert place is not None
    assert place.ctypes.data % ALIGNMENT == 0
    assert all(buffers.separate_piece(PieceKey(0, number)) is None for number in range(len(pieces)))


ALL, TOP, LOWER, TOP_AND_MORE = ((0, 4), (0, 2)), ((0, 2), (0, 2)), ((2, 4), (0, 2)), ((0, 3), (0, 2))


@pytest.mark.parametrize(
    ("pieces", "dtype", "like"),
    [
        # Two pieces contain the third row.
        ([TOP_AND_MORE, LOWER], "float32", None),
        # The piece is cast.
        ([TOP, LOWER], "float32", {"w": jax.ShapeDtypeStruct((4, 2), jnp.bfloat16)}),
    ],
)
def test_other_pieces_get_separate_memory(pieces: list[Bounds], dtype: str, like: object):
    buffers = landing_of((4, 2), pieces, dtype, like)
    assert buffers.box(NAME, ALL) is None
    apart = [buffers.separate_piece(PieceKey(0, number)) for number in range(len(pieces))]
    assert [len(data) for data in apart if data is not None] == [8 * (stop - start) for (start, stop), _ in pieces]
