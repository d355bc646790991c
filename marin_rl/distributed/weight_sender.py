# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Sender of weights: snapshots of the learner's arrays in host memory, published from a background thread."""

import dataclasses
from collections.abc import Set

import jax
import numpy as np

from marin_rl.config.workers_config import WeightTransferConfig
from marin_rl.distributed.weight_manifest import ArrayPiece, Manifest, Snapshot
from marin_rl.distributed.weight_server import WeightServer
from marin_rl.types import WeightVersion
from marin_rl.utils.devices.arrays import copy_arrays, numeric_arrays
from marin_rl.utils.devices.boxes import Array, own_shards, start_copies
from marin_rl.utils.event_loop import BackgroundJob

CHUNK_BYTES = 4 * 2**20
"""Bytes of a message; far below the message limit of Arrow and gRPC, 2 GiB."""


@dataclasses.dataclass(frozen=True)
class TrainingHost:
    """A training host and its devices."""

    index: int
    """Index of the host, from 0, for messages."""
    devices: frozenset[jax.Device]
    """Devices of the shards that this host sends."""

    @staticmethod
    def current() -> "TrainingHost":
        """Return the host of this jax process, with its local devices."""
        return TrainingHost(jax.process_index(), frozenset(jax.local_devices()))


def take_snapshot(
    arrays: dict[str, Array], version: WeightVersion, devices: Set[jax.Device], chunk_bytes: int
) -> Snapshot:
    """Copy the shards of a host to host memory; waits for the devices.

    Only the first replica of a shard is read, so each shard is sent once over all hosts. Every host sends numpy arrays.
    The arrays must not be modified elsewhere. The dictionary is emptied, which frees device memory early. `devices` are
    those of the shards that are sent, in chunks of `chunk_bytes`.
    """
    pieces, data = [], []
    while arrays:
        name = next(iter(arrays))
        array = arrays.pop(name)
        for bounds, part in own_shards(array, devices):
            pieces.append(ArrayPiece(name, array.shape, array.dtype.name, bounds))
            data.append(np.ascontiguousarray(part).reshape(-1).view(np.uint8))
    return Snapshot(Manifest(version, chunk_bytes, tuple(pieces)), tuple(data))


class WeightSender:
    """Publishes the shards of a training host from a background thread."""

    def __init__(
        self,
        server: WeightServer,
        devices: Set[jax.Device],
        *,
        dtype: str | None = None,
        chunk_bytes: int = CHUNK_BYTES,
    ) -> None:
        """Set up the sender without starting a thread.

        The sender closes the server. Of all shards, those on `devices` are sent. Floating-point arrays are cast to
        `dtype`, if it is not None.
        """
        self.address = server.address
        """Address to pass to `open_receiver`."""
        self._server = server
        self._devices = devices
        self._dtype = dtype
        self._chunk_bytes = chunk_bytes
        self._job = BackgroundJob("publish weights")
        self._last: WeightVersion | None = None

    def publish(self, weights: object, version: WeightVersion) -> None:
        """Publish weights in the background. Returns when the learner may donate or overwrite its arrays.

        The version becomes available when the copy to the host is complete; until then the devices hold a second copy
        of the weights. A call waits for the previous publication. With several training hosts, all of them call
        `publish` in the same order. Of `weights`, only arrays are transferred. `version` is the number of training
        steps, greater than every earlier one.

        Raises:
            ValueError: if the version does not increase, or a leaf has a dtype that cannot be transferred.
            Exception: an error in the background since the last call.
        """
        self._job.flush()
        if self._last is not None and version <= self._last:
            raise ValueError(
                f"version {version} cannot be published after version {self._last}; versions must increase"
            )
        arrays = copy_arrays(numeric_arrays(weights), self._dtype)
        start_copies(arrays.values(), self._devices)
        self._last = version
        self._job.start(lambda: self._server.put(take_snapshot(arrays, version, self._devices, self._chunk_bytes)))

    def flush(self) -> None:
        """Wait until the last published version is available.

        Raises:
            Exception: an error in the background.
        """
        self._job.flush()

    def close(self) -> None:
        """Wait for the pending publication, stop serving, and release threads and port."""
        try:
            self._job.close()
        finally:
            self._server.close()


def open_sender(config: WeightTransferConfig, secret: str, host: TrainingHost) -> WeightSender:
    """Start the weight server of a training host. `secret`, from `make_secret()`, is equal on all training hosts.

    Raises:
        OSError: if the address cannot be bound.
    """
    server = WeightServer(secret, f"training host {host.index}", host=config.host, port=config.port)
    return WeightSender(server, host.devices, dtype=config.sent_dtype)
