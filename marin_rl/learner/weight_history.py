# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Policy weights of the most recent versions, in host memory."""

from typing import Generic, TypeVar

import equinox as eqx
import jax

from marin_rl.types import WeightVersion

Weights = TypeVar("Weights", bound=eqx.Module)

_KIND = "pinned_host"


class WeightHistory(Generic[Weights]):
    """Keeps copies of earlier versions of the weights.

    Every process keeps the shards of its devices, in pinned host memory.
    """

    def __init__(self, versions: int) -> None:
        """Create an empty history.

        Args:
            versions: number of versions to keep, at least 1; a new version evicts the oldest.

        Raises:
            ValueError: if `versions` is below 1.
        """
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
        self._kept[version] = _moved(policy, _KIND)
        for evicted in sorted(self._kept)[: -self._versions]:
            del self._kept[evicted]

    def get(self, version: WeightVersion) -> Weights:
        """Return the weights of a version, on their original devices and with their original sharding.

        Raises:
            KeyError: if the history does not hold the version.
        """
        if version not in self._kept:
            raise KeyError(f"weights of version {version} are not kept; kept versions are {sorted(self._kept)}")
        return _moved(self._kept[version], None)


def _moved(policy: Weights, kind: str | None) -> Weights:
    arrays, rest = eqx.partition(policy, eqx.is_array)
    return eqx.combine(jax.tree.map(lambda array: _placed(array, kind), arrays), rest)


def _placed(array: jax.Array, kind: str | None) -> jax.Array:
    (device, *_) = array.sharding.device_set
    return jax.device_put(array, array.sharding.with_memory_kind(kind or device.default_memory().kind))
