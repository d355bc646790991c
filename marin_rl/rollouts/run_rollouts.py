# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Rollouts of many tasks at once: from tasks to groups of rollouts.

Each attempt is a coroutine ([`run_episode`][marin_rl.rollouts.episode.run_episode]) in a background event loop, which
sends sample requests to the thread that owns the sampler. Tools and rewards of some rollouts overlap with the sampling
of others.
"""

import asyncio
import concurrent.futures
import dataclasses
import functools
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import NamedTuple, TypeVar

from marin_rl.environments.base import AbstractEnvironment
from marin_rl.rollouts.attempt import Attempt, Limits, state_hash
from marin_rl.rollouts.episode import ConnectAgent, run_episode
from marin_rl.rollouts.group_codec import decode_group, encode_group, join_parts, split_parts
from marin_rl.rollouts.request_batcher import RequestBatcher
from marin_rl.rollouts.reward_functions import RewardFunctions
from marin_rl.rollouts.rollout_builder import RolloutBuilder
from marin_rl.sampling.sampler import Sampler
from marin_rl.tokenization.chat import ChatTokenizer
from marin_rl.types import RewardFailure, RolloutGroup, Task
from marin_rl.utils import multihost
from marin_rl.utils.errors import UserError
from marin_rl.utils.event_loop import BackgroundLoop, gather_all
from marin_rl.utils.host_status import separate_work
from marin_rl.utils.seeds import derive_seed
from marin_rl.utils.timing import PhaseTimer

Item = TypeVar("Item")


class AllRolloutsFailedError(UserError):
    """No rollout of a batch was graded, so there is nothing to train on; names the first error."""


class BlockedEventLoopError(UserError):
    """An environment's code blocks the event loop of all episodes."""


class CancelledEpisodesError(UserError):
    """An environment's code has cancelled the episodes of other rollouts."""


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
    connect: ConnectAgent | None = None
    """Serves the policy to agents; None if the environment has none."""


class GroupInput(NamedTuple):
    """The inputs of one group of rollouts."""

    group_id: str
    """Group id, unique within the run."""
    task: Task
    """The task to attempt."""
    seed_parts: tuple[int | str, ...]
    """Parts of the seeds of the attempts; each attempt's index is appended."""


OnGroupDone = Callable[[RolloutGroup], Awaitable[Sequence[GroupInput]]]
"""Receives a complete group, and returns the groups to run next."""


