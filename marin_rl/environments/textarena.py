# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Games of TextArena: the policy plays one seat, and an opponent, whose moves are observations, plays the others."""

import abc
import dataclasses
import json
import random
import re
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from http import HTTPStatus
from typing import Any, ClassVar, NamedTuple

import draccus
import httpx

from marin_rl.config_fields import LOCAL_FILE, NAMES_FILES
from marin_rl.environments.base import (
    AbstractEnvironment,
    AbstractSplitEnvironment,
    AgentConnection,
    AgentEpisode,
    AgentResult,
    EnvironmentConfig,
    Episode,
    Step,
)
from marin_rl.environments.external import bounded_text, find_action
from marin_rl.environments.game_process import GameError, GameProcess, GameServer, call_each
from marin_rl.environments.splits import Problem, check_shares, problem_id, split_problems, without_duplicates
from marin_rl.environments.text_game import GAME
from marin_rl.extras import require_extra
from marin_rl.rewards.reply_text import check_pattern
from marin_rl.seeds import derive_seed
from marin_rl.types import Message, Task
from marin_rl.user_code import UserFileError, load_from_file

Opponent = Callable[[str, random.Random], str]
"""Returns a move, given the observation of the player to move and a source of randomness."""

_MAX_SEED = 2**31
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
        function = load_from_file(self.path, self.name)
        if not callable(function):
            raise UserFileError(
                f"{self.name!r} of {self.path} is {type(function).__name__}; it must be a function of observation and "
                "generator"
            )
        return function


@OpponentConfig.register_subclass("self")
@dataclasses.dataclass(frozen=True)
class SelfOpponentConfig(OpponentConfig):
    """The policy itself, with its newest weights and the temperature of the run. Its replies are not trained on."""

    runs_agents: ClassVar[bool] = True

    def build(self) -> None:
        """Return None."""


