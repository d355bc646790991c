# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import ctypes
import mmap
import os
import resource
import sys
from pathlib import Path

import pytest

from marin_rl.rewards.sandbox.folders import deleted_files, exceeds_size, has_inner_folders, remove

linux = pytest.mark.skipif(sys.platform != "linux", reason="workers measure folders on Linux alone")


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
    for path in (file, link, empty, full, tmp_path / "missing"):
        assert remove(str(path)) is None
    assert list(tmp_path.iterdir()) == [kept]
    assert (kept / "file").read_text() == "kept"


def test_remove_returns_the_error():
    # Not even root can remove files of this file system.
    path = f"/proc/{os.getpid()}/status"
    if not Path(path).exists():
        pytest.skip("no /proc here")
    assert path in (remove(path) or "")


@linux
def test_folder_size(tmp_path: Path):
    (tmp_path / "stuck").write_bytes(bytes(10 * 2**15))
    (tmp_path / "file").write_bytes(bytes(2 * 2**15))
    (tmp_path / "empty").touch()
    (tmp_path / "link").symlink_to(tmp_path / "stuck")
    assert exceeds_size(str(tmp_path), 4 * 2**15 - 1, {"stuck"})
    assert not exceeds_size(str(tmp_path), 4 * 2**15, {"stuck"})
    assert not exceeds_size(str(tmp_path / "gone"), 0, set())
    assert exceeds_size(str(tmp_path / "gone"), -1, set())


def test_inner_folders(tmp_path: Path):
    (tmp_path / "file").touch()
    (tmp_path / "call").mkdir()
    (tmp_path / "call" / "file").touch()
    (tmp_path / "call" / "link").symlink_to(tmp_path)
    assert not has_inner_folders(str(tmp_path))
    (tmp_path / "call" / "folder").mkdir()
    assert has_inner_folders(str(tmp_path))


@linux
@pytest.mark.parametrize("name", ["plain", "two words", "new\nline", "é", "(deleted)"])
def test_deleted_files(name: str, tmp_path: Path):
    folder = tmp_path / name
    folder.mkdir()
    (tmp_path / "link").symlink_to(folder)
    (folder / "kept").write_bytes(bytes(4096))
    for file in ("open", "mapped"):
        (folder / file).write_bytes(bytes(8192))
    with open(folder / "kept", "rb"), open(folder / "open", "rb"):
        # An object of `mmap` would keep the file open.
        library = ctypes.CDLL(None)
        library.mmap.restype = ctypes.c_void_p
        with open(folder / "mapped", "rb") as file:
            place = library.mmap(None, ctypes.c_size_t(4096), 1, mmap.MAP_PRIVATE, file.fileno(), ctypes.c_long(0))
        identity = [(state.st_dev, state.st_ino) for state in (os.stat(folder / one) for one in ("open", "mapped"))]
        os.remove(folder / "open")
        os.remove(folder / "mapped")
        expected = dict(zip(identity, (8192, 10**6), strict=True))
        for path in (folder, tmp_path / "link"):
            assert deleted_files(os.getpid(), str(path), 10**6) == expected
        library.munmap(ctypes.c_void_p(place), ctypes.c_size_t(4096))
        assert list(deleted_files(os.getpid(), str(folder), 10**6)) == identity[:1]
    assert deleted_files(2**22 + 1, str(folder), 10**6) == {}


@linux
def test_more_unreadable_folders_than_descriptors(tmp_path: Path):
    start = os.getcwd()
    try:
        os.chdir(tmp_path)
        # The paths are so long that each of the last folders needs a descriptor.
        while len(os.getcwd()) < 2850:
            os.mkdir("x" * 100)
            os.chdir("x" * 100)
        for index in range(100):
            os.mkdir(f"{index:0200}")
    finally:
        os.chdir(start)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 20, hard))
    try:
        assert exceeds_size(str(tmp_path), 2**30, set())
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert not exceeds_size(str(tmp_path), 2**30, set())
