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

from marin_rl.weights.assemble import assemble
from marin_rl.weights.bounds import Bounds, slices_within, whole
from marin_rl.weights.manifest import Manifest, Piece
from marin_rl.weights.plan import PieceKey, make_plan, wanted_arrays
from marin_rl.weights.receive_buffers import ALIGNMENT, ReceiveBuffers

NAME = "['w']"


def bytes_of(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def landing_of(
    shape: tuple[int, ...], pieces: list[Bounds], dtype: str = "float32", like: object = None
) -> ReceiveBuffers:
    """Where a host's pieces of one array land."""
    held = tuple(Piece(NAME, shape, dtype, bounds, ()) for bounds in pieces)
    like = like or {"w": np.zeros(shape, dtype)}
    return ReceiveBuffers(make_plan(wanted_arrays(like), [Manifest(1, 0, 1, 2**20, held)], cast=True))


@st.composite
def cut_arrays(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Bounds]]:
    """A shape, and the boxes of a grid over it."""
    shape = tuple(draw(st.lists(st.integers(1, 5), max_size=3)))
    inner = [sorted(draw(st.sets(st.integers(1, size - 1)))) if size > 1 else [] for size in shape]
    edges = [itertools.pairwise([0, *cuts, size]) for cuts, size in zip(inner, shape, strict=True)]
    return shape, list(itertools.product(*edges))


@given(
    cut=cut_arrays(), chunk=st.integers(1, 40), seed=st.integers(0, 2**16), dtype=st.sampled_from(["int8", "float32"])
)
def test_any_cut_in_any_chunks_in_any_order_gives_the_array(
    cut: tuple[tuple[int, ...], list[Bounds]], chunk: int, seed: int, dtype: str
):
    shape, pieces = cut
    full = np.arange(np.prod(shape, dtype=int)).reshape(shape).astype(dtype)
    like = {"w": np.zeros(shape, dtype)}
    plan = make_plan(
        wanted_arrays(like),
        [Manifest(1, 0, 1, 2**20, tuple(Piece(NAME, shape, dtype, bounds, ()) for bounds in pieces))],
        cast=False,
    )
    landing = ReceiveBuffers(plan)
    writes = [
        (number, start, data[start : start + chunk])
        for number, bounds in enumerate(pieces)
        for data in [bytes_of(full[slices_within(bounds, whole(shape))])]
        for start in range(0, len(data), chunk)
    ]
    random.Random(seed).shuffle(writes)
    for number, start, data in writes:
        landing.write(PieceKey(0, number), start, data)
    np.testing.assert_array_equal(assemble(like, plan, landing)["w"], full)


@pytest.mark.parametrize("cut", [(), (0,), (1,), (2,), (0, 1)])
def test_shares_along_a_dimension_or_the_first_two_are_written_in_place(cut: tuple[int, ...]):
    shape = (3, 4, 6)
    edges = [[(0, 1), (1, size)] if dimension in cut else [(0, size)] for dimension, size in enumerate(shape)]
    pieces = list(itertools.product(*edges))
    landing = landing_of(shape, pieces)
    place = landing.box(NAME, whole(shape))
    assert place is not None
    assert place.ctypes.data % ALIGNMENT == 0
    assert all(landing.apart(PieceKey(0, number)) is None for number in range(len(pieces)))


ALL, TOP, LOWER, TOP_AND_MORE = ((0, 4), (0, 2)), ((0, 2), (0, 2)), ((2, 4), (0, 2)), ((0, 3), (0, 2))


@pytest.mark.parametrize(
    ("pieces", "dtype", "like"),
    [
        # Two of them hold the third row.
        ([TOP_AND_MORE, LOWER], "float32", None),
        # It becomes another type on its way.
        ([TOP, LOWER], "float32", {"w": jax.ShapeDtypeStruct((4, 2), jnp.bfloat16)}),
    ],
)
def test_what_is_not_written_in_place_stays_apart(pieces: list[Bounds], dtype: str, like: object):
    landing = landing_of((4, 2), pieces, dtype, like)
    assert landing.box(NAME, ALL) is None
    apart = [landing.apart(PieceKey(0, number)) for number in range(len(pieces))]
    assert [len(data) for data in apart if data is not None] == [8 * (stop - start) for (start, stop), _ in pieces]
