# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""One training host's sender, where the others' count too."""

from marin_rl.retry import Clock
from marin_rl.types import WeightVersion
from marin_rl.weights.errors import WeightTransferError
from marin_rl.weights.protocol import WeightReceiver, WeightSender

POLL = 0.05
"""Seconds between two questions to the other hosts."""


class MultiHostSender:
    """Publishes a host's own shards; they are visible when all hosts' are. See `WeightSender`."""

    def __init__(
        self, own: WeightSender, all_senders: WeightReceiver, *, patience: float, clock: Clock | None = None
    ) -> None:
        """Publish nothing yet.

        Args:
            own: this host's sender.
            all_senders: reads from every host's sender.
            patience: seconds that other hosts may be behind this one.
            clock: time, as tests replace it; None for the real one.
        """
        self._own = own
        self._all = all_senders
        self._patience = patience
        self._clock = clock or Clock()
        self._last: WeightVersion | None = None

    @property
    def address(self) -> str:
        """This host's own."""
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
        """Wait until all hosts' shards of what this one published are visible.

        Raises:
            WeightTransferError: if another host stays behind.
        """
        self._own.flush()
        began = self._clock.now()
        while self._last is not None and ((newest := self.published) is None or newest < self._last):
            if self._clock.now() - began > self._patience:
                raise WeightTransferError(
                    f"weights of version {self._last} are on this training host, but after {self._patience:g} s not on "
                    "all others; their logs say what holds them up"
                )
            self._clock.sleep(POLL)

    def close(self) -> None:
        """See [`WeightSender`][marin_rl.weights.protocol.WeightSender]."""
        self._all.close()
        self._own.close()
