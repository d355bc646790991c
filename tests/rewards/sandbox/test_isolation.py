# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

from marin_rl.rewards.sandbox.isolation import Isolation


def test_levels_are_ordered():
    assert sorted(Isolation, key=lambda level: level.rank) == [Isolation.NONE, Isolation.PARTIAL, Isolation.FULL]
