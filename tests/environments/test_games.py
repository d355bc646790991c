# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Settings and episodes that all games share, with a game that follows a script."""

import asyncio
import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest

from marin_rl.environments import OpenEnvConfig, TextArenaConfig, TextGameConfig, TextWorldConfig
from marin_rl.environments.base import AbstractEnvironment, Split, Step
from marin_rl.environments.games import GameConfig, GameEpisode, Opening, Outcome, find_action
from marin_rl.rewards import reply_text
from marin_rl.utils.errors import UserError

CONFIGS: dict[type[GameConfig], dict[str, Any]] = {
    TextGameConfig: {"id": "FrozenLake-v1"},
    TextWorldConfig: {},
    TextArenaConfig: {"id": "TicTacToe-v0"},
    OpenEnvConfig: {"base_url": "http://127.0.0.1:8000"},
}


@pytest.mark.parametrize("config", list(CONFIGS)[1:], ids=lambda config: config.__name__)
def test_a_missing_package_names_the_extra(config: type[GameConfig], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    extra = config.__name__.removesuffix("Config").lower()
    with pytest.raises(UserError, match=rf"pip install -e '\.\[{extra}\]'"):
        config(**CONFIGS[config]).build()


@dataclasses.dataclass(frozen=True)
class ScriptConfig(GameConfig):
    """Not registered: only for these tests."""

    @property
    def default_name(self) -> str:
        return "script"

    def build(self) -> AbstractEnvironment:
        raise NotImplementedError


@dataclasses.dataclass
class Script:
    """A game with fixed outcomes, which records the actions."""

    outcomes: list[Outcome]
    actions: list[str] = dataclasses.field(default_factory=list)
    is_closed: bool = False

    async def step(self, action: str) -> Outcome:
        self.actions.append(action)
        return self.outcomes.pop(0)

    async def close(self) -> None:
        self.is_closed = True


MOVED = Outcome(observation="board", action="left", reward=2.0, anchor_state=[1], metrics={"draw": 0.0})
REFUSED = Outcome(observation="board", action=None, notice="What? ")
WON = Outcome(observation="", action="up", reward=3.0, done=True, success=True, info={"reason": "goal"})


def steps_of(game: Script, replies: Sequence[str], **fields: Any) -> list[Step]:
    async def run() -> list[Step]:
        config = ScriptConfig(**fields)
        episode = GameEpisode(config, game, config.max_steps)
        steps = [await episode.step(reply) for reply in replies]
        await episode.close()
        return steps

    return asyncio.run(run())


def test_replies_become_actions_and_outcomes_become_steps():
    game = Script([MOVED, REFUSED, WON])
    steps = steps_of(game, ["<think>down?</think> left ", "sing", "up"])
    assert (game.actions, game.is_closed) == (["left", "sing", "up"], True)
    assert [step.action for step in steps] == ["left", None, "up"]
    assert [step.done for step in steps] == [False, False, True]
    assert [[message["content"] for message in step.messages] for step in steps] == [["board"], ["What? board"], []]
    assert [dict(step.rewards) for step in steps] == [
        {"correct": 0.0, "game": 2.0},
        {"correct": 0.0, "game": 0.0},
        {"correct": 1.0, "game": 3.0},
    ]
    assert steps[0].anchor_state == [1]
    assert dict(steps[0].metrics) == {"success": 0.0, "steps": 1.0, "invalid_actions": 0.0, "draw": 0.0}
    assert dict(steps[2].metrics) == {"success": 1.0, "steps": 3.0, "invalid_actions": 1.0}
    assert steps[2].rollout_info == {"reason": "goal"}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"game_weight": 0.5}, [{"correct": 0.0, "game": 1.0}, {"correct": 0.0, "game": 0.0}]),
        ({"game_weight": 0.0}, [{"correct": 0.0}] * 2),
        ({"game_weight": 0.0, "step_reward": -0.25}, [{"correct": 0.0, "step": -0.25}] * 2),
        (
            {"game_weight": 0.0, "invalid_reward": -0.5},
            [{"correct": 0.0, "format": 0.0}, {"correct": 0.0, "format": -0.5}],
        ),
    ],
)
def test_rewards_are_weighted_and_absent_at_zero(fields: dict[str, float], expected: list[dict[str, float]]):
    assert [dict(step.rewards) for step in steps_of(Script([MOVED, REFUSED]), ["a", "b"], **fields)] == expected


def test_the_last_permitted_reply_counts_and_shows_nothing():
    steps = steps_of(Script([REFUSED, MOVED]), ["a", "b"], max_steps=2)
    assert [step.done for step in steps] == [False, True]
    assert (steps[1].rewards["game"], steps[1].messages) == (2.0, ())
    with pytest.raises(RuntimeError, match="the game 'script' has ended"):
        steps_of(Script([WON]), ["a", "b"])
    # Observations have a limit, and no lone surrogates.
    [step] = steps_of(Script([dataclasses.replace(MOVED, observation="\ud800" + "x" * 50)]), ["a"], max_characters=10)
    assert step.messages[0]["content"] == "?" + "x" * 9 + "\n[41 more characters]"


def test_tasks_are_made_of_distinct_starts():
    config = ScriptConfig(name="n", held_out=0.0, validation=0.0)
    openings = [Opening("a", "A", 1, [1], rules="Play."), Opening("b", "B", 2), Opening("a", "A", 3)]
    splits, starts = config.split(openings, "script")
    first, second = splits[Split.TRAIN]
    assert (first.environment, first.anchor_state, starts[first.id], starts[second.id]) == ("n", [1], 1, 2)
    assert [message["content"] for message in first.messages] == ["Play.", "A"]
    assert [message["content"] for message in second.messages] == ["B"]
    for prompt, messages in (("", ["A"]), ("Go.", ["Go.", "A"])):
        tasks = dataclasses.replace(config, system_prompt=prompt).split(openings, "script")[0][Split.TRAIN]
        assert [message["content"] for message in tasks[0].messages] == messages


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.__name__)
def test_shared_settings_are_checked(config: type[GameConfig]):
    for fields, message in (
        ({"action_regex": "left"}, "action_regex: 'left' has 0 groups but needs 1"),
        ({"held_out": 0.5, "validation": 0.5}, "leaves no training tasks"),
    ):
        with pytest.raises(ValueError, match=message):
            config(**CONFIGS[config], **fields)


@pytest.mark.parametrize(
    ("regex", "reply", "action"),
    [
        (None, "<think>north?</think> go east ", "go east"),
        (None, "<think>north, or", ""),
        (r"\[(\w+)\]", "go [east] or [west]", "west"),
        (r"\[(\w+)\]", "<think>[north], or", ""),
        (r"\[(\w+)\]", "go east", ""),
        (r"(e)|(w)", "w", ""),
        (r"(e+)+w", "e" * 100, ""),
    ],
)
def test_an_action_is_found_beside_other_coroutines(monkeypatch, regex: str | None, reply: str, action: str):
    monkeypatch.setattr(reply_text, "SEARCH_SECONDS", 0.2)

    async def find() -> tuple[bool, str]:
        found = asyncio.ensure_future(find_action(reply, regex))
        await asyncio.sleep(0)
        return found.done(), await found

    assert asyncio.run(find()) == (regex is None, action)
