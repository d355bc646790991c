# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Jobs of an Iris cluster: submit a command of this package, follow its log, and report how it ended."""

import contextlib
import hashlib
import itertools
import json
import logging
import os
import re
import shlex
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import click
import httpx
import yaml
from connectrpc.errors import ConnectError
from finelog.errors import StatsError
from iris.cli.connect import connect_controller
from iris.client.client import IrisClient, Job
from iris.cluster.constraints import preemptible_constraint, zone_constraint
from iris.cluster.tpu_topology import TPU_TOPOLOGIES
from iris.cluster.types import Entrypoint, EnvironmentSpec
from iris.resources.state import JobState, is_job_finished
from iris.rpc import job_pb2
from rigging.timing import Timestamp

from marin_rl.pods.config import LaunchConfig
from marin_rl.utils.errors import UserError
from marin_rl.utils.iris_hosts import gang, host_resources
from marin_rl.utils.signals import interruptible

TASK = "marin_rl.pods.task"
"""Module that runs a command in a task."""
POLL_SECONDS = 1.0
"""Seconds between two polls of a job."""
RETRY_SECONDS = 10.0
"""Seconds until the next attempt to read a log."""
CONNECT_TIMEOUT = 20.0
"""Timeout of the first connection to a cluster in seconds. Iris's client would try again for half an hour."""


class ClusterError(UserError):
    """The cluster is unknown, unreachable, or refuses the job. The message names the cause."""


def run_launch(
    config: LaunchConfig, command: Sequence[str], name: str, *, preemptible: bool, report: Callable[[str], None]
) -> int:
    """Submit a job, or find the one of this name that runs, and follow it to its end.

    Args:
        config: the launch; without a cluster, one is started in this process.
        command: a command of this package with its arguments.
        name: name of the job.
        preemptible: whether to use preemptible slices only.
        report: prints a line.

    Returns:
        Exit status: 0 if the job succeeded, 1 if not, 130 after an interrupt, after which the job of a cluster goes on.

    Raises:
        ClusterError: if the cluster cannot be reached, or refuses the job.
        KeyboardInterrupt: after SIGINT or SIGTERM if the cluster is in this process; the job has ended.
    """
    # A cluster in this process must be closed after SIGTERM, too.
    with interruptible(), open_cluster(config.cluster) as client:
        started = Timestamp.now()
        with _cluster_errors("the job was not submitted"):
            job = submit(client, config, command, name, preemptible=preemptible)
            submitted = job.status().submitted_at
        if submitted is not None and submitted < started:
            report(f"job {job.job_id} runs already, with the arguments of its start")
        if config.cluster is not None:
            for action in ("describe", "logs", "cancel"):
                report(_iris_command(config.cluster, action, job))
        try:
            with _cluster_errors("the job goes on, but cannot be followed"):
                return _follow(job, submitted, report)
        except KeyboardInterrupt:
            if config.cluster is None:
                raise
            report("interrupted; the job goes on, and the same command follows it again")
            return 130


def job_name(command: Sequence[str], run_dir: str | None) -> str:
    """Return the name of a job, which all starts with the same run directory share.

    Args:
        command: a command of this package with its arguments.
        run_dir: run directory; None if the command has none, and its arguments tell jobs apart.

    >>> job_name(["train", "--config", "a.yaml"], "gs://bucket/runs/My Run")
    'train-my-run-baf4b87e'
    """
    identity = shlex.join(command) if run_dir is None else run_dir.rstrip("/")
    label = "" if run_dir is None else f"-{identity.rsplit('/', 1)[-1]}"
    readable = re.sub(r"[^a-z0-9]+", "-", f"{command[0]}{label}".lower())[:48].strip("-")
    return f"{readable}-{hashlib.sha256(identity.encode()).hexdigest()[:8]}"


@contextlib.contextmanager
def open_cluster(cluster: str | None) -> Iterator[IrisClient]:
    """Connect to a cluster: by name, YAML file or address of its controller; None starts one in this process.

    Raises:
        ClusterError: if it is unknown or cannot be reached.
    """
    logging.getLogger("finelog.client.log_client").setLevel(logging.ERROR)
    with contextlib.ExitStack() as opened:
        where: dict[str, Any] = {"cluster_name": cluster}
        if cluster is None:
            logging.getLogger("iris").setLevel(logging.ERROR)
            folder = Path(opened.enter_context(tempfile.TemporaryDirectory(prefix="marin_rl-")))
            (folder / "local.yaml").write_text(yaml.safe_dump(local_cluster()), encoding="utf-8")
            where = {"config_file": folder / "local.yaml"}
        elif "://" in cluster:
            where = {"controller_url": cluster}
        elif _is_file(cluster):
            where = {"config_file": Path(cluster)}
        shown = "on this machine" if cluster is None else repr(cluster)
        with _cluster_errors(f"cannot connect to the cluster {shown}"):
            controller = opened.enter_context(connect_controller(**where))
            httpx.get(f"{controller.url}/health", timeout=CONNECT_TIMEOUT)
            # Local hosts run in this folder, which may be too large to be copied.
            copied = None if cluster is None else Path.cwd()
            remote = IrisClient.remote(controller.url, workspace=copied, credentials=controller.credentials)
        yield opened.enter_context(remote)


