# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Coordinator and rollout workers as Ray actors, which Ray starts, restarts and stops, on the devices they reserve."""

import contextlib
import dataclasses
import functools
import logging
import math
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

import jax
import ray
from ray.actor import ActorHandle
from ray.exceptions import GetTimeoutError, RayActorError, RayError
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from ray.util.tpu import SlicePlacementGroup

from marin_rl.config.input_files import Inputs
from marin_rl.config.ray_cluster import check_own_node, find_cluster, no_cluster, ray_version
from marin_rl.config.train_config import TrainConfig
from marin_rl.config.workers_config import CPU, GPU, WorkersConfig, parse_worker_slice
from marin_rl.distributed.coordinator import Coordinator
from marin_rl.distributed.coordinator_client import CoordinatorClient, CoordinatorLostError, RemoteClient
from marin_rl.distributed.ray_node import connect, connected_to_local_node
from marin_rl.distributed.worker_program import RunWorker, WorkerProgram
from marin_rl.utils.settings.yaml_text import to_yaml

logger = logging.getLogger(__name__)

SHUTDOWN_TIMEOUT = 20.0
"""Seconds that workers have to stop before they are killed."""
EXTRA_CONCURRENCY = 64
"""Concurrent calls of the coordinator in addition to one waiting call per worker."""
POLL_SECONDS = 10.0
"""Seconds of one attempt to reserve a slice."""


@dataclasses.dataclass
class RayWorker:
    """Ray actor of a rollout worker."""

    program: WorkerProgram
    """What the worker runs."""
    secret: str
    """The run's secret."""
    coordinator: str
    """Name of the coordinator actor. Ray would keep a handle in its object store, and could not restart the worker if
    the store is lost."""

    def run(self) -> None:
        """Run until the run ends."""
        self.program.run(self.secret, lambda timeout: RayClient(ray.get_actor(self.coordinator), timeout))


class RayClient(RemoteClient):
    """Client of a coordinator that is a Ray actor.

    Ray restarts a coordinator that is down, and calls are retried until then. Actors call each other directly, so they
    may continue for a while after Ray's node has died; but then no actor is restarted.
    """

    unanswered = (RayActorError, GetTimeoutError)

    def __init__(
        self, coordinator: ActorHandle, no_progress_timeout: float, workers: Mapping[str, Any] | None = None
    ) -> None:
        """Make a client.

        `no_progress_timeout` is as for `RemoteClient`. `workers`, only for the trainer, has the Ray reference to the
        result of each worker, by name.
        """
        super().__init__(no_progress_timeout)
        self._coordinator = coordinator
        self._workers = workers or {}

    def ask(self, method: str, arguments: Any, named: Any, seconds: float) -> Any:
        """See `RemoteClient`."""
        return ray.get(getattr(self._coordinator, method).remote(*arguments, **named), timeout=seconds)

    def check_engine(self) -> None:
        """Check that Ray's node of this process is alive. Ray needs some seconds to notice."""
        own = ray.get_runtime_context().get_node_id()
        if not any(node["NodeID"] == own and node["Alive"] for node in ray.nodes()):
            raise CoordinatorLostError(
                f"Ray's node {own[:8]} on this machine has died, so failed workers cannot be restarted; check whether "
                "the machine ran out of memory, and run the same command again to resume from the last checkpoint"
            )

    def find_failure(self) -> str | None:
        """See `CoordinatorClient`."""
        self.check_engine()
        # A copy, because workers may be added meanwhile.
        for name, end in list(self._workers.items()):
            ended, _ = ray.wait([end], timeout=0)
            try:
                ray.get(ended)
            except RayError as error:
                return f"{name}: {str(error).strip().splitlines()[-1]}"
        return None


@contextlib.contextmanager
def ray_workers(
    run_worker: RunWorker, config: TrainConfig, inputs: Inputs, vocab_size: int, base: str, secret: str
) -> Iterator[CoordinatorClient]:
    """Start coordinator and workers, and stop them at the end of the block.

    Args:
        run_worker: runs a worker in its process.
        config: number of workers, and the cluster to join.
        inputs: checksums of the trainer's input files.
        vocab_size: vocabulary size of the model.
        base: fingerprint of the base of the trainer's adapter; empty without an adapter.
        secret: the run's secret.

    Yields:
        Client of the coordinator.

    Raises:
        NoClusterError: if no cluster responds at `ray_address`.
    """
    workers = config.workers
    with contextlib.ExitStack() as opened:
        if config.ray_address is None:
            # Ray may still listen on the machine's network address; it authenticates callers with a token.
            opened.enter_context(
                connected_to_local_node(math.ceil(workers.num_workers * workers.reserved.get(CPU, 0)) + 1)
            )
        else:
            find_cluster(config.ray_address)
            with no_cluster(config.ray_address):
                connect(address=config.ray_address, log_to_driver=False)
            opened.callback(ray.shutdown)
            own_node = ray.get_runtime_context().get_node_id()
            check_own_node(workers.reserved, jax.devices()[0].platform, ray.nodes(), own_node)
        name = f"coordinator-{uuid.uuid4().hex}"
        # Waiting calls of idle workers must not block the heartbeats of other workers.
        calls = workers.num_workers + EXTRA_CONCURRENCY
        coordinator_actor = _actor(Coordinator, name=name, max_concurrency=calls, num_cpus=0)
        coordinator = coordinator_actor.remote(workers.heartbeat_timeout)
        opened.callback(ray.kill, coordinator)
        actors: list[Any] = []
        running: dict[str, Any] = {}

        def start(index: int, place: PlacementGroupSchedulingStrategy | None = None) -> None:
            options = ray_options(workers.reserved) | ({} if place is None else {"scheduling_strategy": place})
            worker = _actor(RayWorker, max_task_retries=-1, **options)
            program = WorkerProgram(run_worker, to_yaml(config), inputs, vocab_size, base, f"worker-{index}")
            actors.append(worker.remote(program, secret, name))
            running[f"worker-{index}"] = actors[-1].run.remote()

        client = RayClient(coordinator, SHUTDOWN_TIMEOUT)
        if workers.tpu_slice is None:
            for index in range(workers.num_workers):
                start(index)
            opened.callback(_shut_down, client, actors, running)
        else:
            fail = functools.partial(client.call, Coordinator.fail, f"reserving slices {workers.tpu_slice}")
            slices = SliceReservations(workers, start, fail)
            opened.callback(slices.release)
            opened.callback(_shut_down, client, actors, running)
            opened.callback(slices.stop)
        yield RayClient(coordinator, workers.no_progress_timeout, running)


