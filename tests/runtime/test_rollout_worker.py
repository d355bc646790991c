# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""A worker's conversation with its coordinator, with a policy that plays nothing."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from marin_rl.rollouts.group_codec import decode_group
from marin_rl.rollouts.scheduler import GroupRequest, RequestNumber
from marin_rl.runtime.coordinator import Assignment, CoordinatorActor
from marin_rl.runtime.rollout_source import FinishedGroup
from marin_rl.runtime.rollout_worker import work
from marin_rl.types import RolloutGroup, Task, WeightVersion


def order(index: int, min_version: int = 0) -> GroupRequest:
    return GroupRequest(RequestNumber(1, index), Task("t", "sums", ({"role": "user", "content": ""},), ""), min_version)


HandIn = Callable[[FinishedGroup], Sequence[GroupRequest]]
Script = Callable[["Policy", Sequence[GroupRequest], HandIn], None]


@dataclasses.dataclass
class Policy:
    """Plays whatever it is told to by a function."""

    coordinator_actor: CoordinatorActor
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
        self.version = self.coordinator_actor.announced().version
        return True

    def play(self, orders: Sequence[GroupRequest], on_group_done: HandIn) -> None:
        self.script(self, orders, on_group_done)


def played(order: GroupRequest) -> FinishedGroup:
    return FinishedGroup(order.number, RolloutGroup(order.number.group_id, []))


def delivered(coordinator_actor: CoordinatorActor) -> list[str]:
    """Groups that the trainer would be given."""
    return [decode_group(text).id for _, text in coordinator_actor.take([], 0.0).groups]


def run(coordinator_actor: CoordinatorActor, script: Script, *, is_in_flight: bool = False) -> None:
    work(coordinator_actor, "w", Policy(coordinator_actor, script, is_in_flight), silence=600.0, poll=0.0)


@pytest.fixture
def coordinator_actor() -> CoordinatorActor:
    """Five orders, of which the last is for newer weights than there are."""
    made = CoordinatorActor(silence=600.0)
    made.announce(0, ["here"])
    made.submit([*map(order, range(4)), order(4, min_version=1)])
    return made


def indices(orders: Sequence[GroupRequest]) -> list[int]:
    return [one.number.index for one in orders]


def test_each_group_is_with_the_trainer_before_the_next_is_played(coordinator_actor: CoordinatorActor) -> None:
    seen: list[list[str]] = []

    def script(policy: Policy, orders: Sequence[GroupRequest], on_group_done: HandIn) -> None:
        waiting = list(orders)
        while waiting:
            waiting += on_group_done(played(waiting.pop(0)))
            seen.append(delivered(policy.coordinator_actor))
        policy.coordinator_actor.stop()

    run(coordinator_actor, script)
    names = [f"train-1-{index}" for index in range(4)]
    assert seen == [names[: index + 1] for index in range(4)]


def test_a_group_that_is_whole_makes_place_for_another_and_places_that_stayed_empty_are_filled_later(
    coordinator_actor: CoordinatorActor,
) -> None:
    taken: list[list[int]] = []

    def script(policy: Policy, orders: Sequence[GroupRequest], on_group_done: HandIn) -> None:
        one, other = orders
        taken.append(indices(orders))
        [third] = on_group_done(played(one))
        [fourth] = on_group_done(played(other))
        taken.append(indices([third, fourth]))
        # There is nothing more that may be begun with these weights ...
        taken.append(indices(on_group_done(played(third))))
        # ... until others are ordered: two places are empty then.
        policy.coordinator_actor.submit([order(index) for index in (5, 6, 7)])
        fifth, sixth = on_group_done(played(fourth))
        taken.append(indices([fifth, sixth]))
        policy.coordinator_actor.stop()
        taken.append(indices(on_group_done(played(fifth))))
        assert on_group_done(played(sixth)) == []

    run(coordinator_actor, script)
    assert taken == [[0, 1], [2, 3], [], [5, 6], []]


