# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Replay buffer: limits on staleness and uses, draws, and saved files."""

import collections
import dataclasses
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from marin_rl.distributed.replay_buffer import ReplayBuffer, ReplayFileError
from marin_rl.distributed.scheduler import GroupRequest, RequestNumber, RolloutScheduler, StalenessLimits
from marin_rl.types import RolloutGroup, Task
from marin_rl.utils.errors import UserError
from tests.rollouts.rollout_cases import group_of, rollout_of


def group_at(number: RequestNumber, version: int, environment: str = "sums") -> RolloutGroup:
    """Make a group of two rollouts with one token of this version and the others of later versions."""
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
        buffer.add(RequestNumber(1, index), group_at(RequestNumber(1, index), version))
    return buffer


def test_staleness_is_measured_from_the_oldest_token() -> None:
    buffer = filled(ReplayBuffer(max_staleness=1), 0, 1, 2)
    assert buffer.ages(2) == [2, 1, 0]
    with pytest.raises(ValueError, match=r"train-1-0 has tokens of version 0, too old for weights of version 2"):
        buffer.draw({"sums": 3}, 2)
    assert [one.group.id for one in buffer.expire(2)] == ["train-1-0"]
    assert buffer.expire(2) == []
    assert [group.id for group in buffer.draw({"sums": 3}, 2)] == ["train-1-1", "train-1-2"]


def test_copy_is_independent() -> None:
    buffer = filled(ReplayBuffer(max_staleness=2, max_uses=2), 0, 1, 2)
    copied = buffer.copy()
    drawn = buffer.draw({"sums": 2}, 2)
    assert (buffer.uses_left, copied.uses_left) == (4, 6)
    assert copied.draw({"sums": 2}, 2) == drawn
    assert len(buffer.expire(3)) == 1
    assert len(copied) == 3


def test_group_is_used_max_uses_times_and_once_per_batch() -> None:
    buffer = filled(ReplayBuffer(max_staleness=2, max_uses=2), 0, 0, 0)
    assert buffer.uses_left == 6
    with pytest.raises(ValueError, match="train-1-0 is already in the replay buffer"):
        filled(buffer, 0)
    drawn = [[group.id for group in buffer.draw({"sums": 2}, version)] for version in (0, 1, 2)]
    assert drawn == [["train-1-0", "train-1-1"]] * 2 + [["train-1-2"]]
    assert buffer.uses_left == 1


def test_group_without_tokens_never_expires() -> None:
    buffer = ReplayBuffer(max_staleness=0)
    buffer.add(RequestNumber(1, 5), group_of("train-1-5", None, None))
    assert buffer.expire(9) == []
    assert [group.id for group in buffer.draw({"sums": 1}, 9)] == ["train-1-5"]


def pending(index: int, environment: str) -> GroupRequest:
    return GroupRequest(
        RequestNumber(1, index), Task(str(index), environment, ({"role": "user", "content": "?"},), ""), 0
    )


def test_batch_waits_for_its_share_of_each_environment() -> None:
    buffer = ReplayBuffer(max_staleness=1)
    for index in (0, 2, 3, 5):
        buffer.add(RequestNumber(1, index), group_at(RequestNumber(1, index), 0, "quick"))
    late = [pending(1, "slow"), pending(4, "slow")]
    mix = buffer.mix(4, late)
    assert mix == {"quick": 3, "slow": 1}
    assert not buffer.holds(mix)
    # Another group of the same environment suffices.
    buffer.add(RequestNumber(1, 4), group_at(RequestNumber(1, 4), 0, "slow"))
    assert buffer.mix(4, late[:1]) == mix
    assert buffer.holds(mix)
    assert [group.id for group in buffer.draw(mix, 0)] == [f"train-1-{index}" for index in (0, 2, 3, 4)]
    assert buffer.mix(4, late[:1]) == {"slow": 1, "quick": 1}
    assert not buffer.holds({"slow": 1})


