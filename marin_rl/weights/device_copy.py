# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Copies of arrays on their own devices, which live on when the learner donates the originals."""

from collections.abc import Callable, Hashable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

Array = jax.Array | np.ndarray


class DeviceCopier:
    """Copies many arrays in one program for each mesh, compiled at the first call."""

    def __init__(self, dtype: str | None) -> None:
        """Nothing is compiled yet.

        Args:
            dtype: what floating-point arrays are cast to; None leaves them as they are.
        """
        self._dtype = None if dtype is None else jnp.dtype(dtype)
        self._programs: dict[tuple[jax.sharding.Sharding, ...], Callable[[list[jax.Array]], list[jax.Array]]] = {}

    def __call__(self, arrays: Mapping[str, Array]) -> dict[str, Array]:
        """Start the copies, each with the sharding of its original, and return without waiting for the devices.

        The runtime orders them before whatever is called afterwards, so the originals may be donated at once.
        """
        copies: dict[str, Array] = {}
        groups: dict[Hashable, dict[str, jax.Array]] = {}
        for name, array in arrays.items():
            if isinstance(array, jax.Array):
                groups.setdefault(_program_key(array.sharding), {})[name] = array
            else:
                copies[name] = self._copy_here(array)
        for group in groups.values():
            copied = self._program(tuple(array.sharding for array in group.values()))(list(group.values()))
            copies.update(zip(group, copied, strict=True))
        return {name: copies[name] for name in arrays}

    def _program(self, shardings: tuple[jax.sharding.Sharding, ...]) -> Callable[[list[jax.Array]], list[jax.Array]]:
        if shardings not in self._programs:
            self._programs[shardings] = jax.jit(self._copy_all, out_shardings=list(shardings))
        return self._programs[shardings]

    def _copy_all(self, arrays: Sequence[jax.Array]) -> list[jax.Array]:
        # An output that is an input as it stands would share its buffer; jnp.copy keeps jit from that.
        return [jnp.copy(array) if self._keeps(array.dtype) else array.astype(self._dtype) for array in arrays]

    def _copy_here(self, array: np.ndarray) -> np.ndarray:
        return np.array(array, dtype=None if self._keeps(array.dtype) else self._dtype, copy=True)

    def _keeps(self, dtype: np.dtype) -> bool:
        return self._dtype is None or dtype == self._dtype or not jnp.issubdtype(dtype, jnp.floating)


def _program_key(sharding: jax.sharding.Sharding) -> Hashable:
    """Equal for arrays that one program can take."""
    return sharding.mesh if isinstance(sharding, jax.sharding.NamedSharding) else frozenset(sharding.device_set)
