# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""What can go wrong while weights travel, by what a worker does about it."""

from marin_rl.errors import UserError


class WeightTransferError(UserError):
    """Weights did not arrive; the message names the server or folder and the reason."""


class WrongTokenError(WeightTransferError):
    """The token is not the run's. Never retried: it will not become right."""


class MismatchedWeightsError(WeightTransferError):
    """What was published is not what the receiver's model needs: a name, shape, dtype or piece is wrong or missing.

    Never retried.
    """


class VersionGoneError(WeightTransferError):
    """The version that was asked for is not held any more, or not yet.

    A receiver that asked for the newest takes the one that is newest now.
    """


class NoWeightsError(WeightTransferError):
    """Nothing has been published yet that all servers hold."""


class CorruptTransferError(WeightTransferError):
    """Bytes are missing, too many, or not the ones that were published. Retried."""


class ServerLostError(WeightTransferError):
    """A server does not answer, or went away in mid-transfer. Retried."""
