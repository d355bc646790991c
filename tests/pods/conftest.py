# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""A cloud project in which slices are folders and hosts are processes of this machine, and code to launch there."""

import dataclasses
import json
import shlex
import subprocess
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from tests.pods.stand_in_gcloud import Cloud

TIMEOUT = 400.0
"""Timeout in seconds, for a busy machine."""
_THREADS: list[threading.Thread] = []
"""Launches in the background."""

TRAIN = """
import os, pathlib, signal, sys, time
control = pathlib.Path(os.environ["CONTROL"])
signal.signal(signal.SIGTERM, lambda *_: (control / "stopped").write_text("") and sys.exit(0) or sys.exit(0))
print("training with", *sys.argv[1:], flush=True)
# Tests wait for this file, and read the output then.
with (control / "starts").open("a") as file:
    file.write(f"{os.environ.get('TOKEN')} {' '.join(sys.argv[1:])}\\n")
while not (control / "finish").exists():
    if (control / "fail").exists():
        sys.exit(3)
    time.sleep(0.02)
"""
"""Stands for marin_rl.train: ends when a file tells it to."""

INSTALL = """
mkdir -p ../venv/bin
cat > ../venv/bin/python <<END
#!/bin/sh
[ "\\$3" = marin_rl.train ] && shift 3 && exec {python} train.py "\\$@"
END
cat > ../venv/bin/ray <<END
#!/bin/sh
echo "\\$@" >> "\\$CONTROL/ray"
exec sleep 600
END
chmod +x ../venv/bin/*
echo "installed with $TOKEN" >> "$CONTROL/installed"
"""
"""Installs a Python that runs another program for `marin_rl.train`."""


@dataclasses.dataclass(frozen=True)
class Project:
    """A git repository with code to launch."""

    folder: Path
    control: Path

    @property
    def options(self) -> list[str]:
        """Options of a launch."""
        install = INSTALL.format(python=shlex.quote(sys.executable))
        return [
            *("--tpu_name", "pod", "--zone", "us-east5-a", "--slices.tpu_type", "v5p-16"),
            *("--code.folder", str(self.folder), "--code.install", json.dumps(install)),
            *("--code.env.CONTROL", str(self.control), "--max_restarts", "1"),
        ]

    def starts(self) -> list[str]:
        """A line for each start of the training program."""
        path = self.control / "starts"
        return path.read_text().splitlines() if path.exists() else []


@pytest.fixture
def cloud(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cloud]:
    """An empty project with a stand-in for gcloud."""
    cloud = Cloud(tmp_path / "cloud")
    program = tmp_path / "programs" / "gcloud"
    program.parent.mkdir()
    program.touch(mode=0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:/usr/local/bin:/usr/bin:/bin")
    names = types.SimpleNamespace(run=cloud.run, DEVNULL=subprocess.DEVNULL, TimeoutExpired=subprocess.TimeoutExpired)
    monkeypatch.setattr("marin_rl.pods.gcloud.subprocess", names)
    yield cloud
    # Launches of a failed test must end before the stand-in is gone.
    cloud.fail("", "ERROR: the test has ended", times=10**9)
    while _THREADS:
        _THREADS.pop().join(TIMEOUT)
    cloud.close()


@pytest.fixture
def project(tmp_path: Path) -> Project:
    """Code in a git repository, with an ignored file."""
    folder, control = tmp_path / "project", tmp_path / "control"
    folder.mkdir()
    control.mkdir()
    files = {"train.py": TRAIN, "run.yaml": "num_steps: 1\n", ".gitignore": "private\n", "private": "key\n"}
    for name, text in files.items():
        (folder / name).write_text(text)
    subprocess.run(["git", "init", "-q", str(folder)], check=True)
    return Project(folder, control)


def in_background(main: Callable[[Sequence[str]], int], arguments: Sequence[str]) -> Callable[[], int]:
    """Run a command line in a thread; returns a function that waits for its exit status."""
    statuses: list[int] = []
    thread = threading.Thread(target=lambda: statuses.append(main(arguments)), daemon=True)
    thread.start()
    _THREADS.append(thread)

    def join() -> int:
        thread.join(TIMEOUT)
        assert not thread.is_alive()
        return statuses[0]

    return join


def wait_until(condition: Callable[[], object]) -> None:
    """Wait until a condition is true."""
    deadline = time.monotonic() + TIMEOUT
    while not condition():
        assert time.monotonic() < deadline, "timeout"
        time.sleep(0.02)
