# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Coordinator and rollout workers as Ray actors. Ray starts, restarts and ends them; what they do is elsewhere."""

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
from marin_rl.config.command_line import from_yaml, to_yaml
from marin_rl.config.sections import module_levels
from marin_rl.config.train_config import TrainConfig
from marin_rl.errors import UserError
from marin_rl.rollouts.scheduler import GroupRequest, RequestNumber
from marin_rl.runtime.coordinator import Announcement, Assignment, CoordinatorActor, TrainerUpdate
from marin_rl.runtime.ray_node import connected_to_local_node
from marin_rl.runtime.rollout_worker import telling_errors, work
from marin_rl.runtime.run_directory import log_to
from marin_rl.types import WeightVersion

logger = logging.getLogger(__name__)

SHUTDOWN_TIMEOUT = 20.0
"""Seconds in which workers may end in good order."""
CONNECT = 10.0
"""Seconds in which a cluster's first machine has to answer."""
ASK_AGAIN = 0.5
"""Seconds until a coordinator that is down is asked again."""
CALLS_AT_ONCE = 64
"""Questions that the coordinator answers at the same time, besides one of each worker, which may wait for orders."""


class RayLostError(UserError):
    """Ray has ended on this machine, and starts nothing anew any more; the message says what to do."""


class NoClusterError(UserError):
    """There is no Ray cluster where the config says; the message names the place."""


def join_cluster(address: str) -> None:
    """Connect to a cluster that runs already.

    Args:
        address: `auto` for the one of this machine, or `host:port`.

    Raises:
        NoClusterError: if none answers there.
    """
    find_cluster(address)
    with _no_cluster(address):
        ray.init(address=address, log_to_driver=False)


def find_cluster(address: str) -> None:
    """See whether somebody answers where a cluster should be; Ray itself would ask for minutes and end the process.

    Args:
        address: `host:port`, or `auto`, which only Ray can look for.

    Raises:
        NoClusterError: if nobody does.
    """
    if address != "auto":
        host, _, port = address.rpartition(":")
        with _no_cluster(address):
            socket.create_connection((host.strip("[]"), int(port)), CONNECT).close()


