# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Functions with Pallas kernels, which XLA cannot partition, on several devices."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
from jax.sharding import PartitionSpec

if TYPE_CHECKING:
    from haliax import Axis

POSITION = "position"
"""Axis of the positions of a row, which the learner may split over devices (context parallelism)."""


def on_each_shard(function: Callable[..., Any], inputs: tuple[Any, ...], outputs: Any) -> Callable[..., Any]:
    """Run a function on each shard of its arguments.

    Args:
        function: function of arrays whose result on a shard is that shard of its result.
        inputs: sharding of each argument, such as from `sharding_of`, or a tree of them for a tree of arrays.
        outputs: sharding of the result, or of each of several.

    Returns:
        A function of whole arrays: `function` itself without a mesh, and within a `shard_map` over all axes of it.
    """
    mesh = jax.sharding.get_abstract_mesh()
    automatic = set(mesh.axis_names) - set(mesh.manual_axes)
    if not automatic:
        return function
    return jax.shard_map(function, in_specs=inputs, out_specs=outputs, axis_names=automatic, check_vma=False)


def sharding_of(*axes: "Axis | None") -> PartitionSpec:
    """Return the sharding of an array's first axes by the current axis mapping; None is an axis that is not sharded."""
    # Checks of configs read `POSITION` only.
    from haliax.partitioning import physical_axis_name

    return PartitionSpec(*(None if axis is None else physical_axis_name(axis) for axis in axes))
