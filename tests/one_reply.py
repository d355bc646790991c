# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Plays a single reply, outside of any event loop."""

import asyncio

from marin_rl.environments.base import Environment, Step
from marin_rl.types import Task


def answer(environment: Environment, task: Task, reply: str, seed: int = 0) -> Step:
    """The environment's answer to the first reply of an episode."""

    async def play() -> Step:
        episode = await environment.start(task, seed)
        try:
            return await episode.step(reply)
        finally:
            await episode.close()

    return asyncio.run(play())
