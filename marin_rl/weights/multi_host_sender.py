# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Sender for one of several training hosts."""

from marin_rl.retry import Clock
from marin_rl.types import WeightVersion
from marin_rl.weights.errors import WeightTransferError
from marin_rl.weights.protocol import WeightReceiver, WeightSender

POLL = 0.05
"""Seconds between two polls of the other hosts."""


class MultiHostSender:
    """Publishes the shards of this host; a version is published when all hosts have it. See `WeightSender`."""

    def __init__(
        self, own: WeightSender, all_senders: WeightReceiver, *, timeout: float, clock: Clock | None = None
    ) -> None:
        """Set up the sender without publishing.

        Args:
            own: Sender of this host.
            all_senders: Receiver that reads from the senders of all hosts.
            timeout: Seconds that `flush` waits for the other hosts.
            clock: Clock for tests; None for the real one.
        """
        self._own = own
        self._all = all_senders
        self._timeout = timeout
        self._clock = clock or Clock()
        self._last: WeightVersion | None = None

    @property
    def address(self) -> str:
        """Address of this host's sender."""
        return self._own.address

    @property
    def published(self) -> WeightVersion | None:
        """See [`WeightSender`][marin_rl.weights.protocol.WeightSender]."""
        return self._all.newest()

    def publish(self, weights: object, version: WeightVersion) -> None:
        """See [`WeightSender`][marin_rl.weights.protocol.WeightSender]."""
        self._own.publish(weights, version)
        self._last = version

    def flush(self) -> None:
        """Wait until all hosts have published the last version of this host.

        Raises:
            WeightTransferError: If another host does not publish it within the timeout.
        """
        self._own.flush()
        began = self._clock.now()
        while self._last is not None and ((newest := self.published) is None or newest < self._last):
            if self._clock.now() - began > self._timeout:
                raise WeightTransferError(
                    f"version {self._last} of the weights is published by this training host, but after "
                    f"{self._timeout:g} s not by all others; see their logs"
                )
            self._clock.sleep(POLL)

    def close(self) -> None:
        """See [`WeightSender`][marin_rl.weights.protocol.WeightSender]."""
        self._all.close()
        self._own.close()
