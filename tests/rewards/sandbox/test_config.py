# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

from typing import Any

import pytest

from marin_rl.rewards.sandbox.config import SandboxConfig
from marin_rl.rewards.sandbox.protocol import CallLimits


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"workers": 0}, "sandbox.workers must be at least 1, got 0"),
        ({"memory_mb": 63}, "sandbox.memory_mb must be at least 64, got 63"),
        ({"processes": -1}, "sandbox.processes must be at least 0, got -1"),
        ({"threads": 0}, "sandbox.threads must be at least 1, got 0"),
        ({"file_mb": 0}, "sandbox.file_mb must be at least 1, got 0"),
        ({"output_kb": 0}, "sandbox.output_kb must be at least 1, got 0"),
        ({"wall_seconds": 0.0}, "sandbox.wall_seconds must be a finite number of seconds above 0, got 0.0"),
        ({"cpu_seconds": float("nan")}, "sandbox.cpu_seconds must be a finite number of seconds above 0, got nan"),
        ({"start_seconds": float("inf")}, "sandbox.start_seconds must be a finite number of seconds above 0, got inf"),
        ({"read_paths": ("/no/such/folder",)}, "sandbox.read_paths: /no/such/folder does not exist"),
    ],
)
def test_wrong_values_are_named(fields: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        SandboxConfig(**fields)


def test_limits_are_in_bytes():
    assert SandboxConfig(memory_mb=100, file_mb=2, output_kb=3).limits() == CallLimits(
        wall_seconds=10.0,
        cpu_seconds=10.0,
        memory_bytes=100 * 1024 * 1024,
        processes=0,
        threads=64,
        file_bytes=2 * 1024 * 1024,
        output_bytes=3 * 1024,
    )
