# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""The configuration of a training run."""

import dataclasses

from levanter.models.lm_model import LmConfig
from levanter.optim import AdamConfig, OptimizerConfig
from levanter.trainer import TrainerConfig

from marin_rl.config.base_config import TRAINER_METADATA, AbstractTrainConfig
from marin_rl.config.combinations import CHECKS
from marin_rl.config.levanter_sections import default_trainer
from marin_rl.config.model_checks import MODEL_CHECKS
from marin_rl.config_fields import may_change_by_name
from marin_rl.storage import storage_path


@dataclasses.dataclass(frozen=True)
class TrainConfig(AbstractTrainConfig):
    """Configuration of a training run."""

    checks = (*CHECKS, *MODEL_CHECKS)

    model: LmConfig | None = None
    optimizer: OptimizerConfig = dataclasses.field(default_factory=AdamConfig, metadata=may_change_by_name())
    trainer: TrainerConfig = dataclasses.field(default_factory=default_trainer, metadata=TRAINER_METADATA)

    @property
    def num_updates(self) -> int:
        """Number of updates of the run, the length of the learning-rate schedule."""
        # A run with 0 steps only warms up and exports, but a schedule needs at least one update.
        return max(self.num_steps, 1) * self.updates.per_step

    def trainer_config(self) -> TrainerConfig:
        """Levanter's trainer section with the number of steps, the seed and the run's name."""
        return dataclasses.replace(
            self.trainer,
            num_train_steps=self.num_steps,
            seed=self.seed,
            id=self.trainer.id or storage_path(self.run_dir).name,
        )
