# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""A tiny config for plans."""

import tempfile
from pathlib import Path

from marin_rl.config.command_line import parse_config
from marin_rl.config.train_config import TrainConfig

TINY = """
run_dir: runs/tiny
num_steps: 2
environment: {type: arithmetic}
model:
  {type: llama, seq_len: 32, hidden_dim: 32, intermediate_dim: 64, num_layers: 2, num_heads: 4, num_kv_heads: 2,
   gradient_checkpointing: false, attn_backend: vanilla}
rollouts: {prompts_per_step: 4, group_size: 4, max_length: 32, packing: false}
sampling: {max_new_tokens: 8, max_seqs: 8}
trainer: {per_device_parallelism: 4}
"""


def tiny_config(*overrides: str) -> TrainConfig:
    """Return the config with overrides such as `--mode async`."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "tiny.yaml"
        file.write_text(TINY)
        return parse_config(TrainConfig, ["--config", str(file), *overrides]).config