@EnvironmentConfig.register_subclass("textarena")
@dataclasses.dataclass(frozen=True)
class TextArenaConfig(EnvironmentConfig):
    """A game of TextArena, against an opponent or alone.

    Each task is a seed of the game and a seat of the policy. The opponent's moves are part of the observations. Each
    game runs in a separate process. Set `rollouts.max_turns` to the maximum number of moves of the policy.
    """

    id: str
    """Name of the game in TextArena: `TicTacToe-v0`, `ConnectFour-v0`, `KuhnPoker-v0`, `Mastermind-v0`, …"""
    options: dict[str, Any] = dataclasses.field(default_factory=dict, metadata=NAMES_FILES)
    """Options of the game's constructor."""
    num_players: int = 2
    """Number of players; 1 for games without an opponent."""
    seat: int | None = None
    """Number of the policy's player, from 0; null: drawn for each task."""
    opponent: OpponentConfig = dataclasses.field(default_factory=RandomOpponentConfig)
    """Plays all other seats."""
    num_tasks: int = 500
    """Number of tasks to draw, over all splits."""
    seed: int = 0
    """Seed of the tasks."""
    system_prompt: str | None = None
    """Optional system message before the game's instructions."""
    action_regex: str | None = None
    """Regular expression; group 1 of its last match in the reply after its thoughts is the move. Default: all of that
    text. Most games use the first text in square brackets in the move, and show the move to the opponent."""
    max_characters: int = 8000
    """Maximum number of characters of an observation; the rest is replaced by a notice."""
    held_out: float = 0.1
    """Share of tasks that are held out, by hash of game, seat and seed; in [0, 1)."""
    validation: float = 0.05
    """Share of tasks for validation, by hash of game, seat and seed; in [0, 1)."""
    name: str | None = None
    """Name for metrics; default: the game's id."""

    def __post_init__(self) -> None:
        for field in ("num_players", "num_tasks", "max_characters"):
            if getattr(self, field) < 1:
                raise ValueError(f"{field} must be at least 1, got {getattr(self, field)}")
        if self.seat is not None and not 0 <= self.seat < self.num_players:
            raise ValueError(
                f"seat is {self.seat}; with num_players {self.num_players} it is 0 to {self.num_players - 1}"
            )
        if self.action_regex is not None:
            check_pattern("action_regex", self.action_regex, groups=1)
        check_shares(self.held_out, self.validation)

    def build(self) -> AbstractEnvironment:
        """Draw the tasks, and play each up to the policy's first move.

        Raises:
            MissingPackageError: if the package textarena is not installed.
            ValueError: if TextArena does not have the game, or rejects the options or the number of players.
        """
        require_extra("textarena", "environment.type: textarena")
        if isinstance(self.opponent, SelfOpponentConfig):
            require_extra("serve", "opponent.type: self")
        starts = list(self._draw())
        server = GameServer("marin_rl.environments.textarena_game:ArenaGame")
        try:
            openings = call_each(server, "start", [start.arguments(self) for start in starts])
        except GameError as error:
            raise ValueError(f"TextArena game {self.id!r} with the options {self.options}: {error}") from error
        source = f"TextArena game {self.id!r}"
        problems = without_duplicates(self._problems(starts, openings), source)
        splits = split_problems(problems, self.held_out, self.validation, source)
        by_id = {problem_id(start.identity(self)): start for start in starts}
        return TextArenaEnvironment(problems[0].task.environment, splits, self, by_id, server)

    def _draw(self) -> Iterator["ArenaStart"]:
        for index in range(self.num_tasks):
            seed = derive_seed(self.seed, "textarena", index) % _MAX_SEED
            seat = derive_seed(self.seed, "textarena seat", index) % self.num_players
            yield ArenaStart(seed, seat if self.seat is None else self.seat)

    def _problems(self, starts: Sequence["ArenaStart"], openings: Sequence[Mapping[str, Any]]) -> Iterator[Problem]:
        for start, opening in zip(starts, openings, strict=True):
            if opening["done"]:
                raise ValueError(
                    f"TextArena game {self.id!r}: the game with seed {start.seed} ended before the first move of seat "
                    f"{start.seat}; choose another seat or opponent"
                )
            text = start.identity(self)
            task = Task(
                id=problem_id(text),
                environment=self.id if self.name is None else self.name,
                messages=(*self.opening_messages(), self.message(opening)),
                answer="",
                anchor_state=opening["state"],
            )
            yield Problem(text, task, where=f"seed {start.seed}")

    def opening_messages(self) -> tuple[Message, ...]:
        """Return the messages before the first observation."""
        return () if self.system_prompt is None else (Message(role="system", content=self.system_prompt),)

    def message(self, shown: Mapping[str, Any]) -> Message:
        """Return the message with the text of a response of the game."""
        return Message(role="user", content=bounded_text(shown["text"], self.max_characters))


class ArenaStart(NamedTuple):
    """Start of a task."""

    seed: int
    """Seed of the game, and of the opponent's moves before the policy's first."""
    seat: int
    """Number of the policy's player."""

    def identity(self, config: TextArenaConfig) -> str:
        """Return the text that identifies a task and determines its split."""
        return json.dumps([config.id, config.options, config.num_players, self.seat, self.seed], sort_keys=True)

    def arguments(self, config: TextArenaConfig) -> dict[str, Any]:
        """Return the arguments of `ArenaGame.start`."""
        opponent = {"type": config.opponent.get_choice_name(type(config.opponent)), **vars(config.opponent)}
        return {
            "id": config.id,
            "options": config.options,
            "num_players": config.num_players,
            "opponent": opponent,
            "seed": self.seed,
            "seat": self.seat,
        }


@dataclasses.dataclass
class TextArenaEpisode:
    """One game."""

    config: TextArenaConfig
    game: GameProcess
    moves: int = 0
    """Number of moves of the policy."""

    async def step(self, reply: str) -> Step:
        """Make the move in a reply, and those of the opponent up to the policy's next.

        Raises:
            GameError: if the game or the opponent raised an error.
        """
        self.moves += 1
        move = await find_action(reply, self.config.action_regex)
        shown = await self.game.call("step", move=move)
        return Step(
            rewards={GAME: shown["reward"]},
            messages=(self.config.message(shown),) if shown["text"] else (),
            done=shown["done"],
            action=move,
            anchor_state=shown["state"],
            metrics=_metrics(self.moves, shown),
            rollout_info={"reason": shown["reason"]} if shown["done"] else {},
        )

    async def close(self) -> None:
        """End the game's process."""
        await self.game.close()


