# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

from typing import Any

import pytest
from gymnasium.envs.toy_text.taxi import TaxiEnv
from hypothesis import given, settings
from hypothesis import strategies as st

from marin_rl.environments.games import View
from marin_rl.environments.gymnasium_games import (
    DISCOUNT,
    GameStart,
    board_of,
    construct_game,
    draw_start,
    fastest_plan,
    reachable,
)

LAKE = {"is_slippery": False, "desc": ["SFFH", "FHFF", "FFFF", "HFFG"]}
TABLED: list[tuple[str, dict[str, Any]]] = [("FrozenLake-v1", LAKE), ("Taxi-v4", {}), ("CliffWalking-v1", {})]
TABLED_IDS = [id for id, _ in TABLED]


@pytest.mark.parametrize("view", View)
@pytest.mark.parametrize(("id", "options"), TABLED, ids=TABLED_IDS)
def test_states_that_differ_look_different(id: str, options: dict[str, Any], view: View):
    game = construct_game(id, options)
    board = board_of(game)
    states = range(game.observation_space.n)
    assert len({board.show(game, state, view) for state in states}) == len(states)
    names = board.names(view)
    assert len(set(names)) == game.action_space.n
    if view is View.COMPACT:
        assert list(names) == [name[0] for name in board.actions]


@pytest.mark.parametrize(("id", "options"), TABLED, ids=TABLED_IDS)
def test_names_of_moves_match_the_game(id: str, options: dict[str, Any]):
    """Compare moves in the middle of the board with the transition table: `left` goes left."""
    game = construct_game(id, options)
    board = board_of(game)

    def place(state: int) -> tuple[int, int]:
        if isinstance(game, TaxiEnv):
            row, column, *_ = game.decode(state)
            return int(row), int(column)
        return divmod(state, game.ncol if id == "FrozenLake-v1" else game.shape[1])

    moves = {"left": (0, -1), "west": (0, -1), "right": (0, 1), "east": (0, 1), "up": (-1, 0), "north": (-1, 0)}
    moves |= {"down": (1, 0), "south": (1, 0)}
    # No wall, hole or border is next to these cells.
    start = game.encode(2, 2, 0, 1) if isinstance(game, TaxiEnv) else 10 if id == "FrozenLake-v1" else 13
    named = [name for name in board.actions if name in moves]
    assert len(named) == 4
    for name in named:
        [(_, following, _, _)] = game.P[start][board.actions.index(name)]
        row, column = place(start)
        assert place(int(following)) == (row + moves[name][0], column + moves[name][1])


def test_other_games_show_their_observation_and_are_won_by_reward():
    game = construct_game("Blackjack-v1", {})
    board = board_of(game)
    assert board.show(game, (14, 10, 0), View.COMPACT) == board.show(game, (14, 10, 0), View.READABLE) == "(14, 10, 0)"
    assert [board.wins(game, None, reward) for reward in (-1.0, 0.0, 0.5)] == [False, False, True]
    lake = construct_game("FrozenLake-v1", LAKE)
    assert [state for state in range(16) if board_of(lake).wins(lake, state, 0.0)] == [15]


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


def test_the_safe_way_has_a_higher_value_than_the_risky_one():
    assert [reachable(TABLE, [start]) for start in (0, 4)] == [[0, 1], [0, 1, 4]]
    plan = fastest_plan(TABLE, [0], wins)
    assert plan.values == pytest.approx({0: DISCOUNT, 1: 1.0})
    assert plan.best == {0: (0,), 1: (0,)}
    # The risky action may lose; going back cannot.
    assert plan.safe == {0: (0,), 1: (0, 1)}


def test_equal_ways_are_both_best_and_unwinnable_states_have_value_zero():
    table = {0: {0: [(1.0, 1, 0.0, True)], 1: [(1.0, 1, 0.0, True)]}, 1: {0: [(1.0, 1, 0.0, True)]}}
    assert fastest_plan(table, [0], lambda state, reward: True).best == {0: (0, 1)}
    lost = fastest_plan(table, [0], lambda state, reward: False)
    assert lost.values == {0: 0.0}
    assert lost.safe == {0: ()}


STILL = {"is_slippery": False}


def lake(seed: int, **options) -> GameStart:
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
    hands = [draw_start("Blackjack-v1", {}, seed, random_start=False) for seed in range(20)]
    assert len({hand.identity for hand in hands}) > 10
    assert (hands[0].anchor(None), hands[0].prototype.has_table) == (None, False)
    # Without a table, the seed of the start determines it.
    assert len({str(hands[7].begin(seed)[1]) for seed in range(5)}) == 1
    # A named map is not replaced by a random one.
    assert len({draw_start("FrozenLake-v1", {"map_name": "4x4"}, seed, False).arguments for seed in range(3)}) == 1
