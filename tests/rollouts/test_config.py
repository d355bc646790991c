# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from marin_rl.rollouts.config import rewards_differ
from marin_rl.types import Generation, Rollout, RolloutGroup, RolloutStatus, StopReason, Task, Turn

TASK = Task("t", "sums", ({"role": "user", "content": "2+3="},), "5")


def group(*rewards: float | None) -> RolloutGroup:
    """A group with these rewards; None for a failed rollout."""
    turn = Turn((1, 2), Generation((3,), (-1.0,), StopReason.STOP, 0, 0), (), starts_sequence=True)

    def rollout(index: int, reward: float | None) -> Rollout:
        if reward is None:
            return Rollout(f"{index}", "g", TASK, (turn,), RolloutStatus.FAILED, {}, "ValueError: no")
        # Two components, because their sum is compared.
        rewards = {"correct": reward - index, "style": float(index)}
        return Rollout(f"{index}", "g", TASK, (turn,), RolloutStatus.COMPLETED, rewards)

    return RolloutGroup("g", [rollout(index, reward) for index, reward in enumerate(rewards)])


@pytest.mark.parametrize(
    ("rewards", "differ"),
    [
        ((1.0, 0.0, 1.0), True),
        ((1.0, None, 0.0), True),
        ((0.25, 0.25 + 1e-12), True),
        ((1.0, 1.0), False),
        ((None, 1.0, 1.0), False),
        ((None, 0.5), False),
        ((1.0,), False),
        ((None, None), False),
    ],
)
def test_rewards_of_graded_rollouts_are_compared(rewards: tuple[float | None, ...], differ: bool):
    assert rewards_differ(group(*rewards)) is differ


@given(st.lists(st.floats(-1e3, 1e3), min_size=2, max_size=8), st.randoms())
def test_the_order_of_rewards_gives_no_signal(rewards: list[float], random: Random):
    """The rewards of turns, and those of components, in another order."""
    moved = random.sample(rewards, len(rewards))
    names = [f"component{index}" for index in range(len(rewards))]

    def rollout(id: str, values: list[float]) -> Rollout:
        turn = Turn((1, 2), Generation((3,), (-1.0,), StopReason.STOP, 0, 0), (), starts_sequence=True)
        return Rollout(id, "g", TASK, (turn,), RolloutStatus.COMPLETED, dict(zip(names, values, strict=True)))

    assert not rewards_differ(RolloutGroup("g", [rollout("a", rewards), rollout("b", moved)]))
