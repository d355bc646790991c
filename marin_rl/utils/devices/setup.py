# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""JAX initialization for a run, and validation of mesh and batch size against the devices."""

import contextlib
import dataclasses
import gc
import logging
import math
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Int64

from marin_rl.utils import multihost
from marin_rl.utils.devices.trainer_config import BATCH, DistributedConfig, TrainerConfig, TrainerT

logger = logging.getLogger(__name__)


class DeviceError(ValueError):
    """The mesh or the batch does not fit the devices."""


COLLECTION_THRESHOLD = 500_000
"""New objects after which Python collects garbage itself in `collect_rarely`; about 100 MB if all are garbage."""
MOST_IMMORTAL_OBJECTS = 10_000
"""More objects than Python exempts itself: a few hundred in a full collection of Python 3.12."""


def join_processes(config: TrainerConfig) -> None:
    """Apply the trainer's JAX settings and initialize `jax.distributed` if configured.

    Does nothing if `jax.distributed` is already initialized.
    """
    config.configure_jax()
    _check_cache()
    # Its handler would replace the program's own and only log SIGTERM. A stop request is passed on without it.
    jax.config.update("jax_enable_preemption_service", False)
    if not jax.distributed.is_initialized():
        config.distributed.initialize()


def _check_cache() -> None:
    """Disable jax's cache of compiled programs if it cannot be written; jax would print a warning for every program."""
    folder = jax.config.values["jax_compilation_cache_dir"]
    if folder is None or "://" in folder:
        return
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        logger.warning(
            "the folder of compiled programs %s cannot be written (%s), so every start compiles all programs; set "
            "trainer.jax_compilation_cache_dir to a folder that can be, or to null",
            folder,
            error.strerror,
        )
        jax.config.update("jax_compilation_cache_dir", None)


@contextlib.contextmanager
def exempt_from_collection() -> Iterator[None]:
    """Exempt the objects that exist now from Python's garbage collection, until the context ends.

    The modules of jax, the model and its programs are about a million objects, which stay. Each full collection would
    visit them all, and training steps create enough objects for several collections per second. Does nothing if the
    program has exempted objects already.
    """
    if gc.get_freeze_count() > MOST_IMMORTAL_OBJECTS:
        yield
        return
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@contextlib.contextmanager
def collect_rarely() -> Iterator[None]:
    """Let garbage collection wait for `COLLECTION_THRESHOLD` objects, for a loop that calls `collect_garbage`.

    The records of a step's rollouts trigger many collections, which together take longer than the other work of the
    host, in any of its threads.
    """
    thresholds = gc.get_threshold()
    gc.set_threshold(COLLECTION_THRESHOLD, *thresholds[1:])
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)


def collect_garbage(step: int) -> None:
    """Collect garbage; call it once per step while the devices compute. Every tenth call visits older objects, too."""
    gc.collect(2 if step % 10 == 0 else 1)


def platform_of(trainer: TrainerConfig) -> str:
    """Return the platform of the devices of a run: `cpu`, `gpu` or `tpu`."""
    return trainer.device_mesh.devices.flat[0].platform


def device_peak_bytes() -> int | None:
    """Return the peak memory use of the fullest device of this process; None if it is not tracked (CPU)."""
    statistics = [device.memory_stats() or {} for device in jax.local_devices()]
    return max((found["peak_bytes_in_use"] for found in statistics if "peak_bytes_in_use" in found), default=None)


def start_devices(
    config: TrainerConfig | None = None,
    *,
    rows_per_device: int | Callable[[str, int], int] = 1,
    alone: bool = False,
    of_other_machine: bool = False,
) -> TrainerConfig:
    """Apply the trainer's JAX settings, initialize `jax.distributed`, and fill in the rows of a microbatch.

    Args:
        config: the trainer section; None for the defaults: all devices, and float32.
        rows_per_device: microbatch rows on each data-parallel device if `per_device_parallelism` is not set; a number,
            or a function of the platform (`cpu`, `gpu` or `tpu`) and the number of data-parallel devices.
        alone: whether this process is separate from the trainer and must not join its distributed runtime.
        of_other_machine: whether the config is that of a run which may have had other devices. Its mesh is then changed
            if it does not fit these, and a CPU suffices.

    Returns:
        A copy of the config with `per_device_parallelism` set.

    Raises:
        DeviceError: if the mesh does not fit the devices, or a required accelerator is missing.
    """
    config = TrainerConfig() if config is None else config
    if alone:
        config = dataclasses.replace(config, distributed=DistributedConfig())
    join_processes(config)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.3)
    if not alone and jax.process_count() > 1 and not jax.distributed.is_initialized():
        raise DeviceError(
            f"jax found {jax.process_count()} processes, but trainer.distributed.initialize_jax_distributed is false; "
            "set it to true"
        )
    if of_other_machine:
        config = _fitted(config)
    if config.require_accelerator and jax.devices()[0].platform == "cpu":
        raise DeviceError("trainer.require_accelerator is true, but jax found only a CPU; set it to false to use that")
    _check_mesh(config)
    if not isinstance(rows_per_device, int):
        rows_per_device = rows_per_device(platform_of(config), config.data_axis_size)
    return dataclasses.replace(config, per_device_parallelism=microbatch_rows(config, rows_per_device))


def _fitted(config: TrainerT) -> TrainerT:
    """Return the config with a mesh that fits the devices: with the same model axis if possible, or a part of it."""
    config = dataclasses.replace(config, require_accelerator=False)
    try:
        _check_mesh(config)
    except DeviceError as error:
        model_axis = math.gcd(config.model_axis_size, config.num_devices_per_slice)
        logger.warning("%s. The run had other devices: its model axis has the size %d here", error, model_axis)
        changes = {"replica_ici_axis_size": 1, "replica_dcn_axis_size": 1, "model_axis_size": model_axis}
        return dataclasses.replace(config, **changes)
    return config


def microbatch_rows(config: TrainerConfig, default: int) -> int:
    """Return the microbatch rows on each data-parallel device.

    These are `per_device_parallelism` if it is set, else `default`.
    """
    return config.per_device_parallelism if config.per_device_parallelism > 0 else default


def _check_mesh(config: TrainerConfig) -> None:
    replicas, slices = config.replica_dcn_axis_size, config.num_slices
    if slices % replicas:
        raise DeviceError(
            f"trainer.replica_dcn_axis_size is {replicas}, but the number of slices is {slices}; set a number that "
            "divides it"
        )
    devices = jax.device_count()
    fixed = config.model_axis_size * config.replica_ici_axis_size
    if config.num_devices_per_slice % fixed:
        raise DeviceError(
            f"{devices} devices cannot be split into trainer.model_axis_size {config.model_axis_size} x "
            f"trainer.replica_ici_axis_size {config.replica_ici_axis_size}: their product must divide a slice's devices"
        )


def own_rows(config: TrainerConfig) -> Callable[[int], Int64[np.ndarray, " own"]] | None:
    """Return the function that lists the rows of a microbatch on the devices of this process.

    The config is as returned by `start_devices`.

    Returns:
        A function of the number of rows, which returns row numbers in ascending order; None with one process.
    """
    if not multihost.is_multihost():
        return None
    axes = config.compute_axis_mapping[BATCH]
    sharding = NamedSharding(config.device_mesh, PartitionSpec(axes))

    def rows(count: int) -> Int64[np.ndarray, " own"]:
        parts = sharding.addressable_devices_indices_map((count,)).values()
        return np.unique(np.concatenate([np.arange(count, dtype=np.int64)[part] for part in parts]))

    return rows
