# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""The rollout source is opened according to the config, and its parts are closed in a safe order."""

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from marin_rl import multihost
from marin_rl.config.input_files import Inputs
from marin_rl.config.sections import Mode, ReplayConfig
from marin_rl.config.train_config import TrainConfig
from marin_rl.config.workers_config import WorkersConfig
from marin_rl.distributed import open_worker_pool as module
from marin_rl.distributed.coordinator import Coordinator
from marin_rl.distributed.coordinator_client import CoordinatorClient
from marin_rl.distributed.open_rollout_source import (
    make_history,
    make_replay_buffer,
    make_staleness_limits,
    open_rollout_source,
)
from marin_rl.distributed.rollout_source import LocalRollouts
from marin_rl.distributed.scheduler import RequestNumber, StalenessLimits
from marin_rl.distributed.worker_pool import WorkerPool
from marin_rl.environments.arithmetic import ArithmeticConfig
from marin_rl.objectives.importance import MaskMismatchConfig
from marin_rl.rollouts.filters import KeepGroupsConfig, ResampleGroupsConfig
from marin_rl.types import WeightVersion
from marin_rl.weights.config import WeightTransferConfig
from marin_rl.weights.fetch import WeightReceiver
from marin_rl.weights.protocol import WeightSender
from marin_rl.weights.publish import TrainingHost
from tests.distributed.local_client import LocalClient
from tests.rollouts.rollout_cases import group_of
from tests.training.bare_run import make_config, make_runner

REPLAY = ReplayConfig(max_staleness=2, max_uses=3)
RESAMPLE = ResampleGroupsConfig(max_batches=3)


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

    def open_sender(self, token: str, training_host: TrainingHost) -> WeightSender:
        self.said.append("sender opens")
        return End("sender", self.said, is_lost=self.is_lost)

    def open_receiver(self, addresses: Sequence[str], token: str) -> WeightReceiver:
        if not self.reaches_others:
            raise OSError(f"nobody answers at {addresses[-1]}")
        self.said.append(f"receiver of {' and '.join(addresses)} opens")
        return End("receiver", self.said)


def workers_of(said: list[str], fail: bool = False) -> Any:
    """Fake of `ray_workers`."""

    @contextlib.contextmanager
    def workers(config: TrainConfig, inputs: Inputs, vocab_size: int, token: str) -> Iterator[CoordinatorClient]:
        if fail:
            raise OSError("no workers to be had")
        said.append(f"workers of a model of {vocab_size} tokens begin")
        try:
            yield LocalClient(Coordinator(60.0))
        finally:
            said.append("workers end")

    return workers


def open_it(config: TrainConfig, opened: contextlib.ExitStack) -> Any:
    environment = ArithmeticConfig(digits=1, size=50).build()
    runner = make_runner(config, {}, environment)
    return open_rollout_source(config, {}, runner, 264, {"lost": 3}, opened)


def asynchronous(weights: Weights) -> TrainConfig:
    return make_config(mode=Mode.ASYNC, weights=weights, workers=WorkersConfig(no_progress_timeout=600.0))


def two_hosts(patched: pytest.MonkeyPatch, *, main: bool) -> None:
    patched.setattr(multihost, "gather_texts", lambda text: (text, "there"))
    patched.setattr(multihost, "is_main", lambda: main)


def test_sync_mode_starts_no_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = Weights()
    monkeypatch.setattr(module, "ray_workers", workers_of(weights.said))
    with contextlib.ExitStack() as opened:
        assert isinstance(open_it(make_config(weights=weights), opened), LocalRollouts)
    assert weights.said == []


