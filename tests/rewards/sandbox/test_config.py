# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import os
import sys
from pathlib import Path

import pytest

from marin_rl.rewards.sandbox.config import (
    PACKAGE_ROOT,
    SandboxConfig,
    code_path,
    worker_command,
    worker_environment,
    worker_spec,
)
from marin_rl.rewards.sandbox.isolation import Isolation
from marin_rl.rewards.sandbox.protocol import CallLimits, WorkerSpec


def spec_of(file: str | None, config: SandboxConfig | None = None) -> WorkerSpec:
    return worker_spec(file, config or SandboxConfig(), Isolation.FULL, landlock=0)


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


def test_folder_of_file_is_readable_except_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    home = tmp_path / "home"
    monkeypatch.setenv("HOME", str(home))
    assert code_path(str(home / "project" / "rewards.py")) == str(home / "project")
    for file in (str(home / "rewards.py"), str(tmp_path / "rewards.py"), "/rewards.py"):
        assert code_path(file) == file


def test_python_and_file_are_readable_and_home_is_not(tmp_path: Path):
    file = tmp_path / "rewards.py"
    file.touch()
    readable = [Path(path) for path in spec_of(str(file)).read]
    for needed in (Path(sys.executable).resolve(), Path(os.__file__).resolve(), file):
        assert any(needed.is_relative_to(path.resolve()) for path in readable), needed
    for private in (Path.home(), Path("/etc/passwd"), Path("/"), Path(PACKAGE_ROOT) / "tests"):
        assert not any(private.is_relative_to(path) for path in readable), private
    assert all(path.exists() for path in readable)


def test_programs_cannot_read_this_package_and_read_paths(tmp_path: Path):
    paths = (str(tmp_path), __file__)
    config = SandboxConfig(read_paths=paths)
    programs, functions = spec_of(None, config), spec_of("/x/rewards.py", config)
    assert not any(path.startswith((PACKAGE_ROOT + "/marin_rl", *paths)) for path in programs.read)
    assert programs.python_path == ()
    assert {PACKAGE_ROOT + "/marin_rl", *paths} < set(functions.read)
    assert functions.python_path == (PACKAGE_ROOT, str(tmp_path))


def test_environment_is_not_inherited(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SECRET_KEY", "1")
    assert "SECRET_KEY" not in worker_environment("/tmp")
    spec = spec_of("/x/rewards.py", SandboxConfig(file_mb=1))
    command = worker_command(spec, "/usr/bin/bwrap")
    for argument in ("--unshare-all", "--die-with-parent", "--new-session", "--clearenv", "--as-pid-1"):
        assert argument in command
    # Only file systems in memory with a size limit are writable.
    assert "--bind" not in command
    for index, argument in enumerate(command):
        if argument == "--tmpfs":
            assert command[index - 2 : index] == ["--size", str(4 * 2**20)]
    assert worker_command(spec, None)[0] == sys.executable
