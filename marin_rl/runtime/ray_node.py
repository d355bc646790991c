# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""A Ray node on this machine, started by a process without JAX.

Ray starts the processes of a node with `fork`, which may deadlock in a process with JAX's threads. So the trainer
runs this module in a process of its own, which starts the node and ends it when the trainer ends, however it ends.
"""

import contextlib
import logging
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ray

from marin_rl.errors import UserError

SETTINGS: dict[str, Any] = {
    "_node_ip_address": "127.0.0.1",
    "log_to_driver": False,
    "logging_level": logging.ERROR,
    "configure_logging": False,
}
"""Settings of `ray.init` for the process that starts the node and for the one that connects to it."""
READY = "ready"
"""The line that the process prints when the node runs; Ray may print other lines before it."""
ATTEMPTS = 3
"""Times to start a node: Ray gives up after 30 s, which a busy machine may exceed."""


class RayStartError(UserError):
    """Ray could not be started on this machine; its own output says why."""


@contextlib.contextmanager
def connected_to_local_node(num_cpus: int) -> Iterator[None]:
    """Run a Ray node on this machine during the block, and connect to it.

    Args:
        num_cpus: CPUs that Ray hands out.

    Raises:
        RayStartError: if the node does not start.
    """
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as folder, _start(folder, num_cpus):
        # The node's address is in its folder; the environment would name another cluster.
        other = os.environ.pop("RAY_ADDRESS", None)
        try:
            ray.init(address="auto", _temp_dir=folder, **SETTINGS)
        finally:
            if other is not None:
                os.environ["RAY_ADDRESS"] = other
        try:
            yield
        finally:
            ray.shutdown()


def _start(folder: str, num_cpus: int) -> "subprocess.Popen[str]":
    """Start the process of a node, which ends when `Popen` closes its standard input at the end of a block."""
    command = [sys.executable, "-m", __name__, folder, str(num_cpus)]
    # As Ray's own default for a node of one machine, about which it would print a line.
    environment = {"RAY_AUTH_MODE": "token", **os.environ}
    statuses = []
    for _ in range(ATTEMPTS):
        # A session of its own: an interrupt at the terminal is for the trainer, which lets its workers end first.
        node = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env=environment,
        )
        assert node.stdout is not None
        if any(line.strip() == READY for line in node.stdout):
            return node
        with node:
            pass
        statuses.append(str(node.returncode))
    raise RayStartError(
        f"Ray did not start on this machine: `{' '.join(command)}` ended {ATTEMPTS} times, with status "
        f"{', '.join(statuses)}; its output says why"
    )


def serve(folder: Path, num_cpus: int) -> None:
    """Run a node until the standard input ends.

    Args:
        folder: for Ray's sockets and logs, and for the address of the node.
        num_cpus: CPUs that Ray hands out.
    """
    ray.init(address="local", _temp_dir=str(folder), num_cpus=num_cpus, include_dashboard=False, **SETTINGS)
    # Where Ray looks for the address of a node that runs already.
    (folder / "ray_current_cluster").write_text(ray.get_runtime_context().gcs_address, encoding="utf-8")
    print(READY, flush=True)
    sys.stdin.read()
    ray.shutdown()


if __name__ == "__main__":
    serve(Path(sys.argv[1]), int(sys.argv[2]))
