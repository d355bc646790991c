# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import numpy as np
import pytest

from marin_rl.distributed.weight_manifest import CorruptTransferError, Manifest
from tests.distributed.weight_endpoints import snapshot_of


def make() -> Manifest:
    return snapshot_of({"a": np.arange(700, dtype=np.float32), "b": np.float32([[1, 2]])}, 3).manifest


def test_manifest_survives_encoding():
    assert Manifest.decode(make().encode(), "here") == make()


@pytest.mark.parametrize("text", [b"", b"[]", b'{"pieces": 3}', make().encode()[:-1]])
def test_text_that_is_no_manifest_is_rejected(text: bytes):
    with pytest.raises(CorruptTransferError, match=rf"here: the manifest \({len(text)} bytes\) is corrupt: "):
        Manifest.decode(text, "here")


def test_chunks_partition_a_piece():
    manifest = make()
    assert [manifest.span(chunk) for chunk in manifest.chunks(0)] == [(0, 1024), (1024, 2048), (2048, 2800)]
    assert [manifest.span(chunk) for chunk in manifest.chunks(1)] == [(0, 8)]
