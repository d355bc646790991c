# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import importlib.util
import re
import tomllib
from pathlib import Path

import pytest

from marin_rl.utils.extras import PACKAGES, MissingPackageError, require_extra

PYPROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def modules_of(requirements: list[str]) -> set[str]:
    """Modules of requirements whose packages have the same name, extras of this package included."""
    found: set[str] = set()
    for requirement in requirements:
        if own := re.match(r"marin_rl\[(\w+)\]", requirement):
            found |= modules_of(PYPROJECT["optional-dependencies"][own[1]])
        else:
            found.add(re.split(r"[^\w-]", requirement)[0].replace("-", "_"))
    return found


@pytest.mark.parametrize("extra", PACKAGES)
def test_an_extra_installs_its_packages_and_nothing_else_does(extra: str):
    assert set(PACKAGES[extra]) <= modules_of(PYPROJECT["optional-dependencies"][extra])
    assert not set(PACKAGES[extra]) & modules_of(PYPROJECT["dependencies"])


def test_missing_packages_and_their_extra_are_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "uvicorn" else object())
    require_extra("ray", "mode: async")
    with pytest.raises(MissingPackageError, match=r"a server needs .* \(uvicorn\); .* pip install 'marin_rl\[serve\]'"):
        require_extra("serve", "a server")
