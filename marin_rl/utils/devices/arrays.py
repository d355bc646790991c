# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""The arrays of a tree by name, and copies of them on their devices."""

import functools
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
from haliax import NamedArray

from marin_rl.utils.devices.boxes import Array

T = TypeVar("T")


def named_arrays(tree: object) -> dict[str, Any]:
    """Return the leaves of a tree by path, for named arrays the arrays; all are arrays, or their shapes.

    >>> named_arrays({"bias": np.zeros(2)})
    {"['bias']": array([0., 0.])}
    """
    leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_named)
    return {jax.tree_util.keystr(path): leaf.array if is_named(leaf) else leaf for path, leaf in leaves}


def numeric_arrays(tree: object) -> dict[str, Any]:
    """Return the arrays of a tree, or their shapes, by path; other leaves are skipped.

    Raises:
        ValueError: if an array does not hold plain numbers (typed random keys, text, a foreign byte order).
    """
    leaves = named_arrays(tree).items()
    arrays = {name: leaf for name, leaf in leaves if isinstance(leaf, jax.Array | np.ndarray | jax.ShapeDtypeStruct)}
    for name, array in arrays.items():
        is_number = jnp.issubdtype(array.dtype, np.number) or jnp.issubdtype(array.dtype, np.bool_)
        if not (is_number and array.dtype.isnative):
            raise ValueError(
                f"{name} has dtype {array.dtype}; only plain numbers can be transferred: remove it from the tree"
            )
    return arrays


def describe(array: Any) -> str:
    """Return the dtype and shape of an array, of its shapes, or of a record with both.

    >>> describe(np.zeros((2, 3), np.float32))
    'float32[2, 3]'
    """
    return f"{array.dtype}{list(array.shape)}"


def first_difference(found: Mapping[str, str], expected: Mapping[str, str]) -> tuple[str, str, str] | None:
    """Compare descriptions of arrays by path.

    Returns:
        The path of the first array that differs, with its description in each, or "absent"; None if none differs.
    """
    for name in (*found, *expected):
        both = found.get(name, "absent"), expected.get(name, "absent")
        if both[0] != both[1]:
            return name, *both
    return None


def replace_arrays(tree: T, arrays: Mapping[str, Array]) -> T:
    """Return a tree with other arrays, given by path as in `named_arrays`; other leaves are kept."""

    def replace(path: Any, leaf: Any) -> Any:
        array = arrays.get(jax.tree_util.keystr(path))
        return leaf if array is None else NamedArray(cast(Any, array), leaf.axes) if is_named(leaf) else array

    return jax.tree_util.tree_map_with_path(replace, tree, is_leaf=is_named)


def is_named(leaf: object) -> bool:
    """Return whether a node of a tree is a named array."""
    return isinstance(leaf, NamedArray)


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
