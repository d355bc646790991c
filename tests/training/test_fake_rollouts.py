# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import dataclasses
import math

import pytest

from marin_rl.learner.critic import CriticConfig
from marin_rl.objectives.gae import GaeConfig
from marin_rl.objectives.kl import LossKlConfig
from marin_rl.runs.run_directory import CheckpointError, RunDirectory
from marin_rl.training.fake_rollouts import FakeShape, make_groups, parse_shape, train_on_fake
from tests.tiny_run import TinyRun, contents
from tests.training.bare_run import make_config
from tests.training.reopened_run import config_of


def test_shapes_are_parsed():
    config = make_config()
    assert parse_shape("prompt=8,completion=2-16", config.rollouts) == FakeShape(4, 4, (8, 8), (2, 16), 4)
    full = parse_shape("groups=1,group_size=2,prompt=1-3,completion=5,steps=6", config.rollouts)
    assert full == FakeShape(1, 2, (1, 3), (5, 5), 6)
    assert full.longest == 8


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "'' is repeated or unknown; write groups=16"),
        ("prompt=8", "has no completion; add completion=32"),
        ("groups=2", "has no prompt and no completion"),
        ("prompt=8,completion=8,length=3", "'length' is repeated or unknown"),
        ("prompt=8,prompt=9,completion=8", "'prompt' is repeated or unknown"),
        ("prompt=0,completion=8", "prompt is '0'; it must be a number or a range such as 16-64, at least 1"),
        ("prompt=9-8,completion=8", "prompt is '9-8'"),
        ("prompt=8,completion=x", "completion is 'x'"),
        ("prompt=8,completion=-8", "completion is '-8'"),
        ("prompt=8,completion=8,groups=2-3", "groups is '2-3'; it must be a number, at least 1"),
        (
            "prompt=33,completion=8-32",
            "rollouts of 65 tokens exceed rollouts.max_length, 64; add --rollouts.max_length",
        ),
    ],
)
def test_invalid_shapes_are_named(text: str, problem: str):
    with pytest.raises(ValueError, match=problem):
        parse_shape(text, make_config().rollouts)


def test_groups_have_the_given_sizes():
    groups = make_groups(FakeShape(3, 2, (4, 6), (1, 9), 1), 50, 0, 7)
    assert [len(group.rollouts) for group in groups] == [2, 2, 2]
    assert groups == make_groups(FakeShape(3, 2, (4, 6), (1, 9), 1), 50, 0, 7)
    for group in groups:
        [prompt] = {rollout.turns[0].observation_tokens for rollout in group.rollouts}
        assert 4 <= len(prompt) <= 6
        for rollout in group.rollouts:
            [turn] = rollout.turns
            assert 1 <= len(turn.generation.token_ids) <= 9
            assert {0 <= token < 50 for token in (*prompt, *turn.generation.token_ids)} == {True}
            assert turn.generation.first_version == 7


SHAPE = FakeShape(2, 4, (3, 3), (2, 6), 1)


def test_training_of_a_run_on_synthetic_rollouts(finished_run: TinyRun):
    before = contents(finished_run.path)
    config, directory = config_of(finished_run), RunDirectory(finished_run.path)
    fake = train_on_fake(config, SHAPE, directory)
    assert fake.rollouts == 8
    assert 8 * 5 <= fake.tokens <= 8 * 9
    # Log-probs are those of the policy.
    assert fake.median["val/ratio"] == pytest.approx(1.0, abs=1e-5)
    assert fake.median["grad_norm"] > 0
    assert fake.median["lr"] == pytest.approx(config.optimizer.learning_rate)
    assert fake.median["seconds/total"] == fake.first_step_seconds >= fake.median["seconds/step"] > 0
    assert fake.tokens_per_second == fake.tokens / fake.first_step_seconds
    assert fake.device_peak_bytes is None
    assert fake.host_peak_bytes > 2**20
    assert contents(finished_run.path) == before
    with pytest.raises(CheckpointError, match="has no checkpoint of step 9"):
        train_on_fake(config, SHAPE, directory, 9)


@pytest.mark.medium
def test_training_without_a_run(finished_run: TinyRun):
    config = config_of(finished_run)
    changes = {
        "run_dir": "runs/absent",
        "advantage": GaeConfig(),
        "critic": CriticConfig(),
        "kl": LossKlConfig(beta=0.1),
        "rollouts": dataclasses.replace(config.rollouts, prompts_per_step=9),
    }
    fake = train_on_fake(dataclasses.replace(config, **changes), dataclasses.replace(SHAPE, steps=3))
    assert fake.rollouts == 8
    assert all(map(math.isfinite, fake.median.values()))
    assert {"loss/value_avg", "loss/kl_avg", "critic/value_mean"} <= set(fake.median)
    # The weights change, the reference does not.
    assert fake.median["loss/kl_avg"] > 0
