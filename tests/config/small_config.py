# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""A valid training config with a small model."""

from levanter.models.llama import LlamaConfig

from marin_rl.config.sections import RolloutConfig
from marin_rl.config.train_config import TrainConfig
from marin_rl.environments.arithmetic import ArithmeticConfig
from marin_rl.utils.levanter_line import seq_len

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
