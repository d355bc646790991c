# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Arrow Flight server for weights: each training host serves its own shards.

A stream is a sequence of record batches with one column of bytes. Each batch is one chunk and shares the memory of the
snapshot. Server and client authenticate in the TLS handshake with certificates derived from the run's secret. gRPC
reads a whole message before a handler or middleware sees its headers, so the server must reject callers without the
secret in the handshake.
"""

import contextlib
import json
import socket
import threading
from collections.abc import Generator, Iterator, Sequence
from typing import Generic, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.flight as flight

from marin_rl.types import WeightVersion
from marin_rl.weights.auth import TLS_NAME, check_secret, sign, tls_identity, verify
from marin_rl.weights.manifest import Chunk, Manifest
from marin_rl.weights.protocol import (
    CorruptTransferError,
    ServerLostError,
    VersionGoneError,
    WeightTransferError,
    WrongSecretError,
)
from marin_rl.weights.publish import Snapshot, TrainingHost

T = TypeVar("T")


class VersionCache(Generic[T]):
    """Keeps the newest versions and drops older ones. Thread-safe."""

    def __init__(self, keep: int, name: str) -> None:
        """Make an empty cache.

        Args:
            keep: Maximum number of versions.
            name: Name in error messages.
        """
        self._keep = keep
        self._name = name
        self._lock = threading.Lock()
        self._held: dict[WeightVersion, T] = {}

    def put(self, version: WeightVersion, item: T) -> None:
        """Add a version and drop the oldest if there are too many."""
        with self._lock:
            self._held[version] = item
            for old in sorted(self._held)[: -self._keep]:
                del self._held[old]

    def get(self, version: WeightVersion) -> T:
        """Return the item of a version.

        Raises:
            VersionGoneError: If the version is not in the cache.
        """
        with self._lock:
            if version not in self._held:
                raise VersionGoneError(
                    f"{self._name} does not have version {version}; available versions: {sorted(self._held) or 'none'}"
                )
            return self._held[version]

    def newest(self) -> tuple[WeightVersion, T] | None:
        """Return the newest version and its item, or None if the cache is empty."""
        with self._lock:
            return max(self._held.items(), key=lambda pair: pair[0], default=None)

    def versions(self) -> list[WeightVersion]:
        """Return the versions in the cache, oldest first."""
        with self._lock:
            return sorted(self._held)

    def clear(self) -> None:
        """Drop all versions."""
        with self._lock:
            self._held.clear()


SCHEMA = pa.schema([pa.field("bytes", pa.uint8(), nullable=False)])
"""Arrow schema of a stream."""

LIST_VERSIONS = "versions"
"""Action that returns a JSON list of the available versions."""

GET_MANIFEST = "manifest"
"""Action that returns the signed manifest of the version in its body."""

VERSION_GONE = b"version gone"
"""Detail of the error for a version that is not available."""

MAX_VERSION_BYTES = 32
"""Maximum size of the body of the action `manifest`."""

MAX_TICKET_BYTES_PER_CHUNK = 32
"""Maximum size of one ticket entry: two indices with brackets and commas."""

WILDCARDS = ("0.0.0.0", "::")
"""Hosts that bind every network interface. Clients cannot connect to these names."""


class WeightServer(flight.FlightServerBase):
    """Flight server for the snapshots in a version cache."""

    def __init__(self, cache: VersionCache[Snapshot], secret: str, location: str) -> None:
        """Start serving in background threads.

        Args:
            cache: The snapshots to serve.
            secret: The run's secret. Callers without it are rejected in the TLS handshake.
            location: `grpc+tls://host:port`; port 0 selects a free port.
        """
        identity = tls_identity(secret)
        super().__init__(
            location,
            tls_certificates=[(identity.certificate, identity.key)],
            verify_client=True,
            root_certificates=identity.root,
        )
        self._cache = cache
        self._secret = secret

    def do_action(self, context: flight.ServerCallContext, action: flight.Action) -> list[bytes]:
        """Handle the actions `versions` and `manifest`."""
        if action.type == LIST_VERSIONS:
            return [json.dumps(self._cache.versions()).encode()]
        if action.type == GET_MANIFEST:
            return [sign(self._secret, self._snapshot(_parse_version(action.body)).manifest.to_json())]
        raise flight.FlightServerError(f"unknown action {action.type!r}; use versions or manifest")

    def do_get(self, context: flight.ServerCallContext, ticket: flight.Ticket) -> flight.GeneratorStream:
        """Stream the chunks of a JSON ticket, `{"version": v, "chunks": [[piece, number], …]}`."""
        # Every version has the same layout, so the newest version bounds the size of any ticket.
        newest = self._cache.newest()
        if newest is None:
            raise flight.FlightServerError("no version is available", extra_info=VERSION_GONE)
        count = newest[1].manifest.num_chunks
        limit = MAX_TICKET_BYTES_PER_CHUNK * (count + 2)
        if len(ticket.ticket) > limit:
            raise flight.FlightServerError(
                f"the ticket has {len(ticket.ticket)} bytes; a ticket for the {count} chunks of a version has at most "
                f"{limit}"
            )
        version, chunks = _parse_ticket(ticket.ticket)
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
        try:
            return self._cache.get(version)
        except VersionGoneError as error:
            raise flight.FlightServerError(str(error), extra_info=VERSION_GONE) from error


def _parse_version(body: pa.Buffer) -> WeightVersion:
    if body.size > MAX_VERSION_BYTES:
        raise flight.FlightServerError(f"the version has {body.size} bytes; it may have at most {MAX_VERSION_BYTES}")
    try:
        return int(body.to_pybytes())
    except ValueError as error:
        raise flight.FlightServerError(f"{body.to_pybytes()!r} is not a version: {error}") from error


def _parse_ticket(ticket: bytes) -> tuple[WeightVersion, list[Chunk]]:
    try:
        fields = json.loads(ticket)
        version, pairs = fields["version"], fields["chunks"]
        if isinstance(version, int) and all(isinstance(index, int) for pair in pairs for index in pair):
            return version, [Chunk(piece, number) for piece, number in pairs]
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise flight.FlightServerError(f"invalid ticket: {error!r}") from error
    raise flight.FlightServerError("invalid ticket: version, pieces and chunk numbers must be integers")


class FlightBackend:
    """Version cache with a Flight server; see [`WeightBackend`][marin_rl.weights.publish.WeightBackend]."""

    def __init__(self, *, host: str, port: int, secret: str, training_host: TrainingHost, keep: int) -> None:
        """Bind the port and start the server.

        Args:
            host: Name or address to bind.
            port: Port to bind; 0 selects a free port.
            secret: The run's secret.
            training_host: The training host of this process.
            keep: Number of newest versions to keep.

        Raises:
            OSError: If the address cannot be bound.
        """
        check_secret(secret)
        self._cache: VersionCache[Snapshot] = VersionCache(keep, f"training host {training_host.index}")
        try:
            self._server = WeightServer(self._cache, secret, _location(host, port))
        except (pa.ArrowException, OSError) as error:
            raise OSError(f"cannot serve weights at {_location(host, port)}: {error}; correct host and port") from error
        self._address = _location(socket.gethostname() if host in WILDCARDS else host, self._server.port)

    @property
    def address(self) -> str:
        """`grpc+tls://host:port`, with this machine's name if the configured host is a wildcard."""
        return self._address

    def put(self, snapshot: Snapshot) -> None:
        """See [`WeightBackend`][marin_rl.weights.publish.WeightBackend]."""
        self._cache.put(snapshot.manifest.version, snapshot)

    def close(self) -> None:
        """See [`WeightBackend`][marin_rl.weights.publish.WeightBackend]. Active streams are aborted.

        A worker that stalls during a transfer delays this call until TCP closes its connection, about 20 seconds.
        """
        self._cache.clear()
        self._server.shutdown()


