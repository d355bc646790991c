# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""An environment whose answers take their time and no processor, as those of tools and services do."""

import asyncio
import dataclasses
import math
import random
from collections.abc import Sequence

from marin_rl.environments.base import Split, Step
from marin_rl.types import Task

TASKS = 2000


@dataclasses.dataclass
class WaitingEpisode:
    """One attempt."""

    seconds: float
    """How long its answer takes."""

    async def step(self, reply: str) -> Step:
        """Wait; a reply of an odd number of characters is right."""
        await asyncio.sleep(self.seconds)
        return Step(rewards={"correct": float(len(reply) % 2)})

    async def close(self) -> None:
        """Nothing is held."""


@dataclasses.dataclass(frozen=True)
class WaitingEnvironment:
    """All attempts at a task take equally long; tasks differ."""

    seconds: float
    """Mean over the tasks."""
    spread: float
    """σ of the logarithm."""
    name: str = "waiting"
    """Name in metrics."""

    def tasks(self, split: Split) -> Sequence[Task]:
        """Numbered tasks, the splits one after the other."""
        first = list(Split).index(split) * TASKS
        return [
            Task(str(number), self.name, ({"role": "user", "content": str(number)},), "")
            for number in range(first, first + TASKS)
        ]

    async def start(self, task: Task, seed: int) -> WaitingEpisode:
        """Begin an attempt."""
        chance = random.Random(int(task.id))
        return WaitingEpisode(self.seconds * math.exp(chance.gauss(0, self.spread) - self.spread**2 / 2))


def make_waiting(seconds: float, spread: float = 0.0) -> WaitingEnvironment:
    """For `environment: {type: file, path: …, name: make_waiting, options: {seconds: 1.0, spread: 0.5}}`."""
    return WaitingEnvironment(seconds, spread)
