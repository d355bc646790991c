# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""The coordinator's bookkeeping: who is handed what, what a silent worker loses, and that no group counts twice."""

import pytest

from marin_rl.rollouts.scheduler import GroupRequest, RequestNumber
from marin_rl.runtime.coordinator import Assignment, Coordinator
from marin_rl.types import Task


class Clock:
    """A clock that stands still until it is told otherwise."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def order(step: int, index: int, min_version: int = 0) -> GroupRequest:
    return GroupRequest(
        RequestNumber(step, index), Task("t", "sums", ({"role": "user", "content": ""},), ""), min_version
    )


def numbers(work: Assignment | None) -> list[tuple[int, int]]:
    assert work is not None
    return [tuple(one.number) for one in work.orders]


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def coordinator(clock: Clock) -> Coordinator:
    """One with four orders and the workers a and b."""
    made = Coordinator(clock, silence=10.0)
    for name in ("a", "b"):
        made.join(name, f"{name}1")
    made.submit([order(1, 1), order(1, 0), order(2, 0, min_version=1), order(2, 1, min_version=1)])
    return made


def test_the_oldest_orders_are_handed_out_first_and_each_once(coordinator: Coordinator) -> None:
    assert numbers(coordinator.next_work("a", "a1", 0, 1)) == [(1, 0)]
    assert numbers(coordinator.next_work("b", "b1", 0, 5)) == [(1, 1)]
    assert numbers(coordinator.next_work("a", "a1", 0, 5)) == []


def test_time_is_counted_while_there_is_something_to_play(coordinator: Coordinator, clock: Clock) -> None:
    clock.now = 1.0
    coordinator.next_work("a", "a1", 0, 2)
    clock.now = 3.0
    assert coordinator.take().seconds == {"present": 6.0, "busy": 2.0}
    coordinator.finish("a", "a1", RequestNumber(1, 0), "")
    clock.now = 4.0
    coordinator.finish("a", "a1", RequestNumber(1, 1), "")
    clock.now = 5.0
    assert coordinator.take().seconds == {"present": 10.0, "busy": 3.0}
    coordinator.leave("b", "b1")
    clock.now = 7.0
    assert coordinator.take().seconds == {"present": 12.0, "busy": 3.0}
    # Of one that is given up, what it held counts until then.
    coordinator.next_work("a", "a1", 1, 1)
    clock.now = 18.0
    assert coordinator.take().seconds == {"present": 23.0, "busy": 14.0}
    clock.now = 30.0
    assert coordinator.take().seconds == {"present": 23.0, "busy": 14.0}


def test_orders_wait_for_weights_that_are_fresh_enough(coordinator: Coordinator) -> None:
    assert numbers(coordinator.next_work("a", "a1", None, 5)) == []
    assert numbers(coordinator.next_work("a", "a1", 1, 5)) == [(1, 0), (1, 1), (2, 0), (2, 1)]


def test_workers_hear_of_weights_and_of_the_end(coordinator: Coordinator) -> None:
    assert coordinator.announced == (0, ())
    coordinator.announce(3, ["here"])
    assert coordinator.announced == (3, ("here",))
    told = coordinator.next_work("a", "a1", None, 1)
    assert told is not None
    assert (told.newest, told.stop) == ((3, ("here",)), False)
    coordinator.announce(2, ["there"])
    assert coordinator.announced == (3, ("here",))
    coordinator.stop()
    told = coordinator.next_work("a", "a1", 3, 1)
    assert told is not None
    assert told.stop


def test_a_group_is_delivered_until_it_is_acknowledged(coordinator: Coordinator) -> None:
    coordinator.next_work("a", "a1", 0, 2)
    assert coordinator.finish("a", "a1", RequestNumber(1, 1), "later")
    assert coordinator.finish("a", "a1", RequestNumber(1, 0), "earlier")
    for _ in range(2):
        assert coordinator.take().groups == [((1, 0), "earlier"), ((1, 1), "later")]
    assert coordinator.take([RequestNumber(1, 0)]).groups == [((1, 1), "later")]
    assert coordinator.take([RequestNumber(1, 1)]).groups == []


def test_what_a_silent_worker_had_goes_to_others_and_the_first_answer_counts(
    coordinator: Coordinator, clock: Clock
) -> None:
    assert numbers(coordinator.next_work("a", "a1", 0, 2)) == [(1, 0), (1, 1)]
    clock.now = 6.0
    assert coordinator.beat("b", "b1")
    clock.now = 11.0
    assert numbers(coordinator.next_work("b", "b1", 0, 1)) == [(1, 0)]
    assert coordinator.counts == {"joined": 2, "lost": 1, "handed_again": 2, "late_groups": 0}
    # The lost one was only paused: its answer is as good as any, and b's comes too late.
    assert coordinator.finish("a", "a1", RequestNumber(1, 0), "from a")
    assert not coordinator.finish("b", "b1", RequestNumber(1, 0), "from b")
    assert coordinator.take().groups == [((1, 0), "from a")]
    assert coordinator.counts["late_groups"] == 1
    # It joins anew before it is given anything.
    assert not coordinator.beat("a", "a1")
    assert coordinator.next_work("a", "a1", 0, 1) is None
    coordinator.join("a", "a1")
    assert numbers(coordinator.next_work("a", "a1", 0, 1)) == [(1, 1)]


def test_a_worker_that_comes_back_in_a_new_life_gives_up_what_it_had_at_once(coordinator: Coordinator) -> None:
    coordinator.next_work("a", "a1", 0, 2)
    coordinator.join("a", "a2")
    assert coordinator.next_work("a", "a1", 0, 2) is None
    assert numbers(coordinator.next_work("b", "b1", 0, 5)) == [(1, 0), (1, 1)]


def test_a_call_to_join_that_comes_again_is_the_same_one(coordinator: Coordinator) -> None:
    counts = dict(coordinator.counts)
    coordinator.next_work("a", "a1", 0, 2)
    coordinator.join("a", "a1")
    assert coordinator.counts == counts
    # What it was handed in between is still its own.
    assert numbers(coordinator.next_work("b", "b1", 0, 5)) == []


def test_what_never_reached_a_worker_goes_to_others_and_what_it_plays_stays_with_it(coordinator: Coordinator) -> None:
    coordinator.next_work("a", "a1", 0, 2)
    coordinator.plays("a", "a1", [RequestNumber(1, 0)])
    assert numbers(coordinator.next_work("b", "b1", 1, 1)) == [(1, 1)]
    # It was taken from a by a question that came late, and a plays it all the same.
    coordinator.plays("a", "a1", [])
    coordinator.plays("a", "a1", [RequestNumber(1, 0)])
    # What another one plays by now stays where it is; what is not owed any more is nobody's.
    coordinator.plays("a", "a1", [RequestNumber(1, 0), RequestNumber(1, 1), RequestNumber(0, 7)])
    coordinator.plays("a", "another life", [])
    assert numbers(coordinator.next_work("b", "b1", 1, 5)) == [(2, 0), (2, 1)]
    coordinator.leave("b", "b1")
    assert numbers(coordinator.next_work("a", "a1", 1, 5)) == [(1, 1), (2, 0), (2, 1)]
    coordinator.leave("a", "a1")
    coordinator.join("a", "a1")
    assert numbers(coordinator.next_work("a", "a1", 1, 5)) == [(1, 0), (1, 1), (2, 0), (2, 1)]


def test_a_worker_that_leaves_keeps_nothing(coordinator: Coordinator) -> None:
    coordinator.next_work("a", "a1", 0, 2)
    coordinator.leave("a", "a1")
    assert coordinator.workers == {"b": 0}
    assert numbers(coordinator.next_work("b", "b1", 0, 5)) == [(1, 0), (1, 1)]
    assert coordinator.counts["lost"] == 0


def test_an_order_that_is_submitted_again_is_not_played_again(coordinator: Coordinator) -> None:
    coordinator.next_work("a", "a1", 0, 1)
    coordinator.finish("a", "a1", RequestNumber(1, 0), "text")
    coordinator.submit([order(1, 0), order(1, 1)])
    assert numbers(coordinator.next_work("b", "b1", 0, 5)) == [(1, 1)]


def test_the_trainer_hears_of_an_error(coordinator: Coordinator) -> None:
    assert coordinator.take().failure is None
    coordinator.fail("a", "ValueError: no")
    assert coordinator.take().failure == "a: ValueError: no"


def test_workers_are_listed_with_what_they_played(coordinator: Coordinator) -> None:
    coordinator.next_work("a", "a1", 0, 2)
    coordinator.finish("a", "a1", RequestNumber(1, 1), "text")
    assert coordinator.take().workers == {"a": 1, "b": 0}
