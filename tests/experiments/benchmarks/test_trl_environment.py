# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Creation of the environment with TRL, without a network."""

import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from experiments.benchmarks import trl_environment
from experiments.benchmarks.trl_environment import TRL, TrlInstallError, trl_python


class FakeRun:
    """Stands for `subprocess.run`; commands with a requirement in `missing` fail."""

    def __init__(self, missing: Sequence[str] = (), slow: Sequence[str] = ()) -> None:
        self.missing, self.slow = missing, slow
        self.commands: list[list[str]] = []

    def __call__(self, command: Sequence[str], *, timeout: float, **_: Any) -> subprocess.CompletedProcess[str]:
        self.commands.append(list(command))
        if set(self.slow) & set(command):
            raise subprocess.TimeoutExpired(command, timeout)
        if set(self.missing) & set(command):
            return subprocess.CompletedProcess(command, 1, "", "no matching distribution")
        if "venv" in command:
            Path(command[-1]).mkdir(parents=True)
        return subprocess.CompletedProcess(command, 0, "", "")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "trl"


def use(monkeypatch: pytest.MonkeyPatch, fake: FakeRun) -> FakeRun:
    monkeypatch.setattr(trl_environment.subprocess, "run", fake)
    return fake


def test_it_is_created_once(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    fake = use(monkeypatch, FakeRun())
    assert trl_python(folder) == trl_python(folder) == folder / "bin" / "python"
    assert [command[-2:] for command in fake.commands[1:]] == [[trl_environment.TORCH[0], TRL]]


def test_other_wheels_are_used_if_there_are_none_without_cuda(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    fake = use(monkeypatch, FakeRun(missing=[trl_environment.TORCH[0]]))
    trl_python(folder)
    assert [command[-2] for command in fake.commands[1:]] == list(trl_environment.TORCH)


@pytest.mark.parametrize(("reason", "message"), [("missing", "no matching distribution"), ("slow", "within 1800 s")])
def test_an_unreachable_registry_is_an_error_with_the_remedy(
    monkeypatch: pytest.MonkeyPatch, folder: Path, reason: str, message: str
) -> None:
    use(monkeypatch, FakeRun(**{reason: [TRL]}))
    with pytest.raises(TrlInstallError, match="pip config list") as caught:
        trl_python(folder)
    assert "--trl_python" in str(caught.value)
    assert message in str(caught.value)
    assert not folder.exists()


def test_an_incomplete_environment_is_replaced(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    folder.mkdir()
    (folder / "left over").touch()
    use(monkeypatch, FakeRun())
    trl_python(folder)
    assert not (folder / "left over").exists()


def test_without_venv_pip_is_not_tried(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    fake = use(monkeypatch, FakeRun(missing=["venv"]))
    with pytest.raises(TrlInstallError):
        trl_python(folder)
    assert len(fake.commands) == 1
