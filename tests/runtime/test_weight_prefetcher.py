# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import threading
from types import SimpleNamespace
from typing import Any, cast

import pytest

from marin_rl.runtime.weight_prefetcher import WeightPrefetcher, Weights
from marin_rl.types import WeightVersion
from marin_rl.weights.errors import (
    CorruptTransferError,
    MismatchedWeightsError,
    NoWeightsError,
    ServerLostError,
    VersionGoneError,
    WrongSecretError,
)
from tests.runtime.inline_executor import InlineExecutor


def weights(version: WeightVersion) -> Weights:
    return Weights(cast(Any, SimpleNamespace()), version)


class Trainer:
    """Offers weights, and keeps what it was asked."""

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
    monkeypatch.setattr("marin_rl.runtime.weight_prefetcher.ThreadPoolExecutor", InlineExecutor)


@pytest.mark.usefixtures("inline")
def test_each_look_brings_the_answer_to_the_one_before_and_asks_for_what_is_newer_still() -> None:
    trainer = Trainer()
    newer = WeightPrefetcher(trainer.fetch)
    in_use, found = 0, []
    for newest in (0, 3, 3, 3, 4):
        trainer.newest = newest
        came = newer.look(in_use)
        in_use = in_use if came is None else came.version
        found.append(in_use)
    assert found == [0, 0, 3, 3, 3]
    assert trainer.asked == [0, 0, 3, 3, 3]
    settled = newer.complete()
    assert settled is not None
    assert settled.version == 4
    assert newer.complete() is None
    newer.close()


def test_a_look_does_not_wait_for_weights_that_are_on_their_way() -> None:
    arrived = threading.Event()
    asked = []

    def slow(version: WeightVersion | None) -> Weights:
        asked.append(version)
        assert arrived.wait(60)
        return weights(1)

    newer = WeightPrefetcher(slow)
    # Were one of these to wait, it would do so until the thread gives up.
    assert [newer.look(0) for _ in range(3)] == [None] * 3
    arrived.set()
    came = newer.complete()
    assert came is not None
    assert came.version == 1
    newer.close()
    assert asked == [0]


@pytest.mark.usefixtures("inline")
@pytest.mark.parametrize("error", [ServerLostError, CorruptTransferError, NoWeightsError, VersionGoneError])
def test_what_another_attempt_may_mend_is_logged_and_asked_again(
    error: type[Exception], caplog: pytest.LogCaptureFixture
) -> None:
    trainer = Trainer()
    trainer.newest, trainer.error = 2, error("the server at here is gone")
    newer = WeightPrefetcher(trainer.fetch)
    assert [newer.look(0), newer.look(0)] == [None, None]
    assert "newer weights did not arrive (the server at here is gone); playing on" in caplog.text
    trainer.error = None
    assert newer.look(0) is None
    came = newer.look(0)
    assert came is not None
    assert came.version == 2


@pytest.mark.usefixtures("inline")
@pytest.mark.parametrize("error", [MismatchedWeightsError, WrongSecretError, KeyError])
def test_what_no_attempt_mends_is_raised_by_the_next_look(error: type[Exception]) -> None:
    trainer = Trainer()
    trainer.error = error("for good")
    newer = WeightPrefetcher(trainer.fetch)
    newer.look(0)
    with pytest.raises(error, match="for good"):
        newer.look(0)
