# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import haliax as hax
import jax
import jax.numpy as jnp
import pytest
from haliax import Axis
from jax.sharding import AbstractMesh, PartitionSpec

from marin_rl.utils.devices.kernel_sharding import on_each_shard, sharding_of

MAPPING = {"batch": ("replica", "data"), "kv_head": "model"}


def test_sharding_is_that_of_the_axis_mapping():
    Batch, Heads = Axis("batch", 8), Axis("kv_head", 4)
    assert sharding_of(Batch, None, Heads) == PartitionSpec(None, None, None)
    with hax.axis_mapping(MAPPING):
        assert sharding_of(Batch, None, Heads) == PartitionSpec(("replica", "data"), None, "model")
        assert sharding_of(Axis("position", 3)) == PartitionSpec(None)


def shapes_within(spec: PartitionSpec) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the shapes of an array inside and outside of a function that runs on each shard."""
    inside = []

    def double(array: jax.Array) -> jax.Array:
        inside.append(array.shape)
        return 2 * array

    outside = jax.eval_shape(on_each_shard(double, (spec,), spec), jax.ShapeDtypeStruct((8, 6, 4), jnp.float32))
    return inside[-1], outside.shape


def test_function_is_unchanged_without_a_mesh():
    assert on_each_shard(len, (PartitionSpec(),), PartitionSpec()) is len


@pytest.mark.parametrize(
    ("spec", "shape"), [(PartitionSpec(), (8, 6, 4)), (PartitionSpec("data", None, "model"), (4, 6, 2))]
)
def test_function_runs_on_shards(spec: PartitionSpec, shape: tuple[int, ...]):
    with jax.sharding.use_abstract_mesh(AbstractMesh((2, 2), ("data", "model"))):
        assert shapes_within(spec) == (shape, (8, 6, 4))
