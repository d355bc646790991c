# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Sender protocol and errors of a weight transfer.

The learner publishes and workers receive. Publication of a version is atomic, and a receiver returns arrays of one
version only. Only arrays are transferred; the receiver supplies all other leaves of a tree.
"""

from typing import Protocol, runtime_checkable

from marin_rl.errors import UserError
from marin_rl.types import WeightVersion

KEPT_VERSIONS = 2
"""Newest versions that a sender keeps, so that transfers of the previous version can finish."""


class WeightTransferError(UserError):
    """Raised when weights do not arrive; the message names the server or folder and the reason."""


class WrongSecretError(WeightTransferError):
    """Raised when the server has a different secret. Never retried."""


class MismatchedWeightsError(WeightTransferError):
    """Raised when published weights do not fit the receiver's model: a wrong or missing name, shape, dtype or piece.

    Never retried.
    """


class VersionGoneError(WeightTransferError):
    """Raised when the requested version is no longer available, or not yet.

    A receiver that requested the newest version retries with the current newest version.
    """


class NoWeightsError(WeightTransferError):
    """Raised when no version is available on all servers yet."""


class CorruptTransferError(WeightTransferError):
    """Raised for missing, surplus or corrupt bytes. Retried."""


class ServerLostError(WeightTransferError):
    """Raised when a server does not respond or disconnects during a transfer. Retried."""


@runtime_checkable
class WeightSender(Protocol):
    """Publishes weights; one per training host."""

    @property
    def address(self) -> str:
        """Address to pass to `open_receiver`."""
        ...

    def publish(self, weights: object, version: WeightVersion) -> None:
        """Publish weights in the background. Returns when the learner may donate or overwrite its arrays.

        The version becomes available when the copy to the host is complete; until then the devices hold a second copy
        of the weights. A call waits for the previous publication. With several training hosts, all of them call
        `publish` in the same order.

        Args:
            weights: tree of arrays, such as a model.
            version: number of training steps; greater than every earlier version.

        Raises:
            ValueError: if the version does not increase, or a leaf has a dtype that cannot be transferred.
            Exception: an error in the background since the last call.
        """
        ...

    def flush(self) -> None:
        """Wait until the last published version is available.

        Raises:
            Exception: an error in the background.
        """
        ...

    def close(self) -> None:
        """Wait for the pending publication, stop serving, and release threads, ports and files."""
        ...
