# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Coordinator: assigns group requests to rollout workers and returns finished groups to the trainer."""

import asyncio
import bisect
import contextlib
import dataclasses
import itertools
import time
import uuid
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

from marin_rl.distributed.scheduler import GroupRequest, RequestNumber
from marin_rl.types import WeightVersion

KEPT_SENDERS = 10_000
"""Number of groups whose senders are kept. A late copy of an older group reaches the trainer, which ignores it."""


class Announcement(NamedTuple):
    """The newest weights."""

    version: WeightVersion
    """Steps of training behind them."""
    addresses: tuple[str, ...]
    """Sender addresses; empty before the first publication."""

    def is_newer_than(self, version: WeightVersion | None) -> bool:
        """Return whether these weights are newer than `version` (None for no weights)."""
        return bool(self.addresses) and (version is None or self.version > version)


class Assignment(NamedTuple):
    """Response to a worker that requests work."""

    requests: list[GroupRequest]
    """Groups to run; empty if no waiting request accepts the weights of the worker."""
    newest: Announcement
    """The newest weights."""
    stop: bool
    """Whether the worker must stop."""


class TrainerUpdate(NamedTuple):
    """Response to a trainer that polls for finished groups."""

    incarnation: str
    """Random id of this coordinator; a restarted coordinator has a new id and no state."""
    groups: list[tuple[RequestNumber, bytes]]
    """Finished groups, encoded; each is returned until it is acknowledged."""
    failure: str | None
    """Error that ended a worker, if any."""
    workers: dict[str, int]
    """Number of finished groups by worker."""
    counts: dict[str, int]
    """Numbers of workers that `joined`, of workers that were `lost` (dropped), of requests `handed_again` (reassigned
    from dropped workers), and of `late_groups` (that arrived after another copy)."""
    seconds: dict[str, float]
    """Worker-seconds so far: `present` in total, `busy` with at least one group."""


@dataclasses.dataclass
class _Worker:
    incarnation: str
    last_call: float
    counted: float
    requests: set[RequestNumber] = dataclasses.field(default_factory=set)
    finished: int = 0


