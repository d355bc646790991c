# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""The parts of a run that trains on data, built from its config."""

import dataclasses

from levanter.models.lm_model import LmHeadModel

from marin_rl.batching.packing import RowLayout
from marin_rl.batching.rl_example import PackedBatch, pack_batch
from marin_rl.batching.rollout_batch import RolloutBatch
from marin_rl.config.supervised_config import DpoConfig, SftConfig
from marin_rl.learner.loss import RlLoss, cross_entropy_loss
from marin_rl.learner.preference_loss import PreferenceLoss
from marin_rl.learner.train_step import Frozen, Learner
from marin_rl.model_parts import AbstractModelParts
from marin_rl.objectives.aggregation import SequenceMeanConfig, TokenMeanConfig
from marin_rl.utils.devices.setup import own_rows


@dataclasses.dataclass(frozen=True)
class SupervisedParts(AbstractModelParts):
    """The parts of a run that trains on data."""

    config: SftConfig | DpoConfig

    @property
    def loss(self) -> RlLoss | PreferenceLoss:
        """Loss of a microbatch: the cross-entropy, or that of pairs."""
        if isinstance(self.config, DpoConfig):
            return PreferenceLoss(self.config.loss, self.logprob_block)
        return cross_entropy_loss(self.logprob_block)

    @property
    def whole_rollouts(self) -> bool:
        """Whether all sequences of a row of data must be in one microbatch, as the answers of a pair."""
        return self.config.trains_on_pairs

    @property
    def layout(self) -> RowLayout:
        """Shape of the microbatches, with room for both answers of a pair.

        Raises:
            ValueError: if a microbatch has no room for a pair of the greatest length.
        """
        rows, row_length = self.row_layout.rows_per_microbatch, self.row_layout.row_length
        if self.config.trains_on_pairs and rows < 2 and row_length < 2 * self.config.batch.max_length:
            raise ValueError(
                f"trainer.per_device_parallelism is {self.config.trainer.per_device_parallelism}, so a microbatch is a "
                f"row of {row_length} positions, but both answers of a pair must fit into one; set at least 2"
            )
        return self.row_layout

    def make_learner(self, layout: RowLayout, base: LmHeadModel | None, teacher: LmHeadModel | None = None) -> Learner:
        """Make a learner for batches in a layout; see `AbstractModelParts`."""
        return Learner(
            self.trainer,
            self.config.optimizer,
            self.loss,
            num_updates=self.config.num_updates,
            capacity=layout.microbatches(self.config.batch.sequences_per_step),
            frozen=None if base is None else Frozen(base),
        )

    def pack(self, batch: RolloutBatch) -> PackedBatch:
        """Pack a batch into microbatches, of which this process gets its rows.

        The loss is the mean over pairs, or over the tokens on the loss mask.
        """
        pairs = self.config.trains_on_pairs
        return pack_batch(
            batch,
            SequenceMeanConfig() if pairs else TokenMeanConfig(),
            self.layout,
            pad_token_id=self.tokenizer.pad_token_id,
            own_rows=own_rows(self.trainer),
            ce_mask=None if pairs else batch.loss_mask,
        )