def _location(host: str, port: int) -> str:
    return f"grpc+tls://[{host}]:{port}" if ":" in host else f"grpc+tls://{host}:{port}"


CHANNEL_OPTIONS = {
    # Without this, streams to the same server share one connection.
    "grpc.use_local_subchannel_pool": 1,
    # Weights stay inside the cluster, so ignore the proxy variables of the environment.
    "grpc.enable_http_proxy": 0,
}
"""gRPC channel options."""


class FlightSource:
    """Client of one weight server; see [`WeightSource`][marin_rl.weights.fetch.WeightSource]."""

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
        """See [`WeightSource`][marin_rl.weights.fetch.WeightSource]."""
        return self._streams

    def versions(self) -> list[WeightVersion]:
        """See [`WeightSource`][marin_rl.weights.fetch.WeightSource]."""
        answer = self._act(flight.Action(LIST_VERSIONS, b""))
        try:
            return [int(version) for version in json.loads(answer)]
        except (ValueError, TypeError) as error:
            raise CorruptTransferError(f"{self}: the list of versions is corrupt: {answer[:80]!r}") from error

    def manifests(self, version: WeightVersion) -> list[Manifest]:
        """See [`WeightSource`][marin_rl.weights.fetch.WeightSource]."""
        body = verify(self._secret, self._act(flight.Action(GET_MANIFEST, str(version).encode())), str(self))
        return [Manifest.from_json(body)]

    def fetch(self, manifest: Manifest, chunks: Sequence[Chunk]) -> Generator[np.ndarray, None, None]:
        """See [`WeightSource`][marin_rl.weights.fetch.WeightSource]."""
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
