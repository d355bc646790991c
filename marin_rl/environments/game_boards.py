# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Text interfaces of games: rules, action names, rendering of states, and the criterion of a win."""

import dataclasses
import enum
from collections.abc import Callable
from typing import Any


class View(enum.StrEnum):
    """Text format of a game."""

    READABLE = "readable"
    """Rules, a spaced board with a short description, and actions as words; for pretrained models."""
    COMPACT = "compact"
    """A bare board without rules, and actions as letters; for tiny models with byte tokens."""


@dataclasses.dataclass(frozen=True)
class Board:
    """Text interface of a game."""

    actions: tuple[str, ...]
    """Name of each action, by action number; names are numbers, or have different first letters."""
    rules: str
    """Instructions, in sentences."""
    show: Callable[[Any, Any, View], str]
    """Renders a game (unwrapped) with an observation (the state, for games with a transition table)."""
    wins: Callable[[Any, Any, float], bool]
    """Returns whether a finished game was won, given its last observation and reward."""

    def names(self, view: View) -> tuple[str, ...]:
        """Return the names of the actions in a view."""
        return self.actions if view is View.READABLE else tuple(_letter(action) for action in self.actions)


def board_of(game: Any) -> Board:
    """Return the board of a game; the default board supports any game with discrete actions.

    Args:
        game: a gymnasium environment, unwrapped.
    """
    from gymnasium.envs.toy_text.cliffwalking import CliffWalkingEnv
    from gymnasium.envs.toy_text.frozen_lake import FrozenLakeEnv
    from gymnasium.envs.toy_text.taxi import TaxiEnv

    if isinstance(game, FrozenLakeEnv):
        return Board(("left", "down", "right", "up"), LAKE_RULES, _show_lake, _wins_lake)
    if isinstance(game, TaxiEnv):
        return Board(("south", "north", "east", "west", "pickup", "dropoff"), TAXI_RULES, _show_taxi, _wins_by_end)
    if isinstance(game, CliffWalkingEnv):
        return Board(("up", "right", "down", "left"), CLIFF_RULES, _show_cliff, _wins_by_end)
    return Board(tuple(str(number) for number in range(game.action_space.n)), OTHER_RULES, _show_other, _wins_by_reward)


LAKE_RULES = (
    "You cross a frozen lake to reach the goal. In the map, A is you, G the goal, H a hole and . is ice. "
    "Falling into a hole ends the game."
)
TAXI_RULES = (
    "You drive a taxi: fetch the passenger and bring them to their destination. In the map, A is the taxi, | a wall, "
    "and R, G, Y, B are the places where people wait. Use pickup and dropoff where the passenger and the destination "
    "are."
)
CLIFF_RULES = (
    "You walk along a cliff to reach the goal. In the map, A is you, G the goal, C the cliff and . is ground. "
    "Stepping into the cliff puts you back at the start."
)
OTHER_RULES = "You play a game. Each reply chooses an action by its number."


def _letter(action: str) -> str:
    return action if action.isdigit() else action[0]


def _grid(rows: list[str], view: View) -> str:
    return "\n".join(rows if view is View.COMPACT else [" ".join(row) for row in rows])


def _place(row: int, column: int) -> str:
    return f"row {row + 1}, column {column + 1}"


def _show_lake(game: Any, state: int, view: View) -> str:
    cells = [["." if cell in b"SF" else cell.decode() for cell in row] for row in game.desc.tolist()]
    row, column = divmod(state, game.ncol)
    cells[row][column] = "A"
    grid = _grid(["".join(line) for line in cells], view)
    return grid if view is View.COMPACT else f"{grid}\nYou are in {_place(row, column)}."


def _wins_lake(game: Any, state: int, reward: float) -> bool:
    return game.desc.flat[state] == b"G"


def _show_cliff(game: Any, state: int, view: View) -> str:
    height, width = game.shape
    cells = [["C" if game._cliff[row, column] else "." for column in range(width)] for row in range(height)]
    cells[height - 1][width - 1] = "G"
    row, column = divmod(state, width)
    cells[row][column] = "A"
    grid = _grid(["".join(line) for line in cells], view)
    return grid if view is View.COMPACT else f"{grid}\nYou are in {_place(row, column)}."


_TAXI_PLACES = "RGYB"


def _show_taxi(game: Any, state: int, view: View) -> str:
    row, column, passenger, destination = game.decode(state)
    waiting, goal = "RGYBA"[passenger], _TAXI_PLACES[destination]
    if view is View.COMPACT:
        return f"{row}{column}{waiting}{goal}"
    cells = [line.decode() for line in (b"".join(line) for line in game.desc.tolist())]
    line = cells[row + 1]
    cells[row + 1] = f"{line[: 2 * column + 1]}A{line[2 * column + 2 :]}"
    where = "in the taxi" if waiting == "A" else f"waiting at {waiting}"
    return (
        "\n".join(cells)
        + f"\nThe taxi is in {_place(row, column)}. The passenger is {where} and wants to go to {goal}."
    )


def _wins_by_end(game: Any, state: int, reward: float) -> bool:
    return True


def _show_other(game: Any, observation: Any, view: View) -> str:
    return str(observation)


def _wins_by_reward(game: Any, observation: Any, reward: float) -> bool:
    return reward > 0
