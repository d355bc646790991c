# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Games of TextArena: the policy plays one seat, and an opponent, whose moves are observations, plays the others."""

import abc
import contextlib
import dataclasses
import json
import random
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from http import HTTPStatus
from typing import Annotated, Any, ClassVar

import draccus
import httpx
from annotated_types import Ge

from marin_rl.environments.base import (
    AbstractEnvironment,
    AgentConnection,
    AgentEpisode,
    AgentResult,
    EnvironmentConfig,
    Episode,
)
from marin_rl.environments.game_process import GameProcess, GameServer
from marin_rl.environments.games import (
    GAME,
    GameConfig,
    Outcome,
    ProcessGame,
    ProcessGameEnvironment,
    find_action,
    open_games,
)
from marin_rl.types import Message
from marin_rl.utils.errors import nearest
from marin_rl.utils.seeds import derive_seed
from marin_rl.utils.settings.fields import LOCAL_FILE, NAMES_FILES
from marin_rl.utils.user_code import load_function, require_extra

_MAX_SEED = 2**31

Opponent = Callable[[str, random.Random], str]
"""Returns a move, given the observation of the player to move and a source of randomness."""

_LISTED_MOVE = re.compile(r"\[[^\[\]\n]+\]")
_MOVES_FOLLOW = re.compile(r"(?i)\b(?:available|legal|valid|possible|allowed)\b")


@dataclasses.dataclass(frozen=True)
class OpponentConfig(draccus.ChoiceRegistry, abc.ABC):
    """Base of the configs of opponents, selected by `type`."""

    @abc.abstractmethod
    def build(self) -> Opponent | None:
        """Return the opponent, or None for the policy; called in the game's process."""


@OpponentConfig.register_subclass("random")
@dataclasses.dataclass(frozen=True)
class RandomOpponentConfig(OpponentConfig):
    """Draws a move uniformly from those in square brackets that the game lists as available, legal or valid.

    For games that list the moves, such as TicTacToe and KuhnPoker.
    """

    def build(self) -> Opponent:
        """Return the opponent."""
        return random_move


def random_move(observation: str, generator: random.Random) -> str:
    """Draw a move from the last list of moves in an observation.

    Raises:
        ValueError: if the observation lists no moves.

    >>> random_move("Available moves: '[4]'", random.Random(0))
    '[4]'
    """
    for part in reversed(_MOVES_FOLLOW.split(observation)[1:]):
        if moves := _LISTED_MOVE.findall(part):
            return generator.choice(moves)
    raise ValueError(
        f"the game lists no moves for the random opponent in {observation[-200:]!r}; use an opponent of type file"
    )


@OpponentConfig.register_subclass("file")
@dataclasses.dataclass(frozen=True)
class FileOpponentConfig(OpponentConfig):
    """A function in a Python file, which runs in the game's process without further isolation."""

    path: str = dataclasses.field(metadata=LOCAL_FILE)
    """Path of the file, relative to the working directory."""
    name: str
    """Name of the function. It takes the observation (text) and a `random.Random`, and returns the move as text."""

    def build(self) -> Opponent:
        """Import the function.

        Raises:
            UserFileError: if the file has no such function.
        """
        return load_function(self.path, self.name, "a function of observation and generator")


@OpponentConfig.register_subclass("self")
@dataclasses.dataclass(frozen=True)
class SelfOpponentConfig(OpponentConfig):
    """The policy itself, with its newest weights and the temperature of the run. Its replies are not trained on."""

    runs_agents: ClassVar[bool] = True

    def build(self) -> None:
        """Return None."""


