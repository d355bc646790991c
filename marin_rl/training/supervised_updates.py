# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""The updates of supervised training, of a run on data and of a warm start."""

import dataclasses
from collections.abc import Callable

from levanter.metrics import Metric
from levanter.trainer_state import TrainerState

from marin_rl.batching.rl_example import PackedBatch
from marin_rl.learner.train_step import Learner
from marin_rl.utils.devices.setup import collect_garbage


@dataclasses.dataclass
class SupervisedUpdates:
    """An update for each step. The batch of the next step is packed while the devices compute."""

    learner: Learner
    """Computes the updates."""
    pack: Callable[[int], PackedBatch]
    """Packs the batch of a step."""
    prepared: dict[int, PackedBatch] = dataclasses.field(default_factory=dict)
    """The batch of the next step."""

    def batch(self, step: int) -> PackedBatch:
        """Return the batch of a step."""
        return self.prepared.pop(step, None) or self.pack(step)

    def update(
        self, state: TrainerState, step: int, batch: PackedBatch, last: int
    ) -> tuple[TrainerState, dict[str, Metric]]:
        """Update the weights, and pack the batch of the next step unless this is the last one.

        `state` is **donated**. Returns the new state, and the metrics of the update.
        """
        state, pending = self.learner.dispatch(state, batch.microbatches, batch.layout.rows_per_microbatch)
        if step < last:
            self.prepared = {step + 1: self.pack(step + 1)}
        collect_garbage(step)
        return state, pending.wait()
