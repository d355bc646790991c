# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import pathlib
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from marin_rl.retry import RetryConfig
from marin_rl.weights import shared_files
from marin_rl.weights.manifest import make_secret
from marin_rl.weights.protocol import CorruptTransferError, ServerLostError, VersionGoneError, WrongSecretError
from marin_rl.weights.publish import ShardedSender, TrainingHost
from marin_rl.weights.shared_files import FolderBackend, FolderSource, fingerprint
from tests.weights.endpoints import SECRET, HookedSource, assert_same, closing, receiver_of

PERSISTENT = RetryConfig(give_up_seconds=1000.0)


def filled(version: int) -> dict[str, np.ndarray]:
    return {name: np.full(600, version, np.float32) for name in "abc"}


def open_sender(folder: pathlib.Path | str, secret: str = SECRET, host: int = 0, hosts: int = 1) -> ShardedSender:
    training_host = TrainingHost(host, hosts, frozenset())
    backend = FolderBackend(folder=str(folder), secret=secret, training_host=training_host)
    return ShardedSender(backend, training_host, dtype=None, chunk_bytes=1024)


def source_of(folder: pathlib.Path, secret: str = SECRET) -> FolderSource:
    return FolderSource(str(folder), secret, streams=2)


def publish(sender: ShardedSender, *versions: int) -> None:
    for version in versions:
        sender.publish(filled(version), version)
    sender.flush()


def names(folder: pathlib.Path) -> list[str]:
    return sorted(path.name[:12].lstrip("0") + path.suffix for path in folder.iterdir())


def test_newest_versions_are_kept_and_deleted_on_close(tmp_path):
    with closing(open_sender(tmp_path)) as sender:
        publish(sender, 1, 2, 3)
        assert names(tmp_path) == ["2.manifest", "2.pieces", "3.manifest", "3.pieces"]
    assert names(tmp_path) == []


