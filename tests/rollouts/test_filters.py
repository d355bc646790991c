# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import pytest

from marin_rl.rollouts.filters import DropGroupsConfig, KeepGroupsConfig, ResampleGroupsConfig, sort_groups
from marin_rl.types import Generation, Rollout, RolloutGroup, RolloutStatus, StopReason, Task, Turn

TASK = Task("t", "sums", ({"role": "user", "content": "2+3="},), "5")


def group(name: str, *rewards: float | None) -> RolloutGroup:
    """A group with these rewards; None for a failed rollout."""
    turn = Turn((1, 2), Generation((3,), (-1.0,), StopReason.STOP, 0, 0), (), starts_sequence=True)

    def rollout(index: int, reward: float | None) -> Rollout:
        if reward is None:
            return Rollout(f"{name}-{index}", name, TASK, (turn,), RolloutStatus.FAILED, {}, "ValueError: no")
        # Two components, because their sum is compared.
        rewards = {"correct": reward - index, "style": float(index)}
        return Rollout(f"{name}-{index}", name, TASK, (turn,), RolloutStatus.COMPLETED, rewards)

    return RolloutGroup(name, [rollout(index, reward) for index, reward in enumerate(rewards)])


def test_groups_are_sorted_by_whether_their_rewards_differ():
    groups = [
        group("differ", 1.0, 0.0, 1.0),
        group("right", 1.0, 1.0),
        group("wrong", 0.0, 0.0, 0.0),
        group("failed", None, None),
        group("differ with a failure", 1.0, None, 0.0),
        group("equal with a failure", None, 1.0, 1.0),
        group("one left", None, 0.5),
        group("alone", 1.0),
        group("barely", 0.25, 0.25 + 1e-12),
    ]
    filtered = sort_groups(groups)
    assert [group.id for group in filtered.kept] == ["differ", "differ with a failure", "barely"]
    assert [group.id for group in filtered.zero_spread] == [
        "right",
        "wrong",
        "equal with a failure",
        "one left",
        "alone",
    ]
    assert [group.id for group in filtered.ungraded] == ["failed"]


def test_no_group_is_lost_or_changed():
    groups = [
        group(str(index), *rewards) for index, rewards in enumerate([(1.0, 0.0), (1.0, 1.0), (None,), (0.0, 1.0)])
    ]
    filtered = sort_groups(groups)
    assert sorted([*filtered.kept, *filtered.zero_spread, *filtered.ungraded], key=lambda group: group.id) == groups
    assert sort_groups([]) == ([], [], [])


@pytest.mark.parametrize(
    ("config", "drops", "batches"),
    [
        (KeepGroupsConfig(), False, 1),
        (DropGroupsConfig(), True, 1),
        (ResampleGroupsConfig(), True, 4),
        (ResampleGroupsConfig(max_batches=2), True, 2),
    ],
)
def test_settings_of_each_choice(config, drops: bool, batches: int):
    assert (config.drops, config.max_batches) == (drops, batches)


@pytest.mark.parametrize("batches", [1, 0, -3])
def test_resampling_with_a_single_batch_is_refused(batches: int):
    with pytest.raises(ValueError, match=rf"filter\.max_batches is {batches}; .* or use filter: {{type: drop}}"):
        ResampleGroupsConfig(max_batches=batches)
