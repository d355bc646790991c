# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import contextlib
import gc
import os
import pathlib
import random
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.flight as flight
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import marin_rl
from marin_rl.config.workers_config import WeightTransferConfig
from marin_rl.distributed.weight_manifest import (
    Chunk,
    CorruptTransferError,
    VersionGoneError,
    WeightServerLostError,
    WrongSecretError,
)
from marin_rl.distributed.weight_sender import TrainingHost, WeightSender, open_sender
from marin_rl.distributed.weight_server import FlightSource, WeightServer, make_secret, tls_identity
from marin_rl.utils.retry import RetryConfig
from tests.distributed.weight_endpoints import (
    SECRET,
    HookedSource,
    assert_same,
    client_of,
    closing,
    receiver_of,
    serving,
    snapshot_of,
    source_of,
    split,
)

WEIGHTS = {"w": np.arange(3000, dtype=np.float32), "b": np.float32([[1], [2]])}
PERSISTENT = RetryConfig(give_up_seconds=1000.0)


def sender_of(**changes: object) -> WeightSender:
    return open_sender(WeightTransferConfig(**changes), SECRET, TrainingHost.current())


def filled(version: int) -> dict[str, np.ndarray]:
    return {name: np.full(600, version, np.float32) for name in "abcd"}


# Versions.


def test_newest_versions_are_kept():
    with serving() as server:
        source = source_of(server)
        assert source.versions() == []
        for version in (4, 5, 9):
            server.put(snapshot_of(WEIGHTS, version))
        assert source.versions() == [5, 9]
        assert source.manifest(5).version == 5
        with pytest.raises(
            VersionGoneError, match=r"the tested host does not have version 4; available versions: \[5, 9\]"
        ):
            source.manifest(4)


# The secret.


def test_wrong_secret_is_rejected_without_retry():
    pauses: list[float] = []
    with serving() as server:
        server.put(snapshot_of(WEIGHTS, 1))
        manifest = source_of(server).manifest(1)
        wrong = source_of(server, make_secret())
        receiver = receiver_of(wrong, retry=PERSISTENT, sleep=pauses.append)
        with pytest.raises(
            WrongSecretError, match=r"weight server grpc\+tls://127\.0\.0\.1:\d+ has a different secret"
        ):
            receiver.receive(WEIGHTS)
        with pytest.raises(WrongSecretError):
            receiver.newest()
        with pytest.raises(WrongSecretError):
            list(wrong.fetch(manifest, manifest.chunks(0)))
    assert pauses == []


def peak_memory(process: subprocess.Popen[str]) -> int:
    """Return the peak resident memory of a process in bytes."""
    status = pathlib.Path(f"/proc/{process.pid}/status").read_text()
    return 1024 * int(status.partition("VmHWM:")[2].split()[0])


@pytest.mark.medium
def test_server_reads_no_message_without_the_secret():
    other = tls_identity(make_secret())
    strangers = {
        "grpc": {},
        "grpc+tls": {"disable_server_verification": True},
        "grpc+tls:": {
            "disable_server_verification": True,
            "cert_chain": other.certificate,
            "private_key": other.key,
        },
    }
    server = start("killed_server.py", "0", "1", "open")
    try:
        assert server.stdout is not None
        port = server.stdout.readline().strip()
        before = peak_memory(server)
        large = flight.Action("versions", bytes(2**26))
        for scheme, options in strangers.items():
            with flight.FlightClient(f"{scheme.rstrip(':')}://127.0.0.1:{port}", **options) as stranger:
                with pytest.raises(flight.FlightUnavailableError):
                    list(stranger.do_action(large, flight.FlightCallOptions(timeout=60.0)))
                with pytest.raises(flight.FlightUnavailableError):
                    stranger.do_get(flight.Ticket(bytes(2**26)), flight.FlightCallOptions(timeout=60.0)).read_all()
        assert peak_memory(server) - before < 2**24
        source = FlightSource(f"grpc+tls://127.0.0.1:{port}", SECRET, streams=1)
        assert source.versions() == [1]
    finally:
        server.kill()
        server.communicate()


