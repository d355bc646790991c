# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""The training hosts of one run, all on this machine: a process with two devices for each."""

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import marin_rl
from experiments.soak import LiveRun
from tests.free_port import free_port
from tests.tiny_run import TinyRun

PATIENCE = 900.0
"""Seconds that anything may take on a busy machine."""


def hosts(run: TinyRun, count: int, folders: Sequence[Path] = ()) -> list[LiveRun]:
    """The run's command for each of so many hosts, the main one first; several find one another at a port.

    Args:
        run: its command.
        count: how many hosts.
        folders: the working directory of each; by default this process's for all.
    """
    distributed = {
        "coordinator_address": f"127.0.0.1:{free_port()}",
        "num_processes": count,
        "initialize_jax_distributed": "true",
    }
    environment = {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
        "PYTHONPATH": Path(marin_rl.__file__).parents[1],
    }
    prefix = ["env", *(f"{name}={value}" for name, value in environment.items())]
    found = []
    for index in range(count):
        own = distributed | {"process_id": index} if count > 1 else {}
        flags = [text for name, value in own.items() for text in (f"--trainer.distributed.{name}", str(value))]
        said = run.path.parent / f"said-{count}-{index}.txt"
        place = ["env", "-C", str(folders[index])] if folders else []
        found.append(LiveRun([*run.argv, *flags], run.path, said, PATIENCE, [*place, *prefix]))
    return found


@contextlib.contextmanager
def started(training: Sequence[LiveRun]) -> Iterator[None]:
    """All of them, while they run; ended at the end of the block."""
    try:
        for host in training:
            host.start()
        yield
    finally:
        for host in training:
            host.kill()