def test_a_worker_that_is_cut_off_from_the_weights_leaves_its_orders_to_others_and_asks_again(
    coordinator_actor: CoordinatorActor,
) -> None:
    seen: list[tuple[WeightVersion | None, list[int]]] = []
    coordinator_actor.announce(1, ["here"])

    def script(policy: Policy, orders: Sequence[GroupRequest], on_group_done: HandIn) -> None:
        seen.append((policy.version, indices(orders)))
        policy.coordinator_actor.stop()
        for one in orders:
            assert on_group_done(played(one)) == []

    failed: list[list[int]] = []

    @dataclasses.dataclass
    class CutOff(Policy):
        def fetch(self, addresses: Sequence[str]) -> bool:
            came = Policy.fetch(self, addresses)
            if not came:
                coordinator_actor.join("other", "o")
                given = coordinator_actor.next_work("other", "o", 1, 5, (), 0.0)
                assert given is not None
                failed.append(indices(given.orders))
                coordinator_actor.leave("other", "o")
            return came

    work(coordinator_actor, "w", CutOff(coordinator_actor, script, version=0, failing=2), silence=600.0, poll=0.0)
    # Two are in its hands at first, and then none.
    assert failed == [[2, 3, 4], [0, 1, 2, 3, 4]]
    assert seen == [(1, [0, 1])]


@pytest.mark.parametrize("is_in_flight", [False, True])
def test_newer_weights_are_waited_for_between_groups_and_not_in_flight(
    coordinator_actor: CoordinatorActor, is_in_flight: bool
) -> None:
    taken: list[tuple[WeightVersion | None, list[int]]] = []

    def script(policy: Policy, orders: Sequence[GroupRequest], on_group_done: HandIn) -> None:
        taken.append((policy.version, indices(orders)))
        policy.coordinator_actor.announce(1, ["here"])
        waiting = list(orders)
        while waiting:
            more = on_group_done(played(waiting.pop(0)))
            if more:
                taken.append((policy.version, indices(more)))
            waiting += more
        if len(delivered(policy.coordinator_actor)) == 5:
            policy.coordinator_actor.stop()

    run(coordinator_actor, script, is_in_flight=is_in_flight)
    if is_in_flight:
        # This policy looks for newer weights only where it is told to; an order that needs them waits for that.
        assert taken == [(0, [0, 1]), (0, [2]), (0, [3]), (1, [4])]
    else:
        assert taken == [(0, [0, 1]), (1, [2, 3]), (1, [4])]


def test_weights_that_came_before_they_were_announced_are_not_fetched_again(
    coordinator_actor: CoordinatorActor,
) -> None:
    fetched: list[WeightVersion] = []
    taken: list[list[int]] = []

    class Ahead(Policy):
        """Its weights are a version ahead of what the coordinator has heard of."""

        def fetch(self, addresses: Sequence[str]) -> bool:
            self.version = self.coordinator_actor.announced().version + 1
            fetched.append(self.version)
            return True

    def script(policy: Policy, orders: Sequence[GroupRequest], on_group_done: HandIn) -> None:
        waiting = list(orders)
        taken.append(indices(orders))
        while waiting:
            more = on_group_done(played(waiting.pop(0)))
            taken.append(indices(more))
            waiting += more
        policy.coordinator_actor.stop()

    work(coordinator_actor, "w", Ahead(coordinator_actor, script), silence=600.0, poll=0.0)
    assert fetched == [1]
    assert taken == [[0, 1], [2], [3], [4], [], []]


def test_orders_whose_answer_was_lost_are_handed_out_again() -> None:
    class Lossy(CoordinatorActor):
        """The answers to two questions are lost on their way, and the questions come again."""

        def next_work(self, *question: Any) -> Assignment | None:
            if questions.pop(0) if questions else False:
                super().next_work(*question)
            return super().next_work(*question)

    # Weights come first. Then the orders that begin it all are lost, and those in the place of the first that is whole.
    questions = [False, True, True]
    coordinator_actor = Lossy(silence=600.0)
    coordinator_actor.announce(0, ["here"])
    coordinator_actor.submit([order(index) for index in range(6)])

    def script(policy: Policy, orders: Sequence[GroupRequest], on_group_done: HandIn) -> None:
        waiting = list(orders)
        while waiting:
            waiting += on_group_done(played(waiting.pop(0)))
        policy.coordinator_actor.stop()

    run(coordinator_actor, script)
    assert delivered(coordinator_actor) == [f"train-1-{index}" for index in range(6)]


def test_a_worker_that_was_given_up_ends_what_it_plays_and_joins_anew(coordinator_actor: CoordinatorActor) -> None:
    taken: list[list[int]] = []

    def script(policy: Policy, orders: Sequence[GroupRequest], on_group_done: HandIn) -> None:
        taken.append(indices(orders))
        if len(taken) == 1:
            # Another life of it takes over what it was to play.
            policy.coordinator_actor.join("w", "another")
            assert [on_group_done(played(one)) for one in orders] == [[], []]
        else:
            policy.coordinator_actor.stop()

    run(coordinator_actor, script)
    assert taken == [[0, 1], [2, 3]]
    assert delivered(coordinator_actor) == ["train-1-0", "train-1-1"]
