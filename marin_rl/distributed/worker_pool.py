# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Pool of rollout workers that the trainer uses through a coordinator."""

import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, runtime_checkable

from marin_rl import multihost
from marin_rl.background_job import BackgroundJob
from marin_rl.distributed.coordinator import TrainerUpdate
from marin_rl.distributed.rollout_source import FinishedGroup, raise_if
from marin_rl.distributed.scheduler import GroupRequest, RequestNumber
from marin_rl.errors import UserError
from marin_rl.rollouts.group_codec import decode_group
from marin_rl.timing import PhaseTimer
from marin_rl.types import WeightVersion
from marin_rl.weights.protocol import WeightSender

logger = logging.getLogger(__name__)


class WorkerFailedError(UserError):
    """Raised when an error in the program of a rollout worker ended it; a restart would fail again."""


class NoWorkersError(UserError):
    """Raised when no worker finishes a group within the timeout; the message lists pending groups."""


@runtime_checkable
class TrainerClient(Protocol):
    """Trainer interface of a coordinator; all calls are idempotent."""

    def submit(self, requests: Sequence[GroupRequest]) -> None:
        """Add requests."""
        ...

    def announce(self, version: WeightVersion, addresses: Sequence[str]) -> None:
        """Announce the newest weights and their addresses."""
        ...

    def take(self, acknowledged: Sequence[RequestNumber], seconds: float) -> TrainerUpdate:
        """Return finished groups; waits up to `seconds` for the first."""
        ...


class WorkerPool:
    """Rollout workers in other processes. Pending requests are submitted again to a restarted coordinator."""

    def __init__(
        self,
        client: TrainerClient,
        sender: WeightSender,
        *,
        no_progress_timeout: float,
        poll: float = 1.0,
        addresses: Sequence[str] | None = None,
        counts: Mapping[str, int] | None = None,
    ) -> None:
        """Start without pending requests.

        Args:
            client: Client of the coordinator.
            sender: Publishes the weights; after `flush` they are available at all addresses.
            no_progress_timeout: Seconds without any finished group after which `wait` fails.
            poll: Seconds that one call to the coordinator may wait.
            addresses: Sender addresses of all training hosts; None for the address of `sender`.
            counts: Worker counts of the run before it was resumed.
        """
        self._client = client
        self._sender = sender
        self._addresses = (sender.address,) if addresses is None else tuple(addresses)
        self._no_progress_timeout = no_progress_timeout
        self._poll = poll
        self._pending: dict[RequestNumber, GroupRequest] = {}
        self._received: list[RequestNumber] = []
        self._announced: tuple[WeightVersion, tuple[str, ...]] | None = None
        self._announcing = BackgroundJob("announce")
        self._incarnation: str | None = None
        self.workers: dict[str, int] = {}
        """Number of finished groups by worker, at the last poll."""
        self.counts = dict(counts or {})
        """Event counts over all coordinators of the run, at the last poll; see `Coordinator.counts`."""
        self._counts_before = self.counts
        self._seconds = {"present": 0.0, "busy": 0.0}
        self._seconds_before = self._seconds

    def publish(self, model: object, version: WeightVersion) -> None:
        """Publish weights and announce them in the background when available; see `RolloutSource`."""
        self._announcing.flush()
        self._sender.publish(model, version)
        self._announcing.start(self._announce, version)

    def _announce(self, version: WeightVersion) -> None:
        self._sender.flush()
        self._announced = (version, self._addresses)
        self._client.announce(*self._announced)

    def metrics(self) -> dict[str, float]:
        """Return worker metrics: alive, busy share since the last call, and counts."""
        present, busy = (self._seconds[name] - self._seconds_before[name] for name in ("present", "busy"))
        self._seconds_before = self._seconds
        counts = {f"workers/{name}": float(count) for name, count in self.counts.items()}
        return {
            "workers/alive": float(len(self.workers)),
            "workers/busy_share": busy / present if present else 0.0,
            **counts,
        }

    def close(self) -> None:
        """Wait for the pending announcement."""
        self._announcing.close()

    def submit(self, requests: Sequence[GroupRequest]) -> None:
        """See [`RolloutSource`][marin_rl.distributed.rollout_source.RolloutSource]."""
        if requests:
            self._pending |= {request.number: request for request in requests}
            self._client.submit(requests)

    def wait(self, timer: PhaseTimer, stop_requested: Callable[[], bool] = lambda: False) -> list[FinishedGroup]:
        """See [`RolloutSource`][marin_rl.distributed.rollout_source.RolloutSource].

        Raises:
            StopRequestedError: If a stop is requested.
            WorkerFailedError: If an error ended a worker.
            NoWorkersError: If no group is finished within the timeout.
        """
        deadline = self.deadline()
        raise_if(stop_requested)
        while not (finished := self.poll_groups(deadline)):
            raise_if(stop_requested)
        return [FinishedGroup(number, decode_group(text)) for number, text in finished]

    def deadline(self) -> float:
        """Return the time at which a wait that starts now times out."""
        return time.monotonic() + self._no_progress_timeout

    def poll_groups(self, deadline: float) -> list[tuple[RequestNumber, str]]:
        """Return finished pending groups, encoded; empty if none is finished within `poll` seconds.

        Args:
            deadline: Time after which to fail.

        Raises:
            WorkerFailedError: If an error ended a worker.
            NoWorkersError: If the deadline has passed.
        """
        if time.monotonic() > deadline:
            pending = ", ".join(number.group_id for number in sorted(self._pending)[:5])
            raise NoWorkersError(
                f"no rollout worker finished a group in {self._no_progress_timeout:g} s "
                f"(workers.no_progress_timeout); {len(self._pending)} are pending ({pending}, ...), and there are "
                f"{len(self.workers)} workers. See their logs for the cause; run the same command again to resume from "
                "the last checkpoint"
            )
        self._announcing.raise_if_failed()
        update = self._client.take(self._received, self._poll)
        self._received = [number for number, _ in update.groups]
        self._update_state(update)
        finished = [(number, text) for number, text in update.groups if self._pending.pop(number, None)]
        if not finished and update.failure is not None:
            raise WorkerFailedError(
                f"a rollout worker ended with an error: {update.failure}. The workers' logs in the run directory "
                "have the traceback"
            )
        return finished

    def _update_state(self, update: TrainerUpdate) -> None:
        if self._incarnation != update.incarnation:
            if self._incarnation is not None:
                logger.warning(
                    "the coordinator was restarted; submitting %d pending requests again", len(self._pending)
                )
                self._counts_before = self.counts
                self._seconds_before = {"present": 0.0, "busy": 0.0}
            # Also for the first response: the coordinator may have been restarted before it.
            if self._announced is not None:
                self._client.announce(*self._announced)
            self._client.submit([self._pending[number] for number in sorted(self._pending)])
        self._incarnation = update.incarnation
        self.workers = update.workers
        self._seconds = update.seconds
        before = self._counts_before
        self.counts = {name: count + before.get(name, 0) for name, count in update.counts.items()}


