# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""The order book: how far ahead it orders, that nothing is taken twice, and that it comes back from a checkpoint."""

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from marin_rl.rollouts.scheduler import GroupRequest, RequestNumber, RolloutScheduler, StalenessLimits
from marin_rl.types import Task


class Tasks:
    """Numbered tasks without end."""

    def __init__(self) -> None:
        self.numbers = itertools.count()

    def __call__(self, count: int) -> list[Task]:
        return [
            Task(str(number), "sums", ({"role": "user", "content": str(number)},), "")
            for number in itertools.islice(self.numbers, count)
        ]


def names(orders: list[GroupRequest]) -> list[tuple[int, int, str]]:
    return [(order.number.step, order.number.index, order.task.id) for order in orders]


def test_without_staleness_only_the_next_step_is_ordered() -> None:
    book, tasks = RolloutScheduler(StalenessLimits(3)), Tasks()
    first = book.order(0, 0, 0, tasks)
    assert names(first) == [(1, 0, "0"), (1, 1, "1"), (1, 2, "2")]
    assert {order.min_version for order in first} == {0}
    assert book.order(0, 0, 0, tasks) == []
    for settled in range(3):
        assert book.complete(first[settled].number)
        # What has come waits to be trained on, and takes the room that it took before.
        assert book.order(0, settled + 1, settled + 1, tasks) == []
    second = book.order(1, 0, 0, tasks)
    assert names(second) == [(2, 0, "3"), (2, 1, "4"), (2, 2, "5")]
    assert {order.min_version for order in second} == {1}


def test_with_staleness_it_is_so_many_steps_ahead() -> None:
    book = RolloutScheduler(StalenessLimits(2, max_staleness=2))
    orders = book.order(0, 0, 0, Tasks())
    assert [order.number.step for order in orders] == [1, 1, 2, 2, 3, 3]
    # The group of step 3 is trained on by weights of version 2: version 0 is fresh enough.
    assert [order.min_version for order in orders] == [0] * 6
    for order in orders[:2]:
        book.complete(order.number)
    later = book.order(1, 0, 0, Tasks())
    assert [(order.number.step, order.min_version) for order in later] == [(4, 1), (4, 1)]


def test_groups_that_are_used_twice_are_ordered_half_as_often_and_may_be_ahead_by_a_step_less() -> None:
    book = RolloutScheduler(StalenessLimits(4, max_staleness=2, max_uses=2))
    first = book.order(0, 0, 0, Tasks())
    assert len(first) == 4
    for order in first:
        book.complete(order.number)
    assert [order.number.step for order in book.order(1, 4, 4, Tasks())] == [3, 3]
    # The second use would be in step 4, by weights of version 3.
    assert [order.min_version for order in book.outstanding] == [1, 1]
    # Where all that may be stale is taken by the uses, nothing is played ahead.
    book = RolloutScheduler(StalenessLimits(4, max_staleness=1, max_uses=2))
    for order in book.order(0, 0, 0, Tasks()):
        assert order.min_version == 0
        book.complete(order.number)
    assert book.order(1, 4, 4, Tasks()) == []
    assert [order.min_version for order in book.order(2, 0, 0, Tasks())] == [2] * 4


def test_nothing_is_ordered_for_steps_after_the_last() -> None:
    book, tasks = RolloutScheduler(StalenessLimits(2, max_staleness=3, last_step=5)), Tasks()
    ordered = [len(book.order(0, 0, 0, tasks))]
    for version in range(1, 6):
        for order in book.outstanding[:2]:
            book.complete(order.number)
        ordered.append(len(book.order(version, 0, 0, tasks)))
    assert ordered == [8, 2, 0, 0, 0, 0]
    assert book.outstanding == []


def test_a_capacity_bounds_what_is_ordered() -> None:
    assert len(RolloutScheduler(StalenessLimits(2, max_staleness=3, capacity=5)).order(0, 0, 0, Tasks())) == 5
    assert len(RolloutScheduler(StalenessLimits(2, max_staleness=1, capacity=50)).order(0, 0, 0, Tasks())) == 4
    # Four groups that wait for their last use are four groups.
    assert RolloutScheduler(StalenessLimits(4, max_staleness=2, max_uses=3, capacity=4)).order(2, 4, 4, Tasks()) == []


def test_a_dropped_group_is_replaced_up_to_a_bound() -> None:
    book, tasks = RolloutScheduler(StalenessLimits(2, replacements_per_step=3)), Tasks()
    orders = book.order(0, 0, 0, tasks)
    for order in orders:
        book.complete(order.number)
    second = book.replace([order.number for order in orders], 0, tasks)
    assert names(second) == [(1, 2, "2"), (1, 3, "3")]
    for order in second:
        book.complete(order.number)
    third = book.replace([order.number for order in second], 0, tasks)
    assert names(third) == [(1, 4, "4")]
    book.complete(third[0].number)
    assert book.replace([third[0].number], 0, tasks) == []
    assert book.outstanding == []
    assert (book.wanted(1), book.wanted(2)) == (0, 2)


