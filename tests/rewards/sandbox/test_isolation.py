# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import json
import subprocess
import sys
from pathlib import Path

import pytest

from marin_rl.rewards.sandbox.isolation import Isolation, SelfTest


def test_levels_are_ordered():
    assert sorted(Isolation, key=lambda level: level.rank) == [Isolation.NONE, Isolation.PARTIAL, Isolation.FULL]


def test_unconfined_program_finds_every_hole(tmp_path: Path):
    """Run the program without a sandbox, to check that it detects every hole."""
    secret = tmp_path / "outside"
    secret.write_text("readable")
    probe = SelfTest(str(secret), processes=0, has_namespaces=True)
    ran = subprocess.run([sys.executable, "-I", "-c", probe.program], capture_output=True, text=True, check=True)
    assert set(probe.holes(ran.stdout)) == {
        "reads a file outside",
        "changes files outside",
        "opens sockets",
        "starts processes",
        "sees a file outside",
    }
    assert (tmp_path / "outside.new").exists()


def test_path_with_quotes(tmp_path: Path):
    secret = tmp_path / 'it\'s "outside"\n'
    secret.write_text("readable")
    probe = SelfTest(str(secret), processes=0, has_namespaces=True)
    ran = subprocess.run([sys.executable, "-I", "-c", probe.program], capture_output=True, text=True, check=True)
    assert "reads a file outside" in probe.holes(ran.stdout)


@pytest.mark.parametrize(
    ("processes", "has_namespaces", "holes"),
    [
        (0, True, ["starts processes", "sees a file outside"]),
        (1, True, ["sees a file outside"]),
        (0, False, ["starts processes"]),
        (1, False, []),
    ],
)
def test_allowed_actions_are_not_holes(processes: int, has_namespaces: bool, holes: list[str]):
    tried = {"reads a file outside": False, "starts processes": True, "sees a file outside": True}
    assert SelfTest("/x", processes, has_namespaces).holes(json.dumps(tried)) == holes


def test_forbidden_actions_are_holes_with_any_settings():
    assert SelfTest("/x", processes=9, has_namespaces=False).holes('{"opens sockets": true}') == ["opens sockets"]


@pytest.mark.parametrize("printed", ["", "Killed", "{"])
def test_invalid_output_is_an_error(printed: str):
    with pytest.raises(ValueError, match="Expecting"):
        SelfTest("/x", 0, True).holes(printed)
