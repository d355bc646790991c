# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Control experiment: random training rewards, with evaluation by the true grader."""

import dataclasses
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import ClassVar

from marin_rl.environments.base import (
    AbstractEnvironment,
    AgentConnection,
    AgentEpisode,
    AgentResult,
    EnvironmentConfig,
    Episode,
    Split,
    Step,
    TaskStream,
)
from marin_rl.rewards.component import RewardComponent, RewardComponentConfig
from marin_rl.rewards.functions import EvaluateResult, RewardCallError, RewardRequest
from marin_rl.rewards.sandbox.pool import Sandbox
from marin_rl.types import Message, Task

RANDOM = "random"
"""Reward component: random 0 or 1."""


@EnvironmentConfig.register_subclass("random_control")
@dataclasses.dataclass(frozen=True)
class RandomRewardConfig(EnvironmentConfig):
    """Another environment with random training rewards; validation and held-out tasks keep their true rewards.

    An improvement under random rewards is not caused by the rewards: run this control for every result.
    """

    level: ClassVar[int] = 3

    environment: EnvironmentConfig
    """The environment of the tasks. Its reward functions score validation and held-out tasks only."""
    probability: float = 0.5
    """Probability of reward 1 instead of 0; set it to the mean reward of the true grader."""

    def __post_init__(self) -> None:
        self.check_nested(self.environment, "environment")
        if not 0.0 <= self.probability <= 1.0:
            raise ValueError(f"probability must be in [0, 1], got {self.probability}")
        if self.rewards:
            raise ValueError(
                f"random_control has {len(self.rewards)} reward functions in rewards, which would add true rewards to "
                "the random ones; move them to environment.rewards, which score validation and held-out tasks only"
            )

    def reward_components(self, environment: AbstractEnvironment) -> Mapping[str, tuple[RewardComponentConfig, ...]]:
        """Return the inner environment's reward functions, without effect on training tasks."""
        assert isinstance(environment, RandomRewardEnvironment)
        components = self.environment.reward_components(environment.inner)
        return {
            name: tuple(UntrainedRewardConfig(config, environment.trained) for config in configs)
            for name, configs in components.items()
        }

    def build(self) -> AbstractEnvironment:
        """Build the inner environment and replace its training rewards."""
        inner = self.environment.build()
        trained = frozenset((task.environment, task.id) for task in inner.tasks(Split.TRAIN))
        return RandomRewardEnvironment(inner.name, inner, self.probability, trained)


@dataclasses.dataclass(frozen=True)
class RandomRewardEnvironment(AbstractEnvironment):
    """Another environment under its own name, with random rewards on the training split."""

    name: str
    inner: AbstractEnvironment
    """Source of tasks, observations and true rewards."""
    probability: float
    trained: frozenset[tuple[str, str]]
    """Environment names and ids of the tasks with random rewards."""

    def tasks(self, split: Split) -> Sequence[Task]:
        """Return the inner environment's tasks."""
        return self.inner.tasks(split)

    def stream(self, seed: int) -> TaskStream:
        """Return the inner environment's stream of training tasks."""
        return self.inner.stream(seed)

    def connect_sandbox(self, sandbox: Sandbox | None) -> bool:
        """Connect the inner environment to the sandbox; return whether it runs programs."""
        return self.inner.connect_sandbox(sandbox)

    def can_demonstrate(self, task: Task) -> bool:
        """Return whether the inner environment can demonstrate the task."""
        return self.inner.can_demonstrate(task)

    def demonstrate(self, task: Task) -> tuple[Message, ...]:
        """Return the inner environment's demonstration."""
        return self.inner.demonstrate(task)

    async def start(self, task: Task, seed: int) -> Episode | AgentEpisode:
        """Start an attempt; the reward of a training task depends on task, seed and reply (or rollout id) only."""
        episode = await self.inner.start(task, seed)
        if (task.environment, task.id) not in self.trained:
            return episode
        key = f"{task.id}\x1f{seed}"
        if isinstance(episode, AgentEpisode):
            return RandomRewardAgent(episode, self.probability, key)
        return RandomRewardEpisode(episode, self.probability, key)


