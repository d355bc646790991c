# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""One rollout: the conversation between policy and environment, turn by turn."""

import asyncio
import logging
from collections.abc import Awaitable
from typing import TypeVar

from marin_rl.environments.base import AbstractEnvironment, Episode
from marin_rl.rollouts.attempt import Attempt, Limits
from marin_rl.rollouts.request_batcher import RequestBatcher
from marin_rl.rollouts.rollout_builder import EnvironmentFault, RolloutBuilder
from marin_rl.tokenization.chat import ChatTokenizer
from marin_rl.types import RolloutStatus

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

CLOSING_SECONDS = 10.0
"""Time limit for closing an episode."""

_ENDS = (SystemExit, asyncio.CancelledError)
"""Further errors of environments: `sys.exit`, and waiting for a cancelled task. In the event loop they would end all
episodes."""


async def run_episode(
    attempt: Attempt,
    environment: AbstractEnvironment,
    tokenizer: ChatTokenizer,
    batcher: RequestBatcher,
    limits: Limits,
) -> RolloutBuilder:
    """Run one attempt until it ends.

    An error or timeout of the environment ends only this rollout. Errors of the sampler and of this code propagate.

    Args:
        attempt: the inputs of the rollout.
        environment: the environment of the task.
        tokenizer: tokenizer of messages and replies.
        batcher: takes the sample requests; the episode leaves it after the last one.
        limits: limits of the rollout.

    Returns:
        The builder of the rollout, to which reward functions may add rewards.
    """
    builder = RolloutBuilder(attempt, tokenizer, limits)
    if (task := asyncio.current_task()) is not None:
        # The log messages of environments name the rollout by the task's name.
        task.set_name(f"rollout {attempt.id}")
    episode: Episode | None = None
    try:
        episode = await _await_environment(
            environment.start(attempt.task, attempt.start_seed), builder, limits.max_seconds
        )
        while not builder.over:
            with builder.count_seconds("sample"):
                generation = await batcher.sample(builder.request())
            reply = builder.add_generation(generation)
            if not builder.over:
                builder.add_observation(await _await_environment(episode.step(reply), builder, limits.max_seconds))
    except EnvironmentFault as error:
        builder.fail(error.status, str(error))
    finally:
        batcher.leave(attempt.id)
        if episode is not None:
            await _close(episode, attempt.id)
    return builder


async def _await_environment(work: Awaitable[Result], builder: RolloutBuilder, max_seconds: float) -> Result:
    """Wait for the environment, at most for the rest of its time; its errors become `EnvironmentFault`."""
    timeout = asyncio.timeout(max(max_seconds - builder.seconds["environment"], 0.0))
    try:
        with builder.count_seconds("environment"):
            async with timeout:
                return await work
    except (Exception, *_ENDS) as error:
        if _is_cancelled(error):
            raise
        if timeout.expired():
            message = f"its environment took longer than {max_seconds:g} s (rollouts.max_seconds)"
            raise EnvironmentFault(RolloutStatus.TIMED_OUT, message) from error
        raise EnvironmentFault(RolloutStatus.FAILED, f"{type(error).__name__}: {error}") from error


def _is_cancelled(error: BaseException) -> bool:
    """Whether the current task is cancelled, as opposed to a `CancelledError` raised by the environment."""
    task = asyncio.current_task()
    return isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling() > 0


async def _close(episode: Episode, id: str) -> None:
    """Close an episode; an error is only logged."""
    try:
        async with asyncio.timeout(CLOSING_SECONDS):
            await episode.close()
    except (Exception, *_ENDS) as error:
        if _is_cancelled(error):
            raise
        logger.warning("rollout %s: closing its episode failed: %s: %s", id, type(error).__name__, error)
