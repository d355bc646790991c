# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import ast
import re
from pathlib import Path

import pytest

from marin_rl import objectives

IMPORTS = [
    node for node in ast.walk(ast.parse(Path(objectives.__file__).read_text())) if isinstance(node, ast.ImportFrom)
]
NAMES = [alias.name for node in IMPORTS if node.module.startswith("marin_rl.objectives.") for alias in node.names]
API_PAGE = Path(__file__).parents[2] / "docs" / "pages" / "api" / "objectives.md"


@pytest.mark.parametrize("name", NAMES)
def test_public_names_are_importable(name):
    assert getattr(objectives, name).__module__.startswith("marin_rl.objectives.")


def test_unknown_names_raise_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'unknown'"):
        _ = objectives.unknown


def test_api_page_lists_exactly_the_public_names():
    listed = re.findall(r"^::: marin_rl\.objectives\.\w+\.(\w+)$", API_PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(listed) == sorted(NAMES)
