# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import jax
import jax.numpy as jnp
import numpy as np

from experiments.benchmarks.measurement import counted_compiles
from marin_rl.distributed.weights.device_copy import copy_arrays
from tests.distributed.weights.endpoints import assert_same


def test_copy_shares_no_memory_with_original():
    arrays = {"f": jnp.arange(100.0), "i": jnp.arange(3), "n": np.arange(4.0), "s": jnp.float32(2)}
    copies = copy_arrays(arrays, None)
    assert_same(copies, arrays)
    for name in "fis":
        assert copies[name].unsafe_buffer_pointer() != arrays[name].unsafe_buffer_pointer()
        assert copies[name].sharding == arrays[name].sharding
    assert not np.shares_memory(copies["n"], arrays["n"])


def test_copy_survives_donation_of_original():
    # Without the copy, a numpy view of a donated CPU array changes.
    overwrite = jax.jit(lambda array: array * 0 - 1, donate_argnums=0)
    for value in range(10):
        array = jnp.full(200_000, value, jnp.float32)
        copies = copy_arrays({"a": array}, None)
        array = overwrite(array)
        assert (np.asarray(copies["a"]) == value).all()
        assert (np.asarray(array) == -1).all()


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