def _metrics(moves: int, shown: Mapping[str, Any]) -> dict[str, float]:
    metrics = {"moves": float(moves), "invalid_moves": float(shown["invalid"])}
    if shown["done"]:
        metrics |= {"success": float(shown["reward"] >= 1), "draw": float(shown["reward"] == 0)}
    return metrics


@dataclasses.dataclass(frozen=True)
class SelfPlayEpisode(AgentEpisode):
    """One game in which the policy plays all seats. One of them is the rollout; the replies of others are not."""

    config: TextArenaConfig
    seat: int
    """Player of the rollout."""
    begin: Callable[[], Awaitable[tuple[GameProcess, Mapping[str, Any]]]]
    """Starts the game; returns it and the first observation."""

    async def play(self, connection: AgentConnection) -> AgentResult:
        """Play the game; each player is a conversation.

        Raises:
            GameError: if the game raised an error.
            httpx.HTTPStatusError: if a limit of the run refused a reply.
        """
        game, shown = await self.begin()
        conversations: dict[int, list[Message]] = {}
        moves = 0
        # The policy is served on this machine: proxies do not apply, and preparing TLS would take long.
        http = httpx.AsyncClient(
            headers={"Authorization": f"Bearer {connection.api_key}"}, timeout=None, verify=False, trust_env=False
        )
        try:
            async with http:
                while not shown["done"]:
                    player = shown["player"]
                    messages = conversations.setdefault(player, [*self.config.opening_messages()])
                    messages.append(self.config.message(shown))
                    url = connection.base_url if player == self.seat else connection.untrained_url
                    body = {"model": "policy", "messages": messages}
                    response = await http.post(f"{url}/chat/completions", json=body)
                    if player != self.seat and _is_too_long(response):
                        connection.mark_truncated()
                    reply = response.raise_for_status().json()["choices"][0]["message"]["content"]
                    messages.append(Message(role="assistant", content=reply))
                    moves += player == self.seat
                    move = await find_action(reply, self.config.action_regex)
                    shown = await game.call("step", move=move)
        finally:
            await game.close()
        return AgentResult({GAME: shown["reward"]}, _metrics(moves, shown), {"reason": shown["reason"]})


def _is_too_long(response: httpx.Response) -> bool:
    """Whether a request was refused because the conversation exceeds `rollouts.max_length`."""
    return (
        response.status_code == HTTPStatus.BAD_REQUEST and response.json()["error"]["code"] == "context_length_exceeded"
    )


@dataclasses.dataclass(frozen=True)
class TextArenaEnvironment(AbstractSplitEnvironment):
    """Tasks and episodes of a TextArena game."""

    config: TextArenaConfig
    starts: Mapping[str, ArenaStart]
    """Starts by task id."""
    server: GameServer
    """Runs the games."""

    async def start(self, task: Task, seed: int) -> Episode | AgentEpisode:
        """Start a game; task and seed determine chance and the opponent's moves, unless the policy plays them."""
        self.require_own(task, self.starts)
        if isinstance(self.config.opponent, SelfOpponentConfig):
            return SelfPlayEpisode(self.config, self.starts[task.id].seat, lambda: self._begin(task, seed))
        game, _ = await self._begin(task, seed)
        return TextArenaEpisode(self.config, game)

    async def _begin(self, task: Task, seed: int) -> tuple[GameProcess, Mapping[str, Any]]:
        """Start a game; return it and the first observation."""
        game = await self.server.start()
        try:
            shown = await game.call("start", **self.starts[task.id].arguments(self.config))
            await game.call("reseed", seed=derive_seed("textarena", task.id, seed))
        except BaseException:
            await game.close()
            raise
        return game, shown
