# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Environment variables of test programs with several CPU devices."""

import os
from pathlib import Path

ROOT = Path(__file__).parent.parent


def cpu_host(devices: int) -> dict[str, str]:
    """Return the environment variables that give a process this number of CPU devices."""
    return {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={devices}",
        "PYTHONPATH": str(ROOT),
    }
