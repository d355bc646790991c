# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import contextlib
import time

import pytest

from marin_rl.utils.timing import PhaseTimer


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
