# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Wall-clock time by phase, and notices of work that takes long."""

import contextlib
import functools
import threading
import time
from collections.abc import Callable, Iterator

import jax

COMPILE_EVENTS = frozenset(
    f"/jax/core/compile/{name}_duration" for name in ("jaxpr_trace", "jaxpr_to_mlir_module", "backend_compile")
)
"""Jax's events of tracing, lowering and compiling a program; the last one includes reading it from jax's cache."""


class CompileClock:
    """Sum the seconds in which programs were compiled. Nested and concurrent compilations count once.

    >>> clock = CompileClock()
    >>> clock.add("/jax/core/compile/backend_compile_duration", 0.0)
    >>> clock.seconds
    0.0
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._spans: list[tuple[float, float]] = []
        self._lock = threading.Lock()

    def add(self, event: str, duration_secs: float, **_: object) -> None:
        """Add an event of jax that ends now, if it is one of `COMPILE_EVENTS`."""
        if event not in COMPILE_EVENTS:
            return
        with self._lock:
            end = time.perf_counter()
            start = end - duration_secs
            while self._spans and self._spans[-1][0] >= start:
                first, last = self._spans.pop()
                self.seconds -= last - first
            if self._spans:
                start = max(start, self._spans[-1][1])
            self._spans.append((start, end))
            self.seconds += end - start

    def since(self, start: float) -> float:
        """Return the seconds after a time of `time.perf_counter` in which programs were compiled that are complete.

        A compilation in another thread may have begun before.
        """
        with self._lock:
            return sum(last - max(first, start) for first, last in self._spans if last > start)


@functools.cache
def compile_clock() -> CompileClock:
    """Return the clock of this process, which runs from the first call on."""
    clock = CompileClock()
    jax.monitoring.register_event_duration_secs_listener(clock.add)
    return clock


class PhaseTimer:
    """Sum the seconds spent in each named phase. Phases may repeat; a nested phase counts in both phases.

    Traces of jax's profiler show the phases by name.

    >>> timer = PhaseTimer()
    >>> with timer.phase("sample"):
    ...     pass
    >>> sorted(timer.seconds)
    ['sample']
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the duration of the `with` block to phase `name`."""
        start = time.perf_counter()
        try:
            with jax.profiler.TraceAnnotation(name):
                yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start


NOTICE_SECONDS = 5.0
"""Seconds after which `notice_if_long` reports."""


@contextlib.contextmanager
def notice_if_long(report: Callable[[str], object], message: str) -> Iterator[None]:
    """Report a message if the block takes longer than `NOTICE_SECONDS`."""
    notice = threading.Timer(NOTICE_SECONDS, report, [message])
    notice.start()
    try:
        yield
    finally:
        notice.cancel()
