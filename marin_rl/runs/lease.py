# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Lock of a folder in an object store, which no store releases when its holder dies.

The lock is the object with the highest number in a folder, such as `.lock/00000003`. Only the holder of number 3
rewrites that object, every `BEAT_SECONDS`, with a higher count. Number 4 may be created if number 3 is released, if it
has not changed for `LEASE_SECONDS`, or if its process on this machine has ended. Creating fails if number 4 exists
(generation precondition of Google Cloud Storage, `If-None-Match` of S3), so one process at most succeeds. The holder of
the highest number deletes lower ones. A slow process may create one of those again; it holds the lock only if its
number is the highest afterwards, and chooses a new number otherwise.
"""

import contextlib
import dataclasses
import json
import logging
import os
import socket
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from marin_rl.utils.errors import RunDirectoryError
from marin_rl.utils.remote_path import CONDITIONAL, RemotePath
from marin_rl.utils.retry import Clock

logger = logging.getLogger(__name__)

LEASE_SECONDS = 60.0
"""Seconds without a change after which the holder counts as dead."""
BEAT_SECONDS = 15.0
"""Seconds between two changes by the holder."""
_POLL_SECONDS = 1.0


@dataclasses.dataclass
class Lease:
    """A held lock; made by [`hold`][marin_rl.runs.lease.hold]."""

    folder: RemotePath
    """Folder of the lock's objects."""
    number: int
    """Number of the held object."""
    name: str = dataclasses.field(default_factory=lambda: uuid.uuid4().hex)
    """Unique name of the holder."""
    beats: int = 0
    """Number of changes so far."""

    def check(self) -> None:
        """Check that no other process has taken the lock.

        Raises:
            RunDirectoryError: if another process has.
        """
        numbers = _numbers(self.folder)
        if numbers and numbers[-1] > self.number:
            raise RunDirectoryError(
                f"run directory {str(self.folder.parent)!r} was taken over by another process, because this one did "
                f"not renew its lock for {LEASE_SECONDS:g} s; nothing was overwritten, and the other process continues"
            )

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

    Args:
        folder: folder of the lock's objects; its parent is the locked folder.
        clock: source of time while waiting for another holder.

    Yields:
        The lease.

    Raises:
        RunDirectoryError: if another process holds the lock; the message contains its id.
        OSError: if the store cannot be written.
    """
    if folder.protocol not in CONDITIONAL:
        logger.warning(
            "%s:// is not known to support conditional writes: two runs that start in %s at the same moment are not "
            "noticed",
            folder.protocol,
            folder.parent,
        )
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
            raise RunDirectoryError(
                f"run directory {str(folder.parent)!r} is in use by {alive}; "
                "wait for it to end, stop it, or choose another run_dir"
            )
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


def holder(folder: RemotePath, clock: Clock | None = None) -> str | None:
    """Return the process that holds the lock, such as `process 7 on host`, without changing anything.

    Waits up to a minute for a process on another machine to renew the lock.

    Args:
        folder: folder of the lock's objects.
        clock: source of time while waiting.

    Returns:
        The process, or None if the lock is released or its holder is dead.
    """
    numbers = _numbers(folder)
    return _living_holder(_object(folder, numbers[-1]), clock or Clock()) if numbers else None


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
