# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0


import pytest

from marin_rl.rewards.sandbox.config import SandboxConfig
from marin_rl.rewards.sandbox.protocol import CallLimits


def test_missing_paths_are_named():
    with pytest.raises(ValueError, match=r"sandbox\.read_paths: /no/such/folder does not exist"):
        SandboxConfig(read_paths=("/no/such/folder",))


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
