# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Check at the start of a run that a scorer does not reward replies that are no answers: a policy would learn them."""

import random
from collections.abc import Callable, Mapping

from marin_rl.environments.base import Split
from marin_rl.environments.single_turn import SingleTurnEnvironment
from marin_rl.rewards.grading_process import NoAnswerError
from marin_rl.types import Task

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
    """Return a reply that is no answer.

    Args:
        name: one of `GARBAGE`.
        task: the task to reply to.
    """
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
