# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import os
import sys
from pathlib import Path

import pytest

from marin_rl.rewards.sandbox.command import (
    code_path,
    package_root,
    python_path,
    readable_paths,
    worker_command,
    worker_environment,
)
from marin_rl.rewards.sandbox.config import SandboxConfig
from marin_rl.rewards.sandbox.protocol import WorkerSpec


def test_folder_of_file_is_readable_except_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    home = tmp_path / "home"
    monkeypatch.setenv("HOME", str(home))
    assert code_path(str(home / "project" / "rewards.py")) == str(home / "project")
    assert code_path(str(home / "rewards.py")) == str(home / "rewards.py")
    assert code_path(str(tmp_path / "rewards.py")) == str(tmp_path / "rewards.py")
    assert code_path("/rewards.py") == "/rewards.py"


def test_python_and_file_are_readable_and_home_is_not(tmp_path: Path):
    file = tmp_path / "rewards.py"
    file.touch()
    readable = [Path(path) for path in readable_paths(str(file), [str(tmp_path / "missing")])]
    for needed in (Path(sys.executable).resolve(), Path(os.__file__).resolve(), file):
        assert any(needed.is_relative_to(path.resolve()) for path in readable), needed
    for private in (Path.home(), Path("/etc/passwd"), Path("/"), Path(package_root()) / "tests"):
        assert not any(private.is_relative_to(path) for path in readable), private
    assert all(path.exists() for path in readable)


def test_programs_cannot_read_this_package(tmp_path: Path):
    assert not any(path.startswith(package_root() + "/marin_rl") for path in readable_paths(None, []))
    assert python_path(None, []) == ()
    assert python_path("/x/rewards.py", [str(tmp_path), __file__]) == (package_root(), str(tmp_path))


def test_environment_is_not_inherited(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SECRET_KEY", "1")
    assert "SECRET_KEY" not in worker_environment("/tmp")
    spec = WorkerSpec("/x/rewards.py", "", ("/usr",), (), (), True, 0, True, 1.0, SandboxConfig(file_mb=1).limits())
    command = worker_command(spec, "/usr/bin/bwrap")
    for argument in ("--unshare-all", "--die-with-parent", "--new-session", "--clearenv", "--as-pid-1"):
        assert argument in command
    # Only file systems in memory with a size limit are writable.
    assert "--bind" not in command
    for index, argument in enumerate(command):
        if argument == "--tmpfs":
            assert command[index - 2 : index] == ["--size", str(4 * 2**20)]
    assert worker_command(spec, None)[0] == sys.executable
