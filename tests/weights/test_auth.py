# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import pytest

from marin_rl.weights.auth import check_secret, fingerprint, make_secret, sign, verify
from marin_rl.weights.errors import CorruptTransferError


def test_tokens_differ_and_are_fit_for_use():
    tokens = {make_secret() for _ in range(20)}
    assert len(tokens) == 20
    for token in tokens:
        check_secret(token)


@pytest.mark.parametrize("token", ["", "x" * 31, "ä" * 40, "x" * 40 + "\n"])
def test_a_weak_token_is_refused(token: str):
    with pytest.raises(ValueError, match=f"the token of the weight transfer has {len(token)} characters"):
        check_secret(token)


def test_a_sealed_message_comes_out_as_it_went_in():
    token = make_secret()
    assert verify(token, sign(token, b"body"), "here") == b"body"
    assert verify(token, sign(token, b""), "here") == b""


def test_every_changed_bit_is_seen():
    token = make_secret()
    sealed = sign(token, b"body")
    for position in range(len(sealed)):
        changed = bytearray(sealed)
        changed[position] ^= 1
        with pytest.raises(CorruptTransferError, match="here: the manifest"):
            verify(token, bytes(changed), "here")
    for length in range(len(sealed)):
        with pytest.raises(CorruptTransferError, match=rf"manifest \({length} bytes\)"):
            verify(token, sealed[:length], "here")
    with pytest.raises(CorruptTransferError):
        verify(make_secret(), sealed, "here")


def test_a_fingerprint_tells_tokens_apart_without_holding_them():
    one, other = make_secret(), make_secret()
    assert fingerprint(one) == fingerprint(one) != fingerprint(other)
    assert fingerprint(one) not in one
