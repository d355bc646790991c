# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""A real cluster of Iris in the test process, whose hosts are processes of this machine. Needs Python 3.12."""

import contextlib
import gc
import os
import signal
import socket
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from iris.client.client import IrisClient, Job
from iris.cluster.config import load_config
from iris.cluster.local_cluster import LocalCluster
from iris.cluster.types import JobName

from marin_rl.pods import iris_jobs
from marin_rl.pods.config import LaunchConfig
from marin_rl.pods.iris_jobs import job_name, local_cluster, run_launch, submit
from tests.cpu_host import cpu_host
from tests.pods import held_task
from tests.pods.held_task import hold_file
from tests.tiny_run import TinyRun

TIMEOUT = 400.0
"""Timeout in seconds, for a busy machine."""


class TestCluster:
    """A running cluster."""

    __test__ = False

    def __init__(self, folder: Path) -> None:
        file = folder / "cluster.yaml"
        file.write_text(yaml.safe_dump(local_cluster()))
        self._cluster = LocalCluster(load_config(file))
        self.address = self._cluster.start()
        self.client = IrisClient.remote(self.address)

    def close(self) -> None:
        # It leaves pipes to processes that have ended to garbage collection.
        with warnings.catch_warnings(action="ignore", category=ResourceWarning):
            self.client.__exit__(None, None, None)
            self._cluster.close()
            gc.collect()

    def launch(self, command: Sequence[str], devices: int = 1, **settings: Any) -> tuple[int, list[str]]:
        """Run a command as a job, in the main thread; return the exit status and the printed lines."""
        config, lines = self._config(devices, settings), list[str]()
        return run_launch(config, command, job_name(command, None), preemptible=False, report=lines.append), lines

    def submit(self, command: Sequence[str]) -> None:
        """Submit the job of a command without following it."""
        submit(self.client, self._config(1, {}), command, job_name(command, None), preemptible=False)

    def _config(self, devices: int, settings: dict[str, Any]) -> LaunchConfig:
        cache = {"JAX_COMPILATION_CACHE_DIR": os.environ.get("JAX_COMPILATION_CACHE_DIR", "")}
        environment = {**cpu_host(devices), **cache, **settings.pop("env", {})}
        return LaunchConfig(cluster=self.address, env=environment, **settings)

    def job(self, command: Sequence[str]) -> Job:
        """Return the job of a command."""
        [name] = [job.job_id for job in self.client.list_jobs() if str(job.job_id).endswith(job_name(command, None))]
        return self.client.job(JobName.from_string(str(name)))

    def preempt_slice_of(self, job: Job) -> None:
        """End all hosts of the slice on which a job runs, as Google does.

        First their servers, because a host that outlives another would report that its process has failed.
        """
        platform = self._cluster._autoscaler._platform
        slices = getattr(platform, "_gcp", None) or platform._gcp_service
        worker, tasks = job.tasks()[0].status().worker_id, f"/{job.job_id.name}/"
        preempted = next(found for name, found in slices._local_slices.items() if name in worker)
        for host in preempted._workers:
            host._server.should_exit = True
        until(lambda: not any(is_served(address) for address in preempted._addresses))
        left = set(processes(tasks))
        preempted.terminate()
        until(lambda: not left.intersection(processes(tasks)))


def is_served(address: str) -> bool:
    """Whether a server accepts connections at an address of this machine, HOST:PORT."""
    host, port = address.rsplit(":", 1)
    with socket.socket() as client:
        return client.connect_ex((host, int(port))) == 0


def processes(task: str) -> list[int]:
    """List the processes of the tasks whose id, such as /root/JOB/0:0, contains a text."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            variables = (folder / "environ").read_bytes().split(b"\0")
            names = [variable for variable in variables if variable.startswith(b"IRIS_TASK_ID=")]
            state = (folder / "stat").read_text().rpartition(")")[2].split()[0]
            if names and task.encode() in names[0] and state not in "ZX":
                found.append(int(folder.name))
    return sorted(found)


def until(holds: Callable[[], object]) -> None:
    """Wait until a condition holds."""
    deadline = time.monotonic() + TIMEOUT
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@contextlib.contextmanager
def meanwhile(holds: Callable[[], object], action: Callable[[], object]) -> Iterator[None]:
    """Do something in another thread once a condition holds; it must have happened by the end of the block."""
    failed: list[BaseException] = []

    def run() -> None:
        try:
            until(holds)
            action()
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    yield
    thread.join(TIMEOUT)
    assert not thread.is_alive()
    assert not failed, failed


@contextlib.contextmanager
def at_step(run: TinyRun, step: int, action: Callable[[], object]) -> Iterator[None]:
    """Do something to the run of a job in another thread, before the job can record a step, and let it go on."""
    hold = hold_file(run.path, step)
    hold.touch()

    def act() -> None:
        try:
            action()
        finally:
            hold.unlink()

    with pytest.MonkeyPatch.context() as patch, meanwhile(lambda: steps_recorded(run, step - 1), act):
        patch.setattr(iris_jobs, "TASK", held_task.__name__)
        yield


def steps_recorded(run: TinyRun, count: int) -> bool:
    """Whether a run has recorded this number of steps after its start."""
    return (run.path / "metrics.jsonl").exists() and len(run.records()) > count


def end_process(task: str, number: signal.Signals) -> None:
    """Send a signal to the first process of a task."""
    os.kill(processes(task)[0], number)
