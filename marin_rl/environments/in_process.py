# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""The environment `in_process`: an object of the Python program that trains."""

import asyncio
import copy
import dataclasses
import inspect
from collections.abc import Callable
from typing import Any, ClassVar

from marin_rl.environments.base import (
    AbstractEnvironment,
    AbstractSplitEnvironment,
    EnvironmentConfig,
    SplitConfig,
    Step,
)
from marin_rl.environments.row_columns import Row
from marin_rl.environments.row_format import RowFormat
from marin_rl.environments.splits import Problem, question_text, without_duplicates
from marin_rl.types import Task
from marin_rl.utils.user_code import shared_object


@EnvironmentConfig.register_subclass("in_process")
@dataclasses.dataclass(frozen=True)
class InProcessConfig(SplitConfig):
    """Environment that is an object of the Python program that trains.

    It is an `AbstractEnvironment`, which has its own splits, or any object, or class without arguments, with

    - `tasks`: a list, or a method that returns one, of dictionaries as the rows of `jsonl`, without need of an answer;
    - `start(task, seed)`: begins an attempt, of which each has a copy of the object;
    - `step(reply)`: returns a [`Step`][marin_rl.environments.base.Step].

    Both methods may be coroutines; others run in a thread.
    """

    is_in_process: ClassVar[bool] = True

    name: str
    """Name of the object, as of [`sharing`][marin_rl.utils.user_code.sharing], and of the environment for metrics."""

    def build(self) -> AbstractEnvironment:
        """Return the environment.

        Raises:
            UserFileError: if this program does not share the object.
            ValueError: if it lacks a method, or a task or split is invalid.
        """
        value = shared_object(self.name)
        attempt = value() if isinstance(value, type) else value
        if isinstance(attempt, AbstractEnvironment):
            return attempt
        if missing := [name for name in ("tasks", "start", "step") if not hasattr(attempt, name)]:
            raise ValueError(
                f"the environment {self.name!r} has no {' and no '.join(missing)}; an environment has tasks, "
                "start(task, seed) and step(reply)"
            )
        _check_attempt(attempt, self.name)
        rows = attempt.tasks() if callable(attempt.tasks) else attempt.tasks
        problems = [_problem(row, index, self.name) for index, row in enumerate(rows)]
        return ObjectEnvironment(self.name, self.divide(without_duplicates(problems, self.name), self.name), attempt)


def _check_attempt(attempt: Any, name: str) -> None:
    try:
        _copy(attempt)
    except Exception as error:
        raise ValueError(
            f"the environment {name!r} cannot be copied for an attempt: {error}; make what cannot be copied in start, "
            "or define __deepcopy__"
        ) from error
    try:
        inspect.signature(attempt.start).bind("task", 0)
    except TypeError as error:
        raise ValueError(f"start of {name!r} cannot be called with a task and a seed: {error}") from error


def _copy(attempt: Any) -> Any:
    """Copy an object without its tasks; those of its class, which a property may compute, are no part of it."""
    tasks = getattr(attempt, "__dict__", {}).get("tasks")
    return copy.deepcopy(attempt, {id(tasks): tasks})


def _problem(row: Any, index: int, environment: str) -> Problem:
    where = f"task {index} of {environment}"
    if isinstance(row, Task):
        return Problem(question_text(row.messages), dataclasses.replace(row, environment=environment), where)
    if not isinstance(row, dict):
        raise ValueError(f"{where} is {row!r:.200}; it must be a dictionary such as {{'prompt': '2 + 2 ='}}")
    return RowFormat().problem(Row(row, where), environment, needs_answer=False)


@dataclasses.dataclass(frozen=True)
class ObjectEnvironment(AbstractSplitEnvironment):
    """Environment of an object with `tasks`, `start` and `step`."""

    attempt: Any
    """The object before an attempt."""

    async def start(self, task: Task, seed: int) -> "ObjectEpisode":
        """Start an attempt with a copy of the object, whose tasks are not copied."""
        self.require_own(task)
        attempt = _copy(self.attempt)
        await _call(attempt.start, task, seed)
        return ObjectEpisode(self.name, attempt)


@dataclasses.dataclass
class ObjectEpisode:
    """One attempt."""

    name: str
    attempt: Any

    async def step(self, reply: str) -> Step:
        """Respond to a reply.

        Raises:
            TypeError: if the object's answer is no `Step`.
        """
        step = await _call(self.attempt.step, reply)
        if not isinstance(step, Step):
            raise TypeError(
                f"step of {self.name!r} returned {step!r:.200}; it must return a marin_rl.Step, such as "
                "Step(rewards={'won': 1.0})"
            )
        return step

    async def close(self) -> None:
        """Do nothing: the object is dropped."""


async def _call(function: Callable[..., Any], *arguments: Any) -> Any:
    if inspect.iscoroutinefunction(function):
        return await function(*arguments)
    return await asyncio.to_thread(function, *arguments)
