# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

from typing import Any

import pytest

from marin_rl.rewards.sandbox.config import SandboxConfig
from marin_rl.rewards.sandbox.limits import CallLimits


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"workers": 0}, "sandbox.workers is 0; it must be at least 1"),
        ({"memory_mb": 63}, "sandbox.memory_mb is 63; it must be at least 64"),
        ({"processes": -1}, "sandbox.processes is -1; it must be at least 0"),
        ({"threads": 0}, "sandbox.threads is 0; it must be at least 1"),
        ({"file_mb": 0}, "sandbox.file_mb is 0; it must be at least 1"),
        ({"output_kb": 0}, "sandbox.output_kb is 0; it must be at least 1"),
        ({"wall_seconds": 0.0}, "sandbox.wall_seconds is 0.0; it is a number of seconds above 0"),
        ({"cpu_seconds": float("nan")}, "sandbox.cpu_seconds is nan; it is a number of seconds above 0"),
        ({"start_seconds": float("inf")}, "sandbox.start_seconds is inf; it is a number of seconds above 0"),
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
