# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import dataclasses
from pathlib import Path

import levanter.trainer  # noqa: F401  before marin_rl: see tests/tiny_run.py
import pytest
from levanter.models.llama import LlamaConfig

from marin_rl.environments.arithmetic import ArithmeticConfig
from marin_rl.objectives.advantages import GrpoConfig, ReinforceConfig
from marin_rl.runtime.config import (
    RolloutConfig,
    TrainConfig,
    compilation_cache,
    default_trainer,
    levanter_defaults,
)
from marin_rl.runtime.config_parsing import from_yaml, parse_config, to_yaml

MODEL = LlamaConfig(seq_len=64, hidden_dim=16, intermediate_dim=32, num_layers=1, num_heads=2, num_kv_heads=2)


def config(**changes) -> TrainConfig:
    settings = {
        "environment": ArithmeticConfig(),
        "run_dir": "runs/test",
        "model": MODEL,
        "rollouts": RolloutConfig(prompts_per_step=4, group_size=8, max_length=32),
    }
    return TrainConfig(**{**settings, **changes})


def test_a_run_starts_on_a_laptop_by_default():
    trainer = config().trainer
    assert trainer == default_trainer()
    assert not trainer.require_accelerator
    assert not trainer.distributed.initialize_jax_distributed
    assert not trainer.ray.auto_start_cluster
    assert trainer.tracker == ()
    assert not trainer.log_jaxprs
    assert not trainer.log_xla_hlo
    assert trainer.jax_compilation_cache_dir == compilation_cache()


def test_compiled_programs_are_kept_in_the_users_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert compilation_cache() == str(tmp_path / "marin_rl" / "jax")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert compilation_cache() == str(tmp_path / ".cache" / "marin_rl" / "jax")


def test_what_the_trainer_needs_follows_from_the_run():
    trainer = config(seed=7, num_steps=30).trainer_config()
    assert (trainer.train_batch_size, trainer.num_train_steps, trainer.seed, trainer.id) == (32, 30, 7, "test")
    named = dataclasses.replace(default_trainer(), id="mine")
    assert config(trainer=named).trainer_config().id == "mine"


def test_a_config_survives_its_own_file():
    made = config(advantage=GrpoConfig(), seed=5)
    assert from_yaml(TrainConfig, to_yaml(made), "test") == made


def test_the_command_line_and_code_make_the_same_config(tmp_path: Path):
    file = tmp_path / "a.yaml"
    file.write_text(
        "run_dir: runs/test\nenvironment: {type: arithmetic}\n"
        "model: {type: llama, seq_len: 64, hidden_dim: 16, intermediate_dim: 32, num_layers: 1, num_heads: 2, "
        "num_kv_heads: 2}\n"
        "rollouts: {prompts_per_step: 4, group_size: 2, max_length: 32}\n"
    )
    parsed = parse_config(TrainConfig, ["--config", str(file), "--rollouts.group_size", "8"], levanter_defaults())
    assert parsed.config == config()


def test_reinforce_takes_groups_of_one():
    alone = RolloutConfig(group_size=1)
    assert config(rollouts=alone, advantage=ReinforceConfig(), model=None, initialize_from="x").rollouts is alone


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rollouts": RolloutConfig(group_size=1, max_length=8)}, r"rollouts\.group_size is 1, but advantage 'rloo'"),
        (
            {"rollouts": RolloutConfig(group_size=1, max_length=8), "advantage": GrpoConfig()},
            "advantage 'grpo' compares the attempts .* needs at least 2; raise it, or use advantage: {type: reinforce}",
        ),
        ({"model": None}, "neither model nor initialize_from is set"),
        ({"num_steps": -1}, "num_steps is -1"),
        ({"logprob_block_size": 0}, "logprob_block_size is 0"),
        (
            {"rollouts": RolloutConfig(max_length=65)},
            r"rollouts\.max_length is 65, but the model's context has 64 tokens \(model\.seq_len\)",
        ),
        ({"model": dataclasses.replace(MODEL, scan_layers=False)}, r"model\.scan_layers is false"),
        (
            {"trainer": dataclasses.replace(default_trainer(), train_batch_size=8)},
            r"trainer\.train_batch_size is 8, .* set rollouts\.prompts_per_step",
        ),
        (
            {"trainer": dataclasses.replace(default_trainer(), num_train_steps=8)},
            r"trainer\.num_train_steps is 8, .* set num_steps",
        ),
    ],
)
def test_impossible_combinations_are_refused(changes: dict, message: str):
    with pytest.raises(ValueError, match=message):
        config(**changes)


@pytest.mark.parametrize("name", ["prompts_per_step", "group_size", "max_length", "max_turns"])
def test_sizes_are_at_least_one(name: str):
    with pytest.raises(ValueError, match=rf"rollouts\.{name} is 0; it must be at least 1"):
        RolloutConfig(**{name: 0})


def test_rows_of_a_batch():
    assert RolloutConfig(prompts_per_step=3, group_size=5).rollouts_per_step == 15
