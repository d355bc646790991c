# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import asyncio
import math

import pytest

from marin_rl.distributed.weights.errors import (
    CorruptTransferError,
    ServerLostError,
    WeightTransferError,
    WrongSecretError,
)
from marin_rl.utils.retry import Clock, RetryConfig, retrying, retrying_async


class FakeTime:
    def __init__(self) -> None:
        self.pauses: list[float] = []

    @property
    def clock(self) -> Clock:
        return Clock(now=lambda: math.fsum(self.pauses), sleep=self.pauses.append)


def failing(times: int, error: WeightTransferError):
    left = [error] * times

    def attempt() -> str:
        if left:
            raise left.pop()
        return "weights"

    return attempt


def test_a_success_is_not_retried():
    time = FakeTime()
    assert retrying(RetryConfig(), (ServerLostError,), failing(0, ServerLostError()), time.clock) == "weights"
    assert time.pauses == []


def test_pauses_double_up_to_the_longest_with_jitter(caplog):
    time = FakeTime()
    config = RetryConfig(first_seconds=1.0, longest_seconds=4.0, give_up_seconds=1000.0)
    assert retrying(config, (ServerLostError,), failing(6, ServerLostError("gone")), time.clock) == "weights"
    for pause, longest in zip(time.pauses, [1, 2, 4, 4, 4, 4], strict=True):
        assert longest / 2 <= pause <= longest
    assert len(set(time.pauses)) == 6
    assert [record.message.split(";")[0] for record in caplog.records] == ["gone"] * 6


def test_the_last_error_is_raised_when_time_is_up():
    time = FakeTime()
    config = RetryConfig(first_seconds=1.0, longest_seconds=1.0, give_up_seconds=3.0)
    with pytest.raises(ServerLostError, match=r"gone \(given up after \d attempts in \d\.\d s\)"):
        retrying(config, (ServerLostError,), failing(100, ServerLostError("gone")), time.clock)
    assert sum(time.pauses) <= 3
    assert len(time.pauses) >= 3


def test_no_time_means_one_attempt():
    time = FakeTime()
    with pytest.raises(ServerLostError, match=r"^gone$"):
        retrying(RetryConfig(give_up_seconds=0.0), (ServerLostError,), failing(1, ServerLostError("gone")), time.clock)
    assert time.pauses == []


@pytest.mark.parametrize("error", [WrongSecretError("no"), CorruptTransferError("no"), WeightTransferError("no")])
def test_other_errors_are_raised_immediately(error: WeightTransferError):
    time = FakeTime()
    with pytest.raises(type(error), match=r"^no$"):
        retrying(RetryConfig(), (ServerLostError,), failing(1, error), time.clock)
    assert time.pauses == []


def test_the_longest_pause_is_at_least_the_first():
    with pytest.raises(ValueError, match=r"retry\.longest_seconds is 0\.05; it must be at least first_seconds, 0\.1"):
        RetryConfig(longest_seconds=0.05)


def test_pauses_never_overflow():
    assert RetryConfig().pause(100_000) <= 5.0


def in_a_loop(config: RetryConfig, errors: list[Exception]) -> tuple[str, int]:
    tried = 0

    async def attempt() -> str:
        nonlocal tried
        tried += 1
        if errors:
            raise errors.pop(0)
        return "weights"

    return asyncio.run(retrying_async(config, (ServerLostError,), attempt)), tried


def test_async_retries_the_same_errors():
    config = RetryConfig(first_seconds=0.001, longest_seconds=0.002)
    assert in_a_loop(config, []) == ("weights", 1)
    assert in_a_loop(config, [ServerLostError("gone")] * 3) == ("weights", 4)
    with pytest.raises(WrongSecretError, match=r"^no$"):
        in_a_loop(config, [ServerLostError("gone"), WrongSecretError("no")])


def test_async_raises_the_last_error_when_time_is_up():
    with pytest.raises(ServerLostError, match=r"^gone$"):
        in_a_loop(RetryConfig(give_up_seconds=0.0), [ServerLostError("gone")])
    config = RetryConfig(first_seconds=0.001, longest_seconds=0.001, give_up_seconds=0.01)
    with pytest.raises(ServerLostError, match=r"gone \(given up after \d+ attempts in \d+\.\d s\)"):
        in_a_loop(config, [ServerLostError("gone")] * 99)
