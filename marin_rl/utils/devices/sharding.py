# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Sharding of functions with Pallas kernels, which XLA cannot partition, and a check that a mesh divides a model.

Checks of configs import this module, so haliax and levanter are imported where they are used.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
from jax.sharding import PartitionSpec

if TYPE_CHECKING:
    from haliax import Axis, NamedArray
    from haliax.partitioning import ResourceMapping
    from levanter.models.lm_model import LmHeadModel

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
    from haliax.partitioning import physical_axis_name

    return PartitionSpec(*(None if axis is None else physical_axis_name(axis) for axis in axes))


class ShardingError(ValueError):
    """A mesh axis does not divide an axis of the model."""


def check_sharding(policy: "LmHeadModel", mesh: Mapping[str, int], mappings: Sequence["ResourceMapping"]) -> None:
    """Check that every axis of the parameters is divisible by the mesh axes that shard it.

    `policy` has the shapes of the parameters, `mesh` the sizes of the mesh axes, and `mappings` the mesh axes of the
    axes of the model, for parameters and for computation.

    Raises:
        ShardingError: if one is not; names the sizes that divide it.
    """
    from haliax import NamedArray

    for leaf in jax.tree.leaves(policy, is_leaf=lambda node: isinstance(node, NamedArray)):
        if isinstance(leaf, NamedArray):
            for mapping in mappings:
                _check_axes(leaf, mapping, mesh)


def _check_axes(leaf: "NamedArray", mapping: "ResourceMapping", mesh: Mapping[str, int]) -> None:
    for axis in leaf.axes:
        target = mapping.get(axis.name)
        names = [] if target is None else [target] if isinstance(target, str) else list(target)
        shards = math.prod(mesh[name] for name in names)
        if axis.size % shards:
            remedy = (
                f"shard another axis than {axis.name} (trainer.fsdp_axis), or use a number of devices that divides it"
            )
            if names == ["model"]:
                sizes = [size for size in range(1, axis.size + 1) if axis.size % size == 0 and size <= 2 * shards]
                remedy = f"set trainer.model_axis_size to one of {', '.join(map(str, sizes))}"
            raise ShardingError(
                f"the model's axis {axis.name} has {axis.size} elements, which {shards} shards of the mesh axis "
                f"{' x '.join(names)} do not divide; {remedy}"
            )
