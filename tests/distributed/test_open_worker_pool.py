# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""The parts of a worker pool are opened on every host, and closed in a safe order."""

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from marin_rl.config.weights_config import WeightTransferConfig
from marin_rl.distributed import worker_pool
from marin_rl.distributed.coordinator import Coordinator
from marin_rl.distributed.coordinator_client import CoordinatorClient
from marin_rl.distributed.weights.fetch import WeightReceiver
from marin_rl.distributed.weights.publish import TrainingHost, WeightSender
from marin_rl.distributed.worker_pool import WorkerPool, open_worker_pool
from marin_rl.types import WeightVersion
from marin_rl.utils import multihost
from tests.distributed.local_client import LocalClient


@dataclasses.dataclass
class End:
    """Fake sender or receiver of weights."""

    name: str
    said: list[str]
    address: str = "here"
    published: WeightVersion | None = None
    is_lost: bool = False

    def newest(self) -> WeightVersion | None:
        return self.published

    def receive(self, like: Any, version: WeightVersion | None = None) -> tuple[Any, WeightVersion]:
        raise AssertionError("nobody asks")

    def publish(self, weights: object, version: WeightVersion) -> None:
        self.published = version

    def flush(self) -> None:
        if self.is_lost:
            raise OSError("the network is down")
        self.said.append(f"version {self.published} is there")

    def close(self) -> None:
        self.said.append(f"{self.name} closes")


@dataclasses.dataclass(frozen=True)
class Weights(WeightTransferConfig):
    """Records opened and closed parts."""

    said: list[str] = dataclasses.field(default_factory=list)
    reaches_others: bool = True
    is_lost: bool = False

    def open_sender(self, secret: str, host: TrainingHost) -> WeightSender:
        self.said.append("sender opens")
        return End("sender", self.said, is_lost=self.is_lost)

    def open_receiver(self, addresses: Sequence[str], secret: str) -> WeightReceiver:
        if not self.reaches_others:
            raise OSError(f"nobody answers at {addresses[-1]}")
        self.said.append(f"receiver of {' and '.join(addresses)} opens")
        return End("receiver", self.said)


@pytest.fixture(autouse=True)
def _opened_by_the_config(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_pool, "open_sender", Weights.open_sender)
    monkeypatch.setattr(worker_pool, "open_receiver", Weights.open_receiver)


def workers_of(said: list[str], fail: bool = False) -> Any:
    """Fake of `ray_workers`."""

    @contextlib.contextmanager
    def workers(secret: str) -> Iterator[CoordinatorClient]:
        if fail:
            raise OSError("no workers to be had")
        said.append("workers begin")
        try:
            yield LocalClient(Coordinator(60.0))
        finally:
            said.append("workers end")

    return workers


def open_it(weights: Weights, opened: contextlib.ExitStack, *, fail: bool = False) -> WorkerPool:
    workers = workers_of(weights.said, fail)
    return open_worker_pool(weights, workers, counts={"lost": 3}, no_progress_timeout=600.0, opened=opened)


def two_hosts(patched: pytest.MonkeyPatch, *, main: bool) -> None:
    patched.setattr(multihost, "gather_texts", lambda text: (text, "there"))
    patched.setattr(multihost, "is_main", lambda: main)


def test_workers_stop_before_the_weight_server() -> None:
    weights = Weights()
    with contextlib.ExitStack() as opened:
        rollout_source = open_it(weights, opened)
        assert rollout_source.counts == {"lost": 3}
        rollout_source.publish({}, 7)
    # Publications are announced before anything is closed.
    assert weights.said == [
        "sender opens",
        "workers begin",
        "version 7 is there",
        "workers end",
        "sender closes",
    ]


def test_error_of_last_announcement_is_raised_at_close() -> None:
    weights = Weights(is_lost=True)
    opened = contextlib.ExitStack()
    open_it(weights, opened).publish({}, 7)
    with pytest.raises(OSError, match="the network is down"):
        opened.close()
    assert weights.said[-2:] == ["workers end", "sender closes"]


def test_weight_server_stops_when_workers_fail_to_start() -> None:
    weights = Weights()
    with pytest.raises(OSError, match="no workers to be had"), contextlib.ExitStack() as opened:
        open_it(weights, opened, fail=True)
    assert weights.said == ["sender opens", "sender closes"]


def test_main_process_uses_senders_of_all_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = Weights()
    two_hosts(monkeypatch, main=True)
    with contextlib.ExitStack() as opened:
        open_it(weights, opened)
    assert weights.said == [
        "sender opens",
        "receiver of here and there opens",
        "workers begin",
        "workers end",
        "sender closes",
    ]


def test_other_processes_publish_and_have_no_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = Weights(reaches_others=False)
    two_hosts(monkeypatch, main=False)
    monkeypatch.setattr(multihost, "on_main", lambda work: "the main one's")
    with contextlib.ExitStack() as opened:
        rollout_source = open_it(weights, opened)
        assert rollout_source.metrics() == {}
    assert weights.said == ["sender opens", "sender closes"]


def test_server_stops_when_other_processes_are_unreachable(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = Weights(reaches_others=False)
    two_hosts(monkeypatch, main=True)
    with pytest.raises(OSError, match="nobody answers at there"), contextlib.ExitStack() as opened:
        open_it(weights, opened)
    assert weights.said == ["sender opens", "sender closes"]
