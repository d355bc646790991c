# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Local files, and object stores through emulators of Google Cloud Storage and S3 on this machine."""

import contextlib
import os
import re
import shutil
import socket
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest

from marin_rl.runs.lock import hold
from marin_rl.utils import remote_path
from marin_rl.utils.errors import RunDirectoryError
from marin_rl.utils.remote_path import RemotePath, StorageError
from marin_rl.utils.settings.fields import local_path
from marin_rl.utils.storage import (
    AppendedFile,
    file_sizes,
    local_copy,
    open_atomically,
    read_small,
    remove,
    replace_folder,
    storage_path,
    upload_folder,
    user_cache,
    writing,
)
from tests.gcs_emulator import Fault, Gcs


@pytest.mark.parametrize("error", [None, OSError("disk full"), KeyboardInterrupt("stop")])
def test_a_file_is_replaced_at_the_end_of_the_block_or_not_at_all(tmp_path: Path, error: BaseException | None) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"old")
    expected = contextlib.nullcontext() if error is None else pytest.raises(type(error))
    with expected, open_atomically(path) as file:
        file.write(b"new")
        assert path.read_bytes() == b"old"
        if error is not None:
            raise error
    assert path.read_bytes() == (b"new" if error is None else b"old")
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("kind", ["absent", "folder", "file", "link"])
def test_a_folder_replaces_an_entry_of_its_name(tmp_path: Path, kind: str) -> None:
    folder, partial, other = tmp_path / "a", tmp_path / ".a.partial", tmp_path / "other"
    (partial / "inner").mkdir(parents=True)
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
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An empty bucket, to which `s3://bucket` refers in this process."""
    pytest.importorskip("s3fs")
    server = pytest.importorskip("moto.server").ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    for name, value in {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_DEFAULT_REGION": "us-east-1",
    }.items():
        monkeypatch.setenv(name, value)
    remote_path._filesystem.cache_clear()
    with warnings.catch_warnings():
        # botocore and its pin of urllib3 warn about each other's functions.
        warnings.simplefilter("ignore", DeprecationWarning)
        remote_path._filesystem("s3").makedirs("bucket", exist_ok=True)
        yield
        # All servers of a process share their buckets.
        remove(RemotePath("s3://bucket/run"))
    remote_path._filesystem.cache_clear()
    fsspec.get_filesystem_class("s3").clear_instance_cache()
    server.stop()


@pytest.fixture
def root(gcs: Gcs) -> RemotePath:
    return RemotePath("gs://bucket/run")


@pytest.fixture(params=["gcs", pytest.param("s3", marks=pytest.mark.medium)])
def store(request: pytest.FixtureRequest) -> RemotePath:
    request.getfixturevalue(request.param)
    path = storage_path(f"{request.param.replace('gcs', 'gs')}://bucket/run/")
    assert isinstance(path, RemotePath)
    return path


def test_objects_are_written_read_listed_and_deleted(store: RemotePath) -> None:
    assert (store.exists(), list(store.iterdir()), store.sizes()) == (False, [], {})
    file = store / "sub" / "b.bin"
    (store / "a.txt").write_text("ä")
    file.write_bytes(b"0123456789")
    assert str(file) == f"{store.protocol}://bucket/run/sub/b.bin"
    assert (file.name, file.suffix, file.parent.parent) == ("b.bin", ".bin", store)
    assert (store.exists(), store.is_dir(), store.is_file()) == (True, True, False)
    assert ((store / "a.txt").is_file(), (store / "a.txt").is_dir(), (store / "a").exists()) == (True, False, False)
    assert list(store.iterdir()) == [store / "a.txt", store / "sub"]
    assert list(store.glob("*.txt")) == [store / "a.txt"]
    assert store.sizes() == file_sizes(store) == {"a.txt": 2, "sub/b.bin": 10}
    assert (store / "a.txt").read_text() == "ä"
    (store / "a.txt").unlink()
    (store / "a.txt").unlink(missing_ok=True)
    with pytest.raises(FileNotFoundError, match=rf"{store}/a\.txt"):
        (store / "a.txt").read_bytes()
    remove(store)
    assert not store.exists()


def test_object_is_created_only_once(store: RemotePath) -> None:
    (store / "a").write_bytes(b"first", only_new=True)
    with pytest.raises(FileExistsError):
        (store / "a").write_bytes(b"second", only_new=True)
    assert (store / "a").read_bytes() == b"first"


def test_one_process_holds_the_lock(store: RemotePath) -> None:
    for _ in range(2):
        with hold(store / ".lock") as held:
            held.check()
            with pytest.raises(RunDirectoryError, match="is in use by process"):
                hold(store / ".lock").__enter__()


def test_missing_bucket_is_named(store: RemotePath) -> None:
    path = RemotePath(f"{store.protocol}://other/config.yaml")
    with pytest.raises(RunDirectoryError, match=f"cannot write '{path}': the bucket does not exist"), writing(path):
        path.write_text("")


def test_changes_of_another_process_are_seen(gcs: Gcs, root: RemotePath) -> None:
    assert list(root.iterdir()) == []
    gcs.put("run/a", b"1")
    assert list(root.iterdir()) == [root / "a"]
    version = (root / "a").version()
    gcs.put("run/a", b"2")
    assert (root / "a").version() != version
    del gcs.objects["run/a"]
    assert not (root / "a").exists()
    with pytest.raises(FileNotFoundError):
        (root / "a").unlink()


@pytest.mark.medium
def test_large_object_in_several_requests(gcs: Gcs, root: RemotePath, tmp_path: Path) -> None:
    data = bytes(range(256)) * 2**18
    gcs.faults.append(Fault("POST run/large", 503, 1))
    (root / "large").write_bytes(data)
    (tmp_path / "large").write_bytes(data)
    (root / "copy").upload(tmp_path / "large")
    assert gcs.read("run/large") == gcs.read("run/copy") == data


@pytest.mark.parametrize(
    ("status", "message"),
    [
        (403, r"permission denied \(emulated 403\); give the account of this machine read and write access"),
        (401, r"permission denied \(emulated 401, 401\); give the account"),
        (400, r"the store failed \(HttpError: emulated 400, 400\); run the same command again"),
    ],
)
def test_refused_requests_are_one_error(gcs: Gcs, root: RemotePath, status: int, message: str) -> None:
    gcs.faults.append(Fault(".", status))
    for request in (
        lambda: (root / "a").read_bytes(),
        lambda: (root / "a").write_bytes(b""),
        lambda: (root / "a").unlink(missing_ok=True),
        lambda: (root / "a").exists(),
        lambda: list(root.iterdir()),
    ):
        with pytest.raises(StorageError, match=rf"^gs://bucket/run(/a)?: {message}"):
            request()


class DefaultCredentialsError(Exception):
    """Has the name of google.auth's error."""


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (DefaultCredentialsError("not found"), r"no valid credentials for gs:// .*; log in \(gcloud auth"),
        # A number in a name is no status.
        (OSError("no connection to run/step-00000403.parquet"), "the store failed"),
    ],
)
def test_errors_of_the_client_are_explained(
    root: RemotePath, monkeypatch: pytest.MonkeyPatch, error: Exception, message: str
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(remote_path._filesystem("gs"), "cat_file", fail)
    with pytest.raises(StorageError, match=message):
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
    assert (changes[0], changes[-1]) == ("DELETE run/config.json", "POST run/config.json")
    assert {name: gcs.read(f"run/{name}") for name in gcs.names("run/")} == dict.fromkeys(
        ("config.json", "model.bin", "sub/more.txt"), b"new"
    )
    gcs.faults.append(Fault("POST run/model.bin", 403))
    with pytest.raises(StorageError):
        upload_folder(root, tmp_path, marker="config.json")
    assert not (root / "config.json").exists()


def test_local_copy_is_downloaded_again_only_if_the_folder_changed(store: RemotePath, tmp_path: Path) -> None:
    (store / "a.txt").write_text("1")
    (store / "sub" / "b.txt").write_text("2")
    first = local_copy(store, tmp_path)
    assert file_sizes(first) == {"a.txt": 1, "sub/b.txt": 1}
    assert local_copy(store, tmp_path) == first
    (store / "a.txt").write_text("34")
    second = local_copy(store, tmp_path)
    assert ((first / "a.txt").read_text(), (second / "a.txt").read_text()) == ("1", "34")
    with pytest.raises(FileNotFoundError, match="there is no such folder"):
        local_copy(store / "nowhere", tmp_path)
    assert sorted(tmp_path.iterdir()) == sorted([first, second])


def test_failed_or_repeated_download_leaves_no_partial_copy(
    gcs: Gcs, root: RemotePath, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (root / "a.txt").write_text("1")
    gcs.faults.append(Fault("GET run/a.txt", 403))
    with pytest.raises(StorageError):
        local_copy(root, tmp_path)
    gcs.faults.clear()
    assert not list(tmp_path.iterdir())
    rename = os.rename

    def be_slower_than_another_process(partial: Path, copy: Path) -> None:
        shutil.copytree(partial, copy)
        rename(partial, copy)

    monkeypatch.setattr(os, "rename", be_slower_than_another_process)
    copy = local_copy(root, tmp_path)
    assert file_sizes(copy) == {"a.txt": 1}
    assert list(tmp_path.iterdir()) == [copy]
    downloads = len(gcs.downloads["run/a.txt"])
    assert local_copy(root, tmp_path) == copy
    assert len(gcs.downloads["run/a.txt"]) == downloads


def test_appended_file_continues_and_is_uploaded_in_time_and_at_the_end(gcs: Gcs, root: RemotePath) -> None:
    (root / "log").write_text("before\n")
    written = threading.Event()
    file = AppendedFile(root / "log", seconds=0.01)
    gcs.watched.append(("POST run/log", written.set))
    file.write(b"first\n")
    assert written.wait(600)
    file.write(b"second\n")
    file.close()
    assert gcs.read("run/log") == b"before\nfirst\nsecond\n"
    uploads = gcs.requests.count("POST run/log")
    file.flush()
    assert gcs.requests.count("POST run/log") == uploads


def test_appended_file_is_not_uploaded_after_its_lock_is_lost(gcs: Gcs, root: RemotePath, caplog) -> None:
    checked = threading.Event()

    def check_lock() -> None:
        checked.set()
        raise RunDirectoryError("taken over")

    file = AppendedFile(RemotePath(str(root / "log"), check_lock), seconds=0.01)
    file.write(b"1")
    assert checked.wait(600)
    with pytest.raises(RunDirectoryError, match="taken over"):
        file.close()
    assert gcs.requests.count("POST run/log") == 0
    assert caplog.text.count("log is no longer uploaded: taken over") == 1


def test_failed_upload_is_repeated_and_the_last_one_is_an_error(gcs: Gcs, root: RemotePath, caplog) -> None:
    file = AppendedFile(root / "log", seconds=0.01)
    gcs.faults.append(Fault("POST run/log", 403))
    written = threading.Event()
    # The second request.
    gcs.watched.append(("POST run/log", lambda: gcs.watched.append(("POST run/log", written.set))))
    file.write(b"1")
    assert written.wait(600)
    assert caplog.text.count("log is uploaded again later: gs://bucket/run/log: permission denied") >= 1
    gcs.faults.clear()
    file.flush()
    assert gcs.read("run/log") == b"1"
    gcs.faults.append(Fault("POST run/log", 403))
    file.write(b"2")
    with pytest.raises(StorageError, match="permission denied"):
        file.close()


def test_local_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for text, path in {"runs/a": "runs/a", "/x": "/x", "file:///x": "/x", "~/a": str(tmp_path / "a")}.items():
        assert storage_path(text) == Path(path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "elsewhere"))
    assert user_cache("jax") == tmp_path / "elsewhere" / "marin_rl" / "jax"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert user_cache("jax") == tmp_path / ".cache" / "marin_rl" / "jax"
    monkeypatch.setattr("os.path.expanduser", lambda path: path)
    with pytest.raises(ValueError, match="has no home folder; set HOME to a folder that it can write"):
        user_cache("jax")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("gss://b/run", "run_dir is 'gss://b/run', but the protocol gss:// is unknown; use a path"),
        ("gs://", "run_dir is 'gs://', which names no bucket and no folder; use gs://BUCKET/FOLDER"),
        ("", "run_dir is empty; set it to a path"),
        ("a\0b", "run_dir has a zero byte, which no path can contain"),
        ("a\ud800", r"run_dir is 'a\ud800', which the file system's encoding"),
        ("~nobody-of-this-name/a", "run_dir is '~nobody-of-this-name/a', but no home folder of that user is known"),
    ],
)
def test_text_that_is_no_path_is_refused_by_key(text: str, message: str) -> None:
    for check in (storage_path, local_path) if "://" not in text else (storage_path,):
        with pytest.raises(ValueError, match=re.escape(message)):
            check(text, "run_dir")


@pytest.mark.parametrize("kind", ["device", "pipe", "socket", "folder", "large", "loop", "absent"])
def test_only_small_regular_files_are_read_as_a_whole(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "large":
        path.write_bytes(bytes(9))
    elif kind != "absent":
        path.symlink_to({"device": "/dev/zero", "loop": "a.json", "socket": tmp_path / "s"}[kind])
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "s"))
        with pytest.raises((OSError, ValueError), match=r"a\.json"):
            read_small(path, 8)
    (tmp_path / "b.json").write_bytes(bytes(8))
    assert read_small(tmp_path / "b.json", 8) == bytes(8)
