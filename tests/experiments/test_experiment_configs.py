# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import dataclasses
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from experiments.lab.objectives import OBJECTIVES, objective, ppo
from experiments.lab.rloo_controls import more_warm_start, random_reward
from experiments.rloo_in_code import rloo
from marin_rl.config.command_line import parse_config
from marin_rl.config.train_config import TrainConfig
from marin_rl.environments import RandomRewardConfig
from marin_rl.sessions.recipes import config_class
from marin_rl.utils.levanter_line import line_problem
from marin_rl.utils.settings.yaml_text import load_yaml, to_yaml
from tests.cpu_host import cpu_host
from tests.fork_server import ForkedProcess, popen

EXPERIMENTS = Path(__file__).parents[2] / "experiments"


def read(name: str) -> TrainConfig:
    return parse_config(TrainConfig, ["--config", str(EXPERIMENTS / name)]).config


@pytest.mark.parametrize(
    "path", sorted([*EXPERIMENTS.glob("*.yaml"), *EXPERIMENTS.glob("tasks/*.yaml")]), ids=lambda path: path.name
)
def test_every_experiment_is_valid_and_has_its_own_run_directory(path):
    values = load_yaml(path)
    if (problem := line_problem((values.get("model") or {}).get("type"))) is not None:
        pytest.skip(problem)
    config = parse_config(config_class(values), ["--config", str(path)]).config
    assert config.run_dir == str("runs" / path.relative_to(EXPERIMENTS).with_suffix(""))


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


SMALL = {
    "environment": "{type: arithmetic}",
    "initialize_from": "null",
    "model": "{seq_len: 64, hidden_dim: 64, intermediate_dim: 128, num_layers: 1, num_heads: 8, head_dim: 16}",
    "rollouts": "{prompts_per_step: 4, group_size: 4, max_length: 32}",
    "sampling": "{max_new_tokens: 8, max_seqs: 16}",
    "trainer.per_device_parallelism": "1",
    "trainer.require_accelerator": "false",
    "trainer.distributed.initialize_jax_distributed": "false",
    "evaluation.tasks": "0",
    "num_steps": "2",
}
"""Overrides that leave the mesh, the losses and the precision of an experiment as they are."""
ONE_WORKER = {"workers.engine": "ray", "workers.num_workers": "1", "workers.tpu_slice": "null"}
"""Further ones of asynchronous experiments: a worker on this machine's CPU."""


ACCELERATORS: dict[str, tuple[int, dict[str, str]]] = {
    "gsm8k_qwen3_0_6b": (1, {}),
    "v5e_8_qwen3_1_7b": (8, {}),
    "v5p_32_qwen3_8b": (16, {}),
    # The same axes with 4 of 64 devices, and with all 4 of a worker.
    "v5p_128_qwen3_8b_async": (4, ONE_WORKER),
    # The same axes with 8 of 64 devices: data 2 x model 4.
    "v6e_64_qwen3_32b": (8, {}),
}
"""Number of devices and further overrides of each experiment for accelerators."""


@pytest.fixture(scope="module")
def small_runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, tuple[Path, ForkedProcess]]]:
    """Folders and processes of the experiments for accelerators, which run at the same time."""
    runs = {}
    for name, (devices, further) in ACCELERATORS.items():
        folder = tmp_path_factory.mktemp(name)
        overrides = [text for key, value in (SMALL | further).items() for text in (f"--{key}", value)]
        command = ["--config", str(EXPERIMENTS / f"{name}.yaml"), "--run_dir", str(folder / "run"), *overrides]
        cache = ["--trainer.jax_compilation_cache_dir", os.environ["JAX_COMPILATION_CACHE_DIR"]]
        with (folder / "output.txt").open("wb") as output:
            arguments = [sys.executable, "-m", "marin_rl.train", *command, *cache]
            runs[name] = folder, popen(arguments, stdout=output, env={**os.environ, **cpu_host(devices)})
    yield runs
    for _, process in runs.values():
        process.kill()


@pytest.mark.slow
@pytest.mark.parametrize("name", ACCELERATORS)
def test_experiment_for_accelerators_trains_a_small_model_on_the_same_axes(
    name: str, small_runs: dict[str, tuple[Path, ForkedProcess]]
):
    folder, process = small_runs[name]
    assert process.wait() == 0, (folder / "output.txt").read_text()
    records = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == [0, 1, 2]
    assert (folder / "run" / "hf" / "config.json").exists()
