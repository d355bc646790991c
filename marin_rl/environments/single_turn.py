# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Environments with one reply per episode, such as questions with answers."""

import asyncio
import dataclasses
import functools
import logging
from collections.abc import Callable, Mapping

from marin_rl.environments.base import CORRECT, FORMAT, AbstractSplitEnvironment, Episode, Step
from marin_rl.rewards.grading import FormatConfig
from marin_rl.rewards.grading_process import NoAnswerError
from marin_rl.rewards.reply_text import graded_text, search_reply
from marin_rl.types import Task

logger = logging.getLogger(__name__)

GIVEN_UP = "grading_given_up"
"""Metric: 1 if a part of the grading exceeded a limit, so that its reward is 0."""


@dataclasses.dataclass(frozen=True)
class SingleTurnEnvironment(AbstractSplitEnvironment):
    """Environment whose episodes end after one reply."""

    score: Callable[[Task, str], float] | None
    """Returns the reward `correct` of a reply to a task, given the text after its thoughts; None if only reward
    functions score replies. If it raises `NoAnswerError`, the reward is 0."""
    format: FormatConfig | None = None
    """Optional reward `format`, for the complete reply."""
    reply_regex: str | None = None
    """Group 1 of its last match after the thoughts is scored; a reply without a match is wrong."""
    blocks: bool = False
    """Whether `score` may block, so that it must run in a thread."""
    problem_ids: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Problem ids by task id, for tasks that may have other ids."""

    @property
    def waits(self) -> bool:
        """Whether replies are graded in a thread: a grader blocks, or a process searches for a regular expression."""
        return self.blocks or self.format is not None or self.reply_regex is not None

    async def start(self, task: Task, seed: int) -> Episode:
        """Start an attempt; the seed is unused because nothing is random."""
        self.require_own(task)
        return SingleTurnEpisode(self, task)

    def grade(self, task: Task, reply: str) -> Step:
        """Return the rewards of a reply by component. A part of the grading that exceeds a limit gives 0."""
        graders: dict[str, Callable[[], float]] = {}
        if self.score is not None:
            graders[CORRECT] = lambda: self._correct(task, reply)
        if self.format is not None:
            graders[FORMAT] = functools.partial(self.format.reward, reply)
        rewards, given_up = {}, False
        for name, grader in graders.items():
            try:
                rewards[name] = grader()
            except NoAnswerError as error:
                logger.warning(
                    "%s, task %s: the grading of %r was given up, graded 0: %s: %.200r",
                    *(self.name, task.id, name, error, reply),
                )
                rewards[name], given_up = 0.0, True
        return Step(rewards=rewards, metrics={GIVEN_UP: float(given_up)} if self.waits else {})

    def _correct(self, task: Task, reply: str) -> float:
        assert self.score is not None
        scored = graded_text(reply)
        if self.reply_regex is not None and scored is not None:
            found = search_reply(self.reply_regex, scored)
            scored = None if found is None else found.group
        return 0.0 if scored is None else self.score(task, scored)


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
        if environment.waits:
            return await asyncio.to_thread(environment.grade, self.task, reply)
        return environment.grade(self.task, reply)

    async def close(self) -> None:
        """Do nothing; there are no resources."""
