# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.lab.benchmarks.measurement import counted_compiles
from marin_rl.utils.devices.arrays import copy_arrays, numeric_arrays, replace_arrays
from tests.distributed.weight_endpoints import assert_same


class Layer(eqx.Module):
    weight: hax.NamedArray
    scale: float
    name: str = eqx.field(static=True)


def test_numeric_arrays_of_a_model():
    layer = Layer(hax.ones({"embed": 3}, dtype=jnp.bfloat16), 2.0, "first")
    leaves = numeric_arrays({"layers": [layer]})
    [name] = leaves
    assert name == "['layers'][0].weight"
    replaced = replace_arrays({"layers": [layer]}, {name: jnp.zeros(3)})["layers"][0]
    assert replaced.weight.axes == layer.weight.axes
    assert replaced.weight.array.sum() == 0
    assert (replaced.scale, replaced.name) == (2.0, "first")


@pytest.mark.parametrize("array", [jax.random.key(0), np.array(["a"]), np.zeros(2, ">f4"), np.array([None])])
def test_leaves_without_plain_numbers_are_rejected(array):
    with pytest.raises(ValueError, match=r"\['w'\] has dtype .*; only plain numbers can be transferred"):
        numeric_arrays({"w": array})


def test_copy_shares_no_memory_with_original():
    arrays = {"f": jnp.arange(100.0), "i": jnp.arange(3), "n": np.arange(4.0), "s": jnp.float32(2)}
    copies = copy_arrays(arrays, None)
    assert_same(copies, arrays)
    for name in "fis":
        assert copies[name].unsafe_buffer_pointer() != arrays[name].unsafe_buffer_pointer()
        assert copies[name].sharding == arrays[name].sharding
    assert not np.shares_memory(copies["n"], arrays["n"])


def test_only_floating_point_is_cast():
    arrays = {
        "f": jnp.float32([1.00390625, jnp.nan, 3e38]),
        "b": jnp.bfloat16([2.5]),
        "i": jnp.int32([2**24 + 1]),
        "t": jnp.array([True]),
        "n": np.float32([1.0039]),
    }
    copies = copy_arrays(arrays, "bfloat16")
    assert {name: copy.dtype.name for name, copy in copies.items()} == {
        "f": "bfloat16",
        "b": "bfloat16",
        "i": "int32",
        "t": "bool",
        "n": "bfloat16",
    }
    assert_same(copies["f"], arrays["f"].astype(jnp.bfloat16))
    assert_same(copies["i"], arrays["i"])
    assert copies["b"].unsafe_buffer_pointer() != arrays["b"].unsafe_buffer_pointer()


def test_second_version_does_not_recompile():
    arrays = {"a": jnp.arange(5.0)}
    copy_arrays(arrays, None)
    changed = {"a": arrays["a"] + 1}
    with counted_compiles() as compiles:
        copy_arrays(changed, None)
    assert compiles.programs == 0