class Coordinator:
    """Assigns group requests to rollout workers.

    Runs as an asyncio actor under Ray: all calls run in one event loop, so they need no locks. A response may be lost
    and the call repeated, so all calls are idempotent. The trainer keeps all pending requests and submits them again
    when a coordinator is restarted.
    """

    def __init__(self, heartbeat_timeout: float, clock: Callable[[], float] = time.monotonic) -> None:
        """Start without requests and workers.

        Args:
            heartbeat_timeout: seconds without a call after which a worker is dropped and its requests are reassigned.
            clock: monotonic time in seconds.
        """
        self.incarnation = uuid.uuid4().hex
        self._clock = clock
        self._heartbeat_timeout = heartbeat_timeout
        self._requests: dict[RequestNumber, GroupRequest] = {}
        self._waiting: list[RequestNumber] = []
        """Unassigned requests, sorted."""
        self._finished: dict[RequestNumber, bytes] = {}
        self._senders: dict[RequestNumber, list[str]] = {}
        """Incarnations of workers that returned each of the last groups; the group of the first one counts."""
        self._workers: dict[str, _Worker] = {}
        self._announced = Announcement(0, ())
        self._stop = False
        self._failure: str | None = None
        self._counts = {"joined": 0, "lost": 0, "handed_again": 0, "late_groups": 0}
        self._seconds = {"present": 0.0, "busy": 0.0}
        self._changed = asyncio.Event()

    # Methods for the trainer.

    def submit(self, requests: Sequence[GroupRequest]) -> None:
        """Add requests; duplicates, and requests whose group has arrived, are ignored."""
        for request in requests:
            if request.number not in self._senders and request.number not in self._requests:
                self._requests[request.number] = request
                bisect.insort(self._waiting, request.number)
        self._notify()

    def announce(self, version: WeightVersion, addresses: Sequence[str]) -> None:
        """Announce that weights are available at all addresses; older versions are ignored.

        Announcements may arrive out of order: after a restart of the coordinator, one thread of the trainer repeats the
        last announcement while another may send the next.
        """
        if version >= self._announced.version:
            self._announced = Announcement(version, tuple(addresses))
            self._notify()

    async def take(self, acknowledged: Sequence[RequestNumber] = (), seconds: float = 0.0) -> TrainerUpdate:
        """Return the finished groups; wait up to `seconds` for a change if there are none.

        The trainer has received the `acknowledged` groups, which are removed.
        """
        for number in acknowledged:
            self._finished.pop(number, None)
        for number in list(itertools.islice(self._senders, max(len(self._senders) - KEPT_SENDERS, 0))):
            if number not in self._finished:
                del self._senders[number]
        if not self._finished:
            await self._change(seconds)
        self._drop_silent_workers()
        self._count_seconds()
        return TrainerUpdate(
            self.incarnation,
            sorted(self._finished.items()),
            self._failure,
            {name: worker.finished for name, worker in sorted(self._workers.items())},
            dict(self._counts),
            dict(self._seconds),
        )

    def stop(self) -> None:
        """Stop all workers at their next request for work."""
        self._stop = True
        self._notify()

    # Methods for workers. Each start of a worker has a random id, its incarnation.

    def join(self, worker: str, incarnation: str) -> None:
        """Register a worker. The requests of its previous incarnation are reassigned."""
        record = self._workers.get(worker)
        if record is not None and record.incarnation == incarnation:
            # The response was lost and the call was repeated.
            return
        if record is not None:
            self._drop(worker)
        self._workers[worker] = _Worker(incarnation, self._clock(), self._clock())
        self._counts["joined"] += 1
        self._notify()

    async def next_assignment(
        self,
        worker: str,
        incarnation: str,
        version: WeightVersion | None,
        room: int,
        running: Collection[RequestNumber],
        seconds: float = 0.0,
    ) -> Assignment | None:
        """Assign the oldest waiting requests that accept weights of this version.

        Args:
            worker: name of the worker.
            incarnation: random id of this start of the worker.
            version: version of its weights; None for no weights.
            room: maximum number of requests to assign.
            running: requests that the worker runs. Its other assignments were lost in transit and are reassigned.
            seconds: time to wait for a change if there are no such requests, no newer weights and no stop.

        Returns:
            The assignment; None if this incarnation is not registered and must join again without its requests.
        """
        record = self._register_call(worker, incarnation)
        if record is None:
            return None
        self._set_running(record, running)
        assignment = self._assign(record, version, room)
        if assignment.requests or assignment.stop or assignment.newest.is_newer_than(version):
            return assignment
        await self._change(seconds)
        record = self._register_call(worker, incarnation)
        return None if record is None else self._assign(record, version, room)

    def finish(self, worker: str, incarnation: str, number: RequestNumber, group: bytes) -> bool:
        """Accept a finished group; return whether it counts. The first result of a request counts, from any worker.

        A group may arrive before its request: the trainer submits its requests again only after it has noticed that the
        coordinator was restarted.
        """
        record = self._register_call(worker, incarnation)
        senders = self._senders.setdefault(number, [])
        if incarnation in senders:
            # The response was lost and the call was repeated.
            return senders[0] == incarnation
        senders.append(incarnation)
        self._count_seconds()
        if record is not None:
            record.requests.discard(number)
            record.finished += 1
        if len(senders) > 1:
            self._counts["late_groups"] += 1
            return False
        self._requests.pop(number, None)
        if number in self._waiting:
            self._waiting.remove(number)
        for other in self._workers.values():
            other.requests.discard(number)
        self._finished[number] = group
        self._notify()
        return True

    def heartbeat(self, worker: str, incarnation: str) -> bool:
        """Keep a worker registered. Return False if this incarnation is not registered."""
        return self._register_call(worker, incarnation) is not None

    def announced(self) -> Announcement:
        """Return the newest weights."""
        return self._announced

    def fail(self, worker: str, error: str) -> None:
        """Report an error that ended a worker to the trainer."""
        self._failure = f"{worker}: {error}"
        self._notify()

    def leave(self, worker: str, incarnation: str) -> None:
        """Unregister a worker and reassign its unfinished requests."""
        if self._register_call(worker, incarnation) is not None:
            self._count_seconds()
            self._reassign(self._workers.pop(worker).requests)

    def _register_call(self, worker: str, incarnation: str) -> _Worker | None:
        record = self._workers.get(worker)
        if record is None or record.incarnation != incarnation:
            return None
        record.last_call = self._clock()
        return record

    def _set_running(self, record: _Worker, running: Collection[RequestNumber]) -> None:
        self._count_seconds()
        taken = {number for number in running if number in self._waiting}
        self._waiting = [number for number in self._waiting if number not in taken]
        self._reassign(record.requests.difference(running))
        record.requests = record.requests.intersection(running) | taken

    def _assign(self, record: _Worker, version: WeightVersion | None, room: int) -> Assignment:
        self._drop_silent_workers()
        ready = (number for number in self._waiting if self._requests[number].min_version <= (version or 0))
        numbers = [] if version is None else list(itertools.islice(ready, room))
        self._count_seconds()
        for number in numbers:
            self._waiting.remove(number)
        record.requests |= set(numbers)
        return Assignment([self._requests[number] for number in numbers], self._announced, self._stop)

    def _count_seconds(self) -> None:
        now = self._clock()
        for worker in self._workers.values():
            self._seconds["present"] += now - worker.counted
            self._seconds["busy"] += now - worker.counted if worker.requests else 0.0
            worker.counted = now

    def _drop_silent_workers(self) -> None:
        now = self._clock()
        for name, worker in list(self._workers.items()):
            if now - worker.last_call > self._heartbeat_timeout:
                self._drop(name)

    def _drop(self, worker: str) -> None:
        self._count_seconds()
        dropped = self._workers.pop(worker)
        self._counts["lost"] += 1
        self._counts["handed_again"] += len(dropped.requests)
        self._reassign(dropped.requests)

    def _reassign(self, numbers: Collection[RequestNumber]) -> None:
        for number in numbers:
            bisect.insort(self._waiting, number)
        if numbers:
            self._notify()

    def _notify(self) -> None:
        """Wake all waiting calls."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def _change(self, seconds: float) -> None:
        """Wait for a change, for a limited time."""
        if seconds:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), seconds)
