# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""A training run: its components and the operations that involve several of them."""

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from levanter.models.lm_model import LmHeadModel
from levanter.trainer import TrainerConfig
from levanter.trainer_state import TrainerState

from marin_rl import multihost
from marin_rl.config.train_config import TrainConfig
from marin_rl.environments.base import AbstractEnvironment, TaskStream
from marin_rl.learner.checkpoint import Checkpoints
from marin_rl.learner.critic import policy_of
from marin_rl.learner.scoring import Scorer
from marin_rl.learner.train_step import Learner
from marin_rl.learner.weight_history import WeightHistory
from marin_rl.rollouts.replay_buffer import ReplayBuffer
from marin_rl.rollouts.run_rollouts import RolloutRunner
from marin_rl.rollouts.scheduler import RolloutScheduler
from marin_rl.rollouts.store import EVALUATION, RolloutStore
from marin_rl.rollouts.stored_rollout import StoredAdvantages
from marin_rl.runtime.policy_engine import PolicyEngine
from marin_rl.runtime.progress import Progress
from marin_rl.runtime.rollout_source import RolloutSource, StopRequestedError
from marin_rl.runtime.run_directory import writing
from marin_rl.tokenization.chat import ChatTokenizer
from marin_rl.types import RolloutGroup, WeightVersion

REPLAY = "replay.parquet"
"""File of the replay buffer in a checkpoint."""


class Dropped(NamedTuple):
    """Groups that were dropped because they exceeded the maximum staleness."""

    count: int
    """Number of dropped groups, including those that earlier steps trained on."""
    untrained: list[RolloutGroup]
    """Dropped groups that no step trained on."""


@dataclasses.dataclass
class TrainingRun:
    """The components and the state of a run."""

    config: TrainConfig
    """Training config."""
    trainer: TrainerConfig
    """Levanter's trainer config, as returned by `start_devices`."""
    environment: AbstractEnvironment
    """Provides tasks and rewards."""
    tokenizer: ChatTokenizer
    """Converts chat messages to tokens and back."""
    sampler: PolicyEngine
    """Samples in this process; holds the current weights."""
    learner: Learner
    """Computes weight updates."""
    scorer: Scorer
    """Computes log-probs and values of rollouts under given weights."""
    reference: LmHeadModel | None
    """Frozen reference policy; None if `kl` does not need it."""
    checkpoints: Checkpoints
    """Saves and loads checkpoints."""
    store: RolloutStore
    """Writes rollouts to the run directory."""
    state: TrainerState
    """Weights, optimizer state and random key."""
    progress: Progress
    """Host-side state."""
    runner: RolloutRunner
    """Runs episodes in this process, with the current weights."""
    rollout_source: RolloutSource
    """Samples the groups to train on."""
    orders: RolloutScheduler
    """Tracks requested groups that are not complete."""
    replay: ReplayBuffer
    """Holds finished groups that wait for training."""
    history: WeightHistory[LmHeadModel] | None
    """Weights that the buffered groups were sampled with, if the off-policy correction needs them."""
    opened: contextlib.ExitStack
    """Closes the rollout source, the store, the reward functions and the event loop."""

    @property
    def stream(self) -> TaskStream:
        """Stream of training tasks; its position is in `progress`."""
        return self.environment.stream(self.config.seed)

    def publish(self) -> None:
        """Send the learner's weights to all samplers; the sampler of this process uses them without a copy."""
        self.sampler.update(policy_of(self.state.model), self.progress.step)
        self.offer()

    def offer(self) -> None:
        """Send the learner's weights to the weight history and to the rollout source."""
        policy = policy_of(self.state.model)
        if self.history is not None:
            self.history.keep(policy, self.progress.step)
        self.rollout_source.publish(policy, self.progress.step)

    def drop_stale(self, version: WeightVersion, max_staleness: int | None = None) -> Dropped:
        """Drop waiting groups that are too old, and request those again that were never trained on.

        Args:
            version: version of the weights to be updated.
            max_staleness: maximum age in versions; None for the configured maximum.
        """
        stale = self.replay.expire(version, max_staleness)
        untrained = [entry for entry in stale if entry.uses_left == self.orders.limits.max_uses]
        self.orders.retry(entry.task for entry in untrained)
        return Dropped(len(stale), [entry.group for entry in untrained])

    @contextlib.contextmanager
    def undone_on_stop(self) -> Iterator[None]:
        """Restore scheduler, replay buffer and task stream if the block raises `StopRequestedError`.

        A checkpoint saved afterwards then holds the state after the last finished step.
        """
        progress, orders, replay = self.progress, self.orders.state, self.replay.copy()
        tasks_drawn, task_stream = progress.tasks_drawn, progress.task_stream
        prompts_skipped = progress.prompts_skipped
        try:
            yield
        except StopRequestedError:
            progress.tasks_drawn, progress.task_stream = tasks_drawn, task_stream
            progress.prompts_skipped = prompts_skipped
            self.orders, self.replay = RolloutScheduler(self.orders.limits, orders), replay
            raise

    def save(self) -> Path:
        """Write a checkpoint with the complete state of the run, after flushing the rollout store."""
        with writing(self.store.folder):
            self.store.flush()
        self.progress.orders = self.orders.state
        self.progress.worker_counts = self.rollout_source.counts
        return self.checkpoints.save(
            self.state,
            self.progress.step,
            dataclasses.asdict(self.progress),
            lambda into: self.replay.save(into / REPLAY),
        )

    def store_rollouts(
        self,
        step: int,
        groups: Sequence[RolloutGroup],
        signals: Mapping[str, StoredAdvantages],
        stale: Sequence[RolloutGroup] = (),
    ) -> None:
        """Store the rollouts of a step."""
        if not multihost.is_main():
            return
        with writing(self.store.folder):
            self.store.write(step, groups, signals, stale=stale)

    def store_evaluation(self, groups: Sequence[RolloutGroup]) -> None:
        """Store the rollouts of an evaluation of the current weights."""
        with writing(self.store.folder):
            self.store.write(self.progress.step, groups, {}, EVALUATION)

    def close(self) -> None:
        """Stop the rollout source and the reward functions, and flush stored rollouts to disk."""
        self.opened.close()
