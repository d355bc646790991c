# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""The parts of the training loop."""

import contextlib
import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path

from levanter.models.lm_model import LmHeadModel
from levanter.trainer_state import TrainerState

from marin_rl import multihost
from marin_rl.config.train_config import TrainConfig
from marin_rl.distributed.rollout_source import RolloutSource
from marin_rl.errors import writing
from marin_rl.learner.checkpoint import Checkpoints
from marin_rl.learner.train_step import Learner
from marin_rl.learner.weight_history import WeightHistory
from marin_rl.rollouts.run_rollouts import RolloutRunner
from marin_rl.rollouts.store import EVALUATION, RolloutStore
from marin_rl.rollouts.stored_rollout import StoredAdvantages
from marin_rl.sampling.sampler import Sampler
from marin_rl.training.batch_builder import BatchBuilder
from marin_rl.training.collect import GroupCollector
from marin_rl.training.run_state import RunState
from marin_rl.types import RolloutGroup, WeightVersion


@dataclasses.dataclass(frozen=True)
class WeightPublisher:
    """Sends new weights to all samplers."""

    sampler: Sampler
    """Sampler of this process, which uses the weights without a copy."""
    rollout_source: RolloutSource
    """Samples the groups to train on."""
    history: WeightHistory[LmHeadModel] | None
    """Keeps the weights that buffered groups were sampled with, if the off-policy correction needs them."""

    def publish(self, policy: LmHeadModel, version: WeightVersion) -> None:
        """Send weights to the sampler of this process, the weight history and the rollout source."""
        self.sampler.update_weights(policy, version)
        self.offer(policy, version)

    def offer(self, policy: LmHeadModel, version: WeightVersion) -> None:
        """Send weights to the weight history and the rollout source."""
        if self.history is not None:
            self.history.keep(policy, version)
        self.rollout_source.publish(policy, version)


@dataclasses.dataclass(frozen=True)
class RolloutRecorder:
    """Writes rollouts to the run directory; errors become `RunDirectoryError`."""

    store: RolloutStore

    def record_step(
        self,
        step: int,
        groups: Sequence[RolloutGroup],
        advantages: Mapping[str, StoredAdvantages],
        stale: Sequence[RolloutGroup] = (),
    ) -> None:
        """Store the rollouts of a step; only in the main process."""
        if multihost.is_main():
            with writing(self.store.folder):
                self.store.write(step, groups, advantages, stale=stale)

    def record_evaluation(self, step: int, groups: Sequence[RolloutGroup]) -> None:
        """Store the rollouts of an evaluation of the weights after a step."""
        with writing(self.store.folder):
            self.store.write(step, groups, {}, EVALUATION)

    def truncate(self, step: int) -> None:
        """Delete stored rollouts after a step."""
        with writing(self.store.folder):
            self.store.truncate(step)

    def flush(self) -> None:
        """Wait until all rollouts are on disk."""
        with writing(self.store.folder):
            self.store.flush()

    def close(self) -> None:
        """Write the remaining rollouts and close the store."""
        with writing(self.store.folder):
            self.store.close()


@dataclasses.dataclass
class TrainingRun:
    """The parts of the training loop, and the state of the run."""

    config: TrainConfig
    """Training config."""
    state: RunState
    """Host-side state."""
    trainer_state: TrainerState
    """Weights, optimizer state and random key; replaced by every update."""
    collector: GroupCollector
    """Requests and collects the rollout groups of a step."""
    batch_builder: BatchBuilder
    """Computes advantages and batches."""
    learner: Learner
    """Computes weight updates."""
    publisher: WeightPublisher
    """Sends new weights to the samplers."""
    runner: RolloutRunner
    """Runs the episodes of evaluations."""
    recorder: RolloutRecorder
    """Stores rollouts."""
    checkpoints: Checkpoints
    """Saves and loads checkpoints."""
    resources: contextlib.ExitStack
    """Closes the rollout source, the rollout store, the reward functions and the event loop."""

    def save(self) -> Path:
        """Write a checkpoint, after all rollouts before it are on disk."""
        self.recorder.flush()
        return self.state.save(self.checkpoints, self.trainer_state, self.collector.rollout_source.counts)

    def close(self) -> None:
        """Stop the rollout source and the reward functions, and flush stored rollouts to disk."""
        self.resources.close()
