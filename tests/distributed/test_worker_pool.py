# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Calls of the worker pool to the coordinator; test_staleness.py simulates complete runs."""

import dataclasses
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from marin_rl.distributed import worker_pool
from marin_rl.distributed.coordinator import TrainerUpdate
from marin_rl.distributed.coordinator_client import CoordinatorClient
from marin_rl.distributed.scheduler import GroupRequest, RequestNumber
from marin_rl.distributed.worker_pool import NoWorkersError, WorkerFailedError, WorkerPool
from marin_rl.rollouts.group_codec import encode_group, join_parts
from marin_rl.types import RolloutGroup, Task, WeightVersion
from marin_rl.utils import multihost
from marin_rl.utils.host_status import StopRequestedError
from marin_rl.utils.timing import PhaseTimer
from tests.distributed.inline_executor import InlineExecutor

NOTHING = TrainerUpdate("one", [], None, {}, {}, {"present": 0.0, "busy": 0.0})


def request(step: int, index: int) -> GroupRequest:
    return GroupRequest(RequestNumber(step, index), Task("t", "sums", ({"role": "user", "content": ""},), ""), 0)


def with_groups(*numbers: tuple[int, int], **changes: object) -> TrainerUpdate:
    named = [RequestNumber(*number) for number in numbers]
    groups = [(number, encode_group(RolloutGroup(number.group_id, []))) for number in named]
    return NOTHING._replace(groups=groups, **changes)


