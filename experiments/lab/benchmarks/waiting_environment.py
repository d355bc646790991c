# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""An environment that responds after a delay without using the CPU, like tools and remote services."""

import asyncio
import dataclasses
import math
import random
from collections.abc import Sequence

from marin_rl.environments.base import AbstractEnvironment, Split, Step
from marin_rl.types import Task

TASKS = 2000


@dataclasses.dataclass
class WaitingEpisode:
    """One attempt."""

    seconds: float
    """Delay of the response, in seconds."""

    async def step(self, reply: str) -> Step:
        """Wait; a reply with an odd number of characters is correct."""
        await asyncio.sleep(self.seconds)
        return Step(rewards={"correct": float(len(reply) % 2)})

    async def close(self) -> None:
        """Do nothing; there are no resources."""


@dataclasses.dataclass(frozen=True)
class WaitingEnvironment(AbstractEnvironment):
    """An environment with a fixed delay per task; delays differ between tasks."""

    seconds: float
    """Mean delay over the tasks, in seconds."""
    spread: float
    """σ of the logarithm of the delay."""
    name: str = "waiting"
    """Name in metrics."""

    def tasks(self, split: Split) -> Sequence[Task]:
        """Return numbered tasks, one split after the other."""
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
    """For `environment: {type: file, path: …, name: make_waiting, options: {seconds: 1.0, spread: 0.5}}`."""
    return WaitingEnvironment(seconds, spread)
