# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""A rollout under construction: limits of a rollout, and the builder that collects its turns and rewards."""

import dataclasses
import enum
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from marin_rl.config_fields import LOCAL_PATH
from marin_rl.environments.base import Step
from marin_rl.objectives.gigpo import anchor_of
from marin_rl.objectives.shaping import TRUNCATED
from marin_rl.rewards.combine import failure, turn_rewards, weighted_rewards
from marin_rl.rewards.functions import RewardRequest
from marin_rl.sampling.sampler import SampleRequest
from marin_rl.seeds import derive_seed
from marin_rl.tokenization.chat import ChatTokenizer
from marin_rl.types import (
    Generation,
    Info,
    Message,
    Observation,
    RewardResult,
    Rollout,
    RolloutStatus,
    StopReason,
    Task,
    Turn,
    check_info,
)
from marin_rl.user_code import UserFileError, load_from_file

logger = logging.getLogger(__name__)


StateHash = Callable[[tuple[Message, ...], object], str]
"""Maps the messages shown to the policy and the environment's `anchor_state` (None if it has none) to a string that is
equal for equal states."""


def default_state_hash(messages: tuple[Message, ...], anchor_state: object) -> str:
    """Hash the canonical JSON of the environment's anchor state or, if it is None, of the messages."""
    return anchor_of(list(messages) if anchor_state is None else anchor_state)


@dataclasses.dataclass(frozen=True)
class StateHashingConfig:
    """A user's state hashing function. It runs in the training process, once per turn."""

    path: str = dataclasses.field(metadata=LOCAL_PATH)
    """The Python file of the function; relative paths start at the working directory."""
    function: str
    """Name of the function. It takes the messages and the environment's `anchor_state`, and returns a string."""

    def build(self) -> StateHash:
        """Import the function.

        Raises:
            UserFileError: if the file has no such function.
        """
        function = load_from_file(self.path, self.function)
        if not callable(function):
            raise UserFileError(
                f"{self.function!r} of {self.path} is {type(function).__name__}; it must be a function of messages and "
                "anchor state"
            )
        source = f"rollouts.state_hashing: {self.function!r} of {self.path}"

        def hash_state(messages: tuple[Message, ...], anchor_state: object) -> str:
            try:
                hashed = function(messages, anchor_state)
            except Exception as error:
                raise UserFileError(f"{source} raised {type(error).__name__}: {error}") from error
            if not isinstance(hashed, str):
                raise UserFileError(f"{source} returned {type(hashed).__name__}; it must return a str")
            return hashed

        return hash_state


class LongPrompts(enum.StrEnum):
    """Handling of tasks with a too long prompt."""

    ERROR = "error"
    """End the run with an error that names the task."""
    SKIP = "skip"
    """Skip the task and use the next one."""
    TRUNCATE_LEFT = "truncate_left"
    """Keep the prompt's last tokens."""


@dataclasses.dataclass(frozen=True)
class Limits:
    """Limits of one rollout."""

    max_length: int
    """Maximum tokens of one sequence, prompt and replies together."""
    max_new_tokens: int
    """Maximum tokens of one reply, including the stop token."""
    max_turns: int
    """Maximum number of replies in one rollout."""
    max_tokens: int | None = None
    """Maximum tokens of all replies of a rollout together; None: no limit."""
    max_seconds: float = 120.0
    """Maximum seconds that the environment may take for a whole rollout; the wait for the sampler does not count."""
    max_prompt_length: int | None = None
    """Maximum tokens of a task's prompt; None: `max_length - 1`, which leaves room for one token of a reply."""
    long_prompts: LongPrompts = LongPrompts.ERROR
    """Handling of tasks with a longer prompt."""

    @property
    def longest_prompt(self) -> int:
        """Maximum tokens of a task's prompt."""
        return self.max_length - 1 if self.max_prompt_length is None else self.max_prompt_length

    def should_skip(self, task: Task, tokenizer: ChatTokenizer) -> bool:
        """Whether to skip a task because its prompt is too long; log the task if so.

        Args:
            task: the next task.
            tokenizer: tokenizer of the prompt.
        """
        if self.long_prompts is not LongPrompts.SKIP:
            return False
        length = len(tokenizer.prompt_tokens(task.messages))
        if too_long := length > self.longest_prompt:
            logger.warning(
                "skipping task %s of environment %s: its prompt has %d tokens, more than %d (rollouts.long_prompts)",
                task.id,
                task.environment,
                length,
                self.longest_prompt,
            )
        return too_long


