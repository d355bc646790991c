# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Trees of named arrays and stacked microbatches on the devices of a mesh."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import equinox as eqx
import jax
import numpy as np
from haliax import Axis, NamedArray
from haliax.partitioning import ResourceMapping, pspec_for_axis
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from marin_rl.batching.rl_example import RlExample
from marin_rl.utils import multihost
from marin_rl.utils.devices.setup import own_rows
from marin_rl.utils.devices.trainer_config import TrainerConfig

T = TypeVar("T")


def stack_microbatches(microbatches: Sequence[RlExample], capacity: int) -> RlExample:
    """Stack microbatches of one shape along a new first axis `microbatch`, on the host.

    There is at least one microbatch. `capacity` is the size of the new axis, doubled until all microbatches fit; the
    rest is zeros.
    """
    while capacity < len(microbatches):
        capacity *= 2

    def stack(*parts: NamedArray) -> NamedArray:
        stacked = np.zeros((capacity, *parts[0].array.shape), parts[0].dtype)
        for index, part in enumerate(parts):
            stacked[index] = part.array
        return NamedArray(cast(jax.Array, stacked), (Axis("microbatch", capacity), *parts[0].axes))

    return jax.tree.map(stack, *microbatches, is_leaf=lambda leaf: isinstance(leaf, NamedArray))


def take_microbatch(batch: RlExample, index: jax.Array | int) -> RlExample:
    """Return one microbatch of stacked ones."""

    def take(stacked: NamedArray) -> NamedArray:
        array = jax.lax.dynamic_index_in_dim(stacked.array, index, keepdims=False)
        return NamedArray(array, stacked.axes[1:])

    return jax.tree.map(take, batch, is_leaf=lambda leaf: isinstance(leaf, NamedArray))


def place(tree: T, mesh: Mesh, mapping: ResourceMapping) -> T:
    """Put every array of a tree on the mesh: named arrays sharded by `mapping`, all others replicated."""
    return _map_arrays(multihost.put, tree, mesh, mapping)


def place_batch(batch: RlExample, config: TrainerConfig, num_rows: int | None) -> RlExample:
    """Put stacked microbatches, `{microbatch, batch, position, ...}` on the host, on the mesh.

    `num_rows` is the number of rows of a microbatch if `batch` contains only those of this process; None if it has all.

    Raises:
        ValueError: if `batch` has another number of rows than this process feeds.
    """
    mesh, mapping = config.device_mesh, config.compute_axis_mapping
    rows_of = own_rows(config)
    if rows_of is None or num_rows is None:
        return place(batch, mesh, mapping)
    rows, Rows = rows_of(num_rows), Axis("batch", num_rows)
    if (found := batch.input_ids.axis_size("batch")) != len(rows):
        raise ValueError(f"a microbatch has {found} rows, but this process feeds {len(rows)} of {num_rows}")

    def put(leaf: NamedArray) -> NamedArray:
        axes = tuple(Rows if axis.name == Rows.name else axis for axis in leaf.axes)
        own = np.asarray(leaf.array)

        def part(index: tuple[slice, ...] | None) -> np.ndarray:
            assert index is not None
            start, stop, _ = index[1].indices(num_rows)
            first = int(np.searchsorted(rows, start))
            return own[index[0], first : first + stop - start, *index[2:]]

        sharding = NamedSharding(mesh, pspec_for_axis(axes, mapping))
        return NamedArray(jax.make_array_from_callback(tuple(axis.size for axis in axes), sharding, part), axes)

    return jax.tree.map(put, batch, is_leaf=lambda leaf: isinstance(leaf, NamedArray))


def placed_shape(tree: T, mesh: Mesh, mapping: ResourceMapping) -> T:
    """Return the shapes, dtypes and shardings that `place` would give a tree of arrays or shapes."""

    def describe(leaf: Any, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    return _map_arrays(describe, tree, mesh, mapping)


def _map_arrays(function: Callable[[Any, NamedSharding], Any], tree: T, mesh: Mesh, mapping: ResourceMapping) -> T:
    def apply(leaf: Any) -> Any:
        if isinstance(leaf, NamedArray):
            sharding = NamedSharding(mesh, pspec_for_axis(leaf.axes, mapping))
            return NamedArray(function(leaf.array, sharding), leaf.axes)
        if not has_shape(leaf):
            return leaf
        # A jitted step returns P(None, ...). P() is equivalent, but would be another key of the compilation cache.
        return function(leaf, NamedSharding(mesh, PartitionSpec(*[None] * len(leaf.shape))))

    return jax.tree.map(apply, tree, is_leaf=lambda leaf: isinstance(leaf, NamedArray))


def has_shape(leaf: Any) -> bool:
    """Return whether a leaf is an array, or stands for one."""
    return eqx.is_array(leaf) or isinstance(leaf, jax.ShapeDtypeStruct)
