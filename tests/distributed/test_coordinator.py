# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""State of the coordinator: assignments, reassignment of requests of silent workers, and duplicate groups."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from marin_rl.distributed.coordinator import Assignment, Coordinator, TrainerUpdate
from marin_rl.distributed.scheduler import GroupRequest, RequestNumber
from marin_rl.types import Task, WeightVersion
from tests.distributed.result_of import result_of


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


def next_assignment(
    coordinator: Coordinator,
    incarnation: str,
    version: WeightVersion | None,
    room: int,
    running: Sequence[tuple[int, int]] = (),
) -> Assignment | None:
    """Request work for the worker `a` or `b`, the first letter of the incarnation."""
    numbers = [RequestNumber(*number) for number in running]
    return result_of(coordinator.next_assignment(incarnation[0], incarnation, version, room, numbers))


def assigned(coordinator: Coordinator, *arguments: Any, running: Sequence[tuple[int, int]] = ()) -> list[RequestNumber]:
    """Return the numbers of the requests that `next_assignment` assigns."""
    assignment = next_assignment(coordinator, *arguments, running)
    assert assignment is not None
    return [request.number for request in assignment.requests]


def take(coordinator: Coordinator, *acknowledged: tuple[int, int]) -> TrainerUpdate:
    return result_of(coordinator.take([RequestNumber(*number) for number in acknowledged]))


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def coordinator(clock: Clock) -> Coordinator:
    """A coordinator with four requests and the workers a and b."""
    coordinator = Coordinator(10.0, clock)
    for name in ("a", "b"):
        coordinator.join(name, f"{name}1")
    coordinator.submit([request(1, 1), request(1, 0), request(2, 0, min_version=1), request(2, 1, min_version=1)])
    return coordinator


def test_present_and_busy_seconds_are_counted(coordinator: Coordinator, clock: Clock) -> None:
    clock.now = 1.0
    next_assignment(coordinator, "a1", 0, 2)
    clock.now = 3.0
    assert take(coordinator).seconds == {"present": 6.0, "busy": 2.0}
    coordinator.finish("a", "a1", RequestNumber(1, 0), b"")
    clock.now = 4.0
    coordinator.finish("a", "a1", RequestNumber(1, 1), b"")
    clock.now = 5.0
    assert take(coordinator).seconds == {"present": 10.0, "busy": 3.0}
    coordinator.leave("b", "b1")
    clock.now = 7.0
    assert take(coordinator).seconds == {"present": 12.0, "busy": 3.0}
    # Requests of a dropped worker count as busy until it is dropped.
    next_assignment(coordinator, "a1", 1, 1)
    clock.now = 18.0
    assert take(coordinator).seconds == {"present": 23.0, "busy": 14.0}
    clock.now = 30.0
    assert take(coordinator).seconds == {"present": 23.0, "busy": 14.0}


def test_requests_wait_for_fresh_enough_weights(coordinator: Coordinator) -> None:
    assert assigned(coordinator, "a1", None, 5) == []
    assert assigned(coordinator, "a1", 0, 1) == [(1, 0)]
    assert assigned(coordinator, "b1", 0, 5) == [(1, 1)]
    assert assigned(coordinator, "a1", 1, 5, running=[(1, 0)]) == [(2, 0), (2, 1)]


def test_workers_receive_announcements_and_stop(coordinator: Coordinator) -> None:
    assert coordinator.announced() == (0, ())
    coordinator.announce(3, ["here"])
    assert coordinator.announced() == (3, ("here",))
    assignment = next_assignment(coordinator, "a1", None, 1)
    assert assignment is not None
    assert (assignment.newest, assignment.stop) == ((3, ("here",)), False)
    coordinator.announce(2, ["there"])
    assert coordinator.announced() == (3, ("here",))
    coordinator.stop()
    assignment = next_assignment(coordinator, "a1", 3, 1)
    assert assignment is not None
    assert assignment.stop


