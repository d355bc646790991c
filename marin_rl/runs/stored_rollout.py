# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""The record of a stored rollout: its columns, and the conversion of rollouts to a table and back.

One row is one rollout. Lists of a turn have one item per token: those over the sampled tokens (`token_ids`, `pieces`,
`logprobs`, …) have one length, those over the observation's tokens another. Null means that the run did not compute
the value. `marin_rl.runs.rollout_store` writes and reads files of the table.
"""

import dataclasses
import itertools
import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from jaxtyping import Float, Float32, Int32

from marin_rl.objectives.advantage_inputs import TurnAdvantages
from marin_rl.types import (
    Generation,
    Info,
    Message,
    Observation,
    Rollout,
    RolloutGroup,
    RolloutStatus,
    StopReason,
    Task,
    Turn,
)

SCHEMA_VERSION = 4
"""Increased with every change of the columns; files of other versions are refused."""

VERSION_KEY = b"marin_rl.rollouts.version"
"""Key of the version in the metadata of a Parquet file."""

PieceOf = Callable[[int], bytes]
"""Maps a token id to its exact bytes."""

Integers = Int32[np.ndarray, " _numbers"]

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

TOKEN_COLUMNS = ("learner_logprobs", "reference_logprobs", "advantages", "values", "value_targets")
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
        *[(name, pa.list_(pa.float32())) for name in TOKEN_COLUMNS],
        ("episode_advantage", pa.float64()),
        ("step_return", pa.float64()),
        ("step_advantage", pa.float64()),
    ]
)

_OBSERVATION = pa.struct(
    [_TURN.field(name) for name in ("messages", "starts_sequence", "observation_tokens", "observation_pieces")]
)

# Bytes of all turns may exceed 2 GiB.
_EXPERTS = pa.struct([("dtype", pa.string()), ("shape", pa.list_(pa.int32())), ("data", pa.large_binary())])

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
        ("experts", pa.list_(_EXPERTS)),
    ],
    metadata={VERSION_KEY: str(SCHEMA_VERSION).encode()},
)
"""The columns, with one row per rollout. `docs/pages/api/records.md` documents each column."""


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
        # Faster than `mean`, with the same result.
        return None if self.advantages is None else float(self.advantages.sum() / self.advantages.size)


def as_table(
    rollouts: Sequence[Rollout],
    step: int,
    purpose: str,
    stored: Mapping[str, StoredAdvantages],
    piece: PieceOf,
    stale_groups: Collection[str] = (),
    *,
    experts: bool = False,
) -> pa.Table:
    """Convert rollouts to a table with the columns of `SCHEMA`.

    Args:
        rollouts: the rollouts.
        step: the step that trained on the rollouts, or the step before an evaluation.
        purpose: `training` or `evaluation`.
        stored: advantages by rollout id, for the rollouts that were trained on.
        piece: maps a token id to its bytes.
        stale_groups: ids of groups that were dropped for their age before training.
        experts: whether to include the chosen experts.

    Raises:
        ValueError: if an array does not have the rollout's length; names the rollout.
        pyarrow.ArrowException: if a token id is not a 32-bit integer.
    """
    own = [stored.get(rollout.id) for rollout in rollouts]
    rows = [
        {
            "step": step,
            "purpose": purpose,
            "not_trained": _why_not_trained(rollout, purpose, advantages, rollout.group_id in stale_groups),
            **_row(rollout, advantages, piece),
            "experts": [_array_fields(turn.generation.experts) for turn in rollout.turns] if experts else None,
        }
        for rollout, advantages in zip(rollouts, own, strict=True)
    ]
    fields = [field for field in SCHEMA if field.name != "turns"]
    columns = dict(zip((field.name for field in fields), _array(rows, pa.struct(fields)).flatten(), strict=True))
    columns["turns"] = _turns_column(rollouts, own, piece)
    return pa.Table.from_arrays([columns[name] for name in SCHEMA.names], schema=SCHEMA)


def _row(rollout: Rollout, stored: StoredAdvantages | None, piece: PieceOf) -> dict[str, Any]:
    observed = sum(len(turn.observation_tokens) for turn in rollout.turns)
    sampled = sum(len(turn.generation.token_ids) for turn in rollout.turns)
    return {
        **{name: getattr(rollout, name) for name in ("id", "group_id", "error")},
        "task_id": rollout.task.id,
        "environment": rollout.task.environment,
        "answer": rollout.task.answer,
        "status": rollout.status.value,
        "reward": rollout.total_reward,
        **{name: _numbers(getattr(rollout, name)) for name in ("rewards", "metrics", "seconds")},
        "evaluations": [
            {
                **vars(result),
                "metrics": _numbers(result.metrics),
                "steps": [{**vars(step), "metrics": _numbers(step.metrics)} for step in result.steps],
            }
            for result in rollout.evaluations
        ],
        "advantage": None if stored is None else stored.mean_advantage,
        "num_turns": len(rollout.turns),
        "num_tokens": observed + sampled,
        "num_generated_tokens": sampled,
        "info": _info_text(rollout.info),
        "last_observation": None if rollout.last_observation is None else _observation(rollout.last_observation, piece),
    }


def _array_fields(array: np.ndarray | None) -> dict[str, Any] | None:
    if array is None:
        return None
    data = array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes()
    return {"dtype": array.dtype.name, "shape": array.shape, "data": data}


def _restored_array(fields: Mapping[str, Any] | None) -> np.ndarray | None:
    """Invert `_array_fields`."""
    if fields is None:
        return None
    dtype = np.dtype(fields["dtype"])
    return np.frombuffer(fields["data"], dtype.newbyteorder("<")).reshape(fields["shape"]).astype(dtype)


def _observation(last: Observation, piece: PieceOf) -> dict[str, Any]:
    return {
        "messages": _messages(last.messages),
        "starts_sequence": last.starts_sequence,
        "observation_tokens": last.tokens,
        "observation_pieces": [piece(token) for token in last.tokens],
    }


def _turns_column(rollouts: Sequence[Rollout], own: Sequence[StoredAdvantages | None], piece: PieceOf) -> pa.ListArray:
    """Convert all turns to the column `turns`; the lists over tokens as whole columns, because they are long."""
    counts = [len(rollout.turns) for rollout in rollouts]
    turns = [turn for rollout in rollouts for turn in rollout.turns]
    rows = [row for rollout, advantages in zip(rollouts, own, strict=True) for row in _turn_rows(rollout, advantages)]
    replies = [turn.generation for turn in turns]
    observed, sampled = (
        _offsets(map(len, lists))
        for lists in ([turn.observation_tokens for turn in turns], [reply.token_ids for reply in replies])
    )
    observation_tokens = _flat((turn.observation_tokens for turn in turns), pa.int32())
    token_ids = _flat((reply.token_ids for reply in replies), pa.int32())
    has_loss = np.repeat([one is not None and one.advantages is not None for one in own], counts)
    lists = {
        "observation_tokens": _lists(observed, observation_tokens),
        "observation_pieces": _lists(observed, _pieces(observation_tokens, piece)),
        "token_ids": _lists(sampled, token_ids),
        "pieces": _lists(sampled, _pieces(token_ids, piece)),
        "loss_mask": _lists(sampled, pa.array(np.repeat(has_loss, np.diff(sampled)), pa.bool_())),
        "logprobs": _lists(sampled, _flat((reply.logprobs for reply in replies), pa.float32())),
        **{name: _scores(name, own, counts, sampled) for name in TOKEN_COLUMNS},
    }
    plain = _array(rows, pa.struct([field for field in _TURN if field.name not in lists]))
    children = [lists[field.name] if field.name in lists else plain.field(field.name) for field in _TURN]
    return _lists(_offsets(counts), pa.StructArray.from_arrays(children, fields=list(_TURN)))


def _turn_rows(rollout: Rollout, stored: StoredAdvantages | None) -> Iterable[dict[str, Any]]:
    """The fields of the turns of a rollout that are no lists over tokens; checks the lengths of the stored arrays."""
    parts = None if stored is None else stored.turn_advantages
    tokens = sum(len(turn.generation.token_ids) for turn in rollout.turns)
    lengths = {name: (getattr(stored, name, None), tokens) for name in TOKEN_COLUMNS}
    lengths |= {name: (getattr(parts, name, None), len(rollout.turns)) for name in ("returns", "step_advantages")}
    for name, (values, length) in lengths.items():
        if values is not None and len(values) != length:
            raise ValueError(f"rollout {rollout.id}: {name} has length {len(values)}, expected {length}")
    for index, turn in enumerate(rollout.turns):
        yield {
            **{name: getattr(turn, name) for name in ("action", "reward", "anchor_state", "starts_sequence")},
            **{name: getattr(turn.generation, name) for name in ("stop_reason", "first_version", "last_version")},
            "messages": _messages(turn.messages),
            "rewards": _numbers(turn.rewards),
            "info": _info_text(turn.info),
            "episode_advantage": None if parts is None else parts.episode_advantage,
            "step_return": None if parts is None else parts.returns[index],
            "step_advantage": None if parts is None else parts.step_advantages[index],
        }


def _scores(
    name: str, own: Sequence[StoredAdvantages | None], counts: Sequence[int], sampled: Integers
) -> pa.ListArray:
    """Convert the array `name` of each rollout's advantages to a list for each turn, null without an array.

    `counts` are the numbers of turns, `sampled` the offsets of the turns in the sampled tokens.
    """
    arrays = [getattr(stored, name, None) for stored in own]
    is_absent = np.repeat(np.array([values is None for values in arrays], np.bool_), counts)
    present = [np.zeros(0, np.float32), *(values for values in arrays if values is not None)]
    with np.errstate(over="ignore"):
        flat = np.concatenate(present, dtype=np.float32, casting="same_kind")
    offsets = _offsets(np.where(is_absent, 0, np.diff(sampled)).tolist())
    return _lists(offsets, pa.array(flat), pa.array(is_absent))


def _messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Messages with their keys other than role and content as JSON in `more`; None if there are none."""
    rows = []
    for message in messages:
        more = {name: value for name, value in message.items() if name not in ("role", "content")}
        rows.append(
            {"role": message["role"], "content": message["content"], "more": json.dumps(more) if more else None}
        )
    return rows


