# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Control experiment: random training rewards, with evaluation by the true grader."""

import dataclasses
import hashlib
from collections.abc import Mapping
from typing import Annotated, ClassVar

from annotated_types import Ge, Le

from marin_rl.environments.base import AbstractEnvironment, EnvironmentConfig, Split
from marin_rl.rewards.component import RewardComponentConfig
from marin_rl.types import Task
from marin_rl.utils.settings.checks import check_fields

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
    probability: Annotated[float, Ge(0), Le(1)] = 0.5
    """Probability of reward 1 instead of 0; set it to the mean reward of the true grader."""

    def __post_init__(self) -> None:
        check_fields(self)
        self.check_nested(self.environment, "environment")
        if self.rewards:
            raise ValueError(
                f"random_control has {len(self.rewards)} reward functions in rewards, which would add true rewards to "
                "the random ones; move them to environment.rewards, which score validation and held-out tasks only"
            )

    def reward_components(self, environment: AbstractEnvironment) -> Mapping[str, tuple[RewardComponentConfig, ...]]:
        """Return the reward functions of the inner environment."""
        return self.environment.reward_components(environment)

    def build(self) -> AbstractEnvironment:
        """Build the inner environment; `random_rewards` replace the rewards of its training tasks."""
        return self.environment.build()

    def random_rewards(self, environment: AbstractEnvironment) -> "RandomRewards":
        """Return the rewards of the training tasks of an environment, the result of `build`."""
        trained = frozenset((task.environment, task.id) for task in environment.tasks(Split.TRAIN))
        return RandomRewards(self.probability, trained)


@dataclasses.dataclass(frozen=True)
class RandomRewards:
    """Random rewards of training tasks."""

    probability: float
    """Probability of reward 1 instead of 0."""
    trained: frozenset[tuple[str, str]] = dataclasses.field(repr=False)
    """Environment names and ids of the tasks with random rewards."""

    def draw(self, task: Task, seed: int, rollout_id: str) -> Mapping[str, float] | None:
        """Draw the reward of a rollout; None if the task keeps its true rewards.

        `seed` is the start seed of the attempt, which depends on the seed of the run. Attempts at a task have
        independent rewards, by `rollout_id`.
        """
        if (task.environment, task.id) not in self.trained:
            return None
        digest = hashlib.sha256(f"{task.id}\x1f{seed}\x1f{rollout_id}".encode("utf-8", "surrogatepass")).digest()
        return {RANDOM: float(int.from_bytes(digest[:8], "big") < self.probability * 2**64)}
