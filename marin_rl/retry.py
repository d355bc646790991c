# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Retries with exponential backoff."""

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
    """Exponential backoff for calls to another machine."""

    first_seconds: float = 0.1
    """Seconds before the second attempt; above 0. Each later pause is twice the previous one. A pause is shortened at
    random by up to one half, so that several clients do not retry at the same time."""
    longest_seconds: float = 5.0
    """Longest pause in seconds; at least `first_seconds`."""
    give_up_seconds: float = 120.0
    """Seconds after the first attempt in which a new attempt may start; then the last error is raised. 0: no retry."""

    def __post_init__(self) -> None:
        if not (self.first_seconds > 0 and math.isfinite(self.first_seconds)):
            raise ValueError(f"retry.first_seconds is {self.first_seconds}; it must be a number of seconds above 0")
        if not (self.longest_seconds >= self.first_seconds and math.isfinite(self.longest_seconds)):
            raise ValueError(
                f"retry.longest_seconds is {self.longest_seconds}; it must be at least first_seconds, "
                f"{self.first_seconds}"
            )
        if not (self.give_up_seconds >= 0 and math.isfinite(self.give_up_seconds)):
            raise ValueError(f"retry.give_up_seconds is {self.give_up_seconds}; it must be at least 0 seconds")

    def pause(self, attempt: int) -> float:
        """Seconds to wait after attempt number `attempt` (the first is 1)."""
        # The exponent is bounded because a float overflows after about 1,000 doublings.
        longest = min(self.longest_seconds, self.first_seconds * 2.0 ** min(attempt - 1, 64))
        return longest * random.uniform(0.5, 1.0)


@dataclasses.dataclass(frozen=True)
class Clock:
    """Source of time, which tests replace."""

    now: Callable[[], float] = time.monotonic
    """Returns the time in seconds since an arbitrary point."""
    sleep: Callable[[float], None] = time.sleep
    """Sleeps for a number of seconds."""


@dataclasses.dataclass
class Attempts:
    """Failed attempts of one call."""

    config: RetryConfig
    """Backoff settings."""
    started: float
    """Start time of the first attempt in seconds, on the clock of `pause_after`."""
    failed: int = 0
    """Number of failed attempts."""

    def pause_after(self, error: Exception, now: float) -> float:
        """Count a failed attempt and return the pause before the next one.

        Args:
            error: the error of the last attempt; its type must accept a message as the only argument.
            now: the current time in seconds, on the clock of `started`.

        Returns:
            Seconds to wait.

        Raises:
            Exception: an error of the same type, if no further attempt is allowed.
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
    """Call `attempt` until it succeeds.

    Args:
        config: backoff settings.
        errors: error types after which to try again; all others are raised immediately.
        attempt: the function to call.
        clock: source of time.

    Returns:
        The result of the first successful attempt.

    Raises:
        Exception: the error of the last attempt, if no further attempt is allowed.
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
    """Async version of [`retrying`][marin_rl.retry.retrying]."""
    attempts = Attempts(config, time.monotonic())
    while True:
        try:
            return await attempt()
        except errors as error:
            await asyncio.sleep(attempts.pause_after(error, time.monotonic()))
