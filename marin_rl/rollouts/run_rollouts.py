# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Plays episodes: from tasks to groups of rollouts.

Every attempt is a coroutine of its own ([`play`][marin_rl.rollouts.episode.play]); they run in a background
event loop, and ask the thread that owns the sampler for their answers. Tools and rewards of some so overlap with the
sampling of others.
"""

import asyncio
import dataclasses
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any, NamedTuple, TypeVar

from marin_rl.environments.base import Environment
from marin_rl.rollouts.episode import play
from marin_rl.rollouts.event_loop import BackgroundLoop
from marin_rl.rollouts.request_batcher import RequestBatcher
from marin_rl.rollouts.reward_functions import NoRewardScorer, RewardScorer
from marin_rl.rollouts.rollout_builder import Attempt, Limits, LongPrompts, RolloutBuilder
from marin_rl.rollouts.state_hashing import StateHash, default_state_hash
from marin_rl.sampling.sampler import PromptTooLongError, Sampler
from marin_rl.seeds import derive_seed
from marin_rl.timing import PhaseTimer
from marin_rl.tokenization.chat import ChatTokenizer
from marin_rl.types import RolloutGroup, Task

Result = TypeVar("Result")


class AllRolloutsFailedError(RuntimeError):
    """Not one rollout of a batch was graded, so there is nothing to learn from; names the first error."""


class BlockedEventLoopError(RuntimeError):
    """An environment's code keeps the event loop of all episodes from going on."""


@dataclasses.dataclass(frozen=True)
class RolloutRunner:
    """Everything that is needed to play an episode."""

    environment: Environment
    """RewardScorer the answers."""
    tokenizer: ChatTokenizer
    """Turns messages into tokens and answers into text."""
    sampler: Sampler
    """Answers."""
    limits: Limits
    """Bounds of every rollout."""
    state_hash: StateHash = default_state_hash
    """Says which turns stood at the same place (GiGPO)."""
    reward_functions: RewardScorer = dataclasses.field(default_factory=NoRewardScorer)
    """Reward functions, which judge rollouts after their environment."""
    loop: BackgroundLoop = dataclasses.field(default_factory=BackgroundLoop)
    """Where episodes and rewards run."""
    timer: PhaseTimer = dataclasses.field(default_factory=PhaseTimer)
    """Where the seconds are counted: of sampling, and (`reward`) those in which nothing could be sampled because
    environments or rewards were still at work."""
    interrupt: Callable[[], None] = lambda: None
    """Called between rounds of sampling, and while none can be sampled. An error that it raises cancels all episodes
    and ends the call that plays them."""


def run_groups(
    runner: RolloutRunner,
    tasks: Sequence[Task],
    *,
    group_size: int,
    temperature: float,
    seed_parts: tuple[int | str, ...],
) -> list[RolloutGroup]:
    """Play `group_size` attempts at each task, all of them at once.

    Attempts at one task start equally and differ by their sampling seed alone. An episode whose
    environment or reward raises is marked failed, with the error, and one that takes too long timed out; the others
    go on.

    Args:
        runner: environment, tokenizer, sampler and limits.
        tasks: one group is made for each.
        group_size: attempts per task.
        temperature: sampling temperature; 0 is greedy.
        seed_parts: names this call (`run seed, purpose, step`); all seeds derive from it.

    Returns:
        One group per task, in order.

    Raises:
        PromptTooLongError: if a task's prompt is too long, and is not to be truncated.
        ValueError: if a reward is NaN or infinite, naming the rollout.
        AllRolloutsFailedError: if every single rollout failed.
        BlockedEventLoopError: if an environment's code blocks all others for longer than an episode may take.
    """
    name = "-".join(str(part) for part in seed_parts[1:])
    requests = [GroupInput(f"{name}-{number}", task, (*seed_parts, number)) for number, task in enumerate(tasks)]
    groups = run_requests(runner, requests, group_size=group_size, temperature=temperature)
    require_one_success(groups)
    return groups


class GroupInput(NamedTuple):
    """A group that is to be played."""

    group_id: str
    """Its name, unique within the run."""
    task: Task
    """What is to be attempted."""
    seed_parts: tuple[int | str, ...]
    """What the seeds of its attempts derive from, with each attempt's number behind."""


HandIn = Callable[[RolloutGroup], Sequence[GroupInput]]
"""Takes a group that is whole, and says what to play in its place."""


def run_requests(
    runner: RolloutRunner, requests: Sequence[GroupInput], *, group_size: int, temperature: float
) -> list[RolloutGroup]:
    """Play the groups, all attempts at once; what comes out of each does not depend on the others.

    Args:
        runner: environment, tokenizer, sampler and limits.
        requests: what to play.
        group_size: attempts per task.
        temperature: sampling temperature; 0 is greedy.

    Returns:
        One group per request, in order.

    Raises:
        PromptTooLongError: if a task's prompt is too long, and is not to be truncated.
        ValueError: if a reward is NaN or infinite, naming the rollout.
        BlockedEventLoopError: if an environment's code blocks all others for longer than an episode may take.
    """
    came: dict[str, RolloutGroup] = {}

    def keep(group: RolloutGroup) -> tuple[GroupInput, ...]:
        came[group.id] = group
        return ()

    stream_requests(runner, requests, group_size=group_size, temperature=temperature, on_group_done=keep)
    return [came[request.group_id] for request in requests]


