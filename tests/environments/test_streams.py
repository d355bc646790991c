# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import asyncio
import collections
import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from marin_rl.environments import ArithmeticConfig, EnvironmentConfig, JsonlConfig, TextGameConfig, ToolUseConfig
from marin_rl.environments.base import Split, StreamState, TaskStream
from marin_rl.environments.games import View
from marin_rl.environments.row_format import RowFormat
from marin_rl.environments.streams import MixtureConfig, MixturePartConfig, MixtureStream
from marin_rl.rewards.component import FunctionRewardConfig
from marin_rl.types import Message, RewardResult, RolloutGroup, Task
from marin_rl.utils.seeds import derive_seed
from marin_rl.utils.settings.decode import decode
from marin_rl.utils.settings.section_types import ConfigError
from tests.environments.fake_environments import Cards, CardsConfig, group, rollout
from tests.one_reply import answer

PARTS = {"a": Cards("a", 3), "b": Cards("b", 7), "c": Cards("c", 5)}


@given(
    counts=st.lists(st.integers(0, 9), max_size=6),
    weights=st.dictionaries(st.sampled_from("abc"), st.floats(1e-3, 1e3), min_size=1),
    seed=st.integers(0, 2**31),
)
@settings(deadline=None)
def test_draws_are_independent_of_call_sizes_and_parts_keep_their_order(
    counts: list[int], weights: dict[str, float], seed: int
):
    configs = {name: MixturePartConfig(CardsConfig(name), weight) for name, weight in weights.items()}
    stream = MixtureStream(PARTS, configs, seed)
    drawn, place = [], {}
    for count in counts:
        more, place = stream.draw(place, count)
        drawn += more
    assert (drawn, place if counts else {}) == (stream.draw({}, sum(counts)) if counts else ([], {}))
    for name, part in PARTS.items():
        own = [task for task in drawn if task.environment == name]
        alone, _ = part.stream(derive_seed(seed, "part", name)).draw({}, len(own))
        assert own == alone
        assert name in weights or not own


def test_tasks_are_drawn_by_weight():
    weights = {"a": 2.0, "b": 0.5, "c": 1.5}
    parts = tuple(MixturePartConfig(CardsConfig(name), weight) for name, weight in weights.items())
    stream = MixtureConfig(parts).build().stream(0)
    assert stream.parts == ("a", "b", "c")
    drawn, state = stream.draw({}, 4000)
    counts = collections.Counter(task.environment for task in drawn)
    for name, weight in weights.items():
        # Four standard deviations of 4,000 draws.
        assert counts[name] / 4000 == pytest.approx(weight / 4.0, abs=0.032)
    # Each part draws every task once per epoch, in an order that is independent of the other parts.
    for name in weights:
        own = [task.id for task in drawn if task.environment == name]
        assert all(len(set(own[start : start + 5])) == 5 for start in range(0, len(own) - 4, 5))
    assert MixtureConfig(parts).build().stream(1).draw({}, 40)[0] != drawn[:40]
    # Without parts that open, scores are not recorded.
    assert stream.learn(state, [group(drawn[0], 1.0)]) == state
    assert stream.metrics(state) == {}


def test_parts_have_their_own_and_the_common_reward_functions():
    own, shared = (FunctionRewardConfig(path="rewards.py", function=name) for name in ("own", "shared"))
    configs = [ArithmeticConfig(size=50, name="judged", rewards=(own,)), ArithmeticConfig(size=50, name="plain")]
    both = MixtureConfig(tuple(map(MixturePartConfig, configs)), rewards=(shared,))
    assert both.reward_components(both.build()) == {"judged": (own, shared), "plain": (shared,)}


SUMS = MixturePartConfig(ArithmeticConfig(size=200))
LAKE = MixturePartConfig(TextGameConfig(id="FrozenLake-v1", num_tasks=60, validation=0.1))


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
    with pytest.raises(ValueError, match=r"'mixture' cannot run task .* of 'x'; its environments are arithmetic, Fro"):
        asyncio.run(mixture.start(task("x"), 0))


def part(name: str, *after: str, **changes: Any) -> MixturePartConfig:
    return MixturePartConfig(CardsConfig(name), after=after, **{"window": 4, "unlock_at": 0.5, **changes})


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ((), "mixture 'mixture' has no environments"),
        ((part("a"), part("a")), "mixture 'mixture' has two environments named 'a'"),
        ((MixturePartConfig(CardsConfig(size=0)),), "environment 'cards' has no tasks to train on"),
        ((part("a", "b"), part("b", "a")), "environments wait for one another: 'a' after 'b' after 'a'"),
        ((part("a"), part("b", "a", "b")), "'b' after 'b'; remove one name"),
        ((part("a"), part("b", "a", "d"), part("c", "b"), part("d", "c")), "'b' after 'd' after 'c' after 'b'"),
        ((part("walk"), part("run", "wlak")), "'run' comes after 'wlak'.*did you mean 'walk'.*: walk, run"),
    ],
)
def test_parts_that_cannot_be_drawn_are_refused(parts: tuple[MixturePartConfig, ...], message: str):
    with pytest.raises(ValueError, match=message):
        MixtureConfig(parts).build()


