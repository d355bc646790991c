# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""The same storage through s3fs, with moto's emulator of S3 on this machine."""

import warnings
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest

from marin_rl.runs.lease import hold
from marin_rl.utils import remote_path
from marin_rl.utils.errors import RunDirectoryError, writing
from marin_rl.utils.remote_path import RemotePath
from marin_rl.utils.storage import AppendedFile, local_copy, remove, storage_path, upload_folder

pytest.importorskip("s3fs")
moto_server = pytest.importorskip("moto.server")

pytestmark = pytest.mark.medium


@pytest.fixture
def root(monkeypatch: pytest.MonkeyPatch) -> Iterator[RemotePath]:
    server = moto_server.ThreadedMotoServer("127.0.0.1", 0, verbose=False)
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
        path = RemotePath("s3://bucket/run")
        yield path
        # All servers of a process share their buckets.
        remove(path)
    remote_path._filesystem.cache_clear()
    fsspec.get_filesystem_class("s3").clear_instance_cache()
    server.stop()


def test_objects_are_written_read_listed_and_deleted(root: RemotePath) -> None:
    assert storage_path("s3://bucket/run/") == root
    assert (root.exists(), list(root.iterdir()), root.sizes()) == (False, [], {})
    (root / "a.txt").write_text("ä")
    (root / "sub" / "b.bin").write_bytes(b"0123456789")
    assert (root.is_dir(), (root / "a.txt").is_file(), (root / "a").exists()) == (True, True, False)
    assert list(root.iterdir()) == [root / "a.txt", root / "sub"]
    assert root.sizes() == {"a.txt": 2, "sub/b.bin": 10}
    with pytest.raises(FileNotFoundError):
        (root / "none").read_bytes()
    remove(root)
    assert not root.exists()


def test_object_is_created_only_once(root: RemotePath) -> None:
    (root / "a").write_bytes(b"first", only_new=True)
    with pytest.raises(FileExistsError):
        (root / "a").write_bytes(b"second", only_new=True)
    assert (root / "a").read_bytes() == b"first"


def test_one_process_holds_the_lock(root: RemotePath) -> None:
    for _ in range(2):
        with hold(root / ".lock") as held:
            held.check()
            with pytest.raises(RunDirectoryError, match="is in use by process"):
                hold(root / ".lock").__enter__()


def test_folders_and_appended_files(root: RemotePath, tmp_path: Path) -> None:
    for name in ("config.json", "sub/model.bin"):
        (tmp_path / "from" / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / "from" / name).write_text(name)
    (root / "hf" / "stale").write_bytes(b"")
    upload_folder(root / "hf", tmp_path / "from", marker="config.json")
    copy = local_copy(root / "hf", tmp_path / "cache")
    assert (copy / "sub" / "model.bin").read_text() == "sub/model.bin"
    assert (root / "hf").sizes() == {"config.json": 11, "sub/model.bin": 13}
    file = AppendedFile(root / "log.txt")
    file.write(b"line\n")
    file.close()
    assert (root / "log.txt").read_bytes() == b"line\n"


def test_missing_bucket_is_named(root: RemotePath) -> None:
    path = RemotePath("s3://other/config.yaml")
    with pytest.raises(RunDirectoryError, match=f"cannot write '{path}': the bucket does not exist"), writing(path):
        path.write_text("")
