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
from marin_rl.utils.output import shorten

logger = logging.getLogger(__name__)

MAX_QUOTE = 60
"""Maximum characters of a reply, an answer or a pattern in the reason of a reward."""
GIVEN_UP = "grading_given_up"
"""Metric: 1 if a part of the grading exceeded a limit, so that its reward is 0."""


@dataclasses.dataclass(frozen=True)
class SingleTurnEnvironment(AbstractSplitEnvironment):
    """Environment whose episodes end after one reply."""

    score: Callable[[Task, str], float] | None
    """Returns the reward `correct` of a reply to a task, given the text after its thoughts; None if only reward
    functions score replies. If it raises `NoAnswerError`, the reward is 0."""
    read: Callable[[str], str | None] | None = None
    """Returns the part of a scored text that `score` compares with the answer, None if it has none. Called for wrong
    replies, to explain their reward; None: the whole text is compared."""
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
        graders: dict[str, Callable[[], tuple[float, str]]] = {}
        if self.score is not None:
            graders[CORRECT] = lambda: self._correct(task, reply)
        if self.format is not None:
            graders[FORMAT] = functools.partial(_format, self.format, reply)
        rewards, reasons, given_up = {}, [], False
        for name, grader in graders.items():
            try:
                rewards[name], reason = grader()
                reasons.append(reason)
            except NoAnswerError as error:
                logger.warning(
                    "%s, task %s: the grading of %r was given up, graded 0: %s: %.200r",
                    *(self.name, task.id, name, error, reply),
                )
                rewards[name], given_up = 0.0, True
                reasons.append(f"the grading of {name!r} was given up: {shorten(str(error), MAX_QUOTE)}")
        reason = "; ".join(filter(None, reasons))
        return Step(
            rewards=rewards,
            metrics={GIVEN_UP: float(given_up)} if self.waits else {},
            rollout_info={"reason": reason} if reason else {},
        )

    def _correct(self, task: Task, reply: str) -> tuple[float, str]:
        """Return the reward of a reply, and the reason if it is below the full one."""
        assert self.score is not None
        scored = graded_text(reply)
        if scored is None:
            return 0.0, _reason(task, 0.0, "a <think> without </think>")
        if self.reply_regex is not None:
            found = search_reply(self.reply_regex, scored)
            if found is None or found.group is None:
                return 0.0, _reason(task, 0.0, f"no match of reply_regex `{shorten(self.reply_regex, MAX_QUOTE)}`")
            scored = found.group
        reward = self.score(task, scored)
        if reward >= 1:
            return reward, ""
        read = scored if self.read is None else self.read(scored)
        return reward, _reason(task, reward, "no final answer" if read is None else _quoted(read))


def _format(config: FormatConfig, reply: str) -> tuple[float, str]:
    """Return the reward for the format of a reply, and the reason if it does not match."""
    reward = config.reward(reply)
    return (
        reward,
        "" if reward or not config.weight else f"no match of format.regex `{shorten(config.regex, MAX_QUOTE)}`",
    )


def _reason(task: Task, reward: float, found: str) -> str:
    """Explain a reward below the full one by the part of the reply that was compared with the answer."""
    expected = _quoted(task.answer)
    # Tasks with several right answers have none, and a scorer can reject the answer itself.
    return (
        f"graded {reward:g}: {found}" if not task.answer or found == expected else f"expected {expected}, found {found}"
    )


def _quoted(text: str) -> str:
    """Quote a text if it could be misread: if it is empty, has spaces at an end, or is not one printable line."""
    short = shorten(text, MAX_QUOTE)
    return short if short and short.isprintable() and short == short.strip() else repr(short)


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
