# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Importing the package sets `EQX_ON_ERROR` unless it is set already."""

import os
import subprocess
import sys

import pytest


@pytest.mark.parametrize(("given", "expected"), [(None, "off"), ("raise", "raise")])
def test_import_disables_equinox_runtime_checks_by_default(given: str | None, expected: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "EQX_ON_ERROR"}
    if given is not None:
        environment["EQX_ON_ERROR"] = given
    command = [sys.executable, "-c", "import marin_rl, os; print(os.environ['EQX_ON_ERROR'])"]
    completed = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert completed.stdout == f"{expected}\n"
