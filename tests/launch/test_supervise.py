# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""The supervisor restarts failed commands within a limit, passes signals on once, and documents its exit status."""

import fcntl
import json
import os
import signal
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest

from marin_rl.launch.supervise import SupervisorConfig, exit_status, supervise

# Jax warns of forks if another test has imported it into this process; a supervisor does not import it.
pytestmark = pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning")

TIMEOUT = 400.0
"""Timeout in seconds, for a busy machine."""

COUNT = """
import sys, pathlib
file = pathlib.Path("starts")
count = len(file.read_text()) + 1 if file.exists() else 1
file.write_text("x" * count)
sys.exit(int(sys.argv[count]))
"""
"""Exits with the status in its n-th argument at the n-th start."""

STOPPABLE = """
import signal, sys, time, pathlib
received = []
signal.signal(signal.SIGTERM, lambda *_: received.append("TERM"))
signal.signal(signal.SIGINT, lambda *_: received.append("INT"))
pathlib.Path("ready").write_text("")
while not received:
    time.sleep(0.01)
pathlib.Path("release").exists() or time.sleep(0.2)
print(received, flush=True)
sys.exit(int(sys.argv[1]))
"""


def command(code: str, *arguments: object) -> list[str]:
    return [sys.executable, "-c", code, *map(str, arguments)]


def run(folder: Path, config: SupervisorConfig, code: str, *arguments: object) -> tuple[int, list[str]]:
    reports: list[str] = []
    before = Path.cwd()
    os.chdir(folder)
    try:
        return supervise(config, command(code, *arguments), reports.append), reports
    finally:
        os.chdir(before)


def test_restarts_until_success(tmp_path: Path) -> None:
    config = SupervisorConfig(restart_delay=0.0, folder=str(tmp_path / "state"))
    status, reports = run(tmp_path, config, COUNT, 1, 7, 0)
    assert status == 0
    assert [text.partition(" after")[0] for text in reports] == [
        "the command ended with status 1",
        "the command ended with status 7",
        "the command ended with status 0",
    ]
    record = json.loads((tmp_path / "state" / "status.json").read_text())
    assert (record["state"], record["exit_status"], record["restarts"]) == ("exited", 0, 2)


def test_restarts_although_the_status_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "state" / ".status.json.partial").mkdir(parents=True)
    config = SupervisorConfig(restart_delay=0.0, folder=str(tmp_path / "state"))
    status, reports = run(tmp_path, config, COUNT, 1, 0)
    assert (status, (tmp_path / "starts").read_text()) == (0, "xx")
    assert f"cannot write the status to '{tmp_path / 'state'}': Is a directory" in reports


def test_gives_up_at_the_limit_with_the_last_status(tmp_path: Path) -> None:
    config = SupervisorConfig(max_restarts=2, restart_delay=0.0, folder=str(tmp_path / "state"))
    status, reports = run(tmp_path, config, COUNT, 3, 4, 5, 0)
    assert status == 5
    assert "2 restarts in 3600 s are the limit" in reports[-1]
    assert (tmp_path / "starts").read_text() == "xxx"


def test_restarts_outside_the_window_do_not_count(tmp_path: Path) -> None:
    config = SupervisorConfig(max_restarts=1, restart_window=0.0, restart_delay=0.01)
    assert run(tmp_path, config, COUNT, 1, 1, 1, 0)[0] == 0


def test_signal_that_ends_the_command(tmp_path: Path) -> None:
    config = SupervisorConfig(max_restarts=0)
    assert run(tmp_path, config, "import os; os.kill(os.getpid(), 9)")[0] == 128 + 9
    assert exit_status(-15) == 143


def test_commands_that_cannot_be_executed_are_not_restarted(tmp_path: Path) -> None:
    reports: list[str] = []
    assert supervise(SupervisorConfig(), ["./absent"], reports.append) == 127
    assert "cannot run './absent': No such file or directory" in reports[0]
    (tmp_path / "text").write_text("no program")
    assert supervise(SupervisorConfig(), [str(tmp_path / "text")], reports.append) == 126


def test_the_command_has_no_blocked_signals(tmp_path: Path) -> None:
    code = "import signal, sys; sys.exit(len(signal.pthread_sigmask(signal.SIG_BLOCK, [])))"
    assert run(tmp_path, SupervisorConfig(max_restarts=0), code)[0] == 0


