# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""The schema of stored rollouts, and the conversion of a rollout with its rewards and advantages to a row.

One row is one rollout. Lists of a turn have one item per token: those over the sampled tokens (`token_ids`, `pieces`,
`logprobs`, …) have one length, those over the observation's tokens another. Null means that the run did not compute
the value.
"""

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from jaxtyping import Float

from marin_rl.objectives.advantage_inputs import TurnAdvantages
from marin_rl.types import Info, Observation, RewardResult, Rollout, RolloutStatus, Turn

SCHEMA_VERSION = 3
"""Increased with every change of the columns; files of other versions are refused."""

VERSION_KEY = b"marin_rl.rollouts.version"
"""Key of the version in a file's metadata."""

PieceOf = Callable[[int], bytes]
"""Maps a token id to its exact bytes."""

_NUMBERS = pa.map_(pa.string(), pa.float64())

_MESSAGE = pa.struct([("role", pa.string()), ("content", pa.string()), ("more", pa.string())])

_STEP_REWARD = pa.struct(
    [("turn", pa.int32()), ("base_reward", pa.float64()), ("reason", pa.string()), ("metrics", _NUMBERS)]
)

_EVALUATION = pa.struct(
    [
        ("component", pa.string()),
        ("weight", pa.float64()),
        ("score", pa.float64()),
        ("reason", pa.string()),
        ("failure", pa.string()),
        ("error", pa.string()),
        ("metrics", _NUMBERS),
        ("steps", pa.list_(_STEP_REWARD)),
    ]
)

_TURN = pa.struct(
    [
        ("messages", pa.list_(_MESSAGE)),
        ("action", pa.string()),
        ("reward", pa.float64()),
        ("rewards", _NUMBERS),
        ("info", pa.string()),
        ("anchor_state", pa.string()),
        ("starts_sequence", pa.bool_()),
        ("stop_reason", pa.string()),
        ("first_version", pa.int64()),
        ("last_version", pa.int64()),
        ("observation_tokens", pa.list_(pa.int32())),
        ("observation_pieces", pa.list_(pa.binary())),
        ("token_ids", pa.list_(pa.int32())),
        ("pieces", pa.list_(pa.binary())),
        ("loss_mask", pa.list_(pa.bool_())),
        ("logprobs", pa.list_(pa.float32())),
        ("learner_logprobs", pa.list_(pa.float32())),
        ("reference_logprobs", pa.list_(pa.float32())),
        ("advantages", pa.list_(pa.float32())),
        ("values", pa.list_(pa.float32())),
        ("value_targets", pa.list_(pa.float32())),
        ("episode_advantage", pa.float64()),
        ("step_return", pa.float64()),
        ("step_advantage", pa.float64()),
    ]
)

_OBSERVATION = pa.struct(
    [
        ("messages", pa.list_(_MESSAGE)),
        ("starts_sequence", pa.bool_()),
        ("observation_tokens", pa.list_(pa.int32())),
        ("observation_pieces", pa.list_(pa.binary())),
    ]
)

SCHEMA = pa.schema(
    [
        ("step", pa.int64()),
        ("purpose", pa.string()),
        ("id", pa.string()),
        ("group_id", pa.string()),
        ("task_id", pa.string()),
        ("environment", pa.string()),
        ("answer", pa.string()),
        ("status", pa.string()),
        ("error", pa.string()),
        ("not_trained", pa.string()),
        ("reward", pa.float64()),
        ("rewards", _NUMBERS),
        ("evaluations", pa.list_(_EVALUATION)),
        ("advantage", pa.float64()),
        ("num_turns", pa.int32()),
        ("num_tokens", pa.int32()),
        ("num_generated_tokens", pa.int32()),
        ("metrics", _NUMBERS),
        ("seconds", _NUMBERS),
        ("info", pa.string()),
        ("turns", pa.list_(_TURN)),
        ("last_observation", _OBSERVATION),
    ],
    metadata={VERSION_KEY: str(SCHEMA_VERSION).encode()},
)
"""The columns, with one row per rollout. `docs/pages/viewing.md` documents each column."""

