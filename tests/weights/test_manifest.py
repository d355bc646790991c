# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import numpy as np
import pytest

from marin_rl.weights.manifest import Chunk, Manifest, Piece
from marin_rl.weights.protocol import CorruptTransferError
from tests.weights.ends import snapshot_of


def make() -> Manifest:
    return snapshot_of({"a": np.arange(700, dtype=np.float32), "b": np.float32([[1, 2]])}, 3).manifest


def test_manifest_json_roundtrip():
    assert Manifest.from_json(make().to_json()) == make()


@pytest.mark.parametrize("text", [b"", b"[]", b"{}", b"7", b'{"pieces": 3}', b'{"pieces": [], "version": 1}'])
def test_invalid_manifest_is_rejected(text: bytes):
    with pytest.raises(ValueError, match=r"manifest|Expecting value"):
        Manifest.from_json(text)


def test_chunks_partition_a_piece():
    manifest = make()
    assert [manifest.span(chunk) for chunk in manifest.chunks(0)] == [(0, 1024), (1024, 2048), (2048, 2800)]
    assert [manifest.span(chunk) for chunk in manifest.chunks(1)] == [(0, 8)]


def test_check_detects_wrong_length_and_content():
    snapshot = snapshot_of({"a": np.arange(700, dtype=np.float32)}, 3)
    chunk = Chunk(0, 1)
    good = snapshot.chunk(chunk)
    snapshot.manifest.check(chunk, good, "here")
    with pytest.raises(CorruptTransferError, match=r"here: chunk 1 of piece .'0:700'. of .'a'., version 3, has 1023"):
        snapshot.manifest.check(chunk, good[:-1], "here")
    for position in (0, 517, 1023):
        for bit in range(8):
            bad = good.copy()
            bad[position] ^= 1 << bit
            with pytest.raises(CorruptTransferError, match="fails its checksum"):
                snapshot.manifest.check(chunk, bad, "here")


@pytest.mark.parametrize("bounds", [((0, 4), (0, 3)), ((-1, 2), (0, 2)), ((3, 4), (1, 2))])
def test_piece_outside_array_is_rejected(bounds):
    with pytest.raises(ValueError, match=r"outside the array, which has shape \(3, 2\)"):
        Piece("w", (3, 2), "float32", bounds, ())
