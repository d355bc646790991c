# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""One attempt at one task: the conversation between policy and environment, turn by turn."""

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Iterator
from typing import TypeVar

from marin_rl.environments.base import Environment, Episode
from marin_rl.rollouts.request_batcher import RequestBatcher
from marin_rl.rollouts.rollout_builder import Attempt, EnvironmentFault, Limits, RolloutBuilder
from marin_rl.tokenization.chat import ChatTokenizer
from marin_rl.types import RolloutStatus

logger = logging.getLogger(__name__)

Result = TypeVar("Result")


async def play(
    attempt: Attempt, environment: Environment, tokenizer: ChatTokenizer, desk: RequestBatcher, limits: Limits
) -> RolloutBuilder:
    """Play an attempt to its end, whatever that is.

    What the environment raises, or takes too long for, is the end of this rollout alone. Errors of the sampler and of
    this code are passed on.

    Args:
        attempt: what to play.
        environment: judges.
        tokenizer: text to tokens and back.
        desk: where answers are asked for; it is left once the last one came.
        limits: how far the rollout may go.

    Returns:
        The rollout, which reward functions may still judge.
    """
    builder = RolloutBuilder(attempt)
    if (task := asyncio.current_task()) is not None:
        # Environments that log name the rollout by it.
        task.set_name(f"rollout {attempt.id}")
    clock = _Clock(limits.max_seconds, builder.seconds)
    episode: Episode | None = None
    try:
        episode = await clock.within(environment.start(attempt.task, attempt.start_seed))
        while not builder.over:
            with clock.counted("sample"):
                generation = await desk.sample(builder.request(limits))
            reply = tokenizer.decode_reply(generation.token_ids)
            builder.hear(generation, reply)
            if not builder.over:
                builder.see(await clock.within(episode.step(reply)), tokenizer, limits)
    except EnvironmentFault as error:
        builder.fail(error.status, str(error))
    finally:
        desk.leave()
        if episode is not None:
            await _close(episode, attempt.id)
    return builder


class _Clock:
    """Holds the environment to its time."""

    def __init__(self, limit: float, seconds: dict[str, float]) -> None:
        self._limit = limit
        self._seconds = seconds

    @contextlib.contextmanager
    def counted(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[name] += time.perf_counter() - start

    async def within(self, work: Awaitable[Result]) -> Result:
        """Wait for the environment for as long as it may still take."""
        limit = asyncio.timeout(max(self._limit - self._seconds["environment"], 0.0))
        try:
            with self.counted("environment"):
                async with limit:
                    return await work
        except (Exception, *_ENDS) as error:
            if _is_cancelled(error):
                raise
            if limit.expired():
                message = f"its environment took longer than {self._limit:g} s (rollouts.max_seconds)"
                raise EnvironmentFault(RolloutStatus.TIMED_OUT, message) from error
            raise EnvironmentFault(RolloutStatus.FAILED, f"{type(error).__name__}: {error}") from error


_ENDS = (SystemExit, asyncio.CancelledError)
"""What environments raise too, by `sys.exit` or by waiting for something of their own that was cancelled. In the event
loop it would end all episodes."""


def _is_cancelled(error: BaseException) -> bool:
    """Whether this code's own task is cancelled, and no environment has raised that."""
    task = asyncio.current_task()
    return isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling() > 0


async def _close(episode: Episode, id: str) -> None:
    """Close an episode; how that goes changes nothing about its rollout."""
    try:
        async with asyncio.timeout(_CLOSING_SECONDS):
            await episode.close()
    except (Exception, *_ENDS) as error:
        if _is_cancelled(error):
            raise
        logger.warning("rollout %s: its episode did not close: %s: %s", id, type(error).__name__, error)


_CLOSING_SECONDS = 10.0
