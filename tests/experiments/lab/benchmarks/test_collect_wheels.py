# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import importlib.metadata
import re
import zipfile
from pathlib import Path

import pytest

from experiments.lab.benchmarks import collect_wheels
from experiments.lab.benchmarks.collect_wheels import conflicts, main
from experiments.lab.benchmarks.gpu import install


def write_distribution(folder: Path, name: str, requires: list[str]) -> importlib.metadata.Distribution:
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir()
    lines = [f"Name: {name}", "Version: 1.0", *(f"Requires-Dist: {one}" for one in requires)]
    (info / "METADATA").write_text("\n".join(["Metadata-Version: 2.1", *lines]))
    return importlib.metadata.Distribution.at(info)


def test_versions_outside_a_declared_range_are_conflicts(tmp_path: Path):
    requires = ["transformers<5.13", "numpy>=2", "absent>=1", "ray>=2; extra == 'ray'", "jax>=0.9,<0.12"]
    carried = {"levanter": write_distribution(tmp_path, "levanter", requires)}
    installed = {"transformers": "5.17.0", "numpy": "2.5.5", "ray": "1.0", "jax": "0.11.2"}
    assert list(conflicts(carried, installed)) == [("transformers", "5.17.0", "levanter needs transformers<5.13")]


@pytest.mark.medium
def test_only_missing_packages_are_collected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    wanted: list[str] = []

    def build(requirements: list[str], folder: Path) -> None:
        wanted.extend(requirements)
        folder.mkdir()
        for requirement in requirements:
            (folder / f"{requirement.split('==')[0]}.whl").write_bytes(bytes(700_000))

    monkeypatch.setattr(collect_wheels, "strip", lambda wheel: None)

    monkeypatch.setattr(collect_wheels, "recorded_imports", lambda command, folder: {"optax", "jax", "numpy", "os"})
    monkeypatch.setattr(collect_wheels, "build", build)
    installed = tmp_path / "installed.txt"
    installed.write_text("jax==0.0.1\nnumpy==2.5.5\n")
    assert main([str(installed), str(tmp_path / "wheels"), "--limit_mb", "1"]) == 0
    assert wanted == [f"optax=={importlib.metadata.version('optax')}"]
    printed = capsys.readouterr().out
    assert "kept jax 0.0.1, although optax needs jax" in printed
    assert "0.70 MB  1 wheels, of at most 1 MB" in printed
    wanted.clear()
    assert main([str(installed), str(tmp_path / "more"), "--limit_mb", "1", "--replace", "jax"]) == 1
    assert [requirement.split("==")[0] for requirement in wanted] == ["jax", "optax"]


def test_unused_files_are_removed_from_a_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    wheel, target = tmp_path / "a-1.0-py3-none-any.whl", tmp_path / "target"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("a/__init__.py", "number = 3\n")
        archive.writestr("a/bin/service", "x" * 1000)
        archive.writestr("a-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: a\nVersion: 1.0\n")
        archive.writestr("a-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        lines = ["a/__init__.py", "a/bin/service", "a-1.0.dist-info/METADATA", "a-1.0.dist-info/WHEEL"]
        archive.writestr(
            "a-1.0.dist-info/RECORD", "".join(f"{line},,\n" for line in [*lines, "a-1.0.dist-info/RECORD"])
        )
    monkeypatch.setattr(collect_wheels, "UNUSED_FILES", re.compile("a/bin/"))
    collect_wheels.strip(wheel)
    install(tmp_path, target)
    assert (target / "a/__init__.py").read_text() == "number = 3\n"
    assert not (target / "a/bin").exists()
