# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Publishing beside the training: device copy at once, host copy and all that follows in a thread."""

from marin_rl.background_job import BackgroundJob
from marin_rl.types import WeightVersion
from marin_rl.weights.backend import WeightBackend
from marin_rl.weights.device_copy import Array, DeviceCopier
from marin_rl.weights.snapshot import TrainingHost, start_copy_to_host, take_snapshot
from marin_rl.weights.tree import named_leaves


class ShardedSender:
    """Makes a snapshot of a host's shards in a thread of its own; see `WeightSender`."""

    def __init__(self, backend: WeightBackend, host: TrainingHost, *, dtype: str | None, chunk_bytes: int) -> None:
        """Start no thread yet.

        Args:
            backend: gets each version when it is complete, in the thread, one after the other; closed with the sender.
            host: whose shards are published.
            dtype: what floating-point arrays are cast to; None leaves them as they are.
            chunk_bytes: bytes of a chunk.
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
        """The outlet's."""
        return self._backend.address

    @property
    def published(self) -> WeightVersion | None:
        """See [`WeightSender`][marin_rl.weights.protocol.WeightSender]."""
        return self._published

    def publish(self, weights: object, version: WeightVersion) -> None:
        """See [`WeightSender`][marin_rl.weights.protocol.WeightSender]."""
        self._job.flush()
        check_order(self._last, version)
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


def check_order(last: WeightVersion | None, version: WeightVersion) -> None:
    """Versions only grow.

    Raises:
        ValueError: if this one does not.
    """
    if last is not None and version <= last:
        raise ValueError(f"version {version} cannot be published after version {last}; versions only grow")
