# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Ray node on this machine, started from a process without JAX.

Ray starts the processes of a node with `fork`, which may deadlock in a process with JAX threads. So the trainer runs
this module in a subprocess, which starts the node and stops it when the trainer ends for any reason.
"""

import contextlib
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ray

from marin_rl.utils.errors import UserError, require_threads
from marin_rl.utils.logs import without_message

logger = logging.getLogger(__name__)

SETTINGS: dict[str, Any] = {
    "_node_ip_address": "127.0.0.1",
    "log_to_driver": False,
    "logging_level": logging.ERROR,
    "configure_logging": False,
}
"""Arguments of `ray.init` for the process that starts the node and the one that connects to it."""
READY = "ready"
"""Line that the subprocess prints when the node is running; Ray may print other lines before it."""
STOP_SECONDS = 60.0
"""Seconds that a node has to stop before its processes are killed."""
MIN_THREADS = 256
"""Processes and threads of a node with a worker."""
MAX_SOCKETS_PARENT = 107 - len("/ray-12345678/session_2026-01-01_00-00-00_000000_1234567/sockets/plasma_store")
"""Longest path, in bytes, of a folder in which Ray can create its sockets; Linux allows 107 for a socket."""
ATTEMPTS = 3
"""Number of attempts to start a node: Ray gives up after 30 s, which a busy machine may exceed."""


class RayStartError(UserError):
    """Raised when Ray cannot be started on this machine; see Ray's output for the reason."""


@contextlib.contextmanager
def connected_to_local_node(num_cpus: int) -> Iterator[None]:
    """Run a Ray node on this machine, with `num_cpus` CPUs to assign, during the block, and connect to it.

    Raises:
        RayStartError: if the node does not start.
        UserError: if the user may start too few processes and threads.
    """
    require_threads(MIN_THREADS)
    _require_token_folder()
    with contextlib.ExitStack() as opened:
        folder = opened.enter_context(
            tempfile.TemporaryDirectory(prefix="ray-", dir=_sockets_parent(), ignore_cleanup_errors=True)
        )
        opened.callback(_stop, _start(folder, num_cpus))
        # Ray reads the node's address from the folder, unless RAY_ADDRESS names another cluster.
        other = os.environ.pop("RAY_ADDRESS", None)
        try:
            connect(address="auto", _temp_dir=folder, **SETTINGS)
        finally:
            if other is not None:
                os.environ["RAY_ADDRESS"] = other
        try:
            yield
        finally:
            ray.shutdown()


def _require_token_folder() -> None:
    """Check that Ray can store the token with which its processes authenticate each other."""
    if {"RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"} & os.environ.keys():
        return
    token = Path(os.path.expanduser("~"), ".ray", "auth_token")
    try:
        token.parent.mkdir(parents=True, exist_ok=True)
        is_usable = os.access(token if token.exists() else token.parent, os.R_OK | os.W_OK)
    except OSError:
        is_usable = False
    if not is_usable:
        raise RayStartError(f"Ray cannot write its token {str(token)!r}; set HOME to a folder that this user can write")


def _sockets_parent() -> str:
    """Return the folder for temporary files, or /tmp if its path is too long for Ray's sockets."""
    parent = tempfile.gettempdir()
    return parent if len(os.fsencode(parent)) <= MAX_SOCKETS_PARENT else "/tmp"


_TOKEN_LOGGER = "ray._private.authentication.authentication_token_setup"


def connect(**settings: Any) -> None:
    """Connect to a node with these arguments of `ray.init`, and keep the program's handler of SIGTERM.

    Ray replaces it by one that exits the program, and by one of its libraries that aborts the process after 3 seconds,
    before a run has saved its last step.
    """
    handler = signal.getsignal(signal.SIGTERM)
    try:
        # The node of `_start` has a token, which Ray finds by itself.
        with without_message(_TOKEN_LOGGER, "Token authentication is enabled"):
            ray.init(**settings)
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler or signal.SIG_DFL)


def _start(folder: str, num_cpus: int) -> "subprocess.Popen[str]":
    """Start the subprocess of a node."""
    command = [sys.executable, "-m", __name__, folder, str(num_cpus)]
    # Ray's default for a single-machine node; setting it explicitly avoids a printed line.
    environment = {"RAY_AUTH_MODE": "token", **os.environ}
    statuses = []
    for _ in range(ATTEMPTS):
        # A separate session: an interrupt at the terminal must reach only the trainer, which stops its workers first.
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
        f"{', '.join(statuses)}; see its output for the reason"
    )


def _stop(node: "subprocess.Popen[str]") -> None:
    # The node stops when its standard input ends. It would wait for a reader of its output if that was open and full.
    assert node.stdin is not None
    assert node.stdout is not None
    node.stdin.close()
    node.stdout.close()
    try:
        node.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        logger.warning("the Ray node of this run did not stop within %g s, and is killed", STOP_SECONDS)
        os.killpg(node.pid, signal.SIGKILL)
        node.wait()


def serve(folder: Path, num_cpus: int) -> None:
    """Run a node until standard input ends.

    `folder` is for Ray's sockets and logs, and for the address of the node; removed at the end. Ray may assign
    `num_cpus` CPUs.
    """
    # Ray would keep a record of each of the last 100,000 calls for its dashboard.
    unrecorded = {"task_events_report_interval_ms": 0}
    ray.init(
        address="local",
        _temp_dir=str(folder),
        _system_config=unrecorded,
        num_cpus=num_cpus,
        include_dashboard=False,
        **SETTINGS,
    )
    # Ray reads the address of a running node from this file.
    (folder / "ray_current_cluster").write_text(ray.get_runtime_context().gcs_address, encoding="utf-8")
    print(READY, flush=True)
    sys.stdin.read()
    ray.shutdown()
    # A trainer that was killed does not remove it.
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    serve(Path(sys.argv[1]), int(sys.argv[2]))
