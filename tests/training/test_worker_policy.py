# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Versions of the sampled tokens while the trainer publishes weights, and fetches in the background."""

import functools
import re
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import jax
import pytest

from marin_rl.config.command_line import parse_config
from marin_rl.config.train_config import TrainConfig
from marin_rl.distributed.coordinator import Announcement
from marin_rl.distributed.scheduler import GroupRequest, RequestNumber, oldest_version
from marin_rl.distributed.weight_manifest import (
    MismatchedWeightsError,
    VersionGoneError,
    WeightServerLostError,
    WrongSecretError,
)
from marin_rl.distributed.weight_sender import TrainingHost, open_sender
from marin_rl.environments.base import Split
from marin_rl.learner.policy_model import initialize_policy
from marin_rl.rollouts.request_batcher import RequestBatcher
from marin_rl.training.worker import WeightPrefetcher, Weights, WorkerPolicy
from marin_rl.types import Generation, RolloutGroup, WeightVersion
from marin_rl.utils.devices.setup import start_devices
from marin_rl.utils.errors import Closing
from tests.distributed.inline_executor import InlineExecutor
from tests.free_port import free_port
from tests.tiny_run import make_run

GROUPS, ROLLOUTS = 2, 4
TOKEN = "t" * 32


class Trainer:
    """Publishes weights during the worker's polls, so that their arrival is deterministic."""

    def __init__(self, config: TrainConfig) -> None:
        self._trainer = start_devices(config.trainer, rows_per_device=config.rollouts.sizes.rows_per_device)
        self.config = config
        self.tokenizer = config.tokenizer.build()
        self.vocab_size = len(self.tokenizer.tokenizer)
        self.sender = open_sender(config.weights, TOKEN, TrainingHost.current())
        self.version: WeightVersion = -1
        self.polls = 0
        self.at: dict[int, Callable[[], None]] = {}

    def publish(self) -> None:
        self.version += 1
        assert self.config.model is not None
        model = initialize_policy(
            self.config.model, self.tokenizer, self._trainer, key=jax.random.PRNGKey(self.version)
        )
        self.sender.publish(model, self.version)
        # Announced when available, as by a trainer.
        self.sender.flush()

    def announced(self) -> Announcement:
        self.polls += 1
        self.at.get(self.polls, lambda: None)()
        return Announcement(self.version, (self.sender.address,))


@pytest.fixture(autouse=True)
def known_moments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("marin_rl.training.worker.ThreadPoolExecutor", InlineExecutor)
    # All generations are sampled in one round, independent of the speed of the machine.
    client = functools.partial(RequestBatcher, max_wait=600.0)
    monkeypatch.setattr("marin_rl.rollouts.run_rollouts.RequestBatcher", client)


def make_config(folder: Path, refresh: str) -> TrainConfig:
    run = make_run(
        folder,
        mode="async",
        weights={"retry": {"give_up_seconds": 0.0}},
        workers={"refresh": refresh, "decode_steps_per_weight_poll": 1},
        sampling={"max_new_tokens": 6, "max_seqs": GROUPS * ROLLOUTS},
    )
    return parse_config(TrainConfig, run.argv).config


