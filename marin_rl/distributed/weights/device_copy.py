# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Copies of arrays on their devices, so that the learner may donate the originals."""

import functools
from collections.abc import Hashable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

Array = jax.Array | np.ndarray


def copy_arrays(arrays: Mapping[str, Array], dtype: str | None) -> dict[str, Array]:
    """Start copies with the shardings of the originals, without waiting for the devices.

    Arrays of one mesh are copied in one jitted program, compiled at the first call. The runtime executes the copies
    before later programs, so the originals may be donated immediately.

    Args:
        arrays: the originals by name.
        dtype: dtype that floating-point arrays are cast to; None for no cast.
    """
    copies: dict[str, Array] = {}
    groups: dict[Hashable, dict[str, jax.Array]] = {}
    for name, array in arrays.items():
        if isinstance(array, jax.Array):
            sharding = array.sharding
            key = sharding.mesh if isinstance(sharding, jax.sharding.NamedSharding) else frozenset(sharding.device_set)
            groups.setdefault(key, {})[name] = array
        else:
            copies[name] = np.array(array, dtype=_copy_dtype(array, dtype), copy=True)
    for group in groups.values():
        program = copy_program(tuple(array.sharding for array in group.values()), dtype)
        copies.update(zip(group, program(list(group.values())), strict=True))
    return {name: copies[name] for name in arrays}


@functools.cache
def copy_program(shardings: tuple[jax.sharding.Sharding, ...], dtype: str | None) -> jax.stages.Wrapped:
    """Return the jitted program of `copy_arrays` for arrays with these shardings."""

    def copy(arrays: Sequence[jax.Array]) -> list[jax.Array]:
        targets = [_copy_dtype(array, dtype) for array in arrays]
        # jit may alias an unchanged input with its output; jnp.copy prevents that.
        return [
            jnp.copy(array) if array.dtype == target else array.astype(target)
            for array, target in zip(arrays, targets, strict=True)
        ]

    return jax.jit(copy, out_shardings=list(shardings))


def _copy_dtype(array: Array, dtype: str | None) -> np.dtype:
    return array.dtype if dtype is None or not jnp.issubdtype(array.dtype, jnp.floating) else jnp.dtype(dtype)
