# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import dataclasses
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from marin_rl.batching.processed_rollout import process_rollout
from marin_rl.batching.rollout_batch import batch_rollouts
from marin_rl.objectives.advantage_inputs import TurnAdvantages
from marin_rl.runs.rollout_store import as_parquet, read_file
from marin_rl.runs.stored_rollout import COLUMNS, SCHEMA, SCHEMA_VERSION, StoredAdvantages, as_table, groups_of_table
from marin_rl.types import Message, Rollout, RolloutGroup, RolloutStatus, Turn
from tests.rollouts.rollout_cases import (
    group_of,
    piece,
    rich_rollout,
    rich_signal,
    rollout_of,
    turn_of,
    with_experts,
    write,
)

PAGE = Path(__file__).parents[2] / "docs" / "pages" / "api" / "records.md"


def names_in(fields: pa.StructType | pa.Schema) -> set[str]:
    """All names in nested columns."""
    found = set()
    for field in fields:
        found.add(field.name)
        inner = field.type.value_type if pa.types.is_list(field.type) else field.type
        if pa.types.is_struct(inner):
            found |= names_in(inner)
    return found


def test_every_column_is_documented():
    tables = PAGE.read_text(encoding="utf-8").partition("## Columns of stored rollouts")[2]
    lines = [line for line in tables.splitlines() if line.startswith("| `")]
    documented = {name for line in lines for name in re.findall(r"`(\w+)`", line)}
    assert names_in(SCHEMA) <= documented
    first = [name for line in lines for name in re.findall(r"`(\w+)`", line.split("|")[1])]
    assert set(first) <= names_in(SCHEMA)
    assert f"this is version {SCHEMA_VERSION}." in tables


SCORES = ("learner_logprobs", "reference_logprobs", "advantages", "values", "value_targets")


def expected_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    rows = []
    for message in messages:
        more = {key: value for key, value in message.items() if key not in ("role", "content")}
        rows.append(
            {"role": message["role"], "content": message["content"], "more": json.dumps(more) if more else None}
        )
    return rows


def expected_turns(rollout: Rollout, stored: StoredAdvantages | None) -> list[dict[str, Any]]:
    """The column `turns` in plain Python, token by token."""
    rows, sampled = [], 0
    for index, turn in enumerate(rollout.turns):
        generation = turn.generation
        row: dict[str, Any] = {
            "messages": expected_messages(turn.messages),
            "action": turn.action,
            "reward": turn.reward,
            "rewards": list(turn.rewards.items()),
            "info": json.dumps(turn.info, sort_keys=True) if turn.info else None,
            "anchor_state": turn.anchor_state,
            "starts_sequence": turn.starts_sequence,
            "stop_reason": generation.stop_reason.value,
            "first_version": generation.first_version,
            "last_version": generation.last_version,
            "observation_tokens": list(turn.observation_tokens),
            "observation_pieces": [piece(token) for token in turn.observation_tokens],
            "token_ids": list(generation.token_ids),
            "pieces": [piece(token) for token in generation.token_ids],
            "loss_mask": [stored is not None and stored.advantages is not None for _ in generation.token_ids],
            "logprobs": [float(np.float32(value)) for value in generation.logprobs],
        }
        for name in SCORES:
            scores = None if stored is None else getattr(stored, name)
            own = [sampled + position for position in range(len(generation.token_ids))]
            row[name] = None if scores is None else [float(np.float32(scores[at])) for at in own]
        parts = None if stored is None else stored.turn_advantages
        row["episode_advantage"] = None if parts is None else parts.episode_advantage
        row["step_return"] = None if parts is None else float(parts.returns[index])
        row["step_advantage"] = None if parts is None else float(parts.step_advantages[index])
        sampled += len(generation.token_ids)
        rows.append(row)
    return rows


def expected_experts(experts: np.ndarray | None) -> dict[str, Any] | None:
    if experts is None:
        return None
    size = experts.dtype.itemsize
    data = b"".join(value.to_bytes(size, "little") for value in experts.ravel().tolist())
    return {"dtype": f"uint{8 * size}", "shape": list(experts.shape), "data": data}


