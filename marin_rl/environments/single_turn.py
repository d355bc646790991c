# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Environments with one reply per episode, such as questions with answers.

At the start of a run, their scorers are checked with replies that are no answers: a policy would learn to give them if
they were rewarded.
"""

import asyncio
import dataclasses
import functools
import logging
import random
from collections.abc import Callable, Mapping

from marin_rl.environments.base import CORRECT, FORMAT, AbstractSplitEnvironment, Episode, Split, Step
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

CHECKED_TASKS = 8
"""Number of training tasks that are checked."""
FULL_REWARD = 1.0
"""Reward of a right answer; lower rewards are partial credit."""

_CHARACTERS = "abcdefghijklmnopqrstuvwxyz0123456789 .,;:!?()[]{}<>+-*/=\\$#\n"
_TEXTS: Mapping[str, str] = {
    "an empty reply": "",
    "a reply of spaces": "   ",
    "the reply 'nan'": "nan",
    "the reply '0'": "0",
    "a reply of 1,000 random characters": "".join(random.Random(0).choices(_CHARACTERS, k=1000)),
}

GARBAGE = (*_TEXTS, "the question as the reply")
"""Names of the replies."""


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


class GarbageRewardError(ValueError):
    """A scorer rewards garbage; the message names the environment, the reply and a task."""


def refuse_garbage_rewards(environment: SingleTurnEnvironment, source: str, *, may_raise: bool = False) -> None:
    """Check that the scorer of an environment does not reward garbage.

    The scorer gets an empty reply, spaces, `nan`, `0`, noise and the question itself for the first `CHECKED_TASKS`
    training tasks. Each may earn the full reward for at most half of the tasks, not counting those whose answer it is,
    because it can be right by chance, or another form of the answer.

    Args:
        environment: the environment.
        source: origin of its tasks, for the message.
        may_raise: whether the scorer may raise for garbage, because an error fails the rollout, which then has no
            reward. Other errors are errors of the grading, such as a process that cannot be started.

    Raises:
        GarbageRewardError: if a reply earns the full reward for more than half of the tasks.
    """
    if environment.score is None:
        return
    tasks = environment.tasks(Split.TRAIN)[:CHECKED_TASKS]
    for name in GARBAGE:
        replies = [(task, garbage_reply(name, task)) for task in tasks]
        wrong = [(task, reply) for task, reply in replies if not is_answer(reply, task.answer)]
        rewards = [(task, _reward(environment.score, task, reply, may_raise)) for task, reply in wrong]
        rewarded = [(task, reward) for task, reward in rewards if reward >= FULL_REWARD]
        if 2 * len(rewarded) > len(tasks):
            task, reward = rewarded[0]
            raise GarbageRewardError(
                f"environment {environment.name!r} ({source}) rewards garbage: {name} earns the full reward for "
                f"{len(rewarded)} of {len(tasks)} tasks, such as {reward:g} for task {task.id!r} with the answer "
                f"{task.answer[:100]!r}. A policy would learn such replies: use another task or grader, or set "
                "allow_garbage_rewards: true"
            )


def _reward(score: Callable[[Task, str], float], task: Task, reply: str, may_raise: bool) -> float:
    try:
        return float(score(task, reply))
    except NoAnswerError:
        return 0.0
    except (Exception, SystemExit):
        if not may_raise:
            raise
        return 0.0


def garbage_reply(name: str, task: Task) -> str:
    """Return the reply of `GARBAGE` with a name, for a task."""
    return _TEXTS.get(name, task.messages[-1]["content"])


def is_answer(reply: str, answer: str) -> bool:
    """Return whether a reply is the answer: the same text or number. Tasks with several right answers have none."""
    if not answer.strip():
        return False
    if " ".join(reply.casefold().split()) == " ".join(answer.casefold().split()):
        return True
    try:
        return float(reply) == float(answer)
    except ValueError:
        return False
