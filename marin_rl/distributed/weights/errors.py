# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Errors of a weight transfer."""

from marin_rl.utils.errors import UserError


class WeightTransferError(UserError):
    """Raised when weights do not arrive; the message names the server and the reason."""


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
