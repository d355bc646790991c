# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Checks of the sections `optimizer` and `trainer`: settings that a run cannot use."""

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from marin_rl.utils.devices.trainer_config import DATA, MODEL, REPLICA, AbstractTrainerConfig
from marin_rl.utils.errors import nearest
from marin_rl.utils.levanter_line import UNUSABLE_OPTIMIZERS
from marin_rl.utils.remote_path import RemotePath
from marin_rl.utils.settings.section_types import choice_name, field_types, section_of
from marin_rl.utils.storage import storage_path

if TYPE_CHECKING:
    from marin_rl.config.base_config import AbstractTrainConfig


def check_optimizer(config: "AbstractTrainConfig") -> Iterator[str]:
    """Check that the update of the optimizer can be compiled, and that its learning rate is finite."""
    optimizer, name = config.optimizer, choice_name(config.optimizer)
    if not 0 <= optimizer.learning_rate < math.inf:
        yield (f"optimizer.learning_rate is {optimizer.learning_rate}; it must be a finite number of at least 0")
    yield from _schedule_problems(optimizer)
    schedules = section_of(field_types(type(optimizer))["lr_schedule"]).get_known_choices()
    if isinstance(optimizer.lr_schedule, str) and optimizer.lr_schedule not in schedules:
        yield f"optimizer.lr_schedule is {optimizer.lr_schedule!r}; {nearest(optimizer.lr_schedule, sorted(schedules))}"
    if name in UNUSABLE_OPTIMIZERS:
        usable = sorted(type(optimizer).get_known_choices().keys() - set(UNUSABLE_OPTIMIZERS))
        yield (
            f"optimizer.type is {name!r}, whose update in levanter cannot be compiled; use one of {', '.join(usable)}"
        )
    if name == "mars" and optimizer.max_grad_norm:
        yield (
            f"optimizer.max_grad_norm is {optimizer.max_grad_norm}, but levanter's clipping in mars cannot be "
            "compiled; set optimizer.max_grad_norm: null, or use optimizer: {type: adam}"
        )


def _schedule_problems(optimizer: Any) -> Iterator[str]:
    for key in ("warmup", "decay", "rewarmup", "cooldown"):
        value = getattr(optimizer, key)
        if value is not None and not (0 <= value <= 1 or (1 < value < math.inf and value == int(value))):
            yield (
                f"optimizer.{key} is {value}; it must be a fraction of the updates from 0 to 1, or a whole number of "
                "updates"
            )
    for key in ("weight_decay", "min_lr_ratio", "max_grad_norm"):
        value = getattr(optimizer, key, None)
        if value is not None and not 0 <= value < math.inf:
            yield f"optimizer.{key} is {value}; it must be a finite number of at least 0"
    for key in ("beta1", "beta2"):
        if not 0 <= getattr(optimizer, key, 0) < 1:
            yield f"optimizer.{key} is {getattr(optimizer, key)}; it must be at least 0 and below 1"


def check_trainer(config: "AbstractTrainConfig") -> Iterator[str]:
    """Check for settings of the trainer section that a run ignores or does not support."""
    trainer = config.trainer
    cache = trainer.jax_compilation_cache_dir
    if cache is not None and "://" in cache:
        path = storage_path(cache, "trainer.jax_compilation_cache_dir")
        if not isinstance(path, RemotePath) or path.protocol not in ("gs", "s3"):
            yield (
                f"trainer.jax_compilation_cache_dir is {cache!r}, but jax supports only gs:// and s3:// addresses "
                "besides paths on a mounted file system"
            )
    if trainer.per_device_parallelism < 1 and trainer.per_device_parallelism != -1:
        yield f"trainer.per_device_parallelism is {trainer.per_device_parallelism}; it must be at least 1, or -1"
    for name in trainer.jax_config.keys() - jax.config.values.keys():
        yield f"trainer.jax_config has {name!r}, which jax does not know; {nearest(name, sorted(jax.config.values))}"
    yield from _axis_problems(trainer)
    precision = trainer.mp
    if jnp.float16 in (precision.param_dtype, precision.compute_dtype, precision.output_dtype):
        yield (
            f"trainer.mp is '{precision}', but gradients of many tokens underflow in float16, because the loss is "
            "not scaled; use bfloat16, such as p=f32,c=bf16"
        )


def _axis_problems(trainer: AbstractTrainerConfig) -> Iterator[str]:
    mesh = (REPLICA, DATA, MODEL)
    for key in ("axis_resources", "parameter_axis_resources"):
        for name, given in getattr(trainer, key).items():
            axes = [given] if isinstance(given, str) else given
            if not set(axes) <= set(mesh) or len(set(axes)) < len(axes):
                yield f"trainer.{key}.{name} is {given!r}; it must be one of {', '.join(mesh)}, or a list of them"
