# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Arrow Flight client for weights."""

import contextlib
import json
from collections.abc import Generator, Iterator, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.flight as flight

from marin_rl.types import WeightVersion
from marin_rl.weights.arrow_flight import GET_MANIFEST, LIST_VERSIONS, SCHEMA, VERSION_GONE
from marin_rl.weights.auth import TLS_NAME, check_secret, tls_identity, verify
from marin_rl.weights.errors import (
    CorruptTransferError,
    ServerLostError,
    VersionGoneError,
    WeightTransferError,
    WrongSecretError,
)
from marin_rl.weights.manifest import Chunk, Manifest

CHANNEL_OPTIONS = {
    # Without this, streams to the same server share one connection.
    "grpc.use_local_subchannel_pool": 1,
    # Weights stay inside the cluster, so ignore the proxy variables of the environment.
    "grpc.enable_http_proxy": 0,
}
"""gRPC channel options."""


class FlightSource:
    """Client of one weight server; see [`WeightSource`][marin_rl.weights.source.WeightSource]."""

    def __init__(self, address: str, secret: str, *, streams: int, call_seconds: float) -> None:
        """Set up the client without connecting.

        Args:
            address: The server, `grpc+tls://host:port`.
            secret: The run's secret.
            streams: Number of concurrent streams, each on a separate connection.
            call_seconds: Timeout of a call, in seconds.
        """
        check_secret(secret)
        self._address = address
        self._secret = secret
        self._streams = streams
        self._identity = tls_identity(secret)
        self._options = flight.FlightCallOptions(timeout=call_seconds)

    def __str__(self) -> str:
        return f"weight server {self._address}"

    @property
    def streams(self) -> int:
        """See [`WeightSource`][marin_rl.weights.source.WeightSource]."""
        return self._streams

    def versions(self) -> list[WeightVersion]:
        """See [`WeightSource`][marin_rl.weights.source.WeightSource]."""
        answer = self._act(flight.Action(LIST_VERSIONS, b""))
        try:
            return [int(version) for version in json.loads(answer)]
        except (ValueError, TypeError) as error:
            raise CorruptTransferError(f"{self}: the list of versions is corrupt: {answer[:80]!r}") from error

    def manifests(self, version: WeightVersion) -> list[Manifest]:
        """See [`WeightSource`][marin_rl.weights.source.WeightSource]."""
        body = verify(self._secret, self._act(flight.Action(GET_MANIFEST, str(version).encode())), str(self))
        return [Manifest.from_json(body)]

    def fetch(self, manifest: Manifest, chunks: Sequence[Chunk]) -> Generator[np.ndarray, None, None]:
        """See [`WeightSource`][marin_rl.weights.source.WeightSource]."""
        ticket = {"version": manifest.version, "chunks": [(chunk.piece, chunk.number) for chunk in chunks]}
        with self._connected() as client:
            reader = client.do_get(flight.Ticket(json.dumps(ticket, separators=(",", ":")).encode()), self._options)
            if reader.schema != SCHEMA:
                raise CorruptTransferError(f"{self}: the stream has schema {reader.schema}, expected {SCHEMA}")
            try:
                for batch in reader:
                    yield np.frombuffer(batch.data.column(0).buffers()[1], np.uint8, count=batch.data.num_rows)
            finally:
                # Cancel the call if the reader stops early; otherwise the server waits for it.
                reader.cancel()

    def _act(self, action: flight.Action) -> bytes:
        with self._connected() as client:
            return b"".join(result.body.to_pybytes() for result in client.do_action(action, self._options))

    @contextlib.contextmanager
    def _connected(self) -> Iterator[flight.FlightClient]:
        """Open a connection and translate its errors to `WeightTransferError`."""
        try:
            with flight.FlightClient(
                self._address,
                tls_root_certs=self._identity.root,
                cert_chain=self._identity.certificate,
                private_key=self._identity.key,
                override_hostname=TLS_NAME,
                generic_options=list(CHANNEL_OPTIONS.items()),
            ) as client:
                yield client
        except (pa.ArrowException, OSError) as error:
            raise self._translate(error) from error

    def _translate(self, error: pa.ArrowException | OSError) -> WeightTransferError:
        reason = str(error).split(". gRPC client debug context", maxsplit=1)[0]
        if (
            isinstance(error, flight.FlightUnavailableError)
            and "handshake failed" in reason
            and "certificate" in reason
        ):
            return WrongSecretError(
                f"{self} has a different secret, so it belongs to another run or an earlier launch: {reason}"
            )
        if isinstance(error, flight.FlightError) and error.extra_info == VERSION_GONE:
            return VersionGoneError(f"{self}: {reason}")
        if isinstance(error, pa.ArrowInvalid):
            return CorruptTransferError(f"{self}: the received data cannot be read: {reason}")
        return ServerLostError(f"{self} does not respond: {reason}")
