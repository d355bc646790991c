# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""A TextWorld game in its own process: generation, play, and demonstrations."""

import contextlib
import json
import os
import random
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from marin_rl.utils.errors import nearest

CUSTOM = "custom"
"""Name for games that are generated from options instead of by a challenge."""

_LONGEST_COMMAND = 100
"""Maximum number of characters of a command; the interpreter's buffer has a fixed size."""
_COMMAND = re.compile(r"[a-z0-9' -]+")
# Everything else that the interpreter accepts controls the program instead of the game: save, restart, undo, script, …
_CHAINED = re.compile(r"\bthen\b")
_UNCHANGED = ("examine ", "inventory", "look")
"""Commands that do not change the state."""


class TextWorldGame:
    """A game of TextWorld; each process plays one."""

    @staticmethod
    def prepare(path: str = "") -> None:
        """Import TextWorld, and fill the caches of its parsers.

        Args:
            path: file of a game with the same rules as the later games; if empty, a game is generated. Parsing the
                rules takes four times as long as a game of ten commands.
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

    def make(
        self,
        folder: str,
        challenge: str,
        options: dict[str, Any],
        grammar: dict[str, Any],
        seed: int,
        compact: bool,
        list_commands: bool,
    ) -> dict[str, Any]:
        """Generate a game unless its file exists, and return its start.

        Args:
            folder: folder of the game files; created if missing.
            challenge: name of a challenge, or `custom`.
            options: options of the challenge, or attributes of `textworld.GameOptions`.
            grammar: attributes of `textworld.GrammarOptions`.
            seed: seed of the game.
            compact: whether the game is not compiled for the interpreter, which takes seconds.
            list_commands: whether readable observations list the possible commands.

        Returns:
            `identity`, `observation` and `anchor_state` of the start; and as `start` the `path` of the game's file, and
            whether it `has_solution`.
        """
        path = Path(folder) / f"{seed}{'.json' if compact else '.z8'}"
        if not path.exists():
            _generate(path, challenge, options, grammar, seed)
        self.start(str(path), 0, list_commands)
        state = self._state
        identity = [sorted(map(str, state["facts"])), state["objective"]]
        observation = self._observation()
        return {
            "identity": json.dumps(identity),
            "observation": observation if compact else f"{state['objective']}\n\n{observation}",
            "anchor_state": self._anchor_state(),
            "start": {"path": str(path), "has_solution": bool(state["policy_commands"])},
        }

    def start(self, path: str, seed: int, list_commands: bool) -> None:
        """Start a game from its file; the seed is that of the interpreter."""
        import textworld

        wanted = (
            "admissible_commands",
            "description",
            "facts",
            "objective",
            "policy_commands",
            "score",
            "verbs",
            "won",
        )
        self._compact = path.endswith(".json")
        self._list_commands = list_commands
        self._env: Any = textworld.start(path, request_infos=textworld.EnvInfos(**dict.fromkeys(wanted, True)))
        self._env.seed(seed)
        self._state: Mapping[str, Any] = self._env.reset()
        self._done = False

    def step(self, action: str) -> dict[str, Any]:
        """Give a command to the game, unless it is not one of the game's verbs with plain words.

        Returns:
            The fields of an `Outcome`; the reward is the gain of points.
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

    def demonstrate(
        self, path: str, seed: int, detours: float, max_steps: int, list_commands: bool
    ) -> list[tuple[str, str]]:
        """Win a game.

        Args:
            path: the game's file.
            seed: seed of the detours.
            detours: probability of a random command after which the game can still be won.
            max_steps: maximum number of commands.
            list_commands: whether readable observations list the possible commands.

        Returns:
            Each command and the observation after it, which is empty at the end.
        """
        self.start(path, 0, list_commands)
        generator = random.Random(seed)
        turns: list[tuple[str, str]] = []
        while not self._done and len(turns) < max_steps and self._state["policy_commands"]:
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


def _generate(path: Path, challenge: str, options: dict[str, Any], grammar: dict[str, Any], seed: int) -> None:
    """Generate a game, and move its files to their folder when they are complete."""
    import textworld
    import textworld.challenges
    import textworld.generator

    settings = textworld.GameOptions()
    settings.seeds = seed % 2**32
    _set("option of the grammar", settings.grammar, grammar)
    if challenge == CUSTOM:
        _set("option", settings, options)
        game = textworld.generator.make_game(settings)
    elif challenge in textworld.challenges.CHALLENGES:
        game = textworld.challenges.CHALLENGES[challenge][1](options, settings)
    else:
        known = [CUSTOM, *textworld.challenges.CHALLENGES]
        raise ValueError(f"TextWorld has no challenge {challenge!r}; {nearest(challenge, known)}")
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
