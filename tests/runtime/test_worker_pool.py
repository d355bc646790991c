# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""The trainer's side of the conversation with a coordinator, word for word; test_staleness.py plays whole runs."""

import dataclasses
from collections.abc import Callable, Sequence

import pytest

from marin_rl.rollouts.group_codec import encode_group
from marin_rl.rollouts.scheduler import GroupRequest, RequestNumber
from marin_rl.runtime.coordinator import TrainerUpdate
from marin_rl.runtime.rollout_source import StopRequestedError
from marin_rl.runtime.worker_pool import NoWorkersError, WorkerFailedError, WorkerPool
from marin_rl.timing import PhaseTimer
from marin_rl.types import RolloutGroup, Task, WeightVersion
from tests.runtime.inline_executor import InlineExecutor

NOTHING = TrainerUpdate("one", [], None, {}, {}, {"present": 0.0, "busy": 0.0})


def order(step: int, index: int) -> GroupRequest:
    return GroupRequest(RequestNumber(step, index), Task("t", "sums", ({"role": "user", "content": ""},), ""), 0)


def with_groups(*numbers: tuple[int, int], **changes: object) -> TrainerUpdate:
    named = [RequestNumber(*number) for number in numbers]
    groups = [(number, encode_group(RolloutGroup(number.group_id, []))) for number in named]
    return NOTHING._replace(groups=groups, **changes)


@dataclasses.dataclass
class Desk:
    """Answers with the deliveries that are prepared, the last one for good, and writes down what it is told."""

    said: list[str]
    deliveries: list[TrainerUpdate] = dataclasses.field(default_factory=lambda: [NOTHING])

    def submit(self, orders: Sequence[GroupRequest]) -> None:
        self.said.append("submit " + " ".join(one.number.group_id for one in orders))

    def announce(self, version: WeightVersion, addresses: Sequence[str]) -> None:
        self.said.append(f"announce {version} at {' '.join(addresses)}")

    def take(self, acknowledged: Sequence[RequestNumber], seconds: float) -> TrainerUpdate:
        self.said.append("take, thanks for " + " ".join(number.group_id for number in acknowledged))
        return self.deliveries.pop(0) if len(self.deliveries) > 1 else self.deliveries[0]


@dataclasses.dataclass
class Sender:
    """Writes down what it is told."""

    said: list[str]
    address: str = "here"
    published: WeightVersion | None = None
    when_flushed: Callable[[], None] = lambda: None

    def publish(self, weights: object, version: WeightVersion) -> None:
        self.said.append(f"publish {version}")

    def flush(self) -> None:
        self.said.append("flush")
        self.when_flushed()

    def close(self) -> None:
        self.said.append("close")


@pytest.fixture
def said() -> list[str]:
    """Everything that desk and sender are told, in its order."""
    return []


@pytest.fixture
def desk(said: list[str]) -> Desk:
    return Desk(said)


@pytest.fixture
def sender(said: list[str]) -> Sender:
    return Sender(said)


@pytest.fixture
def rollout_source(desk: Desk, sender: Sender) -> WorkerPool:
    return WorkerPool(desk, sender, patience=600.0)


def wait(rollout_source: WorkerPool) -> list[tuple[RequestNumber, str]]:
    return [(number, group.id) for number, group in rollout_source.wait(PhaseTimer())]


def test_weights_are_announced_when_they_can_be_had(rollout_source: WorkerPool, said: list[str]) -> None:
    rollout_source.publish({}, 0)
    rollout_source.publish({}, 1)
    rollout_source.close()
    assert said == ["publish 0", "flush", "announce 0 at here", "publish 1", "flush", "announce 1 at here"]


def test_the_addresses_of_all_training_hosts_are_announced(desk: Desk, sender: Sender) -> None:
    rollout_source = WorkerPool(desk, sender, patience=600.0, addresses=["here", "there"])
    rollout_source.publish({}, 3)
    rollout_source.close()
    assert desk.said[-1] == "announce 3 at here there"


