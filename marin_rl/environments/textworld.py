# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Generated games of TextWorld: a quest in a small world, with commands and observations in text."""

import contextlib
import dataclasses
import hashlib
import importlib.metadata
import json
import os
import random
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from annotated_types import Ge, Lt

from marin_rl.environments.base import AbstractEnvironment, EnvironmentConfig
from marin_rl.environments.game_process import GameServer, call_each
from marin_rl.environments.games import GameConfig, ProcessGameEnvironment, View, open_games
from marin_rl.types import Message, Task
from marin_rl.utils.errors import nearest
from marin_rl.utils.seeds import derive_seed
from marin_rl.utils.settings.fields import LOCAL_OUTPUT, NAMES_FILES
from marin_rl.utils.storage import user_cache
from marin_rl.utils.user_code import require_extra

CUSTOM = "custom"
"""Name for games that are generated from options instead of by a challenge."""

_MAX_SEED = 2**31
_RULES = "You play a text game. Reply with one command, such as: go north, take coin, open chest, look, inventory."
_DEMONSTRATED_STEPS = 100
"""Maximum number of commands of a demonstration."""
_LONGEST_COMMAND = 100
"""Maximum number of characters of a command; the interpreter's buffer has a fixed size."""
_COMMAND = re.compile(r"[a-z0-9' -]+")
# Everything else that the interpreter accepts controls the program instead of the game: save, restart, undo, script, …
_CHAINED = re.compile(r"\bthen\b")
_UNCHANGED = ("examine ", "inventory", "look")
"""Commands that do not change the state."""
_WANTED = ("admissible_commands", "description", "facts", "objective", "policy_commands", "score", "verbs", "won")
"""Parts of the state that TextWorld computes on request."""
_GAME = "marin_rl.environments.textworld:TextWorldGame"


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

    def build(self) -> AbstractEnvironment:
        """Generate the games and split them.

        Raises:
            MissingPackageError: if the package textworld is not installed.
            ValueError: if TextWorld does not have the challenge or an option, or rejects their values.
        """
        require_extra("textworld", "environment.type: textworld")
        source = f"TextWorld {self.challenge!r} with the options {self.options}"
        config = {name: getattr(self, name) for name in ("challenge", "options", "grammar", "view", "list_commands")}
        seeds = [derive_seed(self.seed, "textworld", index) % _MAX_SEED for index in range(self.num_tasks)]
        generating = GameServer(_GAME)
        try:
            games = [{"config": config, "folder": self._folder(), "seed": seed} for seed in dict.fromkeys(seeds)]
            openings = open_games(generating, games, source)
        finally:
            generating.close()
        splits, starts = self.split(openings, source)
        return TextWorldEnvironment(self.label, splits, self, starts, GameServer(_GAME, openings[0].start["path"]))

    def _folder(self) -> str:
        """Return the folder of all games with this version of TextWorld, challenge, options and grammar."""
        parent = user_cache("textworld") if self.folder is None else Path(self.folder)
        key = [importlib.metadata.version("textworld"), self.challenge, self.options, self.grammar]
        digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
        return str(parent.absolute() / digest)


@dataclasses.dataclass(frozen=True)
class TextWorldEnvironment(ProcessGameEnvironment):
    """Tasks and episodes of TextWorld games."""

    config: TextWorldConfig

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
        seed = derive_seed(self.config.seed, "textworld demonstration", task.id)
        arguments = {"start": self.start_of(task), "seed": seed, "detours": self.config.detours}
        [turns] = call_each(self.server, "demonstrate", [arguments])
        messages = list(task.messages)
        for command, observation in turns:
            messages.append(Message(role="assistant", content=command))
            if observation:
                messages.append(self.config.message(observation))
        return tuple(messages)


