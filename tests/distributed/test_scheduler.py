# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Scheduler: staleness limits, duplicate completion, and state in checkpoints."""

import itertools
import json

from marin_rl.distributed.scheduler import GroupRequest, RolloutScheduler, StalenessLimits
from marin_rl.types import Task


class Tasks:
    """Infinite numbered tasks."""

    def __init__(self) -> None:
        self.numbers = itertools.count()

    def __call__(self, count: int) -> list[Task]:
        return [
            Task(str(number), "sums", ({"role": "user", "content": str(number)},), "")
            for number in itertools.islice(self.numbers, count)
        ]


def names(requests: list[GroupRequest]) -> list[tuple[int, int, str]]:
    return [(request.number.step, request.number.index, request.task.id) for request in requests]


def test_without_staleness_only_next_step_is_requested() -> None:
    scheduler, tasks = RolloutScheduler(StalenessLimits(3)), Tasks()
    first = scheduler.request(0, 0, 0, tasks)
    assert names(first) == [(1, 0, "0"), (1, 1, "1"), (1, 2, "2")]
    assert {request.min_version for request in first} == {0}
    assert scheduler.request(0, 0, 0, tasks) == []
    for settled in range(3):
        assert scheduler.complete(first[settled].number)
        assert not scheduler.complete(first[settled].number)
        # Finished groups that wait to be trained on count like pending ones.
        assert scheduler.request(0, settled + 1, settled + 1, tasks) == []
    second = scheduler.request(1, 0, 0, tasks)
    assert names(second) == [(2, 0, "3"), (2, 1, "4"), (2, 2, "5")]
    assert {request.min_version for request in second} == {1}


def test_staleness_allows_requests_for_later_steps() -> None:
    scheduler = RolloutScheduler(StalenessLimits(2, max_staleness=2))
    requests = scheduler.request(0, 0, 0, Tasks())
    assert [request.number.step for request in requests] == [1, 1, 2, 2, 3, 3]
    # The group of step 3 is trained on by weights of version 2: version 0 is fresh enough.
    assert [request.min_version for request in requests] == [0] * 6
    for request in requests[:2]:
        scheduler.complete(request.number)
    later = scheduler.request(1, 0, 0, Tasks())
    assert [(request.number.step, request.min_version) for request in later] == [(4, 1), (4, 1)]


def test_two_uses_halve_the_requests_and_the_lead() -> None:
    scheduler = RolloutScheduler(StalenessLimits(4, max_staleness=2, max_uses=2))
    first = scheduler.request(0, 0, 0, Tasks())
    assert len(first) == 4
    for request in first:
        scheduler.complete(request.number)
    assert [request.number.step for request in scheduler.request(1, 4, 4, Tasks())] == [3, 3]
    # The second use would be in step 4, by weights of version 3.
    assert [request.min_version for request in scheduler.outstanding] == [1, 1]
    # If the uses take up the whole staleness limit, nothing is sampled ahead.
    scheduler = RolloutScheduler(StalenessLimits(4, max_staleness=1, max_uses=2))
    for request in scheduler.request(0, 0, 0, Tasks()):
        assert request.min_version == 0
        scheduler.complete(request.number)
    assert scheduler.request(1, 4, 4, Tasks()) == []
    assert [request.min_version for request in scheduler.request(2, 0, 0, Tasks())] == [2] * 4


def test_dropped_groups_are_replaced_up_to_a_limit() -> None:
    scheduler, tasks = RolloutScheduler(StalenessLimits(2, replacements_per_step=3)), Tasks()
    requests = scheduler.request(0, 0, 0, tasks)
    for request in requests:
        scheduler.complete(request.number)
    second = scheduler.replace([request.number for request in requests], 0, tasks)
    assert names(second) == [(1, 2, "2"), (1, 3, "3")]
    for request in second:
        scheduler.complete(request.number)
    third = scheduler.replace([request.number for request in second], 0, tasks)
    assert names(third) == [(1, 4, "4")]
    scheduler.complete(third[0].number)
    assert scheduler.replace([third[0].number], 0, tasks) == []
    assert scheduler.outstanding == []
    assert (scheduler.groups_needed(1), scheduler.groups_needed(2)) == (0, 2)


def test_dropped_group_without_replacement_keeps_its_slot() -> None:
    # Both groups of step 2 are dropped: it has no groups, and step 3 uses its own requests.
    scheduler, tasks = RolloutScheduler(StalenessLimits(2, max_staleness=1)), Tasks()
    requests = scheduler.request(0, 0, 0, tasks)
    for request in requests:
        scheduler.complete(request.number)
    assert scheduler.replace([request.number for request in requests[2:]], 0, tasks) == []
    assert (scheduler.groups_needed(1), scheduler.groups_needed(2), scheduler.groups_needed(3)) == (2, 0, 2)
    assert names(scheduler.request(1, 0, 0, tasks)) == [(3, 0, "4"), (3, 1, "5")]


def test_step_lacks_at_most_its_group_count() -> None:
    # Two groups of step 1 expired and were requested again for step 2, whose four groups are all dropped.
    scheduler, tasks = RolloutScheduler(StalenessLimits(2, max_staleness=1)), Tasks()
    requests = scheduler.request(0, 0, 0, tasks)
    for request in requests[:2]:
        scheduler.complete(request.number)
    more = scheduler.request(0, 0, 0, tasks)
    assert [tuple(request.number) for request in more] == [(2, 2), (2, 3)]
    scheduler.replace([request.number for request in [*requests[2:], *more]], 0, tasks)
    assert (scheduler.groups_needed(2), scheduler.groups_needed(3), scheduler.groups_needed(4)) == (0, 0, 2)


def test_tasks_of_late_groups_are_requested_first() -> None:
    scheduler, tasks = RolloutScheduler(StalenessLimits(2, max_staleness=1)), Tasks()
    late = scheduler.request(0, 0, 0, tasks)[1:]
    for request in late:
        scheduler.complete(request.number)
    scheduler.retry([request.task for request in late])
    restored = RolloutScheduler(scheduler.limits, json.loads(json.dumps(scheduler.state)))
    # There is room for two tasks; the third is requested before new tasks.
    assert names(restored.request(1, 1, 1, tasks)) == [(3, 0, "1"), (3, 1, "2")]
    assert names(restored.request(2, 0, 0, tasks)) == [(4, 0, "3")]
    assert names(restored.request(3, 0, 0, tasks)) == []


def test_scheduler_state_roundtrip() -> None:
    pace = StalenessLimits(2, max_staleness=1, replacements_per_step=4)
    scheduler, tasks = RolloutScheduler(pace), Tasks()
    requests = scheduler.request(0, 0, 0, tasks)
    scheduler.complete(requests[1].number)
    scheduler.replace([requests[1].number], 0, tasks)
    restored = RolloutScheduler(pace, json.loads(json.dumps(scheduler.state)))
    assert restored.outstanding == scheduler.outstanding
    assert names(restored.outstanding) == [(1, 0, "0"), (1, 2, "4"), (2, 0, "2"), (2, 1, "3")]
    assert restored.state == scheduler.state
    more = Tasks()
    assert restored.request(1, 0, 0, more) == scheduler.request(1, 0, 0, Tasks())
