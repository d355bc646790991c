# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Trying again, less and less often, for a limited time."""

import dataclasses
import logging
import math
import random
import time
from collections.abc import Callable
from typing import TypeVar

from marin_rl.weights.errors import WeightTransferError

logger = logging.getLogger(__name__)

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class RetryConfig:
    """How long a worker goes on when weights do not arrive."""

    first_seconds: float = 0.1
    """Seconds before the second attempt; above 0. Every later pause is twice the one before, each shortened by a random
    part of up to a half, so that workers do not come all at once."""
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


def retrying(
    config: RetryConfig,
    errors: tuple[type[WeightTransferError], ...],
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
        WeightTransferError: the last attempt's, when time is up.
    """
    started, attempts = clock.now(), 0
    while True:
        attempts += 1
        try:
            return attempt()
        except errors as error:
            spent, pause = clock.now() - started, config.pause(attempts)
            if spent + pause > config.give_up_seconds:
                if attempts == 1:
                    raise
                raise type(error)(f"{error} (given up after {attempts} attempts in {spent:.1f} s)") from error
            logger.warning("%s; trying again in %.1f s", error, pause)
            clock.sleep(pause)
