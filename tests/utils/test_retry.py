# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import asyncio
import math
from collections.abc import Callable

import pytest

from marin_rl.utils.retry import Clock, RetryConfig, retrying, retrying_async


class LostError(Exception):
    """An error after which calls are tried again."""


def failing(*errors: Exception) -> Callable[[], str]:
    left = list(errors)

    def attempt() -> str:
        if left:
            raise left.pop(0)
        return "weights"

    return attempt


def run_with_pauses(config: RetryConfig, *errors: Exception) -> tuple[str | Exception, list[float]]:
    """Return the result or error of `retrying`, and its pauses."""
    pauses: list[float] = []
    clock = Clock(now=lambda: math.fsum(pauses), sleep=pauses.append)
    try:
        return retrying(config, (LostError,), failing(*errors), clock), pauses
    except Exception as error:
        return error, pauses


def run_async(config: RetryConfig, *errors: Exception) -> str | Exception:
    attempt = failing(*errors)

    async def call() -> str:
        return attempt()

    try:
        return asyncio.run(retrying_async(config, (LostError,), call))
    except Exception as error:
        return error


def test_pauses_double_up_to_the_longest_with_jitter(caplog: pytest.LogCaptureFixture):
    config = RetryConfig(first_seconds=1.0, longest_seconds=4.0, give_up_seconds=1000.0)
    result, pauses = run_with_pauses(config, *[LostError("gone")] * 6)
    assert result == "weights"
    for pause, longest in zip(pauses, [1, 2, 4, 4, 4, 4], strict=True):
        assert longest / 2 <= pause <= longest
    assert len(set(pauses)) == 6
    assert [record.message.split(";")[0] for record in caplog.records] == ["gone"] * 6
    assert RetryConfig().pause(100_000) <= 5.0


def test_the_last_error_is_raised_when_time_is_up():
    config = RetryConfig(first_seconds=1.0, longest_seconds=1.0, give_up_seconds=3.0)
    error, pauses = run_with_pauses(config, *[LostError("gone")] * 100)
    assert str(error) == f"gone (given up after {len(pauses) + 1} attempts in {sum(pauses):.1f} s)"
    assert len(pauses) >= 3 >= sum(pauses)
    config = RetryConfig(first_seconds=0.001, longest_seconds=0.001, give_up_seconds=0.01)
    assert str(run_async(config, *[LostError("gone")] * 99)).startswith("gone (given up after ")


@pytest.mark.parametrize(
    ("errors", "seconds", "result"),
    [
        ([], 9.0, "weights"),
        ([LostError("gone")] * 3, 9.0, "weights"),
        ([LostError("gone")], 0.0, LostError("gone")),
        ([LostError("gone"), ValueError("no")], 9.0, ValueError("no")),
    ],
)
def test_only_the_named_errors_are_retried_with_and_without_an_event_loop(
    errors: list[Exception], seconds: float, result: str | Exception
):
    config = RetryConfig(first_seconds=0.001, longest_seconds=0.002, give_up_seconds=seconds)
    assert repr(run_async(config, *errors)) == repr(run_with_pauses(config, *errors)[0]) == repr(result)


def test_the_longest_pause_is_at_least_the_first():
    with pytest.raises(ValueError, match=r"retry\.longest_seconds is 0\.05; it must be at least first_seconds, 0\.1"):
        RetryConfig(longest_seconds=0.05)