@EnvironmentConfig.register_subclass("textarena")
@dataclasses.dataclass(frozen=True)
class TextArenaConfig(GameConfig):
    """A game of TextArena, against an opponent or alone.

    Each task is a seed of the game and a seat of the policy. The opponent's moves are part of the observations. Each
    game runs in a separate process. Set `rollouts.max_turns` to the maximum number of moves of the policy. Most games
    use the first text in square brackets in a reply as the move, and show the whole reply to the opponent.
    """

    rewards_success: ClassVar[bool] = False

    id: str
    """Name of the game in TextArena: `TicTacToe-v0`, `ConnectFour-v0`, `KuhnPoker-v0`, `Mastermind-v0`, …"""
    options: dict[str, Any] = dataclasses.field(default_factory=dict, metadata=NAMES_FILES)
    """Options of the game's constructor."""
    num_players: Annotated[int, Ge(1)] = 2
    """Number of players; 1 for games without an opponent."""
    seat: int | None = None
    """Number of the policy's player, from 0; null: drawn for each task."""
    opponent: OpponentConfig = dataclasses.field(default_factory=RandomOpponentConfig)
    """Plays all other seats."""
    num_tasks: Annotated[int, Ge(1)] = dataclasses.field(default=500, kw_only=True)
    """Number of tasks to draw, over all splits."""

    def __post_init__(self) -> None:
        GameConfig.__post_init__(self)
        if self.seat is not None and not 0 <= self.seat < self.num_players:
            raise ValueError(
                f"seat is {self.seat}; with num_players {self.num_players} it is 0 to {self.num_players - 1}"
            )
        unused = [name for name in ("max_steps", "step_reward", "invalid_reward") if getattr(self, name)]
        if unused and isinstance(self.opponent, SelfOpponentConfig):
            raise ValueError(
                f"opponent.type self does not support {', '.join(unused)}; remove it, and limit replies with "
                "rollouts.max_turns"
            )

    @property
    def default_name(self) -> str:
        """The game's id."""
        return self.id

    def build(self) -> AbstractEnvironment:
        """Draw the tasks, and play each up to the policy's first move.

        Raises:
            MissingPackageError: if the package textarena is not installed.
            ValueError: if TextArena does not have the game, or rejects the options or the number of players.
        """
        require_extra("textarena", "environment.type: textarena")
        if isinstance(self.opponent, SelfOpponentConfig):
            require_extra("serve", "opponent.type: self")
        server = GameServer("marin_rl.environments.textarena:ArenaGame")
        source = f"TextArena game {self.id!r} with the options {self.options}"
        openings = open_games(server, [{"start": self._draw(index)} for index in range(self.num_tasks)], source)
        splits, starts = self.split(openings, source)
        return TextArenaEnvironment(self.label, splits, self, starts, server)

    def _draw(self, index: int) -> dict[str, Any]:
        """Return the `Opening.start` of a task."""
        seat = derive_seed(self.seed, "textarena seat", index) % self.num_players
        return {
            "id": self.id,
            "options": self.options,
            "num_players": self.num_players,
            "opponent": {"type": self.opponent.get_choice_name(type(self.opponent)), **vars(self.opponent)},
            "seed": derive_seed(self.seed, "textarena", index) % _MAX_SEED,
            "seat": seat if self.seat is None else self.seat,
        }


@dataclasses.dataclass(frozen=True)
class SelfPlayEpisode(AgentEpisode):
    """One game in which the policy plays all seats. One of them is the rollout; the replies of others are not."""

    config: TextArenaConfig
    seat: int
    """Player of the rollout."""
    begin: Callable[[], Awaitable[tuple[GameProcess, Mapping[str, Any]]]]
    """Starts the game; returns it and the fields of the first `Outcome`."""

    async def play(self, connection: AgentConnection) -> AgentResult:
        """Play the game; each player is a conversation.

        Raises:
            GameError: if the game raised an error.
            httpx.HTTPStatusError: if a limit of the run refused a reply.
        """
        # The policy is served on this machine: proxies do not apply, and preparing TLS would take long.
        http = httpx.AsyncClient(
            headers={"Authorization": f"Bearer {connection.api_key}"}, timeout=None, verify=False, trust_env=False
        )
        process, shown = await self.begin()
        conversations: dict[int, list[Message]] = {}
        steps = invalid = 0
        with contextlib.closing(process):
            game, outcome = ProcessGame(process), Outcome(**shown)
            async with http:
                while not outcome.done:
                    player = await process.call("player")
                    messages = conversations.setdefault(player, [*self.config.system_messages("")])
                    messages.append(self.config.message(outcome.observation))
                    url = connection.base_url if player == self.seat else connection.untrained_url
                    body = {"model": "policy", "messages": messages}
                    response = await http.post(f"{url}/chat/completions", json=body)
                    if player != self.seat and _is_too_long(response):
                        connection.mark_truncated()
                    reply = response.raise_for_status().json()["choices"][0]["message"]["content"]
                    messages.append(Message(role="assistant", content=reply))
                    outcome = await game.step(await find_action(reply, self.config.action_regex))
                    if player == self.seat:
                        steps, invalid = steps + 1, invalid + (outcome.action is None)
        metrics = {"success": float(outcome.success), "steps": float(steps), "invalid_actions": float(invalid)}
        rewards = {GAME: self.config.game_weight * outcome.reward} if self.config.game_weight else {}
        return AgentResult(rewards, {**metrics, **outcome.metrics}, outcome.info)


def _is_too_long(response: httpx.Response) -> bool:
    """Whether a request was refused because the conversation exceeds `rollouts.max_length`."""
    return (
        response.status_code == HTTPStatus.BAD_REQUEST and response.json()["error"]["code"] == "context_length_exceeded"
    )


@dataclasses.dataclass(frozen=True)
class TextArenaEnvironment(ProcessGameEnvironment):
    """Tasks and episodes of a TextArena game."""

    config: TextArenaConfig

    async def begin(self, start: Mapping[str, Any], seed: int) -> Episode | AgentEpisode:
        """Start a game; task and seed determine chance and the opponent's moves, unless the policy plays them."""
        if not isinstance(self.config.opponent, SelfOpponentConfig):
            return await ProcessGameEnvironment.begin(self, start, seed)
        return SelfPlayEpisode(self.config, start["seat"], lambda: self.server.begin("start", start=start, seed=seed))


