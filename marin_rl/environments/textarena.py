# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Games of TextArena: the policy plays one seat, and an opponent, whose moves are observations, plays the others."""

import abc
import dataclasses
import json
import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import draccus

from marin_rl.config_fields import LOCAL_PATH
from marin_rl.environments.base import AbstractEnvironment, EnvironmentConfig, Episode, Split, Step
from marin_rl.environments.external import action_of, bounded_text, nearest, require_package
from marin_rl.environments.game_process import GameError, GameProcess, GameServer, call_each
from marin_rl.environments.text_game import GAME
from marin_rl.rewards.grading import check_pattern
from marin_rl.seeds import derive_seed
from marin_rl.splits import Problem, TaskSplits, check_shares, problem_id, split_problems, without_duplicates
from marin_rl.types import Message, Task
from marin_rl.user_code import load_from_file

Opponent = Callable[[str, random.Random], str]
"""Returns a move, given the observation of the player to move and a source of randomness."""

_MAX_SEED = 2**31
_LISTED_MOVE = re.compile(r"\[[^\[\]\n]+\]")
_MOVES_FOLLOW = re.compile(r"(?i)\b(?:available|legal|valid|possible|allowed)\b")


@dataclasses.dataclass(frozen=True)
class OpponentConfig(draccus.ChoiceRegistry, abc.ABC):
    """Base of the configs of opponents, selected by `type`."""

    @abc.abstractmethod
    def build(self) -> Opponent:
        """Return the opponent; called in the game's process."""


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

    path: str = dataclasses.field(metadata=LOCAL_PATH)
    """Path of the file, relative to the working directory."""
    name: str
    """Name of the function. It takes the observation (text) and a `random.Random`, and returns the move as text."""

    def build(self) -> Opponent:
        """Import the function."""
        return load_from_file(self.path, self.name)


@EnvironmentConfig.register_subclass("textarena")
@dataclasses.dataclass(frozen=True)
class TextArenaConfig(EnvironmentConfig):
    """A game of TextArena, against an opponent or alone.

    Each task is a seed of the game and a seat of the policy. The opponent's moves are part of the observations. Each
    game runs in a separate process. Set `rollouts.max_turns` to the maximum number of moves of the policy.
    """

    id: str
    """Name of the game in TextArena: `TicTacToe-v0`, `ConnectFour-v0`, `KuhnPoker-v0`, `Mastermind-v0`, …"""
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
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
    """Regular expression; group 1 of its last match in the reply is the move. Default: the reply after `</think>`. Most
    games use the first text in square brackets in the move, and show the move to the opponent."""
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
        require_package("textarena", "textarena")
        starts = list(self._draw())
        server = GameServer("marin_rl.environments.textarena:ArenaGame")
        try:
            openings = call_each(server, "start", [start.arguments(self) for start in starts])
        except GameError as error:
            raise ValueError(f"TextArena game {self.id!r} with the options {self.options}: {error}") from error
        source = f"TextArena game {self.id!r}"
        problems = without_duplicates(self._problems(starts, openings), source)
        splits = split_problems(problems, self.held_out, self.validation, source)
        by_id = {problem_id(start.identity(self)): start for start in starts}
        return TextArenaEnvironment(self, problems[0].task.environment, splits, by_id, server)

    def _draw(self) -> Iterator["ArenaStart"]:
        for index in range(self.num_tasks):
            seed = derive_seed(self.seed, "textarena", index) % _MAX_SEED
            seat = derive_seed(self.seed, "textarena seat", index) % self.num_players
            yield ArenaStart(seed, seat if self.seat is None else self.seat)

    def _problems(self, starts: Sequence["ArenaStart"], openings: Sequence[Mapping[str, Any]]) -> Iterator[Problem]:
        system = () if self.system_prompt is None else (Message(role="system", content=self.system_prompt),)
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
                messages=(*system, self.message(opening)),
                answer="",
                anchor_state=opening["state"],
            )
            yield Problem(text, task, where=f"seed {start.seed}")

    def message(self, shown: Mapping[str, Any]) -> Message:
        """Return the message with the text of a response of the game."""
        return Message(role="user", content=bounded_text(shown["text"], self.max_characters))

    def move(self, reply: str) -> str:
        """Return the move in a reply; empty if there is none."""
        return action_of(reply, self.action_regex)


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
        move = self.config.move(reply)
        shown = await self.game.call("step", move=move)
        metrics = {"moves": float(self.moves), "invalid_moves": float(shown["invalid"])}
        if shown["done"]:
            metrics |= {"success": float(shown["reward"] >= 1), "draw": float(shown["reward"] == 0)}
        return Step(
            rewards={GAME: shown["reward"]},
            messages=(self.config.message(shown),) if shown["text"] else (),
            done=shown["done"],
            action=move,
            anchor_state=shown["state"],
            metrics=metrics,
            rollout_info={"reason": shown["reason"]} if shown["done"] else {},
        )

    async def close(self) -> None:
        """End the game's process."""
        await self.game.close()


