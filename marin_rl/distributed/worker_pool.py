# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Pool of rollout workers that the trainer uses through a coordinator."""

import contextlib
import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence

from marin_rl.config.workers_config import WeightTransferConfig
from marin_rl.distributed.coordinator import Coordinator, TrainerUpdate
from marin_rl.distributed.coordinator_client import CoordinatorClient
from marin_rl.distributed.rollout_source import FinishedGroup
from marin_rl.distributed.scheduler import GroupRequest, RequestNumber
from marin_rl.distributed.weight_receiver import WeightReceiver, open_receiver
from marin_rl.distributed.weight_sender import TrainingHost, WeightSender, open_sender
from marin_rl.distributed.weight_server import make_secret
from marin_rl.rollouts.group_codec import decode_group, join_parts, split_parts
from marin_rl.types import WeightVersion
from marin_rl.utils import multihost
from marin_rl.utils.errors import Closing, UserError
from marin_rl.utils.event_loop import BackgroundJob
from marin_rl.utils.host_status import raise_if
from marin_rl.utils.timing import PhaseTimer

logger = logging.getLogger(__name__)


class WorkerFailedError(UserError):
    """Raised when an error in the program of a rollout worker ended it; a restart would fail again."""


class NoWorkersError(UserError):
    """Raised when no worker finishes a group within the timeout; the message lists pending groups."""


class WorkerPool:
    """Rollout workers in other processes. Pending requests are submitted again to a restarted coordinator.

    With several training processes, all of them make the same calls; the main process broadcasts finished groups.
    """

    def __init__(
        self,
        client: CoordinatorClient | None,
        sender: WeightSender,
        *,
        addresses: Sequence[str],
        counts: Mapping[str, int],
        no_progress_timeout: float,
        all_senders: WeightReceiver | None = None,
        poll: float = 1.0,
    ) -> None:
        """Start without pending requests.

        Args:
            client: client of the coordinator; None if this is not the main training process.
            sender: publishes the weights of this training host.
            addresses: sender addresses of all training hosts.
            counts: worker counts of the run before it was resumed.
            no_progress_timeout: seconds without any finished group after which `wait` fails, and seconds that other
                training hosts may take to publish a version.
            all_senders: receiver of all training hosts, whose versions are awaited before an announcement; None if
                there are no others, or this is not the main training process.
            poll: seconds that one call to the coordinator may wait.
        """
        self._client = client
        self._sender = sender
        self._all_senders = all_senders
        self._addresses = tuple(addresses)
        self._no_progress_timeout = no_progress_timeout
        self._poll = poll
        self._pending: dict[RequestNumber, GroupRequest] = {}
        self._received: list[RequestNumber] = []
        self._announced: WeightVersion | None = None
        self._announcing = BackgroundJob("announce")
        self._incarnation: str | None = None
        self._workers: dict[str, int] = {}
        self._failure: str | None = None
        self.counts = dict(counts) if client is not None else {}
        """Event counts over all coordinators of the run, at the last poll; empty without a client."""
        self._counts_before = self.counts
        self._seconds = {"present": 0.0, "busy": 0.0}
        self._seconds_before = self._seconds

    def publish(self, model: object, version: WeightVersion) -> None:
        """Publish weights and announce them in the background when available; see `RolloutSource`."""
        self._announcing.flush()
        self._sender.publish(model, version)
        self._announcing.start(self._announce, version)

    def _announce(self, version: WeightVersion) -> None:
        # Also in the other processes, so that `wait` raises their errors.
        self._sender.flush()
        if self._client is not None:
            if self._all_senders is not None:
                self._all_senders.wait_for(version, self._no_progress_timeout)
            self._announced = version
            self._client.call(Coordinator.announce, version, self._addresses)

    def flush(self) -> None:
        """Wait until the weights are announced; see `RolloutSource`.

        The main process announces them when it has seen them on the weight server of every training process, so no
        process may close its server earlier.

        Raises:
            WeightTransferError: if they cannot be published.
            MainProcessError: in the other training processes, if the main process failed.
        """
        if self._client is None:
            self._announcing.flush()
        multihost.on_main(self._announcing.flush)

    def submit(self, requests: Sequence[GroupRequest]) -> None:
        """See [`RolloutSource`][marin_rl.distributed.rollout_source.RolloutSource]."""
        if requests and self._client is not None:
            self._pending |= {request.number: request for request in requests}
            self._client.call(Coordinator.submit, requests)

    def wait(self, timer: PhaseTimer, stop_requested: Callable[[], bool] = lambda: False) -> list[FinishedGroup]:
        """See [`RolloutSource`][marin_rl.distributed.rollout_source.RolloutSource].

        Raises:
            StopRequestedError: if a stop is requested.
            Exception: if this process has failed to publish its weights, for which the workers wait.
            WorkerFailedError: if an error ended a worker, after the groups that were finished until then.
            NoWorkersError: if no group is finished within the timeout.
            MainProcessError: in the other training processes, if the wait failed in the main process.
        """
        deadline = time.monotonic() + self._no_progress_timeout

        def any_stop_requested() -> bool:
            return multihost.any_process(stop_requested())

        raise_if(any_stop_requested)
        # Broadcast the result of every poll, so that no process waits long in one exchange.
        while not (groups := _split(multihost.on_main(lambda: _join(self._poll_groups(deadline))))):
            self._announcing.raise_if_failed()
            raise_if(any_stop_requested)
        return [FinishedGroup(number, decode_group(data)) for number, data in groups]

    def metrics(self) -> dict[str, float]:
        """Return worker metrics: alive, busy share since the last call, and counts. Empty without a client."""
        if self._client is None:
            return {}
        present, busy = (self._seconds[name] - self._seconds_before[name] for name in ("present", "busy"))
        self._seconds_before = self._seconds
        counts = {f"workers/{name}": float(count) for name, count in self.counts.items()}
        return {
            "workers/alive": float(len(self._workers)),
            "workers/busy_share": busy / present if present else 0.0,
            **counts,
        }

    def close(self) -> None:
        """Wait for the pending announcement."""
        self._announcing.close()

    def _poll_groups(self, deadline: float) -> list[tuple[RequestNumber, bytes]]:
        """Return finished pending groups, encoded; empty if none is finished within `poll` seconds."""
        assert self._client is not None
        if time.monotonic() > deadline:
            pending = ", ".join(number.group_id for number in sorted(self._pending)[:5])
            raise NoWorkersError(
                f"no rollout worker finished a group in {self._no_progress_timeout:g} s "
                f"(workers.no_progress_timeout); {len(self._pending)} are pending ({pending}, ...), and there are "
                f"{len(self._workers)} workers. See their logs for the cause; run the same command again to resume "
                "from the last checkpoint"
            )
        self._announcing.raise_if_failed()
        if self._failure is not None:
            raise _worker_failed(self._failure)
        update = self._client.call(Coordinator.take, self._received, self._poll)
        self._received = [number for number, _ in update.groups]
        self._update_state(self._client, update)
        finished = [(number, data) for number, data in update.groups if self._pending.pop(number, None)]
        unreported = self._client.find_failure()
        self._failure = update.failure or unreported
        if self._failure is not None and not finished:
            raise _worker_failed(self._failure)
        return finished

    def _update_state(self, client: CoordinatorClient, update: TrainerUpdate) -> None:
        if self._incarnation != update.incarnation:
            if self._incarnation is not None:
                logger.warning(
                    "the coordinator was restarted; submitting %d pending requests again", len(self._pending)
                )
                self._counts_before = self.counts
                self._seconds_before = {"present": 0.0, "busy": 0.0}
            # Also for the first response: the coordinator may have been restarted before it.
            if self._announced is not None:
                client.call(Coordinator.announce, self._announced, self._addresses)
            client.call(Coordinator.submit, [self._pending[number] for number in sorted(self._pending)])
        self._incarnation = update.incarnation
        self._workers = update.workers
        self._seconds = update.seconds
        before = self._counts_before
        self.counts = {name: count + before.get(name, 0) for name, count in update.counts.items()}


