# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import asyncio
import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import cast

import pytest

from marin_rl.environments.base import EnvironmentConfig, Split
from marin_rl.environments.garbage import GarbageRewardError, refuse_garbage_rewards
from marin_rl.environments.reasoning_gym import ReasoningGymConfig
from marin_rl.environments.single_turn import SingleTurnEnvironment
from marin_rl.rewards import grading
from marin_rl.rewards.grading_process import NoAnswerError
from marin_rl.types import Message, Task
from marin_rl.utils.settings.decode import decode

Score = Callable[[Task, str], float]


def environment(score: Score | None, answers: list[str], **fields) -> SingleTurnEnvironment:
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
        (lambda task, reply: float(reply == "" and int(task.answer) < 6), "for 5 of 8 tasks"),
    ],
)
def test_rewarded_garbage_is_named(score: Score, message: str):
    made = environment(score, [str(number) for number in range(1, 20)], reply_regex="<a>(.*)</a>")
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
    refuse_garbage_rewards(environment(score, answers), "a test")


@pytest.mark.parametrize("error", [ValueError, ZeroDivisionError, SystemExit, NoAnswerError])
def test_an_error_for_garbage_is_no_reward(error: type[BaseException]):
    def score(task: Task, reply: str) -> float:
        raise error("for this reply")

    made = environment(score, ["1", "2"])
    refuse_garbage_rewards(made, "a test", may_raise=True)
    with contextlib.nullcontext() if error is NoAnswerError else pytest.raises(error, match="for this reply"):
        refuse_garbage_rewards(made, "a test")


@pytest.mark.parametrize("result", [None, "1", [1.0], asyncio.sleep])
def test_a_result_that_is_no_number_is_no_reward(result: object):
    score = cast(Score, lambda task, reply: result)
    with pytest.raises(GarbageRewardError) if result == "1" else contextlib.nullcontext():
        refuse_garbage_rewards(environment(score, ["1", "2"]), "a test", may_raise=True)


def test_a_grading_process_that_cannot_start_is_an_error(monkeypatch, tmp_path: Path):
    def refuse(*arguments: object) -> None:
        raise RuntimeError("cannot start a process")

    monkeypatch.setattr(grading, "ask", refuse)
    problems = tmp_path / "problems.jsonl"
    problems.write_text("\n".join(json.dumps({"prompt": str(number), "answer": "7"}) for number in range(100)))
    config = decode(EnvironmentConfig, {"type": "jsonl", "path": str(problems), "grader": {"type": "math_verify"}})
    with pytest.raises(RuntimeError, match="cannot start a process"):
        config.build()


def test_garbage_is_no_answer_of_a_task_without_one():
    with pytest.raises(GarbageRewardError, match="an empty reply"):
        refuse_garbage_rewards(environment(lambda task, reply: float(reply == ""), [""]), "a test")


@pytest.mark.parametrize(
    ("task", "garbage"),
    [
        ("game_of_life_halting", "a reply of spaces earns the full reward for 8 of 8 tasks"),
        ("complex_arithmetic", "the reply 'nan' earns the full reward for 8 of 8 tasks"),
        ("coin_flip", "the reply '0' earns the full reward for"),
    ],
)
def test_tasks_of_reasoning_gym(task: str, garbage: str):
    fields = {"task": task, "name": "mine", "size": 20, "held_out": 0.0, "validation": 0.0}
    with pytest.raises(GarbageRewardError, match=rf"'mine' \(reasoning-gym task '{task}'\) rewards garbage: {garbage}"):
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
    of_problems = {"type": "jsonl", "path": str(problems), "grader": {"type": "math_verify"}}
    of_python = {"type": "file", "path": str(python), "name": "make"}
    for settings, name in ((of_problems, "problems"), (of_python, "mine")):
        with pytest.raises(GarbageRewardError, match=f"environment '{name}' .* rewards garbage"):
            decode(EnvironmentConfig, settings).build()
        allowed = decode(EnvironmentConfig, {**settings, "allow_garbage_rewards": True})
        assert allowed.build().name == name
