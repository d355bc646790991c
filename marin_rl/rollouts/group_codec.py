# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Tasks and groups as JSON text and back, nothing lost: what waits in a checkpoint to be played or trained on.

The store of rollouts ([`store`][marin_rl.rollouts.store]) is for people who look at them; this is for the run itself.
"""

import dataclasses
import json
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from marin_rl.types import (
    Generation,
    Observation,
    RewardResult,
    Rollout,
    RolloutGroup,
    RolloutStatus,
    StopReason,
    Task,
    Turn,
    TurnReward,
)

Record = TypeVar("Record")


def encode_task(task: Task) -> dict[str, Any]:
    """A task as JSON values.

    Raises:
        ValueError: if its anchor state is none that JSON can hold; the message names the task.
    """
    return json.loads(_text(task, f"task {task.id!r}", allow_nan=False))


def decode_task(values: Mapping[str, Any]) -> Task:
    """What `encode_task` was given."""
    return _made(Task, values, messages=tuple(values["messages"]))


def encode_group(group: RolloutGroup) -> str:
    """A group as one line of text: JSON, but for metrics that are not finite, which are `NaN` or `Infinity`.

    Raises:
        ValueError: if something in it is nothing that JSON can hold; the message names the group.
    """
    return _text(group, f"group {group.id!r}", allow_nan=True)


def decode_group(text: str) -> RolloutGroup:
    """What `encode_group` was given."""
    values = json.loads(text)
    return RolloutGroup(values["id"], [_rollout(rollout) for rollout in values["rollouts"]])


def _text(record: Task | RolloutGroup, name: str, *, allow_nan: bool) -> str:
    try:
        return json.dumps(dataclasses.asdict(record), allow_nan=allow_nan, separators=(",", ":"))
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name} cannot be saved: {error}") from error


def _made(record: Callable[..., Record], values: Mapping[str, Any], **changed: Any) -> Record:
    """A record of its fields, those named ones excepted."""
    return record(**{**values, **changed})


def _rollout(values: Mapping[str, Any]) -> Rollout:
    return _made(
        Rollout,
        values,
        task=decode_task(values["task"]),
        turns=tuple(_turn(turn) for turn in values["turns"]),
        status=RolloutStatus(values["status"]),
        evaluations=tuple(_evaluation(evaluation) for evaluation in values["evaluations"]),
        last_observation=_observation(values["last_observation"]),
    )


def _observation(values: Mapping[str, Any] | None) -> Observation | None:
    if values is None:
        return None
    return _made(Observation, values, messages=tuple(values["messages"]), tokens=tuple(values["tokens"]))


def _turn(values: Mapping[str, Any]) -> Turn:
    return _made(
        Turn,
        values,
        observation_tokens=tuple(values["observation_tokens"]),
        generation=_generation(values["generation"]),
        messages=tuple(values["messages"]),
    )


def _generation(values: Mapping[str, Any]) -> Generation:
    return _made(
        Generation,
        values,
        token_ids=tuple(values["token_ids"]),
        logprobs=tuple(values["logprobs"]),
        stop_reason=StopReason(values["stop_reason"]),
    )


def _evaluation(values: Mapping[str, Any]) -> RewardResult:
    return _made(RewardResult, values, steps=tuple(TurnReward(**step) for step in values["steps"]))