def _worker_failed(failure: str) -> WorkerFailedError:
    return WorkerFailedError(
        f"a rollout worker ended with an error: {failure}. The logs in the run directory have the traceback"
    )


def _join(groups: Sequence[tuple[RequestNumber, bytes]]) -> bytes:
    """Encode numbered groups as one message: the numbers, then the groups."""
    return join_parts([json.dumps([number for number, _ in groups]).encode(), *(data for _, data in groups)])


def _split(message: bytes) -> list[tuple[RequestNumber, bytes]]:
    """Invert `_join`."""
    numbers, *groups = split_parts(message)
    return [(RequestNumber(*number), data) for number, data in zip(json.loads(numbers), groups, strict=True)]


def open_worker_pool(
    weights: WeightTransferConfig,
    start_workers: Callable[[str], contextlib.AbstractContextManager[CoordinatorClient]],
    *,
    counts: Mapping[str, int],
    no_progress_timeout: float,
    opened: contextlib.ExitStack,
) -> WorkerPool:
    """Start the weight server of this process, and, in the main process, the workers.

    `start_workers` starts the coordinator and workers with the run's secret. `counts` are worker counts of the run so
    far, `no_progress_timeout` is as for `WorkerPool`. `opened` closes everything that is started here.
    """
    secret = multihost.on_main(make_secret)
    sender = open_sender(weights, secret, TrainingHost.current())
    opened.enter_context(Closing(sender.close))
    addresses = multihost.gather_texts(sender.address)
    has_others = len(addresses) > 1 and multihost.is_main()
    all_senders = open_receiver(weights, addresses, secret) if has_others else None
    # Workers are stopped before their weight server.
    client = opened.enter_context(start_workers(secret)) if multihost.is_main() else None
    pool = WorkerPool(
        client,
        sender,
        addresses=addresses,
        counts=counts,
        no_progress_timeout=no_progress_timeout,
        all_senders=all_senders,
    )
    opened.enter_context(Closing(pool.close))
    return pool
