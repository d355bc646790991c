# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

from pathlib import Path

import pytest

from marin_rl.atomic_files import open_atomically, replace_folder


def test_a_file_is_replaced_at_the_end_of_the_block(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"old")
    with open_atomically(path) as file:
        file.write(b"new")
        assert path.read_bytes() == b"old"
    assert path.read_bytes() == b"new"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("error", [OSError("disk full"), KeyboardInterrupt("stop")])
def test_after_an_error_the_old_file_remains(tmp_path: Path, error: BaseException) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"old")

    def fail() -> None:
        with open_atomically(path) as file:
            file.write(b"half")
            raise error

    with pytest.raises(type(error)):
        fail()
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("kind", ["absent", "folder", "file", "link"])
def test_a_folder_replaces_an_entry_of_its_name(tmp_path: Path, kind: str) -> None:
    folder, partial, other = tmp_path / "a", tmp_path / ".a.partial", tmp_path / "other"
    partial.mkdir()
    (partial / "inner").mkdir()
    (partial / "inner" / "x").write_text("new")
    other.mkdir()
    match kind:
        case "folder":
            folder.mkdir()
            (folder / "y").write_text("old")
        case "file":
            folder.write_text("old")
        case "link":
            folder.symlink_to(other)
    replace_folder(folder, partial)
    assert [path.name for path in folder.iterdir()] == ["inner"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "other"]
