# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""The secret of a run: who has it may read the run's weights, and can prove that a manifest is the run's own."""

import dataclasses
import datetime
import hashlib
import hmac
import secrets

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from marin_rl.weights.errors import CorruptTransferError

_DIGEST_BYTES = hashlib.sha256().digest_size


def make_secret() -> str:
    """A new secret. Every launch of a run makes its own, so that workers never read what an earlier launch left."""
    return secrets.token_hex(32)


def check_secret(token: str) -> None:
    """Refuse a secret that is none.

    Raises:
        ValueError: if it has fewer than 32 characters, or others than printable ASCII.
    """
    if len(token) < 32 or not (token.isascii() and token.isprintable()):
        raise ValueError(
            f"the token of the weight transfer has {len(token)} characters; it needs at least 32, printable ASCII: "
            "take one from marin_rl.weights.auth.make_secret()"
        )


def fingerprint(token: str) -> str:
    """16 hexadecimal digits that tell tokens apart and do not give them away."""
    return hmac.digest(token.encode(), b"marin_rl weights of this run", "sha256").hex()[:16]


TLS_NAME = "weights.marin-rl"
"""Host name in the certificates of weight servers, whatever machine they run on."""


@dataclasses.dataclass(frozen=True)
class TlsIdentity:
    """Certificates with which processes that share a token authenticate each other."""

    root: bytes
    """Certificate of the authority that the other side's certificate must come from: PEM."""
    certificate: bytes
    """This side's certificate: PEM."""
    key: bytes
    """The private key of both certificates: PEM, not encrypted."""


def tls_identity(token: str) -> TlsIdentity:
    """Derive a key pair and certificates from the token, so that only the token has to be distributed.

    Processes with the same token derive the same key and issuer; their certificates differ in the signature only, and
    each verifies the other's. Nothing sent in a TLS handshake reveals the token or the private key.

    Args:
        token: the run's secret.
    """
    digest = hmac.digest(token.encode(), b"marin_rl TLS key", "sha512")
    # P-256 takes a private value from 1 to below its order, which lies just under 2**256.
    key = ec.derive_private_key(int.from_bytes(digest) % (2**255) + 1, ec.SECP256R1())
    issuer = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, f"{TLS_NAME} root")])
    server = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, TLS_NAME)])

    def certificate(subject: x509.Name, serial: int, *, is_root: bool) -> bytes:
        builder = x509.CertificateBuilder(
            issuer_name=issuer,
            subject_name=subject,
            public_key=key.public_key(),
            serial_number=serial,
            # The token, which each start of a run makes anew, is what expires.
            not_valid_before=datetime.datetime(2000, 1, 1),
            not_valid_after=datetime.datetime(9999, 12, 31),
        )
        builder = builder.add_extension(x509.BasicConstraints(ca=is_root, path_length=None), critical=True)
        names = x509.SubjectAlternativeName([x509.DNSName(TLS_NAME)])
        builder = builder.add_extension(names, critical=False)
        return builder.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)

    pem, format_, encryption = (
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    return TlsIdentity(
        root=certificate(issuer, 1, is_root=True),
        certificate=certificate(server, 2, is_root=False),
        key=key.private_bytes(pem, format_, encryption),
    )


def sign(token: str, body: bytes) -> bytes:
    """Put proof (HMAC-SHA256) in front of a message that it was written with the token, and is whole."""
    return hmac.digest(token.encode(), body, "sha256") + body


def verify(token: str, sealed: bytes, source: str) -> bytes:
    """The message that was sealed.

    Args:
        token: the run's.
        sealed: what `sign` returned.
        source: where it comes from, for the message.

    Raises:
        CorruptTransferError: if it is not what was sealed with this token.
    """
    proof, body = sealed[:_DIGEST_BYTES], sealed[_DIGEST_BYTES:]
    if not hmac.compare_digest(proof, hmac.digest(token.encode(), body, "sha256")):
        raise CorruptTransferError(f"{source}: the manifest ({len(sealed)} bytes) is damaged, or not the run's own")
    return body
