# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""The sending end over Arrow Flight: one server for each training host, serving that host's shards.

A stream is a sequence of record batches with one column of bytes, a chunk each, whose memory is the snapshot's own.
"""

import hmac
import json
import socket
from collections.abc import Iterator

import pyarrow as pa
import pyarrow.flight as flight

from marin_rl.types import WeightVersion
from marin_rl.weights.errors import VersionGoneError
from marin_rl.weights.manifest import Chunk
from marin_rl.weights.shelf import VersionShelf
from marin_rl.weights.snapshot import Snapshot, TrainingHost
from marin_rl.weights.token import check_token, seal

SCHEMA = pa.schema([pa.field("bytes", pa.uint8(), nullable=False)])
"""What a stream carries."""

LIST_VERSIONS = "versions"
"""Action: answers with a JSON list of what is held."""

GET_MANIFEST = "manifest"
"""Action, with a version as its body: answers with the sealed manifest."""

VERSION_GONE = b"version gone"
"""The detail of an error that means that the version is not held."""

WILDCARDS = ("0.0.0.0", "::")
"""Hosts that mean every interface of the machine; nobody can connect to these names."""


class TokenCheck(flight.ServerMiddlewareFactory):
    """Refuses every call that does not carry the token."""

    def __init__(self, token: str) -> None:
        super().__init__()
        self._expected = bearer(token)

    def start_call(self, info: flight.CallInfo, headers: dict[str, list[str | bytes]]) -> None:
        """Raise FlightUnauthenticatedError unless exactly one right token came with the call."""
        found = headers.get("authorization", [])
        offered = [value.encode() if isinstance(value, str) else value for value in found]
        if len(offered) != 1 or not hmac.compare_digest(offered[0], self._expected):
            raise flight.FlightUnauthenticatedError("the token is missing or not this run's")


def bearer(token: str) -> bytes:
    """The header that carries the token."""
    return b"Bearer " + token.encode()


class WeightServer(flight.FlightServerBase):
    """Serves the snapshots of a shelf."""

    def __init__(self, shelf: VersionShelf[Snapshot], token: str, location: str) -> None:
        """Start to serve, in threads of its own.

        Args:
            shelf: what is served.
            token: what callers have to know.
            location: `grpc://host:port`; port 0 takes any free one.
        """
        super().__init__(location, middleware={"token": TokenCheck(token)})
        self._shelf = shelf
        self._token = token

    def do_action(self, context: flight.ServerCallContext, action: flight.Action) -> list[bytes]:
        """Answer `versions` and `manifest`."""
        if action.type == LIST_VERSIONS:
            return [json.dumps(self._shelf.versions()).encode()]
        if action.type == GET_MANIFEST:
            return [seal(self._token, self._snapshot(int(action.body.to_pybytes())).manifest.to_json())]
        raise flight.FlightServerError(f"there is no action {action.type!r}; known are versions and manifest")

    def do_get(self, context: flight.ServerCallContext, ticket: flight.Ticket) -> flight.GeneratorStream:
        """Send chunks: the ticket is JSON, `{"version": v, "chunks": [[piece, number], …]}`."""
        asked = json.loads(ticket.ticket)
        chunks = [Chunk(piece, number) for piece, number in asked["chunks"]]
        self._snapshot(asked["version"])
        return flight.GeneratorStream(SCHEMA, self.send_chunks(asked["version"], chunks))

    def send_chunks(self, version: WeightVersion, chunks: list[Chunk]) -> Iterator[pa.RecordBatch]:
        """Generate the record batches of one stream, a chunk each. Tests of faults pause or damage streams here."""
        for chunk in chunks:
            # Asked anew each time: a worker that stands still must not keep an old version in memory.
            data = self._snapshot(version).chunk(chunk)
            column = pa.Array.from_buffers(pa.uint8(), len(data), [None, pa.py_buffer(data)])
            yield pa.record_batch([column], schema=SCHEMA)

    def _snapshot(self, version: WeightVersion) -> Snapshot:
        try:
            return self._shelf.get(version)
        except VersionGoneError as error:
            raise flight.FlightServerError(str(error), extra_info=VERSION_GONE) from error


class FlightOutlet:
    """A shelf and its server; see [`WeightOutlet`][marin_rl.weights.outlet.WeightOutlet]."""

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
        check_token(token)
        self._shelf: VersionShelf[Snapshot] = VersionShelf(keep, f"training host {training_host.index}")
        try:
            self._server = WeightServer(self._shelf, token, _location(host, port))
        except (pa.ArrowException, OSError) as error:
            raise OSError(
                f"weights cannot be served at {_location(host, port)}: {error}; correct host and port"
            ) from error
        self._address = _location(socket.gethostname() if host in WILDCARDS else host, self._server.port)

    @property
    def address(self) -> str:
        """`grpc://host:port`; the machine's own name where the host is a wildcard."""
        return self._address

    def put(self, snapshot: Snapshot) -> None:
        """See [`WeightOutlet`][marin_rl.weights.outlet.WeightOutlet]."""
        self._shelf.put(snapshot.manifest.version, snapshot)

    def close(self) -> None:
        """See [`WeightOutlet`][marin_rl.weights.outlet.WeightOutlet]; streams under way are cut.

        A worker that stands still in mid-transfer holds this up until TCP gives its connection up, about 20 seconds.
        """
        self._shelf.clear()
        self._server.shutdown()


def _location(host: str, port: int) -> str:
    return f"grpc://[{host}]:{port}" if ":" in host else f"grpc://{host}:{port}"
