# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Lock of a run directory against a second process.

A local directory is locked with `flock`, which the system releases when the process ends for any reason. No object
store does that. There the lock is the object with the highest number in a folder, such as `.lock/00000003`. Only the
holder of number 3 rewrites that object, every `BEAT_SECONDS`, with a higher count. Number 4 may be created if number 3
is released, if it has not changed for `LEASE_SECONDS`, or if its process on this machine has ended. Creating fails if
number 4 exists (generation precondition of Google Cloud Storage, `If-None-Match` of S3), so one process at most
succeeds. The holder of the highest number deletes lower ones. A slow process may create one of those again; it holds
the lock only if its number is the highest afterwards, and chooses a new number otherwise.

A process that was suspended may have lost this lock. Therefore the paths of a locked run directory check it before they
change an object.
"""

import contextlib
import dataclasses
import errno
import fcntl
import json
import logging
import os
import socket
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from marin_rl.runs.run_directory import RunDirectory
from marin_rl.utils.errors import RunDirectoryError
from marin_rl.utils.remote_path import RemotePath
from marin_rl.utils.retry import Clock
from marin_rl.utils.storage import writing

logger = logging.getLogger(__name__)

LEASE_SECONDS = 60.0
"""Seconds without a change after which the holder counts as dead."""
BEAT_SECONDS = 15.0
"""Seconds between two changes by the holder."""
CHECK_SECONDS = 1.0
"""Seconds for which a check counts, of a clock that also runs while the machine is suspended."""
_POLL_SECONDS = 1.0


@contextlib.contextmanager
def lock(directory: RunDirectory) -> Iterator[RunDirectory]:
    """Lock a run directory, which is created if it does not exist, until the end of the block.

    In an object store, the lock of a killed process can be taken after a minute.

    Yields:
        The directory. Its paths raise RunDirectoryError, and change nothing, if another process has taken the lock.

    Raises:
        RunInUseError: if another process holds the lock; the message contains its id.
    """
    path = directory.path / ".lock"
    with contextlib.ExitStack() as stack:
        with writing(path):
            if isinstance(path, RemotePath):
                lease = stack.enter_context(hold(path))
                locked = RunDirectory(dataclasses.replace(path.parent, fence=lease.check))
            else:
                path.parent.mkdir(parents=True, exist_ok=True)
                file, locked = stack.enter_context(path.open("a+", encoding="utf-8")), directory
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError as error:
                    file.seek(0)
                    raise _in_use(directory.path, f"process {file.read().strip()}") from error
                file.truncate(0)
                file.write(f"{os.getpid()} on {socket.gethostname()}")
                file.flush()
        yield locked


def holder(directory: RunDirectory, clock: Clock | None = None) -> str | None:
    """Return the process that holds the lock of a run directory, such as `process 7 on host`; changes no file.

    In an object store this waits up to a minute for a process on another machine to renew the lock. None if the lock is
    released or its holder is dead.
    """
    path = directory.path / ".lock"
    if isinstance(path, RemotePath):
        numbers = _numbers(path)
        return _living_holder(_object(path, numbers[-1]), clock or Clock()) if numbers else None
    try:
        file = path.open(encoding="utf-8")
    except FileNotFoundError:
        return None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return f"process {file.read().strip()}"
    return None


def check_usable(directory: RunDirectory) -> None:
    """Check that a local run directory can be written or created, and that no process holds it; changes no file.

    Raises:
        RunDirectoryError: if it cannot, or if another process holds the lock.
    """
    if isinstance(directory.path, Path):
        for folder in (directory.path, directory.path / "rollouts", directory.path / "checkpoints"):
            with writing(folder):
                _require_writable(folder.absolute())
    if (process := holder(directory)) is not None:
        raise _in_use(directory.path, process)


def _require_writable(folder: Path) -> None:
    present = next(path for path in (folder, *folder.parents) if os.path.lexists(path))
    if not present.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(present))
    # On most file systems this file has no name, so it does not change the folder.
    with tempfile.TemporaryFile(dir=present):
        pass


class RunInUseError(RunDirectoryError):
    """Another process uses the run directory."""


def _in_use(folder: object, process: str) -> RunInUseError:
    return RunInUseError(
        f"run directory {str(folder)!r} is in use by {process}; wait for it to end, stop it, or choose another run_dir"
    )


@dataclasses.dataclass
class Lease:
    """A held lock in an object store; made by `hold`."""

    folder: RemotePath
    """Folder of the lock's objects."""
    number: int
    """Number of the held object."""
    name: str = dataclasses.field(default_factory=lambda: uuid.uuid4().hex)
    """Unique name of the holder."""
    beats: int = 0
    """Number of changes so far."""
    checked: float = float("-inf")
    """Time of the last check."""

    def check(self) -> None:
        """Check that no other process has taken the lock; asks the store at most every `CHECK_SECONDS`.

        Raises:
            RunInUseError: if another process has.
        """
        now = time.clock_gettime(time.CLOCK_BOOTTIME)
        if now < self.checked + CHECK_SECONDS:
            return
        numbers = _numbers(self.folder)
        if numbers and numbers[-1] > self.number:
            raise RunInUseError(
                f"run directory {str(self.folder.parent)!r} was taken over by another process, because this one did "
                f"not renew its lock for {LEASE_SECONDS:g} s; nothing was overwritten, and the other process continues"
            )
        self.checked = now

    def create(self) -> bool:
        """Create the object; return whether this process has, not another one."""
        lock = _object(self.folder, self.number)
        try:
            lock.write_bytes(self._content().encode(), only_new=True)
        except FileExistsError:
            # If the answer to a successful request is lost, the client repeats the request.
            return (_read(lock) or {}).get("name") == self.name
        return True

    def renew(self) -> None:
        """Write a change, so that other processes see that this one is alive."""
        self.beats += 1
        _object(self.folder, self.number).write_text(self._content())

    def release(self) -> None:
        """Allow other processes to take the lock at once."""
        _object(self.folder, self.number).write_text(json.dumps({"released": True}))

    def _content(self) -> str:
        own = {"pid": os.getpid(), "started": _started(os.getpid()), "host": socket.gethostname()}
        return json.dumps({**own, "machine": _machine(), "name": self.name, "beats": self.beats})


