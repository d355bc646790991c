# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""The policy's weights of the last few versions, in host memory."""

from typing import Generic, TypeVar

import equinox as eqx
import jax

from marin_rl.types import WeightVersion

Weights = TypeVar("Weights", bound=eqx.Module)

_KIND = "pinned_host"


class WeightHistory(Generic[Weights]):
    """Keeps copies of weights that the learner has moved on from.

    Every process keeps the shards of its own devices, in memory that they reach directly.
    """

    def __init__(self, versions: int) -> None:
        """Keep nothing yet.

        Args:
            versions: how many to keep, at least 1; the oldest goes when another comes.

        Raises:
            ValueError: if it is none.
        """
        if versions < 1:
            raise ValueError(f"versions is {versions}; a history keeps at least 1")
        self._versions = versions
        self._kept: dict[WeightVersion, Weights] = {}

    def __contains__(self, version: object) -> bool:
        return version in self._kept

    def keep(self, policy: Weights, version: WeightVersion) -> None:
        """Start the copy; when this returns, the weights may be donated.

        Args:
            policy: on devices.
            version: steps of training behind it.
        """
        self._kept[version] = _moved(policy, _KIND)
        for over in sorted(self._kept)[: -self._versions]:
            del self._kept[over]

    def get(self, version: WeightVersion) -> Weights:
        """Weights of a version that is kept, on the devices and in the shards that they had.

        Raises:
            KeyError: if it is not kept.
        """
        if version not in self._kept:
            raise KeyError(f"weights of version {version} are not kept; there are those of {sorted(self._kept)}")
        return _moved(self._kept[version], None)


def _moved(policy: Weights, kind: str | None) -> Weights:
    arrays, rest = eqx.partition(policy, eqx.is_array)
    return eqx.combine(jax.tree.map(lambda array: _placed(array, kind), arrays), rest)


def _placed(array: jax.Array, kind: str | None) -> jax.Array:
    (device, *_) = array.sharding.device_set
    return jax.device_put(array, array.sharding.with_memory_kind(kind or device.default_memory().kind))
