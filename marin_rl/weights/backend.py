# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Destination of published weights: a server or a folder."""

from typing import Protocol, runtime_checkable

from marin_rl.weights.snapshot import Snapshot


@runtime_checkable
class WeightBackend(Protocol):
    """Makes the newest versions of one training host available to receivers."""

    @property
    def address(self) -> str:
        """Address that receivers connect to."""
        ...

    def put(self, snapshot: Snapshot) -> None:
        """Make a version available and drop the oldest if there are too many. Calls must not be concurrent."""
        ...

    def close(self) -> None:
        """Drop all versions and release threads, ports and files."""
        ...
