# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Weights that travel to a worker while it plays."""

import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

from levanter.models.lm_model import LmHeadModel

from marin_rl.types import WeightVersion
from marin_rl.weights.errors import CorruptTransferError, NoWeightsError, ServerLostError, VersionGoneError

logger = logging.getLogger(__name__)

PASSING = (ServerLostError, CorruptTransferError, NoWeightsError, VersionGoneError)
"""Errors that another attempt may mend. Until then a worker plays on with the weights that it has: what grows too old
is dropped by the replay buffer."""


class Weights(NamedTuple):
    """Weights that came."""

    model: LmHeadModel
    """The policy."""
    version: WeightVersion
    """Steps of training behind it."""


class WeightPrefetcher:
    """Asks for newer weights in a thread of its own, so that sampling goes on while they travel.

    There is one question at a time, and what came is held until somebody looks: at most one copy of the weights lies
    beside the one in use.
    """

    def __init__(self, fetch: Callable[[WeightVersion | None], Weights | None]) -> None:
        """Ask nothing yet.

        Args:
            fetch: gives newer weights than those of this version; None where there are none.
        """
        self._fetch = fetch
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="newer-weights")
        self._under_way: Future[Weights | None] | None = None

    def look(self, version: WeightVersion | None) -> Weights | None:
        """What the last question has brought, if its answer is there; asks the next one. Waits for nothing.

        Args:
            version: of the weights in use.

        Returns:
            Newer weights; None where none have come, or they did not arrive: the next look asks again.

        Raises:
            Exception: what no further attempt can mend.
        """
        if self._under_way is not None and not self._under_way.done():
            return None
        came = self.complete()
        self._under_way = self._thread.submit(self._fetch, version if came is None else came.version)
        return came

    def complete(self) -> Weights | None:
        """Wait for the question that is under way, if any; what it brought, as `look` gives it."""
        under_way, self._under_way = self._under_way, None
        if under_way is None:
            return None
        try:
            return under_way.result()
        except PASSING as error:
            logger.warning("newer weights did not arrive (%s); playing on, and asking again", error)
            return None

    def close(self) -> None:
        """Wait for what is under way, whatever comes of it, and end the thread."""
        self._thread.shutdown()
