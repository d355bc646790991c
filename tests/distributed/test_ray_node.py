# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from marin_rl.distributed import ray_node
from marin_rl.distributed.ray_node import RayStartError, connected_to_local_node

FORKS = """
import os
forks = []
os.register_at_fork(before=lambda: forks.append(1))
os.environ["RAY_ADDRESS"] = "127.0.0.1:1"
import ray
from marin_rl.distributed.ray_node import connected_to_local_node
with connected_to_local_node(3):
    print(len(ray.nodes()), int(ray.cluster_resources()["CPU"]))
print(os.environ["RAY_ADDRESS"], len(forks), ray.is_initialized())
"""


SIGTERM = """
import os, signal
received = []
signal.signal(signal.SIGTERM, lambda number, frame: received.append(number))
from marin_rl.distributed.ray_node import connected_to_local_node
with connected_to_local_node(1):
    os.kill(os.getpid(), signal.SIGTERM)
    # Ray's libraries abort the process by a timer.
    print(*received, "pending:", signal.alarm(0), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
def test_sigterm_reaches_the_program_and_nothing_is_left_if_it_is_killed() -> None:
    # Ray's sockets need a short path.
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "TMPDIR": folder}
        # The output ends with the last process that Ray has started.
        said = subprocess.run(
            [sys.executable, "-c", SIGTERM], capture_output=True, text=True, check=False, timeout=600, env=environment
        )
        assert said.returncode == -9, said.stderr
        assert said.stdout.splitlines() == ["15 pending: 0"]
        assert os.listdir(folder) == []


@pytest.mark.slow
def test_node_is_started_without_forking_the_trainer() -> None:
    """Run in a separate process, because fork handlers cannot be removed."""
    said = subprocess.run([sys.executable, "-c", FORKS], capture_output=True, text=True, check=False, timeout=600)
    assert said.returncode == 0, said.stderr
    assert said.stdout.splitlines() == ["1 3", "127.0.0.1:1 0 False"]


def test_node_start_failure_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_node.sys, "executable", "/bin/false")
    expected = r"Ray did not start on this machine: `/bin/false .*` ended 3 times, with status 1, 1, 1"
    with pytest.raises(RayStartError, match=expected), connected_to_local_node(1):
        raise AssertionError


def test_node_that_does_not_stop_is_killed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program = tmp_path / "node"
    program.write_text(f"#!/bin/sh\necho $$ > {tmp_path / 'pid'}\necho ready\nexec sleep 1000\n")
    program.chmod(0o755)
    monkeypatch.setattr(ray_node.sys, "executable", str(program))
    monkeypatch.setattr(ray_node, "STOP_SECONDS", 0.1)
    monkeypatch.setattr(ray_node.ray, "init", lambda **settings: None)
    with connected_to_local_node(1):
        pid = int((tmp_path / "pid").read_text())
        os.kill(pid, 0)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_home_that_cannot_hold_the_token_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("HOME", str(tmp_path / "file"))
    monkeypatch.delenv("RAY_AUTH_TOKEN", raising=False)
    monkeypatch.delenv("RAY_AUTH_TOKEN_PATH", raising=False)
    with pytest.raises(RayStartError, match=r"Ray cannot write its token .*; set HOME"), connected_to_local_node(1):
        raise AssertionError


def test_sockets_get_a_short_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    used: list[str] = []
    monkeypatch.setattr(ray_node, "_start", lambda folder, num_cpus: used.append(folder))
    monkeypatch.setattr(ray_node, "_stop", lambda node: None)
    monkeypatch.setattr(ray_node.ray, "init", lambda **settings: None)
    long = tmp_path / ("x" * 100)
    long.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(long))
    with connected_to_local_node(1):
        (folder,) = used
        socket = f"{folder}/session_2026-01-01_00-00-00_000000_1234567/sockets/plasma_store"
        assert len(socket) <= 107
    assert not Path(folder).exists()
