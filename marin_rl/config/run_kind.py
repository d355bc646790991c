# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""The commands that train, and the config classes of each, which are imported when they are needed."""

import enum
from collections.abc import Mapping
from typing import Any

from marin_rl.config.run_config import AbstractRunConfig


class RunKind(enum.StrEnum):
    """A command that trains, by its name after `python -m marin_rl.`."""

    TRAIN = "train"
    """Reinforcement learning; the config has `environment`."""
    SFT = "sft"
    """Supervised fine-tuning; the config has `data`."""
    DPO = "dpo"
    """Direct preference optimization; the config has `preferences`."""

    @property
    def key(self) -> str:
        """The key that only configs of this command have."""
        return {RunKind.TRAIN: "environment", RunKind.SFT: "data", RunKind.DPO: "preferences"}[self]

    @staticmethod
    def of(values: Mapping[str, Any]) -> "RunKind":
        """Return the command of a config from its keys."""
        return next((kind for kind in RunKind if kind.key in values), RunKind.TRAIN)

    @staticmethod
    def of_config(config: AbstractRunConfig) -> "RunKind":
        """Return the command of a config."""
        return next(kind for kind in RunKind if isinstance(config, kind.config))

    @property
    def config(self) -> type[AbstractRunConfig]:
        """The class of the config."""
        from marin_rl.config.supervised_config import DpoConfig, SftConfig
        from marin_rl.config.train_config import TrainConfig

        return {RunKind.TRAIN: TrainConfig, RunKind.SFT: SftConfig, RunKind.DPO: DpoConfig}[self]
