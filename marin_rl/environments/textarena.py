# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Games of TextArena: the policy plays one seat, and an opponent, whose moves are observations, plays the others."""

import contextlib
import dataclasses
import json
from collections.abc import Awaitable, Callable, Mapping
from http import HTTPStatus
from typing import Annotated, Any, ClassVar

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
from marin_rl.environments.game_process import GameError, GameProcess, GameServer, call_each
from marin_rl.environments.games import (
    GAME,
    AbstractGameEnvironment,
    GameConfig,
    GameEpisode,
    Opening,
    Outcome,
    ProcessGame,
    find_action,
)
from marin_rl.environments.textarena_opponents import OpponentConfig, RandomOpponentConfig, SelfOpponentConfig
from marin_rl.types import Message
from marin_rl.utils.seeds import derive_seed
from marin_rl.utils.settings.fields import NAMES_FILES
from marin_rl.utils.user_code import require_extra

_MAX_SEED = 2**31


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

    def check(self) -> None:
        """Check the fields of this class."""
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
        starts = [self._draw(index) for index in range(self.num_tasks)]
        server = GameServer("marin_rl.environments.textarena_game:ArenaGame")
        try:
            shown = call_each(server, "start", starts)
        except GameError as error:
            raise ValueError(f"TextArena game {self.id!r} with the options {self.options}: {error}") from error
        openings = [self._opening(start, first) for start, first in zip(starts, shown, strict=True)]
        splits, by_id = self.split(openings, f"TextArena game {self.id!r}")
        return TextArenaEnvironment(self.label, splits, by_id, self, server)

    def _draw(self, index: int) -> dict[str, Any]:
        """Return the arguments of `ArenaGame.start` for a task."""
        seat = derive_seed(self.seed, "textarena seat", index) % self.num_players
        return {
            "id": self.id,
            "options": self.options,
            "num_players": self.num_players,
            "opponent": {"type": self.opponent.get_choice_name(type(self.opponent)), **vars(self.opponent)},
            "seed": derive_seed(self.seed, "textarena", index) % _MAX_SEED,
            "seat": seat if self.seat is None else self.seat,
        }

    def _opening(self, start: Mapping[str, Any], shown: Mapping[str, Any]) -> Opening:
        if shown["done"]:
            raise ValueError(
                f"TextArena game {self.id!r}: the game with seed {start['seed']} ended before the first move of seat "
                f"{start['seat']}; choose another seat or opponent"
            )
        identity = [start[name] for name in ("id", "options", "num_players", "seat", "seed")]
        return Opening(json.dumps(identity, sort_keys=True), shown["observation"], start, shown["anchor_state"])


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
class TextArenaEnvironment(AbstractGameEnvironment):
    """Tasks and episodes of a TextArena game."""

    config: TextArenaConfig
    server: GameServer
    """Runs the games."""

    async def begin(self, start: Mapping[str, Any], seed: int) -> Episode | AgentEpisode:
        """Start a game; task and seed determine chance and the opponent's moves, unless the policy plays them."""
        if isinstance(self.config.opponent, SelfOpponentConfig):
            return SelfPlayEpisode(self.config, start["seat"], lambda: self.server.begin("start", **start, chance=seed))
        game, _ = await self.server.begin("start", **start, chance=seed)
        return GameEpisode(self.config, ProcessGame(game), self.config.max_steps)
