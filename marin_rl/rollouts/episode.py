# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""One rollout: the conversation between policy and environment, turn by turn, or an agent that requests replies."""

import asyncio
import contextlib
import functools
import logging
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager
from typing import TypeVar

from marin_rl.environments.base import AbstractEnvironment, AgentConnection, AgentEpisode, AgentResult, Episode, Step
from marin_rl.rollouts.agent_recorder import AgentRecorder
from marin_rl.rollouts.attempt import Attempt, Limits
from marin_rl.rollouts.request_batcher import RequestBatcher
from marin_rl.rollouts.rollout_builder import EnvironmentFault, RolloutBuilder
from marin_rl.tokenization.chat import ChatTokenizer
from marin_rl.types import RolloutStatus
from marin_rl.utils.event_loop import DirectCalls, ForeignError, ForeignTask

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

ConnectAgent = Callable[[AgentRecorder], AbstractAsyncContextManager[AgentConnection]]
"""Serves the policy to one agent."""

CLOSING_SECONDS = 10.0
"""Time limit for closing an episode, and for its code to end after a cancellation."""


async def run_episode(
    attempt: Attempt,
    environment: AbstractEnvironment,
    tokenizer: ChatTokenizer,
    batcher: RequestBatcher,
    limits: Limits,
    connect: ConnectAgent | None = None,
) -> RolloutBuilder:
    """Run one attempt until it ends.

    An error or timeout of the environment ends only this rollout, whatever it raises. Code that may wait runs in a
    separate task, named after the rollout. Errors of the sampler and of this code propagate. The episode leaves the
    batcher after its last request. `connect` serves the policy to agents; None if the environment has none. Reward
    functions may add rewards to the returned builder.
    """
    builder = RolloutBuilder(attempt, tokenizer, limits)
    code = ForeignTask(f"rollout {attempt.id}") if environment.waits else DirectCalls()
    episode: Episode | None = None
    try:
        started = await _await_environment(
            code, lambda: environment.start(attempt.task, attempt.start_seed), builder, limits.max_seconds
        )
        if isinstance(started, AgentEpisode):
            recorder = AgentRecorder(attempt, builder, tokenizer, batcher, limits)
            await _run_agent(code, started, recorder, builder, limits.max_seconds, connect)
            return builder
        episode = _of_type(Episode, started, "start")
        while not builder.over:
            with builder.count_seconds("sample"):
                generation = await batcher.submit(builder.request(), is_last_turn=builder.is_last_turn)
            reply = builder.add_generation(generation)
            if not builder.over:
                step = await _await_environment(
                    code, functools.partial(episode.step, reply), builder, limits.max_seconds
                )
                builder.add_observation(_of_type(Step, step, "step"))
    except EnvironmentFault as error:
        builder.fail(error.status, str(error))
    finally:
        batcher.leave(attempt.id)
        if code.is_stuck:
            logger.warning("rollout %s: its environment ignores its cancellation, and is abandoned", attempt.id)
            code.end()
            code = ForeignTask(f"rollout {attempt.id}")
        try:
            if episode is not None:
                await _close(code, episode, attempt.id)
        finally:
            code.end()
    return builder


async def _await_environment(
    code: ForeignTask | DirectCalls,
    function: Callable[[], Awaitable[Result]],
    builder: RolloutBuilder,
    max_seconds: float,
) -> Result:
    """Call the environment, at most for the rest of its time; its errors become `EnvironmentFault`."""
    with builder.count_seconds("environment"), _faults(max_seconds):
        async with code.timeout(max(max_seconds - builder.seconds["environment"], 0.0)):
            return await code.call(function, CLOSING_SECONDS)


@contextlib.contextmanager
def _faults(max_seconds: float) -> Iterator[None]:
    """Convert errors of `ForeignTask.call`, and the end of its time, to an `EnvironmentFault`."""
    try:
        yield
    except ForeignError as error:
        raise EnvironmentFault(RolloutStatus.FAILED, str(error)) from error.__cause__
    except TimeoutError as error:
        message = f"its environment took longer than {max_seconds:g} s (rollouts.max_seconds)"
        raise EnvironmentFault(RolloutStatus.TIMED_OUT, message) from error


def _of_type(kind: type[Result], value: object, method: str) -> Result:
    """Check the result of a method of the environment."""
    if not isinstance(value, kind):
        raise EnvironmentFault(
            RolloutStatus.FAILED,
            f"{method} of its environment returned {type(value).__name__}; it must return {kind.__name__}",
        )
    return value


async def _run_agent(
    code: ForeignTask | DirectCalls,
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
            result = await _await_agent(code, lambda: episode.play(connection), recorder, builder, max_seconds)
    except EnvironmentFault as error:
        # An agent that is refused a further reply need not handle the error; it then has no result.
        if error.status is RolloutStatus.TIMED_OUT or not recorder.is_truncated:
            builder.fail(error.status, str(error))
    finally:
        recorder.close()
    recorder.finish(_of_type(AgentResult, result, "play"))


async def _await_agent(
    code: ForeignTask | DirectCalls,
    function: Callable[[], Awaitable[AgentResult]],
    recorder: AgentRecorder,
    builder: RolloutBuilder,
    max_seconds: float,
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
        with _faults(max_seconds):
            async with timeout:
                return await code.call(function, CLOSING_SECONDS)
    finally:
        recorder.on_wait = lambda waits: None
        if waiting is not None:
            sampled += loop.time() - waiting
        builder.seconds["sample"] += sampled
        builder.seconds["environment"] += loop.time() - start - sampled


async def _close(code: ForeignTask | DirectCalls, episode: Episode, id: str) -> None:
    """Close an episode; an error is only logged."""
    try:
        async with code.timeout(CLOSING_SECONDS):
            await code.call(episode.close, CLOSING_SECONDS)
    except ForeignError as error:
        logger.warning("rollout %s: closing its episode failed: %s", id, error)
    except TimeoutError:
        logger.warning("rollout %s: closing its episode failed: TimeoutError after %g s", id, CLOSING_SECONDS)
