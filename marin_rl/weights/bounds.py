# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Boxes of array indices: their overlap, and whether a set of boxes covers another box."""

import math
from collections.abc import Sequence

import numpy as np

Bounds = tuple[tuple[int, int], ...]
"""Start and stop along each dimension; `()` for an array without dimensions."""


def bounds_of(index: tuple[slice, ...], shape: Sequence[int]) -> Bounds:
    """Return the box that an index of slices without steps selects.

    >>> bounds_of((slice(None), slice(2, 4)), (3, 8))
    ((0, 3), (2, 4))
    """
    return tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))


def whole(shape: Sequence[int]) -> Bounds:
    """Return the box of a complete array."""
    return tuple((0, size) for size in shape)


def shape_of(bounds: Bounds) -> tuple[int, ...]:
    """Return the shape of a box."""
    return tuple(stop - start for start, stop in bounds)


def volume(bounds: Bounds) -> int:
    """Return the number of elements in a box."""
    return math.prod(shape_of(bounds))


def overlap(left: Bounds, right: Bounds) -> Bounds | None:
    """Return the intersection of two boxes of one array, or None if it is empty.

    >>> overlap(((0, 4), (0, 2)), ((2, 8), (1, 5)))
    ((2, 4), (1, 2))
    >>> overlap(((0, 2),), ((2, 4),)) is None
    True
    """
    shared = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(left, right, strict=True))
    return shared if all(start < stop for start, stop in shared) else None


def slices_within(part: Bounds, box: Bounds) -> tuple[slice, ...]:
    """Return the index of `part` within an array that covers only `box`.

    >>> slices_within(((2, 4),), ((1, 5),))
    (slice(1, 3, None),)
    """
    return tuple(slice(start - low, stop - low) for (start, stop), (low, _) in zip(part, box, strict=True))


def find_gap(target: Bounds, held: Sequence[Bounds]) -> Bounds | None:
    """Return a box inside `target` that no box of `held` covers, or None if `target` is covered.

    >>> find_gap(((0, 4), (0, 2)), [((0, 4), (0, 1)), ((0, 2), (1, 2))])
    ((2, 4), (1, 2))
    """
    if volume(target) == 0:
        return None
    parts = [part for box in held if (part := overlap(target, box)) is not None]
    # A cell between neighbouring cuts is either fully covered or not covered at all.
    cuts = [
        sorted({*edges, *(edge for part in parts for edge in part[dimension])})
        for dimension, edges in enumerate(target)
    ]
    covered = np.zeros([len(edges) - 1 for edges in cuts], dtype=bool)
    for part in parts:
        covered[tuple(slice(c.index(a), c.index(b)) for c, (a, b) in zip(cuts, part, strict=True))] = True
    if covered.all():
        return None
    cell = np.argwhere(~covered)[0]
    return tuple((edges[at], edges[at + 1]) for edges, at in zip(cuts, cell, strict=True))
