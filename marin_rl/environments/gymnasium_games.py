# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Gymnasium games: text interfaces, transition tables and optimal plans, and initial states of tasks."""

import copy
import dataclasses
import functools
import json
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from marin_rl.environments.games import View
from marin_rl.utils.errors import nearest


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
        if view is View.READABLE:
            return self.actions
        return tuple(action if action.isdigit() else action[0] for action in self.actions)


def _place(row: int, column: int) -> str:
    return f"row {row + 1}, column {column + 1}"


def _show_map(cells: list[list[str]], state: int, view: View) -> str:
    row, column = divmod(state, len(cells[0]))
    cells[row][column] = "A"
    if view is View.COMPACT:
        return "\n".join("".join(line) for line in cells)
    return "\n".join(" ".join(line) for line in cells) + f"\nYou are in {_place(row, column)}."


def _show_lake(game: Any, state: int, view: View) -> str:
    cells = [["." if cell in b"SF" else cell.decode() for cell in row] for row in game.desc.tolist()]
    return _show_map(cells, state, view)


def _show_cliff(game: Any, state: int, view: View) -> str:
    height, width = game.shape
    cells = [["C" if game._cliff[row, column] else "." for column in range(width)] for row in range(height)]
    cells[height - 1][width - 1] = "G"
    return _show_map(cells, state, view)


def _show_taxi(game: Any, state: int, view: View) -> str:
    row, column, passenger, destination = game.decode(state)
    waiting, goal = "RGYBA"[passenger], "RGYB"[destination]
    if view is View.COMPACT:
        return f"{row}{column}{waiting}{goal}"
    cells = [b"".join(line).decode() for line in game.desc.tolist()]
    line = cells[row + 1]
    cells[row + 1] = f"{line[: 2 * column + 1]}A{line[2 * column + 2 :]}"
    where = "in the taxi" if waiting == "A" else f"waiting at {waiting}"
    return (
        "\n".join(cells)
        + f"\nThe taxi is in {_place(row, column)}. The passenger is {where} and wants to go to {goal}."
    )


_LAKE = Board(
    ("left", "down", "right", "up"),
    "You cross a frozen lake to reach the goal. In the map, A is you, G the goal, H a hole and . is ice. "
    "Falling into a hole ends the game.",
    show=_show_lake,
    wins=lambda game, state, reward: game.desc.flat[state] == b"G",
)
_TAXI = Board(
    ("south", "north", "east", "west", "pickup", "dropoff"),
    "You drive a taxi: fetch the passenger and bring them to their destination. In the map, A is the taxi, | a wall, "
    "and R, G, Y, B are the places where people wait. Use pickup and dropoff where the passenger and the destination "
    "are.",
    show=_show_taxi,
    wins=lambda game, state, reward: True,
)
_CLIFF = Board(
    ("up", "right", "down", "left"),
    "You walk along a cliff to reach the goal. In the map, A is you, G the goal, C the cliff and . is ground. "
    "Stepping into the cliff puts you back at the start.",
    show=_show_cliff,
    wins=lambda game, state, reward: True,
)


def board_of(game: Any) -> Board:
    """Return the board of a gymnasium game, unwrapped; the default supports any game with discrete actions."""
    from gymnasium.envs.toy_text.cliffwalking import CliffWalkingEnv
    from gymnasium.envs.toy_text.frozen_lake import FrozenLakeEnv
    from gymnasium.envs.toy_text.taxi import TaxiEnv

    for kind, board in ((FrozenLakeEnv, _LAKE), (TaxiEnv, _TAXI), (CliffWalkingEnv, _CLIFF)):
        if isinstance(game, kind):
            return board
    return Board(
        tuple(str(number) for number in range(game.action_space.n)),
        "You play a game. Each reply chooses an action by its number.",
        lambda game, observation, view: str(observation),
        lambda game, observation, reward: reward > 0,
    )


Table = Mapping[int, Mapping[int, Sequence[Any]]]
"""Transition table of gymnasium (`env.unwrapped.P`): by state and action, the possible outcomes as probability, next
state, reward, and whether the game ends."""

