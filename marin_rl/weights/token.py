# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""The secret of a run: who has it may read the run's weights, and can prove that a manifest is the run's own."""

import hashlib
import hmac
import secrets

from marin_rl.weights.errors import CorruptTransferError

_DIGEST_BYTES = hashlib.sha256().digest_size


def make_token() -> str:
    """A new secret. Every launch of a run makes its own, so that workers never read what an earlier launch left."""
    return secrets.token_hex(32)


def check_token(token: str) -> None:
    """Refuse a secret that is none.

    Raises:
        ValueError: if it has fewer than 32 characters, or others than printable ASCII.
    """
    if len(token) < 32 or not (token.isascii() and token.isprintable()):
        raise ValueError(
            f"the token of the weight transfer has {len(token)} characters; it needs at least 32, printable ASCII: "
            "take one from marin_rl.weights.token.make_token()"
        )


def fingerprint(token: str) -> str:
    """16 hexadecimal digits that tell tokens apart and do not give them away."""
    return hmac.digest(token.encode(), b"marin_rl weights of this run", "sha256").hex()[:16]


def seal(token: str, body: bytes) -> bytes:
    """Put proof (HMAC-SHA256) in front of a message that it was written with the token, and is whole."""
    return hmac.digest(token.encode(), body, "sha256") + body


def unseal(token: str, sealed: bytes, source: str) -> bytes:
    """The message that was sealed.

    Args:
        token: the run's.
        sealed: what `seal` returned.
        source: where it comes from, for the message.

    Raises:
        CorruptTransferError: if it is not what was sealed with this token.
    """
    proof, body = sealed[:_DIGEST_BYTES], sealed[_DIGEST_BYTES:]
    if not hmac.compare_digest(proof, hmac.digest(token.encode(), body, "sha256")):
        raise CorruptTransferError(f"{source}: the manifest ({len(sealed)} bytes) is damaged, or not the run's own")
    return body