@dataclasses.dataclass(frozen=True)
class TextArenaEnvironment(AbstractEnvironment):
    """Tasks and episodes of a TextArena game."""

    config: TextArenaConfig
    name: str
    splits: TaskSplits
    starts: Mapping[str, ArenaStart]
    """Starts by task id."""
    server: GameServer
    """Runs the games."""

    def tasks(self, split: Split) -> Sequence[Task]:
        """Return the tasks of a split in a fixed order."""
        return self.splits[split]

    async def start(self, task: Task, seed: int) -> Episode:
        """Start a game; task and seed determine chance and the opponent's moves."""
        if task.environment != self.name or task.id not in self.starts:
            raise ValueError(f"environment {self.name!r} has no game {task.id!r} of {task.environment!r}")
        game = await self.server.start()
        try:
            await game.call("start", **self.starts[task.id].arguments(self.config))
            await game.call("reseed", seed=derive_seed("textarena", task.id, seed))
        except BaseException:
            await game.close()
            raise
        return TextArenaEpisode(self.config, game)


class ArenaGame:
    """A game with its opponent. Runs in a separate process, because games draw from the global random state."""

    @staticmethod
    def prepare() -> None:
        """Import TextArena."""
        import numpy  # noqa: F401
        import textarena  # noqa: F401

    def start(
        self, id: str, options: dict[str, Any], num_players: int, opponent: dict[str, Any], seed: int, seat: int
    ) -> dict[str, Any]:
        """Start a game, and play it up to the policy's first move.

        Args:
            id: name of the game.
            options: options of its constructor.
            num_players: number of players.
            opponent: `type` and fields of the opponent's config.
            seed: seed of the game.
            seat: number of the policy's player.

        Returns:
            See `step`.
        """
        import textarena
        from textarena.envs.registration import ENV_REGISTRY

        raw = f"{id}-raw"
        if raw not in ENV_REGISTRY:
            known = [name.removesuffix("-raw") for name in ENV_REGISTRY if name.endswith("-raw")]
            raise ValueError(f"TextArena has no game {id!r}; {nearest(id, known)}")
        self._seat = seat
        self._opponent = OpponentConfig.get_choice_class(opponent.pop("type"))(**opponent).build()
        self._env = textarena.make(raw, **options)
        self._seed(seed)
        self._env.reset(num_players=num_players, seed=seed)
        return self._play(False)

    def reseed(self, seed: int) -> None:
        """Set the random states that determine the rest of the game."""
        self._seed(seed)

    def step(self, move: str) -> dict[str, Any]:
        """Make a move of the policy, and those of the opponent up to the policy's next.

        Returns:
            `text` of the policy's observation, `state` of the game (null if it is not JSON), `done`, `reward` of the
            policy (0 before the end), `invalid` moves of the policy that lost the game, and the `reason` of its end.
        """
        return self._play(self._env.step(move)[0])

    def _seed(self, seed: int) -> None:
        import numpy as np

        random.seed(seed)
        np.random.seed(seed % 2**32)
        self._generator = random.Random(seed)

    def _play(self, done: bool) -> dict[str, Any]:
        while not done:
            player, observation = self._env.get_observation()
            if player == self._seat:
                return self._shown(observation, reward=0.0)
            done, _ = self._env.step(self._opponent(self._text(player, observation), self._generator))
        rewards, info = self._env.close()
        own = (info or {}).get(self._seat, {})
        return {
            **self._shown(self._env.state.observations[self._seat], float((rewards or {}).get(self._seat, 0.0))),
            "done": True,
            "invalid": float(own.get("invalid_move", False)),
            "reason": str(own.get("reason")),
        }

    def _shown(self, observation: Sequence[tuple[int, str, Any]], reward: float) -> dict[str, Any]:
        state = self._env.state.game_state
        try:
            state = json.loads(json.dumps({"player": self._seat, "state": state}, sort_keys=True))
        except (TypeError, ValueError):
            state = None
        text = self._text(self._seat, observation)
        return {"text": text, "state": state, "done": False, "reward": reward, "invalid": 0.0, "reason": ""}

    def _text(self, player: int, observation: Sequence[tuple[int, str, Any]]) -> str:
        """Return the messages of an observation; the player's own moves, which it knows, are left out."""
        roles = self._env.state.role_mapping
        parts = [
            text if sender < 0 else f"[{roles.get(sender, f'Player {sender}')}] {text}"
            for sender, text, _ in observation
            if sender != player
        ]
        return "\n".join(parts)
