# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import dataclasses
from pathlib import Path

import pytest

from experiments.objectives import OBJECTIVES, objective, ppo
from experiments.rloo_controls import more_warm_start, random_reward
from experiments.rloo_in_code import rloo
from marin_rl.config.command_line import parse_config
from marin_rl.config.train_config import TrainConfig
from marin_rl.config.yaml_text import to_yaml
from marin_rl.environments import RandomRewardConfig

EXPERIMENTS = Path(__file__).parents[2] / "experiments"


def read(name: str) -> TrainConfig:
    return parse_config(TrainConfig, ["--config", str(EXPERIMENTS / name)]).config


@pytest.mark.parametrize("path", sorted(EXPERIMENTS.glob("*.yaml")), ids=lambda path: path.name)
def test_every_experiment_is_valid_and_has_its_own_run_directory(path):
    config = read(path.name)
    assert config.run_dir == f"runs/{path.stem}"


def test_experiment_in_code_equals_the_yaml_file():
    assert to_yaml(rloo()) == to_yaml(read("rloo.yaml"))


def test_ppo_in_code_equals_the_yaml_file():
    assert to_yaml(dataclasses.replace(ppo(rloo()), run_dir="runs/ppo")) == to_yaml(read("ppo.yaml"))


@pytest.mark.parametrize("name", OBJECTIVES)
def test_all_objectives_use_equal_samples_and_initial_weights(name, tmp_path):
    config, plain = objective(name, 1, tmp_path), rloo(1)
    assert config.rollouts.rollouts_per_step * config.num_steps == plain.rollouts.rollouts_per_step * plain.num_steps
    assert config.initialize_from == objective("rloo", 1, tmp_path).initialize_from
    assert (config.environment, config.model, config.sampling) == (plain.environment, plain.model, plain.sampling)


def test_controls_differ_only_in_the_controlled_settings():
    control = random_reward(rloo(), 1)
    assert isinstance(control.environment, RandomRewardConfig)
    assert control.environment.environment == rloo(1).environment
    assert (control.seed, control.run_dir) == (1, "runs/rloo-random-reward-seed1")
    assert control.optimizer == rloo(1).optimizer
    assert (more_warm_start(1, 900).num_steps, more_warm_start(1, 900).warm_start.max_steps) == (0, 900)
