# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Where a sender puts what it publishes: a server, or a folder."""

from typing import Protocol, runtime_checkable

from marin_rl.weights.snapshot import Snapshot


@runtime_checkable
class WeightBackend(Protocol):
    """Shows the newest versions of one training host to receivers."""

    @property
    def address(self) -> str:
        """Where receivers find it."""
        ...

    def put(self, snapshot: Snapshot) -> None:
        """Make a version visible, and forget the oldest where there are too many. Called from one thread at a time."""
        ...

    def close(self) -> None:
        """Forget all versions, and free threads, ports and files."""
        ...