def _actor(kind: type, **options: Any) -> Any:
    """Return a Ray actor class that is restarted after failures."""
    return cast(Any, ray.remote(kind)).options(max_restarts=-1, **options)


def _shut_down(client: CoordinatorClient, actors: list[Any], running: Mapping[str, Any]) -> None:
    """Stop the workers, and kill those that do not stop in time."""
    try:
        client.call(Coordinator.stop)
        ended, _ = ray.wait(list(running.values()), num_returns=len(running), timeout=SHUTDOWN_TIMEOUT)
        logger.info("%d of %d workers stopped in time", len(ended), len(running))
    except (RayError, CoordinatorLostError):
        logger.warning("the coordinator could not be stopped", exc_info=True)
    finally:
        for actor in actors:
            ray.kill(actor)


def ray_options(reserved: Mapping[str, float]) -> dict[str, Any]:
    """Return the options of a Ray actor that reserves these resources.

    >>> ray_options({"CPU": 2.0, "TPU": 4.0})
    {'num_cpus': 2.0, 'num_gpus': 0, 'resources': {'TPU': 4.0}}
    """
    others = {name: amount for name, amount in reserved.items() if name not in (CPU, GPU)}
    return {"num_cpus": reserved.get(CPU, 0), "num_gpus": reserved.get(GPU, 0), "resources": others}


class SliceReservations:
    """Reserves slices as they join the cluster, and starts the workers of each.

    Ray places the workers of a lost slice again when a slice of the same name joins.
    """

    def __init__(
        self,
        config: WorkersConfig,
        start: Callable[[int, PlacementGroupSchedulingStrategy], None],
        fail: Callable[[str], None],
    ) -> None:
        """Start to reserve, in a thread.

        Args:
            config: number of workers and kind of the slices.
            start: starts the worker with this index at a place; called from the thread.
            fail: called from the thread with the error that ended it.
        """
        assert config.tpu_slice is not None
        self._kind = parse_worker_slice(config.tpu_slice)
        self._config = config
        self._start, self._fail = start, fail
        self._slices: list[SlicePlacementGroup] = []
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="TPU slices", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Reserve no further slices, and start no further workers."""
        self._stopped.set()
        self._thread.join()

    def release(self) -> None:
        """Return the slices to the cluster."""
        for reserved in self._slices:
            reserved.shutdown()

    def _run(self) -> None:
        try:
            self._start_workers()
        except Exception as error:
            logger.exception("no further slices are reserved")
            self._fail(f"{type(error).__name__}: {error}")

    def _start_workers(self) -> None:
        hosts = self._kind.num_hosts
        for first in range(0, self._config.num_workers, hosts):
            group = self._reserve()
            if group is None:
                return
            logger.info("reserved slice %d, for workers %d to %d", first // hosts, first, first + hosts - 1)
            for bundle in range(hosts):
                self._start(first + bundle, PlacementGroupSchedulingStrategy(group, bundle))

    def _reserve(self) -> PlacementGroup | None:
        """Reserve a slice, and wait until all of its hosts have joined; None if `stop` was called."""
        while not self._stopped.is_set():
            try:
                reserved = SlicePlacementGroup(
                    self._kind.shape_text,
                    ray_version(self._kind),
                    resources_per_bundle=self._config.reserved,
                    head_reservation_timeout_s=POLL_SECONDS,
                )
            except (TimeoutError, RuntimeError, RayError) as error:
                logger.info("no free slice %s yet: %s", self._config.tpu_slice, error)
                self._stopped.wait(1.0)
                continue
            self._slices.append(reserved)
            group = cast(PlacementGroup, reserved.placement_group)
            complete = group.ready()
            while not self._stopped.is_set():
                if ray.wait([complete], timeout=POLL_SECONDS)[0]:
                    reserved.release_head_pgs()
                    return group
        return None