@dataclasses.dataclass(frozen=True)
class Attempt:
    """The inputs of one rollout."""

    task: Task
    """The task to attempt."""
    prompt: tuple[int, ...]
    """The task's messages as tokens."""
    group_id: str
    """Group id of the rollout."""
    id: str
    """Id of the rollout."""
    seed: int
    """Seed of the policy's replies."""
    start_seed: int
    """Seed of the environment; equal within a group."""
    temperature: float
    """Sampling temperature; 0 is greedy."""
    state_hash: StateHash = default_state_hash
    """Hash of a turn's state; turns with equal hashes are compared (GiGPO)."""


class EnvironmentFault(Exception):
    """The environment raised an error or exceeded its time limit."""

    def __init__(self, status: RolloutStatus, message: str) -> None:
        super().__init__(message)
        self.status = status


class RolloutBuilder:
    """Collects the turns and rewards of one rollout.

    Alternate `add_generation` and `add_observation` until `over`, call `add_rewards` for reward functions, then
    `finish`.
    """

    def __init__(self, attempt: Attempt) -> None:
        self.over = False
        """Whether the rollout has no further turns."""
        self.seconds = {"sample": 0.0, "environment": 0.0, "reward": 0.0}
        """Seconds spent in each phase."""
        self._attempt = attempt
        self._observation = attempt.prompt
        self._messages: tuple[Message, ...] = attempt.task.messages
        self._anchor = attempt.state_hash(attempt.task.messages, attempt.task.anchor_state)
        self._anchor_state = attempt.task.anchor_state
        self._starts_sequence = True
        self._history: tuple[Message, ...] = ()
        self._sequence: tuple[int, ...] = ()
        self._turns: list[Turn] = []
        self._last_observation: Observation | None = None
        self._rewards: dict[str, float] = {}
        self._metrics: dict[str, float] = {}
        self._info: dict[str, Any] = {}
        self._truncated = False
        self._is_cut_off = False
        self._status: RolloutStatus | None = None
        self._error: str | None = None
        self._evaluations: list[RewardResult] = []

    @property
    def task(self) -> Task:
        """The attempted task."""
        return self._attempt.task

    @property
    def has_failed(self) -> bool:
        """Whether the rollout failed and so has no reward."""
        return self._error is not None

    def request(self, limits: Limits) -> SampleRequest:
        """Build the sample request of the next turn."""
        prompt = self._observation if self._starts_sequence else self._sequence + self._observation
        room = max(limits.max_length - len(prompt), 1)
        return SampleRequest(
            prompt_tokens=prompt,
            seed=derive_seed(self._attempt.seed, len(self._turns)),
            max_new_tokens=min(limits.max_new_tokens, room, self._tokens_left(limits)),
            temperature=self._attempt.temperature,
        )

    def add_generation(self, generation: Generation, reply: str) -> None:
        """Add a turn with the policy's reply.

        Args:
            generation: the sampled tokens.
            reply: the tokens as text.
        """
        message: Message = {"role": "assistant", "content": reply}
        turn = Turn(
            observation_tokens=self._observation,
            generation=generation,
            messages=(*self._messages, message),
            anchor_state=self._anchor,
            starts_sequence=self._starts_sequence,
        )
        self._turns.append(turn)
        _log_generation(self._attempt.id, len(self._turns) - 1, turn, self._anchor_state)
        self._truncated |= generation.stop_reason is StopReason.LENGTH
        self._history = (*self._history, *self._messages, message)
        context = () if self._starts_sequence else self._sequence
        self._sequence = context + self._observation + generation.token_ids
        if generation.stop_reason is StopReason.ABORT:
            self.over = True
            self.fail(
                RolloutStatus.ABORTED,
                f"the engine aborted the generation of turn {len(self._turns) - 1} after "
                f"{len(generation.token_ids)} tokens (stop reason {generation.stop_reason.value})",
            )

    def add_observation(self, step: Step, tokenizer: ChatTokenizer, limits: Limits) -> None:
        """Add the environment's step after the last reply, and prepare the next turn or end the rollout.

        Args:
            step: rewards, metrics and messages of the environment.
            tokenizer: tokenizer of the step's messages.
            limits: limits of the rollout.

        Raises:
            EnvironmentFault: if the step is invalid.
        """
        rewards, metrics = _numbers(step.rewards), _numbers(step.metrics)
        if not step.done and not step.messages:
            raise EnvironmentFault(
                RolloutStatus.FAILED,
                "ValueError: the environment's step is not done, but has no messages for the policy",
            )
        _check_texts(step.messages)
        if any(message["role"] == "assistant" for message in step.messages):
            raise EnvironmentFault(
                RolloutStatus.FAILED,
                "ValueError: the environment's step has a message of role 'assistant'; only the policy may use this "
                "role, which assigns step rewards to turns: use 'user' or 'tool'",
            )
        info, rollout_info = _info(step.info), _info(step.rollout_info)
        self._turns[-1] = dataclasses.replace(self._turns[-1], action=step.action, rewards=rewards, info=info)
        for name, value in rewards.items():
            self._rewards[name] = self._rewards.get(name, 0.0) + value
        self._metrics |= metrics
        self._info |= rollout_info
        _log_step(self._attempt.id, len(self._turns) - 1, self._turns[-1], step)
        if step.done:
            self.over = True
            self._last_observation = Observation(step.messages) if step.messages else None
            return
        tokens, starts_sequence = tokenizer.observation_tokens(self._history, self._sequence, step.messages)
        context = 0 if starts_sequence else len(self._sequence)
        no_room = context + len(tokens) >= limits.max_length
        if no_room or len(self._turns) >= limits.max_turns or self._tokens_left(limits) < 1:
            self.over = self._truncated = self._is_cut_off = True
            self._last_observation = Observation(step.messages, tokens, starts_sequence)
            return
        self._messages, self._anchor = step.messages, self._anchor_of(step)
        self._anchor_state = step.anchor_state
        self._observation, self._starts_sequence = tokens, starts_sequence

    def reward_request(self) -> RewardRequest:
        """Build the arguments of reward functions; call it after the last turn."""
        last = () if self._last_observation is None else self._last_observation.messages
        return RewardRequest(
            rollout_id=self._attempt.id,
            messages=(*self._history, *last),
            ground_truth=self.task.answer,
            task_id=self.task.id,
            environment=self.task.environment,
            status=self._end.value,
            num_prompt_messages=len(self.task.messages),
            group_seed=self._attempt.start_seed,
        )

    def add_rewards(self, evaluations: Sequence[RewardResult]) -> None:
        """Add the results of reward functions. If one has no valid score, the rollout fails.

        Args:
            evaluations: one result per reward component.
        """
        self._evaluations += evaluations
        missing = failure(evaluations)
        clashes = [result.component for result in evaluations if result.component in self._rewards]
        if missing is None and clashes:
            missing = f"reward {clashes[0]!r} has the name of a reward of the environment; set another `name`"
        if missing is not None:
            self.fail(RolloutStatus.FAILED, missing)
            return
        self._rewards |= weighted_rewards(evaluations)
        for index, rewards in enumerate(turn_rewards(evaluations, len(self._turns))):
            if rewards:
                turn = self._turns[index]
                self._turns[index] = dataclasses.replace(turn, rewards={**turn.rewards, **rewards})

    def fail(self, status: RolloutStatus, error: str) -> None:
        """Mark the rollout as failed and log the error.

        Args:
            status: a status without reward.
            error: the error message.
        """
        self._status, self._error = status, error
        logger.warning("rollout %s %s: %s", self._attempt.id, status.value.replace("_", " "), error)

    def finish(self) -> Rollout:
        """Build the rollout.

        If a limit ended the rollout before the environment or a reward function gave any reward, its reward is 0, as
        component `truncated`, because an environment may give its rewards only at the end.

        Returns:
            The rollout.

        Raises:
            ValueError: if a reward is NaN or infinite, or if there is no reward; the message names the rollout.
        """
        unrewarded = {TRUNCATED: 0.0} if self._is_cut_off else {}
        rollout = Rollout(
            id=self._attempt.id,
            group_id=self._attempt.group_id,
            task=self._attempt.task,
            turns=tuple(self._turns),
            status=self._end,
            rewards={} if self.has_failed else self._rewards or unrewarded,
            error=self._error,
            evaluations=tuple(self._evaluations),
            metrics=self._metrics,
            seconds=self.seconds,
            last_observation=self._last_observation,
            info=self._info,
        )
        _log_summary(rollout)
        return rollout

    def _anchor_of(self, step: Step) -> str:
        try:
            return self._attempt.state_hash(step.messages, step.anchor_state)
        except (TypeError, UserFileError) as error:
            raise EnvironmentFault(RolloutStatus.FAILED, f"{type(error).__name__}: {error}") from error

    @property
    def _end(self) -> RolloutStatus:
        return self._status or (RolloutStatus.TRUNCATED if self._truncated else RolloutStatus.COMPLETED)

    def _tokens_left(self, limits: Limits) -> int:
        if limits.max_tokens is None:
            return limits.max_new_tokens
        return limits.max_tokens - sum(len(turn.generation.token_ids) for turn in self._turns)


