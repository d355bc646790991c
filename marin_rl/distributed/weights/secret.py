# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Secret of a run, which grants access to its weights, and the TLS certificates derived from it."""

import dataclasses
import datetime
import hmac
import secrets

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec


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
            "ASCII: use marin_rl.distributed.weights.secret.make_secret()"
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
