# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import pytest

from marin_rl.weights.arrow_flight import VersionCache
from marin_rl.weights.protocol import VersionGoneError


def test_newest_versions_are_kept():
    cache: VersionCache[str] = VersionCache(2, "host 3")
    assert cache.versions() == []
    assert cache.newest() is None
    for version in (4, 5, 9):
        cache.put(version, f"weights {version}")
    assert cache.versions() == [5, 9]
    assert cache.get(5) == "weights 5"
    assert cache.newest() == (9, "weights 9")
    with pytest.raises(VersionGoneError, match=r"host 3 does not have version 4; available versions: \[5, 9\]"):
        cache.get(4)


def test_cleared_cache_is_empty():
    cache: VersionCache[str] = VersionCache(2, "host 3")
    cache.put(1, "weights")
    cache.clear()
    with pytest.raises(VersionGoneError, match="available versions: none"):
        cache.get(1)