def local_cluster() -> dict[str, Any]:
    """Return a cluster of processes on this machine, as in a YAML file: slices of all types, and CPU hosts."""
    ample = {"cpu": 128, "ram": "1024GB", "disk": "10240GB", "capacity_type": "on-demand"}
    groups = {"cpu": (1, {**ample, "device_type": "cpu"})}
    for known in TPU_TOPOLOGIES:
        device = {"device_type": "tpu", "device_variant": known.name, "device_count": known.chips_per_vm}
        groups[known.name] = (known.vm_count, {**ample, **device})
    soon = {"milliseconds": 300}
    return {
        "name": "marin_rl-local",
        "platform": {"local": {}},
        "controller": {"local": {"port": 0}},
        "worker_provider": {},
        "defaults": {"autoscaler": {"evaluation_interval": soon, "scale_up_delay": soon}},
        "scale_groups": {
            name: {
                "num_vms": hosts,
                "max_slices": 64,
                "resources": resources,
                "slice_template": {"num_vms": hosts, "local": {}},
            }
            for name, (hosts, resources) in groups.items()
        },
    }


@contextlib.contextmanager
def _cluster_errors(what: str) -> Iterator[None]:
    """Raise errors of Iris's client as `ClusterError`."""
    try:
        yield
    except click.ClickException as error:
        raise ClusterError(f"{what}: {error.format_message()}") from error
    except ConnectError as error:
        raise ClusterError(f"{what}: {error.message}") from error
    # Iris takes a file for a mapping, whatever it contains.
    except (ValueError, OSError, AttributeError, yaml.YAMLError, httpx.HTTPError) as error:
        raise ClusterError(f"{what}: {error}") from error


def submit(client: IrisClient, config: LaunchConfig, command: Sequence[str], name: str, *, preemptible: bool) -> Job:
    """Submit a job, or return the one of this name that runs; arguments as of `run_launch`."""
    kind = config.kind
    environment = {"PYTHONUNBUFFERED": "1"}
    if config.cluster is None:
        # Local hosts have no chips, and Iris asks jax for them.
        devices = 1 if kind is None else int(kind.chips_per_host)
        flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={devices}".strip()
        environment |= {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    return client.submit(
        # As one argument, because Iris replaces the beginning of arguments such as /tmp/a on a local host.
        Entrypoint.from_command("python", "-m", TASK, json.dumps(list(command))),
        name,
        host_resources(kind, config.cpu, config.memory_gb, config.disk_gb),
        environment=EnvironmentSpec(
            env_vars=environment | config.env,
            secrets={secret: os.environ[secret] for secret in config.secrets},
            extras=[*config.extras, *([] if kind is None else ["tpu"])],
        ),
        constraints=[
            *([preemptible_constraint()] if preemptible else []),
            *([] if config.zone is None else [zone_constraint(config.zone)]),
        ],
        **gang(kind),
        max_retries_failure=config.max_retries,
        max_task_failures=config.max_retries,
        existing_job_policy=job_pb2.EXISTING_JOB_POLICY_KEEP,
    )


def _follow(job: Job, submitted: Timestamp | None, report: Callable[[str], None]) -> int:
    """Print why a job waits, its log until its end, and how it ended."""
    reason = ""
    while (status := job.status()).state is JobState.PENDING:
        if status.pending_reason != reason and (reason := status.pending_reason):
            report(f"the job waits: {reason}")
        time.sleep(POLL_SECONDS)
    printed, is_read = 0, False
    while not is_read:
        # A job keeps the log of an earlier one of its name.
        entries = job.follow_logs(start=submitted, poll_interval=POLL_SECONDS)
        try:
            for entry in itertools.islice(entries, printed, None):
                printed += 1
                report(f"[{entry.task_id.task_index}] {entry.data}")
            is_read = True
        except StatsError as error:
            # Such as during a restart of the controller. Iris repeats other requests itself.
            report(f"the log cannot be read: {error}")
            is_read = is_job_finished(job.state_only())
            time.sleep(RETRY_SECONDS)
    status = job.wait(timeout=float("inf"), raise_on_failure=False)
    report(f"job {job.job_id} {status.state.value}: {status.error_message}".rstrip(": "))
    return 0 if status.state is JobState.SUCCEEDED else 1


def _is_file(cluster: str) -> bool:
    return cluster.endswith((".yaml", ".yml"))


def _iris_command(cluster: str, action: str, job: Job) -> str:
    option = "--controller-url" if "://" in cluster else "--config" if _is_file(cluster) else "--cluster"
    return shlex.join(["iris", option, cluster, "job", action, str(job.job_id)])
