# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import os
import re
import shutil
import threading
from pathlib import Path

import pytest

from marin_rl.utils import remote_path
from marin_rl.utils.errors import RunDirectoryError
from marin_rl.utils.remote_path import RemotePath, StorageError
from marin_rl.utils.settings.fields import local_path
from marin_rl.utils.storage import (
    AppendedFile,
    file_sizes,
    local_copy,
    open_atomically,
    remove,
    replace_folder,
    storage_path,
    upload_folder,
    user_cache,
)
from tests.gcs_emulator import Fault, Gcs


def test_the_cache_of_the_user_follows_xdg_cache_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert user_cache("jax") == tmp_path / "marin_rl" / "jax"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert user_cache("jax") == tmp_path / ".cache" / "marin_rl" / "jax"


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


@pytest.mark.parametrize("call", ["rename", "rmtree"])
def test_a_crash_while_a_folder_is_replaced_leaves_a_complete_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    folder, partial = tmp_path / "a", tmp_path / ".a.partial"
    for path, text in ((folder, "old"), (partial, "new")):
        path.mkdir()
        (path / "x").write_text(text)
    rename = Path.rename

    def fail_to_rename(path: Path, target: Path) -> Path:
        if path == partial:
            raise OSError("no")
        return rename(path, target)

    def fail_to_remove(path: Path) -> None:
        (path / "x").unlink()
        raise OSError("no")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", fail_to_rename) if call == "rename" else None
        patch.setattr(shutil, "rmtree", fail_to_remove) if call == "rmtree" else None
        with pytest.raises(OSError, match="no"):
            replace_folder(folder, partial)
    assert (folder / "x").read_text() == ("old" if call == "rename" else "new")


@pytest.fixture
def root(gcs: Gcs) -> RemotePath:
    path = storage_path("gs://bucket/run/")
    assert isinstance(path, RemotePath)
    return path


def test_remote_path_has_the_names_of_a_path(root: RemotePath) -> None:
    file = root / "rollouts" / "step-1.parquet"
    assert str(file) == "gs://bucket/run/rollouts/step-1.parquet"
    assert (file.name, file.suffix, file.protocol, file.parent.parent) == ("step-1.parquet", ".parquet", "gs", root)


def test_objects_are_written_read_listed_and_deleted(gcs: Gcs, root: RemotePath) -> None:
    assert not root.exists()
    assert (list(root.iterdir()), root.sizes()) == ([], {})
    (root / "a.txt").write_text("ä")
    (root / "sub" / "b.bin").write_bytes(b"0123456789")
    assert (root.exists(), root.is_dir(), root.is_file()) == (True, True, False)
    assert ((root / "a.txt").is_file(), (root / "a.txt").is_dir(), (root / "a").exists()) == (True, False, False)
    assert list(root.iterdir()) == [root / "a.txt", root / "sub"]
    assert list(root.glob("*.txt")) == [root / "a.txt"]
    assert root.sizes() == file_sizes(root) == {"a.txt": 2, "sub/b.bin": 10}
    assert (root / "a.txt").read_text() == "ä"
    (root / "a.txt").unlink()
    (root / "a.txt").unlink(missing_ok=True)
    with pytest.raises(FileNotFoundError):
        (root / "a.txt").unlink()
    with pytest.raises(FileNotFoundError, match=r"gs://bucket/run/a\.txt"):
        (root / "a.txt").read_bytes()
    remove(root)
    assert not gcs.objects


def test_changes_of_another_process_are_seen(gcs: Gcs, root: RemotePath) -> None:
    assert list(root.iterdir()) == []
    gcs.put("run/a", b"1")
    assert list(root.iterdir()) == [root / "a"]
    version = (root / "a").version()
    gcs.put("run/a", b"2")
    assert (root / "a").version() != version
    del gcs.objects["run/a"]
    assert not (root / "a").exists()


def test_object_is_created_only_once(root: RemotePath) -> None:
    (root / "a").write_bytes(b"first", only_new=True)
    with pytest.raises(FileExistsError):
        (root / "a").write_bytes(b"second", only_new=True)
    assert (root / "a").read_bytes() == b"first"


