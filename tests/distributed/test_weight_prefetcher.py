# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import threading
from types import SimpleNamespace
from typing import Any, cast

import pytest

from marin_rl.distributed.worker import WeightPrefetcher, Weights
from marin_rl.types import WeightVersion
from marin_rl.weights.protocol import (
    CorruptTransferError,
    MismatchedWeightsError,
    NoWeightsError,
    ServerLostError,
    VersionGoneError,
    WrongSecretError,
)
from tests.distributed.inline_executor import InlineExecutor


def weights(version: WeightVersion) -> Weights:
    return Weights(cast(Any, SimpleNamespace()), version)


class Trainer:
    """Fake source of weights that records calls."""

    def __init__(self) -> None:
        self.newest: WeightVersion = 0
        self.asked: list[WeightVersion | None] = []
        self.error: Exception | None = None

    def fetch(self, version: WeightVersion | None) -> Weights | None:
        self.asked.append(version)
        if self.error is not None:
            raise self.error
        return weights(self.newest) if version is None or self.newest > version else None


@pytest.fixture
def inline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("marin_rl.distributed.worker.ThreadPoolExecutor", InlineExecutor)


@pytest.mark.usefixtures("inline")
def test_poll_returns_last_result_and_fetches_newer_weights() -> None:
    trainer = Trainer()
    newer = WeightPrefetcher(trainer.fetch)
    in_use, found = 0, []
    for newest in (0, 3, 3, 3, 4):
        trainer.newest = newest
        received = newer.poll(in_use)
        in_use = in_use if received is None else received.version
        found.append(in_use)
    assert found == [0, 0, 3, 3, 3]
    assert trainer.asked == [0, 0, 3, 3, 3]
    settled = newer.complete()
    assert settled is not None
    assert settled.version == 4
    assert newer.complete() is None
    newer.close()


def test_poll_does_not_block() -> None:
    arrived = threading.Event()
    asked = []

    def slow(version: WeightVersion | None) -> Weights:
        asked.append(version)
        assert arrived.wait(60)
        return weights(1)

    newer = WeightPrefetcher(slow)
    # If one of these calls blocked, it would wait until the thread times out.
    assert [newer.poll(0) for _ in range(3)] == [None] * 3
    arrived.set()
    received = newer.complete()
    assert received is not None
    assert received.version == 1
    newer.close()
    assert asked == [0]


@pytest.mark.usefixtures("inline")
@pytest.mark.parametrize("error", [ServerLostError, CorruptTransferError, NoWeightsError, VersionGoneError])
def test_transient_error_is_logged_and_retried(error: type[Exception], caplog: pytest.LogCaptureFixture) -> None:
    trainer = Trainer()
    trainer.newest, trainer.error = 2, error("the server at here is gone")
    newer = WeightPrefetcher(trainer.fetch)
    assert [newer.poll(0), newer.poll(0)] == [None, None]
    assert "newer weights did not arrive (the server at here is gone); continuing" in caplog.text
    trainer.error = None
    assert newer.poll(0) is None
    received = newer.poll(0)
    assert received is not None
    assert received.version == 2


@pytest.mark.usefixtures("inline")
@pytest.mark.parametrize("error", [MismatchedWeightsError, WrongSecretError, KeyError])
def test_permanent_error_is_raised_by_next_poll(error: type[Exception]) -> None:
    trainer = Trainer()
    trainer.error = error("for good")
    newer = WeightPrefetcher(trainer.fetch)
    newer.poll(0)
    with pytest.raises(error, match="for good"):
        newer.poll(0)
