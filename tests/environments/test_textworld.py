# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from marin_rl.environments.base import Split
from marin_rl.environments.game_process import GameError
from marin_rl.environments.games import View
from marin_rl.environments.textworld import TextWorldConfig, TextWorldEnvironment
from marin_rl.types import Task
from tests.environments.episodes import play

real = pytest.mark.skipif(importlib.util.find_spec("textworld") is None, reason="needs the extra textworld")

COINS = {
    "challenge": "tw-coin_collector",
    "options": {"level": 105},
    "grammar": {"only_last_action": True},
    "held_out": 0.0,
    "validation": 0.0,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("games"))


def build(**fields) -> TextWorldEnvironment:
    environment = TextWorldConfig(**{**COINS, **fields}).build()
    assert isinstance(environment, TextWorldEnvironment)
    return environment


@pytest.fixture(scope="module")
def compact(folder: str) -> Iterator[TextWorldEnvironment]:
    environment = build(folder=folder, view=View.COMPACT, num_tasks=4, invalid_reward=-0.5)
    yield environment
    environment.server.close()


@pytest.fixture(scope="module")
def readable(folder: str) -> Iterator[TextWorldEnvironment]:
    environment = build(folder=folder, num_tasks=1, max_characters=900)
    yield environment
    environment.server.close()


def solution(environment: TextWorldEnvironment, task: Task) -> list[str]:
    messages = environment.demonstrate(task)
    assert messages[: len(task.messages)] == task.messages
    return [message["content"] for message in messages if message["role"] == "assistant"]


@real
@pytest.mark.medium
def test_solutions_win(compact: TextWorldEnvironment):
    for task in compact.tasks(Split.TRAIN):
        commands = solution(compact, task)
        assert commands[-1] == "take coin"
        steps = play(compact, task, commands)
        assert [step.done for step in steps] == [False] * 4 + [True]
        assert [step.action for step in steps] == commands
        assert steps[-1].rewards == {"correct": 1.0, "game": 1.0, "format": 0.0}
        assert steps[-1].metrics == {"success": 1.0, "steps": 5.0, "invalid_actions": 0.0}
        shown = [step.messages[0]["content"] for step in steps[:-1]]
        assert all(
            f", {command}" in f", {text.partition(': ')[2]}" for text, command in zip(shown, commands[1:], strict=True)
        )


@real
@pytest.mark.medium
def test_demonstrations_may_take_detours(folder: str, compact: TextWorldEnvironment):
    environment = build(folder=folder, view=View.COMPACT, num_tasks=4, detours=0.6)
    assert environment.tasks(Split.TRAIN) == compact.tasks(Split.TRAIN)
    lengths = []
    for task in environment.tasks(Split.TRAIN):
        commands = solution(environment, task)
        assert commands == solution(environment, task)
        assert play(environment, task, commands)[-1].metrics["success"] == 1.0
        lengths.append(len(commands))
    assert max(lengths) > 5
    environment.server.close()


@real
@pytest.mark.medium
def test_readable_games(readable: TextWorldEnvironment):
    [task] = readable.tasks(Split.TRAIN)
    rules, opening = task.messages
    assert rules["role"] == "system"
    assert "coin" in opening["content"]
    commands = solution(readable, task)
    refused = ["restart", "quit", "save", "undo", "look. take coin", "look then look", "\ud800\x00", "go " * 200, ""]
    steps = play(readable, task, [*refused, "<think>save</think> >  Go\n up ", *commands])
    for step in steps[: len(refused)]:
        assert (step.action, step.anchor_state) == (None, task.anchor_state)
        assert step.messages[0]["content"].startswith("The reply is not a command of this game.\n\n-= ")
    wall = steps[len(refused)]
    assert (wall.action, wall.anchor_state) == ("go up", task.anchor_state)
    assert wall.messages[0]["content"].startswith("You can't go that way.\n\nPossible commands: ")
    assert steps[-1].metrics["success"] == 1.0
    assert steps[-1].done


@real
@pytest.mark.medium
def test_the_same_games_are_made_in_other_processes(folder: str, tmp_path: Path, compact: TextWorldEnvironment):
    program = (
        "import sys\n"
        "from marin_rl.environments.base import Split\n"
        "from marin_rl.environments.games import View\n"
        "from marin_rl.environments.textworld import TextWorldConfig\n"
        f"environment = TextWorldConfig(**{COINS!r}, view=View.COMPACT, num_tasks=4, folder=sys.argv[1]).build()\n"
        "print(environment.tasks(Split.TRAIN))\n"
        "environment.server.close()\n"
    )
    command = [sys.executable, "-c", program, str(tmp_path)]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert shown == f"{compact.tasks(Split.TRAIN)}\n"


