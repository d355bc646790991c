# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""What `start_devices` makes of rows on eight devices, as a JSON object on stdout. Run by `test_devices.py`."""

import dataclasses
import json
import os
import sys

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

from marin_rl.runtime.config import default_trainer
from marin_rl.runtime.devices import DeviceError, start_devices

CASES = {
    "fits": (16, {}),
    "model axis": (4, {"model_axis_size": 2}),
    "microbatches": (32, {"per_device_parallelism": 2}),
    "rows": (12, {}),
    "rows with model axis": (6, {"model_axis_size": 2}),
    "model axis too large": (16, {"model_axis_size": 3}),
    "microbatches do not fit": (24, {"per_device_parallelism": 2}),
    "accelerator": (16, {"require_accelerator": True}),
}


def outcome(rows: int, changes: dict) -> str:
    """How many rows a device takes at a time, or what is wrong."""
    section = dataclasses.replace(default_trainer(), train_batch_size=rows, jax_compilation_cache_dir=None, **changes)
    try:
        return f"{start_devices(section, rows=rows).per_device_parallelism} rows a device"
    except DeviceError as error:
        return str(error)


json.dump({name: outcome(rows, changes) for name, (rows, changes) in CASES.items()}, sys.stdout)
