# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""The arrays of a tree by name, and copies of them on their devices."""

import functools
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

T = TypeVar("T")
Array = jax.Array | np.ndarray


def named_leaves(tree: object) -> dict[str, Any]:
    """Return the arrays and `jax.ShapeDtypeStruct`s of a tree by key path; other leaves are skipped.

    >>> named_leaves({"bias": np.zeros(2), "activation": "relu"})
    {"['bias']": array([0., 0.])}

    Raises:
        ValueError: if an array does not hold plain numbers (typed random keys, text, a foreign byte order).
    """
    leaves = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        if isinstance(leaf, jax.Array | np.ndarray | jax.ShapeDtypeStruct):
            name, dtype = jax.tree_util.keystr(path), leaf.dtype
            is_number = jnp.issubdtype(dtype, np.number) or jnp.issubdtype(dtype, np.bool_)
            if not (is_number and dtype.isnative):
                raise ValueError(
                    f"{name} has dtype {dtype}; only plain numbers can be transferred: remove it from the tree"
                )
            leaves[name] = leaf
    return leaves


def replace_leaves(tree: T, arrays: Mapping[str, jax.Array | np.ndarray]) -> T:
    """Return a tree with its arrays replaced.

    There is one array for each name of `named_leaves(tree)`; other leaves are kept.
    """

    def replace(path: Any, leaf: Any) -> Any:
        return arrays.get(jax.tree_util.keystr(path), leaf)

    return jax.tree_util.tree_map_with_path(replace, tree)


def copy_arrays(arrays: Mapping[str, Array], dtype: str | None) -> dict[str, Array]:
    """Start copies with the shardings of the originals, without waiting for the devices.

    Arrays of one mesh are copied in one jitted program, compiled at the first call. The runtime executes the copies
    before later programs, so the originals may be donated immediately. Floating-point arrays are cast to `dtype`, if it
    is not None.
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
