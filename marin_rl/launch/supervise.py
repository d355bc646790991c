# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Supervisor of one host: runs a command, restarts it after a failure, and passes SIGTERM and SIGINT on.

It ends when the command ends with status 0, when it was stopped, or when the command failed too often within a time.

A signal from systemd is not passed on: at a shutdown of the machine, such as a preemption, systemd sends SIGTERM to all
processes (`KillMode=control-group`), and a second SIGTERM would end a training run before it has saved its state. For
the same reason SIGINT from Ctrl-C in a terminal is not passed on to a command in the process group of the supervisor.

| Exit status | Meaning |
|---|---|
| 0 | the command ended with status 0: it is complete, or it saved its state after SIGTERM or SIGINT |
| status of the command | the command failed, and the limit of restarts is reached, or the supervisor was stopped |
| 128 + N | the same, if the command was ended by signal N |
| 126, 127 | the command cannot be executed, or does not exist; it is not restarted |
| 1 | invalid arguments, or another supervisor uses the folder |
"""

import collections
import contextlib
import dataclasses
import fcntl
import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO

from marin_rl.config_fields import check_at_least
from marin_rl.errors import UserError

NOT_EXECUTABLE = 126
NOT_FOUND = 127
"""Exit statuses of a command that cannot be executed or does not exist, as in a shell."""
LOCK_ATTEMPTS = 10
"""Attempts to lock the folder, 0.1 s apart."""
SI_KERNEL = 0x80
"""Code of a signal from the kernel, such as SIGINT from a terminal; see `man 2 sigaction`."""

_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_SIGNALS = (*_STOP_SIGNALS, signal.SIGCHLD)


class SupervisorError(UserError):
    """Raised if another supervisor uses the folder, or it cannot be written."""


@dataclasses.dataclass(frozen=True)
class SupervisorConfig:
    """Restarts and shutdown of a supervised command."""

    max_restarts: int = 10
    """Maximum restarts within `restart_window`; 0 for none."""
    restart_window: float = 3600.0
    """Time in seconds; restarts longer ago do not count."""
    restart_delay: float = 10.0
    """Seconds between the end of a failed command and its restart."""
    stop_timeout: float = 120.0
    """Seconds that the command has to end after SIGTERM or SIGINT, before it is killed."""
    folder: str | None = None
    """Folder for `status.json`, `supervisor.pid` and `supervisor.lock`; null for none. It is created. One supervisor
    uses a folder at a time."""

    def __post_init__(self) -> None:
        check_at_least(self, "supervisor", max_restarts=0, restart_window=0, restart_delay=0, stop_timeout=0)


def exit_status(returncode: int) -> int:
    """Convert a return code of `subprocess` to an exit status: 128 + N for signal N.

    >>> exit_status(1), exit_status(-9)
    (1, 137)
    """
    return returncode if returncode >= 0 else 128 - returncode


def supervise(config: SupervisorConfig, command: Sequence[str], report: Callable[[str], None]) -> int:
    """Run a command until it ends with status 0, is stopped by a signal, or fails too often.

    Call it in the main thread: it blocks SIGTERM, SIGINT and SIGCHLD in this thread and waits for them.

    Args:
        config: restarts and shutdown.
        command: program and arguments.
        report: prints a message.

    Returns:
        The exit status, see the module.

    Raises:
        SupervisorError: if another supervisor uses the folder, or it cannot be written.
    """
    with _own_folder(config.folder) as folder, _blocked_signals() as unblock:
        return _Supervisor(config, command, folder, unblock, report).run()


@dataclasses.dataclass
class _Supervisor:
    config: SupervisorConfig
    command: Sequence[str]
    folder: "_Folder | None"
    unblock: Callable[[], None]
    report: Callable[[str], None]
    restarts: int = 0

    def run(self) -> int:
        recent: collections.deque[float] = collections.deque()
        while True:
            self._record("running", None)
            started = time.monotonic()
            status, stopped = self._run_once()
            now = time.monotonic()
            while recent and now - recent[0] > self.config.restart_window:
                recent.popleft()
            message = f"the command ended with status {status} after {now - started:.0f} s"
            if status in (0, NOT_EXECUTABLE, NOT_FOUND) or stopped:
                break
            if len(recent) >= self.config.max_restarts:
                message += f"; no restart: {len(recent)} restarts in {self.config.restart_window:g} s are the limit"
                break
            recent.append(now)
            self.restarts += 1
            self.report(f"{message}; restart {self.restarts} in {self.config.restart_delay:g} s")
            self._record("running", status)
            if signal.sigtimedwait(_STOP_SIGNALS, self.config.restart_delay):
                message = f"stopped before a restart; the last status is {status}"
                break
        self.report(message)
        self._record("exited", status)
        return status

    def _run_once(self) -> tuple[int, bool]:
        """Run the command once; returns its exit status, and whether it was asked to stop."""
        locked = () if self.folder is None else (self.folder.lock,)
        try:
            # The process has one thread, so that code between fork and exec is safe.
            child = subprocess.Popen(self.command, preexec_fn=self.unblock, pass_fds=locked)
        except OSError as error:
            self.report(f"cannot run {self.command[0]!r}: {error.strerror}")
            return (NOT_FOUND if isinstance(error, FileNotFoundError) else NOT_EXECUTABLE), False
        deadline: float | None = None
        while (code := child.poll()) is None:
            # A day, if there is no deadline.
            wait = 86_400.0 if deadline is None else max(0.0, deadline - time.monotonic())
            received = signal.sigtimedwait(_SIGNALS, wait)
            if received is None and deadline is not None:
                self.report(f"the command did not end within {self.config.stop_timeout:g} s; killing it")
                child.kill()
                code = child.wait()
                break
            if received is not None and received.si_signo != signal.SIGCHLD and deadline is None:
                # Only once: a second signal would end a training run without saving.
                name = signal.Signals(received.si_signo).name
                if sender := _sender_to_all(received, child.pid):
                    self.report(f"{name} from {sender}, which the command has received too")
                else:
                    self.report(f"passing {name} on to the command")
                    child.send_signal(received.si_signo)
                deadline = time.monotonic() + self.config.stop_timeout
        return exit_status(code), deadline is not None

    def _record(self, state: str, status: int | None) -> None:
        if self.folder is None:
            return
        values: dict[str, object] = {
            "host": socket.gethostname(),
            "state": state,
            "exit_status": status,
            "restarts": self.restarts,
            "command": list(self.command),
        }
        try:
            self.folder.record(values)
        except OSError as error:
            # The disk may be full, and the command must be supervised all the same.
            self.report(f"cannot write the status to {str(self.folder.path)!r}: {error.strerror}")


def _sender_to_all(received: signal.struct_siginfo, command: int) -> str | None:
    """Return the sender of a signal if it sends it to the process `command` as well; None if not."""
    if received.si_code == SI_KERNEL:
        # A terminal sends SIGINT to its foreground process group. Some commands, such as `timeout`, leave it.
        return "the terminal" if os.getpgid(command) == os.getpgrp() else None
    try:
        sender = Path(f"/proc/{received.si_pid}/comm").read_text(encoding="utf-8")
    except OSError:
        return None
    return "systemd" if sender == "systemd\n" else None


@dataclasses.dataclass(frozen=True)
class _Folder:
    path: Path
    lock: int

    def record(self, values: dict[str, object]) -> None:
        partial = self.path / ".status.json.partial"
        partial.write_text(json.dumps(values), encoding="utf-8")
        partial.replace(self.path / "status.json")


@contextlib.contextmanager
def _own_folder(name: str | None) -> Iterator[_Folder | None]:
    """Lock the folder. The command inherits the lock, so that it also counts as running if the supervisor is killed."""
    if name is None:
        yield None
        return
    path = Path(name)
    try:
        path.mkdir(parents=True, exist_ok=True)
        lock = (path / "supervisor.lock").open("ab")
    except OSError as error:
        raise SupervisorError(f"cannot write to folder {name!r}: {error.strerror}; choose another") from error
    with lock as file:
        if not _lock(file):
            raise SupervisorError(
                f"another supervisor, or its command, runs in {name!r}; its process id is in supervisor.pid"
            )
        (path / "supervisor.pid").write_text(f"{os.getpid()}\n", encoding="utf-8")
        yield _Folder(path, file.fileno())


def _lock(file: IO[bytes]) -> bool:
    # Several attempts, because host.sh holds the lock for a moment to see whether it is free.
    for _ in range(LOCK_ATTEMPTS):
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        time.sleep(0.1)
    return False


@contextlib.contextmanager
def _blocked_signals() -> Iterator[Callable[[], None]]:
    """Block the signals that the supervisor waits for; yields a function that unblocks them in a child process."""
    former = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)

    def unblock() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, former)

    try:
        yield unblock
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, former)