@real
@pytest.mark.medium
def test_rules_are_parsed_once_for_all_games(compact: TextWorldEnvironment):
    program = """
import sys
from textworld.logic import GameLogic
from marin_rl.environments.textworld import TextWorldGame
first, *others = sys.argv[1:]
TextWorldGame.prepare(first)
for path in others:
    TextWorldGame().start({"path": path, "list_commands": True}, 0)
print(GameLogic.parse.cache_info().misses)
"""
    paths = [str(game["path"]) for game in compact.starts.values()]
    assert len(paths) == 4
    parsed = subprocess.run([sys.executable, "-c", program, *paths], capture_output=True, text=True, check=True).stdout
    assert parsed == "1\n"


@real
@pytest.mark.medium
def test_a_game_whose_file_is_damaged_fails_its_rollout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    # Without `folder`, games are kept in the cache of the user.
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    environment = build(view=View.COMPACT, num_tasks=1)
    [file] = (tmp_path / "marin_rl" / "textworld").rglob("*.json")
    file.write_text("{")
    with pytest.raises(GameError, match="JSONDecodeError"):
        play(environment, environment.tasks(Split.TRAIN)[0], ["look"])
    for changes, message in (
        ({"challenge": "tw-coin_colector"}, "no challenge 'tw-coin_colector'; did you mean 'tw-coin_collector'"),
        ({"options": {"level": 0}}, r"TextWorld 'tw-coin_collector' with the options .* within \[1-300\]"),
    ):
        with pytest.raises(ValueError, match=message):
            build(folder=str(tmp_path), view=View.COMPACT, num_tasks=1, **changes)
    with pytest.raises(ValueError, match="has no task 'x' of 'textworld'"):
        environment.can_demonstrate(Task("x", "textworld", ({"role": "user", "content": ""},), ""))
    environment.server.close()


@pytest.fixture(scope="module")
def corridors(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TextWorldEnvironment]:
    """Games of a stand-in for the package: corridors with a coin in the last room."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).with_name("stand_ins")))
        patch.setattr("importlib.metadata.version", lambda package: "1.7.0")
        environment = build(
            challenge="custom",
            options={"nb_rooms": 2},
            folder=str(tmp_path_factory.mktemp("corridors")),
            view=View.COMPACT,
            num_tasks=30,
            invalid_reward=-0.5,
        )
        yield environment
        environment.server.close()


def test_a_stand_in_of_the_package(corridors: TextWorldEnvironment):
    tasks = corridors.tasks(Split.TRAIN)
    # Games whose worlds are equal are one task.
    assert 10 < len(tasks) < 30
    for task in tasks[:3]:
        rooms = len(solution(corridors, task))
        assert task.messages == ({"role": "user", "content": "room 0: go east" if rooms > 1 else "room 0: take coin"},)
        steps = play(corridors, task, ["xyzzy", "Go  East", "<think>no</think> go west", *solution(corridors, task)])
        assert [step.action for step in steps[:3]] == [None, "go east", "go west"]
        assert steps[0].messages[0]["content"] == f"?\n{task.messages[0]['content']}"
        assert steps[0].anchor_state == steps[2].anchor_state == task.anchor_state != steps[1].anchor_state
        assert [step.done for step in steps] == [False] * (rooms + 2) + [True]
        assert steps[0].rewards == {"correct": 0.0, "game": 0.0, "format": -0.5}
        assert steps[-1].rewards == {"correct": 1.0, "game": 1.0, "format": 0.0}
        assert steps[-1].metrics == {"success": 1.0, "steps": rooms + 3, "invalid_actions": 1.0}


@pytest.mark.medium
def test_a_stand_in_generates_each_game_once(corridors: TextWorldEnvironment, tmp_path: Path):
    [folder] = Path(str(corridors.config.folder)).iterdir()
    before = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    again = corridors.config.build()
    assert again.tasks(Split.TRAIN) == corridors.tasks(Split.TRAIN)
    assert {path: path.stat().st_mtime_ns for path in folder.iterdir()} == before
    for changes, message in (
        ({"challenge": "tw-cooking"}, "no challenge 'tw-cooking'"),
        ({"challenge": "custom", "options": {"nb_room": 2}}, "no option 'nb_room'; did you mean 'nb_rooms'"),
        ({"challenge": "custom", "options": {}, "grammar": {"themes": "x"}}, "'themes'; did you mean 'theme'"),
    ):
        with pytest.raises(ValueError, match=message):
            build(folder=str(tmp_path), view=View.COMPACT, num_tasks=1, **changes)
