# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""A run: everything that its steps work with, and what can be done with all of it at once."""

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from levanter.models.lm_model import LmHeadModel
from levanter.trainer import TrainerConfig
from levanter.trainer_state import TrainerState

from marin_rl import processes
from marin_rl.environments.base import Environment
from marin_rl.environments.task_stream import TaskStream, task_stream
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
from marin_rl.runtime.config import TrainConfig
from marin_rl.runtime.policy_engine import PolicyEngine
from marin_rl.runtime.progress import Progress
from marin_rl.runtime.rollout_source import RolloutSource, StopRequestedError
from marin_rl.runtime.run_directory import writing
from marin_rl.tokenization.chat import ChatTokenizer
from marin_rl.types import RolloutGroup, WeightVersion

REPLAY = "replay.parquet"
"""The replay buffer's file in a checkpoint."""


class Dropped(NamedTuple):
    """Groups that were dropped because they had grown too old."""

    count: int
    """How many, with those that earlier steps have trained on."""
    untrained: list[RolloutGroup]
    """Those that no step has trained on."""


@dataclasses.dataclass
class TrainingRun:
    """A run, ready to go on."""

    config: TrainConfig
    """What was asked for."""
    trainer: TrainerConfig
    """Levanter's section, completed for the devices at hand."""
    environment: Environment
    """Tasks and judge."""
    tokenizer: ChatTokenizer
    """Text to tokens and back."""
    sampler: PolicyEngine
    """Holds the current weights."""
    learner: Learner
    """Makes new ones."""
    scorer: Scorer
    """Log-probs and values of rollouts under given weights."""
    reference: LmHeadModel | None
    """The frozen reference, if `kl` has a coefficient above 0 or watches it; otherwise it is neither loaded nor run."""
    checkpoints: Checkpoints
    """Where state is saved."""
    store: RolloutStore
    """Writes rollouts."""
    state: TrainerState
    """Weights, optimizer moments, random key."""
    progress: Progress
    """The host's share of the state."""
    runner: RolloutRunner
    """Plays episodes under the current weights."""
    rollout_source: RolloutSource
    """Plays the groups that are trained on."""
    orders: RolloutScheduler
    """Groups that were ordered and have not come."""
    replay: ReplayBuffer
    """Groups that have come and wait to be trained on."""
    history: WeightHistory[LmHeadModel] | None
    """The weights that groups in the buffer were sampled with, where a correction is to be computed from them."""
    opened: contextlib.ExitStack
    """Ends what runs beside the training: the crew, the store, and the reward functions with their loop."""

    @property
    def stream(self) -> TaskStream:
        """Draws the run's training tasks; where it stands is in the progress."""
        return task_stream(self.environment, self.config.seed)

    def publish(self) -> None:
        """Hand the learner's weights to those who sample; the trainer's own sampler takes them without a copy."""
        self.sampler.update(policy_of(self.state.model), self.progress.step)
        self.offer()

    def offer(self) -> None:
        """Hand the learner's weights to those who keep them, or play with them elsewhere."""
        policy = policy_of(self.state.model)
        if self.history is not None:
            self.history.keep(policy, self.progress.step)
        self.rollout_source.publish(policy, self.progress.step)

    def drop_stale(self, version: WeightVersion, max_staleness: int | None = None) -> Dropped:
        """Drop waiting groups that are too old, and order anew what was not trained on even once.

        Args:
            version: of the weights that are to be updated.
            max_staleness: what is too old; None for the configured bound.
        """
        stale = self.replay.expire(version, max_staleness)
        untrained = [one for one in stale if one.uses_left == self.orders.pace.max_uses]
        self.orders.again(one.task for one in untrained)
        return Dropped(len(stale), [one.group for one in untrained])

    @contextlib.contextmanager
    def undone_on_stop(self) -> Iterator[None]:
        """Take back what the block did to orders, replay buffer and task stream if it ends because of a stop request.

        A checkpoint that is saved then is one of the last finished step.
        """
        progress, orders, replay = self.progress, self.orders.state, self.replay.copy()
        tasks_drawn, task_stream = progress.tasks_drawn, progress.task_stream
        prompts_skipped = progress.prompts_skipped
        try:
            yield
        except StopRequestedError:
            progress.tasks_drawn, progress.task_stream = tasks_drawn, task_stream
            progress.prompts_skipped = prompts_skipped
            self.orders, self.replay = RolloutScheduler(self.orders.pace, orders), replay
            raise

    def save(self) -> Path:
        """Write a checkpoint of everything that a resume needs; the rollouts before it are on the disk first."""
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
        """Hand a step's rollouts to the store, which writes what the config asks for."""
        if not processes.is_main():
            return
        with writing(self.store.folder):
            self.store.write(step, groups, signals, stale=stale)

    def store_evaluation(self, groups: Sequence[RolloutGroup]) -> None:
        """Hand the rollouts of an evaluation of the current weights to the store."""
        with writing(self.store.folder):
            self.store.write(self.progress.step, groups, {}, EVALUATION)

    def close(self) -> None:
        """End what runs beside the training; rollouts that are under way reach the disk."""
        self.opened.close()