def test_what_goes_wrong_with_weights_is_raised_by_who_waits_for_groups(
    desk: Desk, sender: Sender, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise OSError("the network is down")

    monkeypatch.setattr("marin_rl.background_job.ThreadPoolExecutor", InlineExecutor)
    sender.when_flushed = fail
    rollout_source = WorkerPool(desk, sender, patience=600.0)
    rollout_source.submit([order(1, 0)])
    rollout_source.publish({}, 0)
    desk.deliveries = [with_groups((1, 0))]
    with pytest.raises(OSError, match="the network is down"):
        rollout_source.wait(PhaseTimer())
    assert desk.said == ["submit train-1-0", "publish 0", "flush"]


def test_no_orders_are_no_question(rollout_source: WorkerPool, said: list[str]) -> None:
    rollout_source.submit([])
    assert said == []


def test_groups_are_acknowledged_with_the_next_question_and_taken_once(
    rollout_source: WorkerPool, desk: Desk, said: list[str]
) -> None:
    rollout_source.submit([order(1, 0), order(1, 1)])
    desk.deliveries = [with_groups((1, 0)), with_groups((1, 0)), with_groups((1, 0), (1, 1))]
    assert wait(rollout_source) == [((1, 0), "train-1-0")]
    assert wait(rollout_source) == [((1, 1), "train-1-1")]
    assert said == [
        "submit train-1-0 train-1-1",
        "take, thanks for ",
        "submit train-1-0 train-1-1",
        "take, thanks for train-1-0",
        "take, thanks for train-1-0",
    ]


def test_a_new_coordinator_hears_where_the_weights_are_and_what_is_still_owed(
    rollout_source: WorkerPool, desk: Desk, said: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    rollout_source.publish({}, 4)
    rollout_source.submit([order(5, 1), order(5, 0), order(6, 0)])
    desk.deliveries = [with_groups((5, 0))]
    assert wait(rollout_source) == [((5, 0), "train-5-0")]
    rollout_source.close()
    said.clear()
    desk.deliveries = [NOTHING._replace(incarnation="two"), with_groups((5, 1), incarnation="two")]
    assert wait(rollout_source) == [((5, 1), "train-5-1")]
    assert said == [
        "take, thanks for train-5-0",
        "announce 4 at here",
        "submit train-5-1 train-6-0",
        "take, thanks for ",
    ]
    assert "the coordinator was started anew; it is told of 2 groups that are owed" in caplog.text


def test_a_coordinator_that_was_told_of_orders_and_weights_may_be_lost_before_it_ever_answered(
    rollout_source: WorkerPool, desk: Desk, said: list[str]
) -> None:
    rollout_source.publish({}, 0)
    rollout_source.submit([order(1, 0)])
    rollout_source.close()
    said.clear()
    # Whoever answers first may be another one, which knows of nothing.
    desk.deliveries = [NOTHING, with_groups((1, 0))]
    assert wait(rollout_source) == [((1, 0), "train-1-0")]
    assert said == ["take, thanks for ", "announce 0 at here", "submit train-1-0", "take, thanks for "]


def test_counts_go_on_over_coordinators_and_shares_are_of_the_time_since_they_were_asked_for(
    rollout_source: WorkerPool, desk: Desk
) -> None:
    def after(present: float, busy: float, joined: int, incarnation: str) -> dict[str, float]:
        desk.deliveries = [
            NOTHING._replace(
                incarnation=incarnation,
                workers={"a": 1, "b": 0},
                counts={"joined": joined},
                seconds={"present": present, "busy": busy},
            )
        ]
        rollout_source.ask(rollout_source.deadline())
        return rollout_source.metrics()

    assert rollout_source.metrics() == {"workers/alive": 0.0, "workers/busy_share": 0.0}
    expected = {"workers/alive": 2.0, "workers/busy_share": 0.5, "workers/joined": 2.0}
    assert after(8.0, 4.0, 2, "one") == expected
    assert after(18.0, 5.0, 3, "one") == {**expected, "workers/busy_share": 0.1, "workers/joined": 3.0}
    # Another one begins to count anew.
    assert after(4.0, 3.0, 2, "two") == {**expected, "workers/busy_share": 0.75, "workers/joined": 5.0}
    assert after(4.0, 3.0, 2, "two") == {**expected, "workers/busy_share": 0.0, "workers/joined": 5.0}


def test_counts_go_on_where_the_run_was_stopped(desk: Desk, sender: Sender) -> None:
    rollout_source = WorkerPool(desk, sender, patience=600.0, counts={"joined": 4, "lost": 1})
    assert rollout_source.metrics()["workers/joined"] == 4.0
    for incarnation, joined in (("one", 6), ("two", 8)):
        desk.deliveries = [NOTHING._replace(incarnation=incarnation, counts={"joined": 2, "lost": 0})]
        rollout_source.ask(rollout_source.deadline())
        assert rollout_source.counts == {"joined": joined, "lost": 1}


def test_an_error_that_ended_a_worker_is_raised_when_no_more_groups_come(
    rollout_source: WorkerPool, desk: Desk
) -> None:
    rollout_source.submit([order(1, 0), order(1, 1)])
    desk.deliveries = [with_groups((1, 0), failure="worker-0: KeyError: 'x'"), NOTHING._replace(failure="worker-0: no")]
    assert wait(rollout_source) == [((1, 0), "train-1-0")]
    with pytest.raises(WorkerFailedError, match=r"a rollout worker ended with an error: worker-0: no\. .*traceback"):
        wait(rollout_source)


def test_who_gives_up_says_what_was_owed_and_what_to_do(desk: Desk, sender: Sender, said: list[str]) -> None:
    rollout_source = WorkerPool(desk, sender, patience=1.5)
    rollout_source.submit([order(2, index) for index in reversed(range(7))])
    said.clear()
    with pytest.raises(NoWorkersError) as raised:
        rollout_source.ask(deadline=0.0)
    assert str(raised.value) == (
        "no group came from any rollout worker in 1.5 s (workers.no_progress_timeout); 7 are owed (train-2-0, "
        "train-2-1, train-2-2, train-2-3, train-2-4, ...), "
        "and there are 0 workers. Their logs say what holds them up; run the "
        "same command again to go on from the last checkpoint"
    )
    assert said == []


def test_a_stop_ends_the_wait_for_groups_that_never_come(rollout_source: WorkerPool, said: list[str]) -> None:
    rollout_source.submit([order(1, 0)])
    with pytest.raises(StopRequestedError):
        rollout_source.wait(PhaseTimer(), lambda: len(said) >= 4)
    # Asked before every question: the coordinator was asked twice, and told of the order when it first answered.
    assert said == ["submit train-1-0", "take, thanks for ", "submit train-1-0", "take, thanks for "]
