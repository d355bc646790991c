# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from marin_rl.weights.tree import named_leaves, replace_leaves


class Layer(eqx.Module):
    weight: hax.NamedArray
    scale: float
    name: str = eqx.field(static=True)


def test_named_leaves_of_a_model():
    layer = Layer(hax.ones({"embed": 3}), 2.0, "first")
    leaves = named_leaves({"layers": [layer]})
    [name] = leaves
    assert name == "['layers'][0].weight[<flat index 0>]"
    replaced = replace_leaves({"layers": [layer]}, {name: jnp.zeros(3)})["layers"][0]
    assert replaced.weight.axes == layer.weight.axes
    assert replaced.weight.array.sum() == 0
    assert (replaced.scale, replaced.name) == (2.0, "first")


@pytest.mark.parametrize("array", [jax.random.key(0), np.array(["a"]), np.zeros(2, ">f4"), np.array([None])])
def test_leaves_without_plain_numbers_are_rejected(array):
    with pytest.raises(ValueError, match=r"\['w'\] has dtype .*; only plain numbers can be transferred"):
        named_leaves({"w": array})


class Twins:
    def __init__(self, left: jax.Array, right: jax.Array) -> None:
        self.both = (left, right)


jax.tree_util.register_pytree_with_keys(
    Twins, lambda twins: ([(jax.tree_util.GetAttrKey("same"), leaf) for leaf in twins.both], None), lambda _, both: both
)


def test_duplicate_key_paths_are_rejected():
    with pytest.raises(ValueError, match=r"two arrays of the tree have the same key path \.same"):
        named_leaves(Twins(jnp.zeros(1), jnp.ones(1)))


def test_small_dtypes_are_plain_numbers():
    tree = {"b": jnp.zeros(2, jnp.bfloat16), "t": jnp.zeros(2, bool), "e": jnp.zeros(2, jnp.float8_e4m3fn)}
    assert named_leaves(tree).keys() == {"['b']", "['t']", "['e']"}
