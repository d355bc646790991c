# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Episodes of one task, played with given replies."""

import asyncio
from collections.abc import Iterable

from marin_rl.environments.base import AbstractEnvironment, AgentEpisode, Step
from marin_rl.types import Task


def play(environment: AbstractEnvironment, task: Task, replies: Iterable[str], seed: int = 0) -> list[Step]:
    """Return the steps of an episode, up to its end or the last reply."""

    async def run() -> list[Step]:
        episode = await environment.start(task, seed)
        assert not isinstance(episode, AgentEpisode)
        steps = []
        try:
            for reply in replies:
                steps.append(await episode.step(reply))
                if steps[-1].done:
                    break
        finally:
            await episode.close()
        return steps

    return asyncio.run(run())