@pytest.mark.parametrize(
    ("ticket", "message"),
    [
        (b'{"version": 1, "chunks": [[1, 12]]}', "version 1 has no chunk 12 of piece 1"),
        (b'{"version": 1, "chunks": [[0, -1]]}', "version 1 has no chunk -1 of piece 0"),
        (b'{"version": 1, "chunks": [[2, 0]]}', "version 1 has no chunk 0 of piece 2"),
        (b'{"version": 7, "chunks": [[0, 0]]}', "does not have version 7"),
        (b'{"version": 1, "chunks": [[0, 0.0]]}', r"(?s)invalid request: .*chunks\.0\.1.*should be a valid integer"),
        (b"\xff", "(?s)invalid request: .*Invalid JSON"),
    ],
    ids=["number", "negative", "piece", "version", "float", "text"],
)
def test_invalid_requests_are_rejected(ticket: bytes, message: str):
    with serving() as server, client_of(server) as client:
        server.put(snapshot_of(WEIGHTS, 1))
        with pytest.raises(flight.FlightServerError, match=message):
            client.do_get(flight.Ticket(ticket)).read_all()
        for action in (flight.Action("manifest", b"one"), flight.Action("anything", b"")):
            with pytest.raises(flight.FlightServerError, match=r"invalid request|unknown action 'anything'"):
                list(client.do_action(action))
        assert_same(receiver_of(source_of(server)).receive(WEIGHTS)[0], WEIGHTS)


@pytest.mark.parametrize("secret", ["", "x" * 31, "ä" * 40, "x" * 40 + "\n"])
def test_weak_secret_is_rejected(secret: str):
    with pytest.raises(ValueError, match=f"the secret of the weight transfer has {len(secret)} characters"):
        tls_identity(secret)


def test_certificates_reveal_no_secret():
    one, other = make_secret(), make_secret()
    assert tls_identity(one).key == tls_identity(one).key != tls_identity(other).key
    assert one.encode() not in tls_identity(one).root + tls_identity(one).certificate


# The address.


def test_server_binds_loopback_by_default():
    with closing(sender_of()) as sender:
        port = int(sender.address.removeprefix("grpc+tls://127.0.0.1:"))
        with socket.create_connection(("127.0.0.1", port)):
            pass
        with pytest.raises(OSError, match="refused"):
            socket.create_connection(("127.0.0.2", port))


def test_wildcard_host_is_announced_as_host_name():
    with closing(sender_of(host="0.0.0.0")) as sender:
        assert sender.address.startswith(f"grpc+tls://{socket.gethostname()}:")


def test_error_names_an_occupied_port():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match=rf"cannot serve weights at grpc\+tls://127\.0\.0\.1:{port}"):
            sender_of(port=port)


def test_close_releases_port_and_threads_with_a_stalled_worker():
    before = set(threading.enumerate())
    server = WeightServer(SECRET, "the tested host", host="127.0.0.1", port=0)
    sender = WeightSender(server, frozenset(), chunk_bytes=2**20)
    sender.publish({"w": np.zeros(2**24, np.float32)}, 1)
    sender.flush()
    source = FlightSource(sender.address, SECRET, streams=1)
    manifest = source.manifest(1)
    stream = source.fetch(manifest, manifest.chunks(0))
    next(stream)
    sender.close()
    stream.close()
    with socket.create_server(("127.0.0.1", int(sender.address.rsplit(":", 1)[1]))):
        pass
    # Threads of gRPC that have logged stay listed as dummies.
    left = set(threading.enumerate()) - before
    assert [thread for thread in left if not isinstance(thread, threading._DummyThread)] == []


# Corrupt streams.


