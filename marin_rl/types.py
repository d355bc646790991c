# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""The records that flow through marin_rl, with the producer and the consumers of each.

| stage | record | produced by | consumed by |
|---|---|---|---|
| 1 task | [`Task`][marin_rl.types.Task] | an environment's dataset | environment, rollout runner |
| 2 answer | [`Generation`][marin_rl.types.Generation] | the sampler only | rollout runner |
| 3 step | [`Turn`][marin_rl.types.Turn] | rollout runner | rewards, batching |
| 4 attempt | [`Rollout`][marin_rl.types.Rollout] | rollout runner | rewards, batching, store |
| 5 group | [`RolloutGroup`][marin_rl.types.RolloutGroup] | rollout runner | advantages |
| 6 arrays | `RolloutBatch`, numpy arrays over the tokens of all rollouts | `batching/` | scoring, advantages |
| 7 advantages | `AdvantageInputs` in, `TokenAdvantages` out | `objectives/`, called by the loop | `RolloutBatch` |
| 8 batch | `RlExample`, haliax `{batch, position}` | `batching/` | learner |
| 9 update | new weights, a new `WeightVersion` | learner | sampler |

Only weights flow backwards. Importing this module does not load jax.

A worked example with two turns, the tokens written as words:

```
Task.messages            [user: "2+3="]
Turn 0  observation      <user> 2 + 3 = <end> <assistant>      (no loss)
        generation       6 <end>                                (loss)
Turn 1  observation      <user> wrong <end> <assistant>        (no loss; continues turn 0)
        generation       5 <end>                                (loss)
```

This rollout is one sequence: the observation and generation tokens of its turns, concatenated.
If the chat template rewrites the history before turn 1, that turn has `starts_sequence=True`, and its
observation is the complete rewritten context. The rollout then becomes two sequences. In both cases
only sampled tokens carry loss.
"""

import dataclasses
import enum
import json
import math
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NotRequired, TypedDict, TypeVar

if TYPE_CHECKING:
    import numpy as np

Record = TypeVar("Record")


def make_unchecked(kind: type[Record], **fields: Any) -> Record:
    """Make a frozen record from values that were checked before. The checks of many records take long.

    Only fields with a default may be omitted. Names and values are not checked.
    """
    record = object.__new__(kind)
    vars(record).update(fields)
    return record


Info = Mapping[str, Any]
"""Free metadata by name: JSON values (strings, finite numbers, booleans, null, lists, objects with string keys)."""


def exact_sum(values: Collection[float]) -> float:
    """Return the sum of rewards, rounded once, so that it does not depend on their order.

    A sum that is not finite is the usual one, which the checks of rewards report.

    >>> exact_sum([0.1, 0.2, 0.3]) == exact_sum([0.3, 0.2, 0.1]), 0.1 + 0.2 + 0.3 == 0.3 + 0.2 + 0.1
    (True, False)
    """
    try:
        return math.fsum(values)
    except (OverflowError, ValueError):
        return sum(values, 0.0)


def check_info(info: Info) -> None:
    """Check that free metadata consists of JSON values, so that it is stored and read back unchanged.

    Raises:
        ValueError: if a value is not a JSON value; the message names the first such key.
    """
    for key, value in info.items():
        # Encoding a text to find that it is JSON takes most of the time, for the reason of each reward.
        if type(key) is type(value) is str:
            continue
        try:
            same = type(key) is str and json.loads(json.dumps(value, allow_nan=False)) == value
            problem = "JSON reads it back differently"
        except (TypeError, ValueError, RecursionError) as error:
            same, problem = False, str(error)
        if not same:
            raise ValueError(
                f"info[{key!r}] is not a JSON value ({problem}); use string keys, and strings, finite numbers, "
                "booleans, None, lists and dictionaries"
            )


WeightVersion = int
"""The number of training steps that produced a set of weights: 0 before the first step.

Staleness is a difference of two versions."""


class Message(TypedDict):
    """One chat message in the form of Hugging Face chat templates."""

    role: str
    """`system`, `user`, `assistant` or `tool`."""
    content: str
    """The message's text."""
    tools: NotRequired[Sequence[Mapping[str, Any]]]
    """JSON schemas of the tools that the policy may call, for chat templates that support tools."""
    tools_in_words: NotRequired[str]
    """A text description of the same tools, appended to `content` if the chat template does not support tools."""


class StopReason(enum.StrEnum):
    """Why the sampler stopped a generation."""

    STOP = "stop"
    """A stop token was sampled, or a token that completes a stop text; it is the generation's last token."""
    LENGTH = "length"
    """The limit on new tokens or the end of the context was reached first."""
    ABORT = "abort"
    """The engine aborted the request, for example a server that aborts all requests to load new weights."""