@given(st.data())
def test_which_groups_are_played_does_not_depend_on_when_they_come(data: st.DataObject) -> None:
    # Of a step's groups some teach nothing, and are replaced one by one or all together: the same groups are played.
    teaches = data.draw(st.lists(st.booleans(), min_size=40, max_size=40))

    def played(one_by_one: bool) -> set[tuple[int, int, str]]:
        book, tasks = RolloutScheduler(StalenessLimits(4, replacements_per_step=12)), Tasks()
        orders = book.order(0, 0, 0, tasks)
        everything = set(names(orders))
        while orders:
            size = 1 if one_by_one else len(orders)
            chosen = data.draw(st.permutations(orders)) if one_by_one else orders
            batch, orders = chosen[:size], list(chosen[size:])
            for order in batch:
                assert book.complete(order.number)
            dropped = [order.number for order in batch if not teaches[int(order.task.id)]]
            more = book.replace(dropped, 0, tasks)
            everything |= set(names(more))
            orders += more
        return everything

    assert played(one_by_one=True) == played(one_by_one=False)


def test_a_group_that_grew_too_old_makes_room_for_a_new_one() -> None:
    # Two of step 2 came and were thrown away unused: step 3 is made of what was ordered for it, and so on.
    book = RolloutScheduler(StalenessLimits(2, max_staleness=1))
    for order in book.order(0, 0, 0, Tasks()):
        book.complete(order.number)
    orders = book.order(2, 0, 0, Tasks())
    assert [tuple(order.number) for order in orders] == [(3, 0), (3, 1), (4, 0), (4, 1)]
    assert [order.min_version for order in orders] == [1, 1, 2, 2]
    assert book.wanted(3) == 2


def test_what_is_dropped_and_not_replaced_is_not_ordered_again_as_if_there_were_room() -> None:
    # Both groups of step 2 teach nothing: it has none, and step 3 is made of what was ordered for it.
    book, tasks = RolloutScheduler(StalenessLimits(2, max_staleness=1)), Tasks()
    orders = book.order(0, 0, 0, tasks)
    for order in orders:
        book.complete(order.number)
    assert book.replace([order.number for order in orders[2:]], 0, tasks) == []
    assert (book.wanted(1), book.wanted(2), book.wanted(3)) == (2, 0, 2)
    assert names(book.order(1, 0, 0, tasks)) == [(3, 0, "4"), (3, 1, "5")]


def test_a_step_lacks_no_more_groups_than_it_takes() -> None:
    # Two of step 1 grew too old and were ordered anew for step 2, so that there are four of that number, all in vain.
    book, tasks = RolloutScheduler(StalenessLimits(2, max_staleness=1)), Tasks()
    orders = book.order(0, 0, 0, tasks)
    for order in orders[:2]:
        book.complete(order.number)
    more = book.order(0, 0, 0, tasks)
    assert [tuple(order.number) for order in more] == [(2, 2), (2, 3)]
    book.replace([order.number for order in [*orders[2:], *more]], 0, tasks)
    assert (book.wanted(2), book.wanted(3), book.wanted(4)) == (0, 0, 2)


def test_tasks_whose_groups_came_too_late_are_ordered_anew_before_others() -> None:
    book, tasks = RolloutScheduler(StalenessLimits(2, max_staleness=1)), Tasks()
    late = book.order(0, 0, 0, tasks)[1:]
    for order in late:
        book.complete(order.number)
    book.again([order.task for order in late])
    again = RolloutScheduler(book.pace, json.loads(json.dumps(book.state)))
    # Room for two now; the third waits, ahead of what is drawn later.
    assert names(again.order(1, 1, 1, tasks)) == [(3, 0, "1"), (3, 1, "2")]
    assert names(again.order(2, 0, 0, tasks)) == [(4, 0, "3")]
    assert names(again.order(3, 0, 0, tasks)) == []


def test_an_order_is_settled_once() -> None:
    book = RolloutScheduler(StalenessLimits(1))
    (order,) = book.order(0, 0, 0, Tasks())
    assert book.complete(order.number)
    assert not book.complete(order.number)
    assert not book.complete(RequestNumber(7, 0))
    assert book.outstanding == []


def test_it_comes_back_from_a_checkpoint() -> None:
    pace = StalenessLimits(2, max_staleness=1, replacements_per_step=4)
    book, tasks = RolloutScheduler(pace), Tasks()
    orders = book.order(0, 0, 0, tasks)
    book.complete(orders[1].number)
    book.replace([orders[1].number], 0, tasks)
    again = RolloutScheduler(pace, json.loads(json.dumps(book.state)))
    assert again.outstanding == book.outstanding
    assert names(again.outstanding) == [(1, 0, "0"), (1, 2, "4"), (2, 0, "2"), (2, 1, "3")]
    assert again.state == book.state
    more = Tasks()
    assert again.order(1, 0, 0, more) == book.order(1, 0, 0, Tasks())


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"groups_per_step": 0}, "groups_per_step is 0"),
        ({"max_staleness": -1}, "max_staleness is -1"),
        ({"max_uses": 0}, "max_uses is 0"),
        ({"max_uses": 3, "max_staleness": 1}, "raise max_staleness"),
        ({"groups_per_step": 8, "capacity": 7}, "capacity is 7 groups, but a step takes 8"),
        ({"replacements_per_step": -1}, "replacements_per_step is -1"),
    ],
)
def test_a_pace_that_cannot_be_kept_is_refused(values: dict[str, int], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        StalenessLimits(**{"groups_per_step": 1, **values})
