# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""A tiny config for plans, and plans without compilation."""

import tempfile
from pathlib import Path
from typing import Any, cast

from marin_rl.config.command_line import parse_config
from marin_rl.config.supervised_config import DpoConfig, SftConfig
from marin_rl.config.train_config import TrainConfig
from marin_rl.pods.chips import CHIPS, GIB, Number, parse_topology
from marin_rl.pods.compiling import ProgramMemory
from marin_rl.pods.least_time import StepSize
from marin_rl.pods.run_plan import Plan, PlannedProgram

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

_TINY_SFT = """
run_dir: runs/tiny
data: {path: absent.jsonl, held_out: 0.5}
model:
  {type: llama, seq_len: 32, hidden_dim: 32, intermediate_dim: 64, num_layers: 2, num_heads: 4, num_kv_heads: 2,
   gradient_checkpointing: false, attn_backend: vanilla}
batch: {size: 8, max_length: 32, packing: false}
trainer: {per_device_parallelism: 4}
"""
SUPERVISED = {SftConfig: _TINY_SFT, DpoConfig: _TINY_SFT.replace("data:", "preferences:")}
"""Tiny configs of runs on data, which a plan does not read."""


def tiny_supervised(kind: type[SftConfig | DpoConfig], *overrides: str) -> SftConfig | DpoConfig:
    """Return a config of a run on data, with overrides."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "tiny.yaml"
        file.write_text(SUPERVISED[kind])
        return parse_config(cast(Any, kind), ["--config", str(file), *overrides]).config


def tiny_config(*overrides: str) -> TrainConfig:
    """Return the config with overrides such as `--mode async`."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "tiny.yaml"
        file.write_text(TINY)
        return parse_config(TrainConfig, ["--config", str(file), *overrides]).config


def planned(name: str, place: str = "trainer", *, gib: Number = 10, chip: str = "v5p") -> PlannedProgram:
    """Return a program with a GiB of temporaries besides its arguments, and two GiB that stay allocated."""
    return PlannedProgram(name, place, ProgramMemory(gib * GIB, 0, 0, GIB), 2 * GIB, CHIPS[chip], None)


def make_plan(*programs: PlannedProgram, **changes: Any) -> Plan:
    """Return the plan of these programs on 16 chips."""
    values: dict[str, Any] = {
        "topology": parse_topology("v5p:2x2x4"),
        "worker_topology": None,
        "mesh": {"replica": 1, "data": 16, "model": 1},
        "parameters": 8_030_000_000,
        "adapter": None,
        "targets": (),
        "layers": 32,
        "rows": 1,
        "row_length": 8192,
        "step": StepSize(2, 16, 1024, 7168, 4, 1),
        "description": "2 prompts x 8 = 16 rollouts of 1,024 + 7,168 tokens",
        "held": {"weights": 2 * GIB, "optimizer": 4 * GIB},
        "trainer_seconds": {"update": 3.0, "decode": 1.0},
        "worker_seconds": {},
    }
    return Plan(programs=programs, **values | changes)