class RolloutStatus(enum.StrEnum):
    """How a rollout ended."""

    COMPLETED = "completed"
    """The environment ended the rollout, and it was graded."""
    TRUNCATED = "truncated"
    """A generation reached its length limit, or the rollout its turn limit; graded in the state it had then."""
    FAILED = "failed"
    """The environment raised, or a reward component returned no valid score; no reward, not trained on."""
    TIMED_OUT = "timed_out"
    """The environment exceeded the time limit of an episode; no reward, not trained on."""
    ABORTED = "aborted"
    """The engine aborted a generation of the rollout (`stop_reason` `abort`); no reward, not trained on."""

    @property
    def is_graded(self) -> bool:
        """Whether rollouts with this status have rewards."""
        return self in (RolloutStatus.COMPLETED, RolloutStatus.TRUNCATED)


@dataclasses.dataclass(frozen=True)
class Task:
    """One problem to be attempted."""

    id: str
    """Unique within its environment; equal for equal problems."""
    environment: str
    """Name of the environment that created the task and can grade it."""
    messages: tuple[Message, ...]
    """The prompt: the messages that the policy sees before its first turn. At least one."""
    answer: str
    """The ground truth: if replies are compared with it, the text that is right, such as `64` for 46 if replies are
    reversed. Empty if there is none; the tests of a program for the reward component `code`."""
    worked_answer: str | None = None
    """A reply that earns full reward, for a supervised warm start; None if the task has none."""
    anchor_state: object = None
    """A JSON value that identifies the state shown by the prompt (GiGPO); None: the prompt identifies it."""

    def __post_init__(self) -> None:
        if not self.messages:
            raise ValueError(f"Task {self.id!r} has no messages; a prompt needs at least one")


EXPERT_DTYPES = ("uint8", "uint16")
"""Types of the arrays of chosen experts."""


def no_expert(dtype: "np.dtype") -> int:
    """Return the number that marks "no recorded choice" in an array of experts: the largest of its type.

    The learner then routes the token itself.
    """
    return 256**dtype.itemsize - 1


@dataclasses.dataclass(frozen=True)
class Generation:
    """The tokens that the sampler produced in one call, with their log-probabilities."""

    token_ids: tuple[int, ...]
    """`[length]`, the sampled tokens, including the stop token."""
    logprobs: tuple[float, ...]
    """`[length]`, log-probability (nats) of each sampled token at the sampling temperature; for greedy
    samples (temperature 0), at temperature 1."""
    stop_reason: StopReason
    """Why sampling ended."""
    first_version: WeightVersion
    """Version of the weights that produced the first token."""
    last_version: WeightVersion
    """Version of the weights that produced the last token; never less than `first_version`."""
    experts: "np.ndarray | None" = dataclasses.field(default=None, compare=False)
    """`[positions, layers, experts_per_token]`, uint8 or uint16, the experts that the router chose for the tokens of
    the context except the last: prompt, then sampled. `layers` are those with experts. The largest value of the type
    marks "no recorded choice". None if the sampler does not report them.

    In a [`Turn`][marin_rl.types.Turn], only the rows that no earlier turn of its sequence has: without those of the
    context before the previous turn's last token."""

    def __post_init__(self) -> None:
        if len(self.token_ids) != len(self.logprobs):
            raise ValueError(
                f"Generation: token_ids has length {len(self.token_ids)} but logprobs has length {len(self.logprobs)}"
            )
        # The sum is not finite if any log-prob is not; then, or after an overflow, find the first invalid one.
        if self.logprobs and not (math.isfinite(sum(self.logprobs)) and max(self.logprobs) <= 0.0):
            for index, value in enumerate(self.logprobs):
                if not math.isfinite(value) or value > 0.0:
                    raise ValueError(f"Generation: logprobs[{index}] is {value}; a log-probability is finite and <= 0")
        if self.last_version < self.first_version:
            raise ValueError(
                f"Generation: last_version {self.last_version} is older than first_version {self.first_version}"
            )
        if self.experts is not None and (self.experts.ndim != 3 or self.experts.dtype not in EXPERT_DTYPES):
            raise ValueError(
                f"Generation: experts is {self.experts.dtype} of shape {self.experts.shape}, expected uint8 or uint16 "
                "of shape [positions, layers, experts_per_token]"
            )


