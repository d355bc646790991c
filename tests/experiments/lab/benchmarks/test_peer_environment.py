# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Environments of other programs, with a fake pip."""

import subprocess
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from experiments.lab.benchmarks import peer_environment
from experiments.lab.benchmarks.peer_environment import PeerInstallError, peer_python, peer_versions

REQUIREMENTS = (("program==1.0", "library==2.0"), ("program==1.0", "library"))


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Requirements that pip was asked to install; it has `library` in any version but 2.0."""
    asked: list[list[str]] = []

    def fake(command: Sequence[str], **_: Any) -> subprocess.CompletedProcess:
        if "venv" in command:
            Path(command[-1]).mkdir()
            return subprocess.CompletedProcess(command, 0, "", "")
        asked.append([*command[4:]])
        failed = "library" not in command
        return subprocess.CompletedProcess(command, int(failed), "", f"no {command[-1]}" if failed else "")

    monkeypatch.setattr(subprocess, "run", fake)
    monkeypatch.setattr(peer_environment, "PEERS", {"peer": REQUIREMENTS, "missing": REQUIREMENTS[:1]})
    return asked


def test_the_next_requirements_are_tried_and_the_environment_is_kept(
    installed: list[list[str]], tmp_path: Path
) -> None:
    for _ in range(2):
        assert peer_python("peer", tmp_path / "peer") == tmp_path / "peer" / "bin" / "python"
    assert installed == [list(one) for one in REQUIREMENTS]


def test_a_failure_names_the_remedy_and_leaves_no_folder(installed: list[list[str]], tmp_path: Path) -> None:
    with pytest.raises(
        PeerInstallError, match=r"program==1.0 could not be installed.*--peer_python.*\nno library==2.0"
    ):
        peer_python("missing", tmp_path / "peer")
    assert not (tmp_path / "peer").exists()


def test_versions_are_those_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_environment, "PEERS", {"peer": (("numpy==0.1", "jax"),)})
    found = peer_versions("peer", Path(sys.executable))
    assert found == {name: metadata.version(name) for name in ("numpy", "jax")}
