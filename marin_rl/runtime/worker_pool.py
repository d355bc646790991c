# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""The trainer's view of rollout workers: orders go out through a coordinator, groups come back."""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, runtime_checkable

from marin_rl.background_job import BackgroundJob
from marin_rl.errors import UserError
from marin_rl.rollouts.group_codec import decode_group
from marin_rl.rollouts.scheduler import GroupRequest, RequestNumber
from marin_rl.runtime.coordinator import TrainerUpdate
from marin_rl.runtime.rollout_source import FinishedGroup, raise_if
from marin_rl.timing import PhaseTimer
from marin_rl.types import WeightVersion
from marin_rl.weights.protocol import WeightSender

logger = logging.getLogger(__name__)


class WorkerFailedError(UserError):
    """An error of the run's own ended a rollout worker; it would end the next one too."""


class NoWorkersError(UserError):
    """Nothing came from any worker for too long; says what was owed."""


@runtime_checkable
class TrainerDesk(Protocol):
    """What a trainer asks of a coordinator; calls may be repeated without harm."""

    def submit(self, orders: Sequence[GroupRequest]) -> None:
        """Take orders."""
        ...

    def announce(self, version: WeightVersion, addresses: Sequence[str]) -> None:
        """Say where the newest weights are."""
        ...

    def take(self, acknowledged: Sequence[RequestNumber], seconds: float) -> TrainerUpdate:
        """Groups that have come; waits so long for the first."""
        ...


class WorkerPool:
    """Rollout workers in other processes. It remembers what is owed, and tells a new coordinator all of it."""

    def __init__(
        self,
        desk: TrainerDesk,
        sender: WeightSender,
        *,
        patience: float,
        poll: float = 1.0,
        addresses: Sequence[str] | None = None,
        counts: Mapping[str, int] | None = None,
    ) -> None:
        """Owe nothing.

        Args:
            desk: the coordinator.
            sender: offers the weights; what it has flushed is there at all addresses.
            patience: seconds without a single group after which to give up.
            poll: seconds that one question may wait for its answer.
            addresses: of the senders of all training hosts; None for this sender alone.
            counts: what was counted before the run was taken up again.
        """
        self._desk = desk
        self._sender = sender
        self._addresses = (sender.address,) if addresses is None else tuple(addresses)
        self._patience = patience
        self._poll = poll
        self._owed: dict[RequestNumber, GroupRequest] = {}
        self._received: list[RequestNumber] = []
        self._announced: tuple[WeightVersion, tuple[str, ...]] | None = None
        self._announcing = BackgroundJob("announce")
        self._incarnation: str | None = None
        self.workers: dict[str, int] = {}
        """Who was there when the last groups came, and how many groups each had played."""
        self.counts = dict(counts or {})
        """What the coordinators of the run have counted until then; see `Coordinator.counts`."""
        self._counts_before = self.counts
        self._seconds = {"present": 0.0, "busy": 0.0}
        self._seconds_before = self._seconds

    def publish(self, model: object, version: WeightVersion) -> None:
        """Offer the weights, and tell the workers as soon as they can have them; see `RolloutSource`."""
        self._announcing.flush()
        self._sender.publish(model, version)
        self._announcing.start(self._announce, version)

    def _announce(self, version: WeightVersion) -> None:
        self._sender.flush()
        self._announced = (version, self._addresses)
        self._desk.announce(*self._announced)

    def metrics(self) -> dict[str, float]:
        """How many workers there are, and what became of them; see `RolloutSource`."""
        present, busy = (self._seconds[name] - self._seconds_before[name] for name in ("present", "busy"))
        self._seconds_before = self._seconds
        counts = {f"workers/{name}": float(count) for name, count in self.counts.items()}
        return {
            "workers/alive": float(len(self.workers)),
            "workers/busy_share": busy / present if present else 0.0,
            **counts,
        }

    def close(self) -> None:
        """Wait for what is under way."""
        self._announcing.close()

    def submit(self, orders: Sequence[GroupRequest]) -> None:
        """See [`RolloutSource`][marin_rl.runtime.rollout_source.RolloutSource]."""
        if orders:
            self._owed |= {order.number: order for order in orders}
            self._desk.submit(orders)

    def wait(self, timer: PhaseTimer, stop_requested: Callable[[], bool] = lambda: False) -> list[FinishedGroup]:
        """See [`RolloutSource`][marin_rl.runtime.rollout_source.RolloutSource].

        Raises:
            StopRequestedError: if a stop is requested.
            WorkerFailedError: if an error ended a worker.
            NoWorkersError: if no group came in all the time of the patience.
        """
        deadline = self.deadline()
        raise_if(stop_requested)
        while not (came := self.ask(deadline)):
            raise_if(stop_requested)
        return [FinishedGroup(number, decode_group(text)) for number, text in came]

    def deadline(self) -> float:
        """When the patience of who begins to wait now will be over."""
        return time.monotonic() + self._patience

    def ask(self, deadline: float) -> list[tuple[RequestNumber, str]]:
        """Groups that are owed and have come, encoded; waits for one question's time, and then there may be none.

        Args:
            deadline: when the patience is over.

        Raises:
            WorkerFailedError: if an error ended a worker.
            NoWorkersError: if the patience is over.
        """
        if time.monotonic() > deadline:
            owed = ", ".join(number.group_id for number in sorted(self._owed)[:5])
            raise NoWorkersError(
                f"no group came from any rollout worker in {self._patience:g} s (workers.no_progress_timeout); "
                f"{len(self._owed)} are owed ({owed}, ...), and there are {len(self.workers)} workers. Their logs say "
                "what holds them up; run the same command again to go on from the last checkpoint"
            )
        self._announcing.raise_if_failed()
        update = self._desk.take(self._received, self._poll)
        self._received = [number for number, _ in update.groups]
        self._note(update)
        came = [(number, text) for number, text in update.groups if self._owed.pop(number, None)]
        if not came and update.failure is not None:
            raise WorkerFailedError(
                f"a rollout worker ended with an error: {update.failure}. The workers' logs in the run directory "
                "have the traceback"
            )
        return came

    def _note(self, update: TrainerUpdate) -> None:
        if self._incarnation != update.incarnation:
            if self._incarnation is not None:
                logger.warning(
                    "the coordinator was started anew; it is told of %d groups that are owed", len(self._owed)
                )
                self._counts_before = self.counts
                self._seconds_before = {"present": 0.0, "busy": 0.0}
            # The first one that answers is told too: it need not be the one that was told before.
            if self._announced is not None:
                self._desk.announce(*self._announced)
            self._desk.submit([self._owed[number] for number in sorted(self._owed)])
        self._incarnation = update.incarnation
        self.workers = update.workers
        self._seconds = update.seconds
        before = self._counts_before
        self.counts = {name: count + before.get(name, 0) for name, count in update.counts.items()}
