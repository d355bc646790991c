# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Trying again, less and less often, for a limited time."""

import asyncio
import dataclasses
import logging
import math
import random
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

logger = logging.getLogger(__name__)

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class RetryConfig:
    """How long to go on when another machine does not answer."""

    first_seconds: float = 0.1
    """Seconds before the second attempt; above 0. Every later pause is twice the one before, each shortened by a random
    part of up to a half, so that those who wait do not come all at once."""
    longest_seconds: float = 5.0
    """Seconds that a pause takes at most; at least `first_seconds`."""
    give_up_seconds: float = 120.0
    """Seconds after the first attempt from which no other is made, and the last error is raised; 0 makes only one."""

    def __post_init__(self) -> None:
        if not (self.first_seconds > 0 and math.isfinite(self.first_seconds)):
            raise ValueError(f"retry.first_seconds is {self.first_seconds}; it is a number of seconds above 0")
        if not (self.longest_seconds >= self.first_seconds and math.isfinite(self.longest_seconds)):
            raise ValueError(
                f"retry.longest_seconds is {self.longest_seconds}; it must be at least first_seconds, "
                f"{self.first_seconds}"
            )
        if not (self.give_up_seconds >= 0 and math.isfinite(self.give_up_seconds)):
            raise ValueError(f"retry.give_up_seconds is {self.give_up_seconds}; it is a number of seconds from 0 up")

    def pause(self, attempt: int) -> float:
        """Seconds to wait after an attempt, counted from 1."""
        # Beyond 64 doublings a float would overflow, long after the longest pause is reached.
        longest = min(self.longest_seconds, self.first_seconds * 2.0 ** min(attempt - 1, 64))
        return longest * random.uniform(0.5, 1.0)


@dataclasses.dataclass(frozen=True)
class Clock:
    """Time, as tests replace it."""

    now: Callable[[], float] = time.monotonic
    """Seconds since whenever."""
    sleep: Callable[[float], None] = time.sleep
    """Waits for some seconds."""


@dataclasses.dataclass
class Attempts:
    """What was tried so far, and whether to try again."""

    config: RetryConfig
    """How often and how long."""
    started: float
    """When the first attempt began, in seconds since whenever."""
    failed: int = 0
    """Attempts that failed."""

    def pause_after(self, error: Exception, now: float) -> float:
        """Seconds to wait before another attempt.

        Args:
            error: what the last attempt raised; it can be made from a message alone.
            now: the time, counted as `started` was.

        Raises:
            Exception: one of the error's own type, when time is up.
        """
        self.failed += 1
        spent, pause = now - self.started, self.config.pause(self.failed)
        if spent + pause > self.config.give_up_seconds:
            if self.failed == 1:
                raise error
            raise type(error)(f"{error} (given up after {self.failed} attempts in {spent:.1f} s)") from error
        logger.warning("%s; trying again in %.1f s", error, pause)
        return pause


def retrying(
    config: RetryConfig,
    errors: tuple[type[Exception], ...],
    attempt: Callable[[], T],
    clock: Clock,
) -> T:
    """The result of the first attempt that succeeds.

    Args:
        config: how often and how long.
        errors: which errors another attempt may mend; all others are raised at once.
        attempt: what is tried.
        clock: measures and waits.

    Raises:
        Exception: the last attempt's, when time is up.
    """
    attempts = Attempts(config, clock.now())
    while True:
        try:
            return attempt()
        except errors as error:
            clock.sleep(attempts.pause_after(error, clock.now()))


async def retrying_async(
    config: RetryConfig, errors: tuple[type[Exception], ...], attempt: Callable[[], Awaitable[T]]
) -> T:
    """As [`retrying`][marin_rl.retry.retrying], within an event loop."""
    attempts = Attempts(config, time.monotonic())
    while True:
        try:
            return await attempt()
        except errors as error:
            await asyncio.sleep(attempts.pause_after(error, time.monotonic()))
