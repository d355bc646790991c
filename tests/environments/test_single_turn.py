# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import asyncio
import contextlib
import dataclasses
import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import cast

import pytest

from marin_rl.environments.base import EnvironmentConfig, Split
from marin_rl.environments.reasoning_gym import ReasoningGymConfig
from marin_rl.environments.single_turn import GarbageRewardError, SingleTurnEnvironment, refuse_garbage_rewards
from marin_rl.rewards import grading, reply_text
from marin_rl.rewards.grading import FormatConfig
from marin_rl.rewards.grading_process import NoAnswerError
from marin_rl.types import Message, Task
from marin_rl.utils.settings.decode import decode
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
    async def play() -> None:
        episode = await environment().start(TASK, 0)
        step = await episode.step("2")
        assert (step.rewards, step.messages, step.done) == ({"correct": 1.0}, (), True)
        with pytest.raises(RuntimeError, match="task 'a': the episode ended"):
            await episode.step("2")

    asyncio.run(play())
    with pytest.raises(ValueError, match="environment 'other' has no task 'a' of 'test'"):
        answer(environment(name="other"), TASK, "2")
    with pytest.raises(ZeroDivisionError):
        answer(environment(score=lambda task, reply: 1 / 0), TASK, "2")


def test_reply_regex_extracts_the_scored_text():
    made = environment(reply_regex=r"<a>(.*?)</a>", format=FormatConfig(regex=r"<a>.*</a>", weight=0.5))
    for reply, correct, format in (
        ("<a>2</a>", 1.0, 0.5),
        ("<a>3</a>", 0.0, 0.5),
        ("2", 0.0, 0.0),
        ("<think><a>3</a></think><a>2</a>", 1.0, 0.0),
        ("<think>\n<a>2</a>", 0.0, 0.0),
        ("<a>3</a></think>\n<a>2</a>", 1.0, 0.0),
        ("<think><a>3</a></think><a>2</a><think>", 0.0, 0.0),
        ("<a>2</a><think>", 0.0, 0.0),
    ):
        assert answer(made, TASK, reply).rewards == {"correct": correct, "format": format}


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


def test_reasons_are_short_for_long_replies_and_answers():
    assert reason(environment(), "3", answer_text="") == "graded 0: 3"
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


def test_a_blocking_score_runs_in_a_thread():
    threads = []

    def score(task: Task, reply: str) -> float:
        threads.append(threading.current_thread())
        return 1.0

    for blocks in (False, True):
        answer(environment(score=score, blocks=blocks), TASK, "2")
    assert threads[0] is threading.current_thread()
    assert threads[1] is not threading.current_thread()


Score = Callable[[Task, str], float]


def graded_by(score: Score | None, answers: list[str], **fields) -> SingleTurnEnvironment:
    tasks = [
        Task(id=str(place), environment="sums", messages=(Message(role="user", content=f"{answer}+0="),), answer=answer)
        for place, answer in enumerate(answers)
    ]
    splits = {Split.TRAIN: tasks, Split.VALIDATION: [], Split.HELD_OUT: []}
    return SingleTurnEnvironment(name="sums", splits=splits, score=score, **fields)


def numeric(task: Task, reply: str) -> float:
    try:
        return float(not abs(float(reply) - float(task.answer)) > 0.01)
    except ValueError:
        return 0.0


@pytest.mark.parametrize(
    ("score", "message"),
    [
        (lambda task, reply: 1.0, "an empty reply earns the full reward for 8 of 8 tasks, such as 1 for task '0'"),
        (lambda task, reply: float(bool(reply)), "a reply of spaces earns"),
        (numeric, "the reply 'nan' earns"),
        (lambda task, reply: float(reply in ("0", task.answer)), "the reply '0' earns"),
        (lambda task, reply: float(len(reply) > 500), "a reply of 1,000 random characters earns"),
        (lambda task, reply: float(reply.startswith(f"{task.answer}+")), "the question as the reply earns"),
        (lambda task, reply: 7.0 * (reply == "nan"), "such as 7 for task '0' with the answer '1'"),
        (lambda task, reply: cast(float, "1"), "an empty reply earns"),
        (lambda task, reply: float(reply == "" and int(task.answer) < 6), "for 5 of 8 tasks"),
    ],
)
def test_rewarded_garbage_is_named(score: Score, message: str):
    made = graded_by(score, [str(number) for number in range(1, 20)], reply_regex="<a>(.*)</a>")
    with pytest.raises(
        GarbageRewardError, match=r"'sums' \(a test\) rewards garbage: .*allow_garbage_rewards"
    ) as raised:
        refuse_garbage_rewards(made, "a test")
    assert message in str(raised.value)


