# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Checks before a run opens devices: that Ray is installed, and that its cluster answers. Ray is not started here."""

import contextlib
import socket
from collections.abc import Iterator

from marin_rl.config.sections import Mode
from marin_rl.config.train_config import TrainConfig
from marin_rl.utils.devices.slice_names import SliceName, parse_slice
from marin_rl.utils.errors import UserError
from marin_rl.utils.user_code import require_extra

CONNECT_TIMEOUT = 10.0
"""Timeout of the connection to the head node of a cluster, in seconds."""


class NoClusterError(UserError):
    """Raised when there is no Ray cluster at the configured address."""


def ray_version(named: SliceName) -> str:
    """Return Ray's name of the generation of a slice, such as v5litepod."""
    return {"v5e": "v5litepod"}.get(named.generation.name, named.generation.name)


def check_ray(config: TrainConfig) -> None:
    """Check that Ray is installed, and knows the TPU slices of the workers; runs without workers need no Ray.

    Args:
        config: mode and workers.

    Raises:
        MissingPackageError: if it is not installed.
        UserError: if it knows no slices of this shape.
    """
    if config.mode is Mode.SYNC:
        return
    require_extra("ray", "mode: async")
    if config.workers.tpu_slice is None:
        return
    from ray._private.accelerators.tpu import TPUAcceleratorManager

    named = parse_slice(config.workers.tpu_slice)
    if not TPUAcceleratorManager.is_valid_tpu_accelerator_topology(ray_version(named), named.shape_text):
        raise UserError(
            f"workers.tpu_slice is {config.workers.tpu_slice!r}, but Ray knows no {named.generation.name} slices of "
            f"shape {named.shape_text}; use another shape"
        )


def find_cluster(address: str) -> None:
    """Check that a cluster address accepts connections. Ray itself would retry for minutes and end the process.

    Args:
        address: `host:port`, or `auto`, which only Ray can resolve.

    Raises:
        NoClusterError: if the connection fails.
    """
    if address != "auto":
        host, _, port = address.rpartition(":")
        with no_cluster(address):
            socket.create_connection((host.strip("[]"), int(port)), CONNECT_TIMEOUT).close()


@contextlib.contextmanager
def no_cluster(address: str) -> Iterator[None]:
    """Raise connection errors of the block as `NoClusterError`."""
    try:
        yield
    except OSError as error:
        raise NoClusterError(
            f"no Ray cluster responds at ray_address {address!r} ({error}); start it with `ray start --head` on its "
            "first machine, correct ray_address, or leave it out"
        ) from error