def test_a_part_cannot_graduate_before_it_unlocks_others():
    with pytest.raises(ValueError, match=r"graduate_at 0\.25 is below unlock_at 0\.5"):
        part("a", graduate_at=0.25)


def sums(name: str, **changes: Any) -> ArithmeticConfig:
    return ArithmeticConfig(size=2000, name=name, **changes)


def mixed(*environments: EnvironmentConfig) -> MixtureConfig:
    return MixtureConfig(tuple(map(MixturePartConfig, environments)))


LAKES = {"id": "FrozenLake-v1", "num_tasks": 300}
TAXIS = [TextGameConfig(id="Taxi-v4", name="a"), TextGameConfig(id="Taxi-v4", name="b", view=View.COMPACT)]


@pytest.mark.parametrize(
    ("first", "second", "disjoint"),
    [
        (sums("a"), sums("b", held_out=0.3), False),
        (sums("a"), sums("b", held_out=0.1, validation=0.0), False),
        (sums("a"), ToolUseConfig(sums("b", held_out=0.3)), False),
        (TAXIS[0], dataclasses.replace(TAXIS[1], held_out=0.3), False),
        (sums("a"), sums("b", reverse_answer=True), True),
        (sums("a"), ToolUseConfig(sums("b")), True),
        (*TAXIS, True),
        # Other rules make it another game, even on the same map.
        (
            TextGameConfig(name="dry", options={"is_slippery": False, "size": 3}, **LAKES),
            TextGameConfig(name="wet", options={"is_slippery": True, "size": 3}, **LAKES),
            True,
        ),
    ],
)
def test_parts_must_not_train_on_evaluation_problems_of_others(
    first: EnvironmentConfig, second: EnvironmentConfig, disjoint: bool
):
    if disjoint:
        assert mixed(first, second).build().tasks(Split.TRAIN)
        return
    shown = r"environment '[ab]' trains on [0-9]+ (held_out|validation) problems of '[ab]', the first is '.*give both"
    for whole in (mixed(first, second), mixed(second, first)):
        with pytest.raises(ValueError, match=f"(?s){shown} environments equal held_out and equal validation, or data"):
            whole.build()


def test_files_of_parts_must_not_overlap(tmp_path: Path):
    def write(name: str, *rows: dict[str, Any]) -> str:
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        return str(tmp_path / name)

    rows = [{"prompt": f"question {index}", "answer": "1", "id": index} for index in range(200)]
    messages = [{"messages": [{"role": "user", "content": row["prompt"] + " "}], "answer": "1"} for row in rows[100:]]
    a, b, c = write("a.jsonl", *rows[:100]), write("b.jsonl", *rows[100:]), write("c.jsonl", *messages)
    # A template changes the messages, but not the problems.
    asked = JsonlConfig(path=a, name="other", rows=RowFormat(prompt_template="Tell me: {prompt}"))
    for first, second in (
        (JsonlConfig(path=a, held_out_path=b), JsonlConfig(path=b, name="other")),
        (JsonlConfig(path=a, held_out_path=b), JsonlConfig(path=c, name="other")),
        (JsonlConfig(path=a, held_out=0.4), asked),
    ):
        with pytest.raises(ValueError, match=r"'other' trains on \d+ held_out problems of 'a', .* 'question \d+'"):
            mixed(first, second).build()
    # Ids of unrelated files may be equal.
    renamed = [{**row, "prompt": "other " + row["prompt"]} for row in rows]
    mixed(JsonlConfig(path=a), JsonlConfig(path=write("d.jsonl", *renamed), held_out=0.4)).build()


NESTING = {
    "tool_use": ("questions", lambda inner: {"type": "tool_use", "questions": inner}),
    "mixture": ("parts.0.environment", lambda inner: {"type": "mixture", "parts": [{"environment": inner}]}),
    "random_control": ("environment", lambda inner: {"type": "random_control", "environment": inner}),
}
SUM = {"type": "arithmetic", "size": 200}
ALLOWED = {("mixture", "tool_use"), ("random_control", "tool_use"), ("random_control", "mixture")}


@pytest.mark.parametrize("outer", NESTING)
@pytest.mark.parametrize("inner", NESTING)
def test_nested_environments_must_have_lower_levels(outer: str, inner: str):
    key, wrap = NESTING[outer]
    raw = wrap(NESTING[inner][1](SUM))
    if (outer, inner) in ALLOWED:
        assert isinstance(decode(EnvironmentConfig, raw), EnvironmentConfig)
        return
    message = rf"\.type is '{inner}', which cannot be nested in an environment of type '{outer}'; use one of"
    with pytest.raises(ConfigError, match=f"^{re.escape(key)}{message}"):
        decode(EnvironmentConfig, raw)