_NULLABLE = frozenset(
    [
        *("answer", "error", "not_trained", "reward", "advantage", "info", "last_observation"),
        *("score", "reason", "failure", "base_reward", "content", "more", "action"),
        *("learner_logprobs", "reference_logprobs", "advantages", "values", "value_targets"),
        *("episode_advantage", "step_return", "step_advantage"),
    ]
)
"""Columns and fields that may be null."""

_PER_TOKEN = {
    "token_ids": (
        *("pieces", "loss_mask", "logprobs", "learner_logprobs", "reference_logprobs"),
        *("advantages", "values", "value_targets"),
    ),
    "observation_tokens": ("observation_pieces",),
}
"""Lists with one item per token, by the name of the token list."""


def check_columns(table: pa.Table, columns: Sequence[str]) -> None:
    """Check a table against the schema, because a user may have edited its file.

    Args:
        table: the rollouts.
        columns: the required columns of `SCHEMA`.

    Raises:
        ValueError: if a column is missing, has another type or a forbidden null, or if lists over the same tokens
            differ in length; names the column.
    """
    for name in columns:
        if name not in table.column_names:
            raise ValueError(f"it has no column {name!r}")
        actual, expected = table.schema.field(name).type, SCHEMA.field(name).type
        if actual != expected:
            raise ValueError(f"column {name!r} has the type {actual}, expected {expected}")
        for chunk in table[name].chunks:
            _check_nulls(name, name, chunk)
            if name == "turns":
                _check_per_token(name, chunk.flatten())
            if name == "last_observation":
                _check_per_token(name, chunk.drop_null())


def _check_nulls(path: str, name: str, array: pa.Array) -> None:
    if array.null_count and name not in _NULLABLE:
        raise ValueError(f"{path!r} contains null")
    if isinstance(array, pa.MapArray):
        _check_nulls(path, "value", array.items)
    elif isinstance(array, pa.ListArray):
        _check_nulls(path, "item", array.flatten())
    elif isinstance(array, pa.StructArray):
        present = array.drop_null()
        for index, field in enumerate(present.type):
            _check_nulls(f"{path}.{field.name}", field.name, present.field(index))


def _check_per_token(path: str, array: pa.StructArray) -> None:
    lists = {field.name: array.field(at) for at, field in enumerate(array.type) if pa.types.is_list(field.type)}
    for tokens, names in _PER_TOKEN.items():
        expected = lists[tokens].value_lengths().to_pylist() if tokens in lists else []
        for name in names:
            lengths = lists[name].value_lengths().to_pylist() if name in lists else []
            if any(length not in (None, other) for length, other in zip(lengths, expected, strict=False)):
                raise ValueError(f"'{path}.{name}' differs in length from '{path}.{tokens}'")


@dataclasses.dataclass(frozen=True)
class StoredAdvantages:
    """Advantages and scores of one rollout. Arrays have one item per sampled token, with all turns concatenated."""

    advantages: Float[np.ndarray, " tokens"] | None
    """Multipliers of the policy term; None if no token was trained on."""
    learner_logprobs: Float[np.ndarray, " tokens"] | None = None
    """Log-probabilities (nats) under the learner's weights before the update; None if not computed."""
    reference_logprobs: Float[np.ndarray, " tokens"] | None = None
    """Log-probabilities (nats) under the frozen reference; None without a reference."""
    values: Float[np.ndarray, " tokens"] | None = None
    """The critic's values before the update; None without a critic."""
    value_targets: Float[np.ndarray, " tokens"] | None = None
    """Targets of the critic; None without a critic, or if no token was trained on."""
    turn_advantages: TurnAdvantages | None = None
    """The parts of each turn's advantage (GiGPO)."""

    @property
    def mean_advantage(self) -> float | None:
        """The mean over the sampled tokens; None if no token was trained on."""
        return None if self.advantages is None else float(self.advantages.mean())


