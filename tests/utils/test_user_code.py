# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import importlib.util
import re
import tomllib
from pathlib import Path

import pytest

from marin_rl.utils.user_code import (
    INHERITED,
    PACKAGES,
    MissingPackageError,
    UserFileError,
    inherited_environment,
    load_from_file,
    require_extra,
)

PYPROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def write(folder: Path, name: str, text: str) -> str:
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_text(text)
    return str(path)


def test_a_file_is_imported_once_and_can_import_its_neighbours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    write(tmp_path, "helpers.py", "FACTOR = 3")
    path = write(tmp_path, "my-own.py", "from .helpers import FACTOR\ndef triple(x):\n    return FACTOR * x\n")
    triple = load_from_file(path, "triple")
    assert triple(2) == 6
    monkeypatch.chdir(tmp_path)
    assert load_from_file("my-own.py", "triple") is triple


def test_equal_names_in_different_folders_are_separate_modules_that_can_define_dataclasses(tmp_path: Path):
    text = "from __future__ import annotations\nimport dataclasses\n@dataclasses.dataclass\nclass C:\n    x: int = "
    first, second = (write(tmp_path / folder, "mine.py", f"{text}{folder}\n") for folder in "12")
    assert (load_from_file(first, "C")().x, load_from_file(second, "C")().x) == (1, 2)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("nowhere.py", None, "nowhere.py' does not exist"),
        ("notes.txt", "X = 1", "is not a Python file"),
        ("names.py", "import math\nXS = 1\n_H = 1", r"does not define 'X'.*did you mean 'XS'.*Valid here: XS, math"),
        ("broken.py", "X = 1\n1 / 0\n", "raised during import: ZeroDivisionError"),
        # A script without a main guard, for example.
        ("script.py", "import sys\nsys.exit(0)", r"script\.py raised during import: SystemExit: 0"),
        ("syntax.py", "def", "SyntaxError"),
    ],
)
def test_errors_name_the_cause(tmp_path: Path, name: str, text: str | None, message: str):
    path = str(tmp_path / name) if text is None else write(tmp_path, name, text)
    for _ in range(2):
        with pytest.raises(UserFileError, match=message):
            load_from_file(path, "X")


def modules_of(requirements: list[str]) -> set[str]:
    """Modules of requirements, extras of this package included; most packages have the name of their module."""
    found: set[str] = set()
    for requirement in requirements:
        if own := re.match(r"marin_rl\[(\w+)\]", requirement):
            found |= modules_of(PYPROJECT["optional-dependencies"][own[1]])
        else:
            name = re.split(r"[^\w-]", requirement)[0].replace("-", "_").removeprefix("marin_")
            found.add("google.protobuf" if name == "protobuf" else name)
    return found


@pytest.mark.parametrize("extra", PACKAGES)
def test_an_extra_installs_its_packages_and_nothing_else_does(extra: str):
    assert set(PACKAGES[extra]) <= modules_of(PYPROJECT["optional-dependencies"][extra])
    assert not set(PACKAGES[extra]) & modules_of(PYPROJECT["dependencies"])


def test_missing_packages_and_their_extra_are_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "uvicorn" else object())
    require_extra("ray", "mode: async")
    with pytest.raises(MissingPackageError, match=r"a server needs .* \(uvicorn\); .* pip install -e '\.\[serve\]'"):
        require_extra("serve", "a server")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingPackageError, match=r"install the extra, with Python 3\.12 .*: pip .* '\.\[iris\]'"):
        require_extra("iris", "a launch")


def test_programs_inherit_no_key(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("os.environ", {"PATH": "/bin", "WANDB_API_KEY": "secret", "MINE": "1"})
    assert inherited_environment() == {"PATH": "/bin"}
    assert inherited_environment("MINE", "ABSENT") == {"PATH": "/bin", "MINE": "1"}
    assert not [name for name in INHERITED if re.search("KEY|TOKEN|SECRET|PASS", name)]
