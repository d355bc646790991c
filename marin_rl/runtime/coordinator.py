# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Hands orders to rollout workers and their groups to the trainer, and notices who does not answer any more.

All of it is bookkeeping in one place, without threads, clocks or messages of its own: it runs inside an actor, and in
tests that play every order of events. The trainer knows what it is owed, so nothing is lost with a coordinator: a new
one is told again.
"""

import bisect
import dataclasses
import itertools
import threading
import time
import uuid
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

from marin_rl.rollouts.scheduler import GroupRequest, RequestNumber
from marin_rl.types import WeightVersion


class Announcement(NamedTuple):
    """The newest weights."""

    version: WeightVersion
    """Steps of training behind them."""
    addresses: tuple[str, ...]
    """Where they are; empty where there are none yet."""

    def is_newer_than(self, version: WeightVersion | None) -> bool:
        """Whether there are newer weights to fetch than those of this version; None for none."""
        return bool(self.addresses) and (version is None or self.version > version)


class Assignment(NamedTuple):
    """What a worker is told when it asks."""

    orders: list[GroupRequest]
    """Groups to play; none where there is nothing that it may begin with its weights."""
    newest: Announcement
    """The newest weights."""
    stop: bool
    """Whether the run is over."""


class TrainerUpdate(NamedTuple):
    """What the trainer is told when it asks."""

    incarnation: str
    """Names this coordinator; another one knows nothing of what the former was told."""
    groups: list[tuple[RequestNumber, str]]
    """Groups that came, encoded; they come again until they are acknowledged."""
    failure: str | None
    """What ended a worker, where an error did."""
    workers: dict[str, int]
    """Who is there, and how many groups each has played."""
    counts: dict[str, int]
    """What happened so far."""
    seconds: dict[str, float]
    """How long workers were there so far, all of them together, and how long they had something to play."""


@dataclasses.dataclass
class _Worker:
    incarnation: str
    last_heard: float
    counted: float
    orders: set[RequestNumber] = dataclasses.field(default_factory=set)
    finished: int = 0


class Coordinator:
    """Who plays what."""

    def __init__(self, clock: Callable[[], float], *, silence: float) -> None:
        """Know nothing.

        Args:
            clock: seconds that go on.
            silence: seconds after which a worker that says nothing is given up and its orders go to others.
        """
        self.incarnation = uuid.uuid4().hex
        self._clock = clock
        self._silence = silence
        self._orders: dict[RequestNumber, GroupRequest] = {}
        self._waiting: list[RequestNumber] = []
        """Those of the orders that nobody plays, in order."""
        self._finished: dict[RequestNumber, str] = {}
        self._workers: dict[str, _Worker] = {}
        self._version: WeightVersion = 0
        self._addresses: tuple[str, ...] = ()
        self._stop = False
        self._failure: str | None = None
        self.counts = {"joined": 0, "lost": 0, "handed_again": 0, "late_groups": 0}
        """Workers that joined, and that were given up; orders that were taken from those; groups that nobody owed any
        more."""
        self._seconds = {"present": 0.0, "busy": 0.0}

    # The trainer's side.

    def submit(self, orders: Sequence[GroupRequest]) -> None:
        """Take orders; one that is known already is not taken twice."""
        for order in orders:
            if order.number not in self._finished and order.number not in self._orders:
                self._orders[order.number] = order
                bisect.insort(self._waiting, order.number)

    def announce(self, version: WeightVersion, addresses: Sequence[str]) -> None:
        """Say that all senders of these addresses offer these weights; what is older than the newest is no news.

        A coordinator that was started anew is told in two threads: what it missed in one, what is new in the other.
        """
        if version >= self._version:
            self._version, self._addresses = version, tuple(addresses)

    def take(self, acknowledged: Sequence[RequestNumber] = ()) -> TrainerUpdate:
        """Groups that have come.

        Args:
            acknowledged: what the trainer has of an earlier delivery, and does not need again.
        """
        for number in acknowledged:
            self._finished.pop(number, None)
        self.give_up_silent()
        self._count_seconds()
        return TrainerUpdate(
            self.incarnation,
            sorted(self._finished.items()),
            self._failure,
            self.workers,
            dict(self.counts),
            dict(self._seconds),
        )

    def stop(self) -> None:
        """Tell all workers, when they ask next, that the run is over."""
        self._stop = True

    # The workers' side.

    def join(self, worker: str, incarnation: str) -> None:
        """A worker begins. What its former self was to play goes to others.

        Args:
            worker: its name.
            incarnation: names this life of it.
        """
        known = self._workers.get(worker)
        if known is not None and known.incarnation == incarnation:
            # The answer was lost, and the call came again.
            return
        if known is not None:
            self._give_up(worker)
        self._workers[worker] = _Worker(incarnation, self._clock(), self._clock())
        self.counts["joined"] += 1

    def next_work(self, worker: str, incarnation: str, version: WeightVersion | None, room: int) -> Assignment | None:
        """What to play next: the oldest orders that weights of this version may begin.

        Args:
            worker: who asks.
            incarnation: which life of it.
            version: of the weights that it has; None for none.
            room: groups that it can begin.

        Returns:
            None where this worker is not known (any more): it joins anew, and forgets what it was to play.
        """
        known = self._heard(worker, incarnation)
        if known is None:
            return None
        self.give_up_silent()
        ready = (number for number in self._waiting if self._orders[number].min_version <= (version or 0))
        numbers = [] if version is None else list(itertools.islice(ready, room))
        self._count_seconds()
        for number in numbers:
            self._waiting.remove(number)
        known.orders |= set(numbers)
        return Assignment([self._orders[number] for number in numbers], self.announced, self._stop)

    def plays(self, worker: str, incarnation: str, numbers: Collection[RequestNumber]) -> None:
        """A worker says all that it plays. What it was handed besides never reached it, and goes to others."""
        known = self._heard(worker, incarnation)
        if known is None:
            return
        self._count_seconds()
        handed_again = {number for number in numbers if number in self._waiting}
        self._waiting = [number for number in self._waiting if number not in handed_again]
        for number in known.orders.difference(numbers):
            bisect.insort(self._waiting, number)
        known.orders = known.orders.intersection(numbers) | handed_again

    def finish(self, worker: str, incarnation: str, number: RequestNumber, group: str) -> bool:
        """A group is played. The first that comes for an order counts, whoever played it.

        Returns:
            Whether it was still owed.
        """
        known = self._heard(worker, incarnation)
        self._count_seconds()
        if known is not None:
            known.orders.discard(number)
            known.finished += 1
        if self._orders.pop(number, None) is None:
            self.counts["late_groups"] += 1
            return False
        if number in self._waiting:
            self._waiting.remove(number)
        for other in self._workers.values():
            other.orders.discard(number)
        self._finished[number] = group
        return True

    def beat(self, worker: str, incarnation: str) -> bool:
        """A worker is alive. False where it is not known (any more)."""
        return self._heard(worker, incarnation) is not None

    def fail(self, worker: str, error: str) -> None:
        """An error ends a worker. It is no accident of its machine, so the trainer is told."""
        self._failure = f"{worker}: {error}"

    def leave(self, worker: str, incarnation: str) -> None:
        """A worker ends in good order; what it has not played goes to others."""
        if self._heard(worker, incarnation) is not None:
            self._count_seconds()
            self._take_back(self._workers.pop(worker))

    @property
    def announced(self) -> Announcement:
        """The newest weights."""
        return Announcement(self._version, self._addresses)

    def give_up_silent(self) -> None:
        """Give up the workers that have not been heard of for too long."""
        now = self._clock()
        for name in [name for name, worker in self._workers.items() if now - worker.last_heard > self._silence]:
            self._give_up(name)

    @property
    def workers(self) -> dict[str, int]:
        """Who is there, and how many groups each has played."""
        return {name: worker.finished for name, worker in sorted(self._workers.items())}

    def _heard(self, worker: str, incarnation: str) -> _Worker | None:
        known = self._workers.get(worker)
        if known is None or known.incarnation != incarnation:
            return None
        known.last_heard = self._clock()
        return known

    def _count_seconds(self) -> None:
        now = self._clock()
        for worker in self._workers.values():
            self._seconds["present"] += now - worker.counted
            self._seconds["busy"] += now - worker.counted if worker.orders else 0.0
            worker.counted = now

    def _give_up(self, worker: str) -> None:
        self._count_seconds()
        lost = self._workers.pop(worker)
        self.counts["lost"] += 1
        self.counts["handed_again"] += len(lost.orders)
        self._take_back(lost)

    def _take_back(self, worker: _Worker) -> None:
        for number in worker.orders:
            bisect.insort(self._waiting, number)


class CoordinatorActor:
    """A coordinator that many threads may ask at once, and who has nothing to answer yet lets them wait."""

    def __init__(self, silence: float) -> None:
        """Open with a new coordinator.

        Args:
            silence: see [`Coordinator`][marin_rl.runtime.coordinator.Coordinator].
        """
        self._coordinator = Coordinator(time.monotonic, silence=silence)
        self._changed = threading.Condition()

    def submit(self, orders: Sequence[GroupRequest]) -> None:
        """See `Coordinator`."""
        with self._changed:
            self._coordinator.submit(orders)
            self._changed.notify_all()

    def announce(self, version: WeightVersion, addresses: Sequence[str]) -> None:
        """See `Coordinator`."""
        with self._changed:
            self._coordinator.announce(version, addresses)
            self._changed.notify_all()

    def take(self, acknowledged: Sequence[RequestNumber], seconds: float) -> TrainerUpdate:
        """See `Coordinator`; waits so long for something to come."""
        with self._changed:
            update = self._coordinator.take(acknowledged)
            if not update.groups and self._changed.wait(seconds):
                update = self._coordinator.take()
            return update

    def stop(self) -> None:
        """See `Coordinator`."""
        with self._changed:
            self._coordinator.stop()
            self._changed.notify_all()

    def join(self, worker: str, incarnation: str) -> None:
        """See `Coordinator`."""
        with self._changed:
            self._coordinator.join(worker, incarnation)
            self._changed.notify_all()

    def next_work(
        self,
        worker: str,
        incarnation: str,
        version: WeightVersion | None,
        room: int,
        playing: Collection[RequestNumber],
        seconds: float,
    ) -> Assignment | None:
        """See `Coordinator`; waits so long for orders, for newer weights or for the end.

        An answer may get lost on its way, and the question come again: so it says what the worker plays.
        """
        with self._changed:
            self._coordinator.plays(worker, incarnation, playing)
            work = self._coordinator.next_work(worker, incarnation, version, room)
            if work is not None and not (work.orders or work.stop or work.newest.is_newer_than(version)):
                self._changed.wait(seconds)
                work = self._coordinator.next_work(worker, incarnation, version, room)
            return work

    def finish(self, worker: str, incarnation: str, number: RequestNumber, group: str) -> bool:
        """See `Coordinator`."""
        with self._changed:
            owed = self._coordinator.finish(worker, incarnation, number, group)
            self._changed.notify_all()
            return owed

    def beat(self, worker: str, incarnation: str) -> bool:
        """See `Coordinator`."""
        with self._changed:
            return self._coordinator.beat(worker, incarnation)

    def announced(self) -> Announcement:
        """See `Coordinator`."""
        with self._changed:
            return self._coordinator.announced

    def fail(self, worker: str, error: str) -> None:
        """See `Coordinator`."""
        with self._changed:
            self._coordinator.fail(worker, error)
            self._changed.notify_all()

    def leave(self, worker: str, incarnation: str) -> None:
        """See `Coordinator`."""
        with self._changed:
            self._coordinator.leave(worker, incarnation)
            self._changed.notify_all()
