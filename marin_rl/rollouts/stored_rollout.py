# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""The record of a stored rollout: its columns, the conversion of a rollout to a row, and the two file formats.

One row is one rollout. Lists of a turn have one item per token: those over the sampled tokens (`token_ids`, `pieces`,
`logprobs`, …) have one length, those over the observation's tokens another. Null means that the run did not compute
the value. `SCHEMA` defines both formats, Parquet and JSON lines.
"""

import dataclasses
import io
import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from jaxtyping import Float

from marin_rl.objectives.advantage_inputs import TurnAdvantages
from marin_rl.types import Info, Message, Observation, Rollout, RolloutStatus, Turn

SCHEMA_VERSION = 3
"""Increased with every change of the columns; files of other versions are refused."""

_VERSION_KEY = b"marin_rl.rollouts.version"
"""Key of the version in the metadata of a Parquet file."""

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

_SCORES = ("learner_logprobs", "reference_logprobs", "advantages", "values", "value_targets")
"""The arrays of `StoredAdvantages`, which are columns over the sampled tokens."""

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
        *[(name, pa.list_(pa.float32())) for name in _SCORES],
        ("episode_advantage", pa.float64()),
        ("step_return", pa.float64()),
        ("step_advantage", pa.float64()),
    ]
)

_OBSERVATION = pa.struct(
    [_TURN.field(name) for name in ("messages", "starts_sequence", "observation_tokens", "observation_pieces")]
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
    metadata={_VERSION_KEY: str(SCHEMA_VERSION).encode()},
)
"""The columns, with one row per rollout. `docs/pages/viewing.md` documents each column."""

_NULLABLE = frozenset(
    [
        *("answer", "error", "not_trained", "reward", "advantage", "info", "last_observation"),
        *("score", "reason", "failure", "base_reward", "content", "more", "action"),
        *(*_SCORES, "episode_advantage", "step_return", "step_advantage"),
    ]
)
"""Columns and fields that may be null."""

_PER_TOKEN = {
    "token_ids": ("pieces", "loss_mask", "logprobs", *_SCORES),
    "observation_tokens": ("observation_pieces",),
}
"""Lists with one item per token, by the name of the token list."""


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

    @property
    def arrays(self) -> dict[str, np.ndarray]:
        """The computed arrays, by column."""
        return {name: array for name, array in vars(self).items() if name in _SCORES and array is not None}


def as_row(
    rollout: Rollout,
    step: int,
    purpose: str,
    stored: StoredAdvantages | None,
    piece: PieceOf,
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
    values = {
        **vars(rollout),
        "step": step,
        "purpose": purpose,
        "task_id": rollout.task.id,
        "environment": rollout.task.environment,
        "answer": rollout.task.answer,
        "not_trained": _why_not_trained(rollout, purpose, stored, is_stale),
        "reward": rollout.total_reward,
        "advantage": None if stored is None else stored.mean_advantage,
        "num_turns": len(rollout.turns),
        "num_tokens": rollout.num_tokens,
        "num_generated_tokens": rollout.num_generated_tokens,
        "info": _info_text(rollout.info),
        "turns": _turn_values(rollout.turns, stored, piece),
        "last_observation": _observation_values(rollout.last_observation, piece),
    }
    return {field.name: _as_stored(values[field.name], field.type) for field in SCHEMA}


def _as_stored(value: Any, kind: pa.DataType) -> Any:
    """Convert a value to one that Arrow accepts; the fields of a record are those of `kind`, by name."""
    if value is None:
        return None
    if pa.types.is_struct(kind):
        values = value if isinstance(value, Mapping) else vars(value)
        return {field.name: _as_stored(values.get(field.name), field.type) for field in kind}
    if pa.types.is_list(kind) and pa.types.is_struct(kind.value_type):
        return [_as_stored(item, kind.value_type) for item in value]
    if pa.types.is_map(kind):
        return [(name, float(number)) for name, number in value.items()]
    if pa.types.is_string(kind):
        # UTF-8 cannot represent lone surrogates, which texts of reward functions may contain.
        return value.encode("utf-8", "backslashreplace").decode("utf-8")
    return value


def _turn_values(turns: Sequence[Turn], stored: StoredAdvantages | None, piece: PieceOf) -> list[dict[str, Any]]:
    rows = []
    start = 0
    for index, turn in enumerate(turns):
        token_ids = turn.generation.token_ids
        end = start + len(token_ids)
        row = {
            **vars(turn),
            **vars(turn.generation),
            "messages": [_message_values(message) for message in turn.messages],
            "reward": turn.reward,
            "info": _info_text(turn.info),
            "observation_pieces": [piece(token) for token in turn.observation_tokens],
            "pieces": [piece(token) for token in token_ids],
            "loss_mask": [stored is not None and stored.advantages is not None] * len(token_ids),
        }
        if stored is not None:
            row |= {name: array[start:end].tolist() for name, array in stored.arrays.items()}
            if (parts := stored.turn_advantages) is not None:
                row["episode_advantage"] = parts.episode_advantage
                row["step_return"] = float(parts.returns[index])
                row["step_advantage"] = float(parts.step_advantages[index])
        rows.append(row)
        start = end
    return rows


def _observation_values(observation: Observation | None, piece: PieceOf) -> dict[str, Any] | None:
    if observation is None:
        return None
    return {
        "messages": [_message_values(message) for message in observation.messages],
        "starts_sequence": observation.starts_sequence,
        "observation_tokens": observation.tokens,
        "observation_pieces": [piece(token) for token in observation.tokens],
    }


def _message_values(message: Message) -> dict[str, Any]:
    more = {name: value for name, value in message.items() if name not in ("role", "content")}
    return {**message, "more": json.dumps(more) if more else None}


def _info_text(info: Info) -> str | None:
    """Free metadata as ASCII JSON; None if empty."""
    return json.dumps(info, sort_keys=True) if info else None


def _check_lengths(rollout: Rollout, stored: StoredAdvantages | None) -> None:
    if stored is None:
        return
    tokens, turns = rollout.num_generated_tokens, len(rollout.turns)
    expected = [(name, array, tokens) for name, array in stored.arrays.items()]
    if (parts := stored.turn_advantages) is not None:
        expected += [("returns", parts.returns, turns), ("step_advantages", parts.step_advantages, turns)]
    for name, array, length in expected:
        if len(array) != length:
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


class OtherVersionError(ValueError):
    """A file has another schema version."""


def as_parquet(rows: Sequence[Mapping[str, Any]]) -> bytes:
    """Convert rows to the content of a Parquet file."""
    buffer = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(list(rows), schema=SCHEMA), buffer, compression="zstd", write_statistics=False)
    return buffer.getvalue()


def as_jsonl(rows: Sequence[Mapping[str, Any]]) -> bytes:
    """Convert rows to JSON lines, with a token's bytes as text, or as `{"hex": …}` if they are not valid UTF-8."""
    # The conversion by Arrow gives both formats the same values with the same rounding.
    table = pa.Table.from_pylist(list(rows), schema=SCHEMA)
    stored = table.to_pylist(maps_as_pydicts="strict")
    lines = [json.dumps(_jsonable({"version": SCHEMA_VERSION, **row}), ensure_ascii=False) for row in stored]
    return "".join(f"{line}\n" for line in lines).encode()


