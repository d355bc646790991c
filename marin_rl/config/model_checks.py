# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Checks of a run's model and optimizer that need levanter's classes."""

import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING

import jax

from marin_rl.config.levanter_sections import check_optimizer
from marin_rl.learner.attention_kernel import PLATFORMS, attention_kernel
from marin_rl.models.conversion import check_model
from marin_rl.utils.settings.decode import default_of

_SCHEDULE = (
    *("warmup", "decay", "rewarmup", "cooldown", "cycles", "cycle_length", "haps"),
    *("lr_schedule", "min_lr_ratio"),
)
"""Settings of the learning-rate schedule."""

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


def _schedule(config: "TrainConfig") -> Iterator[str]:
    """Check that levanter can build the learning-rate schedule, whose phases must fit into the run."""
    if any(check_optimizer(config)):
        return
    optimizer = config.optimizer
    try:
        with warnings.catch_warnings(action="ignore"):
            # Traced, because a computation would start the devices, which only a run may do.
            jax.eval_shape(lambda: optimizer.lr_scheduler(config.num_updates)(0))
    except (ValueError, ArithmeticError) as error:
        keys = [key for key in _SCHEDULE if getattr(optimizer, key) != default_of(type(optimizer), key)]
        given = ", ".join(f"optimizer.{key} is {getattr(optimizer, key)!r}" for key in keys)
        yield (
            f"{given}, but the run has {config.num_updates} updates (num_steps x updates), for which levanter cannot "
            f"build the learning-rate schedule ({str(error).rstrip('.')}); set numbers of updates that fit into the "
            "run, or shares of it, such as 0.1"
        )


MODEL_CHECKS = (_row_length, _export, _schedule)
"""Checks of `TrainConfig`; each yields or raises its problems."""
