# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Rollouts of many tasks at once: from tasks to groups of rollouts.

Each attempt is a coroutine ([`run_episode`][marin_rl.rollouts.episode.run_episode]) in a background event loop, which
sends sample requests to the thread that owns the sampler. Tools and rewards of some rollouts overlap with the sampling
of others.
"""

import asyncio
import dataclasses
import functools
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any, NamedTuple, TypeVar

from marin_rl.environments.base import AbstractEnvironment
from marin_rl.errors import UserError
from marin_rl.rollouts.episode import run_episode
from marin_rl.rollouts.event_loop import BackgroundLoop
from marin_rl.rollouts.request_batcher import RequestBatcher
from marin_rl.rollouts.reward_functions import RewardFunctions
from marin_rl.rollouts.rollout_builder import (
    Attempt,
    Limits,
    LongPrompts,
    RolloutBuilder,
    StateHash,
    default_state_hash,
)
from marin_rl.sampling.sampler import PromptTooLongError, Sampler
from marin_rl.seeds import derive_seed
from marin_rl.timing import PhaseTimer
from marin_rl.tokenization.chat import ChatTokenizer
from marin_rl.types import RolloutGroup, Task

Result = TypeVar("Result")


class AllRolloutsFailedError(UserError):
    """No rollout of a batch was graded, so there is nothing to train on; names the first error."""


class BlockedEventLoopError(UserError):
    """An environment's code blocks the event loop of all episodes."""


@dataclasses.dataclass(frozen=True)
class RolloutRunner:
    """The components that run rollouts."""

    environment: AbstractEnvironment
    """Runs episodes and grades replies."""
    tokenizer: ChatTokenizer
    """Tokenizer of messages and replies."""
    sampler: Sampler
    """Samples the policy's replies."""
    limits: Limits
    """Limits of every rollout."""
    state_hash: StateHash = default_state_hash
    """Hash of a turn's state; turns with equal hashes are compared (GiGPO)."""
    reward_functions: RewardFunctions = dataclasses.field(default_factory=RewardFunctions)
    """Score rollouts after they have ended."""
    loop: BackgroundLoop = dataclasses.field(default_factory=BackgroundLoop)
    """Event loop of episodes and rewards."""
    timer: PhaseTimer = dataclasses.field(default_factory=PhaseTimer)
    """Counts the seconds of `sample`, and as `reward` those in which the sampler was idle because all rollouts waited
    for environments or rewards."""
    interrupt: Callable[[], None] = lambda: None
    """Called before every batch of sample requests, and regularly while the sampler is idle. An error that it raises
    cancels all episodes and propagates to the caller."""


def run_groups(
    runner: RolloutRunner,
    tasks: Sequence[Task],
    *,
    group_size: int,
    temperature: float,
    seed_parts: tuple[int | str, ...],
) -> list[RolloutGroup]:
    """Run `group_size` attempts at each task, all of them concurrently.

    Attempts at one task start in the same state and differ only in their sampling seed. If the environment or a reward
    function of an episode raises, its rollout is marked as failed; if it exceeds the time limit, as timed out. The
    other rollouts continue.

    Args:
        runner: environment, tokenizer, sampler and limits.
        tasks: the tasks, one per group.
        group_size: attempts per task.
        temperature: sampling temperature; 0 is greedy.
        seed_parts: identifies this call (run seed, purpose, step); all seeds derive from it.

    Returns:
        One group per task, in order.

    Raises:
        PromptTooLongError: if a task's prompt is too long and may not be truncated.
        ValueError: if a reward is NaN or infinite; names the rollout.
        AllRolloutsFailedError: if all rollouts failed.
        BlockedEventLoopError: if an environment's code blocks the event loop for longer than `limits.max_seconds`.
    """
    name = "-".join(str(part) for part in seed_parts[1:])
    requests = [GroupInput(f"{name}-{number}", task, (*seed_parts, number)) for number, task in enumerate(tasks)]
    groups = run_requests(runner, requests, group_size=group_size, temperature=temperature)
    require_one_success(groups)
    return groups


