# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""The groups that a step trained on, read back from the rollout store.

Tokens, log-probs, rewards and scores are stored exactly as training used them. Everything else is not restored:
messages, evaluations, metrics, timings and free metadata.
"""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from jaxtyping import Float32

from marin_rl.types import Generation, Rollout, RolloutGroup, RolloutStatus, StopReason, Task, Turn

RESTORED_SCORES = ("learner_logprobs", "reference_logprobs", "values")
"""Columns with one number per sampled token that scoring has computed before the update."""

COLUMNS = ("id", "group_id", "task_id", "environment", "answer", "status", "error", "not_trained", "rewards", "turns")
"""Columns that `groups_of_table` reads."""

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

    Args:
        table: the rollouts of a step, with `COLUMNS`.
    """
    rows = table.select([name for name in COLUMNS if name != "turns"]).to_pylist(maps_as_pydicts="strict")
    turns = _turns_of_rows(table["turns"].combine_chunks())
    members: dict[str, list[Rollout]] = {}
    scores: dict[str, TokenScores] = {}
    unused = {row["group_id"] for row in rows if row["not_trained"] in ("filtered", "stale")}
    for row, turns_of_row in zip(rows, turns, strict=True):
        if row["group_id"] in unused:
            continue
        rollout = _rollout(row, [turn for turn, _ in turns_of_row])
        members.setdefault(rollout.group_id, []).append(rollout)
        parts = [found for _, found in turns_of_row]
        stored = [name for name in RESTORED_SCORES if parts and all(name in found for found in parts)]
        scores[rollout.id] = {name: np.concatenate([found[name] for found in parts]) for name in stored}
    return StoredGroups([RolloutGroup(name, rollouts) for name, rollouts in members.items()], scores)


def _rollout(row: Mapping[str, Any], turns: Sequence[Turn]) -> Rollout:
    return Rollout(
        id=row["id"],
        group_id=row["group_id"],
        task=Task(row["task_id"], row["environment"], _NO_MESSAGES, row["answer"] or ""),
        turns=tuple(turns),
        status=RolloutStatus(row["status"]),
        rewards=row["rewards"],
        error=row["error"],
    )


@dataclasses.dataclass(frozen=True)
class _Lists:
    """A column of lists of numbers, without conversion to Python objects."""

    values: np.ndarray
    offsets: np.ndarray
    present: np.ndarray

    @classmethod
    def of(cls, column: pa.ListArray) -> "_Lists":
        values = column.values.to_numpy(zero_copy_only=False)
        return cls(values, column.offsets.to_numpy(), column.is_valid().to_numpy(zero_copy_only=False))

    def __getitem__(self, row: int) -> np.ndarray:
        return self.values[self.offsets[row] : self.offsets[row + 1]]


def _turns_of_rows(column: pa.ListArray) -> list[list[tuple[Turn, TokenScores]]]:
    """Return the turns of each row with their scores."""
    structs = column.values
    token_columns = ("observation_tokens", "token_ids", "logprobs", *RESTORED_SCORES)
    lists = {name: _Lists.of(structs.field(name)) for name in token_columns}
    names = ("rewards", "anchor_state", "starts_sequence", "stop_reason", "first_version", "last_version")
    plain = {name: structs.field(name).to_pylist(maps_as_pydicts="strict") for name in names}

    def turn_at(index: int) -> tuple[Turn, TokenScores]:
        generation = Generation(
            token_ids=tuple(lists["token_ids"][index].tolist()),
            logprobs=tuple(lists["logprobs"][index].tolist()),
            stop_reason=StopReason(plain["stop_reason"][index]),
            first_version=plain["first_version"][index],
            last_version=plain["last_version"][index],
        )
        turn = Turn(
            observation_tokens=tuple(lists["observation_tokens"][index].tolist()),
            generation=generation,
            messages=(),
            rewards=plain["rewards"][index],
            anchor_state=plain["anchor_state"][index],
            starts_sequence=plain["starts_sequence"][index],
        )
        return turn, {name: lists[name][index] for name in RESTORED_SCORES if lists[name].present[index]}

    offsets = column.offsets.to_numpy()
    return [[turn_at(index) for index in range(start, end)] for start, end in itertools.pairwise(offsets)]
