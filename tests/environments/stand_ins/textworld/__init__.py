# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Stand-in for the parts of textworld 1.7.0 that games without an interpreter use.

One kind of game: a corridor of rooms with a coin in the last one.
"""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

from textworld import challenges, generator

__all__ = ["EnvInfos", "Game", "GameOptions", "challenges", "generator", "start"]


class GameOptions:
    def __init__(self) -> None:
        self.seeds = 0
        self.nb_rooms = 3
        self.grammar = SimpleNamespace(theme="house", only_last_action=False)


class Game:
    def __init__(self, rooms: int) -> None:
        self.rooms = rooms

    @staticmethod
    def load(path: str) -> "Game":
        return Game(json.loads(Path(path).read_text())["rooms"])

    def save(self, path: str) -> None:
        Path(path).write_text(json.dumps({"rooms": self.rooms}))


def EnvInfos(**wanted: bool) -> dict[str, bool]:
    return wanted


class Entity(NamedTuple):
    name: str


class Fact(NamedTuple):
    name: str
    arguments: tuple[Entity, ...]

    def __str__(self) -> str:
        return f"{self.name}({', '.join(one.name for one in self.arguments)})"


class Corridor:
    def __init__(self, rooms: int) -> None:
        self._rooms, self._room, self._won = rooms, 0, False

    def seed(self, seed: int) -> None:
        pass

    def reset(self) -> dict[str, Any]:
        return self._state(None)

    def step(self, command: str) -> tuple[dict[str, Any], int, bool]:
        print("a game that prints")
        self._room += {"go east": 1, "go west": -1}.get(command, 0)
        self._won = command == "take coin"
        return self._state(command), int(self._won), self._won

    def _state(self, last: str | None) -> dict[str, Any]:
        moves = [("go east", self._room + 1 < self._rooms), ("go west", self._room > 0)]
        commands = [command for command, possible in (*moves, ("take coin", self._room + 1 == self._rooms)) if possible]
        names = {f"r{index}": SimpleNamespace(name=f"room {index}") for index in range(self._rooms)}
        facts = [Fact("at", (Entity("P"), Entity(f"r{self._room}")))]
        return {
            "admissible_commands": ["inventory", "look", *commands],
            "facts": facts,
            "_facts": facts,
            "_last_action": last,
            "_game_progression": SimpleNamespace(quest_progressions=[SimpleNamespace(completed=self._won)]),
            "game": SimpleNamespace(infos=names),
            "objective": f"Find the coin in {self._rooms} rooms.",
            "policy_commands": ["go east"] * (self._rooms - 1 - self._room) + ["take coin"],
            "score": int(self._won),
            "won": self._won,
        }


def start(path: str, request_infos: dict[str, bool]) -> Corridor:
    return Corridor(Game.load(path).rooms)