class GroupInput(NamedTuple):
    """The inputs of one group of rollouts."""

    group_id: str
    """Group id, unique within the run."""
    task: Task
    """The task to attempt."""
    seed_parts: tuple[int | str, ...]
    """Parts of the seeds of the attempts; each attempt's index is appended."""


OnGroupDone = Callable[[RolloutGroup], Sequence[GroupInput]]
"""Receives a complete group, and returns the groups to run next."""


def run_requests(
    runner: RolloutRunner, requests: Sequence[GroupInput], *, group_size: int, temperature: float
) -> list[RolloutGroup]:
    """Run all attempts of the groups concurrently. The result of a group does not depend on the other groups.

    Args:
        runner: environment, tokenizer, sampler and limits.
        requests: the groups to run.
        group_size: attempts per task.
        temperature: sampling temperature; 0 is greedy.

    Returns:
        One group per request, in order.

    Raises:
        PromptTooLongError: if a task's prompt is too long and may not be truncated.
        ValueError: if a reward is NaN or infinite; names the rollout.
        BlockedEventLoopError: if an environment's code blocks the event loop for longer than `limits.max_seconds`.
    """
    finished: dict[str, RolloutGroup] = {}

    def keep(group: RolloutGroup) -> tuple[GroupInput, ...]:
        finished[group.id] = group
        return ()

    stream_requests(runner, requests, group_size=group_size, temperature=temperature, on_group_done=keep)
    return [finished[request.group_id] for request in requests]


def stream_requests(
    runner: RolloutRunner,
    requests: Sequence[GroupInput],
    *,
    group_size: int,
    temperature: float,
    on_group_done: OnGroupDone,
) -> None:
    """Run groups, pass each complete group to a callback, and run the groups that it returns, until none are left.

    If reward functions score rollouts of different groups together, no group is complete before all groups of the batch
    are, and the next groups start only then.

    Args:
        runner: environment, tokenizer, sampler and limits.
        requests: the groups to run first.
        group_size: attempts per task.
        temperature: sampling temperature; 0 is greedy.
        on_group_done: called with each group in a separate thread while other groups still run. An error that it raises
            ends the call.

    Raises:
        PromptTooLongError: if a task's prompt is too long and may not be truncated.
        ValueError: if a reward is NaN or infinite; names the rollout.
        BlockedEventLoopError: if an environment's code blocks the event loop for longer than `limits.max_seconds`.
    """
    groups = [_attempts(runner, request, group_size, temperature) for request in requests]
    if groups:
        _run_all(runner, groups, on_group_done, lambda request: _attempts(runner, request, group_size, temperature))


def _attempts(runner: RolloutRunner, request: GroupInput, group_size: int, temperature: float) -> list[Attempt]:
    prompt = _prompt(runner, request.task)
    return [
        Attempt(
            task=request.task,
            prompt=prompt,
            group_id=request.group_id,
            id=f"{request.group_id}-{member}",
            seed=derive_seed(*request.seed_parts, member),
            start_seed=derive_seed(*request.seed_parts),
            temperature=temperature,
            state_hash=runner.state_hash,
        )
        for member in range(group_size)
    ]


