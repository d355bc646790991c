# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""The script on the hosts: a job is started once, receives one signal, is killed if it must be, and has a status."""

import contextlib
import fcntl
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from importlib import resources
from pathlib import Path

import pytest

from marin_rl.pods.gcloud import script_digest
from tests.pods.conftest import wait_until

ENDLESS = "echo >>../begun; while :; do sleep 0.02; done\n"
COUNTING = f"trap 'echo TERM >>../received; exit 0' TERM; {ENDLESS}"
IGNORING = f"trap '' TERM; {ENDLESS}"


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Path]:
    """A folder with an uploaded script; its jobs are killed at the end of the test."""
    (tmp_path / "upload").mkdir()
    (tmp_path / "code").mkdir()
    (tmp_path / "upload" / "environment.sh").write_text("")
    shutil.copy(resources.files("marin_rl.pods") / "host.sh", tmp_path / "upload")
    yield tmp_path
    for file in tmp_path.glob("jobs/*/pids"):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(int(file.read_text().split()[0]), signal.SIGKILL)


def call(host: Path, *arguments: str) -> str:
    return subprocess.check_output(["bash", host / "upload" / "host.sh", *arguments], text=True)


def start(host: Path, script: str) -> None:
    (host / "upload" / "train.sh").write_text(script)
    call(host, "start", "train")


def state(host: Path) -> str:
    word, job, _, state, digest = call(host, "status").split()
    assert (word, job) == ("status", "train")
    assert digest == script_digest((host / "jobs" / "train" / "command.sh").read_text())
    return state


@pytest.mark.medium
def test_a_job_is_started_once_and_receives_one_signal(host: Path) -> None:
    start(host, COUNTING)
    start(host, COUNTING)
    wait_until((host / "begun").exists)
    assert state(host) == "running"
    call(host, "stop", "train", "60")
    call(host, "stop", "train", "60")
    assert state(host) == "0"
    assert (host / "received").read_text() == "TERM\n"
    assert (host / "begun").read_text() == "\n"
    start(host, "exec true\n")
    wait_until(lambda: state(host) == "0")


@pytest.mark.parametrize(("script", "expected"), [("exec true\n", "0"), ("exit 3\n", "3"), ("kill -9 $$\n", "137")])
def test_exit_status(host: Path, script: str, expected: str) -> None:
    start(host, script)
    wait_until(lambda: state(host) != "running")
    assert state(host) == expected


def test_a_job_that_ignores_the_signal_is_killed(host: Path) -> None:
    start(host, IGNORING)
    wait_until((host / "begun").exists)
    call(host, "stop", "train", "0.1")
    assert state(host) == "stopped"


def test_a_job_without_its_shell_runs_and_can_be_stopped(host: Path) -> None:
    start(host, COUNTING)
    wait_until((host / "begun").exists)
    os.kill(int((host / "jobs" / "train" / "pids").read_text().split()[0]), signal.SIGKILL)
    assert state(host) == "running"
    call(host, "stop", "train", "60")
    assert (host / "received").read_text() == "TERM\n"
    assert state(host) == "stopped"


def test_a_job_that_ended_with_its_host_was_killed(host: Path) -> None:
    start(host, COUNTING)
    os.killpg(int((host / "jobs" / "train" / "pids").read_text().split()[0]), signal.SIGKILL)
    wait_until(lambda: state(host) != "running")
    assert state(host) == "killed"


def test_concurrent_checks_of_a_job_do_not_see_each_other(host: Path) -> None:
    (host / "jobs" / "train").mkdir(parents=True)
    (host / "jobs" / "train" / "command.sh").write_text("true\n")
    with (host / "jobs" / "train" / "lock").open("w") as lock:
        for kind, expected in ((fcntl.LOCK_SH, "killed"), (fcntl.LOCK_EX, "running")):
            fcntl.flock(lock, kind)
            assert state(host) == expected
    assert "no job has started" in call(host, "logs", "5")


def test_a_script_that_cannot_be_uploaded_is_an_error(host: Path) -> None:
    with pytest.raises(subprocess.CalledProcessError):
        call(host, "start", "absent")
