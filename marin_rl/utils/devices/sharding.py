# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Check that a mesh divides the axes of a model, before jax fails with the shapes of its arrays."""

import math
from collections.abc import Mapping, Sequence

import jax
from haliax import NamedArray
from haliax.partitioning import ResourceMapping
from levanter.models.lm_model import LmHeadModel


class ShardingError(ValueError):
    """A mesh axis does not divide an axis of the model."""


def check_sharding(policy: LmHeadModel, mesh: Mapping[str, int], mappings: Sequence[ResourceMapping]) -> None:
    """Check that every axis of the parameters is divisible by the mesh axes that shard it.

    Args:
        policy: shapes of the parameters.
        mesh: sizes of the mesh axes.
        mappings: mesh axes of the model's axes, for parameters and for computation.

    Raises:
        ShardingError: if one is not; names the sizes that divide it.
    """
    for leaf in jax.tree.leaves(policy, is_leaf=lambda node: isinstance(node, NamedArray)):
        if isinstance(leaf, NamedArray):
            for mapping in mappings:
                _check_axes(leaf, mapping, mesh)


def _check_axes(leaf: NamedArray, mapping: ResourceMapping, mesh: Mapping[str, int]) -> None:
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
