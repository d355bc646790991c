# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import logging
from typing import Any

import levanter.trainer  # noqa: F401  before marin_rl: see tests/tiny_run.py
import pytest

from marin_rl.config.sections import RolloutConfig
from marin_rl.config.train_config import TrainConfig
from marin_rl.learner.attention_kernel import attention_kernel
from marin_rl.rollouts.config import LongPrompts
from marin_rl.utils.logs import LogLevel, module_levels
from marin_rl.utils.settings.decode import decode
from marin_rl.utils.settings.section_types import ConfigError


@pytest.mark.parametrize("length", [512, 600])
def test_max_prompt_length_must_be_below_max_length(length: int):
    with pytest.raises(ValueError, match=rf"rollouts.max_prompt_length is {length}; it must be below"):
        RolloutConfig(max_prompt_length=length)
    assert RolloutConfig(max_prompt_length=511, long_prompts=LongPrompts.SKIP).long_prompts is LongPrompts.SKIP


def test_rollouts_per_step():
    assert RolloutConfig(prompts_per_step=3, group_size=5).rollouts_per_step == 15


@pytest.mark.parametrize(
    ("settings", "positions", "rows"),
    [
        ({"max_length": 12}, 128, 6),
        ({"max_length": 128}, 128, 6),
        ({"max_length": 512}, 512, 1),
        ({"max_length": 513}, 640, 1),
        ({"max_length": 1100}, 1280, 1),
        ({"max_length": 1100, "packing": False}, 1280, 1),
        ({"max_length": 1100, "row_length": 1152}, 1152, 1),
        ({"max_length": 4096}, 4096, 1),
        ({"max_length": 12, "packing": False}, 12, 64),
        ({"max_length": 12, "row_length": 32}, 32, 24),
        ({"max_length": 12, "row_length": 32, "packing": False}, 32, 24),
        ({"max_length": 12, "packing": False, "prompts_per_step": 5, "group_size": 13}, 12, 33),
        ({"max_length": 12, "prompts_per_step": 2, "group_size": 2}, 128, 4),
    ],
)
def test_default_microbatch_on_a_cpu_has_at_most_768_tokens(settings: dict, positions: int, rows: int):
    built = RolloutConfig(**settings)
    assert (built.positions(attention_kernel(None, "cpu")), built.rows_per_device("cpu")) == (positions, rows)


def test_default_microbatch_of_an_accelerator_is_larger_but_not_larger_than_a_step():
    built = RolloutConfig(max_length=512)
    assert [built.rows_per_device(platform) for platform in ("cpu", "gpu", "tpu")] == [1, 16, 16]
    # 512 rollouts on 64 devices: 8 rows on each.
    assert built.rows_per_device("tpu", devices=64) == 8


def test_log_levels_are_read_from_the_config():
    base = {"environment": {"type": "arithmetic"}, "run_dir": "r", "initialize_from": "m"}
    assert (decode(TrainConfig, base).log_level, decode(TrainConfig, base).logging) == (LogLevel.INFO, {})
    config = decode(
        TrainConfig, {**base, "log_level": "DEBUG", "logging": {"marin_rl.rollouts.rollout_builder": "warning"}}
    )
    assert config.log_level is LogLevel.DEBUG
    assert module_levels(config.logging) == {"marin_rl.rollouts.rollout_builder": logging.WARNING}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"log_level": "loud"}, "log_level.*debug, info, warning, error"),
        (
            {"logging": {"marin_rl.rolouts": "debug"}},
            "logging.marin_rl.rolouts does not name a module of marin_rl",
        ),
        ({"logging": {"levanter": "debug"}}, "logging.levanter does not name"),
        ({"logging": {"marin_rl/../x": "debug"}}, "logging.marin_rl/../x does not name"),
        (
            {"logging": {"marin_rl.rollouts": "loud"}},
            "logging.marin_rl.rollouts is 'loud'; it must be one of debug, info",
        ),
    ],
)
def test_unknown_levels_and_modules_are_refused_by_key(changes: dict[str, Any], message: str):
    base = {"environment": {"type": "arithmetic"}, "run_dir": "r", "initialize_from": "m"}
    with pytest.raises(ConfigError, match=message):
        decode(TrainConfig, {**base, **changes})
