# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""The settings of supervised training."""

import dataclasses
from typing import Annotated, ClassVar

from annotated_types import Ge, Gt

from marin_rl.config.run_config import AbstractRunConfig
from marin_rl.config.sections import AbstractRowConfig
from marin_rl.data.config import DataConfig, LongSequences
from marin_rl.objectives.preference import PreferenceLossConfig
from marin_rl.utils.settings.checks import ConfigSection, check_fields
from marin_rl.utils.settings.fields import may_change, may_change_by_name


@dataclasses.dataclass(frozen=True)
class BatchRowsConfig(AbstractRowConfig):
    """Rows of data per update, and the layout of the rows of a microbatch."""

    section: ClassVar[str] = "batch"

    size: Annotated[int, Ge(1)] = 32
    """Rows of data per update."""
    max_length: Annotated[int, Ge(2)] = 1024
    """Maximum tokens of a sequence."""
    long_sequences: LongSequences = LongSequences.ERROR
    """Handling of longer sequences: `error` ends the run and names the row, `skip` leaves it out, `truncate` cuts the
    sequence after `max_length` tokens."""
    packing: bool | None = None
    """Whether a row of a microbatch holds several sequences, in segments that do not attend to one another and whose
    positions start at 0; false: one sequence per row; null: chosen for each batch from the lengths of its sequences, by
    cost."""
    row_length: Annotated[int, Ge(1)] | None = None
    """Positions of a row of a microbatch, at least `max_length`; null: `max_length`, for packed rows rounded up to a
    multiple of 128, and further if the attention kernel requires it. `trainer.per_device_parallelism` sets the rows
    per microbatch."""

    def __post_init__(self) -> None:
        check_fields(self)
        if problem := self.row_length_problem():
            raise ValueError(problem)

    @property
    def sequences_per_step(self) -> int:
        """Number of sequences that a step trains on, if a row of data has no more than it needs."""
        return self.size * self.sequences_per_item


@dataclasses.dataclass(frozen=True)
class BatchConfig(BatchRowsConfig):
    """Rows of data per update, and the layout of the rows of a microbatch."""


@dataclasses.dataclass(frozen=True)
class PairBatchConfig(BatchRowsConfig):
    """Pairs per update, and the layout of the rows of a microbatch, in which both answers of a pair must fit."""

    sequences_per_item: ClassVar[int] = 2

    def __post_init__(self) -> None:
        BatchRowsConfig.__post_init__(self)
        if self.long_sequences is LongSequences.TRUNCATE:
            raise ValueError(
                "batch.long_sequences is truncate, but a cut answer is not the one that was compared; use skip or error"
            )


@dataclasses.dataclass(frozen=True)
class LossEvaluationConfig(ConfigSection):
    """Measurement of the loss on held-out rows."""

    every: Annotated[int, Ge(0)] = 50
    """Steps between two evaluations, in addition to those before and after training; 0 evaluates only before and
    after."""

    def is_due(self, step: int, num_steps: int) -> bool:
        """Return whether to evaluate after `step` of `num_steps`."""
        return step == num_steps or (self.every > 0 and step % self.every == 0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class AbstractSupervisedConfig(AbstractRunConfig):
    """Settings of the commands that train on data."""

    trains_on_pairs: ClassVar[bool] = False
    """Whether a row of data is a pair of answers. The checkpoint of step 0 then holds the log-probabilities of the
    reference, and is always kept."""

    num_steps: Annotated[int, Ge(0)] = dataclasses.field(default=0, metadata=may_change_by_name())
    """Number of updates; 0: as many as `epochs` need."""
    epochs: Annotated[float, Gt(0)] = dataclasses.field(default=1.0, metadata=may_change_by_name())
    """Passes over the data, each in another order, if `num_steps` is 0."""
    batch: BatchRowsConfig
    """Rows of data per update, and their layout."""
    evaluation: LossEvaluationConfig = dataclasses.field(
        default=LossEvaluationConfig(), metadata=may_change("every") | may_change_by_name()
    )
    """Evaluation on held-out rows."""

    @property
    def source(self) -> DataConfig:
        """Source of the data."""
        return getattr(self, self.source_key)

    @property
    def rows(self) -> AbstractRowConfig:
        """Layout of batch rows."""
        return self.batch


@dataclasses.dataclass(frozen=True, kw_only=True)
class SftConfig(AbstractSupervisedConfig):
    """Configuration of supervised fine-tuning."""

    common_keys: ClassVar[tuple[str, ...]] = (
        *("data.path", "data.held_out", "run_dir", "model", "initialize_from", "tokenizer.path", "seed", "epochs"),
        *("num_steps", "batch.size", "batch.max_length", "batch.long_sequences", "optimizer", "evaluation.every"),
        "checkpoint.every",
    )
    command = "sft"
    source_key = "data"

    data: DataConfig
    """Rows to train on, in one of four forms: `messages` (and optional `tools`), `prompt` and `completion`, `text`, or
    `input_ids` with `labels` or `assistant_masks`."""
    batch: BatchConfig = BatchConfig()
    """Rows of data per update, and their layout."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DpoConfig(AbstractSupervisedConfig):
    """Configuration of direct preference optimization."""

    common_keys: ClassVar[tuple[str, ...]] = (
        *("preferences.path", "preferences.held_out", "run_dir", "initialize_from", "tokenizer.path", "seed", "epochs"),
        *("num_steps", "batch.size", "batch.max_length", "batch.long_sequences", "loss.beta", "optimizer"),
        *("evaluation.every", "checkpoint.every"),
    )
    command = "dpo"
    source_key = "preferences"
    trains_on_pairs: ClassVar[bool] = True

    preferences: DataConfig
    """Pairs of answers: `prompt`, `chosen` and `rejected`, or `chosen` and `rejected` as conversations that begin with
    the same prompt; optional `tools`."""
    loss: PreferenceLossConfig = dataclasses.field(default_factory=PreferenceLossConfig)
    """Loss of a pair."""
    batch: PairBatchConfig = PairBatchConfig()
    """Pairs per update, and their layout."""
