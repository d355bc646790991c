# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Construction of gymnasium games: a cached prototype that episodes copy, and the initial states of tasks."""

import copy
import dataclasses
import difflib
import functools
import json
import random
from collections.abc import Mapping
from typing import Any

from marin_rl.environments.game_boards import Board, View, board_of
from marin_rl.environments.game_plan import Plan, make_plan, read_table


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
    def plan(self) -> Plan:
        """Optimal plan for all initial states."""
        weights = self.game.initial_state_distrib
        starts = [state for state in range(len(weights)) if weights[state] > 0]
        return make_plan(
            read_table(self.game.P), starts, lambda state, reward: self.board.wins(self.game, state, reward)
        )


@dataclasses.dataclass(frozen=True)
class Start:
    """Initial state of a game."""

    id: str
    """Name of the game in gymnasium."""
    arguments: str
    """Constructor arguments as JSON."""
    state: int | None
    """Initial state; None for a game without a transition table, whose seed determines it."""
    seed: int
    """Seed for the initial state of a game without a transition table."""
    first_observation: str
    """Text of the first observation."""

    @property
    def prototype(self) -> Prototype:
        """Prototype of the game."""
        return make_prototype(self.id, self.arguments)

    @property
    def identity(self) -> str:
        """Text that identifies this initial state and determines its split."""
        return json.dumps(self.anchor(self.state) or [self.id, self.arguments, self.first_observation], sort_keys=True)

    def anchor(self, state: int | None) -> object:
        """Return a rendering-independent identity of a state; None for a game without a transition table."""
        if state is None:
            return None
        return {"game": self.id, "options": self._options, "state": state}

    @functools.cached_property
    def _options(self) -> dict[str, Any]:
        return json.loads(self.arguments)

    def begin(self, seed: int) -> tuple[Any, Any]:
        """Return a new game in its initial state and the first observation.

        Args:
            seed: seed for all randomness of a game with a transition table; other games use the seed of this record.
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


def draw_start(id: str, options: Mapping[str, Any], seed: int, random_start: bool) -> Start:
    """Draw the initial state of a game.

    Args:
        id: name of the game in gymnasium.
        options: options from the config.
        seed: seed for map and initial state.
        random_start: whether to draw from all states from which a win is reachable.

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
        return Start(id, arguments, None, seed, prototype.board.show(prototype.game, observation, View.READABLE))
    if random_start:
        winnable = [int(state) for state, value in prototype.plan.values.items() if value > 0]
        state = random.Random(seed).choice(winnable)
    else:
        state = int(copy.copy(prototype.game).reset(seed=seed)[0])
    return Start(id, arguments, state, seed, "")


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
    """Construct a game, once per arguments.

    Args:
        id: name of the game in gymnasium.
        arguments: constructor arguments as JSON.

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
    """Construct a gymnasium game, unwrapped.

    Args:
        id: name of the game.
        arguments: constructor arguments.

    Raises:
        ValueError: if gymnasium does not have the game, or the arguments are invalid.
    """
    import gymnasium

    try:
        spec = gymnasium.spec(id)
    except gymnasium.error.Error as error:
        known = difflib.get_close_matches(id, gymnasium.registry, n=3)
        hint = f"; did you mean {' or '.join(map(repr, known))}?" if known else ""
        raise ValueError(f"gymnasium has no text game {id!r}{hint} ({error})") from error
    entry = spec.entry_point
    if entry is None:
        raise ValueError(f"gymnasium registers text game {id!r} without an entry point; use a game that has one")
    kind = gymnasium.envs.registration.load_env_creator(entry) if isinstance(entry, str) else entry
    try:
        return kind(**{**spec.kwargs, **arguments})
    except (TypeError, KeyError, ValueError, AssertionError) as error:
        raise ValueError(f"text game {id!r} rejects its options {dict(arguments)}: {error!r}") from error
