# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Errors and stop requests of training processes, which reach the other processes without a collective operation.

A process that samples, or waits in a collective operation, cannot take part in another one. So these messages go
through the key-value store of jax's coordination service, which runs in the main process.
"""

import atexit
import contextlib
import itertools
import json
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from importlib import metadata

import jax

from marin_rl.utils import multihost
from marin_rl.utils.errors import UserError
from marin_rl.utils.levanter_line import distribution_of
from marin_rl.utils.output import escape

logger = logging.getLogger(__name__)

INTERVAL = 1.0
"""Seconds between two reads of the status of the other processes."""
GRACE = 10.0
"""Seconds that a process has to end by itself after another one failed. It may be blocked in a collective operation."""

SOFTWARE = ("jax", "jaxlib", "libtpu", "haliax", "levanter", "transformers", "tokenizers", "marin_rl")
"""Packages that must have the same version in all processes; another version at a resume is reported."""
COMPILER_VARIABLES = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")
"""Environment variables that must be equal in all processes."""

_ERROR, _ENDED, _SOFTWARE = "marin_rl/error", "marin_rl/ended/", "marin_rl/software"
_FINISHED, _STOPPED = "finished", "stopped"
_rounds = itertools.count()


class OtherProcessError(UserError):
    """Another training process ended with an error, which the message contains."""


class StopRequestedError(Exception):
    """A stop was requested while a step waited for its groups, or during an evaluation."""


def raise_if(stop_requested: Callable[[], bool]) -> None:
    """Raise StopRequestedError if a stop was requested."""
    if stop_requested():
        raise StopRequestedError("a stop was requested while a step waited for its groups")


@contextlib.contextmanager
def separate_work(interrupt: Callable[[], None]) -> Iterator[Callable[[], None]]:
    """Let every process work for itself, without collective operations, and wait until all have finished.

    All processes leave the block in the same way: if one of them raises StopRequestedError before all have finished,
    all do. With one process the block is run as it is.

    Args:
        interrupt: called regularly; raises StopRequestedError if this process was asked to stop.

    Yields:
        A function to call regularly in place of `interrupt`.

    Raises:
        StopRequestedError: in all processes, if one was asked to stop.
        OtherProcessError: if another process ended with an error.
    """
    if not multihost.is_multihost():
        yield interrupt
        return
    work = _Round(next(_rounds), interrupt)
    yield work.check
    work.finish()


class _Round:
    """One round of separate work; its outcome is the first value that any process writes."""

    def __init__(self, number: int, interrupt: Callable[[], None]) -> None:
        self._interrupt = interrupt
        self._outcome, self._count = (f"marin_rl/round-{number}/{name}" for name in ("outcome", "finished"))
        self._next_read = time.monotonic() + INTERVAL
        # When a process starts round n, all have left round n - 2.
        if multihost.is_main():
            multihost.coordination_client().key_value_delete(f"marin_rl/round-{number - 2}/")

    def check(self) -> None:
        self._stop_if_asked()
        if time.monotonic() >= self._next_read:
            self._next_read = time.monotonic() + INTERVAL
            raise_error_of_others()
            self._raise_if_stopped(_read(self._outcome))

    def finish(self) -> None:
        if multihost.coordination_client().key_value_increment(self._count, 1) == jax.process_count():
            _write_once(self._outcome, _FINISHED)
        while (outcome := _await(self._outcome, INTERVAL)) is None:
            raise_error_of_others()
            self._stop_if_asked()
        self._raise_if_stopped(outcome)

    def _stop_if_asked(self) -> None:
        try:
            self._interrupt()
        except StopRequestedError:
            _write_once(self._outcome, _STOPPED)
            # All processes may have finished before.
            self._raise_if_stopped(_read(self._outcome))

    def _raise_if_stopped(self, outcome: str | None) -> None:
        if outcome == _STOPPED:
            raise StopRequestedError("a training process was asked to stop while groups were sampled")


def raise_error_of_others() -> None:
    """Raise OtherProcessError if another process ended with an error."""
    text = _read(_ERROR)
    error = None if text is None else json.loads(text)
    if error is not None and error["process"] != jax.process_index():
        raise OtherProcessError(f"training process {error['process']} {error['error']}")


@contextlib.contextmanager
def exit_on_error() -> Iterator[None]:
    """End all processes when one ends with an error, with that error's message.

    The failing process does not wait for the others at exit, as jax would for five minutes. The others end within
    `INTERVAL + GRACE` seconds, also if they are blocked in a collective operation; the main process, without which they
    cannot report the error, ends up to `2 * INTERVAL` seconds later. If a process is killed or paused, or its host is
    cut off, jax ends the others when they have missed its heartbeats for 100 seconds.
    """
    if not multihost.is_multihost():
        yield
        return
    ended = threading.Event()
    watch = threading.Thread(target=_watch, args=[ended], name="errors of other processes", daemon=True)
    watch.start()
    try:
        yield
    except BaseException as error:
        # Exit handlers run in reverse order of registration, so this one runs before jax's.
        atexit.register(_end)
        ended.set()
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            _report(error)
        raise
    finally:
        ended.set()
        watch.join()


def require_same_software() -> None:
    """Check that all processes have the same versions of jax and the like, and the same compiler flags.

    Other versions may compile other collective operations, in which the processes would wait for each other forever.
    So this check uses none.

    Raises:
        ProcessesDifferError: if this process differs from the main process; names both versions or flags.
    """
    if not multihost.is_multihost():
        return
    own = software_versions() | {name: os.environ.get(name) for name in COMPILER_VARIABLES}
    if multihost.is_main():
        multihost.coordination_client().key_value_set(_SOFTWARE, json.dumps(own), allow_overwrite=True)
        return
    while (text := _await(_SOFTWARE, INTERVAL)) is None:
        raise_error_of_others()
    of_main = json.loads(text)
    if differing := [
        f"{name} {own[name] or 'none'} instead of {of_main[name] or 'none'}"
        for name in own
        if own[name] != of_main[name]
    ]:
        raise multihost.ProcessesDifferError(
            f"training process {jax.process_index()} on host {socket.gethostname()} has {', '.join(differing)} in the "
            "main process; install the same versions and set the same variables on all training hosts"
        )


@contextlib.contextmanager
def explain_errors() -> Iterator[None]:
    """With several processes, replace a jax error by the error of another process, or add a note on lost processes.

    Raises:
        OtherProcessError: if a jax error is raised and another process ended with an error.
    """
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if not multihost.is_multihost():
            raise
        try:
            raise_error_of_others()
        except OtherProcessError as cause:
            raise cause from error
        except jax.errors.JaxRuntimeError:
            logger.info("the coordination service of the main process does not answer")
        error.add_note(
            f"This is training process {jax.process_index()} of {jax.process_count()}. If a connection failed, "
            "another training process has ended or is unreachable: see its output and its machine for the cause. "
            "Run the same command on all hosts to resume from the last checkpoint."
        )
        raise


def software_versions() -> dict[str, str | None]:
    """Return the versions of the packages that determine results; None for one that is not installed."""
    return {name: _version(distribution_of(name)) for name in SOFTWARE}


def _version(package: str) -> str | None:
    with contextlib.suppress(metadata.PackageNotFoundError):
        return metadata.version(package)
    return None


def _report(error: BaseException) -> None:
    """Publish an error; the main process, which runs the service, waits until the others have printed it and end.

    Without the service jax aborts them.
    """
    if not isinstance(error, OtherProcessError | multihost.MainProcessError):
        # Only the first error is kept.
        text = f"ended with an error: {type(error).__name__}: {error}"
        _write_once(_ERROR, json.dumps({"process": jax.process_index(), "error": text}))
    _wait_for_others(INTERVAL + GRACE)


def _wait_for_others(seconds: float) -> None:
    """In the main process, wait until the others end."""
    deadline = time.monotonic() + seconds
    others = jax.process_count() - 1
    while (
        multihost.is_main()
        and time.monotonic() < deadline
        and len(multihost.coordination_client().key_value_dir_get(_ENDED)) < others
    ):
        time.sleep(0.1)


def _watch(ended: threading.Event) -> None:
    """Wait until another process fails, and then end this one unless its main thread does."""
    while not ended.wait(INTERVAL):
        try:
            raise_error_of_others()
        except OtherProcessError as error:
            if not ended.wait(GRACE):
                logger.error("%s", error)
                print(f"error: {escape(str(error))}", file=sys.stderr)
                # The others read the error up to `INTERVAL` seconds later.
                with contextlib.suppress(jax.errors.JaxRuntimeError):
                    _wait_for_others(2 * INTERVAL)
                _end()
            return
        except jax.errors.JaxRuntimeError as error:
            # A call may fail once. If the service has ended, jax ends this process.
            logger.info("the coordination service of the main process does not answer: %s", error)


def _end() -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    with contextlib.suppress(jax.errors.JaxRuntimeError):
        if not multihost.is_main():
            multihost.coordination_client().key_value_set(f"{_ENDED}{jax.process_index()}", "", allow_overwrite=True)
    os._exit(1)


def _read(key: str) -> str | None:
    try:
        return multihost.coordination_client().key_value_try_get(key)
    except jax.errors.JaxRuntimeError as error:
        if "NOT_FOUND" in str(error):
            return None
        raise


def _await(key: str, seconds: float) -> str | None:
    """Wait for a value; None if there is none after some seconds."""
    try:
        return multihost.coordination_client().blocking_key_value_get(key, int(1000 * seconds))
    except jax.errors.JaxRuntimeError as error:
        if "DEADLINE_EXCEEDED" in str(error):
            return None
        raise


def _write_once(key: str, value: str) -> None:
    """Write a value, unless there is one."""
    try:
        multihost.coordination_client().key_value_set(key, value)
    except jax.errors.JaxRuntimeError as error:
        if "ALREADY_EXISTS" not in str(error):
            raise
