# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""The parts of a run that trains on data, built from its config."""

import dataclasses
from typing import ClassVar

from levanter.models.lm_model import LmHeadModel
from levanter.optim.config import OptimizerConfig

from marin_rl.batching.packing import RowLayout
from marin_rl.batching.rl_example import OwnRows, PackedBatch, pack_batch
from marin_rl.batching.rollout_batch import RolloutBatch
from marin_rl.config.supervised_config import DpoConfig, SftConfig
from marin_rl.learner.loss import TOKEN_MEAN, RlLoss, cross_entropy_loss
from marin_rl.learner.preference_loss import PAIR_MEAN, PreferenceLoss
from marin_rl.learner.train_step import Frozen, Learner
from marin_rl.parts.model import AbstractModelParts, EqualStep, Lengths
from marin_rl.utils.devices.setup import own_rows
from marin_rl.utils.devices.trainer_config import TrainerConfig


def make_learner(
    trainer: TrainerConfig,
    optimizer: OptimizerConfig,
    loss: RlLoss | PreferenceLoss,
    layout: RowLayout,
    base: LmHeadModel | None,
    sequences: int,
    num_updates: int,
) -> Learner:
    """Make the learner of supervised training; `sequences` are those of an update, `base` is that of an adapter."""
    frozen = None if base is None else Frozen(base)
    capacity = layout.microbatches(sequences)
    return Learner(trainer, optimizer, loss, num_updates=num_updates, capacity=capacity, frozen=frozen)


def pack_tokens(
    batch: RolloutBatch,
    layout: RowLayout,
    pad_token_id: int,
    rows: OwnRows | None = None,
    *,
    has_router: bool = False,
) -> PackedBatch:
    """Pack a batch into microbatches whose loss is the mean cross-entropy of the tokens on the loss mask.

    `rows` returns those of a microbatch that this process gets; None for all. `has_router` is that of `pack_batch`.
    """
    return pack_batch(
        batch,
        TOKEN_MEAN,
        layout,
        pad_token_id=pad_token_id,
        own_rows=rows,
        ce_mask=batch.loss_mask,
        has_router=has_router,
    )


@dataclasses.dataclass(frozen=True)
class SupervisedParts(AbstractModelParts):
    """The parts of a run of supervised fine-tuning, and those that every run on data has."""

    measures_accuracy = True
    item: ClassVar[str] = "row"
    """Name of a row of data."""

    config: SftConfig | DpoConfig

    @property
    def loss(self) -> RlLoss | PreferenceLoss:
        """Loss of a microbatch."""
        return cross_entropy_loss(self.logprob_block)

    @property
    def optional_arrays(self) -> frozenset[str]:
        """Names of the arrays of a batch that not every loss reads."""
        return frozenset({"ce_weights", *self.router_arrays})

    @property
    def router_arrays(self) -> frozenset[str]:
        """Names of the arrays for the router of a mixture."""
        return frozenset({"router_weights"}) if self.has_router else frozenset()

    @property
    def whole_rollouts(self) -> bool:
        """Whether all sequences of a row of data must be in one microbatch."""
        return False

    @property
    def scores_data(self) -> bool:
        """Whether rows of data are scored, outside of updates."""
        return self.config.trains_on_pairs or self.config.source.holds_out

    def make_learner(self, layout: RowLayout, base: LmHeadModel | None, teacher: LmHeadModel | None = None) -> Learner:
        """Make a learner for batches in a layout; see `AbstractModelParts`."""
        sequences, updates = self.config.batch.sequences_per_step, self.config.num_updates
        return make_learner(self.trainer, self.config.optimizer, self.loss, layout, base, sequences, updates)

    def pack(self, batch: RolloutBatch) -> PackedBatch:
        """Pack a batch into microbatches, of which this process gets its rows."""
        pad, rows = self.tokenizer.pad_token_id, own_rows(self.trainer)
        return pack_tokens(batch, self.layout, pad, rows, has_router=self.has_router)

    def equal_step(self, lengths: Lengths | None = None) -> EqualStep:
        """Return a step with sequences of these lengths; None for the longest."""
        batch = self.config.batch
        lengths, each = lengths or Lengths(0, batch.max_length), batch.sequences_per_item
        items = f"{batch.size:,} {self.item}" + ("" if batch.size == 1 else "s")
        times = "" if each == 1 else f"{each} x "
        return EqualStep(
            f"{items} of {times}{sum(lengths):,} tokens, all with loss",
            lengths,
            batch.size,
            batch.sequences_per_step,
            1,
            [[sum(lengths)] * each] * batch.size,
        )


@dataclasses.dataclass(frozen=True)
class PreferenceParts(SupervisedParts):
    """The parts of a run that trains on pairs of answers."""

    measures_accuracy = False
    item = "pair"

    config: DpoConfig

    @property
    def loss(self) -> PreferenceLoss:
        """Loss of a microbatch."""
        return PreferenceLoss(self.config.loss, self.logprob_block)

    @property
    def optional_arrays(self) -> frozenset[str]:
        """Names of the arrays of a batch that not every loss reads."""
        return self.router_arrays

    def pack(self, batch: RolloutBatch) -> PackedBatch:
        """Pack a batch into microbatches, of which this process gets its rows. The loss is the mean over pairs."""
        pad, rows = self.tokenizer.pad_token_id, own_rows(self.trainer)
        router = self.has_router
        return pack_batch(batch, PAIR_MEAN, self.layout, pad_token_id=pad, own_rows=rows, has_router=router)

    @property
    def whole_rollouts(self) -> bool:
        """Whether both answers of a pair must be in one microbatch."""
        return True
