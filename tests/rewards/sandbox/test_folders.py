# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import os
from pathlib import Path

import pytest

from marin_rl.rewards.sandbox.folders import remove


def test_files_links_and_folders_are_removed(tmp_path: Path):
    kept = tmp_path / "kept"
    kept.mkdir()
    (kept / "file").write_text("kept")
    file, link, empty, full = (tmp_path / name for name in ("file", "link", "empty", "full"))
    file.write_text("text")
    link.symlink_to(kept)
    empty.mkdir()
    (full / "inner").mkdir(parents=True)
    (full / "inner" / "link").symlink_to(kept)
    (full / "inner").chmod(0o300)
    for path in (file, link, empty, full):
        assert remove(str(path)) is None
    assert list(tmp_path.iterdir()) == [kept]
    assert (kept / "file").read_text() == "kept"


def test_nothing_to_remove(tmp_path: Path):
    assert remove(str(tmp_path / "missing")) is None


def test_the_reason_is_given():
    # Nobody, not even root, removes files of this file system.
    path = f"/proc/{os.getpid()}/status"
    if not Path(path).exists():
        pytest.skip("no /proc here")
    assert path in (remove(path) or "")
