# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Policy weights of the most recent versions, in host memory."""

from typing import Generic, TypeVar

import equinox as eqx
import jax

from marin_rl.types import WeightVersion

Weights = TypeVar("Weights", bound=eqx.Module)


class WeightHistory(Generic[Weights]):
    """Copies of the weights of the newest `versions` versions, at least 1.

    Every process keeps the shards of its devices, in pinned host memory.
    """

    def __init__(self, versions: int) -> None:
        if versions < 1:
            raise ValueError(f"versions must be at least 1, got {versions}")
        self._versions = versions
        self._kept: dict[WeightVersion, Weights] = {}

    def __contains__(self, version: object) -> bool:
        return version in self._kept

    def keep(self, policy: Weights, version: WeightVersion) -> None:
        """Start copying weights; when this returns, they may be donated.

        Args:
            policy: weights on devices.
            version: number of training steps that produced the weights.
        """
        self._kept[version] = _move(policy, "pinned_host")
        for evicted in sorted(self._kept)[: -self._versions]:
            del self._kept[evicted]

    def get(self, version: WeightVersion) -> Weights:
        """Return the weights of a version, on their original devices and with their original sharding.

        Raises:
            KeyError: if the history does not hold the version.
        """
        if version not in self._kept:
            raise KeyError(f"weights of version {version} are not kept; kept versions are {sorted(self._kept)}")
        return _move(self._kept[version], None)


def _move(policy: Weights, kind: str | None) -> Weights:
    """Copy arrays to memory of a kind, by default to that of their devices, with the same sharding."""

    def put(array: jax.Array) -> jax.Array:
        # The memory of other processes' devices is not known on all platforms.
        (device, *_) = array.sharding.addressable_devices
        return jax.device_put(array, array.sharding.with_memory_kind(kind or device.default_memory().kind))

    arrays, rest = eqx.partition(policy, eqx.is_array)
    return eqx.combine(jax.tree.map(put, arrays), rest)
