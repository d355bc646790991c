# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import numpy as np
import pytest

from marin_rl.environments.games import DISCOUNT, make_plan, reachable, read_table

# 0 -> 1 -> 2 (won); from 0 a risky action reaches 2 or 3 (lost); 4 is unreachable.
TABLE = {
    0: {0: [(1.0, 1, 0.0, False)], 1: [(0.5, 2, 1.0, True), (0.5, 3, 0.0, True)]},
    1: {0: [(1.0, 2, 1.0, True)], 1: [(1.0, 0, 0.0, False)]},
    2: {0: [(1.0, 2, 0.0, True)], 1: [(1.0, 2, 0.0, True)]},
    3: {0: [(1.0, 3, 0.0, True)], 1: [(1.0, 3, 0.0, True)]},
    4: {0: [(1.0, 0, 0.0, False)], 1: [(1.0, 0, 0.0, False)]},
}


def wins(state: int, reward: float) -> bool:
    return state == 2


def test_tables_have_python_numbers():
    [outcome] = read_table({np.int64(0): {0: [(1, np.int64(2), 1, np.bool_(True))]}})[0][0]
    assert [type(part) for part in outcome] == [float, int, float, bool]


def test_reachable_states():
    assert reachable(TABLE, [0]) == [0, 1]
    assert reachable(TABLE, [4]) == [0, 1, 4]


def test_the_safe_way_has_a_higher_value_than_the_risky_one():
    plan = make_plan(TABLE, [0], wins)
    assert plan.values == pytest.approx({0: DISCOUNT, 1: 1.0})
    assert plan.best == {0: (0,), 1: (0,)}
    # The risky action may lose; going back cannot.
    assert plan.safe == {0: (0,), 1: (0, 1)}


def test_equal_ways_are_both_best_and_unwinnable_states_have_value_zero():
    table = {0: {0: [(1.0, 1, 0.0, True)], 1: [(1.0, 1, 0.0, True)]}, 1: {0: [(1.0, 1, 0.0, True)]}}
    assert make_plan(table, [0], lambda state, reward: True).best == {0: (0, 1)}
    lost = make_plan(table, [0], lambda state, reward: False)
    assert lost.values == {0: 0.0}
    assert lost.safe == {0: ()}
