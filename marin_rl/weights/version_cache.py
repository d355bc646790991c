# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Cache of the newest versions."""

import threading
from typing import Generic, TypeVar

from marin_rl.types import WeightVersion
from marin_rl.weights.errors import VersionGoneError

T = TypeVar("T")


class VersionCache(Generic[T]):
    """Keeps the newest versions and drops older ones. Thread-safe."""

    def __init__(self, keep: int, name: str) -> None:
        """Make an empty cache.

        Args:
            keep: Maximum number of versions.
            name: Name in error messages.
        """
        self._keep = keep
        self._name = name
        self._lock = threading.Lock()
        self._held: dict[WeightVersion, T] = {}

    def put(self, version: WeightVersion, item: T) -> None:
        """Add a version and drop the oldest if there are too many."""
        with self._lock:
            self._held[version] = item
            for old in sorted(self._held)[: -self._keep]:
                del self._held[old]

    def get(self, version: WeightVersion) -> T:
        """Return the item of a version.

        Raises:
            VersionGoneError: If the version is not in the cache.
        """
        with self._lock:
            if version not in self._held:
                raise VersionGoneError(
                    f"{self._name} does not have version {version}; available versions: {sorted(self._held) or 'none'}"
                )
            return self._held[version]

    def newest(self) -> tuple[WeightVersion, T] | None:
        """Return the newest version and its item, or None if the cache is empty."""
        with self._lock:
            return max(self._held.items(), key=lambda pair: pair[0], default=None)

    def versions(self) -> list[WeightVersion]:
        """Return the versions in the cache, oldest first."""
        with self._lock:
            return sorted(self._held)

    def clear(self) -> None:
        """Drop all versions."""
        with self._lock:
            self._held.clear()
