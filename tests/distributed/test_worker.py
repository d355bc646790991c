# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Calls of a worker to its coordinator, with a fake policy."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from marin_rl.distributed.coordinator import Assignment, CoordinatorActor
from marin_rl.distributed.rollout_source import FinishedGroup
from marin_rl.distributed.scheduler import GroupRequest, RequestNumber
from marin_rl.distributed.worker import work
from marin_rl.rollouts.group_codec import decode_group
from marin_rl.types import RolloutGroup, Task, WeightVersion


def request(index: int, min_version: int = 0) -> GroupRequest:
    return GroupRequest(RequestNumber(1, index), Task("t", "sums", ({"role": "user", "content": ""},), ""), min_version)


OnGroupDone = Callable[[FinishedGroup], Sequence[GroupRequest]]
Script = Callable[["Policy", Sequence[GroupRequest], OnGroupDone], None]


@dataclasses.dataclass
class Policy:
    """Fake policy that calls a function instead of running groups."""

    coordinator_actor: CoordinatorActor
    script: Script
    is_in_flight: bool = False
    version: WeightVersion | None = None
    room: int = 2
    failing: int = 0
    """Number of fetches that fail."""

    def fetch(self, addresses: Sequence[str]) -> bool:
        assert addresses == ("here",)
        if self.failing:
            self.failing -= 1
            return False
        self.version = self.coordinator_actor.announced().version
        return True

    def run(self, requests: Sequence[GroupRequest], on_group_done: OnGroupDone) -> None:
        self.script(self, requests, on_group_done)


def finished(request: GroupRequest) -> FinishedGroup:
    return FinishedGroup(request.number, RolloutGroup(request.number.group_id, []))


def delivered(coordinator_actor: CoordinatorActor) -> list[str]:
    """Return the ids of the groups that the trainer would receive."""
    return [decode_group(text).id for _, text in coordinator_actor.take([], 0.0).groups]


def run(coordinator_actor: CoordinatorActor, script: Script, *, is_in_flight: bool = False) -> None:
    work(coordinator_actor, "w", Policy(coordinator_actor, script, is_in_flight), heartbeat_timeout=600.0, poll=0.0)


@pytest.fixture
def coordinator_actor() -> CoordinatorActor:
    """A coordinator with five requests, of which the last needs newer weights."""
    actor = CoordinatorActor(heartbeat_timeout=600.0)
    actor.announce(0, ["here"])
    actor.submit([*map(request, range(4)), request(4, min_version=1)])
    return actor


def indices(requests: Sequence[GroupRequest]) -> list[int]:
    return [item.number.index for item in requests]


def test_group_is_returned_before_the_next_starts(coordinator_actor: CoordinatorActor) -> None:
    seen: list[list[str]] = []

    def script(policy: Policy, requests: Sequence[GroupRequest], on_group_done: OnGroupDone) -> None:
        waiting = list(requests)
        while waiting:
            waiting += on_group_done(finished(waiting.pop(0)))
            seen.append(delivered(policy.coordinator_actor))
        policy.coordinator_actor.stop()

    run(coordinator_actor, script)
    names = [f"train-1-{index}" for index in range(4)]
    assert seen == [names[: index + 1] for index in range(4)]


def test_finished_groups_are_replaced_and_free_slots_filled_later(
    coordinator_actor: CoordinatorActor,
) -> None:
    taken: list[list[int]] = []

    def script(policy: Policy, requests: Sequence[GroupRequest], on_group_done: OnGroupDone) -> None:
        one, other = requests
        taken.append(indices(requests))
        [third] = on_group_done(finished(one))
        [fourth] = on_group_done(finished(other))
        taken.append(indices([third, fourth]))
        # No waiting request accepts these weights ...
        taken.append(indices(on_group_done(finished(third))))
        # ... until others are submitted, when two slots are free.
        policy.coordinator_actor.submit([request(index) for index in (5, 6, 7)])
        fifth, sixth = on_group_done(finished(fourth))
        taken.append(indices([fifth, sixth]))
        policy.coordinator_actor.stop()
        taken.append(indices(on_group_done(finished(fifth))))
        assert on_group_done(finished(sixth)) == []

    run(coordinator_actor, script)
    assert taken == [[0, 1], [2, 3], [], [5, 6], []]


