# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Generated games of TextWorld: a quest in a small world, with commands and observations in text."""

import dataclasses
import hashlib
import importlib.metadata
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from annotated_types import Ge, Lt

from marin_rl.environments.base import AbstractEnvironment, EnvironmentConfig
from marin_rl.environments.game_process import GameError, GameServer, call_each
from marin_rl.environments.games import (
    AbstractGameEnvironment,
    GameConfig,
    GameEpisode,
    Opening,
    ProcessGame,
    View,
)
from marin_rl.environments.textworld_game import CUSTOM
from marin_rl.types import Message, Task
from marin_rl.utils.seeds import derive_seed
from marin_rl.utils.settings.fields import LOCAL_OUTPUT, NAMES_FILES
from marin_rl.utils.storage import user_cache
from marin_rl.utils.user_code import require_extra

_MAX_SEED = 2**31
_RULES = "You play a text game. Reply with one command, such as: go north, take coin, open chest, look, inventory."
_DEMONSTRATED_STEPS = 100
"""Maximum number of commands of a demonstration."""
_PLAYED = "marin_rl.environments.textworld_game:TextWorldGame"


@EnvironmentConfig.register_subclass("textworld")
@dataclasses.dataclass(frozen=True)
class TextWorldConfig(GameConfig):
    """Generated games of TextWorld. Each task is a world with a quest; each reply is a command.

    Games are generated once per folder. Each game runs in a separate process. Set `rollouts.max_turns` to the maximum
    number of commands.
    """

    challenge: str = CUSTOM
    """Kind of games: `custom`, `tw-simple`, `tw-coin_collector`, `tw-treasure_hunter`, `tw-cooking`."""
    options: dict[str, Any] = dataclasses.field(default_factory=dict, metadata=NAMES_FILES)
    """Options of the challenge, such as `{level: 5}`; for `custom`, `nb_rooms`, `nb_objects`, `quest_length`,
    `quest_breadth`, `nb_parallel_quests`."""
    grammar: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Options of TextWorld's text generation, such as `{only_last_action: true}`, without which the objective often
    contains the solution."""
    num_tasks: Annotated[int, Ge(1)] = dataclasses.field(default=100, kw_only=True)
    """Number of games to generate, over all splits, repetitions included."""
    folder: str | None = dataclasses.field(default=None, metadata=LOCAL_OUTPUT)
    """Folder of the generated games, which later runs use again; null: a folder in the user's cache."""
    view: View = View.READABLE
    """`readable`: TextWorld's texts, for pretrained models; each game is compiled for an interpreter, which takes
    seconds. `compact`: only the room and the possible commands, without the objective, for tiny models; not
    compiled."""
    list_commands: bool = True
    """Whether readable observations list the possible commands."""
    detours: Annotated[float, Ge(0), Lt(1)] = 0.0
    """Probability that a demonstrated command is drawn from all that leave the quest possible."""

    @property
    def default_name(self) -> str:
        """The type of the environment."""
        return "textworld"

    def build(self) -> AbstractEnvironment:
        """Generate the games and split them.

        Raises:
            MissingPackageError: if the package textworld is not installed.
            ValueError: if TextWorld does not have the challenge or an option, or rejects their values.
        """
        require_extra("textworld", "environment.type: textworld")
        is_compact = self.view is View.COMPACT
        common = {
            "folder": self._folder(),
            "challenge": self.challenge,
            "options": self.options,
            "grammar": self.grammar,
            "compact": is_compact,
            "list_commands": self.list_commands,
        }
        seeds = [derive_seed(self.seed, "textworld", index) % _MAX_SEED for index in range(self.num_tasks)]
        server = GameServer(_PLAYED)
        try:
            made = call_each(server, "make", [{**common, "seed": seed} for seed in dict.fromkeys(seeds)])
        except GameError as error:
            raise ValueError(f"TextWorld {self.challenge!r} with the options {self.options}: {error}") from error
        finally:
            server.close()
        rules = "" if is_compact else _RULES
        openings = [
            Opening(game["identity"], game["observation"], game["start"], game["anchor_state"], rules) for game in made
        ]
        splits, starts = self.split(openings, f"TextWorld {self.challenge!r}")
        played = GameServer(_PLAYED, made[0]["start"]["path"])
        return TextWorldEnvironment(self.label, splits, starts, self, played)

    def _folder(self) -> str:
        """Return the folder of all games with this version of TextWorld, challenge, options and grammar."""
        parent = user_cache("textworld") if self.folder is None else Path(self.folder)
        key = [importlib.metadata.version("textworld"), self.challenge, self.options, self.grammar]
        digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
        return str(parent.absolute() / digest)


@dataclasses.dataclass(frozen=True)
class TextWorldEnvironment(AbstractGameEnvironment):
    """Tasks and episodes of TextWorld games."""

    config: TextWorldConfig
    server: GameServer
    """Runs the games."""

    async def begin(self, start: Mapping[str, Any], seed: int) -> GameEpisode:
        """Start a game; the replies determine it, except for the interpreter's chance, which the seed determines."""
        arguments = {"path": start["path"], "seed": seed % _MAX_SEED, "list_commands": self.config.list_commands}
        game, _ = await self.server.begin("start", **arguments)
        return GameEpisode(self.config, ProcessGame(game), self.config.max_steps)

    def can_demonstrate(self, task: Task) -> bool:
        """Return whether TextWorld has a solution of the game."""
        return self.start_of(task)["has_solution"]

    def demonstrate(self, task: Task) -> tuple[Message, ...]:
        """Return a won game, with `detours`; deterministic for each task.

        Raises:
            ValueError: if TextWorld has no solution of the game.
        """
        if not self.can_demonstrate(task):
            raise ValueError(f"TextWorld has no solution of the game {task.id!r}, so it has no demonstration")
        arguments = {
            "path": self.start_of(task)["path"],
            "seed": derive_seed(self.config.seed, "textworld demonstration", task.id),
            "detours": self.config.detours,
            "max_steps": _DEMONSTRATED_STEPS,
            "list_commands": self.config.list_commands,
        }
        [turns] = call_each(self.server, "demonstrate", [arguments])
        messages = list(task.messages)
        for command, observation in turns:
            messages.append(Message(role="assistant", content=command))
            if observation:
                messages.append(self.config.message(observation))
        return tuple(messages)
