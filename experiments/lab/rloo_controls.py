# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Controls for experiments/rloo.yaml and other experiments: is the reward the cause of the improvement?

    python -m experiments.lab.rloo_controls random_reward --seed 1
    python -m experiments.lab.rloo_controls random_reward --seed 1 --config experiments/smollm2.yaml --probability 0.25
    python -m experiments.lab.rloo_controls more_warm_start --seed 1 --steps 2400

`random_reward` is the same run with random rewards (held-out tasks are still graded correctly): no improvement is
expected. `more_warm_start` replaces RL by more supervised updates on the worked answers, which RL never uses.
"""

import argparse
import dataclasses
import sys

from experiments.rloo_in_code import rloo
from marin_rl.config.command_line import parse_config
from marin_rl.config.train_config import TrainConfig
from marin_rl.environments import RandomRewardConfig
from marin_rl.sessions.earlier_run import resolve_model
from marin_rl.sessions.session import run_session


def random_reward(config: TrainConfig, seed: int, probability: float = 0.5) -> TrainConfig:
    """Return the config of a run with random rewards for training tasks.

    Args:
        config: the experiment.
        seed: seed of the run; suffix of the run directory.
        probability: probability of the reward 1; other rewards are 0.
    """
    return dataclasses.replace(
        config,
        seed=seed,
        run_dir=f"{config.run_dir}-random-reward-seed{seed}",
        environment=RandomRewardConfig(environment=config.environment, probability=probability),
    )


def more_warm_start(seed: int, steps: int) -> TrainConfig:
    """Return the config of `steps` supervised updates without RL."""
    config = rloo(seed)
    return dataclasses.replace(
        config,
        run_dir=f"runs/rloo-more-warm-start-seed{seed}",
        num_steps=0,
        warm_start=dataclasses.replace(config.warm_start, max_steps=steps, target_accuracy=1.0),
    )


def main() -> None:
    """Run one control."""
    parser = argparse.ArgumentParser(description="Controls for experiments/rloo.yaml.")
    parser.add_argument("control", choices=["random_reward", "more_warm_start"])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--steps", type=int, default=2400, help="supervised updates of more_warm_start")
    parser.add_argument("--config", default="experiments/rloo.yaml", help="experiment of random_reward")
    parser.add_argument("--probability", type=float, default=0.5, help="probability of a reward of random_reward")
    arguments = parser.parse_args()
    if arguments.control == "random_reward":
        experiment = parse_config(TrainConfig, ["--config", arguments.config]).config
        config = random_reward(resolve_model(experiment), arguments.seed, arguments.probability)
    else:
        config = more_warm_start(arguments.seed, arguments.steps)
    run_session(config, sys.stdout)


if __name__ == "__main__":
    main()
