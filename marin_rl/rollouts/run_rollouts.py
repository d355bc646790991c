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
from marin_rl.rollouts.draft import Attempt, Draft, Limits, LongPrompts
from marin_rl.rollouts.episode import play
from marin_rl.rollouts.event_loop import BackgroundLoop
from marin_rl.rollouts.judging import Judges, NoJudges
from marin_rl.rollouts.sampling_desk import SamplingDesk
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
class Player:
    """Everything that is needed to play an episode."""

    environment: Environment
    """Judges the answers."""
    tokenizer: ChatTokenizer
    """Turns messages into tokens and answers into text."""
    sampler: Sampler
    """Answers."""
    limits: Limits
    """Bounds of every rollout."""
    state_hash: StateHash = default_state_hash
    """Says which turns stood at the same place (GiGPO)."""
    judges: Judges = dataclasses.field(default_factory=NoJudges)
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
    player: Player,
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
        player: environment, tokenizer, sampler and limits.
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
    requests = [GroupRequest(f"{name}-{number}", task, (*seed_parts, number)) for number, task in enumerate(tasks)]
    groups = play_requests(player, requests, group_size=group_size, temperature=temperature)
    require_one_success(groups)
    return groups


class GroupRequest(NamedTuple):
    """A group that is to be played."""

    group_id: str
    """Its name, unique within the run."""
    task: Task
    """What is to be attempted."""
    seed_parts: tuple[int | str, ...]
    """What the seeds of its attempts derive from, with each attempt's number behind."""


HandIn = Callable[[RolloutGroup], Sequence[GroupRequest]]
"""Takes a group that is whole, and says what to play in its place."""


def play_requests(
    player: Player, requests: Sequence[GroupRequest], *, group_size: int, temperature: float
) -> list[RolloutGroup]:
    """Play the groups, all attempts at once; what comes out of each does not depend on the others.

    Args:
        player: environment, tokenizer, sampler and limits.
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

    def keep(group: RolloutGroup) -> tuple[GroupRequest, ...]:
        came[group.id] = group
        return ()

    play_stream(player, requests, group_size=group_size, temperature=temperature, hand_in=keep)
    return [came[request.group_id] for request in requests]


def play_stream(
    player: Player, requests: Sequence[GroupRequest], *, group_size: int, temperature: float, hand_in: HandIn
) -> None:
    """Play groups, each handed in as soon as it is whole, and others in their places, until there are none.

    Where rollouts of different groups are judged together, no group is whole before all are, and others begin then.

    Args:
        player: environment, tokenizer, sampler and limits.
        requests: what to play first.
        group_size: attempts per task.
        temperature: sampling temperature; 0 is greedy.
        hand_in: is given each group, in a thread of its own, while others are still played. What it raises ends
            the call.

    Raises:
        PromptTooLongError: if a task's prompt is too long, and is not to be truncated.
        ValueError: if a reward is NaN or infinite, naming the rollout.
        BlockedEventLoopError: if an environment's code blocks all others for longer than an episode may take.
    """
    groups = [_attempts(player, request, group_size, temperature) for request in requests]
    if groups:
        _play_all(player, groups, hand_in, lambda request: _attempts(player, request, group_size, temperature))


def _attempts(player: Player, request: GroupRequest, group_size: int, temperature: float) -> list[Attempt]:
    prompt = _prompt(player, request.task)
    return [
        Attempt(
            task=request.task,
            prompt=prompt,
            group_id=request.group_id,
            id=f"{request.group_id}-{member}",
            seed=derive_seed(*request.seed_parts, member),
            start_seed=derive_seed(*request.seed_parts),
            temperature=temperature,
            state_hash=player.state_hash,
        )
        for member in range(group_size)
    ]


def _play_all(
    player: Player,
    groups: Sequence[Sequence[Attempt]],
    hand_in: HandIn,
    attempts_at: Callable[[GroupRequest], Sequence[Attempt]],
) -> None:
    """The event loop plays and judges while this thread samples."""
    desk = SamplingDesk(player.sampler.batch_size, sum(map(len, groups)))

    async def play_one(attempt: Attempt) -> Draft:
        draft = await play(attempt, player.environment, player.tokenizer, desk, player.limits)
        await player.judges.judge_one(draft)
        return draft

    async def play_group(attempts: Sequence[Attempt]) -> list[Draft]:
        drafts = await _together(play_one(attempt) for attempt in attempts)
        await player.judges.judge_group(drafts)
        return drafts

    async def finish(attempts: Sequence[Attempt], drafts: Sequence[Draft]) -> list[Sequence[Attempt]]:
        """Hand in a group; what is to be played in its place is expected at the desk."""
        group = RolloutGroup(attempts[0].group_id, [draft.finish() for draft in drafts])
        further = [attempts_at(request) for request in await asyncio.to_thread(hand_in, group)]
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
            drafts = await _together(play_group(attempts) for attempts in groups)
            await player.judges.judge_batch([draft for group in drafts for draft in group])
            further = await _together(finish(*group) for group in zip(groups, drafts, strict=True))
            groups = [attempts for some in further for attempts in some]

    async def play_all() -> None:
        try:
            await (play_by_batch if player.judges.judge_batches else play_by_group)(groups)
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None

    def check() -> None:
        if not player.loop.responds(player.limits.max_seconds):
            raise BlockedEventLoopError(
                f"environment {player.environment.name!r} has kept the event loop of all episodes busy for over "
                f"{player.limits.max_seconds:g} s (rollouts.max_seconds); put what blocks behind "
                "`await asyncio.to_thread(...)`"
            )

    playing = player.loop.submit(play_all())
    playing.add_done_callback(lambda _: desk.close())
    try:
        desk.serve(player.sampler, player.timer, check, player.limits.max_seconds, player.interrupt)
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


def _prompt(player: Player, task: Task) -> tuple[int, ...]:
    tokens, longest = player.tokenizer.prompt_tokens(task.messages), player.limits.longest_prompt
    if len(tokens) <= longest:
        return tokens
    if player.limits.long_prompts is LongPrompts.TRUNCATE_LEFT:
        return tokens[-longest:]
    limit = "rollouts.max_length" if player.limits.max_prompt_length is None else "rollouts.max_prompt_length"
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
