# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Plays episodes: from tasks to groups of rollouts.

Every attempt is a coroutine of its own ([`play`][marin_rl.rollouts.episode.play]); they run in a background
event loop, and ask the thread that owns the sampler for their answers. Tools and rewards of some so overlap with the
sampling of others.
"""

import asyncio
import dataclasses
import logging
from collections.abc import Sequence

from marin_rl.environments.base import Environment
from marin_rl.rollouts.episode import Attempt, Limits, play
from marin_rl.rollouts.event_loop import BackgroundLoop
from marin_rl.rollouts.sampling_desk import SamplingDesk
from marin_rl.sampling.sampler import PromptTooLongError, Sampler
from marin_rl.seeds import derive_seed
from marin_rl.timing import PhaseTimer
from marin_rl.tokenization.chat import ChatTokenizer
from marin_rl.types import Rollout, RolloutGroup, Task

logger = logging.getLogger(__name__)


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
    loop: BackgroundLoop = dataclasses.field(default_factory=BackgroundLoop)
    """Where episodes and rewards run."""
    timer: PhaseTimer = dataclasses.field(default_factory=PhaseTimer)
    """Where the seconds are counted: of sampling, and (`reward`) those in which nothing could be sampled because
    environments or rewards were still at work."""


def run_groups(
    player: Player,
    tasks: Sequence[Task],
    *,
    group_size: int,
    temperature: float,
    seed_parts: tuple[int | str, ...],
    all_may_fail: bool = False,
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
        all_may_fail: whether a call without a single success is no error.

    Returns:
        One group per task, in order.

    Raises:
        PromptTooLongError: if a task's prompt leaves no room for an answer.
        ValueError: if a reward is NaN or infinite, naming the rollout.
        AllRolloutsFailedError: if every single rollout failed, and that is an error.
        BlockedEventLoopError: if an environment's code blocks all others for longer than an episode may take.
    """
    if not tasks:
        return []
    name = "-".join(str(part) for part in seed_parts[1:])
    prompts = [_prompt(player, task) for task in tasks]
    attempts = [
        Attempt(
            task=task,
            prompt=prompt,
            group_id=f"{name}-{group}",
            id=f"{name}-{group}-{member}",
            seed=derive_seed(*seed_parts, group, member),
            start_seed=derive_seed(*seed_parts, group),
            temperature=temperature,
        )
        for group, (task, prompt) in enumerate(zip(tasks, prompts, strict=True))
        for member in range(group_size)
    ]
    rollouts = _play_all(player, attempts)
    if not all_may_fail:
        _require_one_success(rollouts)
    return [
        RolloutGroup(id=f"{name}-{group}", rollouts=rollouts[group * group_size : (group + 1) * group_size])
        for group in range(len(tasks))
    ]


def _play_all(player: Player, attempts: Sequence[Attempt]) -> list[Rollout]:
    """The event loop plays while this thread samples."""
    desk = SamplingDesk(player.sampler.batch_size, len(attempts))

    async def everything() -> list[Rollout]:
        try:
            async with asyncio.TaskGroup() as together:
                playing = [
                    together.create_task(play(attempt, player.environment, player.tokenizer, desk, player.limits))
                    for attempt in attempts
                ]
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        return [task.result().finish() for task in playing]

    def check() -> None:
        if not player.loop.responds(player.limits.max_seconds):
            raise BlockedEventLoopError(
                f"environment {player.environment.name!r} has kept the event loop of all episodes busy for over "
                f"{player.limits.max_seconds:g} s (rollouts.max_seconds); put what blocks behind "
                "`await asyncio.to_thread(...)`"
            )

    playing = player.loop.submit(everything())
    playing.add_done_callback(lambda _: desk.close())
    try:
        desk.serve(player.sampler, player.timer, check, player.limits.max_seconds)
        return playing.result()
    finally:
        # Nothing of a step that ends with an error goes on behind its back.
        playing.cancel()


def _prompt(player: Player, task: Task) -> tuple[int, ...]:
    tokens = player.tokenizer.prompt_tokens(task.messages)
    if len(tokens) >= player.limits.max_length:
        raise PromptTooLongError(
            f"task {task.id!r} of environment {task.environment!r}: its prompt has {len(tokens)} tokens, which leaves "
            f"no room for an answer in sequences of {player.limits.max_length}; raise rollouts.max_length or leave "
            "the task out"
        )
    return tokens


def _require_one_success(rollouts: Sequence[Rollout]) -> None:
    failed = [rollout for rollout in rollouts if not rollout.status.is_graded]
    if rollouts and len(failed) == len(rollouts):
        raise AllRolloutsFailedError(
            f"all {len(rollouts)} rollouts failed; the first, {failed[0].id} "
            f"(task {failed[0].task.id!r} of environment {failed[0].task.environment!r}): {failed[0].error}"
        )
