# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Configuration of the weight transfer from learner to workers."""

import dataclasses
import enum

from marin_rl.utils.retry import RetryConfig
from marin_rl.utils.settings.fields import convert_enum_fields


class TransferDtype(enum.StrEnum):
    """Dtype of floating-point weights during the transfer."""

    PARAMETER = "parameter"
    """The learner's parameter dtype. A receiver with another dtype is rejected."""
    BFLOAT16 = "bfloat16"
    """Round to bfloat16 on the devices, which halves the bytes of float32. The receiver casts to its floating-point
    dtype."""


@dataclasses.dataclass(frozen=True)
class WeightTransferConfig:
    """Weight transfer: each training host serves its own shards over Arrow Flight; workers fetch what they need.

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
    dtype: TransferDtype = TransferDtype.PARAMETER
    """Dtype of floating-point weights during the transfer: `parameter` (the learner's) or `bfloat16`."""
    retry: RetryConfig = RetryConfig()
    """Retries of a worker when weights do not arrive."""

    def __post_init__(self) -> None:
        convert_enum_fields(self)
        if not self.host:
            raise ValueError("weights.host is empty; set the address to bind, such as 127.0.0.1")
        for field, value, minimum, maximum in (("port", self.port, 0, 65535), ("streams", self.streams, 1, 64)):
            if not minimum <= value <= maximum:
                raise ValueError(f"weights.{field} is {value}; it must be from {minimum} to {maximum}")

    @property
    def sent_dtype(self) -> str | None:
        """Dtype that floating-point arrays are cast to; None for no cast."""
        return None if self.dtype is TransferDtype.PARAMETER else self.dtype.value
