# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""A config that is built in Python is checked as one of a YAML file, with the same sentences."""

from pathlib import Path
from typing import Any

import levanter.trainer  # noqa: F401  before marin_rl: see tests/tiny_run.py
import numpy as np
import pytest
from levanter.models.llama import LlamaConfig
from levanter.optim.config import AdamConfig

from marin_rl.config.sections import Mode, RolloutConfig
from marin_rl.config.train_config import TrainConfig
from marin_rl.environments.arithmetic import ArithmeticConfig
from marin_rl.utils.settings.decode import decode
from marin_rl.utils.settings.section_types import NOT_READ, ConfigError, deferring

RUN: dict[str, Any] = {"environment": ArithmeticConfig(), "run_dir": "runs/a", "model": LlamaConfig()}
YAML: dict[str, Any] = {"environment": {"type": "arithmetic"}, "run_dir": "runs/a", "model": {"type": "llama"}}

WRONG: dict[str, Any] = {
    "num_steps": "3",
    "seed": None,
    "environment": 3,
    "rollouts": [1],
    "kl": 0.1,
    "imports": "a.py",
    "mode": "asnc",
    "logprob_block_size": 0,
    "model": 5,
    "optimizer": None,
    "trainer": 3,
    "initialize_from": 7.5,
    "tokenizer": True,
}


@pytest.mark.parametrize("key", WRONG)
def test_a_wrong_value_is_refused_as_in_yaml(key: str) -> None:
    with pytest.raises(ConfigError) as built:
        TrainConfig(**{**RUN, key: WRONG[key]})
    with pytest.raises(ConfigError) as decoded:
        decode(TrainConfig, {**YAML, key: WRONG[key]})
    assert built.value.problems == decoded.value.problems


@pytest.mark.parametrize(("name", "value"), [("learning_rate", "1e-3"), ("beta1", None), ("nesterov", "no")])
def test_a_wrong_value_of_levanter_is_refused_as_in_yaml(name: str, value: Any) -> None:
    with pytest.raises(ConfigError) as built:
        TrainConfig(**RUN, optimizer=AdamConfig(**{name: value}))
    with pytest.raises(ConfigError) as decoded:
        decode(TrainConfig, {**YAML, "optimizer": {name: value}})
    assert built.value.problems == decoded.value.problems


def test_an_environment_is_not_its_config() -> None:
    environment: Any = ArithmeticConfig().build()
    with pytest.raises(ConfigError, match=r"^environment is .{1,250} but it takes a section with a type"):
        TrainConfig(**{**RUN, "environment": environment})


def test_all_wrong_values_are_named_at_once() -> None:
    wrong: Any = {"num_steps": "3", "seed": "1"}
    with pytest.raises(ConfigError) as refused:
        TrainConfig(**RUN, **wrong)
    assert len(refused.value.problems) == 2
    with pytest.raises(ConfigError, match=r"^RolloutConfig\.group_size is '8' \(str\)"):
        RolloutConfig(group_size=wrong["num_steps"].replace("3", "8"))


def test_paths_values_of_enums_and_numbers_of_numpy_are_taken() -> None:
    given: Any = {**RUN, "run_dir": Path("runs/b"), "mode": "sync", "seed": np.int64(3), "imports": []}
    config = TrainConfig(**given)
    assert (config.run_dir, config.mode, config.seed) == ("runs/b", Mode.SYNC, 3)


def test_sections_of_levanter_are_left_for_later() -> None:
    with deferring():
        config = decode(TrainConfig, {**YAML, "model": {"type": "lama"}})
    assert config.model is config.optimizer is NOT_READ
    assert config.trainer.tracker == ()
    assert config.environment == ArithmeticConfig()
