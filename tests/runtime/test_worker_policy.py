# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""A worker's policy while the trainer publishes: which versions its tokens are of."""

import functools
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import pytest

from marin_rl.closing import Closing
from marin_rl.config.command_line import parse_config
from marin_rl.config.train_config import TrainConfig, levanter_defaults
from marin_rl.environments.base import Split
from marin_rl.learner.policy_model import initialize_policy
from marin_rl.rollouts.request_batcher import RequestBatcher
from marin_rl.rollouts.scheduler import GroupRequest, RequestNumber, oldest_version
from marin_rl.runtime.coordinator import Announcement
from marin_rl.runtime.devices import start_devices
from marin_rl.runtime.rollout_source import FinishedGroup
from marin_rl.runtime.worker_policy import ReceivedPolicy
from marin_rl.types import Generation, RolloutGroup, WeightVersion
from marin_rl.weights.errors import ServerLostError
from marin_rl.weights.protocol import WeightSender
from marin_rl.weights.snapshot import TrainingHost
from tests.free_port import free_port
from tests.runtime.inline_executor import InlineExecutor
from tests.tiny_run import make_run

GROUPS, ROLLOUTS = 2, 4
TOKEN = "t" * 32


class Trainer:
    """Publishes weights from within the worker's own questions, so that they come at known moments."""

    def __init__(self, config: TrainConfig) -> None:
        self._trainer = start_devices(config.trainer_config(), rows_per_device=config.rollouts.rows_per_device)
        self._config = config
        self._tokenizer = config.tokenizer.build()
        self.sender: WeightSender = config.weights.open_sender(TOKEN, TrainingHost.current())
        self.version: WeightVersion = -1
        self.questions = 0
        self.at: dict[int, Callable[[], None]] = {}

    def publish(self) -> None:
        self.version += 1
        assert self._config.model is not None
        model = initialize_policy(
            self._config.model, self._tokenizer, self._trainer, key=jax.random.PRNGKey(self.version)
        )
        self.sender.publish(model, self.version)
        # As a trainer announces: when they can be had.
        self.sender.flush()

    def announced(self) -> Announcement:
        self.questions += 1
        self.at.get(self.questions, lambda: None)()
        return Announcement(self.version, (self.sender.address,))


@pytest.fixture(autouse=True)
def known_moments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("marin_rl.runtime.weight_prefetcher.ThreadPoolExecutor", InlineExecutor)
    # All answers are sampled in one round, however slow the machine is.
    desk = functools.partial(RequestBatcher, max_wait=600.0)
    monkeypatch.setattr("marin_rl.rollouts.run_rollouts.RequestBatcher", desk)


def make_config(folder: Path, refresh: str) -> TrainConfig:
    run = make_run(
        folder,
        mode="async",
        weights={"type": "arrow_flight", "retry": {"give_up_seconds": 0.0}},
        workers={"refresh": refresh, "decode_steps_per_weight_poll": 1},
        sampling={"max_new_tokens": 6, "max_seqs": GROUPS * ROLLOUTS},
    )
    return parse_config(TrainConfig, run.argv, levanter_defaults(), {}).config


@pytest.fixture
def opened(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[tuple[Trainer, ReceivedPolicy]]:
    config = make_config(tmp_path, getattr(request, "param", "in_flight"))
    trainer = Trainer(config)
    vocab_size = len(config.tokenizer.build().tokenizer)
    policy = ReceivedPolicy(config, vocab_size, TOKEN, trainer.announced)
    trainer.publish()
    policy.fetch([trainer.sender.address])
    yield trainer, policy
    policy.close()
    trainer.sender.close()


def play(policy: ReceivedPolicy) -> list[RolloutGroup]:
    tasks = policy._environment.tasks(Split.TRAIN)
    orders = [GroupRequest(RequestNumber(1, index), tasks[index], 0) for index in range(GROUPS)]
    came: dict[RequestNumber, RolloutGroup] = {}

    def on_group_done(played: FinishedGroup) -> tuple[GroupRequest, ...]:
        came[played.number] = played.group
        return ()

    policy.play(orders, on_group_done)
    return [came[order.number] for order in orders]


def generations(groups: list[RolloutGroup]) -> list[Generation]:
    return [turn.generation for group in groups for rollout in group.rollouts for turn in rollout.turns]


def test_weights_that_come_while_it_plays_sample_the_tokens_after_them(
    opened: tuple[Trainer, ReceivedPolicy],
) -> None:
    trainer, policy = opened
    before = generations(play(policy))
    assert {(one.first_version, one.last_version) for one in before} == {(0, 0)}
    # Look 1 is before the prompts are read, looks 2, 3, ... after 1, 2, ... tokens. A question is asked at a look and
    # answered at the next; the first of this call finds the answer to the last of the call before.
    trainer.questions, trainer.at = 0, {2: trainer.publish}
    groups = play(policy)
    for old, new in zip(before, generations(groups), strict=True):
        assert new.token_ids[:2] == old.token_ids[:2]
        assert new.logprobs[:2] == old.logprobs[:2]
        assert (new.first_version, new.last_version) == (0, int(len(new.token_ids) > 2))
    assert {one.last_version for one in generations(groups)} >= {1}
    assert [oldest_version(group) for group in groups] == [0, 0]
    assert policy.version == 1


@pytest.mark.parametrize("opened", ["between_groups"], indirect=True)
def test_between_groups_nobody_is_asked_while_it_plays(opened: tuple[Trainer, ReceivedPolicy]) -> None:
    trainer, policy = opened
    trainer.publish()
    assert {(one.first_version, one.last_version) for one in generations(play(policy))} == {(0, 0)}
    assert trainer.questions == 0
    policy.fetch([trainer.sender.address])
    assert {(one.first_version, one.last_version) for one in generations(play(policy))} == {(1, 1)}


@pytest.mark.parametrize("opened", ["between_groups"], indirect=True)
def test_a_worker_that_is_cut_off_keeps_its_weights_and_one_that_never_had_any_ends(
    opened: tuple[Trainer, ReceivedPolicy], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer, policy = opened
    nobody = f"grpc+tls://127.0.0.1:{free_port()}"
    assert not policy.fetch([nobody])
    assert policy.version == 0
    assert "newer weights did not arrive" in caplog.text
    trainer.publish()
    assert policy.fetch([trainer.sender.address])
    assert policy.version == 1
    fresh = ReceivedPolicy(policy._config, len(policy._tokenizer.tokenizer), TOKEN, trainer.announced)
    with Closing(fresh.close), pytest.raises(ServerLostError, match=re.escape(nobody)):
        fresh.fetch([nobody])


def test_weights_that_do_not_arrive_change_nothing(
    opened: tuple[Trainer, ReceivedPolicy], caplog: pytest.LogCaptureFixture
) -> None:
    trainer, policy = opened
    before = generations(play(policy))

    def lose_the_server() -> None:
        trainer.publish()
        trainer.sender.close()

    trainer.questions, trainer.at = 0, {2: lose_the_server}
    assert generations(play(policy)) == before
    assert policy.version == 0
    assert trainer.questions > 2, "it asks again"
    assert "newer weights did not arrive (weight server grpc" in caplog.text