def from_parquet(path: Path, columns: Sequence[str]) -> pa.Table:
    """Read and check columns of a Parquet file, which a user may have edited; see `from_jsonl`."""
    # Neither a Python object nor threads: a thread of Arrow that releases a Python object while the interpreter exits
    # aborts the process.
    with pq.ParquetFile(str(path)) as parquet:
        version = (parquet.schema_arrow.metadata or {}).get(_VERSION_KEY)
        _check_version(None if version is None else version.decode())
        table = parquet.read(columns=list(columns), use_threads=False)
    _check_columns(table, columns)
    return table


def from_jsonl(path: Path, columns: Sequence[str]) -> pa.Table:
    """Read and check columns of a file of JSON lines, which a user may have edited.

    Args:
        path: the file.
        columns: names of `SCHEMA`.

    Returns:
        The rollouts.

    Raises:
        OtherVersionError: if the file has another schema version.
        ValueError: if a column is missing, has another type or a forbidden null, or if lists over the same tokens
            differ in length; names the column. Arrow and JSON raise further errors for files that they cannot read.
    """
    rows = []
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        row = json.loads(line)
        if not isinstance(row, dict):
            raise ValueError(f"line {number} is not a JSON object")
        _check_version(row.pop("version", None))
        if absent := [name for name in SCHEMA.names if name not in row]:
            raise ValueError(f"line {number} has no column {absent[0]!r}")
        rows.append({field.name: _from_jsonable(row[field.name], field) for field in SCHEMA})
    table = pa.Table.from_pylist(rows, schema=SCHEMA)
    _check_columns(table, SCHEMA.names)
    return table.select(list(columns))