def as_row(
    rollout: Rollout,
    step: int,
    purpose: str,
    stored: StoredAdvantages | None,
    piece: PieceOf,
    *,
    is_stale: bool = False,
) -> dict[str, Any]:
    """Convert a rollout to a row of `SCHEMA`, in Python values.

    Args:
        rollout: the rollout.
        step: the update trained on the rollout, or the update before an evaluation.
        purpose: `training` or `evaluation`.
        stored: advantages of the rollout; None if it was not trained on.
        piece: maps a token id to its bytes.
        is_stale: whether the rollout was dropped for its age before training.

    Returns:
        The values by column.

    Raises:
        ValueError: if an array does not have the rollout's length; names both lengths.
    """
    _check_lengths(rollout, stored)
    return {
        "step": step,
        "purpose": purpose,
        "id": rollout.id,
        "group_id": rollout.group_id,
        "task_id": rollout.task.id,
        "environment": rollout.task.environment,
        "answer": _text(rollout.task.answer),
        "status": rollout.status.value,
        "error": _text(rollout.error),
        "not_trained": _why_not_trained(rollout, purpose, stored, is_stale),
        "reward": rollout.total_reward,
        "rewards": list(rollout.rewards.items()),
        "evaluations": [_evaluation_row(evaluation) for evaluation in rollout.evaluations],
        "advantage": None if stored is None else stored.mean_advantage,
        "num_turns": len(rollout.turns),
        "num_tokens": rollout.num_tokens,
        "num_generated_tokens": rollout.num_generated_tokens,
        "metrics": _numbers(rollout.metrics),
        "seconds": _numbers(rollout.seconds),
        "info": _info_text(rollout.info),
        "turns": _turn_rows(rollout.turns, stored, piece),
        "last_observation": _observation_row(rollout.last_observation, piece),
    }


def _check_lengths(rollout: Rollout, stored: StoredAdvantages | None) -> None:
    if stored is None:
        return
    tokens, turns = rollout.num_generated_tokens, len(rollout.turns)
    expected: list[tuple[str, np.ndarray | None, int]] = [
        ("advantages", stored.advantages, tokens),
        ("learner_logprobs", stored.learner_logprobs, tokens),
        ("reference_logprobs", stored.reference_logprobs, tokens),
        ("values", stored.values, tokens),
        ("value_targets", stored.value_targets, tokens),
    ]
    if stored.turn_advantages is not None:
        expected += [("returns", stored.turn_advantages.returns, turns)]
        expected += [("step_advantages", stored.turn_advantages.step_advantages, turns)]
    for name, array, length in expected:
        if array is not None and len(array) != length:
            raise ValueError(f"rollout {rollout.id}: {name} has length {len(array)}, expected {length}")


def _why_not_trained(rollout: Rollout, purpose: str, stored: StoredAdvantages | None, is_stale: bool) -> str | None:
    if purpose != "training":
        return purpose
    if is_stale:
        return "stale"
    if not rollout.status.is_graded:
        return rollout.status.value
    if stored is None:
        return "filtered"
    if stored.advantages is None:
        return "masked" if rollout.status is RolloutStatus.TRUNCATED else "no_tokens"
    return None


def _numbers(values: Mapping[str, float]) -> list[tuple[str, float]]:
    return [(name, float(value)) for name, value in values.items()]


def _evaluation_row(evaluation: RewardResult) -> dict[str, Any]:
    return {
        "component": evaluation.component,
        "weight": evaluation.weight,
        "score": evaluation.score,
        "reason": _text(evaluation.reason),
        "failure": evaluation.failure,
        "error": _text(evaluation.error),
        "metrics": _numbers(evaluation.metrics),
        "steps": [
            {
                "turn": step.turn,
                "base_reward": step.base_reward,
                "reason": _text(step.reason),
                "metrics": _numbers(step.metrics),
            }
            for step in evaluation.steps
        ],
    }