@pytest.fixture
def opened(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[tuple[Trainer, WorkerPolicy]]:
    config = make_config(tmp_path, getattr(request, "param", "in_flight"))
    trainer = Trainer(config)
    policy = WorkerPolicy(config, trainer.vocab_size, "", TOKEN, trainer.announced)
    trainer.publish()
    policy.fetch([trainer.sender.address])
    yield trainer, policy
    policy.close()
    trainer.sender.close()


def run_groups(trainer: Trainer, policy: WorkerPolicy) -> list[RolloutGroup]:
    tasks = trainer.config.environment.build().tasks(Split.TRAIN)
    requests = [GroupRequest(RequestNumber(1, index), tasks[index], 0) for index in range(GROUPS)]
    received: dict[str, RolloutGroup] = {}

    def on_group_done(group: RolloutGroup) -> tuple[GroupRequest, ...]:
        received[group.id] = group
        return ()

    policy.run(requests, on_group_done)
    return [received[request.number.group_id] for request in requests]


def generations(groups: list[RolloutGroup]) -> list[Generation]:
    return [turn.generation for group in groups for rollout in group.rollouts for turn in rollout.turns]


@pytest.mark.medium
def test_in_flight_weights_sample_the_following_tokens(
    opened: tuple[Trainer, WorkerPolicy],
) -> None:
    trainer, policy = opened
    before = generations(run_groups(trainer, policy))
    assert {(one.first_version, one.last_version) for one in before} == {(0, 0)}
    # Poll 1 precedes the prefill, polls 2, 3, ... follow tokens 1, 2, .... A poll starts a fetch and the next poll
    # returns its result; the first poll of this call returns the result of the last poll of the previous call.
    trainer.polls, trainer.at = 0, {2: trainer.publish}
    groups = run_groups(trainer, policy)
    for old, new in zip(before, generations(groups), strict=True):
        assert new.token_ids[:2] == old.token_ids[:2]
        assert new.logprobs[:2] == old.logprobs[:2]
        assert (new.first_version, new.last_version) == (0, int(len(new.token_ids) > 2))
    assert {one.last_version for one in generations(groups)} >= {1}
    assert [oldest_version(group) for group in groups] == [0, 0]
    assert policy.version == 1


@pytest.mark.medium
@pytest.mark.parametrize("opened", ["between_groups"], indirect=True)
def test_between_groups_no_weights_are_fetched_during_rollouts(opened: tuple[Trainer, WorkerPolicy]) -> None:
    trainer, policy = opened
    trainer.publish()
    assert {(one.first_version, one.last_version) for one in generations(run_groups(trainer, policy))} == {(0, 0)}
    assert trainer.polls == 0
    policy.fetch([trainer.sender.address])
    assert {(one.first_version, one.last_version) for one in generations(run_groups(trainer, policy))} == {(1, 1)}


@pytest.mark.parametrize("opened", ["between_groups"], indirect=True)
def test_failed_fetch_keeps_weights_and_fails_without_any(
    opened: tuple[Trainer, WorkerPolicy], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer, policy = opened
    nobody = f"grpc+tls://127.0.0.1:{free_port()}"
    assert not policy.fetch([nobody])
    assert policy.version == 0
    assert "newer weights did not arrive" in caplog.text
    trainer.publish()
    assert policy.fetch([trainer.sender.address])
    assert policy.version == 1
    fresh = WorkerPolicy(trainer.config, trainer.vocab_size, "", TOKEN, trainer.announced)
    with Closing(fresh.close), pytest.raises(WeightServerLostError, match=re.escape(nobody)):
        fresh.fetch([nobody])


def weights(version: WeightVersion) -> Weights:
    return Weights(cast(Any, SimpleNamespace()), version)


class Source:
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


def test_poll_returns_last_result_and_fetches_newer_weights() -> None:
    source = Source()
    prefetcher = WeightPrefetcher(source.fetch)
    in_use, found = 0, []
    for newest in (0, 3, 3, 3, 4):
        source.newest = newest
        received = prefetcher.poll(in_use)
        in_use = in_use if received is None else received.version
        found.append(in_use)
    assert found == [0, 0, 3, 3, 3]
    assert source.asked == [0, 0, 3, 3, 3]
    settled = prefetcher.complete()
    assert settled is not None
    assert settled.version == 4
    assert prefetcher.complete() is None
    prefetcher.close()


def test_poll_does_not_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("marin_rl.training.worker.ThreadPoolExecutor", ThreadPoolExecutor)
    arrived = threading.Event()
    asked = []

    def slow(version: WeightVersion | None) -> Weights:
        asked.append(version)
        assert arrived.wait(60)
        return weights(1)

    prefetcher = WeightPrefetcher(slow)
    # If one of these calls blocked, it would wait until the thread times out.
    assert [prefetcher.poll(0) for _ in range(3)] == [None] * 3
    arrived.set()
    received = prefetcher.complete()
    assert received is not None
    assert received.version == 1
    prefetcher.close()
    assert asked == [0]


@pytest.mark.parametrize("error", [WeightServerLostError, VersionGoneError])
def test_transient_error_is_logged_and_retried(error: type[Exception], caplog: pytest.LogCaptureFixture) -> None:
    source = Source()
    source.newest, source.error = 2, error("the server at here is gone")
    prefetcher = WeightPrefetcher(source.fetch)
    assert [prefetcher.poll(0), prefetcher.poll(0)] == [None, None]
    assert "newer weights did not arrive (the server at here is gone); continuing" in caplog.text
    source.error = None
    assert prefetcher.poll(0) is None
    received = prefetcher.poll(0)
    assert received is not None
    assert received.version == 2


@pytest.mark.parametrize("error", [MismatchedWeightsError, WrongSecretError])
def test_permanent_error_is_raised_by_next_poll(error: type[Exception]) -> None:
    source = Source()
    source.error = error("for good")
    prefetcher = WeightPrefetcher(source.fetch)
    prefetcher.poll(0)
    with pytest.raises(error, match="for good"):
        prefetcher.poll(0)
