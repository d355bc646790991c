# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""The records that flow through marin_rl, and who makes and consumes each of them.

| stage | record | made by | consumed by |
|---|---|---|---|
| 1 task | [`Task`][marin_rl.types.Task] | an environment's dataset | environment, rollout runner |
| 2 answer | [`Generation`][marin_rl.types.Generation] | the sampler, and nothing else | rollout runner |
| 3 step | [`Turn`][marin_rl.types.Turn] | rollout runner | rewards, batching |
| 4 attempt | [`Rollout`][marin_rl.types.Rollout] | rollout runner | rewards, batching, store |
| 5 group | [`RolloutGroup`][marin_rl.types.RolloutGroup] | rollout runner | advantages |
| 6 advantages | `AdvantageInputs` in, `TokenAdvantages` out | `objectives/`, called by the loop | batching |
| 7 arrays | `ProcessedRollout`, numpy `[batch, position]` | `batching/` | `RlExample` |
| 8 batch | `RlExample`, haliax `{batch, position}` | `batching/` | learner |
| 9 update | new weights, a new `WeightVersion` | learner | sampler |

Nothing flows backwards except weights. Importing this module loads no jax.

A worked example with two turns, the tokens written as words:

```
Task.messages            [user: "2+3="]
Turn 0  observation      <user> 2 + 3 = <end> <assistant>      (no loss)
        generation       6 <end>                                (loss)
Turn 1  observation      <user> wrong <end> <assistant>        (no loss; continues turn 0)
        generation       5 <end>                                (loss)
```

One rollout, one sequence: the observation and generation tokens of its turns, one after the other.
If the chat template had rewritten the history before turn 1, that turn would carry
`starts_sequence=True` and its observation would be the complete rewritten context: the rollout
then becomes two sequences, and still no token is trained on that was not sampled.
"""

import dataclasses
import enum
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, NotRequired, TypedDict

Info = Mapping[str, Any]
"""Free metadata: JSON values (text, finite numbers, booleans, null, lists, mappings with text keys), by name."""


def check_info(info: Info) -> None:
    """Check that free metadata is made of JSON values alone, so that it is stored and read back unchanged.

    Raises:
        ValueError: if it is not; the message names the first key whose value is none.
    """
    for key, value in info.items():
        try:
            same = type(key) is str and json.loads(json.dumps(value, allow_nan=False)) == value
            problem = "JSON reads it back differently"
        except (TypeError, ValueError, RecursionError) as error:
            same, problem = False, str(error)
        if not same:
            raise ValueError(
                f"info[{key!r}] is no JSON value ({problem}); use text keys, and text, finite numbers, booleans, None, "
                "lists and dictionaries"
            )


WeightVersion = int
"""The number of training steps behind a set of weights: 0 before the first. The only clock there is."""


class Message(TypedDict):
    """One chat message, as Hugging Face chat templates take it."""

    role: str
    """`system`, `user`, `assistant` or `tool`."""
    content: str
    """The message's text."""
    tools: NotRequired[Sequence[Mapping[str, Any]]]
    """JSON schemas of tools that the policy may call, for chat templates that have words of their own for them."""
    tools_in_words: NotRequired[str]
    """The same in words, for chat templates that have none: they are put behind `content`."""


class StopReason(enum.StrEnum):
    """Why the sampler stopped a generation."""

    STOP = "stop"
    """A stop token was sampled; it is the generation's last token."""
    LENGTH = "length"
    """The limit on new tokens, or the end of the context, was reached first."""
    ABORT = "abort"
    """The engine gave the request up before either, as a server does that is told to abort its requests."""


class RolloutStatus(enum.StrEnum):
    """How a rollout ended."""

    COMPLETED = "completed"
    """The environment ended it, and it was graded."""
    TRUNCATED = "truncated"
    """A generation hit its length limit, or the turns ran out; graded as it stands."""
    FAILED = "failed"
    """Its environment raised, or a reward component gave it no valid score; it has no reward and carries no signal."""
    TIMED_OUT = "timed_out"
    """Its environment took longer than an episode may; no reward and no signal either."""
    ABORTED = "aborted"
    """The engine aborted one of its generations, whose `stop_reason` is `abort`; no reward and no signal either."""

    @property
    def is_graded(self) -> bool:
        """Whether rollouts that ended so have rewards."""
        return self in (RolloutStatus.COMPLETED, RolloutStatus.TRUNCATED)