def expected_row(rollout: Rollout, stored: StoredAdvantages | None, not_trained: str | None) -> dict[str, Any]:
    """A row in plain Python, as the page `records.md` defines the columns."""
    last = rollout.last_observation
    return {
        "step": 7,
        "purpose": "training",
        "id": rollout.id,
        "group_id": rollout.group_id,
        "task_id": rollout.task.id,
        "environment": rollout.task.environment,
        "answer": rollout.task.answer,
        "status": rollout.status.value,
        "error": rollout.error,
        "not_trained": not_trained,
        "reward": sum(rollout.rewards.values()) if rollout.rewards else None,
        "rewards": list(rollout.rewards.items()),
        "evaluations": [
            {
                **{name: getattr(result, name) for name in ("component", "weight", "score", "reason")},
                **{name: getattr(result, name) for name in ("failure", "error")},
                "metrics": list(result.metrics.items()),
                "steps": [{**vars(step), "metrics": list(step.metrics.items())} for step in result.steps],
            }
            for result in rollout.evaluations
        ],
        "advantage": None if stored is None or stored.advantages is None else float(np.mean(stored.advantages)),
        "num_turns": len(rollout.turns),
        "num_tokens": sum(len(turn.observation_tokens) + len(turn.generation.token_ids) for turn in rollout.turns),
        "num_generated_tokens": sum(len(turn.generation.token_ids) for turn in rollout.turns),
        "metrics": list(rollout.metrics.items()),
        "seconds": list(rollout.seconds.items()),
        "info": json.dumps(rollout.info, sort_keys=True) if rollout.info else None,
        "turns": expected_turns(rollout, stored),
        "last_observation": None
        if last is None
        else {
            "messages": expected_messages(last.messages),
            "starts_sequence": last.starts_sequence,
            "observation_tokens": list(last.tokens),
            "observation_pieces": [piece(token) for token in last.tokens],
        },
        "experts": [expected_experts(turn.generation.experts) for turn in rollout.turns],
    }


def random_rollout(rng: np.random.Generator, index: int) -> tuple[Rollout, StoredAdvantages | None, str | None]:
    """A rollout with some fields absent, its stored advantages, and why it was not trained on."""
    words = ["", "é", "5", "say \u2028", "\U0001f600 and more words"]

    def word() -> str:
        return words[rng.integers(len(words))]

    def turn(starts: bool) -> Turn:
        tool = {"role": "tool", "content": word(), "name": word()}
        info = {"tries": [1, None]} if rng.random() < 0.5 else {}
        action = word() if rng.random() < 0.5 else None
        made = turn_of(word(), word(), 0.5 if rng.random() < 0.5 else None, starts_sequence=starts)
        return dataclasses.replace(made, messages=(*made.messages, tool), info=info, action=action)

    if rng.random() < 0.2:
        return rollout_of(f"g-{index}", reward=None), None, "failed"
    turns = (turn(True), *(turn(False) for _ in range(rng.integers(3))))
    tokens = sum(len(turn.generation.token_ids) for turn in turns)
    rollout = dataclasses.replace(
        rich_rollout(),
        id=f"g-{index}",
        turns=turns,
        evaluations=rich_rollout().evaluations[: rng.integers(4)],
        last_observation=rich_rollout().last_observation if rng.random() < 0.5 else None,
    )
    if rng.random() < 0.3:
        return rollout, None, "filtered"
    scores = {name: rng.normal(size=tokens) for name in SCORES if rng.random() < 0.7}
    parts = TurnAdvantages(0.5, rng.normal(size=len(turns)), rng.normal(size=len(turns)))
    stored = StoredAdvantages(**{"advantages": None, **scores}, turn_advantages=parts if rng.random() < 0.5 else None)
    return rollout, stored, None if stored.advantages is not None else "no_tokens"


@pytest.mark.parametrize("seed", range(8))
def test_every_column_of_a_file_equals_the_rollouts(tmp_path: Path, seed: int) -> None:
    rng = np.random.default_rng(seed)
    given = [random_rollout(rng, index) for index in range(rng.integers(6))]
    if seed % 3:
        given = [(with_experts(one, dtype="uint8" if seed % 3 == 1 else "uint16"), *rest) for one, *rest in given]
    rollouts = [rollout for rollout, _, _ in given]
    stored = {rollout.id: advantages for rollout, advantages, _ in given if advantages is not None}
    table = as_table(rollouts, 7, "training", stored, piece, experts=True)
    table.validate(full=True)
    path = tmp_path / "step-00000007.parquet"
    path.write_bytes(as_parquet(table))
    again = read_file(path)
    assert again is not None
    assert again.schema.equals(SCHEMA)
    rows = again.to_pylist()
    for row, (rollout, advantages, why) in zip(rows, given, strict=True):
        expected = expected_row(rollout, advantages, why)
        assert list(row) == list(expected)
        for name, value in expected.items():
            assert row[name] == value, name


