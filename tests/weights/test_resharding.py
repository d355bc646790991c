# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import json
import os
import pathlib
import subprocess
import sys

import pytest

import marin_rl


@pytest.mark.parametrize("way", ["arrow_flight", "shared_files"])
def test_weights_are_resharded_from_four_hosts_to_other_meshes(way: str, tmp_path):
    script = pathlib.Path(__file__).with_name("resharding.py")
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
        "PYTHONPATH": str(pathlib.Path(marin_rl.__file__).parents[1]),
    }
    command = [sys.executable, str(script), way, str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    measured = json.loads(done.stdout.splitlines()[-1])
    meshes = ["same", "turned", "flat", "part", "single"]
    assert measured == {"devices": 8, "equal": dict.fromkeys(meshes, True), "placed": dict.fromkeys(meshes, True)}
    assert list(tmp_path.iterdir()) == []
