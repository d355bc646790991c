# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Configuration of the weight transfer from learner to workers."""

import abc
import dataclasses
import enum
from collections.abc import Sequence
from typing import TYPE_CHECKING

import draccus

from marin_rl.config_fields import convert_enum_fields
from marin_rl.retry import RetryConfig
from marin_rl.storage import storage_path

if TYPE_CHECKING:
    from marin_rl.weights.fetch import WeightReceiver
    from marin_rl.weights.protocol import WeightSender
    from marin_rl.weights.publish import ShardedSender, TrainingHost

MAX_CHUNK_BYTES = 64 * 2**20
"""Maximum chunk size, far below the message limit of Arrow and gRPC, 2 GiB."""


class TransferDtype(enum.StrEnum):
    """Dtype of floating-point weights during the transfer."""

    PARAMETER = "parameter"
    """The learner's parameter dtype. A receiver with another dtype is rejected."""
    BFLOAT16 = "bfloat16"
    """Round to bfloat16 on the devices, which halves the bytes of float32. The receiver casts to its floating-point
    dtype."""


@dataclasses.dataclass(frozen=True)
class WeightTransferConfig(draccus.ChoiceRegistry, abc.ABC):
    """Weight transfer, selected by `type`."""

    dtype: TransferDtype = TransferDtype.PARAMETER
    """Dtype of floating-point weights during the transfer: `parameter` (the learner's) or `bfloat16`."""

    @abc.abstractmethod
    def open_sender(self, secret: str, training_host: "TrainingHost") -> "WeightSender":
        """Open the sender of a training host.

        Args:
            secret: the run's secret, from `make_secret()`; equal on all training hosts.
            training_host: the training host of this process.
        """

    @abc.abstractmethod
    def open_receiver(self, addresses: Sequence[str], secret: str) -> "WeightReceiver":
        """Open the receiver of a worker.

        Args:
            addresses: sender addresses of all training hosts, in any order.
            secret: the run's secret.
        """

    @property
    def sent_dtype(self) -> str | None:
        """Dtype that floating-point arrays are cast to; None for no cast."""
        return None if self.dtype is TransferDtype.PARAMETER else self.dtype.value


@WeightTransferConfig.register_subclass("arrow_flight")
@dataclasses.dataclass(frozen=True)
class ArrowFlightConfig(WeightTransferConfig):
    """Each training host serves its own shards over Arrow Flight; workers fetch what their devices need.

    Transfers are encrypted with TLS. Server and workers authenticate with certificates derived from the run's secret.
    """

    host: str = "127.0.0.1"
    """Name or address that the server binds. The default accepts connections from this machine only. `0.0.0.0` binds
    every interface and announces the machine's host name. Workers or training hosts on other machines need a reachable
    address; the default is rejected for them."""
    port: int = 0
    """Port that the server binds, 0 to 65535; 0 selects a free port."""
    streams: int = 4
    """Concurrent streams from each server to a worker; 1 to 64."""
    chunk_mb: int = 4
    """Mebibytes per message, each with its checksum; 1 to 64."""
    retry: RetryConfig = RetryConfig()
    """Retries of a worker when weights do not arrive."""

    def __post_init__(self) -> None:
        convert_enum_fields(self)
        if not self.host:
            raise ValueError("weights.host is empty; set the address to bind, such as 127.0.0.1")
        _check_range("port", self.port, 0, 65535)
        _check_range("streams", self.streams, 1, 64)
        _check_range("chunk_mb", self.chunk_mb, 1, MAX_CHUNK_BYTES // 2**20)

    def open_sender(self, secret: str, training_host: "TrainingHost") -> "ShardedSender":
        """See [`WeightTransferConfig`][marin_rl.weights.config.WeightTransferConfig]."""
        # Checks of configs need no transport.
        from marin_rl.weights.arrow_flight import FlightBackend
        from marin_rl.weights.publish import ShardedSender

        backend = FlightBackend(host=self.host, port=self.port, secret=secret, training_host=training_host)
        return ShardedSender(backend, training_host, dtype=self.sent_dtype, chunk_bytes=self.chunk_mb * 2**20)

    def open_receiver(self, addresses: Sequence[str], secret: str) -> "WeightReceiver":
        """See [`WeightTransferConfig`][marin_rl.weights.config.WeightTransferConfig]."""
        from marin_rl.weights.arrow_flight import FlightSource
        from marin_rl.weights.fetch import WeightReceiver

        sources = [FlightSource(address, secret, streams=self.streams) for address in addresses]
        return WeightReceiver(sources, self.retry, cast=self.sent_dtype is not None)


@WeightTransferConfig.register_subclass("shared_files")
@dataclasses.dataclass(frozen=True)
class SharedFilesConfig(WeightTransferConfig):
    """Each training host writes its shards to a folder that all workers read."""

    folder: str = ""
    """Path or fsspec address, such as `gs://bucket/run/weights`, used by this run only. Required."""
    streams: int = 4
    """Concurrent reads for each training host; 1 to 64."""
    chunk_mb: int = 16
    """Mebibytes per read, each with its checksum; 1 to 64."""
    retry: RetryConfig = RetryConfig()
    """Retries of a worker when weights do not arrive."""

    def __post_init__(self) -> None:
        convert_enum_fields(self)
        if not self.folder:
            raise ValueError("weights.folder is empty; set the folder that learner and workers share")
        storage_path(self.folder, "weights.folder")
        _check_range("streams", self.streams, 1, 64)
        _check_range("chunk_mb", self.chunk_mb, 1, MAX_CHUNK_BYTES // 2**20)

    def open_sender(self, secret: str, training_host: "TrainingHost") -> "ShardedSender":
        """See [`WeightTransferConfig`][marin_rl.weights.config.WeightTransferConfig]."""
        from marin_rl.weights.publish import ShardedSender
        from marin_rl.weights.shared_files import FolderBackend

        backend = FolderBackend(folder=self.folder, secret=secret, training_host=training_host)
        return ShardedSender(backend, training_host, dtype=self.sent_dtype, chunk_bytes=self.chunk_mb * 2**20)

    def open_receiver(self, addresses: Sequence[str], secret: str) -> "WeightReceiver":
        """See [`WeightTransferConfig`][marin_rl.weights.config.WeightTransferConfig].

        All training hosts have the same address: the shared folder.
        """
        if len(set(addresses)) != 1:
            raise ValueError(f"all senders of this type must have the same address, got {sorted(set(addresses))}")
        from marin_rl.weights.fetch import WeightReceiver
        from marin_rl.weights.shared_files import FolderSource

        source = FolderSource(addresses[0], secret, streams=self.streams)
        return WeightReceiver([source], self.retry, cast=self.sent_dtype is not None)


def _check_range(field: str, value: int, minimum: int, maximum: int) -> None:
    if not minimum <= value <= maximum:
        raise ValueError(f"weights.{field} is {value}; it must be from {minimum} to {maximum}")