class SharedWorkerPool:
    """Worker pool of the main process with a broadcast of its results to all processes."""

    def __init__(self, worker_pool: WorkerPool | None, sender: WeightSender) -> None:
        """Start without pending requests.

        Args:
            worker_pool: Worker pool of the main process; None in the other processes.
            sender: Publishes the shards of this process if there is no worker pool.
        """
        self._worker_pool = worker_pool
        self._sender = sender

    def submit(self, requests: Sequence[GroupRequest]) -> None:
        """See [`RolloutSource`][marin_rl.distributed.rollout_source.RolloutSource]."""
        if self._worker_pool is not None:
            self._worker_pool.submit(requests)

    def wait(self, timer: PhaseTimer, stop_requested: Callable[[], bool] = lambda: False) -> list[FinishedGroup]:
        """See [`WorkerPool`][marin_rl.distributed.worker_pool.WorkerPool].

        Raises:
            StopRequestedError: In every process, if a stop is requested.
            MainProcessError: If the wait failed in the main process.
        """
        deadline = None if self._worker_pool is None else self._worker_pool.deadline()

        def poll() -> str:
            assert self._worker_pool is not None
            assert deadline is not None
            return json.dumps(self._worker_pool.poll_groups(deadline))

        raise_if(stop_requested)
        # Broadcast the result of every poll, so that no process waits long in one exchange.
        while not (groups := json.loads(multihost.on_main(poll))):
            raise_if(stop_requested)
        return [FinishedGroup(RequestNumber(*number), decode_group(text)) for number, text in groups]

    def publish(self, model: object, version: WeightVersion) -> None:
        """See [`RolloutSource`][marin_rl.distributed.rollout_source.RolloutSource]."""
        if self._worker_pool is None:
            self._sender.publish(model, version)
        else:
            self._worker_pool.publish(model, version)

    def metrics(self) -> dict[str, float]:
        """Return the worker metrics in the main process, and nothing in the others."""
        return {} if self._worker_pool is None else self._worker_pool.metrics()

    @property
    def counts(self) -> dict[str, int]:
        """Event counts in the main process; empty in the others."""
        return {} if self._worker_pool is None else self._worker_pool.counts
