# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import hmac

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from marin_rl.weights.manifest import (
    Bounds,
    Chunk,
    Manifest,
    Piece,
    bounds_of,
    check_secret,
    find_gap,
    make_secret,
    overlap,
    shape_of,
    slices_within,
    volume,
    whole,
)
from marin_rl.weights.protocol import CorruptTransferError
from tests.weights.endpoints import snapshot_of

SHAPE = (5, 4)


def boxes() -> st.SearchStrategy[Bounds]:
    def edges(size: int) -> st.SearchStrategy[tuple[int, int]]:
        return st.tuples(st.integers(0, size), st.integers(0, size)).map(lambda pair: (min(pair), max(pair)))

    return st.tuples(*(edges(size) for size in SHAPE))


def mask(box: Bounds) -> np.ndarray:
    marked = np.zeros(SHAPE, dtype=bool)
    marked[tuple(slice(start, stop) for start, stop in box)] = True
    return marked


@given(boxes(), boxes())
def test_overlap_is_the_intersection_of_masks(left: Bounds, right: Bounds):
    shared = overlap(left, right)
    both = mask(left) & mask(right)
    assert (shared is None) == (not both.any())
    if shared is not None:
        np.testing.assert_array_equal(mask(shared), both)


@given(boxes(), st.lists(boxes(), max_size=5))
def test_gap_is_in_target_and_not_covered(wanted: Bounds, held: list[Bounds]):
    missing = mask(wanted)
    for box in held:
        missing &= ~mask(box)
    gap = find_gap(wanted, held)
    assert (gap is None) == (not missing.any())
    if gap is not None:
        assert volume(gap) > 0
        assert missing[mask(gap)].all()


@given(boxes(), boxes())
def test_slices_within_a_box_select_the_same_elements(left: Bounds, right: Bounds):
    shared = overlap(left, right)
    if shared is not None:
        array = np.arange(np.prod(SHAPE)).reshape(SHAPE)
        inside = array[slices_within(left, whole(SHAPE))]
        np.testing.assert_array_equal(inside[slices_within(shared, left)], array[slices_within(shared, whole(SHAPE))])


def test_scalar_has_one_element():
    assert bounds_of((), ()) == ()
    assert volume(()) == 1
    assert overlap((), ()) == ()
    assert find_gap((), []) == ()
    assert find_gap((), [()]) is None
    assert shape_of(((2, 2), (0, 3))) == (0, 3)


def make() -> Manifest:
    return snapshot_of({"a": np.arange(700, dtype=np.float32), "b": np.float32([[1, 2]])}, 3).manifest


def test_verify_returns_the_signed_manifest():
    secret = make_secret()
    assert Manifest.verify(make().sign(secret), secret, "here") == make()


@pytest.mark.parametrize("text", [b"", b"[]", b"{}", b"7", b'{"pieces": 3}', b'{"pieces": [], "version": 1}'])
def test_signed_text_that_is_no_manifest_is_rejected(text: bytes):
    secret = make_secret()
    with pytest.raises(ValueError, match=r"validation errors? for Manifest"):
        Manifest.verify(hmac.digest(secret.encode(), text, "sha256") + text, secret, "here")


def test_verify_detects_every_bit_flip():
    secret = make_secret()
    signed = Manifest(3, 0, 1, 1024, ()).sign(secret)
    for position in range(len(signed)):
        changed = bytearray(signed)
        changed[position] ^= 1
        with pytest.raises(CorruptTransferError, match="here: the manifest"):
            Manifest.verify(bytes(changed), secret, "here")
    for length in range(len(signed)):
        with pytest.raises(CorruptTransferError, match=rf"manifest \({length} bytes\)"):
            Manifest.verify(signed[:length], secret, "here")
    with pytest.raises(CorruptTransferError):
        Manifest.verify(signed, make_secret(), "here")


def test_make_secret_returns_distinct_valid_secrets():
    created = {make_secret() for _ in range(20)}
    assert len(created) == 20
    for secret in created:
        check_secret(secret)


@pytest.mark.parametrize("secret", ["", "x" * 31, "ä" * 40, "x" * 40 + "\n"])
def test_weak_secret_is_rejected(secret: str):
    with pytest.raises(ValueError, match=f"the secret of the weight transfer has {len(secret)} characters"):
        check_secret(secret)


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
