# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""What a user says about the way from the learner's weights to the workers."""

import abc
import dataclasses
import enum
import ipaddress
import math
from collections.abc import Sequence

import draccus
import fsspec

from marin_rl.enum_fields import convert_enum_fields
from marin_rl.retry import RetryConfig
from marin_rl.weights.arrow_flight import FlightOutlet
from marin_rl.weights.arrow_flight_client import FlightSource
from marin_rl.weights.manifest import MAX_CHUNK_BYTES
from marin_rl.weights.protocol import WeightReceiver, WeightSender
from marin_rl.weights.sharded_receiver import ShardedReceiver
from marin_rl.weights.sharded_sender import ShardedSender
from marin_rl.weights.shared_files import FolderOutlet, FolderSource
from marin_rl.weights.snapshot import TrainingHost


class TransferDtype(enum.StrEnum):
    """What floating-point weights travel as."""

    PARAMETER = "parameter"
    """As the learner holds them; a receiver that needs another dtype is refused."""
    BFLOAT16 = "bfloat16"
    """Rounded to bfloat16 before they leave the devices: half the bytes of float32. They arrive in the receiver's
    own floating-point dtype."""


@dataclasses.dataclass(frozen=True)
class WeightTransferConfig(draccus.ChoiceRegistry, abc.ABC):
    """Chooses a way by `type`."""

    dtype: TransferDtype = TransferDtype.PARAMETER
    """What floating-point weights travel as: `parameter` (as the learner holds them) or `bfloat16`."""

    @abc.abstractmethod
    def open_sender(self, token: str, training_host: TrainingHost) -> WeightSender:
        """Make the end that publishes.

        Args:
            token: the run's secret, from `make_secret()`; the same on all training hosts.
            training_host: which one this is.
        """

    @abc.abstractmethod
    def open_receiver(self, addresses: Sequence[str], token: str) -> WeightReceiver:
        """Make the end that receives.

        Args:
            addresses: the address of every training host's sender, in any order.
            token: the run's secret.
        """

    @property
    def sent_dtype(self) -> str | None:
        """What floating-point arrays are cast to; None leaves them as they are."""
        return None if self.dtype is TransferDtype.PARAMETER else self.dtype.value

    @property
    def casts(self) -> bool:
        """Whether weights may arrive in another dtype than they travel in."""
        return self.sent_dtype is not None


@WeightTransferConfig.register_subclass("arrow_flight")
@dataclasses.dataclass(frozen=True)
class ArrowFlightConfig(WeightTransferConfig):
    """Each training host serves its own shards over Arrow Flight; workers fetch what their devices need.

    Transfers are encrypted with TLS. Both ends authenticate with certificates derived from the run's token.
    """

    host: str = "127.0.0.1"
    """Name or address that the server binds, so that nobody beyond it can connect. `0.0.0.0` binds every interface and
    tells workers the machine's own name. Workers or training hosts on other machines need an address that they can
    reach; the default is refused for them."""
    port: int = 0
    """Port that the server binds, 0 to 65535; 0 takes any free one."""
    streams: int = 4
    """Streams that a worker reads from each server at the same time; 1 to 64."""
    chunk_mb: int = 4
    """Mebibytes of one message, which has a checksum of its own; 1 to 64."""
    keep: int = 2
    """Newest versions held in each training host's memory, so that transfers of the one before can end; at least 1."""
    call_seconds: float = 600.0
    """Seconds after which a stream counts as lost; above 0."""
    retry: RetryConfig = RetryConfig()
    """How long a worker goes on when weights do not arrive."""

    def __post_init__(self) -> None:
        convert_enum_fields(self)
        if not self.host:
            raise ValueError("weights.host is empty; name the address to bind, such as 127.0.0.1")
        _check_range("port", self.port, 0, 65535)
        _check_range("streams", self.streams, 1, 64)
        _check_chunk(self.chunk_mb)
        _check_range("keep", self.keep, 1, None)
        if not (self.call_seconds > 0 and math.isfinite(self.call_seconds)):
            raise ValueError(f"weights.call_seconds is {self.call_seconds}; it is a number of seconds above 0")

    def open_sender(self, token: str, training_host: TrainingHost) -> ShardedSender:
        """See [`WeightTransferConfig`][marin_rl.weights.config.WeightTransferConfig]."""
        backend = FlightOutlet(host=self.host, port=self.port, token=token, training_host=training_host, keep=self.keep)
        return ShardedSender(backend, training_host, dtype=self.sent_dtype, chunk_bytes=self.chunk_mb * 2**20)

    def open_receiver(self, addresses: Sequence[str], token: str) -> ShardedReceiver:
        """See [`WeightTransferConfig`][marin_rl.weights.config.WeightTransferConfig]."""
        sources = [
            FlightSource(address, token, streams=self.streams, call_seconds=self.call_seconds) for address in addresses
        ]
        return ShardedReceiver(sources, self.retry, cast=self.casts)


