# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Plays episodes: from tasks to groups of rollouts."""

import dataclasses
import logging
from collections.abc import Mapping, Sequence

from marin_rl.environments.base import Environment, Episode, Step
from marin_rl.objectives.gigpo import anchor_of
from marin_rl.sampling.sampler import PromptTooLongError, Sampler, SampleRequest
from marin_rl.seeds import derive_seed
from marin_rl.timing import PhaseTimer
from marin_rl.tokenization.chat import ChatTokenizer
from marin_rl.types import Generation, Message, Rollout, RolloutGroup, RolloutStatus, StopReason, Task, Turn

logger = logging.getLogger(__name__)


class AllRolloutsFailedError(RuntimeError):
    """Not one rollout of a batch was graded, so there is nothing to learn from; names the first error."""


@dataclasses.dataclass(frozen=True)
class Limits:
    """How far a rollout may go."""

    max_length: int
    """Most tokens in one sequence, prompt and answers together."""
    max_new_tokens: int
    """Most tokens in one answer, the stop token included."""
    max_turns: int
    """Most answers in one rollout."""


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
    timer: PhaseTimer = dataclasses.field(default_factory=PhaseTimer)
    """Where the seconds of sampling and of the environment's answers (`reward`) are counted."""


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
    environment or reward raises is marked failed, with the error; the others go on.

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
    """
    name = "-".join(str(part) for part in seed_parts[1:])
    prompts = [_prompt(player, task) for task in tasks]
    attempts = [
        _Attempt(
            task=task,
            observation=prompt,
            group_id=f"{name}-{group}",
            id=f"{name}-{group}-{member}",
            seed=derive_seed(*seed_parts, group, member),
            start_seed=derive_seed(*seed_parts, group),
        )
        for group, (task, prompt) in enumerate(zip(tasks, prompts, strict=True))
        for member in range(group_size)
    ]
    _play(player, attempts, temperature)
    rollouts = [attempt.finish() for attempt in attempts]
    if not all_may_fail:
        _require_one_success(rollouts)
    return [
        RolloutGroup(id=f"{name}-{group}", rollouts=rollouts[group * group_size : (group + 1) * group_size])
        for group in range(len(tasks))
    ]


def _play(player: Player, attempts: Sequence["_Attempt"], temperature: float) -> None:
    for attempt in attempts:
        attempt.begin(player)
    for turn in range(player.limits.max_turns):
        active = [attempt for attempt in attempts if attempt.is_active]
        if not active:
            break
        requests = [attempt.request(player.limits, turn, temperature) for attempt in active]
        with player.timer.phase("sample"):
            generations = player.sampler.sample(requests)
        for attempt, generation in zip(active, generations, strict=True):
            attempt.answer(player, generation)


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
    failed = [rollout for rollout in rollouts if rollout.status is RolloutStatus.FAILED]
    if rollouts and len(failed) == len(rollouts):
        raise AllRolloutsFailedError(
            f"all {len(rollouts)} rollouts failed; the first, {failed[0].id} "
            f"(task {failed[0].task.id!r} of environment {failed[0].task.environment!r}): {failed[0].error}"
        )


@dataclasses.dataclass
class _Attempt:
    """One rollout in the making; mutable, and never seen outside this file."""

    task: Task
    group_id: str
    id: str
    seed: int
    start_seed: int
    observation: tuple[int, ...]
    episode: Episode | None = None
    observed: tuple[Message, ...] = ()
    starts_sequence: bool = True
    history: tuple[Message, ...] = ()
    sequence: tuple[int, ...] = ()
    turns: tuple[Turn, ...] = ()
    rewards: Mapping[str, float] = dataclasses.field(default_factory=dict)
    truncated: bool = False
    done: bool = False
    error: str | None = None

    @property
    def is_active(self) -> bool:
        return not self.done and self.error is None

    def begin(self, player: Player) -> None:
        self.observed = self.task.messages
        try:
            self.episode = player.environment.start(self.task, self.start_seed)
        except Exception as error:
            self._fail(error)

    def request(self, limits: Limits, turn: int, temperature: float) -> SampleRequest:
        prompt = self.observation if self.starts_sequence else self.sequence + self.observation
        room = max(limits.max_length - len(prompt), 1)
        return SampleRequest(
            prompt_tokens=prompt,
            seed=derive_seed(self.seed, turn),
            max_new_tokens=min(limits.max_new_tokens, room),
            temperature=temperature,
        )

    def answer(self, player: Player, generation: Generation) -> None:
        reply = player.tokenizer.decode_reply(generation.token_ids)
        said: Message = {"role": "assistant", "content": reply}
        assert self.episode is not None
        try:
            with player.timer.phase("reward"):
                step = _checked(self.episode.step(reply))
        except Exception as error:
            self._fail(error)
            step = Step(rewards={})
        turn = Turn(
            observation_tokens=self.observation,
            generation=generation,
            messages=(*self.observed, said),
            reward=sum(step.rewards.values(), 0.0) if step.rewards else None,
            anchor_state=anchor_of(self.observed),
            starts_sequence=self.starts_sequence,
        )
        self.turns = (*self.turns, turn)
        self.rewards = _add(self.rewards, step.rewards)
        self.truncated |= generation.stop_reason is StopReason.LENGTH
        self.history = (*self.history, *self.observed, said)
        context = () if self.starts_sequence else self.sequence
        self.sequence = context + self.observation + generation.token_ids
        self.done = step.done
        if self.is_active:
            self._observe(player, step.messages)

    def _observe(self, player: Player, messages: tuple[Message, ...]) -> None:
        self.observed = messages
        self.observation, self.starts_sequence = player.tokenizer.observation_tokens(
            self.history, self.sequence, messages
        )
        context = 0 if self.starts_sequence else len(self.sequence)
        if context + len(self.observation) >= player.limits.max_length:
            self.done = self.truncated = True

    def _fail(self, error: Exception) -> None:
        self.error = f"{type(error).__name__}: {error}"
        self.rewards = {}
        logger.warning("rollout %s failed: %s", self.id, self.error)

    def finish(self) -> Rollout:
        if self.error is not None:
            status = RolloutStatus.FAILED
        elif self.truncated or not self.done:
            status = RolloutStatus.TRUNCATED
        else:
            status = RolloutStatus.COMPLETED
        return Rollout(self.id, self.group_id, self.task, self.turns, status, self.rewards, self.error)


def _checked(step: Step) -> Step:
    """The step with rewards that are numbers; what an environment gets wrong here fails its rollout, as a raise does.

    Raises:
        ValueError: if a reward is no number, or the episode goes on without anything to show.
    """
    rewards = {name: float(value) for name, value in step.rewards.items()}
    if not step.done and not step.messages:
        raise ValueError("the environment's step is not done, but has no messages to show the policy next")
    return dataclasses.replace(step, rewards=rewards)


def _add(earlier: Mapping[str, float], now: Mapping[str, float]) -> dict[str, float]:
    return {name: earlier.get(name, 0.0) + now.get(name, 0.0) for name in (*earlier, *now)}