def _numbers(values: Mapping[str, float]) -> dict[str, float]:
    """Convert values to floats; an invalid value fails the rollout."""
    try:
        return {name: float(value) for name, value in values.items()}
    except (TypeError, ValueError, OverflowError) as error:
        raise EnvironmentFault(RolloutStatus.FAILED, f"{type(error).__name__}: {error}") from error


def _check_texts(messages: Sequence[Message]) -> None:
    """Fail the rollout if a message is not valid text for tokenizers and JSON files."""
    for index, message in enumerate(messages):
        try:
            for text in (message["role"], message["content"]):
                text.encode("utf-8")
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            raise EnvironmentFault(
                RolloutStatus.FAILED,
                f"ValueError: message {index} of the environment's step is {message!r:.200}; role and content "
                f"must be strings without lone surrogates ({type(error).__name__}: {error})",
            ) from error


def _info(info: Info) -> dict[str, Any]:
    """Copy free metadata; metadata that is not JSON fails the rollout."""
    try:
        check_info(info)
    except ValueError as error:
        raise EnvironmentFault(RolloutStatus.FAILED, f"ValueError: {error}") from error
    return dict(info)


def _log_generation(id: str, turn: int, record: Turn, anchor_state: object) -> None:
    """Log the observation, the raw action with the policy's log-probabilities, and the anchor state of GiGPO."""
    if not logger.isEnabledFor(logging.DEBUG):
        return
    *observed, reply = record.messages
    logger.debug("rollout %s turn %d: observation %s", id, turn, observed)
    logger.debug(
        "rollout %s turn %d: action %r, stop reason %s, tokens %s, log-probs [%s]",
        id,
        turn,
        reply["content"],
        record.generation.stop_reason.value,
        list(record.generation.token_ids),
        ", ".join(f"{value:.6g}" for value in record.generation.logprobs),
    )
    state = observed if anchor_state is None else anchor_state
    logger.debug("rollout %s turn %d: anchor state %s, hash %s", id, turn, state, record.anchor_state)


def _log_step(id: str, turn: int, record: Turn, step: Step) -> None:
    """Log the environment's step: the parsed action, rewards, and the next messages."""
    if logger.isEnabledFor(logging.DEBUG):
        logger.debug(
            "rollout %s turn %d: structured action %r, rewards %s, done %s, next %s",
            id,
            turn,
            step.action if step.action is not None else record.messages[-1]["content"],
            dict(step.rewards),
            step.done,
            list(step.messages),
        )


def _log_summary(rollout: Rollout) -> None:
    logger.info(
        "rollout %s of task %s: %s, %d turns, %d tokens, reward %s",
        rollout.id,
        rollout.task.id,
        rollout.status.value,
        len(rollout.turns),
        rollout.num_generated_tokens,
        "none" if rollout.total_reward is None else f"{rollout.total_reward:g}",
    )
