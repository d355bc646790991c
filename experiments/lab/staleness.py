# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""The effect of staleness on learning: experiments/rloo_async.yaml with groups of one fixed staleness, in steps.

    python -m experiments.lab.staleness start --seed 1
    python -m experiments.lab.staleness 4 --seed 1

`start` runs the warm start of a seed, from which all runs with that seed are initialized. With workers, the staleness
of a group depends on their speed, up to `replay.max_staleness`. Here every group has the maximum staleness, which is
the worst case, and everything runs in one process, so that runs are bit-identical.
"""

import argparse
import dataclasses
import functools
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import equinox as eqx
import jax

from marin_rl.config.command_line import parse_config
from marin_rl.config.train_config import TrainConfig
from marin_rl.distributed.replay_buffer import ReplayBuffer
from marin_rl.distributed.rollout_source import FinishedGroup, LocalRollouts
from marin_rl.distributed.scheduler import GroupRequest, RolloutScheduler, StalenessLimits
from marin_rl.learner.critic import policy_of
from marin_rl.parts.rl import RunParts
from marin_rl.runs.metrics_file import append_record
from marin_rl.runs.run_directory import create_or_open
from marin_rl.sessions.earlier_run import resolve_model
from marin_rl.sessions.session import run_session
from marin_rl.training.loop import TrainingRun, train
from marin_rl.training.open_run import Start, open_run
from marin_rl.types import WeightVersion
from marin_rl.utils.errors import Closing
from marin_rl.utils.settings.yaml_text import to_yaml
from marin_rl.utils.timing import PhaseTimer

CONFIG = Path(__file__).parents[1] / "rloo_async.yaml"
LAGS = (0, 1, 4)
"""Steps between the weights that sample and the weights that are updated."""


class FixedLagRollouts:
    """A `RolloutSource` that samples each group with the oldest allowed weights."""

    def __init__(self, run: TrainingRun, lag: int) -> None:
        """Start without requests, with the run's current weights.

        Args:
            run: samples with its sampler.
            lag: staleness, in steps.
        """
        self._run = run
        self._lag, self._history = lag, dict[WeightVersion, Any]()
        self._requests: list[GroupRequest] = []
        self.counts: dict[str, int] = {}
        self.publish(policy_of(run.trainer_state.model), run.state.progress.step)

    def submit(self, requests: Sequence[GroupRequest]) -> None:
        """See `RolloutSource`."""
        self._requests += requests

    def wait(self, timer: PhaseTimer, stop_requested: Callable[[], bool] = lambda: False) -> list[FinishedGroup]:
        """Sample the groups requested for the next step; see `RolloutSource`. A stop takes effect after the step."""
        run, step = self._run, min(request.number.step for request in self._requests)
        requests = [request for request in self._requests if request.number.step == step]
        self._requests = [request for request in self._requests if request.number.step != step]
        version = requests[0].min_version
        run.runner.sampler.update_weights(self._history[version], version)
        rollouts = LocalRollouts(
            run.runner,
            group_size=run.config.rollouts.group_size,
            temperature=run.config.sampling.temperature,
            seed=run.config.seed,
        )
        rollouts.submit(requests)
        groups = rollouts.wait(timer)
        run.runner.sampler.update_weights(policy_of(run.trainer_state.model), run.state.progress.step)
        return groups

    def publish(self, model: object, version: WeightVersion) -> None:
        """See `RolloutSource`."""
        # The next update donates the arrays.
        self._history[version] = jax.tree.map(lambda leaf: leaf.copy() if eqx.is_array(leaf) else leaf, model)
        self._history.pop(version - self._lag - 1, None)

    def flush(self) -> None:
        """Do nothing."""

    def metrics(self) -> dict[str, float]:
        """Return no metrics; there are no workers."""
        return {}


def train_with_lag(config: TrainConfig, lag: int) -> None:
    """Train on groups that are `lag` steps old, or as old as possible in the first steps.

    Args:
        config: a config with `mode: sync`.
        lag: staleness in steps; 0 is the run of the config.

    Raises:
        FileExistsError: if the run directory exists; such a run cannot be resumed.
    """
    folder = Path(config.run_dir)
    folder.mkdir(parents=True)
    create_or_open(folder, to_yaml(config))
    run = open_run(RunParts, config, None, Start(folder, lambda message: print(message, flush=True)))
    with Closing(run.close):
        run.state.scheduler = RolloutScheduler(StalenessLimits(config.rollouts.prompts_per_step, lag))
        run.state.replay = ReplayBuffer(max_staleness=lag)
        rollout_source = FixedLagRollouts(run, lag)
        run.collector = dataclasses.replace(run.collector, rollout_source=rollout_source)
        record = functools.partial(append_record, folder / "metrics.jsonl")
        record(0, run.state.progress.evaluations["before RL"])
        train(run, record, lambda: False)


def study(seed: int) -> TrainConfig:
    """Return the file's config with another seed, in one process, with more frequent measurements."""
    arguments = ["--config", str(CONFIG), "--seed", str(seed), "--mode", "sync", "--evaluation.every", "25"]
    return parse_config(TrainConfig, arguments).config


def main() -> None:
    """Run the warm start or one lag."""
    parser = argparse.ArgumentParser(description="Train on groups of equal staleness.")
    parser.add_argument("run", choices=["start", *map(str, LAGS)], help="the warm start, or the staleness in steps")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--folder", type=Path, default=Path("runs/staleness"), help="parent folder of the run directories"
    )
    arguments = parser.parse_args()
    config, start = study(arguments.seed), arguments.folder / f"start-seed{arguments.seed}"
    if arguments.run == "start":
        run_session(dataclasses.replace(config, run_dir=str(start), num_steps=0), sys.stdout)
        return
    config = dataclasses.replace(
        config,
        run_dir=str(arguments.folder / f"lag{arguments.run}-seed{arguments.seed}"),
        initialize_from=str(start),
        warm_start=dataclasses.replace(config.warm_start, max_steps=0),
    )
    train_with_lag(resolve_model(config), int(arguments.run))


if __name__ == "__main__":
    main()
