# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Host-side state of a run: progress counters, rollout scheduler and replay buffer; saved in every checkpoint."""

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any, NamedTuple

from levanter.trainer_state import TrainerState

from marin_rl.config.sections import ReplayConfig
from marin_rl.distributed.replay_buffer import ReplayBuffer
from marin_rl.distributed.scheduler import RolloutScheduler, StalenessLimits
from marin_rl.runs.checkpoint import Checkpoints
from marin_rl.training.run_files import RUN_FILES, RunFiles
from marin_rl.types import RolloutGroup, WeightVersion
from marin_rl.utils import multihost
from marin_rl.utils.host_status import StopRequestedError
from marin_rl.utils.storage import StoragePath

REPLAY = "replay.bin"
"""File of the replay buffer in a checkpoint."""


@dataclasses.dataclass
class Progress:
    """Counters and small state of a run, saved as JSON in every checkpoint."""

    step: int = 0
    """Completed steps."""
    updates: int = 0
    """Completed weight updates; a step has several with epochs or minibatches."""
    tasks_drawn: int = 0
    """Training tasks drawn, without skipped ones."""
    prompts_skipped: int = 0
    """Training tasks skipped because their prompt is too long."""
    task_stream: dict[str, Any] = dataclasses.field(default_factory=dict)
    """State of the task stream: position in each environment and curriculum statistics."""
    episodes: int = 0
    """Rollouts sampled for training."""
    scheduler: dict[str, Any] = dataclasses.field(default_factory=dict)
    """State of the rollout scheduler: requested groups that are not complete."""
    worker_counts: dict[str, int] = dataclasses.field(default_factory=dict)
    """Counters of rollout workers and their groups, accumulated over restarts."""
    sampled_tokens: int = 0
    """Tokens sampled for training."""
    trained_tokens: int = 0
    """Tokens trained on; each epoch counts a token again."""
    vocab_size: int = 0
    """Vocabulary size of the model, which may exceed the tokenizer's."""
    evaluations: dict[str, dict[str, float]] = dataclasses.field(default_factory=dict)
    """Held-out metrics by milestone: `before warm start`, `before RL` and the latest `after RL`."""
    unrecorded: dict[str, float] = dataclasses.field(default_factory=dict)
    """Metrics of step `step` if the run was stopped during its evaluation; empty if the step is recorded."""


class Dropped(NamedTuple):
    """Groups that were dropped because they exceeded the maximum staleness."""

    count: int
    """Number of dropped groups, including those that earlier steps trained on."""
    untrained: list[RolloutGroup]
    """Dropped groups that no step trained on."""


@dataclasses.dataclass
class RunState:
    """State of a run that changes with every step, without weights and optimizer state."""

    progress: Progress
    """Counters, task stream and evaluations."""
    scheduler: RolloutScheduler
    """Tracks requested groups that are not complete."""
    replay: ReplayBuffer
    """Holds finished groups that wait for training."""

    @classmethod
    def create(
        cls, progress: Progress, replay: ReplayConfig, *, groups_per_step: int, max_batches: int, last_step: int
    ) -> "RunState":
        """Make the state of a run with this progress, and an empty replay buffer.

        Args:
            progress: progress of the run; new for a new run.
            replay: staleness limits.
            groups_per_step: number of groups in the batch of a step.
            max_batches: maximum number of batches of groups that are sampled for a step to replace dropped groups.
            last_step: last step of the run.
        """
        replacements = (max_batches - 1) * groups_per_step
        limits = StalenessLimits(groups_per_step, replay.max_staleness, replay.max_uses, replacements, last_step)
        buffer = ReplayBuffer(max_staleness=replay.max_staleness, max_uses=replay.max_uses)
        return cls(progress, RolloutScheduler(limits, progress.scheduler), buffer)

    def drop_stale(self, version: WeightVersion, max_staleness: int | None = None) -> Dropped:
        """Drop waiting groups that are too old, and request those again that were never trained on.

        Args:
            version: version of the weights to be updated.
            max_staleness: maximum age in versions; None for the configured maximum.
        """
        stale = self.replay.expire(version, max_staleness)
        untrained = [entry for entry in stale if entry.uses_left == self.scheduler.limits.max_uses]
        self.scheduler.retry(entry.task for entry in untrained)
        return Dropped(len(stale), [entry.group for entry in untrained])

    @contextlib.contextmanager
    def rolled_back_on_stop(self) -> Iterator[None]:
        """Restore scheduler, replay buffer and task stream if the block raises `StopRequestedError`.

        A checkpoint saved afterwards then holds the state after the last finished step.
        """
        progress, scheduler, replay = self.progress, self.scheduler.state, self.replay.copy()
        tasks_drawn, task_stream = progress.tasks_drawn, progress.task_stream
        prompts_skipped = progress.prompts_skipped
        try:
            yield
        except StopRequestedError:
            progress.tasks_drawn, progress.task_stream = tasks_drawn, task_stream
            progress.prompts_skipped = prompts_skipped
            self.scheduler, self.replay = RolloutScheduler(self.scheduler.limits, scheduler), replay
            raise

    def save(
        self,
        checkpoints: Checkpoints,
        trainer_state: TrainerState,
        worker_counts: dict[str, int],
        run_files: RunFiles,
    ) -> StoragePath:
        """Start to write a checkpoint with the complete state of the run.

        Args:
            checkpoints: checkpoint directory.
            trainer_state: weights, optimizer state and random key.
            worker_counts: counters of the rollout source.
            run_files: files of the run up to the step.

        Returns:
            The folder of the checkpoint, which is complete when its files are written in the background.
        """
        self.progress.scheduler = self.scheduler.state
        self.progress.worker_counts = worker_counts
        return checkpoints.save(
            trainer_state,
            self.progress.step,
            dataclasses.asdict(self.progress),
            {REPLAY: self.replay.encode(), RUN_FILES: run_files.encode()} if multihost.is_main() else {},
        )
