# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Arrow Flight server and client for weights: each training host serves its own shards.

A stream is a sequence of record batches with one column of bytes. Each batch is one chunk and shares the memory of the
snapshot. Server and client authenticate in the TLS handshake with certificates derived from the run's secret. gRPC
reads a whole message before a handler or middleware sees its headers, so the server must reject callers without the
secret in the handshake.
"""

import contextlib
import dataclasses
import socket
import threading
from collections.abc import Generator, Iterator, Sequence
from typing import Annotated

import numpy as np
import pyarrow as pa
import pyarrow.flight as flight
import pydantic

from marin_rl.distributed.weights.errors import (
    CorruptTransferError,
    ServerLostError,
    VersionGoneError,
    WrongSecretError,
)
from marin_rl.distributed.weights.manifest import Chunk, Manifest, Snapshot
from marin_rl.distributed.weights.secret import TLS_NAME, tls_identity
from marin_rl.types import WeightVersion

KEPT_VERSIONS = 2
"""Newest versions that a server keeps, so that transfers of the previous version can finish."""


@dataclasses.dataclass(frozen=True)
class _Ticket:
    """Request of a stream."""

    version: WeightVersion
    # A ticket may have millions of chunks; report the first error only.
    chunks: Annotated[list[Chunk], pydantic.FailFast()]


_TICKET = pydantic.TypeAdapter(_Ticket)
_VERSIONS = pydantic.TypeAdapter(list[WeightVersion])

SCHEMA = pa.schema([pa.field("bytes", pa.uint8(), nullable=False)])
"""Arrow schema of a stream."""

LIST_VERSIONS = "versions"
"""Action that returns a JSON list of the available versions."""

GET_MANIFEST = "manifest"
"""Action that returns the manifest of the version in its body."""

VERSION_GONE = b"version gone"
"""Detail of the error for a version that is not available."""

MAX_VERSION_BYTES = 32
"""Maximum size of the body of the action `manifest`."""

MAX_TICKET_BYTES_PER_CHUNK = 32
"""Maximum size of one ticket entry: two indices with brackets and commas."""

WILDCARDS = ("0.0.0.0", "::")
"""Hosts that bind every network interface. Clients cannot connect to these names."""


class WeightServer(flight.FlightServerBase):
    """Serves the newest versions of one training host from memory; see `open_sender`."""

    def __init__(self, secret: str, name: str, *, host: str, port: int) -> None:
        """Bind the port and start serving in background threads.

        Args:
            secret: the run's secret. Callers without it are rejected in the TLS handshake.
            name: name of the training host in error messages.
            host: name or address to bind.
            port: port to bind; 0 selects a free port.

        Raises:
            ValueError: if the secret is weak.
            OSError: if the address cannot be bound.
        """
        # The base class serves as soon as it is constructed.
        self._name = name
        self._lock = threading.Lock()
        self._kept: dict[WeightVersion, Snapshot] = {}
        identity = tls_identity(secret)
        try:
            super().__init__(
                _location(host, port),
                tls_certificates=[(identity.certificate, identity.key)],
                verify_client=True,
                root_certificates=identity.root,
            )
        except (pa.ArrowException, OSError) as error:
            raise OSError(f"cannot serve weights at {_location(host, port)}: {error}; correct host and port") from error
        self.address = _location(socket.gethostname() if host in WILDCARDS else host, self.port)
        """`grpc+tls://host:port`, with this machine's name if the configured host is a wildcard."""

    def put(self, snapshot: Snapshot) -> None:
        """Make a version available and drop the oldest if there are too many."""
        with self._lock:
            self._kept[snapshot.manifest.version] = snapshot
            for old in sorted(self._kept)[:-KEPT_VERSIONS]:
                del self._kept[old]

    def versions(self) -> list[WeightVersion]:
        """Return the available versions, oldest first."""
        with self._lock:
            return sorted(self._kept)

    def close(self) -> None:
        """Drop all versions, abort active streams, and release threads and port.

        A worker that stalls during a transfer delays this call until TCP closes its connection, about 20 seconds.
        """
        with self._lock:
            self._kept.clear()
        self.shutdown()

    def do_action(self, context: flight.ServerCallContext, action: flight.Action) -> list[bytes]:
        """Handle the actions `versions` and `manifest`."""
        if action.type == LIST_VERSIONS:
            return [_VERSIONS.dump_json(self.versions())]
        if action.type == GET_MANIFEST:
            return [self._snapshot(_parse_version(action.body)).manifest.encode()]
        raise flight.FlightServerError(f"unknown action {action.type!r}; use versions or manifest")

    def do_get(self, context: flight.ServerCallContext, ticket: flight.Ticket) -> flight.GeneratorStream:
        """Stream the chunks of a JSON ticket, `{"version": v, "chunks": [[piece, number], …]}`."""
        # Every version has the same layout, so the newest version bounds the size of any ticket.
        versions = self.versions()
        if not versions:
            raise flight.FlightServerError("no version is available", extra_info=VERSION_GONE)
        count = sum(len(piece.checksums) for piece in self._snapshot(versions[-1]).manifest.pieces)
        limit = MAX_TICKET_BYTES_PER_CHUNK * (count + 2)
        if len(ticket.ticket) > limit:
            raise flight.FlightServerError(
                f"the ticket has {len(ticket.ticket)} bytes; a ticket for the {count} chunks of a version has at most "
                f"{limit}"
            )
        try:
            request = _TICKET.validate_json(ticket.ticket, strict=True)
        except pydantic.ValidationError as error:
            raise flight.FlightServerError(f"invalid ticket: {error}") from error
        version, chunks = request.version, request.chunks
        manifest = self._snapshot(version).manifest
        if unknown := [chunk for chunk in chunks if not manifest.has(chunk)]:
            raise flight.FlightServerError(
                f"version {version} has no chunk {unknown[0].number} of piece {unknown[0].piece}"
            )
        if len(set(chunks)) < len(chunks):
            raise flight.FlightServerError(f"the ticket for version {version} contains a chunk twice")
        return flight.GeneratorStream(SCHEMA, self.send_chunks(version, chunks))

    def send_chunks(self, version: WeightVersion, chunks: list[Chunk]) -> Iterator[pa.RecordBatch]:
        """Generate one record batch per chunk. Fault tests override this to pause or corrupt streams."""
        for chunk in chunks:
            # Look up the snapshot for each chunk: a stalled worker must not keep an old version in memory.
            data = self._snapshot(version).chunk(chunk)
            column = pa.Array.from_buffers(pa.uint8(), len(data), [None, pa.py_buffer(data)])
            yield pa.record_batch([column], schema=SCHEMA)

    def _snapshot(self, version: WeightVersion) -> Snapshot:
        with self._lock:
            if version not in self._kept:
                raise flight.FlightServerError(
                    f"{self._name} does not have version {version}; available versions: {sorted(self._kept) or 'none'}",
                    extra_info=VERSION_GONE,
                )
            return self._kept[version]


