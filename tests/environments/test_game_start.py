# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from marin_rl.environments.games import Start, construct_game, draw_start, make_prototype

STILL = {"is_slippery": False}


def lake(seed: int, **options) -> Start:
    return draw_start("FrozenLake-v1", {**STILL, **options}, seed, random_start=False)


@given(seed=st.integers(0, 2**63 - 1), size=st.integers(2, 6), random_start=st.booleans())
@settings(max_examples=40, deadline=None)
def test_a_seed_determines_a_start_with_a_reachable_win(seed: int, size: int, random_start: bool):
    start, again = (draw_start("FrozenLake-v1", {**STILL, "size": size}, seed, random_start) for _ in range(2))
    assert (start, start.identity) == (again, again.identity)
    assert start.state is not None
    assert start.prototype.plan.values[start.state] > 0


def test_episodes_do_not_change_the_prototype_or_other_games():
    start = lake(3)
    before = dict(vars(start.prototype.game))
    one, other = start.begin(0), start.begin(0)
    one[0].step(1)
    one[0].step(2)
    assert one[0].s != other[0].s == other[1] == start.state
    assert vars(start.prototype.game) == before
    assert start.begin(0)[1] == start.state


def test_identity_of_a_start_is_its_game_options_and_state():
    first, second = lake(1), lake(2)
    assert first.identity != second.identity
    assert first.identity != lake(1, size=5).identity
    assert first.anchor(3) != first.anchor(4)
    assert first.anchor(3) == lake(1).anchor(3)
    hands = {draw_start("Blackjack-v1", {}, seed, random_start=False).identity for seed in range(20)}
    assert len(hands) > 10
    assert draw_start("Blackjack-v1", {}, 0, random_start=False).anchor(None) is None


def test_the_seed_of_the_record_starts_a_game_without_a_table():
    start = draw_start("Blackjack-v1", {}, 7, random_start=False)
    shown = {str(start.begin(seed)[1]) for seed in range(5)}
    assert shown == {start.first_observation}
    assert not start.prototype.has_table


def test_a_named_map_is_not_replaced_by_a_random_one():
    fixed = [draw_start("FrozenLake-v1", {"map_name": "4x4"}, seed, random_start=False) for seed in range(3)]
    assert len({start.arguments for start in fixed}) == 1
    assert lake(1).arguments != lake(2).arguments


@pytest.mark.parametrize("share", [0, 1.5, -0.1])
def test_a_share_of_ice_out_of_range_is_rejected(share: float):
    with pytest.raises(ValueError, match=f"options size 4 and p {share} must be"):
        lake(0, p=share)


def test_all_ice_is_allowed():
    assert "H" not in lake(0, p=1.0).arguments


def test_a_game_is_constructed_once():
    assert make_prototype("Taxi-v4", "{}") is make_prototype("Taxi-v4", "{}")
    assert construct_game("Taxi-v4", {}) is not construct_game("Taxi-v4", {})