@contextlib.contextmanager
def hold(folder: RemotePath, clock: Clock | None = None) -> Iterator[Lease]:
    """Take the lock, renew it in a thread, and release it at the end of the block.

    `folder` has the lock's objects; its parent is the locked folder.

    Yields:
        The lease.

    Raises:
        RunInUseError: if another process holds the lock; the message contains its id.
        OSError: if the store cannot be written.
    """
    lease = _take(folder, clock or Clock())
    ended = threading.Event()
    thread = threading.Thread(target=_renew_until, args=(lease, ended), name="lease", daemon=True)
    thread.start()
    try:
        yield lease
    finally:
        ended.set()
        thread.join()
        with contextlib.suppress(OSError, RunDirectoryError):
            lease.check()
            lease.release()


def _take(folder: RemotePath, clock: Clock) -> Lease:
    while True:
        numbers = _numbers(folder)
        newest = numbers[-1] if numbers else 0
        if newest and (alive := _living_holder(_object(folder, newest), clock)) is not None:
            raise _in_use(folder.parent, alive)
        lease = Lease(folder, newest + 1)
        # If another process was faster, see whether it is alive.
        if not lease.create():
            continue
        # Other processes may have taken this number and a higher one, and deleted this number, since it was chosen.
        is_newest = _numbers(folder)[-1:] == [lease.number]
        for outdated in numbers if is_newest else [lease.number]:
            # A remaining object has no effect, and the next process that takes the lock deletes it.
            with contextlib.suppress(OSError):
                _object(folder, outdated).unlink(missing_ok=True)
        if is_newest:
            return lease


def _living_holder(lock: RemotePath, clock: Clock) -> str | None:
    """Return the holder of the lock; None if the lock is released or its holder is dead."""
    first = _read(lock)
    started = clock.now()
    if first is None or first.get("released") or _is_dead_here(first):
        return None
    holder = f"process {first.get('pid')} on {first.get('host')}"
    if not _is_here(first):
        logger.warning("%s is locked by %s; waiting up to %g s for its renewal", lock, holder, LEASE_SECONDS)
        while _read(lock) == first:
            if clock.now() - started > LEASE_SECONDS:
                logger.warning("%s has not renewed its lock for %g s and counts as dead", holder, LEASE_SECONDS)
                return None
            clock.sleep(_POLL_SECONDS)
        if (_read(lock) or {"released": True}).get("released"):
            return None
    return holder


def _renew_until(lease: Lease, ended: threading.Event) -> None:
    while not ended.wait(BEAT_SECONDS):
        try:
            lease.check()
            lease.renew()
        except RunDirectoryError as error:
            logger.error("%s", error)
            return
        except OSError as error:
            logger.warning("the lock could not be renewed: %s", error)


def _numbers(folder: RemotePath) -> list[int]:
    return sorted(int(path.name) for path in folder.iterdir() if path.name.isdecimal())


def _object(folder: RemotePath, number: int) -> RemotePath:
    return folder / f"{number:08d}"


def _read(lock: RemotePath) -> dict[str, Any] | None:
    """The content of the lock; None if it does not exist or is not valid."""
    try:
        content = json.loads(lock.read_bytes())
    except (FileNotFoundError, ValueError):
        return None
    return content if isinstance(content, dict) else None


def _machine() -> str:
    """Identity of the running system and of the process table: a container has its own table."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return ""


def _is_here(content: dict[str, Any]) -> bool:
    return bool(_machine()) and content.get("machine") == _machine()


def _is_dead_here(content: dict[str, Any]) -> bool:
    """Whether the holder ran on this machine and has ended."""
    return _is_here(content) and _started(content.get("pid")) != content.get("started")


def _started(pid: object) -> str:
    """Start time of a process of this machine, which tells apart processes with the same id; empty if it has ended."""
    try:
        # The second field is the name in parentheses, which may contain spaces.
        return Path("/proc", str(pid), "stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""
