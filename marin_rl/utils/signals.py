# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Handlers of SIGINT (Ctrl-C) and SIGTERM for the duration of a block; only Python's main thread can have them."""

import contextlib
import signal
import threading
from collections.abc import Iterator


def stop_signals() -> tuple[signal.Signals, ...]:
    """Return the signals that stop a program; none in other threads than the main one, which cannot handle them."""
    return (signal.SIGINT, signal.SIGTERM) if threading.current_thread() is threading.main_thread() else ()


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Let SIGINT and SIGTERM raise KeyboardInterrupt while there is nothing to save."""
    previous = {number: signal.signal(number, signal.default_int_handler) for number in stop_signals()}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def caught_interrupts() -> Iterator[threading.Event]:
    """Yield an event that SIGINT sets, instead of raising KeyboardInterrupt."""
    interrupted = threading.Event()
    previous = signal.signal(signal.SIGINT, lambda number, frame: interrupted.set())
    try:
        yield interrupted
    finally:
        signal.signal(signal.SIGINT, previous)
