# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import asyncio
import dataclasses
import threading

import pytest

from marin_rl.environments.base import Split
from marin_rl.environments.single_turn import SingleTurnEnvironment
from marin_rl.rewards import reply_text
from marin_rl.rewards.grading import FormatConfig
from marin_rl.rewards.grading_process import NoAnswerError
from marin_rl.types import Message, Task
from tests.one_reply import answer

TASK = Task(id="a", environment="test", messages=(Message(role="user", content="1+1="),), answer="2")


def environment(**fields) -> SingleTurnEnvironment:
    settings = {
        "name": "test",
        "splits": {Split.TRAIN: [TASK], Split.VALIDATION: [], Split.HELD_OUT: []},
        "score": lambda task, reply: float(reply == task.answer),
    }
    return SingleTurnEnvironment(**{**settings, **fields})


def test_one_reply_ends_the_episode():
    step = answer(environment(), TASK, "2")
    assert (step.rewards, step.messages, step.done) == ({"correct": 1.0}, (), True)


def test_format_is_a_separate_component():
    made = environment(format=FormatConfig(regex=r"\d+", weight=0.5))
    assert answer(made, TASK, "3").rewards == {"correct": 0.0, "format": 0.5}
    assert answer(made, TASK, "two").rewards == {"correct": 0.0, "format": 0.0}


@pytest.mark.parametrize("regex", [None, "<a>(.*?)</a>"])
def test_only_the_text_after_the_thoughts_is_scored(regex: str | None):
    made = environment(reply_regex=regex)
    right = "3" if regex is None else "<a>3</a>"
    task = made.tasks(Split.TRAIN)[0]
    scored = [
        made.grade(dataclasses.replace(task, answer="3"), reply).rewards["correct"]
        for reply in (right, f"<think><a>2</a></think>{right}", f"<think>{right}", f"{right}<think>")
    ]
    assert scored == [1.0, 1.0, 0.0, 0.0]


def test_reply_regex_extracts_the_scored_text():
    made = environment(reply_regex=r"<a>(.*?)</a>", format=FormatConfig(regex=r"<a>.*</a>"))
    assert answer(made, TASK, "<a>2</a>").rewards == {"correct": 1.0, "format": 1.0}
    assert answer(made, TASK, "2").rewards == {"correct": 0.0, "format": 0.0}


def reason(made: SingleTurnEnvironment, reply: str, answer_text: str = "2") -> str | None:
    return made.grade(dataclasses.replace(TASK, answer=answer_text), reply).rollout_info.get("reason")


@pytest.mark.parametrize(
    ("reply", "fields", "expected"),
    [
        ("2", {}, None),
        ("3", {}, "expected 2, found 3"),
        ("", {}, "expected 2, found ''"),
        (" 2", {}, "expected 2, found ' 2'"),
        ("2\n3", {}, "expected 2, found '2\\n3'"),
        ("\x1b[31m\ud800", {}, "expected 2, found '\\x1b[31m\\ud800'"),
        ("七", {}, "expected 2, found 七"),
        ("<think>2", {}, "expected 2, found a <think> without </think>"),
        ("<think>2</think>3", {}, "expected 2, found 3"),
        ("it is 3", {"reply_regex": r"is (\d)"}, "expected 2, found 3"),
        ("3", {"reply_regex": r"is (\d)"}, "expected 2, found no match of reply_regex `is (\\d)`"),
        ("3", {"format": FormatConfig(regex="a", weight=0.5)}, "expected 2, found 3; no match of format.regex `a`"),
        ("2", {"format": FormatConfig(regex="a", weight=0.5)}, "no match of format.regex `a`"),
        ("2", {"format": FormatConfig(regex="2")}, None),
        ("3", {"score": lambda task, reply: 0.25}, "expected 2, found 3"),
        ("2", {"score": lambda task, reply: 0.25}, "graded 0.25: 2"),
        ("3", {"read": lambda reply: None}, "expected 2, found no final answer"),
        ("3", {"read": lambda reply: "three"}, "expected 2, found three"),
        ("3", {"score": None, "format": FormatConfig(regex="3")}, None),
    ],
)
def test_a_reward_below_the_full_one_has_a_reason(reply: str, fields: dict, expected: str | None):
    assert reason(environment(**fields), reply) == expected


def test_the_reason_of_a_task_without_an_answer_quotes_the_reply():
    assert reason(environment(), "3", answer_text="") == "graded 0: 3"


def test_reasons_are_short_for_long_replies_and_answers():
    found = reason(environment(), "x" * 10**6 + "3", answer_text="y" * 10**6)
    assert len(found) < 200
    assert found.endswith("x3")


@pytest.mark.parametrize(
    "fields", [{"reply_regex": "(a+)+b"}, {"format": FormatConfig(regex="(a+)+b")}], ids=["reply_regex", "format"]
)
def test_a_search_without_end_does_not_block_other_episodes(monkeypatch, fields):
    monkeypatch.setattr(reply_text, "SEARCH_SECONDS", 0.2)
    finished = []

    async def play(reply: str, made: SingleTurnEnvironment) -> dict[str, float]:
        episode = await made.start(TASK, 0)
        step = await episode.step(reply)
        finished.append(reply)
        return dict(step.rewards)

    async def play_both() -> list[dict[str, float]]:
        return await asyncio.gather(play("a" * 100, environment(**fields)), play("2", environment()))

    slow, fast = asyncio.run(play_both())
    assert finished == ["2", "a" * 100]
    assert (set(slow.values()), fast) == ({0.0}, {"correct": 1.0})


def test_a_part_of_the_grading_without_end_is_counted_and_leaves_the_others(monkeypatch, caplog):
    def without_end(task: Task, reply: str) -> float:
        raise NoAnswerError("too slow")

    monkeypatch.setattr(reply_text, "SEARCH_SECONDS", 0.2)
    right = "a" * 100
    made = environment(score=lambda task, reply: float(reply == right), format=FormatConfig(regex="(a+)+b"))
    for broken in (made, environment(score=without_end, blocks=True)):
        step = answer(broken, TASK, right)
        assert step.metrics == {"grading_given_up": 1.0}
        assert step.rewards == ({"correct": 1.0, "format": 0.0} if broken is made else {"correct": 0.0})
    assert "task a: the grading of 'format' was given up" in caplog.text
    assert answer(made, TASK, "b").metrics == {"grading_given_up": 0.0}
    assert answer(environment(), TASK, "2").metrics == {}


def test_exceptions_of_the_grader_propagate():
    def broken(task: Task, reply: str) -> float:
        raise ZeroDivisionError("in the reward")

    with pytest.raises(ZeroDivisionError, match="in the reward"):
        answer(environment(score=broken), TASK, "2")


def test_an_episode_is_used_once():
    async def play_twice() -> None:
        episode = await environment().start(TASK, 0)
        await episode.step("2")
        await episode.step("2")

    with pytest.raises(RuntimeError, match="task 'a': the episode ended"):
        asyncio.run(play_twice())


def test_a_blocking_score_runs_in_a_thread():
    threads = []

    def score(task: Task, reply: str) -> float:
        threads.append(threading.current_thread())
        return 1.0

    for blocks in (False, True):
        answer(environment(score=score, blocks=blocks), TASK, "2")
    assert threads[0] is threading.current_thread()
    assert threads[1] is not threading.current_thread()


def test_a_task_of_another_environment_is_rejected():
    with pytest.raises(ValueError, match="environment 'other' has no task 'a' of 'test'"):
        answer(environment(name="other"), TASK, "2")
