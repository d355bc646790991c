# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Rollout worker: fetches weights, runs groups and returns them to the coordinator."""

import contextlib
import logging
import threading
import time
import uuid
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Protocol, runtime_checkable

from marin_rl.distributed.coordinator import Announcement, Assignment
from marin_rl.distributed.rollout_source import FinishedGroup
from marin_rl.distributed.scheduler import GroupRequest, RequestNumber
from marin_rl.rollouts.group_codec import encode_group
from marin_rl.types import WeightVersion

logger = logging.getLogger(__name__)

RETRY_SECONDS = 1.0
"""Seconds between attempts of a worker that cannot fetch weights."""


@runtime_checkable
class WorkerClient(Protocol):
    """Worker interface of a coordinator.

    A call may be repeated if its response is lost; all calls are idempotent.
    """

    def join(self, worker: str, incarnation: str) -> None:
        """Register a worker."""
        ...

    def next_assignment(
        self,
        worker: str,
        incarnation: str,
        version: WeightVersion | None,
        room: int,
        running: Collection[RequestNumber],
        seconds: float,
    ) -> Assignment | None:
        """Return the next assignment; None if the worker must join again."""
        ...

    def announced(self) -> Announcement:
        """Return the newest weights."""
        ...

    def finish(self, worker: str, incarnation: str, number: RequestNumber, group: str) -> bool:
        """Return a finished group."""
        ...

    def heartbeat(self, worker: str, incarnation: str) -> bool:
        """Keep the worker registered."""
        ...

    def fail(self, worker: str, error: str) -> None:
        """Report an error that ends the worker."""
        ...

    def leave(self, worker: str, incarnation: str) -> None:
        """Unregister the worker."""
        ...


@runtime_checkable
class WorkerPolicy(Protocol):
    """Sampler, environment and weights of a worker."""

    @property
    def version(self) -> WeightVersion | None:
        """Version of the weights; None before the first fetch."""
        ...

    @property
    def room(self) -> int:
        """Number of groups to run concurrently."""
        ...

    @property
    def is_in_flight(self) -> bool:
        """Whether weights are updated while groups run."""
        ...

    def fetch(self, addresses: Sequence[str]) -> bool:
        """Fetch the newest weights at these addresses. Return False if they are not available now."""
        ...

    def run(
        self, requests: Sequence[GroupRequest], on_group_done: Callable[[FinishedGroup], Sequence[GroupRequest]]
    ) -> None:
        """Run groups until none is left.

        Args:
            requests: The first requests.
            on_group_done: Called from any thread with each finished group; returns the requests to start in its place.
        """
        ...


def work(client: WorkerClient, name: str, policy: WorkerPolicy, *, heartbeat_timeout: float, poll: float = 5.0) -> None:
    """Run a worker until the run ends.

    Args:
        client: Client of the coordinator.
        name: Name of the worker, unique in the run.
        policy: Runs the groups.
        heartbeat_timeout: Seconds without a call after which the coordinator drops a worker. Heartbeats are sent four
            times as often.
        poll: Seconds that one call to the coordinator may wait.

    Raises:
        Exception: Any error that ends the worker; it is reported to the trainer.
    """
    incarnation = uuid.uuid4().hex
    client.join(name, incarnation)
    with reporting_errors(client, name), _Heartbeat(lambda: client.heartbeat(name, incarnation), heartbeat_timeout / 4):
        _work(client, name, incarnation, policy, poll)
    client.leave(name, incarnation)


@contextlib.contextmanager
def reporting_errors(client: WorkerClient, name: str) -> Iterator[None]:
    """Report an error that ends the worker to the trainer.

    Args:
        client: Client of the coordinator.
        name: Name of the worker.
    """
    try:
        yield
    except Exception as error:
        client.fail(name, f"{type(error).__name__}: {error}")
        raise


def _work(client: WorkerClient, name: str, incarnation: str, policy: WorkerPolicy, poll: float) -> None:
    weights_unavailable = False
    while True:
        assignment = client.next_assignment(
            name, incarnation, policy.version, 0 if weights_unavailable else policy.room, (), poll
        )
        if assignment is None:
            logger.warning("worker %s was dropped; joining again", name)
            client.join(name, incarnation)
            continue
        if assignment.stop:
            return
        weights_unavailable = assignment.newest.is_newer_than(policy.version) and not policy.fetch(
            assignment.newest.addresses
        )
        if weights_unavailable:
            # The next call lists no running groups, so the coordinator reassigns the requests of this worker.
            time.sleep(min(poll, RETRY_SECONDS))
        elif assignment.requests:
            policy.run(
                assignment.requests, _GroupStream(client, name, incarnation, policy, assignment.requests).on_group_done
            )


class _GroupStream:
    """Tracks the running groups of a worker and requests further ones as they finish."""

    def __init__(
        self, client: WorkerClient, name: str, incarnation: str, policy: WorkerPolicy, requests: Sequence[GroupRequest]
    ) -> None:
        self._client = client
        self._name = name
        self._incarnation = incarnation
        self._policy = policy
        self._running = {request.number for request in requests}
        self._lock = threading.Lock()

    def on_group_done(self, finished: FinishedGroup) -> list[GroupRequest]:
        """Return a group to the coordinator and request as many groups as there is room for."""
        self._client.finish(self._name, self._incarnation, finished.number, encode_group(finished.group))
        with self._lock:
            self._running.remove(finished.number)
            requests = self._next_requests()
            self._running |= {request.number for request in requests}
            return requests

    def _next_requests(self) -> list[GroupRequest]:
        version = self._policy.version
        # With `between_groups`, start no further groups until all have finished and the weights are updated.
        if not self._policy.is_in_flight and self._client.announced().is_newer_than(version):
            return []
        room = self._policy.room - len(self._running)
        assignment = self._client.next_assignment(
            self._name, self._incarnation, version, room, sorted(self._running), 0.0
        )
        return [] if assignment is None or assignment.stop else assignment.requests


class _Heartbeat:
    """Sends heartbeats from a background thread."""

    def __init__(self, beat: Callable[[], object], seconds: float) -> None:
        self._beat = beat
        self._seconds = seconds
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def _run(self) -> None:
        while not self._end.wait(self._seconds):
            try:
                self._beat()
            except Exception:
                # The next call of the main thread handles the error.
                logger.warning("the coordinator does not respond", exc_info=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *error: object) -> None:
        self._end.set()
        self._thread.join()