class CorruptingServer(WeightServer):
    """Server that applies the next function of `corruptions` to each stream."""

    corruptions: list[Callable[[list[np.ndarray]], list[np.ndarray]]]

    def send_chunks(self, version: int, chunks: list[Chunk]) -> Iterator[pa.RecordBatch]:
        chunk_data = [batch.column(0).to_numpy().copy() for batch in super().send_chunks(version, chunks)]
        sent = self.corruptions.pop(0)(chunk_data) if self.corruptions else chunk_data
        for data in sent:
            yield pa.record_batch([pa.array(data)], schema=pa.schema([pa.field("bytes", pa.uint8(), nullable=False)]))


CORRUPTIONS = {
    "truncated": (lambda chunks: chunks[:-1], r"ended after 11 of 12 chunks"),
    "empty": (lambda chunks: [], r"ended after 0 of 12 chunks"),
    "short chunk": (
        lambda chunks: [chunks[0][:-1], *chunks[1:]],
        r"chunk 0 of piece \['0:3000'\] of \['w'\], version 1, has 1023 of 1024 bytes",
    ),
    "long chunk": (lambda chunks: [*chunks[:-1], np.append(chunks[-1], [0])], r"chunk 11 .* has 737 of 736"),
}


@pytest.mark.parametrize("corruption", CORRUPTIONS)
def test_corrupt_stream_is_detected_and_retried(corruption: str, caplog):
    spoil, message = CORRUPTIONS[corruption]
    with serving(CorruptingServer) as server:
        server.put(snapshot_of({"w": WEIGHTS["w"]}, 1))
        server.corruptions = [spoil]
        with pytest.raises(CorruptTransferError, match=message):
            receiver_of(source_of(server)).receive({"w": WEIGHTS["w"]})
        server.corruptions = [spoil, spoil]
        received, _ = receiver_of(source_of(server), retry=PERSISTENT).receive({"w": WEIGHTS["w"]})
    assert_same(received, {"w": WEIGHTS["w"]})
    assert len(caplog.records) == 2


# Dropped versions.


