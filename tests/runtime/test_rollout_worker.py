# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""A worker's conversation with its coordinator, with a policy that plays nothing."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from marin_rl.rollouts.group_codec import decode_group
from marin_rl.rollouts.orders import GroupOrder, OrderNumber
from marin_rl.runtime.coordinator import Office, Work
from marin_rl.runtime.crew import Played
from marin_rl.runtime.rollout_worker import work
from marin_rl.types import RolloutGroup, Task, WeightVersion


def order(index: int, min_version: int = 0) -> GroupOrder:
    return GroupOrder(OrderNumber(1, index), Task("t", "sums", ({"role": "user", "content": ""},), ""), min_version)


HandIn = Callable[[Played], Sequence[GroupOrder]]
Script = Callable[["Policy", Sequence[GroupOrder], HandIn], None]


@dataclasses.dataclass
class Policy:
    """Plays whatever it is told to by a function."""

    office: Office
    script: Script
    is_in_flight: bool = False
    version: WeightVersion | None = None
    room: int = 2
    failing: int = 0
    """How many fetches bring nothing."""

    def fetch(self, addresses: Sequence[str]) -> bool:
        assert addresses == ("here",)
        if self.failing:
            self.failing -= 1
            return False
        self.version = self.office.announced().version
        return True

    def play(self, orders: Sequence[GroupOrder], hand_in: HandIn) -> None:
        self.script(self, orders, hand_in)


def played(order: GroupOrder) -> Played:
    return Played(order.number, RolloutGroup(order.number.group_id, []))


def delivered(office: Office) -> list[str]:
    """Groups that the trainer would be given."""
    return [decode_group(text).id for _, text in office.take([], 0.0).groups]


def run(office: Office, script: Script, *, is_in_flight: bool = False) -> None:
    work(office, "w", Policy(office, script, is_in_flight), silence=600.0, poll=0.0)


@pytest.fixture
def office() -> Office:
    """Five orders, of which the last is for newer weights than there are."""
    made = Office(silence=600.0)
    made.announce(0, ["here"])
    made.submit([*map(order, range(4)), order(4, min_version=1)])
    return made


def indices(orders: Sequence[GroupOrder]) -> list[int]:
    return [one.number.index for one in orders]


def test_each_group_is_with_the_trainer_before_the_next_is_played(office: Office) -> None:
    seen: list[list[str]] = []

    def script(policy: Policy, orders: Sequence[GroupOrder], hand_in: HandIn) -> None:
        waiting = list(orders)
        while waiting:
            waiting += hand_in(played(waiting.pop(0)))
            seen.append(delivered(policy.office))
        policy.office.stop()

    run(office, script)
    names = [f"train-1-{index}" for index in range(4)]
    assert seen == [names[: index + 1] for index in range(4)]


def test_a_group_that_is_whole_makes_place_for_another_and_places_that_stayed_empty_are_filled_later(
    office: Office,
) -> None:
    taken: list[list[int]] = []

    def script(policy: Policy, orders: Sequence[GroupOrder], hand_in: HandIn) -> None:
        one, other = orders
        taken.append(indices(orders))
        [third] = hand_in(played(one))
        [fourth] = hand_in(played(other))
        taken.append(indices([third, fourth]))
        # There is nothing more that may be begun with these weights ...
        taken.append(indices(hand_in(played(third))))
        # ... until others are ordered: two places are empty then.
        policy.office.submit([order(index) for index in (5, 6, 7)])
        fifth, sixth = hand_in(played(fourth))
        taken.append(indices([fifth, sixth]))
        policy.office.stop()
        taken.append(indices(hand_in(played(fifth))))
        assert hand_in(played(sixth)) == []

    run(office, script)
    assert taken == [[0, 1], [2, 3], [], [5, 6], []]


