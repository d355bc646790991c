# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Controls for experiments/rloo.yaml: is it really the reward that teaches?

    python -m experiments.rloo_controls random_reward --seed 1
    python -m experiments.rloo_controls more_warm_start --seed 1 --steps 2400

`random_reward` is the same run with rewards thrown by a coin (the held-out tasks are still graded
truly): no lift is expected. `more_warm_start` spends the time of RL on more supervised updates on the
worked answers instead, which RL never sees.
"""

import argparse
import dataclasses
import sys

from experiments.rloo_in_code import rloo
from marin_rl.environments import RandomRewardConfig
from marin_rl.runtime.config import TrainConfig
from marin_rl.runtime.session import run_session


def random_reward(seed: int) -> TrainConfig:
    """The run of this seed, with a coin in place of the judge of training tasks."""
    config = rloo(seed)
    return dataclasses.replace(
        config,
        run_dir=f"runs/rloo-random-reward-seed{seed}",
        environment=RandomRewardConfig(environment=config.environment, probability=0.5),
    )


def more_warm_start(seed: int, steps: int) -> TrainConfig:
    """Supervised updates alone, `steps` in all, and no RL."""
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
    arguments = parser.parse_args()
    if arguments.control == "random_reward":
        config = random_reward(arguments.seed)
    else:
        config = more_warm_start(arguments.seed, arguments.steps)
    run_session(config, sys.stdout)


if __name__ == "__main__":
    main()
