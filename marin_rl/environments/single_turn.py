# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Environments with one reply per episode, such as questions with answers."""

import asyncio
import dataclasses
from collections.abc import Callable, Mapping

from marin_rl.environments.base import CORRECT, FORMAT, AbstractSplitEnvironment, Episode, Step
from marin_rl.rewards.grading import FormatConfig
from marin_rl.rewards.reply_text import graded_text, search_reply
from marin_rl.types import Task


@dataclasses.dataclass(frozen=True)
class SingleTurnEnvironment(AbstractSplitEnvironment):
    """Environment whose episodes end after one reply."""

    score: Callable[[Task, str], float] | None
    """Returns the reward `correct` of a reply to a task, given the text after its thoughts; None if only reward
    functions score replies."""
    format: FormatConfig | None = None
    """Optional reward `format`, for the complete reply."""
    reply_regex: str | None = None
    """Group 1 of its last match after the thoughts is scored; a reply without a match is wrong."""
    blocks: bool = False
    """Whether `score` may block, so that it must run in a thread."""
    problem_ids: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Problem ids by task id, for tasks that may have other ids."""

    async def start(self, task: Task, seed: int) -> Episode:
        """Start an attempt; the seed is unused because nothing is random."""
        self.require_own(task)
        return SingleTurnEpisode(self, task)

    def rewards(self, task: Task, reply: str) -> dict[str, float]:
        """Return the rewards of a reply by component."""
        rewards = {}
        if self.score is not None:
            scored = graded_text(reply)
            if self.reply_regex is not None and scored is not None:
                found = search_reply(self.reply_regex, scored)
                scored = None if found is None else found.group
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
        environment = self.environment
        # Regular expressions are searched for in another process, for which the thread waits.
        if environment.blocks or environment.format is not None or environment.reply_regex is not None:
            return Step(rewards=await asyncio.to_thread(environment.rewards, self.task, reply))
        return Step(rewards=environment.rewards(self.task, reply))

    async def close(self) -> None:
        """Do nothing; there are no resources."""