class ArenaGame:
    """A game with its opponent. Runs in a separate process, because games draw from the global random state."""

    @staticmethod
    def prepare() -> None:
        """Import TextArena."""
        import numpy  # noqa: F401
        import textarena  # noqa: F401

    def open(self, start: Mapping[str, Any]) -> dict[str, Any]:
        """Play up to the policy's first move, and return the fields of the `Opening`.

        Raises:
            ValueError: if TextArena does not have the game, or it ends before that move.
        """
        shown = self._begin(start)
        if shown["done"]:
            raise ValueError(
                f"the game with seed {start['seed']} ended before the first move of seat {start['seat']}; choose "
                "another seat or opponent"
            )
        identity = [start[name] for name in ("id", "options", "num_players", "seat", "seed")]
        return {
            "identity": json.dumps(identity, sort_keys=True),
            "observation": shown["observation"],
            "start": start,
            "anchor_state": shown["anchor_state"],
        }

    def start(self, start: Mapping[str, Any], seed: int) -> dict[str, Any]:
        """Play up to the policy's first move, which may be that of another seat in self-play; return the `Outcome`.

        The seed is for the chance after this move.
        """
        shown = self._begin(start)
        self._seed(seed)
        return shown

    def _begin(self, start: Mapping[str, Any]) -> dict[str, Any]:
        import textarena
        from textarena.envs.registration import ENV_REGISTRY

        raw = f"{start['id']}-raw"
        if raw not in ENV_REGISTRY:
            known = [name.removesuffix("-raw") for name in ENV_REGISTRY if name.endswith("-raw")]
            raise ValueError(f"TextArena has no game {start['id']!r}; {nearest(start['id'], known)}")
        opponent = dict(start["opponent"])
        self._seat = start["seat"]
        self._opponent = OpponentConfig.get_choice_class(opponent.pop("type"))(**opponent).build()
        self._env = textarena.make(raw, **start["options"])
        self._seed(start["seed"])
        self._env.reset(num_players=start["num_players"], seed=start["seed"])
        return self._play(None, False)

    def player(self) -> int:
        """Return the number of the player to move."""
        return self._player

    def step(self, action: str) -> dict[str, Any]:
        """Make a move of the policy, and those of the opponent up to the policy's next.

        Returns the fields of an `Outcome`. The reward is 0 before the end, and `info` has the reason of the end.
        """
        player = self._env.state.current_player_id
        done, _ = self._env.step(action)
        state = self._env.state
        # A game repeats the turn after a first invalid move, and usually ends after the second.
        is_invalid = getattr(state, "error_count", 0) > 0 or state.game_info[player]["invalid_move"]
        return self._play(None if is_invalid else action, done)

    def _seed(self, seed: int) -> None:
        import numpy as np

        random.seed(seed)
        np.random.seed(seed % 2**32)
        self._generator = random.Random(seed)

    def _play(self, action: str | None, done: bool) -> dict[str, Any]:
        """Make the opponent's moves, and return the outcome of the policy's action."""
        while not done:
            self._player, messages = self._env.get_observation()
            text = self._text(self._player, messages)
            if self._player == self._seat or self._opponent is None:
                return self._outcome(text, action)
            done, _ = self._env.step(self._opponent(text, self._generator))
        self._player = self._seat
        rewards, info = self._env.close()
        reward = float((rewards or {}).get(self._seat, 0.0))
        return {
            **self._outcome(self._text(self._seat, self._env.state.observations[self._seat]), action),
            "done": True,
            "reward": reward,
            "success": reward >= 1,
            "metrics": {"draw": float(reward == 0)},
            "info": {"reason": str((info or {}).get(self._seat, {}).get("reason"))},
        }

    def _outcome(self, text: str, action: str | None) -> dict[str, Any]:
        """Return the outcome of an action after which the game goes on; the state is null if it is not JSON."""
        state = self._env.state.game_state
        try:
            state = json.loads(json.dumps({"player": self._player, "state": state}, sort_keys=True))
        except (TypeError, ValueError):
            state = None
        return {"observation": text, "action": action, "done": False, "anchor_state": state, "metrics": {"draw": 0.0}}

    def _text(self, player: int, observation: Sequence[tuple[int, str, Any]]) -> str:
        """Return the messages of an observation; the player's own moves, which it knows, are left out."""
        roles = self._env.state.role_mapping
        parts = [
            text if sender < 0 else f"[{roles.get(sender, f'Player {sender}')}] {text}"
            for sender, text, _ in observation
            if sender != player
        ]
        return "\n".join(parts)
