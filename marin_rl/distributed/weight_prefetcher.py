# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Background fetch of weights while a worker runs groups."""

import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

from levanter.models.lm_model import LmHeadModel

from marin_rl.types import WeightVersion
from marin_rl.weights.protocol import CorruptTransferError, NoWeightsError, ServerLostError, VersionGoneError

logger = logging.getLogger(__name__)

TRANSIENT_ERRORS = (ServerLostError, CorruptTransferError, NoWeightsError, VersionGoneError)
"""Errors that a retry may resolve. Until then a worker continues with its weights; the replay buffer drops groups that
become too old.
"""


class Weights(NamedTuple):
    """Received weights."""

    model: LmHeadModel
    """The policy."""
    version: WeightVersion
    """Number of training steps."""


class WeightPrefetcher:
    """Fetches newer weights in a background thread, so that sampling continues during the transfer.

    At most one fetch is pending and its result is kept until the next poll, so there is at most one copy of the weights
    in addition to the one in use.
    """

    def __init__(self, fetch: Callable[[WeightVersion | None], Weights | None]) -> None:
        """Start without a fetch.

        Args:
            fetch: Returns newer weights than the given version, or None.
        """
        self._fetch = fetch
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="newer-weights")
        self._pending: Future[Weights | None] | None = None

    def poll(self, version: WeightVersion | None) -> Weights | None:
        """Return the result of the last fetch if it is done, and start the next one. Does not block.

        Args:
            version: Version of the weights in use.

        Returns:
            Newer weights; None if none arrived and the next poll retries.

        Raises:
            Exception: An error that a retry cannot resolve.
        """
        if self._pending is not None and not self._pending.done():
            return None
        received = self.complete()
        self._pending = self._thread.submit(self._fetch, version if received is None else received.version)
        return received

    def complete(self) -> Weights | None:
        """Wait for the pending fetch, if any, and return its result as `poll` does."""
        pending, self._pending = self._pending, None
        if pending is None:
            return None
        try:
            return pending.result()
        except TRANSIENT_ERRORS as error:
            logger.warning("newer weights did not arrive (%s); continuing with the current weights and retrying", error)
            return None

    def close(self) -> None:
        """Wait for the pending fetch, ignore its result, and end the thread."""
        self._thread.shutdown()