def test_group_is_returned_until_acknowledged(coordinator: Coordinator) -> None:
    next_assignment(coordinator, "a1", 0, 2)
    assert coordinator.finish("a", "a1", RequestNumber(1, 1), b"later")
    assert coordinator.finish("a", "a1", RequestNumber(1, 0), b"earlier")
    for _ in range(2):
        assert take(coordinator).groups == [((1, 0), b"earlier"), ((1, 1), b"later")]
    assert take(coordinator, (1, 0)).groups == [((1, 1), b"later")]
    assert take(coordinator, (1, 1)).groups == []


def test_requests_of_a_silent_worker_are_reassigned_and_first_result_counts(
    coordinator: Coordinator, clock: Clock
) -> None:
    assert assigned(coordinator, "a1", 0, 2) == [(1, 0), (1, 1)]
    clock.now = 6.0
    assert coordinator.heartbeat("b", "b1")
    clock.now = 11.0
    assert assigned(coordinator, "b1", 0, 1) == [(1, 0)]
    assert take(coordinator).counts == {"joined": 2, "lost": 1, "handed_again": 2, "late_groups": 0}
    # The dropped worker was only paused: its result counts, and that of b is late.
    assert coordinator.finish("a", "a1", RequestNumber(1, 0), b"from a")
    assert not coordinator.finish("b", "b1", RequestNumber(1, 0), b"from b")
    assert take(coordinator).groups == [((1, 0), b"from a")]
    assert take(coordinator).counts["late_groups"] == 1
    # It must join again before it gets an assignment.
    assert not coordinator.heartbeat("a", "a1")
    assert next_assignment(coordinator, "a1", 0, 1) is None
    coordinator.join("a", "a1")
    assert assigned(coordinator, "a1", 0, 1) == [(1, 1)]


def test_lost_assignments_are_reassigned_and_running_ones_are_kept(coordinator: Coordinator) -> None:
    next_assignment(coordinator, "a1", 0, 2)
    # A repeated call.
    coordinator.join("a", "a1")
    assert take(coordinator).counts["joined"] == 2
    assert assigned(coordinator, "b1", 0, 5) == []
    assert assigned(coordinator, "a1", 0, 0, running=[(1, 0)]) == []
    assert assigned(coordinator, "b1", 1, 1) == [(1, 1)]
    # A delayed call took the request from a, which still runs it.
    assert assigned(coordinator, "a1", 0, 0, running=[]) == []
    assert assigned(coordinator, "a1", 0, 0, running=[(1, 0)]) == []
    # Requests that another worker runs, or that are not pending, are ignored.
    assert assigned(coordinator, "a1", 0, 0, running=[(1, 0), (1, 1), (0, 7)]) == []
    assert next_assignment(coordinator, "another", 0, 0) is None
    assert assigned(coordinator, "b1", 1, 5, running=[(1, 1)]) == [(2, 0), (2, 1)]
    coordinator.leave("b", "b1")
    assert assigned(coordinator, "a1", 1, 5, running=[(1, 0)]) == [(1, 1), (2, 0), (2, 1)]
    coordinator.leave("a", "a1")
    assert take(coordinator).counts["lost"] == 0
    coordinator.join("a", "a1")
    assert assigned(coordinator, "a1", 1, 5) == [(1, 0), (1, 1), (2, 0), (2, 1)]
    # A new incarnation loses the requests of the old one.
    coordinator.join("a", "a2")
    assert next_assignment(coordinator, "a1", 1, 5) is None
    assert assigned(coordinator, "a2", 1, 5) == [(1, 0), (1, 1), (2, 0), (2, 1)]


def test_group_that_arrives_before_its_request_is_kept(clock: Clock) -> None:
    """The trainer submits its requests again only after it has noticed the restart."""
    restarted = Coordinator(10.0, clock)
    assert restarted.finish("a", "a1", RequestNumber(1, 0), b"text")
    restarted.submit([request(1, 0), request(1, 1)])
    restarted.join("b", "b1")
    assert assigned(restarted, "b1", 0, 5) == [(1, 1)]
    assert take(restarted).groups == [((1, 0), b"text")]
    # After the acknowledgement, another copy is late, and the request is not run again.
    assert take(restarted, (1, 0)).groups == []
    assert not restarted.finish("b", "b1", RequestNumber(1, 0), b"copy")
    restarted.submit([request(1, 0)])
    update = take(restarted)
    assert (update.groups, update.counts["late_groups"]) == ([], 1)
    assert assigned(restarted, "b1", 0, 5, running=[(1, 1)]) == []


