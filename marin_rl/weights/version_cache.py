# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""The newest few versions, held for whoever asks."""

import threading
from typing import Generic, TypeVar

from marin_rl.types import WeightVersion
from marin_rl.weights.errors import VersionGoneError

T = TypeVar("T")


class VersionCache(Generic[T]):
    """Keeps the newest versions and forgets older ones; safe to use from several threads."""

    def __init__(self, keep: int, name: str) -> None:
        """Make an empty shelf.

        Args:
            keep: how many versions it holds at most.
            name: what errors call it.
        """
        self._keep = keep
        self._name = name
        self._lock = threading.Lock()
        self._held: dict[WeightVersion, T] = {}

    def put(self, version: WeightVersion, item: T) -> None:
        """Make a version visible, and forget the oldest where there are too many."""
        with self._lock:
            self._held[version] = item
            for old in sorted(self._held)[: -self._keep]:
                del self._held[old]

    def get(self, version: WeightVersion) -> T:
        """One version.

        Raises:
            VersionGoneError: if it is not held.
        """
        with self._lock:
            if version not in self._held:
                raise VersionGoneError(
                    f"{self._name} does not hold version {version}; it holds {sorted(self._held) or 'none'}"
                )
            return self._held[version]

    def newest(self) -> tuple[WeightVersion, T] | None:
        """The newest version, and what is held of it; None where nothing is."""
        with self._lock:
            return max(self._held.items(), key=lambda pair: pair[0], default=None)

    def versions(self) -> list[WeightVersion]:
        """What is held, oldest first."""
        with self._lock:
            return sorted(self._held)

    def clear(self) -> None:
        """Forget everything."""
        with self._lock:
            self._held.clear()
