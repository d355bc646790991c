# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import pytest

from marin_rl.weights.errors import VersionGoneError
from marin_rl.weights.shelf import VersionShelf


def test_the_newest_are_kept():
    shelf: VersionShelf[str] = VersionShelf(2, "host 3")
    assert shelf.versions() == []
    assert shelf.newest() is None
    for version in (4, 5, 9):
        shelf.put(version, f"weights {version}")
    assert shelf.versions() == [5, 9]
    assert shelf.get(5) == "weights 5"
    assert shelf.newest() == (9, "weights 9")
    with pytest.raises(VersionGoneError, match=r"host 3 does not hold version 4; it holds \[5, 9\]"):
        shelf.get(4)


def test_a_cleared_shelf_holds_nothing():
    shelf: VersionShelf[str] = VersionShelf(2, "host 3")
    shelf.put(1, "weights")
    shelf.clear()
    with pytest.raises(VersionGoneError, match="it holds none"):
        shelf.get(1)
