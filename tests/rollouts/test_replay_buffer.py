# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""The replay buffer: whole groups, none too old, none too often, none lost in a checkpoint."""

import collections
import dataclasses
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from marin_rl.rollouts.orders import OrderNumber
from marin_rl.rollouts.replay_buffer import ReplayBuffer, ReplayFileError
from marin_rl.types import RolloutGroup
from tests.rollouts.rollout_cases import group_of, rollout_of


def group_at(number: OrderNumber, version: int, environment: str = "sums") -> RolloutGroup:
    """A group of two rollouts, one of whose tokens comes from this version and the others from later ones."""
    rollouts = []
    for member, first in enumerate((version + 1, version)):
        rollout = rollout_of(f"{number.group_id}-{member}", number.group_id)
        generation = dataclasses.replace(rollout.turns[0].generation, first_version=first, last_version=version + 2)
        turn = dataclasses.replace(rollout.turns[0], generation=generation)
        task = dataclasses.replace(rollout.task, environment=environment)
        rollouts.append(dataclasses.replace(rollout, turns=(turn,), task=task))
    return RolloutGroup(number.group_id, rollouts)


def filled(buffer: ReplayBuffer, *versions: int) -> ReplayBuffer:
    for index, version in enumerate(versions):
        buffer.add(OrderNumber(1, index), group_at(OrderNumber(1, index), version))
    return buffer


def test_the_oldest_orders_are_drawn_first() -> None:
    buffer = ReplayBuffer(max_staleness=5)
    for index in (2, 0, 1):
        buffer.add(OrderNumber(1, index), group_at(OrderNumber(1, index), 0))
    assert [group.id for group in buffer.draw(2, 1)] == ["train-1-0", "train-1-1"]
    assert [group.id for group in buffer.draw(2, 1)] == ["train-1-2"]
    assert len(buffer) == 0


def test_staleness_counts_from_the_oldest_token() -> None:
    buffer = filled(ReplayBuffer(max_staleness=1), 0, 1, 2)
    assert buffer.ages(2) == [2, 1, 0]
    with pytest.raises(ValueError, match=r"train-1-0 has tokens of version 0, too old for weights of version 2"):
        buffer.draw(3, 2)
    assert [one.group.id for one in buffer.expire(2)] == ["train-1-0"]
    assert buffer.expire(2) == []
    assert [group.id for group in buffer.draw(3, 2)] == ["train-1-1", "train-1-2"]


def test_a_group_is_used_so_often_and_once_a_batch() -> None:
    buffer = filled(ReplayBuffer(max_staleness=2, uses_per_group=2), 0, 0, 0)
    assert buffer.uses_left == 6
    drawn = [[group.id for group in buffer.draw(2, version)] for version in (0, 1, 2)]
    assert drawn == [["train-1-0", "train-1-1"]] * 2 + [["train-1-2"]]
    assert buffer.uses_left == 1


def test_recent_groups_are_drawn_more_often_by_the_half_life() -> None:
    # Of two groups, one of them h versions older, the younger one comes first with probability 1/(1 + 1/2).
    firsts = collections.Counter(
        filled(ReplayBuffer(max_staleness=9, half_life=3.0, seed=seed), 0, 3).draw(1, 3)[0].id for seed in range(600)
    )
    share, expected = firsts["train-1-1"] / 600, 2 / 3
    assert abs(share - expected) < 4 * math.sqrt(expected * (1 - expected) / 600)


def test_the_same_draw_comes_again() -> None:
    def draw() -> list[str]:
        return [group.id for group in filled(ReplayBuffer(max_staleness=9, half_life=1.0), *range(6)).draw(3, 6)]

    assert draw() == draw()
    assert draw() == sorted(draw())


def test_an_order_is_taken_once() -> None:
    buffer = filled(ReplayBuffer(max_staleness=1), 0)
    with pytest.raises(ValueError, match="train-1-0 is in the replay buffer already"):
        filled(buffer, 0)


def test_a_group_without_tokens_never_grows_old() -> None:
    buffer = ReplayBuffer(max_staleness=0, half_life=1.0)
    buffer.add(OrderNumber(1, 5), group_of("train-1-5", None, None))
    assert buffer.expire(9) == []
    assert [group.id for group in buffer.draw(1, 9)] == ["train-1-5"]


def test_environments_are_counted() -> None:
    buffer = ReplayBuffer(max_staleness=1)
    for index, name in enumerate(("sums", "games", "sums")):
        buffer.add(OrderNumber(1, index), group_at(OrderNumber(1, index), 0, name))
    assert buffer.by_environment() == {"sums": 2, "games": 1}


def test_it_comes_back_from_a_file(tmp_path: Path) -> None:
    buffer = filled(ReplayBuffer(max_staleness=3, uses_per_group=2), 0, 1, 2)
    buffer.draw(1, 2)
    buffer.save(tmp_path / "replay.parquet")
    assert [path.name for path in tmp_path.iterdir()] == ["replay.parquet"]
    again = ReplayBuffer(max_staleness=3, uses_per_group=2)
    again.load(tmp_path / "replay.parquet")
    assert again.uses_left == buffer.uses_left == 5
    assert [again.draw(3, 3), again.draw(3, 3)] == [buffer.draw(3, 3), buffer.draw(3, 3)]


def test_an_empty_one_comes_back_too(tmp_path: Path) -> None:
    ReplayBuffer(max_staleness=0).save(tmp_path / "replay.parquet")
    again = ReplayBuffer(max_staleness=0)
    again.load(tmp_path / "replay.parquet")
    assert len(again) == 0


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    file = tmp_path / "replay.parquet"
    filled(ReplayBuffer(max_staleness=3), 0, 1).save(file)
    file.write_bytes(file.read_bytes()[:-20])
    with pytest.raises(ReplayFileError, match=r"replay\.parquet cannot be read"):
        ReplayBuffer(max_staleness=3).load(file)
    with pytest.raises(ReplayFileError, match="cannot be read"):
        ReplayBuffer(max_staleness=3).load(tmp_path / "missing.parquet")


@given(st.data())
def test_no_group_is_used_beyond_its_bounds(data: st.DataObject) -> None:
    staleness = data.draw(st.integers(0, 3))
    uses = data.draw(st.integers(1, staleness + 1))
    half_life = data.draw(st.sampled_from([None, 0.5, 2.0]))
    buffer = ReplayBuffer(max_staleness=staleness, uses_per_group=uses, half_life=half_life)
    sampled_at, used, version = {}, collections.Counter(), 0
    for index in range(data.draw(st.integers(1, 25))):
        if data.draw(st.booleans()):
            number = OrderNumber(1, index)
            buffer.add(number, group_at(number, version))
            sampled_at[number.group_id] = version
        else:
            buffer.expire(version)
            batch = [group.id for group in buffer.draw(data.draw(st.integers(0, 4)), version)]
            assert len(batch) == len(set(batch))
            assert all(version - sampled_at[name] <= staleness for name in batch)
            used.update(batch)
            version += 1
    assert all(count <= uses for count in used.values())
    waiting = sum(uses - used[name] for name, at in sampled_at.items() if version - at <= staleness)
    buffer.expire(version)
    assert buffer.uses_left == waiting
