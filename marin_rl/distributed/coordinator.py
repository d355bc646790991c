# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Coordinator: assigns group requests to rollout workers and returns finished groups to the trainer.

`Coordinator` has no threads and takes its clock as an argument, so tests can simulate any order of events. The trainer
keeps all pending requests and submits them again when a coordinator is restarted.
"""

import bisect
import dataclasses
import itertools
import threading
import time
import uuid
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

from marin_rl.distributed.scheduler import GroupRequest, RequestNumber
from marin_rl.types import WeightVersion


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
    groups: list[tuple[RequestNumber, str]]
    """Finished groups, encoded; each is returned until it is acknowledged."""
    failure: str | None
    """Error that ended a worker, if any."""
    workers: dict[str, int]
    """Number of finished groups by worker."""
    counts: dict[str, int]
    """Event counts; see `Coordinator.counts`."""
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
    """Assigns group requests to rollout workers."""

    def __init__(self, clock: Callable[[], float], *, heartbeat_timeout: float) -> None:
        """Start without requests and workers.

        Args:
            clock: Monotonic time in seconds.
            heartbeat_timeout: Seconds without a call after which a worker is dropped and its requests are reassigned.
        """
        self.incarnation = uuid.uuid4().hex
        self._clock = clock
        self._heartbeat_timeout = heartbeat_timeout
        self._requests: dict[RequestNumber, GroupRequest] = {}
        self._waiting: list[RequestNumber] = []
        """Unassigned requests, sorted."""
        self._finished: dict[RequestNumber, str] = {}
        self._workers: dict[str, _Worker] = {}
        self._version: WeightVersion = 0
        self._addresses: tuple[str, ...] = ()
        self._stop = False
        self._failure: str | None = None
        self.counts = {"joined": 0, "lost": 0, "handed_again": 0, "late_groups": 0}
        """Workers that joined; workers that were dropped; requests reassigned from dropped workers; groups that arrived
        after another copy."""
        self._seconds = {"present": 0.0, "busy": 0.0}

    # Methods for the trainer.

    def submit(self, requests: Sequence[GroupRequest]) -> None:
        """Add requests; duplicates are ignored."""
        for request in requests:
            if request.number not in self._finished and request.number not in self._requests:
                self._requests[request.number] = request
                bisect.insort(self._waiting, request.number)

    def announce(self, version: WeightVersion, addresses: Sequence[str]) -> None:
        """Announce that weights are available at all addresses; older versions are ignored.

        Announcements may arrive out of order: after a restart of the coordinator, one thread of the trainer repeats the
        last announcement while another may send the next.
        """
        if version >= self._version:
            self._version, self._addresses = version, tuple(addresses)

    def take(self, acknowledged: Sequence[RequestNumber] = ()) -> TrainerUpdate:
        """Return the finished groups.

        Args:
            acknowledged: Groups that the trainer has received; they are removed.
        """
        for number in acknowledged:
            self._finished.pop(number, None)
        self.drop_silent_workers()
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
        """Stop all workers at their next request for work."""
        self._stop = True

    # Methods for workers.

    def join(self, worker: str, incarnation: str) -> None:
        """Register a worker. The requests of its previous incarnation are reassigned.

        Args:
            worker: Name of the worker.
            incarnation: Random id of this start of the worker.
        """
        record = self._workers.get(worker)
        if record is not None and record.incarnation == incarnation:
            # The response was lost and the call was repeated.
            return
        if record is not None:
            self._drop(worker)
        self._workers[worker] = _Worker(incarnation, self._clock(), self._clock())
        self.counts["joined"] += 1

    def next_assignment(
        self, worker: str, incarnation: str, version: WeightVersion | None, room: int
    ) -> Assignment | None:
        """Assign the oldest waiting requests that accept weights of this version.

        Args:
            worker: Name of the worker.
            incarnation: Random id of this start of the worker.
            version: Version of its weights; None for no weights.
            room: Maximum number of requests to assign.

        Returns:
            The assignment; None if this incarnation is not registered and must join again without its requests.
        """
        record = self._register_call(worker, incarnation)
        if record is None:
            return None
        self.drop_silent_workers()
        ready = (number for number in self._waiting if self._requests[number].min_version <= (version or 0))
        numbers = [] if version is None else list(itertools.islice(ready, room))
        self._count_seconds()
        for number in numbers:
            self._waiting.remove(number)
        record.requests |= set(numbers)
        return Assignment([self._requests[number] for number in numbers], self.announced, self._stop)

    def set_running(self, worker: str, incarnation: str, numbers: Collection[RequestNumber]) -> None:
        """Set the requests that a worker runs. Its other assignments were lost in transit and are reassigned."""
        record = self._register_call(worker, incarnation)
        if record is None:
            return
        self._count_seconds()
        taken = {number for number in numbers if number in self._waiting}
        self._waiting = [number for number in self._waiting if number not in taken]
        for number in record.requests.difference(numbers):
            bisect.insort(self._waiting, number)
        record.requests = record.requests.intersection(numbers) | taken

    def finish(self, worker: str, incarnation: str, number: RequestNumber, group: str) -> bool:
        """Accept a finished group. The first result of a request counts, from any worker.

        Returns:
            Whether the request was still pending.
        """
        record = self._register_call(worker, incarnation)
        self._count_seconds()
        if record is not None:
            record.requests.discard(number)
            record.finished += 1
        if self._requests.pop(number, None) is None:
            self.counts["late_groups"] += 1
            return False
        if number in self._waiting:
            self._waiting.remove(number)
        for other in self._workers.values():
            other.requests.discard(number)
        self._finished[number] = group
        return True

    def heartbeat(self, worker: str, incarnation: str) -> bool:
        """Keep a worker registered. Return False if this incarnation is not registered."""
        return self._register_call(worker, incarnation) is not None

    def fail(self, worker: str, error: str) -> None:
        """Report an error that ended a worker to the trainer."""
        self._failure = f"{worker}: {error}"

    def leave(self, worker: str, incarnation: str) -> None:
        """Unregister a worker and reassign its unfinished requests."""
        if self._register_call(worker, incarnation) is not None:
            self._count_seconds()
            self._reassign(self._workers.pop(worker))

    @property
    def announced(self) -> Announcement:
        """The newest weights."""
        return Announcement(self._version, self._addresses)

    def drop_silent_workers(self) -> None:
        """Drop workers without a call within the heartbeat timeout."""
        now = self._clock()
        for name in [
            name for name, worker in self._workers.items() if now - worker.last_call > self._heartbeat_timeout
        ]:
            self._drop(name)

    @property
    def workers(self) -> dict[str, int]:
        """Number of finished groups by worker."""
        return {name: worker.finished for name, worker in sorted(self._workers.items())}

    def _register_call(self, worker: str, incarnation: str) -> _Worker | None:
        record = self._workers.get(worker)
        if record is None or record.incarnation != incarnation:
            return None
        record.last_call = self._clock()
        return record

    def _count_seconds(self) -> None:
        now = self._clock()
        for worker in self._workers.values():
            self._seconds["present"] += now - worker.counted
            self._seconds["busy"] += now - worker.counted if worker.requests else 0.0
            worker.counted = now

    def _drop(self, worker: str) -> None:
        self._count_seconds()
        dropped = self._workers.pop(worker)
        self.counts["lost"] += 1
        self.counts["handed_again"] += len(dropped.requests)
        self._reassign(dropped)

    def _reassign(self, worker: _Worker) -> None:
        for number in worker.requests:
            bisect.insort(self._waiting, number)


class CoordinatorActor:
    """Thread-safe coordinator with blocking calls, for use as a Ray actor."""

    def __init__(self, heartbeat_timeout: float) -> None:
        """Make the coordinator.

        Args:
            heartbeat_timeout: See [`Coordinator`][marin_rl.distributed.coordinator.Coordinator].
        """
        self._coordinator = Coordinator(time.monotonic, heartbeat_timeout=heartbeat_timeout)
        self._changed = threading.Condition()

    def submit(self, requests: Sequence[GroupRequest]) -> None:
        """See `Coordinator`."""
        with self._changed:
            self._coordinator.submit(requests)
            self._changed.notify_all()

    def announce(self, version: WeightVersion, addresses: Sequence[str]) -> None:
        """See `Coordinator`."""
        with self._changed:
            self._coordinator.announce(version, addresses)
            self._changed.notify_all()

    def take(self, acknowledged: Sequence[RequestNumber], seconds: float) -> TrainerUpdate:
        """See `Coordinator`; waits up to `seconds` for a change if no group is finished."""
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

    def next_assignment(
        self,
        worker: str,
        incarnation: str,
        version: WeightVersion | None,
        room: int,
        running: Collection[RequestNumber],
        seconds: float,
    ) -> Assignment | None:
        """See `Coordinator`; waits up to `seconds` for requests, newer weights or the end of the run.

        A response may be lost and the call repeated, so the call lists the requests that the worker runs.
        """
        with self._changed:
            self._coordinator.set_running(worker, incarnation, running)
            assignment = self._coordinator.next_assignment(worker, incarnation, version, room)
            if assignment is not None and not (
                assignment.requests or assignment.stop or assignment.newest.is_newer_than(version)
            ):
                self._changed.wait(seconds)
                assignment = self._coordinator.next_assignment(worker, incarnation, version, room)
            return assignment

    def finish(self, worker: str, incarnation: str, number: RequestNumber, group: str) -> bool:
        """See `Coordinator`."""
        with self._changed:
            was_pending = self._coordinator.finish(worker, incarnation, number, group)
            self._changed.notify_all()
            return was_pending

    def heartbeat(self, worker: str, incarnation: str) -> bool:
        """See `Coordinator`."""
        with self._changed:
            return self._coordinator.heartbeat(worker, incarnation)

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
