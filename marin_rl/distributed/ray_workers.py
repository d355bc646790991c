# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Coordinator and rollout workers as Ray actors, which Ray starts, restarts and stops."""

import contextlib
import logging
import socket
import time
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayActorError, RayError

from marin_rl.closing import Closing
from marin_rl.config.sections import module_levels
from marin_rl.config.train_config import TrainConfig
from marin_rl.config.yaml_text import from_yaml, to_yaml
from marin_rl.distributed.coordinator import Announcement, Assignment, CoordinatorActor, TrainerUpdate
from marin_rl.distributed.ray_node import connected_to_local_node
from marin_rl.distributed.scheduler import GroupRequest, RequestNumber
from marin_rl.distributed.worker import reporting_errors, work
from marin_rl.distributed.worker_policy import ReceivedPolicy
from marin_rl.errors import UserError
from marin_rl.logs import log_to
from marin_rl.types import WeightVersion

logger = logging.getLogger(__name__)

SHUTDOWN_TIMEOUT = 20.0
"""Seconds that workers have to stop before they are killed."""
CONNECT_TIMEOUT = 10.0
"""Timeout of the connection to the head node of a cluster, in seconds."""
RETRY_SECONDS = 0.5
"""Seconds between calls to a coordinator that is down."""
EXTRA_CONCURRENCY = 64
"""Concurrent calls of the coordinator in addition to one waiting call per worker."""


class RayLostError(UserError):
    """Raised when Ray has ended on this machine and cannot restart anything; the message names the remedy."""


class NoClusterError(UserError):
    """Raised when there is no Ray cluster at the configured address."""


def join_cluster(address: str) -> None:
    """Connect to a running cluster.

    Args:
        address: `auto` for a cluster on this machine, or `host:port`.

    Raises:
        NoClusterError: If no cluster responds.
    """
    find_cluster(address)
    with _no_cluster(address):
        ray.init(address=address, log_to_driver=False)


def find_cluster(address: str) -> None:
    """Check that a cluster address accepts connections. Ray itself would retry for minutes and end the process.

    Args:
        address: `host:port`, or `auto`, which only Ray can resolve.

    Raises:
        NoClusterError: If the connection fails.
    """
    if address != "auto":
        host, _, port = address.rpartition(":")
        with _no_cluster(address):
            socket.create_connection((host.strip("[]"), int(port)), CONNECT_TIMEOUT).close()


