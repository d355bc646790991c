# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Generated games of TextWorld: a quest in a small world, with commands and observations in text."""

import dataclasses
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from marin_rl.config_fields import LOCAL_OUTPUT, NAMES_FILES, check_finite, convert_enum_fields
from marin_rl.environments.base import (
    CORRECT,
    FORMAT,
    AbstractEnvironment,
    AbstractSplitEnvironment,
    EnvironmentConfig,
    Episode,
    Step,
    check_invalid_reward,
)
from marin_rl.environments.external import bounded_text, find_action
from marin_rl.environments.game_process import GameError, GameProcess, GameServer, call_each
from marin_rl.environments.games import View
from marin_rl.environments.splits import Problem, check_shares, problem_id, split_problems, without_duplicates
from marin_rl.environments.text_game import GAME
from marin_rl.environments.textworld_game import CUSTOM
from marin_rl.extras import require_extra
from marin_rl.rewards.reply_text import check_pattern
from marin_rl.seeds import derive_seed
from marin_rl.storage import user_cache
from marin_rl.types import Message, Task

_MAX_SEED = 2**31
_RULES = "You play a text game. Reply with one command, such as: go north, take coin, open chest, look, inventory."
_DEMONSTRATED_STEPS = 100
"""Maximum number of commands of a demonstration."""


@EnvironmentConfig.register_subclass("textworld")
@dataclasses.dataclass(frozen=True)
class TextWorldConfig(EnvironmentConfig):
    """Generated games of TextWorld. Each task is a world with a quest; each reply is a command.

    Games are generated once per folder, deduplicated, and split by world and quest. Each game runs in a separate
    process. Set `rollouts.max_turns` to the maximum number of commands.
    """

    challenge: str = CUSTOM
    """Kind of games: `custom`, `tw-simple`, `tw-coin_collector`, `tw-treasure_hunter`, `tw-cooking`."""
    options: dict[str, Any] = dataclasses.field(default_factory=dict, metadata=NAMES_FILES)
    """Options of the challenge, such as `{level: 5}`; for `custom`, `nb_rooms`, `nb_objects`, `quest_length`,
    `quest_breadth`, `nb_parallel_quests`."""
    grammar: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Options of TextWorld's text generation, such as `{only_last_action: true}`, without which the objective often
    contains the solution."""
    num_tasks: int = 100
    """Number of games to generate, over all splits, repetitions included."""
    seed: int = 0
    """Seed of the games and their order. The split of a game does not depend on it."""
    folder: str | None = dataclasses.field(default=None, metadata=LOCAL_OUTPUT)
    """Folder of the generated games, which later runs use again; null: a folder in the user's cache."""
    view: View = View.READABLE
    """`readable`: TextWorld's texts, for pretrained models; each game is compiled for an interpreter, which takes
    seconds. `compact`: only the room and the possible commands, without the objective, for tiny models; not
    compiled."""
    list_commands: bool = True
    """Whether readable observations list the possible commands."""
    rules: str | None = None
    """System message; an empty text omits it. Default: one sentence if `view` is `readable`, no message if
    `compact`."""
    command_regex: str | None = None
    """Regular expression; group 1 of its last match in the reply after its thoughts is the command. Default: all of
    that text."""
    game_weight: float = 1.0
    """Factor of the points of the game; 0 omits the component `game`."""
    invalid_reward: float = 0.0
    """Reward of a reply that is not a command (component `format`); at most 0."""
    detours: float = 0.0
    """Probability that a demonstrated command is drawn from all that leave the quest possible; in [0, 1)."""
    max_characters: int = 4000
    """Maximum number of characters of an observation; the rest is replaced by a notice."""
    held_out: float = 0.1
    """Share of games that are held out, by hash of world and quest; in [0, 1)."""
    validation: float = 0.05
    """Share of games for validation, by hash of world and quest; in [0, 1)."""
    name: str = "textworld"
    """Name for metrics."""

    def __post_init__(self) -> None:
        convert_enum_fields(self)
        for field in ("num_tasks", "max_characters"):
            if getattr(self, field) < 1:
                raise ValueError(f"{field} must be at least 1, got {getattr(self, field)}")
        check_finite(self, "game_weight", "invalid_reward")
        check_invalid_reward(self.invalid_reward)
        if not 0.0 <= self.detours < 1.0:
            raise ValueError(f"detours is a probability and must be in [0, 1), got {self.detours}")
        if self.command_regex is not None:
            check_pattern("command_regex", self.command_regex, groups=1)
        check_shares(self.held_out, self.validation)

    def build(self) -> AbstractEnvironment:
        """Generate the games and split them.

        Raises:
            MissingPackageError: if the package textworld is not installed.
            ValueError: if TextWorld does not have the challenge or an option, or rejects their values.
        """
        require_extra("textworld", "environment.type: textworld")
        played = "marin_rl.environments.textworld_game:TextWorldGame"
        server = GameServer(played)
        common = {
            "folder": self._folder(),
            "challenge": self.challenge,
            "options": self.options,
            "grammar": self.grammar,
            "compact": self.view is View.COMPACT,
        }
        seeds = [derive_seed(self.seed, "textworld", index) % _MAX_SEED for index in range(self.num_tasks)]
        try:
            made = call_each(server, "make", [{**common, "seed": seed} for seed in dict.fromkeys(seeds)])
        except GameError as error:
            raise ValueError(f"TextWorld {self.challenge!r} with the options {self.options}: {error}") from error
        finally:
            server.close()
        source = f"TextWorld {self.challenge!r}"
        problems = without_duplicates(self._problems(made), source)
        splits = split_problems(problems, self.held_out, self.validation, source)
        games = {problem_id(game["identity"]): game for game in reversed(made)}
        return TextWorldEnvironment(self.name, splits, self, games, GameServer(played, made[0]["path"]))

    def _folder(self) -> str:
        """Return the folder of all games with this version of TextWorld, challenge, options and grammar."""
        import importlib.metadata

        parent = user_cache("textworld") if self.folder is None else Path(self.folder)
        key = [importlib.metadata.version("textworld"), self.challenge, self.options, self.grammar]
        digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
        return str(parent.absolute() / digest)

    def _problems(self, made: Sequence[Mapping[str, Any]]) -> Iterator[Problem]:
        for game in made:
            task = Task(
                id=problem_id(game["identity"]),
                environment=self.name,
                messages=self._opening(game),
                answer="",
                anchor_state=game["state"],
            )
            yield Problem(game["identity"], task, where=game["path"])

    def _opening(self, game: Mapping[str, Any]) -> tuple[Message, ...]:
        rules, shown = self.rules, self.message(game)
        if self.view is View.READABLE:
            rules = _RULES if rules is None else rules
            text = bounded_text(f"{game['objective']}\n\n{shown['content']}", self.max_characters)
            shown = Message(role="user", content=text)
        return (Message(role="system", content=rules), shown) if rules else (shown,)

    def message(self, shown: Mapping[str, Any], notice: str = "") -> Message:
        """Return the message with the text of a result of the game."""
        commands = ", ".join(shown["commands"])
        if self.view is View.COMPACT:
            text = f"{shown['room']}: {commands}"
        elif self.list_commands:
            text = f"{shown['text']}\n\nPossible commands: {commands}"
        else:
            text = shown["text"]
        return Message(role="user", content=bounded_text(notice + text, self.max_characters))


