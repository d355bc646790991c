# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Brings up jax for a run, and checks that batch and devices fit each other."""

import dataclasses

import jax
from levanter.trainer import TrainerConfig


class DeviceError(ValueError):
    """Devices, mesh and batch do not fit; names the numbers and a remedy."""


def join_processes(config: TrainerConfig) -> None:
    """Apply the trainer's jax settings and join the distributed runtime, where the config asks for it; once.

    Args:
        config: levanter's section.
    """
    config._initialize_jax_config()
    if not jax.distributed.is_initialized():
        config.distributed.initialize()


def start_devices(config: TrainerConfig, *, rows_per_device: int, alone: bool = False) -> TrainerConfig:
    """Apply the trainer's jax settings, join the distributed runtime, and complete the section.

    This is the part of levanter's `TrainerConfig.initialize` that has to do with devices; its logging,
    trackers and run ids are the run directory's business here.

    Args:
        config: levanter's section.
        rows_per_device: rows in a pass on each data-parallel device, where `per_device_parallelism` does not say.
        alone: whether this process is none of the trainer's, and leaves its distributed runtime alone.

    Returns:
        The section with `train_batch_size` set to the rows of one pass, over all devices.

    Raises:
        DeviceError: if the mesh does not fit the devices, or no accelerator was found where one is required.
    """
    # Levanter completes the section in place, and warns where the batch size is not its own.
    config = dataclasses.replace(config)
    if alone:
        config.distributed = dataclasses.replace(config.distributed, initialize_jax_distributed=False)
    join_processes(config)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.3)
    if not alone and jax.process_count() > 1 and not jax.distributed.is_initialized():
        raise DeviceError(
            f"jax found {jax.process_count()} processes, but trainer.distributed.initialize_jax_distributed is false; "
            "set it to true"
        )
    if config.require_accelerator and jax.default_backend() == "cpu":
        raise DeviceError("trainer.require_accelerator is true, but jax found only a CPU; set it to false to use that")
    _check_mesh(config)
    config.per_device_parallelism = microbatch_rows(config, rows_per_device)
    config.train_batch_size = config.per_device_parallelism * config.data_axis_size
    config._validate_and_set_defaults()
    return config


def microbatch_rows(config: TrainerConfig, default: int) -> int:
    """Rows in a pass on each data-parallel device: `per_device_parallelism`, where it is set.

    Args:
        config: levanter's section.
        default: rows where it is not.
    """
    return config.per_device_parallelism if config.per_device_parallelism > 0 else default


def _check_mesh(config: TrainerConfig) -> None:
    devices = jax.device_count()
    fixed = config.model_axis_size * config.replica_ici_axis_size
    if config.num_devices_per_slice % fixed:
        raise DeviceError(
            f"{devices} devices cannot be split into trainer.model_axis_size {config.model_axis_size} x "
            f"trainer.replica_ici_axis_size {config.replica_ici_axis_size}: their product must divide a slice's devices"
        )
