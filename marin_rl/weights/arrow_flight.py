# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""The sending end over Arrow Flight: one server for each training host, serving that host's shards.

A stream is a sequence of record batches with one column of bytes, a chunk each, whose memory is the snapshot's own.
Both ends authenticate in the TLS handshake, with certificates derived from the run's token, because gRPC reads a whole
message before a handler or middleware sees its headers: without the token no message is read at all.
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
"""What a stream carries."""

LIST_VERSIONS = "versions"
"""Action: answers with a JSON list of what is held."""

GET_MANIFEST = "manifest"
"""Action, with a version as its body: answers with the sealed manifest."""

VERSION_GONE = b"version gone"
"""The detail of an error that means that the version is not held."""

MAX_VERSION_BYTES = 32
"""Longest body of the action `manifest`."""

MAX_TICKET_BYTES_PER_CHUNK = 32
"""Longest entry of a ticket: two indices with brackets and commas."""

WILDCARDS = ("0.0.0.0", "::")
"""Hosts that mean every interface of the machine; nobody can connect to these names."""


class WeightServer(flight.FlightServerBase):
    """Serves the snapshots of a shelf."""

    def __init__(self, cache: VersionCache[Snapshot], token: str, location: str) -> None:
        """Start to serve, in threads of its own.

        Args:
            cache: what is served.
            token: the run's secret; callers without it are refused in the TLS handshake.
            location: `grpc+tls://host:port`; port 0 takes any free one.
        """
        identity = tls_identity(token)
        super().__init__(
            location,
            tls_certificates=[(identity.certificate, identity.key)],
            verify_client=True,
            root_certificates=identity.root,
        )
        self._cache = cache
        self._token = token

    def do_action(self, context: flight.ServerCallContext, action: flight.Action) -> list[bytes]:
        """Answer `versions` and `manifest`."""
        if action.type == LIST_VERSIONS:
            return [json.dumps(self._cache.versions()).encode()]
        if action.type == GET_MANIFEST:
            return [sign(self._token, self._snapshot(_parse_version(action.body)).manifest.to_json())]
        raise flight.FlightServerError(f"there is no action {action.type!r}; known are versions and manifest")

    def do_get(self, context: flight.ServerCallContext, ticket: flight.Ticket) -> flight.GeneratorStream:
        """Send chunks: the ticket is JSON, `{"version": v, "chunks": [[piece, number], …]}`."""
        # Every version has the same layout, so the newest bounds what a ticket for any version can name.
        newest = self._cache.newest()
        if newest is None:
            raise flight.FlightServerError("no version is held", extra_info=VERSION_GONE)
        count = newest[1].manifest.num_chunks
        limit = MAX_TICKET_BYTES_PER_CHUNK * (count + 2)
        if len(ticket.ticket) > limit:
            raise flight.FlightServerError(
                f"the ticket has {len(ticket.ticket)} bytes; for the {count} chunks of a version it takes at most "
                f"{limit}"
            )
        version, chunks = _parse_ticket(ticket.ticket)
        manifest = self._snapshot(version).manifest
        if wrong := [chunk for chunk in chunks if not manifest.has(chunk)]:
            raise flight.FlightServerError(
                f"version {version} has no chunk {wrong[0].number} of piece {wrong[0].piece}"
            )
        if len(set(chunks)) < len(chunks):
            raise flight.FlightServerError(f"a ticket for version {version} names a chunk twice")
        return flight.GeneratorStream(SCHEMA, self.send_chunks(version, chunks))

    def send_chunks(self, version: WeightVersion, chunks: list[Chunk]) -> Iterator[pa.RecordBatch]:
        """Generate the record batches of one stream, a chunk each. Tests of faults pause or damage streams here."""
        for chunk in chunks:
            # Asked anew each time: a worker that stands still must not keep an old version in memory.
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
        raise flight.FlightServerError(f"a version of {body.size} bytes was asked for; at most {MAX_VERSION_BYTES}")
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
        raise flight.FlightServerError(f"not a ticket: {error!r}") from error
    raise flight.FlightServerError("not a ticket: version, pieces and chunk numbers are integers")


class FlightOutlet:
    """A shelf and its server; see [`WeightBackend`][marin_rl.weights.backend.WeightBackend]."""

    def __init__(self, *, host: str, port: int, token: str, training_host: TrainingHost, keep: int) -> None:
        """Bind the port and serve.

        Args:
            host: name or address to bind.
            port: port to bind; 0 for any free one.
            token: the run's secret.
            training_host: whose shards are served.
            keep: versions that are held.

        Raises:
            OSError: if the address cannot be bound.
        """
        check_secret(token)
        self._cache: VersionCache[Snapshot] = VersionCache(keep, f"training host {training_host.index}")
        try:
            self._server = WeightServer(self._cache, token, _location(host, port))
        except (pa.ArrowException, OSError) as error:
            raise OSError(
                f"weights cannot be served at {_location(host, port)}: {error}; correct host and port"
            ) from error
        self._address = _location(socket.gethostname() if host in WILDCARDS else host, self._server.port)

    @property
    def address(self) -> str:
        """`grpc+tls://host:port`; the machine's own name where the host is a wildcard."""
        return self._address

    def put(self, snapshot: Snapshot) -> None:
        """See [`WeightBackend`][marin_rl.weights.backend.WeightBackend]."""
        self._cache.put(snapshot.manifest.version, snapshot)

    def close(self) -> None:
        """See [`WeightBackend`][marin_rl.weights.backend.WeightBackend]; streams under way are cut.

        A worker that stands still in mid-transfer holds this up until TCP gives its connection up, about 20 seconds.
        """
        self._cache.clear()
        self._server.shutdown()


def _location(host: str, port: int) -> str:
    return f"grpc+tls://[{host}]:{port}" if ":" in host else f"grpc+tls://{host}:{port}"