def stream_requests(
    runner: RolloutRunner, requests: Sequence[GroupInput], *, group_size: int, temperature: float, on_group_done: HandIn
) -> None:
    """Play groups, each handed in as soon as it is whole, and others in their places, until there are none.

    Where rollouts of different groups are judged together, no group is whole before all are, and others begin then.

    Args:
        runner: environment, tokenizer, sampler and limits.
        requests: what to play first.
        group_size: attempts per task.
        temperature: sampling temperature; 0 is greedy.
        on_group_done: is given each group, in a thread of its own, while others are still played. What it raises ends
            the call.

    Raises:
        PromptTooLongError: if a task's prompt is too long, and is not to be truncated.
        ValueError: if a reward is NaN or infinite, naming the rollout.
        BlockedEventLoopError: if an environment's code blocks all others for longer than an episode may take.
    """
    groups = [_attempts(runner, request, group_size, temperature) for request in requests]
    if groups:
        _play_all(runner, groups, on_group_done, lambda request: _attempts(runner, request, group_size, temperature))


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


def _play_all(
    runner: RolloutRunner,
    groups: Sequence[Sequence[Attempt]],
    on_group_done: HandIn,
    attempts_at: Callable[[GroupInput], Sequence[Attempt]],
) -> None:
    """The event loop plays and judges while this thread samples."""
    desk = RequestBatcher(runner.sampler.batch_size, sum(map(len, groups)))

    async def play_one(attempt: Attempt) -> RolloutBuilder:
        builder = await play(attempt, runner.environment, runner.tokenizer, desk, runner.limits)
        await runner.reward_functions.score_rollout(builder)
        return builder

    async def play_group(attempts: Sequence[Attempt]) -> list[RolloutBuilder]:
        builders = await _together(play_one(attempt) for attempt in attempts)
        await runner.reward_functions.score_group(builders)
        return builders

    async def finish(attempts: Sequence[Attempt], builders: Sequence[RolloutBuilder]) -> list[Sequence[Attempt]]:
        """Hand in a group; what is to be played in its place is expected at the desk."""
        group = RolloutGroup(attempts[0].group_id, [builder.finish() for builder in builders])
        further = [attempts_at(request) for request in await asyncio.to_thread(on_group_done, group)]
        desk.join(sum(map(len, further)))
        return further

    async def play_by_group(groups: Sequence[Sequence[Attempt]]) -> None:
        async def play_from(attempts: Sequence[Attempt]) -> None:
            for further in await finish(attempts, await play_group(attempts)):
                tasks.create_task(play_from(further))

        async with asyncio.TaskGroup() as tasks:
            for attempts in groups:
                tasks.create_task(play_from(attempts))

    async def play_by_batch(groups: Sequence[Sequence[Attempt]]) -> None:
        while groups:
            builders = await _together(play_group(attempts) for attempts in groups)
            await runner.reward_functions.score_batch([builder for group in builders for builder in group])
            further = await _together(finish(*group) for group in zip(groups, builders, strict=True))
            groups = [attempts for some in further for attempts in some]

    async def play_all() -> None:
        try:
            await (play_by_batch if runner.reward_functions.has_batch_scope else play_by_group)(groups)
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None

    def check() -> None:
        if not runner.loop.responds(runner.limits.max_seconds):
            raise BlockedEventLoopError(
                f"environment {runner.environment.name!r} has kept the event loop of all episodes busy for over "
                f"{runner.limits.max_seconds:g} s (rollouts.max_seconds); put what blocks behind "
                "`await asyncio.to_thread(...)`"
            )

    playing = runner.loop.submit(play_all())
    playing.add_done_callback(lambda _: desk.close())
    try:
        desk.serve(runner.sampler, runner.timer, check, runner.limits.max_seconds, runner.interrupt)
        playing.result()
    finally:
        # Nothing of a step that ends with an error goes on behind its back.
        playing.cancel()


async def _together(work: Iterable[Coroutine[Any, Any, Result]]) -> list[Result]:
    """All results, in order; the first error cancels the rest and is passed on."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one) for one in work]
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
        f"allows {longest}; raise {limit}, leave the task out, or set rollouts.long_prompts: skip or truncate_left"
    )


def require_one_success(groups: Sequence[RolloutGroup]) -> None:
    """See that something was graded.

    Raises:
        AllRolloutsFailedError: if every single rollout failed.
    """
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    failed = [rollout for rollout in rollouts if not rollout.status.is_graded]
    if rollouts and len(failed) == len(rollouts):
        raise AllRolloutsFailedError(
            f"all {len(rollouts)} rollouts failed; the first, {failed[0].id} "
            f"(task {failed[0].task.id!r} of environment {failed[0].task.environment!r}): {failed[0].error}"
        )
