# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import pytest

from marin_rl.distributed.weights.secret import make_secret, tls_identity


def test_make_secret_returns_distinct_valid_secrets():
    created = {make_secret() for _ in range(20)}
    assert len(created) == 20
    for secret in created:
        tls_identity(secret)


@pytest.mark.parametrize("secret", ["", "x" * 31, "ä" * 40, "x" * 40 + "\n"])
def test_weak_secret_is_rejected(secret: str):
    with pytest.raises(ValueError, match=f"the secret of the weight transfer has {len(secret)} characters"):
        tls_identity(secret)


def test_certificates_reveal_no_secret():
    one, other = make_secret(), make_secret()
    assert tls_identity(one).key == tls_identity(one).key != tls_identity(other).key
    assert one.encode() not in tls_identity(one).root + tls_identity(one).certificate
