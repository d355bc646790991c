# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""The parts of a run that trains on data, built from its config."""

import dataclasses
import functools

from marin_rl.batching.packing import RowLayout
from marin_rl.config.train_config import SftConfig
from marin_rl.learner.loss import cross_entropy_loss
from marin_rl.learner.scoring import Scorer
from marin_rl.learner.train_step import Frozen, Learner
from marin_rl.model_parts import AbstractModelParts


@dataclasses.dataclass(frozen=True)
class SftParts(AbstractModelParts):
    """The parts of supervised fine-tuning."""

    config: SftConfig

    @property
    def whole_rollouts(self) -> bool:
        """Whether all sequences of a row of data must be in one microbatch: no, each has its own loss."""
        return False

    @property
    def layout(self) -> RowLayout:
        """Shape of the microbatches."""
        return self.row_layout

    @functools.cached_property
    def learner(self) -> Learner:
        """The learner, for batches in the layout of the run."""
        return Learner(
            self.trainer,
            self.config.optimizer,
            cross_entropy_loss(self.logprob_block),
            num_updates=self.config.num_updates,
            capacity=self.layout.microbatches(self.config.batch.size),
            frozen=None if self.base is None else Frozen(self.base),
        )

    @functools.cached_property
    def scorer(self) -> Scorer:
        """The scorer of held-out rows."""
        return Scorer(
            self.trainer,
            self.layout,
            pad_token_id=self.tokenizer.pad_token_id,
            temperature=1.0,
            block_size=self.logprob_block,
            capacity=self.layout.microbatches(self.config.batch.size),
            accuracy=True,
        )