DISCOUNT = 0.99
"""Discount of a win for each step; small enough that shorter ways are better."""
_TOLERANCE = 1e-10


@dataclasses.dataclass(frozen=True)
class GamePlan:
    """Values and actions for every reachable state."""

    values: Mapping[int, float]
    """Maximum expected `DISCOUNT`^(steps to a win), by state; 0 if no win is reachable."""
    best: Mapping[int, tuple[int, ...]]
    """Optimal actions by state, in ascending order; in a deterministic game, the first steps of the shortest ways."""
    safe: Mapping[int, tuple[int, ...]]
    """Actions by state that cannot lose the game immediately, in ascending order."""


def reachable(table: Table, starts: Iterable[int]) -> list[int]:
    """Return the states reachable from `starts`, inclusive, in ascending order; the game ends at terminal outcomes."""
    visited = set(starts)
    pending = list(visited)
    while pending:
        outcomes = [outcome for action in table[pending.pop()].values() for outcome in action]
        for chance, state, _, over in outcomes:
            if chance > 0 and not over and state not in visited:
                visited.add(int(state))
                pending.append(int(state))
    return sorted(visited)


def fastest_plan(table: Table, starts: Iterable[int], wins: Callable[[int, float], bool]) -> GamePlan:
    """Compute the fastest plan by value iteration: V(s) = max_a Σ p·(1 if won, 0 if lost, else DISCOUNT·V(s')).

    `wins` returns whether a finished game was won, given its last state and reward.
    """
    states = reachable(table, starts)
    values = dict.fromkeys(states, 0.0)

    def action_value(state: int, action: int) -> float:
        return sum(
            chance * (float(wins(following, reward)) if over else DISCOUNT * values[following])
            for chance, following, reward, over in table[state][action]
        )

    change = 1.0
    while change > _TOLERANCE:
        change = 0.0
        for state in states:
            value = max(action_value(state, action) for action in table[state])
            change = max(change, abs(value - values[state]))
            values[state] = value
    best = {
        state: tuple(action for action in table[state] if action_value(state, action) >= values[state] - 1e-6)
        for state in states
    }
    safe = {
        state: tuple(
            action
            for action, outcomes in table[state].items()
            if all(wins(following, reward) for _, following, reward, over in outcomes if over)
        )
        for state in states
    }
    return GamePlan(values, best, safe)


@dataclasses.dataclass(frozen=True)
class Prototype:
    """A game that is constructed once and copied for each episode."""

    game: Any
    """The gymnasium environment, unwrapped; games with a transition table are only used as copies."""
    board: Board
    """Text interface of the game."""
    has_table: bool
    """Whether the game has a transition table, which permits copies, arbitrary initial states and planning."""
    max_steps: int | None
    """The game's step limit."""

    @functools.cached_property
    def plan(self) -> GamePlan:
        """Optimal plan for all initial states."""
        starts = [state for state, weight in enumerate(self.game.initial_state_distrib) if weight > 0]
        return fastest_plan(self.game.P, starts, lambda state, reward: self.board.wins(self.game, state, reward))


@dataclasses.dataclass(frozen=True)
class GameStart:
    """Initial state of a game."""

    id: str
    """Name of the game in gymnasium."""
    arguments: str
    """Constructor arguments as JSON."""
    state: int | None
    """Initial state; None for a game without a transition table, whose seed determines it."""
    seed: int
    """Seed for the initial state of a game without a transition table."""
    identity: str
    """Text that identifies this initial state and determines its split."""

    @property
    def prototype(self) -> Prototype:
        """Prototype of the game."""
        return make_prototype(self.id, self.arguments)

    def anchor(self, state: int | None) -> object:
        """Return a rendering-independent identity of a state; None for a game without a transition table."""
        return None if state is None else _anchor(self.id, self.arguments, state)

    def begin(self, seed: int) -> tuple[Any, Any]:
        """Return a new game in its initial state and the first observation.

        Games with a transition table take all randomness from `seed`; other games use the seed of this record.
        """
        prototype = self.prototype
        if not prototype.has_table:
            game = construct_game(self.id, json.loads(self.arguments))
            return game, game.reset(seed=self.seed)[0]
        # reset only replaces attributes of the copy; transition table and map are shared with the prototype.
        game = copy.copy(prototype.game)
        game.reset(seed=seed)
        game.s = self.state
        return game, self.state