@pytest.mark.parametrize(
    ("score", "answers"),
    [
        (lambda task, reply: float(reply == task.answer), ["1", "2"]),
        (lambda task, reply: 0.9, ["1", "2"]),
        (lambda task, reply: float(reply == "" and int(task.answer) < 5), [str(number) for number in range(1, 20)]),
        # Garbage that is the answer.
        (lambda task, reply: float(reply.strip() == task.answer), ["0", "0", "nan"]),
        (lambda task, reply: float(reply == "0"), ["0", "0.0", "-0", "0e1"]),
        (lambda task, reply: float(reply.strip() == task.answer.strip("$%")), ["0", "0", "0%", "0", "$0$", "1"]),
        (lambda task, reply: float(reply.lower() == "nan"), ["NaN"]),
        (None, ["1", "2"]),
        (lambda task, reply: 0.0, []),
    ],
)
def test_other_scorers_are_accepted(score: Score | None, answers: list[str]):
    refuse_garbage_rewards(graded_by(score, answers), "a test")
    # A task without an answer has no right garbage.
    with pytest.raises(GarbageRewardError, match="an empty reply"):
        refuse_garbage_rewards(graded_by(lambda task, reply: float(reply == ""), [""]), "a test")


@pytest.mark.parametrize("error", [ZeroDivisionError, SystemExit, NoAnswerError])
def test_an_error_for_garbage_is_no_reward(error: type[BaseException]):
    def score(task: Task, reply: str) -> float:
        raise error("for this reply")

    made = graded_by(score, ["1", "2"])
    refuse_garbage_rewards(made, "a test", may_raise=True)
    with contextlib.nullcontext() if error is NoAnswerError else pytest.raises(error, match="for this reply"):
        refuse_garbage_rewards(made, "a test")


def test_a_grading_process_that_cannot_start_is_an_error(monkeypatch, tmp_path: Path):
    def refuse(*arguments: object) -> None:
        raise RuntimeError("cannot start a process")

    monkeypatch.setattr(grading, "ask", refuse)
    problems = tmp_path / "problems.jsonl"
    problems.write_text("\n".join(json.dumps({"prompt": str(number), "answer": "7"}) for number in range(100)))
    config = decode(EnvironmentConfig, {"type": "jsonl", "path": str(problems), "grader": {"type": "math"}})
    with pytest.raises(RuntimeError, match="cannot start a process"):
        config.build()


def test_tasks_of_reasoning_gym():
    fields = {"task": "complex_arithmetic", "name": "mine", "size": 20, "held_out": 0.0, "validation": 0.0}
    message = r"'mine' \(reasoning-gym task '.*'\) rewards garbage: the reply 'nan' earns the full reward for 8 of 8"
    with pytest.raises(GarbageRewardError, match=message):
        ReasoningGymConfig(**fields).build()
    assert ReasoningGymConfig(**fields, allow_garbage_rewards=True).build().name == "mine"


def test_files_of_problems_and_of_python(tmp_path: Path):
    problems = tmp_path / "problems.jsonl"
    rows = [{"prompt": f"\\boxed{{{number}}}", "answer": str(number)} for number in range(100)]
    problems.write_text("\n".join(map(json.dumps, rows)))
    python = tmp_path / "mine.py"
    python.write_text(
        "import dataclasses\n"
        "from marin_rl.environments.dataset import JsonlConfig\n"
        "def make():\n"
        f"    built = JsonlConfig(path={str(problems)!r}).build()\n"
        "    return dataclasses.replace(built, name='mine', score=lambda task, reply: 1.0)\n"
    )
    # The question contains the answer, which the grader finds.
    of_problems = {"type": "jsonl", "path": str(problems), "grader": {"type": "math"}}
    of_python = {"type": "file", "path": str(python), "name": "make"}
    for settings, name in ((of_problems, "problems"), (of_python, "mine")):
        with pytest.raises(GarbageRewardError, match=f"environment '{name}' .* rewards garbage"):
            decode(EnvironmentConfig, settings).build()
        allowed = decode(EnvironmentConfig, {**settings, "allow_garbage_rewards": True})
        assert allowed.build().name == name