class GatedServer(WeightServer):
    """Server that blocks each stream after the first chunk until the test opens the gate."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.gate = threading.Event()

    def send_chunks(self, version: int, chunks: list[Chunk]) -> Iterator[pa.RecordBatch]:
        for batch in super().send_chunks(version, chunks):
            yield batch
            self.gate.wait()


@contextlib.contextmanager
def gated() -> Iterator[GatedServer]:
    with serving(GatedServer) as server:
        try:
            yield server
        finally:
            server.gate.set()


def test_version_dropped_during_transfer_is_replaced(caplog):
    with gated() as server:
        server.put(snapshot_of(filled(1), 1))

        def drop(point: str) -> None:
            if point == "chunk" and 1 in server.versions():
                for later in (2, 3):
                    server.put(snapshot_of(filled(later), later))
                server.gate.set()

        received, found = receiver_of(HookedSource(source_of(server), drop), retry=PERSISTENT).receive(filled(0))
    assert found == 3
    assert_same(received, filled(3))
    assert "the tested host does not have version 1; available versions: [2, 3]" in caplog.text


def test_stalled_worker_keeps_no_version_alive():
    with gated() as server:
        snapshot = snapshot_of(filled(1), 1)
        held = weakref.ref(snapshot)
        server.put(snapshot)
        del snapshot
        source = source_of(server)
        manifest = source.manifest(1)
        stream = source.fetch(manifest, manifest.chunks(0))
        next(stream)
        for later in (2, 3):
            server.put(snapshot_of(filled(later), later))
        gc.collect()
        assert held() is None
        server.gate.set()
        with pytest.raises(VersionGoneError, match=r"does not have version 1; available versions: \[2, 3\]"):
            list(stream)


# Lost and killed servers.


def test_error_names_address_of_lost_server():
    with serving() as server:
        source = source_of(server)
    message = rf"weight server grpc\+tls://127\.0\.0\.1:{server.port} does not respond"
    with pytest.raises(WeightServerLostError, match=message):
        receiver_of(source).newest()
    retry = RetryConfig(first_seconds=1.0, longest_seconds=1.0, give_up_seconds=3.0)
    with pytest.raises(WeightServerLostError, match="given up after"):
        receiver_of(source, retry=retry).receive(WEIGHTS)


def test_hanging_server_times_out():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"grpc+tls://127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(WeightServerLostError, match="does not respond"):
            receiver_of(FlightSource(address, SECRET, streams=1, call_seconds=0.2)).newest()


def test_proxy_variables_are_ignored(monkeypatch: pytest.MonkeyPatch):
    with socket.create_server(("127.0.0.1", 0)) as proxy, serving() as server:
        for name in ("http_proxy", "grpc_proxy", "https_proxy"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{proxy.getsockname()[1]}")
        for name in ("no_proxy", "no_grpc_proxy"):
            monkeypatch.delenv(name, raising=False)
        server.put(snapshot_of(WEIGHTS, 1))
        assert_same(receiver_of(source_of(server)).receive(WEIGHTS)[0], WEIGHTS)


def start(script: str, *arguments: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(pathlib.Path(marin_rl.__file__).parents[1])}
    command = [sys.executable, str(pathlib.Path(__file__).with_name(script)), SECRET, *arguments]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True)


@pytest.mark.medium
def test_receiver_recovers_from_killed_server(caplog):
    like = {"w": np.zeros(2**20, np.float32)}
    first = start("killed_server.py", "0", "1", "gated")
    assert first.stdout is not None
    port = first.stdout.readline().strip()
    servers = [first]

    def kill(point: str) -> None:
        if point == "chunk" and len(servers) == 1 and first.poll() is None:
            first.kill()
            first.wait()

    def replace(seconds: float) -> None:
        if len(servers) == 1:
            servers.append(start("killed_server.py", port, "2", "open"))
            assert servers[1].stdout is not None
            assert servers[1].stdout.readline().strip() == port

    try:
        source = FlightSource(f"grpc+tls://127.0.0.1:{port}", SECRET, streams=2)
        receiver = receiver_of(HookedSource(source, kill), retry=PERSISTENT, sleep=replace)
        received, version = receiver.receive(like)
    finally:
        for server in servers:
            server.kill()
            server.communicate()
    assert version == 2
    assert (received["w"] == 2).all()
    assert first.returncode == -signal.SIGKILL
    assert f"weight server grpc+tls://127.0.0.1:{port} does not respond" in caplog.text


# Several training hosts.


@pytest.mark.medium
@settings(max_examples=25)
@given(schedule=st.lists(st.sampled_from(["first", "second", "nothing"]), max_size=40), seed=st.integers(0, 2**16))
def test_received_arrays_are_of_one_version(schedule: list[str], seed: int):
    """Two hosts publish at any point of a transfer; all received arrays are of one version."""
    moves = list(schedule)
    publishing = threading.Lock()
    names = ("first", "second")
    with serving() as first, serving() as second:
        servers = dict(zip(names, (first, second), strict=True))
        versions = dict.fromkeys(names, 0)

        def publish(name: str) -> None:
            version = versions[name] + 1
            servers[name].put(split(snapshot_of(filled(version), version), 2)[names.index(name)])
            versions[name] = version

        def move(point: str) -> None:
            # Hooks run in the threads of the streams; a training host publishes its versions in order.
            with publishing:
                name = moves.pop(0) if moves else "nothing"
                if name != "nothing":
                    publish(name)

        def catch_up(seconds: float) -> None:
            for name in names:
                while versions[name] < max(versions.values()):
                    publish(name)

        publish("first")
        publish("second")
        sources = [HookedSource(source_of(server, streams=2), move) for server in (first, second)]
        random.Random(seed).shuffle(sources)
        receiver = receiver_of(*sources, retry=PERSISTENT, sleep=catch_up)
        last = 0
        for _ in range(3):
            received, version = receiver.receive(filled(0))
            assert_same(received, filled(version))
            assert version >= last
            last = version