def test_large_object_in_several_requests(gcs: Gcs, root: RemotePath, tmp_path: Path) -> None:
    data = bytes(range(256)) * 2**18
    gcs.faults.append(Fault("POST run/large", 503, 1))
    (root / "large").write_bytes(data)
    assert gcs.read("run/large") == data
    (tmp_path / "large").write_bytes(data)
    (root / "copy").upload(tmp_path / "large")
    assert gcs.read("run/copy") == data


@pytest.mark.parametrize(
    ("status", "message"),
    [
        (
            403,
            r"gs://bucket/run/a: permission denied \(emulated 403\); give the account of this machine read and",
        ),
        (401, r"gs://bucket/run/a: permission denied \(emulated 401, 401\); give the account"),
        (400, r"gs://bucket/run/a: the store failed \(HttpError: emulated 400, 400\); run the same command again"),
    ],
)
def test_refused_requests_are_one_error(gcs: Gcs, root: RemotePath, status: int, message: str) -> None:
    gcs.faults.append(Fault(".", status))
    for request in (
        lambda: (root / "a").read_bytes(),
        lambda: (root / "a").write_bytes(b""),
        lambda: (root / "a").unlink(missing_ok=True),
        lambda: (root / "a").exists(),
    ):
        with pytest.raises(StorageError, match=message):
            request()


def test_error_of_a_login_names_the_login(root: RemotePath, monkeypatch: pytest.MonkeyPatch) -> None:
    class DefaultCredentialsError(Exception):
        """Has the name of google.auth's error."""

    def fail(*_: object, **__: object) -> None:
        raise DefaultCredentialsError("Your default credentials were not found.")

    monkeypatch.setattr(remote_path._filesystem("gs"), "cat_file", fail)
    with pytest.raises(StorageError, match=r"no valid credentials for gs:// .*; log in \(gcloud auth"):
        root.read_bytes()


