# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Tests on levanter's other line find a Python, and nothing of this environment reaches them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import check

ABSENT = "3.3"
"""A version of Python that no machine with this package has."""


def script(path: Path, text: str) -> Path:
    """Write an executable shell script."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine without the other Python, and a checkout without environments."""
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}/usr/bin{os.pathsep}/bin")
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path / "pyenv"))
    monkeypatch.setattr(check, "OTHER_PYTHON", ABSENT)
    monkeypatch.setattr(check, "ROOT", tmp_path / "checkout")
    return tmp_path


def test_python_of_pyenv_is_found_behind_a_program_that_fails(machine: Path) -> None:
    script(machine / "bin" / f"python{ABSENT}", "echo 'the version is not selected' >&2; exit 127")
    script(machine / "pyenv" / "versions" / f"{ABSENT}.0" / "bin" / "python", "echo 3.4")
    python = script(machine / "pyenv" / "versions" / f"{ABSENT}.1" / "bin" / "python", f"echo {ABSENT}")
    assert list(check.find_pythons(ABSENT)) == [str(python)]


def test_existing_environment_is_used_again(machine: Path) -> None:
    python = script(machine / "bin" / f"python{ABSENT}", f"echo {ABSENT}")
    (_, make), *rest = check.checks_of_other_line()
    assert make[-5:] == [str(python), "-m", "venv", "--clear", str(machine / "checkout" / f".venv-{ABSENT}")]
    script(machine / "checkout" / f".venv-{ABSENT}" / "bin" / "python", f"echo {ABSENT}")
    assert check.checks_of_other_line() == rest


def test_commands_for_the_other_python_have_a_clean_environment(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script(machine / "bin" / f"python{ABSENT}", f"echo {ABSENT}")
    monkeypatch.setenv("PYTHONPATH", "/somewhere")
    monkeypatch.setenv("VIRTUAL_ENV", "/elsewhere")
    folder = machine / "checkout" / f".venv-{ABSENT}"
    for _, command in check.checks_of_other_line():
        prefix = command[: command.index("-m") - 1]
        printed = subprocess.run([*prefix, "env"], capture_output=True, text=True, check=True).stdout
        values = dict(line.split("=", 1) for line in printed.splitlines() if "=" in line)
        assert "PYTHONPATH" not in values
        assert values["VIRTUAL_ENV"] == str(folder)
        assert values["PATH"].startswith(f"{folder}/bin:")


def test_without_the_python_the_last_lines_say_that_nothing_was_tested(
    machine: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["check", "--other_line"])
    assert check.main() == 1
    assert "NOTHING WAS TESTED" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["check", "--all"])
    monkeypatch.setattr(check, "run", lambda checks: 0)
    assert check.main() == 0
    assert "NOTHING WAS TESTED" in capsys.readouterr().out


@pytest.mark.parametrize("path", check.OTHER_TESTS)
def test_tests_of_the_other_line_exist(path: str) -> None:
    assert (check.ROOT / path).exists()
