# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import dataclasses

import pytest

from marin_rl.config.decode import ConfigError, decode
from marin_rl.environments import EnvironmentConfig
from marin_rl.environments.base import Split, StreamState, TaskStream
from marin_rl.environments.streams import CurriculumConfig, LessonConfig
from marin_rl.types import RewardResult, RolloutGroup, Task
from tests.environments.fake_environments import Cards, CardsConfig, group, rollout


def lesson(name: str, *after: str, **changes) -> LessonConfig:
    return LessonConfig(name, CardsConfig(f"{name} cards"), after=after, **{"window": 4, "unlock_at": 0.5, **changes})


def stream_of(*lessons: LessonConfig) -> TaskStream:
    return CurriculumConfig(lessons).build().stream(0)


def task(name: str) -> Task:
    return Cards(f"{name} cards").tasks(Split.TRAIN)[0]


def opened(stream: TaskStream, state: StreamState) -> set[str]:
    """Return the lessons of a hundred draws."""
    return {task.environment.removesuffix(" cards") for task in stream.draw(state, 100)[0]}


def open_by_metrics(stream: TaskStream, state: StreamState) -> set[str]:
    return {
        name.split("/")[1] for name, value in stream.metrics(state).items() if name.endswith("/open") and value == 1.0
    }


CHAIN = (lesson("walk"), lesson("run", "walk"), lesson("fly", "run", "swim"), lesson("swim"))


def test_lessons_open_when_all_their_dependencies_are_reached():
    stream = stream_of(*CHAIN)
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
        # A lesson stays open after the score of its dependency drops.
        ("walk", (0.0,) * 9, {"walk", "swim", "run", "fly"}),
    ]
    assert opened(stream, state) == open_by_metrics(stream, state) == {"walk", "swim"}
    for name, scores, expected in steps:
        state = stream.learn(state, [group(task(name), *scores)])
        assert opened(stream, state) == open_by_metrics(stream, state) == expected, (name, scores)


def test_the_score_is_the_mean_of_the_last_window():
    stream = stream_of(lesson("walk"))
    assert stream.metrics({}) == {"curriculum/walk/open": 1.0}
    state = stream.learn({}, [group(task("walk"), 0.0, 0.0, 1.0, 1.0), group(task("walk"), 0.25)])
    assert stream.metrics(state) == {"curriculum/walk/open": 1.0, "curriculum/walk/score": 0.5625}
    assert state["scores"] == {"walk": [0.0, 1.0, 1.0, 0.25]}


def test_score_defaults_to_the_return_and_ignores_failed_rollouts():
    stream = stream_of(lesson("walk"))
    played = (rollout(task("walk"), game=0.25, step=0.5), rollout(task("walk")), rollout(task("walk"), game=1.0))
    assert stream.learn({}, [RolloutGroup("g", played)])["scores"] == {"walk": [0.75, 1.0]}


def test_score_ignores_the_weight_of_a_reward_function_named_correct():
    stream = stream_of(lesson("walk"))
    judged = RewardResult("correct", weight=0.5, score=1.0)
    played = dataclasses.replace(rollout(task("walk"), correct=0.5), evaluations=(judged,))
    assert stream.learn({}, [RolloutGroup("g", (played,))])["scores"] == {"walk": [1.0]}


def test_graduated_lessons_are_only_drawn_if_all_open_lessons_graduated():
    stream = stream_of(lesson("walk", graduate_at=1.0), lesson("run", "walk", graduate_at=0.75))
    state = stream.learn({}, [group(task("walk"), 1.0, 0.0, 1.0, 1.0)])
    assert opened(stream, state) == {"walk", "run"}
    state = stream.learn(state, [group(task("walk"), 1.0, 1.0)])
    assert opened(stream, state) == {"run"}
    # A graduated lesson is still open.
    assert open_by_metrics(stream, state) == {"walk", "run"}
    state = stream.learn(state, [group(task("run"), 1.0, 1.0, 1.0, 0.0)])
    assert opened(stream, state) == {"walk", "run"}


def test_a_lesson_continues_in_its_order_when_others_open():
    stream = stream_of(lesson("walk"), lesson("run", "walk"))
    first, state = stream.draw({}, 3)
    state = stream.learn(state, [group(task("walk"), 1.0, 1.0, 1.0, 1.0)])
    second, _ = stream.draw(state, 40)
    walked = [task.id for task in [*first, *second] if task.environment == "walk cards"]
    alone = [task.id for task in stream_of(lesson("walk")).draw({}, len(walked))[0]]
    assert walked == alone


def test_weights_apply_to_open_lessons():
    stream = stream_of(lesson("walk", weight=3.0), lesson("swim"), lesson("run", "walk", weight=100.0))
    drawn = [task.environment for task in stream.draw({}, 2000)[0]]
    assert drawn.count("walk cards") / 2000 == pytest.approx(0.75, abs=0.04)


@pytest.mark.parametrize(
    ("lessons", "message"),
    [
        ((lesson("a", "b"), lesson("b", "a")), "depend on one another in a cycle: 'a' after 'b' after 'a'"),
        ((lesson("a"), lesson("b", "a", "b")), "'b' after 'b'; remove one name"),
        (
            (lesson("a"), lesson("b", "a", "d"), lesson("c", "b"), lesson("d", "c")),
            "'b' after 'd' after 'c' after 'b'",
        ),
        ((lesson("walk"), lesson("run", "wlak")), "'run' depends on 'wlak'.*did you mean 'walk'.*: walk, run"),
        ((lesson("a"), lesson("a")), "several lessons named 'a'"),
    ],
)
def test_invalid_dependencies_are_rejected(lessons: tuple[LessonConfig, ...], message: str):
    with pytest.raises(ValueError, match=message):
        CurriculumConfig(lessons)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"weight": 0.0}, "lesson 'a': weight must be finite and above 0, got 0.0"),
        ({"weight": float("inf")}, "lesson 'a': weight must be finite and above 0, got inf"),
        ({"window": 0}, "lesson 'a': window must be at least 1 rollout, got 0"),
        ({"graduate_at": 0.25}, "lesson 'a': graduate_at 0.25 is below unlock_at 0.5"),
    ],
)
def test_settings_out_of_range_are_rejected(changes: dict, message: str):
    with pytest.raises(ValueError, match=message):
        lesson("a", **changes)


def test_environments_of_lessons_need_different_names():
    same = CardsConfig("cards")
    with pytest.raises(ValueError, match="curriculum 'curriculum' has two environments named 'cards'"):
        CurriculumConfig((LessonConfig("a", same), LessonConfig("b", same))).build()


def test_curriculum_from_yaml():
    def one(name: str, *after: str) -> dict:
        return {"name": name, "after": list(after), "environment": {"type": "arithmetic", "name": name}}

    config = decode(EnvironmentConfig, {"type": "curriculum", "lessons": [one("a"), one("b", "a")]})
    assert isinstance(config, CurriculumConfig)
    assert config.lessons[1].after == ("a",)
    with pytest.raises(ConfigError, match=r"environment: .*'a' after 'b' after 'a'"):
        decode(EnvironmentConfig, {"type": "curriculum", "lessons": [one("a", "b"), one("b", "a")]}, ("environment",))