@contextlib.contextmanager
def _no_cluster(address: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise NoClusterError(
            f"no Ray cluster responds at ray_address {address!r} ({error}); start it with `ray start --head` on its "
            "first machine, correct ray_address, or leave it out"
        ) from error


class CoordinatorClient:
    """Client of the coordinator actor, for trainer and workers.

    Ray restarts a coordinator that is down, and calls are retried until then. Actors call each other directly, so they
    may continue for a while after Ray's node has died; but then no actor is restarted.
    """

    def __init__(self, coordinator: ActorHandle, no_progress_timeout: float) -> None:
        """Make a client.

        Args:
            coordinator: The actor.
            no_progress_timeout: Seconds of retries while the coordinator is down.
        """
        self._coordinator = coordinator
        self._no_progress_timeout = no_progress_timeout
        self._run_refs: dict[str, Any] = {}

    def watch(self, running: Mapping[str, Any]) -> None:
        """Check these workers whenever no groups are finished: a worker that fails to start cannot report its error.

        Args:
            running: Ray reference to the result of each worker, by name.
        """
        self._run_refs = dict(running)

    def submit(self, requests: Sequence[GroupRequest]) -> None:
        """See `CoordinatorActor`."""
        self._call(lambda: self._coordinator.submit.remote(list(requests)))

    def announce(self, version: WeightVersion, addresses: Sequence[str]) -> None:
        """See `CoordinatorActor`."""
        self._call(lambda: self._coordinator.announce.remote(version, tuple(addresses)))

    def take(self, acknowledged: Sequence[RequestNumber], seconds: float) -> TrainerUpdate:
        """See `CoordinatorActor`.

        Raises:
            RayLostError: If no group is finished and Ray has ended on this machine.
        """
        update = self._call(lambda: self._coordinator.take.remote(list(acknowledged), seconds))
        if not update.groups:
            check_node()
            return update._replace(failure=update.failure or self._failure())
        return update

    def stop(self) -> None:
        """See `CoordinatorActor`."""
        self._call(lambda: self._coordinator.stop.remote())

    def join(self, worker: str, incarnation: str) -> None:
        """See `CoordinatorActor`."""
        self._call(lambda: self._coordinator.join.remote(worker, incarnation))

    def next_assignment(
        self,
        worker: str,
        incarnation: str,
        version: WeightVersion | None,
        room: int,
        running: Collection[RequestNumber],
        seconds: float,
    ) -> Assignment | None:
        """See `CoordinatorActor`."""
        asked = (worker, incarnation, version, room, list(running), seconds)
        return self._call(lambda: self._coordinator.next_assignment.remote(*asked))

    def finish(self, worker: str, incarnation: str, number: RequestNumber, group: str) -> bool:
        """See `CoordinatorActor`."""
        return self._call(lambda: self._coordinator.finish.remote(worker, incarnation, number, group))

    def heartbeat(self, worker: str, incarnation: str) -> bool:
        """See `CoordinatorActor`."""
        return self._call(lambda: self._coordinator.heartbeat.remote(worker, incarnation))

    def announced(self) -> Announcement:
        """See `CoordinatorActor`."""
        return self._call(lambda: self._coordinator.announced.remote())

    def fail(self, worker: str, error: str) -> None:
        """See `CoordinatorActor`."""
        self._call(lambda: self._coordinator.fail.remote(worker, error))

    def leave(self, worker: str, incarnation: str) -> None:
        """See `CoordinatorActor`."""
        self._call(lambda: self._coordinator.leave.remote(worker, incarnation))

    def _failure(self) -> str | None:
        for name, end in self._run_refs.items():
            ended, _ = ray.wait([end], timeout=0)
            try:
                ray.get(ended)
            except RayError as error:
                return f"{name}: {str(error).strip().splitlines()[-1]}"
        return None

    def _call(self, call: Callable[[], "ray.ObjectRef[Any]"]) -> Any:
        deadline = time.monotonic() + self._no_progress_timeout
        while True:
            try:
                return ray.get(call())
            except RayActorError:
                if time.monotonic() > deadline:
                    raise
                check_node()
                logger.warning("the coordinator is down; retrying")
                time.sleep(RETRY_SECONDS)


def check_node() -> None:
    """Check that Ray's node of this process is alive.

    Raises:
        RayLostError: If it is not. Ray needs some seconds to notice.
    """
    own = ray.get_runtime_context().get_node_id()
    if not any(node["NodeID"] == own and node["Alive"] for node in ray.nodes()):
        raise RayLostError(
            f"Ray's node {own[:8]} on this machine has died, so failed workers cannot be restarted; check whether the "
            "machine ran out of memory, and run the same command again to resume from the last checkpoint"
        )


class Worker:
    """Ray actor of a rollout worker."""

    def __init__(self, config: str, vocab_size: int, secret: str, name: str, coordinator: str) -> None:
        """Store the arguments without loading anything.

        Args:
            config: Config of the run, as YAML.
            vocab_size: Vocabulary size of the model.
            secret: The run's secret.
            name: Name of the worker.
            coordinator: Name of the coordinator actor. Ray would keep a handle in its object store, and could not
                restart the worker if the store is lost.
        """
        self._config = from_yaml(TrainConfig, config, "the run's config")
        self._vocab_size = vocab_size
        self._secret = secret
        self._name = name
        self._coordinator = coordinator

    def run(self) -> None:
        """Run until the run ends."""
        workers, file = self._config.workers, Path(self._config.run_dir) / "workers" / f"{self._name}.txt"
        with log_to(file, self._config.log_level.number, module_levels(self._config.logging)):
            try:
                client = CoordinatorClient(ray.get_actor(self._coordinator), workers.no_progress_timeout)
                with reporting_errors(client, self._name):
                    policy = ReceivedPolicy(self._config, self._vocab_size, self._secret, client.announced)
                with Closing(policy.close):
                    work(client, self._name, policy, heartbeat_timeout=workers.heartbeat_timeout)
            except BaseException:
                logger.exception("worker %s ends with an error", self._name)
                raise


@contextlib.contextmanager
def ray_workers(config: TrainConfig, vocab_size: int, secret: str) -> Iterator[CoordinatorClient]:
    """Start coordinator and workers, and stop them at the end of the block.

    Args:
        config: Number of workers, and the cluster to join.
        vocab_size: Vocabulary size of the model.
        secret: The run's secret.

    Yields:
        Client of the coordinator.
    """
    workers = config.workers
    with contextlib.ExitStack() as opened:
        if config.ray_address is None:
            # Ray may still listen on the machine's network address; it authenticates callers with a token.
            opened.enter_context(connected_to_local_node(workers.num_workers + 1))
        else:
            join_cluster(config.ray_address)
            opened.callback(ray.shutdown)
        name = f"coordinator-{uuid.uuid4().hex}"
        # Waiting calls of idle workers must not block the heartbeats of other workers.
        calls = workers.num_workers + EXTRA_CONCURRENCY
        coordinator_actor = _actor(CoordinatorActor, name=name, max_concurrency=calls, num_cpus=0)
        coordinator = coordinator_actor.remote(workers.heartbeat_timeout)
        opened.callback(ray.kill, coordinator)
        client = CoordinatorClient(coordinator, workers.no_progress_timeout)
        worker = _actor(Worker, max_task_retries=-1, num_cpus=1, num_gpus=workers.gpus_per_worker)
        actors = [
            worker.remote(to_yaml(config), vocab_size, secret, f"worker-{index}", name)
            for index in range(workers.num_workers)
        ]
        running = {f"worker-{index}": actor.run.remote() for index, actor in enumerate(actors)}
        client.watch(running)
        opened.callback(_shut_down, CoordinatorClient(coordinator, SHUTDOWN_TIMEOUT), actors, list(running.values()))
        yield client


def _actor(kind: type, **options: Any) -> Any:
    """Return a Ray actor class that is restarted after failures."""
    return cast(Any, ray.remote(kind)).options(max_restarts=-1, **options)


def _shut_down(client: CoordinatorClient, actors: Sequence[ActorHandle], running: Sequence[Any]) -> None:
    """Stop the workers, and kill those that do not stop in time."""
    try:
        client.stop()
        ended, _ = ray.wait(list(running), num_returns=len(running), timeout=SHUTDOWN_TIMEOUT)
        logger.info("%d of %d workers stopped in time", len(ended), len(running))
    except (RayError, RayLostError):
        logger.warning("the coordinator could not be stopped", exc_info=True)
    finally:
        for actor in actors:
            ray.kill(actor)