class Client(CoordinatorClient):
    """Fake client with prepared responses to `take`, of which the last is repeated; records all calls."""

    def __init__(self, calls: list[str]) -> None:
        self.calls = calls
        self.responses = [NOTHING]
        self.failure: str | None = None

    def call(self, method: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        return getattr(self, method.__name__)(*arguments)

    def find_failure(self) -> str | None:
        return self.failure

    def submit(self, requests: Sequence[GroupRequest]) -> None:
        self.calls.append("submit " + " ".join(one.number.group_id for one in requests))

    def announce(self, version: WeightVersion, addresses: Sequence[str]) -> None:
        self.calls.append(f"announce {version} at {' '.join(addresses)}")

    def take(self, acknowledged: Sequence[RequestNumber], seconds: float) -> TrainerUpdate:
        self.calls.append("take, acknowledge " + " ".join(number.group_id for number in acknowledged))
        return self.responses.pop(0) if len(self.responses) > 1 else self.responses[0]


@dataclasses.dataclass
class Sender:
    """Fake sender that records all calls."""

    calls: list[str]
    address: str = "here"
    published: WeightVersion | None = None
    when_flushed: Callable[[], None] = lambda: None

    def publish(self, weights: object, version: WeightVersion) -> None:
        self.calls.append(f"publish {version}")

    def flush(self) -> None:
        self.calls.append("flush")
        self.when_flushed()

    def close(self) -> None:
        self.calls.append("close")


@pytest.fixture
def calls() -> list[str]:
    """Calls to coordinator and sender, in order."""
    return []


@pytest.fixture
def client(calls: list[str]) -> Client:
    return Client(calls)


@pytest.fixture
def sender(calls: list[str]) -> Sender:
    return Sender(calls)


@pytest.fixture
def rollout_source(client: Client, sender: Sender) -> WorkerPool:
    return make_pool(client, sender)


def make_pool(client: CoordinatorClient | None, sender: Sender, **changes: Any) -> WorkerPool:
    return WorkerPool(client, sender, **{"addresses": ["here"], "counts": {}, "no_progress_timeout": 600.0, **changes})


def wait(rollout_source: WorkerPool) -> list[tuple[RequestNumber, str]]:
    return [(number, group.id) for number, group in rollout_source.wait(PhaseTimer())]


def poll(rollout_source: WorkerPool) -> None:
    """Poll once without a finished group."""
    stops = iter((False, True))
    with pytest.raises(StopRequestedError):
        rollout_source.wait(PhaseTimer(), lambda: next(stops))


def test_weights_are_announced_after_flush(rollout_source: WorkerPool, calls: list[str]) -> None:
    rollout_source.publish({}, 0)
    rollout_source.publish({}, 1)
    rollout_source.close()
    assert calls == ["publish 0", "flush", "announce 0 at here", "publish 1", "flush", "announce 1 at here"]


def test_the_addresses_of_all_training_hosts_are_announced(client: Client, sender: Sender) -> None:
    rollout_source = make_pool(client, sender, addresses=["here", "there"])
    rollout_source.publish({}, 3)
    rollout_source.close()
    assert client.calls[-1] == "announce 3 at here there"


def network_is_down() -> None:
    raise OSError("the network is down")


def test_publication_error_is_raised_by_wait(client: Client, sender: Sender, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("marin_rl.utils.event_loop.ThreadPoolExecutor", InlineExecutor)
    sender.when_flushed = network_is_down
    rollout_source = make_pool(client, sender)
    rollout_source.submit([request(1, 0)])
    rollout_source.publish({}, 0)
    client.responses = [with_groups((1, 0))]
    with pytest.raises(OSError, match="the network is down"):
        rollout_source.wait(PhaseTimer())
    assert client.calls == ["submit train-1-0", "publish 0", "flush"]


def test_empty_submission_makes_no_call(rollout_source: WorkerPool, calls: list[str]) -> None:
    rollout_source.submit([])
    assert calls == []


def test_groups_are_acknowledged_by_the_next_poll_and_returned_once(
    rollout_source: WorkerPool, client: Client, calls: list[str]
) -> None:
    rollout_source.submit([request(1, 0), request(1, 1)])
    client.responses = [with_groups((1, 0)), with_groups((1, 0)), with_groups((1, 0), (1, 1))]
    assert wait(rollout_source) == [((1, 0), "train-1-0")]
    assert wait(rollout_source) == [((1, 1), "train-1-1")]
    assert calls == [
        "submit train-1-0 train-1-1",
        "take, acknowledge ",
        "submit train-1-0 train-1-1",
        "take, acknowledge train-1-0",
        "take, acknowledge train-1-0",
    ]


def test_restarted_coordinator_receives_weights_and_pending_requests(
    rollout_source: WorkerPool, client: Client, calls: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    rollout_source.publish({}, 4)
    rollout_source.submit([request(5, 1), request(5, 0), request(6, 0)])
    client.responses = [with_groups((5, 0))]
    assert wait(rollout_source) == [((5, 0), "train-5-0")]
    rollout_source.close()
    calls.clear()
    client.responses = [NOTHING._replace(incarnation="two"), with_groups((5, 1), incarnation="two")]
    assert wait(rollout_source) == [((5, 1), "train-5-1")]
    assert calls == [
        "take, acknowledge train-5-0",
        "announce 4 at here",
        "submit train-5-1 train-6-0",
        "take, acknowledge ",
    ]
    assert "the coordinator was restarted; submitting 2 pending requests again" in caplog.text


def test_state_is_sent_again_after_the_first_response(
    rollout_source: WorkerPool, client: Client, calls: list[str]
) -> None:
    rollout_source.publish({}, 0)
    rollout_source.submit([request(1, 0)])
    rollout_source.close()
    calls.clear()
    # The first response may come from a restarted coordinator without state.
    client.responses = [NOTHING, with_groups((1, 0))]
    assert wait(rollout_source) == [((1, 0), "train-1-0")]
    assert calls == ["take, acknowledge ", "announce 0 at here", "submit train-1-0", "take, acknowledge "]


def test_counts_persist_over_restarts_and_shares_are_per_interval(rollout_source: WorkerPool, client: Client) -> None:
    def after(present: float, busy: float, joined: int, incarnation: str) -> dict[str, float]:
        client.responses = [
            NOTHING._replace(
                incarnation=incarnation,
                workers={"a": 1, "b": 0},
                counts={"joined": joined},
                seconds={"present": present, "busy": busy},
            )
        ]
        poll(rollout_source)
        return rollout_source.metrics()

    assert rollout_source.metrics() == {"workers/alive": 0.0, "workers/busy_share": 0.0}
    expected = {"workers/alive": 2.0, "workers/busy_share": 0.5, "workers/joined": 2.0}
    assert after(8.0, 4.0, 2, "one") == expected
    assert after(18.0, 5.0, 3, "one") == {**expected, "workers/busy_share": 0.1, "workers/joined": 3.0}
    # A restarted coordinator counts from 0.
    assert after(4.0, 3.0, 2, "two") == {**expected, "workers/busy_share": 0.75, "workers/joined": 5.0}
    assert after(4.0, 3.0, 2, "two") == {**expected, "workers/busy_share": 0.0, "workers/joined": 5.0}


def test_counts_continue_in_a_resumed_run(client: Client, sender: Sender) -> None:
    rollout_source = make_pool(client, sender, counts={"joined": 4, "lost": 1})
    assert rollout_source.metrics()["workers/joined"] == 4.0
    for incarnation, joined in (("one", 6), ("two", 8)):
        client.responses = [NOTHING._replace(incarnation=incarnation, counts={"joined": 2, "lost": 0})]
        poll(rollout_source)
        assert rollout_source.counts == {"joined": joined, "lost": 1}


def test_worker_error_is_raised_after_finished_groups_although_others_finish(
    rollout_source: WorkerPool, client: Client
) -> None:
    rollout_source.submit([request(1, 0), request(1, 1)])
    client.responses = [with_groups((1, 0), failure="worker-0: KeyError: no"), with_groups((1, 1))]
    assert wait(rollout_source) == [((1, 0), "train-1-0")]
    with pytest.raises(WorkerFailedError, match=r"worker ended with an error: worker-0: KeyError: no\. .*traceback"):
        wait(rollout_source)


def test_error_of_a_worker_that_failed_to_start_is_raised(rollout_source: WorkerPool, client: Client) -> None:
    rollout_source.submit([request(1, 0)])
    client.failure = "worker-0: ImportError: no such thing"
    client.responses = [with_groups((1, 0)), NOTHING]
    assert wait(rollout_source) == [((1, 0), "train-1-0")]
    with pytest.raises(WorkerFailedError, match=r"worker-0: ImportError: no such thing\."):
        wait(rollout_source)


def test_error_that_the_worker_itself_reported_takes_precedence(rollout_source: WorkerPool, client: Client) -> None:
    client.failure = "worker-0: ImportError: no such thing"
    client.responses = [NOTHING._replace(failure="worker-0: OSError: no disk")]
    with pytest.raises(WorkerFailedError, match=r"worker-0: OSError: no disk\."):
        wait(rollout_source)


def test_timeout_error_lists_pending_groups_and_remedy(
    client: Client, sender: Sender, calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    rollout_source = make_pool(client, sender, no_progress_timeout=1.5)
    rollout_source.submit([request(2, index) for index in reversed(range(7))])
    calls.clear()
    monkeypatch.setattr(worker_pool, "time", SimpleNamespace(monotonic=iter((0.0, 1.6)).__next__))
    with pytest.raises(NoWorkersError) as raised:
        rollout_source.wait(PhaseTimer())
    assert str(raised.value) == (
        "no rollout worker finished a group in 1.5 s (workers.no_progress_timeout); 7 are pending (train-2-0, "
        "train-2-1, train-2-2, train-2-3, train-2-4, ...), "
        "and there are 0 workers. See their logs for the cause; run the "
        "same command again to resume from the last checkpoint"
    )
    assert calls == []


def test_stop_ends_a_wait_without_groups(rollout_source: WorkerPool, calls: list[str]) -> None:
    rollout_source.submit([request(1, 0)])
    with pytest.raises(StopRequestedError):
        rollout_source.wait(PhaseTimer(), lambda: len(calls) >= 4)
    # Checked before every poll: there were two polls, and the request was repeated after the first response.
    assert calls == ["submit train-1-0", "take, acknowledge ", "submit train-1-0", "take, acknowledge "]


def test_stop_ends_the_wait_in_a_process_without_workers(monkeypatch: pytest.MonkeyPatch, sender: Sender) -> None:
    exchanges: list[str] = []

    def from_main(work: Callable[[], bytes]) -> bytes:
        exchanges.append("groups")
        return join_parts([b"[]"])

    def stop_requested() -> bool:
        exchanges.append("stop")
        return len(exchanges) > 4

    monkeypatch.setattr(multihost, "on_main", from_main)
    with pytest.raises(StopRequestedError):
        make_pool(None, sender).wait(PhaseTimer(), stop_requested)
    # The main process makes the same exchanges in the same order.
    assert exchanges == ["stop", "groups", "stop", "groups", "stop"]


def test_all_processes_wait_for_the_announcement(
    rollout_source: WorkerPool, sender: Sender, calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The main process looks for the weights on the servers of the others, so these must not close before."""
    rollout_source.publish({}, 1)
    rollout_source.flush()
    assert calls == ["publish 1", "flush", "announce 1 at here"]
    rollout_source.close()

    waited = []
    other = make_pool(None, sender)
    monkeypatch.setattr(multihost, "on_main", waited.append)
    other.publish({}, 2)
    other.flush()
    assert len(waited) == 1
    other.close()


@pytest.mark.parametrize("method", ["wait", "flush"])
def test_publication_error_of_another_process_is_raised_there(
    sender: Sender, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """Without its shards the main process cannot announce the weights, and no group finishes."""
    monkeypatch.setattr("marin_rl.utils.event_loop.ThreadPoolExecutor", InlineExecutor)
    monkeypatch.setattr(multihost, "on_main", lambda work: join_parts([b"[]"]))
    sender.when_flushed = network_is_down
    other, stops = make_pool(None, sender), iter((False, True))
    other.publish({}, 0)
    with pytest.raises(OSError, match="the network is down"):
        {"wait": lambda: other.wait(PhaseTimer(), lambda: next(stops)), "flush": other.flush}[method]()


def test_other_processes_only_publish_weights(sender: Sender, calls: list[str]) -> None:
    rollout_source = make_pool(None, sender, counts={"lost": 3})
    rollout_source.submit([request(1, 0)])
    rollout_source.publish({}, 1)
    rollout_source.close()
    assert calls == ["publish 1", "flush"]
    assert rollout_source.metrics() == rollout_source.counts == {}
