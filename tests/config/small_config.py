# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Valid training configs with a small model."""

import yaml
from levanter.models.llama import LlamaConfig

from marin_rl.config.sections import RolloutConfig
from marin_rl.config.train_config import TrainConfig
from marin_rl.environments.arithmetic import ArithmeticConfig
from marin_rl.utils.levanter_line import seq_len
from marin_rl.utils.settings.yaml_text import from_yaml
from tests.config.mistakes import BASE

SIZES = {**seq_len(64), "hidden_dim": 16, "intermediate_dim": 32, "num_layers": 1, "num_heads": 2, "num_kv_heads": 2}
MODEL = LlamaConfig(**SIZES)


def config(**changes) -> TrainConfig:
    settings = {
        "environment": ArithmeticConfig(),
        "run_dir": "runs/test",
        "model": MODEL,
        "rollouts": RolloutConfig(prompts_per_step=4, group_size=8, max_length=32),
    }
    return TrainConfig(**{**settings, **changes})


def from_lines(**sections: str) -> TrainConfig:
    """Decode a config from YAML text by section."""
    settings = {**yaml.safe_load(BASE), **{name: yaml.safe_load(text) for name, text in sections.items()}}
    return from_yaml(TrainConfig, yaml.safe_dump(settings), "test.yaml")
