# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Rollout workers as jobs of Iris, on slices or CPUs of another kind than the trainer's; see `ray_workers`.

The coordinator runs in the trainer's process, whose end ends the workers. Iris starts a worker again that fails or is
preempted.
"""

import contextlib
import dataclasses
import logging
import threading
import time
import uuid
from collections.abc import Iterator
from typing import Any

from connectrpc.code import Code
from connectrpc.errors import ConnectError
from iris.actor.client import ActorClient
from iris.actor.server import ActorServer
from iris.client.client import Job, iris_ctx
from iris.cluster.client.job_info import JobInfo, get_job_info
from iris.cluster.types import Entrypoint, EnvironmentSpec
from iris.resources.state import is_job_finished
from iris.rpc import job_pb2
from rigging.secrets import get_secret

from marin_rl.config.input_files import Inputs
from marin_rl.config.train_config import TrainConfig
from marin_rl.config.workers_config import CPU, WeightTransferConfig, WorkersConfig, parse_worker_slice
from marin_rl.distributed.coordinator import Coordinator
from marin_rl.distributed.coordinator_client import ANSWER_SECONDS, CoordinatorClient, LocalClient, RemoteClient
from marin_rl.distributed.worker_program import RunWorker, WorkerProgram
from marin_rl.utils.errors import UserError
from marin_rl.utils.iris_hosts import gang, host_resources, set_secrets
from marin_rl.utils.settings.fields import is_loopback
from marin_rl.utils.settings.section_types import ConfigError
from marin_rl.utils.settings.yaml_text import to_yaml

logger = logging.getLogger(__name__)

SECRET = "MARIN_RL_RUN"
"""Name under which Iris gives the run's secret to workers, in a file."""
MAX_RETRIES = 10
"""Starts of a worker after failures. Preemptions do not count."""
SHUTDOWN_TIMEOUT = 20.0
"""Seconds that workers have to stop before they are killed."""
POLL_SECONDS = 10.0
"""Seconds between two checks of the workers' jobs."""
EXTRA_CONCURRENCY = 64
"""Concurrent calls of the coordinator in addition to one waiting call per worker."""


class NoTaskError(UserError):
    """Raised when this process is no task of Iris, so that it cannot start workers there."""


class IrisClient(RemoteClient):
    """Client of a coordinator in the process of the trainer, which Iris may start again elsewhere."""

    unanswered = (ConnectError, OSError)

    def __init__(self, endpoint: str, no_progress_timeout: float) -> None:
        """Make a client of the coordinator that is registered under this name."""
        super().__init__(no_progress_timeout)
        timeout, resolver = no_progress_timeout + ANSWER_SECONDS, iris_ctx().resolver
        self._connect = lambda: ActorClient(resolver, endpoint, call_timeout=timeout, max_call_attempts=1)
        # One for each thread: a failed call of another thread would take the connection away.
        self._own = threading.local()

    def ask(self, method: str, arguments: Any, named: Any, seconds: float) -> Any:
        """See `RemoteClient`; the time limit is that of the first call."""
        if not hasattr(self._own, "actor"):
            self._own.actor = self._connect()
        return self._own.actor.call_by_name(method, arguments, named)


class TrainerClient(LocalClient):
    """The trainer's client of the coordinator in its process."""

    def __init__(self, coordinator: Coordinator) -> None:
        super().__init__(coordinator)
        self.jobs: list[Job] = []
        """Jobs of the workers."""
        self._checked = time.monotonic()

    def find_failure(self) -> str | None:
        """See `CoordinatorClient`."""
        if time.monotonic() > self._checked + POLL_SECONDS:
            self._checked = time.monotonic()
            for job in self.jobs:
                # That of a slice may fail as one whose hosts failed, and a user may cancel it.
                if is_job_finished(state := job.state_only()):
                    return f"{job.job_id.name} {state.value}: {job.status().error_message}".rstrip(": ")
        return None