def draw_start(id: str, options: Mapping[str, Any], seed: int, random_start: bool) -> GameStart:
    """Draw the initial state of a game.

    `id` is the name of the game in gymnasium. `random_start` draws from all states from which a win is reachable.

    Raises:
        ValueError: if gymnasium does not have the game, the options are invalid, or `random_start` is set for a game
            without a transition table.
    """
    arguments = json.dumps(_arguments(id, options, seed), sort_keys=True)
    prototype = make_prototype(id, arguments)
    if not prototype.has_table:
        if random_start:
            raise ValueError(f"text game {id!r} has no transition table to draw a start from; set random_start: false")
        observation, _ = prototype.game.reset(seed=seed)
        shown = prototype.board.show(prototype.game, observation, View.READABLE)
        return GameStart(id, arguments, None, seed, json.dumps([id, arguments, shown], sort_keys=True))
    if random_start:
        winnable = [int(state) for state, value in prototype.plan.values.items() if value > 0]
        state = random.Random(seed).choice(winnable)
    else:
        state = int(copy.copy(prototype.game).reset(seed=seed)[0])
    return GameStart(id, arguments, state, seed, json.dumps(_anchor(id, arguments, state), sort_keys=True))


def _anchor(id: str, arguments: str, state: int) -> dict[str, Any]:
    return {"game": id, "options": json.loads(arguments), "state": state}


def _arguments(id: str, options: Mapping[str, Any], seed: int) -> dict[str, Any]:
    """Return the constructor arguments; FrozenLake without a map gets a random one."""
    fixed = options.get("map_name") is not None or options.get("desc") is not None
    if not id.startswith("FrozenLake") or fixed:
        return dict(options)
    from gymnasium.envs.toy_text.frozen_lake import generate_random_map

    size, share = options.get("size", 4), options.get("p", 0.8)
    if not (isinstance(size, int) and size >= 2 and 0 < share <= 1):
        raise ValueError(
            f"text game {id!r}: options size {size!r} and p {share!r} must be a whole number of at least 2 and a share "
            "of ice above 0 and at most 1"
        )
    rest = {name: value for name, value in options.items() if name not in ("size", "p", "map_name", "desc")}
    return {**rest, "desc": generate_random_map(size, share, seed)}


@functools.lru_cache(maxsize=4096)
def make_prototype(id: str, arguments: str) -> Prototype:
    """Construct the gymnasium game `id`, once per `arguments`, which are JSON.

    Raises:
        ValueError: if gymnasium does not have the game, the arguments are invalid, or its actions are not discrete.
    """
    import gymnasium

    game = construct_game(id, json.loads(arguments))
    if not isinstance(game.action_space, gymnasium.spaces.Discrete):
        raise ValueError(f"text game {id!r} has actions {game.action_space}; only discrete actions have a text form")
    has_table = all(getattr(game, name, None) is not None for name in ("P", "initial_state_distrib"))
    return Prototype(game, board_of(game), has_table, gymnasium.spec(id).max_episode_steps)


def construct_game(id: str, arguments: Mapping[str, Any]) -> Any:
    """Construct the gymnasium game `id`, unwrapped.

    Raises:
        ValueError: if gymnasium does not have the game, or the arguments are invalid.
    """
    import gymnasium
    from gymnasium.envs.registration import load_env_creator

    try:
        spec = gymnasium.spec(id)
    except gymnasium.error.Error as error:
        raise ValueError(f"gymnasium has no text game {id!r}; {nearest(id, gymnasium.registry)} ({error})") from error
    entry = spec.entry_point
    if entry is None:
        raise ValueError(f"gymnasium registers text game {id!r} without an entry point; use a game that has one")
    kind = load_env_creator(entry) if isinstance(entry, str) else entry
    try:
        return kind(**{**spec.kwargs, **arguments})
    except (TypeError, KeyError, ValueError, AssertionError) as error:
        raise ValueError(f"text game {id!r} rejects its options {dict(arguments)}: {error!r}") from error