def _numbers(numbers: Mapping[str, float]) -> list[tuple[str, float]]:
    return [(name, float(number)) for name, number in numbers.items()]


def _info_text(info: Info) -> str | None:
    """Free metadata as ASCII JSON; None if empty."""
    return json.dumps(info, sort_keys=True) if info else None


def _flat(lists: Iterable[Sequence[float]], kind: pa.DataType) -> pa.Array:
    return pa.array(list(itertools.chain.from_iterable(lists)), kind)


def _pieces(tokens: pa.Array, piece: PieceOf) -> pa.Array:
    encoded = tokens.dictionary_encode()
    pieces = pa.array([piece(token) for token in encoded.dictionary.to_pylist()], pa.binary())
    return pieces.take(encoded.indices)


def _offsets(lengths: Iterable[int]) -> Integers:
    """The start of each list in the concatenation of all, and the end of the last."""
    return np.fromiter(itertools.accumulate(lengths, initial=0), np.int32)


def _lists(offsets: Integers, items: pa.Array, mask: pa.Array | None = None) -> pa.ListArray:
    return pa.ListArray.from_arrays(pa.array(offsets), items, mask=mask)


def _array(rows: Sequence[Mapping[str, Any]], kind: pa.StructType) -> pa.StructArray:
    try:
        return pa.array(rows, kind)
    except UnicodeEncodeError:
        return pa.array(_escaped(rows), kind)