def test_worker_without_weights_releases_requests_and_retries(
    coordinator_actor: CoordinatorActor,
) -> None:
    seen: list[tuple[WeightVersion | None, list[int]]] = []
    coordinator_actor.announce(1, ["here"])

    def script(policy: Policy, requests: Sequence[GroupRequest], on_group_done: OnGroupDone) -> None:
        seen.append((policy.version, indices(requests)))
        policy.coordinator_actor.stop()
        for one in requests:
            assert on_group_done(finished(one)) == []

    failed: list[list[int]] = []

    @dataclasses.dataclass
    class CutOff(Policy):
        def fetch(self, addresses: Sequence[str]) -> bool:
            is_received = Policy.fetch(self, addresses)
            if not is_received:
                coordinator_actor.join("other", "o")
                assignment = coordinator_actor.next_assignment("other", "o", 1, 5, (), 0.0)
                assert assignment is not None
                failed.append(indices(assignment.requests))
                coordinator_actor.leave("other", "o")
            return is_received

    work(
        coordinator_actor,
        "w",
        CutOff(coordinator_actor, script, version=0, failing=2),
        heartbeat_timeout=600.0,
        poll=0.0,
    )
    # The worker holds two requests at first, and then none.
    assert failed == [[2, 3, 4], [0, 1, 2, 3, 4]]
    assert seen == [(1, [0, 1])]


@pytest.mark.parametrize("is_in_flight", [False, True])
def test_worker_waits_for_newer_weights_only_between_groups(
    coordinator_actor: CoordinatorActor, is_in_flight: bool
) -> None:
    taken: list[tuple[WeightVersion | None, list[int]]] = []

    def script(policy: Policy, requests: Sequence[GroupRequest], on_group_done: OnGroupDone) -> None:
        taken.append((policy.version, indices(requests)))
        policy.coordinator_actor.announce(1, ["here"])
        waiting = list(requests)
        while waiting:
            more = on_group_done(finished(waiting.pop(0)))
            if more:
                taken.append((policy.version, indices(more)))
            waiting += more
        if len(delivered(policy.coordinator_actor)) == 5:
            policy.coordinator_actor.stop()

    run(coordinator_actor, script, is_in_flight=is_in_flight)
    if is_in_flight:
        # This policy updates its weights only in `fetch`; a request for newer weights waits until then.
        assert taken == [(0, [0, 1]), (0, [2]), (0, [3]), (1, [4])]
    else:
        assert taken == [(0, [0, 1]), (1, [2, 3]), (1, [4])]


def test_weights_newer_than_announced_are_not_fetched_again(
    coordinator_actor: CoordinatorActor,
) -> None:
    fetched: list[WeightVersion] = []
    taken: list[list[int]] = []

    class Ahead(Policy):
        """Policy with weights one version ahead of the announcement."""

        def fetch(self, addresses: Sequence[str]) -> bool:
            self.version = self.coordinator_actor.announced().version + 1
            fetched.append(self.version)
            return True

    def script(policy: Policy, requests: Sequence[GroupRequest], on_group_done: OnGroupDone) -> None:
        waiting = list(requests)
        taken.append(indices(requests))
        while waiting:
            more = on_group_done(finished(waiting.pop(0)))
            taken.append(indices(more))
            waiting += more
        policy.coordinator_actor.stop()

    work(coordinator_actor, "w", Ahead(coordinator_actor, script), heartbeat_timeout=600.0, poll=0.0)
    assert fetched == [1]
    assert taken == [[0, 1], [2], [3], [4], [], []]


def test_lost_assignments_are_assigned_again() -> None:
    class Lossy(CoordinatorActor):
        """Coordinator that loses two responses, so that the calls are repeated."""

        def next_assignment(self, *arguments: Any) -> Assignment | None:
            if is_lost.pop(0) if is_lost else False:
                super().next_assignment(*arguments)
            return super().next_assignment(*arguments)

    # The first call returns weights. Then the first assignment and the first replacement are lost.
    is_lost = [False, True, True]
    coordinator_actor = Lossy(heartbeat_timeout=600.0)
    coordinator_actor.announce(0, ["here"])
    coordinator_actor.submit([request(index) for index in range(6)])

    def script(policy: Policy, requests: Sequence[GroupRequest], on_group_done: OnGroupDone) -> None:
        waiting = list(requests)
        while waiting:
            waiting += on_group_done(finished(waiting.pop(0)))
        policy.coordinator_actor.stop()

    run(coordinator_actor, script)
    assert delivered(coordinator_actor) == [f"train-1-{index}" for index in range(6)]


def test_dropped_worker_finishes_its_groups_and_joins_again(coordinator_actor: CoordinatorActor) -> None:
    taken: list[list[int]] = []

    def script(policy: Policy, requests: Sequence[GroupRequest], on_group_done: OnGroupDone) -> None:
        taken.append(indices(requests))
        if len(taken) == 1:
            # Another incarnation of the worker takes over its requests.
            policy.coordinator_actor.join("w", "another")
            assert [on_group_done(finished(one)) for one in requests] == [[], []]
        else:
            policy.coordinator_actor.stop()

    run(coordinator_actor, script)
    assert taken == [[0, 1], [2, 3]]
    assert delivered(coordinator_actor) == ["train-1-0", "train-1-1"]
