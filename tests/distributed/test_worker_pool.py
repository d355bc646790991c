# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Calls of the worker pool to the coordinator; test_staleness.py simulates complete runs."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from marin_rl.config.workers_config import WeightTransferConfig
from marin_rl.distributed import worker_pool
from marin_rl.distributed.coordinator import TrainerUpdate
from marin_rl.distributed.coordinator_client import CoordinatorClient
from marin_rl.distributed.scheduler import GroupRequest, RequestNumber
from marin_rl.distributed.weight_sender import TrainingHost
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


def test_weights_are_announced_after_flush(client: Client, sender: Sender, calls: list[str]) -> None:
    rollout_source = make_pool(client, sender, addresses=["here", "there"])
    rollout_source.submit([])
    rollout_source.publish({}, 0)
    rollout_source.publish({}, 1)
    rollout_source.close()
    assert calls == ["publish 0", "flush", "announce 0 at here there", "publish 1", "flush", "announce 1 at here there"]


def network_is_down() -> None:
    raise OSError("the network is down")


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


def test_counts_persist_over_restarts_and_shares_are_per_interval(client: Client, sender: Sender) -> None:
    rollout_source = make_pool(client, sender, counts={"joined": 4})

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

    assert rollout_source.metrics() == {"workers/alive": 0.0, "workers/busy_share": 0.0, "workers/joined": 4.0}
    expected = {"workers/alive": 2.0, "workers/busy_share": 0.5, "workers/joined": 6.0}
    assert after(8.0, 4.0, 2, "one") == expected
    assert after(18.0, 5.0, 3, "one") == {**expected, "workers/busy_share": 0.1, "workers/joined": 7.0}
    # A restarted coordinator counts from 0.
    assert after(4.0, 3.0, 2, "two") == {**expected, "workers/busy_share": 0.75, "workers/joined": 9.0}
    assert after(4.0, 3.0, 2, "two") == {**expected, "workers/busy_share": 0.0, "workers/joined": 9.0}


@pytest.mark.parametrize("is_reported", [True, False])
def test_worker_error_is_raised_after_finished_groups_although_others_finish(
    rollout_source: WorkerPool, client: Client, is_reported: bool
) -> None:
    """A worker that fails to start cannot report its error; that of a worker which reports one takes precedence."""
    rollout_source.submit([request(1, 0), request(1, 1)])
    client.failure = "worker-0: ended" if is_reported else "worker-0: KeyError: no"
    reported = "worker-0: KeyError: no" if is_reported else None
    client.responses = [with_groups((1, 0), failure=reported), with_groups((1, 1))]
    assert wait(rollout_source) == [((1, 0), "train-1-0")]
    with pytest.raises(WorkerFailedError, match=r"worker ended with an error: worker-0: KeyError: no\. .*traceback"):
        wait(rollout_source)


def test_timeout_error_lists_pending_groups_and_remedy(
    client: Client, sender: Sender, calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    rollout_source = make_pool(client, sender, no_progress_timeout=1.5)
    rollout_source.submit([request(2, index) for index in reversed(range(7))])
    calls.clear()
    monkeypatch.setattr(worker_pool, "time", SimpleNamespace(monotonic=iter((0.0, 1.6)).__next__))
    message = r"in 1\.5 s \(workers\.no_progress_timeout\); 7 are pending \(train-2-0, .*and there are 0 workers"
    with pytest.raises(NoWorkersError, match=message):
        rollout_source.wait(PhaseTimer())
    assert calls == []


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
    monkeypatch.setattr("concurrent.futures.ThreadPoolExecutor", InlineExecutor)
    monkeypatch.setattr(multihost, "on_main", lambda work: join_parts([b"[]"]))
    sender.when_flushed = network_is_down
    other, stops = make_pool(None, sender, counts={"lost": 3}), iter((False, True))
    assert other.metrics() == other.counts == {}
    other.publish({}, 0)
    with pytest.raises(OSError, match="the network is down"):
        {"wait": lambda: other.wait(PhaseTimer(), lambda: next(stops)), "flush": other.flush}[method]()


# Opening and closing.


def open_pool(
    calls: list[str], monkeypatch: pytest.MonkeyPatch, opened: contextlib.ExitStack, **faults: Any
) -> WorkerPool:
    """Open a pool whose parts record their calls; each fault is raised by the part of its name."""

    def raise_fault(name: str) -> None:
        if name in faults:
            raise faults[name]

    def open_sender(config: WeightTransferConfig, secret: str, host: TrainingHost) -> Sender:
        calls.append("open sender")
        return Sender(calls, when_flushed=lambda: raise_fault("flush"))

    def open_receiver(config: WeightTransferConfig, addresses: Sequence[str], secret: str) -> Any:
        raise_fault("receiver")
        calls.append(f"open receiver of {' '.join(addresses)}")

    @contextlib.contextmanager
    def workers(secret: str) -> Iterator[CoordinatorClient]:
        raise_fault("workers")
        calls.append("start workers")
        yield Client(calls)
        calls.append("stop workers")

    monkeypatch.setattr(worker_pool, "open_sender", open_sender)
    monkeypatch.setattr(worker_pool, "open_receiver", open_receiver)
    return worker_pool.open_worker_pool(
        WeightTransferConfig(), workers, counts={"lost": 3}, no_progress_timeout=600.0, opened=opened
    )


def test_last_weights_are_announced_and_workers_stop_before_the_weight_server(
    calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with contextlib.ExitStack() as opened:
        pool = open_pool(calls, monkeypatch, opened)
        assert pool.counts == {"lost": 3}
        pool.publish({}, 7)
    assert calls == [
        "open sender",
        "start workers",
        "publish 7",
        "flush",
        "announce 7 at here",
        "stop workers",
        "close",
    ]


def test_error_of_last_announcement_is_raised_at_close(calls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    opened = contextlib.ExitStack()
    open_pool(calls, monkeypatch, opened, flush=OSError("the network is down")).publish({}, 7)
    with pytest.raises(OSError, match="the network is down"):
        opened.close()
    assert calls[-1] == "close"


@pytest.mark.parametrize("part", ["workers", "receiver"])
def test_weight_server_stops_when_another_part_fails_to_start(
    calls: list[str], monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    monkeypatch.setattr(multihost, "gather_texts", lambda text: (text, "there"))
    with pytest.raises(OSError, match="no answer"), contextlib.ExitStack() as opened:
        open_pool(calls, monkeypatch, opened, **{part: OSError("no answer")})
    assert calls == ["open sender", *(["open receiver of here there"] if part == "workers" else []), "close"]


def test_other_processes_have_no_workers(calls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(multihost, "gather_texts", lambda text: (text, "there"))
    monkeypatch.setattr(multihost, "is_main", lambda: False)
    monkeypatch.setattr(multihost, "on_main", lambda work: "the secret of the main process")
    with contextlib.ExitStack() as opened:
        open_pool(calls, monkeypatch, opened)
    assert calls == ["open sender", "close"]