def start(
    folder: Path, *options: str, code: str = STOPPABLE, status: int = 0, terminal: int | None = None
) -> "subprocess.Popen[str]":
    """Start the supervisor's command line, in the foreground of a terminal if one is given, and wait until its command
    is ready.
    """
    own = [sys.executable, "-m", "marin_rl.launch", "supervise", *options, "--folder", "state"]
    process = subprocess.Popen(
        [*own, "--", *command(code, status)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        stdin=terminal,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=None if terminal is None else lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    )
    wait_for(folder / "ready")
    return process


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + TIMEOUT
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} did not appear"
        time.sleep(0.01)


@pytest.mark.parametrize(("number", "name"), [(signal.SIGTERM, "TERM"), (signal.SIGINT, "INT")])
@pytest.mark.parametrize("status", [0, 3])
def test_passes_signals_on_once_and_does_not_restart(tmp_path: Path, number: int, name: str, status: int) -> None:
    process = start(tmp_path, status=status)
    process.send_signal(number)
    process.send_signal(number)
    output, _ = process.communicate(timeout=TIMEOUT)
    assert process.returncode == status
    assert f"['{name}']" in output
    assert "restart" not in output


def test_a_signal_of_systemd_is_not_passed_on(tmp_path: Path) -> None:
    """At a shutdown systemd sends SIGTERM to the command as well."""
    process = start(tmp_path)
    systemd = tmp_path / "systemd"
    systemd.symlink_to("/bin/bash")
    script = f"kill -TERM {process.pid}; read line"
    with subprocess.Popen([str(systemd), "-c", script], stdin=subprocess.PIPE) as sender:
        assert process.stdout is not None
        assert "SIGTERM from systemd, which the command has received too" in process.stdout.readline()
        assert process.poll() is None
        child = json.loads((tmp_path / "state" / "status.json").read_text())
        assert child["state"] == "running"
        os.killpg(process.pid, signal.SIGTERM)
        sender.communicate(b"\n")
    output, _ = process.communicate(timeout=TIMEOUT)
    assert "['TERM']" in output
    assert process.returncode == 0


@pytest.mark.parametrize("has_own_group", [False, True])
def test_the_command_receives_ctrl_c_once(tmp_path: Path, has_own_group: bool) -> None:
    """The terminal sends SIGINT to the command as well, unless the command has left the process group."""
    controller, terminal = os.openpty()
    code = "import os; os.setpgid(0, 0)\n" + STOPPABLE if has_own_group else STOPPABLE
    process = start(tmp_path, code=code, terminal=terminal)
    os.write(controller, b"\x03")
    output, _ = process.communicate(timeout=TIMEOUT)
    os.close(terminal)
    os.close(controller)
    assert ("SIGINT from the terminal, which the command has received too" in output) != has_own_group
    assert "['INT']" in output
    assert process.returncode == 0


def test_kills_a_command_that_does_not_stop(tmp_path: Path) -> None:
    code = """
import pathlib, signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
pathlib.Path("ready").write_text("")
time.sleep(600)
"""
    process = start(tmp_path, "--stop_timeout", "0.2", code=code)
    process.terminate()
    output, _ = process.communicate(timeout=TIMEOUT)
    assert process.returncode == 128 + 9
    assert "did not end within 0.2 s" in output


def test_stops_while_waiting_for_a_restart(tmp_path: Path) -> None:
    code = "import pathlib, sys; pathlib.Path('ready').write_text(''); sys.exit(5)"
    process = start(tmp_path, "--restart_delay", "600", code=code)
    assert process.stdout is not None
    assert "restart 1 in 600 s" in process.stdout.readline()
    process.terminate()
    assert "stopped before a restart" in process.stdout.readline()
    assert process.wait(TIMEOUT) == 5
    process.stdout.close()


@pytest.mark.medium
def test_one_supervisor_per_folder_even_if_it_was_killed(tmp_path: Path) -> None:
    process = start(tmp_path)
    config = SupervisorConfig(folder=str(tmp_path / "state"))
    with pytest.raises(RuntimeError, match="another supervisor, or its command, runs in"):
        supervise(config, ["true"], print)
    process.kill()
    process.wait(TIMEOUT)
    with pytest.raises(RuntimeError, match="another supervisor, or its command, runs in"):
        supervise(config, ["true"], print)
    os.killpg(process.pid, signal.SIGTERM)
    assert process.stdout is not None
    process.stdout.read()  # until the command has ended
    process.stdout.close()
    assert supervise(config, ["true"], print) == 0


def test_bad_settings() -> None:
    with pytest.raises(ValueError, match=r"supervisor\.max_restarts is -1; it must be at least 0"):
        SupervisorConfig(max_restarts=-1)