def test_arrays_of_another_length_and_tokens_of_another_type_are_refused() -> None:
    rollout = rollout_of("g-0")
    parts = TurnAdvantages(0.5, np.zeros(1), np.zeros(2))
    for stored, problem in (
        (StoredAdvantages(np.zeros(5)), "advantages has length 5, expected 2"),
        (StoredAdvantages(None, values=np.zeros(1)), "values has length 1, expected 2"),
        (StoredAdvantages(None, turn_advantages=parts), "step_advantages has length 2, expected 1"),
    ):
        with pytest.raises(ValueError, match=f"rollout g-0: {problem}"):
            as_table([rollout], 1, "training", {"g-0": stored}, piece)
    turn = dataclasses.replace(rollout.turns[0], observation_tokens=(2**31,))
    with pytest.raises(pa.ArrowInvalid, match="2147483648"):
        as_table([dataclasses.replace(rollout, turns=(turn,))], 1, "training", {}, piece)


@pytest.mark.parametrize("dtype", ["uint8", "uint16"])
def test_chosen_experts_are_restored_if_they_are_stored(tmp_path: Path, dtype: str) -> None:
    cut = rollout_of("g-1", status=RolloutStatus.TRUNCATED)
    rollouts = [with_experts(one, dtype=dtype) for one in (rich_rollout(), cut, rollout_of("g-2", reward=None))]
    signals = {"g-0": rich_signal(), "g-1": StoredAdvantages(np.ones(2))}
    for step, stores in ((1, True), (2, False)):
        write(tmp_path, step, [RolloutGroup("g", rollouts)], signals, experts=stores)
        table = read_file(tmp_path / f"step-0000000{step}.parquet", COLUMNS)
        assert table is not None
        [group] = groups_of_table(table).groups
        if not stores:
            assert all(turn.generation.experts is None for one in group.rollouts for turn in one.turns)
            continue
        found, expected = (batch_rollouts(some, experts=True).experts for some in (group.rollouts, rollouts))
        assert found is not None
        assert expected is not None
        assert found.dtype == expected.dtype == dtype
        np.testing.assert_array_equal(found, expected)


def test_groups_are_restored_as_training_uses_them(tmp_path: Path):
    rich = rich_rollout()
    failed = rollout_of("g-1", reward=None, status=RolloutStatus.TIMED_OUT)
    cut = rollout_of("h-0", "h", "55", status=RolloutStatus.TRUNCATED)
    other = rollout_of("h-1", "h", "4", reward=0.1)
    groups = [RolloutGroup("g", [rich, failed]), RolloutGroup("h", [cut, other])]
    signals = {
        "g-0": rich_signal(),
        "h-0": StoredAdvantages(None, reference_logprobs=np.array([-1.0, -2.0, -3.0])),
        "h-1": StoredAdvantages(np.array([0.5, 0.5])),
    }
    write(tmp_path, 3, groups, signals)
    [file] = tmp_path.iterdir()
    table = read_file(file, COLUMNS)
    assert table is not None
    found = groups_of_table(table)
    assert [group.id for group in found.groups] == ["g", "h"]
    for group, expected in zip(found.groups, groups, strict=True):
        for rollout, original in zip(group.rollouts, expected.rollouts, strict=True):
            assert (rollout.id, rollout.status, rollout.error) == (original.id, original.status, original.error)
            assert list(rollout.rewards.items()) == list(original.rewards.items())
            assert [turn.rewards for turn in rollout.turns] == [turn.rewards for turn in original.turns]
            assert [turn.anchor_state for turn in rollout.turns] == [turn.anchor_state for turn in original.turns]
            same = dataclasses.asdict(process_rollout(original, length=64, pad_token_id=0))
            again = dataclasses.asdict(process_rollout(rollout, length=64, pad_token_id=0))
            for name, array in same.items():
                np.testing.assert_array_equal(again[name], array, err_msg=name)
    signal = vars(rich_signal())
    names = {"learner_logprobs", "reference_logprobs", "values"}
    assert {name: array.tolist() for name, array in found.scores["g-0"].items()} == {
        name: signal[name].tolist() for name in names
    }
    assert {name: array.tolist() for name, array in found.scores["h-0"].items()} == {
        "reference_logprobs": [-1.0, -2.0, -3.0]
    }
    assert found.scores["h-1"] == found.scores["g-1"] == {}


def test_groups_that_were_not_trained_on_are_left_out(tmp_path: Path):
    signals = {"a-0": StoredAdvantages(np.array([1.0, 1.0])), "a-1": StoredAdvantages(np.array([-1.0, -1.0]))}
    write(tmp_path, 3, [group_of("a", 1.0, 0.0), group_of("b", 1.0, None)], signals)
    [file] = tmp_path.iterdir()
    table = read_file(file, COLUMNS)
    assert table is not None
    assert table["not_trained"].to_pylist() == [None, None, "filtered", "failed"]
    assert [group.id for group in groups_of_table(table).groups] == ["a"]
