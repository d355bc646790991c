# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Retries with exponential backoff."""

import asyncio
import dataclasses
import logging
import random
import time
from collections.abc import Awaitable, Callable
from typing import Annotated, TypeVar

from annotated_types import Ge, Gt

from marin_rl.utils.settings.checks import ConfigSection, check_fields

logger = logging.getLogger(__name__)

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class RetryConfig(ConfigSection):
    """Exponential backoff for calls to another machine."""

    first_seconds: Annotated[float, Gt(0)] = 0.1
    """Seconds before the second attempt. Each later pause is twice the previous one. A pause is shortened at
    random by up to one half, so that several clients do not retry at the same time."""
    longest_seconds: float = 5.0
    """Longest pause in seconds; at least `first_seconds`."""
    give_up_seconds: Annotated[float, Ge(0)] = 120.0
    """Seconds after the first attempt in which a new attempt may start; then the last error is raised. 0: no retry."""

    def __post_init__(self) -> None:
        check_fields(self)
        if self.longest_seconds < self.first_seconds:
            raise ValueError(
                f"retry.longest_seconds is {self.longest_seconds}; it must be at least first_seconds, "
                f"{self.first_seconds}"
            )

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


def retrying(
    config: RetryConfig,
    errors: tuple[type[Exception], ...],
    attempt: Callable[[], T],
    clock: Clock,
) -> T:
    """Call `attempt` until it succeeds.

    Args:
        config: backoff settings.
        errors: error types after which to try again; all others are raised immediately. They must accept a message as
            the only argument.
        attempt: the function to call.
        clock: source of time.

    Raises:
        Exception: the error of the last attempt, if no further attempt is allowed.
    """
    started = clock.now()
    failed = 0
    while True:
        try:
            return attempt()
        except errors as error:
            failed += 1
            clock.sleep(_pause_after(error, failed, clock.now() - started, config))


async def retrying_async(
    config: RetryConfig, errors: tuple[type[Exception], ...], attempt: Callable[[], Awaitable[T]]
) -> T:
    """Async version of [`retrying`][marin_rl.utils.retry.retrying]."""
    started = time.monotonic()
    failed = 0
    while True:
        try:
            return await attempt()
        except errors as error:
            failed += 1
            await asyncio.sleep(_pause_after(error, failed, time.monotonic() - started, config))


def _pause_after(error: Exception, failed: int, spent: float, config: RetryConfig) -> float:
    """Seconds to wait after the error of attempt `failed`; raises an error of its type if no attempt is allowed."""
    pause = config.pause(failed)
    if spent + pause <= config.give_up_seconds:
        logger.warning("%s; trying again in %.1f s", error, pause)
        return pause
    if failed == 1:
        raise error
    raise type(error)(f"{error} (given up after {failed} attempts in {spent:.1f} s)") from error