@dataclasses.dataclass(frozen=True)
class Task:
    """One problem to be attempted."""

    id: str
    """Unique within its environment; equal for equal problems."""
    environment: str
    """Name of the environment that made it and can grade it."""
    messages: tuple[Message, ...]
    """The prompt: what the policy sees before its first turn. At least one message."""
    answer: str
    """The ground truth that the environment grades against."""
    worked_answer: str | None = None
    """A reply that would earn full reward, for a supervised warm start; None where there is none."""
    anchor_state: object = None
    """What identifies the state that the prompt shows (GiGPO), as JSON can hold it; None: the prompt itself."""

    def __post_init__(self) -> None:
        if not self.messages:
            raise ValueError(f"Task {self.id!r} has no messages; a prompt needs at least one")


@dataclasses.dataclass(frozen=True)
class Generation:
    """What the sampler produced in one call: exact tokens, and how likely they were."""

    token_ids: tuple[int, ...]
    """`[length]`, the sampled tokens, the stop token included."""
    logprobs: tuple[float, ...]
    """`[length]`, log-probability (nats) of each sampled token at the sampling temperature. Greedy
    samples (temperature 0) carry those at temperature 1."""
    stop_reason: StopReason
    """Why it ended."""
    first_version: WeightVersion
    """Version of the weights that produced the first token."""
    last_version: WeightVersion
    """Version of the weights that produced the last token; never less than `first_version`."""

    def __post_init__(self) -> None:
        if len(self.token_ids) != len(self.logprobs):
            raise ValueError(
                f"Generation: token_ids has length {len(self.token_ids)} but logprobs has length {len(self.logprobs)}"
            )
        for index, value in enumerate(self.logprobs):
            if not math.isfinite(value) or value > 0.0:
                raise ValueError(f"Generation: logprobs[{index}] is {value}; a log-probability is finite and <= 0")
        if self.last_version < self.first_version:
            raise ValueError(
                f"Generation: last_version {self.last_version} is older than first_version {self.first_version}"
            )


@dataclasses.dataclass(frozen=True)
class TurnReward:
    """What a reward component said about one turn."""

    turn: int
    """Index into `Rollout.turns`."""
    base_reward: float
    """The turn's reward, before the component's weight."""
    reason: str | None = None
    """Why, in words."""
    metrics: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """Numbers to log."""


@dataclasses.dataclass(frozen=True)
class RewardResult:
    """What one reward component said about a rollout."""

    component: str
    """The component's name."""
    weight: float
    """What its scores are multiplied by."""
    score: float | None
    """The score before the weight, the sum of the step rewards if the component gave no score of its own; None where it
    is not valid or was lost."""
    steps: tuple[TurnReward, ...] = ()
    """Its words on single turns, in their order; at most one a turn."""
    metrics: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """Numbers to log."""
    reason: str | None = None
    """Why, in words."""
    error: str | None = None
    """What went wrong, where something did."""
    lost: str | None = None
    """Why there is no score, as counted (`timeout`, `memory`, …); None where there is one."""

    def __post_init__(self) -> None:
        if (self.score is None) != (self.lost is not None):
            raise ValueError(
                f"RewardResult of {self.component!r}: score is {self.score} and lost is {self.lost!r}; "
                "exactly one of them is None"
            )


@dataclasses.dataclass(frozen=True)
class Turn:
    """One step of a rollout: what the policy was shown, and what it answered."""

    observation_tokens: tuple[int, ...]
    """`[length]`, tokens put before the policy since its last answer (the whole prompt in turn 0).
    They never carry loss."""
    generation: Generation
    """The policy's answer."""
    messages: tuple[Message, ...]
    """The turn in words: the observation's messages, then the assistant's."""
    rewards: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """Rewards of this turn alone, weights included: by the environment's names, and by component for the step rewards
    of reward functions. Empty if nobody gave one. The rollout's return is the sum of `Rollout.rewards`."""
    anchor_state: str = ""
    """A hash of what was observed; turns of a group with the same one stood at the same place (GiGPO). Empty where
    nobody needs it."""
    starts_sequence: bool = False
    """True where `observation_tokens` is the complete context instead of a continuation: in turn 0,
    and wherever the chat template rewrote the history."""
    action: str | None = None
    """What the environment took the reply for; None where that is the reply itself."""
    info: Info = dataclasses.field(default_factory=dict)
    """The environment's free metadata about this turn; stored and shown, and used for nothing else."""

    def __post_init__(self) -> None:
        check_info(self.info)

    @property
    def reward(self) -> float | None:
        """The sum of its rewards; None if it has none."""
        return sum(self.rewards.values(), 0.0) if self.rewards else None

    @property
    def num_tokens(self) -> int:
        """Tokens of its observation and its generation."""
        return len(self.observation_tokens) + len(self.generation.token_ids)


