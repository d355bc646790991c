# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""The control of an experiment: rewards that say nothing, evaluated by the true grader."""

import dataclasses
import hashlib
from collections.abc import Sequence
from typing import ClassVar

from marin_rl.environments.base import (
    CodeRunner,
    Environment,
    EnvironmentConfig,
    Episode,
    Split,
    Step,
    can_demonstrate,
    check_nested,
    connect_code_runner,
    demonstration,
)
from marin_rl.environments.task_stream import TaskStream, task_stream
from marin_rl.types import Message, Task

RANDOM = "random"
"""Reward component: a coin's."""


@EnvironmentConfig.register_subclass("random_control")
@dataclasses.dataclass(frozen=True)
class RandomRewardConfig(EnvironmentConfig):
    """Another environment whose training rewards are random; validation and held-out tasks are graded truly.

    A lift under random rewards is not learning from rewards: run it beside every result.
    """

    level: ClassVar[int] = 3

    environment: EnvironmentConfig
    """The environment whose tasks are attempted."""
    probability: float = 0.5
    """Probability that an attempt earns 1 and not 0; at best the share that the true grader would give."""

    def __post_init__(self) -> None:
        check_nested(self, self.environment, "environment")
        if not 0.0 <= self.probability <= 1.0:
            raise ValueError(f"probability is {self.probability}; it is at least 0 and at most 1")

    def build(self) -> Environment:
        """Make the inner environment and put the coin before its grader."""
        inner = self.environment.build()
        trained = frozenset((task.environment, task.id) for task in inner.tasks(Split.TRAIN))
        return RandomRewardEnvironment(inner, self.probability, trained)


@dataclasses.dataclass(frozen=True)
class RandomRewardEnvironment:
    """Random rewards on the training split, true ones elsewhere."""

    inner: Environment
    """Makes the tasks, and grades those that are not trained on."""
    probability: float
    """Probability of a reward of 1."""
    trained: frozenset[tuple[str, str]]
    """Environments and ids of the tasks with random rewards."""

    @property
    def name(self) -> str:
        """The inner environment's name: the metrics are those of its experiment."""
        return self.inner.name

    def tasks(self, split: Split) -> Sequence[Task]:
        """The inner environment's tasks."""
        return self.inner.tasks(split)

    def stream(self, seed: int) -> TaskStream:
        """The inner environment's stream of training tasks."""
        return task_stream(self.inner, seed)

    def connect_code_runner(self, runner: CodeRunner | None) -> bool:
        """Give the sandbox to the inner environment; whether that runs programs."""
        return connect_code_runner(self.inner, runner)

    def can_demonstrate(self, task: Task) -> bool:
        """Whether the inner environment has a conversation to imitate."""
        return can_demonstrate(self.inner, task)

    def demonstrate(self, task: Task) -> tuple[Message, ...]:
        """The inner environment's demonstration or worked answer."""
        return demonstration(self.inner, task)

    async def start(self, task: Task, seed: int) -> Episode:
        """Begin an attempt; on a training task its reward is a function of task, seed and reply alone."""
        episode = await self.inner.start(task, seed)
        if (task.environment, task.id) not in self.trained:
            return episode
        return RandomRewardEpisode(episode, self.probability, f"{task.id}\x1f{seed}")


@dataclasses.dataclass(frozen=True)
class RandomRewardEpisode:
    """An attempt that the inner environment plays and a coin rewards."""

    inner: Episode
    """Says what follows a reply, and when the episode is over."""
    probability: float
    """Probability of a reward of 1."""
    key: str
    """Names the attempt; with the reply it decides the coin."""

    async def step(self, reply: str) -> Step:
        """Play the reply, and toss the coin where the episode is over."""
        step = await self.inner.step(reply)
        return dataclasses.replace(step, rewards={RANDOM: self._toss(reply) if step.done else 0.0})

    async def close(self) -> None:
        """Close the inner episode."""
        await self.inner.close()

    def _toss(self, reply: str) -> float:
        digest = hashlib.sha256(f"{self.key}\x1f{reply}".encode("utf-8", "surrogatepass")).digest()
        return float(int.from_bytes(digest[:8], "big") < self.probability * 2**64)
