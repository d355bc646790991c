# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""experiments/gigpo_frozenlake.yaml and its twins, which differ from it in the advantage and in nothing else.

    python -m experiments.frozenlake start --seed 1
    python -m experiments.frozenlake grpo --seed 1

`start` is the warm start of that seed, which all its twins begin from.
"""

import argparse
import dataclasses
import sys
from pathlib import Path

from marin_rl.objectives.advantages import AdvantageConfig, GrpoConfig, RlooConfig
from marin_rl.runtime.config import TrainConfig, levanter_defaults
from marin_rl.runtime.config_parsing import parse_config
from marin_rl.runtime.session import run_session

CONFIG = Path(__file__).parent / "gigpo_frozenlake.yaml"


def gigpo(seed: int) -> TrainConfig:
    """The config of the file, with another seed."""
    arguments = ["--config", str(CONFIG), "--seed", str(seed)]
    return parse_config(TrainConfig, arguments, levanter_defaults()).config


TWINS: dict[str, AdvantageConfig] = {
    "gigpo": gigpo(0).advantage,
    "grpo": GrpoConfig(),
    "rloo": RlooConfig(),
}


def start(seed: int, folder: Path) -> TrainConfig:
    """The warm start of a seed, and no RL."""
    return dataclasses.replace(gigpo(seed), run_dir=str(folder / f"start-seed{seed}"), num_steps=0)


def twin(name: str, seed: int, folder: Path) -> TrainConfig:
    """The run of an advantage from the start of its seed."""
    config = gigpo(seed)
    return dataclasses.replace(
        config,
        run_dir=str(folder / f"{name}-seed{seed}"),
        advantage=TWINS[name],
        initialize_from=str(folder / f"start-seed{seed}"),
        warm_start=dataclasses.replace(config.warm_start, max_steps=0),
    )


def main() -> None:
    """Run one of them."""
    parser = argparse.ArgumentParser(description="GiGPO, GRPO and RLOO on FrozenLake from the same start.")
    parser.add_argument("run", choices=["start", *TWINS])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--folder", type=Path, default=Path("runs/frozenlake"), help="where the runs lie")
    arguments = parser.parse_args()
    if arguments.run == "start":
        config = start(arguments.seed, arguments.folder)
    else:
        config = twin(arguments.run, arguments.seed, arguments.folder)
    run_session(config, sys.stdout)


if __name__ == "__main__":
    main()