def test_other_files_in_the_folder_are_kept(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with closing(open_sender(tmp_path)) as sender:
        publish(sender, 1)
        assert source_of(tmp_path).versions() == [1]
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


@pytest.mark.parametrize("left", [".pieces", ".partial"])
def test_version_without_manifest_is_ignored_and_deleted_by_next_launch(tmp_path, left: str):
    sender = open_sender(tmp_path)
    publish(sender, 1, 2)
    [manifest] = tmp_path.glob("000000000002-*.manifest")
    # State after a sender was killed before its last rename.
    if left == ".partial":
        manifest.rename(manifest.with_suffix(".partial"))
    else:
        manifest.unlink()
    received, version = receiver_of(source_of(tmp_path)).receive(filled(0))
    assert version == 1
    assert_same(received, filled(1))
    with closing(open_sender(tmp_path)):
        assert names(tmp_path) == []
    sender.close()


def test_missing_folder_has_no_versions(tmp_path):
    assert receiver_of(source_of(tmp_path / "later")).newest() is None


def test_address_is_valid_in_another_working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with closing(open_sender("weights")) as sender:
        publish(sender, 1)
        monkeypatch.chdir("/")
        assert receiver_of(FolderSource(sender.address, SECRET, streams=2)).receive(filled(0))[1] == 1
        monkeypatch.chdir(tmp_path)
    assert names(tmp_path / "weights") == []


def test_weights_of_another_launch_are_rejected_and_deleted(tmp_path):
    old = open_sender(tmp_path, make_secret())
    publish(old, 7)
    with pytest.raises(WrongSecretError, match="contains only weights with another secret"):
        receiver_of(source_of(tmp_path), retry=PERSISTENT).newest()
    with closing(open_sender(tmp_path)) as sender:
        assert receiver_of(source_of(tmp_path)).newest() is None
        # A resumed run starts below the last version of the killed run.
        publish(sender, 3)
        assert receiver_of(source_of(tmp_path)).receive(filled(0))[1] == 3
    old.close()


def test_first_host_deletes_files_of_other_host_counts(tmp_path):
    before = [open_sender(tmp_path, host=host, hosts=2) for host in range(2)]
    for sender in before:
        publish(sender, 1)
    with closing(open_sender(tmp_path)):
        assert names(tmp_path) == []
    for sender in before:
        sender.close()


def test_version_is_complete_when_all_hosts_have_written_it(tmp_path):
    with (
        closing(open_sender(tmp_path, host=0, hosts=2)) as first,
        closing(open_sender(tmp_path, host=1, hosts=2)) as second,
    ):
        publish(first, 1, 2)
        assert source_of(tmp_path).versions() == []
        publish(second, 1)
        assert source_of(tmp_path).versions() == [1]
        received, version = receiver_of(source_of(tmp_path)).receive(filled(0))
        assert version == 1
        assert_same(received, filled(1))


@pytest.mark.parametrize("suffix", [".pieces", ".manifest"])
@pytest.mark.parametrize("damage", ["cut", "flipped", "empty"])
def test_corrupt_file_is_rejected(tmp_path, suffix: str, damage: str):
    with closing(open_sender(tmp_path)) as sender:
        publish(sender, 1)
        [path] = tmp_path.glob(f"*{suffix}")
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes({"cut": content[:-1], "flipped": content, "empty": b""}[damage])
        with pytest.raises(CorruptTransferError, match=r"weight folder .*(corrupt|bytes instead of|checksum)"):
            receiver_of(source_of(tmp_path)).receive(filled(0))


def test_receiver_takes_newest_when_version_is_deleted(tmp_path, caplog):
    with closing(open_sender(tmp_path)) as sender:
        publish(sender, 1)

        def drop(point: str) -> None:
            if point == "chunk" and source_of(tmp_path).versions() == [1]:
                publish(sender, 2, 3)

        hooked = HookedSource(FolderSource(str(tmp_path), SECRET, streams=1), drop)
        received, version = receiver_of(hooked, retry=PERSISTENT).receive(filled(0))
    assert version == 3
    assert_same(received, filled(3))
    assert "version 1 was deleted" in caplog.text


def test_deleted_explicit_version_is_named_in_error(tmp_path):
    with closing(open_sender(tmp_path)) as sender:
        publish(sender, 1, 2, 3)
        with pytest.raises(VersionGoneError, match=r"does not have version 1; available versions: \[2, 3\]"):
            receiver_of(source_of(tmp_path), retry=PERSISTENT).receive(filled(0), 1)


def test_folder_listing_error_is_retried(tmp_path):
    file = tmp_path / "file"
    file.write_text("no folder")
    pauses: list[float] = []
    source = FolderSource(str(file / "weights"), SECRET, streams=1)
    with pytest.raises(ServerLostError, match="cannot be listed"):
        receiver_of(source, retry=RetryConfig(give_up_seconds=1.0), sleep=pauses.append).newest()
    assert pauses


def test_full_disk_error_is_raised_by_next_publish(tmp_path, monkeypatch):
    with closing(open_sender(tmp_path)) as sender:
        publish(sender, 1)
        monkeypatch.setattr(shared_files, "write_parts", _no_space)
        sender.publish(filled(2), 2)
        with pytest.raises(OSError, match="no space left"):
            sender.publish(filled(3), 3)
        monkeypatch.undo()
        assert receiver_of(source_of(tmp_path)).receive(filled(0))[1] == 1


def _no_space(*arguments: object, **options: object) -> None:
    raise OSError("no space left")


@pytest.mark.medium
@settings(max_examples=20)
@given(schedule=st.lists(st.sampled_from([0, 1, None]), max_size=30))
def test_received_arrays_are_of_one_version(tmp_path_factory, schedule: list[int | None]):
    folder = tmp_path_factory.mktemp("weights")
    moves = list(schedule)
    versions = [0, 0]
    moving = threading.Lock()  # the pieces of the two hosts are read in two threads
    with (
        closing(open_sender(folder, host=0, hosts=2)) as first,
        closing(open_sender(folder, host=1, hosts=2)) as second,
    ):

        def step(host: int) -> None:
            versions[host] += 1
            publish((first, second)[host], versions[host])

        def move(point: str) -> None:
            with moving:
                host = moves.pop(0) if moves else None
                if host is not None:
                    step(host)

        def catch_up(seconds: float) -> None:
            for host in range(2):
                while versions[host] < max(versions):
                    step(host)

        step(0)
        step(1)
        source = HookedSource(FolderSource(str(folder), SECRET, streams=1), move)
        receiver = receiver_of(source, retry=PERSISTENT, sleep=catch_up)
        for _ in range(3):
            received, version = receiver.receive(filled(0))
            assert_same(received, filled(version))


def test_fingerprint_identifies_secret_without_revealing_it():
    one, other = make_secret(), make_secret()
    assert fingerprint(one) == fingerprint(one) != fingerprint(other)
    assert fingerprint(one) not in one