@contextlib.contextmanager
def iris_workers(
    run_worker: RunWorker, config: TrainConfig, inputs: Inputs, vocab_size: int, base: str, secret: str
) -> Iterator[CoordinatorClient]:
    """Start coordinator and workers, and stop them at the end of the block; arguments as of `ray_workers`.

    Raises:
        NoTaskError: if this process is no task of Iris.
    """
    task, context = _task(), iris_ctx()
    name = f"coordinator-{uuid.uuid4().hex}"
    client = TrainerClient(Coordinator(config.workers.heartbeat_timeout))
    # Waiting calls of idle workers must not block the heartbeats of other workers.
    server = ActorServer(max_concurrency=config.workers.num_workers + EXTRA_CONCURRENCY)
    server.register(name, client)
    with contextlib.ExitStack() as opened:
        opened.callback(server.stop)
        address = f"{task.advertise_host}:{server.serve_background()}"
        opened.enter_context(context.registry.registered(name, f"http://{address}"))
        opened.callback(_shut_down, client)
        program = WorkerProgram(run_worker, to_yaml(config), inputs, vocab_size, base, "")
        for first in range(0, config.workers.num_workers, _hosts(config.workers)):
            with _refusals():
                client.jobs.append(_submit(config.workers, program, secret, name, first))
        yield client


def reachable_in_cluster(weights: WeightTransferConfig) -> WeightTransferConfig:
    """Return the section with the address at which other tasks reach this one, if it has that of this machine only.

    Raises:
        NoTaskError: if this process is no task of Iris.
    """
    return dataclasses.replace(weights, host=_task().advertise_host) if is_loopback(weights.host) else weights


def _task() -> JobInfo:
    if (task := get_job_info()) is None:
        raise NoTaskError(
            "workers.engine is iris, but this process is no task of Iris; start the run with python -m marin_rl.launch"
        )
    return task


def _hosts(workers: WorkersConfig) -> int:
    return 1 if workers.tpu_slice is None else parse_worker_slice(workers.tpu_slice).num_hosts


def _submit(workers: WorkersConfig, program: WorkerProgram, secret: str, endpoint: str, first: int) -> Job:
    """Submit the job of a worker, or of those on a slice, the first of which has this number."""
    kind = None if workers.tpu_slice is None else parse_worker_slice(workers.tpu_slice)
    client = iris_ctx().client
    assert client is not None
    return client.submit(
        Entrypoint.from_callable(_run, program, endpoint, first),
        f"worker-{first}",
        host_resources(kind, workers.resources.get(CPU, 1.0 if kind is None else None)),
        environment=EnvironmentSpec(secrets={SECRET: secret}),
        **gang(kind),
        max_retries_failure=MAX_RETRIES,
        max_task_failures=MAX_RETRIES,
        # Workers of an earlier start of the trainer have another secret.
        existing_job_policy=job_pb2.EXISTING_JOB_POLICY_RECREATE,
    )


@contextlib.contextmanager
def _refusals() -> Iterator[None]:
    """Raise the refusal of a job that no host of the cluster can run as a mistake in the config."""
    try:
        yield
    except ConnectError as error:
        if error.code is not Code.FAILED_PRECONDITION:
            raise
        raise ConfigError(
            f"the cluster refuses the rollout workers: {error.message}; change workers.tpu_slice or workers.resources"
        ) from error


def _run(program: WorkerProgram, endpoint: str, first: int) -> None:
    """Run a worker in its task."""
    named = dataclasses.replace(program, name=f"worker-{first + _task().task_index}")
    set_secrets(hidden=[SECRET])
    secret = get_secret(SECRET)
    assert secret is not None
    named.run(secret, lambda timeout: IrisClient(endpoint, timeout))


def _shut_down(client: TrainerClient) -> None:
    """Stop the workers, and kill those that do not stop in time."""
    client.call(Coordinator.stop)
    deadline = time.monotonic() + SHUTDOWN_TIMEOUT
    try:
        for job in client.jobs:
            try:
                job.wait(max(deadline - time.monotonic(), 0.1), poll_interval=1.0, raise_on_failure=False)
            except TimeoutError:
                logger.warning("%s did not stop in time", job.job_id)
                job.cancel()
    except ConnectError:
        # Iris ends the workers with this task.
        logger.warning("the workers could not be stopped", exc_info=True)
