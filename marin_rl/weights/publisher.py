# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Publishing beside the training: device copy at once, host copy and all that follows in a thread."""

from collections.abc import Callable

from marin_rl.background_job import BackgroundJob
from marin_rl.types import WeightVersion
from marin_rl.weights.device_copy import Array, DeviceCopier
from marin_rl.weights.snapshot import Snapshot, TrainingHost, start_copy_to_host, take_snapshot
from marin_rl.weights.tree import named_leaves


class BackgroundPublisher:
    """Makes a snapshot of each version in a thread of its own and hands it on when it is complete."""

    def __init__(
        self, host: TrainingHost, dtype: str | None, chunk_bytes: int, offer: Callable[[Snapshot], None]
    ) -> None:
        """Start no thread yet.

        Args:
            host: whose shards are published.
            dtype: what floating-point arrays are cast to; None leaves them as they are.
            chunk_bytes: bytes of a chunk.
            offer: makes a snapshot visible; called in the thread, for one version after the other.
        """
        self._host = host
        self._copy = DeviceCopier(dtype)
        self._chunk_bytes = chunk_bytes
        self._offer = offer
        self._job = BackgroundJob("publish weights")
        self._last: WeightVersion | None = None
        self.published: WeightVersion | None = None

    def publish(self, weights: object, version: WeightVersion) -> None:
        """See [`WeightSender`][marin_rl.weights.protocol.WeightSender]."""
        self._job.flush()
        check_order(self._last, version)
        arrays = self._copy(named_leaves(weights))
        start_copy_to_host(arrays, self._host)
        self._last = version
        self._job.start(self._finish, arrays, version)

    def _finish(self, arrays: dict[str, Array], version: WeightVersion) -> None:
        self._offer(take_snapshot(arrays, version, self._host, self._chunk_bytes))
        self.published = version

    def flush(self) -> None:
        """Wait until everything published is visible; raises what went wrong."""
        self._job.flush()

    def close(self) -> None:
        """Wait for what is under way, and end the thread."""
        self._job.close()


def check_order(last: WeightVersion | None, version: WeightVersion) -> None:
    """Versions only grow.

    Raises:
        ValueError: if this one does not.
    """
    if last is not None and version <= last:
        raise ValueError(f"version {version} cannot be published after version {last}; versions only grow")