class TextWorldGame:
    """A game of TextWorld; each process plays one."""

    @staticmethod
    def prepare(path: str = "") -> None:
        """Import TextWorld, and fill the caches of its parsers.

        `path` is a game with the same rules as the later games; if empty, a game is generated. Parsing the rules takes
        four times as long as a game of ten commands.
        """
        import textworld.challenges
        import textworld.generator

        if path:
            # A file that cannot be read fails the rollouts of its game.
            with contextlib.suppress(OSError, ValueError):
                textworld.Game.load(str(Path(path).with_suffix(".json")))
            return
        settings = textworld.GameOptions()
        settings.seeds = 0
        textworld.generator.make_game(settings)

    def open(self, config: Mapping[str, Any], folder: str, seed: int) -> dict[str, Any]:
        """Generate a game unless its file exists, and return the fields of its `Opening`.

        `config` has some fields of `TextWorldConfig`. Only a readable game is compiled for the interpreter, which takes
        seconds. `folder` is created if missing.
        """
        is_compact = config["view"] == View.COMPACT
        path = Path(folder) / f"{seed}{'.json' if is_compact else '.z8'}"
        if not path.exists():
            _generate(path, config, seed)
        start = {"path": str(path), "list_commands": config["list_commands"]}
        self.start(start, 0)
        facts, objective = sorted(map(str, self._state["facts"])), self._state["objective"]
        return {
            "identity": json.dumps([facts, objective]),
            "observation": self._observation() if is_compact else f"{objective}\n\n{self._observation()}",
            "start": {**start, "has_solution": bool(self._state["policy_commands"])},
            "anchor_state": self._anchor_state(),
            "rules": "" if is_compact else _RULES,
        }

    def start(self, start: Mapping[str, Any], seed: int) -> None:
        """Start a game from its file; `start` is its `Opening.start`.

        The seed is for the interpreter's chance; apart from it, the replies determine the game.
        """
        import textworld

        self._compact = start["path"].endswith(".json")
        self._list_commands = start["list_commands"]
        infos = textworld.EnvInfos(**dict.fromkeys(_WANTED, True))
        self._env: Any = textworld.start(start["path"], request_infos=infos)
        self._env.seed(seed % _MAX_SEED)
        self._state: Mapping[str, Any] = self._env.reset()
        self._done = False

    def step(self, action: str) -> dict[str, Any]:
        """Give a command to the game, unless it is not one of the game's verbs with plain words.

        Returns the fields of an `Outcome`; the reward is the gain of points.
        """
        command = " ".join(action.lower().split()).removeprefix("> ").strip()
        accepted, points = self._accepts(command), 0.0
        if accepted:
            before = self._state.get("score") or 0
            self._state, score, self._done = self._env.step(command)
            accepted = self._state["_last_action"] is not None or not self._compact
            points = float((score or 0) - before)
        notice = "?\n" if self._compact else "The reply is not a command of this game.\n\n"
        return {
            "observation": "" if self._done else self._observation(),
            "action": command if accepted else None,
            "notice": "" if accepted else notice,
            "reward": points,
            "done": bool(self._done),
            "success": bool(self._state["won"]),
            "anchor_state": self._anchor_state(),
        }

    def demonstrate(self, start: Mapping[str, Any], seed: int, detours: float) -> list[tuple[str, str]]:
        """Win a game; return each command and the observation after it, which is empty at the end.

        `detours` is the probability of a random command after which the game can still be won.
        """
        self.start(start, 0)
        generator = random.Random(seed)
        turns: list[tuple[str, str]] = []
        while not self._done and len(turns) < _DEMONSTRATED_STEPS and self._state["policy_commands"]:
            command = self._state["policy_commands"][0]
            if generator.random() < detours:
                command = generator.choice(self._safe_commands() or [command])
            turns.append((command, self.step(command)["observation"]))
        return turns

    def _accepts(self, command: str) -> bool:
        if self._compact:
            return command in self._state["admissible_commands"]
        words = command.split()
        return (
            bool(words)
            and len(command) <= _LONGEST_COMMAND
            and _COMMAND.fullmatch(command) is not None
            and _CHAINED.search(command) is None
            and words[0] in self._state["verbs"]
        )

    def _safe_commands(self) -> list[str]:
        """Return the commands that change the state but do not lose the game."""
        from textworld.generator.inform7 import Inform7Game

        progression = self._state["_game_progression"]
        commands = Inform7Game(self._state["game"]).gen_commands_from_actions(progression.valid_actions)
        safe = set()
        for command, action in zip(commands, progression.valid_actions, strict=True):
            if command.startswith(_UNCHANGED):
                continue
            after = progression.copy()
            after.update(action)
            if after.completed or (not after.failed and after.winning_policy):
                safe.add(command)
        return sorted(safe)

    def _anchor_state(self) -> list[Any]:
        """Return all facts of the world, and which quests are finished."""
        quests = self._state["_game_progression"].quest_progressions
        return [sorted(map(str, self._state["_facts"])), [quest.completed for quest in quests]]

    def _observation(self) -> str:
        commands = self._state["admissible_commands"]
        if self._compact:
            return f"{self._room()}: {', '.join(one for one in commands if not one.startswith(_UNCHANGED))}"
        if self._list_commands:
            return f"{self._feedback()}\n\nPossible commands: {', '.join(commands)}"
        return self._feedback()

    def _room(self) -> str:
        world = self._state["game"].infos
        [player] = [fact for fact in self._state["_facts"] if fact.name == "at" and fact.arguments[0].name == "P"]
        return str(world[player.arguments[1].name].name)

    def _feedback(self) -> str:
        """Return the interpreter's answer without its prompt and status line; at the start, the room's description."""
        if self._state.get("last_command") is None:
            return str(self._state["description"]).strip()
        text, _, _ = self._state["feedback"].rpartition("\n>")
        text, _, _ = text.partition("Would you like to RESTART")
        return re.sub(r"\n{3,}", "\n\n", text).strip()


def _generate(path: Path, config: Mapping[str, Any], seed: int) -> None:
    """Generate a game, and move its files to their folder when they are complete."""
    import textworld
    import textworld.challenges
    import textworld.generator

    settings = textworld.GameOptions()
    settings.seeds = seed % 2**32
    _set("option of the grammar", settings.grammar, config["grammar"])
    challenge, challenges = config["challenge"], textworld.challenges.CHALLENGES
    if challenge == CUSTOM:
        _set("option", settings, config["options"])
        game = textworld.generator.make_game(settings)
    elif challenge in challenges:
        game = challenges[challenge][1](config["options"], settings)
    else:
        raise ValueError(f"TextWorld has no challenge {challenge!r}; {nearest(challenge, [CUSTOM, *challenges])}")
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        file = Path(folder) / path.name
        game.save(str(file.with_suffix(".json")))
        if path.suffix == ".z8":
            settings.path, settings.force_recompile = str(file), True
            textworld.generator.compile_game(game, settings)
        # The interpreter's file is moved last: its existence means that the game is complete.
        for suffix in dict.fromkeys((".json", path.suffix)):
            os.replace(file.with_suffix(suffix), path.with_suffix(suffix))


def _set(kind: str, target: Any, values: Mapping[str, Any]) -> None:
    known = {
        name for name in dir(target) if not name.startswith("_") and type(getattr(target, name)) in (bool, int, str)
    }
    for name, value in values.items():
        if name not in known:
            raise ValueError(f"TextWorld has no {kind} {name!r}; {nearest(name, sorted(known))}")
        setattr(target, name, value)