def run_tasks(
    runner: RolloutRunner,
    tasks: Sequence[Task],
    *,
    group_size: int,
    temperature: float = 1.0,
    seed_parts: tuple[int | str, ...],
) -> list[RolloutGroup]:
    """Run `group_size` attempts at each task, all of them concurrently, and check that one was graded.

    A temperature of 0 is greedy. `seed_parts` identifies this call (run seed, purpose, step); all seeds derive from it.
    Returns one group per task, in order.

    Raises:
        AllRolloutsFailedError: if all rollouts failed. See `stream_groups` for further errors.
    """
    name = "-".join(str(part) for part in seed_parts[1:])
    inputs = [GroupInput(f"{name}-{number}", task, (*seed_parts, number)) for number, task in enumerate(tasks)]
    groups = run_groups(
        runner,
        inputs,
        group_size=group_size,
        temperature=temperature,
        # No group is needed before all have ended.
        groups_per_block=max(runner.reward_functions.rollouts_per_process // group_size, 1),
    )
    require_one_success(groups)
    return groups


def run_groups(
    runner: RolloutRunner,
    inputs: Sequence[GroupInput],
    *,
    group_size: int,
    temperature: float,
    groups_per_block: int = 1,
) -> list[RolloutGroup]:
    """Run all attempts of the groups concurrently, as `stream_groups` does.

    With several training processes, each runs every n-th group on its own devices, and all of them return all groups. A
    temperature of 0 is greedy. Returns one group per request, in order.

    Raises:
        StopRequestedError: in all processes, if `runner.interrupt` raises it in one of them.
        OtherProcessError: if another process ended with an error.
    """
    if not inputs:
        return []
    index, count = multihost.index_and_count()
    finished: dict[str, RolloutGroup] = {}

    async def keep(group: RolloutGroup) -> tuple[GroupInput, ...]:
        finished[group.id] = group
        return ()

    try:
        runner.sampler.prepare()
        with separate_work(runner.interrupt) as check:
            stream_groups(
                dataclasses.replace(runner, interrupt=check),
                inputs[index::count],
                group_size=group_size,
                temperature=temperature,
                on_group_done=keep,
                groups_per_block=groups_per_block,
            )
    finally:
        # A process without a request has prepared the weights too.
        runner.sampler.reset()
    groups = _exchange(finished)
    return [groups[request.group_id] for request in inputs]


def _exchange(groups: Mapping[str, RolloutGroup]) -> Mapping[str, RolloutGroup]:
    """Return the groups of all processes, by id."""
    if not multihost.is_multihost():
        return groups
    parts = [encode_group(group) for group in groups.values()]
    gathered = multihost.gather_bytes(join_parts(parts))
    decoded = [decode_group(part) for joined in gathered for part in split_parts(joined)]
    return {group.id: group for group in decoded}


def stream_groups(
    runner: RolloutRunner,
    inputs: Sequence[GroupInput],
    *,
    group_size: int,
    temperature: float,
    on_group_done: OnGroupDone,
    groups_per_block: int = 1,
) -> None:
    """Run groups, pass each complete group to a callback, and run the groups that it returns, until none are left.

    The attempts of a group start in the same state and differ only in their sampling seed; their result does not depend
    on other groups. If the environment or a reward function of an episode raises, its rollout is marked as failed; if
    it exceeds the time limit, as timed out. The other rollouts continue.

    If reward functions score rollouts of different groups together, no group is complete before all groups of the batch
    are, and the next groups start only then.

    Args:
        runner: environment, tokenizer, sampler and limits.
        inputs: the groups to run first.
        group_size: attempts per task.
        temperature: sampling temperature; 0 is greedy.
        on_group_done: called in the event loop with each group while other groups still run; it must not block. Its
            error ends the call.
        groups_per_block: number of consecutive groups whose reward functions start when all of them are complete, and
            can share processes.

    Raises:
        PromptTooLongError: if a task's prompt is too long.
        ValueError: if a reward is NaN or infinite; names the rollout.
        BlockedEventLoopError: if an environment's code blocks the event loop for longer than `limits.max_seconds`.
        CancelledEpisodesError: if an environment's code cancels the tasks of other episodes.
    """

    def attempts_of(request: GroupInput) -> list[Attempt]:
        return _attempts(runner, request, group_size, temperature)

    groups = [attempts_of(request) for request in inputs]
    if not groups:
        return
    batcher = RequestBatcher(runner.sampler.batch_size, sum(map(len, groups)))
    running = runner.loop.submit(_run_batches(runner, batcher, groups, on_group_done, attempts_of, groups_per_block))
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
    except concurrent.futures.CancelledError as error:
        raise CancelledEpisodesError(
            f"code of environment {runner.environment.name!r} has cancelled all tasks of the event loop, also those "
            "of other rollouts; cancel only tasks that it has created"
        ) from error
    finally:
        # After an error no rollout may continue in the background.
        running.cancel()


def _attempts(runner: RolloutRunner, request: GroupInput, group_size: int, temperature: float) -> list[Attempt]:
    task, prompt = request.task, runner.limits.prompt_tokens(request.task, runner.tokenizer)
    reply_start, anchor = runner.tokenizer.reply_start(prompt), state_hash(task.messages, task.anchor_state)
    start_seed = derive_seed(*request.seed_parts)
    return [
        Attempt(
            task=task,
            prompt=prompt,
            reply_start=reply_start,
            group_id=request.group_id,
            id=f"{request.group_id}-{member}",
            seed=derive_seed(*request.seed_parts, member),
            start_seed=start_seed,
            temperature=temperature,
            anchor=anchor,
        )
        for member in range(group_size)
    ]


async def _run_batches(
    runner: RolloutRunner,
    batcher: RequestBatcher,
    groups: Sequence[Sequence[Attempt]],
    on_group_done: OnGroupDone,
    attempts_of: Callable[[GroupInput], Sequence[Attempt]],
    groups_per_block: int,
) -> None:
    """Run groups, and those that the callback returns, until none are left."""
    try:
        async with asyncio.TaskGroup() as tasks:

            async def run(batch: Sequence[Sequence[Attempt]]) -> None:
                inputs = await _run_batch(runner, batcher, batch, on_group_done, groups_per_block)
                further = [attempts_of(request) for request in inputs]
                batcher.join(sum(map(len, further)))
                start(further)

            def start(groups: Sequence[Sequence[Attempt]]) -> None:
                # Only rewards over a batch need groups that end together.
                size = len(groups) if runner.reward_functions.has_batch_scope else groups_per_block
                for batch in _split(groups, size):
                    tasks.create_task(run(batch))

            start(groups)
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None


async def _run_batch(
    runner: RolloutRunner,
    batcher: RequestBatcher,
    batch: Sequence[Sequence[Attempt]],
    on_group_done: OnGroupDone,
    groups_per_block: int,
) -> list[GroupInput]:
    """Run and score groups, pass them to the callback, and return the inputs of the next groups."""

    async def run_attempt(attempt: Attempt) -> RolloutBuilder:
        builder = await run_episode(
            attempt, runner.environment, runner.tokenizer, batcher, runner.limits, runner.connect
        )
        await runner.reward_functions.score_rollout(builder)
        return builder

    async def run_block(block: Sequence[Sequence[Attempt]]) -> list[list[RolloutBuilder]]:
        groups = await gather_all(gather_all(map(run_attempt, attempts)) for attempts in block)
        await runner.reward_functions.score_rollouts([builder for builders in groups for builder in builders])
        await gather_all(map(runner.reward_functions.score_group, groups))
        return groups

    async def finish(builders: Sequence[RolloutBuilder]) -> Sequence[GroupInput]:
        rollouts = [builder.finish() for builder in builders]
        return await on_group_done(RolloutGroup(rollouts[0].group_id, rollouts))

    blocks = await gather_all(map(run_block, _split(batch, groups_per_block)))
    groups = [builders for block in blocks for builders in block]
    await runner.reward_functions.score_batch([builder for builders in groups for builder in builders])
    return [request for inputs in await gather_all(map(finish, groups)) for request in inputs]


def _split(items: Sequence[Item], size: int) -> list[Sequence[Item]]:
    """Split a sequence into parts of at most `size`."""
    return [items[start : start + size] for start in range(0, len(items), max(size, 1))]


def _check_event_loop(runner: RolloutRunner) -> None:
    if not runner.loop.responds(runner.limits.max_seconds):
        raise BlockedEventLoopError(
            f"environment {runner.environment.name!r} has blocked the event loop of all episodes for over "
            f"{runner.limits.max_seconds:g} s (rollouts.max_seconds); run blocking code with "
            "`await asyncio.to_thread(...)`"
        )


def require_one_success(groups: Sequence[RolloutGroup]) -> None:
    """Check that at least one rollout was graded.

    Raises:
        AllRolloutsFailedError: if all rollouts failed.
    """
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    if rollouts and not any(rollout.status.is_graded for rollout in rollouts):
        first = rollouts[0]
        raised = any(result.failure == RewardFailure.RAISED for result in first.evaluations)
        raise AllRolloutsFailedError(
            f"all {len(rollouts)} rollouts failed; the first, {first.id} (task {first.task.id!r} of environment "
            f"{first.task.environment!r}): {first.error}"
            + ("\nIf such replies are only wrong, let the reward function return 0 for them" if raised else "")
        )
