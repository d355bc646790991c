# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""What a job of Iris asks of its hosts, and gets there. Iris takes seconds to import."""

import os
from collections.abc import Collection
from typing import Any

from iris.cluster.types import CoschedulingConfig, ResourceSpec, tpu_device
from rigging.secrets import list_secret_names, secret_path

from marin_rl.utils.devices.slice_names import SliceName


def host_resources(
    kind: SliceName | None, cpu: float | None = None, memory_gb: int | None = None, disk_gb: int = 64
) -> ResourceSpec:
    """Return what a process gets of its host: all chips of a TPU host; None for a CPU host.

    By default it gets 4 CPUs and 16 GB of memory, on a TPU host 8 and 32 for each chip, which hosts of all kinds have.
    """
    chips = 0 if kind is None else int(kind.chips_per_host)
    return ResourceSpec(
        cpu=cpu or 8 * chips or 4,
        memory=f"{memory_gb or 32 * chips or 16}GB",
        disk=f"{disk_gb}GB",
        device=None if kind is None else tpu_device(kind.type),
    )


def gang(kind: SliceName | None) -> dict[str, Any]:
    """Return the options of a job with a process on every host of a slice, which start and end together."""
    if kind is None:
        return {}
    return {"replicas": kind.num_hosts, "coscheduling": CoschedulingConfig(group_by="tpu-name")}


def set_secrets(hidden: Collection[str] = ()) -> None:
    """Set an environment variable for each secret of this task, as the libraries that use them expect.

    Iris gives a task its secrets as files. Those in `hidden` stay there, so that other processes do not inherit them.
    """
    for name in list_secret_names():
        if name not in hidden:
            # Not as text, which would change the ends of lines.
            os.environ[name] = secret_path(name).read_bytes().decode()