def _draw(probability: float, key: str, attempt: str) -> float:
    digest = hashlib.sha256(f"{key}\x1f{attempt}".encode("utf-8", "surrogatepass")).digest()
    return float(int.from_bytes(digest[:8], "big") < probability * 2**64)


@dataclasses.dataclass(frozen=True)
class RandomRewardAgent(AgentEpisode):
    """Another agent's episode with a random reward."""

    inner: AgentEpisode
    probability: float
    key: str
    """Identifies task and seed; hashed with the id of the rollout to draw the reward."""

    async def play(self, connection: AgentConnection) -> AgentResult:
        """Play the inner episode, and replace its rewards."""
        return self._random(await self.inner.play(connection), connection.rollout_id)

    def truncated_result(self, rollout_id: str) -> AgentResult:
        """Return the inner result with a random reward."""
        return self._random(self.inner.truncated_result(rollout_id), rollout_id)

    def _random(self, result: AgentResult, rollout_id: str) -> AgentResult:
        rewards = {RANDOM: _draw(self.probability, self.key, rollout_id)}
        return dataclasses.replace(result, rewards=rewards, takes_posted=False)


@dataclasses.dataclass
class RandomRewardEpisode:
    """Another episode with random rewards."""

    inner: Episode
    probability: float
    key: str
    """Identifies the attempt; hashed with the last reply to draw the reward."""
    drawn: float = 0.0
    """The reward of the episode, if it ends with the last reply."""

    async def step(self, reply: str) -> Step:
        """Step the inner episode, and draw its reward again.

        A limit of the run can end the episode after any reply, so the sum of all rewards is that of the last draw.
        Otherwise the control would reward the policy for the end of an episode.
        """
        step = await self.inner.step(reply)
        earlier, self.drawn = self.drawn, _draw(self.probability, self.key, reply)
        return dataclasses.replace(step, rewards={RANDOM: self.drawn - earlier})

    async def close(self) -> None:
        """Close the inner episode."""
        await self.inner.close()


@dataclasses.dataclass(frozen=True)
class UntrainedRewardConfig(RewardComponentConfig):
    """Another reward component whose score is 0 for training tasks. Created by `random_control`, not by name."""

    inner: RewardComponentConfig
    """The component for validation and held-out tasks."""
    trained: frozenset[tuple[str, str]] = dataclasses.field(repr=False)
    """Environment names and ids of the training tasks."""

    def build(self, sandbox: Sandbox) -> "UntrainedReward":
        """Build the inner component."""
        return UntrainedReward(self.inner.build(sandbox), self.trained)

    def check_answers(self, tasks: Iterable[Task]) -> None:
        """Check the answers for the inner component."""
        self.inner.check_answers(tasks)


class UntrainedReward:
    """Another reward component that is not called for training tasks; their score is 0."""

    def __init__(self, inner: RewardComponent, trained: frozenset[tuple[str, str]]):
        self.name = inner.name
        self.weight = inner.weight
        self.scope = inner.scope
        self._inner = inner
        self._trained = trained

    @property
    def waits_for_group(self) -> bool:
        """Whether the inner component scores a rollout when its group is complete."""
        return self._inner.waits_for_group

    async def check(self) -> None:
        """Check the inner component, which may determine its scope."""
        await self._inner.check()
        self.scope = self._inner.scope

    async def score(self, requests: Sequence[RewardRequest]) -> Sequence[EvaluateResult | RewardCallError]:
        """Score the rollouts of other tasks with the inner component, and those of training tasks with 0."""
        others = [request for request in requests if not self._is_trained(request)]
        scores = iter(await self._inner.score(others) if others else ())
        return [EvaluateResult(score=0.0) if self._is_trained(request) else next(scores) for request in requests]

    def _is_trained(self, request: RewardRequest) -> bool:
        return (request.environment, request.task_id) in self._trained

    async def close(self) -> None:
        """Release the resources of the inner component."""
        await self._inner.close()