@pytest.mark.parametrize("overtaking", [False, True])
@given(st.lists(st.sampled_from("abc"), min_size=1, max_size=30), st.integers(1, 5), st.randoms(use_true_random=False))
def test_batch_mix_does_not_depend_on_completion_order(
    overtaking: bool, environments: list[str], size: int, chance: random.Random
) -> None:
    coming = [pending(index, environment) for index, environment in enumerate(environments)]
    buffer = ReplayBuffer(max_staleness=0)
    batches: list[list[RolloutGroup]] = []
    while coming or len(buffer):
        while not buffer.holds(mix := buffer.mix(size, coming)):
            request = chance.choice(coming)
            if not overtaking:
                request = next(other for other in coming if other.task.environment == request.task.environment)
            coming.remove(request)
            buffer.add(request.number, group_at(request.number, 0, request.task.environment))
        batches.append(buffer.draw(mix, 0))
    names = [group.id for batch in batches for group in batch]
    assert sorted(names) == sorted(f"train-1-{index}" for index in range(len(environments)))
    assert all(len(batch) == size for batch in batches[:-1])
    if not overtaking:
        planned = [environments[start : start + size] for start in range(0, len(environments), size)]
        found = [[group.rollouts[0].task.environment for group in batch] for batch in batches]
        assert [sorted(batch) for batch in found] == [sorted(batch) for batch in planned]


def test_buffer_file_roundtrip() -> None:
    buffer = filled(ReplayBuffer(max_staleness=3, max_uses=2), 0, 1, 2)
    buffer.draw({"sums": 1}, 2)
    restored = ReplayBuffer(max_staleness=3, max_uses=2)
    restored.load(buffer.encode(), "replay.bin")
    assert restored.uses_left == buffer.uses_left == 5
    assert [restored.draw({"sums": 3}, 3), restored.draw({"sums": 3}, 3)] == [
        buffer.draw({"sums": 3}, 3),
        buffer.draw({"sums": 3}, 3),
    ]


def test_error_names_a_damaged_file() -> None:
    content = filled(ReplayBuffer(max_staleness=3), 0, 1).encode()
    with pytest.raises(ReplayFileError, match=r"replay\.bin cannot be read"):
        ReplayBuffer(max_staleness=3).load(content[:-20], "checkpoints/replay.bin")
    with pytest.raises(UserError, match="cannot be read"):
        ReplayBuffer(max_staleness=3).load(b"", "checkpoints/replay.bin")
    other = content.replace(b"rollout-group-3", b"rollout-group-2")
    with pytest.raises(ReplayFileError, match=r"replay\.bin was written by another version of marin_rl"):
        ReplayBuffer(max_staleness=3).load(other, "checkpoints/replay.bin")


@given(st.integers(1, 5), st.integers(0, 4).flatmap(lambda stale: st.tuples(st.just(stale), st.integers(1, stale + 1))))
def test_fast_workers_use_every_group_max_uses_times(groups: int, bounds: tuple[int, int]) -> None:
    """No use is lost, no step lacks a group, and the number of uses stays within `StalenessLimits.room`."""
    staleness, uses = bounds
    steps = 4 * (staleness + 1)

    def draw(count: int) -> list[Task]:
        return [rollout_of("").task] * count

    scheduler = RolloutScheduler(StalenessLimits(groups, staleness, uses, last_step=steps))
    buffer = ReplayBuffer(max_staleness=staleness, max_uses=uses)
    used = collections.Counter[str]()
    for version in range(steps):
        assert buffer.expire(version) == []
        scheduler.request(version, buffer.uses_left, len(buffer), draw)
        for request in scheduler.outstanding:
            assert request.min_version <= version
            scheduler.complete(request.number)
            buffer.add(request.number, group_at(request.number, version))
        assert buffer.uses_left <= scheduler.limits.room
        drawn = buffer.draw(buffer.mix(scheduler.groups_needed(version + 1), []), version)
        assert len(drawn) == groups
        used.update(group.id for group in drawn)
    left = {one.group.id for one in buffer.expire(10**9)}
    assert all(count == uses for name, count in used.items() if name not in left)
    if uses == 1:
        assert not left
        assert len(used) == groups * steps
