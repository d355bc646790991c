# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""The record of a stored rollout: its columns, and the conversion of rollouts to a table.

One row is one rollout. Lists of a turn have one item per token: those over the sampled tokens (`token_ids`, `pieces`,
`logprobs`, …) have one length, those over the observation's tokens another. Null means that the run did not compute
the value. `marin_rl.runs.rollout_files` writes and reads the table.
"""

import dataclasses
import itertools
import json
import struct
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from jaxtyping import Float, Int32

from marin_rl.objectives.advantage_inputs import TurnAdvantages
from marin_rl.types import Info, Message, Rollout, RolloutStatus

SCHEMA_VERSION = 3
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

_TURN_FIELDS = ("action", "reward", "rewards", "anchor_state", "starts_sequence")
_GENERATION_FIELDS = ("stop_reason", "first_version", "last_version")
"""Attributes of `Turn` and `Generation` that are columns of a turn."""

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
) -> pa.Table:
    """Convert rollouts to a table with the columns of `SCHEMA`.

    Args:
        rollouts: the rollouts.
        step: the step that trained on the rollouts, or the step before an evaluation.
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
    pairs = list(zip(rollouts, own, strict=True))
    turns, num_observed, num_sampled = _turns_column(rollouts, own, piece)
    columns: dict[str, Any] = {
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
        "num_tokens": num_observed + num_sampled,
        "num_generated_tokens": num_sampled,
        "info": [_info_text(rollout.info) for rollout in rollouts],
        "turns": turns,
        "last_observation": _observations_column(rollouts, piece),
    }
    others = [name for name in SCHEMA.names if name not in columns]
    columns |= {name: [getattr(rollout, name) for rollout in rollouts] for name in others}
    return pa.Table.from_arrays([_column(columns[field.name], field.type) for field in SCHEMA], schema=SCHEMA)


def _turns_column(
    rollouts: Sequence[Rollout], own: Sequence[StoredAdvantages | None], piece: PieceOf
) -> tuple[pa.ListArray, Integers, Integers]:
    """Convert all turns to the column `turns`; also return each rollout's number of observed and of sampled tokens."""
    turns = [turn for rollout in rollouts for turn in rollout.turns]
    generations = [turn.generation for turn in turns]
    counts = [len(rollout.turns) for rollout in rollouts]
    owners = [rollout for rollout, count in zip(rollouts, counts, strict=True) for _ in range(count)]
    observations, replies = [turn.observation_tokens for turn in turns], [one.token_ids for one in generations]
    observation_tokens, token_ids = _token_ids(owners, observations), _token_ids(owners, replies)
    rows, observed, sampled = _offsets(counts), _offsets(map(len, observations)), _offsets(map(len, replies))
    num_observed, num_sampled = np.diff(observed[rows]), np.diff(sampled[rows])
    has_loss = [advantages is not None and advantages.advantages is not None for advantages in own]
    logprobs = itertools.chain.from_iterable(generation.logprobs for generation in generations)
    columns: dict[str, Any] = {
        "messages": _messages_column([turn.messages for turn in turns]),
        "info": [_info_text(turn.info) for turn in turns],
        **{name: [getattr(turn, name) for turn in turns] for name in _TURN_FIELDS},
        **{name: [getattr(generation, name) for generation in generations] for name in _GENERATION_FIELDS},
        "observation_tokens": _lists(observed, pa.array(observation_tokens)),
        "observation_pieces": _lists(observed, _pieces(observation_tokens, piece)),
        "token_ids": _lists(sampled, pa.array(token_ids)),
        "pieces": _lists(sampled, _pieces(token_ids, piece)),
        "loss_mask": _lists(sampled, pa.array(np.repeat(np.array(has_loss, np.bool_), num_sampled))),
        "logprobs": _lists(sampled, pa.array(np.fromiter(logprobs, np.float32))),
        **{name: _scores_column(name, rollouts, own, sampled, num_sampled) for name in TOKEN_COLUMNS},
        **_turn_advantages(rollouts, own),
    }
    return _lists(rows, _struct(columns, _TURN)), num_observed, num_sampled


def _scores_column(
    name: str,
    rollouts: Sequence[Rollout],
    own: Sequence[StoredAdvantages | None],
    sampled: Integers,
    num_sampled: Integers,
) -> pa.ListArray:
    """Convert one array of each rollout to a list for each turn, null without an array.

    Args:
        name: attribute of `StoredAdvantages`.
        rollouts: the rollouts.
        own: their advantages.
        sampled: offsets of the turns in the sampled tokens.
        num_sampled: sampled tokens of each rollout.
    """
    arrays = [None if advantages is None else getattr(advantages, name) for advantages in own]
    for rollout, values, length in zip(rollouts, arrays, num_sampled.tolist(), strict=True):
        if values is not None:
            _check_length(rollout, name, values, length)
    present = [values is not None for values in arrays]
    counts = [len(rollout.turns) for rollout in rollouts]
    has_array = np.repeat(np.array(present, np.bool_), counts)
    computed = [np.zeros(0, np.float32), *(values for values in arrays if values is not None)]
    with np.errstate(over="ignore"):
        flat = np.concatenate(computed, dtype=np.float32, casting="same_kind")
    offsets = _offsets(np.where(has_array, np.diff(sampled), 0).tolist())
    return _lists(offsets, pa.array(flat), pa.array(~has_array))


