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
from marin_rl.environments.streams import (
    CurriculumConfig,
    LessonConfig,
    MixtureConfig,
    MixturePartConfig,
    MixtureStream,
)
from marin_rl.rewards.component import FunctionRewardConfig
from marin_rl.types import Message, RewardResult, RolloutGroup, Task
from marin_rl.utils.seeds import derive_seed
from marin_rl.utils.settings.decode import decode
from marin_rl.utils.settings.section_types import ConfigError
from tests.environments.fake_environments import Cards, CardsConfig, group, rollout
from tests.one_reply import answer

PARTS = {"a": Cards("a", 3), "b": Cards("b", 7), "c": Cards("c", 5)}


def drawn_in(counts: list[int], weights: dict[str, float], seed: int) -> list[Task]:
    """Draw tasks in calls of the given sizes."""
    tasks, place = [], {}
    for count in counts:
        more, place = MixtureStream(PARTS, weights, seed).draw(place, count)
        tasks += more
    return tasks


@given(
    counts=st.lists(st.integers(0, 9), max_size=6),
    weights=st.dictionaries(st.sampled_from("abc"), st.floats(1e-3, 1e3), min_size=1),
    seed=st.integers(0, 2**31),
)
@settings(deadline=None)
def test_draws_are_independent_of_call_sizes_and_parts_keep_their_order(
    counts: list[int], weights: dict[str, float], seed: int
):
    drawn = drawn_in(counts, weights, seed)
    assert drawn == drawn_in([sum(counts)], weights, seed)
    for name, part in PARTS.items():
        own = [task for task in drawn if task.environment == name]
        alone, _ = part.stream(derive_seed(seed, "part", name)).draw({}, len(own))
        assert own == alone
        assert name in weights or not own


def test_draw_keeps_other_state_entries_and_does_not_mutate_the_state():
    before = {"drawn": 4, "parts": {"a": {"drawn": 2}}, "scores": [1, 2]}
    copy = {"drawn": 4, "parts": {"a": {"drawn": 2}}, "scores": [1, 2]}
    _, after = MixtureStream(PARTS, {"a": 1.0}, 0).draw(before, 3)
    assert before == copy
    assert after == {"drawn": 7, "parts": {"a": {"drawn": 5}}, "scores": [1, 2]}


def test_a_part_continues_in_its_order_after_a_pause():
    first, place = MixtureStream(PARTS, {"a": 1.0}, 0).draw({}, 2)
    _, place = MixtureStream(PARTS, {"b": 1.0}, 0).draw(place, 4)
    rest, _ = MixtureStream(PARTS, {"a": 1.0}, 0).draw(place, 1)
    assert {task.id for task in [*first, *rest]} == {"train0", "train1", "train2"}


def test_parts_have_their_own_and_the_common_reward_functions():
    own, shared = (FunctionRewardConfig(path="rewards.py", function=name) for name in ("own", "shared"))
    configs = [ArithmeticConfig(size=50, name="judged", rewards=(own,)), ArithmeticConfig(size=50, name="plain")]
    parts = tuple(MixturePartConfig(config) for config in configs)
    lessons = tuple(LessonConfig(config.name, config) for config in configs)
    for both in (MixtureConfig(parts, rewards=(shared,)), CurriculumConfig(lessons, rewards=(shared,))):
        assert both.reward_components(both.build()) == {"judged": (own, shared), "plain": (shared,)}


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
        MixtureConfig(())
    with pytest.raises(ValueError, match="environment 'cards' has no tasks to train on"):
        MixtureConfig((MixturePartConfig(CardsConfig(size=0)),)).build()


def sums(name: str, **changes: Any) -> ArithmeticConfig:
    return ArithmeticConfig(size=2000, name=name, **changes)


def composites(*environments: EnvironmentConfig) -> list[EnvironmentConfig]:
    lessons = tuple(LessonConfig(str(index), environment) for index, environment in enumerate(environments))
    return [MixtureConfig(tuple(map(MixturePartConfig, environments))), CurriculumConfig(lessons)]


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (sums("a"), sums("b", held_out=0.3)),
        (sums("a"), sums("b", held_out=0.1, validation=0.0)),
        (sums("a"), ToolUseConfig(sums("b", held_out=0.3))),
        (
            TextGameConfig(id="Taxi-v4", name="a"),
            TextGameConfig(id="Taxi-v4", name="b", held_out=0.3, view=View.COMPACT),
        ),
    ],
)
def test_parts_must_not_train_on_evaluation_problems_of_others(first: EnvironmentConfig, second: EnvironmentConfig):
    shown = r"environment '[ab]' trains on [0-9]+ (held_out|validation) problems of '[ab]', the first is '.*give both"
    for whole in (*composites(first, second), *composites(second, first)):
        with pytest.raises(ValueError, match=f"(?s){shown} environments equal held_out and equal validation, or data"):
            whole.build()


def test_files_of_parts_must_not_overlap(tmp_path: Path):
    def write(name: str, *rows: dict[str, Any]) -> str:
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        return str(tmp_path / name)

    rows = [{"prompt": f"question {index}", "answer": "1", "id": index} for index in range(200)]
    messages = [{"messages": [{"role": "user", "content": row["prompt"] + " "}], "answer": "1"} for row in rows[100:]]
    a, b, c = write("a.jsonl", *rows[:100]), write("b.jsonl", *rows[100:]), write("c.jsonl", *messages)
    for other in (b, c):
        for whole in composites(JsonlConfig(path=a, held_out_path=b), JsonlConfig(path=other, name="other")):
            with pytest.raises(ValueError, match=r"'other' trains on \d+ held_out problems of 'a', .* 'question \d+'"):
                whole.build()
    # A template changes the messages, but not the problems.
    asked = JsonlConfig(path=a, name="other", rows=RowFormat(prompt_template="Tell me: {prompt}"))
    for whole in composites(JsonlConfig(path=a, held_out=0.4), asked):
        with pytest.raises(ValueError, match=r"'other' trains on \d+ held_out problems of 'a', .* 'question \d+'"):
            whole.build()
    # Ids of unrelated files may be equal.
    renamed = [{**row, "prompt": "other " + row["prompt"]} for row in rows]
    for whole in composites(JsonlConfig(path=a), JsonlConfig(path=write("d.jsonl", *renamed), held_out=0.4)):
        whole.build()


def test_parts_with_equal_shares_may_have_common_problems():
    lake = {"id": "FrozenLake-v1", "num_tasks": 300}
    pairs = (
        (sums("a"), sums("b", reverse_answer=True)),
        (sums("a"), ToolUseConfig(sums("b"))),
        (TextGameConfig(id="Taxi-v4", name="a"), TextGameConfig(id="Taxi-v4", name="b", view=View.COMPACT)),
        # Other rules make it another game, even on the same map.
        (
            TextGameConfig(name="dry", options={"is_slippery": False, "size": 3}, **lake),
            TextGameConfig(name="wet", options={"is_slippery": True, "size": 3}, **lake),
        ),
    )
    for pair in pairs:
        for whole in composites(*pair):
            assert whole.build().tasks(Split.TRAIN)


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
        ((), "curriculum 'curriculum' has no environments; give it at least one"),
    ],
)
def test_invalid_dependencies_are_rejected(lessons: tuple[LessonConfig, ...], message: str):
    with pytest.raises(ValueError, match=message):
        CurriculumConfig(lessons)


def test_a_lesson_cannot_graduate_before_it_unlocks_others():
    with pytest.raises(ValueError, match=r"lesson 'a': graduate_at 0\.25 is below unlock_at 0\.5"):
        lesson("a", graduate_at=0.25)


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
