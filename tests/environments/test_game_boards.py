# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Boards of games: the text of every state is complete."""

from typing import Any

import pytest
from gymnasium.envs.toy_text.taxi import TaxiEnv

from marin_rl.environments.games import View, board_of, construct_game

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


@pytest.mark.parametrize("id", [*TABLED_IDS, "Blackjack-v1"])
def test_every_action_has_a_distinct_name_and_letter(id: str):
    game = construct_game(id, {})
    board = board_of(game)
    count = game.action_space.n
    for view in View:
        assert len(set(board.names(view))) == count
    assert all(len(letter) == 1 for letter in board.names(View.COMPACT))
    for letter, name in zip(board.names(View.COMPACT), board.names(View.READABLE), strict=True):
        assert name.startswith(letter)


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


def test_a_lake_is_won_only_at_the_goal():
    game = construct_game("FrozenLake-v1", LAKE)
    board = board_of(game)
    assert [state for state in range(16) if board.wins(game, state, 0.0)] == [15]


def test_other_games_show_their_observation_and_are_won_by_reward():
    game = construct_game("Blackjack-v1", {})
    board = board_of(game)
    assert board.show(game, (14, 10, 0), View.COMPACT) == board.show(game, (14, 10, 0), View.READABLE) == "(14, 10, 0)"
    assert [board.wins(game, None, reward) for reward in (-1.0, 0.0, 0.5)] == [False, False, True]
