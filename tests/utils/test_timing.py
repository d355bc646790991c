# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import time
from collections.abc import Callable

import pytest

from marin_rl.utils.timing import PhaseTimer


@pytest.fixture
def advance(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Advances a fake clock by a number of seconds."""
    now = 100.0

    def forward(seconds: float) -> None:
        nonlocal now
        now += seconds

    monkeypatch.setattr(time, "perf_counter", lambda: now)
    return forward


def test_phases_add_up(advance: Callable[[float], None]):
    timer = PhaseTimer()
    for seconds in (2.0, 3.0):
        with timer.phase("sample"):
            advance(seconds)
        advance(50.0)
    with timer.phase("step"):
        advance(1.0)
    assert timer.seconds == {"sample": 5.0, "step": 1.0}


def test_nested_phases_count_in_both(advance: Callable[[float], None]):
    timer = PhaseTimer()
    with timer.phase("outer"):
        advance(1.0)
        with timer.phase("inner"):
            advance(2.0)
    assert timer.seconds == {"outer": 3.0, "inner": 2.0}


def test_time_until_an_error_counts_and_the_error_propagates(advance: Callable[[float], None]):
    timer = PhaseTimer()

    def fail() -> None:
        with timer.phase("reward"):
            advance(4.0)
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert timer.seconds == {"reward": 4.0}
