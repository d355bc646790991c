# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Fake environments, rollouts and groups for tests of task streams."""

import dataclasses
from collections.abc import Sequence

from marin_rl.environments.base import AbstractEnvironment, EnvironmentConfig, Episode, Split
from marin_rl.types import Generation, Message, Rollout, RolloutGroup, RolloutStatus, StopReason, Task, Turn


@dataclasses.dataclass(frozen=True)
class Cards(AbstractEnvironment):
    """Environment with `size` tasks in each split and no episodes."""

    name: str
    size: int = 5

    def tasks(self, split: Split) -> Sequence[Task]:
        return [
            Task(f"{split.value}{index}", self.name, (Message(role="user", content=f"{self.name} {index}"),), "")
            for index in range(self.size)
        ]

    async def start(self, task: Task, seed: int) -> Episode:
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class CardsConfig(EnvironmentConfig):
    """Unregistered config for tests that construct configs in code."""

    name: str = "cards"
    size: int = 5

    def build(self) -> AbstractEnvironment:
        return Cards(self.name, self.size)


def rollout(task: Task, *, turns: int = 1, measured: dict[str, float] | None = None, **rewards: float) -> Rollout:
    """Rollout with the given rewards; it failed if there are none."""
    generation = Generation((1,), (-0.5,), StopReason.STOP, 0, 0)
    messages = (*task.messages, Message(role="assistant", content="x"))
    return Rollout(
        id="r",
        group_id="g",
        task=task,
        turns=tuple(Turn((1,), generation, messages, starts_sequence=turn == 0) for turn in range(turns)),
        status=RolloutStatus.COMPLETED if rewards else RolloutStatus.FAILED,
        rewards=rewards,
        error=None if rewards else "broken",
        metrics=measured or {},
    )


def group(task: Task, *scores: float) -> RolloutGroup:
    """Group of rollouts with the given scores in the component `correct`."""
    return RolloutGroup("g", tuple(rollout(task, correct=score) for score in scores))
