# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Print the results of `start_devices` on eight devices as a JSON object. Run by `test_devices.py`."""

import dataclasses
import json
import sys

from marin_rl.utils.devices.setup import DeviceError, start_devices
from marin_rl.utils.devices.trainer_config import TrainerConfig

CASES = {
    "data axis": {},
    "model axis": {"model_axis_size": 2},
    "replicas": {"replica_ici_axis_size": 4},
    "configured rows": {"per_device_parallelism": 5},
    "model axis too large": {"model_axis_size": 3},
    "replicas over slices": {"replica_dcn_axis_size": 2},
    "accelerator": {"require_accelerator": True},
}
OF_OTHER_MACHINE = {
    "pod": {"require_accelerator": True, "model_axis_size": 12, "replica_ici_axis_size": 2, "replica_dcn_axis_size": 2},
    "fitting": {"require_accelerator": True, "model_axis_size": 2, "replica_ici_axis_size": 4},
}


def outcome(changes: dict, of_other_machine: bool = False) -> str:
    """Return the rows per microbatch and per device, or the error message."""
    section = dataclasses.replace(TrainerConfig(), jax_compilation_cache_dir=None, **changes)
    try:
        started = start_devices(section, rows_per_device=3, of_other_machine=of_other_machine)
    except DeviceError as error:
        return str(error)
    return f"{started.rows_per_microbatch} rows, {started.per_device_parallelism} a device"


if __name__ == "__main__":
    outcomes = {name: outcome(changes) for name, changes in CASES.items()}
    outcomes |= {name: outcome(changes, of_other_machine=True) for name, changes in OF_OTHER_MACHINE.items()}
    json.dump(outcomes, sys.stdout)
