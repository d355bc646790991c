# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""RLOO, GRPO, Dr. GRPO, MaxRL, GSPO, CISPO, PPO and two KL settings on the task of an experiment with RLOO.

All have the same start, tasks, sample count and optimizer.

    python -m experiments.lab.objectives start --seed 1
    python -m experiments.lab.objectives gspo --seed 1
    python -m experiments.lab.objectives gspo --seed 1 --config experiments/tasks/countdown.yaml

`start` runs the warm start of a seed, from which all objectives with that seed are initialized; an experiment that
continues another run has none. Objectives with ratios use four minibatches and a third of the learning rate; RLOO uses
one update.
"""

import argparse
import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path

from marin_rl.config.command_line import parse_config
from marin_rl.config.sections import UpdateConfig
from marin_rl.config.train_config import TrainConfig
from marin_rl.learner.critic import CriticConfig
from marin_rl.objectives.advantages import DrGrpoConfig, GrpoConfig, MaxRlConfig
from marin_rl.objectives.aggregation import ConstantConfig, SequenceMeanConfig, TokenMeanConfig
from marin_rl.objectives.gae import GaeConfig
from marin_rl.objectives.kl import RewardKlConfig
from marin_rl.objectives.policy_loss import CispoLossConfig, GspoLossConfig, PolicyLossConfig, PpoClipLossConfig
from marin_rl.sessions.session import run_session

CONFIG = Path(__file__).parents[1] / "rloo.yaml"


def in_minibatches(config: TrainConfig, policy_loss: PolicyLossConfig) -> TrainConfig:
    """Return the config with four updates per step, a third of the learning rate, and a term with ratios."""
    optimizer = dataclasses.replace(config.optimizer, learning_rate=round(config.optimizer.learning_rate / 3, 9))
    return dataclasses.replace(
        config, policy_loss=policy_loss, updates=UpdateConfig(minibatches=4), optimizer=optimizer
    )


def grpo(config: TrainConfig) -> TrainConfig:
    """Group-standardised advantages, the clipped term, and the mean over rollouts of their token mean."""
    return dataclasses.replace(
        in_minibatches(config, PpoClipLossConfig()),
        advantage=GrpoConfig(),
        aggregation=SequenceMeanConfig(),
    )


def dr_grpo(config: TrainConfig) -> TrainConfig:
    """Centred advantages, and a constant instead of every length and standard deviation."""
    return dataclasses.replace(
        in_minibatches(config, PpoClipLossConfig()),
        advantage=DrGrpoConfig(),
        aggregation=ConstantConfig(length=config.sampling.max_new_tokens),
    )


def maxrl(config: TrainConfig) -> TrainConfig:
    """Dr. GRPO with advantages divided by the mean of the group."""
    return dataclasses.replace(dr_grpo(config), advantage=MaxRlConfig())


def gspo(config: TrainConfig) -> TrainConfig:
    """One ratio per rollout. The bounds are for answers of three tokens, wider than the paper's for thousands."""
    return dataclasses.replace(
        in_minibatches(config, GspoLossConfig(clip_low=0.1, clip_high=0.1)),
        advantage=GrpoConfig(),
        aggregation=SequenceMeanConfig(),
    )


def cispo(config: TrainConfig) -> TrainConfig:
    """Bounded weights on the score-function term, averaged over all tokens."""
    return dataclasses.replace(
        in_minibatches(config, CispoLossConfig()),
        advantage=GrpoConfig(),
        aggregation=TokenMeanConfig(),
    )


def ppo(config: TrainConfig) -> TrainConfig:
    """A critic on the policy's trunk instead of groups, as in experiments/ppo.yaml."""
    return dataclasses.replace(
        in_minibatches(config, PpoClipLossConfig()),
        rollouts=dataclasses.replace(config.rollouts, prompts_per_step=config.rollouts.rollouts_per_step, group_size=1),
        advantage=GaeConfig(gamma=1.0, lam=1.0),
        critic=CriticConfig(shared_trunk=True, coefficient=0.1),
        aggregation=TokenMeanConfig(),
    )


def rloo_kl(config: TrainConfig) -> TrainConfig:
    """RLOO with a KL penalty in the reward."""
    return dataclasses.replace(config, kl=RewardKlConfig(beta=0.1))


def rloo_watched(config: TrainConfig) -> TrainConfig:
    """RLOO with a negligible KL penalty, which logs the KL divergence as a baseline for rloo_kl.

    New runs can use `kl: {type: none, watch: true}`.
    """
    return dataclasses.replace(config, kl=RewardKlConfig(beta=1e-7))


OBJECTIVES: dict[str, Callable[[TrainConfig], TrainConfig]] = {
    "rloo": lambda config: config,
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "maxrl": maxrl,
    "gspo": gspo,
    "cispo": cispo,
    "ppo": ppo,
    "rloo_kl": rloo_kl,
    "rloo_watched": rloo_watched,
}


def read(seed: int, file: Path) -> TrainConfig:
    """Return the config of an experiment with the given seed."""
    return parse_config(TrainConfig, ["--config", str(file), "--seed", str(seed)]).config


def start(seed: int, folder: Path, file: Path = CONFIG) -> TrainConfig:
    """Return the config of a seed's warm start without RL."""
    return dataclasses.replace(read(seed, file), run_dir=str(folder / f"start-seed{seed}"), num_steps=0)


def objective(name: str, seed: int, folder: Path, file: Path = CONFIG) -> TrainConfig:
    """Return the config of an objective's run from the start of its seed."""
    config = OBJECTIVES[name](read(seed, file))
    return dataclasses.replace(
        config,
        run_dir=str(folder / f"{name}-seed{seed}"),
        initialize_from=config.initialize_from or str(folder / f"start-seed{seed}"),
        warm_start=dataclasses.replace(config.warm_start, max_steps=0),
        evaluation=dataclasses.replace(config.evaluation, every=config.num_steps // 6),
    )


def main() -> None:
    """Run the warm start or one objective."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("objective", choices=["start", *OBJECTIVES])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--folder", type=Path, default=Path("runs/objectives"), help="parent folder of the run directories"
    )
    parser.add_argument("--config", type=Path, default=CONFIG, help="experiment with RLOO")
    parser.add_argument("--steps", type=int, default=None, help="number of steps (default: that of the experiment)")
    arguments = parser.parse_args()
    if arguments.objective == "start":
        config = start(arguments.seed, arguments.folder, arguments.config)
    else:
        config = objective(arguments.objective, arguments.seed, arguments.folder, arguments.config)
        config = dataclasses.replace(config, num_steps=arguments.steps or config.num_steps)
    run_session(config, sys.stdout)


if __name__ == "__main__":
    main()
