# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""A rollout under construction: the builder that collects its turns and rewards."""

import collections
import contextlib
import dataclasses
import json
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from marin_rl.environments.agent import check_reward
from marin_rl.environments.base import AgentResult, Step
from marin_rl.environments.random_reward import RandomRewards
from marin_rl.rewards.pipeline import failure, turn_rewards, weighted_rewards
from marin_rl.rewards.sandbox.functions import RewardRequest
from marin_rl.rollouts.attempt import Attempt, Limits, keep_new_experts, state_hash
from marin_rl.sampling.sampler import SampleRequest
from marin_rl.tokenization.chat import ChatTokenizer
from marin_rl.types import (
    Generation,
    Message,
    Observation,
    RewardResult,
    Rollout,
    RolloutStatus,
    StopReason,
    Task,
    Turn,
    check_info,
    exact_sum,
)
from marin_rl.utils.errors import explain, storable
from marin_rl.utils.seeds import derive_seed

logger = logging.getLogger(__name__)

MAX_ERROR = 20_000
"""Maximum characters of the error message of a rollout."""


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

    def __init__(self, attempt: Attempt, tokenizer: ChatTokenizer, limits: Limits) -> None:
        """Start with the task's prompt."""
        self.over = False
        """Whether the rollout has no further turns."""
        self.seconds = {"sample": 0.0, "environment": 0.0, "reward": 0.0}
        """Seconds spent in each phase."""
        self.pointwise_results: dict[str, RewardResult] = {}
        """Results of pointwise components by name, until `add_rewards` has added all of them."""
        self._attempt, self._tokenizer, self._limits = attempt, tokenizer, limits
        # The observation of the next turn: its messages, tokens, the text of the assistant's turn in them, the tokens
        # before them (none if the observation starts a sequence), and its state.
        self._messages: tuple[Message, ...] = attempt.task.messages
        self._observation, self._reply_start = attempt.prompt, attempt.reply_start
        self._context: tuple[int, ...] = ()
        self._anchor_state = attempt.task.anchor_state
        self._anchor = attempt.anchor
        self._turns: list[Turn] = []
        # The text of the assistant's turn before each reply, which the generation prompt contains.
        self._reply_starts: list[str] = []
        self._last_observation: Observation | None = None
        # All rewards by name; summed at the end, so that their order cannot change the return.
        self._rewards: dict[str, list[float]] = collections.defaultdict(list)
        self._metrics: dict[str, float] = {}
        self._info: dict[str, Any] = {}
        self._evaluations: list[RewardResult] = []
        self._hit_limit = False
        self._is_agent = False
        self._has_random_rewards = False
        self._failure: RolloutStatus | None = None
        self._error: str | None = None

    @property
    def task(self) -> Task:
        """The attempted task."""
        return self._attempt.task

    @property
    def has_failed(self) -> bool:
        """Whether the rollout failed and so has no reward."""
        return self._failure is not None

    @property
    def is_scored(self) -> bool:
        """Whether reward functions score the rollout: it has not failed, and its rewards are not random."""
        return not (self.has_failed or self._has_random_rewards)

    @contextlib.contextmanager
    def count_seconds(self, phase: str) -> Iterator[None]:
        """Add the time of a `with` block to a phase."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[phase] += time.perf_counter() - start

    @property
    def is_last_turn(self) -> bool:
        """Whether the rollout ends with the next reply at the latest, because of its number of turns."""
        return len(self._turns) + 1 >= self._limits.max_turns

    def request(self) -> SampleRequest:
        """Build the sample request of the next turn."""
        prompt = self._context + self._observation
        room = max(self._limits.max_length - len(prompt), 1)
        return SampleRequest(
            prompt_tokens=prompt,
            seed=derive_seed(self._attempt.seed, len(self._turns)),
            max_new_tokens=min(self._limits.max_new_tokens, room, self._tokens_left),
            temperature=self._attempt.temperature,
            conversation=self._attempt.id,
        )

    def add_generation(self, generation: Generation) -> str:
        r"""Add a turn with the policy's reply, and return the assistant's turn as text.

        The text is the reply, after what the generation prompt adds to the turn, such as `<think>\n`. Without it,
        environments would take unclosed thoughts for an answer, and a reward for the format would miss the tag.

        Raises:
            ValueError: if the generation has the experts of another number of tokens.
        """
        generation = keep_new_experts(self._attempt.id, generation, len(self._context), len(self._observation))
        reply = self._tokenizer.decode_reply(generation.token_ids)
        self._reply_starts.append(self._reply_start)
        number = len(self._turns)
        turn = Turn(
            observation_tokens=self._observation,
            generation=generation,
            messages=(*self._messages, {"role": "assistant", "content": reply}),
            anchor_state=self._anchor,
            starts_sequence=not self._context,
        )
        self._turns.append(turn)
        if logger.isEnabledFor(logging.DEBUG):
            _log_generation(f"rollout {self._attempt.id} turn {number}", turn, self._anchor_state)
        if generation.stop_reason is StopReason.ABORT:
            self.over = True
            self.fail(
                RolloutStatus.ABORTED,
                f"the engine aborted the generation of turn {number} after {len(generation.token_ids)} tokens "
                f"(stop reason {generation.stop_reason.value})",
            )
        return self._reply_start + reply

    def add_observation(self, step: Step) -> None:
        """Add the environment's step after the last reply, and prepare the next turn or end the rollout.

        Raises:
            EnvironmentFault: if the step is invalid.
        """
        with _environment_errors():
            rewards, metrics = _numbers("rewards", step.rewards), _numbers("metrics", step.metrics)
            _check_messages(step)
            check_info(step.rollout_info)
            if step.action is not None and not isinstance(step.action, str):
                raise TypeError(
                    f"the environment's step has an action of type {type(step.action).__name__}; use a text"
                )
            turn = dataclasses.replace(self._turns[-1], action=step.action, rewards=rewards, info=dict(step.info))
        self._turns[-1] = turn
        self._add_rewards(rewards)
        self._metrics |= metrics
        self._info |= step.rollout_info
        logger.debug(
            "rollout %s turn %d: structured action %r, rewards %s, done %s, next %s",
            self._attempt.id,
            len(self._turns) - 1,
            turn.messages[-1]["content"] if step.action is None else step.action,
            rewards,
            step.done,
            [*step.messages],
        )
        if step.done:
            self.over = True
            self._last_observation = Observation(step.messages) if step.messages else None
            return

        sequence = self._context + self._observation + turn.generation.token_ids
        with _environment_errors():
            tokens, starts_sequence = self._tokenizer.observation_tokens(self._history, sequence, step.messages)
        context = () if starts_sequence else sequence
        no_room = len(context) + len(tokens) >= self._limits.max_length
        if no_room or len(self._turns) >= self._limits.max_turns or self._tokens_left < 1:
            self.over = self._hit_limit = True
            self._last_observation = Observation(step.messages, tokens, starts_sequence)
            return
        with _environment_errors():
            self._anchor = state_hash(step.messages, step.anchor_state)
        self._messages, self._anchor_state = step.messages, step.anchor_state
        self._observation, self._context = tokens, context
        self._reply_start = self._tokenizer.reply_start(tokens)

    def add_agent_turns(
        self, turns: Sequence[Turn], result: AgentResult, posted: Mapping[str, float], *, hit_limit: bool
    ) -> None:
        """Add the turns and the result of an agent's episode, and end the rollout.

        The turns of a sequence follow each other. `result` has the rewards of the episode without those of the turns,
        and `posted` further ones. `hit_limit` means that a limit of the rollout refused a request of the agent.

        Raises:
            EnvironmentFault: if a value of the result is invalid.
        """
        self.over, self._is_agent, self._hit_limit = True, True, hit_limit
        self._turns += turns
        for turn in turns:
            self._reply_starts.append(self._tokenizer.reply_start(turn.observation_tokens))
            self._add_rewards(turn.rewards)
        if not (turns or self.has_failed):
            raise EnvironmentFault(RolloutStatus.FAILED, "the agent got no reply of the policy")
        with _environment_errors():
            check_info(result.info)
            self._metrics |= _numbers("metrics", result.metrics)
            for rewards in (posted, result.rewards):
                self._add_rewards({name: check_reward(name, value) for name, value in rewards.items()})
        self._info |= result.info

    def reward_request(self) -> RewardRequest:
        """Build the arguments of reward functions; call it after the last turn."""
        last = () if self._last_observation is None else self._last_observation.messages
        prompt = self._turns[0].messages[:-1] if self._turns else self.task.messages
        history: list[Message] = []
        for turn, start in zip(self._turns, self._reply_starts, strict=True):
            *observed, reply = turn.messages
            history += [*observed, Message(role=reply["role"], content=start + reply["content"])]
        return RewardRequest(
            rollout_id=self._attempt.id,
            messages=(*history, *last),
            ground_truth=self.task.answer,
            task_id=self.task.id,
            environment=self.task.environment,
            status=self._status.value,
            num_prompt_messages=len(prompt),
            group_seed=self._attempt.start_seed,
        )

    def draw_rewards(self, random_rewards: RandomRewards) -> None:
        """Replace all rewards by random ones, if the task has them; call it after the last turn, which gets them."""
        rewards = random_rewards.draw(self.task, self._attempt.start_seed, self._attempt.id)
        if rewards is None or self.has_failed:
            return
        self._has_random_rewards = True
        self._rewards.clear()
        self._add_rewards(rewards)
        self._turns = [dataclasses.replace(turn, rewards=dict.fromkeys(rewards, 0.0)) for turn in self._turns]
        self._turns[-1] = dataclasses.replace(self._turns[-1], rewards=dict(rewards))

    def add_rewards(self, evaluations: Sequence[RewardResult]) -> None:
        """Add the results of reward functions, one per component. If one has no valid score, the rollout fails."""
        self._evaluations += evaluations
        missing = failure(evaluations)
        clashes = [result.component for result in evaluations if result.component in self._rewards]
        if missing is None and clashes:
            missing = f"reward {clashes[0]!r} has the name of a reward of the environment; set another `name`"
        if missing is not None:
            self.fail(RolloutStatus.FAILED, missing)
            return
        self._add_rewards(weighted_rewards(evaluations))
        for index, rewards in enumerate(turn_rewards(evaluations, len(self._turns))):
            if rewards:
                turn = self._turns[index]
                self._turns[index] = dataclasses.replace(turn, rewards={**turn.rewards, **rewards})

    def fail(self, status: RolloutStatus, error: str) -> None:
        """Mark the rollout as failed; `FailureReports` summarizes the errors of a step."""
        self._failure, self._error = status, storable(error, MAX_ERROR)
        logger.debug("rollout %s %s: %s", self._attempt.id, status.value.replace("_", " "), self._error)

    def finish(self) -> Rollout:
        """Build the rollout.

        If a limit ended the rollout before the environment or a reward function gave any reward, its reward is 0, as
        component `truncated`, because an environment may give its rewards only at the end.

        Raises:
            ValueError: if a reward is NaN or infinite, or if there is no reward; the message names the rollout.
        """
        unrewarded = {RolloutStatus.TRUNCATED.value: 0.0} if self._hit_limit else {}
        if self._is_agent and not (self.has_failed or self._rewards or unrewarded):
            self.fail(
                RolloutStatus.FAILED,
                "the agent neither returned nor posted a reward, and there is no reward function (environment.rewards)",
            )
        rewards = {name: exact_sum(values) for name, values in self._rewards.items()}
        rollout = Rollout(
            id=self._attempt.id,
            group_id=self._attempt.group_id,
            task=self.task,
            turns=tuple(self._turns),
            status=self._status,
            rewards={} if self.has_failed else rewards or unrewarded,
            error=self._error,
            evaluations=tuple(self._evaluations),
            metrics=self._metrics,
            seconds=self.seconds,
            last_observation=self._last_observation,
            info=self._info,
        )
        if logger.isEnabledFor(logging.DEBUG):
            logger.debug(
                "rollout %s of task %s: %s, %d turns, %d tokens, reward %s",
                rollout.id,
                rollout.task.id,
                rollout.status.value,
                len(rollout.turns),
                rollout.num_generated_tokens,
                "none" if rollout.total_reward is None else f"{rollout.total_reward:g}",
            )
        return rollout

    def _add_rewards(self, rewards: Mapping[str, float]) -> None:
        for name, value in rewards.items():
            self._rewards[name].append(value)

    @property
    def _history(self) -> list[Message]:
        """The messages of all turns so far, with the replies."""
        return [message for turn in self._turns for message in turn.messages]

    @property
    def _status(self) -> RolloutStatus:
        if self._failure is not None:
            return self._failure
        is_truncated = self._hit_limit or any(turn.generation.stop_reason is StopReason.LENGTH for turn in self._turns)
        return RolloutStatus.TRUNCATED if is_truncated else RolloutStatus.COMPLETED

    @property
    def _tokens_left(self) -> int:
        if self._limits.max_tokens is None:
            return self._limits.max_new_tokens
        return self._limits.max_tokens - sum(len(turn.generation.token_ids) for turn in self._turns)


@contextlib.contextmanager
def _environment_errors() -> Iterator[None]:
    """Convert errors of invalid values from the environment to an `EnvironmentFault`."""
    try:
        yield
    except BaseException as error:
        # A value of other people's classes may raise anything.
        raise EnvironmentFault(RolloutStatus.FAILED, explain(error)) from error


def _numbers(field: str, values: Mapping[str, float]) -> dict[str, float]:
    """Return rewards or metrics of an environment as floats."""
    for name in values:
        if not isinstance(name, str):
            raise TypeError(f"{field} of the environment have the name {name!r:.200}; a name must be a text")
    return {name: float(value) for name, value in values.items()}


def _check_messages(step: Step) -> None:
    """Check that the policy can continue, and that the messages are valid text for tokenizers and JSON files."""
    if not step.done and not step.messages:
        raise ValueError("the environment's step is not done, but has no messages for the policy")
    for index, message in enumerate(step.messages):
        try:
            for text in (message["role"], message["content"]):
                text.encode("utf-8")
            # Further keys are stored as JSON.
            json.dumps(message)
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            raise ValueError(
                f"message {index} of the environment's step is {message!r:.200}; role and content must be strings "
                f"without lone surrogates, and all values JSON ({type(error).__name__}: {error})"
            ) from error
    if any(message["role"] == "assistant" for message in step.messages):
        raise ValueError(
            "the environment's step has a message of role 'assistant'; only the policy may use this role, which "
            "assigns step rewards to turns: use 'user' or 'tool'"
        )


def _log_generation(place: str, turn: Turn, anchor_state: object) -> None:
    """Log the observation, the raw action with the policy's log-probabilities, and the anchor state of GiGPO."""
    *observed, reply = turn.messages
    sampled = turn.generation
    logger.debug("%s: observation %s", place, observed)
    logger.debug(
        "%s: action %r, stop reason %s, tokens %s, log-probs [%s]",
        place,
        reply["content"],
        sampled.stop_reason.value,
        list(sampled.token_ids),
        ", ".join(f"{value:.6g}" for value in sampled.logprobs),
    )
    state = observed if anchor_state is None else anchor_state
    logger.debug("%s: anchor state %s, hash %s", place, state, turn.anchor_state)
