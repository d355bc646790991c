# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""What importing the package decides, and leaves to who decided already."""

import os
import subprocess
import sys

import pytest


@pytest.mark.parametrize(("given", "expected"), [(None, "off"), ("raise", "raise")])
def test_programs_are_without_callbacks_unless_one_asks_for_them(given: str | None, expected: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "EQX_ON_ERROR"}
    if given is not None:
        environment["EQX_ON_ERROR"] = given
    command = [sys.executable, "-c", "import marin_rl, os; print(os.environ['EQX_ON_ERROR'])"]
    told = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert told.stdout == f"{expected}\n"
