# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Wall-clock time by phase."""

import contextlib
import time
from collections.abc import Iterator

import jax


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
