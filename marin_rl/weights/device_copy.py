# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""On-device copies of arrays, which remain valid when the learner donates the originals."""

from collections.abc import Callable, Hashable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

Array = jax.Array | np.ndarray


class DeviceCopier:
    """Copies many arrays in one jitted program per mesh, compiled at the first call."""

    def __init__(self, dtype: str | None) -> None:
        """Set up the copier without compiling.

        Args:
            dtype: Dtype that floating-point arrays are cast to; None for no cast.
        """
        self._dtype = None if dtype is None else jnp.dtype(dtype)
        self._programs: dict[tuple[jax.sharding.Sharding, ...], Callable[[list[jax.Array]], list[jax.Array]]] = {}

    def __call__(self, arrays: Mapping[str, Array]) -> dict[str, Array]:
        """Start the copies with the shardings of the originals, without waiting for the devices.

        The runtime executes the copies before later programs, so the originals may be donated immediately.
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
        # jit may alias an unchanged input with its output; jnp.copy prevents that.
        return [jnp.copy(array) if self._keeps(array.dtype) else array.astype(self._dtype) for array in arrays]

    def _copy_here(self, array: np.ndarray) -> np.ndarray:
        return np.array(array, dtype=None if self._keeps(array.dtype) else self._dtype, copy=True)

    def _keeps(self, dtype: np.dtype) -> bool:
        return self._dtype is None or dtype == self._dtype or not jnp.issubdtype(dtype, jnp.floating)


def _program_key(sharding: jax.sharding.Sharding) -> Hashable:
    """Return a key that is equal for arrays that one program can take."""
    return sharding.mesh if isinstance(sharding, jax.sharding.NamedSharding) else frozenset(sharding.device_set)