def test_workers_stop_before_the_weight_server(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = Weights()
    monkeypatch.setattr(module, "ray_workers", workers_of(weights.said))
    with contextlib.ExitStack() as opened:
        rollout_source = open_it(asynchronous(weights), opened)
        assert isinstance(rollout_source, WorkerPool)
        assert rollout_source.counts == {"lost": 3}
        rollout_source.publish({}, 7)
    # Publications are announced before anything is closed.
    assert weights.said == [
        "sender opens",
        "workers of a model of 264 tokens begin",
        "version 7 is there",
        "workers end",
        "sender closes",
    ]


def test_error_of_last_announcement_is_raised_at_close(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = Weights(is_lost=True)
    monkeypatch.setattr(module, "ray_workers", workers_of(weights.said))
    opened = contextlib.ExitStack()
    open_it(asynchronous(weights), opened).publish({}, 7)
    with pytest.raises(OSError, match="the network is down"):
        opened.close()
    assert weights.said[-2:] == ["workers end", "sender closes"]


def test_weight_server_stops_when_workers_fail_to_start(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = Weights()
    monkeypatch.setattr(module, "ray_workers", workers_of(weights.said, fail=True))
    with pytest.raises(OSError, match="no workers to be had"), contextlib.ExitStack() as opened:
        open_it(asynchronous(weights), opened)
    assert weights.said == ["sender opens", "sender closes"]


def test_main_process_uses_senders_of_all_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = Weights()
    two_hosts(monkeypatch, main=True)
    monkeypatch.setattr(module, "ray_workers", workers_of(weights.said))
    with contextlib.ExitStack() as opened:
        assert isinstance(open_it(asynchronous(weights), opened), WorkerPool)
    assert weights.said == [
        "sender opens",
        "receiver of here and there opens",
        "workers of a model of 264 tokens begin",
        "workers end",
        "sender closes",
    ]


def test_other_processes_publish_and_have_no_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = Weights(reaches_others=False)
    two_hosts(monkeypatch, main=False)
    monkeypatch.setattr(multihost, "on_main", lambda work: "the main one's")
    monkeypatch.setattr(module, "ray_workers", workers_of(weights.said))
    with contextlib.ExitStack() as opened:
        rollout_source = open_it(asynchronous(weights), opened)
        assert isinstance(rollout_source, WorkerPool)
        assert rollout_source.metrics() == {}
    assert weights.said == ["sender opens", "sender closes"]


def test_server_stops_when_other_processes_are_unreachable(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = Weights(reaches_others=False)
    two_hosts(monkeypatch, main=True)
    with pytest.raises(OSError, match="nobody answers at there"), contextlib.ExitStack() as opened:
        open_it(asynchronous(weights), opened)
    assert weights.said == ["sender opens", "sender closes"]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"mode": Mode.SYNC}, StalenessLimits(4)),
        ({"mode": Mode.SYNC, "filter": RESAMPLE}, StalenessLimits(4, replacements_per_step=8)),
        ({"mode": Mode.ASYNC}, StalenessLimits(4, 2, 3, 0, last_step=make_config().num_steps)),
        ({"mode": Mode.ASYNC, "filter": RESAMPLE}, StalenessLimits(4, 2, 3, 8, last_step=make_config().num_steps)),
    ],
)
def test_sampling_runs_ahead_only_in_async_mode(changes: dict[str, Any], expected: StalenessLimits) -> None:
    assert make_staleness_limits(make_config(**{"filter": KeepGroupsConfig(), "replay": REPLAY, **changes})) == expected


@pytest.mark.parametrize(("mode", "uses", "ages"), [(Mode.SYNC, 1, []), (Mode.ASYNC, 3, [2])])
def test_groups_wait_only_in_async_mode(mode: Mode, uses: int, ages: list[int]) -> None:
    replay = make_replay_buffer(make_config(mode=mode, replay=REPLAY))
    replay.add(RequestNumber(4, 0), group_of("train-4-0", 1.0, 0.0))  # sampled from weights of version 3
    assert replay.uses_left == uses
    replay.expire(5)
    assert replay.ages(5) == ages


@pytest.mark.parametrize(
    ("mode", "is_asked_for", "keeps"), [(Mode.SYNC, True, False), (Mode.ASYNC, True, True), (Mode.ASYNC, False, False)]
)
def test_old_weights_are_kept_only_in_async_mode(mode: Mode, is_asked_for: bool, keeps: bool) -> None:
    replay = dataclasses.replace(REPLAY, keep_sampling_weights=is_asked_for)
    config = make_config(mode=mode, replay=replay, off_policy_correction=MaskMismatchConfig())
    assert (make_history(config) is not None) == keeps