def _turn_rows(turns: Sequence[Turn], stored: StoredAdvantages | None, piece: PieceOf) -> list[dict[str, Any]]:
    rows = []
    start = 0
    for index, turn in enumerate(turns):
        sampled = turn.generation
        end = start + len(sampled.token_ids)
        rows.append(
            {
                "messages": [_message_row(message) for message in turn.messages],
                "action": _text(turn.action),
                "reward": turn.reward,
                "rewards": list(turn.rewards.items()),
                "info": _info_text(turn.info),
                "anchor_state": turn.anchor_state,
                "starts_sequence": turn.starts_sequence,
                "stop_reason": sampled.stop_reason.value,
                "first_version": sampled.first_version,
                "last_version": sampled.last_version,
                "observation_tokens": turn.observation_tokens,
                "observation_pieces": [piece(token) for token in turn.observation_tokens],
                "token_ids": sampled.token_ids,
                "pieces": [piece(token) for token in sampled.token_ids],
                "logprobs": sampled.logprobs,
                **_advantage_columns(stored, index, slice(start, end)),
            }
        )
        start = end
    return rows


def _observation_row(observation: Observation | None, piece: PieceOf) -> dict[str, Any] | None:
    if observation is None:
        return None
    return {
        "messages": [_message_row(message) for message in observation.messages],
        "starts_sequence": observation.starts_sequence,
        "observation_tokens": observation.tokens,
        "observation_pieces": [piece(token) for token in observation.tokens],
    }


def _text(text: str | None) -> str | None:
    """Escape lone surrogates, which texts of reward functions may contain, because UTF-8 cannot represent them."""
    return None if text is None else text.encode("utf-8", "backslashreplace").decode("utf-8")


def _info_text(info: Info) -> str | None:
    """Free metadata as ASCII JSON; None if empty."""
    return json.dumps(info, sort_keys=True) if info else None


def _message_row(message: Mapping[str, Any]) -> dict[str, Any]:
    more = {name: value for name, value in message.items() if name not in ("role", "content")}
    return {
        "role": message["role"],
        "content": _text(message["content"]),
        "more": json.dumps(more) if more else None,
    }


def _advantage_columns(stored: StoredAdvantages | None, turn: int, tokens: slice) -> dict[str, Any]:
    if stored is None:
        return {"loss_mask": [False] * (tokens.stop - tokens.start)}
    trained = stored.advantages is not None
    return {
        "loss_mask": [trained] * (tokens.stop - tokens.start),
        "learner_logprobs": _part(stored.learner_logprobs, tokens),
        "reference_logprobs": _part(stored.reference_logprobs, tokens),
        "advantages": _part(stored.advantages, tokens),
        "values": _part(stored.values, tokens),
        "value_targets": _part(stored.value_targets, tokens),
        **_turn_advantage_columns(stored.turn_advantages, turn),
    }


def _turn_advantage_columns(advantages: TurnAdvantages | None, turn: int) -> dict[str, float]:
    if advantages is None:
        return {}
    return {
        "episode_advantage": advantages.episode_advantage,
        "step_return": float(advantages.returns[turn]),
        "step_advantage": float(advantages.step_advantages[turn]),
    }


def _part(array: np.ndarray | None, tokens: slice) -> list[float] | None:
    return None if array is None else array[tokens].tolist()


def bytes_as_json(piece: bytes) -> str | dict[str, str]:
    """Convert a token's bytes to JSON: text, or `{"hex": …}` if they are not valid UTF-8.

    >>> bytes_as_json(b"5"), bytes_as_json("é".encode()[:1])
    ('5', {'hex': 'c3'})
    """
    try:
        return piece.decode("utf-8")
    except UnicodeDecodeError:
        return {"hex": piece.hex()}


def bytes_from_json(value: str | Mapping[str, str]) -> bytes:
    """Invert [`bytes_as_json`][marin_rl.rollouts.stored_rollout.bytes_as_json]."""
    return value.encode("utf-8") if isinstance(value, str) else bytes.fromhex(value["hex"])
