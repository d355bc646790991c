# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Arrow Flight server for weights: each training host serves its own shards.

A stream is a sequence of record batches with one column of bytes. Each batch is one chunk and shares the memory of the
snapshot. Server and client authenticate in the TLS handshake with certificates derived from the run's secret. gRPC
reads a whole message before a handler or middleware sees its headers, so the server must reject callers without the
secret in the handshake.
"""

import json
import socket
from collections.abc import Iterator

import pyarrow as pa
import pyarrow.flight as flight

from marin_rl.types import WeightVersion
from marin_rl.weights.auth import check_secret, sign, tls_identity
from marin_rl.weights.errors import VersionGoneError
from marin_rl.weights.manifest import Chunk
from marin_rl.weights.snapshot import Snapshot, TrainingHost
from marin_rl.weights.version_cache import VersionCache

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
    """Version cache with a Flight server; see [`WeightBackend`][marin_rl.weights.backend.WeightBackend]."""

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
        """See [`WeightBackend`][marin_rl.weights.backend.WeightBackend]."""
        self._cache.put(snapshot.manifest.version, snapshot)

    def close(self) -> None:
        """See [`WeightBackend`][marin_rl.weights.backend.WeightBackend]. Active streams are aborted.

        A worker that stalls during a transfer delays this call until TCP closes its connection, about 20 seconds.
        """
        self._cache.clear()
        self._server.shutdown()


def _location(host: str, port: int) -> str:
    return f"grpc+tls://[{host}]:{port}" if ":" in host else f"grpc+tls://{host}:{port}"
