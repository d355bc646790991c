# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Source of a receiver: a server or a folder."""

from collections.abc import Generator, Sequence
from typing import Protocol, runtime_checkable

import numpy as np

from marin_rl.types import WeightVersion
from marin_rl.weights.manifest import Chunk, Manifest


@runtime_checkable
class WeightSource(Protocol):
    """Pieces of one or more training hosts. Thread-safe."""

    @property
    def streams(self) -> int:
        """Number of concurrent streams."""
        ...

    def versions(self) -> list[WeightVersion]:
        """Return the complete versions, oldest first.

        Raises:
            WeightTransferError: If the source does not respond or rejects the call.
        """
        ...

    def manifests(self, version: WeightVersion) -> list[Manifest]:
        """Return the manifests of one version.

        Raises:
            VersionGoneError: If the version is not available.
            WeightTransferError: If the source does not respond or rejects the call.
        """
        ...

    def fetch(self, manifest: Manifest, chunks: Sequence[Chunk]) -> Generator[np.ndarray, None, None]:
        """Yield the bytes (uint8) of the chunks in order, unchecked; fewer chunks if the stream was cut.

        Raises:
            VersionGoneError: If the version is dropped during the transfer.
            WeightTransferError: If the stream fails.
        """
        ...