@WeightTransferConfig.register_subclass("shared_files")
@dataclasses.dataclass(frozen=True)
class SharedFilesConfig(WeightTransferConfig):
    """Each training host writes its own shards into a folder that all workers read."""

    folder: str = ""
    """Path, or address that fsspec knows, such as `gs://bucket/run/weights`; for this run alone. Must be given."""
    streams: int = 4
    """Reads at the same time for each training host; 1 to 64."""
    chunk_mb: int = 16
    """Mebibytes of one read, which has a checksum of its own; 1 to 64."""
    keep: int = 2
    """Newest versions that stay in the folder; at least 1."""
    retry: RetryConfig = RetryConfig()
    """How long a worker goes on when weights do not arrive."""

    def __post_init__(self) -> None:
        convert_enum_fields(self)
        if not self.folder:
            raise ValueError("weights.folder is empty; name the folder that learner and workers share")
        try:
            fsspec.get_filesystem_class(fsspec.core.split_protocol(self.folder)[0])
        except (ValueError, ImportError) as error:
            raise ValueError(
                f"weights.folder is {self.folder!r}, whose kind of address cannot be used here: {error}"
            ) from error
        _check_range("streams", self.streams, 1, 64)
        _check_chunk(self.chunk_mb)
        _check_range("keep", self.keep, 1, None)

    def open_sender(self, token: str, training_host: TrainingHost) -> ShardedSender:
        """See [`WeightTransferConfig`][marin_rl.weights.config.WeightTransferConfig]."""
        backend = FolderOutlet(folder=self.folder, token=token, training_host=training_host, keep=self.keep)
        return ShardedSender(backend, training_host, dtype=self.sent_dtype, chunk_bytes=self.chunk_mb * 2**20)

    def open_receiver(self, addresses: Sequence[str], token: str) -> ShardedReceiver:
        """See [`WeightTransferConfig`][marin_rl.weights.config.WeightTransferConfig].

        All training hosts have the same address, their folder.
        """
        source = FolderSource(one_address(addresses), token, streams=self.streams)
        return ShardedReceiver([source], self.retry, cast=self.casts)


def is_loopback(host: str) -> bool:
    """Whether a name or address can be reached from its own machine alone.

    >>> is_loopback("127.0.0.1"), is_loopback("localhost"), is_loopback("[::1]"), is_loopback("10.0.0.1")
    (True, True, True, False)
    """
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def one_address(addresses: Sequence[str]) -> str:
    """The address that all senders have.

    Raises:
        ValueError: if there is none, or they differ.
    """
    if len(set(addresses)) != 1:
        raise ValueError(f"all senders of this type have the same address, but these are {sorted(set(addresses))}")
    return addresses[0]


def _check_range(field: str, value: int, least: int, most: int | None) -> None:
    if value < least or (most is not None and value > most):
        bound = f"at least {least}" if most is None else f"from {least} to {most}"
        raise ValueError(f"weights.{field} is {value}; it must be {bound}")


def _check_chunk(chunk_mb: int) -> None:
    _check_range("chunk_mb", chunk_mb, 1, MAX_CHUNK_BYTES // 2**20)
