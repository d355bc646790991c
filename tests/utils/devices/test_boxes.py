# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from marin_rl.utils.devices.boxes import Bounds, bounds_of, grid_cells, overlap, shape_of, slices_within, volume, whole

SHAPE = (5, 4)


def boxes() -> st.SearchStrategy[Bounds]:
    def edges(size: int) -> st.SearchStrategy[tuple[int, int]]:
        return st.tuples(st.integers(0, size), st.integers(0, size)).map(lambda pair: (min(pair), max(pair)))

    return st.tuples(*(edges(size) for size in SHAPE))


def mask(box: Bounds) -> np.ndarray:
    marked = np.zeros(SHAPE, dtype=bool)
    marked[tuple(slice(start, stop) for start, stop in box)] = True
    return marked


@given(boxes(), boxes())
def test_overlap_is_the_intersection_of_masks(left: Bounds, right: Bounds):
    shared = overlap(left, right)
    both = mask(left) & mask(right)
    assert (shared is None) == (not both.any())
    if shared is not None:
        np.testing.assert_array_equal(mask(shared), both)


@given(boxes().filter(volume), st.tuples(st.integers(1, 5), st.integers(1, 4)))
def test_cells_are_those_of_the_grid_that_overlap_a_box(box: Bounds, cell: tuple[int, int]):
    grid = [((i, i + cell[0]), (j, j + cell[1])) for i in range(0, 5, cell[0]) for j in range(0, 4, cell[1])]
    assert list(grid_cells(box, cell)) == [each for each in grid if overlap(each, box) is not None]


@given(boxes(), boxes())
def test_slices_within_a_box_select_the_same_elements(left: Bounds, right: Bounds):
    shared = overlap(left, right)
    if shared is not None:
        array = np.arange(np.prod(SHAPE)).reshape(SHAPE)
        inside = array[slices_within(left, whole(SHAPE))]
        np.testing.assert_array_equal(inside[slices_within(shared, left)], array[slices_within(shared, whole(SHAPE))])


def test_scalar_has_one_element():
    assert bounds_of((), ()) == ()
    assert volume(()) == 1
    assert overlap((), ()) == ()
    assert list(grid_cells((), ())) == [()]
    assert shape_of(((2, 2), (0, 3))) == (0, 3)
