# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""One rollout: the conversation between policy and environment, turn by turn, or an agent that requests replies."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import TypeVar

from marin_rl.environments.base import AbstractEnvironment, AgentConnection, AgentEpisode, AgentResult, Episode
from marin_rl.rollouts.agent_recorder import AgentRecorder, is_cancelled
from marin_rl.rollouts.attempt import Attempt, Limits
from marin_rl.rollouts.request_batcher import RequestBatcher
from marin_rl.rollouts.rollout_builder import EnvironmentFault, RolloutBuilder
from marin_rl.tokenization.chat import ChatTokenizer
from marin_rl.types import RolloutStatus

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

ConnectAgent = Callable[[AgentRecorder], AbstractAsyncContextManager[AgentConnection]]
"""Serves the policy to one agent."""

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
    connect: ConnectAgent | None = None,
) -> RolloutBuilder:
    """Run one attempt until it ends.

    An error or timeout of the environment ends only this rollout. Errors of the sampler and of this code propagate.

    Args:
        attempt: the inputs of the rollout.
        environment: the environment of the task.
        tokenizer: tokenizer of messages and replies.
        batcher: takes the sample requests; the episode leaves it after the last one.
        limits: limits of the rollout.
        connect: serves the policy to agents; None if the environment has none.

    Returns:
        The builder of the rollout, to which reward functions may add rewards.
    """
    builder = RolloutBuilder(attempt, tokenizer, limits)
    if (task := asyncio.current_task()) is not None:
        # The log messages of environments name the rollout by the task's name.
        task.set_name(f"rollout {attempt.id}")
    episode: Episode | None = None
    try:
        started = await _await_environment(
            environment.start(attempt.task, attempt.start_seed), builder, limits.max_seconds
        )
        if isinstance(started, AgentEpisode):
            recorder = AgentRecorder(attempt, builder, tokenizer, batcher, limits)
            await _run_agent(started, recorder, builder, limits.max_seconds, connect)
            return builder
        episode = started
        while not builder.over:
            with builder.count_seconds("sample"):
                generation = await batcher.submit(builder.request(), is_last_turn=builder.is_last_turn)
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
        raise _fault(error, timeout.expired(), max_seconds) from error


async def _run_agent(
    episode: AgentEpisode,
    recorder: AgentRecorder,
    builder: RolloutBuilder,
    max_seconds: float,
    connect: ConnectAgent | None,
) -> None:
    """Run an agent, and add its turns and rewards to the builder; its errors become `EnvironmentFault`."""
    if connect is None:
        raise RuntimeError("the environment runs agents, but the runner does not serve the policy to them")
    result = AgentResult()
    try:
        async with connect(recorder) as connection:
            result = await _await_agent(episode.play(connection), recorder, builder, max_seconds)
    except EnvironmentFault as error:
        # An agent that is refused a further reply need not handle the error.
        if error.status is RolloutStatus.TIMED_OUT or not recorder.is_truncated:
            builder.fail(error.status, str(error))
        else:
            result = episode.truncated_result(recorder.rollout_id)
    finally:
        recorder.close()
    recorder.finish(result)


async def _await_agent(
    work: Awaitable[AgentResult], recorder: AgentRecorder, builder: RolloutBuilder, max_seconds: float
) -> AgentResult:
    """Wait for an agent as `_await_environment` does; its waits for replies do not count."""
    loop = asyncio.get_running_loop()
    start, sampled, waiting = loop.time(), 0.0, None
    used = builder.seconds["environment"]
    timeout = asyncio.timeout(max(max_seconds - used, 0.0))

    def on_wait(waits: bool) -> None:
        nonlocal sampled, waiting
        if waits:
            waiting = loop.time()
        elif waiting is not None:
            sampled, waiting = sampled + loop.time() - waiting, None
        if not timeout.expired():
            timeout.reschedule(None if waits else start + sampled + max_seconds - used)

    recorder.on_wait = on_wait
    try:
        async with timeout:
            return await work
    except (Exception, *_ENDS) as error:
        if _is_cancelled(error):
            raise
        raise _fault(error, timeout.expired(), max_seconds) from error
    finally:
        recorder.on_wait = lambda waits: None
        if waiting is not None:
            sampled += loop.time() - waiting
        builder.seconds["sample"] += sampled
        builder.seconds["environment"] += loop.time() - start - sampled


def _fault(error: BaseException, is_late: bool, max_seconds: float) -> EnvironmentFault:
    if is_late:
        message = f"its environment took longer than {max_seconds:g} s (rollouts.max_seconds)"
        return EnvironmentFault(RolloutStatus.TIMED_OUT, message)
    return EnvironmentFault(RolloutStatus.FAILED, f"{type(error).__name__}: {error}")


def _is_cancelled(error: BaseException) -> bool:
    """Whether the current task is cancelled, as opposed to a `CancelledError` raised by the environment."""
    return isinstance(error, asyncio.CancelledError) and is_cancelled()


async def _close(episode: Episode, id: str) -> None:
    """Close an episode; an error is only logged."""
    try:
        async with asyncio.timeout(CLOSING_SECONDS):
            await episode.close()
    except (Exception, *_ENDS) as error:
        if _is_cancelled(error):
            raise
        logger.warning("rollout %s: closing its episode failed: %s: %s", id, type(error).__name__, error)