def _run_all(
    runner: RolloutRunner,
    groups: Sequence[Sequence[Attempt]],
    on_group_done: OnGroupDone,
    attempts_of: Callable[[GroupInput], Sequence[Attempt]],
) -> None:
    """Run and score rollouts in the event loop while this thread samples."""
    batcher = RequestBatcher(runner.sampler.batch_size, sum(map(len, groups)))

    async def run_one(attempt: Attempt) -> RolloutBuilder:
        builder = await run_episode(attempt, runner.environment, runner.tokenizer, batcher, runner.limits)
        await runner.reward_functions.score_rollout(builder)
        return builder

    async def run_group(attempts: Sequence[Attempt]) -> list[RolloutBuilder]:
        builders = await _together(run_one(attempt) for attempt in attempts)
        await runner.reward_functions.score_group(builders)
        return builders

    async def finish(attempts: Sequence[Attempt], builders: Sequence[RolloutBuilder]) -> list[Sequence[Attempt]]:
        """Pass a group to the callback, and register the next groups with the batcher."""
        group = RolloutGroup(attempts[0].group_id, [builder.finish() for builder in builders])
        further = [attempts_of(request) for request in await asyncio.to_thread(on_group_done, group)]
        batcher.join(sum(map(len, further)))
        return further

    async def run_by_group(groups: Sequence[Sequence[Attempt]]) -> None:
        async def run_from(attempts: Sequence[Attempt]) -> None:
            for further in await finish(attempts, await run_group(attempts)):
                tasks.create_task(run_from(further))

        async with asyncio.TaskGroup() as tasks:
            for attempts in groups:
                tasks.create_task(run_from(attempts))

    async def run_by_batch(groups: Sequence[Sequence[Attempt]]) -> None:
        while groups:
            builders = await _together(run_group(attempts) for attempts in groups)
            await runner.reward_functions.score_batch([builder for group in builders for builder in group])
            further = await _together(finish(*group) for group in zip(groups, builders, strict=True))
            groups = [attempts for some in further for attempts in some]

    async def run_all() -> None:
        try:
            await (run_by_batch if runner.reward_functions.has_batch_scope else run_by_group)(groups)
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None

    running = runner.loop.submit(run_all())
    running.add_done_callback(lambda _: batcher.close())
    try:
        batcher.serve(
            runner.sampler,
            runner.timer,
            functools.partial(_check_event_loop, runner),
            runner.limits.max_seconds,
            runner.interrupt,
        )
        running.result()
    finally:
        # After an error no rollout may continue in the background.
        running.cancel()


def _check_event_loop(runner: RolloutRunner) -> None:
    if not runner.loop.responds(runner.limits.max_seconds):
        raise BlockedEventLoopError(
            f"environment {runner.environment.name!r} has blocked the event loop of all episodes for over "
            f"{runner.limits.max_seconds:g} s (rollouts.max_seconds); run blocking code with "
            "`await asyncio.to_thread(...)`"
        )


async def _together(work: Iterable[Coroutine[Any, Any, Result]]) -> list[Result]:
    """Run coroutines concurrently and return their results in order; the first error cancels the others."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(coroutine) for coroutine in work]
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]


def _prompt(runner: RolloutRunner, task: Task) -> tuple[int, ...]:
    tokens, longest = runner.tokenizer.prompt_tokens(task.messages), runner.limits.longest_prompt
    if len(tokens) <= longest:
        return tokens
    if runner.limits.long_prompts is LongPrompts.TRUNCATE_LEFT:
        return tokens[-longest:]
    limit = "rollouts.max_length" if runner.limits.max_prompt_length is None else "rollouts.max_prompt_length"
    raise PromptTooLongError(
        f"task {task.id!r} of environment {task.environment!r}: its prompt has {len(tokens)} tokens, but {limit} "
        f"allows {longest}; raise {limit}, remove the task, or set rollouts.long_prompts: skip or truncate_left"
    )


def require_one_success(groups: Sequence[RolloutGroup]) -> None:
    """Check that at least one rollout was graded.

    Args:
        groups: the groups of a batch.

    Raises:
        AllRolloutsFailedError: if all rollouts failed.
    """
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    failed = [rollout for rollout in rollouts if not rollout.status.is_graded]
    if rollouts and len(failed) == len(rollouts):
        raise AllRolloutsFailedError(
            f"all {len(rollouts)} rollouts failed; the first, {failed[0].id} "
            f"(task {failed[0].task.id!r} of environment {failed[0].task.environment!r}): {failed[0].error}"
        )
