# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Checks of a run's model that need levanter's model classes."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from marin_rl.learner.attention_kernel import PLATFORMS, attention_kernel
from marin_rl.models.conversion import check_model

if TYPE_CHECKING:
    from marin_rl.config.train_config import TrainConfig


def _row_length(config: "TrainConfig") -> Iterator[str]:
    """Check that a platform supports the row length; the run's platform is checked after jax has started."""
    errors = []
    for platform in PLATFORMS:
        try:
            config.rollouts.positions(attention_kernel(config.model, platform, config.context_shards))
        except ValueError as error:
            errors.append(str(error))
    if len(errors) == len(PLATFORMS):
        yield errors[0]


def _export(config: "TrainConfig") -> Iterator[str]:
    if config.model is not None:
        check_model(config.model, max_length=config.rollouts.max_length)
    yield from ()


MODEL_CHECKS = (_row_length, _export)
"""Checks of `TrainConfig`; each yields or raises its problems."""
