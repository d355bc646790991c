# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Training hosts of one run, as local processes."""

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from experiments.lab.soak import LiveRun
from tests.cpu_host import cpu_host
from tests.fork_server import popen
from tests.free_port import free_port
from tests.tiny_run import TinyRun

TIMEOUT = 900.0
"""Timeout in seconds, for a busy machine."""


def hosts(run: TinyRun, count: int, folders: Sequence[Path] = (), devices: int = 2) -> list[LiveRun]:
    """Create the processes of a run, main process first; several connect by a local port.

    Args:
        run: the run.
        count: number of hosts.
        folders: working directory of each host; by default that of this process.
        devices: devices of each host.

    Returns:
        The processes, not started.
    """
    processes = []
    for index, flags in enumerate(distributed_flags(count, "trainer.distributed")):
        output = run.path.parent / f"output-{count}-{index}.txt"
        processes.append(
            LiveRun(
                [*run.argv, *flags],
                run.path,
                output,
                TIMEOUT,
                environment=cpu_host(devices),
                folder=folders[index] if folders else None,
                popen=popen,
            )
        )
    return processes


def distributed_flags(count: int, section: str) -> list[list[str]]:
    """Return the flags of each of several processes, which connect by a local port; none for a single process."""
    shared = {
        "coordinator_address": f"127.0.0.1:{free_port()}",
        "num_processes": count,
        "initialize_jax_distributed": "true",
    }
    settings = [shared | {"process_id": index} for index in range(count)] if count > 1 else [{}]
    return [[text for name, value in own.items() for text in (f"--{section}.{name}", str(value))] for own in settings]


@contextlib.contextmanager
def started(training: Sequence[LiveRun]) -> Iterator[None]:
    """Start all hosts, and kill them at the end of the block."""
    try:
        for host in training:
            host.start()
        yield
    finally:
        for host in training:
            host.kill()
