# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""What a receiver reads from: a server, or a folder."""

from collections.abc import Generator, Sequence
from typing import Protocol, runtime_checkable

import numpy as np

from marin_rl.types import WeightVersion
from marin_rl.weights.manifest import Chunk, Manifest


@runtime_checkable
class WeightSource(Protocol):
    """Serves the pieces of one or more training hosts. May be read from several threads at once."""

    @property
    def streams(self) -> int:
        """How many streams are read from it at the same time."""
        ...

    def versions(self) -> list[WeightVersion]:
        """What it holds completely, oldest first.

        Raises:
            WeightTransferError: if it cannot be asked, or refuses.
        """
        ...

    def manifests(self, version: WeightVersion) -> list[Manifest]:
        """What its training hosts hold of one version.

        Raises:
            VersionGoneError: if it does not hold the version.
            WeightTransferError: if it cannot be asked, or refuses.
        """
        ...

    def fetch(self, manifest: Manifest, chunks: Sequence[Chunk]) -> Generator[np.ndarray, None, None]:
        """Bytes (uint8) of the chunks, in their order, as they arrive and unchecked; too few where a stream was cut.

        Raises:
            VersionGoneError: if the version is dropped meanwhile.
            WeightTransferError: if the stream fails.
        """
        ...
