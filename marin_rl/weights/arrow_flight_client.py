# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""The receiving end over Arrow Flight."""

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
    WrongTokenError,
)
from marin_rl.weights.manifest import Chunk, Manifest

CHANNEL_OPTIONS = {
    # Streams to the same server would otherwise share one connection.
    "grpc.use_local_subchannel_pool": 1,
    # Weights stay inside the cluster, whatever the environment says about the way out.
    "grpc.enable_http_proxy": 0,
}
"""How gRPC connects."""


class FlightSource:
    """One weight server; see [`WeightSource`][marin_rl.weights.source.WeightSource]."""

    def __init__(self, address: str, token: str, *, streams: int, call_seconds: float) -> None:
        """Connect to nothing yet.

        Args:
            address: `grpc+tls://host:port`.
            token: the run's secret.
            streams: how many are read at the same time, each on a connection of its own.
            call_seconds: seconds after which a call counts as lost.
        """
        check_secret(token)
        self._address = address
        self._token = token
        self._streams = streams
        self._identity = tls_identity(token)
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
            raise CorruptTransferError(f"{self}: the list of versions is damaged: {answer[:80]!r}") from error

    def manifests(self, version: WeightVersion) -> list[Manifest]:
        """See [`WeightSource`][marin_rl.weights.source.WeightSource]."""
        body = verify(self._token, self._act(flight.Action(GET_MANIFEST, str(version).encode())), str(self))
        return [Manifest.from_json(body)]

    def fetch(self, manifest: Manifest, chunks: Sequence[Chunk]) -> Generator[np.ndarray, None, None]:
        """See [`WeightSource`][marin_rl.weights.source.WeightSource]."""
        asked = {"version": manifest.version, "chunks": [(chunk.piece, chunk.number) for chunk in chunks]}
        with self._connected() as client:
            reader = client.do_get(flight.Ticket(json.dumps(asked, separators=(",", ":")).encode()), self._options)
            if reader.schema != SCHEMA:
                raise CorruptTransferError(f"{self}: a stream of {reader.schema} instead of {SCHEMA}")
            try:
                for batch in reader:
                    yield np.frombuffer(batch.data.column(0).buffers()[1], np.uint8, count=batch.data.num_rows)
            finally:
                # A reader that leaves early tells the server, which would otherwise wait for it.
                reader.cancel()

    def _act(self, action: flight.Action) -> bytes:
        with self._connected() as client:
            return b"".join(result.body.to_pybytes() for result in client.do_action(action, self._options))

    @contextlib.contextmanager
    def _connected(self) -> Iterator[flight.FlightClient]:
        """A connection of its own, whose errors are this package's."""
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
            return WrongTokenError(f"{self} has another token, so it is another run's or an earlier launch's: {reason}")
        if isinstance(error, flight.FlightError) and error.extra_info == VERSION_GONE:
            return VersionGoneError(f"{self}: {reason}")
        if isinstance(error, pa.ArrowInvalid):
            return CorruptTransferError(f"{self}: what arrives cannot be read: {reason}")
        return ServerLostError(f"{self} does not answer: {reason}")
