# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""A small training config, written in YAML."""

from marin_rl.config.train_config import TrainConfig
from marin_rl.utils.settings.yaml_text import from_yaml


def from_lines(**sections: str) -> TrainConfig:
    """Decode a config from YAML text by section."""
    settings = {
        "run_dir": "runs/test",
        "environment": "{type: arithmetic}",
        "model": "{type: llama, seq_len: 64, hidden_dim: 16, intermediate_dim: 32, num_layers: 1, num_heads: 2, "
        "num_kv_heads: 2}",
        "rollouts": "{prompts_per_step: 4, group_size: 8, max_length: 32}",
        **sections,
    }
    return from_yaml(TrainConfig, "".join(f"{name}: {value}\n" for name, value in settings.items()), "test.yaml")