def _jsonable(value: Any) -> Any:
    if isinstance(value, bytes):
        try:
            return value.decode("utf-8")
        except UnicodeDecodeError:
            return {"hex": value.hex()}
    if isinstance(value, float) and not math.isfinite(value):
        # JSON has no such numbers; metrics.jsonl uses the same strings.
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, dict):
        return {name: _jsonable(inner) for name, inner in value.items()}
    return [_jsonable(inner) for inner in value] if isinstance(value, list) else value


def _from_jsonable(value: Any, field: pa.Field) -> Any:
    """Invert `_jsonable` for a value of a column or of a field in it."""
    kind = field.type
    if isinstance(value, dict) and pa.types.is_struct(kind):
        return {inner.name: _from_jsonable(value.get(inner.name), inner) for inner in kind}
    if isinstance(value, dict) and pa.types.is_map(kind):
        return [(name, float(number)) for name, number in value.items()]
    if isinstance(value, list) and pa.types.is_map(kind):
        # Arrow aborts the process on a map with items that are not pairs.
        raise ValueError(f"{field.name!r} is a list, expected an object of numbers")
    if isinstance(value, list) and pa.types.is_list(kind):
        # Most lists are numbers of tokens, which need no conversion.
        is_plain = all(type(item) in (int, float, bool) for item in value)
        return value if is_plain else [_from_jsonable(item, kind.value_field) for item in value]
    if pa.types.is_binary(kind):
        return value.encode("utf-8") if isinstance(value, str) else bytes.fromhex(value["hex"])
    return float(value) if isinstance(value, str) and pa.types.is_floating(kind) else value


def _check_version(version: object) -> None:
    if version is None:
        raise ValueError("it has no schema version")
    if str(version) != str(SCHEMA_VERSION):
        raise OtherVersionError(f"its schema version is {version}, this program reads version {SCHEMA_VERSION}")


def _check_columns(table: pa.Table, columns: Sequence[str]) -> None:
    for name in columns:
        if name not in table.column_names:
            raise ValueError(f"it has no column {name!r}")
        actual, expected = table.schema.field(name).type, SCHEMA.field(name).type
        if actual != expected:
            raise ValueError(f"column {name!r} has the type {actual}, expected {expected}")
        for chunk in table[name].chunks:
            _check_array(name, name, chunk)


def _check_array(path: str, name: str, array: pa.Array) -> None:
    if array.null_count and name not in _NULLABLE:
        raise ValueError(f"{path!r} contains null")
    if isinstance(array, pa.MapArray):
        _check_array(path, "value", array.items)
    elif isinstance(array, pa.ListArray):
        _check_array(path, "item", array.flatten())
    elif isinstance(array, pa.StructArray):
        present = array.drop_null()
        fields = {field.name: present.field(index) for index, field in enumerate(present.type)}
        for inner, values in fields.items():
            _check_array(f"{path}.{inner}", inner, values)
        for tokens, names in _PER_TOKEN.items():
            for inner in (inner for inner in names if inner in fields):
                expected, lengths = (fields[each].value_lengths().to_pylist() for each in (tokens, inner))
                if any(length not in (None, other) for length, other in zip(lengths, expected, strict=True)):
                    raise ValueError(f"'{path}.{inner}' differs in length from '{path}.{tokens}'")
