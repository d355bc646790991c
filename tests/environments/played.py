# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Environments and rollouts without a policy, for what draws tasks and hears what came of them."""

import dataclasses
from collections.abc import Sequence

from marin_rl.environments.base import Environment, EnvironmentConfig, Episode, Split
from marin_rl.types import Generation, Message, Rollout, RolloutGroup, RolloutStatus, StopReason, Task, Turn


@dataclasses.dataclass(frozen=True)
class Cards:
    """An environment of so many tasks a split, that nobody plays."""

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
    """Not registered: for configs that are written in code."""

    name: str = "cards"
    size: int = 5

    def build(self) -> Environment:
        return Cards(self.name, self.size)


def rollout(task: Task, *, turns: int = 1, measured: dict[str, float] | None = None, **rewards: float) -> Rollout:
    """A rollout with these rewards; without any it failed."""
    generation = Generation((1,), (-0.5,), StopReason.STOP, 0, 0)
    said = (*task.messages, Message(role="assistant", content="x"))
    return Rollout(
        id="r",
        group_id="g",
        task=task,
        turns=tuple(Turn((1,), generation, said, starts_sequence=turn == 0) for turn in range(turns)),
        status=RolloutStatus.COMPLETED if rewards else RolloutStatus.FAILED,
        rewards=rewards,
        error=None if rewards else "broken",
        metrics=measured or {},
    )


def group(task: Task, *scores: float) -> RolloutGroup:
    """The attempts at a task, by what they earned in the component `correct`."""
    return RolloutGroup("g", tuple(rollout(task, correct=score) for score in scores))