@dataclasses.dataclass(frozen=True)
class Observation:
    """Messages that the environment sent after the policy's last generation; no generation answers them."""

    messages: tuple[Message, ...]
    """The messages. At least one."""
    tokens: tuple[int, ...] = ()
    """`[length]`, the messages as tokens, as the next turn would have had them; empty if the environment had ended
    the episode, so that no next turn was prepared."""
    starts_sequence: bool = False
    """True if `tokens` is the complete context instead of a continuation, as in `Turn`."""

    def __post_init__(self) -> None:
        if not self.messages:
            raise ValueError("Observation has no messages; use None if the environment sent nothing")


MAX_REWARD = 1e30
"""Largest magnitude of a reward: what is worked out from rewards still fits into float32."""


@dataclasses.dataclass(frozen=True)
class Rollout:
    """One complete attempt at a task (elsewhere: an episode, a trajectory)."""

    id: str
    """Unique within the run."""
    group_id: str
    """The group it belongs to: all attempts at one prompt in one step."""
    task: Task
    """What was attempted."""
    turns: tuple[Turn, ...]
    """In order. At least one, unless the rollout failed before its first."""
    status: RolloutStatus
    """How it ended."""
    rewards: Mapping[str, float]
    """Reward by component name, weights included; empty exactly when `status` is not a graded one."""
    error: str | None = None
    """What went wrong, where the status is not a graded one."""
    evaluations: tuple[RewardResult, ...] = ()
    """What each reward component said, lost ones included."""
    metrics: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """What the environment measured, by name."""
    seconds: Mapping[str, float] = dataclasses.field(default_factory=dict, compare=False)
    """Where its time went: `sample`, waiting included, `environment` and `reward`."""
    last_observation: Observation | None = None
    """The environment's answer to the last generation, such as the result of a tool call; None if it sent none.
    Reward functions and the store get it. It is in no batch: a causal model computes the same for the tokens before
    it."""
    info: Info = dataclasses.field(default_factory=dict)
    """The environment's free metadata about the whole attempt; stored and shown, and used for nothing else."""

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
        for name, value in self.rewards.items():
            if not abs(value) <= MAX_REWARD:
                raise ValueError(
                    f"Rollout {self.id}: reward {name!r} is {value}; rewards must be finite, and at most "
                    f"{MAX_REWARD:g} in magnitude"
                )
        for index, turn in enumerate(self.turns):
            for name, value in turn.rewards.items():
                if not abs(value) <= MAX_REWARD:
                    raise ValueError(
                        f"Rollout {self.id}: reward {name!r} of turn {index} is {value}; rewards must be finite, and "
                        f"at most {MAX_REWARD:g} in magnitude"
                    )

    @property
    def messages(self) -> tuple[Message, ...]:
        """The whole conversation: prompt, replies, and the environment's answers, the last one included."""
        turns = tuple(message for turn in self.turns for message in turn.messages)
        return turns if self.last_observation is None else (*turns, *self.last_observation.messages)

    @property
    def total_reward(self) -> float | None:
        """The scalar return: the sum of its rewards, or None where it has none."""
        return sum(self.rewards.values()) if self.rewards else None

    def score_of(self, component: str) -> float | None:
        """What a component gave, before the weight of a reward function; None where it gave nothing."""
        if component not in self.rewards:
            return None
        scores = [one.score for one in self.evaluations if one.component == component and one.score is not None]
        return scores[0] if scores else self.rewards[component]

    @property
    def num_tokens(self) -> int:
        """Tokens of all turns, observations and generations; a context that the template rewrote counts again."""
        return sum(turn.num_tokens for turn in self.turns)

    @property
    def num_generated_tokens(self) -> int:
        """Tokens that the policy sampled, over all turns."""
        return sum(len(turn.generation.token_ids) for turn in self.turns)


@dataclasses.dataclass(frozen=True)
class RolloutGroup:
    """The attempts at one prompt, compared with one another."""

    id: str
    """Unique within the run."""
    rollouts: Sequence[Rollout]
    """All attempts, failed ones included."""

    def __post_init__(self) -> None:
        for rollout in self.rollouts:
            if rollout.group_id != self.id:
                raise ValueError(f"RolloutGroup {self.id}: rollout {rollout.id} belongs to group {rollout.group_id}")