def test_upload_replaces_a_folder_and_writes_the_marker_last(gcs: Gcs, root: RemotePath, tmp_path: Path) -> None:
    for name in ("config.json", "old.bin", "model.bin"):
        (root / name).write_bytes(b"old")
    for name in ("config.json", "model.bin", "sub/more.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"new")
    gcs.requests.clear()
    upload_folder(root, tmp_path, marker="config.json")
    changes = [request for request in gcs.requests if not request.startswith("GET")]
    assert changes[0] == "DELETE run/config.json"
    assert changes[-1] == "POST run/config.json"
    assert {name: gcs.read(f"run/{name}") for name in gcs.names("run/")} == {
        "config.json": b"new",
        "model.bin": b"new",
        "sub/more.txt": b"new",
    }


def test_interrupted_upload_has_no_marker(gcs: Gcs, root: RemotePath, tmp_path: Path) -> None:
    (root / "config.json").write_bytes(b"old")
    for name in ("config.json", "model.bin"):
        (tmp_path / name).write_bytes(b"new")
    gcs.faults.append(Fault("POST run/model.bin", 403))
    with pytest.raises(StorageError):
        upload_folder(root, tmp_path, marker="config.json")
    assert not (root / "config.json").exists()


def test_local_copy_is_downloaded_again_only_if_the_folder_changed(gcs: Gcs, root: RemotePath, tmp_path: Path) -> None:
    (root / "a.txt").write_text("1")
    (root / "sub" / "b.txt").write_text("2")
    first = local_copy(root, tmp_path)
    assert file_sizes(first) == {"a.txt": 1, "sub/b.txt": 1}
    downloads = sum(map(len, gcs.downloads.values()))
    assert local_copy(root, tmp_path) == first
    assert sum(map(len, gcs.downloads.values())) == downloads
    (root / "a.txt").write_text("3")
    second = local_copy(root, tmp_path)
    assert ((first / "a.txt").read_text(), (second / "a.txt").read_text()) == ("1", "3")
    gcs.faults.append(Fault("GET run/sub/b.txt", 403))
    (root / "a.txt").write_text("4")
    with pytest.raises(StorageError):
        local_copy(root, tmp_path)
    assert sorted(tmp_path.iterdir()) == sorted([first, second])
    with pytest.raises(FileNotFoundError, match="there is no such folder"):
        local_copy(root / "nowhere", tmp_path)


def test_local_copy_of_another_process_is_used(
    gcs: Gcs, root: RemotePath, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (root / "a.txt").write_text("1")
    rename = os.rename

    def be_slower(partial: Path, copy: Path) -> None:
        shutil.copytree(partial, copy)
        rename(partial, copy)

    monkeypatch.setattr(os, "rename", be_slower)
    copy = local_copy(root, tmp_path)
    assert file_sizes(copy) == {"a.txt": 1}
    assert list(tmp_path.iterdir()) == [copy]


def test_home_folder_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert storage_path("~/runs/a") == tmp_path / "runs" / "a"


def test_numbers_in_file_names_are_no_status(gcs: Gcs, root: RemotePath, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(address: str) -> None:
        raise OSError("no connection to run/step-00000403.parquet")

    monkeypatch.setattr("marin_rl.utils.remote_path._client", fail)
    with pytest.raises(StorageError, match="the store failed"):
        (root / "step-00000403.parquet").read_bytes()


def test_appended_file_is_uploaded_in_time_and_at_the_end(gcs: Gcs, root: RemotePath) -> None:
    (root / "log").write_text("before\n")
    written = threading.Event()
    file = AppendedFile(root / "log", seconds=0.01)
    gcs.watched.append(("POST run/log", written.set))
    file.write(b"first\n")
    assert written.wait(600)
    file.write(b"second\n")
    file.close()
    assert gcs.read("run/log") == b"before\nfirst\nsecond\n"


def test_appended_file_is_not_uploaded_unless_it_grows(gcs: Gcs, root: RemotePath) -> None:
    file = AppendedFile(root / "log", seconds=1e6)
    file.write(b"1")
    file.flush()
    file.flush()
    file.close()
    assert gcs.requests.count("POST run/log") == 1
    assert AppendedFile(root / "log", seconds=1e6).path == root / "log"


def test_appended_file_is_not_uploaded_after_its_lock_is_lost(gcs: Gcs, root: RemotePath, caplog) -> None:
    checked = threading.Event()

    def check_lock() -> None:
        checked.set()
        raise RunDirectoryError("taken over")

    file = AppendedFile(root / "log", check_lock, seconds=0.01)
    file.write(b"1")
    assert checked.wait(600)
    with pytest.raises(RunDirectoryError, match="taken over"):
        file.close()
    assert gcs.requests.count("POST run/log") == 0
    assert caplog.text.count("log is no longer uploaded: taken over") == 1


def test_failed_upload_is_repeated_and_the_last_one_is_an_error(gcs: Gcs, root: RemotePath, caplog) -> None:
    file = AppendedFile(root / "log", seconds=0.01)
    gcs.faults.append(Fault("POST run/log", 403, 2))
    written = threading.Event()

    def wait_for_third(number: int) -> None:
        gcs.watched.append(("POST run/log", written.set if number == 3 else lambda: wait_for_third(number + 1)))

    wait_for_third(1)
    file.write(b"1")
    assert written.wait(600)
    assert caplog.text.count("log is uploaded again later: gs://bucket/run/log: permission denied") == 2
    # Several times: the third upload may not have been served yet.
    gcs.faults.append(Fault("POST run/log", 403, 10**6))
    file.write(b"2")
    with pytest.raises(StorageError, match="permission denied"):
        file.close()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("gss://b/run", "run_dir is 'gss://b/run', but the protocol gss:// is unknown; use a path"),
        ("gs://", "run_dir is 'gs://', which names no bucket and no folder; use gs://BUCKET/FOLDER"),
    ],
)
def test_invalid_addresses(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        storage_path(text, "run_dir")


@pytest.mark.parametrize("text", ["runs/a", "/tmp/x", "file:///tmp/x"])
def test_local_paths(text: str) -> None:
    assert storage_path(text) == Path(text.removeprefix("file://"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "run_dir is empty; set it to a path"),
        ("a\0b", "run_dir has a zero byte, which no path can contain"),
        ("a\ud800", r"run_dir is 'a\\ud800', which the file system's encoding"),
        ("~nobody-of-this-name/a", "run_dir is '~nobody-of-this-name/a', but no home folder of that user is known"),
    ],
)
def test_text_that_is_no_path_is_refused_by_key(text: str, message: str) -> None:
    for check in (storage_path, local_path):
        with pytest.raises(ValueError, match=message):
            check(text, "run_dir")


def test_a_user_without_a_home_folder_is_told_to_set_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr("os.path.expanduser", lambda path: path)
    with pytest.raises(ValueError, match="has no home folder; set HOME to a folder that it can write"):
        user_cache("jax")
