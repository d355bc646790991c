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
import datetime
import hmac
import secrets
import socket
import threading
from collections.abc import Generator, Iterator, Sequence
from typing import TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.flight as flight
import pydantic
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from marin_rl.distributed.weight_manifest import (
    Chunk,
    CorruptTransferError,
    Manifest,
    Snapshot,
    VersionGoneError,
    WeightServerLostError,
    WrongSecretError,
)
from marin_rl.types import WeightVersion

T = TypeVar("T")

KEPT_VERSIONS = 2
"""Newest versions that a server keeps, so that transfers of the previous version can finish."""


@dataclasses.dataclass(frozen=True)
class _Ticket:
    """Request of a stream."""

    version: WeightVersion
    chunks: list[Chunk]


_TICKET = pydantic.TypeAdapter(_Ticket)
_VERSION = pydantic.TypeAdapter(WeightVersion)
_VERSIONS = pydantic.TypeAdapter(list[WeightVersion])

SCHEMA = pa.schema([pa.field("bytes", pa.uint8(), nullable=False)])
"""Arrow schema of a stream."""

LIST_VERSIONS = "versions"
"""Action that returns a JSON list of the available versions."""

GET_MANIFEST = "manifest"
"""Action that returns the manifest of the version in its body."""

VERSION_GONE = b"version gone"
"""Detail of the error for a version that is not available."""

WILDCARDS = ("0.0.0.0", "::")
"""Hosts that bind every network interface. Clients cannot connect to these names."""


def make_secret() -> str:
    """Make a new secret. Each launch makes one, so workers never read weights of an earlier launch."""
    return secrets.token_hex(32)


TLS_NAME = "weights.marin-rl"
"""Host name in the certificates of all weight servers, independent of the machine."""


@dataclasses.dataclass(frozen=True)
class TlsIdentity:
    """Certificates for mutual authentication of processes that share a secret."""

    root: bytes
    """Certificate (PEM) of the authority that must have issued the peer's certificate."""
    certificate: bytes
    """Certificate (PEM) of this process."""
    key: bytes
    """Private key (PEM, unencrypted) of both certificates."""


def tls_identity(secret: str) -> TlsIdentity:
    """Derive a key pair and certificates from the secret, so that only the secret has to be distributed.

    Processes with the same secret derive the same key and issuer. Their certificates differ only in the signature, so
    each process can verify the others. A TLS handshake reveals neither the secret nor the private key.

    Raises:
        ValueError: if the secret has fewer than 32 characters, or characters that are not printable ASCII.
    """
    if len(secret) < 32 or not (secret.isascii() and secret.isprintable()):
        raise ValueError(
            f"the secret of the weight transfer has {len(secret)} characters; it must have at least 32, all printable "
            "ASCII: use make_secret()"
        )
    digest = hmac.digest(secret.encode(), b"marin_rl TLS key", "sha512")
    # A P-256 private value is between 1 and the group order, which is slightly below 2**256.
    key = ec.derive_private_key(int.from_bytes(digest) % (2**255) + 1, ec.SECP256R1())
    issuer = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, f"{TLS_NAME} root")])
    server = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, TLS_NAME)])

    def certificate(subject: x509.Name, serial: int, *, is_root: bool) -> bytes:
        builder = x509.CertificateBuilder(
            issuer_name=issuer,
            subject_name=subject,
            public_key=key.public_key(),
            serial_number=serial,
            # Certificates need no expiry: each launch makes a new secret.
            not_valid_before=datetime.datetime(2000, 1, 1),
            not_valid_after=datetime.datetime(9999, 12, 31),
        )
        builder = builder.add_extension(x509.BasicConstraints(ca=is_root, path_length=None), critical=True)
        names = x509.SubjectAlternativeName([x509.DNSName(TLS_NAME)])
        builder = builder.add_extension(names, critical=False)
        return builder.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)

    return TlsIdentity(
        root=certificate(issuer, 1, is_root=True),
        certificate=certificate(server, 2, is_root=False),
        key=key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        ),
    )


class WeightServer(flight.FlightServerBase):
    """Serves the newest versions of one training host from memory; see `open_sender`."""

    def __init__(self, secret: str, name: str, *, host: str, port: int) -> None:
        """Bind the port and start serving in background threads.

        Callers without the run's secret are rejected in the TLS handshake. Errors name the training host by `name`.
        Port 0 selects a free port.

        Raises:
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
            return [self._snapshot(_parse(_VERSION, action.body.to_pybytes())).manifest.encode()]
        raise flight.FlightServerError(f"unknown action {action.type!r}; use versions or manifest")

    def do_get(self, context: flight.ServerCallContext, ticket: flight.Ticket) -> flight.GeneratorStream:
        """Stream the chunks of a JSON ticket, `{"version": v, "chunks": [[piece, number], …]}`."""
        request = _parse(_TICKET, ticket.ticket)
        version, chunks = request.version, request.chunks
        manifest = self._snapshot(version).manifest
        if unknown := [chunk for chunk in chunks if not manifest.has(chunk)]:
            raise flight.FlightServerError(
                f"version {version} has no chunk {unknown[0].number} of piece {unknown[0].piece}"
            )
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


def _parse(request: "pydantic.TypeAdapter[T]", text: bytes) -> T:
    try:
        return request.validate_json(text, strict=True)
    except pydantic.ValidationError as error:
        raise flight.FlightServerError(f"invalid request: {error}") from error


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

        The address is `grpc+tls://host:port`. Each of the concurrent streams has a separate connection. A call times
        out after `call_seconds`.
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
        return _VERSIONS.validate_json(self._act(flight.Action(LIST_VERSIONS, b"")), strict=True)

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
            raise WeightServerLostError(f"{self} does not respond: {reason}") from error
