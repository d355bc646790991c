# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Environments with one question and one reply."""

import asyncio
import dataclasses
from collections.abc import Callable, Sequence

from marin_rl.environments.base import AbstractEnvironment, Episode, Split, Step
from marin_rl.rewards.grading import FormatConfig, extract_last
from marin_rl.splits import TaskSplits
from marin_rl.types import Task

CORRECT = "correct"
"""Reward component: 1 if the reply is right."""
FORMAT = "format"
"""Reward component: 1 if the reply has the required format; absent if no format is required."""


@dataclasses.dataclass(frozen=True)
class SingleTurnEnvironment(AbstractEnvironment):
    """Environment whose episodes end after one reply."""

    name: str
    splits: TaskSplits
    score: Callable[[Task, str], float] | None
    """Returns the reward `correct` of a reply to a task; None if only reward functions score replies."""
    format: FormatConfig | None = None
    """Optional reward `format`, for the complete reply."""
    reply_regex: str | None = None
    """Group 1 of its last match in the reply is scored; a reply without a match is wrong."""
    blocks: bool = False
    """Whether `score` may block, so that it must run in a thread."""

    def tasks(self, split: Split) -> Sequence[Task]:
        """Return the tasks of a split in a fixed order."""
        return self.splits[split]

    async def start(self, task: Task, seed: int) -> Episode:
        """Start an attempt; the seed is unused because nothing is random."""
        if task.environment != self.name:
            raise ValueError(f"environment {self.name!r} cannot grade task {task.id!r} of {task.environment!r}")
        return SingleTurnEpisode(self, task)

    def rewards(self, task: Task, reply: str) -> dict[str, float]:
        """Return the rewards of a reply by component."""
        rewards = {}
        if self.score is not None:
            scored = reply if self.reply_regex is None else extract_last(self.reply_regex, reply)
            rewards[CORRECT] = 0.0 if scored is None else self.score(task, scored)
        if self.format is not None:
            rewards[FORMAT] = self.format.reward(reply)
        return rewards


@dataclasses.dataclass
class SingleTurnEpisode:
    """One attempt, which ends after one reply."""

    environment: SingleTurnEnvironment
    task: Task
    over: bool = False

    async def step(self, reply: str) -> Step:
        """Score the reply; exceptions of the grader propagate.

        Raises:
            RuntimeError: if the episode has ended.
        """
        if self.over:
            raise RuntimeError(f"task {self.task.id!r}: the episode ended after one reply; start another")
        self.over = True
        if self.environment.blocks:
            return Step(rewards=await asyncio.to_thread(self.environment.rewards, self.task, reply))
        return Step(rewards=self.environment.rewards(self.task, reply))

    async def close(self) -> None:
        """Do nothing; there are no resources."""