def test_a_worker_that_is_cut_off_from_the_weights_leaves_its_orders_to_others_and_asks_again(office: Office) -> None:
    seen: list[tuple[WeightVersion | None, list[int]]] = []
    office.announce(1, ["here"])

    def script(policy: Policy, orders: Sequence[GroupOrder], hand_in: HandIn) -> None:
        seen.append((policy.version, indices(orders)))
        policy.office.stop()
        for one in orders:
            assert hand_in(played(one)) == []

    failed: list[list[int]] = []

    @dataclasses.dataclass
    class CutOff(Policy):
        def fetch(self, addresses: Sequence[str]) -> bool:
            came = Policy.fetch(self, addresses)
            if not came:
                office.join("other", "o")
                given = office.next_work("other", "o", 1, 5, (), 0.0)
                assert given is not None
                failed.append(indices(given.orders))
                office.leave("other", "o")
            return came

    work(office, "w", CutOff(office, script, version=0, failing=2), silence=600.0, poll=0.0)
    # Two are in its hands at first, and then none.
    assert failed == [[2, 3, 4], [0, 1, 2, 3, 4]]
    assert seen == [(1, [0, 1])]


@pytest.mark.parametrize("is_in_flight", [False, True])
def test_newer_weights_are_waited_for_between_groups_and_not_in_flight(office: Office, is_in_flight: bool) -> None:
    taken: list[tuple[WeightVersion | None, list[int]]] = []

    def script(policy: Policy, orders: Sequence[GroupOrder], hand_in: HandIn) -> None:
        taken.append((policy.version, indices(orders)))
        policy.office.announce(1, ["here"])
        waiting = list(orders)
        while waiting:
            more = hand_in(played(waiting.pop(0)))
            if more:
                taken.append((policy.version, indices(more)))
            waiting += more
        if len(delivered(policy.office)) == 5:
            policy.office.stop()

    run(office, script, is_in_flight=is_in_flight)
    if is_in_flight:
        # This policy looks for newer weights only where it is told to; an order that needs them waits for that.
        assert taken == [(0, [0, 1]), (0, [2]), (0, [3]), (1, [4])]
    else:
        assert taken == [(0, [0, 1]), (1, [2, 3]), (1, [4])]


def test_weights_that_came_before_they_were_announced_are_not_fetched_again(office: Office) -> None:
    fetched: list[WeightVersion] = []
    taken: list[list[int]] = []

    class Ahead(Policy):
        """Its weights are a version ahead of what the coordinator has heard of."""

        def fetch(self, addresses: Sequence[str]) -> bool:
            self.version = self.office.announced().version + 1
            fetched.append(self.version)
            return True

    def script(policy: Policy, orders: Sequence[GroupOrder], hand_in: HandIn) -> None:
        waiting = list(orders)
        taken.append(indices(orders))
        while waiting:
            more = hand_in(played(waiting.pop(0)))
            taken.append(indices(more))
            waiting += more
        policy.office.stop()

    work(office, "w", Ahead(office, script), silence=600.0, poll=0.0)
    assert fetched == [1]
    assert taken == [[0, 1], [2], [3], [4], [], []]


def test_orders_whose_answer_was_lost_are_handed_out_again() -> None:
    class Lossy(Office):
        """The answers to two questions are lost on their way, and the questions come again."""

        def next_work(self, *question: Any) -> Work | None:
            if questions.pop(0) if questions else False:
                super().next_work(*question)
            return super().next_work(*question)

    # Weights come first. Then the orders that begin it all are lost, and those in the place of the first that is whole.
    questions = [False, True, True]
    office = Lossy(silence=600.0)
    office.announce(0, ["here"])
    office.submit([order(index) for index in range(6)])

    def script(policy: Policy, orders: Sequence[GroupOrder], hand_in: HandIn) -> None:
        waiting = list(orders)
        while waiting:
            waiting += hand_in(played(waiting.pop(0)))
        policy.office.stop()

    run(office, script)
    assert delivered(office) == [f"train-1-{index}" for index in range(6)]


def test_a_worker_that_was_given_up_ends_what_it_plays_and_joins_anew(office: Office) -> None:
    taken: list[list[int]] = []

    def script(policy: Policy, orders: Sequence[GroupOrder], hand_in: HandIn) -> None:
        taken.append(indices(orders))
        if len(taken) == 1:
            # Another life of it takes over what it was to play.
            policy.office.join("w", "another")
            assert [hand_in(played(one)) for one in orders] == [[], []]
        else:
            policy.office.stop()

    run(office, script)
    assert taken == [[0, 1], [2, 3]]
    assert delivered(office) == ["train-1-0", "train-1-1"]