@dataclasses.dataclass(frozen=True)
class TurnReward:
    """The reward that a component gave to one turn."""

    turn: int
    """Index into `Rollout.turns`."""
    base_reward: float
    """The turn's reward, not multiplied by the component's weight."""
    reason: str | None = None
    """Explanation in text."""
    metrics: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """Metrics to log."""


class RewardFailure(enum.StrEnum):
    """Cause for which a rollout has no score; failures are counted under these names."""

    TIMEOUT = "timeout"
    """The call took longer than `wall_seconds`."""
    CPU = "cpu"
    """It used more than `cpu_seconds` of CPU time."""
    MEMORY = "memory"
    """It requested more memory than `memory_mb`."""
    FILE_SIZE = "file_size"
    """It wrote a file larger than `file_mb`, or its files used more than four times as much space."""
    OUTPUT = "output"
    """It printed or returned more than `output_kb`."""
    PROCESSES = "processes"
    """It had more than `processes` processes."""
    THREADS = "threads"
    """It had more than `threads` threads."""
    SIGNAL = "signal"
    """A signal terminated it, for example after a crash."""
    EXITED = "exited"
    """Its process exited without an answer."""
    INVALID_ANSWER = "invalid_answer"
    """Its answer is not a valid result, or an LLM judge's answer holds no valid scores after all retries."""
    RAISED = "raised"
    """It raised an exception."""
    WORKER = "worker"
    """The worker process died, did not answer, or could not confine the call."""
    INVALID_SCORE = "invalid_score"
    """The function returned `is_score_valid=False`."""
    STEP_INDEX = "step_index"
    """A step index does not refer to a message of the policy, or is repeated."""
    REQUEST = "request"
    """An LLM judge or another service did not answer after all retries."""


@dataclasses.dataclass(frozen=True)
class RewardResult:
    """The result of one reward component for one rollout."""

    component: str
    """The component's name."""
    weight: float
    """Multiplier of the component's scores."""
    score: float | None
    """The score, not multiplied by the weight; the sum of the turn rewards if the component returned no total. None if
    the score is invalid or the call failed."""
    steps: tuple[TurnReward, ...] = ()
    """Rewards of single turns, in turn order; at most one per turn."""
    metrics: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """Metrics to log."""
    reason: str | None = None
    """Explanation in text."""
    error: str | None = None
    """The error message of a failed call, or the error that the component returned with a valid score."""
    failure: str | None = None
    """The value of a `RewardFailure`, by which failed calls are counted; None if there is a score."""

    def __post_init__(self) -> None:
        if (self.score is None) != (self.failure is not None):
            raise ValueError(
                f"RewardResult of {self.component!r}: score is {self.score} and failure is {self.failure!r}; "
                "exactly one of them is None"
            )


@dataclasses.dataclass(frozen=True)
class Turn:
    """One step of a rollout: an observation and the policy's reply."""

    observation_tokens: tuple[int, ...]
    """`[length]`, tokens added to the context since the policy's previous reply (the whole prompt in turn 0).
    They never carry loss."""
    generation: Generation
    """The policy's reply."""
    messages: tuple[Message, ...]
    """The turn as messages: those of the observation, then the assistant's."""
    rewards: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """Rewards of this turn, weights included: by the environment's names, and by component for the turn rewards of
    reward functions. Empty if the turn has none. The rollout's return is the sum of `Rollout.rewards`."""
    anchor_state: str = ""
    """Hash of the observed state; equal within a group for turns in the same state (GiGPO). Empty if unused."""
    starts_sequence: bool = False
    """True if `observation_tokens` is the complete context instead of a continuation: in turn 0,
    if the chat template rewrote the history, and if an agent began another conversation."""
    action: str | None = None
    """The action that the environment parsed from the reply; None if it is the reply itself."""
    info: Info = dataclasses.field(default_factory=dict)
    """The environment's free metadata about this turn; only stored and displayed."""

    def __post_init__(self) -> None:
        check_info(self.info)

    @property
    def reward(self) -> float | None:
        """The sum of the turn's rewards; None if it has none."""
        return exact_sum(self.rewards.values()) if self.rewards else None

    @property
    def num_tokens(self) -> int:
        """Number of tokens of the observation and the generation."""
        return len(self.observation_tokens) + len(self.generation.token_ids)


@dataclasses.dataclass(frozen=True)
class Observation:
    """Messages that the environment sent after the policy's last generation; no generation follows them."""

    messages: tuple[Message, ...]
    """The messages. At least one."""
    tokens: tuple[int, ...] = ()
    """`[length]`, the messages as tokens of the next turn; empty if the environment ended the episode, because then no
    next turn was prepared."""
    starts_sequence: bool = False
    """True if `tokens` is the complete context instead of a continuation, as in `Turn`."""

    def __post_init__(self) -> None:
        if not self.messages:
            raise ValueError("Observation has no messages; use None if the environment sent nothing")