def _escaped(value: Any) -> Any:
    """Escape lone surrogates, which UTF-8 cannot represent, and which texts of reward functions may contain."""
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode("utf-8")
    if isinstance(value, Mapping):
        return {name: _escaped(inner) for name, inner in value.items()}
    return type(value)(map(_escaped, value)) if isinstance(value, list | tuple) else value


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


RESTORED_SCORES = ("learner_logprobs", "reference_logprobs", "values")
"""Columns with one number per sampled token that scoring has computed before the update."""

_OF_ROLLOUTS = ("id", "group_id", "task_id", "environment", "answer", "status", "error", "not_trained", "rewards")
COLUMNS = (*_OF_ROLLOUTS, "turns", "experts")
"""Columns that `groups_of_table` reads."""
_OF_TURNS = ("rewards", "anchor_state", "starts_sequence", "stop_reason", "first_version", "last_version")
_OF_TOKENS = ("observation_tokens", "token_ids", "logprobs", *RESTORED_SCORES)

_NO_MESSAGES = ({"role": "user", "content": ""},)

TokenScores = Mapping[str, Float32[np.ndarray, " tokens"]]
"""Scores of one rollout by column, with all turns concatenated; absent if not stored."""


class StoredGroups(NamedTuple):
    """The groups of a step."""

    groups: list[RolloutGroup]
    """Groups that the step trained on, in its order, including their failed rollouts."""
    scores: dict[str, TokenScores]
    """Scores by rollout id."""


