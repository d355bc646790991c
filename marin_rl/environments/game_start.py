# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Games of gymnasium as they are made and drawn: a prototype that episodes copy, and where a task begins."""

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
    """A game that was made once; episodes play copies of it."""

    game: Any
    """The gymnasium environment, unwrapped; never played itself where it has a table."""
    board: Board
    """Its words."""
    has_table: bool
    """Whether it is known what can follow each action, so that it can be copied, begun anywhere, and planned."""
    max_steps: int | None
    """Its own limit on steps."""

    @functools.cached_property
    def plan(self) -> Plan:
        """How to win it from wherever it may begin."""
        weights = self.game.initial_state_distrib
        starts = [state for state in range(len(weights)) if weights[state] > 0]
        return make_plan(
            read_table(self.game.P), starts, lambda state, reward: self.board.wins(self.game, state, reward)
        )


@dataclasses.dataclass(frozen=True)
class Start:
    """Where a game begins."""

    id: str
    """The game."""
    arguments: str
    """What it is made with, as JSON."""
    state: int | None
    """The state that it begins in; None where the game has no table, and its seed decides."""
    seed: int
    """The seed that it begins with where it has no table."""
    shown: str
    """Text of the first observation."""

    @property
    def prototype(self) -> Prototype:
        """The game to copy."""
        return make_prototype(self.id, self.arguments)

    @property
    def identity(self) -> str:
        """What tells this start from others, and decides its split."""
        return json.dumps(self.anchor(self.state) or [self.id, self.arguments, self.shown], sort_keys=True)

    def anchor(self, state: int | None) -> object:
        """What identifies a state of this game, whatever the words; None where only the words do."""
        if state is None:
            return None
        return {"game": self.id, "options": self._options, "state": state}

    @functools.cached_property
    def _options(self) -> dict[str, Any]:
        return json.loads(self.arguments)

    def begin(self, seed: int) -> tuple[Any, Any]:
        """A game that is about to be played, and its first observation.

        Args:
            seed: of everything random in a game with a table; others go by their own.
        """
        prototype = self.prototype
        if not prototype.has_table:
            game = construct_game(self.id, json.loads(self.arguments))
            return game, game.reset(seed=self.seed)[0]
        # What a reset writes are attributes of its own; table and map are shared with the prototype.
        game = copy.copy(prototype.game)
        game.reset(seed=seed)
        game.s = self.state
        return game, self.state


def draw_start(id: str, options: Mapping[str, Any], seed: int, random_start: bool) -> Start:
    """Draw a game.

    Args:
        id: its name in gymnasium.
        options: as the config has them.
        seed: decides map and start.
        random_start: whether it may begin in any state from which it can be won.

    Raises:
        ValueError: if gymnasium has no such game, refuses the options, or knows no table where a start is drawn.
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
    """What a game is made with; a lake without a map gets one."""
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
    """Make a game, once.

    Args:
        id: its name in gymnasium.
        arguments: what it is made with, as JSON.

    Raises:
        ValueError: if gymnasium has no such game, refuses the arguments, or its actions are not numbered.
    """
    import gymnasium

    game = construct_game(id, json.loads(arguments))
    if not isinstance(game.action_space, gymnasium.spaces.Discrete):
        raise ValueError(f"text game {id!r} has actions {game.action_space}; only numbered ones can be put into words")
    has_table = all(getattr(game, name, None) is not None for name in ("P", "initial_state_distrib"))
    return Prototype(game, board_of(game), has_table, gymnasium.spec(id).max_episode_steps)


def construct_game(id: str, arguments: Mapping[str, Any]) -> Any:
    """Make a game of gymnasium, unwrapped.

    Args:
        id: its name.
        arguments: its own options.

    Raises:
        ValueError: if gymnasium has no such game, or it refuses the options.
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
        raise ValueError(f"gymnasium has text game {id!r}, but not what makes it: its entry point is missing")
    kind = gymnasium.envs.registration.load_env_creator(entry) if isinstance(entry, str) else entry
    try:
        return kind(**{**spec.kwargs, **arguments})
    except (TypeError, KeyError, ValueError, AssertionError) as error:
        raise ValueError(f"text game {id!r} refuses its options {dict(arguments)}: {error!r}") from error