MAX_REWARD = 1e30
"""Largest magnitude of a reward; values computed from rewards then fit into float32."""


@dataclasses.dataclass(frozen=True)
class Rollout:
    """One complete attempt at a task (also called an episode or a trajectory)."""

    id: str
    """Unique within the run."""
    group_id: str
    """The group of the rollout: all attempts at one prompt in one step."""
    task: Task
    """The attempted task."""
    turns: tuple[Turn, ...]
    """The turns in order. At least one, unless the rollout failed before its first turn."""
    status: RolloutStatus
    """How the rollout ended."""
    rewards: Mapping[str, float]
    """Reward by component name, weights included; empty exactly if `status` is not a graded one."""
    error: str | None = None
    """The error message if `status` is not a graded one."""
    evaluations: tuple[RewardResult, ...] = ()
    """The result of each reward component, including failed calls."""
    metrics: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """The environment's metrics by name."""
    seconds: Mapping[str, float] = dataclasses.field(default_factory=dict, compare=False)
    """Seconds spent in `sample` (including the wait for the sampler), `environment` and `reward`."""
    last_observation: Observation | None = None
    """The environment's response to the last generation, such as the result of a tool call; None if it sent none.
    Reward functions and the rollout store receive it. Batches do not contain it, because in a causal model it has no
    effect on the tokens before it."""
    info: Info = dataclasses.field(default_factory=dict)
    """The environment's free metadata about the whole rollout; only stored and displayed."""

    def __post_init__(self) -> None:
        try:
            check_info(self.info)
        except ValueError as error:
            raise ValueError(f"Rollout {self.id}: {error}") from error
        if not self.status.is_graded:
            if self.rewards:
                raise ValueError(
                    f"Rollout {self.id}: status is {self.status.value} but rewards has length {len(self.rewards)}"
                )
            return
        if not self.turns:
            raise ValueError(f"Rollout {self.id}: status is {self.status.value} but turns has length 0")
        if not self.turns[0].starts_sequence:
            raise ValueError(f"Rollout {self.id}: turns[0].starts_sequence is False; the first turn starts a sequence")
        if not self.rewards:
            raise ValueError(
                f"Rollout {self.id}: status is {self.status.value} but it has no reward; neither its environment nor "
                "a reward function (environment.rewards) gave one"
            )
        turns = ((f" of turn {index}", turn.rewards) for index, turn in enumerate(self.turns))
        for place, rewards in (("", self.rewards), *turns):
            for name, value in rewards.items():
                if not abs(value) <= MAX_REWARD:
                    raise ValueError(
                        f"Rollout {self.id}: reward {name!r}{place} is {value}; rewards must be finite, and at most "
                        f"{MAX_REWARD:g} in magnitude (environment {self.task.environment!r})"
                    )

    @property
    def messages(self) -> tuple[Message, ...]:
        """The whole conversation: prompt, replies and environment messages, including the last observation."""
        turns = tuple(message for turn in self.turns for message in turn.messages)
        return turns if self.last_observation is None else (*turns, *self.last_observation.messages)

    @property
    def total_reward(self) -> float | None:
        """The scalar return: the exact sum of the rewards, rounded once, or None if there are none."""
        return exact_sum(self.rewards.values()) if self.rewards else None

    def score_of(self, component: str) -> float | None:
        """A component's score, not multiplied by a reward function's weight; None if the component has no score."""
        if component not in self.rewards:
            return None
        scores = [result.score for result in self.evaluations if result.component == component]
        return next((score for score in scores if score is not None), self.rewards[component])

    @property
    def num_tokens(self) -> int:
        """Number of tokens of all turns (observations and generations); a rewritten context is counted again."""
        return sum(turn.num_tokens for turn in self.turns)

    @property
    def num_generated_tokens(self) -> int:
        """Number of tokens that the policy sampled in all turns."""
        return sum(len(turn.generation.token_ids) for turn in self.turns)


@dataclasses.dataclass(frozen=True)
class RolloutGroup:
    """The attempts at one prompt; advantages compare their rewards."""

    id: str
    """Unique within the run."""
    rollouts: Sequence[Rollout]
    """All attempts, including failed ones."""

    def __post_init__(self) -> None:
        for rollout in self.rollouts:
            if rollout.group_id != self.id:
                raise ValueError(f"RolloutGroup {self.id}: rollout {rollout.id} belongs to group {rollout.group_id}")