def groups_of_table(table: pa.Table) -> StoredGroups:
    """Restore the groups that a step trained on; groups that were filtered out or too old are left out.

    Tokens, log-probs, rewards, scores and chosen experts, if they were stored, are exactly as training used them.
    Everything else is not restored: messages, evaluations, metrics, timings and free metadata. The table has the
    `COLUMNS` of a step's rollouts.
    """
    rows = table.select([*_OF_ROLLOUTS, "experts"]).to_pylist(maps_as_pydicts="strict")
    turns = table["turns"].combine_chunks()
    fields = {name: turns.values.field(name).to_pylist(maps_as_pydicts="strict") for name in _OF_TURNS + _OF_TOKENS}
    members: dict[str, list[Rollout]] = {}
    scores: dict[str, TokenScores] = {}
    unused = {row["group_id"] for row in rows if row["not_trained"] in ("filtered", "stale")}
    for row, (start, end) in zip(rows, itertools.pairwise(turns.offsets.to_pylist()), strict=True):
        if row["group_id"] in unused:
            continue
        own = [{name: values[index] for name, values in fields.items()} for index in range(start, end)]
        rollout = _rollout(row, own)
        members.setdefault(rollout.group_id, []).append(rollout)
        stored = [name for name in RESTORED_SCORES if own and all(turn[name] is not None for turn in own)]
        scores[rollout.id] = {
            name: np.concatenate([np.array(turn[name], np.float32) for turn in own]) for name in stored
        }
    return StoredGroups([RolloutGroup(name, rollouts) for name, rollouts in members.items()], scores)


def _rollout(row: Mapping[str, Any], turns: Sequence[Mapping[str, Any]]) -> Rollout:
    return Rollout(
        id=row["id"],
        group_id=row["group_id"],
        task=Task(row["task_id"], row["environment"], _NO_MESSAGES, row["answer"] or ""),
        turns=tuple(map(_turn, turns, row["experts"] or [None] * len(turns))),
        status=RolloutStatus(row["status"]),
        rewards=row["rewards"],
        error=row["error"],
    )


def _turn(turn: Mapping[str, Any], experts: Mapping[str, Any] | None) -> Turn:
    return Turn(
        observation_tokens=tuple(turn["observation_tokens"]),
        generation=Generation(
            token_ids=tuple(turn["token_ids"]),
            logprobs=tuple(turn["logprobs"]),
            stop_reason=StopReason(turn["stop_reason"]),
            first_version=turn["first_version"],
            last_version=turn["last_version"],
            experts=_restored_array(experts),
        ),
        messages=(),
        rewards=turn["rewards"],
        anchor_state=turn["anchor_state"],
        starts_sequence=turn["starts_sequence"],
    )
