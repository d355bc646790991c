# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Lossless JSON encoding of tasks and groups, for checkpoints and rollout workers.

The rollout store ([`store`][marin_rl.rollouts.store]) is for viewing and analysis; this format is for the run itself.
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
    """Convert a task to JSON values.

    Raises:
        ValueError: if its anchor state is not a JSON value; the message names the task.
    """
    return json.loads(_text(task, f"task {task.id!r}", allow_nan=False))


def decode_task(values: Mapping[str, Any]) -> Task:
    """Invert `encode_task`."""
    return _build(Task, values, messages=tuple(values["messages"]))


def encode_group(group: RolloutGroup) -> str:
    """Encode a group as one line of JSON, in which non-finite metrics are `NaN` or `Infinity`.

    Raises:
        ValueError: if the group contains a value that is not JSON; the message names the group.
    """
    return _text(group, f"group {group.id!r}", allow_nan=True)


def decode_group(text: str) -> RolloutGroup:
    """Invert `encode_group`."""
    values = json.loads(text)
    return RolloutGroup(values["id"], [_rollout(rollout) for rollout in values["rollouts"]])


def _text(record: Task | RolloutGroup, name: str, *, allow_nan: bool) -> str:
    try:
        return json.dumps(dataclasses.asdict(record), allow_nan=allow_nan, separators=(",", ":"))
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name} cannot be saved: {error}") from error


def _build(record: Callable[..., Record], values: Mapping[str, Any], **changed: Any) -> Record:
    """Build a record from its fields, some of them replaced."""
    return record(**{**values, **changed})


def _rollout(values: Mapping[str, Any]) -> Rollout:
    return _build(
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
    return _build(Observation, values, messages=tuple(values["messages"]), tokens=tuple(values["tokens"]))


def _turn(values: Mapping[str, Any]) -> Turn:
    return _build(
        Turn,
        values,
        observation_tokens=tuple(values["observation_tokens"]),
        generation=_generation(values["generation"]),
        messages=tuple(values["messages"]),
    )


def _generation(values: Mapping[str, Any]) -> Generation:
    return _build(
        Generation,
        values,
        token_ids=tuple(values["token_ids"]),
        logprobs=tuple(values["logprobs"]),
        stop_reason=StopReason(values["stop_reason"]),
    )


def _evaluation(values: Mapping[str, Any]) -> RewardResult:
    return _build(RewardResult, values, steps=tuple(TurnReward(**step) for step in values["steps"]))
