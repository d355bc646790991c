# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Boxes of arrays: sharded arrays are saved and sent as boxes, and put together from them on another mesh."""

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from typing import Any, cast

import jax
import numpy as np
from jax.sharding import Sharding

Array = jax.Array | np.ndarray

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


def grid_cells(box: Bounds, cell: Sequence[int]) -> Iterator[Bounds]:
    """Yield the cells that overlap a box with elements, of a regular grid whose cells have the shape `cell`.

    >>> list(grid_cells(((3, 6), (0, 4)), cell=(2, 4)))
    [((2, 4), (0, 4)), ((4, 6), (0, 4))]
    """
    starts = [range(start // size * size, stop, size) for (start, stop), size in zip(box, cell, strict=True)]
    for corner in itertools.product(*starts):
        yield tuple((start, start + size) for start, size in zip(corner, cell, strict=True))


def own_shards(array: Array, devices: Set[jax.Device] | None = None) -> Iterator[tuple[Bounds, Array]]:
    """Yield the shards that this process saves or sends, with their boxes; a numpy array is one.

    Of equal shards on several devices of all processes, one is yielded. `devices` restricts them to these devices.
    """
    if not isinstance(array, jax.Array):
        yield whole(array.shape), array
        return
    for shard in array.addressable_shards:
        if shard.replica_id == 0 and (devices is None or shard.device in devices):
            assert shard.data is not None
            yield bounds_of(shard.index, array.shape), shard.data


def start_copies(arrays: Iterable[Array], devices: Set[jax.Device] | None = None) -> None:
    """Start to copy the `own_shards` of arrays to host memory, without waiting for the devices."""
    for array in arrays:
        for _, shard in own_shards(array, devices):
            if isinstance(shard, jax.Array):
                shard.copy_to_host_async()


def local_boxes(shape: Sequence[int], sharding: Sharding | None) -> set[Bounds]:
    """Return the boxes of an array on the devices of this process; the whole array without a sharding."""
    if sharding is None:
        return {whole(shape)}
    indices = sharding.addressable_devices_indices_map(tuple(shape)).values()
    return {bounds_of(index, shape) for index in indices if index is not None}


def place_boxes(shape: Sequence[int], sharding: Sharding | None, boxes: Mapping[Bounds, np.ndarray]) -> Array:
    """Return an array of the values of its `local_boxes`: on the devices, or in host memory without a sharding."""
    if sharding is None:
        return boxes[whole(shape)]
    return jax.make_array_from_callback(tuple(shape), sharding, lambda index: boxes[bounds_of(cast(Any, index), shape)])
