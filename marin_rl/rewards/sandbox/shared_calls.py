# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Several calls of a pointwise reward function in one process, one after another.

The calls share the state of the file's module, so a call must not be able to change the results of later calls. The
remaining calls therefore run in separate processes in two cases:

- A call is about to run code that is not part of the installed modules: `exec`, `eval`, unpickling, other programs.
- A call has left threads, processes, files, open files or a timer.

This module runs in the confined process of the calls.
"""

import json
import os
import signal
import sys
import time
import types
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn

from marin_rl.rewards.sandbox.protocol import WorkerSpec

_RUNS_CODE = frozenset(
    (
        "exec",
        "function.__new__",
        "pickle.find_class",
        "ctypes.dlopen",
        "cpython.PyInterpreterState_New",
        "os.exec",
        "os.fork",
        "os.forkpty",
        "os.posix_spawn",
        "os.system",
        "subprocess.Popen",
    )
)
"""Audit events (PEP 578) before a process runs further code; `exec` is also the event of `eval`."""

_TIMERS = (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF)


def run_calls(
    answers: Sequence[Callable[[], str]], write: Callable[[str], None], spec: WorkerSpec, seconds: float
) -> None:
    """Run calls in order and write one line for each. The working directory must be empty.

    If the function's calls must not share a process any more, it exits with status 0 after the line
    `{"own_process": "the reason", "answers": the number of lines before}`. If only the time is up, the last line is
    `{"stopped": true, "answers": …}`. With the number the trainer detects lines that calls wrote themselves.

    Args:
        answers: the calls; each returns its answer as JSON.
        write: writes a line to the worker.
        spec: settings of the worker; modules in its readable paths may be imported during a call.
        seconds: time limit of the process in seconds. No call starts after half of it. Calls that use half of it as CPU
            time, which does not depend on the load of the machine, are too slow to share a process.
    """
    answered = 0

    def end(reason: str) -> NoReturn:
        write(json.dumps({"own_process": reason, "answers": answered}))
        os._exit(0)

    started = _Started(os.getcwd(), _lowest_free_descriptor())
    _end_before_code(end, spec.read, (spec.scratch, started.folder))
    numpy = sys.modules.get("numpy.random")
    state = None if numpy is None else numpy.get_state()
    last_start, last_cpu = time.monotonic() + seconds / 2, time.process_time() + seconds / 2
    for answer in answers:
        if answered and time.process_time() > last_cpu:
            end("its calls are slow")
        if answered and time.monotonic() > last_start:
            write(json.dumps({"stopped": True, "answers": answered}))
            return
        if numpy is not None:
            # As in separate processes, which start with the same state of numpy's global generator.
            numpy.set_state(state)
        write(answer())
        answered += 1
        left = _left_behind(started)
        if left is not None:
            end(f"a call {left}")


def _end_before_code(end: Callable[[str], NoReturn], readable: Sequence[str], writable: Sequence[str]) -> None:
    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event not in _RUNS_CODE:
            return
        module = _imported_module(arguments[0] if event == "exec" else None, sys._getframe().f_back)
        if module is None or not _is_below(module, readable) or _is_below(module, writable):
            end(f"a call ran code (audit event {event})")

    sys.addaudithook(hook)


def _imported_module(code: types.CodeType | None, frame: types.FrameType | None) -> str | None:
    """Return the file of the module that is being imported, or None if there is none.

    Args:
        code: the code that is about to run, if known.
        frame: the frame that runs it.
    """
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            # Loaders can be written in Python, so only the code of a module itself counts.
            return code.co_filename if code is not None and code.co_name == "<module>" else None
        code, frame = frame.f_code, frame.f_back
    return None


def _is_below(file: str, folders: Sequence[str]) -> bool:
    return any(file == folder or file.startswith(folder + "/") for folder in folders)


def _lowest_free_descriptor() -> int:
    descriptor = os.dup(0)
    os.close(descriptor)
    return descriptor


class _Started(NamedTuple):
    """State of a process before its first call."""

    folder: str
    """Its working directory."""
    descriptor: int
    """Its lowest free descriptor."""


def _left_behind(started: _Started) -> str | None:
    """Describe threads, processes, files or a timer that a call left; None if there are none."""
    # Unlike `threading.active_count`, this includes threads that `_thread.start_new_thread` started.
    if len(sys._current_frames()) > 1:
        return "left threads"
    if _has_children():
        return "left processes"
    if _lowest_free_descriptor() != started.descriptor:
        return "left files open"
    try:
        if os.getcwd() != started.folder:
            return "changed the working directory"
        if os.listdir():
            return "left files"
    except FileNotFoundError:
        return "removed the working directory"
    if any(signal.getitimer(timer)[0] for timer in _TIMERS):
        return "left a timer"
    return None


def _has_children() -> bool:
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True
