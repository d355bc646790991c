# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import pytest

from marin_rl.weights.auth import check_secret, fingerprint, make_secret, sign, verify
from marin_rl.weights.protocol import CorruptTransferError


def test_make_secret_returns_distinct_valid_secrets():
    created = {make_secret() for _ in range(20)}
    assert len(created) == 20
    for secret in created:
        check_secret(secret)


@pytest.mark.parametrize("secret", ["", "x" * 31, "ä" * 40, "x" * 40 + "\n"])
def test_weak_secret_is_rejected(secret: str):
    with pytest.raises(ValueError, match=f"the secret of the weight transfer has {len(secret)} characters"):
        check_secret(secret)


def test_verify_returns_the_signed_message():
    secret = make_secret()
    assert verify(secret, sign(secret, b"body"), "here") == b"body"
    assert verify(secret, sign(secret, b""), "here") == b""


def test_verify_detects_every_bit_flip():
    secret = make_secret()
    sealed = sign(secret, b"body")
    for position in range(len(sealed)):
        changed = bytearray(sealed)
        changed[position] ^= 1
        with pytest.raises(CorruptTransferError, match="here: the manifest"):
            verify(secret, bytes(changed), "here")
    for length in range(len(sealed)):
        with pytest.raises(CorruptTransferError, match=rf"manifest \({length} bytes\)"):
            verify(secret, sealed[:length], "here")
    with pytest.raises(CorruptTransferError):
        verify(make_secret(), sealed, "here")


def test_fingerprint_identifies_secret_without_revealing_it():
    one, other = make_secret(), make_secret()
    assert fingerprint(one) == fingerprint(one) != fingerprint(other)
    assert fingerprint(one) not in one