@dataclasses.dataclass
class TextWorldEpisode:
    """One game."""

    config: TextWorldConfig
    game: GameProcess
    steps: int = 0
    """Number of replies."""
    invalid: int = 0
    """Number of replies that were not given to the game."""

    async def step(self, reply: str) -> Step:
        """Give the command in a reply to the game; if it is none, the policy receives a notice.

        Raises:
            GameError: if the game raised an error or its process ended.
        """
        shown = await self.game.call("step", command=await find_action(reply, self.config.command_regex))
        self.steps += 1
        invalid = shown["command"] is None
        self.invalid += invalid
        notice = ""
        if invalid:
            notice = "?\n" if self.config.view is View.COMPACT else "The reply is not a command of this game.\n\n"
        rewards = {CORRECT: float(shown["won"])}
        if self.config.game_weight:
            rewards[GAME] = self.config.game_weight * shown["points"]
        if self.config.invalid_reward:
            rewards[FORMAT] = self.config.invalid_reward if invalid else 0.0
        return Step(
            rewards=rewards,
            messages=() if shown["done"] else (self.config.message(shown, notice),),
            done=shown["done"],
            action=shown["command"],
            anchor_state=shown["state"],
            metrics={
                "success": float(shown["won"]),
                "steps": float(self.steps),
                "invalid_actions": float(self.invalid),
            },
        )

    async def close(self) -> None:
        """End the game's process."""
        await self.game.close()


@dataclasses.dataclass(frozen=True)
class TextWorldEnvironment(AbstractSplitEnvironment):
    """Tasks and episodes of TextWorld games."""

    config: TextWorldConfig
    games: Mapping[str, Mapping[str, Any]]
    """Results of `TextWorldGame.make` by task id."""
    server: GameServer
    """Runs the games."""

    async def start(self, task: Task, seed: int) -> Episode:
        """Start a game; the replies determine it, except for the interpreter's chance, which the seed determines."""
        path = self._game(task)["path"]
        game = await self.server.start()
        try:
            await game.call("start", path=path, seed=derive_seed("textworld", task.id, seed) % _MAX_SEED)
        except BaseException:
            await game.close()
            raise
        return TextWorldEpisode(self.config, game)

    def can_demonstrate(self, task: Task) -> bool:
        """Return whether TextWorld has a solution of the game."""
        return self._game(task)["has_solution"]

    def demonstrate(self, task: Task) -> tuple[Message, ...]:
        """Return a won game, with `detours`; deterministic for each task.

        Raises:
            ValueError: if TextWorld has no solution of the game.
        """
        game = self._game(task)
        if not game["has_solution"]:
            raise ValueError(f"TextWorld has no solution of the game {task.id!r}, so it has no demonstration")
        seed = derive_seed(self.config.seed, "textworld demonstration", task.id)
        arguments = {"path": game["path"], "seed": seed, "detours": self.config.detours}
        [turns] = call_each(self.server, "demonstrate", [{**arguments, "max_steps": _DEMONSTRATED_STEPS}])
        messages = list(task.messages)
        for command, shown in turns:
            messages.append(Message(role="assistant", content=command))
            if not shown["done"]:
                messages.append(self.config.message(shown))
        return tuple(messages)

    def _game(self, task: Task) -> Mapping[str, Any]:
        self.require_own(task, self.games)
        return self.games[task.id]
