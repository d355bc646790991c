# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

from collections.abc import Callable

import numpy as np
import pytest

from marin_rl.retry import Clock
from marin_rl.weights.config import ArrowFlightConfig
from marin_rl.weights.protocol import WeightTransferError
from marin_rl.weights.publish import MultiHostSender, ShardedSender, TrainingHost
from tests.weights.ends import SECRET, closing

WEIGHTS = {"w": np.arange(6, dtype=np.float32)}


def open_host(index: int) -> ShardedSender:
    return ArrowFlightConfig().open_sender(SECRET, TrainingHost(index, 2, frozenset()))


def multi_host_sender(own: ShardedSender, other: ShardedSender, meanwhile: Callable[[float], None]) -> MultiHostSender:
    """Make a sender with a clock that advances ten seconds per poll and then calls `meanwhile` with the time."""
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(10.0)
        meanwhile(sum(slept))

    receiver = ArrowFlightConfig().open_receiver([own.address, other.address], SECRET)
    return MultiHostSender(own, receiver, timeout=60.0, clock=Clock(now=lambda: sum(slept), sleep=sleep))


def test_flush_waits_for_all_hosts():
    seen = []
    with closing(open_host(0)) as own, closing(open_host(1)) as other:

        def meanwhile(now: float) -> None:
            seen.append((now, hosts.published))
            if now == 30.0:
                other.publish(WEIGHTS, 1)
                other.flush()

        hosts = multi_host_sender(own, other, meanwhile)
        assert hosts.address == own.address
        hosts.flush()
        assert seen == []
        hosts.publish(WEIGHTS, 1)
        hosts.flush()
        assert own.published == hosts.published == 1
    assert seen == [(10.0, None), (20.0, None), (30.0, None)]


def test_flush_times_out_when_a_host_lags():
    with closing(open_host(0)) as own, closing(open_host(1)) as other:
        hosts = multi_host_sender(own, other, lambda now: None)
        hosts.publish(WEIGHTS, 1)
        with pytest.raises(
            WeightTransferError, match="version 1 of the weights is published by this training host, but after 60 s"
        ):
            hosts.flush()
