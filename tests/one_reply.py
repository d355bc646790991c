# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Runs an episode with a single reply, without an event loop of the caller."""

import asyncio

from marin_rl.environments.base import AbstractEnvironment, Step
from marin_rl.types import Task


def answer(environment: AbstractEnvironment, task: Task, reply: str, seed: int = 0) -> Step:
    """Return the environment's step after the first reply of an episode."""

    async def run() -> Step:
        episode = await environment.start(task, seed)
        try:
            return await episode.step(reply)
        finally:
            await episode.close()

    return asyncio.run(run())
