# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from marin_rl.batching.processed_rollout import process_rollout
from marin_rl.runs.rollout_store import read_file
from marin_rl.runs.stored_groups import COLUMNS, groups_of_table
from marin_rl.runs.stored_rollout import StoredAdvantages
from marin_rl.types import RolloutGroup, RolloutStatus
from tests.rollouts.rollout_cases import group_of, rich_rollout, rich_signal, rollout_of, write


@pytest.mark.parametrize("format", ["parquet", "jsonl"])
def test_groups_are_restored_as_training_uses_them(tmp_path: Path, format: str):
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
    write(tmp_path, 3, groups, signals, format=format)
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
