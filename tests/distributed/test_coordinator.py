# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""State of the coordinator: assignments, reassignment of requests of silent workers, and duplicate groups."""

import pytest

from marin_rl.distributed.coordinator import Assignment, Coordinator
from marin_rl.distributed.scheduler import GroupRequest, RequestNumber
from marin_rl.types import Task


class Clock:
    """Clock that tests advance."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def request(step: int, index: int, min_version: int = 0) -> GroupRequest:
    return GroupRequest(
        RequestNumber(step, index), Task("t", "sums", ({"role": "user", "content": ""},), ""), min_version
    )


def numbers(work: Assignment | None) -> list[tuple[int, int]]:
    assert work is not None
    return [tuple(request.number) for request in work.requests]


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def coordinator(clock: Clock) -> Coordinator:
    """A coordinator with four requests and the workers a and b."""
    coordinator = Coordinator(clock, heartbeat_timeout=10.0)
    for name in ("a", "b"):
        coordinator.join(name, f"{name}1")
    coordinator.submit([request(1, 1), request(1, 0), request(2, 0, min_version=1), request(2, 1, min_version=1)])
    return coordinator


def test_oldest_requests_are_assigned_first_and_once(coordinator: Coordinator) -> None:
    assert numbers(coordinator.next_assignment("a", "a1", 0, 1)) == [(1, 0)]
    assert numbers(coordinator.next_assignment("b", "b1", 0, 5)) == [(1, 1)]
    assert numbers(coordinator.next_assignment("a", "a1", 0, 5)) == []


def test_present_and_busy_seconds_are_counted(coordinator: Coordinator, clock: Clock) -> None:
    clock.now = 1.0
    coordinator.next_assignment("a", "a1", 0, 2)
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
    # Requests of a dropped worker count as busy until it is dropped.
    coordinator.next_assignment("a", "a1", 1, 1)
    clock.now = 18.0
    assert coordinator.take().seconds == {"present": 23.0, "busy": 14.0}
    clock.now = 30.0
    assert coordinator.take().seconds == {"present": 23.0, "busy": 14.0}


def test_requests_wait_for_fresh_enough_weights(coordinator: Coordinator) -> None:
    assert numbers(coordinator.next_assignment("a", "a1", None, 5)) == []
    assert numbers(coordinator.next_assignment("a", "a1", 1, 5)) == [(1, 0), (1, 1), (2, 0), (2, 1)]


def test_workers_receive_announcements_and_stop(coordinator: Coordinator) -> None:
    assert coordinator.announced == (0, ())
    coordinator.announce(3, ["here"])
    assert coordinator.announced == (3, ("here",))
    assignment = coordinator.next_assignment("a", "a1", None, 1)
    assert assignment is not None
    assert (assignment.newest, assignment.stop) == ((3, ("here",)), False)
    coordinator.announce(2, ["there"])
    assert coordinator.announced == (3, ("here",))
    coordinator.stop()
    assignment = coordinator.next_assignment("a", "a1", 3, 1)
    assert assignment is not None
    assert assignment.stop


def test_group_is_returned_until_acknowledged(coordinator: Coordinator) -> None:
    coordinator.next_assignment("a", "a1", 0, 2)
    assert coordinator.finish("a", "a1", RequestNumber(1, 1), "later")
    assert coordinator.finish("a", "a1", RequestNumber(1, 0), "earlier")
    for _ in range(2):
        assert coordinator.take().groups == [((1, 0), "earlier"), ((1, 1), "later")]
    assert coordinator.take([RequestNumber(1, 0)]).groups == [((1, 1), "later")]
    assert coordinator.take([RequestNumber(1, 1)]).groups == []


def test_requests_of_a_silent_worker_are_reassigned_and_first_result_counts(
    coordinator: Coordinator, clock: Clock
) -> None:
    assert numbers(coordinator.next_assignment("a", "a1", 0, 2)) == [(1, 0), (1, 1)]
    clock.now = 6.0
    assert coordinator.heartbeat("b", "b1")
    clock.now = 11.0
    assert numbers(coordinator.next_assignment("b", "b1", 0, 1)) == [(1, 0)]
    assert coordinator.counts == {"joined": 2, "lost": 1, "handed_again": 2, "late_groups": 0}
    # The dropped worker was only paused: its result counts, and that of b is late.
    assert coordinator.finish("a", "a1", RequestNumber(1, 0), "from a")
    assert not coordinator.finish("b", "b1", RequestNumber(1, 0), "from b")
    assert coordinator.take().groups == [((1, 0), "from a")]
    assert coordinator.counts["late_groups"] == 1
    # It must join again before it gets an assignment.
    assert not coordinator.heartbeat("a", "a1")
    assert coordinator.next_assignment("a", "a1", 0, 1) is None
    coordinator.join("a", "a1")
    assert numbers(coordinator.next_assignment("a", "a1", 0, 1)) == [(1, 1)]


def test_new_incarnation_releases_requests_of_the_old_one(coordinator: Coordinator) -> None:
    coordinator.next_assignment("a", "a1", 0, 2)
    coordinator.join("a", "a2")
    assert coordinator.next_assignment("a", "a1", 0, 2) is None
    assert numbers(coordinator.next_assignment("b", "b1", 0, 5)) == [(1, 0), (1, 1)]


def test_repeated_join_has_no_effect(coordinator: Coordinator) -> None:
    counts = dict(coordinator.counts)
    coordinator.next_assignment("a", "a1", 0, 2)
    coordinator.join("a", "a1")
    assert coordinator.counts == counts
    # It keeps its earlier assignments.
    assert numbers(coordinator.next_assignment("b", "b1", 0, 5)) == []


def test_lost_assignments_are_reassigned_and_running_ones_are_kept(coordinator: Coordinator) -> None:
    coordinator.next_assignment("a", "a1", 0, 2)
    coordinator.set_running("a", "a1", [RequestNumber(1, 0)])
    assert numbers(coordinator.next_assignment("b", "b1", 1, 1)) == [(1, 1)]
    # A delayed call took the request from a, which still runs it.
    coordinator.set_running("a", "a1", [])
    coordinator.set_running("a", "a1", [RequestNumber(1, 0)])
    # Requests that another worker runs, or that are not pending, are ignored.
    coordinator.set_running("a", "a1", [RequestNumber(1, 0), RequestNumber(1, 1), RequestNumber(0, 7)])
    coordinator.set_running("a", "another life", [])
    assert numbers(coordinator.next_assignment("b", "b1", 1, 5)) == [(2, 0), (2, 1)]
    coordinator.leave("b", "b1")
    assert numbers(coordinator.next_assignment("a", "a1", 1, 5)) == [(1, 1), (2, 0), (2, 1)]
    coordinator.leave("a", "a1")
    coordinator.join("a", "a1")
    assert numbers(coordinator.next_assignment("a", "a1", 1, 5)) == [(1, 0), (1, 1), (2, 0), (2, 1)]


def test_requests_of_a_leaving_worker_are_reassigned(coordinator: Coordinator) -> None:
    coordinator.next_assignment("a", "a1", 0, 2)
    coordinator.leave("a", "a1")
    assert coordinator.workers == {"b": 0}
    assert numbers(coordinator.next_assignment("b", "b1", 0, 5)) == [(1, 0), (1, 1)]
    assert coordinator.counts["lost"] == 0


def test_duplicate_submission_is_ignored(coordinator: Coordinator) -> None:
    coordinator.next_assignment("a", "a1", 0, 1)
    coordinator.finish("a", "a1", RequestNumber(1, 0), "text")
    coordinator.submit([request(1, 0), request(1, 1)])
    assert numbers(coordinator.next_assignment("b", "b1", 0, 5)) == [(1, 1)]


def test_worker_error_is_reported_to_the_trainer(coordinator: Coordinator) -> None:
    assert coordinator.take().failure is None
    coordinator.fail("a", "ValueError: no")
    assert coordinator.take().failure == "a: ValueError: no"


def test_workers_are_listed_with_their_group_counts(coordinator: Coordinator) -> None:
    coordinator.next_assignment("a", "a1", 0, 2)
    coordinator.finish("a", "a1", RequestNumber(1, 1), "text")
    assert coordinator.take().workers == {"a": 1, "b": 0}
