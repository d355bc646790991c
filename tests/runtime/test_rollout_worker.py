# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""A worker's conversation with its coordinator, with a policy that plays nothing."""

import dataclasses
from collections.abc import Callable, Sequence

import pytest

from marin_rl.rollouts.group_codec import decode_group
from marin_rl.rollouts.orders import GroupOrder, OrderNumber
from marin_rl.runtime.coordinator import Office
from marin_rl.runtime.crew import Played
from marin_rl.runtime.rollout_worker import work
from marin_rl.types import RolloutGroup, Task, WeightVersion


def order(index: int, min_version: int = 0) -> GroupOrder:
    return GroupOrder(OrderNumber(1, index), Task("t", "sums", ({"role": "user", "content": ""},), ""), min_version)


@dataclasses.dataclass
class Policy:
    """Plays whatever it is told to by a function."""

    office: Office
    script: Callable[["Policy", Sequence[GroupOrder], Callable[[Played], None]], None]
    version: WeightVersion | None = None
    room: int = 2

    def fetch(self, addresses: Sequence[str]) -> None:
        assert addresses == ("here",)
        self.version = 0

    def play(self, orders: Sequence[GroupOrder], hand_in: Callable[[Played], None]) -> None:
        self.script(self, orders, hand_in)


def delivered(office: Office) -> list[str]:
    """Groups that the trainer would be given."""
    return [decode_group(text).id for _, text in office.take([], 0.0).groups]


@pytest.fixture
def office() -> Office:
    made = Office(silence=600.0)
    made.announce(0, ["here"])
    made.submit([order(0), order(1), order(2)])
    return made


def test_each_group_is_with_the_trainer_before_the_next_is_played(office: Office) -> None:
    seen: list[list[str]] = []

    def script(policy: Policy, orders: Sequence[GroupOrder], hand_in: Callable[[Played], None]) -> None:
        for one in orders:
            hand_in(Played(one.number, RolloutGroup(one.number.group_id, [])))
            seen.append(delivered(policy.office))
        if len(seen) == 3:
            policy.office.stop()

    work(office, "w", Policy(office, script), silence=600.0, poll=0.0)
    names = [f"train-1-{index}" for index in range(3)]
    assert seen == [names[:1], names[:2], names]