def stream_of(*parts: MixturePartConfig) -> TaskStream:
    return MixtureConfig(parts).build().stream(0)


def task(name: str) -> Task:
    return Cards(name).tasks(Split.TRAIN)[0]


def opened(stream: TaskStream, state: StreamState) -> set[str]:
    """Return the environments of a hundred draws."""
    return {task.environment for task in stream.draw(state, 100)[0]}


def open_by_metrics(stream: TaskStream, state: StreamState) -> set[str]:
    metrics = stream.metrics(state)
    return {name.split("/")[1] for name, value in metrics.items() if name.endswith("/open") and value == 1.0}


def test_parts_open_when_all_their_dependencies_are_reached():
    stream = stream_of(part("walk"), part("run", "walk"), part("fly", "run", "swim"), part("swim"))
    state: StreamState = {}
    steps = [
        # The score is undefined until the window is full.
        ("walk", (1.0, 1.0, 1.0), {"walk", "swim"}),
        ("walk", (1.0,), {"walk", "swim", "run"}),
        ("run", (0.0, 0.0, 1.0, 0.0), {"walk", "swim", "run"}),
        # The window drops the oldest score: 0, 1, 0, 1.
        ("run", (1.0,), {"walk", "swim", "run"}),
        ("swim", (1.0, 0.0, 0.0, 0.0), {"walk", "swim", "run"}),
        ("swim", (1.0, 1.0), {"walk", "swim", "run", "fly"}),
        # A part stays open after the score of its dependency drops.
        ("walk", (0.0,) * 9, {"walk", "swim", "run", "fly"}),
    ]
    assert opened(stream, state) == open_by_metrics(stream, state) == {"walk", "swim"}
    for name, scores, expected in steps:
        state = stream.learn(state, [group(task(name), *scores)])
        assert opened(stream, state) == open_by_metrics(stream, state) == expected, (name, scores)


def test_the_score_is_the_mean_of_the_last_window():
    stream = stream_of(part("walk", graduate_at=1.0))
    assert stream.metrics({}) == {"curriculum/walk/open": 1.0}
    before = {"drawn": 4, "parts": {}}
    state = stream.learn(before, [group(task("walk"), 0.0, 0.0, 1.0, 1.0), group(task("walk"), 0.25)])
    assert stream.metrics(state) == {"curriculum/walk/open": 1.0, "curriculum/walk/score": 0.5625}
    assert state["scores"] == {"walk": [0.0, 1.0, 1.0, 0.25]}
    assert (before, state["drawn"]) == ({"drawn": 4, "parts": {}}, 4)
    assert stream.draw(state, 3)[1]["scores"] == state["scores"]


def test_scores_are_the_component_correct_without_weight_or_the_return():
    stream = stream_of(part("walk", graduate_at=1.0))
    judged = RewardResult("correct", weight=0.5, score=1.0)
    played = (
        rollout(task("walk"), game=0.25, step=0.5),
        rollout(task("walk")),  # It failed.
        dataclasses.replace(rollout(task("walk"), correct=0.5), evaluations=(judged,)),
    )
    assert stream.learn({}, [RolloutGroup("g", played)])["scores"] == {"walk": [0.75, 1.0]}


def test_graduated_parts_are_only_drawn_if_all_open_parts_graduated():
    stream = stream_of(part("walk", graduate_at=1.0), part("run", "walk", graduate_at=0.75))
    state = stream.learn({}, [group(task("walk"), 1.0, 0.0, 1.0, 1.0)])
    assert opened(stream, state) == {"walk", "run"}
    state = stream.learn(state, [group(task("walk"), 1.0, 1.0)])
    assert opened(stream, state) == {"run"}
    # A graduated part is still open.
    assert open_by_metrics(stream, state) == {"walk", "run"}
    state = stream.learn(state, [group(task("run"), 1.0, 1.0, 1.0, 0.0)])
    assert opened(stream, state) == {"walk", "run"}


def test_a_part_continues_in_its_order_when_others_open():
    stream = stream_of(part("walk", weight=3.0), part("swim"), part("run", "walk", weight=100.0))
    first, state = stream.draw({}, 2000)
    assert [task.environment for task in first].count("walk") / 2000 == pytest.approx(0.75, abs=0.04)
    second, _ = stream.draw(stream.learn(state, [group(task("walk"), 1.0, 1.0, 1.0, 1.0)]), 400)
    walked = [task.id for task in [*first, *second] if task.environment == "walk"]
    assert walked == [task.id for task in stream_of(part("walk")).draw({}, len(walked))[0]]
