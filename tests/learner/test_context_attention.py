# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Rows whose positions are split over devices give the results of whole rows."""

import json
import os
import sys

import pytest

from tests import fork_server
from tests.cpu_host import cpu_host


@pytest.mark.slow
def test_split_positions_change_results_only_by_rounding() -> None:
    """Run in a separate process with four devices."""
    command = [sys.executable, "-m", "tests.learner.context_cases"]
    said = fork_server.run(command, {**os.environ, **cpu_host(4)})
    assert said.returncode == 0, said.stderr[-4000:]
    facts = json.loads(said.stdout.splitlines()[-1])
    for name in ("llama", "qwen3"):
        assert facts[f"{name} scale"] > 0.01
        assert max(facts[name]) < 1e-6
    # The kernel of TPUs, interpreted, against the products of XLA.
    assert facts["splash"] < 1e-5
    assert facts["step"] < 1e-5
    # Parameters are sharded over both axes of the mesh.
    assert facts["shards"] == 4
    assert facts["samples"]
