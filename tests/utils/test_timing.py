# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import contextlib
import time

import pytest

from marin_rl.utils.timing import COMPILE_EVENTS, CompileClock, PhaseTimer


def test_phases_add_up_and_nested_phases_count_in_both(monkeypatch: pytest.MonkeyPatch):
    now = [100.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    timer = PhaseTimer()
    for seconds in (2.0, 3.0):
        with timer.phase("outer"):
            now[0] += seconds
            with contextlib.suppress(KeyError), timer.phase("inner"):
                now[0] += 10 * seconds
                raise KeyError
        now[0] += 500.0
    assert timer.seconds == {"outer": 55.0, "inner": 50.0}


def test_compilation_before_a_time_does_not_count_since_then(monkeypatch: pytest.MonkeyPatch):
    now, [event, *_] = [0.0], sorted(COMPILE_EVENTS)
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    clock = CompileClock()
    for end, seconds in [(3.0, 1.0), (10.0, 6.0), (11.0, 2.0)]:
        now[0] = end
        clock.add(event, seconds)
    # From 2 to 3, and from 4 to 11.
    assert [clock.since(start) for start in (0.0, 2.5, 9.0, 11.0)] == [8.0, 7.5, 2.0, 0.0]
    assert clock.seconds == clock.since(0.0)