def _parse_version(body: pa.Buffer) -> WeightVersion:
    if body.size > MAX_VERSION_BYTES:
        raise flight.FlightServerError(f"the version has {body.size} bytes; it may have at most {MAX_VERSION_BYTES}")
    try:
        return int(body.to_pybytes())
    except ValueError as error:
        raise flight.FlightServerError(f"{body.to_pybytes()!r} is not a version: {error}") from error


def _location(host: str, port: int) -> str:
    return f"grpc+tls://[{host}]:{port}" if ":" in host else f"grpc+tls://{host}:{port}"


CHANNEL_OPTIONS = {
    # Without this, streams to the same server share one connection.
    "grpc.use_local_subchannel_pool": 1,
    # Weights stay inside the cluster, so ignore the proxy variables of the environment.
    "grpc.enable_http_proxy": 0,
}
"""gRPC channel options."""


CALL_SECONDS = 600.0
"""Timeout of a stream of weights, and of other calls."""


class FlightSource:
    """Client of one weight server. Thread-safe."""

    def __init__(self, address: str, secret: str, *, streams: int, call_seconds: float = CALL_SECONDS) -> None:
        """Set up the client without connecting.

        Args:
            address: the server, `grpc+tls://host:port`.
            secret: the run's secret.
            streams: number of concurrent streams, each on a separate connection.
            call_seconds: timeout of a call, in seconds.
        """
        self._address = address
        self.streams = streams
        """Number of concurrent streams."""
        self._identity = tls_identity(secret)
        self._options = flight.FlightCallOptions(timeout=call_seconds)

    def __str__(self) -> str:
        return f"weight server {self._address}"

    def versions(self) -> list[WeightVersion]:
        """Return the available versions, oldest first.

        Raises:
            WeightTransferError: if the server does not respond or rejects the call.
        """
        answer = self._act(flight.Action(LIST_VERSIONS, b""))
        try:
            return _VERSIONS.validate_json(answer, strict=True)
        except pydantic.ValidationError as error:
            raise CorruptTransferError(f"{self}: the list of versions is corrupt: {answer[:80]!r}") from error

    def manifest(self, version: WeightVersion) -> Manifest:
        """Return the manifest of a version.

        Raises:
            VersionGoneError: if the version is not available.
            WeightTransferError: if the server does not respond or rejects the call.
        """
        return Manifest.decode(self._act(flight.Action(GET_MANIFEST, str(version).encode())), str(self))

    def fetch(self, manifest: Manifest, chunks: Sequence[Chunk]) -> Generator[np.ndarray, None, None]:
        """Yield the bytes (uint8) of the chunks in order, unchecked; fewer chunks if the stream was cut.

        Raises:
            VersionGoneError: if the version is dropped during the transfer.
            WeightTransferError: if the stream fails.
        """
        ticket = flight.Ticket(_TICKET.dump_json(_Ticket(manifest.version, list(chunks))))
        with self._connected() as client:
            reader = client.do_get(ticket, self._options)
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
            reason = str(error).split(". gRPC client debug context", maxsplit=1)[0]
            is_unavailable = isinstance(error, flight.FlightUnavailableError)
            if is_unavailable and "handshake failed" in reason and "certificate" in reason:
                raise WrongSecretError(
                    f"{self} has a different secret, so it belongs to another run or an earlier launch: {reason}"
                ) from error
            if isinstance(error, flight.FlightError) and error.extra_info == VERSION_GONE:
                raise VersionGoneError(f"{self}: {reason}") from error
            if isinstance(error, pa.ArrowInvalid):
                raise CorruptTransferError(f"{self}: the received data cannot be read: {reason}") from error
            raise ServerLostError(f"{self} does not respond: {reason}") from error
