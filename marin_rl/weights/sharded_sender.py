# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Sender that copies weights on the devices immediately, and to the host in a background thread."""

from marin_rl.background_job import BackgroundJob
from marin_rl.types import WeightVersion
from marin_rl.weights.backend import WeightBackend
from marin_rl.weights.device_copy import Array, DeviceCopier
from marin_rl.weights.snapshot import TrainingHost, start_copy_to_host, take_snapshot
from marin_rl.weights.tree import named_leaves


class ShardedSender:
    """Publishes snapshots of the shards of a host from a background thread; see `WeightSender`."""

    def __init__(self, backend: WeightBackend, host: TrainingHost, *, dtype: str | None, chunk_bytes: int) -> None:
        """Set up the sender without starting a thread.

        Args:
            backend: Destination of the snapshots; the sender closes it.
            host: The training host of this process.
            dtype: Dtype that floating-point arrays are cast to; None for no cast.
            chunk_bytes: Bytes per chunk.
        """
        self._backend = backend
        self._host = host
        self._copy = DeviceCopier(dtype)
        self._chunk_bytes = chunk_bytes
        self._job = BackgroundJob("publish weights")
        self._last: WeightVersion | None = None
        self._published: WeightVersion | None = None

    @property
    def address(self) -> str:
        """Address of the backend."""
        return self._backend.address

    @property
    def published(self) -> WeightVersion | None:
        """See [`WeightSender`][marin_rl.weights.protocol.WeightSender]."""
        return self._published

    def publish(self, weights: object, version: WeightVersion) -> None:
        """See [`WeightSender`][marin_rl.weights.protocol.WeightSender]."""
        self._job.flush()
        check_version_increases(self._last, version)
        arrays = self._copy(named_leaves(weights))
        start_copy_to_host(arrays, self._host)
        self._last = version
        self._job.start(self._finish, arrays, version)

    def _finish(self, arrays: dict[str, Array], version: WeightVersion) -> None:
        self._backend.put(take_snapshot(arrays, version, self._host, self._chunk_bytes))
        self._published = version

    def flush(self) -> None:
        """See [`WeightSender`][marin_rl.weights.protocol.WeightSender]."""
        self._job.flush()

    def close(self) -> None:
        """See [`WeightSender`][marin_rl.weights.protocol.WeightSender]."""
        try:
            self._job.close()
        finally:
            self._backend.close()


def check_version_increases(last: WeightVersion | None, version: WeightVersion) -> None:
    """Check that a version is greater than the last one.

    Raises:
        ValueError: If it is not.
    """
    if last is not None and version <= last:
        raise ValueError(f"version {version} cannot be published after version {last}; versions must increase")
