# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Arrays of a tree by name."""

from collections.abc import Mapping
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

T = TypeVar("T")


def named_leaves(tree: object) -> dict[str, Any]:
    """Return the arrays and `jax.ShapeDtypeStruct`s of a tree by key path; other leaves are skipped.

    >>> named_leaves({"bias": np.zeros(2), "activation": "relu"})
    {"['bias']": array([0., 0.])}

    Raises:
        ValueError: if an array does not hold plain numbers (typed random keys, text, a foreign byte order), or two
            arrays have the same key path.
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
            if name in leaves:
                raise ValueError(f"two arrays of the tree have the same key path {name}; use different keys")
            leaves[name] = leaf
    return leaves


def replace_leaves(tree: T, arrays: Mapping[str, jax.Array | np.ndarray]) -> T:
    """Return a tree with its arrays replaced.

    Args:
        tree: the tree; its other leaves are kept.
        arrays: one array for each name of `named_leaves(tree)`.
    """

    def replace(path: Any, leaf: Any) -> Any:
        return arrays.get(jax.tree_util.keystr(path), leaf)

    return jax.tree_util.tree_map_with_path(replace, tree)
