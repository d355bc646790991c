# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Boxes of array indices: which part of an array a piece holds, and whether pieces cover what is wanted."""

import math
from collections.abc import Sequence

import numpy as np

Bounds = tuple[tuple[int, int], ...]
"""Start and stop along each dimension; `()` for an array without dimensions."""


def bounds_of(index: tuple[slice, ...], shape: Sequence[int]) -> Bounds:
    """The box that an index of slices without steps selects.

    >>> bounds_of((slice(None), slice(2, 4)), (3, 8))
    ((0, 3), (2, 4))
    """
    return tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))


def whole(shape: Sequence[int]) -> Bounds:
    """The box of a complete array."""
    return tuple((0, size) for size in shape)


def shape_of(bounds: Bounds) -> tuple[int, ...]:
    """The shape of the part of an array inside the box."""
    return tuple(stop - start for start, stop in bounds)


def volume(bounds: Bounds) -> int:
    """Elements inside the box."""
    return math.prod(shape_of(bounds))


def overlap(left: Bounds, right: Bounds) -> Bounds | None:
    """What two boxes of the same array share; None where that is no element.

    >>> overlap(((0, 4), (0, 2)), ((2, 8), (1, 5)))
    ((2, 4), (1, 2))
    >>> overlap(((0, 2),), ((2, 4),)) is None
    True
    """
    shared = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(left, right, strict=True))
    return shared if all(start < stop for start, stop in shared) else None


def slices_within(part: Bounds, box: Bounds) -> tuple[slice, ...]:
    """The index that selects `part` in an array that holds `box` alone.

    >>> slices_within(((2, 4),), ((1, 5),))
    (slice(1, 3, None),)
    """
    return tuple(slice(start - low, stop - low) for (start, stop), (low, _) in zip(part, box, strict=True))


def find_gap(wanted: Bounds, held: Sequence[Bounds]) -> Bounds | None:
    """A box inside `wanted` that no box of `held` covers; None where all of it is covered.

    >>> find_gap(((0, 4), (0, 2)), [((0, 4), (0, 1)), ((0, 2), (1, 2))])
    ((2, 4), (1, 2))
    """
    if volume(wanted) == 0:
        return None
    parts = [part for box in held if (part := overlap(wanted, box)) is not None]
    # Between neighbouring cuts a cell is covered as a whole or not at all.
    cuts = [
        sorted({*edges, *(edge for part in parts for edge in part[dimension])})
        for dimension, edges in enumerate(wanted)
    ]
    covered = np.zeros([len(edges) - 1 for edges in cuts], dtype=bool)
    for part in parts:
        covered[tuple(slice(c.index(a), c.index(b)) for c, (a, b) in zip(cuts, part, strict=True))] = True
    if covered.all():
        return None
    cell = np.argwhere(~covered)[0]
    return tuple((edges[at], edges[at + 1]) for edges, at in zip(cuts, cell, strict=True))
