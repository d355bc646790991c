# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Pairs of a group; `test_judge` tests the answers with an endpoint."""

import collections

import pytest

from marin_rl.rewards.judge_answers import draw_pairs


@pytest.mark.parametrize("count", range(1, 10))
@pytest.mark.parametrize("opponents", [None, 1, 2, 3, 4, 20])
def test_every_rollout_meets_equally_many_others_once(count: int, opponents: int | None):
    pairs = draw_pairs(7, count, opponents)
    assert len({frozenset(pair) for pair in pairs}) == len(pairs)
    assert all(first != second for first, second in pairs)
    met = collections.Counter(rollout for pair in pairs for rollout in pair)
    wanted = count - 1 if opponents is None else min(opponents, count - 1)
    assert {met[rollout] for rollout in range(count)} == {wanted + (wanted * count) % 2}


def test_pairs_depend_on_the_seed_of_the_group():
    assert draw_pairs(1, 8, 2) == draw_pairs(1, 8, 2) != draw_pairs(2, 8, 2)