def _turn_advantages(
    rollouts: Sequence[Rollout], own: Sequence[StoredAdvantages | None]
) -> dict[str, list[float | None]]:
    """Return the parts of each turn's advantage by column."""
    columns: dict[str, list[float | None]] = {"episode_advantage": [], "step_return": [], "step_advantage": []}
    for rollout, advantages in zip(rollouts, own, strict=True):
        count = len(rollout.turns)
        parts = None if advantages is None else advantages.turn_advantages
        if parts is None:
            rows: list[list[float | None]] = [[None] * count] * len(columns)
        else:
            _check_length(rollout, "returns", parts.returns, count)
            _check_length(rollout, "step_advantages", parts.step_advantages, count)
            rows = [[parts.episode_advantage] * count, parts.returns.tolist(), parts.step_advantages.tolist()]
        for column, values in zip(columns.values(), rows, strict=True):
            column += values
    return columns


def _observations_column(rollouts: Sequence[Rollout], piece: PieceOf) -> pa.StructArray:
    observations = [rollout.last_observation for rollout in rollouts]
    lists = [() if observation is None else observation.tokens for observation in observations]
    tokens, offsets = _token_ids(rollouts, lists), _offsets(map(len, lists))
    mask = pa.array([observation is None for observation in observations], pa.bool_())
    columns = {
        "messages": _messages_column([None if one is None else one.messages for one in observations]),
        "starts_sequence": [None if one is None else one.starts_sequence for one in observations],
        "observation_tokens": _lists(offsets, pa.array(tokens), mask),
        "observation_pieces": _lists(offsets, _pieces(tokens, piece), mask),
    }
    return _struct(columns, _OBSERVATION, mask)


def _messages_column(lists: Sequence[Sequence[Message] | None]) -> pa.ListArray:
    messages = [message for conversation in lists if conversation is not None for message in conversation]
    columns = {
        "role": [message["role"] for message in messages],
        "content": [message["content"] for message in messages],
        "more": [_more(message) for message in messages],
    }
    mask = pa.array([conversation is None for conversation in lists], pa.bool_())
    offsets = _offsets(0 if conversation is None else len(conversation) for conversation in lists)
    return _lists(offsets, _struct(columns, _MESSAGE), mask)


def _more(message: Message) -> str | None:
    """The keys of a message other than role and content, as JSON; None if there are none."""
    if len(message) == 2:
        return None
    return json.dumps({name: value for name, value in message.items() if name not in ("role", "content")})


def _token_ids(owners: Sequence[Rollout], lists: Sequence[Sequence[int]]) -> Integers:
    """Concatenate lists of token ids, each of one rollout."""
    packed = []
    for owner, tokens in zip(owners, lists, strict=True):
        try:
            # Faster than numpy, which would truncate other numbers.
            packed.append(struct.pack(f"{len(tokens)}i", *tokens))
        except struct.error as error:
            raise ValueError(f"rollout {owner.id}: token ids must be integers of 32 bits ({error})") from error
    return np.frombuffer(b"".join(packed), np.int32)


def _pieces(tokens: Integers, piece: PieceOf) -> pa.Array:
    encoded = pa.array(tokens).dictionary_encode()
    pieces = pa.array([piece(token) for token in encoded.dictionary.to_pylist()], pa.binary())
    return pieces.take(encoded.indices)


def _column(values: Any, kind: pa.DataType) -> pa.Array:
    """Convert one value per row to an Arrow array of a type of `SCHEMA`.

    None is null. Structures are objects with the fields of `kind`. Arrow arrays are returned unchanged.
    """
    if isinstance(values, pa.Array):
        return values
    if pa.types.is_struct(kind):
        return _struct({field.name: [getattr(value, field.name) for value in values] for field in kind}, kind)
    if pa.types.is_map(kind):
        names = _strings([name for value in values for name in value])
        numbers = pa.array([float(number) for value in values for number in value.values()], pa.float64())
        return pa.MapArray.from_arrays(pa.array(_offsets(map(len, values))), names, numbers, type=kind)
    if pa.types.is_list(kind):
        items = _column([item for value in values for item in value], kind.value_type)
        return _lists(_offsets(map(len, values)), items)
    return _strings(values) if pa.types.is_string(kind) else pa.array(values, kind)


def _struct(columns: Mapping[str, Any], kind: pa.StructType, mask: pa.Array | None = None) -> pa.StructArray:
    """Build structures from one column per field."""
    children = [_column(columns[field.name], field.type) for field in kind]
    return pa.StructArray.from_arrays(children, fields=list(kind), mask=mask)


def _offsets(lengths: Iterable[int]) -> Integers:
    """The start of each list in the concatenation of all, and the end of the last."""
    return np.fromiter(itertools.accumulate(lengths, initial=0), np.int32)


def _lists(offsets: Integers, items: pa.Array, mask: pa.Array | None = None) -> pa.ListArray:
    return pa.ListArray.from_arrays(pa.array(offsets), items, mask=mask)


def _strings(values: Sequence[str | None]) -> pa.Array:
    try:
        return pa.array(values, pa.string())
    except UnicodeEncodeError:
        # UTF-8 cannot represent lone surrogates, which texts of reward functions may contain.
        escaped = [
            value if value is None else value.encode("utf-8", "backslashreplace").decode("utf-8") for value in values
        ]
        return pa.array(escaped, pa.string())


def _info_text(info: Info) -> str | None:
    """Free metadata as ASCII JSON; None if empty."""
    return json.dumps(info, sort_keys=True) if info else None


def _check_length(rollout: Rollout, name: str, values: np.ndarray, length: int) -> None:
    if len(values) != length:
        raise ValueError(f"rollout {rollout.id}: {name} has length {len(values)}, expected {length}")


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
