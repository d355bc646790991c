# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Environments of one question and one reply: what all built-in ones share."""

import asyncio
import dataclasses
from collections.abc import Callable, Sequence

from marin_rl.environments.base import Episode, Split, Step
from marin_rl.environments.splits import TaskSplits
from marin_rl.rewards.patterns import FormatConfig, extract_last
from marin_rl.types import Task

CORRECT = "correct"
"""Reward component: whether the reply is right."""
FORMAT = "format"
"""Reward component: whether the reply has the required form; absent where no form is required."""


@dataclasses.dataclass(frozen=True)
class SingleTurnEnvironment:
    """Tasks that one reply answers."""

    name: str
    """Name under which its metrics are logged."""
    splits: TaskSplits
    """The tasks of each split."""
    score: Callable[[Task, str], float] | None
    """The reward `correct` of a reply to a task; None where reward functions alone judge it."""
    format: FormatConfig | None = None
    """The reward `format`, if any."""
    reply_regex: str | None = None
    """Group 1 of its last match in the reply is what is scored; a reply without a match is wrong."""
    blocks: bool = False
    """Whether `score` may take long, and so belongs into a thread."""

    def tasks(self, split: Split) -> Sequence[Task]:
        """The tasks of a split, always in the same order."""
        return self.splits[split]

    async def start(self, task: Task, seed: int) -> Episode:
        """Begin an attempt; nothing in it is random, so the seed plays no part.

        Raises:
            ValueError: if the task belongs to another environment.
        """
        if task.environment != self.name:
            raise ValueError(f"environment {self.name!r} cannot grade task {task.id!r} of {task.environment!r}")
        return SingleTurnEpisode(self, task)

    def rewards(self, task: Task, reply: str) -> dict[str, float]:
        """The rewards of a reply by component; the form is judged on the complete reply."""
        rewards = {} if self.score is None else {CORRECT: self._correct(self.score, task, reply)}
        if self.format is not None:
            rewards[FORMAT] = self.format.reward(reply)
        return rewards

    def _correct(self, score: Callable[[Task, str], float], task: Task, reply: str) -> float:
        scored = reply if self.reply_regex is None else extract_last(self.reply_regex, reply)
        return 0.0 if scored is None else score(task, scored)


@dataclasses.dataclass
class SingleTurnEpisode:
    """One attempt, over after one reply."""

    environment: SingleTurnEnvironment
    """Grades the reply."""
    task: Task
    """What is attempted."""
    over: bool = False
    """Whether the reply was given."""

    async def step(self, reply: str) -> Step:
        """Grade the reply; whatever the grader raises is passed on.

        Raises:
            RuntimeError: if a reply was already given.
        """
        if self.over:
            raise RuntimeError(f"task {self.task.id!r}: the episode is over after one reply; start another")
        self.over = True
        if self.environment.blocks:
            return Step(rewards=await asyncio.to_thread(self.environment.rewards, self.task, reply))
        return Step(rewards=self.environment.rewards(self.task, reply))

    async def close(self) -> None:
        """Nothing is held."""