@contextlib.contextmanager
def _no_cluster(address: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise NoClusterError(
            f"no Ray cluster answers at ray_address {address!r} ({error}); start it with `ray start --head` on its "
            "first machine, correct ray_address, or leave it out"
        ) from error


class CoordinatorClient:
    """The coordinator's desk, for trainer and workers, over Ray.

    A coordinator that is down is started anew by Ray; questions wait for it. Actors talk to one another directly, and
    may go on for a while after Ray's node has died; but then nobody starts them anew.
    """

    def __init__(self, coordinator: ActorHandle, patience: float) -> None:
        """Ask this coordinator.

        Args:
            coordinator: the actor.
            patience: seconds that it may be down.
        """
        self._coordinator = coordinator
        self._patience = patience
        self._running: dict[str, Any] = {}

    def watch(self, running: Mapping[str, Any]) -> None:
        """Look at these workers too when no groups come: one that cannot even begin tells no coordinator.

        Args:
            running: the end of each, by its name.
        """
        self._running = dict(running)

    def submit(self, orders: Sequence[GroupRequest]) -> None:
        """See `CoordinatorActor`."""
        self._ask(lambda: self._coordinator.submit.remote(list(orders)))

    def announce(self, version: WeightVersion, addresses: Sequence[str]) -> None:
        """See `CoordinatorActor`."""
        self._ask(lambda: self._coordinator.announce.remote(version, tuple(addresses)))

    def take(self, acknowledged: Sequence[RequestNumber], seconds: float) -> TrainerUpdate:
        """See `CoordinatorActor`.

        Raises:
            RayLostError: if nothing came, and Ray has ended on this machine.
        """
        update = self._ask(lambda: self._coordinator.take.remote(list(acknowledged), seconds))
        if not update.groups:
            check_node()
            return update._replace(failure=update.failure or self._failure())
        return update

    def stop(self) -> None:
        """See `CoordinatorActor`."""
        self._ask(lambda: self._coordinator.stop.remote())

    def join(self, worker: str, incarnation: str) -> None:
        """See `CoordinatorActor`."""
        self._ask(lambda: self._coordinator.join.remote(worker, incarnation))

    def next_work(
        self,
        worker: str,
        incarnation: str,
        version: WeightVersion | None,
        room: int,
        playing: Collection[RequestNumber],
        seconds: float,
    ) -> Assignment | None:
        """See `CoordinatorActor`."""
        asked = (worker, incarnation, version, room, list(playing), seconds)
        return self._ask(lambda: self._coordinator.next_work.remote(*asked))

    def finish(self, worker: str, incarnation: str, number: RequestNumber, group: str) -> bool:
        """See `CoordinatorActor`."""
        return self._ask(lambda: self._coordinator.finish.remote(worker, incarnation, number, group))

    def beat(self, worker: str, incarnation: str) -> bool:
        """See `CoordinatorActor`."""
        return self._ask(lambda: self._coordinator.beat.remote(worker, incarnation))

    def announced(self) -> Announcement:
        """See `CoordinatorActor`."""
        return self._ask(lambda: self._coordinator.announced.remote())

    def fail(self, worker: str, error: str) -> None:
        """See `CoordinatorActor`."""
        self._ask(lambda: self._coordinator.fail.remote(worker, error))

    def leave(self, worker: str, incarnation: str) -> None:
        """See `CoordinatorActor`."""
        self._ask(lambda: self._coordinator.leave.remote(worker, incarnation))

    def _failure(self) -> str | None:
        for name, end in self._running.items():
            ended, _ = ray.wait([end], timeout=0)
            try:
                ray.get(ended)
            except RayError as error:
                return f"{name}: {str(error).strip().splitlines()[-1]}"
        return None

    def _ask(self, question: Callable[[], "ray.ObjectRef[Any]"]) -> Any:
        deadline = time.monotonic() + self._patience
        while True:
            try:
                return ray.get(question())
            except RayActorError:
                if time.monotonic() > deadline:
                    raise
                check_node()
                logger.warning("the coordinator is down; asking again")
                time.sleep(ASK_AGAIN)


def check_node() -> None:
    """See that Ray's node of this process lives.

    Raises:
        RayLostError: if Ray has noticed that it does not, which takes it some seconds.
    """
    own = ray.get_runtime_context().get_node_id()
    if not any(node["NodeID"] == own and node["Alive"] for node in ray.nodes()):
        raise RayLostError(
            f"Ray's node {own[:8]} on this machine has died, and what else dies is not started anew; see whether the "
            "machine ran out of memory, and run the same command again to go on from the last checkpoint"
        )


class Worker:
    """A rollout worker in a process of its own."""

    def __init__(self, config: str, vocab_size: int, token: str, name: str, coordinator: str) -> None:
        """Take note of everything; nothing is loaded yet.

        Args:
            config: the run's, as YAML.
            vocab_size: of the model.
            token: the run's secret.
            name: the worker's.
            coordinator: the actor that hands out orders, by its name: Ray would keep a handle in its object store, and
                could not start the worker anew where that is lost.
        """
        self._config = from_yaml(TrainConfig, config, "the run's config")
        self._vocab_size = vocab_size
        self._token = token
        self._name = name
        self._coordinator = coordinator

    def run(self) -> None:
        """Work until the run is over."""
        from marin_rl.runtime.worker_policy import ReceivedPolicy

        workers, file = self._config.workers, Path(self._config.run_dir) / "workers" / f"{self._name}.txt"
        with log_to(file, self._config.log_level.number, module_levels(self._config.logging)):
            try:
                desk = CoordinatorClient(ray.get_actor(self._coordinator), workers.no_progress_timeout)
                with telling_errors(desk, self._name):
                    policy = ReceivedPolicy(self._config, self._vocab_size, self._token, desk.announced)
                with Closing(policy.close):
                    work(desk, self._name, policy, silence=workers.heartbeat_timeout)
            except BaseException:
                logger.exception("worker %s ends with an error", self._name)
                raise


@contextlib.contextmanager
def ray_workers(config: TrainConfig, vocab_size: int, token: str) -> Iterator[CoordinatorClient]:
    """Start coordinator and workers, and end them at the end of the block, whatever happens in it.

    Args:
        config: names how many, and the cluster to join.
        vocab_size: of the model.
        token: the run's secret.
    """
    workers = config.workers
    with contextlib.ExitStack() as opened:
        if config.ray_address is None:
            # Ray may listen on the machine's network address even so; callers need its token.
            opened.enter_context(connected_to_local_node(workers.num_workers + 1))
        else:
            join_cluster(config.ray_address)
            opened.callback(ray.shutdown)
        name = f"coordinator-{uuid.uuid4().hex}"
        # Idle workers that wait must not keep the others from being heard: those would count as silent.
        calls = workers.num_workers + CALLS_AT_ONCE
        coordinator_actor = _actor(CoordinatorActor, name=name, max_concurrency=calls, num_cpus=0)
        coordinator = coordinator_actor.remote(workers.heartbeat_timeout)
        opened.callback(ray.kill, coordinator)
        desk = CoordinatorClient(coordinator, workers.no_progress_timeout)
        worker = _actor(Worker, max_task_retries=-1, num_cpus=1, num_gpus=workers.gpus_per_worker)
        actors = [
            worker.remote(to_yaml(config), vocab_size, token, f"worker-{index}", name)
            for index in range(workers.num_workers)
        ]
        running = {f"worker-{index}": actor.run.remote() for index, actor in enumerate(actors)}
        desk.watch(running)
        opened.callback(_shut_down, CoordinatorClient(coordinator, SHUTDOWN_TIMEOUT), actors, list(running.values()))
        yield desk


def _actor(kind: type, **options: Any) -> Any:
    """A class whose objects Ray keeps in processes of their own, and starts anew where one dies."""
    return cast(Any, ray.remote(kind)).options(max_restarts=-1, **options)


def _shut_down(desk: CoordinatorClient, actors: Sequence[ActorHandle], running: Sequence[Any]) -> None:
    """Let workers end in good order, and end those that do not."""
    try:
        desk.stop()
        ended, _ = ray.wait(list(running), num_returns=len(running), timeout=SHUTDOWN_TIMEOUT)
        logger.info("%d of %d workers ended in good order", len(ended), len(running))
    except (RayError, RayLostError):
        logger.warning("the coordinator did not hear that the run is over", exc_info=True)
    finally:
        for actor in actors:
            ray.kill(actor)
