# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""The record of a stored rollout: its columns, the conversion of rollouts to a table, and the two file formats.

One row is one rollout. Lists of a turn have one item per token: those over the sampled tokens (`token_ids`, `pieces`,
`logprobs`, …) have one length, those over the observation's tokens another. Null means that the run did not compute
the value. `SCHEMA` defines both formats, Parquet and JSON lines.
"""

import dataclasses
import json
import math
import struct
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from jaxtyping import Float, Int32

from marin_rl.objectives.advantage_inputs import TurnAdvantages
from marin_rl.remote_path import RemotePath
from marin_rl.storage import StoragePath
from marin_rl.types import Info, Message, Rollout, RolloutStatus

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


def as_table(
    rollouts: Sequence[Rollout],
    step: int,
    purpose: str,
    stored: Mapping[str, StoredAdvantages],
    piece: PieceOf,
    stale_groups: Collection[str] = (),
) -> pa.Table:
    """Convert rollouts to a table with the columns of `SCHEMA`.

    Args:
        rollouts: the rollouts.
        step: the update trained on the rollouts, or the update before an evaluation.
        purpose: `training` or `evaluation`.
        stored: advantages by rollout id, for the rollouts that were trained on.
        piece: maps a token id to its bytes; called once per column for each distinct id.
        stale_groups: ids of groups that were dropped for their age before training.

    Returns:
        The table, with one row per rollout.

    Raises:
        ValueError: if an array does not have the rollout's length, or a token id is not a 32-bit integer; names the
            rollout.
    """
    own = [stored.get(rollout.id) for rollout in rollouts]
    for rollout, advantages in zip(rollouts, own, strict=True):
        _check_lengths(rollout, advantages)
    pairs = list(zip(rollouts, own, strict=True))
    columns: dict[str, list[Any]] = {
        "step": [step] * len(pairs),
        "purpose": [purpose] * len(pairs),
        "task_id": [rollout.task.id for rollout in rollouts],
        "environment": [rollout.task.environment for rollout in rollouts],
        "answer": [rollout.task.answer for rollout in rollouts],
        "not_trained": [
            _why_not_trained(rollout, purpose, advantages, rollout.group_id in stale_groups)
            for rollout, advantages in pairs
        ],
        "reward": [rollout.total_reward for rollout in rollouts],
        "advantage": [None if advantages is None else advantages.mean_advantage for advantages in own],
        "num_turns": [len(rollout.turns) for rollout in rollouts],
        "info": [_info_text(rollout.info) for rollout in rollouts],
        "turns": [_turn_values(rollout, advantages) for rollout, advantages in pairs],
        "last_observation": [_observation_values(rollout) for rollout in rollouts],
    }
    others = [name for name in SCHEMA.names if name not in columns]
    columns |= {name: [getattr(rollout, name) for rollout in rollouts] for name in others}
    arrays = [_column(columns[field.name], field.type, piece) for field in SCHEMA]
    return pa.Table.from_arrays(arrays, schema=SCHEMA)


def _column(values: Sequence[Any], kind: pa.DataType, piece: PieceOf) -> pa.Array:
    """Convert one value per row, None for null, to an Arrow array of a type of `SCHEMA`.

    Structures are objects or dictionaries with the fields of `kind`, and the pieces of tokens are given as token ids.
    """
    if pa.types.is_struct(kind):
        rows = [value if value is None or isinstance(value, dict) else vars(value) for value in values]
        children = [
            _column([None if row is None else row.get(field.name) for row in rows], field.type, piece) for field in kind
        ]
        return pa.StructArray.from_arrays(children, fields=list(kind), mask=_null_mask(values))
    if pa.types.is_map(kind) or pa.types.is_list(kind):
        present = [value for value in values if value is not None]
        lengths = [0 if value is None else len(value) for value in values]
        offsets, mask = pa.array(np.cumsum([0, *lengths], dtype=np.int32)), _null_mask(values)
        if pa.types.is_map(kind):
            names = _strings([name for value in present for name in value])
            numbers = pa.array([float(number) for value in present for number in value.values()], pa.float64())
            return pa.MapArray.from_arrays(offsets, names, numbers, type=kind, mask=mask)
        return pa.ListArray.from_arrays(offsets, _items(present, kind.value_type, piece), type=kind, mask=mask)
    return _strings(values) if pa.types.is_string(kind) else pa.array(values, kind)


def _items(lists: Sequence[Any], kind: pa.DataType, piece: PieceOf) -> pa.Array:
    """Convert the items of lists to one Arrow array."""
    if pa.types.is_struct(kind):
        return _column([item for items in lists for item in items], kind, piece)
    if pa.types.is_binary(kind):
        tokens = _items(lists, pa.int32(), piece).dictionary_encode()
        pieces = pa.array([piece(token) for token in tokens.dictionary.to_pylist()], kind)
        return pieces.take(tokens.indices)
    dtype = kind.to_pandas_dtype()
    with np.errstate(over="ignore"):
        return pa.array(np.concatenate([np.zeros(0, dtype), *lists], dtype=dtype, casting="same_kind"), kind)


def _null_mask(values: Sequence[Any]) -> pa.Array | None:
    """True for None; None if there is no None."""
    mask = [value is None for value in values]
    return pa.array(mask, pa.bool_()) if any(mask) else None


def _strings(values: Sequence[str | None]) -> pa.Array:
    try:
        return pa.array(values, pa.string())
    except UnicodeEncodeError:
        # UTF-8 cannot represent lone surrogates, which texts of reward functions may contain.
        escaped = [
            value if value is None else value.encode("utf-8", "backslashreplace").decode("utf-8") for value in values
        ]
        return pa.array(escaped, pa.string())


def _turn_values(rollout: Rollout, stored: StoredAdvantages | None) -> list[dict[str, Any]]:
    rows = []
    start = 0
    scores = {} if stored is None else stored.arrays
    has_loss = stored is not None and stored.advantages is not None
    for index, turn in enumerate(rollout.turns):
        generation = turn.generation
        observed = _token_array(rollout, turn.observation_tokens)
        sampled = _token_array(rollout, generation.token_ids)
        end = start + sampled.size
        row = {
            **vars(turn),
            **vars(generation),
            "messages": [_message_values(message) for message in turn.messages],
            "reward": turn.reward,
            "info": _info_text(turn.info),
            "observation_tokens": observed,
            "observation_pieces": observed,
            "token_ids": sampled,
            "pieces": sampled,
            "loss_mask": np.full(sampled.size, has_loss),
            "logprobs": np.array(generation.logprobs, np.float64),
            **{name: array[start:end] for name, array in scores.items()},
        }
        if stored is not None and (parts := stored.turn_advantages) is not None:
            row["episode_advantage"] = parts.episode_advantage
            row["step_return"] = float(parts.returns[index])
            row["step_advantage"] = float(parts.step_advantages[index])
        rows.append(row)
        start = end
    return rows


def _token_array(rollout: Rollout, tokens: Sequence[int]) -> Int32[np.ndarray, " tokens"]:
    try:
        # Faster than numpy, which would truncate other numbers.
        return np.frombuffer(struct.pack(f"{len(tokens)}i", *tokens), np.int32)
    except struct.error as error:
        raise ValueError(f"rollout {rollout.id}: token ids must be integers of 32 bits ({error})") from error


def _observation_values(rollout: Rollout) -> dict[str, Any] | None:
    observation = rollout.last_observation
    if observation is None:
        return None
    tokens = _token_array(rollout, observation.tokens)
    return {
        "messages": [_message_values(message) for message in observation.messages],
        "starts_sequence": observation.starts_sequence,
        "observation_tokens": tokens,
        "observation_pieces": tokens,
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


def as_parquet(table: pa.Table) -> pa.Buffer:
    """Convert a table to the content of a Parquet file."""
    content = pa.BufferOutputStream()
    pq.write_table(table, content, compression="zstd", write_statistics=False)
    return content.getvalue()


def as_jsonl(table: pa.Table) -> bytes:
    """Convert a table to JSON lines, with a token's bytes as text, or as `{"hex": …}` if they are not valid UTF-8."""
    stored = table.to_pylist(maps_as_pydicts="strict")
    lines = [json.dumps(_jsonable({"version": SCHEMA_VERSION, **row}), ensure_ascii=False) for row in stored]
    return "".join(f"{line}\n" for line in lines).encode()


def from_parquet(path: StoragePath, columns: Sequence[str]) -> pa.Table:
    """Read and check columns of a Parquet file, which a user may have edited; see `from_jsonl`."""
    # Neither a Python object nor threads: a thread of Arrow that releases a Python object while the interpreter exits
    # aborts the process.
    source = pa.BufferReader(path.read_bytes()) if isinstance(path, RemotePath) else str(path)
    with pq.ParquetFile(source) as parquet:
        version = (parquet.schema_arrow.metadata or {}).get(_VERSION_KEY)
        _check_version(None if version is None else version.decode())
        table = parquet.read(columns=list(columns), use_threads=False)
    _check_columns(table, columns)
    return table


def from_jsonl(path: StoragePath, columns: Sequence[str]) -> pa.Table:
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
