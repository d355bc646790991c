# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Environment with steps that wait without CPU use, like calls of external tools and services."""

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
    """Duration of a step in seconds."""

    async def step(self, reply: str) -> Step:
        """Wait; a reply with an odd number of characters is right."""
        await asyncio.sleep(self.seconds)
        return Step(rewards={"correct": float(len(reply) % 2)})

    async def close(self) -> None:
        """Do nothing; there are no resources."""


@dataclasses.dataclass(frozen=True)
class WaitingEnvironment:
    """Steps have a log-normal duration, which is equal for all attempts at a task."""

    seconds: float
    """Mean duration over the tasks."""
    spread: float
    """Standard deviation of the logarithm of the duration."""
    name: str = "waiting"
    """Name for metrics."""

    def tasks(self, split: Split) -> Sequence[Task]:
        """Return numbered tasks; the splits have consecutive numbers."""
        first = list(Split).index(split) * TASKS
        return [
            Task(str(number), self.name, ({"role": "user", "content": str(number)},), "")
            for number in range(first, first + TASKS)
        ]

    async def start(self, task: Task, seed: int) -> WaitingEpisode:
        """Start an attempt."""
        chance = random.Random(int(task.id))
        return WaitingEpisode(self.seconds * math.exp(chance.gauss(0, self.spread) - self.spread**2 / 2))


def make_waiting(seconds: float, spread: float = 0.0) -> WaitingEnvironment:
    """Build from `environment: {type: file, path: …, name: make_waiting, options: {seconds: 1.0, spread: 0.5}}`."""
    return WaitingEnvironment(seconds, spread)
