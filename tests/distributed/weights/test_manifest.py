# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from marin_rl.distributed.weights.manifest import (
    Bounds,
    CorruptTransferError,
    Manifest,
    bounds_of,
    find_gap,
    overlap,
    shape_of,
    slices_within,
    volume,
    whole,
)
from marin_rl.utils.devices.arrays import named_leaves, replace_leaves
from tests.distributed.weights.endpoints import snapshot_of

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


# Names of arrays.


class Layer(eqx.Module):
    weight: hax.NamedArray
    scale: float
    name: str = eqx.field(static=True)


def test_named_leaves_of_a_model():
    layer = Layer(hax.ones({"embed": 3}, dtype=jnp.bfloat16), 2.0, "first")
    leaves = named_leaves({"layers": [layer]})
    [name] = leaves
    assert name == "['layers'][0].weight[<flat index 0>]"
    replaced = replace_leaves({"layers": [layer]}, {name: jnp.zeros(3)})["layers"][0]
    assert replaced.weight.axes == layer.weight.axes
    assert replaced.weight.array.sum() == 0
    assert (replaced.scale, replaced.name) == (2.0, "first")


@pytest.mark.parametrize("array", [jax.random.key(0), np.array(["a"]), np.zeros(2, ">f4"), np.array([None])])
def test_leaves_without_plain_numbers_are_rejected(array):
    with pytest.raises(ValueError, match=r"\['w'\] has dtype .*; only plain numbers can be transferred"):
        named_leaves({"w": array})
