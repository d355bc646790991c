# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import socket

import numpy as np
import pyarrow as pa
import pyarrow.flight as flight
import pytest

from marin_rl.distributed.weights.arrow_flight import FlightSource, WeightServer
from marin_rl.distributed.weights.errors import CorruptTransferError, ServerLostError
from marin_rl.utils.retry import RetryConfig
from tests.distributed.weights.endpoints import SECRET, assert_same, receiver_of, serving, snapshot_of, source_of

WEIGHTS = {"w": np.arange(3000, dtype=np.float32), "b": np.float32([[1], [2]])}


class ForgingServer(WeightServer):
    """Server with a fixed response to every action."""

    answers: dict[str, bytes]

    def do_action(self, context: flight.ServerCallContext, action: flight.Action) -> list[bytes]:
        return [self.answers[action.type]] if action.type in self.answers else super().do_action(context, action)


@pytest.mark.parametrize("answer", [b"", b"[]", b'{"pieces": []}'])
def test_corrupt_manifest_is_rejected(answer: bytes):
    with serving(ForgingServer) as server:
        server.put(snapshot_of(WEIGHTS, 1))
        server.answers = {"manifest": answer}
        with pytest.raises(CorruptTransferError, match=rf"the manifest \({len(answer)} bytes\) is corrupt"):
            receiver_of(source_of(server)).receive(WEIGHTS)


def test_manifest_of_other_weights_is_detected():
    """A manifest of a valid form but another content, or of another version."""
    other = {name: array + 1 for name, array in WEIGHTS.items()}
    with serving(ForgingServer) as server:
        server.put(snapshot_of(WEIGHTS, 1))
        server.answers = {"manifest": snapshot_of(other, 1).manifest.encode()}
        with pytest.raises(CorruptTransferError, match=r"version 1, is corrupt: .* bytes arrived, with checksum"):
            receiver_of(source_of(server)).receive(WEIGHTS)
        server.answers = {"manifest": snapshot_of(WEIGHTS, 2).manifest.encode()}
        with pytest.raises(CorruptTransferError, match="requested version 1, got the manifest of version 2"):
            receiver_of(source_of(server)).receive(WEIGHTS)


@pytest.mark.parametrize("answer", [b"", b"7", b"[null]", b'["new"]'])
def test_corrupt_list_of_versions_is_rejected(answer: bytes):
    with serving(ForgingServer) as server:
        server.answers = {"versions": answer}
        with pytest.raises(CorruptTransferError, match="list of versions is corrupt"):
            receiver_of(source_of(server)).newest()


def test_wrong_schema_is_rejected():
    class ForeignServer(WeightServer):
        def do_get(self, context: flight.ServerCallContext, ticket: flight.Ticket) -> flight.RecordBatchStream:
            return flight.RecordBatchStream(pa.table({"text": ["a"]}))

    with serving(ForeignServer) as server:
        server.put(snapshot_of(WEIGHTS, 1))
        with pytest.raises(CorruptTransferError, match="the stream has schema text: string, expected bytes: uint8"):
            receiver_of(source_of(server)).receive(WEIGHTS)


def test_proxy_variables_are_ignored(monkeypatch: pytest.MonkeyPatch):
    with socket.create_server(("127.0.0.1", 0)) as proxy, serving() as server:
        for name in ("http_proxy", "grpc_proxy", "https_proxy"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{proxy.getsockname()[1]}")
        monkeypatch.delenv("no_proxy", raising=False)
        monkeypatch.delenv("no_grpc_proxy", raising=False)
        server.put(snapshot_of(WEIGHTS, 1))
        source = source_of(server)
        assert_same(receiver_of(source).receive(WEIGHTS)[0], WEIGHTS)


def test_error_names_address_of_lost_server():
    with serving() as server:
        source = source_of(server)
    with pytest.raises(
        ServerLostError, match=rf"weight server grpc\+tls://127\.0\.0\.1:{server.port} does not respond"
    ):
        receiver_of(source).newest()
    retry = RetryConfig(first_seconds=1.0, longest_seconds=1.0, give_up_seconds=3.0)
    with pytest.raises(ServerLostError, match="given up after"):
        receiver_of(source, retry=retry).receive(WEIGHTS)


def test_hanging_server_times_out():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"grpc+tls://127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(ServerLostError, match="does not respond"):
            receiver_of(FlightSource(address, SECRET, streams=1, call_seconds=0.2)).newest()
