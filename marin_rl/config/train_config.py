# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""The configuration of a training run."""

import dataclasses

# Registers the decoders and encoders of levanter's types.
import levanter.config  # noqa: F401
from levanter.models.lm_model import LmConfig
from levanter.optim.config import AdamConfig, OptimizerConfig
from levanter.tracker import TrackerConfig

from marin_rl.config.base_config import MODEL_METADATA, TRAINER_METADATA, AbstractTrainConfig
from marin_rl.config.combinations import CHECKS
from marin_rl.config.model_checks import MODEL_CHECKS
from marin_rl.utils.devices.trainer_config import AbstractTrainerConfig
from marin_rl.utils.settings.fields import may_change_by_name
from marin_rl.utils.storage import storage_path


@dataclasses.dataclass(frozen=True)
class TrainerConfig(AbstractTrainerConfig):
    """Mesh, precision, microbatches, trackers and settings of JAX."""

    tracker: TrackerConfig | tuple[TrackerConfig, ...] = ()
    """Where metrics are logged besides the run directory, such as `[{type: wandb}]`."""


@dataclasses.dataclass(frozen=True)
class TrainConfig(AbstractTrainConfig):
    """Configuration of a training run."""

    checks = (*CHECKS, *MODEL_CHECKS)

    model: LmConfig | None = dataclasses.field(default=None, metadata=MODEL_METADATA)
    optimizer: OptimizerConfig = dataclasses.field(default_factory=AdamConfig, metadata=may_change_by_name())
    trainer: TrainerConfig = dataclasses.field(default_factory=TrainerConfig, metadata=TRAINER_METADATA)

    @property
    def num_updates(self) -> int:
        """Number of updates of the run, the length of the learning-rate schedule."""
        # A run with 0 steps only warms up and exports, but a schedule needs at least one update.
        return max(self.num_steps, 1) * self.updates.per_step

    @property
    def run_name(self) -> str:
        """Name of the run in trackers."""
        return self.trainer.id or storage_path(self.run_dir).name
