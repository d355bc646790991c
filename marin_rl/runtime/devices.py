# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Brings up jax for a run, and checks that batch and devices fit each other."""

import dataclasses

import jax
from levanter.trainer import TrainerConfig


class DeviceError(ValueError):
    """Devices, mesh and batch do not fit; names the numbers and a remedy."""


def start_devices(config: TrainerConfig, *, rows: int) -> TrainerConfig:
    """Apply the trainer's jax settings, join the distributed runtime, and complete the section.

    This is the part of levanter's `TrainerConfig.initialize` that has to do with devices; its logging,
    trackers and run ids are the run directory's business here.

    Args:
        config: levanter's section.
        rows: rows of a batch.

    Returns:
        The section with its batch sizes filled in for the devices at hand.

    Raises:
        DeviceError: if `rows` cannot be split over the mesh or into microbatches, or no accelerator was
            found where one is required.
    """
    config = dataclasses.replace(config)  # levanter completes the section in place
    config._initialize_jax_config()
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.3)
    config.distributed.initialize()
    if config.require_accelerator and jax.default_backend() == "cpu":
        raise DeviceError("trainer.require_accelerator is true, but jax found only a CPU; set it to false to use that")
    _check_mesh(config, rows)
    config._validate_and_set_defaults()
    return config


def _check_mesh(config: TrainerConfig, rows: int) -> None:
    devices = jax.device_count()
    fixed = config.model_axis_size * config.replica_ici_axis_size
    if config.num_devices_per_slice % fixed:
        raise DeviceError(
            f"{devices} devices cannot be split into trainer.model_axis_size {config.model_axis_size} x "
            f"trainer.replica_ici_axis_size {config.replica_ici_axis_size}: their product must divide a slice's devices"
        )
    data = config.data_axis_size
    if rows % data:
        raise DeviceError(
            f"a batch of {rows} rows (rollouts.prompts_per_step x rollouts.group_size) cannot be split over {data} "
            f"data-parallel devices; make it a multiple of {data}, or raise trainer.model_axis_size"
        )
    per_device = config.per_device_parallelism
    if per_device > 0 and rows % (per_device * data):
        raise DeviceError(
            f"a batch of {rows} rows cannot be split into microbatches of trainer.per_device_parallelism {per_device} "
            f"x {data} data-parallel devices; choose one that divides {rows // data}"
        )
