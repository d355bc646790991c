# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import asyncio
import collections
import math
import re

import pytest

from marin_rl.config.decode import ConfigError, decode
from marin_rl.environments import ArithmeticConfig, EnvironmentConfig, TextGameConfig
from marin_rl.environments.base import Split
from marin_rl.environments.streams import MixtureConfig, MixturePartConfig
from marin_rl.types import Message, Task
from tests.environments.fake_environments import CardsConfig
from tests.one_reply import answer

SUMS = MixturePartConfig(ArithmeticConfig(size=200))
LAKE = MixturePartConfig(TextGameConfig(id="FrozenLake-v1", num_tasks=60, validation=0.1))


def test_tasks_are_drawn_by_weight():
    weights = {"a": 2.0, "b": 0.5, "c": 1.5}
    parts = tuple(MixturePartConfig(CardsConfig(name), weight) for name, weight in weights.items())
    stream = MixtureConfig(parts).build().stream(0)
    assert stream.parts == ("a", "b", "c")
    drawn, _ = stream.draw({}, 4000)
    counts = collections.Counter(task.environment for task in drawn)
    for name, weight in weights.items():
        # Four standard deviations of 4,000 draws.
        assert counts[name] / 4000 == pytest.approx(weight / 4.0, abs=0.032)
    # Each part draws every task once per epoch, in an order that is independent of the other parts.
    for name in weights:
        own = [task.id for task in drawn if task.environment == name]
        assert all(len(set(own[start : start + 5])) == 5 for start in range(0, len(own) - 4, 5))
    assert MixtureConfig(parts).build().stream(1).draw({}, 40)[0] != drawn[:40]


def test_each_part_runs_scores_and_demonstrates_its_own_tasks():
    mixture = MixtureConfig((SUMS, LAKE)).build()
    sums, lake = SUMS.environment.build(), LAKE.environment.build()
    for split in Split:
        assert list(mixture.tasks(split)) == [*sums.tasks(split), *lake.tasks(split)]
    total, game = sums.tasks(Split.TRAIN)[0], lake.tasks(Split.TRAIN)[0]
    assert answer(mixture, total, total.answer).rewards == {"correct": 1.0}
    assert answer(mixture, game, "right", seed=4) == answer(lake, game, "right", seed=4)
    assert mixture.can_demonstrate(total)
    assert mixture.demonstrate(total) == (*total.messages, Message(role="assistant", content=total.answer))
    assert mixture.demonstrate(game) == lake.demonstrate(game)


def test_tasks_of_other_environments_are_rejected():
    stranger = Task("x", "cards", (Message(role="user", content="?"),), "")
    with pytest.raises(
        ValueError, match="'mixture' cannot run task 'x' of 'cards'; its environments are arithmetic, FrozenLake-v1"
    ):
        asyncio.run(MixtureConfig((SUMS, LAKE)).build().start(stranger, 0))


def test_a_mixture_needs_environments_with_different_names():
    with pytest.raises(ValueError, match="mixture 'mixture' has two environments named 'arithmetic'"):
        MixtureConfig((SUMS, SUMS)).build()
    with pytest.raises(ValueError, match="mixture 'mixture' has no environments"):
        MixtureConfig(()).build()
    with pytest.raises(ValueError, match="environment 'cards' has no tasks to train on"):
        MixtureConfig((MixturePartConfig(CardsConfig(size=0)),)).build()
    for weight in (0.0, math.inf):
        with pytest.raises(ValueError, match=rf"weight must be finite and above 0, got {weight}"):
            MixturePartConfig(CardsConfig(), weight)


def test_mixture_from_yaml():
    raw = {
        "type": "mixture",
        "parts": [
            {"environment": {"type": "arithmetic", "size": 200}},
            {"weight": 2, "environment": {"type": "text_game", "id": "Taxi-v4"}},
        ],
    }
    config = decode(EnvironmentConfig, raw)
    assert isinstance(config, MixtureConfig)
    assert config.parts == (SUMS, MixturePartConfig(TextGameConfig(id="Taxi-v4"), 2.0))


NESTING = {
    "tool_use": lambda inner: {"type": "tool_use", "questions": inner},
    "mixture": lambda inner: {"type": "mixture", "parts": [{"environment": inner}]},
    "curriculum": lambda inner: {"type": "curriculum", "lessons": [{"name": "one", "environment": inner}]},
    "random_control": lambda inner: {"type": "random_control", "environment": inner},
}
SUM = {"type": "arithmetic", "size": 200}
KEYS = {"tool_use": "questions", "mixture": "parts.0.environment", "curriculum": "lessons.0.environment"}
ALLOWED = {
    ("mixture", "tool_use"),
    ("curriculum", "tool_use"),
    *(("random_control", inner) for inner in ("tool_use", "mixture", "curriculum")),
}


@pytest.mark.parametrize("outer", NESTING)
@pytest.mark.parametrize("inner", NESTING)
def test_nested_environments_must_have_lower_levels(outer: str, inner: str):
    assert isinstance(decode(EnvironmentConfig, NESTING[outer](SUM)), EnvironmentConfig)
    raw = NESTING[outer](NESTING[inner](SUM))
    if (outer, inner) in ALLOWED:
        assert isinstance(decode(EnvironmentConfig, raw), EnvironmentConfig)
        return
    key = re.escape(KEYS.get(outer, "environment"))
    message = rf"^{key}\.type is '{inner}', which cannot be nested in an environment of type '{outer}'; use one of"
    with pytest.raises(ConfigError, match=message):
        decode(EnvironmentConfig, raw)
