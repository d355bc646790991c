# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Comparison of GiGPO, GRPO and RLOO: a config with GiGPO, by default on FrozenLake, with different advantages.

    python -m experiments.lab.frozenlake start --seed 1
    python -m experiments.lab.frozenlake grpo --seed 1
    python -m experiments.lab.frozenlake start --seed 1 --config experiments/textworld.yaml --folder runs/textworld

`start` runs the warm start of a seed, from which all runs with that seed are initialized.
"""

import argparse
import dataclasses
import sys
from pathlib import Path

from marin_rl.config.command_line import parse_config
from marin_rl.config.train_config import TrainConfig
from marin_rl.objectives import AdvantageConfig, GrpoConfig, RlooConfig
from marin_rl.sessions.session import run_session

CONFIG = Path(__file__).parents[1] / "gigpo_frozenlake.yaml"


def gigpo(seed: int, file: Path = CONFIG) -> TrainConfig:
    """Return the config of a file with the given seed."""
    arguments = ["--config", str(file), "--seed", str(seed)]
    return parse_config(TrainConfig, arguments).config


VARIANTS: dict[str, AdvantageConfig] = {
    "gigpo": gigpo(0).advantage,
    "grpo": GrpoConfig(),
    "rloo": RlooConfig(),
}


def start(seed: int, folder: Path, file: Path = CONFIG) -> TrainConfig:
    """Return the config of the warm start of a seed, without RL."""
    return dataclasses.replace(gigpo(seed, file), run_dir=str(folder / f"start-seed{seed}"), num_steps=0)


def variant(name: str, seed: int, folder: Path, file: Path = CONFIG) -> TrainConfig:
    """Return the config of an advantage, initialized from the warm start of its seed."""
    config = gigpo(seed, file)
    return dataclasses.replace(
        config,
        run_dir=str(folder / f"{name}-seed{seed}"),
        advantage=VARIANTS[name],
        initialize_from=str(folder / f"start-seed{seed}"),
        warm_start=dataclasses.replace(config.warm_start, max_steps=0),
    )


def main() -> None:
    """Run one config."""
    parser = argparse.ArgumentParser(description="GiGPO, GRPO and RLOO from the same warm start.")
    parser.add_argument("run", choices=["start", *VARIANTS])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--config", type=Path, default=CONFIG, help="config with GiGPO")
    parser.add_argument(
        "--folder", type=Path, default=Path("runs/frozenlake"), help="parent folder of the run directories"
    )
    arguments = parser.parse_args()
    if arguments.run == "start":
        config = start(arguments.seed, arguments.folder, arguments.config)
    else:
        config = variant(arguments.run, arguments.seed, arguments.folder, arguments.config)
    run_session(config, sys.stdout)


if __name__ == "__main__":
    main()