def test_repeated_finish_counts_once_and_has_the_same_response(coordinator: Coordinator) -> None:
    next_assignment(coordinator, "a1", 0, 2)
    for _ in range(2):
        assert coordinator.finish("a", "a1", RequestNumber(1, 0), b"text")
        assert not coordinator.finish("b", "b1", RequestNumber(1, 0), b"copy")
    update = take(coordinator)
    assert (update.workers, update.counts["late_groups"]) == ({"a": 1, "b": 1}, 1)
    assert update.groups == [((1, 0), b"text")]
    assert take(coordinator, (1, 0)).groups == []
    assert coordinator.finish("a", "a1", RequestNumber(1, 0), b"text")
    assert take(coordinator).groups == []


def test_senders_of_the_last_groups_are_kept(coordinator: Coordinator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("marin_rl.distributed.coordinator.KEPT_SENDERS", 2)
    numbers = [(1, 0), (1, 1), (2, 0), (2, 1)]
    for number in numbers:
        assert coordinator.finish("a", "a1", RequestNumber(*number), b"text")
    take(coordinator, *numbers[1:])
    assert [coordinator.finish("b", "b1", RequestNumber(*number), b"copy") for number in numbers] == [
        False,  # Not acknowledged yet.
        True,
        False,
        False,
    ]


@pytest.mark.parametrize(
    "change",
    [
        lambda coordinator: coordinator.submit([request(1, 5)]),
        lambda coordinator: coordinator.announce(1, ["here"]),
        lambda coordinator: coordinator.join("b", "b2"),
        Coordinator.stop,
    ],
)
def test_waiting_worker_is_woken_by_a_change(coordinator: Coordinator, change: Callable[[Coordinator], None]) -> None:
    async def work() -> Assignment | None:
        await coordinator.next_assignment("b", "b1", 1, 4, ())
        call = asyncio.create_task(coordinator.next_assignment("a", "a1", 0, 4, (), seconds=600.0))
        await asyncio.sleep(0)
        assert not call.done()
        change(coordinator)
        return await call

    assignment = asyncio.run(work())
    assert assignment is not None
    assert assignment.requests or assignment.newest.version or assignment.stop


def test_waiting_worker_gets_the_requests_of_a_silent_one(coordinator: Coordinator, clock: Clock) -> None:
    async def work() -> Assignment | None:
        await coordinator.next_assignment("a", "a1", 0, 4, ())
        clock.now = 6.0
        call = asyncio.create_task(coordinator.next_assignment("b", "b1", 0, 4, (), seconds=600.0))
        await asyncio.sleep(0)
        assert not call.done()
        clock.now = 11.0
        await coordinator.take([])
        return await call

    assignment = asyncio.run(work())
    assert assignment is not None
    assert [request.number for request in assignment.requests] == [(1, 0), (1, 1)]


def test_wait_ends_with_a_group_or_after_the_given_time(coordinator: Coordinator) -> None:
    async def wait() -> tuple[TrainerUpdate, Assignment | None]:
        call = asyncio.create_task(coordinator.take((), seconds=600.0))
        await asyncio.sleep(0)
        coordinator.finish("a", "a1", RequestNumber(1, 0), b"text")
        assert (await call).groups == [((1, 0), b"text")]
        update = await coordinator.take([RequestNumber(1, 0)], seconds=0.01)
        return update, await coordinator.next_assignment("a", "a1", None, 4, (), seconds=0.01)

    update, assignment = asyncio.run(wait())
    assert update.groups == []
    assert assignment is not None
    assert assignment.requests == []
