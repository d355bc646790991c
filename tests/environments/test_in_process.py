# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Environments that are objects of the program that trains."""

import threading
from typing import Any

import pytest

from marin_rl.environments.base import Split, Step
from marin_rl.environments.in_process import InProcessConfig
from marin_rl.environments.splits import EmptySplitError
from marin_rl.types import Task
from marin_rl.utils.event_loop import run_in_thread
from marin_rl.utils.user_code import UserFileError, sharing
from tests.environments.fake_environments import Cards

TASKS = [{"prompt": f"Guess a number below {limit}.", "answer": str(limit // 2)} for limit in range(4, 80)]


class Guess:
    """A game whose state is changed in place."""

    tasks = TASKS

    def __init__(self) -> None:
        self.guesses: list[str] = []

    def start(self, task: Task, seed: int) -> None:
        self.answer = task.answer

    def step(self, reply: str) -> Step:
        self.guesses.append(reply)
        if reply == self.answer or len(self.guesses) == 3:
            return Step({"won": float(reply == self.answer)}, rollout_info={"guesses": list(self.guesses)})
        return Step({}, messages=({"role": "user", "content": "no"},), done=False)


class Waiting(Guess):
    """The same with coroutines, and a method for the tasks."""

    def tasks(self) -> list[dict]:  # type: ignore[override]
        return TASKS

    async def start(self, task: Task, seed: int) -> None:  # type: ignore[override]
        Guess.start(self, task, seed)

    async def step(self, reply: str) -> Step:  # type: ignore[override]
        return Guess.step(self, reply)


def build(value: Any, **settings: Any) -> Any:
    with sharing({"guess": value}):
        return InProcessConfig(name="guess", **settings).build()


@pytest.mark.parametrize("value", [Guess, Guess(), Waiting, Waiting()])
def test_attempts_do_not_share_state(value: Any) -> None:
    environment = build(value, held_out=0.2, validation=0.0)
    tasks = environment.tasks(Split.TRAIN)
    assert len(tasks) + len(environment.tasks(Split.HELD_OUT)) == len(TASKS)

    async def play() -> tuple[Step, Step]:
        first, second = [await environment.start(tasks[0], seed) for seed in range(2)]
        for reply in ("0", "1"):
            assert not (await first.step(reply)).done
        return await first.step("x"), await second.step(tasks[0].answer)

    lost, won = run_in_thread(play())
    assert (lost.rewards, lost.rollout_info) == ({"won": 0.0}, {"guesses": ["0", "1", "x"]})
    assert (won.rewards, won.rollout_info) == ({"won": 1.0}, {"guesses": [tasks[0].answer]})


def test_tasks_are_not_copied_and_methods_do_not_block_the_event_loop() -> None:
    threads = set()

    class Counted(list):
        def __deepcopy__(self, memo: dict) -> "Counted":
            raise AssertionError("copied")

    class Own(Guess):
        def __init__(self) -> None:
            Guess.__init__(self)
            self.tasks = Counted(TASKS)

        def step(self, reply: str) -> Step:
            threads.add(threading.current_thread().name)
            return Guess.step(self, reply)

    environment = build(Own(), validation=0.0)

    async def play() -> str:
        episode = await environment.start(environment.tasks(Split.TRAIN)[0], 0)
        await episode.step("1")
        await episode.close()
        return threading.current_thread().name

    assert run_in_thread(play()) not in threads


def test_an_environment_is_used_as_it_is() -> None:
    own = Cards("own")
    assert build(own) is own


def test_tasks_may_be_records_and_need_no_answers() -> None:
    class Own(Guess):
        tasks = [{"prompt": "a"}, {"prompt": [{"role": "user", "content": "b"}]}, Task("3", "x", TASK, "")]  # noqa: RUF012

    found = build(Own(), held_out=0.0, validation=0.0).tasks(Split.TRAIN)
    assert [(task.messages[-1]["content"], task.answer, task.environment) for task in found] == [
        ("a", "", "guess"),
        ("b", "", "guess"),
        ("c", "", "guess"),
    ]


TASK = ({"role": "user", "content": "c"},)


@pytest.mark.parametrize(
    ("tasks", "error"),
    [
        ([], "no problems"),
        ([{"question": "a"}], "guess: there is no column 'prompt'"),
        (["a"], "task 0 of guess is 'a'"),
        ([{"prompt": "a"}, 3], "task 1 of guess is 3"),
        ([{"prompt": ""}], "is empty"),
    ],
)
def test_invalid_tasks_are_named(tasks: Any, error: str) -> None:
    own = Guess()
    own.tasks = tasks  # type: ignore[misc]
    with pytest.raises(ValueError, match=error):
        build(own, held_out=0.0, validation=0.0)


def test_objects_that_no_attempt_can_use_are_refused() -> None:
    own = Guess()
    own.lock = threading.Lock()  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="cannot be copied"):
        build(own)

    class Own(Guess):
        def start(self, task: Task) -> None:  # type: ignore[override]
            pass

    with pytest.raises(ValueError, match="start of 'guess'"):
        build(Own())


def test_too_few_tasks_and_missing_methods_are_errors() -> None:
    own = Guess()
    own.tasks = TASKS[:1]  # type: ignore[misc]
    with pytest.raises(EmptySplitError):
        build(own)
    with pytest.raises(ValueError, match="has no tasks and no start and no step"):
        build(object())
    with pytest.raises(UserFileError, match="'guess'"):
        InProcessConfig(name="guess").build()


@pytest.mark.parametrize("answer", [None, 1.0, (1.0, "again"), {"won": 1.0}])
def test_other_answers_than_steps_fail_the_attempt(answer: Any) -> None:
    class Own(Guess):
        def step(self, reply: str) -> Any:
            return answer

    environment = build(Own(), validation=0.0)

    async def play() -> None:
        await (await environment.start(environment.tasks(Split.TRAIN)[0], 0)).step("1")

    with pytest.raises(TypeError, match=r"must return a marin_rl\.Step"):
        run_in_thread(play())
